"""Two stores of each kind: a source with two tenants, a target that move 1 may write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.apps.migrations_app.ports.places import ACME, BOLT, Place, fill


@pytest.fixture(params=["postgresql", "sqlite", "adk-sqlite"])
def dialect(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def new_place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, str], Place]:
    """Make an empty store of a layout, known to this process by the variable STORE_<name>."""

    def create(dialect: str, name: str) -> Place:
        if dialect == "postgresql":
            url = request.getfixturevalue("new_database")()
            place = Place(dialect, url, f"env:STORE_{name}")
        else:
            path = str(tmp_path / f"{name}.db")
            kind = "adk-sql" if dialect == "sqlite" else dialect
            # A service's is DatabaseSessionService: its tables are those of adk-sql.
            scheme = "sqlite+aiosqlite" if kind == "adk-service" else "sqlite"
            place = Place("sqlite", f"{scheme}:///{path}", f"env:STORE_{name}", path, kind)
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
