"""What a web process answers to runtimes: polls, policies of 10,000 tenants, and reports.

A real web process on PostgreSQL is asked over loopback. Unchanged polls are held against a bare
Django-Ninja endpoint of the same process that runs the same two statements and nothing else, a
second of one after a second of the other, so that a noisy machine is noisy for both.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench import Bar, parser, report, rows, servers
from bench.plane import control_plane, runtime_token

CELL = "cell-bench"
TENANTS = 10_000
# Connections at once, as so many instances have.
CONNECTIONS = 8
ROUNDS, ROUND_SECONDS = 9, 1.0
SNAPSHOTS = 5
# Tenants that an instance has served since its last report.
LINES = 20
BY = "bench"


@dataclass(frozen=True)
class Instance:
    """One that has joined and holds the policy."""

    key: str
    version: str
    boot: str


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__ or "")
    options.add_argument("--tenants", type=int, default=TENANTS)
    chosen = options.parse_args(argv)
    with (
        TemporaryDirectory(prefix="switchyard-bench-") as home,
        servers.environment(browser=False, durable=True) as found,
        rows.databases(found["DATABASE_URL"], 1) as (own,),
        control_plane(own, SWITCHYARD_HOME=home, REDIS_URL=""),
    ):
        return report(measure(chosen.tenants, Path(home)), as_json=chosen.json)


def measure(tenants: int, home: Path) -> Iterator[Bar]:
    """Yield the figures."""
    token = fill(tenants)
    from platform_admin.processes import Supervisor, installation

    port = servers.free_port()
    web = next(process for process in installation(port) if process.name == "web")
    peer = {"DJANGO_SETTINGS_MODULE": "bench.peer.settings"}
    with Supervisor(home / "log", environment=peer) as supervisor:
        supervisor.start(web)
        yield from asyncio.run(_figures(tenants, Caller(port, token)))


async def _figures(tenants: int, caller: Caller) -> list[Bar]:
    await caller.ready()
    instances = [await _joined(caller, number) for number in range(CONNECTIONS)]
    polls = [
        caller.request("GET", f"/api/v1/runtime/policy?instance={one.key}&since={one.version}")
        for one in instances
    ]
    bare = [caller.request("GET", f"/peer/poll?instance={one.key}") for one in instances]
    await caller.rate(polls, 304)
    ours, theirs = [], []
    for _ in range(ROUNDS):
        ours.append(await caller.rate(polls, 304))
        theirs.append(await caller.rate(bare, 304))
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    figures = [
        Bar("unchanged polls", statistics.median(ours), "/s"),
        Bar("a bare endpoint, the same two statements", statistics.median(theirs), "/s"),
        Bar("unchanged polls, of the bare endpoint's", ratio, "x", 0.8, "at least"),
    ]
    first = instances[0]
    whole = caller.request("GET", f"/api/v1/runtime/policy?instance={first.key}")
    epoch, _, number = first.version.rpartition(".")
    delta = caller.request(
        "GET", f"/api/v1/runtime/policy?instance={first.key}&since={epoch}.{int(number) - 1}"
    )
    for name, asked in ((f"full policy of {tenants:,} tenants", whole), ("a delta", delta)):
        took, size = await caller.timed(asked)
        figures += [Bar(name, took * 1000, "ms"), Bar(f"{name}, its answer", size / 1024, "KiB")]
    reports = await caller.rate([_reports(caller, one) for one in instances], 200)
    return [
        *figures,
        Bar(f"reports of {LINES} tenants each", reports, "/s"),
        Bar("usage lines taken", reports * LINES, "/s"),
    ]


class Caller:
    """Asks one server over connections that stay open."""

    def __init__(self, port: int, token: str) -> None:
        self._port, self._token = port, token

    def request(self, method: str, path: str, body: Any = None) -> bytes:
        """Return the bytes of one request."""
        content = b"" if body is None else json.dumps(body).encode()
        head = [
            f"{method} {path} HTTP/1.1",
            f"Host: 127.0.0.1:{self._port}",
            f"Authorization: Bearer {self._token}",
            *(
                [f"Content-Type: application/json\r\nContent-Length: {len(content)}"]
                * bool(content)
            ),
        ]
        return "\r\n".join(head).encode() + b"\r\n\r\n" + content

    async def ready(self) -> None:
        """Wait until it answers."""
        asked, limit = self.request("GET", "/readyz"), time.monotonic() + 60
        while True:
            try:
                await self.one(asked)
                return
            except OSError:
                if time.monotonic() > limit:
                    raise
                await asyncio.sleep(0.1)

    async def one(self, asked: bytes) -> tuple[int, bytes]:
        """Send one request; return status and body."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=2**26)
        try:
            return await _ask(reader, writer, asked)
        finally:
            writer.close()

    async def timed(self, asked: bytes) -> tuple[float, int]:
        """Return the median time of one request alone, in seconds, and the size of its answer."""
        took = []
        for _ in range(SNAPSHOTS):
            began = time.perf_counter()
            status, body = await self.one(asked)
            took.append(time.perf_counter() - began)
            _check(status, body, 200)
        return statistics.median(took), len(body)

    async def rate(self, asked: Sequence[bytes | Iterator[bytes]], expected: int) -> float:
        """Return how many are answered a second, each asked again and again on one connection."""
        until = time.perf_counter() + ROUND_SECONDS

        async def again(one: bytes | Iterator[bytes]) -> int:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            each = itertools.repeat(one) if isinstance(one, bytes) else one
            count = 0
            try:
                while time.perf_counter() < until:
                    _check(*(await _ask(reader, writer, next(each))), expected=expected)
                    count += 1
            finally:
                writer.close()
            return count

        began = time.perf_counter()
        counts = await asyncio.gather(*map(again, asked))
        return sum(counts) / (time.perf_counter() - began)


async def _ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: bytes
) -> tuple[int, bytes]:
    writer.write(asked)
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    length = next(
        (int(line[15:]) for line in head.split("\r\n") if line.startswith("content-length:")), 0
    )
    return int(head.split(" ", 2)[1]), await reader.readexactly(length)


def _check(status: int, body: bytes, expected: int) -> None:
    if status != expected:
        raise SystemExit(f"The server answered {status}, not {expected}: {body[:500].decode()}")


def _reports(caller: Caller, instance: Instance) -> Iterator[bytes]:
    minute = time.strftime("%Y-%m-%dT%H:%M:00Z", time.gmtime())
    for seq in itertools.count(1):
        usage = [
            {"tenant": _slug(number), "minute": minute, "turns": 3, "model_calls": 6, "tokens": 900}
            for number in range(LINES)
        ]
        said = {
            "instance": instance.key,
            "boot": instance.boot,
            "seq": seq,
            "applied_version": instance.version,
            "in_flight": {_slug(number): 1 for number in range(LINES)},
            "usage": usage,
        }
        yield caller.request("POST", "/api/v1/runtime/reports", said)


async def _joined(caller: Caller, number: int) -> Instance:
    boot = f"boot-{number}"
    asked = {
        "cell": CELL,
        "name": f"agents-{number}",
        "boot": boot,
        "longest_turn_seconds": 30,
    }
    answers = []
    for request in (
        lambda: caller.request("POST", "/api/v1/runtime/instances", asked),
        lambda: caller.request("GET", f"/api/v1/runtime/policy?instance={answers[0]['instance']}"),
    ):
        status, body = await caller.one(request())
        _check(status, body, 200)
        answers.append(json.loads(body))
    return Instance(answers[0]["instance"], answers[1]["version"], boot)


def fill(tenants: int) -> str:
    """Register a cell with so many tenants; return a runtime's token.

    The first by the service that people use, the others as copies of its rows.
    """
    from durable.clock import database_now
    from tenants import services
    from tenants.models import Agent, Placement, PolicyEntry, Scope, Tenant

    now = database_now()
    region = services.add_region("bench", name="Bench", by=BY, now=now)
    cell = services.add_cell(CELL, region=region, by=BY, now=now)
    cell = services.verify_quota(cell, tokens_per_minute=10**9, by=BY, now=now)
    store = services.add_store(
        "store-bench", region=region, kind="adk-sql", address_from="env:BENCH", by=BY, now=now
    )
    first = services.add_tenant(
        _slug(0),
        name="First",
        app_name=f"support.{_slug(0)}",
        cell=cell,
        store=store,
        by=BY,
        now=now,
    )
    agent = Agent.objects.get()
    made = Tenant.objects.bulk_create(
        Tenant(slug=_slug(n), name=f"Tenant {n}", app_name=f"support.{_slug(n)}", agent=agent)
        for n in range(1, tenants)
    )
    Scope.objects.bulk_create(
        Scope(tenant=one, version=1, at=now, by=BY, reason="Onboarded") for one in made
    )
    home = Placement.objects.get(tenant=first)
    Placement.objects.bulk_create(
        Placement(
            tenant=one,
            cell=cell,
            store=store,
            placement_version=home.placement_version,
            feed_version=home.feed_version,
        )
        for one in made
    )
    entry = PolicyEntry.objects.get(tenant=first)
    PolicyEntry.objects.bulk_create(
        PolicyEntry(
            cell=cell,
            tenant=one,
            version=entry.version,
            accepts=entry.accepts,
            placement_version=entry.placement_version,
            store=store,
            document={**entry.document, "tenant": one.slug, "app_name": one.app_name},
        )
        for one in made
    )
    # The newest change is of one tenant, so that there is a delta.
    services.rotate(made[0], by=BY, reason="bench", now=now)
    return runtime_token([cell], by=BY)


def _slug(number: int) -> str:
    return f"tenant-{number}"


if __name__ == "__main__":
    sys.exit(main())
