"""Memory services that a store's `memory_from` may name by dotted path."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from google.adk.memory import BaseMemoryService, InMemoryMemoryService
from google.adk.memory.base_memory_service import SearchMemoryResponse
from google.adk.memory.memory_entry import MemoryEntry
from google.genai import types

# What `target` and `source` give out: one service each, as servers would be.
SERVICES: dict[str, BaseMemoryService] = {}


def target() -> BaseMemoryService:
    return SERVICES["target"]


def source() -> BaseMemoryService:
    return SERVICES["source"]


def nothing() -> None:
    return None


class Kept(InMemoryMemoryService):
    """Counts what it is given, and does not take what it is told not to ("*": anything)."""

    def __init__(self, *refused: str) -> None:
        super().__init__()
        self.refused = set(refused)
        self.given: list[str] = []
        self.alive: weakref.WeakSet[Any] = weakref.WeakSet()
        # Sessions that somebody held at one time.
        self.most = 0

    async def add_session_to_memory(self, session: Any) -> None:
        if session.events:  # without any it is being removed
            self.given.append(session.id)
        self.alive.add(_Held(session))
        self.most = max(self.most, len(self.alive))
        if "*" in self.refused or session.id in self.refused:
            raise ValueError(f"secret words of {session.id}")
        await super().add_session_to_memory(session)

    def texts(self, app_name: str, user_id: str, session_id: str) -> list[str]:
        """Return what it holds of a session."""
        events = self._session_events[(app_name, user_id)][session_id]
        return [event.content.parts[0].text for event in events]


@contextmanager
def anew() -> Iterator[None]:
    """Run the body with an empty service on either side."""
    SERVICES.update(target=Kept(), source=Kept())
    yield
    SERVICES.clear()


def kept(side: str = "target") -> Kept:
    service = SERVICES[side]
    assert isinstance(service, Kept)
    return service


class _Held:
    """Lives as long as its session, which pydantic makes impossible to hash."""

    def __init__(self, session: Any) -> None:
        session.__dict__["_held"] = self


class Deaf(BaseMemoryService):
    """Takes everything and finds nothing: an index that points nowhere."""

    async def add_session_to_memory(self, session: Any) -> None:
        return None

    async def search_memory(self, *, app_name: str, user_id: str, query: str) -> Any:
        return SearchMemoryResponse()


class Paraphrasing(Deaf):
    """Answers in its own words, as a model does."""

    async def search_memory(self, *, app_name: str, user_id: str, query: str) -> Any:
        said = types.Content(role="user", parts=[types.Part(text="The user likes tea.")])
        return SearchMemoryResponse(memories=[MemoryEntry(content=said)])
