"""The rule of article 004: the largest limit on top of normal load, under 90 % of the quota."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capacity.domain.headroom import Load, Run, headroom, most, slots_carry

ARTICLE = Run(model_calls=4, seconds=12)
LOADS = st.one_of(st.none(), st.integers(0, 10**7).map(float))


def test_the_nightly_replay_of_the_article() -> None:
    """40 tenants, 1,000 requests a minute; 150 runs of 4 calls are normal; Acme replays 3,000."""
    acme = most(30 / 60, 10, ARTICLE)
    assert (acme.runs_per_minute, acme.load.requests) == (30, 120)
    # 10 slots of 12 s would carry 50: the rate binds, not the bulkhead.
    assert slots_carry(10, 12) == 50
    assert acme.bound_by == "rate"
    assert 3_000 / acme.runs_per_minute == 100
    at = headroom(Load(1_000, None), Load(150 * 4, None), {"acme": acme.load})
    assert (at.bindings[0].peak, at.bindings[0].room) == (720, 900)
    assert at.fits


def test_limits_may_add_up_to_more_than_the_quota() -> None:
    limits = {f"t{n}": Load(120, None) for n in range(40)}
    at = headroom(Load(1_000, None), Load(600, None), limits)
    assert sum(load.requests or 0 for load in limits.values()) > 1_000
    assert at.fits


def test_exactly_ninety_percent_does_not_fit() -> None:
    assert headroom(Load(1_000, None), Load(600, None), {"acme": Load(299, None)}).fits
    at = headroom(Load(1_000, None), Load(600, None), {"acme": Load(300, None)})
    assert not at.fits


def test_the_quota_that_binds_first_is_in_front_and_breakers_are_named() -> None:
    limits = {"acme": Load(120, 900_000), "bolt": Load(400, 10_000), "core": Load(1, 1)}
    at = headroom(Load(1_000, 1_000_000), Load(600, 200_000), limits)
    assert [(one.unit, one.tenant, one.fits) for one in at.bindings] == [
        ("tokens", "acme", False),
        ("requests", "bolt", False),
    ]
    assert [(one.tenant, one.unit) for one in at.breakers] == [
        ("acme", "tokens"),
        ("bolt", "requests"),
    ]
    breaker = at.breaker("bolt")
    assert breaker is not None
    assert (breaker.limit, breaker.peak) == (400, 1_000)
    assert at.breaker("core") is None


def test_a_tenant_without_limits_breaks_every_quota_that_is_known() -> None:
    free = most(None, None, ARTICLE)
    assert (free.runs_per_minute, free.bound_by) == (math.inf, "")
    at = headroom(Load(1_000, None), Load(0, None), {"acme": free.load})
    assert at.breakers[0].peak == math.inf


def test_a_quota_that_nobody_entered_binds_nothing() -> None:
    at = headroom(Load(None, None), Load(600, 600), {"acme": Load(math.inf, math.inf)})
    assert (at.bindings, at.fits) == ((), True)


@pytest.mark.parametrize(
    ("rate", "slots", "run", "runs", "bound_by"),
    [
        (None, 10, ARTICLE, 50, "slots"),
        (2.0, 10, ARTICLE, 50, "slots"),
        # How long a run takes is not known, so slots bound nothing.
        (None, 10, Run(), math.inf, ""),
        (0.5, 10, Run(), 30, "rate"),
        (0.5, None, ARTICLE, 30, "rate"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_whichever_limit_is_smaller_bounds_a_tenant(
    rate: float | None, slots: int | None, run: Run, runs: float, bound_by: str
) -> None:
    at = most(rate, slots, run)
    assert (at.runs_per_minute, at.bound_by) == (runs, bound_by)


def test_a_run_makes_at_least_one_model_call_and_unknown_tokens_are_not_guessed() -> None:
    at = most(1.0, None, Run())
    assert (at.load.requests, at.load.tokens) == (60, None)
    assert most(1.0, None, Run(model_calls=0.2, tokens=500)).load == Load(60, 30_000)


@given(
    quota=st.integers(1, 10**7).map(float),
    normal=LOADS,
    limits=st.dictionaries(st.sampled_from("abcdef"), LOADS, max_size=6),
)
def test_it_fits_only_if_each_single_limit_fits(
    quota: float, normal: float | None, limits: dict[str, float | None]
) -> None:
    at = headroom(
        Load(quota, None),
        Load(normal, None),
        {name: Load(limit, None) for name, limit in limits.items()},
    )
    broken = {
        name for name, limit in limits.items() if limit and (normal or 0) + limit >= quota * 0.9
    }
    assert {one.tenant for one in at.breakers} == broken
    assert at.fits == (not broken and (normal or 0) < quota * 0.9)
