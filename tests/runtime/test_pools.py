"""Threads for tiers: who shares one, and a turn that crosses from one event loop to another."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

import pytest

from agent_runtime import (
    Behind,
    Host,
    NoPool,
    NotReady,
    PolicyClient,
    TenantThrottled,
    TierPools,
    WrongRunner,
)
from tests.runtime.scripts import Factory, Runner, Sessions, until
from tests.runtime.wire import ControlPlane, DrivenClock, entry, limits, make_client, share


@pytest.fixture
def client(plane: ControlPlane, clock: DrivenClock) -> PolicyClient:
    """One of a cell with tenants of every tier."""
    plane.publish(
        entry("acme"),
        entry("bolt"),
        *(entry(name, tier="bridge") for name in ("big", "huge", "vast")),
        entry("solo", tier="silo"),
    )
    client = make_client(plane, clock)
    client.tick()
    return client


@pytest.fixture
def factory() -> Factory:
    return Factory()


MakePools = Callable[..., TierPools]


@pytest.fixture
async def make_pools(client: PolicyClient) -> AsyncIterator[MakePools]:
    made: list[TierPools] = []

    def make(factory: Any, **bounds: Any) -> TierPools:
        made.append(TierPools(client, {"pg-eu": Sessions}, factory, **bounds))
        return made[-1]

    yield make
    for pools in made:
        await pools.close()


@pytest.fixture
def pools(make_pools: MakePools, factory: Factory) -> TierPools:
    return make_pools(factory)


async def turn(pools: TierPools, tenant: str, text: str = "2", **options: Any) -> list[Any]:
    return [event async for event in pools.run(tenant, "u", "s", text, **options)]


def inside(client: PolicyClient) -> dict[str, int]:
    running = client.admission.running()
    assert set(running) == set(client.fence.word().in_flight)
    return running


# --- who shares a thread ----------------------------------------------------------------------


async def test_each_tier_has_the_threads_that_it_should(pools: TierPools) -> None:
    threads = {
        tenant: {event.thread for event in await turn(pools, tenant)}
        for tenant in ("acme", "bolt", "big", "huge", "solo")
    }
    assert threads == {
        "acme": {"switchyard-pool-pooled"},
        "bolt": {"switchyard-pool-pooled"},
        "big": {"switchyard-pool-big"},
        "huge": {"switchyard-pool-huge"},
        "solo": {"switchyard-pool-solo"},
    }
    assert len(pools) == 4


async def test_a_tool_that_blocks_holds_up_only_its_own_thread(pools: TierPools) -> None:
    await asyncio.gather(turn(pools, "acme"), turn(pools, "big"))
    blocked = asyncio.create_task(turn(pools, "big", "block 1"))
    began = time.monotonic()
    while not blocked.done():
        await turn(pools, "acme")
        if not blocked.done():
            last = time.monotonic() - began
    assert last > 0.15  # Others were served all the while.
    await blocked


async def test_a_change_of_tier_is_configuration(
    pools: TierPools, plane: ControlPlane, client: PolicyClient
) -> None:
    running = pools.run("acme", "u", "s", "2")
    assert (await anext(running)).thread == "switchyard-pool-pooled"
    plane.publish(entry("acme", tier="bridge"))
    client.tick()
    assert {event.thread for event in await turn(pools, "acme")} == {"switchyard-pool-acme"}
    assert (await anext(running)).thread == "switchyard-pool-pooled"  # To its end.
    await running.aclose()


async def test_limits_hold_over_all_threads(
    pools: TierPools, plane: ControlPlane, client: PolicyClient
) -> None:
    one = limits(max_concurrent_runs=1)
    plane.publish(entry("acme", scope=one))
    plane.grant(acme=share(None, 1))
    client.tick()
    running = pools.run("acme", "u", "s", "2")
    await anext(running)
    plane.publish(entry("acme", scope=one, tier="bridge"))
    client.tick()
    with pytest.raises(TenantThrottled):
        await turn(pools, "acme")
    await running.aclose()
    await turn(pools, "acme")


async def test_whom_nobody_knows_is_refused_and_gets_no_thread(pools: TierPools) -> None:
    for number in range(20):
        with pytest.raises(Behind):
            await turn(pools, f"x{number}")
    assert len(pools) == 1


# --- a turn that crosses ----------------------------------------------------------------------


async def test_the_agent_goes_on_only_when_the_reader_asks_for_more(
    pools: TierPools, factory: Factory
) -> None:
    said: list[int] = []
    events = pools.run("big", "u", "s", "5")
    await anext(events)
    factory.of("big").before = said.append
    await asyncio.sleep(0.1)
    assert said == []
    await anext(events)
    await asyncio.sleep(0.1)
    assert said == [1]
    await events.aclose()


@pytest.mark.parametrize("tenant", ["acme", "big"])
async def test_a_turn_is_out_however_it_ends(
    pools: TierPools, client: PolicyClient, factory: Factory, tenant: str
) -> None:
    assert len(await turn(pools, tenant, "3")) == 3
    assert inside(client) == {}
    with pytest.raises(RuntimeError, match="told to fail"):
        await turn(pools, tenant, "1 boom")
    assert inside(client) == {}
    async with aclosing(pools.run(tenant, "u", "s", "3")) as events:
        await anext(events)
        assert inside(client) == {tenant: 1}
    assert inside(client) == {}
    task = asyncio.create_task(turn(pools, tenant, "hang"))
    await until(lambda: factory.of(tenant).running == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    # Not a moment later: whoever was cancelled goes on when nothing of the turn can write.
    assert (inside(client), factory.of(tenant).running) == ({}, 0)


async def test_a_turn_cancelled_at_any_moment_is_out(
    pools: TierPools, client: PolicyClient
) -> None:
    await turn(pools, "big")
    for steps in range(30):
        task = asyncio.create_task(turn(pools, "big", "3 hang"))
        for _ in range(steps):
            await asyncio.sleep(0.0002)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert inside(client) == {}


async def test_an_abandoned_stream_is_out_when_it_is_collected(
    pools: TierPools, client: PolicyClient
) -> None:
    events = pools.run("big", "u", "s", "3")
    await anext(events)
    assert inside(client) == {"big": 1}
    del events
    gc.collect()
    await until(lambda: inside(client) == {})


def test_a_stream_whose_loop_has_ended_is_out(client: PolicyClient) -> None:
    async def begin() -> tuple[TierPools, Any]:
        pools = TierPools(client, {"pg-eu": Sessions}, Factory())
        events = pools.run("big", "u", "s", "3")
        await anext(events)
        return pools, events

    pools, events = asyncio.run(begin())
    del events
    gc.collect()

    async def end() -> None:
        await until(lambda: inside(client) == {})
        await pools.close()

    asyncio.run(end())


async def test_a_stream_that_nobody_reads_enters_nothing(
    pools: TierPools, client: PolicyClient
) -> None:
    events = pools.run("big", "u", "s", "3")
    await asyncio.sleep(0.01)
    assert (inside(client), len(pools)) == ({}, 1)
    await events.aclose()


async def test_an_abort_signal_crosses(pools: TierPools, client: PolicyClient) -> None:
    signal = asyncio.Event()
    task = asyncio.create_task(turn(pools, "big", "1 hang", abort_signal=signal))
    await until(lambda: inside(client) == {"big": 1})
    signal.set()
    assert [event.text for event in await task][-1] == "aborted"
    early = asyncio.Event()
    early.set()
    assert [event.text for event in await turn(pools, "big", "hang", abort_signal=early)] == [
        "aborted"
    ]


async def test_what_a_caller_carries_in_its_context_crosses(make_pools: MakePools) -> None:
    trace: ContextVar[str] = ContextVar("trace", default="none")
    seen: list[str] = []

    class Tracing(Runner):
        async def run_async(self, **names: Any) -> Any:
            seen.append(trace.get())
            async for event in super().run_async(**names):
                yield event

    trace.set("span-7")
    await turn(make_pools(Tracing), "big")
    assert seen == ["span-7"]


async def test_what_a_turn_raises_crosses(make_pools: MakePools) -> None:
    pools = make_pools(lambda entry, service: Runner(entry, Sessions()))
    with pytest.raises(WrongRunner):
        await turn(pools, "big")


async def test_sessions_are_created_and_deleted_in_the_tenants_thread(
    pools: TierPools, client: PolicyClient
) -> None:
    session = await pools.create_session("big", "u", session_id="s9")
    assert (session.id, session.thread) == ("s9", "switchyard-pool-big")
    await pools.delete_session("big", "u", "s9")
    assert inside(client) == {}


def test_many_loops_may_use_the_same_pools(client: PolicyClient) -> None:
    pools = TierPools(client, {"pg-eu": Sessions}, Factory())
    counts: list[int] = []

    def talk() -> None:
        async def talk() -> int:
            turns = (turn(pools, tenant, "5") for tenant in ("acme", "bolt", "big") * 5)
            return sum(len(events) for events in await asyncio.gather(*turns))

        counts.append(asyncio.run(talk()))

    threads = [threading.Thread(target=talk) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [75] * 4
    assert inside(client) == {}
    asyncio.run(pools.close())


# --- how many, how long -----------------------------------------------------------------------


async def test_the_longest_idle_pool_ends_for_another(
    make_pools: MakePools, factory: Factory, clock: DrivenClock
) -> None:
    pools = make_pools(factory, limit=3)
    for tenant in ("big", "huge", "big", "vast"):
        await turn(pools, tenant)
        clock.advance(1)
    await until(lambda: len(pools) == 3)
    names = {thread.name for thread in threading.enumerate()}
    assert {"switchyard-pool-big", "switchyard-pool-vast"} <= names
    assert factory.of("huge").closed == 1


async def test_a_tenant_for_whom_there_is_no_thread_is_refused(
    make_pools: MakePools, factory: Factory, client: PolicyClient
) -> None:
    pools = make_pools(factory, limit=2)
    events = pools.run("big", "u", "s", "3")
    await anext(events)
    with pytest.raises(NoPool, match="2 at most") as refused:
        await turn(pools, "huge")
    assert refused.value.retry_after_seconds > 0
    await turn(pools, "acme")
    await events.aclose()
    await turn(pools, "huge")


async def test_a_pool_ends_when_its_tenant_was_idle_for_long(
    make_pools: MakePools, factory: Factory, client: PolicyClient, clock: DrivenClock
) -> None:
    pools = make_pools(factory, idle_seconds=600)
    events = pools.run("huge", "u", "s", "3")
    await anext(events)
    await turn(pools, "big")
    await turn(pools, "acme")
    clock.advance(599)
    client.tick()
    assert len(pools) == 3
    clock.advance(1)
    client.tick()
    await until(lambda: len(pools) == 2)
    assert factory.of("big").closed == 1
    await anext(events)  # It runs, however long.
    await events.aclose()
    await turn(pools, "big")


async def test_closing_ends_turns_and_threads(
    make_pools: MakePools, factory: Factory, client: PolicyClient
) -> None:
    pools = make_pools(factory)
    tasks = [asyncio.create_task(turn(pools, tenant, "hang")) for tenant in ("acme", "big")]
    await until(lambda: inside(client) == {"acme": 1, "big": 1})
    events = pools.run("big", "u", "s", "3")
    await anext(events)
    await pools.close()
    assert inside(client) == {}
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(one) for one in done] == [asyncio.CancelledError] * 2
    assert not [t for t in threading.enumerate() if t.name.startswith("switchyard-pool")]
    with pytest.raises(NotReady):
        await anext(events)
    with pytest.raises(NotReady):
        await turn(pools, "acme")


async def test_who_comes_while_a_pool_ends_is_refused_and_waits_for_nobody(
    pools: TierPools,
) -> None:
    pool = pools._pools[""]
    stopped, go = threading.Event(), threading.Event()

    def stop() -> None:
        pool._loop.stop()
        stopped.set()
        go.wait(10)

    async def hang(host: Host) -> None:
        await asyncio.Event().wait()

    pool._loop.call_soon_threadsafe(stop)
    await asyncio.to_thread(stopped.wait, 10)
    late = asyncio.create_task(pool.call(hang))
    await asyncio.sleep(0)
    go.set()
    with pytest.raises(NotReady, match="closed its pools"):
        await asyncio.wait_for(late, 10)
    with pytest.raises(NotReady, match="closed its pools"):
        await pool.call(hang)


async def test_who_comes_when_the_loop_has_closed_already_is_refused(pools: TierPools) -> None:
    pool = pools._pools[""]
    pool.end()
    await asyncio.to_thread(pool.join, 10)
    pool._waiting = {}  # As it is between the loop's end and the thread's.
    with pytest.raises(NotReady, match="closed its pools"):
        await asyncio.wait_for(pool.call(lambda host: host.close()), 10)
    assert pool._waiting == {}


async def test_the_most_active_are_built_ahead_each_in_its_own_thread(
    plane: ControlPlane, clock: DrivenClock, factory: Factory
) -> None:
    plane.publish(entry("acme"), entry("bolt"), entry("big", tier="bridge"))
    # More before it than its own pool keeps Runners.
    plane.publish_cell(prewarm=["acme", "bolt", "big"])
    client = make_client(plane, clock)
    pools = TierPools(client, {"pg-eu": Sessions}, factory)
    client.tick()
    assert not plane.reports[-1]["ready"]
    await until(lambda: client.ready)
    built = {
        runner.entry.tenant: thread
        for runner, thread in zip(factory.built, factory.threads, strict=True)
    }
    shared = "switchyard-pool-pooled"
    assert built == {"acme": shared, "bolt": shared, "big": "switchyard-pool-big"}
    client.tick()
    assert plane.reports[-1]["ready"]
    assert plane.reports[-1]["runners"]["size"] == 3
    await pools.close()
    client.tick()
    assert plane.reports[-1]["runners"]["size"] == plane.reports[-1]["runners"]["limit"] == 0


def test_there_is_room_for_the_shared_pool() -> None:
    with pytest.raises(ValueError, match="share"):
        TierPools(None, {}, Factory(), limit=0)  # type: ignore[arg-type]
