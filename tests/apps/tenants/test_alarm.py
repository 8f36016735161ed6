"""A database restored without saying so: the first instance that knows more stops all machines."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

from durable.errors import Refused
from tenants import queries, services
from tenants.models import AuditEntry, Cell, Halt
from tests import make

pytestmark = pytest.mark.django_db


@pytest.fixture
def joined(process: Any, cast: make.Cast, now: datetime) -> Any:
    one = process(cast.cell)
    one.join(now=now)
    services.poll(one.key, now=now)
    return one


@pytest.fixture
def above(cast: make.Cast) -> str:
    """A version of ours that the cell has not reached."""
    return f"{queries.epoch()}.{Cell.objects.get(pk=cast.cell.pk).policy_version + 1}"


def by_report(process: Any, version: str, now: datetime, **said: Any) -> None:
    services.report(process.next_report(applied_version=version), now=now, **said)


def by_poll(process: Any, version: str, now: datetime, **said: Any) -> None:
    services.poll(process.key, since=version, now=now, **said)


Way = Callable[..., None]
WAYS = [by_report, by_poll]


@pytest.mark.parametrize("way", WAYS)
def test_an_instance_above_its_cells_counter_stops_all_machines(
    joined: Any, above: str, now: datetime, way: Way
) -> None:
    before = joined.row.lease_until
    later = now + timedelta(seconds=1)
    with pytest.raises(services.VersionAhead):
        way(joined, above, later)
    halt = queries.halt()
    assert halt is not None
    current = f"{queries.epoch()}.{Cell.objects.get(slug='cell-eu1-a').policy_version}"
    for word in ("agents-boot-1", "cell-eu1-a", above, current, "`manage.py restored`"):
        assert word in halt.why
    assert (halt.since, halt.by) == (later, "instance agents-boot-1")
    assert joined.row.lease_until == before
    verbs = set(AuditEntry.objects.values_list("verb", flat=True))
    assert {"machines.halt", "instance.version_ahead"} <= verbs
    with pytest.raises(services.MachinesStopped, match="agents-boot-1"):
        services.check_running()


def test_a_process_that_joins_anew_stops_machines_and_serves_all_the_same(
    process: Any, cast: make.Cast, above: str, now: datetime
) -> None:
    """It joined after the backup, so this database has never heard of its id."""
    one = process(cast.cell)
    with pytest.raises(services.InstanceGone):
        services.poll("f" * 32, since=above, now=now)
    assert queries.halt() is None
    services.join(
        cast.cell,
        name="agents-9",
        build="1",
        boot=one.boot,
        longest_turn_seconds=60.0,
        longest_tool_seconds=30.0,
        plugins=[],
        stores=[],
        replaces="f" * 32,
        applied_version=above,
        now=now,
    )
    assert "agents-9" in queries.halted()
    # Nothing but machines stops: the same process joins again and is answered.
    key = one.join(now=now).key
    assert services.poll(key, now=now).instance.key == key


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "version", ["{epoch}.{number}", "{other}.{more}", "", "{epoch}.-9", "x" * 99]
)
def test_no_other_version_stops_machines(
    cast: make.Cast, joined: Any, now: datetime, way: Way, version: str
) -> None:
    number = Cell.objects.get(pk=cast.cell.pk).policy_version
    text = version.format(epoch=queries.epoch(), other="f" * 12, number=number, more=number + 50)
    try:
        way(joined, text, now)
    except services.BadVersion:
        assert way is by_report
    assert queries.halt() is None
    assert joined.row.applied_version in (0, number)


@pytest.mark.parametrize("way", WAYS)
def test_a_token_of_another_cell_stops_nothing(
    cast: make.Cast, joined: Any, above: str, now: datetime, way: Way
) -> None:
    with pytest.raises(services.NotYourCell):
        way(joined, above, now, cells={cast.other_cell.pk})
    assert queries.halt() is None


def test_a_process_that_is_not_the_ids_own_stops_nothing(
    joined: Any, above: str, now: datetime
) -> None:
    joined.boot = "another"
    with pytest.raises(services.AnotherProcess):
        by_report(joined, above, now)
    assert queries.halt() is None


def test_the_first_word_stands_until_machines_start(joined: Any, above: str, now: datetime) -> None:
    for _ in range(3):
        with pytest.raises(Refused):
            by_poll(joined, above, now)
    services.halt(by="ada", why="to be sure", now=now + timedelta(seconds=9))
    assert Halt.objects.get().since == now
    assert AuditEntry.objects.filter(verb="instance.version_ahead").count() == 1
    assert AuditEntry.objects.filter(verb="machines.halt").count() == 1


def test_machines_start_after_a_comparison_and_the_leases_of_the_lost_database(
    joined: Any, now: datetime
) -> None:
    """An instance that joined after the backup may serve on by its lease, unknown to any proof."""
    with pytest.raises(services.MachinesRun):
        services.resume(by="ada", reason="done", now=now)
    services.halt(by="ada", why="restored", now=now)
    with pytest.raises(services.NotCompared):
        services.resume(by="ada", reason="done", now=now)
    services.replace_epoch(by="ada", reason="restored", now=now)
    with pytest.raises(services.NotCompared):
        services.resume(by="ada", reason="done", now=now)
    services.note_comparison(now=now)
    # The lease of 15 minutes, the longest turn, and 5 s for clocks that differ.
    over = now + timedelta(seconds=900 + 60 + 5)
    with pytest.raises(services.LeasesRun):
        services.resume(by="ada", reason="done", now=over - timedelta(seconds=1))
    with pytest.raises(services.ReasonMissing):
        services.resume(by="ada", reason=" ", now=over)
    services.resume(by="ada", reason="done", now=over)
    services.check_running()
    assert AuditEntry.objects.filter(verb="machines.resume", reason="done").exists()


def test_another_comparison_keeps_machines_stopped_until_its_end(
    cast: make.Cast, now: datetime
) -> None:
    services.halt(by="ada", why="restored", now=now)
    services.replace_epoch(by="ada", reason="restored", now=now)
    services.note_comparison(now=now)
    later = now + timedelta(hours=1)
    services.replace_epoch(by="bob", reason="once more", now=later)
    with pytest.raises(services.NotCompared):
        services.resume(by="ada", reason="done", now=later)


def test_under_a_new_epoch_every_runtime_and_gateway_is_sent_everything(
    cast: make.Cast, joined: Any, now: datetime
) -> None:
    asking = services.poll(joined.key, now=now)
    before, feed = str(asking.version), queries.placement_feed(since="")
    assert feed is not None
    services.halt(by="ada", why="restored", now=now)
    assert services.replace_epoch(by="ada", reason="restored", now=now) != before.split(".")[0]
    again = queries.policy(services.poll(joined.key, since=before, now=now), since=before)
    assert again is not None
    assert again.full
    anew = queries.placement_feed(since=str(feed.version))
    assert anew is not None
    assert anew.full
