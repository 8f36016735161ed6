"""What a tenant of each tier is promised; a flood beside it must not break that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from tenants.domain.names import Tier


@dataclass(frozen=True)
class Slo:
    """Bounds on one tenant's turns while its neighbours do what they like."""

    # Time to the first event of a turn that was admitted, 95th percentile.
    p95_ms: int
    # Turns that failed or were refused although the tenant was within its own limits.
    error_rate: float

    def holds(self, p95_ms: float, error_rate: float) -> bool:
        """Return whether what was measured keeps the promise.

        >>> SLOS[Tier.POOLED].holds(740.0, 0.002), SLOS[Tier.SILO].holds(740.0, 0.002)
        (True, False)
        """
        return p95_ms <= self.p95_ms and error_rate <= self.error_rate


# The more a tenant has for itself, the less a neighbour may cost it.
SLOS: Mapping[Tier, Slo] = {
    Tier.POOLED: Slo(p95_ms=1_500, error_rate=0.01),
    Tier.BRIDGE: Slo(p95_ms=1_000, error_rate=0.005),
    Tier.SILO: Slo(p95_ms=1_000, error_rate=0.001),
}

# A run of the isolation tests takes a minute or two. One without a word for so long was killed.
RUN_LASTS = timedelta(minutes=10)
