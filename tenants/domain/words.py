"""How numbers and times are written on pages, in notices and in logs: one spelling each."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import NamedTuple

# Narrow no-break space, between a number and its percent sign.
THIN = "\u202f"
NOT_MEASURED = "–"

MINUTE, HOUR, DAY = 60, 3600, 86_400


def count(value: int | float | None) -> str:
    """Return a whole number with thousands separated; an en dash where nothing was measured.

    >>> count(12600), count(0), count(None)
    ('12,600', '0', '–')
    """
    return NOT_MEASURED if value is None else f"{value:,.0f}"


def counted(value: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun.

    >>> counted(1, "session"), counted(1200, "session"), counted(2, "mismatch", "mismatches")
    ('1 session', '1,200 sessions', '2 mismatches')
    """
    return f"{value:,} {noun if value == 1 else plural or noun + 's'}"


def percent(part: float, whole: float) -> str:
    """Return a share in whole percent, rounded down: never "100 %" with work left.

    >>> percent(612, 900), percent(8999, 9000), percent(9, 9), percent(0, 0)
    ('68\\u202f%', '99\\u202f%', '100\\u202f%', '–')
    """
    if whole <= 0:
        return NOT_MEASURED
    return f"{min(100, int(100 * part / whole))}{THIN}%"


def share(part: float | None) -> str:
    """Return a share of one in percent, to a tenth where it isn't whole.

    >>> share(0.01), share(0.005), share(1.25), share(None)
    ('1\\u202f%', '0.5\\u202f%', '125\\u202f%', '–')
    """
    if part is None:
        return NOT_MEASURED
    return f"{round(100 * part, 1):,g}{THIN}%"


def duration(seconds: float | None) -> str:
    """Return a measured time, to a tenth of a second below a minute.

    >>> [duration(s) for s in (0.04, 0.2, 15.31, 59.97, 76, 24227, 147240, 604800, None)]
    ['0.0s', '0.2s', '15.3s', '1m 00s', '1m 16s', '6h 43m 47s', '40h 54m', '7d', '–']
    """
    if seconds is None:
        return NOT_MEASURED
    seconds = max(0.0, seconds)
    if round(seconds, 1) < MINUTE:
        return f"{seconds:.1f}s"
    return elapsed(round(seconds))


def elapsed(seconds: float | None) -> str:
    """Return a time that still runs, in whole seconds, rounded down.

    >>> [elapsed(s) for s in (18.9, 76.2, 605, 24227, 200000, 700000)]
    ['18s', '1m 16s', '10m 05s', '6h 43m 47s', '55h 33m', '8d 2h']
    """
    if seconds is None:
        return NOT_MEASURED
    whole = max(0, int(seconds))
    minutes, rest = divmod(whole, MINUTE)
    hours, minutes_rest = divmod(minutes, 60)
    days, hours_rest = divmod(hours, 24)
    if whole < MINUTE:
        return f"{whole}s"
    if whole < HOUR:
        return f"{minutes}m {rest:02d}s"
    if whole < DAY:
        return f"{hours}h {minutes_rest:02d}m {rest:02d}s"
    if days < 7:
        return f"{hours}h {minutes_rest:02d}m"
    return f"{days}d {hours_rest}h" if hours_rest else f"{days}d"


def limit(seconds: float | None) -> str:
    """Return a time that somebody chose, without what is zero.

    >>> [limit(s) for s in (60, 90, 180, 150, 259200, 5400, 0.25, None)]
    ['60s', '90s', '3m', '2m 30s', '72h', '1h 30m', '250ms', 'none']
    """
    if seconds is None:
        return "none"
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 2 * MINUTE:
        return f"{seconds:g}s"
    hours, rest = divmod(round(seconds), HOUR)
    minutes, rest = divmod(rest, MINUTE)
    parts = [(hours, "h"), (minutes, "m"), (rest, "s")]
    return " ".join(f"{number}{unit}" for number, unit in parts if number)


def latency(milliseconds: float | None) -> str:
    """Return a short measured time, in milliseconds below a second.

    >>> latency(96.4), latency(1840), latency(61_000), latency(None)
    ('96ms', '1.8s', '1m 01s', '–')
    """
    if milliseconds is None:
        return NOT_MEASURED
    if milliseconds < 1000:
        return f"{milliseconds:.0f}ms"
    return duration(milliseconds / 1000)


def weight(size: int | None) -> str:
    """Return how much memory something takes.

    >>> weight(900), weight(262_144), weight(1_363_149), weight(None)
    ('900 B', '256.0 KiB', '1.3 MiB', '–')
    """
    if size is None:
        return NOT_MEASURED
    if size < 1024:
        return f"{size} B"
    return f"{size / 1024:,.1f} KiB" if size < 2**20 else f"{size / 2**20:,.1f} MiB"


def rate(per_second: float | None) -> str:
    """Return a rate per second, or per minute where it is below one a second.

    >>> [rate(r) for r in (40, 1234.5, 0.5, 0, None)]
    ['40.0 /s', '1,234 /s', '30 /min', '0 /s', '–']
    """
    if per_second is None:
        return NOT_MEASURED
    if per_second >= 100:
        return f"{per_second:,.0f} /s"
    if per_second >= 1:
        return f"{per_second:.1f} /s"
    if per_second <= 0:
        return "0 /s"
    return f"{per_second * 60:.0f} /min" if per_second >= 1 / 60 else "under 1 /min"


def clock(at: datetime | None, now: datetime) -> str:
    """Return the time of day; with the day where it is another, with the year where that is.

    >>> now = datetime(2026, 3, 12, 2, 45, 57, tzinfo=UTC)
    >>> clock(now, now), clock(datetime(2026, 3, 11, 16, 20, tzinfo=UTC), now)
    ('02:45:57', '11 Mar 16:20')
    >>> clock(datetime(2025, 12, 1, 9, 5, tzinfo=UTC), now), clock(None, now)
    ('1 Dec 2025', '–')
    """
    if at is None:
        return NOT_MEASURED
    at, now = at.astimezone(UTC), now.astimezone(UTC)
    if at.date() == now.date():
        return f"{at:%H:%M:%S}"
    if at.year == now.year:
        return f"{at.day} {at:%b %H:%M}"
    return f"{at.day} {at:%b %Y}"


def ago(at: datetime | None, now: datetime) -> str:
    """Return how old a moment is, in its largest unit; only ever beside the moment itself.

    >>> now = datetime(2026, 3, 12, 2, 45, 57, tzinfo=UTC)
    >>> ago(datetime(2026, 3, 12, 2, 45, 43, tzinfo=UTC), now)
    '14s'
    >>> ago(datetime(2026, 3, 12, 0, 45, 43, tzinfo=UTC), now)
    '2h'
    """
    if at is None:
        return NOT_MEASURED
    seconds = max(0, int((now - at).total_seconds()))
    for unit, name in ((DAY, "d"), (HOUR, "h"), (MINUTE, "m")):
        if seconds >= unit:
            return f"{seconds // unit}{name}"
    return f"{seconds}s"


def digest(value: str) -> str:
    """Return a digest's first and last four characters.

    >>> digest("9c41" + "0" * 56 + "e07b"), digest("")
    ('9c41…e07b', '–')
    """
    if not value:
        return NOT_MEASURED
    return value if len(value) <= 9 else f"{value[:4]}…{value[-4:]}"


# A spreadsheet takes a cell that begins with one of these for a formula, and runs it.
FORMULA = ("=", "+", "-", "@", "\t", "\r")


def harmless(cell: object) -> object:
    """Return a cell that a spreadsheet shows and does not run.

    >>> harmless("=2+5"), harmless("Acme"), harmless(-7)
    ("'=2+5", 'Acme', -7)
    """
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA) else cell


class Status(NamedTuple):
    """How worried to be: a glyph of the stylesheet (`data-status`) and the word beside it."""

    glyph: str
    word: str
