"""The operators' API: who may call what, one shape for refusals, a line for every write."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import OperationalError

from durable.clock import database_now
from tenants import queries, services
from tenants.api import page
from tenants.domain.roles import TokenRole
from tenants.models import AuditEntry, Cell, Region, RuntimeInstance, Store, Tenant, Token
from tests import make

pytestmark = pytest.mark.django_db
READS = ["regions", "cells", "stores", "tenants", "tenants/acme", "instances", "moves"]


@pytest.fixture
def instance(cast: make.Cast) -> RuntimeInstance:
    return services.join(
        cast.cell,
        name="agents-1",
        build="",
        boot="boot-1",
        longest_turn_seconds=60,
        longest_tool_seconds=30,
        plugins=[],
        stores=[],
        replaces=None,
        # Long enough silent to be declared dead.
        now=database_now() - timedelta(minutes=1),
    )


def writes(instance: RuntimeInstance) -> dict[str, dict[str, Any]]:
    soon = (database_now() + timedelta(days=1)).isoformat()
    return {
        "regions": {"slug": "us1", "name": "US 1"},
        "cells": {"slug": "cell-us1-a", "region": "eu1"},
        "cells/cell-eu1-a/quota": {"tokens_per_minute": 9},
        "cells/cell-eu1-a/url": {"url": "https://a.eu", "reason": "new proxy"},
        "stores": {
            "key": "store-eu1-c",
            "region": "eu1",
            "kind": "adk-sql",
            "address_from": "env:STORE_C",
            "artifacts_from": "env:ARTIFACTS_C",
        },
        "stores/store-eu1-b/services": {
            "artifacts_from": "file:/run/secrets/artifacts",
            "memory_from": "env:MEMORY_B",
            "reason": "agents keep files",
        },
        "tenants": {
            "slug": "dune",
            "name": "Dune",
            "app_name": "support.dune",
            "cell": "cell-eu1-a",
            "store": "store-eu1-a",
        },
        "tenants/acme/internal": {"internal": True, "reason": "nobody's any more"},
        f"instances/{instance.key}/dead": {"reason": "host is gone"},
        "tokens": {"name": "gw", "role": "gateway", "expires_at": soon},
    }


ADMINS_ONLY = {"regions", "cells", "cells/cell-eu1-a/quota", "cells/cell-eu1-a/url"} | {
    "stores",
    "stores/store-eu1-b/services",
    "tenants",
    "tenants/acme/internal",
    "tokens",
}


def shape(answer: Any) -> tuple[int, str]:
    body = answer.json()
    assert body.keys() == {"error", "detail", "retry_after_seconds"}
    return answer.status_code, body["error"]


@pytest.mark.parametrize("path", READS)
def test_a_viewer_reads_everything_but_tokens(cast: make.Cast, viewer: Any, path: str) -> None:
    assert viewer.get(f"/ops/{path}").status_code == 200


def test_only_an_admin_sees_tokens(cast: make.Cast, operator: Any, admin: Any) -> None:
    assert shape(operator.get("/ops/tokens")) == (403, "forbidden")
    answer = admin.get("/ops/tokens")
    assert answer.status_code == 200
    digests = Token.objects.values_list("digest", flat=True)
    assert not any(digest in answer.content.decode() for digest in digests)


def test_a_viewer_writes_nothing(cast: make.Cast, viewer: Any, instance: RuntimeInstance) -> None:
    before = AuditEntry.objects.count()
    for path, body in writes(instance).items():
        assert shape(viewer.post(f"/ops/{path}", body)) == (403, "forbidden")
    assert AuditEntry.objects.count() == before


def test_an_operator_does_not_do_an_admins_work(
    cast: make.Cast, operator: Any, instance: RuntimeInstance
) -> None:
    for path, body in writes(instance).items():
        answer = operator.post(f"/ops/{path}", body)
        assert (answer.status_code == 403) == (path in ADMINS_ONLY), path


def test_every_write_of_an_admin_is_carried_out_and_audited_with_the_request(
    cast: make.Cast, admin: Any, instance: RuntimeInstance
) -> None:
    for number, (path, body) in enumerate(writes(instance).items()):
        before = AuditEntry.objects.count()
        answer = admin.post(f"/ops/{path}", body, **{"X-Request-ID": f"request-{number:04}"})
        assert answer.status_code in {200, 201}, (path, answer.content)
        line = AuditEntry.objects.first()
        assert line is not None
        assert AuditEntry.objects.count() == before + 1
        assert line.who == "anna (token operator of tests)"
        assert line.request_id == f"request-{number:04}" == answer["X-Request-ID"]
    assert Region.objects.filter(slug="us1").exists()
    assert Cell.objects.get(slug="cell-eu1-a").url == "https://a.eu"
    assert Cell.objects.get(slug="cell-eu1-a").quota_tokens_per_minute == 9
    assert Store.objects.filter(key="store-eu1-c").exists()
    assert Tenant.objects.get(slug="dune").placement.cell == cast.cell
    assert Tenant.objects.get(slug="acme").internal
    assert admin.get("/ops/tenants/acme").json()["internal"]
    instance.refresh_from_db()
    assert instance.dead_asked_why == "host is gone"


def test_somebody_without_a_role_does_nothing(cast: make.Cast, stranger: Any) -> None:
    assert shape(stranger.get("/ops/tenants")) == (403, "forbidden")


def test_a_role_that_was_taken_away_is_gone_at_once(cast: make.Cast, operator: Any) -> None:
    assert operator.get("/ops/tenants").status_code == 200
    Token.objects.get().user.groups.clear()  # type: ignore[union-attr]
    assert shape(operator.get("/ops/tenants")) == (403, "forbidden")


# --- browsers -------------------------------------------------------------------------------


def test_a_signed_in_operator_reads_and_writes_with_the_csrf_token(
    cast: make.Cast, signed_in: Any, instance: RuntimeInstance
) -> None:
    assert signed_in.get("/ops/tenants").status_code == 200
    path, body = f"/ops/instances/{instance.key}/dead", {"reason": "host is gone"}
    assert shape(signed_in.post(path, body)) == (403, "forbidden")
    signed_in.client.cookies["csrftoken"] = "a" * 32
    answer = signed_in.post(path, body, **{"X-CSRFToken": "a" * 32})
    assert answer.status_code == 200, answer.content
    assert AuditEntry.objects.filter(who="olga", verb="instance.ask_dead").exists()


def test_a_wrong_token_is_not_made_good_by_a_cookie(cast: make.Cast, signed_in: Any) -> None:
    answer = signed_in.get("/ops/tenants", Authorization="Bearer wrong")
    assert shape(answer) == (401, "unauthorized")


def test_a_session_is_no_runtime(cast: make.Cast, signed_in: Any) -> None:
    assert shape(signed_in.get("/placement")) == (401, "unauthorized")


# --- what is answered -----------------------------------------------------------------------


def test_a_tenant_is_answered_with_its_home(cast: make.Cast, viewer: Any) -> None:
    services.publish(cast.acme, cast.cell, accepts="none")
    body = viewer.get("/ops/tenants/acme").json()
    assert body["cell"] == "cell-eu1-a"
    assert body["store"] == "store-eu1-a"
    assert body["accepts"] == "none"
    assert body["placement_version"].startswith(f"{queries.epoch()}.")


@pytest.mark.parametrize(
    "path",
    ["tenants/nobody", "instances?cell=nowhere", "nothing", "tenants/Not%20a%20slug", "moves/999"],
)
def test_what_is_not_there_is_404_in_the_one_shape(cast: make.Cast, viewer: Any, path: str) -> None:
    assert shape(viewer.get(f"/ops/{path}")) == (404, "not_found")


@pytest.mark.parametrize("path", ["", "nothing", "ops/tenants/", "runtime/policy/x"])
def test_an_address_that_leads_nowhere_is_404_in_the_one_shape(nobody: Any, path: str) -> None:
    assert shape(nobody.get(f"/{path}")) == (404, "not_found")
    # Django's CSRF page would be HTML, and a program has no cookie.
    assert shape(nobody.post(f"/{path}")) == (404, "not_found")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("PUT", "/ops/regions", "GET, POST"), ("GET", "/runtime/reports", "POST")],
)
def test_a_wrong_method_is_405_in_the_one_shape(
    nobody: Any, method: str, path: str, allowed: str
) -> None:
    answer = nobody.call(method, path)
    assert shape(answer) == (405, "method_not_allowed")
    assert answer["Allow"] == allowed
    assert allowed in answer.json()["detail"]


def test_a_refusal_is_409_with_its_word(cast: make.Cast, admin: Any) -> None:
    body = {"slug": "eu1", "name": "again"}
    assert shape(admin.post("/ops/regions", body)) == (409, "slug_taken")


def test_a_pasted_address_is_refused_without_being_repeated(cast: make.Cast, admin: Any) -> None:
    body = {
        "key": "pasted",
        "region": "eu1",
        "kind": "adk-sql",
        "address_from": "postgresql://mover:hunter2@db/acme",
    }
    answer = admin.post("/ops/stores", body)
    assert shape(answer) == (409, "not_a_reference")
    assert b"hunter2" not in answer.content


@pytest.mark.parametrize("column", ["artifacts_from", "memory_from"])
def test_a_pasted_address_of_another_service_is_refused_too(
    cast: make.Cast, admin: Any, column: str
) -> None:
    body = {"artifacts_from": "", "memory_from": "", "reason": "agents keep files"}
    answer = admin.post(
        "/ops/stores/store-eu1-a/services", body | {column: "gs://mover:hunter2@bucket"}
    )
    assert shape(answer) == (409, "not_a_reference")
    assert b"hunter2" not in answer.content


def test_what_is_beside_a_store_is_said_and_forgotten_again_but_not_under_a_move(
    cast: make.Cast, admin: Any, now: datetime
) -> None:
    path = "/ops/stores/store-eu1-a/services"
    beside = {"artifacts_from": "env:ARTIFACTS_A", "memory_from": "env:MEMORY_A"}
    said = admin.post(path, beside | {"reason": "agents keep files"}).json()
    assert {name: said[name] for name in beside} == beside
    line = AuditEntry.objects.get(verb="store.set_services")
    assert (line.before["artifacts_from"], line.after["artifacts_from"]) == ("", "env:ARTIFACTS_A")
    none = {"artifacts_from": "", "memory_from": "", "reason": "they do not any more"}
    move = make.move(cast.acme, cast=cast, now=now)
    assert shape(admin.post(path, none)) == (409, "not_now")
    move.due_at, move.phase = None, "done"
    move.save()
    assert admin.post(path, none).json()["artifacts_from"] == ""


def test_an_instance_is_declared_dead_by_two_people_whatever_tokens_they_have(
    operator: Any, admin: Any, instance: RuntimeInstance
) -> None:
    path = f"/ops/instances/{instance.key}/dead"
    asked = operator.post(path, {"reason": "host is gone"}).json()
    assert (asked["dead_asked_by"], asked["gone_at"]) == ("otto", None)
    _, secret = services.make_token(
        "another",
        role=TokenRole.OPERATOR,
        user=User.objects.get(username="otto"),
        expires_at=database_now() + timedelta(hours=1),
        by="ada",
        now=database_now(),
    )
    himself = operator.post(f"{path}/confirm", Authorization=f"Bearer {secret}")
    assert shape(himself) == (409, "same_person")
    assert shape(admin.post(f"{path}/withdraw")) == (409, "not_your_ask")
    gone = admin.post(f"{path}/confirm").json()
    assert gone["gone_why"] == "dead"
    line = AuditEntry.objects.get(verb="instance.declare_dead")
    assert (line.reason, line.after["asked_by"]) == ("host is gone", "otto")


def test_an_ask_is_taken_back_by_whoever_asked(operator: Any, instance: RuntimeInstance) -> None:
    path = f"/ops/instances/{instance.key}/dead"
    operator.post(path, {"reason": "host is gone"})
    assert operator.post(f"{path}/withdraw").json()["dead_asked_at"] is None
    assert shape(operator.post(f"{path}/withdraw")) == (409, "nobody_asked")


def test_declaring_dead_needs_a_reason(operator: Any, instance: RuntimeInstance) -> None:
    answer = operator.post(f"/ops/instances/{instance.key}/dead", {"reason": ""})
    assert shape(answer) == (422, "reason_missing")


def test_an_instance_that_has_just_spoken_is_not_declared_dead(
    operator: Any, instance: RuntimeInstance
) -> None:
    services.poll(instance.key, now=database_now())
    answer = operator.post(f"/ops/instances/{instance.key}/dead", {"reason": "I think so"})
    assert shape(answer) == (409, "still_alive")


def test_gone_instances_are_listed_only_when_asked_for(
    cast: make.Cast, viewer: Any, instance: RuntimeInstance
) -> None:
    services.leave(instance.key, now=database_now())
    assert viewer.get("/ops/instances").json()["items"] == []
    [row] = viewer.get("/ops/instances?alive=false&cell=cell-eu1-a").json()["items"]
    assert (row["instance"], row["gone_why"]) == (instance.key, "left")


def test_a_new_token_works_is_shown_once_and_can_be_revoked(
    cast: make.Cast, admin: Any, nobody: Any
) -> None:
    soon = (database_now() + timedelta(days=1)).isoformat()
    made = admin.post("/ops/tokens", {"name": "gw", "role": "gateway", "expires_at": soon}).json()
    nobody.secret = made["secret"]
    assert nobody.get("/placement").status_code == 200
    listed = admin.get("/ops/tokens").json()["items"]
    assert made["prefix"] in {row["prefix"] for row in listed}
    assert not any("secret" in row for row in listed)
    answer = admin.post(f"/ops/tokens/{made['id']}/revoke", {"reason": "rotated"})
    assert answer.json()["revoked_at"] is not None


def test_an_admins_operator_token_acts_for_the_admin_alone(cast: make.Cast, admin: Any) -> None:
    soon = (database_now() + timedelta(days=1)).isoformat()
    body = {"name": "ci", "role": "operator", "expires_at": soon}
    assert admin.post("/ops/tokens", body | {"user": "vera"}).status_code == 422
    assert admin.post("/ops/tokens", body).json()["user"] == "anna"


def test_long_lists_come_in_pages(
    cast: make.Cast, viewer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenants.api.PAGE", 2)
    first = viewer.get("/ops/tenants").json()
    assert [row["slug"] for row in first["items"]] == ["acme", "bolt"]
    rest = viewer.get(f"/ops/tenants?after={first['next']}").json()
    assert ([row["slug"] for row in rest["items"]], rest["next"]) == (["core"], None)
    assert viewer.get("/ops/tenants?after=%00").status_code == 422


def test_a_list_may_begin_with_the_newest(cast: make.Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenants.api.PAGE", 2)
    seen: list[str] = []
    after: str | None = ""
    while after is not None:
        part = page(
            Tenant.objects.all(), "pk", after, lambda row: {"slug": row.slug}, newest_first=True
        )
        seen += [row["slug"] for row in part["items"]]
        after = part["next"]
    assert seen == ["core", "bolt", "acme"]


def test_a_refusal_names_the_field_as_its_caller_does(cast: make.Cast, admin: Any) -> None:
    def said(path: str, body: Any = None) -> str:
        answer = admin.post(path, body) if body is not None else admin.get(path)
        assert shape(answer) == (422, "invalid")
        return str(answer.json()["detail"])

    assert said("/ops/regions", {"slug": "us1"}) == "name: Field required"
    assert said("/ops/tokens?after=x").startswith("after: ")
    assert said("/ops/moves/soon").startswith("the address: ")
    assert said("/ops/regions", [1]).startswith("the body: ")


def test_a_name_that_is_not_there_comes_with_the_list_of_those_that_are(
    cast: make.Cast, admin: Any
) -> None:
    for path in ("/ops/tenants/acmee", "/ops/moves/99"):
        answer = admin.get(path)
        assert shape(answer) == (404, "not_found")
        [address] = re.findall(r"GET /api/v1(\S+) lists them", answer.json()["detail"])
        assert admin.get(address).status_code == 200


# --- the whole surface ----------------------------------------------------------------------


def operations(client: Any) -> list[tuple[str, str]]:
    paths = client.get("/openapi.json").json()["paths"]
    return [
        (method.upper(), re.sub(r"\{\w+\}", "1", path).removeprefix("/api/v1"))
        for path, methods in paths.items()
        for method in methods
    ]


def test_every_operators_verb_refuses_a_field_that_it_does_not_know(nobody: Any) -> None:
    document = nobody.get("/openapi.json").json()
    bodies = {
        path: operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        for path, methods in document["paths"].items()
        for operation in methods.values()
        if path.startswith("/api/v1/ops/") and "requestBody" in operation
    }
    schemas = document["components"]["schemas"]
    takes_anything = {
        path
        for path, ref in bodies.items()
        if schemas[ref.rpartition("/")[2]].get("additionalProperties", True)
    }
    assert bodies
    assert takes_anything == set()


def test_a_mistyped_field_is_named_and_nothing_is_done(cast: make.Cast, admin: Any) -> None:
    answer = admin.post("/ops/regions", {"slug": "us1", "name": "US 1", "tiemzone": "UTC"})
    assert shape(answer) == (422, "invalid")
    assert answer.json()["detail"] == "tiemzone: there is no such field, so nothing was done"
    assert not Region.objects.filter(slug="us1").exists()


def test_the_document_is_public_and_names_every_call(nobody: Any) -> None:
    named = set(operations(nobody))
    assert named >= {
        ("POST", "/runtime/instances"),
        ("DELETE", "/runtime/instances/1"),
        ("GET", "/runtime/policy"),
        ("POST", "/runtime/reports"),
        ("GET", "/placement"),
        ("GET", "/ops/tenants"),
        ("POST", "/ops/moves"),
        ("POST", "/ops/moves/1/abort"),
        ("POST", "/ops/instances/1/dead"),
        ("POST", "/ops/instances/1/dead/confirm"),
    }
    document = nobody.get("/openapi.json").json()
    assert all(
        operation.get("security")
        for methods in document["paths"].values()
        for operation in methods.values()
    )


def test_no_call_is_answered_without_a_token(nobody: Any) -> None:
    for method, path in operations(nobody):
        answer = nobody.call(method, path)
        assert shape(answer) == (401, "unauthorized"), path
        assert answer["WWW-Authenticate"] == "Bearer"


def test_every_token_opens_its_own_part_only(
    nobody: Any, runtime: Any, gateway: Any, tenant_program: Any, admin: Any
) -> None:
    parts = {"/runtime/": runtime, "/placement": gateway, "/ops/": admin}
    for method, path in operations(nobody):
        if path.startswith("/tenants/"):
            # A tenant's program has its own, operators may read all: this one is of neither.
            allowed = {"/ops/": admin, "/tenants/": tenant_program}
            for part, owner in allowed.items():
                assert shape(owner.call(method, path)) == (404, "not_found"), (part, path)
        else:
            assert shape(tenant_program.call(method, path)) == (403, "forbidden"), path
        for part, owner in parts.items():
            if path.startswith((part, "/tenants/" if part == "/ops/" else part)):
                continue
            assert shape(owner.call(method, path)) == (403, "forbidden"), (part, path)


def test_a_database_that_is_away_is_503_and_worth_another_try(
    viewer: Any, cast: make.Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*args: Any, **kwargs: Any) -> Any:
        raise OperationalError("server closed the connection: password=hunter2")

    monkeypatch.setattr(queries, "epoch", away)
    answer = viewer.get("/ops/tenants")
    assert shape(answer) == (503, "database_unavailable")
    assert answer["Retry-After"] == "1"
    assert b"hunter2" not in answer.content


def test_a_mistake_of_ours_is_500_with_the_request_to_look_for(
    viewer: Any,
    cast: make.Cast,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def bug(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(queries, "epoch", bug)
    answer = viewer.get("/ops/tenants", **{"X-Request-ID": "request-bug"})
    assert shape(answer) == (500, "internal")
    assert b"secret detail" not in answer.content
    assert "request-bug" in answer.json()["detail"]
    assert "request-bug" in caplog.text


@pytest.mark.parametrize("given", ["", "short", "a" * 65, "has space 12", "<script>12345", "ü" * 9])
def test_an_odd_request_id_is_replaced(nobody: Any, given: str) -> None:
    answer = nobody.get("/openapi.json", **{"X-Request-ID": given})
    assert re.fullmatch(r"[0-9a-f]{32}", answer["X-Request-ID"])
