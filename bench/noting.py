"""ADK's session service, telling which store took an event."""

from __future__ import annotations

from typing import Any

from google.adk.events.event import Event
from google.adk.sessions.database_session_service import DatabaseSessionService
from google.adk.sessions.session import Session


class Noting(DatabaseSessionService):
    """ADK's own service, which also notes which store took each event."""

    def __init__(self, url: str, key: str, taken: dict[str, str]) -> None:
        # Longer than any chunk of a copy: two processes and a mover share an SQLite file.
        options: dict[str, Any] = (
            {"connect_args": {"timeout": 20}} if url.startswith("sqlite") else {}
        )
        super().__init__(url, **options)
        self._key, self._taken = key, taken

    async def append_event(self, session: Session, event: Event) -> Event:
        stored = await super().append_event(session, event)
        if not event.partial:
            self._taken[event.id] = self._key
        return stored
