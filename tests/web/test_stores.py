"""Stores on pages: references, never what they lead to; what a kind means; who may change it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from migrations_app.domain.phases import Phase
from migrations_app.models import TenantMigration
from tenants.models import AuditEntry, Store
from tests import make
from tests.web.conftest import People
from tests.web.test_pages import text_of

GIVEN = {
    "artifacts_from": "env:ACME_ARTIFACTS",
    "memory_from": "file:/run/secrets/memory",
    "reason": "agents keep files there",
}
URL = "/stores/store-eu1-a/"


def test_a_list_names_each_store_with_what_stands_beside_it(
    here: make.Cast, people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORE_EU1_A", "postgresql://somebody:a-password@host/db")
    Store.objects.filter(key="store-eu1-a").update(artifacts_from="env:ACME_ARTIFACTS")
    for url in ("/stores/", URL):
        html = people.viewer.get(url).content.decode()
        assert "env:STORE_EU1_A" in html
        assert "env:ACME_ARTIFACTS" in html
        assert "a-password" not in html


def test_a_store_behind_a_service_says_that_it_can_not_be_closed(
    here: make.Cast, people: People
) -> None:
    Store.objects.filter(key="store-eu1-b").update(kind="adk-service")
    text = text_of(people.viewer.get("/stores/store-eu1-b/").content.decode())
    assert "by replay through its interface" in text
    assert "proof is protocol and lease alone" in text
    assert "by replay; can’t be closed" in people.viewer.get("/stores/").content.decode()
    html = people.operator.get("/moves/new/?tenant=acme").content.decode()
    assert "store-eu1-b (adk-service, by replay, eu1)" in html


def test_an_admin_says_where_the_services_are(here: make.Cast, people: People) -> None:
    answer = people.admin.post(f"{URL}services/", GIVEN)
    assert answer["Location"] == URL
    store = Store.objects.get(key="store-eu1-a")
    assert store.artifacts_from == GIVEN["artifacts_from"]
    assert store.memory_from == GIVEN["memory_from"]
    assert AuditEntry.objects.filter(reason=GIVEN["reason"], who="adam").count() == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"artifacts_from": "gs://acme:hunter2@bucket"}, "must be a reference"),
        ({"reason": ""}, "reason"),
    ],
    ids=["an address", "no reason"],
)
def test_what_is_no_reference_is_refused_and_nothing_changes(
    given: dict[str, str], said: str, here: make.Cast, people: People
) -> None:
    answer = people.admin.post(f"{URL}services/", GIVEN | given)
    assert answer.status_code == 409
    html = answer.content.decode()
    assert said in html
    # What is a reference stays typed; an address may hold a password.
    assert GIVEN["memory_from"] in html
    assert "hunter2" not in html
    assert Store.objects.get(key="store-eu1-a").artifacts_from == ""


def test_what_a_live_move_goes_by_can_not_be_changed(
    moving: Callable[..., TenantMigration], people: People
) -> None:
    move = moving(Phase.BACKFILL)
    assert f"{move} acme" in people.admin.get(URL).content.decode()
    answer = people.admin.post(f"{URL}services/", GIVEN)
    assert answer.status_code == 409
    assert "goes by what store-eu1-a names now" in answer.content.decode()


def test_only_an_admin_is_offered_the_form(here: make.Cast, people: People) -> None:
    assert "Save services" in people.admin.get(URL).content.decode()
    assert "Save services" not in people.operator.get(URL).content.decode()
    assert people.operator.post(f"{URL}services/", GIVEN).status_code == 403


def test_an_unknown_store_is_not_found(here: make.Cast, people: People) -> None:
    assert people.viewer.get("/stores/nowhere/").status_code == 404
