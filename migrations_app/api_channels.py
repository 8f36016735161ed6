"""Side channels for operators' programs: registering them, and checking their steps off."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from django.http import HttpRequest
from ninja import Router, Schema, Status
from pydantic import Field

from durable.clock import database_now
from migrations_app import channels, queries
from migrations_app.models import MoveChannel, SideChannel, TenantMigration
from tenants.api import Error, OpsIn, PageOut, Reason, Slug, Text, find, page, require
from tenants.domain.roles import Role
from tenants.models import Agent, Tenant

router = Router(tags=["side channels"])

REFUSALS = {403: Error, 404: Error, 409: Error, 422: Error}
# No larger than an id can be: SQLite's driver fails on such a number.
Id = Annotated[int, Field(ge=1, lt=2**63)]
By = Literal["callable", "command", "person"]


class ChannelOut(Schema):
    id: int
    # Whose: every tenant of an agent, or the one tenant. The other is empty.
    agent: str
    tenant: str
    name: str
    about: str
    # True: TARGET waits until it is green.
    required: bool
    # callable, command or person.
    copy_by: str
    copy_step: str
    verify_by: str
    verify_step: str


class HowIn(OpsIn):
    """How a channel's steps are done. What is left out of an edit stays as it is."""

    about: Reason = ""
    required: bool = True
    copy_by: By = "person"
    # package.module:function, or a program with its arguments; empty for a person's.
    copy_step: Reason = ""
    verify_by: By = "person"
    verify_step: Reason = ""
    reason: Reason = ""


class RegisterIn(HowIn):
    # One of both.
    agent: Text | None = None
    tenant: Slug | None = None
    name: Text


class EditIn(HowIn):
    name: Text = ""


class WhyIn(OpsIn):
    reason: Reason = ""


class MoveChannelOut(Schema):
    """How far one side channel is in one move."""

    id: int
    channel: ChannelOut
    # open, copied, green or failed.
    state: str
    # What its last step said.
    detail: str
    # Which step is to be done now: copy or verify. Null: none, in the move's phase.
    due: str | None
    copied_at: datetime | None
    verified_at: datetime | None
    # Who checked it off; empty where a program did.
    by: str
    # Null: due now, or nothing is due.
    next_at: datetime | None
    failures: int


class MoveChannelsOut(Schema):
    items: list[MoveChannelOut]
    # What keeps the fence from closing, and the placement from flipping; empty: nothing.
    before_fence: str
    before_flip: str


class CheckIn(OpsIn):
    step: Literal["copy", "verify"]
    # How it was done: kept in the log and in the audit.
    note: Reason
    # The phase that the caller has seen; another one now is refused. Null: whatever it is.
    seen: str | None = None


@router.get("/channels", response=PageOut[ChannelOut])
def side_channels(
    request: HttpRequest,
    tenant: Text = "",
    after: Annotated[int, Field(ge=0, lt=2**63)] = 0,
) -> dict[str, Any]:
    """List side channels: all, or those that a move of a tenant lists."""
    require(request, Role.VIEWER)
    rows = SideChannel.objects.filter(removed_at=None)
    if tenant:
        rows = queries.channels_of(find(Tenant, "tenant", slug=tenant))
    return page(rows.select_related("agent", "tenant"), "pk", after, _channel)


@router.post("/channels", response={201: ChannelOut, **REFUSALS})
def register_channel(request: HttpRequest, body: RegisterIn) -> Status[dict[str, Any]]:
    """Register a side channel of an agent or of a tenant (admin)."""
    by = require(request, Role.ADMIN).name
    how = body.dict(exclude={"agent", "tenant"})
    channel = channels.register(
        agent=None if body.agent is None else find(Agent, "agent", slug=body.agent),
        tenant=None if body.tenant is None else find(Tenant, "tenant", slug=body.tenant),
        **how,
        by=by,
        now=database_now(),
    )
    return Status(201, _channel(channel))


@router.post("/channels/{pk}/edit", response={200: ChannelOut, **REFUSALS})
def edit_channel(request: HttpRequest, pk: Id, body: EditIn) -> dict[str, Any]:
    """Change what a side channel is, or how its steps are done (admin)."""
    by = require(request, Role.ADMIN).name
    changes = body.dict(exclude_unset=True, exclude={"reason"})
    channel = find(SideChannel, "channel", pk=pk)
    return _channel(
        channels.edit(channel, by=by, reason=body.reason, now=database_now(), **changes)
    )


@router.post("/channels/{pk}/remove", response={200: ChannelOut, **REFUSALS})
def remove_channel(request: HttpRequest, pk: Id, body: WhyIn) -> dict[str, Any]:
    """Take a side channel off the list of moves (admin)."""
    by = require(request, Role.ADMIN).name
    channel = find(SideChannel, "channel", pk=pk)
    return _channel(channels.remove(channel, by=by, reason=body.reason, now=database_now()))


@router.get("/moves/{pk}/channels", response={200: MoveChannelsOut, **REFUSALS})
def channels_of_move(request: HttpRequest, pk: Id) -> dict[str, Any]:
    """Say how far each side channel of a move is, and what the move waits for."""
    require(request, Role.VIEWER)
    move = find(TenantMigration, "move", pk=pk)
    return {
        "items": [_move_channel(move, row) for row in queries.listed_channels(move)],
        "before_fence": queries.channels_before_fence(move),
        "before_flip": queries.channels_before_flip(move),
    }


@router.post("/moves/{pk}/channels/{row}/check-off", response={200: MoveChannelOut, **REFUSALS})
def check_off_channel(request: HttpRequest, pk: Id, row: Id, body: CheckIn) -> dict[str, Any]:
    """Say that a step is done, and how."""
    by = require(request, Role.OPERATOR).name
    fresh = channels.check_off(_row(pk, row), **body.dict(), by=by, now=database_now())
    return _move_channel(fresh.move, fresh)


@router.post("/moves/{pk}/channels/{row}/uncheck", response={200: MoveChannelOut, **REFUSALS})
def uncheck_channel(request: HttpRequest, pk: Id, row: Id, body: CheckIn) -> dict[str, Any]:
    """Take back that a step is done; a program's is carried out again."""
    by = require(request, Role.OPERATOR).name
    fresh = channels.uncheck(_row(pk, row), **body.dict(), by=by, now=database_now())
    return _move_channel(fresh.move, fresh)


def _row(move: int, pk: int) -> MoveChannel:
    return find(MoveChannel, "channel", pk=pk, move=find(TenantMigration, "move", pk=move))


def _channel(row: SideChannel) -> dict[str, Any]:
    own = ("name", "about", "required", "copy_by", "copy_step", "verify_by", "verify_step")
    return {
        "id": row.pk,
        "agent": row.agent.slug if row.agent else "",
        "tenant": row.tenant.slug if row.tenant else "",
        **{name: getattr(row, name) for name in own},
    }


def _move_channel(move: TenantMigration, row: MoveChannel) -> dict[str, Any]:
    own = ("state", "detail", "copied_at", "verified_at", "by", "next_at", "failures")
    return {
        "id": row.pk,
        "channel": _channel(row.channel),
        "due": queries.channel_step(move, row),
        **{name: getattr(row, name) for name in own},
    }
