"""What pages show of moves: rows read once, as frozen values.

Every function takes `now`; a move is read with `seen`, so that all panels of one
answer speak of one moment.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.core.paginator import Page, Paginator
from django.db.models import Count, F, Q, QuerySet, Window
from django.db.models.functions import RowNumber

from migrations_app import ports
from migrations_app.domain.mismatch import WORDS, Looks
from migrations_app.domain.phases import (
    ENDED,
    FENCED,
    STEPPER,
    UNPAUSABLE,
    WAY_OUT,
    Mode,
    Phase,
)
from migrations_app.domain.quote import Quote
from migrations_app.models import Mismatch, MoveEvent, Sample, SessionStamp, TenantMigration
from migrations_app.ports.base import Key, SessionStore
from tenants import queries as tenants_queries
from tenants.domain.words import Status, clock, count, counted, duration, elapsed, limit, rate
from tenants.models import Cell, Store, Tenant
from tenants.queries import Attention, InstanceLine

ENDED_VALUES = sorted(p.value for p in ENDED)
# The rate is measured over the last so many seconds.
RATE_SECONDS = 10
# An abort that nobody asked for is news for a day.
NEWS = timedelta(days=1)
LOG_LINES = 200
MISMATCH_ROWS = 50
CHART_POINTS = 240
PAGE_ROWS = 50
DIFF_LINES = 2_000


# --- one move, as every panel sees it ---------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """A move's row and how many of its mismatches are open, read together."""

    move: TenantMigration
    open_mismatches: int

    @property
    def phase(self) -> Phase:
        return Phase(self.move.phase)

    @property
    def fenced(self) -> bool:
        """Whether new turns of the tenant are refused now."""
        return self.move.fence_closed_at is not None and self.move.fence_opened_at is None

    @property
    def ended(self) -> bool:
        return self.phase in ENDED

    @property
    def aborting(self) -> bool:
        asked = self.move.abort_requested_at is not None
        return self.phase == Phase.REOPEN or (asked and self.phase in _ways_out(self.move))

    @property
    def failed_checks(self) -> list[Mapping[str, Any]]:
        """Red checks of PREPARE; afterwards they are history."""
        if self.phase != Phase.PREPARE:
            return []
        return [check for check in self.move.checks if check["ok"] is False]

    @property
    def ready(self) -> bool:
        """Whether the move only waits for somebody to start the drain."""
        move = self.move
        return (
            self.phase == Phase.BACKFILL
            and not move.automatic
            and move.drain_requested_at is None
            and move.pass_ended_at is not None
        )

    @property
    def owes_confirmation(self) -> bool:
        """Whether OFFBOARD waits, or will wait, for a typed confirmation."""
        move = self.move
        return (
            self.phase == Phase.SOAK
            and not move.offboard_automatically
            and move.offboard_confirmed_at is None
        )

    @property
    def every(self) -> int | None:
        """Seconds between two looks of a page; None: nothing will change any more."""
        if self.ended:
            return None
        return 2 if self.phase == Phase.SOAK else 1

    def soak_over(self, now: datetime) -> bool:
        until = self.move.soak_until
        return self.phase == Phase.SOAK and until is not None and until <= now

    def status(self, now: datetime) -> Status:
        """How worried to be, worst first; the words of the design language."""
        move, phase = self.move, self.phase
        if phase == Phase.DONE:
            return Status("done", "Done")
        if phase == Phase.ABORTED:
            return Status("aborted", "Aborted")
        if self.failed_checks or self.stuck:
            return Status("blocked", "Blocked")
        if self.aborting:
            return Status("aborted", "Aborting")
        if self.open_mismatches and phase in (Phase.BACKFILL, Phase.VERIFY):
            return Status("blocked", "Blocked")
        if move.pause_requested_at and phase not in UNPAUSABLE:
            return Status("paused", "Paused")
        if move.failures:
            return Status("warn", "Retrying")
        if self.fenced or phase in FENCED:
            return Status("fenced", "Fenced")
        if self.ready or self.soak_over(now) or (move.waiting_for and phase in WAITING):
            return Status("waiting", "Waiting")
        if phase == Phase.SOAK:
            return Status("soak", "Soaking")
        return Status("moving", "Deleting" if phase == Phase.OFFBOARD else "Moving")

    @property
    def stuck(self) -> bool:
        """Whether a failing step needs a person: at once while the fence is closed."""
        return self.move.failures >= (1 if self.fenced else 3)


# Phases in which `waiting_for` means that nothing moves.
WAITING = frozenset({Phase.PREPARE, Phase.BACKFILL})


def seen(pk: int) -> Seen | None:
    """Return the move and its open mismatches; None if there is no such move."""
    move = _moves().filter(pk=pk).first()
    if move is None:
        return None
    return Seen(move, move.mismatches.filter(resolved_at=None).count())


def _moves() -> QuerySet[TenantMigration]:
    return TenantMigration.objects.select_related(
        "tenant", "source_cell", "source_store", "target_cell", "target_store"
    )


def _ways_out(move: TenantMigration) -> Mapping[Phase, Phase]:
    return WAY_OUT[Mode(move.mode)]


# --- the head: title, status words, what may be done ----------------------------------------


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
    word = status.word
    if not seen.ended:
        word = f"{word} in {seen.phase.upper()}"
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
        stuck = move.failures > 0 and move.leave_requested_at is None
        why = "" if stuck else "The abort cleans the target by itself."
        yield Action("leave_behind", "Leave copy behind…", stuck, danger=True, why=why)
        return
    if phase in (Phase.SOAK, Phase.OFFBOARD):
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
    if phase in _ways_out(move):
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
        return Action("close_fence", label, False, why=why)
    if move.pass_ended_at is None:
        return Action("close_fence", label, False, why="Start drain opens after the first pass.")
    if seen.open_mismatches:
        why = "Start drain opens when no mismatch is open."
        return Action("close_fence", label, False, why=why)
    return Action("close_fence", label, not seen.aborting)


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


# --- facts and phases -------------------------------------------------------------------------


@dataclass(frozen=True)
class Facts:
    phase: str
    elapsed_seconds: float
    tenant_sees: str
    # None: not surveyed yet.
    sessions: int | None
    users: int | None
    interrupted: int
    changed_at_drain: int | None


def facts(seen: Seen, *, now: datetime) -> Facts:
    """Return the row of labelled values under the title."""
    move, phase = seen.move, seen.phase
    where = phase.upper()
    if phase in STEPPER:
        where = f"{where}, {STEPPER.index(phase) + 1} of {len(STEPPER)}"
    if seen.fenced:
        sees = "Retry-after"
    elif move.placement_version is not None:
        sees = f"Served on {move.target_store}"
    else:
        sees = f"Served on {move.source_store}"
    surveyed = phase != Phase.PREPARE or move.sessions > 0
    return Facts(
        phase=where,
        elapsed_seconds=((move.ended_at or now) - move.started_at).total_seconds(),
        tenant_sees=sees,
        sessions=move.sessions if surveyed else None,
        users=move.users if surveyed else None,
        interrupted=move.interrupted,
        changed_at_drain=move.changed_at_drain,
    )


@dataclass(frozen=True)
class Step:
    """One of the seven on the track. `glyph` is done, live, waiting, soak, paused, blocked…"""

    name: str
    glyph: str
    at: datetime | None
    # What stands below the name: a duration, or what it waits for.
    text: str
    notes: tuple[str, ...]
    current: bool
    fenced: bool
    # Percent of the phase's own work; None: it has no measure.
    bar: float | None
    bar_label: str


@dataclass(frozen=True)
class Track:
    steps: tuple[Step, ...]
    # Beside the title: the fence, the soak, or how it ended.
    status: Status | None


Spans = Mapping[Phase, tuple[datetime, datetime | None]]


def spans(move: TenantMigration) -> Spans:
    """Return when each phase was entered and left; left None: it is the present one."""
    entered: list[tuple[Phase, datetime]] = [(Phase.PREPARE, move.started_at)]
    changes = move.events.exclude(was=F("now")).order_by("id").values_list("now", "at")
    entered += [(Phase(phase), at) for phase, at in changes]
    found: dict[Phase, tuple[datetime, datetime | None]] = {}
    for index, (phase, at) in enumerate(entered):
        left = entered[index + 1][1] if index + 1 < len(entered) else None
        found[phase] = (at, left)
    return found


def track(seen: Seen, *, now: datetime) -> Track:
    """Return the seven phases with their times, and what the present one waits for."""
    move = seen.move
    times = spans(move)
    status = seen.status(now)
    steps = []
    for phase in STEPPER:
        at, left = times.get(phase, (None, None))
        current = phase == seen.phase
        gave_up = left is not None and _left_by_abort(phase, times)
        if current:
            glyph = {"moving": "live", "waiting": "waiting"}.get(status.glyph, status.glyph)
            glyph = "live" if status.glyph == "fenced" else glyph
        elif gave_up:
            glyph = "aborted"
        else:
            glyph = "done" if at is not None else "waiting"
        bar = _share(move.done, move.todo) if current and phase in MEASURED else None
        if current and phase == Phase.SOAK and move.soak_until and at:
            bar = _share((now - at).total_seconds(), (move.soak_until - at).total_seconds())
        steps.append(
            Step(
                name=phase.upper(),
                glyph=glyph,
                at=at,
                text=_step_text(seen, phase, at, left, now),
                notes=tuple(_step_notes(seen, phase, at, left)),
                current=current,
                fenced=seen.fenced and phase in FENCED and at is not None,
                bar=bar,
                bar_label=_bar_label(seen, phase),
            )
        )
    return Track(tuple(steps), _track_status(seen, now))


# Phases whose `done` of `todo` sessions says how far they are.
MEASURED = frozenset({Phase.BACKFILL, Phase.DELTA, Phase.VERIFY})


def _left_by_abort(phase: Phase, times: Spans) -> bool:
    reopened = times.get(Phase.REOPEN)
    return reopened is not None and times[phase][1] == reopened[0]


def _share(part: float, whole: float) -> float | None:
    if whole <= 0:
        return None
    return round(max(0.0, min(100.0, 100 * part / whole)), 2)


def _step_text(
    seen: Seen, phase: Phase, at: datetime | None, left: datetime | None, now: datetime
) -> str:
    move = seen.move
    if at is None:
        return "" if seen.ended or seen.aborting else _ahead(seen, phase)
    if phase == Phase.SOAK and left is None and move.soak_until is not None:
        if seen.soak_over(now):
            return f"over since {clock(move.soak_until, now)}"
        return f"{elapsed((move.soak_until - now).total_seconds())} left of {limit(move.soak_seconds)}"
    if left is None:
        return f"{elapsed((now - at).total_seconds())} so far"
    return duration((left - at).total_seconds())


def _ahead(seen: Seen, phase: Phase) -> str:
    move = seen.move
    if phase == Phase.DRAIN:
        if move.automatic:
            return "when the fence fits its budget"
        return "when an operator starts it"
    if phase == Phase.TARGET:
        return "needs 0 mismatches"
    if phase == Phase.SOAK:
        return f"{limit(move.soak_seconds)}, source closed"
    return ""


def _step_notes(
    seen: Seen, phase: Phase, at: datetime | None, left: datetime | None
) -> Iterable[str]:
    move = seen.move
    if at is None:
        return
    if phase == Phase.PREPARE and move.checks:
        green = sum(check["ok"] is True for check in move.checks)
        yield f"{green} of {len(move.checks)} checks"
    if phase == Phase.BACKFILL:
        if left is None:
            yield f"pass {max(1, move.passes)}, {_done_of(move)}"
        else:
            yield f"{counted(move.sessions, 'session')}, {counted(move.passes, 'pass', 'passes')}"
    if phase == Phase.DRAIN:
        yield f"bound {limit(move.drain_bound_seconds)}"
    if phase == Phase.DELTA and move.changed_at_drain is not None:
        yield f"{count(move.changed_at_drain)} changed"
    if phase in (Phase.DELTA, Phase.VERIFY) and left is None and move.todo:
        yield _done_of(move)


def _done_of(move: TenantMigration) -> str:
    return f"{count(move.done)} of {count(move.todo)}"


def _bar_label(seen: Seen, phase: Phase) -> str:
    if phase == Phase.SOAK:
        return f"Soak, of {limit(seen.move.soak_seconds)}"
    return _done_of(seen.move)


def _track_status(seen: Seen, now: datetime) -> Status | None:
    move = seen.move
    if seen.phase == Phase.ABORTED:
        return Status("aborted", f"Aborted, {move.tenant} stayed on {move.source_store}")
    if seen.phase == Phase.REOPEN:
        return Status("aborted", f"Opening {move.source_store} again")
    if seen.fenced and move.fence_closed_at is not None:
        closed = elapsed((now - move.fence_closed_at).total_seconds())
        expected = move.quote.get("expected")
        of = f" of {duration(expected)} expected" if expected is not None else ""
        return Status("fenced", f"Fence closed {closed}{of}")
    if seen.phase == Phase.SOAK and move.soak_until is not None:
        return Status("soak", f"Source kept closed until {clock(move.soak_until, now)}")
    if seen.phase == Phase.OFFBOARD:
        return Status("live", f"Deleting the copy on {move.source_store}")
    if seen.phase == Phase.DONE:
        return Status("done", f"{move.tenant} lives on {move.target_store}")
    return None


# --- progress ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One line of a sum: a label, and a value that can be checked by eye."""

    label: str
    value: str
    # "differs" marks what a person should look at.
    mark: str = ""


@dataclass(frozen=True)
class Progress:
    title: str
    status: Status
    reading: str
    context: str
    bar: float
    bar_label: str
    # Percent of the bar that differs.
    bad: float
    rows: tuple[Row, ...]
    # What it waits for, or what the last step said; empty while all is well.
    notice: str
    notice_status: Status | None


def progress(seen: Seen, *, now: datetime) -> Progress:
    """Return how far the running phase is, how fast, and when it should be done."""
    move, phase = seen.move, seen.phase
    speed = current_rate(move, now=now)
    status = seen.status(now)
    notice, notice_status = _notice(seen)
    reading, context, share = count(move.done), f"of {count(move.todo)} sessions", None
    if phase == Phase.PREPARE:
        green = sum(check["ok"] is True for check in move.checks)
        reading, context = str(green), f"of {len(move.checks)} checks"
        share = _share(green, len(move.checks))
    elif phase == Phase.SOAK and move.soak_until is not None:
        left = max(0.0, (move.soak_until - now).total_seconds())
        reading, context = elapsed(left), f"left of {limit(move.soak_seconds)}"
        share = _share(move.soak_seconds - left, move.soak_seconds)
    elif phase in ENDED:
        reading, context = count(move.copied), "sessions copied in all"
        share = 100.0 if phase == Phase.DONE else 0.0
    elif move.todo:
        share = _share(move.done, move.todo)
        context = f"{context}, {tenants_percent(move.done, move.todo)}"
    left = _seconds_left(move, speed) if phase in TIMED else None
    if left is not None and status.glyph in ("moving", "fenced"):
        status = Status("live", f"{elapsed(max(1, left))} left")
    share = share or 0.0
    bad = 0.0
    if phase in (Phase.BACKFILL, Phase.VERIFY) and move.todo and seen.open_mismatches:
        bad = min(share, max(0.3, round(100 * seen.open_mismatches / move.todo, 2)))
    return Progress(
        title=_progress_title(seen),
        status=status,
        reading=reading,
        context=context,
        bar=round(share - bad, 2),
        bar_label=f"{reading} {context}",
        bad=bad,
        rows=tuple(_progress_rows(seen, speed, left, now)),
        notice=notice,
        notice_status=notice_status,
    )


# Phases in which the rate of `done` gives a time.
TIMED = frozenset({Phase.BACKFILL, Phase.DELTA, Phase.VERIFY, Phase.OFFBOARD})


def current_rate(move: TenantMigration, *, now: datetime) -> float | None:
    """Return sessions per second over the last ten seconds; None if nothing was measured."""
    since = now - timedelta(seconds=RATE_SECONDS)
    return _rate(
        list(
            move.samples.filter(at__gte=since, phase=move.phase, passes=move.passes)
            .order_by("id")
            .values_list("at", "done")
        )
    )


def _rate(samples: Sequence[tuple[datetime, int]]) -> float | None:
    if len(samples) < 2:
        return None
    (began, first), (ended, last) = samples[0], samples[-1]
    seconds = (ended - began).total_seconds()
    # A sweep that began anew counts from 0 again.
    return (last - first) / seconds if seconds > 0 and last > first else None


def _seconds_left(move: TenantMigration, speed: float | None) -> float | None:
    if not speed or move.done >= move.todo:
        return None
    return (move.todo - move.done) / speed


def tenants_percent(part: int, whole: int) -> str:
    """Return the share done; 100 % only when nothing is left."""
    from tenants.domain.words import percent

    return percent(part, whole)


def _progress_title(seen: Seen) -> str:
    move = seen.move
    return {
        Phase.PREPARE: "Checking both stores",
        Phase.BACKFILL: f"Copying, pass {max(1, move.passes)}",
        Phase.DRAIN: "Waiting for running turns",
        Phase.DELTA: "Copying what changed",
        Phase.VERIFY: "Comparing every session",
        Phase.TARGET: "Publishing the target",
        Phase.SOAK: "Soaking",
        Phase.OFFBOARD: "Deleting the source's copy",
        Phase.DONE: "Done",
        Phase.REOPEN: "Opening the source again",
        Phase.ABORTED: "Aborted",
    }[seen.phase]


def _progress_rows(
    seen: Seen, speed: float | None, left: float | None, now: datetime
) -> Iterable[Row]:
    move, phase = seen.move, seen.phase
    if phase in TIMED:
        yield Row(f"Rate, last {RATE_SECONDS}s", f"{rate(speed)}")
        eta = "–"
        if left is not None:
            eta = f"{clock(now + timedelta(seconds=left), now)}, in {elapsed(max(1, left))}"
        yield Row("ETA at this rate", eta)
    if phase == Phase.BACKFILL:
        pace = rate(move.pace_per_second) if move.pace_per_second else "none"
        yield Row("Pace limit", pace)
        yield Row("Changed, found by this pass", count(move.changed))
        last = count(move.changed_last) if move.pass_ended_at else "–"
        yield Row("Changed, last whole pass", last)
    if phase not in (Phase.PREPARE, Phase.SOAK):
        yield Row("Copied in all", count(move.copied))
        yield Row("Compared in all", count(move.compared))
    if phase not in (Phase.PREPARE, Phase.OFFBOARD, Phase.DONE, Phase.ABORTED):
        mark = "differs" if seen.open_mismatches else ""
        yield Row("Differ", count(seen.open_mismatches), mark)
    if move.deleted:
        yield Row("Deleted at the source meanwhile", count(move.deleted))
    if move.interrupted:
        yield Row("End in an interrupted turn, copied as they are", count(move.interrupted))
    if phase == Phase.SOAK and move.soak_until is not None:
        yield Row("Soak ends", clock(move.soak_until, now))
        yield Row("Then", "source is deleted" if not seen.owes_confirmation else "waits for you")
    if move.left_behind:
        yield Row("Left at the source, changed since", count(move.left_behind), "differs")


def _notice(seen: Seen) -> tuple[str, Status | None]:
    move = seen.move
    if seen.ended:
        text = move.abort_reason if seen.phase == Phase.ABORTED else ""
        return text, Status("aborted", "Why") if text else None
    if seen.failed_checks:
        first = seen.failed_checks[0]
        return f"{first['name']}: {first['detail']}", Status("blocked", "Not ready")
    if move.failure:
        status = Status("blocked", "Failing") if seen.stuck else Status("warn", "Retrying")
        return move.failure, status
    if move.pause_requested_at and seen.phase not in UNPAUSABLE:
        text = f"by {move.pause_requested_by}: {move.pause_reason}"
        return text, Status("paused", "Paused")
    if seen.ready:
        return "Start the drain when you are ready; passes go on meanwhile.", Status(
            "waiting", "Waiting for you"
        )
    if move.older_writers and move.waiting_for:
        return move.waiting_for, Status("warn", "Waiting")
    if move.waiting_for:
        return move.waiting_for, Status("waiting", "Waiting")
    if seen.soak_over(seen.move.soak_until or seen.move.started_at) and seen.owes_confirmation:
        return "", None
    return "", None


# --- the fence --------------------------------------------------------------------------------


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
class FencePanel:
    status: Status
    # open, closed, or was (it has been closed and is open again).
    state: str
    reading: float | None
    lines: tuple[FenceLine, ...]
    expected: float
    worst: float
    budget: float
    slices: tuple[Slice, ...]
    # Percent of the bar's width where the budget, or what was expected, ends.
    mark: float | None
    # NULL: no deadline runs.
    deadline_at: datetime | None
    deadline_seconds: float | None
    held_by: str
    closes: str

    @property
    def fits(self) -> bool:
        return self.worst <= self.budget


PART_NAMES = {"drain": "Drain", "delta": "Delta", "verify": "Verify", "publish": "Publish"}
# Which phase a part of the quote is spent in.
PART_PHASE = {
    "drain": Phase.DRAIN,
    "scan": Phase.DELTA,
    "delta": Phase.DELTA,
    "shared": Phase.DELTA,
    "verify": Phase.VERIFY,
    "publish": Phase.TARGET,
}


def fence(seen: Seen, quote: Quote | None, *, now: datetime) -> FencePanel | None:
    """Return the quote before the fence closes, and beside the actual from then on.

    None: there is nothing to show, for it never closed and never will.
    """
    move = seen.move
    if move.fence_closed_at is None:
        if quote is None:
            return None
        return _fence_open(seen, quote, now)
    return _fence_closed(seen, now)


def _fence_open(seen: Seen, quote: Quote, now: datetime) -> FencePanel:
    move = seen.move
    lines = tuple(
        FenceLine(part.name.capitalize(), part.detail, part.expected, part.worst, None)
        for part in quote.parts
    )
    fits = quote.worst <= move.budget_seconds
    status = Status("ready", "Fits its budget") if fits else Status("warn", "Over its budget")
    scale = max(quote.worst, move.budget_seconds)
    return FencePanel(
        status=status,
        state="open",
        reading=quote.expected,
        lines=lines,
        expected=quote.expected,
        worst=quote.worst,
        budget=move.budget_seconds,
        slices=_slices([line.expected for line in lines], scale),
        mark=_share(move.budget_seconds, scale),
        deadline_at=None,
        deadline_seconds=None,
        held_by="",
        closes=_closes(seen, now),
    )


def _closes(seen: Seen, now: datetime) -> str:
    move = seen.move
    if move.drain_requested_at is not None:
        return f"after the running pass, asked for by {move.drain_requested_by}"
    when = "when it fits its budget" if move.automatic else "when an operator starts the drain"
    if move.fence_not_before is not None and move.fence_not_before > now:
        return f"{when}, not before {clock(move.fence_not_before, now)}"
    return when


def _fence_closed(seen: Seen, now: datetime) -> FencePanel:
    move = seen.move
    closed_at = move.fence_closed_at
    assert closed_at is not None
    times = spans(move)
    parts = move.quote.get("parts", [])
    lines = []
    for key, name in PART_NAMES.items():
        phase = PART_PHASE[key]
        mine = [part for part in parts if PART_PHASE.get(part["name"]) == phase]
        at, left = times.get(phase, (None, None))
        actual = None if at is None else ((left or now) - at).total_seconds()
        lines.append(
            FenceLine(
                name,
                "; ".join(part["detail"] for part in mine),
                sum(part["expected"] for part in mine),
                sum(part["worst"] for part in mine),
                actual,
                running=at is not None and left is None,
            )
        )
    reading = ((move.fence_opened_at or now) - closed_at).total_seconds()
    expected = float(move.quote.get("expected", 0.0))
    scale = max(reading, expected, move.budget_seconds if seen.fenced else 0.0)
    deadline = move.deadline_at if seen.fenced and seen.phase != Phase.TARGET else None
    left = max(0.0, (deadline - now).total_seconds()) if deadline else None
    if seen.fenced:
        status = Status("fenced", f"Closed since {clock(closed_at, now)}")
    else:
        status = Status("done", f"Opened {clock(move.fence_opened_at, now)}")
    return FencePanel(
        status=status,
        state="closed" if seen.fenced else "was",
        reading=reading,
        lines=tuple(lines),
        expected=expected,
        worst=float(move.quote.get("worst", 0.0)),
        budget=move.budget_seconds,
        slices=_slices([line.actual or 0.0 for line in lines], scale),
        mark=_share(expected, scale),
        deadline_at=deadline,
        deadline_seconds=left,
        held_by=move.deadline_held_by,
        closes="",
    )


def _slices(seconds: Sequence[float], scale: float) -> tuple[Slice, ...]:
    found, x = [], 0.0
    for part in seconds:
        width = round(100 * part / scale, 2) if scale > 0 else 0.0
        if width > 0:
            found.append(Slice(round(x, 2), width))
        x += width
    return tuple(found)


# --- instances, checks, mismatches, log ------------------------------------------------------


@dataclass(frozen=True)
class Instances:
    """The source cell's instances, as far as this move's fence is concerned."""

    cell: Cell
    lines: tuple[InstanceLine, ...]
    note: str
    foot: str
    fence_version: int | None


def instances(seen: Seen, *, now: datetime) -> Instances:
    """Return who has closed the fence and who is missing; before it, who would be waited for."""
    move = seen.move
    cell = move.source_cell
    version = move.fence_version if seen.fenced else None
    lines = tenants_queries.instance_lines(cell, tenant=move.tenant, version=version, now=now)
    counted_ones = [line for line in lines if line.state not in ("lapsed", "gone")]
    flying = sum(line.in_flight for line in counted_ones)
    in_flight = f"{flying:,} in flight"
    if version is not None:
        acked = sum(line.state in ("closed", "draining") for line in counted_ones)
        note = f"{acked} of {len(counted_ones)} acknowledged, {in_flight}"
    else:
        note = f"{len(counted_ones)} alive, {in_flight}"
    return Instances(cell, tuple(lines), note, _missing(lines, version, now), version)


def _missing(lines: Sequence[InstanceLine], version: int | None, now: datetime) -> str:
    said = []
    for line in lines:
        last = clock(line.reported_at, now)
        if line.state == "lapsed":
            said.append(
                f"{line.name}: lease and longest turn are over; it can't write, so it is not"
                " waited for."
            )
        elif line.state == "missing" and version is not None:
            said.append(f"{line.name} has not acknowledged; its last word came at {last}.")
        elif line.state == "silent":
            said.append(f"{line.name} is silent since {last}: a fence would wait for it.")
    return " ".join(said[:3])


@dataclass(frozen=True)
class Checks:
    lines: tuple[tuple[Status, str, str], ...]
    findings: tuple[Mapping[str, Any], ...]
    green: int
    red: int


def checks(seen: Seen) -> Checks:
    """Return PREPARE's checks in their order, each with its state and reason."""
    lines = []
    for check in seen.move.checks:
        if check["ok"] is None:
            status = Status("waiting", "Waiting")
        else:
            status = Status("ok", "Green") if check["ok"] else Status("blocked", "Red")
        lines.append((status, str(check["name"]), str(check["detail"])))
    return Checks(
        tuple(lines),
        tuple(seen.move.findings),
        green=sum(check["ok"] is True for check in seen.move.checks),
        red=sum(check["ok"] is False for check in seen.move.checks),
    )


@dataclass(frozen=True)
class MismatchLine:
    row: Mismatch
    what: str
    looks: str
    repairing: bool


@dataclass(frozen=True)
class Mismatches:
    lines: tuple[MismatchLine, ...]
    open: int
    resolved: int
    # Ids that one click asks to be repaired.
    repairable: tuple[int, ...]
    can_repair: bool

    @property
    def hidden(self) -> int:
        return self.open - len(self.lines)


PARTS = {
    "events": "events",
    "state": "state",
    "user": "user state",
    "app": "app state",
    "missing": "missing",
    "extra": "extra",
}


def mismatches(seen: Seen) -> Mismatches:
    """Return the open mismatches, oldest first, so that rows keep their place."""
    rows = list(seen.move.mismatches.filter(resolved_at=None)[:MISMATCH_ROWS])
    known = {looks.value for looks in Looks}
    lines = tuple(
        MismatchLine(
            row,
            PARTS.get(row.part, row.part),
            WORDS[Looks(row.looks_like)] if row.looks_like in known else "",
            row.repair_requested_at is not None,
        )
        for row in rows
    )
    can_repair = seen.phase in (Phase.BACKFILL, Phase.VERIFY) and not seen.aborting
    return Mismatches(
        lines,
        seen.open_mismatches,
        seen.move.mismatches.exclude(resolved_at=None).count(),
        tuple(line.row.pk for line in lines if not line.repairing) if can_repair else (),
        can_repair,
    )


@dataclass(frozen=True)
class Log:
    lines: tuple[MoveEvent, ...]
    total: int


def log(seen: Seen) -> Log:
    """Return the newest lines of the move's log, newest first."""
    events = seen.move.events.all()
    lines = tuple(events[:LOG_LINES])
    total = len(lines) if len(lines) < LOG_LINES else events.count()
    return Log(lines, total)


# --- samples: the chart and its table ----------------------------------------------------------


def samples(move: TenantMigration, *, points: int = CHART_POINTS) -> list[Sample]:
    """Return at most about `points` samples, evenly thinned, the newest among them."""
    total = move.samples.count()
    step = max(1, -(-total // points))
    if step == 1:
        return list(move.samples.order_by("id"))
    numbered = move.samples.annotate(number=Window(RowNumber(), order_by=F("id").asc()))
    thinned = list(
        numbered.annotate(rest=F("number") % step).filter(Q(rest=0) | Q(number=total)).order_by("id")
    )
    return thinned


def changed_in_words(seen: Seen) -> str:
    """Return the chart's reading as a sentence."""
    move = seen.move
    if move.changed_at_drain is not None:
        drained = f"{count(move.changed_at_drain)} sessions had changed when the fence closed"
        return f"{drained}, after {counted(move.passes, 'pass', 'passes')}."
    if move.pass_ended_at is not None:
        return (
            f"The last whole pass found {count(move.changed_last)} of"
            f" {counted(move.sessions, 'session')} changed."
        )
    if move.passes:
        return f"The first pass has copied {count(move.copied)} sessions so far."
    return "Drawn from the first copied session on."


# --- lists --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MoveLine:
    """One row of a list of moves."""

    move: TenantMigration
    status: Status
    # Seven glyphs: "on", the status's own, or "".
    mini: tuple[str, ...]
    progress: str
    rate: str
    eta: str
    fence: str
    estimated: str


def live_moves(*, now: datetime) -> list[MoveLine]:
    """Return every move that has not ended, worst first; equals keep the order of their start."""
    moves = list(_moves().exclude(phase__in=ENDED_VALUES).order_by("id"))
    lines = _lines(moves, now=now)
    return sorted(lines, key=lambda line: (GRAVITY.get(line.status.glyph, 9), line.move.pk))


# Worst first: the order of a list, and of what needs attention.
GRAVITY = {
    "blocked": 0,
    "lost": 1,
    "aborted": 2,
    "warn": 3,
    "fenced": 4,
    "paused": 5,
    "waiting": 6,
    "moving": 7,
    "soak": 8,
    "done": 9,
}


def _lines(moves: Sequence[TenantMigration], *, now: datetime) -> list[MoveLine]:
    open_ones = dict(
        Mismatch.objects.filter(move__in=moves, resolved_at=None)
        .values_list("move_id")
        .annotate(open=Count("id"))
    )
    speeds = _rates(moves, now)
    return [
        _line(Seen(move, open_ones.get(move.pk, 0)), speeds.get(move.pk), now) for move in moves
    ]


def _rates(moves: Sequence[TenantMigration], now: datetime) -> dict[int, float | None]:
    since = now - timedelta(seconds=RATE_SECONDS)
    live = {move.pk: move for move in moves if move.phase not in ENDED}
    found: dict[int, list[tuple[datetime, int]]] = {}
    rows = Sample.objects.filter(move__in=live, at__gte=since).order_by("id")
    for pk, at, done, phase, passes in rows.values_list("move_id", "at", "done", "phase", "passes"):
        if (phase, passes) == (live[pk].phase, live[pk].passes):
            found.setdefault(pk, []).append((at, done))
    return {pk: _rate(samples) for pk, samples in found.items()}


def _line(seen: Seen, speed: float | None, now: datetime) -> MoveLine:
    move, phase = seen.move, seen.phase
    status = seen.status(now)
    left = _seconds_left(move, speed) if phase in TIMED else None
    progress = _done_of(move) if phase in TIMED and move.todo else "–"
    eta = "–"
    if phase == Phase.SOAK and move.soak_until is not None:
        remaining = max(0.0, (move.soak_until - now).total_seconds())
        eta = elapsed(remaining) if remaining else "over"
        progress = f"{limit_hours(move.soak_seconds - remaining)} of {limit(move.soak_seconds)}"
    elif phase == Phase.PREPARE and move.checks:
        green = sum(check["ok"] is True for check in move.checks)
        progress = f"{green} of {len(move.checks)} checks"
    elif left is not None:
        eta = elapsed(max(1, left))
    fence_now = "open"
    if move.fence_closed_at is not None:
        spent = ((move.fence_opened_at or now) - move.fence_closed_at).total_seconds()
        fence_now = elapsed(spent) if seen.fenced else f"was {duration(spent)}"
    expected = move.quote.get("expected")
    return MoveLine(
        move=move,
        status=status,
        mini=_mini(seen, status),
        progress=progress,
        rate=rate(speed) if phase in TIMED else "–",
        eta=eta,
        fence=fence_now,
        estimated=duration(expected) if expected is not None else "–",
    )


def limit_hours(seconds: float) -> str:
    """Return how much of a soak is over, in its largest units."""
    seconds = max(0.0, seconds)
    return f"{int(seconds // 3600)}h" if seconds >= 3600 else elapsed(seconds)


def _mini(seen: Seen, status: Status) -> tuple[str, ...]:
    if seen.phase in STEPPER:
        at = STEPPER.index(seen.phase)
        return ("on",) * at + (status.glyph,) + ("",) * (len(STEPPER) - at - 1)
    if seen.phase in (Phase.REOPEN, Phase.ABORTED):
        return ("",) * len(STEPPER)
    return ("on",) * len(STEPPER)


@dataclass(frozen=True)
class MovesFilter:
    """What a list of moves is narrowed to. `state`: live, ended, or all."""

    state: str = "live"
    text: str = ""
    page: int = 1


@dataclass(frozen=True)
class MovesPage:
    lines: tuple[MoveLine, ...]
    page: Page[TenantMigration]
    filter: MovesFilter


def moves_page(wanted: MovesFilter, *, now: datetime) -> MovesPage:
    """Return one page of moves: live ones in the order of their start, ended ones newest first."""
    rows = _moves()
    if wanted.state == "live":
        rows = rows.exclude(phase__in=ENDED_VALUES).order_by("id")
    elif wanted.state == "ended":
        rows = rows.filter(phase__in=ENDED_VALUES).order_by("-id")
    else:
        rows = rows.order_by("-id")
    if wanted.text:
        narrowed = (
            Q(tenant__slug__icontains=wanted.text)
            | Q(source_store__key__icontains=wanted.text)
            | Q(target_store__key__icontains=wanted.text)
            | Q(source_cell__slug__icontains=wanted.text)
            | Q(target_cell__slug__icontains=wanted.text)
        )
        number = wanted.text.removeprefix("mv-")
        if number.isdecimal() and len(number) < 18:
            narrowed |= Q(pk=int(number))
        rows = rows.filter(narrowed)
    page = Paginator(rows, PAGE_ROWS).get_page(wanted.page)
    return MovesPage(tuple(_lines(list(page.object_list), now=now)), page, wanted)


def moves_of(tenant: Tenant, *, now: datetime) -> list[MoveLine]:
    """Return the tenant's last twenty moves, newest first."""
    return _lines(list(_moves().filter(tenant=tenant).order_by("-id")[:20]), now=now)


def live_move_of(tenants: Iterable[Tenant]) -> dict[int, TenantMigration]:
    """Return the live move of each of these tenants that has one, by tenant id."""
    rows = TenantMigration.objects.filter(tenant__in=list(tenants)).exclude(phase__in=ENDED_VALUES)
    return {move.tenant_id: move for move in rows}


# --- the overview ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class MoveSignals:
    blocked: int = 0
    aborted: int = 0
    fenced: int = 0
    paused: int = 0
    waiting: int = 0
    moving: int = 0
    soaking: int = 0


def signals(*, now: datetime) -> MoveSignals:
    """Count the live moves by what an operator would call them. A fenced one may be blocked too."""
    found = dict.fromkeys(("blocked", "aborted", "fenced", "paused", "waiting", "moving"), 0)
    soaking = 0
    for seen in _all_live():
        glyph = seen.status(now).glyph
        if glyph == "soak":
            soaking += 1
            continue
        if glyph == "warn":
            glyph = "moving"
        found[glyph] = found.get(glyph, 0) + 1
        if seen.fenced and glyph != "fenced":
            found["fenced"] += 1
    found["aborted"] += len(_aborted_by_themselves(now))
    return MoveSignals(soaking=soaking, **found)


def _all_live() -> list[Seen]:
    moves = list(_moves().exclude(phase__in=ENDED_VALUES).order_by("id"))
    open_ones = dict(
        Mismatch.objects.filter(move__in=moves, resolved_at=None)
        .values_list("move_id")
        .annotate(open=Count("id"))
    )
    return [Seen(move, open_ones.get(move.pk, 0)) for move in moves]


def _aborted_by_themselves(now: datetime) -> list[TenantMigration]:
    """Return moves that gave up in the last day, unless their tenant moved again since."""
    rows = list(
        _moves()
        .filter(phase=Phase.ABORTED, ended_at__gte=now - NEWS, abort_requested_at=None)
        .order_by("-id")
    )
    newer = set(
        TenantMigration.objects.filter(tenant__in=[row.tenant_id for row in rows])
        .values_list("tenant_id")
        .annotate(newest=Count("id"))
        .values_list("tenant_id", flat=True)
    )
    newest = {
        tenant: pk
        for tenant, pk in TenantMigration.objects.filter(tenant__in=newer)
        .order_by("id")
        .values_list("tenant_id", "id")
    }
    return [row for row in rows if newest[row.tenant_id] == row.pk]


def attention(*, now: datetime) -> list[Attention]:
    """Return what a person should look at among the moves; the caller sorts it with the rest."""
    items = [item for seen in _all_live() if (item := _attention(seen, now))]
    items += [_gave_up(move, now) for move in _aborted_by_themselves(now)]
    return items


def _attention(seen: Seen, now: datetime) -> Attention | None:
    move, phase = seen.move, seen.phase
    status = seen.status(now)
    name = f"{move} {move.tenant}"
    since = move.phase_since
    review = 0
    if status.glyph == "blocked":
        if seen.failed_checks:
            first = seen.failed_checks[0]
            title = f"{name} can't begin: {counted(len(seen.failed_checks), 'check')} red"
            text = f"{first['name']}: {first['detail']}"
        elif seen.stuck:
            title = f"{name} fails in {phase.upper()}, {counted(move.failures, 'time')} in a row"
            text = move.failure
        else:
            review = seen.open_mismatches
            title = f"{name} cannot switch to its target"
            text = f"{counted(review, 'session differs', 'sessions differ')}."
    elif status.glyph == "aborted":
        title = f"{name} is on its way out"
        by = move.abort_requested_by
        text = f"Asked for by {by}: {move.abort_reason}" if by else "It gave up by itself."
    elif status.glyph == "fenced":
        title = f"{name} has its fence closed, in {phase.upper()}"
        text = ""
    elif status.glyph == "paused":
        title = f"{name} is paused in {phase.upper()}"
        text = f"By {move.pause_requested_by}: {move.pause_reason}"
        since = move.pause_requested_at or since
    elif status.glyph == "warn":
        title = f"{name} tries a failed step again in {phase.upper()}"
        text = move.failure
    elif seen.ready:
        title = f"{name} waits for you to start the drain"
        text = (
            f"{counted(move.sessions, 'session')} copied; the last pass found"
            f" {count(move.changed_last)} changed."
        )
        since = move.pass_ended_at or since
    elif seen.soak_over(now) and seen.owes_confirmation:
        title = f"{name} waits for the typed confirmation to delete its source"
        text = f"The copy on {move.source_store} stays closed and whole until then."
        since = move.soak_until or since
    elif status.glyph == "waiting" and move.waiting_for:
        title = f"{name} waits in {phase.upper()}"
        text = move.waiting_for
    else:
        return None
    if seen.fenced and move.fence_closed_at is not None:
        text = f"{text} {_fence_sentence(move, now)}".strip()
    return Attention(
        rank=GRAVITY[status.glyph],
        status=Status(status.glyph, status.word),
        title=title,
        text=text,
        since=since,
        kind="move",
        key=str(move.pk),
        label=str(move),
        abortable=phase in _ways_out(move) and move.abort_requested_at is None,
        review=review,
    )


def _fence_sentence(move: TenantMigration, now: datetime) -> str:
    assert move.fence_closed_at is not None
    closed = elapsed((now - move.fence_closed_at).total_seconds())
    users = f"all {counted(move.users, 'user')} get" if move.users else "new turns get"
    text = f"Fence closed {closed}; {users} retry-after."
    if move.deadline_at is not None and move.phase != Phase.TARGET:
        left = elapsed(max(0.0, (move.deadline_at - now).total_seconds()))
        text = f"{text} It reopens by itself in {left}."
    return text


def _gave_up(move: TenantMigration, now: datetime) -> Attention:
    last = move.events.filter(now=Phase.REOPEN).exclude(was=Phase.REOPEN).first()
    return Attention(
        rank=GRAVITY["aborted"],
        status=Status("aborted", "Aborted"),
        title=f"{move} {move.tenant} aborted by itself",
        text=(last.note if last and last.note else f"It was reopened on {move.source_store}."),
        since=move.ended_at or move.phase_since,
        kind="move",
        key=str(move.pk),
        label=str(move),
    )


@dataclass(frozen=True)
class Upcoming:
    at: datetime
    move: TenantMigration
    text: str


def next_up(*, now: datetime) -> list[Upcoming]:
    """Return what will happen by itself, soonest first: fences that may close, soaks that end."""
    items = []
    rows = _moves().exclude(phase__in=ENDED_VALUES)
    for move in rows.filter(fence_closed_at=None, fence_not_before__gt=now):
        items.append(Upcoming(move.fence_not_before or now, move, "may close its fence"))
    for move in rows.filter(phase=Phase.SOAK, soak_until__gt=now):
        if move.offboard_automatically or move.offboard_confirmed_at is not None:
            text = f"soak ends; its copy on {move.source_store} is deleted"
        else:
            text = "soak ends; deleting waits for a typed confirmation"
        items.append(Upcoming(move.soak_until or now, move, text))
    return sorted(items, key=lambda item: item.at)[:8]


# --- dialogs ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Consequences:
    """What an act would do, from the rows as they are now."""

    sessions: int
    users: int
    written: int
    instances: int
    quote: Quote | None
    lines: tuple[tuple[str, str], ...] = field(default=())


def written(move: TenantMigration) -> int:
    """Return how many sessions on the target an abort would remove."""
    return SessionStamp.objects.filter(move=move).count()


# --- one mismatch, both sides ----------------------------------------------------------------------


@dataclass(frozen=True)
class Diff:
    """Both sides as JSON, line by line: each ("same" | "source" | "target" | "gap", text)."""

    lines: tuple[tuple[str, str], ...]
    cut: bool
    source: bool
    target: bool


def diff(move: TenantMigration, mismatch: Mismatch) -> Diff:
    """Read both sides of a mismatch and lay them beside each other.

    Raises StoreRefused where a store can't be read. Values may be secrets: only operators see them.
    """
    with (
        _open(move.source_store, move) as source,
        _open(move.target_store, move) as target,
    ):
        ours, theirs = (_side(port, mismatch) for port in (source, target))
    left, right = (
        [] if side is None else json.dumps(side, indent=1, sort_keys=True, default=str).splitlines()
        for side in (ours, theirs)
    )
    lines: list[tuple[str, str]] = []
    for line in list(difflib.unified_diff(left, right, lineterm="", n=3))[2:]:
        kind = {"-": "source", "+": "target", "@": "gap"}.get(line[:1], "same")
        lines.append((kind, line if kind == "gap" else line[1:]))
    return Diff(tuple(lines[:DIFF_LINES]), len(lines) > DIFF_LINES, ours is not None, theirs is not None)


def _open(store: Store, move: TenantMigration) -> Any:
    return ports.open_store(store.kind, store.address_from, app_name=move.tenant.app_name)


def _side(port: SessionStore, mismatch: Mismatch) -> Mapping[str, Any] | None:
    if mismatch.part in ("user", "app"):
        user = mismatch.user_id if mismatch.part == "user" else None
        row = port.shared([user]).get(user)
        return None if row is None else json.loads(row.state)
    return port.session(Key(mismatch.user_id, mismatch.session_id))
