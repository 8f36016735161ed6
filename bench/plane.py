"""A control plane for one bench: its own database, and this process one of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


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
