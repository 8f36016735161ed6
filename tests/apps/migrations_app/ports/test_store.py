"""What every store does, on both databases."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from durable.machine import Overtaken
from migrations_app.ports import check_pair, copy, digests_of_both
from migrations_app.ports.base import (
    START,
    Batch,
    Copied,
    Counts,
    Guard,
    GuardTaken,
    Key,
    Mark,
    SessionStore,
    SharedRow,
    Unreachable,
)
from migrations_app.ports.postgres import MANY
from tests.apps.migrations_app.ports import places
from tests.apps.migrations_app.ports.places import ACME, BOLT, Place, of_adk_sql, of_every_kind

S0, S1, S2 = Key("u0", "s0"), Key("u1", "s1"), Key("u0", "s2")


def keys_of(store: SessionStore) -> list[Key]:
    return [key for key, _ in store.page(START, 1000)]


def copy_all(source: Place, target: Place) -> dict[Key, Copied]:
    with source.open() as here, target.open() as there:
        copied = copy(here, there, keys_of(here)).copied
        there.write_shared(here.shared_page(None, 1000))
    return copied


def test_the_ports_need_neither_google_adk_nor_sqlalchemy() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, migrations_app.ports;"
            "print([n for n in sys.modules if n.split('.')[0] in ('google', 'sqlalchemy')])",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


# --- looking ---------------------------------------------------------------------------------


def test_looking_changes_nothing(source: Place, empty: Place) -> None:
    before, other = source.everything(), empty.everything()
    with source.open(move=0, claim=0) as store:
        store.survey()
        store.guard()
        store.counts()
        store.page(START, 10)
        store.digests([S0])
        store.session(S0)
        store.shared_page(None, 10)
        store.mark()
        store.has_nonce("n")
        store.older_writers()
    with empty.open(move=0, claim=0) as store:
        store.survey()
        store.mark()
        store.page(START, 10)
    assert source.everything() == before
    assert empty.everything() == other


def test_a_survey_counts_what_the_tenant_has(source: Place) -> None:
    with source.open() as store:
        found = store.survey()
    assert (found.sessions, found.users, found.events) == (5, 2, 15)
    assert (found.kind, found.schema_version, found.findings) == (source.kind, "1", ())
    assert found.can_close
    assert found.has_app_state
    assert found.stamps_see_edits == (source.dialect == "postgresql")
    assert abs(found.clock_skew_seconds) < 1


def test_a_database_without_tables_is_an_empty_store(empty: Place) -> None:
    with empty.open() as store:
        found = store.survey()
        assert (found.schema_version, found.sessions, found.findings) == ("", 0, ())
        assert found.can_close
        assert store.counts() == Counts(0, 0)
        assert store.page(START, 5) == []
        assert store.stamps([S0]) == {}
        assert store.digests([S0]) == {}
        assert store.session(S0) is None
        assert store.shared_page(None, 5) == []
        assert store.guard() is None


@of_every_kind
def test_pages_walk_every_session_once(source: Place) -> None:
    with source.connect() as agent:
        for name in ("", " ", "Ä", "a'b", "a%sb", "{0}", "z" * 128, "日本"):
            if name:
                places.put_session(agent, ACME, name, name, {})
    with source.open() as store:
        seen: list[Key] = []
        after = START
        while page := store.page(after, 2):
            seen += [key for key, _ in page]
            after = page[-1][0]
        assert len(seen) == len(set(seen)) == 12
        assert store.stamps(seen) == dict(store.page(START, 1000))


def test_a_session_is_shown_as_plain_data(source: Place) -> None:
    with source.open() as store:
        found = store.session(S0)
        assert store.session(Key("u0", "nobody")) is None
    assert found is not None
    assert found["state"] == {"topic": "x0", "price": 1.5}
    assert found["update_time"] == source.time("2026-01-01 10:00:02.123456")
    assert [event["id"] for event in found["events"]] == ["s0-e0", "s0-e1", "s0-e2"]
    assert found["events"][0]["event_data"]["author"] == "user"


@of_every_kind
def test_counts_leave_other_tenants_out(source: Place) -> None:
    with source.open(app_name=BOLT) as store:
        assert store.counts() == Counts(2, 2)
    with source.open(app_name="support.nobody") as store:
        assert store.counts() == Counts(0, 0)


# --- stamps, digests, mark -------------------------------------------------------------------


def _change(place: Place, what: str) -> None:
    """Change session u0/s0 the way an agent, or a person with a database client, would."""
    with place.connect() as agent:
        if what == "append":
            places.put_event(agent, ACME, *S0, "new", second=30)
        elif what == "append at an equal time":
            places.put_event(agent, ACME, *S0, "new", second=2)
        elif what == "append with a clock that went back":
            places.put_event(agent, ACME, *S0, "new", second=0)
        elif what == "delete the last event":
            places.run(agent, "DELETE FROM events WHERE id = 's0-e2'")
        elif what == "exchange an event":
            places.run(agent, "DELETE FROM events WHERE id = 's0-e2'")
            places.put_event(agent, ACME, *S0, "s0-e3", second=2)
        elif what == "edit the state":
            places.run(
                agent,
                "UPDATE sessions SET state = ? WHERE app_name = ? AND id = 's0'",
                '{"topic": "y0", "price": 1.5}',
                ACME,
            )
        elif what == "edit an event":
            places.run(
                agent,
                "UPDATE events SET event_data = ? WHERE app_name = ? AND id = 's0-e1'",
                '{"text": "other"}',
                ACME,
            )
        else:
            raise AssertionError(what)


SEEN_BY_ALL = (
    "append",
    "append at an equal time",
    "append with a clock that went back",
    "delete the last event",
    "exchange an event",
    "edit the state",
)


@pytest.mark.parametrize("what", SEEN_BY_ALL)
def test_a_stamp_sees(source: Place, what: str) -> None:
    with source.open() as store:
        before = store.stamps([S0, S1])
        _change(source, what)
        after = store.stamps([S0, S1])
    assert before[S0] != after[S0]
    assert before[S1] == after[S1]
    assert len(after[S0]) <= 120


def test_a_stamp_sees_an_edit_of_an_event_where_the_survey_says_so(source: Place) -> None:
    with source.open() as store:
        before = store.stamps([S0])
        _change(source, "edit an event")
        assert (store.stamps([S0]) != before) == store.survey().stamps_see_edits


@of_every_kind
@pytest.mark.parametrize("what", [*SEEN_BY_ALL, "edit an event"])
def test_a_digest_sees(source: Place, what: str) -> None:
    with source.open() as store:
        before = store.digests([S0, S1])
        _change(source, what)
        after = store.digests([S0, S1])
    assert before[S0][:2] != after[S0][:2]
    assert before[S1] == after[S1]


COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("sessions", "state", '{"topic": "x0", "price": 1.25}'),
    ("sessions", "create_time", "2026-01-01 00:00:00.000002"),
    ("sessions", "update_time", "2026-01-01 10:00:02.123457"),
    ("events", "id", "s0-e9"),
    ("events", "invocation_id", "inv-9"),
    ("events", "timestamp", "2026-01-01 10:00:01.123457"),
    ("events", "event_data", "null"),
)


@pytest.mark.parametrize(("table", "column", "value"), COLUMNS)
def test_a_digest_holds_every_column(source: Place, table: str, column: str, value: str) -> None:
    with source.open() as store:
        before = store.digests([S0])[S0]
        row = "id = 's0'" if table == "sessions" else "id = 's0-e1'"
        changed = (
            source.time(value) if column in ("create_time", "update_time", "timestamp") else value
        )
        source.run(f"UPDATE {table} SET {column} = ? WHERE app_name = ? AND {row}", changed, ACME)
        after = store.digests([S0])[S0]
    part = "state" if table == "sessions" else "events"
    assert getattr(before, part) != getattr(after, part)
    other = "events" if table == "sessions" else "state"
    assert getattr(before, other) == getattr(after, other)


@of_adk_sql
def test_a_digest_tells_null_from_json_null(source: Place) -> None:
    with source.open() as store:
        source.run("UPDATE events SET event_data = NULL WHERE id = 's0-e1'")
        before = store.digests([S0])[S0]
        source.run("UPDATE events SET event_data = 'null' WHERE id = 's0-e1'")
        assert store.digests([S0])[S0].events != before.events


@of_adk_sql
def test_a_digest_does_not_hang_on_how_rows_are_found(source: Place) -> None:
    with source.open() as store:
        before = store.digests([S0, S1])
        source.run("DROP INDEX idx_events_app_user_session_ts_id")
        assert store.digests([S0, S1]) == before


@of_every_kind
def test_digests_name_only_sessions_that_exist(source: Place) -> None:
    with source.open() as store:
        assert set(store.digests([S0, Key("u0", "gone")])) == {S0}
        assert store.digests([S0])[S0].stamp == store.stamps([S0])[S0]


def test_a_session_without_events_has_a_digest(source: Place) -> None:
    with source.connect() as agent:
        places.put_session(agent, ACME, "u0", "silent", {})
    with source.open() as store:
        found = store.digests([Key("u0", "silent")])[Key("u0", "silent")]
    assert found.events == hashlib.sha256().hexdigest()


def test_a_long_page_reads_what_short_ones_read(source: Place) -> None:
    with source.open() as store:
        short = store.page(START, 1000)
        assert store.page(START, MANY) == short
        assert store.page(short[1][0], MANY) == short[2:]
        assert store.page(short[-1][0], MANY) == []


@of_every_kind
def test_the_mark_stays_while_nothing_of_the_tenant_changes(source: Place) -> None:
    with source.open() as store:
        before = store.mark()
        with source.connect() as agent:
            places.put_event(agent, BOLT, "u0", "s0", "new", second=9)
        assert store.mark() == before
        assert len(before) <= 128


@of_every_kind
def test_the_mark_is_what_a_sweep_adds_up_row_by_row(source: Place) -> None:
    with source.open() as store:
        swept = Mark()
        after = START
        while page := store.page(after, 2):
            for key, stamp in page:
                swept.session(key, stamp)
            after = page[-1][0]
        # A step in between: what it had is taken up from its text.
        swept = Mark(str(swept))
        for row in store.shared_page(None, 100):
            swept.shared([row])
        assert str(swept) == store.mark()


@of_every_kind
@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM sessions WHERE app_name = ? AND id = 's4'",
        "UPDATE user_states SET state = '{}' WHERE app_name = ? AND user_id = 'u1'",
        "DELETE FROM user_states WHERE app_name = ? AND user_id = 'u1'",
        "UPDATE app_states SET state = '{}' WHERE app_name = ?",
        "UPDATE sessions SET update_time = '2027-01-01 00:00:00' WHERE app_name = ? AND id = 's1'",
    ],
)
def test_the_mark_changes_with(source: Place, statement: str) -> None:
    with source.open() as store:
        before = store.mark()
        source.run(statement, ACME)
        assert store.mark() != before


# --- copying ---------------------------------------------------------------------------------


def odd_values(place: Place) -> None:
    """Write what is legal and easy to spoil on the way."""
    with place.connect() as agent:
        places.put_user_state(agent, ACME, "ü 'quoted'", {"Ä": [None, True, 1e-7]})
        places.put_session(
            agent, ACME, "ü 'quoted'", "%s {id}", '{"n": 1.10, "big": 1e400, "a": null}'
        )
        places.put_event(
            agent,
            ACME,
            "ü 'quoted'",
            "%s {id}",
            "tab\there",
            data='{"z": 0.1, "a": [1, 1.0, 12345678901234567890], "text": "\\ud83d\\ude00\\n€"}',
        )
        places.put_event(agent, ACME, "ü 'quoted'", "%s {id}", "null", second=1)
        if place.kind == "adk-sql":
            places.run(agent, "UPDATE events SET event_data = NULL WHERE id = 'null'")
        places.put_event(agent, ACME, "ü 'quoted'", "%s {id}", "s0-e0", second=2)


def test_a_copy_is_equal_to_the_bit(source: Place, target: Place) -> None:
    odd_values(source)
    copied = copy_all(source, target)
    assert target.rows() == source.rows()
    assert len(copied) == 6
    with source.open() as here, target.open() as there:
        assert there.counts() == here.counts()
        ours, theirs = digests_of_both(here, there, list(copied))
        assert {k: d[:2] for k, d in ours.items()} == {k: d[:2] for k, d in theirs.items()}
        assert {k: d.stamp for k, d in ours.items()} == {k: c.source for k, c in copied.items()}
        assert {k: d.stamp for k, d in theirs.items()} == {k: c.target for k, c in copied.items()}
        assert all(there.session(key) == here.session(key) for key in copied)


@of_every_kind
def test_copying_leaves_other_tenants_alone(source: Place, target: Place) -> None:
    before = target.rows(BOLT)
    assert any(before.values())
    copy_all(source, target)
    assert target.rows(BOLT) == before


@of_every_kind
def test_copying_again_changes_nothing(source: Place, target: Place) -> None:
    copy_all(source, target)
    before = target.rows()
    copy_all(source, target)
    assert target.rows() == before


def test_a_copy_replaces_what_the_target_held(source: Place, target: Place) -> None:
    copy_all(source, target)
    target.run("UPDATE switchyard_guard SET agents = ?", True)
    with target.connect() as agent:
        places.put_event(agent, ACME, *S0, "only here", second=50)
    source.run("DELETE FROM events WHERE app_name = ? AND id = 's0-e1'", ACME)
    copy_all(source, target)
    assert target.rows() == source.rows()


def test_a_session_that_vanished_is_deleted_and_absent(source: Place, target: Place) -> None:
    copy_all(source, target)
    source.run("DELETE FROM sessions WHERE app_name = ? AND id = 's0'", ACME)
    with source.open() as here, target.open() as there:
        assert set(copy(here, there, [S0, S1]).copied) == {S1}
        assert set(there.stamps([S0, S1])) == {S1}
    assert target.rows() == source.rows()


@of_every_kind
def test_copying_nothing_asks_nothing(source: Place, target: Place) -> None:
    with source.open() as here, target.open(claim=99) as there:
        assert copy(here, there, []) == Batch({})
        assert there.delete([]) == 0
        assert there.delete_unchanged({}) == []
        assert there.delete_shared([]) == 0


@of_every_kind
def test_a_key_named_twice_is_copied_once(source: Place, target: Place) -> None:
    with source.open() as here, target.open() as there:
        assert set(copy(here, there, [S0, S0]).copied) == {S0}
        assert there.survey().events == 3


def test_ids_of_one_session_may_recur_in_another(source: Place, target: Place) -> None:
    with source.connect() as agent:
        places.put_event(agent, ACME, *S1, "s0-e0", second=9)
    copy_all(source, target)
    assert target.rows() == source.rows()


def test_a_column_that_both_have_goes_over(source: Place, target: Place) -> None:
    for place in (source, target):
        place.run("ALTER TABLE events ADD COLUMN extra text")
    source.run("UPDATE events SET extra = id")
    with source.open() as here, target.open() as there:
        check_pair(here.survey(), there.survey())
        named = [finding.field for finding in here.survey().findings]
        before = here.digests([S0])
        copy(here, there, keys_of(here))
        assert there.digests([S0])[S0][:2] == before[S0][:2]
    assert named == ["events.extra"]
    assert len(target.run("SELECT extra FROM events WHERE app_name = ? AND extra = id", ACME)) == 15


def test_a_digest_holds_a_column_that_adk_does_not_know(source: Place) -> None:
    source.run("ALTER TABLE events ADD COLUMN extra text")
    with source.open() as store:
        before = store.digests([S0])[S0]
        source.run("UPDATE events SET extra = 'x' WHERE id = 's0-e1'")
        assert store.digests([S0])[S0].events != before.events


# --- shared state ----------------------------------------------------------------------------


def test_shared_pages_begin_with_the_app_and_walk_every_user(source: Place) -> None:
    with source.connect() as agent:
        places.put_session(agent, ACME, "u7", "s", {})
        places.put_user_state(agent, ACME, "quiet", {"k": "v"})
    with source.open() as store:
        rows = page = store.shared_page(None, 2)
        while page := store.shared_page(page[-1].user_id or "", 2):
            rows = rows + page
        asked = store.shared([row.user_id for row in rows])
    assert [row.user_id for row in rows] == [None, "quiet", "u0", "u1", "u7"]
    # The target is given what append_event needs.
    assert rows[4].state == "{}"
    assert asked == {row.user_id: row for row in rows}


def test_an_emptied_tenant_has_no_shared_state(target: Place, source: Place) -> None:
    with target.open() as store:
        assert store.shared_page(None, 10) == []
        assert store.shared([None, "u0"]) == {}
        copy_all(source, target)
        assert len(store.shared_page(None, 10)) == 3
        store.delete(keys_of(store))
        store.delete_shared([row.user_id for row in store.shared_page(None, 10)])
        assert store.shared_page(None, 10) == []


def test_a_missing_row_and_an_empty_one_are_equal(source: Place, target: Place) -> None:
    with source.connect() as agent:
        places.put_session(agent, ACME, "u7", "s", {})
    source.run("DELETE FROM app_states WHERE app_name = ?", ACME)
    copy_all(source, target)
    with source.open() as here, target.open() as there:
        assert here.shared([None, "u7"]) == there.shared([None, "u7"])
    assert target.run("SELECT count(*) FROM app_states WHERE app_name = ?", ACME) == [(1,)]
    assert len(target.run("SELECT 1 FROM user_states WHERE app_name = ? AND user_id = 'u7'", ACME))


def test_shared_state_is_replaced_by_value(source: Place, target: Place) -> None:
    copy_all(source, target)
    source.run("UPDATE user_states SET state = ? WHERE app_name = ?", '{"tier": "basic"}', ACME)
    copy_all(source, target)
    assert target.rows() == source.rows()


def test_equal_shared_state_is_not_written_again(source: Place, target: Place) -> None:
    copy_all(source, target)
    target.run("UPDATE switchyard_guard SET agents = ?", True)
    target.run("UPDATE user_states SET update_time = '2020-01-01 00:00:00'")
    copy_all(source, target)
    times = target.run("SELECT DISTINCT CAST(update_time AS TEXT) FROM user_states")
    assert times == [("2020-01-01 00:00:00",)]


@pytest.mark.parametrize("user", [None, "u0", "u5"], ids=["the app", "a user", "a new user"])
def test_one_state_is_replaced_if_it_still_is_what_it_was(
    source: Place, target: Place, user: str | None
) -> None:
    copy_all(source, target)
    with target.open() as store:
        found = store.shared([user]).get(user)
        was = found.state if found is not None else "{}"
        for now in ("{}", '{"n": 1}', '{"n": 2}'):
            row = SharedRow(user, now, "")
            assert not store.replace_shared(row, '{"n": 0}')
            assert store.replace_shared(row, was)
            was = store.shared([user])[user].state
            assert json.loads(was) == json.loads(now)


def test_shared_state_of_users_is_deleted_by_name(source: Place, target: Place) -> None:
    copy_all(source, target)
    with target.open() as store:
        assert store.delete_shared([None, "u1", "nobody"]) == 2
    assert target.rows()["app_states"] == []
    assert [row[1] for row in target.rows()["user_states"]] == ["u0"]
    assert target.rows(BOLT)["app_states"]


# --- the guard -------------------------------------------------------------------------------


def refused(work: Callable[[], Any]) -> str:
    """Return the error of a write that the store must refuse; fail if it goes through."""
    try:
        work()
    except Exception as error:
        return str(error)
    raise AssertionError("the write went through")


def test_provisioning_again_changes_nothing(source: Place) -> None:
    with source.open() as store:
        store.provision()
        before = source.everything()
        store.provision()
    assert source.everything() == before


def test_provisioning_keeps_what_is_there(source: Place) -> None:
    before = source.rows(), source.rows(BOLT)
    with source.open() as store:
        store.provision()
        assert store.survey().can_close
    assert (source.rows(), source.rows(BOLT)) == before


def test_a_store_that_is_provisioned_and_not_adopted_is_open(source: Place) -> None:
    with source.open() as store:
        store.provision()
    with source.connect() as agent:
        places.put_event(agent, ACME, *S0, "new", second=9)


def test_closing_refuses_every_kind_of_write(source: Place) -> None:
    with source.open() as store:
        store.provision()
        store.adopt(None, mover=False, agents=True)
        store.take(mover=False, agents=False)
        assert store.guard() == Guard(1, 1, False, False)
    before = source.rows()
    writes = [
        f"INSERT INTO sessions VALUES ('{ACME}', 'u9', 'new', '{{}}', '2026-01-01', '2026-01-01')",
        f"INSERT INTO events VALUES ('e', '{ACME}', 'u0', 's0', 'i', '2026-01-01', '{{}}')",
        f"INSERT INTO user_states VALUES ('{ACME}', 'u9', '{{}}', '2026-01-01')",
        f"UPDATE sessions SET state = '{{}}' WHERE app_name = '{ACME}'",
        f"UPDATE events SET event_data = '{{}}' WHERE app_name = '{ACME}'",
        f"UPDATE user_states SET state = '{{}}' WHERE app_name = '{ACME}'",
        f"UPDATE app_states SET state = '{{}}' WHERE app_name = '{ACME}'",
        f"UPDATE app_states SET app_name = 'support.other' WHERE app_name = '{ACME}'",
        f"UPDATE user_states SET app_name = '{ACME}', user_id = 'x' WHERE app_name = '{BOLT}'",
        f"DELETE FROM sessions WHERE app_name = '{ACME}'",
        f"DELETE FROM events WHERE app_name = '{ACME}'",
        f"DELETE FROM user_states WHERE app_name = '{ACME}'",
        f"DELETE FROM app_states WHERE app_name = '{ACME}'",
    ]
    for statement in writes:
        assert refused(lambda s=statement: source.run(s)).startswith("closed by switchyard")  # type: ignore[misc]
    assert source.rows() == before


def test_other_tenants_write_while_one_is_closed(source: Place) -> None:
    with source.open() as store:
        store.provision()
        store.adopt(None, mover=False, agents=False)
    with source.connect() as agent:
        places.put_session(agent, BOLT, "u0", "new", {})
        places.put_event(agent, BOLT, "u0", "new", "e", second=1)
        places.run(agent, "DELETE FROM sessions WHERE app_name = ? AND id = 'new'", BOLT)


def test_reading_goes_on_while_a_store_is_closed(source: Place) -> None:
    with source.open() as store:
        store.provision()
        store.adopt(None, mover=False, agents=False)
        assert store.survey().sessions == 5
    assert len(source.run("SELECT * FROM events WHERE app_name = ?", ACME)) == 15


def test_opening_lets_agents_write_again(source: Place) -> None:
    with source.open() as store:
        store.provision()
        store.adopt(None, mover=False, agents=False)
        store.take(mover=False, agents=True)
    with source.connect() as agent:
        places.put_event(agent, ACME, *S0, "new", second=9)


@of_every_kind
def test_a_guard_row_is_adopted_only_as_it_was_surveyed(target: Place) -> None:
    with target.open(move=2, claim=1) as store:
        with pytest.raises(GuardTaken, match="mv-1"):
            store.adopt(None, mover=True, agents=False)
        with pytest.raises(GuardTaken, match="mv-1"):
            store.adopt(Guard(1, 7, True, False), mover=True, agents=False)
        store.adopt(Guard(1, 1, True, False), mover=False, agents=True)
        assert store.guard() == Guard(2, 1, False, True)


@of_every_kind
def test_adopting_may_be_repeated_and_not_by_an_older_claim(target: Place) -> None:
    with target.open(claim=5) as store:
        store.adopt(None, mover=True, agents=True)
        store.adopt(Guard(1, 1, True, False), mover=False, agents=True)
        assert store.guard() == Guard(1, 5, False, True)
    with target.open(claim=4) as store, pytest.raises(Overtaken):
        store.adopt(None, mover=True, agents=False)


@of_every_kind
def test_a_later_claim_takes_the_row_and_an_older_one_is_overtaken(target: Place) -> None:
    with target.open(claim=3) as store:
        store.take(mover=True, agents=False)
        store.take(mover=False, agents=False)
        assert store.guard() == Guard(1, 3, False, False)
    with target.open(claim=2) as store, pytest.raises(Overtaken):
        store.take(mover=True, agents=True)
    with target.open(move=7, claim=9) as store, pytest.raises(Overtaken):
        store.take(mover=True, agents=True)
    with target.open() as store:
        assert store.guard() == Guard(1, 3, False, False)


@of_every_kind
def test_taking_a_row_that_was_never_adopted_is_refused(source: Place) -> None:
    with source.open() as store:
        store.provision()
        with pytest.raises(GuardTaken):
            store.take(mover=True, agents=True)


FALSE = {"postgresql": "false", "sqlite": "0"}
WRITES: dict[str, Callable[[SessionStore, SessionStore], Any]] = {
    "copy": lambda here, there: copy(here, there, [S0, S2]),
    "delete": lambda here, there: there.delete([S0]),
    "delete_unchanged": lambda here, there: there.delete_unchanged(there.stamps([S0])),
    "write_shared": lambda here, there: there.write_shared(here.shared_page(None, 10)),
    "delete_shared": lambda here, there: there.delete_shared([None, "u0"]),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("why", ["a later claim", "another move", "the mover's flag", "no row"])
def test_a_write_without_the_guard_changes_nothing(
    source: Place, target: Place, write: str, why: str
) -> None:
    copy_all(source, target)
    with source.open() as here, target.open(claim=2) as there:
        there.take(mover=True, agents=False)
        _lose_the_guard(target, why)
        # The source has moved on, so that a write that slipped through would show.
        _change(source, "append")
        source.run("UPDATE user_states SET state = '{}'")
        before = target.everything()
        with pytest.raises(Overtaken):
            WRITES[write](here, there)
        assert target.everything() == before


def _lose_the_guard(place: Place, why: str) -> None:
    # By hand: on PostgreSQL the real `take` and `adopt` end the stale backend before that.
    place.run(
        {
            "a later claim": "UPDATE switchyard_guard SET claim = 3",
            "another move": "UPDATE switchyard_guard SET move = 2",
            "the mover's flag": f"UPDATE switchyard_guard SET mover = {FALSE[place.dialect]}",
            "no row": "DELETE FROM switchyard_guard",
        }[why]
    )


def test_a_worker_that_slept_through_the_cutover_changes_nothing(
    source: Place, target: Place
) -> None:
    copy_all(source, target)
    with source.open() as here, target.open(claim=1) as asleep:
        with target.open(claim=2) as awake:
            awake.take(mover=False, agents=True)
        with target.connect() as agent:
            places.put_event(agent, ACME, *S0, "a turn on the target", second=40)
        # Unreachable: the later claim ended its connection.
        with pytest.raises((Overtaken, Unreachable)):
            copy(here, asleep, [S0])
    assert (
        len(target.run("SELECT 1 FROM events WHERE app_name = ? AND session_id = 's0'", ACME)) == 4
    )


# --- deleting --------------------------------------------------------------------------------


@of_every_kind
def test_deleting_takes_events_along_and_counts_sessions(source: Place, target: Place) -> None:
    copy_all(source, target)
    with target.open() as store:
        assert store.delete([S0, S1, Key("u0", "nobody")]) == 2
        assert store.counts() == Counts(3, 2)
    assert target.rows(BOLT) == {**target.rows(BOLT)}
    assert len(target.rows(BOLT)["events"]) == 3


def test_only_unchanged_sessions_are_deleted(source: Place, target: Place) -> None:
    copied = copy_all(source, target)
    target.run("UPDATE switchyard_guard SET agents = ?", True)
    with target.connect() as agent:
        places.put_event(agent, ACME, *S0, "a late write", second=40)
    stamps = {key: stamp.target for key, stamp in copied.items()} | {Key("u0", "gone"): "x"}
    with target.open() as store:
        assert set(store.delete_unchanged(stamps)) == set(copied) - {S0}
        assert keys_of(store) == [S0]
        assert store.survey().events == 4


# --- one place under two addresses -----------------------------------------------------------


def test_a_nonce_is_seen_under_another_address_of_one_place(
    target: Place, source: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORE_ALIAS", target.url.replace("127.0.0.1", "localhost"))
    alias = Place(target.dialect, target.url, "env:STORE_ALIAS")
    with target.open() as store, alias.open() as same, source.open() as other:
        store.write_nonce("word")
        store.write_nonce("word")
        assert same.has_nonce("word")
        assert not other.has_nonce("word")
        store.clear_nonce("word")
        store.clear_nonce("word")
        assert not same.has_nonce("word")


@of_every_kind
def test_a_nonce_needs_no_provisioned_store(empty: Place) -> None:
    with empty.open() as store:
        store.write_nonce("word")
        assert store.has_nonce("word")


@of_every_kind
def test_trying_ids_leaves_nothing_behind(target: Place) -> None:
    before = target.everything()
    with target.open() as store:
        assert store.keeps_ids()
    assert target.everything() == before
