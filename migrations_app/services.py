"""What people ask of a move. Each is one transaction that changes the row, or a refusal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import F, Q

from durable.errors import Refused
from migrations_app import queries
from migrations_app.domain.mismatch import Looks
from migrations_app.domain.phases import (
    ENDED,
    FENCED,
    REVERSED,
    UNPAUSABLE,
    WAY_OUT,
    Mode,
    Phase,
    pausable_before,
)
from migrations_app.domain.verbs import words
from migrations_app.models import TenantMigration
from migrations_app.preflight import preflight, way_back
from migrations_app.rehearsing import known
from tenants import services as tenants
from tenants.domain.words import counted, duration, limit
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


class NotInternal(Refused):
    """A whole move is rehearsed on a tenant without customers only."""


# How long a rehearsed move stays on the target before it goes back (seconds).
REHEARSED_SOAK_SECONDS = 10.0


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
    finish_by: datetime | None = None,
    flip_by_hand: bool = False,
    offboard_automatically: bool = False,
    mode: Mode = Mode.FENCE,
    idle_seconds: float = 600.0,
    idle_bound_seconds: float = 4 * 3600.0,
    pause_before: str = "",
    rehearsal: bool = False,
) -> TenantMigration:
    """Start moving `tenant` to another store, and cell, after looking at both.

    Times are in seconds, the pace in sessions per second. In split mode the source's sessions
    are waited for until none has changed for `idle_seconds`, `idle_bound_seconds` at most. It
    pauses once before the phase `pause_before`. A `rehearsal` goes back by itself (see
    `rehearse_move`). Raises NotInternal, AlreadyMigrating, SamePlace, InvalidOption or
    NotReadyToMove (with every red check); then nothing has changed. MachinesStopped while all
    machines are: a new move would believe an old database.
    """
    tenants.check_running()
    _require(reason)
    check_times(budget_seconds, drain_bound_seconds, soak_seconds)
    check_pace(pace_per_second, finish_by, now)
    check_idle(idle_seconds, idle_bound_seconds)
    placement = Placement.objects.select_related("cell", "store").get(tenant=tenant)
    live = tenant.moves.exclude(phase__in=ENDED).first()
    if live is not None:
        raise AlreadyMigrating(
            f"{tenant} is moving already: {live} is in {live.phase.upper()}."
            " Wait for it, or abort it."
        )
    if placement.split_cell_id is not None:
        raise NotReadyToMove(
            f"{tenant} is split between {placement.cell} and another cell, and its move has ended:"
            " run `manage.py restored`, which lets the split be joined. Nothing was changed."
        )
    mode = mode_of(placement, target_cell, target_store, mode)
    check_pause(pause_before, mode)
    check_copies(mode, rehearsal=rehearsal, flip_by_hand=flip_by_hand)
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
    # Chunks, and what a fence would take, are right from the first step on.
    figures = known(tenant, placement.store, target_store, now=now)
    move = TenantMigration(
        **(figures.columns if figures is not None else {}),
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
        finish_by=finish_by,
        flip_by_hand=flip_by_hand,
        offboard_automatically=offboard_automatically,
        mode=mode,
        idle_seconds=idle_seconds,
        idle_bound_seconds=idle_bound_seconds,
        pause_before=pause_before,
        rehearsal=rehearsal,
    )
    try:
        with transaction.atomic():
            # Held until the row is there: nobody gives the tenant to a customer in between.
            fresh = Tenant.objects.select_for_update().get(pk=tenant.pk)
            if rehearsal:
                _check_internal(fresh)
            move.save()
            # Now no other move lives. One may have, and ended, while both stores were looked at.
            home = Placement.objects.select_related("cell", "store").get(tenant=tenant)
            if (home.cell, home.store) != (placement.cell, placement.store):
                raise NotReadyToMove(
                    f"{tenant} has moved to {home.cell} and {home.store} meanwhile. Nothing was"
                    " changed: look again."
                )
            said = "Rehearsal started" if rehearsal else "Started"
            notes = [f"{said}: {reason}"]
            if figures is not None:
                notes.insert(0, f"Begins with rates {figures.words}")
            for note in notes:
                move.events.create(at=now, who=by, was=move.phase, now=move.phase, note=note)
            _audit(move, "rehearse" if rehearsal else "start", by=by, reason=reason, now=now)
    except IntegrityError as error:
        # Two people, or one who clicked twice: the constraint let one through.
        raise AlreadyMigrating(f"{tenant} is moving already. Open its move instead.") from error
    return move


def check_copies(mode: Mode, *, rehearsal: bool = False, flip_by_hand: bool = False) -> None:
    """Raise InvalidOption for what makes no sense where nothing is copied."""
    if mode == Mode.CELL and (rehearsal or flip_by_hand):
        raise InvalidOption(
            "Only the cell changes, so nothing is copied or compared: there is nothing to rehearse,"
            " and nothing to look at before the flip."
        )


def mode_of(placement: Placement, cell: Cell, store: Store, wanted: Mode) -> Mode:
    """Return the mode of a move from a placement: where only the cell differs there is but one.

    Raises SamePlace where there is nothing to move, or not in that way.
    """
    tenant = placement.tenant
    if placement.store == store and placement.cell == cell:
        raise SamePlace(f"{tenant} lives in {cell}, on {store}, already. Choose another of them.")
    if wanted == Mode.CELL and placement.store != store:
        raise SamePlace(
            f"A move of the cell alone leaves {tenant} on {placement.store}. Choose that store, or"
            " a move by fence."
        )
    if wanted == Mode.SPLIT and placement.store == store:
        raise SamePlace(
            f"{tenant} lives on {store} already, and a split is between two stores: choose another"
            " store, or a move of the cell alone."
        )
    if wanted == Mode.SPLIT and placement.cell == cell:
        raise SamePlace(
            f"{tenant} lives in {cell} already, and a split is between two cells: choose"
            " another cell, or a move by fence."
        )
    return Mode.CELL if placement.store == store else wanted


def rehearse_move(
    tenant: Tenant, *, target_cell: Cell, target_store: Store, by: str, reason: str, **options: Any
) -> TenantMigration:
    """Practise a whole move of an internal tenant, there and back, with whoever is served by it.

    `options` are those of `start`. It closes its fence, or splits, by itself, stays on the target
    for a few seconds, goes back, and keeps what it measured. Nothing is deleted at the source:
    OFFBOARD is never entered to delete. Aborted like any move; a way back that somebody stops, or
    that runs out of its budget, is not begun again by itself. Raises NotInternal, and what
    starting raises.
    """
    fixed = {
        "automatic": True,
        "flip_by_hand": False,
        "offboard_automatically": False,
        "soak_seconds": REHEARSED_SOAK_SECONDS,
        "rehearsal": True,
    }
    if taken := sorted(set(options) & set(fixed)):
        raise InvalidOption(f"A rehearsal does not choose {', '.join(taken)}.")
    # Before two stores are looked at for nothing; looked at once more as it starts.
    _check_internal(tenant)
    return start(
        tenant,
        target_cell=target_cell,
        target_store=target_store,
        by=by,
        reason=reason,
        **{**options, **fixed},
    )


def _check_internal(tenant: Tenant) -> None:
    if not tenant.internal:
        raise NotInternal(
            f"{tenant} may have customers: a whole move is rehearsed on an internal tenant."
            f" Rehearse a copy of {tenant} instead."
        )


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
    """Ask the move to take its way out: open the source, publish, remove what it wrote.

    Where sessions were born on the target of a split they have to come back first: it is then
    rolled back, after the fence that is closed, if one is, was opened. Lifts a pause in SPLIT.
    """
    _require(reason)
    with _asking(move, "abort", seen=seen, by=by, reason=reason, now=now) as row:
        if row.phase not in WAY_OUT[Mode(row.mode)]:
            raise NotNow(f"{row} is in {row.phase.upper()}: from there it can't be aborted.")
        if row.abort_requested_at:
            raise NotNow(f"{row} is being aborted by {row.abort_requested_by} already.")
        if queries.split_live(row) and row.phase not in REVERSED:
            if row.rollback_requested_at:
                raise NotNow(f"{row} is being rolled back by {row.rollback_requested_by} already.")
            row.rollback_requested_at, row.rollback_requested_by = now, by
            row.rollback_reason = reason
            if row.phase == Phase.SPLIT:
                row.pause_requested_at, row.pause_requested_by, row.pause_reason = None, "", ""
                return
        row.abort_requested_at, row.abort_requested_by, row.abort_reason = now, by, reason


def close_fence(
    move: TenantMigration, *, by: str, reason: str, now: datetime, seen: str | None = None
) -> None:
    """Say "when I say": the fence closes after one more pass, once its quote fits the budget.

    In split mode the split begins; in SPLIT the source's sessions are not waited for any more.
    """
    _require(reason)
    with _asking(move, "close_fence", seen=seen, by=by, reason=reason, now=now) as row:
        if row.phase == Phase.SPLIT:
            _wait_no_longer(row, now)
            return
        if row.mode == Mode.CELL:
            if row.phase != Phase.PREPARE:
                raise NotNow(f"{row} is in {row.phase.upper()}: the fence closes out of PREPARE.")
        elif row.phase != Phase.BACKFILL:
            raise NotNow(f"{row} is in {row.phase.upper()}: the fence closes out of BACKFILL.")
        elif not row.passes or row.pass_ended_at is None:
            raise NotNow(
                f"{row} is still on its first pass: the fence would be as long as the copy."
            )
        if row.drain_requested_at:
            when = "closes once it may" if row.mode == Mode.CELL else "waits for the last pass"
            raise NotNow(f"{row.drain_requested_by} asked for it already; it {when}.")
        if queries.open_mismatches(row):
            raise NotNow(f"{row} has open mismatches: repair them first, or the fence would wait.")
        row.drain_requested_at, row.drain_requested_by = now, by


def _wait_no_longer(row: TenantMigration, now: datetime) -> None:
    if not queries.split_live(row) or row.split_at is None or row.rollback_requested_at:
        raise NotNow(f"{row} is not waiting for idle sessions.")
    waited = (now - row.split_at).total_seconds()
    if waited >= row.idle_bound_seconds:
        raise NotNow(f"{row} does not wait for idle sessions any more: {row.waiting_for}.")
    row.idle_bound_seconds = waited


def cancel_fence(
    move: TenantMigration, *, by: str, reason: str, now: datetime, seen: str | None = None
) -> None:
    """Take "close the fence" back while it still waits for its last pass."""
    _require(reason)
    with _asking(move, "cancel_fence", seen=seen, by=by, reason=reason, now=now) as row:
        waits = row.phase in (Phase.PREPARE, Phase.BACKFILL)
        if not waits or row.drain_requested_at is None:
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
        _may_repair(row)
        asked = (
            queries.repairable(row)
            .filter(id__in=mismatch_ids)
            .update(repair_requested_at=now, repair_requested_by=by)
        )
        if not asked:
            raise NotNow(
                "None of these is open any more, their repair was asked for already, or they are"
                " late writes: download both versions of those, then accept the tenant's own."
            )
    return asked


def accept(
    move: TenantMigration,
    *,
    mismatch_ids: Sequence[int],
    by: str,
    reason: str,
    now: datetime,
    seen: str | None = None,
) -> int:
    """Say that these differences may stay as they are; return how many.

    For values that the target spells in another way, and in SOAK for late writes at the closed
    source: what the tenant has on the target stands. The word is void once a digest changes.
    """
    _require(reason)
    with _asking(move, "accept", seen=seen, by=by, reason=reason, now=now) as row:
        rows = row.mismatches.filter(id__in=mismatch_ids, resolved_at=None, accepted_at=None)
        if not (found := list(rows)):
            raise NotNow("None of these is open any more, or somebody accepted them already.")
        for mismatch in found:
            if not queries.acceptable(row, mismatch):
                raise NotNow(
                    f"Row {mismatch.pk} looks like {mismatch.looks_like}, which can't be accepted"
                    f" in {row.phase.upper()}: something would be lost. Repair it by copying"
                    " again, or abort."
                )
        said = {"accepted_at": now, "accepted_by": by, "accepted_reason": reason}
        late = row.mismatches.filter(pk__in=[m.pk for m in found], looks_like=Looks.LATE_WRITE)
        # A rollback replaces these by what the tenant has on the target.
        late.update(**said, repair_requested_at=now, repair_requested_by=by)
        row.mismatches.filter(pk__in=[m.pk for m in found]).update(**said)
    return len(found)


@transaction.atomic
def set_store_services(
    store: Store,
    *,
    artifacts_from: str,
    memory_from: str,
    by: str,
    reason: str,
    now: datetime,
) -> Store:
    """Say where a store's artifact and memory services are ("" for none); return the store.

    A move told both sides' places apart when it began, so none may be under way with this store.
    Raises NotNow, NotAReference.
    """
    _require(reason)
    sides = Q(source_store=store) | Q(target_store=store)
    if move := TenantMigration.objects.filter(sides).exclude(phase__in=ENDED).first():
        raise NotNow(
            f"{move} of {move.tenant} goes by what {store} names now. Wait until it has ended, or"
            " abort it."
        )
    return tenants.set_store_services(
        store,
        artifacts_from=artifacts_from,
        memory_from=memory_from,
        by=by,
        reason=reason,
        now=now,
    )


def reconcile_users(
    move: TenantMigration,
    *,
    mismatch_ids: Sequence[int],
    by: str,
    reason: str = "",
    now: datetime,
    seen: str | None = None,
) -> int:
    """Ask for the shared state of the users of these mismatches to be written by value again.

    Returns how many users that are. Re-copying a session never changes what its user shares.
    """
    with _asking(move, "reconcile_users", seen=seen, by=by, reason=reason, now=now) as row:
        _may_repair(row)
        users = set(
            row.mismatches.filter(id__in=mismatch_ids, resolved_at=None)
            .exclude(part="app")
            .values_list("user_id", flat=True)
        )
        if not users:
            raise NotNow("None of these is open any more, or none is of a user.")
        for user_id in sorted(users):
            row.mismatches.update_or_create(
                user_id=user_id,
                session_id="",
                resolved_at=None,
                defaults={"repair_requested_at": now, "repair_requested_by": by},
                create_defaults={
                    "part": "user",
                    "first_difference": "asked to be written by value again",
                    "looks_like": Looks.OLD_SHARED_WON,
                    "found_at": now,
                    "found_in": row.phase,
                    "repair_requested_at": now,
                    "repair_requested_by": by,
                },
            )
    return len(users)


def set_pace(
    move: TenantMigration,
    *,
    pace_per_second: float | None = None,
    finish_by: datetime | None = None,
    by: str,
    reason: str,
    now: datetime,
    seen: str | None = None,
) -> None:
    """Change BACKFILL's rate while it runs: sessions per second, or a time to be through by.

    Neither: as fast as both stores allow.
    """
    _require(reason)
    check_pace(pace_per_second, finish_by, now)
    with _asking(move, "set_pace", seen=seen, by=by, reason=reason, now=now) as row:
        if row.mode == Mode.CELL:
            raise NotNow(f"{row} copies nothing, so it has no pace.")
        if row.phase not in (Phase.PREPARE, Phase.BACKFILL, Phase.SPLIT):
            raise NotNow(f"{row} is in {row.phase.upper()}: only BACKFILL and SPLIT have a pace.")
        row.pace_per_second, row.finish_by = pace_per_second, finish_by


def flip(
    move: TenantMigration, *, by: str, reason: str, now: datetime, seen: str | None = None
) -> None:
    """Let a move that was started with `flip_by_hand` go on to TARGET once all is equal."""
    _require(reason)
    with _asking(move, "flip", seen=seen, by=by, reason=reason, now=now) as row:
        if not row.flip_by_hand:
            raise NotNow(f"{row} goes on to TARGET by itself.")
        if row.phase not in (Phase.DRAIN, Phase.DELTA, Phase.VERIFY):
            raise NotNow(f"{row} is in {row.phase.upper()}: the word for TARGET is for VERIFY.")
        if row.flip_requested_at:
            raise NotNow(f"{row.flip_requested_by} gave the word already.")
        row.flip_requested_at, row.flip_requested_by = now, by


def rollback(
    move: TenantMigration,
    *,
    by: str,
    reason: str,
    now: datetime,
    budget_seconds: float | None = None,
    seen: str | None = None,
    dry_run: bool = False,
) -> None:
    """Ask for the way back: the tenant lives on the source again, with all that it wrote since.

    The fence closes on the target, what was touched since the cutover is carried back and
    proven equal, then the placement flips. `budget_seconds` replaces the move's. Lifts a pause.
    """
    _require(reason)
    if move.phase == Phase.SOAK and (red := way_back(move, now=now)):
        raise NotReadyToMove(" ".join(f"{c.name}: {c.detail}" for c in red) + " Nothing changed.")
    asking = _asking(move, "rollback", seen=seen, by=by, reason=reason, now=now, dry_run=dry_run)
    with asking as row:
        if row.phase in REVERSED or row.phase == Phase.ROLLED_BACK:
            raise NotNow(f"{row} is in {row.phase.upper()}: it was rolled back already.")
        if row.phase != Phase.SOAK:
            raise NotNow(
                f"{row} is in {row.phase.upper()}: a move is rolled back in SOAK. Before TARGET,"
                " abort it; after OFFBOARD, start a move back."
            )
        if row.rollback_requested_at:
            raise NotNow(f"{row} is being rolled back by {row.rollback_requested_by} already.")
        if queries.owes_opening(row):
            raise NotNow(f"{row} still settles its stopped rollback. Try once it soaks.")
        if late := queries.blocking(row).count():
            raise NotNow(
                f"{counted(late, 'late write')} at the closed source would be replaced. Download"
                " both versions, accept the tenant's own, then roll back."
            )
        budget = row.budget_seconds if budget_seconds is None else budget_seconds
        check_times(budget, min(row.drain_bound_seconds, budget), row.soak_seconds)
        quote = queries.fence_quote(row, now=now)
        if quote.worst > budget:
            raise NotNow(
                f"The fence back may take up to {duration(quote.worst)}, the budget is"
                f" {limit(budget)}. Give a larger budget with the request."
            )
        row.budget_seconds = budget
        row.rollback_requested_at, row.rollback_requested_by = now, by
        row.rollback_reason = reason
        row.pause_requested_at, row.pause_requested_by, row.pause_reason = None, "", ""
        row.offboard_confirmed_at, row.offboard_confirmed_by = None, ""


def cancel_rollback(
    move: TenantMigration, *, by: str, reason: str, now: datetime, seen: str | None = None
) -> None:
    """Take a rollback back that has not closed the fence yet. Afterwards: abort it."""
    _require(reason)
    with _asking(move, "cancel_rollback", seen=seen, by=by, reason=reason, now=now) as row:
        if row.phase not in (Phase.SOAK, Phase.SPLIT) or row.rollback_requested_at is None:
            raise NotNow(f"{row} has no rollback that waits to begin.")
        row.rollback_requested_at, row.waiting_for = None, ""


def confirm_offboard(
    move: TenantMigration,
    *,
    typed: str,
    by: str,
    reason: str,
    now: datetime,
    seen: str | None = None,
    dry_run: bool = False,
) -> None:
    """Let OFFBOARD delete the source's copy when SOAK is over. `typed` is the tenant's slug."""
    _require(reason)
    asking = _asking(
        move, "confirm_offboard", seen=seen, by=by, reason=reason, now=now, dry_run=dry_run
    )
    with asking as row:
        if row.phase != Phase.SOAK:
            raise NotNow(f"{row} is in {row.phase.upper()}: deleting is confirmed in SOAK.")
        if row.rehearsal:
            raise NotNow(f"{row} is a rehearsal: it goes back, and nothing is deleted.")
        if row.mode == Mode.CELL:
            raise NotNow(f"{row} copied nothing, so there is nothing to delete.")
        if typed != row.tenant.slug:
            raise NotTyped(f'Type "{row.tenant.slug}" to delete its copy on {row.source_store}.')
        if row.rollback_requested_at:
            raise NotNow(f"{row} is about to be rolled back by {row.rollback_requested_by}.")
        if row.offboard_confirmed_at:
            raise NotNow(f"{row.offboard_confirmed_by} confirmed it already.")
        row.offboard_confirmed_at, row.offboard_confirmed_by = now, by


def leave_behind(
    move: TenantMigration, *, by: str, reason: str, now: datetime, seen: str | None = None
) -> None:
    """End a move although the store that it should clean can't be; what is there stays.

    That is the target of an abort, and in OFFBOARD the source. Lifts a pause.
    """
    _require(reason)
    with _asking(move, "leave_behind", seen=seen, by=by, reason=reason, now=now) as row:
        if not queries.stuck_at_cleaning(row):
            raise NotNow(f"{row} is not stuck at cleaning a store.")
        row.leave_requested_at, row.leave_requested_by = now, by
        row.pause_requested_at, row.pause_requested_by, row.pause_reason = None, "", ""


def _may_repair(move: TenantMigration) -> None:
    if move.phase not in (Phase.BACKFILL, Phase.SPLIT, Phase.VERIFY, Phase.REVERSE_VERIFY):
        # Never re-copy after TARGET: it would overwrite what the tenant wrote since.
        raise NotNow(
            f"{move} is in {move.phase.upper()}: only BACKFILL, SPLIT and the comparisons inside"
            " a fence copy again."
        )


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
    "budget_seconds",
    "idle_bound_seconds",
    "pace_per_second",
    "finish_by",
    "flip_requested_at",
    "flip_requested_by",
    "rollback_requested_at",
    "rollback_requested_by",
    "rollback_reason",
    # What a request that was taken back had waited for.
    "waiting_for",
    "offboard_confirmed_at",
    "offboard_confirmed_by",
    "leave_requested_at",
    "leave_requested_by",
    "deadline_at",
    "deadline_held_by",
)


@contextmanager
def _asking(
    move: TenantMigration,
    verb: str,
    *,
    seen: str | None,
    by: str,
    reason: str,
    now: datetime,
    dry_run: bool = False,
) -> Iterator[TenantMigration]:
    """One transaction around a request: lock the row, compare the phase, save, log, audit.

    Only columns of REQUESTS are written, so a request never undoes what a worker
    settled; the worker's next claim, at most seconds away, answers it. A dry run is refused
    like the act, and nothing of it stays.
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
        said = words(verb, row.phase, row.mode)
        note = f"{said}: {reason}" if reason else said
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
        transaction.set_rollback(dry_run)
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


def note_values_read(of: TenantMigration, what: str, *, by: str, now: datetime) -> None:
    """Keep who was shown values of sessions; they may be secrets."""
    with transaction.atomic():
        after = {"tenant": str(of.tenant), "what": what}
        _audit(of, "read_values", by=by, reason="", now=now, after=after)


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


def check_times(budget: float, drain_bound: float, soak: float) -> None:
    """Raise InvalidOption unless a move's times (seconds) make sense."""
    if not 1 <= budget <= 3600:
        raise InvalidOption(f"A fence budget of {budget:g} s: choose 1 to 3,600 seconds.")
    if not 1 <= drain_bound <= budget:
        raise InvalidOption(
            f"A drain bound of {drain_bound:g} s: choose 1 s up to the fence budget ({budget:g} s)."
        )
    if not 0 <= soak <= 90 * 86_400:
        raise InvalidOption(f"A soak of {soak:g} s: choose 0 seconds to 90 days.")


def check_idle(idle: float, bound: float) -> None:
    """Raise InvalidOption unless the times (seconds) of a split's wait make sense."""
    if not 0 <= idle <= bound:
        raise InvalidOption(f"Idle for {idle:g} s: choose 0 seconds up to the bound ({bound:g} s).")
    if not 0 <= bound <= 30 * 86_400:
        raise InvalidOption(f"A bound of {bound:g} s: choose 0 seconds to 30 days.")


def check_pause(before: str, mode: Mode) -> None:
    """Raise InvalidOption unless a move of this mode can be told to pause before that phase."""
    known_ones = pausable_before(Mode(mode))
    if before and before not in known_ones:
        names = ", ".join(phase.upper() for phase in known_ones)
        raise InvalidOption(f"A pause before {before[:20].upper()!r}: choose one of {names}.")


def check_pace(pace: float | None, finish_by: datetime | None, now: datetime) -> None:
    """Raise InvalidOption unless the pace (sessions/s) and the time to be through make sense."""
    if pace is not None and finish_by is not None:
        raise InvalidOption("A pace and a finish time: choose one, the other follows from it.")
    if finish_by is not None and not now < finish_by <= now + timedelta(days=90):
        raise InvalidOption("The finish time is not in the next 90 days.")
    if pace is not None and not 0.01 <= pace <= 100_000:
        raise InvalidOption(f"A pace of {pace:g} sessions/s: choose 0.01 to 100,000, or none.")
