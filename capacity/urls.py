"""Pages of instances, of isolation, and of what tenants may use and have used."""

from __future__ import annotations

from django.urls import path

from capacity import views, views_limits, views_usage

INSTANCE = "instances/<int:pk>"
TENANT = "tenants/<slug:slug>"

urlpatterns = [
    path("usage/", views_usage.usage_overview, name="usage_overview"),
    path("usage/largest.json", views_usage.usage_largest, name="usage_largest"),
    path("usage/reconciliation/", views_usage.reconciliation, name="reconciliation"),
    path(f"{TENANT}/limits/", views_limits.tenant_limits, name="tenant_limits"),
    path(f"{TENANT}/limits/applied/", views_limits.applied, name="applied"),
    path(f"{TENANT}/limits/check/", views_limits.check_limits, name="check_limits"),
    path(f"{TENANT}/limits/set/", views_limits.set_limits, name="set_limits"),
    path(f"{TENANT}/limits/try/", views_limits.try_limits, name="try_limits"),
    path(f"{TENANT}/limits/trial/end/", views_limits.end_trial, name="end_trial"),
    path(f"{TENANT}/limits/trial/adopt/", views_limits.adopt_trial, name="adopt_trial"),
    path(f"{TENANT}/limits/rotate/", views_limits.rotate, name="rotate"),
    path(f"{TENANT}/usage/", views_usage.tenant_usage, name="tenant_usage"),
    path(f"{TENANT}/usage/now/", views_usage.usage, name="usage"),
    path(f"{TENANT}/usage/minutes.json", views_usage.usage_minutes, name="usage_minutes"),
    path(f"{TENANT}/usage/days.json", views_usage.usage_days, name="usage_days"),
    path("my/usage/", views_usage.my_usage, name="my_usage"),
    path("my/usage/now/", views_usage.my_usage_now, name="my_usage_now"),
    path("my/usage/minutes.json", views_usage.my_usage_minutes, name="my_usage_minutes"),
    path("my/usage/days.json", views_usage.my_usage_days, name="my_usage_days"),
    path("usage/export.csv", views_usage.usage_export, name="usage_export"),
    path("instances/", views.instance_list, name="instance_list"),
    path("instances/table/", views.instance_table, name="instance_table"),
    path(f"{INSTANCE}/", views.instance, name="instance"),
    path(f"{INSTANCE}/state/", views.instance_state, name="instance_state"),
    path(f"{INSTANCE}/sizing/", views.instance_sizing, name="instance_sizing"),
    path("isolation/", views.isolation, name="isolation"),
    path("isolation/runs/", views.isolation_runs, name="isolation_runs"),
    path("isolation/run/", views.start_isolation, name="start_isolation"),
    path("isolation/resources/new/", views.add_resource, name="add_resource"),
    path("isolation/resources/<int:pk>/", views.set_resource, name="set_resource"),
    path("isolation/resources/<int:pk>/remove/", views.remove_resource, name="remove_resource"),
]
