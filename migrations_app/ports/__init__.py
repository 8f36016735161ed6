"""Session stores: what a move needs of them (`base`), and the databases behind kind `adk-sql`.

Neither google-adk nor SQLAlchemy is imported here: rows are read and written by
`app_name`, as ADK's schema v1 lays them out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from migrations_app.ports import postgres, sqlite
from migrations_app.ports.address import Postgres, resolve
from migrations_app.ports.base import (
    ColumnsDiffer,
    Copied,
    Digest,
    Key,
    MixedPair,
    NotASessionStore,
    SessionStore,
    Survey,
    UnknownKind,
)

__all__ = ["at_once", "check_pair", "copy", "digests_of_both", "open_store"]

KINDS = ("adk-sql",)
T = TypeVar("T")


@contextmanager
def open_store(
    kind: str, address_from: str, *, app_name: str, move: int = 0, claim: int = 0
) -> Iterator[SessionStore]:
    """Open one tenant's side of a store for a step, under one claim of one move.

    `address_from` is `env:NAME` or `file:/path`, never the address itself. Raises
    UnknownKind, AddressMissing, Unreachable (within about 3 s), WrongCredentials.
    """
    if kind not in KINDS:
        raise UnknownKind(f"No port opens stores of kind {kind!r}. Known: {', '.join(KINDS)}.")
    address = resolve(address_from)
    store: postgres.PostgresStore | sqlite.SqliteStore
    if isinstance(address, Postgres):
        store = postgres.PostgresStore(
            address, reference=address_from, app_name=app_name, move=move, claim=claim
        )
    else:
        store = sqlite.SqliteStore(
            address, reference=address_from, app_name=app_name, move=move, claim=claim
        )
    try:
        yield store
    finally:
        store.close()


def check_pair(source: Survey, target: Survey) -> None:
    """Refuse two stores between which rows can't be copied as they are.

    Raises MixedPair, NotASessionStore (a source without tables), ColumnsDiffer.
    """
    if source.dialect != target.dialect:
        raise MixedPair(
            f"Not yet: the source is {source.database}, the target {target.database}."
            " Choose a target of the source's kind."
        )
    if not source.schema_version:
        raise NotASessionStore(
            "The source has no ADK session tables. Check the tenant's store and its address."
        )
    # A target without tables is given ADK's own, which may lack what the source has.
    have = set(target.columns) if target.schema_version else _own_columns(target)
    lacking = sorted(set(source.columns) - have)
    if lacking:
        raise ColumnsDiffer(
            f"The target lacks what the source has: {', '.join(lacking)}."
            " Bring both databases to one google-adk release (start it once on each), or add"
            " the columns."
        )


def copy(source: SessionStore, target: SessionStore, keys: Sequence[Key]) -> dict[Key, Copied]:
    """Copy these sessions from one snapshot of the source in one transaction of the target.

    What the target held of them is replaced; keys that the source no longer has are
    deleted there and absent from the result. Memory does not grow with the keys' events.
    SQLite does it in bites of a few megabytes, each a snapshot and a transaction of its
    own. Raises Overtaken, and changes nothing, if the target's guard row is not this
    claim's; MixedPair, StoreBusy, CannotHold.
    """
    # Each once: a key named twice would insert its session twice.
    keys = list(dict.fromkeys(keys))
    if not keys:
        return {}
    if isinstance(source, postgres.PostgresStore) and isinstance(target, postgres.PostgresStore):
        return postgres.copy(source, target, keys)
    if isinstance(source, sqlite.SqliteStore) and isinstance(target, sqlite.SqliteStore):
        return sqlite.copy(source, target, keys)
    raise MixedPair("Not yet: source and target are of different kinds.")


def digests_of_both(
    source: SessionStore, target: SessionStore, keys: Collection[Key]
) -> tuple[dict[Key, Digest], dict[Key, Digest]]:
    """Return the digests of these sessions on both sides, computed at the same time."""
    return at_once(lambda: source.digests(keys), lambda: target.digests(keys))


def at_once(ours: Callable[[], T], theirs: Callable[[], T]) -> tuple[T, T]:
    """Ask both sides at the same time; two databases answer as fast as one."""
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(theirs)
        return ours(), other.result()


def _own_columns(target: Survey) -> set[str]:
    from migrations_app.ports import schema

    return schema.listed_columns(target.dialect)
