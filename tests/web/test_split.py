"""A split on the pages: who serves what, what both sides changed, and the ways out of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.urls import reverse

from migrations_app import services
from migrations_app.domain.phases import Mode, Phase
from migrations_app.models import TenantMigration
from tests import make, scene
from tests.web.conftest import HTMX, People
from tests.web.test_pages import page, text_of

Split = Callable[..., TenantMigration]


@pytest.fixture
def splitting(here: make.Cast, at: datetime) -> Split:
    """Make a split move of acme in a phase, both cells serving."""

    def make_move(phase: Phase = Phase.SPLIT, **columns: object) -> TenantMigration:
        return scene.split_move(here, phase, now=at, **columns)

    return make_move


def fragment(people: People, move: TenantMigration, name: str = "split") -> str:
    answer = people.viewer.get(reverse(name, args=[move.pk]), headers=HTMX)
    assert answer.status_code == 200
    return text_of(answer.content.decode())


def dialog(people: People, verb: str, move: TenantMigration) -> str:
    answer = people.operator.get(reverse(verb, args=[move.pk]), headers=HTMX)
    assert answer.status_code == 200
    return text_of(answer.content.decode())


def test_both_sides_are_named_with_what_they_serve(splitting: Split, people: People) -> None:
    text = fragment(people, splitting())
    assert "Both serve" in text
    assert "Born on store-eu1-b 37" in text
    assert "sessions that it has; no new ones" in text
    assert "new sessions, and those born there" in text
    assert "eu1-a-1" in text
    assert "eu1-b-1" in text


def test_each_instance_says_whether_it_has_heard(
    splitting: Split, here: make.Cast, people: People, at: datetime
) -> None:
    move = splitting()
    assert "Not yet" in fragment(people, move)
    one = here.cell.instances.order_by("name").first()
    scene.said(one, at=at, version=move.split_version)
    assert re.search(r"eu1-a-1 source, \S+ Its own only", fragment(people, move))


def test_an_instance_that_left_is_on_no_list_and_a_lost_one_is(
    splitting: Split, here: make.Cast, people: People, at: datetime
) -> None:
    move = splitting()
    left, lost = here.cell.instances.order_by("name")[:2]
    for one, why in ((left, "left"), (lost, "lapsed")):
        one.gone_at, one.gone_why = at, why
        one.save()
    text = fragment(people, move)
    assert left.name not in text
    assert re.search(rf"{lost.name} source, \S+ Lost", text)


def test_older_turns_that_still_run_are_counted(
    splitting: Split, here: make.Cast, people: People, at: datetime
) -> None:
    move = splitting(split_at=at)
    TenantMigration.objects.filter(pk=move.pk).update(split_placement_version=None)
    one = here.cell.instances.order_by("name").first()
    scene.said(one, at=at, version=move.split_version, in_flight={"acme": 5})
    one.in_flight_older = {"acme": 2}
    one.save()
    text = fragment(people, move)
    assert "Ending older turns" in text
    assert "2 turns from before still run" in text
    one.in_flight_older = {"acme": 1}
    one.save()
    assert "1 turn from before still runs" in fragment(people, move)
    assert "store-eu1-a lets earlier turns end" in text


def test_a_key_that_nothing_decides_is_listed_as_undecided(
    splitting: Split, people: People
) -> None:
    line: dict[str, object] = {"user_id": "u-1", "key": "lang", "taken": "target"}
    move = splitting(merged=[line, {**line, "key": "theme", "undecided": True}])
    text = fragment(people, move)
    assert "lang the target’s user u-1 theme the target’s undecided: look at both" in text


def test_the_log_calls_a_splits_start_a_split(here: make.Cast, at: datetime) -> None:
    ready = {"passes": 1, "pass_ended_at": at, "mode": Mode.SPLIT}
    move = scene.move(here, Phase.BACKFILL, now=at, **ready)
    said: dict[str, Any] = {"by": "olga", "reason": "all is quiet", "now": at}
    services.close_fence(move, **said)
    services.cancel_fence(move, **said)
    notes = [event.note for event in move.events.filter(who="olga").order_by("id")]
    assert notes == ["Start split: all is quiet", "Take back split: all is quiet"]


@pytest.mark.parametrize(
    ("quiet", "said"),
    [
        (None, "busy: it must be idle for 10m"),
        (240, "idle for 4m 00s of 10m"),
    ],
    ids=["busy", "idle so far"],
)
def test_the_wait_for_idle_sessions_stands_beside_its_bound(
    quiet: int | None, said: str, splitting: Split, people: People, at: datetime
) -> None:
    since = None if quiet is None else at - timedelta(seconds=quiet)
    text = fragment(people, splitting(quiet_since=since))
    assert said in text
    assert re.search(r"Waited for until \S+, in 3h (19|20)m", text)


def test_keys_that_both_sides_changed_are_listed_without_their_values(
    splitting: Split, people: People
) -> None:
    text = fragment(people, splitting())
    assert "user u-00371 tier the source’s" in text
    assert "the app banner the target’s" in text


def test_the_stepper_has_the_split_between_copying_and_the_fence(
    splitting: Split, people: People
) -> None:
    html = people.viewer.get(reverse("phases", args=[splitting().pk])).content.decode()
    names = re.findall(r'track-name">(\w+)', html)
    assert names[:4] == ["PREPARE", "BACKFILL", "SPLIT", "DRAIN"]
    assert 'aria-current="step"><span class="track-name">SPLIT' in html


def test_a_move_by_fence_shows_no_split(here: make.Cast, at: datetime, people: People) -> None:
    html = page(people.viewer, scene.move(here, Phase.VERIFY, now=at))
    assert 'id="move-split"' not in html
    assert "SPLIT" not in re.findall(r'track-name">(\w+)', html)


def test_the_facts_say_what_the_tenant_sees(splitting: Split, people: People) -> None:
    text = fragment(people, splitting(), "facts")
    assert "Known sessions on store-eu1-a, new ones on store-eu1-b" in text
    assert "Born on the target 37" in text


@pytest.mark.parametrize("phase", [Phase.DRAIN, Phase.VERIFY])
def test_in_its_fence_the_target_keeps_serving_its_own(
    phase: Phase, splitting: Split, people: People
) -> None:
    move = splitting(phase)
    assert "store-eu1-b serves its own; others: retry-after" in fragment(people, move, "facts")
    text = fragment(people, move)
    assert "store-eu1-a is fenced" in text
    assert "what was born there" in text


def test_on_the_way_back_the_source_keeps_serving_its_own(splitting: Split, people: People) -> None:
    move = splitting(Phase.REVERSE_DRAIN)
    assert "store-eu1-a serves its own; others: retry-after" in fragment(people, move, "facts")
    assert "store-eu1-b is fenced" in fragment(people, move)
    names = re.findall(
        r'track-name">(\w+)',
        people.viewer.get(reverse("phases", args=[move.pk])).content.decode(),
    )
    assert names[:2] == ["SPLIT", "REVERSE_DRAIN"]


# --- acts ---------------------------------------------------------------------------------------


def test_the_buttons_of_a_split_are_its_own(splitting: Split, people: People) -> None:
    html = page(people.operator, splitting())
    assert "Wait no longer…" in html
    assert "Abort…" in html
    assert "Roll back…" not in html
    assert "Both cells serve" in html


def test_waiting_is_ended_by_a_person_with_a_reason(
    splitting: Split, people: People, at: datetime
) -> None:
    move = splitting()
    assert "goes on serving what was born there" in dialog(people, "close_fence", move)
    answer = people.operator.post(
        reverse("close_fence", args=[move.pk]), {"reason": "late enough", "seen": "split"}
    )
    assert answer.status_code == 302
    move.refresh_from_db()
    assert move.idle_bound_seconds < 3_600
    assert "Wait no longer: late enough" in move.events.first().note
    html = page(people.operator, move)
    assert re.search(r'<button[^>]*-close_fence"[^>]* disabled', html)


def test_an_abort_says_what_it_carries_back_and_for_how_long(
    splitting: Split, people: People
) -> None:
    text = dialog(people, "abort", splitting())
    assert "37 sessions born on store-eu1-b since the split are carried back to store-eu1-a" in text
    # 37 sessions at 40 a second.
    assert re.search(r"Estimated fence [\d.m ]+s, at worst .* delta 0\.9s", text)
    assert "Abort, carry births back" in text


def test_an_abort_over_the_budget_says_that_it_waits(splitting: Split, people: People) -> None:
    text = dialog(people, "abort", splitting(budget_seconds=5.0, drain_bound_seconds=5.0))
    assert "over the budget of 5s" in text


def test_an_abort_is_asked_for_and_taken_back(splitting: Split, people: People) -> None:
    move = splitting()
    people.operator.post(reverse("abort", args=[move.pk]), {"reason": "too slow", "seen": "split"})
    html = page(people.operator, move)
    assert "Take back abort…" in html
    assert "olga asked for the abort" in html
    assert "-abort" not in "".join(re.findall(r'id="act-[^"]*"', html))
    answer = people.operator.post(
        reverse("cancel_rollback", args=[move.pk]), {"reason": "it is fine", "seen": "split"}
    )
    assert answer.status_code == 302
    move.refresh_from_db()
    assert move.rollback_requested_at is None


def test_an_abort_inside_the_fence_opens_it_first(splitting: Split, people: People) -> None:
    text = dialog(people, "abort", splitting(Phase.DELTA))
    assert "The fence on store-eu1-a opens first" in text
    assert "delta 0.9s" in text


def test_a_way_back_is_stopped_into_the_split(splitting: Split, people: People) -> None:
    text = dialog(people, "abort", splitting(Phase.REVERSE_DELTA))
    assert "The split goes on." in text
    assert "Stop, stay split" in text


def test_a_split_that_waits_for_its_beginning_says_so(
    here: make.Cast, at: datetime, people: People
) -> None:
    move = scene.move(
        here,
        Phase.BACKFILL,
        now=at,
        mode=Mode.SPLIT,
        stage="ready",
        pass_started_at=at - timedelta(seconds=9),
        pass_ended_at=at - timedelta(seconds=4),
    )
    html = page(people.operator, move)
    assert "Start split…" in html
    assert "Waits for somebody to start the split" in text_of(html)
    assert "serves all of acme" in fragment(people, move)
    text = dialog(people, "close_fence", move)
    assert "new sessions begin on store-eu1-b?" in text
    assert "Start split" in text


def test_a_fence_that_was_left_and_closed_again_is_the_sources_both_times(
    splitting: Split, people: People, at: datetime
) -> None:
    left = {
        "back": False,
        "fence_closed_at": (at - timedelta(hours=1)).isoformat(),
        "fence_opened_at": (at - timedelta(minutes=58)).isoformat(),
        "quote": {"expected": 30.0},
    }
    move = splitting(Phase.DRAIN, past_fences=[left])
    text = fragment(people, move, "fence")
    assert "Fence on store-eu1-a" in text
    assert "Closed on store-eu1-a" in text
    assert "store-eu1-b" not in text
    assert "Instances of cell-eu1-a" in fragment(people, move, "instances")
    assert "DRAIN" in fragment(people, move, "phases")


def test_why_a_fence_was_left_is_said_in_the_split(
    splitting: Split, people: People, at: datetime
) -> None:
    move = splitting(past_fences=[{"back": False, "quote": {}}])
    note = "Not drained after 60s: 2 turns in flight, waiting for eu1-a-1"
    move.events.create(at=at, who="mover", was=Phase.DRAIN, now=Phase.SPLIT, note=note)
    text = fragment(people, move, "progress")
    assert f"Fence left {note}. Both sides serve acme as before." in text
    html = people.viewer.get("/").content.decode()
    assert "left its fence by itself and serves on both sides" in html
