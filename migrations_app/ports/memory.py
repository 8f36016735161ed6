"""Memory: google-adk's memory services, which are filled by reading sessions in again.

No memory service can list or hand out what it holds, so a move doesn't copy memory: it gives each
session to the other side's service, as an agent does after a turn (`add_session_to_memory`).
google-adk is imported when a service is opened, not before: it takes a second and is an extra.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import secrets
import string
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from migrations_app.domain import canonical
from migrations_app.ports.address import read
from migrations_app.ports.base import NOBODY, Key, SessionStore, StoreRefused
from migrations_app.ports.factory import Kind, made
from migrations_app.ports.runner import runner

if TYPE_CHECKING:
    from google.adk.memory import BaseMemoryService
    from google.adk.sessions import Session

# The longest that one call of a service may take: a worker's time is up soon after a step's.
CALL_SECONDS = 5.0
# Words of an event that are asked for when memory is looked into; longer questions find no more.
WORDS_ASKED = 30
T = TypeVar("T")


class MemoryUnknown(StoreRefused):
    """Nothing opens a memory service at this address."""


class MemoryFailed(StoreRefused):
    """The memory service answered with an error, or not in time."""


@dataclass(frozen=True)
class Forgotten:
    """What came of removing a session from memory."""

    # False: the service keeps it, or time was up.
    gone: bool
    # Where time was up: how many of its events are removed.
    behind: int = 0


@dataclass(frozen=True)
class Recalled:
    """A session as it is given to memory."""

    key: Key
    session: Session


def where(reference: str) -> str:
    """Return the address behind a reference, to be compared with another and shown to nobody.

    Raises AddressMissing.
    """
    return read(reference)


@contextmanager
def open_memory(reference: str, *, app_name: str) -> Iterator[Memory]:
    """Open the memory service that a store's `memory_from` leads to.

    Behind the reference is a URI of google-adk's own registry (`sqlite:////abs/file`,
    `agentengine://...`), or `python:package.module:factory`, a callable without arguments that
    returns a BaseMemoryService. Raises AddressMissing, MemoryUnknown, MemoryFailed.
    """
    with runner() as loop:
        service = _service(read(reference), reference)
        memory = Memory(service, loop, reference=reference, app_name=app_name)
        try:
            yield memory
        finally:
            memory.close()


def _service(address: str, reference: str) -> BaseMemoryService:
    registry = _KIND.registry()
    from google.adk.memory import BaseMemoryService

    if address.startswith("memory:"):
        raise MemoryUnknown(
            f"{reference} names a memory that lives in one process, which a move can't reach. Give"
            " the address of a service that agents share."
        )
    with _KIND.opening(reference):
        if address.startswith("python:"):
            service = made(address)
        else:
            service = registry.create_memory_service(address)
    found: BaseMemoryService = _KIND.checked(service, BaseMemoryService, reference)
    return found


_KIND = Kind(
    "memory service",
    "It is a URI that google-adk knows (sqlite, agentengine), or python:package.module:factory.",
    unknown=MemoryUnknown,
    other=MemoryUnknown,
    missing=MemoryUnknown,
)


class Memory:
    """One tenant's side of a memory service. Only one thread uses it at a time."""

    def __init__(
        self, service: BaseMemoryService, runner: asyncio.Runner, *, reference: str, app_name: str
    ) -> None:
        self._service, self._runner = service, runner
        self.reference, self.app_name = reference, app_name

    def add(self, recalled: Sequence[Recalled]) -> dict[Key, str]:
        """Give these sessions to memory, at the same time; return those it did not take, and why.

        Whatever it held of them is replaced, as far as the service replaces: given twice, a
        session is there once.
        """
        calls = [self._service.add_session_to_memory(one.session) for one in recalled]
        answers = self._runner.run(_all(calls))
        return {
            one.key: _named(answer)
            for one, answer in zip(recalled, answers, strict=True)
            if isinstance(answer, BaseException)
        }

    def has(self, recalled: Recalled) -> bool | None:
        """Look for a session by what was said in it.

        True: memory gives its words back. False: memory finds nothing at all, for the user.
        None: it can't be told, for nothing was said in words, or memory keeps its own.
        """
        spoken = [(event, _text(event.content)) for event in recalled.session.events]
        asked = next(((e, text) for e, text in reversed(spoken) if _words(text)), None)
        if asked is None:
            return None
        event, text = asked
        found = self._search(recalled.key.user_id, " ".join(_words(text)[:WORDS_ASKED]))
        if any(_is(entry, event.id) or _text(entry.content) == text for entry in found):
            return True
        return None if found else False

    def forget(self, recalled: Recalled, *, until: float, behind: int = 0) -> Forgotten:
        """Remove a session's words, until a moment of the monotonic clock; return how far it came.

        `behind` is what the last call came to. First the session is given once more, without
        events, which replaces what is held where the service replaces: google-adk's in-memory
        service never again takes an event that was deleted by its id. Else it is asked for single
        memories by the events' ids: where it numbers them in another way, what it holds stays.
        """
        events = [event for event in recalled.session.events if _words(_text(event.content))]
        if not events:
            return Forgotten(gone=True)
        if not behind:
            listed = self._lists(recalled.key.user_id, events[-1])
            if listed is None:
                return Forgotten(gone=True)
            emptied = recalled.session.model_copy(update={"events": []})
            with suppress(MemoryFailed):  # it takes none without events
                self._call(self._service.add_session_to_memory(emptied))
            left = self._lists(recalled.key.user_id, events[-1])
            if left is None or (listed and not left):
                return Forgotten(gone=True)
            if not left:
                return Forgotten(gone=False)
        try:
            for at in range(behind, len(events)):
                self._call(
                    self._service.delete_memory(
                        app_name=self.app_name,
                        user_id=recalled.key.user_id,
                        memory_id=events[at].id,
                    )
                )
                # One at least: a service slower than a step is long still gets on.
                if time.monotonic() >= until and at + 1 < len(events):
                    return Forgotten(gone=False, behind=at + 1)
        except NotImplementedError:
            return Forgotten(gone=False)
        return Forgotten(gone=True)

    def _lists(self, user_id: str, event: Any) -> bool | None:
        """Return whether memory lists an event by its id; None: it finds nothing at all."""
        found = self._search(user_id, " ".join(_words(_text(event.content))[:WORDS_ASKED]))
        return any(entry.id == event.id for entry in found) if found else None

    def cleans_beside(self, other: Memory) -> bool:
        """Tell whether sessions can be removed here, and surely leave `other` as it is.

        Gives a random word to this side and looks for it through both, then removes it. False as
        well where the word does not show here at once: then nobody knows.
        """
        from google.adk.events import Event
        from google.adk.sessions import Session
        from google.genai import types

        word = "".join(secrets.choice(string.ascii_lowercase) for _ in range(32))
        user = f"{NOBODY}{word}"
        content = types.Content(role="user", parts=[types.Part(text=word)])
        event = Event(id=word, author="user", content=content)
        session = Session(id=word, app_name=self.app_name, user_id=user, events=[event])
        self._call(self._service.add_session_to_memory(session))
        shows, beyond = (side._lists(user, event) for side in (self, other))
        # A word that stays is nobody's and does no harm.
        until = time.monotonic() + CALL_SECONDS
        removed = self.forget(Recalled(Key(user, word), session), until=until).gone
        return bool(shows) and beyond is None and removed

    def close(self) -> None:
        """Release what the service holds open."""
        close: Callable[[], Any] | None = getattr(self._service, "close", None)
        if close is not None and inspect.isawaitable(pending := close()):
            self._call(pending)

    def _search(self, user_id: str, query: str) -> Sequence[Any]:
        answer = self._service.search_memory(app_name=self.app_name, user_id=user_id, query=query)
        return self._call(answer).memories

    def _call(self, call: Awaitable[T]) -> T:
        [answer] = self._runner.run(_all([call]))
        if isinstance(answer, NotImplementedError):
            raise answer
        if isinstance(answer, BaseException):
            raise MemoryFailed(
                f"The memory service of {self.reference} failed ({_named(answer)}). Look at it,"
                " and at what the workers may do there."
            )
        return answer


async def _all(calls: Sequence[Awaitable[T]]) -> list[T | BaseException]:
    timed = [asyncio.wait_for(call, CALL_SECONDS) for call in calls]
    return await asyncio.gather(*timed, return_exceptions=True)


def _named(error: BaseException) -> str:
    """Name an error by its class: what a service says may quote what was given to it."""
    return "no answer in time" if isinstance(error, TimeoutError) else type(error).__name__


def recall(
    store: SessionStore, app_name: str, keys: Sequence[Key], *, shared: bool = True
) -> Iterator[Recalled | Key]:
    """Read these sessions one by one as google-adk reads them; a key whose session it could not.

    What the store no longer has is left out, and with `shared=False` what sessions share.
    """
    users = [None, *{key.user_id for key in keys}] if shared else []
    states: dict[str | None, Mapping[str, Any]] = {
        user: _object(row.state) for user, row in store.shared(users).items()
    }
    for key in keys:
        found = store.session(key)
        if found is None:
            continue
        try:
            yield Recalled(key, _session(app_name, key, found, states))
        except ValueError:
            # pydantic's refusal is one: google-adk could not read the session either.
            yield key


def _session(
    app_name: str,
    key: Key,
    found: Mapping[str, Any],
    states: Mapping[str | None, Mapping[str, Any]],
) -> Session:
    from google.adk.events import Event
    from google.adk.sessions import Session

    state = found["state"] if isinstance(found["state"], Mapping) else {}
    shared = {
        **{f"app:{name}": value for name, value in states.get(None, {}).items()},
        **{f"user:{name}": value for name, value in states.get(key.user_id, {}).items()},
    }
    return Session(
        id=key.session_id,
        app_name=app_name,
        user_id=key.user_id,
        state={**state, **shared},
        events=[Event.model_validate(_event(row)) for row in found["events"]],
        last_update_time=_seconds(found["update_time"]),
    )


def _event(row: Mapping[str, Any]) -> dict[str, Any]:
    """Put an event together as DatabaseSessionService does: its columns win, but for the time."""
    data = row.get("event_data")
    event = dict(data) if isinstance(data, Mapping) else {}
    event |= {name: row[name] for name in ("id", "invocation_id") if row.get(name) is not None}
    if event.get("timestamp") is None:
        event["timestamp"] = _seconds(row.get("timestamp"))
    return event


def _seconds(value: Any) -> float:
    """Read a time as a store spells it: text in UTC, or seconds since 1970."""
    if isinstance(value, str):
        return datetime.fromisoformat(value).replace(tzinfo=UTC).timestamp()
    return float(value or 0.0)


def _object(text: str) -> Mapping[str, Any]:
    try:
        value = canonical.loads(text)
    except canonical.NotJson:
        return {}
    return value if isinstance(value, Mapping) else {}


def _text(content: Any) -> str:
    parts = getattr(content, "parts", None) or []
    said = [part.text for part in parts if part.text and not getattr(part, "thought", False)]
    return " ".join(said)


def _words(text: str) -> list[str]:
    """Return the words by which a text can be looked for."""
    return re.findall(r"\w{3,}", text)


def _is(entry: Any, event_id: str) -> bool:
    return event_id in (entry.id, (entry.custom_metadata or {}).get("event_id"))
