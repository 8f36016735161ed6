"""What a tenant has used against what it may, as its operator and its own people read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import F, Min

from capacity.models import UsageMinute
from capacity.queries import Refusals, UsagePage
from tenants.domain.words import NOT_MEASURED, THIN, Status, clock, count, counted, rate
from tenants.models import Tenant
from tenants.panels import LOST_RANK, NAMED, Attention

# From here on a limit is near: worth a look before it refuses.
NEAR = 0.75
MINUTE = 60


# What a tenant reads; the code of a refusal stands small beside it.
TITLES = {
    "rate": "Too many new runs",
    "concurrency": "Too many at once",
    "quota": "The model’s quota was taken",
    "budget": "Daily tokens used up",
    "draining": "Your data was being moved",
    "breaker": "The model did not answer",
    "other": "Another reason",
}


@dataclass(frozen=True)
class RefusalLine:
    """Turns that were refused for one reason: what it is called, what it means, what helps."""

    title: str
    refusals: Refusals


def refusal_lines(page: UsagePage) -> list[RefusalLine]:
    """Return why turns were refused today, most first."""
    return [RefusalLine(TITLES.get(one.reason, one.reason), one) for one in page.refusals]


@dataclass(frozen=True)
class LimitLine:
    """One limit: what stands against it now, and what happens there."""

    status: Status
    name: str
    more: str
    now: str
    allowed: str
    # 0 to 1, for the bar. None: no limit, or nothing is measured against it.
    share: float | None
    at_limit: str

    @property
    def percent(self) -> float:
        return 100 * (self.share or 0)


def limit_lines(page: UsagePage) -> list[LimitLine]:
    """Return every limit in a fixed order, those that are not set too."""
    scope = page.scope
    per_minute = None if scope.runs_per_second is None else scope.runs_per_second * MINUTE
    return [
        _line(
            "Tokens today",
            f"starts anew {clock(page.resets_at, page.now)} UTC, midnight in"
            f" {page.tenant.time_zone}",
            page.today.tokens,
            scope.daily_token_budget,
            "New turns are answered “usage limit reached” until then."
            + (" Model calls of running turns too." if scope.exact_budget else ""),
        ),
        _line(
            "New runs, this minute",
            "no rate" if scope.runs_per_second is None else rate(scope.runs_per_second),
            page.minute.turns,
            per_minute,
            "HTTP 429 with Retry-After; nothing is queued.",
        ),
        _line(
            "Runs at the same time",
            "",
            page.running,
            scope.max_concurrent_runs,
            "HTTP 429 until one of the runs ends.",
        ),
        LimitLine(
            status=Status("kept", "In each run"),
            name="Model calls in one run",
            more="",
            now=NOT_MEASURED,
            allowed=_allowed(scope.max_model_calls_per_run),
            share=None,
            at_limit="The run ends with “Stopping: step limit reached.”",
        ),
        LimitLine(
            status=Status("kept", "In each run"),
            name="Tools",
            more="",
            now=NOT_MEASURED,
            allowed="all of the agent’s"
            if scope.allowed_tools is None
            else ", ".join(scope.allowed_tools) or "none",
            share=None,
            at_limit="The tool answers “unavailable” within the run.",
        ),
    ]


def _allowed(limit: float | None) -> str:
    return "none" if limit is None else count(limit)


def _line(name: str, more: str, used: int, limit: float | None, at_limit: str) -> LimitLine:
    if limit is None:
        status, share = Status("kept", "No limit"), None
    else:
        share = used / limit if limit else 1.0
        status = _near(share)
    return LimitLine(
        status=status,
        name=name,
        more=more,
        now=count(used),
        allowed=_allowed(limit),
        share=None if share is None else min(1.0, share),
        at_limit=at_limit if limit is not None else "",
    )


def _near(share: float) -> Status:
    if share >= 1:
        return Status("warn", "At limit")
    # Rounded down: never "100 %" with room left.
    percent = f"{int(100 * share)}{THIN}%"
    return Status("warn" if share >= NEAR else "ok", percent)


def summary(page: UsagePage) -> str:
    """Return the page in a sentence or two: the budget, and how long it lasts."""
    budget = page.scope.daily_token_budget
    if budget is None:
        return f"{counted(page.today.tokens, 'token')} today; there is no daily budget."
    if page.spent_until is not None:
        return (
            f"Today’s {counted(budget, 'token')} are used up. Turns are refused until"
            f" {clock(page.spent_until, page.now)} UTC."
        )
    used = f"{count(page.today.tokens)} of today’s {counted(budget, 'token')} are used."
    return f"{used} {_lasts(page)}".rstrip()


def _lasts(page: UsagePage) -> str:
    hour = sum(minute.counts.tokens for minute in page.minutes)
    if not hour or page.tokens_left is None:
        return ""
    seconds = page.tokens_left * len(page.minutes) * MINUTE / hour
    # Compared before it is added: a budget may last for longer than there are dates.
    if seconds >= (page.resets_at - page.now).total_seconds():
        return "At the rate of the last hour the rest lasts until the day ends."
    at = page.now + timedelta(seconds=seconds)
    return f"At the rate of the last hour the rest lasts until {clock(at, page.now)} UTC."


# --- what needs a person ----------------------------------------------------------------------


def attention(*, now: datetime) -> list[Attention]:
    """Return tenants whose budget of the day is used up: a few a line each, many in one."""
    spent = list(
        Tenant.objects.filter(budget_spent_until__gt=now).order_by("budget_spent_until", "slug")
    )
    named = spent[:NAMED]
    refused = _refused_since(named)
    if len(spent) <= NAMED:
        return [_spent(tenant, refused.get(tenant.pk, now), now) for tenant in named]
    names = ", ".join(tenant.slug for tenant in named)
    title = f"{counted(len(spent), 'tenant')} have used up their tokens of today"
    text = f"{names} and {len(spent) - NAMED:,} more are refused until their midnight."
    return [_out_of_budget(named[0], title, text, min(refused.values(), default=now))]


def _refused_since(tenants: Sequence[Tenant]) -> dict[int, datetime]:
    """Return the minute of this budget's first refused turn, by tenant id, where there was one."""
    day = F("tenant__budget_spent_until") - timedelta(days=1)
    rows = UsageMinute.objects.filter(
        tenant__in=tenants, minute__gte=day, refused__has_key="budget"
    )
    return dict(rows.values_list("tenant_id").annotate(first=Min("minute")))


def _spent(tenant: Tenant, since: datetime, now: datetime) -> Attention:
    title = f"{tenant} has used up its tokens of today"
    text = (
        f"Its turns are refused until {clock(tenant.budget_spent_until, now)} UTC. A larger"
        " budget lets it go on within seconds."
    )
    return _out_of_budget(tenant, title, text, since)


def _out_of_budget(tenant: Tenant, title: str, text: str, since: datetime) -> Attention:
    return Attention(
        rank=LOST_RANK + 0.5,
        status=Status("refused", "No budget"),
        title=title,
        text=text,
        since=since,
        kind="budget",
        key=tenant.slug,
        label=f"budget-{tenant.slug}",
    )
