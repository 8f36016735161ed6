"""A real google-adk Runner whose model answers from a script: no network, no randomness.

The demo's fleet, the benches and the tests talk to it. One turn is what an agent's turn is:
the user's message, a tool call, the tool's answer with state in all three scopes, a text.

What the user writes decides what the model does:

| message | the turn |
| --- | --- |
| `wait 2.5` | calls the tool `wait`, which takes that many seconds |
| `boom` | the model raises RuntimeError |
| anything else | calls the tool `remember`, which writes session, user: and app: state |
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.apps import App
from google.adk.events.event import Event
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import Runner
from google.adk.sessions.base_session_service import BaseSessionService
from google.adk.tools import ToolContext
from google.genai import types

from bench.journal import LAST_WORD

# What every model call claims to have used, so that usage can be counted to the token.
PROMPT_TOKENS, ANSWER_TOKENS = 11, 7
TOKENS_PER_CALL = PROMPT_TOKENS + ANSWER_TOKENS
# A turn of the script calls the model twice: before the tool and after it.
CALLS_PER_TURN = 2

# Ask for partial events, which are yielded and never stored.
STREAMING = RunConfig(streaming_mode=StreamingMode.SSE)


class ScriptedLlm(BaseLlm):
    """A model that follows the table above."""

    model: str = "scripted-1"
    # Seconds that each call takes, as a real model's would.
    delay: float = 0.0

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        """Yield the script's answer to the last thing said; in pieces first if `stream`."""
        await asyncio.sleep(self.delay)
        part = _answer(llm_request.contents[-1])
        if stream and part.text:
            half = len(part.text) // 2
            for piece in (part.text[:half], part.text[half:]):
                yield LlmResponse(content=_content("model", types.Part(text=piece)), partial=True)
        yield LlmResponse(
            content=_content("model", part),
            partial=False,
            model_version=self.model,
            usage_metadata=types.GenerateContentResponseUsageMetadata(
                prompt_token_count=PROMPT_TOKENS,
                candidates_token_count=ANSWER_TOKENS,
                total_token_count=TOKENS_PER_CALL,
            ),
        )


async def remember(value: str, tool_context: ToolContext) -> dict[str, Any]:
    """Remember a value, and count what was said in the session, by the user, and in the app."""
    state = tool_context.state
    state["last"] = value
    # Nobody else ever says this one: whose word stands in the end tells whose was lost.
    state[LAST_WORD] = tool_context.invocation_id
    for key in ("count", "user:count", "app:count"):
        state[key] = (state.get(key) or 0) + 1
    state["temp:scratch"] = "never stored"
    return {"remembered": value, "count": state["count"]}


async def wait(seconds: float) -> dict[str, Any]:
    """Take some seconds, as a tool that calls another service would."""
    await asyncio.sleep(seconds)
    return {"waited": seconds}


def build_runner(
    app_name: str, session_service: BaseSessionService, *, delay: float = 0.0
) -> Runner:
    """Build the scripted agent's Runner for one tenant's app, such as "support.acme".

    `delay` is what each model call takes, in seconds.
    """
    # ADK allows no dot in an App's own name; the Runner's app_name is the one that is stored.
    name = app_name.partition(".")[0]
    agent = LlmAgent(
        name=f"{name}_agent",
        model=ScriptedLlm(delay=delay),
        instruction="Help.",
        tools=[remember, wait],
    )
    return Runner(
        app=App(name=name, root_agent=agent), app_name=app_name, session_service=session_service
    )


def last_word(event: Event) -> str:
    """Return what an event made its user's last word; "" if it did not."""
    return str(event.actions.state_delta.get(LAST_WORD, ""))


def message(text: str) -> types.Content:
    """Return a user's message as the Runner takes it."""
    return _content("user", types.Part(text=text))


def _content(role: str, part: types.Part) -> types.Content:
    return types.Content(role=role, parts=[part])


def _answer(last: types.Content) -> types.Part:
    part = (last.parts or [types.Part(text="")])[-1]
    if part.function_response is not None:
        return types.Part(text=f"Done: {part.function_response.response}")
    text = part.text or ""
    if text == "boom":
        raise RuntimeError("the scripted model was told to fail")
    word, _, number = text.partition(" ")
    if word == "wait":
        return _call("wait", {"seconds": float(number)})
    return _call("remember", {"value": text})


def _call(tool: str, args: dict[str, Any]) -> types.Part:
    return types.Part(function_call=types.FunctionCall(name=tool, args=args))
