"""What an act would do, from the rows as they are now: the text of its dialog."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from migrations_app.domain.phases import Phase
from migrations_app.domain.quote import Quote
from migrations_app.models import TenantMigration
from migrations_app.panels.seen import Seen
from tenants import panels as tenants_panels
from tenants.domain.words import clock, counted, duration, limit


@dataclass(frozen=True)
class Dialog:
    """A question with its consequences; the confirm button repeats the act and its object."""

    verb: str
    title: str
    lines: tuple[tuple[str, str], ...]
    confirm: str
    # The safe button names what goes on.
    safe: str
    danger: bool = False
    # Asks for seconds (hold), or for the tenant's name to be typed (offboard).
    asks: str = ""


def dialog(seen: Seen, verb: str, *, quote: Quote | None, now: datetime) -> Dialog:
    """Return the dialog of an act. `quote` is only needed for close_fence."""
    build = {
        "abort": _abort_dialog,
        "pause": _pause_dialog,
        "cancel_fence": _cancel_dialog,
        "hold_fence": _hold_dialog,
        "confirm_offboard": _offboard_dialog,
        "leave_behind": _leave_dialog,
    }
    if verb == "close_fence":
        return _drain_dialog(seen, quote, now)
    return build[verb](seen, now)


def _abort_dialog(seen: Seen, now: datetime) -> Dialog:
    move = seen.move
    tenant, source = move.tenant, move.source_store
    if seen.fenced:
        happens = f"The fence opens: {tenant} is served on {source} again within one poll (250ms)."
    elif seen.phase == Phase.PREPARE:
        happens = f"Preparing stops. {tenant} goes on being served on {source}."
    else:
        happens = f"Copying stops. {tenant} goes on being served on {source}."
    kept = (
        f"All {counted(move.sessions, 'session')} on {source}."
        if move.sessions
        else (f"Everything on {source}.")
    )
    if move.store_closed_at is not None:
        kept += f" Nothing was written there since {clock(move.store_closed_at, now)}."
    thrown = f"The copy on {move.target_store}: {_copies(move)}, removed now."
    return Dialog(
        "abort",
        f"Abort {move} and {'reopen' if seen.fenced else 'keep'} {tenant} on {source}?",
        (
            ("Happens now", happens),
            ("Kept", kept),
            (
                "Thrown away",
                thrown if move.stamps.exists() else "Nothing: nothing was copied yet.",
            ),
            ("Undo", "None. A new move starts from PREPARE."),
        ),
        "Abort, reopen on source" if seen.fenced else "Abort, stay on source",
        "Keep moving",
        danger=True,
    )


def _copies(move: TenantMigration) -> str:
    """Return how many sessions the move wrote on the target, or may have."""
    return counted(move.stamps.count(), "session")


def _pause_dialog(seen: Seen, now: datetime) -> Dialog:
    move = seen.move
    lines = []
    if seen.fenced:
        lines.append(
            (
                "Happens now",
                f"Work stops after the running step. The fence stays closed and {move.tenant}"
                " keeps getting retry-after.",
            )
        )
        if move.deadline_at is not None:
            lines.append(
                (
                    "If you wait",
                    f"At {clock(move.deadline_at, now)} the fence reaches its budget of"
                    f" {limit(move.budget_seconds)}. The move then aborts by itself and reopens on"
                    f" {move.source_store}.",
                )
            )
    elif seen.phase == Phase.SOAK:
        lines.append(
            (
                "Happens now",
                f"{move.tenant} goes on being served on {move.target_store}. The source is not"
                " deleted when the soak ends.",
            )
        )
    else:
        lines.append(
            (
                "Happens now",
                f"Copying stops after the running chunk. {move.tenant} goes on being served on"
                f" {move.source_store}.",
            )
        )
    lines += [
        ("Kept", f"What has been copied: {_copies(move)} on {move.target_store}."),
        ("Thrown away", "Nothing. What changes meanwhile is copied again."),
        ("Undo", "Resume, at any time."),
    ]
    if seen.fenced:
        confirm, safe = "Pause, keep fence closed", "Keep moving"
    else:
        confirm, safe = (
            f"Pause {move}",
            "Keep soaking" if seen.phase == Phase.SOAK else "Keep copying",
        )
    title = "Pause while the fence is closed?" if seen.fenced else f"Pause {move} {move.tenant}?"
    return Dialog("pause", title, tuple(lines), confirm, safe)


def _drain_dialog(seen: Seen, quote: Quote | None, now: datetime) -> Dialog:
    move = seen.move
    lines = tenants_panels.instance_lines(
        move.source_cell, tenant=move.tenant, version=None, now=now
    )
    alive = [line for line in lines if line.state in ("alive", "silent", "joining")]
    flying = sum(line.in_flight for line in alive)
    happens = (
        "One more pass, if the last is not fresh. Then new turns of"
        f" {move.tenant} get retry-after on all {counted(len(alive), 'instance')} of"
        f" {move.source_cell}."
    )
    happens += f" The {counted(flying, 'turn')} in flight go on." if flying else ""
    if move.fence_not_before is not None and move.fence_not_before > now:
        happens += f" Not before {clock(move.fence_not_before, now)}, as this move was started."
    estimate = "not known yet"
    if quote is not None:
        parts = ", ".join(f"{part.name} {duration(part.expected)}" for part in quote.parts)
        estimate = f"{duration(quote.expected)}, at worst {duration(quote.worst)}: {parts}."
    return Dialog(
        "close_fence",
        "Close the fence and start the drain?",
        (
            ("Happens now", happens),
            ("Estimated fence", estimate),
            (
                "Stops itself",
                f"If turns are still in flight {limit(move.drain_bound_seconds)} after closing, or"
                f" the fence is still closed after {limit(move.budget_seconds)}, the move aborts"
                f" and {move.source_store} opens again.",
            ),
            ("Kept", f"Every session on {move.source_store}, closed and whole through SOAK."),
            ("Thrown away", "Nothing."),
            ("Undo", "Abort, at any time before TARGET."),
        ),
        "Close fence, start drain",
        "Not yet",
    )


def _cancel_dialog(seen: Seen, now: datetime) -> Dialog:
    move = seen.move
    lives = f"{move.tenant} goes on being served on {move.source_store}"
    return Dialog(
        "cancel_fence",
        f"Take back the drain of {move.tenant}?",
        (
            ("Happens now", f"The fence stays open. {lives}; passes go on."),
            ("Kept", f"What has been copied: {_copies(move)} on {move.target_store}."),
            ("Thrown away", "Nothing."),
            ("Undo", "Start drain, at any time."),
        ),
        "Take back, keep fence open",
        "Let it close",
    )


def _hold_dialog(seen: Seen, now: datetime) -> Dialog:
    move = seen.move
    deadline = clock(move.deadline_at, now)
    return Dialog(
        "hold_fence",
        f"Hold the fence of {move.tenant} closed for longer?",
        (
            (
                "Happens now",
                f"The deadline at {deadline} moves by the seconds you give. {move.tenant} keeps"
                " getting retry-after meanwhile.",
            ),
            ("Kept", f"All {counted(move.sessions, 'session')} on both sides."),
            ("Thrown away", "Nothing."),
            ("Undo", "Abort reopens at once. The deadline moves only this once."),
        ),
        "Hold the fence",
        f"Reopen at {deadline}",
        asks="seconds",
    )


def _offboard_dialog(seen: Seen, now: datetime) -> Dialog:
    move = seen.move
    when = "now" if seen.soak_over(now) else f"when the soak ends, {clock(move.soak_until, now)}"
    return Dialog(
        "confirm_offboard",
        f"Delete {move.tenant}'s copy on {move.source_store}?",
        (
            (
                "Happens now" if seen.soak_over(now) else "Happens then",
                f"OFFBOARD deletes {counted(move.sessions, 'session')} on {move.source_store},"
                f" {when}.",
            ),
            (
                "Kept",
                f"Everything on {move.target_store}. Sessions on {move.source_store} that are not"
                " what this move recorded are left there and listed.",
            ),
            ("Thrown away", f"The source's copy: {counted(move.sessions, 'session')}."),
            ("Undo", "None, once it is deleted. Pause keeps it from starting."),
        ),
        f"Delete the copy on {move.source_store}",
        "Keep the source",
        danger=True,
        asks="typed",
    )


def _leave_dialog(seen: Seen, now: datetime) -> Dialog:
    move = seen.move
    if seen.phase == Phase.OFFBOARD:
        return Dialog(
            "leave_behind",
            f"End {move} and leave its copy on {move.source_store}?",
            (
                ("Happens now", f"The move ends as DONE without cleaning {move.source_store}."),
                ("Kept", f"{move.tenant} is served on {move.target_store}, as it is now."),
                (
                    "Left behind",
                    f"What is still of {move.tenant} on {move.source_store}, closed to agents. A"
                    " later move there removes it first.",
                ),
                ("Thrown away", "Nothing."),
                ("Undo", "None; the copy can be removed by hand."),
            ),
            "End, leave copy behind",
            "Keep trying",
            danger=True,
        )
    return Dialog(
        "leave_behind",
        f"End {move} and leave its copy on {move.target_store}?",
        (
            ("Happens now", f"The move ends as ABORTED without cleaning {move.target_store}."),
            ("Kept", f"{move.tenant} is served on {move.source_store}, as it is now."),
            (
                "Left behind",
                f"{_copies(move)} of {move.tenant} on {move.target_store}, closed to"
                " agents. A later move there removes them first.",
            ),
            ("Thrown away", "Nothing."),
            ("Undo", "None; the copy can be removed by hand."),
        ),
        "End, leave copy behind",
        "Keep trying",
        danger=True,
    )
