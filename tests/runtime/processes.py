"""Our library in processes of its own, for the tests that need real ones."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFORMANCE = ROOT / "tests/runtime/conformance.py"
RUNTIME = ROOT / "tests/runtime/runtime_process.py"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def runtime(port: int, *options: str) -> list[str]:
    """Return the command of a process that lets turns in at `port`."""
    return [sys.executable, str(RUNTIME), "--port", str(port), *options]
