"""How hard BACKFILL works: its pace, read afresh at each step, and the relief of a slow store."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime

from durable.machine import Wait
from migrations_app import copying
from migrations_app.copying import Meter
from migrations_app.domain import throttle
from migrations_app.domain.throttle import Judged, Looked, Speed
from migrations_app.models import TenantMigration
from migrations_app.ports.base import START, SessionStore
from tenants.models import DirtyLine

# The small look at each side: the first so many sessions, the same ones every time, each time
# the quickest of a few. Whoever else uses this machine slows one of them, a loaded store all.
# A move that has copied fewer is over before anybody notices it.
LOOK_SESSIONS, LOOKS = 50, 3


def pace(move: TenantMigration, *, now: datetime) -> float | None:
    """Return the sessions per second of the step that begins; None is as fast as it goes.

    A finish time spreads the first pass. Later ones carry over what changed since: somebody
    who asked for the fence must not wait for a time that was chosen for the whole copy.
    """
    if move.finish_by is None:
        return move.pace_per_second
    if move.passes > 1:
        return None
    return throttle.pace_now(
        left=move.todo - move.done,
        per_second=None,
        window_seconds=(move.finish_by - now).total_seconds(),
    )


def settled(
    move: TenantMigration,
    source: SessionStore,
    target: SessionStore,
    meter: Meter,
    outcome: Wait,
    *,
    per_second: float | None,
    worked: float,
) -> Wait:
    """Add to what a copying step settles: its rest, the relief and why, and the sample's line.

    `worked` is how long the step took (seconds), `per_second` its pace. A fence never comes here.
    """
    # A repair that somebody asked for is copied beside the sweep, and is no chunk of it.
    if not meter.count.get("chunk"):
        return outcome
    copied = outcome.changes["copied"]
    before = Speed.of(move.speed)
    judged = Judged(move.ease, before, thin=True)
    if copied >= LOOK_SESSIONS:
        judged = throttle.judge(before, move.ease, _looked(move, source, target, meter))
    because = move.eased_why
    if not judged.thin:
        because = throttle.why(judged, source=str(move.source_store), target=str(move.target_store))
    notes = [outcome.note, throttle.news(move.ease, judged.ease, because)]
    speed = judged.speed
    if move.passes == 1:
        speed = throttle.sampled(speed, meter.count["copy"], meter.spent["copy"])
        if before.sample_rate is None and speed.sample_rate is not None:
            notes.append(_sample_line(move, speed, copied))
    rest = throttle.rest_seconds(worked, judged.ease)
    if per_second is not None:
        rest = max(rest, meter.changed / per_second - worked)
    return replace(
        outcome,
        seconds=max(rest, 0.0),
        note="; ".join(note for note in notes if note),
        changes={
            **outcome.changes,
            "ease": judged.ease,
            "eased_why": because,
            "speed": speed.as_json(),
        },
    )


def _looked(
    move: TenantMigration, source: SessionStore, target: SessionStore, meter: Meter
) -> Looked:
    """Look at both sides: the source answers a page, the target that and one small write."""

    def look_at_target() -> None:
        target.page(START, LOOK_SESSIONS)
        # Taken already by this claim: again it is one short transaction, which a disk may hold up.
        copying.take_written(move, target)

    return Looked(
        chunks=meter.count["chunk"],
        sessions=meter.count["copy"],
        seconds=meter.spent["copy"],
        source_seconds=_quickest(lambda: source.page(START, LOOK_SESSIONS)),
        target_seconds=_quickest(look_at_target),
    )


def _quickest(look: Callable[[], object]) -> float:
    """Return how long the quickest of a few looks takes (seconds)."""
    took = []
    for _ in range(LOOKS):
        begun = time.perf_counter()
        look()
        took.append(time.perf_counter() - begun)
    return min(took)


def _sample_line(move: TenantMigration, speed: Speed, copied: int) -> str:
    """Say what the sample means, with as many changes as traffic so far leads to."""
    served = DirtyLine.objects.filter(tenant=move.tenant, at__gte=move.pass_started_at)
    changed = served.values("user_id", "session_id").distinct().count()
    return throttle.sample_words(
        speed.sample_sessions,
        speed.sample_seconds,
        sessions=move.todo,
        # Sessions that change twice are copied once, so that this is the most there will be.
        changed=min(move.todo, round(changed * move.todo / max(1, copied))),
    )
