"""A rollback on the pages: asked for with its price, seen everywhere, taken back or stopped."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timedelta

import pytest
from django.urls import reverse

from migrations_app import queries
from migrations_app.domain.phases import REVERSED, Phase
from migrations_app.models import TenantMigration
from migrations_app.panels import fence, head, lists, overview, progress
from migrations_app.panels.seen import Seen, seen
from tests import make, scene
from tests.web.conftest import HTMX, People
from tests.web.test_pages import page, text_of

Moving = Callable[..., TenantMigration]
BEGUN = sorted(REVERSED - {Phase.REVERSE_TARGET})


def read(move: TenantMigration) -> Seen:
    found = seen(move.pk)
    assert found is not None
    return found


def dialog(people: People, verb: str, move: TenantMigration) -> str:
    answer = people.operator.get(reverse(verb, args=[move.pk]), headers=HTMX)
    assert answer.status_code == 200
    return text_of(answer.content.decode())


@pytest.mark.parametrize("phase", [Phase.BACKFILL, Phase.VERIFY, Phase.TARGET])
def test_roll_back_is_there_before_soak_and_says_when_it_opens(
    phase: Phase, moving: Moving, people: People
) -> None:
    html = page(people.operator, moving(phase))
    assert re.search(r'<button[^>]*-rollback"[^>]* disabled', html)
    assert "Roll back opens in SOAK." in html


def test_the_price_stands_before_the_button(moving: Moving, people: People, at: datetime) -> None:
    move = moving(Phase.SOAK, into=3600.0)
    text = dialog(people, "rollback", move)
    quote = queries.fence_quote(move, now=at)
    assert "Roll acme back to store-eu1-a?" in text
    assert f"{quote.expected:.1f}s, at worst 1m" in text
    assert "240 sessions written, born or deleted on store-eu1-b" in text
    assert "71h 00m, until " in text or "70h 59m, until " in text
    assert "on all 1 instance of cell-eu1-b" in text
    assert "Roll back to source" in text
    assert "Stay on target" in text
    assert "Budget, seconds" not in text


def test_what_was_not_looked_at_yet_is_said(moving: Moving, people: People) -> None:
    move = moving(Phase.SOAK, touched=None, touched_at=None)
    assert "Not looked at yet" in dialog(people, "rollback", move)
    assert "Touched since the cutover not looked at yet" in text_of(page(people.viewer, move))


def test_nothing_is_said_to_be_untouched_before_somebody_looked(
    moving: Moving, people: People
) -> None:
    text = text_of(page(people.viewer, moving(Phase.SOAK, touched=None, touched_at=None)))
    assert "Touched since cutover –" in text
    assert "Changed at drain" not in text


def test_each_figure_of_a_rollbacks_price_has_its_own_label(moving: Moving, people: People) -> None:
    text = text_of(page(people.viewer, moving(Phase.SOAK, into=3600.0)))
    assert re.search(r"A rollback now, expected [\d.]+s A rollback now, at worst 1m \d\ds", text)


def test_a_fence_over_its_budget_asks_for_a_larger_one(
    moving: Moving, people: People, guarded: Callable[[TenantMigration], None]
) -> None:
    move = moving(Phase.SOAK, touched=40_000, sessions=40_000)
    guarded(move)
    assert "the fence may take longer than 2m 30s at worst" in dialog(people, "rollback", move)
    url, form = reverse("rollback", args=[move.pk]), {"reason": "slow", "seen": "soak"}
    assert people.operator.post(url, form, headers=HTMX).status_code == 409
    answer = people.operator.post(url, form | {"budget_seconds": "3000"}, headers=HTMX)
    assert answer.status_code == 200
    move.refresh_from_db()
    assert move.rollback_requested_by == "olga"
    assert move.budget_seconds == 3000


def test_late_writes_are_settled_before_a_rollback(
    moving: Moving, people: People, at: datetime
) -> None:
    move = moving(Phase.SOAK)
    scene.late_writes(move, now=at)
    html = people.operator.get(reverse("rollback", args=[move.pk]), headers=HTMX).content.decode()
    assert "2 late writes at the closed store-eu1-a must be settled first" in html
    assert f'href="{reverse("move", args=[move.pk])}?kind=late_write#mismatches"' in html
    assert re.search(r'id="dialog-act"[^>]* disabled', html)


def test_a_rollback_that_waits_is_rolling_back_and_can_be_taken_back(
    moving: Moving, people: People, at: datetime
) -> None:
    asked = {
        "rollback_requested_at": at,
        "rollback_requested_by": "omar",
        "rollback_reason": "slow",
    }
    move = moving(Phase.SOAK, **asked)
    enabled = {a.verb for a in head.head(read(move), now=at).actions if a.enabled}
    assert enabled == {"cancel_rollback", "pause"}
    assert "Rolling back in SOAK" in text_of(page(people.viewer, move))
    url = reverse("cancel_rollback", args=[move.pk])
    answer = people.operator.post(url, {"reason": "found it", "seen": "soak"}, headers=HTMX)
    assert answer.status_code == 200
    move.refresh_from_db()
    assert move.rollback_requested_at is None


@pytest.mark.parametrize("phase", BEGUN)
def test_a_rollback_is_seen_on_every_page_and_can_be_stopped(
    phase: Phase, moving: Moving, people: People
) -> None:
    move = moving(phase)
    for address in (reverse("move", args=[move.pk]), "/moves/", "/", "/tenants/", "/tenants/acme/"):
        assert "Rolling back" in people.operator.get(address).content.decode(), address
    attention = people.operator.get("/").content.decode()
    assert "is being rolled back, in REVERSE_" in attention
    assert "Stop rollback…" in attention
    text = dialog(people, "abort", move)
    assert "Stop the rollback and keep acme on store-eu1-b?" in text
    assert "Its soak begins anew, 72h." in text


def test_a_rollback_past_its_last_moment_says_that_it_cannot_be_stopped(
    moving: Moving, people: People
) -> None:
    html = page(people.operator, moving(Phase.REVERSE_TARGET))
    assert "can&#x27;t be stopped any more: acme is on its way to store-eu1-a." in html
    (button,) = re.findall(r'<button[^>]*-abort"[^>]*>', html)
    assert " disabled" in button


def test_the_track_shows_the_way_back_with_its_times_and_hatching(
    moving: Moving, at: datetime
) -> None:
    track = progress.track(read(moving(Phase.REVERSE_VERIFY)), now=at)
    assert track.title == "The way back"
    assert [step.name for step in track.steps][1:] == [
        "REVERSE_DRAIN",
        "REVERSE_DELTA",
        "REVERSE_VERIFY",
        "REVERSE_TARGET",
        "ROLLED_BACK",
    ]
    assert [step.text for step in track.steps][1:4] == ["12.4s", "6.2s", "15s so far"]
    assert [step.fenced for step in track.steps] == [False, True, True, True, False, False]


def test_a_second_rollback_does_not_count_the_phases_of_the_first(
    moving: Moving, at: datetime
) -> None:
    move = moving(Phase.REVERSE_DELTA)
    # That one is stopped, and another begins.
    for was, to in ((Phase.REVERSE_DELTA, Phase.SOAK), (Phase.SOAK, Phase.REVERSE_DRAIN)):
        move.events.create(at=at, who="mover", was=was, now=to, note="")
    TenantMigration.objects.update(phase=Phase.REVERSE_DRAIN, phase_since=at)
    track = progress.track(read(move), now=at)
    assert [step.at for step in track.steps] == [at, at, None, None, None, None]


def test_the_fence_on_the_way_back_is_that_of_the_target(
    moving: Moving, here: make.Cast, at: datetime
) -> None:
    move = moving(Phase.REVERSE_DRAIN)
    (one,) = here.other_cell.instances.all()
    scene.said(one, at=at, version=move.fence_version, in_flight={"acme": 2})
    found = fence.instances(read(move), now=at)
    assert found.cell == here.other_cell
    assert found.note == "1 of 1 acknowledged, 2 in flight"
    panel = fence.fence(read(move), None, now=at)
    assert panel is not None
    assert panel.title == "Fence on store-eu1-b"
    assert [line.name for line in panel.lines if line.running] == ["Drain"]
    (past,) = panel.past
    assert past.name == "Closed on store-eu1-a"
    assert past.actual == pytest.approx(38.0 + 23.1 + 22.6 + 0.2)
    assert past.expected is not None


def test_progress_on_the_way_back_has_a_rate_and_a_time(moving: Moving, at: datetime) -> None:
    panel = progress.progress(read(moving(Phase.REVERSE_VERIFY, into=10.0)), now=at)
    said = {row.label: row.value for row in panel.rows}
    assert said["Rate, this phase"] == "857 /s"
    assert said["ETA at this rate"].endswith(", in 4s")
    assert panel.notice == "Asked for by operator-1: answers are slow since the cutover"


def test_a_rollback_that_was_stopped_says_that_the_target_opens_again(
    moving: Moving, people: People, at: datetime
) -> None:
    move = moving(Phase.REVERSE_DELTA)
    move.events.create(at=at, who="mover", was=move.phase, now=Phase.SOAK, note="Abort: fixed it")
    TenantMigration.objects.update(phase=Phase.SOAK, abort_requested_at=at)
    found = read(move)
    assert found.status(at).word == "Opening the target again"
    assert found.every == 1
    track = progress.track(found, now=at)
    assert [step.glyph for step in track.steps][1:3] == ["done", "aborted"]
    enabled = [action.verb for action in head.head(found, now=at).actions if action.enabled]
    assert enabled == []
    assert "Opening the target again in SOAK" in text_of(page(people.operator, move))


def test_a_rollback_that_gave_up_is_news_for_a_day(moving: Moving, at: datetime) -> None:
    move = moving(Phase.REVERSE_DRAIN)
    note = "Not drained after 60s: 1 turn in flight, waiting for eu1-b-1"
    move.events.create(at=at, who="mover", was=move.phase, now=Phase.SOAK, note=note)
    TenantMigration.objects.update(phase=Phase.SOAK, fence_opened_at=at)
    (item,) = overview.attention(now=at)
    assert item.title == f"{move} acme stopped rolling back by itself"
    assert note in item.text
    assert progress.progress(read(move), now=at).notice.startswith(note)
    assert overview.attention(now=at + timedelta(days=1, seconds=1)) == []


def test_a_move_that_was_rolled_back_has_ended_on_its_source(
    moving: Moving, people: People, at: datetime
) -> None:
    move = moving(Phase.ROLLED_BACK)
    html = page(people.operator, move)
    text = text_of(html)
    assert "Served on store-eu1-a" in text
    assert "Rolled back, acme lives on store-eu1-a" in text
    assert "Asked for by operator-1" in text
    assert f'hx-get="{reverse("head", args=[move.pk])}' not in html
    assert "Move acme again" in text
    (line,) = lists.moves_of(move.tenant, now=at)
    assert line.status.word == "Rolled back"
    assert line.mini == ("",) * 7


def test_what_comes_next_of_a_rollback_is_not_that_its_source_is_deleted(
    moving: Moving, at: datetime
) -> None:
    moving(Phase.SOAK, rollback_requested_at=at, rollback_requested_by="omar")
    assert overview.next_up(now=at) == []


@pytest.mark.parametrize("verb", ["rollback", "cancel_rollback", "flip", "set_pace"])
def test_a_viewer_rolls_nothing_back(verb: str, moving: Moving, people: People) -> None:
    move = moving(Phase.SOAK)
    before = TenantMigration.objects.values().get(pk=move.pk)
    answer = people.viewer.post(reverse(verb, args=[move.pk]), {"reason": "curious"})
    assert answer.status_code == 403
    assert TenantMigration.objects.values().get(pk=move.pk) == before


# --- the word for TARGET, and the pace ---------------------------------------------------------


def test_a_move_that_is_flipped_by_hand_waits_loudly(
    moving: Moving, people: People, at: datetime
) -> None:
    move = moving(Phase.VERIFY, flip_by_hand=True, stage="end", done=scene.SESSIONS)
    found = head.head(read(move), now=at)
    assert [action.verb for action in found.actions if action.primary] == ["flip"]
    panel = fence.fence(read(move), None, now=at)
    assert panel is not None
    assert panel.loud.startswith(
        "All is equal. Flip it to the target, or it reopens on store-eu1-a"
    )
    assert "waits for you to flip it to its target" in people.viewer.get("/").content.decode()
    form = {"reason": "watched it", "seen": "verify"}
    url = reverse("flip", args=[move.pk])
    assert people.operator.post(url, form, headers=HTMX).status_code == 200
    move.refresh_from_db()
    assert move.flip_requested_by == "olga"
    assert not read(move).waits_for_flip


def test_a_deadline_that_is_near_is_loud(moving: Moving, at: datetime) -> None:
    move = moving(Phase.VERIFY)
    early = fence.fence(read(move), None, now=at)
    late = fence.fence(read(move), None, now=at + timedelta(seconds=60))
    assert early is not None
    assert late is not None
    assert early.loud == ""
    assert late.loud.startswith("It reopens on store-eu1-a by itself at ")


@pytest.mark.parametrize(
    ("typed", "pace", "finishes"),
    [
        ({"pace_per_second": "12"}, 12.0, False),
        ({"finish_by": "soon"}, None, True),
        ({}, None, False),
    ],
    ids=["rate", "time", "none"],
)
def test_the_pace_is_changed_to_a_rate_a_time_or_none(
    typed: dict[str, str],
    pace: float | None,
    finishes: bool,
    moving: Moving,
    people: People,
    at: datetime,
) -> None:
    move = moving(Phase.BACKFILL, pace_per_second=40.0)
    if finishes:
        typed = {"finish_by": f"{at + timedelta(hours=3):%Y-%m-%dT%H:%M}"}
    form = {"reason": "busy morning", "seen": "backfill", **typed}
    answer = people.operator.post(reverse("set_pace", args=[move.pk]), form, headers=HTMX)
    assert answer.status_code == 200
    move.refresh_from_db()
    assert move.pace_per_second == pace
    assert (move.finish_by is not None) == finishes


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ({"pace_per_second": "1", "finish_by": "2099-01-01T00:00"}, "choose one"),
        ({"finish_by": "tomorrow"}, "is no date and time"),
        ({"pace_per_second": "fast"}, "choose 0.01 to 100,000"),
    ],
)
def test_a_pace_that_makes_no_sense_is_refused(
    typed: dict[str, str], words: str, moving: Moving, people: People
) -> None:
    move = moving(Phase.BACKFILL)
    form = {"reason": "busy morning", **typed}
    answer = people.operator.post(reverse("set_pace", args=[move.pk]), form, headers=HTMX)
    assert answer.status_code == 409
    assert words in answer.content.decode()


def test_a_pace_says_when_the_pass_is_through(moving: Moving, at: datetime) -> None:
    move = moving(Phase.BACKFILL, pace_per_second=12.0)
    said = {row.label: row.value for row in progress.progress(read(move), now=at).rows}
    through = at + timedelta(seconds=(12_600 - 7_412) / 12)
    assert said["Pace"] == f"at 12.0 /s: through at {through:%H:%M} UTC"


def test_a_copy_that_backs_off_says_so(moving: Moving, at: datetime) -> None:
    why = "store-eu1-b writes 38 /s, a third of its best"
    panel = progress.progress(read(moving(Phase.BACKFILL, ease=0.4, eased_why=why)), now=at)
    assert panel.notice == why
    assert panel.notice_status is not None
    assert panel.notice_status.word == "Eased"
    assert {row.label: row.value for row in panel.rows}["Works, of the time"] == "40\u202f%"
