"""What the panels of pages show of moves: frozen values, computed from rows read at one moment.

A move is read with `seen`, so that all panels of one answer speak of one moment. What a
worker asks is in `queries.py`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.core.paginator import Page, Paginator
from django.db.models import Count, Exists, F, OuterRef, Q, QuerySet, Window
from django.db.models.functions import RowNumber

from migrations_app import ports, queries
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
from tenants import panels as tenants_panels
from tenants.domain.words import (
    THIN,
    Status,
    clock,
    count,
    counted,
    duration,
    elapsed,
    limit,
    percent,
    rate,
)
from tenants.models import Cell, Placement, Store, Tenant
from tenants.panels import Attention, InstanceLine

ENDED_VALUES = sorted(p.value for p in ENDED)
# The rate is measured over the last so many seconds.
RATE_SECONDS = 10
# An abort that nobody asked for is news for a day.
NEWS = timedelta(days=1)
LOG_LINES = 200
MISMATCH_ROWS = 50
CHART_POINTS = 240
SAMPLE_ROWS = 12
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

    @property
    def every_chart(self) -> int | None:
        """Seconds between two looks at the chart's table."""
        return None if self.ended else 5

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
        """Whether a failing step needs a person: sooner while the fence is closed."""
        return self.move.failures >= (2 if self.fenced else 3)


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
    seen: Seen, phase: Phase, at: datetime | None, ended: datetime | None, now: datetime
) -> str:
    move = seen.move
    if at is None:
        return "" if seen.ended or seen.aborting else _ahead(seen, phase)
    if phase == Phase.SOAK and ended is None and move.soak_until is not None:
        if seen.soak_over(now):
            return f"over since {clock(move.soak_until, now)}"
        return (
            f"{elapsed((move.soak_until - now).total_seconds())} left of {limit(move.soak_seconds)}"
        )
    if ended is None:
        return f"{elapsed((now - at).total_seconds())} so far"
    return duration((ended - at).total_seconds())


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
    # Later sweeps of a phase go on counting: what is shown is sessions.
    return f"{count(min(move.done, move.todo))} of {count(move.todo)}"


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
    bar_glyph: str
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
    left = seconds_left(seen, speed)
    status = seen.status(now)
    if left is not None and status.glyph in ("moving", "fenced"):
        status = Status("live", f"{elapsed(max(1, left))} left")
    reading, context, share = _measure(seen, now)
    bad = 0.0
    if phase in (Phase.BACKFILL, Phase.VERIFY) and move.todo and seen.open_mismatches:
        bad = min(share, max(0.4, round(100 * seen.open_mismatches / move.todo, 2)))
    notice, notice_status = _notice(seen)
    return Progress(
        title=_progress_title(seen),
        status=status,
        reading=reading,
        context=context,
        bar=round(share - bad, 2),
        bar_label=f"{reading} {context}",
        bar_glyph=BAR_GLYPHS.get(seen.status(now).glyph, "live"),
        bad=bad,
        rows=tuple(_progress_rows(seen, speed, left, now)),
        notice=notice,
        notice_status=notice_status,
    )


# What a bar is toned by, where the move is not simply going on.
BAR_GLYPHS = {"paused": "paused", "soak": "soak", "waiting": "done", "done": "done"}


def _measure(seen: Seen, now: datetime) -> tuple[str, str, float]:
    """Return a reading, what it is of, and the bar's percent; never all of it with work left."""
    move, phase = seen.move, seen.phase
    if phase == Phase.PREPARE:
        green = sum(check["ok"] is True for check in move.checks)
        share = _share(green, len(move.checks)) or 0.0
        return str(green), f"of {counted(len(move.checks), 'check')} green", share
    if phase == Phase.SOAK and move.soak_until is not None:
        left = max(0.0, (move.soak_until - now).total_seconds())
        share = _share(move.soak_seconds - left, move.soak_seconds) or 100.0
        return elapsed(left), f"left of {limit(move.soak_seconds)}", share
    if phase == Phase.DRAIN and move.fence_closed_at is not None:
        waited = (now - move.fence_closed_at).total_seconds()
        share = _share(waited, move.drain_bound_seconds) or 0.0
        return elapsed(waited), f"of at most {limit(move.drain_bound_seconds)}", share
    if phase == Phase.DONE:
        return count(move.sessions), "sessions moved", 100.0
    if phase in (Phase.REOPEN, Phase.ABORTED):
        return count(move.copied), "sessions had been copied", 0.0
    if not move.todo:
        return count(move.copied), "sessions copied so far", 0.0
    done = min(move.done, move.todo)
    context = f"of {count(move.todo)} sessions"
    if done < move.todo:
        return count(done), f"{context}, {percent(done, move.todo)}", _share(done, move.todo) or 0.0
    if move.stage == "ready":
        return count(done), f"{context}, pass {move.passes} is whole", 100.0
    # Every session has been passed, and the phase has more to do: that is not 100 %.
    return count(done), f"{context}, 99{THIN}%", 99.0


# Phases in which the rate of `done` gives a time, and the stages in which `done` counts sessions.
TIMED = frozenset({Phase.BACKFILL, Phase.DELTA, Phase.VERIFY, Phase.OFFBOARD})
SESSION_STAGES = frozenset({"", "copy", "sessions"})


def current_rate(move: TenantMigration, *, now: datetime) -> float | None:
    """Return sessions per second: of the last ten seconds, or of a phase that is not sampled.

    None where nothing was measured.
    """
    if move.phase == Phase.BACKFILL:
        since = now - timedelta(seconds=RATE_SECONDS)
        recent = move.samples.filter(at__gte=since, phase=move.phase, passes=move.passes)
        return _rate(list(recent.order_by("id").values_list("at", "done")))
    return _rate_of_phase(move, now)


def _rate_of_phase(move: TenantMigration, now: datetime) -> float | None:
    seconds = (now - move.phase_since).total_seconds()
    if move.phase not in TIMED or move.phase == Phase.BACKFILL or seconds <= 0 or not move.done:
        return None
    return min(move.done, move.todo) / seconds


def _rate(samples: Sequence[tuple[datetime, int]]) -> float | None:
    if len(samples) < 2:
        return None
    (began, first), (ended, last) = samples[0], samples[-1]
    seconds = (ended - began).total_seconds()
    # A sweep that began anew counts from 0 again.
    return (last - first) / seconds if seconds > 0 and last > first else None


def seconds_left(seen: Seen, speed: float | None) -> float | None:
    """Return how long the running sweep takes at this rate; None if nobody can say."""
    move = seen.move
    if seen.phase not in TIMED or move.stage not in SESSION_STAGES:
        return None
    if not speed or move.done >= move.todo:
        return None
    return (move.todo - move.done) / speed


STAGE_TITLES = {
    (Phase.BACKFILL, "gone"): "Looking for deleted sessions",
    (Phase.BACKFILL, "shared"): "Copying shared state",
    (Phase.BACKFILL, "ready"): "Copied, between passes",
    (Phase.DELTA, "gone"): "Looking for deleted sessions",
    (Phase.DELTA, "shared"): "Copying shared state",
    (Phase.VERIFY, "shared"): "Comparing shared state",
    (Phase.VERIFY, "end"): "Comparing counts and the mark",
}
PHASE_TITLES = {
    Phase.PREPARE: "Checking both stores",
    Phase.DRAIN: "Waiting for running turns",
    Phase.DELTA: "Copying what changed",
    Phase.VERIFY: "Comparing every session",
    Phase.TARGET: "Publishing the target",
    Phase.SOAK: "Soaking",
    Phase.OFFBOARD: "Deleting the source's copy",
    Phase.DONE: "Done",
    Phase.REOPEN: "Opening the source again",
    Phase.ABORTED: "Aborted",
}


def _progress_title(seen: Seen) -> str:
    if title := STAGE_TITLES.get((seen.phase, seen.move.stage)):
        return title
    if seen.phase == Phase.BACKFILL:
        return f"Copying, pass {max(1, seen.move.passes)}"
    return PHASE_TITLES[seen.phase]


def _progress_rows(
    seen: Seen, speed: float | None, left: float | None, now: datetime
) -> Iterable[Row]:
    move, phase = seen.move, seen.phase
    if phase in TIMED:
        over = f"last {RATE_SECONDS}s" if phase == Phase.BACKFILL else "this phase"
        yield Row(f"Rate, {over}", rate(speed))
        eta = "–"
        if left is not None:
            eta = f"{clock(now + timedelta(seconds=left), now)}, in {elapsed(max(1, left))}"
        yield Row("ETA at this rate", eta)
    if phase == Phase.DRAIN and move.fence_version is not None:
        lines = _source_lines(seen, move.fence_version, now)
        alive = [line for line in lines if line.state not in ("lapsed", "gone")]
        acked = sum(line.state != "missing" for line in alive)
        yield Row("Instances acknowledged", f"{acked} of {len(alive)}")
        yield Row("In flight", count(sum(line.in_flight for line in alive)))
        if move.fence_closed_at is not None:
            bound = move.fence_closed_at + timedelta(seconds=move.drain_bound_seconds)
            gives_up = elapsed(max(0.0, (bound - now).total_seconds()))
            yield Row("Gives up", f"{clock(bound, now)}, in {gives_up}")
    if phase == Phase.BACKFILL:
        if move.pace_per_second:
            yield Row("Pace limit", rate(move.pace_per_second))
        yield Row(f"Copied by pass {max(1, move.passes)}", count(move.changed))
        if move.pass_ended_at is not None:
            yield Row("Copied by the last whole pass", count(move.changed_last))
    if phase not in (Phase.PREPARE, Phase.REOPEN):
        yield Row("Copied in all", count(move.copied))
        yield Row("Compared in all", count(move.compared))
    if phase in (Phase.BACKFILL, Phase.DELTA, Phase.VERIFY):
        yield Row("Differ", count(seen.open_mismatches), "differs" if seen.open_mismatches else "")
    if move.deleted and phase not in (Phase.OFFBOARD, Phase.DONE):
        yield Row("Deleted at the source meanwhile", count(move.deleted))
    if phase in (Phase.OFFBOARD, Phase.DONE):
        yield Row("Deleted at the source", count(move.deleted))
    if move.interrupted and phase != Phase.DONE:
        yield Row("Interrupted turns, copied as they are", count(move.interrupted))
    if phase == Phase.SOAK and move.soak_until is not None:
        yield Row("Soak ends", clock(move.soak_until, now))
        yield Row(
            "Then", "waits for a typed yes" if seen.owes_confirmation else "source is deleted"
        )
    if move.left_behind:
        yield Row("Left at the source, changed since", count(move.left_behind), "differs")


def _notice(seen: Seen) -> tuple[str, Status | None]:
    """Return what a person should read first: why it stands still, or what the last step said."""
    move = seen.move
    if seen.phase == Phase.ABORTED:
        return _why_aborted(move), Status("aborted", "Why")
    if seen.ended:
        return "", None
    if seen.failed_checks:
        first = seen.failed_checks[0]
        return f"{first['name']}: {first['detail']}", Status("blocked", "Not ready")
    if move.failure:
        status = Status("blocked", "Failing") if seen.stuck else Status("warn", "Retrying")
        return move.failure, status
    if seen.phase == Phase.REOPEN:
        return _why_aborted(move), Status("aborted", "Why")
    if move.pause_requested_at and seen.phase not in UNPAUSABLE:
        return f"By {move.pause_requested_by}: {move.pause_reason}", Status("paused", "Paused")
    if seen.ready:
        text = "Waits for somebody to start the drain. Passes go on meanwhile."
        return text, Status("waiting", "Ready")
    if move.waiting_for:
        return f"For {move.waiting_for}.", Status("waiting", "Waits")
    return "", None


def _why_aborted(move: TenantMigration) -> str:
    if move.abort_requested_by:
        return f"Asked for by {move.abort_requested_by}: {move.abort_reason}"
    entered = move.events.filter(now=Phase.REOPEN).exclude(was=Phase.REOPEN).first()
    return entered.note if entered else ""


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
    """Return the quote before the fence closes, and the actual beside it from then on.

    None: nothing can be quoted yet, or it never closed and never will.
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
    if quote.worst <= move.budget_seconds:
        status = Status("ready", "Fits its budget")
    elif move.pass_ended_at is None:
        # Whatever is not copied yet counts as changed: no cause for alarm in a first pass.
        status = Status("waiting", "First pass runs")
    else:
        status = Status("warn", "Over its budget")
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
        ghost=_share(quote.worst, scale),
        mark=_share(move.budget_seconds, scale),
        bar_label=f"{duration(quote.expected)} expected, {duration(quote.worst)} at worst,"
        f" budget {limit(move.budget_seconds)}",
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
        ghost=None,
        mark=_share(expected, scale),
        bar_label=f"{elapsed(reading)} of {duration(expected)} expected",
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
    if move.placement_version is None:
        cell, lines = move.source_cell, _source_lines(seen, version, now)
    else:
        cell = move.target_cell
        lines = tenants_panels.instance_lines(cell, tenant=move.tenant, version=None, now=now)
    alive = [line for line in lines if line.state not in ("lapsed", "gone")]
    in_flight = f"{sum(line.in_flight for line in alive):,} in flight"
    if version is not None:
        acked = sum(line.state in ("closed", "draining") for line in alive)
        note = f"{acked} of {len(alive)} acknowledged, {in_flight}"
    else:
        note = f"{len(alive)} alive, {in_flight}"
    return Instances(cell, tuple(lines), note, _missing(lines, version, now), version)


def _source_lines(seen: Seen, version: int | None, now: datetime) -> list[InstanceLine]:
    move = seen.move
    return tenants_panels.instance_lines(
        move.source_cell, tenant=move.tenant, version=version, now=now
    )


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
    """One open mismatch as a row: which session, what differs first, and what may be done."""

    # Text, for templates write numbers with separators.
    key: str
    session_id: str
    user_id: str
    # events, state, user state, app state, missing, extra.
    what: str
    first_difference: str
    # The failure that it looks like, as a sentence.
    looks: str
    source_digest: str
    target_digest: str
    found_at: datetime
    found_in: str
    # Empty: nobody has asked for its repair.
    repairing_by: str
    repair: str


@dataclass(frozen=True)
class Mismatches:
    lines: tuple[MismatchLine, ...]
    open: int
    resolved: int
    # How many one click would ask to be repaired; 0: the phase allows none.
    repairable: int

    @property
    def hidden(self) -> int:
        return self.open - len(self.lines)


PARTS = {"user": "user state", "app": "app state"}
REPAIRS = {"user": "Reconcile user", "app": "Reconcile app", "extra": "Remove copy"}


def mismatches(seen: Seen) -> Mismatches:
    """Return the open mismatches, oldest first, so that rows keep their place."""
    rows = seen.move.mismatches.filter(resolved_at=None)
    return Mismatches(
        tuple(mismatch_line(row) for row in rows[:MISMATCH_ROWS]),
        seen.open_mismatches,
        seen.move.mismatches.exclude(resolved_at=None).count(),
        len(repairable(seen)),
    )


def repairable(seen: Seen) -> list[int]:
    """Return the ids of open mismatches whose repair nobody has asked for, if the phase allows."""
    if seen.phase not in (Phase.BACKFILL, Phase.VERIFY) or seen.aborting:
        return []
    rows = seen.move.mismatches.filter(resolved_at=None, repair_requested_at=None)
    return list(rows.values_list("pk", flat=True))


def mismatch_line(row: Mismatch) -> MismatchLine:
    """Return one mismatch as a page shows it."""
    known = {looks.value for looks in Looks}
    return MismatchLine(
        key=str(row.pk),
        session_id=row.session_id,
        user_id=row.user_id,
        what=PARTS.get(row.part, row.part),
        first_difference=row.first_difference,
        looks=WORDS[Looks(row.looks_like)] if row.looks_like in known else "",
        source_digest=row.source_digest,
        target_digest=row.target_digest,
        found_at=row.found_at,
        found_in=row.found_in,
        repairing_by=row.repair_requested_by if row.repair_requested_at else "",
        repair=REPAIRS.get(row.part, "Re-copy"),
    )


@dataclass(frozen=True)
class Log:
    lines: tuple[MoveEvent, ...]
    total: int
    # The newest line's id: what the log shows changes with it alone.
    newest: int

    def __repr__(self) -> str:
        return f"Log({self.newest}, {self.total})"


def log(seen: Seen) -> Log:
    """Return the newest lines of the move's log, newest first."""
    events = seen.move.events.all()
    lines = tuple(events[:LOG_LINES])
    total = len(lines) if len(lines) < LOG_LINES else events.count()
    return Log(lines, total, lines[0].pk if lines else 0)


# --- samples: the chart and its table ----------------------------------------------------------


def samples(move: TenantMigration, *, points: int = CHART_POINTS) -> list[Sample]:
    """Return at most about `points` samples, evenly thinned, the newest among them."""
    total = move.samples.count()
    step = max(1, -(-total // points))
    if step == 1:
        return list(move.samples.order_by("id"))
    numbered = move.samples.annotate(number=Window(RowNumber(), order_by=F("id").asc()))
    thinned = list(
        numbered.annotate(rest=F("number") % step)
        .filter(Q(rest=0) | Q(number=total))
        .order_by("id")
    )
    return thinned


@dataclass(frozen=True)
class SampleRow:
    """One line of the table that says the same as the chart."""

    at: datetime
    phase: str
    passes: int
    done: int
    todo: int
    copied: int
    changed: int


def sample_rows(seen: Seen) -> tuple[SampleRow, ...]:
    """Return a dozen samples, evenly thinned, newest first."""
    rows = samples(seen.move, points=SAMPLE_ROWS)
    return tuple(
        SampleRow(
            row.at, row.phase.upper(), row.passes, row.done, row.todo, row.copied, row.changed
        )
        for row in reversed(rows)
    )


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


# A list works out the quote of so many moves that still copy; each costs a few reads.
QUOTED_MOST = 20


def _lines(moves: Sequence[TenantMigration], *, now: datetime) -> list[MoveLine]:
    copying = [move for move in moves if move.phase == Phase.BACKFILL][:QUOTED_MOST]
    quotes = {move.pk: queries.fence_quote(move, now=now).expected for move in copying}
    open_ones = dict(
        Mismatch.objects.filter(move__in=moves, resolved_at=None)
        .values_list("move_id")
        .annotate(open=Count("id"))
    )
    speeds = _rates(moves, now)
    return [
        _line(
            Seen(move, open_ones.get(move.pk, 0)),
            speeds.get(move.pk),
            quotes.get(move.pk, move.quote.get("expected")),
            now,
        )
        for move in moves
    ]


def _rates(moves: Sequence[TenantMigration], now: datetime) -> dict[int, float | None]:
    since = now - timedelta(seconds=RATE_SECONDS)
    copying = {move.pk: move for move in moves if move.phase == Phase.BACKFILL}
    found: dict[int, list[tuple[datetime, int]]] = {}
    rows = Sample.objects.filter(move__in=copying, at__gte=since, phase=Phase.BACKFILL)
    for pk, at, done, passes in rows.order_by("id").values_list("move_id", "at", "done", "passes"):
        if passes == copying[pk].passes:
            found.setdefault(pk, []).append((at, done))
    speeds = {pk: _rate(samples) for pk, samples in found.items()}
    return {move.pk: speeds.get(move.pk) or _rate_of_phase(move, now) for move in moves}


def _line(seen: Seen, speed: float | None, expected: float | None, now: datetime) -> MoveLine:
    move, phase = seen.move, seen.phase
    status = seen.status(now)
    left = seconds_left(seen, speed)
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


@dataclass(frozen=True)
class Targets:
    """Where a tenant could go: (value, words) of cells and of stores, its own region first."""

    cells: tuple[tuple[str, str], ...]
    stores: tuple[tuple[str, str], ...]


def targets(placement: Placement) -> Targets:
    """Return every cell, and every store but the tenant's own."""
    home = placement.cell.region_id
    cells = sorted(
        Cell.objects.select_related("region"), key=lambda cell: (cell.region_id != home, cell.slug)
    )
    stores = sorted(
        Store.objects.select_related("region").exclude(pk=placement.store_id),
        key=lambda store: (store.region_id != home, store.key),
    )
    return Targets(
        tuple((cell.slug, _cell_words(cell, placement)) for cell in cells),
        tuple((store.key, f"{store.key} ({store.kind}, {store.region})") for store in stores),
    )


def _cell_words(cell: Cell, placement: Placement) -> str:
    notes = [str(cell.region)]
    if cell.pk == placement.cell_id:
        notes.append("where it is now")
    if cell.quota_verified_at is None:
        notes.append("quota only assumed")
    return f"{cell.slug} ({', '.join(notes)})"


# --- the strip and the overview ----------------------------------------------------------------


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
    newer = TenantMigration.objects.filter(tenant=OuterRef("tenant"), pk__gt=OuterRef("pk"))
    gave_up = _moves().filter(
        phase=Phase.ABORTED, ended_at__gte=now - NEWS, abort_requested_at=None
    )
    return list(gave_up.exclude(Exists(newer)).order_by("-id"))


def attention(*, now: datetime) -> list[Attention]:
    """Return what a person should look at among the moves; the caller sorts it with the rest."""
    items = [item for seen in _all_live() if (item := _attention(seen, now))]
    items += [_gave_up(move) for move in _aborted_by_themselves(now)]
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
        text = f"Waits for {move.waiting_for}."
    else:
        return None
    if seen.fenced and move.fence_closed_at is not None:
        text = f"{text} {_fence_sentence(move, now)}".strip()
    return Attention(
        # Whoever refuses turns now is worse than whoever does not.
        rank=GRAVITY[status.glyph] - (0.5 if seen.fenced else 0),
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


def _gave_up(move: TenantMigration) -> Attention:
    return Attention(
        rank=GRAVITY["aborted"],
        status=Status("aborted", "Aborted"),
        title=f"{move} {move.tenant} aborted by itself",
        text=_why_aborted(move) or f"{move.tenant} is served on {move.source_store}.",
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


# --- dialogs: what an act would do, from the rows as they are now ---------------------------------


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
    copies = SessionStamp.objects.filter(move=move).count()
    thrown = f"The copy on {move.target_store}: {counted(copies, 'session')}, removed now."
    return Dialog(
        "abort",
        f"Abort {move} and {'reopen' if seen.fenced else 'keep'} {tenant} on {source}?",
        (
            ("Happens now", happens),
            ("Kept", kept),
            (
                "Thrown away",
                thrown if copies else f"Nothing: no session is on {move.target_store}.",
            ),
            ("Undo", "None. A new move starts from PREPARE."),
        ),
        "Abort, reopen on source" if seen.fenced else "Abort, stay on source",
        "Keep moving",
        danger=True,
    )


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
        ("Kept", f"What has been copied: {count(move.copied)} sessions on {move.target_store}."),
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
    copies = SessionStamp.objects.filter(move=move).count()
    return Dialog(
        "leave_behind",
        f"End {move} and leave its copy on {move.target_store}?",
        (
            ("Happens now", f"The move ends as ABORTED without cleaning {move.target_store}."),
            ("Kept", f"{move.tenant} is served on {move.source_store}, as it is now."),
            (
                "Left behind",
                f"{counted(copies, 'session')} of {move.tenant} on {move.target_store}, closed to"
                " agents. A later move there removes them first.",
            ),
            ("Thrown away", "Nothing."),
            ("Undo", "None; the copy can be removed by hand."),
        ),
        "End, leave copy behind",
        "Keep trying",
        danger=True,
    )


# --- one mismatch, both sides ---------------------------------------------------------------


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
    return Diff(
        tuple(lines[:DIFF_LINES]), len(lines) > DIFF_LINES, ours is not None, theirs is not None
    )


def _open(store: Store, move: TenantMigration) -> Any:
    return ports.open_store(store.kind, store.address_from, app_name=move.tenant.app_name)


def _side(port: SessionStore, mismatch: Mismatch) -> Mapping[str, Any] | None:
    if mismatch.part in ("user", "app"):
        user = mismatch.user_id if mismatch.part == "user" else None
        row = port.shared([user]).get(user)
        return None if row is None else json.loads(row.state)
    return port.session(Key(mismatch.user_id, mismatch.session_id))
