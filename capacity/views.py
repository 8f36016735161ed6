"""Pages of instances and of isolation."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from capacity import services, tasks
from capacity.domain.register import Kind
from capacity.models import SharedResource
from capacity.panels import instances as instances_panel
from capacity.panels import isolation as isolation_panel
from capacity.panels.instances import HEAP_MIB, InstancesFilter
from durable.clock import database_now
from durable.errors import Refused
from tenants.domain.roles import Role
from tenants.domain.words import counted
from tenants.models import Tenant
from tenants.views import access, by_request_kind, nothing_changed, page_number

TEXT_MAX = 2_000


def typed(request: HttpRequest, name: str, longest: int = TEXT_MAX) -> str:
    """Return what a field of a form holds, without what no column can."""
    return request.POST.get(name, "").replace("\0", "").strip()[: longest + 1]


def tenant_of(slug: str) -> Tenant:
    """Return the placed tenant of this slug, with what it tries; else the 404 page."""
    rows = Tenant.objects.select_related("trial", "placement__cell", "placement__store")
    tenant = rows.filter(slug=slug).exclude(placement=None).first()
    if tenant is None:
        raise Http404(f"There is no tenant {slug}.")
    return tenant


# --- instances --------------------------------------------------------------------------------


@require_safe
@access(Role.VIEWER)
def instance_list(request: HttpRequest) -> HttpResponse:
    """Every instance, and how each cell's turns are shared out."""
    return by_request_kind(_instances(request, page=not request.htmx))


@require_safe
@access(Role.VIEWER)
def instance_table(request: HttpRequest) -> HttpResponse:
    """The same, polled."""
    return _instances(request, page=False)


def _instances(request: HttpRequest, *, page: bool) -> HttpResponse:
    now = database_now()
    wanted = InstancesFilter(
        cell=request.GET.get("cell", "").replace("\0", "")[:60],
        text=request.GET.get("q", "").replace("\0", "").strip()[:100],
        page=page_number(request),
    )
    found = instances_panel.instances_page(wanted, now=now)
    query = request.GET.copy()
    query.pop("v", None)
    context = {
        "now": now,
        "found": found,
        "shown": counted(found.page.paginator.count, "instance"),
        "query": query.urlencode(),
    }
    template = "capacity/instances.html" if page else "capacity/_instance_table.html"
    return render(request, template, context)


@require_safe
@access(Role.VIEWER)
def instance(request: HttpRequest, pk: int) -> HttpResponse:
    """One instance: its lease, its turns, its cache of Runners and its breakers."""
    now = database_now()
    page = _instance(pk, now)
    context = {
        **_state(page, now),
        **_sizing(request, page),
        "shares": instances_panel.shares_page(page.line.row, page_number(request)),
    }
    return render(request, "capacity/instance.html", context)


@require_safe
@access(Role.VIEWER)
def instance_state(request: HttpRequest, pk: int) -> HttpResponse:
    """What one instance last said."""
    now = database_now()
    return render(request, "capacity/_instance_state.html", _state(_instance(pk, now), now))


@require_safe
@access(Role.VIEWER)
def instance_sizing(request: HttpRequest, pk: int) -> HttpResponse:
    """How many Runners a heap budget holds, by what one weighs there."""
    page = _instance(pk, database_now())
    return render(request, "capacity/_instance_sizing.html", _sizing(request, page))


def _instance(pk: int, now: datetime) -> instances_panel.InstancePage:
    page = instances_panel.instance_page(pk, now=now)
    if page is None:
        raise Http404(f"There is no instance {pk}.")
    return page


def _state(page: instances_panel.InstancePage, now: datetime) -> dict[str, Any]:
    every = None if page.line.state == "gone" else 5
    return {"now": now, "page": page, "row": page.line.row, "every": every}


def _sizing(request: HttpRequest, page: instances_panel.InstancePage) -> dict[str, Any]:
    heap = request.GET.get("heap", str(HEAP_MIB)).replace("\0", "")[:20]
    row = page.line.row
    return {"row": row, "sizing": instances_panel.sizing(row, heap)}


# --- isolation --------------------------------------------------------------------------------


@require_safe
@access(Role.VIEWER)
def isolation(request: HttpRequest) -> HttpResponse:
    """What tenants share and what keeps them apart there, and what tests of it found."""
    return _isolation(request)


@require_safe
@access(Role.VIEWER)
def isolation_runs(request: HttpRequest) -> HttpResponse:
    """The last runs, polled while one goes on."""
    now = database_now()
    context = {"now": now, "found": isolation_panel.isolation_page(now=now)}
    return render(request, "capacity/_isolation_runs.html", context)


@require_POST
@access(Role.OPERATOR)
def start_isolation(request: HttpRequest) -> HttpResponse:
    """Run the tests of isolation, on a control plane and agent processes of their own."""
    try:
        run = services.start_isolation(by=request.user.get_username(), now=database_now())
    except Refused as refusal:
        return _isolation(request, nothing_changed(refusal))
    # Committed by now. A message that is lost leaves a row that another run may follow soon.
    tasks.isolation.apply_async((run.pk,), queue="bulk")
    return redirect("isolation")


def _isolation(request: HttpRequest, refused: str = "") -> HttpResponse:
    now = database_now()
    found = isolation_panel.isolation_page(page_number(request), now=now)
    context = {"now": now, "found": found, "refused": refused}
    return render(request, "capacity/isolation.html", context, status=409 if refused else 200)


@require_http_methods(["GET", "HEAD", "POST"])
@access(Role.OPERATOR)
def add_resource(request: HttpRequest) -> HttpResponse:
    """Name something that tenants share."""
    given = {name: typed(request, name) for name in ("name", "kind", "control", "shown_by")}
    if request.method != "POST":
        return _resource_form(request, None, given)
    try:
        services.add_resource(**given, **_who(request))
    except Refused as refusal:
        return _resource_form(request, None, given, nothing_changed(refusal))
    return redirect("isolation")


@require_http_methods(["GET", "HEAD", "POST"])
@access(Role.OPERATOR)
def set_resource(request: HttpRequest, pk: int) -> HttpResponse:
    """Say what keeps tenants apart at something that they share."""
    row = get_object_or_404(SharedResource, pk=pk)
    if request.method != "POST":
        given = {name: getattr(row, name) for name in ("name", "kind", "control", "shown_by")}
        return _resource_form(request, row, given)
    given = {name: typed(request, name) for name in ("kind", "control", "shown_by")}
    try:
        services.set_resource(row, **given, seen=_seen(request), **_who(request))
    except Refused as refusal:
        return _refused_resource(request, pk, given, refusal)
    return redirect("isolation")


@require_POST
@access(Role.OPERATOR)
def remove_resource(request: HttpRequest, pk: int) -> HttpResponse:
    """Take a line off the register."""
    row = get_object_or_404(SharedResource, pk=pk)
    try:
        services.remove_resource(row, seen=_seen(request), **_who(request))
    except Refused as refusal:
        given = {name: getattr(row, name) for name in ("kind", "control", "shown_by")}
        return _refused_resource(request, pk, given, refusal)
    return redirect("isolation")


def _refused_resource(
    request: HttpRequest, pk: int, given: dict[str, str], refusal: Refused
) -> HttpResponse:
    row = SharedResource.objects.filter(pk=pk).first()
    return _resource_form(request, row, given, nothing_changed(refusal))


def _resource_form(
    request: HttpRequest, row: SharedResource | None, given: dict[str, str], refused: str = ""
) -> HttpResponse:
    context = {
        "now": database_now(),
        "row": row,
        "given": given,
        "reason": typed(request, "reason"),
        "kinds": list(Kind),
        "refused": refused,
        # What was typed goes with what stands there now: saving once more means this.
        "seen": row.at.isoformat() if row is not None else "",
    }
    status = 409 if refused else 200
    return render(request, "capacity/resource.html", context, status=status)


def _who(request: HttpRequest) -> dict[str, Any]:
    return {
        "by": request.user.get_username(),
        "reason": typed(request, "reason"),
        "now": database_now(),
    }


def _seen(request: HttpRequest) -> datetime | None:
    """Return when the line that the form was made of had been written; None: it says nothing."""
    try:
        seen = datetime.fromisoformat(request.POST.get("seen", ""))
    except ValueError:
        return None
    return seen if seen.tzinfo is not None else None
