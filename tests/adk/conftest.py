"""Empty stores of every layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from migrations_app.domain.values import Layout
from tests.adk import layouts
from tests.adk.layouts import Place


@pytest.fixture
def new_place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Layout, str], Place]:
    """Make an empty store, known to this process by the variable STORE_<name>."""

    def create(layout: Layout, name: str) -> Place:
        def database() -> str:
            return str(request.getfixturevalue("new_database")())

        return layouts.place(layout, name, tmp_path, database, monkeypatch)

    return create
