"""The fence: who may begin now, and how many are still inside. One lock decides both.

The control plane moves a tenant on this class's word alone: "I have applied version v, and
nobody is inside." So two things must never come apart. Between looking at the phase and being
counted no policy may slip in, and between reading the version and reading the count no turn may.
Both are one critical section of the same lock.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from agent_runtime.clock import Clock, SystemClock
from agent_runtime.errors import Behind, Draining, ForkedChild, Moved, NotReady
from agent_runtime.policy import (
    ACCEPTS_ALL,
    ACCEPTS_EXISTING,
    ACCEPTS_MOVED,
    ACCEPTS_NEW,
    ACCEPTS_NONE,
    Entry,
    Policy,
    Version,
)

# What a refused caller is told. A fence is closed for a minute or two; a policy is one poll away.
DRAIN_RETRY_SECONDS = 30.0
SOON_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Turn:
    """One invocation that was let in: a turn, a new or deleted session, an upload, a job."""

    # The tenant's entry at that moment; the turn uses this one to its end.
    entry: Entry
    # Boot time at which this process cuts it.
    deadline: float
    # How often the tenant's entry had changed; tells older turns from newer ones.
    serial: int
    # The process that counts it.
    pid: int

    @property
    def known_only(self) -> bool:
        """Whether it may go on only for a session that the entry's store has already."""
        return self.entry.accepts == ACCEPTS_EXISTING


@dataclass(frozen=True, slots=True)
class Word:
    """What an instance says to the control plane, read in one moment. Absent tenants count 0."""

    # None: nothing is applied, so nothing is served.
    applied: Version | None
    in_flight: Mapping[str, int]
    # Of these, the ones that entered before the tenant's entry last changed.
    in_flight_older: Mapping[str, int]


@dataclass(slots=True)
class _Count:
    running: int = 0
    older: int = 0
    serial: int = 0
    # Under which the newer ones entered.
    entry: Entry | None = None


class Fence:
    """Lets turns in by the policy, and counts them until they have left.

    Safe for threads. `on_drained` is called, outside the lock, when the last turn of a fenced
    tenant leaves: the control plane is waiting for that word.
    """

    def __init__(
        self,
        *,
        cell: str,
        longest_turn_seconds: float,
        clock: Clock | None = None,
        on_drained: Callable[[], None] = lambda: None,
    ) -> None:
        self._cell = cell
        self._longest_turn_seconds = longest_turn_seconds
        self._clock = clock or SystemClock()
        self._on_drained = on_drained
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget everything and belong to the calling process; what a forked child does first.

        The parent's turns aren't the child's, and the parent's lock may have been held by a
        thread that the child hasn't got.
        """
        self._lock = threading.Lock()
        self._nobody_inside = threading.Condition(self._lock)
        # Only tenants with somebody inside: a caller can't grow it by inventing names.
        self._counts: dict[str, _Count] = {}
        self._policy: Policy | None = None
        self._lease_until = -math.inf
        self._leaving = False
        self._pid = os.getpid()

    @property
    def policy(self) -> Policy | None:
        """What is applied. None before the first full policy, and after the lease ran out."""
        return self._policy

    @property
    def lapsed(self) -> bool:
        """Whether the lease is over: nothing may start."""
        return self._clock.boottime() >= self._lease_until

    @property
    def serving(self) -> bool:
        """Whether this process lets anybody in: a policy, a lease, not leaving, not a fork."""
        return (
            self._pid == os.getpid()
            and self._policy is not None
            and not self.lapsed
            and not self._leaving
        )

    @contextmanager
    def enter(
        self,
        tenant: str,
        placement_version: str | None = None,
        *,
        sent_on: bool = False,
        asks_store: bool = False,
    ) -> Iterator[Turn]:
        """Count one invocation of `tenant` in while the block runs, or refuse it.

        `placement_version` is the one of the tenant's row in the caller's placement feed, as
        `epoch.number`; None if the caller has no feed. `sent_on`: under that placement the source
        of a split has said that it does not know the session. `asks_store`: the caller obeys
        `Turn.known_only`; anybody else is refused where only known sessions are served.

        Raises Draining, Moved, Behind or NotReady, with nothing counted; ValueError for a version
        that is none, or a turn that is sent on without one.
        """
        turn = self._admit(tenant, placement_version, sent_on, asks_store)
        try:
            yield turn
        finally:
            self._leave(turn)

    def apply(self, policy: Policy) -> None:
        """Make `policy` hold: whoever enters after this returns has looked at it."""
        with self._lock:
            self._policy = policy
            for tenant, count in self._counts.items():
                entry = policy.entries.get(tenant)
                if entry != count.entry:
                    count.older = count.running
                    count.serial += 1
                    count.entry = entry

    def drop(self) -> None:
        """Let nobody in until another policy and lease are here. Those inside stay counted."""
        with self._lock:
            self._policy = None
            self._lease_until = -math.inf

    def lease(self, until: float) -> None:
        """Begin a new lease that ends at boot time `until`; a join gives it."""
        with self._lock:
            self._lease_until = until

    def renew(self, until: float) -> bool:
        """Move the lease's end. False, and nothing changed, once it has run out.

        An answer that comes back after the end doesn't revive it: the control plane may have
        counted this instance as lapsed and moved on.
        """
        with self._lock:
            if self.lapsed:
                return False
            self._lease_until = max(self._lease_until, until)
            return True

    def close(self) -> None:
        """Let nobody in any more: this process is leaving."""
        with self._lock:
            self._leaving = True

    def wait_until_empty(self, seconds: float) -> bool:
        """Block until nobody is inside, `seconds` at most. Return whether that is so."""
        with self._nobody_inside:
            return self._nobody_inside.wait_for(lambda: not self._counts, seconds)

    def word(self) -> Word:
        """Return version and counts as they were in one moment.

        Read apart they leak: a count of 0 read before a turn entered, with the version read
        after the next policy was applied, says "drained" while that turn runs.
        """
        with self._lock:
            return Word(
                applied=self._policy.version if self._policy else None,
                in_flight={t: c.running for t, c in self._counts.items()},
                in_flight_older={t: c.older for t, c in self._counts.items() if c.older},
            )

    def _admit(
        self, tenant: str, placement_version: str | None, sent_on: bool, asks_store: bool
    ) -> Turn:
        # Before the lock: in a forked child it may be held for ever.
        if os.getpid() != self._pid:
            raise ForkedChild(
                "this process was forked from an instance and has not joined by itself",
                retry_after_seconds=SOON_SECONDS,
            )
        asked = None if placement_version is None else Version.parse(placement_version)
        if sent_on and asked is None:
            # What the source knew under another placement says nothing about this one.
            raise ValueError("a turn that is sent on carries the placement that it was sent on by")
        with self._lock:
            # In first, then look: right even if the two ever come apart, for then a drain that
            # finds 0 has not overlooked somebody who saw the old phase.
            count = self._counts.setdefault(tenant, _Count())
            count.running += 1
            try:
                count.entry = self._open_entry(tenant, asked, sent_on, asks_store)
            except BaseException:
                self._step_out(tenant, count)
                raise
            return Turn(
                entry=count.entry,
                deadline=self._clock.boottime() + self._longest_turn_seconds,
                serial=count.serial,
                pid=self._pid,
            )

    def _open_entry(
        self, tenant: str, asked: Version | None, sent_on: bool, asks_store: bool
    ) -> Entry:
        """Return the tenant's entry if it lets a turn in now. The lock is held."""
        if self._leaving:
            raise NotReady("this process is leaving", retry_after_seconds=SOON_SECONDS)
        if self._policy is None:
            raise NotReady("this process has no policy yet", retry_after_seconds=SOON_SECONDS)
        if self.lapsed:
            raise NotReady("this process's lease is over", retry_after_seconds=SOON_SECONDS)
        entry = self._policy.entries.get(tenant)
        if entry is None:
            raise Behind(f"{tenant} is not known here yet", retry_after_seconds=SOON_SECONDS)
        at = entry.placement_version
        # Of two epochs nobody can say which is older: one side has yet to hear of the restore.
        if asked and (asked.epoch != at.epoch or at.before(asked)):
            raise Behind(
                f"{tenant} is known here at placement {at}, the caller is at {asked}",
                retry_after_seconds=SOON_SECONDS,
            )
        if entry.accepts == ACCEPTS_MOVED:
            cell = entry.moved_to or ""
            raise Moved(f"{tenant} moved to {cell}", cell=cell, retry_after_seconds=SOON_SECONDS)
        if asked and asked.before(at):
            raise Moved(
                f"{tenant} was placed anew at {at}, the caller is at {asked}",
                cell=entry.home_cell or self._cell,
                retry_after_seconds=SOON_SECONDS,
            )
        if (
            entry.accepts == ACCEPTS_ALL
            or (entry.accepts == ACCEPTS_EXISTING and asks_store)
            or (entry.accepts == ACCEPTS_NEW and sent_on)
        ):
            return entry
        if entry.home_cell and not sent_on:
            # Only announced here, or the target of a split: its home is asked first.
            raise Moved(
                f"{tenant} is at home in {entry.home_cell}",
                cell=entry.home_cell,
                retry_after_seconds=SOON_SECONDS,
            )
        # Behind a closed fence the source only looks whether it knows the session, and counts
        # nobody who looks: each turn of the target's sessions is offered here first, and a count
        # that was 0 has to stay so.
        looks = entry.split and entry.accepts == ACCEPTS_NONE and asks_store
        raise Draining(
            f"{tenant} is moving",
            retry_after_seconds=DRAIN_RETRY_SECONDS,
            source=entry if looks else None,
        )

    def _leave(self, turn: Turn) -> None:
        if os.getpid() != turn.pid:
            return  # The copy of a parent's turn; the parent counts it.
        tenant = turn.entry.tenant
        with self._lock:
            count = self._counts[tenant]
            was_older = turn.serial != count.serial
            count.older -= was_older
            self._step_out(tenant, count)
            awaited = self._awaited(tenant, count, last_older=was_older and not count.older)
        if awaited:
            self._on_drained()

    def _step_out(self, tenant: str, count: _Count) -> None:
        count.running -= 1
        if not count.running:
            del self._counts[tenant]
            if not self._counts:
                self._nobody_inside.notify_all()

    def _awaited(self, tenant: str, count: _Count, *, last_older: bool) -> bool:
        """Return whether the control plane waits for the word of a turn that has just left."""
        if self._policy is None:
            return False
        entry = self._policy.entries.get(tenant)
        if entry is None:
            return not count.running
        if entry.accepts == ACCEPTS_ALL:
            return False
        if entry.accepts in (ACCEPTS_EXISTING, ACCEPTS_NEW):
            # Others are served meanwhile: a report for each that ends would never end.
            return last_older
        return last_older or not count.running
