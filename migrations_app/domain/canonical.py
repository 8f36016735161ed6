"""One spelling for what two kinds of store spell differently: JSON, times, bytes.

Two sessions are equal exactly when their spellings here are: object keys are sorted at every
depth, white space and escapes do not count, and a number is what google-adk reads from
it, so 1.10 is 1.1, while 1, 1.0, -0.0 and a float and the integer that it equals are all
told apart. null is a value (what ADK's State.REMOVED leaves), a missing key is another. Bytes
that ADK keeps as base64 are one alphabet. Times are whole microseconds, the finest that
`DatabaseSessionService` keeps in its columns; an event's own time, in its JSON, is exact.

>>> of_json('{"b": 1.10, "a": [1, 1.0, -0.0, 1e22]}')
'{"a":[1,1.0,-0.0,1e+22],"b":1.1}'
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

# Microseconds since 1970, UTC; None: nothing that google-adk could read as a time.
Time = int | None

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST = (datetime.min.replace(tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1)
_LAST = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1)
# Standard base64 to the URL-safe alphabet that google-adk writes.
_ALPHABET = str.maketrans("+/", "-_")


class SessionRow(NamedTuple):
    """A session's own row, on its way between two kinds of store."""

    user_id: str
    session_id: str
    state: str  # JSON text
    create_time: Time
    update_time: Time


class EventRow(NamedTuple):
    """An event's row, on its way between two kinds of store."""

    user_id: str
    session_id: str
    id: str
    invocation_id: str
    timestamp: Time
    event_data: str | None  # JSON text


# --- times -----------------------------------------------------------------------------------


def micros_of_text(text: object) -> Time:
    """Read a time as PostgreSQL and `DatabaseSessionService` on SQLite spell it, without zone.

    >>> micros_of_text("1970-01-01 00:00:01.000002"), micros_of_text("infinity")
    (1000002, None)
    """
    try:
        at = datetime.fromisoformat(text)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    if at.tzinfo is not None:
        return None
    return (at.replace(tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1)


def text_of_micros(micros: int) -> str:
    """Spell a time as `DatabaseSessionService` does; PostgreSQL reads the same.

    >>> text_of_micros(1_000_002)
    '1970-01-01 00:00:01.000002'
    """
    at = datetime.min + timedelta(microseconds=micros - _FIRST)
    return at.isoformat(sep=" ", timespec="microseconds")


def micros_of_seconds(seconds: object) -> Time:
    """Round a float of `SqliteSessionService` as `DatabaseSessionService` rounds it.

    >>> micros_of_seconds(1.0000025), micros_of_seconds(-0.5), micros_of_seconds(1e300)
    (1000002, -500000, None)
    """
    if not isinstance(seconds, int | float) or not math.isfinite(seconds):
        return None
    part, whole = math.modf(seconds)
    micros = int(whole) * 1_000_000 + round(part * 1_000_000)
    return micros if _FIRST <= micros <= _LAST else None


def seconds_of_micros(micros: int) -> float:
    """Return the float nearest to a time: up to the year 2242 its microsecond is kept."""
    return micros / 1_000_000


def present(times: tuple[Any, ...]) -> tuple[int, ...]:
    """Return these times, none of which is missing: rows with one that is are left out before."""
    assert None not in times, "a row without a time was to be left out"
    return times


# --- JSON ------------------------------------------------------------------------------------


class NotJson(ValueError):
    """The text is not JSON, or not of a kind that Python reads: too deep, a number too long."""


def loads(text: str) -> Any:
    """Read JSON as google-adk reads it; raises NotJson."""
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        raise NotJson from None


def of_value(value: Any) -> str:
    """Spell a JSON value in its one way."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def of_json(text: str) -> str:
    """Spell JSON text in its one way. What is not JSON is its own spelling, marked as such."""
    try:
        return of_value(loads(text))
    except NotJson:
        return f"not JSON:{text}"


def of_event_data(text: str | None) -> str:
    """Spell an event's data in its one way, its bytes in one alphabet.

    ADK has bytes where a part holds inline data or a thought's signature.
    """
    if text is None:
        return ""
    if '"inline_data"' not in text and '"thought_signature"' not in text:
        return of_json(text)
    try:
        value = loads(text)
    except NotJson:
        return of_json(text)
    if isinstance(value, dict) and isinstance(value.get("content"), dict):
        value["content"] = _bytes_spelled(value["content"])
    return of_value(value)


def _bytes_spelled(content: Mapping[str, Any]) -> dict[str, Any]:
    parts = content.get("parts")
    if not isinstance(parts, list):
        return dict(content)
    return {**content, "parts": [_part_spelled(part) for part in parts]}


def _part_spelled(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    spelled = dict(part)
    if isinstance(signature := spelled.get("thought_signature"), str):
        spelled["thought_signature"] = signature.translate(_ALPHABET)
    data = spelled.get("inline_data")
    if isinstance(data, dict) and isinstance(data.get("data"), str):
        spelled["inline_data"] = {**data, "data": data["data"].translate(_ALPHABET)}
    answer = spelled.get("function_response")
    if isinstance(answer, dict) and isinstance(answer.get("parts"), list):
        spelled["function_response"] = _bytes_spelled(answer)
    return spelled


def filled(row: EventRow, *, columns_win: bool) -> EventRow:
    """Put into an event's data what `DatabaseSessionService` reads from its columns.

    `SqliteSessionService` reads the data alone: without an id of its own the event would be given
    a new one each time. What google-adk wrote has all three already and stays as it is. Where
    columns don't win only what is missing is put in.
    """
    if row.event_data is None:
        return row
    try:
        value = loads(row.event_data)
    except NotJson:
        return row
    if not isinstance(value, dict):
        return row
    own: dict[str, Any] = {"id": row.id, "invocation_id": row.invocation_id}
    if not columns_win:
        own = {name: item for name, item in own.items() if name not in value}
    if value.get("timestamp") is None and row.timestamp is not None:
        own["timestamp"] = seconds_of_micros(row.timestamp)
    if all(name in value and value[name] == item for name, item in own.items()):
        return row
    return row._replace(event_data=json.dumps({**value, **own}))


# --- fingerprints ----------------------------------------------------------------------------


def session_digest(row: SessionRow) -> str:
    """Return the fingerprint of a session without its events."""
    return _hashed([of_json(row.state), row.create_time, row.update_time]).hex()


def event_digest(row: EventRow) -> bytes:
    """Return one event's share in its session's fingerprint."""
    nothing = row.event_data is None
    return _hashed(
        [row.id, row.invocation_id, row.timestamp, nothing, of_event_data(row.event_data)]
    )


def state_digest(text: str) -> str:
    """Return the fingerprint of shared state, of a user or of the app."""
    return _hashed([of_json(text)]).hex()


def value_digest(value: Any) -> str:
    """Return the fingerprint of one JSON value, such as a key's of shared state."""
    return hashlib.sha256(of_value(value).encode()).hexdigest()


def _hashed(values: list[Any]) -> bytes:
    # JSON once more frames the parts; it spells what UTF-8 can't hold.
    return hashlib.sha256(json.dumps(values).encode()).digest()
