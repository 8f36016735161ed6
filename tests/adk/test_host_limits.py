"""Limits of tenants over real google-adk Runners and SQLite stores: in, refused, and out again."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from contextlib import aclosing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.apps import App
from google.adk.runners import Runner
from google.adk.sessions import DatabaseSessionService
from google.adk.tools.base_toolset import BaseToolset

from agent_runtime import (
    Draining,
    Entry,
    Host,
    PolicyClient,
    TenantThrottled,
    TierPools,
    TurnTooLong,
)
from agent_runtime.adk import TenantPolicyPlugin, sql_store
from bench import scripted
from tests.runtime.scripts import until
from tests.runtime.wire import ControlPlane, DrivenClock, entry, limits, make_client, share


@pytest.fixture
def plane() -> ControlPlane:
    plane = ControlPlane()
    plane.publish(entry("acme", scope=limits(max_concurrent_runs=2)))
    plane.grant(acme=share(None, 2))
    return plane


MakeHost = Callable[..., Host]


@pytest.fixture
async def host(make_host: MakeHost) -> Host:
    """One whose tenant acme has the sessions s0 to s3 of user u1, and may run two at once."""
    return await with_sessions(make_host())


async def with_sessions(host: Host | TierPools) -> Any:
    for number in range(4):
        await host.create_session("acme", "u1", session_id=f"s{number}")
    return host


def guarded(client: PolicyClient, delay: float = 0.0) -> Callable[[Entry, Any], Runner]:
    """Build Runners with the tenant's policy plugin."""

    def build(entry: Entry, service: Any) -> Runner:
        agent = LlmAgent(
            name="support_agent",
            model=scripted.ScriptedLlm(delay=delay),
            instruction="Help.",
            tools=[scripted.remember, scripted.wait],
        )
        plugin = TenantPolicyPlugin.of(client, entry.tenant)
        app = App(name="support", root_agent=agent, plugins=[plugin])
        return Runner(app=app, app_name=entry.app_name, session_service=service)

    return build


def run(host: Host | TierPools, session: str = "s0", text: str = "hi", **options: Any) -> Any:
    return host.run("acme", "u1", session, scripted.message(text), **options)


async def turn(
    host: Host | TierPools, session: str = "s0", text: str = "hi", **options: Any
) -> Any:
    return [event async for event in run(host, session, text, **options)]


async def events_of(store: Path, session: str = "s0") -> list[Any]:
    service = DatabaseSessionService(f"sqlite+aiosqlite:///{store}")
    found = await service.get_session(app_name="support.acme", user_id="u1", session_id=session)
    await service.close()
    assert found is not None
    return list(found.events)


def limit(plane: ControlPlane, client: PolicyClient, **scope: Any) -> None:
    plane.publish(entry("acme", scope=limits(**scope)))
    client.tick()


def held(client: PolicyClient) -> dict[str, int]:
    """The permits; whoever holds none is out of the fence too."""
    permits = client.admission.running()
    assert dict(client.fence.word().in_flight) == permits
    return permits


# --- refused ----------------------------------------------------------------------------------


async def test_a_third_run_of_two_is_refused_at_once_and_writes_nothing(
    host: Host, client: PolicyClient, plane: ControlPlane, store: Path
) -> None:
    first, second = run(host, "s0"), run(host, "s1")
    await anext(first)
    await anext(second)
    with pytest.raises(TenantThrottled) as refused:
        await turn(host, "s2", turn_id="t1")
    assert (refused.value.tenant, refused.value.reason) == ("acme", "concurrency")
    assert "2 runs at once" in str(refused.value)
    assert held(client) == {"acme": 2}  # The refused one has left the fence.
    assert await events_of(store, "s2") == []
    with pytest.raises(TenantThrottled):
        await turn(host, "s2", turn_id="t1")  # Sent again.
    client.tick()
    assert plane.usage[-1]["refused"] == {"concurrency": 1}
    assert plane.usage[-1]["turns"] == 2
    assert len([event async for event in first]) == 2
    await turn(host, "s2")
    await second.aclose()
    assert held(client) == {}


async def test_the_rate_is_refused_with_the_time_until_the_next(
    host: Host, client: PolicyClient, plane: ControlPlane, clock: DrivenClock, store: Path
) -> None:
    plane.grant(acme=share(0.5))
    limit(plane, client, runs_per_second=0.5)
    await turn(host)
    with pytest.raises(TenantThrottled) as refused:
        await turn(host)
    assert refused.value.reason == "rate"
    assert refused.value.retry_after_seconds == 2
    assert len(await events_of(store)) == 4
    clock.advance(2)
    await turn(host)


async def test_sessions_are_made_and_deleted_whatever_the_limits(
    host: Host, client: PolicyClient, plane: ControlPlane
) -> None:
    plane.grant(acme=share(0.0, 0))
    limit(plane, client, runs_per_second=1.0, max_concurrent_runs=1)
    await host.create_session("acme", "u1", session_id="s9")
    await host.delete_session("acme", "u1", "s9")


async def test_a_fence_that_is_closed_is_told_before_a_limit(
    host: Host, client: PolicyClient, plane: ControlPlane
) -> None:
    plane.grant(acme=share(None, 0))
    plane.publish(entry("acme", accepts="none", scope=limits(max_concurrent_runs=1)))
    client.tick()
    with pytest.raises(Draining):
        await turn(host)


async def test_without_the_plugin_a_budget_is_refused_before_any_model_call(
    host: Host, client: PolicyClient, plane: ControlPlane, clock: DrivenClock, store: Path
) -> None:
    midnight = clock.now() + timedelta(hours=3)
    limit(plane, client, daily_token_budget=5_000, budget_spent_until=midnight.isoformat())
    with pytest.raises(TenantThrottled, match="has used up the 5,000 model tokens") as refused:
        await turn(host)
    assert (refused.value.reason, refused.value.retry_after_seconds) == ("budget", 3 * 3_600)
    assert await events_of(store) == []
    client.tick()
    assert plane.usage[-1]["refused"] == {"budget": 1}
    assert (plane.total("turns"), plane.total("model_calls")) == (0, 0)
    clock.advance(3 * 3_600)
    client.tick()  # Another id: the lease was over.
    await turn(host)


async def test_a_trial_refuses_nobody(
    host: Host, client: PolicyClient, plane: ControlPlane
) -> None:
    plane.publish(entry("acme", trial=limits(max_concurrent_runs=1)))
    client.tick()
    first = run(host, "s0")
    await anext(first)
    assert len(await turn(host, "s1")) == 3
    await first.aclose()
    client.tick()
    assert (plane.usage[-1]["would_refuse"], plane.usage[-1]["refused"]) == ({"concurrency": 1}, {})
    assert plane.usage[-1]["turns"] == 2


# --- every way out ----------------------------------------------------------------------------


async def ends_by_itself(host: Host) -> None:
    await turn(host)


async def fails_in_its_model(host: Host) -> None:
    with pytest.raises(RuntimeError, match="told to fail"):
        await turn(host, text="boom")


async def has_no_session(host: Host) -> None:
    with pytest.raises(ValueError, match="not found"):
        await turn(host, "nowhere")


async def is_closed(host: Host) -> None:
    async with aclosing(run(host)) as events:
        await anext(events)


async def is_cancelled(host: Host) -> None:
    task = asyncio.create_task(turn(host, text="wait 30"))
    await until(lambda: bool(held(host._client)))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def is_abandoned(host: Host) -> None:
    events = run(host)
    await anext(events)
    del events
    gc.collect()
    await until(lambda: not held(host._client))


async def is_aborted(host: Host) -> None:
    signal = asyncio.Event()
    async for _ in run(host, text="wait 30", abort_signal=signal):
        signal.set()


async def never_began(host: Host) -> None:
    task = asyncio.create_task(turn(host))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


WAYS = [
    ends_by_itself,
    fails_in_its_model,
    has_no_session,
    is_closed,
    is_cancelled,
    is_abandoned,
    is_aborted,
    never_began,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("with_plugin", [False, True], ids=["plain", "plugin"])
async def test_a_permit_comes_back_when_a_run(
    make_host: MakeHost, client: PolicyClient, way: Callable[[Host], Any], with_plugin: bool
) -> None:
    host = await with_sessions(make_host(guarded(client) if with_plugin else None))
    for _ in range(3):  # More often than there are permits.
        await way(host)
        assert held(client) == {}
    if with_plugin:
        [kept] = host._cache._kept.values()
        assert [plugin._runs for plugin in kept.plugins] == [{}]


async def test_a_permit_comes_back_when_a_run_is_cut_at_its_longest_turn(
    host: Host, client: PolicyClient, clock: DrivenClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_runtime.host.WATCH_SECONDS", 0.02)
    task = asyncio.create_task(turn(host, text="wait 30"))
    await until(lambda: bool(held(client)))
    clock.advance(61)
    with pytest.raises(TurnTooLong):
        await task
    assert held(client) == {}


async def test_a_permit_comes_back_when_a_factory_raises(
    make_host: MakeHost, client: PolicyClient
) -> None:
    def broken(entry: Entry, service: Any) -> Runner:
        raise ZeroDivisionError

    host = await with_sessions(make_host(broken))
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            await turn(host)
    assert held(client) == {}


# --- kept Runners -----------------------------------------------------------------------------


class Tools(BaseToolset):
    """The tools of one tenant, over clients that have to be closed."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = 0

    async def get_tools(self, readonly_context: Any = None) -> list[Any]:
        return []

    async def close(self) -> None:
        self.closed += 1


async def test_a_rotated_secret_closes_the_tools_that_hold_it_and_loses_no_conversation(
    make_host: MakeHost, client: PolicyClient, plane: ControlPlane, store: Path
) -> None:
    toolsets: list[Tools] = []

    def build(entry: Entry, service: Any) -> Runner:
        toolsets.append(Tools())
        agent = LlmAgent(
            name="support_agent",
            model=scripted.ScriptedLlm(),
            instruction="Help.",
            tools=[scripted.remember, scripted.wait, toolsets[-1]],
        )
        app = App(name="support", root_agent=agent)
        return Runner(app=app, app_name=entry.app_name, session_service=service)

    host = await with_sessions(make_host(build))
    running = run(host, "s1")
    await anext(running)
    await turn(host)
    plane.publish(entry("acme", runner_generation=2))
    client.tick()
    await turn(host)
    assert [one.closed for one in toolsets] == [0, 0]  # A turn runs on the old one.
    assert len([event async for event in running]) == 2
    await until(lambda: [one.closed for one in toolsets] == [1, 0])
    assert len(await events_of(store)) == 8
    assert client.runners.snapshot()["evicted"]["generation"] == 1


async def test_what_a_real_runner_weighs_is_measured_when_it_is_built_ahead(
    plane: ControlPlane, clock: DrivenClock, make_host: MakeHost
) -> None:
    plane.publish(entry("bolt"))
    plane.publish_cell(prewarm=["acme", "bolt"])
    client = make_client(plane, clock)
    make_host(client=client)
    client.tick()
    await until(lambda: client.ready)
    said = client.runners.snapshot()
    assert (said["size"], said["builds"]) == (2, 2)
    assert 1_000 < said["bytes"] < 5_000_000
    assert said["build_ms"]["p99"] > 0


# --- threads of tiers -------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["pooled", "bridge", "silo"])
async def test_a_turn_in_its_tiers_thread_is_a_turn(
    client: PolicyClient, plane: ControlPlane, store: Path, tier: str
) -> None:
    plane.publish(entry("acme", tier=tier, scope=limits(max_concurrent_runs=2)))
    client.tick()
    stores = {"pg-eu": sql_store(f"sqlite:///{store}")}
    pools = await with_sessions(TierPools(client, stores, guarded(client)))
    events = await turn(pools)
    assert [event.id for event in (await events_of(store))[1:]] == [event.id for event in events]
    task = asyncio.create_task(turn(pools, "s1", "wait 30"))
    await until(lambda: bool(held(client)))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert held(client) == {}
    first, second = run(pools, "s2"), run(pools, "s3")
    await anext(first)
    await anext(second)
    with pytest.raises(TenantThrottled):
        await turn(pools)
    await first.aclose()
    await second.aclose()
    await turn(pools)
    await pools.close()
    assert held(client) == {}
