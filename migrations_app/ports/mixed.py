"""Between stores of two layouts: rows are converted on the way and compared in one spelling.

Both directions of every pair go through here. Rows stream one by one from a snapshot of the
source into a transaction of the target, in bites of a few megabytes, for one side is always an
SQLite file whose agents wait for either.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, Protocol, TypeVar

from migrations_app.domain import canonical, values
from migrations_app.domain.canonical import EventRow, SessionRow, text_of_micros
from migrations_app.domain.values import Layout
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
    """What a store gives and takes beside `SessionStore`, rows of every layout spelled alike."""

    def bites(self, keys: Sequence[Key]) -> Iterator[list[Key]]:
        """Split keys so that each bite's events are a few megabytes."""

    def snapshot(self) -> AbstractContextManager[None]:
        """Run the body on one snapshot of the store."""

    def writing(self) -> AbstractContextManager[Any]:
        """Run the body in one transaction under the guard row; raises Overtaken."""

    def fine_times(self) -> int:
        """Count the sessions whose time is finer than a microsecond."""

    def attempt(self, work: Callable[[], T]) -> T:
        """Run a whole transaction, again if it met a deadlock."""

    # Inside the caller's snapshot or transaction:
    def read_stamps(self, keys: Sequence[Key]) -> dict[Key, Stamp]: ...
    def read_sessions(self, keys: Sequence[Key]) -> Iterator[SessionRow]: ...
    def read_events(self, keys: Sequence[Key]) -> Iterator[EventRow]: ...
    def remove(self, keys: Sequence[Key]) -> int: ...
    def write_sessions(self, rows: Iterable[SessionRow]) -> None: ...
    def write_events(self, rows: Iterable[EventRow]) -> None: ...


def copy(source: Rows, target: Rows, keys: Sequence[Key]) -> Batch:
    """Copy these sessions bite by bite: each one snapshot and one transaction.

    A session with a value that the target can't hold is left out whole, and what the
    target held of it goes.
    """
    batch = Batch({})
    for bite in source.bites(keys):
        try:
            done = _attempt(source, target, bite)
        except CannotHold:
            # The database refused what the table of values does not know: alone, each session
            # either goes over or is the one.
            done = _one_by_one(source, target, bite)
        batch.copied.update(done.copied)
        batch.refused.update(done.refused)
    return batch


def _one_by_one(source: Rows, target: Rows, keys: Sequence[Key]) -> Batch:
    batch = Batch({})
    for key in keys:
        try:
            done = _attempt(source, target, [key])
        except CannotHold as refused:
            target.delete([key])
            done = Batch({}, {key: Refusal("sessions", str(refused))})
        batch.copied.update(done.copied)
        batch.refused.update(done.refused)
    return batch


def _attempt(source: Rows, target: Rows, keys: Sequence[Key]) -> Batch:
    return target.attempt(lambda: _bite(source, target, keys))


def _bite(source: Rows, target: Rows, keys: Sequence[Key]) -> Batch:
    refused: dict[Key, Refusal] = {}

    def held(rows: Iterable[T], look: Callable[[T], Iterator[values.Found]]) -> Iterator[T]:
        for row in rows:
            key = Key(row[0], row[1])  # type: ignore[index]
            if key in refused:
                continue
            if found := values.refusal(target.layout, look(row)):
                refused[key] = _refusal(found, target.layout)
                continue
            yield row

    # The guard first: waiting for it must not hold a snapshot of the source open.
    with target.writing(), source.snapshot():
        before = source.read_stamps(keys)
        target.remove(keys)
        there = list(before)
        target.write_sessions(held(source.read_sessions(there), values.in_session))
        events = (_for(target.layout, row, source.layout) for row in source.read_events(there))
        target.write_events(held(events, values.in_event))
        # Written up to the value that was refused, in this same transaction.
        target.remove(list(refused))
        after = target.read_stamps(there)
    return Batch(
        {key: Copied(before[key], stamp) for key, stamp in after.items()},
        refused,
    )


def _refusal(found: values.Found, target: Layout) -> Refusal:
    field = f"{found.field} {found.path}".strip()
    return Refusal(field, f"{found.odd}: {found.outcome(target).words}")


def _for(other: Layout, row: EventRow, own: Layout) -> EventRow:
    """Put into an event's data what one of two layouts reads from there and the other does not."""
    if Layout.ADK_SQLITE not in (other, own):
        return row
    return canonical.filled(row, columns_win=own is not Layout.ADK_SQLITE)


def digests(store: Rows, keys: Collection[Key], other: Layout) -> dict[Key, Digest]:
    """Return canonical digests, to be compared with those of a store of the `other` layout.

    Ids and times are in. Events are hashed one by one as they come, so a long session
    costs no memory; each bite is one snapshot.
    """
    found: dict[Key, Digest] = {}
    if not keys or not store.has_tables:
        return found
    for bite in store.bites(list(keys)):
        with store.snapshot():
            stamps = store.read_stamps(bite)
            states = {
                Key(row.user_id, row.session_id): canonical.session_digest(row)
                for row in store.read_sessions(bite)
            }
            events = {key: hashlib.sha256() for key in stamps}
            for row in store.read_events(bite):
                # Events of a session that is gone have nowhere to go.
                if (total := events.get(Key(row.user_id, row.session_id))) is not None:
                    total.update(canonical.event_digest(_for(other, row, store.layout)))
        for key, stamp in stamps.items():
            found[key] = Digest(states[key], events[key].hexdigest(), stamp)
    return found


def session(store: Rows, key: Key, other: Layout) -> Mapping[str, Any] | None:
    """Return one session as `SessionStore.session` does, spelled alike by every layout."""
    if not store.has_tables:
        return None
    with store.snapshot():
        head = next(store.read_sessions([key]), None)
        rows = [] if head is None else list(store.read_events([key]))
    if head is None:
        return None
    return {
        "state": _value(head.state),
        "create_time": _time(head.create_time),
        "update_time": _time(head.update_time),
        "events": [
            {
                "id": row.id,
                "invocation_id": row.invocation_id,
                "timestamp": _time(row.timestamp),
                "event_data": _value(_for(other, row, store.layout).event_data),
            }
            for row in rows
        ],
    }


def refusal(source: Rows, key: Key, target: Layout) -> Refusal | None:
    """Say why a session of the source can't be on the target; None: it could."""
    with source.snapshot():
        found = values.refusal(
            target,
            chain(
                (one for row in source.read_sessions([key]) for one in values.in_session(row)),
                (
                    one
                    for row in source.read_events([key])
                    for one in values.in_event(_for(target, row, source.layout))
                ),
            ),
        )
    return None if found is None else _refusal(found, target)


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
            _scan_bite(store, bite, note)
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
    note: Callable[[str, str, Iterable[values.Found]], None],
) -> None:
    last: EventRow | None = None
    with store.snapshot():
        for session in store.read_sessions(bite):
            note(session.user_id, session.session_id, values.in_session(session))
        for row in store.read_events(bite):
            note(row.user_id, row.session_id, values.in_event(row))
            if (
                last is not None
                and (last.user_id, last.session_id) == (row.user_id, row.session_id)
                and last.timestamp == row.timestamp
                and str(last.id) > str(row.id)
            ):
                found = values.Found(values.Odd.SAME_TIME, "events.timestamp")
                note(row.user_id, row.session_id, [found])
            last = row


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
