"""One move's row as every panel sees it, and how worried to be about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db.models import Count, QuerySet

from migrations_app.domain.phases import ENDED, FENCED, UNPAUSABLE, WAY_OUT, Mode, Phase
from migrations_app.models import Mismatch, TenantMigration
from tenants import panels as tenants_panels
from tenants.domain.words import Status
from tenants.panels import InstanceLine

ENDED_VALUES = sorted(p.value for p in ENDED)

# Worst first: the order of a list, and of what needs attention.
GRAVITY = {
    "blocked": 0,
    "lost": 1,
    "aborted": 2,
    "warn": 3,
    "fenced": 4,
    "paused": 5,
    "waiting": 6,
    "moving": 7,
    "soak": 8,
    "done": 9,
}


@dataclass(frozen=True)
class Seen:
    """A move's row and how many of its mismatches are open, read together."""

    move: TenantMigration
    open_mismatches: int

    @property
    def phase(self) -> Phase:
        return Phase(self.move.phase)

    @property
    def fenced(self) -> bool:
        """Whether new turns of the tenant are refused now."""
        return self.move.fence_closed_at is not None and self.move.fence_opened_at is None

    @property
    def ended(self) -> bool:
        return self.phase in ENDED

    @property
    def aborting(self) -> bool:
        asked = self.move.abort_requested_at is not None
        return self.phase == Phase.REOPEN or (asked and self.phase in ways_out(self.move))

    @property
    def failed_checks(self) -> list[Mapping[str, Any]]:
        """Red checks of PREPARE; afterwards they are history."""
        if self.phase != Phase.PREPARE:
            return []
        return [check for check in self.move.checks if check["ok"] is False]

    @property
    def ready(self) -> bool:
        """Whether the move only waits for somebody to start the drain."""
        move = self.move
        return (
            self.phase == Phase.BACKFILL
            and not move.automatic
            and move.drain_requested_at is None
            and move.pass_ended_at is not None
        )

    @property
    def owes_confirmation(self) -> bool:
        """Whether OFFBOARD waits, or will wait, for a typed confirmation."""
        move = self.move
        return (
            self.phase == Phase.SOAK
            and not move.offboard_automatically
            and move.offboard_confirmed_at is None
        )

    @property
    def every(self) -> int | None:
        """Seconds between two looks of a page; None: nothing will change any more."""
        if self.ended:
            return None
        return 2 if self.phase == Phase.SOAK else 1

    @property
    def every_chart(self) -> int | None:
        """Seconds between two looks at the chart's table."""
        return None if self.ended else 5

    def soak_over(self, now: datetime) -> bool:
        until = self.move.soak_until
        return self.phase == Phase.SOAK and until is not None and until <= now

    def status(self, now: datetime) -> Status:
        """How worried to be, worst first; the words of the design language."""
        move, phase = self.move, self.phase
        if phase == Phase.DONE:
            return Status("done", "Done")
        if phase == Phase.ABORTED:
            return Status("aborted", "Aborted")
        if self.failed_checks or self.stuck:
            return Status("blocked", "Blocked")
        if self.aborting:
            return Status("aborted", "Aborting")
        if self.open_mismatches and phase in (Phase.BACKFILL, Phase.VERIFY):
            return Status("blocked", "Blocked")
        if move.pause_requested_at and phase not in UNPAUSABLE:
            return Status("paused", "Paused")
        if move.failures:
            return Status("warn", "Retrying")
        if self.fenced or phase in FENCED:
            return Status("fenced", "Fenced")
        if self.ready or self.soak_over(now) or (move.waiting_for and phase in WAITING):
            return Status("waiting", "Waiting")
        if phase == Phase.SOAK:
            return Status("soak", "Soaking")
        return Status("moving", "Deleting" if phase == Phase.OFFBOARD else "Moving")

    @property
    def stuck(self) -> bool:
        """Whether a failing step needs a person: sooner while the fence is closed."""
        return self.move.failures >= (2 if self.fenced else 3)


# Phases in which `waiting_for` means that nothing moves.
WAITING = frozenset({Phase.PREPARE, Phase.BACKFILL})


def seen(pk: int) -> Seen | None:
    """Return the move and its open mismatches; None if there is no such move."""
    move = moves().filter(pk=pk).first()
    if move is None:
        return None
    return Seen(move, move.mismatches.filter(resolved_at=None).count())


def with_mismatches(rows: Sequence[TenantMigration]) -> list[Seen]:
    """Return these moves with how many of their mismatches are open, in one read."""
    found = Mismatch.objects.filter(move__in=rows, resolved_at=None)
    open_ones = dict(found.values_list("move_id").annotate(open=Count("id")))
    return [Seen(row, open_ones.get(row.pk, 0)) for row in rows]


def all_live() -> list[Seen]:
    """Return every move that has not ended, in the order of their start."""
    return with_mismatches(list(moves().exclude(phase__in=ENDED_VALUES).order_by("id")))


def moves() -> QuerySet[TenantMigration]:
    """Return moves with everything that a row of a list names."""
    return TenantMigration.objects.select_related(
        "tenant", "source_cell", "source_store", "target_cell", "target_store"
    )


def ways_out(move: TenantMigration) -> Mapping[Phase, Phase]:
    """Return where an abort leads from each phase; a phase that is missing can't be aborted."""
    return WAY_OUT[Mode(move.mode)]


def source_lines(seen: Seen, version: int | None, now: datetime) -> list[InstanceLine]:
    """Return the source cell's instances, as far as this move's fence is concerned."""
    move = seen.move
    return tenants_panels.instance_lines(
        move.source_cell, tenant=move.tenant, version=version, now=now
    )
