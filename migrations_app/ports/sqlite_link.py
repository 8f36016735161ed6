"""One connection to an SQLite file: how it is opened, its transactions, keys, bites, its errors.

The only place where sqlite3's errors end: each becomes one of `base`'s, `from None`.
Readers of a file in journal mode `delete` keep its writers waiting, so everything
here reads and writes in bites of a few megabytes. The mode itself is never changed:
the file is not ours.
"""

from __future__ import annotations

import sqlite3
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from migrations_app.domain.values import Layout
from migrations_app.ports import schema
from migrations_app.ports.address import Sqlite, sqlite_uri
from migrations_app.ports.base import (
    CannotHold,
    Kept,
    Key,
    NotASessionStore,
    StoreBusy,
    StoreFailed,
    Unreachable,
    WrongCredentials,
)
from migrations_app.ports.bites import in_bites

# How long to wait for the writer's seat, where nobody stands behind us, and how long a COMMIT waits
# for readers to leave, behind which new readers wait too.
WAIT_SECONDS = 3.0
COMMIT_SECONDS = 1.0
# Between two tries for the writer's seat. SQLite's own waiters sleep up to 100 ms between theirs,
# and nobody queues: who looks more often gets in, which is how closing is not starved.
LOOK_SECONDS = 0.001

T = TypeVar("T")


class SqliteLink:
    """A handle's connection, in autocommit; transactions are begun by name."""

    dialect = "sqlite"
    kind = "adk-sql"
    layout = Layout.SQLITE
    kept = Kept()

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
            raise refusal(error, self.where) from None

    @contextmanager
    def transaction(self, begin: str) -> Iterator[None]:
        """Run the body between `begin` and COMMIT; any error rolls back."""
        with self.clean():
            self.patiently(begin)
            try:
                yield
                # In journal mode `delete` COMMIT waits until the last reader has left.
                self.patiently("COMMIT", seconds=COMMIT_SECONDS)
            except BaseException:
                with suppress(sqlite3.Error):
                    self.connection.execute("ROLLBACK")
                raise

    def patiently(
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

    def short(self) -> AbstractContextManager[None]:
        """Run the body as the file's one writer."""
        return self.transaction("BEGIN IMMEDIATE")

    def snapshot(self) -> AbstractContextManager[None]:
        """Run the body on one snapshot of the file."""
        return self.transaction("BEGIN")

    def attempt(self, work: Callable[[], T]) -> T:
        """Run a whole transaction: a file's writers never meet in a deadlock."""
        return work()

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

    # --- keys and bites ------------------------------------------------------------------

    def choose(self, keys: Iterable[tuple[str, str]]) -> None:
        """Put keys into temp.keys, which is in memory, outside any transaction of the file."""
        with self.clean():
            self.connection.execute(
                "CREATE TEMP TABLE IF NOT EXISTS keys (u TEXT NOT NULL, i TEXT NOT NULL)"
            )
            self.connection.execute("DELETE FROM temp.keys")
            self.connection.executemany("INSERT INTO temp.keys VALUES (?, ?)", keys)

    def bites(self, keys: Sequence[Key]) -> Iterator[list[Key]]:
        """Split keys so that each bite's events are a few megabytes.

        One session longer than a bite is a bite of its own.
        """
        self.choose(keys)
        return in_bites(
            self.rows(
                "SELECT k.u, k.i, (SELECT coalesce(sum(length(event_data)), 0) FROM events e"
                " WHERE e.app_name = ? AND e.user_id = k.u AND e.session_id = k.i)"
                " FROM temp.keys k ORDER BY k.rowid",
                (self.app_name,),
            )
        )


def _crc(value: Any) -> int:
    raw = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
    return zlib.crc32(raw)


def quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _is_busy(error: sqlite3.Error) -> bool:
    return error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


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


def refusal(error: Exception, where: str) -> Exception:
    """Turn what sqlite3 raised into one of `base`'s errors."""
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
