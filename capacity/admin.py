"""Rows as they are, to look at only: writing here would bypass the services and the audit."""

from __future__ import annotations

from django.contrib import admin

from capacity.models import IsolationRun, SharedResource, UsageDay, UsageMinute
from tenants.admin import ReadOnly

for model in (IsolationRun, SharedResource, UsageDay, UsageMinute):
    admin.site.register(model, ReadOnly)
