"""Model endpoints that struggle, on a clock that the test drives."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from google.adk.models.google_llm import _ResourceExhaustedError
from google.genai.errors import ClientError, ServerError

from agent_runtime.breaker import (
    FAILURES_TO_OPEN,
    MAX_ENDPOINTS,
    OPEN_MAX_SECONDS,
    PROBE_SECONDS,
    BreakerOpen,
    Breakers,
    Fault,
    Verdict,
    judge,
)
from tests.runtime.wire import DrivenClock

ENDPOINT = "gemini-2.5-flash"
BROKEN = Verdict(Fault.FAILURE)
BUSY = Verdict(Fault.SHARED_POOL)


@pytest.fixture
def breakers(clock: DrivenClock) -> Breakers:
    return Breakers(clock, dice=lambda: 1.0)


def fail(breakers: Breakers, verdict: Verdict = BROKEN, times: int = 1) -> None:
    for _ in range(times):
        breakers.failed(breakers.enter(ENDPOINT), verdict)


def state(breakers: Breakers) -> dict[str, Any]:
    return breakers.snapshot()[ENDPOINT]


# --- opening ----------------------------------------------------------------------------------


def test_failures_in_a_row_open_it(breakers: Breakers) -> None:
    fail(breakers, times=FAILURES_TO_OPEN - 1)
    assert state(breakers)["state"] == "closed"
    fail(breakers)
    assert state(breakers)["state"] == "open"
    with pytest.raises(BreakerOpen, match=ENDPOINT) as refused:
        breakers.enter(ENDPOINT)
    assert refused.value.retry_after_seconds == 1.0


def test_a_call_that_goes_well_forgets_the_failures_before_it(breakers: Breakers) -> None:
    fail(breakers, times=FAILURES_TO_OPEN - 1)
    breakers.answered(breakers.enter(ENDPOINT))
    fail(breakers, times=FAILURES_TO_OPEN - 1)
    assert state(breakers)["state"] == "closed"


@pytest.mark.parametrize("fault", [Fault.OWN_QUOTA, Fault.SHARED_POOL])
def test_one_429_is_asked_for_and_obeyed(breakers: Breakers, fault: Fault) -> None:
    fail(breakers, Verdict(fault))
    assert state(breakers)["state"] == "open"
    assert state(breakers)[f"{fault}_429"] == 1


def test_other_endpoints_are_not_refused(breakers: Breakers) -> None:
    fail(breakers, BUSY)
    breakers.enter("another")


def test_a_provider_that_names_a_time_is_believed_within_a_bound(
    breakers: Breakers, clock: DrivenClock
) -> None:
    fail(breakers, Verdict(Fault.OWN_QUOTA, retry_after_seconds=12.0))
    clock.advance(11.9)
    with pytest.raises(BreakerOpen):
        breakers.enter(ENDPOINT)
    clock.advance(0.2)
    fail(breakers, Verdict(Fault.OWN_QUOTA, retry_after_seconds=86_400.0))
    assert breakers.wait_seconds(ENDPOINT) == pytest.approx(OPEN_MAX_SECONDS)


def test_it_stays_open_longer_each_time_up_to_a_bound(
    breakers: Breakers, clock: DrivenClock
) -> None:
    stays = []
    for _ in range(9):
        fail(breakers, BUSY)
        stays.append(breakers.wait_seconds(ENDPOINT))
        clock.advance(stays[-1])
    assert stays == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_instances_that_were_refused_together_come_back_apart(clock: DrivenClock) -> None:
    waits = []
    for dice in (0.0, 0.5, 1.0):
        one = Breakers(clock, dice=lambda dice=dice: dice)  # type: ignore[misc]
        fail(one, BUSY)
        waits.append(one.wait_seconds(ENDPOINT))
    assert waits == [0.5, 0.75, 1.0]


def test_calls_that_were_on_their_way_are_one_event(breakers: Breakers) -> None:
    calls = [breakers.enter(ENDPOINT) for _ in range(20)]
    for call in calls:
        breakers.failed(call, BUSY)
    assert breakers.wait_seconds(ENDPOINT) == 1.0
    assert state(breakers)["shared_pool_429"] == 20


def test_a_call_from_before_it_opened_does_not_close_it(breakers: Breakers) -> None:
    slow = breakers.enter(ENDPOINT)
    fail(breakers, BUSY)
    breakers.answered(slow)
    assert state(breakers)["state"] == "open"


# --- half open --------------------------------------------------------------------------------


@pytest.fixture
def half_open(breakers: Breakers, clock: DrivenClock) -> Breakers:
    fail(breakers, BUSY)
    clock.advance(1.0)
    assert state(breakers)["state"] == "half_open"
    return breakers


def test_one_call_at_a_time_is_let_through(half_open: Breakers) -> None:
    half_open.enter(ENDPOINT)
    for _ in range(3):
        with pytest.raises(BreakerOpen):
            half_open.enter(ENDPOINT)


def test_a_probe_that_goes_well_closes_it(half_open: Breakers) -> None:
    half_open.answered(half_open.enter(ENDPOINT))
    assert state(half_open)["state"] == "closed"
    half_open.enter(ENDPOINT)
    half_open.enter(ENDPOINT)


def test_a_probe_that_fails_in_any_way_opens_it_for_longer(half_open: Breakers) -> None:
    fail(half_open, BROKEN)
    assert state(half_open)["state"] == "open"
    assert half_open.wait_seconds(ENDPOINT) == 2.0


def test_a_probe_that_is_cancelled_makes_room_for_another(half_open: Breakers) -> None:
    half_open.abandoned(half_open.enter(ENDPOINT))
    half_open.enter(ENDPOINT)


def test_a_probe_that_is_never_heard_of_again_is_replaced(
    half_open: Breakers, clock: DrivenClock
) -> None:
    half_open.enter(ENDPOINT)
    clock.advance(PROBE_SECONDS)
    half_open.enter(ENDPOINT)


def test_a_probe_that_was_given_up_says_nothing_once_another_has_spoken(
    half_open: Breakers, clock: DrivenClock
) -> None:
    slow = half_open.enter(ENDPOINT)
    clock.advance(PROBE_SECONDS)
    half_open.answered(half_open.enter(ENDPOINT))
    half_open.failed(slow, BUSY)
    assert state(half_open)["state"] == "closed"


def test_a_call_ends_once(breakers: Breakers) -> None:
    call = breakers.enter(ENDPOINT)
    breakers.answered(call)
    breakers.failed(call, BUSY)
    assert state(breakers)["state"] == "closed"


# --- reports ----------------------------------------------------------------------------------


def test_a_report_says_when_it_will_be_asked_again(breakers: Breakers) -> None:
    fail(breakers, BUSY)
    assert state(breakers) == {
        "state": "open",
        "failures": 1,
        "own_quota_429": 0,
        "shared_pool_429": 1,
        "retry_at": "2026-03-02T12:00:01.000+00:00",
    }


def test_names_that_somebody_makes_up_fill_no_report(breakers: Breakers) -> None:
    fail(breakers, BUSY)
    for number in range(3 * MAX_ENDPOINTS):
        breakers.answered(breakers.enter(f"\0{number}" * 100))
    found = breakers.snapshot()
    assert len(found) == MAX_ENDPOINTS
    assert all(len(name) <= 100 and "\0" not in name for name in found)
    # The one that is open was used last of none, and is kept: only closed ones go.
    assert ENDPOINT in found


# --- what an error says of its endpoint ---------------------------------------------------------


def google(code: int, message: str, *details: dict[str, Any]) -> ClientError:
    said = {"error": {"code": code, "message": message, "details": list(details)}}
    return (ServerError if code >= 500 else ClientError)(code, said)


class Answered(Exception):
    """An error as OpenAI's and Anthropic's clients raise it."""

    def __init__(self, status_code: int, text: str = "", **headers: str) -> None:
        super().__init__(text)
        self.status_code = status_code
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


BUSY_POOL = google(429, "Resource exhausted. Please try again later.")
QUOTA = google(
    429,
    "You exceeded your current quota, please check your plan and billing details.",
    {"@type": "type.googleapis.com/google.rpc.QuotaFailure", "violations": [{"quotaId": "x"}]},
    {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "36.5s"},
)


def wrapped(cause: Exception) -> Exception:
    error = RuntimeError("Error in plugin 'x' during 'y' callback")
    error.__cause__ = cause
    return error


VERDICTS = {
    "a busy pool at Google": (BUSY_POOL, Verdict(Fault.SHARED_POOL)),
    "the same as google-adk raises it": (
        _ResourceExhaustedError(BUSY_POOL),
        Verdict(Fault.SHARED_POOL),
    ),
    "a quota at Google": (QUOTA, Verdict(Fault.OWN_QUOTA, 36.5)),
    "a quota at Google as google-adk raises it": (
        _ResourceExhaustedError(QUOTA),
        Verdict(Fault.OWN_QUOTA, 36.5),
    ),
    "a quota of Vertex": (
        google(429, "Quota exceeded for aiplatform.googleapis.com/requests_per_minute"),
        Verdict(Fault.OWN_QUOTA),
    ),
    "a limit of an organisation": (
        Answered(429, "Rate limit reached for gpt-5 in organization", retry_after="7"),
        Verdict(Fault.OWN_QUOTA, 7.0),
    ),
    "nothing left, says a header": (
        Answered(429, "slow down", anthropic_ratelimit_tokens_remaining="0"),
        Verdict(Fault.OWN_QUOTA),
    ),
    "something left, says a header": (
        Answered(429, "slow down", anthropic_ratelimit_tokens_remaining="12"),
        Verdict(Fault.SHARED_POOL),
    ),
    "overloaded": (Answered(529, "overloaded_error"), Verdict(Fault.SHARED_POOL)),
    "broken": (google(503, "The model is overloaded."), Verdict(Fault.FAILURE)),
    "too slow": (TimeoutError(), Verdict(Fault.FAILURE)),
    "not reached": (ConnectionRefusedError(), Verdict(Fault.FAILURE)),
    "wrapped": (wrapped(BUSY_POOL), Verdict(Fault.SHARED_POOL)),
    "a date instead of seconds": (
        Answered(429, "", retry_after="Wed, 21 Oct 2026 07:28:00 GMT"),
        Verdict(Fault.SHARED_POOL),
    ),
    "a wrong request": (google(400, "Unsupported image"), None),
    "a bug of ours": (ValueError("code 429"), None),
    "a missing file": (FileNotFoundError("x"), None),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_errors_are_told_apart(name: str) -> None:
    error, verdict = VERDICTS[name]
    assert judge(error) == verdict


def test_a_cancelled_call_says_nothing_of_its_endpoint() -> None:
    assert judge(asyncio.CancelledError()) is None
