"""Who may write a tenant in a PostgreSQL store: the guard row, the closing trigger, old writers.

The races that shaped this were run; each rule's reason stands beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Literal

import psycopg
from psycopg import sql

from durable.machine import Overtaken
from migrations_app.domain.values import OURS
from migrations_app.ports import schema
from migrations_app.ports.base import Guard, StoreBusy
from migrations_app.ports.guard_words import nonce_id, refuse
from migrations_app.ports.postgres_link import SHORT, WRITE, PostgresLink

# Closing: plain tries of 1 s each, then tries in the fair queue.
PLAIN_TRIES = 2
FAIR_TRIES = 5
# Writers of every tenant stand behind the queue for as long as it waits.
FAIR = f"{WRITE}; SET LOCAL lock_timeout = '200ms'; SET LOCAL statement_timeout = '1s'"
# A writer that holds a session's row while it waits for ours: a deadlock ends after 1 s (the
# server's deadlock_timeout), anything longer is worth a clean StoreBusy.
CHUNK_LOCKS = "SET LOCAL lock_timeout = '5s'"

_GUARD_TABLE = """
CREATE TABLE IF NOT EXISTS {guard} (
  app_name varchar(128) PRIMARY KEY,
  move bigint NOT NULL,
  claim bigint NOT NULL,
  mover boolean NOT NULL,
  agents boolean NOT NULL
)"""

_NONCE_TABLE = """
CREATE TABLE IF NOT EXISTS {nonces} (
  nonce varchar(128) PRIMARY KEY,
  written_at timestamptz NOT NULL DEFAULT now()
)"""

# FOR SHARE and not a plain read: closing is an UPDATE of the row and so waits for open writers, and
# writers that come later see it. A plain read lets a transaction that wrote before closing commit
# after the scan; an advisory lock lets repeatable-read writers through (both were tried).
# SECURITY DEFINER: the agents' role has no right on the guard, and with the invoker's rights every
# tenant of the store would fail. The fixed search_path keeps a caller's own tables out of it.
# 55000 and never class 23: ADK takes an integrity error for "already exists".
_GATE_BODY = """
DECLARE
  is_open boolean;
BEGIN
  IF TG_OP <> 'DELETE' THEN
    SELECT agents INTO is_open FROM {guard} WHERE app_name = NEW.app_name FOR SHARE;
    IF FOUND AND NOT is_open THEN
      RAISE EXCEPTION 'closed by switchyard: this tenant is being moved or lives elsewhere'
        USING ERRCODE = '55000', HINT = 'Retry through the placement feed.';
    END IF;
  END IF;
  IF TG_OP = 'DELETE' OR (TG_OP = 'UPDATE' AND OLD.app_name IS DISTINCT FROM NEW.app_name) THEN
    SELECT agents INTO is_open FROM {guard} WHERE app_name = OLD.app_name FOR SHARE;
    IF FOUND AND NOT is_open THEN
      RAISE EXCEPTION 'closed by switchyard: this tenant is being moved or lives elsewhere'
        USING ERRCODE = '55000', HINT = 'Retry through the placement feed.';
    END IF;
  END IF;
  IF TG_OP = 'DELETE' THEN
    RETURN OLD;
  END IF;
  RETURN NEW;
END
"""

_GATE = """
CREATE OR REPLACE FUNCTION {gate}() RETURNS trigger LANGUAGE plpgsql
SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS {body}"""

# The mover sets the GUC for its transaction: a trigger that fired for each of its rows would make
# COPY take 1.5 to 1.95 times as long; with WHEN it takes 1.0.
_TRIGGER = """
CREATE TRIGGER switchyard_gate BEFORE INSERT OR UPDATE OR DELETE ON {table}
FOR EACH ROW WHEN (coalesce(current_setting('switchyard.mover', true), '') = '')
EXECUTE FUNCTION {gate}()"""

# Sessions that can't write rows, and ourselves. A row of another role hides its backend_type.
_OLD_WRITERS = """
SELECT 'v:' || extract(epoch FROM pg_postmaster_start_time())::bigint || ':' || l.virtualxid,
       'pid ' || l.pid
FROM pg_catalog.pg_locks l LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'virtualxid' AND l.pid <> pg_backend_pid()
  AND (a.datname IS NULL OR a.datname = current_database())
  AND coalesce(a.backend_type, '') NOT IN
      ('autovacuum worker', 'autovacuum launcher', 'walsender', 'checkpointer')
UNION ALL
SELECT 'p:' || transaction, 'prepared transaction ' || gid
FROM pg_catalog.pg_prepared_xacts WHERE database = current_database()
ORDER BY 1"""


class PostgresGuard(PostgresLink):
    """The guard of one tenant in one store."""

    def guard(self) -> Guard | None:
        """Return the tenant's guard row; None if there is none, or no guard table."""
        if not self.exists("guard"):
            return None
        with self.clean():
            row = self.run(
                "SELECT move, claim, mover, agents FROM {guard} WHERE app_name = %(app)s"
            ).fetchone()
        return Guard(*row) if row else None

    def guards(self, among: Collection[str] = ()) -> dict[str, Guard]:
        """Return every tenant's guard row in this store, by app name."""
        if not self.exists("guard"):
            return {}
        with self.clean():
            rows = self.rows("SELECT app_name, move, claim, mover, agents FROM {guard}")
        return {app_name: Guard(*row) for app_name, *row in rows}

    # --- provisioning --------------------------------------------------------------------

    def provision(self) -> None:
        """Make ADK's tables where they are missing, the guard table and the closing trigger.

        Idempotent. Each table's trigger is its own transaction with waits of 1 s:
        CREATE TRIGGER waits for the table's open writers, and everybody else's waits
        behind it. Raises StoreBusy, to be tried again; what was made stays.
        """
        with self.transaction(SHORT):
            # Two provisioners, or ADK starting at the same moment: "IF NOT EXISTS" alone races.
            self.run("SELECT pg_advisory_xact_lock(hashtext('switchyard.provision'))")
            missing = set(schema.TABLES) - set(self.columns())
            if missing:
                prefix = sql.Identifier(self.schema).as_string(self.connection) + "."
                for statement in schema.tables(self.dialect, missing, prefix=prefix):
                    self.connection.execute(statement.encode())
        self.forget_columns()
        with self.transaction(SHORT):
            self.run("SELECT pg_advisory_xact_lock(hashtext('switchyard.provision'))")
            if not self.exists("guard"):
                self.define(_GUARD_TABLE)
            if not self.exists("nonces"):
                self.define(_NONCE_TABLE)
            body = self.fill(_GATE_BODY).as_string(self.connection)
            if self._gate_body() != body:
                self.define(_GATE, body=sql.Literal(body))
        for table in schema.TABLES:
            with self.transaction(SHORT):
                state = self._trigger(table)
                if state == "wrong":
                    # Not "DROP IF EXISTS" each time: even where there is nothing to drop it takes
                    # the table's strongest lock, which stops readers too.
                    self.define("DROP TRIGGER switchyard_gate ON {table}", table=self._name(table))
                if state != "right":
                    self.define(_TRIGGER, table=self._name(table))

    def can_close(self) -> bool:
        """Whether every table has the closing trigger, enabled."""
        with self.clean():
            return self._gate_body() is not None and all(
                self._trigger(table) == "right" for table in schema.TABLES
            )

    def _gate_body(self) -> str | None:
        row = self.run(
            "SELECT p.prosrc FROM pg_catalog.pg_proc p WHERE p.prosecdef"
            " AND p.oid = to_regprocedure(%(gate)s)",
            {"gate": f"{self.text_name('gate')}()"},
        ).fetchone()
        return row[0] if row else None

    def _trigger(self, table: str) -> Literal["right", "wrong", "missing"]:
        row = self.run(
            "SELECT t.tgenabled IN ('O', 'A') AND t.tgfoid = to_regprocedure(%(gate)s)"
            " FROM pg_catalog.pg_trigger t WHERE t.tgrelid = to_regclass(%(table)s)"
            " AND t.tgname = 'switchyard_gate'",
            {"table": self.text_name(table), "gate": f"{self.text_name('gate')}()"},
        ).fetchone()
        if row is None:
            return "missing"
        return "right" if row[0] else "wrong"

    def _name(self, table: str) -> sql.Identifier:
        return sql.Identifier(self.schema, table)

    # --- the guard row -------------------------------------------------------------------

    def adopt(self, found: Guard | None, *, mover: bool, agents: bool) -> None:
        """Make the guard row this move's, if it is still what the survey `found`.

        May be repeated under the same move. The row's (move, claim) only ever rises: a worker
        that surveyed, slept through the whole move and woke would else find its own move's
        row, match it, close the tenant's new home and clear it (tried). Raises GuardTaken if
        somebody else was first, Overtaken if a later claim or move was, StoreBusy.
        """
        self._end_lower_claims()
        if found is not None and found.move != self.move:
            # An ended move's backend may still hang in a COPY and hold the row.
            self._end_backends(found.move, found.claim)
        old = found or Guard(-1, -1, False, False)

        def swap() -> None:
            done = self.run(
                "UPDATE {guard} SET move = %(move)s, claim = %(claim)s, mover = %(mover)s,"
                " agents = %(agents)s WHERE app_name = %(app)s"
                " AND ((move = %(old_move)s AND claim = %(old_claim)s AND move < %(move)s)"
                " OR (move = %(move)s AND claim <= %(claim)s))",
                {
                    "mover": mover,
                    "agents": agents,
                    "old_move": old.move,
                    "old_claim": old.claim,
                },
            ).rowcount
            if not done and found is None:
                done = self.run(
                    "INSERT INTO {guard} (app_name, move, claim, mover, agents) VALUES"
                    " (%(app)s, %(move)s, %(claim)s, %(mover)s, %(agents)s) ON CONFLICT DO NOTHING",
                    {"mover": mover, "agents": agents},
                ).rowcount
            if not done:
                refuse(self.guard(), where=self.where, move=self.move, adopting=True)

        self._patiently(swap)

    def take(self, *, mover: bool, agents: bool) -> None:
        """Set claim and flags in a short transaction; first end backends of lower claims.

        Flags are set, never matched, so each step can run again. Closing (agents
        False) waits for the tenant's open writers; raises StoreBusy after 4 s at most.
        Raises Overtaken if a later claim, or another move, holds the row.

        While agents write, each of them holds the row FOR SHARE and this waits for
        them: take a live source only to close it, never once a chunk.
        """
        self._end_lower_claims()

        def put() -> None:
            done = self.run(
                "UPDATE {guard} SET claim = %(claim)s, mover = %(mover)s, agents = %(agents)s"
                " WHERE app_name = %(app)s AND move = %(move)s AND claim <= %(claim)s",
                {"mover": mover, "agents": agents},
            ).rowcount
            if not done:
                refuse(self.guard(), where=self.where, move=self.move, adopting=False)

        self._patiently(put)

    def disown(self) -> None:
        """Take the guard row away, where it is this claim's."""
        with self.transaction(SHORT):
            self.run(
                "DELETE FROM {guard} WHERE app_name = %(app)s AND move = %(move)s"
                " AND claim = %(claim)s"
            )

    def _patiently(self, change: Callable[[], None]) -> None:
        """Change the guard row among busy writers without making anybody wait long.

        A waiting UPDATE does not queue: new FOR SHARE readers walk past it, and twelve
        busy writers kept it out for 14 s (tried). LOCK TABLE is a fair queue, in
        which everybody waits behind us, so it comes second and for 200 ms at a time (20 ms, tried).
        """
        for _ in range(PLAIN_TRIES):
            with suppress(StoreBusy), self.transaction(SHORT):
                change()
                return
        for left in reversed(range(FAIR_TRIES)):
            try:
                with self.transaction(FAIR):
                    self.run("LOCK TABLE {guard} IN EXCLUSIVE MODE")
                    change()
                    return
            except StoreBusy:
                if not left:
                    raise
                time.sleep(0.05)

    # --- backends of dead workers --------------------------------------------------------

    def _end_lower_claims(self) -> None:
        """End backends of lower claims of this move.

        A backend stuck in COPY FROM STDIN, its worker stopped, ignores every time-out
        and pg_cancel_backend and keeps its lock on the guard row (tried).
        """
        self._end_backends(self.move, self.claim - 1)

    def _end_backends(self, move: int, up_to_claim: int) -> None:
        with self.clean():
            self.run(
                "SELECT pg_terminate_backend(pid) FROM pg_catalog.pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
                " AND usename = current_user AND application_name ~ %(name)s"
                " AND substring(application_name FROM '[0-9]+$')::numeric <= %(claim)s",
                {"name": f"^switchyard mv-{move} claim [0-9]+$", "claim": up_to_claim},
            )

    # --- writers older than the guard row ------------------------------------------------

    def older_writers(self) -> list[str]:
        """Return every other transaction open now in this database, of any role.

        Asked after the guard row is committed: a transaction that is older may not see
        it (a repeatable-read snapshot never does) and would write through it. Nothing
        tells which of them will write, so all count.
        """
        with self.clean():
            return [row[0] for row in self.rows(_OLD_WRITERS)]

    def still_writing(self, tokens: Sequence[str]) -> list[str]:
        """Return those of `older_writers` that still live, named for a person."""
        noted = set(tokens)
        with self.clean():
            return [row[1] for row in self.rows(_OLD_WRITERS) if row[0] in noted]

    # --- one place under two addresses ---------------------------------------------------

    def write_nonce(self, nonce: str) -> None:
        """Leave a random word, to be looked for through the other store."""
        with self.transaction(SHORT):
            if not self.exists("nonces"):
                self.define(_NONCE_TABLE)
            # Words of moves that died in between go with the next one.
            self.run("DELETE FROM {nonces} WHERE written_at < now() - interval '1 day'")
            self.run(
                "INSERT INTO {nonces} (nonce) VALUES (%(nonce)s) ON CONFLICT DO NOTHING",
                {"nonce": nonce},
            )

    def has_nonce(self, nonce: str) -> bool:
        """Whether that word is here: in the table of words, or as a service has left it."""
        named = {"nonce": nonce, "user": OURS, "id": nonce_id(nonce)}
        with self.clean():
            if self.exists("nonces") and self.rows(
                "SELECT 1 FROM {nonces} WHERE nonce = %(nonce)s", named
            ):
                return True
            return self.has_tables and bool(
                self.rows(
                    "SELECT 1 FROM {sessions} WHERE app_name = %(app)s AND user_id = %(user)s"
                    " AND id = %(id)s",
                    named,
                )
            )

    def clear_nonce(self, nonce: str) -> None:
        """Take the word away; nothing happens if it is gone."""
        if self.exists("nonces"):
            with self.transaction(SHORT):
                self.run("DELETE FROM {nonces} WHERE nonce = %(nonce)s", {"nonce": nonce})

    def folds_case(self) -> bool:
        """Return that they are not: this database compares bytes."""
        return False

    def keeps_ids(self) -> bool:
        """Whether a scratch session keeps the id it is given; rolled back, so nothing stays."""
        scratch = "Scratch-" + "x" * (schema.LONGEST_ID - 9) + " "
        with suppress(_Undo), self.transaction(SHORT):
            self._become_mover()
            row = self.run(
                "INSERT INTO {sessions} (app_name, user_id, id, state, create_time, update_time)"
                " VALUES (%(app)s, %(id)s, %(id)s, '{{}}', now(), now())"
                " RETURNING app_name, user_id, id",
                {"id": scratch},
            ).fetchone()
            kept = row == (self.app_name, scratch, scratch)
            raise _Undo
        return kept

    # --- transactions that write rows ----------------------------------------------------

    @contextmanager
    def writing(self) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
        """Run the body in one transaction that holds the guard row as this claim's.

        FOR SHARE: `take` of a later claim waits for us, or we see what it wrote and
        raise Overtaken. (An UPDATE held over a chunk deadlocks with ADK's own FOR
        UPDATE; tried.) Without the row a worker that slept past its lease could
        delete and re-copy a session that has taken new turns since.
        """
        with self.transaction(f"{WRITE}; {CHUNK_LOCKS}"):
            self._become_mover()
            held = self.run(
                "SELECT 1 FROM {guard} WHERE app_name = %(app)s AND move = %(move)s"
                " AND claim = %(claim)s AND mover FOR SHARE"
            ).fetchone()
            if held is None:
                raise Overtaken(
                    f"the guard in {self.where} is not mv-{self.move}'s, claim {self.claim}"
                )
            yield self.connection

    def _become_mover(self) -> None:
        self.run(
            "SELECT set_config('switchyard.mover', %(word)s, true)",
            {"word": f"mv-{self.move} claim {self.claim}"},
        )


class _Undo(Exception):
    """Rolls a transaction back on purpose."""
