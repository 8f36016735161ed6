"""How many Runners a cache may hold, which of its limits bites, and what a return costs.

After article 001: build some Runners, weigh one, divide; then watch the build time's p99 and the
evictions by cause.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MIB = 2**20
# A tenant that comes back after its Runner was evicted waits for a new one on its first turn.
RETURN_BAR_MS = 2_000
# Why an entry left the cache. The first two are limits of the cache, the others are meant.
CAUSES = ("size", "idle", "generation", "gone")


@dataclass(frozen=True)
class CacheWord:
    """What one instance says of its cache of Runners. Zero and None: it has not said so."""

    size: int
    limit: int
    idle_seconds: float
    # Cause -> how many Runners left since the process began.
    evicted: Mapping[str, int]
    builds: int
    p50_ms: float | None
    p99_ms: float | None
    # Of one Runner. None: not measured.
    runner_bytes: int | None


def cache_word(said: Mapping[str, Any]) -> CacheWord | None:
    """Return what `RuntimeInstance.runners` holds; None where nothing was said yet.

    >>> cache_word({}) is None
    True
    >>> cache_word({"size": 3, "limit": 10, "build_ms": {"p99": 80}}).p99_ms
    80.0
    """
    if not said:
        return None
    build = said.get("build_ms") or {}
    evicted = said.get("evicted") or {}
    return CacheWord(
        size=int(said.get("size", 0)),
        limit=int(said.get("limit", 0)),
        idle_seconds=float(said.get("idle_seconds", 0)),
        evicted={cause: int(evicted.get(cause, 0)) for cause in CAUSES},
        builds=int(said.get("builds", 0)),
        p50_ms=None if build.get("p50") is None else float(build["p50"]),
        p99_ms=None if build.get("p99") is None else float(build["p99"]),
        runner_bytes=None if not said.get("bytes") else int(said["bytes"]),
    )


def biting(evicted: Mapping[str, int]) -> str:
    """Return which limit of the cache takes Runners away: "size", "idle", or "" for neither.

    The one that took more. Rotated secrets and tenants that left are no limits.

    >>> biting({"size": 40, "idle": 12, "gone": 90}), biting({"idle": 3}), biting({"gone": 2})
    ('size', 'idle', '')
    """
    size, idle = evicted.get("size", 0), evicted.get("idle", 0)
    if not size and not idle:
        return ""
    return "size" if size >= idle else "idle"


def fits(heap_bytes: int, runner_bytes: int) -> int:
    """Return how many Runners of a measured weight a heap budget holds.

    >>> fits(512 * MIB, 262_144)
    2048
    """
    return heap_bytes // max(1, runner_bytes)


def rebuild_share(tenants: int, held: int) -> float:
    """Return the share of a cell's tenants that find no Runner, all equally active (0 to 1).

    What a cache that is too small costs: each of them waits for a build on its first turn.

    >>> rebuild_share(4_000, 3_000), rebuild_share(40, 2_048), rebuild_share(0, 10)
    (0.25, 0.0, 0.0)
    """
    return max(0, tenants - held) / tenants if tenants else 0.0
