"""What throttled beside what is invoiced: equal, or different for a reason that is named."""

from __future__ import annotations

from datetime import date, datetime, timedelta
from typing import Any

import pytest
from django.db.models import F

from capacity import figures, queries, services
from capacity.models import UsageDay, UsageMinute
from tenants.models import RuntimeInstance, Tenant, UsageLine
from tests import make
from tests.apps.capacity.test_ledger import joined, lines, zoned

DAY, HOUR, MINUTE = timedelta(days=1), timedelta(hours=1), timedelta(minutes=1)

pytestmark = pytest.mark.django_db


@pytest.fixture
def instance(cast: make.Cast, now: datetime) -> RuntimeInstance:
    return joined(cast, now)


@pytest.fixture
def used(cast: make.Cast, instance: RuntimeInstance, now: datetime) -> make.Cast:
    """Three days of acme in Tokyo and of bolt in UTC, all in the ledger."""
    zoned(cast.acme, "Asia/Tokyo")
    for tenant in (cast.acme, cast.bolt):
        minutes = [now + 5 * HOUR * number for number in range(-5, 5)]
        lines(instance, tenant, minutes, turns=1, model_calls=2, tokens=10)
    services.roll_up(now=now)
    return cast


@pytest.fixture(params=[1, 7], ids=["a day at a time", "a week at a time"])
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many days are read at once, the same is found."""
    monkeypatch.setattr(queries, "RECONCILED_AT_ONCE", request.param)


def compared(now: datetime, **asked: Any) -> queries.Reconciliation:
    span = {"first": now.date() - 3 * DAY, "last": now.date() + 3 * DAY}
    # Past the moment in which what was added may be among the days or not.
    at = asked.pop("at", now + 5 * MINUTE)
    return queries.reconciliation(**{**span, **asked}, now=at)


def test_what_was_reported_is_what_is_invoiced(used: make.Cast, now: datetime) -> None:
    found = compared(now)
    assert (found.differ, found.unexplained) == (0, 0)
    assert found.reported_tokens == found.invoiced_tokens == 200
    assert found.compared == len(found.rows) == UsageDay.objects.count()
    assert {row.verdict.explanation for row in found.rows} == {
        "What was reported is what is invoiced."
    }


def test_one_tenant_is_compared_alone_within_the_days_asked_for(
    used: make.Cast, now: datetime
) -> None:
    found = compared(now, tenant=used.bolt, first=now.date(), last=now.date())
    [row] = found.rows
    assert (row.tenant, row.day, row.reported) == (used.bolt, now.date(), row.invoiced)
    assert row.invoiced.tokens == 50


def test_lines_that_are_not_in_the_ledger_yet_explain_a_difference(
    used: make.Cast, instance: RuntimeInstance, now: datetime
) -> None:
    lines(instance, used.bolt, [now], tokens=7)
    lines(instance, used.core, [now], tokens=5)
    found = compared(now)
    assert (found.differ, found.unexplained) == (2, 0)
    assert [(row.tenant.slug, row.difference) for row in found.rows[:2]] == [
        ("bolt", 7),
        ("core", 5),
    ]
    assert found.rows[0].verdict.explanation == "7 tokens came a moment ago and are being added."


def test_a_roll_up_while_the_days_are_read_is_no_difference_that_nothing_explains(
    used: make.Cast, instance: RuntimeInstance, now: datetime, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines(instance, used.bolt, [now], tokens=7)
    read = queries._billed

    def and_then_rolled(*asked: Any) -> Any:
        rows = read(*asked)
        services.roll_up(now=now + 5 * MINUTE - timedelta(seconds=1))
        return rows

    monkeypatch.setattr(queries, "_billed", and_then_rolled)
    found = compared(now)
    assert (found.differ, found.unexplained) == (1, 0)


@pytest.mark.parametrize("tokens", [-1, 1])
def test_a_day_that_was_changed_by_hand_is_found(
    used: make.Cast, now: datetime, tokens: int
) -> None:
    day = UsageDay.objects.filter(tenant=used.bolt, day=now.date())
    day.update(tokens=F("tokens") + tokens)
    found = compared(now)
    assert (found.differ, found.unexplained) == (1, 1)
    assert (found.rows[0].difference, found.rows[0].tenant.slug) == (-tokens, "bolt")
    assert "Do not invoice" in found.rows[0].verdict.explanation


def test_a_day_that_was_deleted_is_found(used: make.Cast, now: datetime) -> None:
    UsageDay.objects.filter(tenant=used.bolt, day=now.date()).delete()
    assert compared(now).unexplained == 1


@pytest.mark.usefixtures("at_once")
def test_a_change_of_zone_is_named(
    used: make.Cast, instance: RuntimeInstance, now: datetime
) -> None:
    zoned(used.bolt, "America/Los_Angeles")
    found = compared(now)
    assert found.differ > 0
    assert found.unexplained == 0
    assert "time zone was changed" in found.rows[0].verdict.explanation
    assert found.reported_tokens == found.invoiced_tokens
    # Of a day at the edge too, whose other half is not asked for.
    assert compared(now, first=now.date(), last=now.date()).unexplained == 0


@pytest.mark.usefixtures("at_once")
def test_days_older_than_the_lines_are_compared_by_the_minute(
    used: make.Cast, now: datetime
) -> None:
    later = now + 40 * DAY
    services.sweep_ledger(now=later)
    assert not UsageLine.objects.exists()
    found = compared(now, at=later)
    assert (found.differ, found.reported_tokens) == (0, 200)
    UsageMinute.objects.filter(tenant=used.bolt, minute=now).delete()
    assert compared(now, at=later).unexplained == 1


def test_days_of_which_nothing_else_is_kept_stand(used: make.Cast, now: datetime) -> None:
    later = now + 110 * DAY
    while services.sweep_ledger(now=later):
        pass
    found = compared(now, at=later)
    assert (found.differ, found.reported_tokens, found.invoiced_tokens) == (0, 0, 200)
    assert {row.reported for row in found.rows} == {None}
    assert found.rows[0].difference == 0


def test_a_year_of_everybodys_days_is_never_in_memory_at_once(
    used: make.Cast, now: datetime, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, spans = queries._billed, []

    def noted(first: date, last: date, tenant: Tenant | None) -> Any:
        spans.append((first, last))
        return read(first, last, tenant)

    monkeypatch.setattr(queries, "_billed", noted)
    first, last = now.date() - 362 * DAY, now.date() + 3 * DAY
    found = compared(now, first=first, last=last)
    assert (found.compared, found.differ) == (UsageDay.objects.count(), 0)
    assert max(until - since for since, until in spans) < 7 * DAY
    # Each day once, and one more on each side.
    read_days = [
        since + number * DAY for since, until in spans for number in range((until - since).days + 1)
    ]
    wanted = [first - DAY + number * DAY for number in range(368)]
    assert sorted(read_days) == wanted


def test_no_more_rows_are_shown_than_a_page_holds_and_the_worst_come_first(
    used: make.Cast, now: datetime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "RECONCILED_MOST", 2)
    UsageDay.objects.filter(tenant=used.acme).update(tokens=1)
    found = compared(now)
    assert len(found.rows) == 2
    assert all(row.verdict.unexplained for row in found.rows)
    assert found.rows[0].day > found.rows[1].day


# --- pages and charts -----------------------------------------------------------------------


def page(tenant: Tenant, now: datetime) -> queries.UsagePage:
    return queries.usage_page(Tenant.objects.get(pk=tenant.pk), now=now)


def test_a_page_has_every_minute_of_the_hour_and_every_day_of_the_month(
    used: make.Cast, now: datetime
) -> None:
    shown = page(used.bolt, now + timedelta(seconds=20))
    assert len(shown.minutes) == 60
    assert (shown.minutes[-1].minute, shown.minutes[-1].counts) == (now, shown.minute)
    assert (shown.minute.tokens, shown.minutes[0].counts.tokens) == (10, 0)
    assert [day.day for day in shown.days][::29] == [date(2026, 2, 1), date(2026, 3, 2)]
    assert shown.today.tokens == shown.days[-1].counts.tokens == 50


def test_a_page_changes_its_version_with_what_it_shows(
    used: make.Cast, instance: RuntimeInstance, now: datetime
) -> None:
    before = page(used.bolt, now).version
    assert page(used.bolt, now).version == before
    lines(instance, used.bolt, [now], tokens=1)
    services.roll_up(now=now)
    assert page(used.bolt, now).version != before


def test_charts_say_in_words_what_they_draw(
    used: make.Cast, instance: RuntimeInstance, now: datetime
) -> None:
    lines(instance, used.bolt, [now], refused={"rate": 3})
    services.roll_up(now=now)
    hour = figures.minutes(page(used.bolt, now))
    assert hour["says"] == "10 tokens in the last hour; 3 turns refused."
    assert [len(line["x"]) for line in hour["data"]] == [60, 60]
    assert (hour["data"][1]["y"][-1], hour["data"][1]["y"][0]) == (3, None)
    month = figures.days(page(used.bolt, now))
    assert (month["again"], len(month["data"][0]["y"])) == (False, 30)
    assert figures.minutes(page(used.core, now))["empty"]
    top = figures.largest(queries.cell_usage(used.cell, hours=48, now=now + 20 * HOUR))
    assert top["data"][0]["y"] == ["acme", "bolt"]
    assert "The 2 largest tenants used 100" in top["says"]


def test_whoever_is_not_among_the_largest_is_counted_together(
    used: make.Cast, instance: RuntimeInstance, now: datetime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "LARGEST", 1)
    lines(instance, used.core, [now], tokens=30, turns=2, refused={"rate": 4})
    lines(instance, used.bolt, [now], refused={"rate": 1, "budget": 1})
    services.roll_up(now=now)
    found = queries.cell_usage(used.cell, now=now)
    [top] = found.largest
    assert (top.tenant, top.tokens, top.refused, top.share) == ("core", 30, 4, 0.6)
    assert found.rest is not None
    assert (found.rest.tokens, found.rest.turns, found.rest.refused) == (20, 2, 2)
    assert figures.largest(found)["data"][0]["y"] == ["core", "everybody else"]
