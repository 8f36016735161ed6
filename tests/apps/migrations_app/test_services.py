"""What people ask of a move is done, logged and audited, or refused, which changes nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connections

from durable import driver
from durable.errors import Refused
from migrations_app import ports, services
from migrations_app.domain.phases import Phase
from migrations_app.models import TenantMigration
from tenants import services as tenants
from tenants.models import AuditEntry, Cell, PolicyEntry, RuntimeInstance
from tests import make, scene
from tests.stores import EMPTY, Raw
from tests.world import APP, World


def guard(world: World, side: str) -> Any:
    with ports.open_store("adk-sql", f"env:STORE_EU1_{side}", app_name=APP) as port:
        return port.guard()


def refused(world: World, kind: type[Refused], *words: str, **options: Any) -> None:
    """Start a move that must be refused in these words, and change nothing anywhere."""
    before = world.source.content(APP)
    audited = AuditEntry.objects.count()
    with pytest.raises(kind) as caught:
        world.start(**options)
    for word in words:
        assert word in str(caught.value)
    assert not TenantMigration.objects.exists()
    assert AuditEntry.objects.count() == audited
    assert world.source.content(APP) == before
    assert guard(world, "A") is None


# --- starting -----------------------------------------------------------------------------


def test_a_start_is_logged_and_audited_with_its_reason(files: World) -> None:
    move = files.start()
    assert [event.note for event in move.events.all()] == ["Started: more room"]
    entry = AuditEntry.objects.get(verb="move.start")
    assert (entry.who, entry.subject, entry.reason) == ("ada", str(move), "more room")
    assert entry.after is not None
    assert entry.after["to"] == "cell-eu1-b store-eu1-b"


def test_a_store_that_cant_be_reached_is_refused(
    both: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "hunter2-very-secret"
    monkeypatch.setenv("STORE_EU1_B", f"postgresql://mover:{secret}@127.0.0.1:1/sessions")
    refused(both, services.NotReadyToMove, "Target store-eu1-b", "Nothing was changed")
    with pytest.raises(services.NotReadyToMove) as caught:
        both.start()
    assert secret not in str(caught.value)
    assert "mover" not in str(caught.value)


def test_a_reference_that_leads_nowhere_is_refused(
    files: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STORE_EU1_B")
    refused(files, services.NotReadyToMove, "Target store-eu1-b", "STORE_EU1_B")


def test_a_column_that_another_kind_of_store_cannot_have_is_refused(
    files: World, monkeypatch: pytest.MonkeyPatch, new_database: Callable[[], str]
) -> None:
    monkeypatch.setenv("STORE_EU1_B", new_database())
    files.source.run("alter table events add column extra text")
    refused(files, services.NotReadyToMove, "Kinds", "events.extra", "does not know")


def test_a_target_that_already_holds_the_app_is_refused(both: World) -> None:
    both.target.make_tables("env:STORE_EU1_B", APP)
    both.target.seed(APP, sessions=2, users=1)
    refused(both, services.NotReadyToMove, "holds support.acme already", "2 sessions")


def test_the_same_store_under_two_addresses_is_refused(
    both: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORE_EU1_B", both.source.url)
    refused(both, services.NotReadyToMove, "second address")


def test_the_same_empty_store_under_two_addresses_is_found_by_its_nonce(
    both: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no session there is nothing to see from outside: PREPARE writes a word and looks."""
    for table in ("events", "sessions", "user_states", "app_states"):
        both.source.run(f"delete from {table} where app_name = ?", APP)
    monkeypatch.setenv("STORE_EU1_B", both.source.url)
    both.start()
    for _ in range(3):
        both.step()
    assert both.move.phase == Phase.PREPARE
    assert "same database under two addresses" in both.move.waiting_for
    assert guard(both, "A") is None
    services.abort(both.move, by="ada", reason="one place", now=both.clock())
    both.run()
    assert both.owner() == [("cell-eu1-a", "all")]


def test_a_target_that_can_not_hold_rows_is_refused_and_says_why(servers: World) -> None:
    """Chunks are read by it: without it each would read the whole store."""
    servers.target.make_tables("env:STORE_EU1_B", APP)
    servers.target.run("drop index idx_events_app_user_session_ts_id")
    refused(servers, services.NotReadyToMove, "Target's rows and rights")


def test_what_an_agent_writes_at_the_target_after_the_survey_is_never_deleted(
    both: World,
) -> None:
    both.target.make_tables("env:STORE_EU1_B", APP)
    both.start()

    def write() -> None:
        both.target.seed(APP, sessions=1, users=1)

    both.killer.before["adopt"] = write
    for _ in range(4):
        both.step()
    assert both.move.phase == Phase.PREPARE
    assert "holds support.acme" in both.move.waiting_for
    assert both.target.count(APP) == 1
    assert both.agents_may_write(both.target)
    services.abort(both.move, by="ada", reason="somebody is there", now=both.clock())
    both.run()
    assert both.target.count(APP) == 1


def test_a_tenant_that_is_moving_is_refused(files: World) -> None:
    move = files.start()
    with pytest.raises(services.AlreadyMigrating, match=str(move)):
        files.start()


def test_a_move_to_the_cell_and_store_it_lives_in_is_refused(files: World) -> None:
    here = {"target_cell": files.cast.cell, "target_store": files.cast.store}
    refused(files, services.SamePlace, "lives in cell-eu1-a, on store-eu1-a, already", **here)


def test_a_cell_whose_quota_is_only_assumed_takes_nobody(files: World) -> None:
    Cell.objects.filter(pk=files.cast.other_cell.pk).update(quota_verified_at=None)
    files.cast.other_cell.refresh_from_db()
    refused(files, services.NotReadyToMove, "only assumed", "verified")


def test_an_instance_that_could_not_open_the_target_store_is_named(files: World) -> None:
    scene.instances(files.cast.other_cell, ["eu1-b-4"], now=files.clock(), stores=["another"])
    refused(files, services.NotReadyToMove, "eu1-b-4", "store-eu1-b")


def test_an_instance_without_the_plugins_of_the_source_is_named(files: World) -> None:
    here, there = scene.instances(
        files.cast.cell, ["eu1-a-1"], now=files.clock(), stores=["store-eu1-a"]
    ) + scene.instances(files.cast.other_cell, ["eu1-b-4"], now=files.clock())
    RuntimeInstance.objects.filter(pk=here.pk).update(plugins=["tenant-policy", "redact"])
    RuntimeInstance.objects.filter(pk=there.pk).update(stores=["store-eu1-b"])
    refused(files, services.NotReadyToMove, "eu1-b-4", "plugins")


def test_a_target_that_assigns_its_own_ids_is_refused(files: World) -> None:
    files.target.make_tables("env:STORE_EU1_B", APP)
    files.target.run(
        "create trigger assigns after insert on sessions begin"
        " update sessions set id = 'assigned-' || new.id where rowid = new.rowid; end"
    )
    files.start()
    for _ in range(3):
        files.step()
    assert files.move.phase == Phase.PREPARE
    assert "assigns its own session ids" in files.move.waiting_for


def test_an_id_that_no_store_can_hold_blocks_and_is_named(files: World) -> None:
    with files.source.connection() as connection:
        files.source.add_session(connection, APP, "u-1", "x" * 129, 1)
    refused(files, services.NotReadyToMove, "sessions.id")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget_seconds": 0.0}, "1 to 3,600"),
        ({"budget_seconds": float("nan")}, "1 to 3,600"),
        ({"budget_seconds": 30.0, "drain_bound_seconds": 31.0}, "up to the fence budget"),
        ({"soak_seconds": -1.0}, "90 days"),
        ({"pace_per_second": 0.0}, "0.01"),
        ({"pace_per_second": float("inf")}, "0.01"),
    ],
)
def test_a_number_that_makes_no_sense_is_refused(
    files: World, options: dict[str, float], words: str
) -> None:
    refused(files, services.InvalidOption, words, **options)


@pytest.mark.parametrize("reason", ["", "  ", "a\0b", "x" * 2_001])
def test_a_start_without_a_sentence_is_refused(files: World, reason: str) -> None:
    with pytest.raises(Refused):
        files.start(reason=reason)
    assert not TenantMigration.objects.exists()


@pytest.mark.django_db(transaction=True, serialized_rollback=True)
def test_of_two_clicks_at_the_same_instant_one_starts_a_move(
    monkeypatch: pytest.MonkeyPatch, new_database: Callable[[], str]
) -> None:
    cast = make.cast(now=datetime.now(UTC))
    for name in ("STORE_EU1_A", "STORE_EU1_B"):
        monkeypatch.setenv(name, new_database())
    source = Raw(new_database())
    monkeypatch.setenv("STORE_EU1_A", source.url)
    source.make_tables("env:STORE_EU1_A", APP)
    source.seed(APP, sessions=1, users=1)
    gate, answers = threading.Barrier(2), []

    def click() -> None:
        gate.wait()
        try:
            answers.append(
                services.start(
                    cast.acme,
                    target_cell=cast.other_cell,
                    target_store=cast.other_store,
                    by="ada",
                    reason="twice",
                    now=datetime.now(UTC),
                )
            )
        except Refused as refusal:
            answers.append(refusal.code)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=click) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert TenantMigration.objects.count() == 1
    assert "already_migrating" in answers


# --- verbs --------------------------------------------------------------------------------


def test_a_request_is_logged_and_audited_with_what_it_changed(files: World) -> None:
    move = files.start()
    services.pause(move, by="bob", reason="lunch", now=files.clock())
    entry = AuditEntry.objects.get(verb="move.pause")
    assert (entry.who, entry.reason) == ("bob", "lunch")
    assert entry.before is not None
    assert entry.after is not None
    assert entry.before["pause_requested_by"] == ""
    assert entry.after["pause_requested_by"] == "bob"
    assert move.events.first().note == "Pause: lunch"


def test_a_request_is_answered_at_once_although_the_move_rests(files: World) -> None:
    files.start(pace_per_second=0.01)
    files.run(until=Phase.BACKFILL)
    while files.move.stage != "copy" or not files.move.done:
        files.step()
    assert files.move.due_at is not None
    assert (files.move.due_at - files.clock()).total_seconds() > 50
    services.abort(files.move, by="ada", reason="too slow", now=files.clock())
    assert files.move.due_at == files.clock()


def test_a_stale_page_changes_nothing(files: World) -> None:
    files.start()
    files.run(until=Phase.BACKFILL)
    with pytest.raises(services.StalePage, match=r"PREPARE.*BACKFILL"):
        services.abort(
            files.move, by="ada", reason="old page", now=files.clock(), seen=Phase.PREPARE
        )
    assert files.move.abort_requested_at is None


def verb(name: str, **details: Any) -> Callable[[World], None]:
    def ask(world: World) -> None:
        getattr(services, name)(
            world.move, by="ada", reason="because", now=world.clock(), **details
        )

    return ask


@pytest.mark.parametrize(
    ("phase", "name", "details"),
    [
        (Phase.PREPARE, "resume", {}),
        (Phase.PREPARE, "close_fence", {}),
        (Phase.BACKFILL, "close_fence", {}),
        (Phase.PREPARE, "hold_fence", {"seconds": 30}),
        (Phase.BACKFILL, "recopy", {"mismatch_ids": [1, 2]}),
        (Phase.SOAK, "recopy", {"mismatch_ids": [1]}),
        (Phase.SOAK, "abort", {}),
        (Phase.BACKFILL, "confirm_offboard", {"typed": "acme"}),
        (Phase.SOAK, "confirm_offboard", {"typed": "bolt"}),
        (Phase.BACKFILL, "leave_behind", {}),
        (Phase.TARGET, "pause", {}),
    ],
    ids=str,
)
def test_what_the_phase_does_not_allow_is_refused(
    files: World, phase: Phase, name: str, details: dict[str, Any]
) -> None:
    files.start()
    files.run(until=phase)
    version = files.move.version
    with pytest.raises(Refused):
        verb(name, **details)(files)
    assert files.move.version == version


@pytest.mark.parametrize("name", ["pause", "abort", "close_fence"])
def test_a_second_click_is_told_that_it_was_asked_for_already(files: World, name: str) -> None:
    files.start(automatic=False)
    files.run(until=Phase.BACKFILL)
    while files.move.stage != "ready":
        files.step()
    verb(name)(files)
    with pytest.raises(services.NotNow, match="ada"):
        verb(name)(files)


def test_the_deadline_moves_once(files: World) -> None:
    files.start()
    files.run(until=Phase.VERIFY)
    before = files.move.deadline_at
    assert before is not None
    verb("hold_fence", seconds=30)(files)
    assert (files.move.deadline_at - before).total_seconds() == 30
    with pytest.raises(services.NotNow, match="once"):
        verb("hold_fence", seconds=30)(files)


def test_a_fence_that_was_asked_for_can_be_taken_back(files: World) -> None:
    files.start(automatic=False)
    files.run(until=Phase.BACKFILL)
    while files.move.stage != "ready":
        files.step()
    verb("close_fence")(files)
    verb("cancel_fence")(files)
    for _ in range(10):
        files.step()
    assert files.move.phase == Phase.BACKFILL
    assert files.move.waiting_for == "somebody to start the drain"
    with pytest.raises(services.NotNow):
        verb("cancel_fence")(files)


def test_leftovers_are_not_left_while_it_is_the_source_that_is_away(
    files: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.start()
    files.run(until=Phase.VERIFY)
    verb("abort")(files)
    monkeypatch.delenv("STORE_EU1_A")
    for _ in range(3):
        files.step()
    with pytest.raises(services.NotNow, match="cleaning"):
        verb("leave_behind")(files)


# --- what a move waits for ------------------------------------------------------------------


def _listening(world: World) -> RuntimeInstance:
    """Put an instance into the target's cell that has heard of everything."""
    [row] = scene.instances(
        world.cast.other_cell, ["eu1-b-1"], now=world.clock(), stores=["store-eu1-b"]
    )
    scene.said(row, at=world.clock(), version=1_000)
    return row


def test_preparation_waits_until_each_instance_of_the_target_knows_the_tenant(
    files: World,
) -> None:
    """It then has the tenant's scope, its store and its runner before the first turn arrives."""
    [row] = scene.instances(
        files.cast.other_cell, ["eu1-b-1"], now=files.clock(), stores=["store-eu1-b"]
    )
    files.start()
    for _ in range(5):
        files.step()
    assert files.move.phase == Phase.PREPARE
    assert files.move.waiting_for == "instances to learn of acme: eu1-b-1"
    entry = PolicyEntry.objects.get(cell=files.cast.other_cell, tenant=files.cast.acme)
    assert (entry.accepts, entry.version) == ("none", files.move.announced_version)
    assert entry.document["scope"]["version"] == 1
    scene.said(row, at=files.clock(), version=entry.version)
    files.run(until=Phase.BACKFILL)


def test_a_fence_does_not_begin_while_an_instance_is_silent(files: World) -> None:
    [silent] = scene.instances(
        files.cast.cell, ["eu1-a-1"], now=files.clock(), stores=["store-eu1-a"]
    )
    _listening(files)
    files.start()
    files.run(until=Phase.BACKFILL)
    for _ in range(30):
        files.step()
    assert files.move.phase == Phase.BACKFILL
    assert "eu1-a-1" in files.move.waiting_for
    silence_is_over = files.clock() + timedelta(minutes=1)
    tenants.declare_dead(silent, by="ada", reason="its host burnt", now=silence_is_over)
    files.run(until=Phase.DRAIN)


def test_a_fence_does_not_begin_while_a_writer_older_than_the_guard_lives(
    servers: World,
) -> None:
    """It began before the guard row was there, so closing would not see it."""
    with servers.source.connection() as writer:
        servers.source.run_in(writer, "select 1 from events")
        servers.start()
        servers.run(until=Phase.BACKFILL)
        for _ in range(30):
            servers.step()
        assert servers.move.phase == Phase.BACKFILL
        assert f"pid {writer.info.backend_pid}" in servers.move.waiting_for
    servers.run(until=Phase.DRAIN)


def test_an_instance_that_never_acknowledges_aborts_the_move_by_itself(
    files: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("migrations_app.steps.fence.POLL_FOR_SECONDS", 0.0)
    monkeypatch.setattr(
        "migrations_app.steps.common.tenants_queries.fence_waits_for", lambda *args, **kwargs: []
    )
    scene.instances(files.cast.cell, ["eu1-a-1"], now=files.clock(), stores=["store-eu1-a"])
    _listening(files)
    before = files.source.content(APP)
    files.start()
    files.run(until=Phase.DRAIN)
    files.step()
    files.clock.pass_by(61)
    files.run()
    assert files.move.phase == Phase.ABORTED
    assert any("eu1-a-1" in event.note for event in files.move.events.all())
    assert files.source.content(APP) == before
    assert files.owner() == [("cell-eu1-a", "all")]


def test_a_turn_that_outlasts_the_drain_bound_aborts_the_move(
    files: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("migrations_app.steps.fence.POLL_FOR_SECONDS", 0.0)
    monkeypatch.setattr(
        "migrations_app.steps.common.tenants_queries.fence_waits_for", lambda *args, **kwargs: []
    )
    [row] = scene.instances(files.cast.cell, ["eu1-a-1"], now=files.clock(), stores=["store-eu1-a"])
    _listening(files)
    files.start()
    files.run(until=Phase.DRAIN)
    files.step()
    assert files.move.fence_version is not None
    scene.said(row, at=files.clock(), version=files.move.fence_version, in_flight={"acme": 1})
    files.step()
    assert files.move.phase == Phase.DRAIN
    files.clock.pass_by(61)
    files.run()
    assert files.move.phase == Phase.ABORTED
    assert any("1 turn in flight" in event.note for event in files.move.events.all())
    assert files.agents_may_write(files.source)


def test_the_source_stays_closed_and_whole_through_the_soak(both: World) -> None:
    before = both.source.content(APP)
    both.start()
    both.run(until=Phase.SOAK)
    both.clock.pass_by(30)
    both.step()
    assert both.move.phase == Phase.SOAK
    assert both.source.content(APP) == before
    assert not both.agents_may_write(both.source)
    assert both.agents_may_write(both.target)


def test_a_chunk_that_is_too_much_for_a_store_is_halved_until_it_fits(
    files: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Huge sessions run into the database's time limit; at the same size they would for ever."""
    real = ports.copy

    def heavy(source: Any, target: Any, keys: Any) -> Any:
        if len(keys) > 3:
            raise ports.base.StoreBusy("The store took too long.")
        return real(source, target, keys)

    monkeypatch.setattr(ports, "copy", heavy)
    files.start()
    assert files.run().phase == Phase.DONE


def test_a_pace_holds_the_copy_back(files: World) -> None:
    files.start(pace_per_second=4.0)
    files.run(until=Phase.BACKFILL)
    while files.move.stage != "copy":
        files.step()
    began, driven = time.monotonic(), files.clock.now
    while files.move.stage == "copy":
        files.step()
    # Three times 4 sessions at 4 a second, a rest between them: what the work left of it.
    rested = (files.clock.now - driven).total_seconds()
    assert rested <= 2.0 <= rested + time.monotonic() - began


def test_a_fence_that_is_scheduled_waits_for_its_time(files: World) -> None:
    at = files.clock.now + timedelta(seconds=40)
    files.start(fence_not_before=at)
    files.run(until=Phase.DRAIN)
    assert files.clock.now >= at


def test_the_source_keeps_what_changed_behind_the_movers_back(servers: World) -> None:
    """OFFBOARD deletes only what is still what was recorded, and counts what it left."""
    servers.start()
    servers.run(until=Phase.SOAK)
    with servers.source.connection() as connection:
        servers.source.run_in(connection, "select set_config('switchyard.mover', 'x', true)")
        servers.source.add_event(connection, APP, "u-1", "s-1", "late", 9_000)
    servers.run()
    assert servers.move.phase == Phase.DONE
    assert servers.move.left_behind == 1
    assert servers.source.count(APP) == 1
    assert [s.session_id for s in servers.move.stamps.all()] == ["s-1"]


def test_an_abort_whose_target_is_gone_ends_when_a_person_says_so(
    files: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.start()
    files.run(until=Phase.VERIFY)
    services.abort(files.move, by="ada", reason="no", now=files.clock())
    monkeypatch.delenv("STORE_EU1_B")
    for _ in range(6):
        files.step()
    assert files.move.phase == Phase.REOPEN
    assert files.owner() == [("cell-eu1-a", "all")]
    verb("leave_behind")(files)
    assert files.run().phase == Phase.ABORTED


def test_a_tenant_can_move_there_and_back_again(both: World) -> None:
    before = both.source.content(APP)
    both.start()
    both.run()
    cast = both.cast
    cast.acme.refresh_from_db()
    back = services.start(
        cast.acme,
        target_cell=cast.cell,
        target_store=cast.store,
        by="ada",
        reason="and back",
        now=both.clock(),
        automatic=True,
        offboard_automatically=True,
        soak_seconds=0,
    )
    for _ in range(300):
        back.refresh_from_db()
        if back.due_at is None:
            break
        both.clock.now = max(both.clock.now, back.due_at)
        driver.advance(both.machine, back.pk, clock=both.clock)
    assert back.phase == Phase.DONE
    assert both.source.content(APP) == before
    assert both.target.content(APP) == EMPTY
    assert both.agents_may_write(both.source)


def test_what_a_survey_found_is_kept_with_each_store(both: World) -> None:
    both.start()
    both.run(until=Phase.BACKFILL)
    for store in (both.cast.store, both.cast.other_store):
        store.refresh_from_db()
        assert store.surveyed_at is not None
        assert store.survey is not None
    assert both.cast.store.survey["sessions"] == 12
    assert both.cast.other_store.survey["sessions"] == 0
