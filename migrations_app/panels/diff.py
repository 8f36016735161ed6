"""Both sides of a mismatch, read from both stores: side by side, or as a file."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import chain, zip_longest
from typing import Any

from django.core.paginator import Page, Paginator

from migrations_app import ports
from migrations_app.domain.mismatch import Looks
from migrations_app.models import Mismatch, TenantMigration
from migrations_app.ports.artifacts import (
    ArtifactStore,
    ArtifactUnreadable,
    Name,
    Versions,
    spell,
)
from migrations_app.ports.base import Key, SessionStore, shared_pages
from migrations_app.preflight import opened_artifacts
from tenants.models import Store

DIFF_LINES = 2_000
# One side of a difference as plain data; None: that side does not have it.
Side = Mapping[str, Any] | None
# Equal lines shown around each difference.
CONTEXT = 3
# Versions of an artifact that are read at once, the youngest first: each is loaded whole for its
# digest. A file has some more of them.
VERSIONS_SHOWN = 25
VERSIONS_IN_FILE = 200


@dataclass(frozen=True)
class DiffLine:
    """One line of both sides. `kind`: same, differs, source, target, or gap (left-out lines)."""

    kind: str
    source: str
    target: str


@dataclass(frozen=True)
class Diff:
    """Both sides as JSON, line beside line."""

    lines: tuple[DiffLine, ...]
    cut: bool
    source: bool
    target: bool
    # Of an artifact's version numbers, the youngest first. None: it is no artifact.
    page: Page[int] | None = None


def diff(move: TenantMigration, mismatch: Mismatch, *, page: str | None = None) -> Diff:
    """Read both sides of a mismatch and lay them beside each other; of an artifact a page.

    Raises StoreRefused where a store can't be read. Values may be secrets: only operators see them.
    """
    shown = None
    if mismatch.artifact:
        ours, theirs, shown = _artifacts(move, mismatch, page, most=VERSIONS_SHOWN)
    else:
        with _both(move) as sides:
            ours, theirs = _read(sides, mismatch)
    left, right = (
        [] if side is None else json.dumps(side, indent=1, sort_keys=True, default=str).splitlines()
        for side in (ours, theirs)
    )
    lines = list(_beside(left, right))
    return Diff(
        tuple(lines[:DIFF_LINES]),
        len(lines) > DIFF_LINES,
        ours is not None,
        theirs is not None,
        shown,
    )


def _beside(left: Sequence[str], right: Sequence[str]) -> Iterator[DiffLine]:
    groups = difflib.SequenceMatcher(None, left, right, autojunk=False).get_grouped_opcodes(CONTEXT)
    for group in groups:
        _, first, _, other, _ = group[0]
        if first or other:
            text = f"from line {first + 1}", f"from line {other + 1}"
            yield DiffLine("gap", *text)
        for tag, a, b, c, d in group:
            for mine, its in zip_longest(left[a:b], right[c:d]):
                kind = "same" if tag == "equal" else "differs"
                if mine is None or its is None:
                    kind = "target" if mine is None else "source"
                yield DiffLine(kind, mine or "", its or "")


def versions(
    move: TenantMigration, mismatches: Iterable[Mismatch], *, now: datetime
) -> Iterator[str]:
    """Return both versions of these mismatches as the pieces of one JSON document.

    Raises StoreRefused at once where a store can't be read, not in the middle of an answer.
    Values may be secrets: only operators see them.
    """
    pieces = _pieces(move, mismatches, now)
    first = next(pieces)
    return chain([first], pieces)


def _pieces(move: TenantMigration, rows: Iterable[Mismatch], now: datetime) -> Iterator[str]:
    head = {
        "move": str(move),
        "tenant": str(move.tenant),
        "app_name": move.tenant.app_name,
        "source_store": str(move.source_store),
        "target_store": str(move.target_store),
        "read_at": now.isoformat(),
    }
    # The document's last brace follows behind its last row.
    before = f'{json.dumps(head)[:-1]}, "versions": [\n'
    with _both(move) as sides:
        for row in rows:
            if row.artifact:
                ours, theirs, shown = _artifacts(move, row, None, most=VERSIONS_IN_FILE)
                rest = shown.paginator.count - len(shown.object_list)
                told = _version(row, ours, theirs) | {"versions_left_out": rest}
            else:
                told = _version(row, *_read(sides, row))
            yield before + json.dumps(told, default=str)
            before = ",\n"
    yield ("" if before == ",\n" else before) + "\n]}\n"


def _version(row: Mismatch, source: Side, target: Side) -> dict[str, Any]:
    return {
        "mismatch": row.pk,
        "user_id": row.user_id,
        "session_id": row.session_id,
        "artifact": row.artifact,
        "part": row.part,
        "first_difference": row.first_difference,
        "looks_like": row.looks_like,
        "found_at": row.found_at.isoformat(),
        "source_digest": row.source_digest,
        "target_digest": row.target_digest,
        # Null: that side does not have it.
        "source": source,
        "target": target,
    }


def _artifacts(
    move: TenantMigration, mismatch: Mismatch, page: str | None, *, most: int
) -> tuple[Side, Side, Page[int]]:
    """Return what both sides have of one artifact: each version's facts and digests, not its bytes.

    Files may be large, and a digest says whether they are equal. A page of version numbers, with
    what both have of them.
    """
    with ExitStack() as stack:
        sides = [
            stack.enter_context(opened_artifacts(store, move.tenant))
            for store in (move.source_store, move.target_store)
        ]
        found = [_listed(port, mismatch) for port in sides]
        numbers = sorted({n for one in found if one for n in one[1]}, reverse=True)
        shown = Paginator(numbers, most).get_page(page)
        ours, theirs = (
            None
            if one is None
            else {
                str(number): _facts(port, mismatch.user_id, one[0], number)
                for number in sorted(shown.object_list)
                if number in one[1]
            }
            for port, one in zip(sides, found, strict=True)
        )
    return ours, theirs, shown


def _listed(port: ArtifactStore, mismatch: Mismatch) -> tuple[Name, Versions] | None:
    wanted = (mismatch.session_id, mismatch.artifact)
    for name, numbers in port.listing(mismatch.user_id).items():
        spelled = [(one.session_id, spell(one.name)) for one in (name, port.placed(name))]
        if wanted in spelled and numbers:
            return name, numbers
    return None


def _facts(port: ArtifactStore, user: str, name: Name, number: int) -> Mapping[str, Any]:
    try:
        facts = port.load(user, name, number).facts
    except ArtifactUnreadable:
        return {"unreadable": True}
    return {"digest": facts.digest, **asdict(facts)}


# Users whose shared state is read at once.
SHARED_PAGE = 2_000


@contextmanager
def _both(move: TenantMigration) -> Iterator[tuple[SessionStore, SessionStore]]:
    with _open(move.source_store, move) as source, _open(move.target_store, move) as target:
        yield source, target


def _open(store: Store, move: TenantMigration) -> Any:
    return ports.open_store(store.kind, store.address_from, app_name=move.tenant.app_name)


def _read(sides: tuple[SessionStore, SessionStore], mismatch: Mismatch) -> tuple[Side, Side]:
    if mismatch.session_id:
        return ports.sessions_of_both(*sides, Key(mismatch.user_id, mismatch.session_id))
    if mismatch.looks_like == Looks.LATE_WRITE and mismatch.part == "app":
        return _late_shared(sides)
    source, target = (_shared(port, mismatch.user_id or None) for port in sides)
    return source, target


def _late_shared(sides: tuple[SessionStore, SessionStore]) -> tuple[Side, Side]:
    """Return the shared state that differs, of the app ("") and of each user, on both sides.

    No stamp tells whose state came in late, so whoever the tenant has changed since is among it.
    """
    source, target = (_all_shared(port) for port in sides)
    names = [name for name in source.keys() | target.keys() if source.get(name) != target.get(name)]
    return tuple({name: side.get(name) for name in sorted(names)} for side in (source, target))  # type: ignore[return-value]


def _all_shared(port: SessionStore) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for rows in shared_pages(port, SHARED_PAGE):
        found |= {row.user_id or "": json.loads(row.state) for row in rows}
    return found


def _shared(port: SessionStore, user: str | None) -> Side:
    row = port.shared([user]).get(user)
    return None if row is None else json.loads(row.state)
