"""Fragments: 204 while nothing visible changed, drawn anew when it did, never polled for ever."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime

import pytest
from django.urls import reverse

from migrations_app.domain.phases import Mode, Phase
from migrations_app.models import TenantMigration
from tests import make, scene
from tests.web.conftest import HTMX, People, polled

Moving = Callable[..., TenantMigration]
# Panels of a move that show no running time: they are the same until a row changes.
STILL = [
    "head",
    "checks",
    "mismatches",
    "log",
    "instances",
    "samples",
    "channels",
    "artifacts",
    "split",
]
PANELS = [*STILL, "facts", "phases", "progress", "fence"]


def address(name: str, move: TenantMigration) -> str:
    return reverse(name, args=[move.pk])


@pytest.mark.parametrize("name", PANELS)
def test_a_fragment_is_a_piece_of_the_page(name: str, moving: Moving, people: People) -> None:
    answer = people.viewer.get(address(name, moving(Phase.VERIFY)), headers=HTMX)
    html = answer.content.decode()
    assert answer.status_code == 200
    assert "<html" not in html
    assert 'hx-swap="outerHTML"' in html


@pytest.mark.parametrize("name", STILL)
def test_a_fragment_that_has_nothing_new_answers_204(
    name: str, moving: Moving, people: People
) -> None:
    # Only a split has a panel of who serves what.
    move = moving(Phase.VERIFY, mode=Mode.SPLIT)
    page = people.viewer.get(address("move", move)).content.decode()
    answer = people.viewer.get(polled(page, address(name, move)), headers=HTMX)
    assert answer.status_code == 204
    # What the panel's stamp becomes: the old values are still true.
    assert re.fullmatch(r"\d\d:\d\d:\d\d", answer["Stamp"])


@pytest.mark.parametrize("name", ["facts", "phases", "progress", "fence"])
def test_a_panel_of_an_ended_move_has_no_trigger(name: str, moving: Moving, people: People) -> None:
    html = people.viewer.get(address(name, moving(Phase.DONE)), headers=HTMX).content.decode()
    assert "hx-trigger" not in html


def test_a_panel_without_news_is_drawn_once_more_when_the_move_ends(
    moving: Moving, people: People
) -> None:
    """Else it would go on answering 204, and be polled for ever."""
    move = moving(Phase.OFFBOARD, mode=Mode.SPLIT)
    page = people.viewer.get(address("move", move)).content.decode()
    TenantMigration.objects.update(phase=Phase.DONE, due_at=None, ended_at=move.started_at)
    for name in STILL:
        answer = people.viewer.get(polled(page, address(name, move)), headers=HTMX)
        assert answer.status_code == 200
        assert "hx-trigger" not in answer.content.decode()


def test_the_log_is_drawn_anew_with_its_next_line(moving: Moving, people: People) -> None:
    move = moving(Phase.VERIFY)
    page = people.viewer.get(address("move", move)).content.decode()
    url = polled(page, address("log", move))
    now = move.events.first().at
    move.events.create(at=now, who="mover", was=move.phase, now=move.phase, note="One more line")
    answer = people.viewer.get(url, headers=HTMX)
    assert answer.status_code == 200
    assert "One more line" in answer.content.decode()


def test_a_change_of_the_status_word_is_announced(moving: Moving, people: People) -> None:
    move = moving(Phase.BACKFILL)
    page = people.viewer.get(address("move", move)).content.decode()
    url = polled(page, address("head", move))
    TenantMigration.objects.update(failures=3, failure="no route to the store")
    html = people.viewer.get(url, headers=HTMX).content.decode()
    assert f'hx-swap-oob="innerHTML:#announce">{move} acme: Blocked in BACKFILL<' in html


def test_the_page_itself_announces_nothing(moving: Moving, people: People) -> None:
    page = people.viewer.get(address("move", moving(Phase.BACKFILL))).content.decode()
    assert '<p class="sr" role="status" id="announce"></p>' in page
    assert "hx-swap-oob" not in page


def test_an_instance_that_speaks_changes_its_panel(
    moving: Moving, here: make.Cast, people: People, at: datetime
) -> None:
    move = moving(Phase.DRAIN)
    page = people.viewer.get(address("move", move)).content.decode()
    url = polled(page, address("instances", move))
    one = here.cell.instances.order_by("name").first()
    scene.said(one, at=at, version=move.fence_version, in_flight={"acme": 7})
    answer = people.viewer.get(url, headers=HTMX)
    assert answer.status_code == 200
    assert "Draining" in answer.content.decode()


def test_the_strip_swaps_only_its_clock_while_its_counts_hold(
    here: make.Cast, people: People, at: datetime
) -> None:
    page = people.viewer.get("/").content.decode()
    url = polled(page, reverse("signals"))
    answer = people.viewer.get(url, headers=HTMX)
    assert answer["HX-Reswap"] == "none"
    assert 'hx-swap-oob="innerHTML:#clock"' in answer.content.decode()
    scene.move(here, Phase.VERIFY, now=at)
    changed = people.viewer.get(url, headers=HTMX)
    assert "HX-Reswap" not in changed
    assert "1 fenced" in changed.content.decode()


def test_the_placement_of_a_tenant_is_drawn_anew_when_it_moved(
    here: make.Cast, people: People, at: datetime
) -> None:
    from django.db import transaction

    from tenants import services

    page = people.viewer.get("/tenants/acme/").content.decode()
    url = polled(page, reverse("tenant_placement", args=["acme"]))
    assert people.viewer.get(url, headers=HTMX).status_code == 204
    with transaction.atomic():
        services.place(
            here.acme,
            cell=here.other_cell,
            store=here.other_store,
            by="ada",
            reason="mv-1",
            now=at,
        )
    answer = people.viewer.get(url, headers=HTMX)
    assert answer.status_code == 200
    assert "store-eu1-b" in answer.content.decode()


def test_lists_are_marked_to_hold_their_rows_under_a_persons_focus(
    here: make.Cast, people: People, at: datetime
) -> None:
    scene.move(here, Phase.VERIFY, now=at)
    html = people.operator.get("/").content.decode()
    for panel in ("attention", "moves"):
        assert re.search(rf'<section[^>]* id="{panel}" data-hold', html)


@pytest.mark.parametrize("name", ["move", "overview", "tenants", "moves"])
def test_ids_are_unique_on_a_page(name: str, moving: Moving, people: People, at: datetime) -> None:
    move = moving(Phase.VERIFY)
    scene.mismatches(move, now=at)
    url = address(name, move) if name == "move" else reverse(name)
    html = people.operator.get(url).content.decode()
    ids = re.findall(r'\sid="([^"]+)"', html)
    assert sorted(ids) == sorted(set(ids))
    # Whatever is described or labelled by an id finds it.
    for wanted in re.findall(r'aria-(?:labelledby|describedby)="([^"]+)"', html):
        assert wanted in {*ids, "dialog-h"}


@pytest.mark.parametrize("name", ["move", "overview", "tenants", "tenant", "moves", "new_move"])
def test_every_control_has_an_id_that_a_swap_finds_again(
    name: str, moving: Moving, people: People, at: datetime
) -> None:
    move = moving(Phase.VERIFY)
    scene.mismatches(move, now=at)
    url = {"move": address("move", move), "tenant": "/tenants/acme/"}.get(name) or reverse(name)
    html = people.operator.get(url).content.decode()
    for panel in re.findall(r"<section[^>]*hx-trigger[\s\S]*?</section>", html):
        for control in re.findall(r"<(?:button|input|select|summary|a)\b[^>]*>", panel):
            if "hidden" in control or control.startswith("<summary"):
                continue
            assert " id=" in control or "/moves/mv-" in control or "/tenants/" in control, control
