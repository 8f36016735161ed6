"""A control plane for one bench: its own database, and this process one of its own."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any


@contextmanager
def control_plane(database: str, **variables: str) -> Iterator[None]:
    """Set this process, and those that it starts, up on an empty database; close it at the end.

    `variables` are added to the environment. Import what needs Django inside.
    """
    os.environ.update(
        {
            "DATABASE_URL": database,
            "DJANGO_SETTINGS_MODULE": "platform_admin.settings",
            "LOG_LEVEL": "ERROR",
            # google-adk announces its experimental parts; static files nobody collected.
            "PYTHONWARNINGS": "ignore",
            **variables,
        }
    )
    import django
    from django.core.management import call_command
    from django.db import connections

    django.setup()
    call_command("migrate", verbosity=0)
    try:
        yield
    finally:
        connections.close_all()


def runtime_token(cells: Iterable[Any], *, by: str) -> str:
    """Make a token by which agent processes join these cells for an hour; return its secret."""
    from durable.clock import database_now
    from tenants import services
    from tenants.domain.roles import TokenRole

    now = database_now()
    _, secret = services.make_token(
        "agents",
        role=TokenRole.RUNTIME,
        cells=list(cells),
        expires_at=now + timedelta(hours=1),
        by=by,
        now=now,
    )
    return secret
