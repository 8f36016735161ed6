"""What the overview shows of tenants that break a rule of safety."""

from __future__ import annotations

from datetime import datetime

from migrations_app import safety
from migrations_app.domain.safety import Rule
from migrations_app.safety import State
from tenants.domain.words import Status
from tenants.panels import HALT_RANK, Attention

# Behind a halt, which explains it, and before all that somebody is still at work on.
RANK = HALT_RANK + 0.25
# Tenants that have a line each.
LINES = 10

TITLES = {
    Rule.NOBODY_SERVES: "{} is refused, and nothing explains that",
    Rule.FENCE_OVERDUE: "{} is refused past its fence's deadline",
}


def attention(*, now: datetime) -> list[Attention]:
    """Return a line for each tenant that is refused against a rule; the caller sorts."""
    found = safety.broken_now(now=now)
    return [_line(state, now) for state in found[:LINES]]


def _line(state: State, now: datetime) -> Attention:
    assert state.rule is not None
    words = state.words[:1].upper() + state.words[1:]
    return Attention(
        rank=RANK,
        status=Status("blocked", "Refused"),
        title=TITLES[state.rule].format(state.tenant),
        text=f"{words}. Where nobody comes back to it: `manage.py open_tenant {state.tenant}`.",
        since=state.since or now,
        kind="tenant",
        key=state.tenant,
        label=f"{state.tenant}-refused",
    )
