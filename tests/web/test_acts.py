"""Acts on a move: a dialog that says what will happen, one service call, and what comes back."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

import pytest
from django.urls import reverse

from migrations_app.domain.phases import Phase
from migrations_app.models import Mismatch, TenantMigration
from tenants.domain.words import clock
from tenants.models import AuditEntry
from tests import scene
from tests.web.conftest import HTMX, People

Moving = Callable[..., TenantMigration]
# Each act, a phase that takes it, and what its form asks for.
DIALOGS = [
    ("abort", Phase.VERIFY, {}),
    ("pause", Phase.BACKFILL, {}),
    ("close_fence", Phase.BACKFILL, {}),
    ("cancel_fence", Phase.BACKFILL, {}),
    ("hold_fence", Phase.VERIFY, {"seconds": "90"}),
    ("confirm_offboard", Phase.SOAK, {"typed": "acme"}),
    ("leave_behind", Phase.REOPEN, {}),
    ("leave_behind", Phase.OFFBOARD, {}),
]
# What was typed says it all.
NEEDS_REASON = [row for row in DIALOGS if row[0] != "confirm_offboard"]
READY = {
    "close_fence": {"stage": "ready", "passes": 2},
    "leave_behind": {"failures": 2, "failure": "no answer", "stage": "clean"},
}


def made(moving: Moving, verb: str, phase: Phase, at: datetime) -> TenantMigration:
    extra = dict(READY.get(verb, {}))
    if verb == "close_fence":
        extra["pass_ended_at"] = at
    if verb == "cancel_fence":
        extra |= {"drain_requested_at": at, "drain_requested_by": "omar"}
    return moving(phase, **extra)


def address(verb: str, move: TenantMigration) -> str:
    return reverse(verb, args=[move.pk])


@pytest.mark.parametrize(("verb", "phase", "asked"), DIALOGS)
def test_a_dialog_says_what_happens_what_is_kept_and_what_is_not(
    verb: str, phase: Phase, asked: dict[str, str], moving: Moving, people: People, at: datetime
) -> None:
    move = made(moving, verb, phase, at)
    html = people.operator.get(address(verb, move), headers=HTMX).content.decode()
    assert "<html" not in html
    terms = ["Kept", "Thrown away", "Undo"]
    assert all(f"<dt>{term}</dt>" in html for term in terms)
    assert "<dt>Happens " in html
    assert 'name="reason"' in html
    assert "data-close" in html
    assert html.index("dialog-safe") < html.index("dialog-act")


@pytest.mark.parametrize(("verb", "phase", "asked"), DIALOGS)
def test_without_javascript_the_dialog_is_a_page(
    verb: str, phase: Phase, asked: dict[str, str], moving: Moving, people: People, at: datetime
) -> None:
    move = made(moving, verb, phase, at)
    answer = people.operator.get(address(verb, move))
    html = answer.content.decode()
    assert "<html" in html
    assert f'<form method="post" action="{address(verb, move)}"' in html
    assert "HX-Request" in answer["Vary"]


@pytest.mark.parametrize(("verb", "phase", "asked"), DIALOGS)
def test_a_form_without_javascript_acts_and_goes_back_to_the_move(
    verb: str, phase: Phase, asked: dict[str, str], moving: Moving, people: People, at: datetime
) -> None:
    move = made(moving, verb, phase, at)
    form = {"reason": "wrong target", "seen": phase.value, **asked}
    answer = people.operator.post(address(verb, move), form)
    assert answer.status_code == 302
    assert answer["Location"] == reverse("move", args=[move.pk])
    entry = AuditEntry.objects.get(verb=f"move.{verb}")
    assert (entry.who, entry.reason, entry.subject) == ("olga", "wrong target", str(move))
    move.refresh_from_db()
    assert move.version == 11
    assert move.phase == phase


@pytest.mark.parametrize(("verb", "phase", "asked"), DIALOGS)
def test_a_form_by_htmx_acts_closes_the_dialog_and_wakes_the_panels(
    verb: str, phase: Phase, asked: dict[str, str], moving: Moving, people: People, at: datetime
) -> None:
    move = made(moving, verb, phase, at)
    form = {"reason": "wrong target", "seen": phase.value, **asked}
    answer = people.operator.post(address(verb, move), form, headers=HTMX)
    assert answer.status_code == 200
    assert answer["HX-Trigger"] == "moved"
    html = answer.content.decode()
    assert "<form" not in html
    assert 'hx-swap-oob="innerHTML:#announce"' in html
    assert AuditEntry.objects.filter(verb=f"move.{verb}").count() == 1


@pytest.mark.parametrize(("verb", "phase", "asked"), NEEDS_REASON)
@pytest.mark.parametrize("headers", [HTMX, {}], ids=["htmx", "plain"])
def test_an_act_without_a_reason_is_refused_in_its_own_form(
    verb: str,
    phase: Phase,
    asked: dict[str, str],
    headers: dict[str, str],
    moving: Moving,
    people: People,
    at: datetime,
) -> None:
    move = made(moving, verb, phase, at)
    before = TenantMigration.objects.values().get(pk=move.pk)
    form = {"reason": "  ", "seen": phase.value, **asked}
    answer = people.operator.post(address(verb, move), form, headers=headers)
    assert answer.status_code == 409
    html = answer.content.decode()
    assert ("<html" in html) == (headers == {})
    assert "Say why, in a sentence" in html
    assert "Nothing was changed." in html
    assert TenantMigration.objects.values().get(pk=move.pk) == before
    assert not AuditEntry.objects.filter(verb=f"move.{verb}").exists()


def test_a_page_that_shows_an_older_phase_is_refused_and_shown_anew(
    moving: Moving, people: People
) -> None:
    move = moving(Phase.VERIFY)
    form = {"reason": "wrong target", "seen": "backfill"}
    answer = people.operator.post(address("abort", move), form, headers=HTMX)
    assert answer.status_code == 409
    html = answer.content.decode()
    assert "The page showed BACKFILL" in html
    assert 'name="seen" value="verify"' in html
    # What was typed is not lost.
    assert 'value="wrong target"' in html
    move.refresh_from_db()
    assert move.abort_requested_at is None


def test_a_double_click_is_one_request(moving: Moving, people: People) -> None:
    move = moving(Phase.VERIFY)
    form = {"reason": "wrong target", "seen": "verify"}
    first = people.operator.post(address("abort", move), form, headers=HTMX)
    second = people.operator.post(address("abort", move), form, headers=HTMX)
    assert (first.status_code, second.status_code) == (200, 409)
    assert "being aborted by olga already" in second.content.decode()
    assert AuditEntry.objects.filter(verb="move.abort").count() == 1


def test_what_an_abort_would_throw_away_is_counted_from_the_rows(
    moving: Moving, people: People
) -> None:
    move = moving(Phase.BACKFILL)
    html = people.operator.get(address("abort", move), headers=HTMX).content.decode()
    assert "Nothing: nothing was copied yet." in html
    scene.stamps(move, 1_234)
    html = people.operator.get(address("abort", move), headers=HTMX).content.decode()
    assert "The copy on store-eu1-b: 1,234 sessions, removed now." in html


def test_a_pause_inside_the_fence_says_when_it_reopens(
    moving: Moving, people: People, at: datetime
) -> None:
    move = moving(Phase.VERIFY)
    html = people.operator.get(address("pause", move), headers=HTMX).content.decode()
    assert f"At {clock(move.deadline_at, at)} the fence reaches its budget of 2m 30s" in html
    assert "Pause, keep fence closed" in html


def test_the_drain_dialog_shows_the_quote_and_who_will_refuse(
    moving: Moving, people: People, at: datetime
) -> None:
    move = made(moving, "close_fence", Phase.BACKFILL, at)
    html = people.operator.get(address("close_fence", move), headers=HTMX).content.decode()
    assert "on all 2 instances of cell-eu1-a" in html
    assert "at worst" in html
    assert "drain " in html


@pytest.mark.parametrize("seconds", ["0", "601", "", "many", "nan"])
def test_a_hold_that_makes_no_sense_is_refused(
    seconds: str, moving: Moving, people: People
) -> None:
    move = moving(Phase.VERIFY)
    form = {"reason": "one more minute", "seconds": seconds}
    answer = people.operator.post(address("hold_fence", move), form, headers=HTMX)
    assert answer.status_code == 409
    assert "1 to 600 seconds" in answer.content.decode()


def test_deleting_needs_the_tenants_name_typed(moving: Moving, people: People) -> None:
    move = moving(Phase.SOAK)
    form = {"reason": "soaked", "typed": "bolt"}
    answer = people.operator.post(address("confirm_offboard", move), form, headers=HTMX)
    assert answer.status_code == 409
    move.refresh_from_db()
    assert move.offboard_confirmed_at is None


def test_resume_acts_at_once_and_draws_the_head_anew(
    moving: Moving, people: People, at: datetime
) -> None:
    move = moving(Phase.BACKFILL, pause_requested_at=at, pause_requested_by="olga")
    answer = people.operator.post(address("resume", move), {"seen": "backfill"}, headers=HTMX)
    assert answer.status_code == 200
    html = answer.content.decode()
    assert 'id="move-head"' in html
    assert "Pause…" in html
    move.refresh_from_db()
    assert move.pause_requested_at is None


def test_a_refused_resume_stands_in_the_head(moving: Moving, people: People) -> None:
    move = moving(Phase.BACKFILL)
    answer = people.operator.post(address("resume", move), {}, headers=HTMX)
    assert answer.status_code == 409
    assert "is not paused. Nothing was changed." in answer.content.decode()


def test_without_javascript_a_refused_resume_is_the_page_with_its_notice(
    moving: Moving, people: People
) -> None:
    answer = people.operator.post(address("resume", moving(Phase.BACKFILL)), {})
    assert answer.status_code == 409
    html = answer.content.decode()
    assert "<html" in html
    assert "is not paused. Nothing was changed." in html


def test_one_mismatch_is_asked_to_be_repaired(moving: Moving, people: People, at: datetime) -> None:
    move = moving(Phase.VERIFY)
    first, *others = scene.mismatches(move, now=at)
    answer = people.operator.post(address("recopy", move), {"mismatch": first.pk}, headers=HTMX)
    assert answer.status_code == 200
    html = answer.content.decode()
    assert "Asked for" in html
    assert "Re-copy all 2" in html
    asked = Mismatch.objects.filter(repair_requested_by="olga")
    assert [row.pk for row in asked] == [first.pk]
    assert others


def test_all_mismatches_are_asked_to_be_repaired_by_one_click(
    moving: Moving, people: People, at: datetime
) -> None:
    move = moving(Phase.VERIFY)
    scene.mismatches(move, now=at)
    answer = people.operator.post(address("recopy", move), {"all": "1", "seen": "verify"})
    assert answer.status_code == 302
    assert Mismatch.objects.exclude(repair_requested_at=None).count() == 3


def test_nothing_is_copied_again_after_the_target_was_published(
    moving: Moving, people: People, at: datetime
) -> None:
    move = moving(Phase.SOAK)
    rows = scene.mismatches(move, now=at)
    html = people.operator.get(reverse("move", args=[move.pk])).content.decode()
    assert address("recopy", move) not in html
    answer = people.operator.post(address("recopy", move), {"mismatch": rows[0].pk}, headers=HTMX)
    assert answer.status_code == 409
    assert "only BACKFILL, SPLIT and the comparisons inside a fence" in answer.content.decode()


def test_words_in_the_mismatch_field_are_no_mismatch(moving: Moving, people: People) -> None:
    move = moving(Phase.VERIFY)
    answer = people.operator.post(address("recopy", move), {"mismatch": "x; --"}, headers=HTMX)
    assert answer.status_code == 409


@pytest.mark.parametrize("number", ["9" * 19, "9" * 5_000])
def test_a_number_that_no_database_holds_is_no_mismatch(
    number: str, moving: Moving, people: People
) -> None:
    move = moving(Phase.VERIFY)
    answer = people.operator.post(address("recopy", move), {"mismatch": number}, headers=HTMX)
    assert answer.status_code == 409
