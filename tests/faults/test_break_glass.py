"""A tenant is refused, all workers are gone, and a person opens it by one command."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import transaction

from durable import driver
from migrations_app import opening, queries, restored, safety, services
from migrations_app.domain.phases import FENCED, REVERSED, Phase
from migrations_app.domain.safety import Rule
from migrations_app.models import RestoreFinding, TenantMigration
from migrations_app.ports.base import Guard
from tenants import services as tenants
from tenants.models import AuditEntry, Placement, PolicyEntry
from tests.faults.test_split import assert_both_serve, live, until_both_serve
from tests.faults.test_split import start as start_split
from tests.faults.test_way_back import LONG, assert_stays, look, moved, roll_back
from tests.stores import Raw
from tests.world import APP, Killed, World, each_moment, undone

pytestmark = pytest.mark.timeout(300)

# Past any deadline here, and the margin behind it.
NIGHT = 3_600.0


def open_it(world: World, told: list[str] | None = None) -> opening.Opened:
    return opening.open_tenant(
        world.cast.acme,
        by="nora",
        reason="3 a.m., all workers are gone",
        clock=world.clock,
        sleep=world.clock.pass_by,
        tell=(told if told is not None else []).append,
    )


def state(world: World) -> safety.State:
    return safety.state_of(world.cast.acme, now=world.clock())


def broken(world: World) -> list[tuple[str, Rule | None]]:
    return [(one.tenant, one.rule) for one in safety.broken_now(now=world.clock())]


def writable(world: World) -> list[str]:
    sides = {"source": world.source}
    if TenantMigration.objects.exists():
        sides["target"] = world.target
    return [name for name, side in sides.items() if world.agents_may_write(side)]


def refuse(world: World) -> None:
    """Let no cell take turns of the tenant, without a word why: somebody's mistake."""
    home = Placement.objects.get(tenant=world.cast.acme).cell
    with transaction.atomic():
        tenants.publish(world.cast.acme, home, accepts="none")


def fenced(world: World) -> bool:
    return state(world).since is not None


def lost(world: World) -> None:
    """The workers are gone, and hours go by."""
    world.clock.pass_by(NIGHT)
    assert broken(world) == [("acme", Rule.FENCE_OVERDUE)]


# --- a fence that nobody opens ----------------------------------------------------------------


def test_a_fence_is_opened_in_every_phase_with_all_workers_gone(files: World) -> None:
    content = files.source.content(APP)
    files.start(soak_seconds=LONG)
    tried = set()
    for phase in each_moment(files):
        if phase == Phase.TARGET:
            break
        if not fenced(files):
            continue
        tried.add(phase)
        with undone(files):
            assert_opened_at_the_source(files, phase)
            assert files.source.content(APP) == content, phase
    assert tried == {Phase.DRAIN, Phase.DELTA, Phase.VERIFY}


def test_a_fence_on_servers_is_opened_with_all_workers_gone(servers: World) -> None:
    servers.start(soak_seconds=LONG)
    servers.run(until=Phase.VERIFY)
    assert_opened_at_the_source(servers, Phase.VERIFY)


def assert_opened_at_the_source(world: World, phase: str) -> None:
    lost(world)
    told: list[str] = []
    done = open_it(world, told)
    assert (done.before.rule, done.after.rule) == (Rule.FENCE_OVERDUE, None)
    assert any(f"{world.move} REOPEN: acme is open" in line for line in told), phase
    assert world.owner() == [("cell-eu1-a", "all")], phase
    assert writable(world) == ["source"], phase
    assert world.move.abort_requested_by == "nora"


def test_behind_the_point_of_no_return_it_goes_forward(both: World) -> None:
    content = both.source.content(APP)
    both.start(soak_seconds=LONG)
    both.run(until=Phase.TARGET)
    lost(both)
    open_it(both)
    assert both.move.phase == Phase.SOAK
    assert both.owner() == [("cell-eu1-b", "all")]
    assert writable(both) == ["target"]
    assert both.target.content(APP) == content
    assert both.move.abort_requested_at is None


@pytest.mark.parametrize("phase", [Phase.DRAIN, Phase.TARGET])
def test_a_move_of_the_cell_alone_is_opened_where_its_phase_leads(
    files: World, phase: Phase
) -> None:
    cast = files.cast
    files.start(target_cell=cast.other_cell, target_store=cast.store, soak_seconds=LONG)
    files.run(until=phase)
    while not fenced(files):
        files.step()
    lost(files)
    open_it(files)
    home = "cell-eu1-a" if phase == Phase.DRAIN else "cell-eu1-b"
    assert files.owner() == [(home, "all")]


def test_a_way_back_that_nobody_ends_leaves_the_tenant_where_it_was_or_brings_it_home(
    files: World,
) -> None:
    content = moved(files)
    look(files)
    roll_back(files)
    tried = set()
    for phase in each_moment(files):
        if not fenced(files):
            continue
        tried.add(phase)
        with undone(files):
            lost(files)
            open_it(files)
            back = phase == Phase.REVERSE_TARGET
            assert files.owner() == [("cell-eu1-a" if back else "cell-eu1-b", "all")], phase
            assert writable(files) == ["source" if back else "target"], phase
            if back:
                assert files.source.content(APP) == content
                continue
            # The rest is the workers', when they are back.
            for _ in range(6):
                files.step()
            assert_stays(files, content, phase)
    assert tried == REVERSED


def test_a_splits_fence_leads_back_to_the_split(files: World) -> None:
    start_split(files)
    until_both_serve(files)
    live(files)
    tried = set()
    for phase in each_moment(files):
        if phase == Phase.SOAK:
            break
        if not fenced(files):
            continue
        tried.add(phase)
        with undone(files):
            lost(files)
            open_it(files)
            if phase == Phase.TARGET:
                assert files.owner() == [("cell-eu1-b", "all")]
                assert writable(files) == ["target"]
                continue
            assert_both_serve(files, phase)
            # It did not ask for births to be carried home: that would close another fence.
            assert files.move.rollback_requested_at is None
    assert tried == FENCED - REVERSED


def test_a_way_back_out_of_a_split_leads_back_to_it_and_is_not_begun_again(files: World) -> None:
    start_split(files)
    until_both_serve(files)
    live(files)
    services.abort(files.move, by="ada", reason="no", now=files.clock())
    tried = set()
    for phase in each_moment(files):
        if not fenced(files):
            continue
        tried.add(phase)
        with undone(files):
            lost(files)
            open_it(files)
            if phase == Phase.REVERSE_TARGET:
                assert files.owner() == [("cell-eu1-a", "all")]
                assert writable(files) == ["source"]
                continue
            assert_both_serve(files, phase)
            assert files.move.rollback_requested_at is None
    assert tried == REVERSED


def test_a_split_that_nobody_goes_on_with_while_new_sessions_are_refused_is_taken_back(
    files: World,
) -> None:
    start_split(files)
    files.run(until=Phase.SPLIT)
    files.step()
    assert queries.opens_target(files.move)
    # Somebody takes its steps: no rule is broken, however long it takes.
    assert broken(files) == []
    lost(files)
    open_it(files)
    assert files.owner() == [("cell-eu1-a", "all")]
    assert writable(files) == ["source"]


def test_what_only_has_to_open_is_late_long_before_the_deadline_would_be(files: World) -> None:
    files.start(budget_seconds=3_000.0)
    files.run(until=Phase.DELTA)
    services.abort(files.move, by="ada", reason="no", now=files.clock())
    files.step()
    assert files.move.phase == Phase.REOPEN
    files.clock.pass_by(30)
    assert broken(files) == []
    files.clock.pass_by(30)
    assert broken(files) == [("acme", Rule.FENCE_OVERDUE)]
    open_it(files)
    assert files.owner() == [("cell-eu1-a", "all")]


def test_a_worker_that_was_killed_in_its_step_is_waited_for(files: World) -> None:
    files.start()
    files.run(until=Phase.DELTA)
    files.clock.pass_by(NIGHT)
    files.killer.calls, files.killer.at = 0, 1
    files.clock.now = max(files.clock.now, files.move.due_at or files.clock.now)
    # It claims the row, and dies on the way out.
    services.abort(files.move, by="ada", reason="no", now=files.clock())
    for _ in range(2):
        with suppress(Killed):
            driver.advance(files.machine, files.move.pk, clock=files.clock)
    assert files.move.claim != files.move.settled
    begun = files.clock.now
    told: list[str] = []
    open_it(files, told)
    assert files.owner() == [("cell-eu1-a", "all")]
    assert any("is claimed by a worker, until" in line for line in told)
    assert 20 < (files.clock.now - begun).total_seconds() < opening.within_seconds()


@pytest.mark.parametrize("way", ["forward", "back"])
def test_it_is_killed_at_every_call_and_run_again(files: World, way: str) -> None:
    if way == "forward":
        content = files.source.content(APP)
        files.start()
        files.run(until=Phase.VERIFY)
        home, side = [("cell-eu1-a", "all")], "source"
    else:
        content = moved(files)
        look(files)
        roll_back(files)
        files.run(until=Phase.REVERSE_DELTA)
        home, side = [("cell-eu1-b", "all")], "target"
    at, killed = 0, 0
    while True:
        at += 1
        with undone(files):
            lost(files)
            files.killer.calls, files.killer.at = 0, at
            try:
                open_it(files)
            except Killed:
                killed += 1
                assert len(writable(files)) <= 1
                with suppress(opening.NothingBroken):
                    open_it(files)
            else:
                break
            assert files.owner() == home, at
            assert writable(files) == [side], at
            kept = files.source if side == "source" else files.target
            assert kept.content(APP) == content
    assert killed >= 4


def test_a_worker_that_comes_back_in_its_middle_does_no_harm(files: World) -> None:
    content = files.source.content(APP)
    files.start()
    files.run(until=Phase.VERIFY)

    def workers_are_back() -> None:
        TenantMigration.objects.filter(pk=files.move.pk, due_at__isnull=False).update(
            due_at=files.clock()
        )
        files.run()
        # The tenant lives on: what this process does late must not touch it.
        files.source.turn(APP, "u-1", "s-1", "open-again")

    at = 0
    while True:
        at += 1
        with undone(files):
            lost(files)
            files.killer.calls, files.killer.at = 0, at
            files.killer.meanwhile = workers_are_back
            done = open_it(files)
            stalled = files.killer.at is None
            files.killer.at, files.killer.meanwhile = None, None
            assert done.after.rule is None
            assert files.owner() == [("cell-eu1-a", "all")], at
            assert writable(files) == ["source"], at
            if not stalled:
                break
            assert files.move.phase == Phase.ABORTED
            assert files.source.content(APP) != content, at
    assert at > 4


def test_workers_that_begin_the_next_fence_meanwhile_are_not_taken_for_a_failure(
    files: World,
) -> None:
    start_split(files)
    until_both_serve(files)
    files.run(until=Phase.DELTA)
    lost(files)

    def workers_close_the_next() -> None:
        for _ in range(60):
            files.step()
            if files.move.phase == Phase.DRAIN and files.move.fence_closed_at is not None:
                return
        raise AssertionError(files.move.phase)

    files.killer.calls, files.killer.at = 0, 1
    files.killer.meanwhile = workers_close_the_next
    done = open_it(files)
    assert done.after.since is not None
    assert "which opens it by itself" in done.after.words
    assert files.move.phase == Phase.DRAIN


# --- no move lives, and no cell takes turns ---------------------------------------------------


def test_a_home_that_takes_no_turns_takes_them_again(both: World) -> None:
    refuse(both)
    assert broken(both) == [("acme", Rule.NOBODY_SERVES)]
    done = open_it(both)
    assert done.before.rule is Rule.NOBODY_SERVES
    assert broken(both) == []
    assert both.owner() == [("cell-eu1-a", "all")]
    # The store was never closed: it has no guard row, and gets none.
    assert not TenantMigration.objects.exists()


def _shut(world: World, side: Raw) -> None:
    side.run(f"UPDATE switchyard_guard SET agents = {0 if side.sqlite else 'false'}")


def _ended_with_its_home_closed(world: World) -> None:
    """After a whole move, the new home takes no turns and is closed."""
    world.start()
    world.run()
    assert world.move.phase == Phase.DONE
    _shut(world, world.target)
    refuse(world)
    assert broken(world) == [("acme", Rule.NOBODY_SERVES)]


def test_a_home_that_is_closed_is_opened_and_nothing_else_is(both: World) -> None:
    _ended_with_its_home_closed(both)
    told: list[str] = []
    open_it(both, told)
    assert both.owner() == [("cell-eu1-b", "all")]
    assert writable(both) == ["target"]
    assert "store-eu1-b is open to agents." in told
    # What it did is a move of its own in every log, and the next real one goes on from it.
    both.start(target_cell=both.cast.cell, target_store=both.cast.store)
    both.run()
    assert both.move.phase == Phase.DONE
    assert both.owner() == [("cell-eu1-a", "all")]


def test_opening_a_home_is_killed_at_every_call_and_run_again(files: World) -> None:
    _ended_with_its_home_closed(files)
    at = 0
    while True:
        at += 1
        with undone(files):
            files.killer.calls, files.killer.at = 0, at
            try:
                open_it(files)
            except Killed:
                assert "source" not in writable(files)
                open_it(files)
            else:
                break
            assert files.owner() == [("cell-eu1-b", "all")]
            assert writable(files) == ["target"]
    assert at > 4


def test_a_live_move_that_closes_nothing_is_left_alone_and_its_tenant_served(files: World) -> None:
    files.start(automatic=False)
    files.run(until=Phase.BACKFILL)
    refuse(files)
    assert broken(files) == [("acme", Rule.NOBODY_SERVES)]
    open_it(files)
    assert files.owner() == [("cell-eu1-a", "all")]
    assert files.move.phase == Phase.BACKFILL
    services.abort(files.move, by="ada", reason="no", now=files.clock())
    files.run()
    assert files.move.phase == Phase.ABORTED


# --- refused ----------------------------------------------------------------------------------


def refused(world: World, kind: type[Exception], match: str) -> None:
    before = [(e.cell_id, e.accepts) for e in PolicyEntry.objects.order_by("pk")]
    sides = writable(world)
    with pytest.raises(kind, match=match):
        open_it(world)
    assert [(e.cell_id, e.accepts) for e in PolicyEntry.objects.order_by("pk")] == before
    assert writable(world) == sides
    assert not AuditEntry.objects.filter(verb="tenant.break_glass").exists()


def test_a_tenant_that_is_served_is_left_alone(files: World) -> None:
    refused(files, opening.NothingBroken, "its turns are taken; it lives in cell-eu1-a")


def test_a_fence_that_has_time_is_left_alone(files: World) -> None:
    files.start()
    files.run(until=Phase.DELTA)
    refused(files, opening.NothingBroken, "which opens it by itself, by .* at the latest")
    # Nor is it late before a killed worker's lease is over.
    assert files.move.deadline_at is not None
    files.clock.now = files.move.deadline_at
    files.clock.pass_by(40)
    TenantMigration.objects.filter(pk=files.move.pk).update(due_at=files.clock())
    refused(files, opening.NothingBroken, "which opens it by itself")


def test_a_fence_whose_workers_are_gone_is_opened_before_its_deadline(files: World) -> None:
    files.start(budget_seconds=400.0)
    files.run(until=Phase.DELTA)
    files.clock.pass_by(50)
    assert files.move.deadline_at is not None
    assert files.clock() < files.move.deadline_at
    assert state(files).rule is Rule.FENCE_OVERDUE
    open_it(files)
    assert files.owner() == [("cell-eu1-a", "all")]


def test_after_a_restore_nothing_is_opened_by_the_rows_word(files: World) -> None:
    files.start()
    files.run(until=Phase.DELTA)
    files.clock.pass_by(NIGHT)
    tenants.halt(by="ada", why="restored from last night.", now=files.clock())
    # It is listed, and says why nobody opens it.
    [found] = safety.broken_now(now=files.clock())
    assert "all machines are stopped" in found.words
    refused(files, opening.MachinesHalted, "manage.py restored")


def test_machines_that_are_stopped_in_its_middle_stop_it_too(
    files: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.start()
    files.run(until=Phase.DELTA)
    lost(files)
    # A store that is away keeps it busy until somebody says that the database was restored.
    monkeypatch.delenv("STORE_EU1_A")

    def rest(seconds: float) -> None:
        files.clock.pass_by(seconds)
        tenants.halt(by="ada", why="restored.", now=files.clock())

    with pytest.raises(opening.MachinesHalted):
        opening.open_tenant(files.cast.acme, by="nora", reason="r", clock=files.clock, sleep=rest)
    claim = files.move.claim
    files.clock.pass_by(NIGHT)
    assert files.move.claim == claim


def test_a_tenant_that_a_restore_left_refused_is_no_broken_rule(files: World) -> None:
    refuse(files)
    RestoreFinding.objects.create(
        tenant=files.cast.acme,
        found_at=files.clock(),
        says="a",
        told="b",
        differs="c",
        resolved_at=files.clock(),
        outcome="Stays refused",
    )
    assert broken(files) == []
    refused(files, opening.NothingBroken, "refused since a restore")


def _guard(world: World, side: Raw, guard: Guard) -> None:
    flags = [int(flag) if side.sqlite else flag for flag in guard[2:]]
    side.run(
        "UPDATE switchyard_guard SET move = ?, claim = ?, mover = ?, agents = ?",
        *guard[:2],
        *flags,
    )


@pytest.mark.parametrize(
    ("guard", "match"),
    [
        pytest.param((9_999, 1, False, False), "never heard of", id="a move nobody knows"),
        pytest.param((0, 9_999, False, False), "never heard of", id="a later claim"),
        pytest.param((0, 1, True, False), "and writes it", id="a copy half made"),
    ],
)
def test_a_home_whose_guard_row_tells_of_another_is_not_opened(
    files: World, guard: tuple[int, int, bool, bool], match: str
) -> None:
    _ended_with_its_home_closed(files)
    _guard(files, files.target, Guard(guard[0] or files.move.pk, *guard[1:]))
    refused(files, opening.GuardUnknown, match)


def test_a_home_is_not_opened_beside_another_open_side(files: World) -> None:
    _ended_with_its_home_closed(files)
    files.source.run("UPDATE switchyard_guard SET agents = 1")
    refused(files, opening.GuardUnknown, "agents may write it at store-eu1-a")


@pytest.mark.parametrize("away", ["the home", "the other side"])
def test_a_home_is_not_opened_while_a_store_is_silent(
    files: World, away: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _ended_with_its_home_closed(files)
    name = "STORE_EU1_B" if away == "the home" else "STORE_EU1_A"
    monkeypatch.delenv(name)
    refused(files, restored.StoreSilent, "store-eu1-b must" if "home" in away else "store-eu1-a")


def test_a_move_that_began_after_the_look_keeps_its_guard_row(
    files: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    _ended_with_its_home_closed(files)
    real = restored.read_stores

    def slowly(*args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        # As a start does that looked at both stores before.
        TenantMigration.objects.create(
            tenant=files.cast.acme,
            source_cell=files.cast.other_cell,
            source_store=files.cast.other_store,
            target_cell=files.cast.cell,
            target_store=files.cast.store,
            started_at=files.clock(),
            started_by="ada",
            phase_since=files.clock(),
            due_at=files.clock(),
        )
        return found

    monkeypatch.setattr(restored, "read_stores", slowly)
    refused(files, opening.GuardUnknown, "is its to open")


def test_a_store_that_stays_away_is_named_when_the_time_is_up(
    files: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.start()
    files.run(until=Phase.DELTA)
    lost(files)
    monkeypatch.delenv("STORE_EU1_A")
    with pytest.raises(opening.StillRefused, match="STORE_EU1_A"):
        open_it(files)
    assert AuditEntry.objects.filter(verb="tenant.break_glass").count() == 1
    assert files.owner() == [("cell-eu1-a", "none")]


# --- the log ----------------------------------------------------------------------------------


def test_who_broke_the_glass_why_and_what_came_of_it_is_kept(files: World) -> None:
    files.start()
    files.run(until=Phase.DELTA)
    lost(files)
    open_it(files)
    begun, ended = AuditEntry.objects.filter(verb__startswith="tenant.break_glass").order_by("pk")
    assert (begun.verb, ended.verb) == ("tenant.break_glass_begun", "tenant.break_glass")
    assert {begun.who, ended.who} == {"nora"}
    assert ended.reason == "Break-glass: 3 a.m., all workers are gone"
    assert ended.before is not None
    assert ended.after is not None
    assert ended.before["rule"] == "fence_overdue"
    assert "nobody takes it" in ended.before["state"]
    assert ended.after["rule"] is None
    notes = [event.note for event in files.move.events.filter(who="nora")]
    assert sum("Break-glass" in note for note in notes) == 3


def test_it_needs_no_worker_and_no_broker(files: World, monkeypatch: pytest.MonkeyPatch) -> None:
    files.start()
    files.run(until=Phase.DELTA)
    lost(files)

    def no_broker(*args: object, **kwargs: object) -> None:
        raise AssertionError("it asked a broker")

    monkeypatch.setattr("celery.app.task.Task.apply_async", no_broker)
    open_it(files)
    assert files.owner() == [("cell-eu1-a", "all")]


# --- the command ------------------------------------------------------------------------------


def command(*words: str) -> str:
    said = io.StringIO()
    call_command("open_tenant", *words, stdout=said)
    return said.getvalue()


def test_the_command_tells_who_is_refused_and_opens_it_line_by_line(files: World) -> None:
    assert command() == "No tenant breaks a rule of safety.\n"
    files.start()
    files.run(until=Phase.VERIFY)
    # The command goes by the database's clock, which is months ahead of this world's.
    assert "acme: refused since" in command()
    told = command("acme", "--by", "nora", "--reason", "3 a.m.", "--yes", "acme")
    assert "REOPEN: acme is open on store-eu1-a" in told
    assert told.endswith("acme: its turns are taken; it lives in cell-eu1-a.\n")
    assert files.owner() == [("cell-eu1-a", "all")]
    assert files.move.abort_requested_by == "nora (command)"


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["acme", "--reason", "r", "--yes", "acme"], "Say who you are"),
        (["acme", "--by", "nora", "--yes", "acme"], "Say why"),
        (["acme", "--by", "nora", "--reason", "r", "--yes", "bolt"], "That is not acme"),
        (["bolt", "--by", "nora", "--reason", "r", "--yes", "bolt"], "No rule is broken of bolt"),
        (["nobody", "--by", "nora", "--reason", "r", "--yes", "nobody"], "no tenant nobody"),
    ],
    ids=["who", "why", "another", "served", "unknown"],
)
def test_the_command_refuses(files: World, words: list[str], match: str) -> None:
    files.start()
    files.run(until=Phase.VERIFY)
    with pytest.raises(CommandError, match=match):
        command(*words)
    assert files.owner() == [("cell-eu1-a", "none")]


def test_the_command_asks_for_the_name_and_says_what_it_will_do(
    files: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.start()
    files.run(until=Phase.VERIFY)
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda prompt: asked.append(prompt) or "acme")
    told = command("acme", "--by", "nora", "--reason", "r")
    assert asked == ["Type acme to go on: "]
    assert "which leads to REOPEN" in told
    assert files.owner() == [("cell-eu1-a", "all")]


def test_a_step_of_the_command_that_hangs_is_ended_with_its_process() -> None:
    hangs = (
        "import django, time; django.setup();"
        "from platform_admin.management.commands.open_tenant import ended_after\n"
        "with ended_after(0.2)(): pass\n"
        "time.sleep(0.4); print('alive', flush=True)\n"
        "with ended_after(0.2)(): time.sleep(60)"
    )
    done = subprocess.run(
        [sys.executable, "-c", hangs],
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "platform_admin.settings"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "alive\n")
