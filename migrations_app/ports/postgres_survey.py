"""What a PostgreSQL store is and holds: counted in the database, nothing changed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from migrations_app.ports import schema
from migrations_app.ports.base import Finding, Key, Survey
from migrations_app.ports.postgres_link import BY_INDEX, SNAPSHOT, WHOLE

if TYPE_CHECKING:
    from migrations_app.ports.postgres import PostgresStore

RIGHTS = ("SELECT", "INSERT", "UPDATE", "DELETE")

# A function call that nothing followed, or a turn that was told to stop.
_INTERRUPTED = """
SELECT count(*), (array_agg(ARRAY[s.user_id, s.id] ORDER BY s.user_id, s.id))[1:%(named)s]
FROM {sessions} s CROSS JOIN LATERAL (
  SELECT e.event_data AS d FROM {events} e
  WHERE e.app_name = s.app_name AND e.user_id = s.user_id AND e.session_id = s.id
  ORDER BY e.timestamp DESC, e.id DESC LIMIT 1) last
WHERE s.app_name = %(app)s AND (last.d ->> 'error_code' = 'INVOCATION_ABORTED'
  OR jsonb_path_exists(last.d, '$.content.parts[*].function_call'))"""

_EVENTS = """
SELECT count(*),
  count(*) FILTER (WHERE event_data IS NULL),
  min(user_id || '/' || session_id) FILTER (WHERE event_data IS NULL),
  count(*) FILTER (WHERE length(id) > %(longest)s),
  min(left(id, 40)) FILTER (WHERE length(id) > %(longest)s)
FROM {events} WHERE app_name = %(app)s"""

_SESSIONS = """
SELECT count(*), {checks} FROM {{sessions}} WHERE app_name = %(app)s"""

_ORPHANS = """
SELECT count(*), min(e.user_id || '/' || e.session_id) FROM {events} e
WHERE e.app_name = %(app)s AND NOT EXISTS (SELECT 1 FROM {sessions} s
  WHERE s.app_name = e.app_name AND s.user_id = e.user_id AND s.id = e.session_id)"""

_NO_USER_STATE = """
SELECT count(*), min(u.user_id) FROM
  (SELECT DISTINCT user_id FROM {sessions} WHERE app_name = %(app)s) u
WHERE NOT EXISTS (SELECT 1 FROM {user_states} t
  WHERE t.app_name = %(app)s AND t.user_id = u.user_id)"""

_SHARED_STATES = """
SELECT count(*), min(user_id) FROM (
  SELECT user_id, state FROM {user_states} WHERE app_name = %(app)s
  UNION ALL SELECT '', state FROM {app_states} WHERE app_name = %(app)s) t
WHERE jsonb_typeof(state) <> 'object'"""

# (test, field, reason, blocks): each is counted over the tenant's sessions.
_SESSION_CHECKS: tuple[tuple[str, str, str, bool], ...] = (
    (
        "greatest(length(user_id), length(id)) > {longest}",
        "sessions.id",
        "longer than the 128 characters of ADK's schema v1: rename or delete it",
        True,
    ),
    (
        "user_id = '' OR id = ''",
        "sessions.id",
        "an empty id can't be told from shared state in a move's records: delete the session",
        True,
    ),
    (
        "user_id <> btrim(user_id) OR id <> btrim(id)",
        "sessions.id",
        "white space around an id: it is kept exactly, other kinds of ADK stores would strip it",
        False,
    ),
    (
        "jsonb_typeof(state) <> 'object'",
        "sessions.state",
        "not a JSON object: google-adk can't read the session; it is copied as it is",
        False,
    ),
)


def survey(store: PostgresStore) -> Survey:
    """Look at everything that a person should know before a move; read-only and counted in SQL."""
    with store.clean():
        began = time.time()
        clock, version, encoding, standby = store.rows(
            "SELECT extract(epoch FROM clock_timestamp())::float8,"
            " current_setting('server_version'), current_setting('server_encoding'),"
            " pg_is_in_recovery() OR current_setting('transaction_read_only')::boolean"
        )[0]
        skew = clock - (began + time.time()) / 2
    found: list[Finding] = []
    if standby:
        found.append(
            Finding(
                "server", "a standby, or read-only for this user: name the primary", 1, "", True
            )
        )
    if encoding == "SQL_ASCII":
        found.append(
            Finding("server", "encoding SQL_ASCII: text has no defined meaning there", 1, "", True)
        )
    columns = store.columns()
    schema_version = _version(store)
    found += schema.unknown_columns(columns, _required(store))
    counts = store.counts()
    events, interrupted, named, has_app_state = 0, 0, None, False
    if schema_version:
        found += _rights(store)
        found += _index(store)
        with store.transaction(f"{SNAPSHOT}; {WHOLE}"):
            found += _rows(store)
            events = store.rows("SELECT count(*) FROM {events} WHERE app_name = %(app)s")[0][0]
            has_app_state = bool(store.rows("SELECT 1 FROM {app_states} WHERE app_name = %(app)s"))
        with store.transaction(f"{SNAPSHOT}; {BY_INDEX}"):
            interrupted, named = store.rows(_INTERRUPTED, {"named": schema.NAMED})[0]
    return Survey(
        kind=store.kind,
        database=f"PostgreSQL {version.split()[0]}",
        schema_version=schema_version,
        sessions=counts.sessions,
        users=counts.users,
        events=events,
        interrupted=interrupted,
        clock_skew_seconds=skew,
        can_close=store.can_close() or _may_make(store),
        stamps_see_edits=True,
        findings=tuple(found),
        dialect=store.dialect,
        layout=store.layout,
        has_app_state=has_app_state,
        interrupted_keys=tuple(Key(*pair) for pair in named or ()),
        columns=tuple(
            f"{table}.{name} {'varchar' if kind in schema.TEXTS else kind}"
            for table, types in columns.items()
            for name, kind in types.items()
        ),
    )


def _version(store: PostgresStore) -> str:
    with store.clean():
        has_metadata = store.exists("metadata")
        row = None
        if has_metadata:
            row = store.run("SELECT value FROM {metadata} WHERE key = 'schema_version'").fetchone()
    version = schema.check_version(
        store.columns(),
        has_metadata=has_metadata,
        version=row[0] if row else None,
        where=store.where,
    )
    schema.check_types(store.columns(), store.where)
    return version


def _required(store: PostgresStore) -> dict[str, list[str]]:
    with store.clean():
        rows = store.rows(
            "SELECT c.relname, a.attname FROM pg_catalog.pg_class c"
            " JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
            " JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid"
            " WHERE n.nspname = %(schema)s AND c.relname = ANY(%(tables)s) AND a.attnum > 0"
            " AND NOT a.attisdropped AND a.attnotnull AND NOT a.atthasdef AND a.attidentity = ''",
            {"schema": store.schema, "tables": list(schema.TABLES)},
        )
    required: dict[str, list[str]] = {}
    for table, column in rows:
        required.setdefault(table, []).append(column)
    return required


def _rights(store: PostgresStore) -> list[Finding]:
    lacking = []
    with store.clean():
        for table in schema.TABLES:
            for right in RIGHTS:
                if not _has(store, "has_table_privilege(%(name)s, %(right)s)", table, right):
                    lacking.append(f"{right} on {table}")
    if not lacking:
        return []
    return [
        Finding(
            "rights",
            f"the user of this store lacks {', '.join(lacking)}: grant it",
            len(lacking),
            "",
            True,
        )
    ]


def _may_make(store: PostgresStore) -> bool:
    """Whether our user could make the guard table, the function and the triggers."""
    with store.clean():
        can_create = store.rows(
            "SELECT has_schema_privilege(%(schema)s, 'CREATE')", {"schema": store.schema}
        )[0][0]
        return bool(can_create) and all(
            _has(store, "has_table_privilege(%(name)s, %(right)s)", table, "TRIGGER")
            for table in store.columns()
        )


def _has(store: PostgresStore, question: str, table: str, right: str) -> bool:
    row = store.rows(f"SELECT {question}", {"name": store.text_name(table), "right": right})[0]
    return bool(row[0])


def _index(store: PostgresStore) -> list[Finding]:
    """Refuse events without an index by session: every chunk would read the whole table."""
    with store.clean():
        indexed = store.rows(
            "SELECT 1 FROM pg_catalog.pg_index i"
            " WHERE i.indrelid = to_regclass(%(name)s) AND i.indisvalid AND i.indpred IS NULL"
            " AND (SELECT array_agg(a.attname::text ORDER BY a.attname) FROM"
            " unnest((i.indkey::int2[])[0:2]) AS k (n)"
            " JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.n)"
            " = ARRAY['app_name', 'session_id', 'user_id']",
            {"name": store.text_name("events")},
        )
    if indexed:
        return []
    return [
        Finding(
            "events",
            "no index begins with app_name, user_id, session_id, so each chunk would read the whole"
            " table: CREATE INDEX CONCURRENTLY idx_events_app_user_session_ts_id ON events"
            " (app_name, user_id, session_id, timestamp DESC, id DESC)",
            1,
            "",
            True,
        )
    ]


def _rows(store: PostgresStore) -> list[Finding]:
    found: list[Finding] = []
    checks, example = [], "min(left(user_id, 40) || '/' || left(id, 40))"
    for test, *_ in _SESSION_CHECKS:
        where = test.format(longest=schema.LONGEST_ID)
        checks.append(f"count(*) FILTER (WHERE {where}), {example} FILTER (WHERE {where})")
    row = store.rows(_SESSIONS.format(checks=", ".join(checks)))[0][1:]
    for at, (_, field, reason, blocks) in enumerate(_SESSION_CHECKS):
        _note(found, field, reason, row[2 * at], row[2 * at + 1], blocks)
    _, nulls, null_at, long, long_at = store.rows(_EVENTS, {"longest": schema.LONGEST_ID})[0]
    _note(
        found,
        "events.event_data",
        "NULL: google-adk reads such an event as an empty one; it is copied as it is",
        nulls,
        null_at,
        False,
    )
    _note(
        found,
        "events.id",
        "longer than the 128 characters of ADK's schema v1, which another store may refuse",
        long,
        long_at,
        False,
    )
    _note(
        found,
        "events.session_id",
        "belongs to no session: google-adk never shows it, and it is not copied",
        *store.rows(_ORPHANS)[0],
    )
    _note(
        found,
        "user_states",
        "a user with sessions and without a state row, for whom append_event raises: the target"
        " is given an empty one",
        *store.rows(_NO_USER_STATE)[0],
    )
    _note(
        found,
        "user_states.state",
        "not a JSON object: google-adk can't read that user's sessions; it is copied as it is",
        *store.rows(_SHARED_STATES)[0],
    )
    return found


def _note(
    found: list[Finding], field: str, reason: str, count: int, example: Any, blocks: bool = False
) -> None:
    if count:
        found.append(Finding(field, reason, count, str(example or ""), blocks))
