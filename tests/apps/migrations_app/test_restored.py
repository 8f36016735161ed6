"""Our own database is restored from a backup, while the stores have gone on."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.test import Client

from durable import driver
from migrations_app import ports, restored, services
from migrations_app.domain.phases import Phase
from migrations_app.models import RestoreFinding, TenantMigration
from migrations_app.ports.base import Guard, Unreachable
from tenants import queries as tenants_queries
from tenants import services as tenants
from tenants.domain.roles import Role
from tenants.models import AuditEntry, Cell, Placement, Store, Tenant
from tests import make, scene
from tests.faults.test_split import (
    assert_back,
    assert_both_serve,
    assert_moved,
    born,
    live,
    sessions,
    shared,
    shares,
    until_both_serve,
)
from tests.faults.test_split import start as split
from tests.world import APP, World, each_call, undone

pytestmark = pytest.mark.django_db

# The longest lease that the lost database may have given, and more.
AN_HOUR = 3_600.0
TABLE = TenantMigration._meta.db_table


class Backup:
    """Every row of our database as it is now. Restoring brings back these, and no store."""

    def __init__(self) -> None:
        self.savepoint = transaction.savepoint()
        # Sequences are no rows: a restore sets them back, a rollback does not.
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_get_serial_sequence(%s, 'id')", [TABLE])
            [self.sequence] = cursor.fetchone()
            cursor.execute(f"SELECT last_value, is_called FROM {self.sequence}")
            self.number = cursor.fetchone()

    def restore(self) -> None:
        transaction.savepoint_rollback(self.savepoint)
        with connection.cursor() as cursor:
            cursor.execute("SELECT setval(%s, %s, %s)", [self.sequence, *self.number])


def compare(world: World) -> restored.Comparison:
    tenants.halt(by="ada", why="restored from last night", now=world.clock())
    return restored.compare(by="ada", reason="restored from last night", now=world.clock())


def guard(world: World, store: Store) -> Guard | None:
    with ports.open_store(store.kind, store.address_from, app_name=APP) as port:
        found: Guard | None = port.guard()
        return found


def settle(world: World, home: Store, cell: Cell | None = None) -> int:
    return restored.settle(
        RestoreFinding.objects.get(resolved_at=None),
        home=home,
        cell=cell,
        by="ada",
        reason="the guard rows say so",
        now=world.clock(),
    )


def start_machines(world: World) -> None:
    world.clock.pass_by(AN_HOUR)
    restored.start_machines(by="ada", reason="all settled", now=world.clock())


def writable(world: World) -> list[str]:
    """Try a turn at both stores; return those that take it."""
    sides = {"source": world.source, "target": world.target}
    return [name for name, side in sides.items() if world.agents_may_write(side)]


def turn(world: World, name: str, on: Any) -> None:
    on.turn(APP, "u-1", "s-1", name)


def came_along(world: World, name: str, on: Any) -> bool:
    return any(f'"{name}"' in row for row in on.content(APP)["events"])


# --- the story ------------------------------------------------------------------------------


def test_a_tenant_whose_move_was_lost_comes_back_where_its_data_is(both: World) -> None:
    cast = both.cast
    backup = Backup()
    lost = both.start()
    both.run()
    assert both.move.phase == Phase.DONE
    turn(both, "after-the-cutover", both.target)
    # A process that joined after the backup.
    process = tenants.join(
        cast.cell,
        name="agents-1",
        build="1",
        boot="b",
        longest_turn_seconds=60.0,
        longest_tool_seconds=30.0,
        plugins=[],
        stores=[],
        replaces=None,
        now=both.clock(),
    )
    held = str(tenants.poll(process.key, now=both.clock()).version)

    backup.restore()
    assert both.owner() == [("cell-eu1-a", "all")]
    assert not TenantMigration.objects.exists()
    # Nobody has said so. The first that the process hears stops all machines.
    with pytest.raises(tenants.InstanceGone):
        tenants.poll(process.key, since=held, now=both.clock())
    tenants.join(
        cast.cell,
        name="agents-1",
        build="1",
        boot="b",
        longest_turn_seconds=60.0,
        longest_tool_seconds=30.0,
        plugins=[],
        stores=[],
        replaces=process.key,
        applied_version=held,
        now=both.clock(),
    )
    with pytest.raises(tenants.MachinesStopped, match="agents-1"):
        services.start(
            cast.bolt,
            target_cell=cast.other_cell,
            target_store=cast.other_store,
            by="ada",
            reason="r",
            now=both.clock(),
        )

    epoch = tenants_queries.epoch()
    found = compare(both)
    assert found.epoch == tenants_queries.epoch() != epoch
    [line] = found.lines
    assert (line.tenant, found.tenants, found.differing) == ("acme", 3, 1)
    assert f"closed to agents by mv-{lost.pk}, which is unknown here" in line.verdict
    assert both.owner() == [("cell-eu1-a", "none")]
    assert writable(both) == ["target"]
    finding = RestoreFinding.objects.get()
    assert (finding.homes, finding.opens) == (["store-eu1-b"], False)
    # To be run again and again.
    assert compare(both).lines == found.lines
    with pytest.raises(restored.NotSettled, match="acme"):
        restored.start_machines(by="ada", reason="x", now=both.clock() + timedelta(days=1))

    with pytest.raises(restored.CellUnknown, match="Name the cell"):
        settle(both, cast.other_store)
    before = guard(both, cast.store), guard(both, cast.other_store)
    version = settle(both, cast.other_store, cast.other_cell)
    assert both.owner() == [("cell-eu1-b", "all")]
    placement = Tenant.objects.get(slug="acme").placement
    assert (placement.store, placement.placement_version) == (cast.other_store, version)
    assert cast.acme.placement_changes.first().reason.endswith("the guard rows say so")
    assert AuditEntry.objects.filter(verb="restored.settle", subject="tenant acme").exists()
    # No store was touched, and both events of both times are there.
    assert (guard(both, cast.store), guard(both, cast.other_store)) == before
    assert writable(both) == ["target"]
    assert came_along(both, "after-the-cutover", both.target)

    start_machines(both)
    turn(both, "after-the-restore", both.target)
    back = move_to(both, cast.cell, cast.store)
    assert back.pk > lost.pk
    run(both, back)
    assert both.owner() == [("cell-eu1-a", "all")]
    assert both.source.count(APP) == 12
    for name in ("after-the-cutover", "after-the-restore"):
        assert came_along(both, name, both.source)


def move_to(world: World, cell: Cell, store: Store) -> TenantMigration:
    return services.start(
        Tenant.objects.get(pk=world.cast.acme.pk),
        target_cell=cell,
        target_store=store,
        by="ada",
        reason="again",
        automatic=True,
        offboard_automatically=True,
        soak_seconds=60.0,
        now=world.clock(),
    )


def run(world: World, move: TenantMigration, *, until: Phase | None = None) -> TenantMigration:
    for _ in range(300):
        move.refresh_from_db()
        if move.due_at is None or move.phase == until:
            return move
        world.clock.now = max(world.clock.now, move.due_at)
        driver.advance(world.machine, move.pk, clock=world.clock)
    raise AssertionError(f"stuck in {move.phase}: {move.waiting_for} {move.failure}")


def test_a_new_move_never_takes_the_guard_row_of_a_lost_one_for_its_own(files: World) -> None:
    backup = Backup()
    lost = files.start()
    files.run()
    backup.restore()
    compare(files)
    settle(files, files.cast.other_store, files.cast.other_cell)
    start_machines(files)
    mine = services.start(
        files.cast.bolt,
        target_cell=files.cast.other_cell,
        target_store=files.cast.other_store,
        by="ada",
        reason="r",
        now=files.clock(),
    )
    assert mine.pk > lost.pk + restored.NUMBERS_SKIPPED
    # What the lost move's rows guard can be moved again: the row is known, and ended.
    assert TenantMigration.objects.get(pk=lost.pk).phase == Phase.DONE


def test_numbers_rise_above_every_guard_row_and_once_a_halt_a_good_deal_more(
    files: World,
) -> None:
    files.start()
    files.run(until=Phase.BACKFILL)
    # Counted from this move: a sequence keeps what the tests before this one took from it.
    stranger = files.move.pk + 70_000
    with ports.open_store(
        "adk-sql", "env:STORE_EU1_B", app_name="support.stranger", move=stranger, claim=1
    ) as port:
        port.adopt(None, mover=False, agents=False)
    found = compare(files)
    assert found.number == stranger + restored.NUMBERS_SKIPPED
    assert found.strangers == ("support.stranger",)
    assert compare(files).number == found.number
    assert make.move(files.cast.bolt, cast=files.cast, now=files.clock()).pk == found.number + 1


# --- what is the same, and what differs -------------------------------------------------------


PHASES = [Phase.BACKFILL, Phase.DRAIN, Phase.DELTA, Phase.VERIFY, Phase.TARGET, Phase.SOAK]


@pytest.mark.parametrize("phase", PHASES)
def test_a_backup_that_is_as_new_as_the_stores_stops_nobody(files: World, phase: Phase) -> None:
    files.start()
    files.run(until=phase)
    before = files.owner()
    found = compare(files)
    assert (found.lines, found.differing) == ((), 0)
    assert files.owner() == before
    # No step runs meanwhile, whatever is due.
    claim = files.move.claim
    files.step()
    assert (files.move.claim, files.move.phase) == (claim, phase)
    start_machines(files)
    files.step()
    assert files.move.claim == claim + 1


@pytest.mark.parametrize("phase", PHASES)
def test_a_move_that_went_on_after_the_backup_is_listed_and_ended_as_it_is(
    files: World, phase: Phase
) -> None:
    files.start()
    files.run(until=phase)
    backup = Backup()
    files.run()
    turn(files, "after", files.target)
    backup.restore()
    files.move.refresh_from_db()
    found = compare(files)
    assert [line.tenant for line in found.lines] == ["acme"]
    assert files.owner() in ([("cell-eu1-a", "none")], [("cell-eu1-b", "none")])
    with pytest.raises(restored.NotAHome, match="store-eu1-b"):
        settle(files, files.cast.store)
    settle(files, files.cast.other_store)
    move = files.move
    assert (move.phase, move.due_at) == (Phase.DONE, None)
    assert "Left as it is" in move.events.first().note
    assert files.owner() == [("cell-eu1-b", "all")]
    assert writable(files) == ["target"]
    assert came_along(files, "after", files.target)
    start_machines(files)


@pytest.mark.parametrize("phase", [None, Phase.BACKFILL, Phase.VERIFY, Phase.SOAK])
@pytest.mark.parametrize("until", [Phase.VERIFY, Phase.SOAK])
def test_the_pages_of_moves_that_a_restore_ended_are_drawn(
    files: World, phase: Phase | None, until: Phase
) -> None:
    backup = Backup()
    if phase is not None:
        files.start()
        files.run(until=phase)
        backup = Backup()
    else:
        files.start()
    files.run(until=until if phase is not Phase.SOAK else None)
    backup.restore()
    compare(files)
    for finding in RestoreFinding.objects.all():
        home = Store.objects.get(key=finding.homes[0])
        cell = files.cast.other_cell if home == files.cast.other_store else None
        settle(files, home, cell)
    browser = Client()
    browser.force_login(scene.person("vera", Role.VIEWER))
    moves = TenantMigration.objects.all()
    assert moves
    for move in moves:
        assert browser.get(f"/moves/mv-{move.pk}/").status_code == 200
    assert browser.get("/tenants/acme/").status_code == 200
    assert browser.get("/").status_code == 200


def test_a_move_that_was_aborted_after_the_backup_leaves_the_tenant_at_its_source(
    files: World,
) -> None:
    files.start()
    files.run(until=Phase.VERIFY)
    backup = Backup()
    services.abort(files.move, by="ada", reason="no", now=files.clock())
    files.run()
    turn(files, "after", files.source)
    backup.restore()
    assert [line.tenant for line in compare(files).lines] == ["acme"]
    assert RestoreFinding.objects.get().homes == ["store-eu1-a"]
    settle(files, files.cast.store)
    assert files.move.phase == Phase.ABORTED
    assert files.owner() == [("cell-eu1-a", "all")]
    assert writable(files) == ["source"]
    start_machines(files)
    again = move_to(files, files.cast.other_cell, files.cast.other_store)
    run(files, again)
    assert came_along(files, "after", files.target)


def test_a_lost_move_that_left_its_tenant_where_it_was_blocks_no_later_one(files: World) -> None:
    """Its guard rows name it, and nobody may take a row that names a move he has never heard of."""
    backup = Backup()
    lost = files.start()
    files.run(until=Phase.BACKFILL)
    files.step()
    backup.restore()
    [line] = compare(files).lines
    assert line.verdict == f"the same; mv-{lost.pk} was lost and is kept as ended"
    assert files.owner() == [("cell-eu1-a", "all")]
    assert not RestoreFinding.objects.exists()
    start_machines(files)
    run(files, move_to(files, files.cast.other_cell, files.cast.other_store))
    assert files.target.count(APP) == 12


@pytest.mark.parametrize("phase", [Phase.DELTA, Phase.VERIFY])
def test_a_lost_fence_is_opened_on_its_source_and_nowhere_else(both: World, phase: Phase) -> None:
    """Both sides are closed: the copy is what the mover writes, so the other side is whole."""
    backup = Backup()
    both.start()
    both.run(until=phase)
    backup.restore()
    assert writable(both) == []
    compare(both)
    finding = RestoreFinding.objects.get()
    assert (finding.homes, finding.opens) == (["store-eu1-a"], True)
    with pytest.raises(restored.NotAHome):
        settle(both, both.cast.other_store, both.cast.other_cell)
    settle(both, both.cast.store)
    assert writable(both) == ["source"]
    assert both.owner() == [("cell-eu1-a", "all")]
    start_machines(both)
    run(both, move_to(both, both.cast.other_cell, both.cast.other_store))
    assert writable(both) == ["target"]
    assert both.target.count(APP) == 12


@pytest.mark.parametrize("phase", [Phase.REVERSE_DELTA, Phase.REVERSE_VERIFY])
def test_a_fence_lost_on_the_way_back_is_opened_on_the_target(both: World, phase: Phase) -> None:
    """Both sides are closed and, right behind the drain, neither is written: the last closed one
    is where the tenant lived, and the only one that has all of it."""
    both.start(soak_seconds=86_400.0, offboard_automatically=False)
    both.run(until=Phase.SOAK)
    backup = Backup()
    both.target.turn(APP, "u-1", "s-1", "after-the-cutover")
    services.rollback(both.move, by="ada", reason="slow", now=both.clock())
    both.run(until=phase)
    backup.restore()
    assert writable(both) == []
    compare(both)
    assert RestoreFinding.objects.get().homes == ["store-eu1-b"]
    settle(both, both.cast.other_store, both.cast.other_cell)
    assert writable(both) == ["target"]
    assert both.owner() == [("cell-eu1-b", "all")]
    assert came_along(both, "after-the-cutover", both.target)


def test_of_two_open_sides_the_other_one_closes(both: World) -> None:
    """The source's database was restored too, to before its guard row was there."""
    backup = Backup()
    both.start()
    both.run(until=Phase.SOAK)
    both.source.run("delete from switchyard_guard where app_name = ?", APP)
    backup.restore()
    assert writable(both) == ["source", "target"]
    compare(both)
    assert RestoreFinding.objects.get().homes == ["store-eu1-a", "store-eu1-b"]
    assert both.owner() == [("cell-eu1-a", "none")]
    settle(both, both.cast.other_store, both.cast.other_cell)
    assert writable(both) == ["target"]
    assert both.owner() == [("cell-eu1-b", "all")]


def test_settling_that_dies_half_way_is_settled_again(files: World) -> None:
    backup = Backup()
    files.start()
    files.run(until=Phase.SOAK)
    files.source.run("delete from switchyard_guard where app_name = ?", APP)
    backup.restore()
    compare(files)

    def dies() -> None:
        raise Unreachable("the network is gone")

    # The second of the two rows that settling writes.
    files.killer.before["adopt"] = lambda: files.killer.before.update({"adopt": dies})
    with pytest.raises(Unreachable):
        settle(files, files.cast.other_store, files.cast.other_cell)
    assert len(writable(files)) < 2
    assert files.owner() == [("cell-eu1-a", "none")]
    settle(files, files.cast.other_store, files.cast.other_cell)
    assert writable(files) == ["target"]


# --- stores that do not answer ----------------------------------------------------------------


def test_a_silent_home_refuses_its_tenants_until_it_answers_again(
    files: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STORE_EU1_A")
    found = compare(files)
    assert list(found.silent) == ["store-eu1-a"]
    assert {line.verdict for line in found.lines} == {"store-eu1-a does not answer"}
    assert found.differing == 3
    [acme, bolt, _] = RestoreFinding.objects.order_by("tenant__slug")
    with pytest.raises(restored.NotAHome):
        restored.settle(acme, home=files.cast.store, by="ada", reason="I know", now=files.clock())
    restored.leave_refused(bolt, by="ada", reason="lost for good", now=files.clock())
    monkeypatch.setenv("STORE_EU1_A", files.source.url)
    assert compare(files).differing == 0
    for slug in ("acme", "bolt", "core"):
        [entry] = Tenant.objects.get(slug=slug).entries.all()
        assert entry.accepts == "all"
    acme.refresh_from_db()
    assert (acme.outcome, acme.resolved_by) == ("The same by now", "ada")
    start_machines(files)


def test_a_store_that_lost_its_tables_does_not_pass_for_one_that_was_never_closed(
    files: World,
) -> None:
    files.start()
    files.run(until=Phase.DELTA)
    Store.objects.filter(pk=files.cast.other_store.pk).update(survey={"schema_version": "1"})
    for (name,) in files.target.run("select name from sqlite_master where type = 'table'"):
        files.target.run(f'drop table "{name}"')
    found = compare(files)
    assert list(found.silent) == ["store-eu1-b"]
    assert [line.tenant for line in found.lines] == ["acme"]


def test_nothing_is_opened_while_a_store_is_silent_that_may_be_the_home(
    files: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup = Backup()
    files.start()
    files.run(until=Phase.SOAK)
    backup.restore()
    monkeypatch.delenv("STORE_EU1_B")
    compare(files)
    assert RestoreFinding.objects.get().homes == []
    with pytest.raises(restored.NotAHome, match="store-eu1-b"):
        settle(files, files.cast.store)
    assert writable(files) == ["target"]


def test_a_tenant_left_refused_keeps_no_live_move(
    files: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.start()
    files.run(until=Phase.BACKFILL)
    monkeypatch.delenv("STORE_EU1_B")
    compare(files)
    restored.leave_refused(
        RestoreFinding.objects.get(), by="ada", reason="its disk is gone", now=files.clock()
    )
    assert (files.move.phase, files.move.due_at) == (Phase.ABORTED, None)
    assert files.owner() == [("cell-eu1-a", "none")]
    start_machines(files)


# --- in the middle of things ------------------------------------------------------------------


def test_a_step_that_began_before_the_halt_is_waited_for(files: World) -> None:
    files.start()
    files.run(until=Phase.BACKFILL)
    waited: list[float] = []

    def in_the_step() -> None:
        tenants.halt(by="ada", why="restored", now=files.clock())
        with pytest.raises(restored.StillAtWork, match="mv-"):
            compare(files)

        def sleep(seconds: float) -> None:
            waited.append(seconds)
            files.clock.pass_by(31)

        restored.wait_for_steps(clock=files.clock, sleep=sleep)

    files.killer.before["take"] = in_the_step
    for _ in range(5):
        files.step()
    assert len(waited) == 1
    compare(files)


def test_what_another_tenants_move_guards_here_is_put_under_a_number_of_its_own(
    files: World,
) -> None:
    """Somebody moved tenants for hours before anybody said `restored`: numbers met."""
    backup = Backup()
    lost = files.start()
    files.run(until=Phase.SOAK)
    backup.restore()
    taken = make.move(files.cast.bolt, cast=files.cast, now=files.clock())
    assert taken.pk == lost.pk
    found = compare(files)
    assert "another tenant's move here" in found.lines[0].verdict
    settle(files, files.cast.other_store, files.cast.other_cell)
    for store in (files.cast.store, files.cast.other_store):
        row = guard(files, store)
        assert row is not None
        assert row.move > lost.pk
    assert writable(files) == ["target"]


Act = Callable[[RestoreFinding, World], Any]


@pytest.mark.parametrize(
    "act",
    [
        lambda found, world: restored.settle(
            found, home=world.cast.other_store, by="ada", reason="r", now=world.clock()
        ),
        lambda found, world: restored.leave_refused(found, by="ada", reason="r", now=world.clock()),
    ],
    ids=["settle", "leave_refused"],
)
def test_nothing_is_settled_twice_or_while_machines_run(files: World, act: Act) -> None:
    files.start()
    files.run(until=Phase.BACKFILL)
    backup = Backup()
    files.run(until=Phase.SOAK)
    backup.restore()
    compare(files)
    found = RestoreFinding.objects.get()
    settle(files, files.cast.other_store)
    found.refresh_from_db()
    with pytest.raises(restored.AlreadySettled):
        act(found, files)
    start_machines(files)
    with pytest.raises(tenants.MachinesRun):
        act(found, files)
    with pytest.raises(tenants.MachinesRun):
        restored.compare(by="ada", reason="r", now=files.clock())


# --- splits -----------------------------------------------------------------------------------

BACK = (Phase.REVERSE_DRAIN, Phase.REVERSE_DELTA, Phase.REVERSE_VERIFY, Phase.REVERSE_TARGET)
LIVE = "both serve"


def go(world: World, to: str) -> None:
    """Let a split move come to a phase, or to where both sides serve."""
    if to == LIVE:
        until_both_serve(world)
        return
    if to in BACK and world.move.phase not in BACK:
        until_both_serve(world)
        services.abort(world.move, by="ada", reason="not now", now=world.clock())
    world.run(until=Phase(to))


def taking(world: World) -> list[tuple[str, str]]:
    """Return the cells that take turns, and which."""
    entries = world.cast.acme.entries.exclude(accepts__in=["none", "moved"]).order_by("cell__slug")
    return list(entries.values_list("cell__slug", "accepts"))


@pytest.mark.parametrize("phase", [Phase.SPLIT, LIVE, *PHASES[1:], *BACK])
def test_a_split_whose_backup_is_as_new_as_the_stores_stops_nobody(
    files: World, phase: str
) -> None:
    split(files)
    go(files, phase)
    before = taking(files)
    found = compare(files)
    assert (found.lines, found.differing) == ((), 0)
    assert taking(files) == before


def test_both_sides_of_a_split_are_refused_and_let_in_again(
    files: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    split(files)
    for phase, open_ones in (
        (Phase.SPLIT, [("cell-eu1-a", "existing")]),
        (LIVE, [("cell-eu1-a", "existing"), ("cell-eu1-b", "new")]),
        (Phase.VERIFY, [("cell-eu1-b", "new")]),
        (Phase.REVERSE_VERIFY, [("cell-eu1-a", "existing")]),
    ):
        if phase == Phase.REVERSE_VERIFY:
            services.abort(files.move, by="ada", reason="no", now=files.clock())
            files.run(until=Phase.SPLIT)
            files.run(until=Phase.REVERSE_VERIFY)
        else:
            go(files, phase)
        if phase == Phase.SPLIT:
            files.step()
        assert taking(files) == open_ones
        monkeypatch.delenv("STORE_EU1_B")
        assert compare(files).differing == 1
        assert taking(files) == []
        monkeypatch.setenv("STORE_EU1_B", files.target.url)
        assert compare(files).differing == 0
        assert taking(files) == open_ones
        start_machines(files)


ORDER = [None, Phase.BACKFILL, Phase.SPLIT, LIVE, Phase.DRAIN, Phase.VERIFY, Phase.REVERSE_DELTA]
TRUTHS = [LIVE, Phase.DELTA, Phase.VERIFY, *BACK[:3]]
SPLITS = [
    (backup, truth)
    for backup in ORDER
    for truth in TRUTHS
    if backup in (None, Phase.BACKFILL, Phase.SPLIT)
    or (backup == LIVE and truth != LIVE)
    or (backup == Phase.DRAIN and truth != LIVE)
    or (backup == Phase.VERIFY and truth in BACK)
    or (backup == Phase.REVERSE_DELTA and truth == Phase.REVERSE_VERIFY)
]


@pytest.mark.parametrize(
    ("backup", "truth", "home"),
    # Each truth with either home, in turn.
    [(*one, ("source", "target")[(number + number // 6) % 2]) for number, one in enumerate(SPLITS)],
)
def test_a_split_that_went_on_after_the_backup_is_brought_together(
    files: World, backup: str | None, truth: str, home: str
) -> None:
    cast = files.cast
    kept = Backup()
    split(files)
    if backup in (Phase.BACKFILL, Phase.SPLIT):
        go(files, backup)
        kept = Backup()
    until_both_serve(files)
    content = live(files)
    shares(files.source, "u-2", "theme", "dark", 9_000)
    content = {**sessions(files.source), "u-1/s-born": content["u-1/s-born"]}
    if backup in (LIVE, Phase.DRAIN, Phase.VERIFY, Phase.REVERSE_DELTA):
        go(files, backup)
        kept = Backup()
    if backup not in BACK:
        # Served after the backup was taken.
        born(files.target, "s-later", "u-3")
        content["u-3/s-later"] = sessions(files.target)["u-3/s-later"]
    number = files.move.pk
    go(files, truth)
    kept.restore()

    compare(files)
    assert taking(files) == []
    found = RestoreFinding.objects.get()
    assert found.homes == ["store-eu1-a", "store-eu1-b"]
    assert f"mv-{number}" in found.differs
    store = cast.store if home == "source" else cast.other_store
    if backup is None:
        with pytest.raises(restored.CellUnknown, match="new sessions"):
            settle(files, store)
    settle(files, store, cast.other_cell if backup is None else None)
    assert taking(files) == []
    with pytest.raises(restored.AlreadySettled):
        restored.settle(found, home=store, by="ada", reason="twice", now=files.clock())
    start_machines(files)
    files.step()
    assert_both_serve(files, "machines run")
    files.run(until=None if home == "source" else Phase.SOAK)
    assert files.move.pk == number
    if home == "source":
        assert_back(files, content, "brought back")
    else:
        assert_moved(files, content, "brought on")
    assert shared(files.source if home == "source" else files.target, "u-2")["theme"] == "dark"
    browser = Client()
    browser.force_login(scene.person("vera", Role.VIEWER))
    assert browser.get(f"/moves/mv-{number}/").status_code == 200


@pytest.mark.parametrize("backup", [None, Phase.BACKFILL, LIVE, Phase.VERIFY])
@pytest.mark.parametrize("ends", [Phase.SOAK, Phase.ROLLED_BACK])
def test_a_split_that_ended_after_the_backup_leaves_one_home(
    files: World, backup: str | None, ends: Phase
) -> None:
    kept = Backup()
    split(files)
    if backup is not None:
        go(files, backup)
        kept = Backup()
    until_both_serve(files) if backup != Phase.VERIFY else None
    born(files.target, "s-born")
    if ends == Phase.ROLLED_BACK:
        services.abort(files.move, by="ada", reason="no", now=files.clock())
    files.run(until=ends)
    home, away = (
        (files.cast.other_store, files.cast.store)
        if ends == Phase.SOAK
        else (files.cast.store, files.cast.other_store)
    )
    kept.restore()
    compare(files)
    found = RestoreFinding.objects.filter(resolved_at=None).first()
    if found is None:
        # Back where it was, and nobody here has heard of any of it.
        assert (backup, ends) == (None, Phase.ROLLED_BACK)
        assert taking(files) == [("cell-eu1-a", "all")]
        return
    assert found.homes == [home.key]
    with pytest.raises(restored.NotAHome):
        settle(files, away)
    settle(files, home, files.cast.other_cell if home == files.cast.other_store else None)
    assert [accepts for _, accepts in taking(files)] == ["all"]
    assert Placement.objects.get(tenant=files.cast.acme).split_cell is None
    assert writable(files) == ["target" if ends == Phase.SOAK else "source"]


def test_a_split_that_was_left_refused_is_joined_later_and_moves_nowhere_before(
    files: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    split(files)
    until_both_serve(files)
    content = live(files)
    monkeypatch.delenv("STORE_EU1_B")
    compare(files)
    assert RestoreFinding.objects.get().homes == []
    restored.leave_refused(
        RestoreFinding.objects.get(), by="ada", reason="its disk is away", now=files.clock()
    )
    start_machines(files)
    with pytest.raises(services.NotReadyToMove, match="split"):
        move_to(files, files.cast.other_cell, files.cast.other_store)
    monkeypatch.setenv("STORE_EU1_B", files.target.url)
    [line] = compare(files).lines
    assert "no move is here to join them" in line.verdict
    assert "store-eu1-a and store-eu1-b" in line.says
    settle(files, files.cast.store)
    start_machines(files)
    files.run()
    assert_back(files, content, "joined")


@pytest.mark.parametrize("backup", [None, Phase.BACKFILL, LIVE])
@pytest.mark.parametrize("silent", ["STORE_EU1_A", "STORE_EU1_B"])
def test_neither_side_of_a_split_is_a_home_while_the_other_is_silent(
    files: World, monkeypatch: pytest.MonkeyPatch, backup: str | None, silent: str
) -> None:
    kept = Backup()
    split(files)
    if backup is not None:
        go(files, backup)
        kept = Backup()
    until_both_serve(files)
    born(files.target, "s-born")
    kept.restore()
    monkeypatch.delenv(silent)
    compare(files)
    assert RestoreFinding.objects.get(tenant=files.cast.acme, resolved_at=None).homes == []


def test_a_restart_in_the_middle_of_leaving_the_way_back_still_tells_of_the_split(
    files: World,
) -> None:
    """At each call of the steps that close and open the target on the way back."""
    split(files)
    until_both_serve(files)
    live(files)
    services.abort(files.move, by="ada", reason="no", now=files.clock())
    files.run(until=Phase.REVERSE_DRAIN)
    tried = 0
    stopped = False
    for call in each_call(files):
        if files.move.phase == Phase.REVERSE_VERIFY and not stopped:
            services.abort(files.move, by="ada", reason="go on", now=files.clock())
            stopped = True
        if files.move.phase == Phase.DRAIN:
            break
        tried += 1
        with undone(files):
            files.step()
            found = restored.read_stores(list(Store.objects.order_by("key"))).rows[APP]
            assert any(row.mover and row.agents for row in found.values()), call
    assert stopped
    assert tried > 30
