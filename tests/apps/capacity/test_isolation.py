"""Runs of the isolation suite, as they are kept."""

from __future__ import annotations

import threading
from datetime import datetime, timedelta

import pytest
from django.db import connections

from capacity import services
from capacity.models import IsolationRun
from tenants.models import AuditEntry

pytestmark = pytest.mark.django_db

HELD = {
    "name": "Flood",
    "kind": "performance",
    "asked": "",
    "measured": "",
    "bar": "",
    "held": True,
}
BROKEN = {**HELD, "name": "Loop", "held": False}


def test_a_run_passes_when_every_test_held(now: datetime) -> None:
    run = services.start_isolation(by="ada", now=now)
    services.note_isolation(run, [HELD])
    assert IsolationRun.objects.get().results == [HELD]
    later = now + timedelta(seconds=70)
    assert services.end_isolation(run, [HELD, HELD], whole=True, now=later)
    run.refresh_from_db()
    assert (run.passed, run.ended_at, len(run.results)) == (True, later, 2)
    assert AuditEntry.objects.get(verb="isolation.start").who == "ada"


@pytest.mark.parametrize(
    ("results", "whole"),
    [([HELD, BROKEN], True), ([HELD], False), ([], True)],
    ids=["one was broken", "the suite was killed", "nothing was tested"],
)
def test_anything_less_has_not_passed(
    results: list[dict[str, object]], whole: bool, now: datetime
) -> None:
    run = services.start_isolation(by="ada", now=now)
    assert not services.end_isolation(run, results, whole=whole, now=now)
    run.refresh_from_db()
    assert run.passed is False


def test_one_run_at_a_time_until_it_ends_or_was_killed(now: datetime) -> None:
    services.start_isolation(by="ada", now=now)
    with pytest.raises(services.SuiteRuns, match="ada"):
        services.start_isolation(by="bob", now=now + timedelta(minutes=9))
    # Nothing of it was heard for as long as no run takes.
    later = services.start_isolation(by="bob", now=now + timedelta(minutes=11))
    services.end_isolation(later, [HELD], whole=True, now=now + timedelta(minutes=12))
    services.start_isolation(by="bob", now=now + timedelta(minutes=13))


@pytest.mark.django_db(transaction=True, serialized_rollback=True)
def test_of_two_who_ask_for_the_first_run_at_once_one_is_refused(now: datetime) -> None:
    together, runs, refused = threading.Barrier(2), [], []

    def start(by: str) -> None:
        together.wait(10)
        try:
            runs.append(services.start_isolation(by=by, now=now))
        except services.SuiteRuns as refusal:
            refused.append(refusal)
        finally:
            connections.close_all()

    for _ in range(5):
        threads = [threading.Thread(target=start, args=(by,)) for by in ("ada", "bob")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert (len(runs), len(refused)) == (1, 1)
        IsolationRun.objects.all().delete()
        runs.clear()
        refused.clear()
