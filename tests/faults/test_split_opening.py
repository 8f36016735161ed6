"""Until the target of a split opens, new sessions begin nowhere: that is kept short."""

from __future__ import annotations

import pytest

from migrations_app import queries, services
from migrations_app.domain.phases import Phase
from tests.faults.test_split import assert_both_serve, sessions, start, until_both_serve
from tests.world import APP, World

pytestmark = pytest.mark.timeout(600)


def refused_for(world: World) -> float:
    """Let the target open; return for how long new sessions were refused (seconds)."""
    until_both_serve(world)
    assert world.move.split_at is not None
    return (world.clock() - world.move.split_at).total_seconds()


def test_new_sessions_wait_for_no_session_to_be_copied(files: World) -> None:
    start(files, pace_per_second=0.05)
    files.run(until=Phase.SPLIT)
    for user, session in [(f"u-{n % 4}", f"s-{n}") for n in range(12)]:
        files.source.turn(APP, user, session, f"busy-{session}", 9_000)
    assert refused_for(files) < 10
    # They go over once both sides serve.
    content = sessions(files.source)
    files.run(until=Phase.SOAK, steps=2_000)
    assert sessions(files.target) == content


def test_what_was_deleted_before_the_split_is_gone_before_the_target_opens(files: World) -> None:
    """Nobody at the source knows it any more, so its next turn would go on with the old copy."""
    start(files)
    files.run(until=Phase.SPLIT)
    files.source.delete(APP, "u-2", "s-2")
    until_both_serve(files)
    assert "u-2/s-2" not in sessions(files.target)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_pause_keeps_no_new_session_waiting(files: World, steps: int) -> None:
    start(files)
    files.run(until=Phase.SPLIT)
    for _ in range(steps):
        files.step()
    assert not queries.split_live(files.move)
    services.pause(files.move, by="ada", reason="lunch", now=files.clock())
    for _ in range(20):
        files.step()
    assert_both_serve(files, "paused")
    # And there it stays.
    assert files.move.phase == Phase.SPLIT
    assert files.move.pause_requested_at is not None


def test_a_pause_before_anybody_is_refused_holds(files: World) -> None:
    start(files)
    files.run(until=Phase.SPLIT)
    services.pause(files.move, by="ada", reason="lunch", now=files.clock())
    for _ in range(20):
        files.step()
    assert files.owner() == [("cell-eu1-a", "all")]
