"""Between stores of two layouts: rows are converted on the way and compared in one spelling.

Both directions of every pair go through here, and every pair with a service. Rows stream one by
one from a snapshot of the source into a transaction of the target, in bites of a few megabytes,
for one side is an SQLite file whose agents wait for either. A service is written session by
session, a second for a handful of them, so a bite is read whole before that begins.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from migrations_app.domain import canonical, values
from migrations_app.domain.canonical import EventRow, SessionRow, text_of_micros
from migrations_app.domain.values import Layout
from migrations_app.ports import service_values
from migrations_app.ports.base import (
    START,
    Batch,
    CannotHold,
    Copied,
    Digest,
    Finding,
    Key,
    Refusal,
    SessionStore,
    Stamp,
    shared_pages,
)

T = TypeVar("T")


class Rows(SessionStore, Protocol):
    """What a store gives beside `SessionStore`, rows of every layout spelled alike."""

    def bites(self, keys: Sequence[Key]) -> Iterator[list[Key]]:
        """Split keys so that each bite's events are a few megabytes."""

    def snapshot(self) -> AbstractContextManager[None]:
        """Run the body on one snapshot of the store."""

    def fine_times(self) -> int:
        """Count the sessions whose time is finer than a microsecond."""

    # Inside the caller's snapshot or transaction:
    def read_stamps(self, keys: Sequence[Key]) -> dict[Key, Stamp]: ...
    def read_sessions(self, keys: Sequence[Key]) -> Iterator[SessionRow]: ...
    def read_events(self, keys: Sequence[Key]) -> Iterator[EventRow]: ...


class Tables(Rows, Protocol):
    """A store that is written row by row."""

    def writing(self) -> AbstractContextManager[Any]:
        """Run the body in one transaction under the guard row; raises Overtaken."""

    def attempt(self, work: Callable[[], T]) -> T:
        """Run a whole transaction, again if it met a deadlock."""

    # Inside the caller's transaction:
    def remove(self, keys: Sequence[Key]) -> int: ...
    def write_sessions(self, rows: Iterable[SessionRow]) -> None: ...
    def write_events(self, rows: Iterable[EventRow]) -> None: ...


class Whole(NamedTuple):
    """One session on its way into a service, read whole from one snapshot."""

    session: SessionRow
    events: Sequence[EventRow]
    # By which each event's copy is recognised, as `Replayed.replay` is told to.
    digests: Sequence[bytes]

    @property
    def key(self) -> Key:
        return Key(self.session.user_id, self.session.session_id)


class Replayed(Rows, Protocol):
    """A store that is written session by session, through an interface."""

    def remove(self, keys: Sequence[Key]) -> int: ...
    def replay(
        self, wholes: Sequence[Whole], until: float, recognise: Callable[[EventRow], bytes]
    ) -> dict[Key, Stamp | Refusal | None]:
        """Write these sessions; return each one's stamp, read back, or why it can't be here.

        None: not through, for time is up.
        """


Target = Tables | Replayed
# How long one call of `copy` may replay: a step has more to do within its hard time limit.
REPLAY_SECONDS = 8.0


def copy(source: Rows, target: Target, keys: Sequence[Key]) -> Batch:
    """Copy these sessions bite by bite: each one snapshot and, into tables, one transaction.

    A session with a value that the target can't hold is left out whole, and what the
    target held of it goes. Replay may be `unfinished`.
    """
    batch = Batch({})
    until = time.monotonic() + REPLAY_SECONDS
    for bite in source.bites(keys):
        if batch.unfinished:
            batch.unfinished.extend(bite)
            continue
        try:
            done = _attempt(source, target, bite, until)
        except CannotHold:
            # The database refused what the table of values does not know: alone, each session
            # either goes over or is the one.
            done = _one_by_one(source, target, bite, until)
        batch.copied.update(done.copied)
        batch.refused.update(done.refused)
        batch.unfinished.extend(done.unfinished)
    return batch


def _one_by_one(source: Rows, target: Target, keys: Sequence[Key], until: float) -> Batch:
    batch = Batch({})
    for key in keys:
        try:
            done = _attempt(source, target, [key], until)
        except CannotHold as refused:
            target.delete([key])
            done = Batch({}, {key: Refusal("sessions", str(refused))})
        batch.copied.update(done.copied)
        batch.refused.update(done.refused)
        batch.unfinished.extend(done.unfinished)
    return batch


def _attempt(source: Rows, target: Target, keys: Sequence[Key], until: float) -> Batch:
    if target.layout.is_service:
        return _replay(source, cast(Replayed, target), keys, until)
    tables = cast(Tables, target)
    return tables.attempt(lambda: _bite(source, tables, keys))


class _Held:
    """Passes on what a target can hold, and keeps why sessions were left out."""

    def __init__(self, target: Layout) -> None:
        self.target = target
        self.refused: dict[Key, Refusal] = {}

    def sessions(self, rows: Iterable[SessionRow]) -> Iterator[SessionRow]:
        return self._rows(rows, values.in_session)

    def events(self, rows: Iterable[EventRow]) -> Iterator[EventRow]:
        return self._rows(rows, _look(self.target))

    def _rows(self, rows: Iterable[T], look: Callable[[T], Iterator[values.Found]]) -> Iterator[T]:
        for row in rows:
            key = Key(row[0], row[1])  # type: ignore[index]
            if key in self.refused:
                continue
            if found := values.refusal(self.target, look(row)):
                self.refused[key] = _refusal(found, self.target)
                continue
            yield row


def _look(target: Layout) -> Callable[[EventRow], Iterator[values.Found]]:
    """Return what looks for odd values of an event on its way to such a target."""
    if not target.is_service:
        return values.in_event
    return lambda row: chain(values.in_event(row), service_values.odd_event(row))


def _bite(source: Rows, target: Tables, keys: Sequence[Key]) -> Batch:
    held = _Held(target.layout)
    # The guard first: waiting for it must not hold a snapshot of the source open.
    with target.writing(), source.snapshot():
        before = source.read_stamps(keys)
        target.remove(keys)
        there = list(before)
        target.write_sessions(held.sessions(source.read_sessions(there)))
        target.write_events(held.events(_events(source, there, target.layout)))
        # Written up to the value that was refused, in this same transaction.
        target.remove(list(held.refused))
        after = target.read_stamps(there)
    return Batch(
        {key: Copied(before[key], stamp) for key, stamp in after.items()},
        held.refused,
    )


def _replay(source: Rows, target: Replayed, keys: Sequence[Key], until: float) -> Batch:
    """Read a bite whole, then write it: a snapshot is not held open for as long as replay takes."""
    held = _Held(target.layout)
    events: dict[Key, list[EventRow]] = {}
    with source.snapshot():
        before = source.read_stamps(keys)
        there = list(before)
        sessions = list(held.sessions(source.read_sessions(there)))
        for row in held.events(_events(source, there, target.layout)):
            events.setdefault(Key(row[0], row[1]), []).append(row)

    kept = source.kept.both(target.kept)

    def recognise(row: EventRow) -> bytes:
        # What the target gives back is spelled by google-adk; what goes there may not be yet.
        return canonical.event_digest(service_values.only_kept(service_values.normal(row), kept))

    gone = [key for key in keys if key not in before or key in held.refused]
    if gone:
        target.remove(gone)
    wholes = []
    for session in sessions:
        key = Key(session.user_id, session.session_id)
        if key not in held.refused:
            rows = events.get(key, [])
            wholes.append(Whole(session, rows, [recognise(row) for row in rows]))
    batch = Batch({}, dict(held.refused))
    for key, answer in target.replay(wholes, until, recognise).items():
        if answer is None:
            batch.unfinished.append(key)
        elif isinstance(answer, Refusal):
            batch.refused[key] = answer
        else:
            batch.copied[key] = Copied(before[key], answer)
    return batch


def _refusal(found: values.Found, target: Layout) -> Refusal:
    field = f"{found.field} {found.path}".strip()
    return Refusal(field, f"{found.odd}: {found.outcome(target).words}")


def _events(store: Rows, keys: Sequence[Key], other: Layout) -> Iterator[EventRow]:
    """Read events, spelled so that a store of the `other` layout has them alike."""
    by_service = other.is_service or store.layout.is_service
    for row in store.read_events(keys):
        if by_service:
            # google-adk keeps no partial event.
            if not service_values.is_partial(row):
                yield _for(other, row, store.layout)
        else:
            yield _for(other, row, store.layout)


def _for(other: Layout, row: EventRow, own: Layout) -> EventRow:
    """Put into an event's data what one of two layouts reads from there and the other does not."""
    if other.is_service or own.is_service:
        return row if own.is_service else service_values.normal(row)
    if Layout.ADK_SQLITE not in (other, own):
        return row
    return canonical.filled(row, columns_win=own is not Layout.ADK_SQLITE)


def digests(store: Rows, keys: Collection[Key], other: SessionStore) -> dict[Key, Digest]:
    """Return canonical digests, to be compared with those of the `other` store.

    Ids and times are in, as far as both keep them. Events are hashed one by one as they come,
    so a long session costs no memory; each bite is one snapshot.
    """
    found: dict[Key, Digest] = {}
    if not keys or not store.has_tables:
        return found
    for bite in store.bites(list(keys)):
        with store.snapshot():
            stamps = store.read_stamps(bite)
            states = {
                Key(row.user_id, row.session_id): canonical.session_digest(
                    _comparable(row, store, other)
                )
                for row in store.read_sessions(bite)
            }
            events = {key: hashlib.sha256() for key in stamps}
            kept = store.kept.both(other.kept)
            for row in _events(store, bite, other.layout):
                # Events of a session that is gone have nowhere to go.
                if (total := events.get(Key(row.user_id, row.session_id))) is not None:
                    total.update(canonical.event_digest(service_values.only_kept(row, kept)))
        for key, stamp in stamps.items():
            found[key] = Digest(states[key], events[key].hexdigest(), stamp)
    return found


def _comparable(row: SessionRow, store: SessionStore, other: SessionStore) -> SessionRow:
    """Leave out of a session's row what not both sides show."""
    if store.layout.is_service or other.layout.is_service:
        # No service shows when a session was made.
        row = row._replace(create_time=None)
    if not store.kept.both(other.kept).session_times:
        row = row._replace(update_time=None)
    return row


def session(store: Rows, key: Key, other: SessionStore) -> Mapping[str, Any] | None:
    """Return one session as `SessionStore.session` does, spelled alike by every layout."""
    if not store.has_tables:
        return None
    with store.snapshot():
        head = next(store.read_sessions([key]), None)
        rows = [] if head is None else list(_events(store, [key], other.layout))
    if head is None:
        return None
    head, kept = _comparable(head, store, other), store.kept.both(other.kept)
    rows = [service_values.only_kept(row, kept) for row in rows]
    return {
        "state": _value(head.state),
        "create_time": _time(head.create_time),
        "update_time": _time(head.update_time),
        "events": [
            {
                "id": row.id,
                "invocation_id": row.invocation_id,
                "timestamp": _time(row.timestamp),
                "event_data": _value(row.event_data),
            }
            for row in rows
        ],
    }


def refusal(source: Rows, key: Key, target: Layout) -> Refusal | None:
    """Say why a session of the source can't be on the target; None: it could."""
    found = values.refusal(target, odds(source, key, target))
    return None if found is None else _refusal(found, target)


def odds(source: Rows, key: Key, target: Layout) -> Iterator[values.Found]:
    """Yield what is odd in one session, on its way to such a target."""
    look = _look(target)
    with source.snapshot():
        for session in source.read_sessions([key]):
            yield from values.in_session(session)
        for row in source.read_events([key]):
            yield from look(_for(target, row, source.layout))


# How long a survey may look at values. What it does not reach is looked at as it is copied.
SCAN_SECONDS = 4.0
SCAN_PAGE = 500


def scan(store: Rows, target: Layout) -> list[Finding]:
    """Name the values that a target changes or refuses, with their number and one example."""
    tally: dict[tuple[str, values.Odd], tuple[int, str]] = {}
    until = time.monotonic() + SCAN_SECONDS

    def note(user: str, session: str, found: Iterable[values.Found]) -> None:
        # Once a row, however often it stands there.
        for field, odd in {(one.field, one.odd) for one in found}:
            count, example = tally.get((field, odd), (0, f"{user}/{session}"))
            tally[field, odd] = (count + 1, example)

    for rows in shared_pages(store, SCAN_PAGE):
        for row in rows:
            table = "app_states" if row.user_id is None else "user_states"
            note(row.user_id or "", "", values.in_state(f"{table}.state", row.state))
        if time.monotonic() > until:
            break
    seen, complete, key = 0, False, START
    while not complete and time.monotonic() < until:
        page = [one for one, _ in store.page(key, SCAN_PAGE)]
        complete = len(page) < SCAN_PAGE
        for bite in store.bites(page):
            _scan_bite(store, bite, target, note)
            seen, key = seen + len(bite), bite[-1]
            if time.monotonic() > until:
                complete = complete and key == page[-1]
                break
    found = [
        _finding(odd, field, target, *counted) for (field, odd), counted in sorted(tally.items())
    ]
    if count := store.fine_times():
        found.append(_finding(values.Odd.FINE_TIME, "sessions.update_time", target, count, ""))
    if not complete:
        reason = (
            "only this many were looked at for values that the target can't hold; the others are"
            " as they are copied"
        )
        found.append(Finding("sessions", reason, seen, "", False))
    return [one for one in found if one is not None]


def _scan_bite(
    store: Rows,
    bite: Sequence[Key],
    target: Layout,
    note: Callable[[str, str, Iterable[values.Found]], None],
) -> None:
    last: EventRow | None = None
    look = _look(target)
    times: dict[Key, set[int | None]] = {key: set() for key in bite}
    with store.snapshot():
        sessions = list(store.read_sessions(bite))
        for session in sessions:
            note(session.user_id, session.session_id, values.in_session(session))
        for row in store.read_events(bite):
            note(row.user_id, row.session_id, look(row))
            times.setdefault(Key(row.user_id, row.session_id), set()).add(row.timestamp)
            if last is not None and last[:2] == row[:2]:
                note(row.user_id, row.session_id, _order(last, row))
            last = row
    if target.is_service:
        for session in sessions:
            known = times[Key(session.user_id, session.session_id)]
            if known and session.update_time not in known:
                found = values.Found(values.Odd.TIME_APART, "sessions.update_time")
                note(session.user_id, session.session_id, [found])


def _order(last: EventRow, row: EventRow) -> Iterator[values.Found]:
    """Yield what is odd in the order of two events of one session."""
    if last.timestamp == row.timestamp and str(last.id) > str(row.id):
        yield values.Found(values.Odd.SAME_TIME, "events.timestamp")
    if None not in (last.timestamp, row.timestamp) and last.timestamp > row.timestamp:  # type: ignore[operator]
        yield values.Found(values.Odd.TIME_ORDER, "events.timestamp")


def _finding(
    odd: values.Odd, field: str, target: Layout, count: int, example: str
) -> Finding | None:
    outcome = values.TABLE[odd][target]
    if outcome.fate is values.Fate.KEPT:
        return None
    refused = outcome.fate is values.Fate.REFUSED
    return Finding(field, f"{odd}: {outcome.words}", count, _shown(example), refused)


def _shown(example: str) -> str:
    """Spell a key so that our own database holds it."""
    return example if example.isprintable() else ascii(example)[1:-1]


def _value(text: str | None) -> Any:
    """Read JSON; what is not JSON is shown as it stands, for naming a difference."""
    try:
        return None if text is None else canonical.loads(text)
    except canonical.NotJson:
        return text


def _time(micros: int | None) -> str:
    return "no time" if micros is None else text_of_micros(micros)
