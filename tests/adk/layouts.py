"""Stores of every layout, as google-adk and as a port open them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from google.adk.sessions import BaseSessionService, DatabaseSessionService, InMemorySessionService
from google.adk.sessions.sqlite_session_service import SqliteSessionService

from migrations_app.domain.values import Layout
from migrations_app.ports import open_store
from migrations_app.ports.base import SessionStore

ACME = "support.acme"
FILES = (
    Layout.SQLITE,
    Layout.ADK_SQLITE,
    Layout.SERVICE_SQLITE,
    Layout.SERVICE_ADK_SQLITE,
)
OWN_FILES = (Layout.ADK_SQLITE, Layout.SERVICE_ADK_SQLITE)
# What services in memory hold, by the variable that leads to them; `source` and `target` make the
# services, as a callable of an operator's would.
MEMORIES: dict[str, InMemorySessionService] = {}


def source() -> InMemorySessionService:
    return MEMORIES.setdefault("SOURCE", InMemorySessionService())


def target() -> InMemorySessionService:
    return MEMORIES.setdefault("TARGET", InMemorySessionService())


def kind_of(layout: Layout) -> str:
    if layout.is_service:
        return "adk-service"
    return "adk-sqlite" if layout is Layout.ADK_SQLITE else "adk-sql"


@dataclass(frozen=True)
class Place:
    layout: Layout
    # Of the database; of a service in memory, the variable that leads to it.
    url: str
    reference: str

    @asynccontextmanager
    async def adk(self) -> AsyncIterator[BaseSessionService]:
        """Open google-adk's own service of this layout."""
        service: Any
        if self.layout is Layout.SERVICE:
            yield MEMORIES[self.url]
            return
        if self.layout in OWN_FILES:
            service = SqliteSessionService(self.url)
        else:
            service = DatabaseSessionService(uri_of(self.layout, self.url))
        try:
            yield service
        finally:
            await service.close()

    def port(self) -> AbstractContextManager[SessionStore]:
        return open_store(kind_of(self.layout), self.reference, app_name=ACME, move=1, claim=1)

    def prepare(self) -> None:
        """Let move 1 write here."""
        with self.port() as store:
            store.provision()
            store.adopt(None, mover=True, agents=False)


def uri_of(layout: Layout, url: str) -> str:
    """Spell a database's URL as google-adk's own commands take it for a service."""
    scheme, _, rest = url.partition("://")
    if layout in OWN_FILES:
        return url
    drivers = {"postgresql": "postgresql+psycopg", "sqlite": "sqlite+aiosqlite"}
    return f"{drivers[scheme]}://{rest}"


def place(
    layout: Layout, name: str, folder: Path, database: Callable[[], str], patch: pytest.MonkeyPatch
) -> Place:
    """Make an empty store, known to this process by the variable STORE_<name>."""
    reference = f"env:STORE_{name}"
    if layout is Layout.SERVICE:
        MEMORIES[name] = InMemorySessionService()
        patch.setenv(f"STORE_{name}", f"python:tests.adk.layouts:{name.lower()}")
        return Place(layout, name, reference)
    url = f"sqlite:///{folder / name}.db" if layout in FILES else database()
    patch.setenv(f"STORE_{name}", uri_of(layout, url) if layout.is_service else url)
    return Place(layout, url, reference)
