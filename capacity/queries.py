"""Reads of what tenants used, what they may use, and what was held against them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Any

from django.db.models import F, OuterRef, QuerySet, Subquery, Sum

from capacity.domain.usage import REASONS, Counts, day_of, differs_enough, next_midnight
from capacity.models import UsageDay, UsageMinute
from tenants.models import Cell, PolicyEntry, RuntimeInstance, Scope, Tenant

# How many tenants a runtime is told to build ahead.
PREWARMED_MOST = 200
# What a tenant's page looks back.
MINUTES_SHOWN, DAYS_SHOWN = 60, 30

MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)


# --- budgets --------------------------------------------------------------------------------


def tokens_left(tenants: Collection[Tenant], *, now: datetime) -> dict[str, int | None]:
    """Return what is left of each tenant's budget of its present day, by slug; None: no budget.

    By what has been added to the ledger: seconds behind what runtimes have served.
    """
    pks = [tenant.pk for tenant in tenants]
    budgets = dict(_budgeted().filter(pk__in=pks).values_list("pk", "budget"))
    used = _used_today(tenants, now=now)
    left: dict[str, int | None] = {}
    for tenant in tenants:
        budget = budgets.get(tenant.pk)
        left[tenant.slug] = None if budget is None else max(0, budget - used.get(tenant.pk, 0))
    return left


def budget_spent_until(tenant: Tenant, *, now: datetime) -> datetime | None:
    """Return until when the tenant's budget is used up: its midnight; None: it is not."""
    budget = _budgeted().values_list("budget", flat=True).get(pk=tenant.pk)
    used = _used_today([tenant], now=now).get(tenant.pk, 0)
    return next_midnight(now, tenant.time_zone) if budget is not None and used >= budget else None


def budgets_to_mark(
    *, tenants: Collection[int] | None, now: datetime
) -> list[tuple[Tenant, datetime | None]]:
    """Return tenants whose mark "used up until" is not what their usage says, with what it says.

    `tenants` are ids; None: of all.
    """
    # Everybody's present day is one of these.
    days = [(now + away).date() for away in (-DAY, timedelta(), DAY)]
    spent = (
        UsageDay.objects.select_related("tenant")
        .filter(day__in=days)
        .annotate(budget=_newest_budget("tenant_id"))
        .filter(tokens__gte=F("budget"))
    )
    marked = Tenant.objects.filter(budget_spent_until__gt=now)
    if tenants is not None:
        spent, marked = spent.filter(tenant__in=tenants), marked.filter(pk__in=tenants)
    wanted = {
        row.tenant: next_midnight(now, row.tenant.time_zone)
        for row in spent.order_by("tenant_id")
        if row.day == day_of(now, row.tenant.time_zone)
    }
    found: list[tuple[Tenant, datetime | None]] = [
        (tenant, until) for tenant, until in wanted.items() if tenant.budget_spent_until != until
    ]
    return found + [(tenant, None) for tenant in marked.order_by("pk") if tenant not in wanted]


def _newest_budget(tenant: str) -> Subquery:
    scopes = Scope.objects.filter(tenant=OuterRef(tenant), trial=False).order_by("-version")
    return Subquery(scopes.values("daily_token_budget")[:1])


def _budgeted() -> QuerySet[Any]:
    return Tenant.objects.annotate(budget=_newest_budget("pk"))


def _used_today(tenants: Collection[Tenant], *, now: datetime) -> dict[int, int]:
    """Return the tokens that each tenant (id) used in its present day."""
    today = {tenant.pk: day_of(now, tenant.time_zone) for tenant in tenants}
    rows = UsageDay.objects.filter(tenant__in=list(today), day__in=set(today.values()))
    return {
        tenant: tokens
        for tenant, day, tokens in rows.values_list("tenant_id", "day", "tokens")
        if day == today[tenant]
    }


# --- building ahead -------------------------------------------------------------------------


def prewarm_to_publish(*, now: datetime) -> list[tuple[Cell, list[str]]]:
    """Return cells whose published list of tenants to build ahead is out of date, with the new.

    The most active first: of the last hour, and of the hour to come as it was yesterday.
    """
    turns: dict[int, int] = defaultdict(int)
    for since, until in ((now - HOUR, now), (now - DAY, now - DAY + HOUR)):
        rows = UsageMinute.objects.filter(minute__gte=since, minute__lt=until, turns__gt=0)
        for tenant, total in rows.values_list("tenant_id").annotate(total=Sum("turns")):
            turns[tenant] += total
    entries = PolicyEntry.objects.filter(tenant__in=list(turns), moved_to=None)
    active: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for cell, tenant, slug in entries.values_list("cell_id", "tenant_id", "tenant__slug"):
        active[cell].append((-turns[tenant], slug))
    found = []
    for cell in Cell.objects.order_by("pk"):
        wanted = [slug for _, slug in sorted(active[cell.pk])[:PREWARMED_MOST]]
        if differs_enough(cell.document.get("prewarm", []), wanted):
            found.append((cell, wanted))
    return found


# --- a tenant's own page --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MinuteUsed:
    """One minute of a tenant."""

    minute: datetime
    counts: Counts


@dataclass(frozen=True, slots=True)
class DayUsed:
    """One day of a tenant, in its own time zone."""

    day: date
    counts: Counts


@dataclass(frozen=True, slots=True)
class Refusals:
    """Turns that were refused today for one reason."""

    reason: str
    turns: int
    # What happened.
    why: str
    # What the limit is that was met; empty where it is none of the tenant's.
    limit: str
    # How to get more.
    more: str


@dataclass(frozen=True, slots=True)
class Trial:
    """Limits that are tried beside those that hold."""

    scope: Scope
    # Reason -> turns of today that they would have refused.
    today: Mapping[str, int]
    # The same since the day on which the trial began.
    in_all: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class UsagePage:
    """What a tenant used, what it may use, and why it was refused."""

    tenant: Tenant
    now: datetime
    # The tenant's present day, and when the next begins.
    day: date
    resets_at: datetime
    today: Counts
    # The minute that runs.
    minute: Counts
    # Turns that ran when instances last reported.
    running: int
    # The limits that hold.
    scope: Scope
    # None: no budget.
    tokens_left: int | None
    # None: the budget is not used up.
    spent_until: datetime | None
    # Most turns first.
    refusals: Sequence[Refusals]
    # None: no limits are being tried.
    trial: Trial | None
    # Oldest first, without gaps; the last is the minute that runs.
    minutes: Sequence[MinuteUsed]
    # Oldest first, without gaps; the last is today.
    days: Sequence[DayUsed]

    @property
    def version(self) -> str:
        """What changes whenever the page does."""
        parts = (
            f"{self.now:%d%H%M}",
            self.today.turns,
            self.today.tokens,
            self.today.refusals,
            sum(self.today.would_refuse.values()),
            self.running,
            self.scope.version,
            self.trial.scope.version if self.trial is not None else "",
            f"{self.spent_until:%d%H%M}" if self.spent_until is not None else "",
        )
        return ".".join(map(str, parts))


def usage_page(tenant: Tenant, *, now: datetime) -> UsagePage:
    """Return what the tenant used and may use, as its own page and the API show it."""
    today = day_of(now, tenant.time_zone)
    running_minute = now.replace(second=0, microsecond=0)
    scope = Scope.objects.filter(tenant=tenant, trial=False).order_by("-version")[0]
    minutes = _minutes(tenant, running_minute)
    days = _days(tenant, today)
    used = days[-1].counts
    budget = scope.daily_token_budget
    spent = tenant.budget_spent_until
    return UsagePage(
        tenant=tenant,
        now=now,
        day=today,
        resets_at=next_midnight(now, tenant.time_zone),
        today=used,
        minute=minutes[-1].counts,
        running=running_now(tenant),
        scope=scope,
        tokens_left=None if budget is None else max(0, budget - used.tokens),
        spent_until=spent if spent is not None and spent > now else None,
        refusals=_refusals(used, scope),
        trial=_trial(tenant, used),
        minutes=minutes,
        days=days,
    )


def running_now(tenant: Tenant) -> int:
    """Return how many turns of the tenant ran when its instances last reported."""
    cells = PolicyEntry.objects.filter(tenant=tenant, moved_to=None).values("cell")
    rows = RuntimeInstance.objects.filter(cell__in=cells, gone_at=None)
    return sum(counts.get(tenant.slug, 0) for counts in rows.values_list("in_flight", flat=True))


def _minutes(tenant: Tenant, last: datetime) -> list[MinuteUsed]:
    first = last - (MINUTES_SHOWN - 1) * MINUTE
    rows = UsageMinute.objects.filter(tenant=tenant, minute__gte=first, minute__lte=last)
    had = {row.minute: counts_of(row) for row in rows}
    times = (first + number * MINUTE for number in range(MINUTES_SHOWN))
    return [MinuteUsed(at, had.get(at, Counts())) for at in times]


def _days(tenant: Tenant, last: date) -> list[DayUsed]:
    first = last - (DAYS_SHOWN - 1) * DAY
    rows = UsageDay.objects.filter(tenant=tenant, day__gte=first, day__lte=last)
    had = {row.day: counts_of(row) for row in rows}
    return [
        DayUsed(day, had.get(day, Counts()))
        for day in (first + number * DAY for number in range(DAYS_SHOWN))
    ]


def counts_of(row: UsageMinute | UsageDay) -> Counts:
    """Return the counts of a row of the ledger."""
    return Counts(row.turns, row.model_calls, row.tokens, row.refused, row.would_refuse)


def _refusals(used: Counts, scope: Scope) -> list[Refusals]:
    met = {
        "rate": _limit(scope.runs_per_second, "run a second", "runs a second"),
        "concurrency": _limit(scope.max_concurrent_runs, "run at once", "runs at once"),
        "budget": _limit(scope.daily_token_budget, "token a day", "tokens a day"),
    }
    return [
        Refusals(name, turns, REASONS[name].why, met.get(name, ""), REASONS[name].more)
        for name, turns in sorted(used.refused.items(), key=lambda item: (-item[1], item[0]))
    ]


def _limit(value: float | None, one: str, many: str) -> str:
    # No limit by now: it was another scope that refused.
    return "" if value is None else f"{value:,.10g} {one if value == 1 else many}"


def _trial(tenant: Tenant, used: Counts) -> Trial | None:
    scope = tenant.trial
    if scope is None:
        return None
    total = Counts()
    since = day_of(scope.at, tenant.time_zone)
    for row in UsageDay.objects.filter(tenant=tenant, day__gte=since).iterator():
        total += Counts(would_refuse=row.would_refuse)
    return Trial(scope, used.would_refuse, total.would_refuse)
