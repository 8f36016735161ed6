"""How much a tenant may use, and what no runtime could hold it to."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from durable.errors import Refused
from tenants.domain.names import Tier

RUNS_MOST, CALLS_MOST, TOKENS_MOST = 100_000, 10_000, 10**15
# Runs per second: one an hour is the least that a bucket fills by in a day's work.
RATE_LEAST, RATE_MOST = 1 / 3600, 100_000.0
TOOLS_MOST, TOOL_LONGEST = 500, 128
WEIGHT_MOST = 1_000_000.0


class BadLimits(Refused):
    """No runtime could hold a tenant to these limits."""

    status = 422


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one tenant may use; None on a limit: there is none."""

    # Over all instances of its cell at once.
    max_concurrent_runs: int | None = None
    # New turns, over all instances.
    runs_per_second: float | None = None
    # Resets at the tenant's midnight.
    daily_token_budget: int | None = None
    max_model_calls_per_run: int | None = None
    # None: every tool of the agent. Empty: none.
    allowed_tools: tuple[str, ...] | None = None
    # True: the budget is looked at before every model call, not only before each turn.
    exact_budget: bool = False
    tier: str = Tier.POOLED
    # Share of what is spare.
    weight: float = 1.0

    def check(self) -> None:
        """Raise BadLimits unless a runtime can hold a tenant to these.

        >>> Limits(max_concurrent_runs=10, runs_per_second=0.5).check()
        """
        _whole("max_concurrent_runs", self.max_concurrent_runs, RUNS_MOST)
        _whole("daily_token_budget", self.daily_token_budget, TOKENS_MOST)
        _whole("max_model_calls_per_run", self.max_model_calls_per_run, CALLS_MOST)
        rate = self.runs_per_second
        if rate is not None and not (_is_number(rate) and RATE_LEAST <= rate <= RATE_MOST):
            raise BadLimits(
                f"runs_per_second can't be {_shown(rate)}: give a number from {RATE_LEAST:.5f} "
                f"(one an hour) to {RATE_MOST:,.0f}, or nothing for no limit. The least that "
                "holds is one an hour."
            )
        if not (_is_number(self.weight) and 0 <= self.weight <= WEIGHT_MOST):
            raise BadLimits(
                f"A weight of {_shown(self.weight)} can't share anything. Give a number from 0 to "
                f"{WEIGHT_MOST:,.0f}; 1 is the ordinary one."
            )
        if self.tier not in list(Tier):
            raise BadLimits(
                f"There is no tier {_shown(self.tier)}. Choose one of: {', '.join(Tier)}."
            )
        if self.exact_budget and self.daily_token_budget is None:
            raise BadLimits(
                "exact_budget looks at the daily budget before every model call, and there is no "
                "budget. Give daily_token_budget as well, or leave exact_budget off."
            )
        if self.allowed_tools is not None:
            _check_tools(self.allowed_tools)

    def plain(self) -> dict[str, Any]:
        """Return these limits as JSON has them."""
        tools = self.allowed_tools
        return {
            **asdict(self),
            "tier": str(self.tier),
            "allowed_tools": None if tools is None else list(tools),
        }


# Names of what a limit is, as they are columns, API fields and words of an audit.
NAMES = tuple(field.name for field in fields(Limits))


def _whole(name: str, value: int | None, most: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise BadLimits(
            f"{name} can't be {_shown(value)}: give a whole number from 1 to {most:,}, or nothing "
            "for no limit."
        )


def _check_tools(tools: tuple[str, ...]) -> None:
    if len(tools) > TOOLS_MOST or len(set(tools)) != len(tools):
        raise BadLimits(
            f"allowed_tools names {len(tools)} tools, {len(set(tools))} different ones. Name each "
            f"once, {TOOLS_MOST} at most; leave it out to allow every tool of the agent."
        )
    for tool in tools:
        fits = isinstance(tool, str) and 0 < len(tool) <= TOOL_LONGEST
        # A lone surrogate is not printable either.
        if not fits or not tool.isprintable() or tool != tool.strip():
            raise BadLimits(
                f"{_shown(tool)} can't be the name of a tool. Give the names that the agent's "
                f"functions have, 1 to {TOOL_LONGEST} visible characters each."
            )


def _is_number(value: Any) -> bool:
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    # An int may be larger than any float.
    return known and (isinstance(value, int) or math.isfinite(value))


def _shown(value: Any) -> str:
    return ascii(value)[:60]
