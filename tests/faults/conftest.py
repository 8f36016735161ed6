"""Worlds on both databases. Kills, aborts and pauses are tried at every moment of a move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests import make
from tests.world import World, world


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch, cast: make.Cast, now: datetime) -> Iterator[World]:
    """A world on two SQLite files, in memory where there is such a place: kills are many."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        source, target = f"sqlite:///{folder}/one.db", f"sqlite:///{folder}/two.db"
        with world(monkeypatch, cast, now, source, target) as ready:
            yield ready


@pytest.fixture
def servers(
    monkeypatch: pytest.MonkeyPatch,
    cast: make.Cast,
    now: datetime,
    new_database: Callable[[], str],
) -> Iterator[World]:
    """A world on two PostgreSQL databases."""
    with world(monkeypatch, cast, now, new_database(), new_database()) as ready:
        yield ready


@pytest.fixture(params=["files", "servers"])
def both(request: pytest.FixtureRequest, db: None) -> World:
    """The same world on SQLite, then on PostgreSQL.

    `db` is named for pytest-django: it looks for it before any fixture runs.
    """
    ready: World = request.getfixturevalue(request.param)
    return ready
