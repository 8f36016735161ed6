"""Publishing and placing: which numbers are raised, in which order, and what never comes back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import IntegrityError, connections, transaction

from tenants import services
from tenants.models import Cell, Counter, Placement, PlacementChange, PolicyEntry
from tests import make


def counters() -> tuple[int, int]:
    row = Counter.objects.get()
    return row.placement_version, row.feed_version


def versions(cast: make.Cast) -> tuple[int, int]:
    one, two = (Cell.objects.get(pk=cell.pk) for cell in (cast.cell, cast.other_cell))
    return one.policy_version, two.policy_version


def entry(cast: make.Cast, cell: Cell) -> PolicyEntry:
    return PolicyEntry.objects.get(tenant=cast.acme, cell=cell)


def move(cast: make.Cast, now: datetime, *, back: bool = False) -> int:
    cell, store = (cast.cell, cast.store) if back else (cast.other_cell, cast.other_store)
    with transaction.atomic():
        return services.place(cast.acme, cell=cell, store=store, by="mover", reason="mv-1", now=now)


@pytest.mark.django_db
def test_publishing_raises_the_cells_version_by_one_and_stamps_the_entry(cast: make.Cast) -> None:
    before, counted = versions(cast), counters()
    version = services.publish(cast.acme, cast.cell, accepts="none")
    assert version == before[0] + 1
    assert versions(cast) == (version, before[1])
    assert (entry(cast, cast.cell).version, entry(cast, cast.cell).accepts) == (version, "none")
    assert counters() == counted


@pytest.mark.django_db(transaction=True, serialized_rollback=True)
def test_publishing_outside_a_transaction_is_a_bug(cast: make.Cast, now: datetime) -> None:
    with pytest.raises(RuntimeError):
        services.publish(cast.acme, cast.cell, accepts="none")
    with pytest.raises(RuntimeError):
        services.place(
            cast.acme, cell=cast.other_cell, store=cast.store, by="m", reason="", now=now
        )
    with pytest.raises(RuntimeError):
        services.mark_lapsed([], now=now)
    with pytest.raises(RuntimeError):
        services.audit(who="ada", verb="x", subject="x", now=now)


@pytest.mark.django_db
def test_nothing_is_published_where_the_tenant_never_lived(cast: make.Cast) -> None:
    with pytest.raises(services.NotHere), transaction.atomic():
        services.publish(cast.acme, cast.other_cell, accepts="all")
    assert versions(cast)[1] == 0


@pytest.mark.django_db
def test_a_late_publication_does_not_bring_a_tombstone_back_to_life(
    cast: make.Cast, now: datetime
) -> None:
    move(cast, now)
    with pytest.raises(services.NotHere), transaction.atomic():
        services.publish(cast.acme, cast.cell, accepts="all")
    assert entry(cast, cast.cell).accepts == "moved"


@pytest.mark.django_db
def test_placing_elsewhere_changes_placement_entry_history_and_every_number_once(
    cast: make.Cast, now: datetime
) -> None:
    numbers, counted = versions(cast), counters()
    version = move(cast, now)
    assert counters() == (counted[0] + 1, counted[1] + 1)
    assert version == counted[0] + 1
    assert versions(cast) == (numbers[0] + 1, numbers[1] + 1)
    home = Placement.objects.get(tenant=cast.acme)
    assert (home.cell, home.store) == (cast.other_cell, cast.other_store)
    assert (home.placement_version, home.feed_version) == (version, counted[1] + 1)
    left, taken = entry(cast, cast.cell), entry(cast, cast.other_cell)
    assert (left.accepts, left.moved_to) == ("moved", cast.other_cell)
    assert left.document["moved_to"] == cast.other_cell.slug
    assert (taken.accepts, taken.moved_to, taken.store) == ("all", None, cast.other_store)
    assert taken.document["store"]["key"] == cast.other_store.key
    assert left.placement_version == taken.placement_version == version
    newest = PlacementChange.objects.filter(tenant=cast.acme)[0]
    assert (newest.cell, newest.by, newest.reason) == (cast.other_cell, "mover", "mv-1")


@pytest.mark.django_db
def test_a_tenant_that_comes_back_owns_its_old_cell_again(cast: make.Cast, now: datetime) -> None:
    move(cast, now)
    move(cast, now, back=True)
    assert entry(cast, cast.cell).accepts == "all"
    assert entry(cast, cast.cell).document["moved_to"] is None
    assert entry(cast, cast.other_cell).accepts == "moved"


@pytest.mark.django_db
def test_another_store_in_the_same_cell_leaves_no_tombstone(cast: make.Cast, now: datetime) -> None:
    with transaction.atomic():
        services.place(
            cast.acme, cell=cast.cell, store=cast.other_store, by="m", reason="", now=now
        )
    [only] = PolicyEntry.objects.filter(tenant=cast.acme)
    assert (only.accepts, only.store) == ("all", cast.other_store)


@pytest.mark.django_db
def test_placing_twice_raises_nothing_the_second_time(cast: make.Cast, now: datetime) -> None:
    version = move(cast, now)
    before = (counters(), versions(cast), PlacementChange.objects.count())
    assert move(cast, now) == version
    assert (counters(), versions(cast), PlacementChange.objects.count()) == before


@pytest.mark.django_db
def test_placed_where_it_is_a_closed_tenant_opens(cast: make.Cast, now: datetime) -> None:
    services.publish(cast.acme, cast.cell, accepts="none")
    move(cast, now, back=True)
    assert entry(cast, cast.cell).accepts == "all"


@pytest.mark.django_db
def test_an_intention_ends_where_it_is_reached(cast: make.Cast, now: datetime) -> None:
    Placement.objects.filter(tenant=cast.acme).update(intended_cell=cast.other_cell)
    move(cast, now)
    assert Placement.objects.get(tenant=cast.acme).intended_cell is None


@pytest.mark.django_db
def test_a_raised_runner_generation_goes_with_the_tenant(cast: make.Cast, now: datetime) -> None:
    PolicyEntry.objects.filter(tenant=cast.acme).update(runner_generation=4)
    move(cast, now)
    assert entry(cast, cast.other_cell).runner_generation == 4


@pytest.mark.django_db
def test_a_new_url_moves_the_feed_and_nobodys_placement(cast: make.Cast, now: datetime) -> None:
    placed, fed = counters()
    services.set_cell_url(cast.cell, url="https://agents.eu", by="ada", now=now)
    assert counters() == (placed, fed + 1)
    assert set(Placement.objects.values_list("feed_version", flat=True)) == {fed + 1}
    services.set_cell_url(cast.cell, url="https://agents.eu", by="ada", now=now)
    assert counters() == (placed, fed + 1)


@pytest.mark.django_db
def test_hurry_is_prolonged_and_never_shortened(cast: make.Cast, now: datetime) -> None:
    both = [cast.cell, cast.other_cell]
    late, early = now + timedelta(seconds=60), now + timedelta(seconds=30)
    services.hurry(both, until=late)
    services.hurry([cast.cell], until=early)
    assert set(Cell.objects.values_list("fast_until", flat=True)) == {late}
    services.hurry([cast.cell], until=late + timedelta(seconds=1))
    ends = [Cell.objects.get(pk=cell.pk).fast_until for cell in both]
    assert ends == [late + timedelta(seconds=1), late]


@pytest.mark.django_db(transaction=True, serialized_rollback=True)
def test_tenants_that_cross_each_other_never_wait_for_each_other(
    cast: make.Cast, now: datetime
) -> None:
    """Two movers and a publisher, each in both directions: nobody deadlocks, no number is lost."""
    rounds, failures = 12, []
    homes = [(cast.cell, cast.store), (cast.other_cell, cast.other_store)]
    with transaction.atomic():
        services.place(
            cast.bolt, cell=cast.other_cell, store=cast.other_store, by="m", reason="", now=now
        )
    placed, fed = counters()
    together = threading.Barrier(3)

    def cross(tenant: Any, first: int) -> Callable[[], None]:
        def run() -> None:
            for turn in range(rounds):
                cell, store = homes[(first + turn) % 2]
                with transaction.atomic():
                    services.place(tenant, cell=cell, store=store, by="m", reason="", now=now)

        return run

    def publish() -> None:
        for turn in range(rounds):
            with transaction.atomic():
                services.publish(cast.core, cast.cell, accepts="none" if turn % 2 else "all")

    def guarded(work: Callable[[], None]) -> None:
        together.wait(10)
        try:
            work()
        except Exception as error:
            failures.append(error)
        finally:
            connections.close_all()

    works = [cross(cast.acme, 1), cross(cast.bolt, 0), publish]
    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert counters() == (placed + 2 * rounds, fed + 2 * rounds)
    # No number was given twice.
    numbers = list(PlacementChange.objects.values_list("placement_version", flat=True))
    assert len(numbers) == len(set(numbers))
    for cell in (cast.cell, cast.other_cell):
        stamps = list(PolicyEntry.objects.filter(cell=cell).values_list("version", flat=True))
        assert len(stamps) == len(set(stamps))


@pytest.mark.django_db(transaction=True, serialized_rollback=True)
def test_a_higher_version_is_never_visible_before_a_lower_one(
    cast: make.Cast, now: datetime, elsewhere: Callable[[Callable[[], Any]], Any]
) -> None:
    """The second publisher waits for the first one's commit: it can't take a number and pass."""
    started, second = threading.Event(), []

    def later() -> None:
        started.set()
        with transaction.atomic():
            second.append(services.publish(cast.bolt, cast.cell, accepts="none"))
        connections.close_all()

    thread = threading.Thread(target=later)
    with transaction.atomic():
        first = services.publish(cast.acme, cast.cell, accepts="none")
        thread.start()
        assert started.wait(10)
        thread.join(0.3)
        seen = elsewhere(lambda: Cell.objects.get(pk=cast.cell.pk).policy_version)
        assert (second, seen) == ([], first - 1)
    thread.join(10)
    assert second == [first + 1]


@pytest.mark.django_db
def test_the_constraint_names_a_tombstones_cell(cast: make.Cast) -> None:
    with pytest.raises(IntegrityError), transaction.atomic():
        PolicyEntry.objects.filter(tenant=cast.acme).update(accepts="moved")
