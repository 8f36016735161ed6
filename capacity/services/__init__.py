"""Every write of this app that people and the clock ask for: one transaction each."""

from __future__ import annotations

from capacity.services.dividing import allocate, allocate_soon, divide
from capacity.services.isolation import (
    SuiteRuns,
    end_isolation,
    note_isolation,
    start_isolation,
)
from capacity.services.ledger import (
    Rolled,
    mark_budgets,
    publish_prewarm,
    roll_up,
    sweep_ledger,
)
from capacity.services.limits import NoHeadroom, Saved, adopt_trial, set_limits, set_tier
from capacity.services.resources import add_resource, remove_resource, set_resource

__all__ = [
    "NoHeadroom",
    "Rolled",
    "Saved",
    "SuiteRuns",
    "add_resource",
    "adopt_trial",
    "allocate",
    "allocate_soon",
    "divide",
    "end_isolation",
    "mark_budgets",
    "note_isolation",
    "publish_prewarm",
    "remove_resource",
    "roll_up",
    "set_limits",
    "set_resource",
    "set_tier",
    "start_isolation",
    "sweep_ledger",
]
