"""What an act would do, from the rows as they are now: the text of its dialog."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime

from migrations_app import queries
from migrations_app.domain.mismatch import Looks
from migrations_app.domain.phases import Phase
from migrations_app.models import Mismatch, TenantMigration
from migrations_app.panels import of_cell
from migrations_app.panels.dialog import Dialog, estimate, refused
from migrations_app.panels.seen import Seen
from tenants.domain.words import clock, counted, elapsed, limit, rate


def dialog(seen: Seen, verb: str, *, now: datetime) -> Dialog:
    """Return the dialog of an act."""
    if seen.of_cell:
        return of_cell.dialog(seen, verb, now=now)
    build = {
        "abort": _abort_dialog,
        "pause": _pause_dialog,
        "close_fence": _drain_dialog,
        "cancel_fence": _cancel_dialog,
        "hold_fence": _hold_dialog,
        "set_pace": _pace_dialog,
        "flip": _flip_dialog,
        "rollback": _rollback_dialog,
        "cancel_rollback": _cancel_rollback_dialog,
        "confirm_offboard": _offboard_dialog,
        "leave_behind": _leave_dialog,
    }
    return build[verb](seen, now)


def _abort_dialog(seen: Seen, now: datetime) -> Dialog:
    if seen.going_back:
        return _stop_dialog(seen, now)
    if seen.both_serve:
        return _leave_split_dialog(seen, now)
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


def _leave_split_dialog(seen: Seen, now: datetime) -> Dialog:
    """Return the dialog of an abort that has births to carry back, and what that costs."""
    move = seen.move
    tenant, source, target = move.tenant, move.source_store, move.target_store
    quote = queries.way_back_quote(move, now=now)
    born = "Sessions" if move.born is None else counted(move.born, "session")
    happens = (
        f"{born} born on {target} since the split are carried back to {source}: a fence closes"
    )
    happens += f" on {target}, {refused(move, move.target_cell, now)} {source} goes on serving its"
    happens += f" own. Then all of {tenant} is served on {source}."
    if seen.fenced:
        happens = f"The fence on {source} opens first, within one poll (250ms). Then: {happens}"
    lines = [("Happens now", happens), ("Estimated fence", estimate(quote))]
    if quote.worst > move.budget_seconds:
        over = f"That is over the budget of {limit(move.budget_seconds)}: the fence would not close"
        lines.append(("First", f"{over} before it fits. Both sides serve meanwhile."))
    lines += [
        ("Kept", f"Every session, wherever it began. {target} keeps its copy, closed to agents."),
        ("Thrown away", "Nothing. Shared state that both sides changed is merged key by key."),
        ("Undo", "Take back abort, until its fence closes; then Stop rollback leads back here."),
    ]
    return Dialog(
        "abort",
        f"Abort {move} and carry {tenant}'s new sessions back to {source}?",
        tuple(lines),
        "Abort, carry births back",
        "Keep both serving",
        danger=True,
    )


def _copies(move: TenantMigration) -> str:
    """Return how many sessions the move wrote on the target, or may have."""
    return counted(move.stamps.count(), "session")


def _pause_dialog(seen: Seen, now: datetime) -> Dialog:
    move = seen.move
    lines = []
    if seen.both_serve and not seen.fenced:
        happens = "Copying stops after the running chunk, and nothing closes by itself. Both sides"
        lines.append(("Happens now", f"{happens} go on serving {move.tenant}, each its own."))
    elif seen.fenced:
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
                    f" {limit(move.budget_seconds)}. {_gives_up(seen)}",
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


def _gives_up(seen: Seen) -> str:
    """Say what a move does by itself once its fence's budget is over."""
    move = seen.move
    if seen.both_serve:
        return f"It then opens {seen.opens} again by itself, and both sides serve as before."
    if seen.going_back:
        return f"The rollback then stops by itself and reopens on {move.target_store}."
    return f"The move then aborts by itself and reopens on {move.source_store}."


def _wait_dialog(seen: Seen, now: datetime) -> Dialog:
    move = seen.move
    quiet = "A session there has just changed."
    if move.quiet_since is not None:
        so_far = elapsed((now - move.quiet_since).total_seconds())
        quiet = f"None has changed there for {so_far}, of {limit(move.idle_seconds)} wanted."
    happens = f"Once its quote fits, the fence closes on {move.source_store}:"
    happens += f" {refused(move, move.source_cell, now)} {move.target_store} goes on serving what"
    happens += " was born there."
    return Dialog(
        "close_fence",
        f"Wait no longer for {move.source_store} to be idle?",
        (
            ("Happens now", happens),
            ("So far", quiet),
            ("Estimated fence", estimate(queries.fence_quote(move, now=now))),
            (
                "Stops itself",
                f"Past its budget of {limit(move.budget_seconds)} {move.source_store} opens again,"
                " and both sides serve as before.",
            ),
            ("Kept", f"Every session on {move.source_store}, closed and whole through SOAK."),
            ("Thrown away", "Nothing."),
            ("Undo", "Abort, at any time before TARGET: what was born is carried back."),
        ),
        "Wait no longer, close fence",
        "Keep waiting",
    )


def _split_dialog(seen: Seen, now: datetime) -> Dialog:
    move = seen.move
    happens = (
        f"One more pass, if the last is not fresh. Then {move.source_cell} takes only sessions"
    )
    happens += f" that {move.source_store} has; new ones get retry-after until turns that run now"
    happens += f" have ended, {limit(move.drain_bound_seconds)} at most. Then they begin on"
    happens += f" {move.target_store}, in {move.target_cell}."
    if move.fence_not_before is not None and move.fence_not_before > now:
        happens += f" Not before {clock(move.fence_not_before, now)}, as this move was started."
    return Dialog(
        "close_fence",
        f"Let {move.tenant}'s new sessions begin on {move.target_store}?",
        (
            ("Happens now", happens),
            (
                "Happens then",
                f"Known sessions stay on {move.source_store} until none has changed for"
                f" {limit(move.idle_seconds)}, {limit(move.idle_bound_seconds)} at most. Then a"
                " fence closes for them alone.",
            ),
            ("Estimated fence", estimate(queries.fence_quote(move, now=now))),
            ("Kept", f"Every session on {move.source_store}, served there until that fence."),
            ("Thrown away", "Nothing. From then on a delete waits for TARGET."),
            (
                "Undo",
                "Abort. Until the target takes new sessions it costs nothing; afterwards what was"
                " born is carried back inside a fence.",
            ),
        ),
        "Start split",
        "Not yet",
    )


def _drain_dialog(seen: Seen, now: datetime) -> Dialog:
    if seen.phase == Phase.SPLIT:
        return _wait_dialog(seen, now)
    if seen.split:
        return _split_dialog(seen, now)
    move = seen.move
    who = refused(move, move.source_cell, now)
    happens = f"One more pass, if the last is not fresh. Then {who}"
    if move.fence_not_before is not None and move.fence_not_before > now:
        happens += f" Not before {clock(move.fence_not_before, now)}, as this move was started."
    takes = estimate(queries.fence_quote(move, now=now))
    return Dialog(
        "close_fence",
        "Close the fence and start the drain?",
        (
            ("Happens now", happens),
            ("Estimated fence", takes),
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
        f"Take back the {'split' if seen.split else 'drain'} of {move.tenant}?",
        (
            ("Happens now", f"The fence stays open. {lives}; passes go on."),
            ("Kept", f"What has been copied: {_copies(move)} on {move.target_store}."),
            ("Thrown away", "Nothing."),
            ("Undo", f"Start {'split' if seen.split else 'drain'}, at any time."),
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
            (
                "Undo",
                f"{'Stop rollback' if seen.going_back else 'Abort'} reopens at once. The deadline"
                " moves only this once.",
            ),
        ),
        "Hold the fence",
        f"Reopen at {deadline}",
        asks="seconds",
    )


def _rollback_dialog(seen: Seen, now: datetime) -> Dialog:
    move = seen.move
    tenant, source, target = move.tenant, move.source_store, move.target_store
    quote = queries.fence_quote(move, now=now)
    over = quote.worst > move.budget_seconds
    if move.touched is None:
        touched = "Not looked at yet: SOAK looks once a minute. The estimate counts what runtimes"
        touched += " said they served."
    else:
        touched = f"{counted(move.touched, 'session')} written, born or deleted on {target},"
        touched += f" counted at {clock(move.touched_at, now)}; {queries.to_carry(move):,} to carry"
        touched += " back, with those that runtimes served since."
    if seen.soak_over(now):
        left = f"None: it is over. The copy on {source} is still there."
    elif move.soak_until is None:
        left = "It has not begun."
    else:
        left = f"{elapsed((move.soak_until - now).total_seconds())}, until"
        left += f" {clock(move.soak_until, now)}. Afterwards only a new move leads back."
    fits = f"The fence may stay closed for {limit(move.budget_seconds)}"
    lines = (
        (
            "Happens now",
            f"The fence closes on {target}: {refused(move, move.target_cell, now)} What was"
            f" touched since the cutover is carried back, deletes too; every session is compared."
            f" Then {tenant} is served on {source}, in {move.source_cell}.",
        ),
        ("Estimated fence", estimate(quote)),
        ("Touched", touched),
        ("Soak left", left),
        (
            "Stops itself",
            f"{fits}, drain included up to {limit(move.drain_bound_seconds)}. Past it {tenant}"
            f" stays on {target}, and its soak begins anew.",
        ),
        (
            "Kept",
            f"Every session, with all that {tenant} wrote since. The copy on {target} stays, closed"
            " to agents.",
        ),
        (
            "Thrown away",
            f"On {source}: the state of the touched sessions as it was at the cutover. Calls that"
            " tools made since are not undone.",
        ),
        ("Undo", "Stop rollback, until REVERSE_TARGET. Afterwards a new move."),
    )
    blocked = "" if seen.phase == Phase.SOAK else "Roll back opens in SOAK."
    if late := seen.late_writes:
        blocked = f"{counted(late, 'late write')} at the closed {source} must be settled first:"
        blocked += " download both versions, then accept the tenant's own."
    return Dialog(
        "rollback",
        f"Roll {tenant} back to {source}?",
        lines,
        "Roll back to source",
        "Stay on target",
        danger=True,
        asks="budget" if over else "",
        # Room to spare: sessions go on being touched until the fence closes.
        proposes=str(min(3600, math.ceil(quote.worst * 1.25))) if over else "",
        blocked=blocked,
    )


def _cancel_rollback_dialog(seen: Seen, now: datetime) -> Dialog:
    move = seen.move
    if seen.both_serve:
        happens = f"Nothing is carried back. Both sides go on serving {move.tenant}, each its own."
        lines = (
            ("Happens now", happens),
            ("Kept", "Both sides as they are."),
            ("Thrown away", "Nothing."),
            ("Undo", "Abort, at any time before TARGET."),
        )
        title = f"Take back the abort of {move}?"
        return Dialog("cancel_rollback", title, lines, "Take back, stay split", "Let it abort")
    return Dialog(
        "cancel_rollback",
        f"Take back the rollback of {move.tenant}?",
        (
            (
                "Happens now",
                f"The fence stays open. {move.tenant} goes on being served on {move.target_store};"
                " the soak goes on.",
            ),
            ("Kept", f"Both sides as they are; {move.source_store} stays closed."),
            ("Thrown away", "Nothing."),
            ("Undo", "Roll back, at any time in SOAK."),
        ),
        "Take back, stay on target",
        "Let it roll back",
    )


def _stop_dialog(seen: Seen, now: datetime) -> Dialog:
    move = seen.move
    tenant, target = move.tenant, move.target_store
    opens = "The fence opens" if seen.fenced else "The fence stays open"
    if seen.out_of_split:
        happens = f"{opens}: {target} serves the rest of the sessions that were born there again,"
        happens += " and new ones, within one poll (250ms). The split goes on."
        kept = "Every session. What was carried back already is served on"
        lines = (
            ("Happens now", happens),
            ("Kept", f"{kept} {move.source_store} from now on."),
            ("Thrown away", "Nothing."),
            ("Undo", "Abort, at any time before TARGET."),
        )
        title = f"Stop carrying {tenant}'s sessions back?"
        return Dialog("abort", title, lines, "Stop, stay split", "Keep carrying back")
    return Dialog(
        "abort",
        f"Stop the rollback and keep {tenant} on {target}?",
        (
            (
                "Happens now",
                f"{opens}: {tenant} is served on {target} within one poll (250ms). Its soak begins"
                f" anew, {limit(move.soak_seconds)}.",
            ),
            (
                "Kept",
                f"Everything on {target}. What was carried back to {move.source_store} stays there,"
                " closed to agents.",
            ),
            ("Thrown away", "Nothing."),
            ("Undo", "Roll back, once the soak runs."),
        ),
        "Stop rollback, stay on target",
        "Keep rolling back",
    )


def _flip_dialog(seen: Seen, now: datetime) -> Dialog:
    move = seen.move
    when = "now" if seen.waits_for_flip else "as soon as every session is equal"
    return Dialog(
        "flip",
        f"Flip {move.tenant} to {move.target_store}?",
        (
            (
                "Happens now" if seen.waits_for_flip else "Happens then",
                f"{move.tenant} is served on {move.target_store}, in {move.target_cell}, {when}."
                " The fence opens.",
            ),
            ("Kept", f"Every session on {move.source_store}, closed and whole through SOAK."),
            ("Thrown away", "Nothing."),
            ("Undo", "Roll back, in SOAK. Abort ends at TARGET."),
            (
                "If you wait",
                f"At {clock(move.deadline_at, now)} {_gives_up(seen)[0].lower()}"
                f"{_gives_up(seen)[1:]}",
            ),
        ),
        "Flip to target",
        "Keep fence closed",
    )


def _pace_dialog(seen: Seen, now: datetime) -> Dialog:
    move = seen.move
    if move.finish_by is not None:
        present = f"Through by {clock(move.finish_by, now)} UTC."
    elif move.pace_per_second:
        present = f"At {rate(move.pace_per_second)}."
    else:
        present = "As fast as both stores allow."
    left = max(move.todo - move.done, 0)
    ahead = f"{counted(left, 'session')} of this pass are ahead." if left else ""
    return Dialog(
        "set_pace",
        f"Change the pace of {move}?",
        (
            ("Now", f"{present} {ahead}".strip()),
            (
                "Happens now",
                "The next chunk keeps to the new pace. A slow store is still left alone in"
                " between, whatever is asked for.",
            ),
            ("Kept", f"What has been copied: {_copies(move)} on {move.target_store}."),
            ("Thrown away", "Nothing."),
            ("Undo", "Change pace, at any time in BACKFILL."),
        ),
        "Change pace",
        "Keep the pace",
        asks="pace",
    )


def accept_dialog(seen: Seen, rows: Sequence[Mismatch]) -> Dialog:
    """Return the dialog that lets differences stay as they are."""
    move = seen.move
    what = counted(len(rows), "difference")
    if any(row.looks_like == Looks.LATE_WRITE for row in rows):
        kept = f"What {move.tenant} has on {move.target_store}."
        thrown = f"What was written at {move.source_store} after the cutover is carried nowhere: a"
        thrown += " rollback replaces it. Download both versions first."
    else:
        kept = f"Both sides as they are; {move.tenant} lives on with the target's spelling."
        thrown = "Nothing is left out; the value reads in another way on the target."
    these = "these differences" if len(rows) > 1 else "this difference"
    it = "They block" if len(rows) > 1 else "It blocks"
    return Dialog(
        "accept",
        f"Let {these} stay?",
        (
            ("Happens now", f"{what} accepted, with your name and reason. {it} nothing any more."),
            ("Kept", kept),
            ("Thrown away", thrown),
            ("Undo", "None by a button; the word is void once a side changes again."),
        ),
        f"Accept {what}",
        "Leave open",
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
            ("Thrown away", f"The source's copy: {_copy_words(move)}."),
            ("Undo", "None, once it is deleted. Pause keeps it from starting."),
        ),
        f"Delete the copy on {move.source_store}",
        "Keep the source",
        danger=True,
        asks="typed",
    )


def _copy_words(move: TenantMigration) -> str:
    """Name what OFFBOARD deletes."""
    source, target = move.source_store.memory_from, move.target_store.memory_from
    parts = [counted(move.sessions, "session")]
    if move.artifacts_apart:
        parts.append("their artifacts")
    if source and target and source != target:
        parts.append("what its memory service has of them, as far as that can be removed")
    return ", ".join(parts)


def _leave_dialog(seen: Seen, now: datetime) -> Dialog:
    move = seen.move
    if seen.phase in (Phase.SOAK, Phase.OFFBOARD):
        return Dialog(
            "leave_behind",
            f"End {move} and leave its copy on {move.source_store}?",
            (
                ("Happens now", f"The move ends as DONE without cleaning {move.source_store}."),
                (
                    "Kept",
                    f"{move.tenant} is served on {move.target_store}, as it is now."
                    + (" It is not taken back: the rehearsal ends here." if move.rehearsal else ""),
                ),
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
