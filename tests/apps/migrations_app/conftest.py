"""The same worlds that the fault tests move in."""

from __future__ import annotations

from tests.faults.conftest import both, files, servers

__all__ = ["both", "files", "servers"]
