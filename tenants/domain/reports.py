"""What an instance reports, and which reports count."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal


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
        refused = {
            reason: had.refused.get(reason, 0) + line.refused.get(reason, 0)
            for reason in {**had.refused, **line.refused}
        }
        sums[line.tenant, minute] = Usage(
            line.tenant,
            minute,
            turns=had.turns + line.turns,
            model_calls=had.model_calls + line.model_calls,
            tokens=had.tokens + line.tokens,
            refused=refused,
        )
    return list(sums.values())
