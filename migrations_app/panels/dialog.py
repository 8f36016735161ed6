"""What a dialog is, and what dialogs of several kinds of moves say alike."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from migrations_app.domain.quote import Quote
from migrations_app.models import TenantMigration
from tenants import panels as tenants_panels
from tenants.domain.words import counted, duration
from tenants.models import Cell


@dataclass(frozen=True)
class Dialog:
    """A question with its consequences; the confirm button repeats the act and its object."""

    verb: str
    title: str
    lines: tuple[tuple[str, str], ...]
    confirm: str
    # The safe button names what goes on.
    safe: str
    danger: bool = False
    # Asks for seconds (hold), for the tenant's name to be typed (offboard), for a budget
    # (rollback) or for a pace.
    asks: str = ""
    # What the field holds before anything was typed.
    proposes: str = ""
    # What has to be settled first; then the act can't be confirmed.
    blocked: str = ""


def refused(move: TenantMigration, cell: Cell, now: datetime) -> str:
    """Say who will refuse new turns once the fence closes in a cell, and what goes on."""
    lines = tenants_panels.instance_lines(cell, tenant=move.tenant, version=None, now=now)
    alive = [line for line in lines if line.state in ("alive", "silent", "joining")]
    flying = sum(line.in_flight for line in alive)
    text = (
        f"new turns of {move.tenant} get retry-after on all {counted(len(alive), 'instance')} of"
        f" {cell}."
    )
    if flying == 1:
        return f"{text} The one turn in flight goes on."
    return f"{text} The {flying:,} turns in flight go on." if flying else text


def estimate(quote: Quote) -> str:
    """Spell a quote with its arithmetic."""
    parts = ", ".join(f"{part.name} {duration(part.expected)}" for part in quote.parts)
    return f"{duration(quote.expected)}, at worst {duration(quote.worst)}: {parts}."
