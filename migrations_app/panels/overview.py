"""What the strip and the overview show of moves."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import Exists, OuterRef

from migrations_app import queries
from migrations_app.domain.phases import FENCED, NO_RETURN, REVERSED, Mode, Phase
from migrations_app.domain.verbs import where, words
from migrations_app.models import MoveEvent, TenantMigration
from migrations_app.panels.progress import (
    late_writes_in_words,
    why_aborted,
    why_rolled_back,
    why_stopped,
)
from migrations_app.panels.seen import ENDED_VALUES, GRAVITY, Seen, all_live, moves, ways_out
from tenants.domain.words import Status, count, counted, elapsed
from tenants.panels import Attention

# An abort that nobody asked for is news for a day.
NEWS = timedelta(days=1)


@dataclass(frozen=True)
class MoveSignals:
    blocked: int = 0
    aborted: int = 0
    fenced: int = 0
    paused: int = 0
    waiting: int = 0
    moving: int = 0
    soaking: int = 0


def signals(*, now: datetime) -> MoveSignals:
    """Count the live moves by what an operator would call them. A fenced one may be blocked too."""
    found = dict.fromkeys(("blocked", "aborted", "fenced", "paused", "waiting", "moving"), 0)
    soaking = 0
    for seen in all_live():
        glyph = seen.status(now).glyph
        if glyph == "soak":
            soaking += 1
            continue
        if glyph == "warn":
            glyph = "moving"
        found[glyph] = found.get(glyph, 0) + 1
        if seen.fenced and glyph != "fenced":
            found["fenced"] += 1
    found["aborted"] += len(_aborted_by_themselves(now))
    return MoveSignals(soaking=soaking, **found)


def _aborted_by_themselves(now: datetime) -> list[TenantMigration]:
    """Return moves that gave up in the last day, unless their tenant moved again since."""
    newer = TenantMigration.objects.filter(tenant=OuterRef("tenant"), pk__gt=OuterRef("pk"))
    gave_up = moves().filter(phase=Phase.ABORTED, ended_at__gte=now - NEWS, abort_requested_at=None)
    return list(gave_up.exclude(Exists(newer)).order_by("-id"))


def attention(*, now: datetime) -> list[Attention]:
    """Return what a person should look at among the moves; the caller sorts it with the rest."""
    items = [item for seen in all_live() if (item := _attention(seen, now))]
    items += [_gave_up(move) for move in _aborted_by_themselves(now)]
    return items


def _attention(seen: Seen, now: datetime) -> Attention | None:
    move, phase = seen.move, seen.phase
    status = seen.status(now)
    name = f"{move} {move.tenant}"
    since = move.phase_since
    review = 0
    if status.glyph == "blocked":
        if seen.failed_checks:
            first = seen.failed_checks[0]
            title = f"{name} can't begin: {counted(len(seen.failed_checks), 'check')} red"
            text = f"{first['name']}: {first['detail']}"
        elif seen.stuck:
            title = f"{name} fails in {phase.upper()}, {counted(move.failures, 'time')} in a row"
            text = move.failure
        elif phase == Phase.SOAK:
            review = seen.late_writes
            late = counted(review, "late write")
            title = f"{name}: {late} at the closed {move.source_store}"
            text = late_writes_in_words(seen)
            rows = queries.unsettled(queries.late_writes(move)).order_by("found_at")
            since = rows.values_list("found_at", flat=True).first() or since
        else:
            review = seen.open_mismatches
            where = "back to its source" if seen.going_back else "to its target"
            title = f"{name} cannot switch {where}"
            text = f"{counted(review, 'session differs', 'sessions differ')}."
    elif status.glyph == "aborted":
        title = f"{name} is on its way out"
        if seen.going_back:
            title = f"{name} stops rolling back"
        by = move.abort_requested_by
        text = f"Asked for by {by}: {move.abort_reason}" if by else "It gave up by itself."
    elif status.glyph == "fenced":
        title, text = _fenced_words(seen, name)
    elif status.glyph == "paused":
        title = f"{name} is paused in {phase.upper()}"
        text = f"By {move.pause_requested_by}: {move.pause_reason}"
        since = move.pause_requested_at or since
    elif status.glyph == "warn":
        title = f"{name} tries a failed step again in {phase.upper()}"
        text = move.failure
    elif seen.rollback_waits:
        title = f"{name} is being rolled back"
        if seen.both_serve:
            title = f"{name} is on its way out of its split"
        text = move.waiting_for and f"Waits for {move.waiting_for}."
        text = text or why_rolled_back(move)
        since = move.rollback_requested_at or since
    elif seen.ready:
        title = f"{name} waits for you to start the {'split' if seen.split else 'drain'}"
        text = (
            f"Only its cell changes; it is served {seen.at_source} until then."
            if seen.of_cell
            else f"{counted(move.sessions, 'session')} copied; the last pass found"
            f" {count(move.changed_last)} changed."
        )
        since = move.pass_ended_at or since
    elif seen.soak_over(now) and seen.owes_confirmation:
        title = f"{name} waits for the typed confirmation to delete its source"
        text = f"The copy on {move.source_store} stays closed and whole until then."
        since = move.soak_until or since
    elif status.glyph == "waiting" and seen.waiting_for:
        title = f"{name} waits in {phase.upper()}"
        text = f"Waits for {move.waiting_for}."
    elif (stopped := _stopped_by_itself(move, now)) is not None:
        title = f"{name} stopped rolling back by itself"
        if phase == Phase.SPLIT:
            title = f"{name} left its fence by itself and serves on both sides"
        text = why_stopped(move)
        since, status = stopped.at, Status("warn", "Stopped")
    else:
        return None
    if seen.fenced and move.fence_closed_at is not None:
        text = f"{text} {_fence_sentence(move, now)}".strip()
    return Attention(
        # Whoever refuses turns now is worse than whoever does not.
        rank=GRAVITY[status.glyph] - (0.5 if seen.fenced else 0),
        status=Status(status.glyph, status.word),
        title=title,
        text=text,
        since=since,
        kind="move",
        key=str(move.pk),
        label=str(move),
        way_out=_way_out(seen),
        destroys=not seen.going_back,
        review=review,
    )


def _fenced_words(seen: Seen, name: str) -> tuple[str, str]:
    phase = seen.phase.upper()
    if seen.opening_again:
        return f"{name} is being opened {seen.at_opens} again", ""
    if seen.going_back:
        return f"{name} is being rolled back, in {phase}", f"{why_rolled_back(seen.move)}."
    if seen.waits_for_flip:
        return f"{name} waits for you to flip it to its target", "Every session is equal."
    return f"{name} has its fence closed, in {phase}", ""


def _way_out(seen: Seen) -> str:
    """Return the words of the button that takes the way out; "" where there is none."""
    asked = seen.move.abort_requested_at is not None or (seen.both_serve and seen.rollback_waits)
    if seen.phase not in ways_out(seen.move) or asked:
        return ""
    return f"{words('abort', seen.phase, seen.move.mode)}…"


def _stopped_by_itself(move: TenantMigration, now: datetime) -> MoveEvent | None:
    """Return the event with which a fence gave up in the last day; None: a person stopped it."""
    if move.phase not in (Phase.SOAK, Phase.SPLIT) or not move.past_fences:
        return None
    left = FENCED if move.phase == Phase.SPLIT else REVERSED
    back = move.events.filter(was__in=left, now=move.phase, at__gte=now - NEWS).first()
    if back is None or back.note.startswith("Abort"):
        return None
    return back


def _fence_sentence(move: TenantMigration, now: datetime) -> str:
    assert move.fence_closed_at is not None
    closed = elapsed((now - move.fence_closed_at).total_seconds())
    users = f"all {counted(move.users, 'user')} get" if move.users else "new turns get"
    if move.mode == Mode.SPLIT:
        users = "turns of its side get"
    text = f"Fence closed {closed}; {users} retry-after."
    runs = move.phase not in NO_RETURN and move.phase != Phase.SOAK
    if move.deadline_at is not None and runs:
        left = elapsed(max(0.0, (move.deadline_at - now).total_seconds()))
        text = f"{text} It reopens by itself in {left}."
    return text


def _gave_up(move: TenantMigration) -> Attention:
    return Attention(
        rank=GRAVITY["aborted"],
        status=Status("aborted", "Aborted"),
        title=f"{move} {move.tenant} aborted by itself",
        text=why_aborted(move)
        or f"{move.tenant} is served {where(move.mode, move.source_cell, move.source_store)}.",
        since=move.ended_at or move.phase_since,
        kind="move",
        key=str(move.pk),
        label=str(move),
    )


@dataclass(frozen=True)
class Upcoming:
    at: datetime
    move: TenantMigration
    text: str


def next_up(*, now: datetime) -> list[Upcoming]:
    """Return what will happen by itself, soonest first: fences that may close, soaks that end."""
    items = []
    rows = moves().exclude(phase__in=ENDED_VALUES)
    for move in rows.filter(fence_closed_at=None, fence_not_before__gt=now):
        items.append(Upcoming(move.fence_not_before or now, move, "may close its fence"))
    soaking = rows.filter(phase=Phase.SOAK, soak_until__gt=now, rollback_requested_at=None)
    for move in soaking:
        if move.mode == Mode.CELL:
            text = f"soak ends; it stays in {move.target_cell}"
        elif move.offboard_automatically or move.offboard_confirmed_at is not None:
            text = f"soak ends; its copy on {move.source_store} is deleted"
        else:
            text = "soak ends; deleting waits for a typed confirmation"
        items.append(Upcoming(move.soak_until or now, move, text))
    return sorted(items, key=lambda item: item.at)[:8]
