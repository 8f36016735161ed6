"""ADK's session tables on PostgreSQL: rows by `app_name`, binary COPY in and out."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from psycopg import sql

from migrations_app.domain import canonical, values
from migrations_app.domain.canonical import EventRow, SessionRow, present
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
from migrations_app.ports.bites import in_bites
from migrations_app.ports.postgres_guard import PostgresGuard
from migrations_app.ports.postgres_link import BY_INDEX, SHORT, SNAPSHOT, WHOLE, key_params

# A page of so many sessions is long: it is read in another way.
MANY = 10_000
# What is written to a COPY at a time.
BLOCK_BYTES = 65_536

_KEYS = "unnest(%(users)s::text[], %(ids)s::text[]) AS k (u, i)"
_SESSIONS_OF_KEYS = (
    _KEYS + " CROSS JOIN LATERAL (SELECT *, xmin FROM {sessions}"
    " WHERE app_name = %(app)s AND user_id = k.u AND id = k.i OFFSET 0) s"
)
_EVENTS_OF_SESSION = "e.app_name = s.app_name AND e.user_id = s.user_id AND e.session_id = s.id"
# Three parts that change when the session does. update_time alone is the last event's client time:
# not monotonic, blind to equal times and to edits in place. The sum of xmin sees every write by
# anybody; FREEZE, VACUUM FULL and row locks leave it (tried).
_STAMP = "concat_ws('/', s.update_time::text, {n}, s.xmin::text::bigint + {x})"
_COUNT_OF_SESSION = (
    "LATERAL (SELECT count(*) AS n, coalesce(sum(e.xmin::text::bigint), 0) AS x"
    " FROM {events} e WHERE " + _EVENTS_OF_SESSION + ") c"
)
_STAMP_OF_SESSION = _STAMP.format(n="c.n", x="c.x")


class PostgresStore(PostgresGuard):
    """One tenant's side of one PostgreSQL store."""

    # --- looking -------------------------------------------------------------------------

    def survey(self) -> Survey:
        """Say what the store is and holds; changes nothing."""
        from migrations_app.ports.postgres_survey import survey

        return survey(self)

    def counts(self) -> Counts:
        """Count sessions and users of the tenant."""
        if not self.has_tables:
            return Counts(0, 0)
        with self.transaction(f"{SNAPSHOT}; {WHOLE}"):
            row = self.rows(
                "SELECT (SELECT count(*) FROM {sessions} WHERE app_name = %(app)s),"
                " (SELECT count(*) FROM (SELECT user_id FROM {sessions} WHERE app_name = %(app)s"
                " UNION SELECT user_id FROM {user_states} WHERE app_name = %(app)s) u),"
                " (SELECT count(*) FROM (SELECT DISTINCT user_id FROM {sessions}"
                " WHERE app_name = %(app)s) s)"
            )[0]
        return Counts(*row)

    def page(self, after: Key, limit: int) -> list[tuple[Key, Stamp]]:
        """Return up to `limit` sessions behind `after`, in the primary key's order."""
        if not self.has_tables:
            return []
        behind = "" if after == START else " AND (user_id, id) > (%(user)s, %(id)s)"
        if limit >= MANY:
            return self._many(after, limit, behind)
        with self.transaction(f"{SNAPSHOT}; {BY_INDEX}"):
            found = self.rows(
                f"SELECT s.user_id, s.id, {_STAMP_OF_SESSION} FROM"
                " (SELECT app_name, user_id, id, update_time, xmin FROM {sessions}"
                f" WHERE app_name = %(app)s{behind} ORDER BY user_id, id LIMIT %(limit)s) s"
                f" CROSS JOIN {_COUNT_OF_SESSION} ORDER BY s.user_id, s.id",
                {"user": after.user_id, "id": after.session_id, "limit": limit},
            )
        return [(Key(user, name), stamp) for user, name, stamp in found]

    def _many(self, after: Key, limit: int, behind: str) -> list[tuple[Key, Stamp]]:
        """Return a long page: its events are counted in one go, not session by session.

        A quarter of the time, for a reader that has no live tenant to spare.
        """
        stamp = _STAMP.format(n="coalesce(c.n, 0)", x="coalesce(c.x, 0)")
        events_behind = behind.replace("(user_id, id)", "(user_id, session_id)")
        with self.transaction(f"{SNAPSHOT}; {WHOLE}"):
            found = self.rows(
                "WITH s AS MATERIALIZED (SELECT user_id, id, update_time, xmin FROM {sessions}"
                f" WHERE app_name = %(app)s{behind} ORDER BY user_id, id LIMIT %(limit)s)"
                f" SELECT s.user_id, s.id, {stamp} FROM s LEFT JOIN (SELECT user_id, session_id,"
                " count(*) AS n, sum(xmin::text::bigint) AS x FROM {events}"
                f" WHERE app_name = %(app)s{events_behind} AND (user_id, session_id) <="
                " (SELECT user_id, id FROM s ORDER BY user_id DESC, id DESC LIMIT 1)"
                " GROUP BY user_id, session_id) c"
                " ON c.user_id = s.user_id AND c.session_id = s.id ORDER BY s.user_id, s.id",
                {"user": after.user_id, "id": after.session_id, "limit": limit},
            )
        return [(Key(user, name), stamp) for user, name, stamp in found]

    def stamps(self, keys: Collection[Key]) -> dict[Key, Stamp]:
        """Return the stamps of those sessions that exist."""
        if not keys or not self.has_tables:
            return {}
        with self.transaction(f"{SNAPSHOT}; {BY_INDEX}"):
            return self.read_stamps(list(keys))

    def read_stamps(self, keys: Sequence[Key]) -> dict[Key, Stamp]:
        """Read stamps inside the caller's transaction."""
        found = self.rows(
            f"SELECT s.user_id, s.id, {_STAMP_OF_SESSION} FROM {_SESSIONS_OF_KEYS}"
            f" CROSS JOIN {_COUNT_OF_SESSION}",
            key_params(keys),
        )
        return {Key(user, name): stamp for user, name, stamp in found}

    def digests(self, keys: Collection[Key]) -> dict[Key, Digest]:
        """Return strict SHA-256 digests, computed in the database.

        Of a session: state, create_time, update_time. Of its events: every column, in
        the order in which ADK reads them, which is the database's own: where two
        databases sort equal times differently the digests differ too. record_send frames
        each row (lengths, NULL apart from JSON null, times to the bit); each event is hashed
        before they are joined, so a long session costs no memory.
        """
        if not keys or not self.has_tables:
            return {}
        with self.transaction(f"{SNAPSHOT}; {BY_INDEX}"):
            found = self.rows(
                "SELECT s.user_id, s.id,"
                f" encode(sha256(record_send(ROW({self._framed('sessions', 's')}))), 'hex'),"
                " encode(sha256(coalesce(c.rows, '')), 'hex'),"
                f" {_STAMP_OF_SESSION} FROM {_SESSIONS_OF_KEYS}"
                " CROSS JOIN LATERAL (SELECT count(*) AS n,"
                " coalesce(sum(e.xmin::text::bigint), 0) AS x,"
                f" string_agg(sha256(record_send(ROW({self._framed('events', 'e')}))), ''::bytea"
                " ORDER BY e.timestamp, e.id) AS rows"
                f" FROM {{events}} e WHERE {_EVENTS_OF_SESSION}) c",
                key_params(list(keys)),
            )
        return {
            Key(user, name): Digest(state, events, stamp)
            for user, name, state, events, stamp in found
        }

    def session(self, key: Key) -> Mapping[str, Any] | None:
        """Return one session as plain data, events in ADK's order."""
        if not self.has_tables:
            return None
        with self.transaction(f"{SNAPSHOT}; {BY_INDEX}"):
            head = self.rows(
                "SELECT s.state::text, s.create_time::text, s.update_time::text"
                f" FROM {_SESSIONS_OF_KEYS}",
                key_params([key]),
            )
            if not head:
                return None
            own = [
                c
                for c in self.columns()["events"]
                if c not in ("app_name", "user_id", "session_id")
            ]
            columns = sql.SQL(", ").join(
                sql.SQL("{}::text").format(sql.Identifier("e", name)) for name in own
            )
            events = self.run(
                f"SELECT {{columns}} FROM {_SESSIONS_OF_KEYS} CROSS JOIN LATERAL (SELECT * FROM"
                f" {{events}} e WHERE {_EVENTS_OF_SESSION} OFFSET 0) e"
                " ORDER BY e.timestamp, e.id",
                key_params([key]),
                columns=columns,
            ).fetchall()
        state, created, updated = head[0]
        return {
            "state": json.loads(state),
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
        behind = "" if not after else " AND user_id > %(after)s"
        users = (
            "(SELECT {distinct} user_id FROM {{{table}}} WHERE app_name = %(app)s"
            f"{behind} ORDER BY user_id LIMIT %(limit)s)"
        )
        with self.transaction(f"{SNAPSHOT}; {BY_INDEX}"):
            # Each branch stops by itself at `limit` users of its index.
            found = self.rows(
                f"SELECT u.user_id, {_SHARED} FROM (SELECT user_id FROM ("
                + users.format(distinct="", table="user_states")
                + " UNION "
                + users.format(distinct="DISTINCT", table="sessions")
                + ") b ORDER BY user_id LIMIT %(limit)s) u"
                + _USER_STATE.format(user="u.user_id")
                + " ORDER BY u.user_id",
                {"after": after, "limit": limit - len(rows)},
            )
        return rows + [SharedRow(*row) for row in found]

    def shared(self, user_ids: Collection[str | None]) -> dict[str | None, SharedRow]:
        """Return the shared state of these users; None asks for the app's.

        Whoever has neither a row nor a session is absent: a user, and the app itself.
        """
        if not user_ids or not self.has_tables:
            return {}
        users = [user for user in user_ids if user is not None]
        with self.transaction(f"{SNAPSHOT}; {BY_INDEX}"):
            found = (
                self.rows(
                    f"SELECT k.u, {_SHARED} FROM unnest(%(users)s::text[]) AS k (u)"
                    + _USER_STATE.format(user="k.u")
                    + " WHERE t.user_id IS NOT NULL OR EXISTS (SELECT 1 FROM {sessions} s"
                    " WHERE s.app_name = %(app)s AND s.user_id = k.u)",
                    {"users": users},
                )
                if users
                else []
            )
            if None in user_ids:
                found += self.rows(
                    f"SELECT NULL, {_SHARED} FROM (SELECT 1) one"
                    " LEFT JOIN {app_states} t ON t.app_name = %(app)s"
                    " WHERE t.app_name IS NOT NULL"
                    " OR EXISTS (SELECT 1 FROM {sessions} s WHERE s.app_name = %(app)s)"
                )
        return {row[0]: SharedRow(*row) for row in found}

    def last_changes(
        self, user_id: str | None, keys: Collection[str], own: Own
    ) -> dict[str, Change]:
        """Return the last event that set each of these keys of shared state, where one is found."""
        # Others, such as an SQLite store may ask for, no event here can have set.
        held = [key for key in keys if not any(c == "\0" or "\ud800" <= c <= "\udfff" for c in key)]
        named = {shared_key(user_id, key): key for key in held}
        if not self.has_tables or not named:
            return {}
        rows = self.rows(
            "WITH found AS MATERIALIZED ("
            "SELECT user_id, session_id, timestamp,"
            " event_data -> 'actions' -> 'state_delta' AS delta FROM {events}"
            " WHERE app_name = %(app)s"
            " AND jsonb_exists_any(event_data -> 'actions' -> 'state_delta', %(keys)s::text[])"
            + (" AND user_id = %(user)s" if user_id is not None else "")
            + " ORDER BY timestamp DESC LIMIT %(most)s)"
            " SELECT key, user_id, session_id, to_char(timestamp, 'YYYY-MM-DD HH24:MI:SS.US'),"
            " (delta -> key)::text"
            " FROM found, unnest(%(keys)s::text[]) AS key WHERE jsonb_exists(delta, key)"
            " ORDER BY timestamp DESC",
            {"user": user_id, "keys": list(named), "most": CHANGES_MOST},
        )
        return youngest(
            (
                (named[key], Key(user, session), micros, text)
                for key, user, session, at, text in rows
                if (micros := canonical.micros_of_text(at)) is not None
            ),
            own,
        )

    def mark(self) -> str:
        """Return the `Mark` of every stamp and all shared state, in one snapshot.

        Summed where the rows are: read by a cursor it took twice as long, and the fence waits
        for it.
        """
        total = Mark()
        if not self.has_tables:
            return str(total)
        stamp = _STAMP.format(n="coalesce(c.n, 0)", x="coalesce(c.x, 0)")
        with self.transaction(f"{SNAPSHOT}; {WHOLE}"):
            [sums] = self.rows(
                _summed(
                    f"'s' || {_framed('s.user_id')} || {_framed('s.id')} || {stamp}",
                    "{sessions} s LEFT JOIN (SELECT user_id, session_id, count(*) AS n,"
                    " sum(xmin::text::bigint) AS x FROM {events} WHERE app_name = %(app)s"
                    " GROUP BY user_id, session_id) c"
                    " ON c.user_id = s.user_id AND c.session_id = s.id"
                    " WHERE s.app_name = %(app)s",
                )
            )
            total.add_sessions(*map(int, sums))
            for table, whose in (
                ("user_states", f"'u' || {_framed('t.user_id')}"),
                ("app_states", "'a'"),
            ):
                [sums] = self.rows(
                    _summed(
                        f"{whose} || {_SHARED_DIGEST}",
                        f"{{{table}}} t WHERE t.app_name = %(app)s AND t.state::text <> '{{{{}}}}'",
                    )
                )
                total.add_shared(*map(int, sums))
        return str(total)

    # --- writing -------------------------------------------------------------------------

    def delete(self, keys: Collection[Key]) -> int:
        """Delete these sessions and their events; return how many sessions there were."""
        if not keys:
            return 0

        def work() -> int:
            with self.writing():
                return self.remove(list(keys))

        return self.attempt(work)

    def remove(self, keys: Sequence[Key]) -> int:
        """Delete sessions inside the caller's transaction, events first.

        Not left to ON DELETE CASCADE: that is one statement a session.
        """
        self.connection.execute(BY_INDEX)
        gone = 0
        for table, name in (("events", "session_id"), ("sessions", "id")):
            # Joined by ctid alone, which the fenced lookup finds by index. Were the keys compared
            # once more, the planner would take that comparison and read the whole tenant.
            # Partitions of a table each have their own ctids, hence tableoid.
            gone = self.run(
                f"DELETE FROM {{{table}}} d USING (SELECT r.part, r.at FROM {_KEYS} CROSS JOIN"
                f" LATERAL (SELECT tableoid AS part, ctid AS at FROM {{{table}}}"
                f" WHERE app_name = %(app)s AND user_id = k.u AND {name} = k.i OFFSET 0) r"
                " OFFSET 0) f WHERE d.ctid = f.at AND d.tableoid = f.part",
                key_params(keys),
            ).rowcount
        return gone

    def delete_unchanged(self, stamps: Mapping[Key, Stamp]) -> list[Key]:
        """Delete those sessions whose stamp is still the given one; return them.

        Rows are locked before their stamps are read (a lock does not change xmin): the
        session's row keeps out appends, for an event's foreign key asks for it; the
        events' rows keep out edits in place.
        """
        if not stamps:
            return []
        keys = list(stamps)

        def work() -> list[Key]:
            with self.writing():
                self.connection.execute(BY_INDEX)
                for table, name in (("sessions", "id"), ("events", "session_id")):
                    self.run(
                        f"SELECT count(*) FROM {_KEYS} CROSS JOIN LATERAL"
                        f" (SELECT 1 FROM {{{table}}} WHERE app_name = %(app)s"
                        f" AND user_id = k.u AND {name} = k.i OFFSET 0 FOR UPDATE) r",
                        key_params(keys),
                    )
                now = self.read_stamps(keys)
                same = [key for key in keys if now.get(key) == stamps[key]]
                if same:
                    self.remove(same)
                return same

        return self.attempt(work)

    def write_shared(self, rows: Sequence[SharedRow]) -> None:
        """Put these rows' states in place, by value; equal ones are left alone.

        update_time is the store's now(), as ADK would write it; nothing reads it.
        """
        users = [row for row in rows if row.user_id is not None]
        apps = [row for row in rows if row.user_id is None]

        def work() -> None:
            with self.writing():
                self.run(
                    "INSERT INTO {user_states} AS t (app_name, user_id, state, update_time)"
                    " SELECT %(app)s, k.u, k.s::jsonb, now()"
                    " FROM unnest(%(users)s::text[], %(states)s::text[]) AS k (u, s)"
                    # One order for everybody who locks several users.
                    ' ORDER BY k.u COLLATE "C"'
                    " ON CONFLICT (app_name, user_id) DO UPDATE"
                    " SET state = excluded.state, update_time = excluded.update_time"
                    " WHERE t.state::text <> excluded.state::text",
                    {
                        "users": [row.user_id for row in users],
                        "states": [values.for_postgres(row.state) for row in users],
                    },
                )
                for row in apps:
                    self.run(
                        "INSERT INTO {app_states} AS t (app_name, state, update_time)"
                        " VALUES (%(app)s, %(state)s::jsonb, now())"
                        " ON CONFLICT (app_name) DO UPDATE"
                        " SET state = excluded.state, update_time = excluded.update_time"
                        " WHERE t.state::text <> excluded.state::text",
                        {"state": values.for_postgres(row.state)},
                    )

        if rows:
            self.attempt(work)

    def replace_shared(self, row: SharedRow, was: str) -> bool:
        """Put one state in place if its text still is `was`; return whether it was."""
        users = row.user_id is not None
        table, columns, named = (
            ("{user_states}", "app_name, user_id", "%(app)s, %(user)s")
            if users
            else ("{app_states}", "app_name", "%(app)s")
        )
        params = {"user": row.user_id, "state": values.for_postgres(row.state), "was": was}

        def work() -> bool:
            with self.writing():
                if was == "{}":
                    self.run(
                        f"INSERT INTO {table} ({columns}, state, update_time)"
                        f" VALUES ({named}, '{{{{}}}}', now()) ON CONFLICT DO NOTHING",
                        params,
                    )
                # Behind another writer's lock the condition is looked at once more.
                changed = self.run(
                    f"UPDATE {table} SET state = %(state)s::jsonb, update_time = now()"
                    " WHERE app_name = %(app)s AND state::text = %(was)s"
                    + (" AND user_id = %(user)s" if users else ""),
                    params,
                )
            return changed.rowcount == 1

        return self.attempt(work)

    def delete_shared(self, user_ids: Collection[str | None]) -> int:
        """Delete the state rows of these users (None: the app's); return how many there were."""
        users = [user for user in user_ids if user is not None]

        def work() -> int:
            with self.writing():
                gone = self.run(
                    "DELETE FROM {user_states} WHERE app_name = %(app)s"
                    " AND user_id = ANY(%(users)s::text[])",
                    {"users": users},
                ).rowcount
                if None in user_ids:
                    gone += self.run("DELETE FROM {app_states} WHERE app_name = %(app)s").rowcount
                return gone

        return self.attempt(work) if user_ids else 0

    def drop_states(self) -> None:
        """Delete every row of state that a service has left under this app's name."""
        with self.transaction(SHORT):
            self.run("DELETE FROM {user_states} WHERE app_name = %(app)s")
            self.run("DELETE FROM {app_states} WHERE app_name = %(app)s")

    # --- rows for a store of another kind ------------------------------------------------

    def snapshot(self) -> AbstractContextManager[None]:
        """Run the body on one snapshot of the database."""
        return self.transaction(f"{SNAPSHOT}; {BY_INDEX}")

    def fine_times(self) -> int:
        """Return 0: the columns hold microseconds."""
        return 0

    def bites(self, keys: Sequence[Key]) -> Iterator[list[Key]]:
        """Split keys so that each bite's events are a few megabytes of text."""
        with self.snapshot():
            sizes = self.rows(
                "SELECT k.u, k.i, (SELECT coalesce(sum(octet_length(e.event_data::text)), 0)"
                " FROM {events} e WHERE e.app_name = %(app)s AND e.user_id = k.u"
                f" AND e.session_id = k.i) FROM {_KEYS}",
                key_params(keys),
            )
        return in_bites(sizes)

    def read_sessions(self, keys: Sequence[Key]) -> Iterator[SessionRow]:
        """Yield these sessions' own rows, inside the caller's snapshot."""
        for user, name, state, created, updated in self._read(
            "SELECT s.user_id::text, s.id::text, s.state::text, s.create_time::text,"
            f" s.update_time::text FROM {_SESSIONS_OF_KEYS}",
            keys,
            columns=5,
        ):
            micros = canonical.micros_of_text
            yield SessionRow(user, name, state, micros(created), micros(updated))

    def read_events(self, keys: Sequence[Key]) -> Iterator[EventRow]:
        """Yield these sessions' events in ADK's order, inside the caller's snapshot."""
        for user, session, name, invocation, at, data in self._read(
            "SELECT e.user_id::text, e.session_id::text, e.id::text, e.invocation_id::text,"
            f" e.timestamp::text, e.event_data::text FROM {_KEYS} CROSS JOIN LATERAL"
            " (SELECT * FROM {events} WHERE app_name = %(app)s AND user_id = k.u"
            # Each session by its index, in which they stand in that order.
            " AND session_id = k.i ORDER BY timestamp, id OFFSET 0) e",
            keys,
            columns=6,
        ):
            micros = canonical.micros_of_text(at)
            yield EventRow(user, session, name, invocation, micros, data)

    def _read(self, query: str, keys: Sequence[Key], *, columns: int) -> Iterator[Any]:
        statement = self.fill(f"COPY ({query}) TO STDOUT (FORMAT binary)")
        params = {"app": self.app_name, **key_params(keys)}
        with (
            self.clean(),
            self.connection.cursor() as cursor,
            cursor.copy(statement, params) as out,
        ):
            out.set_types(["text"] * columns)
            yield from out.rows()

    def write_sessions(self, rows: Iterable[SessionRow]) -> None:
        """Add sessions inside the caller's transaction."""
        self._write(
            "sessions (app_name, user_id, id, state, create_time, update_time)",
            (
                (
                    self.app_name,
                    *row[:2],
                    values.for_postgres(row.state),
                    *map(canonical.text_of_micros, present(row[3:])),
                )
                for row in rows
            ),
        )

    def write_events(self, rows: Iterable[EventRow]) -> None:
        """Add events inside the caller's transaction."""
        self._write(
            "events (app_name, user_id, session_id, id, invocation_id, timestamp, event_data)",
            (
                (
                    self.app_name,
                    *row[:4],
                    *map(canonical.text_of_micros, present(row[4:5])),
                    None if row.event_data is None else values.for_postgres(row.event_data),
                )
                for row in rows
            ),
        )

    def _write(self, into: str, rows: Iterable[tuple[Any, ...]]) -> None:
        table, _, columns = into.partition(" ")
        statement = self.fill(f"COPY {{{table}}} {columns} FROM STDIN")
        with self.clean(), self.connection.cursor() as cursor, cursor.copy(statement) as copying:
            for row in rows:
                copying.write_row(row)

    # --- copying -------------------------------------------------------------------------

    def stream(
        self, table: str, keys: Sequence[Key], *, into: str
    ) -> Iterator[bytes | bytearray | memoryview]:
        """Yield the binary COPY of these sessions' rows, inside the caller's snapshot.

        `into` is the app's name there: the tenant's own, or a rehearsal's.
        """
        name = "id" if table == "sessions" else "session_id"
        columns = sql.SQL(", ").join(
            sql.SQL("%(into)s::text") if name == "app_name" else sql.Identifier("r", name)
            for name in self.columns()[table]
        )
        statement = self.fill(
            f"COPY (SELECT {{columns}} FROM {_KEYS} CROSS JOIN LATERAL (SELECT * FROM {{{table}}}"
            f" WHERE app_name = %(app)s AND user_id = k.u AND {name} = k.i OFFSET 0) r)"
            " TO STDOUT (FORMAT binary)",
            columns=columns,
        )
        params = {"app": self.app_name, "into": into, **key_params(keys)}
        with (
            self.clean(),
            self.connection.cursor() as cursor,
            cursor.copy(statement, params) as out,
        ):
            yield from out

    def _framed(self, table: str, alias: str) -> str:
        """List a table's columns for ROW(): the key's left out, types the same on every server.

        Types that ADK's schema does not name go as text: their numbers differ by database.
        """
        parts = []
        for name, kind in sorted(self.columns()[table].items()):
            if name in ("app_name", "user_id", "session_id") or (table, name) == ("sessions", "id"):
                continue
            column = sql.Identifier(alias, name).as_string(self.connection)
            exact = kind in ("jsonb", "timestamp")
            parts.append(column if exact else f"{column}::text")
        # A column's name may hold a brace or a percent sign; it is about to be a template.
        return ", ".join(parts).replace("{", "{{").replace("}", "}}").replace("%", "%%")


_USER_STATE = (
    " LEFT JOIN LATERAL (SELECT user_id, state FROM {{user_states}}"
    " WHERE app_name = %(app)s AND user_id = {user} OFFSET 0) t ON true"
)
# State text and its digest; a missing row reads as '{{}}' (a template: braces are doubled).
_SHARED_DIGEST = "encode(sha256(convert_to(coalesce(t.state::text, '{{}}'), 'UTF8')), 'hex')"
_SHARED = f"coalesce(t.state::text, '{{{{}}}}'), {_SHARED_DIGEST}"


def copy(source: PostgresStore, target: PostgresStore, keys: Sequence[Key]) -> dict[Key, Copied]:
    """Copy these sessions: one snapshot of the source, one transaction at the target.

    Rows stream from COPY to COPY, so memory stays the same however long a session is,
    and no value is decoded on the way.
    """

    def work() -> dict[Key, Copied]:
        # The guard first: waiting for it must not hold a snapshot of the source open.
        with target.writing(), source.transaction(f"{SNAPSHOT}; {BY_INDEX}"):
            before = source.read_stamps(keys)
            # Before any insert, so that a run that is repeated, and a session that has lost
            # events, end the same; keys that vanished at the source go with it.
            target.remove(keys)
            there = list(before)
            if there:
                # Sessions first: the events' foreign key.
                for table in ("sessions", "events"):
                    _pipe(source, target, table, there)
            after = target.read_stamps(there)
            return {key: Copied(before[key], after[key]) for key in there}

    return target.attempt(work)


def _pipe(source: PostgresStore, target: PostgresStore, table: str, keys: Sequence[Key]) -> None:
    columns = sql.SQL(", ").join(sql.Identifier(name) for name in source.columns()[table])
    statement = target.fill(
        f"COPY {{{table}}} ({{columns}}) FROM STDIN (FORMAT binary)", columns=columns
    )
    with target.clean(), target.connection.cursor() as cursor, cursor.copy(statement) as into:
        # psycopg hands out a row at a time; fewer, larger writes save a tenth of the time.
        block = bytearray()
        for data in source.stream(table, keys, into=target.app_name):
            block += data
            if len(block) >= BLOCK_BYTES:
                into.write(bytes(block))
                block.clear()
        into.write(bytes(block))


def _plain(names: Sequence[str], row: Sequence[Any]) -> dict[str, Any]:
    event = dict(zip(names, row, strict=True))
    if event["event_data"] is not None:
        event["event_data"] = json.loads(event["event_data"])
    return event


def _summed(text: str, rows: str) -> str:
    """Return a query for the number of `rows` and the sums of their digests, as `Mark` adds."""
    return (
        "SELECT count(*), coalesce(sum(('x' || substr(h, 1, 16))::bit(64)::bigint::numeric), 0),"
        " coalesce(sum(('x' || substr(h, 17, 16))::bit(64)::bigint::numeric), 0) FROM"
        f" (SELECT encode(sha256(convert_to({text}, 'UTF8')), 'hex') AS h FROM {rows} OFFSET 0) d"
    )


def _framed(column: str) -> str:
    return f"octet_length(convert_to({column}, 'UTF8')) || ':' || {column}"
