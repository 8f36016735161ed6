"""The ledger's days as a file for whoever makes invoices, and which days somebody asks for."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date, timedelta

from django.http import StreamingHttpResponse

from capacity import queries
from capacity.domain.usage import REASONS
from durable.errors import Refused
from tenants.models import Tenant
from tenants.views import csv_file

# How many days one answer spans.
DAYS_MOST = 366
COLUMNS = (
    "tenant",
    "name",
    "day",
    "time_zone",
    "turns",
    "model_calls",
    "tokens",
    *(f"refused_{name}" for name in REASONS),
    "would_refuse",
)


class BadDays(Refused):
    """The days that were asked for are none, or too many."""

    status = 422


def days_asked(first: str, last: str, *, today: date) -> tuple[date, date]:
    """Return the first and the last day that somebody asks for; empty: of this month so far.

    Raises BadDays.
    """
    try:
        since = date.fromisoformat(first) if first else today.replace(day=1)
        until = date.fromisoformat(last) if last else today
    except ValueError as error:
        raise BadDays('Give the days as "2026-03-01", from the first to the last.') from error
    if until < since:
        raise BadDays(f"{until} is before {since}. Give the first day, then the last.")
    if until - since >= timedelta(days=DAYS_MOST):
        raise BadDays(f"One answer spans {DAYS_MOST} days at most. Ask for fewer.")
    # A day more is read on each side, and midnight of either has to be a moment in every zone.
    if since.year < 1900 or until.year > 9000:
        raise BadDays("There are no days of the ledger then.")
    return since, until


def usage_csv(first: date, last: date, *, tenant: Tenant | None = None) -> StreamingHttpResponse:
    """Return the days of the ledger from `first` to `last` as CSV, a piece at a time."""
    whose = "usage" if tenant is None else f"usage-{tenant.slug}"
    return csv_file(_rows(first, last, tenant), f"{whose}-{first}-{last}")


def _rows(first: date, last: date, tenant: Tenant | None) -> Iterable[Iterable[object]]:
    yield COLUMNS
    days = queries.invoiced(first, last, tenant=tenant).order_by("tenant__slug", "day")
    for row in days.iterator(chunk_size=1_000):
        yield (
            row.tenant.slug,
            row.tenant.name,
            row.day,
            row.tenant.time_zone,
            row.turns,
            row.model_calls,
            row.tokens,
            *(row.refused.get(name, 0) for name in REASONS),
            sum(row.would_refuse.values()),
        )
