"""One session service of google-adk: how it is opened, the loop it lives in, its errors.

google-adk is asynchronous and a store's callers are not, so each handle has an event loop in a
thread of its own, which ends with it. google-adk and SQLAlchemy are imported here when a
service is opened, not before: they take a second and are the extra `adk`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import sqlite3
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg

from durable.machine import Overtaken
from migrations_app.domain.values import Layout
from migrations_app.ports import postgres_link, sqlite_link
from migrations_app.ports.address import Service
from migrations_app.ports.base import (
    AddressMissing,
    NotASessionStore,
    OldSchema,
    StoreFailed,
    StoreRefused,
    Unreachable,
    WrongCredentials,
)
from migrations_app.ports.factory import Kind, made

if TYPE_CHECKING:
    from google.adk.sessions import BaseSessionService, Session

# Below the worker's hard time limit (20 s of a lease of 30 s), as STATEMENT_SECONDS of PostgreSQL.
CALL_SECONDS = 15.0
CONNECT_SECONDS = 3
CLOSE_SECONDS = 3.0
# Calls at once: more hide only what the database takes, the rest is one core of Python.
AT_ONCE = 4
THREAD = "adk-service"
# SQLite's one writer: with 16 at once google-adk met "database is locked".
ALONE = (Layout.SERVICE_SQLITE, Layout.SERVICE_ADK_SQLITE)

T = TypeVar("T")


class AdkMissing(StoreRefused):
    """google-adk is not installed here, and only it opens such a store."""


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=THREAD, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], seconds: float = CALL_SECONDS) -> T:
        """Run it there and return its answer; raises TimeoutError while it still goes on.

        It is not cancelled: an SQLite connection that is cut in a call keeps its lock.
        """
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result(seconds)

    def quiet(self) -> bool:
        """End whatever still runs; return whether nothing does."""

        async def end() -> None:
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

        try:
            self.run(end(), CLOSE_SECONDS)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """End whatever still runs, and the thread."""
        if self.quiet():
            with suppress(TimeoutError):
                self.run(self._loop.shutdown_asyncgens(), CLOSE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()


class ServiceLink(ABC):
    """A handle's service and its loop."""

    kind = "adk-service"
    dialect = "service"
    # A service has no tables that could be missing: it answers, or is not opened.
    has_tables = True

    def __init__(
        self, address: Service, *, reference: str, app_name: str, move: int, claim: int
    ) -> None:
        self.where = reference
        self.app_name = app_name
        self.move = move
        self.claim = claim
        self.loop = Loop()
        try:
            self.service = self.run(_opened(address.uri, reference))
            self.layout = _layout(self.service)
            self.at_once = 1 if self.layout in ALONE else AT_ONCE
            self.begin()
        except BaseException:
            self._end()
            raise

    @abstractmethod
    def begin(self) -> None:
        """Make the first call, which connects; what it reads is for a guard to say."""

    def close(self) -> None:
        """Close the service, where it can be, and end the loop."""
        self._end()

    def _end(self) -> None:
        # Not `close`: that of a guard says more, and a handle that was never open says nothing.
        service = getattr(self, "service", None)
        if (close := getattr(service, "close", None)) is not None:
            with suppress(Exception):
                self.loop.run(_awaited(close()), CLOSE_SECONDS)
        self.loop.close()

    # --- calls -----------------------------------------------------------------------------

    def run(self, work: Coroutine[Any, Any, T], seconds: float = CALL_SECONDS) -> T:
        """Run calls of the service; raises StoreRefused of some kind, never what a library says."""
        with self.clean():
            return self.loop.run(work, seconds)

    @contextmanager
    def clean(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise self.refusal(error) from None

    def refusal(self, error: Exception) -> Exception:
        """Turn any error into ours: no address, no user, no value."""
        return _clean(error, self.where)

    async def all(self, calls: Iterable[Callable[[], Awaitable[T]]]) -> list[T]:
        """Make these calls, a few at once, and return their answers; raises the first error."""
        gate = asyncio.Semaphore(self.at_once)

        async def one(call: Callable[[], Awaitable[T]]) -> T:
            async with gate:
                return await call()

        # None is cancelled when another fails: see Loop.run.
        answers = await asyncio.gather(*map(one, calls), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers  # type: ignore[return-value]

    async def get(self, user: str, name: str, *, events: bool = True) -> Session | None:
        """Return a session, if the service has it under exactly this name.

        In-memory and SQLite services strip the name that they look for.
        """
        from google.adk.sessions.base_session_service import GetSessionConfig

        config = None if events else GetSessionConfig(num_recent_events=0)
        found = await self.service.get_session(
            app_name=self.app_name, user_id=user, session_id=name, config=config
        )
        return found if found is not None and (found.user_id, found.id) == (user, name) else None

    async def drop(self, user: str, name: str) -> bool:
        """Delete a session of exactly this name; return whether there was one."""
        if await self.get(user, name, events=False) is None:
            return False
        await self.service.delete_session(app_name=self.app_name, user_id=user, session_id=name)
        return True

    def check_version(self) -> None:
        if getattr(self.service, "_db_schema_version", None) == "0":
            raise OldSchema(
                f"The tables of {self.where} are ADK's schema v0, which keeps pickles; they are"
                " never read here. Upgrade a copy first: adk migrate session --source_db_url=..."
                " --dest_db_url=... Run it with TZ=UTC: where the host's zone is another one it"
                " shifts every event's time by the offset and leaves the sessions' times."
            )


def _not_ours(record: logging.LogRecord) -> bool:
    return record.threadName != THREAD


def _hush() -> None:
    """Keep out of the log what google-adk says of our calls: it quotes addresses and values.

    What is raised is answered here, in words of ours; agents in this process log as before.
    """
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("google_adk"):
            logging.getLogger(name).addFilter(_not_ours)


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


async def _opened(uri: str, reference: str) -> BaseSessionService:
    registry = _KIND.registry()
    from google.adk.sessions import BaseSessionService

    _hush()
    with _KIND.opening(reference):
        try:
            if uri.startswith("python:"):
                service = await _awaited(made(uri))
            else:
                service = registry.create_session_service(uri) or _database(uri)
        except RuntimeError as error:
            if "old schema" not in str(error):
                raise
            raise OldSchema(
                f"The tables of {reference} are of an older google-adk. Run its migration first:"
                " python -m google.adk.sessions.migration.migrate_from_sqlalchemy_sqlite."
            ) from None
    found: BaseSessionService = _KIND.checked(service, BaseSessionService, reference)
    return found


_KIND = Kind(
    "session service",
    "It is a URI that google-adk knows, with an asynchronous driver (postgresql+psycopg://...,"
    " sqlite+aiosqlite:////..., agentengine://...), or python:package.module:factory.",
    unknown=AddressMissing,
    other=NotASessionStore,
    missing=AdkMissing,
)


def _database(uri: str) -> BaseSessionService:
    """Open what the registry has no scheme for, as google-adk's own commands do."""
    from google.adk.sessions import DatabaseSessionService

    # Its module has a logger of its own, and is here only now.
    _hush()
    if uri.startswith("postgresql+psycopg:"):
        seconds = {"connect_timeout": CONNECT_SECONDS}
        return DatabaseSessionService(uri, connect_args=seconds)
    return DatabaseSessionService(uri)


def _layout(service: BaseSessionService) -> Layout:
    """Tell what a service stands on, where that is known."""
    from google.adk.sessions.sqlite_session_service import SqliteSessionService

    if isinstance(service, SqliteSessionService):
        return Layout.SERVICE_ADK_SQLITE
    dialect = getattr(getattr(engine(service), "dialect", None), "name", "")
    known = {"postgresql": Layout.SERVICE_POSTGRESQL, "sqlite": Layout.SERVICE_SQLITE}
    return known.get(dialect, Layout.SERVICE)


def engine(service: BaseSessionService) -> Any:
    """Return the engine of a DatabaseSessionService; None of any other."""
    try:
        from google.adk.sessions import DatabaseSessionService
    except ImportError:
        return None
    return service.db_engine if isinstance(service, DatabaseSessionService) else None


def _clean(error: Exception, where: str) -> Exception:
    if isinstance(error, StoreRefused | Overtaken):
        return error
    origin = getattr(error, "orig", None) or error
    if isinstance(origin, psycopg.Error):
        return postgres_link.refusal(origin, where)
    if isinstance(origin, sqlite3.Error):
        return sqlite_link.refusal(origin, where)
    if isinstance(origin, TimeoutError):
        return Unreachable(
            f"{where} did not answer within {CALL_SECONDS:.0f} s. It is tried again."
        )
    if isinstance(origin, PermissionError):
        return WrongCredentials(f"{where} refused this process ({type(origin).__name__}).")
    if isinstance(origin, OSError):
        return Unreachable(f"No answer from {where} ({type(origin).__name__}). It is tried again.")
    return ServiceFailed(f"{where}: {type(origin).__name__}")


class ServiceFailed(StoreFailed):
    """A service raised what is none of a database's own errors."""
