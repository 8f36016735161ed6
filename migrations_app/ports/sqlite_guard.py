"""Who may write a tenant in an SQLite store: the guard row and the closing triggers.

Writers of a file are serial, so both are plain reads and writes of one row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from durable.machine import Overtaken
from migrations_app.domain.values import OURS
from migrations_app.ports import schema
from migrations_app.ports.base import Guard
from migrations_app.ports.guard_words import nonce_id, refuse
from migrations_app.ports.sqlite_link import SqliteLink

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


class SqliteGuard(SqliteLink):
    """The guard of one tenant in one file."""

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

    def guards(self, among: Collection[str] = ()) -> dict[str, Guard]:
        """Return every tenant's guard row in this store, by app name."""
        if not self.exists("switchyard_guard"):
            return {}
        rows = self.rows("SELECT app_name, move, claim, mover, agents FROM switchyard_guard")
        return {app: Guard(move, claim, bool(m), bool(a)) for app, move, claim, m, a in rows}

    # --- provisioning --------------------------------------------------------------------

    def making(self, missing: Iterable[str]) -> list[str]:
        """Return the statements that make these of ADK's tables."""
        return schema.tables(self.dialect, missing)

    def provision(self) -> None:
        """Make ADK's tables where they are missing, the guard table and the closing triggers.

        Idempotent, in one transaction; raises StoreBusy, to be tried again.
        """
        if not self.is_file:
            self.connection.close()
            self.connection = self._connect(create=True)
            self._columns = None
        with self.short():
            missing = set(schema.TABLES) - set(self.columns())
            if missing:
                for statement in self.making(missing):
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
        with self.short():
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
                refuse(self.guard(), where=self.where, move=self.move, adopting=True)

    def take(self, *, mover: bool, agents: bool) -> None:
        """Set claim and flags in a short transaction.

        Flags are set, never matched, so each step can run again. Raises Overtaken if a
        later claim, or another move, holds the row; StoreBusy after 3 s. A dead
        worker's lock on the file ends only with its process.
        """
        with self.short():
            done = self.connection.execute(
                "UPDATE switchyard_guard SET claim = ?, mover = ?, agents = ?, writing = 0"
                " WHERE app_name = ? AND move = ? AND claim <= ?",
                (self.claim, mover, agents, self.app_name, self.move, self.claim),
            ).rowcount
            if not done:
                refuse(self.guard(), where=self.where, move=self.move, adopting=False)

    def disown(self) -> None:
        """Take the guard row away, where it is this claim's."""
        with self.short():
            self.connection.execute(
                "DELETE FROM switchyard_guard WHERE app_name = ? AND move = ? AND claim = ?",
                (self.app_name, self.move, self.claim),
            )

    def older_writers(self) -> list[str]:
        """Return nothing: SQLite's one writer can't write on an older snapshot than the guard."""
        return []

    def still_writing(self, tokens: Sequence[str]) -> list[str]:
        """Return nothing, as `older_writers`."""
        return []

    def write_nonce(self, nonce: str) -> None:
        """Leave a random word, to be looked for through the other store."""
        with self.short():
            self.connection.execute(_NONCE_TABLE)
            self.connection.execute(
                "DELETE FROM switchyard_nonce WHERE written_at < datetime('now', '-1 day')"
            )
            self.connection.execute(
                "INSERT INTO switchyard_nonce (nonce) VALUES (?) ON CONFLICT DO NOTHING", (nonce,)
            )

    def has_nonce(self, nonce: str) -> bool:
        """Whether that word is here: in the table of words, or as a service has left it."""
        if self.exists("switchyard_nonce") and self.rows(
            "SELECT 1 FROM switchyard_nonce WHERE nonce = ?", (nonce,)
        ):
            return True
        return self.has_tables and bool(
            self.rows(
                "SELECT 1 FROM sessions WHERE app_name = ? AND user_id = ? AND id = ?",
                (self.app_name, OURS, nonce_id(nonce)),
            )
        )

    def clear_nonce(self, nonce: str) -> None:
        """Take the word away; nothing happens if it is gone."""
        if self.exists("switchyard_nonce"):
            with self.short():
                self.connection.execute("DELETE FROM switchyard_nonce WHERE nonce = ?", (nonce,))

    def folds_case(self) -> bool:
        """Return that they are not: this database compares bytes."""
        return False

    def keeps_ids(self) -> bool:
        """Whether a scratch session keeps the id it is given; rolled back, so nothing stays."""
        scratch = "Scratch-" + "x" * (schema.LONGEST_ID - 9) + " "
        with suppress(_Undo), self.short():
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

    # --- transactions that write rows ----------------------------------------------------

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
        with self.transaction("BEGIN"):
            self._raise_flag()
            yield
            self.connection.execute(
                "UPDATE main.switchyard_guard SET writing = 0 WHERE app_name = ?", (self.app_name,)
            )

    def _raise_flag(self) -> None:
        # The transaction's first statement: a read before it would make it a reader that wants to
        # become a writer, which SQLite refuses at once instead of waiting.
        done = self.patiently(
            "UPDATE main.switchyard_guard SET writing = 1"
            " WHERE app_name = ? AND move = ? AND claim = ? AND mover",
            (self.app_name, self.move, self.claim),
        ).rowcount
        if not done:
            raise Overtaken(
                f"the guard in {self.where} is not mv-{self.move}'s, claim {self.claim}"
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


class _Undo(Exception):
    """Rolls a transaction back on purpose."""
