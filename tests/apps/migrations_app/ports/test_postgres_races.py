"""The races that shaped the guard, run on a real PostgreSQL."""

from __future__ import annotations

import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sized
from contextlib import suppress

import psycopg
import pytest
from psycopg import sql

from migrations_app.ports import copy, postgres
from migrations_app.ports.base import (
    START,
    Guard,
    Key,
    SessionStore,
    StoreBusy,
    Unreachable,
)
from tests.apps.migrations_app.ports import places
from tests.apps.migrations_app.ports.places import ACME, BOLT, Place, Thread

S0, S2 = Key("u0", "s0"), Key("u0", "s2")


@pytest.fixture
def dialect() -> str:
    return "postgresql"


@pytest.fixture
def live(source: Place) -> Place:
    """A source under move 1's guard, its agents writing."""
    with source.open() as store:
        store.provision()
        store.adopt(None, mover=False, agents=True)
    return source


@pytest.fixture
def role(server_url: str, source: Place) -> Iterator[str]:
    """A second role, as agents have: rights on ADK's tables, none on the guard."""
    name = f"agent_{secrets.token_hex(4)}"
    with psycopg.connect(source.url, autocommit=True) as admin:
        role = sql.Identifier(name)
        # Its name is its password: the server may ask for one.
        admin.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(role, sql.Literal(name)))
        admin.execute(sql.SQL("GRANT USAGE ON SCHEMA public TO {}").format(role))
        admin.execute(
            sql.SQL(
                "GRANT SELECT, INSERT, UPDATE, DELETE ON app_states, user_states, sessions, events"
                " TO {}"
            ).format(role)
        )
        yield name
        admin.execute(sql.SQL("DROP OWNED BY {}").format(role))
        admin.execute(sql.SQL("DROP ROLE {}").format(role))


def close(place: Place, *, claim: int = 1) -> None:
    with place.open(claim=claim) as store:
        store.take(mover=False, agents=False)


def count(place: Place) -> int:
    return int(place.run("SELECT count(*) FROM events WHERE app_name = ?", ACME)[0][0])


def test_closing_waits_for_an_open_writer(live: Place) -> None:
    with psycopg.connect(live.url) as writer:
        places.put_event(writer, ACME, *S0, "open", second=30)
        closing = Thread(lambda: close(live))
        closing.join(0.3)
        assert closing.is_alive()
        writer.commit()
        closing.result()
    # What the scan after closing reads is all there will be.
    assert count(live) == 16


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_a_writer_that_began_before_closing_and_writes_after_it_fails(
    live: Place, isolation: str
) -> None:
    with psycopg.connect(live.url) as writer:
        writer.execute(f"SET TRANSACTION ISOLATION LEVEL {isolation}")
        writer.execute("SELECT count(*) FROM sessions")
        close(live)
        with pytest.raises(
            psycopg.OperationalError if isolation != "READ COMMITTED" else psycopg.Error
        ):
            places.put_event(writer, ACME, *S0, "late", second=30)
        writer.rollback()
    assert count(live) == 15


def test_closing_is_seen_by_its_own_error_code(live: Place) -> None:
    close(live)
    with (
        pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState) as caught,
        live.connect() as agent,
    ):
        places.put_event(agent, ACME, *S0, "late", second=30)
    assert str(caught.value).startswith("closed by switchyard")


def test_a_writer_older_than_the_guard_row_is_named_until_it_ends(source: Place) -> None:
    with psycopg.connect(source.url) as old:
        old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        old.execute("SELECT count(*) FROM sessions")
        with source.open() as store:
            store.provision()
            store.adopt(None, mover=False, agents=True)
            noted = store.older_writers()
            with psycopg.connect(source.url) as young:
                young.execute("SELECT 1")
                assert store.still_writing(noted) == [f"pid {old.info.backend_pid}"]
            close(source)
            # The leak that makes DRAIN wait: its snapshot has no guard row.
            places.put_event(old, ACME, *S0, "leak", second=30)
            assert store.still_writing(noted) == [f"pid {old.info.backend_pid}"]
            old.commit()
            assert store.still_writing(noted) == []
    assert count(source) == 16


def test_a_writer_of_another_role_is_named_too(live: Place, role: str) -> None:
    with live.open() as store, psycopg.connect(live.url, user=role, password=role) as old:
        old.execute("SELECT count(*) FROM sessions")
        # A backend that starts or ends at this moment is of no database yet, and is noted too.
        noted = store.older_writers()
        assert store.still_writing(noted) == [f"pid {old.info.backend_pid}"]


def test_a_writer_in_another_database_is_nobodys_business(live: Place, target: Place) -> None:
    with live.open() as store, psycopg.connect(target.url) as other:
        other.execute("SELECT count(*) FROM sessions")
        # Somebody who is just connecting has no database yet, and counts for that moment.
        writers = store.still_writing(store.older_writers())
        assert f"pid {other.info.backend_pid}" not in writers


def test_our_own_handle_is_not_an_older_writer(live: Place) -> None:
    with live.open() as store:
        assert isinstance(store, postgres.PostgresStore)
        with store.transaction("BEGIN"):
            store.run("SELECT count(*) FROM {sessions}")
            assert store.still_writing(store.older_writers()) == []


def test_a_role_without_rights_on_the_guard_writes_while_it_is_open(live: Place, role: str) -> None:
    with psycopg.connect(live.url, user=role, password=role, autocommit=True) as agent:
        places.put_event(agent, ACME, *S0, "mine", second=30)
        places.put_event(agent, BOLT, "u0", "s0", "mine", second=30)
        close(live)
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
            places.put_event(agent, ACME, *S0, "late", second=31)
        places.put_event(agent, BOLT, "u0", "s0", "other tenant", second=31)
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            agent.execute("SELECT * FROM switchyard_guard")


def test_a_callers_search_path_does_not_fool_the_trigger(live: Place, role: str) -> None:
    close(live)
    with live.connect() as admin:
        admin.execute(
            "CREATE SCHEMA mine; GRANT USAGE ON SCHEMA mine TO PUBLIC;"
            "CREATE FUNCTION mine.never(varchar, varchar) RETURNS bool LANGUAGE sql"
            " AS 'SELECT false';"
            "CREATE OPERATOR mine.= (LEFTARG = varchar, RIGHTARG = varchar, FUNCTION = mine.never)"
        )
        try:
            with psycopg.connect(live.url, user=role, password=role, autocommit=True) as agent:
                agent.execute("SET search_path = mine, pg_catalog, public")
                with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
                    agent.execute(
                        "INSERT INTO user_states VALUES ('support.acme', 'u9', '{}', now())"
                    )
        finally:
            admin.execute("DROP SCHEMA mine CASCADE")


def test_a_backend_stuck_in_copy_is_ended_by_the_next_claim(source: Place, target: Place) -> None:
    with source.open() as here, target.open(claim=1) as stuck, target.open(claim=2) as later:
        assert isinstance(stuck, postgres.PostgresStore)
        stuck.connection.execute("BEGIN")
        stuck.run(
            "SELECT 1 FROM {guard} WHERE app_name = %(app)s AND claim = 1 AND mover FOR SHARE"
        )
        stuck.run("SELECT set_config('switchyard.mover', 'x', true)")
        copying = stuck.connection.cursor().copy("COPY sessions FROM STDIN")
        into = copying.__enter__()
        into.write("support.acme\tu0\ts0\t{}\t2026-01-01\t2026-01-01\n")
        # Its worker has been stopped here, in the middle of a row's bytes, with the guard held.
        began = time.monotonic()
        later.take(mover=True, agents=False)
        assert time.monotonic() - began < 3
        assert len(copy(here, later, [S0]).copied) == 1
        with suppress(psycopg.Error):
            copying.__exit__(None, None, None)
        with pytest.raises(Unreachable):
            stuck.delete([S0])


def test_a_claim_ends_only_lower_claims_of_its_own_move(target: Place) -> None:
    with (
        target.open(claim=3) as later,
        target.open(claim=3) as equal,
        target.open(claim=12) as higher,
        target.open(move=11, claim=1) as other_move,
        target.open(app_name=BOLT, move=0, claim=0) as looking,
        target.open(claim=2) as lower,
    ):
        later.take(mover=True, agents=False)
        for store in (equal, higher, other_move, looking):
            store.counts()
        with pytest.raises(Unreachable):
            lower.counts()


def test_adopting_ends_what_an_ended_move_left_hanging(target: Place) -> None:
    with target.open(claim=1) as stuck, target.open(move=2) as new:
        assert isinstance(stuck, postgres.PostgresStore)
        stuck.connection.execute("BEGIN")
        stuck.run("SELECT 1 FROM {guard} FOR SHARE")
        new.adopt(new.guard(), mover=True, agents=False)
        assert new.guard() == Guard(2, 1, True, False)


class Busy:
    """Twelve agents that write one tenant all the time, each on its own session."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.stop = threading.Event()
        self.turns = 0
        self.threads = [Thread(lambda n=n: self._write(n)) for n in range(12)]  # type: ignore[misc]

    def _write(self, number: int) -> None:
        with psycopg.connect(self.place.url) as agent:
            while not self.stop.is_set():
                with suppress(psycopg.Error):
                    agent.execute(
                        "UPDATE sessions SET update_time = now() WHERE app_name = %s AND id = %s",
                        (ACME, f"busy{number}"),
                    )
                    self.stop.wait(0.02)
                    agent.commit()
                    self.turns += 1
                    continue
                agent.rollback()
                self.stop.wait(0.05)

    def end(self) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.result()


@pytest.fixture
def busy(live: Place) -> Iterator[Busy]:
    with live.connect() as agent:
        for number in range(12):
            places.put_session(agent, ACME, "u0", f"busy{number}", {})
    writers = Busy(live)
    while writers.turns < 24:
        writers.stop.wait(0.01)
    yield writers
    writers.end()


def test_busy_writers_do_not_starve_closing(live: Place, busy: Busy) -> None:
    began = time.monotonic()
    close(live)
    assert time.monotonic() - began < 5
    closed_at = busy.turns
    busy.stop.wait(0.2)
    # At most what had passed the trigger before; nothing since.
    assert busy.turns - closed_at == 0


def test_provisioning_gives_up_soon_and_goes_on_later(source: Place) -> None:
    with psycopg.connect(source.url) as writer:
        places.put_event(writer, BOLT, "u0", "s0", "open", second=30)
        with source.open() as store:
            began = time.monotonic()
            with pytest.raises(StoreBusy):
                store.provision()
            assert time.monotonic() - began < 3
            writer.commit()
            store.provision()
            assert store.survey().can_close


def test_a_long_writer_makes_closing_busy_not_stuck(live: Place) -> None:
    with psycopg.connect(live.url) as writer:
        places.put_event(writer, ACME, *S0, "open", second=30)
        began = time.monotonic()
        with pytest.raises(StoreBusy):
            close(live)
        assert time.monotonic() - began < 6
        # Other tenants were never kept for long, and the store is as open as before.
        with live.connect() as agent:
            places.put_event(agent, BOLT, "u0", "s0", "new", second=30)
            places.put_event(agent, ACME, "u1", "s1", "new", second=30)


def test_a_deadlock_is_tried_again(source: Place, target: Place) -> None:
    with source.open() as here, target.open() as there:
        copied = copy(here, there, [S0, S2]).copied
        with psycopg.connect(target.url) as writer:
            # So that the server always chooses us.
            writer.execute("SET deadlock_timeout = '20s'")
            writer.execute("SET switchyard.mover = 'agent'")
            writer.execute(
                "SELECT 1 FROM sessions WHERE app_name = %s AND id = 's2' FOR UPDATE", (ACME,)
            )
            deleting = Thread(
                lambda: there.delete_unchanged({k: c.target for k, c in copied.items()})
            )
            somebody_waits(target)
            # We hold s0 and want s2; the writer holds s2 and wants s0.
            writer.execute(
                "SELECT 1 FROM sessions WHERE app_name = %s AND id = 's0' FOR UPDATE", (ACME,)
            )
            writer.commit()
            assert set(deleting.result()) == {S0, S2}


def somebody_waits(place: Place) -> None:
    """Wait until some backend of the database waits for another's row."""
    for _ in range(500):
        if place.run(
            "SELECT 1 FROM pg_stat_activity WHERE datname = current_database()"
            " AND wait_event_type = 'Lock'"
        ):
            return
        time.sleep(0.01)
    raise AssertionError("nobody waits")


def test_a_claim_that_takes_over_waits_for_a_write_under_way(source: Place, target: Place) -> None:
    with source.open() as here, target.open(claim=1) as slow, target.open(claim=2) as later:
        copy(here, slow, [S0])
        assert isinstance(slow, postgres.PostgresStore)
        # A name that the later claim does not end: as if the server were slow to do it.
        slow.connection.execute("SET application_name = 'slow'")
        with slow.writing():
            slow.remove([S0])
            taking = Thread(lambda: later.take(mover=True, agents=False))
            taking.join(0.3)
            assert taking.is_alive()
        taking.result()
        assert later.page(START, 5) == []


def test_a_write_waits_for_no_lock_longer_than_a_lease(source: Place, target: Place) -> None:
    with source.open() as here, target.open() as there:
        copied = copy(here, there, [S0]).copied
        with psycopg.connect(target.url) as writer:
            writer.execute("SET switchyard.mover = 'agent'")
            writer.execute("SELECT 1 FROM sessions FOR UPDATE")
            began = time.monotonic()
            with pytest.raises(StoreBusy):
                there.delete(list(copied))
            assert time.monotonic() - began < 10


def test_an_edit_between_surveying_and_deleting_leaves_the_session(
    source: Place, target: Place
) -> None:
    with source.open() as here, target.open() as there:
        copied = copy(here, there, [S0, S2]).copied
        stamps = {key: stamp.target for key, stamp in copied.items()}
        with psycopg.connect(target.url) as writer:
            writer.execute("SET switchyard.mover = 'agent'")
            writer.execute("UPDATE events SET event_data = '{}' WHERE id = 's0-e1'")
            deleting = Thread(lambda: there.delete_unchanged(stamps))
            somebody_waits(target)
            writer.commit()
            assert deleting.result() == [S2]


@pytest.mark.parametrize(
    "work",
    [
        "page",
        "stamps",
        "digests",
        "session",
        "shared",
        "shared page",
        "delete",
        "delete unchanged",
    ],
)
def test_a_chunk_reads_its_own_rows_only_even_without_statistics(target: Place, work: str) -> None:
    """A planner that knows nothing of the table must not read the whole tenant for one chunk."""
    target.run(
        "SET switchyard.mover = 'filling'; ALTER TABLE sessions SET (autovacuum_enabled = false);"
        "ALTER TABLE events SET (autovacuum_enabled = false);"
        "ALTER TABLE user_states SET (autovacuum_enabled = false);"
        f"INSERT INTO user_states SELECT '{ACME}', 'u' || n, '{{}}', now()"
        " FROM generate_series(1, 2000) n;"
        f"INSERT INTO sessions SELECT '{ACME}', 'u' || n, 's' || n, '{{}}', now(), now()"
        " FROM generate_series(1, 2000) n;"
        f"INSERT INTO events SELECT n || '-' || e, '{ACME}', 'u' || n, 's' || n, 'i', now(), '{{}}'"
        " FROM generate_series(1, 2000) n, generate_series(1, 5) e"
    )
    keys = [Key(f"u{n}", f"s{n}") for n in range(1, 21)]
    with target.open() as store:
        store.counts()
        before = _rows_read(store, target)
        works: dict[str, Callable[[], Sized]] = {
            "page": lambda: store.page(START, 20),
            "stamps": lambda: store.stamps(keys),
            "digests": lambda: store.digests(keys),
            "session": lambda: store.session(keys[0])["events"],  # type: ignore[index]
            "shared": lambda: store.shared([key.user_id for key in keys]),
            "shared page": lambda: store.shared_page("u1", 20),
            "delete": lambda: range(store.delete(keys)),
            "delete unchanged": lambda: store.delete_unchanged(dict.fromkeys(keys, "other")),
        }
        assert len(works[work]()) == {"session": 5, "delete unchanged": 0}.get(work, 20)
        assert _rows_read(store, target) - before < 1000


def _rows_read(store: SessionStore, place: Place) -> int:
    """Return how many rows of ADK's tables have been read so far, whichever way."""
    assert isinstance(store, postgres.PostgresStore)
    store.connection.execute("SELECT pg_stat_force_next_flush()")
    return int(
        place.run(
            "SELECT sum(coalesce(idx_tup_fetch, 0) + seq_tup_read) FROM pg_stat_user_tables"
            " WHERE relname IN ('sessions', 'events', 'user_states')"
        )[0][0]
    )


def test_memory_does_not_grow_with_the_tenant(source: Place, target: Place) -> None:
    """60 MB in one session: the worker's memory peaks where it does for three events."""
    source.run(
        "INSERT INTO events SELECT 'big' || n, ?, 'u0', 's0', 'i', '2026-01-01',"
        " jsonb_build_object('text', repeat(md5(n::text), 6000)) FROM generate_series(1, 300) n",
        ACME,
    )
    script = (
        "import resource, sys\n"
        "from migrations_app.ports import copy, digests_of_both, open_store\n"
        "from migrations_app.ports.base import Key\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024\n"
        "named = dict(app_name='support.acme', move=1, claim=1)\n"
        "with (open_store('adk-sql', 'env:STORE_SOURCE', **named) as here,"
        " open_store('adk-sql', 'env:STORE_TARGET', **named) as there):\n"
        "    for name in ('s2', 's0'):\n"
        "        copy(here, there, [Key('u0', name)])\n"
        "        ours, theirs = digests_of_both(here, there, [Key('u0', name)])\n"
        "        here.mark()\n"
        "        print(len(ours) == len(theirs) == 1, peak())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    (fine, small), (also_fine, large) = (line.split() for line in done.stdout.splitlines())
    assert (fine, also_fine) == ("True", "True")
    assert int(large) - int(small) < 16


def test_engine_connections_carry_the_claim_and_end_themselves(target: Place) -> None:
    with target.open(move=147, claim=12) as store:
        assert isinstance(store, postgres.PostgresStore)
        names = target.run(
            "SELECT application_name FROM pg_stat_activity WHERE datname = current_database()"
        )
        (limit,) = store.rows("SHOW idle_in_transaction_session_timeout")[0]
    assert ("switchyard mv-147 claim 12",) in names
    assert limit == "15s"
