"""Thousands of counted turns over a move, a rollback and a second move, with kills at random.

With `--mode split` all moves split, and between the rollback and the last one another is aborted
in its split, while sessions are born on its target: they come back.

A whole installation on PostgreSQL and Redis, and agent processes whose clients journal every
event that they were told of. Web, both workers, beat and the agents are killed (-9) every few
seconds, by dice whose seed is printed. In the end every acknowledged event is looked for where
its tenant lives now; and while a store is closed nothing may change in it, by its rows' own
versions. Starts servers of its own unless DATABASE_URL and REDIS_URL name some.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import psycopg

from bench import Bar, parser, report, rows, servers
from bench.plane import control_plane
from platform_admin.processes import Supervisor, installation

if TYPE_CHECKING:
    from bench.audit_events import Verdict
    from migrations_app.domain.phases import Phase
    from migrations_app.models import TenantMigration

TURNS = 10_000
TENANT, SOURCE, TARGET = "acme", "store-eu1-a", "store-eu1-b"
FLEETS = ("agents-1", "agents-2")
# Of all turns, what is talked before each leg begins; the rest is talked after the last.
MOVE_AT, BACK_AT, AGAIN_AT = 0.10, 0.40, 0.65
# In split mode: before the first move, its rollback, the move that is aborted, its abort, the last.
SPLIT_AT = (0.10, 0.30, 0.45, 0.60, 0.75)
# New conversations in 100 turns; a split is about those.
BORN = {"fence": 5, "split": 15}
# The move that is aborted lets the tenant talk in its split for at least this part of all turns.
SPLIT_FOR = 0.10
# How long known sessions are waited for at most: with clients that never rest, that is how long.
# The move that is aborted waits for longer than its turns take.
IDLE_BOUND_SECONDS, IDLE_SECONDS = 8.0, 2.0
# Who is killed after how many seconds, at least and at most. An agent's death holds every fence
# for its lease and its longest turn, so agents die less often. Three splits take long enough as
# it is: a killed worker costs each the same lease.
OURS = ("web", "prompt", "bulk", "beat")
KILLS = {
    "fence": {OURS: (3.0, 9.0), FLEETS: (50.0, 80.0)},
    "split": {OURS: (8.0, 20.0), FLEETS: (60.0, 100.0)},
}
# Before the same process is killed again.
REST_SECONDS = 12.0
PACE_PER_SECOND = 30.0
# A killed worker costs its claim's lease; a killed agent its instance's, and its longest turn.
LEASE_SECONDS, RUNTIME_LEASE_SECONDS, LONGEST_TURN_SECONDS = 15.0, 20.0, 6.0
# A leg may be aborted by its own budget when the wrong ones die; then it begins again.
ATTEMPTS = 5
# A leg, or the turns before one, that takes longer than this stands still.
LEG_SECONDS, TURNS_PER_SECOND_AT_LEAST = 400.0, 1.0
SOAK_SECONDS = 5.0
TABLES = ("sessions", "events", "user_states", "app_states")


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__ or "")
    options.add_argument("--turns", type=int, default=TURNS)
    options.add_argument("--mode", choices=["fence", "split"], default="fence")
    options.add_argument("--seed", type=int, default=secrets.randbelow(1_000_000))
    options.add_argument("--logs", type=Path, help="a folder to keep: logs, journals")
    chosen = options.parse_args(argv)
    with (
        servers.environment(browser=False) as found,
        rows.databases(found["DATABASE_URL"], 3) as (own, *stores),
        TemporaryDirectory() as scrap,
    ):
        home = chosen.logs or Path(scrap)
        home.mkdir(parents=True, exist_ok=True)
        with control_plane(
            own,
            REDIS_URL=found["REDIS_URL"],
            SWITCHYARD_HOME=str(home),
            DURABLE_LEASE_SECONDS=str(LEASE_SECONDS),
            RUNTIME_LEASE_SECONDS=str(RUNTIME_LEASE_SECONDS),
            LOG_LEVEL="WARNING",
        ):
            bars = measure(home, stores, chosen.turns, chosen.seed, chosen.mode)
            return report(bars, as_json=chosen.json)


def measure(
    home: Path, stores: Sequence[str], turns: int, seed: int, mode: str = "fence"
) -> Iterator[Bar]:
    """Yield what came out, and the seed at once: it is what a failure is repeated with."""
    from bench.audit_events import audit

    yield Bar("seed of the dice", seed, "")
    soak = Soak(home, stores, seed, mode)
    began = time.monotonic()
    with soak:
        moves = soak.run(turns)
        took = time.monotonic() - began
        soak.supervisor.stop(*FLEETS)
        verdict = audit(soak.scene.journals, soak.scene.homes(), lived=soak.scene.lived())
        left = soak.watch.left_on_the_source()
    for example in (*verdict.examples, *soak.watch.changes):
        print(example, file=sys.stderr)
    yield from _bars(verdict, soak, turns, took, left)
    for index, move in enumerate(moves):
        for word, fence in _fences(move):
            yield Bar(f"{word} of move {index + 1}, closed", fence, "s")


def _bars(verdict: Verdict, soak: Soak, turns: int, took: float, left: int) -> Iterator[Bar]:
    talked = verdict.turns - soak.filled
    yield Bar("turns, beside those that filled the stores", talked, "turns", turns, "at least")
    yield Bar("took", took, "s")
    yield Bar("events acknowledged", verdict.acknowledged, "events")
    yield Bar("of these missing where their tenant lives", verdict.missing, "events", 0)
    yield Bar("doubled", verdict.doubled, "events", 0)
    yield Bar("sessions out of order", verdict.disordered, "sessions", 0)
    yield Bar("sessions that a store took back", verdict.returned, "sessions", 0)
    yield Bar("users who shared a last word", verdict.spoken, "users")
    yield Bar("of these, an older one is there", verdict.outspoken, "users", 0)
    closings = [times for times in soak.watch.looks.values() if times > 1]
    yield Bar("closings of a store that were watched", len(closings), "closings", 3, "at least")
    if soak.born is not None:
        yield Bar("born on the target before the abort", soak.born, "sessions", 1, "at least")
    yield Bar("looks at a closed store", sum(closings), "looks")
    yield Bar("of these, something had changed", len(soak.watch.changes), "looks", 0)
    yield Bar("rows left on the source", left, "rows", 0)
    yield Bar("turns refused for a while", sum(verdict.refused.values()), "times")
    yield Bar(f"turns cut at {LONGEST_TURN_SECONDS:g} s", verdict.cut, "turns")
    yield Bar("turns that failed otherwise", verdict.failed, "turns", 0)
    for name, times in sorted(soak.killed.items()):
        yield Bar(f"{name} killed", times, "times")
    yield Bar("legs begun again", soak.again, "times")


@dataclass
class Watch:
    """Looks at the closed side of the tenant's moves: nothing may change there.

    A table's fingerprint is its number of rows and the sum of their versions (xmin), so any
    insert, update or delete that was committed shows, whoever did it, triggers or not.
    """

    # Store key -> URL for psycopg.
    stores: dict[str, str]
    # How often each closing of a store was looked at.
    looks: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    changes: list[str] = field(default_factory=list)
    _window: tuple[Any, ...] | None = None
    _seen: list[tuple[int, int]] = field(default_factory=list)

    def look(self, move: TenantMigration) -> None:
        """Look once, if a side is closed and not even the mover may write it."""
        window = self._of(move)
        if window is None:
            self._window = None
            return
        seen = self._fingerprint(window[1])
        move.refresh_from_db()
        # What was looked at counts if the side was closed before and after.
        if self._of(move) != window:
            self._window = None
            return
        self.looks[window] += 1
        if window == self._window and seen != self._seen:
            words = f"{self._seen} became {seen}"
            self.changes.append(f"{move} {move.phase}: closed {window[1]} changed: {words}")
        self._window, self._seen = window, seen

    def born(self) -> int:
        """Return how many of the target's sessions the source does not have."""
        found = []
        for key in (SOURCE, TARGET):
            with psycopg.connect(self.stores[key]) as connection:
                app = f"support.{TENANT}"
                names = "SELECT user_id, id FROM sessions WHERE app_name = %s"
                found.append(set(connection.execute(names, (app,)).fetchall()))
        return len(found[1] - found[0])

    def left_on_the_source(self) -> int:
        """Return how many rows of the tenant the store has that its last move left."""
        return sum(count for count, _ in self._fingerprint(SOURCE))

    def _of(self, move: TenantMigration) -> tuple[Any, ...] | None:
        """Return which closing of which store this phase is within."""
        from django.db.models import F, Q

        from migrations_app.domain.phases import Phase

        # A fence that is left opens what it closed: the next one's closing is another.
        begun = move.events.filter(Q(now=Phase.DELTA) | Q(now=Phase.REVERSE_DELTA))
        closing = begun.exclude(was=F("now")).count()
        soaking = move.phase == Phase.REVERSE_DRAIN and move.came_from == Phase.SOAK
        if soaking or move.phase in (Phase.DELTA, Phase.VERIFY, Phase.TARGET, Phase.SOAK):
            return move.pk, SOURCE, closing
        if move.phase in (
            *(Phase.REVERSE_DELTA, Phase.REVERSE_VERIFY, Phase.REVERSE_TARGET, Phase.ROLLED_BACK),
        ):
            return move.pk, TARGET, closing
        # In a split both sides are open, also while the way back out of it waits for its proof.
        return None

    def _fingerprint(self, key: str) -> list[tuple[int, int]]:
        found = []
        with psycopg.connect(self.stores[key]) as connection:
            for table in TABLES:
                [row] = connection.execute(
                    f"SELECT count(*), coalesce(sum(xmin::text::bigint), 0)::bigint FROM {table}"
                    " WHERE app_name = %s",
                    (f"support.{TENANT}",),
                ).fetchall()
                found.append(row)
        return found


class Soak:
    """The installation, its agents, and who dies next."""

    def __init__(self, home: Path, stores: Sequence[str], seed: int, mode: str) -> None:
        from bench.scene import Resident, Scene

        keys = dict(zip((SOURCE, TARGET), stores, strict=True))
        self.home, self.dice, self.mode = home, random.Random(seed), mode
        self.scene = Scene(
            home=home,
            stores={
                k: url.replace("postgresql:", "postgresql+psycopg:") for k, url in keys.items()
            },
            cells={SOURCE: "cell-eu1-a", TARGET: "cell-eu1-b"},
            residents=(
                Resident(TENANT, "support", SOURCE, sessions=60, clients=4),
                Resident("bolt", "support", SOURCE, sessions=10),
                Resident("core", "billing", TARGET, sessions=10),
            ),
        )
        self.watch = Watch(keys)
        self.killed: Counter[str] = Counter()
        self.again = 0
        self.filled = 0
        # In split mode: how many sessions were born on the target before the abort.
        self.born: int | None = None
        self._died: dict[str, float] = {}
        self._next: dict[tuple[str, ...], float] = {}
        self._read: dict[Path, int] = {}
        self._counted = 0
        os.environ.update(self.scene.environment)
        self.supervisor = Supervisor(home / "log")

    def __enter__(self) -> Soak:
        return self

    def __exit__(self, *error: object) -> None:
        self.supervisor.stop()

    def run(self, turns: int) -> list[TenantMigration]:
        """Talk so many turns, through all legs; return the moves."""
        self._people()
        return self._split(turns) if self.mode == "split" else self._fence(turns)

    def _fence(self, turns: int) -> list[TenantMigration]:
        from migrations_app.domain.phases import Phase

        self._talk(turns * MOVE_AT)
        first = self._there_and_back(turns * BACK_AT)
        self._talk(turns * AGAIN_AT, first)
        again = self._leg(lambda: self._move(soak_seconds=SOAK_SECONDS), Phase.DONE)
        self._talk(turns)
        return [first, again]

    def _split(self, turns: int) -> list[TenantMigration]:
        from durable.clock import database_now
        from migrations_app import services
        from migrations_app.domain.phases import Phase

        there, back, split, abort, again = (turns * part for part in SPLIT_AT)
        self._talk(there)
        first = self._there_and_back(back)
        self._talk(split, first)
        second = self._leg(
            lambda: self._move(soak_seconds=SOAK_SECONDS, idle_bound_seconds=86_400.0),
            Phase.SPLIT,
        )
        # On a slow machine the legs before it have taken those turns already.
        self._talk(max(abort, self._turns() - self.filled + turns * SPLIT_FOR), second)

        def abandon() -> TenantMigration:
            self.born = self.watch.born()
            services.abort(second, by="bench", reason="not now", now=database_now())
            return second

        self._leg(abandon, Phase.ROLLED_BACK)
        self._talk(again, second)
        third = self._leg(lambda: self._move(soak_seconds=SOAK_SECONDS), Phase.DONE)
        self._talk(turns)
        return [first, second, third]

    def _there_and_back(self, turns: float) -> TenantMigration:
        """Move, stay until so many turns have been talked in all, and roll back."""
        from durable.clock import database_now
        from migrations_app import services
        from migrations_app.domain.phases import Phase

        move = self._leg(lambda: self._move(soak_seconds=86_400.0), Phase.SOAK)
        self._talk(turns, move)

        def back() -> TenantMigration:
            services.rollback(move, by="bench", reason="the way back", now=database_now())
            return move

        return self._leg(back, Phase.ROLLED_BACK)

    def _people(self) -> None:
        """Start the installation, bring everybody in, let the agents begin to talk."""
        from durable.clock import database_now

        port = servers.free_port()
        tokens = self.scene.onboard(now=database_now())
        fills = self.scene.fills()
        self.supervisor.start(*installation(port), *fills)
        self._until(lambda: not any(self.supervisor.running(fill.name) for fill in fills))
        self.filled = self._turns()
        self.supervisor.start(
            *self.scene.fleets(
                FLEETS,
                address=f"http://127.0.0.1:{port}",
                tokens=tokens,
                think_seconds=0.0,
                longest_turn_seconds=LONGEST_TURN_SECONDS,
                born=BORN[self.mode],
            )
        )
        now = time.monotonic()
        kills = KILLS[self.mode].items()
        self._next = {names: now + self.dice.uniform(*span) for names, span in kills}

    def _move(
        self, *, soak_seconds: float, idle_bound_seconds: float = IDLE_BOUND_SECONDS
    ) -> TenantMigration:
        from bench.scene import start_move
        from migrations_app.domain.phases import Mode

        return start_move(
            TENANT,
            cell="cell-eu1-b",
            store=TARGET,
            by="bench",
            reason="thousands of turns",
            soak_seconds=soak_seconds,
            pace_per_second=PACE_PER_SECOND,
            mode=Mode(self.mode),
            idle_seconds=IDLE_SECONDS,
            idle_bound_seconds=idle_bound_seconds,
        )

    def _leg(self, begin: Callable[[], TenantMigration], goal: Phase) -> TenantMigration:
        """Begin a leg, and begin it anew where its budget ended it; return its move at the goal."""
        from migrations_app import queries
        from migrations_app.domain.phases import ENDED, Phase

        for attempt in range(ATTEMPTS):
            self.again += attempt > 0
            move = begin()

            def over(move: TenantMigration = move) -> bool:
                # A rollback that was stopped is in SOAK again, and its request is answered.
                stopped = move.phase == Phase.SOAK and move.rollback_requested_at is None
                if goal == Phase.SPLIT:
                    return move.phase in ENDED or queries.split_live(move)
                return move.phase in (goal, *ENDED) or (goal == Phase.ROLLED_BACK and stopped)

            self._until(over, move)
            if move.phase == goal:
                return move
        raise SystemExit(f"{move} was not in {goal} after {ATTEMPTS} attempts: {move.failure}")

    def _talk(self, turns: float, move: TenantMigration | None = None) -> None:
        """Go on until so many turns have been talked in all."""
        self._until(lambda: self._turns() - self.filled >= turns, move, turns)

    def _until(
        self, true: Callable[[], bool], move: TenantMigration | None = None, turns: float = 0.0
    ) -> None:
        """Keep everything running, kill who is due, look at what is closed, until it is true."""
        limit = time.monotonic() + LEG_SECONDS + turns / TURNS_PER_SECOND_AT_LEAST
        while not true():
            self.supervisor.tend()
            self._kill()
            if move is not None:
                move.refresh_from_db()
                self.watch.look(move)
            if time.monotonic() > limit:
                where = f"{move} in {move.phase}: {move.waiting_for} {move.failure}" if move else ""
                raise SystemExit(f"stands still after {self._turns()} turns. {where}")
            time.sleep(0.1)

    def _kill(self) -> None:
        now = time.monotonic()
        for names, at in self._next.items():
            if at > now:
                continue
            self._next[names] = now + self.dice.uniform(*KILLS[self.mode][names])
            name = self.dice.choice(names)
            # It must have come to work since it died last.
            if now - self._died.get(name, 0.0) > REST_SECONDS:
                self._died[name] = now
                self.killed[name] += 1
                os.kill(self.supervisor.pid(name), signal.SIGKILL)

    def _turns(self) -> int:
        """Return how many turns have been journalled, each byte read once."""
        for path in self.scene.journals:
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
            # The last line may be half written.
            whole = text[: text.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            self._counted += whole.count(b'"kind":"turn"')
        return self._counted


def _fences(move: TenantMigration) -> list[tuple[str, float]]:
    """Return of each of its fences what it was, and for how many seconds it was closed."""
    last = move.came_from != "", str(move.fence_closed_at), str(move.fence_opened_at)
    past = [(f["back"], f["fence_closed_at"], f["fence_opened_at"]) for f in move.past_fences]
    return [
        (
            "fence back" if back else "fence",
            (datetime.fromisoformat(opened) - datetime.fromisoformat(closed)).total_seconds(),
        )
        for back, closed, opened in [*past, last]
    ]


if __name__ == "__main__":
    sys.exit(main())
