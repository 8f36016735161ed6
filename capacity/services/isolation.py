"""Runs of the isolation suite: one at a time, what each found, and by whom it was asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from django.conf import settings
from django.db import transaction

from capacity.domain.slo import RUN_LASTS
from capacity.models import IsolationRun
from durable.errors import Refused
from tenants.models import Counter
from tenants.services import audit


class SuiteRuns(Refused):
    """A run of the suite is under way; two at once would flood each other."""


@transaction.atomic
def start_isolation(*, by: str, now: datetime) -> IsolationRun:
    """Note that a run of the suite begins; return its row. Raises SuiteRuns.

    Whoever calls it sees to it that the suite runs, and gives what it found to `note_isolation`.
    """
    # Of two at once the later one waits here, and is refused then. A row that is always there:
    # where no run goes on there is none of those to lock.
    Counter.objects.select_for_update().get()
    runs = IsolationRun.objects.filter(ended_at=None)
    if running := runs.filter(began_at__gt=now - RUN_LASTS).first():
        raise SuiteRuns(
            f"The suite runs already, asked for by {running.by} at"
            f" {running.began_at:%H:%M:%S} UTC. Wait for what it finds."
        )
    run = IsolationRun.objects.create(began_at=now, by=by, build=settings.BUILD)
    audit(who=by, verb="isolation.start", subject=str(run), after={"build": run.build}, now=now)
    return run


def note_isolation(run: IsolationRun, results: Iterable[Mapping[str, Any]]) -> None:
    """Keep what a run that goes on has found so far."""
    IsolationRun.objects.filter(pk=run.pk, ended_at=None).update(results=list(results))


def end_isolation(
    run: IsolationRun, results: Iterable[Mapping[str, Any]], *, whole: bool, now: datetime
) -> bool:
    """Keep what a run has found in the end; return whether it passed.

    `whole`: the suite came to its end. One that did not has not passed, whatever held until then.
    """
    found = list(results)
    passed = whole and bool(found) and all(result["held"] for result in found)
    IsolationRun.objects.filter(pk=run.pk).update(results=found, passed=passed, ended_at=now)
    return passed
