"""What pages show of tenants, cells and instances: frozen values, read at one moment."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from django.core.paginator import Page, Paginator
from django.db.models import Count, F, Q, QuerySet

from tenants import queries
from tenants.domain.fence import Accepts, GoneWhy, ask_ends, has_lapsed
from tenants.domain.names import StoreKind, Tier
from tenants.domain.words import Status, counted
from tenants.models import (
    Cell,
    Placement,
    PlacementChange,
    PolicyEntry,
    RuntimeInstance,
    Scope,
    Store,
    Tenant,
)

# An instance that was lost stays news for a day, unless one of its name came back.
NEWS = timedelta(days=1)
# An instance that said nothing for so long is shown as silent: several reports at the slow cadence.
SILENT = timedelta(seconds=20)
PAGE_ROWS = 50
HISTORY_ROWS = 20
# A page names so many cells or stores in a drop-down; past it people filter by typing.
CHOICES = 500


# --- what needs a person, of whatever app -----------------------------------------------------


@dataclass(frozen=True)
class Attention:
    """One line of "needs attention". The title is the fact, the text its impact."""

    # Lower is worse; equal ranks are ordered by age, oldest first.
    rank: float
    status: Status
    title: str
    text: str
    since: datetime
    # What its buttons act on, as `_attention.html` tells them apart, and its key in a URL.
    kind: str
    key: str
    label: str
    # The words of the button that takes the way out; "": there is none.
    way_out: str = ""
    # Whether that throws something away.
    destroys: bool = False
    # Rows to be looked at one by one; 0: none.
    review: int = 0


# A halt stops even moves whose fence is closed, which come before all else.
HALT_RANK, LOST_RANK, SILENT_RANK = -1, 1, 3
# Instances that one line names.
NAMED = 4


# --- instances --------------------------------------------------------------------------------


@dataclass(frozen=True)
class InstanceLine:
    """One instance on a page: its state in words, and what it last said."""

    id: int
    name: str
    # closed, draining, missing, lapsed or gone while a fence is closed; alive, silent, joining,
    # lapsed or gone while none is.
    state: str
    status: Status
    build: str
    applied_version: int
    in_flight: int
    reported_at: datetime | None
    lease_until: datetime


FENCE_WORDS = {
    "closed": Status("ok", "Closed"),
    "draining": Status("live", "Draining"),
    "missing": Status("waiting", "Not yet"),
    "lapsed": Status("lost", "Lost"),
    "gone": Status("kept", "Gone"),
}
# Of a split: an instance takes only what its side has, once turns from before have ended.
OLDER_WORDS = FENCE_WORDS | {
    "closed": Status("ok", "Its own only"),
    "draining": Status("live", "Ending older turns"),
}
GONE_WORDS = {
    GoneWhy.LEFT: Status("kept", "Left"),
    GoneWhy.REPLACED: Status("kept", "Joined anew"),
    GoneWhy.LAPSED: Status("lost", "Lost"),
    GoneWhy.DEAD: Status("lost", "Declared dead"),
}


def instance_lines(
    cell: Cell, *, tenant: Tenant, version: int | None, now: datetime, older: bool = False
) -> list[InstanceLine]:
    """Return the cell's instances by name, so that rows keep their place.

    `version`: the policy version that closed the tenant's fence; None while it is open. With
    `older` it took away only part of the turns: those that began before are counted.
    """
    rows = {
        row.pk: row
        for row in RuntimeInstance.objects.filter(
            Q(gone_at=None) | Q(gone_at__gt=now - NEWS), cell=cell
        )
    }
    if version is None:
        current = queries.epoch()
        lines = [
            _line(row, *instance_state(row, now), current, tenant)
            for row in rows.values()
            if row.gone_at is None
        ]
    else:
        current = queries.epoch()
        prove = queries.older_proof if older else queries.fence_proof
        proof = prove(cell, tenant, version, now=now)
        words = OLDER_WORDS if older else FENCE_WORDS
        lines = []
        for word in proof.instances:
            # Gone before this fence was news: the proof and this read are two statements.
            if (row := rows.get(word.id)) is None:
                continue
            status = words[word.state]
            if word.state == "gone":
                status = GONE_WORDS.get(GoneWhy(row.gone_why), status)
            line = _line(row, word.state, status, current, tenant)
            lines.append(replace(line, in_flight=word.in_flight) if older else line)
    return sorted(lines, key=lambda line: (line.name, line.id))


def instance_state(row: RuntimeInstance, now: datetime) -> tuple[str, Status]:
    """Return what an instance that is not gone does while no fence waits for it."""
    if has_lapsed(row, now):
        return "lapsed", Status("lost", "Lost")
    if row.polled_at is None:
        return "joining", Status("waiting", "Joining")
    last = max(row.polled_at, row.reported_at or row.polled_at)
    if now - last > SILENT:
        return "silent", Status("warn", "Silent")
    return "alive", Status("ok", "Serving")


def _line(
    row: RuntimeInstance, state: str, status: Status, epoch: str, tenant: Tenant
) -> InstanceLine:
    return InstanceLine(
        id=row.pk,
        name=row.name,
        state=state,
        status=status,
        build=row.build,
        # A version of another epoch counts as nothing applied.
        applied_version=row.applied_version if row.applied_epoch == epoch else 0,
        in_flight=row.in_flight.get(tenant.slug, 0),
        reported_at=row.reported_at,
        lease_until=row.lease_until,
    )


def longest_tool_seconds(cell: Cell, *, now: datetime) -> float:
    """Return the longest tool time-out that a live instance of the cell stated; 0 if none lives."""
    alive = queries.live_instances(cell, now=now)
    return max((row.longest_tool_seconds for row in alive), default=0.0)


# --- stores -----------------------------------------------------------------------------------

# What a kind means for a move, in a sentence.
KINDS = {
    StoreKind.ADK_SQL: "Tables of google-adk's DatabaseSessionService, read and written as rows;"
    " a move closes it to agents behind its fence.",
    StoreKind.ADK_SQLITE: "A file of google-adk's SqliteSessionService, read and written as rows;"
    " a move closes it to agents behind its fence.",
    StoreKind.ADK_SERVICE: "Any google-adk session service, by replay through its interface. It"
    " can't be closed: a fence's proof is protocol and lease alone.",
}


@dataclass(frozen=True)
class StoreLine:
    """One store as a list of them shows it; addresses are references, never what they lead to."""

    store: Store
    tenants: int
    kind: str
    # What the last survey found there, in words; "" where none has looked.
    found: str


def stores() -> QuerySet[Store]:
    """Return every store by key, with how many tenants live there."""
    rows = Store.objects.select_related("region").order_by("key")
    return rows.annotate(tenants=Count("placements"))


def store_line(store: Store) -> StoreLine:
    """Return a row of `stores` as pages show it."""
    survey = store.survey or {}
    found = str(survey.get("database", ""))
    if survey.get("can_close") is False:
        found = f"{found}, can't be closed".lstrip(", ")
    kind = KINDS.get(StoreKind(store.kind), "") if store.kind in set(StoreKind) else ""
    return StoreLine(store, getattr(store, "tenants", 0), kind, found)


# --- cells ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CellLine:
    """One row of the cells table. Lamps: one per instance, True is alive."""

    cell: Cell
    status: Status
    tenants: int
    in_flight: int
    alive: int
    lost: tuple[RuntimeInstance, ...]
    silent: tuple[RuntimeInstance, ...]
    lamps: tuple[bool, ...]

    @property
    def instances(self) -> int:
        return self.alive + len(self.lost)


def cell_lines(*, now: datetime) -> list[CellLine]:
    """Return every cell by name, with its instances and what runs on them."""
    by_cell: dict[int, list[RuntimeInstance]] = defaultdict(list)
    for row in recent_instances(now).order_by("name", "id"):
        by_cell[row.cell_id].append(row)
    cells = Cell.objects.select_related("region").annotate(
        tenants=Count("placements", distinct=True)
    )
    return [
        _cell_line(cell, getattr(cell, "tenants"), by_cell[cell.pk], now)  # noqa: B009
        for cell in cells.order_by("slug")
    ]


def recent_instances(now: datetime) -> QuerySet[RuntimeInstance]:
    """Return the instances that are not gone, and those that were lost in the last day."""
    lost = Q(gone_why__in=[GoneWhy.LAPSED, GoneWhy.DEAD], gone_at__gt=now - NEWS)
    return RuntimeInstance.objects.filter(Q(gone_at=None) | lost)


def _cell_line(
    cell: Cell, tenants: int, rows: Sequence[RuntimeInstance], now: datetime
) -> CellLine:
    states = [(row, "gone" if row.gone_at else instance_state(row, now)[0]) for row in rows]
    alive = [row for row, state in states if state not in ("gone", "lapsed")]
    names = {row.name for row in alive}
    lost: dict[str, RuntimeInstance] = {
        row.name: row for row, state in states if state in ("gone", "lapsed")
    }
    # A process that came back under its name is not lost any more.
    missing = tuple(row for name, row in lost.items() if name not in names)
    silent = tuple(row for row, state in states if state == "silent")
    lamps = [(row.name, True) for row in alive] + [(row.name, False) for row in missing]
    return CellLine(
        cell=cell,
        status=_cell_status(tenants, len(alive), len(missing), len(silent)),
        tenants=tenants,
        in_flight=sum(sum(row.in_flight.values()) for row in alive),
        alive=len(alive),
        lost=missing,
        silent=silent,
        lamps=tuple(on for _, on in sorted(lamps)),
    )


def _cell_status(tenants: int, alive: int, lost: int, silent: int) -> Status:
    if lost:
        return Status("lost", f"{alive} of {alive + lost}")
    if tenants and not alive:
        return Status("warn", "No instance")
    if silent:
        return Status("warn", f"{silent} silent")
    return Status("ok", "Clear") if tenants else Status("ready", "Ready")


def lost_instances(*, now: datetime) -> int:
    """Count instances that were lost in the last day and have not come back."""
    return sum(len(line.lost) for line in cell_lines(now=now))


def attention(*, now: datetime) -> list[Attention]:
    """Return a halt, lost and silent instances, and asks to declare one dead; the caller sorts.

    A few that were lost have a line each, many of one cell one line together.
    """
    items = [*_halted(), *_said_to_be_dead(now)]
    for line in cell_lines(now=now):
        runs = f"{line.cell} runs on {line.alive} of {line.instances}."
        if len(line.lost) > NAMED:
            title = f"{counted(len(line.lost), 'instance')} of {line.cell} stopped renewing leases"
            items.append(_about(line, "lost", title, f"{_named(line.lost)}. {runs}", line.lost))
        else:
            for row in line.lost:
                title = f"Instance {row.name} stopped renewing its lease"
                items.append(_about(line, "lost", title, runs, [row], label=row.name))
        if line.silent:
            are = "is" if len(line.silent) == 1 else "are"
            title = f"{counted(len(line.silent), 'instance')} of {line.cell} {are} silent"
            text = (
                f"{_named(line.silent)} may go on serving until the lease ends; a fence in"
                f" {line.cell} would wait."
            )
            items.append(_about(line, "silent", title, text, line.silent))
    return items


def _halted() -> list[Attention]:
    halt = queries.halt()
    if halt is None:
        return []
    return [
        Attention(
            rank=HALT_RANK,
            status=Status("blocked", "Stopped"),
            title="All machines are stopped",
            text=halt.why,
            since=halt.since,
            kind="halt",
            key="halt",
            label="halt",
        )
    ]


def _said_to_be_dead(now: datetime) -> list[Attention]:
    rows = RuntimeInstance.objects.filter(gone_at=None, dead_asked_at__isnull=False)
    return [
        Attention(
            rank=LOST_RANK,
            status=Status("waiting", "To confirm"),
            title=f"{row.dead_asked_by} says that instance {row.name} of {row.cell} is dead",
            text=f"Why: {row.dead_asked_why.rstrip('. ')}. A second person confirms it, by"
            f" {until:%H:%M:%S} UTC.",
            since=row.dead_asked_at,
            kind="instance",
            key=str(row.pk),
            label=row.name,
        )
        for row in rows.select_related("cell").order_by("name", "pk")
        if row.dead_asked_at is not None and (until := ask_ends(row.dead_asked_at, now))
    ]


def _about(
    line: CellLine,
    what: str,
    title: str,
    text: str,
    rows: Sequence[RuntimeInstance],
    label: str = "",
) -> Attention:
    lost = what == "lost"
    return Attention(
        rank=LOST_RANK if lost else SILENT_RANK,
        status=Status("lost", "Lost") if lost else Status("warn", "Silent"),
        title=title,
        text=text,
        since=min(row.gone_at or row.reported_at or row.joined_at for row in rows),
        kind="cell",
        key=line.cell.slug,
        label=label or f"{line.cell}-{what}",
    )


def _named(rows: Sequence[RuntimeInstance]) -> str:
    names = ", ".join(row.name for row in rows[:NAMED])
    return f"{names} and {len(rows) - NAMED} more" if len(rows) > NAMED else names


# --- tenants ----------------------------------------------------------------------------------


SORTS = {
    "tenant": ("slug",),
    "app": ("app_name",),
    "cell": ("placement__cell__slug", "slug"),
    "store": ("placement__store__key", "slug"),
    "tier": ("tier", "slug"),
    "placed": ("placement__placement_version", "slug"),
}


@dataclass(frozen=True)
class TenantsFilter:
    """What the list of tenants is narrowed to and sorted by. A sort with "-" is descending."""

    text: str = ""
    cell: str = ""
    store: str = ""
    tier: str = ""
    sort: str = "tenant"
    page: int = 1

    @property
    def narrowed(self) -> bool:
        return bool(self.text or self.cell or self.store or self.tier)


@dataclass(frozen=True)
class TenantLine:
    tenant: Tenant
    placement: Placement
    # Whether the tenant's fence is closed: new turns are answered retry-after.
    fenced: bool


@dataclass(frozen=True)
class TenantsPage:
    lines: tuple[TenantLine, ...]
    page: Page[Tenant]
    filter: TenantsFilter
    total: int


def tenants_page(wanted: TenantsFilter) -> TenantsPage:
    """Return one page of tenants with where they live."""
    rows = Tenant.objects.select_related(
        "agent", "placement__cell__region", "placement__store"
    ).exclude(placement=None)
    total = rows.count()
    if wanted.text:
        rows = rows.filter(
            Q(slug__icontains=wanted.text)
            | Q(name__icontains=wanted.text)
            | Q(app_name__icontains=wanted.text)
        )
    if wanted.cell:
        rows = rows.filter(placement__cell__slug=wanted.cell)
    if wanted.store:
        rows = rows.filter(placement__store__key=wanted.store)
    if wanted.tier:
        rows = rows.filter(tier=wanted.tier)
    descending = wanted.sort.startswith("-")
    columns = SORTS.get(wanted.sort.lstrip("-"), SORTS["tenant"])
    first = f"-{columns[0]}" if descending else columns[0]
    page = Paginator(rows.order_by(first, *columns[1:]), PAGE_ROWS).get_page(wanted.page)
    shown = list(page.object_list)
    # At home: a cell that was only announced a tenant accepts none of it either.
    fenced = set(
        PolicyEntry.objects.filter(
            tenant__in=shown, accepts=Accepts.NONE, cell=F("tenant__placement__cell")
        ).values_list("tenant_id", flat=True)
    )
    lines = tuple(TenantLine(row, row.placement, row.pk in fenced) for row in shown)
    return TenantsPage(lines, page, wanted, total)


@dataclass(frozen=True)
class Choices:
    """What the filters of the tenants list offer."""

    cells: tuple[str, ...]
    stores: tuple[str, ...]
    tiers: tuple[str, ...] = tuple(tier.value for tier in Tier)


def choices() -> Choices:
    """Return the cells and stores that a list can be narrowed to."""
    return Choices(
        tuple(Cell.objects.order_by("slug").values_list("slug", flat=True)[:CHOICES]),
        tuple(Store.objects.order_by("key").values_list("key", flat=True)[:CHOICES]),
    )


@dataclass(frozen=True)
class TenantPage:
    """One tenant: where it lives, its limits, and how it came there."""

    tenant: Tenant
    placement: Placement
    # What runtimes were told for its cell; None: nothing was published yet.
    entry: PolicyEntry | None
    # None: it has no limits.
    scope: Scope | None
    history: tuple[PlacementChange, ...]

    @property
    def fenced(self) -> bool:
        return self.entry is not None and self.entry.accepts == Accepts.NONE

    @property
    def version(self) -> str:
        """Changes with everything that the placement panel shows."""
        scope = self.scope.version if self.scope else 0
        entry = self.entry.version if self.entry else 0
        return f"{self.placement.placement_version}.{scope}.{entry}"


def tenant_page(slug: str) -> TenantPage | None:
    """Return the tenant of this slug; None if there is none, or it was never placed."""
    tenant = (
        Tenant.objects.select_related(
            "agent",
            "placement__cell__region",
            "placement__store",
            "placement__split_cell",
            "placement__split_store",
        )
        .exclude(placement=None)
        .filter(slug=slug)
        .first()
    )
    if tenant is None:
        return None
    changes = tenant.placement_changes.select_related("cell", "store")
    return TenantPage(
        tenant,
        tenant.placement,
        PolicyEntry.objects.filter(tenant=tenant, cell=tenant.placement.cell).first(),
        tenant.scopes.first(),
        tuple(changes[:HISTORY_ROWS]),
    )


def matching_slugs(text: str, *, limit: int = 20) -> list[str]:
    """Return tenants that a form's field may mean by `text`."""
    rows: Iterable[str] = (
        Tenant.objects.filter(Q(slug__icontains=text) | Q(name__icontains=text))
        .order_by("slug")
        .values_list("slug", flat=True)[:limit]
    )
    return list(rows)
