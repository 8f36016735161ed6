"""Who there is, where they live, what runtimes were told and what they said."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.db.models import Q

from tenants.domain.fence import SLOW_MS, Accepts, GoneWhy
from tenants.domain.names import StoreKind, Tier
from tenants.domain.roles import TokenRole


class Region(models.Model):
    slug = models.SlugField(max_length=40, unique=True)
    name = models.CharField(max_length=100)

    def __str__(self) -> str:
        return self.slug


class Cell(models.Model):
    """A full stack with its own slice of model quota, serving many tenants."""

    slug = models.SlugField(max_length=60, unique=True)
    region = models.ForeignKey(Region, models.PROTECT, related_name="cells")
    # Where gateways forward turns; empty when runtimes and clients share a process.
    url = models.CharField(max_length=200, blank=True, default="")
    # Serves deltas of the policy; raised by every publication. Never a cursor of anything else.
    policy_version = models.PositiveBigIntegerField(default=0)
    # The policy's `cell` part (shifts, regions), and the version that last changed it.
    document = models.JSONField(default=dict)
    document_version = models.PositiveBigIntegerField(default=0)
    # Model quota of the provider, tokens per minute. NULL: nobody has entered it.
    quota_tokens_per_minute = models.PositiveBigIntegerField(null=True, blank=True)
    # The same in requests per minute; whichever binds first bounds the cell. NULL: not entered.
    quota_requests_per_minute = models.PositiveBigIntegerField(null=True, blank=True)
    # NULL: the quota is only assumed, and no tenant may be placed here.
    quota_verified_at = models.DateTimeField(null=True, blank=True)
    quota_verified_by = models.CharField(max_length=150, blank=True, default="")
    # Until when runtimes of this cell poll at the fast cadence. NULL: nothing moves.
    # Set from the last backfill pass of a move until its fence opens.
    fast_until = models.DateTimeField(null=True, blank=True)

    def __str__(self) -> str:
        return self.slug


class Store(models.Model):
    """A database of sessions: of one region, of no cell, holding many tenants."""

    key = models.SlugField(max_length=60, unique=True)
    region = models.ForeignKey(Region, models.PROTECT, related_name="stores")
    # The port that opens it.
    kind = models.CharField(max_length=40, choices=[(k.value, k.value) for k in StoreKind])
    # Where its address comes from: "env:ACME_STORE_URL" or "file:/run/secrets/acme".
    # The address itself, which holds a password, is never in our database, logs or pages.
    address_from = models.CharField(max_length=200)
    # Where the google-adk artifact service beside the sessions is, by reference as above.
    # Empty: none, agents here keep no artifacts.
    artifacts_from = models.CharField(max_length=200, blank=True, default="")
    # The same for its memory service. Empty: none, or one that does not move with the store.
    memory_from = models.CharField(max_length=200, blank=True, default="")
    # What the last survey found, for people. NULL: never surveyed.
    survey = models.JSONField(null=True, blank=True)
    surveyed_at = models.DateTimeField(null=True, blank=True)

    def __str__(self) -> str:
        return self.key


class Agent(models.Model):
    """The part of an app name before the first dot; a shift is per agent."""

    # As long as an app name may be: one without a dot is all agent.
    slug = models.CharField(max_length=128, unique=True)

    def __str__(self) -> str:
        return self.slug


class Tenant(models.Model):
    slug = models.SlugField(max_length=60, unique=True)
    name = models.CharField(max_length=100)
    # Such as "support.acme": the identity of every session, never changed by a move.
    app_name = models.CharField(max_length=128, unique=True)
    agent = models.ForeignKey(Agent, models.PROTECT, related_name="tenants")
    # Whose midnight resets the daily budget (IANA name).
    time_zone = models.CharField(max_length=60, default="UTC")
    # Share of spare quota in max-min fairness; by plan.
    weight = models.FloatField(default=1.0)
    tier = models.CharField(
        max_length=10, default=Tier.POOLED, choices=[(t.value, t.value) for t in Tier]
    )
    created_at = models.DateTimeField(auto_now_add=True)
    # Ours, with no customer behind it: whole moves may be rehearsed on it.
    internal = models.BooleanField(default=False)
    # Limits that are tried beside those that hold: counted, not enforced. NULL: no trial.
    trial = models.ForeignKey("Scope", models.PROTECT, null=True, blank=True, related_name="+")
    # Until when turns are refused because the daily budget is used up: the tenant's midnight.
    # NULL, or past: it is not used up.
    budget_spent_until = models.DateTimeField(null=True, blank=True)
    # Until when the sessions that runtimes report as served are kept (DirtyLine).
    # NULL: never asked for. Past: over; what was kept is swept.
    tracked_until = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            models.CheckConstraint(condition=Q(weight__gte=0), name="tenant_weight_not_negative"),
            models.CheckConstraint(
                condition=Q(tier__in=[t.value for t in Tier]), name="tenant_known_tier"
            ),
        ]

    def __str__(self) -> str:
        return self.slug


class Counter(models.Model):
    """The one row of counters that span cells. Locked after the cells, until commit.

    Never a sequence: with one, 102 may commit before 101 and a reader skips 101 for ever.
    """

    id = models.PositiveSmallIntegerField(primary_key=True, default=1)
    # Random per database, replaced after a restore: versions are sent as "epoch.number".
    epoch = models.CharField(max_length=16)
    # Raised only when a tenant's cell, store or split changes.
    placement_version = models.PositiveBigIntegerField(default=0)
    # The placement feed's own cursor, raised by any change of a feed row.
    feed_version = models.PositiveBigIntegerField(default=0)

    class Meta:
        constraints = [models.CheckConstraint(condition=Q(id=1), name="one_counter_row")]

    def __str__(self) -> str:
        return f"{self.epoch}.{self.placement_version}"


class Halt(models.Model):
    """Whether every machine is stopped, because this database may be older than the stores.

    One row, written over; the audit keeps the earlier ones.
    """

    id = models.PositiveSmallIntegerField(primary_key=True, default=1)
    since = models.DateTimeField()
    # A person, or the instance whose word raised the alarm.
    by = models.CharField(max_length=150)
    why = models.TextField()
    # When `restored` last compared every tenant with the stores. NULL: not since the halt began.
    compared_at = models.DateTimeField(null=True, blank=True)
    # By then every lease that the lost database gave is over, and the turns begun under it.
    # NULL: the epoch has not been replaced since the halt began.
    leases_until = models.DateTimeField(null=True, blank=True)
    # NULL: machines are stopped.
    ended_at = models.DateTimeField(null=True, blank=True)
    ended_by = models.CharField(max_length=150, blank=True, default="")

    class Meta:
        constraints = [models.CheckConstraint(condition=Q(id=1), name="one_halt_row")]

    def __str__(self) -> str:
        return f"stopped since {self.since:%Y-%m-%d %H:%M:%S} UTC"


class Placement(models.Model):
    """Where a tenant lives now. Only a move's TARGET, or onboarding, changes it."""

    tenant = models.OneToOneField(Tenant, models.PROTECT, related_name="placement")
    cell = models.ForeignKey(Cell, models.PROTECT, related_name="placements")
    store = models.ForeignKey(Store, models.PROTECT, related_name="placements")
    # Where an applied plan wants it; routes nobody. NULL: no plan says otherwise.
    intended_cell = models.ForeignKey(
        Cell, models.PROTECT, null=True, blank=True, related_name="intended"
    )
    # The far side of a split, which takes what the home's store does not know. NULL: no split.
    split_cell = models.ForeignKey(
        Cell, models.PROTECT, null=True, blank=True, related_name="split_placements"
    )
    split_store = models.ForeignKey(
        Store, models.PROTECT, null=True, blank=True, related_name="split_placements"
    )
    # The Counter.placement_version that set cell, store and split.
    placement_version = models.PositiveBigIntegerField()
    # The Counter.feed_version that last changed this row for gateways.
    feed_version = models.PositiveBigIntegerField(db_index=True)

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=Q(split_cell__isnull=True, split_store__isnull=True)
                | Q(split_cell__isnull=False, split_store__isnull=False),
                name="a_split_is_a_cell_and_a_store",
            )
        ]

    def __str__(self) -> str:
        return f"{self.tenant} on {self.cell}"


class PlacementChange(models.Model):
    """One line of the placement history. Append-only."""

    tenant = models.ForeignKey(Tenant, models.PROTECT, related_name="placement_changes")
    cell = models.ForeignKey(Cell, models.PROTECT, related_name="+")
    store = models.ForeignKey(Store, models.PROTECT, related_name="+")
    placement_version = models.PositiveBigIntegerField()
    at = models.DateTimeField()
    by = models.CharField(max_length=150)
    reason = models.TextField(blank=True, default="")

    class Meta:
        ordering = ["-placement_version", "-id"]

    def __str__(self) -> str:
        return f"{self.tenant} on {self.cell} by {self.placement_version}"


class Scope(models.Model):
    """A version of one tenant's limits; the newest that is no trial holds. Append-only."""

    tenant = models.ForeignKey(Tenant, models.PROTECT, related_name="scopes")
    version = models.PositiveIntegerField()
    # NULL on a limit: no limit.
    max_concurrent_runs = models.PositiveIntegerField(null=True, blank=True)
    runs_per_second = models.FloatField(null=True, blank=True)
    daily_token_budget = models.PositiveBigIntegerField(null=True, blank=True)
    max_model_calls_per_run = models.PositiveIntegerField(null=True, blank=True)
    # NULL: every tool of the agent is allowed.
    allowed_tools = models.JSONField(null=True, blank=True)
    # True: the budget is looked at before every model call, not only before each turn.
    exact_budget = models.BooleanField(default=False)
    # As Tenant.tier and Tenant.weight were from this version on.
    tier = models.CharField(
        max_length=10, default=Tier.POOLED, choices=[(t.value, t.value) for t in Tier]
    )
    weight = models.FloatField(default=1.0)
    # True: it never held; what it would have refused is counted while Tenant.trial names it.
    trial = models.BooleanField(default=False)
    at = models.DateTimeField()
    by = models.CharField(max_length=150)
    reason = models.TextField(blank=True, default="")

    class Meta:
        ordering = ["-version"]
        constraints = [
            models.UniqueConstraint(fields=["tenant", "version"], name="scope_version_once")
        ]

    def __str__(self) -> str:
        return f"{self.tenant} scope {self.version}"


class PolicyEntry(models.Model):
    """What was last published for one tenant in one cell. Tombstones are never purged."""

    cell = models.ForeignKey(Cell, models.PROTECT, related_name="entries")
    tenant = models.ForeignKey(Tenant, models.PROTECT, related_name="entries")
    # The cell's policy_version that stamped it.
    version = models.PositiveBigIntegerField()
    accepts = models.CharField(max_length=10, choices=[(a.value, a.value) for a in Accepts])
    # NULL: not a tombstone.
    moved_to = models.ForeignKey(Cell, models.PROTECT, null=True, blank=True, related_name="+")
    # The Counter.placement_version of the placement that this entry repeats.
    placement_version = models.PositiveBigIntegerField()
    store = models.ForeignKey(Store, models.PROTECT, related_name="+")
    # Raised when a secret rotates; runners are kept by (tenant, store key, generation).
    runner_generation = models.PositiveIntegerField(default=1)
    # Identity, store, scope and the tombstone's cell as sent, so that serving needs no join.
    document = models.JSONField(default=dict)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["cell", "tenant"], name="one_entry_per_cell_and_tenant"
            ),
            # Whatever a caller does wrong, two cells never take the same turns of a tenant.
            models.UniqueConstraint(
                fields=["tenant"],
                condition=Q(accepts__in=[Accepts.ALL.value, Accepts.EXISTING.value]),
                name="one_cell_owns_a_tenant",
            ),
            models.UniqueConstraint(
                fields=["tenant"],
                condition=Q(accepts__in=[Accepts.ALL.value, Accepts.NEW.value]),
                name="one_cell_takes_new_sessions",
            ),
            models.CheckConstraint(
                condition=Q(accepts=Accepts.MOVED.value, moved_to__isnull=False)
                | (~Q(accepts=Accepts.MOVED.value) & Q(moved_to__isnull=True)),
                name="a_tombstone_names_a_cell",
            ),
            models.CheckConstraint(
                condition=Q(accepts__in=[a.value for a in Accepts]), name="entry_known_accepts"
            ),
        ]
        # The policy's delta: entries of a cell changed since a version.
        indexes = [models.Index(fields=["cell", "version"], name="policy_delta")]

    def __str__(self) -> str:
        return f"{self.tenant} in {self.cell}: {self.accepts}"


class RuntimeInstance(models.Model):
    """One operating-system process that serves one cell."""

    # Public, random: `instance` on the wire.
    key = models.CharField(max_length=32, unique=True)
    cell = models.ForeignKey(Cell, models.PROTECT, related_name="instances")
    name = models.CharField(max_length=100)
    build = models.CharField(max_length=100, blank=True, default="")
    # The process's own random id: tells a restart from a repeated join.
    boot = models.CharField(max_length=64)
    longest_turn_seconds = models.FloatField()
    longest_tool_seconds = models.FloatField()
    plugins = models.JSONField(default=list)
    # Keys of the stores that it could open.
    stores = models.JSONField(default=list)
    joined_at = models.DateTimeField()
    # A lease bounds when a turn may start; judged on the database's clock plus 5 s.
    lease_until = models.DateTimeField()
    # True: its process had an id before, whose running turns are this row's to report. It then
    # counts in a fence from its join on; any other from its first poll.
    took_over = models.BooleanField(default=False)
    # NULL: it has never asked for a policy, so it serves nothing.
    # Written at every poll at the fast cadence, and now and then at the slow one, where
    # nobody measures silence: no fence begins before every instance polls fast.
    polled_at = models.DateTimeField(null=True, blank=True)
    # NULL: no report yet.
    reported_at = models.DateTimeField(null=True, blank=True)
    # The cadence it was last told, so that silence is measured in its own polls.
    poll_after_ms = models.PositiveIntegerField(default=SLOW_MS)
    # When it was first told the fast cadence that still holds; a later poll shows that it
    # listens. NULL: it was told the slow one last.
    hurried_at = models.DateTimeField(null=True, blank=True)
    # Last accepted report; the next is exactly one more.
    seq = models.PositiveBigIntegerField(default=0)
    applied_epoch = models.CharField(max_length=16, blank=True, default="")
    applied_version = models.PositiveBigIntegerField(default=0)
    # Tenant slug -> running turns, read under the lock that admission takes; absent counts 0.
    in_flight = models.JSONField(default=dict)
    in_flight_older = models.JSONField(default=dict)
    # What the instance may use of its tenants' limits (Grants) is numbered: the last number that
    # was made for it, and the last that it has said it applies.
    grants_number = models.PositiveBigIntegerField(default=0)
    grants_heard = models.PositiveBigIntegerField(default=0)
    # Until when it may use them in full; past it, the safe part. NULL: never answered a report.
    grants_until = models.DateTimeField(null=True, blank=True)
    # Whether its Runners are built ahead, so that gateways may send turns.
    ready = models.BooleanField(default=False)
    # What it says of its cache of Runners: size, evictions by cause, build times, bytes of one.
    runners = models.JSONField(default=dict)
    # Model endpoint -> what its circuit breaker does there.
    breakers = models.JSONField(default=dict)
    # NULL: alive as far as we know. A gone instance is answered 410 and renews nothing.
    gone_at = models.DateTimeField(null=True, blank=True, db_index=True)
    # Empty while it is alive.
    gone_why = models.CharField(
        max_length=20, blank=True, default="", choices=[(w.value, w.value) for w in GoneWhy]
    )
    # When somebody asked to declare it dead; a second person confirms, within half an hour.
    # NULL: nobody has, or it was taken back.
    dead_asked_at = models.DateTimeField(null=True, blank=True)
    # The person's own name, without the token that they came with: two tokens are one person.
    dead_asked_by = models.CharField(max_length=150, blank=True, default="")
    dead_asked_why = models.TextField(blank=True, default="")

    class Meta:
        # The fence, the pages and the sweep: a cell's instances that are not gone.
        indexes = [
            models.Index(fields=["cell"], condition=Q(gone_at__isnull=True), name="alive_in_cell")
        ]

    def __str__(self) -> str:
        return self.name


class Grants(models.Model):
    """What one instance may use of its tenants' limits: its share of each, and the safe part.

    The newest is made only after the one before was heard, so an instance applies one of two;
    whoever divides a limit counts the larger.
    """

    instance = models.OneToOneField(
        RuntimeInstance, models.CASCADE, primary_key=True, related_name="grants"
    )
    # Tenant slug -> share, its values in the order of domain.reports.SHARE. Number
    # RuntimeInstance.grants_number.
    shares = models.JSONField(default=dict)
    # What may still be applied until `shares` is heard, where that is another share. After that it
    # says nothing.
    before = models.JSONField(default=dict)
    made_at = models.DateTimeField()

    def __str__(self) -> str:
        return f"grants of {self.instance}"


class UsageLine(models.Model):
    """What one instance served one tenant in one minute, as reported.

    Append-only but for the mark that it has been rolled up; swept some days after.
    """

    instance = models.ForeignKey(RuntimeInstance, models.PROTECT, related_name="usage_lines")
    seq = models.PositiveBigIntegerField()
    tenant = models.ForeignKey(Tenant, models.PROTECT, related_name="usage_lines")
    minute = models.DateTimeField()
    turns = models.PositiveBigIntegerField(default=0)
    model_calls = models.PositiveBigIntegerField(default=0)
    tokens = models.PositiveBigIntegerField(default=0)
    # Reason (rate, concurrency, quota, budget, draining, breaker) -> refused turns.
    refused = models.JSONField(default=dict)
    # The same, of limits that are only tried: these turns were served.
    would_refuse = models.JSONField(default=dict)
    # When it was added to the ledger. NULL: not yet.
    rolled_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            # A report that is sent twice counts once.
            models.UniqueConstraint(
                fields=["instance", "seq", "tenant", "minute"], name="usage_line_once"
            )
        ]
        indexes = [
            # A tenant's page: its usage of the last hours.
            models.Index(fields=["tenant", "minute"], name="usage_of_a_tenant"),
            # The roll-up: what is not in the ledger yet.
            models.Index(fields=["id"], condition=Q(rolled_at__isnull=True), name="usage_to_roll"),
        ]

    def __str__(self) -> str:
        return f"{self.tenant} {self.minute:%H:%M}"


class DirtyLine(models.Model):
    """A session that was served while its tenant was tracked. Feeds the forecast of a move.

    Append-only; swept once the tracking has ended.
    """

    tenant = models.ForeignKey(Tenant, models.PROTECT, related_name="dirty_lines")
    user_id = models.CharField(max_length=128)
    session_id = models.CharField(max_length=128)
    at = models.DateTimeField()

    class Meta:
        # The forecast: sessions of one tenant since a time.
        indexes = [models.Index(fields=["tenant", "at"], name="dirty_since")]

    def __str__(self) -> str:
        return f"{self.tenant} {self.session_id}"


class Token(models.Model):
    """A bearer secret of 256 random bits: shown once, kept as its SHA-256."""

    name = models.CharField(max_length=100)
    # How the secret begins, to tell tokens apart on a page; no part of the 256 random bits.
    prefix = models.CharField(max_length=12)
    digest = models.CharField(max_length=64, unique=True)
    role = models.CharField(max_length=10, choices=[(r.value, r.value) for r in TokenRole])
    # For role runtime: the cells it may join. Empty for other roles.
    cells = models.ManyToManyField(Cell, blank=True, related_name="tokens")
    # For role tenant: whose usage it may read. NULL for other roles.
    tenant = models.ForeignKey(Tenant, models.PROTECT, null=True, blank=True, related_name="tokens")
    # For role operator: whose rights it has. NULL for other roles.
    user = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.PROTECT, null=True, blank=True, related_name="tokens"
    )
    created_at = models.DateTimeField()
    created_by = models.CharField(max_length=150)
    expires_at = models.DateTimeField()
    # Written at most once a minute. NULL: never used.
    last_used_at = models.DateTimeField(null=True, blank=True)
    # NULL: in force.
    revoked_at = models.DateTimeField(null=True, blank=True)

    def __str__(self) -> str:
        return f"{self.name} ({self.prefix}…)"


class Membership(models.Model):
    """A person of a tenant: signs in and sees that tenant's usage, and nothing else.

    Such a person has no role; the services keep it so.
    """

    # One tenant each: what somebody sees never depends on what an address or a form names.
    user = models.OneToOneField(settings.AUTH_USER_MODEL, models.CASCADE, related_name="membership")
    tenant = models.ForeignKey(Tenant, models.PROTECT, related_name="memberships")
    at = models.DateTimeField()
    by = models.CharField(max_length=150)

    def __str__(self) -> str:
        return f"{self.user} of {self.tenant}"


class AuditEntry(models.Model):
    """One write by a person or a token: who, when, what, why.

    Append-only: a trigger refuses UPDATE and DELETE (migration 0003).
    """

    at = models.DateTimeField(db_index=True)
    # A user name, "NAME (token TOKEN)" for a token that acts for a user, or "NAME (command)" for
    # whoever called manage.py and says so.
    who = models.CharField(max_length=150)
    # Such as "move.abort".
    verb = models.CharField(max_length=60)
    # Such as "mv-147" or "tenant acme".
    subject = models.CharField(max_length=150, db_index=True)
    reason = models.TextField(blank=True, default="")
    # What the write changed, as it was. NULL: there was nothing before.
    before = models.JSONField(null=True, blank=True)
    # NULL: there is nothing afterwards, or nothing changed but the fact itself.
    after = models.JSONField(null=True, blank=True)
    # Of the HTTP request that asked for it; empty for a command or a machine.
    request_id = models.CharField(max_length=64, blank=True, default="")

    class Meta:
        ordering = ["-id"]

    def __str__(self) -> str:
        return f"{self.who} {self.verb} {self.subject}"
