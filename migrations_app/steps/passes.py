"""BACKFILL: sessions go over while the tenant is live, pass after pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import datetime

from durable.driver import Clock, holding
from durable.machine import Go, Outcome, Wait
from migrations_app import channels, copying, pacing, queries
from migrations_app.copying import Meter, Timer
from migrations_app.domain.phases import Phase
from migrations_app.models import TenantMigration
from migrations_app.ports.base import (
    GuardTaken,
    SessionStore,
    SharedRow,
)
from migrations_app.steps import common
from tenants import services as tenants
from tenants.domain.words import counted

# A last pass younger than this is fresh enough to close the fence on.
FRESH_SECONDS = 5.0
# While the move waits for a person, passes go on this often, or at a tenth of the time.
IDLE_SECONDS = 15.0


def backfill(move: TenantMigration, clock: Clock) -> Outcome:
    """Copy while the tenant is live, pass after pass, until the fence, or the split, may begin."""
    return _ready(move, clock) if move.stage == "ready" else copy_pass(move, clock)


def copy_pass(
    move: TenantMigration,
    clock: Clock,
    seen: Callable[[Sequence[SharedRow]], None] = lambda rows: None,
) -> Wait:
    """Take the next step of a pass over what has changed; its last stage leads to "ready".

    Once both sides of a split serve, nothing is deleted or replaced: what is gone at the source
    may have been born again on the target, and shared state is merged inside the fence. Each
    page of shared state that was written is shown to `seen`.
    """
    if move.stage == "":
        return _begin_pass(move, clock)
    meter, timer = Meter(), Timer()
    with copying.both(move) as (source, target):
        copying.take_written(move, target)
        common.repair(move, source, target, meter=meter, clock=clock)
        after = _behind(move)
        if move.stage == "copy":
            outcome = _copy_sweep(move, source, target, meter, timer, clock, then=after[0])
        else:
            swept = common.carry_over(
                move,
                source,
                target,
                move.stage,
                meter=meter,
                timer=timer,
                clock=clock,
                seen=seen,
            )
            then = after[after.index(move.stage) + 1]
            outcome = common.after_sweep(move, meter, swept, then=then)
        if outcome.changes["stage"] == "ready" and not queries.opens_target(move):
            outcome = _end_pass(move, outcome, _mark_seconds(move, source), clock)
    copying.sample(move, outcome.changes, clock)
    return outcome


def _behind(move: TenantMigration) -> tuple[str, ...]:
    """Return the stages of a pass behind the sessions' own."""
    if queries.split_live(move):
        return ("artifacts", "memory", "ready")
    if queries.opens_target(move):
        # New sessions wait for this: what can go over once both sides serve is not among it.
        return ("gone", "shared", "ready")
    # Places that name a renumbered version are listed once now, and once more after the cutover.
    once = ("references",) if move.passes == 1 else ()
    return ("gone", "shared", "artifacts", "memory", *once, "ready")


def _mark_seconds(move: TenantMigration, source: SessionStore) -> float:
    """Time the mark that the fence will take, once: on SQLite it is a long look at a live file.

    What a move begins with is of another day, and is measured anew.
    """
    if move.mark_seconds is not None and move.passes > 1:
        return move.mark_seconds
    begun = time.perf_counter()
    source.mark()
    return time.perf_counter() - begun


def _begin_pass(move: TenantMigration, clock: Clock) -> Wait:
    now = clock()
    with copying.opened(move, move.source_store) as source:
        _check_source(move, source)
        counts = source.counts()
    with holding(move):
        # What runtimes serve from now on is what the fence will have to copy again.
        tenants.track(move.tenant, until=now + common.TRACKED)
    return Wait(
        note="" if move.passes else f"The first pass begins: {counted(counts.sessions, 'session')}",
        changes={
            "passes": move.passes + 1,
            "pass_started_at": now,
            "sessions": counts.sessions,
            "users": counts.users,
            "done": 0,
            "todo": counts.sessions,
            "changed": 0,
            **common.at_stage("copy"),
        },
    )


def _check_source(move: TenantMigration, source: SessionStore) -> None:
    """Raise unless tables and guard row still are what PREPARE made sure of.

    Found missing behind a closed fence they would have refused the tenant's turns for nothing.
    """
    copying.check_tables((source, move.source_store))
    if not common.guards(move, source, str(move.source_store)):
        raise GuardTaken(f"{move.source_store} is guarded by another move than {move}.")


def _end_pass(move: TenantMigration, outcome: Wait, mark_seconds: float, clock: Clock) -> Wait:
    changed = outcome.changes["changed"]
    first = move.passes == 1
    ends = f"Pass {move.passes} ends: {counted(changed, 'session')} copied"
    note = ends if first or changed else ""
    return Wait(
        note=note,
        changes={
            **outcome.changes,
            "changed_last": changed,
            "mark_seconds": mark_seconds,
            "pass_ended_at": clock(),
        },
    )


def _copy_sweep(
    move: TenantMigration,
    source: SessionStore,
    target: SessionStore,
    meter: Meter,
    timer: Timer,
    clock: Clock,
    *,
    then: str,
) -> Wait:
    """Copy, while the tenant is live, what differs from its recorded stamp, at the chosen pace."""
    began = time.monotonic()
    pace = pacing.pace(move, now=clock())
    swept = common.copy_changed(move, source, target, meter, timer, clock, compare=True, pace=pace)
    outcome = common.after_sweep(move, meter, swept, then=then)
    worked = time.monotonic() - began
    return pacing.settled(move, source, target, meter, outcome, per_second=pace, worked=worked)


def _ready(move: TenantMigration, clock: Clock) -> Outcome:
    """Between passes: close the fence if it may, else wait, and keep the copy fresh."""
    now = clock()
    if queries.repairs_asked(move):
        return repair_now(move, clock)
    if channels.run(move, timer=Timer(), clock=clock):
        return Wait()
    if blocked := _not_yet(move, now):
        return between_passes(move, blocked, now)
    if common.forward(move) == Phase.SPLIT:
        note = f"{move.tenant} is split: new sessions will begin on {move.target_store}"
        changes = {"waiting_for": "", **common.at_stage("")}
        return Go(Phase.SPLIT, note, changes, common.asked_for(move))
    return may_close(move, clock)


def between_passes(
    move: TenantMigration, what: str, now: datetime, *, seconds: float = 1.0
) -> Wait:
    """Wait for what is said, and keep the copy fresh meanwhile."""
    age, took = _last_pass(move, now)
    if age >= max(IDLE_SECONDS, 10 * took):
        return Wait(changes=common.at_stage(""))
    return common.waiting(move, what, seconds=seconds)


def _last_pass(move: TenantMigration, now: datetime) -> tuple[float, float]:
    """Return how long ago the last pass ended and how long it took (seconds)."""
    assert move.pass_started_at is not None
    assert move.pass_ended_at is not None
    took = move.pass_ended_at - move.pass_started_at
    return (now - move.pass_ended_at).total_seconds(), took.total_seconds()


def may_close(move: TenantMigration, clock: Clock) -> Outcome:
    """Close the fence if everything is fresh, short and listening enough; else wait for that."""
    now = clock()
    quote = queries.fence_quote(move, now=now)
    age, took = _last_pass(move, now)
    with holding(move):
        # Named instances must be at the fast cadence before the fence may close.
        common.hurry(move, now)
    if age >= FRESH_SECONDS + took:
        return Wait(changes=common.at_stage(""))
    if worst := common.too_long(move, quote):
        if age < max(1, took):
            return common.waiting(move, worst)
        return Wait(changes=common.at_stage(""))
    with copying.opened(move, move.source_store) as source:
        older = source.still_writing(move.older_writers)
        _check_source(move, source)
        if not source.can_close():
            # A trigger was dropped: the store would take late writers behind a closed fence.
            source.provision()
    if older:
        return common.waiting(move, f"transactions older than the guard: {', '.join(older)}")
    if slow := common.not_hurried(move.source_cell, now):
        return common.waiting(move, slow, seconds=0.2)
    return common.close(move, quote)


def _not_yet(move: TenantMigration, now: datetime) -> str:
    """Return what a person has to do, or which time has to come, before the fence may close."""
    if count := queries.open_mismatches(move):
        return f"{counted(count, 'mismatch', 'mismatches')} to be repaired"
    return queries.channels_before_fence(move) or common.not_yet(move, now)


def repair_now(move: TenantMigration, clock: Clock) -> Wait:
    meter = Meter()
    with copying.both(move) as (source, target):
        copying.take_written(move, target)
        done = common.repair(move, source, target, meter=meter, clock=clock)
    return Wait(note=f"{done} repaired or looked at again", changes=meter.changes(move))
