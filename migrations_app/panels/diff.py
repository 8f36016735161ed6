"""Both sides of one mismatch, read from both stores."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from migrations_app import ports
from migrations_app.models import Mismatch, TenantMigration
from migrations_app.ports.base import Key, SessionStore
from tenants.models import Store

DIFF_LINES = 2_000


@dataclass(frozen=True)
class Diff:
    """Both sides as JSON, line by line: each ("same" | "source" | "target" | "gap", text)."""

    lines: tuple[tuple[str, str], ...]
    cut: bool
    source: bool
    target: bool


def diff(move: TenantMigration, mismatch: Mismatch) -> Diff:
    """Read both sides of a mismatch and lay them beside each other.

    Raises StoreRefused where a store can't be read. Values may be secrets: only operators see them.
    """
    with (
        _open(move.source_store, move) as source,
        _open(move.target_store, move) as target,
    ):
        ours, theirs = (_side(port, mismatch) for port in (source, target))
    left, right = (
        [] if side is None else json.dumps(side, indent=1, sort_keys=True, default=str).splitlines()
        for side in (ours, theirs)
    )
    lines: list[tuple[str, str]] = []
    for line in list(difflib.unified_diff(left, right, lineterm="", n=3))[2:]:
        kind = {"-": "source", "+": "target", "@": "gap"}.get(line[:1], "same")
        lines.append((kind, line if kind == "gap" else line[1:]))
    return Diff(
        tuple(lines[:DIFF_LINES]), len(lines) > DIFF_LINES, ours is not None, theirs is not None
    )


def _open(store: Store, move: TenantMigration) -> Any:
    return ports.open_store(store.kind, store.address_from, app_name=move.tenant.app_name)


def _side(port: SessionStore, mismatch: Mismatch) -> Mapping[str, Any] | None:
    if mismatch.part in ("user", "app"):
        user = mismatch.user_id if mismatch.part == "user" else None
        row = port.shared([user]).get(user)
        return None if row is None else json.loads(row.state)
    return port.session(Key(mismatch.user_id, mismatch.session_id))
