"""People of each role, and moves as they look in each phase, at the database's own time."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from django.test import Client

from durable.clock import database_now
from migrations_app.domain.phases import Phase
from migrations_app.models import TenantMigration
from tenants.domain.roles import Role
from tests import make, scene
from tests.stores import Raw

HTMX = {"HX-Request": "true"}
APP = "support.acme"


@dataclass(frozen=True)
class People:
    """A browser for each role; `nobody` is signed in without any, `stranger` is not."""

    viewer: Client
    operator: Client
    admin: Client
    nobody: Client
    stranger: Client


@pytest.fixture
def people(db: None) -> People:
    """Somebody of each role."""

    def browser(name: str, role: Role | None) -> Client:
        client = Client()
        client.force_login(scene.person(name, role))
        return client

    return People(
        viewer=browser("vera", Role.VIEWER),
        operator=browser("olga", Role.OPERATOR),
        admin=browser("adam", Role.ADMIN),
        nobody=browser("nils", None),
        stranger=Client(),
    )


@pytest.fixture
def at(db: None) -> datetime:
    """The database's clock: views read it themselves."""
    return database_now()


@pytest.fixture
def here(at: datetime) -> make.Cast:
    """The cast, with live instances in both cells."""
    cast = make.cast(now=at - timedelta(days=4))
    scene.instances(cast.cell, ["eu1-a-1", "eu1-a-2"], now=at)
    scene.instances(cast.other_cell, ["eu1-b-1"], now=at, stores=["store-eu1-b"])
    return cast


@pytest.fixture
def moving(here: make.Cast, at: datetime) -> Callable[..., TenantMigration]:
    """Make a move of acme in a phase."""

    def make_move(phase: Phase, **columns: object) -> TenantMigration:
        return scene.move(here, phase, now=at, **columns)

    return make_move


@pytest.fixture
def sides(new_database: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> tuple[Raw, Raw]:
    """The same four sessions on both sides."""
    found = []
    for name in ("STORE_EU1_A", "STORE_EU1_B"):
        raw = Raw(new_database())
        monkeypatch.setenv(name, raw.url)
        raw.make_tables(f"env:{name}", APP)
        raw.seed(APP, sessions=4, users=2)
        found.append(raw)
    return found[0], found[1]


def polled(html: str, url: str) -> str:
    """Return the address, with ?v=, at which an element of the page polls `url`."""
    found = re.search(rf'hx-get="({re.escape(url)}[^"]*)"', html)
    assert found, f"nothing polls {url}"
    return found.group(1).replace("&amp;", "&")


@pytest.fixture
def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[TenantMigration], None]:
    """Give both stores of a move a real file, under the guard row that the move made there."""
    return partial(scene.guard_stores, folder=tmp_path, environment=monkeypatch)
