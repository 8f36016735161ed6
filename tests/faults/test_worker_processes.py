"""Real workers, killed (-9) at random and stopped inside a chunk, on real PostgreSQL."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
from django.db import connection

from durable.clock import database_now
from migrations_app import services
from migrations_app.domain.phases import Phase
from migrations_app.models import TenantMigration
from tests import make
from tests.faults.test_every_moment import assert_moved
from tests.faults.test_way_back import assert_home
from tests.stores import Raw
from tests.world import APP, Clock, Killer, World

pytestmark = [
    pytest.mark.django_db(transaction=True, serialized_rollback=True),
    pytest.mark.timeout(200),
]

LEASE_SECONDS = 1.5
KILLS = 12


@pytest.fixture
def world(
    monkeypatch: pytest.MonkeyPatch, new_database: Callable[[], str], server_url: str
) -> World:
    """A tenant with 60 sessions on a real server; nothing here is in a transaction."""
    cast = make.cast(now=datetime.now(UTC))
    one, two = Raw(new_database()), Raw(new_database())
    monkeypatch.setenv("STORE_EU1_A", one.url)
    monkeypatch.setenv("STORE_EU1_B", two.url)
    monkeypatch.setenv("DATABASE_URL", f"{server_url}/{connection.settings_dict['NAME']}")
    monkeypatch.setenv("DURABLE_LEASE_SECONDS", str(LEASE_SECONDS))
    monkeypatch.setenv("LOG_LEVEL", "CRITICAL")
    one.make_tables("env:STORE_EU1_A", APP)
    one.seed(APP, sessions=60, users=7, events=4)
    return World(cast, Clock(datetime.now(UTC)), one, two, Killer())


@contextmanager
def worker(move: TenantMigration, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.worker", str(move.pk)],
        env={**os.environ, **environment},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def start(world: World, **options: Any) -> TenantMigration:
    world.clock.now = database_now()
    return world.start(soak_seconds=0.0, **options)


def wait_for(what: Callable[[], bool], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "it never happened"
        time.sleep(0.02)


def test_a_move_whose_workers_are_killed_again_and_again_carries_every_row_over(
    world: World,
) -> None:
    before = world.source.content(APP)
    # What a kill interrupts depends on the machine anyway; the seed only spreads the moments.
    dice = random.Random(7)
    move = start(world)
    for _ in range(KILLS):
        with worker(move) as process:
            # Some die while they start, some deep inside a phase.
            try:
                process.wait(0.8 + dice.random() * 1.2)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
        if world.move.due_at is None:
            break
    with worker(move) as process:
        assert process.wait(90) == 0
    assert_moved(world, before, "killed again and again")


@pytest.mark.parametrize("call", ["remove", "page", "digests", "write_shared", "take"])
def test_a_worker_stopped_inside_a_call_wakes_after_the_cutover_and_changes_nothing(
    world: World, call: str
) -> None:
    move = start(world)
    with worker(move, STOP_AFTER=call) as stopped:
        wait_for(lambda: _state(stopped.pid) == "T")
        with worker(move) as other:
            wait_for(lambda: world.move.phase in (Phase.SOAK, Phase.OFFBOARD, Phase.DONE))
            world.target.turn(APP, "u-1", "s-1", "on-target")
            expected = world.target.content(APP)
            assert other.wait(90) == 0
        stopped.send_signal(signal.SIGCONT)
        assert stopped.wait(90) == 0
    assert world.move.phase == Phase.DONE
    assert world.target.content(APP) == expected
    assert world.owner() == [("cell-eu1-b", "all")]
    assert not world.agents_may_write(world.source)


def test_a_worker_stopped_inside_a_chunk_wakes_after_an_abort_and_changes_nothing(
    world: World,
) -> None:
    before = world.source.content(APP)
    move = start(world)
    with worker(move, STOP_AFTER="remove") as stopped:
        wait_for(lambda: _state(stopped.pid) == "T")
        services.abort(world.move, by="ada", reason="no", now=database_now())
        with worker(move) as other:
            assert other.wait(90) == 0
        stopped.send_signal(signal.SIGCONT)
        assert stopped.wait(90) == 0
    assert world.move.phase == Phase.ABORTED
    assert world.source.content(APP) == before
    assert world.target.count(APP) == 0
    assert world.agents_may_write(world.source)


def soaking(world: World) -> TenantMigration:
    """Move the tenant by a worker, and let it live on the target."""
    world.clock.now = database_now()
    move = world.start(soak_seconds=86_400.0)
    with worker(move):
        wait_for(lambda: world.move.phase == Phase.SOAK)
        world.target.turn(APP, "u-1", "s-1", "after-the-cutover")
        world.target.delete(APP, "u-2", "s-2")
    return move


def roll_back(world: World) -> None:
    services.rollback(world.move, by="ada", reason="slow tools", now=database_now())


def test_a_rollback_whose_workers_are_killed_again_and_again_carries_everything_home(
    world: World,
) -> None:
    move = soaking(world)
    content = world.target.content(APP)
    roll_back(world)
    dice = random.Random(8)
    for _ in range(KILLS):
        with worker(move) as process:
            try:
                process.wait(0.8 + dice.random() * 0.8)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
        if world.move.due_at is None:
            break
    with worker(move) as process:
        assert process.wait(90) == 0
    assert_home(world, content, "killed again and again")


@pytest.mark.parametrize("call", ["remove", "delete_unchanged", "take"])
def test_a_worker_stopped_on_the_way_back_wakes_after_it_and_changes_nothing(
    world: World, call: str
) -> None:
    move = soaking(world)
    roll_back(world)
    with worker(move, STOP_AFTER=call) as stopped:
        wait_for(lambda: _state(stopped.pid) == "T")
        with worker(move) as other:
            wait_for(lambda: world.move.phase == Phase.ROLLED_BACK)
            world.source.turn(APP, "u-1", "s-1", "home-again")
            content = world.source.content(APP)
            assert other.wait(90) == 0
        stopped.send_signal(signal.SIGCONT)
        assert stopped.wait(90) == 0
    assert_home(world, content, f"stopped after {call}")


def _state(pid: int) -> str:
    """Return a process's state letter; T is stopped."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]
