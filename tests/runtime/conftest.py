"""A control plane in memory, clocks that tests drive, and a client of both."""

from __future__ import annotations

import pytest

from agent_runtime import PolicyClient
from tests.runtime.wire import ControlPlane, DrivenClock, make_client


@pytest.fixture
def clock() -> DrivenClock:
    return DrivenClock()


@pytest.fixture
def plane() -> ControlPlane:
    return ControlPlane()


@pytest.fixture
def client(plane: ControlPlane, clock: DrivenClock) -> PolicyClient:
    """One that has joined, polled and reported."""
    client = make_client(plane, clock)
    client.tick()
    return client
