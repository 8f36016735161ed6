"""What a service is and holds, as far as its interface tells: listed whole, read in part."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from migrations_app.ports import schema
from migrations_app.ports.base import Finding, Key, Survey
from migrations_app.ports.service_link import engine

if TYPE_CHECKING:
    from google.adk.events import Event

    from migrations_app.ports.service import ServiceStore

# How long sessions are read for their events' number; the others are read as they are copied.
READ_SECONDS = 4.0

# (test of user and session, reason): each stops the preparation.
_IDS = (
    (
        lambda text: len(text) > schema.LONGEST_ID,
        "longer than the 128 characters of ADK's schema v1: rename or delete it",
    ),
    (
        lambda text: "\0" in text,
        "a NUL character in an id, which neither PostgreSQL nor a move's records can hold",
    ),
    (
        lambda text: not text,
        "an empty id can't be told from shared state in a move's records: delete the session",
    ),
)


def survey(store: ServiceStore) -> Survey:
    """Look at everything that a person should know before a move; changes nothing."""
    heads = store.heads()
    keys = [key for key, _ in heads]
    found: list[Finding] = []
    for test, reason in _IDS:
        odd = [key for key in keys if any(map(test, key))]
        if odd:
            example = ascii(f"{odd[0].user_id[:40]}/{odd[0].session_id[:40]}")[1:-1]
            found.append(Finding("sessions.id", reason, len(odd), example, True))
    app = store.shared([None]).get(None)
    events, interrupted, read = _read(store, keys)
    if read < len(keys):
        reason = "only so many were read, and their events counted; the others are as they are"
        found.append(Finding("sessions", f"{reason} copied", read, "", False))
    return Survey(
        kind=store.kind,
        database=_words(store),
        schema_version="service",
        sessions=len(keys),
        users=len({key.user_id for key in keys}),
        events=events,
        interrupted=len(interrupted),
        clock_skew_seconds=0.0,  # no call tells the service's clock
        can_close=False,
        stamps_see_edits=False,
        findings=tuple(found),
        dialect=store.dialect,
        layout=store.layout,
        has_app_state=app is not None and app.state != "{}",
        interrupted_keys=tuple(interrupted[: schema.NAMED]),
    )


def _words(store: ServiceStore) -> str:
    name = type(store.service).__name__
    dialect = getattr(getattr(engine(store.service), "dialect", None), "name", "")
    return f"{name} on {dialect}" if dialect else name


def _read(store: ServiceStore, keys: list[Key]) -> tuple[int, list[Key], int]:
    """Count events and interrupted sessions for a few seconds; return how many were read."""
    until, events, read = time.monotonic() + READ_SECONDS, 0, 0
    interrupted = []
    for bite in store.bites(keys):
        if time.monotonic() > until:
            break
        for key, session in store.whole(bite):
            events += len(session.events)
            if session.events and _cut_short(session.events[-1]):
                interrupted.append(key)
        read += len(bite)
    return events, interrupted, read


def _cut_short(event: Event) -> bool:
    """Whether a turn ends in a function call that nothing followed, or was told to stop."""
    parts: list[Any] = list((event.content.parts if event.content else None) or [])
    return event.error_code == "INVOCATION_ABORTED" or any(part.function_call for part in parts)
