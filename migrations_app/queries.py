"""What the engine asks about moves. What pages show of them is in `panels/`."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from datetime import datetime

from django.db.models import Q, QuerySet

from migrations_app.domain.channels import ChannelState, Step, StepBy
from migrations_app.domain.mismatch import Looks
from migrations_app.domain.phases import FENCED, REVERSED, Mode, Phase
from migrations_app.domain.quote import Quote, quote
from migrations_app.models import Mismatch, MoveChannel, SideChannel, TenantMigration
from tenants import queries as tenants_queries
from tenants.models import DirtyLine, Tenant

# What a step says of a store that answers and has not the guard row that the move made there.
GUARD_LOST = "has lost its guard row"
# Phases in which steps of side channels are carried out.
CARRIED = FENCED | {Phase.BACKFILL, Phase.SPLIT, Phase.SOAK}


def fence_quote(move: TenantMigration, *, now: datetime) -> Quote:
    """Work out how long the next fence of `move` would stay closed if it closed at `now`."""
    changed = to_copy(move)
    home = move.target_cell if goes_back(move) else move.source_cell
    return quote(
        changed=changed,
        # Without proof by stamp every session is compared inside the fence.
        compare=changed if move.stamps_prove else move.sessions,
        users=move.users,
        running_seconds=tenants_queries.time_left_seconds(home, move.tenant, now=now),
        drain_bound_seconds=move.drain_bound_seconds,
        copy_rate=move.copy_rate,
        verify_rate=move.verify_rate,
        shared_rate=move.shared_rate,
        scan_seconds=reading_seconds(move, back=goes_back(move)),
        artifacts=move.artifacts,
        look_rate=move.artifact_look_rate,
        # What no stamp proves is read on both sides, at about the rate of copying it.
        read=_unproven(move) if move.artifacts else 0,
        read_rate=move.artifact_rate,
        # Counted only where the target has a memory of its own.
        remember=changed if move.remembered else 0,
        memory_rate=move.memory_rate,
    )


def way_back_quote(move: TenantMigration, *, now: datetime) -> Quote:
    """Work out the fence of the way back out of a split, or out of SOAK, if it closed at `now`."""
    asked = copy(move)
    if split_live(move):
        # As its abort would be asked for, whichever fence is closed now.
        asked.phase, asked.rollback_requested_at = Phase.SPLIT, now
    return fence_quote(asked, now=now)


def _unproven(move: TenantMigration) -> int:
    return move.artifact_versions.filter(Q(source_stamp="") | Q(target_stamp="")).count()


def goes_back(move: TenantMigration) -> bool:
    """Return whether the next fence of the move is the way back's."""
    asked = move.phase == Phase.SPLIT and move.rollback_requested_at is not None
    return asked or move.phase == Phase.SOAK or move.phase in REVERSED


def reading_seconds(move: TenantMigration, *, back: bool = False) -> float:
    """Return how long a fence reads stamps, by what was measured in BACKFILL.

    DELTA reads the source's, in pages as long as a mark where nobody but the fence waits for
    them, VERIFY the target's: in one go too, but of a target that was filled a moment ago and
    has no statistics. The mark is taken once more at the end. On the way back the written side's
    mark is compared with our own list too.
    """
    scan, mark = move.scan_seconds or 0.0, move.mark_seconds or 0.0
    first = mark if move.stamps_prove else scan
    return first + scan + mark + (mark if back else 0.0)


def to_copy(move: TenantMigration) -> int:
    """Return how many sessions the next fence would copy, as a forecast."""
    if move.mode == Mode.CELL:
        return 0
    return to_carry(move) if goes_back(move) else changed_since_pass(move)


def to_carry(move: TenantMigration) -> int:
    """Return how many sessions a rollback would carry back, as a forecast.

    What SOAK's last look counted, and what runtimes have reported as served since. Out of a
    split, what was born on the target.
    """
    if split_live(move):
        return move.born or 0
    since = move.touched_at or move.fence_opened_at
    lines = DirtyLine.objects.filter(tenant=move.tenant, at__gte=since) if since else None
    served = lines.values("user_id", "session_id").distinct().count() if lines is not None else 0
    return min((move.touched or 0) + served, move.sessions + served)


def changed_since_pass(move: TenantMigration) -> int:
    """Return how many sessions the fence would have to copy again, as a forecast.

    What runtimes reported as served since the last pass began; before the first pass
    has ended, all that is not copied yet. The stores' own stamps decide, not this.
    """
    if move.pass_ended_at is None:
        return max(move.sessions - move.done, 0)
    lines = DirtyLine.objects.filter(tenant=move.tenant, at__gte=move.pass_started_at)
    return lines.values("user_id", "session_id").distinct().count()


def open_mismatches(move: TenantMigration) -> int:
    """Return how many mismatches still block TARGET."""
    return blocking(move).count()


def repairs_asked(move: TenantMigration) -> bool:
    """Return whether a person waits for a mismatch to be repaired."""
    return move.mismatches.filter(resolved_at=None, repair_requested_at__isnull=False).exists()


def blocking(move: TenantMigration) -> QuerySet[Mismatch]:
    """Return the mismatches that nobody has repaired or accepted, and that will not pass."""
    return blocking_of([move])


def blocking_of(moves: Sequence[TenantMigration]) -> QuerySet[Mismatch]:
    """Return the `blocking` mismatches of these moves, for lists."""
    # On the way back an accepted late write is to be replaced, not kept: it blocks until it was.
    replaced = Q(move__phase__in=REVERSED) & ~Q(looks_like=Looks.CANNOT_HOLD)
    rows = Mismatch.objects.filter(move__in=moves, resolved_at=None, transient=False)
    return rows.filter(Q(accepted_at=None) | replaced)


def late_writes(move: TenantMigration) -> QuerySet[Mismatch]:
    """Return what was written at the closed source after the cutover, and still stands there."""
    return move.mismatches.filter(resolved_at=None, looks_like=Looks.LATE_WRITE)


def unsettled(rows: QuerySet[Mismatch]) -> QuerySet[Mismatch]:
    """Return those that no person has accepted."""
    return rows.filter(accepted_at=None)


def late_artifacts(move: TenantMigration) -> QuerySet[Mismatch]:
    """Return the late writes of artifacts."""
    return late_writes(move).exclude(artifact="")


def late_shared(move: TenantMigration) -> QuerySet[Mismatch]:
    """Return the late writes of shared state, which no session's stamp shows."""
    return late_writes(move).filter(session_id="", part="app")


def repairable(move: TenantMigration) -> QuerySet[Mismatch]:
    """Return the open mismatches whose repair nobody has asked for.

    Late writes are not among them: they are replaced by being accepted, with a reason.
    """
    rows = move.mismatches.filter(resolved_at=None, repair_requested_at=None)
    return rows.exclude(looks_like=Looks.LATE_WRITE)


def acceptable(move: TenantMigration, row: Mismatch) -> bool:
    """Return whether a person may let this difference stay: nothing is lost by it.

    A value that the target spells in another way, in a comparison; a late write at the closed
    source, whose place the tenant's own copy takes, in SOAK and on the way back.
    """
    if row.looks_like == Looks.LATE_WRITE:
        return move.phase in (Phase.SOAK, Phase.REVERSE_DRAIN, Phase.REVERSE_VERIFY)
    return row.looks_like == Looks.CANNOT_HOLD and row.part != "value"


def split_live(move: TenantMigration) -> bool:
    """Return whether agents of both cells serve the tenant, each its own sessions.

    From the moment the target takes new ones until one of both has all, forwards or back. Then
    nothing that agents may have written meanwhile is replaced, deleted or taken for a copy.
    """
    flipped = move.placement_version or move.back_placement_version
    return move.split_placement_version is not None and not flipped


def opens_target(move: TenantMigration) -> bool:
    """Return whether the source takes no new sessions any more, and the target none yet.

    They are refused meanwhile: it stands still for nothing that can wait.
    """
    begun = move.phase == Phase.SPLIT and move.split_version is not None
    return begun and not split_live(move)


def owes_opening(move: TenantMigration) -> bool:
    """Return whether SOAK or SPLIT, come back to from a fence, has not ended that fence yet."""
    if move.phase == Phase.SPLIT:
        # An abort that came before its fence was closed is answered there too.
        asked = move.abort_requested_at is not None and split_live(move)
        return asked or move.fence_version is not None
    return move.phase == Phase.SOAK and (move.fence_opened_at is None or move.stage == "return")


def stuck_at_cleaning(move: TenantMigration) -> bool:
    """Return whether a move only fails at removing a copy, so that a person may leave it.

    An abort removes the target's. OFFBOARD removes the source's, whose database may have been
    dropped during the soak, or have stopped a rollback: without a way out the tenant could never
    move again.
    """
    cleaning = (
        move.phase == Phase.OFFBOARD
        or (move.phase == Phase.SOAK and (move.stage == "return" or GUARD_LOST in move.failure))
        or (move.phase == Phase.REOPEN and (move.stage == "clean" or GUARD_LOST in move.failure))
    )
    return cleaning and move.failures > 0


# --- side channels ----------------------------------------------------------------------------


def channels_of(tenant: Tenant) -> QuerySet[SideChannel]:
    """Return the side channels that a move of the tenant lists: its own and its agent's."""
    whose = Q(tenant=tenant) | Q(agent=tenant.agent_id)
    return SideChannel.objects.filter(whose, removed_at=None)


def listed_channels(move: TenantMigration) -> QuerySet[MoveChannel]:
    """Return how far each side channel of a move is; one that was removed meanwhile is left out."""
    return move.channels.filter(channel__removed_at=None).select_related("channel")


def channel_step(move: TenantMigration, row: MoveChannel) -> Step | None:
    """Return which step of a side channel is to be done in the move's phase. None: none.

    Inside the fence a channel whose copy left a cursor is copied once more, from there. On the
    way back what a program brought over is brought back by it; a person's is theirs to judge. Once
    the target serves no program is called: it would put the source's older values over what agents
    have written since. What is still open then is a person's.
    """
    if move.phase not in CARRIED:
        return None
    if move.phase == Phase.SOAK and _by_program(row):
        return None
    back, by_program = move.phase in REVERSED, row.channel.copy_by != StepBy.PERSON
    # What never went over has nothing to bring back; a required one has, and differed since.
    if back and (not by_program or (row.copied_at is None and not row.channel.required)):
        return None
    catches_up = move.phase in FENCED and by_program and (back or row.cursor != "")
    fence = move.fence_closed_at if catches_up else None
    if row.copied_at is None or (fence is not None and row.copied_at < fence):
        return Step.COPY
    if row.verified_at is None and not (back and row.channel.verify_by == StepBy.PERSON):
        return Step.VERIFY
    return None


def _by_program(row: MoveChannel) -> bool:
    """Return whether a program does the next step of a side channel."""
    by = row.channel.copy_by if row.copied_at is None else row.channel.verify_by
    return by != StepBy.PERSON


def channels_before_fence(move: TenantMigration) -> str:
    """Return which required side channels keep the fence from closing, in words; "" none."""
    return _owed(move, Step.COPY)


def channels_before_flip(move: TenantMigration) -> str:
    """Return which required side channels keep the placement from flipping, in words; "" none."""
    return _owed(move, Step.COPY, Step.VERIFY)


def _owed(move: TenantMigration, *steps: Step) -> str:
    rows = [(row, channel_step(move, row)) for row in listed_channels(move)]
    owed = [(row, step) for row, step in rows if row.channel.required and step in steps]
    return "; ".join(channel_words(row, step) for row, step in owed if step is not None)


def channel_words(row: MoveChannel, step: Step) -> str:
    """Say what a side channel waits for."""
    done = {Step.COPY: "copied", Step.VERIFY: "verified"}[step]
    by = row.channel.copy_by if step is Step.COPY else row.channel.verify_by
    who = " by a person" if by == StepBy.PERSON else ""
    why = f" ({row.detail.rstrip('.')})" if row.failures and row.detail else ""
    return f"side channel {row.channel} to be {done}{who}{why}"


def open_channels(move: TenantMigration) -> list[MoveChannel]:
    """Return the side channels of a move that are not green: in SOAK, optional ones."""
    rows = listed_channels(move)
    return [row for row in rows if row.state != ChannelState.GREEN]
