"""The event loop in which a few calls of somebody else's service are made."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any


class _Threads(ThreadPoolExecutor):
    """Threads that nobody waits for when their loop ends."""

    def shutdown(self, wait: bool = True, **more: Any) -> None:
        super().shutdown(wait=False, cancel_futures=True)


@contextmanager
def runner() -> Iterator[asyncio.Runner]:
    """Yield an event loop's runner and end it, with whatever still runs there.

    A call that hangs in a thread, as google-adk's for files and for Cloud Storage do where a volume
    or a network is gone, is left to itself: asyncio would wait for its end, and no bound of a call
    would hold.
    """
    with asyncio.Runner() as opened:
        opened.get_loop().set_default_executor(_Threads(thread_name_prefix="service"))
        yield opened
