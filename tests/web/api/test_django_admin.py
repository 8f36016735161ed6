"""Django's admin shows our rows and changes none: it would bypass services and audit."""

from __future__ import annotations

from typing import Any

import pytest
from django.apps import apps
from django.contrib import admin
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse

from durable.clock import database_now
from tenants import services
from tenants.domain.roles import TokenRole
from tests import make

pytestmark = pytest.mark.django_db
MODELS = [
    model
    for app in ("tenants", "capacity")
    for model in apps.get_app_config(app).get_models()
    if not model._meta.auto_created
]


@pytest.fixture
def root() -> Client:
    client = Client()
    client.force_login(User.objects.create_superuser("root"))
    return client


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_a_superuser_looks_and_changes_nothing(cast: make.Cast, root: Client, model: Any) -> None:
    name = f"admin:{model._meta.app_label}_{model._meta.model_name}"
    assert root.get(reverse(f"{name}_changelist")).status_code == 200
    assert root.get(reverse(f"{name}_add")).status_code == 403
    row = model.objects.first()
    if row is None:
        return
    before = model.objects.values().get(pk=row.pk)
    assert root.get(reverse(f"{name}_change", args=[row.pk])).status_code == 200
    assert root.post(reverse(f"{name}_change", args=[row.pk]), {}).status_code == 403
    assert root.post(reverse(f"{name}_delete", args=[row.pk]), {"post": "yes"}).status_code == 403
    assert model.objects.values().get(pk=row.pk) == before


def test_every_model_is_there(root: Client) -> None:
    assert all(admin.site.is_registered(model) for model in MODELS)


def test_a_digest_is_not_shown(cast: make.Cast, root: Client) -> None:
    now = database_now()
    token, _ = services.make_token(
        "g",
        role=TokenRole.GATEWAY,
        expires_at=now.replace(year=now.year + 1),
        by="ada",
        now=now,
    )
    page = root.get(reverse("admin:tenants_token_change", args=[token.pk]))
    assert token.prefix in page.content.decode()
    assert token.digest not in page.content.decode()
