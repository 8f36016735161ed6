"""What can be known about a move before it begins: both stores and both cells, looked at only."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

from django.conf import settings
from django.db.models import Q

from durable.errors import Refused
from migrations_app import ports, queries
from migrations_app.domain.phases import ENDED, Mode, Phase
from migrations_app.models import ArtifactVersion, SideChannel, TenantMigration
from migrations_app.ports import artifacts
from migrations_app.ports.base import START, Finding, StoreRefused, Survey
from migrations_app.ports.channel import Allowed
from migrations_app.ports.channel import check as check_step
from migrations_app.ports.memory import open_memory, where
from tenants import queries as tenants_queries
from tenants.domain.words import clock, counted, duration
from tenants.models import Cell, Store, Tenant

PRACTISED = "Rollback practised"
ARTIFACTS = "Artifacts"
# So long are artifacts' names looked at before a move begins (seconds).
LOOK_SECONDS = 3.0
CHANNELS = "Side channels"
MEMORY = "Memory"


@dataclass(frozen=True)
class Check:
    """One line of the preparation. `ok` None: it is not so, and blocks nothing; advice."""

    name: str
    ok: bool | None
    detail: str


@dataclass(frozen=True)
class Preflight:
    """What can be known without writing anything, about both sides."""

    checks: tuple[Check, ...]
    source: Survey | None
    target: Survey | None
    # Of what is kept beside the sessions.
    further: tuple[Finding, ...] = ()

    @property
    def refusals(self) -> list[str]:
        return [f"{check.name}: {check.detail}" for check in self.checks if check.ok is False]

    @property
    def findings(self) -> list[dict[str, Any]]:
        sides = [survey for survey in (self.source, self.target) if survey is not None]
        named = [finding for survey in sides for finding in survey.findings]
        return [asdict(finding) for finding in (*named, *self.further)]


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

    Of one store only the cells matter: what is in it stays. `move` is the one that asks: what
    stands behind its own guard row is no stranger's.
    """
    if source_store == target_store:
        return _of_cell(tenant, source_store, source_cell, target_cell, now)
    stores = between_stores(tenant, source_store=source_store, target_store=target_store, move=move)
    source, target, checks = stores.source, stores.target, list(stores.checks)
    looked, further = artifact_checks(tenant, source_store, target_store, move=move)
    checks += looked
    checks += _cell_checks(source_cell, target_cell, target_store, now)
    checks += _beside(tenant, source_cell, source_store, target_store, now)
    if source is not None and target is not None:
        checks.append(_practised((source_store, source), (target_store, target), now))
    return Preflight(tuple(checks), source, target, further)


def _of_cell(tenant: Tenant, store: Store, source: Cell, target: Cell, now: datetime) -> Preflight:
    """Look at what a move of the cell alone depends on."""
    checks: list[Check] = []
    survey = _survey(store, tenant, "Store", checks)
    checks += _cell_checks(source, target, store, now)
    detail = (
        f"{store} stays open, for both cells' agents write it: that the old cell has stopped is"
        " shown by its instances' word and their leases alone"
    )
    return Preflight((*checks, Check("Proof", None, detail)), survey, survey)


def between_stores(
    tenant: Tenant,
    *,
    source_store: Store,
    target_store: Store,
    move: TenantMigration | None = None,
) -> Preflight:
    """Look at both stores alone and write nothing: what copying sessions depends on."""
    checks: list[Check] = []
    source = _survey(source_store, tenant, "Source", checks)
    target = _survey(target_store, tenant, "Target", checks)
    if source is not None and target is not None:
        source = _with_values(source, target, source_store, tenant)
        checks += _pair_checks(tenant, source, target, source_store, target_store, move)
    return Preflight(tuple(checks), source, target)


def _practised(source: tuple[Store, Survey], target: tuple[Store, Survey], now: datetime) -> Check:
    """Say whether a rollback between stores of these kinds has been carried out before."""
    went_back = TenantMigration.objects.filter(
        phase=Phase.ROLLED_BACK,
        source_store__kind=source[0].kind,
        source_store__survey__dialect=source[1].dialect,
        target_store__kind=target[0].kind,
        target_store__survey__dialect=target[1].dialect,
    ).select_related("tenant")
    these = went_back.filter(source_store=source[0], target_store=target[0])
    move = these.order_by("-id").first() or went_back.order_by("-id").first()
    if move is None:
        detail = "not yet between such stores: practise one on an internal tenant first"
        return Check(PRACTISED, None, detail)
    # Of a move that went back these two are the way back's.
    closed, opened = move.fence_closed_at, move.fence_opened_at
    took = ""
    if closed is not None and opened is not None:
        took = f", its fence closed for {duration((opened - closed).total_seconds())}"
    return Check(PRACTISED, True, f"{move} of {move.tenant}, {clock(move.ended_at, now)}{took}")


def _survey(store: Store, tenant: Tenant, side: str, checks: list[Check]) -> Survey | None:
    try:
        with ports.open_store(store.kind, store.address_from, app_name=tenant.app_name) as port:
            survey = port.survey()
    except StoreRefused as refusal:
        checks.append(Check(f"{side} {store}", False, str(refusal)))
        return None
    checks.append(Check(f"{side} {store}", True, f"{survey.database}, {survey.held}"))
    return survey


def _with_values(source: Survey, target: Survey, store: Store, tenant: Tenant) -> Survey:
    """Add to the source's findings the values that the target changes or refuses."""
    if not source.schema_version or target.layout is None or ports.strict(source, target):
        return source
    try:
        with ports.open_store(store.kind, store.address_from, app_name=tenant.app_name) as port:
            found = ports.scan(port, target.layout)
    except StoreRefused as refusal:
        found = (Finding("values", f"can't be read: {refusal}", 1, "", True),)
    return replace(source, findings=source.findings + found)


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
        same = f"both {source.kind} on {source.database.split()[0]}"
        replayed = (
            f"{source.layout} to {target.layout}: read and replayed through google-adk's interface"
        )
        other = f"{source.layout} to {target.layout}: rows are converted on the way"
        strict = ports.strict(source, target)
        if ports.by_service(source, target):
            other = replayed
        checks.append(Check("Kinds", True, same if strict else other))
        canonical = "canonical, ids and times included, times to the microsecond"
        if ports.by_service(source, target):
            canonical = "canonical, as google-adk reads it, with what of ids and times both keep"
        checks.append(Check("Fingerprint", True, "strict row digests" if strict else canonical))
    except StoreRefused as refusal:
        checks.append(Check("Kinds", False, str(refusal)))
    room = f"Room on {target_store}"
    leftovers, empty = _held(tenant, target_store, move)
    if empty:
        checks.append(Check(room, True, f"nothing of {tenant.app_name} there"))
    elif leftovers is not None:
        detail = f"{counted(target.sessions, 'session')} left by {leftovers} will be removed first"
        checks.append(Check(room, True, detail))
    else:
        detail = (
            f"it holds {tenant.app_name} already ({counted(target.sessions, 'session')}): an older"
            f" copy, or the same database as {source_store} under a second address. Remove the"
            " copy, or choose another store."
        )
        checks.append(Check(room, False, detail))
    for side, survey in (("Source", source), ("Target", target)):
        blocking = [finding for finding in survey.findings if finding.blocks]
        detail = _named(blocking) or "nothing stands against copying"
        checks.append(Check(f"{side}'s rows and rights", not blocking, detail))
        if survey.layout is not None and survey.layout.is_service:
            detail = (
                f"the {side.lower()} is reached through google-adk, so nothing closes it: its proof"
                " is protocol and lease alone, and every session is compared"
            )
            checks.append(Check(f"{side}'s closing", None, detail))
        elif not survey.can_close:
            detail = f"the {side.lower()} can't be closed to agents with the rights given"
            checks.append(Check(f"{side}'s closing", False, detail))
    if source.layout is not None and source.layout.is_service:
        detail = (
            "users who have state and no session can't be listed by a service: whatever is kept of"
            " such a user stays behind, and is not counted"
        )
        checks.append(Check("Source's quiet users", None, detail))
    if source.interrupted:
        checks.append(Check("Interrupted turns", True, _interrupted(source)))
    return checks


def _interrupted(source: Survey) -> str:
    """List the sessions whose last turn was cut short: they are copied as they are."""
    names = [f"{key.session_id} of {key.user_id}" for key in source.interrupted_keys]
    more = source.interrupted - len(names)
    listed = ", ".join(names) + (f" and {more:,} more" if more else "")
    if source.interrupted == 1:
        return f"1 session ends in one and is copied as it is: {listed}"
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
    checks.append(instance_check(source_cell, target_cell, target_store, now=now))
    there = tenants_queries.live_instances(target_cell, now=now)
    here = tenants_queries.live_instances(source_cell, now=now)
    wanted = {plugin for instance in here for plugin in instance.plugins}
    bare = sorted(i.name for i in there if wanted - set(i.plugins))
    if there:
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


def instance_check(from_cell: Cell, to_cell: Cell, to_store: Store, *, now: datetime) -> Check:
    """Look whether instances would serve the tenant where it goes."""
    there = tenants_queries.live_instances(to_cell, now=now)
    if not there:
        nobody_anywhere = not tenants_queries.live_instances(from_cell, now=now)
        return Check("Instances", nobody_anywhere, f"no instance of {to_cell} is alive")
    blind = sorted(i.name for i in there if to_store.key not in i.stores)
    return Check(
        "Instances",
        not blind,
        f"{', '.join(blind)} could not open {to_store}"
        if blind
        else f"all {len(there)} of {to_cell} opened {to_store}",
    )


def _beside(
    tenant: Tenant, source_cell: Cell, source_store: Store, target_store: Store, now: datetime
) -> list[Check]:
    """Name what is kept beside the sessions, and what of it would be left behind."""
    channels = list(queries.channels_of(tenant))
    memory = _memory_check(source_store, target_store, tenant, channels)
    if memory is None and not any(map(_says_memory, channels)):
        memory = _memory_of_plugins(source_cell, now)
    return [*([memory] if memory is not None else []), _channels_check(tenant, channels)]


def may_call() -> Allowed:
    """Return what steps of side channels may call in this installation."""
    return Allowed(settings.CHANNEL_MODULES, settings.CHANNEL_COMMANDS, settings.CHANNEL_VARIABLES)


def _channels_check(tenant: Tenant, channels: Sequence[SideChannel]) -> Check:
    if not channels:
        detail = (
            f"none is registered for {tenant}: a vector index, a cache or logs that are kept by"
            " tenant would stay behind, and nobody would be told"
        )
        return Check(CHANNELS, None, detail)
    refused = []
    for channel in channels:
        for by, step in (
            (channel.copy_by, channel.copy_step),
            (channel.verify_by, channel.verify_step),
        ):
            try:
                check_step(by, step, may_call())
            except Refused as refusal:
                refused.append(f"{channel}: {refusal}")
    if refused:
        return Check(CHANNELS, False, " ".join(dict.fromkeys(refused)))
    required = sum(channel.required for channel in channels)
    names = ", ".join(channel.name for channel in channels)
    return Check(CHANNELS, True, f"{len(channels):,} listed, {required:,} required: {names}")


def _memory_check(
    source: Store, target: Store, tenant: Tenant, channels: Sequence[SideChannel]
) -> Check | None:
    """Look whether what agents remember goes along; None: neither store names a memory service."""
    if not (source.memory_from or target.memory_from):
        return None
    if not target.memory_from:
        moved = [channel.name for channel in channels if _says_memory(channel)]
        if moved:
            return Check(MEMORY, True, f"goes over as the side channel {', '.join(moved)}")
        detail = (
            f"{source} has a memory service and {target} has none: after the cutover searches"
            f" would find nothing. Name the one of {target}, or register a side channel with"
            ' "memory" in its name.'
        )
        return Check(MEMORY, False, detail)
    try:
        if source.memory_from and where(source.memory_from) == where(target.memory_from):
            return Check(MEMORY, True, "both stores lead to one memory service: it stays")
        with open_memory(target.memory_from, app_name=tenant.app_name):
            return Check(MEMORY, True, f"each session is given to the service of {target}")
    except StoreRefused as refusal:
        return Check(MEMORY, False, str(refusal))


def _memory_of_plugins(cell: Cell, now: datetime) -> Check | None:
    """Say that agents run what sounds like a memory, where nothing else is known of one."""
    instances = tenants_queries.live_instances(cell, now=now)
    plugins = {plugin for instance in instances for plugin in instance.plugins}
    named = sorted(plugin for plugin in plugins if "memory" in plugin.lower())
    if not named:
        return None
    detail = (
        f"instances of {cell} run {', '.join(named)}, but neither store names a memory service and"
        " no side channel is about memory: what agents remember would stay behind"
    )
    return Check(MEMORY, None, detail)


def _says_memory(channel: SideChannel) -> bool:
    return "memory" in channel.name.lower()


def way_back(move: TenantMigration, *, now: datetime) -> list[Check]:
    """Return what stands against rolling `move` back now: nothing, where it may begin.

    Opens both stores and writes nothing. Takes seconds at most.
    """
    # Where only the cell has changed no store was guarded, and none is opened.
    sides = () if move.mode == Mode.CELL else (move.source_store, move.target_store)
    checks = [_guarded(move, store) for store in sides]
    checks.append(instance_check(move.target_cell, move.source_cell, move.source_store, now=now))
    return [check for check in checks if not check.ok]


def _guarded(move: TenantMigration, store: Store) -> Check:
    """Look whether a store answers, whole, under the guard row that this move made there."""
    try:
        with ports.open_store(
            store.kind, store.address_from, app_name=move.tenant.app_name
        ) as port:
            guard, whole = port.guard(), port.has_tables
    except StoreRefused as refusal:
        return Check(str(store), False, str(refusal))
    if not whole:
        return Check(str(store), False, "it has lost one of ADK's tables. Bring it back first.")
    ours = guard is not None and guard.move == move.pk
    return Check(str(store), ours, "" if ours else f"its guard row is not {move}'s any more.")


# --- artifacts -----------------------------------------------------------------------------------


def artifact_checks(
    tenant: Tenant, source: Store, target: Store, *, move: TenantMigration | None = None
) -> tuple[list[Check], tuple[Finding, ...]]:
    """Look at both stores' artifact services and write nothing. Takes seconds at most.

    Returns findings too: names that the target can't hold. What a version holds shows when it is
    copied.
    """
    if not source.artifacts_from:
        known = f"{source} names no artifact service"
        return [Check(ARTIFACTS, True, f"none: {known}")] if target.artifacts_from else [], ()
    try:
        if target.artifacts_from and artifacts.same_address(
            source.artifacts_from, target.artifacts_from
        ):
            one = f"{source} and {target} keep them in one place: none is copied, none removed"
            return [Check(ARTIFACTS, True, one)], ()
        with opened_artifacts(source, tenant) as ours:
            if not target.artifacts_from:
                return [_left_alone(ours, tenant, source, target)], ()
            with opened_artifacts(target, tenant) as theirs:
                return _both(tenant, target, ours, theirs, move)
    except StoreRefused as refused:
        return [Check(ARTIFACTS, False, str(refused))], ()


@contextmanager
def opened_artifacts(store: Store, tenant: Tenant) -> Iterator[artifacts.ArtifactStore]:
    """Open the artifact service of a store, to look at what the tenant has there."""
    with ExitStack() as stack:
        known = artifacts.Sessions(
            stack,
            lambda: ports.open_store(store.kind, store.address_from, app_name=tenant.app_name),
        )
        yield stack.enter_context(
            artifacts.open_artifacts(store.artifacts_from, app_name=tenant.app_name, known=known)
        )


def holds_artifacts(side: artifacts.ArtifactStore) -> bool:
    """Whether a service keeps anything of the tenant."""
    after = ""
    while users := side.users(after, 500):
        for user in users:
            if any(side.listing(user).values()):
                return True
        after = users[-1]
    return False


def _left_alone(
    ours: artifacts.ArtifactStore, tenant: Tenant, source: Store, target: Store
) -> Check:
    """A target without an artifact service is one for tenants that have none."""
    held = holds_artifacts(ours)
    detail = f"nothing of {tenant.app_name} on {source}, and {target} names no artifact service"
    if held:
        detail = (
            f"{tenant.app_name} has some on {source}, and {target} names no artifact service: they"
            f" would be out of reach. Name one for {target}, or choose another store."
        )
    return Check(ARTIFACTS, not held, detail)


def _both(
    tenant: Tenant,
    target: Store,
    ours: artifacts.ArtifactStore,
    theirs: artifacts.ArtifactStore,
    move: TenantMigration | None,
) -> tuple[list[Check], tuple[Finding, ...]]:
    users, versions, whole, refused = _names(ours, theirs)
    held = f"{counted(versions, 'version')} of {counted(users, 'user')}" + (
        "" if whole else ", and more"
    )
    checks = [Check(ARTIFACTS, not refused, held)]
    findings: tuple[Finding, ...] = ()
    if refused:
        (example, reason), count = refused[0], len(refused)
        findings = (Finding("artifacts", reason, count, example, True),)
        told = f"{target} can't hold {count:,} of their names, such as {example}: {reason}"
        checks = [Check(ARTIFACTS, False, told)]
    if holds_artifacts(theirs):
        # Both: behind the closed guard row nobody but that move wrote, and it wrote some.
        leftovers, _ = _held(tenant, target, move)
        if not left_artifacts(tenant, target):
            leftovers = None
        detail = f"what {leftovers} left will be removed first"
        if leftovers is None:
            detail = (
                f"{target} keeps some of {tenant.app_name} already. Remove them, or choose another"
                " store."
            )
        checks.append(Check(f"Room for artifacts on {target}", leftovers is not None, detail))
    for side, name in ((ours, "source"), (theirs, "target")):
        if side.caveat:
            checks.append(Check(f"{name.title()}'s artifacts", None, side.caveat))
    return checks, findings


def left_artifacts(tenant: Tenant, store: Store) -> bool:
    """Return whether an ended move of the tenant kept artifacts at a store, which may lie there."""
    sides = Q(source_store=store) | Q(target_store=store)
    ended = tenant.moves.filter(sides, phase__in=ENDED)
    return ArtifactVersion.objects.filter(move__in=ended).exists()


def _names(
    ours: artifacts.ArtifactStore, theirs: artifacts.ArtifactStore
) -> tuple[int, int, bool, list[tuple[str, str]]]:
    """Walk names for a few seconds; return users, versions, if that is all, what is refused."""
    until = time.monotonic() + LOOK_SECONDS
    count, versions, after = 0, 0, ""
    refused: list[tuple[str, str]] = []
    while users := ours.users(after, 500):
        for user in users:
            listing = ours.listing(user)
            kept: set[artifacts.Name] = set()
            for name in (name for name, held in listing.items() if held):
                place = theirs.placed(ours.placed(name))
                why = theirs.refusal(user, name, None)
                if place in kept:
                    why = "it is kept as one with another name there"
                if why:
                    refused.append((artifacts.spell(name.name), why))
                kept.add(place)
            count, versions = count + bool(kept), versions + sum(map(len, listing.values()))
            if time.monotonic() > until:
                return count, versions, False, refused
        after = users[-1]
    return count, versions, True, refused
