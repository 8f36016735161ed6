"""What a move needs of a session store, whatever it is made of.

A handle speaks for one tenant (`app_name`) of one store, under one claim of one
move. It is opened for a step and closed at its end. Every method is bounded:
pages and chunks come from the caller, no statement outlives 15 s, and memory does not
grow with the tenant. Only one thread uses a handle at a time.

Errors are the `Refused` ones below, `durable.machine.Overtaken` where a guard row says
so, and StoreFailed. Their messages say what, why and what to do, and never hold an
address, a user, a password or a value. A handle whose connection was lost, or ended by a
later claim, says Unreachable until it is opened anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from durable.errors import Refused
from migrations_app.domain import canonical
from migrations_app.domain.mismatch import Difference, Looks
from migrations_app.domain.values import Layout
from tenants.domain.words import counted


class Key(NamedTuple):
    """Names one session of the tenant."""

    user_id: str
    session_id: str


START = Key("", "")

# How the user is called for whom two places beside stores are told from one; random letters follow.
NOBODY = "switchyard-nonce-"

# Opaque, up to 120 characters: equal stamps of one store mean an unchanged session
# (on SQLite all but an edit in place). Stamps of two stores are never compared.
Stamp = str


class Guard(NamedTuple):
    """The tenant's row in a store's guard table."""

    move: int
    claim: int
    mover: bool  # the move may write
    agents: bool  # agents may write


class Kept(NamedTuple):
    """What a store keeps of what it is given, as a scratch session has shown.

    What one side does not keep is left out of the fingerprints of both.
    """

    session_ids: bool = True
    event_ids: bool = True
    event_times: bool = True
    session_times: bool = True

    def both(self, other: Kept) -> Kept:
        """Return what both keep."""
        return Kept(*(one and another for one, another in zip(self, other, strict=True)))


class Digest(NamedTuple):
    """What one session is, as one store holds it. Equal digests mean equal sessions."""

    state: str  # session-scoped state, create_time, update_time
    events: str  # every event in the order in which ADK reads them, every column
    stamp: Stamp  # read in the same snapshot


def same(ours: Digest | None, theirs: Digest | None) -> bool:
    """Return whether two digests are of equal sessions, whatever their stamps."""
    if ours is None or theirs is None:
        return ours is theirs
    return (ours.state, ours.events) == (theirs.state, theirs.events)


class Copied(NamedTuple):
    """The stamps on both sides in the transactions of the copy."""

    source: Stamp
    target: Stamp


class Refusal(NamedTuple):
    """Why a session was left out of a copy, whole: the target can't hold a value of it."""

    field: str  # such as "events.event_data of e-1 content.parts[0].text"
    reason: str

    @property
    def difference(self) -> Difference:
        """How the mismatch table names it."""
        return Difference("value", f"{self.field}: {self.reason}", Looks.CANNOT_HOLD)


@dataclass(frozen=True)
class Batch:
    """What became of the sessions of one copy. Whatever the source no longer has is in neither."""

    copied: dict[Key, Copied]
    # Not on the target, in no version. Never any between two stores of one layout.
    refused: dict[Key, Refusal] = field(default_factory=dict)
    # Of those that time did not allow, by replay. What is written of them is gone on with.
    unfinished: list[Key] = field(default_factory=list)


class SharedRow(NamedTuple):
    """State that sessions share: of one user, or of the app (user_id None)."""

    user_id: str | None
    state: str  # JSON text, keys without prefix
    digest: str


class Change(NamedTuple):
    """An event that set a key of shared state."""

    at: int  # microseconds since 1970
    digest: str  # of the value that it set: another one stands there now, and its event is gone


# Which of these sessions are served on a side, so that their events were made there; the others are
# copies.
Own = Callable[[Collection[Key]], Collection[Key]]
# Events that are looked at, youngest first, for who set a key last.
CHANGES_MOST = 1_000


def youngest(rows: Iterable[tuple[str, Key, int, str]], own: Own) -> dict[str, Change]:
    """Return the first change of each key that counts; rows are (key, session, time, JSON)."""
    found: dict[str, Change] = {}
    listed = list(rows)
    counts = set(own({session for _, session, _, _ in listed}))
    for key, session, at, text in listed:
        if session in counts and key not in found:
            found[key] = Change(at, canonical.value_digest(canonical.loads(text)))
    return found


def shared_key(user_id: str | None, key: str) -> str:
    """Spell a key of shared state as events do, with its prefix."""
    return f"app:{key}" if user_id is None else f"user:{key}"


class Mark:
    """A digest over a tenant's stamps and one over its shared state, whatever order they come in.

    Sums of the rows' digests: a sweep adds up row by row what a store adds up by itself
    (`SessionStore.mark`), and the two are compared as text, up to 128 characters.
    A state of '{}' counts as no row.
    """

    def __init__(self, text: str = "") -> None:
        """Begin, or go on from what an earlier step had added up."""
        parts = [int(part, 16) for part in text.split(":")] if text else [0] * 6
        self._sessions, self._shared = parts[:3], parts[3:]

    def session(self, key: Key, stamp: Stamp) -> None:
        """Add one session."""
        text = f"s{_framed(key.user_id)}{_framed(key.session_id)}{stamp}"
        self.add_sessions(*_summands(text))

    def shared(self, rows: Iterable[SharedRow]) -> None:
        """Add the shared state of these users, and of the app."""
        for row in rows:
            if row.state != "{}":
                whose = "a" if row.user_id is None else f"u{_framed(row.user_id)}"
                self.add_shared(*_summands(whose + row.digest))

    def add_sessions(self, count: int, first: int, second: int) -> None:
        """Add what a database has summed up: rows, first and second 64 bits of their digests."""
        self._sessions = _added(self._sessions, (count, first, second))

    def add_shared(self, count: int, first: int, second: int) -> None:
        """Add what a database has summed up of shared state."""
        self._shared = _added(self._shared, (count, first, second))

    @property
    def of_sessions(self) -> str:
        return ":".join(f"{part:x}" for part in self._sessions)

    @property
    def of_shared(self) -> str:
        return ":".join(f"{part:x}" for part in self._shared)

    def __str__(self) -> str:
        return f"{self.of_sessions}:{self.of_shared}"


def _summands(text: str) -> tuple[int, int, int]:
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return 1, int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:16], "big")


def _added(ours: Sequence[int], theirs: Sequence[int]) -> list[int]:
    return [(one + other) % 2**64 for one, other in zip(ours, theirs, strict=True)]


def _framed(text: str) -> str:
    return f"{len(text.encode('utf-8', 'surrogatepass'))}:{text}"


@dataclass(frozen=True)
class Finding:
    """A value or a fact in a store that a person should know before a copy."""

    field: str  # such as "events.event_data" or "sessions.id"
    reason: str
    count: int
    example: str  # a key, never a value: values may be secrets
    blocks: bool


@dataclass(frozen=True)
class Survey:
    """What a store is and what it holds of the tenant. Shown to people as it stands."""

    kind: str
    database: str  # "PostgreSQL 15.18" or "SQLite 3.40.1"
    schema_version: str  # "1"; "" where there are no tables yet
    sessions: int
    users: int
    events: int
    interrupted: int
    clock_skew_seconds: float  # the store's clock minus ours
    can_close: bool  # our user may make the guard table and the closing trigger, or finds them
    stamps_see_edits: bool  # False on SQLite: an in-place edit of an event is invisible
    findings: tuple[Finding, ...] = ()
    dialect: str = ""  # "postgresql", "sqlite" or "service"
    layout: Layout | None = None  # two stores of one layout take each other's rows as they are
    has_app_state: bool = False  # a row of the app's own state, which counts as holding the app
    interrupted_keys: tuple[Key, ...] = ()  # the first of them, for a list
    # "events.event_data jsonb" and so on: what the tables really have, for `check_pair`.
    columns: tuple[str, ...] = ()

    @property
    def held(self) -> str:
        """How much it is, in words."""
        return Counts(self.sessions, self.users).held


@dataclass(frozen=True)
class Counts:
    """What a store holds of the tenant."""

    sessions: int
    users: int  # users with a session or with state of their own
    # Users with a session: all that a service can list.
    in_sessions: int = field(default=0, compare=False)

    @property
    def held(self) -> str:
        """How much it is, in words."""
        return f"{counted(self.sessions, 'session')} of {counted(self.users, 'user')}"


class StoreRefused(Refused):
    """Something about a store stops a move. Subclasses say what."""


class AddressMissing(StoreRefused):
    """The reference to its address leads nowhere."""


class Unreachable(StoreRefused):
    """No answer from the store within a few seconds."""


class WrongCredentials(StoreRefused):
    """The store answered and refused the user, the password or the rights."""


class OldSchema(StoreRefused):
    """ADK schema v0 (pickles): to be upgraded first, never unpickled here."""


class NotASessionStore(StoreRefused):
    """The database has no ADK session tables, or of a version this product does not know."""


class UnknownKind(StoreRefused):
    """No port opens stores of this kind."""


class ColumnsDiffer(StoreRefused):
    """The source's tables have a column that the target's lack, or of another type."""


class CannotHold(StoreRefused):
    """The target refused a value of the source, or a row could not be read."""


class GuardTaken(StoreRefused):
    """The guard row is not what was surveyed: another move got there first."""


class StoreBusy(StoreRefused):
    """Closing or guarding did not get its lock in time; worth another try."""

    retry_after_seconds = 0.2


class Unfinished(StoreBusy):
    """Work takes longer than a step may: no failure. What is done stays, and is gone on with."""


class StoreFailed(StoreRefused):
    """The database reported an error that none of the above explains.

    Its message names the error's class and the table, never a value: what the
    database itself says may quote a row.
    """


class SessionStore(Protocol):
    """One tenant's side of one store."""

    @property
    def layout(self) -> Layout:
        """How the store lays out its rows."""

    @property
    def kept(self) -> Kept:
        """What the store keeps of what it is given; all of it, unless it was found out not to."""

    # --- looking; changes nothing. Without ADK's tables everything is empty -------------
    @property
    def has_tables(self) -> bool:
        """Whether all of ADK's tables are there."""

    def survey(self) -> Survey:
        """Say what the store is and holds. Raises OldSchema, NotASessionStore, ColumnsDiffer.

        A database without tables is fine here: `check_pair` refuses it as a source.
        """

    def guard(self) -> Guard | None:
        """The tenant's guard row; None if there is none, or no guard table."""

    def guards(self, among: Collection[str] = ()) -> dict[str, Guard]:
        """Every tenant's guard row in the store, by app name.

        `among` names those that may have one, for a store that can't list its tenants.
        """

    def counts(self) -> Counts: ...
    def page(self, after: Key, limit: int) -> list[tuple[Key, Stamp]]:
        """Up to `limit` sessions behind `after`, in the store's own order. START begins.

        Two stores may sort alike keys differently: look keys up, never merge two pages.
        """

    def stamps(self, keys: Collection[Key]) -> dict[Key, Stamp]:
        """Stamps of those sessions that exist."""

    def digests(self, keys: Collection[Key]) -> dict[Key, Digest]:
        """Digests of those sessions that exist, computed inside the store where it can.

        Strict: compared only between two stores of one layout.
        """

    def session(self, key: Key) -> Mapping[str, Any] | None:
        """One session as plain data, read whole: for naming a difference, not for copying.

        {"state", "create_time", "update_time", "events": [{"id", "invocation_id",
        "timestamp", "event_data", ...}, ...]}, times as the store spells them.
        """

    def shared_page(self, after: str | None, limit: int) -> list[SharedRow]:
        """Shared state, the app's row first (after None), then users behind `after`, in order.

        `after=None` begins; the last row's user_id ("" after the app's row) goes on.
        A user with sessions and without a row is shown as {}, and so is the app.
        """

    def shared(self, user_ids: Collection[str | None]) -> dict[str | None, SharedRow]:
        """Shared state of these users; None asks for the app's.

        Whoever has neither a row nor a session is absent.
        """

    def last_changes(
        self, user_id: str | None, keys: Collection[str], own: Own
    ) -> dict[str, Change]:
        """The last event that set each of these keys of shared state, where one is found.

        Keys have no prefix, None asks for the app's. Only events of `own` sessions count. Looks
        from the youngest event on, and not for ever.
        """

    def mark(self) -> str:
        """The high-water mark: the `Mark` of all stamps and shared state, in one snapshot."""

    # --- guarding -----------------------------------------------------------------------
    def provision(self) -> None:
        """Make ADK's tables where they are missing, the guard table and the closing trigger.

        A service finds out here what it keeps. Bounded waits (1 s) on other tenants' locks;
        raises StoreBusy to be tried again.
        """

    def can_close(self) -> bool:
        """Whether every closing trigger stands, so that the guard row is heeded."""

    def adopt(self, found: Guard | None, *, mover: bool, agents: bool) -> None:
        """Make the guard row this move's, if it is still what the survey `found`.

        Raises GuardTaken; Overtaken if a later claim of this move was here; StoreBusy.
        May be repeated under the same move. Ends what `found`'s move left connected.
        """

    def take(self, *, mover: bool, agents: bool) -> None:
        """Set claim and flags in a short transaction; first end backends of lower claims.

        Flags are set, never matched, so each step can run again. Waits for the tenant's
        open writers, by a fair queue, bounded (4 s); raises StoreBusy. So a live source is
        taken to close it, never once a chunk.
        Raises Overtaken if a later claim, or another move, holds the row; GuardTaken if
        there is none.
        """

    def disown(self) -> None:
        """Take the guard row away, where it is this claim's: of a rehearsal, which leaves nothing.

        Last: whoever finds no row knows that there is nothing else either.
        """

    def older_writers(self) -> list[str]:
        """Transactions open now, which may be older than the guard row. Opaque tokens.

        Asked once, right after `adopt`; of any role, of the whole database. Empty on SQLite.
        """

    def still_writing(self, tokens: Sequence[str]) -> list[str]:
        """Those of `older_writers` that still live, named for a person (such as "pid 4711")."""

    def write_nonce(self, nonce: str) -> None:
        """Leave a random word beside the guard, to be looked for through the other store."""

    def has_nonce(self, nonce: str) -> bool:
        """Whether that word is here."""

    def clear_nonce(self, nonce: str) -> None:
        """Take the word away; nothing happens if it is gone."""

    def folds_case(self) -> bool:
        """Whether ids that differ by case only are one there; needs tables, leaves nothing."""

    def keeps_ids(self) -> bool:
        """Whether a scratch session keeps the id it is given; needs tables, leaves nothing."""

    # --- writing: each in one transaction that reads the guard row first -----------------
    # All raise Overtaken when the guard row is not this move's, this claim's and `mover`.
    def delete(self, keys: Collection[Key]) -> int:
        """Delete these sessions and their events; return how many sessions there were."""

    def delete_unchanged(self, stamps: Mapping[Key, Stamp]) -> list[Key]:
        """Delete those sessions whose stamp is still the given one; return them."""

    def write_shared(self, rows: Sequence[SharedRow]) -> None:
        """Put these states in place by value, making rows; what is equal is left alone."""

    def replace_shared(self, row: SharedRow, was: str) -> bool:
        """Put one state in place if its text still is `was`; return whether it was.

        '{}' also stands for no row. For a side whose agents write meanwhile.
        """

    def delete_shared(self, user_ids: Collection[str | None]) -> int:
        """Delete these users' state rows (None: the app's); return how many there were."""


def shared_pages(store: SessionStore, limit: int) -> Iterator[list[SharedRow]]:
    """Walk all shared state, page by page, the app's row first."""
    after: str | None = None
    while rows := store.shared_page(after, limit):
        yield rows
        if len(rows) < limit:
            return
        after = rows[-1].user_id or ""
