"""What panels say at a moment that the test chooses: rates, times left, quotes, buttons."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

import pytest
from django.urls import reverse

from migrations_app import queries
from migrations_app.domain.phases import Phase
from migrations_app.models import TenantMigration
from migrations_app.panels import fence, head, lists, overview, progress
from migrations_app.panels.rows import checks as checks_panel
from migrations_app.panels.seen import Seen, seen
from tenants import panels as tenants_panels
from tests import make, scene
from tests.web.conftest import HTMX, People

Moving = Callable[..., TenantMigration]


def read(move: TenantMigration) -> Seen:
    found = seen(move.pk)
    assert found is not None
    return found


def rows(move: TenantMigration, now: datetime) -> dict[str, str]:
    return {row.label: row.value for row in progress.progress(read(move), now=now).rows}


def test_rate_and_time_left_come_from_the_last_seconds(moving: Moving, at: datetime) -> None:
    said = rows(moving(Phase.BACKFILL), at)
    assert said["Rate, last 10s"] == "40.0 /s"
    # (12,600 - 7,412) / 40 sessions/s
    assert said["ETA at this rate"].endswith(", in 2m 09s")


def test_a_copy_that_stands_still_has_no_rate(moving: Moving, at: datetime) -> None:
    said = rows(moving(Phase.BACKFILL), at + timedelta(seconds=30))
    assert said["Rate, last 10s"] == "–"
    assert said["ETA at this rate"] == "–"


def test_a_comparison_is_timed_since_its_phase_began(moving: Moving, at: datetime) -> None:
    said = rows(moving(Phase.VERIFY, into=10.0), at)
    assert said["Rate, this phase"] == "857 /s"
    assert said["ETA at this rate"].endswith(", in 4s")


def test_a_phase_that_waits_after_its_last_session_has_no_rate_and_no_full_bar(
    moving: Moving, at: datetime
) -> None:
    move = moving(Phase.VERIFY, done=scene.SESSIONS, stage="end")
    scene.mismatches(move, now=at)
    panel = progress.progress(read(move), now=at)
    assert rows(move, at)["Rate, this phase"] == "–"
    assert panel.bar + panel.bad == 99.0
    assert panel.notice == "3 mismatches block TARGET: re-copy below, or abort."
    (step,) = [step for step in progress.track(read(move), now=at).steps if step.current]
    assert step.bar == 99.0


def test_a_soak_begins_empty_and_ends_full(moving: Moving, at: datetime) -> None:
    move = moving(Phase.SOAK, into=0.0)
    assert progress.progress(read(move), now=at).bar == 0
    later = at + timedelta(hours=73)
    assert progress.progress(read(move), now=later).bar == 100
    assert head.head(read(move), now=later).tags[0].word == "Waiting in SOAK"


def test_the_quote_stands_before_the_fence(moving: Moving, at: datetime) -> None:
    move = moving(
        Phase.BACKFILL,
        stage="ready",
        done=scene.SESSIONS,
        passes=2,
        pass_started_at=at - timedelta(seconds=9),
        pass_ended_at=at,
    )
    panel = fence.fence(read(move), queries.fence_quote(move, now=at), now=at)
    assert panel is not None
    assert panel.state == "open"
    assert panel.status.word == "Fits its budget"
    assert panel.worst >= 60 > panel.expected
    assert panel.expected == pytest.approx(sum(line.expected for line in panel.lines))


def test_the_estimate_stands_beside_the_actual_while_it_runs(moving: Moving, at: datetime) -> None:
    panel = fence.fence(read(moving(Phase.VERIFY, into=15.3)), None, now=at)
    assert panel is not None
    actual = {line.name: line.actual for line in panel.lines}
    assert actual["Drain"] == pytest.approx(38.0)
    assert actual["Delta"] == pytest.approx(23.1)
    assert actual["Verify"] == pytest.approx(15.3)
    assert actual["Publish"] is None
    assert panel.reading == pytest.approx(76.4)
    assert panel.deadline_seconds == pytest.approx(150 - 76.4)
    assert [line.name for line in panel.lines if line.running] == ["Verify"]
    assert sum(line.expected for line in panel.lines) == pytest.approx(panel.expected)


def test_the_actual_stays_when_the_fence_has_opened(moving: Moving, at: datetime) -> None:
    panel = fence.fence(read(moving(Phase.SOAK, into=3600)), None, now=at)
    assert panel is not None
    assert panel.state == "was"
    assert panel.reading == pytest.approx(38.0 + 23.1 + 22.6 + 0.2)
    assert panel.deadline_at is None


def test_a_bar_never_leaves_its_box(moving: Moving, at: datetime) -> None:
    late = at + timedelta(minutes=30)
    panel = fence.fence(read(moving(Phase.VERIFY)), None, now=late)
    assert panel is not None
    last = panel.slices[-1]
    assert last.x + last.width <= 100.1
    assert panel.deadline_seconds == 0


@pytest.mark.parametrize(
    ("phase", "columns", "word"),
    [
        (Phase.PREPARE, {}, "Moving in PREPARE"),
        (
            Phase.PREPARE,
            {"checks": [{"name": "n", "ok": False, "detail": "d"}]},
            "Blocked in PREPARE",
        ),
        (Phase.BACKFILL, {}, "Moving in BACKFILL"),
        (Phase.BACKFILL, {"failures": 1, "failure": "x"}, "Retrying in BACKFILL"),
        (Phase.BACKFILL, {"failures": 3, "failure": "x"}, "Blocked in BACKFILL"),
        (Phase.VERIFY, {"failures": 2, "failure": "x"}, "Blocked in VERIFY"),
        (Phase.SOAK, {}, "Soaking in SOAK"),
        (Phase.OFFBOARD, {}, "Deleting in OFFBOARD"),
        (Phase.REOPEN, {}, "Aborting in REOPEN"),
        (Phase.DONE, {}, "Done"),
        (Phase.ABORTED, {}, "Aborted"),
    ],
)
def test_the_title_says_how_worried_to_be(
    phase: Phase, columns: dict[str, object], word: str, moving: Moving, at: datetime
) -> None:
    assert head.head(read(moving(phase, **columns)), now=at).tags[0].word == word


def test_a_closed_fence_has_a_tag_of_its_own(moving: Moving, at: datetime) -> None:
    tags = [tag.word for tag in head.head(read(moving(Phase.DELTA)), now=at).tags]
    assert tags == ["Moving in DELTA", "Fence closed"]


def test_a_pause_inside_the_fence_shows_both(moving: Moving, at: datetime) -> None:
    move = moving(Phase.DELTA, pause_requested_at=at, pause_requested_by="olga")
    assert [tag.word for tag in head.head(read(move), now=at).tags] == [
        "Paused in DELTA",
        "Fence closed",
    ]


@pytest.mark.parametrize(
    ("phase", "enabled"),
    [
        (Phase.PREPARE, ["set_pace", "pause", "abort"]),
        (Phase.BACKFILL, ["set_pace", "pause", "abort"]),
        (Phase.DRAIN, ["hold_fence", "pause", "abort"]),
        (Phase.VERIFY, ["hold_fence", "pause", "abort"]),
        (Phase.TARGET, []),
        (Phase.SOAK, ["confirm_offboard", "pause", "rollback"]),
        (Phase.REVERSE_DRAIN, ["hold_fence", "pause", "abort"]),
        (Phase.REVERSE_DELTA, ["hold_fence", "pause", "abort"]),
        (Phase.REVERSE_VERIFY, ["hold_fence", "pause", "abort"]),
        (Phase.REVERSE_TARGET, []),
        (Phase.ROLLED_BACK, []),
        (Phase.OFFBOARD, []),
        (Phase.REOPEN, []),
        (Phase.DONE, []),
        (Phase.ABORTED, []),
    ],
)
def test_buttons_are_those_that_the_phase_takes(
    phase: Phase, enabled: list[str], moving: Moving, at: datetime
) -> None:
    actions = head.head(read(moving(phase)), now=at).actions
    assert [action.verb for action in actions if action.enabled] == enabled


def test_a_disabled_button_says_why(moving: Moving, at: datetime) -> None:
    for phase in (Phase.PREPARE, Phase.VERIFY, Phase.TARGET, Phase.SOAK, Phase.REOPEN):
        move = moving(phase)
        found = head.head(read(move), now=at)
        # A pause needs no words: what can't be paused is over in a moment.
        assert [
            a.verb for a in found.actions if a.disabled and not a.why and a.verb != "pause"
        ] in (
            [],
            ["hold_fence"] if phase == Phase.TARGET else [],
        )
        move.delete()


def test_a_move_that_waits_for_somebody_offers_the_drain_first(
    moving: Moving, at: datetime
) -> None:
    move = moving(Phase.BACKFILL, stage="ready", passes=2, pass_ended_at=at)
    drain = head.head(read(move), now=at).actions[0]
    assert (drain.verb, drain.enabled, drain.primary) == ("close_fence", True, True)


def test_a_drain_that_waits_for_its_pass_can_be_taken_back(moving: Moving, at: datetime) -> None:
    move = moving(Phase.BACKFILL, passes=2, drain_requested_at=at, drain_requested_by="omar")
    first = head.head(read(move), now=at).actions[0]
    assert (first.verb, first.enabled) == ("cancel_fence", True)
    assert first.why.startswith("omar started the drain at ")


def test_an_abort_that_is_stuck_at_cleaning_can_be_ended(moving: Moving, at: datetime) -> None:
    stuck = {"failures": 1, "failure": "no answer"}
    for columns, enabled in (
        ({}, []),
        ({"stage": "", **stuck}, []),
        ({"stage": "clean", **stuck}, ["leave_behind"]),
        ({"stage": "", "failures": 1, "failure": f"x {queries.GUARD_LOST}, so"}, ["leave_behind"]),
    ):
        move = moving(Phase.REOPEN, **columns)
        actions = head.head(read(move), now=at).actions
        assert [action.verb for action in actions if action.enabled] == enabled
        move.delete()


def test_a_move_that_gave_up_is_news_until_its_tenant_moves_again(
    here: make.Cast, at: datetime
) -> None:
    gone = scene.move(here, Phase.ABORTED, now=at)
    told = [item.title for item in overview.attention(now=at)]
    assert told == [f"{gone} acme aborted by itself"]
    assert overview.attention(now=at + timedelta(days=1, seconds=1)) == []
    scene.move(here, Phase.BACKFILL, now=at)
    assert overview.attention(now=at) == []


def test_an_abort_that_a_person_asked_for_is_no_news(here: make.Cast, at: datetime) -> None:
    scene.move(here, Phase.ABORTED, now=at, abort_requested_at=at, abort_requested_by="olga")
    assert overview.attention(now=at) == []


def test_what_comes_next_is_soonest_first(here: make.Cast, at: datetime) -> None:
    soaking = scene.move(here, Phase.SOAK, now=at, into=60)
    waiting = scene.move(
        here, Phase.BACKFILL, now=at, tenant=here.bolt, fence_not_before=at + timedelta(hours=1)
    )
    assert [item.move for item in overview.next_up(now=at)] == [waiting, soaking]


def test_a_list_of_many_moves_takes_as_many_reads_as_one_of_few(
    here: make.Cast, at: datetime, django_assert_max_num_queries: Callable[..., object]
) -> None:
    for index in range(30):
        tenant = make.tenant(f"t-{index}", cell=here.cell, store=here.store, now=at)
        scene.move(here, Phase.SOAK, now=at, tenant=tenant)
    with django_assert_max_num_queries(4):
        assert len(lists.live_moves(now=at)) == 30


def test_a_lost_instance_is_news_until_one_of_its_name_comes_back(
    here: make.Cast, at: datetime
) -> None:
    row = here.cell.instances.get(name="eu1-a-1")
    row.gone_at, row.gone_why = at, "lapsed"
    row.save()
    (item,) = tenants_panels.attention(now=at)
    assert item.title == "Instance eu1-a-1 stopped renewing its lease"
    assert item.text == "cell-eu1-a runs on 1 of 2."
    assert tenants_panels.lost_instances(now=at) == 1
    scene.instances(here.cell, ["eu1-a-1"], now=at)
    assert tenants_panels.attention(now=at) == []
    assert tenants_panels.lost_instances(now=at) == 0


def test_an_instance_that_left_is_not_lost(here: make.Cast, at: datetime) -> None:
    here.cell.instances.update(gone_at=at, gone_why="left")
    assert tenants_panels.lost_instances(now=at) == 0


def test_a_cell_that_went_dark_is_one_line(here: make.Cast, at: datetime) -> None:
    scene.instances(here.cell, [f"more-{number}" for number in range(8)], now=at)
    here.cell.instances.update(gone_at=at, gone_why="lapsed")
    (item,) = tenants_panels.attention(now=at)
    assert item.title == "10 instances of cell-eu1-a stopped renewing leases"
    assert item.text.endswith("and 6 more. cell-eu1-a runs on 0 of 10.")


def test_silent_instances_of_a_cell_are_one_line(here: make.Cast, at: datetime) -> None:
    later = at + timedelta(minutes=2)
    here.other_cell.instances.update(polled_at=later, reported_at=later)
    (item,) = tenants_panels.attention(now=later)
    assert item.title == "2 instances of cell-eu1-a are silent"


def test_advice_of_the_preparation_is_no_check_that_waits(moving: Moving, at: datetime) -> None:
    move = moving(Phase.PREPARE)
    panel = checks_panel(read(move))
    assert (panel.green, panel.counted, panel.advice) == (6, 6, 1)
    assert panel.lines[-1][0].word == "Advice"
    assert progress.progress(read(move), now=at).reading == "6"
    assert progress.progress(read(move), now=at).context == "of 6 checks green"


def test_the_log_names_the_phase_whose_result_it_tells(moving: Moving, people: People) -> None:
    move = moving(Phase.SOAK)
    html = people.viewer.get(reverse("log", args=[move.pk]), headers=HTMX).content.decode()
    assert "<b>TARGET → SOAK</b> Placement version 4" in html
