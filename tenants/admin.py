"""Rows as they are, to look at only: writing here would bypass the services and the audit."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.http import HttpRequest

from tenants.models import (
    Agent,
    AuditEntry,
    Cell,
    Counter,
    DirtyLine,
    Placement,
    PlacementChange,
    PolicyEntry,
    Region,
    RuntimeInstance,
    Scope,
    Store,
    Tenant,
    Token,
    UsageLine,
)


class ReadOnly(admin.ModelAdmin):
    """A model that can be looked at and not changed, whoever asks."""

    def has_add_permission(self, request: HttpRequest, *args: Any) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, *args: Any) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, *args: Any) -> bool:
        return False


@admin.register(Token)
class TokenAdmin(ReadOnly):
    # The secret isn't kept; what it is looked up by isn't shown either.
    exclude = ("digest",)


for model in (
    Agent,
    AuditEntry,
    Cell,
    Counter,
    DirtyLine,
    Placement,
    PlacementChange,
    PolicyEntry,
    Region,
    RuntimeInstance,
    Scope,
    Store,
    Tenant,
    UsageLine,
):
    admin.site.register(model, ReadOnly)
