"""Does a runtime keep the contract of docs/runtime-protocol.md? Needs Python and nothing else.

    python tests/runtime/conformance.py --turns http://127.0.0.1:9000/turn -- ./my-runtime

It plays the control plane on a loopback port and watches what the runtime says. The command
behind `--` is started with SWITCHYARD_URL, SWITCHYARD_TOKEN and SWITCHYARD_CELL; without one it
prints them and waits for a runtime that somebody starts. The runtime has to join that cell with
`longest_turn_seconds` of 30 or more and to let turns in at the address given by `--turns`:

    POST {"tenant": "acme", "session": "s-1", "seconds": 0.5}

runs one turn of that tenant that takes so many seconds, and is answered 200 when it has ended,
or at once 429 or 503 with a Retry-After header if the runtime does not let it in.

Prints a table, and exits 1 if anything is not kept.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

API = "/api/v1/runtime"
TOKEN = "conformance-token"
CELL = "cell-conformance"
FAST_MS = 100
# How long something that is due may take on a busy machine, beyond its cadence.
SOON_SECONDS = 5.0
JOINS_WITHIN_SECONDS = 30.0
TENANTS = ("acme", "bolt")


class NotKept(Exception):
    """The runtime does something else than the contract says."""


def check(holds: bool, what: str) -> None:
    if not holds:
        raise NotKept(what)


# --- the control plane that it plays --------------------------------------------------------------


@dataclass
class Said:
    """One call of the runtime."""

    at: float
    # join, poll, report or leave.
    kind: str
    query: dict[str, str]
    body: bytes
    authorization: str
    # What it was answered; 0: the connection was cut instead.
    status: int = 0

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(self.body or b"{}")


@dataclass
class Instance:
    key: str
    join: dict[str, Any]
    seq: int = 0
    gone: bool = False
    polled: bool = False
    reports: list[Said] = field(default_factory=list)


Reply = tuple[int, dict[str, Any] | None]


class Plane:
    """A control plane of one cell whose tenants, answers and failures a script decides."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.epoch, self.version = "e1", 0
        self.lease_seconds = 900.0
        self.poll_after_ms = FAST_MS
        self.entries: dict[str, tuple[int, dict[str, Any]]] = {}
        self.instances: dict[str, Instance] = {}
        self.calls: list[Said] = []
        self.grants: dict[str, Any] | None = None
        # Returns what to answer instead; (0, None): the connection is cut before an answer.
        self.instead: Callable[[Said], Reply | None] = lambda said: None
        # Cuts the connection after a call was taken.
        self.loses: Callable[[Said], bool] = lambda said: False
        self.publish(*(entry(tenant) for tenant in TENANTS))

    def publish(self, *entries: dict[str, Any]) -> str:
        """Publish entries as one version; return it."""
        with self.lock:
            self.version += 1
            for one in entries:
                one["placement_version"] = f"{self.epoch}.1"
                self.entries[one["tenant"]] = (self.version, one)
            return f"{self.epoch}.{self.version}"

    def restore(self) -> str:
        """Become another database: another epoch, lower numbers. Return its version."""
        with self.lock:
            self.epoch, self.version = self.epoch + "x", 0
            entries = [one for _, one in self.entries.values()]
            self.entries.clear()
            return self.publish(*entries)

    def answer(self, said: Said) -> Reply:
        with self.changed:
            self.calls.append(said)
            status, data = self.instead(said) or getattr(self, "_" + said.kind)(said)
            if self.loses(said):
                status = 0
            said.status = status
            self.changed.notify_all()
            return status, data

    def wait(self, what: str, seconds: float, condition: Callable[[], Any]) -> Any:
        """Wait until `condition` returns something; raise NotKept if it never does."""
        ends = time.monotonic() + seconds
        with self.changed:
            while not (found := condition()):
                left = ends - time.monotonic()
                check(left > 0, f"{what}, within {seconds:g} s")
                self.changed.wait(min(left, 0.05))
            return found

    @property
    def newest(self) -> Instance:
        return list(self.instances.values())[-1]

    def next_report(self, what: str, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait for a report that begins to be true after now."""
        with self.lock:
            since = len(self.calls)
        return self.wait(
            what,
            SOON_SECONDS,
            lambda: next(
                (
                    said.data
                    for said in self.calls[since:]
                    if said.kind == "report" and said.status == 200 and wanted(said.data)
                ),
                None,
            ),
        )

    def _join(self, said: Said) -> Reply:
        key = f"i{len(self.instances) + 1}"
        data = said.data
        self.instances[key] = Instance(key, data)
        if (before := self.instances.get(str(data.get("replaces")))) is not None:
            before.gone = True
        return 200, {
            "instance": key,
            "lease_seconds": self.lease_seconds,
            "poll_after_ms": self.poll_after_ms,
            "epoch": self.epoch,
            "a_field_of_tomorrow": [1],
        }

    def _poll(self, said: Said) -> Reply:
        instance = self.instances.get(said.query.get("instance", ""))
        if instance is None or instance.gone:
            return 410, error("instance_gone")
        instance.polled = True
        epoch, _, number = said.query.get("since", "").rpartition(".")
        full = epoch != self.epoch or not number.isdigit()
        since = 0 if full else int(number)
        if since >= self.version:
            return 304, None
        return 200, {
            "version": f"{self.epoch}.{self.version}",
            "full": full,
            "poll_after_ms": self.poll_after_ms,
            "cell": {} if full else None,
            "tenants": [one for at, one in self.entries.values() if at > since],
            "a_field_of_tomorrow": {},
        }

    def _report(self, said: Said) -> Reply:
        data = said.data
        instance = self.instances.get(data["instance"])
        if instance is None:
            return 410, error("instance_gone")
        if data["seq"] > instance.seq + 1:
            return 409, error("seq_gap")
        if data["seq"] == instance.seq + 1:
            instance.seq += 1
            instance.reports.append(said)
        if instance.gone:
            return 410, error("instance_gone")
        return 200, {
            "lease_seconds": self.lease_seconds,
            "poll_after_ms": self.poll_after_ms,
            "grants": self.grants,
            "grant_seconds": 30.0,
            "version": f"{self.epoch}.{self.version}",
            "a_field_of_tomorrow": None,
        }

    def _leave(self, said: Said) -> Reply:
        key = said.query["instance"]
        if key in self.instances:
            self.instances[key].gone = True
        return 204, None


def entry(tenant: str, accepts: str = "all", **changes: Any) -> dict[str, Any]:
    scope = {
        "version": 1,
        "max_concurrent_runs": None,
        "runs_per_second": None,
        "daily_token_budget": None,
        "max_model_calls_per_run": None,
        "allowed_tools": None,
        "weight": 1.0,
        "exact_budget": False,
        "budget_spent_until": None,
    }
    return {
        "tenant": tenant,
        "agent": "support",
        "app_name": f"support.{tenant}",
        "tier": "pooled",
        "accepts": accepts,
        "moved_to": "elsewhere" if accepts == "moved" else None,
        "home_cell": None,
        "split": False,
        "sides": None,
        "store": {"key": "store-1", "kind": "adk-sql"},
        "runner_generation": 1,
        "scope": scope | changes,
        "trial": None,
        "a_field_of_tomorrow": "x",
    }


def error(word: str) -> dict[str, Any]:
    return {"error": word, "detail": word, "retry_after_seconds": None}


@contextmanager
def serving(plane: Plane, port: int = 0) -> Iterator[str]:
    """Serve the plane on a loopback port; yield its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # A client that was told to wait may leave.
        timeout = 120

        def do_GET(self) -> None:
            self._answer()

        do_POST = do_DELETE = do_GET  # noqa: N815

        def _answer(self) -> None:
            url = urllib.parse.urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            query = dict(urllib.parse.parse_qsl(url.query))
            kind = {
                ("POST", f"{API}/instances"): "join",
                ("GET", f"{API}/policy"): "poll",
                ("POST", f"{API}/reports"): "report",
            }.get((self.command, url.path), "")
            if self.command == "DELETE" and url.path.startswith(f"{API}/instances/"):
                kind, query = "leave", {"instance": url.path.rpartition("/")[2]}
            if not kind:
                status, data = 404, error("not_found")
            else:
                said = Said(
                    time.monotonic(), kind, query, body, self.headers.get("Authorization", "")
                )
                try:
                    status, data = plane.answer(said)
                except (KeyError, TypeError, ValueError):
                    status, data = 422, error("unprocessable")
            if not status:
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
                return
            content = b"" if data is None else json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Poll-After-Ms", str(plane.poll_after_ms))
            if status not in (204, 304):
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            pass  # A runtime that was killed in the middle of a call.

    server = Server(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


# --- the runtime under test -----------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    began: float
    ended: float
    status: int
    retry_after: str | None

    @property
    def served(self) -> bool:
        return self.status == 200


class Runtime:
    """The runtime under test, through the address that lets turns in."""

    def __init__(self, turns: str) -> None:
        self.turns = turns
        self.pool = ThreadPoolExecutor(32)
        # Turns that were served.
        self.served = 0
        self._lock = threading.Lock()

    def turn(self, tenant: str = "acme", seconds: float = 0.0) -> Turn:
        """Run one turn, to its end."""
        body = json.dumps({"tenant": tenant, "session": "s-1", "seconds": seconds}).encode()
        request = urllib.request.Request(
            self.turns, body, {"Content-Type": "application/json"}, method="POST"
        )
        began = time.monotonic()
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                status, headers = answer.status, answer.headers
        except urllib.error.HTTPError as refused:
            status, headers = refused.code, refused.headers
            refused.close()
        with self._lock:
            self.served += status == 200
        return Turn(began, time.monotonic(), status, headers.get("Retry-After"))

    def begin(self, tenant: str = "acme", seconds: float = 0.0) -> Future[Turn]:
        return self.pool.submit(self.turn, tenant, seconds)

    def serves(self, tenant: str = "acme") -> bool:
        return self.turn(tenant).served

    def refuses(self, tenant: str = "acme") -> None:
        """Check that a turn is refused as a refusal has to be."""
        turn = self.turn(tenant)
        check(not turn.served, f"a turn of {tenant} was served that had to be refused")
        check(turn.status in (429, 503), f"a refusal was answered {turn.status}, not 429 or 503")
        hint = turn.retry_after or ""
        check(hint.replace(".", "", 1).isdigit(), f"a refusal's Retry-After is {hint!r}")


# --- what has to hold -----------------------------------------------------------------------------

Check = Callable[[Plane, Runtime], None]
CHECKS: list[tuple[str, Check]] = []


def rule(text: str) -> Callable[[Check], Check]:
    def enter(made: Check) -> Check:
        CHECKS.append((text, made))
        return made

    return enter


def applied(version: str, **in_flight: int) -> Callable[[dict[str, Any]], bool]:
    """Return whether a report says that `version` is applied, with so many turns inside."""

    def says(report: dict[str, Any]) -> bool:
        counts = {t: n for t, n in report.get("in_flight", {}).items() if n}
        return report.get("applied_version") == version and counts == in_flight

    return says


def settled(plane: Plane, version: str) -> None:
    plane.next_report(f"a report that {version} is applied", applied(version))


@rule("joins with its token, and says what the control plane has to know")
def joins(plane: Plane, runtime: Runtime) -> None:
    said = plane.wait(
        "a join",
        JOINS_WITHIN_SECONDS,
        lambda: next((one for one in plane.calls if one.kind == "join"), None),
    )
    check(said.authorization == f"Bearer {TOKEN}", "the token comes as a bearer token")
    data = said.data
    check(data.get("cell") == CELL, f"it joins {CELL}")
    check(bool(data.get("name")) and isinstance(data.get("boot"), str), "it has a name and a boot")
    check(1 <= len(data.get("boot", "")) <= 64, "boot has 1 to 64 characters")
    check(data.get("longest_turn_seconds", 0) >= 30, "longest_turn_seconds is 30 or more")
    check(not data.get("replaces"), "a first join replaces nobody")
    check(not data.get("applied_version"), "a first join has applied nothing")


@rule("serves nothing before its first full policy")
def nothing_before_policy(plane: Plane, runtime: Runtime) -> None:
    runtime.refuses()
    check(not any(one.query.get("since") for one in plane.calls), "the first poll has no since")
    plane.instead = lambda said: None
    plane.next_report(
        "a report of the policy", lambda report: report.get("applied_version") == "e1.1"
    )
    check(runtime.serves(), "a turn is served after the first full policy")


@rule("reports are numbered from 1, each one more than the last")
def numbers(plane: Plane, runtime: Runtime) -> None:
    plane.next_report("a report", lambda report: report["seq"] >= 4)
    reports = [said.data for said in plane.newest.reports]
    check([r["seq"] for r in reports] == list(range(1, len(reports) + 1)), "1, 2, 3, ...")
    check(
        {r["boot"] for r in reports} == {plane.newest.join["boot"]}, "under the boot it joined by"
    )


@rule("asks for what has changed since the version that it holds")
def since(plane: Plane, runtime: Runtime) -> None:
    version = plane.publish(entry("bolt"))
    settled(plane, version)
    plane.wait(
        f"a poll since {version}",
        SOON_SECONDS,
        lambda: any(one.query.get("since") == version for one in plane.calls),
    )
    check(runtime.serves("acme"), "a tenant that a delta does not name keeps its entry")


@rule("polls as often as it is told")
def cadence(plane: Plane, runtime: Runtime) -> None:
    plane.poll_after_ms = 1_000
    time.sleep(1.0)
    with plane.lock:
        begin = len(plane.calls)
    time.sleep(4.0)
    polls = [one for one in plane.calls[begin:] if one.kind == "poll"]
    plane.poll_after_ms = FAST_MS
    check(3 <= len(polls) <= 6, f"4 polls in 4 s at 1,000 ms, there were {len(polls)}")
    plane.next_report("a fast report", lambda report: True)


@rule("a turn that runs is in the count")
def counted(plane: Plane, runtime: Runtime) -> None:
    version = f"{plane.epoch}.{plane.version}"
    turn = runtime.begin(seconds=1.0)
    plane.next_report("a report of the turn inside", applied(version, acme=1))
    check(turn.result().served, "the turn is served")
    plane.next_report("a report that it has left", applied(version))


@rule("version and count are one word: applied, and who is inside")
def fence(plane: Plane, runtime: Runtime) -> None:
    turn = runtime.begin(seconds=1.5)
    plane.next_report(
        "a report of the turn inside", lambda r: r.get("in_flight", {}).get("acme") == 1
    )
    version = plane.publish(entry("acme", "none"))
    report = plane.next_report(
        "a report of the closed fence", lambda r: r.get("applied_version") == version
    )
    check(report["in_flight"].get("acme") == 1, "with the turn that is still inside")
    check(report["in_flight_older"].get("acme") == 1, "which entered before the entry changed")
    runtime.refuses()
    check(runtime.serves("bolt"), "other tenants are served")
    check(turn.result().served, "the turn inside goes on to its end")
    plane.next_report("a report that it has left", applied(version))


@rule("after the fence is reported no turn starts, and a count of 0 stays 0")
def nobody_after_the_word(plane: Plane, runtime: Runtime) -> None:
    for _ in range(5):
        settled(plane, plane.publish(entry("acme")))
        close_while_they_knock(plane, runtime)


def close_while_they_knock(plane: Plane, runtime: Runtime) -> None:
    stop = threading.Event()
    turns: list[Turn] = []

    def knock() -> None:
        while not stop.is_set():
            turns.append(runtime.turn())

    def reports() -> list[Said]:
        said = [one for one in plane.calls[begin:] if one.kind == "report"]
        return [one for one in said if one.data.get("applied_version") == version]

    knocking = [runtime.pool.submit(knock) for _ in range(8)]
    time.sleep(0.2)
    with plane.lock:
        begin = len(plane.calls)
        version = plane.publish(entry("acme", "none"))
    try:
        plane.wait(
            "a report that nobody is inside",
            SOON_SECONDS,
            lambda: any(applied(version)(one.data) for one in reports()),
        )
        time.sleep(0.5)
    finally:
        stop.set()
        for one in knocking:
            one.result()
    said = reports()
    late = [turn for turn in turns if turn.served and turn.began > said[0].at]
    check(not late, f"{len(late)} turns were served after the version was reported")
    counts = [one.data["in_flight"].get("acme", 0) for one in said]
    check(counts == sorted(counts, reverse=True), f"the count went up behind the fence: {counts}")


@rule("the last turn that leaves a closed fence is reported at once")
def at_once(plane: Plane, runtime: Runtime) -> None:
    settled(plane, plane.publish(entry("acme")))
    turn = runtime.begin(seconds=2.0)
    plane.next_report("the turn inside", lambda r: r.get("in_flight", {}).get("acme") == 1)
    plane.poll_after_ms = 20_000
    version = plane.publish(entry("acme", "none"))
    plane.next_report("the closed fence", lambda r: r.get("applied_version") == version)
    # It has been told 20 s by now; what it is told next is heard at its next word.
    plane.poll_after_ms = FAST_MS
    check(turn.result().served, "the turn goes on to its end")
    plane.wait(
        "a report without waiting for the next poll",
        3.0,
        lambda: any(
            one.kind == "report" and applied(version)(one.data) for one in plane.calls[-4:]
        ),
    )


@rule("a word of a newer control plane refuses, and so does a tombstone")
def unknown_word(plane: Plane, runtime: Runtime) -> None:
    for accepts in ("a-word-of-tomorrow", "moved"):
        settled(plane, plane.publish(entry("acme", accepts)))
        runtime.refuses()
        check(runtime.serves("bolt"), "other tenants are served")
    settled(plane, plane.publish(entry("acme")))
    check(runtime.serves(), "it is served again once it accepts all")


@rule("a policy that comes late does not open a fence")
def late_policy(plane: Plane, runtime: Runtime) -> None:
    old = f"{plane.epoch}.{plane.version}"
    version = plane.publish(entry("acme", "none"))
    settled(plane, version)
    stale = {
        "version": old,
        "full": True,
        "poll_after_ms": FAST_MS,
        "cell": {},
        "tenants": [entry("acme") | {"placement_version": f"{plane.epoch}.1"}],
    }
    sent: list[int] = []

    def instead(said: Said) -> Reply | None:
        if said.kind != "poll" or len(sent) >= 2:
            return None
        sent.append(1)
        return 200, stale

    plane.instead = instead
    plane.wait("two polls", SOON_SECONDS, lambda: len(sent) == 2)
    runtime.refuses()
    plane.instead = lambda said: None
    settled(plane, version)
    settled(plane, plane.publish(entry("acme")))


@rule("a report that was not answered is sent again: the same number, the same bytes")
def same_bytes(plane: Plane, runtime: Runtime) -> None:
    lost: list[Said] = []

    def loses(said: Said) -> bool:
        if said.kind != "report" or len(lost) >= 2:
            return False
        lost.append(said)
        return True

    check(runtime.serves(), "a turn for the report to carry")
    plane.loses = loses
    plane.wait("a report that gets lost, twice", 3 * SOON_SECONDS, lambda: len(lost) == 2)
    plane.loses = lambda said: False
    check(runtime.serves(), "another turn while it is outstanding")
    plane.next_report("a report", lambda r: r["seq"] > lost[0].data["seq"])
    seq = lost[0].data["seq"]
    with plane.lock:
        bodies = {
            one.body
            for one in plane.calls
            if one.kind == "report"
            and (one.data["instance"], one.data["seq"]) == (lost[0].data["instance"], seq)
        }
    check(len(bodies) == 1, "a retry sends the same bytes")


@rule("what it served is in its reports once")
def usage_once(plane: Plane, runtime: Runtime) -> None:
    def reported() -> int:
        return sum(
            line.get("turns", 0)
            for instance in plane.instances.values()
            for said in instance.reports
            for line in said.data.get("usage", [])
        )

    plane.wait(
        f"{runtime.served} turns in all reports", SOON_SECONDS, lambda: reported() >= runtime.served
    )
    time.sleep(3 * FAST_MS / 1000)
    check(reported() == runtime.served, f"{runtime.served} turns, not {reported()}")


@rule("an instance that is gone joins anew as the same process, and counts who is inside")
def gone(plane: Plane, runtime: Runtime) -> None:
    # Whichever call hears of it first.
    for kind in ("poll", "report"):
        end_instance(plane, runtime, heard_by=kind)


def end_instance(plane: Plane, runtime: Runtime, *, heard_by: str) -> None:
    before = plane.newest
    turn = runtime.begin(seconds=2.0)
    plane.next_report("the turn inside", lambda r: r.get("in_flight", {}).get("acme") == 1)

    def instead(said: Said) -> Reply | None:
        polls = said.kind == "poll" and said.query.get("instance") == before.key
        return (304, None) if polls and heard_by == "report" else None

    with plane.lock:
        before.gone, plane.instead = True, instead
    after = plane.wait("a join", SOON_SECONDS, lambda: another(plane, before))
    check(after.join.get("replaces") == before.key, "naming the id that it replaces")
    check(after.join["boot"] == before.join["boot"], "under the same boot")
    plane.wait("a report of the new id", SOON_SECONDS, lambda: after.reports)
    polls = [one for one in plane.calls if one.query.get("instance") == after.key]
    check(not polls[0].query.get("since"), "its first poll asks for a full policy")
    first = after.reports[0].data
    check(first["seq"] == 1, "its reports begin at 1")
    check(first["in_flight"].get("acme") == 1, "with the turn that has been inside all the time")
    check(turn.result().served, "which goes on to its end")


def another(plane: Plane, before: Instance) -> Instance | None:
    return plane.newest if plane.newest is not before else None


@rule("a gap in the numbers makes it join anew, with what it still holds")
def gap(plane: Plane, runtime: Runtime) -> None:
    before = plane.newest
    check(runtime.serves(), "a turn for the report to carry")
    plane.instead = lambda said: (
        (409, error("seq_gap"))
        if said.kind == "report" and said.data["instance"] == before.key
        else None
    )
    plane.wait("a join", SOON_SECONDS, lambda: another(plane, before))
    plane.instead = lambda said: None
    plane.wait("a report of the new id", SOON_SECONDS, lambda: plane.newest.reports)
    check(runtime.serves(), "it serves again")
    usage_once(plane, runtime)


@rule("another epoch replaces everything, whatever its number")
def epoch(plane: Plane, runtime: Runtime) -> None:
    for _ in range(3):
        plane.publish(entry("bolt"))
    with plane.lock:
        plane.entries.pop("bolt")
        version = plane.restore()
    settled(plane, version)
    check(runtime.serves("acme"), "the tenant of the new policy is served")
    runtime.refuses("bolt")
    settled(plane, plane.publish(entry("bolt")))
    check(runtime.serves("bolt"), "a delta of the new epoch is applied")


@rule("a share of a limit is held, and its number reported; without one the limit is closed")
def shares(plane: Plane, runtime: Runtime) -> None:
    settled(plane, plane.publish(entry("acme", max_concurrent_runs=8)))
    runtime.refuses()
    share = {"max_concurrent_runs": 2, "safe_max_concurrent_runs": 1}
    nothing = dict.fromkeys(
        ("runs_per_second", "tokens_per_minute", "safe_runs_per_second", "safe_tokens_per_minute")
    )
    plane.grants = {"number": 7, "tenants": {"acme": {**nothing, **share, "tokens_left": None}}}
    plane.next_report("a report of the grants", lambda r: r.get("grants_number") == 7)
    turns = [runtime.begin(seconds=1.0) for _ in range(2)]
    plane.next_report("two turns inside", lambda r: r.get("in_flight", {}).get("acme") == 2)
    runtime.refuses()
    check(all(turn.result().served for turn in turns), "two turns at once are served")
    # Set after the shares were made: in none of them, and every instance would hold all of it.
    settled(plane, plane.publish(entry("acme", max_concurrent_runs=8, runs_per_second=100.0)))
    runtime.refuses()
    plane.grants = None
    settled(plane, plane.publish(entry("acme")))


@rule("backs off while the control plane fails, and serves meanwhile")
def back_off(plane: Plane, runtime: Runtime) -> None:
    plane.instead = lambda said: (503, error("unavailable"))
    with plane.lock:
        begin = len(plane.calls)
    time.sleep(6.0)
    with plane.lock:
        calls = len(plane.calls) - begin
    check(runtime.serves(), "a turn is served while the lease runs")
    plane.instead = lambda said: None
    check(1 <= calls <= 20, f"it tries now and then: {calls} calls in 6 s at {FAST_MS} ms")
    plane.wait(
        "a report after the outage",
        40.0,
        lambda: any(one.kind == "report" and one.status == 200 for one in plane.calls[begin:]),
    )


@rule("stops when its lease is over, and comes back by itself")
def lease(plane: Plane, runtime: Runtime) -> None:
    before = plane.newest
    plane.lease_seconds = 3.0
    plane.next_report("a report", lambda report: True)
    # A client that takes the larger of two ends still holds the first, long one: join anew.
    with plane.lock:
        before.gone = True
    after = plane.wait("a join", SOON_SECONDS, lambda: another(plane, before))
    plane.wait("a report of the new id", SOON_SECONDS, lambda: after.reports)
    check(runtime.serves(), "a turn is served")
    plane.instead = lambda said: (0, None)
    with plane.lock:
        sent = max(one.at for one in plane.calls if one.kind == "report" and one.status == 200)
    check(runtime.serves(), "a turn is served while the lease runs")
    time.sleep(max(0.0, sent + plane.lease_seconds - time.monotonic()))
    runtime.refuses()
    plane.lease_seconds = 900.0
    plane.instead = lambda said: None
    again = plane.wait("a join", 40.0, lambda: another(plane, after))
    plane.wait("a report of the new id", 40.0, lambda: again.reports)
    check(runtime.serves(), "it serves again")


def main(argv: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--turns", required=True, help="where the runtime lets turns in")
    options.add_argument("--port", type=int, default=0, help="of the control plane; 0: any")
    options.add_argument("--only", default="", help="of the rules, those with this text in them")
    options.add_argument("command", nargs="*", help="starts the runtime")
    chosen = options.parse_args(argv)
    plane = Plane()
    # Until a check says so there is no policy to be had.
    plane.instead = lambda said: (503, error("unavailable")) if said.kind == "poll" else None
    with serving(plane, chosen.port) as address:
        told = {
            "SWITCHYARD_URL": address,
            "SWITCHYARD_TOKEN": TOKEN,
            "SWITCHYARD_CELL": CELL,
        }
        if not chosen.command:
            print(*(f"{name}={value}" for name, value in told.items()), sep="\n", flush=True)
            return judge(plane, Runtime(chosen.turns), chosen.only)
        process = subprocess.Popen(chosen.command, env={**os.environ, **told})
        try:
            return judge(plane, Runtime(chosen.turns), chosen.only)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def judge(plane: Plane, runtime: Runtime, only: str) -> int:
    """Run the checks and print a line for each; return the exit code."""
    missed = 0
    # The first two bring the runtime to where it serves.
    chosen = CHECKS[:2] + [one for one in CHECKS[2:] if only in one[0]]
    for number, (text, made) in enumerate(chosen):
        why = ""
        try:
            made(plane, runtime)
        except NotKept as not_kept:
            why = str(not_kept)
        except Exception:
            # A runtime that breaks the script has broken the contract first; say where.
            why = traceback.format_exc(limit=-2).strip().replace("\n", " | ")
        missed += bool(why)
        print(f"{'MISS' if why else 'ok  '}  {text}", flush=True)
        if why:
            print(f"      {why}", flush=True)
        if why and number == 0:
            print("      Nothing else can be checked.", flush=True)
            return 1
        tidy(plane)
    print(f"{len(chosen) - missed} of {len(chosen)} kept")
    return 1 if missed else 0


def tidy(plane: Plane) -> None:
    """Leave nothing of a check to the next: not its failures, nor its fences."""
    with plane.lock:
        if plane.version == 1 and not any(one.polled for one in plane.instances.values()):
            return  # Before the first policy.
        plane.instead = lambda said: None
        plane.loses = lambda said: False
        plane.poll_after_ms, plane.lease_seconds, plane.grants = FAST_MS, 900.0, None
        version = plane.publish(*(entry(tenant) for tenant in TENANTS))
    # If it is not kept, the next check says what is wrong.
    with suppress(NotKept):
        plane.wait(
            "the next round",
            45.0,
            lambda: any(
                one.kind == "report" and one.data.get("applied_version") == version
                for one in plane.calls[-50:]
            ),
        )


if __name__ == "__main__":
    sys.exit(main())
