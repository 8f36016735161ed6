"""Dialogs of a move of the cell alone: nothing is copied, and its store stays open throughout."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import datetime

from migrations_app import queries
from migrations_app.domain.phases import Phase
from migrations_app.domain.quote import Quote
from migrations_app.domain.verbs import words
from migrations_app.panels.dialog import Dialog, estimate, refused
from migrations_app.panels.seen import Seen
from tenants.domain.words import clock, elapsed, limit


def dialog(seen: Seen, verb: str, *, now: datetime) -> Dialog:
    """Return the dialog of an act; one that only a copy has can't be confirmed."""
    build = BUILD.get(verb)
    return _of_a_copy(seen, verb) if build is None else build(seen, now)


def _beside(seen: Seen) -> tuple[tuple[str, str], ...]:
    """Return what is the same whatever is done: it is one store."""
    store = seen.move.source_store
    return (
        ("Kept", f"Every session on {store}, which stays open to both cells."),
        ("Thrown away", "Nothing: nothing was copied."),
    )


def _estimate(quote: Quote) -> str:
    """Spell the quote by the parts that such a fence has."""
    return estimate(Quote(tuple(part for part in quote.parts if part.worst > 0)))


def _abort(seen: Seen, now: datetime) -> Dialog:
    if seen.going_back:
        return _stop(seen, now)
    tenant, source = seen.move.tenant, seen.source
    if seen.fenced:
        happens = f"The fence opens: {tenant} is served in {source} again within one poll (250ms)."
    else:
        happens = f"Preparing stops. {tenant} goes on being served in {source}."
    return Dialog(
        "abort",
        f"Abort {seen.move} and keep {tenant} in {source}?",
        (
            ("Happens now", f"{happens} Instances of {seen.target} forget {tenant} again."),
            *_beside(seen),
            ("Undo", "None. A new move starts from PREPARE."),
        ),
        f"Abort, {'reopen' if seen.fenced else 'stay'} in old cell",
        "Keep moving",
        danger=True,
    )


def _stop(seen: Seen, now: datetime) -> Dialog:
    tenant, target = seen.move.tenant, seen.target
    opens = "The fence opens" if seen.fenced else "The fence stays open"
    happens = f"{opens}: {tenant} is served in {target} within one poll (250ms). Its soak begins"
    return Dialog(
        "abort",
        f"Stop the rollback and keep {tenant} in {target}?",
        (
            ("Happens now", f"{happens} anew, {limit(seen.move.soak_seconds)}."),
            *_beside(seen),
            ("Undo", "Roll back, once the soak runs."),
        ),
        "Stop rollback, stay in new cell",
        "Keep rolling back",
    )


def _pause(seen: Seen, now: datetime) -> Dialog:
    move, tenant = seen.move, seen.move.tenant
    lines = []
    if seen.fenced:
        happens = "Work stops after the running step. The fence stays closed and"
        lines.append(("Happens now", f"{happens} {tenant} keeps getting retry-after."))
        if move.deadline_at is not None:
            closed = f"At {clock(move.deadline_at, now)} the fence reaches its budget of"
            closed += f" {limit(move.budget_seconds)}. The"
            what = "rollback then stops" if seen.going_back else "move then aborts"
            does = f"{closed} {what} by itself and reopens {seen.at_opens}."
            lines.append(("If you wait", does))
    elif seen.phase == Phase.SOAK:
        happens = f"{tenant} goes on being served in {seen.target}. The move does not end when the"
        happens += " soak does: it can be rolled back until it is resumed."
        lines.append(("Happens now", happens))
    else:
        happens = f"The fence does not close. {tenant} goes on being served in {seen.source}."
        lines.append(("Happens now", happens))
    return Dialog(
        "pause",
        "Pause while the fence is closed?" if seen.fenced else f"Pause {move} {tenant}?",
        (*lines, *_beside(seen), ("Undo", "Resume, at any time.")),
        "Pause, keep fence closed" if seen.fenced else f"Pause {move}",
        "Keep soaking" if seen.phase == Phase.SOAK else "Keep moving",
    )


def _drain(seen: Seen, now: datetime) -> Dialog:
    move = seen.move
    tenant, source, target = move.tenant, seen.source, seen.target
    once = "its quote fits" if move.stage == "ready" else "all is prepared and its quote fits"
    happens = f"Once {once}, {refused(move, move.source_cell, now)} When all of them have"
    happens += f" stopped, {tenant} is served in {target}."
    if move.fence_not_before is not None and move.fence_not_before > now:
        happens += f" Not before {clock(move.fence_not_before, now)}, as this move was started."
    proof = f"The word of {source}'s instances, and the end of the lease of one that is silent."
    return Dialog(
        "close_fence",
        "Close the fence and start the drain?",
        (
            ("Happens now", happens),
            ("Estimated fence", _estimate(queries.fence_quote(move, now=now))),
            ("Proof", f"{proof} {move.source_store} is not closed behind it."),
            (
                "Stops itself",
                f"If turns are still in flight {limit(move.drain_bound_seconds)} after closing, or"
                f" the fence is still closed after {limit(move.budget_seconds)}, the move aborts"
                f" and {source} serves {tenant} again.",
            ),
            *_beside(seen),
            ("Undo", "Abort, at any time before TARGET; Roll back, in SOAK."),
        ),
        "Close fence, start drain",
        "Not yet",
    )


def _cancel(seen: Seen, now: datetime) -> Dialog:
    tenant = seen.move.tenant
    happens = f"The fence stays open. {tenant} goes on being served in {seen.source}."
    return Dialog(
        "cancel_fence",
        f"Take back the drain of {tenant}?",
        (
            ("Happens now", f"{happens} {seen.target} stays prepared."),
            *_beside(seen),
            ("Undo", "Start drain, at any time."),
        ),
        "Take back, keep fence open",
        "Let it close",
    )


def _hold(seen: Seen, now: datetime) -> Dialog:
    tenant, deadline = seen.move.tenant, clock(seen.move.deadline_at, now)
    happens = f"The deadline at {deadline} moves by the seconds you give. {tenant} keeps"
    way_out = words("abort", seen.phase, seen.move.mode)
    return Dialog(
        "hold_fence",
        f"Hold the fence of {tenant} closed for longer?",
        (
            ("Happens now", f"{happens} getting retry-after meanwhile."),
            *_beside(seen),
            ("Undo", f"{way_out} reopens at once. The deadline moves only this once."),
        ),
        "Hold the fence",
        f"Reopen at {deadline}",
        asks="seconds",
    )


def _rollback(seen: Seen, now: datetime) -> Dialog:
    move = seen.move
    tenant, source, target = move.tenant, seen.source, seen.target
    quote = queries.fence_quote(move, now=now)
    over = quote.worst > move.budget_seconds
    if seen.soak_over(now):
        left = "None: it is over."
    elif move.soak_until is None:
        left = "It has not begun."
    else:
        left = f"{elapsed((move.soak_until - now).total_seconds())}, until"
        left += f" {clock(move.soak_until, now)}. Afterwards only a new move leads back."
    return Dialog(
        "rollback",
        f"Send {tenant} back to {source}?",
        (
            (
                "Happens now",
                f"The fence closes in {target}: {refused(move, move.target_cell, now)} When all of"
                f" them have stopped, {tenant} is served in {source} again. Nothing is carried"
                f" back: what it wrote since is on {move.source_store} already.",
            ),
            ("Estimated fence", _estimate(quote)),
            ("Soak left", left),
            (
                "Stops itself",
                f"The fence may stay closed for {limit(move.budget_seconds)}, drain included up to"
                f" {limit(move.drain_bound_seconds)}. Past it {tenant} stays in {target}, and its"
                " soak begins anew.",
            ),
            *_beside(seen),
            ("Undo", "Stop rollback, until REVERSE_TARGET. Afterwards a new move."),
        ),
        "Roll back to old cell",
        "Stay in new cell",
        danger=True,
        asks="budget" if over else "",
        # Room to spare: a turn may begin until the fence closes.
        proposes=str(min(3600, math.ceil(quote.worst * 1.25))) if over else "",
        blocked="" if seen.phase == Phase.SOAK else "Roll back opens in SOAK.",
    )


def _cancel_rollback(seen: Seen, now: datetime) -> Dialog:
    tenant = seen.move.tenant
    happens = f"The fence stays open. {tenant} goes on being served in {seen.target}; the soak"
    return Dialog(
        "cancel_rollback",
        f"Take back the rollback of {tenant}?",
        (
            ("Happens now", f"{happens} goes on."),
            *_beside(seen),
            ("Undo", "Roll back, at any time in SOAK."),
        ),
        "Take back, stay in new cell",
        "Let it roll back",
    )


def _of_a_copy(seen: Seen, verb: str) -> Dialog:
    act = words(verb, seen.phase, seen.move.mode)
    why = f"Only the cell of {seen.move.tenant} changes: nothing is copied, compared or deleted."
    return Dialog(verb, f"{act}?", _beside(seen), act, "Leave it", blocked=why)


BUILD: dict[str, Callable[[Seen, datetime], Dialog]] = {
    "abort": _abort,
    "pause": _pause,
    "close_fence": _drain,
    "cancel_fence": _cancel,
    "hold_fence": _hold,
    "rollback": _rollback,
    "cancel_rollback": _cancel_rollback,
}
