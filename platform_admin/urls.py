"""Every URL of the product."""

from __future__ import annotations

from django.contrib import admin
from django.urls import include, path

from platform_admin import views
from platform_admin.api import api

urlpatterns = [
    path("", views.overview, name="overview"),
    path("signals/", views.signals, name="signals"),
    path("attention/", views.attention, name="attention"),
    path("next/", views.next_up, name="next_up"),
    path("tenants/", views.tenant_list, name="tenants"),
    path("tenants/<slug:slug>/", views.tenant, name="tenant"),
    path("stores/", views.stores, name="stores"),
    path("stores/<slug:key>/", views.store, name="store"),
    path("stores/<slug:key>/services/", views.store_services, name="store_services"),
    path("", include("tenants.urls")),
    path("", include("capacity.urls")),
    path("", include("migrations_app.urls")),
    path("sign-in/", views.sign_in, name="login"),
    path("sign-out/", views.sign_out, name="logout"),
    path("healthz", views.healthz, name="healthz"),
    path("readyz", views.readyz, name="readyz"),
    path("api/v1/", api.urls),
    path("admin/", admin.site.urls),
]
