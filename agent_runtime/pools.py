"""A thread for each tier: what blocks one tenant's agent blocks only who shares its thread.

Tenants of the pooled tier share one. Each tenant of the bridge or silo tier has its own, with an
event loop, a Host and connections of its own: a tool that forgets to be asynchronous, or a model
that answers with a megabyte, holds up nobody else.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from agent_runtime.client import PolicyClient
from agent_runtime.errors import NoPool, NotReady
from agent_runtime.fence import SOON_SECONDS
from agent_runtime.host import Host
from agent_runtime.policy import Entry
from agent_runtime.runners import IDLE_SECONDS, Factory

log = logging.getLogger(__name__)

T = TypeVar("T")

# Threads with a loop, the shared one among them.
MAX_POOLS = 64
# Runners of a pool that has one tenant.
OWN_RUNNERS = 2
# What closing a pool may take.
CLOSE_SECONDS = 15.0

POOLED = "pooled"

# The end of a stream of events.
_END = object()


class _Pool:
    """One thread, its event loop, and the Host that lives there."""

    def __init__(self, name: str, make_host: Callable[[], Host]) -> None:
        self.name = name
        # Calls of it that have not ended, and the boot time of the last. TierPools' lock.
        self.users = 0
        self.last_used = 0.0
        self._make_host = make_host
        # Whether the Host is there.
        self.begun = threading.Event()
        self._loop = asyncio.new_event_loop()
        # The first thing that runs in the loop: whatever is sent there finds a Host.
        self._loop.call_soon(self._begin)
        self._lock = threading.Lock()
        # Callers that wait here, each with its loop. None: the thread is over.
        self._waiting: dict[asyncio.Future[Any], asyncio.AbstractEventLoop] | None = {}
        self._thread = threading.Thread(
            target=self._run, name=f"switchyard-pool-{name or POOLED}", daemon=True
        )
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    async def call(self, work: Callable[[Host], Coroutine[Any, Any, T]]) -> T:
        """Run `work` in the pool's loop and wait for its end, also when the caller is cancelled.

        A turn counts until nothing of it can write, so a caller that is cancelled cancels it
        there and goes on when it has ended. Raises NotReady where the pool is over.
        """
        caller = asyncio.get_running_loop()
        # The task when it is done; None: the pool ended under it.
        ended: asyncio.Future[asyncio.Task[T] | None] = caller.create_future()
        task: asyncio.Task[T]

        def begin() -> None:
            nonlocal task
            # In a copy of the caller's context, as any callback: its trace goes along.
            task = self._loop.create_task(work(self.host))
            task.add_done_callback(tell)

        def tell(task: asyncio.Task[T]) -> None:
            if not task.cancelled():
                task.exception()  # Looked at; the caller that would raise it may be gone.
            self._answer(ended, task)

        with self._lock:
            if self._waiting is None:
                raise _closed()
            try:
                self._loop.call_soon_threadsafe(begin)
            except RuntimeError:  # Its loop is closed, and its thread about to say so.
                raise _closed() from None
            self._waiting[ended] = caller
        try:
            await asyncio.wait({ended})
        except asyncio.CancelledError:
            with suppress(RuntimeError):  # Its loop is over: that has answered, or will.
                self._loop.call_soon_threadsafe(lambda: task.cancel())
            while not ended.done():
                with suppress(asyncio.CancelledError):  # Once more: it changes nothing.
                    await asyncio.wait({ended})
            raise
        done = ended.result()
        if done is None:
            raise _closed()
        return done.result()

    def end(self) -> None:
        """Have the Host closed and the thread ended. Nobody may come any more."""
        with suppress(RuntimeError):  # It has ended.
            self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._close()))

    def join(self, seconds: float) -> None:
        """Block until the thread has ended, `seconds` at most."""
        self._thread.join(seconds)

    def _begin(self) -> None:
        self.host = self._make_host()
        self.begun.set()

    def _run(self) -> None:
        try:
            # The Runner sees to the end: it cancels what is left and closes the loop.
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.get_loop().run_forever()
        finally:
            with self._lock:
                waiting, self._waiting = self._waiting or {}, None
            for ended, caller in waiting.items():
                _settle(ended, caller, None)

    async def _close(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.host.close()
        except Exception as error:
            log.warning("closing the pool %s failed: %s", self.name, type(error).__name__)
        finally:
            self._loop.stop()

    def _answer(self, ended: asyncio.Future[Any], task: asyncio.Task[Any]) -> None:
        with self._lock:
            caller = (self._waiting or {}).pop(ended, None)
        if caller is not None:
            _settle(ended, caller, task)


def _settle(ended: asyncio.Future[Any], caller: asyncio.AbstractEventLoop, result: object) -> None:
    def settle() -> None:
        if not ended.done():
            ended.set_result(result)

    with suppress(RuntimeError):  # The caller's loop is closed, and the caller with it.
        caller.call_soon_threadsafe(settle)


class TierPools:
    """Serves turns as a Host does, each in the thread of its tenant's tier.

    Called from any event loop, several at once too: `run`, `create_session` and `delete_session`
    are those of `Host`. Stores and Runners are made in each thread, and used only there. The
    number of threads is bounded; that of a single tenant ends when it was idle for a while.
    """

    def __init__(
        self,
        client: PolicyClient,
        stores: Mapping[str, Callable[[], Any]],
        runners: Factory,
        *,
        limit: int = MAX_POOLS,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        """Start the thread that tenants share.

        `limit` bounds the threads, the shared one among them; a tenant's own pool, like its
        Runner, is kept for `idle_seconds` after its last turn.
        """
        if limit < 1:
            raise ValueError("there has to be room for the pool that tenants share")
        self._client = client
        self._stores = stores
        self._runners = runners
        self._limit = limit
        self._idle_seconds = idle_seconds
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Start with the shared pool. A forked child has none of its parent's threads."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        # By tenant; the shared one by "", which is no tenant's slug.
        self._pools = {"": self._start("")}
        # Told to end, and perhaps not gone yet.
        self._ending: list[_Pool] = []
        # Whether the tenants that are to be built ahead have their pools.
        self._begun = False
        self._client.attach(self)
        self.after_round()

    def __len__(self) -> int:
        """Return how many threads there are, those that are ending too."""
        with self._lock:
            self._ending = [pool for pool in self._ending if pool.alive]
            return len(self._pools) + len(self._ending)

    async def run(
        self,
        tenant: str,
        user_id: str,
        session_id: str,
        message: Any,
        *,
        abort_signal: asyncio.Event | None = None,
        **options: Any,
    ) -> AsyncGenerator[Any, None]:
        """Run one turn in its pool and yield its events, one when the reader asks for it.

        Takes and raises what `Host.run` does, and NoPool. Read to its end, cancelled, closed or
        dropped here, the turn ends there, and this ends after it.
        """
        events: AsyncGenerator[Any, None] | None = None
        inner = asyncio.Event()

        async def step(host: Host) -> Any:
            nonlocal events
            if events is None:
                signal = None if abort_signal is None else inner
                events = host.run(
                    tenant, user_id, session_id, message, abort_signal=signal, **options
                )
            return await anext(events, _END)

        async def finish(host: Host) -> None:
            if events is not None:
                await events.aclose()

        async def abort(host: Host) -> None:
            inner.set()

        async def watch(signal: asyncio.Event) -> None:
            # An Event is of one loop: what is set here has to be set there.
            await signal.wait()
            with suppress(NotReady):
                await pool.call(abort)

        pool = self._enter(tenant)
        watching = None
        try:
            if abort_signal is not None:
                watching = asyncio.get_running_loop().create_task(watch(abort_signal))
            while (event := await pool.call(step)) is not _END:
                yield event
        finally:
            try:
                if watching is not None:
                    watching.cancel()
                    await asyncio.wait({watching})
                with suppress(NotReady):  # The pool is over, and the turn with it.
                    await pool.call(finish)
            finally:
                self._leave(pool)

    async def create_session(self, tenant: str, user_id: str, **options: Any) -> Any:
        """Create a session as `Host.create_session` does, in the tenant's pool."""
        return await self._in_pool(tenant, lambda h: h.create_session(tenant, user_id, **options))

    async def delete_session(
        self, tenant: str, user_id: str, session_id: str, **options: Any
    ) -> None:
        """Delete a session as `Host.delete_session` does, in the tenant's pool."""
        await self._in_pool(
            tenant, lambda h: h.delete_session(tenant, user_id, session_id, **options)
        )

    async def close(self) -> None:
        """End what runs, close every Host, end every thread.

        Let the client `leave()` first: it waits for the turns instead of cutting them.
        """
        if self._pid != os.getpid():
            return
        self._client.detach(self)
        with self._lock:
            self._closed = True
            for name in list(self._pools):
                self._retire(name)
            ending = list(self._ending)
        for pool in ending:
            await asyncio.to_thread(pool.join, CLOSE_SECONDS)

    def after_round(self) -> None:
        """Begin the pools of tenants to be built ahead, end idle ones; the client calls this."""
        policy = self._client.policy
        now = self._client.clock.boottime()
        with self._lock:
            if self._closed:
                return
            if policy is not None and not self._begun:
                self._begun = True
                for name in map(_pool_name, policy.prewarm):
                    if name not in self._pools and len(self._pools) < self._limit:
                        self._pools[name] = self._start(name)
            for name, pool in list(self._pools.items()):
                if name and not pool.users and pool.last_used + self._idle_seconds <= now:
                    self._retire(name)

    def warming(self) -> bool:
        """Return whether Hosts are still to be made; each answers for its Runners by itself."""
        policy = self._client.policy
        if policy is None or not policy.prewarm:
            return False
        with self._lock:
            return not (self._begun and all(pool.begun.is_set() for pool in self._pools.values()))

    async def _in_pool(self, tenant: str, work: Callable[[Host], Coroutine[Any, Any, T]]) -> T:
        pool = self._enter(tenant)
        try:
            return await pool.call(work)
        finally:
            self._leave(pool)

    def _enter(self, tenant: str) -> _Pool:
        """Return the tenant's pool, which is not ended before `_leave`. Raises NoPool, NotReady."""
        if self._pid != os.getpid():
            self._begin_anew()
        policy = self._client.policy
        entry = None if policy is None else policy.entries.get(tenant)
        # Whom nobody knows the shared pool's Host refuses.
        name = "" if entry is None else _pool_name(entry)
        with self._lock:
            if self._closed:
                raise _closed()
            pool = self._pools.get(name)
            if pool is None:
                self._make_room(tenant)
                pool = self._pools[name] = self._start(name)
            pool.users += 1
            return pool

    def _leave(self, pool: _Pool) -> None:
        with self._lock:
            pool.users -= 1
            pool.last_used = self._client.clock.boottime()

    def _make_room(self, tenant: str) -> None:
        """End the longest idle pool if there is no room for another. The lock is held."""
        if len(self._pools) < self._limit:
            return
        self._ending = [pool for pool in self._ending if pool.alive]
        idle = [name for name, pool in self._pools.items() if name and not pool.users]
        # Those that are ending are threads too, until their connections are closed.
        if not idle or len(self._ending) >= self._limit:
            raise NoPool(
                f"{tenant} needs a thread of its own, and this process has {self._limit} at most. "
                "Raise `limit`, or serve fewer tenants of the bridge and silo tiers here.",
                retry_after_seconds=SOON_SECONDS,
            )
        self._retire(min(idle, key=lambda name: self._pools[name].last_used))

    def _retire(self, name: str) -> None:
        pool = self._pools.pop(name)
        pool.end()
        self._ending = [*(one for one in self._ending if one.alive), pool]

    def _start(self, name: str) -> _Pool:
        def make_host() -> Host:
            return Host(
                self._client,
                self._stores,
                self._runners,
                # A tenant of its own has one, and another while its secret rotates.
                max_runners=OWN_RUNNERS if name else None,
                idle_seconds=self._idle_seconds,
                prewarms=lambda entry: _pool_name(entry) == name,
            )

        pool = _Pool(name, make_host)
        pool.last_used = self._client.clock.boottime()
        return pool


def _closed() -> NotReady:
    return NotReady("this process has closed its pools", retry_after_seconds=SOON_SECONDS)


def _pool_name(entry: Entry) -> str:
    return "" if entry.tier == POOLED else entry.tenant
