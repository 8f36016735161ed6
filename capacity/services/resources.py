"""The register of what agents of several tenants share."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django.db import IntegrityError, transaction

from capacity.domain.register import ResourceChanged, ResourceTaken, check_resource
from capacity.models import SharedResource
from tenants.services import audit, check_reason


@transaction.atomic
def add_resource(
    name: str, *, kind: str, control: str, shown_by: str, by: str, reason: str, now: datetime
) -> SharedResource:
    """Add something that tenants share. Without a control it stands there as a finding.

    Raises BadResource, ResourceTaken, ReasonMissing.
    """
    check_reason(reason)
    name, control, shown_by = name.strip(), control.strip(), shown_by.strip()
    check_resource(name, kind, control, shown_by)
    row = SharedResource(name=name, kind=kind, control=control, shown_by=shown_by, at=now, by=by)
    try:
        with transaction.atomic():
            row.save(force_insert=True)
    except IntegrityError:
        raise ResourceTaken(f"The register names {name} already: edit that line.") from None
    audit(
        who=by,
        verb="resource.add",
        subject=_subject(row),
        reason=reason,
        after=_columns(row),
        now=now,
    )
    return row


@transaction.atomic
def set_resource(
    resource: SharedResource,
    *,
    kind: str,
    control: str,
    shown_by: str,
    seen: datetime | None = None,
    by: str,
    reason: str,
    now: datetime,
) -> SharedResource:
    """Say anew what keeps tenants apart at something that they share, and how one sees it.

    `seen`: when the line that the caller read was written; None: whatever stands there.
    Raises BadResource, ResourceChanged, ReasonMissing.
    """
    check_reason(reason)
    control, shown_by = control.strip(), shown_by.strip()
    row = _locked(resource, seen)
    check_resource(row.name, kind, control, shown_by)
    before = _columns(row)
    row.kind, row.control, row.shown_by, row.at, row.by = kind, control, shown_by, now, by
    row.save()
    audit(
        who=by,
        verb="resource.set",
        subject=_subject(row),
        reason=reason,
        before=before,
        after=_columns(row),
        now=now,
    )
    return row


@transaction.atomic
def remove_resource(
    resource: SharedResource,
    *,
    seen: datetime | None = None,
    by: str,
    reason: str,
    now: datetime,
) -> None:
    """Take a line off the register: nothing of the kind is shared any more.

    Raises ResourceChanged, ReasonMissing.
    """
    check_reason(reason)
    row = _locked(resource, seen)
    before = _columns(row)
    row.delete()
    audit(
        who=by,
        verb="resource.remove",
        subject=_subject(resource),
        reason=reason,
        before=before,
        now=now,
    )


def _locked(resource: SharedResource, seen: datetime | None) -> SharedResource:
    # Locked before it is compared: of two people who save the same line one has seen the other's.
    row = SharedResource.objects.select_for_update().filter(pk=resource.pk).first()
    if row is None:
        raise ResourceChanged(f"{resource.name} was taken off the register. Nothing was saved.")
    # The API spells times in whole milliseconds, cut off.
    if seen is not None and not timedelta(0) <= row.at - seen < timedelta(milliseconds=1):
        raise ResourceChanged(
            f"{row.by} has changed {row.name} since you read it. Nothing was saved; look at what"
            " stands there now, then save again."
        )
    return row


def _subject(row: SharedResource) -> str:
    return f"shared resource {row.name}"


def _columns(row: SharedResource) -> dict[str, Any]:
    return {"kind": row.kind, "control": row.control, "shown_by": row.shown_by}
