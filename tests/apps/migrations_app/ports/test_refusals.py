"""Every clear no: what a survey finds, and errors that say what to do and give nothing away."""

from __future__ import annotations

import logging
import socket
import sqlite3
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from migrations_app.ports import check_pair, copy, open_store, postgres
from migrations_app.ports.address import Postgres, Sqlite, parse
from migrations_app.ports.base import (
    START,
    AddressMissing,
    CannotHold,
    ColumnsDiffer,
    Finding,
    Key,
    NotASessionStore,
    OldSchema,
    StoreRefused,
    Survey,
    UnknownKind,
    Unreachable,
    WrongCredentials,
)
from tests.apps.migrations_app.ports import places
from tests.apps.migrations_app.ports.places import ACME, Place, of_adk_sql

SECRET = "hunter2-s3cret"
S0 = Key("u0", "s0")
postgresql_only = pytest.mark.parametrize("dialect", ["postgresql"])
sqlite_only = pytest.mark.parametrize("dialect", ["sqlite"])


@contextmanager
def refused(
    kind: type[StoreRefused], *hidden: str, caplog: pytest.LogCaptureFixture | None = None
) -> Iterator[None]:
    """Expect a refusal that quotes none of `hidden`, not even in a traceback."""
    with pytest.raises(kind) as caught:
        yield
    shown: list[str] = []
    error: BaseException | None = caught.value
    while error is not None:
        shown += traceback.format_exception_only(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    for word in (SECRET, *hidden):
        assert word not in "".join(shown)
        if caplog is not None:
            assert word not in caplog.text


def test_an_unknown_kind_is_refused() -> None:
    with refused(UnknownKind), open_store("redis", "env:X", app_name=ACME):
        pass


@pytest.mark.parametrize(
    "reference",
    [
        "env:NOT_SET_ANYWHERE",
        "env:",
        "",
        "file:relative",
        "file:/not/there",
        f"postgresql://u:{SECRET}@h/d",
    ],
)
def test_an_address_that_leads_nowhere_is_refused(reference: str) -> None:
    with refused(AddressMissing), open_store("adk-sql", reference, app_name=ACME):
        pass


@pytest.mark.parametrize(
    "address",
    [
        f"{SECRET}",
        f"postgresql://u:{SECRET}@[h/d",
        f"postgresql://u:{SECRET}@127.0.0.1:port/d",
        f"postgresql://u:{SECRET}@127.0.0.1/d?sslmode={SECRET}",
        "sqlite://",
        "sqlite:///relative.db",
        "sqlite:///:memory:",
        "sqlite:////",
    ],
)
def test_an_address_that_is_none_is_refused_and_not_quoted(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORE", address)
    with refused(AddressMissing), open_store("adk-sql", "env:STORE", app_name=ACME):
        pass


def test_another_database_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORE", f"mysql+aiomysql://u:{SECRET}@h/d")
    with refused(UnknownKind, "aiomysql"), open_store("adk-sql", "env:STORE", app_name=ACME):
        pass


@pytest.mark.parametrize(
    "scheme", ["postgresql", "postgres", "postgresql+psycopg", "postgresql+asyncpg"]
)
def test_the_urls_that_adk_takes_are_taken(scheme: str) -> None:
    address = parse(
        f"{scheme}://al%40ice:p%2Fw@h:5/d?ssl=require&prepared_statement_cache_size=0", "x"
    )
    assert isinstance(address, Postgres)
    assert address.params == {
        "user": "al@ice",
        "password": "p/w",
        "host": "h",
        "port": "5",
        "dbname": "d",
        "sslmode": "require",
    }
    assert "p/w" not in repr(address)


def test_options_in_an_address_keep_their_spaces() -> None:
    address = parse("postgresql://h/d?options=-c%20search_path%3Dadk%2Bx", "x")
    assert isinstance(address, Postgres)
    assert address.params["options"] == "-c search_path=adk+x"


@pytest.mark.parametrize("scheme", ["sqlite", "sqlite+aiosqlite", "sqlite+pysqlite"])
def test_the_files_that_adk_takes_are_taken(scheme: str) -> None:
    assert parse(f"{scheme}:////var/a b#%20.db?timeout=5", "x") == Sqlite("/var/a b#%20.db")


def test_an_address_may_come_from_a_file(tmp_path: Path, source: Place) -> None:
    secret = tmp_path / "address"
    secret.write_text(source.url + "\n")
    with open_store("adk-sql", f"file:{secret}", app_name=ACME) as store:
        assert store.counts().sessions == 5


def test_a_secret_file_that_is_no_address_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "address"
    for content in ("", " \n", "x" * 5000, "\x00\x01"):
        secret.write_text(content)
        with refused(AddressMissing), open_store("adk-sql", f"file:{secret}", app_name=ACME):
            pass


# --- servers that don't answer, or say no ----------------------------------------------------


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda url: monkeypatch.setenv("STORE", url)


def test_a_server_that_is_not_there_is_unreachable(address: Callable[[str], None]) -> None:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address(f"postgresql://alice:{SECRET}@127.0.0.1:{port}/d")
    with (
        refused(Unreachable, "alice", "127.0.0.1", str(port)),
        open_store("adk-sql", "env:STORE", app_name=ACME),
    ):
        pass


def test_a_server_that_says_nothing_is_unreachable_within_seconds(
    address: Callable[[str], None],
) -> None:
    with closing(socket.socket()) as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        address(f"postgresql://alice:{SECRET}@127.0.0.1:{deaf.getsockname()[1]}/d")
        began = time.monotonic()
        with refused(Unreachable, "alice"), open_store("adk-sql", "env:STORE", app_name=ACME):
            pass
        assert time.monotonic() - began < 6


def test_a_user_that_the_server_does_not_know_is_refused(
    server_url: str, address: Callable[[str], None]
) -> None:
    host = server_url.rpartition("@")[2]
    address(f"postgresql://nobody_here:{SECRET}@{host}/postgres")
    with (
        refused(WrongCredentials, "nobody_here", host),
        open_store("adk-sql", "env:STORE", app_name=ACME),
    ):
        pass


def test_a_wrong_password_is_refused(address: Callable[[str], None]) -> None:
    """A server that asks for a password, and sends it back: what libpq itself calls refused."""
    with closing(socket.socket()) as server:
        server.bind(("127.0.0.1", 0))
        server.listen()

        def serve() -> None:
            connection, _from = server.accept()
            with connection:
                connection.recv(1024)
                connection.sendall(b"R" + (8).to_bytes(4, "big") + (3).to_bytes(4, "big"))
                connection.recv(1024)
                said = b'SFATAL\0C28P01\0Mpassword authentication failed for user "alice"\0\0'
                connection.sendall(b"E" + (len(said) + 4).to_bytes(4, "big") + said)

        places.Thread(serve)
        address(
            f"postgresql://alice:{SECRET}@127.0.0.1:{server.getsockname()[1]}/d?sslmode=disable&gssencmode=disable"
        )
        with refused(WrongCredentials, "alice"), open_store("adk-sql", "env:STORE", app_name=ACME):
            pass


def test_a_database_that_is_not_there_is_unreachable(
    server_url: str, address: Callable[[str], None]
) -> None:
    address(f"{server_url}/not_there_at_all")
    with (
        refused(Unreachable, "not_there_at_all"),
        open_store("adk-sql", "env:STORE", app_name=ACME),
    ):
        pass


def test_a_folder_that_is_not_there_is_unreachable(address: Callable[[str], None]) -> None:
    address("sqlite:////not/there/store.db")
    with refused(Unreachable, "/not/there"), open_store("adk-sql", "env:STORE", app_name=ACME):
        pass


def test_a_path_that_no_system_takes_is_unreachable_and_not_quoted(
    address: Callable[[str], None],
) -> None:
    address(f"sqlite:////{'secret' * 60}/a.db")
    with refused(Unreachable, "secret"), open_store("adk-sql", "env:STORE", app_name=ACME):
        pass


def test_a_file_of_another_kind_is_no_session_store(
    tmp_path: Path, address: Callable[[str], None]
) -> None:
    (tmp_path / "x.db").write_text("not a database, and long enough to look at" * 100)
    address(f"sqlite:///{tmp_path}/x.db")
    with (
        refused(NotASessionStore, str(tmp_path)),
        open_store("adk-sql", "env:STORE", app_name=ACME),
    ):
        pass


@postgresql_only
def test_a_connection_that_is_lost_is_unreachable(source: Place) -> None:
    with source.open() as store:
        source.run(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name LIKE 'switchyard%' AND datname = current_database()"
        )
        with refused(Unreachable):
            store.counts()
        with refused(Unreachable):
            store.page(START, 5)


# --- schemas ---------------------------------------------------------------------------------


@of_adk_sql
def test_a_v0_schema_is_refused_with_the_way_out(empty: Place) -> None:
    empty.run("CREATE TABLE sessions (app_name text, user_id text, id text, update_time text)")
    empty.run("CREATE TABLE events (id text, app_name text, actions text)")
    with empty.open() as store, refused(OldSchema):
        store.survey()
    with empty.open() as store, pytest.raises(OldSchema, match=r"adk migrate session.*TZ=UTC"):
        store.survey()


@of_adk_sql
@pytest.mark.parametrize(("version", "kind"), [("0", OldSchema), ("2", NotASessionStore)])
def test_a_version_row_decides(source: Place, version: str, kind: type[StoreRefused]) -> None:
    source.run("UPDATE adk_internal_metadata SET value = ?", version)
    with source.open() as store, refused(kind):
        store.survey()


@of_adk_sql
def test_a_version_table_without_its_row_is_malformed(source: Place) -> None:
    source.run("DELETE FROM adk_internal_metadata")
    with source.open() as store, refused(NotASessionStore):
        store.survey()


@of_adk_sql
def test_a_database_from_before_the_version_table_is_v1(source: Place) -> None:
    source.run("DROP TABLE adk_internal_metadata")
    with source.open() as store:
        assert store.survey().schema_version == "1"


def test_tables_that_only_share_their_names_are_no_session_store(empty: Place) -> None:
    for table in places.TABLES:
        empty.run(f"CREATE TABLE {table} (id text)")
    with empty.open() as store, refused(NotASessionStore):
        store.survey()


@pytest.mark.parametrize(
    ("dialect", "kind", "named"),
    [
        ("adk-sqlite", "adk-sql", "SqliteSessionService"),
        ("sqlite", "adk-sqlite", "DatabaseSessionService"),
    ],
)
def test_the_other_kind_of_a_file_is_refused_by_name(source: Place, kind: str, named: str) -> None:
    with (
        open_store(kind, source.reference, app_name=ACME) as store,
        pytest.raises(NotASessionStore, match=f"{named}.*kind {source.kind}"),
    ):
        store.survey()


def test_adk_sqlite_is_never_postgresql(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORE", f"postgresql://alice:{SECRET}@127.0.0.1:1/x")
    with (
        refused(UnknownKind, "alice"),
        open_store("adk-sqlite", "env:STORE", app_name=ACME),
    ):
        pass


def test_a_file_is_found_as_sqlite_session_service_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It unquotes its URL and ends it at a #; SQLAlchemy does neither."""
    monkeypatch.setenv("STORE", f"sqlite:///{tmp_path}/a%20b.db?mode=rw#c")
    with open_store("adk-sqlite", "env:STORE", app_name=ACME) as store:
        store.provision()
    assert [file.name for file in tmp_path.iterdir()] == ["a b.db"]


# --- pairs -----------------------------------------------------------------------------------


def survey(place: Place) -> Survey:
    with place.open() as store:
        return store.survey()


def test_a_source_without_tables_is_refused(empty: Place, source: Place) -> None:
    check_pair(survey(source), survey(empty))
    with refused(NotASessionStore):
        check_pair(survey(empty), survey(source))


def test_a_column_that_google_adk_does_not_know_goes_nowhere_else(
    new_place: Callable[[str, str], Place],
) -> None:
    one, other = new_place("postgresql", "ONE"), new_place("sqlite", "OTHER")
    places.fill(one, ACME)
    places.fill(other, ACME)
    check_pair(survey(one), survey(other))
    for place, foreign in ((one, "events.extra varchar"), (other, "events.extra")):
        place.run("ALTER TABLE events ADD COLUMN extra text")
        with pytest.raises(ColumnsDiffer, match=f"know: {foreign}."):
            check_pair(survey(place), survey(other if place is one else one))


@pytest.mark.parametrize("prepared", [True, False])
def test_a_column_that_the_target_lacks_is_refused(
    source: Place, empty: Place, prepared: bool
) -> None:
    if prepared:
        empty.make_tables()
    source.run("ALTER TABLE events ADD COLUMN extra text")
    with pytest.raises(ColumnsDiffer, match=r"events\.extra"):
        check_pair(survey(source), survey(empty))


def test_a_column_that_only_the_target_has_is_named(source: Place, target: Place) -> None:
    target.run("ALTER TABLE events ADD COLUMN extra text")
    check_pair(survey(source), survey(target))
    assert [(f.field, f.blocks) for f in survey(target).findings] == [("events.extra", False)]


def test_a_required_column_that_only_the_target_has_blocks(empty: Place) -> None:
    empty.make_tables()
    empty.run("DROP TABLE events")
    empty.run(
        "CREATE TABLE events (id text, app_name text, user_id text, session_id text,"
        " invocation_id text, timestamp timestamp, event_data jsonb, extra text NOT NULL)"
    )
    assert [f.field for f in survey(empty).findings if f.blocks][:1] == ["events.extra"]


@postgresql_only
def test_a_column_of_another_type_is_refused(source: Place, target: Place) -> None:
    target.run("ALTER TABLE events ALTER COLUMN event_data TYPE json")
    with pytest.raises(ColumnsDiffer, match=r"events\.event_data is json, not jsonb"):
        survey(target)


# --- findings --------------------------------------------------------------------------------


def findings(place: Place) -> dict[tuple[str, bool], Finding]:
    return {(found.field, found.blocks): found for found in survey(place).findings}


@pytest.mark.parametrize(("user", "name"), [("u0", ""), ("", "s9"), ("", "")])
def test_an_empty_id_blocks(source: Place, user: str, name: str) -> None:
    with source.connect() as agent:
        places.put_session(agent, ACME, user, name, {})
        places.put_user_state(agent, ACME, "", {})
    assert findings(source)["sessions.id", True].count == 1


def test_an_id_that_is_too_long_blocks(source: Place) -> None:
    if source.dialect == "postgresql":
        source.run("ALTER TABLE sessions ALTER COLUMN id TYPE text")
    with source.connect() as agent:
        places.put_session(agent, ACME, "u0", "x" * 129, {})
    found = findings(source)["sessions.id", True]
    assert (found.count, found.example) == (1, "u0/" + "x" * 40)


@sqlite_only
def test_an_id_with_nul_blocks(source: Place) -> None:
    with source.connect() as agent:
        places.put_session(agent, ACME, "u0", "a\0b", {})
    assert "NUL" in findings(source)["sessions.id", True].reason


def test_a_padded_id_is_named(source: Place) -> None:
    with source.connect() as agent:
        places.put_session(agent, ACME, "u0", " s9", {})
    assert findings(source)["sessions.id", False].count == 1


@pytest.mark.parametrize("state", ["null", "[]", '"text"'])
def test_a_state_that_is_no_object_is_named(source: Place, state: str) -> None:
    source.run("UPDATE sessions SET state = ? WHERE app_name = ? AND id = 's0'", state, ACME)
    source.run("UPDATE user_states SET state = ? WHERE app_name = ?", state, ACME)
    found = findings(source)
    assert found["sessions.state", False].example == "u0/s0"
    assert found["user_states.state", False].count == 2


@of_adk_sql
def test_an_event_without_data_is_named(source: Place) -> None:
    source.run("UPDATE events SET event_data = NULL WHERE app_name = ? AND id = 's0-e1'", ACME)
    assert findings(source)["events.event_data", False].example == "u0/s0"


@of_adk_sql
def test_a_user_without_a_state_row_is_named(source: Place) -> None:
    source.run("DELETE FROM user_states WHERE app_name = ? AND user_id = 'u1'", ACME)
    found = findings(source)["user_states", False]
    assert (found.count, found.example) == (1, "u1")
    assert "given an empty one" in found.reason


@of_adk_sql
def test_findings_are_of_this_tenant_only(source: Place) -> None:
    source.run("DELETE FROM user_states WHERE app_name <> ?", ACME)
    source.run("UPDATE events SET event_data = NULL WHERE app_name <> ?", ACME)
    assert findings(source) == {}


CALL = {"content": {"parts": [{"text": "let me see"}, {"function_call": {"name": "remember"}}]}}
ANSWER = {"content": {"parts": [{"function_response": {"name": "remember"}}]}}
ABORTED = {"error_code": "INVOCATION_ABORTED"}


@pytest.mark.parametrize(
    ("events", "interrupted"),
    [
        ([CALL], 1),
        ([ABORTED], 1),
        ([CALL, ANSWER], 0),
        ([CALL, ANSWER, {"content": {"parts": [{"text": "done"}]}}], 0),
        ([ABORTED, ANSWER], 0),
        ([{"content": {"parts": []}}], 0),
        ([{"content": None}], 0),
        ([{"error_code": "RuntimeError"}], 0),
    ],
)
def test_sessions_that_end_in_an_interrupted_invocation_are_counted(
    source: Place, events: list[Any], interrupted: int
) -> None:
    with source.connect() as agent:
        for number, data in enumerate(events):
            places.put_event(agent, ACME, *S0, f"x{number}", second=20 + number, data=data)
    found = survey(source)
    assert found.interrupted == interrupted
    assert found.interrupted_keys == (S0,) * interrupted


@postgresql_only
def test_a_store_whose_tables_its_user_may_not_write_blocks(source: Place, server_url: str) -> None:
    with limited(source, "SELECT") as place:
        found = survey(place)
        rights = next(f for f in found.findings if f.field == "rights")
        assert rights.blocks
        assert "DELETE on events" in rights.reason
        assert not found.can_close
        with place.open() as store, refused(WrongCredentials, "limited"):
            store.provision()


@postgresql_only
def test_a_store_that_may_not_even_be_read_is_refused(source: Place) -> None:
    with (
        limited(source, "INSERT") as place,
        place.open() as store,
        refused(WrongCredentials, "limited"),
    ):
        store.survey()


@contextmanager
def limited(place: Place, right: str) -> Iterator[Place]:
    """Yield the same store under a user that has only this right on its tables."""
    with psycopg.connect(place.url, autocommit=True) as admin:
        admin.execute("DROP ROLE IF EXISTS limited")
        admin.execute("CREATE ROLE limited LOGIN PASSWORD 'limited'")
        admin.execute(
            sql.SQL("GRANT {} ON ALL TABLES IN SCHEMA public TO limited").format(sql.SQL(right))
        )
        admin.execute("GRANT USAGE ON SCHEMA public TO limited")
        monkeypatch = pytest.MonkeyPatch()
        rest = place.url.rpartition("@")[2]
        monkeypatch.setenv("STORE_LIMITED", f"postgresql://limited:limited@{rest}")
        try:
            yield replace(place, reference="env:STORE_LIMITED")
        finally:
            monkeypatch.undo()
            admin.execute("DROP OWNED BY limited")
            admin.execute("DROP ROLE limited")


@of_adk_sql
def test_events_without_an_index_by_session_block(source: Place) -> None:
    source.run("DROP INDEX idx_events_app_user_session_ts_id")
    assert "no index begins with" in findings(source)["events", True].reason


# --- values that a target can't hold ---------------------------------------------------------


@postgresql_only
def test_a_value_that_the_target_refuses_is_not_quoted(
    source: Place, target: Place, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    target.run("ALTER TABLE events ALTER COLUMN invocation_id TYPE varchar(5)")
    source.run("UPDATE events SET invocation_id = ? WHERE app_name = ?", SECRET, ACME)
    before = target.everything()
    with source.open() as here, target.open() as there:
        with refused(CannotHold, SECRET, caplog=caplog):
            copy(here, there, [S0])
        assert isinstance(there, postgres.PostgresStore)
        # The handles are whole afterwards.
        assert here.survey().events == 15
        assert there.delete([S0]) == 0
    assert target.everything() == before


@postgresql_only
def test_an_app_name_with_nul_is_refused(source: Place) -> None:
    with source.open(app_name="a\0b") as store, refused(CannotHold):
        store.counts()


def test_sqlite_is_new_enough() -> None:
    # ON CONFLICT ... DO UPDATE, row values, json functions.
    assert sqlite3.sqlite_version_info >= (3, 38)
