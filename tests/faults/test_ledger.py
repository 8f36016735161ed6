"""Usage is counted once, whichever process dies or hangs while it is added: on both databases."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.roller import LINES, TENANTS

pytestmark = pytest.mark.timeout(200)

WHOLE = {
    "left": 0,
    "minutes": [LINES, LINES],
    "days": [LINES, LINES],
    # Minutes and tenants go round together, so each of the 60 minutes is one tenant's.
    "rows": [60, 2 * TENANTS],
}
NOTHING = {"left": LINES, "minutes": [0, 0], "days": [0, 0], "rows": [0, 0]}


class Ledger:
    """A database with lines in it, and the processes that add them up."""

    def __init__(self, url: str) -> None:
        self.environment = {
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "platform_admin.settings",
            "DATABASE_URL": url,
            "LOG_LEVEL": "CRITICAL",
        }
        self.started: list[subprocess.Popen[str]] = []
        assert self.start("fill").wait(120) == 0

    def start(self, what: str, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.roller", what],
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def shown(self) -> dict[str, Any]:
        text, _ = self.start("show").communicate(timeout=60)
        found: dict[str, Any] = json.loads(text)
        return found

    def end(self) -> None:
        for process in self.started:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


@pytest.fixture(params=["postgresql", "sqlite"])
def ledger(
    request: pytest.FixtureRequest, tmp_path: Path, new_database: Callable[[], str]
) -> Iterator[Ledger]:
    sqlite = request.param == "sqlite"
    made = Ledger(f"sqlite:///{tmp_path}/ledger.sqlite3" if sqlite else new_database())
    yield made
    made.end()


def test_processes_that_are_killed_count_each_line_once(ledger: Ledger) -> None:
    for table in ("UsageMinute", "UsageDay"):
        hung = ledger.start("roll", STOP_IN=table)
        until = time.monotonic() + 60
        while _state(hung.pid) != "T":
            assert time.monotonic() < until, "it never came to that table"
            time.sleep(0.02)
        hung.send_signal(signal.SIGKILL)
        hung.wait()
        # Inside its transaction it had counted nothing.
        assert ledger.shown() == NOTHING
    # What a kill interrupts depends on the machine anyway; the seed only spreads the moments.
    dice = random.Random(5)
    for _ in range(3):
        pair = [ledger.start("roll") for _ in range(2)]
        for process in pair:
            assert process.stdout is not None
            process.stdout.readline()
        time.sleep(dice.random() * 0.1)
        for process in pair:
            process.send_signal(signal.SIGKILL)
            process.wait()
    assert ledger.start("roll").wait(60) == 0
    assert ledger.shown() == WHOLE


def _state(pid: int) -> str:
    """Return a process's state letter; T is stopped."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]
