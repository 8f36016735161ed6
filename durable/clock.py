"""The database's clock: the only one by which leases and due times are judged."""

from __future__ import annotations

from datetime import UTC, datetime

from django.db import connection


def database_now() -> datetime:
    """Return the database's present time (UTC), not the transaction's start.

    Edges (a task, a view) read it and pass it down; nothing below reads a clock.
    """
    sqlite = connection.vendor == "sqlite"
    # SQLite's strftime has milliseconds; with one machine there is one clock.
    query = "SELECT strftime('%Y-%m-%d %H:%M:%f', 'now')" if sqlite else "SELECT clock_timestamp()"
    with connection.cursor() as cursor:
        cursor.execute(query)
        value = cursor.fetchone()[0]
    return datetime.fromisoformat(value).replace(tzinfo=UTC) if sqlite else value
