"""Every write of this app that people and the clock ask for: one transaction each."""

from __future__ import annotations

from capacity.services.ledger import (
    Rolled,
    mark_budgets,
    publish_prewarm,
    roll_up,
    sweep_ledger,
)
from capacity.services.resources import add_resource, remove_resource, set_resource

__all__ = [
    "Rolled",
    "add_resource",
    "mark_budgets",
    "publish_prewarm",
    "remove_resource",
    "roll_up",
    "set_resource",
    "sweep_ledger",
]
