"""A tenant's people have that tenant and no role, whichever came first."""

from __future__ import annotations

import re
from datetime import datetime
from io import StringIO

import pytest
from django.contrib.auth.models import AnonymousUser, Group, User
from django.core.management import CommandError, call_command
from django.test import Client

from tenants import queries, services
from tenants.domain.roles import Role
from tenants.models import AuditEntry, Membership
from tests import make

pytestmark = pytest.mark.django_db


@pytest.fixture
def tess(db: None) -> User:
    return User.objects.create_user("tess")


def test_a_member_has_a_tenant_and_no_role(cast: make.Cast, tess: User, now: datetime) -> None:
    services.add_member(tess, tenant=cast.acme, by="anna", now=now)
    assert queries.tenant_of(tess) == cast.acme
    assert queries.role_of(tess) is None
    line = AuditEntry.objects.get(verb="member.add")
    assert (line.who, line.subject, line.after) == ("anna", "user tess", {"tenant": "acme"})


def test_a_member_who_was_put_into_a_group_has_no_role(
    cast: make.Cast, tess: User, now: datetime
) -> None:
    services.add_member(tess, tenant=cast.acme, by="anna", now=now)
    tess.groups.add(Group.objects.get(name="admin"))
    other = User.objects.create_user("otto")
    other.groups.add(Group.objects.get(name="operator"))
    assert (queries.role_of(tess), queries.role_of(other)) == (None, Role.OPERATOR)


@pytest.mark.parametrize("role", Role)
def test_whoever_has_a_role_becomes_no_member(
    cast: make.Cast, tess: User, now: datetime, role: Role
) -> None:
    services.grant_role(tess, role, by="anna", now=now)
    with pytest.raises(services.HasARole, match=f"tess is {role}"):
        services.add_member(tess, tenant=cast.acme, by="anna", now=now)
    assert not Membership.objects.exists()


def test_a_superuser_becomes_no_member(cast: make.Cast, now: datetime) -> None:
    root = User.objects.create_superuser("root")
    with pytest.raises(services.HasARole):
        services.add_member(root, tenant=cast.acme, by="anna", now=now)


def test_a_member_gets_no_role(cast: make.Cast, tess: User, now: datetime) -> None:
    services.add_member(tess, tenant=cast.acme, by="anna", now=now)
    with pytest.raises(services.IsAMember, match="tess is of acme"):
        services.grant_role(tess, Role.VIEWER, by="anna", now=now)
    assert not tess.groups.exists()


def test_a_person_is_of_one_tenant(cast: make.Cast, tess: User, now: datetime) -> None:
    services.add_member(tess, tenant=cast.acme, by="anna", now=now)
    with pytest.raises(services.AlreadyAMember, match="tess is of acme already"):
        services.add_member(tess, tenant=cast.bolt, by="anna", now=now)
    with pytest.raises(services.NotAMember):
        services.remove_member(tess, tenant=cast.bolt, by="anna", now=now)
    assert queries.tenant_of(tess) == cast.acme


def test_a_member_who_was_removed_is_nobody(cast: make.Cast, tess: User, now: datetime) -> None:
    services.add_member(tess, tenant=cast.acme, by="anna", now=now)
    services.remove_member(tess, tenant=cast.acme, by="anna", now=now)
    assert queries.tenant_of(tess) is None
    assert AuditEntry.objects.get(verb="member.remove").before == {"tenant": "acme"}
    services.grant_role(tess, Role.VIEWER, by="anna", now=now)
    assert queries.role_of(tess) is Role.VIEWER


def test_nobody_and_the_switched_off_see_no_tenant(
    cast: make.Cast, tess: User, now: datetime
) -> None:
    services.add_member(tess, tenant=cast.acme, by="anna", now=now)
    tess.is_active = False
    assert queries.tenant_of(tess) is None
    assert queries.tenant_of(AnonymousUser()) is None


# --- the command ----------------------------------------------------------------------------


def member(*words: str) -> str:
    out = StringIO()
    call_command("member", *words, "--by", "anna", stdout=out)
    return out.getvalue()


def test_one_command_makes_a_member_who_can_sign_in(cast: make.Cast) -> None:
    said = member("tess", "acme", "--new")
    password = re.search(r"password (\S+) ", said)
    assert password
    assert Client().login(username="tess", password=password.group(1))
    assert queries.tenant_of(User.objects.get(username="tess")) == cast.acme
    assert AuditEntry.objects.get(verb="member.add").who == "anna (command)"


def test_the_command_adds_and_removes(cast: make.Cast, tess: User) -> None:
    assert member("tess", "acme") == "tess sees the usage of acme now.\n"
    assert member("tess", "acme", "--remove") == "tess sees the usage of acme no longer.\n"
    assert not Membership.objects.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nobody", "acme"], "There is no sign-in nobody"),
        (["tess", "acmee"], "There is no tenant acmee"),
        (["tess", "acme", "--new"], "There is a sign-in tess already"),
        (["tess", "acme", "--remove"], "tess is not of acme"),
    ],
)
def test_a_slip_in_the_command_changes_nothing(
    cast: make.Cast, tess: User, words: list[str], said: str
) -> None:
    with pytest.raises(CommandError, match=said):
        member(*words)
    assert not Membership.objects.exists()
    assert User.objects.count() == 1
