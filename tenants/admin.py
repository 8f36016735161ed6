"""Rows as they are, to look at only: writing here would bypass the services and the audit."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.contrib.auth.models import Group, User
from django.http import HttpRequest

from tenants import queries
from tenants.domain.roles import Role
from tenants.models import (
    Agent,
    AuditEntry,
    Cell,
    Counter,
    DirtyLine,
    Grants,
    Halt,
    Membership,
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
    """A model that admins can look at and nobody can change."""

    def has_module_permission(self, request: HttpRequest) -> bool:
        return queries.role_of(request.user) is Role.ADMIN

    def has_view_permission(self, request: HttpRequest, *args: Any) -> bool:
        return queries.role_of(request.user) is Role.ADMIN

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


# Django's own pages of users and groups give roles past the audit: `manage.py role` does it.
admin.site.unregister([User, Group])


@admin.register(User)
class UserAdmin(ReadOnly):
    exclude = ("password",)


for model in (
    Agent,
    AuditEntry,
    Cell,
    Counter,
    DirtyLine,
    Grants,
    Group,
    Halt,
    Membership,
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
