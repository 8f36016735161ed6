"""How fast sessions go from one PostgreSQL store to another (or to a file), and are proven equal.

Beside it: a bare binary `COPY TO | COPY FROM` of the same rows, the least that any copy
costs, and google-adk's own services replaying a sample, which is what a move without native
stores would do. Needs DATABASE_URL; makes and drops its own databases on that server.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from itertools import islice
from tempfile import TemporaryDirectory
from typing import Any

import psycopg

from bench import Bar, parser, report, rows
from migrations_app.ports import copy, digests_of_both, open_store
from migrations_app.ports.base import START, Key, SessionStore

CHUNK = 500  # what a step of BACKFILL takes
CHUNKS_ACROSS = 4  # into a store of another layout: no bar, so not all of it
ROUNDS = 3  # of each, in turn; the best of each counts, for others use the machine too
SAMPLE = 60  # sessions that ADK replays: it takes as long for these as we for all
CONCURRENCY = (1, 4, 8)


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__ or "")
    options.add_argument("--sessions", type=int, default=rows.SESSIONS)
    chosen = options.parse_args(argv)
    server = os.environ.get("DATABASE_URL", "")
    if not server.startswith("postgres"):
        options.error("DATABASE_URL must name a PostgreSQL server (`make bench` starts one).")
    return report(measure(server, chosen.sessions), as_json=chosen.json)


def measure(server: str, sessions: int) -> Iterator[Bar]:
    """Yield the figures, one after another as they are known."""
    users = max(1, sessions * rows.USERS // rows.SESSIONS)
    with rows.databases(server, 1) as (source,):
        rows.fill(source, sessions=sessions, users=users)
        yield Bar("sessions, 20 events of about 1 KB each", sessions, "sessions")
        plain, ours, proofs, grown = [], [], [], 0.0
        for _ in range(ROUNDS):
            with rows.databases(server, 2) as (bare_target, target):
                plain.append(bare(source, bare_target))
                before = peak_megabytes()
                copied, verified = move(source, target)
                grown = max(grown, peak_megabytes() - before)
                ours.append(copied)
                proofs.append(verified)
        floor, copying, both = min(plain), min(ours), min(map(sum, zip(ours, proofs, strict=True)))
        yield Bar("bare binary COPY TO | COPY FROM", floor, "s")
        yield Bar("copy", copying, "s")
        yield Bar("copy + verify", both, "s")
        yield Bar("copy + verify, sessions/s", sessions / both, "sessions/s")
        yield Bar("copy, times the bare COPY", copying / floor, "x", 1.25)
        yield Bar("copy + verify, times the bare COPY", both / floor, "x", 1.6)
        yield Bar("worker's memory grown by copying and verifying", grown, "MB", 64.0)
        for kind in ("adk-sql", "adk-sqlite"):
            yield Bar(f"to a file of {kind}, copy + verify", across(source, kind), "sessions/s")
        sample = min(SAMPLE, sessions)
        rates = {}
        for concurrency in CONCURRENCY:
            with rows.databases(server, 1) as (target,):
                rates[concurrency] = asyncio.run(replay(source, target, sample, concurrency))
            yield Bar(
                f"google-adk's replay, {concurrency} at once", rates[concurrency], "sessions/s"
            )
        rate = sessions / both
        yield Bar("copy + verify, times the replay", rate / rates[1], "x", 100.0, "at least")
        best = max(rates.values())
        yield Bar("copy + verify, times the best replay", rate / best, "x", 60.0, "at least")


def bare(source: str, target: str) -> float:
    """Pipe the rows of both tables over, whole; return the seconds it took."""
    with psycopg.connect(target) as there:
        for statement in rows.TABLES:
            there.execute(statement)
    with psycopg.connect(source) as here, psycopg.connect(target) as there:
        began = time.perf_counter()
        for table in ("sessions", "events"):
            with (
                here.cursor().copy(f"COPY {table} TO STDOUT (FORMAT binary)") as out,
                there.cursor().copy(f"COPY {table} FROM STDIN (FORMAT binary)") as into,
            ):
                for data in out:
                    into.write(data)
        there.commit()
        return time.perf_counter() - began


def move(source: str, target: str) -> tuple[float, float]:
    """Copy by chunks and compare each behind its copy, as BACKFILL does; return both times."""
    copying = comparing = 0.0
    with ExitStack() as stack:
        here, there = (stack.enter_context(opened(url)) for url in (source, target))
        there.provision()
        there.adopt(there.guard(), mover=True, agents=False)
        began = time.perf_counter()
        for keys in chunks(here):
            if len(copy(here, there, keys).copied) != len(keys):
                raise AssertionError("a session vanished while nobody wrote")
            copied = time.perf_counter()
            ours, theirs = digests_of_both(here, there, keys)
            for key in keys:
                if ours[key][:2] != theirs[key][:2]:
                    raise AssertionError(f"{key} differs")
            copying += copied - began
            began = time.perf_counter()
            comparing += began - copied
    return copying, comparing


def across(source: str, kind: str) -> float:
    """Copy the first chunks into a file and compare them; return sessions/s. Rows are converted."""
    with TemporaryDirectory() as folder, ExitStack() as stack:
        here = stack.enter_context(opened(source))
        os.environ["BENCH_FILE"] = f"sqlite:///{folder}/store.db"
        named: dict[str, Any] = {"app_name": rows.APP, "move": 1, "claim": 1}
        there = stack.enter_context(open_store(kind, "env:BENCH_FILE", **named))
        there.provision()
        there.adopt(None, mover=True, agents=False)
        began, count = time.perf_counter(), 0
        for keys in islice(chunks(here), CHUNKS_ACROSS):
            count += len(copy(here, there, keys).copied)
            ours, theirs = digests_of_both(here, there, keys)
            if {key: d[:2] for key, d in ours.items()} != {key: d[:2] for key, d in theirs.items()}:
                raise AssertionError("a session differs")
        return count / (time.perf_counter() - began)


def chunks(store: SessionStore) -> Iterator[list[Key]]:
    """Yield the tenant's keys in chunks, in the store's order."""
    after = START
    while page := store.page(after, CHUNK):
        keys = [key for key, _ in page]
        after = keys[-1]
        yield keys


def opened(url: str) -> AbstractContextManager[SessionStore]:
    """Open a store by a variable of its own, as a worker would."""
    name = f"BENCH_{url.rpartition('/')[2].upper()}"
    os.environ[name] = url
    return open_store("adk-sql", f"env:{name}", app_name=rows.APP, move=1, claim=1)


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


async def replay(source: str, target: str, sessions: int, concurrency: int) -> float:
    """Copy sessions through google-adk's services, as the article's copier does; return sessions/s.

    Read in full, delete the target's copy, create with the session's own state, append.
    """
    from google.adk.sessions import DatabaseSessionService

    scheme = "postgresql+psycopg://"
    here = DatabaseSessionService(source.replace("postgresql://", scheme))
    there = DatabaseSessionService(target.replace("postgresql://", scheme))
    with psycopg.connect(source) as connection:
        keys = connection.execute(
            "SELECT user_id, id FROM sessions WHERE app_name = %s ORDER BY 1, 2 LIMIT %s",
            (rows.APP, sessions),
        ).fetchall()
    await there.prepare_tables()
    gate = asyncio.Semaphore(concurrency)

    async def one(user: str, name: str) -> None:
        named: dict[str, Any] = {"app_name": rows.APP, "user_id": user, "session_id": name}
        async with gate:
            read = await here.get_session(**named)
            assert read is not None
            await there.delete_session(**named)
            own = {k: v for k, v in read.state.items() if not k.startswith(("app:", "user:"))}
            made = await there.create_session(**named, state=own)
            for event in read.events:
                await there.append_event(made, event)

    began = time.perf_counter()
    await asyncio.gather(*(one(*key) for key in keys))
    took = time.perf_counter() - began
    await here.close()
    await there.close()
    return len(keys) / took


if __name__ == "__main__":
    sys.exit(main())
