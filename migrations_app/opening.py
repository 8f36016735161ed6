"""Break-glass: a tenant that is refused against a rule of safety takes turns again.

For three in the morning, with workers, beat or broker gone: it needs our database, the stores and
this process. It is no short cut. A closed fence is opened by the move's own machine, driven here
under the same claims and guards; so it opens the side that the machine would, forward where the
point of no return is behind, and a worker that comes back meanwhile does no harm. Where no move
lives, the home's guard row rises as every row does, and only the home is opened.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from django.conf import settings
from django.db import transaction

from durable import driver
from durable.driver import Clock
from durable.errors import Refused
from durable.machine import Overtaken
from migrations_app import queries, restored, safety, services
from migrations_app.domain.phases import ENDED, REVERSED
from migrations_app.domain.restored import GuardRow, told
from migrations_app.domain.safety import Rule
from migrations_app.models import TenantMigration
from migrations_app.safety import State
from migrations_app.steps import machine
from tenants import queries as tenants_queries
from tenants import services as tenants
from tenants.domain.words import limit
from tenants.models import Placement, Store, Tenant

# How long nothing is done while somebody else's claim, or a back-off, is waited for.
REST_SECONDS = 0.25
PREFIX = "Break-glass: "


class NothingBroken(Refused):
    """No rule of safety is broken of the tenant, so there is no glass to break."""


class MachinesHalted(Refused):
    """All machines are stopped: this database may be older than the stores."""


class GuardUnknown(Refused):
    """The stores tell of more than this database knows, or of another side that is open."""


class StillRefused(Refused):
    """The time is up, and the tenant is not open yet."""

    retry_after_seconds = 1


@dataclass(frozen=True, slots=True)
class Opened:
    """What was found, and what holds after."""

    before: State
    after: State


def within_seconds() -> float:
    """Return how long an opening may take: a dead worker's lease, and the steps behind it."""
    return 2 * float(settings.DURABLE_LEASE_SECONDS) + 30.0


def look(tenant: Tenant, *, now: datetime) -> State:
    """Return what is broken of the tenant, and change nothing.

    Raises NothingBroken, MachinesHalted.
    """
    _check_running()
    state = safety.state_of(tenant, now=now)
    if state.rule is None:
        raise NothingBroken(f"No rule is broken of {tenant}: {state.words}. Nothing was changed.")
    return state


def what_it_does(state: State) -> str:
    """Say how the tenant would be opened."""
    if state.rule is Rule.NOBODY_SERVES:
        return (
            f"Asks the guard rows of {state.tenant}, opens {state.store} if it is closed, and"
            f" publishes that {state.cell} takes all its turns."
        )
    move = _move(state)
    if (asks := _asked_out(move)) is not None:
        return f"Aborts {move}, which leads to {asks.upper()}, and takes its steps in this process."
    return f"Takes the steps of {move} in this process: out of {move.phase.upper()} one way leads."


def open_tenant(
    tenant: Tenant,
    *,
    by: str,
    reason: str,
    clock: Clock,
    sleep: Callable[[float], None],
    tell: Callable[[str], None] = lambda text: None,
    bounded: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Opened:
    """Open a tenant that is refused against a rule, in this very process; may be repeated.

    `tell` is given a line per phase. Each step is taken inside `bounded()`. Raises ReasonMissing,
    InvalidOption, NothingBroken, MachinesHalted, StillRefused after `within_seconds`; where no
    move lives GuardUnknown, StoreSilent, and what opening a store raises.
    """
    tenants.check_reason(reason)
    if "\0" in reason or len(reason) > services.REASON_CHARACTERS - len(PREFIX):
        most = services.REASON_CHARACTERS - len(PREFIX)
        raise services.InvalidOption(f"A reason has up to {most:,} characters, none of them NUL.")
    found = look(tenant, now=clock())
    tell(f"{tenant}: {found.words}.")
    after = found
    if found.rule is Rule.FENCE_OVERDUE:
        after = _step_out(tenant, found, by, PREFIX + reason, clock, sleep, tell, bounded)
    if after.rule is Rule.NOBODY_SERVES:
        after = _open_home(tenant, found, by, PREFIX + reason, clock, tell)
    tell(f"{tenant}: {after.words}.")
    return Opened(found, after)


# --- a fence that nobody opens --------------------------------------------------------------------


def _step_out(
    tenant: Tenant,
    found: State,
    by: str,
    words: str,
    clock: Clock,
    sleep: Callable[[float], None],
    tell: Callable[[str], None],
    bounded: Callable[[], AbstractContextManager[Any]],
) -> State:
    """Drive the move's machine until what it keeps closed is open."""
    move = _move(found)
    said = move.events.order_by("-pk").values_list("pk", flat=True).first() or 0
    _begin(found, move, by, words, clock())
    until = clock() + timedelta(seconds=within_seconds())
    _ask_out(move, by, words, clock())
    # Whatever is due next is settled as a row: nobody has to be told.
    walking = machine(lambda pk, phase, seconds: None)
    holder = -1
    while True:
        # Also where a worker came back and was faster; and where a fence of the same move was
        # closed anew since then, that one has its own deadline.
        state = safety.state_of(tenant, now=clock())
        if state.since != found.since or state.move != found.move:
            return _ended(found, state, move, by, words, clock())
        _check_running()
        if clock() >= until:
            _ended(found, state, move, by, words, clock())
            raise StillRefused(
                f"{tenant} is not open after {limit(within_seconds())}: {state.words}."
                f" {_why(move)}Run this again once that is settled."
            )
        with bounded():
            stepped = driver.advance(walking, move.pk, clock=clock)
        for event in move.events.filter(pk__gt=said).order_by("pk"):
            said = event.pk
            tell(f"{move} {event.now.upper()}: {event.note}")
        if stepped:
            continue
        move.refresh_from_db()
        if move.claim != move.settled and move.claim != holder and move.due_at is not None:
            holder = move.claim
            tell(f"{move} is claimed by a worker, until {move.due_at:%H:%M:%S} UTC at the latest.")
        sleep(REST_SECONDS)


def _move(state: State) -> TenantMigration:
    assert state.move is not None
    return TenantMigration.objects.get(pk=state.move)


def _asked_out(move: TenantMigration) -> StrEnum | None:
    """Return where an abort leads that is to be asked for; None: the machine gets out by itself.

    Not of a fence forward out of a split: that is past its deadline, which opens it. An abort would
    close another, to carry home what was born on the target.
    """
    out = machine(lambda pk, phase, seconds: None).way_out(move)
    forward = queries.split_live(move) and move.phase not in REVERSED
    return None if forward or move.abort_requested_at is not None else out


def _ask_out(move: TenantMigration, by: str, words: str, now: datetime) -> None:
    if _asked_out(move) is None:
        return
    try:
        services.abort(move, by=by, reason=words, now=now, seen=move.phase)
    except (services.StalePage, services.NotNow):
        # A worker came back and took a step in between; what is there now leads out as well.
        return


def _why(move: TenantMigration) -> str:
    move.refresh_from_db()
    if move.failure:
        return f"{move} in {move.phase.upper()} says: {move.failure.rstrip('.')}. "
    return f"{move} waits for {move.waiting_for.rstrip('.')}. " if move.waiting_for else ""


# --- no move lives, and no cell takes turns -------------------------------------------------------


def _open_home(
    tenant: Tenant, found: State, by: str, words: str, clock: Clock, tell: Callable[[str], None]
) -> State:
    """Open the home's store where it is closed, then publish that its cell takes all turns."""
    placement = Placement.objects.select_related("cell", "store").get(tenant=tenant)
    tenant.placement = placement
    home = placement.store
    _check_free(tenant, placement)
    stores = restored.read_stores(_sides(tenant, home), app_name=tenant.app_name)
    rows = dict(stores.rows.get(tenant.app_name, {}))
    if home.key in stores.silent:
        raise restored.StoreSilent(
            f"{home} must answer first: {stores.silent[home.key]} Nothing was changed."
        )
    # Behind the stores: a step's claim is counted here before it stands there.
    closed = _check_rows(tenant, home, rows)
    if closed and stores.silent:
        silent = ", ".join(sorted(stores.silent))
        raise restored.StoreSilent(
            f"{home} is closed to agents, and {silent} must answer before it is opened: that other"
            " side may be open. Nothing was changed."
        )
    last = tenant.moves.order_by("pk").last()
    _begin(found, last, by, words, clock())
    if closed:
        with transaction.atomic():
            # A move that starts waits for this row, and has a higher number than ours then.
            Tenant.objects.select_for_update().get(pk=tenant.pk)
            _check_free(tenant, placement, alone=True)
            own = restored.own_move(
                tenant, home, placement.cell, by=by, words=f"Opens {home}. {words}", now=clock()
            )
        try:
            restored.leave_open(own, home, rows, {home.key})
        except Overtaken as overtaken:
            raise GuardUnknown(
                f"Somebody else took the guard row of {home} meanwhile. Look again."
            ) from overtaken
        tell(f"{home} is open to agents.")
    with transaction.atomic():
        _check_running()
        if not safety.state_of(tenant, now=clock()).facts.served:
            version = tenants.publish(tenant, placement.cell, accepts="all")
            tell(f"{placement.cell} takes all turns from policy version {version}.")
        # Behind the cell's lock, which whoever closes a fence holds too: one that was closed since
        # the look is seen here, and this is taken back; a later one closes what was opened.
        _check_free(tenant, placement)
        state = safety.state_of(tenant, now=clock())
        return _ended(found, state, last, by, words, clock())


def _sides(tenant: Tenant, home: Store) -> list[Store]:
    """Return the stores at which this database knows that the tenant has, or had, a guard row."""
    of_moves = tenant.moves.values_list("source_store", "target_store")
    keys = {home.pk, *(key for pair in of_moves for key in pair)}
    return list(Store.objects.filter(pk__in=keys).order_by("key"))


def _check_free(tenant: Tenant, placement: Placement, *, alone: bool = False) -> None:
    """Raise GuardUnknown if the home is not one cell's and store's to open as it was looked at."""
    now = Placement.objects.get(tenant=tenant)
    if now.split_cell_id is not None:
        raise GuardUnknown(
            f"{tenant} is split between two cells and no move of it keeps that: run"
            " `manage.py restored`, which lets the split be joined. Nothing was changed."
        )
    if (now.cell_id, now.store_id) != (placement.cell_id, placement.store_id):
        raise GuardUnknown(f"{tenant} was placed elsewhere meanwhile. Look again.")
    live = tenant.moves.exclude(phase__in=ENDED).first()
    if live is None:
        return
    fenced = live.fence_closed_at is not None and live.fence_opened_at is None
    if alone or fenced or queries.opens_target(live):
        raise GuardUnknown(
            f"{live} of {tenant} is in {live.phase.upper()}, and what is closed is its to open."
            " Look again, or abort it first."
        )


def _check_rows(tenant: Tenant, home: Store, rows: dict[str, GuardRow]) -> bool:
    """Return whether the home's store is closed to agents. Raises GuardUnknown.

    Each row has to be one that this database knows: written by a move of this tenant, under a claim
    that it has counted. Any other tells of more, as after a restore.
    """
    known = {move.pk: move for move in tenant.moves.all()}
    answered = f"{told(rows, ())}. Nothing was changed"
    for key, row in sorted(rows.items()):
        move = known.get(row.move)
        if move is None or row.claim > move.claim:
            raise GuardUnknown(
                f"{key} is guarded by mv-{row.move}"
                + (f", claim {row.claim}, which" if move is not None else ", which")
                + " this database has never heard of: was it restored? Run `manage.py restored`,"
                f" which compares all of it with the stores. {answered}."
            )
        if row.agents and key != home.key:
            raise GuardUnknown(
                f"{tenant} lives on {home} and agents may write it at {key}: opening would leave"
                f" two sides. Run `manage.py restored`. {answered}."
            )
    ours = rows.get(home.key)
    if ours is None or ours.agents:
        return False
    move = known[ours.move]
    if move.phase not in ENDED or ours.mover:
        raise GuardUnknown(
            f"{home} is closed by {move}, which is in {move.phase.upper()}"
            + (" and writes it" if ours.mover else "")
            + f". Abort it, or look at its page. {answered}."
        )
    return True


# --- the log --------------------------------------------------------------------------------------


def _check_running() -> None:
    if why := tenants_queries.halted():
        raise MachinesHalted(
            f"All machines are stopped: {why} Nothing is opened by this database's word before"
            " `manage.py restored` has compared it with the stores."
        )


def _shown(state: State) -> dict[str, Any]:
    """Return a state as the audit keeps it."""
    return {
        "state": state.words,
        "rule": state.rule,
        "cell": state.cell,
        "store": state.store,
        "move": None if state.move is None else f"mv-{state.move}",
    }


@transaction.atomic
def _begin(found: State, move: TenantMigration | None, by: str, words: str, now: datetime) -> None:
    """Say who begins, before anything is done: whoever is killed in the middle has said it too."""
    _note(move, by, f"{words} (found: {found.words})", now)
    tenants.audit(
        who=by,
        verb="tenant.break_glass_begun",
        subject=f"tenant {found.tenant}",
        reason=words,
        before=_shown(found),
        now=now,
    )


@transaction.atomic
def _ended(
    found: State, state: State, move: TenantMigration | None, by: str, words: str, now: datetime
) -> State:
    """Say what holds after; return it."""
    _note(move, by, f"Break-glass: {state.words}", now)
    tenants.audit(
        who=by,
        verb="tenant.break_glass",
        subject=f"tenant {found.tenant}",
        reason=words,
        before=_shown(found),
        after=_shown(state),
        now=now,
    )
    return state


def _note(move: TenantMigration | None, by: str, note: str, now: datetime) -> None:
    if move is not None:
        phase = TenantMigration.objects.values_list("phase", flat=True).get(pk=move.pk)
        move.events.create(at=now, who=by, was=phase, now=phase, note=note)
