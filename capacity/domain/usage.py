"""Sums of usage, the days that they belong to, and what refusals mean."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from zoneinfo import ZoneInfo

# What a column holds. A broken runtime's nonsense stops here instead of stopping the ledger.
MOST = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Reason:
    """Why turns are refused, in the words of a tenant's own page."""

    name: str
    # What happened.
    why: str
    # What the tenant can do about it.
    more: str


_ASK = "Ask your operator for a higher limit"
REASONS = {
    reason.name: reason
    for reason in (
        Reason(
            "rate",
            "More turns were begun in a second than your plan allows.",
            f"Spread them out: whoever waits as long as the answer says is let in. {_ASK} of runs "
            "per second if the load is here to stay.",
        ),
        Reason(
            "concurrency",
            "As many turns ran at once as your plan allows.",
            f"Begin the next when one has ended. {_ASK} of concurrent runs, or for the bridge "
            "tier with workers of its own.",
        ),
        Reason(
            "quota",
            "Your part of the model's quota of this minute was used up.",
            "Try again when the answer says so. Ask your operator for a larger weight, or for the "
            "bridge tier with a model account of its own.",
        ),
        Reason(
            "budget",
            "Today's token budget was used up. It starts anew at your midnight.",
            "Ask your operator for a larger daily token budget: it holds within seconds.",
        ),
        Reason(
            "draining",
            "Your sessions were being moved, or a server was being replaced.",
            "Nothing to do: this takes seconds, and the same turn sent again is served.",
        ),
        Reason(
            "breaker",
            "The model's endpoint failed again and again, so calls were held back.",
            "Nothing to do: they are let through when it answers again. With the bridge tier you "
            "have a model account that nobody else wears out.",
        ),
        Reason(
            "other",
            "The server gave a reason that this page has no words for.",
            "Ask your operator, who finds it in the log of the runtimes.",
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Counts:
    """What was used and refused; sums of it are bounded in size and in kinds of refusals."""

    turns: int = 0
    model_calls: int = 0
    tokens: int = 0
    # Reason -> turns.
    refused: Mapping[str, int] = field(default_factory=dict)
    # The same, of limits that are only tried: these turns were served.
    would_refuse: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: Counts) -> Counts:
        """Return the sum.

        >>> Counts(turns=1, refused={"rate": 2}) + Counts(tokens=9, refused={"rate": 1, "x": 1})
        Counts(turns=1, model_calls=0, tokens=9, refused={'rate': 3, 'other': 1}, would_refuse={})
        """
        return Counts(
            turns=min(MOST, self.turns + other.turns),
            model_calls=min(MOST, self.model_calls + other.model_calls),
            tokens=min(MOST, self.tokens + other.tokens),
            refused=_by_reason(self.refused, other.refused),
            would_refuse=_by_reason(self.would_refuse, other.would_refuse),
        )

    @property
    def refusals(self) -> int:
        """Turns that were refused, whyever."""
        return sum(self.refused.values())


def _by_reason(*parts: Mapping[str, int]) -> dict[str, int]:
    """Return sums by reason. Unknown ones are one kind: runtimes may not fill a row with names."""
    sums: dict[str, int] = {}
    for part in parts:
        for said, turns in part.items():
            name = said if said in REASONS else "other"
            sums[name] = min(MOST, sums.get(name, 0) + turns)
    return sums


def day_of(at: datetime, zone: str) -> date:
    """Return the day in which a moment is in a time zone.

    >>> late = datetime(2026, 3, 1, 23, 30, tzinfo=UTC)
    >>> f"{day_of(late, 'UTC')} {day_of(late, 'Europe/Berlin')}"
    '2026-03-01 2026-03-02'
    """
    return at.astimezone(ZoneInfo(zone)).date()


def next_midnight(now: datetime, zone: str) -> datetime:
    """Return when the next day begins in a time zone (UTC): when a daily budget starts anew.

    Where clocks are put forward at midnight that is the moment at which they are.

    >>> f"{next_midnight(datetime(2026, 3, 29, 12, 0, tzinfo=UTC), 'Europe/Berlin'):%d %H:%M}"
    '29 22:00'
    >>> f"{next_midnight(datetime(2026, 4, 23, 12, 0, tzinfo=UTC), 'Africa/Cairo'):%d %H:%M}"
    '23 22:00'
    """
    day = day_of(now, zone) + timedelta(days=1)
    at = _begins(day, zone, fold=0)
    # Clocks that are put back over midnight pass it twice, and the first time may be over.
    return at if at > now else _begins(day, zone, fold=1)


def bounds(day: date, zone: str) -> tuple[datetime, datetime]:
    """Return when a day begins and when the next one does, in a time zone (UTC)."""
    return _begins(day, zone, fold=0), _begins(day + timedelta(days=1), zone, fold=0)


def _begins(day: date, zone: str, *, fold: int) -> datetime:
    return datetime.combine(day, time.min, ZoneInfo(zone)).replace(fold=fold).astimezone(UTC)


def differs_enough(published: Iterable[str], wanted: Iterable[str]) -> bool:
    """Return whether a list of tenants to build ahead is worth a new version of the policy.

    Runtimes use it when they start and build what is missing when it is asked for, so a tenth of
    it may be out of date, and its order too.

    >>> differs_enough(["a", "b"], ["b", "a"]), differs_enough(["a", "b"], ["a", "c"])
    (False, True)
    """
    had, now = set(published), set(wanted)
    return len(had ^ now) > max(len(had), len(now)) // 10
