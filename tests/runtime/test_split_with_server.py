"""A split from end to end: real control plane, two cells, gateways, real SQLite stores.

The engine's part (what is published when, and the copy) is played here by hand, so that each
instance and each gateway hears of each version at another time.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.db import connections, transaction

from agent_runtime import Gateway, Host, Offer, Placements, PolicyClient, RetryLater
from agent_runtime.transport import Answer
from bench import scripted
from bench.audit_events import Home, audit
from bench.fleet import Config, Fleet, Talk
from bench.noting import Noting
from durable.clock import database_now
from tenants import queries, services
from tenants.domain.roles import TokenRole
from tests import make
from tests.runtime.test_with_server import Network

pytestmark = pytest.mark.django_db(transaction=True, serialized_rollback=True)

APP, USER = "support.acme", "u1"
A, B = "store-eu1-a", "store-eu1-b"
WITHIN_SECONDS = 60.0


class Engine:
    """What a split move publishes and copies, one act at a time."""

    def __init__(self, cast: make.Cast, paths: Mapping[str, Path]) -> None:
        self.cast, self.paths = cast, paths
        self.home, self.far = cast.cell, cast.other_cell

    def announce(self) -> int:
        with transaction.atomic():
            return services.announce(self.cast.acme, self.far, self.cast.other_store)

    def publish(self, cell: Any, accepts: Any) -> int:
        with transaction.atomic():
            return services.publish(self.cast.acme, cell, accepts=accepts)

    def split(self) -> int:
        return self._place(services.split)

    def place(self) -> int:
        return self._place(services.place)

    def unsplit(self) -> int:
        with transaction.atomic():
            return services.unsplit(self.cast.acme, by="mover", reason="b", now=database_now())

    def _place(self, how: Callable[..., int]) -> int:
        with transaction.atomic():
            return how(
                self.cast.acme,
                cell=self.far,
                store=self.cast.other_store,
                by="mover",
                reason="a split",
                now=database_now(),
            )

    def older(self, version: int) -> bool:
        return queries.older_proof(self.home, self.cast.acme, version, now=database_now()).drained

    def drained(self, version: int) -> bool:
        return queries.fence_proof(self.home, self.cast.acme, version, now=database_now()).drained

    def announced(self, version: int) -> bool:
        return not queries.announced_check(self.far, self.cast.acme, version, now=database_now())

    def copy(self) -> None:
        """Let the target have every session that the source has, as the source has it."""
        with sqlite3.connect(self.paths[B], timeout=20) as target:
            target.execute("ATTACH ? AS source", (str(self.paths[A]),))
            for table in ("events", "sessions"):
                target.execute(
                    f"DELETE FROM {table} WHERE app_name = ? AND (user_id,"
                    f" {'id' if table == 'sessions' else 'session_id'}) IN"
                    " (SELECT user_id, id FROM source.sessions WHERE app_name = ?)",
                    (APP, APP),
                )
            # Of what both sides have of a user, or of the app, the newer row.
            newer = (
                " ON CONFLICT DO UPDATE SET state = excluded.state, update_time ="
                " excluded.update_time WHERE excluded.update_time > {}.update_time"
            )
            for table in ("app_states", "user_states", "sessions", "events"):
                target.execute(
                    f"INSERT INTO {table} SELECT * FROM source.{table} WHERE app_name = ?"
                    + (newer.format(table) if table.endswith("_states") else ""),
                    (APP,),
                )
        target.close()

    def sessions(self, store: str) -> set[str]:
        with sqlite3.connect(self.paths[store], timeout=20) as file:
            rows = file.execute("SELECT id FROM sessions WHERE app_name = ?", (APP,)).fetchall()
        file.close()
        return {name for (name,) in rows}


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, Path]:
    """Two stores that have their tables."""
    paths = {key: tmp_path / f"{key}.sqlite3" for key in (A, B)}

    async def provision() -> None:
        for path in paths.values():
            store = Noting(f"sqlite+aiosqlite:///{path}", "", {})
            await store.prepare_tables()
            await store.close()

    asyncio.run(provision())
    return paths


@pytest.fixture
def engine(cast: make.Cast, paths: dict[str, Path]) -> Engine:
    return Engine(cast, paths)


@dataclass(frozen=True)
class Secrets:
    runtime: str
    gateway: str


@pytest.fixture
def tokens(cast: make.Cast) -> Secrets:
    now = database_now()
    until = now + timedelta(days=1)
    _, runtime = services.make_token(
        "agents",
        role=TokenRole.RUNTIME,
        cells=[cast.cell, cast.other_cell],
        expires_at=until,
        by=make.BY,
        now=now,
    )
    _, gateway = services.make_token(
        "gateway", role=TokenRole.GATEWAY, expires_at=until, by=make.BY, now=now
    )
    return Secrets(runtime, gateway)


# --- step by step ---------------------------------------------------------------------------


def in_its_own_thread(network: Network) -> Callable[..., Answer]:
    """Carry calls that come from threads of their own, whose connections nobody else closes."""

    def call(method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> Answer:
        try:
            return network(method, path, body, headers)
        finally:
            connections.close_all()

    return call


class Installation:
    """Two instances in each of two cells, and two gateways; each learns when it is told to."""

    def __init__(self, engine: Engine, tokens: Secrets) -> None:
        self.engine = engine
        self.taken: dict[str, str] = {}
        self.runner = asyncio.Runner()
        self.instances: dict[str, list[PolicyClient]] = {}
        self.hosts: dict[str, list[Host]] = {}
        stores = {
            key: partial(Noting, f"sqlite+aiosqlite:///{path}", key, self.taken)
            for key, path in engine.paths.items()
        }
        for cell in (engine.home, engine.far):
            self.instances[cell.slug] = [
                PolicyClient(
                    "http://plane.invalid",
                    tokens.runtime,
                    cell=cell.slug,
                    name=f"{cell.slug}-{number}",
                    build="b1",
                    stores=list(stores),
                    longest_turn_seconds=60,
                    longest_tool_seconds=30,
                    transport=Network(),
                )
                for number in range(2)
            ]
            self.hosts[cell.slug] = [
                Host(
                    client,
                    stores,
                    lambda entry, service: scripted.build_runner(entry.app_name, service),
                )
                for client in self.instances[cell.slug]
            ]
        self.placements = [
            Placements(
                "http://plane.invalid", tokens.gateway, transport=in_its_own_thread(Network())
            )
            for _ in range(2)
        ]
        # The first recovers by itself; the second hears of nothing before it is told.
        self.gateways = [
            Gateway(self.placements[0], patience_seconds=0.0),
            Gateway(Deaf(self.placements[1]), patience_seconds=0.0),  # type: ignore[arg-type]
        ]
        # Session -> (event id, store) of each event that a client was told of, in order.
        self.told: dict[str, list[tuple[str, str]]] = {}
        self.born: dict[str, str] = {}
        self.learn()

    def learn(self, *cells: Any, numbers: tuple[int, ...] = (0, 1)) -> None:
        for cell in cells or (self.engine.home, self.engine.far):
            for number in numbers:
                client = self.instances[cell.slug][number]
                client.tick()
                assert client.trouble == ""
        if not cells:
            for placements in self.placements:
                assert placements.refresh()

    def close(self) -> None:
        async def close() -> None:
            for hosts in self.hosts.values():
                for host in hosts:
                    await host.close()

        self.runner.run(close())
        self.runner.close()

    def turn(self, session: str, *, gateway: int = 0, number: int = 0) -> str:
        """Talk once; return the store that took the turn, or the name of the refusal."""

        def send(offer: Offer) -> AsyncGenerator[Any, None]:
            return self.hosts[offer.side.cell][number].run(
                "acme",
                USER,
                session,
                scripted.message("hi"),
                placement_version=offer.placement_version,
                sent_on=offer.sent_on,
            )

        async def talk() -> str:
            stores = set()
            async for event in self.gateways[gateway].stream("acme", send):
                store = self.taken.pop(event.id)
                stores.add(store)
                self.told.setdefault(session, []).append((event.id, store))
            [store] = stores
            return store

        return self._try(talk())

    def birth(self, session: str, *, gateway: int = 0, number: int = 0) -> str:
        """Begin a conversation; return the store that has it, or the name of the refusal."""

        async def send(offer: Offer) -> str:
            await self.hosts[offer.side.cell][number].create_session(
                "acme",
                USER,
                session_id=session,
                placement_version=offer.placement_version,
                sent_on=offer.sent_on,
            )
            return offer.side.store

        came_of = self._try(self.gateways[gateway].route("acme", send))
        if came_of in (A, B):
            self.born[session] = came_of
        return came_of

    def deletion(self, session: str, *, gateway: int = 0, number: int = 0) -> str:
        async def send(offer: Offer) -> str:
            await self.hosts[offer.side.cell][number].delete_session(
                "acme",
                USER,
                session,
                placement_version=offer.placement_version,
                sent_on=offer.sent_on,
            )
            return offer.side.store

        return self._try(self.gateways[gateway].route("acme", send))

    def _try(self, work: Any) -> str:
        try:
            return self.runner.run(work)
        except RetryLater as refused:
            return type(refused).__name__

    def everybody(self, act: Callable[..., str], stem: str) -> list[str]:
        """Do it through each gateway at each instance; a `{}` in the name makes it each its own."""
        return [
            act(stem.format(f"{gateway}{number}"), gateway=gateway, number=number)
            for gateway in range(2)
            for number in range(2)
        ]

    def assert_whole(self) -> None:
        """Everything that was told is at home, once, and in the order in which it was told."""
        with sqlite3.connect(self.engine.paths[B], timeout=20) as file:
            rows = file.execute(
                "SELECT session_id, id FROM events WHERE app_name = ?"
                " AND json_extract(event_data, '$.author') != 'user' ORDER BY timestamp",
                (APP,),
            ).fetchall()
        file.close()
        kept: dict[str, list[str]] = {}
        for session, event in rows:
            kept.setdefault(session, []).append(event)
        assert kept == {name: [event for event, _ in told] for name, told in self.told.items()}
        for told in self.told.values():
            stores = [store for _, store in told]
            # No store answers again once another has.
            assert stores == sorted(stores)


class Deaf:
    """A gateway's placements that can't reach the control plane by themselves."""

    def __init__(self, placements: Placements) -> None:
        self._placements = placements

    def refresh(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._placements, name)


@pytest.fixture
def installation(engine: Engine, tokens: Secrets) -> Iterator[Installation]:
    made = Installation(engine, tokens)
    yield made
    made.close()


def test_a_tenant_is_served_by_one_side_through_every_state_of_a_split(
    installation: Installation, engine: Engine
) -> None:
    it = installation
    home, far = engine.home, engine.far
    assert it.everybody(it.birth, "old-{}") == [A] * 4
    assert it.everybody(it.turn, "old-{}") == [A] * 4

    # Announced: the far cell's instances learn one after the other; nobody is served there.
    version = engine.announce()
    it.learn(far, numbers=(0,))
    assert not engine.announced(version)
    it.learn(far, numbers=(1,))
    assert engine.announced(version)
    assert it.everybody(it.turn, "old-{}") == [A] * 4

    # Narrowed, and one instance of the home has not heard: there a session is still born.
    version = engine.publish(home, "existing")
    it.learn(home, numbers=(0,))
    assert not engine.older(version)
    assert it.birth("late", number=1) == A
    assert it.birth("never", number=0) == "Draining"
    assert it.turn("late", number=0) == A
    it.learn(home, numbers=(1,))
    assert engine.older(version)
    assert it.everybody(it.birth, "never-{}") == ["Draining"] * 4
    assert it.everybody(it.turn, "old-{}") == [A] * 4
    assert it.deletion("late") == "Draining"
    engine.copy()

    # Split. Nobody has heard; then the first gateway, then one instance after the other.
    engine.split()
    assert it.everybody(it.turn, "old-{}") == [A] * 4
    it.learn(home, numbers=(0,))
    # The gateway that can read the feed recovers within the turn, the other one can't.
    assert it.turn("old-00", gateway=0, number=0) == A
    assert it.turn("old-00", gateway=1, number=0) == "Moved"
    assert it.turn("old-00", gateway=0, number=1) == "Behind"
    # The home sends it on, and the far side has not heard.
    assert it.birth("young", gateway=0, number=0) == "Behind"
    it.learn(far, numbers=(0,))
    assert it.birth("young", gateway=0, number=0) == B
    assert it.turn("young", gateway=0, number=0) == B
    assert it.turn("young", gateway=0, number=1) == "Behind"
    it.learn()
    assert it.everybody(it.turn, "old-{}") == [A] * 4
    assert it.everybody(it.turn, "young") == [B] * 4
    assert it.everybody(it.birth, "young-{}") == [B] * 4
    assert it.everybody(it.turn, "young-{}") == [B] * 4
    assert it.deletion("old-00") == "Draining"
    assert it.birth("doomed") == it.deletion("doomed") == B
    del it.born["doomed"]
    # What nobody knows is answered by the store of the new side: there is no such session.
    with pytest.raises(ValueError, match="not found"):
        it.turn("doomed")

    # The source drains; one of its instances still serves what it knows until it hears.
    version = engine.publish(home, "none")
    it.learn(home, numbers=(0,))
    assert not engine.drained(version)
    assert it.turn("old-01", number=0) == "Draining"
    assert it.turn("old-01", number=1) == A
    assert it.turn("young", number=0) == it.turn("young", number=1) == B
    it.learn(home, numbers=(1,))
    assert engine.drained(version)
    assert it.everybody(it.turn, "old-{}") == ["Draining"] * 4
    assert it.everybody(it.turn, "young-{}") == [B] * 4
    assert it.everybody(it.birth, "younger-{}") == [B] * 4
    assert it.deletion("old-00") == "Draining"
    # Whoever looked behind the closed fence was counted by nobody.
    it.learn(home)
    assert engine.drained(version)
    engine.copy()

    # Placed: the far side is home. Again nobody has heard at first.
    engine.place()
    assert it.turn("young", number=0) == B
    it.learn(far, numbers=(0,))
    # The old home has not heard either, and keeps what it knows waiting; its word is no worse than
    # the gateway's. The far side's refusal of what was sent on tells the gateway to read the feed.
    assert it.turn("old-00", gateway=0, number=0) == "Draining"
    assert it.turn("young", gateway=1, number=0) == "Moved"
    assert it.turn("young", gateway=0, number=0) == B
    assert it.turn("old-00", gateway=0, number=0) == B
    assert it.turn("old-00", gateway=1, number=0) == "Draining"
    it.learn(home)
    assert it.turn("old-00", gateway=1, number=1) == "Moved"
    it.learn()
    for stem in ("old-{}", "young-{}", "younger-{}"):
        assert it.everybody(it.turn, stem) == [B] * 4
    assert it.turn("late") == B
    assert it.deletion("late") == B
    del it.born["late"], it.told["late"]
    it.assert_whole()
    assert engine.sessions(B) == set(it.born)
    assert engine.sessions(A).isdisjoint(name for name, store in it.born.items() if store == B)


def test_an_ended_split_leaves_nobody_at_the_far_side(
    installation: Installation, engine: Engine
) -> None:
    it = installation
    assert it.birth("old") == A
    engine.announce()
    engine.publish(engine.home, "existing")
    it.learn()
    engine.split()
    it.learn()
    assert it.birth("young") == B
    # On the way back the far side closes; what was born there waits, and the home goes on.
    engine.publish(engine.far, "none")
    it.learn()
    assert it.everybody(it.turn, "young") == ["Draining"] * 4
    assert it.everybody(it.turn, "old") == [A] * 4
    engine.unsplit()
    # A gateway that still sends on is refused by both cells, whether they have heard or not.
    assert it.birth("younger", gateway=1) == "Draining"
    it.learn(engine.far)
    assert it.birth("younger", gateway=1) == "Moved"
    it.learn(engine.home)
    assert it.birth("younger", gateway=1) == "Moved"
    assert it.birth("younger", gateway=0) == A
    it.learn()
    assert it.everybody(it.turn, "younger") == [A] * 4
    assert engine.sessions(B) == {"young"}


# --- under traffic --------------------------------------------------------------------------


@pytest.mark.timeout(3 * WITHIN_SECONDS)
def test_a_split_under_traffic_loses_and_doubles_nothing(
    engine: Engine, tokens: Secrets, live_server: Any, tmp_path: Path
) -> None:
    """Two fleets talk, give birth and delete over HTTP while the tenant goes through a split."""
    journals = [tmp_path / f"agents-{number}.jsonl" for number in range(2)]
    fleets = [
        Fleet(
            Config(
                name=f"agents-{number}",
                url=live_server.url,
                runtime_token=tokens.runtime,
                gateway_token=tokens.gateway,
                cells=(engine.home.slug, engine.far.slug),
                stores={key: f"sqlite+aiosqlite:///{path}" for key, path in engine.paths.items()},
                journal=str(journal),
                talks=(Talk("acme", clients=2, sessions=3),),
                think_seconds=0.02,
                tool_seconds=0.3,
                # The second gateway hears of nothing by itself.
                placement_seconds=0.3 if number == 0 else 3_600.0,
                deleted=6,
                seed=number,
            )
        )
        for number, journal in enumerate(journals)
    ]

    async def talk() -> None:
        async with asyncio.TaskGroup() as group:
            for fleet in fleets:
                group.create_task(fleet.run())

    failures: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(talk())
        except BaseException as error:
            failures.append(error)

    def until(true: Callable[[], bool], what: str) -> None:
        limit = time.monotonic() + WITHIN_SECONDS
        while not true():
            if failures or time.monotonic() > limit:
                pytest.fail(f"waiting for {what}: {failures}")
            time.sleep(0.05)

    def talked(turns: int) -> None:
        goal = sum(fleet.counts.turns for fleet in fleets) + turns
        until(lambda: sum(fleet.counts.turns for fleet in fleets) >= goal, f"{turns} turns")

    def events(path: Path) -> int:
        with sqlite3.connect(path, timeout=20) as file:
            [(count,)] = file.execute("SELECT count(*) FROM events").fetchall()
        file.close()
        return int(count)

    clients = threading.Thread(target=run)
    services.hurry([engine.home, engine.far], until=database_now() + timedelta(minutes=10))
    clients.start()
    try:
        talked(20)
        version = engine.announce()
        until(lambda: engine.announced(version), "the far cell")
        version = engine.publish(engine.home, "existing")
        until(lambda: engine.older(version), "older turns")
        engine.copy()
        engine.split()
        talked(40)
        assert events(engine.paths[B])
        version = engine.publish(engine.home, "none")
        until(lambda: engine.drained(version), "the drain")
        at_source = engine.sessions(A)
        before = events(engine.paths[A])
        # Long enough for clients that are not waiting with an old session to go on at the target.
        time.sleep(0.5)
        engine.copy()
        engine.place()
        talked(40)
        # The source is silent from its drain on.
        assert (engine.sessions(A), events(engine.paths[A])) == (at_source, before)
    finally:
        for fleet in fleets:
            fleet.stopping.set()
        clients.join(WITHIN_SECONDS)
    assert failures == []
    home = Home(APP, f"sqlite+aiosqlite:///{engine.paths[B]}")
    verdict = audit(journals, {"acme": home})
    assert verdict.examples == []
    assert verdict.clean, str(verdict)
    assert verdict.failed == 0
    assert verdict.turns > 80
    assert verdict.deleted
    # Born on the target and never copied there: the split was used.
    assert engine.sessions(B) - at_source
    assert set(verdict.refused) <= {"Draining", "Moved", "Behind"}
