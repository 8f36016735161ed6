"""Practice runs of a tenant: what they measured, and the two forms that start one."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods, require_safe

from durable.clock import database_now
from durable.errors import Refused
from migrations_app import rehearsing, services
from migrations_app.domain.phases import Mode
from migrations_app.panels import lists
from migrations_app.services import InvalidOption
from tenants import panels as tenants_panels
from tenants.domain.roles import Role
from tenants.models import Cell, Store, Tenant
from tenants.views import access, fragment, nothing_changed

# Rehearsals that a tenant's page lists, newest first.
ROWS = 10


@require_safe
@access(Role.VIEWER)
def rehearsals(request: HttpRequest, slug: str) -> HttpResponse:
    """What practice runs of the tenant measured."""
    tenant = Tenant.objects.filter(slug=slug).first()
    if tenant is None:
        raise Http404(f"There is no tenant {slug}.")
    now = database_now()
    context = rehearsals_context(tenant, now)
    return fragment(
        request,
        "migrations_app/_rehearsals.html",
        version=context["rehearsals_v"],
        now=now,
        read=lambda: context,
    )


def rehearsals_context(tenant: Tenant, now: datetime) -> dict[str, Any]:
    """Return what `_rehearsals.html` draws."""
    rows = list(tenant.rehearsals.select_related("target_store", "move")[:ROWS])
    version = f"{rows[0].pk if rows else 0}.{int(tenant.internal)}"
    return {"now": now, "tenant": tenant, "rehearsal_rows": rows, "rehearsals_v": version}


@require_http_methods(["GET", "HEAD", "POST"])
@access(Role.OPERATOR)
def rehearse(request: HttpRequest, slug: str) -> HttpResponse:
    """Rehearse the copy of a sample, or on an internal tenant a whole move."""
    page = tenants_panels.tenant_page(slug)
    if page is None:
        raise Http404(f"There is no tenant {slug}.")
    given = request.POST if request.method == "POST" else request.GET
    whole = given.get("whole") == "1"
    refused = ""
    if request.method == "POST":
        try:
            if whole:
                return redirect("move", pk=_whole_move(request, page.tenant).pk)
            rehearsing.rehearse_copy(
                page.tenant,
                target_store=_target(Store, "store", given.get("target_store", "")),
                **_who(request),
                now=database_now(),
            )
            return redirect("tenant", slug=slug)
        except Refused as refusal:
            refused = nothing_changed(refusal)
    context = {
        "now": database_now(),
        "tenant": page.tenant,
        "placement": page.placement,
        "targets": lists.targets(page.placement),
        "whole": whole,
        "given": given,
        "refused": refused,
    }
    status = 409 if refused else 200
    return render(request, "migrations_app/rehearse.html", context, status=status)


def _whole_move(request: HttpRequest, tenant: Tenant) -> Any:
    given = request.POST
    split = given.get("mode") == Mode.SPLIT
    # Whoever practises has no sessions to be waited for.
    waits = {"mode": Mode.SPLIT, "idle_seconds": 0.0} if split else {}
    return services.rehearse_move(
        tenant,
        target_cell=_target(Cell, "cell", given.get("target_cell", "")),
        target_store=_target(Store, "store", given.get("target_store", "")),
        **_who(request),
        now=database_now(),
        **waits,
    )


def _who(request: HttpRequest) -> dict[str, str]:
    reason = request.POST.get("reason", "").replace("\0", "").strip()
    return {"by": request.user.get_username(), "reason": reason[: services.REASON_CHARACTERS]}


def _target(model: Any, what: str, text: str) -> Any:
    """Find a cell or a store that was chosen. Raises InvalidOption."""
    column = "key" if model is Store else "slug"
    found = None if "\0" in text else model.objects.filter(**{column: text}).first()
    if found is None:
        raise InvalidOption(f"Choose a {what} to rehearse with.")
    return found
