"""Whole moves between tables and a google-adk service: there, and back again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import pytest
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.adk.sessions.sqlite_session_service import SqliteSessionService

from migrations_app import ports, services
from migrations_app.domain.phases import Phase
from migrations_app.domain.values import OURS
from migrations_app.ports.base import START, Key
from migrations_app.ports.service import ServiceStore
from migrations_app.preflight import between_stores
from tests import make
from tests.world import APP, World, world

T = TypeVar("T")


@pytest.fixture
def across(
    monkeypatch: pytest.MonkeyPatch,
    cast: make.Cast,
    now: datetime,
    tmp_path: Path,
    store_url: str,
) -> Iterator[World]:
    """A tenant in tables of PostgreSQL, to be moved behind google-adk's SqliteSessionService."""
    cast.other_store.kind = "adk-service"
    cast.other_store.save()
    # The target's rows, as hands reach them: the service's own tables.
    kinds = ("adk-sql", "adk-sqlite")
    with world(monkeypatch, cast, now, store_url, f"sqlite:///{tmp_path}/b.db", kinds) as ready:
        yield ready


def adk(side: World, work: Callable[[SqliteSessionService], Awaitable[T]]) -> T:
    """Do something at the target as an agent does."""
    return asyncio.run(work(SqliteSessionService(side.target.url)))  # type: ignore[arg-type]


def held(world: World, side: str) -> dict[str, Any]:
    """Return what one side holds, spelled so that both can be compared."""
    with (
        ports.open_store("adk-sql", "env:STORE_EU1_A", app_name=APP) as source,
        ports.open_store("adk-service", "env:STORE_EU1_B", app_name=APP) as target,
    ):
        one, at = (source.port, 0) if side == "source" else (target.port, 1)  # type: ignore[attr-defined]
        keys = [key for key, _ in one.page(START, 1000)]
        pair = source.port, target.port  # type: ignore[attr-defined]
        return {
            "sessions": {key: ports.sessions_of_both(*pair, key)[at] for key in keys},
            "shared": {row.user_id: json.loads(row.state) for row in one.shared_page(None, 1000)},
        }


async def a_turn(service: SqliteSessionService) -> None:
    found = await service.get_session(app_name=APP, user_id="u-1", session_id="s-1")
    assert found is not None
    delta = {"topic": "new", "user:tier": "gold", "app:motto": "ciao"}
    await service.append_event(
        found, Event(author="user", invocation_id="i", actions=EventActions(state_delta=delta))
    )
    await service.create_session(app_name=APP, user_id="u-3", session_id="born")
    await service.delete_session(app_name=APP, user_id="u-2", session_id="s-2")


def test_a_tenant_moves_behind_a_service_and_back_with_what_it_wrote(across: World) -> None:
    before = held(across, "source")
    assert len(before["sessions"]) == 12
    across.start(soak_seconds=86_400.0, offboard_automatically=False)
    across.run(until=Phase.SOAK)
    assert held(across, "target") == before
    assert not across.move.mismatches.exists()
    assert across.owner() == [("cell-eu1-b", "all")]
    assert not across.agents_may_write(across.source)
    checks = {check["name"]: check for check in across.move.checks}
    assert checks["Target's closing"]["ok"] is None
    assert "protocol and lease alone" in checks["Target's closing"]["detail"]
    adk(across, a_turn)
    after = held(across, "target")
    assert set(after["sessions"]) == set(before["sessions"]) - {Key("u-2", "s-2")} | {
        Key("u-3", "born")
    }
    services.rollback(across.move, by="ada", reason="slow tools", now=across.clock())
    across.run()
    assert across.move.phase == Phase.ROLLED_BACK
    assert held(across, "source") == after
    assert across.owner() == [("cell-eu1-a", "all")]


def test_a_tenant_that_lives_behind_a_service_moves_into_tables_and_is_removed_there(
    across: World,
) -> None:
    across.start(soak_seconds=60.0)
    across.run()
    assert across.move.phase == Phase.DONE
    adk(across, a_turn)
    before = held(across, "target")
    across.start(target_cell=across.cast.cell, target_store=across.cast.store, soak_seconds=60.0)
    across.run()
    assert across.move.phase == Phase.DONE
    assert held(across, "source") == before
    left = adk(across, lambda service: service.list_sessions(app_name=APP)).sessions
    # The guard alone, which says where the tenant went.
    assert {session.user_id for session in left} == {OURS}


def test_an_aborted_move_leaves_nothing_in_a_service(across: World) -> None:
    across.start()
    across.run(until=Phase.DELTA)
    services.abort(across.move, by="ada", reason="not today", now=across.clock())
    across.run()
    assert across.move.phase == Phase.ABORTED
    left = adk(across, lambda service: service.list_sessions(app_name=APP)).sessions
    assert {session.user_id for session in left} == {OURS}
    # And what an ended move has nulled does not keep the next one out.
    across.start(offboard_automatically=False)
    across.run(until=Phase.SOAK)


def test_a_replay_that_takes_several_steps_gets_through(
    across: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with across.source.connection() as connection:
        across.source.add_session(connection, APP, "u-1", "s-long", 60)
    monkeypatch.setattr(ports.mixed, "REPLAY_SECONDS", 0.05)
    across.start(offboard_automatically=False)
    seen = set()
    while across.move.phase != Phase.SOAK:
        across.step()
        seen.add("failed" if across.move.failures else "well")
    assert held(across, "target") == held(across, "source")
    notes = [event.note for event in across.move.events.all()]
    assert any("longer than one step may" in note for note in notes)
    # It was no failure at any time: none of its pauses, none of its alarms.
    assert "failed" not in seen
    # Nor was it taken for one that is gone at the source.
    assert across.move.deleted == 0


@pytest.mark.parametrize(
    ("user", "session", "named"),
    [
        pytest.param("U-1", "s-99", "'U-1' and 'u-1'", id="user"),
        pytest.param("u-1", "S-1", "'u-1/S-1' and 'u-1/s-1'", id="session"),
        pytest.param("u-1", "s-99", "", id="none"),
    ],
)
def test_ids_that_the_target_takes_for_one_stop_the_preparation(
    across: World, monkeypatch: pytest.MonkeyPatch, user: str, session: str, named: str
) -> None:
    monkeypatch.setattr(ServiceStore, "folds_case", lambda self: True)
    with across.source.connection() as connection:
        across.source.add_session(connection, APP, user, session, 1)
    across.start(offboard_automatically=False)
    for _ in range(3):
        across.step()
    [check] = [one for one in across.move.checks if one["name"] == "Case of ids"]
    assert named in check["detail"]
    assert check["ok"] is (False if named else None)
    assert across.move.phase == (Phase.PREPARE if named else Phase.BACKFILL)


def test_the_preparation_says_that_a_service_lists_no_quiet_users(across: World) -> None:
    cast = across.cast
    told = {
        source.key: [
            check.ok
            for check in between_stores(cast.acme, source_store=source, target_store=target).checks
            if check.name == "Source's quiet users"
        ]
        for source, target in (
            (cast.store, cast.other_store),
            (cast.other_store, cast.store),
        )
    }
    assert told == {"store-eu1-a": [], "store-eu1-b": [None]}


def test_a_user_without_sessions_goes_behind_a_service_too(across: World) -> None:
    across.source.run(
        "insert into user_states(app_name, user_id, state, update_time) values (?, ?, ?, now())"
        " returning 1",
        APP,
        "quiet",
        '{"tier": "gold"}',
    )
    across.start(offboard_automatically=False)
    across.run(until=Phase.SOAK)
    state = adk(across, lambda service: service.get_user_state(app_name=APP, user_id="quiet"))
    assert state == {"tier": "gold"}
