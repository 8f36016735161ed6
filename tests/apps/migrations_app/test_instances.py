"""One person declares an instance dead where the move closes the store behind it."""

from __future__ import annotations

import pytest

from migrations_app import instances
from migrations_app.domain.phases import Phase
from tenants.domain.fence import GoneWhy
from tenants.models import AuditEntry, RuntimeInstance
from tests import scene
from tests.world import APP, World

pytestmark = pytest.mark.django_db


@pytest.fixture
def silent(files: World) -> RuntimeInstance:
    """The instance that keeps the move's fence from closing, silent for a minute by now."""
    [one] = scene.instances(files.cast.cell, ["eu1-a-1"], now=files.clock(), stores=["store-eu1-a"])
    [there] = scene.instances(
        files.cast.other_cell, ["eu1-b-1"], now=files.clock(), stores=["store-eu1-b"]
    )
    # It has heard of the tenant that will come.
    scene.said(there, at=files.clock(), version=1_000)
    files.start()
    files.run(until=Phase.BACKFILL)
    for _ in range(20):
        files.step()
    assert "eu1-a-1" in files.move.waiting_for
    files.clock.pass_by(60)
    return one


def declare(files: World, instance: RuntimeInstance) -> RuntimeInstance:
    return instances.declare_dead(
        files.move, instance, by="ada", reason="its host burnt", now=files.clock()
    )


def test_an_instance_that_the_fence_waits_for_is_dead_on_one_word(
    files: World, silent: RuntimeInstance
) -> None:
    assert declare(files, silent).gone_why == GoneWhy.DEAD
    assert files.move.events.first().note == "Declare dead: eu1-a-1: its host burnt"
    assert AuditEntry.objects.get(verb="instance.declare_dead").who == "ada"
    files.run(until=Phase.DRAIN)


def test_one_that_no_fence_waits_for_takes_two(files: World, silent: RuntimeInstance) -> None:
    other = RuntimeInstance.objects.get(name="eu1-b-1")
    with pytest.raises(instances.NotWaitedFor, match="second person"):
        declare(files, other)
    other.refresh_from_db()
    assert other.gone_at is None


def test_a_store_that_does_not_close_takes_two(files: World, silent: RuntimeInstance) -> None:
    for table in ("sessions", "events", "app_states", "user_states"):
        for (name,) in files.source.run(
            "select name from sqlite_master where type = 'trigger' and tbl_name = ?", table
        ):
            files.source.run(f'drop trigger "{name}"')
    with pytest.raises(instances.StaysOpen, match="second person"):
        declare(files, silent)
    assert files.source.count(APP) == 12


def test_a_move_that_has_ended_vouches_for_nobody(files: World, silent: RuntimeInstance) -> None:
    move = files.move
    move.phase = Phase.SOAK
    with pytest.raises(instances.NotWaitedFor):
        instances.declare_dead(move, silent, by="ada", reason="burnt", now=files.clock())
