"""A real move, rolled back from its page, on two real stores: every page at every step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
from django.urls import reverse

from migrations_app.domain.phases import REVERSED, Phase
from tests import make
from tests.web.conftest import HTMX, People
from tests.web.test_pages import page, text_of
from tests.world import APP, World, world

DAY = 86_400.0


@pytest.fixture
def moved(
    monkeypatch: pytest.MonkeyPatch, cast: make.Cast, at: datetime, tmp_path: Path
) -> Iterator[World]:
    """The tenant lives on the target and has written there."""
    files = f"sqlite:///{tmp_path}/one.db", f"sqlite:///{tmp_path}/two.db"
    with world(monkeypatch, cast, at, *files) as ready:
        ready.start(soak_seconds=DAY, offboard_automatically=False)
        ready.run(until=Phase.SOAK)
        ready.target.turn(APP, "u-1", "s-1", "after-the-cutover")
        looked(ready)
        yield ready


def looked(ready: World) -> None:
    """Let SOAK look at both stores once."""
    since = ready.move.touched_at
    for _ in range(12):
        ready.step()
        if ready.move.touched_at != since and ready.move.stage == "":
            return
    raise AssertionError("no look")


def act(people: People, ready: World, verb: str, **form: str) -> None:
    move = ready.move
    given = {"reason": "answers are slow", "seen": move.phase, **form}
    answer = people.operator.post(reverse(verb, args=[move.pk]), given, headers=HTMX)
    assert answer.status_code == 200, answer.content.decode()


def test_a_rollback_is_asked_for_seen_at_every_step_and_ends_on_the_source(
    moved: World, people: People
) -> None:
    move = moved.move
    asked = people.operator.get(reverse("rollback", args=[move.pk]), headers=HTMX)
    assert "1 session written, born or deleted" in text_of(asked.content.decode())
    act(people, moved, "rollback")
    walked = []
    for _ in range(40):
        text = text_of(page(people.operator, moved.move))
        walked.append(Phase(moved.move.phase))
        if moved.move.due_at is None:
            break
        assert "Rolling back" in text, moved.move.phase
        for address in ("/", "/moves/", "/tenants/", "/tenants/acme/"):
            assert "Rolling back" in people.viewer.get(address).content.decode()
        moved.step()
    assert set(walked) >= REVERSED | {Phase.ROLLED_BACK}
    assert "Served on store-eu1-a" in text
    assert "Closed on store-eu1-a" in text
    assert "Fence on store-eu1-b" in text


def test_a_rollback_that_is_stopped_on_its_page_comes_back_to_a_soak_that_begins_anew(
    moved: World, people: People
) -> None:
    act(people, moved, "rollback")
    moved.run(until=Phase.REVERSE_DELTA)
    act(people, moved, "abort")
    moved.run(until=Phase.SOAK)
    text = text_of(page(people.operator, moved.move))
    assert "Opening the target again in SOAK" in text
    while moved.move.stage == "return" or moved.move.fence_opened_at is None:
        moved.step()
    text = text_of(page(people.operator, moved.move))
    assert "Soaking in SOAK" in text
    assert "answers are slow. acme stays on store-eu1-b." in text
    assert moved.move.abort_requested_at is None
    act(people, moved, "rollback")
    moved.run()
    assert moved.move.phase == Phase.ROLLED_BACK
    assert text_of(page(people.viewer, moved.move)).count("Closed on store-eu1-") == 2


def test_a_real_late_write_is_shown_downloaded_and_accepted(moved: World, people: People) -> None:
    with moved.late() as connection:
        moved.source.add_event(connection, APP, "u-0", "s-0", "too-late", 9)
    looked(moved)
    move = moved.move
    text = text_of(page(people.operator, move))
    assert "Late write in SOAK" in text
    assert "Late write" in people.viewer.get("/").content.decode()
    answer = people.operator.get(reverse("late_versions", args=[move.pk]))
    (found,) = json.loads(b"".join(answer.streaming_content))["versions"]
    assert found["session_id"] == "s-0"
    assert len(found["source"]["events"]) == len(found["target"]["events"]) + 1
    row = move.mismatches.get()
    act(people, moved, "accept", ids=str(row.pk))
    act(people, moved, "rollback")
    moved.run()
    assert moved.move.phase == Phase.ROLLED_BACK
    assert "too-late" not in json.dumps(moved.source.content(APP))
