"""Usage on pages: against the limits, why turns were refused, and nobody else's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime, timedelta

import pytest
from django.test import Client

from capacity.models import UsageDay, UsageMinute
from tenants import services
from tenants.models import Cell, Scope, Tenant, UsageLine
from tests import make, scene
from tests.web.conftest import HTMX, People, polled
from tests.web.test_pages import text_of

LIMITS = {
    "max_concurrent_runs": 10,
    "runs_per_second": 0.5,
    "daily_token_budget": 30_000_000,
    "max_model_calls_per_run": 12,
    "allowed_tools": ["lookupAccount", "openTicket"],
}
OWN = ("/my/usage/", "/my/usage/now/", "/my/usage/minutes.json", "/my/usage/days.json")


@pytest.fixture
def acme(here: make.Cast, at: datetime) -> Tenant:
    """A tenant that has used most of its tokens, and met its rate."""
    Scope.objects.filter(tenant=here.acme).update(**LIMITS)
    UsageMinute.objects.create(
        tenant=here.acme,
        minute=at.replace(second=0, microsecond=0),
        turns=30,
        tokens=240_000,
        refused={"rate": 25},
    )
    UsageDay.objects.create(
        tenant=here.acme,
        day=at.date(),
        turns=3_037,
        tokens=23_040_000,
        refused={"rate": 2_361, "concurrency": 212},
    )
    return here.acme


@pytest.fixture
def mia(acme: Tenant, at: datetime) -> Client:
    """A person of acme."""
    person = scene.person("mia", None)
    services.add_member(person, tenant=acme, by="adam", now=at)
    client = Client()
    client.force_login(person)
    return client


def test_usage_stands_against_each_limit(acme: Tenant, people: People) -> None:
    text = text_of(people.viewer.get("/tenants/acme/usage/").content.decode())
    assert "76 % Tokens today" in text
    assert "23,040,000 30,000,000" in text
    assert "At limit New runs, this minute 30 /min 30 30" in text
    assert "lookupAccount, openTicket" in text
    assert "23,040,000 of today’s 30,000,000 tokens are used." in text


def test_a_limit_is_never_full_with_room_left(acme: Tenant, people: People) -> None:
    UsageDay.objects.update(tokens=29_999_999)
    assert "99 % Tokens today" in text_of(
        people.viewer.get("/tenants/acme/usage/").content.decode()
    )


def test_a_tenant_without_limits_is_held_against_none(here: make.Cast, people: People) -> None:
    text = text_of(people.viewer.get("/tenants/bolt/usage/").content.decode())
    assert text.count("No limit") == 3
    assert "there is no daily budget" in text
    assert "No turn was refused today." in text


def test_the_rest_lasts_as_long_as_the_last_hour_s_rate_says(
    acme: Tenant, people: People, at: datetime
) -> None:
    # 240,000 tokens an hour: 6,960,000 last 29 hours, longer than any day.
    text = text_of(people.viewer.get("/tenants/acme/usage/").content.decode())
    assert "lasts until the day ends" in text
    UsageMinute.objects.update(tokens=10**15)
    text = text_of(people.viewer.get("/tenants/acme/usage/").content.decode())
    assert re.search(r"the rest lasts until \d\d:\d\d:\d\d UTC", text)


def test_refusals_say_why_and_how_to_get_more(mia: Client) -> None:
    text = text_of(mia.get("/my/usage/").content.decode())
    assert "Too many new runs rate: now 0.5 runs a second 2,361 More turns were begun" in text
    assert "Ask your operator for a higher limit of runs per second" in text
    assert text.index("2,361") < text.index("212")
    assert "2,573 refused, 3,037 served" in text


def test_a_tenant_s_person_sees_its_own_tenant_and_no_operator_s_page(mia: Client) -> None:
    html = mia.get("/my/usage/").content.decode()
    assert "Acme today" in html
    assert "76 % Tokens today" in text_of(html)
    for address in ("/moves/", "/tenants/", "/instances/", "/isolation/", "/tenants/acme/"):
        assert f'href="{address}' not in html
        assert mia.get(address).status_code == 403
    assert 'id="signals"' not in html
    assert "bolt" not in html
    assert mia.get("/usage/reconciliation/").status_code == 403


@pytest.mark.parametrize("query", ["tenant=bolt", "slug=bolt"])
@pytest.mark.parametrize("address", OWN)
def test_no_address_names_another_tenant(
    address: str, query: str, mia: Client, here: make.Cast, at: datetime
) -> None:
    UsageDay.objects.create(tenant=here.bolt, day=at.date(), tokens=77_777_777)
    answer = mia.get(f"{address}?{query}")
    assert answer.status_code == 200
    assert "77777777" not in answer.content.decode().replace(",", "")


@pytest.mark.parametrize("address", OWN)
def test_an_operator_is_of_no_tenant(address: str, here: make.Cast, people: People) -> None:
    assert people.admin.get(address).status_code == 403


def test_somebody_who_is_of_the_tenant_no_longer_sees_nothing(
    mia: Client, acme: Tenant, at: datetime
) -> None:
    person = acme.memberships.get().user
    services.remove_member(person, tenant=acme, by="adam", now=at)
    assert mia.get("/my/usage/").status_code == 403


def test_a_tenant_s_person_is_led_to_the_usage_after_the_sign_in(
    mia: Client, people: People
) -> None:
    given = {"username": "mia", "password": scene.PASSWORD}
    assert Client().post("/sign-in/", given)["Location"] == "/my/usage/"
    given["username"] = "vera"
    assert Client().post("/sign-in/", given)["Location"] == "/"


def test_a_budget_that_is_used_up_is_said_on_top_and_needs_somebody(
    mia: Client, acme: Tenant, at: datetime, people: People
) -> None:
    Tenant.objects.filter(pk=acme.pk).update(budget_spent_until=at + timedelta(hours=5))
    UsageMinute.objects.update(refused={"budget": 3})
    text = text_of(mia.get("/my/usage/").content.decode())
    assert "Your organisation has reached today’s usage limit." in text
    assert "ask your operator for a larger daily token budget" in text
    html = people.operator.get("/attention/").content.decode()
    assert "acme has used up its tokens of today" in html
    assert 'href="/tenants/acme/usage/"' in html


def test_many_without_a_budget_are_one_line(here: make.Cast, at: datetime, people: People) -> None:
    for number in range(6):
        make.tenant(f"t-{number}", cell=here.cell, store=here.store, now=at)
    Tenant.objects.filter(slug__startswith="t-").update(budget_spent_until=at + timedelta(hours=1))
    text = text_of(people.operator.get("/attention/").content.decode())
    assert "6 tenants have used up their tokens of today" in text
    assert "t-0, t-1, t-2, t-3 and 2 more" in text


def test_a_budget_of_yesterday_needs_nobody(acme: Tenant, at: datetime, people: People) -> None:
    Tenant.objects.filter(pk=acme.pk).update(budget_spent_until=at - timedelta(seconds=1))
    assert "used up" not in people.operator.get("/attention/").content.decode()


@pytest.mark.parametrize("base", ["/tenants/acme/usage/", "/my/usage/"])
def test_usage_that_has_not_changed_is_not_sent_again(
    base: str, mia: Client, people: People
) -> None:
    browser = mia if base.startswith("/my/") else people.viewer
    url = polled(browser.get(base).content.decode(), f"{base}now/")
    # A minute may end between the two.
    assert browser.get(url, headers=HTMX).status_code in (204, 200)
    UsageDay.objects.update(tokens=1)
    assert browser.get(url, headers=HTMX).status_code == 200


def test_charts_have_a_table_with_the_same_numbers(acme: Tenant, people: People) -> None:
    html = people.viewer.get("/tenants/acme/usage/").content.decode()
    for name in ("minutes", "days"):
        figure = json.loads(people.viewer.get(f"/tenants/acme/usage/{name}.json").content)
        assert f'data-figure="/tenants/acme/usage/{name}.json"' in html
        assert figure["says"] in text_of(html)
        for value in figure["data"][0]["y"]:
            assert f">{value:,}<" in html


def test_who_used_most_stands_with_the_share_of_all(
    acme: Tenant, at: datetime, here: make.Cast, people: People
) -> None:
    UsageMinute.objects.create(
        tenant=here.bolt, minute=at.replace(second=0, microsecond=0), turns=9, tokens=80_000
    )
    html = people.viewer.get("/usage/?cell=cell-eu1-a&hours=24").content.decode()
    text = text_of(html)
    assert "acme 75 % 240,000 30 25" in text
    assert "bolt 25 % 80,000 9 0" in text
    url = re.search(r'data-figure="([^"]+)"', html)
    assert url is not None
    figure = json.loads(people.viewer.get(url.group(1).replace("&amp;", "&")).content)
    assert figure["data"][0]["x"] == [240_000, 80_000]


@pytest.mark.parametrize("query", ["hours=-1", "hours=²", "cell=\0", "cell=nowhere", "hours=9e9"])
def test_a_window_that_is_none_is_the_last_hour_of_all(
    query: str, acme: Tenant, people: People
) -> None:
    assert "240,000" in people.viewer.get(f"/usage/?{query}").content.decode()


def test_nothing_used_says_so(db: None, people: People) -> None:
    assert "Nothing was used" in people.viewer.get("/usage/").content.decode()
    assert (
        "Nothing was used on these days."
        in people.viewer.get("/usage/reconciliation/").content.decode()
    )


def test_what_throttled_stands_beside_what_is_invoiced(
    acme: Tenant, here: make.Cast, at: datetime, people: People
) -> None:
    UsageLine.objects.create(
        instance=Cell.objects.get(pk=here.cell.pk).instances.first(),
        seq=1,
        tenant=acme,
        minute=at.replace(hour=0, minute=0, second=0, microsecond=0),
        turns=3_037,
        tokens=23_000_000,
        rolled_at=at - timedelta(hours=1),
    )
    address = f"/usage/reconciliation/?tenant=acme&from={at.date()}&to={at.date()}"
    html = people.operator.get(address).content.decode()
    text = text_of(html)
    assert "1 unexplained" in text
    assert "23,000,000 23,040,000 -40,000" in text
    assert "Nothing that we know of explains this" in text
    assert f'href="/usage/export.csv?from={at.date()}&amp;to={at.date()}&amp;tenant=acme"' in html
    # A file of all customers' usage is an operator's.
    assert "export.csv" not in people.viewer.get(address).content.decode()


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("from=yesterday", "Give the days as"),
        ("from=2026-03-02&to=2026-03-01", "is before"),
        ("tenant=nobody", "There is no tenant nobody"),
        ("tenant=%00", ""),
        ("from=1026-03-01&to=1026-03-02", "There are no days"),
    ],
    ids=["no day", "backwards", "no tenant", "nul", "long ago"],
)
def test_days_that_can_not_be_shown_are_refused_in_place(
    query: str, said: str, here: make.Cast, people: People
) -> None:
    answer = people.viewer.get(f"/usage/reconciliation/?{query}", headers=HTMX)
    assert answer.status_code == (409 if said else 200)
    assert said in answer.content.decode()
    assert "<html" not in answer.content.decode()


def test_ten_thousand_tenants_cost_the_overview_few_reads(
    acme: Tenant, at: datetime, people: People, django_assert_max_num_queries: Callable[..., object]
) -> None:
    many = Tenant.objects.bulk_create(
        Tenant(slug=f"t-{n}", name=f"T{n}", app_name=f"support.t-{n}", agent=acme.agent)
        for n in range(10_000)
    )
    minute = at.replace(second=0, microsecond=0)
    UsageMinute.objects.bulk_create(
        UsageMinute(tenant=tenant, minute=minute, turns=1, tokens=10) for tenant in many
    )
    with django_assert_max_num_queries(20):
        text = text_of(people.viewer.get("/usage/").content.decode())
    assert "340,000" in text
    assert "Everybody else" in text


def test_an_unknown_tenant_has_no_usage(here: make.Cast, people: People) -> None:
    for path in ("", "now/", "minutes.json", "days.json"):
        assert people.viewer.get(f"/tenants/nobody/usage/{path}").status_code == 404
