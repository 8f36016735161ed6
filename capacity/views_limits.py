"""A tenant's page of limits: what holds, what other limits would do, and who applies them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_POST, require_safe

from capacity import services
from capacity.panels import limits as panel
from capacity.views import TEXT_MAX, tenant_of, typed
from durable.clock import database_now
from durable.errors import Refused
from tenants import services as tenants_services
from tenants.domain.roles import Role
from tenants.models import Tenant
from tenants.views import access, nothing_changed, page_number

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


@require_safe
@access(Role.OPERATOR)
def check_limits(request: HttpRequest, slug: str) -> HttpResponse:
    """Whether the cell has room for limits that are being typed; nothing is changed."""
    tenant, now = tenant_of(slug), database_now()
    context = _room(tenant, _given(request.GET), now)
    return render(request, "capacity/_headroom.html", context)


@require_POST
@access(Role.OPERATOR)
def set_limits(request: HttpRequest, slug: str) -> HttpResponse:
    """Let these limits hold."""
    return _save(request, slug, services.set_limits, room=True)


@require_POST
@access(Role.OPERATOR)
def try_limits(request: HttpRequest, slug: str) -> HttpResponse:
    """Count what these limits would refuse, and refuse nothing by them."""
    return _save(request, slug, tenants_services.try_scope)


@require_POST
@access(Role.OPERATOR)
def end_trial(request: HttpRequest, slug: str) -> HttpResponse:
    """Try the trial's limits no longer."""
    seen = _seen(request, "trial")
    return _act(request, tenant_of(slug), tenants_services.end_trial, seen=seen)


@require_POST
@access(Role.OPERATOR)
def adopt_trial(request: HttpRequest, slug: str) -> HttpResponse:
    """Let the limits that are tried hold."""
    more = {"seen": _seen(request, "trial"), "override": request.POST.get("override") == "on"}
    return _act(request, tenant_of(slug), services.adopt_trial, **more)


@require_POST
@access(Role.OPERATOR)
def rotate(request: HttpRequest, slug: str) -> HttpResponse:
    """Have every instance build the tenant's Runner anew, with its present secrets."""
    return _act(request, tenant_of(slug), tenants_services.rotate)


def _save(
    request: HttpRequest, slug: str, save: Callable[..., Any], *, room: bool = False
) -> HttpResponse:
    """Carry out what the form asks for; refused, the page is drawn with what was typed.

    `room`: limits that are to hold are held against the cell's quota first.
    """
    tenant, given = tenant_of(slug), _given(request.POST)
    more: dict[str, Any] = {}
    try:
        limits = panel.limits_of(given)
        if room:
            more = {"typed": panel.estimate_of(given), "override": given.override}
    except Refused as refusal:
        return _page(request, tenant, given=given, refusal=refusal)
    more |= {"limits": limits, "seen": _seen(request, "seen")}
    return _act(request, tenant, save, given=given, **more)


def _seen(request: HttpRequest, name: str) -> int:
    """Return the version that a form was made of; one that there never is where it names none."""
    text = request.POST.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


def _act(
    request: HttpRequest,
    tenant: Tenant,
    act: Callable[..., Any],
    *,
    given: panel.Given | None = None,
    **more: Any,
) -> HttpResponse:
    who = {"by": request.user.get_username(), "reason": typed(request, "reason")}
    try:
        act(tenant, **more, **who, now=database_now())
    except Refused as refusal:
        return _page(request, tenant_of(tenant.slug), given=given, refusal=refusal)
    return redirect("tenant_limits", slug=tenant.slug)


def _given(given: Mapping[str, str]) -> panel.Given:
    """Return what the form holds, whatever was sent instead of it."""

    def text(name: str, longest: int = FIELD_MAX) -> str:
        return given.get(name, "").replace("\0", "").strip()[:longest]

    values = {name: text(name) for name, *_ in (*panel.FIELDS, *panel.ESTIMATES)}
    return panel.Given(
        values=values | {"allowed_tools": text("allowed_tools", TOOLS_MAX)},
        all_tools=given.get("tools", "all") != "these",
        exact_budget=given.get("exact_budget") == "on",
        tier=text("tier"),
        reason=text("reason", TEXT_MAX),
        override=given.get("override") == "on",
    )


def _room(tenant: Tenant, given: panel.Given, now: datetime) -> dict[str, Any]:
    """Return what `_headroom.html` draws of a dry run."""
    try:
        return {"tenant": tenant, "dry": True, "room": panel.dry_run(tenant, given, now=now)}
    except Refused as refusal:
        return {"tenant": tenant, "dry": True, "problem": panel.in_labels(str(refusal))[0]}


def _page(
    request: HttpRequest,
    tenant: Tenant,
    *,
    given: panel.Given | None = None,
    refusal: Refused | None = None,
) -> HttpResponse:
    now = database_now()
    page = panel.limits_page(tenant, page_number(request), now=now)
    refused, about = ("", "") if refusal is None else panel.in_labels(nothing_changed(refusal))
    shown = given or page.form
    context = {
        "now": now,
        "tenant": tenant,
        "page": page,
        "given": shown,
        # What was typed goes with what holds now: saving once more means this.
        "seen": page.newest,
        "fields": [(*field, shown.values[field[0]]) for field in panel.FIELDS],
        "estimates": [(*field, shown.values[field[0]]) for field in panel.ESTIMATES],
        "wrong": about,
        "refused": refused,
        **({"room": page.room} if given is None else _room(tenant, given, now)),
    }
    return render(request, "capacity/limits.html", context, status=409 if refused else 200)
