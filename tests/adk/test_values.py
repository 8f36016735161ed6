"""The table of values, held against real stores: what it says becomes of each value is so."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.adk.sessions import Session

from migrations_app import ports
from migrations_app.domain.mismatch import Looks
from migrations_app.domain.values import TABLE, Fate, Layout, Odd
from migrations_app.ports.base import Key
from tests.adk.layouts import ACME, Place

ROOT = Path(__file__).parents[2]
KEY = Key("u", "s")
P, S, A = Layout.POSTGRESQL, Layout.SQLITE, Layout.ADK_SQLITE
SECOND = 1_760_000_000.25


@dataclass(frozen=True)
class Row:
    """One session with two events, as raw as a database takes it."""

    state: Any = "{}"
    data: Any = ""  # of the second event, beside what each has
    event_data: Any = None  # in place of all that
    nothing: bool = False  # NULL in place of all that
    event_id: str = "b"
    first_id: str = "a"
    invocation: str = "i"
    updated: float = SECOND
    text: str = ""  # where columns are text, in place of `updated`
    at: tuple[float, float] = (SECOND, SECOND + 1)


def event(text: str) -> Row:
    return Row(data=text)


ROWS: dict[Odd, Row] = {
    Odd.NUL_IN_STATE: Row('{"v": "x\\u0000y"}'),
    Odd.NUL_IN_EVENT: event('"x\\u0000y"'),
    Odd.NUL_IN_ID: Row(invocation="i\0i"),
    Odd.SURROGATE: Row('{"v": "\\udcc3"}'),
    Odd.NOT_FINITE_IN_STATE: Row('{"v": NaN}'),
    Odd.NOT_FINITE_IN_EVENT: event("Infinity"),
    Odd.MINUS_ZERO_IN_STATE: Row('{"v": -0.0}'),
    Odd.MINUS_ZERO_IN_EVENT: event("-0.0"),
    Odd.WHOLE_FLOAT: Row('{"v": 1e22}', data="1e+300"),
    Odd.BIG_INTEGER: Row(f'{{"v": {2**70}}}', data=str(2**200)),
    Odd.UNREADABLE: Row("{"),
    Odd.DEEP_EVENT: event("[" * 250 + "]" * 250),
    Odd.NO_DATA: Row(nothing=True),
    Odd.LONG_EVENT_ID: Row(event_id="b" * 129),
    Odd.NOT_TEXT: Row(b'{"v": "\xff"}'),
    Odd.NO_TIME: Row(updated=1_760_000_000_123.0, at=(SECOND, 1_760_000_000_123.0)),
    Odd.FINE_TIME: Row(updated=1_760_000_000.1234567, at=(SECOND, 1_760_000_000.1234567)),
    Odd.LATE_TIME: Row(updated=2.0**36 + 0.5, text="4147-08-20 07:32:16.000001"),
    Odd.SAME_TIME: Row(first_id="b", event_id="a", at=(SECOND, SECOND)),
}
# A store that can hold the value, for each target.
SOURCES: dict[Layout, Layout] = {P: S, S: A, A: S}
OTHERWISE: dict[tuple[Odd, Layout], Layout] = {
    (Odd.NO_DATA, S): P,
    (Odd.DEEP_EVENT, S): P,
    (Odd.NO_TIME, P): A,
    (Odd.NO_TIME, A): P,
    (Odd.FINE_TIME, P): A,
    (Odd.FINE_TIME, A): A,
    (Odd.LATE_TIME, P): A,
    (Odd.SAME_TIME, P): A,
    (Odd.SAME_TIME, A): A,
}
CASES = [(odd, layout) for odd in Odd for layout in Layout]


def text_of(seconds: float) -> str:
    if seconds > 1e12:
        return "infinity"
    whole = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=int(seconds))
    micros = round((seconds - int(seconds)) * 1e6)
    at = whole + timedelta(microseconds=micros)
    return at.strftime("%Y-%m-%d %H:%M:%S.%f")


def write(place: Place, row: Row) -> None:
    """Write the session by plain SQL, into the tables that the port has made."""
    spelled: Callable[[float], Any] = float if place.layout is A else text_of
    updated = row.text if row.text and place.layout is not A else spelled(row.updated)
    statements: list[tuple[str, tuple[Any, ...]]] = [
        ("INSERT INTO app_states VALUES (?, '{}', ?)", (ACME, spelled(SECOND))),
        ("INSERT INTO user_states VALUES (?, 'u', '{}', ?)", (ACME, spelled(SECOND))),
        (
            "INSERT INTO sessions VALUES (?, 'u', 's', ?, ?, ?)",
            (ACME, row.state, spelled(SECOND), updated),
        ),
    ]
    for name, at, second in (
        (row.first_id, row.at[0], False),
        (row.event_id, row.at[1], True),
    ):
        data = {"id": name, "invocation_id": row.invocation, "timestamp": at, "author": "user"}
        held: Any = json.dumps(data)
        if second and row.data:
            held = held[:-1] + f', "custom_metadata": {{"v": {row.data}}}}}'
        if second and row.nothing:
            held = None
        columns = "id, app_name, user_id, session_id, invocation_id, timestamp, event_data"
        statements.append(
            (
                f"INSERT INTO events ({columns}) VALUES (?, ?, 'u', 's', ?, ?, ?)",
                (name, ACME, row.invocation, spelled(at), held),
            )
        )
    if place.layout is P:
        with psycopg.connect(place.url) as connection:
            for statement, values in statements:
                connection.execute(statement.replace("?", "%s").encode(), values)
        return
    with sqlite3.connect(place.url.removeprefix("sqlite:///")) as file:
        for statement, values in statements:
            file.execute(statement.replace("'s', ?,", "'s', CAST(? AS TEXT),"), values)
    file.close()


async def read(place: Place) -> Session:
    async with place.adk() as service:
        found = await service.get_session(app_name=ACME, user_id="u", session_id="s")
    assert found is not None
    return found


async def go_on(place: Place) -> Session:
    """Let google-adk write another key of the state, and read the session again."""
    session = await read(place)
    async with place.adk() as service:
        actions = EventActions(state_delta={"other": 1})
        last = session.last_update_time + 10
        await service.append_event(
            session, Event(author="user", invocation_id="j", timestamp=last, actions=actions)
        )
    return await read(place)


def shown(session: Session) -> str:
    """Spell what google-adk reads; NaN equals itself here, and -0.0 is not 0.0."""
    return repr(session.model_dump(exclude={"last_update_time"}))


async def live(place: Place, row: Row) -> Session:
    """Put the row into a store as it is, and let google-adk go on with it."""
    write(place, row)
    return await go_on(place)


async def fails(work: Callable[[], Awaitable[Session]]) -> bool:
    """Whether it fails, whatever the database or the library calls that."""
    try:
        await work()
    except Exception:
        return True
    return False


NOBODY = TABLE[Odd.UNREADABLE][P].words


@pytest.fixture
def new_place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Layout, str], Place]:
    def create(layout: Layout, name: str) -> Place:
        url = f"sqlite:///{tmp_path / name}.db"
        if layout is P:
            url = request.getfixturevalue("new_database")()
        monkeypatch.setenv(f"STORE_{name}", url)
        place = Place(layout, url, f"env:STORE_{name}")
        with place.port() as store:
            store.provision()
            store.adopt(None, mover=True, agents=True)
        return place

    return create


@pytest.mark.parametrize(("odd", "layout"), CASES, ids=[f"{o.name}-{t.name}" for o, t in CASES])
async def test_the_table_says_what_becomes_of(
    odd: Odd, layout: Layout, new_place: Callable[[Layout, str], Place]
) -> None:
    outcome = TABLE[odd][layout]
    source = new_place(OTHERWISE.get((odd, layout), SOURCES[layout]), "SOURCE")
    target = new_place(layout, "TARGET")
    write(source, ROWS[odd])
    with source.port() as here, target.port() as there:
        batch = ports.copy(here, there, [KEY])
        found = ports.difference(here, there, KEY)
        listed = [] if source.layout is layout else ports.scan(here, layout)
    if outcome.fate is Fate.REFUSED:
        assert set(batch.refused) == {KEY}
        assert found is not None
        assert (found.part, found.looks_like) == ("value", Looks.CANNOT_HOLD)
        assert f"{odd}: {outcome.words}" in found.text
        assert [one.blocks for one in listed if one.reason == f"{odd}: {outcome.words}"]
        assert all(one.blocks for one in listed if str(odd) in one.reason)
        # And rightly so: google-adk could not live with it, there or at the source.
        if outcome.words == NOBODY:
            assert await fails(lambda: read(source))
        else:
            assert await fails(lambda: live(target, ROWS[odd]))
        return
    assert set(batch.copied) == {KEY}
    ours, theirs = await read(source), await read(target)
    if outcome.fate is Fate.KEPT:
        assert found is None
        assert not any(str(odd) in one.reason for one in listed)
        assert shown(theirs) == shown(ours)
        return
    assert any(one.reason == f"{odd}: {outcome.words}" and not one.blocks for one in listed)
    if odd is Odd.FINE_TIME:
        # Both sides are compared to the microsecond, and say so.
        assert found is None
        assert 0 < abs(theirs.last_update_time - ours.last_update_time) < 1e-6
        assert shown(theirs) == shown(ours)
    elif "when it next writes" in outcome.words or "google-adk next writes" in outcome.words:
        assert found is None
        assert shown(theirs) == shown(ours)
        assert repr((await go_on(target)).state["v"]) != repr(ours.state["v"])
    else:
        assert found is not None
        assert found.looks_like is Looks.CANNOT_HOLD
        if odd is not Odd.LATE_TIME:
            assert shown(theirs) != shown(ours)


def test_every_value_has_a_line_for_every_layout() -> None:
    assert set(TABLE) == set(Odd) == set(ROWS)
    assert all(set(line) == set(Layout) for line in TABLE.values())


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs" / "values.md").read_text()
    for odd, line in TABLE.items():
        cells = [
            f"{line[layout].fate}: {line[layout].words}".removesuffix(": ") for layout in Layout
        ]
        assert f"| {odd} | {' | '.join(cells)} |" in page
