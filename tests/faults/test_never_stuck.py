"""Whatever is asked in whatever moment: a move goes on, says what it waits for, or ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from migrations_app import copying, services
from migrations_app.copying import MOVED_ON
from migrations_app.domain.phases import WAY_OUT, Mode, Phase
from tenants.models import DirtyLine
from tests.faults.test_late_writes import accept, late, late_turn, named
from tests.faults.test_way_back import (
    LONG,
    assert_home,
    assert_stays,
    look,
    moved,
    roll_back,
)
from tests.stores import EMPTY, Raw
from tests.world import APP, World, each_moment, undone


def file_of(side: Raw) -> Path:
    return Path(side.url.removeprefix("sqlite:///"))


@pytest.fixture
def no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's time is over before it begins: it does one piece of its work all the same."""
    monkeypatch.setattr(copying.Timer, "out", True)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, no_time: None) -> None:
    """Twelve sessions are many: every sweep takes several pages, chunks and steps."""
    monkeypatch.setattr(copying, "PAGE", 3)
    monkeypatch.setattr(copying, "CHUNK_FIRST", 2)
    monkeypatch.setattr(copying, "CHUNK_MOST", 2)


# --- asked while the step runs that would act on what is taken back ---------------------------


def test_a_rollback_taken_back_while_its_step_runs_does_not_begin(files: World) -> None:
    content = moved(files)
    look(files)
    roll_back(files)
    # The last that the step does at a store: it has looked at the request, and will act on it.
    files.killer.before["can_close"] = lambda: services.cancel_rollback(
        files.move, by="ada", reason="not now", now=files.clock()
    )
    for _ in range(4):
        files.step()
    assert not files.killer.before
    assert_stays(files, content, "taken back")
    assert files.move.past_fences == []


def test_a_fence_taken_back_while_its_step_runs_does_not_close(files: World) -> None:
    files.start(automatic=False)
    _pass_ends(files)
    services.close_fence(files.move, by="ada", reason="x", now=files.clock())
    files.killer.before["can_close"] = lambda: services.cancel_fence(
        files.move, by="ada", reason="not now", now=files.clock()
    )
    for _ in range(8):
        files.step()
    assert not files.killer.before
    assert files.move.phase == Phase.BACKFILL
    assert files.move.waiting_for == "somebody to start the drain"
    assert files.owner() == [("cell-eu1-a", "all")]


def _pass_ends(world: World) -> None:
    """Step until another pass has ended."""
    ended = world.move.pass_ended_at
    for _ in range(40):
        world.step()
        if world.move.pass_ended_at != ended and world.move.stage == "ready":
            return
    raise AssertionError("no pass")


def test_a_difference_that_will_pass_by_itself_forbids_no_fence(files: World) -> None:
    files.start(automatic=False)
    _pass_ends(files)
    files.move.mismatches.create(
        user_id="u-1",
        session_id="s-1",
        part=MOVED_ON.part,
        first_difference=MOVED_ON.text,
        looks_like=MOVED_ON.looks_like,
        transient=True,
        found_at=files.clock(),
        found_in=Phase.BACKFILL,
    )
    services.close_fence(files.move, by="ada", reason="x", now=files.clock())
    files.run(until=Phase.SOAK)


# --- ways out of a rollback -------------------------------------------------------------------


def test_a_target_that_lost_its_guard_row_while_a_rollback_stops_can_be_left(files: World) -> None:
    content = moved(files)
    look(files)
    roll_back(files)
    files.run(until=Phase.REVERSE_VERIFY)
    files.target.run("DELETE FROM switchyard_guard")
    files.clock.pass_by(151)
    for _ in range(6):
        files.step()
    # A store that came back without the row may be one that comes back closed: nobody knows.
    assert files.move.phase == Phase.SOAK
    assert "store-eu1-b has lost its guard row" in files.move.failure
    assert files.owner() == [("cell-eu1-b", "none")]
    services.leave_behind(files.move, by="ada", reason="row deleted", now=files.clock())
    files.run()
    assert files.move.phase == Phase.DONE
    assert files.owner() == [("cell-eu1-b", "all")]
    assert files.target.content(APP) == content
    assert files.agents_may_write(files.target)


def test_a_target_that_was_away_when_a_rollback_stopped_opens_a_second_after_it_is_back(
    files: World,
) -> None:
    moved(files)
    look(files)
    roll_back(files)
    files.run(until=Phase.REVERSE_VERIFY)
    away = file_of(files.target).rename(file_of(files.target).with_suffix(".away"))
    files.clock.pass_by(151)
    # So often that a move at which nobody waits would be tried once a minute.
    for _ in range(12):
        files.step()
    assert files.owner() == [("cell-eu1-b", "none")]
    away.rename(file_of(files.target))
    back_at = files.clock()
    while files.owner() != [("cell-eu1-b", "all")]:
        files.step()
    assert (files.clock() - back_at).total_seconds() <= 1


def test_a_paused_move_that_is_left_behind_ends(files: World) -> None:
    moved(files)
    look(files)
    roll_back(files)
    files.run(until=Phase.REVERSE_DELTA)
    services.pause(files.move, by="ada", reason="wait", now=files.clock())
    file_of(files.source).unlink()
    files.clock.pass_by(151)
    for _ in range(4):
        files.step()
    services.leave_behind(files.move, by="ada", reason="disk lost", now=files.clock())
    # A pause that outlived this was a loop without a rest, for ever.
    files.run(steps=4)
    assert files.move.phase == Phase.DONE


def test_a_source_that_returns_takes_it_back_that_it_was_to_be_left(files: World) -> None:
    content = moved(files)
    look(files)
    roll_back(files)
    files.run(until=Phase.REVERSE_DELTA)
    away = file_of(files.source).rename(file_of(files.source).with_suffix(".away"))
    services.abort(files.move, by="ada", reason="not now", now=files.clock())
    for _ in range(4):
        files.step()
    away.rename(file_of(files.source))
    # Asked while the step runs that finds the source back, and records it.
    files.killer.before["mark"] = lambda: services.leave_behind(
        files.move, by="ada", reason="gone", now=files.clock()
    )
    for _ in range(4):
        files.step()
    assert not files.killer.before
    assert_stays(files, content, "it is back")
    assert files.move.leave_requested_at is None
    # Nor does the next rollback, stopped, end the move.
    look(files)
    roll_back(files)
    files.run(until=Phase.REVERSE_VERIFY)
    services.abort(files.move, by="ada", reason="not now", now=files.clock())
    for _ in range(6):
        files.step()
    assert_stays(files, content, "stopped once more")


def test_a_move_that_changes_the_store_alone_is_rolled_back_and_stopped_as_well(
    files: World,
) -> None:
    files.start(target_cell=files.cast.cell, soak_seconds=LONG, offboard_automatically=False)
    files.run(until=Phase.SOAK)
    files.target.turn(APP, "u-1", "s-1", "after-the-cutover")
    content = files.target.content(APP)
    look(files)
    roll_back(files)
    files.run(until=Phase.REVERSE_VERIFY)
    services.abort(files.move, by="ada", reason="not now", now=files.clock())
    for _ in range(6):
        files.step()
    assert files.owner() == [("cell-eu1-a", "all")]
    assert files.agents_may_write(files.target)
    assert not files.agents_may_write(files.source)
    roll_back(files)
    files.run()
    assert_home(files, content, "one cell")


# --- SOAK -------------------------------------------------------------------------------------


def test_a_source_that_stays_away_is_said_once(files: World) -> None:
    moved(files)
    look(files)
    file_of(files.source).rename(file_of(files.source).with_suffix(".away"))
    looked_at = set()
    for _ in range(12):
        files.step()
        looked_at.add(files.move.touched_at)
    assert len(looked_at) > 3
    said = [e.note for e in files.move.events.all() if e.note.startswith("Can't be looked at")]
    assert len(said) == 1


def test_what_was_served_before_the_last_look_is_dropped_by_the_next(files: World) -> None:
    moved(files)
    look(files)
    for _ in range(6):
        DirtyLine.objects.bulk_create(
            DirtyLine(tenant=files.cast.acme, user_id="u-1", session_id=f"s-{n}", at=files.clock())
            for n in range(50)
        )
        files.clock.pass_by(61)
        look(files)
    # Days of soak keep two looks' worth, not days of turns.
    assert DirtyLine.objects.filter(tenant=files.cast.acme).count() <= 100


# --- no time, and sizes that make everything long ---------------------------------------------


def test_steps_that_have_no_time_get_there_all_the_same(files: World, no_time: None) -> None:
    content = files.source.content(APP)
    files.start()
    files.run(steps=60)
    assert files.move.phase == Phase.DONE
    assert files.target.content(APP) == content


@pytest.mark.usefixtures("tiny")
def test_a_tenant_of_many_pages_goes_there_and_back(both: World) -> None:
    content = moved(both)
    assert look(both).touched == 3
    roll_back(both)
    both.run()
    assert_home(both, content, "many pages")
    assert not both.move.mismatches.exists()


@pytest.mark.usefixtures("tiny")
def test_late_writes_on_many_pages_are_all_named_and_replaced(files: World) -> None:
    content = moved(files)
    sessions = ("s-0", "s-1", "s-3", "s-7", "s-11")
    for session in sessions:
        late_turn(files, f"too-late-{session}", session)
    with files.late() as connection:
        # Born late, of a user whom nobody knows.
        files.source.add_session(connection, APP, "u-late", "s-late", 1)
    look(files)
    assert named(files) == late("s-late", *sessions)
    accept(files)
    roll_back(files)
    files.run()
    assert_home(files, content, "all accepted")


@pytest.mark.usefixtures("tiny")
def test_a_rollback_of_many_pages_that_is_stopped_leaves_the_tenant_where_it_was(
    files: World,
) -> None:
    content = moved(files)
    look(files)
    roll_back(files)
    for moment, phase in enumerate(each_moment(files)):
        if moment % 5 or phase not in WAY_OUT[Mode.FENCE]:
            continue
        with undone(files):
            services.abort(files.move, by="ada", reason="not now", now=files.clock())
            for _ in range(25):
                files.step()
            assert_stays(files, content, f"stopped after {moment} steps")
            assert not files.move.mismatches.exists(), moment
            files.target.turn(APP, "u-1", "s-5", "more", 9_100)
            roll_back(files)
            files.run()
            assert_home(files, files.target.content(APP), f"again after {moment} steps")


@pytest.mark.usefixtures("tiny")
def test_a_copy_that_an_ended_move_left_is_cleared_over_several_steps(files: World) -> None:
    moved(files)
    look(files)
    roll_back(files)
    files.run()
    content = files.source.content(APP)
    files.start()
    left = []
    for _ in range(30):
        files.step()
        if files.move.phase != Phase.PREPARE:
            break
        assert files.move.waiting_for == "The copy that an ended move left there is being removed."
        left.append(files.target.count(APP))
    assert left == sorted(set(left), reverse=True)
    assert len(left) > 3
    files.run()
    assert files.move.phase == Phase.DONE
    assert files.target.content(APP) == content
    assert files.source.content(APP) == EMPTY
