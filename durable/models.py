"""The columns that every long-running machine shares. `durable.driver` is their only writer."""

from __future__ import annotations

from django.db import models


class Durable(models.Model):
    """A row that a state machine moves. A subclass adds `phase` and its event rows."""

    # When the row may next be claimed. Waiting, backing off and being worked on
    # are all "not before"; NULL means over (each subclass has the CHECK).
    due_at = models.DateTimeField(null=True, blank=True, db_index=True)
    # Fencing token: counts claims. A step that settles under an old one is void.
    claim = models.PositiveIntegerField(default=0)
    # The last claim that was settled; behind `claim` by more than the running one: workers died.
    settled = models.PositiveIntegerField(default=0)
    # Counts every visible change, for programs that watch the row through the API.
    version = models.PositiveIntegerField(default=0)
    # Steps that raised, one after another; the next back-off. 0 after any good step.
    failures = models.PositiveSmallIntegerField(default=0)
    # What the last failing step said; empty after any good step.
    failure = models.TextField(blank=True, default="")
    phase_since = models.DateTimeField()

    # People request; only settle writes a phase. NULL: nobody has asked.
    abort_requested_at = models.DateTimeField(null=True, blank=True)
    abort_requested_by = models.CharField(max_length=150, blank=True, default="")
    abort_reason = models.TextField(blank=True, default="")
    # NULL: not paused. Cleared by resume.
    pause_requested_at = models.DateTimeField(null=True, blank=True)
    pause_requested_by = models.CharField(max_length=150, blank=True, default="")
    pause_reason = models.TextField(blank=True, default="")

    class Meta:
        abstract = True


class Event(models.Model):
    """One line of a machine's log: a phase entered, or something worth reading.

    A subclass adds the foreign key named `subject`, with related_name "events".
    """

    at = models.DateTimeField()
    # Who: a person's name, an instance, or the machine itself ("mover").
    who = models.CharField(max_length=150)
    # The phase before and after; equal where the line is only a note.
    was = models.CharField(max_length=20)
    now = models.CharField(max_length=20)
    note = models.TextField(blank=True, default="")

    class Meta:
        abstract = True
        ordering = ["-id"]
