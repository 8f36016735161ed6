"""A move's title, status words and buttons."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from migrations_app import queries
from migrations_app.domain.phases import NO_RETURN, UNPAUSABLE, Phase
from migrations_app.domain.verbs import words
from migrations_app.panels.seen import Seen, ways_out
from tenants.domain.words import Status, clock


@dataclass(frozen=True)
class Action:
    """A button of the page head. One that can't be used now stays visible, with `why`."""

    verb: str
    label: str
    enabled: bool
    danger: bool = False
    # Empty: nothing to explain.
    why: str = ""
    # False: it acts at once, for it undoes itself.
    dialog: bool = True
    # The one thing that the move waits for.
    primary: bool = False

    @property
    def disabled(self) -> bool:
        return not self.enabled


@dataclass(frozen=True)
class Head:
    tags: tuple[Status, ...]
    actions: tuple[Action, ...]
    urgent: bool

    @property
    def why(self) -> str:
        return " ".join(action.why for action in self.actions if action.why)

    @property
    def words(self) -> str:
        """The status words as one sentence, for the announcement."""
        return ", ".join(tag.word for tag in self.tags)


def head(seen: Seen, *, now: datetime) -> Head:
    """Return the status words and the buttons of the move's page head."""
    status = seen.status(now)
    if status.glyph == "fenced":
        # The fence has a tag of its own.
        word = "Moving" if status.word == "Fenced" else status.word
        status = Status("moving", word)
    word = status.word if seen.ended else f"{status.word} in {seen.phase.upper()}"
    tags = [Status(status.glyph, word)]
    if (seen.going_back or seen.rollback_waits) and status.word not in ROLLING:
        tags.append(Status("moving", "Rolling back"))
    if seen.both_serve and not seen.fenced:
        tags.append(Status("live", "Both cells serve"))
    if seen.fenced:
        tags.append(Status("fenced", "Fence closed"))
    if seen.move.pause_requested_at and status.glyph != "paused" and not seen.ended:
        tags.append(Status("paused", "Paused"))
    return Head(tuple(tags), tuple(_actions(seen, now)), urgent=not seen.ended)


# Words that say by themselves that the tenant is on its way back.
ROLLING = ("Rolling back", "Stopping rollback")


def _actions(seen: Seen, now: datetime) -> Iterable[Action]:
    move, phase = seen.move, seen.phase
    if seen.ended:
        return
    if phase == Phase.REOPEN and seen.of_cell:
        # Nothing to clean, so nothing to leave behind.
        return
    if phase == Phase.REOPEN:
        stuck = queries.stuck_at_cleaning(move) and move.leave_requested_at is None
        why = "" if stuck else "The abort cleans the target by itself."
        yield _action("leave_behind", seen, stuck, danger=True, why=why)
        return
    if phase == Phase.SOAK and seen.of_cell:
        pass
    elif phase in (Phase.SOAK, Phase.OFFBOARD) and queries.stuck_at_cleaning(move):
        yield _action("leave_behind", seen, not move.leave_requested_at, danger=True)
    elif phase in (Phase.SOAK, Phase.OFFBOARD):
        yield _offboard_action(seen, now)
    elif not seen.going_back:
        yield _drain_action(seen, now)
        if phase in (Phase.PREPARE, Phase.BACKFILL, Phase.SPLIT) and not seen.of_cell:
            yield _action("set_pace", seen, not seen.aborting)
        if move.flip_by_hand and phase in (Phase.DRAIN, Phase.DELTA, Phase.VERIFY):
            yield _flip_action(seen, now)
    if seen.fenced and not seen.opening_again:
        yield _hold_action(seen)
    if move.pause_requested_at:
        yield Action("resume", "Resume", True, dialog=False)
    else:
        can = phase not in UNPAUSABLE and not seen.aborting and not seen.opening_again
        yield _action("pause", seen, can)
    if not seen.going_back and not _answers_abort(seen):
        yield _rollback_action(seen, now)
    yield from _abort_action(seen)


def _action(verb: str, seen: Seen, enabled: bool, *, why: str = "", danger: bool = False) -> Action:
    """Return a button that opens the dialog of `verb`."""
    return Action(
        verb, f"{words(verb, seen.phase, seen.move.mode)}…", enabled, danger=danger, why=why
    )


def _answers_abort(seen: Seen) -> bool:
    """Return whether an abort is what would carry a split's births back."""
    return seen.both_serve and not seen.rollback_waits


def _abort_action(seen: Seen) -> Iterable[Action]:
    move = seen.move
    if seen.both_serve and seen.rollback_waits:
        # The way back is asked for; taking that back is the button beside this one.
        return
    if seen.phase in ways_out(move):
        asked = move.abort_requested_at is not None
        what = "to stop the rollback" if seen.going_back else "for the abort"
        why = f"{move.abort_requested_by} asked {what} already." if asked else ""
        yield _action("abort", seen, not asked, danger=not seen.going_back, why=why)
    elif seen.going_back:
        why = f"The rollback can't be stopped any more: {move.tenant} is on its way to"
        yield _action("abort", seen, False, why=f"{why} {seen.source}.")
    else:
        why = "Abort ended at TARGET: the tenant lives on the target now."
        yield _action("abort", seen, False, danger=True, why=why)


def _rollback_action(seen: Seen, now: datetime) -> Action:
    move = seen.move
    if seen.rollback_waits:
        at = clock(move.rollback_requested_at, now)
        what = "abort" if seen.both_serve else "rollback"
        why = f"{move.rollback_requested_by} asked for the {what} at {at}."
        if seen.opening_again:
            why = f"{why} It begins once {seen.opens} is open again."
        return _action("cancel_rollback", seen, True, why=why)
    if seen.opening_again:
        why = "Roll back opens again once the target is open and the soak runs."
    elif seen.phase == Phase.OFFBOARD:
        why = "Roll back ended with SOAK: start a move back."
    elif seen.phase != Phase.SOAK:
        why = "Roll back opens in SOAK."
    else:
        return _action("rollback", seen, True, danger=True)
    return _action("rollback", seen, False, danger=True, why=why)


def _flip_action(seen: Seen, now: datetime) -> Action:
    move = seen.move
    if move.flip_requested_at is not None:
        at = clock(move.flip_requested_at, now)
        why = f"{move.flip_requested_by} gave the word to flip at {at}."
        return _action("flip", seen, False, why=why)
    label = f"{words('flip', seen.phase, move.mode)}…"
    return Action("flip", label, not seen.aborting, primary=seen.waits_for_flip)


def _drain_action(seen: Seen, now: datetime) -> Action:
    move, phase = seen.move, seen.phase
    if phase == Phase.SPLIT:
        return _wait_action(seen, now)
    label = f"{words('close_fence', phase, move.mode)}…"
    if move.fence_closed_at is not None:
        why = f"The fence closed at {clock(move.fence_closed_at, now)}."
        return Action("close_fence", label, False, why=why)
    if phase == Phase.PREPARE and not seen.of_cell:
        return Action("close_fence", label, False, why=f"{label[:-1]} opens after the first pass.")
    if move.drain_requested_at is not None:
        at = clock(move.drain_requested_at, now)
        what = "split" if seen.split else "drain"
        waits = seen.waiting_for or "its next step" if seen.of_cell else "the last pass"
        why = f"{move.drain_requested_by} started the {what} at {at}; it waits for {waits}."
        return _action("cancel_fence", seen, not seen.aborting, why=why)
    if move.pass_ended_at is None and not seen.of_cell:
        return Action("close_fence", label, False, why=f"{label[:-1]} opens after the first pass.")
    if seen.open_mismatches:
        why = f"{label[:-1]} opens when no mismatch is open."
        return Action("close_fence", label, False, why=why)
    return Action("close_fence", label, not seen.aborting, primary=seen.ready)


def _wait_action(seen: Seen, now: datetime) -> Action:
    """Return the button that ends the wait for idle sessions."""
    move, label = seen.move, f"{words('close_fence', seen.phase, seen.move.mode)}…"
    if not seen.both_serve or move.split_at is None:
        why = "Wait no longer opens once the target takes new sessions."
    elif seen.opening_again or seen.rollback_waits:
        why = "No session is waited for: the move is on its way back."
        if not seen.rollback_waits:
            why = f"{seen.opens} is being opened again first."
    elif (now - move.split_at).total_seconds() >= move.idle_bound_seconds:
        why = "The source's sessions are waited for no longer; the fence closes by itself."
    else:
        return Action("close_fence", label, not seen.aborting)
    return Action("close_fence", label, False, why=why)


def _hold_action(seen: Seen) -> Action:
    move = seen.move
    if move.deadline_held_by:
        why = f"{move.deadline_held_by} held the fence already; it moves once."
        return _action("hold_fence", seen, False, why=why)
    can = move.deadline_at is not None and seen.phase not in NO_RETURN and not seen.aborting
    return _action("hold_fence", seen, can)


def _offboard_action(seen: Seen, now: datetime) -> Action:
    move = seen.move
    if seen.rollback_waits or seen.opening_again:
        why = f"The copy on {move.source_store} is kept for the rollback."
        return _action("confirm_offboard", seen, False, danger=True, why=why)
    if seen.owes_confirmation:
        return _action("confirm_offboard", seen, True, danger=True)
    if move.offboard_confirmed_at is not None:
        at = clock(move.offboard_confirmed_at, now)
        why = f"{move.offboard_confirmed_by} confirmed the offboarding at {at}."
    else:
        why = "This move offboards its source by itself."
    return _action("confirm_offboard", seen, False, danger=True, why=why)
