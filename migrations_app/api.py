"""Moves for operators' programs: every verb that a page has, under the same permissions."""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import datetime
from typing import Annotated, Any

from django.http import HttpRequest
from ninja import Router, Schema, Status
from pydantic import Field

from durable.clock import database_now
from migrations_app import queries, services
from migrations_app.domain.phases import ENDED
from migrations_app.dry_run import dry_run, paced
from migrations_app.models import TenantMigration
from tenants.api import Error, Moment, NotFound, PageOut, Reason, Slug, find, page, require
from tenants.domain.roles import Role
from tenants.models import Cell, Store, Tenant

router = Router(tags=["moves"])

REFUSALS = {403: Error, 404: Error, 409: Error, 422: Error}
Seconds = Annotated[float, Field(allow_inf_nan=False)]


class MoveOut(Schema):
    id: int
    label: str
    tenant: str
    phase: str
    # What it waits for, and what the last failing step said; "" where nothing.
    waiting_for: str
    failure: str
    source_cell: str
    source_store: str
    target_cell: str
    target_store: str
    # Sessions done and to do in the running sweep.
    done: int
    todo: int
    sessions: int
    users: int
    copied: int
    compared: int
    open_mismatches: int
    started_at: datetime
    started_by: str
    # Null while it lives.
    ended_at: datetime | None
    paused: bool
    aborting: bool
    fence_closed_at: datetime | None
    deadline_at: datetime | None
    fence_opened_at: datetime | None
    placement_version: int | None
    # Counts visible changes.
    version: int


class QuoteOut(Schema):
    """How long the fence would stay closed if it closed now (seconds)."""

    expected: float
    worst: float
    budget: float


class PlanIn(Schema):
    tenant: Slug
    target_cell: Slug
    target_store: Slug
    # False: the fence closes when somebody says so.
    automatic: bool = False
    fence_not_before: Moment | None = None
    budget_seconds: Seconds = 150.0
    drain_bound_seconds: Seconds = 60.0
    soak_seconds: Seconds = 72 * 3600.0
    # One at most of these three; null is as fast as both stores allow. Sessions per second,
    pace_per_second: Seconds | None = None
    # when the first pass should be through,
    finish_by: Moment | None = None
    # or rows per second that the target may be asked to write.
    rows_per_second: Seconds | None = None
    # True: all compared equal, it waits for a person's word before TARGET.
    flip_by_hand: bool = False
    offboard_automatically: bool = False


class StartIn(PlanIn):
    reason: Reason


class ToldOut(Schema):
    """One phase of a dry run."""

    phase: str
    text: str


class DryRunOut(Schema):
    # Why it would not start; empty where it would.
    refusals: list[str]
    lines: list[ToldOut]
    ways_back: list[ToldOut]
    # Sessions per second, and where the figure of an unhindered copy comes from.
    per_second: float | None
    measured: str
    # When the first pass would be through, and how much later than chosen that is (seconds).
    through_at: datetime | None
    late_seconds: float
    # How long the fence would stay closed (seconds). Null: a store did not answer.
    fence_expected: float | None
    fence_worst: float | None


class ActIn(Schema):
    reason: Reason = ""
    # The phase that the caller has seen; another one now is refused. Null: whatever it is.
    seen: str | None = None


class HoldIn(ActIn):
    seconds: Seconds


class RecopyIn(ActIn):
    # No larger than an id can be: SQLite's driver fails on such a number.
    mismatches: Annotated[list[Annotated[int, Field(ge=1, lt=2**63)]], Field(max_length=10_000)]


class ConfirmIn(ActIn):
    # The tenant's slug.
    typed: str


@router.get("", response=PageOut[MoveOut])
def moves(
    request: HttpRequest, live: bool = True, after: Annotated[int, Field(ge=0, lt=2**63)] = 0
) -> dict[str, Any]:
    """List moves, newest first: the live ones, or all."""
    require(request, Role.VIEWER)
    rows = _rows()
    if live:
        rows = rows.exclude(phase__in=ENDED)
    return page(rows, "pk", after, _out, newest_first=True)


@router.post("", response={201: MoveOut, **REFUSALS})
def start(request: HttpRequest, body: StartIn) -> Status[dict[str, Any]]:
    """Start a move."""
    actor = require(request, Role.OPERATOR)
    tenant, places = _planned(body)
    move = services.start(
        tenant,
        **places,
        by=actor.name,
        reason=body.reason,
        now=database_now(),
        **paced(tenant, **_options(body)),
    )
    return Status(201, _out(move))


@router.post("/dry-run", response={200: DryRunOut, **REFUSALS})
def tell(request: HttpRequest, body: PlanIn) -> dict[str, Any]:
    """Tell what starting this move would do, phase by phase; writes nothing."""
    require(request, Role.OPERATOR)
    tenant, places = _planned(body)
    told = dry_run(tenant, **places, now=database_now(), **_options(body))
    return {
        **asdict(replace(told, checks=None, fence=None)),
        "fence_expected": told.fence.expected if told.fence else None,
        "fence_worst": told.fence.worst if told.fence else None,
    }


def _planned(body: PlanIn) -> tuple[Tenant, dict[str, Any]]:
    """Find the tenant and where it should go."""
    return find(Tenant, "tenant", slug=body.tenant), {
        "target_cell": find(Cell, "cell", slug=body.target_cell),
        "target_store": find(Store, "store", key=body.target_store),
    }


def _options(body: PlanIn) -> dict[str, Any]:
    return body.dict(exclude={"tenant", "target_cell", "target_store", "reason"})


@router.get("/{pk}", response={200: MoveOut, **REFUSALS})
def move(request: HttpRequest, pk: int) -> dict[str, Any]:
    """Look at one move."""
    require(request, Role.VIEWER)
    return _out(_move(pk))


@router.get("/{pk}/quote", response={200: QuoteOut, **REFUSALS})
def quote(request: HttpRequest, pk: int) -> dict[str, Any]:
    """Work out the fence as it would be now."""
    require(request, Role.VIEWER)
    row = _move(pk)
    found = queries.fence_quote(row, now=database_now())
    return {"expected": found.expected, "worst": found.worst, "budget": row.budget_seconds}


@router.post("/{pk}/pause", response={200: MoveOut, **REFUSALS})
def pause(request: HttpRequest, pk: int, body: ActIn) -> dict[str, Any]:
    """Stop where it is; a closed fence stays closed, and its deadline holds."""
    return _act(request, pk, services.pause, body)


@router.post("/{pk}/resume", response={200: MoveOut, **REFUSALS})
def resume(request: HttpRequest, pk: int, body: ActIn) -> dict[str, Any]:
    """Go on."""
    return _act(request, pk, services.resume, body)


@router.post("/{pk}/abort", response={200: MoveOut, **REFUSALS})
def abort(request: HttpRequest, pk: int, body: ActIn) -> dict[str, Any]:
    """Take the way out: open the source, publish, remove the copy."""
    return _act(request, pk, services.abort, body)


@router.post("/{pk}/close-fence", response={200: MoveOut, **REFUSALS})
def close_fence(request: HttpRequest, pk: int, body: ActIn) -> dict[str, Any]:
    """Say "when I say"."""
    return _act(request, pk, services.close_fence, body)


@router.post("/{pk}/cancel-fence", response={200: MoveOut, **REFUSALS})
def cancel_fence(request: HttpRequest, pk: int, body: ActIn) -> dict[str, Any]:
    """Take "when I say" back."""
    return _act(request, pk, services.cancel_fence, body)


@router.post("/{pk}/hold-fence", response={200: MoveOut, **REFUSALS})
def hold_fence(request: HttpRequest, pk: int, body: HoldIn) -> dict[str, Any]:
    """Move the fence's deadline, once."""
    return _act(request, pk, services.hold_fence, body, seconds=body.seconds)


@router.post("/{pk}/recopy", response={200: MoveOut, **REFUSALS})
def recopy(request: HttpRequest, pk: int, body: RecopyIn) -> dict[str, Any]:
    """Repair mismatches by copying their sessions again."""
    return _act(request, pk, services.recopy, body, mismatch_ids=body.mismatches)


@router.post("/{pk}/confirm-offboard", response={200: MoveOut, **REFUSALS})
def confirm_offboard(request: HttpRequest, pk: int, body: ConfirmIn) -> dict[str, Any]:
    """Let the source's copy be deleted when the soak is over."""
    return _act(request, pk, services.confirm_offboard, body, typed=body.typed)


@router.post("/{pk}/leave-behind", response={200: MoveOut, **REFUSALS})
def leave_behind(request: HttpRequest, pk: int, body: ActIn) -> dict[str, Any]:
    """End a move although what it should clean can't be reached."""
    return _act(request, pk, services.leave_behind, body)


def _act(request: HttpRequest, pk: int, verb: Any, body: ActIn, **details: Any) -> dict[str, Any]:
    actor = require(request, Role.OPERATOR)
    row = _move(pk)
    verb(row, by=actor.name, reason=body.reason, seen=body.seen, now=database_now(), **details)
    return _out(_move(pk))


def _rows() -> Any:
    return TenantMigration.objects.select_related(
        "tenant", "source_cell", "source_store", "target_cell", "target_store"
    )


def _move(pk: int) -> TenantMigration:
    row: TenantMigration | None = _rows().filter(pk=pk).first()
    if row is None:
        raise NotFound(f"There is no move mv-{pk}.")
    return row


def _out(move: TenantMigration) -> dict[str, Any]:
    same = {
        name: getattr(move, name)
        for name in MoveOut.model_fields
        if hasattr(move, name) and not name.endswith(("_cell", "_store"))
    }
    return same | {
        "tenant": move.tenant.slug,
        "source_cell": move.source_cell.slug,
        "source_store": move.source_store.key,
        "target_cell": move.target_cell.slug,
        "target_store": move.target_store.key,
        "open_mismatches": queries.open_mismatches(move),
        "paused": move.pause_requested_at is not None,
        "aborting": move.abort_requested_at is not None and move.ended_at is None,
    }
