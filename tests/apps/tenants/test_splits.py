"""Announcing, splitting and joining again: which numbers rise, and what two cells never both do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import IntegrityError, connection, connections, transaction
from django.test import Client

from durable.clock import database_now
from durable.errors import Refused
from tenants import panels, queries, services
from tenants.domain.roles import TokenRole
from tenants.models import Cell, Counter, Placement, PlacementChange, PolicyEntry, Scope
from tests import make

Elsewhere = Callable[[Callable[[], Any]], Any]


@dataclass
class Splits:
    """The cast's acme, told between its first cell and its second."""

    cast: make.Cast
    now: datetime

    def announce(self) -> int:
        with transaction.atomic():
            return services.announce(self.cast.acme, self.cast.other_cell, self.cast.other_store)

    def withdraw(self) -> None:
        with transaction.atomic():
            services.withdraw(self.cast.acme, self.cast.other_cell)

    def publish(self, cell: Cell, accepts: Any) -> int:
        with transaction.atomic():
            return services.publish(self.cast.acme, cell, accepts=accepts)

    def narrow(self) -> int:
        """Let the home take known sessions only."""
        return self.publish(self.cast.cell, "existing")

    def split(self) -> int:
        with transaction.atomic():
            return services.split(
                self.cast.acme,
                cell=self.cast.other_cell,
                store=self.cast.other_store,
                by="mover",
                reason="mv-1",
                now=self.now,
            )

    def split_anew(self) -> int:
        with transaction.atomic():
            return services.split_anew(self.cast.acme, by="mover", reason="again", now=self.now)

    def unsplit(self) -> int:
        with transaction.atomic():
            return services.unsplit(self.cast.acme, by="mover", reason="back", now=self.now)

    def place(self, cell: Cell | None = None) -> int:
        store = self.cast.store if cell == self.cast.cell else self.cast.other_store
        with transaction.atomic():
            return services.place(
                self.cast.acme,
                cell=cell or self.cast.other_cell,
                store=store,
                by="mover",
                reason="mv-1",
                now=self.now,
            )

    def until(self, state: str) -> Splits:
        """Go the way of a split move until the tenant is announced, narrowed or split."""
        self.announce()
        if state != "announced":
            self.narrow()
        if state == "split":
            self.split()
        return self

    @property
    def home(self) -> PolicyEntry:
        return PolicyEntry.objects.get(tenant=self.cast.acme, cell=self.cast.cell)

    @property
    def far(self) -> PolicyEntry:
        return PolicyEntry.objects.get(tenant=self.cast.acme, cell=self.cast.other_cell)

    @property
    def placement(self) -> Placement:
        return Placement.objects.get(tenant=self.cast.acme)

    def told(self, cell: Cell) -> dict[str, Any]:
        """What the cell's instances are sent of acme."""
        with transaction.atomic():
            row = services.join(
                cell,
                name="probe",
                build="",
                boot=make.unique("boot"),
                longest_turn_seconds=1,
                longest_tool_seconds=1,
                plugins=[],
                stores=[],
                replaces=None,
                now=self.now,
            )
        policy = queries.policy(services.poll(row.key, now=self.now), since="")
        assert policy is not None
        return next(one for one in policy.tenants if one["tenant"] == "acme")

    def feed_row(self) -> dict[str, Any]:
        feed = queries.placement_feed(since="")
        assert feed is not None
        return next(row for row in feed.tenants if row["tenant"] == "acme")

    def numbers(self) -> tuple[int, ...]:
        counter = Counter.objects.get()
        cells = Cell.objects.order_by("pk").values_list("policy_version", flat=True)
        return counter.placement_version, counter.feed_version, *cells


@pytest.fixture
def splits(cast: make.Cast, now: datetime) -> Splits:
    return Splits(cast, now)


# --- announcing -----------------------------------------------------------------------------


@pytest.mark.django_db
def test_an_announced_cell_knows_tenant_store_and_scope_and_takes_no_turn(splits: Splits) -> None:
    version = splits.announce()
    told = splits.told(splits.cast.other_cell)
    assert splits.far.version == version == splits.numbers()[3]
    assert (told["accepts"], told["moved_to"], told["split"]) == ("none", None, False)
    assert told["home_cell"] == "cell-eu1-a"
    assert told["store"] == {"key": "store-eu1-b", "kind": "adk-sql"}
    assert told["scope"] == splits.told(splits.cast.cell)["scope"]
    assert told["placement_version"] == splits.feed_row()["placement_version"]


@pytest.mark.django_db
def test_announcing_moves_nobody(splits: Splits) -> None:
    placed, fed, home, _ = splits.numbers()
    splits.announce()
    assert splits.numbers()[:3] == (placed, fed, home)
    assert splits.feed_row()["sides"] is None


@pytest.mark.django_db
def test_announcing_again_raises_nothing_until_something_changed(splits: Splits) -> None:
    first = splits.announce()
    splits.publish(splits.cast.cell, "none")  # Another version elsewhere changes nothing here.
    assert splits.announce() == first
    Scope.objects.create(
        tenant=splits.cast.acme, version=2, max_concurrent_runs=3, at=splits.now, by="ada"
    )
    assert splits.announce() == first + 1
    assert splits.told(splits.cast.other_cell)["scope"]["max_concurrent_runs"] == 3
    assert splits.announce() == first + 1


@pytest.mark.django_db
def test_announcing_a_tombstones_cell_brings_back_what_it_must_know(splits: Splits) -> None:
    splits.place()
    splits.place(splits.cast.cell)
    assert splits.far.accepts == "moved"
    splits.announce()
    assert (splits.far.accepts, splits.far.moved_to) == ("none", None)
    assert splits.far.placement_version == splits.placement.placement_version


@pytest.mark.django_db
def test_nothing_is_announced_to_the_home(splits: Splits) -> None:
    before = splits.numbers()
    with transaction.atomic():
        version = services.announce(splits.cast.acme, splits.cast.cell, splits.cast.other_store)
    assert (version, splits.numbers()) == (splits.home.version, before)
    assert splits.home.accepts == "all"


@pytest.mark.django_db
@pytest.mark.parametrize("accepts", ["new", "none"])
def test_an_announcement_never_touches_a_side_of_a_split(splits: Splits, accepts: str) -> None:
    splits.until("split")
    splits.publish(splits.cast.other_cell, accepts)
    before = splits.numbers(), splits.far.document
    splits.announce()
    splits.withdraw()
    assert (splits.numbers(), splits.far.document) == before
    assert splits.far.accepts == accepts


@pytest.mark.django_db
def test_a_withdrawn_announcement_is_a_tombstone_that_names_the_home(splits: Splits) -> None:
    splits.announce()
    splits.withdraw()
    told = splits.told(splits.cast.other_cell)
    assert (told["accepts"], told["moved_to"], told["home_cell"]) == ("moved", "cell-eu1-a", None)
    before = splits.numbers()
    splits.withdraw()
    assert splits.numbers() == before


@pytest.mark.django_db
def test_what_was_never_announced_is_not_withdrawn(splits: Splits) -> None:
    before = splits.numbers()
    splits.withdraw()
    with transaction.atomic():
        services.withdraw(splits.cast.acme, splits.cast.cell)
    assert splits.numbers() == before
    assert splits.home.accepts == "all"


@pytest.mark.django_db
@pytest.mark.parametrize("accepts", ["all", "existing", "new"])
def test_an_announced_cell_is_never_opened_by_publishing(splits: Splits, accepts: str) -> None:
    splits.until("announced")
    # With the home closed no constraint stands in the way.
    splits.publish(splits.cast.cell, "none")
    with pytest.raises(services.NotHere):
        splits.publish(splits.cast.other_cell, accepts)
    assert splits.far.accepts == "none"


@pytest.mark.django_db
def test_a_fence_move_places_where_it_was_announced(splits: Splits) -> None:
    splits.until("announced")
    splits.place()
    told = splits.told(splits.cast.other_cell)
    assert (told["accepts"], told["home_cell"], told["split"]) == ("all", None, False)


@pytest.mark.django_db
def test_a_list_of_tenants_calls_nobody_fenced_who_is_only_announced(splits: Splits) -> None:
    splits.announce()
    page = panels.tenants_page(panels.TenantsFilter())
    assert [line.fenced for line in page.lines] == [False, False, False]
    splits.publish(splits.cast.cell, "none")
    page = panels.tenants_page(panels.TenantsFilter())
    assert [line.fenced for line in page.lines] == [True, False, False]


# --- splitting ------------------------------------------------------------------------------


@pytest.mark.django_db
def test_a_split_raises_every_number_once_and_names_both_sides(splits: Splits) -> None:
    splits.until("narrowed")
    placed, fed, home, far = splits.numbers()
    version = splits.split()
    assert splits.numbers() == (placed + 1, fed + 1, home + 1, far + 1)
    assert version == placed + 1
    source, target = splits.told(splits.cast.cell), splits.told(splits.cast.other_cell)
    sides = {
        "existing": {"cell": "cell-eu1-a", "store": "store-eu1-a"},
        "new": {"cell": "cell-eu1-b", "store": "store-eu1-b"},
    }
    assert (source["accepts"], source["split"], source["home_cell"]) == ("existing", True, None)
    assert (target["accepts"], target["split"]) == ("new", False)
    assert target["home_cell"] == "cell-eu1-a"
    assert source["sides"] == target["sides"] == sides
    assert (source["store"]["key"], target["store"]["key"]) == ("store-eu1-a", "store-eu1-b")
    epoch = queries.epoch()
    assert {one["placement_version"] for one in (source, target, splits.feed_row())} == {
        f"{epoch}.{version}"
    }


@pytest.mark.django_db
def test_the_feed_names_both_sides_with_their_urls(splits: Splits) -> None:
    splits.until("split")
    feed = queries.placement_feed(since="")
    assert feed is not None
    for cell, url in ((splits.cast.cell, "https://a.eu"), (splits.cast.other_cell, "https://b.eu")):
        services.set_cell_url(cell, url=url, by="ada", now=splits.now)
        changed = queries.placement_feed(since=str(feed.version))
        assert changed is not None
        # A new address of either side is told to gateways.
        assert "acme" in [row["tenant"] for row in changed.tenants]
        feed = changed
    row = splits.feed_row()
    assert row["sides"] == {
        "existing": {"cell": "cell-eu1-a", "cell_url": "https://a.eu", "store": "store-eu1-a"},
        "new": {"cell": "cell-eu1-b", "cell_url": "https://b.eu", "store": "store-eu1-b"},
    }
    assert (row["cell"], row["store"]) == ("cell-eu1-a", "store-eu1-a")


@pytest.mark.django_db
def test_a_split_and_its_end_are_lines_of_the_history(splits: Splits) -> None:
    splits.until("split")
    splits.unsplit()
    ended, begun = PlacementChange.objects.filter(tenant=splits.cast.acme)[:2]
    assert (begun.cell, begun.store, begun.reason) == (
        splits.cast.cell,
        splits.cast.store,
        "mv-1",
    )
    assert (ended.cell, ended.reason) == (splits.cast.cell, "back")
    assert ended.placement_version == begun.placement_version + 1


@pytest.mark.django_db
@pytest.mark.parametrize("accepts", ["all", "none"])
def test_a_split_needs_a_home_where_nothing_is_born(splits: Splits, accepts: str) -> None:
    splits.until("announced").publish(splits.cast.cell, accepts)
    before = splits.numbers()
    with pytest.raises(services.CanNotSplit, match="existing"):
        splits.split()
    assert splits.numbers() == before
    assert splits.placement.split_cell is None


@pytest.mark.django_db
def test_the_sides_of_a_split_are_two_cells(splits: Splits) -> None:
    splits.narrow()
    with pytest.raises(services.CanNotSplit, match="two cells"), transaction.atomic():
        services.split(
            splits.cast.acme,
            cell=splits.cast.cell,
            store=splits.cast.other_store,
            by="m",
            reason="",
            now=splits.now,
        )


@pytest.mark.django_db
def test_splitting_again_raises_nothing_and_opens_both_sides(splits: Splits) -> None:
    splits.until("split")
    version, before = splits.placement.placement_version, splits.numbers()
    assert splits.split() == version
    assert splits.numbers() == before
    for cell in (splits.cast.cell, splits.cast.other_cell):
        splits.publish(cell, "none")
    assert splits.split() == version
    assert (splits.home.accepts, splits.far.accepts) == ("existing", "new")
    assert splits.numbers()[:2] == before[:2]


@pytest.mark.django_db
def test_a_split_that_is_opened_anew_is_another_placement(splits: Splits) -> None:
    splits.until("split").publish(splits.cast.other_cell, "none")
    placed, fed, home, far = splits.numbers()
    version = splits.split_anew()
    assert splits.numbers() == (placed + 1, fed + 1, home + 1, far + 1)
    source, target = splits.told(splits.cast.cell), splits.told(splits.cast.other_cell)
    assert (source["accepts"], source["split"]) == ("existing", True)
    assert (target["accepts"], target["home_cell"]) == ("new", "cell-eu1-a")
    assert source["sides"] == target["sides"] is not None
    epoch = queries.epoch()
    # Whoever was told "not here" by the old one is refused as moved.
    assert {one["placement_version"] for one in (source, target, splits.feed_row())} == {
        f"{epoch}.{version}"
    }
    assert PlacementChange.objects.latest("id").reason == "again"
    splits.unsplit()
    with pytest.raises(services.CanNotSplit, match="not split"):
        splits.split_anew()


@pytest.mark.django_db
def test_a_tenant_is_split_towards_one_side_at_a_time(splits: Splits) -> None:
    splits.until("split")
    third = make.cell("cell-eu1-c", region=splits.cast.region, now=splits.now)
    with pytest.raises(services.TenantIsSplit), transaction.atomic():
        services.split(
            splits.cast.acme,
            cell=third,
            store=splits.cast.other_store,
            by="m",
            reason="",
            now=splits.now,
        )


@pytest.mark.django_db
def test_during_a_split_no_cell_takes_everything(splits: Splits) -> None:
    splits.until("split").publish(splits.cast.other_cell, "none")
    with pytest.raises(services.TenantIsSplit):
        splits.publish(splits.cast.cell, "all")
    assert splits.home.accepts == "existing"


# --- and its end ----------------------------------------------------------------------------


@pytest.mark.django_db
def test_placing_on_the_far_side_ends_the_split(splits: Splits) -> None:
    splits.until("split").publish(splits.cast.cell, "none")
    version = splits.place()
    source, target = splits.told(splits.cast.cell), splits.told(splits.cast.other_cell)
    assert (source["accepts"], source["moved_to"]) == ("moved", "cell-eu1-b")
    assert target["accepts"] == "all"
    for told in (source, target):
        assert (told["split"], told["sides"], told["home_cell"]) == (False, None, None)
        assert told["placement_version"].endswith(f".{version}")
    row = splits.placement
    assert (row.cell, row.store) == (splits.cast.other_cell, splits.cast.other_store)
    assert (row.split_cell, row.split_store) == (None, None)
    before = splits.numbers()
    assert splits.place() == version
    assert splits.numbers() == before


@pytest.mark.django_db
@pytest.mark.parametrize("far", ["new", "none"])
@pytest.mark.parametrize("home", ["existing", "none"])
def test_unsplitting_gives_the_home_everything_back(splits: Splits, home: str, far: str) -> None:
    splits.until("split").publish(splits.cast.cell, home)
    splits.publish(splits.cast.other_cell, far)
    before = splits.placement.placement_version
    version = splits.unsplit()
    assert version == before + 1
    source, target = splits.told(splits.cast.cell), splits.told(splits.cast.other_cell)
    assert (source["accepts"], source["split"], source["sides"]) == ("all", False, None)
    assert (target["accepts"], target["moved_to"]) == ("moved", "cell-eu1-a")
    assert (splits.placement.cell, splits.placement.split_cell) == (splits.cast.cell, None)
    assert splits.feed_row()["sides"] is None
    numbers = splits.numbers()
    assert splits.unsplit() == version
    assert splits.numbers() == numbers


@pytest.mark.django_db
def test_placing_in_a_third_cell_leaves_two_tombstones(splits: Splits) -> None:
    splits.until("split")
    third = make.cell("cell-eu1-c", region=splits.cast.region, now=splits.now)
    splits.place(third)
    assert {splits.home.moved_to, splits.far.moved_to} == {third}
    assert splits.placement.split_cell is None


@pytest.mark.django_db(transaction=True, serialized_rollback=True)
def test_none_of_it_is_done_outside_a_transaction(splits: Splits) -> None:
    acme, cell, store = splits.cast.acme, splits.cast.other_cell, splits.cast.other_store
    for act in (
        lambda: services.announce(acme, cell, store),
        lambda: services.withdraw(acme, cell),
        lambda: services.split(acme, cell=cell, store=store, by="m", reason="", now=splits.now),
        lambda: services.split_anew(acme, by="m", reason="", now=splits.now),
        lambda: services.unsplit(acme, by="m", reason="", now=splits.now),
    ):
        with pytest.raises(RuntimeError):
            act()


# --- two transactions -----------------------------------------------------------------------


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("home", "far", "name"),
    [
        ("all", "all", "one_cell_owns_a_tenant"),
        ("all", "existing", "one_cell_owns_a_tenant"),
        ("existing", "existing", "one_cell_owns_a_tenant"),
        ("all", "new", "one_cell_takes_new_sessions"),
        ("new", "new", "one_cell_takes_new_sessions"),
    ],
)
def test_the_constraints_keep_two_cells_from_the_same_turns(
    splits: Splits, home: str, far: str, name: str
) -> None:
    splits.until("announced")
    PolicyEntry.objects.filter(pk=splits.home.pk).update(accepts=home)
    with pytest.raises(IntegrityError, match=name), transaction.atomic():
        PolicyEntry.objects.filter(pk=splits.far.pk).update(accepts=far)


@pytest.mark.django_db(transaction=True, serialized_rollback=True)
@pytest.mark.parametrize("state", ["narrowed", "split"])
@pytest.mark.parametrize("first", ["split", "split_anew", "place", "unsplit", "withdraw"])
@pytest.mark.parametrize("second", ["split", "place", "announce", "all"])
def test_two_that_come_at_once_follow_each_other_and_leave_one_owner(
    splits: Splits, state: str, first: str, second: str
) -> None:
    """The second begins while the first has its locks: it waits, and sees what the first did."""
    splits.until(state)
    acts: dict[str, Callable[[], Any]] = {
        "split": splits.split,
        "split_anew": splits.split_anew,
        "place": splits.place,
        "unsplit": splits.unsplit,
        "announce": splits.announce,
        "withdraw": splits.withdraw,
        "all": lambda: splits.publish(splits.cast.cell, "all"),
    }
    failures = one_behind_the_other(acts[first], acts[second])
    # Refused in words, never by a constraint: the order of locks and writes is right.
    assert [error for error in failures if not isinstance(error, Refused)] == []
    whole(splits)


@pytest.mark.django_db(transaction=True, serialized_rollback=True)
@pytest.mark.parametrize("act", ["split", "place", "unsplit", "announce", "withdraw"])
def test_who_waited_for_cells_that_the_tenant_has_left_is_told_so(splits: Splits, act: str) -> None:
    """What it holds by then is not what the tenant lives in."""
    splits.until("narrowed")
    third = make.cell("cell-eu1-c", region=splits.cast.region, now=splits.now)
    [error] = one_behind_the_other(lambda: splits.place(third), getattr(splits, act))
    assert isinstance(error, services.PlacementChanged)
    assert splits.placement.cell == third


def one_behind_the_other(first: Callable[[], Any], second: Callable[[], Any]) -> list[Exception]:
    """Do both, the second while the first has not committed; return what they raised."""
    failures: list[Exception] = []

    def try_it(act: Callable[[], Any]) -> None:
        try:
            act()
        except (Refused, IntegrityError) as error:
            failures.append(error)

    def work() -> None:
        try:
            try_it(second)
        finally:
            connections.close_all()

    later = threading.Thread(target=work)
    with transaction.atomic():
        try_it(first)
        later.start()
        limit = time.monotonic() + 10
        while later.is_alive() and not somebody_waits():
            assert time.monotonic() < limit
            later.join(0.01)
    later.join(20)
    assert not later.is_alive()
    return failures


def somebody_waits() -> bool:
    """Return whether another connection to this database waits for a lock."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_stat_clear_snapshot()")
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
        [count] = cursor.fetchone()
    return bool(count)


def whole(splits: Splits) -> None:
    """Assert that placement, feed and entries tell one story."""
    row, entries = splits.placement, PolicyEntry.objects.filter(tenant=splits.cast.acme)
    accepts = {entry.cell_id: entry.accepts for entry in entries}
    assert accepts.pop(row.cell_id) in ("all", "existing")
    home = PolicyEntry.objects.get(tenant=splits.cast.acme, cell=row.cell)
    assert home.document["split"] == (row.split_cell_id is not None)
    if row.split_cell_id is not None:
        assert home.accepts == "existing"
        assert accepts.pop(row.split_cell_id) == "new"
    assert set(accepts.values()) <= {"none", "moved"}
    for entry in entries.filter(accepts="moved"):
        assert entry.moved_to_id in (row.cell_id, row.split_cell_id)


# --- proofs ---------------------------------------------------------------------------------


@pytest.mark.django_db
def test_older_turns_alone_keep_the_proof_of_a_split_waiting(
    splits: Splits, process: Any, now: datetime
) -> None:
    one = process(splits.cast.cell)
    one.join(now=now)
    services.poll(one.key, now=now)
    version = splits.until("announced").narrow()

    def proof(applied: int, running: int, older: int) -> queries.Proof:
        report = one.next_report(
            applied_version=f"{queries.epoch()}.{applied}",
            in_flight={"acme": running},
            in_flight_older={"acme": older, "bolt": 5},
        )
        services.report(report, now=now)
        return queries.older_proof(splits.cast.cell, splits.cast.acme, version, now=now)

    assert [word.state for word in proof(version - 1, 0, 0).instances] == ["missing"]
    waiting = proof(version, 3, 1)
    assert [(word.state, word.in_flight) for word in waiting.instances] == [("draining", 1)]
    assert (waiting.drained, waiting.in_flight) == (False, 1)
    done = proof(version, 2, 0)
    assert (done.drained, done.in_flight) == (True, 0)
    # Turns of known sessions go on, so the fence itself has not closed.
    assert not queries.fence_proof(splits.cast.cell, splits.cast.acme, version, now=now).drained


@pytest.mark.django_db
def test_one_that_lapsed_is_counted_out_of_an_older_proof_and_marked_by_it(
    splits: Splits, process: Any, now: datetime
) -> None:
    silent = process(splits.cast.cell)
    silent.join(now=now)
    services.poll(silent.key, now=now)
    version = splits.until("announced").narrow()
    edge = now + timedelta(seconds=900 + 5 + 60)
    cell, acme = splits.cast.cell, splits.cast.acme
    early = queries.older_proof(cell, acme, version, now=edge - timedelta(seconds=1))
    assert (early.drained, early.lapsed) == (False, ())
    proof = queries.older_proof(cell, acme, version, now=edge)
    assert (proof.drained, proof.lapsed) == (True, (silent.row.pk,))
    with transaction.atomic():
        assert services.mark_lapsed(proof.lapsed, now=edge)
    assert silent.row.gone_at == edge


@pytest.mark.django_db
def test_an_announcement_waits_for_those_that_have_not_applied_it(
    splits: Splits, process: Any, now: datetime
) -> None:
    names = ("applied", "late", "never asked", "left", "lapsed")
    ones = {name: process(splits.cast.other_cell, boot=name) for name in names}
    for name, one in ones.items():
        one.join(now=now - timedelta(seconds=2_000) if name == "lapsed" else now)
        if name not in ("never asked", "lapsed"):
            services.poll(one.key, now=now)
    services.leave(ones["left"].key, now=now)
    version = splits.announce()
    for name, applied in (("applied", version), ("late", version - 1)):
        said = ones[name].next_report(applied_version=f"{queries.epoch()}.{applied}")
        services.report(said, now=now)

    def waited_for() -> list[str]:
        words = queries.announced_check(splits.cast.other_cell, splits.cast.acme, version, now=now)
        return [word.name for word in words]

    assert waited_for() == ["agents-late"]
    # Of another epoch, what was applied says nothing.
    Counter.objects.update(epoch="0123456789ab")
    assert waited_for() == ["agents-applied", "agents-late"]


# --- the wire -------------------------------------------------------------------------------


@pytest.mark.django_db
def test_the_wire_and_its_document_spell_a_split_alike(splits: Splits) -> None:
    splits.until("split")
    _, secret = services.make_token(
        "gateway",
        role=TokenRole.GATEWAY,
        expires_at=database_now() + timedelta(days=1),
        by=make.BY,
        now=splits.now,
    )
    client = Client(headers={"Authorization": f"Bearer {secret}"})
    rows = client.get("/api/v1/placement").json()["tenants"]
    sides = {row["tenant"]: row["sides"] for row in rows}
    assert sides == {"acme": splits.feed_row()["sides"], "bolt": None, "core": None}
    schemas = Client().get("/api/v1/openapi.json").json()["components"]["schemas"]
    told = splits.told(splits.cast.cell)
    assert set(schemas["EntryOut"]["properties"]) == set(told)
    assert set(schemas["PlacementOut"]["properties"]) == set(splits.feed_row())
    assert set(schemas["FeedSidesOut"]["properties"]) == {"existing", "new"}
    assert set(schemas["FeedSideOut"]["properties"]) == set(sides["acme"]["new"])
    assert set(schemas["SideOut"]["properties"]) == set(told["sides"]["new"])


@pytest.mark.django_db
def test_an_entry_from_before_there_were_splits_is_sent_whole(splits: Splits) -> None:
    entry = splits.home
    for key in ("split", "sides", "home_cell"):
        del entry.document[key]
    entry.save()
    told = splits.told(splits.cast.cell)
    assert (told["split"], told["sides"], told["home_cell"]) == (False, None, None)
