"""The ledger: reported usage added up by minute and by day, once; budgets held against the day.

The day's row is the number that throttles a tenant, and the number that it is billed by.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import transaction

from capacity import queries
from capacity.domain.usage import Counts, day_of
from capacity.models import UsageDay, UsageMinute
from durable.errors import Refused
from tenants import services as tenants_services

log = logging.getLogger(__name__)

# Lines of one transaction: a fraction of a second, whoever waits for these rows.
LINES_AT_ONCE = 1_000
# Rows of one statement of a sweep.
SWEPT_AT_ONCE = 10_000


@dataclass(frozen=True, slots=True)
class Rolled:
    """What one call added to the ledger."""

    lines: int
    # Ids of the tenants whose usage it was.
    tenants: frozenset[int]

    @property
    def more(self) -> bool:
        """Whether there may be lines left."""
        return self.lines == LINES_AT_ONCE


@transaction.atomic
def roll_up(*, now: datetime) -> Rolled:
    """Add a bounded part of what was reported since to its minutes and days; return how much.

    Each line counts exactly once: it is marked in the transaction that adds it, so a call that is
    killed has done nothing, and calls at the same time take different lines. A line that comes
    late corrects the day that it belongs to, by the time zone that its tenant has now.
    """
    lines = tenants_services.take_usage(most=LINES_AT_ONCE, now=now)
    minutes: dict[tuple[datetime, int], Counts] = {}
    days: dict[tuple[date, int], Counts] = {}
    for line in lines:
        used = Counts(line.turns, line.model_calls, line.tokens, line.refused, line.would_refuse)
        in_minute = (line.minute, line.tenant_id)
        in_day = (day_of(line.minute, line.tenant.time_zone), line.tenant_id)
        minutes[in_minute] = minutes.get(in_minute, Counts()) + used
        days[in_day] = days.get(in_day, Counts()) + used
    _add(UsageMinute, "minute", minutes)
    _add(UsageDay, "day", days)
    return Rolled(len(lines), frozenset(line.tenant_id for line in lines))


def _add(model: Any, when: str, sums: Mapping[tuple[Any, int], Counts]) -> None:
    """Add to the rows of these (time, tenant id), which are made where there are none."""
    # All who add make and lock rows in this one order, so none waits for another in a circle.
    keys = sorted(sums)
    model.objects.bulk_create(
        [model(tenant_id=tenant, **{when: at}) for at, tenant in keys],
        ignore_conflicts=True,
        batch_size=500,
    )
    rows = []
    for at in sorted({at for at, _ in keys}):
        of = [tenant for one, tenant in keys if one == at]
        had = model.objects.select_for_update().filter(tenant__in=of, **{when: at})
        for row in had.order_by("tenant_id"):
            total = queries.counts_of(row) + sums[at, row.tenant_id]
            rows.append(model(tenant_id=row.tenant_id, **{when: at}, **_columns(total)))
    # Their values replace what is there: nobody else has written it since it was locked.
    model.objects.bulk_create(
        rows,
        update_conflicts=True,
        unique_fields=["tenant", when],
        update_fields=list(_columns(Counts())),
        batch_size=500,
    )


def _columns(counts: Counts) -> dict[str, Any]:
    return {
        "turns": counts.turns,
        "model_calls": counts.model_calls,
        "tokens": counts.tokens,
        "refused": dict(counts.refused),
        "would_refuse": dict(counts.would_refuse),
    }


class _HasChanged(Exception):
    """Budget or usage changed before the tenant's cells were locked."""


def mark_budgets(*, tenants: Collection[int] | None = None, now: datetime) -> int:
    """Have turns refused of tenants whose budget of the day is used up; return how many changed.

    Whose budget has room again is let go. `tenants` are ids, beside whom whoever is refused already
    is looked at; None: everybody. Each in a transaction of its own.
    """
    changed = 0
    for tenant, until in queries.budgets_to_mark(tenants=tenants, now=now):
        try:
            with transaction.atomic():
                tenants_services.spend_budget(tenant, until)
                # Whoever changes a budget locks the same cells. Without this look a mark that was
                # decided before a raise, and made after it, would hold until the next full look.
                if queries.budget_spent_until(tenant, now=now) != until:
                    raise _HasChanged
        except _HasChanged:
            continue
        except Refused as refusal:
            # It is being placed elsewhere: the next full look finds it.
            log.warning("The budget of %s is not marked: %s", tenant.slug, refusal)
            continue
        changed += 1
        if until is None:
            log.info("%s may go on: its budget of the day has room again", tenant.slug)
        else:
            log.info("%s has used up its budget of the day, until %s", tenant.slug, until)
    return changed


def sweep_ledger(*, now: datetime) -> int:
    """Delete a bounded part of lines and minutes that are kept no longer; return how many.

    Days stay: they are what was invoiced.
    """
    lines = tenants_services.sweep_usage(
        before=now - timedelta(days=settings.USAGE_LINES_KEPT_DAYS), most=SWEPT_AT_ONCE
    )
    old = UsageMinute.objects.filter(
        minute__lt=now - timedelta(days=settings.USAGE_MINUTES_KEPT_DAYS)
    )
    ids = list(old.order_by("minute").values_list("pk", flat=True)[:SWEPT_AT_ONCE])
    minutes, _ = UsageMinute.objects.filter(pk__in=ids).delete()
    return lines + minutes


def publish_prewarm(*, now: datetime) -> int:
    """Tell each cell which tenants to build ahead, where that changed much; return how many."""
    told = 0
    for cell, wanted in queries.prewarm_to_publish(now=now):
        with transaction.atomic():
            tenants_services.publish_part(cell, "prewarm", wanted)
        told += 1
    return told
