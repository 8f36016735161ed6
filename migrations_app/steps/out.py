"""REOPEN: the way out of a move that was aborted."""

from __future__ import annotations

from durable.driver import Clock, holding
from durable.machine import Go, Outcome, Wait
from migrations_app import artifacts, copying, memory
from migrations_app.copying import Timer
from migrations_app.domain.phases import Mode, Phase
from migrations_app.domain.verbs import where
from migrations_app.models import TenantMigration
from migrations_app.steps import common
from tenants import services as tenants


def reopen(move: TenantMigration, clock: Clock) -> Outcome:
    """Open the store, then the policy, then remove from the target only what this move wrote."""
    if move.stage != "clean":
        common.let_agents_in(move, move.source_store)
        now = clock()
        with holding(move) as row:
            refused = row.fence_version is not None or row.split_version is not None
            if refused and row.fence_opened_at is None:
                tenants.publish(move.tenant, move.source_cell, accepts="all")
                row.fence_opened_at = now
                row.save(update_fields=["fence_opened_at"])
            if row.announced_version is not None:
                tenants.withdraw(move.tenant, move.target_cell)
        note = f"{move.tenant} is open {where(move.mode, move.source_cell, move.source_store)}"
        return Wait(note=note, changes={**common.at_stage("clean"), "waiting_for": ""})
    if move.mode == Mode.CELL:
        return Go(
            Phase.ABORTED, f"{move.tenant} stays in {move.source_cell}", {"ended_at": clock()}
        )
    if move.leave_requested_at is not None:
        return Go(
            Phase.ABORTED,
            f"Ended with leftovers on {move.target_store}, by {move.leave_requested_by}",
            {"ended_at": clock()},
        )
    # First those: their names are told by the sessions that stand beside them.
    taken = artifacts.remove_copied(move, "target", timer=Timer())
    if not taken.finished:
        return Wait(changes=common.at_stage("clean", taken.cursor))
    with copying.opened(move, move.target_store) as store:
        if common.guards(move, store, str(move.target_store)):
            store.take(mover=True, agents=False)
            # Before the copies, whose events tell what it has of them.
            if not memory.clear(move, store, timer=Timer(), clock=clock):
                return Wait(changes={"done": move.done})
            if not copying.delete_copied(move, store, timer=Timer()):
                return Wait(changes={"done": move.done})
            store.take(mover=False, agents=False)
    return Go(Phase.ABORTED, f"Nothing is left on {move.target_store}", {"ended_at": clock()})
