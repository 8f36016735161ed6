"""`manage.py restored`: after our own database was restored from a backup, what a person does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from durable.clock import database_now
from durable.errors import Refused
from migrations_app import restored
from migrations_app.models import RestoreFinding
from tenants import queries, services
from tenants.domain.words import counted
from tenants.models import Cell, Store

BY = "{} (command)"
HEAD = ("TENANT", "THE DATABASE SAYS", "THE STORES SAY", "VERDICT")


class Command(BaseCommand):
    help = (
        "Stop all machines and compare every tenant with the stores, after the control plane's own"
        " database was restored from a backup. May be run again and again."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--by", metavar="WHO", help="who you are, for the audit")
        parser.add_argument("--reason", default="", metavar="TEXT", help="why, for the audit")
        what = parser.add_mutually_exclusive_group()
        what.add_argument("--list", action="store_true", help="show what is open; change nothing")
        what.add_argument("--settle", metavar="TENANT", help="say where it lives (--on STORE)")
        what.add_argument(
            "--leave-refused", metavar="TENANT", help="nobody can say where it lives: go on without"
        )
        what.add_argument("--resume", action="store_true", help="start the machines again")
        parser.add_argument("--on", metavar="STORE", help="with --settle: the store of its data")
        parser.add_argument("--cell", metavar="CELL", help="with --settle: who serves it there")

    def handle(self, *args: Any, by: str | None, reason: str, **options: Any) -> None:
        if options["list"]:
            self._list()
            return
        if not by:
            raise CommandError("Say who you are, for the audit: --by WHO.")
        who = BY.format(by[: services.WHO_MAX - len(BY)])
        try:
            if options["settle"]:
                self._settle(options["settle"], options["on"], options["cell"], who, reason)
            elif tenant := options["leave_refused"]:
                found = self._finding(tenant)
                restored.leave_refused(found, by=who, reason=reason, now=database_now())
                self.stdout.write(f"{tenant} stays refused.")
            elif options["resume"]:
                restored.start_machines(by=who, reason=reason, now=database_now())
                self.stdout.write("The machines run again.")
            else:
                self._compare(who, reason)
        except Refused as refused:
            raise CommandError(str(refused)) from refused

    def _compare(self, who: str, reason: str) -> None:
        services.check_reason(reason)
        services.halt(by=who, why=f"The database was restored: {reason}", now=database_now())
        self.stdout.write("All machines are stopped.")
        restored.wait_for_steps(clock=database_now, sleep=time.sleep)
        found = restored.compare(by=who, reason=reason, now=database_now(), tell=self.stdout.write)
        self.stdout.write(
            f"The epoch is {found.epoch} now: every runtime and gateway is sent everything anew."
            f" The next move is above mv-{found.number}."
        )
        self._table([(one.tenant, one.says, one.told, one.verdict) for one in found.lines])
        right = found.tenants - found.differing
        self.stdout.write(f"{right:,} of {found.tenants:,} tenants are where the database says.")
        for name in found.strangers:
            self.stdout.write(
                f"A store guards {name}, which no tenant here has: it was onboarded, and moved,"
                " after the backup."
            )
        if found.differing:
            self.stdout.write(
                f"Refused: {counted(found.differing, 'tenant')}. Say of each where it lives:"
                " manage.py restored --settle TENANT --on STORE"
            )
        self._when()

    def _list(self) -> None:
        halt = queries.halt()
        if halt is None:
            self.stdout.write("The machines run.")
        else:
            self.stdout.write(f"Machines are {halt} by {halt.by}: {halt.why}")
        rows = [
            (one.tenant.slug, one.says, one.told, one.differs) for one in restored.open_findings()
        ]
        self._table(rows)
        self.stdout.write(f"Refused and not settled: {counted(len(rows), 'tenant')}.")
        self._when()

    def _when(self) -> None:
        halt = queries.halt()
        if halt is not None and halt.leases_until is not None:
            self.stdout.write(
                "Machines may start (--resume) once every tenant is settled, and not before"
                f" {halt.leases_until:%Y-%m-%d %H:%M:%S} UTC: until then instances may serve by"
                " leases of the lost database."
            )

    def _settle(self, tenant: str, on: str | None, cell: str | None, who: str, reason: str) -> None:
        found = self._finding(tenant)
        home = Store.objects.filter(key=on or "").first()
        if home is None:
            known = ", ".join(found.homes) or "none before another store answers"
            raise CommandError(f"Name the store of its data with --on. Possible: {known}.")
        chosen = Cell.objects.filter(slug=cell).first() if cell else None
        if cell and chosen is None:
            raise CommandError(f"There is no cell {cell}.")
        version = restored.settle(
            found, home=home, cell=chosen, by=who, reason=reason, now=database_now()
        )
        self.stdout.write(f"{tenant} lives on {home} by placement version {version}.")

    def _finding(self, tenant: str) -> RestoreFinding:
        found = restored.open_findings().filter(tenant__slug=tenant).first()
        if found is None:
            raise CommandError(f"No finding of a tenant {tenant} is open. See --list.")
        return found

    def _table(self, rows: Sequence[tuple[str, str, str, str]]) -> None:
        if not rows:
            return
        widths = [max(map(len, column)) for column in zip(HEAD, *rows, strict=True)]
        for row in (HEAD, *rows):
            cells = (text.ljust(width) for text, width in zip(row, widths, strict=True))
            self.stdout.write("  ".join(cells).rstrip())
