"""What runtimes and gateways are told: who lives where, and which turns a cell takes."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Literal

from django.db import transaction
from django.db.models import Q

from durable.errors import Refused
from tenants.domain.fence import Accepts
from tenants.models import (
    Cell,
    Counter,
    DirtyLine,
    Placement,
    PlacementChange,
    PolicyEntry,
    Scope,
    Store,
    Tenant,
)
from tenants.services.rows import assert_in_transaction, lock_cells, lock_counter

# Rows of one statement: what a look of a busy tenant's soak may hold up.
FORGOTTEN_AT_ONCE = 10_000


class NotHere(Refused):
    """The cell does not own the tenant, so nothing may be published for it there."""


class PlacementChanged(Refused):
    """The tenant was placed elsewhere while its cells were being locked."""

    retry_after_seconds = 1


def publish(tenant: Tenant, cell: Cell, *, accepts: Literal["all", "none"]) -> int:
    """Publish which turns the cell takes of the tenant; return the policy version that says so.

    Inside the caller's transaction, which must exist. Raises NotHere where the cell has no
    entry of the tenant or only a tombstone: a late caller must not bring it back to life there.
    """
    assert_in_transaction()
    chosen = Accepts(accepts)
    if chosen not in {Accepts.ALL, Accepts.NONE}:
        raise ValueError(f"{accepts} is not published by itself")
    # The lock is held until commit, so commit order is version order: who reads version 8 finds
    # everything that 7 changed.
    [locked] = lock_cells({cell.pk})
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
    assert_in_transaction()
    was = Placement.objects.get(tenant=tenant)
    cells = {one.pk: one for one in lock_cells({was.cell_id, cell.pk})}
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
    counter = lock_counter()
    raise_placement(counter)
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
    own(tenant, target, store, counter.placement_version, generation=entry.runner_generation)
    reached = placement.intended_cell_id == cell.pk
    Placement.objects.filter(pk=placement.pk).update(
        cell=target,
        store=store,
        intended_cell=None if reached else placement.intended_cell_id,
        placement_version=counter.placement_version,
        feed_version=counter.feed_version,
    )
    note_placement(tenant, target, store, counter, by=by, reason=reason, now=now)
    return counter.placement_version


@transaction.atomic
def hurry(cells: Iterable[Cell], *, until: datetime) -> None:
    """Let the runtimes of these cells poll at the fast cadence until then.

    A later end than the one asked for stays: another move may need it.
    """
    ids = {cell.pk for cell in cells}
    lock_cells(ids)
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


def forget_served(tenant: Tenant, *, before: datetime) -> None:
    """Drop a bounded part of what was reported as served of the tenant before then.

    A soak tracks its tenant for days; the sweep takes only whoever is not tracked any more.
    """
    lines = DirtyLine.objects.filter(tenant=tenant, at__lt=before)[:FORGOTTEN_AT_ONCE]
    DirtyLine.objects.filter(pk__in=list(lines.values_list("pk", flat=True))).delete()


def own(
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


def _next_version(locked: Cell) -> int:
    """Raise the policy version of a cell whose row this transaction has locked; return it."""
    locked.policy_version += 1
    locked.save(update_fields=["policy_version"])
    return locked.policy_version


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


def raise_placement(counter: Counter) -> None:
    """Raise both numbers of the locked counter row: somebody's home changes, so the feed does."""
    counter.placement_version += 1
    counter.feed_version += 1
    counter.save(update_fields=["placement_version", "feed_version"])


def note_placement(
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
