"""One move's row as every panel sees it, and how worried to be about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db.models import Count, Q, QuerySet

from migrations_app import queries
from migrations_app.domain.mismatch import Looks
from migrations_app.domain.phases import (
    ENDED,
    FENCED,
    REVERSED,
    UNPAUSABLE,
    WAY_OUT,
    Mode,
    Phase,
)
from migrations_app.domain.verbs import where
from migrations_app.models import TenantMigration
from tenants import panels as tenants_panels
from tenants.domain.words import Status
from tenants.models import Cell, Store
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
    """A move's row and how many of its mismatches need a person, read together."""

    move: TenantMigration
    # Those that nobody has repaired or accepted, and that will not pass.
    open_mismatches: int
    # Of these, what was written at the closed source after the cutover.
    late_writes: int = 0

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
    def going_back(self) -> bool:
        """Whether data goes from the target to the source now."""
        return self.phase in REVERSED

    @property
    def opening_again(self) -> bool:
        """Whether a rollback was stopped, or a split's fence left, and its side opens again."""
        return queries.owes_opening(self.move)

    @property
    def rollback_waits(self) -> bool:
        """Whether a rollback, or a split's abort, was asked for and has not begun."""
        waits = self.phase in (Phase.SOAK, Phase.SPLIT)
        return waits and self.move.rollback_requested_at is not None

    @property
    def split(self) -> bool:
        """Whether the move's mode is split."""
        return self.move.mode == Mode.SPLIT

    @property
    def of_cell(self) -> bool:
        """Whether only the cell changes: nothing is copied, compared or deleted."""
        return self.move.mode == Mode.CELL

    @property
    def both_serve(self) -> bool:
        """Whether agents of both cells serve the tenant, each its own sessions."""
        return queries.split_live(self.move) and not self.ended

    @property
    def out_of_split(self) -> bool:
        """Whether the way back leads out of SPLIT, before any cutover."""
        return self.move.came_from == Phase.SPLIT

    @property
    def fence_goes_back(self) -> bool:
        """Whether the fence in the move's own columns is the way back's."""
        if self.going_back or self.phase == Phase.ROLLED_BACK:
            return True
        # A split may have left its forward fence, and close it again.
        return self.move.came_from != "" if self.split else bool(self.move.past_fences)

    @property
    def source(self) -> Cell | Store:
        """What the tenant leaves: its store, or its cell where only that changes."""
        return self.move.source_cell if self.of_cell else self.move.source_store

    @property
    def target(self) -> Cell | Store:
        """What the tenant comes to."""
        return self.move.target_cell if self.of_cell else self.move.target_store

    @property
    def at_source(self) -> str:
        """Where the tenant lives before the cutover: "on" a store, or "in" a cell."""
        return where(self.move.mode, self.move.source_cell, self.move.source_store)

    @property
    def at_target(self) -> str:
        """Where the tenant lives after the cutover."""
        return where(self.move.mode, self.move.target_cell, self.move.target_store)

    @property
    def opens(self) -> Cell | Store:
        """What is opened again once the present fence is left."""
        return self.target if self.fence_goes_back else self.source

    @property
    def at_opens(self) -> str:
        """Where the tenant is served once the present fence is left."""
        return self.at_target if self.fence_goes_back else self.at_source

    @property
    def fence_cell(self) -> Cell:
        """The cell whose instances must acknowledge the present fence."""
        return self.move.target_cell if self.fence_goes_back else self.move.source_cell

    @property
    def on_target(self) -> bool:
        """Whether routers read the target."""
        move = self.move
        return move.placement_version is not None and move.back_placement_version is None

    @property
    def home_cell(self) -> Cell:
        """The cell that serves the tenant while no fence is closed."""
        return self.move.target_cell if self.on_target else self.move.source_cell

    @property
    def at_home(self) -> str:
        """Where routers find the tenant."""
        return self.at_target if self.on_target else self.at_source

    @property
    def failed_checks(self) -> list[Mapping[str, Any]]:
        """Red checks of PREPARE; afterwards they are history."""
        if self.phase != Phase.PREPARE:
            return []
        return [check for check in self.move.checks if check["ok"] is False]

    @property
    def green_checks(self) -> tuple[int, int]:
        """How many checks of PREPARE are green, and of how many; advice is none of them."""
        states = [check["ok"] for check in self.move.checks if check["ok"] is not None]
        return sum(states), len(states)

    @property
    def waiting_for(self) -> str:
        """What it waits for; not for a word that was given since its last step."""
        said = self.move.waiting_for
        given = self.move.drain_requested_at is not None and said.startswith("somebody to start")
        return "" if given else said

    @property
    def ready(self) -> bool:
        """Whether the move only waits for somebody to start the drain."""
        move = self.move
        prepared = (
            self.phase == Phase.PREPARE and move.stage == "ready"
            if self.of_cell
            else self.phase == Phase.BACKFILL and move.pass_ended_at is not None
        )
        return prepared and not move.automatic and move.drain_requested_at is None

    @property
    def owes_confirmation(self) -> bool:
        """Whether OFFBOARD waits, or will wait, for a typed confirmation."""
        move = self.move
        return (
            self.phase == Phase.SOAK
            and not self.of_cell
            and not move.offboard_automatically
            and move.offboard_confirmed_at is None
        )

    @property
    def owes_flip(self) -> bool:
        """Whether VERIFY needs somebody's word before TARGET."""
        move = self.move
        return (
            move.flip_by_hand
            and move.flip_requested_at is None
            and self.phase in (Phase.DRAIN, Phase.DELTA, Phase.VERIFY)
            and not self.aborting
        )

    @property
    def waits_for_flip(self) -> bool:
        """Whether all is equal and nothing but that word is missing."""
        compared = self.phase == Phase.VERIFY and self.move.stage == "end"
        return self.owes_flip and compared and not self.open_mismatches

    @property
    def every(self) -> int | None:
        """Seconds between two looks of a page; None: nothing will change any more."""
        if self.ended:
            return None
        calm = self.phase == Phase.SOAK and not (self.rollback_waits or self.opening_again)
        return 2 if calm else 1

    @property
    def every_chart(self) -> int | None:
        """Seconds between two looks at what takes long to count: the chart's table, artifacts."""
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
        if phase == Phase.ROLLED_BACK:
            return Status("done", "Rolled back")
        if self.failed_checks or self.stuck:
            return Status("blocked", "Blocked")
        if self.aborting:
            return Status("aborted", "Stopping rollback" if self.going_back else "Aborting")
        if self.open_mismatches and phase in COMPARED:
            return Status("blocked", "Blocked")
        if self.late_writes and phase == Phase.SOAK:
            return Status("blocked", "Late write")
        if move.pause_requested_at and phase not in UNPAUSABLE:
            return Status("paused", "Paused")
        if move.failures:
            return Status("warn", "Retrying")
        if self.opening_again:
            if self.fenced:
                side = "target" if self.fence_goes_back else "source"
                return Status("fenced", f"Opening the {side} again")
            if self.phase == Phase.SPLIT:
                return Status("moving", "Opening again")
            again = "Beginning its soak anew" if self.of_cell else "Recording the source anew"
            return Status("moving", again)
        if self.fenced or phase in FENCED:
            return Status("fenced", "Rolling back" if self.going_back else "Fenced")
        if self.rollback_waits:
            return Status("moving", "Rolling back")
        if self.ready or self.soak_over(now) or (self.waiting_for and phase in WAITING):
            return Status("waiting", "Waiting")
        if phase == Phase.SOAK:
            return Status("soak", "Soaking")
        return Status("moving", "Deleting" if phase == Phase.OFFBOARD else "Moving")

    @property
    def stuck(self) -> bool:
        """Whether a failing step needs a person: sooner while the fence is closed."""
        return self.move.failures >= (2 if self.fenced else 3)


# Phases whose mismatches keep the move from going on.
COMPARED = frozenset({Phase.BACKFILL, Phase.SPLIT, Phase.VERIFY, Phase.REVERSE_VERIFY})
# Phases in which `waiting_for` means that nothing moves.
WAITING = frozenset({Phase.PREPARE, Phase.BACKFILL})


def seen(pk: int) -> Seen | None:
    """Return the move and its open mismatches; None if there is no such move."""
    move = moves().filter(pk=pk).first()
    return None if move is None else with_mismatches([move])[0]


def with_mismatches(rows: Sequence[TenantMigration]) -> list[Seen]:
    """Return these moves with how many of their mismatches need a person, in one read."""
    found = queries.blocking_of(rows).values_list("move_id")
    late = Count("id", filter=Q(looks_like=Looks.LATE_WRITE))
    open_ones = {
        pk: (all_of, late) for pk, all_of, late in found.annotate(open=Count("id"), late=late)
    }
    return [Seen(row, *open_ones.get(row.pk, (0, 0))) for row in rows]


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


def fence_lines(seen: Seen, version: int | None, now: datetime) -> list[InstanceLine]:
    """Return the instances that must acknowledge the fence, as far as it is concerned."""
    return tenants_panels.instance_lines(
        seen.fence_cell, tenant=seen.move.tenant, version=version, now=now
    )
