"""A ledger in a database of its own, and processes that are killed while they add to it.

`-m tests.faults.roller fill|roll|show`, on DATABASE_URL. `roll` works until nothing is left; with
STOP_IN=name it stops itself (SIGSTOP) once, inside the transaction, when that table is written.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

TENANTS, LINES = 5, 1_500
NOW = datetime(2026, 3, 2, 23, 30, tzinfo=UTC)


def fill() -> None:
    """Make the tables, and lines of usage of a token each that are not in the ledger yet."""
    from django.core.management import call_command

    from tenants.models import RuntimeInstance, UsageLine
    from tests import make

    call_command("migrate", verbosity=0)
    home = make.region(now=NOW)
    cell = make.cell("cell-1", region=home, now=NOW)
    store = make.store("store-1", region=home, now=NOW)
    tenants = [make.tenant(f"t-{n}", cell=cell, store=store, now=NOW) for n in range(TENANTS)]
    instance = RuntimeInstance.objects.create(
        key="i",
        cell=cell,
        name="agents",
        boot="b",
        longest_turn_seconds=1,
        longest_tool_seconds=1,
        joined_at=NOW,
        lease_until=NOW,
    )
    UsageLine.objects.bulk_create(
        UsageLine(
            instance=instance,
            seq=number,
            tenant=tenants[number % TENANTS],
            minute=NOW + timedelta(minutes=number % 60),
            tokens=1,
            refused={"rate": 1},
        )
        for number in range(LINES)
    )


def roll() -> None:
    """Add lines to the ledger, a few a transaction, until none is left."""
    from capacity import services
    from capacity.services import ledger
    from durable.clock import database_now
    from tenants.models import UsageLine

    ledger.LINES_AT_ONCE = 20
    if name := os.environ.get("STOP_IN"):
        real, stopped = ledger._add, []

        def stopping(model: Any, *args: Any) -> None:
            real(model, *args)
            if model.__name__ == name and not stopped:
                stopped.append(name)
                os.kill(os.getpid(), signal.SIGSTOP)

        ledger._add = stopping
    print("began", flush=True)
    while UsageLine.objects.filter(rolled_at=None).exists():
        services.roll_up(now=database_now())


def show() -> None:
    """Print what is in the ledger."""
    from capacity.models import UsageDay, UsageMinute
    from tenants.models import UsageLine

    def summed(model: Any) -> list[int]:
        rows = list(model.objects.all())
        return [sum(row.tokens for row in rows), sum(row.refused["rate"] for row in rows)]

    found = {
        "left": UsageLine.objects.filter(rolled_at=None).count(),
        "minutes": summed(UsageMinute),
        "days": summed(UsageDay),
        "rows": [UsageMinute.objects.count(), UsageDay.objects.count()],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    import django

    django.setup()
    {"fill": fill, "roll": roll, "show": show}[sys.argv[1]]()
