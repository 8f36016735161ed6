"""Joining, reporting, leaving: whose word counts, and that it counts once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import connections, transaction
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from durable.clock import database_now
from tenants import queries, services
from tenants.domain.fence import FAST_MS, SLOW_MS
from tenants.domain.reports import Dirty, Usage
from tenants.models import (
    AuditEntry,
    Cell,
    Counter,
    DirtyLine,
    Grants,
    RuntimeInstance,
    UsageLine,
)
from tenants.services import instances
from tenants.tasks import sweep
from tests import make

Elsewhere = Callable[[Callable[[], Any]], Any]
LEASE = timedelta(minutes=15)
# Lease, margin and longest turn.
OVER = LEASE + timedelta(seconds=5 + 60)
# Past three polls at the slow cadence, each a tenth late.
SILENT = timedelta(seconds=17)


@pytest.fixture
def joined(cast: make.Cast, process: Any, now: datetime) -> Any:
    one = process(cast.cell)
    one.join(now=now)
    services.poll(one.key, now=now)
    return one


def applied(cell: Cell) -> str:
    return f"{queries.epoch()}.{Cell.objects.get(pk=cell.pk).policy_version}"


def usage(now: datetime, tenant: str = "acme", **counts: Any) -> Usage:
    return Usage(tenant, now.replace(second=0), **counts)


def turns(tenant: str = "acme") -> int:
    return sum(UsageLine.objects.filter(tenant__slug=tenant).values_list("turns", flat=True))


@pytest.mark.django_db
def test_an_accepted_report_renews_the_lease_and_keeps_its_word(
    cast: make.Cast, joined: Any, now: datetime
) -> None:
    later = now + timedelta(seconds=30)
    said = joined.next_report(
        applied_version=applied(cast.cell), in_flight={"acme": 2, "bolt": 0}, in_flight_older={}
    )
    answer = services.report(said, now=later)
    assert answer.lease_seconds == LEASE.total_seconds()
    assert str(answer.version) == applied(cast.cell)
    row = joined.row
    assert (row.seq, row.reported_at, row.lease_until) == (1, later, later + LEASE)
    assert (row.applied_version, row.in_flight) == (answer.version.number, {"acme": 2})


@pytest.mark.django_db
def test_a_report_is_a_handful_of_statements(
    cast: make.Cast, joined: Any, now: datetime, django_assert_max_num_queries: Any
) -> None:
    services.track(cast.acme, until=now + timedelta(hours=1))
    said = joined.next_report(
        usage=tuple(usage(now, tenant, turns=1) for tenant in ("acme", "bolt", "core")),
        dirty=tuple(Dirty("acme", "u", f"s{n}") for n in range(50)),
    )
    # Lock, look tenants up, two inserts, one update; BEGIN and COMMIT are a savepoint here.
    with django_assert_max_num_queries(7):
        services.report(said, now=now)
    assert (UsageLine.objects.count(), DirtyLine.objects.count()) == (3, 50)


@pytest.mark.django_db
def test_a_retry_is_acknowledged_and_changes_nothing(
    cast: make.Cast, joined: Any, now: datetime
) -> None:
    said = joined.next_report(usage=(usage(now, turns=3),), in_flight={"acme": 1})
    services.report(said, now=now)
    before = RuntimeInstance.objects.values().get()
    answer = services.report(said, now=now + timedelta(seconds=60))
    assert RuntimeInstance.objects.values().get() == before
    assert turns() == 3
    # What is left, not a new lease: the instance counts it from when it sent the retry.
    assert answer.lease_seconds == LEASE.total_seconds() - 60


@pytest.mark.django_db
def test_a_late_report_changes_nothing(cast: make.Cast, joined: Any, now: datetime) -> None:
    old = joined.next_report(in_flight={"acme": 5}, applied_version="")
    services.report(old, now=now)
    services.report(joined.next_report(in_flight={}, applied_version=applied(cast.cell)), now=now)
    services.report(old, now=now)
    assert (joined.row.in_flight, joined.row.seq) == ({}, 2)


@pytest.mark.django_db
def test_a_gap_is_refused_and_takes_nothing(joined: Any, now: datetime) -> None:
    before = RuntimeInstance.objects.values().get()
    with pytest.raises(services.SeqGap) as refused:
        services.report(joined.report(seq=2, usage=(usage(now, turns=1),)), now=now)
    assert refused.value.code == "seq_gap"
    assert RuntimeInstance.objects.values().get() == before
    assert turns() == 0


@pytest.mark.django_db
@pytest.mark.parametrize("how", ["left", "dead", "lapsed", "lapsed and unmarked"])
def test_a_gone_instances_usage_counts_once_and_its_lease_is_not_renewed(
    joined: Any, now: datetime, how: str
) -> None:
    if how == "left":
        services.leave(joined.key, now=now)
    if how == "dead":
        services.declare_dead(joined.row, by="ada", reason="host is gone", now=now + SILENT)
    if how.startswith("lapsed"):
        now += OVER
    if how == "lapsed":
        assert services.sweep(now=now) == 1
    before = joined.row
    said = joined.next_report(
        usage=(usage(now, turns=2),), applied_version="", in_flight={"acme": 9}
    )
    for _ in range(2):
        with pytest.raises(services.InstanceGone):
            services.report(said, now=now)
    after = joined.row
    assert turns() == 2
    assert after.lease_until == before.lease_until
    assert after.reported_at == before.reported_at
    assert after.in_flight == before.in_flight
    assert after.gone_why == how.split()[0]


@pytest.mark.django_db
def test_a_gap_of_a_gone_instance_is_not_counted_so_that_it_may_be_given_back(
    joined: Any, now: datetime
) -> None:
    services.leave(joined.key, now=now)
    with pytest.raises(services.SeqGap):
        services.report(joined.report(seq=3, usage=(usage(now, turns=1),)), now=now)
    assert turns() == 0


@pytest.mark.django_db
def test_an_applied_version_of_another_epoch_counts_as_nothing(
    cast: make.Cast, joined: Any, now: datetime
) -> None:
    version = services.publish(cast.acme, cast.cell, accepts="none")
    services.report(joined.next_report(applied_version=f"{'f' * 12}.{version + 9}"), now=now)
    assert (joined.row.applied_epoch, joined.row.applied_version) == ("", 0)
    assert not queries.fence_proof(cast.cell, cast.acme, version, now=now).drained


@pytest.mark.django_db
def test_a_new_epoch_takes_the_worth_of_what_was_applied_before(
    cast: make.Cast, joined: Any, now: datetime
) -> None:
    version = services.publish(cast.acme, cast.cell, accepts="none")
    services.report(joined.next_report(applied_version=applied(cast.cell)), now=now)
    assert queries.fence_proof(cast.cell, cast.acme, version, now=now).drained
    Counter.objects.update(epoch="0" * 12)
    assert not queries.fence_proof(cast.cell, cast.acme, version, now=now).drained


@pytest.mark.django_db
def test_a_version_above_the_cells_counter_is_recorded_and_refused(
    cast: make.Cast, joined: Any, now: datetime
) -> None:
    number = Cell.objects.get(pk=cast.cell.pk).policy_version + 1
    said = joined.next_report(
        applied_version=f"{queries.epoch()}.{number}", usage=(usage(now, turns=1),)
    )
    before = joined.row.lease_until
    for _ in range(3):
        with pytest.raises(services.VersionAhead):
            services.report(said, now=now + timedelta(seconds=1))
    # One line, although it comes back at every poll.
    assert AuditEntry.objects.filter(verb="instance.version_ahead").count() == 1
    assert (joined.row.seq, joined.row.lease_until, turns()) == (0, before, 0)


@pytest.mark.django_db
def test_a_malformed_version_is_refused(joined: Any, now: datetime) -> None:
    with pytest.raises(services.BadVersion):
        services.report(joined.next_report(applied_version="seven"), now=now)


@pytest.mark.django_db
def test_another_processs_report_is_refused(joined: Any, now: datetime) -> None:
    with pytest.raises(services.AnotherProcess):
        services.report(joined.next_report(boot="child"), now=now)
    assert joined.row.seq == 0


@pytest.mark.django_db
def test_a_token_of_another_cell_may_not_report_or_leave(
    cast: make.Cast, joined: Any, now: datetime
) -> None:
    with pytest.raises(services.NotYourCell):
        services.report(joined.next_report(), cells=[cast.other_cell.pk], now=now)
    with pytest.raises(services.NotYourCell):
        services.leave(joined.key, cells=[cast.other_cell.pk], now=now)
    assert (joined.row.seq, joined.row.gone_at) == (0, None)


@pytest.mark.django_db
def test_lines_of_tenants_that_the_cell_never_had_are_left_out_and_noted(
    cast: make.Cast, joined: Any, now: datetime, caplog: pytest.LogCaptureFixture
) -> None:
    dune = make.tenant("dune", cell=cast.other_cell, store=cast.other_store, now=now)
    services.track(dune, until=now + timedelta(hours=1))
    said = joined.next_report(
        usage=(usage(now, turns=1), usage(now, "nobody", turns=1), usage(now, "dune", turns=1)),
        dirty=(Dirty("nobody", "u", "s"), Dirty("dune", "u", "s")),
    )
    services.report(said, now=now)
    assert (UsageLine.objects.count(), DirtyLine.objects.count()) == (1, 0)
    assert "2 tenants that cell-eu1-a never had" in caplog.text


@pytest.mark.django_db
def test_a_tenant_that_has_just_left_is_still_counted(
    cast: make.Cast, joined: Any, now: datetime
) -> None:
    with transaction.atomic():
        services.place(
            cast.acme, cell=cast.other_cell, store=cast.other_store, by="m", reason="", now=now
        )
    services.report(joined.next_report(usage=(usage(now, turns=4),)), now=now)
    assert turns() == 4


@pytest.mark.django_db
def test_served_sessions_are_kept_only_while_their_tenant_is_tracked(
    cast: make.Cast, joined: Any, now: datetime
) -> None:
    end = now + timedelta(seconds=60)
    services.track(cast.acme, until=end)

    def kept(at: datetime) -> set[tuple[str, str]]:
        both = tuple(Dirty(slug, "u", f"s{at.minute}") for slug in ("acme", "bolt"))
        services.report(joined.next_report(dirty=both), now=at)
        lines = DirtyLine.objects.filter(at=at)
        return set(lines.values_list("tenant__slug", "session_id"))

    assert kept(now) == {("acme", "s0")}
    assert kept(end) == set()
    # A tenant's tracking may begin anew.
    services.track(cast.acme, until=end + timedelta(minutes=5))
    assert kept(end + timedelta(minutes=2)) == {("acme", "s3")}


@pytest.mark.django_db
def test_tracking_is_never_shortened_and_is_one_statement(
    cast: make.Cast, now: datetime, django_assert_num_queries: Any
) -> None:
    end = now + timedelta(hours=1)
    with django_assert_num_queries(1):
        services.track(cast.acme, until=end)
    services.track(cast.acme, until=now)
    cast.acme.refresh_from_db()
    assert cast.acme.tracked_until == end
    services.track(cast.acme, until=end + timedelta(seconds=1))
    cast.acme.refresh_from_db()
    assert cast.acme.tracked_until == end + timedelta(seconds=1)


@pytest.mark.django_db
def test_the_sweep_deletes_lines_of_ended_tracking_and_a_bounded_part_of_them(
    cast: make.Cast, joined: Any, now: datetime, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = now + timedelta(seconds=60)
    services.track(cast.acme, until=end)
    services.track(cast.bolt, until=end + timedelta(hours=1))
    said = tuple(Dirty(slug, "u", f"s{n}") for slug in ("acme", "bolt") for n in range(5))
    services.report(joined.next_report(dirty=said), now=now)

    def left() -> tuple[int, int]:
        return cast.acme.dirty_lines.count(), cast.bolt.dirty_lines.count()

    services.sweep(now=end - timedelta(milliseconds=1))
    assert left() == (5, 5)
    monkeypatch.setattr(instances, "DIRTY_SWEPT_MOST", 3)
    services.sweep(now=end)
    assert left() == (2, 5)
    services.sweep(now=end)
    assert left() == (0, 5)


@pytest.mark.django_db
def test_lines_of_one_minute_become_one(joined: Any, now: datetime) -> None:
    said = joined.next_report(
        usage=(
            usage(now, turns=1, refused={"rate": 1}),
            Usage("acme", now.replace(second=59), turns=2, refused={"rate": 2, "quota": 1}),
        )
    )
    services.report(said, now=now)
    line = UsageLine.objects.get()
    assert (line.turns, line.refused) == (3, {"rate": 3, "quota": 1})


@pytest.mark.django_db
def test_a_report_tells_the_cadence_too(cast: make.Cast, joined: Any, now: datetime) -> None:
    assert services.report(joined.next_report(), now=now).poll_after_ms == SLOW_MS
    services.hurry([cast.cell], until=now + timedelta(seconds=9))
    assert services.report(joined.next_report(), now=now).poll_after_ms == FAST_MS
    assert (joined.row.poll_after_ms, joined.row.hurried_at) == (FAST_MS, now)


# --- shares ---------------------------------------------------------------------------------


def granted(one: Any, number: int, **shares: Any) -> None:
    row = one.row
    Grants.objects.update_or_create(
        instance=row, defaults={"shares": shares, "made_at": row.joined_at}
    )
    RuntimeInstance.objects.filter(pk=row.pk).update(grants_number=number)


@pytest.mark.django_db
def test_shares_are_sent_until_they_are_heard_and_read_only_then(
    joined: Any, now: datetime, django_assert_num_queries: Any
) -> None:
    with django_assert_num_queries(4):
        answer = services.report(joined.next_report(), now=now)
    assert (answer.grants, answer.grant_seconds) == (None, 30.0)
    granted(joined, 1, acme=[None, 3, None, None, 1, None, None])
    with django_assert_num_queries(5):
        answer = services.report(joined.next_report(), now=now)
    assert answer.grants is not None
    number, shares = answer.grants
    assert (number, shares["acme"]["safe_max_concurrent_runs"]) == (1, 1)
    # Its answer was lost.
    assert services.report(joined.next_report(), now=now).grants == answer.grants
    with django_assert_num_queries(4):
        answer = services.report(joined.next_report(grants_number=1), now=now)
    assert answer.grants is None
    assert (joined.row.grants_heard, joined.row.grants_number) == (1, 1)


@pytest.mark.django_db
def test_only_a_report_that_is_taken_lets_shares_be_used_for_longer(
    joined: Any, now: datetime
) -> None:
    said = joined.next_report()
    services.report(said, now=now)
    until = now + timedelta(seconds=30)
    assert joined.row.grants_until == until
    later = now + timedelta(seconds=12)
    assert services.report(said, now=later).grant_seconds == 18.0
    assert joined.row.grants_until == until
    assert services.report(said, now=now + timedelta(seconds=40)).grant_seconds == 0.0
    services.leave(joined.key, now=later)
    with pytest.raises(services.InstanceGone):
        services.report(joined.next_report(grants_number=9), now=later)
    assert (joined.row.grants_until, joined.row.grants_heard) == (until, 0)


# --- joining anew ---------------------------------------------------------------------------


@pytest.mark.django_db
def test_a_process_that_joins_anew_replaces_its_old_id_at_once(joined: Any, now: datetime) -> None:
    old = joined.row
    new = joined.join(now=now, replaces=old.key)
    old.refresh_from_db()
    assert (old.gone_at, old.gone_why) == (now, "replaced")
    assert new.gone_at is None


@pytest.mark.django_db
@pytest.mark.parametrize("wrong", ["boot", "cell"])
def test_nobody_replaces_another_processs_id(
    cast: make.Cast, joined: Any, process: Any, now: datetime, wrong: str
) -> None:
    other = process(
        cast.other_cell if wrong == "cell" else cast.cell,
        boot=joined.boot if wrong == "cell" else "boot-2",
    )
    with pytest.raises(services.AnotherProcess):
        other.join(now=now, replaces=joined.key)
    assert joined.row.gone_at is None
    assert RuntimeInstance.objects.count() == 1


@pytest.mark.django_db
def test_an_id_that_we_do_not_know_may_be_named(joined: Any, now: datetime) -> None:
    """After a restore from a backup the process must still get in; it counts from its join."""
    assert joined.join(now=now, replaces="f" * 32).took_over


@pytest.mark.django_db
def test_turns_that_run_while_a_process_joins_anew_keep_the_fence_from_holding(
    cast: make.Cast, joined: Any, now: datetime
) -> None:
    version = services.publish(cast.acme, cast.cell, accepts="none")
    said = joined.next_report(applied_version=applied(cast.cell), in_flight={"acme": 1})
    services.report(said, now=now)
    joined.join(now=now, replaces=joined.key)
    proof = queries.fence_proof(cast.cell, cast.acme, version, now=now)
    assert not proof.drained
    services.poll(joined.key, now=now)
    running = joined.next_report(applied_version=applied(cast.cell), in_flight={"acme": 1})
    services.report(running, now=now)
    proof = queries.fence_proof(cast.cell, cast.acme, version, now=now)
    assert (proof.drained, proof.in_flight) == (False, 1)
    services.report(joined.next_report(applied_version=applied(cast.cell)), now=now)
    assert queries.fence_proof(cast.cell, cast.acme, version, now=now).drained


@pytest.mark.django_db(transaction=True, serialized_rollback=True)
def test_at_no_moment_of_joining_anew_does_a_proof_overlook_a_running_turn(
    cast: make.Cast, process: Any, now: datetime, elsewhere: Elsewhere, after_statement: Any
) -> None:
    with transaction.atomic():
        version = services.publish(cast.acme, cast.cell, accepts="none")

    def prove() -> bool:
        return queries.fence_proof(cast.cell, cast.acme, version, now=now).drained

    statement = 0
    while True:
        one = process(cast.cell, boot=f"boot-{statement}")
        one.join(now=now)
        services.poll(one.key, now=now)
        said = one.next_report(applied_version=applied(cast.cell), in_flight={"acme": 1})
        services.report(said, now=now)
        proofs: list[bool] = []
        with after_statement(
            statement, lambda proofs=proofs: proofs.append(elsewhere(prove))
        ) as ran:
            one.join(now=now, replaces=one.key)
            services.poll(one.key, now=now)
        if ran() <= statement:
            break
        assert proofs == [False], f"after statement {statement}"
        services.leave(one.key, now=now)
        statement += 1
    assert statement >= 3


@pytest.mark.django_db
def test_a_join_whose_answer_was_lost_holds_up_no_fence(
    cast: make.Cast, joined: Any, now: datetime
) -> None:
    """The row of the lost answer is replaced by the repeated join, which counts in its place."""
    old = joined.key
    lost = joined.join(now=now, replaces=old)
    again = joined.join(now=now, replaces=None)
    lost.refresh_from_db()
    assert (lost.gone_why, again.took_over) == ("replaced", True)
    assert RuntimeInstance.objects.filter(gone_at=None).count() == 1


@pytest.mark.django_db
def test_a_first_join_that_is_repeated_counts_for_nothing_yet(
    cast: make.Cast, process: Any, now: datetime
) -> None:
    one = process(cast.cell)
    lost = one.join(now=now)
    again = one.join(now=now)
    lost.refresh_from_db()
    assert (lost.gone_why, again.took_over) == ("replaced", False)


@pytest.mark.django_db
def test_a_join_without_replaces_never_ends_an_id_that_has_served(
    joined: Any, now: datetime
) -> None:
    served = joined.row
    joined.join(now=now)
    served.refresh_from_db()
    assert served.gone_at is None


@pytest.mark.django_db
def test_leaving_may_be_said_twice(joined: Any, now: datetime) -> None:
    services.leave(joined.key, now=now)
    services.leave(joined.key, now=now + timedelta(seconds=1))
    assert (joined.row.gone_at, joined.row.gone_why) == (now, "left")
    with pytest.raises(services.InstanceGone):
        services.leave("0" * 32, now=now)


# --- lapses ---------------------------------------------------------------------------------


@pytest.mark.django_db
def test_a_lapse_is_marked_only_when_lease_margin_and_longest_turn_are_over(
    joined: Any, now: datetime
) -> None:
    just_before = now + OVER - timedelta(milliseconds=1)
    assert services.sweep(now=just_before) == 0
    with transaction.atomic():
        assert not services.mark_lapsed([joined.row.pk], now=just_before)
    assert joined.row.gone_at is None
    with transaction.atomic():
        assert services.mark_lapsed([joined.row.pk], now=now + OVER)
    assert (joined.row.gone_at, joined.row.gone_why) == (now + OVER, "lapsed")


@pytest.mark.django_db
def test_either_all_lapsed_rows_are_marked_or_none(
    cast: make.Cast, joined: Any, process: Any, now: datetime
) -> None:
    alive = process(cast.cell, boot="boot-2")
    alive.join(now=now + timedelta(seconds=30))
    later = now + OVER
    both = [joined.row.pk, alive.row.pk]
    with transaction.atomic():
        assert not services.mark_lapsed(both, now=later)
        assert not services.mark_lapsed([joined.row.pk, 10**9], now=later)
    assert joined.row.gone_at is None
    with transaction.atomic():
        assert services.mark_lapsed(both, now=later + timedelta(seconds=30))


@pytest.mark.django_db
def test_a_row_that_is_gone_already_keeps_its_reason(joined: Any, now: datetime) -> None:
    services.declare_dead(joined.row, by="ada", reason="host is gone", now=now + SILENT)
    with transaction.atomic():
        assert services.mark_lapsed([joined.row.pk], now=now)
    assert joined.row.gone_why == "dead"


@pytest.mark.django_db(transaction=True, serialized_rollback=True)
def test_a_report_that_renews_in_time_undoes_a_proof_that_counted_its_instance_as_lapsed(
    cast: make.Cast, joined: Any, now: datetime, after_statement: Any
) -> None:
    """The report came before the lapse and commits after the proof: settling must not go on."""
    with transaction.atomic():
        version = services.publish(cast.acme, cast.cell, accepts="none")
    before, after = now + OVER - timedelta(seconds=1), now + OVER
    marked: list[bool] = []
    waiting = threading.Event()

    def settle() -> None:
        proof = queries.fence_proof(cast.cell, cast.acme, version, now=after)
        assert (proof.drained, proof.lapsed) == (True, (joined.row.pk,))
        with transaction.atomic():
            waiting.set()
            marked.append(services.mark_lapsed(proof.lapsed, now=after))
        connections.close_all()

    other = threading.Thread(target=settle)

    def meanwhile() -> None:
        other.start()
        assert waiting.wait(10)
        # It waits for the row that this report has locked.
        other.join(0.3)
        assert other.is_alive()

    # Statement 0 is the report's SELECT ... FOR UPDATE.
    with after_statement(0, meanwhile):
        services.report(joined.next_report(in_flight={"acme": 1}), now=before)
    other.join(10)
    assert marked == [False]
    assert joined.row.gone_at is None


@pytest.mark.django_db
def test_the_periodic_sweep_judges_by_the_databases_clock(joined: Any, process: Any) -> None:
    fresh = process(joined.cell, boot="boot-2")
    fresh.join(now=database_now())
    RuntimeInstance.objects.filter(key=joined.key).update(lease_until=database_now() - OVER)
    sweep()
    assert (joined.row.gone_why, fresh.row.gone_why) == ("lapsed", "")


@pytest.mark.django_db
def test_declaring_dead_takes_a_reason_is_audited_and_happens_once(
    joined: Any, now: datetime
) -> None:
    now += SILENT
    with pytest.raises(services.ReasonMissing):
        services.declare_dead(joined.row, by="ada", reason=" ", now=now)
    services.declare_dead(joined.row, by="ada", reason="host is gone", now=now)
    line = AuditEntry.objects.get(verb="instance.declare_dead")
    assert (line.who, line.reason) == ("ada", "host is gone")
    with pytest.raises(services.AlreadyGone):
        services.declare_dead(joined.row, by="ada", reason="host is gone", now=now)


@pytest.mark.django_db
@pytest.mark.parametrize("word", ["join", "poll", "report"])
def test_an_instance_that_spoke_within_its_last_three_polls_is_not_declared_dead(
    cast: make.Cast, process: Any, now: datetime, word: str
) -> None:
    one = process(cast.cell)
    one.join(now=now)
    spoke = now if word == "join" else now + timedelta(seconds=9)
    if word == "poll":
        services.poll(one.key, now=spoke)
    if word == "report":
        services.report(one.next_report(), now=spoke)
    with pytest.raises(services.StillAlive, match="Stop it first"):
        services.declare_dead(
            one.row, by="ada", reason="it hangs", now=spoke + timedelta(seconds=16.5)
        )
    assert one.row.gone_at is None
    services.declare_dead(one.row, by="ada", reason="host is gone", now=spoke + SILENT)
    assert one.row.gone_why == "dead"


@pytest.mark.django_db
def test_at_the_fast_cadence_three_polls_are_soon_over(
    cast: make.Cast, joined: Any, now: datetime
) -> None:
    services.hurry([cast.cell], until=now + timedelta(minutes=1))
    services.poll(joined.key, now=now)
    with pytest.raises(services.StillAlive):
        services.declare_dead(joined.row, by="ada", reason="gone", now=now)
    services.declare_dead(joined.row, by="ada", reason="gone", now=now + timedelta(seconds=1))


@pytest.mark.django_db
def test_time_left_goes_by_how_many_turns_were_served_of_late(
    cast: make.Cast, joined: Any, now: datetime
) -> None:
    services.report(joined.next_report(in_flight={"acme": 1}), now=now)

    def served(turns: int, minutes: int) -> None:
        UsageLine.objects.create(
            instance=joined.row,
            seq=1_000 + minutes,
            tenant=cast.acme,
            minute=now - timedelta(minutes=minutes),
            turns=turns,
        )

    served(19, 1)
    served(900, 11)
    assert queries.time_left_seconds(cast.cell, cast.acme, now=now) == 60.0
    served(281, 2)
    # 300 in 600 s, one at a time: 2 s each, and 6 s in 19 of 20 cases.
    assert queries.time_left_seconds(cast.cell, cast.acme, now=now) == pytest.approx(6.0, abs=0.1)
    RuntimeInstance.objects.update(in_flight={"acme": 40})
    assert queries.time_left_seconds(cast.cell, cast.acme, now=now) == 60.0


@pytest.mark.django_db
def test_live_instances_and_time_left_leave_out_who_is_gone(
    cast: make.Cast, joined: Any, process: Any, now: datetime
) -> None:
    slow = process(cast.cell, boot="boot-2", longest_turn_seconds=300.0)
    slow.join(now=now)
    services.report(joined.next_report(in_flight={"acme": 1}), now=now)
    services.report(slow.next_report(in_flight={"bolt": 1}), now=now)
    assert len(queries.live_instances(cast.cell, now=now)) == 2
    assert queries.time_left_seconds(cast.cell, cast.acme, now=now) == 60.0
    assert queries.time_left_seconds(cast.cell, cast.bolt, now=now) == 300.0
    assert queries.time_left_seconds(cast.cell, cast.core, now=now) == 0.0
    services.leave(slow.key, now=now)
    assert queries.time_left_seconds(cast.cell, cast.bolt, now=now) == 0.0
    assert queries.live_instances(cast.cell, now=now + OVER) == []


# --- the law --------------------------------------------------------------------------------


@pytest.mark.django_db
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    deliveries=st.lists(st.integers(1, 5), max_size=12),
    gone_after=st.integers(0, 12),
)
def test_any_order_and_repetition_of_reports_gives_the_same_usage(
    cast: make.Cast,
    process: Any,
    now: datetime,
    counts: list[int],
    deliveries: list[int],
    gone_after: int,
) -> None:
    """Deliver in any order, with repetitions and a death in between; then each in order."""
    with transaction.atomic():
        one = process(cast.cell)
        one.join(now=now)
        said = [
            one.report(seq=n, usage=(usage(now, turns=count),))
            for n, count in enumerate(counts, start=1)
        ]
        in_order = range(1, len(said) + 1)
        for step, number in enumerate([*deliveries, *in_order]):
            if step == gone_after:
                services.leave(one.key, now=now)
            if number > len(said):
                continue
            last = one.row.seq
            try:
                services.report(said[number - 1], now=now)
            except services.SeqGap:
                assert number > last + 1
            except services.InstanceGone:
                assert one.row.gone_at is not None
        assert turns() == sum(counts)
        assert one.row.seq == len(counts)
        transaction.set_rollback(True)
