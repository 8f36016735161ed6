"""A move of the cell alone: one store, which serves both cells and is never closed."""

from __future__ import annotations

from typing import Any

import pytest

from migrations_app import services
from migrations_app.domain.phases import FENCED, Mode, Phase
from migrations_app.models import TenantMigration
from migrations_app.services import InvalidOption, NotNow, SamePlace
from tenants.models import Placement, PolicyEntry
from tests import scene
from tests.world import APP, World, each_moment, fragile_settling, undone

Content = dict[str, list[str]]


def start(world: World, **options: Any) -> TenantMigration:
    return world.start(target_store=world.cast.store, **options)


def assert_in(world: World, cell: str, phase: Phase, content: Content, why: object) -> None:
    assert world.move.phase == phase, why
    assert world.owner() == [(cell, "all")], why
    assert Placement.objects.get(tenant=world.cast.acme).store == world.cast.store, why
    assert world.source.content(APP) == content, why
    assert world.agents_may_write(world.source), why


def test_the_tenant_changes_its_cell_and_the_store_is_open_at_every_moment(both: World) -> None:
    content = both.source.content(APP)
    move = start(both)
    assert move.mode == Mode.CELL
    phases = []
    for phase in each_moment(both):
        phases.append(phase)
        assert both.agents_may_write(both.source), phase
        # Whoever takes turns takes all of them; behind the fence nobody does.
        takes = [cell for cell, accepts in both.owner() if accepts == "all"]
        assert len(takes) <= 1, phase
        assert (takes == []) <= (phase in FENCED), phase
    assert list(dict.fromkeys(phases)) == ["prepare", "drain", "target", "soak"]
    assert_in(both, "cell-eu1-b", Phase.DONE, content, "no trouble")
    left = PolicyEntry.objects.get(tenant=both.cast.acme, cell=both.cast.cell)
    assert (left.accepts, left.moved_to) == ("moved", both.cast.other_cell)


def test_it_waits_for_the_word_of_the_old_cells_instances(files: World) -> None:
    start(files)
    files.run(until=Phase.DRAIN)
    [row] = scene.instances(files.cast.cell, ["eu1-a-1"], now=files.clock())
    for _ in range(2):
        for _ in range(3):
            files.step()
            assert files.move.phase == Phase.DRAIN
        assert "eu1-a-1" in files.move.waiting_for
        # It has applied the fence, and a turn still runs.
        version = files.move.fence_version
        scene.said(row, at=files.clock(), version=version, in_flight={"acme": 1})
    scene.said(row, at=files.clock(), version=files.move.fence_version)
    files.run(until=Phase.SOAK)


def test_it_waits_for_somebody_to_start_the_drain(files: World) -> None:
    start(files, automatic=False)
    for _ in range(5):
        files.step()
    assert files.move.waiting_for == "somebody to start the drain"
    services.close_fence(files.move, by="ada", reason="now", now=files.clock())
    services.cancel_fence(files.move, by="ada", reason="no", now=files.clock())
    files.step()
    assert files.move.phase == Phase.PREPARE
    services.close_fence(files.move, by="ada", reason="now", now=files.clock())
    files.run()
    assert files.move.phase == Phase.DONE


def test_an_abort_at_any_moment_before_the_flip_leaves_the_tenant_where_it_was(
    files: World,
) -> None:
    content = files.source.content(APP)
    start(files)
    asked = set()
    for phase in each_moment(files):
        if phase in (Phase.TARGET, Phase.SOAK):
            break
        asked.add(phase)
        with undone(files):
            services.abort(files.move, by="ada", reason="no", now=files.clock())
            files.run()
            assert_in(files, "cell-eu1-a", Phase.ABORTED, content, phase)
            told = PolicyEntry.objects.filter(tenant=files.cast.acme, cell=files.cast.other_cell)
            assert {entry.accepts for entry in told} <= {"moved"}, phase
    assert asked == {Phase.PREPARE, Phase.DRAIN}


def test_a_fence_past_its_deadline_opens_by_itself(files: World) -> None:
    start(files, drain_bound_seconds=10)
    files.run(until=Phase.DRAIN)
    scene.instances(files.cast.cell, ["eu1-a-1"], now=files.clock())
    files.step()
    assert files.owner() == [("cell-eu1-a", "none")]
    files.clock.pass_by(11)
    files.run()
    assert files.move.phase == Phase.ABORTED
    assert files.owner() == [("cell-eu1-a", "all")]


def test_a_rollback_leads_back_by_a_fence_and_can_be_stopped(files: World) -> None:
    content = files.source.content(APP)
    start(files, soak_seconds=3600.0)
    files.run(until=Phase.SOAK)
    services.rollback(files.move, by="ada", reason="slow", now=files.clock())
    with undone(files):
        files.run(until=Phase.REVERSE_DRAIN)
        services.abort(files.move, by="ada", reason="stay", now=files.clock())
        files.run(until=Phase.SOAK)
        for _ in range(5):
            files.step()
        assert_in(files, "cell-eu1-b", Phase.SOAK, content, "stopped")
        assert files.move.stage == ""
    files.run()
    assert_in(files, "cell-eu1-a", Phase.ROLLED_BACK, content, "rolled back")


@pytest.mark.parametrize("back", [False, True], ids=["there", "back"])
def test_it_survives_a_kill_before_every_settling(
    files: World, monkeypatch: pytest.MonkeyPatch, back: bool
) -> None:
    content = files.source.content(APP)
    settling = fragile_settling(monkeypatch)
    start(files)
    if back:
        files.run(until=Phase.SOAK)
        services.rollback(files.move, by="ada", reason="slow", now=files.clock())
    cell, phase = ("cell-eu1-a", Phase.ROLLED_BACK) if back else ("cell-eu1-b", Phase.DONE)
    for moment in each_moment(files):
        with undone(files):
            settling.armed = True
            files.run()
            assert_in(files, cell, phase, content, f"killed before settling {moment}")


def test_what_only_a_copy_has_is_refused(files: World) -> None:
    cast = files.cast
    with pytest.raises(SamePlace, match="already"):
        start(files, target_cell=cast.cell)
    with pytest.raises(SamePlace, match="between two stores"):
        start(files, mode=Mode.SPLIT)
    with pytest.raises(SamePlace, match="leaves acme on"):
        files.start(mode=Mode.CELL)
    with pytest.raises(InvalidOption, match="nothing to look at"):
        start(files, flip_by_hand=True)
    with pytest.raises(InvalidOption, match="DELTA"):
        start(files, pause_before="delta")
    assert not TenantMigration.objects.exists()
    move = start(files, automatic=False)
    with pytest.raises(NotNow, match="no pace"):
        services.set_pace(move, pace_per_second=3, by="ada", reason="r", now=files.clock())
