"""Roles are given by one audited service and its command; nothing else gives them."""

from __future__ import annotations

import re
from datetime import datetime
from io import StringIO

import pytest
from django.contrib import admin
from django.contrib.auth.models import Group, User
from django.core.management import CommandError, call_command
from django.test import Client

from tenants import queries, services
from tenants.domain.names import BadName
from tenants.domain.roles import Role
from tenants.models import AuditEntry

pytestmark = pytest.mark.django_db


@pytest.fixture
def ada() -> User:
    return User.objects.create_user("ada")


def role(*words: str) -> str:
    out = StringIO()
    call_command("role", *words, stdout=out)
    return out.getvalue()


# --- the service ----------------------------------------------------------------------------


@pytest.mark.parametrize("given", [*Role, None])
@pytest.mark.parametrize("held", [["admin", "viewer"], []])
def test_a_granted_role_is_the_only_one(
    ada: User, now: datetime, held: list[str], given: Role | None
) -> None:
    other = Group.objects.create(name="night shift")
    ada.groups.set([other, *Group.objects.filter(name__in=held)])
    assert queries.role_of(services.grant_role(ada, given, by="bea", now=now)) is given
    names = set(ada.groups.values_list("name", flat=True))
    assert names == {"night shift"} | ({given.value} if given else set())


def test_a_grant_says_in_the_audit_who_gave_what_after_what(ada: User, now: datetime) -> None:
    services.grant_role(ada, Role.VIEWER, by="bea", now=now)
    services.grant_role(ada, Role.ADMIN, by="cyd", now=now)
    services.grant_role(ada, None, by="cyd", now=now)
    lines = AuditEntry.objects.filter(verb="user.role", subject="user ada").order_by("pk")
    assert [(line.who, line.before, line.after) for line in lines] == [
        ("bea", {"role": None}, {"role": "viewer"}),
        ("cyd", {"role": "viewer"}, {"role": "admin"}),
        ("cyd", {"role": "admin"}, {"role": None}),
    ]


def test_a_superusers_role_can_be_lowered(now: datetime) -> None:
    root = User.objects.create_superuser("root")
    services.grant_role(root, Role.VIEWER, by="bea", now=now)
    root.refresh_from_db()
    assert queries.role_of(root) is Role.VIEWER
    assert AuditEntry.objects.get(verb="user.role").before == {"role": "admin"}


@pytest.mark.parametrize("name", ["", " ", "a\nb", "x" * 151])
def test_a_sign_in_needs_a_name_that_a_page_can_show(now: datetime, name: str) -> None:
    with pytest.raises(BadName):
        services.add_sign_in(name, role=Role.VIEWER, by="bea", now=now)
    assert not User.objects.exists()


# --- the command ----------------------------------------------------------------------------


def test_one_command_makes_the_first_admin_who_can_sign_in() -> None:
    said = role("ada", "admin", "--new", "--by", "ada")
    [password] = re.findall(r", password (\S+)", said)
    client = Client()
    assert client.login(username="ada", password=password)
    assert queries.role_of(User.objects.get()) is Role.ADMIN
    lines = AuditEntry.objects.filter(subject="user ada").order_by("pk")
    assert [(line.who, line.verb) for line in lines] == [
        ("ada (command)", "user.add"),
        ("ada (command)", "user.role"),
    ]
    assert not any(password in str(row) for row in AuditEntry.objects.values())


def test_the_command_gives_and_takes_a_role(ada: User) -> None:
    assert "ada is operator now" in role("ada", "operator", "--by", "bea")
    assert queries.role_of(ada) is Role.OPERATOR
    assert "ada has no role now" in role("ada", "none", "--by", "bea")
    assert queries.role_of(User.objects.get()) is None
    assert AuditEntry.objects.filter(who="bea (command)", verb="user.role").count() == 2


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("adda", "viewer", "--by", "bea"), "There is no sign-in adda"),
        (("ada", "viewer", "--new", "--by", "bea"), "There is a sign-in ada already"),
        (("dan", "none", "--new", "--by", "bea"), "opens nothing"),
        (("ada", "root", "--by", "bea"), "invalid choice"),
        (("ada", "viewer"), "--by"),
    ],
)
def test_a_command_that_makes_no_sense_changes_nothing(
    ada: User, words: tuple[str, ...], why: str
) -> None:
    with pytest.raises(CommandError, match=why):
        role(*words)
    assert list(User.objects.values_list("username", flat=True)) == ["ada"]
    assert queries.role_of(ada) is None
    assert not AuditEntry.objects.exists()


# --- Django's admin -------------------------------------------------------------------------


@pytest.fixture(params=["role", "superuser"])
def highest(request: pytest.FixtureRequest, now: datetime) -> Client:
    """Whoever may do the most: an admin by role, and a superuser."""
    if request.param == "superuser":
        user = User.objects.create_superuser("root")
    else:
        user, _ = services.add_sign_in("root", role=Role.ADMIN, by="ada", now=now)
    client = Client()
    client.force_login(user)
    return client


def test_nobody_changes_a_row_in_djangos_admin(highest: Client, ada: User) -> None:
    for model in admin.site._registry:
        pages = f"/admin/{model._meta.app_label}/{model._meta.model_name}/"
        assert highest.get(pages).status_code == 200, pages
        assert highest.post(f"{pages}add/", {}).status_code == 403, pages
        row = model._default_manager.first()
        if row is not None:
            assert highest.get(f"{pages}{row.pk}/change/").status_code == 200, pages
            for act in ("change", "delete"):
                assert highest.post(f"{pages}{row.pk}/{act}/", {}).status_code == 403, pages


def test_djangos_admin_shows_no_password_hash_and_has_no_form_for_one(
    highest: Client, now: datetime
) -> None:
    made, _ = services.add_sign_in("dan", role=Role.VIEWER, by="ada", now=now)
    page = f"/admin/auth/user/{made.pk}"
    assert made.password.split("$")[-1] not in highest.get(f"{page}/change/").content.decode()
    form = highest.get(f"{page}/password/", follow=True)
    assert 'type="password"' not in form.content.decode()


@pytest.mark.parametrize("held", [Role.VIEWER, Role.OPERATOR])
def test_djangos_admin_is_for_admins(ada: User, now: datetime, held: Role) -> None:
    services.grant_role(ada, Role.ADMIN, by="bea", now=now)
    client = Client()
    client.force_login(ada)
    assert client.get("/admin/tenants/tenant/").status_code == 200
    services.grant_role(ada, held, by="bea", now=now)
    assert client.get("/admin/tenants/tenant/").status_code != 200
    # Not even with the flag that lets one into Django's admin.
    User.objects.update(is_staff=True)
    assert client.get("/admin/tenants/tenant/").status_code == 403
