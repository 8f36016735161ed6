"""Reports: in order, once, whole; nothing lost and nothing doubled on a bad network."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime import PolicyClient
from agent_runtime.transport import Answer
from tests.runtime.wire import (
    LEASE_SECONDS,
    Call,
    ControlPlane,
    DrivenClock,
    entry,
    make_client,
    say,
)


def lose_report_answers(plane: ControlPlane) -> None:
    def after(call: Call, answer: Answer) -> None:
        if call.kind == "report":
            raise TimeoutError

    plane.after = after


def heal(plane: ControlPlane) -> None:
    plane.before = lambda call: None
    plane.after = lambda call, answer: None


def test_reports_are_numbered_from_one_without_a_gap(
    plane: ControlPlane, client: PolicyClient
) -> None:
    for _ in range(3):
        client.tick()
    assert [one["seq"] for one in plane.reports] == [1, 2, 3, 4]


def test_a_retry_sends_the_same_bytes(plane: ControlPlane, client: PolicyClient) -> None:
    client.usage.turn("acme")
    lose_report_answers(plane)
    client.tick()
    client.usage.turn("acme")
    with client.fence.enter("acme"):
        client.tick()
    _, first, second = (call.body for call in plane.calls if call.kind == "report")
    assert first == second


def test_a_companion_that_fails_costs_no_usage(plane: ControlPlane, client: PolicyClient) -> None:
    class Fails:
        def after_round(self) -> None: ...

        def warming(self) -> bool:
            raise RuntimeError("told to fail")

    client.usage.turn("acme")
    fails = Fails()
    client.attach(fails)
    with pytest.raises(RuntimeError):
        client.tick()
    client.detach(fails)
    client.tick()
    assert plane.total("turns") == 1


def test_what_happened_since_follows_a_retry_at_once(
    plane: ControlPlane, client: PolicyClient
) -> None:
    client.usage.turn("acme")
    lose_report_answers(plane)
    client.tick()
    client.usage.turn("acme")
    heal(plane)
    client.tick()
    assert [one["seq"] for one in plane.reports] == [1, 2, 3]
    assert plane.total("turns") == 2


def test_a_retry_does_not_move_the_lease(
    plane: ControlPlane, client: PolicyClient, clock: DrivenClock
) -> None:
    first_sent_at = clock.at
    lose_report_answers(plane)
    client.tick()
    clock.advance(100)
    # Only the retry is answered, which may be about the first one.
    plane.after = lambda call, answer: None
    seen: list[int] = []

    def before(call: Call) -> None:
        if call.kind == "report":
            seen.append(call.data["seq"])
            if len(seen) > 1:
                raise TimeoutError

    plane.before = before
    client.tick()
    assert seen == [2, 3]
    clock.at = first_sent_at + LEASE_SECONDS
    assert client.fence.lapsed


def test_usage_is_counted_once_when_its_answer_was_lost_and_the_instance_is_gone(
    plane: ControlPlane, client: PolicyClient
) -> None:
    client.usage.turn("acme")
    lose_report_answers(plane)
    client.tick()
    plane.instances["i1"].gone = "dead"
    heal(plane)
    client.tick()
    client.tick()
    assert client.instance == "i2"
    assert plane.total("turns") == 1


def test_usage_is_counted_once_when_its_answer_was_lost_and_the_lease_ran_out(
    plane: ControlPlane, client: PolicyClient, clock: DrivenClock
) -> None:
    client.usage.turn("acme")
    lose_report_answers(plane)
    client.tick()
    clock.advance(LEASE_SECONDS)
    client.usage.turn("acme")
    heal(plane)
    client.tick()
    assert client.instance == "i2"
    assert plane.total("turns") == 2


def test_usage_that_never_arrived_is_counted_by_the_old_id_after_the_lease_ran_out(
    plane: ControlPlane, client: PolicyClient, clock: DrivenClock
) -> None:
    client.usage.turn("acme")

    def before(call: Call) -> None:
        if call.kind == "report":
            raise ConnectionRefusedError

    plane.before = before
    client.tick()
    clock.advance(LEASE_SECONDS)
    heal(plane)
    client.tick()
    assert plane.total("turns") == 1
    assert client.ready


def test_after_a_gap_a_process_joins_anew_with_all_that_it_holds(
    plane: ControlPlane, client: PolicyClient
) -> None:
    client.tick()
    plane.instances["i1"].seq = 0  # A control plane that lost the last two reports.
    client.usage.turn("acme")
    client.usage.served("acme", "u", "s")
    with client.fence.enter("acme"):
        client.tick()
    assert client.instance == "i2"
    assert plane.instances["i1"].gone == "replaced"
    [report] = plane.instances["i2"].reports
    assert report["seq"] == 1
    assert report["in_flight"] == {"acme": 1}
    assert report["dirty"] == [{"tenant": "acme", "user_id": "u", "session_id": "s"}]
    assert plane.total("turns") == 1


def test_after_a_gap_nothing_is_served_before_a_full_policy(
    plane: ControlPlane, client: PolicyClient
) -> None:
    client.tick()
    plane.instances["i1"].seq = 0

    def before(call: Call) -> None:
        if call.kind == "join":
            raise ConnectionRefusedError

    plane.before = before
    client.tick()
    assert not client.ready


def test_another_conflict_than_a_gap_keeps_the_report(
    plane: ControlPlane, client: PolicyClient
) -> None:
    client.usage.turn("acme")
    plane.before = lambda call: (
        say(409, error="version_ahead", detail="restored without saying so")
        if call.kind == "report"
        else None
    )
    client.tick()
    assert "restored without saying so" in client.trouble
    assert client.instance == "i1"
    heal(plane)
    client.tick()
    assert plane.total("turns") == 1


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_report_that_can_not_be_taken_costs_its_figures_and_not_the_lease(
    plane: ControlPlane, client: PolicyClient, clock: DrivenClock, status: int
) -> None:
    client.usage.turn("acme")
    plane.before = lambda call: say(status, error="no") if call.kind == "report" else None
    client.tick()
    assert "its usage is lost" in client.trouble
    heal(plane)
    clock.advance(LEASE_SECONDS - 1)
    client.usage.turn("acme")
    client.tick()
    clock.advance(LEASE_SECONDS - 1)
    assert client.ready
    assert [one["seq"] for one in plane.reports] == [1, 2]
    assert plane.total("turns") == 1


def test_a_report_that_does_not_fit_is_followed_by_the_rest_at_once(
    plane: ControlPlane, client: PolicyClient
) -> None:
    for number in range(5_001):
        client.usage.turn(f"t{number}")
    client.tick()
    assert client._wake.is_set()
    client.tick()
    assert [len(one["usage"]) for one in plane.reports[1:]] == [5_000, 1]


def test_a_report_that_says_nobody_is_inside_holds_what_they_did(
    plane: ControlPlane, client: PolicyClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn notes what it served and leaves, between the two looks that make a report."""
    turn = ExitStack()
    turn.enter_context(client.fence.enter("acme"))
    looks: list[str] = []

    def then_the_turn_ends(what: str, look: Callable[[], Any]) -> Callable[[], Any]:
        def both() -> Any:
            seen = look()
            if not looks:
                client.usage.served("acme", "u", "s")
                turn.close()
            looks.append(what)
            return seen

        return both

    monkeypatch.setattr(client.fence, "word", then_the_turn_ends("word", client.fence.word))
    monkeypatch.setattr(client.usage, "take", then_the_turn_ends("take", client.usage.take))
    client.tick()
    client.tick()
    assert sorted(looks[:2]) == ["take", "word"]
    says_empty = [one["seq"] for one in plane.reports[1:] if not one["in_flight"]]
    says_served = [one["seq"] for one in plane.reports[1:] if one["dirty"]]
    assert says_served[0] <= says_empty[0]


@given(seed=st.integers(0, 2**32))
def test_a_network_that_loses_anything_loses_no_usage_and_doubles_none(seed: int) -> None:
    """Requests and answers vanish, leases run out, ids die, databases come back older."""
    dice = random.Random(seed)
    plane, clock = ControlPlane(), DrivenClock()
    client = make_client(plane, clock, dice=dice.random)
    turns = 0

    def maybe_lose(*_: Any) -> None:
        if dice.random() < 0.25:
            raise TimeoutError

    plane.before = maybe_lose
    plane.after = maybe_lose
    for _ in range(60):
        match dice.randrange(8):
            case 0:
                clock.advance(dice.choice([1, 300, LEASE_SECONDS]))
            case 1 if plane.alive:
                dice.choice(plane.alive).gone = "dead"
            case 2:
                plane.publish(entry("acme", accepts=dice.choice(["all", "none"])))
            case 3 | 4:
                client.usage.turn("acme")
                turns += 1
            case _:
                client.tick()
        for one in plane.instances.values():
            assert [r["seq"] for r in one.reports] == list(range(1, one.seq + 1))
    heal(plane)
    client.tick()
    client.tick()
    assert client.ready
    assert plane.total("turns") == turns
    # Only the last id is alive: whatever happened, no ghost keeps a fence waiting.
    assert [one.key for one in plane.alive if one.polled] == [client.instance]
