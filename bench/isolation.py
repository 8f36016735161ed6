"""The isolation suite: real agent processes on a control plane of their own, told to break it.

`python -m bench.isolation` tries what one tenant could do to another: flood it, loop, spend past
a budget, fail on purpose, obey a planted instruction, ask another's question, open another's
conversation. Each is judged by what the other tenant, its backend or its books saw. Everything
runs below a temporary folder and ends with the suite; no installation is touched. With `--json`
each test is printed as one object, as the isolation page keeps it.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import secrets
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import Any

from bench import isolated, parser, servers
from bench.plane import control_plane, runtime_token
from platform_admin.processes import Supervisor, installation

BY = "isolation"
CELL, STORE = "cell-isolation", "store-isolation"
# Who tries, and who must notice nothing.
LOUD, QUIET, SPENDER = "acme", "bolt", "core"
AGENTS = ("agents-1", "agents-2")
# What the loud tenant may do, over both processes; it asks for ten times as much.
RUNS_PER_SECOND, RUNS_AT_ONCE, FLOOD = 2.0, 4, 10
QUIET_PER_SECOND, SECONDS = 4.0, 8.0
CALLS_PER_RUN = 5
# Turns that the spender may take a day: each is one call here.
BUDGET_TURNS = 6
READY_SECONDS, ANSWER_SECONDS, BOOKED_SECONDS = 60.0, 60.0, 30.0


@dataclass(frozen=True)
class Result:
    """One test, in the words of the page."""

    name: str
    kind: str
    asked: str
    measured: str
    bar: str
    held: bool


class Agents:
    """One agent process, asked from here."""

    def __init__(self, config: isolated.Config, home: Path) -> None:
        path = home / f"{config.name}.json"
        path.touch(0o600)
        path.write_text(json.dumps(asdict(config)))
        self.name = config.name
        self._numbers = itertools.count(1)
        self._answers: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.isolated", "--config", str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(home / f"{config.name}.log").open("wb"),
            text=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def begin(self, do: str, **arguments: Any) -> Callable[[], dict[str, Any]]:
        """Send a command; return what waits for its answer."""
        number = next(self._numbers)
        answer = self._answers[number] = queue.Queue()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"id": number, "do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        return lambda: answer.get(timeout=ANSWER_SECONDS)

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send a command and return its answer."""
        return self.begin(do, **arguments)()

    def close(self) -> None:
        """Let it leave, and end it if it does not."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(15.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            self._answers.pop(answer["id"]).put(answer)


def main(argv: Sequence[str] | None = None) -> int:
    chosen = parser(__doc__ or "").parse_args(argv)
    failed = tests = 0
    if not chosen.json:
        print(
            "A control plane and two agent processes of its own begin: half a minute.", flush=True
        )
    with tempfile.TemporaryDirectory(prefix="switchyard-isolation-") as folder:
        for result in suite(Path(folder)):
            failed += not result.held
            tests += 1
            if chosen.json:
                print(json.dumps(asdict(result)), flush=True)
            else:
                print(f"{'held  ' if result.held else 'BROKEN'}  {result.name}", flush=True)
                for word in ("asked", "measured", "bar"):
                    print(f"          {word + ':':<10}{getattr(result, word)}", flush=True)
    if not chosen.json:
        print(f"{tests - failed} of {tests} held.")
    return 1 if failed else 0


def suite(home: Path) -> Iterator[Result]:
    """Run every test; yield each as it ends."""
    with ground(home) as agents:
        books = home / "backend.sqlite3"
        one, other = agents
        tests: tuple[Callable[[], Result], ...] = (
            partial(flood, one, other),
            partial(loop, one),
            partial(failures, one),
            partial(budget, one),
            partial(authority, one, books),
            partial(cache, one),
            partial(conversation, one),
        )
        for test in tests:
            yield test()


@contextmanager
def ground(home: Path) -> Iterator[list[Agents]]:
    """Yield agent processes that are ready, on a control plane of their own."""
    store = f"sqlite:///{home / 'sessions.sqlite3'}"
    port = servers.free_port()
    address = f"http://127.0.0.1:{port}"
    # None of an installation that this shell may name.
    for name in ("REDIS_URL", "SWITCHYARD_HTTPS"):
        os.environ.pop(name, None)
    os.environ["ISOLATION_STORE_URL"] = store
    with ExitStack() as stack:
        stack.enter_context(
            control_plane(f"sqlite:///{home / 'plane.sqlite3'}", SWITCHYARD_HOME=str(home))
        )
        token = _onboard()
        keys = _backend(home / "backend.sqlite3")
        supervisor = stack.enter_context(Supervisor(home / "log"))
        supervisor.start(*installation(port))
        _wait(lambda: _answers(address), "the control plane")
        agents = []
        for name in AGENTS:
            config = isolated.Config(
                name, address, token, CELL, {STORE: store}, str(home / "backend.sqlite3"), keys
            )
            agents.append(Agents(config, home))
            stack.callback(agents[-1].close)
        tenants = [LOUD, QUIET, SPENDER]
        _wait(lambda: all(one.ask("state", tenants=tenants)["ready"] for one in agents), "agents")
        yield agents


def flood(one: Agents, other: Agents) -> Result:
    """One tenant asks for ten times what it may; its neighbour is timed before and beside."""
    from capacity.domain.slo import SLOS
    from tenants.domain.names import Tier

    slo = SLOS[Tier.POOLED]
    alone = one.ask("talk", tenant=QUIET, per_second=QUIET_PER_SECOND, seconds=SECONDS / 2)
    floods = [
        each.begin("talk", tenant=LOUD, per_second=FLOOD * RUNS_PER_SECOND / 2, seconds=SECONDS)
        for each in (one, other)
    ]
    beside = one.ask("talk", tenant=QUIET, per_second=QUIET_PER_SECOND, seconds=SECONDS)
    flooded = [wait() for wait in floods]
    sent = sum(said["sent"] for said in flooded)
    served = sum(said["served"] for said in flooded)
    # What a bucket holds at first is served beside the rate, one run in each process at least.
    most = RUNS_PER_SECOND * (SECONDS + 1) + len(flooded)
    p95, before = _p95(beside["first_ms"]), _p95(alone["first_ms"])
    errors = 1 - beside["served"] / beside["sent"]
    return Result(
        "Flood",
        "performance",
        f"{LOUD} asks for {FLOOD} times the {RUNS_PER_SECOND:g} runs per second that it may begin"
        f", for {SECONDS:.0f} s over {len(flooded)} processes.",
        f"{served} of {sent} turns of {LOUD} served; {QUIET}: p95 {p95:.0f} ms to its first event"
        f" ({before:.0f} ms alone), {errors:.1%} of {beside['sent']} turns failed.",
        f"at most {most:.0f} served; {QUIET} within {slo.p95_ms:,} ms and {slo.error_rate:.1%}",
        0 < served <= most and slo.holds(p95, errors),
    )


def loop(one: Agents) -> Result:
    """A tool asks to be called again, for ever."""
    said = _patiently(one, LOUD, "loop")
    return Result(
        "Loop",
        "fault",
        f"A tool of {LOUD} always asks to be called again; a run may call the model"
        f" {CALLS_PER_RUN} times.",
        f"{said['calls']} calls, then {_last(said)!r}.",
        f"{CALLS_PER_RUN} calls, then 'Stopping: step limit reached.'",
        said["calls"] == CALLS_PER_RUN and _last(said) == "Stopping: step limit reached.",
    )


def failures(one: Agents) -> Result:
    """Turns that fail give their permits back, and cost the neighbour nothing."""
    failed = [_patiently(one, LOUD, "boom") for _ in range(RUNS_AT_ONCE + 2)]
    after, neighbour = _patiently(one, LOUD, "hello"), one.ask("turn", tenant=QUIET, text="hello")
    broke = sum(bool(said["error"]) for said in failed)
    well = not after["error"] and not neighbour["error"]
    return Result(
        "Failing turns",
        "fault",
        f"{len(failed)} turns of {LOUD} fail in the model, more than it may run at once.",
        f"{broke} failed; the next turn of {LOUD} was {'served' if well else 'refused'}, and"
        f" {QUIET} was {'refused' if neighbour['error'] else 'served'}.",
        "every permit comes back, and both are served",
        broke == len(failed) and well,
    )


def budget(one: Agents) -> Result:
    """A tenant spends what it may a day; the next turn reaches no model."""
    spent = [one.ask("turn", tenant=SPENDER, text="hello") for _ in range(BUDGET_TURNS)]
    served = sum(said["calls"] for said in spent)
    # Until the control plane's own books say so too, each process goes by what it counted.
    says = "Your organisation has reached today's usage limit."
    refused: dict[str, Any] = {}

    def over() -> bool:
        refused.update(one.ask("turn", tenant=SPENDER, text="hello"))
        return _last(refused) == says or refused["refused"] == "budget"

    _wait(over, "the budget to be used up", BOOKED_SECONDS)
    neighbour = one.ask("turn", tenant=QUIET, text="hello")
    return Result(
        "Budget",
        "performance",
        f"{SPENDER} may use {BUDGET_TURNS * isolated.TOKENS_PER_CALL:,} tokens a day, and goes on"
        " after it has.",
        f"{served} calls, then {refused['calls']} calls and"
        f" {_last(refused) or refused['error']!r}; {QUIET} was"
        f" {'refused' if neighbour['error'] else 'served'}.",
        "no model call once the budget is used up; the neighbour is served",
        served >= BUDGET_TURNS and refused["calls"] == 0 and not neighbour["error"],
    )


def authority(one: Agents, books: Path) -> Result:
    """A document tells the model to act for another tenant, and the model obeys."""
    said = _patiently(one, LOUD, f"read {QUIET}")
    peek = _patiently(one, LOUD, f"account {QUIET}-1")
    with closing(sqlite3.connect(books)) as database:
        tickets = dict(
            database.execute("SELECT owner, count(*) FROM tickets GROUP BY owner").fetchall()
        )
    return Result(
        "Authority",
        "authority",
        f"A document that {LOUD} reads tells its agent to open a ticket for {QUIET} and to look"
        f" {QUIET}'s account up. The model obeys.",
        f"Tickets: {tickets.get(LOUD, 0)} at {LOUD}, {tickets.get(QUIET, 0)} at {QUIET}; the"
        f" account: {_last(peek)!r}.",
        f"{QUIET}'s backend saw nothing, and its account is not found",
        not said["error"] and tickets == {LOUD: 1} and _last(peek) == "Done: no such account",
    )


def cache(one: Agents) -> Result:
    """Both ask the same words, one after the other."""
    answers = {
        tenant: _last(_patiently(one, tenant, "account shared-1")) for tenant in (LOUD, QUIET)
    }
    return Result(
        "Result cache",
        "data",
        f"{LOUD} and {QUIET} ask the same question within a moment, through one cache.",
        "; ".join(f"{tenant}: {answer!r}" for tenant, answer in answers.items()),
        "each hears what its own backend knows",
        all(answer == f"Done: the books of {tenant}" for tenant, answer in answers.items()),
    )


def conversation(one: Agents) -> Result:
    """One tenant names another's user and conversation."""
    begun = one.ask("turn", tenant=QUIET, text="hello", user="owner")
    said = _patiently(one, LOUD, "hello", session=begun["session"], user="owner")
    return Result(
        "Conversation",
        "data",
        f"{LOUD} names a user and a conversation of {QUIET}.",
        f"{said['error'][:80]!r}, {said['calls']} model calls.",
        "not found, and no model call",
        not begun["error"] and "not found" in said["error"].lower() and said["calls"] == 0,
    )


def _patiently(one: Agents, tenant: str, text: str, **more: str) -> dict[str, Any]:
    """Ask until the turn is let in: its tenant may begin few a second."""
    limit = time.monotonic() + READY_SECONDS
    while (said := one.ask("turn", tenant=tenant, text=text, **more))["refused"]:
        if time.monotonic() > limit:
            break
        time.sleep(0.25)
    return said


def _last(said: Mapping[str, Any]) -> str:
    return said["texts"][-1] if said["texts"] else ""


def _p95(values: Sequence[float]) -> float:
    return quantiles(values, n=20)[-1] if len(values) > 1 else float("inf")


def _onboard() -> str:
    """Register the tenants with their limits; return the agents' token."""
    from durable.clock import database_now
    from tenants import services
    from tenants.domain.limits import Limits

    now = database_now()
    region = services.add_region("isolation", name="Isolation", by=BY, now=now)
    cell = services.add_cell(CELL, region=region, by=BY, now=now)
    cell = services.verify_quota(cell, tokens_per_minute=10_000_000, by=BY, now=now)
    store = services.add_store(
        STORE, region=region, kind="adk-sql", address_from="env:ISOLATION_STORE_URL", by=BY, now=now
    )
    limits = {
        LOUD: Limits(
            runs_per_second=RUNS_PER_SECOND,
            max_concurrent_runs=RUNS_AT_ONCE,
            max_model_calls_per_run=CALLS_PER_RUN,
        ),
        QUIET: Limits(),
        SPENDER: Limits(daily_token_budget=BUDGET_TURNS * isolated.TOKENS_PER_CALL),
    }
    for slug, chosen in limits.items():
        tenant = services.add_tenant(
            slug,
            name=slug.title(),
            app_name=f"support.{slug}",
            cell=cell,
            store=store,
            by=BY,
            now=now,
        )
        services.set_scope(tenant, limits=chosen, by=BY, reason="the isolation suite", now=now)
    return runtime_token([cell], by=BY)


def _backend(path: Path) -> dict[str, str]:
    """Make the tenants' backend; return each one's key to it."""
    keys = {tenant: secrets.token_urlsafe(16) for tenant in (LOUD, QUIET, SPENDER)}
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE keys (key TEXT PRIMARY KEY, owner TEXT)")
        database.execute("CREATE TABLE accounts (owner TEXT, account TEXT, note TEXT)")
        database.execute("CREATE TABLE tickets (owner TEXT, subject TEXT)")
        for tenant, key in keys.items():
            database.execute("INSERT INTO keys VALUES (?, ?)", (key, tenant))
            for account in (f"{tenant}-1", "shared-1"):
                row = (tenant, account, f"the books of {tenant}")
                database.execute("INSERT INTO accounts VALUES (?, ?, ?)", row)
    return keys


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/readyz", timeout=5):
            return True
    except OSError:
        return False


def _wait(until: Callable[[], bool], what: str, seconds: float = READY_SECONDS) -> None:
    limit = time.monotonic() + seconds
    while not until():
        if time.monotonic() > limit:
            raise TimeoutError(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.25)


if __name__ == "__main__":
    sys.exit(main())
