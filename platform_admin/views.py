"""Pages over several apps, signing in and out, and whether the product is up."""

from __future__ import annotations

import hashlib
from typing import Any

from django import forms
from django.contrib.auth.decorators import login_not_required
from django.contrib.auth.forms import AuthenticationForm
from django.contrib.auth.views import LoginView, LogoutView
from django.core.cache import cache
from django.core.exceptions import ValidationError
from django.core.paginator import Paginator
from django.db import DatabaseError, connection
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_POST, require_safe

from capacity.panels import instances as instances_panel
from capacity.panels import isolation as isolation_panel
from capacity.panels import usage as usage_panel
from durable.clock import database_now
from durable.errors import Refused
from migrations_app import services
from migrations_app.panels import lists
from migrations_app.panels import overview as moves
from migrations_app.panels import safety as safety_panel
from migrations_app.views import live_moves_context, tenant_moves_context
from migrations_app.views_channels import tenant_channels_context
from migrations_app.views_rehearsals import rehearsals_context
from platform_admin.strip import signals as read_signals
from tenants import panels as tenants
from tenants import queries
from tenants.domain.names import check_address_from
from tenants.domain.roles import Role
from tenants.domain.words import ago, counted
from tenants.models import Store
from tenants.panels import Attention, TenantsFilter
from tenants.views import (
    access,
    cells_context,
    nothing_changed,
    page_number,
    tenant_instances_context,
)

# So many wrong passwords for one name from one address lock that pair out for so long.
SIGN_IN_TRIES, SIGN_IN_LOCKED_SECONDS = 8, 300


@require_safe
@access(Role.VIEWER)
def overview(request: HttpRequest) -> HttpResponse:
    """What moves, what is fenced, what is blocked."""
    now = database_now()
    return render(
        request,
        "platform_admin/overview.html",
        {
            **_attention(now),
            **live_moves_context(now),
            **cells_context(now),
            "upcoming": moves.next_up(now=now),
        },
    )


@require_safe
@access(Role.VIEWER)
def attention(request: HttpRequest) -> HttpResponse:
    """What needs a person, worst first."""
    return render(request, "platform_admin/_attention.html", _attention(database_now()))


def _attention(now: Any) -> dict[str, Any]:
    items: list[Attention] = sorted(
        [
            *moves.attention(now=now),
            *safety_panel.attention(now=now),
            *tenants.attention(now=now),
            *instances_panel.attention(now=now),
            *isolation_panel.attention(),
            *usage_panel.attention(now=now),
        ],
        key=lambda item: (item.rank, item.since, item.key),
    )
    summary = "Nothing needs a person."
    if items:
        needs = "thing needs" if len(items) == 1 else "things need"
        summary = f"{len(items)} {needs} a person. The worst is {ago(items[0].since, now)} old."
    return {"now": now, "items": items, "summary": summary}


@require_safe
@access(Role.VIEWER)
def next_up(request: HttpRequest) -> HttpResponse:
    """What will happen by itself, soonest first."""
    now = database_now()
    context = {"now": now, "upcoming": moves.next_up(now=now)}
    return render(request, "platform_admin/_next_up.html", context)


@require_safe
@access(Role.VIEWER)
def signals(request: HttpRequest) -> HttpResponse:
    """The strip, and the clock of the top bar with it."""
    strip = read_signals(now=database_now())
    response = render(request, "platform_admin/_signals.html", {"strip": strip, "fragment": True})
    if request.GET.get("v") == strip.version:
        # Only the clock has changed: it is swapped out of band, the strip stays as it is.
        response.headers["HX-Reswap"] = "none"
    return response


@require_safe
@access(Role.VIEWER)
def tenant_list(request: HttpRequest) -> HttpResponse:
    """Every tenant with where it lives; searched, narrowed and sorted."""
    wanted = TenantsFilter(
        text=request.GET.get("q", "").strip()[:100],
        cell=request.GET.get("cell", "")[:60],
        store=request.GET.get("store", "")[:60],
        tier=request.GET.get("tier", "")[:10],
        sort=request.GET.get("sort", "tenant")[:20],
        page=page_number(request),
    )
    found = tenants.tenants_page(wanted)
    now = database_now()
    live = lists.live_states((line.tenant for line in found.lines), now=now)
    rows = [(line, live.get(line.tenant.pk)) for line in found.lines]
    template = "tenants/_tenants_table.html" if request.htmx else "tenants/tenants.html"
    context = {
        "now": now,
        "found": found,
        "rows": rows,
        "choices": tenants.choices(),
        "columns": COLUMNS,
        "shown": counted(found.page.paginator.count, "tenant"),
    }
    response = render(request, template, context)
    response.headers["Vary"] = "HX-Request, Cookie"
    return response


# The sortable columns of the list: key of the sort, heading.
COLUMNS = (
    ("tenant", "Tenant"),
    ("app", "App name"),
    ("cell", "Cell"),
    ("store", "Store"),
    ("tier", "Tier"),
    ("placed", "Placement version"),
)


@require_safe
@access(Role.VIEWER)
def tenant(request: HttpRequest, slug: str) -> HttpResponse:
    """One tenant: where it lives, its limits, its moves and its instances."""
    page = tenants.tenant_page(slug)
    if page is None:
        raise Http404(f"There is no tenant {slug}.")
    now = database_now()
    context = {
        **tenant_instances_context(page, now),
        **tenant_moves_context(page.tenant, now),
        **tenant_channels_context(page.tenant),
        **rehearsals_context(page.tenant, now),
        "v": page.version,
    }
    return render(request, "tenants/tenant.html", context)


STORE_ROWS = 50


@require_safe
@access(Role.VIEWER)
def stores(request: HttpRequest) -> HttpResponse:
    """Every store: its kind, where its address comes from, and what is kept beside it."""
    page = Paginator(tenants.stores(), STORE_ROWS).get_page(page_number(request))
    lines = [tenants.store_line(store) for store in page]
    context = {"now": database_now(), "page": page, "lines": lines}
    return render(request, "tenants/stores.html", context)


@require_safe
@access(Role.VIEWER)
def store(request: HttpRequest, key: str) -> HttpResponse:
    """One store, and where the artifact and memory services beside its sessions are."""
    return _store_page(request, _store(key))


@require_POST
@access(Role.ADMIN)
def store_services(request: HttpRequest, key: str) -> HttpResponse:
    """Say where the services beside a store's sessions are; references only."""
    found = _store(key)
    given = {name: request.POST.get(name, "").strip() for name in BESIDE}
    try:
        services.set_store_services(
            found,
            **given,
            by=request.user.get_username(),
            reason=request.POST.get("reason", "").strip(),
            now=database_now(),
        )
    except Refused as refusal:
        kept = {name: text if _is_reference(text) else "" for name, text in given.items()}
        return _store_page(request, found, refused=nothing_changed(refusal), given=kept)
    return redirect("store", key=key)


BESIDE = ("artifacts_from", "memory_from")


def _is_reference(text: str) -> bool:
    """Whether a text may be shown: somebody may have pasted an address with its password."""
    try:
        check_address_from(text)
    except Refused:
        return False
    return True


def _store(key: str) -> Store:
    found: Store | None = tenants.stores().filter(key=key).first()
    if found is None:
        raise Http404(f"There is no store {key}.")
    return found


def _store_page(
    request: HttpRequest, found: Store, *, refused: str = "", given: dict[str, str] | None = None
) -> HttpResponse:
    context = {
        "now": database_now(),
        "line": tenants.store_line(found),
        "given": given or {name: getattr(found, name) for name in BESIDE},
        "moves": lists.live_moves_by(found),
        "may_set": request.role is Role.ADMIN,
        "refused": refused,
    }
    return render(request, "tenants/store.html", context, status=409 if refused else 200)


class SignInForm(AuthenticationForm):
    """Name and password; too many wrong ones are answered without looking."""

    def clean(self) -> dict[str, Any]:
        """Count wrong passwords per name and address in the cache."""
        address = self.request.META.get("REMOTE_ADDR", "") if self.request else ""
        name = str(self.cleaned_data.get("username", "")).lower()
        key = f"sign-in:{hashlib.sha256(f'{address} {name}'.encode()).hexdigest()}"
        tries = cache.get(key, 0)
        if tries >= SIGN_IN_TRIES:
            raise ValidationError("Too many wrong passwords. Wait 5 minutes, then try again.")
        try:
            cleaned: dict[str, Any] = super().clean()
        except ValidationError:
            cache.set(key, tries + 1, SIGN_IN_LOCKED_SECONDS)
            raise
        cache.delete(key)
        return cleaned

    error_messages = {
        "invalid_login": "This name and password do not match. Both are case-sensitive.",
        "inactive": "This account is switched off.",
    }
    username = forms.CharField(max_length=150)


class SignIn(LoginView):
    """Leads operators to the overview, a tenant's people to their usage."""

    authentication_form = SignInForm
    redirect_authenticated_user = True

    def get_default_redirect_url(self) -> str:
        """Return where to go when the address names no page."""
        own = queries.tenant_of(self.request.user) is not None
        return reverse("my_usage") if own else super().get_default_redirect_url()


_login = SignIn.as_view()
_logout = LogoutView.as_view()


@login_not_required
def sign_in(request: HttpRequest) -> HttpResponse:
    """The one page without a session."""
    return _login(request)


@require_POST
@login_not_required
def sign_out(request: HttpRequest) -> HttpResponse:
    """End the session."""
    return _logout(request)


@require_safe
@login_not_required
def healthz(request: HttpRequest) -> HttpResponse:
    """Say that this process answers; looks at nothing else."""
    return JsonResponse({"status": "ok"})


@require_safe
@login_not_required
def readyz(request: HttpRequest) -> HttpResponse:
    """Say whether requests can be served: the database answers. A lost broker loses no decision."""
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1 FROM tenants_counter LIMIT 1")
    except DatabaseError:
        return JsonResponse({"status": "not ready", "database": "no answer"}, status=503)
    return JsonResponse({"status": "ok", "database": "ok"})
