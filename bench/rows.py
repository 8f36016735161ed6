"""A tenant of the article's size in a PostgreSQL store, made by SQL in seconds.

Every row is one that google-adk reads: 12,600 sessions of 1,840 users, each with 20 events
of about 1 KB, are what the benches of copying and of the fence move. Each event changes two
keys of its session, every tenth one of its user, every twentieth one of the app.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from migrations_app.ports import schema

APP = "support.acme"
SESSIONS, USERS, EVENTS = 12_600, 1_840, 20
# ADK's tables, and nothing of ours.
TABLES = [s.encode() for s in schema.tables("postgresql", schema.TABLES)]

_STATES = """
INSERT INTO app_states SELECT %(app)s, '{"greeting": "hello"}', now();
INSERT INTO user_states SELECT %(app)s, 'u-' || u, jsonb_build_object('tier', 'pro'), now()
FROM generate_series(0, %(users)s - 1) u;
INSERT INTO sessions SELECT %(app)s, 'u-' || g %% %(users)s, 's-' || g,
  jsonb_build_object('topic', 'x' || g, 'n', g), timestamp '2026-01-01',
  timestamp '2026-01-01' + g * interval '1 s' + %(events)s * interval '1 ms'
FROM generate_series(0, %(sessions)s - 1) g"""

_EVENTS = """
INSERT INTO events SELECT id, %(app)s, 'u-' || g %% %(users)s, 's-' || g, invocation, at,
  jsonb_build_object('id', id, 'invocation_id', invocation, 'author', 'support_agent',
    'timestamp', extract(epoch FROM at)::float8,
    'content', jsonb_build_object('role', 'model',
      'parts', jsonb_build_array(jsonb_build_object('text', text))),
    'actions', jsonb_build_object('state_delta',
      jsonb_build_object('n', g, 'topic', 'x' || g)
      || CASE WHEN e %% 10 = 0 THEN jsonb_build_object('user:tier', 'pro') ELSE '{}' END
      || CASE WHEN e %% 20 = 0 THEN jsonb_build_object('app:seen', g) ELSE '{}' END,
      'artifact_delta', '{}'::jsonb, 'requested_auth_configs', '{}'::jsonb,
      'requested_tool_confirmations', '{}'::jsonb),
    'usage_metadata', jsonb_build_object('total_token_count', 18),
    'node_info', jsonb_build_object('path', ''))
FROM generate_series(0, %(sessions)s - 1) g, generate_series(1, %(events)s) e,
LATERAL (SELECT gen_random_uuid()::text AS id, gen_random_uuid()::text AS invocation,
  timestamp '2026-01-01' + g * interval '1 s' + e * interval '1 ms' AS at,
  (SELECT string_agg(md5((g * 31 + e + i)::text), ' ') FROM generate_series(1, 18) i) AS text) x"""


def fill(
    url: str,
    *,
    app_name: str = APP,
    sessions: int = SESSIONS,
    users: int = USERS,
    events: int = EVENTS,
) -> None:
    """Make ADK's tables where they are missing, and this tenant's rows."""
    params = {"app": app_name, "sessions": sessions, "users": users, "events": events}
    # Client-side parameters: several statements go at once.
    with psycopg.connect(url, cursor_factory=psycopg.ClientCursor) as connection:
        for statement in TABLES:
            connection.execute(statement)
        connection.execute(_STATES, params)
        connection.execute(_EVENTS, params)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("ANALYZE")


@contextmanager
def databases(server: str, count: int) -> Iterator[list[str]]:
    """Make scratch databases on `server` (any URL of it); yield their URLs, drop them after."""
    names = [f"bench_{secrets.token_hex(4)}" for _ in range(count)]
    base = server.replace("postgres://", "postgresql://", 1).rpartition("/")[0]
    with psycopg.connect(make_conninfo(server, dbname="postgres"), autocommit=True) as admin:
        for name in names:
            admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        try:
            yield [f"{base}/{name}" for name in names]
        finally:
            for name in names:
                admin.execute(
                    sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name))
                )
