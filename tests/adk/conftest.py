"""Empty stores of every layout; a client of the wire's control plane, and Hosts over it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from agent_runtime import Host, PolicyClient
from agent_runtime.adk import sql_store
from bench import scripted
from migrations_app.domain.values import Layout
from tests.adk import layouts
from tests.adk.layouts import Place
from tests.runtime.wire import ControlPlane, DrivenClock, make_client


@pytest.fixture
def new_place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Layout, str], Place]:
    """Make an empty store, known to this process by the variable STORE_<name>."""

    def create(layout: Layout, name: str) -> Place:
        def database() -> str:
            return str(request.getfixturevalue("new_database")())

        return layouts.place(layout, name, tmp_path, database, monkeypatch)

    return create


@pytest.fixture
def plane() -> ControlPlane:
    return ControlPlane()


@pytest.fixture
def clock() -> DrivenClock:
    return DrivenClock()


@pytest.fixture
def client(plane: ControlPlane, clock: DrivenClock) -> PolicyClient:
    """One that has joined, polled and reported."""
    client = make_client(plane, clock)
    client.tick()
    return client


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store.sqlite3"


@pytest.fixture
async def make_host(client: PolicyClient, store: Path) -> AsyncIterator[Callable[..., Host]]:
    """Make Hosts over the store, of scripted Runners unless told; they are closed in the end."""
    hosts: list[Host] = []

    def make(runners: Any = None, client: PolicyClient = client) -> Host:
        stores = {"pg-eu": sql_store(f"sqlite:///{store}")}
        build = runners or (lambda e, service: scripted.build_runner(e.app_name, service))
        hosts.append(Host(client, stores, build))
        return hosts[-1]

    yield make
    for host in hosts:
        await host.close()
