"""Sessions and events as google-adk's services read and write them, to and from our rows.

A pair of which one side is a service is compared as google-adk reads it: an event that was written
with fewer fields, or with other names of them, is the same event. What google-adk would lose of
it stays in the comparison, so that it shows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from migrations_app.domain import canonical, values
from migrations_app.domain.canonical import EventRow, NotJson, SessionRow
from migrations_app.domain.values import Found, Layout, Odd, Spelled
from migrations_app.ports.base import Kept

if TYPE_CHECKING:
    from google.adk.events import Event
    from google.adk.sessions import Session

# Where an event holds whatever an agent has put there.
_FREE = ("state_delta", "agent_state", "args", "response", "custom_metadata", "output")
_HUMP = re.compile(r"(?<!^)(?=[A-Z])")


# --- from a service ----------------------------------------------------------------------------


def own_state(session: Session) -> dict[str, Any]:
    """Return a session's own state, without what it shares and what is a turn's."""
    return {key: value for key, value in session.state.items() if not values.is_scoped(key)}


def scoped_state(session: Session, prefix: str) -> dict[str, Any]:
    """Return what a session shows of one shared scope, keys without prefix."""
    return {
        key.removeprefix(prefix): value
        for key, value in session.state.items()
        if key.startswith(prefix)
    }


def state_text(state: Mapping[str, Any]) -> str:
    """Spell a state as google-adk's SQL services do; Spelled where that changes types."""
    from pydantic_core import to_jsonable_python

    if _is_json(state):
        return json.dumps(state)
    return Spelled(json.dumps(to_jsonable_python(state, serialize_unknown=True)))


def session_row(session: Session) -> SessionRow:
    """Return a session's own row. A service shows no time of creation: its first event's, then."""
    updated = canonical.micros_of_seconds(session.last_update_time)
    times = [event.timestamp for event in session.events[:1]]
    created = canonical.micros_of_seconds(times[0]) if times else updated
    return SessionRow(session.user_id, session.id, state_text(own_state(session)), created, updated)


def event_rows(session: Session, layout: Layout) -> Iterator[EventRow]:
    """Yield a session's events in the order in which the service gives them."""
    for event in session.events:
        at = canonical.micros_of_seconds(event.timestamp)
        text = _event_text(event, layout)
        yield EventRow(session.user_id, session.id, event.id, event.invocation_id, at, text)


def unreadable(user_id: str, session_id: str) -> SessionRow:
    """Stand for a session that the service lists and can't read."""
    return SessionRow(user_id, session_id, "", 0, 0)


def _event_text(event: Event, layout: Layout) -> str:
    try:
        written = event.model_dump(exclude_none=True, mode="json")
        if layout is not Layout.SERVICE:
            return json.dumps(written)
        # Held as objects: JSON's own writer makes null of NaN, and types of its own of others.
        held = event.model_dump(exclude_none=True)
        text = json.dumps(_unite(held, written, "", []))
        return Spelled(text) if any(not _is_json(free) for free in _free(held)) else text
    except (TypeError, ValueError, RecursionError):
        # Not JSON on purpose: to be refused, and named as what nobody reads.
        return ""


def _free(held: Any) -> Iterator[Any]:
    if isinstance(held, dict):
        for key, value in held.items():
            if key in _FREE:
                yield value
            else:
                yield from _free(value)
    elif isinstance(held, list):
        for item in held:
            yield from _free(item)


def _is_json(value: Any) -> bool:
    """Whether a value is what JSON reads back as it was."""
    if isinstance(value, Mapping):
        return type(value) is dict and all(
            isinstance(key, str) and _is_json(item) for key, item in value.items()
        )
    if isinstance(value, list):
        return all(map(_is_json, value))
    return value is None or type(value) in (str, int, float, bool)


# --- to a service ------------------------------------------------------------------------------


def event_of(row: EventRow) -> Event:
    """Make the event of a row, as DatabaseSessionService does; raises ValueError."""
    from google.adk.events import Event

    data = {} if row.event_data is None else canonical.loads(row.event_data)
    return Event.model_validate(_named(data, row))


def _named(data: dict[str, Any], row: EventRow) -> dict[str, Any]:
    at = data.get("timestamp")
    if at is None and row.timestamp is not None:
        at = canonical.seconds_of_micros(row.timestamp)
    return {**data, "id": row.id, "invocation_id": row.invocation_id, "timestamp": at}


def is_partial(row: EventRow) -> bool:
    """Whether google-adk would not keep this event."""
    if row.event_data is None or '"partial"' not in row.event_data:
        return False
    try:
        value = canonical.loads(row.event_data)
    except NotJson:
        return False
    return isinstance(value, dict) and bool(value.get("partial"))


def normal(row: EventRow) -> EventRow:
    """Spell an event's data as google-adk writes what it reads, with what it would lose of it."""
    united = _read(row, [])
    if united is None:
        return row
    delta = united.get("actions", {}).get("state_delta")
    if isinstance(delta, dict):
        for key in [key for key in delta if key.startswith(values.TEMP)]:
            del delta[key]
    return row._replace(event_data=json.dumps(united))


def odd_event(row: EventRow) -> Iterator[Found]:
    """Yield what google-adk loses of an event, or that it can't read it."""
    lost: list[str] = []
    data = row.event_data
    if data is not None and _is_object(data) and _read(row, lost) is None:
        yield Found(Odd.FOREIGN_EVENT, "events.event_data", f"of {ascii(row.id)[1:-1][:80]}")
    for path in lost:
        yield Found(Odd.NEW_FIELD, "events.event_data", f"of {ascii(row.id)[1:-1][:80]} {path}")


def _is_object(text: str) -> bool:
    try:
        return isinstance(canonical.loads(text), dict)
    except NotJson:
        return False


def _read(row: EventRow, lost: list[str]) -> dict[str, Any] | None:
    """Return what google-adk reads of a row, united with the row; None if it reads nothing."""
    from google.adk.events import Event

    if row.event_data is None:
        return None
    try:
        data = canonical.loads(row.event_data)
        if not isinstance(data, dict):
            return None
        named = _named(data, row)
        written = Event.model_validate(named).model_dump(exclude_none=True, mode="json")
    except (TypeError, ValueError, RecursionError):
        return None
    united = _unite(named, written, "", lost)
    assert isinstance(united, dict)
    return united


def _unite(held: Any, written: Any, path: str, lost: list[str]) -> Any:
    """Return `written` with what it lacks of `held`; names that in `lost`."""
    if isinstance(held, dict) and isinstance(written, dict):
        united = dict(written)
        for key, value in held.items():
            name = key if key in written else _HUMP.sub("_", str(key)).lower()
            where = f"{path}.{ascii(str(key))[1:-1][:80]}".lstrip(".")
            if name in written:
                united[name] = _unite(value, written[name], where, lost)
            elif value is not None:
                lost.append(where)
                united[key] = value
        return united
    if isinstance(held, list) and isinstance(written, list) and len(held) == len(written):
        pairs = zip(held, written, strict=True)
        return [_unite(one, other, f"{path}[{at}]", lost) for at, (one, other) in enumerate(pairs)]
    # JSON's writer makes null of NaN.
    return held if written is None and isinstance(held, float) else written


# --- comparing ---------------------------------------------------------------------------------


def only_kept(row: EventRow, kept: Kept) -> EventRow:
    """Leave out of a row what not both sides keep."""
    if kept.event_ids and kept.event_times:
        return row
    row = row._replace(
        id=row.id if kept.event_ids else "",
        timestamp=row.timestamp if kept.event_times else None,
    )
    if row.event_data is None or not _is_object(row.event_data):
        return row
    data = canonical.loads(row.event_data)
    gone = [
        name
        for name, stays in (("id", kept.event_ids), ("timestamp", kept.event_times))
        if not stays
    ]
    return row._replace(event_data=json.dumps({k: v for k, v in data.items() if k not in gone}))
