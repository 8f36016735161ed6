"""What a durable state machine is made of: tables, and what a step may answer.

Nothing here knows Django, a clock or a database.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

# Phase -> the phases it may lead to; one enum per kind of machine.
Table = Mapping[Any, frozenset[Any]]


class IllegalTransition(Exception):
    """The table has no such edge: a bug in a step, never a person's mistake."""


class Overtaken(Exception):
    """A later claim holds the row; what this step answered, or meant to do, is void."""


@dataclass(frozen=True, slots=True)
class Go:
    """Enter another phase.

    `changes` are columns that become true together with the phase. `requires` must still hold of
    the row in that moment, as a queryset's filter says it: a request that the step acts on may
    have been taken back while it ran.
    """

    to: StrEnum
    note: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    requires: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Wait:
    """Stay in this phase and be called again, no sooner than `seconds` from now.

    A note becomes an event; changes raise the row's version. With neither,
    nothing that anybody can see has happened, and nothing is written but the time.
    """

    seconds: float = 0.0
    note: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)


Outcome = Go | Wait


def check_edge(table: Table, phase: StrEnum, to: StrEnum) -> None:
    """Raise IllegalTransition unless `table` leads from `phase` to `to`."""
    if to not in table[phase]:
        raise IllegalTransition(f"{phase} -> {to}")
