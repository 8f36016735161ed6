"""The register of shared resources and runs of the isolation suite, for operators' programs."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from django.http import HttpRequest
from ninja import Router, Schema, Status
from pydantic import Field

from capacity import services, tasks
from capacity.models import IsolationRun, SharedResource
from durable.clock import database_now
from tenants.api import Error, OpsIn, PageOut, Reason, Text, find, page, require
from tenants.domain.roles import Role

router = Router(tags=["isolation"])

REFUSALS = {403: Error, 404: Error, 409: Error, 422: Error}
# No larger than an id can be: SQLite's driver fails on such a number.
Id = Annotated[int, Field(ge=1, lt=2**63)]
After = Annotated[int, Field(ge=0, lt=2**63)]


class ResourceOut(Schema):
    id: int
    name: str
    # performance, authority, fault or data.
    kind: str
    # Empty: a finding.
    control: str
    shown_by: str
    at: datetime
    by: str


class ControlIn(OpsIn):
    kind: Text
    control: Reason = ""
    shown_by: Reason = ""
    reason: Reason = ""


class ResourceIn(ControlIn):
    name: Text


class EditIn(ControlIn):
    # `at` of the line that the caller has read; another one now is refused. Null: whatever it is.
    seen: datetime | None = None


class WhyIn(OpsIn):
    reason: Reason = ""


class RunOut(Schema):
    id: int
    began_at: datetime
    # Null: it runs, or was killed.
    ended_at: datetime | None
    by: str
    build: str
    # Null: not over.
    passed: bool | None
    # One object a test: name, kind, asked, measured, bar, held.
    results: list[dict[str, Any]]


@router.get("/resources", response=PageOut[ResourceOut])
def resources(request: HttpRequest, after: Text = "") -> dict[str, Any]:
    """List what agents of several tenants share, and what keeps them apart there."""
    require(request, Role.VIEWER)
    return page(SharedResource.objects.all(), "name", after, _resource)


@router.post("/resources", response={201: ResourceOut, **REFUSALS})
def add_resource(request: HttpRequest, body: ResourceIn) -> Status[dict[str, Any]]:
    """Name something that tenants share (operator)."""
    by = require(request, Role.OPERATOR).name
    made = services.add_resource(**body.dict(), by=by, now=database_now())
    return Status(201, _resource(made))


@router.post("/resources/{pk}", response={200: ResourceOut, **REFUSALS})
def set_resource(request: HttpRequest, pk: Id, body: EditIn) -> dict[str, Any]:
    """Say what keeps tenants apart at something that they share (operator)."""
    by = require(request, Role.OPERATOR).name
    row = find(SharedResource, "resource", pk=pk)
    return _resource(services.set_resource(row, **body.dict(), by=by, now=database_now()))


@router.post("/resources/{pk}/remove", response={204: None, **REFUSALS})
def remove_resource(request: HttpRequest, pk: Id, body: WhyIn) -> Status[None]:
    """Take a line off the register (operator)."""
    by = require(request, Role.OPERATOR).name
    row = find(SharedResource, "resource", pk=pk)
    services.remove_resource(row, by=by, reason=body.reason, now=database_now())
    return Status(204, None)


@router.get("/isolation", response=PageOut[RunOut])
def isolation_runs(request: HttpRequest, after: After = 0) -> dict[str, Any]:
    """List runs of the isolation suite, oldest first."""
    require(request, Role.VIEWER)
    return page(IsolationRun.objects.all(), "pk", after, _run)


@router.post("/isolation", response={202: RunOut, 403: Error, 409: Error})
def start_isolation(request: HttpRequest) -> Status[dict[str, Any]]:
    """Run the isolation suite, as a release gate does: look at the run until it has ended."""
    by = require(request, Role.OPERATOR).name
    run = services.start_isolation(by=by, now=database_now())
    # Committed by now. A message that is lost leaves a row that another run may follow soon.
    tasks.isolation.apply_async((run.pk,), queue="bulk")
    return Status(202, _run(run))


def _resource(row: SharedResource) -> dict[str, Any]:
    own = ("name", "kind", "control", "shown_by", "at", "by")
    return {"id": row.pk, **{name: getattr(row, name) for name in own}}


def _run(row: IsolationRun) -> dict[str, Any]:
    own = ("began_at", "ended_at", "by", "build", "passed", "results")
    return {"id": row.pk, **{name: getattr(row, name) for name in own}}
