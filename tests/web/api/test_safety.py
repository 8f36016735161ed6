"""Rules of safety and the break-glass, under /api/v1/ops."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction

from durable.clock import database_now
from migrations_app import safety
from migrations_app.domain.phases import Phase
from tenants import services
from tenants.models import AuditEntry, PolicyEntry, Store
from tests import make

pytestmark = pytest.mark.django_db
BODY = {"typed": "acme", "reason": "3 a.m."}


def refuse(cast: make.Cast) -> None:
    with transaction.atomic():
        services.publish(cast.acme, cast.cell, accepts="none")


def fenced(cast: make.Cast) -> None:
    """A move whose fence was to open an hour ago."""
    refuse(cast)
    late = database_now() - timedelta(hours=1)
    times = {"fence_closed_at": late, "deadline_at": late}
    make.move(cast.acme, cast=cast, now=late, phase=Phase.DELTA, **times)


def test_nobody_breaks_a_rule(viewer: Any, cast: make.Cast) -> None:
    assert viewer.get("/ops/safety").json() == {"broken": [], "more": False}


def test_who_breaks_one_is_told_with_what_is_known_of_it(viewer: Any, cast: make.Cast) -> None:
    refuse(cast)
    [row] = viewer.get("/ops/safety").json()["broken"]
    assert (row["tenant"], row["rule"], row["move"], row["since"]) == (
        "acme",
        "nobody_serves",
        None,
        None,
    )
    make.move(cast.acme, cast=cast, now=database_now())
    # A move lives, and its fence is not closed: that explains nothing.
    assert viewer.get("/ops/safety").json()["broken"] == [row]


def test_a_fence_past_its_deadline_names_its_move(viewer: Any, cast: make.Cast) -> None:
    fenced(cast)
    [row] = viewer.get("/ops/safety").json()["broken"]
    assert (row["rule"], row["move"]) == ("fence_overdue", cast.acme.moves.get().pk)
    assert "nobody takes it" in row["state"]


def test_of_many_the_first_are_told(
    viewer: Any, cast: make.Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("migrations_app.safety.MOST", 1)
    refuse(cast)
    with transaction.atomic():
        services.publish(cast.bolt, cast.cell, accepts="none")
    body = viewer.get("/ops/safety").json()
    assert ([row["tenant"] for row in body["broken"]], body["more"]) == (["acme"], True)


def test_the_look_is_one_statement_however_many_there_are(
    cast: make.Cast, django_assert_num_queries: Any
) -> None:
    fenced(cast)
    with transaction.atomic():
        services.publish(cast.bolt, cast.cell, accepts="none")
    now = database_now()
    with django_assert_num_queries(1):
        assert len(safety.broken_now(now=now)) == 2


def test_only_an_admin_breaks_the_glass(operator: Any, cast: make.Cast) -> None:
    refuse(cast)
    assert operator.post("/ops/tenants/acme/open", BODY).status_code == 403


@pytest.mark.usefixtures("stores")
def test_an_admin_is_told_what_it_would_do_and_then_does_it(admin: Any, cast: make.Cast) -> None:
    refuse(cast)
    body = admin.post("/ops/tenants/acme/open", BODY).json()
    assert (body["dry_run"], body["after"]) == (True, None)
    assert body["told"] == [
        "Asks the guard rows of acme, opens store-eu1-a if it is closed, and publishes that"
        " cell-eu1-a takes all its turns."
    ]
    assert not PolicyEntry.objects.filter(tenant=cast.acme, accepts="all").exists()
    body = admin.post("/ops/tenants/acme/open", {**BODY, "dry_run": False}).json()
    assert (body["before"]["rule"], body["after"]["rule"]) == ("nobody_serves", None)
    assert PolicyEntry.objects.filter(tenant=cast.acme, accepts="all").exists()
    entry = AuditEntry.objects.get(verb="tenant.break_glass")
    assert entry.who.startswith("anna")


@pytest.mark.parametrize(
    ("path", "body", "status", "error"),
    [
        pytest.param("acme", {"typed": "bolt"}, 409, "not_typed", id="another name"),
        pytest.param("bolt", {"typed": "bolt"}, 409, "nothing_broken", id="served"),
        pytest.param("nobody", {}, 404, "not_found", id="unknown"),
        pytest.param("acme", {"dry_run": False}, 409, "store_silent", id="its store is away"),
        pytest.param("acme", {"dry_run": False, "reason": " "}, 422, "reason_missing", id="why"),
    ],
)
def test_it_is_refused(
    admin: Any, cast: make.Cast, path: str, body: dict[str, Any], status: int, error: str
) -> None:
    refuse(cast)
    answer = admin.post(f"/ops/tenants/{path}/open", {**BODY, **body})
    assert (answer.status_code, answer.json()["error"]) == (status, error)
    assert not PolicyEntry.objects.filter(tenant=cast.acme, accepts="all").exists()


def test_a_store_behind_google_adk_needs_the_command(admin: Any, cast: make.Cast) -> None:
    fenced(cast)
    Store.objects.filter(pk=cast.other_store.pk).update(kind="adk-service")
    answer = admin.post("/ops/tenants/acme/open", {**BODY, "dry_run": False})
    assert (answer.status_code, answer.json()["error"]) == (409, "needs_the_command")
    assert "manage.py open_tenant acme" in answer.json()["detail"]


def test_while_machines_are_stopped_it_names_the_other_command(admin: Any, cast: make.Cast) -> None:
    fenced(cast)
    services.halt(by="ada", why="restored.", now=database_now())
    answer = admin.post("/ops/tenants/acme/open", {**BODY, "dry_run": False})
    assert (answer.status_code, answer.json()["error"]) == (409, "machines_halted")
    assert "manage.py restored" in answer.json()["detail"]


def test_the_overview_shows_it(signed_in: Any, cast: make.Cast) -> None:
    refuse(cast)
    html = signed_in.client.get("/attention/").content.decode()
    assert "acme is refused, and nothing explains that" in html
    assert "<code>manage.py open_tenant acme</code>" in html
    assert 'href="/tenants/acme/"' in html
