"""Ten thousand invocations race phase changes and grants, from threads and from an event loop.

What must hold is what the control plane counts on. After a report has said "applied, k inside",
at most those k still begin their work, and after "nobody inside" nobody does until the fence
opens. After a report has said "these grants", no more run at once than were inside or are granted.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from agent_runtime import Draining, Host, Placements, PolicyClient, TenantThrottled, TierPools
from tests.runtime.scripts import Runner, Sessions
from tests.runtime.wire import Call, ControlPlane, DrivenClock, entry, limits, make_client, share

INVOCATIONS = 10_000
SLOTS = 12


@dataclass
class Judge:
    """Looks at each report as it leaves the process, and at each invocation as it works."""

    plane: ControlPlane
    lock: threading.Lock = field(default_factory=threading.Lock)
    inside: int = 0
    # How many may still begin; None: the fence is open as far as anybody was told.
    may_begin: int | None = None
    # How many may be inside.
    may_be: int = SLOTS
    begun: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    # Reports that said that nobody is inside behind the closed fence.
    proofs: int = 0
    closed_at: int = 0

    def hear(self, call: Call) -> None:
        """Take a report at its word, before it is answered."""
        if call.kind != "report":
            return
        inside = call.data["in_flight"].get("acme", 0)
        applied = int(call.data["applied_version"].rpartition(".")[2] or 0)
        heard = call.data["grants_number"]
        number, tenants = self.plane.grants
        granted = [tenants["acme"]["max_concurrent_runs"]] if heard == number else [SLOTS]
        with self.lock:
            if self.closed_at and applied >= self.closed_at and self.may_begin is None:
                # Of those inside some have begun their work already.
                self.may_begin = inside
            if self.closed_at and applied >= self.closed_at and not inside:
                self.proofs += 1
                self.may_begin = 0
                if self.inside:
                    self.wrong.append(f"{self.inside} are inside after 'nobody is'")
            self.may_be = max(inside, *granted)

    def close(self) -> None:
        """Close the fence."""
        with self.lock:
            self.closed_at = self.plane.publish(closed())

    def open(self) -> None:
        """Open the fence, once nobody holds anybody to what was said of the closed one."""
        with self.lock:
            self.closed_at, self.may_begin = 0, None
        self.plane.publish(opened())

    @contextmanager
    def working(self) -> Any:
        with self.lock:
            self.begun += 1
            self.inside += 1
            if self.may_begin is not None:
                self.may_begin -= 1
                if self.may_begin < 0:
                    self.wrong.append("one began after its instance had acknowledged")
            if self.inside > self.may_be:
                self.wrong.append(f"{self.inside} at once, {self.may_be} were granted")
        try:
            yield
        finally:
            with self.lock:
                self.inside -= 1

    def refuse(self, why: str) -> None:
        with self.lock:
            self.refused[why] = self.refused.get(why, 0) + 1


def opened() -> dict[str, Any]:
    return entry("acme", scope=limits(max_concurrent_runs=SLOTS))


def closed() -> dict[str, Any]:
    return opened() | {"accepts": "none"}


@pytest.fixture
def judge(plane: ControlPlane) -> Judge:
    plane.publish(opened())
    plane.grant(acme=share(None, SLOTS))
    return Judge(plane)


@pytest.fixture
def client(plane: ControlPlane, clock: DrivenClock, judge: Judge) -> PolicyClient:
    client = make_client(plane, clock)
    client.tick()
    client.tick()
    plane.before = judge.hear  # type: ignore[assignment]
    return client


def change_phases(judge: Judge, client: PolicyClient, over: threading.Event) -> None:
    """Close and open, grant more and less, until the invocations are over."""
    plane, slots = judge.plane, SLOTS
    while not over.is_set():
        slots = 3 if slots == SLOTS else SLOTS
        plane.grant(acme=share(None, slots))
        client.tick()
        judge.close()
        for _ in range(200):
            client.tick()
            if not judge.plane.reports[-1]["in_flight"]:
                break
        judge.open()
        client.tick()
        # As a tenant is served most of the time.
        over.wait(0.003)


def race(judge: Judge, client: PolicyClient, work: Callable[[threading.Event], None]) -> None:
    over = threading.Event()
    thread = threading.Thread(target=change_phases, args=(judge, client, over))
    thread.start()
    try:
        work(over)
    finally:
        over.set()
        thread.join(30)
    assert not thread.is_alive()
    assert judge.wrong == []
    assert judge.begun + sum(judge.refused.values()) == INVOCATIONS
    # It was a race: each way was taken, many times.
    assert judge.begun > INVOCATIONS / 20
    assert judge.refused["draining"] > 20
    assert judge.refused["concurrency"] > 20
    assert judge.proofs > 10
    assert client.fence.word().in_flight == client.admission.running() == {}


def test_ten_thousand_invocations_from_threads(judge: Judge, client: PolicyClient) -> None:
    threads_count = 16

    def invoke() -> None:
        for _ in range(INVOCATIONS // threads_count):
            try:
                with (
                    client.fence.enter("acme") as turn,
                    client.admission.admit(turn.entry),
                    judge.working(),
                ):
                    threading.Event().wait(0.0005)
            except Draining:
                judge.refuse("draining")
                threading.Event().wait(0.0005)
            except TenantThrottled as refused:
                judge.refuse(refused.reason)
                threading.Event().wait(0.0002)

    def work(over: threading.Event) -> None:
        threads = [threading.Thread(target=invoke) for _ in range(threads_count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

    race(judge, client, work)


class Judged(Runner):
    judge: Judge

    async def run_async(self, **names: Any) -> Any:
        with self.judge.working():
            async for event in super().run_async(**names):
                await asyncio.sleep(0)
                yield event


async def invoke(judge: Judge, host: Host | TierPools, count: int, number: int) -> None:
    """Run turns, and end them in every way."""
    for turn in range(count):
        events = host.run("acme", "u", f"s{number}", "2", turn_id=f"{number}-{turn}")
        try:
            match (number + turn) % 4:
                case 0:
                    await anext(events)  # Then closed.
                case 1:
                    await asyncio.wait_for(anext(events), 0.0005)  # Perhaps cancelled.
                case _:
                    async for _ in events:
                        pass
        except Draining:
            judge.refuse("draining")
            await asyncio.sleep(0.0005)
        except TenantThrottled as refused:
            judge.refuse(refused.reason)
            await asyncio.sleep(0.0002)
        except TimeoutError:
            pass
        finally:
            await events.aclose()


async def all_of_them(judge: Judge, host: Host | TierPools) -> None:
    await asyncio.gather(*(invoke(judge, host, INVOCATIONS // 40, n) for n in range(40)))


@pytest.mark.parametrize("kind", ["host", "pools"])
def test_ten_thousand_turns_in_an_event_loop(judge: Judge, client: PolicyClient, kind: str) -> None:
    Judged.judge = judge
    cut = 0

    async def talk() -> None:
        stores = {"pg-eu": Sessions}
        host = Host(client, stores, Judged) if kind == "host" else TierPools(client, stores, Judged)
        try:
            await all_of_them(judge, host)
        finally:
            await host.close()

    def work(over: threading.Event) -> None:
        nonlocal cut
        asyncio.run(talk())
        # Cancelled before they began anything.
        cut = INVOCATIONS - judge.begun - sum(judge.refused.values())
        judge.refused["cancelled"] = cut

    race(judge, client, work)
    assert cut < INVOCATIONS / 2


@pytest.mark.parametrize("what", ["switchyard-policy", "switchyard-placement"])
def test_who_is_started_by_many_has_one_thread(clock: DrivenClock, what: str) -> None:
    def begin(one: PolicyClient | Placements) -> None:
        barrier.wait()
        one.start()

    switch_seconds = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(30):
            plane, barrier = ControlPlane(), threading.Barrier(8)
            one: PolicyClient | Placements = make_client(plane, clock)
            if what == "switchyard-placement":
                one = Placements("http://plane.invalid", "secret-token", transport=plane)
            threads = [threading.Thread(target=begin, args=(one,)) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert [t.name for t in threading.enumerate()].count(what) == 1
            one.stop()
    finally:
        sys.setswitchinterval(switch_seconds)
