"""How hard BACKFILL works: the pace that was chosen, and the relief that a slow store gets.

A copy that slows down has one of two reasons. Sessions may just be larger where it is now:
slowing down further would help nobody. Or a store is loaded, and whoever is served
from it waits too: then the copy works only a share of the time. So two things must agree
before it eases: the copy's own seconds per session, and a small look of the same size at
the store, again and again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tenants.domain.words import counted, duration, rate

# Fewer sessions than this say nothing about a speed; slow paces gather them over steps.
LEAST_SESSIONS = 20
# A copy is slow at this many times its best, and as it was below the second figure. Between
# them nothing changes, or noise would flap it.
SLOW, FINE = 2.0, 1.3
# A store is slow when the same small look takes so many times its best.
SLOW_LOOK = 1.5
# Looks faster than this are all the same: what differs below is noise, up to 8 ms of it on two
# cores at a load of 3 (seconds).
FLOOR_SECONDS = 0.010
# So many judgements in a row move the ease by one step: one alone may be somebody's vacuum.
IN_A_ROW = 2
LEAST_EASE = 1 / 16
# No rest is longer, however slow a chunk was: recovery must be noticed (seconds).
LONGEST_REST = 60.0
# The first so many sessions of the first pass are the sample that is named in the log.
SAMPLE_SESSIONS = 500

SHARES = {
    1 / 2: "half the time",
    1 / 4: "a quarter of the time",
    1 / 8: "an eighth of the time",
    1 / 16: "a sixteenth of the time",
}


# --- the chosen pace ---------------------------------------------------------------------------


def backfill_seconds(sessions: int, per_second: float) -> float:
    """Return how long a copy of `sessions` takes at so many per second.

    >>> backfill_seconds(12_600, 40)
    315.0
    """
    return sessions / per_second


def spread(sessions: int, window_seconds: float) -> float:
    """Return sessions per second that spread a copy over a window.

    >>> round(spread(12_600, 3 * 3600), 2)
    1.17
    """
    return sessions / window_seconds


def pace_from_budget(writes_per_second: float, writes_per_session: float) -> float:
    """Return sessions per second that keep a store's writes within a budget.

    A session is written as its own row and one for each of its events.

    >>> pace_from_budget(840, 21)
    40.0
    """
    return writes_per_second / max(1.0, writes_per_session)


def pace_now(*, left: int, per_second: float | None, window_seconds: float | None) -> float | None:
    """Return the pace of the next step in sessions per second; None is as fast as it goes.

    `left` sessions are still to be passed, `window_seconds` remain until the chosen finish time
    (None: none was chosen). Past that time nothing is held back any more.

    >>> pace_now(left=12_600, per_second=40, window_seconds=None)
    40
    >>> round(pace_now(left=6_300, per_second=None, window_seconds=5400), 2)
    1.17
    >>> pace_now(left=6_300, per_second=None, window_seconds=-1) is None
    True
    """
    if window_seconds is None:
        return per_second
    return spread(left, window_seconds) if left > 0 and window_seconds > 0 else None


def late_seconds(left: int, per_second: float | None, window_seconds: float) -> float:
    """Return by how much a finish time is missed at the present rate; 0 if it is kept.

    >>> late_seconds(12_600, 40, 300), late_seconds(12_600, 40, 315)
    (15.0, 0.0)
    """
    if not per_second:
        return 0.0
    return max(0.0, backfill_seconds(left, per_second) - max(0.0, window_seconds))


# --- the relief --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Speed:
    """What a move remembers of its own speed, to tell a slow store from an ordinary one."""

    # Best seconds per session, by how many binary digits a chunk's size has: small chunks
    # spend most of their time on what every chunk costs, and are compared among themselves.
    best: Mapping[str, float] = field(default_factory=dict)
    # Best seconds of the small look at each side. None: none yet.
    source: float | None = None
    target: float | None = None
    # Judgements in a row that it is slow (above zero) or fine again (below).
    streak: int = 0
    # What is gathered until it is enough to judge by.
    digits: int = 0
    sessions: int = 0
    seconds: float = 0.0
    # The first sessions of the first pass, and how long they took to copy.
    sample_sessions: int = 0
    sample_seconds: float = 0.0

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> Speed:
        """Read what `as_json` wrote; {} is a move that has copied nothing."""
        return cls(**kept)

    def as_json(self) -> dict[str, Any]:
        """Return what is kept on the move."""
        return asdict(self)

    @property
    def sample_rate(self) -> float | None:
        """Sessions per second of the sample; None while it is not whole."""
        if self.sample_sessions < SAMPLE_SESSIONS or self.sample_seconds <= 0:
            return None
        return self.sample_sessions / self.sample_seconds


@dataclass(frozen=True)
class Looked:
    """What one step saw: its copying, and how long the same small look at each side took."""

    chunks: int
    sessions: int
    seconds: float
    source_seconds: float
    target_seconds: float


@dataclass(frozen=True)
class Judged:
    """What follows: the share of time to work, and how many times its best each figure took."""

    ease: float
    speed: Speed
    copying: float = 1.0
    source: float = 1.0
    target: float = 1.0
    # Not enough was gathered to say anything.
    thin: bool = False


def judge(speed: Speed, ease: float, looked: Looked) -> Judged:
    """Return the share of time that the next step works, and what is remembered from now on.

    It halves, down to a sixteenth, when copying takes more than twice its best per session
    and a store's look confirms it, twice in a row; it doubles, back up to 1, when either is as it
    was, twice in a row.

    >>> quick = Looked(1, 500, 0.5, 0.010, 0.010)
    >>> slow = Looked(1, 500, 1.5, 0.031, 0.010)
    >>> at = judge(Speed(), 1.0, quick)
    >>> at.ease
    1.0
    >>> at = judge(at.speed, at.ease, slow); at.ease
    1.0
    >>> at = judge(at.speed, at.ease, slow); at.ease, round(at.source, 1), at.target
    (0.5, 3.1, 1.0)
    >>> at = judge(at.speed, at.ease, quick); at = judge(at.speed, at.ease, quick); at.ease
    1.0
    """
    digits = (looked.sessions // max(1, looked.chunks)).bit_length()
    if digits != speed.digits:
        speed = replace(speed, digits=digits, sessions=0, seconds=0.0)
    sessions, seconds = speed.sessions + looked.sessions, speed.seconds + looked.seconds
    if sessions < LEAST_SESSIONS:
        return Judged(ease, replace(speed, sessions=sessions, seconds=seconds), thin=True)
    each, kind = seconds / sessions, str(digits)
    best = speed.best.get(kind)
    copying = 1.0 if best is None else each / best
    source = _times(looked.source_seconds, speed.source)
    target = _times(looked.target_seconds, speed.target)
    looks = max(source, target)
    if copying > SLOW and looks > SLOW_LOOK:
        streak = max(0, speed.streak) + 1
    elif ease < 1 and (copying < FINE or looks < FINE):
        streak = min(0, speed.streak) - 1
    else:
        streak = 0
    if abs(streak) >= IN_A_ROW:
        ease = max(LEAST_EASE, ease / 2) if streak > 0 else min(1.0, ease * 2)
        streak = 0
    kept = replace(
        speed,
        best={**speed.best, kind: _better(each, best)},
        source=_better(looked.source_seconds, speed.source),
        target=_better(looked.target_seconds, speed.target),
        streak=streak,
        sessions=0,
        seconds=0.0,
    )
    return Judged(ease, kept, copying, source, target)


def _times(now: float, best: float | None) -> float:
    floor = FLOOR_SECONDS
    return 1.0 if best is None else max(now, floor) / max(best, floor)


def _better(now: float, best: float | None) -> float:
    """Go half the way to a better figure: one lucky moment must not make the rest look slow."""
    return now if best is None else min(best, (best + now) / 2)


def why(judged: Judged, *, source: str, target: str) -> str:
    """Say which side is slow, how much, and what follows; "" at full speed.

    >>> one = Judged(0.25, Speed(), copying=3.4, source=3.1, target=1.1)
    >>> why(one, source="store-eu1-a", target="store-eu1-b")
    'store-eu1-a answers 3.1 times slower than at its best: working a quarter of the time'
    >>> why(Judged(0.5, Speed(), 2.4, 2.0, 1.9), source="a", target="b")
    'both stores answer slower than at their best (a 2.0 times, b 1.9 times): working half the time'
    >>> why(Judged(0.5, Speed(), 1.1, 1.0, 1.0), source="a", target="b")
    'both stores answer as they did before: working half the time, for now'
    """
    if judged.ease >= 1:
        return ""
    share = SHARES[judged.ease]
    slow = {
        name: times
        for name, times in ((source, judged.source), (target, judged.target))
        if times > SLOW_LOOK
    }
    if len(slow) == 2:
        each = ", ".join(f"{name} {times:.1f} times" for name, times in slow.items())
        return f"both stores answer slower than at their best ({each}): working {share}"
    for name, times in slow.items():
        return f"{name} answers {times:.1f} times slower than at its best: working {share}"
    return f"both stores answer as they did before: working {share}, for now"


def news(before: float, after: float, because: str) -> str:
    """Return the line that the log gets; "" where nothing changed.

    >>> news(1.0, 0.5, "a answers 3.1 times slower than at its best: working half the time")
    'Backs off: a answers 3.1 times slower than at its best: working half the time'
    >>> news(0.5, 1.0, ""), news(1.0, 1.0, "")
    ('Full speed again: both stores answer as they did before', '')
    """
    if before == after:
        return ""
    if after >= 1:
        return "Full speed again: both stores answer as they did before"
    return f"{'Backs off' if after < before else 'Recovers'}: {because}"


def rest_seconds(worked: float, ease: float) -> float:
    """Return how long to leave the stores alone after so many seconds of work.

    >>> rest_seconds(0.5, 1.0), rest_seconds(0.5, 0.25), rest_seconds(15, 1 / 16)
    (0.0, 1.5, 60.0)
    """
    return min(LONGEST_REST, worked * (1 / ease - 1))


# --- the sample --------------------------------------------------------------------------------


def sampled(speed: Speed, sessions: int, seconds: float) -> Speed:
    """Add copied sessions to the sample until it is whole."""
    if speed.sample_sessions >= SAMPLE_SESSIONS:
        return speed
    return replace(
        speed,
        sample_sessions=speed.sample_sessions + sessions,
        sample_seconds=speed.sample_seconds + seconds,
    )


def some(per_second: float) -> int:
    """Return a number of sessions whose copy takes a time worth naming.

    >>> some(40), some(950)
    (100, 1000)
    """
    return 100 if per_second <= 100 else 1000


def sample_words(sample: int, seconds: float, *, sessions: int, changed: int) -> str:
    """Say what a sample of the copy means for the move: `changed` will be, of all `sessions`.

    Source: article 000, "Worked example: sizing the fence".

    >>> sample_words(500, 12.5, sessions=12_600, changed=900)
    '500 sessions copied in 12.5s (40.0 /s): all 12,600 take 5m 15s, and 900 that change \
meanwhile 22.5s inside the fence'
    >>> sample_words(500, 12.5, sessions=12_600, changed=0)
    '500 sessions copied in 12.5s (40.0 /s): all 12,600 take 5m 15s, and each 100 that change \
meanwhile 2.5s inside the fence'
    """
    speed = sample / seconds
    each = f"{changed:,}" if changed else f"each {some(speed):,}"
    inside = duration(backfill_seconds(changed or some(speed), speed))
    return (
        f"{counted(sample, 'session')} copied in {duration(seconds)} ({rate(speed)}): all"
        f" {sessions:,} take {duration(backfill_seconds(sessions, speed))}, and {each} that change"
        f" meanwhile {inside} inside the fence"
    )
