"""Stores of every layout, as google-adk and as a port open them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from google.adk.sessions import BaseSessionService, DatabaseSessionService
from google.adk.sessions.sqlite_session_service import SqliteSessionService

from migrations_app.domain.values import Layout
from migrations_app.ports import open_store
from migrations_app.ports.base import SessionStore

ACME = "support.acme"
KINDS = {Layout.ADK_SQLITE: "adk-sqlite", Layout.SQLITE: "adk-sql", Layout.POSTGRESQL: "adk-sql"}


@dataclass(frozen=True)
class Place:
    layout: Layout
    url: str
    reference: str

    @asynccontextmanager
    async def adk(self) -> AsyncIterator[BaseSessionService]:
        """Open google-adk's own service of this layout."""
        service: Any
        if self.layout is Layout.ADK_SQLITE:
            service = SqliteSessionService(self.url)
        else:
            drivers = {"postgresql": "postgresql+psycopg", "sqlite": "sqlite+aiosqlite"}
            scheme, _, rest = self.url.partition("://")
            service = DatabaseSessionService(f"{drivers[scheme]}://{rest}")
        try:
            yield service
        finally:
            await service.close()

    def port(self) -> AbstractContextManager[SessionStore]:
        return open_store(KINDS[self.layout], self.reference, app_name=ACME, move=1, claim=1)

    def prepare(self) -> None:
        """Let move 1 write here."""
        with self.port() as store:
            store.provision()
            store.adopt(None, mover=True, agents=False)
