"""Kept Runners: one per tenant, store and generation, bounded, closed when nobody runs on them.

google-adk isn't imported here: what a Runner has to be is said below. A Runner holds no
conversation, those are in the store; dropping one costs building it again.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import threading
import time
import tracemalloc
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Literal, Protocol

from agent_runtime.clock import Clock
from agent_runtime.errors import WrongRunner
from agent_runtime.histogram import Histogram
from agent_runtime.policy import ACCEPTS_MOVED, Entry, Policy

log = logging.getLogger(__name__)

MAX_RUNNERS = 2_000
# After the last access.
IDLE_SECONDS = 1_800.0

Cause = Literal["size", "idle", "generation", "gone"]

# (tenant, store key, generation)
Key = tuple[str, str, int]


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


# Builds a tenant's Runner from its entry and its store's session service.
Factory = Callable[[Entry, Any], Runner | Awaitable[Runner]]


class RunnerFigures:
    """What all the caches of a process have to tell, for its reports. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._size = 0
        self._limit = 0
        self._idle_seconds = IDLE_SECONDS
        self._evicted: Counter[str] = Counter(size=0, idle=0, generation=0, gone=0)
        self._builds = Histogram()
        self._bytes: int | None = None
        self._weighing = False

    def opened(self, limit: int, idle_seconds: float) -> None:
        """Add a cache, and its bounds."""
        with self._lock:
            self._limit += limit
            self._idle_seconds = idle_seconds

    def closed(self, limit: int) -> None:
        """Take a cache away."""
        with self._lock:
            self._limit -= limit

    def kept(self, change: int) -> None:
        """Change how many Runners are kept."""
        with self._lock:
            self._size += change

    def evicted(self, cause: Cause) -> None:
        """Count a Runner that was dropped, and why."""
        with self._lock:
            self._evicted[cause] += 1

    def built(self, seconds: float) -> None:
        """Count a build, and what it took."""
        with self._lock:
            self._builds.add(seconds * 1000)

    def begin_weighing(self) -> bool:
        """Return whether the next build is to be weighed; if so, say `weighed` in the end.

        One in a process: the scales are the process's, and slow. Not the first build, which
        imports what all of them share.
        """
        with self._lock:
            if self._bytes is not None or self._weighing or not self._builds.count:
                return False
            self._weighing = True
            return True

    def weighed(self, size: int | None) -> None:
        """Note what one Runner weighs. None: its build failed, and another may be weighed."""
        with self._lock:
            self._weighing = False
            self._bytes = None if size is None else max(0, size)

    def snapshot(self) -> dict[str, Any]:
        """Return the figures as a report has them."""
        with self._lock:
            return {
                "size": self._size,
                "limit": self._limit,
                "idle_seconds": self._idle_seconds,
                "evicted": dict(self._evicted),
                "builds": self._builds.count,
                "build_ms": {
                    "p50": _rounded(self._builds.quantile(0.5)),
                    "p99": _rounded(self._builds.quantile(0.99)),
                },
                "bytes": self._bytes,
            }


class Kept:
    """One Runner and who uses it."""

    __slots__ = ("build", "evicted", "key", "last_used", "plugins", "runner", "users")

    def __init__(self, key: Key, now: float) -> None:
        self.key = key
        # None until it is built.
        self.runner: Runner | None = None
        # The one build that all wait for who want it meanwhile.
        self.build: asyncio.Task[None] | None = None
        # Its plugins that hold counters per run, and count the usage of a run.
        self.plugins: tuple[Any, ...] = ()
        # Turns that run on it, or wait for it.
        self.users = 0
        # Boot time.
        self.last_used = now
        # No longer kept: it is closed when the last turn on it has ended.
        self.evicted = False


class Use:
    """One use of a Runner, for the length of a block.

    Not an asynccontextmanager: each of those is an async generator that the loop keeps book of,
    which is felt where a turn costs a few dozen microseconds.
    """

    __slots__ = ("_ask", "_cache", "_kept")

    def __init__(self, cache: RunnerCache, entry: Entry, service: Any, weigh: bool) -> None:
        self._cache = cache
        self._ask = (entry, service, weigh)

    async def __aenter__(self) -> Kept:
        kept = self._kept = self._cache.hold(*self._ask)
        if kept.runner is None and kept.build is not None:
            try:
                # Shielded: others wait for it too.
                await asyncio.shield(kept.build)
            except BaseException:
                self._cache.let_go(kept)
                raise
        return kept

    async def __aexit__(self, *_: object) -> None:
        self._cache.let_go(self._kept)


class RunnerCache:
    """Keeps the Runners of one Host. Belongs to its event loop."""

    def __init__(
        self,
        factory: Factory,
        figures: RunnerFigures,
        clock: Clock,
        *,
        limit: int = MAX_RUNNERS,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        """Keep at most `limit`, each for `idle_seconds` after it was last used."""
        self._factory = factory
        self._figures = figures
        self._clock = clock
        self._limit = limit
        self._idle_seconds = idle_seconds
        # The longest unused first.
        self._kept: OrderedDict[Key, Kept] = OrderedDict()
        # asyncio keeps only weak references to tasks.
        self._building: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        # By which all that is kept was looked through for what nobody may use any more.
        self._policy: Policy | None = None
        figures.opened(limit, idle_seconds)

    def __len__(self) -> int:
        return len(self._kept)

    def use(self, entry: Entry, service: Any, *, weigh: bool = False) -> Use:
        """Have the tenant's Runner while the block runs; it is built if need be, once for all.

        An eviction takes it out of the cache, never from under the block. `weigh`: measure what
        a build of it takes up. Raises WrongRunner, and whatever the factory raises.
        """
        return Use(self, entry, service, weigh)

    def hold(self, entry: Entry, service: Any, weigh: bool) -> Kept:
        """Begin to use the tenant's Runner, and to build it where there is none."""
        key = (entry.tenant, entry.store_key, entry.runner_generation)
        kept = self._kept.get(key)
        if kept is None:
            kept = self._add(key)
            kept.build = asyncio.get_running_loop().create_task(
                self._build(kept, entry, service, weigh)
            )
            self._building.add(kept.build)
            kept.build.add_done_callback(self._built)
        kept.users += 1
        self._touch(kept)
        return kept

    def let_go(self, kept: Kept) -> None:
        """End a use of it."""
        kept.users -= 1
        self._touch(kept)
        if kept.evicted and not kept.users:
            self._close(kept)

    def sweep(self, policy: Policy | None) -> None:
        """Drop what was idle for too long, and what `policy` allows nobody to use any more."""
        now = self._clock.boottime()
        for kept in list(self._kept.values()):
            if kept.last_used + self._idle_seconds > now:
                break
            if not kept.users:
                self._evict(kept, "idle")
        if policy is None or policy is self._policy:
            return
        self._policy = policy
        for kept in list(self._kept.values()):
            tenant, store_key, generation = kept.key
            entry = policy.entries.get(tenant)
            if entry is None or entry.accepts == ACCEPTS_MOVED or entry.store_key != store_key:
                self._evict(kept, "gone")
            elif entry.runner_generation != generation:
                # A secret was rotated: what was built with the old one is not used again.
                self._evict(kept, "generation")

    async def close(self) -> None:
        """Close every Runner. Whoever uses one has ended by then, and nobody comes any more."""
        for kept in list(self._kept.values()):
            self._drop(kept)
        # Nobody waits for them any more; each would leave a Runner that nobody closes.
        for build in self._building:
            build.cancel()
        while tasks := self._building | self._closing:
            await asyncio.wait(tasks)
        self._figures.closed(self._limit)

    def _add(self, key: Key) -> Kept:
        kept = self._kept[key] = Kept(key, self._clock.boottime())
        # A turn that entered before a secret was rotated may come for its Runner after that.
        self._policy = None
        self._figures.kept(1)
        if len(self._kept) > self._limit:
            # The longest unused. One on which a turn runs only if there is no other: it would
            # be built again while it lives.
            others = [one for one in self._kept.values() if one is not kept]
            self._evict(next((one for one in others if not one.users), others[0]), "size")
        return kept

    async def _build(self, kept: Kept, entry: Entry, service: Any, weigh: bool) -> None:
        began = time.perf_counter()
        try:
            with _Scales(self._figures, wanted=weigh and self._figures.begin_weighing()):
                made = self._factory(entry, service)
                runner = await made if inspect.isawaitable(made) else made
            await _check(runner, entry, service)
        except BaseException:
            if not kept.evicted:
                self._drop(kept)
            raise
        self._figures.built(time.perf_counter() - began)
        plugins = getattr(getattr(runner, "plugin_manager", None), "plugins", ())
        # By a word of our own: somebody else's plugin may well have something to forget.
        kept.plugins = tuple(one for one in plugins if getattr(one, "counts_runs", False) is True)
        kept.runner = runner
        if kept.evicted and not kept.users:
            self._close(kept)  # Evicted while it was built, and everybody has gone.

    def _built(self, build: asyncio.Task[None]) -> None:
        self._building.discard(build)
        if not build.cancelled():
            build.exception()  # Looked at: the turns that would raise it may be gone.

    def _touch(self, kept: Kept) -> None:
        kept.last_used = self._clock.boottime()
        if not kept.evicted:
            self._kept.move_to_end(kept.key)

    def _evict(self, kept: Kept, cause: Cause) -> None:
        self._figures.evicted(cause)
        self._drop(kept)

    def _drop(self, kept: Kept) -> None:
        del self._kept[kept.key]
        self._figures.kept(-1)
        kept.evicted = True
        if not kept.users:
            self._close(kept)

    def _close(self, kept: Kept) -> None:
        runner, kept.runner = kept.runner, None
        if runner is None:
            return  # Not built yet, or closed.
        task = asyncio.get_running_loop().create_task(_shut(runner, kept.key[0]))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


class _Scales:
    """Measures what the block allocates and keeps."""

    def __init__(self, figures: RunnerFigures, *, wanted: bool) -> None:
        self._figures = figures
        self._wanted = wanted
        self._own = False
        self._before = 0

    def __enter__(self) -> None:
        if self._wanted:
            self._own = not tracemalloc.is_tracing()
            if self._own:
                tracemalloc.start()
            self._before = tracemalloc.get_traced_memory()[0]

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self._wanted:
            gc.collect()  # What only the build needed is no part of the Runner.
            after = tracemalloc.get_traced_memory()[0]
            if self._own:
                tracemalloc.stop()
            self._figures.weighed(after - self._before if kind is None else None)


async def _check(runner: Runner, entry: Entry, service: Any) -> None:
    """Raise WrongRunner where it would write what the fence, and a move, know nothing of."""
    if runner.app_name != entry.app_name:
        wrong = f"is of app {runner.app_name!r}, not {entry.app_name!r}"
    elif runner.session_service is not service:
        wrong = f"has a session service of its own, not the one of store {entry.store_key}"
    else:
        return
    await _shut(runner, entry.tenant)
    raise WrongRunner(f"the runner built for {entry.tenant} {wrong}")


async def _shut(runner: Runner, tenant: str) -> None:
    try:
        await runner.close()
    except Exception as error:
        # By its class: what a toolset says of its end may quote an address, or a token.
        log.warning("closing a runner of %s failed: %s", tenant, type(error).__name__)


def _rounded(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else round(milliseconds, 3)
