"""What runtimes and gateways are told: who lives where, and which turns a cell takes."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Literal

from django.db import transaction
from django.db.models import Q, QuerySet

from durable.errors import Refused
from tenants import queries
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


class TenantIsSplit(Refused):
    """The tenant is split already, so no cell takes all of its turns."""


class CanNotSplit(Refused):
    """The tenant's home still takes new sessions, or both sides would be one cell."""


def publish(
    tenant: Tenant, cell: Cell, *, accepts: Literal["all", "none", "existing", "new"]
) -> int:
    """Publish which turns the cell takes of the tenant; return the policy version that says so.

    Inside the caller's transaction, which must exist. Raises NotHere where the cell has no
    entry of the tenant or only a tombstone: a late caller must not bring it back to life there.
    Nor may it open a cell that was only announced: only the home takes `all` or `existing`, and
    only the far side of a split takes `new`. Raises TenantIsSplit for `all` during a split.
    """
    assert_in_transaction()
    chosen = Accepts(accepts)
    if chosen == Accepts.MOVED:
        raise ValueError(f"{accepts} is not published by itself")
    # The lock is held until commit, so commit order is version order: who reads version 8 finds
    # everything that 7 changed.
    [locked] = lock_cells({cell.pk})
    # Holds still as far as it is this cell's: whoever makes it, or no longer lets it be, the
    # home or a split's far side locks this cell first.
    placement = Placement.objects.get(tenant=tenant)
    may = {
        Accepts.ALL: placement.cell_id,
        Accepts.EXISTING: placement.cell_id,
        Accepts.NEW: placement.split_cell_id,
        Accepts.NONE: locked.pk,
    }[chosen]
    entries = PolicyEntry.objects.filter(cell=locked, tenant=tenant).exclude(accepts=Accepts.MOVED)
    if may != locked.pk or not entries.exists():
        raise NotHere(
            f"{locked} does not own {tenant}, so nothing can be published for it there. Look up "
            "where it lives now."
        )
    if chosen == Accepts.ALL and placement.split_cell_id is not None:
        raise TenantIsSplit(
            f"{tenant} is split between two cells, so neither may take all of its turns. End the "
            "split first."
        )
    version = _next_version(locked)
    entries.update(version=version, accepts=chosen)
    return version


def announce(tenant: Tenant, cell: Cell, store: Store) -> int:
    """Tell a cell of a tenant that may come to it; return the policy version that says so.

    Its instances then know the tenant's scope and store before anything moves, and take no turn.
    Inside the caller's transaction, which must exist. Announced already and nothing changed
    since: no version is raised. An entry of the home, or of a side of a split, is left alone.
    Raises PlacementChanged.
    """
    assert_in_transaction()
    placement, cells = _hold(tenant, cell)
    locked = cells[cell.pk]
    entry = PolicyEntry.objects.filter(cell=locked, tenant=tenant).first()
    if entry is not None and _takes_turns(placement, entry):
        return entry.version
    home = PolicyEntry.objects.get(cell=placement.cell_id, tenant=tenant)
    announced = {
        "accepts": Accepts.NONE,
        "moved_to": None,
        "placement_version": placement.placement_version,
        "store": store,
        "runner_generation": home.runner_generation,
        "document": _document(tenant, store, home=cells[placement.cell_id]),
    }
    if entry is not None and all(getattr(entry, key) == said for key, said in announced.items()):
        return entry.version
    return _put(tenant, locked, announced)


def withdraw(tenant: Tenant, cell: Cell) -> None:
    """Take an announcement back: the cell keeps a tombstone that names the home.

    Inside the caller's transaction, which must exist. Does nothing where nothing is announced: at
    the home, at a side of a split, at a tombstone. Raises PlacementChanged.
    """
    assert_in_transaction()
    placement, cells = _hold(tenant, cell)
    entry = PolicyEntry.objects.filter(cell=cell, tenant=tenant).first()
    if entry is None or entry.accepts == Accepts.MOVED or _takes_turns(placement, entry):
        return
    home = cells[placement.cell_id]
    _bury(tenant, cells[cell.pk], home, placement.placement_version)


def split(tenant: Tenant, *, cell: Cell, store: Store, by: str, reason: str, now: datetime) -> int:
    """Let new sessions begin at (cell, store) while the home serves those that it knows.

    Return the placement_version that says so. Inside the caller's transaction, which must
    exist. Call it once nothing can be born at the home any more: it has to accept `existing`, and
    `queries.older_proof` of that version has held. Split so already, both sides are opened again
    and the placement_version stays. Raises CanNotSplit, TenantIsSplit, PlacementChanged.
    """
    assert_in_transaction()
    placement, cells = _hold(tenant, cell)
    home, target = cells[placement.cell_id], cells[cell.pk]
    if home.pk == target.pk:
        raise CanNotSplit(
            f"{tenant} lives in {home} already, and a cell has one entry of a tenant, so the two "
            "sides of a split need two cells. Choose another cell."
        )
    entry = PolicyEntry.objects.get(cell=home, tenant=tenant)
    if placement.split_cell_id is not None:
        if (placement.split_cell_id, placement.split_store_id) != (cell.pk, store.pk):
            raise TenantIsSplit(
                f"{tenant} is split towards {placement.split_cell} already. End that split first."
            )
        if entry.accepts != Accepts.EXISTING:
            publish(tenant, home, accepts="existing")
        if not PolicyEntry.objects.filter(cell=target, tenant=tenant, accepts=Accepts.NEW).exists():
            publish(tenant, target, accepts="new")
        return placement.placement_version
    if entry.accepts != Accepts.EXISTING:
        # One session could then be born on both sides.
        raise CanNotSplit(
            f"{home} accepts {entry.accepts!r} of {tenant}, so a session could begin on both "
            "sides. Publish `existing` there first and wait until older turns have ended."
        )
    counter = lock_counter()
    raise_placement(counter)
    sides = {
        "existing": {"cell": home.slug, "store": placement.store.key},
        "new": {"cell": target.slug, "store": store.key},
    }
    _put(
        tenant,
        home,
        {
            "placement_version": counter.placement_version,
            "document": entry.document | {"split": True, "sides": sides},
        },
    )
    _put(
        tenant,
        target,
        {
            "accepts": Accepts.NEW,
            "moved_to": None,
            "placement_version": counter.placement_version,
            "store": store,
            "runner_generation": entry.runner_generation,
            "document": _document(tenant, store, home=home, sides=sides),
        },
    )
    Placement.objects.filter(pk=placement.pk).update(
        split_cell=target,
        split_store=store,
        placement_version=counter.placement_version,
        feed_version=counter.feed_version,
    )
    note_placement(tenant, home, placement.store, counter, by=by, reason=reason, now=now)
    return counter.placement_version


def split_anew(tenant: Tenant, *, by: str, reason: str, now: datetime) -> int:
    """Open both sides of a split again, as another placement; return its placement_version.

    For a far side that was closed while sessions went from it to the home. A turn that the home
    did not know before may still be on its way there, for as long as a gateway stalls: on the old
    version it would be served by what was left behind. Refused as moved, it asks the home anew.
    Inside the caller's transaction, which must exist. Raises CanNotSplit where nothing is split,
    PlacementChanged.
    """
    assert_in_transaction()
    placement, cells = _hold(tenant)
    if placement.split_cell_id is None:
        raise CanNotSplit(f"{tenant} is not split, so there are no two sides to be opened again.")
    home, counter = cells[placement.cell_id], lock_counter()
    raise_placement(counter)
    for cell, accepts in ((home, Accepts.EXISTING), (cells[placement.split_cell_id], Accepts.NEW)):
        said = {"accepts": accepts, "placement_version": counter.placement_version}
        _put(tenant, cell, said)
    Placement.objects.filter(pk=placement.pk).update(
        placement_version=counter.placement_version, feed_version=counter.feed_version
    )
    note_placement(tenant, home, placement.store, counter, by=by, reason=reason, now=now)
    return counter.placement_version


def unsplit(tenant: Tenant, *, by: str, reason: str, now: datetime) -> int:
    """End a split towards the home, which accepts all turns again; return the placement_version.

    The far side keeps a tombstone that names the home. Inside the caller's transaction, which
    must exist. Not split, it is `place` at the home. Raises PlacementChanged.
    """
    assert_in_transaction()
    placement, cells = _hold(tenant)
    return place(
        tenant,
        cell=cells[placement.cell_id],
        store=placement.store,
        by=by,
        reason=reason,
        now=now,
    )


def place(tenant: Tenant, *, cell: Cell, store: Store, by: str, reason: str, now: datetime) -> int:
    """Make (cell, store) the tenant's home for routers; return the placement_version that says so.

    Inside the caller's transaction, which must exist. The target cell accepts all turns from
    here on; each cell that it left keeps a tombstone that names the new one, and a split has
    ended. Placed where it is already and not split, it keeps its placement_version. Raises
    PlacementChanged if somebody else placed it meanwhile.
    """
    assert_in_transaction()
    placement, cells = _hold(tenant, cell)
    target = cells[cell.pk]
    entry = PolicyEntry.objects.get(cell=placement.cell_id, tenant=tenant)
    at_home = placement.cell_id == cell.pk and placement.store_id == store.pk
    if at_home and placement.split_cell_id is None:
        if entry.accepts != Accepts.ALL:
            publish(tenant, target, accepts="all")
        return placement.placement_version
    counter = lock_counter()
    raise_placement(counter)
    # First the tombstones, then the new owner: constraints let only one cell own a tenant, and
    # only one take its new sessions.
    for left in (placement.cell_id, placement.split_cell_id):
        if left is not None and left != cell.pk:
            _bury(tenant, cells[left], target, counter.placement_version)
    own(tenant, target, store, counter.placement_version, generation=entry.runner_generation)
    reached = placement.intended_cell_id == cell.pk
    Placement.objects.filter(pk=placement.pk).update(
        cell=target,
        store=store,
        split_cell=None,
        split_store=None,
        intended_cell=None if reached else placement.intended_cell_id,
        placement_version=counter.placement_version,
        feed_version=counter.feed_version,
    )
    note_placement(tenant, target, store, counter, by=by, reason=reason, now=now)
    return counter.placement_version


def publish_part(cell: Cell, part: str, value: Any) -> int:
    """Publish what a cell is told besides its tenants, one named part; return the policy version.

    Inside the caller's transaction, which must exist. Other parts stay; what the cell was told
    already raises no version.
    """
    assert_in_transaction()
    [locked] = lock_cells({cell.pk})
    if part in locked.document and locked.document[part] == value:
        return locked.document_version
    locked.document_version = _next_version(locked)
    locked.document = locked.document | {part: value}
    locked.save(update_fields=["document", "document_version"])
    return locked.document_version


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
    _put(
        tenant,
        locked,
        {
            "accepts": Accepts.ALL,
            "moved_to": None,
            "placement_version": placement_version,
            "store": store,
            "runner_generation": generation,
            "document": _document(tenant, store),
        },
    )


def _hold(tenant: Tenant, *cells: Cell) -> tuple[Placement, dict[int, Cell]]:
    """Lock the cells that a tenant lives in, and these; return its placement and the cells by id.

    Raises PlacementChanged if it moved before they were locked.
    """
    was = Placement.objects.get(tenant=tenant)
    ids = {was.cell_id, was.split_cell_id, *(cell.pk for cell in cells)}
    locked = {one.pk: one for one in lock_cells({pk for pk in ids if pk is not None})}
    # Only now does the row hold still: every writer of it locks its cells first.
    placement = Placement.objects.select_related("store", "split_cell").get(tenant=tenant)
    if (placement.cell_id, placement.split_cell_id) != (was.cell_id, was.split_cell_id):
        raise PlacementChanged(f"{tenant} has just been placed elsewhere. Try again.")
    return placement, locked


def hold_entries(tenant: Tenant) -> None:
    """Lock the cells that have a living entry of a tenant: its home, and whoever waits for it.

    What is published of the tenant then holds still until commit. Raises PlacementChanged if
    another cell was told of it meanwhile.
    """
    assert_in_transaction()
    cells = _living(tenant).values_list("cell_id", flat=True)
    before = set(cells.all())
    lock_cells(before)
    # Only now does the list hold still as far as it is these cells': a new one is written by
    # whoever holds the home.
    if set(cells.all()) != before:
        raise PlacementChanged(f"{tenant} has just been announced or placed elsewhere. Try again.")


def republish(tenant: Tenant) -> None:
    """Tell every cell that `hold_entries` has locked of the tenant's present limits."""
    present = _limits_now(tenant)
    for entry in _living(tenant).select_related("cell").order_by("cell_id"):
        _put(tenant, entry.cell, {"document": entry.document | present})


def _living(tenant: Tenant) -> QuerySet[PolicyEntry]:
    return PolicyEntry.objects.filter(tenant=tenant).exclude(accepts=Accepts.MOVED)


def _takes_turns(placement: Placement, entry: PolicyEntry) -> bool:
    """Return whether an entry is of the home or of a side of a split, open or fenced."""
    return entry.cell_id in (placement.cell_id, placement.split_cell_id)


def _put(tenant: Tenant, locked: Cell, values: dict[str, Any]) -> int:
    """Write the tenant's entry of a locked cell; return the policy version that stamps it."""
    version = _next_version(locked)
    PolicyEntry.objects.update_or_create(
        cell=locked, tenant=tenant, defaults={**values, "version": version}
    )
    return version


def _bury(tenant: Tenant, locked: Cell, home: Cell, placement_version: int) -> None:
    """Make the tenant's entry of a locked cell a tombstone that names its home."""
    entry = PolicyEntry.objects.get(cell=locked, tenant=tenant)
    not_split = {"split": False, "sides": None, "home_cell": None}
    _put(
        tenant,
        locked,
        {
            "accepts": Accepts.MOVED,
            "moved_to": home,
            "placement_version": placement_version,
            "document": entry.document | not_split | {"moved_to": home.slug},
        },
    )


def _next_version(locked: Cell) -> int:
    """Raise the policy version of a cell whose row this transaction has locked; return it."""
    locked.policy_version += 1
    locked.save(update_fields=["policy_version"])
    return locked.policy_version


def _document(
    tenant: Tenant,
    store: Store,
    *,
    home: Cell | None = None,
    sides: dict[str, dict[str, str]] | None = None,
) -> dict[str, Any]:
    """Return the part of an entry that is sent as it is kept; `home` is where not this cell is."""
    return {
        "tenant": tenant.slug,
        "agent": tenant.agent.slug,
        "app_name": tenant.app_name,
        "moved_to": None,
        "home_cell": None if home is None else home.slug,
        # True at the home alone: unknown sessions are then the far side's.
        "split": False,
        "sides": sides,
        "store": {"key": store.key, "kind": store.kind},
        **_limits_now(tenant),
    }


def _limits_now(tenant: Tenant) -> dict[str, Any]:
    """Return the part of an entry that says how much a tenant may use.

    Read afresh, under the lock of a cell that is told of the tenant: a caller's row may be from
    before the limits were changed, and a move that publishes it would undo them.
    """
    present = Tenant.objects.select_related("trial").get(pk=tenant.pk)
    scope = queries.scope_of(tenant)
    return {
        "tier": str(present.tier),
        "scope": _limits(scope, present.budget_spent_until),
        # Of the same shape: what it would have refused is counted, and served.
        "trial": None if present.trial is None else _limits(present.trial, None),
    }


def _limits(scope: Scope, spent_until: datetime | None) -> dict[str, Any]:
    return {
        "version": scope.version,
        "max_concurrent_runs": scope.max_concurrent_runs,
        "runs_per_second": scope.runs_per_second,
        "daily_token_budget": scope.daily_token_budget,
        "max_model_calls_per_run": scope.max_model_calls_per_run,
        "allowed_tools": scope.allowed_tools,
        "exact_budget": scope.exact_budget,
        # A runtime lets go by itself afterwards: a control plane that is away at the tenant's
        # midnight must not keep it refused.
        "budget_spent_until": None if spent_until is None else spent_until.isoformat(),
        "weight": scope.weight,
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
