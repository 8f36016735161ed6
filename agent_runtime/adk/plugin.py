"""Holds each run to its tenant's limits, from inside google-adk's Runner.

Admission bounds how many runs a tenant has; this plugin bounds what each may do. Texts, and the
order of what is looked at, are those of article 004.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from google.adk.agents.callback_context import CallbackContext
from google.adk.agents.invocation_context import InvocationContext
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.tools.base_tool import BaseTool
from google.adk.tools.tool_context import ToolContext
from google.genai import types

from agent_runtime.admission import Shares
from agent_runtime.breaker import Breakers, Fault, Pass, judge
from agent_runtime.client import PolicyClient
from agent_runtime.errors import RetryLater, TenantThrottled
from agent_runtime.host import RUNNING, Running
from agent_runtime.policy import ACCEPTS_MOVED, Entry
from agent_runtime.usage import Usage, tokens_of

log = logging.getLogger(__name__)

REJECTED = "Request rejected."
BUDGET_REACHED = "Your organisation has reached today's usage limit."
STEPS_REACHED = "Stopping: step limit reached."
TOOL_UNAVAILABLE = {
    "status": "unavailable",
    "instruction": "This action is not enabled for this organisation. Do not retry.",
}

# What a run that has begun waits, all in all, for one model call. The first call of a run waits
# for nothing: nothing is lost yet. But a run that has called its model and its tools would be sent
# again from its start, and use all of that a second time: at the limit every run would then end
# in its middle, and none would be answered.
PATIENCE_SECONDS = 5.0
SHORTEST_PAUSE_SECONDS = 0.05
# How often a call that was answered 429 is made again.
RETRIES = 2
# Runs whose counters are kept. The Host has each forgotten; a Runner that is used without one
# leaves those behind that were cancelled.
MAX_RUNS = 10_000


@dataclass(slots=True)
class _Call:
    """One model call, from its beginning to the end of the run."""

    # google-adk hands this object to every callback of one call, and to no other call's. Agents
    # that run in parallel share an invocation; calls of one agent share its name and branch.
    actions: object
    # None: no breaker, or a call that began out of our sight.
    allowed: Pass | None = None
    # Taken from the tenant's bucket, as long as that isn't settled.
    reserved: int = 0
    # What the model says it used up to now. Pieces of an answer say so more than once.
    tokens: int = 0
    # Of `tokens`, what is in the usage; None: the call isn't.
    counted: int | None = None
    # A piece of an answer is with the user: made again the call would say it twice.
    in_pieces: bool = False


@dataclass(slots=True)
class _Run:
    """One turn, with the runs of agents that it uses as tools."""

    turn: Running
    calls: int = 0
    invocations: set[str] = field(default_factory=set)
    # By the id of their `actions`.
    open: dict[int, _Call] = field(default_factory=dict)
    # What was counted or logged of this run already.
    noted: set[str] = field(default_factory=set)


class TenantPolicyPlugin(BasePlugin):
    """The limits of one tenant's runs. Register it first: a plugin before it could hide answers.

    `entry_of` returns the tenant's entry as it is now, or None while there is none: an edit of a
    limit holds from the next callback on. `shares` and `breakers` are the process's; without
    shares only the control plane's word says that a budget is used up, without breakers no
    endpoint is left alone. `endpoint_of` names the model endpoint of a request, and with it the
    account: the model's name unless told.

    Raises in a run, for the Host to hand on: TenantThrottled (quota) and BreakerOpen. google-adk
    wraps them in a RuntimeError; they are its cause.
    """

    # The Host leaves the usage to it, and has each run forgotten.
    counts_runs: ClassVar[bool] = True

    def __init__(
        self,
        entry_of: Callable[[], Entry | None],
        usage: Usage,
        shares: Shares | None = None,
        breakers: Breakers | None = None,
        *,
        endpoint_of: Callable[[LlmRequest], str] = lambda request: request.model or "model",
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Make a plugin that has seen no run."""
        super().__init__(name="tenant_policy")
        self._entry_of = entry_of
        self._usage = usage
        self._shares = shares or Shares(usage)
        self._breakers = breakers
        self._endpoint_of = endpoint_of
        self._pause = pause
        # By invocation; a turn's invocations share one.
        self._runs: OrderedDict[str, _Run] = OrderedDict()
        # What a turn that runs on goes by when the process has lost its lease, and its policy.
        self._known: Entry | None = None

    @classmethod
    def of(cls, client: PolicyClient, tenant: str, **options: Any) -> TenantPolicyPlugin:
        """Return the plugin of one tenant in the process of `client`."""

        def entry_of() -> Entry | None:
            policy = client.policy
            return None if policy is None else policy.entries.get(tenant)

        return cls(entry_of, client.usage, client.shares, client.breakers, **options)

    def forget(self, invocation_id: str) -> None:
        """Forget an invocation. The Host calls this when its turn has ended, in whatever way.

        `after_run_callback` does too, and google-adk calls that for every run but those that are
        cancelled or fail.
        """
        run = self._runs.pop(invocation_id, None)
        if run is None:
            return
        run.invocations.discard(invocation_id)
        if run.invocations:
            return
        for call in run.open.values():
            # Cancelled, or answered by another plugin: what it used nobody knows, beyond what
            # pieces of its answer have said. All that it had reserved may be gone.
            if call.counted is None and (call.in_pieces or call.tokens):
                self._count(call)
            if call.allowed is not None and self._breakers is not None:
                self._breakers.abandoned(call.allowed)

    async def before_run_callback(
        self, *, invocation_context: InvocationContext
    ) -> types.Content | None:
        """Refuse a run of another app, and one whose tenant's budget is used up."""
        entry = self._entry()
        app_name = invocation_context.session.app_name
        if entry is None or app_name != entry.app_name:
            # Somebody wired a Runner wrongly: closed, whatever the limits say.
            tenant = "an unknown tenant" if entry is None else entry.tenant
            log.error("a run of app %s was rejected by the plugin of %s", app_name, tenant)
            return _content(REJECTED)
        run = self._run(invocation_context.invocation_id)
        if len(run.invocations) > 1:
            return None  # An agent that is used as a tool: its turn has begun.
        return _content(BUDGET_REACHED) if self._is_spent(entry, run) else None

    async def before_model_callback(
        self, *, callback_context: CallbackContext, llm_request: LlmRequest
    ) -> LlmResponse | None:
        """Refuse a call over the cap of the run, over the budget, or over the tenant's quota."""
        entry = self._entry()
        if entry is None:
            return LlmResponse(content=_content(REJECTED))
        run = self._run(callback_context.invocation_id)
        run.calls += 1
        cap = entry.scope.max_model_calls_per_run
        if cap is not None and run.calls > cap:
            self._note(run, "steps", entry, f"a run has made its {cap} model calls")
            return LlmResponse(content=_content(STEPS_REACHED))
        tried = None if entry.trial is None else entry.trial.max_model_calls_per_run
        if tried is not None and run.calls > tried:
            self._note_trial(run, "steps", entry)
        # Otherwise looked at before the run only: one run can overshoot by its own size, which
        # the cap bounds.
        if entry.scope.exact_budget and self._is_spent(entry, run):
            return LlmResponse(content=_content(BUDGET_REACHED))
        self._hide_tools(entry, run, llm_request)
        if callback_context.get_invocation_context().live_request_queue is None:
            # Of a live connection each answer is one, and none begins with a request.
            call = _Call(callback_context.actions)
            run.open[id(call.actions)] = call
            await self._begin(call, run, entry, self._endpoint_of(llm_request))
        return None

    async def after_model_callback(
        self, *, callback_context: CallbackContext, llm_response: LlmResponse
    ) -> LlmResponse | None:
        """Count what a call used, once, however many pieces its answer comes in."""
        actions = callback_context.actions
        run = self._run(callback_context.invocation_id)
        call = run.open.setdefault(id(actions), _Call(actions))
        used = llm_response.usage_metadata
        if used is not None:
            # Each piece says what was used up to it.
            call.tokens = max(call.tokens, tokens_of(used))
        if call.allowed is not None and self._breakers is not None:
            self._breakers.answered(call.allowed)
        if llm_response.partial:
            call.in_pieces = True
        elif used is not None or call.counted is None:
            self._count(call)
        return None

    async def on_model_error_callback(
        self, *, callback_context: CallbackContext, llm_request: LlmRequest, error: Exception
    ) -> LlmResponse | None:
        """Tell the endpoint's breaker; make a call again that was answered 429."""
        run = self._run(callback_context.invocation_id)
        call = run.open.get(id(callback_context.actions))
        entry = self._entry()
        if call is None or entry is None:
            return None
        model: Any = getattr(callback_context.get_invocation_context().agent, "canonical_model", 0)
        again = self._failed(call, entry, error) and bool(model) and not call.in_pieces
        for _ in range(RETRIES if again else 0):
            try:
                await self._begin(call, run, entry, self._endpoint_of(llm_request), retried=True)
            except RetryLater:
                return None  # What is raised is the model's own word.
            try:
                found: LlmResponse | None = None
                async for response in model.generate_content_async(llm_request, stream=False):
                    found = response
                # It goes the way of any other answer, `after_model_callback` included.
                return found
            except Exception as failed:
                if not self._failed(call, entry, failed):
                    return None
        return None

    async def before_tool_callback(
        self, *, tool: BaseTool, tool_args: dict[str, Any], tool_context: ToolContext
    ) -> dict[str, Any] | None:
        """Refuse a tool that the tenant has not been given."""
        entry = self._entry()
        if entry is not None and _allows(entry.scope.allowed_tools, tool.name):
            if entry.trial is not None and not _allows(entry.trial.allowed_tools, tool.name):
                self._note_trial(self._run(tool_context.invocation_id), "tools", entry)
            return None
        tenant = "an unknown tenant" if entry is None else entry.tenant
        log.warning("%s: the tool %s is not enabled", tenant, tool.name)
        return dict(TOOL_UNAVAILABLE)

    async def after_run_callback(self, *, invocation_context: InvocationContext) -> None:
        """Forget a run that has ended by itself."""
        self.forget(invocation_context.invocation_id)

    def _entry(self) -> Entry | None:
        entry = self._entry_of()
        # A tombstone has no limits: a turn that is still inside keeps those that it had.
        if entry is not None and entry.accepts != ACCEPTS_MOVED:
            self._known = entry
        return self._known

    def _run(self, invocation_id: str) -> _Run:
        run = self._runs.get(invocation_id)
        if run is not None:
            return run
        # An agent that is used as a tool has an invocation of its own: with a count of its own
        # it could make as many calls for each call of the agent that uses it.
        turn = RUNNING.get(None) or Running()
        run = next((self._runs[one] for one in turn.invocations if one in self._runs), None)
        run = run or _Run(turn)
        run.invocations.add(invocation_id)
        self._runs[invocation_id] = run
        # A turn that is cancelled in its first model call has shown the Host no event, so no id.
        turn.invocations.add(invocation_id)
        while len(self._runs) > MAX_RUNS:
            self.forget(next(iter(self._runs)))
        return run

    def _is_spent(self, entry: Entry, run: _Run) -> bool:
        if not self._shares.budget_wait(entry):
            return False
        self._refuse(run, "budget", entry)
        self._note(run, "budget", entry, "the daily budget is used up")
        return True

    def _refuse(self, run: _Run, reason: str, entry: Entry) -> None:
        """Count a run as refused, once: its agents may be several, and each be refused."""
        if not run.turn.refused:
            run.turn.refused = True
            self._usage.refused(entry.tenant, reason, run.turn.turn_id)

    def _note(self, run: _Run, what: str, entry: Entry, why: str) -> None:
        if what not in run.noted:
            run.noted.add(what)
            log.warning("%s: %s", entry.tenant, why)

    def _note_trial(self, run: _Run, what: str, entry: Entry) -> None:
        if f"trial {what}" not in run.noted:
            run.noted.add(f"trial {what}")
            self._usage.would_refuse(entry.tenant, what, run.turn.turn_id)

    def _hide_tools(self, entry: Entry, run: _Run, request: LlmRequest) -> None:
        """Take tools away that the model's provider carries out, where they are not enabled.

        A search or a code execution over there asks nobody here before it runs.
        """
        allowed = entry.scope.allowed_tools
        if allowed is None or not request.config or not request.config.tools:
            return
        kept = []
        for tool in request.config.tools:
            if isinstance(tool, types.Tool):
                given = {name for name in tool.model_fields_set if getattr(tool, name) is not None}
                hidden = given - {"function_declarations"} - allowed
                if hidden:
                    self._note(run, "hidden", entry, f"not enabled: {', '.join(sorted(hidden))}")
                    if given == hidden:
                        continue
                    tool = tool.model_copy(update=dict.fromkeys(hidden))
            kept.append(tool)
        request.config.tools = kept

    async def _begin(
        self, call: _Call, run: _Run, entry: Entry, endpoint: str, *, retried: bool = False
    ) -> None:
        """Take from the bucket and pass the breaker. Raises TenantThrottled, BreakerOpen."""
        patience = 0.0 if run.calls == 1 and not retried else PATIENCE_SECONDS
        while True:
            try:
                self._take(call, entry, endpoint)
                return
            except RetryLater as refused:
                wait = max(SHORTEST_PAUSE_SECONDS, refused.retry_after_seconds)
                patience -= wait
                if patience < 0:
                    if not retried:
                        quota = isinstance(refused, TenantThrottled)
                        self._refuse(run, "quota" if quota else "breaker", entry)
                    raise
            await self._pause(wait)

    def _take(self, call: _Call, entry: Entry, endpoint: str) -> None:
        reserved = self._shares.reserve(entry)
        try:
            call.allowed = None if self._breakers is None else self._breakers.enter(endpoint)
        except RetryLater:
            self._shares.settle(entry.tenant, reserved, 0)
            raise
        call.reserved = reserved

    def _failed(self, call: _Call, entry: Entry, error: Exception) -> bool:
        """Note how a call failed. Return whether it may be made again."""
        verdict = judge(error)
        if call.allowed is not None and self._breakers is not None:
            if verdict is None:
                self._breakers.answered(call.allowed)
            else:
                self._breakers.failed(call.allowed, verdict)
        refused = verdict is not None and verdict.fault != Fault.FAILURE
        if refused:
            # It used nothing. Of one that broke off nobody knows, beyond what its pieces said.
            self._shares.settle(entry.tenant, call.reserved, 0)
            call.reserved = 0
        return refused

    def _count(self, call: _Call) -> None:
        assert self._known is not None  # Whoever has begun a call has looked at it.
        tenant = self._known.tenant
        if call.counted is None:
            self._usage.model_call(tenant, call.tokens)
            # Nothing said: it stays with what was reserved.
            self._shares.settle(tenant, call.reserved, call.tokens or None)
        elif more := call.tokens - call.counted:
            # Its answer came in more than one part, each with what was used up to there.
            self._usage.more_tokens(tenant, more)
            self._shares.settle(tenant, 0, more)
        call.counted, call.reserved = call.tokens, 0


def _content(text: str) -> types.Content:
    return types.Content(role="model", parts=[types.Part(text=text)])


def _allows(tools: frozenset[str] | None, name: str) -> bool:
    return tools is None or name in tools
