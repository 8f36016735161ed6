"""`manage.py open_tenant`: break-glass for a tenant that is refused and nobody opens.

Needs the database and the stores: no worker, no beat, no broker, no web.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from durable.clock import database_now
from durable.errors import Refused
from migrations_app import opening, safety
from tenants import services
from tenants.models import Tenant

BY = "{} (command)"


class Command(BaseCommand):
    help = (
        "Open a tenant that is refused although no move is about to open it: takes the steps of"
        " its move in this process, or opens its home. Without a tenant: list who breaks a rule of"
        " safety now. May be run again and again."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("tenant", metavar="SLUG", nargs="?")
        parser.add_argument("--by", metavar="WHO", help="who you are, for the audit")
        parser.add_argument("--reason", default="", metavar="TEXT", help="why, for the audit")
        parser.add_argument("--yes", metavar="SLUG", help="the tenant once more: don't ask")

    def handle(
        self,
        *args: Any,
        tenant: str | None,
        by: str | None,
        reason: str,
        yes: str | None,
        **options: Any,
    ) -> None:
        if tenant is None:
            self._list()
            return
        if not by:
            raise CommandError("Say who you are, for the audit: --by WHO.")
        row = Tenant.objects.filter(slug=tenant, placement__isnull=False).first()
        if row is None:
            raise CommandError(f"There is no tenant {tenant}.")
        try:
            services.check_reason(reason)
            found = opening.look(row, now=database_now())
            if yes is None:
                self.stdout.write(f"{row}: {found.words}.")
                self.stdout.write(opening.what_it_does(found))
                yes = input(f"Type {row} to go on: ").strip()
            if yes != row.slug:
                raise CommandError(f"That is not {row}. Nothing was changed.")
            opening.open_tenant(
                row,
                by=BY.format(by[: services.WHO_MAX - len(BY)]),
                reason=reason,
                clock=database_now,
                sleep=time.sleep,
                tell=self._tell,
                bounded=ended_after(settings.DURABLE_STEP_SECONDS),
            )
        except Refused as refused:
            raise CommandError(str(refused)) from refused

    def _tell(self, line: str) -> None:
        self.stdout.write(f"{database_now():%H:%M:%S} {line}")

    def _list(self) -> None:
        found = safety.broken_now(now=database_now())
        for state in found[: safety.MOST]:
            self.stdout.write(f"{state.tenant}: {state.words}.")
        if len(found) > safety.MOST:
            self.stdout.write("And more.")
        if not found:
            self.stdout.write("No tenant breaks a rule of safety.")


def ended_after(seconds: float) -> Any:
    """Return what ends this process, as a worker is ended, where a step outlasts its hard limit.

    Stores that nothing closes count on that: the next claim waits so long, and then writes. Whoever
    is ended in the middle runs the command again.
    """

    @contextmanager
    def bounded() -> Iterator[None]:
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    return bounded
