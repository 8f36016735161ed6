"""One connection to a PostgreSQL store: how it is opened, its transactions, its errors.

The only place where psycopg's errors end. They quote addresses, users and rows,
so each becomes one of `base`'s, `from None`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import psycopg
from psycopg import errors, sql
from psycopg.rows import TupleRow

from migrations_app.domain.values import Layout
from migrations_app.ports import schema
from migrations_app.ports.address import Postgres
from migrations_app.ports.base import (
    AddressMissing,
    CannotHold,
    Kept,
    NotASessionStore,
    StoreBusy,
    StoreFailed,
    Unreachable,
    WrongCredentials,
)

CONNECT_SECONDS = 3
# Below the worker's hard time limit (20 s of a lease of 30 s): a statement that hangs ends before
# its worker is killed, and a transaction that its worker left open ends before the lease does.
STATEMENT_SECONDS = 15
# How often a transaction that met a deadlock or a serialisation failure is tried.
ATTEMPTS = 4

T = TypeVar("T")

SNAPSHOT = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
WRITE = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"
# Schema changes and the guard: other tenants' writers queue behind a waiting lock, so not for long.
SHORT = f"{WRITE}; SET LOCAL lock_timeout = '1s'; SET LOCAL statement_timeout = '1s'"
# Chunks go key by key through the index, whatever the statistics say: a target that was filled a
# second ago has none, and every other plan reads the whole tenant for each five hundred sessions
# (tried: deleting what is not there took three times as long as copying what is). So the
# statements over keys are LATERAL with OFFSET 0, which the planner does not take apart, and:
BY_INDEX = "SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off"
# The other way about where a whole tenant is read: without statistics the planner takes it for a
# handful of rows and walks the index once for each of them (tried: a count of 40,000 events took
# over 15 s instead of 0.1 s).
WHOLE = "SET LOCAL enable_nestloop = off"


class PostgresLink:
    """A handle's connection, in autocommit; transactions are begun by name."""

    dialect = "postgresql"
    kind = "adk-sql"
    layout = Layout.POSTGRESQL
    kept = Kept()

    def __init__(
        self, address: Postgres, *, reference: str, app_name: str, move: int, claim: int
    ) -> None:
        self.where = reference
        self.app_name = app_name
        self.move = move
        self.claim = claim
        self._columns: dict[str, dict[str, str]] | None = None
        self.connection = self._connect(address)
        try:
            self.schema = self._find_schema()
        except BaseException:
            self.connection.close()
            raise
        names = {
            "sessions": "sessions",
            "events": "events",
            "app_states": "app_states",
            "user_states": "user_states",
            "metadata": "adk_internal_metadata",
            "guard": "switchyard_guard",
            "nonces": "switchyard_nonce",
            "gate": "switchyard_gate",
        }
        self.names = {key: sql.Identifier(self.schema, name) for key, name in names.items()}

    def close(self) -> None:
        """End the connection; an open transaction is rolled back by the server."""
        self.connection.close()

    # --- statements ----------------------------------------------------------------------

    def fill(self, template: str, **parts: sql.Composable) -> sql.Composed:
        """Fill a statement's {table} names (qualified) and other parts."""
        return sql.SQL(template).format(**self.names, **parts)

    def rows(self, template: str, params: Mapping[str, Any] | None = None) -> list[TupleRow]:
        """Run one statement and return its rows."""
        return self.run(template, params).fetchall()

    def run(
        self, template: str, params: Mapping[str, Any] | None = None, **parts: sql.Composable
    ) -> psycopg.Cursor[TupleRow]:
        """Run one statement; %(app)s, %(move)s and %(claim)s are this handle's."""
        own = {"app": self.app_name, "move": self.move, "claim": self.claim}
        return self.connection.execute(self.fill(template, **parts), {**own, **(params or {})})

    def define(self, template: str, **parts: sql.Composable) -> None:
        """Run a statement that takes no parameters, such as CREATE."""
        self.connection.execute(self.fill(template, **parts))

    # --- transactions --------------------------------------------------------------------

    @contextmanager
    def transaction(self, begin: str) -> Iterator[None]:
        """Run the body between `begin` and COMMIT; any error rolls back and is made clean."""
        with self.clean():
            self.connection.execute(begin)
            try:
                yield
            except BaseException:
                # A connection that is gone has rolled back already.
                with suppress(psycopg.Error):
                    self.connection.execute("ROLLBACK")
                raise
            self.connection.execute("COMMIT")

    def attempt(self, work: Callable[[], T]) -> T:
        """Run a whole transaction, again if the server chose it as a deadlock's victim (40P01).

        ADK locks a session's row and then the guard (by the trigger), we the guard and
        then rows; FOR SHARE on the guard makes a cycle rare, not impossible.
        """
        for _ in range(ATTEMPTS - 1):
            try:
                return work()
            except Deadlock:
                continue
        return work()

    @contextmanager
    def clean(self) -> Iterator[None]:
        """Turn psycopg's errors into ours: no address, no user, no value, no chained original."""
        try:
            yield
        except psycopg.Error as error:
            raise _clean(error, self.where) from None

    # --- what is there -------------------------------------------------------------------

    def columns(self) -> dict[str, dict[str, str]]:
        """Return {table: {column: type}} of those ADK tables that exist, read once a handle.

        Probed before each COPY, since databases of one schema version differ in the field.
        """
        if self._columns is None:
            with self.clean():
                found = self.run(
                    "SELECT c.relname, a.attname, t.typname FROM pg_catalog.pg_class c"
                    " JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
                    " JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid"
                    " JOIN pg_catalog.pg_type t ON t.oid = a.atttypid"
                    " WHERE n.nspname = %(schema)s AND c.relname = ANY(%(tables)s)"
                    " AND c.relkind IN ('r', 'p') AND a.attnum > 0 AND NOT a.attisdropped"
                    " ORDER BY c.relname, a.attnum",
                    {"schema": self.schema, "tables": list(schema.TABLES)},
                ).fetchall()
            columns: dict[str, dict[str, str]] = {}
            for table, column, kind in found:
                columns.setdefault(table, {})[column] = kind
            self._columns = columns
        return self._columns

    def forget_columns(self) -> None:
        """Read the columns again at the next use: tables have been made."""
        self._columns = None

    @property
    def has_tables(self) -> bool:
        return set(self.columns()) == set(schema.TABLES)

    def exists(self, name: str) -> bool:
        """Whether a table of ours is there."""
        with self.clean():
            return self.run(
                "SELECT to_regclass(%(name)s)", {"name": self.text_name(name)}
            ).fetchone() != (None,)

    def text_name(self, name: str) -> str:
        """Return a table's qualified, quoted name as text."""
        return self.names[name].as_string(self.connection)

    # --- opening -------------------------------------------------------------------------

    def _connect(self, address: Postgres) -> psycopg.Connection[TupleRow]:
        params: dict[str, Any] = {
            # An address may bound a dead network more tightly, never less.
            "keepalives_idle": "5",
            "keepalives_interval": "2",
            "keepalives_count": "3",
            **address.params,
            "connect_timeout": CONNECT_SECONDS,
            "client_encoding": "UTF8",
            # How a later claim of the move finds a backend that hangs (see `take`).
            "application_name": f"switchyard mv-{self.move} claim {self.claim}",
        }
        try:
            connection = psycopg.connect(**params, autocommit=True)
        except psycopg.Error as error:
            raise _cannot_connect(error, self.where) from None
        # A pooler in front may hand each transaction to another backend.
        connection.prepare_threshold = None
        try:
            with self.clean():
                # Times as ISO text everywhere they are spelled; no JIT: compiling takes
                # longer than a chunk.
                connection.execute(
                    "SET DateStyle = 'ISO, MDY'; SET jit = off;"
                    f" SET statement_timeout = '{STATEMENT_SECONDS}s';"
                    f" SET idle_in_transaction_session_timeout = '{STATEMENT_SECONDS}s'",
                )
        except BaseException:
            connection.close()
            raise
        return connection

    def _find_schema(self) -> str:
        # ADK names no schema: the search path of the address's role decides, for both.
        with self.clean():
            row = self.connection.execute(
                "SELECT coalesce((SELECT n.nspname FROM pg_catalog.pg_class c"
                " JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
                " WHERE c.oid = to_regclass('sessions')), current_schema())"
            ).fetchone()
        if row is None or row[0] is None:
            raise NotASessionStore(
                f"The search path of {self.where} names no schema that exists."
                " Make the schema, or set the role's search_path."
            )
        return str(row[0])


class Deadlock(StoreBusy):
    """Deadlock or serialisation failure: the whole transaction may be tried again."""


def refusal(error: psycopg.Error, where: str) -> Exception:
    """Turn what psycopg raised in somebody else's hands into one of `base`'s errors."""
    if isinstance(error, psycopg.OperationalError) and error.sqlstate is None:
        return _cannot_connect(error, where)
    return _clean(error, where)


def _clean(error: psycopg.Error, where: str) -> Exception:
    state = error.sqlstate or ""
    if isinstance(error, errors.LockNotAvailable | errors.QueryCanceled):
        return StoreBusy(f"{where} is busy: a lock or an answer took too long. It is tried again.")
    if isinstance(error, errors.DeadlockDetected | errors.SerializationFailure):
        return Deadlock(f"{where} is busy: writers met in a deadlock. It is tried again.")
    if isinstance(error, errors.InsufficientPrivilege):
        return WrongCredentials(
            f"The user of {where} lacks a right{_at(error)}. It needs SELECT, INSERT, UPDATE,"
            " DELETE and TRIGGER on ADK's tables, and CREATE on their schema."
        )
    if isinstance(error, errors.ReadOnlySqlTransaction):
        return WrongCredentials(
            f"{where} takes no writes: it is a standby, or read-only for this user."
            " Name the primary."
        )
    if state[:2] == "22":
        return CannotHold(
            f"{where} refused a value{_at(error)} ({type(error).__name__}). The survey names values"
            " that a store can't hold."
        )
    lost = (
        error.sqlstate is None
        or isinstance(error, errors.AdminShutdown | errors.CrashShutdown | errors.CannotConnectNow)
        or state[:2] == "08"
        or isinstance(error, errors.IdleInTransactionSessionTimeout)
    )
    if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) and lost:
        return Unreachable(f"{where} closed the connection. It is tried again.")
    if state == "":
        # psycopg itself refused a parameter, such as text with a NUL.
        return CannotHold(f"A value can't be sent to {where} ({type(error).__name__}).")
    return StoreFailed(f"{where}: {type(error).__name__} ({state}){_at(error)}")


def _at(error: psycopg.Error) -> str:
    table, column = error.diag.table_name, error.diag.column_name
    if table is None:
        # "permission denied for table events": the one message whose name is nowhere else.
        match = re.match(
            r"permission denied for (?:table|schema) (\w+)", error.diag.message_primary or ""
        )
        return f" on {match[1]}" if match else ""
    return f" at {table}.{column}" if column else f" at {table}"


def _cannot_connect(error: psycopg.Error, where: str) -> Exception:
    """Tell a refused log-in from silence, by what libpq knows and the server's words."""
    text = str(error)
    asked = error.pgconn is not None and (error.pgconn.needs_password or error.pgconn.used_password)
    if re.search(r"invalid (integer|value|port|\w+ value)|sslmode value", text):
        return AddressMissing(
            f"What {where} holds can't be used: libpq refuses an option of that URL."
        )
    if re.search(r'database "[^"]*" does not exist', text):
        return Unreachable(
            f"The server of {where} has no database of that name. Make it, or correct the address."
        )
    if re.search(r"too many clients|remaining connection slots|too many connections", text):
        return StoreBusy(f"{where} has no connection to spare. It is tried again.")
    if re.search(r"starting up|shutting down|recovery", text):
        return Unreachable(f"The server of {where} is starting or stopping. It is tried again.")
    if asked or re.search(
        r'authentication failed|no password|role "[^"]*"|pg_hba|permission', text
    ):
        return WrongCredentials(
            f"The server of {where} refused the user or the password."
            " Correct the address, or let that user in from this machine."
        )
    return Unreachable(
        f"No answer from {where} within {CONNECT_SECONDS} s."
        " Check that the server runs and that this machine reaches its host and port."
    )


def key_params(keys: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return %(users)s and %(ids)s for a statement over `unnest` of both."""
    return {"users": [key[0] for key in keys], "ids": [key[1] for key in keys]}
