"""Limits in a real browser: room is shown while somebody types, and saving needs no script."""

from __future__ import annotations

from datetime import datetime

import pytest
from playwright.sync_api import expect

from tenants import services
from tenants.domain.limits import Limits
from tenants.models import Scope
from tests import make
from tests.browser.conftest import Windows

pytestmark = [
    pytest.mark.browser,
    pytest.mark.django_db(transaction=True, serialized_rollback=True),
]
URL = "/tenants/acme/limits/"


@pytest.fixture
def bounded(here: make.Cast, at: datetime) -> make.Cast:
    """A cell with a quota of 1,000 requests a minute, whose other tenants have small limits."""
    here.cell.quota_requests_per_minute = 1_000
    here.cell.save()
    for other in (here.bolt, here.core):
        services.set_scope(
            other, limits=Limits(runs_per_second=0.1), by="ada", reason="small", now=at
        )
    return here


def test_room_follows_what_is_typed_and_nothing_is_saved(
    bounded: make.Cast, windows: Windows
) -> None:
    page = windows().open(URL)
    room = page.locator("#headroom")
    expect(room).to_contain_text("As it stands")
    page.fill("#runs_per_second", "20")
    expect(room).to_contain_text("Would be refused")
    expect(room).to_contain_text("acme breaks it: its 1,200 requests a minute")
    page.fill("#runs_per_second", "0.5")
    expect(room).to_contain_text("Can’t know yet")
    # What is missing stands open beside the limits.
    page.fill("#model_calls_per_run", "4")
    page.fill("#tokens_per_run", "8000")
    expect(room).to_contain_text("Fits")
    # Whoever types keeps the place in the field.
    assert page.evaluate("document.activeElement.id") == "tokens_per_run"
    assert Scope.objects.filter(tenant=bounded.acme).count() == 1
    page.fill("#reason", "nightly replay")
    page.keyboard.press("Enter")
    expect(page.locator("#history tbody tr")).to_have_count(2)
    assert Scope.objects.filter(tenant=bounded.acme)[0].runs_per_second == 0.5


def test_limits_without_room_are_refused_and_insisted_on_without_javascript(
    bounded: make.Cast, windows: Windows
) -> None:
    page = windows(javascript=False, calm=False).open(URL)
    page.fill("#runs_per_second", "20")
    page.fill("#reason", "a migration of tickets")
    page.click("#save-limits")
    expect(page.get_by_role("alert")).to_contain_text("acme breaks the headroom")
    expect(page.locator("#runs_per_second")).to_have_value("20")
    expect(page.locator("#reason")).to_have_value("a migration of tickets")
    page.check("#override")
    page.click("#save-limits")
    expect(page.locator("#history tbody tr")).to_have_count(2)
    page.fill("#max_concurrent_runs", "3")
    page.fill("#reason", "fewer at once?")
    page.click("#try-limits")
    expect(page.locator("main")).to_contain_text("Trial runs")
    assert Scope.objects.filter(tenant=bounded.acme)[0].trial


def test_a_heap_budget_is_worked_out_in_place(
    here: make.Cast, at: datetime, windows: Windows
) -> None:
    row = here.cell.instances.get(name="eu1-a-1")
    row.runners = {"size": 1, "limit": 2_000, "bytes": 1_572_864}
    row.save()
    page = windows().open(f"/instances/{row.pk}/")
    page.fill("#heap", "3000")
    page.keyboard.press("Enter")
    expect(page.locator("#instance-sizing")).to_contain_text("2,000Runners = 3000 MiB / 1.5 MiB")
    assert page.evaluate("document.activeElement.id") == "heap"
