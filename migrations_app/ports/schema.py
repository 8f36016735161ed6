"""ADK's session tables, schema v1, as google-adk 2.13's DatabaseSessionService makes them.

Written out here so that no port needs google-adk or SQLAlchemy. `tests/adk`
compares them with the tables that the real service makes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from migrations_app.ports.base import ColumnsDiffer, Finding, NotASessionStore, OldSchema

VERSION = "1"
# PostgreSQL's types that hold what a varchar holds, and travel alike.
TEXTS = ("text", "varchar", "bpchar")
TABLES = ("app_states", "user_states", "sessions", "events")
# What ADK's columns hold at most; also what a move's own records hold.
LONGEST_ID = 128
# How many interrupted sessions a survey names.
NAMED = 50

# Column types by table: PostgreSQL's, SQLite's declared ones. {text} and the like are filled in.
_TABLES: dict[str, tuple[str, ...]] = {
    "app_states": (
        "app_name VARCHAR(128) NOT NULL",
        "state {json} NOT NULL",
        "update_time {time} NOT NULL",
        "PRIMARY KEY (app_name)",
    ),
    "user_states": (
        "app_name VARCHAR(128) NOT NULL",
        "user_id VARCHAR(128) NOT NULL",
        "state {json} NOT NULL",
        "update_time {time} NOT NULL",
        "PRIMARY KEY (app_name, user_id)",
    ),
    "sessions": (
        "app_name VARCHAR(128) NOT NULL",
        "user_id VARCHAR(128) NOT NULL",
        "id VARCHAR(128) NOT NULL",
        "state {json} NOT NULL",
        "create_time {time} NOT NULL",
        "update_time {time} NOT NULL",
        "PRIMARY KEY (app_name, user_id, id)",
    ),
    "events": (
        "id VARCHAR(128) NOT NULL",
        "app_name VARCHAR(128) NOT NULL",
        "user_id VARCHAR(128) NOT NULL",
        "session_id VARCHAR(128) NOT NULL",
        "invocation_id VARCHAR(256) NOT NULL",
        "timestamp {time} NOT NULL",
        "event_data {json}",
        "PRIMARY KEY (id, app_name, user_id, session_id)",
        "FOREIGN KEY (app_name, user_id, session_id)"
        " REFERENCES {prefix}sessions (app_name, user_id, id) ON DELETE CASCADE",
    ),
}
# SqliteSessionService's own: text, and floats for times; its primary key is the index.
_ADK_SQLITE_TABLES: dict[str, tuple[str, ...]] = {
    "app_states": (
        "app_name TEXT PRIMARY KEY",
        "state TEXT NOT NULL",
        "update_time REAL NOT NULL",
    ),
    "user_states": (
        "app_name TEXT NOT NULL",
        "user_id TEXT NOT NULL",
        "state TEXT NOT NULL",
        "update_time REAL NOT NULL",
        "PRIMARY KEY (app_name, user_id)",
    ),
    "sessions": (
        "app_name TEXT NOT NULL",
        "user_id TEXT NOT NULL",
        "id TEXT NOT NULL",
        "state TEXT NOT NULL",
        "create_time REAL NOT NULL",
        "update_time REAL NOT NULL",
        "PRIMARY KEY (app_name, user_id, id)",
    ),
    "events": (
        "id TEXT NOT NULL",
        "app_name TEXT NOT NULL",
        "user_id TEXT NOT NULL",
        "session_id TEXT NOT NULL",
        "invocation_id TEXT NOT NULL",
        "timestamp REAL NOT NULL",
        "event_data TEXT NOT NULL",
        "PRIMARY KEY (app_name, user_id, session_id, id)",
        "FOREIGN KEY (app_name, user_id, session_id)"
        " REFERENCES sessions(app_name, user_id, id) ON DELETE CASCADE",
    ),
}
_INDEX = (
    "CREATE INDEX IF NOT EXISTS idx_events_app_user_session_ts_id"
    " ON {prefix}events (app_name, user_id, session_id, timestamp DESC, id DESC)"
)

# Every column that ADK's classes know, by table.
COLUMNS: dict[str, tuple[str, ...]] = {
    table: tuple(
        line.partition(" ")[0] for line in lines if not line.startswith(("PRIMARY", "FOREIGN"))
    )
    for table, lines in _TABLES.items()
}


def tables(dialect: str, missing: Iterable[str], *, prefix: str = "") -> list[str]:
    """Return the statements that make these tables, ADK's index and its version row.

    `prefix` qualifies names, such as `"public".`; the version's table comes first.
    """
    types = {
        "postgresql": {"json": "JSONB", "time": "TIMESTAMP WITHOUT TIME ZONE"},
        "sqlite": {"json": "TEXT", "time": "DATETIME"},
    }[dialect]
    wanted = set(missing)
    made = [
        f"CREATE TABLE IF NOT EXISTS {prefix}adk_internal_metadata"
        ' ("key" VARCHAR(128) NOT NULL, value VARCHAR(256) NOT NULL, PRIMARY KEY ("key"))',
        # Without this row ADK says "schema version not found"; with another value it reads as v0.
        f"INSERT INTO {prefix}adk_internal_metadata VALUES ('schema_version', '{VERSION}')"
        " ON CONFLICT DO NOTHING",
    ]
    for table in TABLES:
        if table in wanted:
            body = ", ".join(_TABLES[table]).format(prefix=prefix, **types)
            made.append(f"CREATE TABLE IF NOT EXISTS {prefix}{table} ({body})")
    if "events" in wanted:
        made.append(_INDEX.format(prefix=prefix))
    return made


def adk_sqlite_tables(missing: Iterable[str]) -> list[str]:
    """Return the statements that make these tables as SqliteSessionService does."""
    wanted = set(missing)
    return [
        f"CREATE TABLE IF NOT EXISTS {table} ({', '.join(lines)})"
        for table, lines in _ADK_SQLITE_TABLES.items()
        if table in wanted
    ]


def check_version(
    columns: Mapping[str, Collection[str]], *, has_metadata: bool, version: str | None, where: str
) -> str:
    """Return the schema's version, "" unless all of its tables exist; refuse all but v1.

    `columns` are the columns of those ADK tables that exist. ADK's own rule: the
    version row, and without its table v0 if events have `actions` and no `event_data`.
    """
    events = set(columns.get("events", ()))
    if version == "0" or (not has_metadata and "actions" in events and "event_data" not in events):
        raise OldSchema(
            f"The tables of {where} are ADK's schema v0, which keeps pickles; they are never opened"
            " here. Upgrade a copy first: adk migrate session --source_db_url=... --dest_db_url=..."
            " Run it with TZ=UTC: where the host's zone is another one it shifts every event's time"
            " by the offset and leaves the sessions' times."
        )
    if has_metadata and version is None:
        raise NotASessionStore(
            f"The table adk_internal_metadata of {where} has no row schema_version: the database is"
            " malformed, and google-adk does not open it either."
        )
    if version not in (None, VERSION):
        raise NotASessionStore(
            f"The tables of {where} are of an ADK schema that this release does not know"
            f" (it knows {VERSION}). Upgrade Switchyard, or choose another store."
        )
    for table, have in columns.items():
        lacking = sorted(set(COLUMNS[table]) - set(have))
        if lacking:
            raise NotASessionStore(
                f"The table {table} of {where} is not ADK's schema v1: it has no"
                f" {', '.join(lacking)}."
            )
    return VERSION if set(columns) == set(TABLES) else ""


def check_types(columns: Mapping[str, Mapping[str, str]], where: str) -> None:
    """Refuse PostgreSQL tables whose known columns have types that ADK never gave them."""
    for table, types in columns.items():
        for column in COLUMNS[table]:
            kind = types[column]
            wanted = _wanted_type(table, column)
            if kind != wanted and not (wanted == "varchar" and kind in TEXTS):
                raise ColumnsDiffer(
                    f"The column {table}.{column} is {kind}, not {wanted}, in {where}. google-adk"
                    f" makes it {wanted}: change the column's type, or choose another store."
                )


def _wanted_type(table: str, column: str) -> str:
    line = next(line for line in _TABLES[table] if line.startswith(f"{column} "))
    kind = line.split(" ")[1]
    return {"{json}": "jsonb", "{time}": "timestamp"}.get(kind, "varchar")


def unknown_columns(
    columns: Mapping[str, Collection[str]], required: Mapping[str, Collection[str]]
) -> list[Finding]:
    """Name the columns that ADK's classes don't know.

    They go over where the target has them too (`check_pair`); a target's own
    column blocks if no row could be written without a value for it (`required`).
    """
    found = []
    for table, have in columns.items():
        for column in sorted(set(have) - set(COLUMNS[table])):
            needs = column in required.get(table, ())
            found.append(
                Finding(
                    field=f"{table}.{column}",
                    reason="google-adk does not know this column; it is copied where both stores"
                    " have it" + (", and it is required without a default" if needs else ""),
                    count=1,
                    example="",
                    blocks=needs,
                )
            )
    return found


def listed_columns(dialect: str) -> set[str]:
    """Return the columns of the tables that `tables` makes, as a Survey lists them."""
    return {
        f"{table}.{column} {_wanted_type(table, column)}"
        if dialect == "postgresql"
        else f"{table}.{column}"
        for table, columns in COLUMNS.items()
        for column in columns
    }
