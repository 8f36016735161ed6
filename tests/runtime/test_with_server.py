"""Client and control plane together: the real API on real PostgreSQL, in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import transaction
from django.test import Client

from agent_runtime import Draining, Moved, PolicyClient
from agent_runtime.disk import DiskCopy
from agent_runtime.transport import Answer
from durable.clock import database_now
from tenants import queries, services
from tenants.domain.roles import TokenRole
from tenants.models import Cell, Counter, DirtyLine, RuntimeInstance, UsageLine
from tests import make
from tests.runtime.wire import DrivenClock

LEASE_SECONDS = 900.0


class Network:
    """Carries calls to the Django application; loses answers when told to."""

    def __init__(self) -> None:
        self.loses: Callable[[str, str], bool] = lambda method, path: False

    def __call__(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> Answer:
        response = Client().generic(
            method,
            path,
            body or b"",
            content_type=headers.get("Content-Type", ""),
            headers={"Authorization": headers["Authorization"]},
        )
        if self.loses(method, path):
            raise TimeoutError
        return response.status_code, dict(response.items()), response.content


@pytest.fixture
def network() -> Network:
    return Network()


def runtime_secret(cell: Cell) -> str:
    """A fresh token of agents that may serve `cell`."""
    now = database_now()
    _, secret = services.make_token(
        "agents",
        role=TokenRole.RUNTIME,
        cells=[cell],
        expires_at=now + timedelta(days=1),
        by=make.BY,
        now=now,
    )
    return secret


def make_agent(cast: make.Cast, secret: str, **changes: Any) -> PolicyClient:
    """An instance of the cast's first cell that has not joined."""
    options: dict[str, Any] = {
        "cell": cast.cell.slug,
        "name": "agent-1",
        "build": "b1",
        "stores": [cast.store.key],
        "longest_turn_seconds": 60,
        "longest_tool_seconds": 30,
    }
    return PolicyClient("http://plane.invalid", secret, **options | changes)


@pytest.fixture
def agent(cast: make.Cast, network: Network, clock: DrivenClock) -> PolicyClient:
    """An instance of the cast's first cell, after its first round."""
    agent = make_agent(cast, runtime_secret(cast.cell), transport=network, clock=clock)
    agent.tick()
    assert agent.trouble == ""
    return agent


def publish(cast: make.Cast, accepts: str) -> int:
    with transaction.atomic():
        return services.publish(cast.acme, cast.cell, accepts=accepts)  # type: ignore[arg-type]


def proof(cast: make.Cast, version: int) -> queries.Proof:
    return queries.fence_proof(cast.cell, cast.acme, version, now=database_now())


def test_a_joined_agent_serves_what_the_cell_was_told(agent: PolicyClient, cast: make.Cast) -> None:
    placement = queries.placement_feed(since="")
    assert placement is not None
    version = next(t["placement_version"] for t in placement.tenants if t["tenant"] == "acme")
    with agent.fence.enter("acme", version) as turn:
        assert turn.entry.app_name == "support.acme"
        assert turn.entry.store_key == cast.store.key


def test_a_fence_is_proven_once_the_last_turn_has_left(
    agent: PolicyClient, cast: make.Cast
) -> None:
    with agent.fence.enter("acme"):
        version = publish(cast, "none")
        assert [word.state for word in proof(cast, version).instances] == ["missing"]
        agent.tick()
        assert [word.state for word in proof(cast, version).instances] == ["draining"]
        with pytest.raises(Draining), agent.fence.enter("acme"):
            pass
    agent.tick()
    assert proof(cast, version).drained
    publish(cast, "all")
    agent.tick()
    with agent.fence.enter("acme"):
        pass


def test_an_agent_of_the_old_cell_names_the_new_one(agent: PolicyClient, cast: make.Cast) -> None:
    with transaction.atomic():
        services.place(
            cast.acme,
            cell=cast.other_cell,
            store=cast.other_store,
            by=make.BY,
            reason="test",
            now=database_now(),
        )
    agent.tick()
    with pytest.raises(Moved) as refused, agent.fence.enter("acme"):
        pass
    assert refused.value.cell == cast.other_cell.slug


def test_the_cadence_follows_a_move(agent: PolicyClient, cast: make.Cast) -> None:
    assert agent.tick() == pytest.approx(5, rel=0.11)
    services.hurry([cast.cell], until=database_now() + timedelta(minutes=1))
    assert agent.tick() == pytest.approx(0.25, rel=0.11)
    # A fence begins once the instance has come back as fast as it was told to.
    assert queries.fence_waits_for(cast.cell, now=database_now()) != []
    agent.tick()
    assert queries.fence_waits_for(cast.cell, now=database_now()) == []


def test_usage_and_served_sessions_arrive_once_over_a_network_that_loses_answers(
    agent: PolicyClient, cast: make.Cast, network: Network
) -> None:
    services.track(cast.acme, until=database_now() + timedelta(hours=1))
    for number in range(9):
        agent.usage.turn("acme")
        agent.usage.model_call("acme", 18)
        agent.usage.served("acme", "u", f"s{number}")
        network.loses = lambda method, path, number=number: number % 3 != 2  # type: ignore[misc]
        agent.tick()
    network.loses = lambda method, path: False
    agent.tick()
    lines = UsageLine.objects.all()
    assert sum(line.turns for line in lines) == 9
    assert sum(line.tokens for line in lines) == 9 * 18
    assert {line.session_id for line in DirtyLine.objects.all()} == {f"s{n}" for n in range(9)}


def test_turns_stay_counted_while_a_process_joins_anew(
    agent: PolicyClient, cast: make.Cast, clock: DrivenClock, network: Network
) -> None:
    """A turn runs, the fence closes, the process's lease runs out, and answers get lost."""
    with agent.fence.enter("acme"):
        version = publish(cast, "none")
        clock.advance(LEASE_SECONDS)
        network.loses = lambda method, path: method == "POST" and path.endswith("/instances")
        agent.tick()
        assert not proof(cast, version).drained
        network.loses = lambda method, path: "/policy" in path
        agent.tick()
        assert not proof(cast, version).drained
        network.loses = lambda method, path: False
        agent.tick()
        assert proof(cast, version).in_flight == 1
    agent.tick()
    assert proof(cast, version).drained
    assert RuntimeInstance.objects.filter(gone_at=None).count() == 1


def test_an_agent_declared_dead_joins_anew(agent: PolicyClient, cast: make.Cast) -> None:
    row = RuntimeInstance.objects.get(key=agent.instance)
    agent.usage.turn("acme")
    later = database_now() + timedelta(seconds=20)
    services.declare_dead(row, by=make.BY, reason="it hangs", now=later)
    agent.tick()
    agent.tick()
    assert agent.instance != row.key
    assert agent.ready
    assert sum(line.turns for line in UsageLine.objects.all()) == 1


def test_a_restored_database_is_told_apart_by_its_epoch(
    agent: PolicyClient, cast: make.Cast
) -> None:
    publish(cast, "none")
    agent.tick()
    Counter.objects.update(epoch="0123456789ab")
    version = publish(cast, "all")
    agent.tick()
    assert agent.policy is not None
    assert str(agent.policy.version) == f"0123456789ab.{version}"
    with agent.fence.enter("acme"):
        pass
    assert RuntimeInstance.objects.get(key=agent.instance).applied_epoch == "0123456789ab"


def test_ids_that_no_column_can_hold_cost_no_report(agent: PolicyClient, cast: make.Cast) -> None:
    services.track(cast.acme, until=database_now() + timedelta(hours=1))
    for session in ("x" * 500, "a\0b", "\udcc3", "s1"):
        agent.usage.served("acme", "u", session)
    agent.tick()
    assert agent.trouble == ""
    assert [line.session_id for line in DirtyLine.objects.all()] == ["s1"]


def test_a_token_of_another_cell_serves_nothing(cast: make.Cast, network: Network) -> None:
    agent = make_agent(cast, runtime_secret(cast.other_cell), transport=network)
    agent.tick()
    assert not agent.ready
    assert cast.cell.slug in agent.trouble
    assert RuntimeInstance.objects.count() == 0


def test_an_agent_that_leaves_is_not_waited_for(agent: PolicyClient, cast: make.Cast) -> None:
    version = publish(cast, "none")
    assert not proof(cast, version).drained
    assert agent.leave()
    assert proof(cast, version).drained


def test_a_fence_waits_for_the_id_in_whose_place_a_restarted_process_serves(
    network: Network, clock: DrivenClock, cast: make.Cast, tmp_path: Path
) -> None:
    """Nobody can say "nobody inside" for a killed process: its last write may be on its way."""
    secret = runtime_secret(cast.cell)
    first = DiskCopy(tmp_path / "copy")
    make_agent(cast, secret, transport=network, clock=clock, copy=first).tick()
    first.close()  # Killed: the kernel gives its lock back.
    second = DiskCopy(tmp_path / "copy")
    again = make_agent(cast, secret, transport=network, clock=clock, copy=second)
    with again.fence.enter("acme"):
        pass
    version = publish(cast, "none")
    again.tick()
    again.tick()
    with pytest.raises(Draining), again.fence.enter("acme"):
        pass
    assert not proof(cast, version).drained
    over = database_now() + timedelta(seconds=LEASE_SECONDS + 60 + 6)
    again.tick()
    states = {
        word.state
        for word in queries.fence_proof(cast.cell, cast.acme, version, now=over).instances
    }
    assert "missing" not in states
    second.close()
