"""A split under a person's hands: channels checked off by keyboard, tables that keep their page."""

from __future__ import annotations

from datetime import datetime

import pytest
from playwright.sync_api import expect

from migrations_app.domain.phases import Phase
from migrations_app.models import MoveChannel
from tests import make, scene
from tests.browser.conftest import Windows

pytestmark = [
    pytest.mark.browser,
    pytest.mark.django_db(transaction=True, serialized_rollback=True),
]


@pytest.mark.parametrize("width", [390, 1440])
def test_a_channel_is_checked_off_and_taken_back_by_keyboard(
    width: int, here: make.Cast, at: datetime, windows: Windows
) -> None:
    move = scene.split_move(here, Phase.SPLIT, now=at)
    row = scene.channels(move)[1]
    page = windows(width=width).open(f"/moves/mv-{move.pk}/")
    page.focus(f"#check-{row.pk}-copy")
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Is logs copied?")
    page.fill("#dialog-reason", "they are written there")
    page.keyboard.press("Enter")
    expect(dialog).to_be_hidden()
    expect(page.locator("#announce")).to_have_text("logs: copy checked off.")
    line = page.locator(f'[data-row="channel-{row.pk}"]')
    expect(line).to_contain_text("they are written there")
    page.click(f"#uncheck-{row.pk}-copy")
    expect(dialog).to_contain_text("Take back that logs is copied?")
    page.fill("#dialog-reason", "not all of them")
    page.click("#dialog-act")
    expect(line).to_contain_text("not all of them")
    assert MoveChannel.objects.get(pk=row.pk).state == "open"


def test_tables_of_artifacts_keep_their_page_through_polls(
    here: make.Cast, at: datetime, windows: Windows
) -> None:
    move = scene.split_move(here, Phase.SPLIT, now=at)
    scene.artifacts(move, 45)
    page = windows().open(f"/moves/mv-{move.pk}/")
    page.click("#artifact-numbers summary")
    page.click("#numbers-next")
    pager = page.locator("#artifact-numbers .pager")
    expect(pager).to_contain_text("Page 2 of 3")
    move.artifact_versions.filter(source_version=45).update(name="user:last.pdf")
    move.refresh_from_db()
    move.artifacts = 46
    move.save()
    expect(page.locator("#move-artifacts")).to_contain_text("45 of 46", timeout=15_000)
    expect(pager).to_contain_text("Page 2 of 3")
    expect(page.locator("#artifact-numbers")).to_have_attribute("open", "")


def test_new_move_says_what_a_split_is_and_a_dry_run_tells_it_without_a_script(
    here: make.Cast, windows: Windows
) -> None:
    page = windows(javascript=False, calm=False).open("/moves/new/?tenant=acme")
    page.check('input[value="split"]')
    page.select_option("#target_cell", "cell-eu1-b")
    page.select_option("#target_store", "store-eu1-b")
    page.click("#tell")
    # Its stores have no address here, so the dry run is refused, with the choice kept.
    expect(page.locator('input[value="split"]')).to_be_checked()
    expect(page.locator("#dry-run")).to_contain_text("Would not start")
