"""Limits over several instances and the real control plane: the sum is what the tenant may have."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta

import pytest

from agent_runtime import PolicyClient, TenantThrottled
from capacity.services import divide
from durable.clock import database_now
from tenants import services
from tenants.domain.limits import Limits
from tenants.models import RuntimeInstance, UsageLine
from tests import make
from tests.runtime.test_with_server import Network, make_agent, runtime_secret
from tests.runtime.wire import DrivenClock

LIMIT = 7


@pytest.fixture
def cast(cast: make.Cast) -> make.Cast:
    limit(cast, max_concurrent_runs=LIMIT)
    return cast


Join = Callable[[str], PolicyClient]


@pytest.fixture
def join(cast: make.Cast, clock: DrivenClock) -> Join:
    secret = runtime_secret(cast.cell)

    def join(name: str) -> PolicyClient:
        agent = make_agent(cast, secret, name=name, transport=Network(), clock=clock)
        tick(agent)
        return agent

    return join


def limit(cast: make.Cast, **limits: float) -> None:
    services.set_scope(
        cast.acme,
        limits=Limits(**limits),  # type: ignore[arg-type]
        by=make.BY,
        reason="test",
        now=database_now(),
    )


def tick(*agents: PolicyClient) -> None:
    for agent in agents:
        agent.tick()
        assert agent.trouble == ""


def allocate(cast: make.Cast) -> None:
    divide(cast.cell, now=database_now())


def fill(agent: PolicyClient, inside: ExitStack) -> int:
    """Begin as many runs as the agent lets in; return how many those are."""
    assert agent.policy is not None
    for count in range(2 * LIMIT):
        try:
            inside.enter_context(agent.fence.enter("acme"))
            inside.enter_context(agent.admission.admit(agent.policy.entries["acme"]))
        except TenantThrottled:
            return count
    raise AssertionError("nobody is held to the limit")


def at_once(*agents: PolicyClient) -> list[int]:
    with ExitStack() as inside:
        return [fill(agent, inside) for agent in agents]


def test_an_instance_alone_has_the_whole_limit(join: Join, cast: make.Cast) -> None:
    agent = join("agent-1")
    assert at_once(agent) == [0]  # Nobody has divided yet.
    allocate(cast)
    tick(agent)
    assert at_once(agent) == [LIMIT]


def test_the_limit_is_shared_and_never_exceeded_while_instances_join(
    join: Join, cast: make.Cast
) -> None:
    agents = [join("agent-1")]
    allocate(cast)
    tick(*agents)
    for number in (2, 3):
        with ExitStack() as inside:
            # The longest there has them all, and keeps them while the others come.
            most = fill(agents[0], inside)
            tick(*agents)
            agents.append(join(f"agent-{number}"))
            for _ in range(4):
                allocate(cast)
                tick(*agents)
                with ExitStack() as more:
                    rest = sum(fill(agent, more) for agent in agents)
                assert most + rest <= LIMIT
        for _ in range(6):
            assert sum(at_once(*agents)) <= LIMIT
            tick(*agents)
            allocate(cast)
            tick(*agents)
    shares = at_once(*agents)
    assert sum(shares) == LIMIT
    assert all(shares)


def test_an_instance_that_is_cut_off_keeps_less_than_the_others_get(
    join: Join, cast: make.Cast, clock: DrivenClock
) -> None:
    agents = [join("agent-1"), join("agent-2")]
    for _ in range(4):
        allocate(cast)
        tick(*agents)
        at_once(*agents)
    stays, lost = agents
    before = at_once(lost)[0]
    clock.advance(31)
    long_ago = database_now() - timedelta(seconds=40)
    RuntimeInstance.objects.filter(key=lost.instance).update(
        grants_until=long_ago, reported_at=long_ago
    )
    for _ in range(4):
        tick(stays)
        allocate(cast)
        tick(stays)
        assert sum(at_once(stays, lost)) <= LIMIT
    assert at_once(lost)[0] <= (before + 1) // 2
    tick(lost)
    for _ in range(4):
        allocate(cast)
        tick(stays, lost)
        assert sum(at_once(stays, lost)) <= LIMIT


def test_an_edit_holds_from_the_next_poll_on(join: Join, cast: make.Cast) -> None:
    agents = [join("agent-1"), join("agent-2")]
    for _ in range(4):
        allocate(cast)
        tick(*agents)
    limit(cast, max_concurrent_runs=1)
    tick(*agents)
    assert max(at_once(*agents)) <= 1  # In each; over both when it is divided.
    sums = []
    for _ in range(8):
        allocate(cast)
        tick(*agents)
        sums.append(sum(at_once(*agents)))
    # 0 while the one slot goes over to whoever was refused.
    assert set(sums[1:]) <= {0, 1}
    assert 1 in sums
    limit(cast)
    tick(*agents)
    with pytest.raises(AssertionError, match="nobody is held"):
        at_once(agents[0])


def test_refusals_and_trials_arrive_in_the_usage(join: Join, cast: make.Cast) -> None:
    services.try_scope(
        cast.acme,
        limits=Limits(max_concurrent_runs=LIMIT - 2),
        by=make.BY,
        reason="test",
        now=database_now(),
    )
    agent = join("agent-1")
    allocate(cast)
    tick(agent)
    assert at_once(agent) == [LIMIT]
    tick(agent)
    lines = UsageLine.objects.filter(tenant=cast.acme)
    assert sum(line.refused.get("concurrency", 0) for line in lines) == 1
    assert sum(line.would_refuse.get("concurrency", 0) for line in lines) == 2


def test_a_process_says_how_its_runners_and_breakers_are(join: Join, cast: make.Cast) -> None:
    agent = join("agent-1")
    agent.breakers.answered(agent.breakers.enter("gemini"))
    agent.runners.evicted("idle")
    allocate(cast)
    tick(agent)
    tick(agent)
    row = RuntimeInstance.objects.get(key=agent.instance)
    assert row.ready
    assert row.runners["evicted"]["idle"] == 1
    assert row.breakers["gemini"]["state"] == "closed"
