"""Limits for programs: what holds, what would happen, and the verbs that change it."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection

from capacity.api_limits import HeadroomOut, SavedOut, TenantLimitsOut
from durable.clock import database_now
from tenants import services
from tenants.domain.limits import Limits
from tenants.models import AuditEntry, Cell, PolicyEntry, Scope, Tenant
from tests import make

pytestmark = pytest.mark.django_db
ACME = "/ops/tenants/acme"
ESTIMATE = {"normal_requests_per_minute": 600, "model_calls_per_run": 4, "run_seconds": 12}
LIMITS = {
    "max_concurrent_runs": 10,
    "runs_per_second": 0.5,
    "daily_token_budget": 30_000_000,
    "max_model_calls_per_run": 12,
    "allowed_tools": ["look_up"],
    "exact_budget": True,
    "weight": 2.0,
}
WHY = {"reason": "their replay job", "estimate": ESTIMATE}


@pytest.fixture
def cell(cast: make.Cast) -> Cell:
    services.verify_quota(
        cast.cell,
        tokens_per_minute=10**9,
        requests_per_minute=1_000,
        by="ada",
        now=database_now(),
    )
    return cast.cell


def scope(slug: str = "acme") -> Scope:
    return Scope.objects.filter(tenant__slug=slug, trial=False).order_by("-version")[0]


def test_limits_are_set_held_against_the_quota_and_read_back(cell: Cell, operator: Any) -> None:
    for other in ("bolt", "core"):
        operator.post(f"/ops/tenants/{other}/limits", {"runs_per_second": 0.1, **WHY})
    answer = operator.post(f"{ACME}/limits", {**LIMITS, **WHY})
    assert answer.status_code == 200, answer.content
    saved = answer.json()
    assert saved.keys() == SavedOut.model_fields.keys()
    assert (saved["limits"]["version"], saved["limits"]["by"]) == (
        2,
        "otto (token operator of tests)",
    )
    assert saved["headroom"].keys() == HeadroomOut.model_fields.keys()
    [binding, _] = saved["headroom"]["quotas"]
    assert (binding["unit"], binding["peak"], binding["room"]) == ("requests", 720, 900)
    assert (saved["headroom"]["runs_per_minute"], saved["headroom"]["bound_by"]) == (30, "rate")
    read = operator.get(f"{ACME}/limits").json()
    assert read.keys() == TenantLimitsOut.model_fields.keys()
    assert read["limits"] == saved["limits"]
    for name, value in LIMITS.items():
        assert read["limits"][name] == value
    assert PolicyEntry.objects.get(tenant__slug="acme").document["scope"]["version"] == 2


def test_what_is_left_out_stays_and_null_takes_a_limit_away(cell: Cell, operator: Any) -> None:
    operator.post(f"{ACME}/limits", {**LIMITS, **WHY})
    operator.post(f"{ACME}/limits", {"max_concurrent_runs": None, **WHY})
    now = scope()
    assert (now.max_concurrent_runs, now.runs_per_second, now.weight) == (None, 0.5, 2.0)
    assert now.allowed_tools == ["look_up"]
    operator.post(f"{ACME}/limits", {"allowed_tools": [], **WHY})
    assert scope().allowed_tools == []
    operator.post(f"{ACME}/limits", {"allowed_tools": None, **WHY})
    assert scope().allowed_tools is None


@pytest.mark.parametrize("verb", ["limits", "trial"])
def test_of_two_edits_at_once_the_second_writes_nothing_of_the_first_back(
    cell: Cell, operator: Any, cast: make.Cast, verb: str
) -> None:
    def wrapper(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        nonlocal other
        result = execute(sql, params, many, context)
        if other and 'FROM "tenants_scope"' in sql:
            other = False
            lowered = Limits(runs_per_second=0.1)
            services.set_scope(
                cast.acme, limits=lowered, by="bob", reason="less", now=database_now()
            )
        return result

    other = True
    with connection.execute_wrapper(wrapper):
        answer = operator.post(f"{ACME}/{verb}", {"max_concurrent_runs": 7, "reason": "more"})
    assert answer.status_code == 409
    assert "bob" in answer.json()["detail"]
    assert (scope().runs_per_second, scope().max_concurrent_runs) == (0.1, None)


def test_what_has_no_room_is_refused_unless_it_is_overridden(cell: Cell, operator: Any) -> None:
    body = {"runs_per_second": 1.5, **WHY}
    answer = operator.post(f"{ACME}/limits", body)
    assert (answer.status_code, answer.json()["error"]) == (409, "no_headroom")
    assert "acme breaks" in answer.json()["detail"]
    assert scope().version == 1
    answer = operator.post(f"{ACME}/limits", {**body, "override": True})
    assert (answer.status_code, answer.json()["overridden"]) == (200, True)
    assert AuditEntry.objects.filter(verb="tenant.override_headroom").count() == 1


def test_a_dry_run_says_the_same_and_changes_nothing(cell: Cell, operator: Any) -> None:
    before = AuditEntry.objects.count()
    answer = operator.post(
        f"{ACME}/limits/headroom", {"runs_per_second": 1.5, "estimate": ESTIMATE}
    )
    assert answer.status_code == 200, answer.content
    told = answer.json()
    assert told.keys() == HeadroomOut.model_fields.keys()
    assert (told["fits"], told["refused"]) == (False, True)
    # Nobody has measured it, and the estimate does not say it either.
    assert told["unknown"] == ["tokens_per_run"]
    assert told["breakers"][0]["tenant"] in ("acme", "bolt", "core")
    assert {"acme", "bolt", "core"} == {one["tenant"] for one in told["breakers"]}
    # Those without limits have no bound, and JSON has no word for that.
    unlimited = next(one for one in told["breakers"] if one["tenant"] == "bolt")
    assert (unlimited["limit"], unlimited["peak"]) == (None, None)
    assert (scope().version, AuditEntry.objects.count()) == (1, before)


@pytest.mark.parametrize(
    "change",
    [
        {"max_concurrent_runs": 0},
        {"max_concurrent_runs": -3},
        {"max_concurrent_runs": 10**40},
        {"max_concurrent_runs": 1.5},
        {"runs_per_second": float("nan")},
        {"runs_per_second": float("inf")},
        {"runs_per_second": "fast"},
        {"daily_token_budget": 2**62},
        {"exact_budget": True},
        {"allowed_tools": ["a\0b"]},
        {"allowed_tools": ["a", "a"]},
        {"allowed_tools": ["\ud800"]},
        {"allowed_tools": ["t"] * 2_000},
        {"tier": "gold"},
        {"weight": -1},
        {"weight": None},
        {"estimate": {"run_seconds": -1}},
        {"estimate": {"model_calls_per_run": float("nan")}},
        {"reason": "a\0b"},
        {"reason": ""},
        {"tenant": "bolt"},
    ],
    ids=lambda change: ascii(change)[:60],
)
def test_limits_that_make_no_sense_change_nothing(
    cell: Cell, operator: Any, change: dict[str, Any]
) -> None:
    answer = operator.post(f"{ACME}/limits", {"runs_per_second": 0.5, **WHY, **change})
    assert answer.status_code == 422, answer.content
    assert answer.json()["detail"]
    assert (scope().version, Scope.objects.filter(tenant__slug="acme").count()) == (1, 1)


def test_a_trial_is_begun_adopted_and_ended(cell: Cell, operator: Any) -> None:
    operator.post(f"{ACME}/limits", {**LIMITS, **WHY})
    tried = operator.post(
        f"{ACME}/trial", {"max_concurrent_runs": 2, "reason": "would it hurt"}
    ).json()
    assert (tried["max_concurrent_runs"], tried["runs_per_second"], tried["trial"]) == (
        2,
        0.5,
        True,
    )
    assert operator.get(f"{ACME}/limits").json()["trial"]["version"] == tried["version"]
    answer = operator.post(f"{ACME}/trial/adopt", WHY)
    assert answer.status_code == 200, answer.content
    assert answer.json()["limits"]["max_concurrent_runs"] == 2
    for verb in ("trial/end", "trial/adopt"):
        refused = operator.post(f"{ACME}/{verb}", {"reason": "over"})
        assert (refused.status_code, refused.json()["error"]) == (409, "no_trial")
    operator.post(f"{ACME}/trial", {"max_concurrent_runs": 1, "reason": "and this"})
    ended = operator.post(f"{ACME}/trial/end", {"reason": "it would"})
    assert (ended.status_code, ended.json()["trial"]) == (200, None)


def test_the_history_has_every_version_newest_first(cell: Cell, operator: Any, viewer: Any) -> None:
    operator.post(f"{ACME}/limits", {**LIMITS, **WHY})
    operator.post(f"{ACME}/trial", {"max_concurrent_runs": 2, "reason": "would it hurt"})
    read = viewer.get(f"{ACME}/limits/history").json()
    assert [(one["version"], one["trial"]) for one in read["items"]] == [
        (3, True),
        (2, False),
        (1, False),
    ]
    assert read["items"][0]["reason"] == "would it hurt"
    assert viewer.get(f"{ACME}/limits/history?after=3").json()["items"][0]["version"] == 2


def test_a_tier_and_a_rotation_are_configuration(cell: Cell, operator: Any) -> None:
    answer = operator.post(f"{ACME}/tier", {"tier": "bridge", "reason": "a large customer"})
    assert (answer.status_code, answer.json()["limits"]["tier"]) == (200, "bridge")
    assert Tenant.objects.get(slug="acme").tier == "bridge"
    answer = operator.post(f"{ACME}/rotate", {"reason": "its key leaked"})
    assert answer.json() == {"tenant": "acme", "runner_generation": 2}
    assert operator.post(f"{ACME}/tier", {"tier": "gold", "reason": "x"}).status_code == 409


VERBS = ["limits", "limits/headroom", "trial", "trial/end", "trial/adopt", "tier", "rotate"]


@pytest.mark.parametrize("verb", VERBS)
def test_a_viewer_changes_no_limits_and_nobody_those_of_a_tenant_that_is_not_there(
    cell: Cell, viewer: Any, operator: Any, verb: str
) -> None:
    body = {"tier": "bridge"} if verb == "tier" else {}
    assert viewer.post(f"{ACME}/{verb}", body).status_code == 403
    assert operator.post(f"/ops/tenants/nobody/{verb}", body).status_code == 404
    assert Scope.objects.filter(tenant__slug="acme").count() == 1


def test_a_quota_is_entered_in_requests_too(cast: make.Cast, admin: Any) -> None:
    path = f"/ops/cells/{cast.cell.slug}/quota"
    answer = admin.post(path, {"tokens_per_minute": 5_000_000, "requests_per_minute": 1_000})
    assert answer.status_code == 200, answer.content
    assert answer.json()["quota_requests_per_minute"] == 1_000
    # Left out, it stays.
    answer = admin.post(path, {"tokens_per_minute": 6_000_000})
    assert answer.json()["quota_requests_per_minute"] == 1_000
    assert admin.post(path, {"tokens_per_minute": 9, "requests_per_minute": 0}).status_code == 409
    line = AuditEntry.objects.filter(verb="cell.verify_quota").order_by("-pk")[0]
    assert line.after["quota_requests_per_minute"] == 1_000
