"""ADK's session tables in an SQLite file: one writer, no server."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from migrations_app.domain import canonical
from migrations_app.domain.canonical import EventRow, SessionRow, Time, present
from migrations_app.domain.values import Layout
from migrations_app.ports.address import sqlite_uri
from migrations_app.ports.base import (
    CHANGES_MOST,
    START,
    Change,
    Copied,
    Counts,
    Digest,
    Key,
    Mark,
    Own,
    SharedRow,
    Stamp,
    Survey,
    shared_key,
    youngest,
)
from migrations_app.ports.sqlite_guard import SqliteGuard
from migrations_app.ports.sqlite_link import quote

_KEY_COLUMNS = ("app_name", "user_id", "session_id")


class SqliteStore(SqliteGuard):
    """One tenant's side of one SQLite file."""

    # The order in which google-adk reads a session's events.
    event_order = "e.timestamp, e.id"
    # Now, as the store's own columns of time spell it.
    now = "CURRENT_TIMESTAMP"

    @staticmethod
    def micros(value: Any) -> Time:
        """Read a time as the store's columns hold it."""
        return canonical.micros_of_text(value)

    @staticmethod
    def spelled(micros: int) -> Any:
        """Spell a time for the store's columns."""
        return canonical.text_of_micros(micros)

    # --- looking -------------------------------------------------------------------------

    def survey(self) -> Survey:
        """Say what the store is and holds; changes nothing."""
        from migrations_app.ports.sqlite_survey import survey

        return survey(self)

    def counts(self) -> Counts:
        """Count sessions and users of the tenant."""
        if not self.has_tables:
            return Counts(0, 0)
        row = self.rows(
            "SELECT (SELECT count(*) FROM sessions WHERE app_name = :app),"
            " (SELECT count(*) FROM (SELECT user_id FROM sessions WHERE app_name = :app"
            " UNION SELECT user_id FROM user_states WHERE app_name = :app)),"
            " (SELECT count(DISTINCT user_id) FROM sessions WHERE app_name = :app)",
            {"app": self.app_name},
        )[0]
        return Counts(*row)

    def page(self, after: Key, limit: int) -> list[tuple[Key, Stamp]]:
        """Return up to `limit` sessions behind `after`, in byte order."""
        if not self.has_tables:
            return []
        behind = "" if after == START else " AND (user_id, id) > (:user, :id)"
        found = self.rows(
            f"SELECT {_stamp_columns('main')} FROM (SELECT * FROM sessions"
            f" WHERE app_name = :app{behind} ORDER BY user_id, id LIMIT :limit) s"
            " ORDER BY s.user_id, s.id",
            {
                "app": self.app_name,
                "user": after.user_id,
                "id": after.session_id,
                "limit": limit,
            },
        )
        return [_stamped(row) for row in found]

    def stamps(self, keys: Collection[Key]) -> dict[Key, Stamp]:
        """Return the stamps of those sessions that exist."""
        if not keys or not self.has_tables:
            return {}
        with self.clean():
            return self.read_stamps(keys)

    def digests(self, keys: Collection[Key]) -> dict[Key, Digest]:
        """Return strict SHA-256 digests, hashed here row by row as SQLite keeps the values.

        A value's storage class is part of it, and text is hashed as its bytes, so that
        1 and '1', NULL and '', and text that is not UTF-8 are all told apart. Each bite
        of keys is one snapshot.
        """
        if not keys or not self.has_tables:
            return {}
        found: dict[Key, Digest] = {}
        for bite in self.bites(list(keys)):
            self.choose(bite)
            with self.snapshot():
                stamps = self.chosen_stamps("main", self.app_name)
                states = {
                    Key(row[0], row[1]): _hash_row(row[2:]).hex()
                    for row in self.rows(
                        f"SELECT s.user_id, s.id, {self._framed('sessions', 's')}"
                        " FROM temp.keys k CROSS JOIN sessions s"
                        " ON s.app_name = ? AND s.user_id = k.u AND s.id = k.i",
                        (self.app_name,),
                    )
                }
                events = {key: hashlib.sha256() for key in stamps}
                for row in self.connection.execute(
                    f"SELECT e.user_id, e.session_id, {self._framed('events', 'e')}"
                    " FROM temp.keys k CROSS JOIN events e ON e.app_name = ? AND e.user_id = k.u"
                    f" AND e.session_id = k.i ORDER BY k.rowid, {self.event_order}",
                    (self.app_name,),
                ):
                    # Events of a session that is gone have nowhere to go.
                    if (total := events.get(Key(row[0], row[1]))) is not None:
                        total.update(_hash_row(row[2:]))
            for key, stamp in stamps.items():
                found[key] = Digest(states[key], events[key].hexdigest(), stamp)
        return found

    def session(self, key: Key) -> Mapping[str, Any] | None:
        """Return one session as plain data, events in ADK's order."""
        if not self.has_tables:
            return None
        with self.snapshot():
            head = self.rows(
                "SELECT state, create_time, update_time FROM sessions"
                " WHERE app_name = ? AND user_id = ? AND id = ?",
                (self.app_name, *key),
            )
            if not head:
                return None
            own = [name for name in self.columns()["events"] if name not in _KEY_COLUMNS]
            quoted = ", ".join(quote(name) for name in own)
            events = self.rows(
                f"SELECT {quoted} FROM events e WHERE app_name = ? AND user_id = ?"
                f" AND session_id = ? ORDER BY {self.event_order}",
                (self.app_name, *key),
            )
        state, created, updated = head[0]
        return {
            "state": _loads(state),
            "create_time": created,
            "update_time": updated,
            "events": [_plain(own, row) for row in events],
        }

    def shared_page(self, after: str | None, limit: int) -> list[SharedRow]:
        """Return shared state, the app's row first (after None), then users, in order.

        Every user with a session counts, and the app if it has one: what has no row is
        shown as '{}', which is what the target is given, for append_event raises where the
        row is missing.
        """
        if not self.has_tables:
            return []
        rows = list(self.shared([None]).values()) if after is None else []
        behind = "" if not after else " AND user_id > :after"
        branch = "SELECT * FROM (SELECT {} user_id FROM {} WHERE app_name = :app" + behind
        branch += " ORDER BY user_id LIMIT :limit)"
        found = self.rows(
            "SELECT u.user_id, coalesce(t.state, '{}') FROM (SELECT user_id FROM ("
            + branch.format("", "user_states")
            + " UNION "
            + branch.format("DISTINCT", "sessions")
            + ") ORDER BY user_id LIMIT :limit) u LEFT JOIN user_states t"
            " ON t.app_name = :app AND t.user_id = u.user_id ORDER BY u.user_id",
            {"app": self.app_name, "after": after, "limit": limit - len(rows)},
        )
        return rows + [_shared(*row) for row in found]

    def shared(self, user_ids: Collection[str | None]) -> dict[str | None, SharedRow]:
        """Return the shared state of these users; None asks for the app's.

        Whoever has neither a row nor a session is absent: a user, and the app itself.
        """
        if not user_ids or not self.has_tables:
            return {}
        found: list[Any] = []
        users = [user for user in user_ids if user is not None]
        if users:
            self.choose([(user, "") for user in users])
            found = self.rows(
                "SELECT k.u, coalesce(t.state, '{}') FROM temp.keys k"
                " LEFT JOIN user_states t ON t.app_name = :app AND t.user_id = k.u"
                " WHERE t.user_id IS NOT NULL OR EXISTS (SELECT 1 FROM sessions s"
                " WHERE s.app_name = :app AND s.user_id = k.u)",
                {"app": self.app_name},
            )
        if None in user_ids:
            found += self.rows(
                "SELECT NULL, coalesce(t.state, '{}') FROM (SELECT :app AS app) one"
                " LEFT JOIN app_states t ON t.app_name = one.app WHERE t.app_name IS NOT NULL"
                " OR EXISTS (SELECT 1 FROM sessions s WHERE s.app_name = one.app)",
                {"app": self.app_name},
            )
        return {row[0]: _shared(*row) for row in found}

    def last_changes(
        self, user_id: str | None, keys: Collection[str], own: Own
    ) -> dict[str, Change]:
        """Return the last event that set each of these keys of shared state, where one is found."""
        bare, asked = list(keys), [shared_key(user_id, key) for key in keys]
        if not self.has_tables or not asked:
            return {}
        # By their places in the list: Python reads no half of a surrogate pair as text.
        rows = self.rows(
            "SELECT asked.key, user_id, session_id, timestamp, json_extract(event_data,"
            " '$.actions.state_delta') FROM events, json_each("
            "CASE WHEN json_valid(event_data) THEN event_data ELSE '{}' END,"
            " '$.actions.state_delta') AS was, json_each(:keys) AS asked"
            " WHERE app_name = :app AND was.key = asked.value"
            + (" AND user_id = :user" if user_id is not None else "")
            + " ORDER BY timestamp DESC LIMIT :most",
            {
                "app": self.app_name,
                "user": user_id,
                "keys": json.dumps(asked),
                "most": CHANGES_MOST,
            },
        )
        return youngest(
            (
                (
                    bare[at],
                    Key(user, session),
                    micros,
                    json.dumps(canonical.loads(delta)[asked[at]]),
                )
                for at, user, session, time, delta in rows
                if (micros := self.micros(time)) is not None
            ),
            own,
        )

    def mark(self) -> str:
        """Return the `Mark` of every stamp and all shared state, in one snapshot."""
        total, app = Mark(), (self.app_name,)
        if not self.has_tables:
            return str(total)
        with self.snapshot():
            for row in self.connection.execute(
                f"SELECT {_stamp_columns('main')} FROM sessions s WHERE s.app_name = ?", app
            ):
                total.session(*_stamped(row))
            for row in self.connection.execute(
                "SELECT user_id, state FROM user_states WHERE app_name = ?"
                " UNION ALL SELECT NULL, state FROM app_states WHERE app_name = ?",
                app * 2,
            ):
                total.shared([_shared(*row)])
        return str(total)

    # --- rows for a store of another kind ------------------------------------------------

    def fine_times(self) -> int:
        """Return 0: the columns hold microseconds."""
        return 0

    def read_sessions(self, keys: Iterable[Key]) -> Iterator[SessionRow]:
        """Yield these sessions' own rows, inside the caller's snapshot."""
        for user, name, state, created, updated in self._read(
            keys,
            "SELECT s.user_id, s.id, s.state, s.create_time, s.update_time FROM temp.keys k"
            " CROSS JOIN sessions s ON s.app_name = ? AND s.user_id = k.u AND s.id = k.i"
            " ORDER BY k.rowid",
        ):
            yield SessionRow(user, name, state, self.micros(created), self.micros(updated))

    def read_events(self, keys: Iterable[Key]) -> Iterator[EventRow]:
        """Yield these sessions' events in ADK's order, inside the caller's snapshot."""
        for user, session, name, invocation, at, data in self._read(
            keys,
            "SELECT e.user_id, e.session_id, e.id, e.invocation_id, e.timestamp, e.event_data"
            " FROM temp.keys k CROSS JOIN events e ON e.app_name = ? AND e.user_id = k.u"
            f" AND e.session_id = k.i ORDER BY k.rowid, {self.event_order}",
        ):
            yield EventRow(user, session, name, invocation, self.micros(at), data)

    def _read(self, keys: Iterable[Key], statement: str) -> Iterator[Any]:
        """Yield rows one by one, text that is not UTF-8 too: whoever looks at it names it."""
        self.choose(keys)
        with self.clean():
            self.connection.text_factory = _forgiving
            try:
                yield from self.connection.execute(statement, (self.app_name,))
            finally:
                self.connection.text_factory = str

    def write_sessions(self, rows: Iterable[SessionRow]) -> None:
        """Add sessions inside the caller's transaction."""
        with self.clean():
            self.connection.executemany(
                "INSERT INTO main.sessions (app_name, user_id, id, state, create_time, update_time)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                ((self.app_name, *row[:3], *map(self.spelled, present(row[3:]))) for row in rows),
            )

    def write_events(self, rows: Iterable[EventRow]) -> None:
        """Add events inside the caller's transaction, in the order in which they come."""
        with self.clean():
            self.connection.executemany(
                "INSERT INTO main.events (app_name, user_id, session_id, id, invocation_id,"
                " timestamp, event_data) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    (self.app_name, *row[:4], *map(self.spelled, present(row[4:5])), row[5])
                    for row in rows
                ),
            )

    # --- writing -------------------------------------------------------------------------

    def delete(self, keys: Collection[Key]) -> int:
        """Delete these sessions and their events; return how many sessions there were."""
        if not keys:
            return 0
        with self.writing():
            return self.remove(keys)

    def delete_unchanged(self, stamps: Mapping[Key, Stamp]) -> list[Key]:
        """Delete those sessions whose stamp is still the given one; return them."""
        same: list[Key] = []
        if stamps:
            with self.writing():
                now = self.read_stamps(stamps)
                same = [key for key in stamps if now.get(key) == stamps[key]]
                self.remove(same)
        return same

    def remove(self, keys: Iterable[Key]) -> int:
        """Delete sessions inside the caller's transaction, events first."""
        self.choose(keys)
        return self.remove_chosen()

    def remove_chosen(self) -> int:
        """Delete the sessions of temp.keys inside the caller's transaction, events first."""
        self.connection.execute(
            "DELETE FROM main.events WHERE rowid IN (SELECT e.rowid FROM temp.keys k CROSS JOIN"
            " main.events e ON e.app_name = ? AND e.user_id = k.u AND e.session_id = k.i)",
            (self.app_name,),
        )
        return self.connection.execute(
            "DELETE FROM main.sessions WHERE rowid IN (SELECT s.rowid FROM temp.keys k CROSS JOIN"
            " main.sessions s ON s.app_name = ? AND s.user_id = k.u AND s.id = k.i)",
            (self.app_name,),
        ).rowcount

    def write_shared(self, rows: Sequence[SharedRow]) -> None:
        """Put these rows' states in place, by value; equal ones are left alone.

        update_time is the store's clock, as ADK would write it; nothing reads it.
        """
        if rows:
            with self.writing():
                self.put_shared(rows)

    def put_shared(self, rows: Sequence[SharedRow]) -> None:
        """Write these states inside the caller's transaction."""
        users = [(self.app_name, row.user_id, row.state) for row in rows if row.user_id is not None]
        apps = [(self.app_name, row.state) for row in rows if row.user_id is None]
        self.connection.executemany(
            "INSERT INTO user_states (app_name, user_id, state, update_time)"
            f" VALUES (?, ?, ?, {self.now}) ON CONFLICT (app_name, user_id) DO UPDATE"
            " SET state = excluded.state, update_time = excluded.update_time"
            " WHERE user_states.state IS NOT excluded.state",
            users,
        )
        self.connection.executemany(
            "INSERT INTO app_states (app_name, state, update_time)"
            f" VALUES (?, ?, {self.now}) ON CONFLICT (app_name) DO UPDATE"
            " SET state = excluded.state, update_time = excluded.update_time"
            " WHERE app_states.state IS NOT excluded.state",
            apps,
        )

    def replace_shared(self, row: SharedRow, was: str) -> bool:
        """Put one state in place if its text still is `was`; return whether it was."""
        # Nobody else writes between the look and the write: this transaction is the writer.
        with self.writing():
            now = self.connection.execute(
                "SELECT state FROM user_states WHERE app_name = :app AND user_id = :user"
                if row.user_id is not None
                else "SELECT state FROM app_states WHERE app_name = :app",
                {"app": self.app_name, "user": row.user_id},
            ).fetchone()
            if (now[0] if now else "{}") != was:
                return False
            self.put_shared([row])
        return True

    def delete_shared(self, user_ids: Collection[str | None]) -> int:
        """Delete the state rows of these users (None: the app's); return how many there were."""
        if not user_ids:
            return 0
        users = [(self.app_name, user) for user in user_ids if user is not None]
        with self.writing():
            gone = self.connection.executemany(
                "DELETE FROM user_states WHERE app_name = ? AND user_id = ?", users
            ).rowcount
            if None in user_ids:
                gone += self.connection.execute(
                    "DELETE FROM app_states WHERE app_name = ?", (self.app_name,)
                ).rowcount
        return max(gone, 0)

    def drop_states(self) -> None:
        """Delete every row of state that a service has left under this app's name."""
        with self.short():
            for table in ("user_states", "app_states"):
                self.connection.execute(f"DELETE FROM {table} WHERE app_name = ?", (self.app_name,))

    def read_stamps(self, keys: Iterable[Key]) -> dict[Key, Stamp]:
        """Read stamps inside the caller's transaction, if there is one."""
        self.choose(keys)
        return self.chosen_stamps("main", self.app_name)

    def chosen_stamps(self, database: str, app_name: str) -> dict[Key, Stamp]:
        """Read the stamps of temp.keys; `database` is main, or source where one is attached.

        In a rehearsal the two have the tenant's sessions under different names.
        """
        found = self.connection.execute(
            f"SELECT {_stamp_columns(database)} FROM temp.keys k CROSS JOIN {database}.sessions s"
            " ON s.app_name = ? AND s.user_id = k.u AND s.id = k.i",
            (app_name,),
        )
        return dict(_stamped(row) for row in found)

    def _framed(self, table: str, alias: str) -> str:
        """List a table's columns, the key's left out, each as its storage class and bytes.

        A REAL as it is: cast, it would be text of 15 digits, and a float has 17.
        """
        own = [
            name
            for name in sorted(self.columns()[table])
            if name not in _KEY_COLUMNS and (table, name) != ("sessions", "id")
        ]
        parts = []
        for column in (f"{alias}.{quote(name)}" for name in own):
            raw = f"CASE typeof({column}) WHEN 'real' THEN {column} ELSE CAST({column} AS BLOB) END"
            parts += [f"typeof({column})", raw]
        return ", ".join(parts)


def copy(source: SqliteStore, target: SqliteStore, keys: Sequence[Key]) -> dict[Key, Copied]:
    """Copy these sessions, bite by bite: each one snapshot of the source, one transaction here.

    The source is attached to the target's connection, so rows go over inside SQLite, to
    the bit and without a detour through Python. Each bite is short: its snapshot
    keeps the source's agents from committing, and its transaction the target's.
    """
    copied: dict[Key, Copied] = {}
    connection = target.connection
    with target.clean():
        connection.execute("ATTACH ? AS source", (sqlite_uri(source.path, "rw"),))
        try:
            # Keys that the source lacks have no size and end in some bite too: their copies go.
            for bite in source.bites(keys):
                target.choose(bite)
                with target.writing():
                    before = target.chosen_stamps("source", source.app_name)
                    target.remove_chosen()
                    for table in ("sessions", "events"):
                        connection.execute(
                            _insert(source, table), (target.app_name, source.app_name)
                        )
                    after = target.chosen_stamps("main", target.app_name)
                for key, stamp in before.items():
                    copied[key] = Copied(stamp, after[key])
        finally:
            connection.execute("DETACH source")
    return copied


def _insert(source: SqliteStore, table: str) -> str:
    names = source.columns()[table]
    listed = ", ".join(quote(name) for name in names)
    # The app's name is given apart: a rehearsal writes under one of its own.
    taken = ", ".join("?" if name == "app_name" else f"r.{quote(name)}" for name in names)
    name = "id" if table == "sessions" else "session_id"
    # Events whose session is gone would break the target's foreign key.
    whole = (
        ""
        if table == "sessions"
        else " JOIN source.sessions s ON s.app_name = r.app_name AND s.user_id = r.user_id"
        " AND s.id = r.session_id"
    )
    # Where events of one time are read in the order of writing, that order goes over too.
    order = f" ORDER BY k.rowid, {source.event_order.replace('e.', 'r.')}"
    ordered = order if table == "events" and source.layout is Layout.ADK_SQLITE else ""
    return (
        f"INSERT INTO main.{table} ({listed}) SELECT {taken} FROM temp.keys k CROSS JOIN"
        f" source.{table} r ON r.app_name = ? AND r.user_id = k.u AND r.{name} = k.i"
        f"{whole}{ordered}"
    )


def _stamp_columns(database: str) -> str:
    """List what a stamp is made of, for sessions `s`; counts and ends come from an index alone."""
    of = (
        f"FROM {database}.events e WHERE e.app_name = s.app_name"
        " AND e.user_id = s.user_id AND e.session_id = s.id"
    )
    return (
        "s.user_id, s.id, s.update_time, switchyard_crc(CAST(s.state AS BLOB)),"
        f" (SELECT count(*) {of}), (SELECT max(e.timestamp) {of}), (SELECT max(e.id) {of})"
    )


def _stamped(row: Sequence[Any]) -> tuple[Key, Stamp]:
    """Make a stamp: update_time, event count, a checksum of the state and the last event's names.

    There is no xmin here. The checksum sees an edit of the state in place, and an event
    in exchange for another; an edit of an event in place stays invisible.
    """
    user, name, updated, state, count, last_time, last_id = row
    check = zlib.crc32(repr((state, last_time, last_id)).encode("utf-8", "surrogatepass"))
    return Key(user, name), f"{updated}/{count}/{check:08x}"


def _forgiving(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _hash_row(values: Sequence[Any]) -> bytes:
    total = hashlib.sha256()
    for value in values:
        raw = b"" if value is None else value if isinstance(value, bytes) else str(value).encode()
        total.update(len(raw).to_bytes(8, "big"))
        total.update(raw)
    return total.digest()


def _shared(user_id: str | None, state: Any) -> SharedRow:
    return SharedRow(user_id, state, hashlib.sha256(str(state).encode()).hexdigest())


def _plain(names: Sequence[str], row: Sequence[Any]) -> dict[str, Any]:
    event = dict(zip(names, row, strict=True))
    event["event_data"] = _loads(event["event_data"])
    return event


def _loads(text: Any) -> Any:
    """Read JSON; what is not JSON is shown as it stands, for naming a difference."""
    try:
        return None if text is None else json.loads(text)
    except (TypeError, ValueError):
        return text
