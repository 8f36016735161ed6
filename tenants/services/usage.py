"""Usage as runtimes reported it: handed out once to whoever keeps the ledger, swept afterwards."""

from __future__ import annotations

from datetime import datetime

from tenants.models import UsageLine
from tenants.services.rows import assert_in_transaction


def take_usage(*, most: int, now: datetime) -> list[UsageLine]:
    """Return up to `most` lines that nobody has taken yet, oldest first, and mark them as taken.

    Inside the caller's transaction, which must exist and in which they are added up: a line is
    taken and counted, or neither. Whoever asks at the same time gets others.
    """
    assert_in_transaction()
    # Lines that another transaction has locked are its own: it marks them, or is rolled back and
    # they are there at the next call. On SQLite a transaction is the one writer from its start.
    lines = list(
        UsageLine.objects.select_for_update(skip_locked=True, of=("self",))
        .select_related("tenant")
        .filter(rolled_at=None)
        .order_by("pk")[:most]
    )
    if lines:
        UsageLine.objects.filter(pk__in=[line.pk for line in lines]).update(rolled_at=now)
    return lines


def sweep_usage(*, before: datetime, most: int) -> int:
    """Delete lines that were taken before then, among the `most` oldest; return how many.

    What nobody has taken stays, however old.
    """
    # Lines have the order in which they came, so the old ones are in front: no other index of a
    # table that is written with every report.
    oldest = list(UsageLine.objects.order_by("pk").values_list("pk", flat=True)[:most])
    deleted, _ = UsageLine.objects.filter(pk__in=oldest, rolled_at__lt=before).delete()
    return deleted
