"""What every store's guard says and is looked for by, whatever the store is made of."""

from __future__ import annotations

from typing import NoReturn

from durable.machine import Overtaken
from migrations_app.domain.values import OURS
from migrations_app.ports.base import Guard, GuardTaken


def nonce_id(nonce: str) -> str:
    """Name the session by which a service leaves a word for whoever opens its database."""
    return f"{OURS}-nonce-{nonce}"


def refuse(row: Guard | None, *, where: str, move: int, adopting: bool) -> NoReturn:
    """Raise what the guard row that was found means to `move`, which is not in it."""
    if row is None:
        raise GuardTaken(f"The guard row in {where} is gone. Survey the store again, then move.")
    if row.move == move or not adopting:
        # A step of a claim, or of a whole move, whose time is over: nobody's mistake.
        raise Overtaken(f"{where} is held by mv-{row.move} under claim {row.claim}")
    raise GuardTaken(
        f"mv-{row.move} holds this tenant's guard in {where}, not mv-{move}. End that move first."
    )
