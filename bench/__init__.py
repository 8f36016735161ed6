"""Benches: what must be fast, or lossless, measured against a bar.

A bench is a module with `main(argv)` that prints its results by `report`. `python -m
bench.NAME` runs one, `make bench` all of `bench.__main__.BENCHES`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal


@dataclass(frozen=True)
class Bar:
    """One measured value beside what it must keep to."""

    bar: str
    value: float
    unit: str
    # None: the value is printed for people, nothing is asked of it.
    limit: float | None = None
    # Which side of the limit is good.
    wants: Literal["at most", "at least"] = "at most"

    @property
    def ok(self) -> bool:
        """Whether the value keeps to its limit.

        >>> Bar("fence", 5.0, "s", limit=6.0).ok, Bar("copy", 50.0, "x", 60.0, "at least").ok
        (True, False)
        """
        if self.limit is None:
            return True
        return self.value <= self.limit if self.wants == "at most" else self.value >= self.limit


def parser(description: str) -> argparse.ArgumentParser:
    """Return the command line that every bench has: `--json`; add your own options to it."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", action="store_true", help="one object a line instead of a table")
    return made


def report(bars: Iterable[Bar], *, as_json: bool) -> int:
    """Print each bar as it comes; return the exit code, 1 if any was missed.

    With `as_json` a line is `{"bar", "value", "unit", "limit", "ok"}`.
    """
    missed = 0
    for bar in bars:
        missed += not bar.ok
        if as_json:
            line = asdict(bar)
            del line["wants"]
            print(json.dumps({**line, "ok": bar.ok}), flush=True)
        else:
            limit = "" if bar.limit is None else f"{bar.wants} {bar.limit:,g}"
            print(
                f"{'ok  ' if bar.ok else 'MISS'}  {bar.bar:<58} {bar.value:>12,.4g} {bar.unit:<12}"
                f" {limit}".rstrip(),
                flush=True,
            )
    return 1 if missed else 0


def only(names: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the named ones of `known`, or all if none is named; exits on an unknown name."""
    if unknown := sorted(set(names) - set(known)):
        raise SystemExit(f"There is no bench {', '.join(unknown)}; there are {', '.join(known)}.")
    return [name for name in known if not names or name in names]
