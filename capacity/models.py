"""What tenants used, and what tests of their isolation found."""

from __future__ import annotations

from django.db import models

from tenants.models import Tenant


class Used(models.Model):
    """Sums of usage lines; the number that throttles a tenant and the one that it is billed by."""

    tenant = models.ForeignKey(Tenant, models.PROTECT, related_name="+")
    turns = models.PositiveBigIntegerField(default=0)
    model_calls = models.PositiveBigIntegerField(default=0)
    tokens = models.PositiveBigIntegerField(default=0)
    # Reason (domain.usage.REASONS) -> refused turns.
    refused = models.JSONField(default=dict)
    # The same, of limits that are only tried: these turns were served.
    would_refuse = models.JSONField(default=dict)

    class Meta:
        abstract = True


class UsageMinute(Used):
    """What one tenant used in one minute, over all instances."""

    minute = models.DateTimeField()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["tenant", "minute"], name="one_row_a_minute")
        ]
        # What a cell or all of them used in a window.
        indexes = [models.Index(fields=["minute"], name="used_in_a_window")]

    def __str__(self) -> str:
        return f"{self.tenant} {self.minute:%Y-%m-%d %H:%M}"


class UsageDay(Used):
    """What one tenant used in one day of its own time zone: what the daily budget is held against.

    A line counts in the day that its minute was in, by the zone that the tenant had when the line
    was rolled up.
    """

    day = models.DateField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["tenant", "day"], name="one_row_a_day")]
        # An export: all tenants of a month.
        indexes = [models.Index(fields=["day"], name="used_in_a_month")]

    def __str__(self) -> str:
        return f"{self.tenant} {self.day}"


class IsolationRun(models.Model):
    """One run of the isolation suite. Append-only."""

    began_at = models.DateTimeField()
    # NULL: it runs, or was killed.
    ended_at = models.DateTimeField(null=True, blank=True)
    by = models.CharField(max_length=150)
    # The release that was tested.
    build = models.CharField(max_length=100, blank=True, default="")
    # One object a test: name, what was asked, what was measured, its bar, whether it held.
    results = models.JSONField(default=list)
    # NULL: not over.
    passed = models.BooleanField(null=True)

    class Meta:
        ordering = ["-id"]

    def __str__(self) -> str:
        return f"isolation run {self.pk}"


class SharedResource(models.Model):
    """Something that agents of several tenants share, and what keeps them apart there."""

    name = models.CharField(max_length=100, unique=True)
    # Which harm it could do: performance, authority, fault or data.
    kind = models.CharField(max_length=20)
    # What keeps one tenant from harming another by it. Empty: a finding.
    control = models.TextField(blank=True, default="")
    # How one would see that the control holds: a test, a page, an alarm.
    shown_by = models.TextField(blank=True, default="")
    at = models.DateTimeField()
    by = models.CharField(max_length=150)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name
