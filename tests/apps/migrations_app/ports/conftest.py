"""Two stores of each kind: a source with two tenants, a target that move 1 may write."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from tests.apps.migrations_app.ports.places import ACME, BOLT, Place, fill


@pytest.fixture(params=["postgresql", "sqlite"])
def dialect(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def emptied_database(server_url: str) -> Iterator[Callable[[str], str]]:
    """Give a database by name, emptied: making one takes a checkpoint, emptying it does not."""
    made: dict[str, str] = {}

    def give(name: str) -> str:
        if name not in made:
            made[name] = f"store_{secrets.token_hex(6)}"
            with psycopg.connect(f"{server_url}/postgres", autocommit=True) as admin:
                database = sql.Identifier(made[name])
                admin.execute(sql.SQL("CREATE DATABASE {} TEMPLATE template0").format(database))
                # Nothing here outlives a power cut, so nothing needs to wait for the disk.
                admin.execute(
                    sql.SQL("ALTER DATABASE {} SET synchronous_commit = off").format(database)
                )
        url = f"{server_url}/{made[name]}"
        with psycopg.connect(url, autocommit=True) as admin:
            # What a test that failed has left open would hold the schema's lock.
            admin.execute(
                "SELECT pg_terminate_backend(pid, 2000) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            admin.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        return url

    yield give
    with psycopg.connect(f"{server_url}/postgres", autocommit=True) as admin:
        for name in made.values():
            admin.execute(
                sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name))
            )


@pytest.fixture
def new_place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, str], Place]:
    """Make an empty database of a dialect, known to this process by the variable STORE_<name>."""

    def create(dialect: str, name: str) -> Place:
        if dialect == "sqlite":
            path = str(tmp_path / f"{name}.db")
            place = Place(dialect, f"sqlite:///{path}", f"env:STORE_{name}", path)
        else:
            url = request.getfixturevalue("emptied_database")(name)
            place = Place(dialect, url, f"env:STORE_{name}")
        monkeypatch.setenv(f"STORE_{name}", place.url)
        return place

    return create


@pytest.fixture
def source(dialect: str, new_place: Callable[[str, str], Place]) -> Place:
    """A store with two tenants, bolt's for us to leave alone."""
    place = new_place(dialect, "SOURCE")
    fill(place, ACME)
    fill(place, BOLT, sessions=2)
    return place


@pytest.fixture
def empty(dialect: str, new_place: Callable[[str, str], Place]) -> Place:
    """A database with nothing in it."""
    return new_place(dialect, "TARGET")


@pytest.fixture
def target(empty: Place) -> Place:
    """A store that move 1 may write under claim 1, with a tenant of its own."""
    fill(empty, BOLT, sessions=1)
    with empty.open() as store:
        store.provision()
        store.adopt(None, mover=True, agents=False)
    return empty
