"""SOAK and what leads out of it: OFFBOARD, or the way back."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from durable.driver import Clock, holding
from durable.errors import Refused
from durable.machine import Go, Outcome, Wait
from migrations_app import artifacts, copying, memory, queries
from migrations_app.copying import Meter, Timer
from migrations_app.domain.mismatch import Looks
from migrations_app.domain.phases import Mode, Phase
from migrations_app.domain.verbs import where
from migrations_app.models import TenantMigration
from migrations_app.ports.base import (
    START,
    Mark,
    SessionStore,
    StoreRefused,
)
from migrations_app.steps import back, common
from migrations_app.steps.fence import LATE_SHARED
from tenants import services as tenants
from tenants.domain.words import counted

# How often SOAK counts what a rollback would carry back, and looks for late writes.
LOOK_SECONDS = 60.0
# How many sessions that OFFBOARD left are named in the log.
LEFT_NAMED = 20


def soak(move: TenantMigration, clock: Clock) -> Outcome:
    """Keep the source closed and whole for a fixed time, then wait to be allowed to delete it.

    Meanwhile it looks, again and again, at what a rollback would have to carry back, and
    whether somebody got past the closed source.
    """
    if queries.owes_opening(move):
        return stay(move, clock)
    # One store has nothing to carry back, and no closed side to be written late.
    if move.mode != Mode.CELL and (looked := _look(move, clock)) is not None:
        return looked
    if move.rollback_requested_at is not None:
        return back.roll_back(move, clock)
    assert move.soak_until is not None
    left = (move.soak_until - clock()).total_seconds()
    if left > 0:
        return Wait(min(left, LOOK_SECONDS))
    if move.mode == Mode.CELL:
        return Go(Phase.DONE, "The soak is over", {"waiting_for": "", "ended_at": clock()})
    if move.rehearsal:
        return _go_back(move, clock)
    if move.offboard_automatically or move.offboard_confirmed_at:
        return Go(
            Phase.OFFBOARD,
            "The soak is over",
            {
                "waiting_for": "",
                "done": 0,
                "todo": move.stamps.count(),
                "deleted": 0,
                **common.at_stage(""),
            },
        )
    return common.waiting(move, "the typed confirmation to delete the source's copy", seconds=2.0)


def _go_back(move: TenantMigration, clock: Clock) -> Wait:
    """Ask for a rehearsal's way back, once: who stops it, or what did, is not overruled."""
    if move.came_from:
        return common.waiting(move, "somebody to roll back: the way back was stopped", seconds=2.0)
    with holding(move) as row:
        if row.rollback_requested_at is None:
            row.rollback_requested_at, row.rollback_requested_by = clock(), row.started_by
            row.rollback_reason = "rehearsed"
            row.save(
                update_fields=[
                    "rollback_requested_at",
                    "rollback_requested_by",
                    "rollback_reason",
                ]
            )
    return Wait(note="Rehearsed as far as the target: the way back is asked for")


def _look(move: TenantMigration, clock: Clock) -> Outcome | None:
    """Count what the tenant has touched since the cutover, and find late writes; None: not due."""
    now = clock()
    if move.stage == "":
        # A look reads every stamp: a twentieth of the time at most, whatever the tenant's size.
        names = move.artifacts / move.artifact_look_rate if move.artifact_look_rate else 0.0
        every = max(LOOK_SECONDS, 20 * ((move.scan_seconds or 0) + names))
        if move.touched_at is not None and (now - move.touched_at).total_seconds() < every:
            return None
        with holding(move):
            tenants.track(move.tenant, until=now + common.TRACKED)
            if move.touched_at is not None:
                # What runtimes served before the last look is counted in it.
                tenants.forget_served(move.tenant, before=move.touched_at)
        # Once more than in BACKFILL, now that every number is settled.
        first = common.at_stage("references" if move.touched_at is None else "touched")
        return Wait(changes={"changed": 0, "done": 0, "pass_started_at": now, **first})
    try:
        if move.stage == "artifacts":
            return _find_late_artifacts(move, clock)
        with copying.both(move) as (source, target):
            if move.stage == "references":
                swept = artifacts.find_references(move, source, timer=Timer())
                return common.after_sweep(move, Meter(), swept, then="touched")
            if move.stage == "touched":
                return _count_touched(move, source, target, clock)
            return _find_late_writes(move, source, target, clock)
    except (StoreRefused, copying.TablesLost) as refused:
        # The soak goes on: the tenant lives on the target. A rollback, or OFFBOARD, will say.
        note = f"Can't be looked at: {refused}"
        changes = {"waiting_for": str(refused), "touched_at": now, **common.at_stage("")}
        return Wait(note=common.once(move, note), changes=changes)


def _count_touched(
    move: TenantMigration, source: SessionStore, target: SessionStore, clock: Clock
) -> Wait:
    """Walk our own list: what is not as it was recorded was written or deleted since."""
    swept, alive, touched = copying.count_touched(move, target, timer=Timer())
    done, touched = move.done + alive, move.changed + touched
    if not swept.finished:
        return Wait(
            changes={"done": done, "changed": touched, **common.at_stage("touched", swept.cursor)}
        )
    counts = target.counts()
    changes = {
        # Those that are not on our list were born on the target.
        "touched": touched + max(counts.sessions - done, 0),
        # What is served while it looks may be behind it already: it counts as served since.
        "touched_at": move.pass_started_at,
        "sessions": counts.sessions,
        "users": counts.users,
        "waiting_for": "",
        "changed": 0,
    }
    if not move.mark:
        # Moved by an earlier release, whose marks say nothing to this one.
        return Wait(changes={**changes, "mark": source.mark(), **common.at_stage(_behind(move))})
    now, kept = Mark(source.mark()), Mark(move.mark)
    if now.of_shared != kept.of_shared:
        copying.report_late_shared(move, now, kept, clock)
        if queries.unsettled(queries.late_shared(move)).exists():
            changes["waiting_for"] = LATE_SHARED
    if now.of_sessions != kept.of_sessions:
        return Wait(changes={**changes, "done": 0, **common.at_stage("late")})
    return Wait(changes={**changes, **common.at_stage(_behind(move))})


def _find_late_writes(
    move: TenantMigration, source: SessionStore, target: SessionStore, clock: Clock
) -> Wait:
    late_sessions = queries.late_writes(move).exclude(session_id="").filter(artifact="")
    before = late_sessions.count()
    swept, found = copying.find_late_writes(move, source, target, timer=Timer(), clock=clock)
    found += move.changed
    if not swept.finished:
        return Wait(changes={"changed": found, **common.at_stage("late", swept.cursor)})
    changes: dict[str, Any] = {"changed": 0, **common.at_stage(_behind(move))}
    late = late_sessions.count()
    if not late:
        # Every row that was written anew is equal: a restored or rewritten database. What
        # sessions were deleted there is found, and brought back, by VERIFY on the way back.
        now, kept = Mark(source.mark()), Mark(move.mark)
        changes["mark"] = f"{now.of_sessions}:{kept.of_shared}"
        if now.of_sessions == kept.of_sessions:
            return Wait(changes=changes)
        what = "The source was rewritten, and is equal"
        if not found:
            what = (
                f"Sessions were deleted at the closed {move.source_store}. A rollback brings back"
            )
            what += " those that the tenant still has"
        return Wait(note=what, changes=changes)
    what = counted(late, "late write")
    alarm = f"{what} at the closed {move.source_store}: download both versions"
    return Wait(note=alarm if late != before else "", changes=changes)


def _behind(move: TenantMigration) -> str:
    """Return the stage of a look behind the sessions'; "" where it has none."""
    return "artifacts" if move.artifacts_apart else ""


def _find_late_artifacts(move: TenantMigration, clock: Clock) -> Wait:
    before = queries.late_artifacts(move).count()
    swept = artifacts.find_late(move, timer=Timer(), clock=clock)
    late = queries.late_artifacts(move).count()
    what = f"{counted(late, 'artifact')} written late at the closed {move.source_store}"
    note = f"{what}: download both versions" if late > before else ""
    at = common.at_stage("") if swept.finished else common.at_stage("artifacts", swept.cursor)
    return Wait(note=note, changes=at)


def stay(move: TenantMigration, clock: Clock) -> Outcome:
    """Come back to SOAK from a rollback that was stopped: open the target, then the policy.

    Then the source, on which the tenant waits no longer: it may be what has failed. The way back
    has written there, so its stamps and its mark are recorded anew.
    """
    home = where(move.mode, move.target_cell, move.target_store)
    if move.stage != "return":
        common.let_agents_in(move, move.target_store)
        now = clock()
        with holding(move) as row:
            if row.fence_opened_at is None:
                if row.fence_version is not None:
                    tenants.publish(move.tenant, move.target_cell, accepts="all")
                row.fence_opened_at, row.stage = now, "return"
                row.cursor_user = row.cursor_session = ""
                # Asked of the way back, and answered by this.
                row.abort_requested_at, row.abort_requested_by, row.abort_reason = None, "", ""
                row.save(
                    update_fields=[
                        "fence_opened_at",
                        "stage",
                        "cursor_user",
                        "cursor_session",
                        "abort_requested_at",
                        "abort_requested_by",
                        "abort_reason",
                    ]
                )
        return Wait(
            note=f"{move.tenant} is open {home}",
            changes={**common.at_stage("return"), "waiting_for": ""},
        )
    if move.leave_requested_at is not None:
        if move.pause_requested_at is not None:
            # A pause keeps the move out of OFFBOARD.
            return Wait(1.0)
        return Go(Phase.OFFBOARD, f"{move.source_store} is given up", common.at_stage(""))
    mark = ""
    if move.mode != Mode.CELL:
        with copying.both(move) as (source, target):
            source.take(mover=False, agents=False)
            swept = copying.record_anew(move, source, target, timer=Timer())
            if not swept.finished:
                return Wait(changes=common.at_stage("return", swept.cursor))
            mark = source.mark()
    with holding(move):
        # What its comparison had found is void with it. Late writes stand, stopped or not.
        move.mismatches.filter(resolved_at=None).exclude(looks_like=Looks.LATE_WRITE).update(
            resolved_at=clock()
        )
    return Wait(
        note=f"The rollback is stopped: the tenant stays {home}, its soak begins anew",
        changes={
            "mark": mark,
            "soak_until": clock() + timedelta(seconds=move.soak_seconds),
            "touched": None,
            "touched_at": None,
            "leave_requested_at": None,
            "leave_requested_by": "",
            "changed": 0,
            # The new mark holds what somebody else wrote there meanwhile: it is looked for now.
            **common.at_stage("" if move.mode == Mode.CELL else "late"),
        },
    )


class NothingToDelete(Refused):
    """The move may not delete the source's copy."""


def offboard(move: TenantMigration, clock: Clock) -> Outcome:
    """Delete the source's copy, session by session only where it is still what was recorded."""
    meter, timer = Meter(), Timer()
    if move.rehearsal and move.leave_requested_at is None:
        raise NothingToDelete(f"{move} is a rehearsal: nothing is deleted at its source.")
    if move.leave_requested_at is not None:
        left = move.stamps.count()
        note = f"Ended with leftovers on {move.source_store}, by {move.leave_requested_by}"
        if move.rehearsal:
            # A source that is lost for good is the one thing that ends one here: or it never would.
            note += f". Nothing was deleted; {move.tenant} was not taken back"
        return Go(
            Phase.DONE,
            note,
            {"left_behind": left, "ended_at": clock(), "waiting_for": ""},
        )
    if move.stage not in ("forget", "sessions"):
        # First those: their names are told by the sessions that stand beside them.
        taken = artifacts.remove_copied(move, "source", timer=timer)
        if not taken.finished:
            return Wait(changes=common.at_stage("", taken.cursor))
        move.stage, move.cursor_user, move.cursor_session = "forget", *START
    with copying.opened(move, move.source_store) as source:
        source.take(mover=True, agents=False)
        if move.stage == "forget":
            # Before the sessions, whose events tell what it has of them.
            gone = memory.offboard(move, source, timer=timer, clock=clock)
            if not gone.finished:
                return Wait(changes=common.at_stage("forget", gone.cursor))
            move.stage, move.cursor_user, move.cursor_session = "sessions", *START
        swept = copying.offboard(move, source, meter=meter, timer=timer)
        if not swept.finished:
            return common.after_sweep(move, meter, swept, then="")
        files = artifacts.left(move)
        # Counted there and not on our list: a session that we never knew stays as well, and while
        # one stays its user's state does (and is listed: this loop would never end).
        left = source.counts().sessions
        names = [f"{key.session_id} of {key.user_id}" for key, _ in source.page(START, LEFT_NAMED)]
        if not left and not queries.unsettled(queries.late_shared(move)).exists():
            while shared := source.shared_page(None, copying.CHUNK_MOST):
                source.delete_shared([row.user_id for row in shared])
        source.take(mover=False, agents=False)
    changes = meter.changes(move)
    return Go(
        Phase.DONE,
        f"{counted(changes['deleted'], 'session')} deleted at {move.source_store}"
        + (f", {left:,} left because they changed: {', '.join(names)}" if left else "")
        + (" ..." if left > LEFT_NAMED else "")
        + (f"; {counted(files, 'artifact')} left that changed" if files else ""),
        {**changes, "left_behind": left, "ended_at": clock(), "waiting_for": ""},
    )
