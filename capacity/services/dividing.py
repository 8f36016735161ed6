"""Dividing tenants' limits over the instances that serve them, every few seconds.

What is read is read without locks, for reports must not queue behind arithmetic. The transaction
that writes locks the instances and looks whether anything that was counted on has changed; if so,
it writes nothing and the next round divides anew.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.db import transaction
from django.db.models import F, Q

from capacity import queries
from capacity.domain.division import (
    RATE_UNITS,
    Ask,
    Member,
    Redivided,
    redivide,
    standing,
)
from tenants import queries as tenants_queries
from tenants.domain.fence import Accepts, GoneWhy
from tenants.models import (
    Cell,
    Grants,
    Placement,
    PolicyEntry,
    RuntimeInstance,
    Tenant,
    UsageLine,
)

# Demand is what the reports of so many seconds said: long enough to be a rate, short enough to
# move.
DEMAND_SECONDS = 15.0
# An instance that joined and has no shares yet is looked for so long; then the slow rounds do.
NEWCOMER = timedelta(seconds=60)
# A process that joined anew, or was declared dead, may run turns for its longest, a day at most.
GONE_COUNTED = timedelta(days=1)
# After so long documents are told again (`Member.old`).
DOCUMENT_LASTS = timedelta(days=1)
# One message divides for so long; what is left is the next one's.
ROUND_SECONDS = 4.0


@dataclass(frozen=True, slots=True)
class _Limited:
    """A tenant with a limit, as one cell was told of it."""

    tenant: str
    accepts: str
    # The cell owns the tenant, or is the far side of its split; open or fenced.
    owns: bool
    runs_per_second: float | None
    max_concurrent_runs: int | None
    daily_token_budget: int | None


@dataclass(slots=True)
class _Memory:
    """What a worker need not read again. Losing it costs a read, never a decision."""

    # Cell -> the version that it was read at, and its limited tenants.
    limited: dict[int, tuple[str, list[_Limited]]] = field(default_factory=dict)
    # Cells divided together -> what they looked like when there was nothing to do.
    at_rest: dict[tuple[int, ...], Any] = field(default_factory=dict)


_memory = _Memory()


def allocate(*, now: datetime) -> int:
    """Divide the limits of every cell anew; return how many documents were made.

    Bounded in time: a later call begins with another cell.
    """
    alive = RuntimeInstance.objects.filter(gone_at=None)
    cells = sorted(set(alive.values_list("cell_id", flat=True)))
    if not cells:
        return 0
    # Every round begins elsewhere, so that none is always last.
    first = int(now.timestamp()) // 5 % len(cells)
    return _divide_all([*cells[first:], *cells[:first]], now)


def allocate_soon(*, now: datetime) -> int:
    """Divide where an instance waits for its first shares or a tenant moves; return as `allocate`.

    Between the rounds: a newcomer refuses turns until then, and so does the cell that a move opens.
    """
    waiting = Q(
        instances__gone_at=None,
        instances__grants_number=0,
        instances__reported_at__gt=now - NEWCOMER,
        instances__joined_at__gt=now - NEWCOMER,
    )
    cells = Cell.objects.filter(waiting | Q(fast_until__gt=now)).order_by("pk")
    return _divide_all(list(dict.fromkeys(cells.values_list("pk", flat=True))), now)


def divide(cell: Cell, *, now: datetime) -> int:
    """Divide the limits of a cell's tenants over its instances; return how many documents it made.

    Cells between which a tenant is split share its limit, so they are divided together.
    """
    return _divide(_together(cell.pk), now)


def _divide_all(cells: Collection[int], now: datetime) -> int:
    until = time.monotonic() + ROUND_SECONDS
    made, done = 0, set[int]()
    for cell in cells:
        if cell in done:
            continue
        if time.monotonic() >= until:
            break
        together = _together(cell)
        done |= set(together)
        made += _divide(together, now)
    return made


def _together(cell: int) -> tuple[int, ...]:
    """Return the cells that are divided with this one: those that a split joins, in id order."""
    splits = Placement.objects.exclude(split_cell=None).values_list("cell_id", "split_cell_id")
    pairs = list(splits.distinct())
    found, more = {cell}, True
    while more:
        further = {one for pair in pairs if found & set(pair) for one in pair} - found
        found |= further
        more = bool(further)
    return tuple(sorted(found))


# --- what is read ---------------------------------------------------------------------------


def _divide(cells: tuple[int, ...], now: datetime) -> int:
    limited = _limited(cells)
    rows = list(_alive(cells))
    if not rows:
        return 0
    if not any(limited.values()) and not any(row.grants_number for row in rows):
        return 0
    members = _members(cells, rows, now)
    demand = _demand(rows)
    quiet = not demand and not any(row.in_flight for row in rows)
    # A budget begins anew at some tenant's midnight, which is at a quarter of an hour anywhere.
    fenced = _fenced(limited)
    picture = (
        tuple(_memory.limited[cell][0] for cell in cells),
        fenced,
        [(one.id, one.standing, one.heard, number) for one, number in members],
        int(now.timestamp()) // 900,
    )
    if quiet and _memory.at_rest.get(cells) == picture:
        return 0
    asks = _asks(limited, fenced, now)
    counted = [one for one, _ in members]
    _read_documents(counted, now)
    for one in counted:
        one.demand = demand.get(one.id, {})
    changed = redivide(counted, asks)
    if not changed:
        if quiet:
            _memory.at_rest[cells] = picture
        return 0
    _memory.at_rest.pop(cells, None)
    return _write(rows, changed, now)


def _limited(cells: Iterable[int]) -> dict[int, list[_Limited]]:
    """Return each cell's tenants that have a limit, by what the cell was last told."""
    epoch = tenants_queries.epoch()
    versions = dict(Cell.objects.filter(pk__in=cells).values_list("pk", "policy_version"))
    for cell, number in versions.items():
        # The version was read first: of entries that changed since, it is too old, and they are
        # read again next time.
        version = f"{epoch}.{number}"
        known = _memory.limited.get(cell)
        if known is None or known[0] != version:
            _memory.limited[cell] = version, _read_limited(cell)
    return {cell: _memory.limited[cell][1] for cell in versions}


def _read_limited(cell: int) -> list[_Limited]:
    entries = PolicyEntry.objects.filter(cell=cell).exclude(accepts=Accepts.MOVED)
    found = []
    for slug, accepts, scope, home, sides in entries.values_list(
        "tenant__slug",
        "accepts",
        "document__scope",
        "document__home_cell",
        "document__sides",
    ).order_by("tenant__slug"):
        limits = (
            scope["runs_per_second"],
            scope["max_concurrent_runs"],
            scope["daily_token_budget"],
        )
        if limits != (None, None, None):
            owns = home is None or sides is not None
            found.append(_Limited(slug, accepts, owns, *limits))
    return found


def _alive(cells: Iterable[int]) -> Any:
    rows = RuntimeInstance.objects.filter(cell__in=cells, gone_at=None).order_by("pk")
    return rows.only(*_COLUMNS)


_COLUMNS = (
    "cell_id",
    "boot",
    "seq",
    "poll_after_ms",
    "in_flight",
    "longest_turn_seconds",
    "lease_until",
    "reported_at",
    "grants_number",
    "grants_heard",
    "grants_until",
    "gone_at",
    "gone_why",
)


def _members(
    cells: Collection[int], rows: list[RuntimeInstance], now: datetime
) -> list[tuple[Member, int]]:
    """Return every instance whose shares count, without its documents, and their number."""
    # Those that ended and may still run turns. One that joined anew speaks for them from its first
    # report on.
    ended = RuntimeInstance.objects.filter(
        cell__in=cells,
        gone_at__gt=now - GONE_COUNTED,
        gone_why__in=[GoneWhy.REPLACED, GoneWhy.DEAD],
        grants_number__gt=0,
    ).only(*_COLUMNS)
    speak = {row.boot for row in rows if row.seq}
    members = []
    for row in [*rows, *ended.order_by("pk")]:
        if row.gone_why == GoneWhy.REPLACED and row.boot in speak:
            continue
        state = standing(
            grants_until=row.grants_until,
            lease_until=row.lease_until,
            longest_turn_seconds=row.longest_turn_seconds,
            gone_at=row.gone_at,
            gone_why=row.gone_why,
            now=now,
        )
        if not (state.fresh or state.running or state.leased):
            continue
        member = Member(
            id=row.pk,
            cell=row.cell_id,
            standing=state,
            heard=row.grants_heard == row.grants_number,
            shares={},
            in_flight=row.in_flight,
        )
        members.append((member, row.grants_number))
    return members


def _read_documents(members: list[Member], now: datetime) -> None:
    heard = [one.id for one in members if one.heard]
    grants = Grants.objects.filter(instance__in=[one.id for one in members])
    shares = dict(grants.values_list("instance_id", "shares"))
    old = grants.filter(made_at__lt=now - DOCUMENT_LASTS).values_list("instance_id", flat=True)
    told_again = set(old)
    before = dict(grants.exclude(instance__in=heard).values_list("instance_id", "before"))
    for one in members:
        one.shares, one.before = shares.get(one.id, {}), before.get(one.id, {})
        one.old = one.id in told_again


def _demand(rows: list[RuntimeInstance]) -> dict[int, dict[str, tuple[int, int]]]:
    """Return what each instance's last reports say was asked for, by instance and tenant.

    Runs per second in units, and runs that were refused because too many ran.
    """
    seconds: dict[int, float] = {}
    recent = Q()
    for row in rows:
        every = row.poll_after_ms / 1000
        reports = min(row.seq, max(1, round(DEMAND_SECONDS / every)))
        if reports:
            seconds[row.pk] = reports * every
            # By the index that keeps a report from counting twice.
            recent |= Q(instance=row.pk, seq__gt=row.seq - reports)
    if not seconds:
        return {}
    asked: dict[tuple[int, int], tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    lines = UsageLine.objects.filter(recent).order_by()
    for instance, tenant, turns, refused in lines.values_list(
        "instance_id", "tenant_id", "turns", "refused"
    ).iterator():
        rate, at_once = asked[instance, tenant]
        wanted = (turns + _whole(refused, "rate")) / seconds[instance]
        asked[instance, tenant] = rate + wanted, at_once + _whole(refused, "concurrency")
    slugs = dict(
        Tenant.objects.filter(pk__in={tenant for _, tenant in asked}).values_list("pk", "slug")
    )
    demand: dict[int, dict[str, tuple[int, int]]] = defaultdict(dict)
    for (instance, tenant), (rate, at_once) in asked.items():
        demand[instance][slugs[tenant]] = int(rate * RATE_UNITS), at_once
    return demand


def _whole(refused: Mapping[str, Any], reason: str) -> int:
    count = refused.get(reason, 0)
    return count if isinstance(count, int) else 0


def _fenced(limited: Mapping[int, list[_Limited]]) -> set[str]:
    """Return the tenants that cells here wait for and whose home takes no turns just now."""
    waiting = {
        one.tenant
        for told in limited.values()
        for one in told
        if one.accepts == Accepts.NONE and not one.owns
    }
    if not waiting:
        return set()
    homes = PolicyEntry.objects.filter(
        accepts=Accepts.NONE, cell=F("tenant__placement__cell"), tenant__slug__in=waiting
    )
    return set(homes.values_list("tenant__slug", flat=True))


def _asks(
    limited: Mapping[int, list[_Limited]], fenced: Collection[str], now: datetime
) -> dict[str, Ask]:
    """Return what is divided, and over the instances of which cells.

    That is the tenant's home, with the far side of a split, closed or not: its fence ends no turn
    that runs there. A cell that was only announced takes no turns: its instances get shares once
    the home's fence closes, of the whole limit, so that they have them when the move opens it. Both
    never take turns: the proof of the fence comes between.
    """
    where: dict[str, list[tuple[int, _Limited]]] = defaultdict(list)
    for cell, told in limited.items():
        for one in told:
            if one.owns or one.accepts != Accepts.NONE or one.tenant in fenced:
                where[one.tenant].append((cell, one))
    # Both sides of a split were told the same.
    limits = {tenant: told[0][1] for tenant, told in where.items()}
    left = _tokens_left([one.tenant for one in limits.values() if one.daily_token_budget], now)
    return {
        tenant: Ask(
            cells=frozenset(cell for cell, _ in where[tenant]),
            runs_per_second=one.runs_per_second,
            max_concurrent_runs=one.max_concurrent_runs,
            daily_token_budget=one.daily_token_budget,
            tokens_left=left.get(tenant),
        )
        for tenant, one in limits.items()
    }


def _tokens_left(slugs: list[str], now: datetime) -> dict[str, int | None]:
    if not slugs:
        return {}
    tenants = Tenant.objects.filter(slug__in=slugs).only("slug", "time_zone")
    return queries.tokens_left(list(tenants), now=now)


# --- what is written ------------------------------------------------------------------------


@transaction.atomic
def _write(rows: list[RuntimeInstance], changed: Mapping[int, Redivided], now: datetime) -> int:
    """Write the documents, if nothing that they count on has changed; return how many.

    A report takes the same locks, so it hears either the documents before or these.
    """
    was = {row.pk: row for row in rows}
    locked = RuntimeInstance.objects.select_for_update(no_key=True).filter(pk__in=list(was))
    for pk, number, until in locked.order_by("pk").values_list(
        "pk", "grants_number", "grants_until"
    ):
        row = was[pk]
        # Somebody else has divided; or an instance that was counted as silent has just been
        # answered, and uses in full what was about to be lent to another.
        if number != row.grants_number or _back(row, until, now):
            return 0
    Grants.objects.bulk_create(
        [
            Grants(instance_id=pk, shares=made.shares, before=made.before, made_at=now)
            for pk, made in sorted(changed.items())
        ],
        update_conflicts=True,
        unique_fields=["instance"],
        update_fields=["shares", "before", "made_at"],
    )
    RuntimeInstance.objects.filter(pk__in=list(changed)).update(
        grants_number=F("grants_number") + 1
    )
    return len(changed)


def _back(row: RuntimeInstance, until: datetime | None, now: datetime) -> bool:
    # Without a document it holds nothing, and where many join, one always reports for the first
    # time.
    if until == row.grants_until or not row.grants_number:
        return False
    was = standing(
        grants_until=row.grants_until,
        lease_until=row.lease_until,
        longest_turn_seconds=row.longest_turn_seconds,
        gone_at=None,
        gone_why="",
        now=now,
    )
    return not was.fresh
