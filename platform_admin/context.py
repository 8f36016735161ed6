"""What every full page shows besides its own: the signals strip, the clock, who is signed in."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from django.utils.functional import SimpleLazyObject

from durable.clock import database_now
from platform_admin.strip import signals
from tenants import queries
from tenants.domain.roles import Role, allows


def operator_page(request: HttpRequest) -> dict[str, Any]:
    """Return lazy values, so that a fragment that shows none of them reads nothing."""
    role = SimpleLazyObject(lambda: getattr(request, "role", None) or queries.role_of(request.user))
    return {
        "role": role,
        "may_operate": SimpleLazyObject(lambda: allows(role or None, Role.OPERATOR)),
        "strip": SimpleLazyObject(lambda: signals(now=database_now())),
    }
