"""Rehearsals for operators' programs: practising a copy or a whole move, and what they measured."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from django.http import HttpRequest
from ninja import Router, Schema, Status
from pydantic import Field

from durable.clock import database_now
from migrations_app import services
from migrations_app.domain.phases import Mode
from migrations_app.models import Rehearsal
from migrations_app.rehearsing import rehearse_copy as rehearse
from tenants.api import Error, OpsIn, PageOut, Reason, Slug, find, page, require
from tenants.domain.roles import Role
from tenants.models import Cell, Store, Tenant

router = Router(tags=["rehearsals"])

REFUSALS = {403: Error, 404: Error, 409: Error, 422: Error}
Seconds = Annotated[float, Field(allow_inf_nan=False)]


class RehearsalOut(Schema):
    """What one practice run measured: per second, or in seconds. Null: not measured."""

    id: int
    tenant: str
    source_store: str
    target_store: str
    at: datetime
    by: str
    # The move that was practised whole, there and back. Null: a sample was copied.
    move: int | None
    sessions: int
    events: int | None
    equal: bool
    # Why it is not equal, or what else a person should know.
    detail: str
    copy_rate: float | None
    verify_rate: float | None
    shared_rate: float | None
    scan_seconds: float | None
    mark_seconds: float | None
    # Of a whole move: how long its fence was closed, and the way back's.
    fence_seconds: float | None
    back_seconds: float | None


class CopyIn(OpsIn):
    target_store: Slug
    reason: Reason


class WholeIn(OpsIn):
    """A move of an internal tenant that goes back by itself."""

    target_cell: Slug
    target_store: Slug
    mode: Mode = Mode.FENCE
    budget_seconds: Seconds = 150.0
    drain_bound_seconds: Seconds = 60.0
    idle_seconds: Seconds = 600.0
    idle_bound_seconds: Seconds = 4 * 3600.0
    # The phase before which it pauses, once; "": none.
    pause_before: str = ""
    reason: Reason


class BegunOut(Schema):
    """The move that is being practised: see /ops/moves/{id}."""

    id: int
    label: str
    phase: str


@router.get("/tenants/{slug:slug}/rehearsals", response={200: PageOut[RehearsalOut], 404: Error})
def rehearsals(
    request: HttpRequest, slug: str, after: Annotated[int, Field(ge=0, lt=2**63)] = 0
) -> dict[str, Any]:
    """List what practice runs of a tenant measured, newest first."""
    require(request, Role.VIEWER)
    rows = find(Tenant, "tenant", slug=slug).rehearsals.select_related(
        "tenant", "source_store", "target_store"
    )
    return page(rows, "pk", after, _out, newest_first=True)


@router.post("/tenants/{slug:slug}/rehearsals/copy", response={201: RehearsalOut, **REFUSALS})
def rehearse_copy(request: HttpRequest, slug: str, body: CopyIn) -> Status[dict[str, Any]]:
    """Copy a sample to another store under a scratch name, and remove it; takes about 10 s."""
    actor = require(request, Role.OPERATOR)
    row = rehearse(
        find(Tenant, "tenant", slug=slug),
        target_store=find(Store, "store", key=body.target_store),
        by=actor.name,
        reason=body.reason,
        now=database_now(),
    )
    return Status(201, _out(row))


@router.post("/tenants/{slug:slug}/rehearsals/move", response={201: BegunOut, **REFUSALS})
def rehearse_move(request: HttpRequest, slug: str, body: WholeIn) -> Status[dict[str, Any]]:
    """Begin to move an internal tenant there and, by itself, back."""
    actor = require(request, Role.OPERATOR)
    move = services.rehearse_move(
        find(Tenant, "tenant", slug=slug),
        target_cell=find(Cell, "cell", slug=body.target_cell),
        target_store=find(Store, "store", key=body.target_store),
        by=actor.name,
        now=database_now(),
        **body.dict(exclude={"target_cell", "target_store"}),
    )
    return Status(201, {"id": move.pk, "label": move.label, "phase": move.phase})


def _out(row: Rehearsal) -> dict[str, Any]:
    names = RehearsalOut.model_fields.keys() - {"id", "tenant", "move"}
    named = {"source_store": row.source_store.key, "target_store": row.target_store.key}
    return {
        "id": row.pk,
        "tenant": row.tenant.slug,
        "move": row.move_id,
        **{name: getattr(row, name) for name in names},
        **named,
    }
