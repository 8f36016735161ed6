"""In which minute a runtime's usage counts, whatever its clock says."""

from __future__ import annotations

from datetime import datetime, timedelta

# A clock that is no further off than this is believed.
CLOCK_OFF = timedelta(hours=1)
# A process that joined anew may bring what it could not report for so long.
HELD_LONGEST = timedelta(days=1)


def counted_minute(said: datetime, *, heard_at: datetime | None, now: datetime) -> datetime:
    """Return the minute in which usage counts that a runtime says was of the minute `said`.

    That is the minute itself where it can be true: not after now, and not before the control
    plane last heard of the instance (`heard_at`; None: the process had another id before), for
    what is older was in an earlier report. An hour more is allowed each way. Where only a wrong
    clock explains it, usage counts in the minute in which it arrived: it is never lost.

    >>> from datetime import UTC
    >>> now = datetime(2026, 3, 2, 12, 0, 30, tzinfo=UTC)
    >>> heard, late = now - timedelta(hours=5), datetime(2026, 3, 2, 7, 30, tzinfo=UTC)
    >>> f"{counted_minute(late, heard_at=heard, now=now):%H:%M}"
    '07:30'
    >>> f"{counted_minute(late, heard_at=now, now=now):%H:%M}"
    '12:00'
    """
    earliest = (now - HELD_LONGEST if heard_at is None else heard_at) - CLOCK_OFF
    at = said if earliest <= said <= now + CLOCK_OFF else now
    return at.replace(second=0, microsecond=0)
