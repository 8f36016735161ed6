"""The fence's arithmetic, by the article's worked example."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from migrations_app.domain import quote as module
from migrations_app.domain.quote import (
    POLL_SECONDS,
    PUBLISH_SECONDS,
    Quote,
    quote,
)

OWN = POLL_SECONDS + PUBLISH_SECONDS


def test_docstrings_hold() -> None:
    assert doctest.testmod(module).failed == 0


def test_the_articles_fence_takes_105_seconds() -> None:
    article = quote(
        changed=900, compare=900, users=0, running_seconds=60, copy_rate=40, verify_rate=40
    )
    parts = {part.name: part.expected for part in article.parts}
    assert (parts["delta"], parts["verify"]) == (22.5, 22.5)
    assert article.expected - OWN == pytest.approx(105)


def test_comparing_both_sides_in_turn_takes_127_and_a_half() -> None:
    in_turn = quote(
        changed=900, compare=900, users=0, running_seconds=60, copy_rate=40, verify_rate=20
    )
    assert in_turn.expected - OWN == pytest.approx(127.5)


def test_comparing_the_clean_sessions_inside_the_fence_would_add_292_seconds() -> None:
    lazy = quote(changed=900, compare=12_600, users=0, copy_rate=40, verify_rate=40)
    eager = quote(changed=900, compare=900, users=0, copy_rate=40, verify_rate=40)
    assert lazy.expected - eager.expected == pytest.approx(292.5)


def test_worst_waits_for_running_turns_as_long_as_the_bound_allows() -> None:
    idle = quote(changed=0, compare=0, users=0, drain_bound_seconds=60)
    assert idle.worst - idle.expected == pytest.approx(60)


def test_a_turn_that_may_run_long_does_not_outlast_the_bound() -> None:
    busy = quote(changed=0, compare=0, users=0, running_seconds=300, drain_bound_seconds=60)
    assert busy.worst - OWN == pytest.approx(60)
    assert busy.expected == busy.worst


def counts() -> st.SearchStrategy[int]:
    return st.integers(0, 10_000_000)


def rates() -> st.SearchStrategy[float | None]:
    return st.none() | st.floats(0.01, 1e6)


@given(counts(), counts(), counts(), st.floats(0, 3600), st.floats(1, 3600), rates(), rates())
def test_worst_is_never_below_expected(
    changed: int,
    compare: int,
    users: int,
    running: float,
    bound: float,
    copying: float | None,
    verifying: float | None,
) -> None:
    given_quote: Quote = quote(
        changed=changed,
        compare=compare,
        users=users,
        running_seconds=running,
        drain_bound_seconds=bound,
        copy_rate=copying,
        verify_rate=verifying,
    )
    assert given_quote.worst >= given_quote.expected >= OWN
