"""`manage.py serve`: the whole installation on this machine, until Ctrl-C."""

from __future__ import annotations

import shlex
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from django.conf import settings
from django.contrib.auth.models import User
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError, CommandParser

from platform_admin.processes import KeepsDying, Supervisor, installation


def command(name: str) -> str:
    """Return how a shell here calls another command: by this interpreter, which has it all."""
    python = Path(sys.executable)
    if python.is_relative_to(here := Path.cwd()):
        python = python.relative_to(here)
    return shlex.join([str(python), "manage.py", name])


class Command(BaseCommand):
    help = "Bring the schema up to date, then run pages, workers and beat until Ctrl-C."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--host", default="127.0.0.1")
        parser.add_argument("--port", type=int, default=8000)

    def handle(self, *args: Any, host: str, port: int, **options: Any) -> None:
        self._claim(host, port)
        call_command("migrate", verbosity=0)
        if not User.objects.exists():
            self.stdout.write(
                f"Nobody can sign in yet: {command('role')} NAME admin --new --by NAME"
            )
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
        logs = settings.HOME / "log"
        try:
            with Supervisor(logs) as supervisor:
                supervisor.start(*installation(port, host=host))
                self.stdout.write(f"http://{host}:{port}/  (Ctrl-C ends it; logs in {logs})")
                while True:
                    for name in supervisor.tend():
                        self.stderr.write(f"{name} had ended and was started again")
                    time.sleep(0.25)
        except KeyboardInterrupt:
            return
        except KeepsDying as error:
            raise CommandError(str(error)) from error

    def _claim(self, host: str, port: int) -> None:
        """Refuse an address that somebody listens on: a second installation, as often as not.

        Web servers share a port if asked to, and then each answers half of the requests.
        """
        try:
            socket.create_server((host, port)).close()
        except OSError as error:
            raise CommandError(
                f"{host}:{port} can't be listened on: {error.strerror}. End what runs there, or"
                " choose another: make serve PORT=8001, or manage.py serve --port 8001."
            ) from error
