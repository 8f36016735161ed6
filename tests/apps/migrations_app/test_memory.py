"""Memory goes along: each session once, again when it changed, never what did not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from migrations_app import copying, memory
from migrations_app.copying import Meter, Swept, Timer
from migrations_app.models import TenantMigration
from tests import memories
from tests.world import World

pytestmark = pytest.mark.django_db


@pytest.fixture
def service() -> Iterator[memories.Picky]:
    """The memory of the target, as `python:tests.memories:kept` gives it out."""
    memories.SERVICES["kept"] = made = memories.Picky()
    yield made
    memories.SERVICES.clear()


def remember(world: World, monkeypatch: pytest.MonkeyPatch, target: str, source: str = "") -> None:
    """Give the target a memory service, and the source."""
    for store, name, address in (
        (world.cast.other_store, "MEMORY_B", target),
        (world.cast.store, "MEMORY_A", source),
    ):
        if address:
            monkeypatch.setenv(name, address)
            store.memory_from = f"env:{name}"
            store.save()


def ready(world: World) -> TenantMigration:
    """Copy all, and stop before the fence."""
    world.start(automatic=False)
    for _ in range(50):
        if world.step().stage == "ready":
            return world.move
    raise AssertionError(world.move.stage)


def swept(world: World, *, seconds: float = 5.0) -> Swept:
    move = world.move
    with copying.both(move) as (source, _):
        return memory.sweep(move, source, meter=Meter(), timer=Timer(seconds), clock=world.clock)


def stamped(world: World) -> int:
    return world.move.stamps.exclude(memory_stamp="").count()


def test_each_session_is_given_once(
    both: World, monkeypatch: pytest.MonkeyPatch, service: memories.Picky
) -> None:
    remember(both, monkeypatch, "python:tests.memories:kept")
    ready(both)
    assert swept(both).finished
    assert sorted(service.given) == sorted(f"s-{n}" for n in range(12))
    assert both.move.remembered == 12
    assert both.move.memory_rate is not None
    assert swept(both) == Swept(copying.Key("", "0"), 0, finished=True)
    assert len(service.given) == 12
