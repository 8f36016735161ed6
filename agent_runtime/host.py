"""Runs turns inside the fence, over real google-adk Runners. Belongs to one event loop.

google-adk isn't imported here: what a Runner and a session service have to be is said below.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Protocol, TypeVar

from agent_runtime.admission import budget_spent
from agent_runtime.client import PolicyClient
from agent_runtime.clock import Clock
from agent_runtime.errors import (
    Draining,
    NotHere,
    NotReady,
    RetryLater,
    TurnTooLong,
    UnknownStore,
)
from agent_runtime.fence import DRAIN_RETRY_SECONDS, SOON_SECONDS, Turn
from agent_runtime.policy import ACCEPTS_NEW, Entry, Policy
from agent_runtime.runners import IDLE_SECONDS, MAX_RUNNERS, Factory, Kept, RunnerCache
from agent_runtime.usage import tokens_of

log = logging.getLogger(__name__)

T = TypeVar("T")

# What a store that the control plane has closed says when somebody writes.
CLOSED = "closed by switchyard"
# What building Runners ahead may take. What isn't built by then is built when its turn comes.
PREWARM_SECONDS = 15.0
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


@dataclass(slots=True)
class Running:
    """The turn that runs, as the Host and the plugins of its Runner share it."""

    # The client's own name of it. None: it has none.
    turn_id: str | None = None
    # A plugin adds the ids that it counts under, and the Host those of the events that come out: a
    # turn that is cancelled in its first model call has none.
    invocations: set[str] = field(default_factory=set)
    # It was refused from within, and is counted so. Before its first event: nothing was served.
    refused: bool = False


RUNNING: ContextVar[Running] = ContextVar("switchyard_running")

# What is handed over where there is nothing yet, and after the last event.
_NOTHING = object()
_END = object()


class _Handover:
    """A turn's events on their way to its reader, one at a time.

    Instead of an asyncio.Queue, whose `put`, `get` and `join` would be the largest part of what
    the library costs a turn.
    """

    __slots__ = ("_asked", "_event", "_given", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._event: Any = _NOTHING
        # The reader waits for it, where there is nothing to be had.
        self._given: asyncio.Future[None] | None = None
        # The turn waits for it, until what it gave was taken and more is asked for.
        self._asked: asyncio.Future[None] | None = None

    async def give(self, event: Any) -> None:
        """Hand an event over; return when the reader asks for the next."""
        self._event = event
        _wake(self._given)
        self._asked = self._loop.create_future()
        await self._asked

    def end(self) -> None:
        """Let the reader find the end, now or when it asks."""
        self._event = _END
        _wake(self._given)

    async def next(self) -> Any:
        """Ask for the next event, and return it, or _END."""
        _wake(self._asked)
        if self._event is _NOTHING:
            self._given = self._loop.create_future()
            await self._given
        event = self._event
        if event is not _END:
            self._event = _NOTHING
        return event


class _Deadlines:
    """Cuts what runs for too long. One timer for all turns of a loop costs each of them less.

    asyncio's clock stands still while the machine is suspended, and the control plane's doesn't:
    deadlines are on the lease's clock, and looked at often.
    """

    def __init__(self, clock: Clock, longest_turn_seconds: float) -> None:
        self.longest_turn_seconds = longest_turn_seconds
        self._clock = clock
        # In boot time.
        self._at: dict[asyncio.Timeout, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, scope: asyncio.Timeout, at: float) -> None:
        """Let `scope` end at boot time `at`."""
        self._at[scope] = at
        if self._timer is None or self.longest_turn_seconds < WATCH_SECONDS:
            self._look()

    def discard(self, scope: asyncio.Timeout) -> None:
        """Forget a scope that has ended."""
        self._at.pop(scope, None)

    def _look(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        loop, now = asyncio.get_running_loop(), self._clock.boottime()
        wait = WATCH_SECONDS
        for scope, at in list(self._at.items()):
            if at <= now:
                del self._at[scope]
                scope.reschedule(loop.time())
            else:
                wait = min(wait, at - now)
        if self._at:
            self._timer = loop.call_later(wait, self._look)


class _Cut:
    """Cancels the block at its turn's deadline, and raises TurnTooLong.

    Not an asynccontextmanager: each of those is an async generator that the loop keeps book of,
    which is felt where a turn costs a few dozen microseconds.
    """

    __slots__ = ("_deadlines", "_scope", "_turn")

    def __init__(self, deadlines: _Deadlines, turn: Turn) -> None:
        self._deadlines = deadlines
        self._turn = turn
        self._scope = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        await self._scope.__aenter__()
        self._deadlines.add(self._scope, self._turn.deadline)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._deadlines.discard(self._scope)
        try:
            await self._scope.__aexit__(kind, error, traceback)
        except TimeoutError as cut:
            raise self._too_long() from cut
        if self._scope.expired() and (kind is None or issubclass(kind, TimeoutError)):
            # It was cut, and ended in its own way.
            raise self._too_long()

    def _too_long(self) -> TurnTooLong:
        seconds = self._deadlines.longest_turn_seconds
        return TurnTooLong(f"a turn of {self._turn.entry.tenant} was cut after {seconds:g} s")


def _wake(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)


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


class Host:
    """Serves turns of many tenants in one process.

    `stores` maps a store key to a factory of its session service; a service is made once, when
    its first turn comes. `runners` builds a tenant's Runner from its entry and that service, as a
    function that takes no time or a coroutine; it is called again when the tenant's store or
    generation changes, or its Runner was unused for a while. A Host that is made inside its event
    loop builds the cell's most active tenants ahead, and its client is ready after that.
    """

    def __init__(
        self,
        client: PolicyClient,
        stores: Mapping[str, Callable[[], Any]],
        runners: Factory,
        *,
        max_runners: int | None = None,
        idle_seconds: float = IDLE_SECONDS,
        prewarms: Callable[[Entry], bool] = lambda entry: True,
    ) -> None:
        """Make a host that has opened nothing.

        Keep at most `max_runners` (2,000), each for `idle_seconds` after its last turn. Of the
        tenants to be built ahead, build those that `prewarms` picks.
        """
        self._client = client
        self._factories = stores
        self._build = runners
        self._max_runners = MAX_RUNNERS if max_runners is None else max_runners
        self._idle_seconds = idle_seconds
        self._prewarms = prewarms
        self._begin_anew()
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            # Its first turn tells it its loop; until then it can build nothing.
            self._warmed = True
        else:
            self._belong_to(loop)
            self._look_after()

    def _begin_anew(self) -> None:
        """Hold nothing. A forked child drops its parent's connections without a word to them."""
        self._pid = os.getpid()
        self._services: dict[str, Any] = {}
        self._deadlines = _Deadlines(self._client.clock, self._client.longest_turn_seconds)
        self._cache = RunnerCache(
            self._build,
            self._client.runners,
            self._client.clock,
            limit=self._max_runners,
            idle_seconds=self._idle_seconds,
        )
        # asyncio keeps only weak references to tasks.
        self._turns: set[asyncio.Task[None]] = set()
        # Sessions that are being made or deleted: done when that is over.
        self._writes: set[asyncio.Future[None]] = set()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._warmed = False
        self._warming: asyncio.Task[None] | None = None

    def after_round(self) -> None:
        """Look after the kept Runners; the client's thread calls this."""
        try:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._look_after)
        except RuntimeError:
            # Its loop is closed, and nobody has closed the Host: it serves nothing any more.
            self._client.detach(self)

    def warming(self) -> bool:
        """Return whether Runners are still to be built ahead."""
        policy = self._client.policy
        return not self._warmed and policy is not None and bool(policy.prewarm)

    async def run(
        self,
        tenant: str,
        user_id: str,
        session_id: str,
        message: Any,
        *,
        placement_version: str | None = None,
        sent_on: bool = False,
        turn_id: str | None = None,
        run_config: Any = None,
        abort_signal: asyncio.Event | None = None,
    ) -> AsyncGenerator[Any, None]:
        """Run one turn and yield the Runner's events: each one but a partial is stored by then.

        `sent_on`: the source of a split has answered NotHere. `turn_id`: the client's own name of
        the turn; sent again and again it is demand once. Nothing is entered before the first
        event is asked for. The tenant's count goes down when nothing of this turn can write any
        more, whether it was read to its end, raised, was cancelled, closed or dropped. Raises
        RetryLater's kinds before anything is written, TenantThrottled among them; from within a
        turn Draining, if its store was closed under it, and what a plugin refused; TurnTooLong.
        """
        loop = asyncio.get_running_loop()
        events = _Handover(loop)
        # The turn is a task of its own, so its end depends on no reader: google-adk runs the
        # agent in the background, and a reader that stalls or keeps an unread generator would
        # else keep the turn open, or let it be closed in a foreign context. It enters the fence
        # itself: a task that is cancelled before it starts has nothing to give back.
        turn = loop.create_task(
            self._turn(
                events,
                _Ask(tenant, user_id, session_id, placement_version, sent_on),
                turn_id,
                new_message=message,
                run_config=run_config,
                abort_signal=abort_signal,
            )
        )
        self._turns.add(turn)
        turn.add_done_callback(partial(self._ended, events))
        try:
            while (event := await events.next()) is not _END:
                yield event
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

        Let the client `leave()` first: it waits for the turns instead of cutting them. Who comes
        meanwhile or afterwards is told NotReady.
        """
        self._check_process()
        if self._closed:
            return
        self._closed = True
        self._client.detach(self)
        if self._warming is not None:
            self._warming.cancel()
            await asyncio.wait({self._warming})
        for turn in self._turns:
            turn.cancel()
        while running := self._turns | self._writes:
            await asyncio.wait(running)
        await self._cache.close()
        for key, service in self._services.items():
            close = getattr(service, "close", None)
            if close is None:
                continue
            try:
                await close()
            except Exception as error:
                # By its class: what a driver says may quote an address, and a password in it.
                log.warning("closing store %s failed: %s", key, type(error).__name__)
        self._services.clear()

    async def _turn(self, events: _Handover, ask: _Ask, turn_id: str | None, **run: Any) -> None:
        client = self._client
        try:
            async with self._entered(ask) as turn:
                # A turn that is refused here leaves the fence again at once.
                with client.admission.admit(turn.entry, turn_id):
                    service = self._service(turn.entry)
                    async with self._cache.use(turn.entry, service) as kept:
                        if not kept.plugins:
                            self._check_budget(turn.entry, turn_id)
                        try:
                            await self._run(events, ask, kept, Running(turn_id), run)
                        finally:
                            # Inside the fence, so the report that no longer counts this turn
                            # has it.
                            client.usage.served(ask.tenant, ask.user_id, str(ask.session_id))
        except Draining:
            client.usage.refused(ask.tenant, "draining", turn_id)
            raise
        finally:
            # The reader is woken by the last step of this task, not by a step after it.
            events.end()

    async def _run(
        self, events: _Handover, ask: _Ask, kept: Kept, running: Running, run: dict[str, Any]
    ) -> None:
        runner = kept.runner
        assert runner is not None  # Whoever uses it keeps it open.
        # The turn is a task of its own, and so is its context.
        RUNNING.set(running)
        counted = False
        stream = runner.run_async(user_id=ask.user_id, session_id=str(ask.session_id), **run)
        try:
            async with aclosing(stream):
                async for event in stream:
                    # Not before: what is refused from within is no turn that was served.
                    if not (counted or running.refused):
                        counted = True
                        self._client.usage.turn(ask.tenant)
                    if kept.plugins:
                        running.invocations.add(event.invocation_id)
                    else:
                        self._count(ask.tenant, event)
                    # One at a time: the agent goes on when the reader asks for more, as it
                    # would without us.
                    await events.give(event)
        except Exception as error:
            running.refused |= _refusal(error) is not None or is_closed(error)
            raise
        finally:
            if not (counted or running.refused):
                # Cancelled, failed, or ended without a word: it was let in all the same.
                self._client.usage.turn(ask.tenant)
            # google-adk tells a plugin nothing of a turn that was cancelled.
            for plugin in kept.plugins:
                for invocation in running.invocations:
                    plugin.forget(invocation)

    def _check_budget(self, entry: Entry, turn_id: str | None) -> None:
        """Raise TenantThrottled where a Runner has no plugin of ours that looks at the budget."""
        if wait := self._client.shares.budget_wait(entry):
            refused = budget_spent(entry, wait)
            self._client.usage.refused(entry.tenant, refused.reason, turn_id)
            raise refused

    def _belong_to(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._client.attach(self)

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            # A parent's connections: two processes on one would mix their answers.
            self._begin_anew()
            self._warmed = True

    def _look_after(self) -> None:
        """Drop what is kept for nothing; begin to build ahead once a policy says whom."""
        if self._closed:
            return  # Asked for before it was, from the client's thread.
        policy = self._client.policy
        self._cache.sweep(policy)
        if self._warmed or self._warming is not None or policy is None:
            return
        if not policy.prewarm:
            self._warmed = True
            return
        self._warming = asyncio.get_running_loop().create_task(self._warm(policy))

    async def _warm(self, policy: Policy) -> None:
        """Build the Runners of the most active tenants, as many as the time allows."""
        try:
            async with asyncio.timeout(PREWARM_SECONDS):
                mine = [entry for entry in policy.prewarm if self._prewarms(entry)]
                for entry in mine[: self._max_runners]:
                    await self._warm_one(entry)
        except TimeoutError:
            log.warning("not all Runners were built ahead within %s s", PREWARM_SECONDS)
        finally:
            self._warmed = True
            self._client.report_soon()

    async def _warm_one(self, entry: Entry) -> None:
        try:
            async with self._cache.use(entry, self._service(entry), weigh=True):
                pass
        except Exception as error:
            # One tenant's broken factory keeps no other from being served. By its class: what
            # it says may quote a secret.
            log.warning("no Runner ahead for %s: %s", entry.tenant, type(error).__name__)
        # Turns that came early run on meanwhile.
        await asyncio.sleep(0)

    async def _write(self, ask: _Ask, write: Callable[[Entry, Any], Awaitable[T]]) -> T:
        over = asyncio.get_running_loop().create_future()
        self._writes.add(over)
        try:
            async with self._entered(ask) as turn:
                return await write(turn.entry, self._service(turn.entry))
        finally:
            self._writes.discard(over)
            over.set_result(None)

    def _ended(self, events: _Handover, turn: asyncio.Task[None]) -> None:
        # Said already, but for a turn that was cancelled before its first step.
        events.end()
        self._turns.discard(turn)
        if not turn.cancelled():
            turn.exception()  # Looked at; the reader that would raise it may be gone.

    @asynccontextmanager
    async def _entered(self, ask: _Ask) -> AsyncIterator[Turn]:
        """Count the block in, and cut it at its deadline; or refuse it."""
        # A forked child's is as new, though its parent's was closed.
        if self._closed and self._pid == os.getpid():
            raise NotReady("this host is closed", retry_after_seconds=SOON_SECONDS)
        fence = self._client.fence
        try:
            with fence.enter(
                ask.tenant, ask.placement_version, sent_on=ask.sent_on, asks_store=True
            ) as turn:
                async with _Cut(self._deadlines, turn):
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
        except RetryLater:
            raise
        except Exception as error:
            if (refused_within := _refusal(error)) is not None:
                raise refused_within from None
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

    def _service(self, entry: Entry) -> Any:
        self._check_process()
        if self._loop is None:
            self._belong_to(asyncio.get_running_loop())
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
            self._client.usage.model_call(tenant, tokens_of(usage))


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


def _refusal(error: BaseException) -> RetryLater | None:
    """Return what refused a run from within: google-adk wraps what a plugin raises."""
    cause: BaseException | None = error
    for _ in range(6):
        if cause is None or isinstance(cause, RetryLater):
            return cause
        cause = cause.__cause__
    return None


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
