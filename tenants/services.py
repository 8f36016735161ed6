"""Every write that people, runtimes and machines ask of this app: one transaction each.

Locks are taken in one order everywhere, so that no two writers wait for each other: cells in id
order, then the counter row, then what hangs on them.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
import zoneinfo
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, TypeVar

from django.conf import settings
from django.contrib.auth.models import Group, User
from django.core.serializers.json import DjangoJSONEncoder
from django.db import IntegrityError, connection, models, transaction
from django.db.models import Q, Subquery

from durable.errors import Refused
from tenants import queries
from tenants.domain import names
from tenants.domain.fence import FAST_MS, Accepts, GoneWhy, cadence_ms, has_lapsed, silence
from tenants.domain.reports import Report, merged, verdict
from tenants.domain.requests import request_id as current_request_id
from tenants.domain.roles import Role, TokenRole
from tenants.domain.versions import Version, parse
from tenants.models import (
    Agent,
    AuditEntry,
    Cell,
    Counter,
    DirtyLine,
    Placement,
    PlacementChange,
    PolicyEntry,
    Region,
    RuntimeInstance,
    Scope,
    Store,
    Tenant,
    Token,
    UsageLine,
)

log = logging.getLogger(__name__)

# Nobody measures silence at the slow cadence, so there a poll is noted this rarely.
SLOW_POLL_NOTED = timedelta(seconds=15)
TOKEN_USE_NOTED = timedelta(minutes=1)
WHO_MAX = 150
# Lines of ended tracking that one sweep deletes: a short statement, however many there are.
DIRTY_SWEPT_MOST = 10_000

Row = TypeVar("Row", bound=models.Model)


class SlugTaken(Refused):
    """Another row has this slug or key."""


class AppNameTaken(Refused):
    """Another tenant has this app name; it is unique everywhere."""


class UnknownTimeZone(Refused):
    """The IANA database has no such zone."""


class BadWeight(Refused):
    """A share is a number, not negative and not infinite."""


class BadQuota(Refused):
    """A quota is more than nothing."""


class QuotaOnlyAssumed(Refused):
    """Nobody has verified the cell's model quota, so no tenant may be placed there."""


class ReasonMissing(Refused):
    """The audit needs to know why."""

    status = 422


class NotHere(Refused):
    """The cell does not own the tenant, so nothing may be published for it there."""


class PlacementChanged(Refused):
    """The tenant was placed elsewhere while its cells were being locked."""

    retry_after_seconds = 1


class BadToken(Refused):
    """A token would be good for nothing, or for too much."""


class AlreadyRevoked(Refused):
    """The token was revoked before."""


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


# --- who there is ---------------------------------------------------------------------------


@transaction.atomic
def add_region(slug: str, *, name: str, by: str, now: datetime) -> Region:
    """Register a region and return it.

    Raises BadSlug, BadName, SlugTaken.
    """
    names.check_slug(slug, what="region", longest=40)
    names.check_name(name, what="region")
    region = _insert(Region(slug=slug, name=name), SlugTaken(_taken("region", slug)))
    audit(who=by, verb="region.add", subject=f"region {slug}", after={"name": name}, now=now)
    return region


@transaction.atomic
def add_cell(
    slug: str,
    *,
    region: Region,
    url: str = "",
    quota_tokens_per_minute: int | None = None,
    by: str,
    now: datetime,
) -> Cell:
    """Register a cell and return it.

    A quota given here is only assumed: no tenant may be placed in the cell before `verify_quota`.
    Raises BadSlug, BadUrl, BadQuota, SlugTaken.
    """
    names.check_slug(slug, what="cell")
    names.check_url(url)
    if quota_tokens_per_minute is not None:
        _check_quota(quota_tokens_per_minute)
    cell = _insert(
        Cell(slug=slug, region=region, url=url, quota_tokens_per_minute=quota_tokens_per_minute),
        SlugTaken(_taken("cell", slug)),
    )
    after = {"region": region.slug, "url": url, "quota_tokens_per_minute": quota_tokens_per_minute}
    audit(who=by, verb="cell.add", subject=f"cell {slug}", after=after, now=now)
    return cell


@transaction.atomic
def verify_quota(cell: Cell, *, tokens_per_minute: int, by: str, now: datetime) -> Cell:
    """Record that somebody looked the cell's model quota up at the provider; return the cell.

    Raises BadQuota.
    """
    _check_quota(tokens_per_minute)
    [locked] = _lock_cells({cell.pk})
    before = {
        "quota_tokens_per_minute": locked.quota_tokens_per_minute,
        "quota_verified_at": locked.quota_verified_at,
    }
    locked.quota_tokens_per_minute = tokens_per_minute
    locked.quota_verified_at = now
    locked.quota_verified_by = by
    locked.save(update_fields=["quota_tokens_per_minute", "quota_verified_at", "quota_verified_by"])
    after = {"quota_tokens_per_minute": tokens_per_minute, "quota_verified_at": now}
    subject = f"cell {locked.slug}"
    audit(who=by, verb="cell.verify_quota", subject=subject, before=before, after=after, now=now)
    return locked


@transaction.atomic
def set_cell_url(cell: Cell, *, url: str, by: str, reason: str = "", now: datetime) -> Cell:
    """Change where gateways forward this cell's turns to; return the cell.

    It moves nobody, so it raises feed_version and no placement_version. Raises BadUrl.
    """
    names.check_url(url)
    [locked] = _lock_cells({cell.pk})
    before = locked.url
    if before != url:
        counter = _lock_counter()
        counter.feed_version += 1
        counter.save(update_fields=["feed_version"])
        locked.url = url
        locked.save(update_fields=["url"])
        Placement.objects.filter(cell=locked).update(feed_version=counter.feed_version)
    audit(
        who=by,
        verb="cell.set_url",
        subject=f"cell {locked.slug}",
        reason=reason,
        before={"url": before},
        after={"url": url},
        now=now,
    )
    return locked


@transaction.atomic
def add_store(
    key: str, *, region: Region, kind: str, address_from: str, by: str, now: datetime
) -> Store:
    """Register a store of sessions by reference and return it; nothing is opened yet.

    `address_from` is "env:NAME" or "file:/path": the address holds a password and is never
    kept. Raises BadSlug, UnknownStoreKind, NotAReference, SlugTaken.
    """
    names.check_slug(key, what="store")
    names.check_kind(kind)
    names.check_address_from(address_from)
    store = _insert(
        Store(key=key, region=region, kind=kind, address_from=address_from),
        SlugTaken(_taken("store", key)),
    )
    after = {"region": region.slug, "kind": kind, "address_from": address_from}
    audit(who=by, verb="store.add", subject=f"store {key}", after=after, now=now)
    return store


def note_survey(store: Store, survey: Mapping[str, Any], *, now: datetime) -> None:
    """Keep what looking at a store found, for people; the newest look stays.

    One UPDATE, in the caller's transaction if there is one. Nothing changes but what is known,
    so the audit has no line of it.
    """
    Store.objects.filter(Q(surveyed_at=None) | Q(surveyed_at__lte=now), pk=store.pk).update(
        survey=_plain(survey), surveyed_at=now
    )


@transaction.atomic
def add_tenant(
    slug: str,
    *,
    name: str,
    app_name: str,
    cell: Cell,
    store: Store,
    time_zone: str = "UTC",
    weight: float = 1.0,
    tier: str = names.Tier.POOLED,
    by: str,
    now: datetime,
) -> Tenant:
    """Register a tenant, place it and publish it; return it. From its next poll the cell serves it.

    Raises BadSlug, BadName, BadAppName, UnknownTier, UnknownTimeZone, BadWeight, SlugTaken,
    AppNameTaken, QuotaOnlyAssumed.
    """
    names.check_slug(slug, what="tenant")
    names.check_name(name, what="tenant")
    names.check_app_name(app_name)
    names.check_tier(tier)
    if time_zone not in zoneinfo.available_timezones():
        raise UnknownTimeZone(
            f"There is no time zone {time_zone[:60]!r}; the daily budget is reset at its midnight. "
            'Give an IANA name such as "Europe/Berlin".'
        )
    if not (math.isfinite(weight) and weight >= 0):
        raise BadWeight(f"A weight of {weight} can't share anything. Give a number of 0 or more.")
    [locked] = _lock_cells({cell.pk})
    if locked.quota_verified_at is None:
        raise QuotaOnlyAssumed(
            f"The model quota of cell {locked.slug} is only assumed, so nobody knows whether it "
            "has room. Look it up at the provider and enter it as verified first."
        )
    counter = _lock_counter()
    agent, _ = Agent.objects.get_or_create(slug=names.agent_of(app_name))
    if Tenant.objects.filter(app_name=app_name).exists():
        raise AppNameTaken(
            f"Another tenant has the app name {app_name!r}, and sessions are told apart by it. "
            "Give each tenant a name of its own."
        )
    tenant = _insert(
        Tenant(
            slug=slug,
            name=name,
            app_name=app_name,
            agent=agent,
            time_zone=time_zone,
            weight=weight,
            tier=tier,
        ),
        SlugTaken(_taken("tenant", slug)),
    )
    Scope.objects.create(tenant=tenant, version=1, at=now, by=by, reason="Onboarded")
    _raise_placement(counter)
    Placement.objects.create(
        tenant=tenant,
        cell=locked,
        store=store,
        placement_version=counter.placement_version,
        feed_version=counter.feed_version,
    )
    _own(tenant, locked, store, counter.placement_version, generation=1)
    _note_placement(tenant, locked, store, counter, by=by, reason="Onboarded", now=now)
    after = {
        "app_name": app_name,
        "cell": locked.slug,
        "store": store.key,
        "time_zone": time_zone,
        "weight": weight,
        "tier": str(tier),
    }
    audit(who=by, verb="tenant.add", subject=f"tenant {slug}", after=after, now=now)
    return tenant


# --- what runtimes are told -----------------------------------------------------------------


def publish(tenant: Tenant, cell: Cell, *, accepts: Literal["all", "none"]) -> int:
    """Publish which turns the cell takes of the tenant; return the policy version that says so.

    Inside the caller's transaction, which must exist. Raises NotHere where the cell has no
    entry of the tenant or only a tombstone: a late caller must not bring it back to life there.
    """
    _assert_in_transaction()
    chosen = Accepts(accepts)
    if chosen not in {Accepts.ALL, Accepts.NONE}:
        raise ValueError(f"{accepts} is not published by itself")
    # The lock is held until commit, so commit order is version order: who reads version 8 finds
    # everything that 7 changed.
    [locked] = _lock_cells({cell.pk})
    version = _next_version(locked)
    changed = (
        PolicyEntry.objects.filter(cell=locked, tenant=tenant)
        .exclude(accepts=Accepts.MOVED)
        .update(version=version, accepts=chosen)
    )
    if not changed:
        raise NotHere(
            f"{locked} does not own {tenant}, so nothing can be published for it there. Look up "
            "where it lives now."
        )
    return version


def place(tenant: Tenant, *, cell: Cell, store: Store, by: str, reason: str, now: datetime) -> int:
    """Make (cell, store) the tenant's home for routers; return the placement_version that says so.

    Inside the caller's transaction, which must exist. The target cell accepts all turns from
    here on; the cell that it left keeps a tombstone that names the new one. Placed where it is
    already, it keeps its placement_version. Raises PlacementChanged if somebody else
    placed it meanwhile.
    """
    _assert_in_transaction()
    was = Placement.objects.get(tenant=tenant)
    cells = {one.pk: one for one in _lock_cells({was.cell_id, cell.pk})}
    # Only now does the row hold still: every writer of it locks its cell first.
    placement = Placement.objects.select_related("store").get(tenant=tenant)
    if placement.cell_id != was.cell_id:
        raise PlacementChanged(f"{tenant} has just been placed elsewhere. Try again.")
    target = cells[cell.pk]
    entry = PolicyEntry.objects.get(cell=placement.cell_id, tenant=tenant)
    if placement.cell_id == cell.pk and placement.store_id == store.pk:
        if entry.accepts != Accepts.ALL:
            publish(tenant, target, accepts="all")
        return placement.placement_version
    counter = _lock_counter()
    _raise_placement(counter)
    if placement.cell_id != cell.pk:
        # First the tombstone, then the new owner: a constraint lets only one cell own a tenant.
        left = cells[placement.cell_id]
        PolicyEntry.objects.filter(pk=entry.pk).update(
            version=_next_version(left),
            accepts=Accepts.MOVED,
            moved_to=target,
            placement_version=counter.placement_version,
            document=entry.document | {"moved_to": target.slug},
        )
    _own(tenant, target, store, counter.placement_version, generation=entry.runner_generation)
    reached = placement.intended_cell_id == cell.pk
    Placement.objects.filter(pk=placement.pk).update(
        cell=target,
        store=store,
        intended_cell=None if reached else placement.intended_cell_id,
        placement_version=counter.placement_version,
        feed_version=counter.feed_version,
    )
    _note_placement(tenant, target, store, counter, by=by, reason=reason, now=now)
    return counter.placement_version


@transaction.atomic
def hurry(cells: Iterable[Cell], *, until: datetime) -> None:
    """Let the runtimes of these cells poll at the fast cadence until then.

    A later end than the one asked for stays: another move may need it.
    """
    ids = {cell.pk for cell in cells}
    _lock_cells(ids)
    Cell.objects.filter(Q(fast_until=None) | Q(fast_until__lt=until), pk__in=ids).update(
        fast_until=until
    )


def track(tenant: Tenant, *, until: datetime) -> None:
    """Keep what runtimes report as served of the tenant until then, for a move's forecast.

    One UPDATE, in the caller's transaction if there is one. It never shortens.
    """
    Tenant.objects.filter(Q(tracked_until=None) | Q(tracked_until__lt=until), pk=tenant.pk).update(
        tracked_until=until
    )


def _next_version(locked: Cell) -> int:
    """Raise the policy version of a cell whose row this transaction has locked; return it."""
    locked.policy_version += 1
    locked.save(update_fields=["policy_version"])
    return locked.policy_version


def _own(
    tenant: Tenant, locked: Cell, store: Store, placement_version: int, *, generation: int
) -> None:
    """Write the entry by which a locked cell takes every turn of the tenant."""
    PolicyEntry.objects.update_or_create(
        cell=locked,
        tenant=tenant,
        defaults={
            "version": _next_version(locked),
            "accepts": Accepts.ALL,
            "moved_to": None,
            "placement_version": placement_version,
            "store": store,
            "runner_generation": generation,
            "document": _document(tenant, store),
        },
    )


def _document(tenant: Tenant, store: Store) -> dict[str, Any]:
    """Return the part of an entry that is sent as it is kept."""
    scope = Scope.objects.filter(tenant=tenant).order_by("-version")[0]
    return {
        "tenant": tenant.slug,
        "agent": tenant.agent.slug,
        "app_name": tenant.app_name,
        "tier": str(tenant.tier),
        "moved_to": None,
        "store": {"key": store.key, "kind": store.kind},
        "scope": {
            "version": scope.version,
            "max_concurrent_runs": scope.max_concurrent_runs,
            "runs_per_second": scope.runs_per_second,
            "daily_token_budget": scope.daily_token_budget,
            "max_model_calls_per_run": scope.max_model_calls_per_run,
            "allowed_tools": scope.allowed_tools,
            "weight": tenant.weight,
        },
    }


def _raise_placement(counter: Counter) -> None:
    """Raise both numbers of the locked counter row: somebody's home changes, so the feed does."""
    counter.placement_version += 1
    counter.feed_version += 1
    counter.save(update_fields=["placement_version", "feed_version"])


def _note_placement(
    tenant: Tenant,
    cell: Cell,
    store: Store,
    counter: Counter,
    *,
    by: str,
    reason: str,
    now: datetime,
) -> None:
    PlacementChange.objects.create(
        tenant=tenant,
        cell=cell,
        store=store,
        placement_version=counter.placement_version,
        at=now,
        by=by,
        reason=reason,
    )


# --- what runtimes say ----------------------------------------------------------------------


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
    now: datetime,
) -> RuntimeInstance:
    """Register a process of the cell and return its row; it serves nothing before a full policy.

    `replaces` names the id that this same process had; that one is gone in this transaction.
    Raises AnotherProcess if the id was another process's.
    """
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


def poll(key: str, *, cells: Collection[int] | None = None, now: datetime) -> queries.Asking:
    """Note that an instance asks for its policy; return it with its cell's version.

    `cells` are the ids of those that the caller speaks for; None: of any. Raises InstanceGone,
    NotYourCell.
    """
    asking = queries.asking(key)
    if asking is None:
        raise _gone()
    row = asking.instance
    _check_cell(row, cells)
    if _over(row, now):
        raise _gone()
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
    if applied is not None and applied.epoch == current.epoch and applied.number > current.number:
        return _version_ahead(row, applied, current, now)
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
            RuntimeInstance.objects.filter(pk=row.pk).update(
                seq=row.seq,
                reported_at=now,
                lease_until=row.lease_until,
                # A version of another epoch counts as nothing applied.
                applied_epoch=applied.epoch if applied is not None and known else "",
                applied_version=applied.number if applied is not None and known else 0,
                in_flight=_running(said.in_flight),
                in_flight_older=_running(said.in_flight_older),
                **_told(row, told, now),
            )
            row.poll_after_ms = told
    if over:
        if row.gone_at is None:
            _mark_gone(row, GoneWhy.LAPSED, now)
        return _gone()
    left = max(0.0, (row.lease_until - now).total_seconds())
    return Reported(left, cadence_ms(row.cell.fast_until, now), current)


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
    _assert_in_transaction()
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
def declare_dead(
    instance: RuntimeInstance, *, by: str, reason: str, now: datetime
) -> RuntimeInstance:
    """Mark an instance gone on a person's word, so that no fence waits for it; return its row.

    The person vouches that the process has ended; one that spoke within its last three polls
    has not. Should it live after all, a store that closes itself refuses what it writes, and one
    that can't does not. Raises ReasonMissing, AlreadyGone, StillAlive.
    """
    check_reason(reason)
    row = RuntimeInstance.objects.select_for_update().select_related("cell").get(pk=instance.pk)
    if row.gone_at is not None:
        raise AlreadyGone(f"{row} has been gone since {row.gone_at:%Y-%m-%d %H:%M:%S} UTC already.")
    # It reports as often as it polls.
    spoke = max(at for at in (row.joined_at, row.polled_at, row.reported_at) if at is not None)
    if now - spoke <= silence(row.poll_after_ms):
        raise StillAlive(
            f"{row} spoke at {spoke:%Y-%m-%d %H:%M:%S} UTC: it is alive, and declared dead it "
            "would go on writing where no fence sees it. Stop it first."
        )
    _mark_gone(row, GoneWhy.DEAD, now)
    before = {
        "in_flight": row.in_flight,
        "reported_at": row.reported_at,
        "lease_until": row.lease_until,
    }
    audit(
        who=by,
        verb="instance.declare_dead",
        subject=f"instance {row.name} of {row.cell.slug}",
        reason=reason,
        before=before,
        after={"gone_why": row.gone_why},
        now=now,
    )
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
        )
        for line in merged(one for one in said.usage if one.tenant in known)
    )
    DirtyLine.objects.bulk_create(
        DirtyLine(
            tenant_id=known[line.tenant], user_id=line.user_id, session_id=line.session_id, at=now
        )
        for line in said.dirty
        if line.tenant in tracked
    )


def _version_ahead(
    row: RuntimeInstance, applied: Version, current: Version, now: datetime
) -> VersionAhead:
    subject = f"instance {row.name} of {row.cell.slug}"
    # It will be back at every poll; one line says it all.
    if not AuditEntry.objects.filter(subject=subject, verb="instance.version_ahead").exists():
        audit(
            who=f"instance {row.name}"[:WHO_MAX],
            verb="instance.version_ahead",
            subject=subject,
            before={"cell": str(current)},
            after={"applied": str(applied)},
            now=now,
        )
        log.error("%s applied %s, but the cell is only at %s", subject, applied, current)
    return VersionAhead(
        f"{row.name} has applied {applied}, but {row.cell.slug} is only at {current}: this "
        "database was restored from a backup without saying so. Start no move before that is put "
        "right."
    )


def _check_cell(row: RuntimeInstance, cells: Collection[int] | None) -> None:
    if cells is not None and row.cell_id not in cells:
        raise NotYourCell(
            "This token is not for the cell that the instance serves. Use that cell's token."
        )


def _told(row: RuntimeInstance, told: int, now: datetime) -> dict[str, Any]:
    """Return the columns that note which cadence an instance is being told."""
    hurried_at = (row.hurried_at or now) if told == FAST_MS else None
    return {"poll_after_ms": told, "hurried_at": hurried_at}


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


# --- people ---------------------------------------------------------------------------------


@transaction.atomic
def add_sign_in(name: str, *, role: Role, by: str, now: datetime) -> tuple[User, str]:
    """Let a person sign in with a role; return them and their password, which is shown this once.

    Raises BadName, SlugTaken.
    """
    names.check_name(name, what="sign-in", longest=WHO_MAX)
    password = secrets.token_urlsafe(12)
    user = User(username=User.normalize_username(name))
    user.set_password(password)
    _insert(user, SlugTaken(_taken("sign-in", name)))
    audit(who=by, verb="user.add", subject=_of_user(user), now=now)
    return grant_role(user, role, by=by, now=now), password


@transaction.atomic
def grant_role(user: User, role: Role | None, *, by: str, now: datetime) -> User:
    """Make this the one role of a person, None: no role; return them afresh.

    A superuser is one no longer: only the group counts from here on, so that a role that is
    lowered or taken away really is. An admin may look at rows in Django's admin.
    """
    locked = User.objects.select_for_update().get(pk=user.pk)
    before = queries.role_of(locked)
    locked.groups.remove(*Group.objects.filter(name__in=[one.value for one in Role]))
    if role is not None:
        locked.groups.add(Group.objects.get(name=role.value))
    locked.is_superuser = False
    locked.is_staff = role is Role.ADMIN
    locked.save(update_fields=["is_superuser", "is_staff"])
    audit(
        who=by,
        verb="user.role",
        subject=_of_user(locked),
        before={"role": before},
        after={"role": role},
        now=now,
    )
    return locked


def _of_user(user: User) -> str:
    return f"user {user.get_username()}"[:WHO_MAX]


# --- tokens ---------------------------------------------------------------------------------


@transaction.atomic
def make_token(
    name: str,
    *,
    role: TokenRole,
    cells: Collection[Cell] = (),
    tenant: Tenant | None = None,
    user: User | None = None,
    expires_at: datetime,
    by: str,
    now: datetime,
) -> tuple[Token, str]:
    """Make a bearer token; return its row and the secret, which is not kept and never shown again.

    Raises BadName, BadToken.
    """
    names.check_name(name, what="token")
    kind = TokenRole(role)
    if bool(cells) != (kind is TokenRole.RUNTIME):
        raise BadToken(
            "A runtime's token names the cells that it may serve, and no other token names any. "
            "Correct the cells or the role."
        )
    if (tenant is not None) != (kind is TokenRole.TENANT):
        raise BadToken(
            "A tenant's token names the tenant whose usage it reads, and no other token names "
            "one. Correct the tenant or the role."
        )
    if (user is not None) != (kind is TokenRole.OPERATOR):
        raise BadToken(
            "An operator's token names the user that it acts for, and no other token names one. "
            "Correct the user or the role."
        )
    if expires_at <= now:
        raise BadToken("The token would have expired before its first use. Choose a later time.")
    # The prefix is drawn apart, so that showing it gives away none of the 256 bits.
    prefix = f"sy_{secrets.token_hex(3)}"
    secret = f"{prefix}_{secrets.token_urlsafe(32)}"
    token = Token.objects.create(
        name=name,
        prefix=prefix,
        digest=queries.digest(secret),
        role=kind,
        tenant=tenant,
        user=user,
        created_at=now,
        created_by=by,
        expires_at=expires_at,
    )
    token.cells.set(cells)
    after = {
        "prefix": prefix,
        "role": str(kind),
        "cells": sorted(cell.slug for cell in cells),
        "tenant": tenant.slug if tenant is not None else None,
        "user": user.get_username() if user is not None else None,
        "expires_at": expires_at,
    }
    audit(who=by, verb="token.make", subject=f"token {name}", after=after, now=now)
    return token, secret


@transaction.atomic
def revoke_token(token: Token, *, by: str, reason: str = "", now: datetime) -> Token:
    """Revoke a token; it opens nothing from a second later. Raises AlreadyRevoked."""
    row = Token.objects.select_for_update(of=("self",)).get(pk=token.pk)
    if row.revoked_at is not None:
        raise AlreadyRevoked(
            f"{row} was revoked at {row.revoked_at:%Y-%m-%d %H:%M:%S} UTC already."
        )
    row.revoked_at = now
    row.save(update_fields=["revoked_at"])
    audit(
        who=by,
        verb="token.revoke",
        subject=f"token {row.name}",
        reason=reason,
        before={"prefix": row.prefix, "revoked_at": None},
        after={"prefix": row.prefix, "revoked_at": now},
        now=now,
    )
    return row


def note_token_use(token: Token, *, now: datetime) -> None:
    """Note that a token was used; written at most once a minute, so that polls stay reads."""
    if token.last_used_at is None or now - token.last_used_at >= TOKEN_USE_NOTED:
        Token.objects.filter(pk=token.pk).update(last_used_at=now)
        token.last_used_at = now


# --- the audit ------------------------------------------------------------------------------


def audit(
    *,
    who: str,
    verb: str,
    subject: str,
    reason: str = "",
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
    request_id: str = "",
    now: datetime,
) -> None:
    """Keep who did what, when and why, for good.

    Inside the caller's transaction, which must exist, so that a write and its line
    stand or fall together.
    """
    _assert_in_transaction()
    AuditEntry.objects.create(
        at=now,
        who=who,
        verb=verb,
        subject=subject,
        reason=reason,
        before=_plain(before),
        after=_plain(after),
        request_id=request_id or current_request_id.get(),
    )


def _plain(value: Mapping[str, Any] | None) -> Any:
    """Return the mapping with times and the like spelled as JSON can hold them."""
    return None if value is None else json.loads(json.dumps(value, cls=DjangoJSONEncoder))


# --- shared ---------------------------------------------------------------------------------


def _lock_cells(ids: Collection[int]) -> list[Cell]:
    """Lock these cells until commit, always in id order, and return them read afresh.

    FOR NO KEY UPDATE: a join or a report, whose row names the cell, doesn't queue behind it.
    SQLite ignores row locks; there a transaction is the one writer from its start.
    """
    rows = Cell.objects.select_for_update(no_key=True).filter(pk__in=ids).order_by("pk")
    return list(rows)


def _lock_counter() -> Counter:
    """Lock the counter row until commit. After the cells, never before."""
    return Counter.objects.select_for_update().get()


def _assert_in_transaction() -> None:
    if not connection.in_atomic_block:
        raise RuntimeError("This belongs into the transaction of what it is part of")


def _insert(row: Row, taken: Refused) -> Row:
    """Insert the row, or raise `taken`: the unique constraint decides between two at once."""
    try:
        with transaction.atomic():
            row.save(force_insert=True)
    except IntegrityError as error:
        raise taken from error
    return row


def _taken(what: str, slug: str) -> str:
    return f"There is a {what} {slug} already. Choose another name, or use that one."


def _check_quota(tokens_per_minute: int) -> None:
    if not 0 < tokens_per_minute < 2**53:
        raise BadQuota(
            f"A quota of {tokens_per_minute} tokens per minute serves nobody. Enter what the "
            "provider grants this cell."
        )


def check_reason(reason: str) -> None:
    """Raise ReasonMissing unless `reason` says something."""
    if not reason.strip():
        raise ReasonMissing("Say why, in a sentence: whoever reads the log later needs it.")
