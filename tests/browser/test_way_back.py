"""What only a browser shows of the way back: ticks that stay, acts on several rows, the dialog."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path

import pytest
from playwright.sync_api import expect

from migrations_app.domain.mismatch import Looks
from migrations_app.domain.phases import Phase
from migrations_app.models import Mismatch
from tests import make, scene
from tests.browser.conftest import Windows

pytestmark = [
    pytest.mark.browser,
    pytest.mark.django_db(transaction=True, serialized_rollback=True),
]


def test_ticked_rows_stay_ticked_while_polls_draw_the_table_and_are_repaired_together(
    here: make.Cast, at: datetime, windows: Windows
) -> None:
    move = scene.move(here, Phase.VERIFY, now=at)
    rows = scene.many_mismatches(move, 3, now=at)
    page = windows().open(f"/moves/mv-{move.pk}/")
    page.locator(f"#tick-{rows[0].pk}").check()
    page.locator(f"#tick-{rows[1].pk}").check()
    # A poll draws the table anew, below nobody's focus.
    page.locator("h1").click()
    page.evaluate("document.activeElement.blur()")
    Mismatch.objects.filter(pk=rows[2].pk).update(first_difference="said in other words")
    expect(page.locator("#mismatches")).to_contain_text("said in other words", timeout=4_000)
    expect(page.locator(f"#tick-{rows[0].pk}")).to_be_checked()
    page.locator("#bulk-recopy").click()
    expect(page.locator("#mismatches")).to_contain_text("Repair asked for by", timeout=4_000)
    asked = Mismatch.objects.exclude(repair_requested_at=None).values_list("pk", flat=True)
    assert set(asked) == {rows[0].pk, rows[1].pk}
    # What was asked for is done with: its ticks are gone.
    expect(page.locator(f"#tick-{rows[0].pk}")).not_to_be_checked()
    page.locator(f"#recopy-{rows[2].pk}").click()
    expect(page.locator("#recopy-all")).to_have_count(0, timeout=4_000)
    rows[2].refresh_from_db()
    assert rows[2].repair_requested_at is not None


def test_all_shown_are_ticked_and_accepted_by_keyboard_in_a_dialog(
    here: make.Cast, at: datetime, windows: Windows
) -> None:
    move = scene.move(here, Phase.SOAK, now=at)
    rows = scene.late_writes(move, now=at)
    page = windows().open(f"/moves/mv-{move.pk}/?kind={Looks.LATE_WRITE}")
    page.locator("#tick-all").focus()
    page.keyboard.press("Space")
    for row in rows:
        expect(page.locator(f"#tick-{row.pk}")).to_be_checked()
    page.locator("#bulk-accept").focus()
    page.keyboard.press("Enter")
    dialog = page.locator("#dialog")
    expect(dialog).to_contain_text("2 differences accepted, with your name and reason.")
    expect(page.locator("#dialog-safe")).to_be_focused()
    page.locator("#dialog-reason").fill("kept the file")
    page.keyboard.press("Enter")
    expect(dialog).not_to_be_visible()
    # The act is announced, and behind it the page head's own words where those have changed.
    expect(page.locator("#announce")).to_contain_text(re.compile("Accept, |Soaking in SOAK"))
    assert Mismatch.objects.filter(accepted_reason="kept the file").count() == 2
    expect(page.locator("#mismatches")).to_contain_text("Accepted by operator-0: kept the file")


def test_the_filter_narrows_without_a_reload_and_polls_keep_it(
    here: make.Cast, at: datetime, windows: Windows
) -> None:
    move = scene.move(here, Phase.VERIFY, now=at)
    scene.mismatches(move, now=at)
    page = windows().open(f"/moves/mv-{move.pk}/")
    page.evaluate("window.kept = true")
    page.locator("#mismatch-kind").select_option("empty_copy")
    found = page.locator('#mismatches [data-row^="mismatch-"]')
    expect(found).to_have_count(1)
    page.wait_for_timeout(2_500)
    expect(found).to_have_count(1)
    expect(page.locator("#mismatch-kind")).to_have_value("empty_copy")
    assert page.evaluate("window.kept") is True


def test_a_rollback_is_asked_for_in_its_dialog_and_is_on_screen(
    here: make.Cast,
    at: datetime,
    windows: Windows,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    move = scene.move(here, Phase.SOAK, now=at)
    scene.guard_stores(move, folder=tmp_path, environment=monkeypatch)
    page = windows().open(f"/moves/mv-{move.pk}/")
    page.locator(f"#act-{move}-rollback").click()
    expect(page.locator("#dialog")).to_contain_text("Roll acme back to store-eu1-a?")
    page.locator("#dialog-reason").fill("answers are slow")
    page.locator("#dialog-act").click()
    expect(page.locator("#move-head")).to_contain_text("Rolling back in SOAK", timeout=2_000)
    expect(page.locator(f"#act-{move}-cancel_rollback")).to_be_visible()


def test_on_a_small_screen_a_dialog_opens_at_its_question_and_offers_the_safe_way_first(
    here: make.Cast, at: datetime, windows: Windows
) -> None:
    move = scene.move(here, Phase.SOAK, now=at)
    page = windows(width=390).open(f"/moves/mv-{move.pk}/")
    page.locator(f"#act-{move}-rollback").click()
    expect(page.locator("#dialog-safe")).to_be_focused()
    expect(page.locator("#dialog-h")).to_be_in_viewport()
    safe, act = (page.locator(f"#dialog-{name}").bounding_box() for name in ("safe", "act"))
    assert safe is not None
    assert act is not None
    assert safe["y"] < act["y"]
