"""A cache of what tools answered, which cannot give one tenant another's answer."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from functools import partial
from typing import Any

# Answers kept, over all tenants.
MAX_RESULTS = 10_000


class ResultCache:
    """Keeps answers by tenant and question. Belongs to one event loop.

    The same words asked for two tenants are two questions: a cache whose key is the query alone
    answers one tenant with what it looked up for another. So there is no way to ask without a
    tenant here, and it comes from the turn's entry, never from the model.
    """

    def __init__(self, limit: int = MAX_RESULTS) -> None:
        """Keep up to `limit` answers, the longest unused go first."""
        self._limit = limit
        self._kept: OrderedDict[tuple[str, Hashable], asyncio.Future[Any]] = OrderedDict()

    async def get(self, tenant: str, question: Hashable, ask: Callable[[], Awaitable[Any]]) -> Any:
        """Return the answer that is kept, or what `ask` returns; asked once at a time.

        What it raises is raised to everybody who waits for it, and not kept.
        """
        key = (tenant, question)
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = asyncio.ensure_future(_asked(ask))
            # By the question, not by who waits for it: all of them may be gone.
            found.add_done_callback(partial(self._answered, key))
            while len(self._kept) > self._limit:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        # One caller that is cancelled takes the answer from nobody else.
        return await asyncio.shield(found)

    def forget(self, tenant: str) -> None:
        """Forget a tenant's answers: its secrets have rotated, or it has left."""
        for key in [key for key in self._kept if key[0] == tenant]:
            del self._kept[key]

    def __len__(self) -> int:
        return len(self._kept)

    def _answered(self, key: tuple[str, Hashable], found: asyncio.Future[Any]) -> None:
        failed = found.cancelled() or found.exception() is not None
        if failed and self._kept.get(key) is found:
            del self._kept[key]


async def _asked(ask: Callable[[], Awaitable[Any]]) -> Any:
    return await ask()
