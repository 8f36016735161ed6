"""The cache of what tools answered."""

from __future__ import annotations

import asyncio

import pytest

from agent_runtime import ResultCache


class Backend:
    """Answers each tenant by its own books, and counts who asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def balance(self, tenant: str) -> str:
        self.asked.append(tenant)
        await asyncio.sleep(0)
        return f"the balance of {tenant}"


async def test_one_question_of_two_tenants_has_two_answers() -> None:
    cache, backend = ResultCache(), Backend()
    for tenant in ("acme", "bolt", "acme"):
        answer = await cache.get(tenant, "balance", lambda tenant=tenant: backend.balance(tenant))
        assert answer == f"the balance of {tenant}"
    assert backend.asked == ["acme", "bolt"]


async def test_a_question_that_is_being_asked_is_not_asked_again() -> None:
    cache, backend = ResultCache(), Backend()
    answers = await asyncio.gather(
        *(cache.get("acme", "balance", lambda: backend.balance("acme")) for _ in range(20))
    )
    assert set(answers) == {"the balance of acme"}
    assert backend.asked == ["acme"]


async def test_a_failure_is_not_kept() -> None:
    cache, backend = ResultCache(), Backend()

    async def broken() -> str:
        raise ConnectionError("no answer")

    with pytest.raises(ConnectionError):
        await cache.get("acme", "balance", broken)
    assert len(cache) == 0
    answer = await cache.get("acme", "balance", lambda: backend.balance("acme"))
    assert answer == "the balance of acme"


async def test_a_caller_that_is_cancelled_leaves_the_others_their_answer() -> None:
    cache, began, end = ResultCache(), asyncio.Event(), asyncio.Event()

    async def slow() -> str:
        began.set()
        await end.wait()
        return "at last"

    first = asyncio.create_task(cache.get("acme", "q", slow))
    await began.wait()
    second = asyncio.create_task(cache.get("acme", "q", slow))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    end.set()
    assert await second == "at last"


async def test_a_failure_that_nobody_waited_for_is_not_kept_either() -> None:
    cache, backend, began, end = ResultCache(), Backend(), asyncio.Event(), asyncio.Event()

    async def broken() -> str:
        began.set()
        await end.wait()
        raise ConnectionError("no answer")

    only = asyncio.create_task(cache.get("acme", "balance", broken))
    await began.wait()
    only.cancel()
    await asyncio.wait({only})
    end.set()
    await asyncio.sleep(0.01)
    assert len(cache) == 0
    answer = await cache.get("acme", "balance", lambda: backend.balance("acme"))
    assert answer == "the balance of acme"


async def test_it_is_bounded_and_forgets_a_tenant_at_once() -> None:
    cache, backend = ResultCache(limit=3), Backend()
    for number in range(10):
        await cache.get("acme", number, lambda: backend.balance("acme"))
    assert len(cache) == 3
    await cache.get("bolt", 1, lambda: backend.balance("bolt"))
    cache.forget("acme")
    assert len(cache) == 1
