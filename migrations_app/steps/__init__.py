"""What a move does in each phase: one idempotent, bounded step each.

A module holds a stretch of phases. A step may run again after any crash, and a stalled one may
wake long after another worker has gone on. So every effect is guarded: in a store by its guard
row, which is taken under this step's claim first; in our own database by `holding`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from durable.driver import Clock, Machine
from durable.machine import Go, Outcome, Wait
from migrations_app import queries
from migrations_app.domain.phases import (
    FENCED,
    NO_RETURN,
    PROMPT,
    TABLE,
    UNPAUSABLE,
    Mode,
    Phase,
    way_out,
)
from migrations_app.models import TenantMigration
from migrations_app.ports.base import Unfinished
from migrations_app.steps import common
from migrations_app.steps.fence import delta, drain, reverse_target, target, verify
from migrations_app.steps.out import reopen
from migrations_app.steps.passes import backfill
from migrations_app.steps.preparing import prepare
from migrations_app.steps.soaking import offboard, soak, stay
from migrations_app.steps.splitting import split
from tenants import queries as tenants_queries


def _way_out(move: TenantMigration) -> Phase | None:
    if move.phase == Phase.SPLIT and (queries.split_live(move) or queries.owes_opening(move)):
        # Sessions were born on the target: only the way back leads out, or a fence is ended first.
        return None
    return way_out(Mode(move.mode), Phase(move.phase), move.came_from)


def _while_paused(move: TenantMigration, clock: Clock) -> Outcome:
    """A pause stops the work, not the clock: a closed fence still has its deadline."""
    if move.phase in FENCED and (late := common.past(move, clock)):
        return late
    if queries.owes_opening(move):
        # Nobody's pause keeps the tenant refused behind a fence that has no deadline any more.
        return (split if move.phase == Phase.SPLIT else stay)(move, clock)
    if queries.opens_target(move):
        # Nor does it keep new sessions waiting that neither side takes.
        return split(move, clock)
    return Wait(1.0)


Step = Callable[[TenantMigration, Clock], Outcome]


def _pausing(step: Step, move: TenantMigration, clock: Clock) -> Outcome:
    """Take a step, and pause where it would enter the phase that the move was told to pause before.

    The move stays in the phase that it is in, as if a person had paused it in time: whatever that
    phase has looked at is looked at again when it goes on, and a closed fence keeps its deadline.
    The step's answer is void, as a killed worker's is.
    """
    try:
        outcome = step(move, clock)
    except Unfinished as unfinished:
        # Out of time, not out of order: it goes on at once, and nothing is alarmed.
        return Wait(note=common.once(move, str(unfinished)))
    if not isinstance(outcome, Go) or outcome.to != move.pause_before:
        return outcome
    asked = f"before {outcome.to.upper()}, as asked at the start"
    return Wait(
        note=f"Paused {asked}",
        changes={
            "pause_before": "",
            "pause_requested_at": clock(),
            "pause_requested_by": move.started_by,
            "pause_reason": asked,
            "waiting_for": "",
        },
    )


STEPS: dict[Phase, Callable[[TenantMigration, Clock], Outcome]] = {
    Phase.PREPARE: prepare,
    Phase.BACKFILL: backfill,
    Phase.SPLIT: split,
    Phase.DRAIN: drain,
    Phase.DELTA: delta,
    Phase.VERIFY: verify,
    Phase.TARGET: target,
    Phase.SOAK: soak,
    Phase.OFFBOARD: offboard,
    Phase.REOPEN: reopen,
    Phase.REVERSE_DRAIN: drain,
    Phase.REVERSE_DELTA: delta,
    Phase.REVERSE_VERIFY: verify,
    Phase.REVERSE_TARGET: reverse_target,
}


def machine(enqueue: Callable[[int, Any, float], None]) -> Machine:
    """Return the machine of moves; `enqueue` hands (id, phase, seconds) to a worker."""
    return Machine(
        model=TenantMigration,
        table=TABLE,
        steps={phase: partial(_pausing, step) for phase, step in STEPS.items()},
        way_out=_way_out,
        no_return=NO_RETURN,
        unpausable=UNPAUSABLE,
        urgent=lambda move: (
            move.phase in PROMPT or queries.owes_opening(move) or queries.opens_target(move)
        ),
        enqueue=enqueue,
        requests=("abort_requested_at", "pause_requested_at", "rollback_requested_at"),
        while_paused=_while_paused,
        halted=tenants_queries.halted,
    )
