"""Moves one durable row by one step. Safe to call twice, late, or never.

Claim, step, settle: a claim is one UPDATE that only the first caller wins; the step
runs in no transaction and may be repeated after any crash; settling is one
UPDATE under the same claim, so what an overtaken worker answers is void.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import Case, F, Value, When

from durable.errors import Refused
from durable.machine import Go, Outcome, Overtaken, Table, Wait, check_edge

log = logging.getLogger(__name__)

Clock = Callable[[], datetime]

BACKOFF_SECONDS = (1, 2, 5, 15, 30, 60)
URGENT_SECONDS = 1
# So many claims in a row that nobody settled are shown as a failure.
LOST_IS_A_FAILURE = 3
# How often a paused row looks at its deadline.
PAUSED_SECONDS = 1.0
# Shorter waits are handed to a worker; longer ones are left to the sweep for due rows.
HINT_SECONDS = 5.0


@dataclass(frozen=True)
class Machine:
    """A kind of durable row: its tables as data, and what it does in each phase."""

    model: Any
    table: Table
    # Phase -> one idempotent, bounded step.
    steps: Mapping[Any, Callable[[Any, Clock], Outcome]]
    # Where an abort leads from this row's phase; None: it can't be aborted now.
    way_out: Callable[[Any], StrEnum | None]
    # Phases with one edge, forward. The edge into one re-checks every request.
    no_return: frozenset[Any]
    # Phases that go on although a pause was asked for (the way out itself, and past no return).
    unpausable: frozenset[Any]
    # Whether somebody is refused while this row waits: a failing step is tried again at once.
    urgent: Callable[[Any], bool]
    # Hands (row id, phase, seconds from now) to a worker; a hint only, never the truth.
    enqueue: Callable[[int, StrEnum, float], None]
    # Called instead of the step while paused: a deadline still holds.
    while_paused: Callable[[Any, Clock], Outcome] = field(
        default=lambda row, clock: Wait(PAUSED_SECONDS)
    )
    # Columns of requests that keep a row out of a phase of no return while they are set.
    requests: tuple[str, ...] = ("abort_requested_at", "pause_requested_at")
    # Says why no machine may take a step; empty while they may. Our rows may be older than what
    # steps would act on.
    halted: Callable[[], str] = lambda: ""
    # Who writes the machine's own lines in the log.
    name: str = "mover"


def advance(machine: Machine, pk: int, *, clock: Clock) -> bool:
    """Claim the row if it is due, run its step, settle the answer.

    Return False if there was nothing to do: the row is not due yet, another
    worker holds it, or it has ended. A duplicate message costs one UPDATE that matches no row.
    A step's own exception is settled as a back-off and logged, not raised. `Overtaken` settles
    nothing, for somebody else is at work; without a later claim it is a failure like others: a
    store is guarded by somebody whom we don't know. While machines are halted nothing is done.
    """
    if machine.halted():
        return False
    row = _claim(machine, pk, clock())
    if row is None:
        return False
    if machine.halted():
        # Halted between the look and the claim. Whoever halts looks for claims that are not
        # settled and waits for them: it has seen this one, or we see its halt here.
        with suppress(Overtaken):
            _give_back(machine, row, clock())
        return False
    try:
        outcome = _answer(machine, row, clock)
        if isinstance(outcome, Go):
            check_edge(machine.table, row.phase, outcome.to)
    except Exception as error:
        if isinstance(error, Overtaken) and not _ours(machine, row):
            log.info("%s was overtaken in its step", row)
            return True
        if not isinstance(error, Refused | Overtaken):
            log.exception("%s failed in %s under claim %d", row, row.phase, row.claim)
        outcome, failure = _after(machine, row, error)
    else:
        failure = ""
    try:
        _settle(machine, row, outcome, clock(), failure=failure)
    except Overtaken:
        log.info("%s was overtaken before it settled", row)
    return True


def due(machine: Machine, *, now: datetime) -> list[tuple[int, StrEnum]]:
    """Return (id, phase) of every row that may be claimed, longest waiting first."""
    if machine.halted():
        return []
    rows = machine.model.objects.filter(due_at__lte=now).order_by("due_at")
    return list(rows.values_list("pk", "phase"))


@contextmanager
def holding(row: Any) -> Iterator[Any]:
    """Run an effect in our own database: one transaction that holds the row under its claim.

    Yields the locked row, read afresh. Raises Overtaken, and changes nothing, if a
    later claim exists. The body does no I/O besides its rows. On SQLite the
    transaction is IMMEDIATE, so it is the one writer and needs no row lock.
    """
    with transaction.atomic():
        locked = type(row).objects.select_for_update().filter(pk=row.pk, claim=row.claim).first()
        if locked is None:
            raise Overtaken(f"{row} was claimed again after {row.claim}")
        yield locked


def _answer(machine: Machine, row: Any, clock: Clock) -> Outcome:
    way_out = machine.way_out(row)
    if row.abort_requested_at and way_out is not None:
        return Go(way_out, f"Abort: {row.abort_reason}" if row.abort_reason else "Abort")
    if row.pause_requested_at and row.phase not in machine.unpausable:
        return machine.while_paused(row, clock)
    return machine.steps[row.phase](row, clock)


@transaction.atomic
def _claim(machine: Machine, pk: int, now: datetime) -> Any:
    lease = timedelta(seconds=settings.DURABLE_LEASE_SECONDS)
    taken = machine.model.objects.filter(pk=pk, due_at__lte=now).update(
        claim=F("claim") + 1, due_at=now + lease
    )
    if not taken:
        return None
    # Inside the same transaction our own row lock keeps later claims out.
    row = machine.model.objects.get(pk=pk)
    if lost := row.claim - 1 - row.settled:
        _note_lost(machine, row, lost, now)
    return row


def _note_lost(machine: Machine, row: Any, lost: int, now: datetime) -> None:
    """Say that workers claimed the row and never settled: killed, stalled, out of memory.

    One is a deploy. Several in a row are a step that kills whoever takes it, which no exception
    ever tells.
    """
    note = (
        f"{lost} workers in a row did not come back" if lost > 1 else "A worker did not come back"
    )
    row.events.create(at=now, who=machine.name, was=row.phase, now=row.phase, note=note)
    changes: dict[str, Any] = {"version": F("version") + 1}
    if lost >= LOST_IS_A_FAILURE:
        row.failures, row.failure = lost, note
        changes |= {"failures": lost, "failure": note}
    machine.model.objects.filter(pk=row.pk).update(**changes)
    row.version += 1


def _ours(machine: Machine, row: Any) -> bool:
    return bool(machine.model.objects.filter(pk=row.pk, claim=row.claim).exists())


@transaction.atomic
def _settle(machine: Machine, row: Any, outcome: Outcome, now: datetime, *, failure: str) -> None:
    changes: dict[str, Any] = dict(outcome.changes)
    changes["settled"] = row.claim
    changes["failures"] = min(row.failures + 1, 30_000) if failure else 0
    if failure != row.failure:
        changes["failure"] = failure
    ours = machine.model.objects.filter(pk=row.pk, claim=row.claim)
    match outcome:
        case Go(to=to, requires=requires):
            seconds = 0.0
            ours = ours.filter(**requires)
            changes |= {
                "phase": to,
                "phase_since": now,
                "due_at": now if machine.table[to] else None,
            }
            if to in machine.no_return:
                # What was asked for after the step looked still counts.
                ours = ours.filter(**dict.fromkeys(machine.requests))
        case Wait(seconds=seconds):
            to = row.phase
            # Each request raises the version: one that came while the step ran is looked at now,
            # not after the step's rest.
            rested = When(version=row.version, then=Value(now + timedelta(seconds=seconds)))
            changes["due_at"] = Case(rested, default=Value(now))
    if outcome.changes or outcome.note or to != row.phase or "failure" in changes:
        changes["version"] = F("version") + 1
    if not ours.update(**changes):
        _give_back(machine, row, now)
        return
    if outcome.note or to != row.phase:
        row.events.create(at=now, who=machine.name, was=row.phase, now=to, note=outcome.note)
    if changes["due_at"] is not None and seconds <= HINT_SECONDS:
        transaction.on_commit(lambda: machine.enqueue(row.pk, to, seconds))


def _give_back(machine: Machine, row: Any, now: datetime) -> None:
    """Settle nothing: the request that stopped the edge is answered by the next claim."""
    ours = machine.model.objects.filter(pk=row.pk, claim=row.claim)
    if not ours.update(due_at=now, settled=row.claim):
        raise Overtaken(f"{row} was claimed again after {row.claim}")
    transaction.on_commit(lambda: machine.enqueue(row.pk, row.phase, 0.0))


def _after(machine: Machine, row: Any, error: Exception) -> tuple[Wait, str]:
    seconds = BACKOFF_SECONDS[min(row.failures, len(BACKOFF_SECONDS) - 1)]
    if machine.urgent(row):
        seconds = min(seconds, URGENT_SECONDS)
    if isinstance(error, Refused | Overtaken):
        failure = str(error)
    else:
        # What a library says may quote an address or a row; the worker's log has it whole.
        failure = f"{type(error).__name__}: see the worker's log for {row}"
    # The same failure again is one line in the log, not a hundred.
    note = failure if failure != row.failure else ""
    return Wait(seconds, note=note), failure
