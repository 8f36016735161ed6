"""When a tenant should have more of the stack for itself: pooled, bridge, silo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from capacity.domain.headroom import ROOM
from tenants.domain.names import Tier
from tenants.domain.words import share

# Of a cell's quota over a week: one tenant that uses more is a hot one.
HOT_SHARE = 0.30
# Of a cell's quota: what a tenant's peak may take of it. Above, no shared cell can hold it.
PLANNED_SHARE = 0.70

# What a tier means, and what asks for it. A person decides: two of the criteria are no numbers.
MEANING: Mapping[Tier, str] = {
    Tier.POOLED: "Shares cell, store, workers and model account; limits keep it apart.",
    Tier.BRIDGE: "Shares cell and code; has a pool of workers and a store of its own, and a model"
    " account where its Runner is given one.",
    Tier.SILO: "Has a cell, a store, a model account and secrets of its own.",
}
CRITERIA: Mapping[Tier, str] = {
    Tier.POOLED: "The default: its limit fits beside the others’ normal load.",
    Tier.BRIDGE: f"It legitimately needs a limit that does not fit under {share(ROOM)} of"
    f" the quota, or uses over {share(HOT_SHARE)} of it for a week.",
    Tier.SILO: f"Its peak is over {share(PLANNED_SHARE)} of a cell’s quota, or a regulator, a"
    " contract or an auditor asks for infrastructure of its own.",
}


@dataclass(frozen=True)
class Measured:
    """How much of its cell's quota a tenant takes (0 to 1). None: nothing to divide by."""

    # Its tokens in the busiest minute of a week.
    peak_share: float | None
    # Its tokens over the whole week.
    week_share: float | None


def suggested(measured: Measured) -> Tier:
    """Return the tier that the numbers alone ask for.

    >>> str(suggested(Measured(0.12, 0.02))), str(suggested(Measured(0.5, 0.34)))
    ('pooled', 'bridge')
    >>> str(suggested(Measured(4_800_000 / 5_000_000, 0.2)))
    'silo'
    """
    if (measured.peak_share or 0) > PLANNED_SHARE:
        return Tier.SILO
    return Tier.BRIDGE if (measured.week_share or 0) > HOT_SHARE else Tier.POOLED
