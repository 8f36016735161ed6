"""Rules of safety for operators' programs: who breaks one now, and the break-glass."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

from django.http import HttpRequest
from ninja import Router, Schema

from durable.clock import database_now
from durable.errors import Refused
from migrations_app import opening, safety
from migrations_app.models import TenantMigration
from migrations_app.safety import State
from migrations_app.services import NotTyped
from tenants.api import Error, OpsIn, Reason, find, require
from tenants.domain.names import StoreKind
from tenants.domain.roles import Role
from tenants.models import Tenant

router = Router(tags=["safety"])


class NeedsTheCommand(Refused):
    """A web process can't be ended when a step of it hangs, and only that frees such a store."""


class StateOut(Schema):
    """Who takes turns of a tenant now."""

    tenant: str
    # nobody_serves: no cell takes its turns, and nothing explains that. fence_overdue: its fence
    # should have opened by itself. Null: no rule is broken.
    rule: str | None
    # For people.
    state: str
    cell: str
    store: str
    # Id of the move that keeps it refused. Null: none does.
    move: int | None
    # Since when turns are refused. Null: they are not, or nothing tells.
    since: datetime | None


class SafetyOut(Schema):
    broken: list[StateOut]
    # True: there are more than these.
    more: bool


class OpenIn(OpsIn):
    # The tenant's slug once more.
    typed: str
    # False: do it. True: answer what would be done, or the refusal; nothing changes.
    dry_run: bool = True
    reason: Reason


class OpenedOut(Schema):
    """What opening would do (`dry_run`), or what it did."""

    dry_run: bool
    before: StateOut
    # Null: a dry run.
    after: StateOut | None
    # What would be done, or a line for each step that was taken.
    told: list[str]


@router.get("/safety", response={200: SafetyOut, 403: Error})
def broken_rules(request: HttpRequest) -> dict[str, Any]:
    """List the tenants that break a rule of safety now, by name; empty is how it should be."""
    require(request, Role.VIEWER)
    found = safety.broken_now(now=database_now())
    shown = [_out(state) for state in found[: safety.MOST]]
    return {"broken": shown, "more": len(found) > safety.MOST}


@router.post(
    "/tenants/{slug:slug}/open",
    response={200: OpenedOut, 403: Error, 404: Error, 409: Error, 422: Error},
)
def open_tenant(request: HttpRequest, slug: str, body: OpenIn) -> dict[str, Any]:
    """Break-glass (admin): open a tenant that is refused against a rule. A dry run by default.

    The answer takes as long as the opening: seconds, up to a minute and a half where a worker died.
    """
    by = require(request, Role.ADMIN).name
    tenant = find(Tenant, "tenant", slug=slug)
    if body.typed != tenant.slug:
        raise NotTyped(f'Type "{tenant.slug}" to open it.')
    found = opening.look(tenant, now=database_now())
    _check_kinds(found)
    if body.dry_run:
        told = [opening.what_it_does(found)]
        return {"dry_run": True, "before": _out(found), "after": None, "told": told}
    told = []
    done = opening.open_tenant(
        tenant,
        by=by,
        reason=body.reason,
        clock=database_now,
        sleep=time.sleep,
        tell=told.append,
    )
    states = {"before": _out(done.before), "after": _out(done.after)}
    return {"dry_run": False, **states, "told": told}


def _check_kinds(found: State) -> None:
    moves = TenantMigration.objects.select_related("source_store", "target_store")
    for move in moves.filter(pk__in=[found.move] if found.move is not None else []):
        kinds = {move.source_store.kind, move.target_store.kind}
        if StoreKind.ADK_SERVICE in kinds:
            raise NeedsTheCommand(
                f"A side of {move} is reached through google-adk: a step that hangs there is ended"
                f" with its process only. Run `manage.py open_tenant {found.tenant}`."
            )


def _out(state: State) -> dict[str, Any]:
    return {
        "tenant": state.tenant,
        "rule": state.rule,
        "state": state.words,
        "cell": state.cell,
        "store": state.store,
        "move": state.move,
        "since": state.since,
    }
