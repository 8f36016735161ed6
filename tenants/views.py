"""Fragments of tenants, cells and instances, and what every view of the product shares."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import wraps
from typing import Any, TypeVar

from django.core.exceptions import PermissionDenied
from django.http import (
    Http404,
    HttpRequest,
    HttpResponse,
    HttpResponseBase,
    StreamingHttpResponse,
)
from django.shortcuts import get_object_or_404, redirect, render
from django.utils.cache import patch_vary_headers
from django.views.decorators.http import require_http_methods, require_safe

from durable.clock import database_now
from durable.errors import Refused
from tenants import panels, queries, services
from tenants.domain.fence import ask_ends
from tenants.domain.roles import Door, Role, allows
from tenants.domain.words import clock, harmless
from tenants.models import RuntimeInstance

View = TypeVar("View", bound=Callable[..., HttpResponseBase])


def access(role: Role) -> Callable[[View], View]:
    """Let only people of `role` and above pass; others get the 403 page.

    Sets `view.access`, which a test looks for on every URL. `request.role` is what the
    person holds, for templates that offer a button.
    """

    def guard(view: View) -> View:
        @wraps(view)
        def guarded(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
            held = queries.role_of(request.user)
            if not allows(held, role):
                has = f"you are {held.value}" if held else "you have none yet"
                raise PermissionDenied(f"This needs the role {role.value}; {has}.")
            request.role = held  # type: ignore[attr-defined]
            return view(request, *args, **kwargs)

        guarded.access = role  # type: ignore[attr-defined]
        return guarded  # type: ignore[return-value]

    return guard


def own_tenant(view: View) -> View:
    """Let only a tenant's people pass, who find their tenant in `request.tenant`.

    The address names no tenant, so there is none to be tried out.
    """

    @wraps(view)
    def guarded(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        tenant = queries.tenant_of(request.user)
        if tenant is None:
            raise PermissionDenied(
                "This page shows a tenant's people their own usage, and you are of no tenant."
            )
        request.tenant = tenant  # type: ignore[attr-defined]
        return view(request, *args, **kwargs)

    guarded.access = Door.OWN_TENANT  # type: ignore[attr-defined]
    return guarded  # type: ignore[return-value]


def unchanged(request: HttpRequest, version: str, now: datetime) -> HttpResponse | None:
    """Return 204 while the page's `?v=` is current; None if the fragment is to be drawn anew.

    `Stamp` says when the old values were still true, for the panel's "Updated".
    """
    if request.GET.get("v") != version:
        return None
    return HttpResponse(status=204, headers={"Stamp": clock(now, now)})


def fragment(
    request: HttpRequest,
    template: str,
    *,
    version: str,
    now: datetime,
    read: Callable[[], dict[str, Any]],
    status: int = 200,
) -> HttpResponse:
    """Answer a poll: 204 while `version` is current, else what `read` returns in `template`."""
    if status == 200 and (same := unchanged(request, version, now)):
        return same
    context = {"now": now, "v": version, "fragment": True, **read()}
    return render(request, template, context, status=status)


def page_number(request: HttpRequest) -> int:
    """Return the page that an address asks for; the first where it asks for none that could be."""
    number = request.GET.get("page", "1")
    return int(number) if number.isascii() and number.isdecimal() and len(number) < 7 else 1


def nothing_changed(refusal: Refused) -> str:
    """Return a refusal as a notice: what, why, and that nothing changed."""
    text = str(refusal)
    return text if "othing was" in text else f"{text} Nothing was changed."


def csv_file(rows: Iterable[Iterable[object]], name: str) -> StreamingHttpResponse:
    """Answer rows as a CSV file of this name, a row at a time; no spreadsheet runs a cell of it."""
    writer = csv.writer(_Line())
    return StreamingHttpResponse(
        (writer.writerow(map(harmless, row)) for row in rows),
        content_type="text/csv; charset=utf-8",
        headers={
            "Content-Disposition": f'attachment; filename="{name}.csv"',
            "Cache-Control": "no-store",
        },
    )


class _Line:
    """What csv.writer writes to: each row is given back at once."""

    def write(self, text: str) -> str:
        return text


def by_request_kind(response: HttpResponse) -> HttpResponse:
    """Keep caches from giving a page what was made for htmx, or the other way round."""
    patch_vary_headers(response, ["HX-Request"])
    return response


@require_safe
@access(Role.VIEWER)
def cells(request: HttpRequest) -> HttpResponse:
    """Every cell with its instances."""
    now = database_now()
    return render(request, "tenants/_cells.html", cells_context(now))


@require_http_methods(["GET", "HEAD", "POST"])
@access(Role.OPERATOR)
def dead(request: HttpRequest, pk: int) -> HttpResponse:
    """One instance: one person says that it is dead, another confirms."""
    row = get_object_or_404(RuntimeInstance.objects.select_related("cell"), pk=pk)
    refused = ""
    if request.method == "POST":
        person = request.user.get_username()
        who = {"person": person, "by": person, "now": database_now()}
        reason = request.POST.get("reason", "").replace("\0", "")[:2_000]
        try:
            match request.POST.get("act"):
                case "confirm":
                    services.confirm_dead(row, **who)
                case "withdraw":
                    services.withdraw_dead(row, **who)
                case _:
                    services.ask_dead(row, reason=reason, **who)
            return redirect("dead", pk=pk)
        except Refused as refusal:
            refused = str(refusal)
            row.refresh_from_db()
    now = database_now()
    context = {
        "now": now,
        "row": row,
        "until": ask_ends(row.dead_asked_at, now),
        "mine": row.dead_asked_by == request.user.get_username(),
        "refused": refused,
    }
    return render(request, "tenants/dead.html", context, status=409 if refused else 200)


def cells_context(now: datetime) -> dict[str, Any]:
    """Return what `_cells.html` draws."""
    return {"now": now, "cells": panels.cell_lines(now=now), "cells_every": 5}


@require_safe
@access(Role.VIEWER)
def tenant_options(request: HttpRequest) -> HttpResponse:
    """Options of a field in which a tenant is typed."""
    slugs = panels.matching_slugs(request.GET.get("tenant", "")[:100])
    return render(request, "tenants/_tenant_options.html", {"slugs": slugs})


@require_safe
@access(Role.VIEWER)
def tenant_placement(request: HttpRequest, slug: str) -> HttpResponse:
    """Where a tenant lives, its limits, and how it came there."""
    page = _tenant(slug)
    return fragment(
        request,
        "tenants/_tenant_placement.html",
        version=page.version,
        now=database_now(),
        read=lambda: {"page": page},
    )


@require_safe
@access(Role.VIEWER)
def tenant_instances(request: HttpRequest, slug: str) -> HttpResponse:
    """The instances that serve a tenant."""
    page, now = _tenant(slug), database_now()
    return render(request, "tenants/_tenant_instances.html", tenant_instances_context(page, now))


def tenant_instances_context(page: panels.TenantPage, now: datetime) -> dict[str, Any]:
    """Return what `_tenant_instances.html` draws."""
    version = page.entry.version if page.entry is not None and page.fenced else None
    lines = panels.instance_lines(page.placement.cell, tenant=page.tenant, version=version, now=now)
    return {"now": now, "page": page, "lines": lines}


def _tenant(slug: str) -> panels.TenantPage:
    page = panels.tenant_page(slug)
    if page is None:
        raise Http404(f"There is no tenant {slug}.")
    return page
