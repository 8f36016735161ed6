"""What a move found and did: checks, mismatches, log, and samples of its progress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db.models import F, Q, Window
from django.db.models.functions import RowNumber

from migrations_app.domain.mismatch import WORDS, Looks
from migrations_app.domain.phases import Phase
from migrations_app.models import Mismatch, MoveEvent, Sample, TenantMigration
from migrations_app.panels.seen import Seen
from tenants.domain.words import Status, count, counted

LOG_LINES = 200
MISMATCH_ROWS = 50
CHART_POINTS = 240
SAMPLE_ROWS = 12


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


def samples(move: TenantMigration, *, points: int = CHART_POINTS) -> Sequence[Sample]:
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
