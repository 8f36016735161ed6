"""After our own database was restored from a backup: what the stores say is newer than we are.

Machines are stopped meanwhile. Each tenant's placement and live move are compared with the
guard rows in the stores; who differs is refused until a person has said where it lives.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from django.db import connection, transaction
from django.db.models import F, Max, QuerySet

from durable.errors import Refused
from migrations_app import artifacts, channels, ports, queries
from migrations_app.domain.phases import ENDED, Mode, Phase
from migrations_app.domain.restored import (
    STAYS_REFUSED,
    GuardRow,
    LiveMove,
    Says,
    Split,
    Verdict,
    judge,
    told,
)
from migrations_app.models import RestoreFinding, TenantMigration
from migrations_app.ports.base import Guard, SessionStore, StoreRefused
from tenants import queries as tenants_queries
from tenants import services as tenants
from tenants.domain.fence import Accepts
from tenants.domain.words import counted
from tenants.models import Cell, Placement, PolicyEntry, Store, Tenant

# Stores that are asked at the same time; each answers within seconds or is silent.
AT_ONCE = 8
# Numbers that moves skip after a restore. Guard rows show the highest number that was lost, but
# not at a store that was registered after the backup, or is away just now.
NUMBERS_SKIPPED = 1_000
PROGRESS_EVERY = 1_000


class StillAtWork(Refused):
    """A step that began before the machines were stopped is not over."""

    retry_after_seconds = 5


class AlreadySettled(Refused):
    """Somebody has settled it, or a later comparison has."""


class NotAHome(Refused):
    """Nothing shows that the tenant lives there."""


class StoreSilent(Refused):
    """A store that has to be asked or closed does not answer."""


class CellUnknown(Refused):
    """Nothing here tells which cell served the tenant there."""


class NotSettled(Refused):
    """Tenants are refused whose place nobody has settled."""


@dataclass(frozen=True, slots=True)
class Stores:
    """What every registered store answered."""

    # App name -> store key -> the tenant's guard row there.
    rows: Mapping[str, Mapping[str, GuardRow]]
    # Store key -> why it did not answer.
    silent: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Line:
    """One tenant that is not plainly where the database says, for a table."""

    tenant: str
    says: str
    told: str
    verdict: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a comparison found."""

    epoch: str
    tenants: int
    # Tenants that differ, and those that are right but were moved by moves that were lost.
    lines: tuple[Line, ...]
    differing: int
    # Why each silent store is silent.
    silent: Mapping[str, str]
    # App names that a store guards and no tenant here has: onboarded after the backup.
    strangers: tuple[str, ...]
    # The next move's number is above this.
    number: int


def at_work() -> QuerySet[TenantMigration]:
    """Return the moves that a worker claimed and has not settled.

    A step that began before the halt may still write a store. It is over by the row's `due_at`:
    then its lease has run out, and before that its worker's hard time limit.
    """
    return TenantMigration.objects.exclude(phase__in=ENDED).exclude(settled=F("claim"))


def wait_for_steps(*, clock: Callable[[], datetime], sleep: Callable[[float], None]) -> None:
    """Wait until every step that began before the halt is over: a lease, at most."""
    while at_work().filter(due_at__gt=clock()).exists():
        sleep(0.2)


def compare(
    *, by: str, reason: str, now: datetime, tell: Callable[[str], None] = lambda text: None
) -> Comparison:
    """Replace the epoch, raise move numbers, and compare every tenant with the stores.

    Who differs is refused and listed (RestoreFinding); who differed before and is right by now is
    let in again. May be repeated. Machines must be stopped. Raises ReasonMissing, MachinesRun,
    StillAtWork.
    """
    tenants.check_reason(reason)
    _require_stopped(now)
    halt = tenants_queries.halt()
    first = halt is not None and halt.leases_until is None
    epoch = tenants.replace_epoch(by=by, reason=reason, now=now)
    asked = list(Store.objects.order_by("key"))
    tell(f"Asking {len(asked):,} stores.")
    stores = read_stores(asked)
    for key, why in stores.silent.items():
        tell(f"{key} does not answer: {why}")
    highest = max((row.move for rows in stores.rows.values() for row in rows.values()), default=0)
    number = _raise_numbers(highest, skip=NUMBERS_SKIPPED if first else 0)
    # Of thousands of tenants that are right, none costs a statement.
    found_before = set(RestoreFinding.objects.values_list("tenant_id", flat=True))
    lines = []
    count = differing = 0
    for tenant, says in _everybody(stores, _owners()):
        count += 1
        if count % PROGRESS_EVERY == 0:
            tell(f"{count:,} tenants compared.")
        rows = stores.rows.get(tenant.app_name, {})
        verdict = judge(says, rows, stores.silent)
        line = _line(tenant, says, rows, stores.silent, verdict)
        if not verdict.same:
            differing += 1
            _refuse(tenant, line, verdict, by=by, now=now)
            lines.append(line)
            continue
        if tenant.pk in found_before:
            _let_in(tenant, by=by, now=now)
        if verdict.lost:
            with transaction.atomic():
                _record_lost(tenant, rows, verdict.lost, home=tenant.placement, by=by, now=now)
            lines.append(line)
    tenants.note_comparison(now=now)
    strangers = set(stores.rows) - set(Tenant.objects.values_list("app_name", flat=True))
    return Comparison(
        epoch=epoch,
        tenants=count,
        lines=tuple(lines),
        differing=differing,
        silent=stores.silent,
        strangers=tuple(sorted(strangers)),
        number=number,
    )


def settle(
    finding: RestoreFinding,
    *,
    home: Store,
    cell: Cell | None = None,
    by: str,
    reason: str,
    now: datetime,
) -> int:
    """Say that the tenant lives on `home`; return the placement_version that says so.

    A live move of an older truth ends as it is. Stores are asked again first, and touched only
    where another than `home` is open to agents, or none is: then the others close and `home`
    opens. `cell` is needed where nothing here tells who served the tenant there.

    Where sessions live on both sides of a split, none may be given up: its move goes on from the
    split once machines start, and brings to `home` what the other side has. `cell` is then the
    target's, if that was lost. Raises
    ReasonMissing, MachinesRun, StillAtWork, AlreadySettled, NotAHome, StoreSilent, CellUnknown,
    and what opening a store raises.
    """
    tenants.check_reason(reason)
    _require_stopped(now)
    _require_open(finding)
    tenant = Tenant.objects.select_related("placement__cell", "placement__store").get(
        pk=finding.tenant_id
    )
    stores = read_stores(list(Store.objects.order_by("key")), app_name=tenant.app_name)
    rows = stores.rows.get(tenant.app_name, {})
    [(_, says)] = _everybody(stores, _owners(), tenant=tenant)
    verdict = judge(says, rows, stores.silent)
    if verdict.same:
        raise AlreadySettled(
            f"By now the stores say of {tenant} what this database says. Run `manage.py restored`"
            " again: it lets the tenant in."
        )
    if home.key not in verdict.homes:
        raise NotAHome(
            f"{tenant} can't be said to live on {home}: {told(rows, stores.silent)}."
            f" {_choices(verdict, stores)}"
        )
    if verdict.split is not None:
        return _join(
            finding,
            verdict.split,
            verdict,
            rows,
            home=home,
            cell=cell,
            by=by,
            reason=reason,
            now=now,
        )
    chosen = _cell_at(home, tenant, says, cell)
    # Whoever agents may write at besides the home. No guard row: that was never closed.
    open_too = {key for key, row in rows.items() if row.agents} - {home.key}
    if says.store != home.key and says.store not in rows and says.store not in stores.silent:
        open_too.add(says.store)
    theirs = {row.move for row in rows.values()} & set(says.others)
    if open_too or verdict.opens or theirs:
        if stores.silent:
            raise StoreSilent(
                f"{', '.join(stores.silent)} must answer first: closing the other stores and"
                f" opening {home} has to leave exactly one open."
            )
        words = f"Guard rows put right after a restore: {reason}"
        move = own_move(tenant, home, chosen, by=by, words=words, now=now)
        leave_open(move, home, rows, open_too | set(rows))
    with transaction.atomic():
        locked = _lock_open(finding)
        words = f"Settled after a restore: {reason}"
        live = tenant.moves.select_for_update().exclude(phase__in=ENDED).first()
        version = tenants.place(tenant, cell=chosen, store=home, by=by, reason=words, now=now)
        if live is not None:
            _end(live, home, version, by=by, reason=reason, now=now)
        _record_lost(
            tenant, rows, verdict.lost, home=Placement(cell=chosen, store=home), by=by, now=now
        )
        outcome = f"Lives on {home} in {chosen}, by placement version {version}"
        _resolve(locked, outcome, by=by, reason=reason, now=now)
        tenants.audit(
            who=by,
            verb="restored.settle",
            subject=f"tenant {tenant}",
            reason=reason,
            before={
                "cell": tenant.placement.cell.slug,
                "store": tenant.placement.store.key,
                "move": str(live) if live is not None else None,
                "told": told(rows, stores.silent),
            },
            after={"cell": chosen.slug, "store": home.key, "placement_version": version},
            now=now,
        )
    return version


def leave_refused(finding: RestoreFinding, *, by: str, reason: str, now: datetime) -> None:
    """Let machines start although nobody can say where the tenant lives: it stays refused.

    For a store that will not come back soon. A live move of the tenant ends as it is. A later
    `restored` compares the tenant again. Raises ReasonMissing, MachinesRun, StillAtWork,
    AlreadySettled.
    """
    tenants.check_reason(reason)
    _require_stopped(now)
    with transaction.atomic():
        locked = _lock_open(finding)
        live = locked.tenant.moves.select_for_update().exclude(phase__in=ENDED).first()
        if live is not None:
            _end(live, None, None, by=by, reason=reason, now=now)
        _resolve(locked, STAYS_REFUSED, by=by, reason=reason, now=now)
        tenants.audit(
            who=by,
            verb="restored.leave_refused",
            subject=f"tenant {locked.tenant}",
            reason=reason,
            before={"differs": locked.differs, "move": str(live) if live is not None else None},
            now=now,
        )


def start_machines(*, by: str, reason: str, now: datetime) -> None:
    """Start the machines again, once every tenant that differed is settled.

    Raises ReasonMissing, MachinesRun, NotSettled, NotCompared, LeasesRun.
    """
    tenants.check_reason(reason)
    open_ones = list(open_findings().values_list("tenant__slug", flat=True))
    if open_ones:
        raise NotSettled(
            f"{counted(len(open_ones), 'tenant')} refused and not settled:"
            f" {', '.join(open_ones[:10])}. Say of each where it lives, or leave it refused."
        )
    tenants.resume(by=by, reason=reason, now=now)


def open_findings() -> QuerySet[RestoreFinding]:
    """Return the tenants that nobody has settled yet, by name."""
    return RestoreFinding.objects.filter(resolved_at=None).select_related("tenant")


# --- what the stores say ----------------------------------------------------------------------


def read_stores(asked: Collection[Store], *, app_name: str | None = None) -> Stores:
    """Read the guard rows of all tenants, or of one: a connection a store, several at a time."""
    rows: dict[str, dict[str, GuardRow]] = defaultdict(dict)
    silent = {}
    # A store behind google-adk's interface can't list its tenants: it is asked for each.
    among = [app_name] if app_name else list(Tenant.objects.values_list("app_name", flat=True))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = pool.map(lambda store: _guards(store, among), asked)
        for store, answer in zip(asked, answers, strict=True):
            if isinstance(answer, str):
                silent[store.key] = answer
                continue
            for name, guard in answer.items():
                if app_name is None or name == app_name:
                    rows[name][store.key] = GuardRow(*guard)
    return Stores(rows, silent)


def _guards(store: Store, among: Collection[str]) -> dict[str, Guard] | str:
    """Return the store's guard rows, or why it does not answer."""
    try:
        with ports.open_store(store.kind, store.address_from, app_name="") as port:
            rows = port.guards(among)
            # A file or a schema that is away looks like a store that nobody ever closed.
            if not rows and (store.survey or {}).get("schema_version") and not port.has_tables:
                return "it had session tables when it was last looked at, and has none now"
            return rows
    except StoreRefused as refusal:
        return str(refusal)


# --- what the database says -------------------------------------------------------------------


def _owners() -> dict[int, int]:
    """Return whose every move is: its number -> the tenant's id."""
    return dict(TenantMigration.objects.values_list("pk", "tenant_id"))


def _everybody(
    stores: Stores, owners: Mapping[int, int], *, tenant: Tenant | None = None
) -> Iterator[tuple[Tenant, Says]]:
    """Yield the placed tenants, or one, with what the database says of each."""
    moves = TenantMigration.objects.exclude(phase__in=ENDED)
    if tenant is not None:
        moves = moves.filter(tenant=tenant)
    # A move of the cell alone guards no store, so stores say nothing of it.
    guards = moves.exclude(mode=Mode.CELL).select_related("source_store", "target_store")
    live = {move.tenant_id: move for move in guards}
    ended: dict[int, set[int]] = defaultdict(set)
    for pk, owner in owners.items():
        ended[owner].add(pk)
    found = Tenant.objects.select_related(
        "placement__cell", "placement__store", "placement__split_cell", "placement__split_store"
    )
    found = found.exclude(placement=None).order_by("slug")
    for one in found.filter(pk=tenant.pk) if tenant is not None else found:
        move = live.get(one.pk)
        own = ended[one.pk]
        named = {row.move for row in stores.rows.get(one.app_name, {}).values()}
        yield (
            one,
            Says(
                store=one.placement.store.key,
                far=None if (far := one.placement.split_store) is None else far.key,
                move=None if move is None else _live(move),
                ended=own - {move.pk} if move is not None else own,
                others={number for number in named if owners.get(number, one.pk) != one.pk},
            ),
        )


def _live(move: TenantMigration) -> LiveMove:
    return LiveMove(
        pk=move.pk,
        phase=Phase(move.phase),
        claim=move.claim,
        guarded=move.guarded,
        source=move.source_store.key,
        target=move.target_store.key,
        splits=move.mode == Mode.SPLIT,
        split=queries.split_live(move),
    )


def _line(
    tenant: Tenant,
    says: Says,
    rows: Mapping[str, GuardRow],
    silent: Collection[str],
    verdict: Verdict,
) -> Line:
    live = f", mv-{says.move.pk} in {says.move.phase.upper()}" if says.move is not None else ""
    sides = {says.store} | ({says.move.source, says.move.target} if says.move else set())
    # Where no store is open, the open one may be among those that are silent.
    unheard = silent if not verdict.homes else set(silent) & sides
    far = f" and {says.far}" if says.far is not None else ""
    words = "; ".join(verdict.differs)
    if verdict.same:
        lost = ", ".join(f"mv-{move}" for move in verdict.lost)
        words = f"the same; {lost} was lost and is kept as ended"
    return Line(
        tenant.slug, f"{tenant.placement.cell}, {says.store}{far}{live}", told(rows, unheard), words
    )


def _choices(verdict: Verdict, stores: Stores) -> str:
    if verdict.homes:
        return f"Name {' or '.join(verdict.homes)}."
    if stores.silent:
        return f"It may live on {', '.join(stores.silent)}: bring that back, then look again."
    return "No store shows where it lives: it can only stay refused."


# --- what becomes of it -----------------------------------------------------------------------


def _refuse(tenant: Tenant, line: Line, verdict: Verdict, *, by: str, now: datetime) -> None:
    """List the tenant and let no turn of it in. One transaction, to be repeated at will."""
    with transaction.atomic():
        RestoreFinding.objects.update_or_create(
            tenant=tenant,
            resolved_at=None,
            defaults={
                "found_at": now,
                "says": line.says,
                "told": line.told,
                "differs": line.verdict,
                "homes": list(verdict.homes),
                "opens": verdict.opens,
            },
        )
        for cell, accepts in _accepting(tenant).items():
            tenants.publish(tenant, cell, accepts="none")
            tenants.audit(
                who=by,
                verb="restored.refuse",
                subject=f"tenant {tenant}",
                reason=line.verdict,
                before={"cell": cell.slug, "accepts": accepts},
                after={"cell": cell.slug, "accepts": "none"},
                now=now,
            )


def _let_in(tenant: Tenant, *, by: str, now: datetime) -> None:
    """Undo what an earlier comparison did to a tenant that is right by now."""
    with transaction.atomic():
        findings = RestoreFinding.objects.select_for_update().filter(tenant=tenant)
        for finding in findings.filter(resolved_at=None):
            _resolve(finding, "The same by now", by=by, reason="", now=now)
        open_ones = _accepting(tenant)
        for cell, accepts in _taking(tenant).items():
            if cell in open_ones:
                continue
            tenants.publish(tenant, cell, accepts=accepts)
            tenants.audit(
                who=by,
                verb="restored.let_in",
                subject=f"tenant {tenant}",
                before={"cell": cell.slug, "accepts": "none"},
                after={"cell": cell.slug, "accepts": accepts},
                now=now,
            )


def _accepting(tenant: Tenant) -> dict[Cell, str]:
    """Return the cells that take turns of the tenant, and which."""
    entries = PolicyEntry.objects.filter(tenant=tenant).select_related("cell").order_by("cell")
    closed = (Accepts.NONE, Accepts.MOVED)
    return {entry.cell: entry.accepts for entry in entries.exclude(accepts__in=closed)}


def _taking(tenant: Tenant) -> dict[Cell, Literal["all", "existing", "new"]]:
    """Return the cells that are to take turns of the tenant, and which, by what is known here."""
    placement = tenant.placement
    live = tenant.moves.exclude(phase__in=ENDED).first()
    # A fence that a live move has closed is the move's to open.
    fenced = live is not None and live.fence_closed_at is not None and live.fence_opened_at is None
    if placement.split_cell is not None:
        back = live is not None and live.came_from == Phase.SPLIT
        sides: dict[Cell, Literal["all", "existing", "new"]] = {}
        if not fenced or back:
            sides[placement.cell] = "existing"
        if not fenced or not back:
            sides[placement.split_cell] = "new"
        return sides
    if fenced:
        return {}
    narrowed = live is not None and live.phase == Phase.SPLIT and live.split_version is not None
    return {placement.cell: "existing" if narrowed else "all"}


def _join(
    finding: RestoreFinding,
    split: Split,
    verdict: Verdict,
    rows: Mapping[str, GuardRow],
    *,
    home: Store,
    cell: Cell | None,
    by: str,
    reason: str,
    now: datetime,
) -> int:
    """Let the move of a split go on from there, so that `home` gets all of the tenant.

    Whatever it had done is done again: no store is touched here, and both sides stay refused until
    it has opened them. What was copied after the backup is not on its list, and copied anew.
    """
    tenant = finding.tenant
    placement = Placement.objects.select_related("cell", "store").get(tenant=tenant)
    target = Store.objects.get(key=split.target)
    known = tenant.moves.filter(pk=split.move).first()
    far = known.target_cell if known is not None else placement.split_cell or cell
    if far is None or far == placement.cell:
        raise CellUnknown(
            f"The move that split {tenant} was lost, and with it which cell serves its new"
            f" sessions on {target}. Name that cell."
        )
    if far.region_id != target.region_id:
        raise CellUnknown(f"{far} is not in {target.region}, where {target} is. Name another cell.")
    move = known or TenantMigration(
        pk=split.move,
        tenant=tenant,
        source_cell=placement.cell,
        source_store=placement.store,
        target_cell=far,
        target_store=target,
        started_at=now,
        started_by=by,
        reason="Lost with the database that was restored; its guard rows tell of a split",
        guarded=True,
    )
    if known is None:
        move.artifacts_apart = artifacts.told_apart(move)
    with transaction.atomic():
        locked = _lock_open(finding)
        words = f"Settled after a restore: {reason}"
        for other in tenant.moves.select_for_update().exclude(phase__in=ENDED):
            if other.pk != split.move:
                _end(other, None, None, by=by, reason=reason, now=now)
        if placement.split_cell is None:
            tenants.publish(tenant, placement.cell, accepts="existing")
            tenants.split(tenant, cell=far, store=target, by=by, reason=words, now=now)
        version = Placement.objects.get(tenant=tenant).placement_version
        closed = {
            side: tenants.publish(tenant, side, accepts="none") for side in (placement.cell, far)
        }
        was = move.phase
        _back_to_split(move, rows, home, version, closed, by=by, reason=reason, now=now)
        note = f"Goes on from the split after a restore: {reason}"
        move.events.create(at=now, who=by, was=was, now=move.phase, note=note)
        channels.list_channels(move)
        lost = [number for number in verdict.lost if number != split.move]
        _record_lost(tenant, rows, lost, home=placement, by=by, now=now)
        outcome = f"{move} goes on and brings all of it to {home}"
        _resolve(locked, outcome, by=by, reason=reason, now=now)
        tenants.audit(
            who=by,
            verb="restored.settle",
            subject=f"tenant {tenant}",
            reason=reason,
            before={"store": placement.store.key, "move": was if known is not None else None},
            after={"store": home.key, "move": str(move), "placement_version": version},
            now=now,
        )
    return version


def _back_to_split(
    move: TenantMigration,
    rows: Mapping[str, GuardRow],
    home: Store,
    version: int,
    closed: Mapping[Cell, int],
    *,
    by: str,
    reason: str,
    now: datetime,
) -> None:
    """Save the move as one that comes back to its split from a fence, on both sides of which
    nobody is served: its next step opens both stores, then both cells."""
    claim = max(move.claim, *(row.claim for row in rows.values() if row.move == move.pk))
    move.mode, move.phase, move.phase_since = Mode.SPLIT, Phase.SPLIT, now
    move.due_at, move.ended_at = now, None
    move.claim = move.settled = claim
    move.version += 1
    move.failures, move.failure, move.waiting_for = 0, "", ""
    move.stage = move.cursor_user = move.cursor_session = ""
    move.split_version, move.split_at = closed[move.source_cell], now
    move.split_placement_version = move.split_placement_version or version
    move.placement_version = move.back_placement_version = None
    move.came_from = Phase.SPLIT
    move.fence_version, move.fence_closed_at = closed[move.target_cell], now
    move.fence_opened_at = move.deadline_at = move.drained_at = move.store_closed_at = None
    move.pause_requested_at = move.leave_requested_at = None
    # As a way back that somebody stops, or that is tried again: see the step.
    stopped = home == move.target_store
    move.abort_requested_at, move.abort_requested_by, move.abort_reason = None, "", ""
    if stopped:
        move.abort_requested_at, move.abort_requested_by = now, by
        move.abort_reason = reason
    move.rollback_requested_at = None if stopped else now
    move.rollback_requested_by, move.rollback_reason = by, reason
    move.save()


def _record_lost(
    tenant: Tenant,
    rows: Mapping[str, GuardRow],
    lost: Collection[int],
    *,
    home: Placement,
    by: str,
    now: datetime,
) -> None:
    """Keep moves that only guard rows tell of as ended ones, in the caller's transaction.

    A guard row names them. As long as they are unknown here, no later move of the tenant may take
    that row, nor clear what stands behind it.
    """
    stores = {store.key: store for store in Store.objects.filter(key__in=rows)}
    for number in lost:
        beside = [key for key, row in rows.items() if row.move == number and key != home.store.key]
        other = stores[beside[0]] if beside else home.store
        # Where the database had the tenant, the move began.
        onto = tenant.placement.store != home.store
        source, target = (other, home.store) if onto else (home.store, other)
        words = "Lost with the database that was restored; its guard rows still name it"
        move = TenantMigration.objects.create(
            pk=number,
            tenant=tenant,
            phase=Phase.DONE if onto else Phase.ABORTED,
            source_cell=tenant.placement.cell,
            source_store=source,
            target_cell=home.cell,
            target_store=target,
            started_at=now,
            started_by=by,
            reason=words,
            phase_since=now,
            due_at=None,
            ended_at=now,
            guarded=True,
            **_as_asked(by, words, now),
        )
        move.events.create(at=now, who=by, was=move.phase, now=move.phase, note=words)


def _end(
    live: TenantMigration,
    home: Store | None,
    version: int | None,
    *,
    by: str,
    reason: str,
    now: datetime,
) -> None:
    """End a move that knows less than the stores. Both are left as they are.

    Its claim rises: whoever still works on it settles nothing.
    """
    onto = home is not None and home == live.target_store
    to = Phase.DONE if onto else Phase.ABORTED
    changes: dict[str, object] = {
        "phase": to,
        "phase_since": now,
        "due_at": None,
        "ended_at": now,
        "claim": F("claim") + 1,
        "settled": F("claim") + 1,
        "version": F("version") + 1,
        "failures": 0,
        "failure": "",
        "waiting_for": "",
        "pause_requested_at": None,
        **_as_asked(by, reason, now),
    }
    if live.fence_closed_at is not None and live.fence_opened_at is None and home is not None:
        changes["fence_opened_at"] = now
    if onto and live.placement_version is None:
        changes["placement_version"] = version
    TenantMigration.objects.filter(pk=live.pk).update(**changes)
    note = f"Left as it is after a restore: {reason}"
    live.events.create(at=now, who=by, was=live.phase, now=to, note=note)


def _as_asked(by: str, reason: str, now: datetime) -> dict[str, object]:
    """Return the columns by which pages say that a person ended it, not the move by itself."""
    return {"abort_requested_at": now, "abort_requested_by": by, "abort_reason": reason}


def own_move(
    tenant: Tenant, home: Store, cell: Cell, *, by: str, words: str, now: datetime
) -> TenantMigration:
    """Make a move of its own for guard rows, which it leaves open at `home`; one transaction.

    Known and ended before it stands in a store: a row that nobody knows would block moves. Its
    number is above every row's, so the rows rise and nobody who held them before writes any more.
    """
    placement = tenant.placement
    with transaction.atomic():
        move = TenantMigration.objects.create(
            tenant=tenant,
            phase=Phase.ABORTED,
            source_cell=cell,
            source_store=home,
            target_cell=placement.cell,
            target_store=placement.store,
            started_at=now,
            started_by=by,
            reason=words,
            phase_since=now,
            due_at=None,
            ended_at=now,
            guarded=True,
            claim=1,
            settled=1,
            **_as_asked(by, words, now),
        )
        move.events.create(at=now, who=by, was=move.phase, now=move.phase, note=words)
    return move


def leave_open(
    move: TenantMigration, home: Store, rows: Mapping[str, GuardRow], keys: Collection[str]
) -> None:
    """Leave exactly one of these stores open to agents: `home`, under the number of `own_move`.

    First the others close, then the home opens: whatever dies in between, no two are open, and
    doing it again goes on from there.
    """
    with ExitStack() as stack:
        opened: dict[str, SessionStore] = {}
        for store in Store.objects.filter(key__in=keys):
            opened[store.key] = stack.enter_context(
                ports.open_store(
                    store.kind,
                    store.address_from,
                    app_name=move.tenant.app_name,
                    move=move.pk,
                    claim=move.claim,
                )
            )
        for key, port in opened.items():
            if key == home.key:
                continue
            if key not in rows:
                port.provision()
            port.adopt(_found(rows, key), mover=False, agents=False)
        if home.key in opened:
            opened[home.key].adopt(_found(rows, home.key), mover=False, agents=True)


def _found(rows: Mapping[str, GuardRow], key: str) -> Guard | None:
    return Guard(*rows[key]) if key in rows else None


def _cell_at(home: Store, tenant: Tenant, says: Says, given: Cell | None) -> Cell:
    """Return the cell that serves the tenant from `home`. Raises CellUnknown."""
    live = tenant.moves.exclude(phase__in=ENDED).first()
    cell = given
    if cell is None and home.key == says.store:
        cell = tenant.placement.cell
    elif cell is None and live is not None:
        sides = {live.source_store_id: live.source_cell, live.target_store_id: live.target_cell}
        cell = sides.get(home.pk)
    if cell is None:
        raise CellUnknown(
            f"The move that brought {tenant} to {home} was lost, and with it which cell serves it"
            " there. Name the cell."
        )
    if cell.region_id != home.region_id:
        raise CellUnknown(f"{cell} is not in {home.region}, where {home} is. Name another cell.")
    return cell


def _require_stopped(now: datetime) -> None:
    if tenants_queries.halt() is None:
        raise tenants.MachinesRun(
            "The machines run. Stop them with `manage.py restored`, which compares anew."
        )
    if busy := list(at_work().filter(due_at__gt=now)):
        raise StillAtWork(
            f"A step of {', '.join(map(str, busy[:5]))} that began before the machines were stopped"
            " is not over. Try again in half a minute."
        )


def _require_open(finding: RestoreFinding) -> None:
    if finding.resolved_at is not None:
        raise AlreadySettled(
            f"{finding.tenant} was settled by {finding.resolved_by} already: {finding.outcome}."
        )


def _lock_open(finding: RestoreFinding) -> RestoreFinding:
    rows = RestoreFinding.objects.select_for_update(of=("self",)).select_related("tenant")
    row = rows.get(pk=finding.pk)
    _require_open(row)
    return row


def _resolve(locked: RestoreFinding, outcome: str, *, by: str, reason: str, now: datetime) -> None:
    locked.resolved_at, locked.resolved_by = now, by
    locked.reason, locked.outcome = reason, outcome
    locked.save(update_fields=["resolved_at", "resolved_by", "reason", "outcome"])


def _raise_numbers(seen: int, *, skip: int) -> int:
    """Let moves be numbered above `seen` and all that we have, plus `skip`; return that number.

    A new move with the number of a lost one would take that one's guard row for its own, and
    clear, close or open what stands behind it.
    """
    table = TenantMigration._meta.db_table
    highest = TenantMigration.objects.aggregate(highest=Max("pk"))["highest"] or 0
    with transaction.atomic(), connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            cursor.execute("SELECT max(seq) FROM sqlite_sequence WHERE name = %s", [table])
            number = max(seen, highest, int(cursor.fetchone()[0] or 0)) + skip
            cursor.execute("DELETE FROM sqlite_sequence WHERE name = %s", [table])
            values = [table, number]
            cursor.execute("INSERT INTO sqlite_sequence (name, seq) VALUES (%s, %s)", values)
            return number
        cursor.execute("SELECT pg_get_serial_sequence(%s, 'id')", [table])
        [sequence] = cursor.fetchone()
        # The name is the server's own, quoted as it has to be.
        cursor.execute(f"SELECT last_value FROM {sequence}")
        number = max(seen, highest, int(cursor.fetchone()[0])) + skip
        cursor.execute("SELECT setval(%s, %s)", [sequence, number])
    return number
