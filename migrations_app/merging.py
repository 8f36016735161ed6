"""Shared state in a split, where agents write both sides: merged key by key, the newer change wins.

By value, as everywhere else, would take back what agents of the target have set since. What both
sides had when the split began is the base: a key that only the target has changed is the target's,
any other is the source's; where both have, the event that set it last decides, and it is listed.
An event may be gone, with the session that somebody deleted, or never have been: then nobody can
tell which is newer. The value where it is written stands, for the other one is still where it is
read, which is closed and kept; and it is listed as undecided.
Only digests are kept of the base, never a value.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any

from durable.driver import Clock, holding
from durable.errors import Refused
from migrations_app import ports
from migrations_app.domain import canonical
from migrations_app.domain.phases import REVERSED
from migrations_app.models import SharedBase, TenantMigration
from migrations_app.ports.artifacts import spell
from migrations_app.ports.base import Key, Own, SessionStore, SharedRow, Unfinished
from tenants.domain.words import counted

# A user's row that agents write this often in a row while it is merged: another step goes on.
TRIES = 20
# Decided conflicts that are listed, each with its line in the log; the log counts the rest.
LISTED = 200


class Verdict(StrEnum):
    """What becomes of a key that both sides had changed."""

    KEPT = "kept"  # The written side's is newer.
    TAKEN = "taken"  # The read side's is newer.
    UNDECIDED = "undecided"  # The event that set it is gone; the written side's stands.


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
    *,
    until: float,
) -> int:
    """Bring what the read side has changed since the base to the written side.

    `there` is what the written side had of these users a moment ago: agents may write it
    meanwhile, and the read side is closed. Returns how many rows had changed. May be repeated
    after any crash. Raises StillWritten, and Unfinished behind a moment of the monotonic clock:
    what is merged by then is found merged.
    """
    bases = _bases(move, [row.user_id for row in rows])
    changed = [row for row in rows if _changed(row, bases)]
    for at, row in enumerate(changed):
        # One at least: a store that answers slower than a step is long still gets on.
        if at and time.monotonic() >= until:
            raise Unfinished("Shared state is being merged: it takes more than one step.")
        found = there.get(row.user_id)
        decided = _merge_row(move, read, written, row, found, bases.get(row.user_id, {}))
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
    move: TenantMigration,
    read: SessionStore,
    written: SessionStore,
    row: SharedRow,
    found: SharedRow | None,
    base: Mapping[str, str],
) -> dict[str, Verdict] | None:
    """Return which keys both sides had changed, and whose value stands.

    None: the written side can't hold a value. Nothing is written then, and VERIFY names it.
    """
    ours = _state(row)
    mine = _digests(ours)
    known = {key: base.get(spell(key)) for key in mine}
    changed = {key for key, digest in mine.items() if known[key] != digest}
    for _ in range(TRIES):
        theirs = _state(found)
        other = _digests(theirs)
        both = {key for key in changed & other.keys() if other[key] not in (known[key], mine[key])}
        found_out = _verdicts(
            move,
            row.user_id,
            (written, {key: other[key] for key in both}),
            (read, {key: mine[key] for key in both}),
        )
        stays = {key for key, verdict in found_out.items() if verdict is not Verdict.TAKEN}
        taken = {key: ours[key] for key in changed - stays}
        merged = SharedRow(row.user_id, json.dumps({**theirs, **taken}), "")
        if ports.refuses_shared(read, written, merged):
            return None
        if written.replace_shared(merged, found.state if found is not None else "{}"):
            return found_out
        # Written meanwhile: merged once more, with what is there now.
        found = written.shared([row.user_id]).get(row.user_id)
    whose = "the app's" if row.user_id is None else f"{row.user_id}'s"
    raise StillWritten(f"Agents keep changing {whose} shared state while it is merged.")


# A side, and the digests of the values that stand there.
Stands = tuple[SessionStore, Mapping[str, str]]


def _verdicts(
    move: TenantMigration, user_id: str | None, written: Stands, read: Stands
) -> dict[str, Verdict]:
    """Return which side set each key last: by the events whose values stand there now."""
    keys = sorted(written[1])
    names = ("source", "target") if move.phase in REVERSED else ("target", "source")
    theirs, ours = (
        {
            key: change.at
            for key, change in side.last_changes(user_id, keys, _own(move, name)).items()
            # Another value stands there: whatever set it is gone.
            if change.digest == stands[key]
        }
        for name, (side, stands) in zip(names, (written, read), strict=True)
    )
    verdicts = {}
    for key in keys:
        if key not in theirs or key not in ours:
            verdicts[key] = Verdict.UNDECIDED
        else:
            verdicts[key] = Verdict.KEPT if theirs[key] > ours[key] else Verdict.TAKEN
    return verdicts


def _own(move: TenantMigration, name: str) -> Own:
    """Tell the sessions that the source, or the target, serves from copies of the other's.

    Copies bring their events along, which have set nothing where they are copied to.
    """

    def own(keys: Collection[Key]) -> set[Key]:
        rows = move.stamps.filter(session_id__anyof={key.session_id for key in keys})
        born = {
            Key(user, session): carried
            for user, session, carried in rows.values_list("user_id", "session_id", "carried_back")
        }
        # What we have no row of was born on the target, or is at the source alone.
        at_target = name == "target"
        return {key for key in keys if born.get(key, at_target) is at_target}

    return own


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
    return {key: canonical.value_digest(value) for key, value in state.items()}


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
    row: TenantMigration, user_id: str | None, verdicts: Mapping[str, Verdict], now: datetime
) -> None:
    """Say which keys both sides had changed, and whose value stands. Inside `holding`."""
    read, written = ("target", "source") if row.phase in REVERSED else ("source", "target")
    whose = "the app's" if user_id is None else f"{user_id}'s"
    notes, more = [], 0
    for key, verdict in verdicts.items():
        undecided = verdict is Verdict.UNDECIDED
        stands = read if verdict is Verdict.TAKEN else written
        line: dict[str, Any] = {"user_id": user_id, "key": spell(key), "taken": stands}
        if undecided:
            line["undecided"] = True
        if line in row.merged:
            continue
        if len(row.merged) >= LISTED:
            more += 1
            continue
        row.merged = [*row.merged, line]
        why = f"the {stands}'s is newer and stands"
        if undecided:
            why = (
                f"nothing tells which is newer, for the event that set it is gone. The {stands}'s"
                f" stands; the {read}'s is still there"
            )
        notes.append(f"Both sides changed {whose} {line['key']}: {why}")
    if notes:
        row.save(update_fields=["merged"])
    if more:
        notes.append(
            f"Both sides changed {counted(more, 'more key')} of {whose}: the newer one stands, or"
            f" the {written}'s where nothing tells"
        )
    for note in notes:
        row.events.create(at=now, who="mover", was=row.phase, now=row.phase, note=note)
