"""Runs turns inside the fence, over real google-adk Runners. Belongs to one event loop.

google-adk isn't imported here: what a Runner and a session service have to be is said below.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from agent_runtime.client import PolicyClient
from agent_runtime.errors import Draining, NotHere, TurnTooLong, UnknownStore, WrongRunner
from agent_runtime.fence import DRAIN_RETRY_SECONDS, SOON_SECONDS, Turn
from agent_runtime.policy import ACCEPTS_NEW, Entry

T = TypeVar("T")

# What a store that the control plane has closed says when somebody writes.
CLOSED = "closed by switchyard"
# Runners kept; a Runner holds no conversation, so dropping one costs building it again.
MAX_RUNNERS = 2_000
# How often a running turn's deadline is compared with the lease's clock.
WATCH_SECONDS = 1.0
# What a new session is told between "known ones only" and the target's opening: one older turn.
BIRTH_RETRY_SECONDS = 5.0

# What a session service does with its store.
STORE_CALLS = (
    "append_event",
    "create_session",
    "delete_session",
    "flush",
    "get_session",
    "get_user_state",
    "list_sessions",
)

# The end of a turn in its queue of events.
_END = object()


@dataclass(frozen=True, slots=True)
class _NoEvents:
    """As much of google-adk's GetSessionConfig as a look for a session needs."""

    num_recent_events: int = 0
    after_timestamp: float | None = None


@dataclass(frozen=True, slots=True)
class _Ask:
    """What a request is about, and how it came here."""

    tenant: str
    user_id: str
    # None: a session that is to be born under an id that nobody has chosen yet.
    session_id: str | None
    placement_version: str | None
    sent_on: bool
    # It takes the session away.
    deletes: bool = False


class SessionService(Protocol):
    """As much of google-adk's BaseSessionService as the Host calls."""

    async def create_session(
        self,
        *,
        app_name: str,
        user_id: str,
        state: dict[str, Any] | None = None,
        session_id: str | None = None,
    ) -> Any:
        """Create a session and return it."""

    async def get_session(
        self, *, app_name: str, user_id: str, session_id: str, config: Any = None
    ) -> Any:
        """Return a session, or None."""

    async def delete_session(self, *, app_name: str, user_id: str, session_id: str) -> None:
        """Delete a session."""


class Runner(Protocol):
    """As much of google-adk's Runner as the Host uses."""

    app_name: str
    session_service: Any

    def run_async(
        self,
        *,
        user_id: str,
        session_id: str,
        new_message: Any = None,
        run_config: Any = None,
        abort_signal: asyncio.Event | None = None,
    ) -> AsyncGenerator[Any, None]:
        """Run one turn; yield each event after it is stored, and partial ones."""

    async def close(self) -> None:
        """Close toolsets and plugins."""


class Host:
    """Serves turns of many tenants in one process.

    `stores` maps a store key to a factory of its session service; a service is made once, when
    its first turn comes. `runners` builds a tenant's Runner from its entry and that service, and
    is called again when the tenant's store or generation changes. Neither may block for long.
    """

    def __init__(
        self,
        client: PolicyClient,
        stores: Mapping[str, Callable[[], Any]],
        runners: Callable[[Entry, Any], Runner],
    ) -> None:
        self._client = client
        self._factories = stores
        self._build = runners
        self._services: dict[str, Any] = {}
        # (tenant, store key, generation) -> its Runner, the longest unused first.
        self._runners: OrderedDict[tuple[str, str, int], Runner] = OrderedDict()
        # asyncio keeps only weak references to tasks.
        self._turns: set[asyncio.Task[None]] = set()
        self._pid = os.getpid()

    async def run(
        self,
        tenant: str,
        user_id: str,
        session_id: str,
        message: Any,
        *,
        placement_version: str | None = None,
        sent_on: bool = False,
        run_config: Any = None,
        abort_signal: asyncio.Event | None = None,
    ) -> AsyncGenerator[Any, None]:
        """Run one turn and yield the Runner's events: each one but a partial is stored by then.

        `sent_on`: the source of a split has answered NotHere. Nothing is entered before the first
        event is asked for. The tenant's count goes down when nothing of this turn can write any
        more, whether it was read to its end, raised, was cancelled, closed or dropped. Raises
        RetryLater's kinds before anything is written, and Draining from within a turn whose store
        was closed under it; TurnTooLong.
        """
        events: asyncio.Queue[Any] = asyncio.Queue()
        # The turn is a task of its own, so its end depends on no reader: google-adk runs the
        # agent in the background, and a reader that stalls or keeps an unread generator would
        # else keep the turn open, or let it be closed in a foreign context. It enters the fence
        # itself: a task that is cancelled before it starts has nothing to give back.
        turn = asyncio.get_running_loop().create_task(
            self._turn(
                events,
                _Ask(tenant, user_id, session_id, placement_version, sent_on),
                new_message=message,
                run_config=run_config,
                abort_signal=abort_signal,
            )
        )
        self._turns.add(turn)
        turn.add_done_callback(self._ended)
        turn.add_done_callback(lambda _: events.put_nowait(_END))
        try:
            while (event := await events.get()) is not _END:
                yield event
                events.task_done()
            await turn  # Raises what it raised.
        finally:
            if not turn.done():
                turn.cancel()
                await asyncio.wait({turn})

    async def create_session(
        self,
        tenant: str,
        user_id: str,
        *,
        session_id: str | None = None,
        state: dict[str, Any] | None = None,
        placement_version: str | None = None,
        sent_on: bool = False,
    ) -> Any:
        """Create a session in the tenant's store and return it. Raises RetryLater's kinds.

        In a split it is born on the target; the source answers for ids that it has.
        """

        async def create(entry: Entry, service: SessionService) -> Any:
            session = await service.create_session(
                app_name=entry.app_name, user_id=user_id, state=state, session_id=session_id
            )
            self._client.usage.served(tenant, user_id, session.id)
            return session

        ask = _Ask(tenant, user_id, session_id, placement_version, sent_on)
        return await self._write(ask, create)

    async def delete_session(
        self,
        tenant: str,
        user_id: str,
        session_id: str,
        *,
        placement_version: str | None = None,
        sent_on: bool = False,
    ) -> None:
        """Delete a session from the tenant's store. Raises RetryLater's kinds.

        Until a split has ended its source keeps what it has, and answers Draining.
        """

        async def delete(entry: Entry, service: SessionService) -> None:
            await service.delete_session(
                app_name=entry.app_name, user_id=user_id, session_id=session_id
            )
            self._client.usage.served(tenant, user_id, session_id)

        ask = _Ask(tenant, user_id, session_id, placement_version, sent_on, deletes=True)
        await self._write(ask, delete)

    async def close(self) -> None:
        """End what still runs, then close every Runner and session service.

        Let the client `leave()` first: it waits for the turns instead of cutting them.
        """
        for turn in self._turns:
            turn.cancel()
        if self._turns:
            await asyncio.wait(self._turns)
        for runner in self._runners.values():
            await runner.close()
        self._runners.clear()
        for service in self._services.values():
            close = getattr(service, "close", None)
            if close is not None:
                await close()
        self._services.clear()

    async def _turn(self, events: asyncio.Queue[Any], ask: _Ask, **run: Any) -> None:
        try:
            async with self._entered(ask) as turn:
                self._client.usage.turn(ask.tenant)
                try:
                    runner = self._runner(turn.entry)
                    stream = runner.run_async(
                        user_id=ask.user_id, session_id=str(ask.session_id), **run
                    )
                    async with aclosing(stream):
                        async for event in stream:
                            self._count(ask.tenant, event)
                            events.put_nowait(event)
                            # One at a time: the agent goes on when the reader asks for
                            # more, as it would without us.
                            await events.join()
                finally:
                    # Inside the fence, so the report that no longer counts this turn has it.
                    self._client.usage.served(ask.tenant, ask.user_id, str(ask.session_id))
        except Draining:
            self._client.usage.refused(ask.tenant, "draining")
            raise

    async def _write(self, ask: _Ask, write: Callable[[Entry, Any], Awaitable[T]]) -> T:
        async with self._entered(ask) as turn:
            return await write(turn.entry, self._service(turn.entry))

    def _ended(self, turn: asyncio.Task[None]) -> None:
        self._turns.discard(turn)
        if not turn.cancelled():
            turn.exception()  # Looked at; the reader that would raise it may be gone.

    @asynccontextmanager
    async def _entered(self, ask: _Ask) -> AsyncIterator[Turn]:
        """Count the block in, and cut it at its deadline; or refuse it."""
        fence = self._client.fence
        try:
            with fence.enter(
                ask.tenant, ask.placement_version, sent_on=ask.sent_on, asks_store=True
            ) as turn:
                async with self._cut(ask.tenant, turn):
                    if turn.known_only:
                        # Counted in by now: whoever is let in is waited for, if the source
                        # closes between this look and the first write.
                        await self._check_known(turn.entry, ask)
                    elif turn.entry.accepts == ACCEPTS_NEW:
                        await self._check_same(turn.entry, ask)
                    yield turn
        except Draining as refused:
            if refused.source is not None and not await self._knows(refused.source, ask):
                raise _not_here(ask) from None
            raise
        except Exception as error:
            if not is_closed(error):
                raise
            # The store is the second fence: it closes after every instance has said "drained",
            # and refuses one that had not heard.
            raise Draining(
                f"the store of {ask.tenant} is closed: it is moving",
                retry_after_seconds=DRAIN_RETRY_SECONDS,
            ) from error

    async def _check_known(self, entry: Entry, ask: _Ask) -> None:
        """Raise unless the source of a split may do this. Nothing is born there any more."""
        if not await self._knows(entry, ask):
            if entry.split:
                raise _not_here(ask)
            # Older turns still run somewhere, and might be giving birth to this very session.
            raise Draining(
                f"{ask.tenant} takes no new session for a moment: it is moving",
                retry_after_seconds=BIRTH_RETRY_SECONDS,
            )
        if ask.deletes:
            # A session that is gone would be taken for one that was never here, and its copy on
            # the target for one that was born there.
            raise Draining(
                f"{ask.tenant} is moving, and keeps this session until it has moved",
                retry_after_seconds=DRAIN_RETRY_SECONDS,
            )

    async def _check_same(self, entry: Entry, ask: _Ask) -> None:
        """Raise where the target of a split takes the id that it was given for another one.

        google-adk's in-memory and SQLite services strip ids. A source that doesn't sent " x" on;
        what answers to it here is the copy of its "x". Any other id costs no look.
        """
        if ask.session_id is None or ask.session_id == ask.session_id.strip():
            return
        found = await self._find(entry, ask)
        if found is not None and found.id != ask.session_id:
            raise _not_here(ask)

    async def _knows(self, entry: Entry, ask: _Ask) -> bool:
        return await self._find(entry, ask) is not None

    async def _find(self, entry: Entry, ask: _Ask) -> Any:
        if ask.session_id is None:
            return None
        return await self._service(entry).get_session(
            app_name=entry.app_name,
            user_id=ask.user_id,
            session_id=ask.session_id,
            config=_NoEvents(),
        )

    @asynccontextmanager
    async def _cut(self, tenant: str, turn: Turn) -> AsyncIterator[None]:
        """Cancel the block at the turn's deadline, and raise TurnTooLong."""
        loop = asyncio.get_running_loop()
        scope = asyncio.timeout(None)
        handle: asyncio.TimerHandle | None = None

        def watch() -> None:
            # asyncio's clock stands still while the machine is suspended, and the control
            # plane's doesn't: the deadline is on the lease's clock, and looked at often.
            nonlocal handle
            left = turn.deadline - self._client.clock.boottime()
            if left <= 0:
                scope.reschedule(loop.time())
            else:
                handle = loop.call_later(min(left, WATCH_SECONDS), watch)

        try:
            async with scope:
                watch()
                try:
                    yield
                finally:
                    if handle is not None:
                        handle.cancel()
        except TimeoutError:
            if not scope.expired():
                raise
        if scope.expired():
            raise TurnTooLong(
                f"a turn of {tenant} was cut after {self._client.longest_turn_seconds:g} s"
            )

    def _runner(self, entry: Entry) -> Runner:
        service = self._service(entry)
        key = (entry.tenant, entry.store_key, entry.runner_generation)
        runner = self._runners.get(key)
        if runner is None:
            runner = self._build(entry, service)
            # Either would write what the fence, and a move, know nothing of.
            if runner.app_name != entry.app_name:
                raise WrongRunner(
                    f"the runner built for {entry.tenant} is of app {runner.app_name!r}, "
                    f"not {entry.app_name!r}"
                )
            if runner.session_service is not service:
                raise WrongRunner(
                    f"the runner built for {entry.tenant} has a session service of its own, "
                    f"not the one of store {entry.store_key}"
                )
            self._runners[key] = runner
            while len(self._runners) > MAX_RUNNERS:
                # Only forgotten: a turn may be running on it.
                self._runners.popitem(last=False)
        self._runners.move_to_end(key)
        return runner

    def _service(self, entry: Entry) -> Any:
        if self._pid != os.getpid():
            # A parent's connections: two processes on one would mix their answers.
            self._runners.clear()
            self._services.clear()
            self._pid = os.getpid()
        key = entry.store_key
        if key not in self._services:
            if key not in self._factories:
                raise UnknownStore(f"this process was given no session service for store {key!r}")
            service = self._factories[key]()
            for name in STORE_CALLS:
                call = getattr(service, name, None)
                if call is not None:
                    setattr(service, name, _to_its_end(call))
            self._services[key] = service
        return self._services[key]

    def _count(self, tenant: str, event: Any) -> None:
        usage = getattr(event, "usage_metadata", None)
        # Pieces of an answer come before the whole one, which carries the usage of all.
        if usage is not None and not event.partial:
            self._client.usage.model_call(tenant, usage.total_token_count or 0)


def _not_here(ask: _Ask) -> NotHere:
    return NotHere(
        f"{ask.tenant} is split, and this side does not know the session",
        retry_after_seconds=SOON_SECONDS,
    )


def _to_its_end(call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return `call` so that cancelling its caller waits for it instead of cutting it.

    A turn is cancelled anywhere, also between BEGIN and COMMIT. A commit on its way lands all
    the same, after the turn is no longer counted. And SQLAlchemy loses an SQLite connection
    that is cut there, with its lock: tried, every other writer of the file then fails with
    "database is locked" until the garbage collector comes by.
    """

    async def to_its_end(*args: Any, **kwargs: Any) -> Any:
        task = asyncio.ensure_future(call(*args, **kwargs))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            while not task.done():
                with suppress(asyncio.CancelledError):  # Once more: it changes nothing.
                    await asyncio.wait({task})
            if not task.cancelled():
                task.exception()  # Looked at: the caller is told that it was cancelled.
            raise

    return to_its_end


def is_closed(error: BaseException) -> bool:
    """Return whether a store said "closed by switchyard" anywhere among the error's causes.

    On SQLite the trigger's refusal is an IntegrityError, which google-adk's create_session turns
    into AlreadyExistsError: only the chain still tells.
    """
    found: list[BaseException] = [error]
    seen: set[int] = set()
    while found:
        one = found.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if CLOSED in str(one):
            return True
        found += [e for e in (one.__cause__, one.__context__) if e is not None]
        if isinstance(one, BaseExceptionGroup):
            found += one.exceptions
    return False
