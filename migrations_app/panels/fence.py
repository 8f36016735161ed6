"""The fence: its quote, its estimate beside the actual, and who has closed it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from migrations_app.domain.phases import NO_RETURN, Phase
from migrations_app.domain.quote import Quote
from migrations_app.domain.throttle import Speed
from migrations_app.panels.progress import share_of, spans
from migrations_app.panels.seen import Seen, fence_lines
from tenants import panels as tenants_panels
from tenants.domain.words import Status, clock, duration, elapsed, limit, rate
from tenants.models import Cell
from tenants.panels import InstanceLine


@dataclass(frozen=True)
class FenceLine:
    """One part of the fence: what was expected of it, at worst, and what it took."""

    name: str
    detail: str
    expected: float
    worst: float
    # None: not begun.
    actual: float | None
    running: bool = False


@dataclass(frozen=True)
class Slice:
    """A piece of the bar, in percent of its width."""

    x: float
    width: float


@dataclass(frozen=True)
class PastFence:
    """A fence of this move that opened again: its estimate beside what it took."""

    name: str
    # None: it never closed.
    closed_at: datetime | None
    expected: float | None
    actual: float | None


@dataclass(frozen=True)
class FencePanel:
    title: str
    status: Status
    # open, closed, or was (it has been closed and is open again).
    state: str
    reading: float | None
    lines: tuple[FenceLine, ...]
    expected: float
    worst: float
    budget: float
    slices: tuple[Slice, ...]
    # Percent up to which it may come at worst; None: it runs, or is over.
    ghost: float | None
    # Percent of the bar's width where the budget, or what was expected, ends.
    mark: float | None
    bar_label: str
    # NULL: no deadline runs.
    deadline_at: datetime | None
    deadline_seconds: float | None
    held_by: str
    closes: str
    # What must be read while the deadline runs; "" where nothing.
    loud: str
    # What a rollback would close it for, in SOAK; None: no matter.
    back: Quote | None
    past: tuple[PastFence, ...]
    # What the first pass's sample was copied at; "" until it is whole, and once it has closed.
    sample: str = ""
    # What its proof rests on, where no store is closed behind it; "" elsewhere.
    proof: str = ""

    @property
    def fits(self) -> bool:
        return self.worst <= self.budget


PART_NAMES = {"drain": "Drain", "delta": "Delta", "verify": "Verify", "publish": "Publish"}
# Which phase a part of the quote is spent in, and which on the way back.
PART_PHASE = {
    "drain": (Phase.DRAIN, Phase.REVERSE_DRAIN),
    "scan": (Phase.DELTA, Phase.REVERSE_DELTA),
    "delta": (Phase.DELTA, Phase.REVERSE_DELTA),
    "shared": (Phase.DELTA, Phase.REVERSE_DELTA),
    "artifacts": (Phase.DELTA, Phase.REVERSE_DELTA),
    "memory": (Phase.DELTA, Phase.REVERSE_DELTA),
    "verify": (Phase.VERIFY, Phase.REVERSE_VERIFY),
    "publish": (Phase.TARGET, Phase.REVERSE_TARGET),
}


def fence(seen: Seen, quote: Quote | None, *, now: datetime) -> FencePanel | None:
    """Return the quote before the fence closes, and the actual beside it from then on.

    `quote` is that of the move's next fence; in SOAK that would be a rollback's.
    None: nothing can be quoted yet, or it never closed and never will.
    """
    move = seen.move
    if move.fence_closed_at is None:
        if quote is None:
            return None
        return _fence_open(seen, quote, now)
    return _fence_closed(seen, quote, now)


def _past(seen: Seen) -> tuple[PastFence, ...]:
    """Return the fences before the present one. The first closed on the source, others back."""
    found = []
    for index, entry in enumerate(seen.move.past_fences):
        closed, opened = (
            datetime.fromisoformat(entry[name]) if entry.get(name) else None
            for name in ("fence_closed_at", "fence_opened_at")
        )
        # A split may leave its forward fence and close it again; rows say which way each went.
        back = entry.get("back", index > 0)
        home = seen.at_target if back else seen.at_source
        actual = (opened - closed).total_seconds() if closed and opened else None
        name = f"Closed {home}"
        found.append(PastFence(name, closed, entry["quote"].get("expected"), actual))
    return tuple(found)


def _title(seen: Seen) -> str:
    if seen.fence_goes_back or (seen.both_serve and seen.rollback_waits):
        return f"Fence {seen.at_target}"
    return f"Fence {seen.at_source}" if seen.split or seen.of_cell else "Fence"


# The parts of a fence behind which nothing is copied or compared.
OF_CELL_PARTS = ("drain", "publish")


def _proof(seen: Seen) -> str:
    """Return what a fence is proven by that closes no store."""
    if not seen.of_cell:
        return ""
    move, cell = seen.move, seen.fence_cell
    return (
        f"{move.source_store} is not closed: agents of both cells write it. That {cell} has stopped"
        f" is shown by the word of its instances alone, and of one that is silent by the end of its"
        " lease and its longest turn."
    )


def _fence_open(seen: Seen, quote: Quote, now: datetime) -> FencePanel:
    move = seen.move
    lines = tuple(
        FenceLine(part.name.capitalize(), _whole(part.detail), part.expected, part.worst, None)
        for part in quote.parts
        if not seen.of_cell or part.name in OF_CELL_PARTS
    )
    if quote.worst <= move.budget_seconds:
        status = Status("ready", "Fits its budget")
    elif move.pass_ended_at is None and not seen.of_cell:
        # Whatever is not copied yet counts as changed: no cause for alarm in a first pass.
        status = Status("waiting", "First pass runs")
    else:
        status = Status("warn", "Over its budget")
    scale = max(quote.worst, move.budget_seconds)
    return FencePanel(
        title=_title(seen),
        status=status,
        state="open",
        reading=quote.expected,
        lines=lines,
        expected=quote.expected,
        worst=quote.worst,
        budget=move.budget_seconds,
        slices=_slices([line.expected for line in lines], scale),
        ghost=share_of(quote.worst, scale),
        mark=share_of(move.budget_seconds, scale),
        bar_label=f"{duration(quote.expected)} expected, {duration(quote.worst)} at worst,"
        f" budget {limit(move.budget_seconds)}",
        deadline_at=None,
        deadline_seconds=None,
        held_by="",
        closes=_closes(seen, now),
        loud="",
        back=None,
        past=_past(seen),
        sample=_sample(seen),
        proof=_proof(seen),
    )


def _sample(seen: Seen) -> str:
    """Return the rate of the first sessions copied, by which the first quotes can be checked."""
    speed = Speed.of(seen.move.speed)
    if seen.phase != Phase.BACKFILL or speed.sample_rate is None:
        return ""
    return f"first {speed.sample_sessions:,}, {rate(speed.sample_rate)}"


def _whole(arithmetic: str) -> str:
    """Keep a number and its unit on one line."""
    return arithmetic.replace(" /s", "\u00a0/s").replace("÷ ", "÷\u00a0")


def _closes(seen: Seen, now: datetime) -> str:
    move = seen.move
    if seen.going_back or seen.rollback_waits:
        return f"now, asked for by {move.rollback_requested_by}"
    if seen.split:
        return _closes_split(seen, now)
    if move.drain_requested_at is not None and seen.of_cell:
        return f"as soon as it may, asked for by {move.drain_requested_by}"
    if move.drain_requested_at is not None:
        return f"after the running pass, asked for by {move.drain_requested_by}"
    when = "when it fits its budget" if move.automatic else "when an operator starts the drain"
    if move.fence_not_before is not None and move.fence_not_before > now:
        return f"{when}, not before {clock(move.fence_not_before, now)}"
    return when


def _closes_split(seen: Seen, now: datetime) -> str:
    move = seen.move
    if move.split_at is None or not seen.both_serve:
        return f"in SPLIT, when {move.source_store} has been idle for {limit(move.idle_seconds)}"
    until = move.split_at + timedelta(seconds=move.idle_bound_seconds)
    if until <= now:
        return "as soon as it fits its budget: sessions are waited for no longer"
    return (
        f"when {move.source_store} has been idle for {limit(move.idle_seconds)}, at the latest"
        f" {clock(until, now)}"
    )


def _fence_closed(seen: Seen, quote: Quote | None, now: datetime) -> FencePanel:
    move = seen.move
    closed_at = move.fence_closed_at
    assert closed_at is not None
    times = spans(move)
    parts = move.quote.get("parts", [])
    lines = []
    for key, name in PART_NAMES.items():
        if seen.of_cell and key not in OF_CELL_PARTS:
            continue
        phase = PART_PHASE[key][seen.fence_goes_back]
        mine = [part for part in parts if phase in PART_PHASE.get(part["name"], ())]
        at, left = times.get(phase, (None, None))
        actual = None if at is None else ((left or now) - at).total_seconds()
        lines.append(
            FenceLine(
                name,
                _whole("; ".join(part["detail"] for part in mine)),
                sum(part["expected"] for part in mine),
                sum(part["worst"] for part in mine),
                actual,
                running=at is not None and left is None,
            )
        )
    reading = ((move.fence_opened_at or now) - closed_at).total_seconds()
    expected = float(move.quote.get("expected", 0.0))
    scale = max(reading, expected, move.budget_seconds if seen.fenced else 0.0)
    runs = seen.fenced and seen.phase not in NO_RETURN and not seen.opening_again
    deadline = move.deadline_at if runs else None
    seconds = max(0.0, (deadline - now).total_seconds()) if deadline else None
    if seen.fenced:
        status = Status("fenced", f"Closed since {clock(closed_at, now)}")
    else:
        status = Status("done", f"Opened {clock(move.fence_opened_at, now)}")
    return FencePanel(
        title=_title(seen),
        status=status,
        state="closed" if seen.fenced else "was",
        reading=reading,
        lines=tuple(lines),
        expected=expected,
        worst=float(move.quote.get("worst", 0.0)),
        budget=move.budget_seconds,
        slices=_slices([line.actual or 0.0 for line in lines], scale),
        ghost=None,
        mark=share_of(expected, scale),
        bar_label=f"{elapsed(reading)} of {duration(expected)} expected",
        deadline_at=deadline,
        deadline_seconds=seconds,
        held_by=move.deadline_held_by,
        closes="",
        loud=_loud(seen, seconds, now),
        back=quote if seen.phase == Phase.SOAK and not seen.opening_again else None,
        past=_past(seen),
        proof=_proof(seen),
    )


# A deadline nearer than this is the first thing to read.
NEAR_SECONDS = 30.0


def _loud(seen: Seen, seconds: float | None, now: datetime) -> str:
    """Return what the deadline will do, while a person may still do something about it."""
    if seconds is None or not (seen.waits_for_flip or seconds < NEAR_SECONDS):
        return ""
    at = clock(seen.move.deadline_at, now)
    home = f"reopens {seen.at_opens} by itself at {at}, in {elapsed(seconds)}"
    if seen.waits_for_flip:
        return f"All is equal. Flip it to the target, or it {home}."
    return f"It {home}."


def _slices(seconds: Sequence[float], scale: float) -> tuple[Slice, ...]:
    found, x = [], 0.0
    for part in seconds:
        width = round(100 * part / scale, 2) if scale > 0 else 0.0
        if width > 0:
            found.append(Slice(round(x, 2), width))
        x += width
    return tuple(found)


# --- instances --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Instances:
    """A cell's instances: as far as this move's fence is concerned, or who serves the tenant."""

    cell: Cell
    lines: tuple[InstanceLine, ...]
    note: str
    foot: str
    # None: no fence is closed.
    fence_version: int | None


def instances(seen: Seen, *, now: datetime) -> Instances:
    """Return who has closed the fence and who is missing; otherwise who serves the tenant."""
    move = seen.move
    version = move.fence_version if seen.fenced else None
    if version is not None:
        cell, lines = seen.fence_cell, fence_lines(seen, version, now)
    else:
        cell = seen.home_cell
        lines = tenants_panels.instance_lines(cell, tenant=move.tenant, version=None, now=now)
    alive = [line for line in lines if line.state not in ("lapsed", "gone")]
    in_flight = f"{sum(line.in_flight for line in alive):,} in flight"
    if version is not None:
        acked = sum(line.state in ("closed", "draining") for line in alive)
        note = f"{acked} of {len(alive)} acknowledged, {in_flight}"
    else:
        note = f"{len(alive)} alive, {in_flight}"
    return Instances(cell, tuple(lines), note, _missing(seen, lines, version, now), version)


def _missing(seen: Seen, lines: Sequence[InstanceLine], version: int | None, now: datetime) -> str:
    """Return who keeps the fence from closing, or would, with their last word."""
    said = []
    over = "nothing more can be written from there"
    if seen.of_cell:
        # The store is open to it: what it may do is all that is known.
        over = "it may write nothing more, though the open store would take it"
    if lapsed := [line.name for line in lines if line.state == "lapsed"]:
        said.append(
            f"{', '.join(lapsed)}: lease and longest turn are over; {over}, so the fence does not"
            " wait for it."
        )
    for line in lines:
        if line.state == "missing" and version is not None:
            last = clock(line.reported_at, now)
            said.append(f"{line.name} has not acknowledged; its last word came at {last}.")
    if silent := [line.name for line in lines if line.state == "silent"]:
        said.append(f"{', '.join(silent)} said nothing for a while: a fence would wait.")
    return " ".join(said[:3])
