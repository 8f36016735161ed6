"""What a run may do: the plugin inside real Runners, alone and under the Host."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from datetime import timedelta
from typing import Any

import pytest
from google.adk.agents import LlmAgent, ParallelAgent
from google.adk.apps import App
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.adk.tools.agent_tool import AgentTool
from google.adk.tools.google_search_tool import google_search
from google.genai import types
from google.genai.errors import ClientError
from pydantic import PrivateAttr

from agent_runtime import BreakerOpen, Breakers, Host, PolicyClient, TenantThrottled
from agent_runtime.adk import TenantPolicyPlugin
from agent_runtime.admission import Share, Shares
from agent_runtime.policy import Entry
from bench import scripted
from tests.runtime.wire import ControlPlane, DrivenClock, entry, make_client

BUDGET = "Your organisation has reached today's usage limit."
STEPS = "Stopping: step limit reached."
TOKENS = 18


class Model(BaseLlm):
    """Says what `answers` say, one a call, the last one again and again."""

    model: str = "scripted-2"
    _answers: list[Any] = PrivateAttr(default_factory=list)
    _requests: list[LlmRequest] = PrivateAttr(default_factory=list)

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        self._requests.append(llm_request)
        await asyncio.sleep(0)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        for one in answer if isinstance(answer, list) else [answer]:
            if isinstance(one, Exception):
                raise one
            yield one
            await asyncio.sleep(0)

    @property
    def calls(self) -> int:
        return len(self._requests)


def model(*answers: Any) -> Model:
    made = Model()
    made._answers = list(answers)
    return made


def said(text: str = "ok", tokens: int | None = TOKENS, **more: Any) -> LlmResponse:
    return answered(types.Part(text=text), tokens, **more)


def calls(tool: str, tokens: int | None = TOKENS, **args: Any) -> LlmResponse:
    return answered(types.Part(function_call=types.FunctionCall(name=tool, args=args)), tokens)


def answered(part: types.Part, tokens: int | None, **more: Any) -> LlmResponse:
    usage = types.GenerateContentResponseUsageMetadata(total_token_count=tokens)
    return LlmResponse(
        content=types.Content(role="model", parts=[part]),
        usage_metadata=None if tokens is None else usage,
        **more,
    )


def look() -> dict[str, str]:
    """Look again."""
    return {"found": "nothing"}


def buy() -> dict[str, str]:
    """Buy something."""
    BOUGHT.append(1)
    return {"bought": "it"}


BOUGHT: list[int] = []
BUSY = ClientError(429, {"error": {"message": "Resource exhausted. Please try again later."}})
QUOTA = ClientError(429, {"error": {"message": "You exceeded your current quota."}})


def scope(**changes: Any) -> dict[str, Any]:
    return entry()["scope"] | changes


def agent(using: BaseLlm, name: str = "support_agent", **options: Any) -> LlmAgent:
    options.setdefault("tools", [look, buy])
    return LlmAgent(name=name, model=using, instruction="Help.", **options)


class Tenant:
    """The tenant acme of one process: its entry, its plugin and a Runner over it."""

    def __init__(self, client: PolicyClient, plane: ControlPlane) -> None:
        self.client, self.plane = client, plane
        self.pauses: list[float] = []
        self.plugin = self.make_plugin()
        self.service = InMemorySessionService()

    def make_plugin(self, **options: Any) -> TenantPolicyPlugin:
        return TenantPolicyPlugin.of(self.client, "acme", pause=self._pause, **options)

    async def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.client.clock.advance(seconds)  # type: ignore[attr-defined]

    def limit(self, *, trial: dict[str, Any] | None = None, **limits: Any) -> None:
        self.plane.publish(entry("acme", scope=scope(**limits), trial=trial))
        self.client.tick()

    def grant(self, **share: Any) -> None:
        at = self.client.clock.boottime()
        self.client.shares.apply(1, {"acme": Share(**share)}, sent_at=at, seconds=30.0)

    def runner(
        self, root: Any, *, app_name: str = "support.acme", plugins: list[BasePlugin] | None = None
    ) -> Runner:
        return Runner(
            app=App(name="support", root_agent=root, plugins=plugins or [self.plugin]),
            app_name=app_name,
            session_service=self.service,
        )

    async def run(self, root: Any, **options: Any) -> list[Any]:
        """Run one turn without a Host; return its events."""
        config = options.pop("run_config", None)
        runner = self.runner(root, **options)
        session = await self.service.create_session(app_name=runner.app_name, user_id="u")
        stream = runner.run_async(
            user_id="u",
            session_id=session.id,
            new_message=scripted.message("hi"),
            run_config=config,
        )
        return [event async for event in stream]

    def used(self) -> dict[str, Any]:
        """What is counted and not reported, over all minutes."""
        batch = self.client.usage.take()
        sums: dict[str, Any] = {"turns": 0, "model_calls": 0, "tokens": 0}
        sums |= {"refused": {}, "would_refuse": {}}
        for line in batch.usage():
            for name in ("turns", "model_calls", "tokens"):
                sums[name] += line[name]
            for name in ("refused", "would_refuse"):
                for reason, count in line[name].items():
                    sums[name][reason] = sums[name].get(reason, 0) + count
        self.client.usage.give_back(batch)
        return sums


@pytest.fixture
def clock() -> DrivenClock:
    return DrivenClock()


@pytest.fixture
def plane() -> ControlPlane:
    return ControlPlane()


@pytest.fixture
def client(plane: ControlPlane, clock: DrivenClock) -> PolicyClient:
    client = make_client(plane, clock, dice=lambda: 1.0)
    client.tick()
    return client


@pytest.fixture
def tenant(client: PolicyClient, plane: ControlPlane) -> Tenant:
    BOUGHT.clear()
    return Tenant(client, plane)


@pytest.fixture
async def host_of(tenant: Tenant) -> AsyncIterator[Callable[..., Host]]:
    """Make a Host whose acme has the session s1, over a root agent."""
    hosts: list[Host] = []

    def make(root: Callable[[], Any], plugins: list[BasePlugin] | None = None) -> Host:
        def build(entry: Entry, service: Any) -> Runner:
            tenant.service = service
            return tenant.runner(root(), plugins=plugins)

        hosts.append(Host(tenant.client, {"pg-eu": InMemorySessionService}, build))
        return hosts[-1]

    yield make
    for host in hosts:
        await host.close()


async def turn(host: Host, **options: Any) -> list[Any]:
    try:
        await host.create_session("acme", "u", session_id="s1")
    except Exception as error:
        assert "exists" in str(error)  # noqa: PT017
    return [e async for e in host.run("acme", "u", "s1", scripted.message("hi"), **options)]


def texts(events: list[Any]) -> list[str]:
    parts = [part for event in events for part in (event.content.parts if event.content else [])]
    return [part.text for part in parts if part.text]


# --- before a run -----------------------------------------------------------------------------


async def test_a_run_of_another_app_is_rejected(tenant: Tenant) -> None:
    using = model(said())
    events = await tenant.run(agent(using), app_name="support.bolt")
    assert texts(events) == ["Request rejected."]
    assert using.calls == 0


async def test_a_tenant_that_nobody_was_told_of_is_rejected(client: PolicyClient) -> None:
    using = model(said())
    stranger = Tenant(client, ControlPlane())
    stranger.plugin = TenantPolicyPlugin(lambda: None, client.usage)
    assert texts(await stranger.run(agent(using))) == ["Request rejected."]
    assert using.calls == 0


async def test_a_budget_that_is_used_up_refuses_before_any_model_call(
    tenant: Tenant, clock: DrivenClock
) -> None:
    midnight = clock.now() + timedelta(hours=3)
    tenant.limit(daily_token_budget=100, budget_spent_until=midnight.isoformat())
    using = model(said())
    assert texts(await tenant.run(agent(using))) == [BUDGET]
    assert using.calls == 0
    assert tenant.used()["refused"] == {"budget": 1}
    # It lets go by itself at the tenant's midnight.
    clock.advance(3 * 3_600)
    assert texts(await tenant.run(agent(using))) == ["ok"]


async def test_tokens_that_were_used_here_count_before_the_control_plane_says_so(
    tenant: Tenant,
) -> None:
    tenant.limit(daily_token_budget=100)
    tenant.grant(tokens_left=2 * TOKENS)
    using = model(said())
    found = [texts(await tenant.run(agent(using))) for _ in range(3)]
    assert found == [["ok"], ["ok"], [BUDGET]]


async def test_a_refused_run_is_stored_as_a_turn_of_two_events(tenant: Tenant) -> None:
    """google-adk stores the user's message before it asks, and what a plugin answers after."""
    await tenant.run(agent(model(said())), app_name="support.bolt")
    (session,) = (await tenant.service.list_sessions(app_name="support.bolt")).sessions
    found = await tenant.service.get_session(
        app_name="support.bolt", user_id="u", session_id=session.id
    )
    assert found is not None
    assert [event.author for event in found.events] == ["user", "model"]


async def test_an_edit_of_a_limit_reaches_the_runner_that_was_built_before_it(
    tenant: Tenant,
) -> None:
    using = model(calls("look"))
    runner = tenant.runner(agent(using))
    for cap in (3, 5, 2):
        tenant.limit(max_model_calls_per_run=cap)
        session = await tenant.service.create_session(app_name="support.acme", user_id="u")
        before = using.calls
        stream = runner.run_async(
            user_id="u", session_id=session.id, new_message=scripted.message("hi")
        )
        assert texts([event async for event in stream]) == [STEPS]
        assert using.calls - before == cap


async def test_a_turn_that_is_inside_keeps_its_limits_when_the_lease_runs_out(
    tenant: Tenant,
) -> None:
    tenant.limit(max_model_calls_per_run=3)
    using = model(calls("look"))

    def drop() -> dict[str, str]:
        """Lose the lease."""
        tenant.client.fence.drop()
        return {}

    using._answers = [calls("drop"), calls("look")]
    assert texts(await tenant.run(agent(using, tools=[drop, look]))) == [STEPS]
    assert using.calls == 3


# --- a run's model calls ------------------------------------------------------------------------


async def test_a_loop_stops_at_the_cap(tenant: Tenant) -> None:
    tenant.limit(max_model_calls_per_run=4)
    using = model(calls("look"))
    events = await tenant.run(agent(using))
    assert texts(events) == [STEPS]
    assert using.calls == 4
    assert tenant.used()["model_calls"] == 4


# google-adk would have a graph of nodes instead; there is one where agents are used so.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_agents_that_run_at_once_share_the_cap_of_their_run(tenant: Tenant) -> None:
    tenant.limit(max_model_calls_per_run=5)
    using = [model(calls("look")), model(calls("look"))]
    parts = [agent(one, name=f"agent_{n}") for n, one in enumerate(using)]
    await tenant.run(ParallelAgent(name="both", sub_agents=parts))
    assert sum(one.calls for one in using) == 5
    assert tenant.used()["tokens"] == 5 * TOKENS


# By google-adk itself: its AgentTool hands plugins on in a way that it calls deprecated.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_an_agent_used_as_a_tool_shares_the_cap_of_the_turn(
    tenant: Tenant, host_of: Callable[..., Host]
) -> None:
    tenant.limit(max_model_calls_per_run=6)
    inner, outer = model(calls("look")), model(calls("helper", request="x"))
    helper = agent(inner, name="helper")
    host = host_of(lambda: agent(outer, tools=[AgentTool(helper)]))
    assert texts(await turn(host))[-1] == STEPS
    assert inner.calls + outer.calls == 6
    # The Host sees no event of the inner run: only the plugin can count its tokens.
    assert tenant.used()["tokens"] == 6 * TOKENS
    assert tenant.plugin._runs == {}


async def test_a_cap_on_trial_is_counted_and_not_enforced(tenant: Tenant) -> None:
    tenant.limit(trial=scope(max_model_calls_per_run=1, version=2))
    using = model(calls("look"), calls("look"), said())
    assert texts(await tenant.run(agent(using))) == ["ok"]
    assert tenant.used()["would_refuse"] == {"steps": 1}


@pytest.mark.parametrize("exact", [True, False])
async def test_an_exact_budget_is_looked_at_before_every_call(tenant: Tenant, exact: bool) -> None:
    tenant.limit(daily_token_budget=1_000, exact_budget=exact)
    tenant.grant(tokens_left=TOKENS)
    using = model(calls("look"), calls("look"), said())
    assert texts(await tenant.run(agent(using))) == [BUDGET if exact else "ok"]
    assert using.calls == (1 if exact else 3)
    assert tenant.used()["refused"] == ({"budget": 1} if exact else {})


# By google-adk itself: its AgentTool hands plugins on in a way that it calls deprecated.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("exact", [True, False])
async def test_an_agent_used_as_a_tool_is_no_run_of_its_own_to_the_budget(
    tenant: Tenant, host_of: Callable[..., Host], exact: bool
) -> None:
    tenant.limit(daily_token_budget=1_000, exact_budget=exact)
    tenant.grant(tokens_left=TOKENS)
    inner, outer = model(said("found")), model(calls("helper", request="x"), said("done"))
    helper = agent(inner, name="helper")
    host = host_of(lambda: agent(outer, tools=[AgentTool(helper)]))
    assert texts(await turn(host))[-1] == (BUDGET if exact else "done")
    assert inner.calls + outer.calls == (1 if exact else 3)
    assert tenant.used()["refused"] == ({"budget": 1} if exact else {})


# --- what is counted --------------------------------------------------------------------------


async def test_a_turn_that_its_budget_refuses_is_demand_once_and_no_turn(
    tenant: Tenant, host_of: Callable[..., Host]
) -> None:
    tenant.limit(daily_token_budget=1_000)
    tenant.grant(tokens_left=TOKENS)
    host = host_of(lambda: agent(model(said())))
    assert texts(await turn(host, turn_id="t1")) == ["ok"]
    for _ in range(3):
        assert texts(await turn(host, turn_id="t2")) == [BUDGET]
    assert tenant.used()["turns"] == 1
    assert tenant.used()["refused"] == {"budget": 1}


async def test_a_turn_that_its_quota_refuses_is_demand_once_and_no_turn(
    tenant: Tenant, host_of: Callable[..., Host]
) -> None:
    tenant.grant(tokens_per_minute=60.0)
    host = host_of(lambda: agent(model(said(tokens=5_000))))
    await turn(host, turn_id="t1")
    for _ in range(3):
        with pytest.raises(TenantThrottled):
            await turn(host, turn_id="t2")
    assert tenant.used()["turns"] == 1
    assert tenant.used()["refused"] == {"quota": 1}


async def test_a_turn_that_a_breaker_refuses_is_demand_once_and_no_turn(
    tenant: Tenant, host_of: Callable[..., Host]
) -> None:
    host = host_of(lambda: agent(model(QUOTA, QUOTA, QUOTA, QUOTA)))
    with pytest.raises(ClientError):
        await turn(host, turn_id="t1")  # Let in, and failed.
    for _ in range(3):
        with pytest.raises(BreakerOpen):
            await turn(host, turn_id="t2")
    assert tenant.used()["turns"] == 1
    assert tenant.used()["refused"] == {"breaker": 1}


async def test_a_turn_that_is_stopped_in_its_middle_was_served_and_refused(
    tenant: Tenant, host_of: Callable[..., Host]
) -> None:
    tenant.limit(daily_token_budget=1_000, exact_budget=True)
    tenant.grant(tokens_left=TOKENS)
    host = host_of(lambda: agent(model(calls("look"), said())))
    assert texts(await turn(host)) == [BUDGET]
    assert tenant.used()["turns"] == 1
    assert tenant.used()["refused"] == {"budget": 1}


async def test_a_turn_that_is_cancelled_in_its_first_call_was_let_in(
    tenant: Tenant, host_of: Callable[..., Host]
) -> None:
    using = Hangs()
    await cancelled_in_its_first_call(using, turn(host_of(lambda: agent(using))))
    assert tenant.used()["turns"] == 1


async def test_trials_too_count_a_turn_that_is_sent_again_once(
    tenant: Tenant, host_of: Callable[..., Host]
) -> None:
    tenant.limit(trial=scope(max_model_calls_per_run=1, version=2))
    host = host_of(lambda: agent(model(calls("look"), said(), calls("look"), said())))
    for _ in range(2):
        await turn(host, turn_id="t1")
    assert tenant.used()["would_refuse"] == {"steps": 1}


@pytest.mark.parametrize(
    ("said_by_it", "counted"), [(-5, 0), (0, 0), (10**30, 10**12)], ids=["less", "none", "more"]
)
async def test_nonsense_about_tokens_costs_no_report(
    tenant: Tenant, host_of: Callable[..., Host], said_by_it: int, counted: int
) -> None:
    class Other(BasePlugin):
        """Somebody's."""

    for plugins in (None, [Other(name="other")]):
        using = agent(model([said(tokens=said_by_it), said(tokens=said_by_it)]))
        await turn(host_of(lambda using=using: using, plugins))
        assert tenant.used()["tokens"] == counted
        tenant.client.usage.take()


async def test_a_stream_that_breaks_off_takes_what_it_used_once(
    tenant: Tenant, host_of: Callable[..., Host]
) -> None:
    tenant.grant(tokens_per_minute=60_000.0)
    using = model([said("o", 1_500, partial=True), ConnectionError()])
    host = host_of(lambda: agent(using))
    with pytest.raises(ConnectionError):
        await turn(host, run_config=scripted.STREAMING)
    # 2,000 were there. A call takes what the last one used: 1,500 of it, within a second.
    tenant.client.clock.advance(1)  # type: ignore[attr-defined]
    using._answers = [said()]
    assert texts(await turn(host)) == ["ok"]


async def test_a_call_that_is_streamed_is_counted_once(tenant: Tenant) -> None:
    pieces = [said("o", 11, partial=True), said("k", 15, partial=True), said("ok", TOKENS)]
    using = model(pieces)
    await tenant.run(agent(using), run_config=scripted.STREAMING)
    assert tenant.used() == {
        "turns": 0,  # Those are the Host's to count.
        "model_calls": 1,
        "tokens": TOKENS,
        "refused": {},
        "would_refuse": {},
    }


async def test_an_answer_in_two_parts_is_one_call(tenant: Tenant) -> None:
    using = model([said("a thought", 12), said("ok", TOKENS)])
    await tenant.run(agent(using), run_config=scripted.STREAMING)
    assert tenant.used()["model_calls"] == 1
    assert tenant.used()["tokens"] == TOKENS


async def test_a_model_that_tells_no_tokens_has_its_calls_counted(tenant: Tenant) -> None:
    await tenant.run(agent(model(said(tokens=None))))
    assert tenant.used()["model_calls"] == 1


async def test_host_and_plugin_together_count_once(
    tenant: Tenant, host_of: Callable[..., Host]
) -> None:
    await turn(host_of(lambda: agent(model(calls("look"), said()))))
    assert tenant.used()["model_calls"] == 2
    assert tenant.used()["tokens"] == 2 * TOKENS


async def test_a_host_without_the_plugin_counts_by_itself(
    tenant: Tenant, host_of: Callable[..., Host]
) -> None:
    class Other(BasePlugin):
        """Somebody's, with a word of its own for something else."""

        def forget(self, user_id: str) -> None:
            raise AssertionError

    await turn(host_of(lambda: agent(model(calls("look"), said())), [Other(name="other")]))
    assert tenant.used()["tokens"] == 2 * TOKENS


async def test_a_stream_that_is_cancelled_counts_what_its_pieces_said(
    tenant: Tenant, host_of: Callable[..., Host]
) -> None:
    class Stalls(Model):
        async def generate_content_async(
            self, llm_request: LlmRequest, stream: bool = False
        ) -> AsyncGenerator[LlmResponse, None]:
            yield said("o", 15, partial=True)
            await asyncio.sleep(60)

    host = host_of(lambda: agent(Stalls()))
    await host.create_session("acme", "u", session_id="s1")
    message = scripted.message("hi")
    stream = host.run("acme", "u", "s1", message, run_config=scripted.STREAMING)
    async with aclosing(stream) as events:
        async for _ in events:
            break
    assert tenant.used()["model_calls"] == 1
    assert tenant.used()["tokens"] == 15


# --- counters of a run --------------------------------------------------------------------------


class Hangs(Model):
    """Answers never."""

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        self._requests.append(llm_request)
        await asyncio.sleep(60)
        yield said()


async def cancelled_in_its_first_call(using: Hangs, run: Any) -> None:
    task = asyncio.ensure_future(run)
    async with asyncio.timeout(10):
        while not using.calls:
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait({task})


async def test_after_run_alone_leaks_the_counters_of_a_cancelled_run(tenant: Tenant) -> None:
    using = Hangs()
    await cancelled_in_its_first_call(using, tenant.run(agent(using)))
    assert len(tenant.plugin._runs) == 1
    tenant.plugin.forget(next(iter(tenant.plugin._runs)))
    assert tenant.plugin._runs == {}
    await tenant.run(agent(model(said())))
    assert tenant.plugin._runs == {}


async def test_the_host_has_a_cancelled_run_forgotten(
    tenant: Tenant, host_of: Callable[..., Host]
) -> None:
    """It is cancelled before any event has told the Host its invocation."""
    using = Hangs()
    await cancelled_in_its_first_call(using, turn(host_of(lambda: agent(using))))
    assert tenant.plugin._runs == {}


async def test_a_run_that_fails_is_forgotten(tenant: Tenant, host_of: Callable[..., Host]) -> None:
    with pytest.raises(RuntimeError):
        await turn(host_of(lambda: agent(model(RuntimeError("boom")))))
    assert tenant.plugin._runs == {}


# --- the tenant's quota -------------------------------------------------------------------------


async def test_a_run_without_quota_is_refused_with_the_reason_and_a_hint(
    tenant: Tenant, host_of: Callable[..., Host]
) -> None:
    tenant.grant(tokens_per_minute=60.0)
    using = model(said(tokens=5_000))
    host = host_of(lambda: agent(using))
    await turn(host)
    with pytest.raises(TenantThrottled) as refused:
        await turn(host)
    assert (refused.value.reason, refused.value.tenant) == ("quota", "acme")
    assert refused.value.retry_after_seconds > 0
    assert using.calls == 1
    assert tenant.used()["refused"] == {"quota": 1}


async def test_a_run_that_has_begun_waits_a_moment_for_quota(tenant: Tenant) -> None:
    # A first call empties the bucket, which gains 1,000 a second.
    tenant.grant(tokens_per_minute=60_000.0)
    using = model(calls("look", tokens=2_000), said())
    assert texts(await tenant.run(agent(using))) == ["ok"]
    assert tenant.pauses == [pytest.approx(2.0)]
    # Not for ever: what isn't there soon is refused, with a hint.
    using._answers = [calls("look", tokens=20_000), said()]
    tenant.client.clock.advance(10)  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError) as refused:
        await tenant.run(agent(using))
    assert isinstance(refused.value.__cause__, TenantThrottled)


async def test_a_call_settles_what_it_had_reserved(tenant: Tenant) -> None:
    tenant.grant(tokens_per_minute=60_000.0)
    held = tenant.client.shares._held["acme"]
    assert held.tokens is not None
    before = held.tokens.level
    await tenant.run(agent(model(said(tokens=300))))
    assert held.tokens.level == before - 300


# --- the endpoint -------------------------------------------------------------------------------


async def test_a_busy_pool_is_asked_again_after_a_pause(tenant: Tenant) -> None:
    using = model(BUSY, said())
    assert texts(await tenant.run(agent(using))) == ["ok"]
    assert tenant.pauses == [1.0]
    assert tenant.used()["model_calls"] == 1
    assert tenant.used()["tokens"] == TOKENS
    found = tenant.client.breakers.snapshot()["scripted-2"]
    assert (found["state"], found["shared_pool_429"]) == ("closed", 1)


async def test_a_pool_that_stays_busy_is_left_alone_by_everybody(
    tenant: Tenant, host_of: Callable[..., Host]
) -> None:
    using = model(BUSY)
    host = host_of(lambda: agent(using))
    with pytest.raises(ClientError):
        await turn(host)
    assert using.calls == 3
    assert tenant.pauses == [1.0, 2.0]
    with pytest.raises(BreakerOpen) as refused:
        await turn(host)
    assert refused.value.retry_after_seconds == 4.0
    assert using.calls == 3
    assert tenant.used()["refused"] == {"breaker": 1}


async def test_a_quota_that_is_used_up_is_told_apart(tenant: Tenant) -> None:
    await tenant.run(agent(model(QUOTA, said())))
    found = tenant.client.breakers.snapshot()["scripted-2"]
    assert (found["own_quota_429"], found["shared_pool_429"]) == (1, 0)


async def test_an_answer_that_breaks_off_is_not_said_twice(tenant: Tenant) -> None:
    using = model([said("o", partial=True), BUSY], said())
    with pytest.raises(ClientError):
        await tenant.run(agent(using), run_config=scripted.STREAMING)
    assert using.calls == 1


async def test_a_bug_of_the_agent_is_not_its_endpoints(tenant: Tenant) -> None:
    with pytest.raises(KeyError):
        await tenant.run(agent(model(KeyError("x"))))
    assert tenant.client.breakers.snapshot()["scripted-2"]["failures"] == 0


async def test_a_probe_that_is_cancelled_makes_room(
    tenant: Tenant, host_of: Callable[..., Host], clock: DrivenClock
) -> None:
    with pytest.raises(ClientError):
        await tenant.run(agent(model(BUSY)))
    clock.advance(60)
    using = Hangs(model="scripted-2")
    await cancelled_in_its_first_call(using, turn(host_of(lambda: agent(using))))
    assert texts(await tenant.run(agent(model(said())))) == ["ok"]


async def test_a_call_that_its_endpoint_refuses_takes_no_quota(tenant: Tenant) -> None:
    tenant.grant(tokens_per_minute=60_000.0)
    with pytest.raises(ClientError):
        await tenant.run(agent(model(BUSY)))
    held = tenant.client.shares._held["acme"]
    assert held.tokens is not None
    before = held.tokens.level
    with pytest.raises(RuntimeError, match="left alone"):
        await tenant.run(agent(model(said())))
    assert held.tokens.level == before


async def test_accounts_are_told_apart_by_the_name_of_their_endpoint(tenant: Tenant) -> None:
    tenant.plugin = tenant.make_plugin(endpoint_of=lambda request: f"{request.model} of acme")
    await tenant.run(agent(model(said())))
    assert list(tenant.client.breakers.snapshot()) == ["scripted-2 of acme"]


# --- tools --------------------------------------------------------------------------------------


async def test_a_tool_that_is_not_enabled_is_not_called(tenant: Tenant) -> None:
    tenant.limit(allowed_tools=["look"])
    events = await tenant.run(agent(model(calls("buy"), said())))
    (answer,) = [r for event in events for r in event.get_function_responses()]
    assert answer.response == {
        "status": "unavailable",
        "instruction": "This action is not enabled for this organisation. Do not retry.",
    }
    assert BOUGHT == []


async def test_a_tool_that_is_enabled_is_called(tenant: Tenant) -> None:
    tenant.limit(allowed_tools=["look", "buy"])
    await tenant.run(agent(model(calls("buy"), said())))
    assert BOUGHT == [1]


async def test_a_list_on_trial_is_counted_and_not_enforced(tenant: Tenant) -> None:
    tenant.limit(trial=scope(allowed_tools=["look"], version=2))
    await tenant.run(agent(model(calls("buy"), calls("buy"), said())))
    assert BOUGHT == [1, 1]
    assert tenant.used()["would_refuse"] == {"tools": 1}


@pytest.mark.parametrize("enabled", [True, False])
async def test_a_tool_that_the_provider_carries_out_is_held_to_the_list_too(
    tenant: Tenant, enabled: bool
) -> None:
    tenant.limit(allowed_tools=["google_search"] if enabled else [])
    using = model(said())
    using.model = "gemini-2.5-flash"
    await tenant.run(agent(using, tools=[google_search]))
    tools = json.loads(using._requests[0].config.model_dump_json(exclude_none=True)).get("tools")
    assert bool(tools) == enabled


# --- without a process --------------------------------------------------------------------------


async def test_it_needs_neither_shares_nor_breakers(tenant: Tenant) -> None:
    policy = tenant.client.policy
    assert policy is not None
    acme = policy.entries["acme"]
    tenant.plugin = TenantPolicyPlugin(lambda: acme, tenant.client.usage)
    assert texts(await tenant.run(agent(model(said())))) == ["ok"]
    assert tenant.used()["tokens"] == TOKENS


async def test_breakers_and_shares_may_be_given(tenant: Tenant, clock: DrivenClock) -> None:
    breakers = Breakers(clock)
    shares = Shares(tenant.client.usage, clock)
    policy = tenant.client.policy
    assert policy is not None
    acme = policy.entries["acme"]
    tenant.plugin = TenantPolicyPlugin(lambda: acme, tenant.client.usage, shares, breakers)
    await tenant.run(agent(model(said())))
    assert list(breakers.snapshot()) == ["scripted-2"]
