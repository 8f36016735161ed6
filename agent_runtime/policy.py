"""What a cell's instances were told: the policy, parsed from the wire and immutable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

# What a cell takes of a tenant. Any other word refuses, a word of a newer control plane too.
ACCEPTS_ALL = "all"
# The fence is closed.
ACCEPTS_NONE = "none"
# The source of a split: sessions that its store has.
ACCEPTS_EXISTING = "existing"
# The target of a split: turns that the source has sent on.
ACCEPTS_NEW = "new"
# A tombstone: the entry names the cell that the tenant moved to.
ACCEPTS_MOVED = "moved"


@dataclass(frozen=True, slots=True)
class Version:
    """A counter's value, sent as `epoch.number`.

    The epoch is random per database: numbers of two epochs say nothing about each other, so
    there is no order between versions but `before`.
    """

    epoch: str
    number: int

    @classmethod
    def parse(cls, text: str) -> Version:
        """Return the version that `text` spells. Raises ValueError.

        >>> Version.parse("x7.42")
        Version(epoch='x7', number=42)
        """
        epoch, dot, number = text.rpartition(".")
        if not (epoch and dot and number.isascii() and number.isdigit()):
            raise ValueError(f"{text!r} is no version: it should read like epoch.42")
        return cls(epoch, int(number))

    def before(self, other: Version) -> bool:
        """Return whether this is the older one; False across epochs."""
        return self.epoch == other.epoch and self.number < other.number

    def __str__(self) -> str:
        return f"{self.epoch}.{self.number}"


@dataclass(frozen=True, slots=True)
class Scope:
    """One tenant's limits as they are now. None is no limit, and no list of tools allows all."""

    version: int
    max_concurrent_runs: int | None = None
    runs_per_second: float | None = None
    daily_token_budget: int | None = None
    max_model_calls_per_run: int | None = None
    allowed_tools: frozenset[str] | None = None
    # The plan's weight in the fair share of the cell's quota.
    weight: float = 1.0
    # The budget is looked at before every model call, not only before each turn.
    exact_budget: bool = False
    # Until when the budget is used up: the tenant's midnight. None, or past: it isn't.
    budget_spent_until: datetime | None = None

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Scope:
        """Return the scope that the wire describes."""
        tools = data.get("allowed_tools")
        spent_until = data.get("budget_spent_until")
        return cls(
            version=int(data["version"]),
            max_concurrent_runs=data.get("max_concurrent_runs"),
            runs_per_second=data.get("runs_per_second"),
            daily_token_budget=data.get("daily_token_budget"),
            max_model_calls_per_run=data.get("max_model_calls_per_run"),
            allowed_tools=None if tools is None else frozenset(tools),
            weight=float(data.get("weight") or 1.0),
            exact_budget=data.get("exact_budget") is True,
            budget_spent_until=None if spent_until is None else _moment(spent_until),
        )


@dataclass(frozen=True, slots=True)
class Entry:
    """What one tenant's turns need to know in this cell."""

    tenant: str
    # The part of the app name before the first dot.
    agent: str
    # What sessions are stored under, such as "support.acme".
    app_name: str
    # pooled, bridge or silo.
    tier: str
    # When the tenant's cell, store or split last changed; compared with the one a turn carries.
    placement_version: Version
    # all, none, existing, new or moved.
    accepts: str
    # The cell that a tombstone names; None otherwise.
    moved_to: str | None
    store_key: str
    store_kind: str
    # Raised when a secret rotates; runners of an older one are not used again.
    runner_generation: int
    scope: Scope
    # The cell that owns the tenant, where this one does not: only announced here, or the target
    # of a split. None: this one does, or the entry is a tombstone.
    home_cell: str | None = None
    # This cell is the source of a split: a session that its store does not have may be the
    # target's.
    split: bool = False
    # Limits that are only tried: what they would refuse is counted, and served. None: no trial.
    trial: Scope | None = None

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Entry:
        """Return the entry that the wire describes; unknown fields are ignored.

        Raises KeyError, TypeError or ValueError if one that is needed is missing or wrong.
        """
        store = data["store"] or {"key": "", "kind": ""}
        trial = data.get("trial")
        moved_to = data["moved_to"]
        if data["accepts"] == ACCEPTS_MOVED and not moved_to:
            raise ValueError(f"the tombstone of {data['tenant']} names no cell")
        return cls(
            tenant=str(data["tenant"]),
            agent=str(data["agent"]),
            app_name=str(data["app_name"]),
            tier=str(data["tier"]),
            placement_version=Version.parse(data["placement_version"]),
            accepts=str(data["accepts"]),
            moved_to=moved_to,
            store_key=str(store["key"]),
            store_kind=str(store["kind"]),
            runner_generation=int(data["runner_generation"]),
            scope=Scope.parse(data["scope"] or {"version": 0}),
            home_cell=data.get("home_cell"),
            split=data.get("split") is True,
            trial=None if trial is None else Scope.parse(trial),
        )


@dataclass(frozen=True, slots=True)
class Policy:
    """One cell's policy at one version."""

    version: Version
    entries: Mapping[str, Entry] = field(default_factory=dict)
    # Shifts, region states and the pre-warm list of the cell, as sent.
    cell: Mapping[str, Any] = field(default_factory=dict)

    @property
    def prewarm(self) -> list[Entry]:
        """The tenants whose Runners are built before this process is ready, most active first.

        The cell names them; whoever has moved, or is yet to come, is left out.
        """
        named = self.cell.get("prewarm")
        entries = (self.entries.get(str(one)) for one in named) if isinstance(named, list) else ()
        return [e for e in entries if e and e.accepts != ACCEPTS_MOVED and not e.home_cell]

    def after(self, answer: Mapping[str, Any]) -> Policy:
        """Return this policy with a delta's entries laid over it."""
        changed = _entries(answer)
        return Policy(
            version=Version.parse(answer["version"]),
            entries={**self.entries, **changed},
            # null: the cell's part hasn't changed.
            cell=self.cell if answer["cell"] is None else dict(answer["cell"]),
        )

    @classmethod
    def whole(cls, answer: Mapping[str, Any]) -> Policy:
        """Return the policy that a full answer spells: it replaces everything."""
        version = Version.parse(answer["version"])
        return cls(version=version, entries=_entries(answer), cell=dict(answer["cell"] or {}))


def _moment(text: str) -> datetime:
    at = datetime.fromisoformat(text)
    return at.replace(tzinfo=UTC) if at.tzinfo is None else at


def _entries(answer: Mapping[str, Any]) -> dict[str, Entry]:
    return {entry.tenant: entry for entry in map(Entry.parse, answer["tenants"])}
