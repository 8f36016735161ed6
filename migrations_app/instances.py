"""Instances that keep a move's fence waiting, declared dead on one person's word.

Elsewhere that takes two people (`tenants.services.ask_dead`): nobody refuses what a process
writes that was only thought dead. Here the move closes the store behind it.
"""

from __future__ import annotations

from datetime import datetime

from django.db import transaction
from django.db.models import F

from durable.errors import Refused
from migrations_app import ports
from migrations_app.domain.phases import Phase
from migrations_app.models import TenantMigration
from tenants import queries as tenants_queries
from tenants import services as tenants
from tenants.models import Cell, RuntimeInstance, Store


class NotWaitedFor(Refused):
    """The move's fence does not wait for the instance."""


class StaysOpen(Refused):
    """The store behind the instance would take what it still writes."""


def declare_dead(
    move: TenantMigration, instance: RuntimeInstance, *, by: str, reason: str, now: datetime
) -> RuntimeInstance:
    """Mark an instance gone for which the fence of `move` waits; return its row.

    One person is enough, for the store that this move closes refuses what the process should
    still write. Raises ReasonMissing, NotWaitedFor, StaysOpen, AlreadyGone, StillAlive, and what
    opening the store raises.
    """
    tenants.check_reason(reason)
    cell, store = _fenced(move)
    if instance.pk not in waited_for(move, now=now):
        raise NotWaitedFor(
            f"{move} does not wait for {instance}. Ask for it on its cell: then a second person"
            " confirms that it is dead."
        )
    with ports.open_store(
        store.kind, store.address_from, app_name=move.tenant.app_name, move=move.pk
    ) as port:
        guard = port.guard()
        closes = guard is not None and guard.move == move.pk and port.can_close()
    if not closes:
        raise StaysOpen(
            f"{store} does not close for {cell}, so it would take what {instance} still writes. Ask"
            " for it on its cell: then a second person confirms that it is dead."
        )
    with transaction.atomic():
        row = TenantMigration.objects.select_for_update().get(pk=move.pk)
        if row.phase != move.phase:
            raise NotWaitedFor(f"{move} has gone on to {row.phase.upper()} meanwhile. Look again.")
        gone = tenants.declare_dead(instance, by=by, reason=reason, now=now)
        note = f"Declare dead: {instance}: {reason}"
        row.events.create(at=now, who=by, was=row.phase, now=row.phase, note=note)
        # Who waited for it looks at once, unless a step is at work and looks anyway.
        soon = {"due_at": now} if row.settled == row.claim else {}
        TenantMigration.objects.filter(pk=row.pk).update(version=F("version") + 1, **soon)
    return gone


def waited_for(move: TenantMigration, *, now: datetime) -> frozenset[int]:
    """Return the ids of the instances that keep the move's fence from closing or its proof."""
    cell, _ = _fenced(move)
    if move.phase in (Phase.DRAIN, Phase.REVERSE_DRAIN) and move.fence_version is not None:
        proof = tenants_queries.fence_proof(cell, move.tenant, move.fence_version, now=now)
        words = list(proof.missing)
    elif move.phase == Phase.BACKFILL or (
        move.phase == Phase.SOAK and move.rollback_requested_at is not None
    ):
        words = tenants_queries.fence_waits_for(cell, now=now)
    else:
        words = []
    return frozenset(word.id for word in words)


def _fenced(move: TenantMigration) -> tuple[Cell, Store]:
    """Return the side that the move's next or present fence is on."""
    if move.phase in (Phase.SOAK, Phase.REVERSE_DRAIN):
        return move.target_cell, move.target_store
    return move.source_cell, move.source_store
