"""One agent process with its users: real Runners behind a Host, and clients that journal.

`python -m bench.fleet --config FILE` joins one instance in each cell of its configuration
and lets scripted clients talk to several tenants, each over users and sessions of its own,
until SIGTERM: then the turns that run end, the instances leave, the journal is flushed.

The clients talk through a gateway of the process' own: it reads the placement feed by its own
clock, has each turn served by whoever owns it, and is as stale as a gateway may be.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import signal
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from google.adk.events.event import Event

from agent_runtime.adk import Host
from agent_runtime.client import PolicyClient
from agent_runtime.errors import RetryLater
from agent_runtime.gateway import Gateway, Offer, Placements
from bench import scripted
from bench.journal import Journal, Kind, Line
from bench.noting import Noting

log = logging.getLogger("bench.fleet")

READY_SECONDS = 30.0
STOP_SECONDS = 8.0
# A turn that is refused for longer than this is given up, and journalled as failed.
PATIENCE_SECONDS = 180.0
# So long a turn stays with the gateway before its client hears "later": short, for a journal
# that shows it, and a process that stops soon.
GATEWAY_PATIENCE_SECONDS = 2.0

TurnKind = Literal["plain", "streaming", "slow", "cancelled"]


@dataclass(frozen=True)
class Talk:
    """How the clients of one tenant behave."""

    tenant: str
    clients: int
    # Sessions a client has open before it begins to come back to old ones.
    sessions: int = 4
    # (user, session) pairs that exist already and are shared out among the clients.
    known: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Config:
    """What a fleet process needs to know; the file is for its owner only, it holds tokens."""

    name: str
    url: str
    runtime_token: str
    gateway_token: str
    cells: tuple[str, ...]
    # Store key -> SQLAlchemy URL.
    stores: dict[str, str]
    journal: str
    talks: tuple[Talk, ...]
    # Between two turns of one client.
    think_seconds: float = 0.3
    # What a slow tool takes.
    tool_seconds: float = 1.2
    # The longest that a refused client waits before it tries again, whatever it was told.
    retry_cap_seconds: float = 0.5
    # How often the process' gateway reads the placement feed by itself.
    placement_seconds: float = 1.0
    # Parts in 100 of each kind of turn; the rest is plain.
    streaming: int = 15
    slow: int = 8
    cancelled: int = 8
    # New conversations in 100 turns, once a client has enough of them.
    born: int = 5
    # Deletions in 100 turns, of conversations that the client began itself.
    deleted: int = 2
    # The process ends by itself after so many turns. None: at SIGTERM.
    turns: int | None = None
    longest_turn_seconds: float = 30.0
    seed: int = 1

    @classmethod
    def load(cls, path: Path) -> Config:
        """Read a configuration that `save` wrote."""
        data = json.loads(path.read_text())
        talks = tuple(
            Talk(**{**talk, "known": tuple(tuple(pair) for pair in talk["known"])})
            for talk in data.pop("talks")
        )
        return cls(**{**data, "cells": tuple(data.pop("cells")), "talks": talks})

    def save(self, path: Path) -> None:
        """Write it where only its owner can read it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(0o600)
        path.chmod(0o600)
        path.write_text(json.dumps(self, default=vars))


@dataclass
class Counts:
    """What this process's clients have seen so far."""

    turns: int = 0
    acknowledged: int = 0
    refused: int = 0
    failed: int = 0


@dataclass
class Fleet:
    """The instances of one process and the clients that talk through them."""

    config: Config
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self._journal = Journal(Path(self.config.journal))
        # Event id -> key of the store that took it, until its turn is journalled.
        self._taken: dict[str, str] = {}
        self._placements = Placements(
            self.config.url,
            self.config.gateway_token,
            poll_seconds=self.config.placement_seconds,
        )
        self._gateway = Gateway(self._placements, patience_seconds=GATEWAY_PATIENCE_SECONDS)
        self._instances: dict[str, PolicyClient] = {}
        self._hosts: dict[str, Host] = {}

    async def run(self) -> Counts:
        """Join, talk until `stopping` is set or the turns are used up, leave."""
        stores = {
            key: partial(Noting, url, key, self._taken) for key, url in self.config.stores.items()
        }
        for cell in self.config.cells:
            client = PolicyClient(
                self.config.url,
                self.config.runtime_token,
                cell=cell,
                name=f"{self.config.name}-{cell}",
                build="bench",
                stores=self.config.stores,
                longest_turn_seconds=self.config.longest_turn_seconds,
                longest_tool_seconds=self.config.tool_seconds,
            )
            self._instances[cell] = client
            self._hosts[cell] = Host(
                client,
                stores,
                lambda entry, service: scripted.build_runner(entry.app_name, service),
            )
            client.start()
        self._placements.start()
        try:
            await self._ready()
            async with asyncio.TaskGroup() as group:
                for talk in self.config.talks:
                    for number in range(talk.clients):
                        group.create_task(self._client(talk, number))
        finally:
            await asyncio.to_thread(self._placements.stop)
            for client in self._instances.values():
                await asyncio.to_thread(client.leave, wait_seconds=STOP_SECONDS)
            for host in self._hosts.values():
                await host.close()
            self._journal.close()
        return self.counts

    async def _ready(self) -> None:
        limit = time.monotonic() + READY_SECONDS
        while not self.stopping.is_set():
            known = all(self._placements.where(talk.tenant) for talk in self.config.talks)
            if known and all(client.ready for client in self._instances.values()):
                return
            if time.monotonic() > limit:
                trouble = {cell: c.trouble for cell, c in self._instances.items()}
                raise TimeoutError(f"not ready after {READY_SECONDS:.0f} s: {trouble}")
            await self._pause(0.05)

    async def _client(self, talk: Talk, number: int) -> None:
        dice = random.Random(f"{self.config.seed} {self.config.name} {talk.tenant} {number}")
        known = list(talk.known[number :: talk.clients])
        own = f"{self.config.name}-{os.getpid()}-{number}"
        born = 0
        while not self.stopping.is_set() and not self._used_up():
            if not known or born < talk.sessions or dice.randrange(100) < self.config.born:
                born += 1
                pair = (f"u-{own}-{born % 3}", f"s-{own}-{born}")
                if not await self._create(talk.tenant, *pair):
                    continue
                known.append(pair)
            elif dice.randrange(100) < self.config.deleted:
                # Of its own: how another's conversation ended, its journal could not say.
                mine = [pair for pair in known if pair[1].startswith(f"s-{own}-")]
                if len(mine) > 1 and await self._delete(talk.tenant, *mine[0]):
                    known.remove(mine[0])
                continue
            self.counts.turns += 1
            await self._turn(talk.tenant, *dice.choice(known), self._kind(dice), dice)
            await self._pause(self.config.think_seconds * dice.uniform(0.5, 1.5))

    def _used_up(self) -> bool:
        return self.config.turns is not None and self.counts.turns >= self.config.turns

    def _kind(self, dice: random.Random) -> TurnKind:
        number = dice.randrange(100)
        for kind, parts in (
            ("streaming", self.config.streaming),
            ("slow", self.config.slow),
            ("cancelled", self.config.cancelled),
        ):
            if number < parts:
                return kind  # type: ignore[return-value]
            number -= parts
        return "plain"

    async def _create(self, tenant: str, user: str, session: str) -> bool:
        async def create(offer: Offer) -> None:
            await self._hosts[offer.side.cell].create_session(
                tenant,
                user,
                session_id=session,
                placement_version=offer.placement_version,
                sent_on=offer.sent_on,
            )

        return await self._patiently(
            tenant, user, session, lambda: self._gateway.route(tenant, create)
        )

    async def _delete(self, tenant: str, user: str, session: str) -> bool:
        """Delete a conversation, or leave it where that has to wait. Return whether it is over."""

        async def delete(offer: Offer) -> None:
            await self._hosts[offer.side.cell].delete_session(
                tenant,
                user,
                session,
                placement_version=offer.placement_version,
                sent_on=offer.sent_on,
            )

        # Before it is sent: of one that a killed process was about to delete nobody knows.
        self._write("deleting", tenant, user, session)
        try:
            await self._gateway.route(tenant, delete)
        except RetryLater as later:
            self._refused(tenant, user, session, later)
            return False
        except Exception as error:
            log.exception("a deletion of %s failed", tenant)
            self._fail(tenant, user, session, f"{type(error).__name__}: {error}")
            return True
        self._write("deleted", tenant, user, session)
        return True

    async def _turn(
        self, tenant: str, user: str, session: str, kind: TurnKind, dice: random.Random
    ) -> None:
        text = f"turn {self.counts.turns}"
        if kind == "slow":
            text = f"wait {self.config.tool_seconds * dice.uniform(0.8, 1.5):.2f}"
        message = scripted.message(text)
        run_config = scripted.STREAMING if kind == "streaming" else None

        def send(offer: Offer) -> AsyncGenerator[Event, None]:
            return self._hosts[offer.side.cell].run(
                tenant,
                user,
                session,
                message,
                placement_version=offer.placement_version,
                sent_on=offer.sent_on,
                run_config=run_config,
            )

        async def talk() -> None:
            invocation, count = "", 0
            async with contextlib.aclosing(self._gateway.stream(tenant, send)) as events:
                async for event in events:
                    if event.partial:
                        continue
                    invocation, count = event.invocation_id, count + 1
                    self._acknowledge(tenant, user, session, event)
            self._write("turn", tenant, user, session, invocation=invocation, count=count)

        if kind != "cancelled":
            await self._patiently(tenant, user, session, talk)
            return
        task = asyncio.create_task(self._patiently(tenant, user, session, talk))
        # Anywhere from before its first event to after its last.
        await asyncio.wait([task], timeout=dice.uniform(0.0, 0.08))
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        self._write("cancelled", tenant, user, session)

    def _acknowledge(self, tenant: str, user: str, session: str, event: Event) -> None:
        self.counts.acknowledged += 1
        self._write(
            "event",
            tenant,
            user,
            session,
            invocation=event.invocation_id,
            id=event.id,
            store=self._taken.pop(event.id, ""),
            word=scripted.last_word(event),
            made=event.timestamp,
        )

    async def _patiently(
        self, tenant: str, user: str, session: str, act: Callable[[], Awaitable[None]]
    ) -> bool:
        """Do it, again and again while the answer is "later". Return whether it was done."""
        limit = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < limit:
            try:
                await act()
            except RetryLater as later:
                self._refused(tenant, user, session, later)
                seconds = min(later.retry_after_seconds, self.config.retry_cap_seconds)
                if await self._pause(seconds):
                    return False
            except Exception as error:
                # Counted and shown at the end, not raised: the other clients go on.
                log.exception("a turn of %s failed", tenant)
                self._fail(tenant, user, session, f"{type(error).__name__}: {error}")
                return False
            else:
                return True
        self._fail(tenant, user, session, f"refused for {PATIENCE_SECONDS:.0f} s")
        return False

    def _refused(self, tenant: str, user: str, session: str, later: RetryLater) -> None:
        self.counts.refused += 1
        self._write("refused", tenant, user, session, reason=type(later).__name__)

    def _fail(self, tenant: str, user: str, session: str, reason: str) -> None:
        self.counts.failed += 1
        self._write("failed", tenant, user, session, reason=reason[:300])

    def _write(self, kind: Kind, tenant: str, user: str, session: str, **more: Any) -> None:
        self._journal.write(
            Line(kind=kind, at=time.time(), tenant=tenant, user=user, session=session, **more)
        )

    async def _pause(self, seconds: float) -> bool:
        """Wait so long, or until the fleet stops; return whether it stops."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.stopping.wait(), seconds)
        return self.stopping.is_set()


async def _main(config: Config) -> int:
    fleet = Fleet(config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, fleet.stopping.set)
    counts = await fleet.run()
    log.info("%s", counts)
    return 0


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--config", type=Path, required=True)
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s %(message)s")
    return asyncio.run(_main(Config.load(options.parse_args().config)))


if __name__ == "__main__":
    sys.exit(main())
