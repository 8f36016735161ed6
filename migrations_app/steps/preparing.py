"""PREPARE: everything is looked at and made sure of before a tenant's data is touched."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from durable.driver import Clock, holding
from durable.errors import Refused
from durable.machine import Go, Outcome, Wait
from migrations_app import artifacts, channels, copying, ports, queries
from migrations_app.copying import Timer
from migrations_app.domain.phases import ENDED, Mode, Phase
from migrations_app.models import TenantMigration
from migrations_app.ports.base import (
    START,
    Guard,
    GuardTaken,
    Key,
    SessionStore,
    StoreBusy,
)
from migrations_app.preflight import Check, left_artifacts, preflight
from migrations_app.steps import common
from tenants import queries as tenants_queries
from tenants import services as tenants

# A red preparation is looked at again this often, and a wait for a person.
LOOK_AGAIN_SECONDS = 5.0


def prepare(move: TenantMigration, clock: Clock) -> Outcome:
    """Check everything that can be checked, then make guard and tables, and make sure of them."""
    now, began = clock(), time.monotonic()
    if move.mode == Mode.CELL and move.stage == "ready":
        return _may_close(move, clock)
    found = preflight(
        move.tenant,
        source_cell=move.source_cell,
        source_store=move.source_store,
        target_cell=move.target_cell,
        target_store=move.target_store,
        now=now,
        # After a crash past the guard, what is on the target is this move's own.
        move=move,
    )
    checks = list(found.checks)
    if found.refusals or found.source is None or found.target is None:
        return _blocked(move, checks, began)
    if move.mode == Mode.CELL:
        if unheard := _announce(move, clock):
            return unheard
        return Wait(
            note=f"Prepared: {found.source.held} stay on {move.source_store}",
            changes={"checks": _as_json(checks), "waiting_for": "", "stage": "ready"},
        )
    with copying.both(move) as (source, target):
        try:
            checks += _make_sure(move, source, target)
        except StoreBusy as busy:
            return Wait(busy.retry_after_seconds or 0.2)
        except Clearing as clearing:
            return common.waiting(move, str(clearing), seconds=0.0)
        except GuardTaken as taken:
            checks.append(Check("Guard", False, str(taken)))
        if any(check.ok is False for check in checks):
            return _blocked(move, checks, began)
        kept = artifacts.prepare(
            move, leftovers=left_artifacts(move.tenant, move.target_store), timer=Timer()
        )
        checks += [kept.check] if kept.check is not None else []
        if not kept.cleared:
            return common.waiting(move, "what an ended move left to be removed", seconds=0.0)
        if any(check.ok is False for check in checks):
            return _blocked(move, checks, began)
        if unheard := _announce(move, clock):
            return unheard
        older = source.older_writers()
    with holding(move):
        channels.list_channels(move)
        tenants.note_survey(move.source_store, asdict(found.source), now=now)
        tenants.note_survey(move.target_store, asdict(found.target), now=now)
    return Go(
        Phase.BACKFILL,
        f"Prepared: {found.source.held}",
        {
            "checks": _as_json(checks),
            "findings": found.findings,
            "waiting_for": "",
            "guarded": True,
            "artifacts_apart": kept.apart,
            "sessions": found.source.sessions,
            "users": found.source.users,
            "interrupted": found.source.interrupted,
            "stamps_prove": found.source.stamps_see_edits and found.target.stamps_see_edits,
            "older_writers": older,
            "stage": "",
        },
    )


def _may_close(move: TenantMigration, clock: Clock) -> Outcome:
    """Close the fence of a move of the cell alone, once it may; until then say what is missing."""
    now = clock()
    # A scope that was edited meanwhile is announced anew, and heard of.
    if unheard := _announce(move, clock):
        return unheard
    if blocked := common.not_yet(move, now):
        return common.waiting(move, blocked)
    with holding(move):
        common.hurry(move, now)
    quote = queries.fence_quote(move, now=now)
    if worst := common.too_long(move, quote):
        return common.waiting(move, worst)
    if slow := common.not_hurried(move.source_cell, now):
        return common.waiting(move, slow, seconds=0.2)
    return common.close(move, quote)


def _blocked(move: TenantMigration, checks: Sequence[Check], began: float) -> Wait:
    """Show the red checks and look again later: a large store is not surveyed all day."""
    seconds = max(LOOK_AGAIN_SECONDS, 10 * (time.monotonic() - began))
    red = [check for check in checks if check.ok is False]
    waiting_for = "; ".join(f"{check.name}: {check.detail}" for check in red)
    if waiting_for == move.waiting_for and _as_json(checks) == move.checks:
        return Wait(seconds)
    return Wait(
        seconds,
        f"Blocked: {waiting_for}" if waiting_for != move.waiting_for else "",
        {"checks": _as_json(checks), "waiting_for": waiting_for},
    )


def _as_json(checks: Sequence[Check]) -> list[dict[str, Any]]:
    return [{"name": c.name, "ok": c.ok, "detail": c.detail} for c in checks]


def _make_sure(move: TenantMigration, source: SessionStore, target: SessionStore) -> list[Check]:
    """Provision both sides, tell whether they are one place, take both guard rows."""
    theirs, ours = target.guard(), source.guard()
    for guard, store in ((theirs, move.target_store), (ours, move.source_store)):
        _may_take(move, guard, str(store))
    target.provision()
    if _same_place(source, target):
        detail = (
            f"{move.source_store} and {move.target_store} are the same database under two"
            " addresses. Choose another store."
        )
        return [Check("Two places", False, detail)]
    source.provision()
    if not _adopt_target(move, theirs, target):
        detail = (
            f"{move.target_store} holds {move.tenant.app_name} since a moment ago. Look who writes"
            " there; what it holds was left as it is."
        )
        return [Check(f"Room on {move.target_store}", False, detail)]
    source.adopt(ours, mover=False, agents=True)
    keeps = target.keeps_ids()
    return [
        Check("Two places", True, "a word written to one is not seen in the other"),
        Check(
            "Guard",
            True,
            "it stands on both sides, and closes what is no service"
            if ports.by_service(source, target)
            else "closing triggers stand on both sides",
        ),
        Check(
            "Ids",
            keeps,
            "the target keeps the ids it is given; fingerprints are"
            f" {ports.fingerprint_words(source, target)}"
            if keeps
            else f"{move.target_store} assigns its own session ids; links to sessions would break.",
        ),
        *_case_checks(move, source, target),
    ]


def _case_checks(move: TenantMigration, source: SessionStore, target: SessionStore) -> list[Check]:
    """Look for ids that the target would take for one another: what came last would win."""
    if not target.folds_case():
        return []
    users: dict[str, str] = {}
    sessions: dict[Key, Key] = {}
    after = START
    while page := source.page(after, copying.PAGE):
        for key, _ in page:
            folded = Key(*(part.casefold() for part in key))
            user = users.setdefault(folded.user_id, key.user_id)
            other = sessions.setdefault(folded, key)
            if user != key.user_id or other != key:
                pair = (user, key.user_id) if user != key.user_id else (other, key)
                one, two = (ascii("/".join(p) if isinstance(p, Key) else p) for p in pair)
                detail = (
                    f"{move.target_store} takes ids that differ by case only for one, such as"
                    f" {one} and {two}. Rename or delete one of them, or choose another store."
                )
                return [Check("Case of ids", False, detail)]
        after = page[-1][0]
    detail = (
        f"{move.target_store} takes ids that differ by case only for one. There are none; one that"
        " is born during the move would be named as a mismatch."
    )
    return [Check("Case of ids", None, detail)]


def _announce(move: TenantMigration, clock: Clock) -> Wait | None:
    """Make the tenant known to the target's instances; None once each of them has said so.

    They then have its scope, its store and its runner before the first turn arrives.
    """
    if move.target_cell_id == move.source_cell_id:
        return None
    now = clock()
    with holding(move) as row:
        # A scope edited meanwhile is announced anew.
        version = tenants.announce(move.tenant, move.target_cell, move.target_store)
        if row.announced_version != version:
            row.announced_version = version
            row.save(update_fields=["announced_version"])
            common.hurry(move, now)
    late = tenants_queries.announced_check(move.target_cell, move.tenant, version, now=now)
    if not late:
        return None
    names = ", ".join(word.name for word in late)
    return common.waiting(move, f"instances to learn of {move.tenant}: {names}", seconds=0.5)


def _may_take(move: TenantMigration, guard: Guard | None, store: str) -> None:
    """Raise GuardTaken unless the row is free, ours, or of an ended move of this tenant."""
    if guard is None or guard.move == move.pk:
        return
    if not move.tenant.moves.filter(pk=guard.move, phase__in=ENDED).exists():
        raise GuardTaken(
            f"{store} is guarded by mv-{guard.move}, which is not an ended move of {move.tenant}"
            " here. If another control plane moved it, end that move there first."
        )


def _same_place(source: SessionStore, target: SessionStore) -> bool:
    """Write a random word at the target and look for it through the source."""
    nonce = secrets.token_hex(16)
    target.write_nonce(nonce)
    try:
        return source.has_nonce(nonce)
    finally:
        target.clear_nonce(nonce)


def _adopt_target(move: TenantMigration, found: Guard | None, target: SessionStore) -> bool:
    """Take the target's guard row and make sure of an empty target; return whether it is one.

    Only what stood behind the closed row of an ended move is removed. Anything else was written
    after the survey, by somebody who is none of ours: the row opens again and it stays. An
    unlocked look (mover) comes before the right to write, so that a repeated step, which finds
    this move's own row, still knows whether that row ever stood before an empty target.
    """
    leftovers = found is not None and not found.agents and (found.move != move.pk or found.mover)
    target.adopt(found, mover=leftovers, agents=False)
    if leftovers:
        if not move.stamps.exists():
            _clear(target)
        return True
    if target.page(START, 1) or target.shared_page(None, 1):
        target.take(mover=False, agents=True)
        return False
    target.take(mover=True, agents=False)
    return True


class Clearing(Refused):
    """What an ended move left on the target takes more than one step to remove."""


def _clear(target: SessionStore) -> None:
    """Remove what an ended move of this tenant left behind its closed guard row.

    Raises Clearing when a step's time is up: a whole tenant may lie there, after a rollback.
    """
    timer = Timer()
    while page := target.page(START, copying.CHUNK_MOST):
        target.delete([key for key, _ in page])
        if timer.out:
            raise Clearing("The copy that an ended move left there is being removed.")
    while shared := target.shared_page(None, copying.PAGE):
        target.delete_shared([row.user_id for row in shared])
