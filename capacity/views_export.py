"""The ledger as a file. The page of it is in views.py."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.views.decorators.http import require_safe

from capacity.exporting import days_asked, usage_csv
from durable.clock import database_now
from durable.errors import Refused
from tenants.domain.roles import Role
from tenants.models import Tenant
from tenants.views import access


@require_safe
@access(Role.OPERATOR)
def usage_export(request: HttpRequest) -> HttpResponseBase:
    """The days of the ledger as CSV: ?from=2026-03-01&to=2026-03-31, of one ?tenant= or of all."""
    slug = request.GET.get("tenant", "").replace("\0", "")[:60]
    tenant = Tenant.objects.filter(slug=slug).first() if slug else None
    try:
        if slug and tenant is None:
            raise NoSuchTenant(f"There is no tenant {slug}. Leave it out for all tenants.")
        first, last = days_asked(
            request.GET.get("from", ""), request.GET.get("to", ""), today=database_now().date()
        )
    except Refused as refusal:
        return HttpResponse(str(refusal), status=refusal.status, content_type="text/plain")
    return usage_csv(first, last, tenant=tenant)


class NoSuchTenant(Refused):
    """An export names a tenant that there is not."""

    status = 404
