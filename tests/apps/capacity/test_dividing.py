"""Limits are divided over live instances, by what they report, and by nothing out of date."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import pytest
from django.db import connection, connections

from capacity import services, tasks
from capacity.models import UsageDay
from capacity.services import dividing
from durable.clock import database_now
from tenants import services as tenants_services
from tenants.domain.limits import Limits
from tenants.domain.reports import Usage
from tenants.models import Cell, Grants, RuntimeInstance, Tenant
from tests import make
from tests.apps.tenants.conftest import Process, elsewhere

SECOND = timedelta(seconds=1)
WHY = {"by": "ada", "reason": "They asked for it"}


@dataclass
class Instance(Process):
    """A process that applies what it is told and says so in its next report."""

    number: int = 0
    shares: dict[str, Any] = field(default_factory=dict)

    def says(self, *, now: datetime, **said: Any) -> None:
        report = self.next_report(grants_number=self.number, **said)
        answer = tenants_services.report(report, now=now)
        if answer.grants is not None:
            self.number, self.shares = answer.grants

    def runs(self, tenant: str = "acme") -> int | None:
        share = self.shares.get(tenant)
        return None if share is None else share["max_concurrent_runs"]


@pytest.fixture(autouse=True)
def _no_memory_of_another_test() -> Iterator[None]:
    dividing._memory = dividing._Memory()
    yield
    dividing._memory = dividing._Memory()


def limit(tenant: Tenant, now: datetime, **limits: Any) -> None:
    tenants_services.set_scope(tenant, limits=Limits(**limits), now=now, **WHY)


@pytest.fixture
def acme(cast: make.Cast, now: datetime) -> Tenant:
    """acme, with 10 runs at once and 2.5 a second."""
    limit(cast.acme, now, max_concurrent_runs=10, runs_per_second=2.5)
    return cast.acme


def join(cell: Cell, now: datetime, boot: str = "boot-1", **said: Any) -> Instance:
    one = Instance(cell, boot=boot)
    one.join(now=now)
    one.says(now=now, **said)
    return one


def rounds(cell: Cell, *instances: Instance, now: datetime, count: int = 4) -> datetime:
    """Divide and let everybody report, some times; return the moment after."""
    for _ in range(count):
        services.divide(cell, now=now)
        now += 5 * SECOND
        for one in instances:
            one.says(now=now)
    return now


def grants(one: Instance) -> Any:
    return Grants.objects.get(instance=one.row).shares


# --- what is divided ------------------------------------------------------------------------


@pytest.mark.django_db
def test_the_only_instance_of_a_cell_gets_all_of_each_limit(
    cast: make.Cast, acme: Tenant, now: datetime
) -> None:
    one = join(cast.cell, now)
    assert services.divide(cast.cell, now=now) == 1
    one.says(now=now)
    assert one.shares == {
        "acme": {
            "runs_per_second": 2.5,
            "max_concurrent_runs": 10,
            "tokens_per_minute": None,
            "safe_runs_per_second": 1.25,
            "safe_max_concurrent_runs": 5,
            "safe_tokens_per_minute": None,
            "tokens_left": None,
        }
    }
    # Nobody else has a limit, so nobody else needs a share.
    assert services.divide(cast.cell, now=now) == 0


@pytest.mark.django_db
def test_a_second_instance_waits_until_the_first_has_said_that_it_applies_less(
    cast: make.Cast, acme: Tenant, now: datetime
) -> None:
    one = join(cast.cell, now)
    now = rounds(cast.cell, one, now=now)
    two = join(cast.cell, now, "boot-2")
    services.divide(cast.cell, now=now)
    two.says(now=now)
    assert (one.runs(), two.runs()) == (10, 0)
    one.says(now=now)
    # It is told; whether it heard, its next report says.
    services.divide(cast.cell, now=now)
    two.says(now=now)
    assert (one.runs(), two.runs()) == (5, 0)
    one.says(now=now)
    rounds(cast.cell, one, two, now=now)
    assert (one.runs(), two.runs()) == (5, 5)
    assert one.shares["acme"]["safe_max_concurrent_runs"] == 3


@pytest.mark.django_db
def test_shares_go_where_turns_are_refused(cast: make.Cast, acme: Tenant, now: datetime) -> None:
    one, two = join(cast.cell, now), join(cast.cell, now, "boot-2")
    now = rounds(cast.cell, one, two, now=now)
    assert (one.runs(), two.runs()) == (5, 5)
    for _ in range(6):
        busy = Usage("acme", now, turns=10, refused={"concurrency": 20, "rate": 30})
        two.says(now=now, usage=(busy,), in_flight={"acme": two.runs() or 0})
        one.says(now=now)
        services.divide(cast.cell, now=now)
        now += 5 * SECOND
    assert (one.runs(), two.runs()) == (1, 9)
    assert two.shares["acme"]["runs_per_second"] > 2


@pytest.mark.django_db
def test_an_edit_is_divided_in_the_next_round_and_a_limit_that_went_needs_no_share(
    cast: make.Cast, acme: Tenant, now: datetime
) -> None:
    one = join(cast.cell, now)
    now = rounds(cast.cell, one, now=now)
    limit(cast.acme, now, max_concurrent_runs=4)
    now = rounds(cast.cell, one, now=now, count=1)
    assert (one.runs(), one.shares["acme"]["runs_per_second"]) == (4, None)
    limit(cast.acme, now)
    rounds(cast.cell, one, now=now, count=2)
    assert one.shares == {}


@pytest.mark.django_db
def test_what_is_left_of_a_budget_is_told(cast: make.Cast, now: datetime) -> None:
    limit(cast.acme, now, daily_token_budget=1_000_000)
    UsageDay.objects.create(tenant=cast.acme, day=now.date(), tokens=300_000)
    one = join(cast.cell, now)
    rounds(cast.cell, one, now=now, count=1)
    assert one.shares["acme"]["tokens_left"] == 700_000
    assert one.runs() is None


@pytest.mark.django_db
def test_a_little_of_a_budget_each_day_is_never_all_of_it(cast: make.Cast, now: datetime) -> None:
    """An instance counts what it used since it was told what is left, for as long as it lives."""
    limit(cast.acme, now, daily_token_budget=1_000)
    one = join(cast.cell, now)
    now = rounds(cast.cell, one, now=now, count=2)
    counted, number = 0, one.number
    for _ in range(120):
        one.says(now=now, usage=(Usage("acme", now, tokens=9),))
        services.roll_up(now=now)
        counted += 9
        now = rounds(cast.cell, one, now=now, count=1)
        if one.number != number:
            counted, number = 0, one.number
        assert counted < one.shares["acme"]["tokens_left"]
        # It was never silent; nothing else is told of these hours.
        now += timedelta(days=1)
        RuntimeInstance.objects.update(lease_until=now + 900 * SECOND)


# --- moves ----------------------------------------------------------------------------------


@pytest.mark.django_db
def test_both_sides_of_a_split_share_one_limit(
    cast: make.Cast, acme: Tenant, now: datetime
) -> None:
    one, two = join(cast.cell, now), join(cast.other_cell, now, "boot-2")
    now = rounds(cast.cell, one, now=now)
    tenants_services.publish(acme, cast.cell, accepts="existing")
    tenants_services.split(
        acme, cell=cast.other_cell, store=cast.other_store, by="m", reason="", now=now
    )
    for _ in range(6):
        services.divide(cast.other_cell, now=now)
        one.says(now=now)
        two.says(now=now)
        assert (one.runs() or 0) + (two.runs() or 0) <= 10
    assert (one.runs(), two.runs()) == (5, 5)


@pytest.mark.django_db
def test_a_side_of_a_split_that_is_closed_counts_as_long_as_its_turns_may_run(
    cast: make.Cast, acme: Tenant, now: datetime
) -> None:
    """As on the way back from a split: the home serves on while the far side is being drained."""
    one, two = join(cast.cell, now), join(cast.other_cell, now, "boot-2")
    tenants_services.publish(acme, cast.cell, accepts="existing")
    tenants_services.split(
        acme, cell=cast.other_cell, store=cast.other_store, by="m", reason="", now=now
    )
    now = rounds(cast.cell, one, two, now=now)
    assert (one.runs(), two.runs()) == (5, 5)
    tenants_services.publish(acme, cast.other_cell, accepts="none")
    for _ in range(4):
        services.divide(cast.cell, now=now)
        two.says(now=now, in_flight={"acme": 5})
        one.says(now=now, usage=(Usage("acme", now, refused={"concurrency": 9}),))
        assert (one.runs() or 0) + 5 <= 10
    # Its turns have ended, so the home has what the far side does not ask for.
    now = rounds(cast.cell, two, one, now=now, count=1)
    for _ in range(3):
        one.says(now=now, usage=(Usage("acme", now, refused={"concurrency": 9}),))
        now = rounds(cast.cell, two, one, now=now, count=1)
    assert (one.runs() or 0) > 5


@pytest.mark.django_db
def test_a_cell_that_waits_for_a_tenant_has_shares_when_the_fence_closes_and_not_before(
    cast: make.Cast, acme: Tenant, now: datetime
) -> None:
    one, two = join(cast.cell, now), join(cast.other_cell, now, "boot-2")
    tenants_services.announce(acme, cast.other_cell, cast.other_store)
    now = rounds(cast.cell, one, now=now)
    now = rounds(cast.other_cell, two, now=now)
    assert (one.runs(), two.runs()) == (10, None)
    tenants_services.publish(acme, cast.cell, accepts="none")
    now = rounds(cast.other_cell, two, now=now, count=1)
    assert (one.runs(), two.runs()) == (10, 10)
    tenants_services.place(
        acme, cell=cast.other_cell, store=cast.other_store, by="m", reason="", now=now
    )
    now = rounds(cast.cell, one, now=now, count=2)
    rounds(cast.other_cell, two, now=now, count=2)
    assert (one.runs(), two.runs()) == (None, 10)


@pytest.mark.django_db
def test_a_fence_that_opens_again_at_home_takes_the_shares_back(
    cast: make.Cast, acme: Tenant, now: datetime
) -> None:
    two = join(cast.other_cell, now)
    tenants_services.announce(acme, cast.other_cell, cast.other_store)
    tenants_services.publish(acme, cast.cell, accepts="none")
    now = rounds(cast.other_cell, two, now=now, count=1)
    assert two.runs() == 10
    tenants_services.publish(acme, cast.cell, accepts="all")
    rounds(cast.other_cell, two, now=now, count=2)
    assert two.runs() is None


# --- instances that end ---------------------------------------------------------------------


@pytest.mark.django_db
def test_an_instance_that_left_frees_its_part_at_once(
    cast: make.Cast, acme: Tenant, now: datetime
) -> None:
    one, two = join(cast.cell, now), join(cast.cell, now, "boot-2")
    now = rounds(cast.cell, one, two, now=now)
    tenants_services.leave(one.key, now=now)
    rounds(cast.cell, two, now=now, count=1)
    assert two.runs() == 10


@pytest.mark.django_db
def test_an_instance_that_is_silent_keeps_the_safe_part_until_its_lease_is_over(
    cast: make.Cast, acme: Tenant, now: datetime
) -> None:
    one, two = join(cast.cell, now), join(cast.cell, now, "boot-2")
    now = rounds(cast.cell, one, two, now=now)
    silent = one.row
    until = silent.grants_until + 6 * SECOND
    while now < until:
        now = rounds(cast.cell, two, now=now, count=1)
    # Turns that it began with its full share may still run.
    assert two.runs() == 5
    while now < until + 65 * SECOND:
        now = rounds(cast.cell, two, now=now, count=1)
    assert two.runs() == 7
    # Coming back, it has the safe part, and no more before others have given it back.
    one.says(now=now)
    assert (one.runs(), one.shares["acme"]["safe_max_concurrent_runs"]) == (3, 3)
    for _ in range(4):
        wants = Usage("acme", now, refused={"concurrency": 20})
        one.says(now=now, usage=(wants,))
        two.says(now=now, usage=(wants,))
        now = rounds(cast.cell, one, two, now=now, count=1)
    assert (one.runs(), two.runs()) == (5, 5)
    # Silent for good, it holds nothing once its lease and longest turn are over.
    over = one.row.lease_until + 66 * SECOND
    for moment in (one.row.lease_until, over):
        two.says(now=moment)
    rounds(cast.cell, two, now=over)
    assert two.runs() == 10


@pytest.mark.django_db
@pytest.mark.parametrize("reported", [True, False])
def test_turns_of_a_process_that_joined_anew_count_until_its_new_id_reports_them(
    cast: make.Cast, acme: Tenant, now: datetime, reported: bool
) -> None:
    one, two = join(cast.cell, now), join(cast.cell, now, "boot-2")
    now = rounds(cast.cell, one, two, now=now)
    one.says(now=now, in_flight={"acme": 4})
    one.join(now=now, replaces=one.key)
    one.number, one.shares = 0, {}
    if reported:
        one.says(now=now, in_flight={"acme": 3})
    wants = Usage("acme", now, refused={"concurrency": 20})
    two.says(now=now, usage=(wants,))
    services.divide(cast.cell, now=now)
    two.says(now=now)
    # The old id might have begun 5; the new one says that 3 run.
    assert two.runs() == (7 if reported else 5)


@pytest.mark.django_db
def test_turns_of_the_last_instance_of_a_side_count_though_it_was_declared_dead(
    cast: make.Cast, acme: Tenant, now: datetime
) -> None:
    one, two = join(cast.cell, now), join(cast.other_cell, now, "boot-2")
    tenants_services.publish(acme, cast.cell, accepts="existing")
    tenants_services.split(
        acme, cell=cast.other_cell, store=cast.other_store, by="m", reason="", now=now
    )
    now = rounds(cast.cell, one, two, now=now)
    assert (one.runs(), two.runs()) == (5, 5)
    now += 40 * SECOND
    tenants_services.declare_dead(two.row, now=now, **WHY)
    one.says(now=now)
    now = rounds(cast.cell, one, now=now)
    assert one.runs() == 5
    # As long as a turn takes there.
    now += 66 * SECOND
    one.says(now=now)
    rounds(cast.cell, one, now=now)
    assert one.runs() == 10


@pytest.mark.django_db
def test_an_instance_that_never_reported_holds_nothing_and_is_given_nothing(
    cast: make.Cast, acme: Tenant, now: datetime
) -> None:
    Instance(cast.cell, boot="boot-2").join(now=now)
    one = join(cast.cell, now)
    rounds(cast.cell, one, now=now, count=1)
    assert one.runs() == 10
    assert Grants.objects.count() == 1


# --- rounds ---------------------------------------------------------------------------------


@pytest.mark.django_db
def test_a_cell_at_rest_costs_a_few_small_reads(
    cast: make.Cast, acme: Tenant, now: datetime, django_assert_max_num_queries: Any
) -> None:
    one = join(cast.cell, now)
    now = rounds(cast.cell, one, now=now)
    # Which cells, what is joined with this one, its version, its instances, their last lines.
    with django_assert_max_num_queries(7) as read:
        assert services.allocate(now=now) == 0
    assert not any("grants_grants" in query["sql"] for query in read.captured_queries)
    assert not any('"tenants_grants"."shares"' in q["sql"] for q in read.captured_queries)


@pytest.mark.django_db
def test_an_installation_without_instances_costs_one_read(
    cast: make.Cast, acme: Tenant, now: datetime, django_assert_num_queries: Any
) -> None:
    with django_assert_num_queries(1):
        assert services.allocate(now=now) == 0
    with django_assert_num_queries(1):
        assert services.allocate_soon(now=now) == 0


@pytest.mark.django_db
def test_every_cell_has_its_turn(cast: make.Cast, acme: Tenant, now: datetime) -> None:
    dune = make.tenant("dune", cell=cast.other_cell, store=cast.other_store, now=now)
    limit(dune, now, max_concurrent_runs=3)
    one, two = join(cast.cell, now), join(cast.other_cell, now, "boot-2")
    assert services.allocate(now=now) == 2
    one.says(now=now)
    two.says(now=now)
    assert (one.runs(), two.runs("dune"), two.runs()) == (10, 3, None)


@pytest.mark.django_db
def test_between_rounds_only_newcomers_and_cells_that_move_are_divided(
    cast: make.Cast, acme: Tenant, now: datetime
) -> None:
    one = join(cast.cell, now)
    assert services.allocate_soon(now=now) == 1
    one.says(now=now)
    limit(cast.acme, now, max_concurrent_runs=4)
    assert services.allocate_soon(now=now) == 0
    tenants_services.hurry([cast.cell], until=now + SECOND)
    one.says(now=now)
    assert services.allocate_soon(now=now) == 1
    assert services.allocate_soon(now=now + 2 * SECOND) == 0


@pytest.mark.django_db
def test_the_tasks_divide(cast: make.Cast, acme: Tenant) -> None:
    one = join(cast.cell, database_now())
    tasks.allocate_soon()
    tasks.allocate()
    one.says(now=database_now())
    assert one.runs() == 10


# --- at the same time -----------------------------------------------------------------------


@contextmanager
def before_the_locks(number: int, act: Callable[[], None]) -> Iterator[list[int]]:
    """Act after the given statement, unless the round has locked before; yield whether it did."""
    ran, acted = 0, []

    def wrapper(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        nonlocal ran
        if "FOR NO KEY UPDATE" in sql:
            ran = 1_000
        result = execute(sql, params, many, context)
        if ran == number:
            elsewhere(act)
            acted.append(number)
        ran += 1
        return result

    with connection.execute_wrapper(wrapper):
        yield acted


@pytest.mark.django_db(transaction=True, serialized_rollback=True)
def test_a_silent_instance_that_comes_back_during_a_round_uses_nothing_that_was_lent(
    cast: make.Cast, acme: Tenant, now: datetime
) -> None:
    """Whenever it does: it is told of less, or it keeps all and nobody was lent any of it."""
    at = 0
    while True:
        one, two = join(cast.cell, now, f"one-{at}"), join(cast.cell, now, f"two-{at}")
        now = rounds(cast.cell, one, two, now=now)
        assert (one.runs(), two.runs()) == (5, 5)
        # Its turns have ended, too: only the safe part is counted.
        now = one.row.grants_until + 66 * SECOND
        two.says(now=now, usage=(Usage("acme", now, refused={"concurrency": 20}),))
        with before_the_locks(at, partial(one.says, now=now)) as acted:
            services.divide(cast.cell, now=now)
        if not acted:
            one.shares = {}  # Still silent, it is down to the safe part.
        # The other one hears first.
        two.says(now=now)
        assert (one.runs() or 2) + (two.runs() or 0) <= 10, at
        one.says(now=now)
        for ended in (one, two):
            tenants_services.leave(ended.key, now=now)
        if not acted:
            break
        at += 1
    assert at > 5


@pytest.mark.django_db(transaction=True, serialized_rollback=True)
def test_a_newcomer_that_reports_for_the_first_time_during_a_round_undoes_nothing(
    cast: make.Cast, acme: Tenant, now: datetime
) -> None:
    """Of a thousand that join one after another one always does: nobody would be told anything."""
    one, newcomer = join(cast.cell, now), Instance(cast.cell, boot="boot-2")
    newcomer.join(now=now)
    # After the instances were read.
    for number in range(5, 8):
        limit(cast.acme, now, max_concurrent_runs=number)
        with before_the_locks(number, partial(newcomer.says, now=now)) as acted:
            assert services.divide(cast.cell, now=now) == 1
        assert acted
        one.says(now=now)
        one.says(now=now)
        assert one.runs() == number
        tenants_services.leave(newcomer.key, now=now)
        newcomer = Instance(cast.cell, boot=f"boot-{number}")
        newcomer.join(now=now)


@pytest.mark.django_db(transaction=True, serialized_rollback=True)
def test_two_rounds_at_once_make_one_set_of_documents(
    cast: make.Cast, acme: Tenant, now: datetime
) -> None:
    one, two = join(cast.cell, now), join(cast.cell, now, "boot-2")
    together, made, failures = threading.Barrier(2), [], []

    def divide() -> None:
        together.wait(10)
        try:
            made.append(services.divide(cast.cell, now=now))
        except Exception as error:
            failures.append(error)
        finally:
            connections.close_all()

    for expected in (1, 2):
        threads = [threading.Thread(target=divide) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert failures == []
        for instance in (one, two):
            assert instance.row.grants_number == expected
            instance.says(now=now)
            instance.says(now=now)
        # Another limit, so that there is something to divide again.
        limit(cast.acme, now, max_concurrent_runs=4)
        made.clear()
    assert (one.runs(), two.runs()) == (2, 2)


@pytest.mark.django_db(transaction=True, serialized_rollback=True)
def test_a_report_during_a_round_hears_one_set_of_documents_whole(
    cast: make.Cast, acme: Tenant, now: datetime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number and its shares are of one moment: the report waits for the round's locks."""
    one = join(cast.cell, now)
    heard: list[Any] = []
    waits: Callable[..., Any] = Grants.objects.bulk_create
    thread = threading.Thread(
        target=lambda: (heard.append(one.says(now=now)), connections.close_all())
    )

    def slowly(*rows: Any, **how: Any) -> Any:
        # The locks are held and the documents not yet written.
        thread.start()
        thread.join(0.3)
        assert heard == []
        return waits(*rows, **how)

    monkeypatch.setattr(Grants.objects, "bulk_create", slowly)
    services.divide(cast.cell, now=now)
    thread.join(10)
    assert (one.number, one.runs()) == (1, 10)
