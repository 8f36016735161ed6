"""Limits of tenants in one process: shares that come, age and go, and who is let in by them."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime import Entry, PolicyClient, TenantThrottled, TokenBucket, Usage
from agent_runtime.admission import (
    FIRST_CALL_TOKENS,
    GRANT_RETRY_SECONDS,
    Admission,
    Share,
    Shares,
    budget_spent,
)
from tests.runtime.wire import ControlPlane, DrivenClock, entry, limits, make_client, share


@pytest.fixture
def usage(clock: DrivenClock) -> Usage:
    return Usage(clock)


@pytest.fixture
def shares(usage: Usage, clock: DrivenClock) -> Shares:
    return Shares(usage, clock)


@pytest.fixture
def admission(shares: Shares, usage: Usage, clock: DrivenClock) -> Admission:
    return Admission(shares, usage, clock)


def of(tenant: str = "acme", trial: dict[str, Any] | None = None, **scope: Any) -> Entry:
    return Entry.parse(entry(tenant, scope=limits(**scope), trial=trial and limits(**trial)))


def grant(shares: Shares, clock: DrivenClock, number: int = 1, **tenants: dict[str, Any]) -> None:
    parsed = {tenant: Share.parse(one) for tenant, one in tenants.items()}
    shares.apply(number, parsed, sent_at=clock.boottime(), seconds=30)


def refusal(admission: Admission, entry: Entry) -> TenantThrottled | None:
    """Run once, at once; return why not."""
    try:
        with admission.admit(entry):
            return None
    except TenantThrottled as refused:
        return refused


def reason(admission: Admission, entry: Entry) -> str:
    refused = refusal(admission, entry)
    return refused.reason if refused else ""


@contextmanager
def runs(admission: Admission, entry: Entry, count: int) -> Iterator[None]:
    with ExitStack() as inside:
        for _ in range(count):
            inside.enter_context(admission.admit(entry))
        yield


# --- the bucket -----------------------------------------------------------------------------


@given(
    rate=st.floats(0.01, 1_000),
    burst=st.floats(1, 100),
    steps=st.lists(st.floats(0, 10), max_size=60),
)
def test_a_bucket_never_gives_more_than_its_burst_and_what_came_in(
    rate: float, burst: float, steps: list[float]
) -> None:
    bucket = TokenBucket(rate=rate, burst=burst, level=burst, at=0)
    now, taken = 0.0, 0
    for step in steps:
        now += step
        for _ in range(20):
            taken += bucket.take(1, now)
    assert taken <= burst + rate * now + 1e-6


@given(rate=st.floats(0.01, 100), level=st.floats(-50, 1))
def test_what_a_bucket_says_to_wait_is_enough_and_no_more(rate: float, level: float) -> None:
    bucket = TokenBucket(rate=rate, burst=1, level=level, at=0)
    wait = bucket.wait(1, 0)
    again = TokenBucket(rate=rate, burst=1, level=level, at=0)
    assert not again.take(1, wait * 0.99 - 1e-6) or wait < 1e-6
    assert bucket.take(1, wait * (1 + 1e-9) + 1e-9)


def test_a_bucket_that_gains_nothing_never_has_more() -> None:
    bucket = TokenBucket(rate=0, burst=1, level=0.5, at=0)
    assert bucket.wait(1, 1e9) == math.inf


def test_a_clock_that_seems_to_step_back_gives_nothing() -> None:
    bucket = TokenBucket(rate=1, burst=10, level=0, at=100)
    bucket.refill(90)
    assert (bucket.level, bucket.at) == (0, 100)


# --- rate first, then the number at once ------------------------------------------------------


def test_a_tenant_without_limits_needs_no_share(admission: Admission) -> None:
    with runs(admission, of(), 500):
        assert admission.running() == {"acme": 500}
    assert admission.running() == {}


@pytest.mark.parametrize(
    ("scope", "why"),
    [
        ({"runs_per_second": 5.0}, "rate"),
        ({"max_concurrent_runs": 5}, "concurrency"),
        ({"runs_per_second": 5.0, "max_concurrent_runs": 5}, "rate"),
    ],
)
def test_a_limit_without_a_share_refuses_until_the_first_grants(
    admission: Admission, shares: Shares, clock: DrivenClock, scope: dict[str, Any], why: str
) -> None:
    refused = refusal(admission, of(**scope))
    assert refused is not None
    assert (refused.tenant, refused.reason) == ("acme", why)
    assert refused.retry_after_seconds == GRANT_RETRY_SECONDS
    grant(shares, clock, acme=share(5.0, 5))
    assert refusal(admission, of(**scope)) is None


def test_runs_begin_at_the_rate_of_the_share(
    admission: Admission, shares: Shares, clock: DrivenClock
) -> None:
    tenant = of(runs_per_second=4.0)
    grant(shares, clock, acme=share(2.0))
    begun = 0
    for _ in range(2_000):
        clock.advance(0.01)
        begun += refusal(admission, tenant) is None
    assert begun == 1 + 20 * 2


def test_a_refused_run_is_told_when_its_bucket_has_one(
    admission: Admission, shares: Shares, clock: DrivenClock
) -> None:
    tenant = of(runs_per_second=1.0)
    grant(shares, clock, acme=share(0.25))
    assert refusal(admission, tenant) is None
    clock.advance(1)
    refused = refusal(admission, tenant)
    assert refused is not None
    assert refused.retry_after_seconds == pytest.approx(3)
    clock.advance(3)
    assert refusal(admission, tenant) is None


def test_no_more_runs_are_inside_than_the_share_says(
    admission: Admission, shares: Shares, clock: DrivenClock
) -> None:
    tenant = of(max_concurrent_runs=8)
    grant(shares, clock, acme=share(None, 3))
    with runs(admission, tenant, 3):
        assert reason(admission, tenant) == "concurrency"
    with runs(admission, tenant, 3):
        pass


def test_rate_is_looked_at_before_the_number_at_once(
    admission: Admission, shares: Shares, clock: DrivenClock
) -> None:
    tenant = of(runs_per_second=1.0, max_concurrent_runs=1)
    grant(shares, clock, acme=share(1.0, 1))
    with runs(admission, tenant, 1):
        assert reason(admission, tenant) == "rate"
        clock.advance(1)
        assert reason(admission, tenant) == "concurrency"


def test_a_run_that_found_no_slot_has_used_no_rate(
    admission: Admission, shares: Shares, clock: DrivenClock
) -> None:
    tenant = of(runs_per_second=1.0, max_concurrent_runs=1)
    grant(shares, clock, acme=share(1.0, 1))
    with runs(admission, tenant, 1):
        clock.advance(1)
        for _ in range(10):
            assert reason(admission, tenant) == "concurrency"
    assert refusal(admission, tenant) is None


def test_the_articles_nightly_replay_takes_a_hundred_minutes(
    admission: Admission, shares: Shares, clock: DrivenClock
) -> None:
    """3,000 tickets of 12 s each as fast as they can be sent: 30 a minute and 10 at once."""
    tenant = of(runs_per_second=0.5, max_concurrent_runs=10)
    grant(shares, clock, acme=share(0.5, 10))
    inside: list[tuple[float, ExitStack]] = []
    begun, most, reasons = 0, 0, set()
    began_at = clock.boottime()
    while begun < 3_000:
        while inside and inside[0][0] <= clock.boottime():
            inside.pop(0)[1].close()
        permit = ExitStack()
        try:
            permit.enter_context(admission.admit(tenant))
        except TenantThrottled as refused:
            reasons.add(refused.reason)
            shares.extend(sent_at=clock.boottime(), seconds=30)
            clock.advance(0.5)
            continue
        begun += 1
        inside.append((clock.boottime() + 12, permit))
        most = max(most, len(inside))
    minutes = (clock.boottime() - began_at) / 60
    assert minutes == pytest.approx(100, rel=0.01)
    assert 4 * begun / minutes == pytest.approx(120, rel=0.01)
    # The rate binds, not the bulkhead.
    assert (reasons, most) == ({"rate"}, 6)


# --- what a refusal says ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scope", "one", "says"),
    [
        ({"runs_per_second": 4.0}, share(0.0), "may start 4 runs per second (0 in this process)"),
        ({"max_concurrent_runs": 4}, share(None, 0), "may have 4 runs at once (0 in this process)"),
    ],
)
def test_a_refusal_names_the_limit_its_value_and_how_to_get_more(
    admission: Admission,
    shares: Shares,
    clock: DrivenClock,
    scope: dict[str, Any],
    one: dict[str, Any],
    says: str,
) -> None:
    tenant = of(**scope)
    grant(shares, clock, acme=one)
    with pytest.raises(TenantThrottled) as refused, runs(admission, tenant, 2):
        pass
    said = str(refused.value)
    assert said.startswith(f"acme {says}.")
    assert "raise the limit" in said
    assert "the bridge tier" in said
    assert 0 < refused.value.retry_after_seconds <= 60


def test_what_a_tenant_is_offered_fits_its_tier(clock: DrivenClock) -> None:
    offers = {
        tier: str(
            budget_spent(Entry.parse(entry(tier=tier, scope=limits(daily_token_budget=9))), 5)
        )
        for tier in ("pooled", "bridge", "silo")
    }
    assert "bridge tier" in offers["pooled"]
    assert "silo tier" in offers["bridge"]
    assert "tier" not in offers["silo"]


def test_refusals_are_counted_each_and_logged_once_a_minute(
    admission: Admission, usage: Usage, clock: DrivenClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "agent_runtime")
    for _ in range(5):
        refusal(admission, of(runs_per_second=1.0))
    refusal(admission, of("bolt", max_concurrent_runs=1))
    assert [r.getMessage() for r in caplog.records] == [
        "acme: turns are refused (rate)",
        "bolt: turns are refused (concurrency)",
    ]
    assert [line["refused"] for line in usage.take().usage()] == [{"rate": 5}, {"concurrency": 1}]
    clock.advance(60)
    refusal(admission, of(runs_per_second=1.0))
    assert len(caplog.records) == 3


def test_a_turn_that_is_sent_again_and_again_is_demand_once_a_minute(
    admission: Admission, usage: Usage, clock: DrivenClock
) -> None:
    for turn in ("t1", "t2", "t1", "t1", None, None):
        with pytest.raises(TenantThrottled), admission.admit(of(runs_per_second=1.0), turn):
            pass
    [line] = usage.take().usage()
    assert line["refused"] == {"rate": 4}
    clock.advance(60)
    with pytest.raises(TenantThrottled), admission.admit(of(runs_per_second=1.0), "t1"):
        pass
    [line] = usage.take().usage()
    assert line["refused"] == {"rate": 1}


def test_names_of_turns_that_somebody_makes_up_fill_no_memory(
    admission: Admission, usage: Usage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_runtime.usage.MAX_TURN_IDS", 10)
    for number in range(100):
        usage.refused("acme", "rate", "x" * 1_000 + str(number))
    assert len(usage._seen) == 10
    assert usage.take().usage()[0]["refused"] == {"rate": 100}


# --- shares that change -----------------------------------------------------------------------


def test_a_new_share_is_no_refill(admission: Admission, shares: Shares, clock: DrivenClock) -> None:
    tenant = of(runs_per_second=10.0)
    grant(shares, clock, acme=share(0.1))
    begun = 0
    for number in range(2, 50):
        begun += refusal(admission, tenant) is None
        grant(shares, clock, number, acme=share(0.1 + number % 2 / 100))
    assert begun == 1


def test_a_share_that_wanders_brings_nothing_that_was_not_granted(
    admission: Admission, shares: Shares, clock: DrivenClock
) -> None:
    tenant = of(runs_per_second=10.0)
    begun = 0
    for number in range(0, 40, 2):
        grant(shares, clock, number, acme=share(0.05))
        begun += refusal(admission, tenant) is None
        clock.advance(5)
        grant(shares, clock, number + 1)
        assert reason(admission, tenant) == "rate"
        clock.advance(5)
    # 20 times 5 s at 0.05, and the one that a first grant begins with.
    assert begun <= 1 + 5
    assert begun >= 4


def test_a_slow_share_that_comes_back_late_brings_nothing_either(
    admission: Admission, shares: Shares, clock: DrivenClock
) -> None:
    tenant = of(runs_per_second=1.0)
    grant(shares, clock, acme=share(0.01))
    assert refusal(admission, tenant) is None
    grant(shares, clock, 2)
    clock.advance(90)
    grant(shares, clock, 3)
    grant(shares, clock, 4, acme=share(0.01))
    assert reason(admission, tenant) == "rate"


def test_a_smaller_share_lets_nobody_in_until_enough_have_left(
    admission: Admission, shares: Shares, clock: DrivenClock
) -> None:
    tenant = of(max_concurrent_runs=8)
    grant(shares, clock, acme=share(None, 6))
    with runs(admission, tenant, 2):
        with runs(admission, tenant, 3):
            grant(shares, clock, 2, acme=share(None, 3))
            assert reason(admission, tenant) == "concurrency"
        assert refusal(admission, tenant) is None


def test_an_edit_that_lowers_a_limit_holds_before_it_is_divided_anew(
    admission: Admission, shares: Shares, clock: DrivenClock
) -> None:
    grant(shares, clock, acme=share(10.0, 8))
    lower = of(max_concurrent_runs=2, runs_per_second=1.0)
    clock.advance(10)
    with runs(admission, lower, 1):
        clock.advance(1)
        with runs(admission, lower, 1):
            clock.advance(1)
            assert reason(admission, lower) == "concurrency"
    begun = 0
    for _ in range(1_000):
        clock.advance(0.01)
        begun += refusal(admission, lower) is None
    assert begun == pytest.approx(10, abs=1)


def test_a_lower_limit_holds_beside_calls_that_take_tokens(
    admission: Admission, shares: Shares, clock: DrivenClock
) -> None:
    grant(shares, clock, acme=share(20.0, None, 6_000_000.0))
    lower = of(runs_per_second=1.0)
    begun = 0
    for _ in range(1_000):
        clock.advance(0.01)
        begun += refusal(admission, lower) is None
        shares.settle("acme", shares.reserve(lower), 1)
    assert begun == pytest.approx(10, abs=1)


def test_a_limit_that_was_lifted_holds_nobody(
    admission: Admission, shares: Shares, clock: DrivenClock
) -> None:
    grant(shares, clock, acme=share(0.1, 1))
    with runs(admission, of(), 50):
        pass


@pytest.mark.parametrize("limit", ["runs_per_second", "max_concurrent_runs"])
def test_a_limit_that_no_share_divides_yet_refuses_until_it_does(
    admission: Admission, shares: Shares, clock: DrivenClock, limit: str
) -> None:
    """Each instance would hold all of it until the next grants, and all of them too much."""
    other = ({"runs_per_second", "max_concurrent_runs"} - {limit}).pop()
    grant(shares, clock, acme=share(**{other: 10}))
    edited = of(runs_per_second=10.0, max_concurrent_runs=10)
    refused = refusal(admission, edited)
    assert refused is not None
    assert refused.reason == {"runs_per_second": "rate"}.get(limit, "concurrency")
    assert "has not been told its share" in str(refused)
    assert refused.retry_after_seconds == GRANT_RETRY_SECONDS
    grant(shares, clock, 2, acme=share(5.0, 5))
    assert refusal(admission, edited) is None


def test_a_limit_that_was_raised_holds_as_it_was_until_it_is_divided_anew(
    admission: Admission, shares: Shares, clock: DrivenClock
) -> None:
    grant(shares, clock, acme=share(None, 2))
    raised = of(max_concurrent_runs=100)
    with runs(admission, raised, 2):
        assert reason(admission, raised) == "concurrency"


def test_a_share_of_nothing_begins_nothing(
    admission: Admission, shares: Shares, clock: DrivenClock
) -> None:
    """Or a limit of one run a minute would begin one in each of a hundred instances."""
    tenant = of(runs_per_second=1.0)
    grant(shares, clock, acme=share(0.0))
    assert reason(admission, tenant) == "rate"
    grant(shares, clock, 2, acme=share(1.0))
    assert reason(admission, tenant) == "rate"
    clock.advance(1)
    assert refusal(admission, tenant) is None


# --- cut off ----------------------------------------------------------------------------------


def test_without_a_fresh_answer_the_safe_part_holds(
    admission: Admission, shares: Shares, clock: DrivenClock
) -> None:
    slots, rate = of("acme", max_concurrent_runs=10), of("bolt", runs_per_second=10.0)
    grant(shares, clock, acme=share(None, 5), bolt=share(4.0))
    clock.advance(29.9)
    with runs(admission, slots, 4):
        pass
    clock.advance(0.1)
    assert not shares.fresh
    with runs(admission, slots, 2):
        assert reason(admission, slots) == "concurrency"
    begun = 0
    for _ in range(1_000):
        clock.advance(0.01)
        begun += refusal(admission, rate) is None
    assert begun == pytest.approx(10 * 2, abs=2)


def test_an_answer_that_changes_nothing_lets_shares_hold_on(
    admission: Admission, shares: Shares, clock: DrivenClock
) -> None:
    tenant = of(max_concurrent_runs=10)
    grant(shares, clock, acme=share(None, 4))
    for _ in range(20):
        clock.advance(20)
        shares.extend(sent_at=clock.boottime(), seconds=30)
        with runs(admission, tenant, 4):
            pass


@pytest.mark.parametrize("looked_at", [(), (10, 32, 38)], ids=["unseen", "seen"])
def test_time_at_the_safe_rate_is_paid_at_the_safe_rate(
    shares: Shares, clock: DrivenClock, looked_at: tuple[int, ...]
) -> None:
    grant(shares, clock, acme=share(tokens_per_minute=60_000))
    shares.settle("acme", 0, 100_000 + FIRST_CALL_TOKENS)  # A long debt: nothing is capped.
    for second in range(80):
        clock.advance(1)
        if second in looked_at:
            with pytest.raises(TenantThrottled):
                shares.reserve(of())
        if second == 39:
            shares.extend(sent_at=clock.boottime(), seconds=30)
    with pytest.raises(TenantThrottled) as refused:
        shares.reserve(of())
    gained = (30 + 30) * 1_000 + (10 + 10) * 500
    missing = 100_000 - gained + FIRST_CALL_TOKENS
    assert shares._held["acme"].tokens is not None
    assert shares._held["acme"].tokens.level == pytest.approx(-100_000 + gained)
    assert refused.value.retry_after_seconds == pytest.approx(min(60, missing / 500))


def test_an_instance_that_has_joined_anew_holds_nothing(
    admission: Admission, shares: Shares, clock: DrivenClock
) -> None:
    grant(shares, clock, 7, acme=share(4.0, 5))
    shares.drop()
    assert shares.number == 0
    assert reason(admission, of(runs_per_second=4.0)) == "rate"


# --- model tokens -----------------------------------------------------------------------------


def test_a_call_reserves_the_95th_percentile_and_settles(
    shares: Shares, clock: DrivenClock
) -> None:
    tenant = of()
    grant(shares, clock, acme=share(tokens_per_minute=6_000_000))
    assert shares.reserve(tenant) == FIRST_CALL_TOKENS
    for used in [100] * 18 + [700, 900]:
        shares.settle("acme", used, used)
    clock.advance(1)
    assert shares.reserve(tenant) == 700


def test_tokens_are_used_at_the_rate_of_the_share(shares: Shares, clock: DrivenClock) -> None:
    tenant = of()
    grant(shares, clock, acme=share(tokens_per_minute=60_000))
    used, reasons = 0, set()
    for _ in range(6_000):
        clock.advance(0.1)
        shares.extend(sent_at=clock.boottime(), seconds=30)
        try:
            reserved = shares.reserve(tenant)
        except TenantThrottled as refused:
            reasons.add(refused.reason)
            continue
        shares.settle("acme", reserved, 1_500)
        used += 1_500
    assert reasons == {"quota"}
    # Ten minutes, a burst of ten seconds at most.
    assert used == pytest.approx(600_000, abs=10_000 + 1_500)


def test_a_call_larger_than_the_bucket_is_made_and_paid_off(
    shares: Shares, clock: DrivenClock
) -> None:
    tenant = of()
    grant(shares, clock, acme=share(tokens_per_minute=600))
    clock.advance(10)
    shares.settle("acme", shares.reserve(tenant), 500)
    with pytest.raises(TenantThrottled, match="600 model tokens per minute") as refused:
        shares.reserve(tenant)
    assert refused.value.retry_after_seconds == pytest.approx(50, abs=1)


def test_a_call_that_was_never_made_costs_nothing(shares: Shares, clock: DrivenClock) -> None:
    grant(shares, clock, acme=share(tokens_per_minute=12_000))
    for _ in range(50):
        shares.settle("acme", shares.reserve(of()), 0)


def test_a_tenant_whose_tokens_are_not_divided_reserves_nothing(
    shares: Shares, clock: DrivenClock
) -> None:
    assert shares.reserve(of()) == 0
    grant(shares, clock, acme=share(1.0))
    assert shares.reserve(of()) == 0


# --- budgets ----------------------------------------------------------------------------------


def test_a_budget_is_used_up_until_the_tenants_midnight(shares: Shares, clock: DrivenClock) -> None:
    midnight = (clock.now() + timedelta(hours=2)).isoformat()
    tenant = of(daily_token_budget=1_000, budget_spent_until=midnight)
    assert shares.budget_wait(tenant) == 7_200
    clock.advance(7_200)
    assert shares.budget_wait(tenant) == 0


def test_what_is_used_here_counts_against_what_was_left(
    shares: Shares, usage: Usage, clock: DrivenClock
) -> None:
    tenant = of(daily_token_budget=1_000)
    grant(shares, clock, acme=share(tokens_left=100))
    usage.model_call("acme", 99)
    assert shares.budget_wait(tenant) == 0
    usage.take()  # A report carries it; what is left is still what was said before.
    usage.model_call("acme", 1)
    assert shares.budget_wait(tenant) > 0
    # The answer to that report: what it carried is in the figure, what came since is not.
    grant(shares, clock, 2, acme=share(tokens_left=2))
    assert shares.budget_wait(tenant) == 0
    usage.model_call("acme", 1)
    assert shares.budget_wait(tenant) > 0


def test_tokens_are_kept_only_for_tenants_that_have_a_budget(
    shares: Shares, usage: Usage, clock: DrivenClock
) -> None:
    grant(shares, clock, acme=share(tokens_left=100))
    for number in range(1_000):
        usage.model_call(f"t{number}", 5)
    assert set(usage._since_grants) == {"acme"}
    assert set(usage._since_report) <= {"acme"}


# --- limits on trial --------------------------------------------------------------------------


def test_a_limit_on_trial_is_counted_and_refuses_nobody(
    admission: Admission, usage: Usage, clock: DrivenClock
) -> None:
    tenant = of(trial={"runs_per_second": 1.0, "max_concurrent_runs": 2})
    for _ in range(3):
        assert refusal(admission, tenant) is None
    for _ in range(2):
        clock.advance(2)
        with runs(admission, tenant, 1):
            clock.advance(2)
            with runs(admission, tenant, 1):
                clock.advance(2)
                assert refusal(admission, tenant) is None
    total: dict[str, int] = {}
    for line in usage.take().usage():
        assert line["refused"] == {}
        for why, count in line["would_refuse"].items():
            total[why] = total.get(why, 0) + count
    assert total == {"rate": 2, "concurrency": 2}


def test_a_trial_is_tried_with_this_process_part_of_it(
    admission: Admission, shares: Shares, usage: Usage, clock: DrivenClock
) -> None:
    grant(shares, clock, acme=share(None, 5))
    tenant = of(max_concurrent_runs=20, trial={"max_concurrent_runs": 8})
    with runs(admission, tenant, 4):
        pass
    [line] = usage.take().usage()
    assert line["would_refuse"] == {"concurrency": 2}  # A quarter of eight is two.


def test_a_budget_on_trial_is_counted(
    admission: Admission, shares: Shares, usage: Usage, clock: DrivenClock
) -> None:
    tenant = of(daily_token_budget=1_000, trial={"daily_token_budget": 300})
    grant(shares, clock, acme=share(tokens_left=800))
    assert refusal(admission, tenant) is None
    usage.model_call("acme", 100)  # With the 200 that were used before.
    assert refusal(admission, tenant) is None
    assert usage.take().usage()[0]["would_refuse"] == {"budget": 1}


# --- nothing stays ----------------------------------------------------------------------------


def test_forgotten_tenants_leave_nothing_behind(
    admission: Admission, shares: Shares, clock: DrivenClock
) -> None:
    for number in range(3_000):
        name = f"t{number}"
        refusal(admission, of(name, runs_per_second=1.0))
        refusal(admission, of(name, trial={"runs_per_second": 1.0}))
    assert (admission.running(), shares._held) == ({}, {})
    clock.advance(5)
    admission.forget_idle()
    assert admission._trials == {}


def test_shares_that_were_taken_away_are_forgotten(shares: Shares, clock: DrivenClock) -> None:
    for number in range(50):
        grant(shares, clock, number, **{f"t{number}-{n}": share(1.0) for n in range(20)})
        clock.advance(10)
    assert len(shares._held) == 20
    assert len(shares._former) <= 6 * 20


def test_a_permit_comes_back_however_the_run_ends(
    admission: Admission, shares: Shares, clock: DrivenClock
) -> None:
    tenant = of(max_concurrent_runs=1)
    grant(shares, clock, acme=share(None, 1))
    for error in (ValueError, KeyboardInterrupt, GeneratorExit, None):
        try:
            with admission.admit(tenant):
                if error is not None:
                    raise error
        except (ValueError, KeyboardInterrupt, GeneratorExit):
            pass
    assert admission.running() == {}


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_parents_run_that_ends_in_a_child_changes_nothing(
    admission: Admission,
) -> None:
    permit = ExitStack()
    permit.enter_context(admission.admit(of()))
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with admission._lock:
            held.set()
            done.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    pid = os.fork()
    if not pid:
        signal.alarm(10)
        permit.close()  # Would wait for ever for the lock of a thread that the child hasn't got.
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    done.set()
    thread.join()
    assert admission.running() == {"acme": 1}
    permit.close()


def test_threads_never_hold_more_than_the_share(
    admission: Admission, shares: Shares, clock: DrivenClock
) -> None:
    tenant = of(max_concurrent_runs=100)
    grant(shares, clock, acme=share(None, 3))
    inside, most = [0], [0]
    lock = threading.Lock()

    def work() -> None:
        for _ in range(500):
            try:
                with admission.admit(tenant):
                    with lock:
                        inside[0] += 1
                        most[0] = max(most[0], inside[0])
                    with lock:
                        inside[0] -= 1
            except TenantThrottled:
                pass

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1 <= most[0] <= 3
    assert admission.running() == {}


# --- over the wire ----------------------------------------------------------------------------


def admits(client: PolicyClient, tenant: str = "acme") -> str:
    assert client.policy is not None
    return reason(client.admission, client.policy.entries[tenant])


@pytest.fixture
def limited(plane: ControlPlane, clock: DrivenClock) -> PolicyClient:
    """One whose tenant may have four runs at once, and has been granted them."""
    plane.publish(entry("acme", scope=limits(max_concurrent_runs=4)))
    plane.grant(acme=share(None, 4))
    client = make_client(plane, clock)
    client.tick()
    return client


def test_a_process_is_ready_once_it_has_been_told_its_shares(
    plane: ControlPlane, clock: DrivenClock
) -> None:
    plane.publish(entry("acme", scope=limits(max_concurrent_runs=4)))
    client = make_client(plane, clock)
    client.tick()
    assert client.fence.serving
    assert not client.ready
    plane.grant(acme=share(None, 4))
    client.tick()
    assert client.ready


def test_a_control_plane_that_divides_nothing_keeps_no_process_from_being_ready(
    plane: ControlPlane, clock: DrivenClock
) -> None:
    plane.publish(entry("acme", scope=limits(max_concurrent_runs=4)))
    client = make_client(plane, clock)
    client.tick()
    clock.advance(15)
    assert client.ready


def test_grants_come_with_the_answer_and_are_said_in_the_next_report(
    plane: ControlPlane, limited: PolicyClient
) -> None:
    assert plane.reports[-1]["grants_number"] == 0
    assert admits(limited) == ""
    limited.tick()
    assert plane.reports[-1]["grants_number"] == 1
    plane.grant()
    limited.tick()
    assert admits(limited) == "concurrency"


def test_an_edit_reaches_a_running_instance_with_its_next_poll(
    plane: ControlPlane, limited: PolicyClient
) -> None:
    plane.publish(entry("acme", scope=limits(max_concurrent_runs=0)))
    limited.tick()
    assert admits(limited) == "concurrency"
    plane.publish(entry("acme"))
    limited.tick()
    assert admits(limited) == ""


@pytest.mark.parametrize("new", [False, True], ids=["the same", "new ones"])
def test_shares_hold_from_when_the_report_was_sent(
    plane: ControlPlane, limited: PolicyClient, clock: DrivenClock, new: bool
) -> None:
    if new:
        plane.grant(acme=share(None, 3))
    plane.after = lambda call, answer: clock.advance(9) if call.kind == "report" else None
    limited.tick()
    clock.advance(20.9)
    assert limited.shares.fresh
    clock.advance(0.1)
    assert not limited.shares.fresh


def test_shares_of_a_retried_report_hold_from_its_first_sending(
    plane: ControlPlane, limited: PolicyClient, clock: DrivenClock
) -> None:
    def lose(call: Any, answer: Any) -> None:
        if call.kind == "report":
            raise TimeoutError

    plane.after = lose
    limited.tick()
    sent_at = clock.boottime()
    plane.after = lambda call, answer: None
    # The retry is answered, and the new report after it is not.
    plane.before = lambda call: (
        None if call.kind != "report" or call.data["seq"] == 2 else (503, {}, b"")
    )
    clock.advance(25)
    limited.tick()
    assert limited.shares._until == sent_at + 30


def test_a_process_that_loses_the_control_plane_serves_safely_until_its_lease_and_recovers(
    plane: ControlPlane, limited: PolicyClient, clock: DrivenClock
) -> None:
    def inside(count: int) -> bool:
        try:
            with limited.fence.enter("acme") as turn, runs(limited.admission, turn.entry, count):
                return True
        except TenantThrottled:
            return False

    def gone(call: Any) -> Any:
        raise ConnectionRefusedError

    assert inside(4)
    plane.before = gone
    for _ in range(29):
        clock.advance(30)
        limited.tick()
        assert inside(2)
        assert not inside(3)
    clock.advance(30)
    with pytest.raises(Exception, match="lease is over") as refused:
        inside(1)
    assert refused.value.retry_after_seconds > 0  # type: ignore[attr-defined]
    limited.tick()
    with pytest.raises(Exception, match="no policy yet"):
        inside(1)
    plane.before = lambda call: None
    limited.tick()
    assert inside(4)


def test_what_an_old_instance_was_granted_is_not_the_new_ones(
    plane: ControlPlane, limited: PolicyClient
) -> None:
    plane.instances["i1"].gone = "declared dead"
    plane.grants = (0, {})
    limited.tick()
    assert plane.reports[-1]["instance"] == "i2"
    assert plane.reports[-1]["grants_number"] == 0
    assert admits(limited) == "concurrency"


@pytest.mark.parametrize(
    "grants",
    [
        {"number": 2},
        {"number": "two", "tenants": {}},
        {"number": 2, "tenants": {"acme": {"max_concurrent_runs": -1}}},
        {"number": 2, "tenants": {"acme": {"runs_per_second": "many"}}},
        {"number": 2, "tenants": {"acme": 7}},
        [2],
    ],
    ids=["no tenants", "no number", "negative", "no figure", "no share", "a list"],
)
def test_grants_that_break_the_contract_are_not_applied_and_cost_no_usage(
    plane: ControlPlane, limited: PolicyClient, grants: Any
) -> None:
    plane._grants = lambda heard: grants  # type: ignore[method-assign]
    limited.usage.turn("acme")
    limited.tick()
    assert "breaks the contract" in limited.trouble
    assert limited.shares.number == 1
    del plane._grants  # type: ignore[method-assign]
    limited.usage.turn("acme")
    limited.tick()
    assert limited.trouble == ""
    assert plane.total("turns") == 2


def test_a_control_plane_that_divides_nothing_yet_is_understood(
    plane: ControlPlane, clock: DrivenClock
) -> None:
    plane._grants = lambda heard: {}  # type: ignore[method-assign]
    client = make_client(plane, clock)
    client.tick()
    assert client.trouble == ""
    assert admits(client) == ""


def test_a_report_says_how_its_process_is(plane: ControlPlane, limited: PolicyClient) -> None:
    assert plane.reports[-1]["ready"] is False  # Its shares came with the answer.
    limited.tick()
    said = plane.reports[-1]
    assert said["ready"] is True
    assert said["breakers"] == {}
    assert said["runners"] == {
        "size": 0,
        "limit": 0,
        "idle_seconds": 1_800.0,
        "evicted": {"size": 0, "idle": 0, "generation": 0, "gone": 0},
        "builds": 0,
        "build_ms": {"p50": None, "p99": None},
        "bytes": None,
    }
