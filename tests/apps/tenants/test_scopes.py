"""Limits: versions with a reason, told to every cell, safe against a move at the same moment."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from django.db import connections, transaction

from tenants import queries, services
from tenants.domain.limits import BadLimits, Limits
from tenants.models import AuditEntry, Cell, PolicyEntry, Scope, Tenant
from tests import make

SMALL = Limits(max_concurrent_runs=10, runs_per_second=0.5, daily_token_budget=1_000_000)
WHY = {"by": "ada", "reason": "They asked for it"}


def entry(cell: Cell, tenant: Tenant) -> PolicyEntry:
    return PolicyEntry.objects.get(cell=cell, tenant=tenant)


def told(cell: Cell, tenant: Tenant) -> Any:
    """What a runtime of the cell is told of the tenant."""
    return queries._entry(entry(cell, tenant), queries.epoch())


def version(cell: Cell) -> int:
    return Cell.objects.values_list("policy_version", flat=True).get(pk=cell.pk)


@pytest.mark.django_db
def test_new_limits_are_a_version_with_its_reason_and_are_told_to_the_cell(
    cast: make.Cast, now: datetime
) -> None:
    before = version(cast.cell)
    limits = replace(SMALL, allowed_tools=("look_up",), tier="bridge", weight=3.0)
    scope = services.set_scope(cast.acme, limits=limits, now=now, **WHY)
    assert (scope.version, scope.by, scope.reason, scope.at) == (2, "ada", WHY["reason"], now)
    assert (version(cast.cell), entry(cast.cell, cast.acme).version) == (before + 1, before + 1)
    said = told(cast.cell, cast.acme)
    assert said["scope"] == {
        "version": 2,
        "max_concurrent_runs": 10,
        "runs_per_second": 0.5,
        "daily_token_budget": 1_000_000,
        "max_model_calls_per_run": None,
        "allowed_tools": ["look_up"],
        "exact_budget": False,
        "budget_spent_until": None,
        "weight": 3.0,
    }
    assert (said["tier"], said["trial"], said["accepts"]) == ("bridge", None, "all")
    cast.acme.refresh_from_db()
    assert (cast.acme.tier, cast.acme.weight) == ("bridge", 3.0)
    line = AuditEntry.objects.get(verb="tenant.set_limits")
    assert (line.before["max_concurrent_runs"], line.after["max_concurrent_runs"]) == (None, 10)
    assert (line.before["version"], line.after["version"]) == (1, 2)
    assert queries.limits_of(queries.scope_of(cast.acme)) == limits


@pytest.mark.django_db
def test_limits_that_hold_already_make_no_version(cast: make.Cast, now: datetime) -> None:
    first = services.set_scope(cast.acme, limits=SMALL, now=now, **WHY)
    assert services.set_scope(cast.acme, limits=SMALL, now=now, **WHY) == first
    assert Scope.objects.filter(tenant=cast.acme).count() == 2
    assert AuditEntry.objects.filter(verb="tenant.set_limits").count() == 1


@pytest.mark.django_db
@pytest.mark.parametrize(
    "verb", ["set_scope", "try_scope", "end_trial", "adopt", "set_tier", "rotate"]
)
def test_every_edit_needs_a_reason(cast: make.Cast, now: datetime, verb: str) -> None:
    services.try_scope(cast.acme, limits=SMALL, now=now, **WHY)
    said: dict[str, Any] = {"by": "ada", "reason": " \n", "now": now}
    said |= {"limits": SMALL} if verb.endswith("scope") else {}
    said |= {"tier": "bridge"} if verb == "set_tier" else {}
    before = (Scope.objects.count(), version(cast.cell))
    with pytest.raises(services.ReasonMissing):
        getattr(services, verb)(cast.acme, **said)
    assert (Scope.objects.count(), version(cast.cell)) == before


@pytest.mark.django_db
def test_limits_that_nobody_could_hold_change_nothing(cast: make.Cast, now: datetime) -> None:
    before = version(cast.cell)
    for verb in (services.set_scope, services.try_scope):
        with pytest.raises(BadLimits):
            verb(cast.acme, limits=Limits(max_concurrent_runs=0), now=now, **WHY)
    assert (Scope.objects.filter(tenant=cast.acme).count(), version(cast.cell)) == (1, before)


@pytest.mark.django_db
def test_a_trial_never_holds_and_is_told_beside_what_does(cast: make.Cast, now: datetime) -> None:
    services.set_scope(cast.acme, limits=SMALL, now=now, **WHY)
    tried = replace(SMALL, max_concurrent_runs=2, tier="silo", weight=9.0)
    scope = services.try_scope(cast.acme, limits=tried, now=now, **WHY)
    said = told(cast.cell, cast.acme)
    assert (said["scope"]["version"], said["trial"]["version"]) == (2, scope.version)
    assert (said["scope"]["max_concurrent_runs"], said["trial"]["max_concurrent_runs"]) == (10, 2)
    # Nobody tries a tier.
    assert (scope.tier, scope.weight, said["tier"]) == ("pooled", 1.0, "pooled")
    assert queries.scope_of(cast.acme).version == 2
    services.end_trial(cast.acme, now=now, **WHY)
    assert told(cast.cell, cast.acme)["trial"] is None
    verbs = ["tenant.set_limits", "tenant.try_limits", "tenant.end_trial"]
    lines = AuditEntry.objects.filter(subject="tenant acme", verb__in=verbs).order_by("pk")
    assert [line.verb for line in lines] == verbs
    assert (lines[1].before, lines[2].before["max_concurrent_runs"]) == (None, 2)


@pytest.mark.django_db
def test_adopting_a_trial_lets_its_limits_hold_with_the_present_tier(
    cast: make.Cast, now: datetime
) -> None:
    services.try_scope(cast.acme, limits=replace(SMALL, max_concurrent_runs=2), now=now, **WHY)
    services.set_tier(cast.acme, tier="bridge", now=now, **WHY)
    scope = services.adopt(cast.acme, now=now, **WHY)
    assert (scope.version, scope.trial, scope.max_concurrent_runs, scope.tier) == (
        4,
        False,
        2,
        "bridge",
    )
    said = told(cast.cell, cast.acme)
    assert (said["scope"]["version"], said["trial"], said["tier"]) == (4, None, "bridge")
    for verb in (services.adopt, services.end_trial):
        with pytest.raises(services.NoTrial):
            verb(cast.acme, now=now, **WHY)


@pytest.mark.django_db
def test_a_tier_changes_nothing_else(cast: make.Cast, now: datetime) -> None:
    services.set_scope(cast.acme, limits=SMALL, now=now, **WHY)
    scope = services.set_tier(cast.acme, tier="silo", now=now, **WHY)
    assert queries.limits_of(scope) == replace(SMALL, tier="silo")
    assert cast.acme.placement.cell == cast.cell


@pytest.mark.django_db
def test_a_rotated_secret_raises_the_generation_in_every_living_entry(
    cast: make.Cast, now: datetime
) -> None:
    with transaction.atomic():
        services.announce(cast.acme, cast.other_cell, cast.other_store)
    assert services.rotate(cast.acme, now=now, **WHY) == 2
    for cell in (cast.cell, cast.other_cell):
        assert told(cell, cast.acme)["runner_generation"] == 2
    assert told(cast.cell, cast.bolt)["runner_generation"] == 1


@pytest.mark.django_db
def test_a_used_up_budget_is_told_once_and_let_go(cast: make.Cast, now: datetime) -> None:
    midnight = now + timedelta(hours=12)
    before = version(cast.cell)
    services.spend_budget(cast.acme, midnight)
    services.spend_budget(cast.acme, midnight)
    assert version(cast.cell) == before + 1
    said = told(cast.cell, cast.acme)["scope"]["budget_spent_until"]
    assert datetime.fromisoformat(said) == midnight
    services.spend_budget(cast.acme, None)
    assert told(cast.cell, cast.acme)["scope"]["budget_spent_until"] is None


@pytest.mark.django_db
def test_an_edit_reaches_both_sides_of_a_split_and_no_tombstone(
    cast: make.Cast, now: datetime
) -> None:
    services.publish(cast.acme, cast.cell, accepts="existing")
    services.split(
        cast.acme, cell=cast.other_cell, store=cast.other_store, by="m", reason="", now=now
    )
    services.set_scope(cast.acme, limits=SMALL, now=now, **WHY)
    for cell, accepts in ((cast.cell, "existing"), (cast.other_cell, "new")):
        said = told(cell, cast.acme)
        assert (said["scope"]["version"], said["accepts"]) == (2, accepts)
        assert said["sides"] is not None
    services.place(
        cast.acme, cell=cast.other_cell, store=cast.other_store, by="m", reason="", now=now
    )
    buried = entry(cast.cell, cast.acme).version
    services.set_tier(cast.acme, tier="bridge", now=now, **WHY)
    assert told(cast.other_cell, cast.acme)["tier"] == "bridge"
    assert entry(cast.cell, cast.acme).version == buried


@pytest.mark.django_db
def test_what_a_move_publishes_is_what_holds_now_and_not_what_its_row_had(
    cast: make.Cast, now: datetime
) -> None:
    stale = Tenant.objects.select_related("agent").get(pk=cast.acme.pk)
    services.set_scope(cast.acme, limits=replace(SMALL, tier="bridge"), now=now, **WHY)
    services.try_scope(cast.acme, limits=SMALL, now=now, **WHY)
    services.spend_budget(cast.acme, now)
    services.place(stale, cell=cast.other_cell, store=cast.other_store, by="m", reason="", now=now)
    said = told(cast.other_cell, cast.acme)
    assert (said["tier"], said["scope"]["version"], said["trial"]["version"]) == ("bridge", 2, 3)
    assert said["scope"]["budget_spent_until"] is not None


# --- two at once ----------------------------------------------------------------------------


@pytest.mark.django_db(transaction=True, serialized_rollback=True)
@pytest.mark.parametrize("first", ["edit", "move"])
def test_an_edit_beside_a_moves_target_is_in_force_where_the_tenant_is_afterwards(
    cast: make.Cast, now: datetime, first: str
) -> None:
    """Whoever comes second waits for the first one's commit, and reads what it wrote."""
    with transaction.atomic():
        services.announce(cast.acme, cast.other_cell, cast.other_store)

    def edit() -> None:
        services.set_scope(cast.acme, limits=SMALL, now=now, **WHY)

    def move() -> None:
        services.place(
            cast.acme, cell=cast.other_cell, store=cast.other_store, by="m", reason="", now=now
        )

    def second() -> None:
        try:
            started.set()
            with transaction.atomic():
                (move if first == "edit" else edit)()
        except services.PlacementChanged:
            # The move won the cells while the edit waited for them: it is to try again.
            with transaction.atomic():
                edit()
        finally:
            connections.close_all()

    before = version(cast.other_cell)
    started, thread = threading.Event(), threading.Thread(target=second)
    with transaction.atomic():
        (edit if first == "edit" else move)()
        thread.start()
        assert started.wait(10)
        thread.join(0.3)
        assert thread.is_alive(), "the second one did not wait"
    thread.join(20)
    assert not thread.is_alive()
    said = told(cast.other_cell, cast.acme)
    assert (said["accepts"], said["scope"]["version"]) == ("all", 2)
    # Each has a number of its own: under one that was given, an instance would never hear of it.
    assert version(cast.other_cell) == entry(cast.other_cell, cast.acme).version == before + 2
    assert entry(cast.cell, cast.acme).accepts == "moved"


@pytest.mark.django_db(transaction=True, serialized_rollback=True)
def test_two_edits_at_once_are_two_versions_and_the_second_knows_the_first(
    cast: make.Cast, now: datetime
) -> None:
    together, failures = threading.Barrier(2), []

    def edit(runs: int) -> None:
        together.wait(10)
        try:
            for further in range(5):
                limits = Limits(max_concurrent_runs=runs + further)
                services.set_scope(cast.acme, limits=limits, now=now, **WHY)
        except Exception as error:
            failures.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=edit, args=(runs,)) for runs in (10, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    lines = list(AuditEntry.objects.filter(verb="tenant.set_limits").order_by("pk"))
    assert len(lines) == 10
    for line, next_line in pairwise(lines):
        assert next_line.before == line.after
    newest = queries.scope_of(cast.acme)
    assert told(cast.cell, cast.acme)["scope"]["version"] == newest.version == 11


@pytest.mark.django_db(transaction=True, serialized_rollback=True)
def test_an_edit_whose_tenant_was_announced_elsewhere_meanwhile_is_refused(
    cast: make.Cast,
    now: datetime,
    elsewhere: Callable[[Callable[[], Any]], Any],
    after_statement: Any,
) -> None:
    def announce() -> None:
        with transaction.atomic():
            services.announce(cast.acme, cast.other_cell, cast.other_store)

    # The first statement reads where the tenant is told of; the second locks those cells.
    with (
        after_statement(0, lambda: elsewhere(announce)),
        pytest.raises(services.PlacementChanged),
    ):
        services.set_scope(cast.acme, limits=SMALL, now=now, **WHY)
    assert Scope.objects.filter(tenant=cast.acme).count() == 1
    services.set_scope(cast.acme, limits=SMALL, now=now, **WHY)
    assert told(cast.other_cell, cast.acme)["scope"]["version"] == 2
