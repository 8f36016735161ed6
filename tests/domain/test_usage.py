"""Days of every time zone, sums, and what a difference means."""

from __future__ import annotations

import zoneinfo
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capacity.domain.reconciling import NOTHING, Numbers, judge
from capacity.domain.usage import (
    MOST,
    REASONS,
    Counts,
    bounds,
    day_of,
    differs_enough,
    next_midnight,
)
from tenants.domain.words import FORMULA, harmless

# Those that a system has under its own names are no zones of any place.
ZONES = sorted(zone for zone in zoneinfo.available_timezones() if zone != "localtime")
zones = st.sampled_from(ZONES)
moments = st.datetimes(
    min_value=datetime(1990, 1, 1),
    max_value=datetime(2040, 1, 1),
    timezones=st.just(UTC),
)
TICK, HOUR = timedelta(microseconds=1), timedelta(hours=1)
counts = st.builds(
    Counts,
    turns=st.integers(0, MOST),
    model_calls=st.integers(0, 10),
    tokens=st.integers(0, 10**12),
    refused=st.dictionaries(st.sampled_from([*REASONS, "made up"]), st.integers(0, 10**9)),
    would_refuse=st.dictionaries(st.sampled_from([*REASONS, "made up"]), st.integers(0, 9)),
)


@given(now=moments, zone=zones)
def test_a_budget_starts_anew_at_the_first_moment_of_another_day(now: datetime, zone: str) -> None:
    at = next_midnight(now, zone)
    assert now < at <= now + timedelta(hours=50)
    assert day_of(at, zone) > day_of(now, zone)
    assert day_of(at - TICK, zone) == day_of(now, zone)


@given(now=moments, zone=zones)
def test_a_day_holds_the_moments_that_are_in_it(now: datetime, zone: str) -> None:
    begins, ends = bounds(day_of(now, zone), zone)
    assert begins <= ends
    # Clocks that are put back over midnight give the last hours of a day twice: three at Casey.
    assert begins <= now < ends + 3 * HOUR


@pytest.mark.parametrize(
    ("zone", "now", "at"),
    [
        ("UTC", "2026-03-02T23:59:59", "2026-03-03T00:00:00"),
        ("UTC", "2026-03-03T00:00:00", "2026-03-04T00:00:00"),
        ("Europe/Berlin", "2026-03-28T23:00:00", "2026-03-29T22:00:00"),
        ("Europe/Berlin", "2026-10-24T22:00:00", "2026-10-25T23:00:00"),
        # Clocks are put forward at midnight: the day begins at 01:00.
        ("Africa/Cairo", "2026-04-23T12:00:00", "2026-04-23T22:00:00"),
        # Put back at 01:00: midnight is passed twice, the day begins at the first.
        ("America/Havana", "2026-10-31T20:00:00", "2026-11-01T04:00:00"),
        # The 30th of December 2011 was left out.
        ("Pacific/Apia", "2011-12-29T20:00:00", "2011-12-30T10:00:00"),
        # Put back at 00:01 to 23:01: in the second hour of the old day midnight comes again.
        ("America/St_Johns", "2010-11-07T03:00:00", "2010-11-07T03:30:00"),
        ("Asia/Kathmandu", "2026-03-02T12:00:00", "2026-03-02T18:15:00"),
    ],
)
def test_midnight_is_where_people_have_it(zone: str, now: str, at: str) -> None:
    moment = datetime.fromisoformat(now).replace(tzinfo=UTC)
    assert next_midnight(moment, zone) == datetime.fromisoformat(at).replace(tzinfo=UTC)


@given(parts=st.lists(counts, max_size=6))
def test_sums_do_not_depend_on_the_order(parts: list[Counts]) -> None:
    def total(some: list[Counts]) -> Counts:
        found = Counts()
        for one in some:
            found += one
        return found

    assert total(parts) == total(parts[::-1])
    assert set(total(parts).refused) <= set(REASONS)
    assert total(parts).turns <= MOST


@given(had=st.sets(st.text()), now=st.sets(st.text()))
def test_a_list_that_is_the_same_is_never_published_anew(had: set[str], now: set[str]) -> None:
    assert not differs_enough(had, sorted(had))
    assert differs_enough(had, now) == differs_enough(now, had)


def test_a_tenth_of_a_long_list_may_be_out_of_date() -> None:
    had = [str(number) for number in range(200)]
    assert not differs_enough(had, had[10:] + [f"new-{number}" for number in range(10)])
    assert differs_enough(had, had[11:] + [f"new-{number}" for number in range(11)])


numbers = st.builds(Numbers, *[st.integers(0, 1_000)] * 3)


@given(billed=numbers, fresh=numbers)
def test_what_has_just_come_is_explained_and_nothing_else_is(
    billed: Numbers, fresh: Numbers
) -> None:
    assert not judge(billed.plus(fresh), fresh, billed, shifted=False).unexplained
    assert judge(billed, NOTHING, billed, shifted=False).agrees
    # One token more than came, or invoiced without a report.
    more = Numbers(0, 0, 1)
    assert judge(billed.plus(fresh).plus(more), fresh, billed, shifted=False).unexplained
    assert judge(billed, fresh, billed.plus(more), shifted=False).unexplained


@given(text=st.text())
def test_no_text_of_a_file_is_a_formula(text: str) -> None:
    assert not str(harmless(text)).startswith(FORMULA)
