"""When a fence may begin and when it has held (PROTOCOL.md, rules 1, 3 and 5)."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenants.domain.fence import (
    FAST_MS,
    SLOW_MS,
    Facts,
    cadence_ms,
    judge,
    lapses_at,
    waits_for,
)

NOW = datetime(2026, 3, 2, 12, 0, tzinfo=UTC)
MS = timedelta(milliseconds=1)
# Alive, polls fast, has applied version 7 and runs nothing of the tenant.
GOOD = Facts(
    id=1,
    name="one",
    longest_turn_seconds=60,
    lease_until=NOW + timedelta(minutes=15),
    took_over=False,
    polled_at=NOW - 100 * MS,
    reported_at=NOW - 90 * MS,
    poll_after_ms=FAST_MS,
    hurried_at=NOW - 2000 * MS,
    applied_version=7,
    in_flight=0,
    gone=False,
)


def test_a_fence_waits_for_nobody_who_polls_fast() -> None:
    assert waits_for([GOOD], now=NOW) == []


@pytest.mark.parametrize(
    "facts",
    [
        replace(GOOD, polled_at=NOW - 3 * 1.1 * FAST_MS * MS - MS),
        replace(GOOD, poll_after_ms=SLOW_MS, hurried_at=None),
        # It was told the fast cadence just now, by an answer to a slow poll.
        replace(GOOD, hurried_at=GOOD.polled_at),
        replace(GOOD, hurried_at=NOW),
    ],
    ids=["silent for three polls", "slow", "told by its last poll", "told after its last poll"],
)
def test_a_fence_waits_for_whoever_would_hear_of_it_late(facts: Facts) -> None:
    [word] = waits_for([GOOD, facts], now=NOW)
    assert (word.id, word.state) == (facts.id, "missing")


def test_silence_is_measured_in_polls_of_the_instance() -> None:
    assert waits_for([replace(GOOD, polled_at=NOW - 3 * 1.1 * FAST_MS * MS)], now=NOW) == []


@pytest.mark.parametrize(
    "facts",
    [
        replace(GOOD, polled_at=None),
        replace(GOOD, gone=True),
        replace(GOOD, lease_until=NOW - timedelta(seconds=65)),
    ],
    ids=["never asked for a policy", "gone", "lapsed"],
)
def test_who_can_not_write_counts_neither_before_a_fence_nor_in_its_proof(facts: Facts) -> None:
    silent = replace(facts, applied_version=0, in_flight=3, hurried_at=None)
    assert waits_for([silent], now=NOW) == []
    assert judge([silent], 7, now=NOW).drained


def test_one_that_took_running_turns_over_counts_before_its_first_poll() -> None:
    anew = replace(GOOD, took_over=True, polled_at=None, hurried_at=None, applied_version=0)
    assert [word.state for word in waits_for([anew], now=NOW)] == ["missing"]
    assert not judge([anew], 7, now=NOW).drained


def test_a_lapse_is_lease_and_margin_and_longest_turn() -> None:
    edge = lapses_at(GOOD.lease_until, 60)
    assert edge == GOOD.lease_until + timedelta(seconds=65)
    behind = replace(GOOD, applied_version=0)
    assert judge([behind], 7, now=edge - MS).lapsed == ()
    assert not judge([behind], 7, now=edge - MS).drained
    assert judge([behind], 7, now=edge).lapsed == (1,)
    assert judge([behind], 7, now=edge).drained


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        (replace(GOOD, applied_version=6), "missing"),
        (replace(GOOD, in_flight=1), "draining"),
        (replace(GOOD, applied_version=8), "closed"),
        (GOOD, "closed"),
    ],
)
def test_only_applied_and_empty_is_closed(facts: Facts, state: str) -> None:
    proof = judge([facts], 7, now=NOW)
    assert [word.state for word in proof.instances] == [state]
    assert proof.drained == (state == "closed")
    assert proof.in_flight == facts.in_flight


def test_a_cell_without_instances_is_drained() -> None:
    assert judge([], 7, now=NOW).drained


def test_the_cadence_is_fast_until_its_end() -> None:
    assert cadence_ms(None, NOW) == SLOW_MS
    assert cadence_ms(NOW + MS, NOW) == FAST_MS
    assert cadence_ms(NOW, NOW) == SLOW_MS


ANY = st.builds(
    Facts,
    id=st.integers(1, 9),
    name=st.just("x"),
    longest_turn_seconds=st.integers(0, 600),
    lease_until=st.integers(-1000, 1000).map(lambda s: NOW + timedelta(seconds=s)),
    took_over=st.booleans(),
    polled_at=st.none() | st.just(NOW),
    reported_at=st.none(),
    poll_after_ms=st.just(FAST_MS),
    hurried_at=st.none(),
    applied_version=st.integers(5, 9),
    in_flight=st.integers(0, 2),
    gone=st.booleans(),
)


@given(st.lists(ANY, max_size=6), st.lists(ANY, max_size=3))
def test_more_instances_never_make_a_proof_easier(some: list[Facts], more: list[Facts]) -> None:
    if judge([*some, *more], 7, now=NOW).drained:
        assert judge(some, 7, now=NOW).drained


@given(st.lists(ANY, max_size=6))
def test_a_proof_holds_exactly_if_all_who_could_write_have_closed(some: list[Facts]) -> None:
    could = [
        one
        for one in some
        if not one.gone
        and (one.took_over or one.polled_at is not None)
        and one.lease_until + timedelta(seconds=5 + one.longest_turn_seconds) > NOW
    ]
    holds = all(one.applied_version >= 7 and one.in_flight == 0 for one in could)
    assert judge(some, 7, now=NOW).drained == holds
