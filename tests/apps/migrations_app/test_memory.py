"""Memory goes along: each session once, again when it changed, never what did not."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from durable.machine import Overtaken
from migrations_app import copying, memory, preflight, services
from migrations_app.copying import Key, Meter, Swept, Timer
from migrations_app.domain.phases import Phase
from migrations_app.models import SideChannel, TenantMigration
from migrations_app.ports.base import NOBODY, START, AddressMissing
from migrations_app.ports.memory import (
    MemoryFailed,
    MemoryUnknown,
    Recalled,
    open_memory,
    recall,
)
from tenants.models import RuntimeInstance
from tests import memories, scene
from tests.memories import Deaf, Kept, Paraphrasing, kept
from tests.world import APP, World

pytestmark = pytest.mark.django_db

TARGET, SOURCE = "python:tests.memories:target", "python:tests.memories:source"
ALL = sorted(f"s-{number}" for number in range(12))


@pytest.fixture(autouse=True)
def _services() -> Iterator[None]:
    with memories.anew():
        yield


def remember(
    world: World, monkeypatch: pytest.MonkeyPatch, *, target: str = "", source: str = ""
) -> None:
    """Give the target a memory service, and the source."""
    for store, name, address in (
        (world.cast.other_store, "MEMORY_B", target),
        (world.cast.store, "MEMORY_A", source),
    ):
        monkeypatch.setenv(name, address)
        store.memory_from = f"env:{name}" if address else ""
        store.save()


def ready(world: World) -> TenantMigration:
    """Copy all, or what changed since, and stop before memory's turn in the pass."""
    if not TenantMigration.objects.exists():
        world.start(automatic=False)
    else:
        TenantMigration.objects.update(stage="")
    for _ in range(50):
        if world.step().stage == "memory":
            return world.move
    raise AssertionError(world.move.stage)


def sweep(world: World, *, seconds: float = 5.0) -> Swept:
    move = world.move
    with copying.both(move) as (source, _):
        return memory.sweep(move, source, meter=Meter(), timer=Timer(seconds), clock=world.clock)


def verify(world: World) -> str:
    move = world.move
    with copying.both(move) as (source, _):
        return memory.verify(move, source, meter=Meter(), timer=Timer(5), clock=world.clock)


def log(world: World) -> list[str]:
    return [event.note for event in world.move.events.filter(who="mover").order_by("id")]


# --- forwards -------------------------------------------------------------------------------------


def test_each_session_is_given_once(both: World, monkeypatch: pytest.MonkeyPatch) -> None:
    remember(both, monkeypatch, target=TARGET)
    ready(both)
    assert sweep(both).finished
    assert sorted(kept().given) == ALL
    assert kept().texts(APP, "u-1", "s-1") == [f"text s-1-e{n}" for n in range(3)]
    assert both.move.remembered == 12
    assert both.move.memory_rate is not None
    assert sweep(both) == Swept(Key("", "0"), 0, finished=True)
    assert len(kept().given) == 12
    assert verify(both) == ""


def test_only_a_session_that_changed_is_given_again(
    both: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(both, monkeypatch, target=TARGET)
    ready(both)
    sweep(both)
    kept().given.clear()
    both.source.turn(APP, "u-3", "s-7", "late")
    ready(both)
    assert sweep(both).finished
    assert kept().given == ["s-7"]
    assert kept().texts(APP, "u-3", "s-7")[-1] == "text late"
    assert both.move.remembered == 12


def test_a_sweep_goes_on_where_its_time_was_up(
    files: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(files, monkeypatch, target=TARGET)
    ready(files)
    first = sweep(files, seconds=0)
    assert (first.passed, first.finished) == (memory.AT_ONCE, False)
    TenantMigration.objects.update(cursor_session=first.cursor.session_id)
    assert sweep(files) == Swept(Key("", str(int(first.cursor.session_id) + 4)), 4, finished=True)
    assert sorted(kept().given) == ALL


def test_sessions_are_held_a_handful_at_a_time(
    files: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with files.source.connection() as connection:
        for number in range(100, 300):
            files.source.add_session(connection, APP, "u-0", f"s-{number}", 1, number)
    remember(files, monkeypatch, target=TARGET)
    ready(files)
    assert sweep(files, seconds=30).finished
    assert len(kept().given) == 212
    # One handful, and the one before it until its names are given to the next.
    assert kept().most <= 2 * memory.AT_ONCE


def test_google_adks_own_memory_in_a_file_is_filled(
    both: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "memory.db"
    remember(both, monkeypatch, target=f"sqlite:///{path}")
    ready(both)
    sweep(both)
    both.source.turn(APP, "u-3", "s-7", "late")
    ready(both)
    sweep(both)
    with sqlite3.connect(path) as file:
        [(events,)] = file.execute("select count(*) from memory_events where app_name = ?", [APP])
    file.close()
    assert events == 12 * 3 + 1
    assert verify(both) == ""


def test_nothing_is_done_where_no_memory_goes_over(
    files: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = Swept(Key("", ""), 0, finished=True)
    ready(files)
    assert sweep(files) == nothing
    # One service for both sides: it has them already, and would have them twice.
    remember(files, monkeypatch, target=TARGET, source=TARGET)
    assert sweep(files) == nothing
    assert verify(files) == ""
    assert not kept().given


# --- what does not go well ------------------------------------------------------------------------


def test_a_session_that_memory_does_not_take_is_named_and_the_rest_goes_over(
    files: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    memories.SERVICES["target"] = Kept("s-5")
    remember(files, monkeypatch, target=TARGET)
    ready(files)
    assert sweep(files).finished
    assert files.move.remembered == 11
    assert verify(files) == "the memory of store-eu1-b to take 1 session, such as s-5 of u-1"
    kept().refused.clear()
    assert verify(files) == ""
    assert files.move.remembered == 12


def test_a_service_that_takes_nothing_is_an_error_without_its_words(
    files: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    memories.SERVICES["target"] = Kept("*")
    remember(files, monkeypatch, target=TARGET)
    ready(files)
    with pytest.raises(MemoryFailed) as caught:
        sweep(files)
    assert str(caught.value) == "The memory service of store-eu1-b takes no session (ValueError)."
    assert files.move.remembered == 0


def test_a_memory_that_finds_nothing_of_what_it_was_given_stops_the_cutover(
    files: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    memories.SERVICES["target"] = Deaf()
    remember(files, monkeypatch, target=TARGET)
    ready(files)
    sweep(files)
    words = "the memory of store-eu1-b to find any of 5 sessions that it was given"
    assert verify(files) == words


def test_a_memory_that_answers_in_its_own_words_is_believed(
    files: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    memories.SERVICES["target"] = Paraphrasing()
    remember(files, monkeypatch, target=TARGET)
    ready(files)
    sweep(files)
    assert verify(files) == ""


def test_what_google_adk_cannot_read_has_no_memory_and_is_named(
    files: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.source.run("update events set event_data = ? where session_id = 's-4'", '{"content": 7}')
    remember(files, monkeypatch, target=TARGET)
    ready(files)
    assert sweep(files).finished
    assert sorted(kept().given) == [name for name in ALL if name != "s-4"]
    note = "google-adk can't read 1 session, such as s-4 of u-0: memory has nothing of them"
    assert note in log(files)
    assert verify(files) == ""


def test_an_overtaken_worker_gives_nothing_away(
    files: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(files, monkeypatch, target=TARGET)
    stale = ready(files)
    with copying.both(stale) as (source, _):
        TenantMigration.objects.update(claim=stale.claim + 1)
        with pytest.raises(Overtaken):
            memory.sweep(stale, source, meter=Meter(), timer=Timer(5), clock=files.clock)
    assert not kept().given


def test_a_worker_that_dies_behind_a_handful_gives_it_again(
    files: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(files, monkeypatch, target=TARGET)
    ready(files)
    real = memory.Memory.add

    def dies(self: memory.Memory, recalled: list[memory.Recalled]) -> dict[Key, str]:
        real(self, recalled)
        raise KeyboardInterrupt

    monkeypatch.setattr(memory.Memory, "add", dies)
    with pytest.raises(KeyboardInterrupt):
        sweep(files)
    monkeypatch.setattr(memory.Memory, "add", real)
    assert files.move.remembered == 0
    assert sweep(files).finished
    assert len(kept().given) == 12 + memory.AT_ONCE
    assert len(kept().texts(APP, "u-0", "s-0")) == 3


# --- deleted at the source ------------------------------------------------------------------------


def forget(world: World, *names: tuple[str, str]) -> bool:
    move = world.move
    with copying.both(move) as (_, target):
        return memory.forget(move, target, [Key(*name) for name in names], clock=world.clock)


def test_a_session_that_was_deleted_is_forgotten(
    files: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(files, monkeypatch, target=TARGET)
    ready(files)
    sweep(files)
    forget(files, ("u-3", "s-7"), ("u-9", "never"))
    assert kept().texts(APP, "u-3", "s-7") == []
    assert len(kept().texts(APP, "u-3", "s-3")) == 3
    assert files.move.remembered == 11
    assert not [note for note in log(files) if "stays" in note]


def test_what_a_memory_cannot_forget_is_named(
    files: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    remember(files, monkeypatch, target=f"sqlite:///{tmp_path}/memory.db")
    ready(files)
    sweep(files)
    forget(files, ("u-3", "s-7"))
    note = "Left in the memory of store-eu1-b, which removes none by event: 1 deleted session"
    assert note in log(files)
    assert files.move.remembered == 11
    forget(files, ("u-3", "s-7"))
    assert log(files).count(note) == 1


def test_forgetting_many_takes_more_than_one_step(
    files: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(files, monkeypatch, target=TARGET)
    ready(files)
    sweep(files)
    names = [(f"u-{number % 4}", f"s-{number}") for number in range(12)]
    with monkeypatch.context() as slow:
        slow.setattr(memory, "Timer", lambda: Timer(0))
        assert not forget(files, *names)
        assert files.move.remembered == 11
    assert forget(files, *names)
    assert files.move.remembered == 0
    assert kept().texts(APP, "u-3", "s-11") == []


class ByName(Kept):
    """Replaces nothing, and deletes by the events' ids alone."""

    def __init__(self) -> None:
        super().__init__()
        self.deleted: list[str] = []

    async def add_session_to_memory(self, session: Any) -> None:
        if session.events:
            await super().add_session_to_memory(session)

    async def delete_memory(self, *, memory_id: str | None = None, **scope: Any) -> None:
        self.deleted.append(str(memory_id))
        await super().delete_memory(memory_id=memory_id, **scope)


def test_a_session_of_many_events_is_forgotten_in_more_than_one_step(
    files: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    memories.SERVICES["target"] = slowly = ByName()
    remember(files, monkeypatch, target=TARGET)
    ready(files)
    sweep(files)
    with monkeypatch.context() as slow:
        slow.setattr(memory, "Timer", lambda: Timer(0))
        assert not forget(files, ("u-3", "s-7"))
        assert slowly.deleted == ["s-7-e0"]
        assert not forget(files, ("u-3", "s-7"))
        assert files.move.remembered == 12
    assert forget(files, ("u-3", "s-7"))
    # None is asked for twice.
    assert slowly.deleted == ["s-7-e0", "s-7-e1", "s-7-e2"]
    assert slowly.texts(APP, "u-3", "s-7") == []
    assert files.move.remembered == 11


def test_what_was_forgotten_may_come_back(files: World, monkeypatch: pytest.MonkeyPatch) -> None:
    remember(files, monkeypatch, target=TARGET)
    ready(files)
    sweep(files)
    forget(files, ("u-3", "s-7"))
    ready(files)
    sweep(files)
    # An id that google-adk's service was told to delete it never takes again.
    assert len(kept().texts(APP, "u-3", "s-7")) == 3


# --- an abort, and the end ------------------------------------------------------------------------


def abort(world: World) -> None:
    services.abort(world.move, by="ada", reason="wrong cell", now=world.clock())


def texts(side: str) -> int:
    """Return how many words a side's memory holds, and make sure that no nonce is among them."""
    found = {
        user: sum(map(len, sessions.values()))
        for (_, user), sessions in kept(side)._session_events.items()
    }
    assert not any(count for user, count in found.items() if user.startswith(NOBODY))
    return sum(found.values())


def test_an_abort_removes_from_the_targets_memory_what_the_move_gave_it(
    both: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(both, monkeypatch, target=TARGET, source=SOURCE)
    ready(both)
    sweep(both)
    assert texts("target") == 36
    abort(both)
    assert both.run().phase == Phase.ABORTED
    assert texts("target") == 0
    assert both.move.remembered == 0
    # A second try fills it as the first did.
    both.start()
    both.run(until=Phase.SOAK)
    assert texts("target") == 36


@pytest.mark.parametrize("source", ["", "python:tests.memories:target"])
def test_an_abort_leaves_a_memory_that_may_be_both_sides(
    files: World, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    # Another name of the same place, or a source of whose memory nobody knows.
    monkeypatch.setattr(memory, "where", lambda reference: reference)
    remember(files, monkeypatch, target=TARGET, source=source)
    ready(files)
    sweep(files)
    abort(files)
    assert files.run().phase == Phase.ABORTED
    assert texts("target") == 36
    note = "Left in the memory of store-eu1-b, which removes none by event: 12 sessions"
    assert note in log(files)


def in_the_sources_memory(world: World) -> None:
    """Let the source's memory have what agents gave it."""
    sessions = [Key(f"u-{number % 4}", f"s-{number}") for number in range(12)]
    with (
        copying.opened(world.move, world.cast.store) as source,
        open_memory("env:MEMORY_A", app_name=APP) as service,
    ):
        service.add([one for one in recall(source, APP, sessions) if isinstance(one, Recalled)])


def test_offboarding_removes_what_goes_from_the_sources_memory_and_leaves_what_stays(
    both: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(both, monkeypatch, target=TARGET, source=SOURCE)
    both.start()
    in_the_sources_memory(both)
    both.run(until=Phase.OFFBOARD)
    with both.late() as connection:
        both.source.add_event(connection, APP, "u-3", "s-7", "late", 9_000)
    assert texts("source") == 36
    assert both.run().phase == Phase.DONE
    # The session that changed stays, and its memory with it.
    assert texts("source") == len(kept("source").texts(APP, "u-3", "s-7")) == 3
    assert texts("target") == 36


def test_offboarding_forgets_a_session_at_a_time_and_counts_what_stays(
    files: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    memories.SERVICES["source"] = slowly = ByName()
    remember(files, monkeypatch, target=TARGET, source=SOURCE)
    files.start()
    in_the_sources_memory(files)
    files.run(until=Phase.OFFBOARD)
    TenantMigration.objects.update(stage="forget")
    steps = 0
    at = START
    while True:
        move = files.move
        move.cursor_user, move.cursor_session = at
        with copying.opened(move, files.cast.store) as source:
            came = memory.offboard(move, source, timer=Timer(0), clock=files.clock)
        steps += 1
        if came.finished:
            break
        at = came.cursor
    assert steps > 30
    ours = [name for name in slowly.deleted if name.startswith("s-")]
    assert sorted(ours) == sorted(f"{name}-e{n}" for name in ALL for n in range(3))
    assert texts("source") == 0


def test_offboarding_names_what_a_memory_cannot_remove(
    files: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    remember(files, monkeypatch, target=TARGET, source=f"sqlite:///{tmp_path}/memory.db")
    files.start()
    in_the_sources_memory(files)
    assert files.run().phase == Phase.DONE
    note = "Left in the memory of store-eu1-a, which removes none by event: 12 sessions"
    assert note in log(files)


# --- the way back ---------------------------------------------------------------------------------


def test_on_the_way_back_only_what_was_touched_is_given(
    files: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(files, monkeypatch, target=TARGET, source=SOURCE)
    ready(files)
    sweep(files)
    in_the_sources_memory(files)
    kept("source").given.clear()
    # As REVERSE_DELTA leaves its lines: a session carried back has new stamps on both sides.
    TenantMigration.objects.update(phase=Phase.REVERSE_VERIFY)
    with files.late(files.target) as connection:
        files.target.add_event(connection, APP, "u-3", "s-7", "on-target", 9_000)
    move = files.move
    with copying.both(move) as (source, _):
        [touched] = source.stamps([Key("u-3", "s-7")]).values()
    move.stamps.filter(session_id="s-7").update(source_stamp="new", target_stamp=touched)
    assert sweep(files).finished
    assert kept("source").given == ["s-7"]
    assert kept("source").texts(APP, "u-3", "s-7")[-1] == "text on-target"
    assert verify(files) == ""
    assert kept("source").given == ["s-7"]


# --- where memory is ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "kind", "words"),
    [
        pytest.param("memory://", MemoryUnknown, "lives in one process", id="in memory"),
        pytest.param("nosuch://secret@host", MemoryUnknown, "no memory service", id="scheme"),
        pytest.param("python:tests.nowhere:x", MemoryUnknown, "ModuleNotFoundError", id="module"),
        pytest.param("python:tests.memories:x", MemoryUnknown, "AttributeError", id="name"),
        pytest.param("python:tests.memories", MemoryUnknown, "AttributeError", id="no name"),
        pytest.param("python:tests.memories:nothing", MemoryUnknown, "no memory", id="nothing"),
        pytest.param("rag://corpus", MemoryUnknown, "ValueError", id="rag"),
        pytest.param("", AddressMissing, "not set", id="unset"),
    ],
)
def test_what_is_no_memory_service_is_refused_without_its_address(
    monkeypatch: pytest.MonkeyPatch, address: str, kind: type[Exception], words: str
) -> None:
    monkeypatch.setenv("MEMORY_B", address)
    with pytest.raises(kind) as caught, open_memory("env:MEMORY_B", app_name=APP):
        pass
    assert words in str(caught.value)
    assert "secret" not in str(caught.value)


def check(world: World, name: str) -> preflight.Check | None:
    found = preflight.preflight(
        world.cast.acme,
        source_cell=world.cast.cell,
        source_store=world.cast.store,
        target_cell=world.cast.other_cell,
        target_store=world.cast.other_store,
        now=world.clock(),
    )
    return next((one for one in found.checks if one.name == name), None)


def test_a_memory_that_the_target_lacks_is_refused_by_name(
    files: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check(files, preflight.MEMORY) is None
    remember(files, monkeypatch, source=SOURCE)
    red = check(files, preflight.MEMORY)
    assert red is not None
    assert red.ok is False
    assert "store-eu1-a has a memory service and store-eu1-b has none" in red.detail
    SideChannel.objects.create(
        tenant=files.cast.acme, name="Memory index", copy_by="person", verify_by="person"
    )
    green = check(files, preflight.MEMORY)
    assert green == preflight.Check(
        preflight.MEMORY, True, "goes over as the side channel Memory index"
    )


@pytest.mark.parametrize(
    ("source", "target", "ok", "words"),
    [
        pytest.param(SOURCE, TARGET, True, "each session is given to the service", id="two"),
        pytest.param("", TARGET, True, "each session is given to the service", id="target"),
        pytest.param(SOURCE, SOURCE, True, "lead to one memory service", id="one"),
        pytest.param(SOURCE, "memory://", False, "lives in one process", id="in memory"),
    ],
)
def test_preparation_opens_the_memory_that_is_to_be_filled(
    files: World,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    target: str,
    ok: bool,
    words: str,
) -> None:
    remember(files, monkeypatch, source=source, target=target)
    found = check(files, preflight.MEMORY)
    assert found is not None
    assert found.ok is ok
    assert words in found.detail


def test_a_plugin_that_sounds_like_a_memory_is_pointed_at(files: World) -> None:
    scene.instances(files.cast.cell, ["a-1"], now=files.clock())
    RuntimeInstance.objects.update(plugins=["PreloadMemory", "Fence"])
    found = check(files, preflight.MEMORY)
    assert found is not None
    assert found.ok is None
    assert "PreloadMemory" in found.detail
