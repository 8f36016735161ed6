"""Pages of usage: a tenant's, for operators and for its own people; everybody's; the ledger's."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_safe

from capacity import figures, queries
from capacity.exporting import days_asked, usage_csv
from capacity.panels import usage as usage_panel
from capacity.views import tenant_of
from durable.clock import database_now
from durable.errors import Refused
from tenants.domain.roles import Role
from tenants.models import Cell, Tenant
from tenants.panels import CHOICES
from tenants.views import access, by_request_kind, fragment, own_tenant


class NoSuchTenant(Refused):
    """Somebody asks for the usage of a tenant that there is not."""

    status = 404


# What the page of everybody's usage looks back (hours).
WINDOWS = {"1": "the last hour", "24": "the last day", "168": "the last 7 days"}


# --- one tenant, for operators ------------------------------------------------------------------


@require_safe
@access(Role.VIEWER)
def tenant_usage(request: HttpRequest, slug: str) -> HttpResponse:
    """What a tenant used today against its limits."""
    context = _page(tenant_of(slug), "usage", slug)
    return render(request, "capacity/tenant_usage.html", context)


@require_safe
@access(Role.VIEWER)
def usage(request: HttpRequest, slug: str) -> HttpResponse:
    """The same, polled."""
    return _now(request, tenant_of(slug), "usage", slug)


@require_safe
@access(Role.VIEWER)
def usage_minutes(request: HttpRequest, slug: str) -> HttpResponse:
    """The chart "tokens each minute"."""
    return JsonResponse(figures.minutes(queries.usage_page(tenant_of(slug), now=database_now())))


@require_safe
@access(Role.VIEWER)
def usage_days(request: HttpRequest, slug: str) -> HttpResponse:
    """The chart "tokens each day"."""
    return JsonResponse(figures.days(queries.usage_page(tenant_of(slug), now=database_now())))


# --- one's own ----------------------------------------------------------------------------------


@require_safe
@own_tenant
def my_usage(request: HttpRequest) -> HttpResponse:
    """What the tenant of whoever is signed in used, and why it was refused."""
    context = _page(request.tenant, "my_usage")  # type: ignore[attr-defined]
    return render(request, "capacity/my_usage.html", context)


@require_safe
@own_tenant
def my_usage_now(request: HttpRequest) -> HttpResponse:
    """The same, polled."""
    return _now(request, request.tenant, "my_usage")  # type: ignore[attr-defined]


@require_safe
@own_tenant
def my_usage_minutes(request: HttpRequest) -> HttpResponse:
    """The chart "tokens each minute" of one's own tenant."""
    page = queries.usage_page(request.tenant, now=database_now())  # type: ignore[attr-defined]
    return JsonResponse(figures.minutes(page))


@require_safe
@own_tenant
def my_usage_days(request: HttpRequest) -> HttpResponse:
    """The chart "tokens each day" of one's own tenant."""
    page = queries.usage_page(request.tenant, now=database_now())  # type: ignore[attr-defined]
    return JsonResponse(figures.days(page))


def _now(request: HttpRequest, tenant: Tenant, base: str, *args: str) -> HttpResponse:
    page = queries.usage_page(tenant, now=database_now())
    return fragment(
        request,
        "capacity/_usage.html",
        version=page.version,
        now=page.now,
        read=lambda: _lines(page, base, *args),
    )


def _lines(page: queries.UsagePage, base: str, *args: str) -> dict[str, Any]:
    # Whether it speaks to the tenant's own people, whose addresses name no tenant.
    own = not args
    return {
        "usage": page,
        "own": own,
        "lines": usage_panel.limit_lines(page),
        "refusals": usage_panel.refusal_lines(page),
        "poll_url": reverse(f"{base}_now" if own else base, args=args),
    }


def _page(tenant: Tenant, base: str, *args: str) -> dict[str, Any]:
    page = queries.usage_page(tenant, now=database_now())
    return {
        **_lines(page, base, *args),
        "now": page.now,
        "v": page.version,
        "tenant": page.tenant,
        "summary": usage_panel.summary(page),
        "minutes": figures.minutes(page),
        "days": figures.days(page),
        "minutes_url": reverse(f"{base}_minutes", args=args),
        "days_url": reverse(f"{base}_days", args=args),
    }


# --- everybody ----------------------------------------------------------------------------------


@require_safe
@access(Role.VIEWER)
def usage_overview(request: HttpRequest) -> HttpResponse:
    """Who used most, of one cell or of all."""
    used, asked = _asked(request)
    context = {
        "now": used.now,
        "used": used,
        "asked": asked,
        "figure": figures.largest(used),
        "figure_url": f"{reverse('usage_largest')}?cell={asked['cell']}&hours={asked['hours']}",
        "windows": WINDOWS,
        "cells": Cell.objects.order_by("slug").values_list("slug", flat=True)[:CHOICES],
    }
    return render(request, "capacity/usage_overview.html", context)


@require_safe
@access(Role.VIEWER)
def usage_largest(request: HttpRequest) -> HttpResponse:
    """The chart "who used most"."""
    used, _ = _asked(request)
    return JsonResponse(figures.largest(used))


def _asked(request: HttpRequest) -> tuple[queries.CellUsage, dict[str, str]]:
    hours = request.GET.get("hours", "")
    hours = hours if hours in WINDOWS else "1"
    slug = request.GET.get("cell", "").replace("\0", "")[:60]
    cell = Cell.objects.filter(slug=slug).first() if slug else None
    used = queries.cell_usage(cell, hours=int(hours), now=database_now())
    return used, {"cell": cell.slug if cell is not None else "", "hours": hours}


@require_safe
@access(Role.VIEWER)
def reconciliation(request: HttpRequest) -> HttpResponse:
    """What throttled beside what is invoiced, day by day, of one tenant or of all."""
    given, now, refused, found = _days(request), database_now(), "", None
    try:
        first, last = days_asked(given["from"], given["to"], today=now.date())
        found = queries.reconciliation(first, last, tenant=_whose(given["tenant"]), now=now)
        given |= {"from": first.isoformat(), "to": last.isoformat()}
    except Refused as refusal:
        refused = str(refusal)
    context = {"now": now, "found": found, "given": given, "refused": refused}
    template = "capacity/_reconciliation.html" if request.htmx else "capacity/reconciliation.html"
    return by_request_kind(render(request, template, context, status=409 if refused else 200))


@require_safe
@access(Role.OPERATOR)
def usage_export(request: HttpRequest) -> HttpResponseBase:
    """The days of the ledger as CSV: ?from=2026-03-01&to=2026-03-31, of one ?tenant= or of all."""
    given = _days(request)
    try:
        tenant = _whose(given["tenant"])
        first, last = days_asked(given["from"], given["to"], today=database_now().date())
    except Refused as refusal:
        return HttpResponse(str(refusal), status=refusal.status, content_type="text/plain")
    return usage_csv(first, last, tenant=tenant)


def _days(request: HttpRequest) -> dict[str, str]:
    """Return the days that an address asks for, and of which tenant, as they are spelled there."""
    return {
        name: request.GET.get(name, "").replace("\0", "").strip()[:60]
        for name in ("tenant", "from", "to")
    }


def _whose(slug: str) -> Tenant | None:
    """Return the tenant that is asked for; None: all of them. Raises NoSuchTenant."""
    tenant = Tenant.objects.filter(slug=slug).first()
    if slug and tenant is None:
        raise NoSuchTenant(f"There is no tenant {slug}. Leave it out for all of them.")
    return tenant
