"""What the library costs a turn: its own time over a null Runner, against a real turn.

Turns of several kinds take turns: a real one, google-adk's own Runner with a scripted model over
its in-memory store, without the library; null ones, whose Runner does nothing but answer; and the
null ones under the Host, inside fence and admission. The last two differ by the library alone.
The tenant has every limit there is, so all of them are looked at.

What a longer turn adds is shown beside it: each further event, which is handed over to the reader
and waits for it, and the plugin, asked as often as the scripted turn asks it, with a budget that is
looked at before the turn, or before each model call too.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from enum import StrEnum
from statistics import median
from types import SimpleNamespace
from typing import Any

from google.adk.models.llm_request import LlmRequest
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.sessions import InMemorySessionService

from agent_runtime import PolicyClient
from agent_runtime.adk import Host, TenantPolicyPlugin
from agent_runtime.transport import Answer
from bench import Bar, parser, report, scripted

# A round: so many turns of each kind, one after another.
ROUNDS, REAL_TURNS, NULL_TURNS = 20, 10, 60
WARM_UP_ROUNDS = 3
LIMIT_PERCENT = 1.0
# What a turn of the script yields.
EVENTS = 3
TENANT, APP_NAME = "acme", "bench.acme"


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=ROUNDS)
    chosen = options.parse_args(argv)
    return report(asyncio.run(measure(chosen.rounds)), as_json=chosen.json)


class Kind(StrEnum):
    """A kind of turn."""

    REAL = "a real turn in memory, without the library"
    NULL = "a null turn, without the library"
    NULL_UNDER = "a null turn under the library"
    # As many events, and callbacks, as the real one has.
    FULL = "a null turn of three events, without the library"
    FULL_UNDER = "a null turn of three events under library and plugin"
    EXACT_UNDER = "the same with an exact budget"


async def measure(rounds: int) -> list[Bar]:
    """Run all kinds of turns; return the figures."""
    plane = Plane()
    client = PolicyClient(
        "http://plane.invalid",
        "token",
        cell="one",
        name="bench",
        build="bench",
        stores=["memory"],
        longest_turn_seconds=60,
        longest_tool_seconds=30,
        transport=plane,
    )
    client.tick()
    service = InMemorySessionService()
    real = scripted.build_runner(APP_NAME, service)
    null = NullRunner(service, events=1)
    # Whatever a plugin does, google-adk asks it: asking one that does nothing is not ours.
    full = NullRunner(service, [BasePlugin(name="null")])
    ours = NullRunner(service, [TenantPolicyPlugin.of(client, TENANT)])
    stores = {"memory": lambda: service}
    null_host = Host(client, stores, lambda entry, _: null)
    full_host = Host(client, stores, lambda entry, _: ours)

    async def one(kind: Kind) -> float:
        runner: Any = {Kind.REAL: real, Kind.NULL: null, Kind.FULL: full}.get(kind)
        if runner is None:
            host = null_host if kind is Kind.NULL_UNDER else full_host
            return await timed(host.run(TENANT, "u", "s", MESSAGE))
        session_id = "s"
        if kind is Kind.REAL:
            # One each: a turn reads all of its session.
            session = await service.create_session(app_name=APP_NAME, user_id="u")
            session_id = session.id
        turn = runner.run_async(user_id="u", session_id=session_id, new_message=MESSAGE)
        return await timed(turn)

    seconds: dict[Kind, list[float]] = {kind: [] for kind in Kind}
    for number in range(WARM_UP_ROUNDS + rounds):
        # Between rounds: nobody's turns pay for what others left behind.
        gc.collect()
        gc.disable()
        for kind in Kind:
            plane.exact_budget = kind is Kind.EXACT_UNDER
            client.tick()
            turns = REAL_TURNS if kind is Kind.REAL else NULL_TURNS
            taken = [await one(kind) for _ in range(turns)]
            if number >= WARM_UP_ROUNDS:
                seconds[kind] += taken
        gc.enable()
    client.tick()
    asked = (WARM_UP_ROUNDS + rounds) * 2 * NULL_TURNS * scripted.CALLS_PER_TURN
    if plane.model_calls != asked:
        raise SystemExit(f"{asked} model calls were counted as {plane.model_calls}.")
    for host in (null_host, full_host):
        await host.close()
    await real.close()
    return figures({kind: median(taken) for kind, taken in seconds.items()})


def figures(seconds: Mapping[Kind, float]) -> list[Bar]:
    """Return the bars of what was measured."""
    turn = seconds[Kind.REAL]
    own = seconds[Kind.NULL_UNDER] - seconds[Kind.NULL]
    full = seconds[Kind.FULL_UNDER] - seconds[Kind.FULL]
    dearer = seconds[Kind.EXACT_UNDER] - seconds[Kind.FULL_UNDER]
    return [
        *(Bar(kind, taken * 1e6, "us") for kind, taken in seconds.items()),
        Bar("the library's own time over a null Runner", own * 1e6, "us"),
        Bar("the same, of a real turn", own / turn * 100, "%", LIMIT_PERCENT),
        Bar("with three events and the plugin, of a real turn", full / turn * 100, "%"),
        Bar("exact budget, more for each model call", dearer / CALLS * 1e6, "us"),
        Bar("exact budget, more of a real turn", dearer / turn * 100, "%"),
    ]


async def timed(stream: AsyncGenerator[Any, None]) -> float:
    """Read a turn to its end; return the seconds that it took."""
    began = time.perf_counter()
    async for _ in stream:
        pass
    return time.perf_counter() - began


class NullRunner:
    """Yields events that are there already, and asks its plugins what a real Runner asks."""

    app_name = APP_NAME

    def __init__(self, service: Any, plugins: Sequence[Any] = (), events: int = EVENTS) -> None:
        self.session_service = service
        self.plugin_manager = SimpleNamespace(plugins=plugins)
        self._events = events
        self._number = 0

    async def run_async(self, **_: Any) -> AsyncGenerator[Any, None]:
        """Run one turn: a call of the model, a tool, another call of the model."""
        self._number += 1
        invocation = SimpleNamespace(
            invocation_id=f"e-{self._number}",
            session=SimpleNamespace(app_name=APP_NAME),
            live_request_queue=None,
        )
        for plugin in self.plugin_manager.plugins:
            await plugin.before_run_callback(invocation_context=invocation)
        for number in range(self._events):
            for plugin in self.plugin_manager.plugins:
                await self._ask(plugin, invocation, is_tool=number % 2 == 1)
            yield SimpleNamespace(
                invocation_id=invocation.invocation_id, usage_metadata=None, partial=None
            )
        for plugin in self.plugin_manager.plugins:
            await plugin.after_run_callback(invocation_context=invocation)

    async def _ask(self, plugin: Any, invocation: Any, *, is_tool: bool) -> None:
        context = SimpleNamespace(
            invocation_id=invocation.invocation_id,
            actions=SimpleNamespace(),
            get_invocation_context=lambda: invocation,
        )
        if is_tool:
            refused = await plugin.before_tool_callback(
                tool=TOOL, tool_args={}, tool_context=context
            )
        else:
            refused = await plugin.before_model_callback(
                callback_context=context, llm_request=REQUEST
            )
            await plugin.after_model_callback(callback_context=context, llm_response=RESPONSE)
        if refused is not None:
            raise SystemExit(f"A turn was refused: {refused}")

    async def close(self) -> None:
        """Close nothing."""


class Plane:
    """A control plane in this process: one tenant with every limit, none of which is reached."""

    def __init__(self) -> None:
        self.exact_budget = False
        # What was reported, all in all.
        self.model_calls = 0
        self._version = 0

    def __call__(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> Answer:
        answer: dict[str, Any] = {"lease_seconds": 900.0, "poll_after_ms": 5_000}
        if path.endswith("/instances"):
            answer |= {"instance": "i1", "epoch": "e"}
        elif path.endswith("/reports"):
            usage = json.loads(body or b"")["usage"]
            self.model_calls += sum(line["model_calls"] for line in usage)
            answer |= {"grants": {"number": self._version, "tenants": {TENANT: SHARE}}}
        else:
            self._version += 1
            answer |= {
                "version": f"e.{self._version}",
                "full": True,
                "cell": {},
                "tenants": [self._entry()],
            }
        return 200, {}, json.dumps(answer).encode()

    def _entry(self) -> dict[str, Any]:
        return {
            "tenant": TENANT,
            "agent": "bench",
            "app_name": APP_NAME,
            "tier": "pooled",
            "placement_version": "e.1",
            "accepts": "all",
            "moved_to": None,
            "store": {"key": "memory", "kind": "memory"},
            "runner_generation": 1,
            "scope": {**LIMITS, "exact_budget": self.exact_budget},
        }


LIMITS = {
    "version": 1,
    "max_concurrent_runs": 100,
    "runs_per_second": 1e6,
    "daily_token_budget": 10**12,
    "max_model_calls_per_run": 100,
    "allowed_tools": ["remember", "wait"],
    "weight": 1.0,
}
SHARE = {
    "runs_per_second": 1e6,
    "max_concurrent_runs": 100,
    "tokens_per_minute": 1e12,
    "safe_runs_per_second": 1e6,
    "safe_max_concurrent_runs": 100,
    "safe_tokens_per_minute": 1e12,
    "tokens_left": 10**12,
}
CALLS = scripted.CALLS_PER_TURN
MESSAGE = scripted.message("hi")
TOOL = SimpleNamespace(name="remember")
REQUEST = LlmRequest(model="scripted-1")
RESPONSE = SimpleNamespace(
    usage_metadata=SimpleNamespace(total_token_count=scripted.TOKENS_PER_CALL), partial=False
)


if __name__ == "__main__":
    sys.exit(main())
