"""Instances on pages: whether they may serve, what they hold, and what that costs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

import pytest

from tenants import services
from tenants.models import Counter, Grants, RuntimeInstance
from tests import make, scene
from tests.web.conftest import HTMX, People, polled
from tests.web.test_pages import text_of


@pytest.fixture
def row(here: make.Cast) -> RuntimeInstance:
    return RuntimeInstance.objects.get(name="eu1-a-1")


def shown(people: People, row: RuntimeInstance, **query: str) -> str:
    return text_of(people.viewer.get(f"/instances/{row.pk}/", query).content.decode())


def test_turns_are_shared_out_with_the_arithmetic(here: make.Cast, people: People) -> None:
    rows = RuntimeInstance.objects.filter(cell=here.cell).order_by("name")
    for row, turns in zip(rows, (21, 15), strict=True):
        row.in_flight = {"acme": turns - 1, "bolt": 1}
        row.save()
    text = text_of(people.viewer.get("/instances/").content.decode())
    assert "36 / 2 = 18.0" in text
    assert "21 eu1-a-1" in text


def test_an_instance_behind_its_cell_s_policy_is_told_apart(
    row: RuntimeInstance, people: People
) -> None:
    row.applied_version -= 1
    row.save()
    text = text_of(people.viewer.get("/instances/").content.decode())
    assert f"{row.applied_version} of {row.cell.policy_version}" in text
    assert f"1 of 2 version {row.cell.policy_version}" in text


def test_a_version_of_another_epoch_counts_as_nothing_applied(
    row: RuntimeInstance, people: People
) -> None:
    Counter.objects.update(epoch="another")
    assert f"0 of {row.cell.policy_version}" in shown(people, row)


def test_an_instance_that_is_not_ready_says_so(row: RuntimeInstance, people: People) -> None:
    row.ready = False
    row.save()
    html = people.viewer.get("/instances/?cell=cell-eu1-a").content.decode()
    assert "1 of 2" in html
    assert "not yet" in html
    # It joined six hours ago: somebody should look.
    assert "1 instance of cell-eu1-a is not ready" in people.viewer.get("/").content.decode()


def test_one_that_has_just_joined_is_no_news_yet(
    row: RuntimeInstance, at: datetime, people: People
) -> None:
    row.ready, row.joined_at = False, at - timedelta(seconds=20)
    row.save()
    assert "not ready" not in people.viewer.get("/attention/").content.decode()


@pytest.mark.parametrize(
    ("evicted", "said"),
    [
        ({"size": 412, "idle": 30}, "The size of 2,000 bites: 412 Runners"),
        ({"size": 4, "idle": 300}, "The idle time of 30 minutes bites: 300 Runners"),
        ({"gone": 9}, "Neither size nor idle time"),
    ],
    ids=["size", "idle", "neither"],
)
def test_the_page_says_which_limit_of_the_cache_bites(
    evicted: dict[str, int], said: str, row: RuntimeInstance, people: People
) -> None:
    row.runners = scene.RUNNERS | {"evicted": evicted}
    row.save()
    assert said in shown(people, row)


@pytest.mark.parametrize(
    ("p99", "said"),
    [(2_300.0, "waits up to 2.3s on its first turn, over the bar of 2s"), (80.0, "within the bar")],
    ids=["slow", "fast"],
)
def test_the_page_says_what_a_build_costs_a_tenant_that_comes_back(
    p99: float, said: str, row: RuntimeInstance, people: People
) -> None:
    row.runners = scene.RUNNERS | {"build_ms": {"p50": 40.0, "p99": p99}}
    row.save()
    assert said in shown(people, row)


def test_a_cache_is_sized_by_what_a_runner_weighs(row: RuntimeInstance, people: People) -> None:
    row.runners = scene.RUNNERS
    row.save()
    text = shown(people, row, heap="3000")
    assert "2,000 Runners = 3000 MiB / 1.5 MiB" in text
    assert "cell-eu1-a has 3 tenants: all of them fit" in text
    few = shown(people, row, heap="3")
    assert "1 of them, 33 %, find no Runner when they come back and wait 2.3s at p99" in few


@pytest.mark.parametrize("heap", ["", "0", "-4", "1e9", "4.5", "²", "9" * 30, "\0"])
def test_a_budget_that_is_no_number_is_answered_in_place(
    heap: str, row: RuntimeInstance, people: People
) -> None:
    row.runners = scene.RUNNERS
    row.save()
    answer = people.viewer.get(f"/instances/{row.pk}/sizing/", {"heap": heap}, headers=HTMX)
    assert answer.status_code == 200
    assert "Give whole MiB" in answer.content.decode()


def test_an_instance_that_has_said_nothing_of_its_cache_is_not_guessed_at(
    row: RuntimeInstance, people: People
) -> None:
    text = shown(people, row)
    assert "has said nothing of its cache" in text
    assert "No Runner has been weighed" in text


def test_breakers_stand_with_both_kinds_of_429(row: RuntimeInstance, people: People) -> None:
    row.breakers = {
        "model-a": {"state": "open", "failures": 5, "own_quota_429": 2, "shared_pool_429": 41},
        "model-b": {"state": "half_open"},
    }
    row.save()
    text = shown(people, row)
    assert "Open model-a 5 2 41" in text
    assert "Trying model-b" in text
    assert "1 open" in people.viewer.get("/instances/").content.decode()


def test_its_part_of_each_limit_stands_with_the_safe_part(
    row: RuntimeInstance, at: datetime, people: People
) -> None:
    Grants.objects.create(instance=row, shares={"acme": list(scene.SHARE.values())}, made_at=at)
    row.grants_number, row.grants_heard, row.grants_until = 7, 6, at + timedelta(seconds=30)
    row.save()
    text = shown(people, row)
    assert "15 /min 8 /min" in text
    assert "no limit" in text
    assert "1,200,000" in text
    assert "Not heard yet" in text


def test_the_pre_warm_list_is_in_order(row: RuntimeInstance, people: People) -> None:
    row.cell.document = {"prewarm": ["bolt", "acme"]}
    row.cell.save()
    text = shown(people, row)
    assert text.index(" bolt ") < text.index(" acme ")


def test_a_lost_instance_stays_and_is_not_polled(
    row: RuntimeInstance, at: datetime, people: People
) -> None:
    services.declare_dead(
        row, by="adam", reason="its machine is gone", now=at + timedelta(minutes=1)
    )
    html = people.operator.get(f"/instances/{row.pk}/").content.decode()
    assert "Declared dead" in html
    assert f'hx-get="/instances/{row.pk}/state/' not in html
    assert f'href="/instances/{row.pk}/dead/"' not in html
    assert "Declared dead" in people.viewer.get("/instances/").content.decode()


def test_only_an_operator_is_offered_to_declare_it_dead(
    row: RuntimeInstance, people: People
) -> None:
    url = f"/instances/{row.pk}/"
    assert "Declare dead…" in people.operator.get(url).content.decode()
    assert "Declare dead…" not in people.viewer.get(url).content.decode()


def test_the_table_polls_with_its_filter(here: make.Cast, people: People) -> None:
    html = people.viewer.get("/instances/?cell=cell-eu1-b&q=eu1&v=3").content.decode()
    url = polled(html, "/instances/table/")
    assert url == "/instances/table/?cell=cell-eu1-b&q=eu1"
    assert "eu1-a-1" not in people.viewer.get(url).content.decode()


def test_no_instance_says_where_one_comes_from(db: None, people: People) -> None:
    assert "No instance has joined." in people.viewer.get("/instances/").content.decode()


def test_a_name_that_nothing_has_says_so(here: make.Cast, people: People) -> None:
    assert "No instance matches." in people.viewer.get("/instances/?q=zz").content.decode()


def test_ten_thousand_instances_come_a_page_at_a_time_in_few_reads(
    here: make.Cast,
    at: datetime,
    people: People,
    django_assert_max_num_queries: Callable[..., object],
) -> None:
    RuntimeInstance.objects.bulk_create(
        RuntimeInstance(
            key=f"{index:032}",
            cell=here.other_cell,
            name=f"eu1-b-{index:05}",
            boot="b",
            longest_turn_seconds=120,
            longest_tool_seconds=45,
            joined_at=at,
            lease_until=at + timedelta(minutes=10),
            polled_at=at,
            reported_at=at,
            ready=True,
            in_flight={"acme": 2},
        )
        for index in range(10_000)
    )
    with django_assert_max_num_queries(16):
        html = people.viewer.get("/instances/?cell=cell-eu1-b").content.decode()
    assert "10,001 instances" in html
    assert "20,000 / 10,001 = 2.0" in html
    assert "Page 1 of 201" in html


def test_an_unknown_instance_is_not_found(db: None, people: People) -> None:
    for path in ("", "state/", "sizing/"):
        assert people.viewer.get(f"/instances/99999999/{path}").status_code == 404


def test_a_page_number_that_is_none_is_the_first(here: make.Cast, people: People) -> None:
    for number in ("x", "-1", "²", "9" * 40):
        assert people.viewer.get("/instances/", {"page": number}).status_code == 200
