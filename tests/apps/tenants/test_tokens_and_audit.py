"""Tokens open what they are for, for as long as they should; the audit stays as it was written."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth.models import AnonymousUser, Group, User
from django.db import DatabaseError, transaction

from durable.errors import Refused
from tenants import queries, services
from tenants.domain.requests import request_id
from tenants.domain.roles import Role, TokenRole
from tenants.models import AuditEntry, Cell, Token
from tests import make

pytestmark = pytest.mark.django_db
YEAR = timedelta(days=365)


@pytest.fixture
def ada() -> User:
    return User.objects.create_user("ada")


def runtime_token(cast: make.Cast, now: datetime, **changes: Any) -> tuple[Token, str]:
    given: dict[str, Any] = {
        "role": TokenRole.RUNTIME,
        "cells": [cast.cell],
        "expires_at": now + YEAR,
        "by": "ada",
        "now": now,
    }
    return services.make_token("agents", **{**given, **changes})


def test_a_secret_opens_its_token_and_is_kept_nowhere(cast: make.Cast, now: datetime) -> None:
    token, secret = runtime_token(cast, now)
    found = queries.token_for(secret, now=now)
    assert found == token
    assert list(found.cells.all()) == [cast.cell]
    kept = [str(row) for row in Token.objects.values()] + [
        str(row) for row in AuditEntry.objects.values()
    ]
    random_part = secret.removeprefix(f"{token.prefix}_")
    assert len(random_part) == 43  # 256 bits in base64.
    assert not any(random_part in row for row in kept)


def test_no_log_line_holds_a_secret(
    cast: make.Cast, now: datetime, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        _, secret = runtime_token(cast, now)
        queries.token_for(secret, now=now)
    assert secret not in caplog.text


def test_secrets_differ(cast: make.Cast, now: datetime) -> None:
    assert len({runtime_token(cast, now)[1] for _ in range(20)}) == 20


@pytest.mark.parametrize("secret", ["", "sy_000000_x", "\ud800", "a\0b", "x" * 10_000])
def test_any_other_text_opens_nothing(cast: make.Cast, now: datetime, secret: str) -> None:
    runtime_token(cast, now)
    assert queries.token_for(secret, now=now) is None


def test_an_expired_token_opens_nothing(cast: make.Cast, now: datetime) -> None:
    _, secret = runtime_token(cast, now, expires_at=now + timedelta(hours=1))
    assert queries.token_for(secret, now=now + timedelta(minutes=59)) is not None
    assert queries.token_for(secret, now=now + timedelta(hours=1)) is None


def test_a_revoked_token_opens_nothing(cast: make.Cast, now: datetime) -> None:
    token, secret = runtime_token(cast, now)
    services.revoke_token(token, by="ada", reason="laptop lost", now=now)
    assert queries.token_for(secret, now=now) is None
    assert AuditEntry.objects.get(verb="token.revoke").reason == "laptop lost"
    with pytest.raises(services.AlreadyRevoked):
        services.revoke_token(token, by="ada", now=now)


def test_an_operators_token_ends_with_its_user(now: datetime, ada: User) -> None:
    _, secret = services.make_token(
        "ci", role=TokenRole.OPERATOR, user=ada, expires_at=now + YEAR, by="ada", now=now
    )
    assert queries.token_for(secret, now=now) is not None
    User.objects.update(is_active=False)
    assert queries.token_for(secret, now=now) is None


@pytest.mark.parametrize(
    "wrong",
    ["runtime of no cell", "gateway of a cell", "tenant of nobody", "operator of nobody", "past"],
)
def test_a_token_good_for_nothing_or_too_much_is_refused(
    cast: make.Cast, now: datetime, ada: User, wrong: str
) -> None:
    given: dict[str, Any] = {
        "runtime of no cell": {"role": TokenRole.RUNTIME},
        "gateway of a cell": {"role": TokenRole.GATEWAY, "cells": [cast.cell]},
        "tenant of nobody": {"role": TokenRole.TENANT, "user": ada},
        "operator of nobody": {"role": TokenRole.OPERATOR, "tenant": cast.acme},
        "past": {"role": TokenRole.GATEWAY, "expires_at": now},
    }[wrong]
    given = {"expires_at": now + YEAR, **given}
    with pytest.raises(services.BadToken):
        services.make_token("x", by="ada", now=now, **given)
    assert not Token.objects.exists()


def test_a_use_is_noted_once_a_minute(cast: make.Cast, now: datetime) -> None:
    token, _ = runtime_token(cast, now)
    for seconds, noted in ((0, 0), (30, 0), (59, 0), (60, 60), (61, 60)):
        services.note_token_use(token, now=now + timedelta(seconds=seconds))
        token.refresh_from_db()
        assert token.last_used_at == now + timedelta(seconds=noted)


# --- roles ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "role"),
    [
        ([], None),
        (["viewer"], Role.VIEWER),
        (["operator", "viewer"], Role.OPERATOR),
        (["viewer", "admin"], Role.ADMIN),
    ],
)
def test_the_highest_group_counts(ada: User, groups: list[str], role: Role | None) -> None:
    ada.groups.set(Group.objects.filter(name__in=groups))
    assert queries.role_of(ada) is role


def test_a_superuser_is_an_admin_and_a_stranger_nothing(ada: User) -> None:
    ada.is_superuser = True
    assert queries.role_of(ada) is Role.ADMIN
    ada.is_active = False
    assert queries.role_of(ada) is None
    assert queries.role_of(AnonymousUser()) is None


# --- the audit ------------------------------------------------------------------------------


def test_the_database_refuses_to_change_or_delete_a_line(cast: make.Cast) -> None:
    lines = AuditEntry.objects.all()
    for change in (lambda: lines.update(who="nobody"), lines.delete):
        with pytest.raises(DatabaseError, match="append-only"), transaction.atomic():
            change()
    assert not AuditEntry.objects.filter(who="nobody").exists()
    assert lines.exists()


def test_a_line_stands_or_falls_with_its_write(cast: make.Cast, now: datetime) -> None:
    before = AuditEntry.objects.count()

    @transaction.atomic
    def twice() -> None:
        make.cell("cell-eu1-c", region=cast.region, now=now)
        make.cell("cell-eu1-c", region=cast.region, now=now)

    with pytest.raises(Refused):
        twice()
    assert AuditEntry.objects.count() == before
    assert not Cell.objects.filter(slug="cell-eu1-c").exists()


def test_a_line_says_who_when_what_why_before_after_and_under_which_request(
    cast: make.Cast, now: datetime
) -> None:
    outer = request_id.set("req-12345678")
    try:
        services.set_cell_url(cast.cell, url="https://a.eu", by="ada", reason="new proxy", now=now)
    finally:
        request_id.reset(outer)
    line = AuditEntry.objects.get(verb="cell.set_url")
    assert (line.who, line.at, line.subject) == ("ada", now, "cell cell-eu1-a")
    assert (line.reason, line.request_id) == ("new proxy", "req-12345678")
    assert (line.before, line.after) == ({"url": ""}, {"url": "https://a.eu"})
