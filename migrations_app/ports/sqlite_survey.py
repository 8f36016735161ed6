"""What an SQLite store is and holds: counted by SQLite, nothing changed."""

from __future__ import annotations

import os
import sqlite3
from typing import TYPE_CHECKING, Any

from migrations_app.domain.values import Layout
from migrations_app.ports import schema
from migrations_app.ports.base import Finding, Key, NotASessionStore, Survey
from migrations_app.ports.sqlite_link import quote

if TYPE_CHECKING:
    from migrations_app.ports.sqlite import SqliteStore

# A function call that nothing followed, or a turn that was told to stop.
_INTERRUPTED = """
SELECT user_id, id, count(*) OVER () FROM (
  SELECT s.user_id, s.id, (SELECT e.event_data FROM events e
    WHERE e.app_name = s.app_name AND e.user_id = s.user_id AND e.session_id = s.id
    ORDER BY e.timestamp DESC, e.id DESC LIMIT 1) AS d
  FROM sessions s WHERE s.app_name = :app)
WHERE json_valid(d) AND (json_extract(d, '$.error_code') = 'INVOCATION_ABORTED'
  OR EXISTS (SELECT 1 FROM json_each(d, '$.content.parts') p
    WHERE json_type(p.value) = 'object' AND json_type(p.value, '$.function_call') = 'object'))
ORDER BY user_id, id LIMIT :named"""

_NUL = "instr({0}, char(0)) > 0"

# (from, test, field, reason, example, blocks): each is counted over the tenant's rows.
_CHECKS: tuple[tuple[str, str, str, str, str, bool], ...] = (
    (
        "sessions",
        "length(user_id) > :longest OR length(id) > :longest",
        "sessions.id",
        "longer than the 128 characters of ADK's schema v1: rename or delete it",
        "substr(user_id, 1, 40) || '/' || substr(id, 1, 40)",
        True,
    ),
    (
        "sessions",
        f"{_NUL.format('user_id')} OR {_NUL.format('id')}",
        "sessions.id",
        "a NUL character in an id, which neither PostgreSQL nor a move's records can hold",
        "quote(user_id) || '/' || quote(id)",
        True,
    ),
    (
        "sessions",
        "user_id = '' OR id = ''",
        "sessions.id",
        "an empty id can't be told from shared state in a move's records: delete the session",
        "user_id || '/' || id",
        True,
    ),
    (
        "sessions",
        "typeof(user_id) <> 'text' OR typeof(id) <> 'text'",
        "sessions.id",
        "an id that is not text: google-adk did not write it",
        "quote(user_id) || '/' || quote(id)",
        True,
    ),
    (
        "sessions",
        "user_id <> trim(user_id) OR id <> trim(id)",
        "sessions.id",
        "white space around an id: it is kept exactly, other kinds of ADK stores would strip it",
        "user_id || '/' || id",
        False,
    ),
    (
        "sessions",
        "NOT json_valid(state) OR json_type(state) <> 'object'",
        "sessions.state",
        "not a JSON object: google-adk can't read the session; it is copied as it is",
        "user_id || '/' || id",
        False,
    ),
    (
        "events",
        "event_data IS NULL",
        "events.event_data",
        "NULL: google-adk reads such an event as an empty one; it is copied as it is",
        "user_id || '/' || session_id",
        False,
    ),
    (
        "events",
        f"length(id) > :longest OR {_NUL.format('id')}",
        "events.id",
        "longer than the 128 characters of ADK's schema v1, or with NUL, which another store may"
        " refuse",
        "user_id || '/' || session_id",
        False,
    ),
    (
        "events",
        "NOT EXISTS (SELECT 1 FROM sessions s WHERE s.app_name = r.app_name"
        " AND s.user_id = r.user_id AND s.id = r.session_id)",
        "events.session_id",
        "belongs to no session: google-adk never shows it, and it is not copied",
        "user_id || '/' || session_id",
        False,
    ),
    (
        "(SELECT DISTINCT app_name, user_id FROM sessions)",
        "NOT EXISTS (SELECT 1 FROM user_states t WHERE t.app_name = r.app_name"
        " AND t.user_id = r.user_id)",
        "user_states",
        "a user with sessions and without a state row, for whom append_event raises: the target"
        " is given an empty one",
        "user_id",
        False,
    ),
    (
        "(SELECT app_name, user_id, state FROM user_states"
        " UNION ALL SELECT app_name, '', state FROM app_states)",
        "NOT json_valid(state) OR json_type(state) <> 'object'",
        "user_states.state",
        "not a JSON object: google-adk can't read that user's sessions; it is copied as it is",
        "user_id",
        False,
    ),
)


def survey(store: SqliteStore) -> Survey:
    """Look at everything that a person should know before a move; read-only and counted in SQL."""
    columns = store.columns()
    schema_version = _version(store)
    required = {
        table: [
            row[1] for row in store.rows(f"PRAGMA table_info({table})") if row[3] and row[4] is None
        ]
        for table in columns
    }
    found = schema.unknown_columns(columns, required)
    counts = store.counts()
    events, has_app_state = 0, False
    interrupted: list[tuple[str, str, int]] = []
    if store.is_file and not os.access(store.path, os.W_OK):
        found.append(
            Finding("rights", "this process's user may not write the file: grant it", 1, "", True)
        )
    if schema_version:
        found += _index(store)
        params = {"app": store.app_name, "longest": schema.LONGEST_ID}
        for table, test, field, reason, example, blocks in _CHECKS:
            if field == "user_states" and store.layout is Layout.ADK_SQLITE:
                # SqliteSessionService makes the row when it first has something to keep there.
                continue
            # A statement each and no transaction around them: long snapshots keep agents waiting.
            count, where = store.rows(
                f"SELECT count(*), min({example}) FROM {table} r"
                f" WHERE r.app_name = :app AND ({test})",
                params,
            )[0]
            if count:
                found.append(Finding(field, reason, count, _shown(where), blocks))
        events = store.rows("SELECT count(*) FROM events WHERE app_name = :app", params)[0][0]
        interrupted = store.rows(_INTERRUPTED, {**params, "named": schema.NAMED})
        has_app_state = bool(store.rows("SELECT 1 FROM app_states WHERE app_name = :app", params))
    return Survey(
        kind=store.kind,
        database=f"SQLite {sqlite3.sqlite_version}",
        schema_version=schema_version,
        sessions=counts.sessions,
        users=counts.users,
        events=events,
        interrupted=interrupted[0][2] if interrupted else 0,
        clock_skew_seconds=0.0,  # the file has no clock but this machine's
        can_close=not any(finding.field == "rights" for finding in found),
        stamps_see_edits=False,
        findings=tuple(found),
        dialect=store.dialect,
        layout=store.layout,
        has_app_state=has_app_state,
        interrupted_keys=tuple(Key(user, name) for user, name, _ in interrupted),
        # SQLite enforces no types, so only names count.
        columns=tuple(f"{table}.{name}" for table, names in columns.items() for name in names),
    )


def _index(store: SqliteStore) -> list[Finding]:
    """Refuse events without an index by session: every stamp would read the whole table."""
    for row in store.rows("PRAGMA index_list(events)"):
        names = [column[2] for column in store.rows(f"PRAGMA index_info({quote(row[1])})")]
        if set(names[:3]) == {"app_name", "user_id", "session_id"}:
            return []
    return [
        Finding(
            "events",
            "no index begins with app_name, user_id, session_id, so each chunk would read the whole"
            " table: start google-adk's DatabaseSessionService on it once, which makes one",
            1,
            "",
            True,
        )
    ]


def _version(store: SqliteStore) -> str:
    version = None
    has_metadata = store.exists("adk_internal_metadata")
    if has_metadata:
        row = store.rows("SELECT value FROM adk_internal_metadata WHERE key = 'schema_version'")
        version = row[0][0] if row else None
    columns = store.columns()
    if "sessions" in columns:
        types = {row[1]: row[2] for row in store.rows("PRAGMA table_info(sessions)")}
        # Both of google-adk's services open the other's tables, and fail on them later.
        if (types.get("update_time") == "REAL") != (store.layout is Layout.ADK_SQLITE):
            theirs, kind = (
                ("DatabaseSessionService", "adk-sql")
                if store.layout is Layout.ADK_SQLITE
                else ("SqliteSessionService", "adk-sqlite")
            )
            raise NotASessionStore(
                f"The tables of {store.where} are those of google-adk's {theirs}, which kind"
                f" {store.kind} does not read: make it a store of kind {kind}."
            )
    return schema.check_version(
        columns, has_metadata=has_metadata, version=version, where=store.where
    )


def _shown(value: Any) -> str:
    return "" if value is None else str(value)
