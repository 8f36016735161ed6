"""ADK's session tables in an SQLite file: one writer, no server.

Readers of a file in journal mode `delete` keep its writers waiting, so everything
here reads and writes in bites of a few megabytes. The mode itself is never changed:
the file is not ours.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from durable.machine import Overtaken
from migrations_app.ports import schema
from migrations_app.ports.address import Sqlite, sqlite_uri
from migrations_app.ports.base import (
    START,
    CannotHold,
    Copied,
    Counts,
    Digest,
    Guard,
    GuardTaken,
    Key,
    NotASessionStore,
    SharedRow,
    Stamp,
    StoreBusy,
    StoreFailed,
    Survey,
    Unreachable,
    WrongCredentials,
)

# How long to wait for the writer's seat, where nobody stands behind us, and how long a COMMIT waits
# for readers to leave, behind which new readers wait too.
WAIT_SECONDS = 3.0
COMMIT_SECONDS = 1.0
# Between two tries for the writer's seat. SQLite's own waiters sleep up to 100 ms between theirs,
# and nobody queues: who looks more often gets in, which is how closing is not starved.
LOOK_SECONDS = 0.001
# A bite's size: a snapshot of 8 s made a live turn fail with "database is locked" (tried); the
# bound is 0.5 s, and a bite this big takes about a tenth of it.
BITE_BYTES = 4_000_000
BITE_KEYS = 250

_GUARD_TABLE = """
CREATE TABLE IF NOT EXISTS switchyard_guard (
  app_name TEXT PRIMARY KEY,
  move INTEGER NOT NULL,
  claim INTEGER NOT NULL,
  mover INTEGER NOT NULL,
  agents INTEGER NOT NULL,
  writing INTEGER NOT NULL DEFAULT 0
)"""
_NONCE_TABLE = """
CREATE TABLE IF NOT EXISTS switchyard_nonce (
  nonce TEXT PRIMARY KEY,
  written_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP
)"""

_STATE_COLUMNS = ("state", "create_time", "update_time")
_KEY_COLUMNS = ("app_name", "user_id", "session_id")


class SqliteStore:
    """One tenant's side of one SQLite file."""

    dialect = "sqlite"

    def __init__(
        self, address: Sqlite, *, reference: str, app_name: str, move: int, claim: int
    ) -> None:
        self.where = reference
        self.app_name = app_name
        self.move = move
        self.claim = claim
        self.path = address.path
        self._columns: dict[str, tuple[str, ...]] | None = None
        self.connection = self._connect()

    def close(self) -> None:
        """End the connection; an open transaction is rolled back."""
        self.connection.close()

    # --- opening, statements, errors -----------------------------------------------------

    def _connect(self, *, create: bool = False) -> sqlite3.Connection:
        try:
            folder, file = Path(self.path).parent.is_dir(), Path(self.path).exists()
        except (OSError, ValueError):
            # A folder that may not be looked into, or no name at all; the error quotes the path.
            folder = file = False
        if not folder:
            raise Unreachable(
                f"The folder of {self.where} can't be looked into from here. A store in a file is"
                " reached only where the file is: mount it, or correct the address."
            )
        # A file that is not there yet is an empty store; looking must not make it.
        there = create or file
        with self.clean():
            connection = sqlite3.connect(
                # rw and not ro: what a killed writer left (a hot journal) can't be read without
                # first rolling it back.
                sqlite_uri(self.path, "rwc" if create else "rw") if there else ":memory:",
                uri=there,
                timeout=WAIT_SECONDS,
                isolation_level=None,
                check_same_thread=False,
            )
            try:
                connection.execute("PRAGMA foreign_keys = ON")
                connection.execute("PRAGMA temp_store = MEMORY")
                connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
                connection.create_function("switchyard_crc", 1, _crc, deterministic=True)
            except BaseException:
                connection.close()
                raise
        self.is_file = there
        return connection

    def rows(self, statement: str, params: Sequence[Any] | Mapping[str, Any] = ()) -> list[Any]:
        """Run one statement and return its rows."""
        with self.clean():
            return self.connection.execute(statement, params).fetchall()

    @contextmanager
    def clean(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, UnicodeError) as error:
            raise _clean(error, self.where) from None

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[None]:
        """Run the body between `begin` and COMMIT; any error rolls back."""
        with self.clean():
            self._patiently(begin)
            try:
                yield
                # In journal mode `delete` COMMIT waits until the last reader has left.
                self._patiently("COMMIT", seconds=COMMIT_SECONDS)
            except BaseException:
                with suppress(sqlite3.Error):
                    self.connection.execute("ROLLBACK")
                raise

    def _patiently(
        self, statement: str, params: Sequence[Any] = (), *, seconds: float = WAIT_SECONDS
    ) -> sqlite3.Cursor:
        end = time.monotonic() + seconds
        self.connection.execute("PRAGMA busy_timeout = 0")
        try:
            while True:
                try:
                    return self.connection.execute(statement, params)
                except sqlite3.OperationalError as error:
                    if not _is_busy(error) or time.monotonic() >= end:
                        raise
                time.sleep(LOOK_SECONDS)
        finally:
            self.connection.execute(f"PRAGMA busy_timeout = {int(WAIT_SECONDS * 1000)}")

    def _short(self) -> Any:
        return self._transaction("BEGIN IMMEDIATE")

    def _snapshot(self) -> Any:
        return self._transaction("BEGIN")

    # --- what is there -------------------------------------------------------------------

    def columns(self) -> dict[str, tuple[str, ...]]:
        """Return {table: columns} of those ADK tables that exist, read once a handle."""
        if self._columns is None:
            found: dict[str, tuple[str, ...]] = {}
            for table in schema.TABLES:
                if names := tuple(row[1] for row in self.rows(f"PRAGMA table_info({table})")):
                    found[table] = names
            self._columns = found
        return self._columns

    @property
    def has_tables(self) -> bool:
        return set(self.columns()) == set(schema.TABLES)

    def exists(self, table: str) -> bool:
        """Whether a table is there."""
        return bool(
            self.rows("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", (table,))
        )

    # --- looking -------------------------------------------------------------------------

    def survey(self) -> Survey:
        """Say what the store is and holds; changes nothing."""
        from migrations_app.ports.sqlite_survey import survey

        return survey(self)

    def guard(self) -> Guard | None:
        """Return the tenant's guard row; None if there is none, or no guard table."""
        if not self.exists("switchyard_guard"):
            return None
        found = self.rows(
            "SELECT move, claim, mover, agents FROM switchyard_guard WHERE app_name = ?",
            (self.app_name,),
        )
        if not found:
            return None
        move, claim, mover, agents = found[0]
        return Guard(move, claim, bool(mover), bool(agents))

    def counts(self) -> Counts:
        """Count sessions and users of the tenant."""
        if not self.has_tables:
            return Counts(0, 0)
        row = self.rows(
            "SELECT (SELECT count(*) FROM sessions WHERE app_name = :app),"
            " (SELECT count(*) FROM (SELECT user_id FROM sessions WHERE app_name = :app"
            " UNION SELECT user_id FROM user_states WHERE app_name = :app))",
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
        with self.choosing(list(keys)), self.clean():
            return self.read_stamps("main")

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
            with self.choosing(bite), self._snapshot():
                stamps = self.read_stamps("main")
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
                    " AND e.session_id = k.i ORDER BY k.rowid, e.timestamp, e.id",
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
        with self._snapshot():
            head = self.rows(
                "SELECT state, create_time, update_time FROM sessions"
                " WHERE app_name = ? AND user_id = ? AND id = ?",
                (self.app_name, *key),
            )
            if not head:
                return None
            own = [name for name in self.columns()["events"] if name not in _KEY_COLUMNS]
            quoted = ", ".join(_quote(name) for name in own)
            events = self.rows(
                f"SELECT {quoted} FROM events WHERE app_name = ? AND user_id = ?"
                " AND session_id = ? ORDER BY timestamp, id",
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
            with self.choosing([Key(user, "") for user in users]):
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

    def mark(self) -> str:
        """Return one digest over every stamp and all shared state, in one snapshot."""
        total = hashlib.sha256()
        if not self.has_tables:
            return total.hexdigest()
        app = (self.app_name,)
        with self._snapshot():
            for row in self.connection.execute(
                f"SELECT {_stamp_columns('main')} FROM sessions s WHERE s.app_name = ?"
                " ORDER BY s.user_id, s.id",
                app,
            ):
                key, stamp = _stamped(row)
                total.update(_hash_row(["session", *key, stamp]))
            for row in self.connection.execute(
                "SELECT user_id, state FROM user_states WHERE app_name = ? ORDER BY user_id", app
            ):
                total.update(_hash_row(["user", *row]))
            for row in self.connection.execute(
                "SELECT state FROM app_states WHERE app_name = ?", app
            ):
                total.update(_hash_row(["app", *row]))
        return total.hexdigest()

    # --- guarding ------------------------------------------------------------------------

    def provision(self) -> None:
        """Make ADK's tables where they are missing, the guard table and the closing triggers.

        Idempotent, in one transaction; raises StoreBusy, to be tried again.
        """
        if not self.is_file:
            self.connection.close()
            self.connection = self._connect(create=True)
            self._columns = None
        with self._short():
            missing = set(schema.TABLES) - set(self.columns())
            if missing:
                for statement in schema.tables(self.dialect, missing):
                    self.connection.execute(statement)
            self.connection.execute(_GUARD_TABLE)
            self.connection.execute(_NONCE_TABLE)
            for name, statement in _triggers().items():
                there = self.rows(
                    "SELECT sql FROM sqlite_master WHERE type = 'trigger' AND name = ?", (name,)
                )
                if there and there[0][0] != statement:
                    self.connection.execute(f"DROP TRIGGER {name}")
                if not there or there[0][0] != statement:
                    self.connection.execute(statement)
        self._columns = None

    def can_close(self) -> bool:
        """Whether every closing trigger is there."""
        there = dict(self.rows("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'"))
        return all(there.get(name) == statement for name, statement in _triggers().items())

    def adopt(self, found: Guard | None, *, mover: bool, agents: bool) -> None:
        """Make the guard row this move's, if it is still what the survey `found`.

        May be repeated under the same move. The row's (move, claim) only ever rises: a worker
        that surveyed, slept through the whole move and woke would else find its own move's
        row, match it, close the tenant's new home and clear it (tried). Raises GuardTaken if
        somebody else was first, Overtaken if a later claim or move was, StoreBusy.
        """
        old = found or Guard(-1, -1, False, False)
        with self._short():
            done = self.connection.execute(
                "UPDATE switchyard_guard SET move = ?, claim = ?, mover = ?, agents = ?,"
                " writing = 0 WHERE app_name = ?"
                " AND ((move = ? AND claim = ? AND move < ?) OR (move = ? AND claim <= ?))",
                (
                    self.move,
                    self.claim,
                    mover,
                    agents,
                    self.app_name,
                    old.move,
                    old.claim,
                    self.move,
                    self.move,
                    self.claim,
                ),
            ).rowcount
            if not done and found is None:
                done = self.connection.execute(
                    "INSERT INTO switchyard_guard (app_name, move, claim, mover, agents)"
                    " VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
                    (self.app_name, self.move, self.claim, mover, agents),
                ).rowcount
            if not done:
                self._refuse(adopting=True)

    def take(self, *, mover: bool, agents: bool) -> None:
        """Set claim and flags in a short transaction.

        Flags are set, never matched, so each step can run again. Raises Overtaken if a
        later claim, or another move, holds the row; StoreBusy after 3 s. A dead
        worker's lock on the file ends only with its process.
        """
        with self._short():
            done = self.connection.execute(
                "UPDATE switchyard_guard SET claim = ?, mover = ?, agents = ?, writing = 0"
                " WHERE app_name = ? AND move = ? AND claim <= ?",
                (self.claim, mover, agents, self.app_name, self.move, self.claim),
            ).rowcount
            if not done:
                self._refuse(adopting=False)

    def _refuse(self, *, adopting: bool) -> NoReturn:
        row = self.guard()
        if row is None:
            raise GuardTaken(
                f"The guard row in {self.where} is gone. Survey the store again, then move."
            )
        if row.move == self.move or not adopting:
            # A step of a claim, or of a whole move, whose time is over: nobody's mistake.
            raise Overtaken(f"{self.where} is held by mv-{row.move} under claim {row.claim}")
        raise GuardTaken(
            f"mv-{row.move} holds this tenant's guard in {self.where}, not mv-{self.move}."
            " End that move first."
        )

    def older_writers(self) -> list[str]:
        """Return nothing: SQLite's one writer can't write on an older snapshot than the guard."""
        return []

    def still_writing(self, tokens: Sequence[str]) -> list[str]:
        """Return nothing, as `older_writers`."""
        return []

    def write_nonce(self, nonce: str) -> None:
        """Leave a random word, to be looked for through the other store."""
        with self._short():
            self.connection.execute(_NONCE_TABLE)
            self.connection.execute(
                "DELETE FROM switchyard_nonce WHERE written_at < datetime('now', '-1 day')"
            )
            self.connection.execute(
                "INSERT INTO switchyard_nonce (nonce) VALUES (?) ON CONFLICT DO NOTHING", (nonce,)
            )

    def has_nonce(self, nonce: str) -> bool:
        """Whether that word is here. False where there is no such table."""
        return self.exists("switchyard_nonce") and bool(
            self.rows("SELECT 1 FROM switchyard_nonce WHERE nonce = ?", (nonce,))
        )

    def clear_nonce(self, nonce: str) -> None:
        """Take the word away; nothing happens if it is gone."""
        if self.exists("switchyard_nonce"):
            with self._short():
                self.connection.execute("DELETE FROM switchyard_nonce WHERE nonce = ?", (nonce,))

    def keeps_ids(self) -> bool:
        """Whether a scratch session keeps the id it is given; rolled back, so nothing stays."""
        scratch = "Scratch-" + "x" * (schema.LONGEST_ID - 9) + " "
        with suppress(_Undo), self._short():
            self.connection.execute(
                "UPDATE switchyard_guard SET writing = 1 WHERE app_name = ?", (self.app_name,)
            )
            self.connection.execute(
                "INSERT INTO sessions (app_name, user_id, id, state, create_time, update_time)"
                " VALUES (?, ?, ?, '{}', CURRENT_TIMESTAMP, CURRENT_TIMESTAMP)",
                (self.app_name, scratch, scratch),
            )
            kept = bool(
                self.rows(
                    "SELECT 1 FROM sessions WHERE app_name = ? AND user_id = ? AND id = ?",
                    (self.app_name, scratch, scratch),
                )
            )
            raise _Undo
        return kept

    # --- writing -------------------------------------------------------------------------

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Run the body in one transaction under the guard row, its `writing` flag raised.

        The flag lets our own rows past the closing trigger; nobody else can see it raised,
        for it is lowered before COMMIT. Raises Overtaken if the row is not this claim's.

        BEGIN and then a write, not BEGIN IMMEDIATE: that would take the writer's seat of
        every attached file too, and the source's agents with it.
        """
        if not self.exists("switchyard_guard"):
            raise Overtaken(f"{self.where} has no guard")
        with self._transaction("BEGIN"):
            self._raise_flag()
            yield
            self.connection.execute(
                "UPDATE main.switchyard_guard SET writing = 0 WHERE app_name = ?", (self.app_name,)
            )

    def _raise_flag(self) -> None:
        # The transaction's first statement: a read before it would make it a reader that wants to
        # become a writer, which SQLite refuses at once instead of waiting.
        done = self._patiently(
            "UPDATE main.switchyard_guard SET writing = 1"
            " WHERE app_name = ? AND move = ? AND claim = ? AND mover",
            (self.app_name, self.move, self.claim),
        ).rowcount
        if not done:
            raise Overtaken(
                f"the guard in {self.where} is not mv-{self.move}'s, claim {self.claim}"
            )

    def delete(self, keys: Collection[Key]) -> int:
        """Delete these sessions and their events; return how many sessions there were."""
        if not keys:
            return 0
        with self.choosing(list(keys)), self.writing():
            return self.remove()

    def delete_unchanged(self, stamps: Mapping[Key, Stamp]) -> list[Key]:
        """Delete those sessions whose stamp is still the given one; return them."""
        same: list[Key] = []
        if stamps:
            with self.choosing(list(stamps)), self.writing():
                now = self.read_stamps("main")
                same = [key for key in stamps if now.get(key) == stamps[key]]
                changed = [key for key in stamps if key not in set(same)]
                self.connection.executemany("DELETE FROM temp.keys WHERE u = ? AND i = ?", changed)
                self.remove()
        return same

    def remove(self) -> int:
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
        if not rows:
            return
        users = [(self.app_name, row.user_id, row.state) for row in rows if row.user_id is not None]
        apps = [(self.app_name, row.state) for row in rows if row.user_id is None]
        with self.writing():
            self.connection.executemany(
                "INSERT INTO user_states (app_name, user_id, state, update_time)"
                " VALUES (?, ?, ?, CURRENT_TIMESTAMP) ON CONFLICT (app_name, user_id) DO UPDATE"
                " SET state = excluded.state, update_time = excluded.update_time"
                " WHERE user_states.state IS NOT excluded.state",
                users,
            )
            self.connection.executemany(
                "INSERT INTO app_states (app_name, state, update_time)"
                " VALUES (?, ?, CURRENT_TIMESTAMP) ON CONFLICT (app_name) DO UPDATE"
                " SET state = excluded.state, update_time = excluded.update_time"
                " WHERE app_states.state IS NOT excluded.state",
                apps,
            )

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

    # --- keys, bites, stamps -------------------------------------------------------------

    @contextmanager
    def choosing(self, keys: Sequence[Key]) -> Iterator[None]:
        """Put keys into temp.keys, which is in memory, outside any transaction of the file."""
        with self.clean():
            self.connection.execute(
                "CREATE TEMP TABLE IF NOT EXISTS keys (u TEXT NOT NULL, i TEXT NOT NULL)"
            )
            self.connection.execute("DELETE FROM temp.keys")
            self.connection.executemany("INSERT INTO temp.keys VALUES (?, ?)", keys)
        yield

    def bites(self, keys: Sequence[Key]) -> Iterator[list[Key]]:
        """Split keys so that each bite's events are a few megabytes.

        One session longer than a bite is a bite of its own.
        """
        with self.choosing(keys):
            sizes = self.rows(
                "SELECT k.u, k.i, (SELECT coalesce(sum(length(event_data)), 0) FROM events e"
                " WHERE e.app_name = ? AND e.user_id = k.u AND e.session_id = k.i)"
                " FROM temp.keys k ORDER BY k.rowid",
                (self.app_name,),
            )
        bite: list[Key] = []
        room = BITE_BYTES
        for user, name, size in sizes:
            if bite and (size > room or len(bite) >= BITE_KEYS):
                yield bite
                bite, room = [], BITE_BYTES
            bite.append(Key(user, name))
            room -= size
        if bite:
            yield bite

    def read_stamps(self, database: str) -> dict[Key, Stamp]:
        """Read the stamps of temp.keys; `database` is main, or source where one is attached."""
        found = self.connection.execute(
            f"SELECT {_stamp_columns(database)} FROM temp.keys k CROSS JOIN {database}.sessions s"
            " ON s.app_name = ? AND s.user_id = k.u AND s.id = k.i",
            (self.app_name,),
        )
        return dict(_stamped(row) for row in found)

    def _framed(self, table: str, alias: str) -> str:
        """List a table's columns, the key's left out, each as its storage class and bytes."""
        own = [
            name
            for name in sorted(self.columns()[table])
            if name not in _KEY_COLUMNS and (table, name) != ("sessions", "id")
        ]
        return ", ".join(
            f"typeof({alias}.{_quote(name)}), CAST({alias}.{_quote(name)} AS BLOB)" for name in own
        )


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
                with target.choosing(bite), target.writing():
                    before = target.read_stamps("source")
                    target.remove()
                    for table in ("sessions", "events"):
                        connection.execute(_insert(source, table), (target.app_name,))
                    after = target.read_stamps("main")
                for key, stamp in before.items():
                    copied[key] = Copied(stamp, after[key])
        finally:
            connection.execute("DETACH source")
    return copied


def _insert(source: SqliteStore, table: str) -> str:
    names = source.columns()[table]
    listed = ", ".join(_quote(name) for name in names)
    taken = ", ".join(f"r.{_quote(name)}" for name in names)
    name = "id" if table == "sessions" else "session_id"
    # Events whose session is gone would break the target's foreign key.
    whole = (
        ""
        if table == "sessions"
        else " JOIN source.sessions s ON s.app_name = r.app_name AND s.user_id = r.user_id"
        " AND s.id = r.session_id"
    )
    return (
        f"INSERT INTO main.{table} ({listed}) SELECT {taken} FROM temp.keys k CROSS JOIN"
        f" source.{table} r ON r.app_name = ? AND r.user_id = k.u AND r.{name} = k.i{whole}"
    )


def _triggers() -> dict[str, str]:
    """Return {name: statement} of the closing triggers.

    A plain read of the flag is enough here: writers are serial, and a transaction
    can't write on a snapshot older than the last commit. RAISE(ABORT) reaches ADK as an
    IntegrityError, whose text the runtime looks for.
    """
    made = {}
    for table in schema.TABLES:
        for event, rows in (("INSERT", ["new"]), ("UPDATE", ["old", "new"]), ("DELETE", ["old"])):
            names = ", ".join(f"{row}.app_name" for row in rows)
            name = f"switchyard_{table}_{event.lower()}"
            made[name] = (
                f"CREATE TRIGGER {name} BEFORE {event} ON {table}"
                f" WHEN EXISTS (SELECT 1 FROM switchyard_guard WHERE app_name IN ({names})"
                " AND NOT agents AND NOT writing)"
                " BEGIN SELECT RAISE(ABORT, 'closed by switchyard'); END"
            )
    return made


def _stamp_columns(database: str) -> str:
    """List what a stamp is made of, for sessions `s`; counts and ends come from an index alone."""
    of = (
        f"FROM {database}.events e WHERE e.app_name = s.app_name"
        " AND e.user_id = s.user_id AND e.session_id = s.id"
    )
    return (
        "s.user_id, s.id, s.update_time, switchyard_crc(s.state),"
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


def _crc(value: Any) -> int:
    raw = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
    return zlib.crc32(raw)


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


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _is_busy(error: sqlite3.Error) -> bool:
    return error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


class _Undo(Exception):
    """Rolls a transaction back on purpose."""


_REFUSED: dict[int, Callable[[str], Exception]] = {
    sqlite3.SQLITE_CANTOPEN: lambda where: Unreachable(
        f"The file of {where} can't be opened. Check that its folder exists here and that this"
        " process's user may read and write in it."
    ),
    sqlite3.SQLITE_READONLY: lambda where: WrongCredentials(
        f"The file of {where} may not be written by this process's user. Grant it, or mount it"
        " writable."
    ),
    sqlite3.SQLITE_PERM: lambda where: WrongCredentials(
        f"This process's user has no right on the file of {where}."
    ),
    sqlite3.SQLITE_NOTADB: lambda where: NotASessionStore(
        f"The file of {where} is not an SQLite database (or an encrypted one)."
    ),
    sqlite3.SQLITE_CORRUPT: lambda where: CannotHold(
        f"The file of {where} is damaged: restore it, or repair it with `sqlite3 .recover`."
    ),
}


def _clean(error: Exception, where: str) -> Exception:
    if isinstance(error, UnicodeError):
        return CannotHold(f"{where} holds text that is not UTF-8, which can't be shown.")
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:
        if "decode to UTF-8" in str(error):
            return CannotHold(f"{where} holds text that is not UTF-8, which can't be shown.")
        return StoreFailed(f"{where}: {type(error).__name__}")
    if isinstance(error, sqlite3.Error) and _is_busy(error):
        return StoreBusy(f"{where} is busy: another process is writing. It is tried again.")
    if make := _REFUSED.get(code & 0xFF):
        return make(where)
    return StoreFailed(f"{where}: {type(error).__name__} ({error.sqlite_errorname})")  # type: ignore[attr-defined]
