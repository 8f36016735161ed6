"""Rehearsals: a sample is copied for practice, and what it measured is what the next quote says.

A sample of the tenant's sessions is written under a scratch name at the real target, on the path
that a move between the two stores takes, compared as a move compares, and removed. Nothing is
written at the source. A whole move is rehearsed as a move (`services.rehearse_move`); its
figures are kept here too.
"""

from __future__ import annotations

import random
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db import transaction

from durable.errors import Refused
from durable.machine import Overtaken
from migrations_app import ports
from migrations_app.domain.phases import ENDED, Mode
from migrations_app.domain.stopwatch import Stopwatch
from migrations_app.domain.values import SCRATCH, Layout
from migrations_app.models import Rehearsal, Scratch, TenantMigration
from migrations_app.ports.base import (
    START,
    Digest,
    Key,
    SessionStore,
    StoreBusy,
    StoreRefused,
    Unfinished,
    same,
)
from migrations_app.preflight import Preflight, between_stores
from tenants import queries as tenants_queries
from tenants import services as tenants
from tenants.domain.words import clock, counted, duration
from tenants.models import Placement, Store, Tenant

SAMPLE_SESSIONS = 500
# About 10 s in all, with a mark of the source and the removal: somebody waits for the answer.
SCAN_SECONDS, COPY_SECONDS, SHARED_SECONDS = 4.0, 4.0, 1.0
# Keys read at once, as in a move's own sweeps.
PAGE = 2_000
# A chunk is a transaction on the target; later ones are as large as takes so long, as in BACKFILL.
CHUNK_FIRST, CHUNK_MOST, CHUNK_SECONDS = 50, 500, 0.4
# Where sessions are long, or replayed one by one, the first chunk must not take all the time.
FIRST_EVENTS, FIRST_REPLAYED = 5_000, 8
USERS_A_SLICE = 50
REMOVED_AT_ONCE = 100
# A scratch name of a rehearsal that was killed is removed when it is as old as this: no rehearsal
# takes longer.
LEFTOVER = timedelta(hours=1)
NAMED = 3

_NAME = re.compile(rf"{re.escape(SCRATCH)}\.(\d{{8}}T\d{{6}})Z\.[0-9a-f]{{8}}")


class CanNotRehearse(Refused):
    """Something stands against copying a sample, as it would against a move."""


def rehearse_copy(
    tenant: Tenant, *, target_store: Store, by: str, reason: str, now: datetime
) -> Rehearsal:
    """Copy a sample of `tenant` to `target_store` under a scratch name, time it, remove it again.

    Up to 500 sessions, spread over all of them; fewer where about 10 s are not enough, which
    `detail` says. Writes nothing at the source; at the target tables and guard are made where
    they lack, as a move makes them. Raises CanNotRehearse (then nothing was written),
    MachinesStopped, and what a store answers.
    """
    tenants.check_running()
    tenants.check_reason(reason)
    home = Placement.objects.select_related("store").get(tenant=tenant).store
    found = _checked(tenant, home, target_store)
    _remove_older(target_store, now=now)
    with _scratch(target_store, by=by, now=now) as scratch:
        measured = _measure(tenant, home, target_store, found, scratch)
    return _keep(tenant, home, target_store, measured, by=by, reason=reason, now=now)


def _checked(tenant: Tenant, home: Store, target: Store) -> Preflight:
    """Look at both stores as a move would. Raises CanNotRehearse."""
    if home == target:
        raise CanNotRehearse(f"{tenant} lives on {target} already. Choose another store.")
    if live := tenant.moves.exclude(phase__in=ENDED).first():
        raise CanNotRehearse(
            f"{tenant} is moving: {live} is in {live.phase.upper()}, and measures by itself."
        )
    found = between_stores(tenant, source_store=home, target_store=target)
    refusals = found.refusals
    if found.source is not None and not found.source.sessions:
        refusals = [*refusals, f"{tenant} has no session on {home}: there is nothing to measure."]
    if refusals:
        raise CanNotRehearse(" ".join(refusals) + " Nothing was written.")
    return found


@dataclass(kw_only=True)
class _Measured(Stopwatch):
    """What a sample said, while it is copied and afterwards."""

    wanted: int
    equal: int = 0
    events: int = 0
    # Written or deleted at the source after their copy: no difference, and no proof either.
    moved_on: int = 0
    differ: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    # What else a person should know.
    notes: list[str] = field(default_factory=list)
    scan_seconds: float | None = None
    mark_seconds: float | None = None

    def rate(self, what: str) -> float | None:
        """Return things per second; None where none were done."""
        count, spent = self.count.get(what, 0), self.spent.get(what, 0.0)
        return count / spent if count and spent > 0 else None

    @property
    def copied(self) -> int:
        return self.count.get("copy", 0)

    @property
    def detail(self) -> str:
        said = list(self.notes)
        if self.copied < self.wanted:
            said.insert(0, f"{self.copied:,} of {self.wanted:,} sessions in the time there was")
        if self.moved_on:
            said.append(f"{counted(self.moved_on, 'session')} changed meanwhile, not compared")
        for what, rows in (("differ", self.differ), ("can't be held there", self.refused)):
            if rows:
                more = f" and {len(rows) - NAMED:,} more" if len(rows) > NAMED else ""
                said.append(f"{what}: {'; '.join(rows[:NAMED])}{more}")
        return ". ".join(said)


def _measure(
    tenant: Tenant, home: Store, there: Store, found: Preflight, scratch: Scratch
) -> _Measured:
    with ports.open_store(home.kind, home.address_from, app_name=tenant.app_name) as source:
        keys, measured = _sample(source, found)
        with _opened(there, scratch.app_name, move=scratch.move, claim=1) as target:
            target.provision()
            # First this row, then anything else: where it is not, there is nothing to remove.
            target.adopt(None, mover=True, agents=False)
            try:
                _copy(source, target, keys, _first(source, target, found), measured)
                _shared(source, target, keys[: measured.copied], measured)
                measured.events = target.survey().events
            except Exception:
                # What a kill leaves is found by its name; an error's is removed now.
                _clear(target)
                raise
            _clear(target)
            if target.layout is Layout.SERVICE:
                # Beneath the others is a database whose rows we know.
                measured.notes.append(
                    f"{there} keeps emptied state under {scratch.app_name}: no call deletes it"
                )
    return measured


def _sample(source: SessionStore, found: Preflight) -> tuple[list[Key], _Measured]:
    """Read every stamp of the source, and the mark; return keys out of all of them, mixed."""
    assert found.source is not None
    total, until = found.source.sessions, time.monotonic() + SCAN_SECONDS
    every = max(1.0, total / SAMPLE_SESSIONS)
    keys: list[Key] = []
    passed, after, whole = 0, START, False
    begun = time.perf_counter()
    while not whole and time.monotonic() < until:
        page = source.page(after, PAGE)
        for at, (key, _) in enumerate(page, passed):
            if at >= len(keys) * every and len(keys) < SAMPLE_SESSIONS:
                keys.append(key)
        whole, passed = len(page) < PAGE, passed + len(page)
        after = page[-1][0] if page else after
    seconds = time.perf_counter() - begun
    # If the time is up before all are copied, those that were are of everywhere too.
    random.Random(total).shuffle(keys)
    measured = _Measured(wanted=len(keys), scan_seconds=seconds)
    if whole:
        begun = time.perf_counter()
        try:
            source.mark()
            measured.mark_seconds = time.perf_counter() - begun
        except StoreRefused as refused:
            measured.notes.append(f"the source's mark was not taken: {refused}")
    else:
        measured.scan_seconds = seconds * max(1.0, total / max(1, passed))
        measured.notes.append(
            f"chosen from the first {passed:,} of {total:,} sessions, and reading all stamps"
            " reckoned from theirs"
        )
    return keys, measured


def _first(source: SessionStore, target: SessionStore, found: Preflight) -> int:
    """Return how many sessions the first chunk has, which says how large the others may be."""
    assert found.source is not None
    if ports.by_service(source, target):
        return FIRST_REPLAYED
    each = found.source.events / max(1, found.source.sessions)
    return max(1, min(CHUNK_FIRST, int(FIRST_EVENTS / max(1.0, each))))


def _copy(
    source: SessionStore, target: SessionStore, keys: Sequence[Key], size: int, kept: _Measured
) -> None:
    """Copy and compare chunk by chunk, as BACKFILL does, until all are or the time is up."""
    until, done = time.monotonic() + COPY_SECONDS, 0
    while done < len(keys) and time.monotonic() < until:
        # Whoever halted the machines did so since nothing may write to a store any more.
        tenants.check_running()
        chunk = keys[done : done + size]
        try:
            with kept.timing("copy", len(chunk)):
                batch = ports.copy(source, target, chunk)
        except StoreBusy as busy:
            if not done:
                raise
            kept.notes.append(f"stopped early: {busy}")
            return
        if batch.unfinished and not (done or batch.copied):
            raise Unfinished("Replaying the first sessions takes longer than one call may.")
        kept.count["copy"] -= len(batch.unfinished)
        done += len(chunk)
        copied = list(batch.copied)
        with kept.timing("compare", len(copied)):
            ours, theirs = ports.digests_of_both(source, target, copied)
        for key, stamps in batch.copied.items():
            mine, other = ours.get(key), theirs.get(key)
            if mine is not None and same(mine, other):
                kept.equal += 1
            elif mine is None or mine.stamp != stamps.source:
                kept.moved_on += 1
            else:
                kept.differ.append(f"{_named(key)} in its {_part(mine, other)}")
        kept.moved_on += len(chunk) - len(copied) - len(batch.refused) - len(batch.unfinished)
        kept.refused += [
            f"{_named(key)} {refusal.field}: {refusal.reason}"
            for key, refusal in batch.refused.items()
        ]
        if batch.unfinished:
            kept.notes.append("stopped early: replay takes longer than one call may")
            return
        wanted = kept.rate("copy") or 1.0
        size = max(1, min(CHUNK_MOST, int(wanted * CHUNK_SECONDS)))


def _part(mine: Digest, other: Digest | None) -> str:
    return "state" if other is not None and mine.events == other.events else "events"


def _named(key: Key) -> str:
    name = f"{key.session_id[:40]} of {key.user_id[:40]}"
    return name if name.isprintable() else ascii(name)[1:-1]


def _shared(
    source: SessionStore, target: SessionStore, keys: Sequence[Key], kept: _Measured
) -> None:
    """Write what the sample's users share, and the app's, by value; compare it."""
    until = time.monotonic() + SHARED_SECONDS
    users: list[str | None] = [None, *dict.fromkeys(key.user_id for key in keys)]
    for at in range(0, len(users), USERS_A_SLICE):
        if at and time.monotonic() > until:
            return
        rows = list(source.shared(users[at : at + USERS_A_SLICE]).values())
        with kept.timing("shared", len(rows)):
            ports.write_shared(source, target, rows)
            there = target.shared([row.user_id for row in rows]) if rows else {}
            differ = [
                row
                for row in rows
                if not ports.same_shared(source, target, row, there.get(row.user_id))
            ]
        kept.differ += [
            "the app's state" if row.user_id is None else f"what {_named(Key(row.user_id, ''))} has"
            for row in differ
        ]


def _keep(
    tenant: Tenant,
    home: Store,
    target: Store,
    measured: _Measured,
    *,
    by: str,
    reason: str,
    now: datetime,
) -> Rehearsal:
    rates = {
        "copy_rate": measured.rate("copy"),
        "verify_rate": measured.rate("compare"),
        "shared_rate": measured.rate("shared"),
        "scan_seconds": measured.scan_seconds,
        "mark_seconds": measured.mark_seconds,
    }
    with transaction.atomic():
        row = Rehearsal.objects.create(
            tenant=tenant,
            source_store=home,
            target_store=target,
            at=now,
            by=by,
            sessions=measured.copied,
            events=measured.events,
            equal=not (measured.differ or measured.refused),
            detail=measured.detail,
            **rates,
        )
        after: dict[str, Any] = {
            "from": str(home),
            "to": str(target),
            "sessions": row.sessions,
            "equal": row.equal,
            **rates,
        }
        tenants.audit(
            who=by,
            verb="tenant.rehearse_copy",
            subject=f"tenant {tenant}",
            reason=reason,
            after=after,
            now=now,
        )
    return row


# --- the scratch name ----------------------------------------------------------------------------


@contextmanager
def _scratch(store: Store, *, by: str, now: datetime) -> Iterator[Scratch]:
    """Note a name before anything is written under it; forget it once nothing is left."""
    name = f"{SCRATCH}.{now.astimezone(UTC):%Y%m%dT%H%M%S}Z.{secrets.token_hex(4)}"
    scratch = Scratch.objects.create(store=store, app_name=name, at=now, by=by)
    try:
        yield scratch
    except Overtaken as late:
        _try_remove(scratch)
        raise CanNotRehearse(
            "It stood still for so long that it was removed as a leftover. Begin again."
        ) from late
    except Exception:
        _try_remove(scratch)
        raise
    scratch.delete()


def _try_remove(scratch: Scratch) -> None:
    """Remove what an error left, if the store lets us; else the next look at it does."""
    try:
        _remove(scratch.store, scratch.app_name)
    except StoreRefused:
        return
    scratch.delete()


@contextmanager
def _opened(store: Store, app_name: str, *, move: int, claim: int) -> Iterator[SessionStore]:
    with ports.open_store(
        store.kind, store.address_from, app_name=app_name, move=move, claim=claim
    ) as port:
        yield port


def sweep(*, now: datetime) -> int:
    """Remove what rehearsals left that were killed an hour ago or more; return how many.

    Nothing while all machines are halted.
    """
    if tenants_queries.halted():
        return 0
    return sum(map(_swept, Scratch.objects.filter(at__lte=now - LEFTOVER).select_related("store")))


def _swept(scratch: Scratch) -> bool:
    try:
        _remove(scratch.store, scratch.app_name)
    except StoreRefused:
        # Its store does not answer: the next look may find it.
        return False
    scratch.delete()
    return True


def _remove_older(store: Store, *, now: datetime) -> None:
    """Remove what older rehearsals left at a store, those too that our rows know nothing of."""
    names = set(store.scratches.filter(at__lte=now - LEFTOVER).values_list("app_name", flat=True))
    with ports.open_store(store.kind, store.address_from, app_name=SCRATCH) as port:
        names |= {name for name in port.guards(names) if _old(name, now)}
    for name in sorted(names):
        _remove(store, name)
        store.scratches.filter(app_name=name).delete()


def _old(name: str, now: datetime) -> bool:
    """Whether this is the name of a rehearsal that ended, one way or another, an hour ago."""
    if not (match := _NAME.fullmatch(name)):
        return False
    at = datetime.strptime(match[1], "%Y%m%dT%H%M%S").replace(tzinfo=UTC)
    return at <= now - LEFTOVER


def _remove(store: Store, app_name: str) -> None:
    """Remove all that is kept under a scratch name, after whoever may still write it is shut out.

    Its guard row was written before anything else and goes last: where it is not, nothing is.
    """
    with ports.open_store(store.kind, store.address_from, app_name=app_name) as port:
        guard = port.guard()
    if guard is None:
        return
    with _opened(store, app_name, move=guard.move, claim=guard.claim + 1) as port:
        port.take(mover=True, agents=False)
        _clear(port)


def _clear(port: SessionStore) -> None:
    """Delete every session and every state under this name, then its guard row."""
    while page := port.page(START, REMOVED_AT_ONCE):
        keys = [key for key, _ in page]
        port.delete(keys)
        # With their sessions a service's users are out of sight.
        port.delete_shared({key.user_id for key in keys})
    while shared := port.shared_page(None, PAGE):
        port.delete_shared([row.user_id for row in shared])
    port.disown()


# --- what is known before a move begins ----------------------------------------------------------


@dataclass(frozen=True)
class Known:
    """What the latest practice, or move, of a tenant between two stores measured."""

    # Such as "rehearsed on 30 Nov 07:17 by ada, 500 sessions in 0.6s".
    words: str
    at: datetime
    copy_rate: float | None
    verify_rate: float | None
    shared_rate: float | None
    scan_seconds: float | None
    mark_seconds: float | None

    @property
    def columns(self) -> dict[str, float | None]:
        """Return the columns of a move that begins with what is known."""
        names = ("copy_rate", "verify_rate", "shared_rate", "scan_seconds", "mark_seconds")
        return {name: getattr(self, name) for name in names}


def known(tenant: Tenant, source: Store, target: Store, *, now: datetime) -> Known | None:
    """Return the newest figures of this tenant between these two stores, this way; None: none."""
    pair = {"source_store": source, "target_store": target, "copy_rate__isnull": False}
    rehearsed = tenant.rehearsals.filter(**pair).select_related("move").order_by("-id").first()
    moved = tenant.moves.filter(**pair).order_by("-id").first()
    moved_at = (moved.ended_at or moved.started_at) if moved is not None else None
    if rehearsed is not None and (moved_at is None or rehearsed.at >= moved_at):
        return _known(rehearsed, _words(rehearsed, now), rehearsed.at)
    if moved is not None and moved_at is not None:
        return _known(moved, f"measured by {moved} between these stores", moved_at)
    return None


def _known(row: Rehearsal | TenantMigration, words: str, at: datetime) -> Known:
    return Known(
        words=words,
        at=at,
        copy_rate=row.copy_rate,
        verify_rate=row.verify_rate,
        shared_rate=row.shared_rate,
        scan_seconds=row.scan_seconds,
        mark_seconds=row.mark_seconds,
    )


def _words(row: Rehearsal, now: datetime) -> str:
    when = clock(row.at, now)
    on = f"at {when}" if ":" in when and " " not in when else f"on {when}"
    if row.move is not None:
        return f"rehearsed {on} by {row.by}, there and back as {row.move}"
    took = duration(row.sessions / row.copy_rate) if row.copy_rate else ""
    return f"rehearsed {on} by {row.by}, {counted(row.sessions, 'session')} in {took}"


# --- whole moves ---------------------------------------------------------------------------------


def keep_figures(move: TenantMigration) -> None:
    """Keep what a move that was rehearsed there and back has measured, once.

    Inside the caller's `holding`, once its way back has flipped.
    """
    if not move.rehearsal or move.placement_version is None:
        # Of a split that was aborted before its end nothing was practised.
        return
    there = [fence for fence in move.past_fences if not fence["back"]][-1]
    assert move.fence_closed_at is not None
    assert move.fence_opened_at is not None
    Rehearsal.objects.get_or_create(
        move=move,
        defaults={
            "tenant": move.tenant,
            "source_store": move.source_store,
            "target_store": move.target_store,
            "at": move.fence_opened_at,
            "by": move.started_by,
            "sessions": move.sessions,
            "equal": True,
            "detail": f"The whole move, there and back, by {_how(move)}",
            "fence_seconds": _seconds(there["fence_closed_at"], there["fence_opened_at"]),
            "back_seconds": (move.fence_opened_at - move.fence_closed_at).total_seconds(),
            **_known(move, "", move.fence_opened_at).columns,
        },
    )


def _how(move: TenantMigration) -> str:
    return "split" if move.mode == Mode.SPLIT else "fence"


def _seconds(closed: str, opened: str) -> float:
    return (datetime.fromisoformat(opened) - datetime.fromisoformat(closed)).total_seconds()
