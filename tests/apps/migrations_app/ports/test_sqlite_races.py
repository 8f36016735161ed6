"""What is particular to a file with one writer: its mode, its locks, its bites."""

from __future__ import annotations

import sqlite3
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from migrations_app.ports import copy, sqlite
from migrations_app.ports.base import START, Key, StoreBusy
from tests.apps.migrations_app.ports import places
from tests.apps.migrations_app.ports.places import ACME, BOLT, Place, Thread

S0 = Key("u0", "s0")


@pytest.fixture
def dialect() -> str:
    return "sqlite"


@pytest.fixture
def live(source: Place) -> Place:
    """A source under move 1's guard, its agents writing."""
    with source.open() as store:
        store.provision()
        store.adopt(None, mover=False, agents=True)
    return source


@pytest.mark.parametrize("mode", ["delete", "wal"])
def test_the_journal_mode_of_a_store_is_never_changed(
    source: Place, target: Place, mode: str
) -> None:
    for place in (source, target):
        assert place.run(f"PRAGMA journal_mode = {mode}") == [(mode,)]
    with source.open() as here, target.open() as there:
        here.provision()
        copied = copy(here, there, [key for key, _ in here.page(START, 100)]).copied
        there.write_shared(here.shared_page(None, 100))
        there.delete_unchanged({key: stamp.target for key, stamp in list(copied.items())[:1]})
        there.survey()
    assert source.run("PRAGMA journal_mode") == target.run("PRAGMA journal_mode") == [(mode,)]
    assert len(target.rows()["sessions"]) == 4


def test_agents_never_see_the_movers_flag(source: Place, target: Place) -> None:
    with source.open() as here, target.open() as there, target.connect() as agent:
        assert isinstance(there, sqlite.SqliteStore)
        agent.execute("PRAGMA busy_timeout = 0")
        with there.writing():
            there.remove([S0])
            # The chunk's lock keeps agents out while the flag is up.
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                places.put_session(agent, ACME, "u0", "new", {})
        with pytest.raises(sqlite3.IntegrityError, match="closed by switchyard"):
            places.put_session(agent, ACME, "u0", "new", {})
        copy(here, there, [S0])
        with pytest.raises(sqlite3.IntegrityError, match="closed by switchyard"):
            places.put_session(agent, ACME, "u0", "new", {})


def test_a_killed_mover_leaves_the_flag_down(target: Place) -> None:
    with target.open() as there:
        assert isinstance(there, sqlite.SqliteStore)
        there.connection.execute("BEGIN")
        there._raise_flag()
        # No COMMIT: the process died here.
    assert target.run("SELECT writing FROM switchyard_guard") == [(0,)]


def test_closing_waits_for_the_writer_and_others_wait_for_it(live: Place) -> None:
    with live.connect() as writer:
        writer.execute("BEGIN IMMEDIATE")
        places.put_event(writer, ACME, *S0, "open", second=30)

        def close() -> None:
            with live.open() as store:
                store.take(mover=False, agents=False)

        closing_ = Thread(close)
        closing_.join(0.2)
        assert closing_.is_alive()
        writer.execute("COMMIT")
        closing_.result()
        with pytest.raises(sqlite3.IntegrityError, match="closed by switchyard"):
            places.put_event(writer, ACME, *S0, "late", second=31)
    assert live.run("SELECT count(*) FROM events WHERE app_name = ?", ACME) == [(16,)]


@pytest.mark.parametrize("mode", ["delete", "wal"])
def test_a_reader_from_before_closing_can_not_write_after_it(live: Place, mode: str) -> None:
    live.run(f"PRAGMA journal_mode = {mode}")
    with live.connect() as writer, live.open() as store:
        writer.execute("PRAGMA busy_timeout = 100")
        writer.execute("BEGIN")
        writer.execute("SELECT * FROM switchyard_guard").fetchall()
        with suppress(StoreBusy):
            # In mode delete closing waits for the reader, in vain; in wal it does not wait.
            store.take(mover=False, agents=False)
        closed = not store.guard().agents  # type: ignore[union-attr]
        assert closed == (mode == "wal")
        if closed:
            with pytest.raises(sqlite3.OperationalError):
                places.put_event(writer, ACME, *S0, "late", second=31)


def test_a_long_writer_makes_closing_busy_not_stuck(live: Place) -> None:
    with live.connect() as writer, live.open() as store:
        writer.execute("BEGIN IMMEDIATE")
        began = time.monotonic()
        with pytest.raises(StoreBusy):
            store.take(mover=False, agents=False)
        assert time.monotonic() - began < 6


@pytest.fixture
def busy(live: Place) -> Iterator[list[int]]:
    """Six agents that write one tenant all the time, waiting as google-adk's driver does."""
    stop, turns = threading.Event(), [0]

    def write(number: int) -> None:
        with live.connect() as agent:
            while not stop.is_set():
                with suppress(sqlite3.Error):
                    agent.execute("BEGIN IMMEDIATE")
                    agent.execute(
                        "UPDATE sessions SET state = ? WHERE app_name = ? AND id = 's0'",
                        (f'{{"n": {turns[0]}}}', ACME),
                    )
                    time.sleep(0.005)
                    agent.execute("COMMIT")
                    turns[0] += 1
                    continue
                if agent.in_transaction:
                    agent.execute("ROLLBACK")
                stop.wait(0.005)

    threads = [Thread(lambda n=n: write(n)) for n in range(6)]  # type: ignore[misc]
    while turns[0] < 6:
        stop.wait(0.01)
    yield turns
    stop.set()
    for thread in threads:
        thread.result()


def test_busy_writers_do_not_starve_closing(live: Place, busy: list[int]) -> None:
    with live.open() as store:
        began = time.monotonic()
        store.take(mover=False, agents=False)
        assert time.monotonic() - began < 3


def big_tenant(place: Place, *, sessions: int, events: int, size: int) -> None:
    with place.connect() as agent:
        agent.execute("BEGIN")
        for number in range(sessions):
            places.put_session(agent, ACME, "big", f"b{number:03}", {})
            agent.executemany(
                "INSERT INTO events VALUES (?, ?, 'big', ?, 'i', ?, ?)",
                [
                    (
                        f"b{number}-{n}",
                        ACME,
                        f"b{number:03}",
                        "2026-01-01 00:00:00",
                        f'"{"x" * size}"',
                    )
                    for n in range(events)
                ],
            )
        agent.execute("COMMIT")


def test_a_long_copy_lets_live_turns_through(live: Place, target: Place) -> None:
    """30 MB in one call; an agent of the source whose driver waits 0.5 s never fails."""
    big_tenant(live, sessions=100, events=10, size=30_000)
    stop = threading.Event()
    waits = []

    def talk() -> None:
        with live.connect() as agent:
            agent.execute("PRAGMA busy_timeout = 500")
            while not stop.is_set():
                began = time.monotonic()
                places.run(agent, "UPDATE sessions SET state = '{}' WHERE app_name = ?", BOLT)
                waits.append(time.monotonic() - began)
                stop.wait(0.01)

    with live.open() as here, target.open() as there:
        keys = [key for key, _ in here.page(START, 1000)]
        talking = Thread(talk)
        copied = copy(here, there, keys).copied
        digests = there.digests(keys)
        stop.set()
        talking.result()
        assert len(copied) == len(digests) == 105
        assert len(list(here.bites(keys))) > 5  # type: ignore[attr-defined]
    assert len(waits) > 3


def test_a_copy_keeps_no_agent_of_a_wal_source_waiting(live: Place, target: Place) -> None:
    live.run("PRAGMA journal_mode = wal")
    with target.open() as there, live.connect() as agent:
        assert isinstance(there, sqlite.SqliteStore)
        agent.execute("PRAGMA busy_timeout = 0")
        there.connection.execute("ATTACH ? AS source", (f"file:{live.path}",))
        there.choose([S0])
        with there.writing():
            assert set(there.chosen_stamps("source", ACME)) == {S0}
            places.put_event(agent, ACME, *S0, "meanwhile", second=30)
            # One snapshot for the whole bite.
            assert there.chosen_stamps("source", ACME)[S0].split("/")[1] == "3"


def test_memory_does_not_grow_with_the_tenant(live: Place, target: Place) -> None:
    big_tenant(live, sessions=2, events=200, size=50_000)
    with live.open() as here, target.open() as there:
        tracemalloc.start()
        keys = [Key("big", "b000"), Key("big", "b001")]
        copy(here, there, keys)
        there.digests(keys)
        there.mark()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 2_000_000


def test_null_and_empty_text_have_different_digests(source: Place) -> None:
    with source.open() as store:
        source.run("UPDATE events SET event_data = NULL WHERE id = 's0-e1'")
        before = store.digests([S0])[S0].events
        source.run("UPDATE events SET event_data = '' WHERE id = 's0-e1'")
        assert store.digests([S0])[S0].events != before


def test_text_that_is_not_utf8_goes_over_to_the_bit(source: Place, target: Place) -> None:
    source.run("UPDATE events SET event_data = CAST(x'22ff22' AS TEXT) WHERE id = 's0-e1'")
    with source.open() as here, target.open() as there:
        copy(here, there, [S0])
        assert there.digests([S0])[S0].events == here.digests([S0])[S0].events
    found = target.run(
        "SELECT hex(event_data), typeof(event_data) FROM events"
        " WHERE id = 's0-e1' AND app_name = ?",
        ACME,
    )
    assert found == [("22FF22", "text")]


def test_a_store_whose_file_is_not_there_yet_is_made_by_provisioning_only(
    empty: Place,
) -> None:
    with empty.open() as store:
        assert store.survey().schema_version == ""
        assert not Path(empty.path).exists()
        store.provision()
        store.adopt(None, mover=True, agents=False)
        assert store.survey().schema_version == "1"
    assert Path(empty.path).exists()


def test_events_of_no_session_are_counted_and_stay(source: Place, target: Place) -> None:
    with closing(sqlite3.connect(source.path)) as agent:  # foreign keys are off here
        agent.execute("DELETE FROM sessions WHERE app_name = ? AND id = 's0'", (ACME,))
        agent.commit()
    with source.open() as here, target.open() as there:
        assert [finding.field for finding in here.survey().findings] == ["events.session_id"]
        copy(here, there, [S0, *(key for key, _ in here.page(START, 100))])
        assert there.counts() == here.counts()
        assert S0 not in there.digests([S0])
