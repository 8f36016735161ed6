"""SPLIT: new sessions begin on the target, known ones stay at the source until they are idle."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from durable.driver import Clock, holding
from durable.machine import Outcome, Wait
from migrations_app import channels, copying, merging, queries
from migrations_app.copying import Timer
from migrations_app.domain.phases import Phase
from migrations_app.models import TenantMigration
from migrations_app.steps import back, common, passes
from tenants import queries as tenants_queries
from tenants import services as tenants
from tenants.domain.words import clock as clock_words
from tenants.domain.words import duration, limit
from tenants.models import Store

# How often a split that waits is looked at; whoever asks something of it is answered at once.
BUSY_SECONDS = 5.0


def split(move: TenantMigration, clock: Clock) -> Outcome:
    """Let the target take new sessions, then wait until the source's are idle, up to a bound.

    In this order: the source stops taking new ones; when no turn runs that began before, nothing
    can be born there any more; what was deleted there is removed, and what it shares goes over,
    which is the base of a later merge; only then the target takes new ones. No session is copied
    for that, for the source serves those that it has.
    """
    if queries.owes_opening(move):
        return stay(move, clock)
    if move.split_version is None:
        return _keep_existing(move, clock)
    if move.stage == "existing":
        return _await_older(move, clock)
    if queries.split_live(move):
        return _until_idle(move, clock)
    if move.stage != "ready":
        return passes.copy_pass(move, clock, seen=lambda rows: merging.keep_base(move, rows))
    return _take_new(move, clock)


def _keep_existing(move: TenantMigration, clock: Clock) -> Wait:
    """Publish that the source takes only sessions that it has."""
    now = clock()
    with holding(move) as row:
        # A repeated step finds what its first run published.
        if row.split_version is None:
            common.hurry(move, now)
            row.split_version = tenants.publish(move.tenant, move.source_cell, accepts="existing")
            row.split_at = now
            row.save(update_fields=["split_version", "split_at"])
    return Wait(
        note=f"{move.source_cell} takes no new sessions from policy version {row.split_version}",
        changes=common.at_stage("existing"),
    )


def _await_older(move: TenantMigration, clock: Clock) -> Outcome:
    """Wait until every instance knows, and turns that it let in before have ended."""
    now = clock()
    assert move.split_version is not None
    assert move.split_at is not None
    with holding(move):
        common.hurry(move, now)
    proof = tenants_queries.older_proof(move.source_cell, move.tenant, move.split_version, now=now)
    if proof.drained:
        with holding(move):
            # As in a fence: exactly those that the proof counted as lapsed are gone from now on.
            settled = tenants.mark_lapsed(proof.lapsed, now=now)
        if settled:
            note = "Nothing can be born at the source any more"
            # None of them counts as passed: each is looked up, whatever the last sweep counted.
            behind = {"done": 0, **common.at_stage("gone")}
            return Wait(note=note, changes={"waiting_for": "", **behind})
        return Wait(0.2)
    missing = [word.name for word in proof.missing]
    if (now - move.split_at).total_seconds() > move.drain_bound_seconds:
        # New sessions are refused meanwhile: that may not last.
        bound = limit(move.drain_bound_seconds)
        return common.out(move, f"Not split after {bound}: waiting for {', '.join(missing)}")
    return common.waiting(move, f"{', '.join(missing)} to let earlier turns end", seconds=0.2)


def _take_new(move: TenantMigration, clock: Clock) -> Wait:
    """Open the target to agents beside this move, then name both sides to gateways."""
    with copying.opened(move, move.target_store) as target:
        target.take(mover=True, agents=True)
    now = clock()
    with holding(move) as row:
        if row.abort_requested_at is not None:
            # Asked for since this step began: nothing was born yet, so the short way leads out.
            return Wait()
        if row.split_placement_version is None:
            row.split_placement_version = tenants.split(
                move.tenant,
                cell=move.target_cell,
                store=move.target_store,
                by=move.started_by,
                reason=f"{move}: {move.reason}",
                now=now,
            )
            row.save(update_fields=["split_placement_version"])
    return Wait(
        note=f"Placement version {row.split_placement_version}: new sessions begin on"
        f" {move.target_store}",
        changes={"quiet_since": None, "born": 0, **common.at_stage("")},
    )


def _let_write(move: TenantMigration, store: Store, *, mover: bool) -> None:
    """Open one side to agents, where this move guards it."""
    with copying.opened(move, store) as port:
        if common.guards(move, port, str(store)):
            port.take(mover=mover, agents=True)


def _until_idle(move: TenantMigration, clock: Clock) -> Outcome:
    """Copy what changes at the source, pass after pass, until nothing does or the time is up."""
    if move.stage != "ready":
        outcome = passes.copy_pass(move, clock)
        if outcome.changes.get("stage") != "ready":
            return outcome
        return Wait(note=outcome.note, changes={**outcome.changes, **_looked(move, outcome)})
    now = clock()
    if queries.repairs_asked(move):
        return passes.repair_now(move, clock)
    if move.rollback_requested_at is not None:
        return back.roll_back(move, clock)
    if channels.run(move, timer=Timer(), clock=clock):
        return Wait()
    # A side channel is owed that was registered, or whose copy was taken back, since the split.
    if waits := _busy(move, now) or queries.channels_before_fence(move):
        return passes.between_passes(move, waits, now, seconds=BUSY_SECONDS)
    return passes.may_close(move, clock)


def _looked(move: TenantMigration, outcome: Wait) -> dict[str, Any]:
    """Return since when the source is quiet, and how much was born, at the end of a pass."""
    with copying.opened(move, move.target_store) as target:
        there = target.counts().sessions
    copied = move.stamps.exclude(target_stamp="").count()
    quiet = None if outcome.changes["changed"] else (move.quiet_since or move.pass_started_at)
    return {"quiet_since": quiet, "born": max(there - copied, 0)}


def _busy(move: TenantMigration, now: datetime) -> str:
    """Return what is waited for while the source's sessions are not idle; "" once they are."""
    assert move.split_at is not None
    until = move.split_at + timedelta(seconds=move.idle_bound_seconds)
    if now >= until:
        return ""
    idle = duration(move.idle_seconds)
    at_most = f"at the latest {clock_words(until, now)}"
    if move.quiet_since is None:
        return f"the source's sessions to be idle for {idle}, {at_most}"
    quiet = (now - move.quiet_since).total_seconds()
    if quiet < move.idle_seconds:
        return f"{idle} without a change at the source, {duration(quiet)} so far, {at_most}"
    return ""


def stay(move: TenantMigration, clock: Clock) -> Wait:
    """Come back to the split from a fence that was left: open what it closed, then publish.

    Forward that is the source, on the way back the target. What was carried back meanwhile is the
    source's own from now on. Idle time, and its bound, count anew. A way back that ran out of
    time is still wanted: only a person who stops it takes that back.
    """
    came_back = move.came_from == Phase.SPLIT
    # First the store: a runtime that is told to accept must find it open. And before the target
    # opens nobody who stalled on the way back may still write the source.
    _let_write(move, move.source_store, mover=came_back)
    if came_back:
        _let_write(move, move.target_store, mover=True)
        # Only now: of both guard rows one at least has to tell of the split at any moment.
        _let_write(move, move.source_store, mover=False)
    now = clock()
    with holding(move) as row:
        if row.fence_opened_at is None:
            if came_back:
                tenants.split_anew(
                    move.tenant,
                    by=row.rollback_requested_by,
                    reason=f"{move}: back to the split",
                    now=now,
                )
            else:
                tenants.publish(move.tenant, move.source_cell, accepts="existing")
            row.fence_opened_at = now
            if came_back and row.abort_requested_at is None:
                # It ran out of time, and nobody has taken the wish back: it is tried again.
                row.rollback_requested_at = now
            # Asked of the fence, and answered by this.
            row.abort_requested_at, row.abort_requested_by, row.abort_reason = None, "", ""
            row.save(
                update_fields=[
                    "fence_opened_at",
                    "rollback_requested_at",
                    "abort_requested_at",
                    "abort_requested_by",
                    "abort_reason",
                ]
            )
        move.stamps.filter(carried_back=True).update(carried_back=False)
    home = move.target_store if came_back else move.source_store
    return Wait(
        note=f"{home} is open again: both sides serve",
        changes={
            "past_fences": back.fences(row),
            "came_from": "",
            "split_at": now,
            "quiet_since": None,
            "waiting_for": "",
            **back.NO_FENCE,
            **common.at_stage(""),
        },
    )
