"""Memory goes along: what the tenant has in sessions is given to the other side's memory service.

SessionStamp.memory_stamp says which version of a session that service has. A session that was
added twice is there once, so that a step may run again after any crash. No service has a guard
row: the claim is looked at right before each handful is added, and a worker that stalls inside
that one call is the only one that can be late.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from django.db.models import F, Q, QuerySet

from durable.driver import Clock, holding
from migrations_app import copying
from migrations_app.copying import Meter, Swept, Timer
from migrations_app.domain.phases import REVERSED
from migrations_app.models import SessionStamp, TenantMigration
from migrations_app.ports.base import START, AddressMissing, Key, SessionStore
from migrations_app.ports.memory import (
    Forgotten,
    Memory,
    MemoryFailed,
    Recalled,
    open_memory,
    recall,
    where,
)
from tenants.domain.words import counted
from tenants.models import Store

# Sessions that are given to the service at once; as many are held in our memory.
AT_ONCE = 8
# Rows of our own list read at once.
PAGE = 500
# How many sessions are looked for by a search before the cutover.
SAMPLED = 5
# In SessionStamp.memory_stamp, before the number of events that are removed already: no stamp.
FORGOTTEN = "forgotten "
# A service's answer is measured on a few sessions already: it is slow, not noisy.
LEAST_MEASURED = 5


def goes_over(move: TenantMigration) -> bool:
    """Return whether the written side has a memory service of its own, which is to be filled."""
    sides = copying.way(move)
    if not sides.to_store.memory_from:
        return False
    if sides.from_store.memory_from == sides.to_store.memory_from:
        return False
    try:
        return where(sides.from_store.memory_from) != where(sides.to_store.memory_from)
    except AddressMissing:
        # Nothing to compare with, or nothing to write to: opening it will say so.
        return True


def sweep(
    move: TenantMigration, source: SessionStore, *, meter: Meter, timer: Timer, clock: Clock
) -> Swept:
    """Give the written side's memory every session of our list that it doesn't have as it is.

    Walks our own list (cursor_session holds the last id), so it comes behind the copying: in
    BACKFILL that is every session once, inside the fence what was copied again, on the way back
    what was touched. `source` is where data is read. A session that the service doesn't take
    stays due, and `verify` names it. Nothing is done where no memory goes over. Raises
    MemoryFailed where the service takes none of a handful, MemoryUnknown.
    """
    if not goes_over(move):
        return Swept(Key("", ""), 0, finished=True)
    return _sweep(move, source, int(move.cursor_session or 0), meter, timer, clock)


def _sweep(
    move: TenantMigration, source: SessionStore, last: int, meter: Meter, timer: Timer, clock: Clock
) -> Swept:
    passed = 0
    rows = _page(move, last)
    if not rows:
        # Nothing is due: google-adk need not be imported to say so.
        return Swept(Key("", str(last)), 0, finished=True)
    with _opened(move) as memory:
        while rows:
            for at in range(0, len(rows), AT_ONCE):
                few = rows[at : at + AT_ONCE]
                _give(move, source, memory, few, meter, clock)
                last, passed = few[-1].pk, passed + len(few)
                if timer.out:
                    return Swept(Key("", str(last)), passed, finished=False)
            rows = _page(move, last)
    return Swept(Key("", str(last)), passed, finished=True)


def _page(move: TenantMigration, last: int) -> list[SessionStamp]:
    return list(_due(move).filter(pk__gt=last).order_by("pk")[:PAGE])


def _due(move: TenantMigration) -> QuerySet[SessionStamp]:
    """Return the sessions that the written side's memory doesn't have as they are.

    Only those whose copy is known to be whole: what was left out of the store is left out here.
    """
    sides = copying.way(move)
    rows = move.stamps.exclude(**{sides.written: ""}).exclude(**{sides.read: ""})
    if copying.carries_back(move):
        # The rest is served at the source, where it may be newer than here.
        rows = rows.filter(carried_back=True)
    current = Q(memory_stamp=F(sides.read))
    if move.phase in REVERSED:
        # Untouched since it went over: the source's memory has it, as that stamp says.
        current |= Q(memory_stamp=F(sides.written))
    return rows.exclude(current)


@contextmanager
def _opened(move: TenantMigration, store: Store | None = None) -> Iterator[Memory]:
    """Open the memory service of one side; of the written one, if none is given."""
    reference = (store or copying.way(move).to_store).memory_from
    with open_memory(reference, app_name=move.tenant.app_name) as memory:
        yield memory


def _give(
    move: TenantMigration,
    source: SessionStore,
    memory: Memory,
    rows: Sequence[SessionStamp],
    meter: Meter,
    clock: Clock,
) -> None:
    keys = {Key(row.user_id, row.session_id): row for row in rows}
    with meter.timing("memory", len(rows)):
        read = list(recall(source, move.tenant.app_name, list(keys)))
        recalled = [one for one in read if isinstance(one, Recalled)]
        # google-adk can't read them, so no agent can: nothing of them is ever in a memory.
        unreadable = [keys[one] for one in read if not isinstance(one, Recalled)]
        with holding(move):
            # Read before this look: an overtaken worker adds nothing.
            pass
        refused = memory.add(recalled)
    if len(refused) == len(recalled) > 1:
        raise MemoryFailed(
            f"The memory service of {copying.way(move).to_store} takes no session"
            f" ({', '.join(sorted(set(refused.values())))})."
        )
    given = [keys[one.key] for one in recalled if one.key not in refused]
    new = sum(not row.memory_stamp for row in given)
    for row in [*given, *unreadable]:
        # The stamp of the row as it was before the session was read: never newer than that.
        row.memory_stamp = getattr(row, copying.way(move).read)
    with holding(move) as locked:
        SessionStamp.objects.bulk_update([*given, *unreadable], ["memory_stamp"])
        locked.remembered = move.remembered = locked.remembered + new
        locked.memory_rate = move.memory_rate = meter.rate(
            "memory", move.memory_rate, least=LEAST_MEASURED
        )
        locked.save(update_fields=["remembered", "memory_rate"])
        if unreadable:
            one = unreadable[0]
            what = counted(len(unreadable), "session", "sessions")
            note = f"google-adk can't read {what}, such as {one.session_id} of {one.user_id}"
            _say(locked, f"{note}: memory has nothing of them", clock)


def forget(
    move: TenantMigration, target: SessionStore, keys: Collection[Key], *, clock: Clock
) -> bool:
    """Remove sessions that were deleted where data is read from the written side's memory.

    Before their copies are deleted at `target`, by whose events memory is asked. Return whether
    all are through; if not, ask again with the same keys. Whatever a service doesn't remove is
    named in the move's log.
    """
    wanted = set(keys)
    named = move.stamps.filter(session_id__anyof={key.session_id for key in wanted})
    rows = [
        row
        for row in named.exclude(memory_stamp="").order_by("pk").iterator()
        if Key(row.user_id, row.session_id) in wanted
    ]
    if not rows or not goes_over(move):
        return True
    with _opened(move) as memory:
        return _forget(
            move, target, memory, rows, timer=Timer(), clock=clock, noun="deleted session"
        )


def _forget(
    move: TenantMigration,
    target: SessionStore,
    memory: Memory,
    rows: Sequence[SessionStamp],
    *,
    timer: Timer,
    clock: Clock,
    noun: str,
) -> bool:
    """Remove these from the written side's memory, one by one; return whether all are through."""
    left = 0
    try:
        for at, row in enumerate(rows):
            with holding(move):
                # Looked at before each: an overtaken worker removes nothing more.
                pass
            behind = _behind(row)
            came = _forgotten(move, target, memory, row, timer=timer, behind=behind)
            stamp = f"{FORGOTTEN}{came.behind}" if came.behind else ""
            left += not (came.gone or came.behind)
            with holding(move) as locked:
                move.stamps.filter(pk=row.pk).update(memory_stamp=stamp)
                if not stamp:
                    locked.remembered = move.remembered = max(locked.remembered - 1, 0)
                    locked.save(update_fields=["remembered"])
            if timer.out:
                return not stamp and at + 1 == len(rows)
    finally:
        if left:
            with holding(move) as locked:
                _stays(locked, counted(left, noun), copying.way(move).to_store, clock)
    return True


def _behind(row: SessionStamp) -> int:
    """Return how many events of a session are removed already, by a step whose time was up."""
    kept = row.memory_stamp
    return int(kept.removeprefix(FORGOTTEN)) if kept.startswith(FORGOTTEN) else 0


def _forgotten(
    move: TenantMigration,
    store: SessionStore,
    memory: Memory,
    row: SessionStamp,
    *,
    timer: Timer,
    behind: int,
) -> Forgotten:
    """Remove one session, by its events at `store`."""
    key = Key(row.user_id, row.session_id)
    for one in recall(store, move.tenant.app_name, [key], shared=False):
        if not isinstance(one, Recalled):
            # google-adk can't read it, so nobody knows by which ids memory has it.
            return Forgotten(gone=False)
        return memory.forget(one, until=timer.until, behind=behind)
    return Forgotten(gone=True)


# --- at the end -----------------------------------------------------------------------------------


def clear(move: TenantMigration, target: SessionStore, *, timer: Timer, clock: Clock) -> bool:
    """Remove from the target's memory what this move gave it; return whether all is through.

    By the events of the copies at `target`, so before those are deleted.
    """
    rows = move.stamps.exclude(memory_stamp="")
    if not goes_over(move) or not rows.exists():
        return True
    with _cleaning(move, move.target_store, move.source_store) as memory:
        if memory is None:
            count = rows.count()
            with holding(move) as locked:
                rows.update(memory_stamp="")
                _stays(locked, counted(count, "session"), move.target_store, clock)
            return True
        while page := list(rows.order_by("pk")[:PAGE]):
            if not _forget(move, target, memory, page, timer=timer, clock=clock, noun="session"):
                return False
    return True


def offboard(move: TenantMigration, source: SessionStore, *, timer: Timer, clock: Clock) -> Swept:
    """Remove from the source's memory the sessions that OFFBOARD is about to delete there.

    By their events at `source`; only those that are still what was recorded. Walks our own list:
    the cursor holds the last id, and of the next one how many events are gone; before that, how
    many sessions memory has kept.
    """
    last, _, behind = (move.cursor_session or "0").partition(" ")
    at, gone, left = int(last), int(behind or 0), int(move.cursor_user or 0)
    rows = move.stamps.exclude(source_stamp="").order_by("pk")
    if not move.source_store.memory_from or not goes_over(move) or not rows.exists():
        return Swept(START, 0, finished=True)
    with _cleaning(move, move.source_store, move.target_store) as memory:
        while page := list(rows.filter(pk__gt=at)[:PAGE]):
            if memory is None:
                left += rows.filter(pk__gt=at).count()
                break
            now = source.stamps([Key(row.user_id, row.session_id) for row in page])
            for row in page:
                if now.get(Key(row.user_id, row.session_id)) == row.source_stamp:
                    with holding(move):
                        # As everywhere: an overtaken worker removes nothing more.
                        pass
                    came = _forgotten(move, source, memory, row, timer=timer, behind=gone)
                    if came.behind:
                        return Swept(Key(str(left), f"{at} {came.behind}"), 0, finished=False)
                    left += not came.gone
                at, gone = row.pk, 0
                if timer.out:
                    return Swept(Key(str(left), str(at)), 0, finished=False)
    if left:
        with holding(move) as locked:
            _stays(locked, counted(left, "session"), move.source_store, clock)
    return Swept(START, 0, finished=True)


@contextmanager
def _cleaning(move: TenantMigration, store: Store, other: Store) -> Iterator[Memory | None]:
    """Open a side's memory to remove sessions there; None: that can't be done, or not safely.

    As for every port: where two sides may be one place nothing is removed. Told anew in each step,
    for an address may lead elsewhere by now.
    """
    if not other.memory_from:
        yield None
        return
    with _opened(move, store) as memory, _opened(move, other) as kept:
        yield memory if memory.cleans_beside(kept) else None


def _stays(locked: TenantMigration, what: str, store: Store, clock: Clock) -> None:
    _say(locked, f"Left in the memory of {store}, which removes none by event: {what}", clock)


def _say(locked: TenantMigration, note: str, clock: Clock) -> None:
    locked.events.create(at=clock(), who="mover", was=locked.phase, now=locked.phase, note=note)


def verify(
    move: TenantMigration, source: SessionStore, *, meter: Meter, timer: Timer, clock: Clock
) -> str:
    """Give memory what it still lacks, look whether it has all, and search for a sample.

    Returns what it is waited for, in words; "" where all is well. A service that answers no search
    with anything at all is not the tenant's: that blocks. One that answers in its own words is
    believed.
    """
    if not goes_over(move):
        return ""
    _sweep(move, source, 0, meter, timer, clock)
    store = copying.way(move).to_store
    if missing := _due(move).count():
        row = _due(move).order_by("pk")[0]
        what = counted(missing, "session", "sessions")
        return f"the memory of {store} to take {what}, such as {row.session_id} of {row.user_id}"
    sampled, found = _sampled(move, source, timer)
    if sampled and not found:
        some = counted(sampled, "session")
        return f"the memory of {store} to find any of {some} that it was given"
    return ""


def _sampled(move: TenantMigration, source: SessionStore, timer: Timer) -> tuple[int, int]:
    """Search for a few sessions; return how many could be searched for, and were answered.

    The first ones: a service that takes its time over a session has had it.
    """
    rows = move.stamps.exclude(memory_stamp="").order_by("pk")[:SAMPLED]
    keys = [Key(row.user_id, row.session_id) for row in rows]
    if not keys:
        return 0, 0
    told: list[bool | None] = []
    with _opened(move) as memory:
        for one in recall(source, move.tenant.app_name, keys):
            if isinstance(one, Recalled):
                told.append(memory.has(one))
            if timer.out:
                break
    # What was answered in other words can't be told, nor what has no words.
    return sum(has is not None for has in told), sum(has is True for has in told)
