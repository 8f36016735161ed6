"""What a move does in each phase: one idempotent, bounded step each.

A step may run again after any crash, and a stalled one may wake long after another
worker has gone on. So every effect is guarded: in a store by its guard row, which is
taken under this step's claim first; in our own database by `holding`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from typing import Any

from durable.driver import Clock, Machine, holding
from durable.errors import Refused
from durable.machine import Go, Outcome, Wait
from migrations_app import copying, pacing, ports, queries, services
from migrations_app.copying import Meter, Timer
from migrations_app.domain.mismatch import Looks
from migrations_app.domain.phases import (
    ENDED,
    FENCED,
    NO_RETURN,
    PROMPT,
    REVERSED,
    TABLE,
    UNPAUSABLE,
    Mode,
    Phase,
    onward,
    way_out,
)
from migrations_app.models import TenantMigration
from migrations_app.ports.base import (
    START,
    Guard,
    GuardTaken,
    Key,
    Mark,
    SessionStore,
    StoreBusy,
    StoreRefused,
)
from migrations_app.preflight import Check, preflight, way_back
from tenants import queries as tenants_queries
from tenants import services as tenants
from tenants.domain.words import counted, duration, limit

# A red preparation is looked at again this often, and a wait for a person.
LOOK_AGAIN_SECONDS = 5.0
LATE_SHARED = "late shared state at the closed source to be settled"
# How often SOAK counts what a rollback would carry back, and looks for late writes.
LOOK_SECONDS = 60.0
# How many sessions that OFFBOARD left are named in the log.
LEFT_NAMED = 20
# Each pass asks runtimes' reports to be kept this far ahead; they only feed the forecast.
TRACKED = timedelta(hours=1)
# Waiting on somebody inside the fence is polled inside the step, so that a fence never
# waits for a tick: every 50 ms, for up to 2 s.
POLL_SECONDS, POLL_FOR_SECONDS = 0.05, 2.0
# A last pass younger than this is fresh enough to close the fence on.
FRESH_SECONDS = 5.0
# While the move waits for a person, passes go on this often, or at a tenth of the time.
IDLE_SECONDS = 15.0


def prepare(move: TenantMigration, clock: Clock) -> Outcome:
    """Check everything that can be checked, then make guard and tables, and make sure of them."""
    now, began = clock(), time.monotonic()
    found = preflight(
        move.tenant,
        source_cell=move.source_cell,
        source_store=move.source_store,
        target_cell=move.target_cell,
        target_store=move.target_store,
        now=now,
        # After a crash past the guard, what is on the target is this move's own.
        move=move,
    )
    checks = list(found.checks)
    if found.refusals or found.source is None or found.target is None:
        return _blocked(move, checks, began)
    with copying.both(move) as (source, target):
        try:
            checks += _make_sure(move, source, target)
        except StoreBusy as busy:
            return Wait(busy.retry_after_seconds or 0.2)
        except Clearing as clearing:
            return _waiting(move, str(clearing), seconds=0.0)
        except GuardTaken as taken:
            checks.append(Check("Guard", False, str(taken)))
        if any(check.ok is False for check in checks):
            return _blocked(move, checks, began)
        older = source.older_writers()
    with holding(move):
        tenants.note_survey(move.source_store, asdict(found.source), now=now)
        tenants.note_survey(move.target_store, asdict(found.target), now=now)
    return Go(
        Phase.BACKFILL,
        f"Prepared: {found.source.sessions:,} sessions of {found.source.users:,} users",
        {
            "checks": _as_json(checks),
            "findings": found.findings,
            "waiting_for": "",
            "guarded": True,
            "sessions": found.source.sessions,
            "users": found.source.users,
            "interrupted": found.source.interrupted,
            "stamps_prove": found.source.stamps_see_edits and found.target.stamps_see_edits,
            "older_writers": older,
            "stage": "",
        },
    )


def _blocked(move: TenantMigration, checks: Sequence[Check], began: float) -> Wait:
    """Show the red checks and look again later: a large store is not surveyed all day."""
    seconds = max(LOOK_AGAIN_SECONDS, 10 * (time.monotonic() - began))
    red = [check for check in checks if check.ok is False]
    waiting_for = "; ".join(f"{check.name}: {check.detail}" for check in red)
    if waiting_for == move.waiting_for and _as_json(checks) == move.checks:
        return Wait(seconds)
    return Wait(
        seconds,
        f"Blocked: {waiting_for}" if waiting_for != move.waiting_for else "",
        {"checks": _as_json(checks), "waiting_for": waiting_for},
    )


def _as_json(checks: Sequence[Check]) -> list[dict[str, Any]]:
    return [{"name": c.name, "ok": c.ok, "detail": c.detail} for c in checks]


def _make_sure(move: TenantMigration, source: SessionStore, target: SessionStore) -> list[Check]:
    """Provision both sides, tell whether they are one place, take both guard rows."""
    theirs, ours = target.guard(), source.guard()
    for guard, store in ((theirs, move.target_store), (ours, move.source_store)):
        _may_take(move, guard, str(store))
    target.provision()
    if _same_place(source, target):
        detail = (
            f"{move.source_store} and {move.target_store} are the same database under two"
            " addresses. Choose another store."
        )
        return [Check("Two places", False, detail)]
    source.provision()
    if not _adopt_target(move, theirs, target):
        detail = (
            f"{move.target_store} holds {move.tenant.app_name} since a moment ago. Look who writes"
            " there; what it holds was left as it is."
        )
        return [Check(f"Room on {move.target_store}", False, detail)]
    source.adopt(ours, mover=False, agents=True)
    keeps = target.keeps_ids()
    return [
        Check("Two places", True, "a word written to one is not seen in the other"),
        Check("Guard", True, "closing triggers stand on both sides"),
        Check(
            "Ids",
            keeps,
            "the target keeps the ids it is given"
            if keeps
            else f"{move.target_store} assigns its own session ids; links to sessions would break.",
        ),
    ]


def _may_take(move: TenantMigration, guard: Guard | None, store: str) -> None:
    """Raise GuardTaken unless the row is free, ours, or of an ended move of this tenant."""
    if guard is None or guard.move == move.pk:
        return
    if not move.tenant.moves.filter(pk=guard.move, phase__in=ENDED).exists():
        raise GuardTaken(
            f"{store} is guarded by mv-{guard.move}, which is not an ended move of {move.tenant}"
            " here. If another control plane moved it, end that move there first."
        )


def _same_place(source: SessionStore, target: SessionStore) -> bool:
    """Write a random word at the target and look for it through the source."""
    nonce = secrets.token_hex(16)
    target.write_nonce(nonce)
    try:
        return source.has_nonce(nonce)
    finally:
        target.clear_nonce(nonce)


def _adopt_target(move: TenantMigration, found: Guard | None, target: SessionStore) -> bool:
    """Take the target's guard row and make sure of an empty target; return whether it is one.

    Only what stood behind the closed row of an ended move is removed. Anything else was written
    after the survey, by somebody who is none of ours: the row opens again and it stays. An
    unlocked look (mover) comes before the right to write, so that a repeated step, which finds
    this move's own row, still knows whether that row ever stood before an empty target.
    """
    leftovers = found is not None and not found.agents and (found.move != move.pk or found.mover)
    target.adopt(found, mover=leftovers, agents=False)
    if leftovers:
        if not move.stamps.exists():
            _clear(target)
        return True
    if target.page(START, 1) or target.shared_page(None, 1):
        target.take(mover=False, agents=True)
        return False
    target.take(mover=True, agents=False)
    return True


class Clearing(Refused):
    """What an ended move left on the target takes more than one step to remove."""


def _clear(target: SessionStore) -> None:
    """Remove what an ended move of this tenant left behind its closed guard row.

    Raises Clearing when a step's time is up: a whole tenant may lie there, after a rollback.
    """
    timer = Timer()
    while page := target.page(START, copying.CHUNK_MOST):
        target.delete([key for key, _ in page])
        if timer.out:
            raise Clearing("The copy that an ended move left there is being removed.")
    while shared := target.shared_page(None, copying.PAGE):
        target.delete_shared([row.user_id for row in shared])


def backfill(move: TenantMigration, clock: Clock) -> Outcome:
    """Copy while the tenant is live, pass after pass, until the fence may close."""
    if move.stage == "ready":
        return _ready(move, clock)
    if move.stage == "":
        return _begin_pass(move, clock)
    meter, timer = Meter(), Timer()
    with copying.both(move) as (source, target):
        target.take(mover=True, agents=False)
        copying.repair(move, source, target, meter=meter, clock=clock)
        if move.stage == "copy":
            outcome = _copy_sweep(move, source, target, meter, timer, clock)
        elif move.stage == "gone":
            swept = copying.remove_gone(move, source, target, meter=meter, timer=timer, clock=clock)
            outcome = _swept(move, meter, swept, then="shared")
        else:
            swept = copying.settle_shared(
                move, source, target, meter=meter, timer=timer, write=True, clock=clock
            )
            outcome = _swept(move, meter, swept, then="ready")
            if swept.finished:
                outcome = _end_pass(move, outcome, _mark_seconds(move, source), clock)
    copying.sample(move, outcome.changes, clock)
    return outcome


def _mark_seconds(move: TenantMigration, source: SessionStore) -> float:
    """Time the mark that the fence will take, once: on SQLite it is a long look at a live file."""
    if move.mark_seconds is not None:
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
        tenants.track(move.tenant, until=now + TRACKED)
    return Wait(
        note="" if move.passes else f"The first pass begins: {counts.sessions:,} sessions",
        changes={
            "passes": move.passes + 1,
            "pass_started_at": now,
            "sessions": counts.sessions,
            "users": counts.users,
            "done": 0,
            "todo": counts.sessions,
            "changed": 0,
            **_stage("copy"),
        },
    )


def _check_source(move: TenantMigration, source: SessionStore) -> None:
    """Raise unless tables and guard row still are what PREPARE made sure of.

    Found missing behind a closed fence they would have refused the tenant's turns for nothing.
    """
    copying.check_tables((source, move.source_store))
    if not _guards(move, source, str(move.source_store)):
        raise GuardTaken(f"{move.source_store} is guarded by another move than {move}.")


def _end_pass(move: TenantMigration, outcome: Wait, mark_seconds: float, clock: Clock) -> Wait:
    changed = outcome.changes["changed"]
    first = move.passes == 1
    note = f"Pass {move.passes} ends: {changed:,} sessions copied" if first or changed else ""
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
) -> Wait:
    """Copy, while the tenant is live, what differs from its recorded stamp, at the chosen pace."""
    began = time.monotonic()
    pace = pacing.pace(move, now=clock())
    swept = _copy_changed(move, source, target, meter, timer, clock, compare=True, pace=pace)
    outcome = _swept(move, meter, swept, then="gone")
    worked = time.monotonic() - began
    return pacing.settled(move, source, target, meter, outcome, per_second=pace, worked=worked)


def _copy_changed(
    move: TenantMigration,
    source: SessionStore,
    target: SessionStore,
    meter: Meter,
    timer: Timer,
    clock: Clock,
    *,
    compare: bool,
    pace: float | None = None,
    mark: Mark | None = None,
) -> copying.Swept:
    """Sweep the source and copy what differs from its recorded stamp, chunk after chunk."""
    # With the fence closed nobody of the tenant waits for a chunk, only the fence does; on
    # SQLite other tenants' turns still wait for the file.
    if not compare and move.stamps_prove:
        chunk = copying.chunk_size(move, copying.FENCED_CHUNK_SECONDS)
        page = copying.FENCED_PAGE
    else:
        chunk, page = copying.chunk_size(move), copying.PAGE
    if pace is not None:
        # One second's worth, then a rest: that keeps the store's load even.
        chunk = max(1, min(chunk, int(pace)))
    # A slow store gets its rest after each chunk, while the tenant is live. A fence never waits.
    # The first chunk alone says how large the others may be: a step of such would cost seconds.
    unknown = move.copy_rate is None
    one_chunk = pace is not None or (compare and (move.ease < 1 or unknown))

    def work(keys: Sequence[Key]) -> None:
        if move.phase in REVERSED:
            keys = copying.spare_late_writes(move, source, target, keys, clock)
        meter.changed += len(keys)
        meter.count["chunk"] = meter.count.get("chunk", 0) + 1
        copying.copy(move, source, target, keys, meter=meter, clock=clock, compare=compare)
        if one_chunk:
            timer.stop()

    return copying.sweep(
        move,
        source,
        meter=meter,
        timer=timer,
        chunk=chunk,
        needs=lambda page: copying.changed_keys(move, page),
        work=work,
        page_size=page,
        mark=mark,
    )


def _swept(move: TenantMigration, meter: Meter, swept: copying.Swept, *, then: str) -> Wait:
    """Settle how far a sweep came; on its end the next stage begins."""
    changes = meter.changes(move)
    if move.stage not in ("gone", "shared"):
        # Progress is in sessions; the sweeps behind the sessions' own are short.
        changes["done"] = move.done + swept.passed
    if swept.finished:
        return Wait(changes=changes | _stage(then))
    return Wait(changes=changes | _stage(move.stage, swept.cursor))


def _sweeping(move: TenantMigration, stage: str) -> dict[str, Any]:
    """Return the columns with which a sweep over every session begins."""
    return {"done": 0, "todo": move.sessions, **_stage(stage)}


def _stage(stage: str, at: Key = START) -> dict[str, Any]:
    return {"stage": stage, "cursor_user": at.user_id, "cursor_session": at.session_id}


def _ready(move: TenantMigration, clock: Clock) -> Outcome:
    """Between passes: close the fence if it may, else wait, and keep the copy fresh."""
    now = clock()
    if move.mismatches.filter(resolved_at=None, repair_requested_at__isnull=False).exists():
        return _repair_now(move, clock)
    quote = queries.fence_quote(move, now=now)
    assert move.pass_started_at is not None
    assert move.pass_ended_at is not None
    age = (now - move.pass_ended_at).total_seconds()
    took = (move.pass_ended_at - move.pass_started_at).total_seconds()
    blocked = _not_yet(move, now)
    if blocked:
        if age >= max(IDLE_SECONDS, 10 * took):
            return Wait(changes=_stage(""))
        return _waiting(move, blocked)
    with holding(move):
        # Named instances must be at the fast cadence before the fence may close.
        _hurry(move, now)
    if age >= FRESH_SECONDS + took:
        return Wait(changes=_stage(""))
    if quote.worst > move.budget_seconds:
        longest, most = duration(quote.worst), limit(move.budget_seconds)
        worst = f"a shorter fence: up to {longest}, budget {most}"
        return _waiting(move, worst) if age < max(1, took) else Wait(changes=_stage(""))
    with copying.opened(move, move.source_store) as source:
        older = source.still_writing(move.older_writers)
        _check_source(move, source)
        if not source.can_close():
            # A trigger was dropped: the store would take late writers behind a closed fence.
            source.provision()
    if older:
        return _waiting(move, f"transactions older than the guard: {', '.join(older)}")
    slow = tenants_queries.fence_waits_for(move.source_cell, now=now)
    if slow:
        names = ", ".join(word.name for word in slow)
        return _waiting(move, f"instances to poll at the fast cadence: {names}", seconds=0.2)
    return Go(
        Phase.DRAIN,
        f"Fence closes: expected {duration(quote.expected)}, at most {duration(quote.worst)}",
        {"waiting_for": "", "quote": quote.as_json(), "older_writers": [], **_stage("")},
        # Taken back while this step ran, it is not closed.
        {} if move.automatic else {"drain_requested_at__isnull": False},
    )


def _hurry(move: TenantMigration, until: Any) -> None:
    """Let both cells poll fast until then and a little longer. Inside the caller's `holding`."""
    tenants.hurry([move.source_cell, move.target_cell], until=until + services.HURRY)


def _not_yet(move: TenantMigration, now: Any) -> str:
    """Return what a person has to do, or which time has to come, before the fence may close."""
    if count := queries.open_mismatches(move):
        return f"{counted(count, 'mismatch', 'mismatches')} to be repaired"
    if move.fence_not_before is not None and now < move.fence_not_before:
        return f"its time, {move.fence_not_before:%d %b %H:%M} UTC"
    if not move.automatic and move.drain_requested_at is None:
        return "somebody to start the drain"
    return ""


def _waiting(move: TenantMigration, what: str, *, seconds: float = 1.0) -> Wait:
    return Wait(seconds, changes={} if what == move.waiting_for else {"waiting_for": what})


def _repair_now(move: TenantMigration, clock: Clock) -> Wait:
    meter = Meter()
    with copying.both(move) as (source, target):
        target.take(mover=True, agents=False)
        done = copying.repair(move, source, target, meter=meter, clock=clock)
    return Wait(note=f"{done} repaired or looked at again", changes=meter.changes(move))


def drain(move: TenantMigration, clock: Clock) -> Outcome:
    """Refuse new turns, wait for the proof that none runs, close the store, take the mark."""
    if move.fence_version is None:
        return _close_fence(move, clock)
    if late := _past(move, clock):
        return late
    if move.drained_at is None:
        unproven = _await_proof(move, clock)
        if unproven is not None:
            return unproven
    home = copying.way(move).from_store
    if move.phase in REVERSED:
        # Here, for the next phase's own writing would look the same.
        with copying.opened(move, move.source_store) as store:
            if copying.shared_came_late(move, store, clock):
                return _waiting(move, LATE_SHARED, seconds=0.5)
    with copying.opened(move, home) as source:
        try:
            source.take(mover=False, agents=False)
        except StoreBusy as busy:
            return Wait(busy.retry_after_seconds or 0.2)
        closed_at = clock()
    return Go(
        _onward(move),
        f"Drained, {home} is closed",
        {
            "store_closed_at": closed_at,
            # DELTA's own sweep adds it up, row by row as it reads them.
            "mark": "",
            "changed": 0,
            "waiting_for": "",
            **_sweeping(move, "copy"),
        },
    )


def _close_fence(move: TenantMigration, clock: Clock) -> Outcome:
    now, forecast = clock(), queries.to_copy(move)
    with holding(move) as row:
        # A repeated step finds the fence closed by its first run, and keeps that time.
        if row.fence_version is None:
            # To its very end: the flip, or the way out, is heard of at the fast cadence too.
            row.deadline_at = now + timedelta(seconds=move.budget_seconds)
            _hurry(move, row.deadline_at)
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
            missing = [w.name for w in proof.instances if w.state in ("missing", "draining")]
            return _out(
                move,
                f"Not drained after {limit(move.drain_bound_seconds)}: {proof.in_flight} turns in"
                f" flight, waiting for {', '.join(missing) or 'nobody'}",
            )
        if time.monotonic() >= until:
            missing = [w.name for w in proof.instances if w.state in ("missing", "draining")]
            return _waiting(move, f"{', '.join(missing)} to drain", seconds=0.0)
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


def _past(move: TenantMigration, clock: Clock) -> Go | None:
    """Return the way out if the fence's deadline is over."""
    if move.deadline_at is None or clock() < move.deadline_at:
        return None
    home = copying.way(move).from_store
    return _out(move, f"The fence's budget is over in {move.phase.upper()}: reopening on {home}")


def _out(move: TenantMigration, note: str) -> Go:
    """Take the phase's way out: forward that is REOPEN, on the way back SOAK."""
    to = way_out(Mode(move.mode), Phase(move.phase), move.came_from)
    assert to is not None
    return Go(to, note)


def _onward(move: TenantMigration) -> Phase:
    return onward(Mode(move.mode), Phase(move.phase))


def delta(move: TenantMigration, clock: Clock) -> Outcome:
    """Copy what changed, remove what was deleted, settle shared state. Nobody writes meanwhile."""
    if late := _past(move, clock):
        return late
    timer = Timer(copying.FENCED_STEP_SECONDS)
    mark = Mark(move.mark)
    with copying.both(move) as (source, target):
        target.take(mover=True, agents=False)

        def work(stage: str, meter: Meter) -> copying.Swept:
            if stage == "copy":
                return _copy_changed(
                    move, source, target, meter, timer, clock, compare=False, mark=mark
                )
            if stage == "gone":
                return copying.remove_gone(
                    move, source, target, meter=meter, timer=timer, clock=clock
                )
            return copying.settle_shared(
                move, source, target, meter=meter, timer=timer, write=True, clock=clock, mark=mark
            )

        changes, finished = _stages(move, timer, ("copy", "gone", "shared"), work)
    changes["mark"] = str(mark)
    if not finished:
        return Wait(changes=changes)
    changes |= _sweeping(move, "sessions")
    return Go(_onward(move), f"{move.changed:,} sessions copied again", changes)


def verify(move: TenantMigration, clock: Clock) -> Outcome:
    """Every session must be equal, then the counts, then the source's mark."""
    if late := _past(move, clock):
        return late
    timer = Timer(copying.FENCED_STEP_SECONDS)
    with copying.both(move) as (source, target):
        target.take(mover=True, agents=False)
        # First: what a late write that was accepted leaves behind, its user's state, is no
        # difference once it is replaced.
        repaired = Meter()
        if copying.repair(move, source, target, meter=repaired, clock=clock):
            return Wait(note="Repaired what was asked for", changes=repaired.changes(move))
        changes: dict[str, Any] = {}
        if move.stage != "end":

            def work(stage: str, meter: Meter) -> copying.Swept:
                if stage == "sessions":
                    return copying.prove(
                        move, source, target, meter=meter, timer=timer, clock=clock
                    )
                return copying.settle_shared(
                    move, source, target, meter=meter, timer=timer, write=False, clock=clock
                )

            changes, finished = _stages(move, timer, ("sessions", "shared"), work)
            if not finished:
                return Wait(changes=changes)
            changes |= _stage("end")
        verdict = _verdict(move, source, target, clock)
    return replace(verdict, changes={**changes, **verdict.changes})


def _stages(
    move: TenantMigration,
    timer: Timer,
    stages: Sequence[str],
    work: Callable[[str, Meter], copying.Swept],
) -> tuple[dict[str, Any], bool]:
    """Run stages from the move's own on until the time is up or the last is through.

    Returns the columns to settle, and whether all are through. A fence waits for each step's
    claim, connections and settling, so its stages share steps.
    """
    changes: dict[str, Any] = {}
    while True:
        meter = Meter()
        swept = work(move.stage, meter)
        last = move.stage == stages[-1]
        then = move.stage if last else stages[stages.index(move.stage) + 1]
        changes |= _swept(move, meter, swept, then=then).changes
        for name, value in changes.items():
            setattr(move, name, value)
        if swept.finished and last:
            return changes, True
        if timer.out or not swept.finished:
            return changes, False


def _verdict(
    move: TenantMigration, source: SessionStore, target: SessionStore, clock: Clock
) -> Outcome:
    """Everything was compared: wait for what is open, count, and look at the mark last."""
    if count := queries.open_mismatches(move):
        what = counted(count, "mismatch", "mismatches")
        return _waiting(move, f"{what} to be repaired", seconds=0.5)
    if move.flip_by_hand and move.flip_requested_at is None and move.phase == Phase.VERIFY:
        return _waiting(move, "somebody's word to flip", seconds=0.2)
    sides = copying.way(move)
    ours, theirs = ports.at_once(source.counts, target.counts)
    if ours != theirs:
        _report_extra(move, source, target, clock)
        if not queries.open_mismatches(move):
            raise CountsDiffer(
                f"{sides.from_store} counts {ours.sessions:,} sessions of {ours.users:,} users,"
                f" {sides.to_store} {theirs.sessions:,} of {theirs.users:,}, although every"
                " session is equal."
            )
        return Wait(note=f"{sides.to_store} holds sessions that {sides.from_store} does not")
    guard = source.guard()
    if guard is None or guard.move != move.pk or guard.agents:
        return _out(
            move, f"{sides.from_store} is not closed by this move any more: nothing was cut over"
        )
    if move.phase in REVERSED and copying.listed(move) != Mark(target.mark()).of_sessions:
        # Written at the source behind its comparison: it opens to agents next.
        return Wait(
            note=f"{sides.to_store} changed: compared again", changes=_sweeping(move, "sessions")
        )
    # Last: a writer that got past everything else shows here.
    if source.mark() != move.mark:
        return _out(
            move,
            f"{sides.from_store} changed after it was closed (a fence leak): nothing was cut over",
        )
    return Go(
        _onward(move),
        f"{ours.sessions:,} sessions of {ours.users:,} users are equal on both sides",
        {"waiting_for": "", "sessions": ours.sessions, "users": ours.users, **_stage("")},
    )


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
    return Go(Phase.ROLLED_BACK, words, {"ended_at": opened_at, "waiting_for": ""})


def _flip(
    move: TenantMigration, column: str, by: str, reason: str, clock: Clock
) -> tuple[datetime, str]:
    """Make the far side of the `way` the tenant's home, once; return when, and what to log."""
    sides, now = copying.way(move), clock()
    with copying.opened(move, sides.to_store) as store:
        store.take(mover=False, agents=True)
    with holding(move) as row:
        # A repeated step finds what its first run published.
        if getattr(row, column) is None:
            version = tenants.place(
                move.tenant,
                cell=sides.to_cell,
                store=sides.to_store,
                by=by,
                reason=f"{move}: {reason}",
                now=now,
            )
            setattr(row, column, version)
            row.fence_opened_at = now
            row.save(update_fields=[column, "fence_opened_at"])
    assert row.fence_opened_at is not None
    assert row.fence_closed_at is not None
    closed = row.fence_opened_at - row.fence_closed_at
    return row.fence_opened_at, (
        f"Placement version {getattr(row, column)}: {move.tenant} lives on {sides.to_store}."
        f" The fence was closed for {duration(closed.total_seconds())}"
    )


def soak(move: TenantMigration, clock: Clock) -> Outcome:
    """Keep the source closed and whole for a fixed time, then wait to be allowed to delete it.

    Meanwhile it looks, again and again, at what a rollback would have to carry back, and
    whether somebody got past the closed source.
    """
    if queries.owes_opening(move):
        return _stay(move, clock)
    if (looked := _look(move, clock)) is not None:
        return looked
    if move.rollback_requested_at is not None:
        return _roll_back(move, clock)
    assert move.soak_until is not None
    left = (move.soak_until - clock()).total_seconds()
    if left > 0:
        return Wait(min(left, LOOK_SECONDS))
    if move.offboard_automatically or move.offboard_confirmed_at:
        return Go(
            Phase.OFFBOARD,
            "The soak is over",
            {
                "waiting_for": "",
                "done": 0,
                "todo": move.stamps.count(),
                "deleted": 0,
                **_stage(""),
            },
        )
    return _waiting(move, "the typed confirmation to delete the source's copy", seconds=2.0)


def _look(move: TenantMigration, clock: Clock) -> Outcome | None:
    """Count what the tenant has touched since the cutover, and find late writes; None: not due."""
    now = clock()
    if move.stage == "":
        # A look reads every stamp: a twentieth of the time at most, whatever the tenant's size.
        every = max(LOOK_SECONDS, 20 * (move.scan_seconds or 0))
        if move.touched_at is not None and (now - move.touched_at).total_seconds() < every:
            return None
        with holding(move):
            tenants.track(move.tenant, until=now + TRACKED)
            if move.touched_at is not None:
                # What runtimes served before the last look is counted in it.
                tenants.forget_served(move.tenant, before=move.touched_at)
        return Wait(changes={"changed": 0, "done": 0, **_stage("touched")})
    try:
        with copying.both(move) as (source, target):
            if move.stage == "touched":
                return _count_touched(move, source, target, clock)
            return _find_late_writes(move, source, target, clock)
    except (StoreRefused, copying.TablesLost) as refused:
        # The soak goes on: the tenant lives on the target. A rollback, or OFFBOARD, will say.
        note = f"Can't be looked at: {refused}"
        said = move.events.order_by("-id").values_list("note", flat=True).first() == note
        changes = {"waiting_for": str(refused), "touched_at": now, **_stage("")}
        return Wait(note="" if said else note, changes=changes)


def _count_touched(
    move: TenantMigration, source: SessionStore, target: SessionStore, clock: Clock
) -> Wait:
    """Walk our own list: what is not as it was recorded was written or deleted since."""
    swept, alive, touched = copying.count_touched(move, target, timer=Timer())
    done, touched = move.done + alive, move.changed + touched
    if not swept.finished:
        return Wait(changes={"done": done, "changed": touched, **_stage("touched", swept.cursor)})
    counts = target.counts()
    changes = {
        # Those that are not on our list were born on the target.
        "touched": touched + max(counts.sessions - done, 0),
        "touched_at": clock(),
        "sessions": counts.sessions,
        "users": counts.users,
        "waiting_for": "",
        "changed": 0,
    }
    if not move.mark:
        # Moved by an earlier release, whose marks say nothing to this one.
        return Wait(changes={**changes, "mark": source.mark(), **_stage("")})
    now, kept = Mark(source.mark()), Mark(move.mark)
    if now.of_shared != kept.of_shared:
        copying.report_late_shared(move, now, kept, clock)
        if queries.unsettled(queries.late_shared(move)).exists():
            changes["waiting_for"] = LATE_SHARED
    if now.of_sessions != kept.of_sessions:
        return Wait(changes={**changes, "done": 0, **_stage("late")})
    return Wait(changes={**changes, **_stage("")})


def _find_late_writes(
    move: TenantMigration, source: SessionStore, target: SessionStore, clock: Clock
) -> Wait:
    late_sessions = queries.late_writes(move).exclude(session_id="")
    before = late_sessions.count()
    swept, found = copying.find_late_writes(move, source, target, timer=Timer(), clock=clock)
    found += move.changed
    if not swept.finished:
        return Wait(changes={"changed": found, **_stage("late", swept.cursor)})
    changes: dict[str, Any] = {"changed": 0, **_stage("")}
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


def _roll_back(move: TenantMigration, clock: Clock) -> Outcome:
    """Begin the way back once everything that it needs is there; until then say what is missing."""
    now = clock()
    with holding(move):
        # Instances must be at the fast cadence before the fence may close.
        _hurry(move, now)
    if red := way_back(move, now=now):
        return _waiting(move, "; ".join(f"{check.name}: {check.detail}" for check in red))
    if count := queries.open_mismatches(move):
        return _waiting(move, f"{counted(count, 'late write')} to be settled")
    quote = queries.fence_quote(move, now=now)
    if quote.worst > move.budget_seconds:
        longest, most = duration(quote.worst), limit(move.budget_seconds)
        return _waiting(move, f"a shorter fence: up to {longest}, budget {most}")
    with copying.opened(move, move.target_store) as target:
        if not target.can_close():
            # A trigger was dropped: the store would take late writers behind a closed fence.
            target.provision()
    slow = tenants_queries.fence_waits_for(move.target_cell, now=now)
    if slow:
        names = ", ".join(word.name for word in slow)
        return _waiting(move, f"instances to poll at the fast cadence: {names}", seconds=0.2)
    return Go(
        Phase.REVERSE_DRAIN,
        f"Rolling back: expected {duration(quote.expected)}, at most {duration(quote.worst)}",
        {
            "past_fences": _fences(move),
            "quote": quote.as_json(),
            "rollback_requested_at": None,
            "waiting_for": "",
            "source_mark": move.mark,
            **dict.fromkeys(
                (
                    "fence_version",
                    "fence_closed_at",
                    "fence_opened_at",
                    "deadline_at",
                    "drained_at",
                    "store_closed_at",
                    "changed_at_drain",
                )
            ),
            "deadline_held_by": "",
            **_stage(""),
        },
        # Taken back while this step ran, it does not begin.
        {"rollback_requested_at__isnull": False},
    )


def _fences(move: TenantMigration) -> list[dict[str, Any]]:
    """Return the facts of every fence so far; the first went forward, any other back."""
    if move.fence_closed_at is None:
        # The last rollback was stopped before it closed one.
        return list(move.past_fences)
    times = {
        name: at.isoformat() if (at := getattr(move, name)) else None
        for name in ("fence_closed_at", "fence_opened_at")
    }
    last = {"back": bool(move.past_fences), "quote": move.quote, **times}
    return [*move.past_fences, last]


def _stay(move: TenantMigration, clock: Clock) -> Outcome:
    """Come back to SOAK from a rollback that was stopped: open the target, then the policy.

    Then the source, on which the tenant waits no longer: it may be what has failed. The way back
    has written there, so its stamps and its mark are recorded anew.
    """
    if move.stage != "return":
        # First the store: a runtime that is told to accept must find it open.
        with copying.opened(move, move.target_store) as target:
            if _guards(move, target, str(move.target_store)):
                target.take(mover=False, agents=True)
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
            note=f"{move.tenant} is open on {move.target_store}",
            changes={**_stage("return"), "waiting_for": ""},
        )
    if move.leave_requested_at is not None:
        if move.pause_requested_at is not None:
            # A pause keeps the move out of OFFBOARD.
            return Wait(1.0)
        return Go(Phase.OFFBOARD, f"{move.source_store} is given up", _stage(""))
    with copying.both(move) as (source, target):
        source.take(mover=False, agents=False)
        swept = copying.record_anew(move, source, target, timer=Timer())
        if not swept.finished:
            return Wait(changes=_stage("return", swept.cursor))
        mark = source.mark()
    with holding(move):
        # What its comparison had found is void with it. Late writes stand, stopped or not.
        move.mismatches.filter(resolved_at=None).exclude(looks_like=Looks.LATE_WRITE).update(
            resolved_at=clock()
        )
    return Wait(
        note=f"The rollback is stopped: the tenant stays on {move.target_store}, its soak begins"
        " anew",
        changes={
            "mark": mark,
            "soak_until": clock() + timedelta(seconds=move.soak_seconds),
            "touched": None,
            "touched_at": None,
            "leave_requested_at": None,
            "leave_requested_by": "",
            "changed": 0,
            # The new mark holds what somebody else wrote there meanwhile: it is looked for now.
            **_stage("late"),
        },
    )


def offboard(move: TenantMigration, clock: Clock) -> Outcome:
    """Delete the source's copy, session by session only where it is still what was recorded."""
    meter, timer = Meter(), Timer()
    if move.leave_requested_at is not None:
        left = move.stamps.count()
        return Go(
            Phase.DONE,
            f"Ended with leftovers on {move.source_store}, by {move.leave_requested_by}",
            {"left_behind": left, "ended_at": clock(), "waiting_for": ""},
        )
    with copying.opened(move, move.source_store) as source:
        source.take(mover=True, agents=False)
        swept = copying.offboard(move, source, meter=meter, timer=timer)
        if not swept.finished:
            return _swept(move, meter, swept, then="")
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
        f"{changes['deleted']:,} sessions deleted at {move.source_store}"
        + (f", {left:,} left because they changed: {', '.join(names)}" if left else "")
        + (" ..." if left > LEFT_NAMED else ""),
        {**changes, "left_behind": left, "ended_at": clock(), "waiting_for": ""},
    )


def reopen(move: TenantMigration, clock: Clock) -> Outcome:
    """Open the store, then the policy, then remove from the target only what this move wrote."""
    if move.stage != "clean":
        # First the store: a runtime that is told to accept must find it open.
        with copying.opened(move, move.source_store) as source:
            if _guards(move, source, str(move.source_store)):
                source.take(mover=False, agents=True)
        now = clock()
        with holding(move) as row:
            if row.fence_version is not None and row.fence_opened_at is None:
                tenants.publish(move.tenant, move.source_cell, accepts="all")
                row.fence_opened_at = now
                row.save(update_fields=["fence_opened_at"])
        note = f"{move.tenant} is open on {move.source_store}"
        return Wait(note=note, changes={**_stage("clean"), "waiting_for": ""})
    if move.leave_requested_at is not None:
        return Go(
            Phase.ABORTED,
            f"Ended with leftovers on {move.target_store}, by {move.leave_requested_by}",
            {"ended_at": clock()},
        )
    with copying.opened(move, move.target_store) as store:
        if _guards(move, store, str(move.target_store)):
            store.take(mover=True, agents=False)
            if not copying.delete_copied(move, store, timer=Timer()):
                return Wait(changes={"done": move.done})
            store.take(mover=False, agents=False)
    return Go(Phase.ABORTED, f"Nothing is left on {move.target_store}", {"ended_at": clock()})


class GuardLost(Refused):
    """A store's guard row, which this move made, is not there."""


def _guards(move: TenantMigration, store: SessionStore, name: str) -> bool:
    """Return whether the store's guard row is this move's, so that there is something to undo.

    A store that answers and has lost the row (a file that is away, a database restored) is
    not taken for one that needs no opening: it may come back closed.
    """
    guard = store.guard()
    if guard is None and move.guarded and move.leave_requested_at is None:
        raise GuardLost(
            f"{name} {queries.GUARD_LOST}, so {move} can't undo there what it did. Bring the"
            " store back as it was, or end the move with leftovers."
        )
    return guard is not None and guard.move == move.pk


def _while_paused(move: TenantMigration, clock: Clock) -> Outcome:
    """A pause stops the work, not the clock: a closed fence still has its deadline."""
    if move.phase in FENCED and (late := _past(move, clock)):
        return late
    if queries.owes_opening(move):
        # Nobody's pause keeps the tenant refused behind a fence that has no deadline any more.
        return _stay(move, clock)
    return Wait(1.0)


STEPS: dict[Phase, Callable[[TenantMigration, Clock], Outcome]] = {
    Phase.PREPARE: prepare,
    Phase.BACKFILL: backfill,
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
        steps=STEPS,
        way_out=lambda move: way_out(Mode(move.mode), Phase(move.phase), move.came_from),
        no_return=NO_RETURN,
        unpausable=UNPAUSABLE,
        urgent=lambda move: move.phase in PROMPT or queries.owes_opening(move),
        enqueue=enqueue,
        requests=("abort_requested_at", "pause_requested_at", "rollback_requested_at"),
        while_paused=_while_paused,
        halted=tenants_queries.halted,
    )
