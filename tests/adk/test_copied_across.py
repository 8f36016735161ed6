"""Sessions of a real google-adk, copied into a store of another layout, read and continued there.

`test_copied_sessions` has the same for two stores of one layout.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.adk.sessions import BaseSessionService, Session
from google.genai import types

from bench import scripted
from migrations_app import ports
from migrations_app.domain.values import OURS, Layout
from migrations_app.ports.base import START, Key
from tests.adk.layouts import ACME, Place

# Every pair of what stores are made of; two of one kind of table are in `test_copied_sessions`.
# DatabaseSessionService writes files as it writes PostgreSQL, so of its files one pair each way.
PAIRS = [
    (one, other)
    for one, other in product(
        [each for each in Layout if each is not Layout.SERVICE_SQLITE], repeat=2
    )
    if one is not other or one.is_service or one is Layout.ADK_SQLITE
] + [(Layout.SERVICE_SQLITE, Layout.POSTGRESQL), (Layout.POSTGRESQL, Layout.SERVICE_SQLITE)]


@pytest.fixture(params=PAIRS, ids=[f"{one} to {other}" for one, other in PAIRS])
def places(
    request: pytest.FixtureRequest, new_place: Callable[[Layout, str], Place]
) -> tuple[Place, Place]:
    one, other = request.param
    return new_place(one, "SOURCE"), new_place(other, "TARGET")


async def fill(service: BaseSessionService, last: float = 1_750_000_000.5) -> None:
    """A turn of a real Runner, and what is odd and legal: for the last a clock went back."""
    for user, name in (("u0", "s0"), ("u1", "s1")):
        await service.create_session(
            app_name=ACME,
            user_id=user,
            session_id=name,
            state={"title": f"T {name}", "user:plan": "pro", "app:motd": "hello"},
        )
    await turn(service, "u0", "s0", "first")
    await service.create_session(
        app_name=ACME, user_id="u2", session_id="silent", state={"a": None}
    )
    odd = await service.create_session(app_name=ACME, user_id="ü'2", session_id="ödd")
    for number, at in enumerate((1_760_000_000.000001, 1_760_000_000.25, last)):
        await service.append_event(
            odd,
            Event(
                id=f"{2 - number}-id",
                invocation_id="i",
                author="user",
                timestamp=at,
                content=types.Content(
                    role="user",
                    parts=[
                        types.Part(text="héllo 😀\n\t\"'" + "x" * 10_000),
                        types.Part(inline_data=types.Blob(data=b"\xff\x00\xfb", mime_type="x/y")),
                        types.Part(text="t", thought_signature=b"\xfb\xff\xfe"),
                    ],
                ),
                actions=EventActions(
                    state_delta={"n": number, "none": None, "deep": {"b": [1.0, 1e-7], "a": {}}},
                    artifact_delta={"note.txt": number},
                ),
                custom_metadata={"k": None, "big": 2**70, "f": 0.1 + 0.2},
            ),
        )
        found = await service.get_session(app_name=ACME, user_id="ü'2", session_id="ödd")
        assert found is not None
        odd = found


async def turn(service: BaseSessionService, user: str, name: str, text: str) -> list[Event]:
    runner = scripted.build_runner(ACME, service)
    return [
        event
        async for event in runner.run_async(
            user_id=user, session_id=name, new_message=scripted.message(text)
        )
    ]


def move(source: Place, target: Place) -> list[Key]:
    with source.port() as here, target.port() as there:
        keys = [key for key, _ in here.page(START, 100)]
        assert set(ports.copy(here, there, keys).copied) == set(keys)
        ports.write_shared(here, there, here.shared_page(None, 100))
        ours, theirs = ports.digests_of_both(here, there, keys)
        assert {k: d[:2] for k, d in ours.items()} == {k: d[:2] for k, d in theirs.items()}
        there.take(mover=False, agents=True)
    return keys


async def read(service: BaseSessionService, key: Key) -> Session:
    found = await service.get_session(app_name=ACME, user_id=key[0], session_id=key[1])
    assert found is not None
    return found


async def test_sessions_read_back_equal_and_go_on(places: tuple[Place, Place]) -> None:
    source, target = places
    in_memory = Layout.SERVICE in (source.layout, target.layout)
    async with source.adk() as here:
        # Memory alone reads events in the order of writing, whatever their times.
        await fill(here, *([1_770_000_000.5] if in_memory else []))
        target.prepare()
        keys = move(source, target)
        assert len(keys) == 4
        async with target.adk() as there:
            for key in keys:
                ours, theirs = await read(here, key), await read(there, key)
                # On the way, and in the columns of DatabaseSessionService, a microsecond is least.
                exact = source.layout is target.layout or target.layout is Layout.ADK_SQLITE
                exact = exact and not source.layout.is_service
                within = 0.0 if exact else 0.6e-6
                assert theirs.last_update_time == pytest.approx(ours.last_update_time, abs=within)
                without = {"last_update_time"}
                assert theirs.model_dump(exclude=without) == ours.model_dump(exclude=without)
                for service in (here, there):
                    state = await service.get_user_state(app_name=ACME, user_id=key.user_id)
                    assert state == {
                        name.removeprefix("user:"): value
                        for name, value in ours.state.items()
                        if name.startswith("user:")
                    }
            listed = [
                (await service.list_sessions(app_name=ACME)).sessions for service in (here, there)
            ]
            # The guard of a service is one of its sessions.
            theirs, ours = (
                [(s.user_id, s.id, s.state) for s in sessions if s.user_id != OURS]
                for sessions in listed
            )
            assert theirs == ours
            before = await read(there, Key("u0", "s0"))
            events = await turn(there, "u0", "s0", "third")
            after = await read(there, Key("u0", "s0"))
            assert after.events[: len(before.events)] == before.events
            assert [e.id for e in after.events[-len(events) :]] == [e.id for e in events]
            # What the tool counts goes on where the source stopped.
            assert (before.state["count"], after.state["count"]) == (1, 2)
            assert after.state["user:count"] == before.state["user:count"] + 1
            for key in keys:
                # Every one of them can be continued, and new ones be born.
                session = await read(there, key)
                await there.append_event(session, Event(author="user", invocation_id="i"))
            await there.create_session(app_name=ACME, user_id="u2", session_id="born")
            await there.delete_session(app_name=ACME, user_id="u1", session_id="s1")


async def test_provisioned_tables_are_those_that_sqlite_session_service_makes(
    new_place: Callable[[Layout, str], Place],
) -> None:
    import sqlite3

    ours, theirs = (new_place(Layout.ADK_SQLITE, name) for name in ("OURS", "THEIRS"))
    ours.prepare()
    async with theirs.adk() as service:
        await service.list_sessions(app_name=ACME)
    found = []
    for place in (ours, theirs):
        with sqlite3.connect(place.url.removeprefix("sqlite:///")) as connection:
            found.append(
                {
                    table: [
                        connection.execute(f"PRAGMA {what}({table})").fetchall()
                        for what in ("table_info", "foreign_key_list", "index_list")
                    ]
                    for table in ("app_states", "user_states", "sessions", "events")
                }
            )
        connection.close()
    assert found[0] == found[1]
