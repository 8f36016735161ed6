"""What becomes of a value on its way into another kind of store: kept, changed or refused.

`TABLE` is the one list: the survey, the copier, the mismatch table and docs/values.md go by it,
and tests/adk/test_values.py holds it against the real stores. Only pairs of two
kinds need it; between two stores of one kind rows go over to the bit.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from typing import Any, NamedTuple, TypeGuard

from migrations_app.domain import canonical
from migrations_app.domain.canonical import EventRow, NotJson, SessionRow


class Layout(StrEnum):
    """How a store lays out its rows. Two stores of one layout take each other's as they are."""

    POSTGRESQL = "adk-sql on PostgreSQL"  # DatabaseSessionService: jsonb, timestamps.
    SQLITE = "adk-sql on SQLite"  # DatabaseSessionService: JSON text, times as text.
    ADK_SQLITE = "adk-sqlite"  # SqliteSessionService: JSON text, times as floats.
    # Through google-adk's services, and what those stand on; never row by row.
    SERVICE_POSTGRESQL = "adk-service on PostgreSQL"  # DatabaseSessionService.
    SERVICE_SQLITE = "adk-service on SQLite"  # DatabaseSessionService.
    SERVICE_ADK_SQLITE = "adk-service on SqliteSessionService"
    SERVICE = "adk-service, another"  # In memory, MySQL, Agent Engine, yours.

    @property
    def is_service(self) -> bool:
        return self.value.startswith("adk-service")


class Fate(StrEnum):
    KEPT = "kept"  # google-adk reads the same from it.
    CHANGED = "changed"  # Listed in the survey; does not stop a move.
    REFUSED = "refused"  # The session is left out whole and named; the move is stopped.


class Odd(StrEnum):
    """Values that a store may not hold. Each is a row of TABLE."""

    NUL_IN_STATE = "a NUL character in a state"
    NUL_IN_EVENT = "a NUL character in an event"
    NUL_IN_ID = "a NUL character in an id"
    SURROGATE = "half a surrogate pair in a text"
    NOT_FINITE_IN_STATE = "NaN or Infinity in a state"
    NOT_FINITE_IN_EVENT = "NaN or Infinity in an event"
    MINUS_ZERO_IN_STATE = "-0.0 in a state"
    MINUS_ZERO_IN_EVENT = "-0.0 in an event"
    WHOLE_FLOAT = "a whole float with an exponent, such as 1e22"
    BIG_INTEGER = "an integer beyond 64 bits"
    UNREADABLE = "a text that is not JSON, nested too deeply, or with a number of 4,300 digits"
    DEEP_EVENT = "an event nested more than 200 deep"
    NO_DATA = "an event without data"
    LONG_EVENT_ID = "an event's id over 128 or its invocation's over 256 characters"
    NOT_TEXT = "an id or a text that is not UTF-8 text"
    NO_TIME = "a time before the year 1 or after 9999, or no time at all"
    FINE_TIME = "a time finer than a microsecond"
    LATE_TIME = "a time after the year 2242"
    SAME_TIME = "events of one time whose order of writing is not that of their ids"
    TIME_ORDER = "an event that is earlier than the one before it"
    TIME_APART = "a session's time that none of its events has"
    PADDED_ID = "white space around a session's id"
    RESERVED_ID = "a session's id that Switchyard keeps for itself"
    NOT_OBJECT = "a state that is not a JSON object"
    SHARED_KEY = "a key app:, user: or temp: in a session's own state"
    TEMP_KEY = "a key temp: in an event's state_delta"
    PARTIAL = "a partial event"
    NEW_FIELD = "a field of an event that this google-adk does not know"
    FOREIGN_EVENT = "an event that this google-adk can't read"
    PYTHON = "a Python object that is no JSON: bytes, a date, a tuple, a set"


@dataclass(frozen=True)
class Outcome:
    fate: Fate
    words: str = ""  # To what, or why; "" where nothing happens to it.


KEPT = Outcome(Fate.KEPT)


def _kept(words: str) -> Outcome:
    return Outcome(Fate.KEPT, words)


def _changed(words: str) -> Outcome:
    return Outcome(Fate.CHANGED, words)


def _refused(words: str) -> Outcome:
    return Outcome(Fate.REFUSED, words)


_P, _S, _A = Layout.POSTGRESQL, Layout.SQLITE, Layout.ADK_SQLITE
_ANY = _refused("google-adk can't read it either: repair or delete the session")
_AS_IT_IS = _kept("copied as it is; google-adk can't read it")
_NULL = _changed("google-adk writes null for it")
_INTEGER = _changed("becomes an integer")
_BY_IDS = _changed("read in the order of their ids")
_BY_TIMES = _changed("read in the order of their times")
_NOT_THERE = _refused("DatabaseSessionService can't read it")
_ROUNDED = _changed("rounded to a microsecond; the event's own time, in its data, is exact")
_COARSE = _changed("rounded, for a float is coarser there")
_STRIPS = _refused("it strips the id, so that it is another session's")


def _line(
    p: Outcome,
    s: Outcome,
    a: Outcome,
    *,
    sp: Outcome | None = None,
    ss: Outcome | None = None,
    sa: Outcome | None = None,
    other: Outcome = KEPT,
) -> Mapping[Layout, Outcome]:
    """Make a line: a service mostly does what the store under it does, and memory keeps objects."""
    return {
        _P: p,
        _S: s,
        _A: a,
        Layout.SERVICE_POSTGRESQL: sp or p,
        Layout.SERVICE_SQLITE: ss or s,
        Layout.SERVICE_ADK_SQLITE: sa or a,
        # Known of InMemorySessionService; another service's answer is read back and compared.
        Layout.SERVICE: other,
    }


def _services(of_all: Outcome, native: Outcome = KEPT) -> Mapping[Layout, Outcome]:
    """Make a line of what replay alone does."""
    return {layout: of_all if layout.is_service else native for layout in Layout}


TABLE: Mapping[Odd, Mapping[Layout, Outcome]] = {
    Odd.NUL_IN_STATE: _line(
        _refused("PostgreSQL holds no NUL character"),
        KEPT,
        _changed(
            "copied whole, but google-adk cuts the text at the NUL when it next writes that state"
        ),
    ),
    Odd.NUL_IN_EVENT: _line(_refused("PostgreSQL holds no NUL character"), KEPT, KEPT),
    Odd.NUL_IN_ID: _line(_refused("PostgreSQL holds no NUL character"), KEPT, KEPT),
    Odd.SURROGATE: _line(
        _refused("PostgreSQL holds no half of a surrogate pair"),
        KEPT,
        _refused("SqliteSessionService can't read half of a surrogate pair"),
    ),
    Odd.NOT_FINITE_IN_STATE: _line(
        _refused("PostgreSQL's JSON holds neither NaN nor Infinity"),
        KEPT,
        _refused("SQLite calls it malformed: google-adk could never write that state again"),
    ),
    Odd.NOT_FINITE_IN_EVENT: _line(
        _refused("PostgreSQL's JSON holds neither NaN nor Infinity"),
        KEPT,
        KEPT,
        sp=_NULL,
        ss=_NULL,
        sa=_NULL,
    ),
    Odd.MINUS_ZERO_IN_STATE: _line(
        _changed("-0.0 becomes 0.0"),
        KEPT,
        _changed("copied as it is, but becomes 0.0 when google-adk next writes that state"),
    ),
    Odd.MINUS_ZERO_IN_EVENT: _line(_changed("-0.0 becomes 0.0"), KEPT, KEPT),
    Odd.WHOLE_FLOAT: _line(
        _kept("written with all its digits and .0, or PostgreSQL would make it an integer"),
        KEPT,
        KEPT,
        sp=_INTEGER,
    ),
    Odd.BIG_INTEGER: _line(KEPT, KEPT, KEPT),
    Odd.UNREADABLE: dict.fromkeys(Layout, _ANY),
    Odd.DEEP_EVENT: _line(KEPT, KEPT, _refused("SqliteSessionService can't read it")),
    Odd.NO_DATA: {
        **_services(_changed("google-adk writes what it reads: an event of defaults")),
        _A: _refused("SqliteSessionService needs an object there, and keeps no NULL"),
    },
    Odd.LONG_EVENT_ID: _line(_refused("longer than the columns of ADK's schema v1"), KEPT, KEPT),
    Odd.NOT_TEXT: dict.fromkeys(Layout, _ANY),
    Odd.NO_TIME: _line(
        _NOT_THERE, _NOT_THERE, _ANY, other=_refused("no other store could take it back")
    ),
    Odd.FINE_TIME: _line(_ROUNDED, _ROUNDED, KEPT),
    Odd.LATE_TIME: _line(KEPT, KEPT, _COARSE, sp=_COARSE, ss=_COARSE, other=_COARSE),
    Odd.SAME_TIME: _line(_BY_IDS, _BY_IDS, KEPT),
    Odd.TIME_ORDER: _line(_BY_TIMES, _BY_TIMES, _BY_TIMES),
    Odd.TIME_APART: _services(_changed("becomes the time of its last event")),
    Odd.PADDED_ID: _line(KEPT, KEPT, KEPT, sa=_STRIPS, other=_STRIPS),
    Odd.RESERVED_ID: _services(_refused("rename or delete the session")),
    Odd.NOT_OBJECT: _services(_ANY, _AS_IT_IS),
    Odd.SHARED_KEY: _services(_changed("left out: the service would make it shared state")),
    Odd.TEMP_KEY: _services(_changed("left out, as google-adk leaves it out")),
    Odd.PARTIAL: _services(_changed("left out, as google-adk leaves it out")),
    Odd.NEW_FIELD: _services(_changed("left out: google-adk reads events without it")),
    Odd.FOREIGN_EVENT: _services(_ANY, _AS_IT_IS),
    Odd.PYTHON: dict.fromkeys(Layout, _changed("becomes what google-adk writes for it as JSON")),
}

SHARED = ("app:", "user:")
TEMP = "temp:"
# Sessions of ours among a service's own: the guard's and words' are of this user.
OURS = "switchyard"
SCRATCH = "switchyard-scratch"

LONGEST_EVENT_ID, LONGEST_INVOCATION_ID = 128, 256
# pydantic's reader of JSON stops there.
DEEPEST_EVENT = 200
# From here on a float is coarser than a microsecond: 2 ** 33 seconds.
LATE = 2**33 * 1_000_000

# Nothing odd stands in a text without one of these; most texts have none and are not walked.
_WORDS = ("\\u0000", "\\ud", "\\uD", "NaN", "Infinity")
# Behind what may stand before a value: an id or a date has "-0" too.
_MINUS_ZERO = re.compile(r"[\[:,\s]-0(?:\.0*)?(?:[\s,}\]eE]|$)")
# What Python may read as infinity.
_HUGE = re.compile(r"[\[:,\s]-?(?:\d+(?:\.\d+)?[eE]\+?\d{3,}(?:[\s,}\]]|$)|\d{309})")
# Left by reading bytes that are not UTF-8 (errors="surrogateescape").
_NOT_UTF8 = re.compile("[\udc80-\udcff]")
# A number with an exponent behind what may stand before a value. In a string it may look like one,
# so tokens are read, strings as wholes.
_EXPONENT = re.compile(r"[\[:,\s]-?\d+(?:\.\d+)?[eE]\+?\d")
# What Python writes with an exponent, however it is spelled here.
_WHOLE = re.compile(r"[\[:,\s]-?(?:\d+(?:\.\d+)?[eE]\+?\d|\d{17,}\.)")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?[eE][+-]?\d+')


class Spelled(str):
    """JSON text of what held objects that are no JSON."""

    __slots__ = ()


class Found(NamedTuple):
    """An odd value and where it stands; the value itself stays in the store."""

    odd: Odd
    field: str
    path: str = ""

    def outcome(self, target: Layout) -> Outcome:
        return TABLE[self.odd][target]

    def words(self, target: Layout) -> str:
        """Say what happens to it at a target, as the mismatch table does."""
        at = f" {self.path}" if self.path else ""
        return f"{self.field}{at}: {self.odd}: {self.outcome(target).words}"


def in_session(row: SessionRow) -> Iterator[Found]:
    """Yield what is odd in a session's own row."""
    for name, text in (("user_id", row.user_id), ("id", row.session_id)):
        yield from _in_id(f"sessions.{name}", text)
    for name, at in (("create_time", row.create_time), ("update_time", row.update_time)):
        yield from _in_time(f"sessions.{name}", at)
    if isinstance(row.session_id, str):
        if row.session_id != row.session_id.strip():
            yield Found(Odd.PADDED_ID, "sessions.id")
        if is_ours(row.user_id, row.session_id):
            yield Found(Odd.RESERVED_ID, "sessions.id")
    yield from _in_text("sessions.state", row.state, event=None, own=True)


def is_ours(user_id: str, session_id: str) -> bool:
    """Whether a session is one that Switchyard keeps in a service for itself."""
    return session_id.startswith(SCRATCH) or (user_id == OURS and session_id.startswith(f"{OURS}-"))


def is_scoped(key: str) -> bool:
    """Whether google-adk takes a state's key for one of the app, of the user or of a turn."""
    return key.startswith((*SHARED, TEMP))


def in_event(row: EventRow) -> Iterator[Found]:
    """Yield what is odd in an event's row."""
    yield from _in_id("events.id", row.id, LONGEST_EVENT_ID)
    yield from _in_id("events.invocation_id", row.invocation_id, LONGEST_INVOCATION_ID)
    yield from _in_time("events.timestamp", row.timestamp)
    if row.event_data is None:
        yield Found(Odd.NO_DATA, "events.event_data")
    else:
        yield from _in_text("events.event_data", row.event_data, event=str(row.id))


def in_state(field: str, text: str) -> Iterator[Found]:
    """Yield what is odd in a state's text."""
    yield from _in_text(field, text, event=None)


def refusal(target: Layout, found: Iterator[Found]) -> Found | None:
    """Return the first value that the target can't hold."""
    return next((one for one in found if one.outcome(target).fate is Fate.REFUSED), None)


def for_postgres(text: str) -> str:
    """Spell whole floats so that PostgreSQL keeps them floats: it would make 1e22 an integer.

    >>> for_postgres('{"a": 1e22, "b": "1e22", "c": 1.5e-7}')
    '{"a": 10000000000000000000000.0, "b": "1e22", "c": 1.5e-7}'
    """
    return _TOKEN.sub(_spelled, text) if _EXPONENT.search(f" {text}") else text


def _spelled(token: re.Match[str]) -> str:
    text = token[0]
    if text[0] == '"':
        return text
    number = Decimal(text)
    if number != number.to_integral_value():
        return text
    return f"{number:f}.0"


def _in_id(field: str, text: object, longest: int | None = None) -> Iterator[Found]:
    if not _is_text(text):
        yield Found(Odd.NOT_TEXT, field)
    elif "\0" in text:
        yield Found(Odd.NUL_IN_ID, field)
    elif longest is not None and len(text) > longest:
        yield Found(Odd.LONG_EVENT_ID, field)


def _in_time(field: str, at: canonical.Time) -> Iterator[Found]:
    if at is None:
        yield Found(Odd.NO_TIME, field)
    elif at > LATE:
        yield Found(Odd.LATE_TIME, field)


def _in_text(field: str, text: object, *, event: str | None, own: bool = False) -> Iterator[Found]:
    """Yield what is odd in JSON text; `event` is the event's id, None for a state.

    `own`: the state is a session's own.
    """
    if not _is_text(text):
        yield Found(Odd.NOT_TEXT, field)
        return
    try:
        value = canonical.loads(text)
    except NotJson:
        yield Found(Odd.UNREADABLE, field)
        return
    at = "" if event is None else f"of {_shown(event)}"
    if isinstance(text, Spelled):
        yield Found(Odd.PYTHON, field, at)
    if not isinstance(value, dict):
        yield Found(Odd.NOT_OBJECT if event is None else Odd.NO_DATA, field, at)
    elif event is None:
        if own:
            yield from (Found(Odd.SHARED_KEY, field, _shown(k)) for k in value if is_scoped(k))
    else:
        yield from _of_a_turn(value, field, at)
    if _suspect(text):
        for odd, path in _walk(value, in_state=event is None):
            yield Found(odd, field, f"{at} {path}".strip())


def _of_a_turn(event: dict[str, Any], field: str, at: str) -> Iterator[Found]:
    """Yield what google-adk keeps for the length of a turn only."""
    if event.get("partial"):
        yield Found(Odd.PARTIAL, field, at)
    actions = event.get("actions")
    delta = actions.get("state_delta") if isinstance(actions, dict) else None
    if isinstance(delta, dict):
        for key in delta:
            if key.startswith(TEMP):
                yield Found(Odd.TEMP_KEY, field, f"{at} actions.state_delta.{_shown(key)}")


def _is_text(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and (value.isascii() or not _NOT_UTF8.search(value))


def _suspect(text: str) -> bool:
    return bool(
        any(word in text for word in _WORDS)
        or ("-0" in text and _MINUS_ZERO.search(f" {text}"))
        or text.count("[") + text.count("{") > DEEPEST_EVENT
        or _HUGE.search(f" {text}")
        or _WHOLE.search(f" {text}")
    )


def _walk(value: Any, *, in_state: bool) -> Iterator[tuple[Odd, str]]:
    """Yield odd values of parsed JSON and where they stand. A stack: JSON may nest deeply."""
    nul = Odd.NUL_IN_STATE if in_state else Odd.NUL_IN_EVENT
    infinite = Odd.NOT_FINITE_IN_STATE if in_state else Odd.NOT_FINITE_IN_EVENT
    zero = Odd.MINUS_ZERO_IN_STATE if in_state else Odd.MINUS_ZERO_IN_EVENT
    stack: list[tuple[Any, str, int]] = [(value, "", 1)]
    deep = False
    while stack:
        item, path, depth = stack.pop()
        if isinstance(item, str):
            if "\0" in item:
                yield nul, path
            if _lone(item):
                yield Odd.SURROGATE, path
        elif isinstance(item, float):
            if not math.isfinite(item):
                yield infinite, path
            elif item == 0 and math.copysign(1, item) < 0:
                yield zero, path
            elif item.is_integer() and "e" in repr(item):
                yield Odd.WHOLE_FLOAT, path
        elif isinstance(item, list | dict):
            if depth > DEEPEST_EVENT and not in_state and not deep:
                deep = True
                yield Odd.DEEP_EVENT, path[:80]
            pairs = (
                [(f"{path}[{index}]", part) for index, part in enumerate(item)]
                if isinstance(item, list)
                else [(f"{path}.{_shown(key)}".lstrip("."), part) for key, part in item.items()]
            )
            if isinstance(item, dict):
                pairs += [(f"{path} (a key)".strip(), key) for key in item]
            stack += [(part, where, depth + 1) for where, part in reversed(pairs)]


def _lone(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _shown(text: str) -> str:
    """Spell a key so that every store of ours holds it, and not at any length."""
    return json.dumps(text)[1:-1][:80]
