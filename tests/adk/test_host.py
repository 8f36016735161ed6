"""Turns over real google-adk Runners and real SQLite stores, inside the fence."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from google.adk.errors.already_exists_error import AlreadyExistsError
from google.adk.runners import Runner
from google.adk.sessions import DatabaseSessionService, InMemorySessionService

from agent_runtime import (
    Behind,
    Draining,
    Entry,
    Host,
    Moved,
    NotReady,
    PolicyClient,
    TurnTooLong,
    UnknownStore,
    WrongRunner,
)
from agent_runtime.adk import sql_store
from bench import scripted
from tests.runtime.wire import ControlPlane, DrivenClock, entry, make_client

HI = scripted.message("hi")


MakeHost = Callable[..., Host]


@pytest.fixture
async def host(make_host: MakeHost) -> Host:
    """One whose tenant acme has the session s1 of user u1."""
    host = make_host()
    await host.create_session("acme", "u1", session_id="s1")
    return host


def scripted_runner(delay: float = 0.0) -> Callable[[Entry, Any], Runner]:
    return lambda entry, service: scripted.build_runner(entry.app_name, service, delay=delay)


async def turn(host: Host, text: str = "hi", **options: Any) -> list[Any]:
    message = scripted.message(text)
    return [event async for event in host.run("acme", "u1", "s1", message, **options)]


async def stored(store: Path, session: str = "s1") -> Any:
    service = DatabaseSessionService(f"sqlite+aiosqlite:///{store}")
    found = await service.get_session(app_name="support.acme", user_id="u1", session_id=session)
    await service.close()
    return found


def inside(host: Host) -> dict[str, int]:
    return dict(host._client.fence.word().in_flight)


# --- a turn ---------------------------------------------------------------------------------


async def test_a_turn_yields_what_its_runner_stored(host: Host, store: Path) -> None:
    events = await turn(host)
    session = await stored(store)
    assert [e.id for e in session.events[1:]] == [e.id for e in events]
    assert session.state["count"] == session.state["user:count"] == session.state["app:count"] == 1
    assert inside(host) == {}


async def test_a_turn_is_counted_while_it_runs(host: Host) -> None:
    async with aclosing(host.run("acme", "u1", "s1", HI)) as events:
        async for _ in events:
            assert inside(host) == {"acme": 1}


async def test_a_tool_that_takes_time_keeps_its_turn_counted(host: Host) -> None:
    counts = []
    task = asyncio.create_task(turn(host, "wait 0.3"))
    while not task.done():
        counts.append(inside(host))
        await asyncio.sleep(0.02)
    assert counts.count({"acme": 1}) >= 10
    assert inside(host) == {}


async def test_streaming_yields_pieces_that_are_never_stored(host: Host, store: Path) -> None:
    events = await turn(host, run_config=scripted.STREAMING)
    assert len([e for e in events if e.partial]) == 2
    whole = [e.id for e in events if not e.partial]
    assert [e.id for e in (await stored(store)).events[1:]] == whole


async def test_the_agent_goes_on_only_when_the_reader_asks_for_more(
    host: Host, store: Path
) -> None:
    events = host.run("acme", "u1", "s1", HI)
    await anext(events)
    await asyncio.sleep(0.3)
    assert len((await stored(store)).events) == 2  # The user's, and the call that was read.
    await events.aclose()


async def test_an_abort_signal_ends_a_turn_and_is_recorded(host: Host, store: Path) -> None:
    signal = asyncio.Event()
    events = host.run("acme", "u1", "s1", scripted.message("wait 30"), abort_signal=signal)
    async for _ in events:
        signal.set()
    assert inside(host) == {}
    assert "INVOCATION_ABORTED" in [e.error_code for e in (await stored(store)).events]


async def test_sessions_are_created_and_deleted_through_the_fence(host: Host, store: Path) -> None:
    session = await host.create_session("acme", "u1", session_id="s2", state={"a": 1})
    assert session.state == {"a": 1}
    await host.delete_session("acme", "u1", "s2")
    assert await stored(store, "s2") is None
    assert inside(host) == {}


async def test_an_id_that_exists_is_google_adks_own_error(host: Host) -> None:
    with pytest.raises(AlreadyExistsError):
        await host.create_session("acme", "u1", session_id="s1")


# --- usage ----------------------------------------------------------------------------------


async def test_turns_model_calls_and_tokens_are_counted(
    host: Host, plane: ControlPlane, client: PolicyClient
) -> None:
    await turn(host)
    await turn(host, run_config=scripted.STREAMING)
    client.tick()
    calls = 2 * scripted.CALLS_PER_TURN
    assert plane.total("turns") == 2
    assert plane.total("model_calls") == calls
    assert plane.total("tokens") == calls * scripted.TOKENS_PER_CALL


async def test_a_served_session_is_in_the_report_that_no_longer_counts_its_turn(
    host: Host, plane: ControlPlane, client: PolicyClient
) -> None:
    client.tick()
    await turn(host)
    client.tick()
    assert plane.reports[-1]["dirty"] == [{"tenant": "acme", "user_id": "u1", "session_id": "s1"}]


async def test_a_created_and_a_deleted_session_are_reported(
    host: Host, plane: ControlPlane, client: PolicyClient
) -> None:
    client.tick()
    created = await host.create_session("acme", "u1")
    await host.delete_session("acme", "u1", "s1")
    client.tick()
    assert [one["session_id"] for one in plane.reports[-1]["dirty"]] == [created.id, "s1"]


async def test_refused_turns_count_as_demand(
    host: Host, plane: ControlPlane, client: PolicyClient
) -> None:
    plane.publish(entry("acme", accepts="none"))
    client.tick()
    with pytest.raises(Draining):
        await turn(host)
    client.tick()
    assert plane.usage[-1]["refused"] == {"draining": 1}
    assert plane.usage[-1]["turns"] == 0


# --- refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "placement", "refusal"),
    [
        ({"accepts": "none"}, None, Draining),
        ({"accepts": "moved", "moved_to": "two"}, None, Moved),
        ({}, "e1.9", Moved),
        ({}, "e1.11", Behind),
    ],
)
async def test_a_refused_turn_writes_nothing(
    host: Host,
    plane: ControlPlane,
    client: PolicyClient,
    store: Path,
    changes: dict[str, Any],
    placement: str | None,
    refusal: type[Exception],
) -> None:
    plane.publish(entry("acme", **changes))
    client.tick()
    with pytest.raises(refusal):
        await turn(host, placement_version=placement)
    with pytest.raises(refusal):
        await host.create_session("acme", "u1", session_id="s2", placement_version=placement)
    with pytest.raises(refusal):
        await host.delete_session("acme", "u1", "s1", placement_version=placement)
    assert (await stored(store)).events == []
    assert await stored(store, "s2") is None
    assert inside(host) == {}


async def test_nothing_is_served_after_the_lease(host: Host, clock: DrivenClock) -> None:
    clock.advance(900)
    with pytest.raises(NotReady):
        await turn(host)


async def test_a_running_turn_outlives_the_fence_and_keeps_it_waiting(
    host: Host, plane: ControlPlane, client: PolicyClient
) -> None:
    events = host.run("acme", "u1", "s1", HI)
    await anext(events)
    plane.publish(entry("acme", accepts="none"))
    client.tick()
    assert plane.reports[-1]["in_flight"] == {"acme": 1}
    with pytest.raises(Draining):
        await turn(host)
    assert len([event async for event in events]) == 2
    client.tick()
    assert plane.reports[-1]["in_flight"] == {}


# --- every way out --------------------------------------------------------------------------


async def test_a_stream_that_nobody_reads_enters_nothing(host: Host) -> None:
    events = host.run("acme", "u1", "s1", HI)
    await asyncio.sleep(0)
    assert inside(host) == {}
    await events.aclose()
    assert host._client.usage.take().usage() == []


async def test_a_model_that_raises_lets_its_turn_out(host: Host) -> None:
    with pytest.raises(RuntimeError, match="told to fail"):
        await turn(host, "boom")
    assert inside(host) == {}


async def test_a_session_that_is_missing_lets_its_turn_out(host: Host) -> None:
    with pytest.raises(ValueError, match="not found"):
        async for _ in host.run("acme", "u1", "nowhere", HI):
            pass
    assert inside(host) == {}


async def test_a_closed_stream_lets_its_turn_out(host: Host) -> None:
    events = host.run("acme", "u1", "s1", HI)
    await anext(events)
    await events.aclose()
    assert inside(host) == {}


async def test_a_turn_cancelled_in_the_model_is_out(make_host: MakeHost, store: Path) -> None:
    host = make_host(scripted_runner(delay=30))
    await host.create_session("acme", "u1", session_id="s1")
    task = asyncio.create_task(turn(host))
    while not (await stored(store)).events:
        await asyncio.sleep(0.01)
    assert inside(host) == {"acme": 1}
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert inside(host) == {}


async def test_a_turn_cancelled_before_it_began_counted_nothing(host: Host) -> None:
    task = asyncio.create_task(turn(host))
    await asyncio.sleep(0)  # It has made its own task, which has not run.
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert inside(host) == {}


async def test_an_abandoned_stream_is_out_when_it_is_collected(host: Host) -> None:
    events = host.run("acme", "u1", "s1", HI)
    await anext(events)
    assert inside(host) == {"acme": 1}
    del events
    gc.collect()
    for _ in range(100):
        await asyncio.sleep(0.01)
        if not inside(host):
            break
    assert inside(host) == {}


async def test_a_stream_that_is_kept_and_never_read_on_is_cut(
    make_host: MakeHost, plane: ControlPlane
) -> None:
    client = make_client(plane, SteppedClock(), longest_turn_seconds=0.4)
    client.tick()
    host = make_host(client=client)
    await host.create_session("acme", "u1", session_id="s1")
    events = host.run("acme", "u1", "s1", HI)
    await anext(events)
    await asyncio.sleep(0.6)
    assert inside(host) == {}
    with pytest.raises(TurnTooLong):
        await anext(events)


async def test_a_factory_that_raises_lets_its_turn_out(make_host: MakeHost) -> None:
    def broken(entry: Entry, service: Any) -> Runner:
        raise ZeroDivisionError

    host = make_host(broken)
    with pytest.raises(ZeroDivisionError):
        await turn(host)
    assert inside(host) == {}


async def test_a_store_that_was_not_given_lets_its_turn_out(
    host: Host, plane: ControlPlane, client: PolicyClient
) -> None:
    plane.publish(entry("acme", store={"key": "elsewhere", "kind": "adk-sql"}))
    client.tick()
    with pytest.raises(UnknownStore, match="elsewhere"):
        await turn(host)
    assert inside(host) == {}


class Signalling(DatabaseSessionService):
    """ADK's own service, which says when it is in its store."""

    def __init__(self, store: Path) -> None:
        super().__init__(f"sqlite+aiosqlite:///{store}")
        self.busy = {name: asyncio.Event() for name in ("create", "get", "append", "delete")}

    async def create_session(self, **names: Any) -> Any:
        self.busy["create"].set()
        return await super().create_session(**names)

    async def get_session(self, **names: Any) -> Any:
        self.busy["get"].set()
        return await super().get_session(**names)

    async def append_event(self, session: Any, event: Any) -> Any:
        self.busy["append"].set()
        return await super().append_event(session, event)

    async def delete_session(self, **names: Any) -> Any:
        self.busy["delete"].set()
        return await super().delete_session(**names)


def locked_contents(store: Path) -> tuple[set[str], int]:
    """Return the ids of all sessions and the number of events, as they are for good.

    Raises if anybody holds the file: then something is still on its way.
    """
    with sqlite3.connect(store, timeout=0) as other:
        other.execute("BEGIN EXCLUSIVE")
        ids = {row[0] for row in other.execute("SELECT id FROM sessions")}
        events = other.execute("SELECT count(*) FROM events").fetchone()[0]
    other.close()
    return ids, events


@pytest.mark.parametrize("call", ["create", "get", "append", "delete"])
@pytest.mark.parametrize("steps", [1, 2, 4, 8])
async def test_a_cancelled_turn_leaves_its_store_as_a_finished_one_does(
    client: PolicyClient, store: Path, call: str, steps: int
) -> None:
    service = Signalling(store)
    await service.create_session(app_name="support.acme", user_id="u1", session_id="s1")
    service.busy["create"].clear()
    host = Host(client, {"pg-eu": lambda: service}, scripted_runner())
    work: dict[str, Callable[[], Any]] = {
        "create": lambda: host.create_session("acme", "u1", session_id="s2"),
        "delete": lambda: host.delete_session("acme", "u1", "s1"),
        "get": lambda: turn(host),
        "append": lambda: turn(host),
    }
    task = asyncio.create_task(work[call]())
    await service.busy[call].wait()
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert inside(host) == {}
    ids, events = locked_contents(store)
    assert ids == {"create": {"s1", "s2"}, "delete": set()}.get(call, {"s1"})
    assert events == (call == "append")
    await host.close()


async def test_a_caller_that_is_cancelled_again_and_again_waits_all_the_same(
    host: Host, store: Path
) -> None:
    task = asyncio.create_task(host.create_session("acme", "u1", session_id="s2"))
    while not task.done():
        await asyncio.sleep(0)
        task.cancel()
    assert task.cancelled()
    assert inside(host) == {}
    assert locked_contents(store) == ({"s1", "s2"}, 0)


class SteppedClock(DrivenClock):
    """The lease's clock goes with the event loop's."""

    def boottime(self) -> float:
        return asyncio.get_running_loop().time() if self._running() else self.at

    @staticmethod
    def _running() -> bool:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return False
        return True


async def test_a_turn_is_cut_at_the_longest_turn(make_host: MakeHost, plane: ControlPlane) -> None:
    client = make_client(plane, SteppedClock(), longest_turn_seconds=0.5)
    client.tick()
    host = make_host(client=client)
    await host.create_session("acme", "u1", session_id="s1")
    with pytest.raises(TurnTooLong, match=r"cut after 0\.5 s"):
        await turn(host, "wait 30")
    assert inside(host) == {}


async def test_a_turn_is_cut_when_the_machine_was_suspended_past_it(
    host: Host, clock: DrivenClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_runtime.host.WATCH_SECONDS", 0.05)
    task = asyncio.create_task(turn(host, "wait 30"))
    while not inside(host):
        await asyncio.sleep(0.01)
    clock.advance(61)  # asyncio's own clock has not moved.
    with pytest.raises(TurnTooLong):
        await task


# --- runners and services -------------------------------------------------------------------


class Builds:
    """Counts what it builds."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def __call__(self, entry: Entry, service: Any) -> Runner:
        self.entries.append(entry)
        return scripted.build_runner(entry.app_name, service)


async def test_a_runner_is_kept_until_store_or_generation_change(
    make_host: MakeHost, plane: ControlPlane, client: PolicyClient
) -> None:
    builds = Builds()
    host = make_host(builds)
    await host.create_session("acme", "u1", session_id="s1")
    await turn(host)
    await turn(host)
    plane.publish(entry("acme", scope={"version": 2}))
    client.tick()
    await turn(host)
    assert len(builds.entries) == 1
    plane.publish(entry("acme", runner_generation=2))
    client.tick()
    await turn(host)
    assert [one.runner_generation for one in builds.entries] == [1, 2]


async def test_kept_runners_are_bounded(
    make_host: MakeHost,
    plane: ControlPlane,
    client: PolicyClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agent_runtime.host.MAX_RUNNERS", 2)
    plane.publish(*(entry(tenant) for tenant in ("bolt", "core")))
    client.tick()
    builds = Builds()
    host = make_host(builds)
    for tenant in ("acme", "bolt", "acme", "core", "acme", "bolt"):
        await host.create_session(tenant, "u1", session_id="s1") if tenant not in [
            one.tenant for one in builds.entries
        ] else None
        async for _ in host.run(tenant, "u1", "s1", HI):
            pass
    assert [one.tenant for one in builds.entries] == ["acme", "bolt", "core", "bolt"]


async def test_a_runner_of_another_app_is_refused(make_host: MakeHost) -> None:
    host = make_host(lambda entry, service: scripted.build_runner("support.bolt", service))
    with pytest.raises(WrongRunner, match=r"'support\.bolt'"):
        await turn(host)


async def test_a_runner_with_a_session_service_of_its_own_is_refused(make_host: MakeHost) -> None:
    host = make_host(
        lambda entry, service: scripted.build_runner(entry.app_name, InMemorySessionService())
    )
    with pytest.raises(WrongRunner, match="session service of its own"):
        await turn(host)


async def test_closing_a_host_ends_what_runs(host: Host) -> None:
    task = asyncio.create_task(turn(host, "wait 30"))
    while not inside(host):
        await asyncio.sleep(0.01)
    await host.close()
    assert inside(host) == {}
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_many_turns_at_once_leave_no_count_behind(
    host: Host, plane: ControlPlane, client: PolicyClient
) -> None:
    sessions = [await host.create_session("acme", f"u{n}") for n in range(12)]

    async def talk(number: int) -> None:
        session = sessions[number]
        message = scripted.message("wait 0.05" if number % 2 else "hi")
        async with aclosing(host.run("acme", session.user_id, session.id, message)) as events:
            async for _ in events:
                if number % 3 == 0:
                    break

    tasks = [asyncio.create_task(talk(number)) for number in range(12)]
    for task in tasks[::4]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert inside(host) == {}


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("postgres://u:p@db/x", "postgresql+psycopg://u:p@db/x"),
        ("postgresql://u:p@db/x", "postgresql+psycopg://u:p@db/x"),
        ("postgresql+psycopg://u:p@db/x", "postgresql+psycopg://u:p@db/x"),
        ("sqlite:////tmp/x.sqlite3", "sqlite+aiosqlite:////tmp/x.sqlite3"),
    ],
)
async def test_a_store_address_needs_no_driver_in_it(address: str, url: str) -> None:
    service = sql_store(address)()
    assert service.db_engine.url.render_as_string(hide_password=False) == url
    await service.close()


def test_what_is_no_store_address_is_refused_without_being_shown() -> None:
    with pytest.raises(ValueError, match="reads like") as refused:
        sql_store("user:secret@db/x")
    assert "secret" not in str(refused.value)
