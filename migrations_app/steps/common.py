"""What the steps of several phases share: stages of a sweep, waits, ways out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any

from durable.driver import Clock
from durable.errors import Refused
from durable.machine import Go, Wait
from migrations_app import artifacts, copying, memory, queries, services
from migrations_app.copying import Meter, Timer
from migrations_app.domain.phases import (
    REVERSED,
    Mode,
    Phase,
    onward,
    way_out,
)
from migrations_app.domain.quote import Quote
from migrations_app.domain.verbs import where
from migrations_app.models import TenantMigration
from migrations_app.ports.base import (
    START,
    Key,
    Mark,
    SessionStore,
    SharedRow,
)
from tenants import queries as tenants_queries
from tenants import services as tenants
from tenants.domain.words import duration, limit
from tenants.models import Cell, Store

# Each pass asks runtimes' reports to be kept this far ahead; they only feed the forecast.
TRACKED = timedelta(hours=1)
# Stages whose sweeps pass by something else than sessions.
BESIDE = ("gone", "shared", "artifacts", "memory", "references")


def copy_changed(
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

    def work(keys: Sequence[Key]) -> bool:
        if copying.carries_back(move):
            keys = copying.to_carry_back(move, source, target, keys, clock)
        elif move.phase in REVERSED:
            keys = copying.spare_late_writes(move, source, target, keys, clock)
        meter.changed += len(keys)
        meter.count["chunk"] = meter.count.get("chunk", 0) + 1
        if one_chunk:
            timer.stop()
        return copying.copy(move, source, target, keys, meter=meter, clock=clock, compare=compare)

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


def after_sweep(move: TenantMigration, meter: Meter, swept: copying.Swept, *, then: str) -> Wait:
    """Settle how far a sweep came; on its end the next stage begins."""
    changes = meter.changes(move)
    if move.stage not in BESIDE:
        # Progress is in sessions; so is nothing that goes over behind them.
        changes["done"] = move.done + swept.passed
    if swept.finished:
        return Wait(changes=changes | at_stage(then))
    return Wait(note=once(move, swept.note), changes=changes | at_stage(move.stage, swept.cursor))


def once(move: TenantMigration, note: str) -> str:
    """Return a note unless it is the log's last line already: said once, not a hundred times."""
    said = move.events.order_by("-id").values_list("note", flat=True).first()
    return "" if said == note else note


def sweeping(move: TenantMigration, stage: str) -> dict[str, Any]:
    """Return the columns with which a sweep over every session begins."""
    return {"done": 0, "todo": move.sessions, **at_stage(stage)}


def carry_over(
    move: TenantMigration,
    source: SessionStore,
    target: SessionStore,
    stage: str,
    *,
    meter: Meter,
    timer: Timer,
    clock: Clock,
    seen: Callable[[Sequence[SharedRow]], None] = lambda rows: None,
) -> copying.Swept:
    """Work at a stage behind the sessions' own: what was deleted, is shared, or kept beside them.

    Each page of shared state that was written is shown to `seen`.
    """
    if stage == "gone":
        return copying.remove_gone(
            move,
            source,
            target,
            meter=meter,
            timer=timer,
            clock=clock,
            forget=lambda keys: memory.forget(move, target, keys, clock=clock),
        )
    if stage == "shared":
        return copying.settle_shared(
            move, source, target, meter=meter, timer=timer, write=True, clock=clock, seen=seen
        )
    if stage == "artifacts":
        return artifacts.sweep(move, meter=meter, timer=timer, clock=clock, write=True)
    if stage == "references":
        return artifacts.find_references(move, source, timer=timer)
    return memory.sweep(move, source, meter=meter, timer=timer, clock=clock)


def repair(
    move: TenantMigration,
    source: SessionStore,
    target: SessionStore,
    *,
    meter: Meter,
    clock: Clock,
) -> int:
    """Do the repairs that people asked for; return how many were done."""
    done = copying.repair(move, source, target, meter=meter, clock=clock)
    return done + artifacts.repair(move, meter=meter, clock=clock)


def at_stage(stage: str, at: Key = START) -> dict[str, Any]:
    return {"stage": stage, "cursor_user": at.user_id, "cursor_session": at.session_id}


def hurry(move: TenantMigration, until: Any) -> None:
    """Let both cells poll fast until then and a little longer. Inside the caller's `holding`."""
    tenants.hurry([move.source_cell, move.target_cell], until=until + services.HURRY)


def waiting(move: TenantMigration, what: str, *, seconds: float = 1.0) -> Wait:
    return Wait(seconds, changes={} if what == move.waiting_for else {"waiting_for": what})


def too_long(move: TenantMigration, quote: Quote) -> str:
    """Return that the fence would outlast its budget, as what is waited for; "" otherwise."""
    if quote.worst <= move.budget_seconds:
        return ""
    longest, most = duration(quote.worst), limit(move.budget_seconds)
    return f"a shorter fence: up to {longest}, budget {most}"


def not_yet(move: TenantMigration, now: datetime) -> str:
    """Return what a person has to say, or which time has to come, before the fence may close."""
    if move.fence_not_before is not None and now < move.fence_not_before:
        return f"its time, {move.fence_not_before:%d %b %H:%M} UTC"
    if not move.automatic and move.drain_requested_at is None:
        what = "the split" if forward(move) == Phase.SPLIT else "the drain"
        return f"somebody to start {what}"
    return ""


def asked_for(move: TenantMigration) -> dict[str, bool]:
    """Return what must still hold when the fence closes: taken back meanwhile, it does not."""
    if move.phase == Phase.SPLIT:
        # The way back begins out of the split, and a fence that is closed first would only be in
        # its way: nothing leads out of that before its deadline, and TARGET is refused.
        return {"rollback_requested_at__isnull": True}
    waits = move.phase in (Phase.PREPARE, Phase.BACKFILL) and not move.automatic
    return {"drain_requested_at__isnull": False} if waits else {}


def close(move: TenantMigration, quote: Quote) -> Go:
    """Go on to DRAIN, which closes the fence, with what it was expected to take."""
    return Go(
        Phase.DRAIN,
        f"Fence closes: expected {duration(quote.expected)}, at most {duration(quote.worst)}",
        {"waiting_for": "", "quote": quote.as_json(), "older_writers": [], **at_stage("")},
        asked_for(move),
    )


def not_hurried(cell: Cell, now: datetime) -> str:
    """Return, as what is waited for, who does not poll at the fast cadence yet; "" nobody."""
    slow = tenants_queries.fence_waits_for(cell, now=now)
    names = ", ".join(word.name for word in slow)
    return f"instances to poll at the fast cadence: {names}" if slow else ""


def past(move: TenantMigration, clock: Clock) -> Go | None:
    """Return the way out if the fence's deadline is over."""
    if move.deadline_at is None or clock() < move.deadline_at:
        return None
    sides = copying.way(move)
    home = where(move.mode, sides.from_cell, sides.from_store)
    return out(move, f"The fence's budget is over in {move.phase.upper()}: reopening {home}")


def out(move: TenantMigration, note: str) -> Go:
    """Take the phase's way out: REOPEN, or where the fence was closed from."""
    to = way_out(Mode(move.mode), Phase(move.phase), move.came_from)
    assert to is not None
    return Go(to, note)


def forward(move: TenantMigration) -> Phase:
    return onward(Mode(move.mode), Phase(move.phase))


def stages(
    move: TenantMigration,
    timer: Timer,
    names: Sequence[str],
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
        last = move.stage == names[-1]
        then = move.stage if last else names[names.index(move.stage) + 1]
        changes |= after_sweep(move, meter, swept, then=then).changes
        for name, value in changes.items():
            setattr(move, name, value)
        if swept.finished and last:
            return changes, True
        if timer.out or not swept.finished:
            return changes, False


class GuardLost(Refused):
    """A store's guard row, which this move made, is not there."""


def let_agents_in(move: TenantMigration, store: Store) -> None:
    """Open a store to agents again, where this move has closed it.

    Always before the policy: a runtime that is told to accept must find it open.
    """
    if move.mode == Mode.CELL:
        # Never closed: that would have closed it to both cells.
        return
    with copying.opened(move, store) as port:
        if guards(move, port, str(store)):
            port.take(mover=False, agents=True)


def guards(move: TenantMigration, store: SessionStore, name: str) -> bool:
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
