"""A move's title, status words and buttons."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from migrations_app import queries
from migrations_app.domain.phases import UNPAUSABLE, Phase
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
        status = Status("moving", "Moving")
    word = status.word if seen.ended else f"{status.word} in {seen.phase.upper()}"
    tags = [Status(status.glyph, word)]
    if seen.fenced:
        tags.append(Status("fenced", "Fence closed"))
    if seen.move.pause_requested_at and status.glyph != "paused" and not seen.ended:
        tags.append(Status("paused", "Paused"))
    return Head(tuple(tags), tuple(_actions(seen, now)), urgent=not seen.ended)


def _actions(seen: Seen, now: datetime) -> Iterable[Action]:
    move, phase = seen.move, seen.phase
    if seen.ended:
        return
    if phase == Phase.REOPEN:
        stuck = queries.stuck_at_cleaning(move) and move.leave_requested_at is None
        why = "" if stuck else "The abort cleans the target by itself."
        yield Action("leave_behind", "Leave copy behind…", stuck, danger=True, why=why)
        return
    if phase == Phase.OFFBOARD and queries.stuck_at_cleaning(move):
        yield Action("leave_behind", "Leave copy behind…", not move.leave_requested_at, danger=True)
    elif phase in (Phase.SOAK, Phase.OFFBOARD):
        yield _offboard_action(seen, now)
    else:
        yield _drain_action(seen, now)
        if seen.fenced:
            yield _hold_action(seen)
    if move.pause_requested_at:
        yield Action("resume", "Resume", True, dialog=False)
    else:
        can = phase not in UNPAUSABLE and not seen.aborting
        yield Action("pause", "Pause…", can)
    if phase in ways_out(move):
        asked = move.abort_requested_at is not None
        why = f"{move.abort_requested_by} asked for the abort already." if asked else ""
        yield Action("abort", "Abort…", not asked, danger=True, why=why)
    else:
        why = "Abort ended at TARGET: the tenant lives on the target now."
        yield Action("abort", "Abort…", False, danger=True, why=why)


def _drain_action(seen: Seen, now: datetime) -> Action:
    move, phase = seen.move, seen.phase
    label = "Start drain…"
    if move.fence_closed_at is not None:
        why = f"The fence closed at {clock(move.fence_closed_at, now)}."
        return Action("close_fence", label, False, why=why)
    if phase == Phase.PREPARE:
        return Action("close_fence", label, False, why="Start drain opens after the first pass.")
    if move.drain_requested_at is not None:
        at = clock(move.drain_requested_at, now)
        why = f"{move.drain_requested_by} started the drain at {at}; it waits for the last pass."
        return Action("cancel_fence", "Take back drain…", not seen.aborting, why=why)
    if move.pass_ended_at is None:
        return Action("close_fence", label, False, why="Start drain opens after the first pass.")
    if seen.open_mismatches:
        why = "Start drain opens when no mismatch is open."
        return Action("close_fence", label, False, why=why)
    return Action("close_fence", label, not seen.aborting, primary=seen.ready)


def _hold_action(seen: Seen) -> Action:
    move = seen.move
    if move.deadline_held_by:
        why = f"{move.deadline_held_by} held the fence already; it moves once."
        return Action("hold_fence", "Hold the fence…", False, why=why)
    can = move.deadline_at is not None and seen.phase != Phase.TARGET and not seen.aborting
    return Action("hold_fence", "Hold the fence…", can)


def _offboard_action(seen: Seen, now: datetime) -> Action:
    move = seen.move
    label = "Confirm offboard…"
    if seen.owes_confirmation:
        return Action("confirm_offboard", label, True, danger=True)
    if move.offboard_confirmed_at is not None:
        at = clock(move.offboard_confirmed_at, now)
        why = f"{move.offboard_confirmed_by} confirmed the offboarding at {at}."
    else:
        why = "This move offboards its source by itself."
    return Action("confirm_offboard", label, False, danger=True, why=why)
