"""A new move in a browser: Enter is the dry run, and the button that starts comes after it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import expect

from migrations_app.models import TenantMigration
from tests import make
from tests.browser.conftest import Windows
from tests.stores import Raw

pytestmark = [
    pytest.mark.browser,
    pytest.mark.django_db(transaction=True, serialized_rollback=True),
]


@pytest.fixture
def stores(new_database: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two real stores at the addresses of the cast's; the source holds ten sessions of acme."""
    source = Raw(new_database())
    monkeypatch.setenv("STORE_EU1_A", source.url)
    monkeypatch.setenv("STORE_EU1_B", new_database())
    source.make_tables("env:STORE_EU1_A", "support.acme")
    source.seed("support.acme", sessions=10, users=3)


@pytest.mark.usefixtures("stores")
def test_enter_tells_what_would_happen_and_then_start_starts(
    here: make.Cast, windows: Windows
) -> None:
    page = windows().open("/moves/new/?tenant=acme")
    page.select_option("#target_cell", "cell-eu1-b")
    page.select_option("#target_store", "store-eu1-b")
    # Folded until somebody wants it.
    expect(page.locator("#rows_per_second")).to_be_hidden()
    page.get_by_text("How fast it copies").click()
    page.fill("#rows_per_second", "20")
    page.keyboard.press("Enter")
    expect(page.locator("#dry-run")).to_contain_text("10 sessions of 3 users, at 5.0 /s")
    expect(page.locator("#dry-run")).to_contain_text("OFFBOARD")
    expect(page.locator("#rows_per_second")).to_be_visible()
    assert not TenantMigration.objects.exists()
    # A start needs a reason, and says so before anything is sent.
    page.click("#start")
    assert page.evaluate("document.activeElement.id") == "reason"
    page.fill("#reason", "a store of its own")
    page.click("#start")
    page.wait_for_url("**/moves/mv-*/")
    assert TenantMigration.objects.get().pace_per_second == 5.0
