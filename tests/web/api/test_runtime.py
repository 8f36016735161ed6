"""The wire between runtimes, gateways and the control plane, as PROTOCOL.md has it."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
from django.conf import settings
from django.db import transaction

from durable.clock import database_now
from platform_admin import api
from tenants import queries, services
from tenants.api import EntryOut, FeedOut, JoinOut, PlacementOut, PolicyOut, ReportOut
from tenants.domain.fence import FAST_MS, SLOW_MS
from tenants.models import DirtyLine, RuntimeInstance, Token, UsageLine
from tests import make

pytestmark = pytest.mark.django_db
JOIN: dict[str, Any] = {
    "cell": "cell-eu1-a",
    "name": "agents-1",
    "build": "1.4.2",
    "boot": "boot-1",
    "longest_turn_seconds": 60,
    "longest_tool_seconds": 30,
    "plugins": ["tenant-policy"],
    "stores": ["store-eu1-a"],
    "replaces": None,
}
MINUTE = "2026-03-02T12:00:00Z"


@pytest.fixture
def instance(runtime: Any) -> str:
    key: str = runtime.post("/runtime/instances", JOIN).json()["instance"]
    return key


def policy(runtime: Any, instance: str, since: str = "") -> Any:
    return runtime.get(f"/runtime/policy?instance={instance}&since={since}")


def report(runtime: Any, instance: str, seq: int = 1, **said: Any) -> Any:
    body = {
        "instance": instance,
        "boot": "boot-1",
        "seq": seq,
        "applied_version": "",
        "in_flight": {},
        "in_flight_older": {},
        "usage": [],
        "dirty": [],
        "sides": [],
        "breakers": [],
    }
    return runtime.post("/runtime/reports", {**body, **said})


def is_exactly(answer: dict[str, Any], schema: Any) -> None:
    """The answer has the fields of the document, all of them and no other."""
    schema.model_validate(answer)
    assert answer.keys() == schema.model_fields.keys()


def refused(answer: Any, status: int, error: str) -> None:
    assert answer.status_code == status, answer.content
    body = answer.json()
    assert body.keys() == {"error", "detail", "retry_after_seconds"}
    assert body["error"] == error
    assert body["detail"]


# --- join -----------------------------------------------------------------------------------


def test_a_join_is_answered_with_id_lease_cadence_and_epoch(runtime: Any) -> None:
    answer = runtime.post("/runtime/instances", JOIN)
    assert answer.status_code == 200
    is_exactly(answer.json(), JoinOut)
    assert answer.json()["lease_seconds"] == settings.RUNTIME_LEASE_SECONDS
    assert answer.json()["poll_after_ms"] == SLOW_MS
    assert answer.json()["epoch"] == queries.epoch()
    row = RuntimeInstance.objects.get(key=answer.json()["instance"])
    assert (row.name, row.build, row.stores) == ("agents-1", "1.4.2", ["store-eu1-a"])


def test_unknown_fields_of_a_newer_client_are_ignored(runtime: Any) -> None:
    answer = runtime.post("/runtime/instances", {**JOIN, "colour": "blue", "shifts": {"a": 1}})
    assert answer.status_code == 200


@pytest.mark.parametrize("cell", ["cell-eu1-b", "no-such-cell"])
def test_a_token_joins_no_other_cell_and_learns_of_none(runtime: Any, cell: str) -> None:
    refused(runtime.post("/runtime/instances", {**JOIN, "cell": cell}), 403, "not_your_cell")


@pytest.mark.parametrize(
    "change",
    [
        {"cell": ""},
        {"name": ""},
        {"boot": ""},
        {"boot": "b" * 65},
        {"name": "a\0b"},
        {"longest_turn_seconds": -1},
        {"longest_turn_seconds": 10**9},
        {"longest_turn_seconds": "soon"},
        {"plugins": ["p"] * 101},
        {"stores": ["a\0b"]},
        {"stores": "store-eu1-a"},
    ],
)
def test_a_malformed_join_is_refused_with_the_field_named(
    runtime: Any, change: dict[str, Any]
) -> None:
    answer = runtime.post("/runtime/instances", {**JOIN, **change})
    refused(answer, 422, "invalid")
    assert next(iter(change)) in answer.json()["detail"]
    assert not RuntimeInstance.objects.exists()


@pytest.mark.parametrize("text", ["", "{", "[1]", "7", "null", '{"longest_turn_seconds": NaN}'])
def test_what_is_no_object_is_refused(runtime: Any, text: str) -> None:
    answer = runtime.call("POST", "/runtime/instances", text.encode())
    assert answer.status_code in {400, 422}
    assert answer.json().keys() == {"error", "detail", "retry_after_seconds"}


def test_no_answer_repeats_an_input(runtime: Any) -> None:
    answer = runtime.post("/runtime/instances", {**JOIN, "name": ["hunter2"]})
    assert answer.status_code == 422
    assert b"hunter2" not in answer.content


def test_a_replaced_id_is_gone(runtime: Any, instance: str) -> None:
    new = runtime.post("/runtime/instances", {**JOIN, "replaces": instance}).json()["instance"]
    refused(policy(runtime, instance), 410, "instance_gone")
    assert policy(runtime, new).status_code == 200
    refused(
        runtime.post("/runtime/instances", {**JOIN, "boot": "boot-2", "replaces": new}),
        409,
        "another_process",
    )


# --- policy ---------------------------------------------------------------------------------


def test_the_first_policy_is_full_and_has_the_documents_fields(runtime: Any, instance: str) -> None:
    answer = policy(runtime, instance)
    body = answer.json()
    is_exactly(body, PolicyOut)
    assert body["full"] is True
    for entry in body["tenants"]:
        is_exactly(entry, EntryOut)
    assert answer["ETag"] == f'"{body["version"]}"'
    assert answer["Poll-After-Ms"] == str(body["poll_after_ms"]) == str(SLOW_MS)


def test_nothing_new_is_304_with_the_headers_and_no_body(runtime: Any, instance: str) -> None:
    version = policy(runtime, instance).json()["version"]
    answer = policy(runtime, instance, version)
    assert (answer.status_code, answer.content) == (304, b"")
    assert answer["ETag"] == f'"{version}"'
    assert answer["Poll-After-Ms"] == str(SLOW_MS)


def test_a_delta_holds_the_changed_entry_and_an_unchanged_cell_part(
    cast: make.Cast, runtime: Any, instance: str
) -> None:
    version = policy(runtime, instance).json()["version"]
    services.publish(cast.bolt, cast.cell, accepts="none")
    body = policy(runtime, instance, version).json()
    assert (body["full"], body["cell"]) == (False, None)
    [entry] = body["tenants"]
    is_exactly(entry, EntryOut)
    assert (entry["tenant"], entry["accepts"]) == ("bolt", "none")


@pytest.mark.parametrize("since", ["nonsense", "%00", "ffffffffffff.1", "1.1e5", "9" * 500])
def test_an_unreadable_since_is_answered_in_full(runtime: Any, instance: str, since: str) -> None:
    assert policy(runtime, instance, since).json()["full"] is True


def test_the_fast_cadence_is_in_every_answer(cast: make.Cast, runtime: Any, instance: str) -> None:
    services.hurry([cast.cell], until=database_now() + timedelta(minutes=1))
    body = policy(runtime, instance).json()
    assert body["poll_after_ms"] == FAST_MS
    assert policy(runtime, instance, body["version"])["Poll-After-Ms"] == str(FAST_MS)
    assert report(runtime, instance).json()["poll_after_ms"] == FAST_MS
    assert (
        runtime.post("/runtime/instances", {**JOIN, "boot": "b2"}).json()["poll_after_ms"]
        == FAST_MS
    )


@pytest.mark.parametrize("key", ["0" * 32, "", "%00", "x" * 101])
def test_an_unknown_instance_is_gone_or_malformed(runtime: Any, key: str) -> None:
    answer = policy(runtime, key)
    assert answer.status_code in {410, 422}
    assert answer.json().keys() == {"error", "detail", "retry_after_seconds"}


def test_another_cells_token_sees_and_does_nothing(
    other_runtime: Any, runtime: Any, instance: str
) -> None:
    ahead = f"{queries.epoch()}.99999"
    refused(policy(other_runtime, instance, ahead), 403, "not_your_cell")
    refused(report(other_runtime, instance, applied_version=ahead), 403, "not_your_cell")
    joining = {**JOIN, "cell": "cell-eu1-a", "applied_version": ahead}
    refused(other_runtime.post("/runtime/instances", joining), 403, "not_your_cell")
    # Nor does it raise the alarm of a restored database for that cell.
    assert queries.halt() is None
    refused(policy(other_runtime, instance), 403, "not_your_cell")
    refused(report(other_runtime, instance), 403, "not_your_cell")
    refused(other_runtime.delete(f"/runtime/instances/{instance}"), 403, "not_your_cell")
    assert policy(runtime, instance).status_code == 200


# --- reports --------------------------------------------------------------------------------


def test_a_report_is_answered_with_lease_grants_cadence_and_version(
    cast: make.Cast, runtime: Any, instance: str
) -> None:
    version = policy(runtime, instance).json()["version"]
    answer = report(
        runtime,
        instance,
        applied_version=version,
        in_flight={"acme": 2},
        usage=[
            {
                "tenant": "acme",
                "minute": MINUTE,
                "turns": 3,
                "model_calls": 5,
                "tokens": 12_000,
                "refused": {"draining": 2},
            }
        ],
        dirty=[{"tenant": "acme", "user_id": "u1", "session_id": "s1"}],
    )
    assert answer.status_code == 200
    is_exactly(answer.json(), ReportOut)
    assert answer.json()["lease_seconds"] == settings.RUNTIME_LEASE_SECONDS
    assert answer.json()["version"] == version
    line = UsageLine.objects.get()
    assert (line.turns, line.tokens, line.refused) == (3, 12_000, {"draining": 2})
    assert line.minute.isoformat() == "2026-03-02T12:00:00+00:00"
    assert RuntimeInstance.objects.get(key=instance).in_flight == {"acme": 2}


def test_a_gap_says_seq_gap_and_a_gone_instance_instance_gone(runtime: Any, instance: str) -> None:
    refused(report(runtime, instance, seq=2), 409, "seq_gap")
    assert report(runtime, instance).status_code == 200
    assert report(runtime, instance).status_code == 200
    assert runtime.delete(f"/runtime/instances/{instance}").status_code == 204
    assert runtime.delete(f"/runtime/instances/{instance}").status_code == 204
    usage = [{"tenant": "acme", "minute": MINUTE, "turns": 7}]
    for _ in range(2):
        refused(report(runtime, instance, seq=2, usage=usage), 410, "instance_gone")
    assert UsageLine.objects.get().turns == 7


def test_a_version_that_was_never_given_is_refused(runtime: Any, instance: str) -> None:
    refused(
        report(runtime, instance, applied_version=f"{queries.epoch()}.99999"), 409, "version_ahead"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"seq": 0},
        {"seq": -1},
        {"seq": 2**60},
        {"applied_version": "seven"},
        {"in_flight": {"acme": -1}},
        {"in_flight": ["acme"]},
        {"in_flight": {f"t{n}": 1 for n in range(20_001)}},
        {"usage": [{"tenant": "acme", "minute": "noon"}]},
        {"usage": [{"tenant": "acme", "minute": "2026-03-02T12:00:00"}]},
        {"usage": [{"tenant": "acme", "minute": "0001-01-01T00:00:00+14:00"}]},
        {"usage": [{"tenant": "acme", "minute": MINUTE, "turns": -1}]},
        {"usage": [{"tenant": "acme", "minute": MINUTE, "tokens": 10**13}]},
        {"usage": [{"tenant": "acme", "minute": MINUTE}] * 5_001},
        {"dirty": [{"tenant": "acme"}] * 10_001},
        {"boot": "a\0b"},
    ],
    ids=lambda change: str(change)[:85],
)
def test_a_report_out_of_bounds_is_refused_with_the_field_named(
    runtime: Any, instance: str, change: dict[str, Any]
) -> None:
    answer = report(runtime, instance, **change)
    assert answer.status_code == 422
    assert next(iter(change)) in answer.json()["detail"]
    assert len(answer.json()["detail"]) < 1_000
    assert RuntimeInstance.objects.get().seq == 0


def test_an_id_that_can_not_be_kept_costs_its_line_and_not_the_report(
    runtime: Any, instance: str, cast: make.Cast
) -> None:
    services.track(cast.acme, until=database_now() + timedelta(hours=1))
    bad = ["a\0b", "\ud800", "x" * 129, 7, None, {"a": 1}]
    answer = report(
        runtime,
        instance,
        in_flight={"acme": 1, "a\0b": 1, "\udfff": 2},
        usage=[{"tenant": one, "minute": MINUTE, "turns": 1} for one in ["acme", *bad]],
        dirty=[
            *({"tenant": "acme", "user_id": one, "session_id": "s"} for one in bad),
            *({"tenant": one, "user_id": "u", "session_id": "s"} for one in bad),
            {"tenant": "acme"},
            {"tenant": "acme", "user_id": "ü", "session_id": "s" * 128},
        ],
    )
    assert answer.status_code == 200, answer.content
    assert UsageLine.objects.count() == DirtyLine.objects.count() == 1
    assert RuntimeInstance.objects.get().in_flight == {"acme": 1}


def test_the_largest_report_is_taken(runtime: Any, instance: str) -> None:
    usage = [
        {"tenant": "acme", "minute": f"2026-03-{day:02}T{hour:02}:{minute:02}:00Z", "turns": 10**9}
        for day in range(1, 5)
        for hour in range(24)
        for minute in range(52)
    ]
    assert report(runtime, instance, usage=usage[:5_000]).status_code == 200
    assert UsageLine.objects.count() == min(5_000, len(usage))


def test_a_body_beyond_the_servers_limit_is_413(runtime: Any, instance: str) -> None:
    answer = report(runtime, instance, colour="x" * settings.DATA_UPLOAD_MAX_MEMORY_SIZE)
    refused(answer, 413, "too_big")


# --- placement ------------------------------------------------------------------------------


def test_the_feed_is_full_then_304_then_only_what_changed(cast: make.Cast, gateway: Any) -> None:
    first = gateway.get("/placement").json()
    is_exactly(first, FeedOut)
    for row in first["tenants"]:
        is_exactly(row, PlacementOut)
    assert (first["full"], len(first["tenants"])) == (True, 3)
    nothing = gateway.get(f"/placement?since={first['version']}")
    assert (nothing.status_code, nothing.content) == (304, b"")
    assert nothing["ETag"] == f'"{first["version"]}"'
    with transaction.atomic():
        services.place(
            cast.acme,
            cell=cast.other_cell,
            store=cast.other_store,
            by="m",
            reason="",
            now=database_now(),
        )
    delta = gateway.get(f"/placement?since={first['version']}").json()
    assert (delta["full"], [row["tenant"] for row in delta["tenants"]]) == (False, ["acme"])
    assert delta["tenants"][0]["cell"] == "cell-eu1-b"
    assert gateway.get("/placement?since=ffffffffffff.1").json()["full"] is True


# --- tokens ---------------------------------------------------------------------------------


def test_a_token_is_read_from_memory_for_a_second_and_not_longer(
    runtime: Any, instance: str, django_assert_num_queries: Any
) -> None:
    version = policy(runtime, instance).json()["version"]
    # The clock, and the instance with its cell's version.
    with django_assert_num_queries(2):
        policy(runtime, instance, version)
    token = Token.objects.get()
    services.revoke_token(token, by="ada", now=database_now())
    assert policy(runtime, instance, version).status_code == 304
    time.sleep(api.TOKEN_SECONDS + 0.05)
    refused(policy(runtime, instance, version), 401, "unauthorized")


def test_a_use_is_noted(runtime: Any, instance: str) -> None:
    assert Token.objects.get().last_used_at is not None


def test_memory_for_tokens_is_bounded(
    runtime: Any, instance: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "TOKENS_KEPT", 1)
    cache = api.TokenCache()
    now = database_now()
    secrets = [
        services.make_token(
            "g", role="gateway", expires_at=now + timedelta(hours=1), by="ada", now=now
        )[1]
        for _ in range(3)
    ]
    assert all(cache.find(secret) for secret in secrets)
    assert cache.find("wrong") is None
    assert len(cache._kept) == 1
