"""The table of mismatches: its states, its filter, and acts on one row or on several."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime

import pytest
from django.urls import reverse

from migrations_app.domain.mismatch import Looks
from migrations_app.domain.phases import Phase
from migrations_app.models import Mismatch, TenantMigration
from migrations_app.panels import mismatches as table
from migrations_app.panels import overview, progress
from migrations_app.panels.mismatches import MismatchFilter
from migrations_app.panels.seen import seen
from tests import make, scene
from tests.stores import Raw
from tests.web.conftest import APP, HTMX, People, polled
from tests.web.test_pages import page, text_of

Moving = Callable[..., TenantMigration]


def read(move: TenantMigration, **wanted: object) -> table.Mismatches:
    found = seen(move.pk)
    assert found is not None
    return table.mismatches(found, MismatchFilter(**wanted))  # type: ignore[arg-type]


def address(name: str, move: TenantMigration) -> str:
    return reverse(name, args=[move.pk])


@pytest.fixture
def move(moving: Moving, at: datetime) -> TenantMigration:
    """A comparison with the article's three differences, then one of each state."""
    made = moving(Phase.VERIFY)
    scene.mismatches(made, now=at)
    rows = scene.many_mismatches(made, 3, now=at)
    rows[0].transient, rows[0].looks_like = True, Looks.MOVED_ON
    rows[1].accepted_at, rows[1].accepted_by = at, "omar"
    rows[1].accepted_reason, rows[1].looks_like = "1e22 reads the same", Looks.CANNOT_HOLD
    rows[2].resolved_at = at
    for row in rows:
        row.save()
    return made


def test_each_state_is_counted_and_told_apart(move: TenantMigration, people: People) -> None:
    panel = read(move)
    assert (panel.open, panel.transient, panel.accepted, panel.resolved) == (3, 1, 1, 1)
    text = text_of(page(people.operator, move))
    assert "3 block TARGET" in text
    assert "Changed after its copy; the next pass takes it along." in text
    assert "Accepted by omar: 1e22 reads the same" in text
    assert "Blocked in VERIFY" in text


def test_what_is_transient_or_accepted_blocks_nothing(moving: Moving, at: datetime) -> None:
    move = moving(Phase.VERIFY)
    rows = scene.many_mismatches(move, 2, now=at)
    rows[0].transient = True
    rows[1].accepted_at = at
    for row in rows:
        row.save()
    found = seen(move.pk)
    assert found is not None
    assert found.open_mismatches == 0
    assert found.status(at).word == "Fenced"


def test_a_part_that_was_not_compared_is_not_called_the_same(move: TenantMigration) -> None:
    user, events, _ = read(move, state="open").lines
    assert (user.events, user.state, user.shared) == ("–", "–", "≠ differs")
    assert (events.events, events.state, events.shared) == ("≠ differs", "–", "–")
    Mismatch.objects.filter(pk=int(events.key)).update(part="state")
    _, state, _ = read(move, state="open").lines
    assert (state.events, state.state) == ("= same", "≠ differs")


@pytest.mark.parametrize("state", ["open", "transient", "accepted", "resolved", "all", ""])
def test_the_table_is_narrowed_by_state(state: str, move: TenantMigration) -> None:
    counts = {"open": 3, "transient": 1, "accepted": 1, "resolved": 1, "all": 6, "": 5}
    assert read(move, state=state).found == counts[state]


def test_the_table_is_narrowed_by_kind_and_its_polls_keep_it(
    move: TenantMigration, people: People
) -> None:
    html = people.operator.get(address("move", move), {"kind": "empty_copy"}).content.decode()
    assert html.count('<tr data-row="mismatch-') == 1
    assert "10ce55fa" in html
    url = polled(html, address("mismatches", move))
    assert "kind=empty_copy" in url
    assert people.operator.get(url, headers=HTMX).status_code == 204


def test_nonsense_in_the_filter_asks_for_nothing(move: TenantMigration, people: People) -> None:
    given = {"state": "x", "kind": "'; --", "page": "9" * 30}
    answer = people.operator.get(address("mismatches", move), given, headers=HTMX)
    assert answer.content.decode().count('<tr data-row="mismatch-') == 5


def test_thousands_are_shown_by_pages(moving: Moving, people: People, at: datetime) -> None:
    move = moving(Phase.VERIFY)
    scene.many_mismatches(move, 1_001, now=at)
    html = page(people.operator, move)
    assert html.count('<tr data-row="mismatch-') == table.PAGE_ROWS
    assert "1,001 block TARGET" in html
    assert "Page 1 of 41" in html
    last = people.operator.get(address("move", move), {"page": "41"}).content.decode()
    assert last.count('<tr data-row="mismatch-') == 1
    assert 'rel="next"' not in last


def test_the_table_takes_as_many_reads_for_a_page_as_for_a_row(
    moving: Moving, at: datetime, django_assert_max_num_queries: Callable[..., object]
) -> None:
    move = moving(Phase.VERIFY)
    scene.many_mismatches(move, 60, now=at)
    found = seen(move.pk)
    assert found is not None
    with django_assert_max_num_queries(6):
        assert len(table.mismatches(found, MismatchFilter()).lines) == table.PAGE_ROWS


# --- acts -------------------------------------------------------------------------------------


def test_several_rows_are_repaired_by_one_form(move: TenantMigration, people: People) -> None:
    one, two, three = Mismatch.objects.filter(transient=False, accepted_at=None, resolved_at=None)
    form = {"mismatch": [str(one.pk), str(two.pk)], "seen": "verify"}
    assert people.operator.post(address("recopy", move), form).status_code == 302
    asked = Mismatch.objects.exclude(repair_requested_at=None).values_list("pk", flat=True)
    assert set(asked) == {one.pk, two.pk}
    # A row's own button means that row, whatever else is ticked.
    form = {"mismatch": [str(one.pk), str(two.pk)], "only": str(three.pk), "seen": "verify"}
    assert people.operator.post(address("recopy", move), form, headers=HTMX).status_code == 200
    three.refresh_from_db()
    assert three.repair_requested_by == "olga"


def test_all_that_a_filter_found_is_repaired_at_once(
    moving: Moving, people: People, at: datetime
) -> None:
    move = moving(Phase.VERIFY)
    scene.mismatches(move, now=at)
    scene.many_mismatches(move, 120, now=at)
    form = {"all": "1", "kind": "fence_leak", "seen": "verify"}
    answer = people.operator.post(address("recopy", move), form, headers=HTMX)
    assert answer.status_code == 200
    asked = Mismatch.objects.exclude(repair_requested_at=None)
    assert asked.count() == 121
    assert set(asked.values_list("looks_like", flat=True)) == {"fence_leak"}
    # The table that comes back is narrowed as it was.
    assert 'value="fence_leak" selected' in answer.content.decode()


def test_the_users_of_several_rows_are_reconciled(move: TenantMigration, people: People) -> None:
    rows = Mismatch.objects.filter(looks_like__in=["fence_leak", "empty_copy"], resolved_at=None)
    ids = [str(row.pk) for row in rows]
    form = {"mismatch": ids, "seen": "verify"}
    answer = people.operator.post(address("reconcile_users", move), form, headers=HTMX)
    assert answer.status_code == 200
    assert Mismatch.objects.filter(part="user", repair_requested_by="olga").count() == 2


def test_a_stale_page_changes_no_row(move: TenantMigration, people: People) -> None:
    form = {"all": "1", "seen": "backfill"}
    for verb in ("recopy", "reconcile_users"):
        answer = people.operator.post(address(verb, move), form, headers=HTMX)
        assert answer.status_code == 409
        assert "The page showed BACKFILL" in answer.content.decode()
    assert not Mismatch.objects.exclude(repair_requested_at=None).exists()


def test_a_difference_is_accepted_with_a_reason_that_a_dialog_asks_for(
    moving: Moving, people: People, at: datetime
) -> None:
    move = moving(Phase.VERIFY)
    rows = scene.many_mismatches(move, 2, now=at)
    Mismatch.objects.update(looks_like=Looks.CANNOT_HOLD)
    html = page(people.operator, move)
    assert html.count("Accept…</button>") == 2
    form = {"mismatch": [str(row.pk) for row in rows], "seen": "verify"}
    for headers in (HTMX, {}):
        answer = people.operator.post(address("accept", move), form, headers=headers)
        assert answer.status_code == 200
        asked = answer.content.decode()
        assert ("<html" in asked) == (headers == {})
        assert "2 differences accepted, with your name and reason." in asked
        assert f'name="ids" value="{rows[0].pk},{rows[1].pk}"' in asked
    ids = f"{rows[0].pk},{rows[1].pk}"
    without = {"ids": ids, "reason": " ", "seen": "verify"}
    assert people.operator.post(address("accept", move), without, headers=HTMX).status_code == 409
    given = without | {"reason": "spelled in another way"}
    answer = people.operator.post(address("accept", move), given, headers=HTMX)
    assert answer["HX-Trigger"] == "moved"
    assert Mismatch.objects.filter(accepted_by="olga").count() == 2
    assert "spelled in another way" in page(people.viewer, move)


def test_what_would_lose_something_is_not_accepted(move: TenantMigration, people: People) -> None:
    assert "Accept…</button>" not in page(people.operator, move)
    row = Mismatch.objects.filter(looks_like=Looks.EMPTY_COPY).get()
    form = {"ids": str(row.pk), "reason": "never mind", "seen": "verify"}
    answer = people.operator.post(address("accept", move), form, headers=HTMX)
    assert answer.status_code == 409
    assert "something would be lost" in answer.content.decode()


def test_accepting_nothing_says_what_to_do(move: TenantMigration, people: People) -> None:
    answer = people.operator.post(address("accept", move), {"seen": "verify"}, headers=HTMX)
    assert answer.status_code == 409
    assert "Tick the rows that may stay first." in answer.content.decode()


@pytest.mark.parametrize("verb", ["recopy", "reconcile_users", "accept"])
def test_a_viewer_changes_no_row_and_is_shown_no_box(
    verb: str, move: TenantMigration, people: People
) -> None:
    answer = people.viewer.post(address(verb, move), {"all": "1", "reason": "curious"})
    assert answer.status_code == 403
    html = page(people.viewer, move)
    assert 'type="checkbox"' not in html
    assert "late-writes.json" not in html


def test_without_javascript_all_rows_can_be_ticked(move: TenantMigration, people: People) -> None:
    html = people.operator.get(address("move", move), {"ticked": "1"}).content.decode()
    assert len(re.findall(r'name="mismatch"[^>]* checked', html)) == 5
    # Each button says where it posts to, so that one form serves them all.
    buttons = re.findall(r'<button[^>]*hx-target="#mismatches"[^>]*>', html)
    assert all("formaction=" in button for button in buttons if "recopy-all" not in button)


def test_every_box_and_button_of_a_row_has_a_name_of_its_own(
    move: TenantMigration, people: People
) -> None:
    html = page(people.operator, move)
    row = re.search(r'<tr data-row="mismatch-\d+">.*?b204e6d8.*?</tr>', html, re.S)
    assert row
    assert 'aria-label="Tick session b204e6d8"' in html
    assert 'aria-label="View diff of session b204e6d8"' in html
    assert 'aria-label="Re-copy session b204e6d8"' in html


# --- late writes -------------------------------------------------------------------------------


def test_a_late_write_is_an_alarm_with_both_versions_to_download(
    moving: Moving, people: People, at: datetime
) -> None:
    move = moving(Phase.SOAK)
    scene.late_writes(move, now=at)
    found = seen(move.pk)
    assert found is not None
    assert found.status(at).word == "Late write"
    assert "2 sessions were written on store-eu1-a" in progress.progress(found, now=at).notice
    (item,) = overview.attention(now=at)
    assert item.title == f"{move} acme: 2 late writes at the closed store-eu1-a"
    assert item.review == 2
    html = page(people.operator, move)
    assert f'href="{address("late_versions", move)}"' in html
    assert "2 block a rollback" in html
    assert html.count("Download both</a>") == 2
    assert html.count("Accept…</button>") == 2
    assert "Re-copy" not in html


def test_both_versions_come_as_a_file_for_operators_only(
    moving: Moving, people: People, sides: tuple[Raw, Raw], at: datetime
) -> None:
    source, _ = sides
    move = moving(Phase.SOAK)
    rows = scene.late_writes(move, now=at)
    source.run(
        "UPDATE sessions SET state = ? WHERE app_name = ? AND id = ?",
        '{"step": "late"}',
        APP,
        "s-0",
    )
    one = reverse("versions", args=[move.pk, rows[0].pk])
    for url, found in ((one, 1), (address("late_versions", move), 2)):
        answer = people.operator.get(url)
        assert answer.status_code == 200
        assert answer["Content-Disposition"].startswith(f'attachment; filename="{move}-')
        assert answer["Cache-Control"] == "no-store"
        given = json.loads(b"".join(answer.streaming_content))
        assert given["source_store"] == "store-eu1-a"
        assert len(given["versions"]) == found
        assert given["versions"][0]["source"]["state"] == {"step": "late"}
        assert given["versions"][0]["target"]["state"] != {"step": "late"}
        assert people.viewer.get(url).status_code == 403


def test_a_file_of_no_late_write_is_a_whole_document(
    moving: Moving, people: People, sides: tuple[Raw, Raw]
) -> None:
    answer = people.operator.get(address("late_versions", moving(Phase.SOAK)))
    assert json.loads(b"".join(answer.streaming_content))["versions"] == []


def test_a_file_that_cannot_be_read_is_refused_in_words(
    moving: Moving, people: People, at: datetime
) -> None:
    move = moving(Phase.SOAK)
    scene.late_writes(move, now=at)
    answer = people.operator.get(address("late_versions", move))
    assert answer.status_code == 409
    assert "Not done" in answer.content.decode()


def test_an_accepted_late_write_leaves_the_way_back_open(
    moving: Moving, people: People, here: make.Cast, at: datetime
) -> None:
    move = moving(Phase.SOAK)
    rows = scene.late_writes(move, now=at)
    form = {
        "ids": ",".join(str(row.pk) for row in rows),
        "reason": "kept the file",
        "seen": "soak",
    }
    assert people.operator.post(address("accept", move), form).status_code == 302
    found = seen(move.pk)
    assert found is not None
    assert found.late_writes == 0
    assert found.status(at).word == "Soaking"
