"""Services that hang or end the process: whoever asked is answered in time, by name."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from google.adk.artifacts import InMemoryArtifactService
from google.adk.memory import InMemoryMemoryService

from migrations_app import ports
from migrations_app.ports import artifacts
from migrations_app.ports import memory as memory_port
from migrations_app.ports.artifacts import Sessions
from migrations_app.ports.artifacts import service as artifact_service
from migrations_app.ports.base import StoreRefused

# Set when a test is over, so that whatever hung ends.
OVER = threading.Event()
# Threads that hang now.
HANGING: set[int] = set()


async def _hang(**_: Any) -> Any:
    """Wait in a thread, as google-adk's services of files and of Cloud Storage do."""
    return await asyncio.to_thread(_wait)


def _wait() -> None:
    HANGING.add(me := threading.get_ident())
    OVER.wait(10)
    HANGING.remove(me)


class Files(InMemoryArtifactService):
    list_artifact_keys = staticmethod(_hang)  # type: ignore[assignment]


class Words(InMemoryMemoryService):
    search_memory = staticmethod(_hang)  # type: ignore[assignment]


def files() -> Files:
    return Files()


def words() -> Words:
    return Words()


def script() -> None:
    sys.exit("usage: script SOURCE TARGET")


@pytest.fixture(autouse=True)
def _let_go(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(artifact_service, "CALL_SECONDS", 0.05)
    monkeypatch.setattr(memory_port, "CALL_SECONDS", 0.05)
    OVER.clear()
    yield
    OVER.set()


class Nobody(Sessions):
    def __init__(self) -> None:
        pass

    def sessions(self, user_id: str) -> Iterator[str]:
        yield from ()


def _list_files(address: str) -> None:
    with artifacts.open_artifacts(address, app_name="support.acme", known=Nobody()) as opened:
        opened.listing("u")


def _look_up(address: str) -> None:
    with memory_port.open_memory(address, app_name="support.acme") as opened:
        opened._search("u", "words")


def _count(address: str) -> None:
    with ports.open_store("adk-service", address, app_name="support.acme") as opened:
        opened.counts()


@pytest.mark.parametrize(
    ("ask", "factory"), [(_list_files, "files"), (_look_up, "words")], ids=["files", "memory"]
)
def test_a_call_that_hangs_in_a_thread_is_given_up_and_named(
    ask: Any, factory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANGS", f"python:{__name__}:{factory}")
    with pytest.raises(StoreRefused, match=r"HANGS failed \(no answer in time\)"):
        ask("env:HANGS")
    # Closing the handle has not waited for it either.
    assert HANGING


@pytest.mark.parametrize("ask", [_list_files, _look_up, _count])
def test_a_factory_that_ends_the_process_is_refused(
    ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRIPT", f"python:{__name__}:script")
    with pytest.raises(StoreRefused, match="SCRIPT leads to could not be opened"):
        ask("env:SCRIPT")
