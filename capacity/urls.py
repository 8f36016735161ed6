"""Pages of instances, of isolation, and of what tenants may use and have used."""

from __future__ import annotations

from django.urls import path

from capacity import views, views_export

INSTANCE = "instances/<int:pk>"

urlpatterns = [
    path("usage/export.csv", views_export.usage_export, name="usage_export"),
    path("instances/", views.instance_list, name="instance_list"),
    path("instances/table/", views.instance_table, name="instance_table"),
    path(f"{INSTANCE}/", views.instance, name="instance"),
    path(f"{INSTANCE}/state/", views.instance_state, name="instance_state"),
    path(f"{INSTANCE}/sizing/", views.instance_sizing, name="instance_sizing"),
    path("isolation/", views.isolation, name="isolation"),
    path("isolation/resources/new/", views.add_resource, name="add_resource"),
    path("isolation/resources/<int:pk>/", views.set_resource, name="set_resource"),
    path("isolation/resources/<int:pk>/remove/", views.remove_resource, name="remove_resource"),
]
