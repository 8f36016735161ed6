"""What a person sees happen: changes without a reload, dialogs by keyboard, nothing jumping."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.contrib.sessions.models import Session
from django.db.models import F
from playwright.sync_api import expect

from migrations_app.domain.phases import Phase
from migrations_app.models import TenantMigration
from tenants.domain.roles import Role
from tenants.models import AuditEntry
from tests import make, scene
from tests.browser.conftest import Windows

pytestmark = [
    pytest.mark.browser,
    pytest.mark.django_db(transaction=True, serialized_rollback=True),
]
# The product's promise.
ON_SCREEN_MS = 2_000


def settle(move: TenantMigration, **columns: Any) -> None:
    """Change the row as a worker settles it."""
    TenantMigration.objects.filter(pk=move.pk).update(version=F("version") + 1, **columns)


def address(move: TenantMigration) -> str:
    return f"/moves/mv-{move.pk}/"


def test_a_change_of_a_row_is_on_screen_within_two_seconds_without_a_reload(
    here: make.Cast, at: datetime, windows: Windows
) -> None:
    move = scene.move(here, Phase.BACKFILL, now=at)
    page = windows().open(address(move))
    page.evaluate("window.kept = true")
    expect(page.locator("#move-progress .reading b")).to_have_text("7,412")
    settle(move, done=9_001)
    expect(page.locator("#move-progress .reading b")).to_have_text("9,001", timeout=ON_SCREEN_MS)
    settle(
        move,
        phase=Phase.DRAIN,
        phase_since=at,
        fence_closed_at=at,
        fence_version=9,
        deadline_at=at + timedelta(seconds=150),
        quote={"expected": 30.0, "worst": 90.0, "parts": []},
    )
    move.events.create(at=at, who="mover", was=Phase.BACKFILL, now=Phase.DRAIN, note="Fence closes")
    expect(page.locator("#move-head")).to_contain_text("Fence closed", timeout=ON_SCREEN_MS)
    expect(page.locator('.track [aria-current="step"]')).to_contain_text("DRAIN", timeout=1_000)
    expect(page.locator("#move-log-list li").first).to_contain_text("Fence closes", timeout=1_000)
    expect(page.locator("#announce")).to_contain_text("Moving in DRAIN, Fence closed")
    assert page.evaluate("window.kept") is True


def test_the_overview_follows_what_happens(here: make.Cast, at: datetime, windows: Windows) -> None:
    page = windows(Role.VIEWER).open("/")
    clock = page.locator("#clock").inner_text()
    expect(page.locator("#clock")).not_to_have_text(clock, timeout=4_000)
    expect(page.locator("#attention")).to_contain_text("Nothing needs a person.")
    move = scene.move(here, Phase.VERIFY, now=at)
    row = page.locator(f'#moves [data-row="{move}"]')
    expect(row).to_be_visible(timeout=3_000)
    expect(page.locator("#sig-fenced")).to_have_text("1 fenced", timeout=3_000)
    expect(page.locator("#attention")).to_contain_text("has its fence closed", timeout=3_000)
    expect(page.locator("#summary")).to_contain_text("1 thing needs a person.")


def test_an_abort_goes_by_keyboard_from_the_button_to_the_audit(
    here: make.Cast, at: datetime, windows: Windows
) -> None:
    move = scene.move(here, Phase.VERIFY, now=at)
    page = windows().open(address(move))
    button = f"act-{move}-abort"
    page.focus(f"#{button}")
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_be_visible()
    expect(dialog).to_contain_text("The fence opens: acme is served on store-eu1-a again")
    # The safe button has the focus, and Escape is the same as pressing it.
    expect(page.locator("#dialog-safe")).to_be_focused()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(page.locator(f"#{button}")).to_be_focused()
    page.keyboard.press("Enter")
    expect(dialog).to_be_visible()
    page.keyboard.press("Shift+Tab")
    page.keyboard.type("the target is too slow")
    page.keyboard.press("Enter")
    expect(dialog).to_be_hidden()
    # The next thing to be announced may follow at once.
    expect(page.locator("#announce")).to_contain_text(re.compile("was accepted|Aborting"))
    expect(page.locator("#move-head")).to_contain_text("Aborting", timeout=ON_SCREEN_MS)
    expect(page.locator(f"#{button}")).to_be_disabled()
    move.refresh_from_db()
    entry = AuditEntry.objects.get(verb="move.abort")
    assert move.abort_requested_by == entry.who == "operator-0"
    assert move.abort_reason == entry.reason == "the target is too slow"


def test_focus_comes_back_to_a_button_that_was_drawn_anew_meanwhile(
    here: make.Cast, at: datetime, windows: Windows
) -> None:
    move = scene.move(here, Phase.VERIFY, now=at)
    page = windows().open(address(move))
    page.focus(f"#act-{move}-abort")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    settle(move, failures=2, failure="no answer")
    expect(page.locator("#move-head")).to_contain_text("Blocked in VERIFY", timeout=3_000)
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    expect(page.locator(f"#act-{move}-abort")).to_be_focused()


def test_a_dialog_without_a_reason_is_not_sent(
    here: make.Cast, at: datetime, windows: Windows
) -> None:
    move = scene.move(here, Phase.VERIFY, now=at)
    page = windows().open(address(move))
    page.click(f"#act-{move}-pause")
    page.click("#dialog-act")
    expect(page.get_by_role("dialog")).to_be_visible()
    expect(page.locator("#dialog-reason")).to_be_focused()
    assert not AuditEntry.objects.filter(verb="move.pause").exists()


def test_a_dialog_of_an_older_phase_is_refused_and_shows_the_new_one(
    here: make.Cast, at: datetime, windows: Windows
) -> None:
    move = scene.move(here, Phase.VERIFY, now=at)
    page = windows(calm=False).open(address(move))
    page.click(f"#act-{move}-abort")
    page.fill("#dialog-reason", "too late")
    settle(move, phase=Phase.TARGET)
    page.click("#dialog-act")
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("alert")).to_contain_text("The page showed VERIFY")
    expect(dialog).to_be_visible()
    expect(page.locator("#dialog-reason")).to_have_value("too late")
    expect(page.locator("#dialog-safe")).to_be_focused()
    move.refresh_from_db()
    assert move.abort_requested_at is None


def test_a_repair_is_asked_for_in_its_row(here: make.Cast, at: datetime, windows: Windows) -> None:
    move = scene.move(here, Phase.VERIFY, now=at)
    first, second, _ = scene.mismatches(move, now=at)
    page = windows().open(address(move))
    page.click(f"#recopy-{second.pk}")
    row = page.locator(f'[data-row="mismatch-{second.pk}"]')
    expect(row).to_contain_text("Asked for")
    expect(page.locator(f"#reconcile-{first.pk}")).to_be_visible()
    second.refresh_from_db()
    assert second.repair_requested_by == "operator-0"


def test_focus_and_scroll_stay_while_panels_are_drawn_anew(
    here: make.Cast, at: datetime, windows: Windows
) -> None:
    move = scene.move(here, Phase.VERIFY, now=at)
    for index in range(80):
        move.events.create(at=at, who="mover", was=move.phase, now=move.phase, note=f"Line {index}")
    first, *_ = scene.mismatches(move, now=at)
    page = windows().open(address(move))
    page.focus(f"#reconcile-{first.pk}")
    page.evaluate("document.getElementById('move-log-list').scrollTop = 300")
    page.evaluate("document.getElementById('checks-details').open = true")
    first.first_difference = "another difference"
    first.save()
    move.events.create(at=at, who="mover", was=move.phase, now=move.phase, note="The newest")
    settle(move, checks=[*move.checks, {"name": "One more", "ok": True, "detail": "fine"}])
    expect(page.locator("#mismatches")).to_contain_text("another difference", timeout=3_000)
    expect(page.locator("#move-log-list")).to_contain_text("The newest", timeout=3_000)
    expect(page.locator("#move-checks")).to_contain_text("12 of 12 green", timeout=3_000)
    expect(page.locator(f"#reconcile-{first.pk}")).to_be_focused()
    assert page.evaluate("document.getElementById('move-log-list').scrollTop") == 300
    assert page.evaluate("document.getElementById('checks-details').open") is True


def test_no_row_enters_a_list_under_a_control_that_has_focus(
    here: make.Cast, at: datetime, windows: Windows
) -> None:
    scene.move(here, Phase.BACKFILL, now=at, failures=3, failure="no route")
    page = windows().open("/")
    open_move = page.locator("#attention .actions a").first
    open_move.focus()
    worse = scene.move(here, Phase.VERIFY, now=at, tenant=here.bolt)
    scene.mismatches(worse, now=at)
    expect(page.locator("#sig-blocked")).to_have_text("2 blocked", timeout=4_000)
    page.wait_for_timeout(2_500)
    assert page.locator("#attention li").count() == 1
    page.locator("h1").click()
    page.evaluate("document.activeElement.blur()")
    expect(page.locator("#attention li")).to_have_count(2, timeout=4_000)
    expect(page.locator("#attention li").first).to_contain_text(str(worse))


def test_a_panel_whose_poll_fails_is_marked_stale_and_mended(
    here: make.Cast, at: datetime, windows: Windows
) -> None:
    move = scene.move(here, Phase.VERIFY, now=at)
    window = windows(calm=False)
    window.page.add_init_script(
        "const now = Date.now; window.skew = 0; Date.now = () => now() + window.skew"
    )
    page = window.open(address(move))
    page.route("**/phases/*", lambda route: route.abort())
    panel = page.locator("#move-phases")
    expect(panel).to_have_attribute("data-stale", "", timeout=4_000)
    expect(panel).to_contain_text("DRAIN")
    page.evaluate("window.skew = 31000")
    expect(panel).to_contain_text("No answer from the server for 30s", timeout=4_000)
    page.unroute("**/phases/*")
    expect(panel).not_to_have_attribute("data-stale", "", timeout=4_000)
    expect(panel).not_to_contain_text("No answer")


def test_a_session_that_ended_leads_the_page_to_the_sign_in(
    here: make.Cast, at: datetime, windows: Windows
) -> None:
    move = scene.move(here, Phase.VERIFY, now=at)
    page = windows(calm=False).open(address(move))
    Session.objects.all().delete()
    page.wait_for_url(f"**/sign-in/?next=%2Fmoves%2Fmv-{move.pk}%2F", timeout=5_000)


def test_a_move_that_has_ended_is_asked_about_no_more(
    here: make.Cast, at: datetime, windows: Windows
) -> None:
    move = scene.move(here, Phase.OFFBOARD, now=at)
    page = windows().open(address(move))
    settle(move, phase=Phase.DONE, due_at=None, ended_at=at)
    expect(page.locator("#move-head")).to_contain_text("Done", timeout=3_000)
    # What takes long to count is asked for every five seconds, the last time after the end.
    page.wait_for_timeout(6_000)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(2_500)
    assert not [url for url in asked if f"/moves/mv-{move.pk}/" in url and ".json" not in url]


def test_typing_narrows_the_tenants_without_losing_the_field(
    here: make.Cast, windows: Windows
) -> None:
    page = windows().open("/tenants/")
    page.focus("#filter-q")
    page.keyboard.type("bol")
    expect(page.locator("#tenants tbody tr")).to_have_count(1)
    page.keyboard.type("t")
    expect(page.locator("#tenants tbody tr")).to_have_count(1)
    expect(page.locator("#filter-q")).to_be_focused()
    expect(page).to_have_url(re.compile(r"/tenants/\?q=bolt&cell=&store=&tier=&sort=tenant$"))


def test_a_move_that_is_refused_keeps_what_was_chosen(
    here: make.Cast, windows: Windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STORE_EU1_A", raising=False)
    page = windows(calm=False).open("/moves/new/")
    page.focus("#tenant")
    page.keyboard.type("acm")
    expect(page.locator("#tenant-options option")).to_have_count(1)
    page.fill("#tenant", "acme")
    page.keyboard.press("Enter")
    page.select_option("#target_store", "store-eu1-b")
    page.fill("#reason", "a store of its own")
    page.click("#start")
    expect(page.get_by_role("alert")).to_contain_text("Not started")
    expect(page.locator("#reason")).to_have_value("a store of its own")
    expect(page.locator("#target_store")).to_have_value("store-eu1-b")
    assert not TenantMigration.objects.exists()
