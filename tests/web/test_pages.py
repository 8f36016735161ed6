"""Every page in every phase: it is drawn, it is true, and it is safe to show."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timedelta

import pytest
from django.test import Client
from django.urls import reverse

from migrations_app.domain.phases import Phase
from migrations_app.models import TenantMigration
from tests import make, scene
from tests.web.conftest import People

Moving = Callable[..., TenantMigration]


def page(client: Client, move: TenantMigration) -> str:
    answer = client.get(reverse("move", args=[move.pk]))
    assert answer.status_code == 200
    return answer.content.decode()


def text_of(html: str) -> str:
    """Return what a person reads."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html))


@pytest.mark.parametrize("phase", Phase)
def test_a_move_is_drawn_in_each_phase(phase: Phase, moving: Moving, people: People) -> None:
    html = page(people.operator, moving(phase))
    assert "acme: store-eu1-a → store-eu1-b" in html
    assert "NaN" not in html
    assert ">None<" not in html


@pytest.mark.parametrize("phase", [Phase.DONE, Phase.ABORTED])
def test_a_move_that_has_ended_is_not_polled(phase: Phase, moving: Moving, people: People) -> None:
    move = moving(phase)
    html = page(people.operator, move)
    assert f'hx-get="{reverse("move", args=[move.pk])}' not in html
    # The strip goes on: other moves live.
    assert f'hx-get="{reverse("signals")}' in html


def test_a_move_whose_fence_is_closed_is_polled_each_second(moving: Moving, people: People) -> None:
    html = page(people.operator, moving(Phase.VERIFY))
    for name in ("head", "facts", "phases", "progress", "fence", "instances", "mismatches", "log"):
        assert re.search(rf'hx-get="/moves/mv-\d+/{name}/[^"]*" hx-trigger="every 1s', html)


@pytest.mark.parametrize(
    "address",
    [
        "/",
        "/moves/",
        "/moves/new/",
        "/moves/new/?tenant=acme",
        "/tenants/",
        "/tenants/acme/",
        "/tenants/acme/usage/",
        "/tenants/acme/limits/",
        "/usage/",
        "/instances/",
        "/isolation/",
        "/x/",
    ],
)
def test_a_page_holds_nothing_that_its_policy_forbids(
    address: str, moving: Moving, people: People
) -> None:
    moving(Phase.VERIFY)
    answer = people.operator.get(address)
    policy = answer["Content-Security-Policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    html = answer.content.decode()
    assert not re.search(r"<script(?![^>]* src=)", html)
    assert not re.search(r"<[^>]+\s(style|on\w+)=", html)
    assert "<style" not in html


def test_ids_and_addresses_are_written_without_separators(
    moving: Moving, people: People, at: datetime
) -> None:
    move = moving(Phase.VERIFY, pk=12_345)
    scene.mismatches(move, now=at)
    for address in (reverse("move", args=[move.pk]), "/", "/moves/", "/tenants/acme/"):
        html = people.operator.get(address).content.decode()
        assert "12,345" not in html
        assert "mv-12345" in html


def test_numbers_that_people_read_have_separators(moving: Moving, people: People) -> None:
    html = page(people.viewer, moving(Phase.VERIFY))
    assert "12,600" in html
    assert "8,568" in html


def test_progress_is_never_the_whole_with_work_left(moving: Moving, people: People) -> None:
    """A later sweep of VERIFY counts on; the sessions are all compared, the phase is not over."""
    move = moving(Phase.VERIFY, done=14_440, todo=12_600, stage="shared")
    html = page(people.viewer, move)
    assert "100\u202f%" not in html
    assert "12,600 of 12,600" in html
    assert "14,440" not in html


def test_who_has_not_acknowledged_is_named(
    moving: Moving, here: make.Cast, people: People, at: datetime
) -> None:
    one, two = here.cell.instances.order_by("name")
    move = moving(Phase.DRAIN)
    scene.said(one, at=at, version=move.fence_version, in_flight={"acme": 2})
    scene.said(two, at=at, version=move.fence_version - 1)
    text = text_of(page(people.viewer, move))
    assert "1 of 2 acknowledged" in text
    assert re.search(r"eu1-a-1 \d\d:\d\d:\d\d Draining", text)
    assert "eu1-a-2 has not acknowledged" in text


def test_an_instance_that_was_lost_is_not_waited_for(
    moving: Moving, here: make.Cast, people: People, at: datetime
) -> None:
    one, _ = here.cell.instances.order_by("name")
    move = moving(Phase.DRAIN)
    one.lease_until = at - timedelta(minutes=10)
    one.save()
    assert "eu1-a-1: lease and longest turn are over" in text_of(page(people.viewer, move))


def test_a_red_check_is_the_first_thing_to_read(moving: Moving, people: People) -> None:
    red = [{"name": "Quota of cell-eu1-b", "ok": False, "detail": "it is only assumed."}]
    text = text_of(page(people.viewer, moving(Phase.PREPARE, checks=red)))
    assert "Blocked in PREPARE" in text
    assert "Not ready Quota of cell-eu1-b: it is only assumed." in text


def test_mismatches_name_part_difference_and_what_it_looks_like(
    moving: Moving, people: People, at: datetime
) -> None:
    move = moving(Phase.VERIFY)
    scene.mismatches(move, now=at)
    text = text_of(page(people.operator, move))
    assert "3 block TARGET" in text
    assert "Blocked in VERIFY" in text
    assert "event 41 of 44 is missing" in text
    assert "Written at the source after it was copied." in text
    assert "Reconcile user" in text
    assert "Re-copy all 3" in text


def test_values_from_a_store_are_escaped(moving: Moving, people: People, at: datetime) -> None:
    move = moving(Phase.VERIFY)
    row = scene.mismatches(move, now=at)[0]
    row.first_difference = '<script>alert("x")</script>'
    row.save()
    assert "<script>alert" not in page(people.operator, move)


def test_a_dirty_history_of_thousands_stays_one_short_page(
    moving: Moving, people: People, at: datetime
) -> None:
    move = moving(Phase.BACKFILL)
    first = move.samples.order_by("id").first()
    rows = []
    for index in range(5_000):
        first.pk, first.done = None, index
        rows.append(type(first)(**{f.name: getattr(first, f.name) for f in first._meta.fields}))
    type(first).objects.bulk_create(rows)
    figure = people.viewer.get(reverse("changed_figure", args=[move.pk])).json()
    assert len(figure["data"][0]["x"]) <= 300
    assert figure["live"] == 5
    assert figure["data"][0]["y"][-1] == rows[-1].copied


def test_a_chart_of_a_move_that_ended_is_fetched_once(moving: Moving, people: People) -> None:
    move = moving(Phase.DONE)
    figure = people.viewer.get(reverse("changed_figure", args=[move.pk])).json()
    assert "live" not in figure


def test_the_overview_puts_the_worst_first(here: make.Cast, people: People, at: datetime) -> None:
    calm = scene.move(here, Phase.BACKFILL, now=at, tenant=here.bolt)
    fenced = scene.move(here, Phase.VERIFY, now=at, tenant=here.core)
    blocked = scene.move(here, Phase.VERIFY, now=at)
    scene.mismatches(blocked, now=at)
    html = people.viewer.get("/").content.decode()
    rows = re.findall(r'<li data-row="move-(mv-\d+)"', html)
    assert rows == [str(blocked), str(fenced)]
    assert "2 things need a person." in html
    # Its list of moves keeps their order, whatever happens to them.
    listed = re.findall(r'<tr data-row="(mv-\d+)"', html)
    assert listed == [str(calm), str(fenced), str(blocked)]


def test_the_strip_counts_moves_by_what_they_are(
    here: make.Cast, people: People, at: datetime
) -> None:
    scene.mismatches(scene.move(here, Phase.VERIFY, now=at), now=at)
    scene.move(here, Phase.SOAK, now=at, tenant=here.bolt, into=60)
    scene.move(
        here,
        Phase.BACKFILL,
        now=at,
        tenant=here.core,
        pause_requested_at=at,
        pause_requested_by="olga",
    )
    html = people.viewer.get("/").content.decode()
    words = re.findall(r'id="sig-\w+"[^>]*><span class="status" data-status="\w+">([^<]*)<', html)
    assert words == [
        "1 blocked",
        "0 instances lost",
        "0 aborted",
        "1 fenced",
        "1 paused",
        "0 waiting",
        "0 moving",
        "1 soaking",
    ]


def test_an_empty_installation_says_what_would_be_where(people: People) -> None:
    text = text_of(people.operator.get("/").content.decode())
    for words in ("Nothing needs a person.", "No move is in progress.", "No cell is registered."):
        assert words in text
    assert "No tenant is registered." in text_of(people.operator.get("/tenants/").content.decode())


@pytest.mark.parametrize("address", ["/moves/mv-999/", "/tenants/nobody/", "/moves/mv-x/", "/x"])
def test_a_page_that_does_not_exist_says_so_in_style(address: str, people: People) -> None:
    answer = people.viewer.get(address)
    assert answer.status_code == 404
    assert "Nothing is here" in answer.content.decode()
    assert 'aria-label="Main"' in answer.content.decode()


def test_a_failure_has_a_page_without_any_read(people: People) -> None:
    from django.template.loader import render_to_string

    assert "The server failed to answer" in render_to_string("500.html")


def test_health_says_that_the_process_answers(client: Client) -> None:
    assert client.get("/healthz").json() == {"status": "ok"}


@pytest.mark.django_db
def test_readiness_asks_the_database(client: Client) -> None:
    assert client.get("/readyz").json() == {"status": "ok", "database": "ok"}
