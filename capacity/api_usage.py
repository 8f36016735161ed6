"""Usage over HTTP: a tenant's own, and every tenant's for operators."""

from __future__ import annotations

from datetime import date, datetime
from typing import Annotated, Any, cast

from django.http import HttpRequest, StreamingHttpResponse
from ninja import Query, Router, Schema
from pydantic import Field

from capacity import queries
from capacity.domain.usage import Counts
from capacity.exporting import days_asked, usage_csv
from durable.clock import database_now
from tenants.api import Error, LimitsOut, NotFound, PageOut, Slug, find, page, require
from tenants.domain.roles import Actor, Role
from tenants.models import Cell, Scope, Tenant, Token

tenant_router = Router(tags=["tenant"])
ops_router = Router(tags=["usage"])

Day = Annotated[str, Field(max_length=10)]
# Above 48 by whole days.
Hours = Annotated[int, Field(ge=1, le=31 * 24)]


class CountsOut(Schema):
    turns: int
    model_calls: int
    tokens: int
    # Reason (rate, concurrency, quota, budget, draining, breaker, other) -> refused turns.
    refused: dict[str, int]
    # The same, of limits that are only tried: these turns were served.
    would_refuse: dict[str, int]


class UsageLimitsOut(LimitsOut):
    tier: str


class RefusalsOut(Schema):
    reason: str
    # Of today.
    turns: int
    # What happened.
    why: str
    # The limit that was met; empty where it is none of the tenant's.
    limit: str
    # How to get more.
    more: str


class TrialOut(Schema):
    limits: UsageLimitsOut
    # Reason -> turns that they would have refused, which were served.
    today: dict[str, int]
    # Since the day on which the trial began.
    in_all: dict[str, int]


class UsageOut(Schema):
    tenant: str
    # Whose midnight begins the day.
    time_zone: str
    at: datetime
    day: date
    # When the next day begins, and with it the budget anew.
    resets_at: datetime
    # Seconds behind what is being served: reports come every few.
    today: CountsOut
    this_minute: CountsOut
    # Turns that ran when instances last reported.
    running: int
    limits: UsageLimitsOut
    # Null: no budget.
    tokens_left: int | None
    # Turns are refused until then, for today's budget is used up. Null: it is not.
    refused_until: datetime | None
    # Most turns first.
    refusals: list[RefusalsOut]
    # Null: no limits are being tried.
    trial: TrialOut | None


class TenantUsedOut(Schema):
    tenant: str
    tokens: int
    turns: int
    refused: int
    # Of all tokens, 0 to 1.
    share: float


class CellUsageOut(Schema):
    # Null: all cells.
    cell: str | None
    since: datetime
    at: datetime
    tokens: int
    turns: int
    model_calls: int
    # Null: not of one cell, or nobody has entered it.
    quota_tokens_per_minute: int | None
    largest: list[TenantUsedOut]
    # Everybody else together. Null: there is nobody else.
    rest: TenantUsedOut | None


class DayOut(CountsOut):
    id: int
    tenant: str
    day: date
    time_zone: str


class NumbersOut(Schema):
    turns: int
    model_calls: int
    tokens: int


class ReconciledOut(Schema):
    tenant: str
    day: date
    # Sums of what runtimes reported. Null: it is kept no longer.
    reported: NumbersOut | None
    invoiced: NumbersOut
    # Reported and not invoiced; below 0: the other way round.
    difference_tokens: int
    agrees: bool
    # True: somebody has to look before this day is invoiced.
    unexplained: bool
    explanation: str


class ReconciliationOut(Schema):
    first: date
    last: date
    compared: int
    differ: int
    unexplained: int
    reported_tokens: int
    invoiced_tokens: int
    # Unexplained ones first, then those that differ; 500 at most.
    rows: list[ReconciledOut]


class DaysIn(Schema):
    # "2026-03-01". Empty: this month so far.
    first: Day = Field("", alias="from")
    last: Day = Field("", alias="to")
    # Null: all tenants.
    tenant: Slug | None = None

    def asked(self, now: datetime) -> tuple[date, date]:
        """Return the first and the last day. Raises BadDays."""
        return days_asked(self.first, self.last, today=now.date())

    def whose(self) -> Tenant | None:
        """Return the tenant that is named. Raises NotFound."""
        return None if self.tenant is None else find(Tenant, "tenant", slug=self.tenant)


Days = Annotated[DaysIn, Query(...)]
ASKED = {403: Error, 404: Error, 422: Error}


# --- a tenant's own ---------------------------------------------------------------------------


@tenant_router.get("/{slug:slug}/usage", response={200: UsageOut, 403: Error, 404: Error})
def own_usage(request: HttpRequest, slug: str) -> dict[str, Any]:
    """Answer what a tenant has used and may use (the tenant's own token or people; operators)."""
    return _usage(_readable(request, slug))


def _readable(request: HttpRequest, slug: str) -> Tenant:
    """Return the tenant of this slug, if the caller may read its usage. Raises NotFound.

    Whether there is another tenant of that slug is nobody's business who may not read it.
    """
    caller = cast("Actor | Token | Tenant", request.auth)  # type: ignore[attr-defined]
    if isinstance(caller, Actor):
        return find(Tenant, "tenant", slug=slug)
    own = caller.tenant if isinstance(caller, Token) else caller
    if own is None or own.slug != slug:
        raise NotFound(
            f"There is no tenant {slug} here: you read one tenant's usage, and its slug is another."
        )
    # Read afresh: a token's row, and its tenant with it, may be a second old.
    return Tenant.objects.select_related("trial").get(pk=own.pk)


# --- operators ----------------------------------------------------------------------------------


@ops_router.get("/tenants/{slug:slug}/usage", response={200: UsageOut, 404: Error})
def tenant_usage(request: HttpRequest, slug: str) -> dict[str, Any]:
    """Answer what one tenant has used and may use."""
    return _usage(find(Tenant, "tenant", slug=slug))


@ops_router.get("/cells/{slug:slug}/usage", response={200: CellUsageOut, 404: Error})
def cell_usage(request: HttpRequest, slug: str, hours: Hours = 1) -> dict[str, Any]:
    """Answer what a cell's tenants used in the last hours, and who used most."""
    return _cell_usage(find(Cell, "cell", slug=slug), hours)


@ops_router.get("/usage", response={200: CellUsageOut})
def all_usage(request: HttpRequest, hours: Hours = 1) -> dict[str, Any]:
    """Answer what all tenants used in the last hours, and who used most."""
    return _cell_usage(None, hours)


@ops_router.get("/usage/days", response={200: PageOut[DayOut], **ASKED})
def usage_days(request: HttpRequest, asked: Days, after: int = 0) -> dict[str, Any]:
    """List the days of the ledger: what is invoiced."""
    first, last = asked.asked(database_now())
    return page(queries.invoiced(first, last, tenant=asked.whose()), "pk", after, _day)


@ops_router.get("/usage/export.csv", response={200: None, **ASKED})
def export_usage(request: HttpRequest, asked: Days) -> StreamingHttpResponse:
    """Answer the days of the ledger as a CSV file (operator)."""
    require(request, Role.OPERATOR)
    first, last = asked.asked(database_now())
    return usage_csv(first, last, tenant=asked.whose())


@ops_router.get("/usage/reconciliation", response={200: ReconciliationOut, **ASKED})
def reconciliation(request: HttpRequest, asked: Days) -> dict[str, Any]:
    """Compare what throttled with what would be invoiced, day by day."""
    now = database_now()
    first, last = asked.asked(now)
    found = queries.reconciliation(first, last, tenant=asked.whose(), now=now)
    return {
        "first": found.first,
        "last": found.last,
        "compared": found.compared,
        "differ": found.differ,
        "unexplained": found.unexplained,
        "reported_tokens": found.reported_tokens,
        "invoiced_tokens": found.invoiced_tokens,
        "rows": [_reconciled(row) for row in found.rows],
    }


def _usage(tenant: Tenant) -> dict[str, Any]:
    shown = queries.usage_page(tenant, now=database_now())
    trial = shown.trial
    return {
        "tenant": tenant.slug,
        "time_zone": tenant.time_zone,
        "at": shown.now,
        "day": shown.day,
        "resets_at": shown.resets_at,
        "today": _counts(shown.today),
        "this_minute": _counts(shown.minute),
        "running": shown.running,
        "limits": _limits(shown.scope),
        "tokens_left": shown.tokens_left,
        "refused_until": shown.spent_until,
        "refusals": [
            {
                "reason": one.reason,
                "turns": one.turns,
                "why": one.why,
                "limit": one.limit,
                "more": one.more,
            }
            for one in shown.refusals
        ],
        "trial": None
        if trial is None
        else {"limits": _limits(trial.scope), "today": trial.today, "in_all": trial.in_all},
    }


def _counts(counts: Counts) -> dict[str, Any]:
    return {
        "turns": counts.turns,
        "model_calls": counts.model_calls,
        "tokens": counts.tokens,
        "refused": counts.refused,
        "would_refuse": counts.would_refuse,
    }


def _limits(scope: Scope) -> dict[str, Any]:
    return {name: getattr(scope, name) for name in UsageLimitsOut.model_fields}


def _cell_usage(cell: Cell | None, hours: int) -> dict[str, Any]:
    used = queries.cell_usage(cell, hours=hours, now=database_now())
    return {
        "cell": None if cell is None else cell.slug,
        "since": used.since,
        "at": used.now,
        "tokens": used.tokens,
        "turns": used.turns,
        "model_calls": used.model_calls,
        "quota_tokens_per_minute": used.quota_tokens_per_minute,
        "largest": [_tenant_used(one) for one in used.largest],
        "rest": None if used.rest is None else _tenant_used(used.rest),
    }


def _tenant_used(one: queries.TenantUsed) -> dict[str, Any]:
    return {name: getattr(one, name) for name in TenantUsedOut.model_fields}


def _day(row: Any) -> dict[str, Any]:
    return {
        "id": row.pk,
        "tenant": row.tenant.slug,
        "day": row.day,
        "time_zone": row.tenant.time_zone,
        **_counts(queries.counts_of(row)),
    }


def _reconciled(row: queries.Reconciled) -> dict[str, Any]:
    return {
        "tenant": row.tenant.slug,
        "day": row.day,
        "reported": None if row.reported is None else row.reported._asdict(),
        "invoiced": row.invoiced._asdict(),
        "difference_tokens": row.difference,
        **row.verdict._asdict(),
    }
