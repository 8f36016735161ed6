"""`manage.py isolation`: run the isolation suite, and keep what it finds for the isolation page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from capacity import services
from capacity.models import IsolationRun
from durable.clock import database_now
from durable.errors import Refused
from platform_admin.processes import ROOT

# All that the suite is given of this installation: it makes one of its own, and the addresses of
# stores, the secrets and the database are none of its agents' business.
GIVEN = ("PATH", "HOME", "LANG", "TMPDIR", "PYTHONPATH")
COMMAND = [sys.executable, "-W", "ignore", "-m", "bench.isolation", "--json"]


class Command(BaseCommand):
    help = (
        "Run the isolation suite against real agent processes on a control plane of their own, and"
        " keep the results for the isolation page. Exits with 1 if anything was broken: a gate for"
        " releases. Needs the `adk` extra."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--by", default="", metavar="WHO", help="who you are, for the audit")
        parser.add_argument("--run", type=int, metavar="ID", help="of a run that the page began")

    def handle(self, *args: Any, by: str, run: int | None, **options: Any) -> None:
        row = self._row(by, run)
        found: list[dict[str, Any]] = []
        environment = {name: os.environ[name] for name in GIVEN if name in os.environ}
        with subprocess.Popen(
            COMMAND, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
        ) as suite:
            assert suite.stdout is not None
            for line in suite.stdout:
                result = json.loads(line)
                found.append(result)
                services.note_isolation(row, found)
                self.stdout.write(f"{'held  ' if result['held'] else 'BROKEN'}  {result['name']}")
        # 1 says that a test was broken; anything else, that the suite was.
        whole = suite.wait() in (0, 1) and bool(found)
        if not services.end_isolation(row, found, whole=whole, now=database_now()):
            raise CommandError(
                "The suite did not pass: see above, or the isolation page."
                if whole
                else f"The suite did not come to its end (exit code {suite.returncode})."
            )

    def _row(self, by: str, run: int | None) -> IsolationRun:
        if run is not None:
            row = IsolationRun.objects.filter(pk=run, ended_at=None).first()
            if row is None:
                raise CommandError(f"There is no run {run} that goes on.")
            return row
        if not by:
            raise CommandError("Say who you are, for the audit: --by WHO.")
        try:
            return services.start_isolation(by=f"{by} (command)", now=database_now())
        except Refused as refusal:
            raise CommandError(str(refusal)) from None
