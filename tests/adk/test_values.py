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
P, S, A = Layout.POSTGRESQL, Layout.SQLITE, Layout.ADK_SQLITE
SP, SS, SA = Layout.SERVICE_POSTGRESQL, Layout.SERVICE_SQLITE, Layout.SERVICE_ADK_SQLITE
MEMORY = Layout.SERVICE
# Whose tables a service's are.
TABLES = {SP: P, SS: S, SA: A}
SECOND = 1_760_000_000.25


@dataclass(frozen=True)
class Row:
    """One session with two events, as raw as a database takes it."""

    state: Any = "{}"
    session: str = "s"
    data: Any = ""  # of the second event, beside what each has
    fields: str = ""  # more fields of the second event, as JSON
    event_data: Any = None  # in place of all that
    nothing: bool = False  # NULL in place of all that
    event_id: str = "b"
    first_id: str = "a"
    invocation: str = "i"
    updated: float | None = None  # None: as the last event
    text: str = ""  # where columns are text, in place of `updated`
    at: tuple[float, ...] = (SECOND, SECOND + 1)

    @property
    def key(self) -> Key:
        return Key("u", self.session)


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
    Odd.FINE_TIME: Row(at=(SECOND - 1, 1_760_000_000.1234567)),
    Odd.LATE_TIME: Row(updated=2.0**36 + 0.5, text="4147-08-20 07:32:16.000001", at=()),
    Odd.SAME_TIME: Row(first_id="b", event_id="a", at=(SECOND, SECOND)),
    Odd.TIME_ORDER: Row(at=(SECOND, SECOND - 9)),
    Odd.TIME_APART: Row(updated=SECOND + 500),
    Odd.PADDED_ID: Row(session=" s "),
    Odd.RESERVED_ID: Row(session="switchyard-scratch-1"),
    Odd.NOT_OBJECT: Row("[1]"),
    Odd.SHARED_KEY: Row('{"user:v": 1}'),
    Odd.TEMP_KEY: Row(fields='"actions": {"state_delta": {"temp:v": 1}}'),
    Odd.PARTIAL: Row(fields='"partial": true', updated=SECOND),
    Odd.NEW_FIELD: Row(fields='"brand_new": 1'),
    Odd.FOREIGN_EVENT: Row(fields='"actions": {"brand_new": 1}'),
    Odd.PYTHON: Row(),  # see `keep`
}
# A store that can hold the value, for each target.
SOURCES: dict[Layout, Layout] = {P: S, S: A, A: S, SP: S, SS: A, SA: S, MEMORY: S}
OTHERWISE: dict[tuple[Odd, Layout], Layout] = {
    (Odd.NO_DATA, S): P,
    (Odd.DEEP_EVENT, S): P,
    (Odd.NO_TIME, P): A,
    (Odd.NO_TIME, A): P,
    (Odd.FINE_TIME, P): A,
    (Odd.FINE_TIME, A): A,
    (Odd.LATE_TIME, P): A,
    **{(Odd.SAME_TIME, layout): A for layout in Layout},
    **{(odd, layout): MEMORY for odd in (Odd.TIME_ORDER, Odd.PYTHON) for layout in Layout},
    (Odd.NO_DATA, SS): P,
    (Odd.DEEP_EVENT, SS): P,
    (Odd.NO_TIME, SP): A,
    (Odd.NO_TIME, SA): P,
    (Odd.NO_TIME, MEMORY): A,
    (Odd.FINE_TIME, SP): A,
    (Odd.FINE_TIME, SA): A,
    (Odd.FINE_TIME, MEMORY): A,
    (Odd.LATE_TIME, SS): S,
}
# What the survey lists and the fingerprint does not see: google-adk keeps nothing of it, or the
# type of a value is all that changes.
UNSEEN = (Odd.FINE_TIME, Odd.TEMP_KEY, Odd.PARTIAL, Odd.PYTHON)
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
    layout = TABLES.get(place.layout, place.layout)
    spelled: Callable[[float], Any] = float if layout is A else text_of
    last = row.updated if row.updated is not None else row.at[-1]
    updated = row.text if row.text and layout is not A else spelled(last)
    statements: list[tuple[str, tuple[Any, ...]]] = [
        ("INSERT INTO app_states VALUES (?, '{}', ?)", (ACME, spelled(SECOND))),
        ("INSERT INTO user_states VALUES (?, 'u', '{}', ?)", (ACME, spelled(SECOND))),
        (
            "INSERT INTO sessions VALUES (?, 'u', ?, ?, ?, ?)",
            (ACME, row.session, row.state, spelled(SECOND), updated),
        ),
    ]
    for second, at in enumerate(row.at):
        name = row.event_id if second else row.first_id
        data = {"id": name, "invocation_id": row.invocation, "timestamp": at, "author": "user"}
        held: Any = json.dumps(data)
        if second and row.data:
            held = held[:-1] + f', "custom_metadata": {{"v": {row.data}}}}}'
        if second and row.fields:
            held = f"{held[:-1]}, {row.fields}}}"
        if second and row.nothing:
            held = None
        columns = "id, app_name, user_id, session_id, invocation_id, timestamp, event_data"
        statements.append(
            (
                f"INSERT INTO events ({columns}) VALUES (?, ?, 'u', ?, ?, ?, ?)",
                (name, ACME, row.session, row.invocation, spelled(at), held),
            )
        )
    if layout is P:
        with psycopg.connect(place.url) as connection:
            for statement, values in statements:
                connection.execute(statement.replace("?", "%s").encode(), values)
        return
    with sqlite3.connect(place.url.removeprefix("sqlite:///")) as file:
        for statement, values in statements:
            file.execute(statement.replace("'u', ?, ?,", "'u', ?, CAST(? AS TEXT),"), values)
    file.close()


async def keep(place: Place, row: Row) -> None:
    """Put the session into memory, which holds whatever object it is given."""
    state = {"v": (b"x", {1: datetime(2026, 1, 1)})} if row is ROWS[Odd.PYTHON] else {}
    async with place.adk() as service:
        made = await service.create_session(
            app_name=ACME, user_id="u", session_id=row.session, state=state
        )
        for name, at in zip((row.first_id, row.event_id), row.at, strict=True):
            event = Event(id=name, invocation_id=row.invocation, author="user", timestamp=at)
            await service.append_event(made, event)


async def read(place: Place, session: str = "s") -> Session:
    async with place.adk() as service:
        found = await service.get_session(app_name=ACME, user_id="u", session_id=session)
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
def new_place(new_place: Callable[[Layout, str], Place]) -> Callable[[Layout, str], Place]:
    """Make a store that move 1 and agents may write."""

    def create(layout: Layout, name: str) -> Place:
        place = new_place(layout, name)
        with place.port() as store:
            store.provision()
            store.adopt(None, mover=True, agents=True)
        return place

    return create


@pytest.mark.parametrize(("odd", "layout"), CASES, ids=[f"{o.name}-{t.name}" for o, t in CASES])
async def test_the_table_says_what_becomes_of(
    odd: Odd, layout: Layout, new_place: Callable[[Layout, str], Place]
) -> None:
    row, outcome = ROWS[odd], TABLE[odd][layout]
    source = new_place(OTHERWISE.get((odd, layout), SOURCES[layout]), "SOURCE")
    target = new_place(layout, "TARGET")
    if source.layout is MEMORY:
        await keep(source, row)
    else:
        write(source, row)
    with source.port() as here, target.port() as there:
        batch = ports.copy(here, there, [row.key])
        found = ports.difference(here, there, row.key)
        strict = ports.strict(here, there)
        listed = [] if strict else ports.scan(here, layout)
    if outcome.fate is Fate.REFUSED:
        assert set(batch.refused) == {row.key}
        assert found is not None
        assert (found.part, found.looks_like) == ("value", Looks.CANNOT_HOLD)
        assert f"{odd}: {outcome.words}" in found.text
        assert [one.blocks for one in listed if one.reason == f"{odd}: {outcome.words}"]
        assert all(one.blocks for one in listed if str(odd) in one.reason)
        await no_wonder(odd, outcome.words, source, target)
        return
    assert set(batch.copied) == {row.key}
    if outcome.words == TABLE[Odd.NOT_OBJECT][P].words:
        assert found is None
        assert await fails(lambda: read(source))
        assert await fails(lambda: read(target))
        return
    ours, theirs = await read(source, row.session), await read(target, row.session)
    if outcome.fate is Fate.KEPT:
        assert found is None
        assert not any(str(odd) in one.reason for one in listed)
        assert shown(theirs) == shown(ours)
        return
    assert any(one.reason == f"{odd}: {outcome.words}" and not one.blocks for one in listed)
    if odd in UNSEEN:
        assert found is None
        if odd is Odd.FINE_TIME:
            # Both sides are compared to the microsecond, and say so.
            assert 0 < abs(theirs.last_update_time - ours.last_update_time) < 1e-6
        assert (shown(theirs) == shown(ours)) == (odd is Odd.FINE_TIME)
    elif "when it next writes" in outcome.words or "google-adk next writes" in outcome.words:
        assert found is None
        assert shown(theirs) == shown(ours)
        assert repr((await go_on(target)).state["v"]) != repr(ours.state["v"])
    else:
        assert found is not None
        assert found.looks_like is Looks.CANNOT_HOLD
        if odd not in (Odd.LATE_TIME, Odd.TIME_APART, Odd.NO_DATA, Odd.NEW_FIELD):
            assert shown(theirs) != shown(ours)


async def no_wonder(odd: Odd, words: str, source: Place, target: Place) -> None:
    """Refused rightly: google-adk could not live with it, there or at the source."""
    if words == NOBODY:
        assert await fails(lambda: read(source))
    elif odd is Odd.PADDED_ID:
        async with target.adk() as service:
            made = await service.create_session(app_name=ACME, user_id="u", session_id=" s ")
        assert made.id == "s"
    elif odd is not Odd.RESERVED_ID and target.layout is not MEMORY:
        assert await fails(lambda: live(target, ROWS[odd]))


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
