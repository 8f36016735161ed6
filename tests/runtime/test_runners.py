"""Kept Runners: how many, how long, built once, closed after use, built ahead."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from agent_runtime import Entry, Host, NotReady, PolicyClient, TenantThrottled, WrongRunner
from agent_runtime.histogram import Histogram
from agent_runtime.runners import RunnerCache, RunnerFigures
from tests.runtime.scripts import Factory, Runner, Sessions, until
from tests.runtime.wire import ControlPlane, DrivenClock, entry, limits, make_client

SERVICE = Sessions()


@pytest.fixture
def factory() -> Factory:
    return Factory()


@pytest.fixture
def figures() -> RunnerFigures:
    return RunnerFigures()


MakeCache = Callable[..., RunnerCache]


@pytest.fixture
async def make_cache(figures: RunnerFigures, clock: DrivenClock) -> AsyncIterator[MakeCache]:
    caches = []

    def make(factory: Any, **bounds: Any) -> RunnerCache:
        caches.append(RunnerCache(factory, figures, clock, **bounds))
        return caches[-1]

    yield make
    for cache in caches:
        await cache.close()


async def use(cache: RunnerCache, tenant: str, **changes: Any) -> Any:
    async with cache.use(Entry.parse(entry(tenant, **changes)), SERVICE) as kept:
        return kept.runner


def evicted(figures: RunnerFigures) -> dict[str, int]:
    return {cause: n for cause, n in figures.snapshot()["evicted"].items() if n}


# --- bounds -----------------------------------------------------------------------------------


async def test_the_longest_unused_is_dropped_for_another(
    make_cache: MakeCache, factory: Factory, figures: RunnerFigures
) -> None:
    cache = make_cache(factory, limit=2)
    for tenant in ("acme", "bolt", "acme", "core", "acme"):
        await use(cache, tenant)
    assert [one.entry.tenant for one in factory.built] == ["acme", "bolt", "core"]
    assert evicted(figures) == {"size": 1}
    assert len(cache) == figures.snapshot()["size"] == 2
    await until(lambda: factory.of("bolt").closed == 1)
    assert factory.of("acme").closed == 0


async def test_one_that_runs_is_dropped_only_if_all_do(
    make_cache: MakeCache, factory: Factory
) -> None:
    cache = make_cache(factory, limit=2)
    async with cache.use(Entry.parse(entry("acme")), SERVICE):
        await use(cache, "bolt")
        await use(cache, "core")
        await until(lambda: factory.of("bolt").closed == 1)
        async with cache.use(Entry.parse(entry("core")), SERVICE):
            await use(cache, "dorn")
            assert len(cache) == 2
            assert factory.of("acme").closed == 0  # Dropped, and not closed under its turn.
    await until(lambda: factory.of("acme").closed == 1)


async def test_one_that_was_idle_for_too_long_is_closed(
    make_cache: MakeCache, factory: Factory, figures: RunnerFigures, clock: DrivenClock
) -> None:
    cache = make_cache(factory, idle_seconds=1_800)
    await use(cache, "acme")
    await use(cache, "bolt")
    clock.advance(1_000)
    await use(cache, "acme")
    clock.advance(801)
    cache.sweep(None)
    assert evicted(figures) == {"idle": 1}
    await until(lambda: factory.of("bolt").closed == 1)
    clock.advance(1_000)
    cache.sweep(None)
    await until(lambda: factory.of("acme").closed == 1)
    assert len(cache) == 0


async def test_idle_is_counted_from_the_end_of_the_last_turn(
    make_cache: MakeCache, factory: Factory, clock: DrivenClock
) -> None:
    cache = make_cache(factory, idle_seconds=1_800)
    async with cache.use(Entry.parse(entry("acme")), SERVICE):
        clock.advance(5_000)
        cache.sweep(None)
        assert len(cache) == 1
    clock.advance(1_799)
    cache.sweep(None)
    assert len(cache) == 1


# --- built once -------------------------------------------------------------------------------


async def test_turns_that_come_together_wait_for_one_build(
    make_cache: MakeCache, figures: RunnerFigures
) -> None:
    built = []
    go = asyncio.Event()

    async def slowly(entry: Entry, service: Any) -> Runner:
        built.append(entry.tenant)
        await go.wait()
        return Runner(entry, service)

    cache = make_cache(slowly)
    turns = [asyncio.create_task(use(cache, "acme")) for _ in range(20)]
    other = asyncio.create_task(use(cache, "bolt"))
    await until(lambda: len(built) == 2)
    turns[0].cancel()  # The one that began the build.
    go.set()
    runners = await asyncio.gather(*turns[1:])
    await other
    assert len(set(map(id, runners))) == 1
    assert sorted(built) == ["acme", "bolt"]
    assert figures.snapshot()["builds"] == 2


async def test_a_build_that_fails_fails_all_who_waited_and_is_tried_again(
    make_cache: MakeCache, figures: RunnerFigures
) -> None:
    broken = True

    async def build(entry: Entry, service: Any) -> Runner:
        await asyncio.sleep(0)
        if broken:
            raise ZeroDivisionError
        return Runner(entry, service)

    cache = make_cache(build)
    done = await asyncio.gather(*(use(cache, "acme") for _ in range(5)), return_exceptions=True)
    assert [type(one) for one in done] == [ZeroDivisionError] * 5
    assert len(cache) == figures.snapshot()["size"] == 0
    broken = False
    assert await use(cache, "acme")
    assert figures.snapshot()["builds"] == 1


async def test_one_that_was_dropped_while_it_was_built_is_closed_after_its_turns(
    make_cache: MakeCache, factory: Factory
) -> None:
    go = asyncio.Event()

    async def slowly(entry: Entry, service: Any) -> Runner:
        await go.wait()
        return factory(entry, service)

    cache = make_cache(slowly, limit=1)
    first = asyncio.create_task(use(cache, "acme"))
    await asyncio.sleep(0)
    second = asyncio.create_task(use(cache, "bolt"))
    await asyncio.sleep(0)
    third = asyncio.create_task(use(cache, "core"))
    await asyncio.sleep(0)
    second.cancel()  # Nobody waits for that one.
    go.set()
    await asyncio.gather(first, third)
    await until(lambda: factory.of("acme").closed == factory.of("bolt").closed == 1)
    assert len(cache) == 1


async def test_closing_leaves_no_build_behind(make_cache: MakeCache, factory: Factory) -> None:
    go = asyncio.Event()

    async def slowly(entry: Entry, service: Any) -> Runner:
        await go.wait()
        return factory(entry, service)

    cache = make_cache(slowly, limit=1)
    waiting = [asyncio.create_task(use(cache, tenant)) for tenant in ("acme", "bolt")]
    await asyncio.sleep(0)
    for one in waiting:
        one.cancel()  # Nobody waits any more for what is built, kept or dropped already.
    await asyncio.wait(waiting)
    await cache.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert factory.built == []


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda e, s: Runner(Entry.parse(entry("bolt")), s), "of app 'support.bolt'"),
        (lambda e, s: Runner(e, Sessions()), "session service of its own"),
    ],
    ids=["app", "service"],
)
async def test_a_wrong_runner_is_refused_closed_and_not_kept(
    make_cache: MakeCache, wrong: Callable[..., Runner], says: str
) -> None:
    built: list[Runner] = []

    def build(entry: Entry, service: Any) -> Runner:
        built.append(wrong(entry, service))
        return built[-1]

    cache = make_cache(build)
    with pytest.raises(WrongRunner, match=says):
        await use(cache, "acme")
    assert [one.closed for one in built] == [1]
    assert len(cache) == 0


# --- what the policy says ---------------------------------------------------------------------


async def drop_by(plane: ControlPlane, client: PolicyClient, **changes: Any) -> Factory:
    """Let a Host hear of a change between two turns, and none after it."""
    factory = Factory()
    host = Host(client, {"pg-eu": Sessions, "other": Sessions}, factory)
    async for _ in host.run("acme", "u", "s", "1"):
        pass
    plane.publish(entry("acme", **changes))
    client.tick()
    await until(lambda: factory.built[0].closed == 1)
    await host.close()
    return factory


async def test_a_rotated_secret_ends_what_was_built_with_the_old_one(
    plane: ControlPlane, client: PolicyClient
) -> None:
    await drop_by(plane, client, runner_generation=2)
    assert evicted(client.runners) == {"generation": 1}


@pytest.mark.parametrize(
    "change",
    [{"accepts": "moved", "moved_to": "two"}, {"store": {"key": "other", "kind": "adk-sql"}}],
    ids=["moved", "another store"],
)
async def test_a_tenant_that_is_gone_leaves_no_runner(
    plane: ControlPlane, client: PolicyClient, change: dict[str, Any]
) -> None:
    await drop_by(plane, client, **change)
    assert evicted(client.runners) == {"gone": 1}


async def test_a_turn_that_runs_keeps_its_runner_through_a_rotation(
    plane: ControlPlane, client: PolicyClient
) -> None:
    factory = Factory()
    host = Host(client, {"pg-eu": Sessions}, factory)
    events = host.run("acme", "u", "s", "3")
    await anext(events)
    plane.publish(entry("acme", runner_generation=2))
    client.tick()
    await until(lambda: bool(evicted(client.runners)))
    async for _ in host.run("acme", "u", "s", "1"):
        pass
    assert [one.closed for one in factory.built] == [0, 0]
    assert len([event async for event in events]) == 2
    await until(lambda: [one.closed for one in factory.built] == [1, 0])
    await host.close()
    assert [one.closed for one in factory.built] == [1, 1]


# --- built ahead ------------------------------------------------------------------------------


@pytest.fixture
def cold(plane: ControlPlane, clock: DrivenClock) -> PolicyClient:
    """A client that has not joined; its cell says whom to build ahead."""
    plane.publish(
        entry("acme"), entry("bolt"), entry("core"), entry("gone", accepts="moved", moved_to="two")
    )
    plane.publish_cell(prewarm=["bolt", "gone", "nobody", "core"])
    return make_client(plane, clock)


async def test_a_process_is_ready_when_the_most_active_are_built(
    plane: ControlPlane, cold: PolicyClient
) -> None:
    built: list[str] = []
    go = asyncio.Event()

    async def build(entry: Entry, service: Any) -> Runner:
        built.append(entry.tenant)
        await go.wait()
        return Runner(entry, service)

    host = Host(cold, {"pg-eu": Sessions}, build)
    assert not cold.ready
    cold.tick()
    assert (cold.ready, plane.reports[-1]["ready"]) == (False, False)
    await until(lambda: built == ["bolt"])
    go.set()
    await until(lambda: cold.ready)
    assert built == ["bolt", "core"]
    cold.tick()
    assert plane.reports[-1]["ready"] is True
    assert plane.reports[-1]["runners"]["builds"] == 2
    await host.close()


async def test_a_build_that_hangs_or_fails_keeps_no_process_from_being_ready(
    cold: PolicyClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_runtime.host.PREWARM_SECONDS", 0.1)
    built: list[str] = []

    async def build(entry: Entry, service: Any) -> Runner:
        built.append(entry.tenant)
        if entry.tenant == "core":
            await asyncio.sleep(60)
        raise ZeroDivisionError

    host = Host(cold, {"pg-eu": Sessions}, build)
    cold.tick()
    await until(lambda: cold.ready)
    assert built == ["bolt", "core"]
    await host.close()


async def test_turns_that_come_before_that_are_served(cold: PolicyClient) -> None:
    go = asyncio.Event()

    async def build(entry: Entry, service: Any) -> Runner:
        if entry.tenant == "bolt":
            await go.wait()
        return Runner(entry, service)

    host = Host(cold, {"pg-eu": Sessions}, build)
    cold.tick()
    assert len([event async for event in host.run("acme", "u", "s", "2")]) == 2
    assert not cold.ready
    go.set()
    await until(lambda: cold.ready)
    await host.close()


async def test_a_host_that_is_closed_or_gone_with_its_loop_keeps_nobody_waiting(
    plane: ControlPlane, cold: PolicyClient
) -> None:
    async def hang(entry: Entry, service: Any) -> Runner:
        await asyncio.sleep(60)
        raise AssertionError

    async def leave_behind() -> None:
        Host(cold, {"pg-eu": Sessions}, hang)

    await asyncio.to_thread(asyncio.run, leave_behind())
    host = Host(cold, {"pg-eu": Sessions}, hang)
    cold.tick()
    assert not cold.ready
    await host.close()
    assert cold.ready


async def test_one_of_an_old_secret_that_a_late_turn_had_built_is_closed_too(
    make_cache: MakeCache, factory: Factory, plane: ControlPlane, client: PolicyClient
) -> None:
    """It had entered before the secret was rotated, and came for its Runner after that."""
    cache = make_cache(factory)
    plane.publish(entry("acme", runner_generation=2))
    client.tick()
    cache.sweep(client.policy)
    await use(cache, "acme", runner_generation=1)
    await use(cache, "acme", runner_generation=2)
    cache.sweep(client.policy)
    await until(lambda: [one.closed for one in factory.built] == [1, 0])


# --- closing ----------------------------------------------------------------------------------


async def test_a_host_that_closes_lets_nobody_in_any_more(client: PolicyClient) -> None:
    factory = Factory()
    host = Host(client, {"pg-eu": Sessions}, factory)
    assert [event.text async for event in host.run("acme", "u", "s", "1")]
    closing = asyncio.create_task(host.close())
    await asyncio.sleep(0)
    for _ in range(2):
        with pytest.raises(NotReady, match="closed"):
            await anext(host.run("acme", "u", "s", "1"))
        with pytest.raises(NotReady, match="closed"):
            await host.create_session("acme", "u")
        await closing
    await host.close()
    host.after_round()
    await asyncio.sleep(0)
    assert [one.closed for one in factory.built] == [1]
    assert client.fence.word().in_flight == client.admission.running() == {}
    assert client.runners.snapshot()["size"] == client.runners.snapshot()["limit"] == 0


async def test_closing_a_host_waits_for_a_session_that_is_being_made(
    client: PolicyClient,
) -> None:
    began, go, done = asyncio.Event(), asyncio.Event(), []

    class Slow(Sessions):
        async def create_session(self, *, session_id: str | None = None, **where: Any) -> Any:
            began.set()
            await go.wait()
            done.append("made")
            return await super().create_session(session_id=session_id)

        async def close(self) -> None:
            done.append("closed")

    host = Host(client, {"pg-eu": Slow}, Factory())
    making = asyncio.create_task(host.create_session("acme", "u", session_id="s9"))
    await began.wait()
    closing = asyncio.create_task(host.close())
    for _ in range(5):
        await asyncio.sleep(0)
    go.set()
    assert (await making).id == "s9"
    await closing
    assert done == ["made", "closed"]


async def test_a_service_that_fails_to_close_keeps_no_other_open(
    plane: ControlPlane, client: PolicyClient, caplog: pytest.LogCaptureFixture
) -> None:
    closed: list[str] = []

    class Store(Sessions):
        def __init__(self, name: str) -> None:
            self.name = name

        async def close(self) -> None:
            closed.append(self.name)
            raise RuntimeError("secret-of-a-connection")

    stores = {name: partial(Store, name) for name in ("pg-eu", "other")}
    host = Host(client, stores, Factory())
    plane.publish(entry("bolt", store={"key": "other", "kind": "adk-sql"}))
    client.tick()
    for tenant in ("acme", "bolt"):
        await host.create_session(tenant, "u")
    await host.close()
    assert closed == ["pg-eu", "other"]
    assert "closing store other failed: RuntimeError" in caplog.text
    assert "secret-of-a-connection" not in caplog.text


# --- figures ----------------------------------------------------------------------------------


async def test_two_builds_at_once_are_not_weighed_on_one_pair_of_scales(
    make_cache: MakeCache, figures: RunnerFigures, factory: Factory
) -> None:
    go = asyncio.Event()
    weights: list[bytearray] = []

    async def heavy(entry: Entry, service: Any) -> Runner:
        await (go.wait() if entry.tenant == "bolt" else asyncio.sleep(0.01))
        weights.append(bytearray(1_000_000))
        return factory(entry, service)

    async def weigh(tenant: str) -> None:
        async with make_cache(heavy).use(Entry.parse(entry(tenant)), SERVICE, weigh=True):
            pass

    figures.built(0.01)
    first, second = asyncio.create_task(weigh("acme")), asyncio.create_task(weigh("bolt"))
    await first
    go.set()
    await second
    assert figures.snapshot()["bytes"] == pytest.approx(1_000_000, rel=0.1)
    assert not tracemalloc.is_tracing()


async def test_a_build_that_fails_leaves_the_scales_to_the_next(
    make_cache: MakeCache, figures: RunnerFigures, factory: Factory
) -> None:
    def broken(entry: Entry, service: Any) -> Runner:
        raise RuntimeError("told to fail")

    figures.built(0.01)
    for build in (broken, factory):
        with suppress(RuntimeError):
            async with make_cache(build).use(Entry.parse(entry()), SERVICE, weigh=True):
                pass
    assert figures.snapshot()["bytes"]


async def test_what_a_runner_weighs_is_measured_once(cold: PolicyClient) -> None:
    class Heavy(Runner):
        def __init__(self, entry: Entry, service: Any) -> None:
            super().__init__(entry, service)
            self.weight = bytearray(1_000_000)

    host = Host(cold, {"pg-eu": Sessions}, Heavy)
    cold.tick()
    await until(lambda: cold.ready)
    assert cold.runners.snapshot()["bytes"] == pytest.approx(1_000_000, rel=0.1)
    assert not tracemalloc.is_tracing()
    assert not cold.runners.begin_weighing()
    await host.close()


def test_the_slowest_builds_are_seen() -> None:
    figures = RunnerFigures()
    for _ in range(99):
        figures.built(0.01)
    figures.built(2.0)
    said = figures.snapshot()["build_ms"]
    assert said["p50"] == pytest.approx(10, rel=0.03)
    assert said["p99"] == pytest.approx(10, rel=0.03)
    figures.built(2.0)
    assert figures.snapshot()["build_ms"]["p99"] == pytest.approx(2_000, rel=0.03)


@pytest.mark.parametrize("odd", [0.0, -5.0, 1e300])
def test_a_duration_that_no_clock_measures_breaks_no_histogram(odd: float) -> None:
    histogram = Histogram()
    histogram.add(odd)
    assert histogram.quantile(0.5) is not None
    assert Histogram().quantile(0.5) is None


async def test_a_turn_that_is_refused_builds_nothing(
    plane: ControlPlane, client: PolicyClient
) -> None:
    plane.publish(entry("acme", scope=limits(max_concurrent_runs=3)))
    client.tick()
    factory = Factory()
    host = Host(client, {"pg-eu": Sessions}, factory)
    with pytest.raises(TenantThrottled):
        await anext(host.run("acme", "u", "s", "1"))
    assert factory.built == []
    await host.close()
