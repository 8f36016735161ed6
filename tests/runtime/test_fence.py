"""Whoever is refused is not counted, and a count of 0 behind an applied fence stays 0."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agent_runtime import Behind, Draining, Entry, Fence, Moved, NotReady, Policy, RetryLater
from agent_runtime.fence import Turn, Version
from tests.runtime.wire import DrivenClock, entry


def policy(number: int, *entries: dict[str, Any], epoch: str = "e1") -> Policy:
    return Policy(
        version=Version(epoch, number),
        entries={one["tenant"]: Entry.parse(one) for one in entries},
    )


@pytest.fixture
def said() -> list[str]:
    """One item for each time that the fence asked for a report at once."""
    return []


@pytest.fixture
def fence(clock: DrivenClock, said: list[str]) -> Fence:
    """Serving acme at version 1, with an endless lease."""
    fence = Fence(
        cell="one",
        longest_turn_seconds=60,
        clock=clock,
        on_drained=lambda: said.append("drained"),
    )
    fence.apply(policy(1, entry("acme"), entry("bolt")))
    fence.lease(math.inf)
    return fence


# --- who may enter --------------------------------------------------------------------------


def test_a_turn_is_counted_while_it_runs(fence: Fence) -> None:
    with fence.enter("acme"), fence.enter("acme"), fence.enter("bolt"):
        assert fence.word().in_flight == {"acme": 2, "bolt": 1}
    assert fence.word().in_flight == {}


def test_a_turn_that_raises_is_out_again(fence: Fence) -> None:
    with pytest.raises(KeyError), fence.enter("acme"):
        raise KeyError
    assert fence.word().in_flight == {}


def test_a_turn_knows_the_entry_it_entered_under(fence: Fence) -> None:
    with fence.enter("acme") as turn:
        fence.apply(policy(2, entry("acme", store={"key": "pg-us", "kind": "adk-sql"})))
        assert turn.entry.store_key == "pg-eu"


def test_a_closed_fence_refuses_for_half_a_minute(fence: Fence) -> None:
    fence.apply(policy(2, entry("acme", accepts="none")))
    with pytest.raises(Draining) as refused, fence.enter("acme"):
        pass
    assert refused.value.retry_after_seconds == 30
    assert fence.word().in_flight == {}


def test_a_closed_fence_is_the_tenants_alone(fence: Fence) -> None:
    fence.apply(policy(2, entry("acme", accepts="none"), entry("bolt")))
    with fence.enter("bolt"):
        assert fence.word().in_flight == {"bolt": 1}


@pytest.mark.parametrize("accepts", ["none", "existing", "new", "a word of tomorrow"])
def test_every_word_but_all_refuses_who_does_not_ask_the_store(fence: Fence, accepts: str) -> None:
    fence.apply(policy(2, entry("acme", accepts=accepts, split=True)))
    with pytest.raises(Draining) as refused, fence.enter("acme"):
        pass
    # Nor is it told to look: what writes without a session is simply refused.
    assert refused.value.source is None


# accepts, split, home_cell, sent on -> what becomes of a turn whose caller asks the store.
SERVED, KNOWN_ONLY = "served", "served if known"
DRAINING, LOOKS, SENT_HOME = "draining", "draining, and may look", "moved to home"
RULES = {
    ("all", False, None, False): SERVED,
    ("all", False, None, True): SERVED,
    # The source, before and after the target has opened.
    ("existing", False, None, False): KNOWN_ONLY,
    ("existing", True, None, False): KNOWN_ONLY,
    ("existing", True, None, True): KNOWN_ONLY,
    # The target serves only what the source has sent on.
    ("new", False, "home", False): SENT_HOME,
    ("new", False, "home", True): SERVED,
    # Closed: a fence move's, a split's source, a split's target, a cell that was only told.
    ("none", False, None, False): DRAINING,
    ("none", True, None, False): LOOKS,
    ("none", True, None, True): LOOKS,
    ("none", False, "home", False): SENT_HOME,
    ("none", False, "home", True): DRAINING,
    ("a word of tomorrow", False, None, False): DRAINING,
    ("a word of tomorrow", True, None, True): DRAINING,
    ("a word of tomorrow", False, "home", False): SENT_HOME,
}


@pytest.mark.parametrize(
    ("rule", "answer"), [pytest.param(*one, id=" ".join(map(str, one[0]))) for one in RULES.items()]
)
def test_each_entry_answers_a_turn_by_one_rule(
    fence: Fence, rule: tuple[str, bool, str | None, bool], answer: str
) -> None:
    accepts, split, home_cell, sent_on = rule
    fence.apply(policy(2, entry("acme", accepts=accepts, split=split, home_cell=home_cell)))
    came_of = ""
    try:
        with fence.enter("acme", "e1.10", sent_on=sent_on, asks_store=True) as turn:
            came_of = KNOWN_ONLY if turn.known_only else SERVED
            assert fence.word().in_flight == {"acme": 1}
    except Draining as refused:
        came_of = DRAINING if refused.source is None else LOOKS
    except Moved as refused:
        came_of = f"moved to {refused.cell}"
    assert came_of == answer
    # Who is refused is not counted; who only looks isn't either, or a 0 would not stay 0.
    assert fence.word().in_flight == {}


@pytest.mark.parametrize("accepts", ["existing", "new", "none"])
@pytest.mark.parametrize(("asked", "refusal"), [("e1.9", Moved), ("e1.11", Behind)])
def test_no_side_of_a_split_serves_another_placement(
    fence: Fence, accepts: str, asked: str, refusal: type[RetryLater]
) -> None:
    home = None if accepts == "existing" else "home"
    fence.apply(policy(2, entry("acme", accepts=accepts, split=home is None, home_cell=home)))
    for sent_on in (False, True):
        with (
            pytest.raises(refusal) as refused,
            fence.enter("acme", asked, sent_on=sent_on, asks_store=True),
        ):
            pass
        if isinstance(refused.value, Moved):
            assert refused.value.cell == (home or "one")


def test_a_mark_without_the_placement_that_set_it_says_nothing(fence: Fence) -> None:
    fence.apply(policy(2, entry("acme", accepts="new", home_cell="home")))
    with pytest.raises(ValueError, match="carries the placement"):
        fence.enter("acme", sent_on=True, asks_store=True).__enter__()
    assert fence.word().in_flight == {}


def test_a_tombstone_names_the_cell(fence: Fence) -> None:
    fence.apply(policy(2, entry("acme", accepts="moved", moved_to="two")))
    with pytest.raises(Moved) as refused, fence.enter("acme"):
        pass
    assert refused.value.cell == "two"


def test_an_unknown_tenant_is_behind_and_leaves_no_trace(fence: Fence) -> None:
    with pytest.raises(Behind) as refused, fence.enter("nobody"):
        pass
    assert refused.value.retry_after_seconds == 1
    assert fence.word().in_flight == {}


@pytest.mark.parametrize(
    ("asked", "refusal"),
    [
        ("e1.9", Moved),  # placed anew since: the caller's feed is old
        ("e1.11", Behind),  # we have not heard of it
        ("e2.1", Behind),  # of another epoch: nobody can say which is older
    ],
)
def test_another_placement_than_ours_is_refused(
    fence: Fence, asked: str, refusal: type[RetryLater]
) -> None:
    with pytest.raises(refusal), fence.enter("acme", asked):
        pass
    assert fence.word().in_flight == {}


def test_our_own_placement_is_served(fence: Fence) -> None:
    with fence.enter("acme", "e1.10"):
        pass


def test_an_old_placement_is_told_to_ask_here_again(fence: Fence) -> None:
    with pytest.raises(Moved) as refused, fence.enter("acme", "e1.9"):
        pass
    assert refused.value.cell == "one"


def test_who_knows_of_a_later_move_than_our_tombstone_is_behind(fence: Fence) -> None:
    fence.apply(policy(2, entry("acme", accepts="moved", moved_to="two")))
    with pytest.raises(Behind), fence.enter("acme", "e1.11"):
        pass


def test_what_is_no_placement_version_is_the_callers_mistake(fence: Fence) -> None:
    with pytest.raises(ValueError, match="is no version"), fence.enter("acme", "latest"):
        pass
    assert fence.word().in_flight == {}


# --- lease ----------------------------------------------------------------------------------


def test_nothing_is_served_before_a_policy(clock: DrivenClock) -> None:
    fence = Fence(cell="one", longest_turn_seconds=60, clock=clock)
    fence.lease(math.inf)
    with pytest.raises(NotReady), fence.enter("acme"):
        pass


def test_nothing_starts_from_the_moment_the_lease_is_over(fence: Fence, clock: DrivenClock) -> None:
    fence.lease(clock.at + 10)
    clock.advance(9.999)
    with fence.enter("acme"):
        clock.advance(0.001)
        with pytest.raises(NotReady), fence.enter("acme"):
            pass
        assert fence.word().in_flight == {"acme": 1}


def test_a_lease_that_ran_out_is_not_renewed(fence: Fence, clock: DrivenClock) -> None:
    fence.lease(clock.at + 10)
    clock.advance(10)
    assert not fence.renew(clock.at + 900)
    assert fence.lapsed


def test_an_older_renewal_does_not_shorten_the_lease(fence: Fence, clock: DrivenClock) -> None:
    fence.lease(clock.at + 100)
    assert fence.renew(clock.at + 50)
    clock.advance(99)
    assert not fence.lapsed


def test_dropping_the_policy_keeps_the_counts(fence: Fence) -> None:
    with fence.enter("acme"):
        fence.drop()
        assert fence.word().in_flight == {"acme": 1}
        assert fence.word().applied is None
        with pytest.raises(NotReady), fence.enter("acme"):
            pass


def test_who_is_leaving_lets_nobody_in(fence: Fence) -> None:
    fence.close()
    with pytest.raises(NotReady), fence.enter("acme"):
        pass
    assert not fence.serving


# --- the word -------------------------------------------------------------------------------


def test_older_turns_are_those_from_before_the_entry_changed(fence: Fence) -> None:
    with ExitStack() as older, ExitStack() as newer:
        older.enter_context(fence.enter("acme"))
        fence.apply(policy(2, entry("acme", runner_generation=2)))
        newer.enter_context(fence.enter("acme"))
        assert fence.word().in_flight == {"acme": 2}
        assert fence.word().in_flight_older == {"acme": 1}
        older.close()
        assert fence.word().in_flight == {"acme": 1}
        assert fence.word().in_flight_older == {}


def test_an_entry_that_did_not_change_makes_no_turn_older(fence: Fence) -> None:
    with fence.enter("acme"):
        fence.apply(policy(2, entry("acme"), entry("bolt", accepts="none")))
        fence.drop()
        fence.apply(policy(3, entry("acme")))
        assert fence.word().in_flight_older == {}


def test_an_entry_that_changed_while_no_policy_was_held_makes_turns_older(fence: Fence) -> None:
    with fence.enter("acme"):
        fence.drop()
        fence.apply(policy(3, entry("acme", accepts="none")))
        assert fence.word().in_flight_older == {"acme": 1}


def test_the_last_turn_of_a_fenced_tenant_asks_for_a_report(fence: Fence, said: list[str]) -> None:
    with fence.enter("acme"):
        with fence.enter("acme"):
            fence.apply(policy(2, entry("acme", accepts="none")))
        assert said == []
    assert said == ["drained"]


def test_the_last_older_turn_asks_for_a_report_in_a_split(fence: Fence, said: list[str]) -> None:
    with ExitStack() as first, fence.enter("acme"):
        first.enter_context(fence.enter("acme"))
        fence.apply(policy(2, entry("acme", accepts="existing")))
        first.close()
        assert said == []
    assert said == ["drained"]


@pytest.mark.parametrize("accepts", ["existing", "new"])
def test_a_split_that_serves_asks_for_no_report_of_each_turn(
    fence: Fence, said: list[str], accepts: str
) -> None:
    fence.apply(policy(2, entry("acme", accepts=accepts)))
    for _ in range(3):
        with fence.enter("acme", "e1.10", sent_on=True, asks_store=True):
            pass
    assert said == []


def test_a_turn_from_before_two_changes_is_still_older(fence: Fence) -> None:
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(fence.enter("acme"))
        fence.apply(policy(2, entry("acme", accepts="existing")))
        second.enter_context(fence.enter("acme", asks_store=True))
        assert fence.word().in_flight_older == {"acme": 1}
        fence.apply(policy(3, entry("acme", accepts="existing", split=True)))
        # Now both are: the word errs on the side of waiting.
        assert fence.word().in_flight_older == {"acme": 2}
        first.close()
        assert fence.word().in_flight_older == {"acme": 1}


def test_nobody_waits_for_the_end_of_a_turn_that_no_fence_concerns(
    fence: Fence, said: list[str]
) -> None:
    with fence.enter("acme"):
        pass
    assert said == []


def test_a_refused_turn_asks_for_no_report(fence: Fence, said: list[str]) -> None:
    fence.apply(policy(2, entry("acme", accepts="none")))
    with pytest.raises(Draining), fence.enter("acme"):
        pass
    assert said == []


def test_waiting_until_empty_says_whether_it_is(fence: Fence) -> None:
    assert fence.wait_until_empty(0)
    with fence.enter("acme"):
        assert not fence.wait_until_empty(0)


# --- races ----------------------------------------------------------------------------------


class Between:
    """A lock that lets something happen after each of its critical sections."""

    def __init__(self, lock: threading.Lock, happens: Callable[[], None]) -> None:
        self._lock = lock
        self._happens = happens
        self._busy = False

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if not self._busy:
            self._busy = True
            try:
                self._happens()
            finally:
                self._busy = False


def test_no_turn_slips_in_between_the_count_and_the_version_of_a_word(fence: Fence) -> None:
    entered = ExitStack()
    steps = iter(
        [
            lambda: entered.enter_context(fence.enter("acme")),
            lambda: fence.apply(policy(2, entry("acme", accepts="none"))),
        ]
    )

    def happens() -> None:
        for step in steps:
            step()

    fence._lock = Between(fence._lock, happens)  # type: ignore[assignment]
    word = fence.word()
    with entered:
        # Torn apart it would say version 2 with the count from before: drained, with a turn.
        assert word.applied == Version("e1", 1) or word.in_flight == {"acme": 1}


def test_no_policy_slips_in_between_looking_at_the_phase_and_being_counted(fence: Fence) -> None:
    words = []

    def happens() -> None:
        fence.apply(policy(2, entry("acme", accepts="none")))
        words.append(fence.word())

    fence._lock = Between(fence._lock, happens)  # type: ignore[assignment]
    with fence.enter("acme"):
        # Looked at first and counted afterwards, this turn would run behind a word of "drained".
        assert [word.in_flight for word in words] == [{"acme": 1}]


def test_a_request_between_the_phase_change_and_the_drain_check_is_refused(fence: Fence) -> None:
    late: list[str] = []

    def request() -> None:
        try:
            with fence.enter("acme"):
                late.append("served")
        except Draining:
            late.append("refused")

    with fence.enter("acme"):
        fence.apply(policy(2, entry("acme", accepts="none")))
        request()
        assert fence.word().in_flight == {"acme": 1}
    request()
    assert fence.word().in_flight == {}
    assert late == ["refused", "refused"]


def test_many_threads_never_break_a_proof(fence: Fence) -> None:
    """Turns enter and leave from six threads while the fence opens and closes.

    Whenever a word says "version v, nobody inside", no turn may be admitted before the
    policy after v is applied. Each turn notes itself while it is inside.
    """
    inside: dict[object, None] = {}
    over = threading.Event()
    served = refused = 0

    def client() -> None:
        nonlocal served, refused
        while not over.is_set():
            me = object()
            try:
                with fence.enter("acme"):
                    inside[me] = None
                    served += 1
                    del inside[me]
            except Draining:
                refused += 1

    threads = [threading.Thread(target=client) for _ in range(6)]
    for thread in threads:
        thread.start()
    try:
        for number in range(2, 302):
            closed = number % 2 == 0
            fence.apply(policy(number, entry("acme", accepts="none" if closed else "all")))
            if not closed:
                continue
            for _ in range(1_000_000):
                word = fence.word()
                if not word.in_flight:
                    break
            assert not word.in_flight
            assert word.applied == Version("e1", number)
            for _ in range(20):
                assert not inside
                assert not fence.word().in_flight
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert fence.word().in_flight == {}
    assert served


# Each lets some turns in.
OPEN = ("all", "existing", "new")


class FenceLaws(RuleBasedStateMachine):
    """Any order of turns, policies, drops and leases, against the rules of a fence."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = DrivenClock()
        self.fence = Fence(cell="one", longest_turn_seconds=60, clock=self.clock)
        self.number = 0
        self.accepts: str | None = None
        self.inside: list[tuple[Turn, ExitStack]] = []
        # Set once the fence has said "applied, nobody inside"; cleared when it is opened.
        self.proven = False

    @rule(accepts=st.sampled_from(["all", "none", "existing", "new", "moved"]))
    def apply(self, accepts: str) -> None:
        self.number += 1
        more = {"moved": {"moved_to": "two"}, "new": {"home_cell": "two"}}.get(accepts, {})
        self.fence.apply(policy(self.number, entry("acme", accepts=accepts, **more)))
        self.accepts = accepts
        self.proven = self.proven and accepts not in OPEN

    @rule()
    def drop(self) -> None:
        self.fence.drop()
        self.accepts = None

    @rule(seconds=st.integers(1, 100))
    def lease(self, seconds: int) -> None:
        self.fence.lease(self.clock.at + seconds)

    @rule(seconds=st.integers(1, 100))
    def renew(self, seconds: int) -> None:
        lapsed = self.fence.lapsed
        assert self.fence.renew(self.clock.at + seconds) is not lapsed

    @rule(seconds=st.integers(1, 60))
    def time_passes(self, seconds: int) -> None:
        self.clock.advance(seconds)

    @rule(asks=st.booleans(), sent_on=st.booleans())
    def enter(self, asks: bool, sent_on: bool) -> None:
        stack = ExitStack()
        opens = {"all"} | ({"existing"} if asks else set()) | ({"new"} if sent_on else set())
        may = self.accepts in opens and not self.fence.lapsed
        try:
            turn = stack.enter_context(
                self.fence.enter("acme", "e1.10", sent_on=sent_on, asks_store=asks)
            )
        except RetryLater:
            assert not may
        else:
            assert may
            assert not self.proven
            self.inside.append((turn, stack))

    @precondition(lambda self: self.inside)
    @rule(which=st.integers(0, 100))
    def leave(self, which: int) -> None:
        _, stack = self.inside.pop(which % len(self.inside))
        stack.close()

    @invariant()
    def the_word_is_the_truth(self) -> None:
        word = self.fence.word()
        count = word.in_flight.get("acme", 0)
        assert count == len(self.inside)
        assert word.in_flight_older.get("acme", 0) <= count
        if self.accepts is None:
            assert word.applied is None
        else:
            assert word.applied == Version("e1", self.number)
            if self.accepts not in OPEN:
                # Whoever is inside entered under an older entry.
                assert word.in_flight_older.get("acme", 0) == count
                self.proven = self.proven or not count
            if self.accepts == "existing":
                # Whoever may still give birth entered by another entry, and is told of as older.
                births = sum(not turn.known_only for turn, _ in self.inside)
                assert word.in_flight_older.get("acme", 0) >= births
        if self.proven:
            assert count == 0


FenceLaws.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestFenceLaws = FenceLaws.TestCase
