"""How far a move is: its facts, its phases there and back, and the running one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from django.db.models import F

from migrations_app.domain.phases import (
    FENCED,
    REVERSED,
    STEPPER,
    STEPPER_BACK,
    UNPAUSABLE,
    Phase,
)
from migrations_app.domain.throttle import late_seconds
from migrations_app.domain.verbs import where
from migrations_app.models import TenantMigration
from migrations_app.panels.seen import COMPARED, Seen, fence_lines
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

# The rate is measured over the last so many seconds.
RATE_SECONDS = 10


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
    # Whether it matters what the tenant has touched since the cutover.
    way_back: bool
    # Sessions written, born or deleted on the target since then. None: not looked at yet.
    touched: int | None
    # Sessions born on the target of a split. None: no split, or not looked at yet.
    born: int | None


def facts(seen: Seen, *, now: datetime) -> Facts:
    """Return the row of labelled values under the title."""
    move, phase = seen.move, seen.phase
    where, way = phase.upper(), stepper(seen)
    if phase in way:
        where = f"{where}, {way.index(phase) + 1} of {len(way)}"
    # Of the cell alone nobody counts: all of it stays where it is.
    surveyed = (phase != Phase.PREPARE or move.sessions > 0) and not seen.of_cell
    way_back = phase == Phase.SOAK or (seen.going_back and not seen.out_of_split)
    way_back = way_back and not seen.of_cell
    return Facts(
        phase=where,
        elapsed_seconds=((move.ended_at or now) - move.started_at).total_seconds(),
        tenant_sees=tenant_sees(seen),
        sessions=move.sessions if surveyed else None,
        users=move.users if surveyed else None,
        interrupted=move.interrupted,
        # Past the cutover it is what was touched.
        changed_at_drain=(
            None if way_back or seen.fence_goes_back or seen.of_cell else move.changed_at_drain
        ),
        way_back=way_back,
        touched=move.touched if way_back and move.touched_at is not None else None,
        born=move.born if seen.split and not way_back else None,
    )


def tenant_sees(seen: Seen) -> str:
    """Return what becomes of the tenant's turns now."""
    move = seen.move
    if not seen.split or seen.on_target or seen.phase in (Phase.ROLLED_BACK, Phase.ABORTED):
        return "Retry-after" if seen.fenced else f"Served {seen.at_home}"
    if not seen.both_serve:
        if move.split_version is not None and seen.phase == Phase.SPLIT:
            return f"Known sessions on {move.source_store}; new ones: retry-after"
        return f"Served on {move.source_store}"
    if seen.fenced:
        serves = move.source_store if seen.fence_goes_back else move.target_store
        return f"{serves} serves its own; others: retry-after"
    return f"Known sessions on {move.source_store}, new ones on {move.target_store}"


# The track of a split, and what one shows whose births are carried back.
STEPPER_SPLIT = (*STEPPER[:2], Phase.SPLIT, *STEPPER[2:])
STEPPER_OUT = (Phase.SPLIT, *STEPPER_BACK[1:])
# Of a move of the cell alone.
STEPPER_CELL = (Phase.PREPARE, Phase.DRAIN, Phase.TARGET, Phase.SOAK)
STEPPER_CELL_BACK = (Phase.SOAK, Phase.REVERSE_DRAIN, Phase.REVERSE_TARGET, Phase.ROLLED_BACK)


def stepper(seen: Seen) -> Sequence[Phase]:
    """Return the phases that the track shows: the seven, a split's, or those of the way back."""
    opens_back = seen.opening_again and seen.fence_goes_back
    if seen.going_back or seen.phase == Phase.ROLLED_BACK or opens_back:
        if seen.of_cell:
            return STEPPER_CELL_BACK
        return STEPPER_OUT if seen.out_of_split else STEPPER_BACK
    if seen.of_cell:
        return STEPPER_CELL
    return STEPPER_SPLIT if seen.split else STEPPER


@dataclass(frozen=True)
class Step:
    """One phase on the track. `glyph` is done, live, waiting, soak, paused, blocked…"""

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
    title: str
    steps: tuple[Step, ...]
    # Beside the title: the fence, the soak, or how it ended.
    status: Status | None


Spans = Mapping[Phase, tuple[datetime, datetime | None]]


def spans(move: TenantMigration) -> Spans:
    """Return when each phase was entered and left; left None: it is the present one.

    Of several rollbacks only the last counts, and of a soak that began anew its last beginning.
    """
    entered: list[tuple[Phase, datetime]] = [(Phase.PREPARE, move.started_at)]
    changes = move.events.exclude(was=F("now")).order_by("id").values_list("now", "at")
    entered += [(Phase(phase), at) for phase, at in changes]
    found: dict[Phase, tuple[datetime, datetime | None]] = {}
    for index, (phase, at) in enumerate(entered):
        left = entered[index + 1][1] if index + 1 < len(entered) else None
        if phase == Phase.REVERSE_DRAIN:
            found = {past: times for past, times in found.items() if past not in REVERSED}
        if phase == Phase.DRAIN:
            # A split's fence may be left and closed again.
            found = {past: times for past, times in found.items() if past not in FENCED}
        found[phase] = (at, left)
    return found


def track(seen: Seen, *, now: datetime) -> Track:
    """Return the phases with their times, and what the present one waits for."""
    move = seen.move
    times = spans(move)
    status = seen.status(now)
    steps = []
    way = stepper(seen)
    for phase in way:
        at, left = times.get(phase, (None, None))
        current = phase == seen.phase
        gave_up = left is not None and _left_by_abort(phase, times)
        if current:
            glyph = {"moving": "live", "fenced": "live"}.get(status.glyph, status.glyph)
        elif gave_up:
            glyph = "aborted"
        else:
            glyph = "done" if at is not None else "waiting"
        bar = _measure(seen, now)[2] if current and phase in MEASURED and move.todo else None
        soaks = current and phase == Phase.SOAK and not seen.opening_again
        if soaks and move.soak_until and at:
            bar = share_of((now - at).total_seconds(), (move.soak_until - at).total_seconds())
        steps.append(
            Step(
                name=phase.upper(),
                glyph=glyph,
                at=at,
                text=_step_text(seen, phase, at, left, now),
                notes=tuple(_step_notes(seen, phase, at, left)),
                current=current,
                fenced=seen.fenced and phase in _closed_in(seen) and at is not None,
                bar=bar,
                bar_label=_bar_label(seen, phase),
            )
        )
    title = "Phases" if way in (STEPPER, STEPPER_SPLIT, STEPPER_CELL) else "The way back"
    return Track(title, tuple(steps), _track_status(seen, now))


# Phases whose `done` of `todo` sessions says how far they are.
MEASURED = frozenset(
    {Phase.BACKFILL, Phase.DELTA, Phase.VERIFY, Phase.REVERSE_DELTA, Phase.REVERSE_VERIFY}
)


def _closed_in(seen: Seen) -> frozenset[Phase]:
    """Return the phases that the present fence was closed in, for the hatching."""
    if not seen.fence_goes_back:
        return FENCED - REVERSED
    # A rollback that was stopped opens its fence in the first moments of the new soak.
    return REVERSED | {Phase.SOAK} if seen.opening_again else REVERSED


def _left_by_abort(phase: Phase, times: Spans) -> bool:
    outs = [Phase.SPLIT, Phase.SOAK] if phase in REVERSED else [Phase.REOPEN]
    if phase in FENCED:
        outs.append(Phase.SPLIT)
    return any(out in times and times[phase][1] == times[out][0] for out in outs)


def share_of(part: float, whole: float) -> float | None:
    """Return a part in percent of a whole, for the width of a bar; None without a whole."""
    if whole <= 0:
        return None
    return round(max(0.0, min(100.0, 100 * part / whole)), 2)


def _step_text(
    seen: Seen, phase: Phase, at: datetime | None, ended: datetime | None, now: datetime
) -> str:
    move = seen.move
    if at is None:
        return "" if seen.ended or seen.aborting else _ahead(seen, phase)
    if phase == Phase.ROLLED_BACK:
        return f"lives {seen.at_source}"
    if seen.opening_again and phase in (Phase.SOAK, Phase.SPLIT) and phase == seen.phase:
        return f"begins anew once {seen.opens} is open"
    if phase == Phase.SOAK and ended is None and move.soak_until is not None:
        if seen.soak_over(now):
            return f"over since {clock(move.soak_until, now)}"
        return (
            f"{elapsed((move.soak_until - now).total_seconds())} left of {limit(move.soak_seconds)}"
        )
    if ended is None:
        return f"{elapsed((now - at).total_seconds())} so far"
    return duration((ended - at).total_seconds())


# What phases of a move of the cell alone wait for.
OF_CELL_AHEAD = {
    Phase.TARGET: "once drained",
    Phase.REVERSE_TARGET: "once drained",
}


def _ahead(seen: Seen, phase: Phase) -> str:
    move = seen.move
    if phase == Phase.SPLIT:
        return "by itself" if move.automatic else "when an operator starts it"
    if phase == Phase.DRAIN:
        if seen.split:
            return "when the source is idle"
        if move.automatic:
            return "when the fence fits its budget"
        return "when an operator starts it"
    if seen.of_cell:
        return OF_CELL_AHEAD.get(phase, "") or (
            limit(move.soak_seconds) if phase == Phase.SOAK else ""
        )
    if phase == Phase.TARGET:
        return "when somebody flips it" if seen.owes_flip else "needs 0 mismatches"
    if phase == Phase.REVERSE_TARGET:
        return "needs 0 mismatches"
    if phase == Phase.ROLLED_BACK:
        return f"{move.target_store} stays closed"
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
        green, of = seen.green_checks
        yield f"{green} of {of} checks"
    if phase == Phase.BACKFILL:
        if left is None:
            yield f"pass {max(1, move.passes)}, {done_of(move)}"
        else:
            yield f"{counted(move.sessions, 'session')}, {counted(move.passes, 'pass', 'passes')}"
    if phase == Phase.SPLIT and move.born is not None:
        yield f"{count(move.born)} born on the target"
    if phase == Phase.SPLIT and left is None:
        yield f"bound {limit(move.idle_bound_seconds)}"
    if phase in (Phase.DRAIN, Phase.REVERSE_DRAIN):
        yield f"bound {limit(move.drain_bound_seconds)}"
    if phase == Phase.DELTA and move.changed_at_drain is not None and not seen.fence_goes_back:
        yield f"{count(move.changed_at_drain)} changed"
    if phase == Phase.REVERSE_DELTA and seen.out_of_split:
        yield f"{count(move.born)} born on the target"
    elif phase == Phase.REVERSE_DELTA and move.touched is not None:
        yield f"{count(move.touched)} touched since the cutover"
    if phase in MEASURED and phase != Phase.BACKFILL and left is None and move.todo:
        yield done_of(move)


def done_of(move: TenantMigration) -> str:
    """Return "612 of 900" for the running sweep."""
    # Later sweeps of a phase go on counting: what is shown is sessions.
    return f"{count(min(move.done, move.todo))} of {count(move.todo)}"


def _bar_label(seen: Seen, phase: Phase) -> str:
    if phase == Phase.SOAK:
        return f"Soak, of {limit(seen.move.soak_seconds)}"
    return done_of(seen.move)


def _track_status(seen: Seen, now: datetime) -> Status | None:
    move = seen.move
    if seen.phase == Phase.ABORTED:
        return Status("aborted", f"Aborted, {move.tenant} stayed {seen.at_source}")
    if seen.phase == Phase.REOPEN:
        return Status("aborted", f"Opening {seen.source} again")
    if seen.phase == Phase.ROLLED_BACK:
        return Status("done", f"Rolled back, {move.tenant} lives {seen.at_source}")
    if seen.fenced and move.fence_closed_at is not None:
        closed = elapsed((now - move.fence_closed_at).total_seconds())
        expected = move.quote.get("expected")
        of = f" of {duration(expected)} expected" if expected is not None else ""
        return Status("fenced", f"Fence closed {closed}{of}")
    if seen.opening_again:
        return Status("live", _again(seen))
    if seen.both_serve:
        return Status("live", f"Both serve: {move.source_store}, {move.target_store}")
    if seen.phase == Phase.SOAK and move.soak_until is not None:
        until = clock(move.soak_until, now)
        if seen.of_cell:
            return Status("soak", f"Can be sent back to {seen.source} until {until}")
        return Status("soak", f"Source kept closed until {until}")
    if seen.phase == Phase.OFFBOARD:
        return Status("live", f"Deleting the copy on {move.source_store}")
    if seen.phase == Phase.DONE:
        return Status("done", f"{move.tenant} lives {seen.at_target}")
    return None


def _again(seen: Seen) -> str:
    """Say what happens between a fence that was left and the phase that it leads back to."""
    if seen.move.fence_opened_at is not None and seen.of_cell:
        return "Beginning its soak anew"
    if seen.move.fence_opened_at is not None and seen.phase != Phase.SPLIT:
        return f"Recording {seen.move.source_store} anew"
    return f"Opening {seen.opens} again"


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
    if phase in COMPARED and move.todo and seen.open_mismatches:
        bad = min(share, max(0.4, round(100 * seen.open_mismatches / move.todo, 2)))
    notice, notice_status = _notice(seen)
    return Progress(
        title=_progress_title(seen),
        status=status,
        reading=reading,
        context=context,
        bar=round(share - bad, 2),
        bar_label=f"{reading} {context}",
        bar_glyph=_bar_glyph(seen, now),
        bad=bad,
        rows=tuple(_progress_rows(seen, speed, left, now)),
        notice=notice,
        notice_status=notice_status,
    )


# What a bar is toned by, where the move is not simply going on.
BAR_GLYPHS = {"paused": "paused", "soak": "soak", "waiting": "done", "done": "done"}


def _bar_glyph(seen: Seen, now: datetime) -> str:
    if seen.phase == Phase.SOAK and not seen.opening_again:
        # Whatever else happens in it, its bar is time.
        return "soak"
    return BAR_GLYPHS.get(seen.status(now).glyph, "live")


def _measure(seen: Seen, now: datetime) -> tuple[str, str, float]:
    """Return a reading, what it is of, and the bar's percent; never all of it with work left."""
    move, phase = seen.move, seen.phase
    if phase == Phase.PREPARE:
        green, of = seen.green_checks
        return str(green), f"of {counted(of, 'check')} green", share_of(green, of) or 0.0
    if seen.of_cell and (seen.opening_again or phase in OF_CELL_READS):
        return _measure_of_cell(seen)
    if seen.opening_again:
        return count(move.sessions), f"sessions stay on {seen.opens}", 0.0
    if phase == Phase.SPLIT and move.stage == "ready" and move.split_at is not None:
        waited = max(0.0, (now - move.split_at).total_seconds())
        share = share_of(waited, move.idle_bound_seconds)
        return elapsed(waited), f"of at most {limit(move.idle_bound_seconds)}", share or 0.0
    if phase == Phase.SOAK and move.soak_until is not None:
        left = max(0.0, (move.soak_until - now).total_seconds())
        past = share_of(move.soak_seconds - left, move.soak_seconds)
        share = 100.0 if past is None else past
        return elapsed(left), f"left of {limit(move.soak_seconds)}", share
    if phase in (Phase.DRAIN, Phase.REVERSE_DRAIN):
        # The phase is settled a moment before its fence closes.
        waited = (now - (move.fence_closed_at or move.phase_since)).total_seconds()
        share = share_of(waited, move.drain_bound_seconds) or 0.0
        return elapsed(waited), f"of at most {limit(move.drain_bound_seconds)}", share
    if phase == Phase.DONE:
        # Sessions were born while it copied: what was deleted is what had been moved.
        return count(move.deleted + move.left_behind), "sessions moved", 100.0
    if phase == Phase.TARGET:
        return count(move.stamps.count()), "sessions, equal on both sides", 100.0
    if phase in (Phase.REVERSE_TARGET, Phase.ROLLED_BACK):
        return count(move.sessions), "sessions, equal on both sides", 100.0
    if phase in (Phase.REOPEN, Phase.ABORTED):
        return count(move.copied), "sessions had been copied", 0.0
    if not move.todo:
        return count(move.copied), "sessions copied so far", 0.0
    done = min(move.done, move.todo)
    context = f"of {counted(move.todo, 'session')}"
    if done < move.todo:
        return (
            count(done),
            f"{context}, {percent(done, move.todo)}",
            share_of(done, move.todo) or 0.0,
        )
    if move.stage == "ready":
        return count(done), f"{context}, pass {move.passes} is whole", 100.0
    # Every session has been passed, and the phase has more to do: that is not 100 %.
    return count(done), f"{context}, 99{THIN}%", 99.0


# Phases of a move of the cell alone that tell who serves: there is nothing to count.
OF_CELL_READS = {
    Phase.TARGET: "is published as its cell",
    Phase.DONE: "serves it; nothing was copied or deleted",
    Phase.REOPEN: "goes on serving it; nothing was copied",
    Phase.ABORTED: "serves it as before; nothing was copied",
    Phase.REVERSE_TARGET: "is published as its cell again",
    Phase.ROLLED_BACK: "serves it again; nothing was copied",
}


def _measure_of_cell(seen: Seen) -> tuple[str, str, float]:
    if seen.opening_again:
        return str(seen.opens), "is opened to it again" if seen.fenced else "serves it", 0.0
    to_target = seen.phase in (Phase.TARGET, Phase.DONE)
    gave_up = seen.phase in (Phase.REOPEN, Phase.ABORTED)
    cell = seen.target if to_target else seen.source
    return str(cell), OF_CELL_READS[seen.phase], 0.0 if gave_up else 100.0


# Phases in which the rate of `done` gives a time, and the stages in which `done` counts sessions.
TIMED = MEASURED | {Phase.OFFBOARD, Phase.SPLIT}
SESSION_STAGES = frozenset({"", "copy", "sessions"})
# Phases that copy pass after pass, and are sampled.
COPYING = frozenset({Phase.BACKFILL, Phase.SPLIT})


def current_rate(move: TenantMigration, *, now: datetime) -> float | None:
    """Return sessions per second: of the last ten seconds, or of a phase that is not sampled.

    None where nothing was measured.
    """
    if move.stage == "ready":
        return None
    if move.phase in COPYING:
        since = now - timedelta(seconds=RATE_SECONDS)
        recent = move.samples.filter(at__gte=since, phase=move.phase, passes=move.passes)
        return rate_between(list(recent.order_by("id").values_list("at", "done")))
    return rate_of_phase(move, now)


def rate_of_phase(move: TenantMigration, now: datetime) -> float | None:
    """Return the rate since the phase began, for phases that are not sampled."""
    seconds = (now - move.phase_since).total_seconds()
    if move.phase not in TIMED or move.phase in COPYING or seconds <= 0:
        return None
    # A phase that has passed every session waits for something else by now.
    return move.done / seconds if 0 < move.done < move.todo else None


def rate_between(samples: Sequence[tuple[datetime, int]]) -> float | None:
    """Return the rate between the first and the last sample; None if they don't show one."""
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


# What a sweep beside the sessions does, whichever phase it belongs to.
SWEEP_TITLES = {
    "artifacts": "Bringing artifacts over",
    "memory": "Filling the other side's memory",
    "references": "Looking for names of renumbered versions",
}
STAGE_TITLES = {
    (Phase.BACKFILL, "gone"): "Looking for deleted sessions",
    (Phase.BACKFILL, "shared"): "Copying shared state",
    (Phase.BACKFILL, "ready"): "Copied, between passes",
    (Phase.SPLIT, "gone"): "Looking for deleted sessions",
    (Phase.SPLIT, "shared"): "Copying shared state, the base of a merge",
    (Phase.SPLIT, "existing"): "Waiting for turns that began before",
    (Phase.VERIFY, "artifacts"): "Comparing artifacts",
    (Phase.REVERSE_VERIFY, "artifacts"): "Comparing artifacts",
    (Phase.DELTA, "gone"): "Looking for deleted sessions",
    (Phase.DELTA, "shared"): "Copying shared state",
    (Phase.VERIFY, "shared"): "Comparing shared state",
    (Phase.VERIFY, "end"): "Comparing counts and the mark",
    (Phase.REVERSE_DELTA, "gone"): "Carrying back what was deleted",
    (Phase.REVERSE_DELTA, "shared"): "Carrying back shared state",
    (Phase.REVERSE_VERIFY, "shared"): "Comparing shared state",
    (Phase.REVERSE_VERIFY, "end"): "Comparing counts and the mark",
    (Phase.SOAK, "artifacts"): "Looking for artifacts written late",
    (Phase.OFFBOARD, "forget"): "Removing what the source's memory has of them",
}
OF_CELL_TITLES = {
    Phase.PREPARE: "Checking the store and both cells",
    Phase.REOPEN: "Opening the old cell again",
    Phase.TARGET: "Publishing the new cell",
    Phase.REVERSE_TARGET: "Publishing the old cell",
}
PHASE_TITLES = {
    Phase.PREPARE: "Checking both stores",
    Phase.SPLIT: "New sessions begin on the target",
    Phase.DRAIN: "Waiting for running turns",
    Phase.DELTA: "Copying what changed",
    Phase.VERIFY: "Comparing every session",
    Phase.TARGET: "Publishing the target",
    Phase.SOAK: "Soaking",
    Phase.OFFBOARD: "Deleting the source's copy",
    Phase.DONE: "Done",
    Phase.REOPEN: "Opening the source again",
    Phase.ABORTED: "Aborted",
    Phase.REVERSE_DRAIN: "Waiting for running turns",
    Phase.REVERSE_DELTA: "Carrying back what was touched",
    Phase.REVERSE_VERIFY: "Comparing every session",
    Phase.REVERSE_TARGET: "Publishing the source",
    Phase.ROLLED_BACK: "Rolled back",
}


def _progress_title(seen: Seen) -> str:
    if seen.opening_again:
        return _again(seen)
    if seen.of_cell:
        prepared = seen.phase == Phase.PREPARE and seen.move.stage == "ready"
        titles = PHASE_TITLES | OF_CELL_TITLES
        return "Prepared, before the fence" if prepared else titles[seen.phase]
    if title := STAGE_TITLES.get((seen.phase, seen.move.stage)):
        return title
    if title := SWEEP_TITLES.get(seen.move.stage, ""):
        return title
    if seen.phase == Phase.SPLIT and seen.both_serve:
        if seen.move.stage == "ready":
            return "Waiting for the source to be idle"
        return f"Copying what changes, pass {max(1, seen.move.passes)}"
    if seen.phase == Phase.BACKFILL:
        return f"Copying, pass {max(1, seen.move.passes)}"
    return PHASE_TITLES[seen.phase]


def _progress_rows(
    seen: Seen, speed: float | None, left: float | None, now: datetime
) -> Iterable[Row]:
    move, phase = seen.move, seen.phase
    if phase in TIMED:
        over = f"last {RATE_SECONDS}s" if phase in COPYING else "this phase"
        yield Row(f"Rate, {over}", rate(speed))
        eta = "–"
        if left is not None:
            eta = f"{clock(now + timedelta(seconds=left), now)}, in {elapsed(max(1, left))}"
        yield Row("ETA at this rate", eta)
    if phase in (Phase.DRAIN, Phase.REVERSE_DRAIN) and move.fence_version is not None:
        lines = fence_lines(seen, move.fence_version, now)
        alive = [line for line in lines if line.state not in ("lapsed", "gone")]
        acked = sum(line.state != "missing" for line in alive)
        yield Row("Instances acknowledged", f"{acked} of {len(alive)}")
        yield Row("In flight", count(sum(line.in_flight for line in alive)))
        if move.fence_closed_at is not None:
            bound = move.fence_closed_at + timedelta(seconds=move.drain_bound_seconds)
            gives_up = elapsed(max(0.0, (bound - now).total_seconds()))
            yield Row("Gives up", f"{clock(bound, now)}, in {gives_up}")
    if phase in COPYING:
        yield from _pace_rows(move, now)
        yield Row(f"Copied by pass {max(1, move.passes)}", count(move.changed))
        if move.pass_ended_at is not None:
            yield Row("Copied by the last whole pass", count(move.changed_last))
    if move.pause_before and not seen.ended:
        yield Row("Pauses before", move.pause_before.upper())
    if seen.of_cell:
        yield from _rows_of_cell(seen, now)
        return
    if phase not in (Phase.PREPARE, Phase.REOPEN):
        yield Row("Copied in all", count(move.copied))
        yield Row("Compared in all", count(move.compared))
    if phase in MEASURED:
        yield Row("Differ", count(seen.open_mismatches), "differs" if seen.open_mismatches else "")
    if move.deleted and phase not in (Phase.OFFBOARD, Phase.DONE):
        yield Row("Deletes carried over", count(move.deleted))
    if phase in (Phase.OFFBOARD, Phase.DONE):
        yield Row("Deleted at the source", count(move.deleted))
    if move.interrupted and phase != Phase.DONE:
        yield Row("Interrupted turns, copied as they are", count(move.interrupted))
    back = seen.going_back or phase == Phase.ROLLED_BACK
    if move.born is not None and (phase == Phase.SPLIT or (back and seen.out_of_split)):
        yield Row("Born on the target", count(move.born))
    elif phase == Phase.SOAK or back:
        touched = "not looked at yet"
        if move.touched is not None:
            touched = f"{count(move.touched)}, looked at {clock(move.touched_at, now)}"
        yield Row("Touched since the cutover", touched)
    if phase == Phase.SOAK and seen.late_writes:
        yield Row("Late writes at the source", count(seen.late_writes), "differs")
    if phase == Phase.SOAK and move.soak_until is not None and not seen.opening_again:
        yield Row("Soak ends", clock(move.soak_until, now))
        yield Row(
            "Then", "waits for a typed yes" if seen.owes_confirmation else "source is deleted"
        )
    if move.left_behind:
        yield Row("Left at the source, changed since", count(move.left_behind), "differs")


def _rows_of_cell(seen: Seen, now: datetime) -> Iterable[Row]:
    move = seen.move
    yield Row("Copied", "nothing, the store stays")
    if seen.phase == Phase.SOAK and move.soak_until is not None and not seen.opening_again:
        yield Row("Soak ends", clock(move.soak_until, now))
        yield Row("Then", "the move is done, nothing is deleted")


def _pace_rows(move: TenantMigration, now: datetime) -> Iterable[Row]:
    """Say which pace was chosen, and when the first pass is through at it."""
    if move.finish_by is not None:
        late = _late_seconds(move, now)
        missed = f", missed by {elapsed(late)} at this rate" if late >= 1 else ""
        by = f"through by {clock(move.finish_by, now)} UTC{missed}"
        yield Row("Pace", by, "differs" if missed else "")
    elif move.pace_per_second:
        said = rate(move.pace_per_second)
        left = move.todo - move.done
        if move.stage in SESSION_STAGES and left > 0:
            through = now + timedelta(seconds=left / move.pace_per_second)
            # To the minute: a clock that counts seconds would promise too much.
            said = f"at {said}: through at {_minute(through, now)} UTC"
        yield Row("Pace", said)
    if move.ease < 1:
        yield Row("Works, of the time", percent(move.ease, 1))


def _late_seconds(move: TenantMigration, now: datetime) -> float:
    """Return by how much the first pass misses its finish time, as fast as it may work now."""
    left = move.todo - move.done if move.stage in SESSION_STAGES else 0
    if move.finish_by is None or move.passes != 1 or move.copy_rate is None or left <= 0:
        return 0.0
    each = 1 / move.copy_rate + (1 / move.verify_rate if move.verify_rate else 0.0)
    return late_seconds(left, move.ease / each, (move.finish_by - now).total_seconds())


def _minute(at: datetime, now: datetime) -> str:
    return f"{at.astimezone(UTC):%H:%M}" if at.date() == now.date() else clock(at, now)


def _notice(seen: Seen) -> tuple[str, Status | None]:
    """Return what a person should read first: why it stands still, or what the last step said."""
    move = seen.move
    if seen.phase == Phase.ABORTED:
        return why_aborted(move), Status("aborted", "Why")
    if seen.phase == Phase.ROLLED_BACK:
        return why_rolled_back(move), Status("done", "Why")
    if seen.ended:
        return "", None
    if seen.failed_checks:
        first = seen.failed_checks[0]
        return f"{first['name']}: {first['detail']}", Status("blocked", "Not ready")
    if move.failure:
        status = Status("blocked", "Failing") if seen.stuck else Status("warn", "Retrying")
        return move.failure, status
    if seen.phase == Phase.REOPEN:
        return why_aborted(move), Status("aborted", "Why")
    if move.pause_requested_at and seen.phase not in UNPAUSABLE:
        return f"By {move.pause_requested_by}: {move.pause_reason}", Status("paused", "Paused")
    if seen.open_mismatches and seen.phase in COMPARED:
        blocks = "blocks" if seen.open_mismatches == 1 else "block"
        text = f"{counted(seen.open_mismatches, 'mismatch', 'mismatches')} {blocks}"
        out = "stop the rollback" if seen.going_back else "abort"
        text = f"{text} {BLOCKED[seen.phase]}: re-copy below, or {out}."
        return text, Status("blocked", "Blocked")
    if seen.late_writes and seen.phase == Phase.SOAK:
        return late_writes_in_words(seen), Status("blocked", "Late write")
    if seen.waits_for_flip:
        text = "All is equal. Waits for somebody to flip it to the target; the deadline runs."
        return text, Status("waiting", "Ready")
    if seen.ready:
        what = "split" if seen.split else "drain"
        goes_on = f"{move.tenant} is served" if seen.of_cell else "Passes go on"
        text = f"Waits for somebody to start the {what}. {goes_on} meanwhile."
        return text, Status("waiting", "Ready")
    if seen.waiting_for:
        return f"For {seen.waiting_for}.", Status("waiting", "Waits")
    if seen.going_back or seen.rollback_waits:
        return why_rolled_back(move), Status("moving", "Rolling back")
    if move.ease < 1 and seen.phase in COPYING:
        return move.eased_why, Status("warn", "Eased")
    if stopped := why_stopped(move):
        what = "Rollback stopped" if seen.phase == Phase.SOAK else "Fence left"
        return stopped, Status("warn", what)
    return "", None


# What mismatches that nobody has settled keep from happening.
BLOCKED = {
    Phase.BACKFILL: "the fence",
    Phase.SPLIT: "TARGET",
    Phase.VERIFY: "TARGET",
    Phase.REVERSE_VERIFY: "REVERSE_TARGET",
}


def late_writes_in_words(seen: Seen) -> str:
    """Return what late writes are of, and what a person does about them."""
    move = seen.move
    late = seen.late_writes
    written = "session was written" if late == 1 else "sessions were written"
    return (
        f"{late:,} {written} on {move.source_store} after the cutover. {move.tenant} lives on"
        f" {move.target_store}; nothing of it is lost there. Download both versions below, then"
        " accept the tenant's own."
    )


def why_rolled_back(move: TenantMigration) -> str:
    """Return who asked for the rollback, and why."""
    return f"Asked for by {move.rollback_requested_by}: {move.rollback_reason}"


def why_stopped(move: TenantMigration) -> str:
    """Return why the last fence came back to SOAK or SPLIT; "" where none did."""
    if move.phase not in (Phase.SOAK, Phase.SPLIT) or not move.past_fences:
        return ""
    back = move.events.filter(was__in=FENCED, now=move.phase).exclude(was=Phase.TARGET).first()
    if back is None:
        return ""
    if move.phase == Phase.SPLIT:
        return f"{back.note}. Both sides serve {move.tenant} as before."
    home = where(move.mode, move.target_cell, move.target_store)
    return f"{back.note}. {move.tenant} stays {home}."


def why_aborted(move: TenantMigration) -> str:
    """Return who asked for the abort and why, or what the move said when it gave up."""
    if move.abort_requested_by:
        return f"Asked for by {move.abort_requested_by}: {move.abort_reason}"
    entered = move.events.filter(now=Phase.REOPEN).exclude(was=Phase.REOPEN).first()
    return entered.note if entered else ""
