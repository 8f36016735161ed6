"""The fence's quote: how long new turns would be refused if it closed now."""

from __future__ import annotations

from dataclasses import dataclass

# Until a runtime hears of the closed fence, at the fast cadence (seconds).
POLL_SECONDS = 0.25
# Whatever does not grow with the tenant (seconds, measured: 0.5 to 0.9): publishing, closing, and
# for each step of four phases its claim, its connections, its settling.
PUBLISH_SECONDS = 0.7
# Rates before anything was measured: the article's 40 sessions/s, on the slow side on purpose.
ASSUMED_RATE = 40.0
# A memory service reads a session anew, and may ask a model about it.
ASSUMED_MEMORY_RATE = 10.0


@dataclass(frozen=True)
class Part:
    """One line of the quote. `detail` shows the arithmetic, to be checked by eye."""

    name: str  # drain, scan, delta, verify, shared or publish
    detail: str
    expected: float  # seconds
    worst: float  # seconds


@dataclass(frozen=True)
class Quote:
    """`expected` is what the fence should take, `worst` what it may take at most, in seconds."""

    parts: tuple[Part, ...]

    @property
    def expected(self) -> float:
        return sum(part.expected for part in self.parts)

    @property
    def worst(self) -> float:
        return sum(part.worst for part in self.parts)

    def as_json(self) -> dict[str, object]:
        """Return what is kept on the move at the moment of closing."""
        return {
            "expected": self.expected,
            "worst": self.worst,
            "parts": [
                {"name": p.name, "detail": p.detail, "expected": p.expected, "worst": p.worst}
                for p in self.parts
            ],
        }


def quote(
    *,
    changed: int,
    compare: int,
    users: int,
    running_seconds: float = 0.0,
    drain_bound_seconds: float = 60.0,
    copy_rate: float | None = None,
    verify_rate: float | None = None,
    shared_rate: float | None = None,
    scan_seconds: float = 0.0,
    artifacts: int = 0,
    look_rate: float | None = None,
    read: int = 0,
    read_rate: float | None = None,
    remember: int = 0,
    memory_rate: float | None = None,
) -> Quote:
    """Work out the fence from what is left to do and how fast it went so far.

    `changed` sessions are copied and `compare` compared inside the fence, `users`
    have their shared state written and compared. Rates are per second, None where
    nothing was measured. `running_seconds` is how long running turns may still take,
    `scan_seconds` all reading of stamps and marks. `artifacts` versions are listed by DELTA and
    once more by VERIFY, which reads the bytes of `read` of them; `remember` sessions are given to
    the target's memory.
    Source: article 000, "Worked example: sizing the fence".

    >>> q = quote(changed=900, compare=900, users=0, running_seconds=60, copy_rate=40,
    ...           verify_rate=40)
    >>> round(q.expected - POLL_SECONDS - PUBLISH_SECONDS, 1)
    105.0
    """
    copying = copy_rate or ASSUMED_RATE
    verifying = verify_rate or ASSUMED_RATE
    sharing = shared_rate or ASSUMED_RATE
    delta = changed / copying
    verify = compare / verifying
    shared = users / sharing
    # A drain never lasts longer than its bound: past it the move opens the fence again.
    drain = min(running_seconds, drain_bound_seconds) + POLL_SECONDS
    return Quote(
        (
            Part(
                "drain",
                "what running turns may still take; one poll"
                if running_seconds
                else "no turn is running; one poll",
                drain,
                drain_bound_seconds + POLL_SECONDS,
            ),
            Part("scan", "reading every stamp, and the marks", scan_seconds, scan_seconds),
            Part("delta", f"{changed:,} changed ÷ {copying:,.0f} /s", delta, delta),
            Part("verify", f"{compare:,} to compare ÷ {verifying:,.0f} /s", verify, verify),
            Part("shared", f"{users:,} users ÷ {sharing:,.0f} /s", shared, shared),
            *_artifacts(artifacts, look_rate, read, read_rate),
            *_memory(remember, memory_rate),
            Part("publish", "closing, publishing, steps between", PUBLISH_SECONDS, PUBLISH_SECONDS),
        )
    )


def _artifacts(
    listed: int, look_rate: float | None, read: int, read_rate: float | None
) -> tuple[Part, ...]:
    if not listed:
        return ()
    looking, reading = look_rate or ASSUMED_RATE, read_rate or ASSUMED_RATE
    seconds = 2 * listed / looking + read / reading
    detail = f"{listed:,} versions, twice ÷ {looking:,.0f} /s"
    if read:
        detail += f", {read:,} read ÷ {reading:,.0f} /s"
    return (Part("artifacts", detail, seconds, seconds),)


def _memory(sessions: int, rate: float | None) -> tuple[Part, ...]:
    if not sessions:
        return ()
    giving = rate or ASSUMED_MEMORY_RATE
    seconds = sessions / giving
    return (Part("memory", f"{sessions:,} changed ÷ {giving:,.0f} /s", seconds, seconds),)
