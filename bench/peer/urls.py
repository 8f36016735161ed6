"""A bare Django-Ninja endpoint: the statements of an unchanged poll, and nothing else of it."""

from __future__ import annotations

from django.contrib.auth.decorators import login_not_required
from django.http import HttpRequest, HttpResponse
from django.urls import path
from ninja import NinjaAPI

from durable.clock import database_now
from platform_admin.urls import urlpatterns as product
from tenants import queries

api = NinjaAPI(urls_namespace="peer", docs_url=None)


@api.get("/poll", response={304: None})
def poll(request: HttpRequest, instance: str) -> HttpResponse:
    """Read the clock, and the instance with its cell: what an unchanged poll cannot do without."""
    database_now()
    queries.asking(instance)
    return HttpResponse(status=304)


addresses, *names = api.urls
for address in addresses:
    login_not_required(address.callback)
urlpatterns = [*product, path("peer/", (addresses, *names))]
