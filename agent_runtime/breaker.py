"""A circuit breaker for each model endpoint: what struggles is left alone, and asked now and then.

An endpoint that fails or says 429 is not asked again for a while, by anybody in this process:
its callers are refused at once instead of each waiting for it in turn. When the while is over one
call is let through; its end decides for all.
"""

from __future__ import annotations

import json
import random
import re
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any

from agent_runtime.clock import Clock, SystemClock
from agent_runtime.errors import RetryLater

# Failures in a row that open a breaker. A 429 opens it at once: that is what it asks for.
FAILURES_TO_OPEN = 5
# How long it stays open: doubled with each opening in a row, somewhere in the upper half of that.
# A provider that names a time is believed, within the same bound: a daily quota that is used up
# may be raised meanwhile, so somebody looks once a minute.
OPEN_FIRST_SECONDS = 1.0
OPEN_MAX_SECONDS = 60.0
# What everybody else is told while one call is let through.
PROBE_RETRY_SECONDS = 1.0
# After that long another one is let through: whoever made the first has forgotten to say how it
# ended, or hangs.
PROBE_SECONDS = 120.0
# Endpoints that are kept; an application has a handful. A report carries them all.
MAX_ENDPOINTS = 50
MAX_NAME = 100


class State(StrEnum):
    """What a breaker does with the next call."""

    CLOSED = "closed"  # Lets it through.
    OPEN = "open"  # Refuses it until `retry_at`.
    HALF_OPEN = "half_open"  # Lets one through, and refuses the others until that one has ended.


class Fault(StrEnum):
    """Why a call failed, as far as the endpoint is concerned."""

    OWN_QUOTA = "own_quota"  # 429: what this account may use is used up. Others of it have none.
    SHARED_POOL = "shared_pool"  # 429: the provider has no room, though we are within our limits.
    FAILURE = "failure"  # It is broken, too slow, or not reached.


class BreakerOpen(RetryLater):
    """The model endpoint struggles and is left alone for a moment."""

    def __init__(self, endpoint: str, *, retry_after_seconds: float) -> None:
        super().__init__(
            f"the model endpoint {endpoint} is left alone: it failed or was busy, and is asked "
            f"again in {retry_after_seconds:.1f} s",
            retry_after_seconds=retry_after_seconds,
        )
        self.endpoint = endpoint


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a model call's error says of its endpoint."""

    fault: Fault
    # When the provider wants to be asked again; 0: it didn't say.
    retry_after_seconds: float = 0.0


@dataclass(eq=False, slots=True)
class Pass:
    """One call that was let through. Told how it ended once; what comes later changes nothing."""

    endpoint: str
    # How often the breaker had opened or closed: a call from before says nothing about now.
    turn: int
    ended: bool = False


class Breaker:
    """The breaker of one endpoint. Not locked by itself: `Breakers` is."""

    def __init__(self, endpoint: str, clock: Clock, dice: Callable[[], float]) -> None:
        self.endpoint = endpoint
        self._clock = clock
        self._dice = dice
        # In a row; a call that went well forgets them.
        self.failures = 0
        # Ever, in this process.
        self.count = {Fault.OWN_QUOTA: 0, Fault.SHARED_POOL: 0}
        # Boot time until which it is open; None: closed.
        self._until: float | None = None
        # In a row: each makes the next stay twice as long.
        self._openings = 0
        self._turn = 0
        # The call that was let through while it is half open, and when.
        self._probe: tuple[Pass, float] | None = None

    @property
    def state(self) -> State:
        """What it does with the next call."""
        if self._until is None:
            return State.CLOSED
        return State.OPEN if self._clock.boottime() < self._until else State.HALF_OPEN

    @property
    def wait_seconds(self) -> float:
        """After how long the next call is let through, if nobody else comes first."""
        left = 0.0 if self._until is None else self._until - self._clock.boottime()
        return max(left, PROBE_RETRY_SECONDS if self._probing else 0.0)

    @property
    def _probing(self) -> bool:
        return self._probe is not None and self._clock.boottime() - self._probe[1] < PROBE_SECONDS

    def enter(self) -> Pass:
        """Let one call through. Raises BreakerOpen."""
        if (wait := self.wait_seconds) > 0:
            raise BreakerOpen(self.endpoint, retry_after_seconds=wait)
        allowed = Pass(self.endpoint, self._turn)
        if self._until is not None:
            self._probe = (allowed, self._clock.boottime())
        return allowed

    def ended(self, call: Pass, verdict: Verdict | None) -> None:
        """Hear how a call ended: with a verdict it failed, without one the endpoint answered."""
        if verdict is not None and verdict.fault in self.count:
            self.count[verdict.fault] += 1
        if call.turn != self._turn:
            # Let through before the breaker last opened or closed. Twenty calls that were on
            # their way when a pool became busy are one event, not twenty doublings; and one of
            # them that went well doesn't say that the endpoint is well now.
            return
        if verdict is None:
            self.failures = self._openings = 0
            if self._until is not None:
                self._until, self._probe = None, None
                self._turn += 1
            return
        self.failures += 1
        probed = self._until is not None
        if probed or verdict.fault != Fault.FAILURE or self.failures >= FAILURES_TO_OPEN:
            self._open(verdict.retry_after_seconds)

    def abandoned(self, call: Pass) -> None:
        """Hear that nobody knows how a call would have ended: it was cancelled, or never made."""
        if self._probe is not None and self._probe[0] is call:
            # Whoever comes next is the one that is let through.
            self._probe = None

    def snapshot(self) -> dict[str, Any]:
        """Return the breaker as a report has it."""
        state = self.state
        retry_at = None
        if state == State.OPEN:
            at = self._clock.now() + timedelta(seconds=self.wait_seconds)
            retry_at = at.isoformat(timespec="milliseconds")
        return {
            "state": str(state),
            "failures": self.failures,
            "own_quota_429": self.count[Fault.OWN_QUOTA],
            "shared_pool_429": self.count[Fault.SHARED_POOL],
            "retry_at": retry_at,
        }

    def _open(self, asked_seconds: float) -> None:
        # Jitter: instances that were refused together don't come back together. Ten doublings are
        # past the bound.
        bound = OPEN_FIRST_SECONDS * 2.0 ** min(self._openings, 10)
        stay = max(asked_seconds, bound * (0.5 + 0.5 * self._dice()))
        self._until = self._clock.boottime() + min(OPEN_MAX_SECONDS, stay)
        self._openings += 1
        self._probe = None
        self._turn += 1


class Breakers:
    """The breakers of a process, by the name of the endpoint. Safe for threads.

    A name says whose quota it is too: a tenant with a model account of its own is not refused
    since another account's is used up.
    """

    def __init__(
        self, clock: Clock | None = None, dice: Callable[[], float] = random.random
    ) -> None:
        """Make breakers that are all closed. `dice` gives 0 to 1."""
        self._clock = clock or SystemClock()
        self._dice = dice
        self._lock = threading.Lock()
        # The longest unused first.
        self._breakers: OrderedDict[str, Breaker] = OrderedDict()

    def enter(self, endpoint: str) -> Pass:
        """Let one call to `endpoint` through; say afterwards how it ended. Raises BreakerOpen."""
        name = endpoint[:MAX_NAME].replace("\0", "")
        with self._lock:
            breaker = self._breakers.get(name)
            if breaker is None:
                breaker = self._breakers[name] = Breaker(name, self._clock, self._dice)
                self._trim()
            self._breakers.move_to_end(name)
            return breaker.enter()

    def answered(self, call: Pass) -> None:
        """Say that the endpoint answered, be it with a refusal of what it was asked."""
        self._end(call, lambda breaker: breaker.ended(call, None))

    def failed(self, call: Pass, verdict: Verdict) -> None:
        """Say that a call failed, and why."""
        self._end(call, lambda breaker: breaker.ended(call, verdict))

    def abandoned(self, call: Pass) -> None:
        """Say that a call was cancelled or never made."""
        self._end(call, lambda breaker: breaker.abandoned(call))

    def wait_seconds(self, endpoint: str) -> float:
        """Return after how long a call to `endpoint` would be let through; 0: at once."""
        with self._lock:
            breaker = self._breakers.get(endpoint[:MAX_NAME].replace("\0", ""))
            return 0.0 if breaker is None else breaker.wait_seconds

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """Return every endpoint's breaker as a report has it."""
        with self._lock:
            return {name: breaker.snapshot() for name, breaker in self._breakers.items()}

    def _end(self, call: Pass, say: Callable[[Breaker], None]) -> None:
        with self._lock:
            breaker = self._breakers.get(call.endpoint)
            if call.ended or breaker is None:
                return
            call.ended = True
            say(breaker)

    def _trim(self) -> None:
        # A closed one is forgotten at no cost. If all are open the longest unused goes: names
        # that somebody makes up can't fill the memory, or a report.
        while len(self._breakers) > MAX_ENDPOINTS:
            names = list(self._breakers)[:-1]
            closed = (n for n in names if self._breakers[n].state == State.CLOSED)
            del self._breakers[next(closed, names[0])]


# Said by providers when what the account may use is used up: Google's quota of a project, an
# organisation's rate limit at OpenAI and Anthropic. Google's shared pool says "Resource exhausted.
# Please try again later", and names no quota.
_OWN_QUOTA = re.compile(
    r"quota[ _]?exceeded|exceeded your (current )?quota|insufficient_quota|quotafailure|quotaid"
    r"|rate_limit_(exceeded|error)|rate limit (reached|exceeded)|exceed(ed)? your organi[sz]ation",
    re.IGNORECASE,
)
_LEFT = re.compile(r"ratelimit.*remaining|ratelimit-remaining", re.IGNORECASE)
_DELAY = re.compile(r'"retryDelay": ?"(\d+(?:\.\d+)?)s"')

# "Overloaded" at Anthropic: the same as a busy pool at Google.
_OVERLOADED = 529
_BROKEN = frozenset({408, 500, 502, 503, 504})
# Not any OSError: a tool's missing file is no endpoint's fault.
_UNREACHED = (ConnectionError, TimeoutError, socket.gaierror)
# HTTP clients whose errors mean: not reached, or no answer in time. By name, for none of them
# is imported here.
_TRANSPORTS = frozenset({"aiohttp", "httpcore", "httpx", "requests", "urllib3"})


def judge(error: BaseException) -> Verdict | None:
    """Return what a model call's error says of its endpoint; None: nothing bad.

    Reads what providers' errors have in common, a status, a text, headers, from `error` and what
    caused it. None, too, for an endpoint that answered "your request is wrong", and for errors
    that are no endpoint's.
    """
    chain = list(_chain(error))
    for one in chain:
        status = _status(one)
        if status in (429, _OVERLOADED):
            said = "\n".join(map(_text, chain))
            headers = _headers(one)
            own = status == 429 and bool(_OWN_QUOTA.search(said) or _none_left(headers))
            return Verdict(
                fault=Fault.OWN_QUOTA if own else Fault.SHARED_POOL,
                retry_after_seconds=_retry_after(said, headers),
            )
        if status in _BROKEN:
            return Verdict(Fault.FAILURE, _retry_after(_text(one), _headers(one)))
        if status is not None:
            return None
    transport = (type(one).__module__.partition(".")[0] in _TRANSPORTS for one in chain)
    if any(isinstance(one, _UNREACHED) for one in chain) or any(transport):
        return Verdict(Fault.FAILURE)
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    one: BaseException | None = error
    seen: set[int] = set()
    while one is not None and id(one) not in seen:
        yield one
        seen.add(id(one))
        one = one.__cause__ or one.__context__


def _status(error: BaseException) -> int | None:
    """Return the HTTP status that an error carries, under one of the names it goes by."""
    response = getattr(error, "response", None)
    for holder in (error, response):
        for name in ("status_code", "code", "status"):
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and 100 <= value < 600:
                return value
    return None


def _text(error: BaseException) -> str:
    details = getattr(error, "details", None) or getattr(error, "body", None)
    try:
        spelled = json.dumps(details) if isinstance(details, dict | list) else ""
    except (TypeError, ValueError):
        spelled = ""
    return f"{error}\n{spelled}"


def _headers(error: BaseException) -> Mapping[str, str]:
    response = getattr(error, "response", None)
    headers = getattr(response, "headers", None) or getattr(error, "headers", None) or {}
    try:
        return {str(name).lower(): str(value) for name, value in dict(headers).items()}
    except (TypeError, ValueError):
        return {}


def _none_left(headers: Mapping[str, str]) -> bool:
    return any(_LEFT.search(name) and value.strip() == "0" for name, value in headers.items())


def _retry_after(said: str, headers: Mapping[str, str]) -> float:
    named = _DELAY.search(said)
    for text in (headers.get("retry-after", ""), named.group(1) if named else ""):
        try:
            return min(OPEN_MAX_SECONDS, max(0.0, float(text)))
        except ValueError:
            continue  # Empty, or a date: our own back-off will do.
    return 0.0
