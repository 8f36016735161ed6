"""How much each tenant may use: versions of its limits, with who and why, told to its cells.

Every verb here is one transaction that locks the cells in which the tenant has a living entry, in
id order, and looks again: a move's TARGET, a split and another edit lock the same cells, so whoever
comes second reads what the first has written.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from django.db import transaction
from django.db.models import Max

from durable.errors import Refused
from tenants import queries
from tenants.domain.fence import Accepts
from tenants.domain.limits import Limits
from tenants.domain.names import check_tier
from tenants.models import PolicyEntry, Scope, Tenant
from tenants.services.auditing import audit, check_reason
from tenants.services.publishing import hold_entries, republish
from tenants.services.rows import assert_in_transaction


class NoTrial(Refused):
    """No limits are tried for the tenant, so there is nothing to end or to adopt."""


class LimitsChanged(Refused):
    """Somebody has written other limits since the caller looked."""


@dataclass(frozen=True, slots=True)
class _Held:
    """A tenant whose cells and row this transaction has locked, with the limits that hold."""

    tenant: Tenant
    scope: Scope


@transaction.atomic
def set_scope(
    tenant: Tenant,
    *,
    limits: Limits,
    seen: int | None = None,
    by: str,
    reason: str,
    now: datetime,
) -> Scope:
    """Let these limits hold for `tenant` from its instances' next poll on; return their version.

    `seen`: the newest version that the caller has looked at, trials too; None: whatever there is.
    Limits that hold already make no version. Nobody looks here whether the cell's quota has room
    for them: capacity.services.set_limits does. Raises ReasonMissing, BadLimits, LimitsChanged,
    PlacementChanged.
    """
    check_reason(reason)
    limits.check()
    held = _hold(tenant)
    _check_seen(held, seen)
    scope = _set(held, limits, "tenant.set_limits", by=by, reason=reason, now=now)
    republish(held.tenant)
    return scope


@transaction.atomic
def try_scope(
    tenant: Tenant,
    *,
    limits: Limits,
    seen: int | None = None,
    by: str,
    reason: str,
    now: datetime,
) -> Scope:
    """Count what these limits would refuse, and refuse nothing by them; return their version.

    They replace what was tried before. Tier and weight are not tried: they stay as they are,
    whatever `limits` says. `seen` as in `set_scope`. Raises ReasonMissing, BadLimits,
    LimitsChanged, PlacementChanged.
    """
    check_reason(reason)
    limits.check()
    held = _hold(tenant)
    _check_seen(held, seen)
    limits = replace(limits, tier=held.scope.tier, weight=held.scope.weight)
    before = _shown(held.tenant.trial)
    scope = _add(held, limits, trial=True, by=by, reason=reason, now=now)
    _note_trial(held, scope, "tenant.try_limits", before, by=by, reason=reason, now=now)
    return scope


@transaction.atomic
def end_trial(
    tenant: Tenant, *, seen: int | None = None, by: str, reason: str, now: datetime
) -> Tenant:
    """Try the tenant's trial limits no longer; return the tenant.

    `seen`: the trial that the caller means; None: whichever runs. Raises NoTrial, LimitsChanged,
    ReasonMissing, PlacementChanged.
    """
    check_reason(reason)
    held = _hold(tenant)
    before = _shown(_trial(held, seen))
    _note_trial(held, None, "tenant.end_trial", before, by=by, reason=reason, now=now)
    return held.tenant


@transaction.atomic
def adopt(tenant: Tenant, *, seen: int | None = None, by: str, reason: str, now: datetime) -> Scope:
    """Let the limits that are tried hold, and end the trial; return their new version.

    `seen`: the trial that the caller means; None: whichever runs. As `set_scope`. Raises NoTrial
    besides.
    """
    check_reason(reason)
    held = _hold(tenant)
    tried = queries.limits_of(_trial(held, seen))
    # Tier and weight may have been changed since the trial began.
    limits = replace(tried, tier=held.scope.tier, weight=held.scope.weight)
    scope = _set(held, limits, "tenant.adopt_trial", by=by, reason=reason, now=now)
    _trial_is(held.tenant, None)
    republish(held.tenant)
    return scope


@transaction.atomic
def set_tier(tenant: Tenant, *, tier: str, by: str, reason: str, now: datetime) -> Scope:
    """Change how much of the stack a tenant has for itself; return the version that says so.

    It is configuration alone: runtimes give a bridge or silo tenant workers of its own from their
    next poll on. Where it lives stays: a store or a cell of its own is a move's work. Raises
    UnknownTier, ReasonMissing, PlacementChanged.
    """
    check_reason(reason)
    check_tier(tier)
    held = _hold(tenant)
    limits = replace(queries.limits_of(held.scope), tier=tier)
    scope = _set(held, limits, "tenant.set_tier", by=by, reason=reason, now=now)
    republish(held.tenant)
    return scope


@transaction.atomic
def rotate(tenant: Tenant, *, by: str, reason: str, now: datetime) -> int:
    """Have every instance build the tenant's Runner anew; return the new generation's number.

    For a secret that was rotated or revoked: what a Runner was built with is used no longer.
    Raises ReasonMissing, PlacementChanged.
    """
    check_reason(reason)
    held = _hold(tenant)
    entries = PolicyEntry.objects.filter(tenant=held.tenant).exclude(accepts=Accepts.MOVED)
    # One number everywhere, and never one that was used: a move takes it along.
    before = entries.aggregate(most=Max("runner_generation"))["most"]
    entries.update(runner_generation=before + 1)
    republish(held.tenant)
    audit(
        who=by,
        verb="tenant.rotate",
        subject=f"tenant {held.tenant.slug}",
        reason=reason,
        before={"runner_generation": before},
        after={"runner_generation": before + 1},
        now=now,
    )
    return int(before) + 1


def spend_budget(tenant: Tenant, until: datetime | None) -> None:
    """Have the tenant's turns refused until then, for its daily budget is used up; None: no longer.

    Inside the caller's transaction, which must exist. Said already: no version is raised. Raises
    PlacementChanged.
    """
    assert_in_transaction()
    held = _hold(tenant)
    if held.tenant.budget_spent_until == until:
        return
    Tenant.objects.filter(pk=tenant.pk).update(budget_spent_until=until)
    republish(held.tenant)


def _hold(tenant: Tenant) -> _Held:
    """Lock the cells that are told of a tenant, then its row; return it with what holds."""
    hold_entries(tenant)
    # No key: a report's lines name the tenant, and don't queue behind this.
    locked = Tenant.objects.select_for_update(of=("self",), no_key=True).select_related("trial")
    return _Held(locked.get(pk=tenant.pk), queries.scope_of(tenant))


def _set(held: _Held, limits: Limits, verb: str, *, by: str, reason: str, now: datetime) -> Scope:
    before = queries.limits_of(held.scope)
    if before == limits:
        return held.scope
    scope = _add(held, limits, trial=False, by=by, reason=reason, now=now)
    Tenant.objects.filter(pk=held.tenant.pk).update(tier=limits.tier, weight=limits.weight)
    audit(
        who=by,
        verb=verb,
        subject=f"tenant {held.tenant.slug}",
        reason=reason,
        before={"version": held.scope.version, **before.plain()},
        after={"version": scope.version, **limits.plain()},
        now=now,
    )
    return scope


def _add(held: _Held, limits: Limits, *, trial: bool, by: str, reason: str, now: datetime) -> Scope:
    # Trials are numbered among the others: one history, one order.
    last = Scope.objects.filter(tenant=held.tenant).aggregate(last=Max("version"))["last"]
    return Scope.objects.create(
        tenant=held.tenant,
        version=last + 1,
        trial=trial,
        at=now,
        by=by,
        reason=reason,
        **limits.plain(),
    )


def _check_seen(held: _Held, seen: int | None) -> None:
    # Under the lock: of two people who save at once the second has seen what the first wrote.
    newest = Scope.objects.filter(tenant=held.tenant).order_by("-version")[0]
    if seen is not None and seen != newest.version:
        what = "tried" if newest.trial else "set"
        raise LimitsChanged(
            f"{newest.by} has {what} version {newest.version} since you looked. Nothing was "
            "changed; look at what it says, then save again."
        )


def _trial(held: _Held, seen: int | None) -> Scope:
    if held.tenant.trial is None:
        raise NoTrial(
            f"No limits are tried for {held.tenant}. Begin a trial first; it refuses nothing and "
            "counts what it would have refused."
        )
    if seen is not None and seen != held.tenant.trial.version:
        raise LimitsChanged(
            f"{held.tenant.trial.by} began another trial since you looked, version "
            f"{held.tenant.trial.version}. Nothing was changed; look at it first."
        )
    return held.tenant.trial


def _note_trial(
    held: _Held,
    scope: Scope | None,
    verb: str,
    before: dict[str, Any] | None,
    *,
    by: str,
    reason: str,
    now: datetime,
) -> None:
    _trial_is(held.tenant, scope)
    republish(held.tenant)
    audit(
        who=by,
        verb=verb,
        subject=f"tenant {held.tenant.slug}",
        reason=reason,
        before=before,
        after=_shown(scope),
        now=now,
    )


def _trial_is(tenant: Tenant, scope: Scope | None) -> None:
    tenant.trial = scope
    tenant.save(update_fields=["trial"])


def _shown(scope: Scope | None) -> dict[str, Any] | None:
    if scope is None:
        return None
    return {"version": scope.version, **queries.limits_of(scope).plain()}
