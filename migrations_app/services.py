"""What people ask of a move. Each is one transaction that changes the row, or a refusal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import F

from durable.errors import Refused
from migrations_app import ports, queries
from migrations_app.domain.phases import ENDED, FENCED, UNPAUSABLE, WAY_OUT, Mode, Phase
from migrations_app.models import TenantMigration
from migrations_app.ports.base import START, Finding, StoreRefused, Survey
from tenants import queries as tenants_queries
from tenants import services as tenants
from tenants.models import Cell, Placement, Store, Tenant


class AlreadyMigrating(Refused):
    """The tenant has a live move."""


class NotReadyToMove(Refused):
    """A check of the preparation is red."""


class SamePlace(Refused):
    """Source and target are one store."""


class InvalidOption(Refused):
    """A number or a time of the request makes no sense."""


class StalePage(Refused):
    """The page showed another phase than the move is in by now."""


class NotNow(Refused):
    """The move's phase, or what was asked before, does not allow it."""


class NotTyped(Refused):
    """The typed confirmation is not the tenant's name."""


@dataclass(frozen=True)
class Check:
    """One line of the preparation. `ok` None: could not be looked at yet."""

    name: str
    ok: bool | None
    detail: str


@dataclass(frozen=True)
class Preflight:
    """What can be known without writing anything, about both sides."""

    checks: tuple[Check, ...]
    source: Survey | None
    target: Survey | None

    @property
    def refusals(self) -> list[str]:
        return [f"{check.name}: {check.detail}" for check in self.checks if check.ok is False]

    @property
    def findings(self) -> list[dict[str, Any]]:
        sides = [survey for survey in (self.source, self.target) if survey is not None]
        return [asdict(finding) for survey in sides for finding in survey.findings]


def start(
    tenant: Tenant,
    *,
    target_cell: Cell,
    target_store: Store,
    by: str,
    reason: str,
    now: datetime,
    automatic: bool = False,
    fence_not_before: datetime | None = None,
    budget_seconds: float = 150.0,
    drain_bound_seconds: float = 60.0,
    soak_seconds: float = 72 * 3600.0,
    pace_per_second: float | None = None,
    offboard_automatically: bool = False,
) -> TenantMigration:
    """Start moving `tenant` to another store, and cell, after looking at both.

    Times are in seconds, the pace in sessions per second. Raises AlreadyMigrating,
    SamePlace, InvalidOption or NotReadyToMove (with every red check); then nothing has changed.
    """
    _require(reason)
    _sane(budget_seconds, drain_bound_seconds, soak_seconds, pace_per_second)
    placement = tenant.placement
    live = tenant.moves.exclude(phase__in=ENDED).first()
    if live is not None:
        raise AlreadyMigrating(
            f"{tenant} is moving already: {live} is in {live.phase.upper()}."
            " Wait for it, or abort it."
        )
    if placement.store == target_store:
        raise SamePlace(
            f"{tenant} lives on {target_store} already. A move that changes only the cell is not"
            " built yet: choose another store."
        )
    found = preflight(
        tenant,
        source_store=placement.store,
        source_cell=placement.cell,
        target_cell=target_cell,
        target_store=target_store,
        now=now,
    )
    if found.refusals:
        raise NotReadyToMove(" ".join(found.refusals) + " Nothing was changed.")
    move = TenantMigration(
        tenant=tenant,
        source_cell=placement.cell,
        source_store=placement.store,
        target_cell=target_cell,
        target_store=target_store,
        started_at=now,
        started_by=by,
        reason=reason,
        phase_since=now,
        due_at=now,
        automatic=automatic,
        fence_not_before=fence_not_before,
        budget_seconds=budget_seconds,
        drain_bound_seconds=drain_bound_seconds,
        soak_seconds=soak_seconds,
        pace_per_second=pace_per_second,
        offboard_automatically=offboard_automatically,
    )
    try:
        with transaction.atomic():
            move.save()
            # Now no other move lives. One may have, and ended, while both stores were looked at.
            home = Placement.objects.select_related("cell", "store").get(tenant=tenant)
            if (home.cell, home.store) != (placement.cell, placement.store):
                raise NotReadyToMove(
                    f"{tenant} has moved to {home.cell} and {home.store} meanwhile. Nothing was"
                    " changed: look again."
                )
            move.events.create(
                at=now, who=by, was=move.phase, now=move.phase, note=f"Started: {reason}"
            )
            _audit(move, "start", by=by, reason=reason, now=now)
    except IntegrityError as error:
        # Two people, or one who clicked twice: the constraint let one through.
        raise AlreadyMigrating(f"{tenant} is moving already. Open its move instead.") from error
    return move


def pause(
    move: TenantMigration, *, by: str, reason: str, now: datetime, seen: str | None = None
) -> None:
    """Ask the move to stop where it is. A closed fence stays closed, and its deadline holds."""
    _require(reason)
    with _asking(move, "pause", seen=seen, by=by, reason=reason, now=now) as row:
        if row.phase in UNPAUSABLE:
            raise NotNow(f"{row} is in {row.phase.upper()}, which can't be paused.")
        if row.pause_requested_at:
            raise NotNow(f"{row} was paused by {row.pause_requested_by} already.")
        row.pause_requested_at, row.pause_requested_by, row.pause_reason = now, by, reason


def resume(
    move: TenantMigration, *, by: str, reason: str = "", now: datetime, seen: str | None = None
) -> None:
    """Let a paused move go on."""
    with _asking(move, "resume", seen=seen, by=by, reason=reason, now=now) as row:
        if not row.pause_requested_at:
            raise NotNow(f"{row} is not paused.")
        row.pause_requested_at, row.pause_requested_by, row.pause_reason = None, "", ""


def abort(
    move: TenantMigration, *, by: str, reason: str, now: datetime, seen: str | None = None
) -> None:
    """Ask the move to take its way out: open the source, publish, remove what it wrote."""
    _require(reason)
    with _asking(move, "abort", seen=seen, by=by, reason=reason, now=now) as row:
        if row.phase not in WAY_OUT[Mode(row.mode)]:
            raise NotNow(f"{row} is in {row.phase.upper()}: from there it can't be aborted.")
        if row.abort_requested_at:
            raise NotNow(f"{row} is being aborted by {row.abort_requested_by} already.")
        row.abort_requested_at, row.abort_requested_by, row.abort_reason = now, by, reason


def close_fence(
    move: TenantMigration, *, by: str, reason: str, now: datetime, seen: str | None = None
) -> None:
    """Say "when I say": the fence closes after one more pass, once its quote fits the budget."""
    _require(reason)
    with _asking(move, "close_fence", seen=seen, by=by, reason=reason, now=now) as row:
        if row.phase != Phase.BACKFILL:
            raise NotNow(f"{row} is in {row.phase.upper()}: the fence closes out of BACKFILL.")
        if not row.passes or row.pass_ended_at is None:
            raise NotNow(
                f"{row} is still on its first pass: the fence would be as long as the copy."
            )
        if row.drain_requested_at:
            raise NotNow(
                f"{row.drain_requested_by} asked for it already; it waits for the last pass."
            )
        if row.mismatches.filter(resolved_at=None).exists():
            raise NotNow(f"{row} has open mismatches: repair them first, or the fence would wait.")
        row.drain_requested_at, row.drain_requested_by = now, by


def cancel_fence(
    move: TenantMigration, *, by: str, reason: str, now: datetime, seen: str | None = None
) -> None:
    """Take "close the fence" back while it still waits for its last pass."""
    _require(reason)
    with _asking(move, "cancel_fence", seen=seen, by=by, reason=reason, now=now) as row:
        if row.phase != Phase.BACKFILL or row.drain_requested_at is None:
            raise NotNow(f"{row} has no fence that waits to be closed.")
        row.drain_requested_at, row.drain_requested_by = None, ""


def hold_fence(
    move: TenantMigration,
    *,
    seconds: float,
    by: str,
    reason: str,
    now: datetime,
    seen: str | None = None,
) -> None:
    """Move the fence's deadline, once, by `seconds` (1 to 600)."""
    _require(reason)
    if not 1 <= seconds <= 600:
        raise InvalidOption(f"{seconds:g} seconds: the deadline moves by 1 to 600 seconds.")
    with _asking(move, "hold_fence", seen=seen, by=by, reason=reason, now=now) as row:
        if row.phase not in FENCED or row.deadline_at is None or row.phase == Phase.TARGET:
            raise NotNow(f"{row} is in {row.phase.upper()}: no deadline runs.")
        if row.deadline_held_by:
            raise NotNow(f"{row.deadline_held_by} moved the deadline already; it moves once.")
        row.deadline_at += timedelta(seconds=seconds)
        row.deadline_held_by = by
        tenants.hurry([row.source_cell, row.target_cell], until=row.deadline_at + HURRY)


def recopy(
    move: TenantMigration,
    *,
    mismatch_ids: Sequence[int],
    by: str,
    reason: str = "",
    now: datetime,
    seen: str | None = None,
) -> int:
    """Ask for these mismatches to be repaired by copying their sessions again; return how many."""
    with _asking(move, "recopy", seen=seen, by=by, reason=reason, now=now) as row:
        if row.phase not in (Phase.BACKFILL, Phase.VERIFY):
            # Never re-copy after TARGET: it would overwrite what the tenant wrote since.
            raise NotNow(f"{row} is in {row.phase.upper()}: only BACKFILL and VERIFY re-copy.")
        asked = row.mismatches.filter(
            id__in=mismatch_ids, resolved_at=None, repair_requested_at=None
        ).update(repair_requested_at=now, repair_requested_by=by)
        if not asked:
            raise NotNow("None of these is open any more, or their repair was asked for already.")
    return asked


def confirm_offboard(
    move: TenantMigration,
    *,
    typed: str,
    by: str,
    reason: str,
    now: datetime,
    seen: str | None = None,
) -> None:
    """Let OFFBOARD delete the source's copy when SOAK is over. `typed` is the tenant's slug."""
    _require(reason)
    with _asking(move, "confirm_offboard", seen=seen, by=by, reason=reason, now=now) as row:
        if row.phase != Phase.SOAK:
            raise NotNow(f"{row} is in {row.phase.upper()}: deleting is confirmed in SOAK.")
        if typed != row.tenant.slug:
            raise NotTyped(f'Type "{row.tenant.slug}" to delete its copy on {row.source_store}.')
        if row.offboard_confirmed_at:
            raise NotNow(f"{row.offboard_confirmed_by} confirmed it already.")
        row.offboard_confirmed_at, row.offboard_confirmed_by = now, by


def leave_behind(
    move: TenantMigration, *, by: str, reason: str, now: datetime, seen: str | None = None
) -> None:
    """End a move although the store that it should clean can't be; what is there stays.

    That is the target of an abort, and in OFFBOARD the source.
    """
    _require(reason)
    with _asking(move, "leave_behind", seen=seen, by=by, reason=reason, now=now) as row:
        if not queries.stuck_at_cleaning(row):
            raise NotNow(f"{row} is not stuck at cleaning a store.")
        row.leave_requested_at, row.leave_requested_by = now, by


def preflight(
    tenant: Tenant,
    *,
    source_cell: Cell,
    source_store: Store,
    target_cell: Cell,
    target_store: Store,
    now: datetime,
    move: TenantMigration | None = None,
) -> Preflight:
    """Look at both stores and cells and write nothing. Takes seconds at most.

    `move` is the one that asks: what stands behind its own guard row is no stranger's.
    """
    checks: list[Check] = []
    source = _survey(source_store, tenant, "Source", checks)
    target = _survey(target_store, tenant, "Target", checks)
    if source is not None and target is not None:
        checks += _pair_checks(tenant, source, target, source_store, target_store, move)
    checks += _cell_checks(source_cell, target_cell, target_store, now)
    return Preflight(tuple(checks), source, target)


def _survey(store: Store, tenant: Tenant, side: str, checks: list[Check]) -> Survey | None:
    try:
        with ports.open_store(store.kind, store.address_from, app_name=tenant.app_name) as port:
            survey = port.survey()
    except StoreRefused as refusal:
        checks.append(Check(f"{side} {store}", False, str(refusal)))
        return None
    held = f"{survey.sessions:,} sessions of {survey.users:,} users"
    checks.append(Check(f"{side} {store}", True, f"{survey.database}, {held}"))
    return survey


def _pair_checks(
    tenant: Tenant,
    source: Survey,
    target: Survey,
    source_store: Store,
    target_store: Store,
    move: TenantMigration | None,
) -> list[Check]:
    checks = []
    try:
        ports.check_pair(source, target)
        checks.append(Check("Kinds", True, f"both {source.database.split()[0]}"))
    except StoreRefused as refusal:
        checks.append(Check("Kinds", False, str(refusal)))
    room = f"Room on {target_store}"
    leftovers, empty = _held(tenant, target_store, move)
    if empty:
        checks.append(Check(room, True, f"nothing of {tenant.app_name} there"))
    elif leftovers is not None:
        detail = f"{target.sessions:,} sessions left by {leftovers} will be removed first"
        checks.append(Check(room, True, detail))
    else:
        detail = (
            f"it holds {tenant.app_name} already ({target.sessions:,} sessions): an older copy, or"
            f" the same database as {source_store} under a second address. Remove the copy, or"
            " choose another store."
        )
        checks.append(Check(room, False, detail))
    for side, survey in (("Source", source), ("Target", target)):
        blocking = [finding for finding in survey.findings if finding.blocks]
        detail = _named(blocking) or "nothing stands against copying"
        checks.append(Check(f"{side}'s rows and rights", not blocking, detail))
        if not survey.can_close:
            detail = f"the {side.lower()} can't be closed to agents with the rights given"
            checks.append(Check(f"{side}'s closing", False, detail))
    if source.interrupted:
        checks.append(Check("Interrupted turns", True, _interrupted(source)))
    return checks


def _interrupted(source: Survey) -> str:
    """List the sessions whose last turn was cut short: they are copied as they are."""
    names = [f"{key.session_id} of {key.user_id}" for key in source.interrupted_keys]
    more = source.interrupted - len(names)
    listed = ", ".join(names) + (f" and {more:,} more" if more else "")
    return f"{source.interrupted:,} sessions end in one and are copied as they are: {listed}"


def _named(findings: list[Finding]) -> str:
    return "; ".join(f"{f.field}: {f.reason} ({f.count:,}, such as {f.example})" for f in findings)


def _held(
    tenant: Tenant, store: Store, move: TenantMigration | None
) -> tuple[TenantMigration | None, bool]:
    """Return whose leftovers `store` may hold, by its closed guard row, and if it holds nothing."""
    with ports.open_store(store.kind, store.address_from, app_name=tenant.app_name) as port:
        guard = port.guard()
        empty = not port.page(START, 1) and not port.shared_page(None, 1)
    if guard is None or guard.agents:
        return None, empty
    if move is not None and guard.move == move.pk:
        return move, empty
    return tenant.moves.filter(pk=guard.move, phase__in=ENDED).first(), empty


def _cell_checks(
    source_cell: Cell, target_cell: Cell, target_store: Store, now: datetime
) -> list[Check]:
    verified = target_cell.quota_verified_at is not None
    near = target_cell.region_id == target_store.region_id
    checks = [
        Check(
            f"Quota of {target_cell}",
            verified,
            f"verified by {target_cell.quota_verified_by}"
            if verified
            else "it is only assumed. Have it verified against the provider, then move.",
        ),
        Check(
            "Region",
            near,
            f"{target_store} and {target_cell} are both in {target_cell.region}"
            if near
            else f"{target_store} is in {target_store.region},"
            f" {target_cell} in {target_cell.region}.",
        ),
    ]
    there = tenants_queries.live_instances(target_cell, now=now)
    here = tenants_queries.live_instances(source_cell, now=now)
    blind = sorted(i.name for i in there if target_store.key not in i.stores)
    wanted = {plugin for instance in here for plugin in instance.plugins}
    bare = sorted(i.name for i in there if wanted - set(i.plugins))
    if not there:
        none_anywhere = not here
        detail = f"no instance of {target_cell} is alive"
        checks.append(Check("Instances", none_anywhere, detail))
    else:
        checks.append(
            Check(
                "Instances",
                not blind,
                f"{', '.join(blind)} could not open {target_store}"
                if blind
                else f"all {len(there)} of {target_cell} opened {target_store}",
            )
        )
        checks.append(
            Check(
                "Plugins",
                not bare,
                f"{', '.join(bare)} lack plugins that {source_cell} runs"
                if bare
                else "the target's instances run what the source's run",
            )
        )
    return checks


REASON_CHARACTERS = 2_000
# The fast cadence is asked for this far past the moment that needs it; it ends by itself, so no
# killed worker leaves a cell polling fast for ever.
HURRY = timedelta(seconds=60)
# The columns that people write; everything else of a move is the driver's.
REQUESTS = (
    "pause_requested_at",
    "pause_requested_by",
    "pause_reason",
    "abort_requested_at",
    "abort_requested_by",
    "abort_reason",
    "drain_requested_at",
    "drain_requested_by",
    "offboard_confirmed_at",
    "offboard_confirmed_by",
    "leave_requested_at",
    "leave_requested_by",
    "deadline_at",
    "deadline_held_by",
)


@contextmanager
def _asking(
    move: TenantMigration, verb: str, *, seen: str | None, by: str, reason: str, now: datetime
) -> Iterator[TenantMigration]:
    """One transaction around a request: lock the row, compare the phase, save, log, audit.

    Only columns of REQUESTS are written, so a request never undoes what a worker
    settled; the worker's next claim, at most seconds away, answers it.
    """
    _storable(reason)
    with transaction.atomic():
        row = TenantMigration.objects.select_for_update().get(pk=move.pk)
        if seen is not None and seen != row.phase:
            raise StalePage(
                f"The page showed {seen.upper()}; {row} is in {row.phase.upper()} by now."
                " Nothing was changed: look again."
            )
        before = {name: getattr(row, name) for name in REQUESTS}
        yield row
        after = {name: getattr(row, name) for name in REQUESTS}
        changed = {name: after[name] for name in REQUESTS if after[name] != before[name]}
        # Nobody works on a row whose last claim has settled: whatever it waits for, it is looked
        # at now. One that backs off too: a second claim beside a slow first is safe.
        idle = row.settled == row.claim or row.failures > 0
        soon = {"due_at": now} if idle and row.due_at is not None else {}
        TenantMigration.objects.filter(pk=row.pk).update(
            version=F("version") + 1, **changed, **soon
        )
        words = verb.replace("_", " ").capitalize()
        note = f"{words}: {reason}" if reason else words
        row.events.create(at=now, who=by, was=row.phase, now=row.phase, note=note)
        _audit(
            row,
            verb,
            by=by,
            reason=reason,
            now=now,
            before={name: _plain(before[name]) for name in changed} | {"phase": row.phase},
            after={name: _plain(value) for name, value in changed.items()},
        )
    move.refresh_from_db()


def _audit(
    move: TenantMigration,
    verb: str,
    *,
    by: str,
    reason: str,
    now: datetime,
    before: dict[str, Any] | None = None,
    after: dict[str, Any] | None = None,
) -> None:
    tenants.audit(
        who=by,
        verb=f"move.{verb}",
        subject=str(move),
        reason=reason,
        before=before,
        after=after
        or {
            "tenant": str(move.tenant),
            "from": f"{move.source_cell} {move.source_store}",
            "to": f"{move.target_cell} {move.target_store}",
        },
        now=now,
    )


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else value


def _require(reason: str) -> None:
    tenants.check_reason(reason)
    _storable(reason)


def _storable(reason: str) -> None:
    if "\0" in reason or len(reason) > REASON_CHARACTERS:
        raise InvalidOption(
            f"A reason has up to {REASON_CHARACTERS:,} characters, none of them NUL."
        )


def _sane(budget: float, drain_bound: float, soak: float, pace: float | None) -> None:
    if not 1 <= budget <= 3600:
        raise InvalidOption(f"A fence budget of {budget:g} s: choose 1 to 3,600 seconds.")
    if not 1 <= drain_bound <= budget:
        raise InvalidOption(
            f"A drain bound of {drain_bound:g} s: choose 1 s up to the fence budget ({budget:g} s)."
        )
    if not 0 <= soak <= 90 * 86_400:
        raise InvalidOption(f"A soak of {soak:g} s: choose 0 seconds to 90 days.")
    if pace is not None and not 0.01 <= pace <= 100_000:
        raise InvalidOption(f"A pace of {pace:g} sessions/s: choose 0.01 to 100,000, or none.")
