"""A store that loses something while a move runs costs no session and no home."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from durable import driver
from migrations_app import services
from migrations_app.domain.phases import Phase
from migrations_app.models import TenantMigration
from tests import make
from tests.faults.test_changes import _as_agent_again, _as_mover, go, ready
from tests.faults.test_every_moment import assert_moved, assert_stayed
from tests.world import APP, World


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof is polled for no real time: tests drive the clock."""
    monkeypatch.setattr("migrations_app.steps.fence.POLL_FOR_SECONDS", 0.0)


@pytest.mark.parametrize("table", ["events", "sessions", "user_states"])
def test_a_source_that_loses_a_table_is_not_taken_for_an_empty_tenant(
    servers: World, table: str
) -> None:
    ready(servers)
    before = servers.source.content(APP)
    servers.source.run(f"alter table {table} rename to away")
    go(servers)
    for _ in range(20):
        assert servers.step().phase == Phase.BACKFILL
    assert "has lost one of ADK's tables" in servers.move.failure
    assert servers.target.count(APP) == 12
    servers.source.run(f"alter table away rename to {table}")
    servers.run()
    assert_moved(servers, before, f"{table} was away")


def test_a_source_that_loses_a_table_inside_the_fence_keeps_the_tenant(servers: World) -> None:
    servers.start()
    before = servers.source.content(APP)
    servers.run(until=Phase.DELTA)
    servers.source.run("alter table events rename to away")
    servers.step()
    servers.clock.pass_by(151)
    while servers.move.phase != Phase.ABORTED:
        servers.step()
    servers.source.run("alter table away rename to events")
    assert_stayed(servers, before, "events were away")


def test_a_fence_is_not_closed_on_a_store_that_has_lost_its_guard_row(both: World) -> None:
    ready(both)
    both.source.run("delete from switchyard_guard")
    go(both)
    for _ in range(30):
        both.step()
    assert both.move.phase == Phase.BACKFILL
    assert "has lost its guard row" in both.move.failure
    assert both.owner() == [("cell-eu1-a", "all")]


@pytest.mark.parametrize("phase", [Phase.DELTA, Phase.VERIFY])
def test_nothing_is_cut_over_from_a_source_that_is_not_closed_any_more(
    both: World, phase: Phase
) -> None:
    """Its late writers would be acknowledged and lost: the mark is read before the flip."""
    both.start()
    both.run(until=phase)
    both.source.run("delete from switchyard_guard")
    for _ in range(12):
        both.step()
    assert both.move.phase == Phase.REOPEN
    services.leave_behind(both.move, by="ada", reason="row deleted", now=both.clock())
    both.run()
    assert both.owner() == [("cell-eu1-a", "all")]
    assert both.agents_may_write(both.source)


def test_a_closing_trigger_that_was_dropped_while_copying_stands_before_the_fence(
    both: World,
) -> None:
    ready(both)
    if both.source.sqlite:
        both.source.run("drop trigger switchyard_events_insert")
    else:
        both.source.run("drop trigger switchyard_gate on events")
    go(both)
    both.run(until=Phase.DELTA)
    assert not both.agents_may_write(both.source)


@pytest.mark.timeout(60)
def test_a_session_that_no_pass_knew_stays_at_the_source_with_its_users_state(both: World) -> None:
    both.start()
    both.run(until=Phase.SOAK)
    with both.source.connection() as connection:
        _as_mover(both, connection)
        both.source.add_session(connection, APP, "u-1", "s-late", 2)
        _as_agent_again(both, connection)
    move = both.run()
    assert (move.phase, move.left_behind) == (Phase.DONE, 1)
    assert both.source.run("select id from sessions where app_name = ?", APP) == [("s-late",)]
    assert len(both.source.content(APP)["user_states"]) == 4
    assert any("s-late of u-1" in event.note for event in move.events.all())


def test_a_source_that_was_dropped_in_the_soak_can_be_left_behind(servers: World) -> None:
    servers.start()
    servers.run(until=Phase.OFFBOARD)
    server, _, name = servers.source.url.rpartition("/")
    with psycopg.connect(f"{server}/postgres", autocommit=True) as connection:
        connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')
    with pytest.raises(services.NotNow):
        services.leave_behind(servers.move, by="ada", reason="too early", now=servers.clock())
    servers.step()
    assert "no database of that name" in servers.move.failure
    services.leave_behind(servers.move, by="ada", reason="it was dropped", now=servers.clock())
    move = servers.run()
    assert (move.phase, move.left_behind) == (Phase.DONE, 12)
    assert servers.owner() == [("cell-eu1-b", "all")]


def test_a_key_that_our_own_database_cannot_hold_is_spelled_in_the_mismatch(files: World) -> None:
    ready(files)
    key = '"a\\u0000b\\ud800"'
    for side, data in ((files.source, f'{{"id": "x", {key}: 1}}'), (files.target, '{"id": "x"}')):
        with side.connection() as connection:
            _as_mover(files, connection)
            side.run_in(connection, "update events set event_data = ? where id = ?", data, "s-3-e1")
            _as_agent_again(files, connection)
    go(files)
    files.run(until=Phase.VERIFY)
    for _ in range(8):
        files.step()
    [mismatch] = files.move.mismatches.all()
    assert "a\\x00b\\ud800 is only on the source" in mismatch.first_difference


def test_a_start_whose_look_outlasted_another_whole_move_is_refused(
    files: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """It would move the tenant out of the store that it has just left, to an empty one."""
    monkeypatch.setenv("STORE_EU1_C", f"sqlite:///{tmp_path}/three.db")
    third = make.store("store-eu1-c", region=files.cast.region, now=files.clock())
    look: Callable[..., Any] = services.preflight

    def slowly(*args: Any, **kwargs: Any) -> Any:
        found = look(*args, **kwargs)
        monkeypatch.setattr(services, "preflight", look)
        files.start()
        files.run()
        return found

    monkeypatch.setattr(services, "preflight", slowly)
    with pytest.raises(services.NotReadyToMove, match="has moved to cell-eu1-b"):
        services.start(
            files.cast.acme,
            target_cell=files.cast.other_cell,
            target_store=third,
            by="ada",
            reason="more room",
            now=files.clock(),
        )
    assert TenantMigration.objects.get().phase == Phase.DONE
    assert not driver.due(files.machine, now=files.clock())
