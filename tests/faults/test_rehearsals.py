"""A whole move is practised there and back: nobody notices, and nothing ever comes of a kill."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from durable import driver
from migrations_app import rehearsing, services
from migrations_app.domain.phases import Mode, Phase, pausable_before
from migrations_app.models import Rehearsal, TenantMigration
from migrations_app.preflight import PRACTISED, preflight
from migrations_app.services import InvalidOption, NotInternal, NotNow
from tenants import services as tenants
from tests.faults.test_split import assert_back, live, sessions, until_both_serve
from tests.stores import EMPTY
from tests.world import APP, Killed, World, each_call, each_moment, undone

pytestmark = [
    pytest.mark.django_db(transaction=True, serialized_rollback=True),
    pytest.mark.timeout(600),
]


def practise(world: World, **options: Any) -> TenantMigration:
    """Begin to rehearse a whole move of a tenant that is ours."""
    cast = world.cast
    tenants.set_internal(cast.acme, internal=True, by="ada", reason="ours", now=world.clock())
    cast.acme.refresh_from_db()
    given = {"target_cell": cast.other_cell, "target_store": cast.other_store, "idle_seconds": 0.0}
    return services.rehearse_move(
        cast.acme, by="ada", reason="before the real one", now=world.clock(), **given | options
    )


def answer(world: World, number: int) -> None:
    """Serve one turn of an open session, wherever the tenant is served just now."""
    for side in (world.target, world.source):
        # On the target of a split known sessions are not served.
        here = side is world.source or world.move.placement_version is not None
        if here and world.move.phase not in FENCED and world.agents_may_write(side):
            side.turn(APP, "u-2", "s-2", f"turn-{number}", seconds=9_000 + number)
            return


# Of the cell alone nothing is copied, so there is nothing to rehearse.
COPYING = [Mode.FENCE, Mode.SPLIT]
FENCED = {Phase.DRAIN, Phase.DELTA, Phase.VERIFY, Phase.TARGET} | {
    Phase.REVERSE_DRAIN,
    Phase.REVERSE_DELTA,
    Phase.REVERSE_VERIFY,
    Phase.REVERSE_TARGET,
}


@pytest.mark.parametrize("mode", COPYING)
def test_a_whole_move_is_practised_there_and_back_with_open_sessions(
    both: World, mode: Mode
) -> None:
    before = sessions(both.source)
    practise(both, mode=mode)
    seen, turns = [], 0
    while both.move.due_at is not None and len(seen) < 300:
        seen.append(both.move.phase)
        both.step()
        # Two turns of everybody's at most: a pass that never ends is not what this is about.
        if both.move.phase != seen[-1] and both.move.phase not in FENCED and turns < 6:
            answer(both, turns)
            turns += 1
    move = both.move
    assert move.phase == Phase.ROLLED_BACK
    assert {Phase.TARGET, Phase.SOAK, Phase.REVERSE_TARGET} < set(seen)
    assert (Phase.SPLIT in seen) == (mode == Mode.SPLIT)
    assert Phase.OFFBOARD not in seen
    # What it was served meanwhile, on either side, is at home.
    assert turns >= 3
    told = {"u-2/s-2": before["u-2/s-2"] + [f"turn-{number}" for number in range(turns)]}
    assert_back(both, before | told, mode)
    row = Rehearsal.objects.get()
    assert (row.move, row.tenant, row.by) == (move, both.cast.acme, "ada")
    assert (row.source_store, row.target_store) == (both.cast.store, both.cast.other_store)
    assert (row.sessions, row.equal) == (12, True)
    assert row.detail == f"The whole move, there and back, by {mode}"
    assert row.copy_rate == move.copy_rate
    assert row.fence_seconds is not None
    assert row.back_seconds is not None
    [there] = [fence for fence in move.past_fences if not fence["back"]]
    closed, opened = (
        datetime.fromisoformat(there[name]) for name in ("fence_closed_at", "fence_opened_at")
    )
    assert row.fence_seconds == (opened - closed).total_seconds()
    assert move.soak_until == opened + timedelta(seconds=services.REHEARSED_SOAK_SECONDS)
    # It looked once at what the tenant wrote there, before it went back.
    assert move.touched_at is not None


def test_what_was_practised_is_known_the_next_time(files: World) -> None:
    cast = files.cast
    with files.source.connection() as connection:
        for number in range(30, 60):
            files.source.add_session(connection, APP, "u-1", f"s-{number}", 1)
    practise(files)
    move = files.run()
    found = preflight(
        cast.acme,
        source_cell=cast.cell,
        source_store=cast.store,
        target_cell=cast.other_cell,
        target_store=cast.other_store,
        now=files.clock(),
    )
    [check] = [check for check in found.checks if check.name == PRACTISED]
    assert check.ok
    assert check.detail.startswith(f"{move} of acme")
    known = rehearsing.known(cast.acme, cast.store, cast.other_store, now=files.clock())
    assert known is not None
    assert known.words.endswith(f"by ada, there and back as {move}")
    assert known.copy_rate == move.copy_rate is not None
    # And the next one clears what it left, and goes the same way.
    practise(files)
    files.run()
    assert Rehearsal.objects.count() == 2


def test_a_tenant_with_customers_is_not_practised_on(files: World) -> None:
    cast = files.cast
    places: dict[str, Any] = {"target_cell": cast.other_cell, "target_store": cast.other_store}
    now = files.clock()
    with pytest.raises(NotInternal, match="Rehearse a copy of acme instead"):
        services.rehearse_move(cast.acme, **places, by="ada", reason="practice", now=now)
    # Given to a customer while both stores were looked at.
    tenants.set_internal(cast.acme, internal=True, by="ada", reason="ours", now=now)
    cast.acme.refresh_from_db()
    tenants.set_internal(cast.acme, internal=False, by="ada", reason="sold", now=now)
    with pytest.raises(NotInternal):
        services.rehearse_move(cast.acme, **places, by="ada", reason="practice", now=now)
    assert not TenantMigration.objects.exists()
    with pytest.raises(InvalidOption, match="does not choose offboard_automatically, soak_seconds"):
        practise(files, soak_seconds=1.0, offboard_automatically=True)
    with pytest.raises(tenants.ReasonMissing):
        tenants.set_internal(cast.acme, internal=True, by="ada", reason=" ", now=now)


def test_it_is_never_offboarded(files: World) -> None:
    practise(files)
    files.run(until=Phase.SOAK)
    with pytest.raises(NotNow, match="is a rehearsal: it goes back"):
        services.confirm_offboard(
            files.move, typed="acme", by="ada", reason="away", now=files.clock()
        )
    # However the columns came to say so.
    said = {"offboard_automatically": True, "offboard_confirmed_at": files.clock()}
    TenantMigration.objects.update(**said)
    with undone(files):
        TenantMigration.objects.update(phase=Phase.OFFBOARD, stage="")
        for _ in range(5):
            files.step()
        assert "nothing is deleted at its source" in files.move.failure
        assert files.source.count(APP) == 12
    assert files.run().phase == Phase.ROLLED_BACK
    assert files.source.count(APP) == 12


def test_one_whose_source_is_lost_ends_on_the_target_and_deletes_nothing(files: World) -> None:
    practise(files)
    files.run(until=Phase.REVERSE_DELTA)
    services.abort(files.move, by="ada", reason="it is broken", now=files.clock())
    path = Path(files.source.url.removeprefix("sqlite:///"))
    away = path.rename(path.with_suffix(".away"))
    for _ in range(4):
        files.step()
    services.leave_behind(files.move, by="ada", reason="disk lost", now=files.clock())
    assert files.step().phase == Phase.OFFBOARD
    # It comes back, after all.
    path.unlink(missing_ok=True)
    away.rename(path)
    assert files.run().phase == Phase.DONE
    assert files.source.count(APP) == files.target.count(APP) == 12
    assert files.owner() == [("cell-eu1-b", "all")]
    assert files.move.events.filter(note__contains="acme was not taken back").exists()
    assert not Rehearsal.objects.exists()


def test_it_can_be_aborted_at_every_moment(files: World) -> None:
    before = files.source.content(APP)
    practise(files)
    for phase in each_moment(files):
        with undone(files):
            try:
                services.abort(files.move, by="ada", reason="enough", now=files.clock())
            except NotNow:
                assert phase in (Phase.TARGET, Phase.SOAK, Phase.REVERSE_TARGET)
                continue
            files.run(until=Phase.SOAK if phase.startswith("reverse") else None)
            if phase.startswith("reverse"):
                # Who stopped it is not overruled.
                for _ in range(20):
                    files.step()
                assert files.move.phase == Phase.SOAK
                assert files.move.waiting_for == "somebody to roll back: the way back was stopped"
                services.rollback(files.move, by="ada", reason="now", now=files.clock())
                assert files.run().phase == Phase.ROLLED_BACK
                assert Rehearsal.objects.count() == 1
            else:
                assert files.move.phase == Phase.ABORTED, phase
                assert not Rehearsal.objects.exists()
                assert files.target.content(APP) == EMPTY
            assert files.source.content(APP) == before, phase


def test_an_aborted_split_has_practised_nothing(files: World) -> None:
    practise(files, mode=Mode.SPLIT, idle_seconds=3_600.0)
    until_both_serve(files)
    content = live(files)
    services.abort(files.move, by="ada", reason="enough", now=files.clock())
    files.run()
    assert_back(files, content, "aborted")
    assert not Rehearsal.objects.exists()


@pytest.mark.parametrize("mode", COPYING)
def test_its_figures_are_kept_once_whichever_call_kills_a_worker(files: World, mode: Mode) -> None:
    before = files.source.content(APP)
    practise(files, mode=mode)
    files.run(until=Phase.REVERSE_VERIFY)
    for why in each_call(files):
        files.run()
        assert files.move.phase == Phase.ROLLED_BACK, why
        assert Rehearsal.objects.get().move == files.move, why
        assert files.source.content(APP) == before, why
    assert Rehearsal.objects.count() == 1


def test_a_worker_that_dies_behind_the_figures_does_not_keep_them_twice(
    files: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    practise(files)
    files.run(until=Phase.REVERSE_TARGET)
    with monkeypatch.context() as patch:

        def die(*args: Any, **kwargs: Any) -> None:
            raise Killed

        patch.setattr(driver, "_settle", die)
        files.step()
    assert files.move.phase == Phase.REVERSE_TARGET
    assert Rehearsal.objects.count() == 1
    assert files.run().phase == Phase.ROLLED_BACK
    assert Rehearsal.objects.get().move == files.move


# --- a pause before a phase --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "named"), [(mode, phase) for mode in Mode for phase in pausable_before(mode)]
)
def test_each_pause_holds_the_phase_before_until_somebody_resumes(
    files: World, mode: Mode, named: Phase
) -> None:
    stays = {"target_store": files.cast.store} if mode == Mode.CELL else {}
    files.start(mode=mode, idle_seconds=0.0, pause_before=named, **stays)
    for _ in range(200):
        files.step()
        if files.move.pause_requested_at is not None:
            break
    move = files.move
    assert (move.pause_before, move.pause_requested_by) == ("", "ada")
    assert move.pause_reason == f"before {named.upper()}, as asked at the start"
    assert named != move.phase
    for _ in range(5):
        files.step()
    assert files.move.phase == move.phase
    assert not files.move.events.filter(now=named).exists()
    services.resume(files.move, by="bo", now=files.clock())
    assert files.run().phase == Phase.DONE
    assert files.move.events.filter(now=named).exists()
    lives = files.source if mode == Mode.CELL else files.target
    assert lives.count(APP) == 12


def test_inside_the_fence_the_deadline_holds_while_it_is_paused(both: World) -> None:
    before = both.source.content(APP)
    both.start(pause_before="target", budget_seconds=30.0, drain_bound_seconds=5.0)
    move = both.run()
    assert move.phase == Phase.ABORTED
    assert move.fence_closed_at is not None
    assert move.fence_opened_at is not None
    closed = (move.fence_opened_at - move.fence_closed_at).total_seconds()
    assert 30.0 <= closed < 33.0
    assert both.source.content(APP) == before
    assert both.owner() == [("cell-eu1-a", "all")]


def test_a_pause_that_nobody_could_make_is_refused(files: World) -> None:
    for named in ("soak", "prepare", "reopen", "reverse_drain", "split", "magic"):
        with pytest.raises(InvalidOption, match="choose one of BACKFILL, DRAIN, DELTA, VERIFY"):
            files.start(pause_before=named)
    assert not TenantMigration.objects.exists()


def test_a_killed_worker_pauses_all_the_same(files: World) -> None:
    files.start(pause_before="target")
    files.run(until=Phase.VERIFY)
    for why in each_call(files):
        if files.move.phase != Phase.VERIFY:
            break
        for _ in range(5):
            files.step()
        assert (files.move.phase, files.move.pause_before) == (Phase.VERIFY, ""), why
