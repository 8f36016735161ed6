"""A real split on two real stores: every page at every step, there, and back out of it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from migrations_app import queries
from migrations_app.domain.phases import Mode, Phase
from tests import make
from tests.web.conftest import People
from tests.web.test_pages import page, text_of
from tests.web.test_real_way_back import act
from tests.world import APP, World, world

DAY = 86_400.0
PAGES = ("/", "/moves/", "/tenants/", "/tenants/acme/")


@pytest.fixture
def split(
    monkeypatch: pytest.MonkeyPatch, cast: make.Cast, at: datetime, tmp_path: Path
) -> Iterator[World]:
    """Both sides serve; one session was born on the target."""
    files = f"sqlite:///{tmp_path}/one.db", f"sqlite:///{tmp_path}/two.db"
    with world(monkeypatch, cast, at, *files) as ready:
        ready.start(
            mode=Mode.SPLIT, idle_seconds=3_600.0, soak_seconds=DAY, offboard_automatically=False
        )
        for _ in range(60):
            if queries.split_live(ready.move):
                break
            ready.step()
        with ready.target.connection() as connection:
            ready.target.add_session(connection, APP, "u-1", "s-born", 2)
        ready.clock.pass_by(60)
        while not ready.move.born:
            ready.step()
        yield ready


def walk(people: People, ready: World, until: Phase) -> tuple[set[Phase], str]:
    """Draw every page at each step; return the phases that were seen, and the last page."""
    walked = set()
    for _ in range(120):
        text = text_of(page(people.operator, ready.move))
        for address in PAGES:
            assert people.viewer.get(address).status_code == 200
        walked.add(Phase(ready.move.phase))
        if ready.move.phase == until:
            return walked, text
        ready.step()
    raise AssertionError(f"not in {until}, but {ready.move.phase}: {ready.move.waiting_for}")


def test_a_split_is_seen_at_every_step_and_ends_on_the_target(split: World, people: People) -> None:
    text = text_of(page(people.operator, split.move))
    assert "Both cells serve" in text
    assert "Born on store-eu1-b 1" in text
    assert "cell-eu1-b" in text_of(people.viewer.get("/tenants/acme/").content.decode())
    act(people, split, "close_fence")
    walked, text = walk(people, split, Phase.SOAK)
    assert walked >= {Phase.SPLIT, Phase.DRAIN, Phase.DELTA, Phase.VERIFY, Phase.TARGET}
    assert "Served on store-eu1-b" in text
    assert "store-eu1-b serves all" in text


def test_an_abort_out_of_a_split_is_seen_at_every_step_and_ends_on_the_source(
    split: World, people: People
) -> None:
    act(people, split, "abort")
    text = text_of(page(people.operator, split.move))
    assert "Take back abort…" in text
    walked, text = walk(people, split, Phase.ROLLED_BACK)
    assert Phase.REVERSE_VERIFY in walked
    assert "Served on store-eu1-a" in text
    assert "store-eu1-a serves all" in text


def test_an_abort_inside_the_fence_passes_through_the_split(split: World, people: People) -> None:
    act(people, split, "close_fence")
    walk(people, split, Phase.DELTA)
    act(people, split, "abort")
    assert "Aborting in DELTA" in text_of(page(people.operator, split.move))
    split.run(until=Phase.SPLIT)
    assert "Opening store-eu1-a again" in text_of(page(people.operator, split.move))
    walked, text = walk(people, split, Phase.ROLLED_BACK)
    assert Phase.SPLIT in walked
    assert "Closed on store-eu1-a" in text
