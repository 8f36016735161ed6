"""BACKFILL at a chosen pace, and how it leaves a slow store alone: on real stores, made slow."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest

from migrations_app import ports, services
from migrations_app.domain.phases import Phase
from tests.world import APP, World

pytestmark = pytest.mark.django_db(transaction=True, serialized_rollback=True)
SESSIONS = 700


@dataclass
class Slowness:
    """What answers late, in seconds a call: a port's page, take, or the copying between both."""

    copy: float = 0.0
    looks: dict[str, float] = field(default_factory=dict)


class Late:
    """A store at its port whose small looks come late."""

    def __init__(self, port: Any, store: str, slowness: Slowness) -> None:
        self._port, self._store, self._slowness = port, store, slowness

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._port, name)
        if name not in ("page", "take"):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            time.sleep(self._slowness.looks.get(self._store, 0.0))
            return value(*args, **kwargs)

        return call


@pytest.fixture
def slowness(monkeypatch: pytest.MonkeyPatch, files: World) -> Slowness:
    """700 sessions, and a handle by which either store becomes slow."""
    with files.source.connection() as connection:
        for number in range(12, SESSIONS):
            files.source.add_session(connection, APP, f"u-{number % 4}", f"s-{number}", 2, number)
    slow = Slowness()
    real_open, real_copy = ports.open_store, ports.copy

    @contextmanager
    def open_store(kind: str, address_from: str, **options: Any) -> Iterator[Any]:
        with real_open(kind, address_from, **options) as port:
            yield Late(port, address_from, slow)

    def copy(source: Any, target: Any, keys: Any) -> Any:
        time.sleep(slow.copy)
        return real_copy(source, target, keys)

    monkeypatch.setattr(ports, "open_store", open_store)
    monkeypatch.setattr(ports, "copy", copy)
    return slow


def begin(files: World, **options: Any) -> None:
    """Start a move, fifty sessions a step unless told otherwise, and begin its first pass."""
    files.start(**({"pace_per_second": 50.0} | options))
    while files.move.stage != "copy":
        files.step()


def notes(files: World, *words: str) -> list[str]:
    found = files.move.events.order_by("id").values_list("note", flat=True)
    return [note for note in found if any(word in note for word in words)]


@pytest.mark.parametrize(
    ("store", "name"),
    [("env:STORE_EU1_A", "store-eu1-a"), ("env:STORE_EU1_B", "store-eu1-b")],
    ids=["source", "target"],
)
def test_a_store_that_slows_gets_relief_and_the_page_names_it(
    files: World, slowness: Slowness, store: str, name: str
) -> None:
    begin(files)
    for _ in range(3):
        files.step()
    assert (files.move.ease, files.move.eased_why) == (1.0, "")
    slowness.looks[store], slowness.copy = 0.02, 0.5
    for _ in range(2):
        files.step()
    move = files.move
    assert move.ease == 0.5
    assert move.eased_why.startswith(f"{name} answers ")
    assert move.eased_why.endswith("times slower than at its best: working half the time")
    for _ in range(2):
        files.step()
    assert files.move.ease == 0.25
    slowness.looks[store] = slowness.copy = 0.0
    for _ in range(4):
        files.step()
    assert (files.move.ease, files.move.eased_why) == (1.0, "")
    heads = [note.split(":")[0] for note in notes(files, "Backs off", "Recovers", "Full speed")]
    assert heads == ["Backs off", "Backs off", "Recovers", "Full speed again"]


def test_a_relieved_store_is_left_alone_between_chunks(files: World, slowness: Slowness) -> None:
    begin(files, pace_per_second=None)
    move = files.move
    move.ease = 1 / 4
    move.save(update_fields=["ease"])
    slowness.copy = 0.2
    at = files.clock.now
    moved = files.step()
    assert moved.copied == 50
    assert moved.due_at is not None
    # Three times as long as it worked, which took a copy of 0.2 s at least.
    assert 0.6 <= (moved.due_at - at).total_seconds() < 5


def test_larger_sessions_alone_slow_nothing_down(files: World, slowness: Slowness) -> None:
    """The copy takes ten times as long, and both stores answer as ever."""
    begin(files)
    files.step()
    slowness.copy = 0.3
    for _ in range(4):
        files.step()
    assert (files.move.ease, notes(files, "Backs off")) == (1.0, [])


def test_one_slow_chunk_is_not_taken_for_a_slow_store(files: World, slowness: Slowness) -> None:
    begin(files)
    for _ in range(2):
        files.step()
    for delay in (0.02, 0.0, 0.02, 0.0):
        slowness.looks["env:STORE_EU1_A"], slowness.copy = delay, 20 * delay
        files.step()
    assert (files.move.ease, notes(files, "Backs off")) == (1.0, [])


def test_a_fence_never_waits_for_a_slow_store(files: World, slowness: Slowness) -> None:
    """Chunk after chunk in one step, whatever pace and ease BACKFILL had."""
    files.start(pace_per_second=None)
    files.run(until=Phase.DRAIN)
    for number in range(200):
        files.source.turn(APP, f"u-{number % 4}", f"s-{number}", f"late-{number}")
    files.run(until=Phase.DELTA)
    move = files.move
    move.ease, move.pace_per_second, move.copy_rate = 1 / 16, 0.01, 125.0
    move.save(update_fields=["ease", "pace_per_second", "copy_rate"])
    slowness.looks["env:STORE_EU1_A"] = 0.02
    at = files.clock.now
    assert files.step().phase == Phase.VERIFY
    assert files.move.changed == 200
    assert files.clock.now == at


def test_a_finish_time_spreads_what_is_left_and_may_be_moved(
    files: World, slowness: Slowness
) -> None:
    until = files.clock.now + timedelta(hours=1)
    begin(files, pace_per_second=None, finish_by=until)
    files.step()
    files.step()
    assert files.move.copied == 2
    assert (files.move.due_at - files.clock.now).total_seconds() == pytest.approx(5.1, abs=0.3)
    services.set_pace(
        files.move,
        finish_by=files.clock.now + timedelta(seconds=14),
        by="ada",
        reason="sooner",
        now=files.clock(),
    )
    begun = files.clock.now
    while files.move.stage == "copy":
        files.step()
    assert (files.clock.now - begun).total_seconds() <= 14
    assert files.move.copied == SESSIONS


def test_a_finish_time_that_is_past_holds_nothing_back(files: World, slowness: Slowness) -> None:
    begin(files, pace_per_second=None, finish_by=files.clock.now + timedelta(hours=1))
    files.clock.pass_by(3601)
    begun = files.clock.now
    while files.move.stage == "copy":
        files.step()
    assert files.move.copied == SESSIONS
    assert files.clock.now == begun


def test_later_passes_are_not_spread_to_a_finish_time(files: World, slowness: Slowness) -> None:
    """Whoever asks for the fence must not wait for the time chosen for the whole copy."""
    begin(files, pace_per_second=None, automatic=False)
    while files.move.stage != "ready":
        files.step()
    for number in range(40):
        files.source.turn(APP, f"u-{number % 4}", f"s-{number}", f"late-{number}")
    services.set_pace(
        files.move,
        finish_by=files.clock.now + timedelta(hours=9),
        by="ada",
        reason="gently",
        now=files.clock(),
    )
    # The last pass is stale by now, so one more has to run.
    files.clock.pass_by(60)
    services.close_fence(files.move, by="ada", reason="now", now=files.clock())
    at = files.clock.now
    files.run(until=Phase.DRAIN)
    assert (files.move.passes, files.move.changed_last) == (2, 40)
    assert (files.clock.now - at).total_seconds() < 60


def test_the_first_500_sessions_are_timed_and_named_once(files: World, slowness: Slowness) -> None:
    begin(files)
    while files.move.stage != "ready":
        files.step()
    [line] = notes(files, "sessions copied in")
    assert f"all {SESSIONS} take" in line
    assert " that change meanwhile " in line
    kept = files.move.speed
    assert kept["sample_sessions"] >= 500
    assert kept["sample_seconds"] > 0
    files.source.turn(APP, "u-0", "s-0", "late")
    services.close_fence(files.move, by="ada", reason="now", now=files.clock())
    files.run()
    assert files.move.phase == Phase.DONE
    assert len(notes(files, "sessions copied in")) == 1


def test_a_repair_beside_an_idle_sweep_is_no_measure_of_speed(
    files: World, slowness: Slowness
) -> None:
    begin(files, pace_per_second=None, automatic=False)
    while files.move.stage != "ready":
        files.step()
    files.clock.pass_by(3600)
    while files.move.stage != "copy":
        files.step()
    before = files.move.speed
    row = files.move.mismatches.create(
        user_id="u-1",
        session_id="s-1",
        part="events",
        first_difference="event 1 differs",
        looks_like="changed value",
        found_at=files.clock(),
        found_in=Phase.BACKFILL,
        repair_requested_at=files.clock(),
    )
    assert (files.step().failure, files.move.speed) == ("", before)
    row.refresh_from_db()
    assert row.resolved_at is not None
