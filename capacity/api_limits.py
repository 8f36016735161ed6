"""Limits over HTTP: what holds, what other limits would do, and the verbs that change them."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import datetime
from typing import Annotated, Any

from django.http import HttpRequest
from ninja import Router, Schema
from pydantic import Field

from capacity import services
from capacity.domain.headroom import Load
from capacity.room import Assessed, Typed, assess
from durable.clock import database_now
from tenants import queries as tenants_queries
from tenants import services as tenants_services
from tenants.api import Error, LimitsOut, OpsIn, PageOut, Reason, find, page, require
from tenants.domain.limits import TOOLS_MOST, Limits
from tenants.domain.roles import Role
from tenants.models import Scope, Tenant

router = Router(tags=["limits"])

REFUSALS = {403: Error, 404: Error, 409: Error, 422: Error}
# Looked at by `Limits.check`, whose refusals say what to do; here only what could not be kept.
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Tool = Annotated[str, Field(max_length=1_000, pattern=r"^[^\x00]*$")]
Tools = Annotated[list[Tool], Field(max_length=2 * TOOLS_MOST)]
Word = Annotated[str, Field(max_length=100, pattern=r"^[^\x00]*$")]
After = Annotated[int, Field(ge=0, lt=2**31)]


class ChangesIn(OpsIn):
    """A field that is left out stays as it is; null on a limit: no limit."""

    max_concurrent_runs: Whole | None = None
    runs_per_second: float | None = None
    daily_token_budget: Whole | None = None
    max_model_calls_per_run: Whole | None = None
    # Null: every tool of the agent. Empty: none.
    allowed_tools: Tools | None = None
    exact_budget: bool = False


class EstimateIn(OpsIn):
    """What a person says of load that was not measured; what was measured counts if it is more."""

    normal_requests_per_minute: float | None = None
    normal_tokens_per_minute: float | None = None
    model_calls_per_run: float | None = None
    tokens_per_run: float | None = None
    # Nobody measures it: without it runs at once bound nobody.
    run_seconds: float | None = None


class TryIn(ChangesIn):
    reason: Reason = ""


class HeadroomIn(ChangesIn):
    tier: Word = ""
    weight: float = 1.0
    estimate: EstimateIn | None = None


class SaveIn(HeadroomIn):
    reason: Reason = ""
    # True: let it hold although it does not fit. The audit says so.
    override: bool = False


class AdoptIn(OpsIn):
    reason: Reason = ""
    estimate: EstimateIn | None = None
    override: bool = False


class TierIn(AdoptIn):
    tier: Word


class VerbIn(OpsIn):
    reason: Reason = ""


class VersionOut(LimitsOut):
    tier: str
    # True: it never held; what it would have refused was counted.
    trial: bool
    at: datetime
    by: str
    reason: str


class LoadOut(Schema):
    # Per minute. Null: not known, or without bound.
    requests: float | None
    tokens: float | None


class BindingOut(Schema):
    # requests or tokens, per minute.
    unit: str
    quota: float
    # 90 % of it: what has to stay free of the largest limit on top of normal load.
    room: float
    normal: float
    # The largest limit of one tenant, and whose. Null: one has no limit.
    largest: float | None
    tenant: str
    peak: float | None
    fits: bool


class BreakerOut(Schema):
    tenant: str
    unit: str
    # Null: without bound.
    limit: float | None
    peak: float | None


class HeadroomOut(Schema):
    cell: str
    # Every quota that is known has room, as far as `unknown` lets anybody tell.
    fits: bool
    # Fields of the estimate without which nothing can be said of a quota: nobody has measured them.
    unknown: list[str]
    # These limits would be refused without an override.
    refused: bool
    # The quota that binds first in front.
    quotas: list[BindingOut]
    # Whose limits do not fit, the worst first.
    breakers: list[BreakerOut]
    normal: LoadOut
    # What of it was measured.
    measured: LoadOut
    # The most that these limits let the tenant use. Null: without bound.
    runs_per_minute: float | None
    most: LoadOut
    # rate, slots, or empty: neither.
    bound_by: str


class TenantLimitsOut(Schema):
    tenant: str
    limits: VersionOut
    # Null: nothing is tried.
    trial: VersionOut | None
    # Turns are refused until then, for today's budget is used up. Null, or past: it is not.
    budget_spent_until: datetime | None
    headroom: HeadroomOut


class SavedOut(Schema):
    limits: VersionOut
    headroom: HeadroomOut
    # It does not fit and holds all the same.
    overridden: bool


class RotatedOut(Schema):
    tenant: str
    runner_generation: int


@router.get("/tenants/{slug:slug}/limits", response={200: TenantLimitsOut, 404: Error})
def tenant_limits(request: HttpRequest, slug: str) -> dict[str, Any]:
    """Answer what a tenant may use, what is tried, and whether its cell has room for it."""
    tenant = _tenant(slug)
    return {
        "tenant": tenant.slug,
        "limits": _version(tenants_queries.scope_of(tenant)),
        "trial": None if tenant.trial is None else _version(tenant.trial),
        "budget_spent_until": tenant.budget_spent_until,
        "headroom": _headroom(assess(tenant, now=database_now())),
    }


@router.get("/tenants/{slug:slug}/limits/history", response={200: PageOut[VersionOut], 404: Error})
def limits_history(request: HttpRequest, slug: str, after: After = 0) -> dict[str, Any]:
    """List every version of a tenant's limits, newest first; `after` is a version."""
    rows = Scope.objects.filter(tenant=_tenant(slug))
    return page(rows, "version", after, _version, newest_first=True)


@router.post("/tenants/{slug:slug}/limits", response={200: SavedOut, **REFUSALS})
def set_limits(request: HttpRequest, slug: str, body: SaveIn) -> dict[str, Any]:
    """Change a tenant's limits, if its cell has room for them (operator, with a reason)."""
    how, tenant = _how(request, body), _tenant(slug)
    seen, limits = _changed(tenant, body)
    return _saved(services.set_limits(tenant, limits=limits, seen=seen, **how))


@router.post("/tenants/{slug:slug}/limits/headroom", response={200: HeadroomOut, **REFUSALS})
def check_headroom(request: HttpRequest, slug: str, body: HeadroomIn) -> dict[str, Any]:
    """Answer whether the tenant's cell has room for these limits; nothing is changed (operator)."""
    require(request, Role.OPERATOR)
    tenant = _tenant(slug)
    _, limits = _changed(tenant, body)
    limits.check()
    return _headroom(assess(tenant, limits, typed=_typed(body.estimate), now=database_now()))


@router.post("/tenants/{slug:slug}/trial", response={200: VersionOut, **REFUSALS})
def try_limits(request: HttpRequest, slug: str, body: TryIn) -> dict[str, Any]:
    """Count what these limits would refuse, and refuse nothing by them (operator)."""
    by, tenant = require(request, Role.OPERATOR).name, _tenant(slug)
    seen, limits = _changed(tenant, body)
    scope = tenants_services.try_scope(
        tenant, limits=limits, seen=seen, by=by, reason=body.reason, now=database_now()
    )
    return _version(scope)


@router.post("/tenants/{slug:slug}/trial/end", response={200: TenantLimitsOut, **REFUSALS})
def end_trial(request: HttpRequest, slug: str, body: VerbIn) -> dict[str, Any]:
    """Try the tenant's trial limits no longer (operator, with a reason)."""
    by = require(request, Role.OPERATOR).name
    tenants_services.end_trial(_tenant(slug), by=by, reason=body.reason, now=database_now())
    return tenant_limits(request, slug)


@router.post("/tenants/{slug:slug}/trial/adopt", response={200: SavedOut, **REFUSALS})
def adopt_trial(request: HttpRequest, slug: str, body: AdoptIn) -> dict[str, Any]:
    """Let the limits that are tried hold, if there is room for them (operator, with a reason)."""
    how = _how(request, body)
    return _saved(services.adopt_trial(_tenant(slug), **how))


@router.post("/tenants/{slug:slug}/tier", response={200: SavedOut, **REFUSALS})
def set_tier(request: HttpRequest, slug: str, body: TierIn) -> dict[str, Any]:
    """Change a tenant's tier: pooled, bridge or silo (operator, with a reason)."""
    how = _how(request, body)
    return _saved(services.set_tier(_tenant(slug), tier=body.tier, **how))


@router.post("/tenants/{slug:slug}/rotate", response={200: RotatedOut, **REFUSALS})
def rotate(request: HttpRequest, slug: str, body: VerbIn) -> dict[str, Any]:
    """Have every instance build the tenant's Runner anew, with its present secrets (operator)."""
    by, tenant = require(request, Role.OPERATOR).name, _tenant(slug)
    number = tenants_services.rotate(tenant, by=by, reason=body.reason, now=database_now())
    return {"tenant": tenant.slug, "runner_generation": number}


def _tenant(slug: str) -> Tenant:
    found = find(Tenant, "tenant", slug=slug)
    return Tenant.objects.select_related("trial", "placement__cell").get(pk=found.pk)


def _changed(tenant: Tenant, body: ChangesIn) -> tuple[int, Limits]:
    """Return the limits that hold with what the body names instead, and what they were made of.

    That is the newest version, for the verbs' `seen`: of two callers at once who name different
    fields the second must not write what the first has changed back.
    """
    # Read first: of limits that were written since, it is too old, and the verb refuses.
    newest = Scope.objects.filter(tenant=tenant)[0].version
    holds = tenants_queries.limits_of(tenants_queries.scope_of(tenant))
    said = body.dict(exclude_unset=True, include=set(ChangesIn.model_fields))
    if isinstance(body, HeadroomIn):
        said |= body.dict(exclude_unset=True, include={"tier", "weight"})
    if said.get("allowed_tools") is not None:
        said["allowed_tools"] = tuple(said["allowed_tools"])
    return newest, replace(holds, **said)


def _how(request: HttpRequest, body: SaveIn | AdoptIn) -> dict[str, Any]:
    """Return who changes limits, why, and by which estimate. Raises Forbidden."""
    return {
        "by": require(request, Role.OPERATOR).name,
        "reason": body.reason,
        "typed": _typed(body.estimate),
        "override": body.override,
        "now": database_now(),
    }


def _typed(body: EstimateIn | None) -> Typed:
    return Typed() if body is None else Typed(**body.dict())


def _saved(saved: services.Saved) -> dict[str, Any]:
    return {
        "limits": _version(saved.scope),
        "headroom": _headroom(saved.assessed),
        "overridden": saved.overridden,
    }


def _version(scope: Scope) -> dict[str, Any]:
    return {
        "version": scope.version,
        **tenants_queries.limits_of(scope).plain(),
        "trial": scope.trial,
        "at": scope.at,
        "by": scope.by,
        "reason": scope.reason,
    }


def _headroom(assessed: Assessed) -> dict[str, Any]:
    found = assessed.headroom
    return {
        "cell": assessed.cell.slug,
        "fits": found.fits,
        "unknown": list(assessed.unknown.values()),
        "refused": assessed.refused is not None,
        "quotas": [
            {
                "unit": one.unit,
                "quota": one.quota,
                "room": one.room,
                "normal": one.normal,
                "largest": _finite(one.largest),
                "tenant": one.tenant,
                "peak": _finite(one.peak),
                "fits": one.fits,
            }
            for one in found.bindings
        ],
        "breakers": [
            {
                "tenant": one.tenant,
                "unit": one.unit,
                "limit": _finite(one.limit),
                "peak": _finite(one.peak),
            }
            for one in found.breakers
        ],
        "normal": _load(assessed.normal),
        "measured": _load(assessed.measured),
        "runs_per_minute": _finite(assessed.after.runs_per_minute),
        "most": _load(assessed.after.load),
        "bound_by": assessed.after.bound_by,
    }


def _load(load: Load) -> dict[str, float | None]:
    return {"requests": _finite(load.requests), "tokens": _finite(load.tokens)}


def _finite(value: float | None) -> float | None:
    """Return a number as JSON has it."""
    return value if value is not None and math.isfinite(value) else None
