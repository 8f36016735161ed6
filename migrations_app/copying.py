"""Copying and comparing: the bounded pieces that BACKFILL, DELTA, VERIFY and OFFBOARD share.

Each function works for a few seconds at most and says how far it came. What it does in a
store is guarded by that store's guard row, what it records by `holding`.

`source` and `target` are where data is read and where it is written. On the way back those
are the move's target and its source: `way` says so, and which column has whose stamps.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, TypeVar

from durable.driver import Clock, holding
from durable.errors import Refused
from migrations_app import merging, ports, queries
from migrations_app.domain.mismatch import Difference, Looks
from migrations_app.domain.phases import REVERSED
from migrations_app.domain.stopwatch import Stopwatch
from migrations_app.models import Mismatch, Sample, SessionStamp, TenantMigration
from migrations_app.ports.base import (
    Copied,
    Digest,
    Key,
    Mark,
    SessionStore,
    SharedRow,
    Stamp,
    Unfinished,
    same,
    shared_pages,
)
from tenants.models import Cell, Store

# A step works this long, then settles: far below the lease, so that a kill costs little.
STEP_SECONDS = 2.0
# Inside the fence, where every step's claim, connections and settling make somebody wait.
FENCED_STEP_SECONDS = 5.0
# Keys read at once: some 45 ms of aggregation at 20 events each.
PAGE = 2_000
# With the fence closed nobody of the tenant waits for a page, only the fence does.
FENCED_PAGE = 20_000
# One chunk is one transaction on the target. It aims at this long: on SQLite a longer
# snapshot makes live turns wait for the file, and a killed worker repeats at most this.
CHUNK_SECONDS = 0.4
CHUNK_FIRST, CHUNK_MOST = 50, 500
# With the fence closed only the fence waits for a chunk, on PostgreSQL: fewer, larger ones.
FENCED_CHUNK_SECONDS = 2.0
# Differences are named by reading both sessions; the rest of a chunk is named on demand.
NAMED_PER_CHUNK = 20


class Timer:
    """Stops when a step has worked long enough."""

    def __init__(self, seconds: float = STEP_SECONDS) -> None:
        self.until = time.monotonic() + seconds

    def stop(self) -> None:
        """Let the step end after what it is doing."""
        self.until = time.monotonic()

    @property
    def out(self) -> bool:
        return time.monotonic() >= self.until


@dataclass
class Meter(Stopwatch):
    """What one step did and how long it took, folded into the move's rates."""

    copied: int = 0
    compared: int = 0
    deleted: int = 0
    changed: int = 0
    # Further columns of the move that a sweep knows at its end.
    columns: dict[str, Any] = field(default_factory=dict)

    def rate(self, what: str, known: float | None, least: int = 20) -> float | None:
        """Return things per second, smoothed over what is known; unchanged on thin evidence."""
        count, spent = self.count.get(what, 0), self.spent.get(what, 0.0)
        if count < least or spent <= 0:
            return known
        return count / spent if known is None else 0.6 * known + 0.4 * count / spent

    def changes(self, move: TenantMigration) -> dict[str, Any]:
        """Return the columns of `move` that this step's work changes."""
        # A short last page costs as much as a long one: as a rule it said ten times too much.
        scan = self.rate("scan", None, least=PAGE // 2)
        return {
            "copied": move.copied + self.copied,
            "compared": move.compared + self.compared,
            "deleted": move.deleted + self.deleted,
            "changed": move.changed + self.changed,
            "copy_rate": self.rate("copy", move.copy_rate),
            "verify_rate": self.rate("compare", move.verify_rate),
            "shared_rate": self.rate("shared", move.shared_rate, least=1),
            "artifact_rate": self.rate("artifact", move.artifact_rate),
            "scan_seconds": move.sessions / scan if scan else move.scan_seconds,
            **self.columns,
        }


@dataclass(frozen=True)
class Way:
    """Where the tenant lives and its data is read, and where it goes and is written."""

    from_cell: Cell
    from_store: Store
    to_cell: Cell
    to_store: Store
    # The columns of SessionStamp that hold the stamps of both.
    read: str
    written: str


def way(move: TenantMigration) -> Way:
    """Return which way data goes in the move's phase."""
    source = (move.source_cell, move.source_store)
    target = (move.target_cell, move.target_store)
    if move.phase in REVERSED:
        return Way(*target, *source, read="target_stamp", written="source_stamp")
    return Way(*source, *target, read="source_stamp", written="target_stamp")


def carries_back(move: TenantMigration) -> bool:
    """Return whether births are carried out of a split, to a source whose agents serve."""
    return move.phase in REVERSED and queries.split_live(move)


T = TypeVar("T")


def in_order(move: TenantMigration, read: T, written: T) -> tuple[T, T]:
    """Return (the move's source's, the move's target's): what people are shown."""
    return (written, read) if move.phase in REVERSED else (read, written)


@contextmanager
def opened(move: TenantMigration, store: Store) -> Iterator[SessionStore]:
    """Open one side for the tenant, under the claim that `move` is held by."""
    with ports.open_store(
        store.kind,
        store.address_from,
        app_name=move.tenant.app_name,
        move=move.pk,
        claim=move.claim,
    ) as port:
        yield port


@contextmanager
def both(move: TenantMigration) -> Iterator[tuple[SessionStore, SessionStore]]:
    """Open both sides of the `way`. Raises TablesLost once PREPARE has made sure of the tables."""
    sides = way(move)
    with ExitStack() as stack:
        source = stack.enter_context(opened(move, sides.from_store))
        target = stack.enter_context(opened(move, sides.to_store))
        if move.guarded:
            check_tables((source, sides.from_store), (target, sides.to_store))
        yield source, target


def take_written(move: TenantMigration, written: SessionStore) -> None:
    """Let this claim write where data goes. In a split agents write there too."""
    written.take(mover=True, agents=queries.split_live(move))


class TablesLost(Refused):
    """A store that had ADK's tables answers without one of them."""


def check_tables(*sides: tuple[SessionStore, Store]) -> None:
    """Raise TablesLost where a table is gone.

    A port without tables reads as empty. Taken for a tenant whose sessions were all deleted, it
    emptied the target, was equal to it, and was cut over to (tried: a table renamed for a while).
    """
    for port, store in sides:
        if not port.has_tables:
            raise TablesLost(
                f"{store} has lost one of ADK's tables since the move began. Bring it back, or"
                " abort the move."
            )


def cursor(move: TenantMigration) -> Key:
    """Return where the running sweep stands; START at its beginning."""
    return Key(move.cursor_user, move.cursor_session)


def compare_size(move: TenantMigration) -> int:
    """Return how many sessions are compared at once: what takes about a second."""
    return _size(move, CHUNK_FIRST if move.verify_rate is None else int(move.verify_rate))


def chunk_size(move: TenantMigration, seconds: float = CHUNK_SECONDS) -> int:
    """Return how many sessions are copied in so many seconds at the measured rate."""
    return _size(move, CHUNK_FIRST if move.copy_rate is None else int(move.copy_rate * seconds))


def _size(move: TenantMigration, wanted: int) -> int:
    """Bound a chunk, and halve it with every failure in a row.

    A chunk of huge sessions may run into the database's time limit; tried again at the same
    size it would do so for ever.
    """
    return max(1, min(CHUNK_MOST, wanted) >> min(move.failures, 20))


@dataclass(frozen=True)
class Noted:
    read: Stamp
    written: Stamp


def noted(move: TenantMigration, keys: Collection[Key]) -> dict[Key, Noted]:
    """Return what is recorded of these sessions, where anything is."""
    sides = way(move)
    rows = move.stamps.filter(session_id__anyof={key.session_id for key in keys})
    return {
        Key(user, session): Noted(read, written)
        for user, session, read, written in rows.values_list(
            "user_id", "session_id", sides.read, sides.written
        )
    }


@dataclass(frozen=True)
class Swept:
    """How far a sweep came: its cursor, how many keys it passed, whether it is through."""

    cursor: Key
    passed: int
    finished: bool
    # What a person should know of why it stopped here.
    note: str = ""


def sweep(
    move: TenantMigration,
    source: SessionStore,
    *,
    meter: Meter,
    timer: Timer,
    needs: Callable[[Sequence[tuple[Key, Stamp]]], set[Key]],
    work: Callable[[Sequence[Key]], bool],
    chunk: int,
    page_size: int = PAGE,
    mark: Mark | None = None,
) -> Swept:
    """Walk the source's sessions from the move's cursor; give those that need it to `work`.

    Adds each one that it passes to `mark`.

    `needs(page)` returns which keys of a page of (key, stamp) need work; `work(keys)` does it
    for up to `chunk` of them, and returns whether all of it is done: else the sweep stops before
    it. Few needles in much hay are gathered over pages, so that
    the work's own cost is paid per chunk, not per page.
    """
    read, done, passed = cursor(move), cursor(move), 0
    pending: list[tuple[Key, Stamp, bool]] = []
    exhausted = False
    while True:
        waiting = sum(needed for _, _, needed in pending)
        # One page at least: a store that answers slower than a step is long still gets on.
        if not exhausted and waiting < chunk and (not timer.out or not (pending or passed)):
            with meter.timing("scan", 0):
                page = source.page(read, page_size)
                wanted = needs(page) if page else set()
            meter.count["scan"] = meter.count.get("scan", 0) + len(page)
            pending += [(key, stamp, key in wanted) for key, stamp in page]
            read = page[-1][0] if page else read
            exhausted = len(page) < page_size
            continue
        prefix = _prefix(pending, chunk)
        if prefix:
            keys = [key for key, _, needed in prefix if needed]
            if keys and not work(keys):
                return Swept(done, passed, finished=False, note=UNFINISHED)
            if mark is not None:
                for key, stamp, _ in prefix:
                    mark.session(key, stamp)
            del pending[: len(prefix)]
            done, passed = prefix[-1][0], passed + len(prefix)
        if exhausted and not pending:
            return Swept(done, passed, finished=True)
        if timer.out:
            return Swept(done, passed, finished=False)


def _prefix(
    pending: Sequence[tuple[Key, Stamp, bool]], chunk: int
) -> Sequence[tuple[Key, Stamp, bool]]:
    """Return the head of `pending` that holds at most `chunk` keys in need."""
    needed = 0
    for at, (_, _, need) in enumerate(pending):
        if need and needed == chunk:
            return pending[:at]
        needed += need
    return list(pending)


def changed_keys(move: TenantMigration, page: Sequence[tuple[Key, Stamp]]) -> set[Key]:
    """Return the keys of a page whose copy is not of the stamp that the source has now."""
    known = noted(move, [key for key, _ in page])
    return {
        key
        for key, stamp in page
        # Without a stamp of the copy: noted, and its chunk is not known to be whole.
        if key not in known or known[key].read != stamp or not known[key].written
    }


def copy(
    move: TenantMigration,
    source: SessionStore,
    target: SessionStore,
    keys: Sequence[Key],
    *,
    meter: Meter,
    clock: Clock,
    compare: bool,
) -> bool:
    """Copy one chunk: note its keys, write it, compare it if asked, record what is known.

    Returns whether all of it is through: replay has its time. What is, is recorded, so that the
    same keys come down to the others.

    A key is noted before its chunk is written, so whatever a crash leaves on the target is
    on the list of what we wrote. A session that vanished at the source is gone at the
    target too. A difference of sessions that changed meanwhile is not a mismatch: the next
    pass sees their stamps.
    """
    with holding(move):
        SessionStamp.objects.bulk_create(
            [
                SessionStamp(move=move, user_id=u, session_id=s, carried_back=carries_back(move))
                for u, s in keys
            ],
            update_conflicts=True,
            unique_fields=["move", "session_id", "user_id"],
            update_fields=[way(move).written, "compared_at", "carried_back"],
        )
    with meter.timing("copy", len(keys)):
        batch = ports.copy(source, target, keys)
    meter.count["copy"] -= len(batch.unfinished)
    copied = batch.copied
    meter.copied += len(copied)
    equal: set[Key] = set()
    differ: dict[Key, Difference] = {}
    moved_on: set[Key] = set()
    pair: Digests = ({}, {})
    if compare and copied:
        with meter.timing("compare", len(copied)):
            pair = ports.digests_of_both(source, target, list(copied))
        meter.compared += len(copied)
        equal, differ, moved_on = _verdicts(move, source, target, copied, pair)
    # Their stamps stay blank: tried again by each pass, and never deleted by OFFBOARD.
    refused = {key: refusal.difference for key, refusal in batch.refused.items()}
    left_out = ports.digests_of_both(source, target, list(refused)) if refused else ({}, {})
    known = {*copied, *refused, *batch.unfinished}
    gone = [key for key in keys if key not in known]
    meter.deleted += len(gone)
    now = clock()
    with holding(move):
        _record(move, copied, dict.fromkeys(equal, now))
        _forget(move, gone)
        _resolve(move, [*gone, *equal], now)
        _report(move, differ, pair, now)
        _report(move, refused, left_out, now)
        _report(move, dict.fromkeys(moved_on, MOVED_ON), pair, now, transient=True)
    return not batch.unfinished


UNFINISHED = "Replay takes longer than one step may: what is written stays, and is gone on with"


def _copy_whole(*args: Any, **kwargs: Any) -> None:
    """`copy`, for what can only go on once it is through. Raises Unfinished."""
    if not copy(*args, **kwargs):
        raise Unfinished(UNFINISHED)


MOVED_ON = Difference("events", "changed at the source after it was copied", Looks.MOVED_ON)
Digests = tuple[dict[Key, Digest], dict[Key, Digest]]


def _verdicts(
    move: TenantMigration,
    source: SessionStore,
    target: SessionStore,
    copied: Mapping[Key, Copied],
    pair: Digests,
) -> tuple[set[Key], dict[Key, Difference], set[Key]]:
    """Tell equal sessions from different ones, and from those that moved on since the copy."""
    ours, theirs = pair
    equal, differ, moved_on = set(), [], set()
    for key, stamps in copied.items():
        mine, other = ours.get(key), theirs.get(key)
        if mine is None or mine.stamp != stamps.source:
            if not same(mine, other):
                moved_on.add(key)
            continue
        if same(mine, other) and other is not None and other.stamp == stamps.target:
            equal.add(key)
        else:
            differ.append(key)
    return equal, name(move, source, target, differ), moved_on


def name(
    move: TenantMigration, source: SessionStore, target: SessionStore, keys: Iterable[Key]
) -> dict[Key, Difference]:
    """Say where these sessions differ, by reading the first NAMED_PER_CHUNK of them."""
    source, target = in_order(move, source, target)
    named: dict[Key, Difference] = {}
    for key in keys:
        if len(named) < NAMED_PER_CHUNK:
            found = ports.difference(source, target, key)
        else:
            found = Difference("events", "open the diff to see where", Looks.CHANGED_VALUE)
        found = found or Difference(
            "events", "the rows differ in a column that ADK does not read", Looks.CHANGED_VALUE
        )
        named[key] = _on_the_way_back(found) if move.phase in REVERSED else found
    return named


def _on_the_way_back(found: Difference) -> Difference:
    """Read a difference the other way round: what only the source has came in too late."""
    looks = {
        Looks.FENCE_LEAK: Looks.LATE_WRITE,
        Looks.LOST: Looks.LATE_WRITE,
        Looks.WRITTEN_ON_TARGET: Looks.NOT_CARRIED,
        Looks.EMPTY_COPY: Looks.LATE_WRITE,
    }
    return replace(found, looks_like=looks.get(found.looks_like, found.looks_like))


def compare(
    move: TenantMigration,
    source: SessionStore,
    target: SessionStore,
    keys: Sequence[Key],
    *,
    meter: Meter,
    clock: Clock,
) -> None:
    """Compare one chunk while the source is closed: what differs now is a mismatch.

    On the way back, what the source has lost since the cutover is copied first: nothing of it is
    there to be lost.
    """
    if move.phase in REVERSED:
        there = target.stamps(keys)
        if lost := [key for key in keys if key not in there]:
            _copy_whole(move, source, target, lost, meter=meter, clock=clock, compare=False)
    with meter.timing("compare", len(keys)):
        pair = ports.digests_of_both(source, target, keys)
    ours, theirs = pair
    meter.compared += len(keys)
    equal = [key for key in keys if same(ours.get(key), theirs.get(key))]
    differing = [key for key in keys if key not in set(equal)]
    served: set[Key] = set()
    if carries_back(move):
        # Agents of the source may have gone on with one since it was looked up.
        known = noted(move, differing)
        served = {
            key
            for key in differing
            if key in theirs and key in known and known[key].written != theirs[key].stamp
        }
    differ = name(move, source, target, [key for key in differing if key not in served])
    stamps = {
        key: Copied(ours[key].stamp, theirs[key].stamp)
        for key in equal
        if key in ours and key in theirs
    }
    now = clock()
    with holding(move):
        _record(move, stamps, dict.fromkeys(stamps, now))
        _resolve(move, [*equal, *served], now)
        _report(move, differ, pair, now)


# In `prove`'s cursor, for a user: the target's sum was our own list's when the sweep began.
AS_RECORDED = "as recorded"


def prove(
    move: TenantMigration,
    source: SessionStore,
    target: SessionStore,
    *,
    meter: Meter,
    timer: Timer,
    clock: Clock,
) -> Swept:
    """Compare every session that is not proven equal by an earlier comparison.

    Walks our own list (cursor_session holds the last id), on which DELTA has put every session
    of the closed source. Proven: compared equal at the stamps that both sides still have, where
    stamps see every edit. The target's are read here; that the source's are still the
    recorded ones is what its mark says, read last. So the source is not read again.

    The target's are first read all at once, as their sum: a third of what they take page by
    page, which is how those are found that are not as recorded.
    """
    last, passed = int(move.cursor_session or 0), 0
    # Out of a split only what was carried back is compared: the rest lives at the source.
    back_out = carries_back(move)
    ours = move.stamps.filter(carried_back=True) if back_out else move.stamps.all()
    chunk = compare_size(move)
    page = PAGE if move.stamps_prove else chunk
    as_recorded = move.cursor_user == AS_RECORDED
    # In a split the target has births of its own, so that the sums never are the same.
    if move.stamps_prove and not move.cursor_session and not queries.split_live(move):
        recorded, mark = ports.at_once(lambda: listed(move), target.mark)
        as_recorded = recorded == Mark(mark).of_sessions
    if as_recorded:
        ours = ours.filter(compared_at=None)
        passed = 0 if last else max(0, move.sessions - ours.count())
    pending: list[Key] = []
    while True:
        rows = list(
            ours.filter(pk__gt=last)
            .order_by("pk")
            .values_list("pk", "user_id", "session_id", way(move).written, "compared_at")[:page]
        )
        there: Mapping[Key, Stamp] = {}
        if rows and not as_recorded:
            with meter.timing("scan", len(rows)):
                there = target.stamps([Key(row[1], row[2]) for row in rows])
        served = []
        for _, user, session, stamp, compared_at in rows:
            key = Key(user, session)
            if back_out and there.get(key) not in (None, stamp):
                # Served at the source since it was carried back: it can't be compared any more.
                served.append(key)
                continue
            if not move.stamps_prove or compared_at is None or there.get(key) != stamp:
                pending.append(key)
        if served:
            with holding(move):
                _resolve(move, served, clock())
        last, passed = rows[-1][0] if rows else last, passed + len(rows)
        finished = len(rows) < page
        stop = finished or timer.out
        while len(pending) >= chunk or (pending and stop):
            compare(move, source, target, pending[:chunk], meter=meter, clock=clock)
            del pending[:chunk]
        if stop:
            at = Key(AS_RECORDED if as_recorded else "", str(last))
            return Swept(at, passed, finished=finished)


def _record(
    move: TenantMigration, stamps: Mapping[Key, Copied], compared: Mapping[Key, datetime]
) -> None:
    sides = way(move)
    SessionStamp.objects.bulk_create(
        [
            SessionStamp(
                move=move,
                user_id=key.user_id,
                session_id=key.session_id,
                compared_at=compared.get(key),
                carried_back=carries_back(move),
                **{sides.read: pair.source, sides.written: pair.target},
            )
            for key, pair in stamps.items()
        ],
        update_conflicts=True,
        unique_fields=["move", "session_id", "user_id"],
        update_fields=["source_stamp", "target_stamp", "compared_at", "carried_back"],
    )


def _forget(move: TenantMigration, keys: Collection[Key]) -> None:
    if keys:
        ids = [
            pk
            for pk, user, session in move.stamps.filter(
                session_id__anyof={key.session_id for key in keys}
            ).values_list("pk", "user_id", "session_id")
            if Key(user, session) in set(keys)
        ]
        move.stamps.filter(pk__in=ids).delete()


def _resolve(move: TenantMigration, keys: Collection[Key], now: datetime) -> None:
    """Close the open mismatches of sessions that are equal, or gone on both sides."""
    wanted = set(keys)
    ids = [
        pk
        for pk, user, session in move.mismatches.filter(resolved_at=None, artifact="")
        .exclude(session_id="")
        .values_list("pk", "user_id", "session_id")
        if Key(user, session) in wanted
    ]
    if ids:
        move.mismatches.filter(pk__in=ids).update(resolved_at=now)


def _report(
    move: TenantMigration,
    differ: Mapping[Key, Difference],
    pair: Digests,
    now: datetime,
    *,
    transient: bool = False,
) -> None:
    for key, difference in differ.items():
        ours, theirs = in_order(move, pair[0].get(key), pair[1].get(key))
        part = "state" if difference.part == "state" else "events"
        digests = (getattr(ours, part, ""), getattr(theirs, part, ""))
        if difference.looks_like == Looks.LATE_WRITE:
            digests = (_whole(ours), _whole(theirs))
        put(move, key.user_id, key.session_id, difference, digests, now, transient=transient)


def put(
    move: TenantMigration,
    user_id: str,
    session_id: str,
    difference: Difference,
    digests: tuple[str, str],
    now: datetime,
    *,
    transient: bool = False,
    artifact: str = "",
) -> None:
    """Record one difference; digests are the move's source's and target's.

    Found again with the same digests it keeps what people have said of it: an accepted
    difference stays accepted, one that changed is a new one.
    """
    at = {"user_id": user_id, "session_id": session_id, "artifact": artifact}
    found = move.mismatches.filter(**at, resolved_at=None).first()
    row = found or Mismatch(move=move, **at)
    # A late write is accepted as what it is at the source; the tenant goes on at the target.
    late = row.looks_like == difference.looks_like == Looks.LATE_WRITE
    known = row.source_digest == digests[0] and (late or row.target_digest == digests[1])
    if not (known and row.accepted_at):
        row.accepted_at, row.accepted_by, row.accepted_reason = None, "", ""
        # A repair that did not help may be asked for again.
        row.repair_requested_at, row.repair_requested_by = None, ""
    row.part, row.first_difference = difference.part, difference.text
    row.looks_like, row.transient = difference.looks_like, transient
    row.source_digest, row.target_digest = digests
    row.found_at, row.found_in = now, move.phase
    row.save()


def not_there(target: SessionStore, keys: Sequence[Key]) -> list[Key]:
    """Return those of `keys` that the written side does not have, in any version."""
    there = target.stamps(keys)
    return [key for key in keys if key not in there]


# Stands for a stamp that no store has: what was carried back has been served there since.
SERVED = "served"


def to_carry_back(
    move: TenantMigration,
    source: SessionStore,
    target: SessionStore,
    keys: Sequence[Key],
    clock: Clock,
) -> list[Key]:
    """Return those of `keys` that are to be carried out of a split: what the source does not have.

    Whatever it has is its own, also what was carried back a moment ago, for its agents serve that
    from then on; nobody but this claim makes one appear there. What a killed try has written and
    not recorded is recorded now.
    """
    missing = not_there(target, keys)
    blank = move.stamps.filter(carried_back=True, **{way(move).written: ""})
    rows = blank.filter(session_id__anyof={key.session_id for key in keys})
    ours = {Key(user, name) for user, name in rows.values_list("user_id", "session_id")}
    landed = [key for key in keys if key in ours and key not in set(missing)]
    if landed:
        here, there = ports.digests_of_both(source, target, landed)
        equal = [key for key in landed if same(here.get(key), there.get(key))]
        stamps = {
            key: Copied(here[key].stamp, there[key].stamp if key in set(equal) else SERVED)
            for key in landed
            if key in here and key in there
        }
        with holding(move):
            _record(move, stamps, dict.fromkeys(equal, clock()))
    return missing


def spare_late_writes(
    move: TenantMigration,
    source: SessionStore,
    target: SessionStore,
    keys: Sequence[Key],
    clock: Clock,
) -> list[Key]:
    """Return those of `keys` that may be carried back; name the others.

    What somebody wrote at the closed source after the cutover is nowhere else: it is replaced
    only where a person has seen it and said so.
    """
    known, there = noted(move, keys), target.stamps(keys)
    late = [
        key
        for key in keys
        # "": this move's own half-written chunk.
        if key in there and (key not in known or known[key].written not in ("", there[key]))
    ]
    if late and (late := _not_accepted(move, target, late)):
        _report_late(move, *in_order(move, source, target), late, "written", clock)
    return [key for key in keys if key not in set(late)]


def _not_accepted(move: TenantMigration, home: SessionStore, late: Sequence[Key]) -> list[Key]:
    """Return those late writes that nobody has accepted as they are now. `home` is the source."""
    rows = queries.late_writes(move).filter(accepted_at__isnull=False, artifact="")
    said = {
        Key(user, session): digest
        for user, session, digest in rows.values_list("user_id", "session_id", "source_digest")
    }
    now = home.digests([key for key in late if key in said])
    return [key for key in late if key not in said or _whole(now.get(key)) != said[key]]


def _whole(digest: Digest | None) -> str:
    """Return one digest of a session's state and events; "" of none."""
    if digest is None:
        return ""
    return hashlib.sha256(f"{digest.state} {digest.events}".encode()).hexdigest()


def count_touched(
    move: TenantMigration, target: SessionStore, *, timer: Timer
) -> tuple[Swept, int, int]:
    """Walk our own list; return how far, how many are still on the target, and how many changed.

    A session that was deleted there counts as changed. cursor_session holds the last id.
    """
    last, passed, alive, touched = int(move.cursor_session or 0), 0, 0, 0
    while True:
        rows = _listed(move, last, "target_stamp")
        there = target.stamps([key for _, key, _ in rows]) if rows else {}
        alive += len(there)
        touched += sum(there.get(key) != stamp for _, key, stamp in rows)
        last, passed = rows[-1][0] if rows else last, passed + len(rows)
        finished = len(rows) < PAGE
        if finished or timer.out:
            return Swept(Key("", str(last)), passed, finished), alive, touched


def record_anew(
    move: TenantMigration, source: SessionStore, target: SessionStore, *, timer: Timer
) -> Swept:
    """After a stopped rollback, record what it wrote at the source and could not note any more.

    Only stamps that it blanked before writing: what somebody else wrote there stays a late
    write. What it deleted there, and is not on the target either, is forgotten.
    """
    last, passed = int(move.cursor_session or 0), 0
    while True:
        rows = _listed(move, last, "source_stamp")
        here = source.stamps([key for _, key, _ in rows]) if rows else {}
        lost = [key for _, key, _ in rows if key not in here]
        there = target.stamps(lost) if lost else {}
        blank = [
            SessionStamp(pk=pk, source_stamp=here[key])
            for pk, key, stamp in rows
            if not stamp and key in here
        ]
        # Noted for its chunk, and never written: born on the target.
        gone = [
            key for _, key, stamp in rows if key not in here and (not stamp or key not in there)
        ]
        with holding(move):
            SessionStamp.objects.bulk_update(blank, ["source_stamp"])
            _forget(move, gone)
        last, passed = rows[-1][0] if rows else last, passed + len(rows)
        if len(rows) < PAGE or timer.out:
            return Swept(Key("", str(last)), passed, finished=len(rows) < PAGE)


def _listed(move: TenantMigration, last: int, column: str) -> list[tuple[int, Key, Stamp]]:
    """Return (id, key, stamp) of a page of our own list, behind the id `last`."""
    rows = move.stamps.filter(pk__gt=last).order_by("pk")
    columns = ("pk", "user_id", "session_id", column)
    return [
        (pk, Key(user, name), stamp) for pk, user, name, stamp in rows.values_list(*columns)[:PAGE]
    ]


def find_late_writes(
    move: TenantMigration,
    source: SessionStore,
    target: SessionStore,
    *,
    timer: Timer,
    clock: Clock,
) -> tuple[Swept, int]:
    """Name the sessions of the move's closed source that are not as the cutover left them.

    A database that was restored or rewritten has new stamps on equal rows: what the target has
    equal is recorded anew, the rest is for a person. Returns how many had another stamp.
    """
    after, passed, found = cursor(move), 0, 0
    while page := source.page(after, PAGE):
        known = noted(move, [key for key, _ in page])
        changed = [key for key, stamp in page if key not in known or known[key].read != stamp]
        for at in range(0, len(changed), CHUNK_MOST):
            _judge_late(move, source, target, changed[at : at + CHUNK_MOST], clock)
        after, passed, found = page[-1][0], passed + len(page), found + len(changed)
        if timer.out:
            return Swept(after, passed, finished=False), found
    return Swept(after, passed, finished=True), found


def shared_came_late(move: TenantMigration, home: SessionStore, clock: Clock) -> bool:
    """Return whether shared state was written at the closed source and nobody has accepted that.

    Looked at before the way back writes any: it does so by value, and what came in late is
    nowhere else. `home` is the source.
    """
    now, kept = Mark(), Mark(move.source_mark)
    for rows in shared_pages(home, PAGE):
        now.shared(rows)
    if now.of_shared == kept.of_shared:
        return False
    report_late_shared(move, now, kept, clock)
    return queries.unsettled(queries.late_shared(move)).exists()


def listed(move: TenantMigration) -> str:
    """Return the sum of our own list of what is written: the `Mark` that the written side has."""
    total = Mark()
    rows = move.stamps.values_list("user_id", "session_id", way(move).written)
    for user, session, stamp in rows.iterator(chunk_size=PAGE):
        total.session(Key(user, session), stamp)
    return total.of_sessions


def report_late_shared(move: TenantMigration, now: Mark, kept: Mark, clock: Clock) -> None:
    """Record that shared state was written at the closed source; whose, no stamp tells."""
    text = "shared state was written at the closed source after the cutover"
    found = Difference("app", text, Looks.LATE_WRITE)
    digests = [hashlib.sha256(mark.of_shared.encode()).hexdigest() for mark in (now, kept)]
    with holding(move):
        put(move, "", "", found, (digests[0], digests[1]), clock())


def _judge_late(
    move: TenantMigration,
    source: SessionStore,
    target: SessionStore,
    keys: Sequence[Key],
    clock: Clock,
) -> None:
    ours, theirs = ports.digests_of_both(source, target, keys)
    equal = {
        key: Copied(ours[key].stamp, theirs[key].stamp)
        for key in keys
        if key in ours and key in theirs and same(ours[key], theirs[key])
    }
    with holding(move):
        _record(move, equal, dict.fromkeys(equal, clock()))
    late = [key for key in keys if key in ours and key not in equal]
    _report_late(move, source, target, late, "written", clock)


def _report_late(
    move: TenantMigration,
    source: SessionStore,
    target: SessionStore,
    keys: Sequence[Key],
    what: str,
    clock: Clock,
) -> None:
    """Record late writes; `source` is the move's own."""
    if not keys:
        return
    found = Difference("events", f"{what} at the closed source after the cutover", Looks.LATE_WRITE)
    ours, theirs = ports.digests_of_both(source, target, keys)
    now = clock()
    with holding(move):
        for key in keys:
            digests = _whole(ours.get(key)), _whole(theirs.get(key))
            put(move, key.user_id, key.session_id, found, digests, now)


def remove_gone(
    move: TenantMigration,
    source: SessionStore,
    target: SessionStore,
    *,
    meter: Meter,
    timer: Timer,
    clock: Clock,
    forget: Callable[[Collection[Key]], bool] = lambda keys: True,
) -> Swept:
    """Delete on the target what was deleted at the source since its copy.

    `forget` is called before that, for what is kept beside sessions; while it isn't through with
    them nothing is deleted.

    A delete leaves no trace at the source, so every noted key is looked up there, page by
    page of our own list (cursor_session holds the last id). Where that list is as long as the
    sweep before counted sessions, nothing is gone: each of those is on it.
    """
    split = queries.split_live(move)
    if carries_back(move):
        # Out of a split only births come back: what the target lacks is the source's own.
        return Swept(Key("", ""), 0, finished=True)
    # On the way back a late birth that was passed by would stand for one that is gone.
    counted = move.phase not in REVERSED and not move.cursor_session
    if counted and move.stamps.count() == move.done:
        return Swept(Key("", ""), 0, finished=True)
    last = int(move.cursor_session or 0)
    passed = 0
    while True:
        rows = list(
            move.stamps.filter(pk__gt=last)
            .order_by("pk")
            .values_list("pk", "user_id", "session_id")[:PAGE]
        )
        keys = [Key(user, session) for _, user, session in rows]
        alive = source.stamps(keys) if keys else {}
        if gone := [key for key in keys if key not in alive]:
            if not split and not forget(gone):
                return Swept(Key("", str(last)), passed, finished=False)
            if move.phase in REVERSED:
                # A late write at the closed source is no copy of ours: it stays, and VERIFY
                # names it. What a killed try has deleted already is forgotten as well.
                recorded = {key: note.written for key, note in noted(move, gone).items()}
                target.delete_unchanged(recorded)
                left = target.stamps(gone)
                gone = [key for key in gone if key not in left]
            elif not split:
                # In a split it was deleted by somebody who got past the agents, and may have been
                # born again on the target: it is only no session of the source any more.
                target.delete(gone)
            meter.deleted += len(gone)
            with holding(move):
                _forget(move, gone)
                _resolve(move, gone, clock())
        passed += len(rows)
        last = rows[-1][0] if rows else last
        if len(rows) < PAGE or timer.out:
            return Swept(Key("", str(last)), passed, finished=len(rows) < PAGE)


def settle_shared(
    move: TenantMigration,
    source: SessionStore,
    target: SessionStore,
    *,
    meter: Meter,
    timer: Timer,
    write: bool,
    clock: Clock,
    seen: Callable[[Sequence[SharedRow]], None] = lambda rows: None,
) -> Swept:
    """Bring user: and app: state over by value (`write`), or compare it and name what differs.

    Shows each page of the source to `seen`, once it is there.

    By value, never by replay: replayed deltas leave the value of whichever session came
    last, and re-copying never converges (article 000). Rows only the target has go away.
    In a split, where agents write the target's as well, it is merged instead.
    """
    split = queries.split_live(move)
    # The cursor is a user; "1" in cursor_session says that the app's row is behind us.
    after = move.cursor_user if move.cursor_session else None
    passed = 0
    while True:
        rows = source.shared_page(after, PAGE)
        with meter.timing("shared", len(rows)):
            there = target.shared([row.user_id for row in rows]) if rows else {}
            if split and write:
                merging.merge(move, source, target, rows, there, clock, until=timer.until)
            elif split:
                differ = merging.unmerged(move, rows, there)
            else:
                differ = [
                    row
                    for row in rows
                    if not ports.same_shared(source, target, row, there.get(row.user_id))
                ]
            if write and not split:
                # {} may stand for a row that is not there: equal to look at, but ADK's next
                # append_event raises without the row. So these are written in any case.
                empty = [row for row in rows if row.state == "{}" and row not in differ]
                ports.write_shared(source, target, [*differ, *empty])
        if not write:
            _compare_shared(move, source, target, differ, there, clock())
        seen(rows)
        passed += len(rows)
        after = (rows[-1].user_id or "") if rows else (after or "")
        if len(rows) < PAGE:
            if not split:
                _remove_foreign_shared(move, source, target, write=write, clock=clock)
            return Swept(Key(after, "1"), passed, finished=True)
        if timer.out:
            return Swept(Key(after, "1"), passed, finished=False)


def _compare_shared(
    move: TenantMigration,
    source: SessionStore,
    target: SessionStore,
    differ: Sequence[SharedRow],
    there: Mapping[str | None, SharedRow],
    now: datetime,
) -> None:
    with holding(move):
        for row in differ:
            other = there.get(row.user_id)
            sides = in_order(move, source, target)
            difference = ports.name_shared(*sides, *in_order(move, row, other))
            digests = [ports.shared_digest(source, target, side) for side in (row, other)]
            report_shared(move, row.user_id, difference, digests[0], digests[1], now)


def report_shared(
    move: TenantMigration,
    user_id: str | None,
    difference: Difference | None,
    ours: str,
    theirs: str,
    now: datetime,
) -> None:
    """Record a difference of shared state. Inside the caller's `holding`."""
    part = "app" if user_id is None else "user"
    found = difference or Difference(part, "the rows differ in spelling only", Looks.OLD_SHARED_WON)
    put(move, user_id or "", "", found, in_order(move, ours, theirs), now)


def _remove_foreign_shared(
    move: TenantMigration,
    source: SessionStore,
    target: SessionStore,
    *,
    write: bool,
    clock: Clock,
) -> None:
    for rows in shared_pages(target, PAGE):
        here = source.shared([row.user_id for row in rows])
        foreign = [row for row in rows if row.user_id not in here]
        if foreign and write:
            target.delete_shared([row.user_id for row in foreign])
        elif foreign:
            now = clock()
            with holding(move):
                for row in foreign:
                    extra = Difference("user", "not on the source", Looks.WRITTEN_ON_TARGET)
                    if move.phase in REVERSED:
                        extra = Difference("user", "not on the target", Looks.LATE_WRITE)
                    report_shared(move, row.user_id, extra, "", row.digest, now)


def repair(
    move: TenantMigration,
    source: SessionStore,
    target: SessionStore,
    *,
    meter: Meter,
    clock: Clock,
) -> int:
    """Do the repairs that people asked for: copy again and compare; return how many were done."""
    asked = list(
        move.mismatches.filter(resolved_at=None, repair_requested_at__isnull=False, artifact="")[
            :CHUNK_FIRST
        ]
    )
    late = [Key(m.user_id, m.session_id) for m in asked if m.session_id and _is_late(move, m)]
    if changed := _not_accepted(move, target, late) if late else []:
        # Written once more since somebody saw it.
        _report_late(move, *in_order(move, source, target), changed, "written", clock)
    sessions = [Key(m.user_id, m.session_id) for m in asked if m.session_id]
    sessions = [key for key in sessions if key not in set(changed)]
    if queries.split_live(move):
        sessions = _repairable_in_split(move, source, target, sessions)
    if sessions:
        _copy_whole(move, source, target, sessions, meter=meter, clock=clock, compare=True)
    for mismatch in (m for m in asked if not m.session_id):
        _repair_shared(move, source, target, mismatch.user_id or None, mismatch, clock)
    with holding(move):
        # Done, whatever came of it; what did not help may be asked for again.
        move.mismatches.filter(pk__in=[m.pk for m in asked]).update(
            repair_requested_at=None, repair_requested_by=""
        )
    return len(asked)


def _repairable_in_split(
    move: TenantMigration, source: SessionStore, target: SessionStore, keys: Sequence[Key]
) -> list[Key]:
    """Return those that a copy replaces without taking anything back that agents have written."""
    if not carries_back(move):
        # Gone at the source it may have been born again on the target.
        alive = source.stamps(keys)
        return [key for key in keys if key in alive]
    known = noted(move, keys)
    target.delete_unchanged({key: known[key].written for key in keys if key in known})
    return not_there(target, keys)


def _is_late(move: TenantMigration, row: Mismatch) -> bool:
    return move.phase in REVERSED and row.looks_like == Looks.LATE_WRITE


def _repair_shared(
    move: TenantMigration,
    source: SessionStore,
    target: SessionStore,
    user_id: str | None,
    mismatch: Mismatch,
    clock: Clock,
) -> None:
    ours = source.shared([user_id]).get(user_id)
    if queries.split_live(move):
        rows = [ours] if ours is not None else []
        there = target.shared([user_id])
        merging.merge(move, source, target, rows, there, clock, until=time.monotonic())
        equal = not merging.unmerged(move, rows, target.shared([user_id]))
    else:
        if ours is None:
            target.delete_shared([user_id])
        else:
            ports.write_shared(source, target, [ours])
        equal = ports.same_shared(source, target, ours, target.shared([user_id]).get(user_id))
    with holding(move):
        move.mismatches.filter(pk=mismatch.pk).update(
            resolved_at=clock() if equal else None,
            repair_requested_at=None,
            repair_requested_by="",
        )


def sample(move: TenantMigration, changes: Mapping[str, Any], clock: Clock) -> None:
    """Keep how far the move is, for its chart. A few rows a minute are enough to draw it."""
    now = clock()
    latest = move.samples.order_by("-id").values_list("at", flat=True).first()
    if latest is not None and (now - latest).total_seconds() < STEP_SECONDS:
        return
    merged = {
        name: changes.get(name, getattr(move, name))
        for name in ("done", "todo", "copied", "changed")
    }
    with holding(move):
        Sample.objects.create(move=move, at=now, phase=move.phase, passes=move.passes, **merged)


def delete_copied(move: TenantMigration, target: SessionStore, *, timer: Timer) -> bool:
    """Remove from the target what this move wrote there; return whether nothing is left."""
    while True:
        rows = list(
            move.stamps.order_by("pk").values_list("pk", "user_id", "session_id")[
                : _size(move, CHUNK_MOST)
            ]
        )
        if not rows:
            shared = target.shared_page(None, PAGE)
            if shared:
                target.delete_shared([row.user_id for row in shared])
            if len(shared) < PAGE:
                return True
        else:
            target.delete([Key(user, session) for _, user, session in rows])
            with holding(move):
                move.stamps.filter(pk__in=[pk for pk, _, _ in rows]).delete()
        if timer.out:
            return False


def offboard(move: TenantMigration, source: SessionStore, *, meter: Meter, timer: Timer) -> Swept:
    """Delete the source's sessions that are still what was recorded.

    Others stay, and stay on our list of stamps: that list is then what was left.
    """
    last, passed = int(move.cursor_session or 0), 0
    while True:
        rows = list(
            move.stamps.filter(pk__gt=last)
            .order_by("pk")
            .values_list("pk", "user_id", "session_id", "source_stamp")[: _size(move, CHUNK_MOST)]
        )
        if not rows:
            return Swept(Key("", str(last)), passed, finished=True)
        recorded = {Key(user, session): stamp for _, user, session, stamp in rows}
        gone = set(source.delete_unchanged(recorded))
        # Deleted by an earlier try that was killed before it could say so.
        gone |= set(recorded) - set(source.stamps(list(recorded)))
        meter.deleted += len(gone)
        with holding(move):
            move.stamps.filter(
                pk__in=[pk for pk, user, session, _ in rows if Key(user, session) in gone]
            ).delete()
        last, passed = rows[-1][0], passed + len(rows)
        if timer.out:
            return Swept(Key("", str(last)), passed, finished=False)
