"""What beat asks for, from a report to a refusal and back."""

from __future__ import annotations

from datetime import timedelta

import pytest

from capacity import tasks
from capacity.models import UsageDay, UsageMinute
from capacity.services import ledger
from durable.clock import database_now
from platform_admin.celery import app
from tenants.models import Tenant, UsageLine
from tests import make
from tests.apps.capacity.test_ledger import budget, joined, lines

pytestmark = pytest.mark.django_db

MINUTE = timedelta(minutes=1)


def test_one_message_takes_whatever_there_is_and_marks_whose_budget_that_used_up(
    cast: make.Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "LINES_AT_ONCE", 2)
    now = database_now()
    budget(cast.acme, 5)
    lines(
        joined(cast, now), cast.acme, [now + n * timedelta(seconds=1) for n in range(5)], tokens=1
    )
    tasks.roll_up()
    assert not UsageLine.objects.filter(rolled_at=None).exists()
    assert sum(UsageDay.objects.values_list("tokens", flat=True)) == 5
    assert Tenant.objects.get(slug="acme").budget_spent_until is not None
    budget(cast.acme, 6)
    tasks.roll_up()
    assert Tenant.objects.get(slug="acme").budget_spent_until is None
    budget(cast.acme, 3)
    tasks.budgets()
    assert Tenant.objects.get(slug="acme").budget_spent_until is not None


def test_building_ahead_and_sweeping_are_asked_for_by_name(cast: make.Cast) -> None:
    now = database_now()
    lines(joined(cast, now), cast.acme, [now - MINUTE, now - timedelta(days=200)], turns=1)
    tasks.roll_up()
    tasks.prewarm()
    cast.cell.refresh_from_db()
    assert cast.cell.document == {"prewarm": ["acme"]}
    tasks.sweep()
    assert UsageMinute.objects.count() == 1


def test_beat_asks_for_the_ledger_on_the_queues_where_it_belongs() -> None:
    asked = {
        one["task"]: (one["schedule"], one["options"].get("queue", "prompt"))
        for one in app.conf.beat_schedule.values()
    }
    assert asked["capacity.roll_up"] == (5.0, "prompt")
    assert asked["capacity.budgets"] == (60.0, "prompt")
    assert asked["capacity.sweep"] == (3600.0, "bulk")
    assert asked["capacity.prewarm"] == (300.0, "bulk")
