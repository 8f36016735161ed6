"""Side channels: what is kept beside sessions has a copy step and a verify step, as rows.

Who registers one says how each step is done: a callable, a command, or a person who checks it off.
A move lists its tenant's channels in PREPARE; `run` carries out what programs do, `check_off` is
for people. What a step must do to be safe when it is killed: docs/side-channels.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import F, Q

from durable.driver import Clock, holding
from durable.errors import Refused
from migrations_app import copying, queries
from migrations_app.copying import Timer
from migrations_app.domain.channels import (
    Answer,
    ChannelState,
    Said,
    Step,
    StepBy,
    check_step,
)
from migrations_app.domain.phases import ENDED, FENCED, REVERSED, Phase
from migrations_app.models import MoveChannel, SideChannel, TenantMigration
from migrations_app.ports import channel as port
from migrations_app.preflight import may_call
from migrations_app.services import REASON_CHARACTERS, InvalidOption, NotNow, StalePage
from tenants import services as tenants
from tenants.domain.names import check_name
from tenants.models import Agent, Tenant

# After a failing call the next one waits so long (seconds); inside the fence the shortest.
PAUSES = (2, 5, 15, 30, 60)
# What a person's word changes: a call that ends behind it is void.
SAID = ("copied_at", "verified_at", "cursor")
# Phases that no check-off can change any more.
OVER = ENDED | {Phase.OFFBOARD, Phase.REOPEN}


class ChannelTaken(Refused):
    """The tenant or agent has a side channel of this name."""


class OneOwner(Refused):
    """A side channel belongs to one agent or to one tenant."""

    status = 422


# --- registering --------------------------------------------------------------------------------


@transaction.atomic
def register(
    *,
    tenant: Tenant | None = None,
    agent: Agent | None = None,
    name: str,
    about: str = "",
    required: bool = True,
    copy_by: str = StepBy.PERSON,
    copy_step: str = "",
    verify_by: str = StepBy.PERSON,
    verify_step: str = "",
    by: str,
    reason: str = "",
    now: datetime,
) -> SideChannel:
    """Register a side channel of one tenant, or of every tenant of an agent; return it.

    Raises OneOwner, BadName, BadStep, NotAllowed (a step that nothing here may call),
    ChannelTaken.
    """
    if (tenant is None) == (agent is None):
        raise OneOwner("A side channel belongs to an agent or to a tenant: name one of them.")
    channel = SideChannel(
        tenant=tenant,
        agent=agent,
        name=name,
        about=about,
        required=required,
        copy_by=copy_by,
        copy_step=copy_step,
        verify_by=verify_by,
        verify_step=verify_step,
    )
    _save(channel)
    _audit(channel, "register", by=by, reason=reason, after=_told(channel), now=now)
    return channel


@transaction.atomic
def edit(
    channel: SideChannel, *, by: str, reason: str, now: datetime, **changes: Any
) -> SideChannel:
    """Change what a side channel is or how its steps are done; return it.

    `changes` are its columns but for whose it is. A live move's next call goes by them. Raises
    what `register` does, ReasonMissing, NotNow.
    """
    tenants.check_reason(reason)
    row = _locked(channel)
    before = _told(row)
    for name, value in changes.items():
        setattr(row, name, value)
    _save(row)
    _audit(row, "edit", by=by, reason=reason, before=before, after=_told(row), now=now)
    return row


@transaction.atomic
def remove(channel: SideChannel, *, by: str, reason: str, now: datetime) -> SideChannel:
    """Take a side channel off the list of every later move; live ones wait for it no longer.

    Its row stays, for the moves that had it. Raises ReasonMissing, NotNow.
    """
    tenants.check_reason(reason)
    row = _locked(channel)
    row.removed_at = now
    row.save(update_fields=["removed_at"])
    _audit(row, "remove", by=by, reason=reason, before=_told(row), now=now)
    return row


def _locked(channel: SideChannel) -> SideChannel:
    row = SideChannel.objects.select_for_update(of=("self",)).get(pk=channel.pk)
    if row.removed_at is not None:
        raise NotNow(f"Side channel {row} was removed. Register it anew.")
    return row


def _save(channel: SideChannel) -> None:
    check_name(channel.name, what="side channel")
    _storable(channel.about, "What it is about")
    for what, by, step in (
        ("copy step", channel.copy_by, channel.copy_step),
        ("verify step", channel.verify_by, channel.verify_step),
    ):
        check_step(by, step, what=what)
        port.check(by, step, may_call())
    # The owner's row is held: of two at once the second sees the first.
    owner: Any = channel.agent or channel.tenant
    type(owner).objects.select_for_update(of=("self",)).get(pk=owner.pk)
    others = SideChannel.objects.filter(removed_at=None, agent=channel.agent, tenant=channel.tenant)
    if others.filter(name=channel.name).exclude(pk=channel.pk).exists():
        raise ChannelTaken(
            f"{owner} has a side channel {channel.name} already. Edit that one, or choose another"
            " name."
        )
    channel.save()


def _told(channel: SideChannel) -> dict[str, Any]:
    told = {name: getattr(channel, name) for name in EDITABLE}
    return {"agent": str(channel.agent or ""), "tenant": str(channel.tenant or ""), **told}


EDITABLE = (
    "name",
    "about",
    "required",
    "copy_by",
    "copy_step",
    "verify_by",
    "verify_step",
)


def _audit(channel: SideChannel, verb: str, **more: Any) -> None:
    tenants.audit(
        who=more.pop("by"), verb=f"channel.{verb}", subject=f"side channel {channel}", **more
    )


def _storable(text: str, what: str) -> None:
    if "\0" in text or len(text) > REASON_CHARACTERS:
        raise InvalidOption(f"{what} has up to {REASON_CHARACTERS:,} characters, none of them NUL.")


# --- what people check off ----------------------------------------------------------------------


def check_off(
    row: MoveChannel, *, step: str, note: str, by: str, now: datetime, seen: str | None = None
) -> MoveChannel:
    """Say that a step is done, and how; return the row.

    For a person's step, and for one of a program that a person has done instead. `seen` is the
    phase that the page showed. Raises ReasonMissing, NotNow, StalePage.
    """
    tenants.check_reason(note)
    with _checking(row, "check_off", step, note, by=by, now=now, seen=seen) as fresh:
        if step == Step.VERIFY and fresh.copied_at is None:
            raise NotNow(f"{fresh.channel} has not been copied: check its copy off first.")
        if fresh.verified_at is not None if step == Step.VERIFY else _copied(fresh):
            raise NotNow(f"The {step} step of {fresh.channel} is done already.")
        if step == Step.COPY:
            fresh.copied_at, fresh.cursor = now, ""
        else:
            fresh.verified_at = now
        fresh.by = by
    return fresh


def _copied(row: MoveChannel) -> bool:
    return row.copied_at is not None and queries.channel_step(row.move, row) is not Step.COPY


def uncheck(
    row: MoveChannel, *, step: str, note: str, by: str, now: datetime, seen: str | None = None
) -> MoveChannel:
    """Take back that a step is done; without its copy a check is void too. Return the row.

    A program's step is carried out again. Raises ReasonMissing, NotNow, StalePage.
    """
    tenants.check_reason(note)
    with _checking(row, "uncheck", step, note, by=by, now=now, seen=seen) as fresh:
        done = fresh.copied_at if step == Step.COPY else fresh.verified_at
        if done is None:
            raise NotNow(f"The {step} step of {fresh.channel} is not done.")
        if step == Step.COPY:
            fresh.copied_at, fresh.cursor = None, ""
        fresh.verified_at, fresh.by = None, ""
    return fresh


@contextmanager
def _checking(
    row: MoveChannel,
    verb: str,
    step: str,
    note: str,
    *,
    by: str,
    now: datetime,
    seen: str | None,
) -> Iterator[MoveChannel]:
    """One transaction around a person's word: lock the move, save the row, log, audit."""
    _storable(note, "A note")
    if step not in list(Step):
        raise InvalidOption(f"There is no step {step[:40]!r}. Choose one of: {', '.join(Step)}.")
    with transaction.atomic():
        # The move's row first, as a worker that settles a step does.
        move = TenantMigration.objects.select_for_update().get(pk=row.move_id)
        fresh = move.channels.select_related("channel").get(pk=row.pk)
        fresh.move = move
        if seen is not None and seen != move.phase:
            raise StalePage(
                f"The page showed {seen.upper()}; {move} is in {move.phase.upper()} by now."
                " Nothing was changed: look again."
            )
        if move.phase in OVER:
            raise NotNow(f"{move} is in {move.phase.upper()}: nothing is checked off any more.")
        before = _how_far(fresh)
        yield fresh
        fresh.detail, fresh.failures, fresh.next_at = note, 0, None
        fresh.state = _state(fresh)
        fresh.save()
        said = {"check_off": "checked off", "uncheck": "taken back"}[verb]
        words = f"{fresh.channel}: {step} {said}: {note}"
        move.events.create(at=now, who=by, was=move.phase, now=move.phase, note=words)
        tenants.audit(
            who=by,
            verb=f"channel.{verb}",
            subject=f"{move} {fresh.channel}",
            reason=note,
            before=before,
            after={"step": step, **_how_far(fresh)},
            now=now,
        )
        _wake(move, now)


def _wake(move: TenantMigration, now: datetime) -> None:
    """Let the move look at what it waits for at once, unless a worker is at it."""
    rows = TenantMigration.objects.filter(pk=move.pk)
    rows.update(version=F("version") + 1)
    idle = Q(settled=F("claim")) | Q(failures__gt=0)
    rows.filter(idle, due_at__isnull=False).update(due_at=now)


def _how_far(row: MoveChannel) -> dict[str, Any]:
    return {"state": row.state, "copied_at": row.copied_at, "verified_at": row.verified_at}


def _state(row: MoveChannel) -> ChannelState:
    if row.failures:
        return ChannelState.FAILED
    if row.copied_at is None:
        return ChannelState.OPEN
    return ChannelState.COPIED if row.verified_at is None else ChannelState.GREEN


# --- what programs do ---------------------------------------------------------------------------


def list_channels(move: TenantMigration) -> int:
    """Put the tenant's side channels on the move's list, each once; return how many are there.

    Inside the caller's `holding`, or by itself.
    """
    found = list(queries.channels_of(move.tenant))
    MoveChannel.objects.bulk_create(
        [MoveChannel(move=move, channel=channel) for channel in found], ignore_conflicts=True
    )
    return len(found)


def run(move: TenantMigration, *, timer: Timer, clock: Clock) -> bool:
    """Carry out the steps that programs have to do in the move's phase; return whether any was.

    Each is one call, of a third of the lease at most, inside the fence a sixth: longer work
    answers "again". A killed worker's call is made again, with the same cursor. A failing one is
    tried again after a pause that grows. False: nothing is due now, or all that is waits for a
    person.
    """
    if move.phase in (Phase.BACKFILL, Phase.SPLIT):
        # Registered since PREPARE, by somebody who noticed in time.
        with holding(move):
            list_channels(move)
    worked = False
    for row in queries.listed_channels(move):
        # One at least: what came before it in the step may have taken all of its time.
        if worked and timer.out:
            break
        step, now = queries.channel_step(move, row), clock()
        if step is None or _how(row, step)[0] == StepBy.PERSON:
            continue
        if row.next_at is not None and now < row.next_at:
            continue
        _carry_out(move, row, step, clock)
        worked = True
    return worked


def _how(row: MoveChannel, step: Step) -> tuple[str, str]:
    channel = row.channel
    if step is Step.COPY:
        return channel.copy_by, channel.copy_step
    return channel.verify_by, channel.verify_step


def _prefix(move: TenantMigration) -> str:
    """Return what a kept cursor begins with: one of the way back is only good inside that fence.

    No program's own begins with a line feed.
    """
    return f"\n{move.fence_version}\n" if move.phase in REVERSED else ""


def _cursor(move: TenantMigration, kept: str) -> str:
    prefix = _prefix(move)
    if kept.startswith(prefix or "\n") is not bool(prefix):
        return ""
    return kept.removeprefix(prefix)


def _carry_out(move: TenantMigration, row: MoveChannel, step: Step, clock: Clock) -> None:
    by, text = _how(row, step)
    began = clock()
    answer: Answer | None = None
    failure = ""
    try:
        answer = port.call(
            by,
            text,
            step,
            _context(move, row, step),
            may=may_call(),
            seconds=_seconds(move, began),
        )
    except Refused as refused:
        failure = str(refused)
    with holding(move) as locked:
        fresh = locked.channels.select_related("channel").get(pk=row.pk)
        if any(getattr(fresh, name) != getattr(row, name) for name in SAID):
            # A person has said something else meanwhile: theirs stands.
            return
        note = _settle(move, fresh, step, answer, failure, began, clock())
        fresh.state = _state(fresh)
        fresh.save()
        if note:
            words = f"{fresh.channel}: {note}"
            now = clock()
            locked.events.create(
                at=now, who="mover", was=locked.phase, now=locked.phase, note=words
            )
        TenantMigration.objects.filter(pk=move.pk).update(version=F("version") + 1)


def _settle(
    move: TenantMigration,
    row: MoveChannel,
    step: Step,
    answer: Answer | None,
    failure: str,
    began: datetime,
    now: datetime,
) -> str:
    """Put what came of a call into the row; return what the log should say of it, if anything."""
    if answer is None or answer.said is Said.DIFFERS:
        detail = failure if answer is None else f"It differs: {answer.words or 'copied again'}"
        told = "" if detail == row.detail and row.failures else f"{step} failed: {detail}"
        pause = PAUSES[0 if move.phase in FENCED else min(row.failures, len(PAUSES) - 1)]
        row.detail, row.failures = detail, min(row.failures + 1, 30_000)
        row.next_at = now + timedelta(seconds=pause)
        if answer is not None:
            # From the start: nobody knows what is missing.
            row.copied_at, row.verified_at, row.cursor = None, None, ""
        return told
    row.failures, row.next_at, row.by = 0, None, ""
    row.detail = answer.words
    if answer.said is Said.AGAIN:
        kept = _prefix(move) + answer.cursor
        if kept == row.cursor:
            # It waits for something: asked again at once it would only be asked again.
            row.next_at = now + timedelta(seconds=PAUSES[0])
        row.cursor = kept
        return ""
    if step is Step.VERIFY:
        row.verified_at = began
        return f"verified{_of(answer)}"
    # From before the call: what changed while it ran is not known to have gone over.
    row.copied_at = began
    # A cursor left at the end: to be called once more inside the fence. The way back has one.
    row.cursor = "" if move.phase in REVERSED else answer.cursor
    if row.channel.verify_by != StepBy.PERSON:
        row.verified_at = None
    return f"copied{_of(answer)}"


def _of(answer: Answer) -> str:
    return f", {answer.words}" if answer.words else ""


def _seconds(move: TenantMigration, now: datetime) -> float:
    """Return how long a call may take: below a worker's time limit, and not past the deadline.

    Inside the fence a step has compared sessions before, and its time is half.
    """
    longest = settings.DURABLE_LEASE_SECONDS / 3
    if move.phase in FENCED and move.deadline_at is not None:
        return max(1.0, min(longest / 2, (move.deadline_at - now).total_seconds()))
    return longest


def _context(move: TenantMigration, row: MoveChannel, step: Step) -> dict[str, str]:
    """Return what a step is told. docs/side-channels.md is the contract."""
    sides = copying.way(move)
    return {
        "step": step,
        "move": str(move),
        "channel": row.channel.name,
        "tenant": move.tenant.slug,
        "app_name": move.tenant.app_name,
        "from_store": sides.from_store.key,
        "from_cell": sides.from_cell.slug,
        "to_store": sides.to_store.key,
        "to_cell": sides.to_cell.slug,
        "phase": move.phase,
        "cursor": _cursor(move, row.cursor),
        "since": _since(move),
    }


def _since(move: TenantMigration) -> str:
    """Return from when on a way back has something to bring back; "" on the way forward."""
    if move.phase not in REVERSED:
        return ""
    if move.split_placement_version is not None:
        # Both served from then on, whatever fences were closed and left since.
        split = move.tenant.placement_changes.get(placement_version=move.split_placement_version)
        return split.at.isoformat()
    cutovers = [fence["fence_opened_at"] for fence in move.past_fences if not fence["back"]]
    return str(cutovers[-1]) if cutovers and cutovers[-1] else ""
