"""How long each kind of work took, and how much of it was done: what rates are made of."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Stopwatch:
    """Adds up seconds and things by what was done, such as "copy" or "compare"."""

    spent: dict[str, float] = field(default_factory=dict)
    count: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def timing(self, what: str, count: int) -> Iterator[None]:
        """Time the body, in which `count` things are done."""
        begun = time.perf_counter()
        yield
        self.spent[what] = self.spent.get(what, 0.0) + time.perf_counter() - begun
        self.count[what] = self.count.get(what, 0) + count
