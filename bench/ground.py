"""What a demo is built on: files below its home, servers that are named, or throw-away ones.

A database that is named is used only if it is empty or an earlier demo's: nobody's data is
wiped. A Redis that another installation's workers listen to is left alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg

from bench import servers

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

STORES = ("store-eu1-a", "store-eu1-b")
# The table that says whose database it is; made while the database is empty.
MARK = "switchyard_demo"
# How long workers of another installation have to answer.
ANSWER_SECONDS = 1.0

# Everything that somebody made, in whichever schema; what extensions brought along is nobody's.
_MADE = """
SELECT n.nspname || '.' || c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p', 'v', 'm', 'S', 'f') AND n.nspname !~ '^(pg_|information_schema$)'
AND NOT EXISTS (SELECT FROM pg_depend d WHERE d.objid = c.oid AND d.deptype = 'e')"""
_FUNCTIONS = """
SELECT p.oid::regprocedure::text FROM pg_proc p WHERE p.pronamespace = current_schema::regnamespace
AND NOT EXISTS (SELECT FROM pg_depend d WHERE d.objid = p.oid AND d.deptype = 'e')"""


class Unusable(Exception):
    """What is named can't be built upon as it is; the message says why, and what to do."""


@dataclass(frozen=True)
class Ground:
    """Where the control plane's rows, its messages and the agents' sessions are kept."""

    # DATABASE_URL and REDIS_URL of web and workers. No Redis: the broker in files.
    database: str
    redis: str
    # Store key -> URL as agents have it.
    stores: Mapping[str, str]

    def __str__(self) -> str:
        rows = "PostgreSQL" if self.database.startswith("postgres") else "SQLite"
        sessions = "SQLite" if self.stores[STORES[0]].startswith("sqlite") else "PostgreSQL"
        broker = "Redis" if self.redis else "files"
        return f"rows in {rows}, messages in {broker}, sessions in {sessions}"


@contextmanager
def ground(home: Path, *, full: bool) -> Iterator[Ground]:
    """Yield what to build on: what DATABASE_URL and REDIS_URL name, files for the rest.

    `full`: throw-away servers for the rest, and for the agents' stores, which never go to a
    server that is named. Raises servers.Missing.
    """
    database, redis = os.environ.get("DATABASE_URL", ""), os.environ.get("REDIS_URL", "")
    if not full:
        (home / "stores").mkdir(parents=True)
        stores = {key: f"sqlite+aiosqlite:///{home / 'stores' / key}.db" for key in STORES}
        yield Ground(database or f"sqlite:///{home / 'switchyard.sqlite3'}", redis, stores)
        return
    servers.require(["postgres", *([] if redis else ["redis-server"])])
    with ExitStack() as stack:
        server = stack.enter_context(servers.postgres())
        redis = redis or stack.enter_context(servers.redis())
        yield Ground(database or server, redis, _databases(server))


def take_database(connection: BaseDatabaseWrapper, demos: Sequence[str]) -> None:
    """Empty a database of an earlier demo and mark it as this one's; or raise Unusable.

    `demos` are the slugs of the demo's tenants: where there are others, somebody uses it by
    now. Call it before the schema is made.
    """
    from django.db import OperationalError

    try:
        tables = set(connection.introspection.table_names())
    except OperationalError as error:
        raise Unusable(f"DATABASE_URL names what can't be opened: {error}".strip()) from None
    with connection.cursor() as cursor:
        if MARK not in tables:
            if connection.vendor == "postgresql":
                cursor.execute(_MADE)
                tables = {name for (name,) in cursor.fetchall()}
            if tables:
                raise _unusable(f"it is not empty ({min(tables)}, {len(tables)} in all)")
        elif "tenants_tenant" in tables:
            cursor.execute("SELECT slug FROM tenants_tenant")
            if others := {slug for (slug,) in cursor.fetchall()} - set(demos):
                raise _unusable(f"others use it since a demo made it ({min(others)})")
    _empty(connection, tables)
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE TABLE {MARK} (made_by text)")


def check_broker() -> None:
    """Raise Unusable if workers listen to the Redis of these settings."""
    from kombu.exceptions import OperationalError

    from platform_admin.celery import app

    try:
        workers = app.control.ping(timeout=ANSWER_SECONDS)
    except OperationalError as error:
        raise Unusable(f"REDIS_URL names what can't be reached: {error}") from None
    if workers:
        raise Unusable(
            "workers of another installation listen to REDIS_URL. Name another Redis, or another"
            " database of it (.../1); without REDIS_URL the demo needs none."
        )


def _unusable(why: str) -> Unusable:
    return Unusable(
        f"the database that DATABASE_URL names is somebody's: {why}. Nothing was changed. Name an"
        " empty one; without DATABASE_URL the demo makes its own."
    )


def _empty(connection: BaseDatabaseWrapper, tables: set[str]) -> None:
    if not tables:
        return
    if connection.vendor == "sqlite":
        connection.close()
        for suffix in ("", "-wal", "-shm"):
            Path(f"{connection.settings_dict['NAME']}{suffix}").unlink(missing_ok=True)
        return
    with connection.cursor() as cursor:
        names = ", ".join(map(connection.ops.quote_name, tables))
        cursor.execute(f"DROP TABLE {names} CASCADE")
        # Those of the triggers that went with their tables.
        cursor.execute(_FUNCTIONS)
        for (function,) in cursor.fetchall():
            cursor.execute(f"DROP FUNCTION {function} CASCADE")


def _databases(server: str) -> dict[str, str]:
    """Make a database for each store; return their URLs."""
    base = server.rpartition("/")[0]
    with psycopg.connect(server, autocommit=True) as connection:
        for key in STORES:
            connection.execute(f'CREATE DATABASE "{key}"'.encode())
    base = base.replace("postgres://", "postgresql+psycopg://", 1)
    return {key: f"{base}/{key}" for key in STORES}
