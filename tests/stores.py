"""Raw hands on a store of google-adk: seed it, write like an agent, read it whole."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg

from migrations_app import ports

EPOCH = datetime(2026, 1, 5, 9, 0)
# What must be equal. Left out: update_time of shared state, in the server's own zone and of no
# meaning to ADK.
TABLES = {
    "app_states": "app_name, state",
    "user_states": "app_name, user_id, state",
    "sessions": "*",
    "events": "*",
}


class Raw:
    """One database of sessions, by URL: sqlite:////path or postgresql://..."""

    def __init__(self, url: str, kind: str = "adk-sql") -> None:
        self.url = url
        self.kind = kind
        self.sqlite = url.startswith("sqlite")

    @contextmanager
    def connection(self) -> Iterator[Any]:
        if not self.sqlite:
            with psycopg.connect(self.url) as connection:
                yield connection
            return
        connection = sqlite3.connect(self.url.removeprefix("sqlite:///"), timeout=10)
        try:
            with connection:
                yield connection
        finally:
            connection.close()

    def run(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with self.connection() as connection:
            return self.run_in(connection, query, *values)

    def run_in(self, connection: Any, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Run one statement (with ? for values) in an open transaction."""
        cursor = connection.execute(query if self.sqlite else query.replace("?", "%s"), values)
        return cursor.fetchall() if cursor.description else []

    def make_tables(self, reference: str, app_name: str) -> None:
        """Make ADK's tables, by the port that is under test elsewhere."""
        with ports.open_store(self.kind, reference, app_name=app_name) as port:
            port.provision()

    def seed(self, app_name: str, *, sessions: int, users: int, events: int = 3) -> None:
        """Fill in sessions s-0 ... of users u-0 ..., with state in all three scopes."""
        with self.connection() as connection:
            at = self._time(0)
            self.run_in(
                connection,
                "insert into app_states(app_name, state, update_time) values (?, ?, ?)",
                app_name,
                json.dumps({"motto": "hello"}),
                at,
            )
            for number in range(users):
                self.run_in(
                    connection,
                    "insert into user_states(app_name, user_id, state, update_time)"
                    " values (?, ?, ?, ?)",
                    app_name,
                    f"u-{number}",
                    json.dumps({"tier": "pro" if number % 2 else "basic"}),
                    at,
                )
            for number in range(sessions):
                self.add_session(
                    connection, app_name, f"u-{number % users}", f"s-{number}", events, number
                )

    def add_session(
        self, connection: Any, app_name: str, user: str, name: str, events: int, number: int = 0
    ) -> None:
        """Add one session with its events, in an open transaction."""
        self.run_in(
            connection,
            "insert into sessions(app_name, user_id, id, state, create_time, update_time)"
            " values (?, ?, ?, ?, ?, ?)",
            app_name,
            user,
            name,
            json.dumps({"topic": f"t{number}"}),
            self._time(number),
            # The last event's, as google-adk has it.
            self._time(number + max(events - 1, 0)),
        )
        for index in range(events):
            self.add_event(connection, app_name, user, name, f"{name}-e{index}", number + index)

    def add_event(
        self, connection: Any, app_name: str, user: str, session: str, name: str, seconds: int
    ) -> None:
        """Add one event, in an open transaction; the session's update_time is left alone."""
        data = {"id": name, "author": "user", "content": {"parts": [{"text": f"text {name}"}]}}
        self.run_in(
            connection,
            "insert into events(id, app_name, user_id, session_id, invocation_id, timestamp,"
            " event_data) values (?, ?, ?, ?, ?, ?, ?)",
            name,
            app_name,
            user,
            session,
            f"i-{name}",
            self._time(seconds),
            json.dumps(data),
        )

    def turn(self, app_name: str, user: str, session: str, name: str, seconds: int = 9_000) -> None:
        """Write as an agent does: one event and the session's new update_time, one transaction."""
        with self.connection() as connection:
            self.run_in(
                connection,
                "update sessions set update_time = ? where app_name = ? and user_id = ? and id = ?",
                self._time(seconds),
                app_name,
                user,
                session,
            )
            self.add_event(connection, app_name, user, session, name, seconds)

    def delete(self, app_name: str, user: str, session: str) -> None:
        """Delete a session as ADK does; its events go with it."""
        with self.connection() as connection:
            for table, column in (("events", "session_id"), ("sessions", "id")):
                self.run_in(
                    connection,
                    f"delete from {table} where app_name = ? and user_id = ? and {column} = ?",
                    app_name,
                    user,
                    session,
                )

    def content(self, app_name: str) -> dict[str, list[str]]:
        """Return every row of the tenant as text, table by table: what must be equal."""
        found: dict[str, list[str]] = {}
        if not self._has_tables():
            return EMPTY
        for table, columns in TABLES.items():
            rows = self.run(f"select {columns} from {table} where app_name = ?", app_name)
            found[table] = sorted(
                json.dumps([self._plain(value) for value in row], sort_keys=True) for row in rows
            )
        return found

    def _has_tables(self) -> bool:
        catalogue = "sqlite_master" if self.sqlite else "pg_tables"
        column = "name" if self.sqlite else "tablename"
        return bool(self.run(f"select 1 from {catalogue} where {column} = 'events'"))

    def count(self, app_name: str) -> int:
        [(number,)] = self.run("select count(*) from sessions where app_name = ?", app_name)
        return int(number)

    def _time(self, seconds: int) -> Any:
        at = EPOCH + timedelta(seconds=seconds, microseconds=123_456)
        if self.kind == "adk-sqlite":
            return at.replace(tzinfo=UTC).timestamp()
        return at.strftime("%Y-%m-%d %H:%M:%S.%f") if self.sqlite else at

    @staticmethod
    def _plain(value: Any) -> Any:
        if isinstance(value, datetime):
            return value.isoformat()
        if isinstance(value, str) and value[:1] in "{[":
            return json.loads(value)
        return value


EMPTY: dict[str, list[str]] = {table: [] for table in TABLES}
