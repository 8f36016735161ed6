"""Moves as they look in each phase, for pages: rows with the article's numbers, made at once."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.hashers import make_password
from django.contrib.auth.models import Group, User
from django.db import transaction

from capacity.models import IsolationRun, SharedResource, UsageDay, UsageMinute
from migrations_app import ports
from migrations_app.domain.channels import StepBy
from migrations_app.domain.mismatch import Looks
from migrations_app.domain.phases import ENDED, FENCED, REVERSED, Mode, Phase
from migrations_app.domain.quote import quote
from migrations_app.models import (
    ArtifactReference,
    ArtifactVersion,
    Mismatch,
    MoveChannel,
    MoveEvent,
    Sample,
    SessionStamp,
    SideChannel,
    TenantMigration,
)
from tenants import services
from tenants.domain.fence import Accepts
from tenants.domain.roles import Role
from tenants.models import (
    Cell,
    Counter,
    Grants,
    PolicyEntry,
    RuntimeInstance,
    Scope,
    Store,
    Tenant,
)
from tests import make

PASSWORD = "correct horse battery staple"
SESSIONS, USERS, CHANGED = 12_600, 1_840, 900
CHECKS = (
    ("Source store-eu1-a", "PostgreSQL 15.18, 12,600 sessions of 1,840 users"),
    ("Target store-eu1-b", "PostgreSQL 15.18, 0 sessions of 0 users"),
    ("Kinds", "both PostgreSQL"),
    ("Room on store-eu1-b", "nothing of support.acme there"),
    ("Values", "nothing that the target can't hold"),
    ("Quota of cell-eu1-b", "verified by ada"),
    ("Region", "store-eu1-b and cell-eu1-b are both in eu1"),
    ("Instances", "all 3 of cell-eu1-b opened store-eu1-b"),
    ("Two places", "a word written to the target is not seen at the source"),
    ("Guard", "closing triggers stand on both sides"),
    ("Ids", "the target keeps the ids it is given"),
)
# How long each phase took, in seconds, and what its end says.
TOOK = {
    Phase.PREPARE: (141.0, "Prepared: 12,600 sessions of 1,840 users"),
    Phase.BACKFILL: (13_356.0, "Fence closes: expected 1m 33s, at most 1m 48s"),
    Phase.DRAIN: (38.0, "Drained, the source's store is closed"),
    Phase.DELTA: (23.1, "900 sessions copied again"),
    Phase.VERIFY: (22.6, "12,600 sessions, 252,000 events equal on both sides"),
    Phase.TARGET: (0.2, "Placement version 4: acme lives on store-eu1-b"),
    Phase.SOAK: (259_200.0, "The soak is over"),
    Phase.OFFBOARD: (42.0, "12,600 sessions deleted at store-eu1-a"),
    Phase.REVERSE_DRAIN: (12.4, "Drained, store-eu1-b is closed"),
    Phase.REVERSE_DELTA: (6.2, "240 sessions copied again"),
    Phase.REVERSE_VERIFY: (18.9, "12,640 sessions of 1,851 users are equal on both sides"),
    Phase.REVERSE_TARGET: (0.3, "Placement version 5: acme lives on store-eu1-a"),
}
LINE = (
    Phase.PREPARE,
    Phase.BACKFILL,
    Phase.DRAIN,
    Phase.DELTA,
    Phase.VERIFY,
    Phase.TARGET,
    Phase.SOAK,
    Phase.OFFBOARD,
    Phase.DONE,
)


BACK = (
    Phase.REVERSE_DRAIN,
    Phase.REVERSE_DELTA,
    Phase.REVERSE_VERIFY,
    Phase.REVERSE_TARGET,
    Phase.ROLLED_BACK,
)
# How much of its soak was over when somebody rolled back (seconds).
SOAKED = 39_600.0
TOUCHED = 240


@cache
def _hashed() -> str:
    """Hash once: it takes a second, as it should."""
    return make_password(PASSWORD)


def person(name: str, role: Role | None) -> User:
    """Make somebody who can sign in, in the group of `role`."""
    user = User.objects.create(username=name, password=_hashed())
    if role is not None:
        user.groups.add(Group.objects.get(name=role.value))
    return user


def instances(
    cell: Cell, names: Sequence[str], *, now: datetime, stores: Sequence[str] = ()
) -> list[RuntimeInstance]:
    """Make live instances of a cell that have applied its present policy."""
    epoch = Counter.objects.values_list("epoch", flat=True).get()
    cell.refresh_from_db()
    rows = []
    for name in names:
        row = services.join(
            cell,
            name=name,
            build="2026.3.1",
            boot=secrets.token_hex(8),
            longest_turn_seconds=120.0,
            longest_tool_seconds=45.0,
            plugins=["tenant-policy"],
            stores=list(stores),
            replaces=None,
            now=now - timedelta(hours=6),
        )
        said(row, at=now, epoch=epoch, version=cell.policy_version)
        rows.append(row)
    return rows


def said(
    row: RuntimeInstance,
    *,
    at: datetime,
    version: int,
    epoch: str = "",
    in_flight: dict[str, int] | None = None,
) -> None:
    """Let an instance have reported at a moment."""
    row.polled_at = row.reported_at = at
    row.lease_until = at + timedelta(minutes=15)
    row.applied_epoch = epoch or row.applied_epoch
    row.applied_version = version
    row.in_flight = in_flight or {}
    row.ready = True
    row.save()


def move(
    cast: make.Cast, phase: Phase, *, now: datetime, tenant: Tenant | None = None, **columns: Any
) -> TenantMigration:
    """Make a move that is in `phase`, some way through it, as an engine would have left it."""
    tenant = tenant or cast.acme
    into = columns.pop("into", 220.0 if phase == Phase.BACKFILL else 15.3)
    ago, entered = _times(phase, now, into)
    placement = tenant.placement
    row = TenantMigration.objects.create(
        **{
            "tenant": tenant,
            "source_cell": placement.cell,
            "source_store": placement.store,
            "target_cell": cast.other_cell,
            "target_store": cast.other_store,
            "phase": phase,
            "started_at": now - ago,
            "started_by": "operator-2",
            "reason": f"{tenant} gets a store of its own",
            "phase_since": entered[phase],
            "due_at": None if phase in ENDED else now,
            **_columns(phase, entered, now),
            **columns,
        }
    )
    _log(row, phase, entered)
    if phase in REVERSED:
        with transaction.atomic():
            services.place(
                tenant,
                cell=row.target_cell,
                store=row.target_store,
                by=row.started_by,
                reason=f"{row}: {row.reason}",
                now=entered[Phase.SOAK],
            )
    if phase in FENCED:
        close_entry(row)
    if entered.get(Phase.BACKFILL):
        _samples(row, entered[Phase.BACKFILL], entered.get(Phase.DRAIN, now))
    return row


@transaction.atomic
def split_move(
    cast: make.Cast, phase: Phase, *, now: datetime, tenant: Tenant | None = None, **columns: Any
) -> TenantMigration:
    """Make a split move in which both cells serve, in SPLIT or in a fence there or back."""
    tenant = tenant or cast.acme
    began = now - timedelta(minutes=40)
    row = move(
        cast,
        Phase.SPLIT,
        now=now,
        tenant=tenant,
        **{
            "mode": Mode.SPLIT,
            "split_version": services.publish(tenant, cast.cell, accepts="existing"),
            "split_at": began,
            "born": 37,
            "stage": "ready",
            "passes": 4,
            "pass_started_at": now - timedelta(seconds=9),
            "pass_ended_at": now - timedelta(seconds=4),
            "done": SESSIONS,
            "merged": [
                {"user_id": "u-00371", "key": "tier", "taken": "source"},
                {"user_id": None, "key": "banner", "taken": "target"},
            ],
            **columns,
        },
    )
    row.split_placement_version = services.split(
        tenant, cell=row.target_cell, store=row.target_store, by="adam", reason="", now=began
    )
    if phase in FENCED:
        back = phase in REVERSED
        home = row.target_cell if back else row.source_cell
        row.came_from = Phase.SPLIT if back else ""
        row.fence_version = services.publish(tenant, home, accepts="none")
        row.fence_closed_at = now - timedelta(seconds=12)
        row.deadline_at = now + timedelta(seconds=90)
        row.stage = ""
        row.events.create(
            at=row.fence_closed_at, who="mover", was=row.phase, now=phase, note="The fence closes"
        )
        row.phase, row.phase_since = phase, row.fence_closed_at
    row.save()
    return row


def guard_stores(move: TenantMigration, *, folder: Path, environment: pytest.MonkeyPatch) -> None:
    """Give both stores of a move a real file, under the guard row that the move made there.

    Every instance opened both.
    """
    stores = (move.source_store, move.target_store)
    RuntimeInstance.objects.update(stores=[store.key for store in stores])
    for store in stores:
        variable = store.address_from.removeprefix("env:")
        environment.setenv(variable, f"sqlite:///{folder}/{store.key}.db")
        with ports.open_store(
            store.kind,
            store.address_from,
            app_name=move.tenant.app_name,
            move=move.pk,
            claim=move.claim,
        ) as port:
            port.provision()
            port.adopt(None, mover=False, agents=store == move.target_store)


def close_entry(row: TenantMigration) -> None:
    """Let the tenant's policy entry be the closed fence's."""
    home = row.target_cell if row.phase in REVERSED else row.source_cell
    entry = PolicyEntry.objects.get(tenant=row.tenant, cell=home)
    entry.accepts, entry.version = Accepts.NONE, row.fence_version or entry.version
    entry.save()


def _times(phase: Phase, now: datetime, into: float) -> tuple[timedelta, dict[Phase, datetime]]:
    if phase in BACK:
        before = (*LINE[: LINE.index(Phase.SOAK) + 1], *BACK[: BACK.index(phase)])
    else:
        before = LINE[: LINE.index(phase)] if phase in LINE else LINE[:2]
    took = {done: TOOK[done][0] for done in before}
    if phase in BACK:
        took[Phase.SOAK] = SOAKED
    total = sum(took.values()) + (0.0 if phase in (Phase.DONE, Phase.ROLLED_BACK) else into)
    at, entered = now - timedelta(seconds=total), {}
    for done in before:
        entered[done] = at
        at += timedelta(seconds=took[done])
    entered[phase] = at
    return timedelta(seconds=total), entered


def _columns(phase: Phase, entered: dict[Phase, datetime], now: datetime) -> dict[str, Any]:
    order = [*LINE, Phase.REOPEN, Phase.ABORTED]
    # What the way back finds is a move that has soaked; a split one has been copied.
    stands = {Phase.SPLIT: Phase.BACKFILL} | dict.fromkeys(BACK, Phase.SOAK)
    past = order.index(stands.get(phase, phase))
    found: dict[str, Any] = {"version": 10}
    if phase == Phase.PREPARE:
        greens = [{"name": name, "ok": True, "detail": detail} for name, detail in CHECKS[:6]]
        detail = "not yet between such stores: practise one on an internal tenant first"
        advice = {"name": "Rollback practised", "ok": None, "detail": detail}
        return found | {"checks": [*greens, advice]}
    found |= {
        "checks": [{"name": name, "ok": True, "detail": detail} for name, detail in CHECKS],
        "sessions": SESSIONS,
        "users": USERS,
        "interrupted": 3,
        "stamps_prove": True,
        "guarded": True,
        "passes": 1,
        "pass_started_at": entered.get(Phase.BACKFILL),
        "todo": SESSIONS,
        "done": 7_412,
        "copied": 7_412,
        "compared": 7_300,
        "changed": 7_412,
        "copy_rate": 40.0,
        "verify_rate": 40.0,
        "shared_rate": 400.0,
        "scan_seconds": 0.27,
        "mark_seconds": 0.3,
        "stage": "copy",
    }
    if past >= order.index(Phase.DRAIN) and phase not in (Phase.REOPEN, Phase.ABORTED):
        closed = entered[Phase.DRAIN]
        found |= {
            "passes": 3,
            "pass_ended_at": closed - timedelta(seconds=4),
            "changed_last": 32,
            "copied": SESSIONS + 932,
            "compared": SESSIONS + 932,
            "stage": "",
            "done": 0,
            "todo": 0,
            "drain_requested_at": closed - timedelta(seconds=9),
            "drain_requested_by": "operator-2",
            "fence_closed_at": closed,
            "fence_version": 7,
            "deadline_at": closed + timedelta(seconds=150),
            "changed_at_drain": CHANGED,
            "quote": quote(
                changed=CHANGED,
                compare=CHANGED,
                users=214,
                running_seconds=45.0,
                copy_rate=40.0,
                verify_rate=40.0,
                shared_rate=400.0,
                scan_seconds=1.9,
            ).as_json(),
        }
    if phase == Phase.VERIFY:
        found |= {"done": 8_568, "todo": SESSIONS, "stage": "sessions"}
    if phase == Phase.DELTA:
        found |= {"done": 5_200, "todo": SESSIONS, "stage": "copy", "changed": 371}
    if past >= order.index(Phase.DELTA) and Phase.DELTA in entered:
        found |= {"drained_at": entered[Phase.DELTA], "store_closed_at": entered[Phase.DELTA]}
    if past >= order.index(Phase.SOAK) and Phase.SOAK in entered:
        found |= {
            "fence_opened_at": entered[Phase.SOAK],
            "placement_version": 4,
            "soak_until": entered[Phase.SOAK] + timedelta(hours=72),
            "stage": "",
            "touched": TOUCHED,
            "touched_at": now - timedelta(seconds=20),
        }
    if phase in BACK:
        found |= _way_back(phase, entered, now, found)
    if phase == Phase.OFFBOARD:
        found |= {"done": 4_100, "todo": SESSIONS, "deleted": 4_100}
    if phase == Phase.DONE:
        found |= {"deleted": SESSIONS, "ended_at": now}
    if phase == Phase.ABORTED:
        found |= {"ended_at": now, "stage": "clean"}
    return found


def _way_back(
    phase: Phase, entered: dict[Phase, datetime], now: datetime, forward: dict[str, Any]
) -> dict[str, Any]:
    """Return the columns of a rollback; the forward fence is one of the past."""
    closed = entered[Phase.REVERSE_DRAIN]
    times = {name: forward[name].isoformat() for name in ("fence_closed_at", "fence_opened_at")}
    drained = entered.get(Phase.REVERSE_DELTA)
    found: dict[str, Any] = {
        "past_fences": [{"back": False, "quote": forward["quote"], **times}],
        "rollback_requested_by": "operator-1",
        "rollback_reason": "answers are slow since the cutover",
        "touched_at": closed - timedelta(seconds=31),
        "quote": quote(
            changed=TOUCHED,
            compare=TOUCHED,
            users=214,
            running_seconds=12.0,
            copy_rate=40.0,
            verify_rate=40.0,
            shared_rate=400.0,
            scan_seconds=1.9,
        ).as_json(),
        "fence_closed_at": closed,
        "fence_version": 9,
        "deadline_at": closed + timedelta(seconds=150),
        "changed_at_drain": TOUCHED,
        "drained_at": drained,
        "store_closed_at": drained,
        "fence_opened_at": None,
    }
    if phase == Phase.REVERSE_DELTA:
        found |= {"done": 5_200, "todo": SESSIONS, "stage": "copy"}
    if phase == Phase.REVERSE_VERIFY:
        found |= {"done": 8_568, "todo": SESSIONS, "stage": "sessions"}
    if phase == Phase.ROLLED_BACK:
        found |= {"fence_opened_at": now, "back_placement_version": 5, "ended_at": now}
    return found


def _log(row: TenantMigration, phase: Phase, entered: dict[Phase, datetime]) -> None:
    events = [
        MoveEvent(
            subject=row,
            at=row.started_at,
            who="operator-2",
            was=Phase.PREPARE,
            now=Phase.PREPARE,
            note=f"Started: {row.reason}",
        )
    ]
    names = list(entered)
    for was, to in pairwise(names):
        note = (
            TOOK[was][1]
            if to in (*LINE, *BACK)
            else "The fence's budget is over: reopening on the source"
        )
        if to == Phase.REVERSE_DRAIN:
            note = "Rolling back: expected 27.6s, at most 1m 15s"
        events.append(
            MoveEvent(subject=row, at=entered[to], who="mover", was=was, now=to, note=note)
        )
        if to == Phase.BACKFILL:
            note = "Pass 1 begins: 12,600 sessions"
            events.append(
                MoveEvent(subject=row, at=entered[to], who="mover", was=to, now=to, note=note)
            )
    if phase == Phase.ABORTED:
        last = entered.pop(phase)
        events[-1] = MoveEvent(
            subject=row,
            at=last - timedelta(seconds=4),
            who="mover",
            was=Phase.BACKFILL,
            now=Phase.REOPEN,
            note="Not drained after 60s: 3 turns in flight, waiting for eu1-a-2",
        )
        events.append(
            MoveEvent(
                subject=row,
                at=last,
                who="mover",
                was=Phase.REOPEN,
                now=phase,
                note="Nothing is left on store-eu1-b",
            )
        )
    MoveEvent.objects.bulk_create(events)


def _samples(row: TenantMigration, began: datetime, ended: datetime) -> None:
    """Draw a first pass, then in the later ones how many sessions they found changed."""
    seconds = (ended - began).total_seconds()
    plan = [(1, 0.0, max(0.1, 1 - 12 / seconds), max(0, row.done - 480))]
    if row.passes > 1:
        plan = [(1, 0.0, 0.8, SESSIONS), (2, 0.82, 0.95, CHANGED), (3, 0.96, 1.0, 32)]
    rows, copied = [], 0
    for number, begins, ends, most in plan:
        for index in range(25):
            share = index / 24
            at = began + timedelta(seconds=seconds * (begins + (ends - begins) * share))
            done = int(SESSIONS * share) if number > 1 else int(most * share)
            rows.append(_sample(row, at, number, done, copied + int(most * share)))
            rows[-1].changed = int(most * share)
        copied += most
    if row.phase == Phase.BACKFILL and row.stage == "copy":
        for back in (8, 6, 4, 2, 0):
            done = row.done - back * 40
            rows.append(_sample(row, ended - timedelta(seconds=back), row.passes, done, done))
    Sample.objects.bulk_create(rows)


def _sample(row: TenantMigration, at: datetime, passes: int, done: int, copied: int) -> Sample:
    return Sample(
        move=row,
        at=at,
        phase=Phase.BACKFILL,
        passes=passes,
        done=done,
        todo=SESSIONS,
        copied=copied,
        changed=done,
    )


def mismatches(row: TenantMigration, *, now: datetime) -> list[Mismatch]:
    """Make the article's three kinds of difference, open and blocking."""
    said_so = (
        ("u-01184", "", "user", "user:tier differs", Looks.OLD_SHARED_WON),
        ("u-00371", "b204e6d8", "events", "event 41 of 44 is missing", Looks.FENCE_LEAK),
        ("u-01602", "10ce55fa", "events", "none of 12 events", Looks.EMPTY_COPY),
    )
    return _differ(row, said_so, now - timedelta(seconds=12))


def many_mismatches(row: TenantMigration, count: int, *, now: datetime) -> list[Mismatch]:
    """Make open mismatches of a kind, a session each."""
    said_so = (
        (f"u-{at % 40:05}", f"s-{at:05}", "events", f"event {at} is missing", Looks.FENCE_LEAK)
        for at in range(count)
    )
    return _differ(row, said_so, now)


def late_writes(row: TenantMigration, *, now: datetime) -> list[Mismatch]:
    """Make two writes at the closed source, after the cutover."""
    text = "written at the closed source after the cutover"
    said_so = ((f"u-{at}", f"s-{at}", "events", text, Looks.LATE_WRITE) for at in range(2))
    return _differ(row, said_so, now)


def _differ(
    row: TenantMigration, said_so: Iterable[tuple[str, str, str, str, Looks]], now: datetime
) -> list[Mismatch]:
    return Mismatch.objects.bulk_create(
        Mismatch(
            move=row,
            user_id=user,
            session_id=session,
            part=part,
            first_difference=text,
            looks_like=looks,
            source_digest=secrets.token_hex(32),
            target_digest=secrets.token_hex(32),
            found_at=now,
            found_in=row.phase,
        )
        for user, session, part, text, looks in said_so
    )


def channels(row: TenantMigration) -> list[MoveChannel]:
    """Register two side channels of the move's tenant, and one of its agent; list them."""
    tenant = row.tenant
    person, command = StepBy.PERSON, StepBy.COMMAND
    made = [
        SideChannel.objects.create(
            tenant=tenant,
            name="vectors",
            about="The index that answers are looked up in",
            copy_by=command,
            copy_step="copy-vectors",
            verify_by=command,
            verify_step="check-vectors",
        ),
        SideChannel.objects.create(
            tenant=tenant, name="logs", required=False, copy_by=person, verify_by=person
        ),
        SideChannel.objects.create(
            agent=tenant.agent, name="cache", copy_by=person, verify_by=person
        ),
    ]
    return [MoveChannel.objects.create(move=row, channel=channel) for channel in made]


def artifacts(row: TenantMigration, count: int) -> None:
    """Note versions of a user's report: the first number is gone, so all others have moved up."""
    Store.objects.filter(pk=row.source_store_id).update(artifacts_from="env:ARTIFACTS_A")
    Store.objects.filter(pk=row.target_store_id).update(artifacts_from="env:ARTIFACTS_B")
    ArtifactVersion.objects.bulk_create(
        ArtifactVersion(
            move=row,
            user_id="u-00371",
            name="user:report.pdf",
            source_version=number + 1,
            target_version=number,
            source_digest="a" * 64,
            target_digest="a" * 64,
            size=2_048,
        )
        for number in range(count)
    )
    ArtifactReference.objects.bulk_create(
        ArtifactReference(
            move=row,
            user_id="u-00371",
            session_id=f"s-{number:05}",
            place=f"event {number + 1} actions.artifact_delta.user:report.pdf",
            name="user:report.pdf",
            source_version=number + 1,
            target_version=number,
        )
        for number in range(count)
    )
    row.artifacts, row.artifact_bytes, row.artifacts_apart = count, count * 2_048, True
    row.artifact_rate, row.artifact_look_rate = 31.5, 900.0
    row.save()


def stamps(row: TenantMigration, count: int) -> None:
    """Note sessions as copied."""
    SessionStamp.objects.bulk_create(
        SessionStamp(
            move=row,
            user_id=f"u-{index:05}",
            session_id=f"s-{index:05}",
            source_stamp="a",
            target_stamp="b",
        )
        for index in range(count)
    )


# What an instance says of its cache of Runners, and what it may use of a tenant's limits.
RUNNERS = {
    "size": 1_990,
    "limit": 2_000,
    "idle_seconds": 1_800.0,
    "evicted": {"size": 412, "idle": 30, "generation": 3, "gone": 1},
    "builds": 2_436,
    "build_ms": {"p50": 140.0, "p99": 2_300.0},
    "bytes": 1_572_864,
}
SHARE = {
    "runs_per_second": 0.25,
    "max_concurrent_runs": 5,
    "tokens_per_minute": None,
    "safe_runs_per_second": 0.125,
    "safe_max_concurrent_runs": 2,
    "safe_tokens_per_minute": None,
    "tokens_left": 1_200_000,
}


def used(cast: make.Cast, *, now: datetime) -> None:
    """Let acme have limits, a day of usage and refusals, and its instances caches and breakers."""
    Scope.objects.filter(tenant=cast.acme).update(
        max_concurrent_runs=10,
        runs_per_second=0.5,
        daily_token_budget=30_000_000,
        max_model_calls_per_run=12,
        allowed_tools=["lookupAccount", "a_tool_with_a_name_that_is_" + "long_" * 18],
    )
    minute = now.replace(second=0, microsecond=0)
    UsageMinute.objects.bulk_create(
        UsageMinute(
            tenant=cast.acme,
            minute=minute - timedelta(minutes=ago),
            turns=30,
            tokens=240_000,
            refused={"rate": 20 + ago % 7},
        )
        for ago in range(60)
    )
    UsageDay.objects.bulk_create(
        UsageDay(
            tenant=cast.acme,
            day=now.date() - timedelta(days=ago),
            turns=3_037,
            tokens=23_040_000 - ago * 500_000,
            refused={} if ago else {"rate": 2_361, "concurrency": 212, "draining": 3},
        )
        for ago in range(30)
    )
    for row in RuntimeInstance.objects.filter(cell=cast.cell):
        row.in_flight = {"acme": 11, "bolt": 2}
        row.runners = RUNNERS
        row.breakers = {
            "https://model.example/" + "x" * 90: {"state": "open", "shared_pool_429": 41},
            "model-b": {"state": "half_open", "own_quota_429": 2},
        }
        row.grants_number, row.grants_until = 8, now + timedelta(seconds=30)
        row.save()
        Grants.objects.create(instance=row, shares={"acme": list(SHARE.values())}, made_at=now)
    cast.cell.refresh_from_db()
    cast.cell.document = {"prewarm": [f"tenant-with-a-long-name-{n}" for n in range(40)]}
    cast.cell.save()
    SharedResource.objects.filter(name="Result caches").update(control="", shown_by="z" * 300)
    results = [
        {"name": "Flood", "asked": "a", "measured": "p95 2.4s " + "y" * 90, "bar": "b", "held": bad}
        for bad in (True, False)
    ]
    IsolationRun.objects.create(
        began_at=now, ended_at=now, by="olga", build="2026.3.1", results=results, passed=False
    )
