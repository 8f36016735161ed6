"""What a move would do, told phase by phase with real counts. Writes nothing, anywhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Q

from migrations_app import ports, queries, rehearsing
from migrations_app.domain import throttle
from migrations_app.domain.channels import StepBy
from migrations_app.domain.phases import ENDED, Mode, Phase
from migrations_app.domain.quote import ASSUMED_RATE, Quote, quote
from migrations_app.models import TenantMigration
from migrations_app.ports.base import Survey
from migrations_app.preflight import ARTIFACTS, MEMORY, Preflight, preflight
from migrations_app.services import (
    InvalidOption,
    SamePlace,
    check_copies,
    check_idle,
    check_pace,
    check_pause,
    check_times,
    mode_of,
)
from tenants import queries as tenants_queries
from tenants.domain.words import clock, counted, duration, limit, rate
from tenants.models import Cell, Counter, RuntimeInstance, Store, Tenant


@dataclass(frozen=True)
class Line:
    """One phase, and what it would do, in sentences."""

    phase: str
    text: str


@dataclass(frozen=True)
class DryRun:
    """A move that was only told. Times are the database's; rates are sessions per second."""

    checks: Preflight | None
    # Why it would not start; nothing below is told then.
    refusals: tuple[str, ...]
    lines: tuple[Line, ...] = ()
    # The way back out of each moment: abort before TARGET, roll back after it.
    ways_back: tuple[Line, ...] = ()
    # At what rate it copies, and where that figure comes from.
    per_second: float | None = None
    measured: str = ""
    # When the first pass would be through. NULL: it would not start, or copies nothing.
    through_at: datetime | None = None
    # How much later than a chosen finish time that is; 0 where it is kept, or none was chosen.
    late_seconds: float = 0.0
    fence: Quote | None = None
    # Whether only the cell would change: nothing is copied, so nothing above has a rate or an end.
    of_cell: bool = False


@dataclass(frozen=True)
class _Rates:
    """Measured by an earlier move, or by a rehearsal; None where nothing was."""

    words: str
    copy: float | None = None
    verify: float | None = None
    shared: float | None = None
    # Seconds of one look at every stamp, and of one mark, for each session.
    scan: float = 0.0
    # Sessions that changed between an earlier move's last pass and its fence. None: no such move.
    changed: int | None = None

    @property
    def backfill(self) -> float:
        """Sessions per second of BACKFILL, which copies and compares."""
        if self.copy is None:
            return ASSUMED_RATE
        return 1 / (1 / self.copy + (1 / self.verify if self.verify else 0.0))


@dataclass(frozen=True)
class _Plan:
    """Everything that the narration is made of."""

    # Never saved: it holds what was chosen.
    move: TenantMigration
    now: datetime
    found: Preflight
    source: Survey
    rates: _Rates
    per_second: float
    # Which pace was chosen, in words; "" where none was.
    paced: str
    late_seconds: float
    fence: Quote

    @property
    def seconds(self) -> float:
        if self.of_cell:
            return 0.0
        return throttle.backfill_seconds(self.source.sessions, self.per_second)

    @property
    def through_at(self) -> datetime:
        return self.now + timedelta(seconds=self.seconds)

    @property
    def fence_at(self) -> datetime | None:
        """When the fence would close; None: when somebody says so."""
        if not self.move.automatic:
            return None
        return max(self.through_at, self.move.fence_not_before or self.through_at)

    @property
    def proves(self) -> bool:
        """Whether equal stamps would prove unchanged sessions, as the move itself decides it."""
        return _proves(self.found)

    @property
    def splits(self) -> bool:
        return self.move.mode == Mode.SPLIT

    @property
    def of_cell(self) -> bool:
        return self.move.mode == Mode.CELL

    def said(self, name: str) -> str:
        """Return what the check of this name found; "" where nobody asked."""
        return next((check.detail for check in self.found.checks if check.name == name), "")

    @property
    def held(self) -> str:
        return self.source.held


def dry_run(
    tenant: Tenant,
    *,
    target_cell: Cell,
    target_store: Store,
    now: datetime,
    rows_per_second: float | None = None,
    **options: Any,
) -> DryRun:
    """Tell what `services.start` with these options would lead to, and what it would refuse.

    Looks at both stores, at what instances said and at what earlier moves measured; takes
    seconds. `rows_per_second` is as in `paced`. Raises InvalidOption as starting would.
    """
    home = tenant.placement
    move = TenantMigration(
        tenant=tenant,
        source_cell=home.cell,
        source_store=home.store,
        target_cell=target_cell,
        target_store=target_store,
        **options,
    )
    check_times(move.budget_seconds, move.drain_bound_seconds, move.soak_seconds)
    check_pace(move.pace_per_second, move.finish_by, now)
    check_idle(move.idle_seconds, move.idle_bound_seconds)
    check_rows(rows_per_second, move.pace_per_second, move.finish_by)
    try:
        move.mode = mode_of(home, target_cell, target_store, Mode(move.mode))
    except SamePlace as refusal:
        return DryRun(None, (str(refusal),))
    check_pause(move.pause_before, Mode(move.mode))
    check_copies(Mode(move.mode), flip_by_hand=move.flip_by_hand)
    found = preflight(
        tenant,
        source_cell=home.cell,
        source_store=home.store,
        target_cell=target_cell,
        target_store=target_store,
        now=now,
    )
    refusals = list(found.refusals)
    if live := tenant.moves.exclude(phase__in=ENDED).first():
        refusals.insert(0, f"{tenant} is moving already: {live} is in {live.phase.upper()}.")
    if found.source is None or found.target is None:
        return DryRun(found, tuple(refusals))
    plan = _planned(move, found, found.source, found.target, rows_per_second, now)
    return DryRun(
        checks=found,
        refusals=tuple(refusals),
        lines=tuple(Line(phase.upper(), text) for phase, text in _narrated(plan)),
        ways_back=tuple(_ways_back(plan)),
        fence=plan.fence,
        of_cell=plan.of_cell,
        **({} if plan.of_cell else _copy_of(plan)),
    )


def _copy_of(plan: _Plan) -> dict[str, Any]:
    """Return what is told of the copy alone."""
    return {
        "per_second": plan.per_second,
        "measured": plan.rates.words,
        "through_at": plan.through_at,
        "late_seconds": plan.late_seconds,
    }


def _planned(
    move: TenantMigration,
    found: Preflight,
    source: Survey,
    target: Survey,
    rows_per_second: float | None,
    now: datetime,
) -> _Plan:
    rates = _measured(move, found, (source, target), now)
    budgeted = _of_budget(rows_per_second, source)
    wanted = move.pace_per_second or budgeted
    paced = f"the pace of {rate(wanted)}" if wanted else ""
    if budgeted and rows_per_second:
        paced += f" that {rows_per_second:,.0f} rows/s allow"
    per_second, late = min(wanted or rates.backfill, rates.backfill), 0.0
    if move.finish_by is not None:
        window = (move.finish_by - now).total_seconds()
        late = throttle.late_seconds(source.sessions, rates.backfill, window)
        if not late and source.sessions:
            per_second = throttle.spread(source.sessions, window)
            paced = f"spread until {clock(move.finish_by, now)}"
    return _Plan(
        move=move,
        now=now,
        found=found,
        source=source,
        rates=rates,
        per_second=per_second,
        paced=paced,
        late_seconds=late,
        fence=_fence(move, found, source, rates, now),
    )


def paced(
    tenant: Tenant,
    *,
    rows_per_second: float | None = None,
    pace_per_second: float | None = None,
    finish_by: datetime | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return the options of `services.start`, with the pace that a write budget allows.

    `rows_per_second` is what the target may be asked to write. Looks at the source for how many
    events a session has. Raises InvalidOption, or what the store says.
    """
    check_rows(rows_per_second, pace_per_second, finish_by)
    if rows_per_second is not None:
        store = tenant.placement.store
        with ports.open_store(store.kind, store.address_from, app_name=tenant.app_name) as port:
            pace_per_second = _of_budget(rows_per_second, port.survey())
    return {**options, "pace_per_second": pace_per_second, "finish_by": finish_by}


def check_rows(
    rows_per_second: float | None, pace_per_second: float | None, finish_by: datetime | None
) -> None:
    """Raise InvalidOption unless the write budget (rows/s) makes sense beside the other two."""
    if rows_per_second is None:
        return
    if pace_per_second is not None or finish_by is not None:
        raise InvalidOption(
            "A write budget, a pace and a finish time: choose one, the others follow from it."
        )
    if not 1 <= rows_per_second <= 10_000_000:
        raise InvalidOption(f"A budget of {rows_per_second:g} rows/s: choose 1 to 10,000,000.")


def _of_budget(rows_per_second: float | None, source: Survey) -> float | None:
    if rows_per_second is None or not source.sessions:
        return None
    each = 1 + source.events / source.sessions
    return max(0.01, throttle.pace_from_budget(rows_per_second, each))


def _measured(
    move: TenantMigration, found: Preflight, surveys: tuple[Survey, Survey], now: datetime
) -> _Rates:
    """Return what the tenant's own latest rehearsal, or move, between these stores measured.

    Else what the latest earlier move of another tenant did, between the same two stores first.
    """
    source, target = move.source_store, move.target_store
    earlier = (
        TenantMigration.objects.filter(copy_rate__isnull=False)
        .select_related("source_store", "target_store")
        .order_by("-id")
    )
    these = Q(source_store=source, target_store=target)
    kinds = Q(
        source_store__kind=source.kind,
        source_store__survey__dialect=surveys[0].dialect,
        target_store__kind=target.kind,
        target_store__survey__dialect=surveys[1].dialect,
    )
    last, where = earlier.filter(these).first(), "between these stores"
    if last is None:
        last, where = earlier.filter(kinds).first(), "between other stores of these kinds"
    mine = move.tenant.moves.filter(changed_at_drain__isnull=False).order_by("-id").first()
    changed = mine.changed_at_drain if mine else None
    if own := rehearsing.known(move.tenant, source, target, now=now):
        # As the move itself will reckon, once it begins with these.
        begun = TenantMigration(stamps_prove=_proves(found), **own.columns)
        return _Rates(
            own.words,
            copy=own.copy_rate,
            verify=own.verify_rate,
            shared=own.shared_rate,
            scan=queries.reading_seconds(begun) / max(1, surveys[0].sessions),
            changed=changed,
        )
    if last is None:
        return _Rates("assumed: no move between such stores was measured yet", changed=changed)
    looks = queries.reading_seconds(last)
    return _Rates(
        f"measured by {last} {where}",
        copy=last.copy_rate,
        verify=last.verify_rate,
        shared=last.shared_rate,
        scan=looks / max(1, last.sessions),
        changed=changed,
    )


def _proves(found: Preflight) -> bool:
    return all(side and side.stamps_see_edits for side in (found.source, found.target))


def _fence(
    move: TenantMigration, found: Preflight, source: Survey, rates: _Rates, now: datetime
) -> Quote:
    stays = move.mode == Mode.CELL
    changed = 0 if stays else min(rates.changed or 0, source.sessions)
    return quote(
        changed=changed,
        compare=changed if stays or _proves(found) else source.sessions,
        users=0 if stays else source.users,
        running_seconds=tenants_queries.time_left_seconds(move.source_cell, move.tenant, now=now),
        drain_bound_seconds=move.drain_bound_seconds,
        copy_rate=rates.copy,
        verify_rate=rates.verify,
        shared_rate=rates.shared,
        scan_seconds=0.0 if stays else rates.scan * source.sessions,
    )


def _narrated(plan: _Plan) -> Iterator[tuple[Phase, str]]:
    if plan.of_cell:
        yield Phase.PREPARE, _announced(plan)
        yield Phase.DRAIN, _drain(plan)
        yield Phase.TARGET, _target(plan)
        yield Phase.SOAK, _soak_of_cell(plan)
        return
    yield Phase.PREPARE, _prepare(plan)
    yield Phase.BACKFILL, f"{_backfill(plan)}{_beside(plan)}"
    if plan.splits:
        yield Phase.SPLIT, _split(plan)
    yield Phase.DRAIN, _drain(plan)
    yield Phase.DELTA, _delta(plan)
    yield Phase.VERIFY, _verify(plan)
    yield Phase.TARGET, _target(plan)
    yield Phase.SOAK, _soak(plan)
    yield Phase.OFFBOARD, _offboard(plan)


def _prepare(plan: _Plan) -> str:
    move = plan.move
    checks = plan.found.checks
    green, red = (sum(check.ok is state for check in checks) for state in (True, False))
    text = (
        f"{counted(green, 'check')} green now, {red or 'none'} red. Then both are looked at again,"
        f" tables are made on {move.target_store} where they lack, a guard row and closing triggers"
        " on both."
    )
    if plan.source.interrupted:
        text += (
            f" {counted(plan.source.interrupted, 'interrupted turn')} would be kept as they are."
        )
    if move.source_cell != move.target_cell:
        text += (
            f" Instances of {move.target_cell} are told of {move.tenant} and refuse its turns: its"
            " runner, its limits and its store are there before the first one."
        )
    return text


def _announced(plan: _Plan) -> str:
    move = plan.move
    return (
        f"Nothing is copied: {plan.held} stay on {move.source_store}, which stays open. Instances"
        f" of {move.target_cell} are told of {move.tenant} and refuse its turns: its runner, its"
        " limits and its store are there before the first one."
    )


def _soak_of_cell(plan: _Plan) -> str:
    return (
        f"For {limit(plan.move.soak_seconds)} {plan.move.tenant} can be sent back to"
        f" {plan.move.source_cell} by one more fence. Nothing is deleted afterwards."
    )


def _backfill(plan: _Plan) -> str:
    move = plan.move
    text = (
        f"{plan.held}, at {rate(plan.per_second)} through at {clock(plan.through_at, plan.now)} UTC"
        f" ({duration(plan.seconds)})."
    )
    if plan.paced:
        text += f" That is {plan.paced}; as fast as both stores allow it would be"
        text += f" {rate(plan.rates.backfill)}, {plan.rates.words}."
    else:
        text += f" The rate is {plan.rates.words}."
    if plan.late_seconds:
        text += (
            f" The finish time would be missed by {duration(plan.late_seconds)}: choose a later"
            " one, or none."
        )
    return f"{text} {move.tenant} is served all the while; what changes meanwhile is copied again."


def _beside(plan: _Plan) -> str:
    """Return what goes over beside the sessions, as far as it was looked at."""
    text = ""
    if held := plan.said(ARTIFACTS):
        text += f" Artifacts: {held}."
        if plan.move.source_store.artifacts_from and plan.move.target_store.artifacts_from:
            text += " Versions go over in their order; which number became which is kept."
    if memory := plan.said(MEMORY):
        text += f" Memory: {memory}."
    channels = list(queries.channels_of(plan.move.tenant))
    if not channels:
        return f"{text} No side channel is registered: what else is kept by tenant stays behind."
    listed = ", ".join(
        f"{channel} ({'required' if channel.required else 'optional'}, {_done_by(channel.copy_by)})"
        for channel in channels
    )
    text += f" Side channels: {listed}."
    if any(channel.required for channel in channels):
        text += " The fence waits until every required one is copied."
    return text


def _done_by(by: str) -> str:
    return "by a person" if by == StepBy.PERSON else f"by a {by}"


def _split(plan: _Plan) -> str:
    move, version = plan.move, Counter.objects.get().placement_version + 1
    begins = "By itself" if move.automatic else "When somebody says so"
    if move.fence_not_before is not None:
        begins += f", after {clock(move.fence_not_before, plan.now)} UTC"
    users = counted(plan.source.users, "user")
    return (
        f"{begins}, {move.source_cell} takes only sessions that {move.source_store} has. New ones"
        " get retry-after until turns that ran before have ended,"
        f" {limit(move.drain_bound_seconds)} at most; shared state of {users} goes over, as the"
        f" base of a merge. Then placement version {version} names both sides: known sessions are"
        f" served on {move.source_store}, in"
        f" {move.source_cell}, new ones begin on {move.target_store}, in {move.target_cell}. A"
        f" delete of a known session waits for TARGET. The source is waited for until none of its"
        f" sessions has changed for {limit(move.idle_seconds)}, {limit(move.idle_bound_seconds)} at"
        " most."
    )


def _drain(plan: _Plan) -> str:
    move = plan.move
    live = tenants_queries.live_instances(move.source_cell, now=plan.now)
    text = _drained(plan, live)
    if plan.splits:
        text += f" {move.target_store} goes on serving what was born there."
    return text


def _drained(plan: _Plan, live: Sequence[RuntimeInstance]) -> str:
    move = plan.move
    if plan.splits:
        when = "Once the source is idle, or has been waited for long enough,"
    elif plan.fence_at is not None:
        when = f"At {clock(plan.fence_at, plan.now)} UTC at the earliest, once its quote fits,"
    elif move.fence_not_before is not None:
        when = f"When somebody says so, after {clock(move.fence_not_before, plan.now)} UTC,"
    else:
        when = "When somebody says so,"
    if not live:
        told = (
            f"the fence closes. No instance of {move.source_cell} is alive: nobody is waited for."
        )
        return f"{when} {told}"
    longest = max(row.longest_turn_seconds for row in live)
    bound = move.drain_bound_seconds
    text = (
        f"{when} {counted(len(live), 'instance')} of {move.source_cell} would be told to answer new"
        f" turns with retry-after. Running turns get up to {limit(bound)}; the longest turn stated"
        f" is {limit(longest)}."
    )
    if longest > bound:
        text += " A turn that runs longer than the bound opens the fence again: nothing is cut."
    return text


def _delta(plan: _Plan) -> str:
    move = plan.move
    changed = plan.rates.changed
    copying = plan.rates.copy or ASSUMED_RATE
    each = _each(copying)
    if changed is None:
        text = f"What changed since its copy goes over: {each}."
    else:
        text = (
            f"What changed since its copy goes over: {counted(changed, 'session')} in the last move"
            f" of {move.tenant}, {duration(changed / copying)}; {each}."
        )
    shared = plan.source.users / (plan.rates.shared or ASSUMED_RATE)
    users = counted(plan.source.users, "user")
    how = "key by key, the newer change wins" if plan.splits else "by value"
    text = f"{text} Shared state of {users} {how}, {duration(shared)}."
    if plan.said(ARTIFACTS) or plan.said(MEMORY):
        text += " Artifacts and memory of what changed follow."
    return text


def _verify(plan: _Plan) -> str:
    move = plan.move
    held = counted(plan.source.sessions, "session")
    if plan.proves:
        text = (
            f"{held} must be equal: those that did not change since they were compared are proven"
            " by their stamps, the others are compared again."
        )
    else:
        seconds = plan.source.sessions / (plan.rates.verify or ASSUMED_RATE)
        text = (
            f"{held} are compared, every one, {duration(seconds)}: on SQLite a stamp doesn’t show"
            " an edit in place."
        )
    if plan.said(ARTIFACTS):
        text += " So must every version of an artifact, and their number per user."
    if any(channel.required for channel in queries.channels_of(move.tenant)):
        text += " TARGET waits until every required side channel is green."
    waits = " Then it waits for somebody to flip; the deadline holds." if move.flip_by_hand else ""
    return f"{text} One that differs blocks the flip.{waits}"


def _target(plan: _Plan) -> str:
    move = plan.move
    version = Counter.objects.get().placement_version + (2 if plan.splits else 1)
    quoted = plan.fence
    text = (
        f"Placement version {version}: {'all of ' if plan.splits else ''}{move.tenant} on"
        f" {move.target_cell}, {move.target_store}."
        f" The fence: {duration(quoted.expected)} expected, {duration(quoted.worst)} at worst,"
        f" budget {limit(move.budget_seconds)}."
    )
    if quoted.worst > move.budget_seconds:
        text += " That is over the budget: as it stands the fence would not close."
    return text


def _soak(plan: _Plan) -> str:
    move = plan.move
    if plan.fence_at is None:
        until = f"For {limit(move.soak_seconds)} from then"
    else:
        flips = plan.fence_at + timedelta(seconds=plan.fence.expected)
        ends = clock(flips + timedelta(seconds=move.soak_seconds), plan.now)
        until = f"Until {ends} UTC ({limit(move.soak_seconds)})"
    return f"{until} {move.source_store} stays closed and whole: {move.tenant} can be rolled back."


def _offboard(plan: _Plan) -> str:
    move = plan.move
    gone = f"deletes {plan.held} on {move.source_store}, each only if it is still what was copied"
    if move.source_store.memory_from and move.target_store.memory_from and plan.said(MEMORY):
        gone += ", and what its memory has of them, if it is a place of its own"
    if move.offboard_automatically:
        return f"When the soak ends it {gone}. Nobody is asked."
    return f"Waits for the typed confirmation “{move.tenant.slug}”, then {gone}."


def _ways_back(plan: _Plan) -> Iterator[Line]:
    move = plan.move
    if plan.of_cell:
        yield Line("Abort", f"Until TARGET, at any moment: {move.source_cell} serves it again.")
        back = f"Until the soak ends: a fence closes on {move.target_cell}, then"
        yield Line("Roll back", f"{back} {move.tenant} lives in {move.source_cell} again.")
        return
    if plan.splits:
        yield Line(
            "Abort",
            f"Until the target takes new sessions: what was copied is removed from"
            f" {move.target_store}, nothing else. From SPLIT until TARGET: what was born on"
            f" {move.target_store} is carried back to {move.source_store} inside a fence on"
            f" {move.target_cell}, shared state is merged, and {move.source_store} serves all.",
        )
    else:
        yield Line(
            "Abort",
            f"Until TARGET, at any moment: {move.source_store} opens again, and what was copied is"
            f" removed from {move.target_store}.",
        )
    each = _each(plan.rates.copy or ASSUMED_RATE)
    yield Line(
        "Roll back",
        f"Until the soak ends: a fence closes on {move.target_cell}, every session touched since"
        f" goes back to {move.source_store} ({each}), deletes too, all is compared,"
        f" and {move.tenant} lives on {move.source_cell}, {move.source_store} again.",
    )


def _each(per_second: float) -> str:
    some = throttle.some(per_second)
    return f"each {some:,} take {duration(throttle.backfill_seconds(some, per_second))}"
