"""What somebody writes at the closed source is named, and replaced only by a person's word."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from migrations_app import copying, queries, services
from migrations_app.domain.mismatch import Looks
from migrations_app.domain.phases import Phase
from migrations_app.models import TenantMigration
from migrations_app.steps.fence import LATE_SHARED
from tests.faults.test_way_back import (
    LONG,
    assert_home,
    assert_stays,
    look,
    moved,
    roll_back,
)
from tests.stores import EMPTY
from tests.world import APP, World


def late_turn(world: World, name: str = "too-late", session: str = "s-3") -> None:
    """Write an event at the closed source, in a session that the tenant left alone there."""
    user = f"u-{int(session.removeprefix('s-')) % 4}"
    with world.late() as connection:
        world.source.add_event(connection, APP, user, session, name, 50)


def late_shared(world: World) -> None:
    with world.late() as connection:
        world.source.run_in(
            connection,
            "UPDATE user_states SET state = '{\"tier\": \"late\"}' WHERE user_id = 'u-1'",
        )


def late_deletion(world: World) -> None:
    with world.late() as connection:
        for table, column in (("events", "session_id"), ("sessions", "id")):
            world.source.run_in(connection, f"DELETE FROM {table} WHERE {column} = 's-3'")


def named(world: World) -> set[tuple[str, str]]:
    """Return (session, looks like) of what is open; the session of shared state is ""."""
    rows = world.move.mismatches.filter(resolved_at=None)
    return set(rows.values_list("session_id", "looks_like"))


def late(*sessions: str) -> set[tuple[str, str]]:
    return {(session, Looks.LATE_WRITE) for session in sessions}


def accept(world: World) -> None:
    """Say of all that is open that the tenant's own may take its place."""
    ids = list(world.move.mismatches.filter(resolved_at=None).values_list("pk", flat=True))
    services.accept(world.move, mismatch_ids=ids, by="ada", reason="a test run", now=world.clock())


def accepted(world: World) -> bool:
    return world.move.mismatches.get(resolved_at=None).accepted_at is not None


def run_until_it_waits(world: World, what: str) -> None:
    """Step until the move waits for `what`; it has to do so long before its fence gives up."""
    for _ in range(12):
        world.step()
        if what in world.move.waiting_for:
            return
    raise AssertionError(f"{world.move.phase}: {world.move.waiting_for}, {named(world)}")


def holds(world: World, what: str) -> bool:
    """Return whether the source still has a row with these words."""
    return any(what in row for rows in world.source.content(APP).values() for row in rows)


# --- accepted: for this write, and for no other -----------------------------------------------


def test_the_word_on_a_late_write_stands_while_the_tenant_goes_on(files: World) -> None:
    moved(files)
    late_turn(files, session="s-1")
    look(files)
    accept(files)
    # The tenant's next turn changes the target's digest, not what was accepted.
    files.target.turn(APP, "u-1", "s-1", "next-turn", 9_300)
    content = files.target.content(APP)
    look(files)
    assert accepted(files)
    roll_back(files)
    files.run()
    assert_home(files, content, "accepted once")


def test_the_word_on_a_late_write_is_void_after_another_in_its_session(files: World) -> None:
    moved(files)
    late_turn(files)
    look(files)
    accept(files)
    late_turn(files, "later-still")
    look(files)
    assert not accepted(files)
    with pytest.raises(services.NotNow, match="1 late write at"):
        roll_back(files)


@pytest.mark.parametrize("session", ["s-1", "s-3"])
def test_a_second_late_write_that_nobody_has_seen_is_not_replaced_by_the_word_on_the_first(
    both: World, session: str
) -> None:
    """s-1 the tenant went on with: DELTA meets it. s-3 it left alone: the comparison does."""
    content = moved(both)
    late_turn(both, session=session)
    look(both)
    accept(both)
    roll_back(both)
    both.run(until=Phase.REVERSE_DRAIN)
    late_turn(both, "never-seen", session)
    run_until_it_waits(both, "1 mismatch to be repaired")
    assert named(both) == late(session)
    assert not accepted(both)
    assert holds(both, "never-seen")
    accept(both)
    both.run()
    assert_home(both, content, "both seen")


def test_a_late_write_in_the_state_alone_is_replaced_by_the_tenants_own(both: World) -> None:
    content = moved(both)
    with both.late() as connection:
        both.source.run_in(
            connection,
            'UPDATE sessions SET state = \'{"topic": "late"}\','
            " update_time = '2026-02-02 00:00:00.000000' WHERE id = 's-7'",
        )
    look(both)
    assert named(both) == late("s-7")
    accept(both)
    roll_back(both)
    both.run()
    assert_home(both, content, "accepted")


def test_more_late_writes_than_a_step_repairs_are_all_replaced(
    files: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "CHUNK_FIRST", 2)
    content = moved(files)
    for session in ("s-0", "s-3", "s-4", "s-7", "s-11"):
        late_turn(files, f"too-late-{session}", session)
    look(files)
    assert named(files) == late("s-0", "s-3", "s-4", "s-7", "s-11")
    accept(files)
    roll_back(files)
    files.run()
    assert_home(files, content, "all accepted")


# --- shared state, whose writer no stamp tells ------------------------------------------------


def test_late_shared_state_inside_the_fence_waits_for_a_word_and_is_then_replaced(
    both: World,
) -> None:
    content = moved(both)
    look(both)
    roll_back(both)
    both.run(until=Phase.REVERSE_DRAIN)
    late_shared(both)
    run_until_it_waits(both, LATE_SHARED)
    assert both.move.phase == Phase.REVERSE_DRAIN
    assert named(both) == late("")
    assert holds(both, '"late"')
    accept(both)
    both.run()
    assert_home(both, content, "accepted inside the fence")


def test_late_shared_state_that_nobody_settles_outlives_the_fence(files: World) -> None:
    content = moved(files)
    look(files)
    roll_back(files)
    files.run(until=Phase.REVERSE_DRAIN)
    late_shared(files)
    run_until_it_waits(files, LATE_SHARED)
    files.clock.pass_by(151)
    for _ in range(6):
        files.step()
    assert_stays(files, content, "nobody said so")
    assert holds(files, '"late"')
    with pytest.raises(services.NotNow, match="1 late write at"):
        roll_back(files)


def test_late_shared_state_is_named_beside_the_late_session_that_wrote_it(files: World) -> None:
    """As a late turn of ADK writes both: the session's row alone would pass for all of it."""
    content = moved(files)
    late_turn(files)
    late_shared(files)
    look(files)
    assert named(files) == late("s-3", "")
    accept(files)
    roll_back(files)
    files.run()
    assert_home(files, content, "both accepted")


def test_late_shared_state_is_named_beside_rows_that_were_rewritten_and_are_equal(
    servers: World,
) -> None:
    """Those are recorded anew, and with them the mark: of sessions, not of shared state."""
    servers.start(soak_seconds=LONG, offboard_automatically=False)
    servers.run(until=Phase.SOAK)
    with servers.late() as connection:
        servers.source.run_in(connection, "UPDATE events SET invocation_id = invocation_id")
    late_shared(servers)
    look(servers)
    look(servers)
    assert named(servers) == late("")
    with pytest.raises(services.NotNow, match="1 late write at"):
        roll_back(servers)


@pytest.mark.parametrize("said", [False, True], ids=["nobody accepted it", "accepted"])
def test_offboard_keeps_late_shared_state_until_somebody_accepted_it(
    files: World, said: bool
) -> None:
    content = moved(files)
    late_shared(files)
    look(files)
    if said:
        accept(files)
    services.confirm_offboard(files.move, typed="acme", by="ada", reason="x", now=files.clock())
    files.clock.pass_by(LONG)
    files.run()
    assert files.move.phase == Phase.DONE
    assert files.target.content(APP) == content
    left = files.source.content(APP)
    assert left["sessions"] == left["events"] == []
    assert holds(files, '"late"') is not said
    assert (left == EMPTY) is said


def test_late_writes_that_a_stopped_rollback_met_are_named_in_the_soak(files: World) -> None:
    """Its coming back records the source's mark anew: with them, so they are looked for first."""
    moved(files)
    look(files)
    roll_back(files)
    files.run(until=Phase.REVERSE_DELTA)
    late_turn(files)
    services.abort(files.move, by="ada", reason="later", now=files.clock())
    for _ in range(6):
        files.step()
    look(files)
    assert named(files) == late("s-3")


# --- deletions, and what comes at the last moment ---------------------------------------------


def _before_the_rollback(world: World) -> None:
    late_deletion(world)
    look(world)
    roll_back(world)


def _inside_its_fence(world: World) -> None:
    roll_back(world)
    world.run(until=Phase.REVERSE_VERIFY)
    late_deletion(world)


@pytest.mark.parametrize("when", [_before_the_rollback, _inside_its_fence])
def test_a_late_deletion_is_brought_back_by_a_rollback(
    both: World, when: Callable[[World], None]
) -> None:
    content = moved(both)
    look(both)
    when(both)
    both.run()
    assert_home(both, content, "nothing to accept: the tenant still has it")


def test_a_late_deletion_is_said_in_the_soak_and_is_nobodys_to_settle(files: World) -> None:
    moved(files)
    look(files)
    late_deletion(files)
    look(files)
    assert not files.move.mismatches.exists()
    said = [e.note for e in files.move.events.all() if "Sessions were deleted" in e.note]
    assert len(said) == 1
    look(files)
    assert said == [e.note for e in files.move.events.all() if "Sessions were deleted" in e.note]


def test_a_late_write_behind_the_proof_is_compared_before_the_source_opens(both: World) -> None:
    content = moved(both)
    look(both)
    roll_back(both)
    both.run(until=Phase.REVERSE_VERIFY)
    # Every session is proven equal; the counts, and then the mark, are all that is left.
    both.killer.before["counts"] = lambda: late_turn(both)
    run_until_it_waits(both, "1 mismatch to be repaired")
    assert any("changed: compared again" in event.note for event in both.move.events.all())
    assert named(both) == late("s-3")
    assert holds(both, "too-late")
    accept(both)
    both.run()
    assert_home(both, content, "accepted")


def test_a_rollback_that_waits_still_looks_for_late_writes(files: World) -> None:
    moved(files)
    look(files)
    roll_back(files)
    # Its fence would be longer than its budget by now.
    TenantMigration.objects.filter(pk=files.move.pk).update(copy_rate=0.001, budget_seconds=1.0)
    run_until_it_waits(files, "a shorter fence")
    files.target.turn(APP, "u-1", "s-5", "more", 9_100)
    late_turn(files)
    files.clock.pass_by(61)
    assert look(files).touched == 4
    assert queries.late_writes(files.move).get().session_id == "s-3"


def test_a_deletion_on_the_target_is_carried_back_beside_a_late_birth(both: World) -> None:
    content = moved(both)
    look(both)
    roll_back(both)
    both.run(until=Phase.REVERSE_DRAIN)
    with both.late() as connection:
        both.source.add_session(connection, APP, "u-3", "s-born", 2)
    run_until_it_waits(both, "mismatch")
    accept(both)
    both.run()
    assert_home(both, content, "accepted")
    # s-2, which the tenant deleted, was never written late.
    assert not both.move.mismatches.filter(session_id="s-2").exists()
