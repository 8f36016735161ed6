"""Claim, step, settle: on the rows of moves, with steps of the test's own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.conf import settings
from django.db import IntegrityError, connections, transaction

from durable import driver
from durable.errors import Refused
from durable.machine import Go, Outcome, Overtaken, Wait
from migrations_app import services
from migrations_app.domain.phases import NO_RETURN, PROMPT, TABLE, UNPAUSABLE, Phase
from migrations_app.models import TenantMigration
from tests import make

LEASE = timedelta(seconds=settings.DURABLE_LEASE_SECONDS)
Step = Callable[[Any, driver.Clock], Outcome]


def machine(step: Step, **changes: Any) -> driver.Machine:
    parts: dict[str, Any] = {
        "model": TenantMigration,
        "table": TABLE,
        "steps": dict.fromkeys(Phase, step),
        "way_out": lambda row: Phase.REOPEN if Phase.REOPEN in TABLE[Phase(row.phase)] else None,
        "no_return": NO_RETURN,
        "unpausable": UNPAUSABLE,
        "urgent": lambda row: row.phase in PROMPT,
        "enqueue": lambda pk, phase, seconds: None,
    }
    return driver.Machine(**parts | changes)


def waiting(row: Any, clock: driver.Clock) -> Outcome:
    return Wait(10)


@pytest.fixture
def row(cast: make.Cast, now: datetime) -> TenantMigration:
    return make.move(cast.acme, cast=cast, now=now)


def test_a_row_that_is_not_due_is_left_alone(row: TenantMigration, now: datetime) -> None:
    early = now - timedelta(seconds=1)
    assert not driver.advance(machine(waiting), row.pk, clock=lambda: early)
    row.refresh_from_db()
    assert row.claim == 0


def test_a_duplicate_message_does_nothing(row: TenantMigration, now: datetime) -> None:
    assert driver.advance(machine(waiting), row.pk, clock=lambda: now)
    assert not driver.advance(machine(waiting), row.pk, clock=lambda: now)
    row.refresh_from_db()
    assert (row.claim, row.due_at) == (1, now + timedelta(seconds=10))


def test_a_phase_its_columns_and_its_event_are_settled_together(
    row: TenantMigration, now: datetime
) -> None:
    step = lambda row, clock: Go(Phase.BACKFILL, "ready", {"sessions": 7})  # noqa: E731
    driver.advance(machine(step), row.pk, clock=lambda: now)
    row.refresh_from_db()
    event = row.events.get()
    assert (row.phase, row.sessions, row.version, row.due_at) == (Phase.BACKFILL, 7, 1, now)
    assert (event.was, event.now, event.note) == (Phase.PREPARE, Phase.BACKFILL, "ready")


def test_a_wait_that_shows_nothing_new_keeps_the_version(
    row: TenantMigration, now: datetime
) -> None:
    driver.advance(machine(waiting), row.pk, clock=lambda: now)
    row.refresh_from_db()
    assert row.version == 0
    assert not row.events.exists()


def test_an_overtaken_worker_settles_nothing(row: TenantMigration, now: datetime) -> None:
    later = now + LEASE

    def slow(row: Any, clock: driver.Clock) -> Outcome:
        # While this one works past its lease, another worker claims the row and goes on.
        driver.advance(machine(lambda *_: Go(Phase.BACKFILL)), row.pk, clock=lambda: later)
        return Go(Phase.REOPEN, "from beyond the lease")

    driver.advance(machine(slow), row.pk, clock=lambda: now)
    row.refresh_from_db()
    assert (row.phase, row.claim) == (Phase.BACKFILL, 2)
    assert not row.events.filter(note="from beyond the lease").exists()


def test_an_effect_under_an_old_claim_is_refused(row: TenantMigration, now: datetime) -> None:
    row.claim = 1
    TenantMigration.objects.filter(pk=row.pk).update(claim=2)
    with pytest.raises(Overtaken), driver.holding(row):
        pytest.fail("the body ran")


def test_a_failing_step_backs_off_and_says_so_once(row: TenantMigration, now: datetime) -> None:
    def broken(row: Any, clock: driver.Clock) -> Outcome:
        raise RuntimeError("cell unreachable")

    driver.advance(machine(broken), row.pk, clock=lambda: now)
    row.refresh_from_db()
    assert row.due_at is not None
    assert (row.failures, row.due_at - now) == (1, timedelta(seconds=1))
    driver.advance(machine(broken), row.pk, clock=lambda: now + timedelta(seconds=1))
    row.refresh_from_db()
    assert row.due_at is not None
    assert (row.failures, row.due_at - now) == (2, timedelta(seconds=3))
    # What a library says may quote an address: the log has it, the row and its page don't.
    assert row.failure.startswith("RuntimeError: see the worker's log for ")
    assert "unreachable" not in row.failure
    assert [event.note for event in row.events.all()] == [row.failure]


def test_a_refusal_is_said_in_its_own_words_and_once(row: TenantMigration, now: datetime) -> None:
    def refusing(row: Any, clock: driver.Clock) -> Outcome:
        raise Refused("the store is away")

    for seconds in (0, 1, 3):
        driver.advance(
            machine(refusing), row.pk, clock=lambda s=seconds: now + timedelta(seconds=s)
        )
    row.refresh_from_db()
    assert (row.failures, row.failure) == (3, "the store is away")
    assert [event.note for event in row.events.all()] == ["the store is away"]


def test_an_overtaken_step_without_a_later_claim_is_a_failure_that_is_seen(
    row: TenantMigration, now: datetime
) -> None:
    """Somebody whom we don't know guards a store: another control plane, a restored database."""

    def step(row: Any, clock: driver.Clock) -> Outcome:
        raise Overtaken("the store is held by mv-99")

    driver.advance(machine(step), row.pk, clock=lambda: now)
    row.refresh_from_db()
    assert (row.failures, row.failure) == (1, "the store is held by mv-99")


def test_a_step_that_kills_whoever_takes_it_is_shown_as_a_failure(
    row: TenantMigration, now: datetime
) -> None:
    def deadly(row: Any, clock: driver.Clock) -> Outcome:
        raise SystemExit

    for number in range(4):
        with pytest.raises(SystemExit):
            driver.advance(machine(deadly), row.pk, clock=lambda n=number: now + n * LEASE)
    row.refresh_from_db()
    assert (row.failures, row.failure) == (3, "3 workers in a row did not come back")
    driver.advance(machine(waiting), row.pk, clock=lambda: now + 4 * LEASE)
    row.refresh_from_db()
    assert (row.failures, row.failure) == (0, "")


def test_a_good_step_forgets_earlier_failures(row: TenantMigration, now: datetime) -> None:
    TenantMigration.objects.filter(pk=row.pk).update(failures=3, failure="gone")
    driver.advance(machine(waiting), row.pk, clock=lambda: now)
    row.refresh_from_db()
    assert (row.failures, row.failure) == (0, "")


def test_inside_a_fence_a_failing_step_never_waits_longer_than_a_second(
    row: TenantMigration, now: datetime
) -> None:
    TenantMigration.objects.filter(pk=row.pk).update(phase=Phase.VERIFY, failures=40)

    def broken(row: Any, clock: driver.Clock) -> Outcome:
        raise Refused("the store is away")

    driver.advance(machine(broken), row.pk, clock=lambda: now)
    row.refresh_from_db()
    assert row.due_at == now + timedelta(seconds=1)


def test_an_edge_that_is_not_in_the_table_fails_the_step(
    row: TenantMigration, now: datetime
) -> None:
    driver.advance(machine(lambda *_: Go(Phase.DONE)), row.pk, clock=lambda: now)
    row.refresh_from_db()
    assert (row.phase, row.failures) == (Phase.PREPARE, 1)


def test_an_abort_takes_the_way_out_instead_of_the_step(
    row: TenantMigration, now: datetime
) -> None:
    TenantMigration.objects.filter(pk=row.pk).update(abort_requested_at=now, abort_reason="slow")
    driver.advance(machine(waiting), row.pk, clock=lambda: now)
    row.refresh_from_db()
    assert row.phase == Phase.REOPEN


@pytest.mark.parametrize("request_column", ["abort_requested_at", "pause_requested_at"])
def test_the_edge_into_the_point_of_no_return_looks_for_a_request_once_more(
    row: TenantMigration, now: datetime, request_column: str
) -> None:
    TenantMigration.objects.filter(pk=row.pk).update(phase=Phase.VERIFY)

    def step(row: Any, clock: driver.Clock) -> Outcome:
        # Somebody asks after the driver looked and before the step settles.
        TenantMigration.objects.filter(pk=row.pk).update(**{request_column: now})
        return Go(Phase.TARGET)

    driver.advance(machine(step), row.pk, clock=lambda: now)
    row.refresh_from_db()
    assert (row.phase, row.due_at) == (Phase.VERIFY, now)


def test_an_edge_is_void_whose_request_was_taken_back_while_its_step_ran(
    row: TenantMigration, now: datetime
) -> None:
    asked = {"drain_requested_at__isnull": False}
    rows = TenantMigration.objects.filter(pk=row.pk)
    rows.update(phase=Phase.BACKFILL, drain_requested_at=now)

    def step(row: Any, clock: driver.Clock) -> Outcome:
        rows.update(drain_requested_at=None)
        return Go(Phase.DRAIN, "the fence closes", {"quote": {"expected": 1}}, asked)

    driver.advance(machine(step), row.pk, clock=lambda: now)
    row.refresh_from_db()
    assert (row.phase, row.quote, row.events.count()) == (Phase.BACKFILL, {}, 0)
    # Given back, and looked at again at once.
    assert (row.claim, row.settled, row.due_at) == (1, 1, now)
    rows.update(drain_requested_at=now)
    driver.advance(machine(lambda *_: Go(Phase.DRAIN, requires=asked)), row.pk, clock=lambda: now)
    row.refresh_from_db()
    assert row.phase == Phase.DRAIN


@pytest.mark.parametrize(
    ("phase", "rest"), [(Phase.BACKFILL, 86_400.0), (Phase.SOAK, 60.0)], ids=["paced", "soak"]
)
def test_a_request_made_while_a_step_runs_is_not_kept_waiting_for_its_rest(
    row: TenantMigration, now: datetime, phase: Phase, rest: float
) -> None:
    TenantMigration.objects.filter(pk=row.pk).update(phase=phase)
    asked: list[Any] = []

    def step(row: Any, clock: driver.Clock) -> Outcome:
        if not asked:
            asked.append(TenantMigration.objects.get(pk=row.pk))
            services.pause(asked[0], by="ada", reason="wait", now=now)
            services.resume(asked[0], by="ada", now=now)
        return Wait(rest, changes={"done": 1})

    driver.advance(machine(step), row.pk, clock=lambda: now)
    row.refresh_from_db()
    assert (row.due_at, row.done) == (now, 1)
    # Nobody asked for anything this time: its own change of the row is none.
    driver.advance(machine(step), row.pk, clock=lambda: now)
    row.refresh_from_db()
    assert row.due_at == now + timedelta(seconds=rest)


def test_a_paused_row_does_not_step(row: TenantMigration, now: datetime) -> None:
    TenantMigration.objects.filter(pk=row.pk).update(pause_requested_at=now)
    driver.advance(machine(lambda *_: Go(Phase.BACKFILL)), row.pk, clock=lambda: now)
    row.refresh_from_db()
    assert row.phase == Phase.PREPARE


def test_the_way_out_itself_cant_be_paused(row: TenantMigration, now: datetime) -> None:
    TenantMigration.objects.filter(pk=row.pk).update(phase=Phase.REOPEN, pause_requested_at=now)
    driver.advance(machine(lambda *_: Go(Phase.ABORTED)), row.pk, clock=lambda: now)
    row.refresh_from_db()
    assert (row.phase, row.due_at) == (Phase.ABORTED, None)


def test_an_ended_row_is_never_due_again(row: TenantMigration, now: datetime) -> None:
    with pytest.raises(IntegrityError), transaction.atomic():
        TenantMigration.objects.filter(pk=row.pk).update(phase=Phase.DONE)


def test_what_is_due_comes_longest_waiting_first(cast: make.Cast, now: datetime) -> None:
    rows = [make.move(tenant, cast=cast, now=now) for tenant in (cast.acme, cast.bolt, cast.core)]
    for seconds, row in zip((2, 1, -1), rows, strict=True):
        TenantMigration.objects.filter(pk=row.pk).update(due_at=now - timedelta(seconds=seconds))
    due = driver.due(machine(waiting), now=now)
    assert due == [(rows[0].pk, Phase.PREPARE), (rows[1].pk, Phase.PREPARE)]


def test_a_short_wait_is_handed_to_a_worker_and_a_long_one_left_to_the_sweep(
    row: TenantMigration, now: datetime, django_capture_on_commit_callbacks: Any
) -> None:
    hints: list[tuple[int, str, float]] = []
    told = machine(lambda *_: Wait(2), enqueue=lambda *hint: hints.append(hint))
    with django_capture_on_commit_callbacks(execute=True):
        driver.advance(told, row.pk, clock=lambda: now)
    later = now + timedelta(seconds=2)
    patient = machine(lambda *_: Wait(60), enqueue=lambda *hint: hints.append(hint))
    with django_capture_on_commit_callbacks(execute=True):
        driver.advance(patient, row.pk, clock=lambda: later)
    assert hints == [(row.pk, Phase.PREPARE, 2)]


@pytest.mark.django_db(transaction=True)
def test_of_twelve_workers_with_one_message_one_steps(cast: make.Cast, now: datetime) -> None:
    row = make.move(cast.acme, cast=cast, now=now)
    inside, most, steps = 0, 0, 0
    lock = threading.Lock()

    def step(row: Any, clock: driver.Clock) -> Outcome:
        nonlocal inside, most, steps
        with lock:
            inside, steps = inside + 1, steps + 1
            most = max(most, inside)
        time.sleep(0.05)
        with lock:
            inside -= 1
        return Wait(60)

    def work() -> None:
        driver.advance(machine(step), row.pk, clock=lambda: now)
        connections.close_all()

    threads = [threading.Thread(target=work) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, steps) == (1, 1)


# --- all machines stopped ---------------------------------------------------------------------


def test_while_machines_are_halted_nothing_is_claimed_or_due(
    row: TenantMigration, now: datetime
) -> None:
    halted = machine(waiting, halted=lambda: "the database was restored")
    assert not driver.advance(halted, row.pk, clock=lambda: now)
    assert driver.due(halted, now=now) == []
    row.refresh_from_db()
    assert (row.claim, row.due_at) == (0, now)


def test_a_halt_between_look_and_claim_is_seen_after_the_claim(
    row: TenantMigration, now: datetime
) -> None:
    words = iter(["", "the database was restored"])
    stepped: list[Any] = []

    def step(row: Any, clock: driver.Clock) -> Outcome:
        stepped.append(row)
        return Wait(10)

    assert not driver.advance(machine(step, halted=lambda: next(words)), row.pk, clock=lambda: now)
    row.refresh_from_db()
    assert stepped == []
    # Given back: whoever waits for claims that are not settled waits for none here.
    assert (row.claim, row.settled, row.due_at) == (1, 1, now)
