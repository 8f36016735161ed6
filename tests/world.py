"""One tenant with real stores, a clock that the test drives, and workers that can be killed."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import transaction

from durable import driver
from migrations_app import ports, services, steps
from migrations_app.domain.phases import Phase
from migrations_app.models import TenantMigration
from tenants.models import Placement, PolicyEntry
from tests import make
from tests.stores import Raw

APP = "support.acme"


class Killed(BaseException):
    """The worker died: nothing after this line of it runs. Not an Exception, as SIGKILL isn't."""


@dataclass
class Clock:
    """The database's clock, in the test's hand."""

    now: datetime

    def __call__(self) -> datetime:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


@dataclass
class Killer:
    """Counts every call that a step makes on a store or in our database; kills at one of them."""

    at: int | None = None
    # Instead of dying at call `at`, the worker stalls there while this happens.
    meanwhile: Callable[[], None] | None = None
    calls: int = 0
    names: list[str] = field(default_factory=list)
    # Called before the n-th call of a name, such as "page": lets a test change the world.
    before: dict[str, Callable[[], None]] = field(default_factory=dict)

    def tick(self, name: str) -> None:
        self.calls += 1
        self.names.append(name)
        # Rows are the main thread's here: a call that a step makes in another is passed over.
        main = threading.current_thread() is threading.main_thread()
        if self.at is not None and self.calls >= self.at and main:
            self.at = None
            if self.meanwhile is None:
                raise Killed(name)
            self.meanwhile()


class Fragile:
    """A store whose every call may be the worker's last, just before it or just after it."""

    def __init__(self, port: Any, killer: Killer) -> None:
        self.port, self.killer = port, killer

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.port, name)
        if not callable(value):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            if hook := self.killer.before.pop(name, None):
                hook()
            self.killer.tick(name)
            answer = value(*args, **kwargs)
            self.killer.tick(f"{name}, done")
            return answer

        return call


@dataclass
class World:
    cast: make.Cast
    clock: Clock
    source: Raw
    target: Raw
    killer: Killer

    @property
    def move(self) -> TenantMigration:
        return TenantMigration.objects.filter(tenant=self.cast.acme).latest("pk")

    @property
    def machine(self) -> driver.Machine:
        return steps.machine(lambda pk, phase, seconds: None)

    def start(self, **options: Any) -> TenantMigration:
        """Start the move that every test is about; it runs by itself unless told otherwise."""
        chosen = {
            "target_cell": self.cast.other_cell,
            "target_store": self.cast.other_store,
            "reason": "more room",
            "automatic": True,
            "offboard_automatically": True,
            "soak_seconds": 60.0,
        }
        return services.start(self.cast.acme, by="ada", now=self.clock(), **chosen | options)

    def step(self, move: TenantMigration | None = None) -> TenantMigration:
        """Let time pass until the move is due, and a worker take one step, which may kill it.

        `move` is its row as it is now, where the caller has read it.
        """
        move = move or self.move
        if move.due_at is not None:
            self.clock.now = max(self.clock.now, move.due_at)
            # Its lease runs out, then another worker takes over.
            with suppress(Killed):
                driver.advance(self.machine, move.pk, clock=self.clock)
        return self.move

    def run(self, *, until: Phase | None = None, steps: int = 500) -> TenantMigration:
        """Step until the move enters a phase, or ends."""
        # Each row is read once: the tests of every moment take thousands of steps.
        move = self.move
        for _ in range(steps):
            if move.due_at is None or move.phase == until:
                return move
            move = self.step(move)
        notes = [f"{e.was}: {e.note}" for e in self.move.events.all()[:5]]
        raise AssertionError(f"stuck in {self.move.phase}: {self.move.waiting_for} {notes}")

    def owner(self) -> list[tuple[str, str]]:
        """Return who accepts the tenant's turns: (cell, accepts) of every entry that may.

        A cell that was only told of the tenant is left out.
        """
        home = Placement.objects.get(tenant=self.cast.acme).cell_id
        entries = PolicyEntry.objects.filter(tenant=self.cast.acme).exclude(accepts="moved")
        return [
            (entry.cell.slug, entry.accepts)
            for entry in entries.select_related("cell")
            if entry.accepts != "none" or entry.cell_id == home
        ]

    def agents_may_write(self, side: Raw) -> bool:
        """Try a turn of the tenant at one side, for real, and take it back."""
        try:
            with side.connection() as connection:
                side.add_event(connection, APP, "u-0", "s-0", "probe", 1)
                raise _TakenBack
        except _TakenBack:
            return True
        except Exception as error:
            if "closed by switchyard" not in str(error):
                raise
            return False

    @contextmanager
    def late(self, side: Raw | None = None) -> Iterator[Any]:
        """Write at a closed store, the source, as somebody who got past its triggers."""
        side = side or self.source
        with side.connection() as connection:
            if side.sqlite:
                side.run_in(connection, "UPDATE switchyard_guard SET writing = 1")
            else:
                side.run_in(connection, "SET LOCAL switchyard.mover = 'late'")
            yield connection
            if side.sqlite:
                side.run_in(connection, "UPDATE switchyard_guard SET writing = 0")


class _TakenBack(Exception):
    pass


@dataclass
class Settling:
    """Whether a worker dies the next time that it would settle a step, its effects done."""

    armed: bool = False


def fragile_settling(monkeypatch: pytest.MonkeyPatch) -> Settling:
    """Let workers die between an effect in our database and the settling of its step."""
    settling, settle = Settling(), driver._settle

    def fragile(*args: Any, **kwargs: Any) -> None:
        if settling.armed:
            settling.armed = False
            raise Killed("before settling")
        settle(*args, **kwargs)

    monkeypatch.setattr(driver, "_settle", fragile)
    return settling


@contextmanager
def undone(world: World) -> Iterator[None]:
    """Whatever happens inside is taken back: rows, both files and the clock."""
    files = [Path(side.url.removeprefix("sqlite:///")) for side in (world.source, world.target)]
    kept = [(path, path.with_suffix(".kept")) for path in files if path.exists()]
    for path, copy in kept:
        shutil.copy(path, copy)
    now = world.clock.now
    with transaction.atomic():
        yield
        transaction.set_rollback(True)
    world.clock.now = now
    for path in files:
        path.unlink(missing_ok=True)
        path.with_name(path.name + "-journal").unlink(missing_ok=True)
    for path, copy in kept:
        shutil.copy(copy, path)
    world.killer.calls, world.killer.at = 0, None
    world.killer.names.clear()


def each_moment(world: World) -> Iterator[str]:
    """Yield the phase before each step of the move, from here to its end.

    What is tried there has to be `undone`. So a trial costs what follows it, not what led to it.
    """
    while (move := world.move).due_at is not None:
        yield move.phase
        world.step(move)


def each_call(world: World) -> Iterator[str]:
    """Stand before the step of each call, from here to the move's end, the killer set to the call.

    Yields which call it is; what happens from there on has to be `undone`.
    """
    for phase in each_moment(world):
        with undone(world):
            world.killer.calls = 0
            world.step()
            calls = world.killer.calls
        for at in range(1, calls + 1):
            world.killer.calls, world.killer.at = 0, at
            yield f"call {at} of a step of {phase}"
        world.killer.at = None


@contextmanager
def world(
    monkeypatch: pytest.MonkeyPatch,
    cast: make.Cast,
    now: datetime,
    source: str,
    target: str,
    kinds: tuple[str, str] = ("adk-sql", "adk-sql"),
) -> Iterator[World]:
    """Fill the source with 12 sessions of 4 users and stand ready to move them."""
    monkeypatch.setenv("STORE_EU1_A", source)
    monkeypatch.setenv("STORE_EU1_B", target)
    killer = Killer()
    real_open, real_copy = ports.open_store, ports.copy

    @contextmanager
    def open_store(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with real_open(*args, **kwargs) as port:
            yield Fragile(port, killer)

    def copy(ours: Any, theirs: Any, keys: Any) -> Any:
        if hook := killer.before.pop("copy", None):
            hook()
        killer.tick("copy")
        copied = real_copy(ours.port, theirs.port, keys)
        killer.tick("copy, done")
        return copied

    one, two = Raw(source, kinds[0]), Raw(target, kinds[1])
    one.make_tables("env:STORE_EU1_A", APP)
    one.seed(APP, sessions=12, users=4)
    monkeypatch.setattr(ports, "open_store", open_store)
    monkeypatch.setattr(ports, "copy", copy)
    yield World(cast, Clock(now), one, two, killer)
