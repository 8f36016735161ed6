"""Where tenants live, as a gateway keeps it, and which cell gets a turn.

A gateway may be stale at any moment: the cells refuse what it sends on an old placement, and it
reads the feed again and sends anew. Nothing here is kept on a disk, and nothing is decided here
that a cell doesn't check.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
import urllib.parse
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

from agent_runtime.calls import BackOff, Caller, contract
from agent_runtime.errors import (
    BadAnswer,
    Behind,
    ControlPlaneError,
    Moved,
    NotHere,
    NotReady,
    RetryLater,
    Unreachable,
)
from agent_runtime.fence import SOON_SECONDS
from agent_runtime.policy import Version
from agent_runtime.transport import Transport

log = logging.getLogger(__name__)

T = TypeVar("T")

FEED = "/api/v1/placement"
# How often the feed is read when nothing is refused.
POLL_SECONDS = 5.0
# It is read at most this often, however many turns were refused: they share what it says.
READ_AGAIN_SECONDS = 0.1
# So long a turn that was refused for its placement is tried again before its caller hears of it.
PATIENCE_SECONDS = 5.0
PAUSE_FIRST_SECONDS = 0.05
PAUSE_MAX_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Side:
    """A cell that serves a tenant, and the store that its sessions are in there."""

    cell: str
    # Empty where runtimes and clients share a process.
    cell_url: str
    store: str

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Side:
        """Return the side that the wire describes."""
        return cls(cell=str(data["cell"]), cell_url=str(data["cell_url"]), store=str(data["store"]))


@dataclass(frozen=True, slots=True)
class Offer:
    """One try to have a turn served."""

    side: Side
    # What the request carries: a cell that knows better, or not yet, refuses it.
    placement_version: str
    # The mark of a turn that the source of a split does not know.
    sent_on: bool


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one tenant lives: one row of the feed."""

    tenant: str
    app_name: str
    home: Side
    # The target of a split, which takes what the home does not know. None: not split.
    far: Side | None
    # Sent with each turn as it is; a cursor never is.
    version: str
    home_region: str
    # closed or open.
    fail_mode: str

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Placement:
        """Return the row that the wire describes; unknown fields are ignored.

        Raises KeyError, TypeError or ValueError if one that is needed is missing or wrong.
        """
        sides = data["sides"]
        return cls(
            tenant=str(data["tenant"]),
            app_name=str(data["app_name"]),
            home=Side.parse(data if sides is None else sides["existing"]),
            far=None if sides is None else Side.parse(sides["new"]),
            version=str(Version.parse(data["placement_version"])),
            home_region=str(data["home_region"]),
            fail_mode=str(data["fail_mode"]),
        )

    def offers(self) -> Iterator[Offer]:
        """Yield to whom a turn is offered: the home, and after its "not here" the other side."""
        yield Offer(self.home, self.version, sent_on=False)
        if self.far is not None:
            yield Offer(self.far, self.version, sent_on=True)


class Placements:
    """The placement feed as one process keeps it, in memory.

    `start()` keeps it read from a background thread; `refresh()` reads it now. Safe for threads.
    A forked child keeps what its parent knew and calls `start()` itself.
    """

    def __init__(
        self,
        base_url: str,
        token: str,
        *,
        poll_seconds: float = POLL_SECONDS,
        transport: Transport | None = None,
        dice: Callable[[], float] = random.random,
    ) -> None:
        """Make one that knows nobody yet. `dice` gives 0 to 1."""
        self._plane = Caller(base_url, token, transport)
        self._poll_seconds = poll_seconds
        self._dice = dice
        self._version: Version | None = None
        self._rows: Mapping[str, Placement] = {}
        # What the last failed read said; empty after a good one.
        self.trouble = ""
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._pid = os.getpid()
        self._reading = threading.Lock()
        self._starting = threading.Lock()
        self._back_off = BackOff(self._dice)
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    @property
    def version(self) -> Version | None:
        """The feed's version; None before the first read."""
        return self._version

    def where(self, tenant: str) -> Placement | None:
        """Return where the tenant lives as far as is known here."""
        return self._rows.get(tenant)

    def refresh(self) -> bool:
        """Read what changed; return whether the control plane answered. Blocks for one call."""
        return self._read() is None

    def start(self) -> None:
        """Read the feed in a background thread until `stop()`. Does nothing if one runs."""
        if self._pid != os.getpid():
            self._begin_anew()
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, args=(self._stop,), name="switchyard-placement", daemon=True
                )
                self._thread.start()

    def stop(self, *, timeout_seconds: float = 15.0) -> None:
        """End the background thread. What is known stays known."""
        if self._pid != os.getpid() or self._thread is None:
            return
        self._stop.set()
        self._thread.join(timeout_seconds)
        if not self._thread.is_alive():
            self._plane.close()
        self._thread = None
        # A new one, so that a thread that outlives the time-out still ends.
        self._stop = threading.Event()

    def _run(self, stop: threading.Event) -> None:
        wait = 0.0
        while not stop.wait(wait):
            try:
                failure = self._read()
            except Exception as error:
                log.exception("reading the placement feed failed")
                failure = Unreachable(repr(error))
            if failure is None:
                wait = self._back_off.went_well(self._poll_seconds)
            else:
                wait = self._back_off.failed(failure)

    def _read(self) -> ControlPlaneError | None:
        if self._pid != os.getpid():
            self._begin_anew()
        with self._reading:
            try:
                self._ask()
            except ControlPlaneError as error:
                # What is known goes on being used: the cells refuse what has become wrong.
                if str(error) != self.trouble:
                    log.warning("the placement feed: %s", error)
                self.trouble = str(error)
                return error
            self.trouble = ""
            return None

    def _ask(self) -> None:
        held = self._version
        query = "" if held is None else "?" + urllib.parse.urlencode({"since": str(held)})
        answer = self._plane.call("GET", FEED + query)
        with contract("the placement feed"):
            if answer.status == HTTPStatus.NOT_MODIFIED:
                if held is None:
                    raise BadAnswer("the feed is unchanged, says the answer to a first read")
                return
            version = Version.parse(answer.data["version"])
            rows = {row.tenant: row for row in map(Placement.parse, answer.data["tenants"])}
            full = answer.data["full"] is True
        if held is not None and version.before(held):
            # Late, or out of some cache.
            log.warning("ignored placement feed %s, older than %s", version, held)
            return
        if not full and (held is None or held.epoch != version.epoch):
            raise BadAnswer(f"placement feed {version} is a delta to nothing that is held here")
        # Of another epoch, too, a full answer replaces everything, whatever its number.
        self._rows = rows if full else {**self._rows, **rows}
        self._version = version


class Gateway:
    """Has each turn served by whoever owns it. Belongs to one event loop.

    How a request reaches a cell is the caller's: a call to a Host in this process, or HTTP. A
    cell's refusal has to come back as the exception that its Host raised.
    """

    def __init__(
        self,
        placements: Placements,
        *,
        patience_seconds: float = PATIENCE_SECONDS,
        dice: Callable[[], float] = random.random,
    ) -> None:
        """`patience_seconds`: for so long a turn is tried again where the placement was stale."""
        self._placements = placements
        self._patience_seconds = patience_seconds
        self._dice = dice
        self._refreshing: asyncio.Task[bool] | None = None
        self._refreshed_at = float("-inf")

    async def route(self, tenant: str, send: Callable[[Offer], Awaitable[T]]) -> T:
        """Have one request served and return its answer; see `stream`."""

        async def once(offer: Offer) -> AsyncGenerator[T, None]:
            yield await send(offer)

        async with aclosing(self.stream(tenant, once)) as answers:
            return await anext(answers)

    async def stream(
        self, tenant: str, send: Callable[[Offer], AsyncGenerator[T, None]]
    ) -> AsyncGenerator[T, None]:
        """Have one turn served and yield what comes of it.

        It is offered to the tenant's home; one that the home does not know goes to the other
        side of a split at once. Refused for its placement, it is sent again when the feed or the
        cell has caught up, for as long as this gateway has patience; then the cell's own refusal
        is raised. Every other answer is the caller's, Draining too. Nothing is sent twice once
        something of it was yielded.
        """
        pauses = _Pauses(self._patience_seconds, self._dice)
        while True:
            row = await self._row(tenant)
            stale: RetryLater | None = None
            for offer in row.offers():
                begun = False
                try:
                    async with aclosing(send(offer)) as answers:
                        async for answer in answers:
                            begun = True
                            yield answer
                    return
                except (Moved, Behind, NotHere) as refused:
                    if begun:
                        raise
                    stale = refused
                if not isinstance(stale, NotHere):
                    break
            assert stale is not None  # there is always the home's offer
            await self._catch_up(row, stale, pauses)

    async def _row(self, tenant: str) -> Placement:
        row = self._placements.where(tenant)
        if row is None:
            await self._refresh()
            row = self._placements.where(tenant)
        if row is None and self._placements.version is None:
            raise NotReady("this gateway knows no placement yet", retry_after_seconds=SOON_SECONDS)
        if row is None:
            raise Behind(
                f"this gateway has not heard of {tenant} yet", retry_after_seconds=SOON_SECONDS
            )
        return row

    async def _catch_up(self, row: Placement, refused: RetryLater, pauses: _Pauses) -> None:
        """Return once it may help to send again; raise the refusal when patience is over."""
        while True:
            await self._refresh()
            if self._placements.where(row.tenant) != row:
                return
            if not await pauses.pause():
                raise refused
            if isinstance(refused, Behind):
                # The cell has yet to hear of what we know: our row may well be the right one.
                return

    async def _refresh(self) -> None:
        loop = asyncio.get_running_loop()
        if self._refreshing is None or self._refreshing.done():
            if loop.time() - self._refreshed_at < READ_AGAIN_SECONDS:
                return
            self._refreshed_at = loop.time()
            self._refreshing = loop.create_task(asyncio.to_thread(self._placements.refresh))
        # Shared: whoever is cancelled here leaves it to the others.
        await asyncio.shield(self._refreshing)


class _Pauses:
    """The pauses of one turn: each longer than the one before, together no longer than allowed."""

    def __init__(self, seconds: float, dice: Callable[[], float]) -> None:
        self._until = asyncio.get_running_loop().time() + seconds
        self._dice = dice
        self._next = PAUSE_FIRST_SECONDS

    async def pause(self) -> bool:
        """Wait for a while; False, at once, when there is no time left."""
        left = self._until - asyncio.get_running_loop().time()
        if left <= 0:
            return False
        # Half of it by lot: turns that were refused together don't come back together.
        await asyncio.sleep(min(left, self._next * (0.5 + self._dice() / 2)))
        self._next = min(PAUSE_MAX_SECONDS, 2 * self._next)
        return True
