"""Lists: tenants by the thousand, moves by state; searched, narrowed, sorted, paged."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime

import pytest

from migrations_app.domain.phases import Phase
from tenants.models import Placement, Tenant
from tests import make, scene
from tests.web.conftest import HTMX, People


def slugs(html: str) -> list[str]:
    return re.findall(r'id="tenant-([\w-]+)" href', html)


def get(people: People, address: str, **query: str) -> str:
    return people.viewer.get(address, query).content.decode()


@pytest.fixture
def thousands(here: make.Cast, at: datetime) -> int:
    """Three thousand tenants more, all in the second cell."""
    Tenant.objects.bulk_create(
        Tenant(
            slug=f"t-{index:04}",
            name=f"Tenant {index}",
            app_name=f"support.t-{index:04}",
            agent=here.acme.agent,
            tier="silo" if index % 1_000 == 7 else "pooled",
        )
        for index in range(3_000)
    )
    Placement.objects.bulk_create(
        Placement(
            tenant=tenant,
            cell=here.other_cell,
            store=here.other_store,
            placement_version=100 + index,
            feed_version=100 + index,
        )
        for index, tenant in enumerate(Tenant.objects.filter(slug__startswith="t-"))
    )
    return 3_003


def test_thousands_of_tenants_come_a_page_at_a_time_in_few_reads(
    thousands: int, people: People, django_assert_max_num_queries: Callable[..., object]
) -> None:
    with django_assert_max_num_queries(20):
        html = get(people, "/tenants/")
    assert len(slugs(html)) == 50
    assert "3,003 tenants" in html
    assert "Page 1 of 61" in html


def test_the_last_page_holds_the_rest(thousands: int, people: People) -> None:
    html = get(people, "/tenants/", page="61")
    assert slugs(html) == ["t-2997", "t-2998", "t-2999"]
    assert 'rel="next"' not in html


@pytest.mark.parametrize("page", ["0", "-1", "x", "99999999999", "62"])
def test_a_page_that_does_not_exist_is_the_nearest_one(
    page: str, thousands: int, people: People
) -> None:
    assert slugs(get(people, "/tenants/", page=page))


def test_a_tenant_is_found_by_part_of_its_slug_name_or_app(here: make.Cast, people: People) -> None:
    assert slugs(get(people, "/tenants/", q="ACM")) == ["acme"]
    assert slugs(get(people, "/tenants/", q="billing.")) == ["core"]
    html = get(people, "/tenants/", q="zzz")
    assert "No tenant matches." in html


def test_tenants_are_narrowed_by_where_they_live_and_what_they_have(
    thousands: int, people: People
) -> None:
    assert slugs(get(people, "/tenants/", cell="cell-eu1-a")) == ["acme", "bolt", "core"]
    assert slugs(get(people, "/tenants/", tier="silo")) == ["t-0007", "t-1007", "t-2007"]
    assert slugs(get(people, "/tenants/", store="store-eu1-b", q="t-2999")) == ["t-2999"]


def test_tenants_are_sorted_both_ways(here: make.Cast, people: People) -> None:
    assert slugs(get(people, "/tenants/", sort="app")) == ["core", "acme", "bolt"]
    html = get(people, "/tenants/", sort="-tenant")
    assert slugs(html) == ["core", "bolt", "acme"]
    assert 'aria-sort="descending"' in html


def test_an_unknown_sort_is_by_name(here: make.Cast, people: People) -> None:
    assert slugs(get(people, "/tenants/", sort="password")) == ["acme", "bolt", "core"]


def test_pages_and_sorts_keep_what_was_searched_for(thousands: int, people: People) -> None:
    html = get(people, "/tenants/", q="t-", page="2")
    assert 'href="/tenants/?q=t-&amp;page=3"' in html
    assert 'href="/tenants/?q=t-&amp;sort=cell"' in html


def test_typing_swaps_the_table_alone(here: make.Cast, people: People) -> None:
    html = people.viewer.get("/tenants/", {"q": "acme"}, headers=HTMX).content.decode()
    assert "<html" not in html
    assert slugs(html) == ["acme"]


def test_a_tenant_that_moves_or_is_fenced_says_so(
    here: make.Cast, people: People, at: datetime
) -> None:
    move = scene.move(here, Phase.BACKFILL, now=at)
    scene.move(here, Phase.VERIFY, now=at, tenant=here.bolt)
    html = get(people, "/tenants/")
    assert f"{move}, BACKFILL" in html
    assert html.count(">Fenced<") == 1


def test_moves_are_listed_by_state_and_found_by_what_they_name(
    here: make.Cast, people: People, at: datetime
) -> None:
    live = scene.move(here, Phase.BACKFILL, now=at)
    ended = scene.move(here, Phase.DONE, now=at, tenant=here.bolt)
    assert _moves(get(people, "/moves/")) == [str(live)]
    assert _moves(get(people, "/moves/", state="ended")) == [str(ended)]
    assert _moves(get(people, "/moves/", state="all")) == [str(ended), str(live)]
    assert _moves(get(people, "/moves/", state="all", q=str(ended))) == [str(ended)]
    assert _moves(get(people, "/moves/", state="all", q="acm")) == [str(live)]
    assert _moves(get(people, "/moves/", state="all", q="9" * 40)) == []
    assert "No move matches" in get(people, "/moves/", q="nobody")


def test_the_polled_list_keeps_its_filter(here: make.Cast, people: People, at: datetime) -> None:
    scene.move(here, Phase.BACKFILL, now=at)
    html = get(people, "/moves/", q="acme")
    assert 'hx-get="/moves/table/?state=live&amp;q=acme&amp;page=1"' in html


def _moves(html: str) -> list[str]:
    return re.findall(r'<tr data-row="(mv-\d+)"', html)


def test_a_tenants_page_shows_where_it_has_lived_and_what_moved_it(
    here: make.Cast, people: People, at: datetime
) -> None:
    done = scene.move(here, Phase.DONE, now=at)
    html = get(people, "/tenants/acme/")
    for words in ("support.acme", "store-eu1-a", "eu1-a-1", "Onboarded", str(done)):
        assert words in html
