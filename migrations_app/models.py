"""A move of one tenant, what it copied, and what did not come out equal."""

from __future__ import annotations

import json
from typing import Any

from django.db import models
from django.db.models import Lookup, Q

from durable.models import Durable, Event
from migrations_app.domain.channels import ChannelState, StepBy
from migrations_app.domain.phases import ENDED, Mode, Phase
from tenants.models import Agent, Cell, Store, Tenant

ENDED_VALUES = sorted(p.value for p in ENDED)


@models.CharField.register_lookup
class AnyOf(Lookup):  # type: ignore[type-arg]
    """`session_id__anyof=[...]`: in a list that goes over as one value.

    With `__in` each of a page's 2,000 names is a parameter of its own, and making that statement
    took longer than answering it.
    """

    lookup_name = "anyof"
    prepare_rhs = False

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, list[Any]]:
        column, params = self.process_lhs(compiler, connection)
        if connection.vendor == "postgresql":
            return f"{column} = ANY(%s)", [*params, list(self.rhs)]
        return f"{column} IN (SELECT value FROM json_each(%s))", [
            *params,
            json.dumps(list(self.rhs)),
        ]


class TenantMigration(Durable):
    """A move of one tenant from one (cell, store) to another; `mv-147` on screens."""

    tenant = models.ForeignKey(Tenant, models.PROTECT, related_name="moves")
    mode = models.CharField(max_length=10, default=Mode.FENCE, choices=[(m, m) for m in Mode])
    phase = models.CharField(max_length=20, default=Phase.PREPARE, choices=[(p, p) for p in Phase])
    source_cell = models.ForeignKey(Cell, models.PROTECT, related_name="+")
    source_store = models.ForeignKey(Store, models.PROTECT, related_name="+")
    target_cell = models.ForeignKey(Cell, models.PROTECT, related_name="+")
    target_store = models.ForeignKey(Store, models.PROTECT, related_name="+")
    started_at = models.DateTimeField()
    started_by = models.CharField(max_length=150)
    reason = models.TextField(blank=True, default="")
    # NULL while it lives.
    ended_at = models.DateTimeField(null=True, blank=True)

    # --- what the operator chose -------------------------------------------------------
    # False: BACKFILL waits, pass after pass, until somebody says "close the fence".
    automatic = models.BooleanField(default=False)
    # NULL: at once. Otherwise passes go on until then.
    fence_not_before = models.DateTimeField(null=True, blank=True)
    # The longest the fence may stay closed; past it the move aborts by itself.
    budget_seconds = models.FloatField(default=150.0)
    # The longest that running turns are waited for: longest tool time-out plus a margin.
    drain_bound_seconds = models.FloatField(default=60.0)
    soak_seconds = models.FloatField(default=72 * 3600.0)
    # Sessions per second in BACKFILL. NULL: as fast as both stores allow.
    pace_per_second = models.FloatField(null=True, blank=True)
    # When BACKFILL should be through: the pace follows from it. NULL: `pace_per_second` rules.
    finish_by = models.DateTimeField(null=True, blank=True)
    # True: VERIFY, all equal, waits for a person's word before TARGET; the deadline holds.
    flip_by_hand = models.BooleanField(default=False)
    # False: OFFBOARD waits for a typed confirmation.
    offboard_automatically = models.BooleanField(default=False)
    # Split mode: the source's sessions count as idle after so long without a write, and are
    # waited for so long at most, from the split's beginning.
    idle_seconds = models.FloatField(default=600.0)
    idle_bound_seconds = models.FloatField(default=4 * 3600.0)
    # A practice run of the whole move, there and back, on an internal tenant.
    rehearsal = models.BooleanField(default=False)
    # The phase before which the move pauses by itself, once. "": none, or it has.
    pause_before = models.CharField(max_length=20, blank=True, default="")

    # --- requests of people (abort and pause are in Durable) ---------------------------
    # NULL: nobody has said "close the fence" yet.
    drain_requested_at = models.DateTimeField(null=True, blank=True)
    drain_requested_by = models.CharField(max_length=150, blank=True, default="")
    # NULL: the typed confirmation is still owed.
    offboard_confirmed_at = models.DateTimeField(null=True, blank=True)
    offboard_confirmed_by = models.CharField(max_length=150, blank=True, default="")

    # NULL: with `flip_by_hand`, the word for TARGET is still owed.
    flip_requested_at = models.DateTimeField(null=True, blank=True)
    flip_requested_by = models.CharField(max_length=150, blank=True, default="")
    # NULL: nobody has asked to roll back, or the way back has begun and taken the request on.
    rollback_requested_at = models.DateTimeField(null=True, blank=True)
    # Who asked last, and why; kept for pages.
    rollback_requested_by = models.CharField(max_length=150, blank=True, default="")
    rollback_reason = models.TextField(blank=True, default="")

    # NULL: REOPEN cleans the target. Otherwise a person ends it although the target is unreachable.
    leave_requested_at = models.DateTimeField(null=True, blank=True)
    leave_requested_by = models.CharField(max_length=150, blank=True, default="")

    # --- what PREPARE found ------------------------------------------------------------
    # [{"name", "ok": true|false|null, "detail"}], in order; null is "not checked yet".
    checks = models.JSONField(default=list)
    # [Finding as a dict]: values worth naming before anything is copied.
    findings = models.JSONField(default=list)
    sessions = models.PositiveBigIntegerField(default=0)
    users = models.PositiveBigIntegerField(default=0)
    # Sessions whose last invocation was cut short; copied as they are.
    interrupted = models.PositiveBigIntegerField(default=0)
    # Writers at the source older than its guard row: DRAIN must not begin while one lives.
    older_writers = models.JSONField(default=list)

    # Whether equal stamps prove an unchanged session (not on SQLite: an edit in place is
    # invisible). NULL: PREPARE has not looked.
    stamps_prove = models.BooleanField(null=True, blank=True)
    # Both guard rows are this move's: from here on the way out has something to undo.
    guarded = models.BooleanField(default=False)

    # The target cell's policy_version under which its instances know the tenant, with every turn
    # refused, so that they could build its runner. NULL: not announced yet.
    announced_version = models.PositiveBigIntegerField(null=True, blank=True)

    # --- where the work is -------------------------------------------------------------
    # What it waits for, in a person's words; "" while it works.
    waiting_for = models.TextField(blank=True, default="")
    # Which sweep of a phase runs; each phase's own words, "" at its start.
    stage = models.CharField(max_length=20, blank=True, default="")
    # The last key that the running sweep has done, in the store's own order.
    cursor_user = models.CharField(max_length=128, blank=True, default="")
    cursor_session = models.CharField(max_length=128, blank=True, default="")
    # Counts from 1 in BACKFILL; the first pass copies all.
    passes = models.PositiveIntegerField(default=0)
    # When the running pass began, in SOAK the running look. NULL: none has.
    pass_started_at = models.DateTimeField(null=True, blank=True)
    # When the last whole pass ended. NULL: none has.
    pass_ended_at = models.DateTimeField(null=True, blank=True)
    # Sessions done and to do in the running sweep; what the progress bar shows.
    done = models.PositiveBigIntegerField(default=0)
    todo = models.PositiveBigIntegerField(default=0)
    # Sessions that the running pass found changed, and the last whole one.
    changed = models.PositiveBigIntegerField(default=0)
    changed_last = models.PositiveBigIntegerField(default=0)
    # Totals over the move.
    copied = models.PositiveBigIntegerField(default=0)
    compared = models.PositiveBigIntegerField(default=0)
    deleted = models.PositiveBigIntegerField(default=0)

    # Sessions on the target that were written, born or deleted since the cutover, by SOAK's last
    # look, and when that began. NULL: not looked at yet.
    touched = models.PositiveBigIntegerField(null=True, blank=True)
    touched_at = models.DateTimeField(null=True, blank=True)
    # Share of the time in which BACKFILL works; below 1 it leaves a slow store alone in between.
    ease = models.FloatField(default=1.0)
    # Which side is slow and how much, in a person's words; "" at full speed.
    eased_why = models.TextField(blank=True, default="")
    # What BACKFILL remembers of its own speed: a throttle.Speed. {}: it has copied nothing.
    speed = models.JSONField(default=dict)

    # --- measured while it ran, for the quote; NULL: not measured yet ------------------
    copy_rate = models.FloatField(null=True, blank=True)  # sessions/s
    verify_rate = models.FloatField(null=True, blank=True)  # sessions/s, both sides at once
    scan_seconds = models.FloatField(null=True, blank=True)  # reading the source's stamps once
    mark_seconds = models.FloatField(null=True, blank=True)  # one high-water mark of the source
    shared_rate = models.FloatField(null=True, blank=True)  # users/s

    artifact_rate = models.FloatField(null=True, blank=True)  # versions/s, copied and read back
    artifact_look_rate = models.FloatField(null=True, blank=True)  # versions/s, listed twice
    memory_rate = models.FloatField(null=True, blank=True)  # sessions/s

    # --- artifacts and memory: how much there is, counted while it goes over -----------
    # Whether PREPARE told the places of both sides' artifacts apart. False: they are one, and
    # nothing is copied or removed. NULL: not looked at, or one side keeps none.
    artifacts_apart = models.BooleanField(null=True, blank=True)
    artifacts = models.PositiveBigIntegerField(default=0)  # versions at the source
    artifact_bytes = models.PositiveBigIntegerField(default=0)
    remembered = models.PositiveBigIntegerField(default=0)  # sessions in the target's memory

    # --- the split -----------------------------------------------------------------------
    # The source cell's policy_version that says `accepts: existing`. NULL: no split yet.
    split_version = models.PositiveBigIntegerField(null=True, blank=True)
    # When that was published, or its last fence was left; the bound on waiting counts from here.
    split_at = models.DateTimeField(null=True, blank=True)
    # Counter.placement_version that names both sides. NULL: nothing was born on the target yet.
    split_placement_version = models.PositiveBigIntegerField(null=True, blank=True)
    # Since when no session of the source has changed. NULL: not known, or one has just changed.
    quiet_since = models.DateTimeField(null=True, blank=True)
    # Keys of shared state that both sides changed, and whose change stood: {"user_id", "key",
    # "taken": "source" or "target"}, the first of them.
    merged = models.JSONField(default=list)
    # Sessions born on the target, at the last look. NULL: not looked at yet.
    born = models.PositiveBigIntegerField(null=True, blank=True)
    # Where the way back began, and leads if it is stopped: soak or split. "" on the way forward.
    came_from = models.CharField(max_length=20, blank=True, default="")

    # --- the fence ---------------------------------------------------------------------
    # NULL: still open. Kept afterwards: the actual beside the estimate.
    fence_closed_at = models.DateTimeField(null=True, blank=True)
    # The source cell's policy_version that says `accepts: none`.
    fence_version = models.PositiveBigIntegerField(null=True, blank=True)
    # fence_closed_at + budget; moved once at most, with a reason.
    deadline_at = models.DateTimeField(null=True, blank=True)
    deadline_held_by = models.CharField(max_length=150, blank=True, default="")
    # When every instance had acknowledged with nothing in flight. NULL: not proven.
    drained_at = models.DateTimeField(null=True, blank=True)
    # When the store itself began to refuse agents. NULL: it is open.
    store_closed_at = models.DateTimeField(null=True, blank=True)
    # The ports' `Mark` of the closed store, added up by DELTA's sweep; in SOAK the source's.
    mark = models.CharField(max_length=128, blank=True, default="")
    # On the way back, when `mark` is the target's: the source's as SOAK knew it.
    source_mark = models.CharField(max_length=128, blank=True, default="")
    changed_at_drain = models.PositiveBigIntegerField(null=True, blank=True)
    # The quote at the moment of closing (seconds), part by part, for the table beside the actual.
    quote = models.JSONField(default=dict)
    fence_opened_at = models.DateTimeField(null=True, blank=True)
    # Counter.placement_version that TARGET published. NULL: routers read the source.
    placement_version = models.PositiveBigIntegerField(null=True, blank=True)
    # Counter.placement_version that REVERSE_TARGET published. NULL: it has not.
    back_placement_version = models.PositiveBigIntegerField(null=True, blank=True)
    # Earlier fences of this move, oldest first; the columns above are the last one's.
    # [{"back": bool, "fence_closed_at", "fence_opened_at", "quote"}], times as ISO text.
    past_fences = models.JSONField(default=list)
    soak_until = models.DateTimeField(null=True, blank=True)
    # Sessions that OFFBOARD left because they are not what was recorded.
    left_behind = models.PositiveBigIntegerField(default=0)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["tenant"],
                condition=~Q(phase__in=ENDED_VALUES),
                name="one_live_move_per_tenant",
            ),
            models.CheckConstraint(
                condition=Q(phase__in=sorted(p.value for p in Phase)), name="move_known_phase"
            ),
            models.CheckConstraint(
                condition=Q(phase__in=ENDED_VALUES, due_at__isnull=True)
                | (~Q(phase__in=ENDED_VALUES) & Q(due_at__isnull=False)),
                name="move_ended_means_never_due",
            ),
        ]

    @property
    def label(self) -> str:
        """Such as "mv-147"."""
        return f"mv-{self.pk}"

    def __str__(self) -> str:
        return self.label


class MoveEvent(Event):
    """One line of a move's log."""

    subject = models.ForeignKey(TenantMigration, models.CASCADE, related_name="events")


class SessionStamp(models.Model):
    """One session that a move copied, or is about to: also the list of what we wrote."""

    move = models.ForeignKey(TenantMigration, models.CASCADE, related_name="stamps")
    user_id = models.CharField(max_length=128)
    session_id = models.CharField(max_length=128)
    # The stamps of both sides in the transactions of the copy.
    # Empty: noted before its chunk was written, and the chunk is not known to be whole.
    source_stamp = models.CharField(max_length=120, blank=True, default="")
    target_stamp = models.CharField(max_length=120, blank=True, default="")
    # When both sides, at these stamps, were equal by digest. NULL: not compared since the copy.
    compared_at = models.DateTimeField(null=True, blank=True)
    # Born on the target of a split and carried back out of it: served at the source from then on.
    carried_back = models.BooleanField(default=False)
    # The stamp of the read side whose session the written side's memory has. "": it has none.
    memory_stamp = models.CharField(max_length=120, blank=True, default="")

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["move", "session_id", "user_id"], name="one_stamp_per_session"
            )
        ]


class Mismatch(models.Model):
    """One part of one session, or of a user's or the app's shared state, that differs."""

    move = models.ForeignKey(TenantMigration, models.CASCADE, related_name="mismatches")
    # Empty for the app's shared state.
    user_id = models.CharField(max_length=128, blank=True, default="")
    # Empty for shared state.
    session_id = models.CharField(max_length=128, blank=True, default="")
    # Empty but for part `artifact`: its name.
    artifact = models.TextField(blank=True, default="")
    # events, state, user, app, missing (not on the target), extra (only on the target), artifact
    # or value (one that the target can't hold, so that the session was left out).
    part = models.CharField(max_length=10)
    # Event index and path, or key, and both values, in a person's words.
    first_difference = models.TextField()
    # The failure that it looks like, from domain.mismatch.Looks.
    looks_like = models.CharField(max_length=30)
    source_digest = models.CharField(max_length=64, blank=True, default="")
    target_digest = models.CharField(max_length=64, blank=True, default="")
    found_at = models.DateTimeField()
    found_in = models.CharField(max_length=20)
    # NULL: nobody has asked for the repair.
    repair_requested_at = models.DateTimeField(null=True, blank=True)
    repair_requested_by = models.CharField(max_length=150, blank=True, default="")
    # True: the session changed after its copy, the next pass takes it along. Blocks nothing.
    transient = models.BooleanField(default=False)
    # NULL: nobody has said that this difference may stay. Void once a digest changes.
    accepted_at = models.DateTimeField(null=True, blank=True)
    accepted_by = models.CharField(max_length=150, blank=True, default="")
    accepted_reason = models.TextField(blank=True, default="")
    # NULL: it is still so, and blocks TARGET unless it is transient or accepted.
    resolved_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["id"]
        constraints = [
            models.UniqueConstraint(
                # One open row per session and per artifact: only its first difference is named.
                fields=["move", "session_id", "user_id", "artifact"],
                condition=Q(resolved_at__isnull=True),
                name="one_open_mismatch_per_session",
            )
        ]


class ArtifactVersion(models.Model):
    """One version of an artifact that a move copied, or is about to: its number on either side."""

    move = models.ForeignKey(TenantMigration, models.CASCADE, related_name="artifact_versions")
    user_id = models.CharField(max_length=128)
    # Empty for `user:` names, which a user's sessions share.
    session_id = models.CharField(max_length=128, blank=True, default="")
    # As both sides' services keep it, which is where they agree: "user:" names with that prefix.
    name = models.TextField()
    # google-adk counts from 0 and the number can't be chosen; gaps close on the way. On the side
    # where it is being written the number is a guess until that side's digest is there.
    source_version = models.PositiveIntegerField()
    target_version = models.PositiveIntegerField()
    # SHA-256 over bytes, type and metadata on each side. Empty: noted before it was written there,
    # and not known to be whole. They differ where a service changes what it is given.
    source_digest = models.CharField(max_length=64, blank=True, default="")
    target_digest = models.CharField(max_length=64, blank=True, default="")
    # What proves a version unchanged since its digest was taken. Empty: nothing does.
    source_stamp = models.CharField(max_length=120, blank=True, default="")
    target_stamp = models.CharField(max_length=120, blank=True, default="")
    size = models.PositiveBigIntegerField(default=0)  # bytes
    # The URI that this version is, where it is one: it may name a version too.
    link = models.TextField(blank=True, default="")

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["move", "user_id", "session_id", "name", "source_version"],
                name="one_line_per_artifact_version",
            )
        ]


class ArtifactReference(models.Model):
    """A state value or an event that names a version whose number changed with the move."""

    move = models.ForeignKey(TenantMigration, models.CASCADE, related_name="artifact_references")
    user_id = models.CharField(max_length=128, blank=True, default="")
    # Empty for shared state.
    session_id = models.CharField(max_length=128, blank=True, default="")
    # Such as "event 12 actions.artifact_delta" or "state key report": a place, never a value.
    place = models.TextField()
    name = models.TextField()
    source_version = models.PositiveIntegerField()
    target_version = models.PositiveIntegerField()

    class Meta:
        ordering = ["id"]


class SideChannel(models.Model):
    """Something kept beside sessions, by tenant: a vector index, a cache, logs, a memory."""

    # Whose: every tenant of the agent, or the one tenant. Exactly one of both.
    agent = models.ForeignKey(Agent, models.PROTECT, null=True, blank=True, related_name="channels")
    tenant = models.ForeignKey(
        Tenant, models.PROTECT, null=True, blank=True, related_name="channels"
    )
    name = models.CharField(max_length=100)
    # What it holds, and how a person would copy and check it.
    about = models.TextField(blank=True, default="")
    # True: TARGET waits until it is green. False: it may be checked off in SOAK.
    required = models.BooleanField(default=True)
    # How each step is done: a callable by dotted path, a command, or a person's check-off.
    copy_by = models.CharField(max_length=10, choices=[(b, b) for b in StepBy])
    copy_step = models.TextField(blank=True, default="")
    verify_by = models.CharField(max_length=10, choices=[(b, b) for b in StepBy])
    verify_step = models.TextField(blank=True, default="")
    # NULL: moves list it. Kept afterwards, for the moves that had it.
    removed_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["name", "id"]
        constraints = [
            models.CheckConstraint(
                condition=Q(agent__isnull=True, tenant__isnull=False)
                | Q(agent__isnull=False, tenant__isnull=True),
                name="a_channel_is_an_agents_or_a_tenants",
            )
        ]

    def __str__(self) -> str:
        return self.name


class MoveChannel(models.Model):
    """How far one side channel is in one move."""

    move = models.ForeignKey(TenantMigration, models.CASCADE, related_name="channels")
    channel = models.ForeignKey(SideChannel, models.PROTECT, related_name="+")
    state = models.CharField(max_length=10, default=ChannelState.OPEN)
    # What its last step said: a count, an error, a person's note.
    detail = models.TextField(blank=True, default="")
    # What an unfinished step left to go on with; its own words.
    cursor = models.TextField(blank=True, default="")
    # NULL: no step has run yet.
    copied_at = models.DateTimeField(null=True, blank=True)
    verified_at = models.DateTimeField(null=True, blank=True)
    # The person who checked it off; empty where a callable or command did.
    by = models.CharField(max_length=150, blank=True, default="")
    # NULL: due now. Otherwise when its step is tried again.
    next_at = models.DateTimeField(null=True, blank=True)
    # How often in a row its step has failed: the pause before the next try grows with it.
    failures = models.PositiveSmallIntegerField(default=0)

    class Meta:
        ordering = ["id"]
        constraints = [
            models.UniqueConstraint(fields=["move", "channel"], name="one_line_per_channel")
        ]


class SharedBase(models.Model):
    """One user's shared state as both sides had it when a split began: what a merge goes by."""

    move = models.ForeignKey(TenantMigration, models.CASCADE, related_name="shared_base")
    # NULL for the app's.
    user_id = models.CharField(max_length=128, null=True, blank=True)  # noqa: DJ001
    # Key -> digest of its canonical value; never a value.
    keys = models.JSONField(default=dict)

    class Meta:
        indexes = [models.Index(fields=["move", "user_id"], name="base_of_a_user")]


class Rehearsal(models.Model):
    """What a practice run measured: the next quote of such a move goes by it. Append-only."""

    tenant = models.ForeignKey(Tenant, models.PROTECT, related_name="rehearsals")
    source_store = models.ForeignKey(Store, models.PROTECT, related_name="+")
    target_store = models.ForeignKey(Store, models.PROTECT, related_name="+")
    at = models.DateTimeField()
    by = models.CharField(max_length=150)
    # The whole move that was practised. NULL: a sample was copied under a scratch name.
    move = models.OneToOneField(
        TenantMigration, models.PROTECT, null=True, blank=True, related_name="figures"
    )
    sessions = models.PositiveBigIntegerField()
    events = models.PositiveBigIntegerField(null=True, blank=True)
    equal = models.BooleanField()
    # Why it is not equal, or what else a person should know.
    detail = models.TextField(blank=True, default="")
    copy_rate = models.FloatField(null=True, blank=True)  # sessions/s
    verify_rate = models.FloatField(null=True, blank=True)  # sessions/s
    shared_rate = models.FloatField(null=True, blank=True)  # users/s
    scan_seconds = models.FloatField(null=True, blank=True)
    mark_seconds = models.FloatField(null=True, blank=True)
    # Of a whole move: how long its fence was closed, and the way back's.
    fence_seconds = models.FloatField(null=True, blank=True)
    back_seconds = models.FloatField(null=True, blank=True)

    class Meta:
        ordering = ["-id"]


class Scratch(models.Model):
    """A name under which a rehearsal writes at a store: noted first, forgotten when all is gone."""

    store = models.ForeignKey(Store, models.PROTECT, related_name="scratches")
    app_name = models.CharField(max_length=128, unique=True)
    # Much older than a rehearsal takes: it was killed, and what it wrote is to be removed.
    at = models.DateTimeField()
    by = models.CharField(max_length=150)

    def __str__(self) -> str:
        return self.app_name

    @property
    def move(self) -> int:
        """The number of its guard row: no move has such a one."""
        return -int(self.pk)


class Sample(models.Model):
    """How far a move was at a moment: for its chart, its rate and its ETA."""

    move = models.ForeignKey(TenantMigration, models.CASCADE, related_name="samples")
    at = models.DateTimeField()
    phase = models.CharField(max_length=20)
    passes = models.PositiveIntegerField()
    done = models.PositiveBigIntegerField()
    todo = models.PositiveBigIntegerField()
    copied = models.PositiveBigIntegerField()
    # Sessions known to have changed since they were copied.
    changed = models.PositiveBigIntegerField()

    class Meta:
        ordering = ["id"]


class RestoreFinding(models.Model):
    """A tenant that the restored database and the stores disagree about: refused until settled."""

    tenant = models.ForeignKey(Tenant, models.PROTECT, related_name="restore_findings")
    # When the comparison last found it.
    found_at = models.DateTimeField()
    # What this database says, what the stores answered, and where they differ: for people.
    says = models.TextField()
    told = models.TextField()
    differs = models.TextField()
    # Keys of the stores at which a person may say that the tenant lives; empty: not to be said
    # before another store answers.
    homes = models.JSONField(default=list)
    # True: the one home is closed to agents, and saying so opens it.
    opens = models.BooleanField(default=False)
    # NULL: the tenant is refused, and machines stay stopped.
    resolved_at = models.DateTimeField(null=True, blank=True)
    resolved_by = models.CharField(max_length=150, blank=True, default="")
    reason = models.TextField(blank=True, default="")
    # What came of it, in a line; empty while it is open.
    outcome = models.TextField(blank=True, default="")

    class Meta:
        ordering = ["tenant__slug", "-id"]
        constraints = [
            models.UniqueConstraint(
                fields=["tenant"],
                condition=Q(resolved_at__isnull=True),
                name="one_open_finding_per_tenant",
            )
        ]

    def __str__(self) -> str:
        return f"{self.tenant}: {self.differs}"
