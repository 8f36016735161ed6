"""What the pages of instances show: how each does, and what its cache of Runners costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.core.paginator import Page, Paginator

from capacity.domain.sizing import (
    MIB,
    RETURN_BAR_MS,
    CacheWord,
    biting,
    cache_word,
    fits,
    rebuild_share,
)
from tenants import queries
from tenants.domain.reports import share_sent
from tenants.domain.words import Status, count, counted
from tenants.models import Cell, Grants, Placement, RuntimeInstance
from tenants.panels import (
    CHOICES,
    GONE_WORDS,
    LOST_RANK,
    NAMED,
    SILENT_RANK,
    Attention,
    instance_state,
    recent_instances,
)

PAGE_ROWS = 50
# Tenants that an instance's page lists with their turns; the others are one line.
BUSY = 20
# An instance that is not ready so long after it joined is news: its Runners take too long.
WARMING = timedelta(minutes=2)
# What a page reckons with until somebody enters another budget (MiB).
HEAP_MIB, HEAP_MIB_MOST = 512, 1_048_576

GLYPHS = {"closed": "ok", "half_open": "waiting", "open": "blocked"}
BREAKER_WORDS = {"closed": "Closed", "half_open": "Trying", "open": "Open"}


# --- every instance ---------------------------------------------------------------------------


@dataclass(frozen=True)
class InstancesFilter:
    cell: str = ""
    text: str = ""
    page: int = 1


@dataclass(frozen=True)
class CellTurns:
    """A cell's turns in flight, shared out: the arithmetic of one row."""

    cell: Cell
    alive: int
    ready: int
    current: int
    in_flight: int
    # The instance with most of them. "": none runs.
    busiest: str
    busiest_turns: int

    @property
    def each(self) -> float | None:
        """Turns per replica; None: no instance is alive."""
        return self.in_flight / self.alive if self.alive else None

    @property
    def arithmetic(self) -> str:
        """Return the division as a person would write it.

        36 turns over 3 instances read "36 / 3 = 12.0".
        """
        if self.each is None:
            return "no instance"
        return f"{count(self.in_flight)} / {count(self.alive)} = {self.each:,.1f}"


@dataclass(frozen=True)
class InstanceLine:
    """One instance in a table."""

    row: RuntimeInstance
    status: Status
    state: str
    # 0: nothing of this database's epoch.
    applied: int
    in_flight: int
    # None: gone, or the lease is over.
    lease_left: float | None
    # None: it has said nothing of it.
    cache: CacheWord | None
    # Breakers that let nothing through.
    open: int

    @property
    def current(self) -> bool:
        """Whether it has applied its cell's present policy."""
        return self.applied == self.row.cell.policy_version


@dataclass(frozen=True)
class InstancesPage:
    filter: InstancesFilter
    cells: tuple[CellTurns, ...]
    lines: tuple[InstanceLine, ...]
    page: Page[RuntimeInstance]
    choices: tuple[str, ...]


def instances_page(wanted: InstancesFilter, *, now: datetime) -> InstancesPage:
    """Return one page of instances by cell and name, and each cell's turns in flight."""
    rows = recent_instances(now).select_related("cell").order_by("cell__slug", "name", "pk")
    if wanted.cell:
        rows = rows.filter(cell__slug=wanted.cell)
    if wanted.text:
        rows = rows.filter(name__icontains=wanted.text)
    page = Paginator(rows, PAGE_ROWS).get_page(wanted.page)
    epoch = queries.epoch()
    return InstancesPage(
        filter=wanted,
        cells=_cells(wanted.cell, epoch, now),
        lines=tuple(_line(row, epoch, now) for row in page),
        page=page,
        choices=tuple(Cell.objects.order_by("slug").values_list("slug", flat=True)[:CHOICES]),
    )


def _cells(only: str, epoch: str, now: datetime) -> tuple[CellTurns, ...]:
    cells = Cell.objects.select_related("region").order_by("slug")
    if only:
        cells = cells.filter(slug=only)
    by_cell: dict[int, list[RuntimeInstance]] = defaultdict(list)
    # Not what they say of caches and breakers, which is long: a table of cells needs none of it.
    light = RuntimeInstance.objects.filter(gone_at=None).defer(
        "plugins", "stores", "runners", "breakers", "in_flight_older"
    )
    for row in light.order_by("name", "pk"):
        by_cell[row.cell_id].append(row)
    return tuple(cell_turns(cell, by_cell[cell.pk], epoch, now) for cell in cells[:CHOICES])


def cell_turns(cell: Cell, rows: Sequence[RuntimeInstance], epoch: str, now: datetime) -> CellTurns:
    """Return how a cell's turns are shared out among its instances that are alive."""
    alive = [row for row in rows if instance_state(row, now)[0] != "lapsed"]
    turns = {row: sum(row.in_flight.values()) for row in alive}
    busiest = max(alive, key=lambda row: turns[row], default=None)
    most = turns[busiest] if busiest is not None else 0
    return CellTurns(
        cell=cell,
        alive=len(alive),
        ready=sum(row.ready for row in alive),
        current=sum(_applied(row, epoch) == cell.policy_version for row in alive),
        in_flight=sum(turns.values()),
        busiest=busiest.name if busiest is not None and most else "",
        busiest_turns=most,
    )


def _applied(row: RuntimeInstance, epoch: str) -> int:
    # A version of another epoch counts as nothing applied.
    return row.applied_version if row.applied_epoch == epoch else 0


def _line(row: RuntimeInstance, epoch: str, now: datetime) -> InstanceLine:
    if row.gone_at is not None:
        state, status = "gone", GONE_WORDS.get(row.gone_why, Status("kept", "Gone"))  # type: ignore[call-overload]
    else:
        state, status = instance_state(row, now)
    left = (row.lease_until - now).total_seconds()
    return InstanceLine(
        row=row,
        status=status,
        state=state,
        applied=_applied(row, epoch),
        in_flight=sum(row.in_flight.values()),
        lease_left=left if left > 0 and state != "gone" else None,
        cache=cache_word(row.runners),
        open=sum(said.get("state") == "open" for said in row.breakers.values()),
    )


# --- one instance -----------------------------------------------------------------------------


@dataclass(frozen=True)
class BreakerLine:
    endpoint: str
    status: Status
    failures: int
    own_quota: int
    shared_pool: int
    # As the instance spelled it. "": it is closed.
    retry_at: str


@dataclass(frozen=True)
class CachePanel:
    """An instance's cache of Runners: what it says, and what follows from it."""

    word: CacheWord
    # "size", "idle" or "": which limit takes Runners away.
    biting: str
    bites: str
    # What the p99 of a build costs a tenant that comes back; "": nothing was built yet.
    costs: str
    slow: bool


@dataclass(frozen=True)
class ShareLine:
    """What an instance may use of one tenant's limits. None in a share: that limit is not set."""

    tenant: str
    share: Mapping[str, Any]
    in_flight: int


@dataclass(frozen=True)
class InstancePage:
    line: InstanceLine
    turns: CellTurns
    # Tenant slug and its running turns, most first.
    busy: tuple[tuple[str, int], ...]
    others: int
    others_turns: int
    cache: CachePanel | None
    breakers: tuple[BreakerLine, ...]
    # Tenants whose Runners are built before it is ready, most active first.
    prewarm: tuple[str, ...]


def instance_page(pk: int, *, now: datetime) -> InstancePage | None:
    """Return one instance with its cell; None if there is none of this id."""
    row = RuntimeInstance.objects.select_related("cell__region").filter(pk=pk).first()
    if row is None:
        return None
    epoch = queries.epoch()
    peers = list(RuntimeInstance.objects.filter(cell=row.cell, gone_at=None).order_by("name", "pk"))
    busy = sorted(row.in_flight.items(), key=lambda item: (-item[1], item[0]))
    busy = [(slug, turns) for slug, turns in busy if turns]
    prewarm = row.cell.document.get("prewarm") or []
    return InstancePage(
        line=_line(row, epoch, now),
        turns=cell_turns(row.cell, peers, epoch, now),
        busy=tuple(busy[:BUSY]),
        others=len(busy[BUSY:]),
        others_turns=sum(turns for _, turns in busy[BUSY:]),
        cache=_cache(row),
        breakers=tuple(_breakers(row.breakers)),
        prewarm=tuple(str(slug) for slug in prewarm),
    )


def _cache(row: RuntimeInstance) -> CachePanel | None:
    word = cache_word(row.runners)
    if word is None:
        return None
    slow = word.p99_ms is not None and word.p99_ms > RETURN_BAR_MS
    costs = ""
    if word.p99_ms is not None:
        costs = f"A tenant that comes back waits up to {word.p99_ms / 1000:.1f}s on its first turn"
        bar = f"{RETURN_BAR_MS / 1000:.0f}s"
        costs += f", over the bar of {bar}." if slow else f", within the bar of {bar}."
    return CachePanel(
        word=word, biting=biting(word.evicted), bites=_bites(word), costs=costs, slow=slow
    )


def _bites(word: CacheWord) -> str:
    match biting(word.evicted):
        case "size":
            return (
                f"The size of {count(word.limit)} bites: {count(word.evicted['size'])} Runners had"
                " to go for others. Raise it if the heap has room."
            )
        case "idle":
            return (
                f"The idle time of {word.idle_seconds / 60:g} minutes bites:"
                f" {count(word.evicted['idle'])} Runners went because nobody asked for them. More"
                " room would keep none of them longer."
            )
    return "Neither size nor idle time has taken a Runner away."


def _breakers(said: Mapping[str, Any]) -> Iterable[BreakerLine]:
    for endpoint, word in sorted(said.items()):
        state = str(word.get("state", "closed"))
        yield BreakerLine(
            endpoint=endpoint,
            status=Status(GLYPHS.get(state, "waiting"), BREAKER_WORDS.get(state, state)),
            failures=int(word.get("failures", 0)),
            own_quota=int(word.get("own_quota_429", 0)),
            shared_pool=int(word.get("shared_pool_429", 0)),
            retry_at=str(word.get("retry_at") or ""),
        )


@dataclass(frozen=True)
class SharesPage:
    page: Page[str]
    lines: tuple[ShareLine, ...]
    # Whether the instance has said that it applies these.
    heard: bool
    made_at: datetime | None


def shares_page(row: RuntimeInstance, number: int) -> SharesPage:
    """Return one page of what an instance may use of its tenants' limits."""
    grants = Grants.objects.filter(instance=row).first()
    shares = grants.shares if grants is not None else {}
    page = Paginator(sorted(shares), PAGE_ROWS).get_page(number)
    return SharesPage(
        page=page,
        lines=tuple(
            ShareLine(slug, share_sent(shares[slug]), row.in_flight.get(slug, 0))
            for slug in page.object_list
        ),
        heard=row.grants_heard == row.grants_number,
        made_at=grants.made_at if grants is not None else None,
    )


@dataclass(frozen=True)
class Sizing:
    """How many Runners a heap budget holds, by what one was measured to weigh."""

    heap: str
    # What is wrong with the budget that was entered; "": nothing.
    error: str
    runner_bytes: int | None
    # None: nothing was measured, or the budget is no number.
    fits: int | None
    limit: int
    tenants: int
    says: str


def sizing(row: RuntimeInstance, heap: str) -> Sizing:
    """Return what a heap budget in MiB, as it was typed, would hold of this instance's Runners."""
    word = cache_word(row.runners)
    weight = word.runner_bytes if word is not None else None
    tenants = Placement.objects.filter(cell=row.cell).count()
    heap = heap.strip()
    good = heap.isascii() and heap.isdecimal() and 0 < int(heap[:9]) <= HEAP_MIB_MOST
    error = "" if good else f"Give whole MiB, from 1 to {HEAP_MIB_MOST:,}."
    held = fits(int(heap[:9]) * MIB, weight) if good and weight else None
    return Sizing(
        heap=heap,
        error=error,
        runner_bytes=weight,
        fits=held,
        limit=word.limit if word is not None else 0,
        tenants=tenants,
        says=_sized(word, held, tenants, row.cell.slug),
    )


def _sized(word: CacheWord | None, held: int | None, tenants: int, cell: str) -> str:
    if word is None or word.runner_bytes is None:
        return "No Runner has been weighed here yet, so nothing can be divided."
    if held is None:
        return ""
    live = f"{cell} has {counted(tenants, 'tenant')}"
    cold = rebuild_share(tenants, held)
    if not cold:
        return f"{live}: all of them fit. A limit above {count(tenants)} would hold nothing more."
    waits = f" and wait {word.p99_ms / 1000:.1f}s at p99" if word.p99_ms is not None else ""
    return (
        f"{live}: {count(tenants - held)} of them, {cold * 100:.0f} %, find no Runner when they"
        f" come back{waits}."
    )


# --- what needs a person ----------------------------------------------------------------------


def attention(*, now: datetime) -> list[Attention]:
    """Return instances that are not ready long after they joined, one line a cell."""
    late = RuntimeInstance.objects.filter(
        gone_at=None, ready=False, polled_at__isnull=False, joined_at__lt=now - WARMING
    )
    by_cell: dict[Cell, list[RuntimeInstance]] = defaultdict(list)
    for row in late.select_related("cell").order_by("cell__slug", "name", "pk"):
        if instance_state(row, now)[0] == "alive":
            by_cell[row.cell].append(row)
    return [_not_ready(cell, rows) for cell, rows in by_cell.items()]


def _not_ready(cell: Cell, rows: Sequence[RuntimeInstance]) -> Attention:
    names = ", ".join(row.name for row in rows[:NAMED])
    if len(rows) > NAMED:
        names = f"{names} and {len(rows) - NAMED} more"
    are = "is" if len(rows) == 1 else "are"
    return Attention(
        rank=(LOST_RANK + SILENT_RANK) / 2,
        status=Status("waiting", "Not ready"),
        title=f"{counted(len(rows), 'instance')} of {cell} {are} not ready",
        text=f"{names} still builds Runners of its pre-warm list; gateways send it no turns."
        if len(rows) == 1
        else f"{names} still build Runners of their pre-warm list; gateways send them no turns.",
        since=min(row.joined_at for row in rows),
        kind="instances",
        key=cell.slug,
        label=f"{cell}-not-ready",
    )
