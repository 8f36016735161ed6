"""Where a store is: a reference that people may see, and the address behind it that nobody may.

A reference is `env:NAME` or `file:/absolute/path`; our database, pages and logs
hold nothing else. The address is read when a store is opened and lives in that
handle only; no error raised here quotes it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from psycopg import pq
from psycopg.conninfo import conninfo_to_dict

from migrations_app.ports.base import AddressMissing, UnknownKind

# A secret file holds one URL; anything longer is another file.
LONGEST_ADDRESS = 4096


@dataclass(frozen=True)
class Postgres:
    """Parameters for libpq; never printed."""

    params: dict[str, str] = field(repr=False)


@dataclass(frozen=True)
class Sqlite:
    """The absolute path of a database file; never printed."""

    path: str = field(repr=False)


@dataclass(frozen=True)
class Service:
    """What google-adk, or a callable of yours, makes a session service of; never printed."""

    uri: str = field(repr=False)


def resolve(reference: str, kind: str = "adk-sql") -> Postgres | Sqlite:
    """Read the address behind a reference and take it apart.

    Takes the URLs that google-adk takes (`postgresql+asyncpg://`,
    `sqlite+aiosqlite:////abs/file`) and their plain forms. Raises AddressMissing,
    or UnknownKind for another database.
    """
    return parse(read(reference), reference, kind)


def service_address(reference: str) -> Service:
    """Read the address of a service: a URI, or `python:` and a dotted path to a callable.

    Raises AddressMissing; also for what would be another store in every process.
    """
    address = read(reference)
    scheme = address.partition(":")[0]
    if address.startswith("python:"):
        return Service(address)
    if "://" not in address:
        raise AddressMissing(
            f"What {reference} holds is neither a URI, such as postgresql+psycopg://... or"
            " agentengine://..., nor a dotted path, such as python:yourpkg.stores:make_sessions."
        )
    if scheme == "memory":
        raise AddressMissing(
            f"{reference} names a store in memory, which every process would have one of its own."
        )
    if scheme.partition("+")[0] == "sqlite":
        _sqlite(address, reference)
    return Service(address)


def parse(address: str, reference: str, kind: str = "adk-sql") -> Postgres | Sqlite:
    """Take a URL apart; `reference` names it in errors."""
    scheme = address.partition("://")[0].partition("+")[0].lower()
    if "://" not in address:
        raise AddressMissing(
            f"What {reference} holds is not a URL. It should begin with postgresql:// or sqlite://."
        )
    if kind == "adk-sqlite":
        if scheme == "sqlite":
            # SqliteSessionService takes its URL apart by the book: # ends it, %20 is a blank.
            return _sqlite(f"sqlite://{unquote(urlsplit(address).path)}", reference)
        raise UnknownKind(
            f"{reference} names no SQLite file, and kind adk-sqlite is nothing else."
            " Correct the address (sqlite:////...), or make the store one of kind adk-sql."
        )
    if scheme in ("postgresql", "postgres"):
        return _postgres(address, reference)
    if scheme == "sqlite":
        return _sqlite(address, reference)
    raise UnknownKind(
        f"{reference} names a database that kind adk-sql does not open."
        " It opens PostgreSQL (postgresql://...) and SQLite (sqlite:////...)."
    )


def read(reference: str) -> str:
    """Return the address behind a reference; raises AddressMissing, which never quotes it."""
    kind, _, name = reference.partition(":")
    if kind == "env" and name:
        address = os.environ.get(name, "").strip()
        if not address:
            raise AddressMissing(
                f"The variable {name} is not set in this process."
                " Set it for web and workers alike, and start them again."
            )
        return address
    if kind == "file" and name.startswith("/"):
        try:
            with Path(name).open(encoding="utf-8") as file:
                address = file.read(LONGEST_ADDRESS + 1).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise AddressMissing(
                f"The file {name} can't be read ({type(error).__name__})."
                " Mount it where web and workers run, readable for their user."
            ) from None
        if not address or len(address) > LONGEST_ADDRESS:
            raise AddressMissing(f"The file {name} should hold one URL and nothing else.")
        return address
    # Not quoted: somebody may have pasted the address itself.
    raise AddressMissing(
        "A store's address is given as env:NAME or file:/absolute/path, never as itself."
    )


def _postgres(address: str, reference: str) -> Postgres:
    rest = address.partition("://")[2]
    base, _, query = rest.partition("?")
    known = {option.keyword.decode() for option in pq.Conninfo.get_defaults()}
    # What only SQLAlchemy's driver understands (prepared_statement_cache_size, ...) is not for
    # libpq; asyncpg says `ssl` for what libpq calls `sslmode`.
    options = [
        ("sslmode" if key == "ssl" else key, value)
        for key, value in parse_qsl(query, keep_blank_values=True)
        if key == "ssl" or key in known
    ]
    # libpq reads %20 and not +, which urlencode would write.
    url = f"postgresql://{base}?{urlencode(options, quote_via=quote)}"
    try:
        params = conninfo_to_dict(url)
    except Exception:
        # psycopg's own message quotes the URL.
        raise AddressMissing(f"What {reference} holds is not a PostgreSQL URL.") from None
    return Postgres({key: str(value) for key, value in params.items() if value is not None})


def _sqlite(address: str, reference: str) -> Sqlite:
    # Nothing is unquoted and # is a character: so does SQLAlchemy read the same address.
    path = address.partition("://")[2].partition("?")[0]
    # sqlite:////abs has an absolute path behind the third slash; a relative one would mean
    # another file in every process, and memory none that two processes share.
    if not path.startswith("//") or path.strip("/") in ("", ":memory:"):
        raise AddressMissing(
            f"{reference} must name an absolute path, with four slashes: sqlite:////var/lib/store.db"
        )
    return Sqlite(path[1:])


def sqlite_uri(path: str, mode: str) -> str:
    """Return SQLite's file: URI of a path; `mode` is ro, rw or rwc."""
    return f"{Path(path).as_uri()}?mode={mode}"
