"""Plain builders: rows with the ordinary values, by the services that people use."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from migrations_app.models import TenantMigration
from tenants import services
from tenants.models import Cell, Region, Store, Tenant

BY = "ada"


@dataclass(frozen=True)
class Cast:
    """Two cells and two stores of one region; everybody lives in (one, store one)."""

    region: Region
    cell: Cell
    other_cell: Cell
    store: Store
    other_store: Store
    acme: Tenant  # small
    bolt: Tenant  # large, of the same agent as acme
    core: Tenant  # of another agent; must see nothing of the others


def cast(*, now: datetime) -> Cast:
    """Make the cast. Its stores' addresses come from variables that no test has set yet."""
    home = region(now=now)
    one, two = cell("cell-eu1-a", region=home, now=now), cell("cell-eu1-b", region=home, now=now)
    first = store("store-eu1-a", region=home, now=now)
    second = store("store-eu1-b", region=home, now=now)
    return Cast(
        region=home,
        cell=one,
        other_cell=two,
        store=first,
        other_store=second,
        acme=tenant("acme", cell=one, store=first, now=now),
        bolt=tenant("bolt", cell=one, store=first, weight=4.0, now=now),
        core=tenant("core", agent="billing", cell=one, store=first, now=now),
    )


def region(slug: str = "eu1", *, now: datetime) -> Region:
    """Make a region."""
    return services.add_region(slug, name=slug.upper(), by=BY, now=now)


def cell(
    slug: str,
    *,
    region: Region,
    now: datetime,
    tokens_per_minute: int = 5_000_000,
    verified: bool = True,
) -> Cell:
    """Make a cell with room in its quota, verified unless a test is about that."""
    made = services.add_cell(
        slug, region=region, quota_tokens_per_minute=tokens_per_minute, by=BY, now=now
    )
    if verified:
        services.verify_quota(made, tokens_per_minute=tokens_per_minute, by=BY, now=now)
        made.refresh_from_db()
    return made


def store(
    key: str, *, region: Region, now: datetime, kind: str = "adk-sql", address_from: str = ""
) -> Store:
    """Make a store; its address comes from `env:STORE_<KEY>` unless a test names another."""
    return services.add_store(
        key,
        region=region,
        kind=kind,
        address_from=address_from or f"env:{key.upper().replace('-', '_')}",
        by=BY,
        now=now,
    )


def tenant(
    slug: str,
    *,
    cell: Cell,
    store: Store,
    now: datetime,
    agent: str = "support",
    weight: float = 1.0,
) -> Tenant:
    """Make a tenant of an agent, such as support.acme, placed and published."""
    return services.add_tenant(
        slug,
        name=slug.title(),
        app_name=f"{agent}.{slug}",
        cell=cell,
        store=store,
        weight=weight,
        by=BY,
        now=now,
    )


def unique(stem: str) -> str:
    """Return a name that no other test uses."""
    return f"{stem}-{secrets.token_hex(4)}"


def move(tenant: Tenant, *, cast: Cast, now: datetime, **columns: Any) -> TenantMigration:
    """Make the row of a move to the cast's other cell and store; its stores are not looked at."""
    placement = tenant.placement
    return TenantMigration.objects.create(
        tenant=tenant,
        source_cell=placement.cell,
        source_store=placement.store,
        target_cell=cast.other_cell,
        target_store=cast.other_store,
        started_at=now,
        started_by=BY,
        phase_since=now,
        due_at=now,
        **columns,
    )
