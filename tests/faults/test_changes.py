"""What happens at the source while it is copied arrives; what must not happen stops the move."""

from __future__ import annotations

import json
from typing import Any

import pytest

from durable import driver
from migrations_app import copying, ports, queries, services, steps
from migrations_app.domain.mismatch import Looks
from migrations_app.domain.phases import Phase
from migrations_app.models import TenantMigration
from tests.faults.test_every_moment import assert_moved, assert_stayed
from tests.world import APP, World


def ready(world: World, **options: Any) -> None:
    """Bring the move to the point where it waits for somebody to close the fence."""
    world.start(automatic=False, **options)
    world.run(until=Phase.BACKFILL)
    for _ in range(30):
        if world.step().stage == "ready":
            return
    raise AssertionError(world.move.stage)


def go(world: World) -> None:
    services.close_fence(world.move, by="ada", reason="now", now=world.clock())


def test_turns_deletes_and_new_sessions_during_the_copy_arrive(both: World) -> None:
    ready(both)
    source = both.source
    source.turn(APP, "u-1", "s-1", "s-1-late")
    source.delete(APP, "u-2", "s-2")
    with source.connection() as connection:
        source.add_session(connection, APP, "u-3", "s-new", 4)
    source.run("update app_states set state = ? where app_name = ?", json.dumps({"m": 2}), APP)
    expected = source.content(APP)
    go(both)
    both.run()
    assert_moved(both, expected, "changed while copying")


def test_a_session_deleted_between_the_page_and_its_copy_leaves_nothing(both: World) -> None:
    both.start()
    both.killer.before["copy"] = lambda: both.source.delete(APP, "u-1", "s-1")
    both.run()
    assert both.target.count(APP) == 11
    assert both.move.phase == Phase.DONE


def test_a_turn_between_copy_and_comparison_is_transient_and_passes(
    both: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare = ports.digests_of_both

    def after_a_turn(*sides: Any) -> Any:
        monkeypatch.setattr(ports, "digests_of_both", compare)
        both.source.turn(APP, "u-1", "s-1", "between")
        return compare(*sides)

    monkeypatch.setattr(ports, "digests_of_both", after_a_turn)
    both.start(automatic=False)
    both.run(until=Phase.BACKFILL)
    while both.move.stage in ("", "copy"):
        both.step()
    [row] = both.move.mismatches.all()
    assert row.transient
    assert queries.open_mismatches(both.move) == 0
    TenantMigration.objects.filter(pk=both.move.pk).update(automatic=True)
    both.run()
    assert both.move.phase == Phase.DONE
    [row] = both.move.mismatches.all()
    assert row.resolved_at is not None


def test_an_edit_in_place_is_found_before_the_cutover(both: World) -> None:
    """Same update_time, same count: only xmin, or on SQLite a full comparison, sees it."""
    ready(both)
    both.source.run(
        "update events set event_data = ? where app_name = ? and id = ?",
        json.dumps({"id": "s-3-e1", "author": "edited"}),
        APP,
        "s-3-e1",
    )
    go(both)
    if both.source.sqlite:
        both.run(until=Phase.VERIFY)
        for _ in range(8):
            both.step()
        [mismatch] = both.move.mismatches.filter(resolved_at=None)
        assert (mismatch.session_id, mismatch.part) == ("s-3", "events")
        services.recopy(both.move, mismatch_ids=[mismatch.pk], by="ada", now=both.clock())
    expected = both.source.content(APP)
    both.run()
    assert_moved(both, expected, "edited in place")


def test_a_copy_that_was_spoilt_is_named_and_repaired_by_its_action(both: World) -> None:
    ready(both)
    with both.target.connection() as connection:
        _as_mover(both, connection)
        both.target.run_in(
            connection, "delete from events where app_name = ? and session_id = ?", APP, "s-5"
        )
        _as_agent_again(both, connection)
    expected = both.source.content(APP)
    go(both)
    both.run(until=Phase.VERIFY)
    for _ in range(8):
        both.step()
    [mismatch] = both.move.mismatches.filter(resolved_at=None)
    assert mismatch.looks_like == Looks.EMPTY_COPY
    assert mismatch.source_digest != mismatch.target_digest
    services.recopy(both.move, mismatch_ids=[mismatch.pk], by="ada", now=both.clock())
    both.run()
    assert_moved(both, expected, "spoilt and repaired")


def test_proof_in_many_short_steps_compares_each_changed_session_once(
    both: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where stamps see every edit, the others are proven by one sum, not anew in each step."""
    ready(both)
    changed = [f"s-{number}" for number in range(1, 6)]
    for session in changed:
        query = "select user_id from sessions where app_name = ? and id = ?"
        [(user,)] = both.source.run(query, APP, session)
        both.source.turn(APP, user, session, f"{session}-late")
    expected = both.source.content(APP)
    go(both)
    both.run(until=Phase.VERIFY)
    monkeypatch.setattr(copying, "FENCED_STEP_SECONDS", 0.0)
    monkeypatch.setattr(copying, "PAGE", 2)
    monkeypatch.setattr(copying, "CHUNK_MOST", 2)
    before, steps_taken = both.move.compared, 0
    while both.move.stage == "sessions":
        both.step()
        steps_taken += 1
    assert steps_taken > 2
    sessions = 12
    assert both.move.done == sessions
    assert both.move.compared - before == (sessions if both.source.sqlite else len(changed))
    both.run()
    assert_moved(both, expected, "proven in many steps")


def test_an_unrepaired_mismatch_reopens_on_the_source_when_the_budget_is_over(
    both: World,
) -> None:
    ready(both, budget_seconds=12, drain_bound_seconds=5)
    with both.target.connection() as connection:
        _as_mover(both, connection)
        both.target.run_in(
            connection, "delete from events where app_name = ? and session_id = ?", APP, "s-5"
        )
        _as_agent_again(both, connection)
    expected = both.source.content(APP)
    go(both)
    both.run()
    assert_stayed(both, expected, "mismatch not repaired")


def test_an_old_shared_value_on_the_target_is_settled_by_value(both: World) -> None:
    ready(both)
    with both.target.connection() as connection:
        _as_mover(both, connection)
        both.target.run_in(
            connection,
            "update user_states set state = ? where app_name = ? and user_id = ?",
            json.dumps({"tier": "old"}),
            APP,
            "u-1",
        )
        _as_agent_again(both, connection)
    expected = both.source.content(APP)
    go(both)
    both.run()
    assert_moved(both, expected, "old shared value")


def test_a_session_that_only_the_target_has_is_counted_and_named(both: World) -> None:
    before = both.source.content(APP)
    both.start()
    both.run(until=Phase.VERIFY)
    with both.late(both.target) as connection:
        both.target.add_session(connection, APP, "u-1", "s-stray", 1)
    for _ in range(4):
        both.step()
    assert both.move.phase == Phase.VERIFY
    [row] = both.move.mismatches.all()
    assert (row.part, row.session_id) == ("extra", "s-stray")
    assert row.looks_like == Looks.WRITTEN_ON_TARGET
    services.recopy(both.move, mismatch_ids=[row.pk], by="ada", now=both.clock())
    both.run()
    assert_moved(both, before, "the stray session was removed")


def test_a_write_past_the_closed_store_stops_the_cutover(both: World) -> None:
    """A fence leak, produced with the mover's own key: the mark at the end of VERIFY sees it."""
    both.start()
    both.run(until=Phase.VERIFY)
    expected: dict[str, list[str]] = {}

    def leak() -> None:
        with both.source.connection() as connection:
            _as_mover(both, connection)
            both.source.run_in(
                connection,
                "update sessions set update_time = create_time where app_name = ? and id = ?",
                APP,
                "s-4",
            )
            _as_agent_again(both, connection)
        expected.update(both.source.content(APP))

    # After every session was compared, before the mark is read again.
    both.killer.before["counts"] = leak
    both.run()
    assert_stayed(both, expected, "fence leak")
    assert any("fence leak" in event.note for event in both.move.events.all())


def test_a_stale_worker_that_wakes_after_the_cutover_changes_nothing(both: World) -> None:
    """It read its chunk before its lease ran out; by now the tenant writes on the target."""
    both.start()
    both.run(until=Phase.BACKFILL)
    while both.move.stage != "copy":
        both.step()
    stale_claim = TenantMigration.objects.get(pk=both.move.pk)
    # The claim that a stalled worker holds: the next one is taken by those who go on.
    stale_claim.claim += 1

    def others_finish() -> None:
        TenantMigration.objects.filter(pk=stale_claim.pk).update(due_at=both.clock())
        both.run(until=Phase.SOAK)
        both.target.turn(APP, "u-1", "s-1", "on-target")

    both.killer.before["copy"] = others_finish
    driver.advance(both.machine, stale_claim.pk, clock=both.clock)
    assert both.move.phase == Phase.SOAK
    events = both.target.run(
        "select id from events where app_name = ? and session_id = ? order by id", APP, "s-1"
    )
    assert ("on-target",) in events
    assert len(events) == 4


@pytest.mark.parametrize("call", ["guard", "provision", "adopt", "page"])
def test_a_worker_that_slept_in_prepare_through_the_whole_move_changes_nothing(
    both: World, call: str
) -> None:
    """It surveyed an empty target; when it wakes, that target is the tenant's home."""
    both.start()
    stale = both.move
    kept: dict[str, list[str]] = {}

    def others_finish() -> None:
        TenantMigration.objects.filter(pk=stale.pk).update(due_at=both.clock())
        both.run()
        both.target.turn(APP, "u-1", "s-1", "on-target")
        kept.update(both.target.content(APP))

    both.killer.before[call] = others_finish
    driver.advance(both.machine, stale.pk, clock=both.clock)
    assert both.move.phase == Phase.DONE
    assert both.target.content(APP) == kept
    assert both.agents_may_write(both.target)


def test_a_stale_worker_cant_close_a_store_that_an_abort_opened(both: World) -> None:
    both.start()
    both.run(until=Phase.DRAIN)
    while both.move.drained_at is None:
        both.step()

    def others_abort() -> None:
        TenantMigration.objects.filter(pk=both.move.pk).update(due_at=both.clock())
        services.abort(both.move, by="ada", reason="no", now=both.clock())
        both.run()

    both.killer.before["take"] = others_abort
    driver.advance(both.machine, both.move.pk, clock=both.clock)
    assert both.move.phase == Phase.ABORTED
    assert both.agents_may_write(both.source)
    assert both.owner() == [("cell-eu1-a", "all")]


def test_every_phase_that_works_has_a_step() -> None:
    from migrations_app.domain.phases import TABLE

    assert set(steps.STEPS) == {phase for phase, edges in TABLE.items() if edges}


def _as_mover(world: World, connection: object) -> None:
    side = world.target
    if side.sqlite:
        world.target.run_in(
            connection, "update switchyard_guard set writing = 1 where app_name = ?", APP
        )
    else:
        side.run_in(connection, "select set_config('switchyard.mover', 'test', true)")


def _as_agent_again(world: World, connection: object) -> None:
    if world.target.sqlite:
        world.target.run_in(
            connection, "update switchyard_guard set writing = 0 where app_name = ?", APP
        )


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof is polled for no real time: tests drive the clock."""
    monkeypatch.setattr("migrations_app.steps.fence.POLL_FOR_SECONDS", 0.0)
