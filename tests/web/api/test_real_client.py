"""agent_runtime's own client against the real server: both sides of the wire as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import transaction

from agent_runtime import Draining, Moved, NotReady, PolicyClient
from agent_runtime.transport import HttpTransport
from durable.clock import database_now
from tenants import queries, services
from tenants.models import RuntimeInstance, UsageLine
from tests import make

pytestmark = pytest.mark.django_db(transaction=True, serialized_rollback=True)
Make = Callable[[], PolicyClient]


@pytest.fixture
def client_of(cast: make.Cast, live_server: Any, runtime: Any) -> Iterator[Make]:
    made: list[PolicyClient] = []
    transports: list[HttpTransport] = []

    def build() -> PolicyClient:
        transports.append(HttpTransport(live_server.url))
        one = PolicyClient(
            live_server.url,
            runtime.secret,
            cell=cast.cell.slug,
            name=f"agents-{len(made)}",
            build="1.4.2",
            stores=["store-eu1-a"],
            longest_turn_seconds=60,
            longest_tool_seconds=30,
            transport=transports[-1],
        )
        made.append(one)
        return one

    yield build
    for one in made:
        one.leave(wait_seconds=0)
    for transport in transports:
        transport.close()


def publish(cast: make.Cast, accepts: Any) -> int:
    with transaction.atomic():
        return services.publish(cast.acme, cast.cell, accepts=accepts)


def drained(cast: make.Cast, version: int) -> bool:
    return queries.fence_proof(cast.cell, cast.acme, version, now=database_now()).drained


def later() -> datetime:
    """Return a moment at which an instance that has just spoken is silent."""
    return database_now() + timedelta(seconds=20)


def test_a_fence_closes_is_proven_and_opens_again(cast: make.Cast, client_of: Make) -> None:
    one = client_of()
    with pytest.raises(NotReady), one.fence.enter("acme"):
        pass
    one.tick()
    with one.fence.enter("acme"):
        version = publish(cast, "none")
        assert not drained(cast, version)
        one.tick()
        with pytest.raises(Draining), one.fence.enter("acme"):
            pass
        proof = queries.fence_proof(cast.cell, cast.acme, version, now=database_now())
        assert [word.state for word in proof.instances] == ["draining"]
        with one.fence.enter("bolt"):
            pass
    one.tick()
    assert drained(cast, version)
    publish(cast, "all")
    one.tick()
    with one.fence.enter("acme"):
        pass


def test_a_moved_tenant_is_refused_with_its_new_cell(cast: make.Cast, client_of: Make) -> None:
    one = client_of()
    one.tick()
    with transaction.atomic():
        services.place(
            cast.acme,
            cell=cast.other_cell,
            store=cast.other_store,
            by="mover",
            reason="mv-1",
            now=database_now(),
        )
    one.tick()
    with pytest.raises(Moved), one.fence.enter("acme"):
        pass


def test_the_fast_cadence_reaches_an_instance_and_lets_a_fence_begin(
    cast: make.Cast, client_of: Make
) -> None:
    one = client_of()
    assert one.tick() > 4
    assert queries.fence_waits_for(cast.cell, now=database_now())
    services.hurry([cast.cell], until=database_now() + timedelta(minutes=1))
    assert one.tick() < 1
    one.tick()
    assert queries.fence_waits_for(cast.cell, now=database_now()) == []


def test_usage_is_counted_once_whatever_becomes_of_the_instance(
    cast: make.Cast, client_of: Make
) -> None:
    one = client_of()
    one.tick()
    one.usage.turn("acme")
    services.declare_dead(RuntimeInstance.objects.get(), by="ada", reason="thought so", now=later())
    # Its policy is answered 410: it joins anew, its usage still unreported.
    one.tick()
    one.tick()
    assert sum(UsageLine.objects.values_list("turns", flat=True)) == 1
    assert RuntimeInstance.objects.filter(gone_at=None).count() == 1


def test_turns_that_outlive_an_id_hold_the_fence_under_the_next(
    cast: make.Cast, client_of: Make
) -> None:
    one = client_of()
    one.tick()
    with one.fence.enter("acme"):
        version = publish(cast, "none")
        services.declare_dead(
            RuntimeInstance.objects.get(), by="ada", reason="thought so", now=later()
        )
        one.tick()
        proof = queries.fence_proof(cast.cell, cast.acme, version, now=database_now())
        assert (proof.drained, proof.in_flight) == (False, 1)
    one.tick()
    assert drained(cast, version)


def test_leaving_takes_an_instance_out_of_every_proof(cast: make.Cast, client_of: Make) -> None:
    one = client_of()
    one.tick()
    version = publish(cast, "none")
    assert not drained(cast, version)
    assert one.leave()
    assert RuntimeInstance.objects.get().gone_why == "left"
    assert drained(cast, version)
