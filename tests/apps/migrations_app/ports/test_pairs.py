"""Copying and comparing between every two layouts of stores, in both directions."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from itertools import permutations

import pytest

from durable.machine import Overtaken
from migrations_app import ports
from migrations_app.domain.mismatch import Looks
from migrations_app.domain.values import Layout
from migrations_app.ports import copy, digests_of_both, mixed
from migrations_app.ports.base import START, Batch, Key, SessionStore, SharedRow
from tests.apps.migrations_app.ports import places
from tests.apps.migrations_app.ports.places import ACME, BOLT, Pair, Place

S0, S1 = Key("u0", "s0"), Key("u1", "s1")
LAYOUTS = ("postgresql", "sqlite", "adk-sqlite")
MIXED = list(permutations(LAYOUTS, 2))
TO_POSTGRES = [("sqlite", "postgresql"), ("adk-sqlite", "postgresql")]


@pytest.fixture(params=MIXED, ids=[f"{one} to {other}" for one, other in MIXED])
def pair(request: pytest.FixtureRequest, new_place: Callable[[str, str], Place]) -> Pair:
    """A source with two tenants and a target that move 1 may write, of two layouts."""
    return make_pair(new_place, *request.param)


def make_pair(new_place: Callable[[str, str], Place], one: str, other: str) -> Pair:
    source, target = new_place(one, "SOURCE"), new_place(other, "TARGET")
    places.fill(source, ACME)
    places.fill(source, BOLT, sessions=2)
    places.fill(target, BOLT, sessions=1)
    with target.open() as store:
        store.provision()
        store.adopt(None, mover=True, agents=False)
    return Pair(source, target)


to_postgres = pytest.mark.parametrize(
    "pair", TO_POSTGRES, indirect=True, ids=[one for one, _ in TO_POSTGRES]
)


def copy_all(pair: Pair) -> Batch:
    with pair.source.open() as here, pair.target.open() as there:
        batch = copy(here, there, [key for key, _ in here.page(START, 1000)])
        ports.write_shared(here, there, here.shared_page(None, 1000))
    return batch


def assert_equal(here: SessionStore, there: SessionStore) -> None:
    """Every session and every state is on both sides, and is the same."""
    keys = [key for key, _ in here.page(START, 1000)]
    assert {key for key, _ in there.page(START, 1000)} == set(keys)
    ours, theirs = digests_of_both(here, there, keys)
    assert set(ours) == set(keys)
    for key in keys:
        assert ours[key][:2] == theirs[key][:2], ports.difference(here, there, key)
        assert ports.difference(here, there, key) is None
    shared = here.shared_page(None, 1000)
    others = there.shared([row.user_id for row in shared])
    assert all(ports.same_shared(here, there, row, others.get(row.user_id)) for row in shared)
    assert here.counts() == there.counts()


def odd(place: Place, *, text: str = "{}", state: str | None = None) -> Key:
    """Write one session whose event's data, or whose state, is this JSON text."""
    with place.connect() as agent:
        places.put_session(agent, ACME, "u0", "odd", {} if state is None else state)
        data = {"id": "e-odd", "invocation_id": "inv-0", "timestamp": 1.5, "author": "user"}
        held = json.dumps(data)[:-1] + ', "custom_metadata": ' + text + "}"
        places.put_event(agent, ACME, "u0", "odd", "e-odd", data=held)
    return Key("u0", "odd")


# --- copying ---------------------------------------------------------------------------------


def test_a_copy_is_equal_and_stamped_on_both_sides(pair: Pair) -> None:
    batch = copy_all(pair)
    assert (len(batch.copied), batch.refused) == (5, {})
    with pair.source.open() as here, pair.target.open() as there:
        ports.check_pair(here.survey(), there.survey())
        assert_equal(here, there)
        ours, theirs = digests_of_both(here, there, list(batch.copied))
        for key, stamps in batch.copied.items():
            assert (ours[key].stamp, theirs[key].stamp) == stamps
            assert (here.stamps([key])[key], there.stamps([key])[key]) == stamps


def test_what_is_legal_and_easy_to_spoil_arrives(pair: Pair) -> None:
    user, session = "ü 'quoted'", "%s {id}\\\t"
    with pair.source.connect() as agent:
        places.put_user_state(agent, ACME, user, {"Ä": [None, True, 1e-7, 2**70]})
        places.put_session(agent, ACME, user, session, '{"n": 1.10, "a": null, "b": {"": []}}')
        text = '{"z": 0.1, "a": [1, 1.0, 12345678901234567890], "t": "\\ud83d\\ude00\\n€\\\\"}'
        places.put_event(agent, ACME, user, session, "tab\there", data=text)
        places.put_event(agent, ACME, user, session, "s0-e0", second=1)
        places.put_session(agent, ACME, " padded ", " ", {})
        places.put_session(agent, ACME, "u0", "big", {"text": "x" * 1_000_000})
        places.put_event(agent, ACME, "u0", "big", "big", data={"text": "y€" * 500_000})
    assert copy_all(pair).refused == {}
    with pair.source.open() as here, pair.target.open() as there:
        assert_equal(here, there)
        found = ports.sessions_of_both(here, there, Key(user, session))
    assert found[0] == found[1]
    assert found[1] is not None
    assert found[1]["state"] == {"n": 1.1, "a": None, "b": {"": []}}
    assert found[1]["events"][0]["event_data"]["t"] == "\U0001f600\n€\\"
    assert found[1]["update_time"] == "2026-01-01 10:00:01.123456"


def test_a_whole_float_stays_a_float(pair: Pair) -> None:
    if pair.source.dialect == "postgresql":
        pytest.skip("PostgreSQL has made an integer of it when it was written")
    numbers = "[1e22, 1.7976931348623157e308, -2.5E+3, 1E0, 0e5]"
    key = odd(pair.source, text=f'{{"a": {numbers}, "b": "x: 1e22"}}', state=f'{{"s": {numbers}}}')
    with pair.source.open() as here, pair.target.open() as there:
        assert copy(here, there, [key]).refused == {}
        ours, theirs = ports.sessions_of_both(here, there, key)
        assert_same_digest(here, there, key)
    assert ours == theirs
    assert theirs is not None
    assert all(isinstance(value, float) for value in theirs["state"]["s"])
    assert theirs["state"]["s"] == json.loads(numbers)


def assert_same_digest(here: SessionStore, there: SessionStore, key: Key) -> None:
    ours, theirs = digests_of_both(here, there, [key])
    assert ours[key][:2] == theirs[key][:2]


@pytest.mark.parametrize("one", ["postgresql", "sqlite"])
def test_data_says_itself_what_sqlite_session_service_reads_from_there(
    new_place: Callable[[str, str], Place], one: str
) -> None:
    """Without an id in its data the event would be given a new one at each reading."""
    pair = make_pair(new_place, one, "adk-sqlite")
    data = '{"id": "stale", "author": "user", "content": null}'
    pair.source.run("UPDATE events SET event_data = ? WHERE id = 's0-e1'", data)
    copy_all(pair)
    [(text,)] = pair.target.run(
        "SELECT event_data FROM events WHERE app_name = ? AND id = 's0-e1'", ACME
    )
    assert json.loads(text) == {
        "id": "s0-e1",
        "invocation_id": "inv-1",
        "timestamp": places.seconds("2026-01-01 10:00:01.123456"),
        "author": "user",
        "content": None,
    }
    with pair.source.open() as here, pair.target.open() as there:
        assert_equal(here, there)


def test_copying_leaves_other_tenants_alone(pair: Pair) -> None:
    before = pair.target.rows(BOLT)
    assert any(before.values())
    copy_all(pair)
    assert pair.target.rows(BOLT) == before


def test_copying_again_changes_nothing(pair: Pair) -> None:
    copy_all(pair)
    before = pair.target.rows()
    copy_all(pair)
    assert pair.target.rows() == before


def test_a_copy_replaces_what_the_target_held(pair: Pair) -> None:
    copy_all(pair)
    pair.target.run("UPDATE switchyard_guard SET agents = ?", True)
    with pair.target.connect() as agent:
        places.put_event(agent, ACME, *S0, "only here", second=50)
    pair.source.run("DELETE FROM events WHERE app_name = ? AND id = 's0-e1'", ACME)
    copy_all(pair)
    with pair.source.open() as here, pair.target.open() as there:
        assert_equal(here, there)
        assert there.survey().events == 14


def test_a_session_that_vanished_is_deleted_and_absent(pair: Pair) -> None:
    copy_all(pair)
    pair.source.run("DELETE FROM events WHERE app_name = ? AND session_id = 's0'", ACME)
    pair.source.run("DELETE FROM sessions WHERE app_name = ? AND id = 's0'", ACME)
    with pair.source.open() as here, pair.target.open() as there:
        batch = copy(here, there, [S0, S1, S1])
        assert (set(batch.copied), batch.refused) == ({S1}, {})
        assert set(there.stamps([S0, S1])) == {S1}


def test_a_session_without_events_arrives(pair: Pair) -> None:
    with pair.source.connect() as agent:
        places.put_session(agent, ACME, "u0", "silent", {"a": 1})
    copy_all(pair)
    with pair.source.open() as here, pair.target.open() as there:
        assert_equal(here, there)


def test_events_of_no_session_are_left_behind(pair: Pair) -> None:
    if pair.source.dialect == "postgresql":
        pytest.skip("its foreign key lets none be")
    with pair.source.connect() as agent:
        agent.execute("PRAGMA foreign_keys = OFF")
        places.put_event(agent, ACME, "u0", "lost", "e")
    with pair.source.open() as here, pair.target.open() as there:
        batch = copy(here, there, [S0, Key("u0", "lost")])
        assert (set(batch.copied), batch.refused) == ({S0}, {})
        assert_same_digest(here, there, S0)


def test_a_later_claim_stops_a_copy_and_nothing_is_written(pair: Pair) -> None:
    copy_all(pair)
    pair.source.run("DELETE FROM events WHERE app_name = ? AND id = 's0-e1'", ACME)
    with pair.source.open() as here, pair.target.open() as there:
        pair.target.run("UPDATE switchyard_guard SET claim = 2")
        before = pair.target.everything()
        with pytest.raises(Overtaken):
            copy(here, there, [S0])
        with pytest.raises(Overtaken):
            ports.write_shared(here, there, here.shared_page(None, 10))
        assert pair.target.everything() == before


def test_a_copy_fails_whole(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker dies between a session's events: the target keeps what it held."""
    copy_all(pair)
    pair.source.run("DELETE FROM events WHERE app_name = ? AND id = 's0-e1'", ACME)
    before = pair.target.everything()
    with pair.source.open() as here, pair.target.open() as there:
        real = here.read_events  # type: ignore[attr-defined]

        def dies(keys: list[Key]) -> object:
            yield next(real(keys))
            raise KeyboardInterrupt

        monkeypatch.setattr(here, "read_events", dies)
        with pytest.raises(KeyboardInterrupt):
            copy(here, there, [S0])
    assert pair.target.everything() == before


@pytest.mark.parametrize(
    "pair",
    [("postgresql", "adk-sqlite"), ("sqlite", "postgresql")],
    indirect=True,
    ids=["postgresql", "sqlite"],
)
def test_memory_does_not_grow_with_a_session(pair: Pair) -> None:
    with pair.source.connect() as agent:
        agent.execute("BEGIN")
        places.put_session(agent, ACME, "u0", "huge", {})
        for number in range(200):
            data = {"text": "x" * 100_000}
            places.put_event(agent, ACME, "u0", "huge", f"e{number:04}", data=data)
        agent.execute("COMMIT")
    key = Key("u0", "huge")
    with pair.source.open() as here, pair.target.open() as there:
        tracemalloc.start()
        try:
            assert set(copy(here, there, [key]).copied) == {key}
            assert_same_digest(here, there, key)
            grown = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert there.survey().events == 200
    assert grown < 12_000_000


# --- times and order -------------------------------------------------------------------------


TIMES = ("1970-01-01 00:00:00.000001", "1969-12-31 23:59:59.999999", "2241-12-31 00:00:00.1")


def test_times_arrive_to_the_microsecond(pair: Pair) -> None:
    for text in TIMES:
        at = pair.source.time(text)
        pair.source.run("UPDATE sessions SET create_time = ?, update_time = ?", at, at)
        pair.source.run("UPDATE events SET timestamp = ?", at)
        with pair.source.open() as here, pair.target.open() as there:
            copy(here, there, [S0])
            assert_same_digest(here, there, S0)
            found = ports.sessions_of_both(here, there, S0)[1]
        assert found is not None
        assert found["update_time"] == found["create_time"] == text.ljust(26, "0")
        assert found["events"][0]["timestamp"] == text.ljust(26, "0")


def test_events_of_one_time_that_are_read_in_another_order_are_named(
    new_place: Callable[[str, str], Place],
) -> None:
    pair = make_pair(new_place, "adk-sqlite", "sqlite")
    with pair.source.connect() as agent:
        places.put_session(agent, ACME, "u0", "same", {})
        for name in ("b", "a"):
            places.put_event(agent, ACME, "u0", "same", name)
    key = Key("u0", "same")
    with pair.source.open() as here, pair.target.open() as there:
        copy(here, there, [key])
        ours, theirs = digests_of_both(here, there, [key])
        assert ours[key].events != theirs[key].events
        found = ports.difference(here, there, key)
    assert found is not None
    assert found.looks_like is Looks.CANNOT_HOLD
    assert "in the order of their ids" in found.text


@pytest.mark.parametrize("one", LAYOUTS)
def test_events_of_one_time_keep_their_order_where_writing_gives_it(
    new_place: Callable[[str, str], Place], one: str
) -> None:
    pair = make_pair(new_place, one, "adk-sqlite")
    with pair.source.connect() as agent:
        places.put_session(agent, ACME, "u0", "same", {})
        for name in ("b", "c", "a"):
            places.put_event(agent, ACME, "u0", "same", name)
    key = Key("u0", "same")
    with pair.source.open() as here, pair.target.open() as there:
        copy(here, there, [key])
        assert_same_digest(here, there, key)
        found = ports.sessions_of_both(here, there, key)[1]
    assert found is not None
    order = "bca" if one == "adk-sqlite" else "abc"
    assert [event["id"] for event in found["events"]] == list(order)


# --- what a target can't hold ----------------------------------------------------------------


def refused(pair: Pair, key: Key) -> str:
    """Copy S0 and one odd session beside it; return why the odd one was left out, whole."""
    with pair.source.open() as here, pair.target.open() as there:
        batch = copy(here, there, [key, S0])
        assert set(batch.copied) == {S0}
        assert set(batch.refused) == {key}
        assert set(there.stamps([key, S0])) == {S0}
        [(events,)] = pair.target.run(
            "SELECT count(*) FROM events WHERE app_name = ? AND session_id = ?",
            ACME,
            key.session_id,
        )
        assert events == 0
        found = ports.difference(here, there, key)
    assert found is not None
    assert (found.part, found.looks_like) == ("value", Looks.CANNOT_HOLD)
    assert found.text == batch.refused[key].difference.text
    return found.text


REFUSED = [
    ('{"a": ["SECRET\\u0000"]}', "custom_metadata.a[0]: a NUL character"),
    ('{"\\u0000": 1}', "custom_metadata (a key): a NUL character"),
    ('"\\udcc3"', "custom_metadata: half a surrogate pair"),
    ('{"deep": {"er": NaN}}', "custom_metadata.deep.er: NaN or Infinity"),
    ("-Infinity", "custom_metadata: NaN or Infinity"),
    ("1e400", "custom_metadata: NaN or Infinity"),
    ("9" * 5000, "events.event_data: a text that is not JSON"),
    ("[" * 3000 + "]" * 3000, "events.event_data: a text that is not JSON"),
    ("{", "events.event_data: a text that is not JSON"),
]


@to_postgres
def test_a_session_that_postgresql_cannot_hold_is_left_out_and_named(pair: Pair) -> None:
    for text, words in REFUSED:
        pair.source.run("DELETE FROM events WHERE session_id = 'odd'")
        pair.source.run("DELETE FROM sessions WHERE id = 'odd'")
        found = refused(pair, odd(pair.source, text=text))
        assert words in found
        assert "SECRET" not in found


@to_postgres
def test_a_refused_session_loses_its_older_copy(pair: Pair) -> None:
    key = odd(pair.source)
    copy_all(pair)
    with pair.source.connect() as agent:
        places.put_event(agent, ACME, *key, "bad", second=9, data='{"a": "\\u0000"}')
    assert "of bad" in refused(pair, key)


@to_postgres
def test_a_value_that_no_table_names_is_found_one_by_one(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = odd(pair.source)
    copy_all(pair)
    pair.source.run("UPDATE sessions SET state = ? WHERE id = 'odd'", '{"a": "\\u0000"}')
    monkeypatch.setattr(mixed.values, "refusal", lambda target, found: None)
    with pair.source.open() as here, pair.target.open() as there:
        batch = copy(here, there, [S0, key, S1])
        assert (set(batch.copied), set(batch.refused)) == ({S0, S1}, {key})
        assert "refused a value" in batch.refused[key].reason
        # Its older copy went too.
        assert set(there.stamps([S0, key, S1])) == {S0, S1}


@to_postgres
def test_ids_that_postgresql_cannot_hold_are_named(pair: Pair) -> None:
    key = odd(pair.source)
    pair.source.run("UPDATE events SET id = ? WHERE id = 'e-odd'", "x" * 129)
    assert "events.id: an event's id over 128" in refused(pair, key)
    pair.source.run("UPDATE events SET id = 'e-odd' WHERE session_id = 'odd'")
    pair.source.run("UPDATE events SET invocation_id = ? WHERE id = 'e-odd'", "x\0")
    assert "events.invocation_id: a NUL" in refused(pair, key)


def test_text_that_is_not_utf8_is_named(new_place: Callable[[str, str], Place]) -> None:
    pair = make_pair(new_place, "sqlite", "adk-sqlite")
    key = odd(pair.source)
    pair.source.run("UPDATE sessions SET state = CAST(x'7b22ff7d' AS TEXT) WHERE id = 'odd'")
    assert "sessions.state: an id or a text that is not UTF-8" in refused(pair, key)


@pytest.mark.parametrize("value", ["infinity", "0044-03-15 12:00:00 BC", "20000-01-01 00:00:00"])
def test_a_time_that_google_adk_cannot_read_is_named(
    new_place: Callable[[str, str], Place], value: str
) -> None:
    pair = make_pair(new_place, "postgresql", "sqlite")
    pair.source.run("UPDATE sessions SET update_time = ? WHERE id = 's1'", value)
    assert "sessions.update_time: a time before" in refused(pair, S1)


def test_a_time_in_milliseconds_is_named(new_place: Callable[[str, str], Place]) -> None:
    pair = make_pair(new_place, "adk-sqlite", "postgresql")
    pair.source.run("UPDATE events SET timestamp = 1760000000123.0 WHERE id = 's1-e1'")
    assert "events.timestamp: a time before" in refused(pair, S1)


@pytest.mark.parametrize("data", [None, "null", "[]"])
def test_an_event_without_data_goes_only_where_it_is_read(
    new_place: Callable[[str, str], Place], data: str | None
) -> None:
    pair = make_pair(new_place, "sqlite", "adk-sqlite")
    key = odd(pair.source)
    pair.source.run("UPDATE events SET event_data = ? WHERE id = 'e-odd'", data)
    assert "an event without data" in refused(pair, key)


@to_postgres
def test_minus_zero_is_a_difference_that_says_so(pair: Pair) -> None:
    key = odd(pair.source, text='{"a": [1, -0.0]}')
    with pair.source.open() as here, pair.target.open() as there:
        assert set(copy(here, there, [key]).copied) == {key}
        ours, theirs = digests_of_both(here, there, [key])
        assert ours[key].events != theirs[key].events
        found = ports.difference(here, there, key)
    assert found is not None
    assert found.looks_like is Looks.CANNOT_HOLD
    assert found.text == "event 1: event_data.custom_metadata.a[1]: -0.0 becomes 0.0"


# --- shared state ----------------------------------------------------------------------------


def test_shared_state_is_written_and_compared_by_value(pair: Pair) -> None:
    with pair.source.connect() as agent:
        places.put_session(agent, ACME, "u7", "s", {})
    pair.source.run(
        "UPDATE user_states SET state = ? WHERE app_name = ? AND user_id = 'u1'",
        '{"b": 1.10, "a": {"y": 1, "x": null}}',
        ACME,
    )
    copy_all(pair)
    with pair.source.open() as here, pair.target.open() as there:
        assert_equal(here, there)
        # append_event needs the row, even if it is empty.
        assert pair.target.run(
            "SELECT count(*) FROM user_states WHERE app_name = ? AND user_id = 'u7'", ACME
        ) == [(1,)]
        pair.source.run(
            "UPDATE user_states SET state = ? WHERE app_name = ? AND user_id = 'u1'",
            '{"b": 1.2, "a": {"y": 1, "x": null}}',
            ACME,
        )
        mine, other = (store.shared(["u1"])["u1"] for store in (here, there))
        assert not ports.same_shared(here, there, mine, other)
        found = ports.name_shared(here, there, mine, other)
    assert found is not None
    assert (found.part, found.text) == ("user", "user:b differs")


@to_postgres
def test_shared_state_that_the_target_cannot_hold_is_left_out_and_named(pair: Pair) -> None:
    bad = '{"SECRET": "\\u0000"}'
    pair.source.run("UPDATE user_states SET state = ? WHERE user_id = 'u1'", bad)
    pair.source.run("UPDATE app_states SET state = '{\"a\": NaN}' WHERE app_name = ?", ACME)
    copy_all(pair)
    with pair.source.open() as here, pair.target.open() as there:
        ours = here.shared([None, "u0", "u1"])
        theirs = there.shared([None, "u0", "u1"])
        assert ports.same_shared(here, there, ours["u0"], theirs["u0"])
        for user, words in ((None, "app_states.state a: NaN"), ("u1", "user_states.state")):
            assert not ports.same_shared(here, there, ours[user], theirs.get(user))
            found = ports.name_shared(here, there, ours[user], theirs.get(user))
            assert found is not None
            assert (found.part, found.looks_like) == ("value", Looks.CANNOT_HOLD)
            assert words in found.text


def test_no_row_differs_from_every_row(pair: Pair) -> None:
    with pair.source.open() as here, pair.target.open() as there:
        row = SharedRow("u0", "{}", "")
        assert not ports.same_shared(here, there, row, None)
        assert ports.same_shared(here, there, None, None)
        assert ports.name_shared(here, there, None, None) is None


# --- comparing -------------------------------------------------------------------------------

EDITS = {
    "state": "UPDATE sessions SET state = '{\"topic\": \"y0\"}' WHERE id = 's0'",
    "data": "UPDATE events SET event_data = '{\"a\": 1}' WHERE id = 's0-e1'",
    "invocation": "UPDATE events SET invocation_id = 'other' WHERE id = 's0-e1'",
    "id": "UPDATE events SET id = 'other' WHERE id = 's0-e1'",
    "lost": "DELETE FROM events WHERE id = 's0-e2'",
}


def test_a_canonical_digest_sees_every_edit(pair: Pair) -> None:
    for edit, statement in EDITS.items():
        copy_all(pair)
        pair.source.run(statement)
        with pair.source.open() as here, pair.target.open() as there:
            ours, theirs = digests_of_both(here, there, [S0, S1])
            assert ours[S0][:2] != theirs[S0][:2], edit
            assert ours[S1][:2] == theirs[S1][:2], edit
            found = ports.difference(here, there, S0)
        assert found is not None, edit
        assert found.part == ("state" if edit == "state" else "events")


def test_layouts_are_told_apart(pair: Pair) -> None:
    with pair.source.open() as here, pair.target.open() as there:
        assert {here.layout, there.layout} <= set(Layout)
        assert not ports.strict(here, there)
        assert here.survey().layout is here.layout
