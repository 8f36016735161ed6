"""Whether a copy costs by the session, whatever the size of the tenant: 1k, 10k and 100k.

A real move by the engine, its rows and its stores on PostgreSQL, as far as BACKFILL: the first
pass copies everything, the second looks at everything and finds nothing, then one session in a
hundred is touched and the third copies these. Sessions have 5 events of about 1 KB each, so
that it is sessions that count.

A first pass begins with one small chunk, alone in its step, which says how large the others may
be: the same for every tenant. It has its own figure, and the rates are of all that follows.
Starts a server of its own unless DATABASE_URL names one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from bench import Bar, parser, report, rows, servers
from bench.fence import Runtimes, Tenant, peak_megabytes
from bench.plane import control_plane

SIZES = (1_000, 10_000, 100_000)
EVENTS = 5
# What is short is measured more than once, and the best counts: others use the machine too.
ROUNDS = {1_000: 5, 10_000: 2}
TOUCHED_SHARE = 0.01
# A pass after the first begins by itself after a rest, by the engine's clock.
REST = timedelta(hours=1)


@dataclass(frozen=True)
class Measured:
    """What three passes over one tenant took, in seconds."""

    # Of the first pass, copying and comparing alone: the rest of it is no work by the session.
    # Its first step, and how many sessions a second the others copied.
    first_step: float
    rate: float
    nothing: float
    touched: float
    # How many sessions the third pass copied, and how many it had to.
    copied: int
    asked: int


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__ or "")
    options.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    chosen = options.parse_args(argv)
    with (
        servers.environment(browser=False, durable=True) as found,
        rows.databases(found["DATABASE_URL"], 3) as (own, source, target),
        control_plane(own, SWITCHYARD_HOME=found["SWITCHYARD_HOME"]),
    ):
        return report(measure(source, target, chosen.sizes), as_json=chosen.json)


def measure(source: str, target: str, sizes: Sequence[int]) -> Iterator[Bar]:
    """Yield the figures, size after size, then the bars over all of them."""
    passes(Tenant("warm", source, target, sessions=min(sizes), events=EVENTS))
    best: dict[int, Measured] = {}
    memory = {}
    for size in sizes:
        rounds = [
            passes(Tenant(f"t{size}-{n}", source, target, sessions=size, events=EVENTS))
            for n in range(ROUNDS.get(size, 1))
        ]
        best[size] = found = max(rounds, key=lambda measured: measured.rate)
        memory[size] = peak_megabytes()
        name = f"{size:,} sessions"
        yield Bar(f"{name}: first pass, its first step", found.first_step, "s")
        yield Bar(f"{name}: first pass, behind its first step", found.rate, "sessions/s")
        yield Bar(f"{name}: a pass that finds nothing", found.nothing, "s")
        yield Bar(f"{name}: a pass after {found.asked:,} were touched", found.touched, "s")
        yield Bar(f"{name}: copied again for nothing", found.copied - found.asked, "sessions", 0)
        # What has to be copied costs what it cost before; half as much again, and a moment, for
        # small chunks. The rest of the pass is a scan.
        share = found.nothing + 1.5 * found.asked / found.rate + 0.2
        yield Bar(f"{name}: that pass, of a scan plus its share", found.touched / share, "x", 1.0)
    rates = [found.rate for found in best.values()]
    yield Bar("slowest rate, of the fastest", min(rates) / max(rates), "x", 0.8, "at least")
    grown = memory[max(sizes)] - memory[min(sizes)]
    yield Bar(f"worker's memory grown with {max(sizes):,} sessions", grown, "MB", 32.0)


def passes(tenant: Tenant) -> Measured:
    """Fill a tenant, start its move, and take three passes of BACKFILL."""
    tenant.fill()
    row, cells, stores = tenant.onboard()
    with Runtimes(cells, stores):
        backfill = Backfill(row, cells["target"], stores["target"])
        (first_step, *others), _ = backfill.one()
        _, nothing = backfill.one()
        tenant.touch(max(1, int(tenant.sessions * TOUCHED_SHARE)))
        copied = backfill.copied
        _, touched = backfill.one()
    return Measured(
        first_step.seconds,
        sum(step.copied for step in others) / sum(step.seconds for step in others),
        nothing,
        touched,
        backfill.copied - copied,
        len(tenant.touched),
    )


class Step(NamedTuple):
    """One step that copied."""

    copied: int
    seconds: float


class Backfill:
    """A move that waits for a person after each pass, stepped in this process."""

    def __init__(self, tenant: Any, cell: Any, store: Any) -> None:
        from durable.clock import database_now
        from migrations_app import services, steps

        self.rested = timedelta()
        self.now = database_now
        self.machine = steps.machine(lambda pk, phase, seconds: None)
        self.move = services.start(
            tenant,
            target_cell=cell,
            target_store=store,
            by="bench",
            reason="measured",
            now=database_now(),
        )

    @property
    def copied(self) -> int:
        """How many sessions have been copied so far, those copied again too."""
        return int(self.move.copied)

    def one(self) -> tuple[list[Step], float]:
        """Take the next pass; return the steps that copied, and what all took in seconds."""
        from durable.driver import advance

        copying: list[Step] = []
        spent, number = 0.0, self.move.passes + 1
        while self.move.passes < number or self.move.stage != "ready":
            if self.move.passes == number - 1 and self.move.stage == "ready":
                self.rested += REST
            stage, begun, copied = self.move.stage, self.move.passes == number, self.copied
            began = time.perf_counter()
            moved = advance(self.machine, self.move.pk, clock=self.clock)
            seconds = time.perf_counter() - began
            if not moved:
                time.sleep(0.01)
            self.move.refresh_from_db()
            if moved and begun:
                spent += seconds
                if stage == "copy":
                    copying.append(Step(self.copied - copied, seconds))
            if self.move.ended_at is not None:
                raise SystemExit(f"the move was aborted: {self.move.events.first().note}")
        return copying, spent

    def clock(self) -> datetime:
        """Return the engine's time: the database's, and the rests that were skipped."""
        return self.now() + self.rested


if __name__ == "__main__":
    sys.exit(main())
