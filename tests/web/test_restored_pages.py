"""The alarm on every page, the page where it is settled, and an instance that two say is dead."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.test import Client

from durable.clock import database_now
from migrations_app.domain.phases import Phase
from migrations_app.models import RestoreFinding
from tenants import queries, services
from tenants.domain.roles import Role
from tenants.models import RuntimeInstance, Tenant
from tests import make, scene

pytestmark = pytest.mark.django_db
WHY = "Instance agents-1 of cell-eu1-a has applied policy ab12.57. Run `manage.py restored`."


def signed_in(role: Role, name: str = "") -> Client:
    client = Client()
    client.force_login(scene.person(name or f"a-{role}", role))
    return client


@pytest.fixture
def halted(cast: make.Cast) -> make.Cast:
    services.halt(by="instance agents-1", why=WHY, now=database_now())
    return cast


@pytest.fixture
def finding(halted: make.Cast) -> RestoreFinding:
    return RestoreFinding.objects.create(
        tenant=halted.acme,
        found_at=database_now(),
        says="cell-eu1-a, store-eu1-a",
        told="store-eu1-a: closed (mv-7); store-eu1-b: open (mv-7)",
        differs="store-eu1-a is closed to agents by mv-7, which is unknown here",
        homes=["store-eu1-b"],
    )


@pytest.mark.parametrize("path", ["/", "/moves/", "/tenants/", "/restored/"])
def test_every_page_says_that_machines_are_stopped_and_where_it_is_settled(
    halted: make.Cast, path: str
) -> None:
    page = signed_in(Role.VIEWER).get(path).content.decode()
    assert "Machines stopped" in page
    assert "agents-1 of cell-eu1-a has applied policy ab12.57" in page
    assert 'href="/restored/"' in page


def test_the_strip_tells_of_a_halt_at_its_next_poll(cast: make.Cast) -> None:
    client = signed_in(Role.VIEWER)
    before = client.get("/signals/", headers={"HX-Request": "true"})
    services.halt(by="ada", why=WHY, now=database_now())
    strip = before.context["strip"].version
    after = client.get(f"/signals/?v={strip}", headers={"HX-Request": "true"})
    assert "HX-Reswap" not in after.headers
    assert "Machines stopped" in after.content.decode()


def test_the_worst_thing_on_the_overview_is_the_halt(halted: make.Cast) -> None:
    blocked = scene.move(halted, Phase.VERIFY, now=database_now())
    scene.mismatches(blocked, now=database_now())
    response = signed_in(Role.VIEWER).get("/attention/")
    first = response.context["items"][0]
    assert (first.kind, first.text) == ("halt", WHY)


def test_a_finding_is_shown_to_everybody_and_settled_by_admins(finding: RestoreFinding) -> None:
    for role, forms in ((Role.VIEWER, False), (Role.OPERATOR, False), (Role.ADMIN, True)):
        page = signed_in(role).get("/restored/").content.decode()
        assert finding.differs in page
        assert ("/restored/acme/settle/" in page) is forms
    for path in ("acme/settle/", "acme/leave/", "start/"):
        answer = signed_in(Role.OPERATOR, f"o-{path}").post(f"/restored/{path}", {"reason": "r"})
        assert answer.status_code == 403


def test_thousands_of_refused_tenants_come_in_pages(
    finding: RestoreFinding, monkeypatch: pytest.MonkeyPatch
) -> None:
    RestoreFinding.objects.create(
        tenant=Tenant.objects.get(slug="bolt"),
        found_at=finding.found_at,
        says="a",
        told="b",
        differs="c",
        homes=[],
    )
    monkeypatch.setattr("migrations_app.views.FINDINGS_SHOWN", 1)
    viewer = signed_in(Role.VIEWER)
    first, second = (viewer.get(f"/restored/?page={page}").content.decode() for page in (1, 2))
    assert "finding-acme" in first
    assert 'rel="next" href="/restored/?page=2"' in first
    assert ("finding-acme" in second, "finding-bolt" in second) == (False, True)


def test_a_refusal_is_shown_where_it_was_asked(finding: RestoreFinding) -> None:
    admin = signed_in(Role.ADMIN)
    answer = admin.post("/restored/start/", {"reason": "done"})
    assert answer.status_code == 409
    assert "acme" in answer.context["refused"]
    assert admin.post("/restored/acme/leave/", {"reason": " "}).status_code == 409
    assert admin.post("/restored/bolt/leave/", {"reason": "r"}).status_code == 404


def test_a_tenant_is_left_refused_and_machines_start_on_the_page(finding: RestoreFinding) -> None:
    admin = signed_in(Role.ADMIN)
    answer = admin.post("/restored/acme/leave/", {"reason": "its store burnt"})
    assert (answer.status_code, answer["Location"]) == (302, "/restored/")
    now = database_now() - timedelta(hours=2)
    services.replace_epoch(by="ada", reason="restored", now=now)
    services.note_comparison(now=now)
    assert "Start machines again" in admin.get("/restored/").content.decode()
    admin.post("/restored/start/", {"reason": "all settled"})
    assert queries.halt() is None
    assert "The machines run" in admin.get("/restored/").content.decode()


# --- an instance that two people say is dead ----------------------------------------------------


@pytest.fixture
def silent(cast: make.Cast) -> RuntimeInstance:
    return services.join(
        cast.cell,
        name="agents-1",
        build="1",
        boot="b",
        longest_turn_seconds=60.0,
        longest_tool_seconds=30.0,
        plugins=[],
        stores=[],
        replaces=None,
        now=database_now() - timedelta(minutes=5),
    )


def test_one_person_asks_another_confirms(silent: RuntimeInstance) -> None:
    path = f"/instances/{silent.pk}/dead/"
    ada, bob = signed_in(Role.OPERATOR, "ada"), signed_in(Role.OPERATOR, "bob")
    assert ada.post(path, {"act": "ask", "reason": "its host burnt"}).status_code == 302
    item = next(i for i in bob.get("/attention/").context["items"] if i.kind == "instance")
    assert "ada says that instance agents-1 of cell-eu1-a is dead" in item.title
    assert "dead-withdraw" in ada.get(path).content.decode()
    himself = ada.post(path, {"act": "confirm"})
    assert himself.status_code == 409
    assert "second person" in himself.context["refused"]
    assert "dead-confirm" in bob.get(path).content.decode()
    assert bob.post(path, {"act": "confirm"}).status_code == 302
    silent.refresh_from_db()
    assert silent.gone_why == "dead"
    assert "It is gone" in bob.get(path).content.decode()


def test_an_ask_is_taken_back_on_its_page(silent: RuntimeInstance) -> None:
    path = f"/instances/{silent.pk}/dead/"
    ada = signed_in(Role.OPERATOR, "ada")
    ada.post(path, {"act": "ask", "reason": "its host burnt"})
    ada.post(path, {"act": "withdraw"})
    silent.refresh_from_db()
    assert silent.dead_asked_at is None


def test_a_viewer_declares_nobody_dead(silent: RuntimeInstance) -> None:
    viewer: Any = signed_in(Role.VIEWER)
    assert viewer.get(f"/instances/{silent.pk}/dead/").status_code == 403
