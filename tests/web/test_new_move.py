"""Starting a move: a tenant, where it goes, a look at both stores, then the move or the reasons."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timedelta

import pytest
from django.urls import reverse

from durable.clock import database_now
from migrations_app.domain.phases import Phase
from migrations_app.models import SideChannel, TenantMigration
from tenants.models import AuditEntry, Counter
from tests import make, scene
from tests.stores import Raw
from tests.web.conftest import HTMX, People

NEW = "/moves/new/"
FORM = {
    "tenant": "acme",
    "target_cell": "cell-eu1-b",
    "target_store": "store-eu1-b",
    "mode": "fence",
    "idle_minutes": "10",
    "idle_bound_hours": "4",
    "start_fence": "operator",
    "fence_not_before": "",
    "budget_seconds": "150",
    "drain_bound_seconds": "60",
    "soak_hours": "72",
    "pace_per_second": "",
    "finish_by": "",
    "rows_per_second": "",
    "offboard": "confirm",
    "reason": "a store of its own",
    "act": "start",
}


@pytest.fixture
def stores(new_database: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> tuple[Raw, Raw]:
    """Two real stores at the addresses of the cast's; the source holds ten sessions of acme."""
    source, target = Raw(new_database()), Raw(new_database())
    monkeypatch.setenv("STORE_EU1_A", source.url)
    monkeypatch.setenv("STORE_EU1_B", target.url)
    source.make_tables("env:STORE_EU1_A", "support.acme")
    source.seed("support.acme", sessions=10, users=3)
    return source, target


def test_a_tenant_is_chosen_first(here: make.Cast, people: People) -> None:
    html = people.operator.get(NEW).content.decode()
    assert 'name="tenant"' in html
    assert 'name="target_store"' not in html


def test_slugs_are_suggested_while_a_name_is_typed(here: make.Cast, people: People) -> None:
    html = people.operator.get("/options/tenants/", {"tenant": "BOL"}).content.decode()
    assert html.strip() == '<option value="bolt"></option>'


def test_an_unknown_tenant_is_named(here: make.Cast, people: People) -> None:
    html = people.operator.get(NEW, {"tenant": "acne"}).content.decode()
    assert "There is no tenant “acne”." in html


def test_the_form_proposes_what_makes_sense(here: make.Cast, people: People) -> None:
    html = people.operator.get(NEW, {"tenant": "acme"}).content.decode()
    # Its own store comes last: there only its cell changes.
    others, _, own = html.partition('<option value="store-eu1-a"')
    assert '<option value="store-eu1-b"' in others
    assert "where it is now: only the cell changes" in own
    assert 'value="cell-eu1-a" selected' in html
    for name, value in (
        ("budget_seconds", "150"),
        ("drain_bound_seconds", "60"),
        ("soak_hours", "72"),
    ):
        assert f'name="{name}"' in html
        assert f'value="{value}"' in html
    assert "45s is stated" in html


def test_a_link_may_propose_where_to(here: make.Cast, people: People) -> None:
    given = {"tenant": "acme", "target_cell": "cell-eu1-b", "target_store": "store-eu1-b"}
    html = people.operator.get(NEW, given).content.decode()
    assert 'value="cell-eu1-b" selected' in html
    assert 'value="store-eu1-b" selected' in html


def test_a_move_starts_with_what_was_chosen(
    here: make.Cast, people: People, stores: tuple[Raw, Raw]
) -> None:
    given = FORM | {
        "start_fence": "fits",
        "offboard": "automatic",
        "soak_hours": "1.5",
        "pace_per_second": "40",
        "fence_not_before": "2031-03-12T03:30",
    }
    answer = people.operator.post(NEW, given)
    move = TenantMigration.objects.get()
    assert answer.status_code == 302, answer.content.decode()
    assert answer["Location"] == reverse("move", args=[move.pk])
    assert (move.tenant, move.target_cell, move.target_store) == (
        here.acme,
        here.other_cell,
        here.other_store,
    )
    assert (move.phase, move.started_by, move.reason) == (
        Phase.PREPARE,
        "olga",
        "a store of its own",
    )
    assert (move.automatic, move.offboard_automatically) == (True, True)
    assert (move.soak_seconds, move.pace_per_second) == (5400, 40)
    assert move.fence_not_before is not None
    assert move.fence_not_before.isoformat() == "2031-03-12T03:30:00+00:00"
    assert AuditEntry.objects.get(verb="move.start").reason == "a store of its own"


def test_by_htmx_the_page_goes_to_the_move(
    here: make.Cast, people: People, stores: tuple[Raw, Raw]
) -> None:
    answer = people.operator.post(NEW, FORM, headers=HTMX)
    assert answer.status_code == 204
    assert answer["HX-Redirect"] == reverse("move", args=[TenantMigration.objects.get().pk])


@pytest.mark.parametrize("headers", [HTMX, {}], ids=["by htmx", "without a script"])
def test_a_dry_run_tells_every_phase_and_starts_nothing(
    headers: dict[str, str], here: make.Cast, people: People, stores: tuple[Raw, Raw]
) -> None:
    given = FORM | {"act": "dry_run", "reason": "", "start_fence": "fits"}
    answer = people.operator.post(NEW, given, headers=headers)
    html = answer.content.decode()
    assert answer.status_code == 200
    assert ("<html" in html) == (headers == {})
    assert "10 sessions of 3 users" in html
    assert "Nothing red" in html
    assert "Would start" in html
    for phase in ("PREPARE", "BACKFILL", "DRAIN", "DELTA", "VERIFY", "TARGET", "SOAK", "OFFBOARD"):
        assert f"<b>{phase}</b>" in html
    # What follows from the form stands before its button.
    foot, button = html.index("the copy is through at"), html.index('id="start"')
    assert foot < button
    assert not TenantMigration.objects.exists()


def test_nothing_is_started_by_a_form_that_does_not_say_so(
    here: make.Cast, people: People, stores: tuple[Raw, Raw]
) -> None:
    given = {name: value for name, value in FORM.items() if name != "act"}
    assert people.operator.post(NEW, given).status_code == 200
    assert not TenantMigration.objects.exists()


def test_the_first_button_is_the_dry_run_until_one_was_told(
    here: make.Cast, people: People, stores: tuple[Raw, Raw]
) -> None:
    """Enter in a field presses the first; the one that stands out is the next step."""

    def button(html: str, name: str) -> str:
        found = re.search(rf'<button[^>]*id="{name}"[^>]*>', html)
        assert found
        return found.group()

    before = people.operator.get(NEW, {"tenant": "acme"}).content.decode()
    assert before.index('id="tell"') < before.index('id="start"')
    assert "primary" in button(before, "tell")
    assert "primary" not in button(before, "start")
    after = people.operator.post(NEW, FORM | {"act": "dry_run"}).content.decode()
    assert "primary" in button(after, "start")
    assert "primary" not in button(after, "tell")


def test_a_dry_run_names_every_reason_against_the_move(
    here: make.Cast, people: People, stores: tuple[Raw, Raw]
) -> None:
    _, target = stores
    target.make_tables("env:STORE_EU1_B", "support.acme")
    target.seed("support.acme", sessions=2, users=1)
    html = people.operator.post(NEW, FORM | {"act": "dry_run"}).content.decode()
    assert "Would not start" in html
    assert "it holds support.acme already (2 sessions)" in html


@pytest.mark.parametrize(
    ("field", "value"),
    [("pace_per_second", "4"), ("finish_by", "2031-03-12T03:30"), ("rows_per_second", "20")],
)
def test_what_was_chosen_is_in_sight_and_the_rest_is_folded(
    field: str, value: str, here: make.Cast, people: People, stores: tuple[Raw, Raw]
) -> None:
    plain = people.operator.get(NEW, {"tenant": "acme"}).content.decode()
    assert plain.count("<details>") == 4
    given = FORM | {"act": "dry_run", field: value}
    html = people.operator.post(NEW, given).content.decode()
    assert html.count("<details open>") == 1
    assert f'value="{value}"' in html


def test_a_write_budget_becomes_the_pace_that_it_allows(
    here: make.Cast, people: People, stores: tuple[Raw, Raw]
) -> None:
    """A session of three events is four rows."""
    people.operator.post(NEW, FORM | {"rows_per_second": "20"})
    move = TenantMigration.objects.get()
    assert (move.pace_per_second, move.finish_by) == (5.0, None)


def test_a_finish_time_and_a_flip_by_hand_are_kept(
    here: make.Cast, people: People, stores: tuple[Raw, Raw]
) -> None:
    soon = database_now() + timedelta(hours=3)
    given = FORM | {"finish_by": f"{soon:%Y-%m-%dT%H:%M}", "flip_by_hand": "on"}
    people.operator.post(NEW, given)
    move = TenantMigration.objects.get()
    assert move.finish_by is not None
    assert abs((move.finish_by - soon).total_seconds()) < 60
    assert (move.pace_per_second, move.flip_by_hand) == (None, True)


@pytest.mark.parametrize("act", ["dry_run", "start"])
@pytest.mark.parametrize(
    "two",
    [
        {"pace_per_second": "4", "rows_per_second": "20"},
        {"pace_per_second": "4", "finish_by": "2031-03-12T03:30"},
    ],
    ids=["rows", "time"],
)
def test_two_ways_to_say_how_fast_are_refused(
    act: str, two: dict[str, str], here: make.Cast, people: People, stores: tuple[Raw, Raw]
) -> None:
    answer = people.operator.post(NEW, FORM | two | {"act": act})
    assert answer.status_code == 409
    assert "choose one" in answer.content.decode()
    assert not TenantMigration.objects.exists()


@pytest.mark.parametrize("headers", [HTMX, {}], ids=["htmx", "plain"])
def test_a_store_that_cannot_be_opened_is_refused_with_the_reason(
    headers: dict[str, str],
    here: make.Cast,
    people: People,
    stores: tuple[Raw, Raw],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("STORE_EU1_B")
    answer = people.operator.post(NEW, FORM, headers=headers)
    html = answer.content.decode()
    assert answer.status_code == 409
    assert ("<html" in html) == (headers == {})
    assert "Not started" in html
    assert "store-eu1-b" in html
    # What was typed is not lost.
    assert 'value="a store of its own"' in html
    assert not TenantMigration.objects.exists()


def test_a_refusal_never_shows_an_address(
    here: make.Cast,
    people: People,
    stores: tuple[Raw, Raw],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secret = "postgresql://mover:s3cr3t@127.0.0.1:1/none"
    monkeypatch.setenv("STORE_EU1_B", secret)
    html = people.operator.post(NEW, FORM, headers=HTMX).content.decode()
    assert "Not started" in html
    assert "s3cr3t" not in html


def test_a_target_that_holds_the_app_already_is_refused(
    here: make.Cast, people: People, stores: tuple[Raw, Raw]
) -> None:
    _, target = stores
    target.make_tables("env:STORE_EU1_B", "support.acme")
    target.seed("support.acme", sessions=2, users=1)
    answer = people.operator.post(NEW, FORM, headers=HTMX)
    assert answer.status_code == 409
    assert "it holds support.acme already (2 sessions)" in answer.content.decode()


def test_a_tenant_that_is_moving_is_sent_to_its_move(
    here: make.Cast, people: People, at: datetime
) -> None:
    move = scene.move(here, Phase.BACKFILL, now=at)
    html = people.operator.get(NEW, {"tenant": "acme"}).content.decode()
    assert reverse("move", args=[move.pk]) in html
    assert "Moving already" in html
    answer = people.operator.post(NEW, FORM, headers=HTMX)
    assert answer.status_code == 409
    assert "is moving already" in answer.content.decode()


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("reason", "", "Say why, in a sentence"),
        ("target_store", "", "Choose the store"),
        ("target_store", "store-eu1-a'; --", "Choose the store"),
        ("target_cell", "nowhere", "Choose a cell."),
        ("budget_seconds", "long", "Enter a number of seconds, for example 150."),
        ("budget_seconds", "inf", "Enter a number of seconds, for example 150."),
        ("budget_seconds", "9000", "choose 1 to 3,600 seconds"),
        ("drain_bound_seconds", "200", "up to the fence budget"),
        ("soak_hours", "-1", "choose 0 seconds to 90 days"),
        ("pace_per_second", "0", "choose 0.01 to 100,000"),
        ("rows_per_second", "0", "choose 1 to 10,000,000"),
        ("rows_per_second", "many", "Enter a number, for example 2000"),
        ("finish_by", "2020-01-01T03:30", "not in the next 90 days"),
        ("finish_by", "tonight", "Enter a date and a time"),
        ("fence_not_before", "tonight", "Enter a date and a time"),
        ("tenant", "nobody", "There is no tenant “nobody”."),
    ],
)
def test_what_makes_no_sense_is_said_and_starts_nothing(
    field: str, value: str, words: str, here: make.Cast, people: People
) -> None:
    answer = people.operator.post(NEW, FORM | {field: value}, headers=HTMX)
    assert answer.status_code == 409
    assert words in answer.content.decode()
    assert not TenantMigration.objects.exists()


def test_a_cell_whose_quota_is_only_assumed_says_so(
    here: make.Cast, people: People, at: datetime
) -> None:
    make.cell("cell-eu1-c", region=here.region, now=at, verified=False)
    html = people.operator.get(NEW, {"tenant": "acme"}).content.decode()
    assert "cell-eu1-c (eu1, quota only assumed)" in html


def test_times_are_read_as_utc(here: make.Cast, people: People, stores: tuple[Raw, Raw]) -> None:
    soon = database_now() + timedelta(hours=2)
    people.operator.post(NEW, FORM | {"fence_not_before": f"{soon:%Y-%m-%dT%H:%M}"})
    found = TenantMigration.objects.get().fence_not_before
    assert found is not None
    assert abs((found - soon).total_seconds()) < 60


# --- how: by a fence, or split --------------------------------------------------------------------


SPLIT = FORM | {"mode": "split", "idle_minutes": "3", "idle_bound_hours": "0.5"}


def test_both_ways_say_what_users_notice(here: make.Cast, people: People) -> None:
    html = people.operator.get(NEW, {"tenant": "acme"}).content.decode()
    assert "All of them get retry-after at once" in html
    assert "New conversations begin in the new place" in html
    assert re.search(r'name="mode" value="fence" checked', html)


def test_a_split_starts_with_its_times(
    here: make.Cast, people: People, stores: tuple[Raw, Raw]
) -> None:
    answer = people.operator.post(NEW, SPLIT | {"pause_before": "split"})
    assert answer.status_code == 302, answer.content.decode()
    move = TenantMigration.objects.get()
    assert (move.mode, move.idle_seconds, move.idle_bound_seconds) == ("split", 180, 1_800)
    assert move.pause_before == "split"


def test_a_dry_run_of_a_split_tells_who_serves_what_and_both_versions(
    here: make.Cast, people: People, stores: tuple[Raw, Raw]
) -> None:
    answer = people.operator.post(NEW, SPLIT | {"act": "dry_run"})
    html = re.sub(r"\s+", " ", answer.content.decode())
    version = Counter.objects.get().placement_version
    assert "<b>SPLIT</b>" in html
    assert f"placement version {version + 1} names both sides" in html
    assert f"Placement version {version + 2}: all of acme on cell-eu1-b" in html
    assert "until none of its sessions has changed for 3m, 30m at most" in html
    assert "is carried back to store-eu1-a inside a fence on cell-eu1-b" in html
    assert not TenantMigration.objects.exists()


def test_a_dry_run_names_what_goes_along_and_what_stays_behind(
    here: make.Cast, people: People, stores: tuple[Raw, Raw]
) -> None:
    told = FORM | {"act": "dry_run"}
    html = people.operator.post(NEW, told).content.decode()
    assert "No side channel is registered: what else is kept by tenant stays behind." in html
    person = {"copy_by": "person", "verify_by": "person"}
    SideChannel.objects.create(tenant=here.acme, name="vectors", **person)
    SideChannel.objects.create(agent=here.acme.agent, name="logs", required=False, **person)
    html = people.operator.post(NEW, told).content.decode()
    assert "vectors (required, by a person)" in html
    assert "logs (optional, by a person)" in html
    assert "The fence waits until every required one is copied." in html


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"target_cell": "cell-eu1-a"}, "a split is between two cells"),
        ({"idle_minutes": "60"}, "choose 0 seconds up to the bound"),
        ({"idle_bound_hours": "9999"}, "choose 0 seconds to 30 days"),
        ({"pause_before": "soak"}, "choose one of"),
    ],
    ids=["one cell", "longer than the bound", "for ever", "no such pause"],
)
@pytest.mark.parametrize("act", ["start", "dry_run"])
def test_a_split_that_makes_no_sense_is_refused_in_words(
    act: str,
    given: dict[str, str],
    said: str,
    here: make.Cast,
    people: People,
    stores: tuple[Raw, Raw],
) -> None:
    answer = people.operator.post(NEW, SPLIT | given | {"act": act})
    assert said in answer.content.decode()
    assert not TenantMigration.objects.exists()
