"""What runtimes say: they join, poll, report and leave; some lapse or are declared dead."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import Q, Subquery

from durable.errors import Refused
from tenants import queries
from tenants.domain.fence import (
    DEAD_ASK_LASTS,
    FAST_MS,
    GoneWhy,
    ask_ends,
    cadence_ms,
    has_lapsed,
    silence,
)
from tenants.domain.minutes import counted_minute
from tenants.domain.reports import GRANT_SECONDS, Report, Usage, merged, share_sent, verdict
from tenants.domain.versions import Version, parse
from tenants.models import (
    AuditEntry,
    Cell,
    Counter,
    DirtyLine,
    Grants,
    PolicyEntry,
    RuntimeInstance,
    UsageLine,
)
from tenants.services.auditing import WHO_MAX, audit, check_reason
from tenants.services.halting import halt
from tenants.services.rows import assert_in_transaction

log = logging.getLogger(__name__)

# Nobody measures silence at the slow cadence, so there a poll is noted this rarely.
SLOW_POLL_NOTED = timedelta(seconds=15)
# Lines of ended tracking that one sweep deletes: a short statement, however many there are.
DIRTY_SWEPT_MOST = 10_000


class NotYourCell(Refused):
    """The caller's token is for other cells."""

    status = 403


class InstanceGone(Refused):
    """The instance is gone for good; its process joins again under a new id."""

    status = 410


class AlreadyGone(Refused):
    """The instance was gone before."""


class StillAlive(Refused):
    """The instance spoke a moment ago, so it is not dead."""


class AlreadyAsked(Refused):
    """Somebody asked to declare the instance dead, and their ask still waits."""


class NobodyAsked(Refused):
    """No ask to declare the instance dead waits for a second person."""


class SamePerson(Refused):
    """Whoever asked can't be the second person too."""


class SpokeSince(Refused):
    """The instance spoke after it was said to be dead."""


class NotYourAsk(Refused):
    """Only the person who asked takes the ask back."""


class AnotherProcess(Refused):
    """The id belongs to another process: a fork, a restart or a copy."""


class SeqGap(Refused):
    """Between the last report that was taken and this one, one is missing."""


class VersionAhead(Refused):
    """An instance has applied a version that this database never gave."""


class BadVersion(Refused):
    """A version on the wire is "epoch.number", or empty."""

    status = 422


@dataclass(frozen=True, slots=True)
class Reported:
    """The answer to an accepted report."""

    # From now on; the instance counts it from the moment it sent the report, so it stops first.
    lease_seconds: float
    poll_after_ms: int
    # The cell's present version.
    version: Version
    # How long from now on shares may be used in full; counted by the instance as the lease is.
    grant_seconds: float
    # The number of its shares and all of them, for an instance that has not heard the newest.
    # None: what it holds stands.
    grants: tuple[int, dict[str, Any]] | None


@transaction.atomic
def join(
    cell: Cell,
    *,
    name: str,
    build: str,
    boot: str,
    longest_turn_seconds: float,
    longest_tool_seconds: float,
    plugins: list[str],
    stores: list[str],
    replaces: str | None,
    applied_version: str = "",
    now: datetime,
) -> RuntimeInstance:
    """Register a process of the cell and return its row; it serves nothing before a full policy.

    `replaces` names the id that this same process had; that one is gone in this transaction.
    `applied_version` is the policy that the process held last. Raises AnotherProcess if the id
    was another process's.
    """
    # It is let in all the same: a restore stops machines, not serving, and a policy that is older
    # than a store is refused by that store's guard.
    _check_version(name, cell, applied_version, now)
    # Counts belong to the process: turns that run while it joins anew will be in the new id's
    # reports, and the old id no longer speaks for them. So the new id counts in a fence from now
    # on, although it has not asked for a policy: otherwise a proof made between its join and
    # its first poll would overlook those turns.
    took_over = replaces is not None
    mine = Q(cell=cell, boot=boot, gone_at=None, seq=0, polled_at=None)
    before = RuntimeInstance.objects.select_for_update().filter(Q(key=replaces or "") | mine)
    for row in before.order_by("pk"):
        if row.key == replaces and (row.boot != boot or row.cell_id != cell.pk):
            raise AnotherProcess(
                "Only the process that had an id may replace it, and this one has another boot id "
                "or serves another cell. Join without `replaces`."
            )
        # The others are joins whose answers were lost: they never asked for a policy, so they
        # served nothing, and nobody speaks for them. What they took over is the new id's now.
        took_over = took_over or row.took_over
        if row.gone_at is None:
            _mark_gone(row, GoneWhy.REPLACED, now)
    return RuntimeInstance.objects.create(
        key=secrets.token_hex(16),
        cell=cell,
        name=name,
        build=build,
        boot=boot,
        longest_turn_seconds=longest_turn_seconds,
        longest_tool_seconds=longest_tool_seconds,
        plugins=plugins,
        stores=stores,
        joined_at=now,
        lease_until=now + _lease(),
        took_over=took_over,
    )


def poll(
    key: str, *, since: str = "", cells: Collection[int] | None = None, now: datetime
) -> queries.Asking:
    """Note that an instance asks for its policy; return it with its cell's version.

    `since` is the version that it holds; `cells` are the ids of those that the caller speaks
    for; None: of any. Raises InstanceGone, NotYourCell, VersionAhead.
    """
    asking = queries.asking(key)
    if asking is None:
        raise _gone()
    row = asking.instance
    _check_cell(row, cells)
    if _over(row, now):
        raise _gone()
    held = parse(since)
    if held is not None and _is_ahead(held, asking.version):
        # Answered in full it would drop what it knows for something older, and nobody would ever
        # hear that there was more. So it serves on by what it has until its lease is over.
        with transaction.atomic():
            refusal = _version_ahead(row.name, row.cell, held, asking.version, now)
        raise refusal
    told = cadence_ms(row.cell.fast_until, now)
    first = row.polled_at is None
    quiet = told == row.poll_after_ms != FAST_MS
    if row.polled_at is not None and quiet and now - row.polled_at < SLOW_POLL_NOTED:
        return asking
    noted = RuntimeInstance.objects.filter(pk=row.pk, gone_at=None).update(
        polled_at=now, **_told(row, told, now)
    )
    if not noted:
        raise _gone()
    row.poll_after_ms = told
    if not first:
        return asking
    # Committed before the policy is read: an instance that is given a policy from before a
    # fence is then always known to the fence's proof. Noted afterwards, a proof made in
    # between would hold while this instance still takes turns.
    again = queries.asking(key)
    if again is None or again.instance.gone_at is not None:
        raise _gone()
    return again


def report(said: Report, *, cells: Collection[int] | None = None, now: datetime) -> Reported:
    """Take one report: once, whole, and only as the next one. Return the answer.

    A retry is acknowledged and changes nothing. `cells` as in `poll`. Raises NotYourCell, SeqGap,
    AnotherProcess, VersionAhead, BadVersion, and InstanceGone after counting the usage of an
    instance that is gone.
    """
    # What must be kept although the report is refused is committed before the refusal is raised.
    with transaction.atomic():
        answer = _take(said, cells, now)
    if isinstance(answer, Refused):
        raise answer
    return answer


def _take(said: Report, cells: Collection[int] | None, now: datetime) -> Reported | Refused:
    applied = parse(said.applied_version)
    if applied is None and said.applied_version:
        return BadVersion(
            'applied_version must be "epoch.number" as the policy gave it, or empty while no '
            "policy is held."
        )
    row = (
        RuntimeInstance.objects.select_for_update(of=("self",))
        .select_related("cell")
        .annotate(epoch=Subquery(Counter.objects.values("epoch")[:1]))
        .filter(key=said.instance)
        .first()
    )
    if row is None:
        return _gone()
    _check_cell(row, cells)
    if row.boot != said.boot:
        return AnotherProcess(
            "This id belongs to a process with another boot id: a forked child is not its parent. "
            "Join first."
        )
    current = Version(row.epoch, row.cell.policy_version)
    # The cell's version was read after the instance applied it, so it can't be behind.
    if applied is not None and _is_ahead(applied, current):
        return _version_ahead(row.name, row.cell, applied, current, now)
    over = _over(row, now)
    order = verdict(row.seq, said.seq)
    if order == "gap":
        return SeqGap(
            f"Report {row.seq + 1} is missing before {said.seq}, so this one was not taken. Join "
            "anew and report what is still held."
        )
    if order == "next":
        row.seq = said.seq
        _keep_lines(row, said, now)
        if over:
            # Its usage counts, and counts once; its lease is not renewed and its word no
            # longer proves anything.
            RuntimeInstance.objects.filter(pk=row.pk).update(seq=row.seq)
        else:
            told = cadence_ms(row.cell.fast_until, now)
            known = applied is not None and applied.epoch == current.epoch
            row.lease_until = now + _lease()
            row.grants_until = now + timedelta(seconds=GRANT_SECONDS)
            RuntimeInstance.objects.filter(pk=row.pk).update(
                seq=row.seq,
                reported_at=now,
                lease_until=row.lease_until,
                # A version of another epoch counts as nothing applied.
                applied_epoch=applied.epoch if applied is not None and known else "",
                applied_version=applied.number if applied is not None and known else 0,
                in_flight=_running(said.in_flight),
                in_flight_older=_running(said.in_flight_older),
                grants_heard=said.grants_number,
                grants_until=row.grants_until,
                ready=said.ready,
                runners=said.runners,
                breakers=said.breakers,
                **_told(row, told, now),
            )
            row.poll_after_ms = told
    if over:
        if row.gone_at is None:
            _mark_gone(row, GoneWhy.LAPSED, now)
        return _gone()
    return Reported(
        lease_seconds=_left(row.lease_until, now),
        poll_after_ms=cadence_ms(row.cell.fast_until, now),
        version=current,
        # Of a retry: what is left, for the one before it may have been the one that was heard.
        grant_seconds=_left(row.grants_until, now),
        grants=_unheard(row, said.grants_number),
    )


@transaction.atomic
def leave(key: str, *, cells: Collection[int] | None = None, now: datetime) -> None:
    """Note that an instance has ended by itself, after its own drain. May be said twice.

    `cells` as in `poll`. Raises NotYourCell, and InstanceGone if there never was such an instance.
    """
    row = RuntimeInstance.objects.select_for_update().filter(key=key).first()
    if row is None:
        raise _gone()
    _check_cell(row, cells)
    if row.gone_at is None:
        _mark_gone(row, GoneWhy.LEFT, now)


def mark_lapsed(instance_ids: Collection[int], *, now: datetime) -> bool:
    """Mark exactly these instances gone, if every one of them still is lapsed; return whether.

    Inside the caller's transaction, which must exist: it is the one that settles by a proof
    that counted them as lapsed. If a report renewed one meanwhile, nothing changes, the
    answer is False, and the caller must not settle.
    """
    assert_in_transaction()
    rows = list(
        RuntimeInstance.objects.select_for_update().filter(pk__in=instance_ids).order_by("pk")
    )
    if len(rows) != len(set(instance_ids)) or not all(_over(row, now) for row in rows):
        return False
    for row in rows:
        if row.gone_at is None:
            _mark_gone(row, GoneWhy.LAPSED, now)
    return True


@transaction.atomic
def ask_dead(
    instance: RuntimeInstance, *, person: str, by: str, reason: str, now: datetime
) -> RuntimeInstance:
    """Ask that an instance be declared dead, which a second person confirms; return its row.

    `person` is who asks, whatever token they came with; `by` is what the audit calls them.
    Raises ReasonMissing, AlreadyGone, StillAlive, AlreadyAsked.
    """
    check_reason(reason)
    row = _may_be_dead(instance, now)
    if until := ask_ends(row.dead_asked_at, now):
        raise AlreadyAsked(
            f"{row.dead_asked_by} asked for it already. Another person confirms it, until "
            f"{until:%H:%M:%S} UTC."
        )
    before = {"dead_asked_by": row.dead_asked_by, "dead_asked_at": row.dead_asked_at}
    _note_asked(row, person, reason, now)
    _audit_dead(row, "instance.ask_dead", by=by, reason=reason, before=before, now=now)
    return row


@transaction.atomic
def confirm_dead(
    instance: RuntimeInstance, *, person: str, by: str, now: datetime
) -> RuntimeInstance:
    """Confirm as a second person that an instance is dead: from now on it is gone; return its row.

    Both vouch that the process has ended. Should it live after all, a store that closes itself
    refuses what it writes, and one that can't does not. Raises NobodyAsked, SamePerson,
    SpokeSince, AlreadyGone, StillAlive.
    """
    row = _may_be_dead(instance, now)
    if row.dead_asked_at is None or ask_ends(row.dead_asked_at, now) is None:
        raise NobodyAsked(
            f"Nobody has asked to declare {row} dead, or it was more than "
            f"{DEAD_ASK_LASTS.seconds // 60} minutes ago. Ask first; another person confirms."
        )
    if row.dead_asked_by == person:
        raise SamePerson(
            f"You asked for it yourself. A second person has to confirm that {row} is dead: no "
            "fence waits for it afterwards."
        )
    if (spoke := _spoke_at(row)) > row.dead_asked_at:
        # What the first person vouched for was not so.
        raise SpokeSince(
            f"{row} spoke at {spoke:%Y-%m-%d %H:%M:%S} UTC, after {row.dead_asked_by} had asked. "
            "Look at its host again, then ask anew."
        )
    _declare(row, by=by, reason=row.dead_asked_why, asked_by=row.dead_asked_by, now=now)
    return row


@transaction.atomic
def withdraw_dead(
    instance: RuntimeInstance, *, person: str, by: str, now: datetime
) -> RuntimeInstance:
    """Take one's own ask back; return the instance's row. Raises NobodyAsked, NotYourAsk."""
    row = _locked(instance)
    until = ask_ends(row.dead_asked_at, now)
    if row.gone_at is not None or until is None:
        raise NobodyAsked(f"Nobody asks to declare {row} dead, so there is nothing to take back.")
    if row.dead_asked_by != person:
        raise NotYourAsk(
            f"{row.dead_asked_by} asked for it and can take it back. Unconfirmed, it ends by itself"
            f" at {until:%H:%M:%S} UTC."
        )
    before = {"dead_asked_by": row.dead_asked_by, "dead_asked_at": row.dead_asked_at}
    reason = row.dead_asked_why
    _note_asked(row, "", "", None)
    _audit_dead(row, "instance.withdraw_dead", by=by, reason=reason, before=before, now=now)
    return row


@transaction.atomic
def declare_dead(
    instance: RuntimeInstance, *, by: str, reason: str, now: datetime
) -> RuntimeInstance:
    """Mark an instance gone on one person's word, so that no fence waits for it; return its row.

    Only for a caller that closes the store behind it: what the process still writes is refused
    there. Everybody else asks, and a second person confirms. Raises ReasonMissing, AlreadyGone,
    StillAlive.
    """
    check_reason(reason)
    row = _may_be_dead(instance, now)
    _declare(row, by=by, reason=reason, asked_by="", now=now)
    return row


def sweep(*, now: datetime) -> int:
    """Mark instances gone whose lease, margin and longest turn are over; return how many.

    Deletes also what was kept of tenants that are no longer tracked, a bounded part a run.
    """
    ended = DirtyLine.objects.exclude(tenant__tracked_until__gt=now).order_by("pk")
    DirtyLine.objects.filter(pk__in=ended.values("pk")[:DIRTY_SWEPT_MOST]).delete()
    swept = 0
    for pk in queries.lapsed_instances(now=now):
        # One row a transaction: a fence that settles meanwhile waits for one row at most.
        with transaction.atomic():
            swept += mark_lapsed([pk], now=now)
    return swept


def _keep_lines(row: RuntimeInstance, said: Report, now: datetime) -> None:
    """Keep what a report says of tenants that the cell was ever told of."""
    slugs = {line.tenant for line in said.usage} | {line.tenant for line in said.dirty}
    if not slugs:
        return
    # Tombstones are never purged, so a tenant that has just left is still known here.
    entries = PolicyEntry.objects.filter(cell=row.cell_id, tenant__slug__in=slugs)
    known: dict[str, int] = {}
    # Runtimes report every session that they served, always; only a move's forecast reads them.
    tracked: set[str] = set()
    for slug, pk, until in entries.values_list(
        "tenant__slug", "tenant_id", "tenant__tracked_until"
    ):
        known[slug] = pk
        if until is not None and now < until:
            tracked.add(slug)
    if unknown := sorted(slugs - known.keys()):
        log.warning(
            "%s reported %d tenants that %s never had, such as %s; their lines are left out",
            row.name,
            len(unknown),
            row.cell.slug,
            unknown[0],
        )
    UsageLine.objects.bulk_create(
        UsageLine(
            instance=row,
            seq=said.seq,
            tenant_id=known[line.tenant],
            minute=line.minute,
            turns=line.turns,
            model_calls=line.model_calls,
            tokens=line.tokens,
            refused=line.refused,
            would_refuse=line.would_refuse,
        )
        for line in merged(
            _in_its_minute(row, [one for one in said.usage if one.tenant in known], now)
        )
    )
    DirtyLine.objects.bulk_create(
        DirtyLine(
            tenant_id=known[line.tenant], user_id=line.user_id, session_id=line.session_id, at=now
        )
        for line in said.dirty
        if line.tenant in tracked
    )


def _in_its_minute(row: RuntimeInstance, said: list[Usage], now: datetime) -> list[Usage]:
    """Return the lines, each in the minute in which it counts."""
    # None: its process had an id before, and brings what it could not report under that one.
    heard_at = row.reported_at or (None if row.took_over else row.joined_at)
    lines, wrong = [], []
    for one in said:
        minute = counted_minute(one.minute, heard_at=heard_at, now=now)
        lines.append(replace(one, minute=minute))
        if minute != one.minute.replace(second=0, microsecond=0):
            wrong.append(one)
    if wrong:
        log.warning(
            "%s has a wrong clock: %d lines of usage, such as one of %s, count in the minute in "
            "which they came",
            row.name,
            len(wrong),
            f"{wrong[0].minute:%Y-%m-%d %H:%M} UTC",
        )
    return lines


def _check_version(name: str, cell: Cell, held: str, now: datetime) -> None:
    """Stop all machines if a process that joins held a policy that this database never gave."""
    applied = parse(held)
    if applied is None:
        return
    # After the process applied it, so it can't be behind.
    number = Cell.objects.values_list("policy_version", flat=True).get(pk=cell.pk)
    current = Version(queries.epoch(), number)
    if _is_ahead(applied, current):
        _version_ahead(name, cell, applied, current, now)


def _is_ahead(applied: Version, current: Version) -> bool:
    return applied.epoch == current.epoch and applied.number > current.number


def _version_ahead(
    name: str, cell: Cell, applied: Version, current: Version, now: datetime
) -> VersionAhead:
    """Stop all machines: this database is older than what its runtimes were told."""
    why = (
        f"Instance {name} of {cell.slug} has applied policy {applied}, but {cell.slug} is only at"
        f" {current}: this database was restored from a backup without saying so. Run"
        " `manage.py restored`."
    )
    who = f"instance {name}"[:WHO_MAX]
    since = halt(by=who, why=why, now=now).since
    subject = f"instance {name} of {cell.slug}"
    # It will be back at every poll; one line says it all.
    told = AuditEntry.objects.filter(subject=subject, verb="instance.version_ahead", at__gte=since)
    if not told.exists():
        audit(
            who=who,
            verb="instance.version_ahead",
            subject=subject,
            before={"cell": str(current)},
            after={"applied": str(applied)},
            now=now,
        )
        log.error("%s", why)
    return VersionAhead(f"{why} All machines are stopped until that is settled.")


def _check_cell(row: RuntimeInstance, cells: Collection[int] | None) -> None:
    if cells is not None and row.cell_id not in cells:
        raise NotYourCell(
            "This token is not for the cell that the instance serves. Use that cell's token."
        )


def _locked(instance: RuntimeInstance) -> RuntimeInstance:
    rows = RuntimeInstance.objects.select_for_update(of=("self",)).select_related("cell")
    return rows.get(pk=instance.pk)


def _may_be_dead(instance: RuntimeInstance, now: datetime) -> RuntimeInstance:
    """Lock and return the instance's row. Raises AlreadyGone, StillAlive."""
    row = _locked(instance)
    if row.gone_at is not None:
        raise AlreadyGone(f"{row} has been gone since {row.gone_at:%Y-%m-%d %H:%M:%S} UTC already.")
    spoke = _spoke_at(row)
    if now - spoke <= silence(row.poll_after_ms):
        raise StillAlive(
            f"{row} spoke at {spoke:%Y-%m-%d %H:%M:%S} UTC: it is alive, and declared dead it "
            "would go on writing where no fence sees it. Stop it first."
        )
    return row


def _spoke_at(row: RuntimeInstance) -> datetime:
    # It reports as often as it polls.
    return max(at for at in (row.joined_at, row.polled_at, row.reported_at) if at is not None)


def _note_asked(row: RuntimeInstance, person: str, why: str, at: datetime | None) -> None:
    row.dead_asked_at, row.dead_asked_by, row.dead_asked_why = at, person, why
    row.save(update_fields=["dead_asked_at", "dead_asked_by", "dead_asked_why"])


def _declare(row: RuntimeInstance, *, by: str, reason: str, asked_by: str, now: datetime) -> None:
    _mark_gone(row, GoneWhy.DEAD, now)
    before = {
        "in_flight": row.in_flight,
        "reported_at": row.reported_at,
        "lease_until": row.lease_until,
    }
    after = {"gone_why": row.gone_why} | ({"asked_by": asked_by} if asked_by else {})
    _audit_dead(
        row, "instance.declare_dead", by=by, reason=reason, before=before, after=after, now=now
    )


def _audit_dead(
    row: RuntimeInstance,
    verb: str,
    *,
    by: str,
    reason: str,
    before: Mapping[str, Any],
    after: Mapping[str, Any] | None = None,
    now: datetime,
) -> None:
    audit(
        who=by,
        verb=verb,
        subject=f"instance {row.name} of {row.cell.slug}",
        reason=reason,
        before=before,
        after=after or {"dead_asked_by": row.dead_asked_by, "dead_asked_at": row.dead_asked_at},
        now=now,
    )


def _told(row: RuntimeInstance, told: int, now: datetime) -> dict[str, Any]:
    """Return the columns that note which cadence an instance is being told."""
    hurried_at = (row.hurried_at or now) if told == FAST_MS else None
    return {"poll_after_ms": told, "hurried_at": hurried_at}


def _unheard(locked: RuntimeInstance, heard: int) -> tuple[int, dict[str, Any]] | None:
    """Return the shares that an instance does not apply yet; None if it has the newest.

    Whoever divides locks the instance's row too, so number and shares are of one moment. Any
    other number, such as one of a database that was lost, is answered with all of them.
    """
    if heard == locked.grants_number:
        return None
    shares = Grants.objects.filter(instance=locked).values_list("shares", flat=True).first()
    return locked.grants_number, {slug: share_sent(kept) for slug, kept in (shares or {}).items()}


def _left(until: datetime | None, now: datetime) -> float:
    return 0.0 if until is None else max(0.0, (until - now).total_seconds())


def _running(counts: Mapping[str, int]) -> dict[str, int]:
    return {tenant: count for tenant, count in counts.items() if count}


def _over(row: RuntimeInstance, now: datetime) -> bool:
    """Return whether an instance can't write any more: gone, or lapsed and not yet marked."""
    return row.gone_at is not None or has_lapsed(row, now)


def _mark_gone(locked: RuntimeInstance, why: GoneWhy, now: datetime) -> None:
    locked.gone_at = now
    locked.gone_why = why
    locked.save(update_fields=["gone_at", "gone_why"])


def _gone() -> InstanceGone:
    return InstanceGone(
        "This instance is gone: it left, lapsed, was replaced or was declared dead. Join again; "
        "what this process still runs belongs to the new id."
    )


def _lease() -> timedelta:
    return timedelta(seconds=settings.RUNTIME_LEASE_SECONDS)
