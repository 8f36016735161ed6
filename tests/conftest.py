"""Real servers for every test, and the cast: three tenants that must never see each other."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from urllib.parse import quote

import psycopg
import pytest
from django.conf import settings
from psycopg import sql

if TYPE_CHECKING:
    from tests import make


@pytest.fixture(scope="session")
def django_db_modify_db_settings() -> None:
    """Refuse to test on SQLite what is promised for PostgreSQL."""
    if "postgresql" not in settings.DATABASES["default"]["ENGINE"]:
        pytest.exit("Run `make test`, or set DATABASE_URL to a PostgreSQL server.", 2)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each transactional test the rows that schema migrations made: roles, the counter.

    Such a test empties every table at its end. Restoring only where a test asks for it
    clashes with those that don't: their flush makes content types anew.
    """
    for item in items:
        marker = item.get_closest_marker("django_db")
        fixtures: list[str] = getattr(item, "fixturenames", [])
        asked = marker is not None and marker.kwargs.get("transaction", False)
        if asked or {"transactional_db", "live_server"} & set(fixtures):
            fixtures.append("django_db_serialized_rollback")


@pytest.fixture
def now() -> datetime:
    """A fixed moment: tests pass time on by passing a later one."""
    return datetime(2026, 3, 2, 12, 0, tzinfo=UTC)


@pytest.fixture
def cast(db: None, now: datetime) -> make.Cast:
    """acme (small) and bolt (large) of agent support, and core of agent billing, in cell one."""
    from tests import make  # not above: tests without a database need none of its imports

    return make.cast(now=now)


@pytest.fixture(scope="session")
def server_url() -> str:
    """The test server's address without a database: postgresql://user:password@host:port."""
    database = settings.DATABASES["default"]
    user = quote(database["USER"] or "postgres", safe="")
    password = f":{quote(database['PASSWORD'], safe='')}" if database["PASSWORD"] else ""
    return f"postgresql://{user}{password}@{database['HOST']}:{database['PORT'] or 5432}"


@pytest.fixture
def new_database(server_url: str) -> Iterator[Callable[[], str]]:
    """Make a scratch database with every call; returns its URL. All are dropped afterwards."""
    names: list[str] = []

    def create() -> str:
        name = f"store_{secrets.token_hex(6)}"
        with psycopg.connect(f"{server_url}/postgres", autocommit=True) as connection:
            connection.execute(
                sql.SQL("CREATE DATABASE {} TEMPLATE template0").format(sql.Identifier(name))
            )
        names.append(name)
        return f"{server_url}/{name}"

    yield create
    with psycopg.connect(f"{server_url}/postgres", autocommit=True) as connection:
        for name in names:
            connection.execute(
                # FORCE: a test that failed may have left a connection behind.
                sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name))
            )


@pytest.fixture
def store_url(new_database: Callable[[], str]) -> str:
    """The URL of one scratch PostgreSQL database."""
    return new_database()
