"""What leads back: out of SOAK by a rollback, out of SPLIT by an abort."""

from __future__ import annotations

from typing import Any

from durable.driver import Clock, holding
from durable.machine import Go, Outcome
from migrations_app import copying, queries
from migrations_app.domain.phases import Mode, Phase
from migrations_app.models import TenantMigration
from migrations_app.preflight import way_back
from migrations_app.steps import common
from tenants.domain.words import counted, duration

# The columns of a fence before it is closed.
NO_FENCE: dict[str, Any] = {
    "fence_version": None,
    "fence_closed_at": None,
    "fence_opened_at": None,
    "deadline_at": None,
    "deadline_held_by": "",
    "drained_at": None,
    "store_closed_at": None,
    "changed_at_drain": None,
}


def roll_back(move: TenantMigration, clock: Clock) -> Outcome:
    """Begin the way back once everything that it needs is there; until then say what is missing."""
    now = clock()
    with holding(move):
        # Instances must be at the fast cadence before the fence may close.
        common.hurry(move, now)
    if red := way_back(move, now=now):
        return common.waiting(move, "; ".join(f"{check.name}: {check.detail}" for check in red))
    split = queries.split_live(move)
    # In a split there is no closed source to be written late.
    if not split and (count := queries.open_mismatches(move)):
        return common.waiting(move, f"{counted(count, 'late write')} to be settled")
    quote = queries.fence_quote(move, now=now)
    if worst := common.too_long(move, quote):
        return common.waiting(move, worst)
    if move.mode != Mode.CELL:
        with copying.opened(move, move.target_store) as target:
            if not target.can_close():
                # A trigger was dropped: the store would take late writers behind a closed fence.
                target.provision()
    if slow := common.not_hurried(move.target_cell, now):
        return common.waiting(move, slow, seconds=0.2)
    return Go(
        Phase.REVERSE_DRAIN,
        f"Rolling back: expected {duration(quote.expected)}, at most {duration(quote.worst)}",
        {
            "past_fences": fences(move),
            "quote": quote.as_json(),
            "rollback_requested_at": None,
            "waiting_for": "",
            "source_mark": move.mark,
            "came_from": move.phase,
            **NO_FENCE,
            **common.at_stage(""),
        },
        # Taken back while this step ran, it does not begin.
        {"rollback_requested_at__isnull": False},
    )


def fences(move: TenantMigration) -> list[dict[str, Any]]:
    """Return the facts of every fence so far, the last one among them."""
    if move.fence_closed_at is None:
        # None was closed since the last one listed.
        return list(move.past_fences)
    times = {
        name: at.isoformat() if (at := getattr(move, name)) else None
        for name in ("fence_closed_at", "fence_opened_at")
    }
    last = {"back": move.came_from != "", "quote": move.quote, **times}
    return [*move.past_fences, last]
