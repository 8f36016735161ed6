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
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from agent_runtime.calls import BackOff, Caller, contract
from agent_runtime.clock import Clock, SystemClock
from agent_runtime.errors import BadAnswer, ControlPlaneError, Unreachable
from agent_runtime.fence import Fence
from agent_runtime.policy import Policy, Version
from agent_runtime.transport import Transport
from agent_runtime.usage import Batch, Usage

log = logging.getLogger(__name__)

# Before the control plane has said its own.
FIRST_POLL_MS = 1_000.0
# What it may say: a slip there makes neither a busy loop nor an instance that is never heard.
POLL_BOUNDS_MS = (50.0, 60_000.0)

API = "/api/v1/runtime"


# Answers to a report that settle it, one way or the other.
_REPORT_SETTLED = frozenset({400, 409, 410, 413, 422})


class _Gone(Exception):
    """The instance has ended: join under a new id."""


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
    hosts with a scheduler of their own. `fence` lets turns in and `usage` counts them. Safe for
    threads. A forked child isn't its parent: it has to call `start()` (or `tick()`) itself and
    joins as another instance.
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
    ) -> None:
        """Make a client that has not joined.

        `stores` are the keys that this process can open; `longest_turn_seconds` is a promise:
        the Host cuts a turn there, and the control plane counts on it. `dice` gives 0 to 1.
        """
        self.cell = cell
        self.name = name
        self.longest_turn_seconds = longest_turn_seconds
        self.clock = clock or SystemClock()
        self.fence = Fence(
            cell=cell,
            longest_turn_seconds=longest_turn_seconds,
            clock=self.clock,
            on_drained=self._report_at_once,
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
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Start as a process that has done nothing. Usage, numbers and locks are the parent's."""
        self._pid = os.getpid()
        # Tells a restarted process from a repeated join.
        self._boot = secrets.token_hex(16)
        self.fence.begin_anew()
        self.usage = Usage(self.clock)
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
        self._poll_after_ms = FIRST_POLL_MS
        self._back_off = BackOff(self._dice)
        self._left = False
        self._round = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._stop = threading.Event()

    @property
    def policy(self) -> Policy | None:
        """What is applied; None before the first full policy."""
        return self.fence.policy

    @property
    def ready(self) -> bool:
        """Whether turns are let in, of tenants that the policy opens."""
        return self.fence.serving

    def start(self) -> None:
        """Run rounds in a background thread until `stop()`. Does nothing if one runs already."""
        if self._pid != os.getpid():
            self._begin_anew()
        if self._left:
            raise RuntimeError("this instance has left; make another client")
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
                    gone = {HTTPStatus.NOT_FOUND, HTTPStatus.GONE}
                    self._plane.call("DELETE", f"{API}/instances/{self.instance}", expect=gone)
            except _Gone:
                log.info("%s had been gone already", self.name)
            except ControlPlaneError as error:
                log.warning("%s could not leave %s: %s", self.name, self.cell, error)
                return False
            finally:
                self._plane.close()
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

    def _report_at_once(self) -> None:
        self._wake.set()

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
        self._replaces, self.instance = self.instance, None

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
        self.fence.lease(sent_at + lease_seconds)
        log.info("%s joined %s as %s", self.name, self.cell, instance)
        return instance

    def _settle_old_report(self, report: _Report) -> None:
        # _Gone too has settled it: counted, or given back.
        with suppress(_Gone):
            self._send(report)

    def _poll(self, instance: str) -> None:
        held = self.policy
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
        if held is not None and version.before(held.version):
            # Late, or out of some cache. An instance that has said "applied, and nobody inside"
            # would open again; only the control plane opens a fence, at a higher version.
            log.warning("%s: ignored policy %s, older than %s", self.name, version, held.version)
            return
        self.fence.apply(policy)

    def _report(self, instance: str) -> None:
        retried = self._outstanding is not None
        self._send_to(instance, self._outstanding or self._build_report(instance))
        if retried:
            # The same bytes were taken at last; what has happened since is another report.
            self._send_to(instance, self._build_report(instance))

    def _build_report(self, instance: str) -> _Report:
        # The word first, then usage: a turn notes what it did before it leaves, so the report
        # that says "nobody inside" holds all that they did.
        word = self.fence.word()
        batch = self.usage.take()
        if batch.more:
            self._report_at_once()
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
            "breakers": [],
        }
        return _Report(self._seq + 1, json.dumps(content).encode(), batch)

    def _send_to(self, instance: str, report: _Report) -> None:
        lease_seconds = self._send(report)
        self._seq = report.seq
        if not self.fence.renew(report.first_sent_at + lease_seconds):
            raise Unreachable(f"the lease of {instance} ran out before its renewal came back")

    def _send(self, report: _Report) -> float:
        """Send a report until it is settled. Return the lease that the answer gives, seconds.

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
                with contract("the answer to a report"):
                    self._hear_cadence(answer.data["poll_after_ms"])
                    return float(answer.data["lease_seconds"])
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
