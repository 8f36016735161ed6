"""Memory services that a store's `memory_from` may name by dotted path."""

from __future__ import annotations

from typing import Any

from google.adk.memory import BaseMemoryService, InMemoryMemoryService
from google.adk.memory.base_memory_service import SearchMemoryResponse

# What `kept` gives out: one service a process, as a server would be. A test puts in its own.
SERVICES: dict[str, BaseMemoryService] = {}


def kept() -> BaseMemoryService:
    return SERVICES.setdefault("kept", InMemoryMemoryService())


class Deaf(BaseMemoryService):
    """Takes everything and finds nothing: another tenant's corpus, an index that points nowhere."""

    async def add_session_to_memory(self, session: Any) -> None:
        return None

    async def search_memory(self, *, app_name: str, user_id: str, query: str) -> Any:
        return SearchMemoryResponse()


class Picky(InMemoryMemoryService):
    """Does not take what it is told not to; counts what it is given."""

    def __init__(self, *refused: str) -> None:
        super().__init__()
        self.refused = set(refused)
        self.given: list[str] = []
        self.most = self.now = 0

    async def add_session_to_memory(self, session: Any) -> None:
        self.given.append(session.id)
        if "*" in self.refused or session.id in self.refused:
            raise ValueError(f"secret words of {session.id}")
        await super().add_session_to_memory(session)
