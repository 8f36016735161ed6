"""Who serves what while both cells of a split serve: each side, its proof, what both changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from migrations_app.domain.phases import FENCED, Phase
from migrations_app.models import TenantMigration
from migrations_app.panels.progress import share_of
from migrations_app.panels.seen import Seen
from tenants import panels as tenants_panels
from tenants.domain.words import Status, clock, count, counted, elapsed, limit
from tenants.models import Cell, PolicyEntry, Store
from tenants.panels import InstanceLine

# Keys that both sides changed, as far as the panel lists them; the log has each.
MERGED_SHOWN = 50


@dataclass(frozen=True)
class Side:
    """One cell of a split, and what its instances were told."""

    name: str
    cell: Cell
    store: Store
    # What it serves, in words.
    serves: str
    status: Status
    lines: tuple[InstanceLine, ...]
    # The policy version that says so. None: nothing is published yet.
    version: int | None
    note: str


@dataclass(frozen=True)
class Merged:
    """One key of shared state that both sides changed: whose value stands, never the value."""

    whose: str
    key: str
    # "source" or "target".
    taken: str
    # Nothing tells which change was the newer: the event that set one of both is gone.
    undecided: bool


@dataclass(frozen=True)
class SplitPanel:
    status: Status
    sides: tuple[Side, Side]
    # Sessions born on the target; "–" before anybody looked.
    born: str
    # How long the source has been idle, of how long it must be, and by when at the latest.
    quiet: str
    bound: str
    # Percent of the bar, where the source is waited for; None: it is not.
    bar: float | None
    bar_label: str
    merged: tuple[Merged, ...]
    merged_more: int
    placements: str


def split(seen: Seen, *, now: datetime) -> SplitPanel | None:
    """Return who serves what; None: the move is no split, or that was over long ago."""
    move = seen.move
    if not seen.split or move.split_version is None:
        return None
    if seen.phase not in SHOWN:
        return None
    quiet, bound, share = _waiting(seen, now)
    merged = [
        Merged(
            _whose(line["user_id"]),
            str(line["key"]),
            str(line["taken"]),
            line.get("undecided", False),
        )
        for line in move.merged[:MERGED_SHOWN]
    ]
    return SplitPanel(
        status=_status(seen),
        sides=(_source(seen, now), _target(seen, now)),
        born=count(move.born),
        quiet=quiet,
        bound=bound,
        bar=share,
        bar_label=quiet,
        merged=tuple(merged),
        merged_more=max(0, len(move.merged) - MERGED_SHOWN),
        placements=_placements(move),
    )


# Phases in which it matters who serves what, or what came of it.
SHOWN = FENCED | {Phase.SPLIT, Phase.SOAK, Phase.ROLLED_BACK}


def _whose(user_id: str | None) -> str:
    return "the app" if user_id is None else f"user {user_id}"


def _status(seen: Seen) -> Status:
    move = seen.move
    if seen.on_target:
        return Status("done", f"{move.target_store} serves all")
    if seen.phase == Phase.ROLLED_BACK:
        return Status("done", f"{move.source_store} serves all")
    if not seen.both_serve:
        return Status("waiting", f"{move.source_store} lets earlier turns end")
    if seen.fenced:
        closed = move.target_store if seen.fence_goes_back else move.source_store
        return Status("fenced", f"{closed} is fenced")
    return Status("live", "Both serve")


def _placements(move: TenantMigration) -> str:
    """Name the placement versions of the split: the one that names both sides, and the last."""
    first, last = move.split_placement_version, move.placement_version
    if first is None:
        return "not published yet"
    both = f"{first:,} names both sides"
    if move.back_placement_version is not None and last is None:
        return f"{both}, {move.back_placement_version:,} the source alone"
    return both if last is None else f"{both}, {last:,} the target alone"


def _waiting(seen: Seen, now: datetime) -> tuple[str, str, float | None]:
    """Return how idle the source is, until when it is waited for, and how much of that is over."""
    move = seen.move
    if not seen.both_serve or seen.phase != Phase.SPLIT or move.split_at is None:
        return "", "", None
    if seen.rollback_waits or seen.opening_again:
        return "not waited for: the move is on its way back", "", None
    until = move.split_at + timedelta(seconds=move.idle_bound_seconds)
    if until <= now:
        return "waited for no longer", f"over since {clock(until, now)}", None
    bound = f"{clock(until, now)}, in {elapsed((until - now).total_seconds())}"
    if move.quiet_since is None:
        return f"busy: it must be idle for {limit(move.idle_seconds)}", bound, 0.0
    quiet = (now - move.quiet_since).total_seconds()
    idle = f"idle for {elapsed(quiet)} of {limit(move.idle_seconds)}"
    return idle, bound, share_of(quiet, move.idle_seconds)


def _source(seen: Seen, now: datetime) -> Side:
    move = seen.move
    version = move.split_version
    lines: Sequence[InstanceLine] = ()
    shown = version
    if seen.phase == Phase.SPLIT or seen.both_serve:
        older = not (seen.fenced and not seen.fence_goes_back)
        shown = version if older else move.fence_version
        lines = [
            line
            for line in tenants_panels.instance_lines(
                move.source_cell, tenant=move.tenant, version=shown, now=now, older=older
            )
            # Who left in order serves nobody and is waited for by nothing; a lost one is news.
            if not (line.state == "gone" and line.status.glyph == "kept")
        ]
    if seen.on_target:
        serves, status = "nothing any more: closed and whole", Status("kept", "Closed")
    elif seen.phase == Phase.ROLLED_BACK:
        serves, status = "every session", Status("ok", "Serves all")
    elif seen.fenced and not seen.fence_goes_back:
        serves, status = "nothing: its sessions get retry-after", Status("fenced", "Fenced")
    else:
        serves, status = "sessions that it has; no new ones", Status("live", "Existing")
    waits = sum(line.in_flight for line in lines if line.state == "draining")
    note = f"{counted(waits, 'turn')} from before still run{'s' if waits == 1 else ''}"
    return Side(
        "Source",
        move.source_cell,
        move.source_store,
        serves,
        status,
        tuple(lines),
        shown,
        note if waits else "",
    )


def _target(seen: Seen, now: datetime) -> Side:
    move = seen.move
    entry = PolicyEntry.objects.filter(tenant=move.tenant, cell=move.target_cell).first()
    version = entry.version if entry is not None else None
    lines: Sequence[InstanceLine] = ()
    if seen.phase == Phase.SPLIT or seen.both_serve:
        lines = tenants_panels.instance_lines(
            move.target_cell, tenant=move.tenant, version=None, now=now
        )
    if seen.on_target:
        serves, status = "every session", Status("ok", "Serves all")
    elif seen.phase == Phase.ROLLED_BACK:
        serves, status = "nothing any more: closed", Status("kept", "Closed")
    elif not seen.both_serve:
        serves, status = "nothing yet", Status("waiting", "Not yet")
    elif seen.fenced and seen.fence_goes_back:
        serves, status = "nothing: its sessions get retry-after", Status("fenced", "Fenced")
    elif seen.fenced:
        serves, status = "what was born there; new ones wait", Status("live", "Its own")
    else:
        serves, status = "new sessions, and those born there", Status("live", "New")
    behind = [
        line.name
        for line in lines
        if version is not None and line.state != "lapsed" and line.applied_version < version
    ]
    note = f"{', '.join(behind)} will hear of it with the next poll" if behind else ""
    return Side(
        "Target",
        move.target_cell,
        move.target_store,
        serves,
        status,
        tuple(lines),
        version,
        note,
    )
