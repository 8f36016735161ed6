"""Reads of what tenants used, what they may use, and what was held against them."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

from django.conf import settings
from django.db.models import F, OuterRef, Q, QuerySet, Subquery, Sum
from django.db.models.functions import TruncDate

from capacity.domain.reconciling import NOTHING, Numbers, Verdict, judge
from capacity.domain.usage import REASONS, Counts, bounds, day_of, differs_enough, next_midnight
from capacity.models import UsageDay, UsageMinute
from tenants import queries as tenants_queries
from tenants.models import Cell, PolicyEntry, RuntimeInstance, Scope, Tenant, UsageLine

# How many tenants a runtime is told to build ahead.
PREWARMED_MOST = 200
# So many ids a statement names; where there are more, it reads everybody's rows.
NAMED_MOST = 1_000
# How many tenants a cell's usage names, and how many days a reconciliation shows.
LARGEST, RECONCILED_MOST = 20, 500
# Of so many days everybody's rows are in memory at once.
RECONCILED_AT_ONCE = 7
# A time that is longer than this is added up by the day: minutes would be millions of rows.
BY_MINUTE_HOURS = 48
# What a tenant's page looks back.
MINUTES_SHOWN, DAYS_SHOWN = 60, 30

MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)


# --- budgets --------------------------------------------------------------------------------


def tokens_left(tenants: Collection[Tenant], *, now: datetime) -> dict[str, int | None]:
    """Return what is left of each tenant's budget of its present day, by slug; None: no budget.

    By what has been added to the ledger: seconds behind what runtimes have served.
    """
    known = _of(_budgeted(), "pk", [tenant.pk for tenant in tenants])
    budgets = dict(known.values_list("pk", "budget"))
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

    `tenants` are ids, beside whom whoever is marked is looked at; None: everybody.
    """
    marked = list(Tenant.objects.filter(budget_spent_until__gt=now).order_by("pk"))
    # Everybody's present day is one of these.
    days = [(now + away).date() for away in (-DAY, timedelta(), DAY)]
    spent = (
        UsageDay.objects.select_related("tenant")
        .filter(day__in=days)
        .annotate(budget=_newest_budget("tenant_id"))
        .filter(tokens__gte=F("budget"))
    )
    if tenants is not None:
        spent = spent.filter(tenant__in=[*tenants, *(tenant.pk for tenant in marked)])
    wanted = {
        row.tenant: next_midnight(now, row.tenant.time_zone)
        for row in spent.order_by("tenant_id")
        if row.day == day_of(now, row.tenant.time_zone)
    }
    found: list[tuple[Tenant, datetime | None]] = [
        (tenant, until) for tenant, until in wanted.items() if tenant.budget_spent_until != until
    ]
    return found + [(tenant, None) for tenant in marked if tenant not in wanted]


def _newest_budget(tenant: str) -> Subquery:
    scopes = Scope.objects.filter(tenant=OuterRef(tenant), trial=False).order_by("-version")
    return Subquery(scopes.values("daily_token_budget")[:1])


def _budgeted() -> QuerySet[Any]:
    return Tenant.objects.annotate(budget=_newest_budget("pk"))


def _used_today(tenants: Collection[Tenant], *, now: datetime) -> dict[int, int]:
    """Return the tokens that each tenant (id) used in its present day."""
    today = {tenant.pk: day_of(now, tenant.time_zone) for tenant in tenants}
    rows = _of(UsageDay.objects.filter(day__in=set(today.values())), "tenant", list(today))
    return {
        tenant: tokens
        for tenant, day, tokens in rows.values_list("tenant_id", "day", "tokens")
        if day == today.get(tenant)
    }


def _of(rows: QuerySet[Any], name: str, ids: list[int]) -> QuerySet[Any]:
    """Return the rows of these ids, and of others where naming so many would cost more."""
    return rows.filter(**{f"{name}__in": ids}) if len(ids) <= NAMED_MOST else rows


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
    for told, tenant, slug in entries.values_list("cell_id", "tenant_id", "tenant__slug"):
        active[told].append((-turns[tenant], slug))
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
    scope = tenants_queries.scope_of(tenant)
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
        # The limit that holds now: the one that refused may have been another.
        Refusals(
            name,
            turns,
            REASONS[name].why,
            f"now {limit}" if (limit := met.get(name, "")) else "",
            REASONS[name].more,
        )
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


# --- a cell, and who uses most of it --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TenantUsed:
    """What one tenant used of what all used together."""

    tenant: str
    tokens: int
    turns: int
    # Refused turns.
    refused: int
    # Of the tokens of all, 0 to 1.
    share: float


@dataclass(frozen=True, slots=True)
class CellUsage:
    """What the tenants of a cell used in a window; of a tenant that moved, all is its home's."""

    since: datetime
    now: datetime
    tokens: int
    turns: int
    model_calls: int
    # Most tokens first.
    largest: Sequence[TenantUsed]
    # What everybody else used together. None: there is nobody else.
    rest: TenantUsed | None
    # The provider's quota, tokens per minute. None: not of one cell, or nobody has entered it.
    quota_tokens_per_minute: int | None


def cell_usage(cell: Cell | None, *, hours: int = 1, now: datetime) -> CellUsage:
    """Return what tenants who live in the cell used in the last hours; None: in all cells.

    A longer time is added up from days, each tenant's own, of which the first may begin earlier.
    """
    since = now - hours * HOUR
    rows: QuerySet[Any] = UsageMinute.objects.filter(minute__gt=since, minute__lte=now + MINUTE)
    if hours > BY_MINUTE_HOURS:
        rows = UsageDay.objects.filter(day__gte=since.date(), day__lte=(now + DAY).date())
    if cell is not None:
        rows = rows.filter(tenant__placement__cell=cell)
    all_used = _numbers(rows)
    by_tenant = rows.values_list("tenant_id", "tenant__slug").annotate(
        used=Sum("tokens"), begun=Sum("turns")
    )
    top = list(by_tenant.order_by("-used", "-begun", "tenant_id")[:LARGEST])
    refused: dict[int, int] = defaultdict(int)
    ids = [pk for pk, *_ in top]
    of_top = rows.filter(tenant__in=ids).exclude(refused={})
    for tenant, reasons in of_top.values_list("tenant_id", "refused").iterator():
        refused[tenant] += sum(reasons.values())
    largest = [
        TenantUsed(slug, int(tokens), int(turns), refused[pk], _part(tokens, all_used.tokens))
        for pk, slug, tokens, turns in top
    ]
    return CellUsage(
        since=since,
        now=now,
        tokens=all_used.tokens,
        turns=all_used.turns,
        model_calls=all_used.model_calls,
        largest=largest,
        rest=_rest(rows.exclude(tenant__in=ids), all_used) if len(top) == LARGEST else None,
        quota_tokens_per_minute=None if cell is None else cell.quota_tokens_per_minute,
    )


def _rest(rows: QuerySet[Any], all_used: Counts) -> TenantUsed | None:
    used = _numbers(rows)
    if used == Counts():
        return None
    reasons = rows.exclude(refused={}).values_list("refused", flat=True).iterator()
    refused = sum(sum(one.values()) for one in reasons)
    share = _part(used.tokens, all_used.tokens)
    return TenantUsed("everybody else", used.tokens, used.turns, refused, share)


def _numbers(rows: QuerySet[Any]) -> Counts:
    """Return the sums of all rows, without refusals."""
    sums = rows.aggregate(begun=Sum("turns"), called=Sum("model_calls"), used=Sum("tokens"))
    return _sums(sums)


def _sums(sums: Mapping[str, Any]) -> Counts:
    return Counts(int(sums["begun"] or 0), int(sums["called"] or 0), int(sums["used"] or 0))


def _part(some: float, of: float) -> float:
    return float(some / of) if of else 0.0


# --- what is invoiced, and what it is made of -----------------------------------------------


def invoiced(first: date, last: date, *, tenant: Tenant | None = None) -> QuerySet[UsageDay]:
    """Return the days of the ledger from `first` to `last`, of one tenant or of all.

    Each tenant's days are those of its own time zone.
    """
    rows = UsageDay.objects.select_related("tenant").filter(day__gte=first, day__lte=last)
    return rows if tenant is None else rows.filter(tenant=tenant)


@dataclass(frozen=True, slots=True)
class Reconciled:
    """One day of one tenant: what was held against it, what is invoiced, and why they differ."""

    tenant: Tenant
    day: date
    # Sums of what runtimes reported: what throttled. None: it is kept no longer.
    reported: Numbers | None
    # The day of the ledger.
    invoiced: Numbers
    verdict: Verdict

    @property
    def difference(self) -> int:
        """Tokens that were reported and are not invoiced; below 0: the other way round."""
        return 0 if self.reported is None else self.reported.tokens - self.invoiced.tokens


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """Days of the ledger beside what they are made of."""

    first: date
    last: date
    # Unexplained ones first, then those that differ, newest first; RECONCILED_MOST at most.
    rows: Sequence[Reconciled]
    # How many days there are, and of them.
    compared: int
    differ: int
    unexplained: int
    # Of the days whose reports are kept.
    reported_tokens: int
    # Of all days.
    invoiced_tokens: int


def reconciliation(
    first: date, last: date, *, tenant: Tenant | None = None, now: datetime
) -> Reconciliation:
    """Return the days from `first` to `last` compared with the reports that they are made of.

    Reports are kept line by line for USAGE_LINES_KEPT_DAYS, by the minute for
    USAGE_MINUTES_KEPT_DAYS; older days have nothing to be compared with.
    """
    names = {
        pk: (slug, zone)
        for pk, slug, zone in (
            Tenant.objects.all() if tenant is None else Tenant.objects.filter(pk=tenant.pk)
        ).values_list("pk", "slug", "time_zone")
    }
    kept_since = now - timedelta(days=settings.USAGE_MINUTES_KEPT_DAYS)
    kept: dict[tuple[date, str], bool] = {}
    # What is left of each tenant's days that don't agree, added up.
    left: dict[int, Numbers] = defaultdict(lambda: NOTHING)
    differing: list[_Compared] = []
    agreeing: list[_Compared] = []
    compared = reported_tokens = invoiced_tokens = 0

    def newest(one: _Compared) -> tuple[int, str]:
        return -one.day.toordinal(), names[one.tenant][0]

    for one in _compared(first, last, tenant, now):
        if one.tenant not in names:
            # It was added while this reads.
            continue
        if one.said != one.billed or one.fresh != NOTHING:
            differs = one.said.minus(one.fresh).minus(one.billed)
            left[one.tenant] = left[one.tenant].plus(differs)
        if not first <= one.day <= last:
            continue
        compared += 1
        invoiced_tokens += one.billed.tokens
        began = one.day, names[one.tenant][1]
        if began not in kept:
            kept[began] = bounds(*began)[0] >= kept_since
        if kept[began]:
            reported_tokens += one.said.tokens
        if kept[began] and one.said != one.billed:
            differing.append(one)
            continue
        agreeing.append(one)
        if len(agreeing) > 20 * RECONCILED_MOST:
            agreeing = heapq.nsmallest(RECONCILED_MOST, agreeing, newest)

    def judged(one: _Compared) -> tuple[_Compared, Numbers | None, Verdict]:
        said = one.said if kept[one.day, names[one.tenant][1]] else None
        shifted = left[one.tenant] == NOTHING
        return one, said, judge(said, one.fresh, one.billed, shifted=shifted)

    differ = [judged(one) for one in sorted(differing, key=newest)]
    differ.sort(key=lambda found: not found[2].unexplained)
    agree = map(judged, heapq.nsmallest(RECONCILED_MOST, agreeing, newest))
    shown = [*differ, *agree][:RECONCILED_MOST]
    tenants = Tenant.objects.in_bulk({one.tenant for one, *_ in shown})
    return Reconciliation(
        first=first,
        last=last,
        rows=[
            Reconciled(tenants[one.tenant], one.day, said, one.billed, verdict)
            for one, said, verdict in shown
        ],
        compared=compared,
        differ=len(differ),
        unexplained=sum(verdict.unexplained for *_, verdict in differ),
        reported_tokens=reported_tokens,
        invoiced_tokens=invoiced_tokens,
    )


class _Compared(NamedTuple):
    """One day of one tenant (id): all that was reported of it, what of that has only just come."""

    tenant: int
    day: date
    said: Numbers
    fresh: Numbers
    billed: Numbers


def _compared(first: date, last: date, tenant: Tenant | None, now: datetime) -> Iterator[_Compared]:
    """Yield every day beside what was reported of it, newest first, a few days at a time.

    Of thousands of tenants a year is millions of rows, and somebody only opens a page.
    """
    # A day more on each side: where a change of zone may have put what is missing inside.
    until = last + DAY
    while until >= first - DAY:
        since = max(first - DAY, until - (RECONCILED_AT_ONCE - 1) * DAY)
        # The days FIRST. What is added while this reads is then among the lines, as of a moment
        # ago; the other way round it would be in a day whose lines were read before.
        ledger = _billed(since, until, tenant)
        reported = _reported(since, until, tenant, now)
        for pk, day in ledger.keys() | reported.keys():
            said, fresh = reported.get((pk, day), (NOTHING, NOTHING))
            yield _Compared(pk, day, said, fresh, ledger.get((pk, day), NOTHING))
        until = since - DAY


def _billed(first: date, last: date, tenant: Tenant | None) -> dict[tuple[int, date], Numbers]:
    rows = invoiced(first, last, tenant=tenant).select_related(None)
    named = rows.values_list("tenant_id", "day", "turns", "model_calls", "tokens")
    return {(pk, day): Numbers(*counts) for pk, day, *counts in named.iterator()}


# Tenant id and day -> all that was reported of it, and what of that has only just come.
_Days = dict[tuple[int, date], tuple[Numbers, Numbers]]


def _reported(first: date, last: date, tenant: Tenant | None, now: datetime) -> _Days:
    if tenant is not None:
        zones = [tenant.time_zone]
    else:
        zones = list(Tenant.objects.order_by().values_list("time_zone", flat=True).distinct())
    # A line goes so long after it was added, which may be before the end of a minute that a fast
    # clock gave it: a day is added up by its lines where all of them are there for certain.
    lines_since = now - timedelta(days=settings.USAGE_LINES_KEPT_DAYS - 1)
    just_now = Q(rolled_at=None) | Q(rolled_at__gt=now - MINUTE)
    found: _Days = {}
    for zone in zones:
        by_line = max(first, day_of(lines_since, zone) + DAY)
        lines = _within(UsageLine.objects.all(), by_line, last, zone, tenant)
        found |= _by_day(lines, zone, just_now)
        minutes = _within(UsageMinute.objects.all(), first, min(last, by_line - DAY), zone, tenant)
        found |= _by_day(minutes, zone, None)
    return found


def _within(
    rows: QuerySet[Any], first: date, last: date, zone: str, tenant: Tenant | None
) -> QuerySet[Any]:
    """Return the rows of these days of a time zone; none where the last is before the first."""
    if last < first:
        return rows.none()
    rows = rows.filter(minute__gte=bounds(first, zone)[0], minute__lt=bounds(last, zone)[1])
    return rows.filter(tenant__time_zone=zone) if tenant is None else rows.filter(tenant=tenant)


def _by_day(rows: QuerySet[Any], zone: str, fresh: Q | None) -> _Days:
    names = ("turns", "model_calls", "tokens")
    sums = {f"all_{name}": Sum(name) for name in names}
    if fresh is not None:
        sums |= {f"fresh_{name}": Sum(name, filter=fresh, default=0) for name in names}
    days = (
        rows.order_by()
        .annotate(on=TruncDate("minute", tzinfo=ZoneInfo(zone)))
        .values_list("tenant_id", "on")
        .annotate(**sums)
    )
    return {
        (tenant, day): (
            # PostgreSQL's sums are decimals.
            Numbers(*map(int, counts[:3])),
            Numbers(*map(int, counts[3:])) if fresh is not None else NOTHING,
        )
        for tenant, day, *counts in days
    }
