"""Sessions that a real google-adk wrote, copied by a port, and read and continued by google-adk."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.adk.sessions import DatabaseSessionService, Session
from google.genai import types

from bench import scripted
from migrations_app.ports import copy, digests_of_both, open_store, schema
from migrations_app.ports.base import START, Key, SessionStore

ACME, BOLT = "support.acme", "support.bolt"
PAIRS = [("u0", "s0"), ("u0", "s1"), ("u1", "s2"), ("u1", "s3")]


@dataclass(frozen=True)
class Place:
    """A database as google-adk and as the port open it."""

    adk_url: str
    reference: str

    @asynccontextmanager
    async def adk(self) -> AsyncIterator[DatabaseSessionService]:
        service = DatabaseSessionService(self.adk_url)
        try:
            yield service
        finally:
            await service.close()

    def port(self, app_name: str = ACME) -> AbstractContextManager[SessionStore]:
        return open_store("adk-sql", self.reference, app_name=app_name, move=1, claim=1)


@pytest.fixture(params=["postgresql", "sqlite"])
def new_place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Place]:
    def create(name: str) -> Place:
        if request.param == "sqlite":
            url = f"sqlite+aiosqlite:///{tmp_path / name}.db"
        else:
            plain = request.getfixturevalue("new_database")()
            url = plain.replace("postgresql://", "postgresql+psycopg://")
        monkeypatch.setenv(f"STORE_{name}", url)
        return Place(url, f"env:STORE_{name}")

    return create


@pytest.fixture
async def source(new_place: Callable[[str], Place]) -> Place:
    """Two tenants with two turns a session, by real Runners, and what is odd and legal."""
    place = new_place("SOURCE")
    async with place.adk() as service:
        for app in (ACME, BOLT):
            for user, name in PAIRS:
                await service.create_session(
                    app_name=app,
                    user_id=user,
                    session_id=name,
                    state={"title": f"T {name}", "user:plan": "pro", "app:motd": "hello"},
                )
                for text in ("first", "second"):
                    await turn(service, app, user, name, text)
        await odd_sessions(service)
    return place


@pytest.fixture
def target(new_place: Callable[[str], Place]) -> Place:
    """An empty database that the move may write."""
    place = new_place("TARGET")
    with place.port() as store:
        store.provision()
        store.adopt(None, mover=True, agents=False)
    return place


async def turn(
    service: DatabaseSessionService, app: str, user: str, name: str, text: str
) -> list[Event]:
    """Take one turn of a real Runner: call, tool with state in three scopes, answer."""
    runner = scripted.build_runner(app, service)
    return [
        event
        async for event in runner.run_async(
            user_id=user, session_id=name, new_message=scripted.message(text)
        )
    ]


async def odd_sessions(service: DatabaseSessionService) -> None:
    """Write what a careless copy would spoil."""
    # No event: last_update_time is the creation's.
    await service.create_session(
        app_name=ACME, user_id="u2", session_id="silent", state={"a": None}
    )
    odd = await service.create_session(app_name=ACME, user_id="ü'2", session_id=" padded ")
    for number, at in enumerate((1_760_000_000.000001, 1_760_000_000.000001, 1_750_000_000.5)):
        await service.append_event(
            odd,
            Event(
                id=f"{2 - number}-same-time",
                invocation_id="i",
                author="user",
                timestamp=at,
                content=types.Content(
                    role="user",
                    parts=[
                        types.Part(text="héllo 😀\n\t\"'"),
                        types.Part(inline_data=types.Blob(data=b"\xff\x00\xfb", mime_type="x/y")),
                    ],
                ),
                actions=EventActions(
                    state_delta={"n": number, "none": None, "deep": {"b": [1.0, 1e-7], "a": {}}},
                    artifact_delta={"note.txt": number},
                ),
                custom_metadata={"k": None},
                error_code="INVOCATION_ABORTED" if number == 2 else None,
            ),
        )
        fresh = await service.get_session(app_name=ACME, user_id="ü'2", session_id=" padded ")
        assert fresh is not None
        odd = fresh


def move(source: Place, target: Place) -> list[Key]:
    """Copy a tenant as a move does: sessions by pages, shared state last."""
    with source.port() as here, target.port() as there:
        keys: list[Key] = []
        after = START
        while page := here.page(after, 3):
            keys += [key for key, _ in page]
            after = page[-1][0]
            copy(here, there, keys[-len(page) :])
        there.write_shared(here.shared_page(None, 1000))
        ours, theirs = digests_of_both(here, there, keys)
        assert {k: d[:2] for k, d in ours.items()} == {k: d[:2] for k, d in theirs.items()}
        there.take(mover=False, agents=True)
    return keys


async def read(place: Place, user: str, name: str) -> Session:
    async with place.adk() as service:
        found = await service.get_session(app_name=ACME, user_id=user, session_id=name)
    assert found is not None
    return found


async def test_a_copied_session_reads_back_equal_in_every_field(
    source: Place, target: Place
) -> None:
    keys = move(source, target)
    assert len(keys) == 6
    for user, name in keys:
        ours, theirs = await read(source, user, name), await read(target, user, name)
        assert theirs.model_dump() == ours.model_dump()
        assert [event.id for event in theirs.events] == [event.id for event in ours.events]
        assert theirs.last_update_time == ours.last_update_time
        assert theirs._storage_update_marker == ours._storage_update_marker
    seen = await read(target, "u0", "s0")
    # All three scopes, and nothing that was never to be stored.
    users = {"user:plan", "user:count", "user:last"}
    assert {"title", "last", "count", *users, "app:motd", "app:count"} == set(seen.state)


async def test_copied_sessions_are_listed_alike(source: Place, target: Place) -> None:
    move(source, target)
    async with source.adk() as here, target.adk() as there:
        for user in (None, "u0"):
            ours = await here.list_sessions(app_name=ACME, user_id=user)
            theirs = await there.list_sessions(app_name=ACME, user_id=user)
            assert theirs.model_dump() == ours.model_dump()
        assert (await there.list_sessions(app_name=BOLT)).sessions == []


async def test_a_real_runner_takes_the_next_turn_on_the_target(
    source: Place, target: Place
) -> None:
    move(source, target)
    before = await read(target, "u0", "s0")
    async with target.adk() as service:
        events = await turn(service, ACME, "u0", "s0", "third")
    after = await read(target, "u0", "s0")
    assert after.events[: len(before.events)] == before.events
    assert [event.id for event in after.events[-len(events) :]] == [event.id for event in events]
    # What the tool counts goes on where the source stopped.
    assert (before.state["count"], after.state["count"]) == (2, 3)
    assert after.state["user:count"] == before.state["user:count"] + 1
    assert after.state["app:count"] == before.state["app:count"] + 1
    assert (await read(source, "u0", "s0")).model_dump() == before.model_dump()


async def test_a_session_object_of_the_source_goes_on_at_the_target(
    source: Place, target: Place
) -> None:
    """A runtime that held the session over the flip appends without reading it again."""
    held = await read(source, "u1", "s2")
    move(source, target)
    async with target.adk() as service:
        await service.append_event(held, Event(author="user", invocation_id="i"))
    assert len((await read(target, "u1", "s2")).events) == len(held.events)


async def test_every_odd_session_can_be_continued(source: Place, target: Place) -> None:
    run(source, "DELETE FROM user_states WHERE user_id = 'u2'")
    for user, name in move(source, target):
        session = await read(target, user, name)
        async with target.adk() as service:
            await service.append_event(session, Event(author="user", invocation_id="i"))


async def test_new_sessions_can_be_born_on_the_target(source: Place, target: Place) -> None:
    move(source, target)
    async with target.adk() as service:
        born = await service.create_session(app_name=ACME, user_id="u0")
        await turn(service, ACME, "u0", born.id, "hello")
    assert (await read(target, "u0", born.id)).state["user:plan"] == "pro"


async def test_copying_again_after_more_turns_is_equal_again(source: Place, target: Place) -> None:
    with source.port() as here, target.port() as there:
        keys = [key for key, _ in here.page(START, 100)]
        copy(here, there, keys)
        async with source.adk() as service:
            await turn(service, ACME, "u0", "s1", "more")
            await service.delete_session(app_name=ACME, user_id="u0", session_id="s0")
        copied = copy(here, there, keys).copied
        assert set(keys) - set(copied) == {Key("u0", "s0")}
    move(source, target)
    assert (await read(target, "u0", "s1")).model_dump() == (
        await read(source, "u0", "s1")
    ).model_dump()


# --- closing ---------------------------------------------------------------------------------


def closed_by_switchyard(error: BaseException | None) -> bool:
    """Look for the store's words along both chains, as the Host does."""
    while error is not None:
        if "closed by switchyard" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


async def test_adk_fails_in_a_closed_store_and_goes_on_when_it_opens(source: Place) -> None:
    session = await read(source, "u0", "s0")
    events = len(session.events)
    with source.port() as store:
        store.provision()
        store.adopt(None, mover=False, agents=True)
        store.take(mover=False, agents=False)
    async with source.adk() as service:
        for work in (
            lambda: service.append_event(session, Event(author="user", invocation_id="i")),
            lambda: service.create_session(app_name=ACME, user_id="u0"),
            lambda: service.create_session(app_name=ACME, user_id="u9", session_id="mine"),
            lambda: service.delete_session(app_name=ACME, user_id="u0", session_id="s0"),
            lambda: turn(service, ACME, "u0", "s0", "hello"),
        ):
            with pytest.raises(Exception) as caught:  # noqa: PT011  # ADK wraps it as it likes
                await work()
            assert closed_by_switchyard(caught.value)
        # Reading goes on, and nothing was written.
        found = await service.get_session(app_name=ACME, user_id="u0", session_id="s0")
        assert found is not None
        assert len(found.events) == len(session.events) == events
        with source.port() as store:
            store.take(mover=False, agents=True)
        await service.append_event(session, Event(author="user", invocation_id="i"))


async def test_other_tenants_do_not_notice_a_closed_one(source: Place) -> None:
    with source.port() as store:
        store.provision()
        store.adopt(None, mover=False, agents=False)
    async with source.adk() as service:
        await turn(service, BOLT, "u0", "s0", "hello")
        born = await service.create_session(app_name=BOLT, user_id="u9")
        await service.delete_session(app_name=BOLT, user_id="u9", session_id=born.id)


async def test_the_survey_counts_what_adk_aborted(source: Place) -> None:
    with source.port() as store:
        # The padded session: its last event by time is not its last by writing, so none here.
        assert store.survey().interrupted == 0
    async with source.adk() as service:
        session = await service.create_session(app_name=ACME, user_id="u0", session_id="cut")
        runner = scripted.build_runner(ACME, service)
        async for event in runner.run_async(
            user_id="u0", session_id=session.id, new_message=scripted.message("hello")
        ):
            if event.get_function_calls():
                break
    with source.port() as store:
        assert store.survey().interrupted == 1


# --- tables ----------------------------------------------------------------------------------


def run(place: Place, statement: str) -> Any:
    import sqlite3

    if place.adk_url.startswith("sqlite"):
        with sqlite3.connect(place.adk_url.partition("///")[2]) as agent:
            found = agent.execute(statement).fetchall()
        agent.close()
        return found
    with psycopg.connect(place.adk_url.replace("+psycopg", ""), autocommit=True) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


def tables(place: Place) -> Any:
    """Return what ADK's tables are made of, whoever made them."""
    if place.adk_url.startswith("sqlite"):
        return {
            name: [
                run(place, f"PRAGMA {kind}({name})")
                for kind in ("table_info", "foreign_key_list", "index_list")
            ]
            for name in (*schema.TABLES, "adk_internal_metadata")
        }, run(place, "SELECT name FROM pragma_index_xinfo('idx_events_app_user_session_ts_id')")
    return [
        run(place, statement)
        for statement in (
            "SELECT table_name, column_name, data_type, character_maximum_length, is_nullable,"
            " column_default, datetime_precision FROM information_schema.columns"
            " WHERE table_schema = 'public' AND table_name NOT LIKE 'switchyard%' ORDER BY 1, 2",
            "SELECT indexdef FROM pg_indexes WHERE schemaname = 'public'"
            " AND tablename NOT LIKE 'switchyard%' ORDER BY 1",
            "SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint"
            " WHERE connamespace = 'public'::regnamespace AND conname NOT LIKE 'switchyard%'"
            " ORDER BY 1",
            "SELECT * FROM adk_internal_metadata",
        )
    ]


async def test_provisioned_tables_are_those_that_adk_makes(source: Place, target: Place) -> None:
    assert tables(target) == tables(source)
    async with target.adk() as service:
        await service.prepare_tables()
    assert tables(target) == tables(source)
