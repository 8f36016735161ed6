"""Keeps one process joined to its cell: policy in, word and usage out.

One round is: join if need be, poll the policy, report. Rounds never overlap, so one report is
outstanding at a time, and what is reported was applied before.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import secrets
import threading
import urllib.parse
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import Any, Protocol

from agent_runtime.admission import Admission, Share, Shares
from agent_runtime.breaker import Breakers
from agent_runtime.calls import Answer, BackOff, Caller, contract
from agent_runtime.clock import Clock, SystemClock
from agent_runtime.disk import DiskCopy, Whose
from agent_runtime.errors import BadAnswer, ControlPlaneError, Unreachable
from agent_runtime.fence import Fence
from agent_runtime.policy import Policy, Version
from agent_runtime.runners import RunnerFigures
from agent_runtime.transport import Transport
from agent_runtime.usage import Batch, Usage

log = logging.getLogger(__name__)

# Before the control plane has said its own.
FIRST_POLL_MS = 1_000.0
# What it may say: a slip there makes neither a busy loop nor an instance that is never heard.
POLL_BOUNDS_MS = (50.0, 60_000.0)
# How long grants hold where their answer doesn't say.
GRANT_SECONDS = 30.0
# How long a process that has joined is not ready for want of its shares: they come in seconds.
SHARES_SECONDS = 15.0

API = "/api/v1/runtime"


# Answers to a report that settle it, one way or the other.
_REPORT_SETTLED = frozenset({400, 409, 410, 413, 422})


class _Gone(Exception):
    """The instance has ended: join under a new id."""


class Companion(Protocol):
    """What goes along with a client: a Host, or several. Called from the client's thread."""

    def after_round(self) -> None:
        """Hear that a round is over, well or not: another policy may hold."""

    def warming(self) -> bool:
        """Return whether there is something to build before turns should come here."""


@dataclass(frozen=True, slots=True)
class _Taken:
    """The answer to a report that was taken."""

    lease_seconds: float
    grant_seconds: float
    # (number, tenant -> share); None: what is held stands.
    grants: tuple[int, dict[str, Share]] | None

    @classmethod
    def read(cls, answer: Answer) -> _Taken:
        with contract("the answer to a report"):
            grants = answer.data.get("grants")
            return cls(
                lease_seconds=float(answer.data["lease_seconds"]),
                grant_seconds=float(answer.data.get("grant_seconds", GRANT_SECONDS)),
                # Empty: a control plane that divides nothing yet.
                grants=(
                    int(grants["number"]),
                    {str(t): Share.parse(share) for t, share in grants["tenants"].items()},
                )
                if grants
                else None,
            )


@dataclass(slots=True)
class _Report:
    """A report that has no answer yet. Its bytes never change: a retry sends the same."""

    seq: int
    body: bytes
    batch: Batch
    # Boot time. A retry doesn't move it: the answer to a retry may mean that the first one was
    # taken, and from then on the control plane counts the lease.
    first_sent_at: float = math.inf


class PolicyClient:
    """This process as an instance of its cell.

    `start()` keeps it joined from a background thread; `tick()` is one round, for tests and for
    hosts with a scheduler of their own. `fence` and `admission` let turns in, `shares` holds what
    this process may use of its tenants' limits, `usage` counts, `breakers` leave a model endpoint
    alone that struggles. Safe for threads. A forked child isn't its parent: it has to call
    `start()` (or `tick()`) itself and joins as another instance.
    """

    def __init__(
        self,
        base_url: str,
        token: str,
        *,
        cell: str,
        name: str,
        build: str,
        stores: Collection[str],
        longest_turn_seconds: float,
        longest_tool_seconds: float,
        plugins: Collection[str] = (),
        transport: Transport | None = None,
        clock: Clock | None = None,
        dice: Callable[[], float] = random.random,
        copy: DiskCopy | None = None,
    ) -> None:
        """Make a client that has not joined.

        `stores` are the keys that this process can open; `longest_turn_seconds` is a promise:
        the Host cuts a turn there, and the control plane counts on it. `dice` gives 0 to 1.
        With a `copy` it serves at once if a process before it left one whose lease still runs.
        """
        self.cell = cell
        self.name = name
        self.longest_turn_seconds = longest_turn_seconds
        self.clock = clock or SystemClock()
        self.fence = Fence(
            cell=cell,
            longest_turn_seconds=longest_turn_seconds,
            clock=self.clock,
            on_drained=self.report_soon,
        )
        self._plane = Caller(base_url, token, transport)
        self._join_request = {
            "cell": cell,
            "name": name,
            "build": build,
            "longest_turn_seconds": longest_turn_seconds,
            "longest_tool_seconds": longest_tool_seconds,
            "plugins": sorted(plugins),
            "stores": sorted(stores),
        }
        self._dice = dice
        self._copy = copy
        self._begin_anew()
        if copy is not None:
            self._resume(copy, Whose(base_url, cell, longest_turn_seconds))

    def _begin_anew(self) -> None:
        """Start as a process that has done nothing. Usage, numbers and locks are the parent's."""
        self._pid = os.getpid()
        # Tells a restarted process from a repeated join.
        self._boot = secrets.token_hex(16)
        self.fence.begin_anew()
        self.usage = Usage(self.clock)
        self.shares = Shares(self.usage, self.clock)
        self.admission = Admission(self.shares, self.usage, self.clock)
        self.breakers = Breakers(self.clock, self._dice)
        # What the caches of Runners in this process have to tell.
        self.runners = RunnerFigures()
        # Replaced as a whole: other threads read it.
        self._companions: tuple[Companion, ...] = ()
        # Over the companions and the thread.
        self._changing = threading.Lock()
        # None: not joined.
        self.instance: str | None = None
        # What the last failed call said; empty after a good round.
        self.trouble = ""
        self._seq = 0
        self._outstanding: _Report | None = None
        # The id that this process had before: the next join says that it replaces it.
        self._replaces: str | None = None
        # The policy that this process held last, for the next join: above the cell's counter it
        # tells a control plane that its database was restored.
        self._held = ""
        # The fence is open by the disk copy and its lease, until this process's own first policy.
        self._copied = False
        # Boot time; of the lease that the last join gave.
        self._joined_until = -math.inf
        self._poll_after_ms = FIRST_POLL_MS
        self._back_off = BackOff(self._dice)
        # Boot time until which shares are waited for.
        self._shares_by = -math.inf
        self._left = False
        self._round = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._stop = threading.Event()

    def _resume(self, copy: DiskCopy, whose: Whose) -> None:
        """Serve from the disk copy, if there is one, until its lease ends or a join succeeds."""
        kept = copy.open(whose, now=self.clock.boottime())
        if kept is not None:
            self.fence.apply(kept.policy)
            self.fence.lease(kept.lease_until)
            self.shares.resume({t: Share.parse(share) for t, share in kept.grants.items()})
            self._copied, self._held = True, str(kept.policy.version)
            log.info("%s serves from the copy of %s until it has joined", self.name, kept.instance)

    @property
    def policy(self) -> Policy | None:
        """What is applied; None before the first full policy."""
        return self.fence.policy

    @property
    def ready(self) -> bool:
        """Whether turns should come here: they are let in, and their Runners are built ahead.

        Where tenants have limits, this process has been told its shares of them too, or has waited
        for that long enough.
        """
        if not self.fence.serving or self._awaits_shares():
            return False
        return not any(one.warming() for one in self._companions)

    def _awaits_shares(self) -> bool:
        policy = self.policy
        if policy is None or self.shares.heard or self.clock.boottime() >= self._shares_by:
            return False
        return any(
            entry.scope.runs_per_second is not None or entry.scope.max_concurrent_runs is not None
            for entry in policy.entries.values()
        )

    def attach(self, companion: Companion) -> None:
        """Tell `companion` of each round, and be ready only when it is."""
        with self._changing:
            self._companions = (*self._companions, companion)

    def detach(self, companion: Companion) -> None:
        """Forget a companion; one that was never attached, or twice, changes nothing."""
        with self._changing:
            self._companions = tuple(one for one in self._companions if one is not companion)

    def report_soon(self) -> None:
        """Begin the next round at once: there is news that the control plane waits for."""
        self._wake.set()

    def start(self) -> None:
        """Run rounds in a background thread until `stop()`. Does nothing if one runs already."""
        if self._pid != os.getpid():
            self._begin_anew()
        if self._left:
            raise RuntimeError("this instance has left; make another client")
        with self._changing:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, args=(self._stop,), name="switchyard-policy", daemon=True
                )
                self._thread.start()

    def stop(self, *, timeout_seconds: float = 15.0) -> None:
        """End the background thread. The instance stays joined until its lease runs out."""
        if self._pid != os.getpid() or self._thread is None:
            return
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout_seconds)
        if not self._thread.is_alive():
            self._plane.close()
        self._thread = None
        # A new one, so that a thread that outlives the time-out still ends.
        self._stop = threading.Event()

    def leave(self, *, wait_seconds: float | None = None) -> bool:
        """Let nobody in any more, wait until everybody is out, report, and leave the cell.

        Blocks, for the longest turn at most unless told. Return False if turns were left or
        the control plane couldn't be told: the instance is then counted until its lease and
        its longest turn are over, as it has to be.
        """
        if self._pid != os.getpid():
            return False
        self.fence.close()
        wait_seconds = self.longest_turn_seconds if wait_seconds is None else wait_seconds
        empty = self.fence.wait_until_empty(wait_seconds)
        self.stop()
        self._left = True
        with self._round:
            try:
                # The last usage, with turns left too: what isn't sent now is lost.
                if self.instance is not None:
                    self._report(self.instance)
                elif self._outstanding is not None:
                    self._settle_old_report(self._outstanding)
                if empty and self.instance is not None:
                    self._erase_copy()
                    gone = {HTTPStatus.NOT_FOUND, HTTPStatus.GONE}
                    self._plane.call("DELETE", f"{API}/instances/{self.instance}", expect=gone)
            except _Gone:
                log.info("%s had been gone already", self.name)
                self._erase_copy()
            except ControlPlaneError as error:
                log.warning("%s could not leave %s: %s", self.name, self.cell, error)
                return False
            finally:
                self._plane.close()
        if empty and self._copy is not None:
            # For the next one in this process: nothing of this instance runs any more.
            self._copy.close()
        return empty

    def tick(self) -> float:
        """Do one round now. Return after how many seconds the next one is due.

        A control plane that can't be reached, or answers nonsense, is not raised: it is logged,
        kept in `trouble`, and answered by a longer wait.
        """
        if self._pid != os.getpid():
            self._begin_anew()
        if self._left:
            raise RuntimeError("this instance has left; make another client")
        with self._round:
            try:
                self._do_round()
            except ControlPlaneError as error:
                return self._failed(error)
            finally:
                self._look_after()
            if self._back_off.failures:
                log.info("%s reaches the control plane again", self.name)
            self.trouble = ""
            return self._back_off.went_well(self._poll_after_ms / 1000)

    def _run(self, stop: threading.Event) -> None:
        while True:
            # Before the round: a wish that comes during it is answered by the next one. And
            # before the look at `stop`, whose own wake-up this may have cleared.
            self._wake.clear()
            if stop.is_set():
                return
            try:
                wait = self.tick()
            except Exception as error:
                # A bug must not end the thread: the lease would run out in silence.
                log.exception("a round of %s failed", self.name)
                wait = self._failed(Unreachable(repr(error)))
            # While it backs off nothing shortens the wait, or a drain would hammer.
            (stop if self._back_off.failures else self._wake).wait(wait)

    def _look_after(self) -> None:
        """Do what is due now and then, with a control plane or without one."""
        self.admission.forget_idle()
        for one in self._companions:
            one.after_round()

    def _failed(self, error: ControlPlaneError) -> float:
        if str(error) != self.trouble:
            log.warning("%s: %s", self.name, error)
        self.trouble = str(error)
        return self._back_off.failed(error)

    def _do_round(self) -> None:
        if self.instance is not None and self.fence.lapsed:
            log.warning("%s: the lease of %s ran out", self.name, self.instance)
            self._forget()
        # Twice: an instance that is gone joins, polls and reports in the same round.
        for _ in range(2):
            try:
                instance = self.instance or self._join()
                self._poll(instance)
                self._report(instance)
                return
            except _Gone as gone:
                log.warning("%s: %s ended: %s", self.name, self.instance, gone)
                self._forget()
        raise Unreachable("the control plane forgets this instance as soon as it has joined")

    def _forget(self) -> None:
        """Drop id and policy: nothing is served before a full policy under another id.

        Turns that run stay counted, and are in the next id's reports.
        """
        if self.policy is not None:
            self._held = str(self.policy.version)
        self.fence.drop()
        # Granted to an id that is gone; what it still uses is counted for a longest turn.
        self.shares.drop()
        self._copied = False
        self._replaces, self.instance = self.instance, None
        self._erase_copy()

    def _erase_copy(self) -> None:
        """Nobody may serve under an id that has ended, or is about to."""
        if self._copy is not None:
            self._copy.erase()

    def _join(self) -> str:
        # The last report of an earlier id first: whether its usage was counted, only that id's
        # numbers can tell. Carried over into a new id's report it could count twice.
        if self._outstanding is not None:
            self._settle_old_report(self._outstanding)
        # Named even if that id is gone already: turns that run are this process's, and by the
        # name the control plane counts the new id from its join on, not from its first poll.
        request = {
            **self._join_request,
            "boot": self._boot,
            "replaces": self._replaces,
            "applied_version": self._held,
        }
        sent_at = self.clock.boottime()
        answer = self._plane.call("POST", f"{API}/instances", json.dumps(request).encode())
        with contract("the answer to a join"):
            instance = str(answer.data["instance"])
            lease_seconds = float(answer.data["lease_seconds"])
            self._hear_cadence(answer.data["poll_after_ms"])
        self.instance, self._replaces = instance, None
        self._seq = 0
        # From when it was sent: the control plane counts from a later moment, so we stop first.
        self._joined_until = sent_at + lease_seconds
        self._shares_by = sent_at + SHARES_SECONDS
        if not self._copied:
            self.fence.lease(self._joined_until)
        log.info("%s joined %s as %s", self.name, self.cell, instance)
        return instance

    def _settle_old_report(self, report: _Report) -> None:
        # _Gone too has settled it: counted, or given back.
        with suppress(_Gone):
            self._send(report)

    def _poll(self, instance: str) -> None:
        # The copy's policy is another id's: this one serves by a full policy of its own.
        held = None if self._copied else self.policy
        query = {"instance": instance}
        if held is not None:
            query["since"] = str(held.version)
        answer = self._plane.call(
            "GET", f"{API}/policy?{urllib.parse.urlencode(query)}", expect={HTTPStatus.GONE}
        )
        if answer.status == HTTPStatus.GONE:
            raise _Gone(answer.detail)
        with contract("the policy"):
            if answer.status == HTTPStatus.NOT_MODIFIED:
                if held is None:
                    raise BadAnswer("the policy is unchanged, says the answer to a first poll")
                # A proxy may have dropped it; the cadence then stays.
                self._hear_cadence(answer.headers.get("poll-after-ms", self._poll_after_ms))
                return
            version = Version.parse(answer.data["version"])
            if answer.data["full"] is True:
                # Of another epoch, too: whatever its number, it replaces everything.
                policy = Policy.whole(answer.data)
            elif held is not None and held.version.epoch == version.epoch:
                policy = held.after(answer.data)
            else:
                raise BadAnswer(f"policy {version} is a delta to nothing that is held here")
            self._hear_cadence(answer.data["poll_after_ms"])
        held = self.policy
        if held is not None and version.before(held.version):
            # Late, or out of some cache. An instance that has said "applied, and nobody inside"
            # would open again; only the control plane opens a fence, at a higher version.
            log.warning("%s: ignored policy %s, older than %s", self.name, version, held.version)
            return
        if self._copy is not None:
            # Before it is applied: what a report says of it has to hold for the next process too.
            self._copy.policy(instance, answer.data)
        self.fence.apply(policy)
        if self._copied:
            # What the copy granted is the other id's too.
            self.shares.drop()
            # Not before: until it had polled, the control plane counted on the copy's lease alone.
            self.fence.lease(self._joined_until)
            self._copied = False
        if self._copy is not None:
            self._copy.lease(instance, self._joined_until)

    def _report(self, instance: str) -> None:
        retried = self._outstanding is not None
        self._send_to(instance, self._outstanding or self._build_report(instance))
        if retried:
            # The same bytes were taken at last; what has happened since is another report.
            self._send_to(instance, self._build_report(instance))

    def _build_report(self, instance: str) -> _Report:
        about = {
            "ready": self.ready,
            "runners": self.runners.snapshot(),
            "breakers": self.breakers.snapshot(),
        }
        # The grants first: who begins after the count of those inside begins under these grants,
        # or newer ones. Then the word, then usage: a turn notes what it did before it leaves, so
        # the report that says "nobody inside" holds all that they did. What is taken has to be
        # sent: nothing of others is asked after that.
        grants_number = self.shares.number
        word = self.fence.word()
        batch = self.usage.take()
        if batch.more:
            self.report_soon()
        content = {
            "instance": instance,
            "boot": self._boot,
            "seq": self._seq + 1,
            "applied_version": str(word.applied) if word.applied else "",
            "in_flight": word.in_flight,
            "in_flight_older": word.in_flight_older,
            "usage": batch.usage(),
            "dirty": batch.served(),
            "dirty_dropped": batch.dropped,
            "sides": [],
            "grants_number": grants_number,
            **about,
        }
        return _Report(self._seq + 1, json.dumps(content).encode(), batch)

    def _send_to(self, instance: str, report: _Report) -> None:
        taken = self._send(report)
        sent_at = report.first_sent_at
        if not self.fence.renew(sent_at + taken.lease_seconds):
            raise Unreachable(f"the lease of {instance} ran out before its renewal came back")
        if self._copy is not None:
            self._copy.lease(instance, sent_at + taken.lease_seconds)
        if taken.grants is None:
            self.shares.extend(sent_at=sent_at, seconds=taken.grant_seconds)
        else:
            number, tenants = taken.grants
            if self._copy is not None:
                self._copy.grants(instance, {t: asdict(share) for t, share in tenants.items()})
            self.shares.apply(number, tenants, sent_at=sent_at, seconds=taken.grant_seconds)

    def _send(self, report: _Report) -> _Taken:
        """Send a report until it is settled. Return what the answer gives.

        Raises _Gone if its instance has ended: counted or given back, it is settled then too.
        Raises Unreachable if it isn't settled; the same bytes go out again in the next round.
        """
        self._outstanding = report
        report.first_sent_at = min(report.first_sent_at, self.clock.boottime())
        answer = self._plane.call("POST", f"{API}/reports", report.body, expect=_REPORT_SETTLED)
        if answer.status == HTTPStatus.CONFLICT and answer.data.get("error") != "seq_gap":
            raise BadAnswer(f"report {report.seq}: {answer.detail}")
        self._outstanding = None
        match answer.status:
            case HTTPStatus.OK:
                # Taken, whatever else the answer says: another report under this number would
                # be taken for a retry, and its usage be lost.
                self._seq = report.seq
                with contract("the answer to a report"):
                    self._hear_cadence(answer.data["poll_after_ms"])
                return _Taken.read(answer)
            case HTTPStatus.CONFLICT:
                # Not taken. Its usage goes into the first report of the next id.
                self.usage.give_back(report.batch)
                raise _Gone(answer.detail)
            case HTTPStatus.GONE:
                # A gone instance's usage is counted, its lease isn't renewed.
                raise _Gone(answer.detail)
            case _:
                # Sent again it would be refused again, until the lease is over and every tenant
                # of this process is out. Better these figures than that.
                raise BadAnswer(
                    f"report {report.seq} can't be taken ({answer.status}), "
                    f"its usage is lost: {answer.detail}"
                )

    def _hear_cadence(self, milliseconds: Any) -> None:
        low, high = POLL_BOUNDS_MS
        self._poll_after_ms = min(high, max(low, float(milliseconds)))
