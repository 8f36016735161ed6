"""A store that a move has closed, by its own guard and trigger: every refusal is retryable."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, aclosing
from pathlib import Path
from typing import Any

import pytest
from google.adk.errors.already_exists_error import AlreadyExistsError
from google.adk.sessions.sqlite_session_service import SqliteSessionService

from agent_runtime import Draining, Host, PolicyClient
from agent_runtime.adk import sql_store
from bench import scripted
from migrations_app.ports import open_store
from migrations_app.ports.base import SessionStore
from tests.runtime.wire import ControlPlane, DrivenClock, entry, make_client

HI = scripted.message("hi")


@pytest.fixture(params=["sqlite", "postgresql", "adk-sqlite"])
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(
    layout: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """The address of one scratch store, which the control plane finds in STORE."""
    file = f"sqlite:///{tmp_path}/s.sqlite3"
    address = request.getfixturevalue("store_url") if layout == "postgresql" else file
    monkeypatch.setenv("STORE", address)
    monkeypatch.setenv("STORE_KIND", "adk-sqlite" if layout == "adk-sqlite" else "adk-sql")
    return str(address)


def opened() -> AbstractContextManager[SessionStore]:
    """Open the store as move 1 does."""
    kind = os.environ["STORE_KIND"]
    return open_store(kind, "env:STORE", app_name="support.acme", move=1, claim=1)


@pytest.fixture
def plane() -> ControlPlane:
    plane = ControlPlane()
    plane.publish(entry("acme"), entry("bolt"))
    return plane


@pytest.fixture
def client(plane: ControlPlane) -> PolicyClient:
    client = make_client(plane, DrivenClock())
    client.tick()
    return client


@pytest.fixture
async def host(url: str, layout: str, client: PolicyClient) -> AsyncIterator[Host]:
    """One whose tenants acme and bolt each have a session s1 of user u1; acme's has a turn."""
    host = Host(
        client,
        {
            "pg-eu": (lambda: SqliteSessionService(url))
            if layout == "adk-sqlite"
            else sql_store(url)
        },
        lambda entry, service: scripted.build_runner(entry.app_name, service),
    )
    for tenant in ("acme", "bolt"):
        await host.create_session(tenant, "u1", session_id="s1")
    with opened() as port:
        port.provision()
        port.adopt(None, mover=False, agents=True)
    await turn(host)
    yield host
    await host.close()


async def turn(host: Host, tenant: str = "acme") -> list[Any]:
    return [event async for event in host.run(tenant, "u1", "s1", HI)]


def let_agents_write(write: bool) -> None:
    with opened() as store:
        store.take(mover=False, agents=write)


def events() -> int:
    with opened() as store:
        return store.survey().events


async def test_a_turn_is_draining_and_writes_nothing(host: Host, client: PolicyClient) -> None:
    let_agents_write(False)
    before = events()
    with pytest.raises(Draining) as refused:
        await turn(host)
    assert refused.value.retry_after_seconds == 30
    assert events() == before
    assert client.fence.word().in_flight == {}


async def test_a_turn_under_which_the_store_closes_is_draining(
    host: Host, client: PolicyClient
) -> None:
    async with aclosing(host.run("acme", "u1", "s1", HI)) as stream:
        await anext(stream)
        let_agents_write(False)
        with pytest.raises(Draining):
            await anext(stream)
    assert client.fence.word().in_flight == {}


async def test_a_new_session_is_draining_and_no_duplicate(host: Host, url: str) -> None:
    let_agents_write(False)
    with pytest.raises(Draining) as refused:
        await host.create_session("acme", "u1", session_id="s9")
    # What google-adk makes of SQLite's refusal; a client that believed it would go on with s9.
    if url.startswith("sqlite"):
        assert isinstance(refused.value.__cause__, AlreadyExistsError)


async def test_deleting_a_session_is_draining(host: Host) -> None:
    let_agents_write(False)
    with pytest.raises(Draining):
        await host.delete_session("acme", "u1", "s1")


async def test_other_tenants_go_on(host: Host) -> None:
    let_agents_write(False)
    assert len(await turn(host, "bolt")) == 3


async def test_the_tenant_goes_on_when_its_store_opens(host: Host) -> None:
    let_agents_write(False)
    with pytest.raises(Draining):
        await turn(host)
    let_agents_write(True)
    assert len(await turn(host)) == 3


async def test_a_turn_that_its_store_refused_counts_as_refused_demand(
    host: Host, plane: ControlPlane, client: PolicyClient
) -> None:
    client.tick()
    let_agents_write(False)
    with pytest.raises(Draining):
        await turn(host)
    client.tick()
    assert plane.usage[-1]["refused"] == {"draining": 1}
    assert plane.usage[-1]["turns"] == 0
