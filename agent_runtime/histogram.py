"""How long things took, in buckets that grow by 5 %: any quantile within 2.5 %, added by adding."""

from __future__ import annotations

import math
from collections import Counter

GROWTH = 1.05
# Below it nothing is told apart, above it neither: a microsecond, and a day.
SHORTEST_MS, LONGEST_MS = 0.001, 86_400_000.0


class Histogram:
    """Counts of durations. Bounded by the buckets between the shortest and the longest; not locked.

    >>> h = Histogram()
    >>> for ms in range(1, 101):
    ...     h.add(ms)
    >>> round(h.quantile(0.5)), round(h.quantile(0.99)), h.count
    (51, 101, 100)
    """

    def __init__(self) -> None:
        self.count = 0
        self._buckets: Counter[int] = Counter()

    def add(self, milliseconds: float) -> None:
        """Count one duration."""
        within = min(LONGEST_MS, max(SHORTEST_MS, milliseconds))
        self._buckets[math.ceil(math.log(within) / math.log(GROWTH))] += 1
        self.count += 1

    def quantile(self, part: float) -> float | None:
        """Return the duration below which `part` of them were, in ms; None if there are none.

        Read at the geometric middle of its bucket.
        """
        wanted = part * self.count
        passed = 0
        for index in sorted(self._buckets):
            passed += self._buckets[index]
            if passed >= wanted:
                return float(GROWTH ** (index - 0.5))
        return None
