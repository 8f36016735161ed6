"""A gateway finds the owner of each turn, and recovers by itself where it was stale."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import pytest

from agent_runtime import (
    Behind,
    Draining,
    Gateway,
    Moved,
    NotHere,
    NotReady,
    Offer,
    Placements,
    RetryLater,
    Version,
)
from agent_runtime.transport import Answer
from tests.runtime.test_fork import in_child
from tests.runtime.wire import say


class Feed:
    """The placement feed as the control plane serves it."""

    def __init__(self) -> None:
        self.epoch, self.number = "e1", 1
        # (feed version that stamped it, row)
        self.rows: dict[str, tuple[int, dict[str, Any]]] = {}
        self.asked: list[str] = []
        # How long an answer takes, seconds.
        self.takes = 0.0
        # An answer to give instead, or an error to raise.
        self.instead: Answer | OSError | None = None
        self.place("acme", 1)

    def place(self, tenant: str, placement: int, cell: str = "a", new: str | None = None) -> None:
        """Say where the tenant lives, and towards which cell it is split."""
        self.number += 1
        home = {"cell": cell, "cell_url": f"https://{cell}", "store": f"store-{cell}"}
        far = {"cell": new, "cell_url": f"https://{new}", "store": f"store-{new}"}
        row = {
            "tenant": tenant,
            "app_name": f"support.{tenant}",
            **home,
            "placement_version": f"{self.epoch}.{placement}",
            "sides": None if new is None else {"existing": home, "new": far},
            "home_region": "eu1",
            "fail_mode": "closed",
        }
        self.rows[tenant] = (self.number, row)

    def __call__(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> Answer:
        assert (method, headers["Authorization"]) == ("GET", "Bearer gateway-token")
        self.asked.append(path.partition("?")[2])
        time.sleep(self.takes)
        if isinstance(self.instead, OSError):
            raise self.instead
        if self.instead is not None:
            return self.instead
        epoch, _, number = path.partition("since=")[2].rpartition(".")
        full = epoch != self.epoch or int(number) > self.number
        if not full and int(number) == self.number:
            return 304, {}, b""
        since = -1 if full else int(number)
        return say(
            200,
            version=f"{self.epoch}.{self.number}",
            full=full,
            tenants=[row for stamp, row in self.rows.values() if stamp > since],
        )


@pytest.fixture
def feed() -> Feed:
    return Feed()


@pytest.fixture
def placements(feed: Feed) -> Placements:
    placements = Placements(
        "http://plane.invalid", "gateway-token\n", transport=feed, dice=lambda: 0.5
    )
    assert placements.refresh()
    return placements


@pytest.fixture
def gateway(placements: Placements) -> Gateway:
    return Gateway(placements, patience_seconds=0.6)


def cell_of(placements: Placements, tenant: str = "acme") -> str | None:
    row = placements.where(tenant)
    return None if row is None else row.home.cell


# --- the feed -------------------------------------------------------------------------------


def test_a_row_names_cell_store_and_what_a_turn_carries(placements: Placements) -> None:
    row = placements.where("acme")
    assert row is not None
    assert (row.home.cell, row.home.cell_url, row.home.store) == ("a", "https://a", "store-a")
    assert (row.version, row.far, row.app_name) == ("e1.1", None, "support.acme")
    assert list(row.offers()) == [Offer(row.home, "e1.1", sent_on=False)]
    assert placements.where("nobody") is None


def test_a_split_row_offers_the_home_first(feed: Feed, placements: Placements) -> None:
    feed.place("acme", 2, "a", new="b")
    placements.refresh()
    row = placements.where("acme")
    assert row is not None
    offers = [(one.side.cell, one.side.store, one.sent_on) for one in row.offers()]
    assert offers == [("a", "store-a", False), ("b", "store-b", True)]
    assert {one.placement_version for one in row.offers()} == {"e1.2"}


def test_only_what_changed_is_asked_for(feed: Feed, placements: Placements) -> None:
    feed.place("bolt", 2)
    placements.refresh()
    placements.refresh()
    assert feed.asked == ["", "since=e1.2", "since=e1.3"]
    assert (cell_of(placements), cell_of(placements, "bolt")) == ("a", "a")


def test_another_epoch_replaces_everything(feed: Feed, placements: Placements) -> None:
    feed.epoch, feed.number, feed.rows = "e2", 0, {}
    feed.place("bolt", 1, "c")
    placements.refresh()
    assert (cell_of(placements), cell_of(placements, "bolt")) == (None, "c")
    assert placements.version == Version("e2", 1)


def test_an_older_answer_is_ignored(feed: Feed, placements: Placements) -> None:
    feed.place("acme", 2, "b")
    placements.refresh()
    old = {**feed.rows["acme"][1], "cell": "a"}
    feed.instead = say(200, version="e1.1", full=True, tenants=[old])
    placements.refresh()
    assert cell_of(placements) == "b"


@pytest.mark.parametrize(
    "instead",
    [
        OSError("no route"),
        say(503, error="overloaded", detail="come back", retry_after_seconds=1),
        say(401, error="bad_token"),
        say(200, version="latest", full=True, tenants=[]),
        say(200, version="e1.9", full=True, tenants=[{"tenant": "acme"}]),
        say(200, version="e9.1", full=False, tenants=[]),
        (200, {}, b"<html>"),
    ],
    ids=["no answer", "later", "revoked", "no version", "half a row", "a foreign delta", "a page"],
)
def test_what_is_known_outlives_a_bad_answer(
    feed: Feed, placements: Placements, instead: Answer | OSError
) -> None:
    feed.instead = instead
    assert not placements.refresh()
    assert placements.trouble
    assert cell_of(placements) == "a"
    feed.instead = None
    feed.place("acme", 2, "b")
    assert placements.refresh()
    assert (placements.trouble, cell_of(placements)) == ("", "b")


def test_a_first_read_that_is_told_nothing_changed_is_wrong(feed: Feed) -> None:
    placements = Placements("http://plane.invalid", "gateway-token", transport=feed)
    feed.instead = (304, {}, b"")
    assert not placements.refresh()
    assert placements.version is None


def test_a_thread_keeps_it_read(feed: Feed) -> None:
    placements = Placements(
        "http://plane.invalid", "gateway-token", transport=feed, poll_seconds=0.02
    )
    placements.start()
    placements.start()
    try:
        until(lambda: cell_of(placements) == "a")
        feed.place("acme", 2, "b")
        until(lambda: cell_of(placements) == "b")
    finally:
        placements.stop()
    asked = len(feed.asked)
    time.sleep(0.1)
    assert len(feed.asked) == asked


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_reads_for_itself(feed: Feed, placements: Placements) -> None:
    def child() -> list[Any]:
        feed.place("acme", 2, "b")
        # The parent's thread may have held it.
        return [cell_of(placements), placements.refresh(), cell_of(placements), os.getpid()]

    with placements._reading:
        assert in_child(child)[:3] == ["a", True, "b"]
    assert cell_of(placements) == "a"


def until(true: Callable[[], bool]) -> None:
    limit = time.monotonic() + 5
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.005)


# --- turns ----------------------------------------------------------------------------------


class Cells:
    """What the cells answer, one after another; and what they were offered."""

    def __init__(self, *answers: str | RetryLater) -> None:
        self.answers = list(answers)
        self.offered: list[tuple[str, str, bool]] = []

    def answer(self, offer: Offer) -> str:
        self.offered.append((offer.side.cell, offer.placement_version, offer.sent_on))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, RetryLater):
            raise answer
        return answer

    async def send(self, offer: Offer) -> str:
        return self.answer(offer)

    async def stream(self, offer: Offer) -> AsyncGenerator[str, None]:
        for letter in self.answer(offer):
            yield letter


def moved() -> Moved:
    return Moved("moved", cell="b", retry_after_seconds=1)


def behind() -> Behind:
    return Behind("behind", retry_after_seconds=1)


def not_here() -> NotHere:
    return NotHere("not here", retry_after_seconds=1)


def draining() -> Draining:
    return Draining("draining", retry_after_seconds=30)


async def test_a_turn_goes_to_the_home(gateway: Gateway) -> None:
    cells = Cells("done")
    assert await gateway.route("acme", cells.send) == "done"
    assert cells.offered == [("a", "e1.1", False)]


async def test_what_the_home_does_not_know_goes_on_marked(
    feed: Feed, placements: Placements, gateway: Gateway
) -> None:
    feed.place("acme", 2, "a", new="b")
    placements.refresh()
    cells = Cells(not_here(), "done")
    asked = len(feed.asked)
    assert [one async for one in gateway.stream("acme", cells.stream)] == list("done")
    assert cells.offered == [("a", "e1.2", False), ("b", "e1.2", True)]
    # At once: the feed has nothing to say about it.
    assert len(feed.asked) == asked


@pytest.mark.parametrize("refusal", [moved(), behind(), not_here()], ids=lambda one: one.args[0])
async def test_a_stale_gateway_reads_the_feed_and_sends_again(
    feed: Feed, gateway: Gateway, refusal: RetryLater
) -> None:
    feed.place("acme", 2, "b")
    cells = Cells(refusal, "done")
    assert await gateway.route("acme", cells.send) == "done"
    assert cells.offered == [("a", "e1.1", False), ("b", "e1.2", False)]


async def test_a_turn_waits_for_a_cell_that_has_not_heard_yet(gateway: Gateway) -> None:
    cells = Cells(behind(), behind(), "done")
    assert await gateway.route("acme", cells.send) == "done"
    assert cells.offered == [("a", "e1.1", False)] * 3


async def test_the_far_side_that_has_not_heard_is_asked_by_way_of_the_home(
    feed: Feed, placements: Placements, gateway: Gateway
) -> None:
    feed.place("acme", 2, "a", new="b")
    placements.refresh()
    cells = Cells(not_here(), behind(), not_here(), "done")
    assert await gateway.route("acme", cells.send) == "done"
    assert [cell for cell, _, _ in cells.offered] == ["a", "b", "a", "b"]


async def test_a_moved_tenant_is_asked_for_again_only_once_the_row_changed(
    feed: Feed, gateway: Gateway
) -> None:
    cells = Cells(moved(), "done")

    async def later() -> None:
        await asyncio.sleep(0.25)
        assert len(cells.offered) == 1
        feed.place("acme", 2, "b")

    async with asyncio.TaskGroup() as group:
        group.create_task(later())
        answer = group.create_task(gateway.route("acme", cells.send))
    assert answer.result() == "done"
    assert cells.offered == [("a", "e1.1", False), ("b", "e1.2", False)]


@pytest.mark.parametrize("refusal", [moved(), behind(), not_here()], ids=lambda one: one.args[0])
async def test_when_patience_is_over_the_cells_own_refusal_is_the_answer(
    feed: Feed, gateway: Gateway, refusal: RetryLater
) -> None:
    cells = Cells(refusal)
    began = time.monotonic()
    with pytest.raises(type(refusal)) as refused:
        await gateway.route("acme", cells.send)
    assert refused.value.retry_after_seconds == 1
    assert 0.5 < time.monotonic() - began < 3
    # Backed off: neither the feed nor the cell was hammered.
    assert len(feed.asked) < 10
    assert len(cells.offered) < 10


async def test_an_outage_of_the_control_plane_ends_in_a_retry_after(
    feed: Feed, gateway: Gateway
) -> None:
    feed.instead = OSError("no route")
    with pytest.raises(Moved):
        await gateway.route("acme", Cells(moved()).send)


@pytest.mark.parametrize(
    "refusal", [draining(), NotReady("leaving", retry_after_seconds=1)], ids=["draining", "leaving"]
)
async def test_what_is_not_stale_is_the_callers(
    feed: Feed, gateway: Gateway, refusal: RetryLater
) -> None:
    cells, asked = Cells(refusal), len(feed.asked)
    with pytest.raises(type(refusal)):
        await gateway.route("acme", cells.send)
    assert (len(cells.offered), len(feed.asked)) == (1, asked)


async def test_nothing_is_sent_twice_once_something_was_yielded(
    feed: Feed, gateway: Gateway
) -> None:
    offered = []
    # Were it sent again, it would go there.
    feed.place("acme", 2, "b")

    async def send(offer: Offer) -> AsyncGenerator[str, None]:
        offered.append(offer)
        yield "half"
        raise moved()

    with pytest.raises(Moved):
        async for _ in gateway.stream("acme", send):
            pass
    assert len(offered) == 1


async def test_a_reader_that_closes_the_stream_closes_the_turn(gateway: Gateway) -> None:
    closed = []

    async def send(offer: Offer) -> AsyncGenerator[str, None]:
        try:
            yield "one"
            yield "two"
        finally:
            closed.append(offer.side.cell)

    events = gateway.stream("acme", send)
    assert await anext(events) == "one"
    await events.aclose()
    assert closed == ["a"]


async def test_an_unknown_tenant_is_looked_up_once_and_never_not_found(
    feed: Feed, gateway: Gateway
) -> None:
    feed.place("bolt", 2, "b")
    assert await gateway.route("bolt", Cells("done").send) == "done"
    asked = len(feed.asked)
    for _ in range(20):
        with pytest.raises(Behind):
            await gateway.route("nobody", Cells("done").send)
    assert len(feed.asked) <= asked + 1


async def test_a_gateway_that_knows_nothing_is_not_ready(feed: Feed) -> None:
    feed.instead = OSError("no route")
    placements = Placements("http://plane.invalid", "gateway-token", transport=feed)
    with pytest.raises(NotReady):
        await Gateway(placements).route("acme", Cells("done").send)


async def test_many_stale_turns_share_one_read_however_long_it_takes(
    feed: Feed, gateway: Gateway
) -> None:
    feed.place("acme", 2, "b")
    feed.takes = 0.3

    async def send(offer: Offer) -> str:
        await asyncio.sleep(0)
        if offer.placement_version != "e1.2":
            raise moved()
        return "done"

    asked = len(feed.asked)
    answers = await asyncio.gather(*(gateway.route("acme", send) for _ in range(50)))
    assert answers == ["done"] * 50
    assert len(feed.asked) == asked + 1


async def test_one_that_is_cancelled_leaves_the_read_to_the_others(
    feed: Feed, gateway: Gateway
) -> None:
    feed.place("acme", 2, "b")
    first = asyncio.create_task(gateway.route("acme", Cells(moved(), "done").send))
    second = asyncio.create_task(gateway.route("acme", Cells(moved(), "done").send))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    first.cancel()
    assert await second == "done"
    with pytest.raises(asyncio.CancelledError):
        await first
