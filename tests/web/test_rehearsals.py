"""Rehearsals on pages: what they measured, and who may start which."""

from __future__ import annotations

from datetime import datetime

import pytest

from migrations_app.models import Rehearsal, TenantMigration
from tenants.models import Tenant
from tests import make
from tests.stores import Raw
from tests.web.conftest import HTMX, People, polled
from tests.web.test_pages import text_of

URL = "/tenants/acme/rehearse/"
COPY = {"target_store": "store-eu1-b", "reason": "how long would it take"}


def empty(side: Raw) -> None:
    for table in ("events", "sessions", "user_states", "app_states"):
        side.run(f"delete from {table}")


@pytest.fixture
def measured(here: make.Cast, at: datetime) -> Rehearsal:
    return Rehearsal.objects.create(
        tenant=here.acme,
        source_store=here.store,
        target_store=here.other_store,
        at=at,
        by="olga",
        sessions=500,
        events=10_000,
        equal=True,
        detail="chosen from the first 9,000 of 12,600 sessions",
        copy_rate=950.0,
        verify_rate=2_000.0,
    )


def test_a_tenant_shows_what_its_rehearsals_measured(measured: Rehearsal, people: People) -> None:
    text = text_of(people.viewer.get("/tenants/acme/").content.decode())
    assert "store-eu1-b Equal 500 sessions 950 /s 2,000 /s –" in text
    assert "chosen from the first 9,000" in text


def test_a_new_move_offers_the_figures(measured: Rehearsal, people: People) -> None:
    text = text_of(people.operator.get("/moves/new/?tenant=acme").content.decode())
    assert "store-eu1-b 950 /s Equal" in text


def test_a_tenant_without_any_says_what_quotes_are(here: make.Cast, people: People) -> None:
    text = text_of(people.viewer.get("/tenants/acme/").content.decode())
    assert "Nothing was rehearsed with acme" in text


def test_the_panel_is_drawn_anew_with_the_next_rehearsal(
    here: make.Cast, people: People, at: datetime
) -> None:
    html = people.viewer.get("/tenants/acme/").content.decode()
    url = polled(html, "/tenants/acme/rehearsals/")
    assert people.viewer.get(url, headers=HTMX).status_code == 204
    Rehearsal.objects.create(
        tenant=here.acme,
        source_store=here.store,
        target_store=here.other_store,
        at=at,
        by="olga",
        sessions=4,
        equal=False,
    )
    assert "Differs" in people.viewer.get(url, headers=HTMX).content.decode()


def test_a_sample_is_copied_timed_and_shown(
    here: make.Cast, people: People, sides: tuple[Raw, Raw]
) -> None:
    empty(sides[1])
    assert "scratch name" in people.operator.get(URL).content.decode()
    answer = people.operator.post(URL, COPY)
    assert answer.status_code == 302, answer.content.decode()
    assert answer["Location"] == "/tenants/acme/"
    row = Rehearsal.objects.get()
    assert (row.sessions, row.equal, row.by) == (4, True, "olga")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"target_store": ""}, "Choose a store"),
        ({"target_store": "store-eu1-a"}, "lives on store-eu1-a already"),
        ({"reason": ""}, "reason"),
        ({"whole": "1", "target_cell": "cell-eu1-b"}, "may have customers"),
    ],
    ids=["no store", "its own store", "no reason", "a whole move of a customer"],
)
def test_what_can_not_be_rehearsed_is_refused_in_words(
    given: dict[str, str], said: str, here: make.Cast, people: People
) -> None:
    answer = people.operator.post(URL, COPY | given)
    assert answer.status_code == 409
    assert said in answer.content.decode()
    assert not Rehearsal.objects.exists()


@pytest.mark.parametrize("mode", ["fence", "split"])
def test_a_whole_move_is_rehearsed_on_an_internal_tenant(
    mode: str, here: make.Cast, people: People, sides: tuple[Raw, Raw]
) -> None:
    empty(sides[1])
    assert "Rehearse a whole move" not in people.operator.get("/tenants/acme/").content.decode()
    Tenant.objects.filter(slug="acme").update(internal=True)
    assert "Rehearse a whole move" in people.operator.get("/tenants/acme/").content.decode()
    given = COPY | {"whole": "1", "target_cell": "cell-eu1-b", "mode": mode}
    answer = people.operator.post(URL, given)
    assert answer.status_code == 302, answer.content.decode()
    move = TenantMigration.objects.get()
    assert answer["Location"] == f"/moves/mv-{move.pk}/"
    assert (move.rehearsal, move.mode) == (True, mode)


def test_a_viewer_is_offered_no_rehearsal(here: make.Cast, people: People) -> None:
    assert "Rehearse" not in people.viewer.get("/tenants/acme/").content.decode().replace(
        "Rehearsals", ""
    )
