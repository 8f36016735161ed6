"""A move of the cell alone, as people see it: cells, not stores; nothing copied, nothing closed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.urls import reverse

from migrations_app import services
from migrations_app.domain.phases import Mode, Phase
from migrations_app.models import TenantMigration
from tenants.models import RuntimeInstance
from tests import make, scene
from tests.stores import Raw
from tests.web.conftest import HTMX, People
from tests.web.test_new_move import FORM, NEW
from tests.web.test_pages import page, text_of
from tests.world import World, world

# What only a copy has, or another store: none of it may stand on such a page.
NEVER = (
    "store-eu1-b",
    "0 mismatches",
    "Mismatches",
    "Changed sessions while copying",
    "Memory and side channels",
    "Artifacts",
    "Copied in all",
    "Compared in all",
    "Changed at drain",
    "Touched since",
    "Confirm offboard",
    "Change pace",
    "Leave copy behind",
    "source is deleted",
    "Source kept closed",
    "had been copied",
    "equal on both sides",
    "Passes go on",
    " on store-eu1-a",
)
TITLE = "acme: cell-eu1-a → cell-eu1-b"
BACK = "That cell-eu1-b has stopped is shown by the word of its instances alone"
THERE = "That cell-eu1-a has stopped is shown by the word of its instances alone"
LOG = "Event log"


@pytest.fixture
def one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: make.Cast, at: datetime
) -> Iterator[World]:
    """A world whose instances have all opened the one store."""
    RuntimeInstance.objects.update(stores=["store-eu1-a"])
    source, target = (f"sqlite:///{tmp_path}/{name}.db" for name in ("one", "two"))
    with world(monkeypatch, here, at, source, target) as ready:
        yield ready


def begin(one: World, **options: Any) -> TenantMigration:
    return one.start(
        target_store=one.cast.store, **{"automatic": False, "soak_seconds": 3600.0} | options
    )


def step(one: World, *, heard: bool = True, **in_flight: int) -> TenantMigration:
    """Take a step, before which every instance has said what it applied, and polled fast."""
    for row in RuntimeInstance.objects.select_related("cell") if heard else ():
        row.hurried_at = one.clock.now - timedelta(seconds=1)
        scene.said(
            row, at=one.clock.now, version=row.cell.policy_version, in_flight=dict(in_flight)
        )
    return one.step()


def walk(one: World, until: Callable[[TenantMigration], bool]) -> TenantMigration:
    for _ in range(30):
        if until(one.move):
            return one.move
        step(one)
    raise AssertionError((one.move.phase, one.move.waiting_for))


def at_phase(phase: Phase) -> Callable[[TenantMigration], bool]:
    return lambda move: move.phase == phase


def is_ready(move: TenantMigration) -> bool:
    return move.stage == "ready"


def ask(one: World, verb: str) -> None:
    getattr(services, verb)(one.move, by="olga", reason="so", now=one.clock())


def assert_reads(people: People, move: TenantMigration, *lines: str) -> None:
    """Read a move's page as somebody who has to rely on it."""
    text = text_of(page(people.operator, move))
    assert TITLE in text
    assert "Store store-eu1-a stays, open" in text
    for line in lines:
        assert line in text, (line, text)
    # The log tells what was found: "12 sessions stay on store-eu1-a", for one.
    shown = text.partition(LOG)[0]
    for line in NEVER:
        assert line not in shown, (move.phase, line, shown)


def dialog(people: People, verb: str, move: TenantMigration) -> str:
    answer = people.operator.get(reverse(verb, args=[move.pk]), headers=HTMX)
    assert answer.status_code == 200
    text = text_of(answer.content.decode()).replace("&#x27;", "'")
    # Wherever one is asked: nothing is lost, and where the sessions are.
    assert "Every session on store-eu1-a, which stays open to both cells." in text
    assert "Thrown away Nothing: nothing was copied." in text
    assert "store-eu1-b" not in text
    return text


def overview(people: People) -> str:
    return text_of(people.operator.get("/").content.decode())


def test_pages_tell_the_way_there_by_its_cells(one: World, people: People) -> None:
    begin(one)
    assert_reads(people, one.move, "Checking the store and both cells", "Served in cell-eu1-a")
    step(one, heard=False)
    assert_reads(people, one.move, "For instances to learn of acme: eu1-b-1.")

    walk(one, is_ready)
    assert_reads(
        people,
        one.move,
        "PREPARE, 1 of 4",
        "Waits for somebody to start the drain. acme is served meanwhile.",
        "Fits its budget",
        "Closes when an operator starts the drain",
        "store-eu1-a is not closed: agents of both cells write it.",
        THERE,
        "TARGET once drained",
    )
    assert "Only its cell changes; it is served in cell-eu1-a until then." in overview(people)
    listed = text_of(people.viewer.get("/moves/").content.decode())
    assert "cell-eu1-a → cell-eu1-b" in listed
    assert "store-eu1" not in listed

    step(one)
    assert one.move.waiting_for == "somebody to start the drain"
    ask(one, "close_fence")
    # The word was given: nobody is waited for to give it.
    assert_reads(people, one.move, "Take back drain", "it waits for its next step")
    assert "For somebody to start" not in text_of(page(people.operator, one.move))
    walk(one, at_phase(Phase.DRAIN))
    step(one)
    step(one, heard=False)
    assert_reads(
        people,
        one.move,
        "DRAIN, 2 of 4",
        "Tenant sees Retry-after",
        "For eu1-a-1, eu1-a-2 to drain.",
        "Instances acknowledged 0 of 2",
        "Reopens by itself",
        THERE,
    )
    assert "new turns get retry-after" in overview(people)

    walk(one, at_phase(Phase.TARGET))
    assert_reads(people, one.move, "Publishing the new cell", "cell-eu1-b is published as its cell")
    walk(one, at_phase(Phase.SOAK))
    assert_reads(
        people,
        one.move,
        "SOAK, 4 of 4",
        "Served in cell-eu1-b",
        "Can be sent back to cell-eu1-a until",
        "Then the move is done, nothing is deleted",
        "A rollback now, expected",
        "acme lives in cell-eu1-b",
    )
    assert "soak ends; it stays in cell-eu1-b" in overview(people)

    one.clock.pass_by(3601)
    walk(one, at_phase(Phase.DONE))
    assert_reads(
        people,
        one.move,
        "acme lives in cell-eu1-b",
        "cell-eu1-b serves it; nothing was copied or deleted",
    )


def test_pages_tell_the_way_back_and_that_it_was_stopped(one: World, people: People) -> None:
    begin(one, automatic=True)
    walk(one, at_phase(Phase.SOAK))
    ask(one, "rollback")
    assert_reads(people, one.move, "Rolling back in SOAK", "Served in cell-eu1-b")
    walk(one, lambda move: move.phase == Phase.REVERSE_DRAIN and move.fence_version is not None)
    step(one, heard=False)
    assert_reads(
        people,
        one.move,
        "The way back",
        "REVERSE_DRAIN, 2 of 4",
        "Fence in cell-eu1-b",
        "For eu1-b-1 to drain.",
        BACK,
    )
    ask(one, "abort")
    step(one)
    assert_reads(people, one.move, "cell-eu1-b is opened to it again")
    step(one)
    assert_reads(people, one.move, "Beginning its soak anew")
    walk(one, lambda move: move.stage == "")
    assert_reads(people, one.move, "acme stays in cell-eu1-b.", "Served in cell-eu1-b")

    ask(one, "rollback")
    walk(one, at_phase(Phase.REVERSE_TARGET))
    assert_reads(people, one.move, "cell-eu1-a is published as its cell again")
    walk(one, at_phase(Phase.ROLLED_BACK))
    assert_reads(
        people,
        one.move,
        "Rolled back, acme lives in cell-eu1-a",
        "cell-eu1-a serves it again; nothing was copied",
        "Served in cell-eu1-a",
    )


def test_a_move_that_gave_up_says_who_kept_it_and_who_serves(one: World, people: People) -> None:
    begin(one, automatic=True, drain_bound_seconds=10)
    walk(one, lambda move: move.phase == Phase.DRAIN and move.fence_version is not None)
    one.clock.pass_by(11)
    step(one, heard=False)
    assert_reads(people, one.move, "waiting for eu1-a-1, eu1-a-2", "Opening cell-eu1-a again")
    walk(one, at_phase(Phase.ABORTED))
    assert_reads(
        people,
        one.move,
        "Aborted, acme stayed in cell-eu1-a",
        "cell-eu1-a serves it as before; nothing was copied",
        "acme is open in cell-eu1-a",
    )
    assert "mv-" in overview(people)
    assert "aborted by itself" in overview(people)


def test_a_fence_past_its_budget_says_which_cell_it_reopens(one: World, people: People) -> None:
    begin(one, automatic=True, budget_seconds=61, drain_bound_seconds=60)
    walk(one, lambda move: move.phase == Phase.DRAIN and move.fence_version is not None)
    step(one, acme=1)
    one.clock.pass_by(62)
    step(one, acme=1)
    assert "reopening in cell-eu1-a" in text_of(page(people.operator, one.move))


def test_what_is_missing_before_it_begins_is_named(one: World, people: People) -> None:
    begin(one)
    RuntimeInstance.objects.filter(name="eu1-b-1").update(stores=[])
    step(one)
    assert one.move.phase == Phase.PREPARE
    assert_reads(people, one.move, "Blocked in PREPARE", "Not ready Instances: eu1-b-1")
    assert "can't begin: 1 check red" in overview(people).replace("&#x27;", "'")


def test_an_instance_that_lapsed_is_not_said_to_be_refused_by_the_store(
    one: World, people: People
) -> None:
    begin(one, automatic=True)
    walk(one, lambda move: move.phase == Phase.DRAIN and move.fence_version is not None)
    RuntimeInstance.objects.filter(name="eu1-a-2").update(
        lease_until=one.clock.now - timedelta(hours=1)
    )
    text = text_of(page(people.operator, one.move))
    assert "it may write nothing more, though the open store would take it" in text
    assert "nothing more can be written" not in text


def test_dialogs_of_the_way_there_are_about_cells(one: World, people: People) -> None:
    begin(one)
    walk(one, is_ready)
    text = dialog(people, "abort", one.move)
    assert "Preparing stops. acme goes on being served in cell-eu1-a." in text
    assert "Abort, stay in old cell" in text
    text = dialog(people, "pause", one.move)
    assert "The fence does not close. acme goes on being served in cell-eu1-a." in text
    text = dialog(people, "close_fence", one.move)
    assert "new turns of acme get retry-after on all 2 instances of cell-eu1-a." in text
    assert "When all of them have stopped, acme is served in cell-eu1-b." in text
    assert "Proof The word of cell-eu1-a's instances" in text
    assert "store-eu1-a is not closed behind it." in text
    assert "drain 0.2s, publish 0.7s." in text
    ask(one, "close_fence")
    text = dialog(people, "cancel_fence", one.move)
    assert "The fence stays open. acme goes on being served in cell-eu1-a." in text

    walk(one, lambda move: move.phase == Phase.DRAIN and move.fence_version is not None)
    text = dialog(people, "abort", one.move)
    assert "The fence opens: acme is served in cell-eu1-a again within one poll" in text
    text = dialog(people, "pause", one.move)
    assert "The move then aborts by itself and reopens in cell-eu1-a." in text
    text = dialog(people, "hold_fence", one.move)
    assert "Abort reopens at once." in text


def test_dialogs_of_the_way_back_carry_nothing(one: World, people: People) -> None:
    begin(one, automatic=True)
    walk(one, at_phase(Phase.SOAK))
    text = dialog(people, "rollback", one.move)
    assert "Send acme back to cell-eu1-a?" in text
    assert "Nothing is carried back: what it wrote since is on store-eu1-a already." in text
    assert "Past it acme stays in cell-eu1-b" in text
    assert "Budget, seconds" not in text
    text = dialog(people, "pause", one.move)
    assert "The move does not end when the soak does" in text
    ask(one, "rollback")
    text = dialog(people, "cancel_rollback", one.move)
    assert "acme goes on being served in cell-eu1-b; the soak goes on." in text
    walk(one, lambda move: move.phase == Phase.REVERSE_DRAIN and move.fence_version is not None)
    text = dialog(people, "abort", one.move)
    assert "Stop the rollback and keep acme in cell-eu1-b?" in text
    assert "The fence opens: acme is served in cell-eu1-b within one poll" in text
    text = dialog(people, "pause", one.move)
    assert "The rollback then stops by itself and reopens in cell-eu1-b." in text
    assert "Stop rollback reopens at once." in dialog(people, "hold_fence", one.move)


@pytest.mark.parametrize("verb", ["set_pace", "flip", "confirm_offboard", "leave_behind"])
def test_an_act_that_only_a_copy_has_is_refused_in_its_dialog(
    verb: str, one: World, people: People
) -> None:
    begin(one, automatic=True)
    move = walk(one, at_phase(Phase.SOAK))
    assert "nothing is copied, compared or deleted" in dialog(people, verb, move)
    given = {"seen": move.phase, "reason": "so", "typed": "acme", "pace_per_second": "3"}
    answer = people.operator.post(reverse(verb, args=[move.pk]), given, headers=HTMX)
    assert answer.status_code == 409
    assert one.move.phase == Phase.SOAK
    assert one.move.offboard_confirmed_at is None


# --- starting one ------------------------------------------------------------------------------


@pytest.fixture
def own(one: World) -> Raw:
    """The one store, with nothing started."""
    return one.source


OWN = FORM | {"target_store": "store-eu1-a", "reason": "nearer to its users"}


@pytest.mark.usefixtures("own")
def test_the_form_says_what_its_own_store_means(people: People) -> None:
    text = text_of(people.operator.get(NEW, {"tenant": "acme"}).content.decode())
    assert "With the store where it is now only the cell changes" in text
    assert "a split or a flip by hand is refused" in text


@pytest.mark.usefixtures("own")
def test_a_dry_run_tells_four_phases_and_no_copy(people: People) -> None:
    html = people.operator.post(NEW, OWN | {"act": "dry_run"}).content.decode()
    text = text_of(html)
    for phase in ("PREPARE", "DRAIN", "TARGET", "SOAK"):
        assert f"<b>{phase}</b>" in html
    for phase in ("BACKFILL", "DELTA", "VERIFY", "OFFBOARD"):
        assert f"<b>{phase}</b> <span>" not in html
    assert "Would start" in text
    assert "Store and cells, looked at" in text
    assert "Nothing is copied; the fence takes" in text
    assert "12 sessions of 4 users stay on store-eu1-a, which stays open" in text
    assert "the copy is through at" not in text
    assert not TenantMigration.objects.exists()


@pytest.mark.usefixtures("own")
def test_the_form_starts_one_whatever_its_copy_was_chosen_to_be(people: People) -> None:
    """Pace and deletion have no meaning there, and do no harm."""
    given = OWN | {"pace_per_second": "40", "offboard": "automatic", "start_fence": "fits"}
    answer = people.operator.post(NEW, given)
    assert answer.status_code == 302, text_of(answer.content.decode())
    assert TenantMigration.objects.get().mode == Mode.CELL


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("act", ["start", "dry_run"])
@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"flip_by_hand": "on"}, "nothing to look at before the flip"),
        ({"mode": "split"}, "a split is between two stores"),
        ({"target_cell": "cell-eu1-a"}, "lives in cell-eu1-a, on store-eu1-a, already"),
        ({"pause_before": "delta"}, "DELTA"),
    ],
    ids=["flip by hand", "split", "nowhere", "pause"],
)
def test_what_makes_no_sense_is_refused_in_place(
    act: str, more: dict[str, str], why: str, people: People
) -> None:
    answer = people.operator.post(NEW, OWN | more | {"act": act}, headers=HTMX)
    text = text_of(answer.content.decode())
    assert why in text
    # What was chosen still stands in the form.
    assert "nearer to its users" in answer.content.decode()
    assert not TenantMigration.objects.exists()
