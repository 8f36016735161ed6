"""Real processes that are killed, and started again while the control plane is away."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent_runtime.disk import DiskCopy, Whose
from tests.runtime.conformance import CELL, TOKEN, Plane, Runtime, applied, entry, error, serving
from tests.runtime.processes import ROOT, free_port, runtime

pytestmark = pytest.mark.traffic

LEASE_SECONDS = 4.0


class Process:
    """One process of our library with the disk copy at `copy`."""

    def __init__(self, address: str, copy: Path) -> None:
        port = free_port()
        self.popen = subprocess.Popen(
            runtime(port, "--copy", str(copy)),
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "SWITCHYARD_URL": address,
                "SWITCHYARD_TOKEN": TOKEN,
                "SWITCHYARD_CELL": CELL,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.popen.stdout is not None
        assert self.popen.stdout.readline() == "serving\n"
        self.turns = Runtime(f"http://127.0.0.1:{port}/turn")

    def serves(self) -> bool:
        return self.turns.serves()

    def kill(self) -> None:
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGKILL)
        self.popen.wait(10)
        if self.popen.stdout is not None:
            self.popen.stdout.close()
        self.turns.pool.shutdown()


@pytest.fixture
def plane() -> Plane:
    return Plane()


Start = Callable[[], Process]


@pytest.fixture
def start(plane: Plane, tmp_path: Path) -> Iterator[Start]:
    processes: list[Process] = []
    with serving(plane) as address:

        def process() -> Process:
            processes.append(Process(address, tmp_path / "copy"))
            return processes[-1]

        yield process
        for one in processes:
            one.kill()


def be_away(plane: Plane) -> None:
    with plane.lock:
        plane.instead = lambda said: (503, error("unavailable"))


def come_back(plane: Plane) -> None:
    with plane.lock:
        plane.instead = lambda said: None


def test_a_killed_process_is_replaced_until_its_lease_is_over(plane: Plane, start: Start) -> None:
    plane.lease_seconds = LEASE_SECONDS
    first = start()
    plane.next_report("a report", applied("e1.1"))
    assert first.serves()
    be_away(plane)
    until = max(said.at for said in plane.calls if said.status == 200) + LEASE_SECONDS
    first.kill()
    again = start()
    assert again.serves()
    assert time.monotonic() < until
    time.sleep(max(0.0, until - time.monotonic()))
    assert not again.serves()
    come_back(plane)
    joined = plane.wait("another id", 40, lambda: plane.newest if plane.newest.key == "i2" else 0)
    plane.wait("its report", 40, lambda: joined.reports)
    assert joined.join["replaces"] is None
    assert again.serves()


def test_a_second_process_beside_a_living_one_starts_with_none(plane: Plane, start: Start) -> None:
    first = start()
    plane.next_report("a report", applied("e1.1"))
    be_away(plane)
    second = start()
    assert first.serves()
    assert not second.serves()


def test_no_kill_opens_a_fence_that_was_reported_closed(plane: Plane, start: Start) -> None:
    """Killed at any moment while fences close and open, and started again in an outage."""
    dice = random.Random(5)
    closed = opened = 0
    for _ in range(12):
        process = start()
        plane.wait("a join", 10, lambda: plane.instances and plane.newest.reports)
        ends = time.monotonic() + dice.uniform(0.2, 0.9)
        accepts = {f"{plane.epoch}.{plane.version}": plane.entries["acme"][1]["accepts"]}
        while time.monotonic() < ends:
            word = dice.choice(["all", "none"])
            accepts[plane.publish(entry("acme", word))] = word
            time.sleep(dice.uniform(0, 0.15))
        process.kill()
        be_away(plane)
        reported = plane.newest.reports[-1].data["applied_version"]
        later = [w for v, w in accepts.items() if number(v) >= number(reported)]
        again = start()
        served = again.serves()
        again.kill()
        # It may know a newer version than the one that was reported, never an older one.
        if set(later) == {"none"}:
            assert not served
            closed += 1
        elif set(later) == {"all"}:
            opened += served
        plane.publish(entry("acme"))
        with plane.lock:
            plane.instances.clear()
        come_back(plane)
    assert closed
    assert opened


def number(version: str) -> int:
    return int(version.rpartition(".")[2])


FORKS = """
import os, sys, time
from agent_runtime.disk import DiskCopy, Whose
copy = DiskCopy(sys.argv[1])
copy.open(Whose("http://plane", "one", 60.0), now=0.0)
assert copy.held
if child := os.fork():
    print(child, flush=True)
    os._exit(0)
time.sleep(60)
"""


def test_a_forked_child_that_outlives_its_parent_keeps_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "copy"
    parent = subprocess.Popen(
        [sys.executable, "-c", FORKS, str(path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        parent.wait(10)
        copy = DiskCopy(path)
        # The child closes what it got from its parent as the first thing it does.
        for _ in range(100):
            copy.open(Whose("http://plane", "one", 60.0), now=0.0)
            if copy.held:
                break
            time.sleep(0.05)
        assert copy.held
        copy.close()
    finally:
        os.kill(child, signal.SIGKILL)
        parent.stdout.close()
