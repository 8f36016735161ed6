"""Limits as people set them: held against the cell's quota before they hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime

from django.db import transaction

from capacity.domain.headroom import ROOM, Breaker
from capacity.room import Assessed, Typed, assess
from capacity.services.ledger import mark_budgets
from durable.errors import Refused
from tenants import queries as tenants_queries
from tenants import services as tenants_services
from tenants.domain.limits import Limits
from tenants.domain.names import check_tier
from tenants.models import Scope, Tenant


class NoHeadroom(Refused):
    """The tenant's limit does not fit on top of normal load, under 90 % of the quota."""


@dataclass(frozen=True, slots=True)
class Saved:
    """The version of limits that holds, and what was held against the cell's quota."""

    scope: Scope
    assessed: Assessed
    # It does not fit, and somebody said that it is to hold all the same.
    overridden: bool


def set_limits(
    tenant: Tenant,
    *,
    limits: Limits,
    typed: Typed | None = None,
    override: bool = False,
    seen: int | None = None,
    by: str,
    reason: str,
    now: datetime,
) -> Saved:
    """Let these limits hold if the cell's quota has room for them; return the version.

    With `override` they hold without room too, and the audit says so. Raises NoHeadroom,
    BadEstimate and what `tenants.services.set_scope` raises.
    """
    tenants_services.check_reason(reason)
    limits.check()

    def save() -> Scope:
        return tenants_services.set_scope(
            tenant, limits=limits, seen=seen, by=by, reason=reason, now=now
        )

    return _save(tenant, limits, save, typed, override, by=by, reason=reason, now=now)


def adopt_trial(
    tenant: Tenant,
    *,
    typed: Typed | None = None,
    override: bool = False,
    seen: int | None = None,
    by: str,
    reason: str,
    now: datetime,
) -> Saved:
    """Let the limits that are tried hold, as `set_limits` does, and end the trial.

    Raises NoTrial besides.
    """
    tenants_services.check_reason(reason)
    holds = tenants_queries.limits_of(tenants_queries.scope_of(tenant))
    trial = Tenant.objects.select_related("trial").get(pk=tenant.pk).trial
    # Without a trial the verb itself refuses.
    tried = holds if trial is None else tenants_queries.limits_of(trial)
    limits = replace(tried, tier=holds.tier, weight=holds.weight)

    def save() -> Scope:
        return tenants_services.adopt(tenant, seen=seen, by=by, reason=reason, now=now)

    return _save(tenant, limits, save, typed, override, by=by, reason=reason, now=now)


def set_tier(
    tenant: Tenant,
    *,
    tier: str,
    typed: Typed | None = None,
    override: bool = False,
    by: str,
    reason: str,
    now: datetime,
) -> Saved:
    """Change a tenant's tier; back among the pooled its limits have to fit, as in `set_limits`.

    Raises UnknownTier besides.
    """
    tenants_services.check_reason(reason)
    check_tier(tier)
    limits = replace(tenants_queries.limits_of(tenants_queries.scope_of(tenant)), tier=tier)

    def save() -> Scope:
        return tenants_services.set_tier(tenant, tier=tier, by=by, reason=reason, now=now)

    return _save(tenant, limits, save, typed, override, by=by, reason=reason, now=now)


def _save(
    tenant: Tenant,
    limits: Limits,
    save: Callable[[], Scope],
    typed: Typed | None,
    override: bool,
    *,
    by: str,
    reason: str,
    now: datetime,
) -> Saved:
    assessed = assess(tenant, limits, typed=typed, fresh=True, now=now)
    broken = assessed.refused
    if broken is not None and not override:
        raise NoHeadroom(_why(assessed, broken))
    with transaction.atomic():
        scope = save()
        # Another trial, tier or rate may have been written since; what was held against the quota
        # is what holds now, or nothing was saved.
        if tenants_queries.limits_of(scope) != limits:
            raise tenants_services.LimitsChanged(
                f"The limits of {tenant} were changed while these were held against the quota of "
                "its cell. Nothing was changed; look at what they say, then save again."
            )
        if broken is not None:
            tenants_services.audit(
                who=by,
                verb="tenant.override_headroom",
                subject=f"tenant {tenant.slug}",
                reason=reason,
                after={
                    "version": scope.version,
                    "unit": f"{broken.unit} per minute",
                    "limit": _plain(broken.limit),
                    "peak": _plain(broken.peak),
                    "room": _binding_room(assessed, broken),
                },
                now=now,
            )
    # A budget that was raised lets its tenant go on at once.
    mark_budgets(tenants=[tenant.pk], now=now)
    return Saved(scope, assessed, broken is not None)


def _why(assessed: Assessed, broken: Breaker) -> str:
    unit, room = broken.unit, _binding_room(assessed, broken)
    normal = assessed.normal.of(unit) or 0
    quota = f"90 % of the {room / ROOM:,.0f} {unit} per minute of {assessed.cell.slug}"
    if math.isinf(broken.limit):
        return (
            f"Nothing would bound what {broken.tenant} may use, and its limit on top of normal "
            f"load has to stay under {room:,.0f}, {quota}. Give runs_per_second; runs at once "
            "bound it only where it is said how many seconds a run takes. Or move it to the bridge "
            "tier, or override this with a reason."
        )
    runs = assessed.after.runs_per_minute
    fits = max(0.0, (room - normal) / broken.limit * runs)
    others = [one.tenant for one in assessed.headroom.breakers if one.tenant != broken.tenant]
    also = f" So do the limits of {', '.join(others[:5])} already." if others else ""
    return (
        f"{broken.tenant} breaks the headroom: {runs:,.4g} runs a minute are {broken.limit:,.0f} "
        f"{unit} per minute, and with the normal {normal:,.0f} they peak at {broken.peak:,.0f}, "
        f"which is not under {room:,.0f}, {quota}.{also} Stay under {fits:,.4g} runs a minute, "
        "move it to the bridge tier with a model account of its own, or override this with a "
        "reason."
    )


def _binding_room(assessed: Assessed, broken: Breaker) -> float:
    return next(one.room for one in assessed.headroom.bindings if one.unit == broken.unit)


def _plain(value: float) -> float | None:
    """Return a number as JSON can hold it; None: there is no bound."""
    return value if math.isfinite(value) else None
