"""Celery's view of moves: ids in, one call. Names say what runs."""

from __future__ import annotations

import time

from celery import Task, shared_task

from durable import driver
from durable.clock import database_now
from migrations_app import rehearsing
from migrations_app.domain.phases import PROMPT, Phase
from migrations_app.steps import machine

# One message walks a row this long before it asks for another, so that the steps of a
# fence follow each other without a trip through the broker. Well below the hard limit.
WALK_SECONDS = 4.0
# A shorter wait is slept through by a walk on `prompt`: a fence never waits for a message.
NAP_SECONDS = 0.25


def queue(phase: str) -> str:
    """Return which queue's worker takes a step of this phase."""
    return "prompt" if phase in PROMPT else "bulk"


def enqueue(pk: int, phase: str, seconds: float = 0.0) -> None:
    """Hand a move to a worker of its phase's queue. A hint: the row says what is due."""
    task = {Phase.BACKFILL: copy, Phase.OFFBOARD: copy, Phase.VERIFY: verify}.get(
        Phase(phase), step
    )
    # A hint that is late is worth nothing: the sweep has asked again by then.
    task.apply_async((pk,), queue=queue(phase), countdown=seconds or None, expires=seconds + 60)


def _walk(task: Task, pk: int) -> None:
    """Advance a move while it has something to do at once and its phase is this queue's."""
    # Where the message came from: a row has often gone on since it was sent.
    own = (task.request.delivery_info or {}).get("routing_key") or "prompt"
    hints: list[tuple[str, float]] = []
    walking = machine(lambda _, phase, seconds: hints.append((phase, seconds)))
    until = time.monotonic() + WALK_SECONDS
    while driver.advance(walking, pk, clock=database_now):
        if not hints:
            return
        phase, seconds = hints.pop()
        nap = seconds <= (NAP_SECONDS if own == "prompt" else 0.0)
        # A rollback that was stopped leads from a fence to SOAK, which still has it to open.
        stays = queue(phase) == own or (own == "prompt" and phase == Phase.SOAK)
        if not stays or not nap or time.monotonic() >= until:
            enqueue(pk, phase, seconds)
            return
        time.sleep(seconds)


@shared_task(name="migrations_app.copy", bind=True)
def copy(self: Task, pk: int) -> None:
    """Copy, or delete after the soak."""
    _walk(self, pk)


@shared_task(name="migrations_app.verify", bind=True)
def verify(self: Task, pk: int) -> None:
    """Compare inside the fence."""
    _walk(self, pk)


@shared_task(name="migrations_app.step", bind=True)
def step(self: Task, pk: int) -> None:
    """Every other phase."""
    _walk(self, pk)


@shared_task(name="migrations_app.scratch")
def scratch() -> None:
    """Remove what rehearsals left that were killed."""
    rehearsing.sweep(now=database_now())


@shared_task(name="migrations_app.due")
def due() -> None:
    """Ask for every move that is due: the safety net under lost messages."""
    for pk, phase in driver.due(machine(enqueue), now=database_now()):
        enqueue(pk, phase)
