"""Periodic work of this app: ids in, one call."""

from __future__ import annotations

from celery import shared_task

from durable.clock import database_now
from tenants import services


@shared_task(name="tenants.sweep")
def sweep() -> None:
    """Mark lapsed instances gone; delete what was kept of tenants that are no longer tracked."""
    services.sweep(now=database_now())
