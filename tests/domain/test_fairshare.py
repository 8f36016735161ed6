"""Water-filling: the article's cases, its laws, and a slow reference that pours drop by drop."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capacity.domain.fairshare import allocate

NAMES = st.sampled_from("abcdefgh")
AMOUNTS = st.one_of(st.just(0.0), st.integers(1, 10**7).map(float))
DEMAND = st.dictionaries(NAMES, AMOUNTS, max_size=8)
WEIGHT = st.dictionaries(NAMES, st.sampled_from([0.0, 0.5, 1.0, 2.0, 10.0]), max_size=8)


def poured(capacity: float, demand: dict[str, float], weight: dict[str, float]) -> dict[str, float]:
    """Raise everybody's level together until the next is full, and again."""
    parts = dict.fromkeys(demand, 0.0)
    for rank in (lambda w: w > 0, lambda w: w == 0):
        of = {n: weight.get(n, 1.0) or 1.0 for n in demand if rank(weight.get(n, 1.0))}
        open_ = {name for name in of if demand[name] > 0}
        while open_ and capacity > 1e-9:
            step = min((demand[n] - parts[n]) / of[n] for n in open_)
            step = min(step, capacity / sum(of[n] for n in open_))
            for name in open_:
                parts[name] += step * of[name]
                capacity -= step * of[name]
            open_ = {n for n in open_ if demand[n] - parts[n] > 1e-6}
    return parts


@given(capacity=AMOUNTS, demand=DEMAND, weight=WEIGHT)
def test_it_agrees_with_pouring_drop_by_drop(
    capacity: float, demand: dict[str, float], weight: dict[str, float]
) -> None:
    parts = allocate(capacity, demand, weight)
    slow = poured(capacity, demand, weight)
    assert parts.keys() == demand.keys()
    for name, part in parts.items():
        assert math.isclose(part, slow[name], rel_tol=1e-6, abs_tol=1e-3)


@given(capacity=AMOUNTS, demand=DEMAND, weight=WEIGHT)
def test_nobody_gets_more_than_they_ask_for_and_nothing_is_wasted(
    capacity: float, demand: dict[str, float], weight: dict[str, float]
) -> None:
    parts = allocate(capacity, demand, weight)
    assert all(0 <= parts[name] <= demand[name] for name in demand)
    total = min(capacity, sum(demand.values()))
    assert math.isclose(sum(parts.values()), total, rel_tol=1e-9, abs_tol=1e-6)


@given(capacity=AMOUNTS, demand=DEMAND, weight=WEIGHT)
def test_whoever_gets_less_than_they_ask_for_is_at_the_water_level(
    capacity: float, demand: dict[str, float], weight: dict[str, float]
) -> None:
    parts = allocate(capacity, demand, weight)
    weights = {name: weight.get(name, 1.0) for name in demand}
    for one in demand:
        if not weights[one] or parts[one] >= demand[one] * (1 - 1e-9):
            continue
        level = parts[one] / weights[one]
        for other in demand:
            if weights[other]:
                assert parts[other] / weights[other] <= level * (1 + 1e-9) + 1e-9
            else:
                # Weight 0 gets what nobody with a weight wants.
                assert parts[other] <= 1e-6


@given(capacity=AMOUNTS, demand=DEMAND, weight=WEIGHT)
def test_the_order_of_names_changes_nothing(
    capacity: float, demand: dict[str, float], weight: dict[str, float]
) -> None:
    turned = dict(reversed(demand.items()))
    assert allocate(capacity, turned, weight) == allocate(capacity, demand, weight)


def test_the_articles_two_cases_are_exact() -> None:
    demand = {"large": 2.5e6, "medium": 0.6e6, "small": 0.2e6, "idle": 0.0}
    parts = allocate(3.5e6, demand, {})
    assert parts == demand
    assert 3.5e6 - sum(parts.values()) == 200_000
    busy = {**demand, "second": 2.5e6}
    assert allocate(3.5e6, busy, {}) == {
        "large": 1_350_000,
        "medium": 600_000,
        "small": 200_000,
        "idle": 0,
        "second": 1_350_000,
    }


def test_edges_have_an_answer() -> None:
    assert allocate(0, {"a": 5.0}, {}) == {"a": 0}
    assert allocate(9, {}, {}) == {}
    assert allocate(9, {"a": 5.0, "b": 9.0}, {"a": 0.0, "b": 0.0}) == {"a": 4.5, "b": 4.5}
    assert allocate(9, {"a": 5.0, "b": 6.0}, {"a": 0.0}) == {"a": 3, "b": 6}
    assert allocate(9, {"a": math.inf, "b": 1.0}, {"a": 3.0}) == {"a": 8, "b": 1}


@pytest.mark.parametrize(
    ("capacity", "demand", "weight"),
    [
        (-1, {}, {}),
        (math.nan, {}, {}),
        (1, {"a": -1.0}, {}),
        (1, {"a": math.nan}, {}),
        (1, {"a": 1.0}, {"a": -1.0}),
    ],
    ids=repr,
)
def test_what_can_not_be_divided_is_an_error(
    capacity: float, demand: dict[str, float], weight: dict[str, float]
) -> None:
    with pytest.raises(ValueError, match="divided"):
        allocate(capacity, demand, weight)
