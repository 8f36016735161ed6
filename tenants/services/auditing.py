"""Who did what, when and why: kept for good, beside each write."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from django.core.serializers.json import DjangoJSONEncoder

from durable.errors import Refused
from tenants.domain.requests import request_id as current_request_id
from tenants.models import AuditEntry
from tenants.services.rows import assert_in_transaction

WHO_MAX = 150


class ReasonMissing(Refused):
    """The audit needs to know why."""

    status = 422


def audit(
    *,
    who: str,
    verb: str,
    subject: str,
    reason: str = "",
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
    request_id: str = "",
    now: datetime,
) -> None:
    """Keep who did what, when and why, for good.

    Inside the caller's transaction, which must exist, so that a write and its line
    stand or fall together.
    """
    assert_in_transaction()
    AuditEntry.objects.create(
        at=now,
        who=who,
        verb=verb,
        subject=subject,
        reason=reason,
        before=plain(before),
        after=plain(after),
        request_id=request_id or current_request_id.get(),
    )


def check_reason(reason: str) -> None:
    """Raise ReasonMissing unless `reason` says something."""
    if not reason.strip():
        raise ReasonMissing("Say why, in a sentence: whoever reads the log later needs it.")


def plain(value: Mapping[str, Any] | None) -> Any:
    """Return the mapping with times and the like spelled as JSON can hold them."""
    return None if value is None else json.loads(json.dumps(value, cls=DjangoJSONEncoder))
