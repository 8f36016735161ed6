"""A copy is rehearsed under a scratch name at the real target, measured, and leaves nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from migrations_app import ports, rehearsing, services
from migrations_app.domain.values import SCRATCH
from migrations_app.dry_run import dry_run
from migrations_app.models import Rehearsal, Scratch, TenantMigration
from migrations_app.ports.base import START, Key, Unreachable
from migrations_app.rehearsing import CanNotRehearse, rehearse_copy
from tenants import services as tenants
from tenants.models import AuditEntry
from tests import make, scene
from tests.stores import EMPTY
from tests.world import APP, Killed, World, world

pytestmark = pytest.mark.django_db(transaction=True, serialized_rollback=True)

# One pair of every path: COPY to COPY, attached files, converted rows, replay.
PAIRS = {
    "postgresql to postgresql": ("postgresql", "postgresql"),
    "sqlite to sqlite": ("sqlite", "sqlite"),
    "adk-sqlite to adk-sqlite": ("adk-sqlite", "adk-sqlite"),
    "postgresql to sqlite": ("postgresql", "sqlite"),
    "adk-sqlite to postgresql": ("adk-sqlite", "postgresql"),
    "sqlite to postgresql": ("sqlite", "postgresql"),
    "sqlite to service": ("sqlite", "service"),
    "postgresql to service on postgresql": ("postgresql", "service on postgresql"),
}


@pytest.fixture
def pair(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    cast: make.Cast,
    now: datetime,
    tmp_path: Path,
    new_database: Callable[[], str],
) -> Iterator[World]:
    """A world of two kinds; what a service writes is looked at in the database beneath it."""
    urls, kinds = [], []
    sides = PAIRS[request.param]
    for side, store in zip(sides, (cast.store, cast.other_store), strict=True):
        own = "adk-sqlite" if side == "adk-sqlite" else "adk-sql"
        store.kind = "adk-service" if side.startswith("service") else own
        store.save()
        kinds.append(own)
        file = f"sqlite:///{tmp_path}/{store.key}.db"
        urls.append(new_database() if side.endswith("postgresql") else file)
    with world(monkeypatch, cast, now, urls[0], urls[1], (kinds[0], kinds[1])) as ready:
        if sides[1].startswith("service"):
            scheme, _, rest = urls[1].partition("://")
            drivers = {"postgresql": "postgresql+psycopg", "sqlite": "sqlite+aiosqlite"}
            monkeypatch.setenv("STORE_EU1_B", f"{drivers[scheme]}://{rest}")
        yield ready


every_path = pytest.mark.parametrize("pair", PAIRS, indirect=True)


def rehearse(world: World, **given: Any) -> Rehearsal:
    given = {"target_store": world.cast.other_store, "by": "ada", "reason": "practice"} | given
    return rehearse_copy(world.cast.acme, now=world.clock(), **given)


def left(world: World) -> dict[str, Any]:
    """Return every row of a scratch name at the target, by table."""
    tables = ["sessions", "events", "user_states", "app_states", "switchyard_guard"]
    side = world.target
    if side.sqlite:
        there = "select name from sqlite_master where type = 'table'"
    else:
        there = "select tablename from pg_tables"
    known = {name for (name,) in side.run(there)}
    found = {}
    for table in tables:
        where = f"select app_name from {table} where app_name like ?"
        if table in known and (rows := side.run(where, f"{SCRATCH}%")):
            found[table] = rows
    return found


@every_path
def test_a_copy_is_rehearsed_on_the_path_of_its_pair_and_leaves_nothing(pair: World) -> None:
    before = pair.source.content(APP)
    row = rehearse(pair)
    assert (row.equal, row.detail) == (True, "")
    assert (row.sessions, row.events) == (12, 36)
    assert (row.by, row.at, row.move) == ("ada", pair.clock.now, None)
    figures = (row.copy_rate, row.verify_rate, row.shared_rate, row.scan_seconds, row.mark_seconds)
    assert all(figure is not None and figure > 0 for figure in figures)
    assert left(pair) == {}
    assert not Scratch.objects.exists()
    assert pair.source.content(APP) == before
    assert pair.target.content(APP) == EMPTY
    assert Rehearsal.objects.get() == row
    entry = AuditEntry.objects.get(verb="tenant.rehearse_copy")
    assert (entry.who, entry.subject, entry.reason) == ("ada", "tenant acme", "practice")


def test_a_sample_is_of_everywhere_and_has_five_hundred_at_most(servers: World) -> None:
    with servers.source.connection() as connection:
        for number in range(100, 1_690):
            name = f"s-{number:04}"
            servers.source.add_session(connection, APP, f"u-{number % 7}", name, 1)
    seen: list[Key] = []
    real = ports.copy
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ports, "copy", lambda a, b, keys: (seen.extend(keys), real(a, b, keys))[1])
        row = rehearse(servers)
    assert row.sessions == len(seen) == len(set(seen)) == 500
    with ports.open_store("adk-sql", "env:STORE_EU1_A", app_name=APP) as source:
        keys = [key for key, _ in source.page(START, 10_000)]
    # Whatever tenth of the list is looked at, it gave a tenth of the sample; the first chunk too.
    for chosen, wanted in ((seen, 50), (seen[:50], 5)):
        places = sorted(keys.index(key) for key in chosen)
        for tenth in range(10):
            here = [at for at in places if tenth * 160.2 <= at < (tenth + 1) * 160.2]
            assert len(here) == pytest.approx(wanted, abs=max(2, wanted * 0.8))


def test_what_the_time_does_not_allow_is_left_out_and_said(
    files: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearsing, "CHUNK_FIRST", 4)
    monkeypatch.setattr(rehearsing, "COPY_SECONDS", 0.0)
    real = rehearsing._copy

    def one_chunk(*given: Any) -> None:
        monkeypatch.setattr(rehearsing, "COPY_SECONDS", 0.001)
        real(*given)

    monkeypatch.setattr(rehearsing, "_copy", one_chunk)
    row = rehearse(files)
    assert row.sessions == 4
    assert row.detail == "4 of 12 sessions in the time there was"
    assert row.equal
    assert left(files) == {}


def test_a_session_that_changes_meanwhile_is_no_difference(
    both: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copy is of a moment before; a move would take it along in its next pass."""
    real = ports.copy

    def then_a_turn(source: Any, target: Any, keys: Any) -> Any:
        done = real(source, target, keys)
        both.source.turn(APP, "u-1", "s-1", "meanwhile")
        return done

    monkeypatch.setattr(ports, "copy", then_a_turn)
    row = rehearse(both)
    assert (row.equal, row.detail) == (True, "1 session changed meanwhile, not compared")


def test_a_copy_that_is_not_equal_is_named_by_its_key_alone(
    both: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ports.copy

    def spoilt(source: Any, target: Any, keys: Any) -> Any:
        done = real(source, target, keys)
        word = both.target.run("select app_name from switchyard_guard where app_name like ?", "s%")
        [name] = {name for (name,) in word if name.startswith(SCRATCH)}
        with both.late(both.target) as connection:
            both.target.run_in(
                connection,
                "update events set invocation_id = 'secret' where app_name = ? and id = 's-3-e1'",
                name,
            )
        return done

    monkeypatch.setattr(ports, "copy", spoilt)
    row = rehearse(both)
    assert (row.equal, row.detail) == (False, "differ: s-3 of u-3 in its events")
    assert left(both) == {}


@pytest.mark.parametrize("pair", ["sqlite to postgresql"], indirect=True)
def test_a_value_that_the_target_cannot_hold_is_named(pair: World) -> None:
    """Not looked at before, where the tenant is large: here it comes between look and copy."""

    def odd() -> None:
        with pair.source.connection() as connection:
            pair.source.run_in(
                connection,
                'update sessions set state = \'{"a": "\\u0000"}\' where app_name = ? and id = ?',
                APP,
                "s-5",
            )

    pair.killer.before["adopt"] = odd
    row = rehearse(pair)
    assert not row.equal
    assert row.detail.startswith("can't be held there: s-5 of u-1 sessions.state")
    assert left(pair) == {}


# --- what stands against it ----------------------------------------------------------------------


def test_it_is_refused_with_the_reasons_of_a_preflight_and_nothing_is_written(
    files: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    cast = files.cast
    with pytest.raises(CanNotRehearse, match="lives on store-eu1-a already"):
        rehearse(files, target_store=cast.store)
    with pytest.raises(tenants.ReasonMissing):
        rehearse(files, reason=" ")
    with files.source.connection() as connection:
        files.source.run_in(connection, "alter table events add column extra text")
    with pytest.raises(CanNotRehearse, match=r"Kinds: The target lacks .* Nothing was written\."):
        rehearse(files)
    monkeypatch.setenv("STORE_EU1_A", "sqlite:////nowhere/one.db")
    with pytest.raises(CanNotRehearse, match="Source store-eu1-a: The folder of"):
        rehearse(files)
    assert not Path(files.target.url.removeprefix("sqlite:///")).exists()
    assert not Rehearsal.objects.exists()
    assert not Scratch.objects.exists()


def test_a_tenant_that_moves_or_has_no_session_is_not_rehearsed(files: World) -> None:
    files.start()
    with pytest.raises(CanNotRehearse, match=r"mv-\d+ is in PREPARE, and measures by itself"):
        rehearse(files)
    services.abort(files.move, by="ada", reason="enough", now=files.clock())
    files.run()
    for number in range(12):
        files.source.delete(APP, f"u-{number % 4}", f"s-{number}")
    with pytest.raises(CanNotRehearse, match="there is nothing to measure"):
        rehearse(files)


def test_nothing_is_rehearsed_or_swept_while_machines_are_halted(
    files: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(files)
    files.clock.pass_by(3_601)
    tenants.halt(by="ada", why="restored", now=files.clock())
    with pytest.raises(tenants.MachinesStopped):
        rehearse(files)
    assert rehearsing.sweep(now=files.clock()) == 0
    assert Scratch.objects.count() == 1


def test_a_halt_stops_it_between_two_chunks(files: World) -> None:
    def halt() -> None:
        tenants.halt(by="ada", why="restored", now=files.clock())

    files.killer.before["copy"] = halt
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rehearsing, "CHUNK_FIRST", 4)
        patch.setattr(rehearsing, "CHUNK_SECONDS", 0.0)
        with pytest.raises(tenants.MachinesStopped):
            rehearse(files)
    assert left(files) == {}
    assert not Rehearsal.objects.exists()


# --- killed in the middle ------------------------------------------------------------------------


@contextmanager
def dying(world: World, at: str) -> Iterator[None]:
    """Let a worker die in the body, right before or behind a call of its store."""
    real = world.killer.tick

    def tick(name: str) -> None:
        if name == at:
            raise Killed
        real(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.killer, "tick", tick)
        with pytest.raises(Killed):
            yield


def killed(world: World, at: str = "copy, done") -> None:
    with dying(world, at):
        rehearse(world)


MOMENTS = ("adopt", "adopt, done", "copy, done", "write_shared, done", "delete, done", "disown")


@pytest.mark.parametrize("moment", MOMENTS)
def test_what_a_kill_leaves_the_next_one_removes_when_it_is_an_hour_old(
    both: World, moment: str
) -> None:
    killed(both, moment)
    [scratch] = Scratch.objects.all()
    assert re.fullmatch(rf"{SCRATCH}\.\d{{8}}T\d{{6}}Z\.[0-9a-f]{{8}}", scratch.app_name)
    there = left(both)
    both.clock.pass_by(3_599)
    rehearse(both)
    # It may still run: two may be rehearsed at once.
    assert Scratch.objects.get() == scratch
    assert left(both) == there
    both.clock.pass_by(1)
    rehearse(both)
    assert not Scratch.objects.exists()
    assert left(both) == {}


@every_path
def test_a_sweep_removes_what_a_kill_left(pair: World, settings: Any) -> None:
    # Of a service's worker that did not say its end.
    settings.DURABLE_STEP_SECONDS = 0
    killed(pair)
    assert left(pair)["sessions"]
    assert rehearsing.sweep(now=pair.clock()) == 0
    pair.clock.pass_by(3_600)
    assert rehearsing.sweep(now=pair.clock()) == 1
    assert left(pair) == {}
    assert not Scratch.objects.exists()


def test_a_name_that_our_rows_have_lost_is_removed_by_its_own_time(both: World) -> None:
    """As after our database was restored from a backup."""
    killed(both)
    Scratch.objects.all().delete()
    rehearse(both)
    assert left(both)
    both.clock.pass_by(3_600)
    rehearse(both)
    assert left(both) == {}


def test_a_sleeper_that_wakes_after_the_sweep_writes_nothing(both: World) -> None:
    def swept() -> None:
        both.clock.pass_by(3_600)
        assert rehearsing.sweep(now=both.clock()) == 1

    both.killer.before["copy"] = swept
    # On PostgreSQL its connection is ended too, as a hanging COPY's would be.
    with pytest.raises((CanNotRehearse, Unreachable)):
        rehearse(both)
    assert left(both) == {}
    assert not Rehearsal.objects.exists()


def test_a_sleeper_that_wakes_in_the_middle_of_the_sweep_writes_nothing(both: World) -> None:
    written: list[int] = []

    def half_swept() -> None:
        both.clock.pass_by(3_600)
        with dying(both, "take, done"):
            rehearsing.sweep(now=both.clock())

    real = ports.copy

    def copy(*given: Any) -> Any:
        done = real(*given)
        written.append(len(done.copied))
        return done

    both.killer.before["copy"] = half_swept
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ports, "copy", copy)
        with pytest.raises((CanNotRehearse, Unreachable)):
            rehearse(both)
    assert written == []
    assert left(both) == {}


def test_a_store_that_goes_away_keeps_its_note_until_it_is_back(
    files: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away() -> None:
        monkeypatch.setenv("STORE_EU1_B", "sqlite:////nowhere/two.db")
        raise Unreachable("gone")

    files.killer.before["write_shared"] = away
    files.killer.before["delete"] = away
    with pytest.raises(Unreachable):
        rehearse(files)
    files.clock.pass_by(3_600)
    assert rehearsing.sweep(now=files.clock()) == 0
    assert left(files)
    monkeypatch.setenv("STORE_EU1_B", files.target.url)
    assert rehearsing.sweep(now=files.clock()) == 1
    assert left(files) == {}


# --- what its figures are for --------------------------------------------------------------------


def kept(world: World, **columns: Any) -> Rehearsal:
    cast = world.cast
    given = {
        "tenant": cast.acme,
        "source_store": cast.store,
        "target_store": cast.other_store,
        "at": world.clock.now,
        "by": "ada",
        "sessions": 500,
        "equal": True,
        "copy_rate": 800.0,
        "verify_rate": 1_600.0,
        "shared_rate": 400.0,
        "scan_seconds": 0.25,
        "mark_seconds": 0.125,
    }
    return Rehearsal.objects.create(**given | columns)


def told(world: World) -> Any:
    cast = world.cast
    return dry_run(
        cast.acme,
        target_cell=cast.other_cell,
        target_store=cast.other_store,
        now=world.clock(),
    )


def test_a_dry_run_goes_by_the_rehearsal_and_says_so(servers: World) -> None:
    before = told(servers)
    assert before.measured.startswith("assumed")
    kept(servers)
    servers.clock.pass_by(86_400)
    after = told(servers)
    day = servers.clock.now - timedelta(days=1)
    said = f"rehearsed on {day.day} {day:%b %H:%M} by ada, 500 sessions in 0.6s"
    assert after.measured == said
    # 800 /s to copy and 1,600 /s to compare, one after the other.
    assert after.per_second == pytest.approx(1 / (1 / 800 + 1 / 1_600))
    assert after.fence is not None
    parts = {part.name: part.expected for part in after.fence.parts}
    # Two marks and a look at every stamp.
    assert parts["scan"] == pytest.approx(0.5)
    assert parts["shared"] == pytest.approx(4 / 400)
    [line] = [line.text for line in after.lines if line.phase == "BACKFILL"]
    assert f" The rate is {said}. " in line


def test_figures_of_another_tenant_or_another_pair_are_not_taken_for_its_own(files: World) -> None:
    cast = files.cast
    kept(files, tenant=cast.bolt)
    kept(files, source_store=cast.other_store)
    kept(files, target_store=cast.store)
    assert told(files).measured.startswith("assumed")
    assert files.start().copy_rate is None


def test_the_newest_of_a_rehearsal_and_a_move_counts(files: World) -> None:
    cast = files.cast
    kept(files)
    files.clock.pass_by(60)
    scene.move(cast, "aborted", now=files.clock(), copy_rate=60.0, verify_rate=30.0, sessions=12)
    earlier = TenantMigration.objects.latest("pk")
    TenantMigration.objects.filter(pk=earlier.pk).update(ended_at=files.clock())
    assert told(files).measured == f"measured by {earlier} between these stores"
    files.clock.pass_by(60)
    kept(files, copy_rate=90.0)
    assert told(files).measured.startswith("rehearsed at ")


def test_a_move_begins_with_what_was_rehearsed(servers: World) -> None:
    rehearse(servers)
    [row] = Rehearsal.objects.all()
    move = servers.start()
    columns = ("copy_rate", "verify_rate", "shared_rate", "scan_seconds", "mark_seconds")
    assert [getattr(move, name) for name in columns] == [getattr(row, name) for name in columns]
    notes = [event.note for event in move.events.all()]
    assert notes[0] == "Started: more room"
    assert notes[1].startswith("Begins with rates rehearsed at ")
    # What it finds itself replaces that: of the mark at its first pass's end.
    servers.run(until=services.Phase.SOAK)
    assert servers.move.mark_seconds != row.mark_seconds
    assert servers.move.copy_rate is not None
