"""A forked child is not its parent: it serves nothing, counts nothing and reports nothing of it."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from agent_runtime import ForkedChild, Host, PolicyClient, TenantThrottled, TierPools
from tests.runtime.scripts import Factory, Sessions
from tests.runtime.wire import ControlPlane, entry, limits, share

# Python 3.12 warns of a fork while threads run: that hazard is what these tests are about.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


def in_child(work: Callable[[], Any]) -> Any:
    """Return what `work` returned (JSON) in a forked child."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            answer = json.dumps(work())
        except BaseException as error:
            answer = json.dumps(f"raised {error!r}")
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(said)


def enters(client: PolicyClient) -> str:
    try:
        with client.fence.enter("acme"):
            return "served"
    except ForkedChild:
        return "forked"


def test_a_child_is_refused_until_it_has_joined(client: PolicyClient) -> None:
    def child() -> list[Any]:
        before = [enters(client), client.ready]
        client.tick()
        return [*before, enters(client), client.ready]

    assert in_child(child) == ["forked", False, "served", True]
    assert enters(client) == "served"


def test_a_child_joins_as_a_process_of_its_own(plane: ControlPlane, client: PolicyClient) -> None:
    def child() -> Any:
        client.tick()
        return [plane.instances["i2"].request["boot"], plane.instances["i2"].request["replaces"]]

    boot, replaces = in_child(child)
    assert boot != plane.instances["i1"].request["boot"]
    assert replaces is None


def test_a_child_reports_nothing_of_its_parent(plane: ControlPlane, client: PolicyClient) -> None:
    client.usage.turn("acme")

    def child() -> Any:
        client.tick()
        return plane.instances["i2"].reports

    with client.fence.enter("acme"):
        [report] = in_child(child)
    assert (report["seq"], report["in_flight"], report["usage"]) == (1, {}, [])
    client.tick()
    assert plane.total("turns") == 1


def test_a_parents_turn_that_ends_in_the_child_changes_no_count(client: PolicyClient) -> None:
    def child() -> Any:
        client.tick()
        with client.fence.enter("acme"):
            parents.close()
            return client.fence.word().in_flight

    parents = ExitStack()
    parents.enter_context(client.fence.enter("acme"))
    assert in_child(child) == {"acme": 1}
    assert client.fence.word().in_flight == {"acme": 1}
    parents.close()


def test_a_child_is_not_stopped_by_a_lock_that_a_parents_thread_held(
    client: PolicyClient,
) -> None:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with client.fence._lock, client._round:
            held.set()
            done.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)

    def child() -> Any:
        first = enters(client)
        client.tick()
        return [first, enters(client)]

    assert in_child(child) == ["forked", "served"]
    done.set()
    thread.join()


def test_a_child_neither_stops_nor_leaves_for_its_parent(
    plane: ControlPlane, client: PolicyClient
) -> None:
    plane.poll_after_ms = 60_000
    client.start()

    def child() -> Any:
        client.stop()
        return client.leave()

    assert in_child(child) is False
    assert client.ready
    client.stop()
    assert plane.instances["i1"].gone == ""


def test_a_child_runs_a_thread_of_its_own(plane: ControlPlane, client: PolicyClient) -> None:
    client.start()

    def child() -> Any:
        reported = threading.Event()
        plane.after = lambda call, answer: reported.set() if call.kind == "report" else None
        client.start()
        reported.wait(10)
        client.stop()
        return client.ready

    assert in_child(child) is True
    client.stop()


def test_a_childs_host_uses_no_runner_of_its_parent(client: PolicyClient) -> None:
    async def talk(host: Host) -> list[str]:
        return [event.text async for event in host.run("acme", "u", "s", "1")]

    factory = Factory()
    host = Host(client, {"pg-eu": Sessions}, factory)
    asyncio.run(talk(host))

    def child() -> Any:
        client.tick()
        said = asyncio.run(talk(host))
        return [
            said,
            len(factory.built),
            factory.built[0].closed,
            client.runners.snapshot()["size"],
        ]

    assert in_child(child) == [["support.acme 0"], 2, 0, 1]
    asyncio.run(talk(host))
    assert len(factory.built) == 1


def test_a_child_has_pools_of_its_own(client: PolicyClient) -> None:
    async def talk() -> list[str]:
        return [event.thread async for event in pools.run("acme", "u", "s", "1")]

    pools = TierPools(client, {"pg-eu": Sessions}, Factory())
    asyncio.run(talk())

    def child() -> Any:
        asyncio.run(pools.close())  # Its parent's: nothing to close here.
        client.tick()
        return [asyncio.run(talk()), len(pools)]

    assert in_child(child) == [["switchyard-pool-pooled"], 1]
    asyncio.run(pools.close())


def test_a_child_holds_nothing_of_what_its_parent_was_granted(
    plane: ControlPlane, client: PolicyClient
) -> None:
    plane.publish(entry("acme", scope=limits(max_concurrent_runs=1)))
    plane.grant(acme=share(None, 1))
    client.tick()
    plane.grants = (0, {})

    def child() -> Any:
        client.tick()
        assert client.policy is not None
        try:
            with client.admission.admit(client.policy.entries["acme"]):
                return "served"
        except TenantThrottled as refused:
            return refused.reason

    assert in_child(child) == "concurrency"
