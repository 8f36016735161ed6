"""How long the fence of the article's tenant stays closed, with nothing in flight.

A real move by the engine, its rows and its stores on PostgreSQL, a real policy client in
each cell: 12,600 sessions are copied, 900 are touched, the fence closes and opens. Beside it
a bare `COPY` of those 900 by a join on a temporary key table, the median of three of them, each
into an empty database. Needs DATABASE_URL; makes and drops its own databases on that server.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import psycopg

from bench import Bar, parser, report, rows
from bench.plane import control_plane, runtime_token

TOUCHED = 900
SMALL = 1_000
BARE_ROUNDS = 3  # it takes half a second, in which somebody else may use the machine
NOBODY = 60.0  # seconds after which somebody who should have spoken has not
TABLES = ("sessions", "events")


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__ or "")
    options.add_argument("--sessions", type=int, default=rows.SESSIONS)
    chosen = options.parse_args(argv)
    server = os.environ.get("DATABASE_URL", "")
    if not server.startswith("postgres"):
        options.error("DATABASE_URL must name a PostgreSQL server (`make bench` starts one).")
    with rows.databases(server, 1) as (own,), control_plane(own):
        return report(measure(server, chosen.sessions), as_json=chosen.json)


def measure(server: str, sessions: int) -> Iterator[Bar]:
    """Yield the figures, one after another as they are known."""
    with rows.databases(server, 2 + BARE_ROUNDS) as (source, target, *bare_targets):
        # First a small tenant: it warms what is warm in a worker, and shows what memory a
        # tenant costs that is a twelfth of the size.
        small = Tenant("small", source, target, sessions=min(SMALL, sessions))
        small.run(touched=0)
        before = peak_megabytes()
        large = Tenant("large", source, target, sessions=sessions)
        move, accepted = large.run(touched=min(TOUCHED, sessions))
        grown = peak_megabytes() - before
        floor = statistics.median(
            bare(source, empty, large.app_name, large.touched) for empty in bare_targets
        )
    closed = (move.fence_opened_at - move.fence_closed_at).total_seconds()
    expected = move.quote["expected"]
    yield Bar("sessions, 20 events of about 1 KB each", sessions, "sessions")
    yield Bar("touched after the first pass", len(large.touched), "sessions")
    yield Bar("backfill, engine and all", sessions / large.backfill_seconds, "sessions/s")
    for name, seconds in large.phases.items():
        yield Bar(f"in {name}", seconds, "s")
    yield Bar("bare COPY of the touched sessions by join", floor, "s")
    yield Bar("fence, closed to the target's entry committed", closed, "s")
    yield Bar("fence, expected", expected, "s")
    yield Bar("fence, closed to the first accepted turn", accepted, "s")
    yield Bar("fence, times the bare COPY", closed / floor, "x", 6.0)
    yield Bar("fence, away from expected", abs(closed / expected - 1) * 100, "%", 25.0)
    yield Bar("worker's memory grown with the tenant", grown, "MB", 32.0)


class Tenant:
    """One tenant of the bench and its move."""

    def __init__(
        self, slug: str, source: str, target: str, *, sessions: int, events: int = rows.EVENTS
    ) -> None:
        self.slug, self.sessions, self.events = slug, sessions, events
        self.app_name = f"bench.{slug}"
        self.urls = {f"{slug}-source": source, f"{slug}-target": target}
        self.source = source
        self.touched: list[tuple[str, str]] = []
        self.phases: dict[str, float] = {}
        self.backfill_seconds = 0.0

    def run(self, *, touched: int) -> tuple[Any, float]:
        """Move the tenant; return its row, and seconds from closing to the first accepted turn."""
        from durable.clock import database_now
        from durable.driver import advance
        from migrations_app import services, steps
        from migrations_app.domain.phases import Phase
        from migrations_app.models import TenantMigration

        self.fill()
        tenant, cells, stores = self.onboard()
        with Runtimes(cells, stores) as runtimes:
            move = services.start(
                tenant,
                target_cell=cells["target"],
                target_store=stores["target"],
                by="bench",
                reason="measured",
                now=database_now(),
                automatic=True,
                soak_seconds=0,
                offboard_automatically=False,
            )
            machine = steps.machine(lambda pk, phase, seconds: None)
            while move.phase != Phase.SOAK:
                stage, phase = move.stage, move.phase
                began = time.perf_counter()
                if not advance(machine, move.pk, clock=database_now):
                    time.sleep(0.01)
                spent = time.perf_counter() - began
                move = TenantMigration.objects.get(pk=move.pk)
                if phase == Phase.BACKFILL and stage == "copy":
                    self.backfill_seconds += spent
                elif phase in (Phase.DRAIN, Phase.DELTA, Phase.VERIFY, Phase.TARGET):
                    self.phases[phase.upper()] = self.phases.get(phase.upper(), 0.0) + spent
                if move.stage == "ready" and stage != "ready" and touched and not self.touched:
                    self.touch(touched)
                    runtimes.served(self.slug, self.touched)
                    self._until_reported(move)
                if phase == Phase.BACKFILL and move.phase == Phase.DRAIN:
                    runtimes.knock(self.slug)
                if move.ended_at is not None:
                    raise SystemExit(f"the move was aborted: {move.events.first().note}")
            accepted = runtimes.opened_at() - move.fence_closed_at.timestamp()
        return move, accepted

    def fill(self) -> None:
        """Give it its sessions."""
        rows.fill(
            self.source,
            app_name=self.app_name,
            sessions=self.sessions,
            users=max(1, self.sessions * rows.USERS // rows.SESSIONS),
            events=self.events,
        )

    def onboard(self) -> tuple[Any, Mapping[str, Any], Mapping[str, Any]]:
        """Register it, with a cell and a store for each side."""
        from durable.clock import database_now
        from tenants import services

        now = database_now()
        region = services.add_region(f"{self.slug}-eu", name="EU", by="bench", now=now)
        cells, stores = {}, {}
        for side in ("source", "target"):
            cell = services.add_cell(
                f"{self.slug}-cell-{side}",
                region=region,
                quota_tokens_per_minute=5_000_000,
                by="bench",
                now=now,
            )
            services.verify_quota(cell, tokens_per_minute=5_000_000, by="bench", now=now)
            cell.refresh_from_db()
            key = f"{self.slug}-{side}"
            variable = f"BENCH_{key.upper().replace('-', '_')}"
            os.environ[variable] = self.urls[key]
            cells[side] = cell
            stores[side] = services.add_store(
                key,
                region=region,
                kind="adk-sql",
                address_from=f"env:{variable}",
                by="bench",
                now=now,
            )
        tenant = services.add_tenant(
            self.slug,
            name=self.slug,
            app_name=self.app_name,
            cell=cells["source"],
            store=stores["source"],
            by="bench",
            now=now,
        )
        return tenant, cells, stores

    def touch(self, count: int) -> None:
        """Add one event to `count` sessions, spread over the tenant, as turns would."""
        with psycopg.connect(self.source) as connection:
            self.touched = connection.execute(
                "UPDATE sessions SET update_time = update_time + interval '1 hour'"
                " WHERE app_name = %s AND (substr(id, 3)::int %% %s) = 0"
                " AND substr(id, 3)::int < %s"
                " RETURNING user_id, id",
                (self.app_name, self.sessions // count, self.sessions // count * count),
            ).fetchall()
            connection.cursor().executemany(
                "INSERT INTO events SELECT gen_random_uuid()::text, app_name, user_id, session_id,"
                " invocation_id, timestamp + interval '1 hour', event_data FROM events"
                " WHERE app_name = %s AND user_id = %s AND session_id = %s LIMIT 1",
                [(self.app_name, *key) for key in self.touched],
            )

    def _until_reported(self, move: Any) -> None:
        """Wait until the runtime's reports have named every touched session."""
        from migrations_app import queries

        until = time.monotonic() + NOBODY
        while queries.changed_since_pass(move) < len(self.touched):
            if time.monotonic() > until:
                raise SystemExit("the instance never reported what it served")
            time.sleep(0.05)


class Runtimes:
    """A process with a policy client in each cell, as agents would run them: not in ours.

    Beside the mover, in its process, their polls would take the interpreter's lock from it.
    """

    def __init__(self, cells: Mapping[str, Any], stores: Mapping[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        places = {
            side: (cell.slug, runtime_token([cell], by="bench")) for side, cell in cells.items()
        }
        keys = [store.key for store in stores.values()]
        self.process = context.Process(target=_serve, args=(theirs, places, keys), daemon=True)

    def __enter__(self) -> Runtimes:
        self.process.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.pipe.send(None)
        self.process.join(NOBODY)
        self.process.terminate()

    def served(self, tenant: str, keys: Sequence[tuple[str, str]]) -> None:
        """Report these sessions as served, from the source's cell."""
        self.pipe.send(("served", tenant, keys))

    def knock(self, tenant: str) -> None:
        """Knock at the target's fence from now on."""
        self.pipe.send(("knock", tenant, ()))

    def opened_at(self) -> float:
        """Return when the target let a turn in, on this machine's clock."""
        if not self.pipe.poll(NOBODY):
            raise SystemExit("the target never accepted a turn")
        return float(self.pipe.recv())


def _serve(pipe: Any, places: Mapping[str, tuple[str, str]], stores: Sequence[str]) -> None:
    """Run the clients until told to end; they talk to the API without a socket."""
    import django

    django.setup()
    from django.test import Client

    from agent_runtime import PolicyClient, RetryLater

    http = Client(raise_request_exception=False, SERVER_NAME="localhost")

    def transport(
        method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> tuple[int, Mapping[str, str], bytes]:
        answer = http.generic(
            method, path, body or b"", content_type="application/json", headers=dict(headers)
        )
        return answer.status_code, dict(answer.items()), answer.content

    clients = {
        side: PolicyClient(
            "http://bench",
            secret,
            cell=cell,
            name=f"{cell}-1",
            build="bench",
            stores=stores,
            longest_turn_seconds=30,
            longest_tool_seconds=5,
            transport=transport,
        )
        for side, (cell, secret) in places.items()
    }
    for client in clients.values():
        client.start()
    while (order := pipe.recv()) is not None:
        what, tenant, keys = order
        if what == "served":
            for user, session in keys:
                clients["source"].usage.served(tenant, user, session)
            continue
        until = time.monotonic() + NOBODY
        while time.monotonic() < until:
            try:
                with clients["target"].fence.enter(tenant):
                    pipe.send(time.time())
                    break
            except RetryLater:
                time.sleep(0.01)
    for client in clients.values():
        client.stop()


def bare(source: str, target: str, app_name: str, keys: Sequence[tuple[str, str]]) -> float:
    """Copy these sessions by a join on a temporary key table, and nothing else; return seconds."""
    with psycopg.connect(target) as there:
        for statement in rows.TABLES:
            there.execute(statement)
    with psycopg.connect(source) as here, psycopg.connect(target) as there:
        began = time.perf_counter()
        here.execute("CREATE TEMPORARY TABLE wanted(user_id text, session_id text)")
        with here.cursor().copy("COPY wanted FROM STDIN") as into:
            for key in keys:
                into.write_row(key)
        here.execute("ANALYZE wanted")
        for table, column in zip(TABLES, ("id", "session_id"), strict=True):
            query = (
                f"COPY (SELECT t.* FROM {table} t JOIN wanted w ON t.user_id = w.user_id"
                f" AND t.{column} = w.session_id WHERE t.app_name = '{app_name}')"
                " TO STDOUT (FORMAT binary)"
            )
            with (
                here.cursor().copy(query) as out,
                there.cursor().copy(f"COPY {table} FROM STDIN (FORMAT binary)") as to,
            ):
                for data in out:
                    to.write(data)
        there.commit()
        return time.perf_counter() - began


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    sys.exit(main())
