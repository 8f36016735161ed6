"""The eight counters that every operator page shows, in their fixed order."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from migrations_app.panels import overview as moves
from tenants import panels as tenants
from tenants import queries
from tenants.domain.words import counted
from tenants.models import Halt


@dataclass(frozen=True)
class Signal:
    """One counter: its glyph, its number with its word, and the page section it leads to."""

    glyph: str
    count: int
    text: str
    url_name: str
    anchor: str


@dataclass(frozen=True)
class Strip:
    now: datetime
    signals: tuple[Signal, ...]
    # None: machines run.
    halt: Halt | None

    @property
    def version(self) -> str:
        counts = "-".join(str(signal.count) for signal in self.signals)
        return counts if self.halt is None else f"{counts}-{self.halt.since.timestamp():.0f}"


def signals(*, now: datetime) -> Strip:
    """Return the strip: always the same slots in the same order, zero or not."""
    counts = moves.signals(now=now)
    lost = tenants.lost_instances(now=now)
    slots = (
        ("blocked", counts.blocked, f"{counts.blocked} blocked", "overview", "attention"),
        ("lost", lost, f"{counted(lost, 'instance')} lost", "overview", "attention"),
        ("aborted", counts.aborted, f"{counts.aborted} aborted", "overview", "attention"),
        ("fenced", counts.fenced, f"{counts.fenced} fenced", "overview", "moves"),
        ("paused", counts.paused, f"{counts.paused} paused", "overview", "moves"),
        ("waiting", counts.waiting, f"{counts.waiting} waiting", "overview", "attention"),
        ("moving", counts.moving, f"{counts.moving} moving", "overview", "moves"),
        ("soak", counts.soaking, f"{counts.soaking} soaking", "overview", "next"),
    )
    return Strip(now, tuple(Signal(*slot) for slot in slots), queries.halt())
