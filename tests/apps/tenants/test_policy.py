"""What an instance and a gateway are told: never less than what changed, whatever comes between."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import transaction

from tenants import queries, services
from tenants.domain.fence import FAST_MS, SLOW_MS
from tenants.models import Cell, Counter, PolicyEntry, RuntimeInstance
from tests import make

Elsewhere = Callable[[Callable[[], Any]], Any]


def ask(process: Any, *, since: str = "", now: datetime) -> queries.Policy | None:
    return queries.policy(services.poll(process.key, since=since, now=now), since=since)


def told(policy: queries.Policy | None) -> dict[str, str]:
    return {} if policy is None else {row["tenant"]: row["accepts"] for row in policy.tenants}


@pytest.fixture
def joined(cast: make.Cast, process: Any, now: datetime) -> Any:
    one = process(cast.cell)
    one.join(now=now)
    return one


@pytest.mark.django_db
def test_the_first_policy_is_full(joined: Any, now: datetime) -> None:
    policy = ask(joined, now=now)
    assert policy is not None
    assert policy.full
    assert told(policy) == {"acme": "all", "bolt": "all", "core": "all"}
    assert policy.cell == {}


@pytest.mark.django_db
def test_a_later_policy_holds_only_what_changed(
    cast: make.Cast, joined: Any, now: datetime
) -> None:
    first = ask(joined, now=now)
    assert first is not None
    assert ask(joined, since=str(first.version), now=now) is None
    services.publish(cast.bolt, cast.cell, accepts="none")
    second = ask(joined, since=str(first.version), now=now)
    assert second is not None
    assert (second.full, second.cell, told(second)) == (False, None, {"bolt": "none"})
    assert second.version.number == first.version.number + 1


@pytest.mark.django_db
def test_a_changed_cell_part_comes_with_its_version(
    cast: make.Cast, joined: Any, now: datetime
) -> None:
    first = ask(joined, now=now)
    assert first is not None
    number = first.version.number + 1
    Cell.objects.filter(pk=cast.cell.pk).update(
        policy_version=number, document_version=number, document={"shifts": []}
    )
    second = ask(joined, since=str(first.version), now=now)
    assert second is not None
    assert (second.cell, second.tenants) == ({"shifts": []}, [])


@pytest.mark.django_db
@pytest.mark.parametrize("since", ["", "nonsense", "{other}.{n}", "{epoch}.-1"])
def test_what_can_not_be_a_version_of_ours_is_answered_in_full(
    joined: Any, now: datetime, since: str
) -> None:
    first = ask(joined, now=now)
    assert first is not None
    epoch, n = first.version.epoch, first.version.number
    text = since.format(other="f" * 12, epoch=epoch, n=n)
    again = ask(joined, since=text, now=now)
    assert again is not None
    assert again.full
    assert len(again.tenants) == 3


@pytest.mark.django_db
def test_after_a_new_epoch_an_old_version_is_answered_in_full(joined: Any, now: datetime) -> None:
    first = ask(joined, now=now)
    assert first is not None
    Counter.objects.update(epoch="0" * 12)
    again = ask(joined, since=str(first.version), now=now)
    assert again is not None
    assert again.full


@pytest.mark.django_db
def test_a_full_policy_has_the_tombstones_too(cast: make.Cast, joined: Any, now: datetime) -> None:
    with transaction.atomic():
        services.place(
            cast.acme, cell=cast.other_cell, store=cast.other_store, by="m", reason="", now=now
        )
    policy = ask(joined, now=now)
    assert policy is not None
    [acme] = [row for row in policy.tenants if row["tenant"] == "acme"]
    assert (acme["accepts"], acme["moved_to"]) == ("moved", "cell-eu1-b")


@pytest.mark.django_db
def test_an_instance_sees_nothing_of_another_cell(
    cast: make.Cast, process: Any, now: datetime
) -> None:
    there = process(cast.other_cell)
    there.join(now=now)
    policy = ask(there, now=now)
    assert policy is not None
    assert policy.tenants == []


@pytest.mark.django_db
def test_a_token_of_another_cell_may_not_ask(cast: make.Cast, joined: Any, now: datetime) -> None:
    with pytest.raises(services.NotYourCell):
        services.poll(joined.key, cells=[cast.other_cell.pk], now=now)
    assert joined.row.polled_at is None


@pytest.mark.django_db
@pytest.mark.parametrize("key", ["gone", "unknown", "lapsed"])
def test_who_is_gone_unknown_or_lapsed_gets_no_policy(joined: Any, now: datetime, key: str) -> None:
    if key == "gone":
        services.leave(joined.key, now=now)
    if key == "unknown":
        joined.key = "0" * 32
    if key == "lapsed":
        now += timedelta(seconds=900 + 5 + 60)
    with pytest.raises(services.InstanceGone):
        ask(joined, now=now)


@pytest.mark.django_db
def test_a_poll_at_the_slow_cadence_is_two_reads(
    joined: Any, now: datetime, django_assert_num_queries: Any
) -> None:
    first = ask(joined, now=now)
    assert first is not None
    with django_assert_num_queries(1):
        assert ask(joined, since=str(first.version), now=now + timedelta(seconds=5)) is None
    with django_assert_num_queries(2):
        assert ask(joined, since="", now=now + timedelta(seconds=10)) is not None


@pytest.mark.django_db
def test_the_fast_cadence_is_told_noted_and_ended(
    cast: make.Cast, joined: Any, now: datetime
) -> None:
    asking = services.poll(joined.key, now=now)
    assert (asking.instance.poll_after_ms, joined.row.hurried_at) == (SLOW_MS, None)
    services.hurry([cast.cell], until=now + timedelta(seconds=60))
    later = now + timedelta(seconds=5)
    assert services.poll(joined.key, now=later).instance.poll_after_ms == FAST_MS
    # Told now, so not yet heard from at that cadence.
    assert [word.id for word in queries.fence_waits_for(cast.cell, now=later)] == [joined.row.pk]
    later += timedelta(milliseconds=250)
    services.poll(joined.key, now=later)
    assert queries.fence_waits_for(cast.cell, now=later) == []
    later = now + timedelta(seconds=60)
    assert services.poll(joined.key, now=later).instance.poll_after_ms == SLOW_MS
    assert joined.row.hurried_at is None


@pytest.mark.django_db
def test_slow_polls_are_noted_now_and_then(joined: Any, now: datetime) -> None:
    services.poll(joined.key, now=now)
    services.poll(joined.key, now=now + timedelta(seconds=5))
    assert joined.row.polled_at == now
    services.poll(joined.key, now=now + timedelta(seconds=15))
    assert joined.row.polled_at == now + timedelta(seconds=15)


@pytest.mark.django_db(transaction=True, serialized_rollback=True)
def test_a_change_that_commits_between_two_reads_is_never_skipped(
    cast: make.Cast, joined: Any, now: datetime, elsewhere: Elsewhere, after_statement: Any
) -> None:
    """Publish from another connection after each statement of a poll; poll on until quiet.

    What the instance then holds must be what is published. Had the entries been read before
    the version, the change would hide behind a version that already covers it.
    """
    policy = ask(joined, now=now)
    assert policy is not None
    held, since = told(policy), str(policy.version)
    statement, interrupted = 0, 0
    while True:
        closed = PolicyEntry.objects.get(cell=cast.cell, tenant=cast.bolt).accepts == "none"

        def publish(accepts: Any = "all" if closed else "none") -> None:
            def work() -> None:
                with transaction.atomic():
                    services.publish(cast.bolt, cast.cell, accepts=accepts)

            elsewhere(work)

        # Something is always due, so that a poll reads entries as well.
        with transaction.atomic():
            services.publish(cast.core, cast.cell, accepts="none" if statement % 2 else "all")
        with after_statement(statement, publish) as ran:
            policy = ask(joined, since=since, now=now)
        assert policy is not None
        held |= told(policy)
        since = str(policy.version)
        if ran() <= statement:
            break
        interrupted += 1
        while (policy := ask(joined, since=since, now=now)) is not None:
            held |= told(policy)
            since = str(policy.version)
        truth = dict(
            PolicyEntry.objects.filter(cell=cast.cell).values_list("tenant__slug", "accepts")
        )
        assert held == truth, f"after statement {statement}"
        statement += 1
    assert interrupted >= 2


@pytest.mark.django_db(transaction=True, serialized_rollback=True)
def test_a_placement_that_commits_between_two_reads_is_never_skipped(
    cast: make.Cast, now: datetime, elsewhere: Elsewhere, after_statement: Any
) -> None:
    feed = queries.placement_feed(since="")
    assert feed is not None
    held, since = {row["tenant"]: row["cell"] for row in feed.tenants}, str(feed.version)
    homes = [(cast.other_cell, cast.other_store), (cast.cell, cast.store)]
    statement, interrupted = 0, 0
    while True:
        cell, store = homes[statement % 2]

        def place(tenant: Any, cell: Any = cell, store: Any = store) -> None:
            with transaction.atomic():
                services.place(tenant, cell=cell, store=store, by="m", reason="", now=now)

        place(cast.core)
        with after_statement(statement, lambda: elsewhere(lambda: place(cast.acme))) as ran:
            feed = queries.placement_feed(since=since)
        assert feed is not None
        held |= {row["tenant"]: row["cell"] for row in feed.tenants}
        since = str(feed.version)
        if ran() <= statement:
            break
        interrupted += 1
        while (feed := queries.placement_feed(since=since)) is not None:
            held |= {row["tenant"]: row["cell"] for row in feed.tenants}
            since = str(feed.version)
        assert held["acme"] == cell.slug, f"after statement {statement}"
        statement += 1
    assert interrupted >= 2


@pytest.mark.django_db(transaction=True, serialized_rollback=True)
@pytest.mark.parametrize("holds", [False, True], ids=["with no policy", "with today's policy"])
def test_no_first_policy_lets_turns_in_that_a_proof_has_overlooked(
    cast: make.Cast,
    process: Any,
    now: datetime,
    elsewhere: Elsewhere,
    after_statement: Any,
    holds: bool,
) -> None:
    """Close the fence and prove it after each statement of an instance's first poll.

    If the instance is left with `all`, the proof made in the meantime must not have held: the
    poll was noted before the policy was read. That goes for one that names a version, too,
    and is told that nothing has changed since.
    """
    statement = 0
    outcomes = set()
    while True:
        with transaction.atomic():
            services.publish(cast.acme, cast.cell, accepts="all")
        newcomer = process(cast.cell, boot=f"boot-{statement}")
        newcomer.join(now=now)
        number = Cell.objects.get(pk=cast.cell.pk).policy_version
        since = f"{queries.epoch()}.{number}" if holds else ""
        proofs: list[bool] = []

        def close(proofs: list[bool] = proofs) -> None:
            def work() -> None:
                with transaction.atomic():
                    version = services.publish(cast.acme, cast.cell, accepts="none")
                proofs.append(queries.fence_proof(cast.cell, cast.acme, version, now=now).drained)

            elsewhere(work)

        with after_statement(statement, close) as ran:
            accepts = told(ask(newcomer, since=since, now=now)).get("acme", "all")
        if ran() <= statement:
            break
        [drained] = proofs
        outcomes.add((accepts, drained))
        assert not (accepts == "all" and drained), f"after statement {statement}"
        services.leave(newcomer.key, now=now)
        statement += 1
    # Both ways occurred, so the test looked at the dangerous moment.
    assert ("all", False) in outcomes
    assert any(accepts == "none" for accepts, _ in outcomes)


@pytest.mark.django_db
def test_the_feed_says_where_tenants_live(cast: make.Cast, now: datetime) -> None:
    feed = queries.placement_feed(since="")
    assert feed is not None
    assert feed.full
    acme = next(row for row in feed.tenants if row["tenant"] == "acme")
    assert acme == {
        "tenant": "acme",
        "app_name": "support.acme",
        "cell": "cell-eu1-a",
        "cell_url": "",
        "store": "store-eu1-a",
        "placement_version": f"{queries.epoch()}.{cast.acme.placement.placement_version}",
        "sides": None,
        "home_region": "eu1",
        "fail_mode": "closed",
    }
    assert queries.placement_feed(since=str(feed.version)) is None
    services.set_cell_url(cast.other_cell, url="https://b.eu", by="ada", now=now)
    changed = queries.placement_feed(since=str(feed.version))
    # Nobody lives there: the version is new and no row is.
    assert changed is not None
    assert (changed.full, changed.tenants) == (False, [])


@pytest.mark.django_db
def test_a_feed_version_of_another_epoch_is_answered_in_full(cast: make.Cast) -> None:
    feed = queries.placement_feed(since=f"{'f' * 12}.{Counter.objects.get().feed_version}")
    assert feed is not None
    assert feed.full
    assert len(feed.tenants) == 3


@pytest.mark.django_db
def test_an_instance_never_leaks_into_a_full_policy_of_a_gone_one(
    joined: Any, now: datetime
) -> None:
    RuntimeInstance.objects.update(gone_at=now, gone_why="dead")
    with pytest.raises(services.InstanceGone):
        ask(joined, now=now)
