"""Runners and session services without google-adk: they do what a test's message says."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

from agent_runtime import Entry


class Sessions:
    """Knows every session, and keeps nothing."""

    async def get_session(self, *, session_id: str, **where: Any) -> Any:
        return Said("session", session_id)

    async def create_session(self, *, session_id: str | None = None, **where: Any) -> Any:
        return Said("session", session_id or "s1")

    async def delete_session(self, **where: Any) -> None:
        await asyncio.sleep(0)


@dataclass
class Said:
    """An event, or a session."""

    text: str
    id: str = ""
    invocation_id: str = "i1"
    partial: bool = False
    usage_metadata: Any = None
    # The thread that said it.
    thread: str = field(default_factory=lambda: threading.current_thread().name)


@dataclass
class PluginManager:
    plugins: list[Any] = field(default_factory=list)


class Runner:
    """Says as many events as the message asks for: `3`, `boom`, `hang`, `block 0.2`, `3 hang`."""

    def __init__(self, entry: Entry, service: Any, *plugins: Any) -> None:
        self.app_name = entry.app_name
        self.session_service = service
        self.plugin_manager = PluginManager(list(plugins))
        self.entry = entry
        self.running = 0
        self.closed = 0
        # Called with each event's number before it is said.
        self.before: Callable[[int], None] = lambda number: None

    async def run_async(
        self,
        *,
        user_id: str,
        session_id: str,
        new_message: Any = None,
        run_config: Any = None,
        abort_signal: asyncio.Event | None = None,
    ) -> AsyncGenerator[Any, None]:
        assert not self.closed
        self.running += 1
        try:
            for word in str(new_message).split():
                if word.isdigit():
                    for number in range(int(word)):
                        self.before(number)
                        yield Said(f"{self.app_name} {number}")
                elif word == "boom":
                    raise RuntimeError("told to fail")
                elif word == "block":
                    time.sleep(0.2)
                elif abort_signal is not None:
                    await abort_signal.wait()
                    yield Said("aborted")
                else:
                    await asyncio.sleep(60)
        finally:
            self.running -= 1

    async def close(self) -> None:
        assert not self.running
        self.closed += 1
        await asyncio.sleep(0)


class Factory:
    """Builds Runners, and remembers them."""

    def __init__(self, *plugins: Any) -> None:
        self.plugins = plugins
        self.built: list[Runner] = []
        self.threads: list[str] = []

    def __call__(self, entry: Entry, service: Any) -> Runner:
        runner = Runner(entry, service, *self.plugins)
        self.built.append(runner)
        self.threads.append(threading.current_thread().name)
        return runner

    def of(self, tenant: str) -> Runner:
        """The last one of a tenant."""
        return next(one for one in reversed(self.built) if one.entry.tenant == tenant)


async def until(said: Callable[[], bool]) -> None:
    """Wait until something is so; a test that waits in vain fails."""
    async with asyncio.timeout(10):
        while not said():
            await asyncio.sleep(0.002)
