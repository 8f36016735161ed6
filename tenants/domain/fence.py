"""When a fence may begin, and when it has held: PROTOCOL.md's rules 1, 3 and 5 as arithmetic.

Everything here is judged on the database's clock, which callers pass as `now`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Literal, Protocol

# How often runtimes ask when nothing moves, and from the last backfill pass of a move until
# its fence opens.
SLOW_MS = 5_000
FAST_MS = 250
# An instance that was silent for so many of its own polls keeps a fence from beginning.
SILENT_POLLS = 3
# The client spreads its polls by a tenth, so an honest poll may be that late.
JITTER = 1.1
# The instance counts its lease from the moment it sent the report, we from when it came: with
# a margin for clocks that run at different speeds it always stops first.
LEASE_MARGIN = timedelta(seconds=5)
# So long an ask to declare an instance dead waits for a second person: what the first saw has
# to be what the second looks at.
DEAD_ASK_LASTS = timedelta(minutes=30)


class Accepts(StrEnum):
    """Which turns a cell takes of a tenant."""

    ALL = "all"  # The tenant lives here.
    NONE = "none"  # The fence is closed: every new turn is answered retry-after.
    EXISTING = "existing"  # The source of a split: only sessions that its store has.
    NEW = "new"  # The target of a split: only turns that the source did not know.
    MOVED = "moved"  # A tombstone: it names the cell that the tenant moved to.


class GoneWhy(StrEnum):
    """Why an instance is gone for good."""

    LEFT = "left"  # It said so itself, after its own drain.
    LAPSED = "lapsed"  # Its lease and its longest turn are over.
    REPLACED = "replaced"  # The same process joined again under a new id.
    DEAD = "dead"  # A person declared it dead.


@dataclass(frozen=True, slots=True)
class InstanceWord:
    """What one instance last said, as far as one tenant's fence is concerned."""

    id: int
    name: str
    # closed: it applied the version, nothing runs. draining: applied, turns still run. missing:
    # not applied, or not heard in time. lapsed: it can't write any more. gone: marked so.
    state: Literal["closed", "draining", "missing", "lapsed", "gone"]
    applied_version: int
    in_flight: int
    # None: it has not reported yet.
    reported_at: datetime | None
    lease_until: datetime


@dataclass(frozen=True, slots=True)
class Proof:
    """Whether every instance that could still write has closed the fence, and who has not."""

    drained: bool
    instances: tuple[InstanceWord, ...]
    # Ids that were counted as lapsed: the transaction that settles must mark exactly these gone.
    lapsed: tuple[int, ...]
    in_flight: int

    @property
    def missing(self) -> tuple[InstanceWord, ...]:
        """Those that are waited for: they have not heard, or turns still run in them."""
        return tuple(word for word in self.instances if word.state in ("missing", "draining"))


class Leased(Protocol):
    """What a lapse is judged by: an instance's row, or its facts."""

    @property
    def lease_until(self) -> datetime: ...

    @property
    def longest_turn_seconds(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Facts:
    """One instance's row, as far as the fence is concerned."""

    id: int
    name: str
    longest_turn_seconds: float
    lease_until: datetime
    # Its process had an id before, and turns that run are this one's to report.
    took_over: bool
    # None: it never asked for a policy.
    polled_at: datetime | None
    reported_at: datetime | None
    poll_after_ms: int
    hurried_at: datetime | None
    # 0 where the applied version is of another epoch: that counts as nothing applied.
    applied_version: int
    # Running turns of the tenant in question.
    in_flight: int
    gone: bool


def cadence_ms(fast_until: datetime | None, now: datetime) -> int:
    """Return after how many milliseconds an instance of the cell should ask again."""
    return FAST_MS if fast_until is not None and now < fast_until else SLOW_MS


def lapses_at(lease_until: datetime, longest_turn_seconds: float) -> datetime:
    """Return when an instance can't write any more, on the database's clock.

    A lease bounds when a turn may *start*; a turn that started in its last moment may run for
    the longest turn that the instance stated, then the instance cuts it.
    """
    return lease_until + LEASE_MARGIN + timedelta(seconds=longest_turn_seconds)


def has_lapsed(one: Leased, now: datetime) -> bool:
    """Return whether the instance's lease, margin and longest turn are all over."""
    return lapses_at(one.lease_until, one.longest_turn_seconds) <= now


def silence(poll_after_ms: int) -> timedelta:
    """Return after how long without a word an instance counts as silent: three of its own polls.

    >>> silence(5_000).total_seconds()
    16.5
    """
    return timedelta(milliseconds=SILENT_POLLS * poll_after_ms * JITTER)


def ask_ends(asked_at: datetime | None, now: datetime) -> datetime | None:
    """Return until when an ask to declare an instance dead waits; None if none does."""
    if asked_at is None or now >= asked_at + DEAD_ASK_LASTS:
        return None
    return asked_at + DEAD_ASK_LASTS


def counts(facts: Facts) -> bool:
    """Return whether the instance may run turns, unless it has lapsed.

    One that never asked for a policy serves nothing, so it counts neither in rule 1 nor in 5; if
    it asks after the fence was published, the fence is in its first policy. A process that
    joined anew may still run turns that it began under its old id, so it counts at once.
    """
    return not facts.gone and (facts.took_over or facts.polled_at is not None)


def waits_for(instances: Iterable[Facts], *, now: datetime) -> list[InstanceWord]:
    """Return the instances that keep a fence from beginning (rule 1).

    Those are the ones that were silent for three polls, or have not yet polled at the fast cadence:
    closing a fence on them would refuse turns for as long as they take to hear of it.
    One that lapsed, or never asked for a policy, can't write and isn't waited for.
    """
    return [_word(one, "missing") for one in _could_write(instances, now) if not _listens(one, now)]


def judge(instances: Iterable[Facts], version: int, *, now: datetime) -> Proof:
    """Return whether the fence published at `version` has held everywhere (rule 5).

    `applied_version` and `in_flight` of a report were read together under the lock that
    admission takes, so from an instance that reported `version` no turn starts, and its 0
    stays 0. Hence every instance that could still write must have said both.
    """
    known = list(instances)
    counted = _could_write(known, now)
    words = []
    for one in counted:
        if one.applied_version < version:
            words.append(_word(one, "missing"))
        else:
            words.append(_word(one, "draining" if one.in_flight else "closed"))
    lapsed = [one for one in known if counts(one) and has_lapsed(one, now)]
    gone = [one for one in known if one.gone]
    return Proof(
        drained=all(word.state == "closed" for word in words),
        instances=(
            *words,
            *(_word(one, "lapsed") for one in lapsed),
            *(_word(one, "gone") for one in gone),
        ),
        lapsed=tuple(one.id for one in lapsed),
        in_flight=sum(word.in_flight for word in words),
    )


def _could_write(instances: Iterable[Facts], now: datetime) -> list[Facts]:
    return [one for one in instances if counts(one) and not has_lapsed(one, now)]


def _listens(one: Facts, now: datetime) -> bool:
    if one.polled_at is None or one.hurried_at is None:
        return False
    # The poll that was told the fast cadence still came at the slow one; the next shows it.
    return one.hurried_at < one.polled_at and now - one.polled_at <= silence(one.poll_after_ms)


def _word(
    one: Facts, state: Literal["closed", "draining", "missing", "lapsed", "gone"]
) -> InstanceWord:
    return InstanceWord(
        id=one.id,
        name=one.name,
        state=state,
        applied_version=one.applied_version,
        in_flight=one.in_flight,
        reported_at=one.reported_at,
        lease_until=one.lease_until,
    )
