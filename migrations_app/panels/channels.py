"""Memory and side channels: what goes over beside the sessions, and who still has to do what."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from migrations_app import queries
from migrations_app.domain.channels import ChannelState, Step, StepBy
from migrations_app.domain.phases import Phase
from migrations_app.models import MoveChannel, SideChannel
from migrations_app.panels.dialog import Dialog
from migrations_app.panels.seen import Seen
from tenants.domain.words import Status, clock, counted, percent, rate

# Phases in which a person's word still counts.
OPEN_PHASES = queries.CARRIED | {Phase.PREPARE}
STATES = {
    ChannelState.OPEN: Status("waiting", "Open"),
    ChannelState.COPIED: Status("live", "Copied"),
    ChannelState.GREEN: Status("ok", "Green"),
    ChannelState.FAILED: Status("blocked", "Failed"),
}
# Who does a step, in words.
BY = {
    StepBy.CALLABLE: "a callable",
    StepBy.COMMAND: "a command",
    StepBy.PERSON: "a person",
}
DONE = {Step.COPY: "copied", Step.VERIFY: "verified"}


@dataclass(frozen=True)
class StepLine:
    """One step of a channel: whose it is, when it was done, and what may be said of it."""

    step: Step
    by: str
    text: str
    done_at: datetime | None
    # Whether it is to be done now.
    due: bool
    check_off: bool
    uncheck: bool


@dataclass(frozen=True)
class ChannelLine:
    # Text, for templates write numbers with separators.
    key: str
    name: str
    about: str
    required: bool
    status: Status
    detail: str
    by: str
    # When its program is called again. None: at once, or not in this phase.
    next_at: datetime | None
    steps: tuple[StepLine, ...]
    # What it keeps from happening while it is not green; "" nothing.
    blocks: str


@dataclass(frozen=True)
class MemoryLine:
    status: Status
    text: str
    remembered: int
    sessions: int
    rate: str


@dataclass(frozen=True)
class ChannelsPanel:
    status: Status
    lines: tuple[ChannelLine, ...]
    memory: MemoryLine
    before_fence: str
    before_flip: str


def channels(seen: Seen) -> ChannelsPanel:
    """Return the move's side channels with what may be said of each, and its memory."""
    move = seen.move
    rows = list(queries.listed_channels(move))
    lines = tuple(_line(seen, row) for row in rows)
    fence = queries.channels_before_fence(move) if seen.phase in EARLY else ""
    flip = queries.channels_before_flip(move) if not seen.on_target and not seen.ended else ""
    return ChannelsPanel(
        status=_status(lines, fence, flip),
        lines=lines,
        memory=_memory(seen),
        before_fence=fence,
        before_flip=flip,
    )


# Phases before the fence.
EARLY = frozenset({Phase.PREPARE, Phase.BACKFILL, Phase.SPLIT})


def _status(lines: tuple[ChannelLine, ...], fence: str, flip: str) -> Status:
    if not lines:
        return Status("warn", "None registered")
    if any(line.status.glyph == "blocked" for line in lines):
        return Status("blocked", "A step failed")
    if fence or flip:
        return Status("waiting", f"{'The fence' if fence else 'TARGET'} waits")
    green = sum(line.status.glyph == "ok" for line in lines)
    return Status("ok" if green == len(lines) else "live", f"{green} of {len(lines)} green")


def _line(seen: Seen, row: MoveChannel) -> ChannelLine:
    channel, state = row.channel, ChannelState(row.state)
    may = seen.phase in OPEN_PHASES
    due = queries.channel_step(seen.move, row)
    steps = (
        _step(row, Step.COPY, channel.copy_by, channel.copy_step, row.copied_at, due, may),
        _step(row, Step.VERIFY, channel.verify_by, channel.verify_step, row.verified_at, due, may),
    )
    blocks = ""
    if channel.required and state is not ChannelState.GREEN and not seen.on_target and may:
        blocks = "the fence" if row.copied_at is None else "TARGET"
    return ChannelLine(
        key=str(row.pk),
        name=channel.name,
        about=channel.about,
        required=channel.required,
        status=STATES[state],
        detail=row.detail,
        by=row.by,
        next_at=row.next_at if due is not None else None,
        steps=steps,
        blocks=blocks,
    )


def _step(
    row: MoveChannel,
    step: Step,
    by: str,
    text: str,
    done_at: datetime | None,
    due: Step | None,
    may: bool,
) -> StepLine:
    copied = step is Step.COPY or row.copied_at is not None
    return StepLine(
        step=step,
        by=BY[StepBy(by)],
        text=text,
        done_at=done_at,
        due=due is step,
        check_off=may and copied and (done_at is None or due is step),
        uncheck=may and done_at is not None,
    )


def _memory(seen: Seen) -> MemoryLine:
    move = seen.move
    source, target = move.source_store, move.target_store
    sessions = max(move.sessions, move.remembered)
    quick = rate(move.memory_rate)
    if not target.memory_from:
        text = f"{target} names no memory service"
        if source.memory_from:
            status = Status("warn", "Stays behind")
            text = f"{source} names one, {text}: it goes over only as a side channel"
        else:
            status = Status("kept", "No memory")
            text = f"neither {source} nor {target} names a memory service"
        return MemoryLine(status, text, move.remembered, sessions, quick)
    if source.memory_from == target.memory_from:
        text = f"{source} and {target} lead to one memory service: it stays as it is"
        return MemoryLine(Status("ok", "Stays"), text, move.remembered, sessions, quick)
    share = percent(move.remembered, sessions)
    text = f"{counted(move.remembered, 'session')} given to the service of {target}, {share}"
    if seen.on_target or move.remembered >= move.sessions > 0:
        return MemoryLine(Status("ok", "Filled"), text, move.remembered, sessions, quick)
    status = Status("live", "Being filled") if move.remembered else Status("waiting", "Not yet")
    return MemoryLine(status, text, move.remembered, sessions, quick)


def check_dialog(seen: Seen, row: MoveChannel, step: Step, *, undo: bool, now: datetime) -> Dialog:
    """Return the dialog in which a person says that a step is done, or takes that back."""
    channel, move = row.channel, seen.move
    by = channel.copy_by if step is Step.COPY else channel.verify_by
    program = by != StepBy.PERSON
    about = channel.about or "Nobody has written down what is to be done."
    if undo:
        return _uncheck_dialog(seen, row, step, program=program, now=now)
    sides = (move.source_store, move.target_store)
    here, there = reversed(sides) if seen.going_back else sides
    instead = ""
    if program:
        instead = " You say so in place of its program, which is not called for it any more."
        if not seen.going_back:
            instead += " A rollback calls it."
    lines = (
        ("What it is", about),
        ("From, to", f"{here} to {there}"),
        ("Happens now", f"{channel} counts as {DONE[step]}, with your name and note.{instead}"),
        ("Undo", "Uncheck, until the move ends."),
    )
    title = f"Is {channel} {DONE[step]}?"
    return Dialog("check_off", title, lines, f"It is {DONE[step]}", "Not yet")


def _uncheck_dialog(
    seen: Seen, row: MoveChannel, step: Step, *, program: bool, now: datetime
) -> Dialog:
    channel = row.channel
    at = row.copied_at if step is Step.COPY else row.verified_at
    said = f"It counts as {DONE[step]} since {clock(at, now)}." if at else "It is not done."
    happens = f"{channel} counts as not {DONE[step]}"
    happens += "; its check is void too." if step is Step.COPY else "."
    if program and seen.phase == Phase.SOAK:
        happens += (
            f" Its program is not called while {seen.move.target_store} serves: it would put older"
            " values over what agents have written since."
        )
    elif program:
        happens += " Its program is called again."
    elif channel.required and not seen.on_target:
        happens += f" {seen.move} waits for somebody to do it."
    lines = (("Now", said), ("Happens now", happens), ("Undo", "Check it off again."))
    title = f"Take back that {channel} is {DONE[step]}?"
    return Dialog("uncheck", title, lines, f"Not {DONE[step]}", "Leave it as it is")


@dataclass(frozen=True)
class Registered:
    """One side channel as lists of them show it."""

    channel: SideChannel
    whose: str
    copy: str
    verify: str


def registered(row: SideChannel) -> Registered:
    """Return a side channel with who owns it and who does its steps."""
    whose = f"agent {row.agent}" if row.agent is not None else f"tenant {row.tenant}"
    return Registered(
        row, whose, _does(row.copy_by, row.copy_step), _does(row.verify_by, row.verify_step)
    )


def _does(by: str, text: str) -> str:
    return f"{BY[StepBy(by)]}: {text}" if text else BY[StepBy(by)]
