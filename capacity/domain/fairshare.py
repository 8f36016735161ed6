"""Max-min fairness by water-filling: nobody gets more than they ask for.

Nor does anybody who asks for more than their part get less of it than another of the same weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping


def allocate(
    capacity: float, demand: Mapping[str, float], weight: Mapping[str, float]
) -> dict[str, float]:
    """Divide `capacity` over `demand` (any one unit) by `weight`; return everybody's part.

    A name without a weight has weight 1. Weight 0 is served from what nobody else asks for, such
    names equally. No capacity: everybody gets 0. Raises ValueError for a demand, weight or capacity
    that is negative or no number; a demand may be infinite. Article 001, "Fair shares inside a
    cell".

    >>> allocate(3.5e6, {"a": 2.5e6, "b": 0.6e6, "c": 0.2e6, "idle": 0.0}, {})
    {'a': 2500000.0, 'b': 600000.0, 'c': 200000.0, 'idle': 0.0}
    >>> allocate(3.5e6, {"a": 2.5e6, "b": 0.6e6, "c": 0.2e6, "d": 2.5e6}, {})
    {'a': 1350000.0, 'b': 600000.0, 'c': 200000.0, 'd': 1350000.0}
    """
    for value in (capacity, *demand.values(), *weight.values()):
        if math.isnan(value) or value < 0:
            raise ValueError(f"{value} can't be divided")
    weighted = {name: weight.get(name, 1.0) for name in demand}
    parts = dict.fromkeys(demand, 0.0)
    left = _fill(capacity, {name: w for name, w in weighted.items() if w > 0}, demand, parts)
    _fill(left, {name: 1.0 for name, w in weighted.items() if w == 0}, demand, parts)
    return parts


def _fill(
    capacity: float,
    weights: Mapping[str, float],
    demand: Mapping[str, float],
    parts: dict[str, float],
) -> float:
    """Fill `parts` of the names in `weights`; return what is left."""
    # In the order in which the rising water reaches their demand; a tie may fall either way.
    names = sorted(weights, key=lambda name: (demand[name] / weights[name], name))
    # Added up from the end: taking away what is served would leave rounding where nothing is left.
    behind = [0.0] * (len(names) + 1)
    for at in range(len(names) - 1, -1, -1):
        behind[at] = behind[at + 1] + weights[names[at]]
    left = capacity
    for at, name in enumerate(names):
        # Together with everybody who asks for more, by weight.
        share = left * (weights[name] / behind[at])
        parts[name] = min(demand[name], share)
        left = max(0.0, left - parts[name])
    return left
