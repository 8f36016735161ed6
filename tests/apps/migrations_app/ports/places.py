"""A store's database as its agents see it, and what google-adk writes there, without it."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import psycopg
import pytest

from migrations_app.ports import open_store, schema
from migrations_app.ports.base import SessionStore

ACME, BOLT = "support.acme", "support.bolt"
TABLES = ("app_states", "user_states", "sessions", "events")


# What only DatabaseSessionService's tables have: a version, NULL data, an index to lose.
of_adk_sql = pytest.mark.parametrize("dialect", ["postgresql", "sqlite"])
# What a store does even where nothing but google-adk's interface reaches it.
of_every_kind = pytest.mark.parametrize(
    "dialect", ["postgresql", "sqlite", "adk-sqlite", "adk-service"]
)


@dataclass(frozen=True)
class Place:
    """A store's database as its agents see it: another connection, another program."""

    dialect: str
    url: str
    reference: str
    path: str = field(default="")
    kind: str = "adk-sql"

    @contextmanager
    def connect(self) -> Iterator[Any]:
        """Open an agent's connection, in autocommit."""
        if self.dialect == "sqlite":
            connection = sqlite3.connect(self.path, isolation_level=None, timeout=5.0)
            with closing(connection):
                connection.execute("PRAGMA foreign_keys = ON")
                yield connection
        else:
            with psycopg.connect(self.url, autocommit=True) as connection:
                yield connection

    def run(self, statement: str, *params: Any) -> list[Any]:
        """Run one statement with ? for parameters, and return its rows if it has any."""
        with self.connect() as connection:
            return run(connection, statement, *params)

    def open(
        self, *, app_name: str = ACME, move: int = 1, claim: int = 1
    ) -> AbstractContextManager[SessionStore]:
        return open_store(self.kind, self.reference, app_name=app_name, move=move, claim=claim)

    def make_tables(self) -> None:
        with self.connect() as agent:
            agent.execute("BEGIN")
            own = self.kind == "adk-sqlite"
            for statement in (
                schema.adk_sqlite_tables(TABLES) if own else schema.tables(self.dialect, TABLES)
            ):
                agent.execute(statement)
            agent.execute("COMMIT")

    def time(self, text: str) -> str | float:
        """Spell a time as this store's columns do."""
        return seconds(text) if self.kind == "adk-sqlite" else text

    def rows(self, app_name: str = ACME, *, tables: tuple[str, ...] = TABLES) -> dict[str, Any]:
        """Return every row of a tenant as text, by table; the state rows' own time left out."""
        found = {}
        for table in tables:
            names = [
                name
                for name in schema.COLUMNS[table]
                if not (name == "update_time" and table.endswith("_states"))
            ]
            listed = ", ".join(f"CAST({name} AS TEXT)" for name in names)
            found[table] = sorted(
                self.run(f"SELECT {listed} FROM {table} WHERE app_name = ?", app_name),
                key=repr,
            )
        return found

    def everything(self) -> Any:
        """Return the whole database: what it is made of, and every row of every table."""
        if self.dialect == "sqlite":
            made = self.run("SELECT type, name, sql FROM sqlite_master ORDER BY 1, 2")
            tables = [name for kind, name, _ in made if kind == "table"]
        else:
            made = self.run(
                "SELECT relname, relkind::text FROM pg_class"
                " WHERE relnamespace = 'public'::regnamespace ORDER BY 1"
            ) + self.run("SELECT tgname FROM pg_trigger ORDER BY 1")
            tables = [row[0] for row in made if row[1:] == ("r",)]
        return made, {name: sorted(self.run(f"SELECT * FROM {name}"), key=repr) for name in tables}


@dataclass(frozen=True)
class Pair:
    source: Place
    target: Place


def run(connection: Any, statement: str, *params: Any) -> list[Any]:
    """Run one statement with ? for parameters on an agent's connection."""
    if isinstance(connection, psycopg.Connection) and params:
        statement = statement.replace("%", "%%").replace("?", "%s")
    cursor = connection.execute(statement, params) if params else connection.execute(statement)
    return cursor.fetchall() if cursor.description else []


def seconds(text: str) -> float:
    """Return a time as SqliteSessionService keeps it."""
    return datetime.fromisoformat(f"{text}+00:00").timestamp()


def _time(agent: Any, text: str) -> str | float:
    """Spell a time as the store behind an agent's connection does."""
    if isinstance(agent, psycopg.Connection):
        return text
    types = {row[1]: row[2] for row in agent.execute("PRAGMA table_info(sessions)")}
    return seconds(text) if types["update_time"] == "REAL" else text


def fill(
    place: Place, app_name: str, *, users: int = 2, sessions: int = 5, events: int = 3
) -> None:
    """Write a tenant: all three scopes of state, sessions of several users, events in order."""
    place.make_tables()
    with place.connect() as agent:
        agent.execute("BEGIN")
        put_app_state(agent, app_name, {"greeting": "hé €"})
        for user in range(users):
            put_user_state(agent, app_name, f"u{user}", {"tier": "pro", "n": user})
        for number in range(sessions):
            user, name = f"u{number % users}", f"s{number}"
            put_session(agent, app_name, user, name, {"topic": f"x{number}", "price": 1.5})
            for event in range(events):
                put_event(agent, app_name, user, name, f"{name}-e{event}", second=event)
        agent.execute("COMMIT")


def put_app_state(agent: Any, app_name: str, state: Any) -> None:
    run(agent, "INSERT INTO app_states VALUES (?, ?, CURRENT_TIMESTAMP)", app_name, dumps(state))


def put_user_state(agent: Any, app_name: str, user: str, state: Any) -> None:
    run(
        agent,
        "INSERT INTO user_states VALUES (?, ?, ?, CURRENT_TIMESTAMP)",
        app_name,
        user,
        dumps(state),
    )


def put_session(agent: Any, app_name: str, user: str, name: str, state: Any) -> None:
    run(
        agent,
        "INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?)",
        app_name,
        user,
        name,
        dumps(state),
        _time(agent, "2026-01-01 00:00:00.000001"),
        _time(agent, "2026-01-01 10:00:00.123456"),
    )


def put_event(
    agent: Any,
    app_name: str,
    user: str,
    session: str,
    name: str,
    *,
    second: int = 0,
    data: Any = None,
) -> None:
    """Append an event as google-adk does: the session's time is the event's."""
    at = _time(agent, f"2026-01-01 10:00:{second:02}.123456")
    body = {"id": name, "author": "user", "content": {"parts": [{"text": "hi"}]}}
    run(
        agent,
        "INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?)",
        name,
        app_name,
        user,
        session,
        f"inv-{second}",
        at,
        dumps(body if data is None else data),
    )
    run(
        agent,
        "UPDATE sessions SET update_time = ? WHERE app_name = ? AND user_id = ? AND id = ?",
        at,
        app_name,
        user,
        session,
    )


def dumps(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class Thread(threading.Thread):
    """A thread whose result, or error, `result` gives back."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self._value: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._value = self._work()
        except BaseException as error:
            self._error = error

    def result(self, timeout: float = 20.0) -> Any:
        self.join(timeout)
        if self.is_alive():
            raise TimeoutError("the thread did not end")
        if self._error is not None:
            raise self._error
        return self._value
