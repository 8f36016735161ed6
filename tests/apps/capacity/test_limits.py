"""Limits are held against the cell's quota before they hold, and whoever breaks it is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from capacity import services
from capacity.models import UsageDay, UsageMinute
from capacity.room import BadEstimate, Typed, assess
from tenants import queries
from tenants import services as tenants_services
from tenants.domain.limits import BadLimits, Limits
from tenants.models import AuditEntry, Cell, Scope, Tenant
from tests import make

pytestmark = pytest.mark.django_db
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
WHY = {"by": "ada", "reason": "Their replay job"}
# The article's platform: 4 calls and 12 s a run, 600 requests a minute are normal.
ARTICLE = Typed(normal_requests_per_minute=600, model_calls_per_run=4, run_seconds=12)
ACME = Limits(max_concurrent_runs=10, runs_per_second=30 / 60)


@pytest.fixture
def cell(cast: make.Cast, now: datetime) -> Cell:
    """1,000 requests a minute, and far more tokens than anybody uses; the others are limited."""
    tenants_services.verify_quota(
        cast.cell, tokens_per_minute=10**9, requests_per_minute=1_000, by="ada", now=now
    )
    for tenant in (cast.bolt, cast.core):
        tenants_services.set_scope(tenant, limits=ACME, now=now, **WHY)
    return Cell.objects.get(pk=cast.cell.pk)


def used(tenant: Tenant, since: datetime, minutes: int, **counts: int) -> None:
    UsageMinute.objects.bulk_create(
        UsageMinute(tenant=tenant, minute=since + number * MINUTE, **counts)
        for number in range(minutes)
    )


def save(tenant: Tenant, now: datetime, **limits: Any) -> services.Saved:
    return services.set_limits(tenant, limits=Limits(**limits), typed=ARTICLE, now=now, **WHY)


@contextmanager
def while_it_is_measured(act: Callable[[], Any]) -> Iterator[None]:
    """Act once the normal load was read, so between what is assessed and what is saved."""
    acted = False

    def wrapper(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        nonlocal acted
        result = execute(sql, params, many, context)
        if not acted and "capacity_usageminute" in sql:
            acted = True
            act()
        return result

    with connection.execute_wrapper(wrapper):
        yield
    assert acted


def version(tenant: Tenant) -> int:
    return queries.scope_of(tenant).version


def test_the_articles_replay_job_fits(cast: make.Cast, cell: Cell, now: datetime) -> None:
    saved = services.set_limits(cast.acme, limits=ACME, typed=ARTICLE, now=now, **WHY)
    [tightest, _] = saved.assessed.headroom.bindings
    assert (tightest.unit, tightest.peak, tightest.room, tightest.fits) == (
        "requests",
        720,
        900,
        True,
    )
    assert saved.assessed.after.bound_by == "rate"
    assert not saved.overridden
    assert version(cast.acme) == saved.scope.version == 2


def test_a_limit_without_room_is_refused_with_the_quota_the_tenant_and_what_to_do(
    cast: make.Cast, cell: Cell, now: datetime
) -> None:
    with pytest.raises(services.NoHeadroom) as refused:
        save(cast.acme, now, runs_per_second=1.5)
    text = str(refused.value)
    for said in ("acme breaks", "90 runs", "360 requests", "600", "960", "900", "1,000", "75 runs"):
        assert said in text
    assert "bridge" in text
    assert version(cast.acme) == 1
    # Just under what it says.
    save(cast.acme, now, runs_per_second=74.9 / 60)


def test_the_rule_is_under_ninety_percent(cast: make.Cast, cell: Cell, now: datetime) -> None:
    with pytest.raises(services.NoHeadroom):
        save(cast.acme, now, runs_per_second=75 / 60)


def test_an_override_holds_and_the_audit_says_so(
    cast: make.Cast, cell: Cell, now: datetime
) -> None:
    limits = Limits(runs_per_second=1.5)
    saved = services.set_limits(
        cast.acme, limits=limits, typed=ARTICLE, override=True, now=now, **WHY
    )
    assert saved.overridden
    assert version(cast.acme) == 2
    line = AuditEntry.objects.get(verb="tenant.override_headroom")
    assert (line.who, line.reason, line.subject) == ("ada", WHY["reason"], "tenant acme")
    assert line.after == {
        "version": 2,
        "unit": "requests per minute",
        "limit": 360.0,
        "peak": 960.0,
        "room": 900.0,
    }


def test_an_override_that_is_not_needed_leaves_no_line(
    cast: make.Cast, cell: Cell, now: datetime
) -> None:
    services.set_limits(cast.acme, limits=ACME, typed=ARTICLE, override=True, now=now, **WHY)
    assert not AuditEntry.objects.filter(verb="tenant.override_headroom").exists()


@pytest.mark.parametrize("bad", ["reason", "limits", "estimate"])
def test_what_is_wrong_is_said_before_anything_is_measured(
    cast: make.Cast, cell: Cell, now: datetime, bad: str
) -> None:
    said: dict[str, Any] = {"limits": ACME, "typed": ARTICLE, "override": True, **WHY}
    wrong: dict[str, tuple[dict[str, Any], type[Exception]]] = {
        "reason": ({"reason": " "}, tenants_services.ReasonMissing),
        "limits": ({"limits": Limits(max_concurrent_runs=0)}, BadLimits),
        "estimate": ({"typed": Typed(run_seconds=float("nan"))}, BadEstimate),
    }
    change, error = wrong[bad]
    with pytest.raises(error):
        services.set_limits(cast.acme, now=now, **{**said, **change})
    assert version(cast.acme) == 1


# --- who is held against what ---------------------------------------------------------------


def test_an_edit_of_something_else_is_not_refused_where_a_limit_breaks_the_rule_already(
    cast: make.Cast, cell: Cell, now: datetime
) -> None:
    services.set_limits(
        cast.acme,
        limits=Limits(runs_per_second=1.5),
        typed=ARTICLE,
        override=True,
        now=now,
        **WHY,
    )
    saved = save(cast.acme, now, runs_per_second=1.5, allowed_tools=("look_up",))
    assert [one.tenant for one in saved.assessed.headroom.breakers] == ["acme"]
    assert not saved.overridden
    # Nor is one that lowers it, not yet enough.
    save(cast.acme, now, runs_per_second=1.4)
    with pytest.raises(services.NoHeadroom):
        save(cast.acme, now, runs_per_second=1.45)


def test_no_limit_is_more_than_any(cast: make.Cast, cell: Cell, now: datetime) -> None:
    # It had none and has none: nothing has become worse, and it is named.
    saved = save(cast.acme, now, allowed_tools=("look_up",))
    assert [one.tenant for one in saved.assessed.headroom.breakers] == ["acme"]
    save(cast.acme, now, runs_per_second=0.5)
    with pytest.raises(services.NoHeadroom, match="Nothing would bound"):
        save(cast.acme, now)


def test_another_that_breaks_it_is_named_and_stops_nobody(
    cast: make.Cast, cell: Cell, now: datetime
) -> None:
    huge = Limits(runs_per_second=10.0)
    tenants_services.set_scope(cast.bolt, limits=huge, now=now, **WHY)
    saved = save(cast.acme, now, runs_per_second=0.5)
    assert [one.tenant for one in saved.assessed.headroom.breakers] == ["bolt"]
    with pytest.raises(services.NoHeadroom, match="So do the limits of bolt already"):
        save(cast.acme, now, runs_per_second=2.0)


def test_other_tiers_have_an_account_of_their_own_until_they_come_back(
    cast: make.Cast, cell: Cell, now: datetime
) -> None:
    with pytest.raises(services.NoHeadroom):
        save(cast.acme, now, runs_per_second=2.0)
    services.set_tier(cast.acme, tier="bridge", now=now, **WHY)
    save(cast.acme, now, runs_per_second=2.0, tier="bridge")
    with pytest.raises(services.NoHeadroom):
        services.set_tier(cast.acme, tier="pooled", typed=ARTICLE, now=now, **WHY)
    assert queries.scope_of(cast.acme).tier == "bridge"
    saved = services.set_tier(
        cast.acme, tier="pooled", typed=ARTICLE, override=True, now=now, **WHY
    )
    assert saved.overridden


def test_a_trial_is_held_against_the_quota_when_it_is_adopted(
    cast: make.Cast, cell: Cell, now: datetime
) -> None:
    save(cast.acme, now, runs_per_second=0.5)
    tenants_services.try_scope(cast.acme, limits=Limits(runs_per_second=2.0), now=now, **WHY)
    with pytest.raises(services.NoHeadroom):
        services.adopt_trial(cast.acme, typed=ARTICLE, now=now, **WHY)
    tenants_services.try_scope(cast.acme, limits=Limits(runs_per_second=1.0), now=now, **WHY)
    saved = services.adopt_trial(cast.acme, typed=ARTICLE, now=now, **WHY)
    assert (saved.scope.runs_per_second, saved.scope.trial) == (1.0, False)
    with pytest.raises(tenants_services.NoTrial):
        services.adopt_trial(cast.acme, typed=ARTICLE, now=now, **WHY)


def test_another_trial_is_not_adopted_by_what_was_held_against_the_quota_of_the_one_before(
    cast: make.Cast, cell: Cell, now: datetime
) -> None:
    tenants_services.try_scope(cast.acme, limits=ACME, now=now, **WHY)
    large = Limits(runs_per_second=1_000.0)
    other = partial(tenants_services.try_scope, cast.acme, limits=large, now=now, **WHY)
    before = version(cast.acme)
    with while_it_is_measured(other), pytest.raises(tenants_services.LimitsChanged):
        services.adopt_trial(cast.acme, typed=ARTICLE, now=now, **WHY)
    cast.acme.refresh_from_db()
    assert version(cast.acme) == before
    assert cast.acme.trial is not None
    assert cast.acme.trial.runs_per_second == 1_000.0


def test_a_tenant_does_not_come_back_among_the_pooled_with_limits_that_nobody_assessed(
    cast: make.Cast, cell: Cell, now: datetime
) -> None:
    save(cast.acme, now, runs_per_second=0.5, tier="bridge")
    raise_it = partial(save, cast.acme, now, runs_per_second=1_000.0, tier="bridge")
    with while_it_is_measured(raise_it), pytest.raises(tenants_services.LimitsChanged):
        services.set_tier(cast.acme, tier="pooled", typed=ARTICLE, now=now, **WHY)
    assert queries.scope_of(cast.acme).tier == "bridge"


def test_nothing_is_held_against_a_quota_that_nobody_entered(
    cast: make.Cast, now: datetime
) -> None:
    Cell.objects.update(quota_tokens_per_minute=None)
    saved = save(cast.acme, now, runs_per_second=1_000)
    assert (saved.assessed.headroom.bindings, saved.assessed.headroom.fits) == ((), True)


# --- what is normal -------------------------------------------------------------------------


def test_normal_load_is_measured_over_the_last_hour_or_day_whichever_is_more(
    cast: make.Cast, cell: Cell, now: datetime
) -> None:
    used(cast.bolt, now - DAY, 23 * 60, turns=10, model_calls=30, tokens=1_000)
    used(cast.bolt, now - HOUR, 60, turns=100, model_calls=400, tokens=8_000)
    # The minute that runs is not over, and what is older counts no more.
    used(cast.bolt, now, 1, turns=1, model_calls=10**6, tokens=10**6)
    used(cast.bolt, now - 2 * DAY, 60, turns=1, model_calls=10**6, tokens=10**6)
    found = assess(cast.acme, ACME, now=now + 30 * timedelta(seconds=1))
    assert (found.measured.requests, found.measured.tokens) == (400, 8_000)
    # What is typed counts where it is more.
    more = assess(cast.acme, ACME, typed=Typed(normal_requests_per_minute=500), now=now)
    assert (more.normal.requests, more.normal.tokens) == (500, 8_000)
    less = assess(cast.acme, ACME, typed=Typed(normal_requests_per_minute=5), now=now)
    assert less.normal.requests == 400


def test_a_cell_that_began_an_hour_ago_is_measured_since_then(
    cast: make.Cast, cell: Cell, now: datetime
) -> None:
    used(cast.bolt, now - 10 * MINUTE, 10, turns=1, model_calls=4, tokens=40)
    assert assess(cast.acme, ACME, now=now).measured.requests == 4


def test_a_run_is_measured_by_the_tenants_own_runs_or_by_all(
    cast: make.Cast, cell: Cell, now: datetime
) -> None:
    used(cast.bolt, now - HOUR, 60, turns=3, model_calls=6, tokens=300)
    everybodys = assess(cast.acme, ACME, now=now)
    assert (everybodys.run.model_calls, everybodys.run.tokens) == (2, 100)
    used(cast.acme, now - HOUR, 60, turns=1, model_calls=9, tokens=1_000)
    own = assess(cast.acme, ACME, fresh=True, now=now)
    assert (own.run.model_calls, own.run.tokens) == (9, 1_000)
    assert own.after.load.requests == 270


def test_tenants_that_live_elsewhere_or_have_their_own_account_are_not_counted(
    cast: make.Cast, cell: Cell, now: datetime
) -> None:
    used(cast.core, now - HOUR, 60, turns=1, model_calls=900, tokens=10)
    assert assess(cast.acme, ACME, now=now).measured.requests == 900
    tenants_services.set_tier(cast.core, tier="silo", now=now, **WHY)
    assert assess(cast.acme, ACME, fresh=True, now=now).measured.requests is None
    dune = make.tenant("dune", cell=cast.other_cell, store=cast.other_store, now=now)
    used(dune, now - HOUR, 60, turns=1, model_calls=900, tokens=10)
    assert assess(cast.acme, ACME, fresh=True, now=now).measured.requests is None


def test_a_cell_is_measured_once_a_minute_however_often_somebody_asks(
    cast: make.Cast, cell: Cell, now: datetime
) -> None:
    used(cast.bolt, now - HOUR, 60, turns=1, model_calls=100, tokens=10)
    with CaptureQueriesContext(connection) as asked:
        for rate in (0.5, 0.25, 0.125):
            assert assess(cast.acme, Limits(runs_per_second=rate), now=now).normal.requests == 100
    assert sum("capacity_usageminute" in query["sql"] for query in asked) == 1


def test_limits_are_let_hold_by_what_is_measured_then(
    cast: make.Cast, cell: Cell, now: datetime
) -> None:
    assert assess(cast.acme, ACME, now=now).measured.requests is None
    used(cast.bolt, now - HOUR, 60, turns=1, model_calls=899, tokens=10)
    with pytest.raises(services.NoHeadroom):
        services.set_limits(cast.acme, limits=ACME, now=now, **WHY)
    # The next minute everybody reads what was used by then.
    used(cast.bolt, now, 1, turns=1, model_calls=899, tokens=10)
    later = assess(cast.acme, ACME, now=now + MINUTE)
    assert later.measured.requests == 899


def test_tokens_bind_where_they_run_out_first(cast: make.Cast, cell: Cell, now: datetime) -> None:
    tenants_services.verify_quota(cell, tokens_per_minute=1_000_000, by="ada", now=now)
    typed = replace(ARTICLE, tokens_per_run=8_000, normal_tokens_per_minute=700_000)
    limits = Limits(runs_per_second=0.5)
    with pytest.raises(services.NoHeadroom, match="240,000 tokens per minute"):
        services.set_limits(cast.acme, limits=limits, typed=typed, now=now, **WHY)


def test_a_raised_budget_lets_its_tenant_go_on_at_once(
    cast: make.Cast, cell: Cell, now: datetime
) -> None:
    budget = replace(ACME, daily_token_budget=1_000)
    services.set_limits(cast.acme, limits=budget, typed=ARTICLE, now=now, **WHY)
    UsageDay.objects.create(tenant=cast.acme, day=now.date(), tokens=1_500)
    services.mark_budgets(now=now)
    cast.acme.refresh_from_db()
    assert cast.acme.budget_spent_until is not None
    raised = replace(ACME, daily_token_budget=2_000)
    services.set_limits(cast.acme, limits=raised, typed=ARTICLE, now=now, **WHY)
    cast.acme.refresh_from_db()
    assert cast.acme.budget_spent_until is None
    assert Scope.objects.filter(tenant=cast.acme).count() == 3
