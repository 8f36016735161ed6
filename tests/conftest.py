"""Real servers for every test, and the cast: three tenants that must never see each other."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import psycopg
import pytest
from django.conf import settings
from django.db import connection
from psycopg import sql
from pytest_django.plugin import blocking_manager_key

if TYPE_CHECKING:
    from tests import make

TESTS = Path(__file__).parent
ORDER = {"browser": 0, "faults": 1, "traffic": 3}


@pytest.fixture(scope="session")
def django_db_modify_db_settings(django_db_modify_db_settings_parallel_suffix: None) -> None:
    """Refuse to test on SQLite what is promised for PostgreSQL; each process has its database."""
    if "postgresql" not in settings.DATABASES["default"]["ENGINE"]:
        pytest.exit("Run `make test`, or set DATABASE_URL to a PostgreSQL server.", 2)


def pytest_configure(config: pytest.Config) -> None:
    """Give each process of a test run a Redis database of its own; Django gives it its database.

    Celery's queues and the cache have fixed names. Redis has 16 databases, shared out evenly.
    """
    worker: dict[str, Any] | None = getattr(config, "workerinput", None)
    if worker is None or not settings.REDIS_URL:
        return
    server, _, number = settings.REDIS_URL.rpartition("/")
    further = int(worker["workerid"].removeprefix("gw")) * (16 // worker["workercount"])
    os.environ["REDIS_URL"] = url = f"{server}/{(int(number) + further) % 16}"
    settings.REDIS_URL = settings.CACHES["default"]["LOCATION"] = url


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Share the tests out among the processes of `-n 2`."""
    from tests.halves import Halves

    # The order is ours, below: xdist's own is by the number of tests.
    config.option.loadscopereorder = False
    return Halves(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each transactional test the rows that schema migrations made: roles, the counter.

    Such a test empties every table at its end. Restoring only where a test asks for it
    clashes with those that don't: their flush makes content types anew.
    """
    for item in items:
        if _empties(item):
            item.fixturenames.append("django_db_serialized_rollback")  # type: ignore[attr-defined]
    # What takes long begins early, so that two processes end together; traffic, which fills the
    # machine by itself, comes when the rest is over. Random within each: sorting is stable.
    items.sort(key=lambda item: ORDER.get(item.path.relative_to(TESTS).parts[0], 2))


def _empties(item: pytest.Item) -> bool:
    """Whether the test empties every table at its end."""
    marker = item.get_closest_marker("django_db")
    if marker is not None and marker.kwargs.get("transaction", False):
        return True
    return bool({"transactional_db", "live_server"} & _fixtures(item))


def _fixtures(item: pytest.Item) -> set[str]:
    return set(getattr(item, "fixturenames", ()))


# Whether a transactional test has left the tables empty.
_emptied = pytest.StashKey[bool]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Put those rows back for a test that shares the tables, whichever test came before it.

    pytest-django runs all of these first; files that are shared out among processes can't be
    kept in such an order.
    """
    if _empties(item):
        item.session.stash[_emptied] = True
    elif item.session.stash.get(_emptied, False) and (
        "db" in _fixtures(item) or item.get_closest_marker("django_db")
    ):
        item.session.stash[_emptied] = False
        with item.config.stash[blocking_manager_key].unblock():
            creation = connection.creation
            creation.deserialize_db_from_string(connection._test_serialized_contents)


@pytest.fixture(autouse=True)
def nothing_measured_before() -> None:
    """Forget what other tests' cells used: theirs may have had the same ids."""
    from capacity import room  # not above: Django is not set up yet

    room._kept.clear()


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


class Scratch:
    """Databases for tests, given again when their test is over.

    Making and dropping one takes a checkpoint each; emptying it does not.
    """

    def __init__(self, server_url: str) -> None:
        self.server_url = server_url
        self.made: list[str] = []
        self.free: list[str] = []

    def give(self) -> str:
        """Return the name of an empty database."""
        while self.free:
            name = self.free.pop()
            # Gone: its test was about a database that somebody drops.
            with suppress(psycopg.OperationalError):
                self._empty(name)
                return name
        return self._make()

    def drop(self) -> None:
        """Drop all that were made."""
        with psycopg.connect(f"{self.server_url}/postgres", autocommit=True) as connection:
            for name in self.made:
                connection.execute(
                    # FORCE: a test that failed may have left a connection behind.
                    sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name))
                )

    def _empty(self, name: str) -> None:
        with psycopg.connect(f"{self.server_url}/{name}", autocommit=True) as connection:
            # What a test that failed has left open would hold the schema's lock.
            connection.execute(
                "SELECT pg_terminate_backend(pid, 2000) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            schemas = connection.execute(
                "SELECT nspname FROM pg_namespace WHERE nspname !~ '^(pg_|information_schema$)'"
            ).fetchall()
            for (schema,) in schemas:
                connection.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(schema)))
            connection.execute("CREATE SCHEMA public AUTHORIZATION pg_database_owner")
            connection.execute("GRANT USAGE ON SCHEMA public TO PUBLIC")

    def _make(self) -> str:
        name = f"scratch_{secrets.token_hex(6)}"
        with psycopg.connect(f"{self.server_url}/postgres", autocommit=True) as connection:
            database = sql.Identifier(name)
            connection.execute(sql.SQL("CREATE DATABASE {} TEMPLATE template0").format(database))
            # Nothing here outlives a power cut, so nothing needs to wait for the disk.
            connection.execute(
                sql.SQL("ALTER DATABASE {} SET synchronous_commit = off").format(database)
            )
        self.made.append(name)
        return name


@pytest.fixture(scope="session")
def scratch(server_url: str) -> Iterator[Scratch]:
    """The databases that tests of this process share, one after another."""
    databases = Scratch(server_url)
    yield databases
    databases.drop()


@pytest.fixture
def new_database(scratch: Scratch) -> Iterator[Callable[[], str]]:
    """Give an empty scratch database with every call; returns its URL."""
    names: list[str] = []

    def give() -> str:
        names.append(scratch.give())
        return f"{scratch.server_url}/{names[-1]}"

    yield give
    scratch.free.extend(names)


@pytest.fixture
def store_url(new_database: Callable[[], str]) -> str:
    """The URL of one scratch PostgreSQL database."""
    return new_database()
