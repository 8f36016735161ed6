"""Lists of moves, and where a new one could go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.core.paginator import Page, Paginator
from django.db.models import Q

from migrations_app import queries
from migrations_app.domain.phases import STEPPER, STEPPER_BACK, Phase
from migrations_app.models import Sample, TenantMigration
from migrations_app.panels.progress import (
    COPYING,
    RATE_SECONDS,
    TIMED,
    done_of,
    rate_between,
    rate_of_phase,
    seconds_left,
)
from migrations_app.panels.seen import (
    ENDED_VALUES,
    Seen,
    all_live,
    moves,
    with_mismatches,
)
from tenants.domain.names import StoreKind
from tenants.domain.words import Status, duration, elapsed, limit, rate
from tenants.models import Cell, Placement, Store, Tenant

PAGE_ROWS = 50


@dataclass(frozen=True)
class MoveLine:
    """One row of a list of moves."""

    move: TenantMigration
    status: Status
    # What it leaves and comes to: stores, or cells where only the cell changes.
    source: str
    target: str
    # Seven glyphs: "on", the status's own, or "".
    mini: tuple[str, ...]
    progress: str
    rate: str
    eta: str
    fence: str
    estimated: str


def live_moves(*, now: datetime) -> list[MoveLine]:
    """Return every move that has not ended, in the order of their start, soaking ones last.

    Not worst first, as "needs attention" is: a row keeps its place while its state changes.
    """
    lines = _lines(all_live(), now=now)
    return sorted(lines, key=lambda line: (line.move.placement_version is not None, line.move.pk))


# A list works out the quote of so many moves that still copy; each costs a few reads.
QUOTED_MOST = 20


def _lines(rows: Sequence[Seen], *, now: datetime) -> list[MoveLine]:
    copying = [seen.move for seen in rows if seen.phase in COPYING]
    quotes = {
        move.pk: queries.fence_quote(move, now=now).expected for move in copying[:QUOTED_MOST]
    }
    speeds = _rates([seen.move for seen in rows], now)
    return [
        _line(
            seen,
            speeds.get(seen.move.pk),
            quotes.get(seen.move.pk, seen.move.quote.get("expected")),
            now,
        )
        for seen in rows
    ]


def _rates(moves: Sequence[TenantMigration], now: datetime) -> dict[int, float | None]:
    since = now - timedelta(seconds=RATE_SECONDS)
    copying = {move.pk: move for move in moves if move.phase in COPYING}
    found: dict[int, list[tuple[datetime, int]]] = {}
    rows = Sample.objects.filter(move__in=copying, at__gte=since, phase__in=COPYING)
    for pk, at, done, passes in rows.order_by("id").values_list("move_id", "at", "done", "passes"):
        if passes == copying[pk].passes:
            found.setdefault(pk, []).append((at, done))
    speeds = {pk: rate_between(samples) for pk, samples in found.items()}
    return {move.pk: speeds.get(move.pk) or rate_of_phase(move, now) for move in moves}


def _line(seen: Seen, speed: float | None, expected: float | None, now: datetime) -> MoveLine:
    move, phase = seen.move, seen.phase
    status = seen.status(now)
    left = seconds_left(seen, speed)
    progress = done_of(move) if phase in TIMED and move.todo else "–"
    eta = "–"
    if phase == Phase.SOAK and move.soak_until is not None and not seen.opening_again:
        remaining = max(0.0, (move.soak_until - now).total_seconds())
        eta = elapsed(remaining) if remaining else "over"
        progress = f"{_soaked(move.soak_seconds - remaining)} of {limit(move.soak_seconds)}"
    elif phase == Phase.PREPARE and move.checks:
        green, of = seen.green_checks
        progress = f"{green} of {of} checks"
    elif left is not None:
        eta = elapsed(max(1, left))
    fence_now = "open"
    if move.fence_closed_at is not None:
        spent = ((move.fence_opened_at or now) - move.fence_closed_at).total_seconds()
        fence_now = elapsed(spent) if seen.fenced else f"was {duration(spent)}"
    return MoveLine(
        move=move,
        status=status,
        source=str(seen.source),
        target=str(seen.target),
        mini=_mini(seen, status),
        progress=progress,
        rate=rate(speed) if phase in TIMED else "–",
        eta=eta,
        fence=fence_now,
        estimated=duration(expected) if expected is not None else "–",
    )


def _soaked(seconds: float) -> str:
    """Return how much of a soak is over, in its largest units."""
    seconds = max(0.0, seconds)
    return f"{int(seconds // 3600)}h" if seconds >= 3600 else elapsed(seconds)


def _mini(seen: Seen, status: Status) -> tuple[str, ...]:
    if seen.phase == Phase.SPLIT or seen.out_of_split:
        # Seven lamps for every move: a split's stands where its copying does.
        glyphs = ("on", status.glyph) if not seen.ended else ("", "")
        return (*glyphs, *[""] * (len(STEPPER) - 2))
    if seen.phase in STEPPER:
        at = STEPPER.index(seen.phase)
        return ("on",) * at + (status.glyph,) + ("",) * (len(STEPPER) - at - 1)
    if seen.going_back:
        # The way back runs from the right: what is still on falls off behind it.
        at = len(STEPPER) - 1 - STEPPER_BACK.index(seen.phase)
        return ("on",) * at + (status.glyph,) + ("",) * (len(STEPPER) - at - 1)
    if seen.phase in (Phase.REOPEN, Phase.ABORTED, Phase.ROLLED_BACK):
        return ("",) * len(STEPPER)
    return ("on",) * len(STEPPER)


@dataclass(frozen=True)
class MovesFilter:
    """What a list of moves is narrowed to. `state`: live, ended, or all."""

    state: str = "live"
    text: str = ""
    page: int = 1


@dataclass(frozen=True)
class MovesPage:
    lines: tuple[MoveLine, ...]
    page: Page[TenantMigration]
    filter: MovesFilter


def moves_page(wanted: MovesFilter, *, now: datetime) -> MovesPage:
    """Return one page of moves: live ones in the order of their start, ended ones newest first."""
    rows = moves()
    if wanted.state == "live":
        rows = rows.exclude(phase__in=ENDED_VALUES).order_by("id")
    elif wanted.state == "ended":
        rows = rows.filter(phase__in=ENDED_VALUES).order_by("-id")
    else:
        rows = rows.order_by("-id")
    if wanted.text:
        narrowed = (
            Q(tenant__slug__icontains=wanted.text)
            | Q(source_store__key__icontains=wanted.text)
            | Q(target_store__key__icontains=wanted.text)
            | Q(source_cell__slug__icontains=wanted.text)
            | Q(target_cell__slug__icontains=wanted.text)
        )
        number = wanted.text.removeprefix("mv-")
        if number.isdecimal() and len(number) < 18:
            narrowed |= Q(pk=int(number))
        rows = rows.filter(narrowed)
    page = Paginator(rows, PAGE_ROWS).get_page(wanted.page)
    return MovesPage(tuple(_lines(with_mismatches(list(page.object_list)), now=now)), page, wanted)


def moves_of(tenant: Tenant, *, now: datetime) -> list[MoveLine]:
    """Return the tenant's last twenty moves, newest first."""
    return _lines(
        with_mismatches(list(moves().filter(tenant=tenant).order_by("-id")[:20])), now=now
    )


def live_move_of(tenants: Iterable[Tenant]) -> dict[int, TenantMigration]:
    """Return the live move of each of these tenants that has one, by tenant id."""
    rows = TenantMigration.objects.filter(tenant__in=list(tenants)).exclude(phase__in=ENDED_VALUES)
    return {move.tenant_id: move for move in rows}


def live_moves_by(store: Store) -> list[TenantMigration]:
    """Return the live moves from or to a store: what they go by can't be changed meanwhile."""
    sides = Q(source_store=store) | Q(target_store=store)
    return list(moves().filter(sides).exclude(phase__in=ENDED_VALUES).order_by("id")[:20])


def live_states(tenants: Iterable[Tenant], *, now: datetime) -> dict[int, LiveMove]:
    """Return the live move of each of these tenants that has one, and its state in words."""
    rows = moves().filter(tenant__in=list(tenants)).exclude(phase__in=ENDED_VALUES)
    found = with_mismatches(list(rows))
    return {seen.move.tenant_id: LiveMove(seen.move, seen.status(now)) for seen in found}


@dataclass(frozen=True)
class LiveMove:
    """A live move as a list of tenants names it."""

    move: TenantMigration
    status: Status


@dataclass(frozen=True)
class Targets:
    """Where a tenant could go: (value, words) of cells and of stores, its own region first."""

    cells: tuple[tuple[str, str], ...]
    stores: tuple[tuple[str, str], ...]


def targets(placement: Placement, *, own_store: bool = False) -> Targets:
    """Return every cell and store; `own_store` lists the tenant's too, last, for its cell alone."""
    home = placement.cell.region_id
    cells = sorted(
        Cell.objects.select_related("region"), key=lambda cell: (cell.region_id != home, cell.slug)
    )
    found = Store.objects.select_related("region")
    stores = sorted(
        found if own_store else found.exclude(pk=placement.store_id),
        key=lambda store: (store == placement.store, store.region_id != home, store.key),
    )
    return Targets(
        tuple((cell.slug, _cell_words(cell, placement)) for cell in cells),
        tuple((store.key, _store_words(store, placement)) for store in stores),
    )


def _store_words(store: Store, placement: Placement) -> str:
    if store == placement.store:
        return f"{store.key} (where it is now: only the cell changes)"
    how = ", by replay" if store.kind == StoreKind.ADK_SERVICE else ""
    return f"{store.key} ({store.kind}{how}, {store.region})"


def _cell_words(cell: Cell, placement: Placement) -> str:
    notes = [str(cell.region)]
    if cell.pk == placement.cell_id:
        notes.append("where it is now")
    if cell.quota_verified_at is None:
        notes.append("quota only assumed")
    return f"{cell.slug} ({', '.join(notes)})"
