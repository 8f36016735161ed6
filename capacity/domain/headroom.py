"""Whether a cell's quota has room for its largest limit on top of normal load (article 004).

The limits of a cell's tenants may add up to more than its quota, for most of them are idle at any
time. What has to fit is the largest single one on top of what is normal, under 90 % of the quota,
in requests per minute and in tokens per minute, whichever binds first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

# "The largest tenant limit plus normal load should stay under 90 percent of quota."
ROOM = 0.9

Unit = Literal["requests", "tokens"]
UNITS: tuple[Unit, ...] = ("requests", "tokens")


@dataclass(frozen=True, slots=True)
class Run:
    """What a typical run takes. None: nobody has measured it or said so."""

    model_calls: float | None = None
    tokens: float | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """Model requests and tokens per minute. None: not known; infinite: not limited."""

    requests: float | None
    tokens: float | None

    def of(self, unit: Unit) -> float | None:
        return self.requests if unit == "requests" else self.tokens


@dataclass(frozen=True, slots=True)
class Most:
    """The most that a tenant's limits let it use."""

    runs_per_minute: float
    # Which of its limits that is. "": neither bounds it.
    bound_by: Literal["rate", "slots", ""]
    load: Load


@dataclass(frozen=True, slots=True)
class Breaker:
    """A tenant whose limit does not fit on top of normal load."""

    tenant: str
    unit: Unit
    # Its limit, alone and with normal load, per minute.
    limit: float
    peak: float


@dataclass(frozen=True, slots=True)
class Binding:
    """One quota of a cell, held against normal load and the largest limit."""

    unit: Unit
    # Per minute.
    quota: float
    room: float
    normal: float
    # The largest limit of one tenant, and whose that is. "": nobody has one.
    largest: float
    tenant: str

    @property
    def peak(self) -> float:
        return self.normal + self.largest

    @property
    def fits(self) -> bool:
        return self.peak < self.room

    @property
    def used(self) -> float:
        """The peak as a part of the room; 1 or more does not fit."""
        return self.peak / self.room


@dataclass(frozen=True, slots=True)
class Headroom:
    """What was held against each quota that is known, the one that binds first in front."""

    bindings: tuple[Binding, ...]
    # Every tenant whose limit does not fit, the worst first.
    breakers: tuple[Breaker, ...]

    @property
    def fits(self) -> bool:
        return all(binding.fits for binding in self.bindings)

    def breaker(self, tenant: str) -> Breaker | None:
        """Return where this tenant's limit does not fit; None: it does, or nobody knows."""
        return next((one for one in self.breakers if one.tenant == tenant), None)


def slots_carry(slots: int, run_seconds: float) -> float:
    """Return how many runs a minute so many slots carry (Little's law).

    >>> slots_carry(10, 12)
    50.0
    """
    return slots * 60 / run_seconds


def most(runs_per_second: float | None, slots: int | None, run: Run) -> Most:
    """Return the most that a rate and a number of slots let a tenant use; None: no such limit.

    Slots bound it only where it is known how long a run takes. A run makes at least one model call.

    >>> at_most = most(30 / 60, 10, Run(model_calls=4, seconds=12))
    >>> at_most.runs_per_minute, at_most.bound_by, at_most.load.requests
    (30.0, 'rate', 120.0)
    >>> most(None, 10, Run(model_calls=4, seconds=12)).runs_per_minute
    50.0
    """
    by_rate = math.inf if runs_per_second is None else runs_per_second * 60
    by_slots = math.inf
    if slots is not None and run.seconds:
        by_slots = slots_carry(slots, run.seconds)
    runs = min(by_rate, by_slots)
    bound_by: Literal["rate", "slots", ""] = "rate" if by_rate <= by_slots else "slots"
    requests = runs * max(1.0, run.model_calls or 1.0)
    tokens = runs * run.tokens if run.tokens else None
    return Most(runs, bound_by if math.isfinite(runs) else "", Load(requests, tokens))


def headroom(quota: Load, normal: Load, limits: Mapping[str, Load]) -> Headroom:
    """Hold a cell's quota against normal load and its tenants' limits, all per minute.

    A quota that nobody has entered binds nothing; a load that nobody knows counts 0.

    >>> at = headroom(Load(1_000, None), Load(600, None), {"acme": Load(120, None)})
    >>> at.fits, at.bindings[0].peak, at.bindings[0].room
    (True, 720, 900.0)
    """
    bindings, breakers = [], []
    for unit in UNITS:
        total = quota.of(unit)
        if total is None:
            continue
        usual, room = normal.of(unit) or 0, total * ROOM
        known = {name: limit for name, load in limits.items() if (limit := load.of(unit))}
        largest = max(known, key=lambda name: (known[name], name), default="")
        bindings.append(Binding(unit, total, room, usual, known.get(largest, 0), largest))
        breakers += [
            Breaker(name, unit, limit, usual + limit)
            for name, limit in known.items()
            if usual + limit >= room
        ]
    # A tenant that breaks both is named once, by the quota that it breaks worse.
    share = {binding.unit: binding.room for binding in bindings}
    breakers.sort(key=lambda one: (-one.peak / share[one.unit], one.tenant))
    return Headroom(tuple(sorted(bindings, key=lambda one: -one.used)), _once(breakers))


def _once(breakers: Sequence[Breaker]) -> tuple[Breaker, ...]:
    first: dict[str, Breaker] = {}
    for one in breakers:
        first.setdefault(one.tenant, one)
    return tuple(first.values())
