"""The pace that was chosen, and when a slow store gets relief."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from migrations_app.domain import throttle as module
from migrations_app.domain.throttle import (
    IN_A_ROW,
    LEAST_EASE,
    LONGEST_REST,
    Judged,
    Looked,
    Speed,
    backfill_seconds,
    judge,
    late_seconds,
    pace_now,
    rest_seconds,
    sampled,
    spread,
    why,
)

STEPS = [1.0, 0.5, 0.25, 0.125, 0.0625]


def test_docstrings_hold() -> None:
    assert doctest.testmod(module).failed == 0


def test_the_articles_backfill_takes_315_seconds() -> None:
    assert backfill_seconds(12_600, 40) == 315.0
    assert backfill_seconds(500, 40) == 12.5


def test_a_copy_over_three_hours_runs_at_1_17_a_second() -> None:
    assert round(spread(12_600, 3 * 3600), 2) == 1.17


@given(st.integers(1, 10**7), st.floats(1, 10**6), st.floats(0.1, 0.9))
def test_a_finish_time_is_kept_whatever_happened_before(
    left: int, window: float, lost: float
) -> None:
    """Time that is lost on the way is made up: the pace follows from what is left of both."""
    late = pace_now(left=left, per_second=None, window_seconds=window * lost)
    assert late is not None
    assert backfill_seconds(left, late) == pytest.approx(window * lost)


def test_a_finish_time_that_the_present_rate_misses_says_by_how_much() -> None:
    assert late_seconds(12_600, 20, 315) == pytest.approx(315)
    assert late_seconds(12_600, 20, -10) == pytest.approx(630)
    assert late_seconds(12_600, None, 1) == 0


def looked(times: float = 1.0, source: float = 1.0, target: float = 1.0, n: int = 100) -> Looked:
    """A step that took so many times what 10 ms a session and 10 ms a look take."""
    return Looked(1, n, n * 0.01 * times, 0.01 * source, 0.01 * target)


def run(*steps: Looked, ease: float = 1.0) -> list[Judged]:
    found: list[Judged] = []
    speed = Speed()
    for step in steps:
        found.append(judge(speed, ease, step))
        speed, ease = found[-1].speed, found[-1].ease
    return found


def test_a_loaded_store_is_left_alone_step_by_step_and_no_further() -> None:
    found = run(looked(), *[looked(4, source=4)] * (2 * IN_A_ROW * len(STEPS)))
    assert sorted({step.ease for step in found}, reverse=True) == STEPS
    assert found[-1].ease == LEAST_EASE


def test_a_store_that_recovers_gets_the_whole_time_back() -> None:
    slow = [looked(4, target=4)] * (IN_A_ROW * 4)
    found = run(looked(), *slow, *[looked()] * (IN_A_ROW * 4))
    assert found[len(slow)].ease == LEAST_EASE
    assert found[-1].ease == 1.0


def test_larger_sessions_do_not_keep_a_store_that_answers_well_eased() -> None:
    slow = [looked(4, source=4)] * IN_A_ROW
    found = run(looked(), *slow, *[looked(4)] * IN_A_ROW)
    assert [found[len(slow)].ease, found[-1].ease] == [0.5, 1.0]


def test_between_slow_and_fine_nothing_changes() -> None:
    slow = [looked(4, source=4)] * IN_A_ROW
    found = run(looked(), *slow, *[looked(1.6, source=1.6)] * 10)
    assert found[-1].ease == 0.5


def test_a_chunk_of_another_size_is_not_compared_with_large_ones() -> None:
    """Small chunks spend most of their time on what every chunk costs."""
    small = Looked(1, 20, 20 * 0.1, 0.04, 0.01)
    assert [step.ease for step in run(looked(n=500), small, small, small)] == [1.0] * 4


def test_too_few_sessions_say_nothing_until_enough_are_gathered() -> None:
    one = Looked(1, 1, 0.01, 0.01, 0.01)
    found = run(*[one] * 20)
    assert [step.thin for step in found] == [True] * 19 + [False]


def test_one_lucky_moment_does_not_make_the_rest_look_slow() -> None:
    found = run(looked(), looked(0.2, 0.2, 0.2), *[looked()] * 10)
    assert {step.ease for step in found} == {1.0}


def measures() -> st.SearchStrategy[Looked]:
    seconds = st.floats(1e-4, 60)
    return st.builds(Looked, st.integers(1, 8), st.integers(1, 4000), seconds, seconds, seconds)


@given(st.lists(measures(), max_size=30))
def test_the_ease_moves_one_step_at_a_time_whatever_is_measured(steps: list[Looked]) -> None:
    before = 1.0
    for judged in run(*steps):
        assert judged.ease in STEPS
        assert judged.ease / before in (0.5, 1.0, 2.0)
        assert (why(judged, source="a", target="b") == "") == (judged.ease == 1.0)
        assert Speed.of(judged.speed.as_json()) == judged.speed
        before = judged.ease


@given(st.lists(st.floats(0.7, 1.4), min_size=2, max_size=60))
def test_noise_alone_never_eases(times: list[float]) -> None:
    found = run(*(looked(each, each, 1 / each) for each in times))
    assert {step.ease for step in found} == {1.0}


@given(st.floats(0, 1000), st.sampled_from(STEPS))
def test_the_share_of_time_worked_is_the_ease_unless_a_rest_would_be_too_long(
    worked: float, ease: float
) -> None:
    rest = rest_seconds(worked, ease)
    assert 0 <= rest <= LONGEST_REST
    if rest < LONGEST_REST:
        assert worked == pytest.approx((worked + rest) * ease)


def test_a_sample_is_whole_at_500_sessions_and_stays() -> None:
    half = sampled(Speed(), 300, 7.5)
    assert half.sample_rate is None
    whole = sampled(half, 200, 5.0)
    assert whole.sample_rate == 40.0
    assert sampled(whole, 100, 1.0) == whole
