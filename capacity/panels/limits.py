"""What a tenant's page of limits shows: what holds, what it replaced, and who applies it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from django.core.paginator import Page, Paginator
from django.db.models import Max, Sum

from capacity.domain.headroom import Binding, Breaker
from capacity.domain.tiers import CRITERIA, MEANING, Measured, suggested
from capacity.models import UsageMinute
from capacity.queries import Trial, usage_page
from capacity.room import Assessed, Typed, assess
from tenants import queries
from tenants.domain.fence import Accepts
from tenants.domain.limits import BadLimits, Limits
from tenants.domain.names import Tier
from tenants.domain.words import Status, count, counted, rate, share
from tenants.models import Placement, PolicyEntry, RuntimeInstance, Scope, Tenant
from tenants.panels import instance_state

HISTORY_ROWS = 20
# Instances that the page lists, those that have not applied the limits first.
APPLIED_ROWS = 50
WEEK = timedelta(days=7)
DIGITS_MOST = 18

# Column, label, unit, help. The order of the form, of a diff and of every table.
FIELDS = (
    ("max_concurrent_runs", "Runs at the same time", "", "Over all instances."),
    ("runs_per_second", "New runs", "per second", "Over all instances; 0.5 is 30 a minute."),
    ("daily_token_budget", "Tokens a day", "", "Starts anew at the tenant’s midnight."),
    (
        "max_model_calls_per_run",
        "Model calls in one run",
        "",
        "The run then ends with “Stopping: step limit reached.”",
    ),
    ("weight", "Weight", "", "Share of spare quota, against the weights of others."),
)
# What nobody may have measured yet. Empty: what was measured counts alone.
ESTIMATES = (
    ("normal_requests_per_minute", "Normal requests a minute", "Of the whole cell."),
    ("normal_tokens_per_minute", "Normal tokens a minute", "Of the whole cell."),
    ("model_calls_per_run", "Model calls of a typical run", ""),
    ("tokens_per_run", "Tokens of a typical run", ""),
    (
        "run_seconds",
        "Seconds of a typical run",
        "Nobody measures it: without it runs at the same time bound nothing.",
    ),
)
LABELS = {
    **{name: label for name, label, _, _ in FIELDS},
    "allowed_tools": "Tools",
    "exact_budget": "Exact budget",
    "tier": "Tier",
}
WHOLE = ("max_concurrent_runs", "daily_token_budget", "max_model_calls_per_run")


# --- the form -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Given:
    """The form as it was typed, so that a refusal takes nothing away."""

    values: Mapping[str, str]
    all_tools: bool
    exact_budget: bool
    tier: str
    # That these limits hold although the cell has no room for them.
    override: bool = False
    reason: str = ""


def form_of(limits: Limits) -> Given:
    """Return the form that says what holds."""
    values = {name: _plain(name, getattr(limits, name)) for name, *_ in FIELDS}
    values["allowed_tools"] = "\n".join(limits.allowed_tools or ())
    values |= {name: "" for name, *_ in ESTIMATES}
    return Given(
        values=values,
        all_tools=limits.allowed_tools is None,
        exact_budget=limits.exact_budget,
        tier=str(limits.tier),
    )


def _plain(name: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,}" if name in WHOLE else f"{value:.15g}"


def limits_of(given: Given) -> Limits:
    """Return what was typed as limits; an empty field is no limit.

    Raises BadLimits, whose text names fields by their labels.
    """
    values: dict[str, Any] = {name: _whole(name, given.values[name]) for name in WHOLE}
    values["runs_per_second"] = _number("runs_per_second", given.values["runs_per_second"])
    weight = _number("weight", given.values["weight"])
    if weight is None:
        raise BadLimits("Weight can’t be left out: 1 is the ordinary one.")
    tools = None if given.all_tools else _tools(given.values["allowed_tools"])
    limits = Limits(
        **values,
        weight=weight,
        allowed_tools=tools,
        exact_budget=given.exact_budget,
        tier=given.tier,
    )
    limits.check()
    return limits


def estimate_of(given: Given) -> Typed:
    """Return what was typed of load that nobody has measured.

    Raises BadLimits for what is no number.
    """
    return Typed(**{name: _number(name, given.values[name], label) for name, label, _ in ESTIMATES})


def _bare(text: str) -> str:
    # As pages write numbers, and as people copy them: 30,000,000.
    return "".join(text.split()).replace(",", "").replace("_", "")


def _whole(name: str, text: str) -> int | None:
    bare = _bare(text)
    if not bare:
        return None
    if not (bare.isascii() and bare.isdecimal()) or len(bare) > DIGITS_MOST:
        raise BadLimits(
            f"{LABELS[name]} can’t be “{text[:40]}”: give a whole number, or leave it empty for no"
            " limit."
        )
    return int(bare)


def _number(name: str, text: str, label: str = "") -> float | None:
    bare = _bare(text)
    if not bare:
        return None
    whole, _, part = bare.partition(".")
    digits = whole + part
    # Not float(): that takes "nan", "1e9" and digits of other scripts.
    if not (digits.isascii() and digits.isdecimal()) or len(bare) > DIGITS_MOST:
        raise BadLimits(
            f"{label or LABELS[name]} can’t be “{text[:40]}”: give a number such as 0.5."
        )
    return float(bare)


def _tools(text: str) -> tuple[str, ...]:
    names = (name.strip() for line in text.splitlines() for name in line.split(","))
    return tuple(name for name in names if name)


def in_labels(text: str) -> tuple[str, str]:
    """Return a refusal with labels for names of columns, and which field it is about, or ""."""
    about = ""
    for name, label in (LABELS | {name: label for name, label, _ in ESTIMATES}).items():
        if not about and text.startswith((name, label)):
            about = name
        # "tier" and "weight" are words as well.
        if "_" in name:
            text = text.replace(name, label)
    return text, about


# --- what holds, and what held ----------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    label: str
    before: str
    after: str


def shown(name: str, value: Any) -> str:
    """Return one limit's value as pages write it."""
    match name, value:
        case "allowed_tools", None:
            return "all of the agent’s"
        case "allowed_tools", tools:
            return ", ".join(tools) or "none"
        case "exact_budget", exact:
            return "before every model call" if exact else "before each turn"
        case "tier", tier:
            return str(tier)
        case "weight", weight:
            return f"{weight:g}"
        case _, None:
            return "no limit"
        case "runs_per_second", per_second:
            return rate(per_second)
        case _:
            return count(value)


def changes(before: Limits | None, after: Limits) -> tuple[Change, ...]:
    """Return what differs between two versions of limits, in the order of the form."""
    none = Limits() if before is None else before
    return tuple(
        Change(label, shown(name, getattr(none, name)), shown(name, getattr(after, name)))
        for name, label in LABELS.items()
        if getattr(none, name) != getattr(after, name)
    )


@dataclass(frozen=True)
class VersionLine:
    """One version of limits. A trial's is compared with what held when it began."""

    scope: Scope
    status: Status
    changes: tuple[Change, ...]


def history(tenant: Tenant, number: int) -> tuple[Page[Scope], tuple[VersionLine, ...]]:
    """Return one page of a tenant's versions of limits, newest first, with what each changed."""
    page = Paginator(Scope.objects.filter(tenant=tenant), HISTORY_ROWS).get_page(number)
    rows = list(page.object_list)
    holds = queries.scope_of(tenant)
    older = Scope.objects.filter(tenant=tenant, trial=False)
    # What held before the oldest of the page was written.
    held = older.filter(version__lt=rows[-1].version).first() if rows else None
    lines: list[VersionLine] = []
    for row in reversed(rows):
        before = None if held is None else queries.limits_of(held)
        lines.append(VersionLine(row, _version_status(row, holds, tenant), _changed(before, row)))
        held = held if row.trial else row
    return page, tuple(reversed(lines))


def _changed(before: Limits | None, row: Scope) -> tuple[Change, ...]:
    return changes(before, queries.limits_of(row))


def _version_status(row: Scope, holds: Scope, tenant: Tenant) -> Status:
    if row.pk == holds.pk:
        return Status("ok", "Holds")
    if row.pk == tenant.trial_id:
        return Status("live", "On trial")
    return Status("kept", "Tried") if row.trial else Status("done", "Held")


# --- who applies it -------------------------------------------------------------------------


@dataclass(frozen=True)
class AppliedLine:
    """One instance: whether it has applied a tenant's limits, and when it last said so."""

    row: RuntimeInstance
    status: Status
    applied: int
    # What it was told must be at least this.
    needed: int
    in_flight: int

    @property
    def current(self) -> bool:
        return self.applied >= self.needed


@dataclass(frozen=True)
class Applied:
    lines: tuple[AppliedLine, ...]
    alive: int
    current: int


def applied(tenant: Tenant, *, now: datetime) -> Applied:
    """Return the live instances that serve a tenant, those that are behind first."""
    entries = PolicyEntry.objects.filter(tenant=tenant).exclude(accepts=Accepts.MOVED)
    needed = {entry.cell_id: entry.version for entry in entries}
    epoch = queries.epoch()
    light = RuntimeInstance.objects.filter(gone_at=None, cell__in=list(needed)).defer(
        "plugins", "stores", "runners", "breakers", "in_flight_older"
    )
    lines = []
    for row in light.select_related("cell").order_by("cell__slug", "name", "pk"):
        state, status = instance_state(row, now)
        if state == "lapsed":
            continue
        version = row.applied_version if row.applied_epoch == epoch else 0
        turns = row.in_flight.get(tenant.slug, 0)
        lines.append(AppliedLine(row, status, version, needed[row.cell_id], turns))
    behind = sorted(lines, key=lambda line: line.current)
    return Applied(
        lines=tuple(behind[:APPLIED_ROWS]),
        alive=len(lines),
        current=sum(line.current for line in lines),
    )


# --- tiers ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TierLine:
    """One tier as a choice: what it is, what asks for it."""

    tier: Tier
    meaning: str
    criteria: str
    suggested: bool
    # What its home has not for this tier, where a move has to carry it; "": nothing.
    lacks: str


@dataclass(frozen=True)
class Tiers:
    lines: tuple[TierLine, ...]
    # What the tenant's numbers say, in a sentence.
    measured: str


def tiers(tenant: Tenant, placement: Placement, *, now: datetime) -> Tiers:
    """Return every tier with its criteria, and how the tenant's last week stands to them."""
    quota = placement.cell.quota_tokens_per_minute
    used = UsageMinute.objects.filter(tenant=tenant, minute__gt=now - WEEK).aggregate(
        peak=Max("tokens"), all=Sum("tokens")
    )
    minutes = WEEK.total_seconds() / 60
    measured = Measured(
        peak_share=(used["peak"] or 0) / quota if quota else None,
        week_share=float(used["all"] or 0) / minutes / quota if quota else None,
    )
    fits, lacks = suggested(measured), _lacks(tenant, placement)
    return Tiers(
        lines=tuple(TierLine(t, MEANING[t], CRITERIA[t], t == fits, lacks[t]) for t in Tier),
        measured=_measured(measured, placement),
    )


def _measured(measured: Measured, placement: Placement) -> str:
    if measured.peak_share is None or measured.week_share is None:
        return f"Nobody has entered the quota of {placement.cell}, so nothing can be compared."
    return (
        f"In the last 7 days its busiest minute took {share(measured.peak_share)} of the quota of"
        f" {placement.cell}, the whole week {share(measured.week_share)}."
    )


def _lacks(tenant: Tenant, placement: Placement) -> dict[Tier, str]:
    others = Placement.objects.exclude(tenant=tenant)
    store = others.filter(store=placement.store).count()
    cell = others.filter(cell=placement.cell).count()
    shares_store = f"{placement.store} holds {counted(store, 'other tenant')}" if store else ""
    shares_cell = f"{placement.cell} serves {counted(cell, 'other tenant')}" if cell else ""
    return {
        Tier.POOLED: "",
        Tier.BRIDGE: shares_store,
        Tier.SILO: " and ".join(filter(None, (shares_cell, shares_store))),
    }


# --- room -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RoomLine:
    """One quota of a cell as a bar: normal load, then the largest limit on top of it."""

    binding: Binding
    # Percent of the quota, for the bar.
    normal: float
    largest: float
    # The largest limit is none: nothing could hold it.
    unlimited: bool
    # Nobody has measured how much of it a run takes: the largest limit is at least this.
    unknown: bool
    label: str


@dataclass(frozen=True)
class Room:
    """Whether a tenant's cell has room for limits on top of normal load."""

    lines: tuple[RoomLine, ...]
    # Held against these quotas; False: the tenant has a model account of its own.
    counts: bool
    fits: bool
    # These limits would not be let hold.
    refused: bool
    # Why nobody can know whether they fit, and what to type; "": it is known.
    unknown: str
    # Who does not fit, in sentences; the worst first.
    breaks: tuple[str, ...]
    # The most that the limits let the tenant use, and by which of them.
    most: str
    # The tenant's own limit on top of normal load, as arithmetic, for each quota.
    own: tuple[str, ...]


def room(found: Assessed, tier: str) -> Room:
    """Return what was held against a cell's quota as a page shows it."""
    return Room(
        lines=tuple(
            _room_line(binding, unknown=binding.unit in found.unknown)
            for binding in found.headroom.bindings
        ),
        counts=tier == Tier.POOLED,
        fits=found.headroom.fits,
        refused=found.refused is not None,
        unknown=_unknown(found),
        breaks=tuple(_breaks(one) for one in found.headroom.breakers),
        most=_most(found),
        own=tuple(_own(found, tier)),
    )


def _most(found: Assessed) -> str:
    bound = {"rate": "the rate binds first", "slots": "runs at the same time bind first"}
    if not found.after.bound_by:
        return f"Nothing bounds how many runs {found.tenant} begins."
    return (
        f"At most {found.after.runs_per_minute:,.4g} runs a minute of {found.tenant}:"
        f" {bound[found.after.bound_by]}."
    )


def _unknown(found: Assessed) -> str:
    labels = {name: label for name, label, _ in ESTIMATES}
    asked = " and ".join(f"“{labels[name]}”" for name in found.unknown.values())
    return asked and (
        f"No run in {found.cell.slug} was measured in the last 24 hours. Until somebody types"
        f" {asked} under “What nobody has measured yet”, nobody can know whether limits fit."
    )


def _own(found: Assessed, tier: str) -> Iterator[str]:
    if tier != Tier.POOLED:
        return
    for binding in found.headroom.bindings:
        limit = found.after.load.of(binding.unit)
        if binding.unit in found.unknown or limit is None or not math.isfinite(limit):
            continue
        peak = binding.normal + limit
        under = "under" if peak < binding.room else "not under"
        yield (
            f"{count(binding.normal)} + {count(limit)} = {count(peak)} {binding.unit} a minute,"
            f" {under} {count(binding.room)}."
        )


def _room_line(binding: Binding, *, unknown: bool) -> RoomLine:
    unlimited = not math.isfinite(binding.largest)
    normal = min(100.0, 100 * binding.normal / binding.quota)
    largest = 100.0 if unlimited else 100 * binding.largest / binding.quota
    said = f"at least {count(binding.largest)}" if unknown else count(binding.largest)
    return RoomLine(
        binding=binding,
        normal=normal,
        largest=min(100 - normal, largest),
        unlimited=unlimited,
        unknown=unknown,
        label=f"Normal load {count(binding.normal)} and the largest limit,"
        f" {'no limit' if unlimited else said}, of a quota of {count(binding.quota)}"
        f" {binding.unit} a minute",
    )


def _breaks(one: Breaker) -> str:
    if not math.isfinite(one.limit):
        return f"{one.tenant} has no limit in {one.unit} a minute, so nothing keeps room free."
    return (
        f"{one.tenant} breaks it: its {count(one.limit)} {one.unit} a minute with normal load make"
        f" {count(one.peak)}."
    )


# --- the page ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrialPanel:
    """Limits that are tried, and what they would have refused."""

    scope: Scope
    changes: tuple[Change, ...]
    # Reason, turns of today, turns since the trial began.
    counts: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class LimitsPage:
    """A tenant's limits: what holds, what is tried, what held, and who applies it."""

    tenant: Tenant
    scope: Scope
    # The newest version, trials too: what a form that is sent back has seen.
    newest: int
    # The form that says what holds.
    form: Given
    # Every limit with its label, as a table has them.
    holds: tuple[tuple[str, str], ...]
    # None: the budget is not used up.
    spent_until: datetime | None
    generation: int
    # None: nothing is tried.
    trial: TrialPanel | None
    tiers: Tiers
    applied: Applied
    history: Page[Scope]
    versions: tuple[VersionLine, ...]
    # Of the limits that hold.
    room: Room


def limits_page(tenant: Tenant, number: int, *, now: datetime) -> LimitsPage:
    """Return what a tenant's page of limits shows; `number` is the page of its history."""
    scope = queries.scope_of(tenant)
    limits = queries.limits_of(scope)
    usage = usage_page(tenant, now=now)
    page, versions = history(tenant, number)
    entries = PolicyEntry.objects.filter(tenant=tenant).exclude(accepts=Accepts.MOVED)
    most = entries.aggregate(most=Max("runner_generation"))["most"]
    return LimitsPage(
        tenant=tenant,
        scope=scope,
        newest=Scope.objects.filter(tenant=tenant)[0].version,
        form=form_of(limits),
        holds=tuple((label, shown(name, getattr(limits, name))) for name, label in LABELS.items()),
        spent_until=usage.spent_until,
        generation=most or 1,
        trial=_trial(usage.trial, limits),
        tiers=tiers(tenant, tenant.placement, now=now),
        applied=applied(tenant, now=now),
        history=page,
        versions=versions,
        room=room(assess(tenant, now=now), scope.tier),
    )


def dry_run(tenant: Tenant, given: Given, *, now: datetime) -> Room:
    """Return whether there would be room for limits that are being typed; nothing is changed.

    Raises BadLimits, BadEstimate.
    """
    limits = limits_of(given)
    return room(assess(tenant, limits, typed=estimate_of(given), now=now), limits.tier)


def _trial(trial: Trial | None, holds: Limits) -> TrialPanel | None:
    if trial is None:
        return None
    tried = replace(queries.limits_of(trial.scope), tier=holds.tier, weight=holds.weight)
    return TrialPanel(
        scope=trial.scope,
        changes=changes(holds, tried),
        counts=tuple(
            (reason, trial.today.get(reason, 0), turns)
            for reason, turns in sorted(trial.in_all.items(), key=lambda item: -item[1])
        ),
    )
