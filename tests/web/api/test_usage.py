"""A tenant reads its own usage and nobody else's; operators read all of it."""

from __future__ import annotations

import csv
import io
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from capacity import services as capacity
from capacity.domain.usage import day_of
from capacity.models import UsageDay
from durable.clock import database_now
from tenants import services
from tenants.domain.roles import TokenRole
from tenants.models import AuditEntry, RuntimeInstance, Scope, Tenant, UsageLine
from tests import make
from tests.web.api.conftest import Caller, caller

FORMULA = '=cmd|"/c calc"!A1'


@pytest.fixture
def at(db: None) -> datetime:
    return database_now()


@pytest.fixture
def used(cast: make.Cast, at: datetime) -> make.Cast:
    """acme used and was refused something this minute, bolt used more, core nothing."""
    instance = RuntimeInstance.objects.create(
        key="i",
        cell=cast.cell,
        name="agents-1",
        boot="b",
        longest_turn_seconds=60,
        longest_tool_seconds=30,
        joined_at=at,
        lease_until=at + timedelta(minutes=15),
        in_flight={"acme": 3},
    )
    minute = at.replace(second=0, microsecond=0)
    acme: dict[str, Any] = {"turns": 4, "model_calls": 9, "tokens": 700}
    acme |= {"refused": {"rate": 2, "budget": 5}, "would_refuse": {"concurrency": 1}}
    for seq, (tenant, counts) in enumerate([(cast.acme, acme), (cast.bolt, {"tokens": 9_300})], 1):
        UsageLine.objects.create(instance=instance, seq=seq, tenant=tenant, minute=minute, **counts)
    scope = Scope.objects.get(tenant=cast.acme)
    scope.pk, scope.version = None, 2
    scope.daily_token_budget, scope.runs_per_second, scope.max_concurrent_runs = 1_000, 5.0, 10
    scope.save(force_insert=True)
    scope.pk, scope.version, scope.trial, scope.max_concurrent_runs = None, 3, True, 2
    scope.at = at
    scope.save(force_insert=True)
    Tenant.objects.filter(pk=cast.acme.pk).update(trial=scope, time_zone="Asia/Tokyo")
    capacity.roll_up(now=at)
    return cast


def person(cast: make.Cast, tenant: Tenant, name: str = "tess") -> Caller:
    client = Client(enforce_csrf_checks=True)
    user = User.objects.create_user(name)
    services.add_member(user, tenant=tenant, by="anna", now=database_now())
    client.force_login(user)
    return Caller(client)


# --- a tenant's own -------------------------------------------------------------------------


def test_a_tenants_token_reads_what_it_used_and_why_it_was_refused(
    used: make.Cast, tenant_program: Caller, at: datetime
) -> None:
    answer = tenant_program.get("/tenants/acme/usage")
    assert answer.status_code == 200
    body = answer.json()
    assert (body["tenant"], body["time_zone"]) == ("acme", "Asia/Tokyo")
    assert body["day"] == str(day_of(at, "Asia/Tokyo"))
    assert body["resets_at"].endswith("T15:00:00Z")
    assert (body["today"]["tokens"], body["today"]["turns"]) == (700, 4)
    assert body["limits"]["daily_token_budget"] == 1_000
    assert (body["limits"]["max_concurrent_runs"], body["running"]) == (10, 3)
    assert (body["tokens_left"], body["refused_until"]) == (300, None)
    first, second = body["refusals"]
    assert (first["reason"], first["turns"], first["limit"]) == (
        "budget",
        5,
        "now 1,000 tokens a day",
    )
    assert (second["reason"], second["limit"]) == ("rate", "now 5 runs a second")
    assert "larger daily token budget" in first["more"]
    assert body["trial"]["limits"]["max_concurrent_runs"] == 2
    assert body["trial"]["today"] == body["trial"]["in_all"] == {"concurrency": 1}


def test_a_tenants_person_reads_the_same(used: make.Cast, tenant_program: Caller) -> None:
    person_reads = person(used, used.acme).get("/tenants/acme/usage")
    assert person_reads.status_code == 200
    assert person_reads.json()["today"] == tenant_program.get("/tenants/acme/usage").json()["today"]


@pytest.mark.parametrize("slug", ["bolt", "core", "nobody", "acme-", "ACME"])
def test_another_tenants_usage_is_not_there(
    used: make.Cast, tenant_program: Caller, slug: str
) -> None:
    for asking in (tenant_program, person(used, used.acme)):
        answer = asking.get(f"/tenants/{slug}/usage")
        assert answer.status_code == 404
        assert answer.json()["error"] == "not_found"
        assert "9300" not in answer.content.decode()


@pytest.mark.parametrize("slug", ["bolt", "nobody"])
def test_whether_there_is_another_tenant_is_not_told(
    used: make.Cast, tenant_program: Caller, slug: str
) -> None:
    said = tenant_program.get(f"/tenants/{slug}/usage").json()["detail"]
    assert said.replace(slug, "X") == (
        "There is no tenant X here: you read one tenant's usage, and its slug is another."
    )


@pytest.mark.parametrize("role", ["viewer", "operator", "admin", "signed_in"])
def test_operators_read_every_tenants_usage(
    used: make.Cast, role: str, request: pytest.FixtureRequest
) -> None:
    asking: Caller = request.getfixturevalue(role)
    for path in ("/tenants/bolt/usage", "/ops/tenants/bolt/usage"):
        assert asking.get(path).json()["today"]["tokens"] == 9_300
        assert asking.get(path.replace("bolt", "nobody")).status_code == 404


@pytest.mark.parametrize("role", ["runtime", "gateway", "stranger"])
def test_other_tokens_read_no_usage(
    used: make.Cast, role: str, request: pytest.FixtureRequest
) -> None:
    asking: Caller = request.getfixturevalue(role)
    assert asking.get("/tenants/acme/usage").status_code == 403


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer forged"},
        {"Authorization": "Bearer "},
        {"Authorization": "Basic YWNtZTphY21l"},
        {"Authorization": "Bearer \x00\xff"},
        {"X-Tenant": "acme"},
    ],
)
def test_without_a_token_that_is_in_force_nothing_is_told(
    used: make.Cast, nobody: Caller, headers: dict[str, str]
) -> None:
    for slug in ("acme", "nobody"):
        assert nobody.get(f"/tenants/{slug}/usage", **headers).status_code == 401


def test_a_wrong_token_is_not_made_good_by_a_sign_in(used: make.Cast) -> None:
    asking = person(used, used.acme)
    answer = asking.get("/tenants/acme/usage", Authorization="Bearer forged")
    assert answer.status_code == 401


def test_a_tenant_named_beside_the_address_changes_nothing(
    used: make.Cast, tenant_program: Caller
) -> None:
    body = {"tenant": "bolt", "slug": "bolt"}
    for path in ("/tenants/acme/usage?tenant=bolt&slug=bolt", "/tenants/acme/usage?from=x"):
        answer = tenant_program.call("GET", path, body, **{"X-Tenant": "bolt"})
        assert (answer.status_code, answer.json()["tenant"]) == (200, "acme")


def test_a_giant_body_is_not_read(used: make.Cast, tenant_program: Caller) -> None:
    answer = tenant_program.call("GET", "/tenants/acme/usage", b"x" * 5_000_000)
    assert answer.status_code in (200, 413)


def test_a_revoked_token_reads_nothing(
    used: make.Cast, at: datetime, monkeypatch: pytest.MonkeyPatch
) -> None:
    from platform_admin.api import tokens

    asking = caller(TokenRole.TENANT, tenant=used.acme)
    assert asking.get("/tenants/acme/usage").status_code == 200
    services.revoke_token(used.acme.tokens.get(), by="anna", now=at)
    tokens.clear()  # a second later
    assert asking.get("/tenants/acme/usage").status_code == 401


def test_a_member_who_was_removed_reads_nothing(used: make.Cast) -> None:
    asking = person(used, used.acme)
    services.remove_member(
        User.objects.get(username="tess"), tenant=used.acme, by="anna", now=database_now()
    )
    assert asking.get("/tenants/acme/usage").status_code == 403


@pytest.mark.parametrize(
    "path",
    [
        "/ops/tenants",
        "/ops/tenants/acme",
        "/ops/tenants/acme/usage",
        "/ops/usage",
        "/ops/usage/days",
        "/ops/usage/export.csv",
        "/ops/usage/reconciliation",
        "/ops/moves",
    ],
)
def test_a_tenants_people_and_programs_reach_nothing_of_the_operators(
    used: make.Cast, tenant_program: Caller, path: str
) -> None:
    assert person(used, used.acme).get(path).status_code == 403
    assert tenant_program.get(path).status_code == 403


def test_a_spent_budget_says_until_when(
    used: make.Cast, tenant_program: Caller, at: datetime
) -> None:
    UsageDay.objects.filter(tenant=used.acme).update(tokens=1_000)
    assert capacity.mark_budgets(now=at) == 1
    body = tenant_program.get("/tenants/acme/usage").json()
    assert (body["tokens_left"], body["refused_until"]) == (0, body["resets_at"])


# --- operators ------------------------------------------------------------------------------


def test_a_cells_usage_names_who_used_most(used: make.Cast, viewer: Caller) -> None:
    body = viewer.get(f"/ops/cells/{used.cell.slug}/usage").json()
    assert (body["tokens"], body["quota_tokens_per_minute"]) == (10_000, 5_000_000)
    assert [(one["tenant"], one["share"], one["refused"]) for one in body["largest"]] == [
        ("bolt", 0.93, 0),
        ("acme", 0.07, 7),
    ]
    assert viewer.get("/ops/usage").json()["tokens"] == 10_000
    other = viewer.get(f"/ops/cells/{used.other_cell.slug}/usage?hours=48").json()
    assert (other["tokens"], other["largest"], other["rest"]) == (0, [], None)
    assert viewer.get("/ops/cells/none/usage").status_code == 404
    assert viewer.get("/ops/usage?hours=168").json()["tokens"] == 10_000
    assert viewer.get("/ops/usage?hours=745").status_code == 422


def test_days_are_listed_by_tenant_and_time(used: make.Cast, viewer: Caller, at: datetime) -> None:
    span = f"from={at.date() - timedelta(days=1)}&to={at.date() + timedelta(days=1)}"
    items = viewer.get(f"/ops/usage/days?{span}").json()["items"]
    assert sorted((one["tenant"], one["tokens"]) for one in items) == [
        ("acme", 700),
        ("bolt", 9_300),
    ]
    [one] = viewer.get(f"/ops/usage/days?{span}&tenant=acme").json()["items"]
    assert one["refused"] == {"rate": 2, "budget": 5}
    assert viewer.get("/ops/usage/days?tenant=nobody").status_code == 404
    assert viewer.get("/ops/usage/days?from=2001-01-01&to=2001-12-31").json()["items"] == []


@pytest.mark.parametrize(
    "span",
    [
        "from=yesterday",
        "from=2026-03-02&to=2026-03-01",
        "from=2020-01-01&to=2026-03-01",
        "from=0001-01-01&to=0001-01-02",
        "from=9999-12-31&to=9999-12-31",
        "from=2026-02-30",
        "from=%00",
    ],
)
@pytest.mark.parametrize(
    "path", ["/ops/usage/days", "/ops/usage/export.csv", "/ops/usage/reconciliation"]
)
def test_days_that_are_none_are_refused(
    used: make.Cast, operator: Caller, path: str, span: str
) -> None:
    assert operator.get(f"{path}?{span}").status_code == 422


def read(answer: Any) -> list[dict[str, str]]:
    text = b"".join(answer.streaming_content).decode()
    return list(csv.DictReader(io.StringIO(text)))


def test_an_export_has_a_line_a_day_and_runs_nothing(
    used: make.Cast, operator: Caller, at: datetime
) -> None:
    Tenant.objects.filter(pk=used.acme.pk).update(name=FORMULA)
    span = f"from={at.date() - timedelta(days=1)}&to={at.date() + timedelta(days=1)}"
    signed_in = Client()
    signed_in.force_login(User.objects.get(username="otto"))
    for answer in (
        operator.get(f"/ops/usage/export.csv?{span}"),
        signed_in.get(f"/usage/export.csv?{span}"),
    ):
        assert answer.status_code == 200
        assert answer.streaming
        assert answer["Content-Type"] == "text/csv; charset=utf-8"
        acme, bolt = read(answer)
        assert (acme["tenant"], acme["name"], acme["tokens"]) == ("acme", f"'{FORMULA}", "700")
        assert (acme["refused_rate"], acme["refused_budget"], acme["refused_quota"]) == (
            "2",
            "5",
            "0",
        )
        assert (bolt["tokens"], bolt["would_refuse"]) == ("9300", "0")


def test_only_an_operator_takes_the_file_away(used: make.Cast, viewer: Caller) -> None:
    assert viewer.get("/ops/usage/export.csv").status_code == 403
    client = Client()
    client.force_login(User.objects.get(username="vera"))
    assert client.get("/usage/export.csv").status_code == 403


def test_an_export_that_is_asked_for_wrongly_says_why(used: make.Cast, operator: Caller) -> None:
    client = Client()
    client.force_login(User.objects.get(username="otto"))
    answer = client.get("/usage/export.csv?from=2026-03-02&to=2026-03-01")
    assert (answer.status_code, answer["Content-Type"]) == (422, "text/plain")
    assert "is before" in answer.content.decode()
    assert client.get("/usage/export.csv?tenant=nobody").status_code == 404
    assert client.get("/usage/export.csv?tenant=acme").status_code == 200


def test_a_reconciliation_is_read_by_programs(used: make.Cast, viewer: Caller) -> None:
    body = viewer.get("/ops/usage/reconciliation?tenant=bolt").json()
    assert (body["compared"], body["unexplained"]) == (1, 0)
    [row] = body["rows"]
    assert row["reported"] == row["invoiced"] == {"turns": 0, "model_calls": 0, "tokens": 9_300}


# --- who is of a tenant ---------------------------------------------------------------------


def test_an_admin_adds_lists_and_removes_a_tenants_people(
    used: make.Cast, admin: Caller, operator: Caller
) -> None:
    User.objects.create_user("tess")
    path = "/ops/tenants/acme/members"
    for no in (operator.get(path), operator.post(path, {"name": "tess"})):
        assert no.status_code == 403
    made = admin.post(path, {"name": "tess"})
    assert (made.status_code, made.json()["tenant"]) == (201, "acme")
    assert AuditEntry.objects.get(verb="member.add").who == "anna (token operator of tests)"
    assert [one["name"] for one in admin.get(path).json()["items"]] == ["tess"]
    assert admin.post(path, {"name": "tess"}).json()["error"] == "already_a_member"
    assert admin.post(path, {"name": "otto"}).json()["error"] == "has_a_role"
    assert admin.post(path, {"name": "nobody"}).status_code == 404
    assert admin.post("/ops/tenants/none/members", {"name": "tess"}).status_code == 404
    assert admin.post(f"{path}/remove", {"name": "tess"}).status_code == 204
    assert admin.post(f"{path}/remove", {"name": "tess"}).json()["error"] == "not_a_member"
    assert admin.get(path).json()["items"] == []
