"""Registering regions, cells, stores and tenants: what is refused changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import IntegrityError, transaction

from durable.errors import Refused
from tenants import services
from tenants.domain import names
from tenants.models import (
    Agent,
    AuditEntry,
    Counter,
    Placement,
    PlacementChange,
    PolicyEntry,
    Scope,
    Store,
    Tenant,
)
from tests import make

pytestmark = pytest.mark.django_db

CHANGED: dict[str, dict[str, Any]] = {
    "slug": {"slug": "Acme"},
    "name": {"name": " "},
    "invisible name": {"name": "Ac\u200bme\n"},
    "app name too long": {"app_name": "a" * 129},
    "app name with NUL": {"app_name": "support.\0"},
    "time zone": {"time_zone": "Mars/Olympus"},
    "path as time zone": {"time_zone": "../../etc/passwd"},
    "weight": {"weight": -1.0},
    "infinite weight": {"weight": float("inf")},
    "tier": {"tier": "gold"},
    "taken slug": {"slug": "acme"},
    "taken app name": {"app_name": "support.acme"},
}
REFUSALS: dict[str, type[Refused]] = {
    "slug": names.BadSlug,
    "name": names.BadName,
    "invisible name": names.BadName,
    "app name too long": names.BadAppName,
    "app name with NUL": names.BadAppName,
    "time zone": services.UnknownTimeZone,
    "path as time zone": services.UnknownTimeZone,
    "weight": services.BadWeight,
    "infinite weight": services.BadWeight,
    "tier": names.UnknownTier,
    "taken slug": services.SlugTaken,
    "taken app name": services.AppNameTaken,
}


def rows() -> list[Any]:
    tables = [Agent, AuditEntry, Placement, PlacementChange, PolicyEntry, Scope, Tenant]
    return [model.objects.count() for model in tables] + list(Counter.objects.values())


@pytest.mark.parametrize("wrong", CHANGED)
def test_a_tenant_that_can_not_be_is_refused_and_leaves_nothing(
    cast: make.Cast, now: datetime, wrong: str
) -> None:
    before = rows()
    given: dict[str, Any] = {
        "slug": "dune",
        "name": "Dune",
        "app_name": "dunes.dune",
        "cell": cast.cell,
        "store": cast.store,
        "by": "ada",
        "now": now,
    }
    given |= CHANGED[wrong]
    with pytest.raises(REFUSALS[wrong]):
        services.add_tenant(given.pop("slug"), **given)
    assert rows() == before


def test_a_cell_whose_quota_is_only_assumed_takes_no_tenant(cast: make.Cast, now: datetime) -> None:
    assumed = make.cell("assumed", region=cast.region, now=now, verified=False)
    with pytest.raises(services.QuotaOnlyAssumed):
        make.tenant("dune", cell=assumed, store=cast.store, now=now)
    services.verify_quota(assumed, tokens_per_minute=1_000, by="ada", now=now)
    assert make.tenant("dune", cell=assumed, store=cast.store, now=now).placement.cell == assumed


def test_a_tenant_begins_placed_and_published_with_a_history_and_a_scope(
    cast: make.Cast, now: datetime
) -> None:
    entry = PolicyEntry.objects.get(tenant=cast.acme)
    placement = Placement.objects.get(tenant=cast.acme)
    [line] = PlacementChange.objects.filter(tenant=cast.acme)
    [scope] = Scope.objects.filter(tenant=cast.acme)
    assert (placement.cell, placement.store) == (cast.cell, cast.store)
    assert (entry.accepts, entry.placement_version) == ("all", placement.placement_version)
    assert (line.placement_version, line.by) == (placement.placement_version, "ada")
    assert scope.version == 1
    assert entry.document["app_name"] == "support.acme"
    assert entry.document["agent"] == "support"


def test_tenants_of_one_agent_share_its_row(cast: make.Cast) -> None:
    assert cast.acme.agent == cast.bolt.agent != cast.core.agent


def test_every_registration_is_audited(cast: make.Cast) -> None:
    verbs = set(AuditEntry.objects.values_list("verb", flat=True))
    assert verbs >= {"region.add", "cell.add", "cell.verify_quota", "store.add", "tenant.add"}
    assert AuditEntry.objects.get(subject="tenant acme").after["cell"] == "cell-eu1-a"


def test_a_pasted_address_is_kept_nowhere(cast: make.Cast, now: datetime) -> None:
    secret = "postgresql://mover:hunter2@db/acme"
    with pytest.raises(names.NotAReference):
        make.store("pasted", region=cast.region, now=now, address_from=secret)
    assert not Store.objects.filter(key="pasted").exists()
    assert not AuditEntry.objects.filter(subject="store pasted").exists()


def test_an_unknown_kind_of_store_is_refused(cast: make.Cast, now: datetime) -> None:
    with pytest.raises(names.UnknownStoreKind):
        make.store("odd", region=cast.region, now=now, kind="mongodb")


@pytest.mark.parametrize(
    "again",
    [
        lambda cast, now: make.region("eu1", now=now),
        lambda cast, now: make.cell("cell-eu1-a", region=cast.region, now=now),
        lambda cast, now: make.store("store-eu1-a", region=cast.region, now=now),
    ],
    ids=["region", "cell", "store"],
)
def test_a_taken_slug_is_refused(
    cast: make.Cast, now: datetime, again: Callable[[make.Cast, datetime], object]
) -> None:
    with pytest.raises(services.SlugTaken):
        again(cast, now)


@pytest.mark.parametrize("tokens", [0, -1, 2**60])
def test_a_quota_that_serves_nobody_is_refused(cast: make.Cast, now: datetime, tokens: int) -> None:
    with pytest.raises(services.BadQuota):
        services.verify_quota(cast.cell, tokens_per_minute=tokens, by="ada", now=now)


def test_the_database_lets_no_two_cells_own_one_tenant(cast: make.Cast) -> None:
    entry = PolicyEntry.objects.get(tenant=cast.acme)
    with pytest.raises(IntegrityError), transaction.atomic():
        PolicyEntry.objects.create(
            cell=cast.other_cell,
            tenant=cast.acme,
            version=1,
            accepts="all",
            placement_version=entry.placement_version,
            store=cast.store,
        )


def test_the_newest_survey_of_a_store_is_kept(cast: make.Cast, now: datetime) -> None:
    store = cast.store
    assert (store.survey, store.surveyed_at) == (None, None)
    services.note_survey(store, {"sessions": 7, "at": now, "keys": ("a", "b")}, now=now)
    # One that began earlier and came later tells nothing new.
    services.note_survey(store, {"sessions": 6}, now=now - timedelta(seconds=1))
    store.refresh_from_db()
    assert store.surveyed_at == now
    assert store.survey == {"sessions": 7, "at": "2026-03-02T12:00:00Z", "keys": ["a", "b"]}
    services.note_survey(store, {"sessions": 8}, now=now + timedelta(seconds=1))
    store.refresh_from_db()
    assert store.survey == {"sessions": 8}
    assert Store.objects.get(pk=cast.other_store.pk).surveyed_at is None
