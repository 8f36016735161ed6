"""Who there is: regions, cells, stores and tenants are registered here."""

from __future__ import annotations

import math
import zoneinfo
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from django.db import transaction
from django.db.models import Q

from durable.errors import Refused
from tenants.domain import names
from tenants.models import Agent, Cell, Placement, Region, Scope, Store, Tenant
from tenants.services.auditing import audit, check_reason, plain
from tenants.services.publishing import note_placement, own, raise_placement
from tenants.services.rows import insert, lock_cells, lock_counter, taken


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


@transaction.atomic
def add_region(slug: str, *, name: str, by: str, now: datetime) -> Region:
    """Register a region and return it.

    Raises BadSlug, BadName, SlugTaken.
    """
    names.check_slug(slug, what="region", longest=40)
    names.check_name(name, what="region")
    region = insert(Region(slug=slug, name=name), SlugTaken(taken("region", slug)))
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
    cell = insert(
        Cell(slug=slug, region=region, url=url, quota_tokens_per_minute=quota_tokens_per_minute),
        SlugTaken(taken("cell", slug)),
    )
    after = {"region": region.slug, "url": url, "quota_tokens_per_minute": quota_tokens_per_minute}
    audit(who=by, verb="cell.add", subject=f"cell {slug}", after=after, now=now)
    return cell


@transaction.atomic
def verify_quota(
    cell: Cell,
    *,
    tokens_per_minute: int,
    requests_per_minute: int | None = None,
    by: str,
    now: datetime,
) -> Cell:
    """Record that somebody looked the cell's model quota up at the provider; return the cell.

    Without `requests_per_minute` what is known of that stays. Raises BadQuota.
    """
    _check_quota(tokens_per_minute)
    if requests_per_minute is not None:
        _check_quota(requests_per_minute, "requests")
    [locked] = lock_cells({cell.pk})
    names = ("quota_tokens_per_minute", "quota_requests_per_minute", "quota_verified_at")
    before = {name: getattr(locked, name) for name in names}
    locked.quota_tokens_per_minute = tokens_per_minute
    if requests_per_minute is not None:
        locked.quota_requests_per_minute = requests_per_minute
    locked.quota_verified_at = now
    locked.quota_verified_by = by
    locked.save(update_fields=[*names, "quota_verified_by"])
    after = {name: getattr(locked, name) for name in names}
    subject = f"cell {locked.slug}"
    audit(who=by, verb="cell.verify_quota", subject=subject, before=before, after=after, now=now)
    return locked


@transaction.atomic
def set_cell_url(cell: Cell, *, url: str, by: str, reason: str = "", now: datetime) -> Cell:
    """Change where gateways forward this cell's turns to; return the cell.

    It moves nobody, so it raises feed_version and no placement_version. Raises BadUrl.
    """
    names.check_url(url)
    [locked] = lock_cells({cell.pk})
    before = locked.url
    if before != url:
        counter = lock_counter()
        counter.feed_version += 1
        counter.save(update_fields=["feed_version"])
        locked.url = url
        locked.save(update_fields=["url"])
        Placement.objects.filter(Q(cell=locked) | Q(split_cell=locked)).update(
            feed_version=counter.feed_version
        )
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
    key: str,
    *,
    region: Region,
    kind: str,
    address_from: str,
    artifacts_from: str = "",
    memory_from: str = "",
    by: str,
    now: datetime,
) -> Store:
    """Register a store of sessions by reference and return it; nothing is opened yet.

    `address_from` is "env:NAME" or "file:/path": the address holds a password and is never
    kept. So are, or "" for none, the artifact service and the memory service beside the sessions.
    Raises BadSlug, UnknownStoreKind, NotAReference, SlugTaken.
    """
    names.check_slug(key, what="store")
    names.check_kind(kind)
    names.check_address_from(address_from)
    beside = _beside(artifacts_from, memory_from)
    store = insert(
        Store(key=key, region=region, kind=kind, address_from=address_from, **beside),
        SlugTaken(taken("store", key)),
    )
    after = {"region": region.slug, "kind": kind, "address_from": address_from, **beside}
    audit(who=by, verb="store.add", subject=f"store {key}", after=after, now=now)
    return store


@transaction.atomic
def set_store_services(
    store: Store,
    *,
    artifacts_from: str,
    memory_from: str,
    by: str,
    reason: str = "",
    now: datetime,
) -> Store:
    """Say where the artifact and memory services beside a store are ("" for none); return it.

    Whoever calls this makes sure that no move goes by what stood there. Raises NotAReference.
    """
    beside = _beside(artifacts_from, memory_from)
    locked = Store.objects.select_for_update().get(pk=store.pk)
    before = {name: getattr(locked, name) for name in beside}
    Store.objects.filter(pk=locked.pk).update(**beside)
    subject = f"store {locked.key}"
    audit(
        who=by,
        verb="store.set_services",
        subject=subject,
        reason=reason,
        before=before,
        after=beside,
        now=now,
    )
    locked.refresh_from_db()
    return locked


def _beside(artifacts_from: str, memory_from: str) -> dict[str, str]:
    """Return a store's further services as columns. Raises NotAReference."""
    beside = {"artifacts_from": artifacts_from, "memory_from": memory_from}
    for reference in beside.values():
        if reference:
            names.check_address_from(reference)
    return beside


def note_survey(store: Store, survey: Mapping[str, Any], *, now: datetime) -> None:
    """Keep what looking at a store found, for people; the newest look stays.

    One UPDATE, in the caller's transaction if there is one. Nothing changes but what is known,
    so the audit has no line of it.
    """
    Store.objects.filter(Q(surveyed_at=None) | Q(surveyed_at__lte=now), pk=store.pk).update(
        survey=plain(survey), surveyed_at=now
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
    [locked] = lock_cells({cell.pk})
    if locked.quota_verified_at is None:
        raise QuotaOnlyAssumed(
            f"The model quota of cell {locked.slug} is only assumed, so nobody knows whether it "
            "has room. Look it up at the provider and enter it as verified first."
        )
    counter = lock_counter()
    agent, _ = Agent.objects.get_or_create(slug=names.agent_of(app_name))
    if Tenant.objects.filter(app_name=app_name).exists():
        raise AppNameTaken(
            f"Another tenant has the app name {app_name!r}, and sessions are told apart by it. "
            "Give each tenant a name of its own."
        )
    tenant = insert(
        Tenant(
            slug=slug,
            name=name,
            app_name=app_name,
            agent=agent,
            time_zone=time_zone,
            weight=weight,
            tier=tier,
        ),
        SlugTaken(taken("tenant", slug)),
    )
    Scope.objects.create(tenant=tenant, version=1, at=now, by=by, reason="Onboarded")
    raise_placement(counter)
    Placement.objects.create(
        tenant=tenant,
        cell=locked,
        store=store,
        placement_version=counter.placement_version,
        feed_version=counter.feed_version,
    )
    own(tenant, locked, store, counter.placement_version, generation=1)
    note_placement(tenant, locked, store, counter, by=by, reason="Onboarded", now=now)
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


@transaction.atomic
def set_internal(tenant: Tenant, *, internal: bool, by: str, reason: str, now: datetime) -> Tenant:
    """Say whether `tenant` is ours, with no customer behind it; return it.

    Whole moves may be rehearsed on an internal tenant, its fences closed for practice.
    """
    check_reason(reason)
    locked = Tenant.objects.select_for_update().get(pk=tenant.pk)
    before, locked.internal = locked.internal, internal
    locked.save(update_fields=["internal"])
    audit(
        who=by,
        verb="tenant.set_internal",
        subject=f"tenant {locked.slug}",
        reason=reason,
        before={"internal": before},
        after={"internal": internal},
        now=now,
    )
    return locked


def _check_quota(per_minute: int, unit: str = "tokens") -> None:
    if not 0 < per_minute < 2**53:
        raise BadQuota(
            f"A quota of {per_minute} {unit} per minute serves nobody. Enter what the provider "
            "grants this cell."
        )
