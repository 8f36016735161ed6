"""Periodic work of this app: ids in, one call."""

from __future__ import annotations

import subprocess
import sys
import time

from celery import shared_task
from django.conf import settings

from capacity import services
from durable.clock import database_now

# So long one message goes on: well below the hard limit, and others wait in its queue.
ROLLED_SECONDS, SWEPT_SECONDS = 4.0, 10.0


@shared_task(name="capacity.roll_up")
def roll_up() -> None:
    """Add reported usage to the ledger, and have turns refused whose budget that used up."""
    until = time.monotonic() + ROLLED_SECONDS
    while True:
        rolled = services.roll_up(now=database_now())
        # Without lines too: a budget that was raised lets go.
        services.mark_budgets(tenants=rolled.tenants, now=database_now())
        if not rolled.more or time.monotonic() >= until:
            return


@shared_task(name="capacity.allocate")
def allocate() -> None:
    """Divide tenants' limits over the instances that serve them."""
    services.allocate(now=database_now())


@shared_task(name="capacity.allocate_soon")
def allocate_soon() -> None:
    """The same between two rounds, where an instance has just joined or a tenant moves."""
    services.allocate_soon(now=database_now())


@shared_task(name="capacity.budgets")
def budgets() -> None:
    """Look at every budget anew: one was lowered, or a roll-up was killed before it looked."""
    services.mark_budgets(now=database_now())


@shared_task(name="capacity.prewarm")
def prewarm() -> None:
    """Tell cells which tenants to build ahead."""
    services.publish_prewarm(now=database_now())


@shared_task(name="capacity.sweep")
def sweep() -> None:
    """Delete what the ledger keeps no longer. What is too much for one message goes next time."""
    until = time.monotonic() + SWEPT_SECONDS
    while services.sweep_ledger(now=database_now()) and time.monotonic() < until:
        pass


@shared_task(name="capacity.isolation")
def isolation(pk: int) -> None:
    """Begin a run of the isolation suite beside this worker, which other work waits for.

    It writes what it finds itself. Killed, its row says nothing for ten minutes, and another may
    begin.
    """
    subprocess.Popen(
        [sys.executable, str(settings.BASE_DIR / "manage.py"), "isolation", "--run", str(pk)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
