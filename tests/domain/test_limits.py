"""What a tenant may be limited to, and what is refused with a way out."""

from __future__ import annotations

from typing import Any

import pytest

from tenants.domain.limits import BadLimits, Limits

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"max_concurrent_runs": 1, "runs_per_second": 1 / 3600, "daily_token_budget": 1},
        {"max_concurrent_runs": 100_000, "runs_per_second": 100_000, "weight": 0},
        {"allowed_tools": ()},
        {"allowed_tools": ("look_up", "öffne"), "tier": "silo"},
        {"daily_token_budget": 10**15, "exact_budget": True, "max_model_calls_per_run": 1},
    ],
    ids=repr,
)
def test_limits_that_a_runtime_can_hold_are_taken(said: dict[str, Any]) -> None:
    Limits(**said).check()


@pytest.mark.parametrize(
    "said",
    [
        *({"max_concurrent_runs": bad} for bad in (0, -1, 100_001, 1.5, True, "3", NAN)),
        *({"runs_per_second": bad} for bad in (0, -0.5, 1e-9, 1e6, NAN, INF, True, "x", 10**400)),
        *({"daily_token_budget": bad} for bad in (0, -1, 10**16, 10**400)),
        *({"max_model_calls_per_run": bad} for bad in (0, 10_001)),
        *({"weight": bad} for bad in (-1, NAN, INF, None, 10**400)),
        *({"tier": bad} for bad in ("gold", "", None, "\ud800")),
        {"exact_budget": True},
        {"allowed_tools": ("a", "a")},
        {"allowed_tools": tuple(f"t{n}" for n in range(501))},
        *({"allowed_tools": (bad,)} for bad in ("", " a", "a\0", "\ud800", "x" * 129, 7)),
    ],
    ids=lambda said: ascii(said)[:60] + str(len(ascii(said))),
)
def test_limits_that_nobody_can_hold_are_refused_with_what_to_do(said: dict[str, Any]) -> None:
    with pytest.raises(BadLimits) as refused:
        Limits(**said).check()
    text = str(refused.value)
    assert text.encode()
    assert any(word in text for word in ("Give", "give", "Choose", "Name"))
    assert len(text) < 400
