"""A tenant's page of limits: what holds, what other limits would do, and who applies them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_POST, require_safe

from capacity.panels import limits as panel
from capacity.views import TEXT_MAX, nothing_changed, page_number, tenant_of, typed
from durable.clock import database_now
from durable.errors import Refused
from tenants import services as tenants_services
from tenants.domain.roles import Role
from tenants.models import Tenant
from tenants.views import access

# What a field holds at most; a list of tools is longer.
FIELD_MAX, TOOLS_MAX = 40, 70_000


@require_safe
@access(Role.VIEWER)
def tenant_limits(request: HttpRequest, slug: str) -> HttpResponse:
    """What a tenant may use, who says so and why, and which instances apply it."""
    return _page(request, tenant_of(slug))


@require_safe
@access(Role.VIEWER)
def applied(request: HttpRequest, slug: str) -> HttpResponse:
    """Which instances have applied a tenant's limits."""
    tenant, now = tenant_of(slug), database_now()
    context = {"now": now, "tenant": tenant, "applied": panel.applied(tenant, now=now)}
    return render(request, "capacity/_applied.html", context)


@require_POST
@access(Role.OPERATOR)
def set_limits(request: HttpRequest, slug: str) -> HttpResponse:
    """Let these limits hold."""
    return _save(request, slug, tenants_services.set_scope)


@require_POST
@access(Role.OPERATOR)
def try_limits(request: HttpRequest, slug: str) -> HttpResponse:
    """Count what these limits would refuse, and refuse nothing by them."""
    return _save(request, slug, tenants_services.try_scope)


@require_POST
@access(Role.OPERATOR)
def end_trial(request: HttpRequest, slug: str) -> HttpResponse:
    """Try the trial's limits no longer."""
    return _of_trial(request, slug, tenants_services.end_trial)


@require_POST
@access(Role.OPERATOR)
def adopt_trial(request: HttpRequest, slug: str) -> HttpResponse:
    """Let the limits that are tried hold."""
    return _of_trial(request, slug, tenants_services.adopt)


@require_POST
@access(Role.OPERATOR)
def rotate(request: HttpRequest, slug: str) -> HttpResponse:
    """Have every instance build the tenant's Runner anew, with its present secrets."""
    return _act(request, tenant_of(slug), tenants_services.rotate)


def _save(request: HttpRequest, slug: str, save: Callable[..., Any]) -> HttpResponse:
    """Carry out what the form asks for; refused, the page is drawn with what was typed."""
    tenant, given = tenant_of(slug), _typed(request.POST)
    try:
        panel.check_seen(tenant, given.seen)
        limits = panel.limits_of(given)
    except Refused as refusal:
        return _page(request, tenant, given=given, refusal=refusal)
    return _act(request, tenant, save, given=given, limits=limits)


def _of_trial(request: HttpRequest, slug: str, act: Callable[..., Any]) -> HttpResponse:
    tenant = tenant_of(slug)
    try:
        panel.check_trial(tenant, request.POST.get("trial", ""))
    except Refused as refusal:
        return _page(request, tenant, refusal=refusal)
    return _act(request, tenant, act)


def _act(
    request: HttpRequest,
    tenant: Tenant,
    act: Callable[..., Any],
    *,
    given: panel.Typed | None = None,
    **more: Any,
) -> HttpResponse:
    who = {"by": request.user.get_username(), "reason": typed(request, "reason")}
    try:
        act(tenant, **more, **who, now=database_now())
    except Refused as refusal:
        return _page(request, tenant_of(tenant.slug), given=given, refusal=refusal)
    return redirect("tenant_limits", slug=tenant.slug)


def _typed(given: Mapping[str, str]) -> panel.Typed:
    """Return what the form holds, whatever was sent instead of it."""

    def text(name: str, longest: int = FIELD_MAX) -> str:
        return given.get(name, "").replace("\0", "").strip()[:longest]

    values = {name: text(name) for name, *_ in panel.FIELDS}
    return panel.Typed(
        values=values | {"allowed_tools": text("allowed_tools", TOOLS_MAX)},
        all_tools=given.get("tools", "all") != "these",
        exact_budget=given.get("exact_budget") == "on",
        tier=text("tier"),
        seen=text("seen"),
        reason=text("reason", TEXT_MAX),
    )


def _page(
    request: HttpRequest,
    tenant: Tenant,
    *,
    given: panel.Typed | None = None,
    refusal: Refused | None = None,
) -> HttpResponse:
    now = database_now()
    page = panel.limits_page(tenant, page_number(request), now=now)
    refused, about = ("", "") if refusal is None else panel.in_labels(nothing_changed(refusal))
    shown = given or page.typed
    context = {
        "now": now,
        "tenant": tenant,
        "page": page,
        "typed": shown,
        # What was typed goes with what holds now: saving once more means this.
        "seen": page.scope.version,
        "fields": [(*field, shown.values[field[0]]) for field in panel.FIELDS],
        "wrong": about,
        "refused": refused,
    }
    return render(request, "capacity/limits.html", context, status=409 if refused else 200)
