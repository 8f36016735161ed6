"""Memory and side channels in whole moves, there and back: what is not in place stops the flip."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from django.conf import LazySettings

from migrations_app import channels, preflight, queries, services
from migrations_app.domain.channels import ChannelState
from migrations_app.domain.phases import Phase
from migrations_app.models import MoveChannel, SideChannel
from tests import memories
from tests.faults.test_way_back import assert_home, look, moved, roll_back
from tests.memories import Deaf, Kept, kept
from tests.world import APP, World, each_call, undone


@pytest.fixture(autouse=True)
def _services() -> Iterator[None]:
    with memories.anew():
        yield


def remember(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give both sides a memory service."""
    for store, side in ((world.cast.other_store, "target"), (world.cast.store, "source")):
        monkeypatch.setenv(f"MEMORY_{side}", f"python:tests.memories:{side}")
        store.memory_from = f"env:MEMORY_{side}"
        store.save()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: LazySettings) -> Path:
    """An index of vectors, a folder a store, with two at the source."""
    monkeypatch.setenv("VECTORS_ROOT", str(tmp_path))
    settings.CHANNEL_MODULES = ["tests.vectors"]
    settings.CHANNEL_VARIABLES = ["VECTORS_ROOT"]
    for name in ("v-0", "v-1"):
        vector(tmp_path / "store-eu1-a" / name)
    return tmp_path


def vector(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(path.name)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


PROGRAM = {
    "copy_by": "callable",
    "copy_step": "tests.vectors:copy",
    "verify_by": "callable",
    "verify_step": "tests.vectors:verify",
}


def register(world: World, name: str = "vectors", **columns: Any) -> SideChannel:
    owner = {"tenant": world.cast.acme, "by": "ada", "now": world.clock()}
    return channels.register(name=name, **owner, **columns)


def row(world: World) -> MoveChannel:
    return MoveChannel.objects.select_related("channel").get(move=world.move)


def check_off(world: World, step: str) -> None:
    channels.check_off(row(world), step=step, note="by hand", by="ada", now=world.clock())


def before_the_fence(world: World) -> None:
    """Go on until the fence is about to close: later than anything else has happened."""
    world.run(until=Phase.DRAIN)
    world.clock.pass_by(1)


def waits_for(world: World, phase: Phase, words: str) -> None:
    """Step until the move says what it waits for, in this phase."""
    for _ in range(120):
        move = world.step()
        if move.phase == phase and words in move.waiting_for:
            return
    raise AssertionError(f"{world.move.phase}: {world.move.waiting_for!r}")


# --- memory ---------------------------------------------------------------------------------------


def test_memory_is_complete_when_the_tenant_arrives(
    both: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(both, monkeypatch)
    both.start()
    both.run(until=Phase.DRAIN)
    assert len(kept().given) == 12
    # Inside the fence, past the last pass.
    both.source.turn(APP, "u-3", "s-7", "late")
    both.source.delete(APP, "u-1", "s-5")
    both.run()
    assert both.move.phase == Phase.DONE
    assert kept().given[12:] == ["s-7"]
    assert kept().texts(APP, "u-3", "s-7")[-1] == "text late"
    assert kept().texts(APP, "u-1", "s-5") == []
    assert both.move.remembered == 11


def test_a_memory_that_finds_nothing_stops_the_flip_until_the_deadline(
    files: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    memories.SERVICES["target"] = Deaf()
    remember(files, monkeypatch)
    files.start()
    waits_for(files, Phase.VERIFY, "the memory of store-eu1-b to find any of 5 sessions")
    files.clock.pass_by(200)
    files.run()
    assert files.move.phase == Phase.ABORTED
    assert files.owner() == [("cell-eu1-a", "all")]


def test_a_session_that_memory_does_not_take_stops_the_flip_until_it_does(
    files: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    memories.SERVICES["target"] = Kept("s-5")
    remember(files, monkeypatch)
    files.start()
    waits_for(files, Phase.VERIFY, "to take 1 session, such as s-5 of u-1")
    kept().refused.clear()
    files.run()
    assert files.move.phase == Phase.DONE
    assert files.move.remembered == 12


def test_memory_survives_kills_while_it_is_filled(
    files: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(files, monkeypatch)
    files.start()
    files.run(until=Phase.BACKFILL)
    while files.move.stage != "memory":
        files.step()
    tried = 0
    # Every third call of a step in which each of twelve sessions costs two.
    for call in islice(each_call(files), 0, None, 3):
        if files.move.stage != "memory":
            break
        tried += 1
        with undone(files):
            memories.SERVICES["target"] = Kept()
            files.run()
            assert files.move.phase == Phase.DONE, call
            for number in range(12):
                assert len(kept().texts(APP, f"u-{number % 4}", f"s-{number}")) == 3, call
    assert tried > 8


def test_a_rollback_gives_the_sources_memory_only_what_was_touched(
    both: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(both, monkeypatch)
    content = moved(both)
    look(both)
    given = len(kept().given)
    roll_back(both)
    both.run()
    assert_home(both, content, "memory")
    assert len(kept().given) == given
    assert sorted(kept("source").given) == ["s-1", "s-born"]


# --- side channels --------------------------------------------------------------------------------


def test_a_programs_channel_goes_over_and_catches_up_inside_the_fence(
    both: World, index: Path
) -> None:
    register(both, **PROGRAM)
    both.start()
    before_the_fence(both)
    assert row(both).state == ChannelState.GREEN
    vector(index / "store-eu1-a" / "v-2")
    both.run()
    assert both.move.phase == Phase.DONE
    assert names(index / "store-eu1-b") == ["v-0", "v-1", "v-2"]
    notes = both.move.events.filter(note__startswith="vectors:").order_by("id")
    assert [(event.now, event.note) for event in notes] == [
        ("backfill", "vectors: copied, 2 vectors"),
        ("backfill", "vectors: verified, 2 vectors"),
        ("verify", "vectors: copied, 1 vectors"),
        ("verify", "vectors: verified, 3 vectors"),
    ]


def test_a_required_channel_keeps_the_fence_open_and_then_the_placement_where_it_is(
    files: World,
) -> None:
    register(files)
    files.start()
    waits_for(files, Phase.BACKFILL, "side channel vectors to be copied by a person")
    assert ("cell-eu1-a", "all") in files.owner()
    check_off(files, "copy")
    waits_for(files, Phase.VERIFY, "side channel vectors to be verified by a person")
    assert files.move.placement_version is None
    check_off(files, "verify")
    files.run()
    assert files.move.phase == Phase.DONE


def test_a_channel_that_is_not_green_in_time_gives_the_tenant_back(files: World) -> None:
    register(files)
    files.start()
    waits_for(files, Phase.BACKFILL, "vectors to be copied")
    check_off(files, "copy")
    waits_for(files, Phase.VERIFY, "vectors to be verified")
    files.clock.pass_by(200)
    files.run()
    assert files.move.phase == Phase.ABORTED
    assert files.owner() == [("cell-eu1-a", "all")]
    assert files.agents_may_write(files.source)


def test_a_program_that_fails_inside_the_fence_stops_the_flip_until_it_works(
    files: World, index: Path
) -> None:
    made = register(files, **PROGRAM)
    files.start()
    before_the_fence(files)
    channels.edit(
        made, copy_step="tests.vectors:fail", by="ada", reason="a bad release", now=files.clock()
    )
    waits_for(files, Phase.VERIFY, "side channel vectors to be copied (It ended with exit code 1)")
    channels.edit(
        made, copy_step="tests.vectors:copy", by="ada", reason="mended", now=files.clock()
    )
    files.run()
    assert files.move.phase == Phase.DONE


def test_an_optional_channel_is_left_for_the_soak(files: World) -> None:
    register(files, required=False)
    files.start(soak_seconds=3600.0)
    files.run(until=Phase.SOAK)
    assert [one.channel.name for one in queries.open_channels(files.move)] == ["vectors"]
    check_off(files, "copy")
    check_off(files, "verify")
    assert queries.open_channels(files.move) == []


def test_channels_are_listed_by_the_preparation(files: World, index: Path) -> None:
    def check() -> dict[str, Any]:
        [found] = [c for c in files.move.checks if c["name"] == preflight.CHANNELS]
        return found

    register(files, **PROGRAM)
    register(files, "logs", required=False)
    files.start()
    files.run(until=Phase.BACKFILL)
    assert check()["ok"] is True
    assert check()["detail"] == "2 listed, 1 required: logs, vectors"
    assert files.move.channels.count() == 2


def test_a_tenant_without_channels_is_moved_with_a_hint(files: World) -> None:
    files.start()
    files.run(until=Phase.BACKFILL)
    [found] = [c for c in files.move.checks if c["name"] == preflight.CHANNELS]
    assert found["ok"] is None
    assert "none is registered for acme" in found["detail"]


def test_a_step_that_nothing_here_may_call_is_refused_before_the_move(
    files: World, index: Path, settings: LazySettings
) -> None:
    register(files, **PROGRAM)
    settings.CHANNEL_MODULES = []
    with pytest.raises(services.NotReadyToMove, match="SWITCHYARD_CHANNEL_MODULES"):
        files.start()


def test_a_rollback_brings_back_what_programs_had_copied(both: World, index: Path) -> None:
    register(both, **PROGRAM)
    content = moved(both)
    look(both)
    # Kept at the target since the cutover.
    vector(index / "store-eu1-b" / "v-7")
    both.clock.pass_by(1)
    roll_back(both)
    both.run()
    assert_home(both, content, "channels")
    assert names(index / "store-eu1-a") == ["v-0", "v-1", "v-7"]


def test_a_channel_survives_kills_inside_the_fence(files: World, index: Path) -> None:
    register(files, **PROGRAM)
    files.start()
    before_the_fence(files)
    files.run(until=Phase.VERIFY)
    vector(index / "store-eu1-a" / "v-2")
    tried = 0
    # Each trial starts two programs.
    for call in islice(each_call(files), 0, None, 12):
        if files.move.phase != Phase.VERIFY:
            break
        tried += 1
        with undone(files):
            files.run(until=Phase.SOAK)
            assert row(files).state == ChannelState.GREEN, call
            assert (index / "store-eu1-b" / "v-2").exists(), call
        (index / "store-eu1-b" / "v-2").unlink()
    assert tried > 3
