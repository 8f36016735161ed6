"""The rules of safety that a database constraint can't keep, and who breaks one now.

That at most one cell takes a turn of a tenant is kept by constraints of the policy's rows
(`one_cell_owns_a_tenant`, `one_cell_takes_new_sessions`): whatever anybody does wrong, two sides
are never open there, and a store's guard row says the same of its data. What is here is the other
half: at least one cell takes them, or somebody is about to see to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from migrations_app.domain.phases import REVERSED, Phase


class Rule(StrEnum):
    """What must hold of every tenant at any moment."""

    NOBODY_SERVES = "nobody_serves"  # Some cell takes its turns, or something explains that none.
    FENCE_OVERDUE = "fence_overdue"  # A closed fence opens by its deadline: somebody sees to it.


# Each rule as it is broken.
WORDS: dict[Rule, str] = {
    Rule.NOBODY_SERVES: "no cell takes its turns, and nothing explains that",
    Rule.FENCE_OVERDUE: "its fence should have opened by itself, or nobody is there to open it",
}

# Phases in which a closed fence waits for its deadline. In any other it is about to open.
TIMED = (REVERSED - {Phase.REVERSE_TARGET}) | {Phase.DRAIN, Phase.DELTA, Phase.VERIFY}


@dataclass(frozen=True, slots=True)
class Closing:
    """What a tenant's live move keeps closed."""

    move: int
    phase: Phase
    # Since when turns are refused.
    since: datetime
    # When they should be taken again by itself. None: once its work is done, however long that is.
    until: datetime | None
    # When the machine may take its next step: long past, nobody takes any.
    due_at: datetime

    def stands(self, *, now: datetime, margin: timedelta) -> bool:
        """Return whether nobody takes the move's steps, although one is due."""
        return self.due_at + margin < now

    def overdue(self, *, now: datetime, margin: timedelta) -> bool:
        """Return whether it should have opened by now, or nobody is there to see to it.

        Whose workers are gone need not be waited for: nothing would open it at its deadline.
        """
        late = self.until is not None and self.until + margin < now
        return late or self.stands(now=now, margin=margin)


@dataclass(frozen=True, slots=True)
class Facts:
    """What the rules look at, of one tenant in one moment."""

    # A cell takes turns of the sessions that it knows, and one takes new sessions.
    owned: bool
    takes_new: bool
    # All machines are stopped.
    halted: bool
    # A comparison with the stores refuses it, or a person left it refused after one.
    found: bool
    # None: no live move closes anything.
    closing: Closing | None

    @property
    def served(self) -> bool:
        """Whether each of its turns is taken by some cell."""
        return self.owned and self.takes_new


def broken(facts: Facts, *, now: datetime, margin: timedelta) -> Rule | None:
    """Return the rule that is broken; None: none is.

    `margin`: how long a machine may take to come back to a row whose worker was killed.

    >>> at = datetime(2026, 3, 12, 2, 45)
    >>> until = at + timedelta(seconds=150)
    >>> fence = Closing(7, Phase.DELTA, at, until, due_at=until)
    >>> refused = Facts(False, False, False, False, fence)
    >>> broken(refused, now=at + timedelta(seconds=190), margin=timedelta(seconds=45))
    >>> broken(refused, now=at + timedelta(seconds=200), margin=timedelta(seconds=45))
    <Rule.FENCE_OVERDUE: 'fence_overdue'>
    """
    if facts.served:
        return None
    if facts.closing is not None:
        late = facts.closing.overdue(now=now, margin=margin)
        return Rule.FENCE_OVERDUE if late else None
    explained = facts.halted or facts.found
    return None if explained else Rule.NOBODY_SERVES


def closing(
    *,
    move: int,
    phase: Phase,
    phase_since: datetime,
    due_at: datetime,
    fence_closed_at: datetime | None,
    fence_opened_at: datetime | None,
    deadline_at: datetime | None,
    narrowed_at: datetime | None,
    both_serve: bool,
) -> Closing | None:
    """Return what a live move keeps closed, by its columns; None: nothing.

    `narrowed_at`: since when a split's source takes only sessions that it has; until the target
    takes the others (`both_serve`) they are refused.
    """
    if fence_closed_at is not None and fence_opened_at is None:
        # Without a deadline it is one that only has to be opened, as after a restore. One that was
        # late before it came as far as this is late still: whoever opened it was killed in it.
        deadline = deadline_at or fence_closed_at
        until = deadline if phase in TIMED else min(deadline, phase_since)
        return Closing(move, phase, fence_closed_at, until, due_at)
    if narrowed_at is not None and not both_serve and fence_opened_at is None:
        out = phase_since if phase == Phase.REOPEN else None
        return Closing(move, phase, narrowed_at, out, due_at)
    return None
