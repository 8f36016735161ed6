"""A message walks a row through its steps, and hands it on where another worker takes over."""

from __future__ import annotations

from typing import Any

import pytest

from migrations_app import tasks
from migrations_app.domain.phases import FENCED, Phase
from migrations_app.models import TenantMigration
from tests.world import World


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Keep messages instead of sending them: (task, queue)."""
    kept: list[tuple[str, str]] = []

    def keep(self: Any, args: Any = None, **options: Any) -> None:
        kept.append((self.name, options["queue"]))

    monkeypatch.setattr("celery.app.task.Task.apply_async", keep)
    return kept


def deliver(task: Any, pk: int, queue: str) -> None:
    task.push_request(delivery_info={"routing_key": queue})
    try:
        task.run(pk)
    finally:
        task.pop_request()


@pytest.mark.parametrize("phase", sorted(FENCED))
def test_what_happens_inside_a_fence_is_never_queued_behind_a_copy(phase: Phase) -> None:
    assert tasks.queue(phase) == "prompt"


@pytest.mark.parametrize(
    ("phase", "task"),
    [
        (Phase.PREPARE, "migrations_app.step"),
        (Phase.BACKFILL, "migrations_app.copy"),
        (Phase.VERIFY, "migrations_app.verify"),
        (Phase.OFFBOARD, "migrations_app.copy"),
    ],
)
def test_a_task_is_named_for_what_it_does(
    sent: list[tuple[str, str]], phase: Phase, task: str
) -> None:
    tasks.enqueue(1, phase)
    assert sent == [(task, tasks.queue(phase))]


@pytest.mark.django_db(transaction=True, serialized_rollback=True)
def test_a_walk_hands_the_fence_to_the_prompt_worker(
    files: World, sent: list[tuple[str, str]]
) -> None:
    files.start()
    files.run(until=Phase.DRAIN)
    TenantMigration.objects.update(due_at="2000-01-01T00:00:00Z")
    deliver(tasks.copy, files.move.pk, "prompt")
    # It went on by itself to the soak, whose steps are another worker's.
    assert files.move.phase == Phase.SOAK
    assert [queue for _, queue in sent] in ([], ["bulk"])


@pytest.mark.django_db(transaction=True, serialized_rollback=True)
def test_an_abort_that_a_bulk_worker_meets_goes_to_the_prompt_one(
    files: World, sent: list[tuple[str, str]]
) -> None:
    files.start()
    TenantMigration.objects.update(
        due_at="2000-01-01T00:00:00Z", abort_requested_at="2000-01-01T00:00:00Z"
    )
    deliver(tasks.step, files.move.pk, "bulk")
    assert files.move.phase == Phase.REOPEN
    assert sent == [("migrations_app.step", "prompt")]


def test_a_message_for_a_move_that_is_not_due_sends_nothing(
    files: World, sent: list[tuple[str, str]]
) -> None:
    files.start()
    TenantMigration.objects.update(due_at="2100-01-01T00:00:00Z")
    deliver(tasks.step, files.move.pk, "bulk")
    assert sent == []
    tasks.due()
    assert sent == []
    TenantMigration.objects.update(due_at="2000-01-01T00:00:00Z")
    tasks.due()
    assert sent == [("migrations_app.step", "bulk")]
