"""The two clocks of a process: one for leases, one for the minutes that usage is counted by."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol

# Counts while the machine is suspended, so a lease runs out in a laptop's or a virtual machine's
# sleep as it does at the control plane. macOS has no BOOTTIME; its MONOTONIC counts sleep too.
_LEASE_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Clock(Protocol):
    """What the library asks of a clock; tests drive their own."""

    def boottime(self) -> float:
        """Return seconds since some fixed moment, suspended time included. Never steps back."""

    def now(self) -> datetime:
        """Return the wall clock's time, UTC. It may step: it names minutes and ends budgets."""


class SystemClock:
    """The machine's own clocks."""

    def boottime(self) -> float:
        """Return seconds since the machine booted."""
        return time.clock_gettime(_LEASE_CLOCK)

    def now(self) -> datetime:
        """Return the present time, UTC."""
        return datetime.now(UTC)
