"""Periodic work of this app: ids in, one call."""

from __future__ import annotations

from celery import shared_task

from durable.clock import database_now
from tenants import services


@shared_task(name="tenants.sweep")
def sweep() -> None:
    """Mark instances gone whose lease and longest turn are over."""
    services.sweep(now=database_now())
