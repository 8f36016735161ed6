"""Shared state in a split, where agents write both sides: merged key by key, the newer change wins.

By value, as everywhere else, would take back what agents of the target have set since. What both
sides had when the split began is the base: a key that only the target has changed is the target's,
any other is the source's; where both have, the event that set it last decides, and it is listed.
Only digests are kept of the base, never a value.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from durable.driver import Clock, holding
from durable.errors import Refused
from migrations_app import ports
from migrations_app.domain import canonical
from migrations_app.domain.phases import REVERSED
from migrations_app.models import SharedBase, TenantMigration
from migrations_app.ports.artifacts import spell
from migrations_app.ports.base import SessionStore, SharedRow
from tenants.domain.words import counted

# A user's row that agents write this often in a row while it is merged: another step goes on.
TRIES = 20
# Decided conflicts that are listed, each with its line in the log; the log counts the rest.
LISTED = 200


class StillWritten(Refused):
    """Agents changed a user's state again and again while it was merged."""

    retry_after_seconds = 0.2


def keep_base(move: TenantMigration, rows: Sequence[SharedRow]) -> None:
    """Record what both sides have of these users, whose state has just been written by value."""
    with holding(move):
        _put_base(move, {row.user_id: _digests(_state(row)) for row in rows})


def merge(
    move: TenantMigration,
    read: SessionStore,
    written: SessionStore,
    rows: Sequence[SharedRow],
    there: Mapping[str | None, SharedRow],
    clock: Clock,
) -> int:
    """Bring what the read side has changed since the base to the written side.

    `there` is what the written side had of these users a moment ago: agents may write it
    meanwhile, and the read side is closed. Returns how many rows had changed. May be repeated
    after any crash. Raises StillWritten.
    """
    bases = _bases(move, [row.user_id for row in rows])
    changed = [row for row in rows if _changed(row, bases)]
    for row in changed:
        found = there.get(row.user_id)
        decided = _merge_row(read, written, row, found, bases.get(row.user_id, {}))
        if decided is None:
            continue
        with holding(move) as locked:
            # From now on this is what both sides have agreed on.
            _put_base(move, {row.user_id: _digests(_state(row))})
            _list(locked, row.user_id, decided, clock())
    return len(changed)


def unmerged(
    move: TenantMigration, rows: Sequence[SharedRow], there: Mapping[str | None, SharedRow]
) -> list[SharedRow]:
    """Return those rows of the closed side that the other side has not taken over whole."""
    bases = _bases(move, [row.user_id for row in rows])
    return [
        row
        for row in rows
        if _changed(row, bases) or not set(_state(row)) <= set(_state(there.get(row.user_id)))
    ]


def _merge_row(
    read: SessionStore,
    written: SessionStore,
    row: SharedRow,
    found: SharedRow | None,
    base: Mapping[str, str],
) -> dict[str, bool] | None:
    """Return which keys both sides had changed, and whether the written side's value was kept.

    None: the written side can't hold a value. Nothing is written then, and VERIFY names it.
    """
    ours = _state(row)
    mine = _digests(ours)
    known = {key: base.get(spell(key)) for key in mine}
    changed = {key for key, digest in mine.items() if known[key] != digest}
    for _ in range(TRIES):
        theirs = _state(found)
        other = _digests(theirs)
        both = {key for key in changed if other.get(key) not in (known[key], mine[key])}
        kept = _newer(written, read, row.user_id, sorted(both))
        taken = {key: ours[key] for key in changed if not kept.get(key)}
        merged = SharedRow(row.user_id, json.dumps({**theirs, **taken}), "")
        if ports.refuses_shared(read, written, merged):
            return None
        if written.replace_shared(merged, found.state if found is not None else "{}"):
            return kept
        # Written meanwhile: merged once more, with what is there now.
        found = written.shared([row.user_id]).get(row.user_id)
    whose = "the app's" if row.user_id is None else f"{row.user_id}'s"
    raise StillWritten(f"Agents keep changing {whose} shared state while it is merged.")


def _newer(
    one: SessionStore, other: SessionStore, user_id: str | None, keys: Sequence[str]
) -> dict[str, bool]:
    """Return whether `one` set each key after `other` did. What no event set is the older."""
    ours, theirs = (side.last_changes(user_id, keys) for side in (one, other))
    return {key: key in ours and (key not in theirs or ours[key] > theirs[key]) for key in keys}


def _changed(row: SharedRow, bases: Mapping[str | None, Mapping[str, str]]) -> bool:
    base = bases.get(row.user_id)
    return base is None or any(
        base.get(spell(key)) != digest for key, digest in _digests(_state(row)).items()
    )


def _state(row: SharedRow | None) -> dict[str, Any]:
    if row is None:
        return {}
    try:
        value = canonical.loads(row.state)
    except canonical.NotJson:
        return {}
    return value if isinstance(value, dict) else {}


def _digests(state: Mapping[str, Any]) -> dict[str, str]:
    return {
        key: hashlib.sha256(canonical.of_value(value).encode()).hexdigest()
        for key, value in state.items()
    }


def _bases(
    move: TenantMigration, user_ids: Collection[str | None]
) -> dict[str | None, dict[str, str]]:
    users = [user for user in user_ids if user is not None]
    found = dict(move.shared_base.filter(user_id__in=users).values_list("user_id", "keys"))
    if None in user_ids:
        found |= dict(move.shared_base.filter(user_id=None).values_list("user_id", "keys"))
    return found


def _put_base(move: TenantMigration, keys: Mapping[str | None, Mapping[str, str]]) -> None:
    """Write over what is recorded of these users. Inside the caller's `holding`.

    Keys are spelled: an SQLite store's may hold what no row of ours does.
    """
    users = [user for user in keys if user is not None]
    move.shared_base.filter(user_id__in=users).delete()
    if None in keys:
        move.shared_base.filter(user_id=None).delete()
    SharedBase.objects.bulk_create(
        [
            SharedBase(move=move, user_id=user, keys={spell(key): d for key, d in digests.items()})
            for user, digests in keys.items()
        ]
    )


def _list(
    row: TenantMigration, user_id: str | None, kept: Mapping[str, bool], now: datetime
) -> None:
    """Say which keys both sides had changed, and whose value stands. Inside `holding`."""
    read, written = ("target", "source") if row.phase in REVERSED else ("source", "target")
    whose = "the app's" if user_id is None else f"{user_id}'s"
    notes, more = [], 0
    for key, stays in kept.items():
        line = {"user_id": user_id, "key": spell(key), "taken": written if stays else read}
        if line in row.merged:
            continue
        if len(row.merged) >= LISTED:
            more += 1
            continue
        row.merged = [*row.merged, line]
        notes.append(
            f"Both sides changed {whose} {line['key']}: the {line['taken']}'s is newer and stands"
        )
    if notes:
        row.save(update_fields=["merged"])
    if more:
        notes.append(
            f"Both sides changed {counted(more, 'more key')} of {whose}: the newer one stands"
        )
    for note in notes:
        row.events.create(at=now, who="mover", was=row.phase, now=row.phase, note=note)
