"""Moves for operators' programs: every verb that a page has, under the same permissions.

A verb that takes something away (`rollback`, `confirm-offboard`) is a dry run unless the caller
says `"dry_run": false`, as a page shows its dialog first: it answers what would happen, or the
refusal that would come, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from datetime import datetime
from typing import Annotated, Any, Literal

from django.http import HttpRequest, StreamingHttpResponse
from django.http.response import HttpResponseBase
from ninja import Router, Schema, Status
from pydantic import Field

from durable.clock import database_now
from migrations_app import queries, restored, services
from migrations_app.domain.mismatch import WORDS, Looks
from migrations_app.domain.phases import ENDED, REVERSED, Mode
from migrations_app.domain.quote import Quote
from migrations_app.dry_run import dry_run, paced
from migrations_app.models import Mismatch, RestoreFinding, TenantMigration
from migrations_app.panels.artifacts import changed_numbers, references
from migrations_app.panels.diff import versions as versions_of
from migrations_app.panels.mismatches import MismatchFilter, state_of
from tenants import queries as tenants_queries
from tenants.api import (
    Error,
    Moment,
    NotFound,
    OpsIn,
    OpsStoreOut,
    PageOut,
    Reason,
    Slug,
    find,
    missing,
    page,
    require,
    store_out,
)
from tenants.domain.roles import Role
from tenants.models import Cell, Store, Tenant

router = Router(tags=["moves"])
restored_router = Router(tags=["restored"])
stores_router = Router(tags=["stores"])

REFUSALS = {403: Error, 404: Error, 409: Error, 422: Error}
Seconds = Annotated[float, Field(allow_inf_nan=False)]


class FenceOut(Schema):
    """A fence that opened again: what was expected of it, in seconds."""

    # True: it closed on the target, for a rollback.
    back: bool
    # Null: it never closed.
    closed_at: datetime | None
    opened_at: datetime | None
    expected: float | None
    worst: float | None


class MergedOut(Schema):
    """A key of shared state that both sides of a split changed; never its value."""

    # Null: the app's.
    user_id: str | None
    key: str
    # Whose change was the newer and stands: source or target.
    taken: str
    # Nothing tells which was newer: the event that set one of both is gone, with its session.
    undecided: bool = False


class MoveOut(Schema):
    id: int
    label: str
    tenant: str
    # fence, split, or cell: only the cell changes, so nothing is copied and no store is closed.
    mode: str
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
    # Null: it was not rolled back.
    back_placement_version: int | None
    # Earlier fences, oldest first; the fields above are the last one's.
    past_fences: list[FenceOut]
    soak_until: datetime | None
    # Sessions written, born or deleted on the target since the cutover, and when they were
    # counted. Null: not looked at yet.
    touched: int | None
    touched_at: datetime | None
    # Written at the closed source after the cutover, and not accepted.
    late_writes: int
    # A rollback was asked for, or is under way.
    rolling_back: bool
    rollback_requested_by: str
    rollback_reason: str
    pace_per_second: float | None
    finish_by: datetime | None
    # The share of the time in which it works: below 1 it leaves a slow store alone, and says why.
    ease: float
    eased_why: str
    flip_by_hand: bool
    # The phase before which it pauses once, and whether it is a rehearsal, there and back.
    pause_before: str
    rehearsal: bool
    flip_requested_at: datetime | None
    offboard_confirmed_at: datetime | None
    # Of a split: how long the source must be idle, and is waited for at most (seconds);
    idle_seconds: float
    idle_bound_seconds: float
    # since when its bound counts, and since when no session there has changed (null: not known);
    split_at: datetime | None
    quiet_since: datetime | None
    # the placement version that names both sides (null: the target takes no new sessions yet);
    split_placement_version: int | None
    # whether both cells serve the tenant now, each its own sessions;
    both_serve: bool
    # sessions born on the target at the last look (null: not looked at);
    born: int | None
    # and what both sides changed of shared state.
    merged: list[MergedOut]
    # Versions of artifacts at the source, their bytes, and sessions in the target's memory.
    artifacts: int
    artifact_bytes: int
    remembered: int
    # Counts visible changes.
    version: int


class QuoteOut(Schema):
    """How long the fence would stay closed if it closed now (seconds)."""

    expected: float
    worst: float
    budget: float
    # Whether it is the way back's: data then goes from the target to the source.
    back: bool


class PlanIn(OpsIn):
    tenant: Slug
    target_cell: Slug
    target_store: Slug
    # By a fence for all at once, or split: new sessions begin on the target, in another cell. With
    # the store that the tenant has it is cell, whether asked for or not: nothing is copied, so pace
    # and offboarding play no part, and a split or a flip by hand is refused.
    mode: Mode = Mode.FENCE
    # Of a split: the source is idle when no session has changed for so long, and its sessions are
    # waited for so long at most (seconds).
    idle_seconds: Seconds = 600.0
    idle_bound_seconds: Seconds = 4 * 3600.0
    # False: the fence closes, or the split begins, when somebody says so.
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
    # Such as drain: it pauses once before that phase. Empty: before none.
    pause_before: str = ""
    offboard_automatically: bool = False
    # Nobody keeps it: so that what a start is given can be told first, as it stands.
    reason: Reason = ""


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
    # Sessions per second, and where the figure of an unhindered copy comes from. Null and empty
    # where only the cell would change.
    per_second: float | None
    measured: str
    # When the first pass would be through, and how much later than chosen that is (seconds).
    through_at: datetime | None
    late_seconds: float
    # How long the fence would stay closed (seconds). Null: a store did not answer.
    fence_expected: float | None
    fence_worst: float | None


class ActIn(OpsIn):
    reason: Reason = ""
    # The phase that the caller has seen; another one now is refused. Null: whatever it is.
    seen: str | None = None


class HoldIn(ActIn):
    seconds: Seconds


# No larger than an id can be: SQLite's driver fails on such a number.
Id = Annotated[int, Field(ge=1, lt=2**63)]


class RecopyIn(ActIn):
    mismatches: Annotated[list[Id], Field(max_length=10_000)]


class AcceptIn(RecopyIn):
    """Which differences may stay, and why."""


class PaceIn(ActIn):
    # Sessions per second, or a time to be through by. Both null: as fast as both stores allow.
    pace_per_second: Seconds | None = None
    finish_by: Moment | None = None


class DryIn(ActIn):
    """A verb that takes something away."""

    # False: do it. True: answer what would happen, or the refusal; nothing changes.
    dry_run: bool = True


class RollbackIn(DryIn):
    # Replaces the move's budget for this fence. Null: the move's own.
    budget_seconds: Seconds | None = None


class ConfirmIn(DryIn):
    # The tenant's slug.
    typed: str


class RollbackOut(Schema):
    """What a rollback would do now (`dry_run`), or what was asked for."""

    dry_run: bool
    move: MoveOut
    # The fence on the target.
    quote: QuoteOut
    # Sessions that would be carried back, as a forecast; none where only the cell changes.
    to_carry: int
    # Of the soak, in seconds; 0: it is over.
    soak_left: float


class OffboardOut(Schema):
    """What OFFBOARD would delete at the source (`dry_run`), or what was confirmed."""

    dry_run: bool
    move: MoveOut
    # Sessions that this move copied; each is deleted only where it is still what was recorded.
    sessions: int
    # When the soak is over and it begins. Null: now.
    begins_at: datetime | None


class MismatchOut(Schema):
    id: int
    # open, transient (the next pass takes it along), accepted or resolved.
    state: str
    # Empty for the app's shared state, and for shared state.
    user_id: str
    session_id: str
    # Empty but for an artifact's.
    artifact: str
    # events, state, user, app, missing, extra, artifact or value.
    part: str
    first_difference: str
    # The failure that it looks like, as a word and as a sentence.
    looks_like: str
    looks: str
    source_digest: str
    target_digest: str
    found_at: datetime
    found_in: str
    repair_requested_at: datetime | None
    repair_requested_by: str
    accepted_at: datetime | None
    accepted_by: str
    accepted_reason: str
    resolved_at: datetime | None


MismatchState = Literal["", "open", "transient", "accepted", "resolved", "all"]


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
def quote(request: HttpRequest, pk: int, back: bool | None = None) -> dict[str, Any]:
    """Work out the fence as it would be now: the move's next one.

    While both sides of a split serve that may be either: `back=true` asks for the one that an
    abort would close, to carry home what was born on the target.
    """
    require(request, Role.VIEWER)
    row, now = _move(pk), database_now()
    goes = queries.goes_back(row)
    if back is None or back == goes:
        return _quote_out(row, queries.fence_quote(row, now=now), back=goes)
    if not back or not queries.split_live(row):
        which = "forward" if goes else "back"
        raise services.NotNow(
            f"{row} is in {row.phase.upper()}: there is no fence {which} to be quoted."
        )
    return _quote_out(row, queries.way_back_quote(row, now=now), back=True)


def _quote_out(row: TenantMigration, found: Quote, *, back: bool) -> dict[str, Any]:
    told = {"expected": found.expected, "worst": found.worst, "budget": row.budget_seconds}
    return {**told, "back": back}


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
    """Take the way out: open the source, publish, remove the copy.

    Once both sides of a split serve, what was born on the target is carried back first.
    """
    return _act(request, pk, services.abort, body)


@router.post("/{pk}/close-fence", response={200: MoveOut, **REFUSALS})
def close_fence(request: HttpRequest, pk: int, body: ActIn) -> dict[str, Any]:
    """Say "when I say": the fence closes, or the split begins. In SPLIT: wait no longer."""
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


@router.get("/{pk}/mismatches", response={200: PageOut[MismatchOut], **REFUSALS})
def mismatches(
    request: HttpRequest,
    pk: int,
    state: MismatchState = "",
    looks_like: Looks | None = None,
    after: Annotated[int, Field(ge=0, lt=2**63)] = 0,
) -> dict[str, Any]:
    """List what differs, oldest first: all that is not settled, or of one state or kind."""
    require(request, Role.VIEWER)
    wanted = MismatchFilter(state=state, kind=looks_like or "")
    return page(wanted.of(_move(pk)), "pk", after, _mismatch)


@router.get("/{pk}/mismatches/{mismatch}/versions", response=REFUSALS)
def versions(request: HttpRequest, pk: int, mismatch: Id) -> HttpResponseBase:
    """Download both versions of one difference. Values may be secrets: operators only."""
    by = require(request, Role.OPERATOR).name
    row = _move(pk)
    found = row.mismatches.filter(pk=mismatch)
    if not found:
        raise NotFound(
            f"{row} has no mismatch {mismatch}. GET /api/v1/ops/moves/{pk}/mismatches lists them."
        )
    return _file(row, found, f"mismatch {mismatch}", by)


@router.get("/{pk}/late-writes", response=REFUSALS)
def late_versions(request: HttpRequest, pk: int) -> HttpResponseBase:
    """Download both versions of every late write at the closed source. Operators only."""
    by = require(request, Role.OPERATOR).name
    row = _move(pk)
    return _file(row, queries.late_writes(row).iterator(chunk_size=100), "late writes", by)


def _file(move: TenantMigration, rows: Iterable[Mismatch], what: str, by: str) -> HttpResponseBase:
    now = database_now()
    pieces = versions_of(move, rows, now=now)
    services.note_values_read(move, f"{what}, as a file", by=by, now=now)
    headers = {"Cache-Control": "no-store"}
    return StreamingHttpResponse(pieces, content_type="application/json", headers=headers)


class NumberOut(Schema):
    """A version of an artifact whose number is another on the target."""

    id: int
    user_id: str
    # Empty: the user's own.
    session_id: str
    name: str
    source_version: int
    target_version: int


class ReferenceOut(NumberOut):
    """A place that names such a version by its number at the source; it is copied as it is."""

    # Such as "event 12 actions.artifact_delta": never a value.
    place: str


@router.get("/{pk}/artifact-numbers", response={200: PageOut[NumberOut], **REFUSALS})
def artifact_numbers(
    request: HttpRequest, pk: int, after: Annotated[int, Field(ge=0, lt=2**63)] = 0
) -> dict[str, Any]:
    """List the versions whose number has changed, in the order of their copy."""
    require(request, Role.VIEWER)
    return page(changed_numbers(_move(pk)), "pk", after, _fields(NumberOut))


@router.get("/{pk}/artifact-references", response={200: PageOut[ReferenceOut], **REFUSALS})
def artifact_references(
    request: HttpRequest, pk: int, after: Annotated[int, Field(ge=0, lt=2**63)] = 0
) -> dict[str, Any]:
    """List every place that names a version by a number that has changed."""
    require(request, Role.VIEWER)
    return page(references(_move(pk)), "pk", after, _fields(ReferenceOut))


def _fields(schema: type[Schema]) -> Callable[[Any], dict[str, Any]]:
    names = list(schema.model_fields)
    return lambda row: {name: getattr(row, name) for name in names}


@router.post("/{pk}/reconcile-users", response={200: MoveOut, **REFUSALS})
def reconcile_users(request: HttpRequest, pk: int, body: RecopyIn) -> dict[str, Any]:
    """Write the shared state of these mismatches' users by value again."""
    return _act(request, pk, services.reconcile_users, body, mismatch_ids=body.mismatches)


@router.post("/{pk}/accept", response={200: MoveOut, **REFUSALS})
def accept(request: HttpRequest, pk: int, body: AcceptIn) -> dict[str, Any]:
    """Let differences stay that lose nothing; of a late write the tenant's own version stands."""
    return _act(request, pk, services.accept, body, mismatch_ids=body.mismatches)


@router.post("/{pk}/pace", response={200: MoveOut, **REFUSALS})
def set_pace(request: HttpRequest, pk: int, body: PaceIn) -> dict[str, Any]:
    """Change how fast BACKFILL copies, while it runs."""
    given = {"pace_per_second": body.pace_per_second, "finish_by": body.finish_by}
    return _act(request, pk, services.set_pace, body, **given)


@router.post("/{pk}/flip", response={200: MoveOut, **REFUSALS})
def flip(request: HttpRequest, pk: int, body: ActIn) -> dict[str, Any]:
    """Give the word for TARGET to a move that was started with `flip_by_hand`."""
    return _act(request, pk, services.flip, body)


@router.post("/{pk}/rollback", response={200: RollbackOut, **REFUSALS})
def rollback(request: HttpRequest, pk: int, body: RollbackIn) -> dict[str, Any]:
    """Take the tenant back to the source, with all that it wrote since. A dry run by default.

    The dry run needs what the act needs, a reason too, and answers the same refusals.
    """
    now, row = database_now(), _move(pk)
    found = queries.fence_quote(row, now=now)
    left = (row.soak_until - now).total_seconds() if row.soak_until else 0.0
    told = {
        "dry_run": body.dry_run,
        "quote": _quote_out(row, found, back=queries.goes_back(row))
        | {"budget": body.budget_seconds or row.budget_seconds},
        "to_carry": queries.to_copy(row),
        "soak_left": max(left, 0.0),
    }
    details = {"budget_seconds": body.budget_seconds, "dry_run": body.dry_run}
    return told | {"move": _act(request, pk, services.rollback, body, **details)}


@router.post("/{pk}/cancel-rollback", response={200: MoveOut, **REFUSALS})
def cancel_rollback(request: HttpRequest, pk: int, body: ActIn) -> dict[str, Any]:
    """Take a rollback back that has not closed the fence yet. Afterwards: abort, which stops it."""
    return _act(request, pk, services.cancel_rollback, body)


@router.post("/{pk}/confirm-offboard", response={200: OffboardOut, **REFUSALS})
def confirm_offboard(request: HttpRequest, pk: int, body: ConfirmIn) -> dict[str, Any]:
    """Let the source's copy be deleted when the soak is over. A dry run by default.

    The dry run needs what the act needs, the typed name too, and answers the same refusals.
    """
    now, row = database_now(), _move(pk)
    later = row.soak_until is not None and row.soak_until > now
    told = {
        "dry_run": body.dry_run,
        "sessions": row.stamps.count(),
        "begins_at": row.soak_until if later else None,
    }
    details = {"typed": body.typed, "dry_run": body.dry_run}
    return told | {"move": _act(request, pk, services.confirm_offboard, body, **details)}


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
        raise missing("move", f"mv-{pk}")
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
        "rolling_back": move.phase in REVERSED or move.rollback_requested_at is not None,
        "both_serve": queries.split_live(move) and move.ended_at is None,
        "late_writes": queries.unsettled(queries.late_writes(move)).count(),
        "past_fences": [_fence(entry) for entry in move.past_fences],
    }


def _fence(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "back": entry["back"],
        "closed_at": entry["fence_closed_at"],
        "opened_at": entry["fence_opened_at"],
        "expected": entry["quote"].get("expected"),
        "worst": entry["quote"].get("worst"),
    }


def _mismatch(row: Mismatch) -> dict[str, Any]:
    same = {name: getattr(row, name) for name in MismatchOut.model_fields if hasattr(row, name)}
    return same | {"state": state_of(row), "looks": WORDS[Looks(row.looks_like)]}


# --- after our own database was restored ------------------------------------------------------


class FindingOut(Schema):
    """A tenant that is refused until somebody has said where it lives."""

    tenant: str
    found_at: datetime
    # What the database says, what the stores answered, where they differ: for people.
    says: str
    told: str
    differs: str
    # Keys of the stores that may be named; empty: none before another store answers.
    homes: list[str]
    # True: the one home is closed to agents, and naming it opens it.
    opens: bool


class RestoredOut(Schema):
    # True: all machines are stopped.
    stopped: bool
    since: datetime | None
    by: str
    why: str
    # When every tenant was compared last. Null: not since the machines were stopped.
    compared_at: datetime | None
    # Machines don't start before: leases of the lost database.
    leases_until: datetime | None
    # How many tenants are refused; `findings` has the first of them, or those past `after`.
    open: int
    findings: list[FindingOut]
    # Give it as `after` for the rest. Null: that was all.
    next: str | None


class SettleIn(OpsIn):
    store: Slug
    # Who serves the tenant there. Null: as the database knows.
    cell: Slug | None = None
    reason: Reason


class PlacedOut(Schema):
    placement_version: int


class WordIn(OpsIn):
    reason: Reason


@restored_router.get("", response={200: RestoredOut, 403: Error})
def restored_state(
    request: HttpRequest, after: Annotated[int, Field(ge=0, lt=2**63)] = 0
) -> dict[str, Any]:
    """Say whether machines are stopped, and which tenants nobody has settled, oldest first."""
    require(request, Role.VIEWER)
    return _restored(after)


@restored_router.post("/start", response={200: RestoredOut, **REFUSALS})
def start_machines(request: HttpRequest, body: WordIn) -> dict[str, Any]:
    """Start the machines again (admin)."""
    by = require(request, Role.ADMIN).name
    restored.start_machines(by=by, reason=body.reason, now=database_now())
    return _restored()


@restored_router.post("/{slug:slug}/settle", response={200: PlacedOut, **REFUSALS})
def settle(request: HttpRequest, slug: str, body: SettleIn) -> dict[str, Any]:
    """Say that the tenant lives on a store (admin)."""
    by = require(request, Role.ADMIN).name
    version = restored.settle(
        _finding(slug),
        home=find(Store, "store", key=body.store),
        cell=find(Cell, "cell", slug=body.cell) if body.cell else None,
        by=by,
        reason=body.reason,
        now=database_now(),
    )
    return {"placement_version": version}


@restored_router.post("/{slug:slug}/leave-refused", response={200: RestoredOut, **REFUSALS})
def leave_refused(request: HttpRequest, slug: str, body: WordIn) -> dict[str, Any]:
    """Let machines start although nobody can say where the tenant lives (admin)."""
    by = require(request, Role.ADMIN).name
    restored.leave_refused(_finding(slug), by=by, reason=body.reason, now=database_now())
    return _restored()


def _finding(slug: str) -> RestoreFinding:
    row = restored.open_findings().filter(tenant__slug=slug).first()
    if row is None:
        raise NotFound(
            f"No finding of a tenant {slug} is open. GET /api/v1/ops/restored lists those that are."
        )
    return row


def _restored(after: int = 0) -> dict[str, Any]:
    halt, rows = tenants_queries.halt(), restored.open_findings()
    names = [name for name in FindingOut.model_fields if name != "tenant"]

    def shown(row: RestoreFinding) -> dict[str, Any]:
        return {"tenant": row.tenant.slug} | {name: getattr(row, name) for name in names}

    part = page(rows, "pk", after, shown)
    return {
        "stopped": halt is not None,
        "since": halt.since if halt else None,
        "by": halt.by if halt else "",
        "why": halt.why if halt else "",
        "compared_at": halt.compared_at if halt else None,
        "leases_until": halt.leases_until if halt else None,
        "open": rows.count(),
        "findings": part["items"],
        "next": part["next"],
    }


class ServicesIn(OpsIn):
    # "env:NAME" or "file:/path", never an address itself. "": none.
    artifacts_from: str
    memory_from: str
    reason: Reason


@stores_router.post("/{slug:key}/services", response={200: OpsStoreOut, **REFUSALS})
def set_store_services(request: HttpRequest, key: str, body: ServicesIn) -> dict[str, Any]:
    """Say where the artifact and memory services beside a store's sessions are (admin)."""
    store = services.set_store_services(
        find(Store, "store", key=key),
        artifacts_from=body.artifacts_from,
        memory_from=body.memory_from,
        by=require(request, Role.ADMIN).name,
        reason=body.reason,
        now=database_now(),
    )
    return store_out(store)
