"""Session services for the Host's `stores`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.adk.sessions import DatabaseSessionService

# google-adk wants an async driver named in the address; people and tools write it without.
_DRIVERS = {
    "postgres": "postgresql+psycopg",
    "postgresql": "postgresql+psycopg",
    "sqlite": "sqlite+aiosqlite",
}


def sql_store(address: str, **engine: Any) -> Callable[[], DatabaseSessionService]:
    """Return a factory of the session service at `address`, for the Host's `stores`.

    `address` is a database URL, with or without a driver in it; `engine` is handed to
    SQLAlchemy's create_async_engine. Nothing is opened before the factory is called.
    """
    scheme, separator, rest = address.partition("://")
    if not separator:
        # Without the address: it may hold a password.
        raise ValueError("a store's address reads like postgresql://... or sqlite:///...")
    url = f"{_DRIVERS.get(scheme, scheme)}://{rest}"
    return lambda: DatabaseSessionService(url, **engine)
