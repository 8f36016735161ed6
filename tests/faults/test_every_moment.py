"""Killed, aborted, paused: at every moment a move ends whole, on exactly one side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pytest

from migrations_app import services
from migrations_app.domain.phases import FENCED, REVERSED, WAY_OUT, Mode, Phase
from migrations_app.models import TenantMigration
from tests.stores import EMPTY
from tests.world import APP, World, each_call, each_moment, fragile_settling, undone

pytestmark = pytest.mark.timeout(600)


def assert_moved(world: World, content: dict[str, list[str]], why: object) -> None:
    """The tenant lives on the target, whole; the source's copy is gone."""
    assert world.move.phase == Phase.DONE, why
    assert world.target.content(APP) == content, why
    assert world.source.content(APP) == EMPTY, why
    assert world.owner() == [("cell-eu1-b", "all")], why
    assert world.agents_may_write(world.target), why
    assert not world.agents_may_write(world.source), why


def assert_stayed(world: World, content: dict[str, list[str]], why: object) -> None:
    """The tenant lives on the source, whole; nothing of it is on the target."""
    assert world.move.phase == Phase.ABORTED, why
    assert world.source.content(APP) == content, why
    assert world.target.content(APP) == EMPTY, why
    assert world.owner() == [("cell-eu1-a", "all")], why
    assert world.agents_may_write(world.source), why


def test_a_move_without_trouble_carries_every_row_over(both: World) -> None:
    before = both.source.content(APP)
    both.start()
    both.run()
    assert_moved(both, before, "no trouble")


def test_a_move_survives_a_kill_at_every_call(files: World) -> None:
    before = files.source.content(APP)
    files.start()
    tried = []
    for call in each_call(files):
        tried.append(call)
        with undone(files):
            files.run()
            assert_moved(files, before, f"killed at {call}")
    assert len(tried) > 100


def test_a_worker_that_stalls_at_any_call_and_wakes_after_the_move_changes_nothing(
    files: World,
) -> None:
    """Others finish the move and the tenant goes on; then the worker does the rest of its step."""
    home: dict[str, list[str]] = {}

    def others_finish() -> None:
        TenantMigration.objects.filter(pk=files.move.pk, due_at__isnull=False).update(
            due_at=files.clock()
        )
        files.run()
        files.target.turn(APP, "u-1", "s-1", "on-target")
        home.update(files.target.content(APP))

    files.start()
    # At every second call: half of them are the ends of others.
    for call in islice(each_call(files), 0, None, 2):
        with undone(files):
            files.killer.meanwhile = others_finish
            files.run()
            files.killer.meanwhile = None
            assert files.move.phase == Phase.DONE, call
            assert files.target.content(APP) == home, call
            assert files.owner() == [("cell-eu1-b", "all")], call
            assert files.agents_may_write(files.target), call
            assert not files.agents_may_write(files.source), call


def test_a_move_survives_a_kill_at_every_write_of_its_row(
    files: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between an effect in our database and the settling of its step."""
    before = files.source.content(APP)
    settling = fragile_settling(monkeypatch)
    files.start()
    for phase in each_moment(files):
        with undone(files):
            settling.armed = True
            files.run()
            assert_moved(files, before, f"killed before settling a step of {phase}")


def ask_at_every_moment(world: World, ask: Callable[[World], None]) -> Iterator[str]:
    """Start the move and ask before each of its steps; yields the phase asked in."""
    world.start()
    for phase in each_moment(world):
        with undone(world):
            ask(world)
            yield phase


def abort(world: World) -> None:
    services.abort(world.move, by="ada", reason="too slow", now=world.clock())


def test_an_abort_at_every_moment_ends_on_one_side(files: World) -> None:
    before = files.source.content(APP)
    ends = set()

    def ask(world: World) -> None:
        if world.move.phase in WAY_OUT[Mode.FENCE]:
            abort(world)
        else:
            with pytest.raises(services.NotNow):
                abort(world)

    for phase in ask_at_every_moment(files, ask):
        end = files.run().phase
        ends.add(end)
        if phase in WAY_OUT[Mode.FENCE]:
            assert_stayed(files, before, f"aborted in {phase}")
        else:
            assert_moved(files, before, f"too late in {phase}")
    assert ends == {Phase.DONE, Phase.ABORTED}


def test_an_abort_survives_a_kill_at_every_call(files: World) -> None:
    before = files.source.content(APP)
    files.start()
    files.run(until=Phase.VERIFY)
    abort(files)
    tried = []
    for call in each_call(files):
        tried.append(call)
        with undone(files):
            files.run()
            assert_stayed(files, before, f"killed at {call}")
    assert len(tried) > 10


def test_a_pause_at_every_moment_is_kept_and_resumed(files: World) -> None:
    before = files.source.content(APP)

    def pause(world: World) -> None:
        move = world.move
        try:
            services.pause(move, by="ada", reason="wait", now=world.clock())
        except services.NotNow:
            return
        version = world.move.version
        for _ in range(3):
            world.step()
        assert world.move.phase == move.phase
        assert world.move.version == version
        services.resume(world.move, by="ada", now=world.clock())

    for phase in ask_at_every_moment(files, pause):
        files.run()
        assert_moved(files, before, f"paused in {phase}")


def test_a_fence_that_is_paused_past_its_budget_opens_by_itself(both: World) -> None:
    before = both.source.content(APP)
    both.start()
    both.run(until=Phase.VERIFY)
    services.pause(both.move, by="ada", reason="wait", now=both.clock())
    both.clock.pass_by(151)
    both.run()
    assert_stayed(both, before, "budget over")
    assert any("budget is over" in event.note for event in both.move.events.all())


@pytest.mark.parametrize("phase", sorted(FENCED - REVERSED - {Phase.TARGET}))
def test_a_source_that_goes_away_inside_the_fence_never_outlives_the_budget(
    files: World, phase: Phase
) -> None:
    before = files.source.content(APP)
    files.start()
    files.run(until=phase)
    path = Path(files.source.url.removeprefix("sqlite:///"))
    away = path.rename(path.with_suffix(".away"))
    files.step()
    files.clock.pass_by(151)
    for _ in range(5):
        files.step()
    assert files.move.phase == Phase.REOPEN
    away.rename(path)
    files.run()
    assert_stayed(files, before, f"source away in {phase}")
