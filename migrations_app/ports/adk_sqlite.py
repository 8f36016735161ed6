"""The tables of google-adk's SqliteSessionService: a layout of its own in an SQLite file.

Times are floats, seconds since 1970; events of one time are read in the order in which they were
written; nothing says which version the tables are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from migrations_app.domain import canonical
from migrations_app.domain.canonical import Time
from migrations_app.domain.values import Layout
from migrations_app.ports import schema
from migrations_app.ports.sqlite import SqliteStore


class AdkSqliteStore(SqliteStore):
    """One tenant's side of one file of SqliteSessionService."""

    kind = "adk-sqlite"
    layout = Layout.ADK_SQLITE
    event_order = "e.timestamp, e.rowid"
    now = "(julianday('now') - 2440587.5) * 86400.0"

    @staticmethod
    def micros(value: Any) -> Time:
        """Read a time as the store's columns hold it."""
        return canonical.micros_of_seconds(value)

    @staticmethod
    def spelled(micros: int) -> Any:
        """Spell a time for the store's columns."""
        return canonical.seconds_of_micros(micros)

    def fine_times(self) -> int:
        """Count the sessions whose time is finer than a microsecond."""
        times = self.rows("SELECT update_time FROM sessions WHERE app_name = ?", (self.app_name,))
        return sum(
            micros is not None and self.spelled(micros) != at
            for at, micros in ((row[0], self.micros(row[0])) for row in times)
        )

    def making(self, missing: Iterable[str]) -> list[str]:
        """Return the statements that make these tables."""
        return schema.adk_sqlite_tables(missing)
