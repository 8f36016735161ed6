"""What people ask of the way back and of mismatches is done, or refused, which changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from durable.errors import Refused
from migrations_app import queries, services
from migrations_app.domain.mismatch import Looks
from migrations_app.domain.phases import Phase
from migrations_app.models import Mismatch, TenantMigration
from tenants.models import AuditEntry, DirtyLine, RuntimeInstance
from tests import scene
from tests.faults.test_way_back import assert_home, assert_stays, look, moved, roll_back
from tests.world import APP, World


def refused(
    world: World, words: str, ask: Callable[[], Any], kind: type[Refused] = services.NotNow
) -> None:
    before = world.move.version, AuditEntry.objects.count()
    with pytest.raises(kind, match=words):
        ask()
    assert (world.move.version, AuditEntry.objects.count()) == before


def mismatch(world: World, **columns: Any) -> Mismatch:
    defaults = {
        "user_id": "u-1",
        "session_id": "s-1",
        "part": "events",
        "first_difference": "event 1 differs",
        "looks_like": Looks.CHANGED_VALUE,
        "source_digest": "a" * 64,
        "target_digest": "b" * 64,
        "found_at": world.clock(),
        "found_in": world.move.phase,
    }
    return world.move.mismatches.create(**defaults | columns)


@pytest.mark.parametrize("phase", [Phase.BACKFILL, Phase.VERIFY, Phase.OFFBOARD])
def test_a_move_is_rolled_back_in_soak_alone(files: World, phase: Phase) -> None:
    files.start()
    files.run(until=phase)
    refused(files, "in SOAK", lambda: roll_back(files))


def test_a_rollback_is_asked_for_once_with_a_reason_and_audited(files: World) -> None:
    moved(files)
    look(files)
    refused(
        files,
        "Say why",
        lambda: services.rollback(files.move, by="ada", reason=" ", now=files.clock()),
        Refused,
    )
    roll_back(files)
    refused(files, "by ada already", lambda: roll_back(files))
    entry = AuditEntry.objects.filter(verb="move.rollback").get()
    assert (entry.who, entry.reason) == ("ada", "slow tools")


def test_a_rollback_that_waits_can_be_taken_back(files: World) -> None:
    content = moved(files)
    look(files)
    roll_back(files)
    services.cancel_rollback(files.move, by="bob", reason="it is better", now=files.clock())
    for _ in range(3):
        files.step()
    assert files.move.phase == Phase.SOAK
    assert files.target.content(APP) == content
    ask = lambda: services.cancel_rollback(files.move, by="bob", reason="again", now=files.clock())  # noqa: E731
    refused(files, "no rollback that waits", ask)


def test_a_fence_back_that_cannot_fit_its_budget_is_refused_and_a_larger_one_is_taken(
    files: World,
) -> None:
    content = moved(files)
    look(files)
    TenantMigration.objects.update(copy_rate=0.01)
    refused(files, "larger budget", lambda: roll_back(files))
    services.rollback(files.move, by="ada", reason="slow", now=files.clock(), budget_seconds=3_000)
    files.run()
    assert_home(files, content, "a larger budget")


def test_the_quote_of_a_rollback_counts_what_was_looked_at_and_what_was_served_since(
    files: World,
) -> None:
    moved(files)
    look(files)
    move = files.move
    before = queries.to_carry(move)
    assert before == move.touched == 3
    assert move.touched_at is not None
    DirtyLine.objects.create(
        tenant=move.tenant,
        user_id="u-0",
        session_id="s-0",
        at=move.touched_at + timedelta(seconds=1),
    )
    assert queries.to_carry(move) == 4
    parts = {part.name: part.detail for part in queries.fence_quote(move, now=files.clock()).parts}
    assert parts["delta"].startswith("4 changed")


def test_what_is_served_while_a_look_runs_is_in_the_quote_until_the_next(
    files: World,
) -> None:
    moved(files)
    look(files)
    files.clock.pass_by(61)
    while files.move.stage != "touched":
        files.step()
    files.clock.pass_by(1)
    # The look may be past this session by now.
    DirtyLine.objects.create(
        tenant=files.move.tenant, user_id="u-0", session_id="s-0", at=files.clock()
    )
    files.clock.pass_by(1)
    touched = look(files).touched
    assert touched is not None
    assert queries.to_carry(files.move) == touched + 1
    files.clock.pass_by(61)
    # The next look is of all that.
    assert look(files).touched == queries.to_carry(files.move)


def test_a_rollback_waits_for_an_instance_that_serves_the_source(files: World) -> None:
    content = moved(files)
    look(files)
    other = scene.instances(files.cast.other_cell, ["eu1-b-4"], now=files.clock())
    refused(files, "no instance of cell-eu1-a", lambda: roll_back(files), services.NotReadyToMove)
    RuntimeInstance.objects.update(gone_at=files.clock())
    roll_back(files)
    RuntimeInstance.objects.filter(pk=other[0].pk).update(gone_at=None)
    files.step()
    assert files.move.phase == Phase.SOAK
    assert "no instance of cell-eu1-a" in files.move.waiting_for
    services.cancel_rollback(files.move, by="ada", reason="not now", now=files.clock())
    files.step()
    assert_stays(files, content, "never begun")


def test_a_move_that_flips_by_hand_waits_for_the_word_and_then_goes_on(files: World) -> None:
    files.start(flip_by_hand=True)
    files.run(until=Phase.VERIFY)
    for _ in range(5):
        files.step()
    assert files.move.phase == Phase.VERIFY
    assert "word to flip" in files.move.waiting_for
    services.flip(files.move, by="ada", reason="all well", now=files.clock())
    files.run()
    assert files.move.phase == Phase.DONE


def test_a_word_to_flip_that_never_comes_opens_the_source_at_the_deadline(files: World) -> None:
    before = files.source.content(APP)
    files.start(flip_by_hand=True)
    files.run(until=Phase.VERIFY)
    files.clock.pass_by(151)
    files.run()
    assert files.move.phase == Phase.ABORTED
    assert files.source.content(APP) == before


def test_a_move_that_flips_by_itself_takes_no_word(files: World) -> None:
    files.start()
    files.run(until=Phase.VERIFY)
    ask = lambda: services.flip(files.move, by="ada", reason="go", now=files.clock())  # noqa: E731
    refused(files, "by itself", ask)


@pytest.mark.parametrize("looks", [look for look in Looks if look != Looks.CANNOT_HOLD])
def test_what_would_be_lost_is_never_accepted_while_it_is_copied(
    files: World, looks: Looks
) -> None:
    files.start(automatic=False)
    files.run(until=Phase.BACKFILL)
    row = mismatch(files, looks_like=looks)
    ask = lambda: services.accept(  # noqa: E731
        files.move, mismatch_ids=[row.pk], by="ada", reason="fine", now=files.clock()
    )
    refused(files, "can't be accepted", ask)


def test_a_session_that_was_left_out_is_never_accepted(files: World) -> None:
    files.start(automatic=False)
    files.run(until=Phase.BACKFILL)
    row = mismatch(files, looks_like=Looks.CANNOT_HOLD, part="value")
    ask = lambda: services.accept(  # noqa: E731
        files.move, mismatch_ids=[row.pk], by="ada", reason="fine", now=files.clock()
    )
    refused(files, "can't be accepted", ask)


def test_an_accepted_value_blocks_nothing(files: World) -> None:
    files.start(automatic=False)
    files.run(until=Phase.BACKFILL)
    row = mismatch(files, looks_like=Looks.CANNOT_HOLD)
    assert queries.open_mismatches(files.move) == 1
    services.accept(
        files.move, mismatch_ids=[row.pk], by="ada", reason="zero is zero", now=files.clock()
    )
    assert queries.open_mismatches(files.move) == 0
    row.refresh_from_db()
    assert (row.accepted_by, row.accepted_reason) == ("ada", "zero is zero")


def test_a_users_shared_state_is_written_by_value_again_when_it_is_asked_for(both: World) -> None:
    both.start(automatic=False)
    both.run(until=Phase.BACKFILL)
    while both.move.stage != "ready":
        both.step()
    with both.late(both.target) as connection:
        both.target.run_in(
            connection,
            "UPDATE user_states SET state = ? WHERE app_name = ? AND user_id = 'u-1'",
            '{"tier": "stale"}',
            APP,
        )
    row = mismatch(both)
    count = services.reconcile_users(both.move, mismatch_ids=[row.pk], by="ada", now=both.clock())
    assert count == 1
    both.step()
    ours, theirs = both.source.content(APP), both.target.content(APP)
    assert theirs["user_states"] == ours["user_states"]
    assert both.move.mismatches.get(part="user").resolved_at is not None


def test_a_rollback_to_a_store_that_is_away_is_refused(files: World) -> None:
    content = moved(files)
    look(files)
    path = Path(files.source.url.removeprefix("sqlite:///"))
    away = path.rename(path.with_suffix(".away"))
    refused(files, "store-eu1-a", lambda: roll_back(files), services.NotReadyToMove)
    away.rename(path)
    assert_stays(files, content, "refused")
