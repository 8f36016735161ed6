"""Worlds on both databases. Kills, aborts and pauses are tried at every moment of a move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import pytest

from tests import make
from tests.world import World, world


@pytest.fixture
def files(
    monkeypatch: pytest.MonkeyPatch, cast: make.Cast, now: datetime, tmp_path: Path
) -> Iterator[World]:
    """A world on two SQLite files."""
    source, target = f"sqlite:///{tmp_path}/one.db", f"sqlite:///{tmp_path}/two.db"
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
def both(request: pytest.FixtureRequest) -> World:
    """The same world on SQLite, then on PostgreSQL."""
    ready: World = request.getfixturevalue(request.param)
    return ready
