"""All machines stop at once: this database may be older than what the stores hold.

A database restored from a backup believes what is no longer so, and a machine that acts on it
copies over, deletes or opens what a tenant has gone on from.
"""

from __future__ import annotations

import secrets
from datetime import datetime, timedelta

from django.conf import settings
from django.db import transaction
from django.db.models import Max

from durable.errors import Refused
from tenants import queries
from tenants.domain.fence import LEASE_MARGIN
from tenants.models import Cell, Halt, RuntimeInstance
from tenants.services.auditing import audit, check_reason
from tenants.services.rows import lock_cells, lock_counter

HALT = "machines"


class MachinesStopped(Refused):
    """Nothing begins while all machines are stopped."""


class MachinesRun(Refused):
    """No machine is stopped."""


class NotCompared(Refused):
    """Nobody has compared this database with the stores since the machines stopped."""


class LeasesRun(Refused):
    """Instances may still serve by leases that the lost database gave, and we don't know them."""


@transaction.atomic
def halt(*, by: str, why: str, now: datetime) -> Halt:
    """Stop all machines; return the row that says so. Stopped already: the first word stands."""
    row, made = Halt.objects.select_for_update().get_or_create(
        pk=1, defaults={"since": now, "by": by, "why": why}
    )
    if not made:
        if row.ended_at is None:
            return row
        row.since, row.by, row.why = now, by, why
        row.compared_at = row.leases_until = row.ended_at = None
        row.ended_by = ""
        row.save()
    audit(who=by, verb="machines.halt", subject=HALT, reason=why, now=now)
    return row


@transaction.atomic
def replace_epoch(*, by: str, reason: str, now: datetime) -> str:
    """Give this database an epoch of its own, while machines are stopped; return it.

    Runtimes and gateways hold versions of the lost database, some above our counters: under
    another epoch each is sent everything anew, and what it had applied counts as nothing.
    Raises MachinesRun.
    """
    row = _halted()
    # The same order as every publication: none is half in one epoch and half in the other.
    lock_cells(Cell.objects.values_list("pk", flat=True))
    counter = lock_counter()
    before = counter.epoch
    counter.epoch = secrets.token_hex(6)
    counter.save(update_fields=["epoch"])
    # Whatever an earlier comparison said: another one begins, and machines wait for its end.
    row.compared_at = None
    if row.leases_until is None:
        # From now on nobody renews a lease of the lost database: who asks is answered by us.
        row.leases_until = now + _longest_lease()
    row.save(update_fields=["compared_at", "leases_until"])
    audit(
        who=by,
        verb="epoch.replace",
        subject="epoch",
        reason=reason,
        before={"epoch": before},
        after={"epoch": counter.epoch},
        now=now,
    )
    return counter.epoch


@transaction.atomic
def note_comparison(*, now: datetime) -> None:
    """Note that every tenant was compared with the stores. Raises MachinesRun."""
    row = _halted()
    row.compared_at = now
    row.save(update_fields=["compared_at"])


@transaction.atomic
def resume(*, by: str, reason: str, now: datetime) -> None:
    """Start the machines again. The caller has made sure that every difference is settled.

    Raises ReasonMissing, MachinesRun, NotCompared, LeasesRun.
    """
    check_reason(reason)
    row = _halted()
    if row.compared_at is None or row.leases_until is None:
        raise NotCompared(
            "Nobody has compared this database with the stores yet. Run `manage.py restored` first."
        )
    if now < row.leases_until:
        # An instance that joined after the backup is in no row here. Cut off from us it serves on
        # by its lease, and a fence's proof would not count it.
        raise LeasesRun(
            "Instances that this database has never heard of may serve by leases of the lost one"
            f" until {row.leases_until:%Y-%m-%d %H:%M:%S} UTC, and no fence would wait for them."
            " Start the machines then."
        )
    row.ended_at, row.ended_by = now, by
    row.save(update_fields=["ended_at", "ended_by"])
    audit(
        who=by,
        verb="machines.resume",
        subject=HALT,
        reason=reason,
        before={"since": row.since, "why": row.why},
        now=now,
    )


def check_running() -> None:
    """Raise MachinesStopped while all machines are stopped."""
    if found := queries.halt():
        raise MachinesStopped(
            f"All machines are stopped since {found.since:%Y-%m-%d %H:%M:%S} UTC: {found.why}"
            " Nothing new begins before that is settled on the page Restored."
        )


def _halted() -> Halt:
    row = Halt.objects.select_for_update().filter(ended_at=None).first()
    if row is None:
        raise MachinesRun("No machine is stopped, so there is nothing to start again.")
    return row


def _longest_lease() -> timedelta:
    turn = RuntimeInstance.objects.aggregate(longest=Max("longest_turn_seconds"))["longest"] or 0.0
    return timedelta(seconds=settings.RUNTIME_LEASE_SECONDS + turn) + LEASE_MARGIN
