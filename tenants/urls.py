"""Fragments of tenants and cells; their pages span apps and are platform_admin's."""

from __future__ import annotations

from django.urls import path

from tenants import views

urlpatterns = [
    path("instances/<int:pk>/dead/", views.dead, name="dead"),
    path("cells/", views.cells, name="cells"),
    path("options/tenants/", views.tenant_options, name="tenant_options"),
    path("tenants/<slug:slug>/placement/", views.tenant_placement, name="tenant_placement"),
    path("tenants/<slug:slug>/instances/", views.tenant_instances, name="tenant_instances"),
]
