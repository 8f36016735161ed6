"""Session stores: what a move needs of them (`base`), and the databases behind each kind.

Kind `adk-sql` is google-adk's DatabaseSessionService on PostgreSQL or SQLite, `adk-sqlite` its
SqliteSessionService. Neither google-adk nor SQLAlchemy is imported for them: rows are read
and written by `app_name`, as ADK lays them out. Between two stores of one layout they go
over to the bit and are compared by strict digests inside the databases; every other pair goes
through `mixed`. Kind `adk-service` is any other session service that google-adk can reach, read
and written through its interface (`service`); what that needs is imported when one is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar, cast

from migrations_app.domain import canonical, values
from migrations_app.domain.mismatch import (
    Difference,
    Looks,
    session_difference,
    shared_difference,
)
from migrations_app.domain.values import Layout
from migrations_app.ports import mixed, postgres, schema, sqlite
from migrations_app.ports.address import Postgres, resolve, service_address
from migrations_app.ports.adk_sqlite import AdkSqliteStore
from migrations_app.ports.base import (
    Batch,
    ColumnsDiffer,
    Counts,
    Digest,
    Finding,
    Key,
    NotASessionStore,
    SessionStore,
    SharedRow,
    Survey,
    UnknownKind,
)
from migrations_app.ports.service import ServiceStore

__all__ = [
    "at_once",
    "by_service",
    "check_pair",
    "copy",
    "counts_of_both",
    "difference",
    "digests_of_both",
    "fingerprint_words",
    "name_shared",
    "open_store",
    "refuses_shared",
    "same_shared",
    "scan",
    "sessions_of_both",
    "shared_digest",
    "strict",
    "write_shared",
]

KINDS = ("adk-sql", "adk-sqlite", "adk-service")
T = TypeVar("T")


@contextmanager
def open_store(
    kind: str, address_from: str, *, app_name: str, move: int = 0, claim: int = 0
) -> Iterator[SessionStore]:
    """Open one tenant's side of a store for a step, under one claim of one move.

    `address_from` is `env:NAME` or `file:/path`, never the address itself. Raises
    UnknownKind, AddressMissing, Unreachable (within about 3 s), WrongCredentials; of a service
    AdkMissing and NotASessionStore too.
    """
    if kind not in KINDS:
        raise UnknownKind(f"No port opens stores of kind {kind!r}. Known: {', '.join(KINDS)}.")
    named: dict[str, Any] = {
        "reference": address_from,
        "app_name": app_name,
        "move": move,
        "claim": claim,
    }
    store: postgres.PostgresStore | sqlite.SqliteStore | ServiceStore
    if kind == "adk-service":
        store = ServiceStore(service_address(address_from), **named)
    elif isinstance(address := resolve(address_from, kind), Postgres):
        store = postgres.PostgresStore(address, **named)
    else:
        opens = sqlite.SqliteStore if kind == "adk-sql" else AdkSqliteStore
        store = opens(address, **named)
    try:
        yield store
    finally:
        store.close()


def strict(source: SessionStore | Survey, target: SessionStore | Survey) -> bool:
    """Whether two stores lay out their rows alike, so that nothing is converted between them."""
    return source.layout == target.layout and not by_service(source, target)


def by_service(source: SessionStore | Survey, target: SessionStore | Survey) -> bool:
    """Whether one of two stores is reached through google-adk's interface."""
    return any(side.layout is not None and side.layout.is_service for side in (source, target))


def check_pair(source: Survey, target: Survey) -> None:
    """Refuse two stores between which rows can't be copied without loss.

    Raises NotASessionStore (a source without tables), ColumnsDiffer.
    """
    if not source.schema_version:
        raise NotASessionStore(
            "The source has no ADK session tables. Check the tenant's store and its address."
        )
    if not strict(source, target):
        if source.columns:
            _check_convertible(source)
        return
    # A target without tables is given ADK's own, which may lack what the source has.
    have = set(target.columns) if target.schema_version else schema.listed_columns(target.dialect)
    lacking = sorted(set(source.columns) - have)
    if lacking:
        raise ColumnsDiffer(
            f"The target lacks what the source has: {', '.join(lacking)}."
            " Bring both databases to one google-adk release (start it once on each), or add"
            " the columns."
        )


def _check_convertible(source: Survey) -> None:
    foreign = sorted(set(source.columns) - schema.listed_columns(source.dialect))
    if foreign:
        raise ColumnsDiffer(
            f"The source has columns that google-adk does not know: {', '.join(foreign)}. Only a"
            " store of the same kind and database takes them along: choose one, or drop them."
        )


def copy(source: SessionStore, target: SessionStore, keys: Sequence[Key]) -> Batch:
    """Copy these sessions from one snapshot of the source in one transaction of the target.

    What the target held of them is replaced; keys that the source no longer has are
    deleted there and absent from the result. Memory does not grow with the keys' events.
    With an SQLite file on either side it is done in bites of a few megabytes, each a snapshot and
    a transaction of its own. A session with a value that a target of another layout can't
    hold is `refused`: on the target in no version. Raises Overtaken, and changes nothing, if
    the target's guard row is not this claim's; StoreBusy, CannotHold.
    """
    # Each once: a key named twice would insert its session twice.
    keys = list(dict.fromkeys(keys))
    if not keys:
        return Batch({})
    if isinstance(source, postgres.PostgresStore) and isinstance(target, postgres.PostgresStore):
        return Batch(postgres.copy(source, target, keys))
    if strict(source, target):
        # One layout, and not that of PostgreSQL: two files.
        here, there = cast(sqlite.SqliteStore, source), cast(sqlite.SqliteStore, target)
        return Batch(sqlite.copy(here, there, keys))
    return mixed.copy(_rows(source), cast(mixed.Target, target), keys)


def _rows(store: SessionStore) -> mixed.Rows:
    # Every store of this package gives its rows; a caller may have wrapped it, so no isinstance.
    return cast(mixed.Rows, store)


def digests_of_both(
    source: SessionStore, target: SessionStore, keys: Collection[Key]
) -> tuple[dict[Key, Digest], dict[Key, Digest]]:
    """Return the digests of these sessions on both sides, computed at the same time.

    Strict ones where both lay out their rows alike, else canonical.
    """
    if strict(source, target):
        return at_once(lambda: source.digests(keys), lambda: target.digests(keys))
    return at_once(
        lambda: mixed.digests(_rows(source), keys, target),
        lambda: mixed.digests(_rows(target), keys, source),
    )


def sessions_of_both(
    source: SessionStore, target: SessionStore, key: Key
) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
    """Return one session of both sides as plain data, spelled so that they can be compared."""
    if strict(source, target):
        return source.session(key), target.session(key)
    return (
        mixed.session(_rows(source), key, target),
        mixed.session(_rows(target), key, source),
    )


def counts_of_both(source: SessionStore, target: SessionStore) -> tuple[Counts, Counts]:
    """Count sessions and users on both sides, as both can.

    A service lists no user who has no session.
    """
    ours, theirs = at_once(source.counts, target.counts)
    if by_service(source, target):
        ours, theirs = (
            Counts(side.sessions, side.in_sessions, side.in_sessions) for side in (ours, theirs)
        )
    return ours, theirs


def fingerprint_words(source: SessionStore, target: SessionStore) -> str:
    """Say what the fingerprints of this pair hold, once both were tried."""
    if strict(source, target):
        return "strict row digests"
    kept = source.kept.both(target.kept)
    names = {
        "event ids": kept.event_ids,
        "event times": kept.event_times,
        "session times": kept.session_times,
    }
    held = [name for name, whether in names.items() if whether]
    lost = [name for name, whether in names.items() if not whether]
    words = f"canonical, with {', '.join(held)}" if held else "canonical"
    return f"{words}; without {', '.join(lost)}, which not both keep" if lost else words


def difference(source: SessionStore, target: SessionStore, key: Key) -> Difference | None:
    """Say where a session first differs, or why the target has none; None: no difference."""
    ours, theirs = sessions_of_both(source, target, key)
    if (ours is None) != (theirs is None) and not strict(source, target):
        # On the way back it is the source that may lack it.
        has, lacks = (source, target) if theirs is None else (target, source)
        if refused := mixed.refusal(_rows(has), key, lacks.layout):
            return refused.difference
    found = session_difference(ours, theirs)
    if found and found.looks_like is Looks.CHANGED_VALUE and by_service(source, target):
        return _as_the_table_says(source, target, key, found)
    return found


def _as_the_table_says(
    source: SessionStore, target: SessionStore, key: Key, found: Difference
) -> Difference:
    """Tell what a service is known to change from an edit, by the odd values of the session."""
    if found.part == "state" and found.text.startswith("last update"):
        # A service's session has the time of the event that was appended last.
        return replace(found, looks_like=Looks.CANNOT_HOLD)
    for side, other in ((source, target), (target, source)):
        for odd in mixed.odds(_rows(side), key, other.layout):
            changed = odd.outcome(other.layout).fate is values.Fate.CHANGED
            if changed and odd.path.rpartition(" ")[2] in found.text:
                text = f"{found.text}: {odd.odd}"
                return Difference(found.part, text, Looks.CANNOT_HOLD)
    return found


def scan(source: SessionStore, target: Layout) -> tuple[Finding, ...]:
    """Look for values that a target of another layout changes or refuses; takes a few seconds."""
    return tuple(mixed.scan(_rows(source), target))


# --- state that sessions share -----------------------------------------------------------------


def shared_digest(source: SessionStore, target: SessionStore, row: SharedRow | None) -> str:
    """Return a row's digest as this pair compares it; "" where there is no row.

    To a service no row and an empty one are the same.
    """
    if row is None:
        return canonical.state_digest("{}") if by_service(source, target) else ""
    return row.digest if strict(source, target) else canonical.state_digest(row.state)


def same_shared(
    source: SessionStore, target: SessionStore, ours: SharedRow | None, theirs: SharedRow | None
) -> bool:
    """Whether shared state is equal on both sides, or on neither."""
    return shared_digest(source, target, ours) == shared_digest(source, target, theirs)


def write_shared(source: SessionStore, target: SessionStore, rows: Sequence[SharedRow]) -> None:
    """Put states of the source in place by value; left out is what the target can't hold.

    It then differs, and `name_shared` says why.
    """
    target.write_shared([row for row in rows if not refuses_shared(source, target, row)])


def refuses_shared(source: SessionStore, target: SessionStore, row: SharedRow) -> bool:
    """Whether the target can't hold a value of this state."""
    return not strict(source, target) and _shared_refusal(target.layout, row) is not None


def name_shared(
    source: SessionStore, target: SessionStore, ours: SharedRow | None, theirs: SharedRow | None
) -> Difference | None:
    """Say where shared state first differs; None: in its spelling at most."""
    row = ours or theirs
    if row is None:
        return None
    if not strict(source, target):
        # On the way back it is the source that may not hold what the target has.
        for side, layout in ((ours, target.layout), (theirs, source.layout)):
            if side is not None and (found := _shared_refusal(layout, side)):
                return Difference("value", found.words(layout), Looks.CANNOT_HOLD)
    states = [_state(side) for side in (ours, theirs)]
    if nulled := _nulled(source, target, states):
        part, prefix = ("app", "app:") if row.user_id is None else ("user", "user:")
        text = f"{prefix}{ascii(nulled)[1:-1][:80]} is null there: a service deletes no key"
        return Difference(part, text, Looks.CANNOT_HOLD)
    return shared_difference(row.user_id, *states)


def _nulled(
    source: SessionStore, target: SessionStore, states: Sequence[Mapping[str, Any] | None]
) -> str:
    """Return a key that a service could only null, if nothing else differs; "" otherwise."""
    ours, theirs = (state or {} for state in states)
    for held, other, layout in (
        (theirs, ours, target.layout),
        (ours, theirs, source.layout),
    ):
        extra = sorted(key for key in held if key not in other and held[key] is None)
        rest = {key: value for key, value in held.items() if key not in extra}
        if layout.is_service and extra and canonical.of_value(rest) == canonical.of_value(other):
            return extra[0]
    return ""


def _shared_refusal(target: Layout, row: SharedRow) -> values.Found | None:
    table = "app_states" if row.user_id is None else "user_states"
    return values.refusal(target, values.in_state(f"{table}.state", row.state))


def _state(row: SharedRow | None) -> Mapping[str, Any] | None:
    """Read a state; what is no JSON object is shown as one, for naming a difference."""
    if row is None:
        return None
    try:
        value = canonical.loads(row.state)
    except canonical.NotJson:
        return {"not JSON": row.state}
    return value if isinstance(value, dict) else {"not an object": value}


def at_once(ours: Callable[[], T], theirs: Callable[[], T]) -> tuple[T, T]:
    """Ask both sides at the same time; two databases answer as fast as one."""
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(theirs)
        return ours(), other.result()
