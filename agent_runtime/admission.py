"""How much each tenant may use in this process: runs per second, runs at once, model tokens.

A tenant's limits hold over all instances of its cell, so the control plane divides them. What
this process may use is its shares (`Shares`); they come with the answers to reports, hold for
some seconds from the moment the report was sent, and shrink to a safe part when no fresh answer
comes: all instances' safe parts together stay below the limit. `Admission` lets runs in by them.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from agent_runtime.clock import Clock, SystemClock
from agent_runtime.errors import TenantThrottled
from agent_runtime.policy import Entry, Scope
from agent_runtime.usage import Usage

# What a bucket of runs may hold: a second's worth, and one run in any case, or a tenant of one
# run a minute would never begin one.
RUN_BURST_SECONDS = 1.0
# What a bucket of tokens may hold: a turn calls its model several times within seconds.
TOKEN_BURST_SECONDS = 10.0
# What a call reserves while its tenant has made none here.
FIRST_CALL_TOKENS = 2_000
# Of so many calls the 95th percentile is reserved.
CALLS_REMEMBERED = 50
# What a refused caller is told where no bucket can say: until the next grants; until one of the
# runs may have ended; until a budget that is used up here may have been given anew.
GRANT_RETRY_SECONDS = 2.0
SLOT_RETRY_SECONDS = 1.0
BUDGET_RETRY_SECONDS = 60.0
# The longest hint: limits are live, so it is worth asking again.
MAX_RETRY_SECONDS = 60.0
# A bucket's level is remembered so long after its tenant's share was taken away, or for as long
# as a run takes to come in at its rate; a day at most. Shares wander between instances: each that
# comes back must not bring a run that nobody granted.
LEVEL_REMEMBERED_SECONDS = 60.0
LEVEL_REMEMBERED_MOST = 86_400.0
# Ten additions of 0.1 are less than 1.
_ROUNDING = 1e-9

# How to get more, by tier.
_UPGRADE = {
    "pooled": "its operator can raise the limit, or give it a worker pool and a model account of "
    "its own (the bridge tier)",
    "bridge": "its operator can raise the limit, or give it a deployment of its own (the silo "
    "tier)",
    "silo": "its operator can raise the limit",
}


class TokenBucket:
    """Holds up to `burst` and gains `rate` a second. Pure: callers pass the boot time, and lock.

    >>> bucket = TokenBucket(rate=0.5, burst=1, level=1, at=0)
    >>> bucket.take(1, 0), bucket.take(1, 1), bucket.wait(1, 1), bucket.take(1, 2)
    (True, False, 1.0, True)
    """

    __slots__ = ("at", "burst", "level", "rate")

    def __init__(self, *, rate: float, burst: float, level: float, at: float) -> None:
        """Make a bucket that holds `level` at time `at`."""
        self.rate = rate
        self.burst = burst
        self.level = min(level, burst)
        self.at = at

    def refill(self, now: float) -> None:
        """Add what came in since the last look. An earlier time than that changes nothing."""
        if now > self.at:
            self.level = min(self.burst, self.level + (now - self.at) * self.rate)
            self.at = now

    def tune(self, rate: float, burst: float, now: float) -> None:
        """Change rate and burst at time `now`; until then the old rate holds."""
        self.refill(now)
        self.rate, self.burst = rate, burst
        self.level = min(self.level, burst)

    def wait(self, amount: float, now: float) -> float:
        """Return the seconds until `amount` is there: 0 if it is, infinity if it never will be."""
        self.refill(now)
        missing = amount - self.level
        if missing <= _ROUNDING:
            return 0.0
        if self.rate <= 0 or amount > self.burst + _ROUNDING:
            return math.inf
        return missing / self.rate

    def take(self, amount: float, now: float) -> bool:
        """Take `amount` if it is there. Return whether it was."""
        if self.wait(amount, now):
            return False
        self.level -= amount
        return True

    def charge(self, amount: float) -> None:
        """Take `amount` whether it is there or not, or put it back if it is negative.

        A bucket in debt lets nobody take before it has gained what it owes.
        """
        self.level = min(self.burst, self.level - amount)


@dataclass(frozen=True, slots=True)
class Share:
    """This process's part of one tenant's limits. None: that limit is not divided."""

    runs_per_second: float | None = None
    max_concurrent_runs: int | None = None
    tokens_per_minute: float | None = None
    # What is left of each without a fresh answer.
    safe_runs_per_second: float | None = None
    safe_max_concurrent_runs: int | None = None
    safe_tokens_per_minute: float | None = None
    # Of the tenant's daily budget, over all instances, when the grants were made.
    tokens_left: int | None = None

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Share:
        """Return the share that the wire describes. Raises TypeError or ValueError."""
        return cls(
            runs_per_second=_number(data, "runs_per_second"),
            max_concurrent_runs=_whole(data, "max_concurrent_runs"),
            tokens_per_minute=_number(data, "tokens_per_minute"),
            safe_runs_per_second=_number(data, "safe_runs_per_second"),
            safe_max_concurrent_runs=_whole(data, "safe_max_concurrent_runs"),
            safe_tokens_per_minute=_number(data, "safe_tokens_per_minute"),
            tokens_left=None if data.get("tokens_left") is None else int(data["tokens_left"]),
        )


def _number(data: Mapping[str, Any], name: str) -> float | None:
    value = data.get(name)
    if value is None:
        return None
    number = float(value)
    if not 0 <= number < math.inf:
        raise ValueError(f"{name} of a share is {value!r}")
    return number


def _whole(data: Mapping[str, Any], name: str) -> int | None:
    number = _number(data, name)
    return None if number is None else int(number)


class _Held:
    """One tenant's share and its buckets. Pure, as they are."""

    __slots__ = ("calls", "runs", "share", "tokens")

    def __init__(self, share: Share, now: float, had: _Held | None) -> None:
        """Hold `share` from `now` on. Levels of the one before go on: a share is no refill."""
        self.share = share
        # What the last model calls used.
        self.calls: deque[int] = deque(maxlen=CALLS_REMEMBERED) if had is None else had.calls
        # One run, or one call, may begin at once, as with any limiter; a whole burst is earned. Of
        # a share of nothing none may: each instance that has none would begin one.
        self.runs: TokenBucket | None = _carried(
            None if had is None else had.runs, share.runs_per_second, RUN_BURST_SECONDS, 1.0, now
        )
        self.tokens: TokenBucket | None = _carried(
            None if had is None else had.tokens,
            None if share.tokens_per_minute is None else share.tokens_per_minute / 60,
            TOKEN_BURST_SECONDS,
            FIRST_CALL_TOKENS,
            now,
        )

    def tune(self, until: float, now: float, scope: Scope | None = None) -> None:
        """Let the buckets gain what is granted: up to `until` in full, the safe part from there.

        `scope` is the tenant's, where it is at hand: an edit that lowers a limit holds before
        the limit is divided anew.
        """
        safe = now >= until
        since = until if safe else now
        if self.runs is not None:
            rate = self.share.safe_runs_per_second if safe else self.share.runs_per_second
            limit = None if scope is None else scope.runs_per_second
            _tune(self.runs, rate, limit, RUN_BURST_SECONDS, since, now)
        if self.tokens is not None:
            rate = self.share.safe_tokens_per_minute if safe else self.share.tokens_per_minute
            _tune(self.tokens, (rate or 0.0) / 60, None, TOKEN_BURST_SECONDS, since, now)

    def likely_tokens(self) -> int:
        """Return the 95th percentile of what the last calls used."""
        if not self.calls:
            return FIRST_CALL_TOKENS
        ordered = sorted(self.calls)
        return ordered[math.ceil(0.95 * len(ordered)) - 1]


def _burst(rate: float, seconds: float) -> float:
    return max(1.0, rate * seconds)


def _carried(
    had: TokenBucket | None, rate: float | None, seconds: float, first: float, now: float
) -> TokenBucket | None:
    if rate is None:
        return None
    if had is None:
        level = first if rate else 0.0
        return TokenBucket(rate=rate, burst=_burst(rate, seconds), level=level, at=now)
    had.tune(rate, _burst(rate, seconds), now)
    return had


def _tune(
    bucket: TokenBucket,
    rate: float | None,
    limit: float | None,
    seconds: float,
    since: float,
    now: float,
) -> None:
    rate = min(rate or 0.0, math.inf if limit is None else limit)
    if rate != bucket.rate:
        bucket.tune(rate, _burst(rate, seconds), since)
    bucket.refill(now)


class Shares:
    """What this process was granted of its tenants' limits. Safe for threads.

    It holds one record for each tenant of the last grants, so nobody can grow it by asking.
    """

    def __init__(self, usage: Usage, clock: Clock | None = None) -> None:
        """Hold nothing: tenants with a limit are refused until the first grants."""
        self._usage = usage
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._number = 0
        # Boot time until which the shares hold in full.
        self._until = -math.inf
        self._held: dict[str, _Held] = {}
        # Tenants whose share was taken away, with the boot time until which that matters.
        self._former: dict[str, tuple[float, _Held]] = {}

    @property
    def number(self) -> int:
        """The number of the grants that hold, as the next report says it; 0: none.

        A report reads it before it counts who is inside: whoever begins after that count
        begins under these grants.
        """
        with self._lock:
            return self._number

    @property
    def heard(self) -> bool:
        """Whether any were granted, to this process or to the one that it goes on for."""
        with self._lock:
            return bool(self._number or self._held)

    @property
    def fresh(self) -> bool:
        """Whether shares hold in full; else only their safe part does."""
        return self._clock.boottime() < self._until

    def apply(
        self, number: int, tenants: Mapping[str, Share], *, sent_at: float, seconds: float
    ) -> None:
        """Hold these grants instead of all others, for `seconds` from boot time `sent_at`."""
        # First: what was used before, held against what is left now, would refuse for a moment.
        self._usage.granted([t for t, share in tenants.items() if share.tokens_left is not None])
        now = self._clock.boottime()
        with self._lock:
            lapsed = now >= self._until
            self._remember(self._held.keys() - tenants.keys(), now)
            held_now: dict[str, _Held] = {}
            for tenant, share in tenants.items():
                had = self._held.get(tenant)
                if had is not None:
                    if had.share == share and not lapsed:
                        # Most of a large document: its buckets go on as they are.
                        held_now[tenant] = had
                        continue
                    had.tune(self._until, now)
                elif tenant in self._former:
                    had = self._former.pop(tenant)[1]
                held_now[tenant] = _Held(share, now, had)
            self._held = held_now
            self._number = number
            self._until = sent_at + seconds

    def resume(self, tenants: Mapping[str, Share]) -> None:
        """Hold the safe part of what a process before this one was granted, from empty buckets.

        How fresh it is nobody knows, and what of it was used has gone with that process.
        """
        self.apply(0, tenants, sent_at=-math.inf, seconds=0.0)
        with self._lock:
            for held in self._held.values():
                for bucket in (held.runs, held.tokens):
                    if bucket is not None:
                        bucket.level = 0.0

    def extend(self, *, sent_at: float, seconds: float) -> None:
        """Let what is held hold on, for `seconds` from boot time `sent_at`."""
        now = self._clock.boottime()
        with self._lock:
            lapsed, until = self._until, max(self._until, sent_at + seconds)
            if now >= lapsed:
                # Nobody looked meanwhile: that time was at the safe rates.
                for held in self._held.values():
                    held.tune(lapsed, now)
                    held.tune(until, now)
            self._until = until

    def drop(self) -> None:
        """Hold nothing, as an instance that has just joined."""
        now = self._clock.boottime()
        with self._lock:
            self._remember(self._held.keys(), now)
            self._held = {}
            self._number = 0
            self._until = -math.inf
        self._usage.granted([])

    def start(self, entry: Entry, running: int) -> TenantThrottled | None:
        """Take one run's rate, or return why the tenant may not begin one beside `running`.

        Rate is looked at first; a run that finds no slot takes no rate either.
        """
        scope = entry.scope
        by_rate, at_once = scope.runs_per_second is not None, scope.max_concurrent_runs is not None
        if not (by_rate or at_once):
            return None
        now = self._clock.boottime()
        with self._lock:
            held = self._held.get(entry.tenant)
            # Each limit by itself: one that was set after the shares were made is in none of them.
            # It isn't taken as a whole until it is, or all instances would take it.
            if by_rate and (held is None or held.runs is None):
                return _no_share(entry, "rate")
            if held is None or (at_once and held.share.max_concurrent_runs is None):
                return _no_share(entry, "concurrency")
            held.tune(self._until, now, scope)
            bucket = held.runs if by_rate else None
            if bucket is not None and (wait := bucket.wait(1.0, now)):
                return _too_fast(entry, bucket.rate, wait)
            slots = self._slots(held.share, scope, now)
            if running >= slots:
                return _too_many(entry, slots)
            if bucket is not None:
                bucket.charge(1.0)
            return None

    def part(self, entry: Entry) -> float:
        """Return which part of the tenant's limits is this process's; 1.0 where nobody knows."""
        with self._lock:
            held = self._held.get(entry.tenant)
        if held is not None:
            for share, limit in (
                (held.share.runs_per_second, entry.scope.runs_per_second),
                (held.share.max_concurrent_runs, entry.scope.max_concurrent_runs),
            ):
                if share is not None and limit:
                    return min(1.0, share / limit)
        return 1.0

    def reserve(self, entry: Entry) -> int:
        """Take what a model call of the tenant is likely to use. Return it, for `settle`.

        Raises TenantThrottled (quota). 0 where the tenant's tokens are not divided.
        """
        now = self._clock.boottime()
        with self._lock:
            held = self._held.get(entry.tenant)
            if held is None or held.tokens is None:
                return 0
            held.tune(self._until, now, entry.scope)
            bucket = held.tokens
            # A call that is larger than the bucket leaves it in debt, or could never be made.
            likely = held.likely_tokens()
            if wait := bucket.wait(min(likely, bucket.burst), now):
                raise _no_quota(entry, bucket.rate * 60, wait)
            bucket.charge(likely)
            return likely

    def settle(self, tenant: str, reserved: int, used: int | None) -> None:
        """Say what a call used of what it had reserved; None: nobody knows, all of it may be.

        A call that was never made used 0.
        """
        if used is None:
            return
        with self._lock:
            held = self._held.get(tenant)
            if held is None:
                return
            if used:
                held.calls.append(used)
            if held.tokens is not None:
                held.tokens.charge(used - reserved)

    def budget_wait(self, entry: Entry) -> float:
        """Return for how many seconds the tenant's daily budget is used up; 0: it is not.

        Approximate by what other instances use between two grants.
        """
        return self._budget_wait(entry, entry.scope)

    def trial_budget_spent(self, entry: Entry) -> bool:
        """Return whether a budget on trial would be used up."""
        return entry.trial is not None and bool(self._budget_wait(entry, entry.trial))

    def _budget_wait(self, entry: Entry, scope: Scope) -> float:
        budget = scope.daily_token_budget
        if budget is None:
            return 0.0
        if scope.budget_spent_until is not None:
            left = (scope.budget_spent_until - self._clock.now()).total_seconds()
            if left > 0:
                return left
        with self._lock:
            held = self._held.get(entry.tenant)
        tokens_left = None if held is None else held.share.tokens_left
        divided = entry.scope.daily_token_budget
        if tokens_left is None or divided is None:
            return 0.0
        # What is left was said of the budget that holds; another differs by their difference.
        left_here = tokens_left + budget - divided - self._usage.since_granted(entry.tenant)
        return BUDGET_RETRY_SECONDS if left_here <= 0 else 0.0

    def _slots(self, share: Share, scope: Scope, now: float) -> float:
        if scope.max_concurrent_runs is None:
            return math.inf
        granted = share.max_concurrent_runs if now < self._until else share.safe_max_concurrent_runs
        return min(scope.max_concurrent_runs, granted or 0)

    def _remember(self, tenants: Set[str], now: float) -> None:
        """Keep the levels of tenants whose share is taken away, for a while. The lock is held."""
        self._former = {t: one for t, one in self._former.items() if now < one[0]}
        for tenant in tenants:
            held = self._held[tenant]
            held.tune(self._until, now)
            slowest = LEVEL_REMEMBERED_SECONDS
            for bucket in (held.runs, held.tokens):
                if bucket is not None:
                    if bucket.rate:
                        slowest = max(slowest, 1 / bucket.rate)
                    bucket.tune(0.0, bucket.burst, now)
            self._former[tenant] = (now + min(slowest, LEVEL_REMEMBERED_MOST), held)


@dataclass(slots=True)
class _Trial:
    """What a limit on trial would have let in."""

    runs: TokenBucket | None = None
    running: int = 0


class Admission:
    """Lets runs in by their tenants' shares: rate first, then the number at once. Safe for threads.

    Fails fast: nothing waits here. It holds something only for tenants with a run inside or a
    limit on trial, and forgets it with the last.
    """

    def __init__(self, shares: Shares, usage: Usage, clock: Clock | None = None) -> None:
        """Let runs in by `shares`, and count in `usage` what is refused, or would be."""
        self._shares = shares
        self._usage = usage
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        # Only tenants with a run inside.
        self._running: dict[str, int] = {}
        # Only tenants with a limit on trial that ran in the last seconds.
        self._trials: dict[str, _Trial] = {}
        self._pid = os.getpid()

    @contextmanager
    def admit(self, entry: Entry, turn_id: str | None = None) -> Iterator[None]:
        """Hold a permit for one run while the block runs, however it ends.

        Enter the fence first. `turn_id` is the client's own name of the turn: refused again and
        again, it counts once a minute. Raises TenantThrottled, counted and logged.
        """
        tenant = entry.tenant
        with self._lock:
            running = self._running.get(tenant, 0)
            refused = self._shares.start(entry, running)
            if refused is None:
                tried, reason = self._try(entry)
                self._running[tenant] = running + 1
        if refused is not None:
            self._usage.refused(tenant, refused.reason, turn_id)
            raise refused
        try:
            if reason:
                self._usage.would_refuse(tenant, reason, turn_id)
            yield
        finally:
            self._release(tenant, tried)

    def running(self) -> dict[str, int]:
        """Return how many permits each tenant holds; absent tenants hold none."""
        with self._lock:
            return dict(self._running)

    def forget_idle(self) -> None:
        """Forget trials that nothing is left to be known of: nobody inside, nothing to wait for."""
        now = self._clock.boottime()
        with self._lock:
            for tenant, trial in list(self._trials.items()):
                if trial.runs is not None:
                    trial.runs.refill(now)
                full = trial.runs is None or trial.runs.level >= trial.runs.burst
                if full and not trial.running:
                    del self._trials[tenant]

    def _try(self, entry: Entry) -> tuple[bool, str]:
        """Return whether the run holds a slot of the trial, and else what would refuse it."""
        limits = entry.trial
        if limits is None:
            return False, ""
        # Tried as it would be enforced: this process's part of it.
        part = self._shares.part(entry)
        now = self._clock.boottime()
        trial = self._trials.setdefault(entry.tenant, _Trial())
        if self._shares.trial_budget_spent(entry):
            return False, "budget"
        if limits.runs_per_second is None:
            trial.runs = None
        else:
            rate = limits.runs_per_second * part
            burst = _burst(rate, RUN_BURST_SECONDS)
            if trial.runs is None:
                trial.runs = TokenBucket(rate=rate, burst=burst, level=burst, at=now)
            trial.runs.tune(rate, burst, now)
            if trial.runs.wait(1.0, now):
                return False, "rate"
        slots = limits.max_concurrent_runs
        if slots is not None and trial.running >= max(1, int(slots * part)):
            return False, "concurrency"
        if trial.runs is not None:
            trial.runs.charge(1.0)
        trial.running += 1
        return True, ""

    def _release(self, tenant: str, tried: bool) -> None:
        if os.getpid() != self._pid:
            return  # The copy of a parent's run; the parent holds its permit, and maybe the lock.
        with self._lock:
            left = self._running[tenant] - 1
            if left:
                self._running[tenant] = left
            else:
                del self._running[tenant]
            if tried:
                self._trials[tenant].running -= 1


def _no_share(entry: Entry, reason: str) -> TenantThrottled:
    limit = (
        f"{entry.scope.runs_per_second:g} runs per second"
        if reason == "rate"
        else f"{entry.scope.max_concurrent_runs} runs at once"
    )
    return TenantThrottled(
        f"{entry.tenant} may have {limit}, and this process has not been told its share of that "
        "yet. Try again in a moment.",
        tenant=entry.tenant,
        reason=reason,
        retry_after_seconds=GRANT_RETRY_SECONDS,
    )


def _too_fast(entry: Entry, here: float, wait: float) -> TenantThrottled:
    return _throttled(
        entry,
        "rate",
        f"may start {entry.scope.runs_per_second:g} runs per second ({here:g} in this process)",
        GRANT_RETRY_SECONDS if wait == math.inf else wait,
    )


def _too_many(entry: Entry, here: float) -> TenantThrottled:
    return _throttled(
        entry,
        "concurrency",
        f"may have {entry.scope.max_concurrent_runs} runs at once ({here:g} in this process)",
        SLOT_RETRY_SECONDS if here else GRANT_RETRY_SECONDS,
    )


def _no_quota(entry: Entry, here: float, wait: float) -> TenantThrottled:
    return _throttled(
        entry,
        "quota",
        f"may use {here:,.0f} model tokens per minute in this process, its share of the cell's "
        "quota",
        GRANT_RETRY_SECONDS if wait == math.inf else wait,
    )


def budget_spent(entry: Entry, wait: float) -> TenantThrottled:
    """Return the refusal of a turn whose tenant's daily budget is used up for `wait` seconds."""
    return _throttled(
        entry,
        "budget",
        f"has used up the {entry.scope.daily_token_budget:,} model tokens that it may use a day",
        wait,
        longest=math.inf,
    )


def _throttled(
    entry: Entry, reason: str, what: str, wait: float, *, longest: float = MAX_RETRY_SECONDS
) -> TenantThrottled:
    wait = min(wait, longest)
    upgrade = _UPGRADE.get(entry.tier, _UPGRADE["silo"])
    return TenantThrottled(
        f"{entry.tenant} {what}. Try again in {wait:.1f} s; for more, {upgrade}.",
        tenant=entry.tenant,
        reason=reason,
        retry_after_seconds=wait,
    )
