"""Who may see and do what, asked of every URL that the product has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime

import pytest
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver, reverse

from capacity.models import SharedResource
from migrations_app.domain.phases import Phase
from migrations_app.models import TenantMigration
from tenants import services
from tenants.domain.roles import Door, Role
from tenants.models import AuditEntry
from tests import scene
from tests.web.conftest import HTMX, People

GUARDED_ELSEWHERE = ("admin/", "api/v1/")


def _patterns(
    resolver: URLResolver | None = None, prefix: str = ""
) -> Iterator[tuple[str, URLPattern]]:
    for pattern in (resolver or get_resolver()).url_patterns:
        where = prefix + str(pattern.pattern)
        if isinstance(pattern, URLResolver):
            yield from _patterns(pattern, where)
        elif not where.startswith(GUARDED_ELSEWHERE):
            yield where, pattern


GUARDED = {
    pattern.name: pattern
    for _, pattern in _patterns()
    if getattr(pattern.callback, "login_required", True)
}
NEEDS_OPERATOR, NEEDS_ADMIN = (
    sorted(name for name, pattern in GUARDED.items() if pattern.callback.access == role)
    for role in (Role.OPERATOR, Role.ADMIN)
)
ACTS = NEEDS_OPERATOR + NEEDS_ADMIN
# A tenant's people have no role, and whoever has one is of no tenant.
OWN = sorted(n for n, pattern in GUARDED.items() if pattern.callback.access == Door.OWN_TENANT)


def _address(name: str, move: TenantMigration) -> str:
    """Return an address that exists, whatever the pattern asks for."""
    known = {"pk": move.pk, "slug": move.tenant.slug}
    if str(GUARDED[name].pattern).startswith("instances/"):
        known["pk"] = move.source_cell.instances.first().pk
    if name.endswith("_resource"):
        known["pk"] = SharedResource.objects.first().pk
    wanted = GUARDED[name].pattern.converters
    if "mismatch_pk" in wanted:
        known["mismatch_pk"] = move.mismatches.first().pk
    known |= {"key": move.source_store.key, "step": "copy"}
    if listed := move.channels.first():
        known |= {"row": listed.pk, "channel": listed.channel.pk}
    return reverse(name, kwargs={key: known[key] for key in wanted})


@pytest.fixture
def move(moving: Callable[..., TenantMigration], at: object) -> TenantMigration:
    made = moving(Phase.VERIFY)
    scene.mismatches(made, now=at)
    scene.channels(made)
    return made


def _ask(client: Client, address: str) -> int:
    answer = client.get(address)
    return client.post(address).status_code if answer.status_code == 405 else answer.status_code


@pytest.mark.parametrize("name", sorted(GUARDED))
def test_a_stranger_is_sent_to_the_sign_in(
    name: str, people: People, move: TenantMigration
) -> None:
    answer = people.stranger.get(_address(name, move))
    assert answer.status_code == 302
    assert answer["Location"].startswith(reverse("login"))


@pytest.mark.parametrize("name", sorted(GUARDED))
def test_somebody_without_a_role_sees_nothing(
    name: str, people: People, move: TenantMigration
) -> None:
    assert _ask(people.nobody, _address(name, move)) in (403, 405)
    assert people.nobody.post(_address(name, move)).status_code in (403, 405)


@pytest.mark.parametrize("name", sorted(set(GUARDED) - set(ACTS) - set(OWN)))
def test_a_viewer_sees_what_is_not_an_act(name: str, people: People, move: TenantMigration) -> None:
    assert people.viewer.get(_address(name, move)).status_code == 200


@pytest.mark.parametrize("name", sorted(set(GUARDED) - set(OWN)))
def test_a_tenant_s_person_sees_its_own_usage_alone(
    name: str, people: People, move: TenantMigration, at: datetime
) -> None:
    person = scene.person("mia", None)
    services.add_member(person, tenant=move.tenant, by="adam", now=at)
    browser = Client()
    browser.force_login(person)
    assert {browser.get(reverse(own)).status_code for own in OWN} == {200}
    for method in (browser.get, browser.post):
        assert method(_address(name, move)).status_code in (403, 405)


@pytest.mark.parametrize(
    ("name", "role"),
    [(name, "viewer") for name in ACTS] + [(name, "operator") for name in NEEDS_ADMIN],
)
def test_whoever_has_too_little_a_role_may_not_act(
    name: str, role: str, people: People, move: TenantMigration
) -> None:
    before = AuditEntry.objects.count()
    browser = getattr(people, role)
    for method in (browser.get, browser.post):
        answer = method(_address(name, move), {"reason": "curious"})
        assert answer.status_code in (403, 405)
    assert AuditEntry.objects.count() == before


@pytest.mark.parametrize("name", NEEDS_OPERATOR)
@pytest.mark.parametrize("role", ["operator", "admin"])
def test_an_operator_and_an_admin_may_act(
    name: str, role: str, people: People, move: TenantMigration
) -> None:
    # 409: allowed, and the stores of this scene can't be read.
    assert getattr(people, role).get(_address(name, move)).status_code in (200, 405, 409)


@pytest.mark.parametrize("name", NEEDS_OPERATOR)
def test_looking_at_an_act_changes_nothing(
    name: str, people: People, move: TenantMigration
) -> None:
    before = AuditEntry.objects.count(), TenantMigration.objects.values().get(pk=move.pk)
    people.operator.get(_address(name, move), headers=HTMX)
    assert before == (AuditEntry.objects.count(), TenantMigration.objects.values().get(pk=move.pk))


def test_the_refusal_page_says_which_role_is_missing(people: People, move: TenantMigration) -> None:
    text = people.viewer.get(reverse("abort", args=[move.pk])).content.decode()
    assert "This needs the role operator; you are viewer." in text


def test_somebody_without_a_role_is_told_how_to_get_one(people: People) -> None:
    text = people.nobody.get("/").content.decode()
    assert "An admin puts you into the group" in text


@pytest.mark.parametrize("name", ["move", "overview", "moves", "tenant", "tenants"])
def test_a_viewer_is_offered_no_act(name: str, people: People, move: TenantMigration) -> None:
    text = people.viewer.get(_address(name, move)).content.decode()
    assert not [act for act in NEEDS_OPERATOR if f'action="{_address(act, move)}"' in text]
    assert reverse("new_move") not in text


def test_an_operator_is_offered_the_acts_of_the_phase(
    people: People, move: TenantMigration
) -> None:
    text = people.operator.get(reverse("move", args=[move.pk])).content.decode()
    for act in ("abort", "pause", "hold_fence", "recopy"):
        assert f'action="{reverse(act, args=[move.pk])}"' in text


def test_a_poll_after_the_session_ended_moves_the_whole_page_to_the_sign_in(
    people: People, move: TenantMigration
) -> None:
    page = reverse("move", args=[move.pk])
    headers = HTMX | {"HX-Current-URL": f"http://testserver{page}"}
    answer = people.stranger.get(reverse("facts", args=[move.pk]), headers=headers)
    assert answer.status_code == 401
    assert answer["HX-Redirect"] == f"{reverse('login')}?next={page.replace('/', '%2F')}"


@pytest.mark.parametrize("url", ["http://[", "http://\u2100.example", "\0"])
def test_a_poll_that_names_no_address_leads_to_the_overview(
    url: str, people: People, move: TenantMigration
) -> None:
    headers = HTMX | {"HX-Current-URL": url}
    answer = people.stranger.get(reverse("facts", args=[move.pk]), headers=headers)
    assert answer.status_code == 401
    assert answer["HX-Redirect"] == f"{reverse('login')}?next=%2F"


@pytest.mark.parametrize(
    "cookie", ['"\\000aaaaaaaaaaaa"', "../../aaaaaaaa", '"\\355\\240\\200aaaaaaaa"']
)
def test_a_cookie_that_no_session_has_is_a_stranger(cookie: str, people: People) -> None:
    answer = people.stranger.get("/", headers={"Cookie": f"sessionid={cookie}"})
    assert answer["Location"] == f"{reverse('login')}?next=/"


def test_a_form_from_another_site_is_refused(people: People, move: TenantMigration) -> None:
    client = Client(enforce_csrf_checks=True)
    client.cookies = people.operator.cookies
    answer = client.post(reverse("abort", args=[move.pk]), {"reason": "forged"})
    assert answer.status_code == 403
    assert "older than your sign-in" in answer.content.decode()
    move.refresh_from_db()
    assert move.abort_requested_at is None
