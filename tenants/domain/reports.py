"""What an instance reports, and which reports count."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

# How long an instance may use its shares in full from the moment it sent a report; past that,
# the safe part, until its lease is over.
GRANT_SECONDS = 30.0
# Bounds of what is kept of one report.
ID_MAX, MAX_REASONS, MAX_ENDPOINTS = 128, 50, 100
COUNT_MAX, NUMBER_MAX = 1_000_000_000, 2**53
EVICTED = ("size", "idle", "generation", "gone")
# The values of a share, in the order in which they are kept: an instance of thousands of tenants
# has thousands of these, and names would be most of them.
SHARE = (
    "runs_per_second",
    "max_concurrent_runs",
    "tokens_per_minute",
    "safe_runs_per_second",
    "safe_max_concurrent_runs",
    "safe_tokens_per_minute",
    "tokens_left",
)


@dataclass(frozen=True, slots=True)
class Usage:
    """What one instance served one tenant in one minute, and what it refused."""

    tenant: str
    minute: datetime
    turns: int = 0
    model_calls: int = 0
    tokens: int = 0
    # Reason -> refused turns; refused demand is demand.
    refused: dict[str, int] = field(default_factory=dict)
    # The same, of limits that are only tried: these turns were served.
    would_refuse: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Dirty:
    """A session that was served while its tenant moved."""

    tenant: str
    user_id: str
    session_id: str


@dataclass(frozen=True, slots=True)
class Report:
    """One report, as it came."""

    instance: str
    boot: str
    seq: int
    # "epoch.number", or "" while the instance holds no policy.
    applied_version: str
    # Tenant slug -> running turns, read under the lock that admission takes.
    in_flight: dict[str, int]
    in_flight_older: dict[str, int]
    usage: tuple[Usage, ...] = ()
    dirty: tuple[Dirty, ...] = ()
    # Number of the last grants that it applied. Read before in_flight: a count may then be above
    # a share that has just become smaller, never the other way round.
    grants_number: int = 0
    # Whether its Runners are built ahead.
    ready: bool = True
    # What it says of its cache of Runners and of its circuit breakers: shown, proves nothing.
    runners: dict[str, Any] = field(default_factory=dict)
    breakers: dict[str, Any] = field(default_factory=dict)


def verdict(last: int, seq: int) -> Literal["next", "again", "gap"]:
    """Return what report number `seq` is after `last` was the last one taken.

    Only the next one counts. An older one is a retry whose answer was lost: it is acknowledged
    and changes nothing. A gap means that something was lost, so nothing is taken.

    >>> verdict(4, 5), verdict(4, 4), verdict(4, 6)
    ('next', 'again', 'gap')
    """
    if seq == last + 1:
        return "next"
    return "again" if seq <= last else "gap"


def merged(lines: Iterable[Usage]) -> list[Usage]:
    """Return one line per tenant and minute, in the order in which they first came.

    >>> at = datetime(2026, 3, 12, 2, 45)
    >>> lines = [Usage("a", at, turns=1, refused={"rate": 1}), Usage("a", at, turns=2)]
    >>> [(line.turns, line.refused) for line in merged(lines)]
    [(3, {'rate': 1})]
    """
    sums: dict[tuple[str, datetime], Usage] = {}
    for line in lines:
        minute = line.minute.replace(second=0, microsecond=0)
        had = sums.get((line.tenant, minute), Usage(line.tenant, minute))
        sums[line.tenant, minute] = Usage(
            line.tenant,
            minute,
            turns=had.turns + line.turns,
            model_calls=had.model_calls + line.model_calls,
            tokens=had.tokens + line.tokens,
            refused=_added(had.refused, line.refused),
            would_refuse=_added(had.would_refuse, line.would_refuse),
        )
    return list(sums.values())


def share_sent(kept: Sequence[Any]) -> dict[str, Any]:
    """Return a share as it is sent.

    >>> share_sent([0.5, 5, None, 0.25, 2, None, 900])["safe_max_concurrent_runs"]
    2
    """
    return dict(zip(SHARE, kept, strict=True))


def storable(value: Any) -> str | None:
    """Return an id as it is, or None where the database could not hold it."""
    fits = isinstance(value, str) and len(value) <= ID_MAX and "\0" not in value
    # A lone surrogate is no text in any encoding.
    return value if fits and not any("\ud800" <= c <= "\udfff" for c in value) else None


def clean_number(value: Any) -> int:
    """Return a number of grants, 0 for what is none: then all of them are sent again.

    >>> clean_number(7), clean_number(-1), clean_number(True), clean_number("7")
    (7, 0, 0, 0)
    """
    return _count(value, NUMBER_MAX) or 0


def clean_ready(value: Any) -> bool:
    """Return whether an instance is ready; one that says nothing that we know is."""
    return value if isinstance(value, bool) else True


def clean_counts(value: Any) -> dict[str, int]:
    """Return reasons with their counts, without what is none.

    >>> clean_counts({"rate": 3, "quota": -1, "budget": 1.5})
    {'rate': 3}
    """
    kept: dict[str, int] = {}
    for reason, said in _items(value):
        count = _count(said)
        if count is not None and storable(reason) is not None and len(kept) < MAX_REASONS:
            kept[reason] = count
    return kept


def clean_runners(value: Any) -> dict[str, Any] | None:
    """Return what an instance says of its cache of Runners: known fields with sound values.

    None: it says nothing. A field that makes no sense is 0, or None where nobody measured.

    >>> (clean_runners({"size": 3, "limit": float("nan"), "more": []}) or {})["limit"]
    0
    """
    if not isinstance(value, dict) or not value:
        return None
    evicted, build_ms = _dict(value.get("evicted")), _dict(value.get("build_ms"))
    return {
        "size": _count(value.get("size")) or 0,
        "limit": _count(value.get("limit")) or 0,
        "idle_seconds": _amount(value.get("idle_seconds")) or 0.0,
        "evicted": {cause: _count(evicted.get(cause)) or 0 for cause in EVICTED},
        "builds": _count(value.get("builds")) or 0,
        "build_ms": {name: _amount(build_ms.get(name)) for name in ("p50", "p99")},
        "bytes": _count(value.get("bytes"), NUMBER_MAX),
    }


def clean_breakers(value: Any) -> dict[str, Any]:
    """Return what an instance says of its circuit breakers, by model endpoint.

    An endpoint whose name we can't keep, or whose state nobody knows, is left out.
    """
    kept: dict[str, Any] = {}
    for endpoint, said in _items(value):
        state = _dict(said).get("state")
        if storable(endpoint) is None or state not in ("closed", "open", "half_open"):
            continue
        counts = ("failures", "own_quota_429", "shared_pool_429")
        kept[endpoint] = {
            "state": state,
            **{name: _count(said.get(name)) or 0 for name in counts},
            "retry_at": _moment(said.get("retry_at")),
        }
        if len(kept) == MAX_ENDPOINTS:
            break
    return kept


def _added(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {reason: one.get(reason, 0) + other.get(reason, 0) for reason in {**one, **other}}


def _items(value: Any) -> Collection[tuple[Any, Any]]:
    return _dict(value).items()


def _dict(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: Any, most: int = COUNT_MAX) -> int | None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value if whole and 0 <= value <= most else None


def _amount(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    # Compared before it is made a float: an int may be larger than any.
    return float(value) if 0 <= value <= COUNT_MAX and math.isfinite(value) else None


def _moment(value: Any) -> str | None:
    try:
        at = datetime.fromisoformat(value) if isinstance(value, str) else None
        return None if at is None or at.tzinfo is None else at.astimezone(UTC).isoformat()
    except (ValueError, OverflowError):
        return None
