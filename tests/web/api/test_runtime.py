"""The wire between runtimes, gateways and the control plane, as PROTOCOL.md has it."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.conf import settings
from django.db import transaction

from durable.clock import database_now
from platform_admin import api
from tenants import queries, services
from tenants.api import EntryOut, FeedOut, JoinOut, PlacementOut, PolicyOut, ReportOut
from tenants.domain.fence import FAST_MS, SLOW_MS
from tenants.models import DirtyLine, Grants, RuntimeInstance, Token, UsageLine
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
# One that can be true: another would be corrected.
MINUTE = f"{datetime.now(UTC):%Y-%m-%dT%H:%M}:00Z"


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

SHARE = {
    "runs_per_second": 2.5,
    "max_concurrent_runs": 5,
    "tokens_per_minute": None,
    "safe_runs_per_second": 1.25,
    "safe_max_concurrent_runs": 2,
    "safe_tokens_per_minute": None,
    "tokens_left": 90_000,
}


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
    assert line.minute == datetime.fromisoformat(MINUTE)
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


RUNNERS = {
    "size": 12,
    "limit": 2_000,
    "idle_seconds": 1_800.0,
    "evicted": {"size": 1, "idle": 2, "generation": 3, "gone": 4},
    "builds": 22,
    "build_ms": {"p50": 41.5, "p99": 2_000.0},
    "bytes": 190_000,
}
BREAKER = {
    "state": "open",
    "failures": 5,
    "own_quota_429": 3,
    "shared_pool_429": 2,
    "retry_at": "2026-03-02T12:00:30+00:00",
}


def test_what_an_instance_says_of_itself_is_kept(runtime: Any, instance: str) -> None:
    usage = [{"tenant": "acme", "minute": MINUTE, "turns": 1, "would_refuse": {"rate": 4}}]
    said = {"runners": RUNNERS, "breakers": {"gemini": BREAKER}, "ready": False}
    assert report(runtime, instance, usage=usage, **said).status_code == 200
    row = RuntimeInstance.objects.get(key=instance)
    assert (row.runners, row.breakers, row.ready) == (RUNNERS, {"gemini": BREAKER}, False)
    assert UsageLine.objects.get().would_refuse == {"rate": 4}


def test_a_number_of_grants_that_is_not_ours_is_answered_with_all_of_them(
    runtime: Any, instance: str
) -> None:
    row = RuntimeInstance.objects.get(key=instance)
    shares = {"acme": SHARE}
    kept = {"acme": list(SHARE.values())}
    Grants.objects.create(instance=row, shares=kept, made_at=database_now())
    RuntimeInstance.objects.filter(pk=row.pk).update(grants_number=3)
    for seq, number in enumerate([0, 2, 4, 2**53, "x"], start=1):
        answer = report(runtime, instance, seq=seq, grants_number=number).json()
        assert answer["grants"] == {"number": 3, "tenants": shares}
    is_exactly(answer, ReportOut)
    answer = report(runtime, instance, seq=6, grants_number=3).json()
    assert (answer["grants"], answer["grant_seconds"]) == (None, 30.0)
    # Its answer may have been lost: a retry is told of what is left, and of the same.
    again = report(runtime, instance, seq=6, grants_number=3).json()
    assert again["grants"] is None
    assert 0 < again["grant_seconds"] < 30.0


NAN, HUGE = float("nan"), 10**400


@pytest.mark.parametrize(
    "said",
    [
        *({"grants_number": bad} for bad in (-1, NAN, HUGE, "9", None, [], True)),
        *({"ready": bad} for bad in (1, "no", None)),
        *({"runners": bad} for bad in (None, [], "x", {"size": -1, "bytes": HUGE, "build_ms": 3})),
        {"runners": {"idle_seconds": NAN, "evicted": {"size": -1}, "build_ms": {"p50": -NAN}}},
        {"runners": {"size": 1e400, f"{'x' * 9_000}": {}, "\ud800": 1, "builds": True}},
        *({"breakers": bad} for bad in (None, [], {"m": 3}, {"m": {}}, {"m": {"state": []}})),
        {"breakers": dict.fromkeys(("\ud800", "a\0b", "x" * 129), BREAKER)},
        {"breakers": {f"m{n}": {"state": "nonsense"} for n in range(20_000)}},
        {"breakers": {"\0": {"state": "open", "retry_at": "\ud800"}}},
        *(
            {"usage": [{"tenant": "acme", "minute": MINUTE, "turns": 1, "would_refuse": bad}]}
            for bad in (None, [], {"rate": -1, "a\0": 1, "\ud800": 1, "quota": NAN, "x": HUGE})
        ),
    ],
    ids=lambda said: f"{repr(said)[:45]}{repr(said)[-25:]}",
)
def test_a_part_that_makes_no_sense_costs_neither_the_report_nor_the_lease(
    runtime: Any, instance: str, said: dict[str, Any]
) -> None:
    answer = report(runtime, instance, in_flight={"acme": 1}, **said)
    assert answer.status_code == 200, answer.content
    row = RuntimeInstance.objects.get(key=instance)
    assert (row.seq, row.in_flight, row.grants_heard, row.ready) == (1, {"acme": 1}, 0, True)
    assert row.breakers == {}
    kept = row.runners
    assert not kept or (kept["size"], kept["idle_seconds"], kept["bytes"]) == (0, 0.0, None)
    assert [line.would_refuse for line in UsageLine.objects.all()] in ([], [{}])


def test_what_is_kept_of_a_giant_part_is_bounded(runtime: Any, instance: str) -> None:
    counts = {f"r{n}": n for n in range(10_000)}
    usage = [{"tenant": "acme", "minute": MINUTE, "would_refuse": counts}]
    breakers = {f"m{n}": {**BREAKER, "retry_at": "soon", "more": [BREAKER]} for n in range(1_000)}
    runners = {**RUNNERS, "evicted": counts, "more": counts}
    answer = report(runtime, instance, usage=usage, breakers=breakers, runners=runners)
    assert answer.status_code == 200
    row = RuntimeInstance.objects.get(key=instance)
    assert len(row.breakers) == 100
    assert row.breakers["m99"] == {**BREAKER, "retry_at": None}
    assert row.runners == {**RUNNERS, "evicted": dict.fromkeys(RUNNERS["evicted"], 0)}
    assert len(UsageLine.objects.get().would_refuse) == 50


def test_the_largest_report_is_taken(runtime: Any, instance: str) -> None:
    last = datetime.fromisoformat(MINUTE)
    RuntimeInstance.objects.update(joined_at=last - timedelta(days=4))
    minutes = [last - timedelta(minutes=back) for back in range(5_000)]
    usage = [
        {"tenant": "acme", "minute": f"{minute:%Y-%m-%dT%H:%M}:00Z", "turns": 10**9}
        for minute in minutes
    ]
    assert report(runtime, instance, usage=usage).status_code == 200
    assert UsageLine.objects.count() == 5_000


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
