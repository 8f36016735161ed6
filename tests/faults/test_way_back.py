"""The way back: what the tenant wrote since the cutover goes home with it, whatever happens."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from durable import driver
from migrations_app import queries, services
from migrations_app.domain.mismatch import Looks
from migrations_app.domain.phases import FENCED, NO_RETURN, REVERSED, WAY_OUT, Mode, Phase
from migrations_app.models import TenantMigration
from tests.stores import EMPTY
from tests.world import APP, World, each_call, each_moment, undone

pytestmark = pytest.mark.timeout(600)

Content = dict[str, list[str]]
LONG = 86_400.0


def moved(world: World, **options: object) -> Content:
    """Move the tenant, let it live on the target, and return what it has there."""
    world.start(soak_seconds=LONG, offboard_automatically=False, **options)
    world.run(until=Phase.SOAK)
    world.target.turn(APP, "u-1", "s-1", "after-the-cutover")
    with world.target.connection() as connection:
        world.target.add_session(connection, APP, "u-3", "s-born", 1)
        world.target.add_event(connection, APP, "u-3", "s-born", "first", 2)
    world.target.delete(APP, "u-2", "s-2")
    return world.target.content(APP)


def look(world: World) -> TenantMigration:
    """Let SOAK's next look go by."""
    since = world.move.touched_at
    for _ in range(60):
        world.step()
        if world.move.touched_at != since and world.move.stage == "":
            return world.move
    raise AssertionError("no look")


def roll_back(world: World) -> None:
    services.rollback(world.move, by="ada", reason="slow tools", now=world.clock())


def assert_home(world: World, content: Content, why: object) -> None:
    """The tenant lives on the source again, with all that it wrote; the target is closed."""
    assert world.move.phase == Phase.ROLLED_BACK, why
    assert world.source.content(APP) == content, why
    assert world.owner() == [("cell-eu1-a", "all")], why
    assert world.agents_may_write(world.source), why
    assert not world.agents_may_write(world.target), why


def assert_stays(world: World, content: Content, why: object) -> None:
    """The tenant lives on the target, whole, and nothing of the rollback is left to do."""
    assert world.move.phase == Phase.SOAK, why
    assert world.move.abort_requested_at is None, why
    assert world.target.content(APP) == content, why
    assert world.owner() == [("cell-eu1-b", "all")], why
    assert world.agents_may_write(world.target), why
    assert not world.agents_may_write(world.source), why


def test_a_rollback_carries_back_what_was_written_born_and_deleted(both: World) -> None:
    content = moved(both)
    assert look(both).touched == 3
    roll_back(both)
    both.run()
    assert_home(both, content, "no trouble")
    [past] = both.move.past_fences
    assert not past["back"]
    assert both.move.quote["expected"] > 0


def test_a_rollback_survives_a_kill_at_every_call(files: World) -> None:
    content = moved(files)
    look(files)
    roll_back(files)
    tried = []
    for call in each_call(files):
        tried.append(call)
        with undone(files):
            files.run()
            assert_home(files, content, f"killed at {call}")
    assert len(tried) > 40


def test_a_worker_that_stalls_on_the_way_back_and_wakes_afterwards_changes_nothing(
    files: World,
) -> None:
    moved(files)
    look(files)
    roll_back(files)
    home: Content = {}

    def others_finish() -> None:
        TenantMigration.objects.filter(pk=files.move.pk, due_at__isnull=False).update(
            due_at=files.clock()
        )
        files.run()
        files.source.turn(APP, "u-1", "s-1", "home-again")
        home.update(files.source.content(APP))

    for call in islice(each_call(files), 0, None, 2):
        with undone(files):
            files.killer.meanwhile = others_finish
            files.run()
            files.killer.meanwhile = None
            assert_home(files, home, f"stalled at {call}")


def test_a_rollback_that_is_stopped_at_any_moment_leaves_the_tenant_where_it_was(
    files: World,
) -> None:
    content = moved(files)
    look(files)
    roll_back(files)
    stopped = set()
    for phase in each_moment(files):
        if phase not in WAY_OUT[Mode.FENCE]:
            continue
        with undone(files):
            stopped.add(phase)
            services.abort(files.move, by="ada", reason="not after all", now=files.clock())
            for _ in range(6):
                files.step()
            assert_stays(files, content, f"stopped in {phase}")
            # The same rows are at the source as when it closed, or as this move wrote them.
            assert not files.move.mismatches.exists(), phase
            roll_back(files)
            files.run()
            assert_home(files, content, f"stopped in {phase}, then rolled back")
    assert stopped == REVERSED - NO_RETURN


def test_stopping_a_rollback_survives_a_kill_at_every_call(files: World) -> None:
    content = moved(files)
    look(files)
    roll_back(files)
    files.run(until=Phase.REVERSE_VERIFY)
    services.abort(files.move, by="ada", reason="not after all", now=files.clock())
    files.killer.calls = 0
    with undone(files):
        for _ in range(8):
            files.step()
        calls = files.killer.calls
    for at in range(1, calls + 1):
        with undone(files):
            files.killer.at = at
            for _ in range(9):
                files.step()
            assert_stays(files, content, f"killed at call {at}")
            assert not files.move.mismatches.exists(), at
            files.killer.at = None
            services.confirm_offboard(
                files.move, typed="acme", by="ada", reason="done", now=files.clock()
            )
            files.clock.pass_by(LONG)
            files.run()
            assert files.move.phase == Phase.DONE, at
            assert files.source.content(APP) == EMPTY, at


def test_a_paused_rollback_past_its_budget_opens_the_target_although_it_is_paused(
    both: World,
) -> None:
    content = moved(both)
    look(both)
    roll_back(both)
    both.run(until=Phase.REVERSE_VERIFY)
    services.pause(both.move, by="ada", reason="wait", now=both.clock())
    both.clock.pass_by(151)
    for _ in range(6):
        both.step()
    assert both.move.pause_requested_at is not None
    assert_stays(both, content, "paused past the budget")


@pytest.mark.parametrize("phase", sorted(REVERSED))
def test_a_rollback_that_is_paused_goes_on_when_it_is_resumed(files: World, phase: Phase) -> None:
    content = moved(files)
    look(files)
    roll_back(files)
    files.run(until=phase)
    if phase not in NO_RETURN:
        services.pause(files.move, by="ada", reason="wait", now=files.clock())
        files.step()
        assert files.move.phase == phase
        services.resume(files.move, by="ada", now=files.clock())
    files.run()
    assert_home(files, content, phase)


def test_a_late_write_at_the_closed_source_is_named_and_survives_until_somebody_says_so(
    both: World,
) -> None:
    content = moved(both)
    with both.late() as connection:
        both.source.add_event(connection, APP, "u-3", "s-3", "too-late", 50)
    look(both)
    [late] = both.move.mismatches.all()
    assert (late.looks_like, late.session_id) == (Looks.LATE_WRITE, "s-3")
    with pytest.raises(services.NotNow, match="1 late write at"):
        roll_back(both)
    services.accept(
        both.move, mismatch_ids=[late.pk], by="ada", reason="a test run", now=both.clock()
    )
    look(both)
    roll_back(both)
    both.run()
    assert_home(both, content, "accepted")


def test_a_late_write_that_nobody_has_seen_yet_is_never_replaced_by_a_rollback(both: World) -> None:
    content = moved(both)
    look(both)
    roll_back(both)
    both.run(until=Phase.REVERSE_DELTA)
    with both.late() as connection:
        # One in a session that the tenant went on with, one in a session that it left alone.
        both.source.add_event(connection, APP, "u-1", "s-1", "too-late", 50)
        both.source.add_event(connection, APP, "u-3", "s-3", "too-late", 50)
    late = both.source.content(APP)
    both.run(until=Phase.REVERSE_VERIFY)
    for _ in range(5):
        both.step()
    assert both.move.phase == Phase.REVERSE_VERIFY
    rows = both.move.mismatches.filter(resolved_at=None)
    assert {(row.session_id, row.looks_like) for row in rows} == {
        ("s-1", Looks.LATE_WRITE),
        ("s-3", Looks.LATE_WRITE),
    }
    kept = [row for row in late["events"] if "too-late" in row]
    assert set(kept) <= set(both.source.content(APP)["events"])
    both.clock.pass_by(151)
    for _ in range(6):
        both.step()
    assert_stays(both, content, "nobody said so")
    assert set(kept) <= set(both.source.content(APP)["events"])


def test_a_source_that_was_rewritten_with_equal_rows_raises_no_alarm(servers: World) -> None:
    servers.start(soak_seconds=LONG, offboard_automatically=False)
    servers.run(until=Phase.SOAK)
    with servers.late() as connection:
        servers.source.run_in(connection, "UPDATE events SET invocation_id = invocation_id")
    look(servers)
    assert not servers.move.mismatches.exists()
    assert any("rewritten" in event.note for event in servers.move.events.all())


def test_a_source_that_cannot_be_looked_at_does_not_end_the_soak(files: World) -> None:
    moved(files)
    path = Path(files.source.url.removeprefix("sqlite:///"))
    away = path.rename(path.with_suffix(".away"))
    for _ in range(4):
        files.step()
    assert files.move.failures == 0
    assert "store-eu1-a has lost" in files.move.waiting_for
    away.rename(path)
    look(files)
    assert files.move.waiting_for == ""


def test_a_rollback_asked_for_at_the_last_moment_keeps_offboard_out(
    files: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = moved(files)
    look(files)
    services.confirm_offboard(files.move, typed="acme", by="ada", reason="x", now=files.clock())
    files.clock.pass_by(LONG - 1)
    files.step()
    files.clock.pass_by(2)
    settle = driver._settle

    def late(*args: Any, **kwargs: Any) -> None:
        monkeypatch.setattr(driver, "_settle", settle)
        roll_back(files)
        settle(*args, **kwargs)

    # Asked after the step has looked, before it settles.
    while files.move.phase == Phase.SOAK and files.move.rollback_requested_at is None:
        monkeypatch.setattr(driver, "_settle", late)
        files.step()
    files.run()
    assert_home(files, content, "just in time")


def test_a_move_after_a_rollback_clears_what_the_rollback_left_at_the_target(both: World) -> None:
    moved(both)
    look(both)
    roll_back(both)
    both.run()
    content = both.source.content(APP)
    first = both.move.pk
    both.start()
    assert TenantMigration.objects.get(pk=first).phase == Phase.ROLLED_BACK
    both.run()
    assert both.target.content(APP) == content
    assert both.source.content(APP) == EMPTY


def test_every_fenced_phase_of_the_way_back_has_a_deadline(files: World) -> None:
    content = moved(files)
    look(files)
    for phase in sorted((FENCED & REVERSED) - NO_RETURN):
        with undone(files):
            roll_back(files)
            files.run(until=phase)
            if phase == Phase.REVERSE_DRAIN:
                # Its first step closes the fence.
                files.step()
            files.clock.pass_by(151)
            for _ in range(7):
                files.step()
            assert_stays(files, content, f"budget over in {phase}")


@pytest.mark.parametrize("phase", [Phase.REVERSE_DELTA, Phase.REVERSE_VERIFY])
def test_a_source_that_fails_on_the_way_back_leaves_the_tenant_on_the_target(
    files: World, phase: Phase
) -> None:
    content = moved(files)
    look(files)
    roll_back(files)
    files.run(until=phase)
    path = Path(files.source.url.removeprefix("sqlite:///"))
    away = path.rename(path.with_suffix(".away"))
    files.step()
    files.clock.pass_by(151)
    for _ in range(4):
        files.step()
    assert files.move.phase == Phase.SOAK
    assert files.owner() == [("cell-eu1-b", "all")]
    assert files.agents_may_write(files.target)
    away.rename(path)
    for _ in range(4):
        files.step()
    assert_stays(files, content, f"source away in {phase}")
    assert not files.move.mismatches.exists()


def test_a_source_that_never_comes_back_after_a_stopped_rollback_can_be_given_up(
    files: World,
) -> None:
    content = moved(files)
    look(files)
    roll_back(files)
    files.run(until=Phase.REVERSE_DELTA)
    services.abort(files.move, by="ada", reason="it is broken", now=files.clock())
    Path(files.source.url.removeprefix("sqlite:///")).unlink()
    for _ in range(4):
        files.step()
    services.leave_behind(files.move, by="ada", reason="disk lost", now=files.clock())
    files.run()
    assert files.move.phase == Phase.DONE
    assert files.target.content(APP) == content
    assert files.owner() == [("cell-eu1-b", "all")]


def _late_born(world: World) -> None:
    with world.late() as connection:
        world.source.add_session(connection, APP, "u-late", "s-late", 1)


def test_a_session_born_late_by_an_unknown_user_is_settled_by_its_acceptance(files: World) -> None:
    content = moved(files)
    _late_born(files)
    look(files)
    [late] = files.move.mismatches.all()
    services.accept(files.move, mismatch_ids=[late.pk], by="ada", reason="x", now=files.clock())
    roll_back(files)
    files.run()
    assert_home(files, content, "accepted")


def test_what_a_stopped_comparison_found_does_not_forbid_the_next_rollback(files: World) -> None:
    content = moved(files)
    look(files)
    roll_back(files)
    files.run(until=Phase.REVERSE_VERIFY)
    # The way back's copy is spoilt, as by a fault of the store; it is found, and nobody repairs it.
    with files.late() as connection:
        files.source.run_in(connection, "UPDATE user_states SET state = '{\"spoilt\": 1}'")
    for _ in range(3):
        files.step()
    services.abort(files.move, by="ada", reason="later", now=files.clock())
    for _ in range(6):
        files.step()
    assert files.move.phase == Phase.SOAK
    look(files)
    roll_back(files)
    files.run()
    assert_home(files, content, "after a stopped one")


def test_a_late_birth_that_a_stopped_rollback_met_is_named_in_the_soak(files: World) -> None:
    moved(files)
    look(files)
    roll_back(files)
    files.run(until=Phase.REVERSE_DELTA)
    _late_born(files)
    services.abort(files.move, by="ada", reason="later", now=files.clock())
    for _ in range(6):
        files.step()
    look(files)
    assert queries.late_writes(files.move).filter(session_id="s-late").exists()


def test_a_late_write_inside_the_fence_is_replaced_by_its_acceptance_alone(both: World) -> None:
    content = moved(both)
    look(both)
    roll_back(both)
    both.run(until=Phase.REVERSE_VERIFY)
    with both.late() as connection:
        both.source.add_event(connection, APP, "u-3", "s-3", "too-late", 50)
    for _ in range(3):
        both.step()
    [late] = both.move.mismatches.all()
    with pytest.raises(services.NotNow, match="late writes"):
        services.recopy(both.move, mismatch_ids=[late.pk], by="ada", now=both.clock())
    services.accept(
        both.move, mismatch_ids=[late.pk], by="ada", reason="a test run", now=both.clock()
    )
    both.run()
    assert_home(both, content, "accepted inside the fence")
