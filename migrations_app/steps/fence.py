"""DRAIN to TARGET, and the same on the way back: the short time in which turns are refused."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from durable.driver import Clock, holding
from durable.errors import Refused
from durable.machine import Go, Outcome, Wait
from migrations_app import artifacts, channels, copying, memory, ports, queries, rehearsing
from migrations_app.copying import Meter, Timer
from migrations_app.domain.phases import (
    REVERSED,
    Mode,
    Phase,
)
from migrations_app.domain.verbs import where
from migrations_app.models import TenantMigration
from migrations_app.ports.base import (
    START,
    Mark,
    SessionStore,
    StoreBusy,
)
from migrations_app.steps import common
from tenants import queries as tenants_queries
from tenants import services as tenants
from tenants.domain.words import counted, duration, limit

LATE_SHARED = "late shared state at the closed source to be settled"
# Waiting on somebody inside the fence is polled inside the step, so that a fence never
# waits for a tick: every 50 ms, for up to 2 s.
POLL_SECONDS, POLL_FOR_SECONDS = 0.05, 2.0
# What DELTA brings over, and what VERIFY compares, in this order.
CARRIED = ("copy", "gone", "shared", "artifacts", "memory")
COMPARED = ("sessions", "shared", "artifacts")


def drain(move: TenantMigration, clock: Clock) -> Outcome:
    """Refuse new turns, wait for the proof that none runs, close the store, take the mark."""
    if move.fence_version is None:
        return _close_fence(move, clock)
    if late := common.past(move, clock):
        return late
    if move.drained_at is None:
        unproven = _await_proof(move, clock)
        if unproven is not None:
            return unproven
    home = copying.way(move).from_store
    if move.mode == Mode.CELL:
        # Not closed: that would close it to the cell that the tenant comes to.
        return Go(common.forward(move), f"Drained, {home} stays open", {"waiting_for": ""})
    if move.phase in REVERSED and not copying.carries_back(move):
        # Here, for the next phase's own writing would look the same.
        with copying.opened(move, move.source_store) as store:
            if copying.shared_came_late(move, store, clock):
                return common.waiting(move, LATE_SHARED, seconds=0.5)
    with copying.opened(move, home) as source:
        try:
            if copying.carries_back(move):
                # Before the other row ceases to tell of the split: read after a restore, a closed
                # target beside an open source would be a copy that nobody needs any more.
                with copying.opened(move, move.source_store) as written:
                    copying.take_written(move, written)
            source.take(mover=False, agents=False)
        except StoreBusy as busy:
            return Wait(busy.retry_after_seconds or 0.2)
        closed_at = clock()
    return Go(
        common.forward(move),
        f"Drained, {home} is closed",
        {
            "store_closed_at": closed_at,
            # DELTA's own sweep adds it up, row by row as it reads them.
            "mark": "",
            "changed": 0,
            "waiting_for": "",
            **common.sweeping(move, "copy"),
        },
    )


def _close_fence(move: TenantMigration, clock: Clock) -> Outcome:
    now, forecast = clock(), queries.to_copy(move)
    with holding(move) as row:
        # A repeated step finds the fence closed by its first run, and keeps that time.
        if row.fence_version is None:
            # To its very end: the flip, or the way out, is heard of at the fast cadence too.
            row.deadline_at = now + timedelta(seconds=move.budget_seconds)
            common.hurry(move, row.deadline_at)
            home = copying.way(move).from_cell
            row.fence_version = tenants.publish(move.tenant, home, accepts="none")
            row.fence_closed_at = now
            row.changed_at_drain = forecast
            row.save(
                update_fields=[
                    "fence_version",
                    "fence_closed_at",
                    "deadline_at",
                    "changed_at_drain",
                ]
            )
    return Wait(note=f"Fence closed at policy version {row.fence_version}")


def _await_proof(move: TenantMigration, clock: Clock) -> Outcome | None:
    """Return None once every instance has acknowledged, nothing is in flight, and that is kept."""
    assert move.fence_version is not None
    assert move.fence_closed_at is not None
    until = time.monotonic() + POLL_FOR_SECONDS
    while True:
        now = clock()
        proof = tenants_queries.fence_proof(
            copying.way(move).from_cell, move.tenant, move.fence_version, now=now
        )
        if proof.drained and _keep_proof(move, proof.lapsed, now):
            return None
        waited = (now - move.fence_closed_at).total_seconds()
        if waited > move.drain_bound_seconds:
            missing = [word.name for word in proof.missing]
            return common.out(
                move,
                f"Not drained after {limit(move.drain_bound_seconds)}:"
                f" {counted(proof.in_flight, 'turn')} in flight, waiting for"
                f" {', '.join(missing) or 'nobody'}",
            )
        if time.monotonic() >= until:
            missing = [word.name for word in proof.missing]
            return common.waiting(move, f"{', '.join(missing)} to drain", seconds=0.0)
        time.sleep(POLL_SECONDS)


def _keep_proof(move: TenantMigration, lapsed: Sequence[int], now: Any) -> bool:
    """Settle the proof: exactly the instances that it counted as lapsed are gone from now on."""
    with holding(move) as row:
        if not tenants.mark_lapsed(lapsed, now=now):
            # One of them spoke again after the proof was read: look anew.
            return False
        row.drained_at = now
        row.waiting_for = ""
        row.save(update_fields=["drained_at", "waiting_for"])
        note = "Every instance acknowledged, nothing in flight"
        row.events.create(at=now, who="mover", was=row.phase, now=row.phase, note=note)
    return True


def delta(move: TenantMigration, clock: Clock) -> Outcome:
    """Copy what changed, remove what was deleted, settle shared state. Nobody writes meanwhile."""
    if late := common.past(move, clock):
        return late
    timer = Timer(copying.FENCED_STEP_SECONDS)
    mark = Mark(move.mark)
    with copying.both(move) as (source, target):
        copying.take_written(move, target)

        def work(stage: str, meter: Meter) -> copying.Swept:
            if stage == "copy":
                return common.copy_changed(
                    move, source, target, meter, timer, clock, compare=False, mark=mark
                )
            return common.carry_over(
                move,
                source,
                target,
                stage,
                meter=meter,
                timer=timer,
                clock=clock,
                seen=mark.shared,
            )

        changes, finished = common.stages(move, timer, CARRIED, work)
    changes["mark"] = str(mark)
    if not finished:
        return Wait(changes=changes)
    changes |= common.sweeping(move, "sessions")
    return Go(common.forward(move), f"{counted(move.changed, 'session')} copied again", changes)


def verify(move: TenantMigration, clock: Clock) -> Outcome:
    """Every session must be equal, then the counts, then the source's mark."""
    if late := common.past(move, clock):
        return late
    timer = Timer(copying.FENCED_STEP_SECONDS)
    with copying.both(move) as (source, target):
        copying.take_written(move, target)
        # First: what a late write that was accepted leaves behind, its user's state, is no
        # difference once it is replaced.
        repaired = Meter()
        if common.repair(move, source, target, meter=repaired, clock=clock):
            # Replaying a session sets what its user shares; killed in it, a worker leaves that so.
            replayed = move.stage == "end" and ports.by_service(source, target)
            back = common.at_stage("shared") if replayed else {}
            done = repaired.changes(move) | back
            return Wait(note="Repaired what was asked for", changes=done)
        changes: dict[str, Any] = {}
        if move.stage != "end":

            def work(stage: str, meter: Meter) -> copying.Swept:
                if stage == "sessions":
                    return copying.prove(
                        move, source, target, meter=meter, timer=timer, clock=clock
                    )
                if stage == "shared":
                    return copying.settle_shared(
                        move, source, target, meter=meter, timer=timer, write=False, clock=clock
                    )
                return artifacts.sweep(move, meter=meter, timer=timer, clock=clock, write=False)

            changes, finished = common.stages(move, timer, COMPARED, work)
            if not finished:
                return Wait(changes=changes)
            changes |= common.at_stage("end")
        verdict = _verdict(move, source, target, clock)
    return replace(verdict, changes={**changes, **verdict.changes})


def _verdict(
    move: TenantMigration, source: SessionStore, target: SessionStore, clock: Clock
) -> Outcome:
    """Everything was compared: wait for what is open, count, and look at the mark last."""
    if count := queries.open_mismatches(move):
        what = counted(count, "mismatch", "mismatches")
        return common.waiting(move, f"{what} to be repaired", seconds=0.5)
    if owed := _owed_beside(move, source, clock):
        return common.waiting(move, owed, seconds=0.2)
    if move.flip_by_hand and move.flip_requested_at is None and move.phase == Phase.VERIFY:
        return common.waiting(move, "somebody's word to flip", seconds=0.2)
    sides = copying.way(move)
    split = queries.split_live(move)
    ours, theirs = ports.counts_of_both(source, target)
    if split:
        # The other side has sessions of its own, which come and go: our list is what to count by.
        if (known := move.stamps.exclude(target_stamp="").count()) != ours.sessions:
            raise CountsDiffer(
                f"{sides.from_store} counts {counted(ours.sessions, 'session')}, {known:,} were"
                " copied, although every one is equal."
            )
    elif ours != theirs:
        _report_extra(move, source, target, clock)
        if not queries.open_mismatches(move):
            raise CountsDiffer(
                f"{sides.from_store} counts {ours.held},"
                f" {sides.to_store} {theirs.sessions:,} of {theirs.users:,}, although every"
                " session is equal."
            )
        return Wait(note=f"{sides.to_store} holds sessions that {sides.from_store} does not")
    guard = source.guard()
    if guard is None or guard.move != move.pk or guard.agents:
        return common.out(
            move, f"{sides.from_store} is not closed by this move any more: nothing was cut over"
        )
    if (
        move.phase in REVERSED
        and not split
        and copying.listed(move) != Mark(target.mark()).of_sessions
    ):
        # Written at the source behind its comparison: it opens to agents next.
        return Wait(
            note=f"{sides.to_store} changed: compared again",
            changes=common.sweeping(move, "sessions"),
        )
    # Last: a writer that got past everything else shows here.
    if source.mark() != move.mark:
        return common.out(
            move,
            f"{sides.from_store} changed after it was closed (a fence leak): nothing was cut over",
        )
    return Go(
        common.forward(move),
        f"{ours.held} are equal on both sides",
        {"waiting_for": "", "sessions": ours.sessions, "users": ours.users, **common.at_stage("")},
    )


def _owed_beside(move: TenantMigration, source: SessionStore, clock: Clock) -> str:
    """Return what memory or a required side channel still lacks, in words; "" nothing."""
    # Memory comes last: it is searched, which a move that waits for a person need not repeat.
    channels.run(move, timer=Timer(), clock=clock)
    if owed := queries.channels_before_flip(move):
        return owed
    return memory.verify(move, source, meter=Meter(), timer=Timer(), clock=clock)


class CountsDiffer(Refused):
    """Counts of the two sides differ although no session does."""


def _report_extra(
    move: TenantMigration, source: SessionStore, target: SessionStore, clock: Clock
) -> None:
    """Name sessions that only the target has."""
    after = START
    while page := target.page(after, copying.PAGE):
        keys = [key for key, _ in page]
        here = source.stamps(keys)
        if extra := [key for key in keys if key not in here]:
            copying.compare(move, source, target, extra, meter=Meter(), clock=clock)
        after = keys[-1]


def target(move: TenantMigration, clock: Clock) -> Outcome:
    """Open the target's store, then flip the placement: from here on it is the tenant's home."""
    opened_at, words = _flip(move, "placement_version", move.started_by, move.reason, clock)
    soak_until = opened_at + timedelta(seconds=move.soak_seconds)
    return Go(Phase.SOAK, words, {"soak_until": soak_until})


def reverse_target(move: TenantMigration, clock: Clock) -> Outcome:
    """Open the source's store, then flip the placement back. The target stays closed and whole."""
    opened_at, words = _flip(
        move,
        "back_placement_version",
        move.rollback_requested_by,
        f"rolled back: {move.rollback_reason}",
        clock,
    )
    if move.rehearsal:
        with holding(move) as row:
            rehearsing.keep_figures(row)
    return Go(Phase.ROLLED_BACK, words, {"ended_at": opened_at, "waiting_for": ""})


def _flip(
    move: TenantMigration, column: str, by: str, reason: str, clock: Clock
) -> tuple[datetime, str]:
    """Make the far side of the `way` the tenant's home, once; return when, and what to log."""
    sides, now = copying.way(move), clock()
    if move.mode != Mode.CELL:
        with copying.opened(move, sides.to_store) as store:
            store.take(mover=False, agents=True)
    with holding(move) as row:
        # A repeated step finds what its first run published.
        if getattr(row, column) is None:
            why = f"{move}: {reason}"
            if copying.carries_back(move):
                version = tenants.unsplit(move.tenant, by=by, reason=why, now=now)
            else:
                version = tenants.place(
                    move.tenant,
                    cell=sides.to_cell,
                    store=sides.to_store,
                    by=by,
                    reason=why,
                    now=now,
                )
            setattr(row, column, version)
            row.fence_opened_at = now
            row.save(update_fields=[column, "fence_opened_at"])
    assert row.fence_opened_at is not None
    assert row.fence_closed_at is not None
    closed = row.fence_opened_at - row.fence_closed_at
    home = where(move.mode, sides.to_cell, sides.to_store)
    return row.fence_opened_at, (
        f"Placement version {getattr(row, column)}: {move.tenant} lives {home}."
        f" The fence was closed for {duration(closed.total_seconds())}"
    )
