"""A dry run says what a move would do, with real figures, and leaves everything as it was."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.apps import apps

from migrations_app.domain.phases import Phase
from migrations_app.dry_run import DryRun, dry_run, paced
from migrations_app.models import TenantMigration
from migrations_app.services import InvalidOption
from tenants.models import Counter
from tests import make, scene
from tests.world import APP, World, world

pytestmark = pytest.mark.django_db(transaction=True, serialized_rollback=True)


def tell(world: World, **options: Any) -> DryRun:
    cast = world.cast
    return dry_run(
        cast.acme,
        **{
            "target_cell": cast.other_cell,
            "target_store": cast.other_store,
            "now": world.clock(),
            **options,
        },
    )


def text(told: DryRun, phase: str) -> str:
    [found] = [line.text for line in told.lines if line.phase == phase]
    return found


def everything(world: World) -> Any:
    """Return every row of ours, and of both stores every table with its rows and triggers."""
    ours = {
        model._meta.label: sorted(repr(row) for row in model._base_manager.values())
        for model in apps.get_models()
    }
    return ours, [dump(side) for side in (world.source, world.target)]


def dump(side: Any) -> Any:
    if side.sqlite:
        with side.connection() as connection:
            return list(connection.iterdump())
    names = side.run("select tablename from pg_tables where schemaname = 'public' order by 1")
    # A stamp that a rewrite would change tells a row that was only touched.
    rows = {name: side.run(f"select xmin::text, * from {name} order by 2, 1") for (name,) in names}
    triggers = side.run("select tgname, tgrelid from pg_trigger order by 1")
    return rows, triggers


def test_it_writes_to_neither_store_and_changes_no_row(both: World) -> None:
    before = everything(both)
    told = tell(both, finish_by=both.clock.now + timedelta(hours=1))
    assert len(told.lines) == 8
    assert everything(both) == before


def test_every_phase_is_told_with_its_figures(servers: World) -> None:
    cast, now = servers.cast, servers.clock()
    scene.instances(cast.cell, ["eu1-a-1", "eu1-a-2"], now=now)
    scene.instances(cast.other_cell, ["eu1-b-1"], now=now, stores=["store-eu1-b"])
    told = tell(servers, automatic=True, soak_seconds=3600.0, drain_bound_seconds=60.0)
    assert told.refusals == ()
    assert [line.phase for line in told.lines] == [
        phase.upper()
        for phase in (
            Phase.PREPARE,
            Phase.BACKFILL,
            Phase.DRAIN,
            Phase.DELTA,
            Phase.VERIFY,
            Phase.TARGET,
            Phase.SOAK,
            Phase.OFFBOARD,
        )
    ]
    assert text(told, "BACKFILL").startswith(
        "12 sessions of 4 users, at 40.0 /s through at 12:00:00 UTC (0.3s). The rate is assumed"
    )
    assert "2 instances of cell-eu1-a would be told" in text(told, "DRAIN")
    assert "the longest turn stated is 2m" in text(told, "DRAIN")
    assert "A turn that runs longer than the bound opens the fence again" in text(told, "DRAIN")
    assert "each 100 take 2.5s" in text(told, "DELTA")
    assert "proven by their stamps" in text(told, "VERIFY")
    version = Counter.objects.get().placement_version + 1
    assert text(told, "TARGET").startswith(
        f"Placement version {version}: acme on cell-eu1-b, store-eu1-b."
    )
    assert text(told, "SOAK").startswith("Until 13:00:0")
    assert "“acme”, then deletes 12 sessions of 4 users on store-eu1-a" in text(told, "OFFBOARD")
    assert [line.phase for line in told.ways_back] == ["Abort", "Roll back"]


def test_a_file_is_told_to_be_compared_whole(files: World) -> None:
    assert "12 sessions are compared, every one" in text(tell(files), "VERIFY")


def test_one_file_of_two_stores_is_enough_for_that(
    monkeypatch: pytest.MonkeyPatch,
    cast: make.Cast,
    now: datetime,
    store_url: str,
    tmp_path: Path,
) -> None:
    with world(monkeypatch, cast, now, store_url, f"sqlite:///{tmp_path}/two.db") as mixed:
        assert "12 sessions are compared, every one" in text(tell(mixed), "VERIFY")


def test_the_version_that_it_names_is_the_one_that_the_move_gets(files: World) -> None:
    told = text(tell(files), "TARGET")
    files.start()
    move = files.run(until=Phase.SOAK)
    assert told.startswith(f"Placement version {move.placement_version}:")


def test_rates_are_those_that_an_earlier_move_measured(files: World) -> None:
    cast = files.cast
    move = scene.move(
        cast, Phase.DONE, now=files.clock(), tenant=cast.bolt, copy_rate=60.0, verify_rate=30.0
    )
    told = tell(files)
    # 60 /s to copy and 30 /s to compare are 20 /s for both, one after the other.
    assert told.per_second == pytest.approx(20.0)
    assert told.measured == f"measured by {move} between these stores"


def test_a_finish_time_is_spread_to_or_said_to_be_missed(files: World) -> None:
    kept = tell(files, finish_by=files.clock.now + timedelta(seconds=24))
    assert (kept.per_second, kept.late_seconds) == (0.5, 0.0)
    assert kept.through_at == files.clock.now + timedelta(seconds=24)
    missed = tell(files, finish_by=files.clock.now + timedelta(seconds=0.1))
    assert missed.late_seconds == pytest.approx(0.2)
    assert "The finish time would be missed by 0.2s" in text(missed, "BACKFILL")


def test_a_write_budget_counts_a_session_and_each_of_its_events(files: World) -> None:
    told = tell(files, rows_per_second=8.0)
    assert told.per_second == 2.0
    assert "the pace of 2.0 /s that 8 rows/s allow" in text(told, "BACKFILL")
    options = paced(files.cast.acme, rows_per_second=8.0, automatic=True)
    assert options == {"pace_per_second": 2.0, "finish_by": None, "automatic": True}


def test_a_budget_without_any_session_is_no_pace(files: World) -> None:
    for number in range(12):
        files.source.delete(APP, f"u-{number % 4}", f"s-{number}")
    assert paced(files.cast.acme, rows_per_second=8.0)["pace_per_second"] is None
    assert tell(files, rows_per_second=8.0).through_at == files.clock.now


def test_what_stands_against_the_move_is_told_first(
    files: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.start()
    assert "acme is moving already" in tell(files).refusals[0]
    here = {"target_cell": files.cast.cell, "target_store": files.cast.store}
    assert "lives in cell-eu1-a, on store-eu1-a, already" in tell(files, **here).refusals[0]
    monkeypatch.delenv("STORE_EU1_B")
    told = tell(files)
    assert told.lines == ()
    assert any("store-eu1-b" in refusal for refusal in told.refusals)


@pytest.mark.parametrize(
    "options",
    [
        {"budget_seconds": 0.0},
        {"pace_per_second": 1.0, "rows_per_second": 4.0},
        {"rows_per_second": 0.5},
        {"rows_per_second": float("nan")},
    ],
    ids=["budget", "two", "few", "nan"],
)
def test_options_that_make_no_sense_are_refused_as_starting_would(
    files: World, options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidOption):
        tell(files, **options)


def test_a_practised_rollback_is_named_and_an_unpractised_one_is_not_red(files: World) -> None:
    def line() -> Any:
        checks = tell(files).checks
        assert checks is not None
        [found] = [check for check in checks.checks if check.name == "Rollback practised"]
        return found

    assert line().ok is None
    assert tell(files).refusals == ()
    move = practised(files)
    # Between stores of other databases: of this pair nothing is known.
    assert line().ok is None
    for store in (files.cast.store, files.cast.other_store):
        store.survey = {"dialect": "sqlite"}
        store.save(update_fields=["survey"])
    assert line().ok is True
    assert line().detail == f"{move} of core, 10:00:00, its fence closed for 3.5s"


def practised(world: World) -> Any:
    """A move of core that went back two hours ago."""
    cast, now = world.cast, world.clock()
    ended = now - timedelta(hours=2)
    return TenantMigration.objects.create(
        tenant=cast.core,
        source_cell=cast.cell,
        source_store=cast.store,
        target_cell=cast.other_cell,
        target_store=cast.other_store,
        phase=Phase.ROLLED_BACK,
        started_at=ended,
        started_by="ada",
        phase_since=ended,
        ended_at=ended,
        fence_closed_at=ended - timedelta(seconds=9.5),
        fence_opened_at=ended - timedelta(seconds=6),
    )
