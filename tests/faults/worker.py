"""A worker of one move, as a process to be killed or stopped: `-m tests.faults.worker ID`.

With STOP_AFTER=name it stops itself (SIGSTOP) once, right after that call of the target's
port: inside a chunk's transaction, with its locks held.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any


def main(pk: int) -> None:
    import django

    django.setup()
    from durable import driver
    from durable.clock import database_now
    from migrations_app import steps
    from migrations_app.models import TenantMigration
    from migrations_app.ports.postgres import PostgresStore

    if name := os.environ.get("STOP_AFTER"):
        real = getattr(PostgresStore, name)
        # Digests of both sides are read in two threads at once: a second stop would find nobody
        # who continues it.
        first = threading.Lock()

        def stopping(self: Any, *args: Any, **kwargs: Any) -> Any:
            answer = real(self, *args, **kwargs)
            if first.acquire(blocking=False):
                os.kill(os.getpid(), signal.SIGSTOP)
            return answer

        setattr(PostgresStore, name, stopping)
    machine = steps.machine(lambda pk, phase, seconds: None)
    until = time.monotonic() + 90
    while time.monotonic() < until:
        if TenantMigration.objects.values_list("due_at", flat=True).get(pk=pk) is None:
            return
        if not driver.advance(machine, pk, clock=database_now):
            time.sleep(0.02)


if __name__ == "__main__":
    main(int(sys.argv[1]))
