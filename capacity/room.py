"""Whether a cell has room for a tenant's limits, by what was measured and what somebody typed."""

from __future__ import annotations

import math
from collections.abc import Mapping
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


def assess(
    tenant: Tenant, limits: Limits | None = None, *, typed: Typed | None = None, now: datetime
) -> Assessed:
    """Return whether the tenant's cell has room for these limits; None: for those that hold.

    Measured over the last hour and the last 24, of which the larger counts; what is typed counts
    where it is more. Tenants of other tiers than pooled have a model account of their own: neither
    their load nor their limits are held against the cell's quota. Raises BadEstimate.
    """
    said = Typed() if typed is None else typed
    said.check()
    # Read afresh: a caller's tenant may be from before a move, or before its quota was verified.
    cell = Cell.objects.get(placements__tenant=tenant)
    holds = tenants_queries.limits_of(tenants_queries.scope_of(tenant))
    asked = holds if limits is None else limits
    measured, runs, usual = _measured(cell, now)
    normal = Load(
        _larger(measured.requests, said.normal_requests_per_minute),
        _larger(measured.tokens, said.normal_tokens_per_minute),
    )

    def run_of(slug: str) -> Run:
        had = runs.get(slug, usual)
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
        measured=measured,
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


def _measured(cell: Cell, now: datetime) -> tuple[Load, Mapping[str, Run], Run]:
    """Return a cell's normal load, what runs of each tenant take, and of all together."""
    # The minute that runs is not over.
    until = now.replace(second=0, microsecond=0)
    rows = UsageMinute.objects.filter(
        minute__gte=until - DAY,
        minute__lt=until,
        tenant__placement__cell=cell,
        tenant__tier=Tier.POOLED,
    )
    loads = []
    for since in (until - DAY, until - HOUR):
        used = rows.filter(minute__gte=since).aggregate(
            first=Min("minute"), requests=Sum("model_calls"), used=Sum("tokens")
        )
        if used["first"] is not None:
            # Of a cell that began today, since then.
            minutes = (until - used["first"]) / MINUTE
            loads.append(Load(used["requests"] / minutes, used["used"] / minutes))
    runs, turns, calls, tokens = {}, 0, 0, 0
    for slug, begun, called, took in rows.values_list("tenant__slug").annotate(
        begun=Sum("turns"), called=Sum("model_calls"), took=Sum("tokens")
    ):
        turns, calls, tokens = turns + begun, calls + called, tokens + took
        if begun:
            runs[slug] = Run(called / begun, took / begun)
    usual = Run(calls / turns, tokens / turns) if turns else Run()
    if not loads:
        return Load(None, None), runs, usual
    normal = Load(max(one.requests or 0 for one in loads), max(one.tokens or 0 for one in loads))
    return normal, runs, usual


def _larger(measured: float | None, typed: float | None) -> float | None:
    known = [value for value in (measured, typed) if value is not None]
    return max(known, default=None)
