"""Callers of the API, each with a token of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import Group, User
from django.test import Client

from durable.clock import database_now
from platform_admin.api import tokens
from tenants import services
from tenants.domain.roles import Role, TokenRole
from tests import make
from tests.stores import Raw


@dataclass
class Caller:
    """A program with a bearer token, or with none."""

    client: Client
    secret: str = ""

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        if self.secret:
            headers.setdefault("Authorization", f"Bearer {self.secret}")
        data = body if isinstance(body, (bytes, str)) else json.dumps(body)
        return self.client.generic(
            method,
            f"/api/v1{path}",
            "" if body is None else data,
            content_type="application/json",
            headers=headers,
        )

    def get(self, path: str, **headers: str) -> Any:
        return self.call("GET", path, **headers)

    def post(self, path: str, body: Any = None, **headers: str) -> Any:
        return self.call("POST", path, {} if body is None else body, **headers)

    def delete(self, path: str) -> Any:
        return self.call("DELETE", path)


@pytest.fixture(autouse=True)
def no_token_from_another_test() -> Iterator[None]:
    yield
    tokens.clear()


@pytest.fixture
def nobody(db: None) -> Caller:
    return Caller(Client(enforce_csrf_checks=True))


def caller(role: TokenRole, **names: Any) -> Caller:
    now = database_now()
    _, secret = services.make_token(
        f"{role} of tests",
        role=role,
        expires_at=now + timedelta(hours=1),
        by="ada",
        now=now,
        **names,
    )
    return Caller(Client(enforce_csrf_checks=True), secret)


@pytest.fixture
def runtime(cast: make.Cast) -> Caller:
    return caller(TokenRole.RUNTIME, cells=[cast.cell])


@pytest.fixture
def other_runtime(cast: make.Cast) -> Caller:
    return caller(TokenRole.RUNTIME, cells=[cast.other_cell])


@pytest.fixture
def gateway(db: None) -> Caller:
    return caller(TokenRole.GATEWAY)


@pytest.fixture
def tenant_program(cast: make.Cast) -> Caller:
    return caller(TokenRole.TENANT, tenant=cast.acme)


def person(name: str, role: Role | None) -> User:
    user = User.objects.create_user(name)
    if role is not None:
        user.groups.add(Group.objects.get(name=role.value))
    return user


@pytest.fixture
def viewer(db: None) -> Caller:
    return caller(TokenRole.OPERATOR, user=person("vera", Role.VIEWER))


@pytest.fixture
def operator(db: None) -> Caller:
    return caller(TokenRole.OPERATOR, user=person("otto", Role.OPERATOR))


@pytest.fixture
def admin(db: None) -> Caller:
    return caller(TokenRole.OPERATOR, user=person("anna", Role.ADMIN))


@pytest.fixture
def stranger(db: None) -> Caller:
    return caller(TokenRole.OPERATOR, user=person("stan", None))


@pytest.fixture
def signed_in(db: None) -> Caller:
    """An operator in a browser: a session cookie, no token, and Django's real CSRF check."""
    client = Client(enforce_csrf_checks=True)
    client.force_login(person("olga", Role.OPERATOR))
    return Caller(client)


@pytest.fixture
def stores(cast: make.Cast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files, the first with sessions of acme."""
    monkeypatch.setenv("STORE_EU1_A", f"sqlite:///{tmp_path}/one.db")
    monkeypatch.setenv("STORE_EU1_B", f"sqlite:///{tmp_path}/two.db")
    source = Raw(f"sqlite:///{tmp_path}/one.db")
    source.make_tables("env:STORE_EU1_A", "support.acme")
    source.seed("support.acme", sessions=2, users=1)
