"""Whether a cell has room for a tenant's limits, by what was measured and what somebody typed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Min, Q, Sum

from capacity.domain.headroom import (
    UNITS,
    Breaker,
    Headroom,
    Load,
    Most,
    Run,
    Unit,
    headroom,
    most,
)
from capacity.models import UsageMinute
from durable.errors import Refused
from tenants import queries as tenants_queries
from tenants.domain.fence import Accepts
from tenants.domain.limits import Limits
from tenants.domain.names import Tier
from tenants.models import Cell, PolicyEntry, Tenant

MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
TYPED_MOST = 1e15


class BadEstimate(Refused):
    """A load or a length that nobody could have measured."""

    status = 422


@dataclass(frozen=True, slots=True, kw_only=True)
class Typed:
    """What a person says of load that has not been measured yet. None: they don't know."""

    normal_requests_per_minute: float | None = None
    normal_tokens_per_minute: float | None = None
    model_calls_per_run: float | None = None
    tokens_per_run: float | None = None
    # Nobody measures it, so without it slots bound nobody.
    run_seconds: float | None = None

    def check(self) -> None:
        """Raise BadEstimate for what is no amount."""
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and not (0 <= value <= TYPED_MOST and math.isfinite(value)):
                raise BadEstimate(
                    f"{name} can't be {str(value)[:40]}: give a number of 0 or more, or nothing "
                    "where you don't know."
                )


@dataclass(frozen=True, slots=True)
class Assessed:
    """A tenant's limits, held against the quota of the cell in which it lives."""

    tenant: str
    cell: Cell
    headroom: Headroom
    # What is normal in the cell, and what of it was measured.
    normal: Load
    measured: Load
    # What a run of the tenant takes.
    run: Run
    # The most that the limits let it use; those that hold, and those that were asked about.
    before: Most
    after: Most
    # The tenant, where it does not fit and these limits let it use more than those that hold.
    refused: Breaker | None

    @property
    def unknown(self) -> Mapping[Unit, str]:
        """The quotas of which nothing can be said yet, with what has to be typed: `Typed`'s name.

        Nobody has measured how much of them a run takes. A limit may still be seen not to fit.
        """
        needed: tuple[tuple[Unit, str, float | None], ...] = (
            ("requests", "model_calls_per_run", self.run.model_calls),
            ("tokens", "tokens_per_run", self.run.tokens),
        )
        held = {binding.unit for binding in self.headroom.bindings}
        return {unit: name for unit, name, value in needed if unit in held and not value}


def assess(
    tenant: Tenant,
    limits: Limits | None = None,
    *,
    typed: Typed | None = None,
    fresh: bool = False,
    now: datetime,
) -> Assessed:
    """Return whether the tenant's cell has room for these limits; None: for those that hold.

    Measured over the last hour and the last 24, of which the larger counts, up to a minute ago;
    `fresh`: anew, for whoever lets limits hold. What is typed counts where it is more. Tenants of
    other tiers than pooled have a model account of their own: neither their load nor their limits
    are held against the cell's quota. Raises BadEstimate.
    """
    said = Typed() if typed is None else typed
    said.check()
    # Read afresh: a caller's tenant may be from before a move, or before its quota was verified.
    cell = Cell.objects.get(placements__tenant=tenant)
    holds = tenants_queries.limits_of(tenants_queries.scope_of(tenant))
    asked = holds if limits is None else limits
    measured = _measured(cell, now, fresh=fresh)
    normal = Load(
        _larger(measured.normal.requests, said.normal_requests_per_minute),
        _larger(measured.normal.tokens, said.normal_tokens_per_minute),
    )

    def run_of(slug: str) -> Run:
        had = measured.runs.get(slug, measured.usual)
        return Run(
            model_calls=_larger(had.model_calls, said.model_calls_per_run),
            tokens=_larger(had.tokens, said.tokens_per_run),
            seconds=said.run_seconds or None,
        )

    def most_of(one: Limits) -> Most:
        return most(one.runs_per_second, one.max_concurrent_runs, run_of(tenant.slug))

    limited = {
        slug: most(scope["runs_per_second"], scope["max_concurrent_runs"], run_of(slug)).load
        for slug, scope in _others(tenant, cell)
    }
    before, after = most_of(holds), most_of(asked)
    if asked.tier == Tier.POOLED:
        limited[tenant.slug] = after.load
    found = headroom(
        Load(cell.quota_requests_per_minute, cell.quota_tokens_per_minute), normal, limited
    )
    breaker = found.breaker(tenant.slug)
    was_pooled = holds.tier == Tier.POOLED
    return Assessed(
        tenant=tenant.slug,
        cell=cell,
        headroom=found,
        normal=normal,
        measured=measured.normal,
        run=run_of(tenant.slug),
        before=before,
        after=after,
        refused=breaker if breaker and _is_more(before.load, after.load, was_pooled) else None,
    )


def _is_more(before: Load, after: Load, counted: bool) -> bool:
    """Whether new limits let a tenant use more than those that hold.

    An edit of something else, or one that lowers what does not fit, is no reason to refuse. The
    first limit of a tenant that had none is held against the quota like any other.
    """
    for unit in UNITS:
        had, has = before.of(unit) or 0, after.of(unit) or 0
        if not counted or has > had or (math.isinf(had) and math.isfinite(has)):
            return True
    return False


def _others(tenant: Tenant, cell: Cell) -> list[tuple[str, Any]]:
    entries = PolicyEntry.objects.filter(
        cell=cell, tenant__placement__cell=cell, tenant__tier=Tier.POOLED
    ).exclude(Q(accepts=Accepts.MOVED) | Q(tenant=tenant))
    return list(entries.values_list("tenant__slug", "document__scope"))


@dataclass(frozen=True, slots=True)
class _Measured:
    """What a cell's tenants used of late."""

    normal: Load
    # What runs of each tenant took, by slug, and of all together.
    runs: Mapping[str, Run]
    usual: Run


# Cell -> the minute until which it was measured, and what that was. A page that asks again with
# every letter that somebody types reads it once a minute. Losing it costs a read.
_kept: dict[int, tuple[datetime, _Measured]] = {}


def _measured(cell: Cell, now: datetime, *, fresh: bool) -> _Measured:
    # The minute that runs is not over.
    until = now.replace(second=0, microsecond=0)
    known = _kept.get(cell.pk)
    if fresh or known is None or known[0] != until:
        known = _kept[cell.pk] = until, _measure(cell, until)
    return known[1]


def _measure(cell: Cell, until: datetime) -> _Measured:
    rows = UsageMinute.objects.filter(
        minute__gte=until - DAY,
        minute__lt=until,
        tenant__placement__cell=cell,
        tenant__tier=Tier.POOLED,
    )
    late = Q(minute__gte=until - HOUR)
    # In one read: a day of a full cell is more than a million rows.
    used = list(
        rows.values("tenant__slug").annotate(
            since=Min("minute"),
            begun=Sum("turns"),
            called=Sum("model_calls"),
            took=Sum("tokens"),
            late_since=Min("minute", filter=late),
            late_called=Sum("model_calls", filter=late, default=0),
            late_took=Sum("tokens", filter=late, default=0),
        )
    )
    day, hour = _load(used, "", until), _load(used, "late_", until)
    begun, called, took = (sum(row[name] for row in used) for name in ("begun", "called", "took"))
    return _Measured(
        normal=Load(_larger(day.requests, hour.requests), _larger(day.tokens, hour.tokens)),
        runs={
            row["tenant__slug"]: Run(row["called"] / row["begun"], row["took"] / row["begun"])
            for row in used
            if row["begun"]
        },
        usual=Run(called / begun, took / begun) if begun else Run(),
    )


def _load(used: Iterable[Mapping[str, Any]], when: str, until: datetime) -> Load:
    """Return what all used per minute; of a cell that began in that time, since then."""
    rows = [row for row in used if row[f"{when}since"] is not None]
    if not rows:
        return Load(None, None)
    minutes = (until - min(row[f"{when}since"] for row in rows)) / MINUTE
    called, took = (sum(row[f"{when}{name}"] for row in rows) for name in ("called", "took"))
    return Load(called / minutes, took / minutes)


def _larger(measured: float | None, typed: float | None) -> float | None:
    known = [value for value in (measured, typed) if value is not None]
    return max(known, default=None)
