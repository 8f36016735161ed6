"""Who may do what. Pages, the API and the audit read the same words."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What a signed-in person may do; each role has the rights of those before it."""

    VIEWER = "viewer"  # Sees every operator page; changes nothing.
    OPERATOR = "operator"  # Starts, pauses and aborts moves.
    ADMIN = "admin"  # Registers cells, stores and tenants, and makes tokens.


class Door(StrEnum):
    """Who passes where no role does, however high it is."""

    OWN_TENANT = "own tenant"  # A tenant's people, to their own tenant's usage; nowhere else.


class TokenRole(StrEnum):
    """What a bearer token is for."""

    RUNTIME = "runtime"  # Joins, polls and reports for given cells.
    GATEWAY = "gateway"  # Reads the placement feed.
    TENANT = "tenant"  # Reads its own tenant's usage.
    OPERATOR = "operator"  # Acts under /api/v1/ops/ with the rights of its user.


@dataclass(frozen=True, slots=True)
class Actor:
    """Who asks something of the operator API, signed in or by a token, and what they may do."""

    # What the audit calls them; services take it as `by`.
    name: str
    role: Role
    # Who they are, whatever token they came with: where two people are asked for, two tokens of
    # one person are one.
    person: str


RANK = {Role.VIEWER: 1, Role.OPERATOR: 2, Role.ADMIN: 3}


def allows(held: Role | None, needed: Role) -> bool:
    """Return whether a person with role `held` may do what needs `needed`."""
    return held is not None and RANK[held] >= RANK[needed]
