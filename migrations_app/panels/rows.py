"""What a move looked at and did: checks, log, and samples of its progress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db.models import F, Q, Window
from django.db.models.functions import RowNumber

from migrations_app.models import MoveEvent, Sample, TenantMigration
from migrations_app.panels.seen import Seen
from tenants.domain.words import Status, count, counted

LOG_LINES = 200
CHART_POINTS = 240
SAMPLE_ROWS = 12


# What a check's `ok` looks like. One that is not so blocks nothing: it is said, and not counted.
CHECK = {
    True: Status("ok", "Green"),
    False: Status("blocked", "Red"),
    None: Status("warn", "Advice"),
}


@dataclass(frozen=True)
class Checks:
    lines: tuple[tuple[Status, str, str], ...]
    findings: tuple[Mapping[str, Any], ...]
    green: int
    red: int
    advice: int

    @property
    def counted(self) -> int:
        return self.green + self.red


def checks(seen: Seen) -> Checks:
    """Return PREPARE's checks in their order, each with its state and reason."""
    found = seen.move.checks
    count_of = {ok: sum(check["ok"] is ok for check in found) for ok in CHECK}
    return Checks(
        tuple((CHECK[check["ok"]], str(check["name"]), str(check["detail"])) for check in found),
        tuple(seen.move.findings),
        green=count_of[True],
        red=count_of[False],
        advice=count_of[None],
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
    if move.changed_at_drain is not None and not seen.fence_goes_back:
        drained = f"{counted(move.changed_at_drain, 'session')} had changed when the fence closed"
        return f"{drained}, after {counted(move.passes, 'pass', 'passes')}."
    if move.pass_ended_at is not None:
        return (
            f"The last whole pass found {count(move.changed_last)} of"
            f" {counted(move.sessions, 'session')} changed."
        )
    if move.passes:
        return f"The first pass has copied {counted(move.copied, 'session')} so far."
    return "Drawn from the first copied session on."
