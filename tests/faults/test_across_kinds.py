"""Whole moves between stores of two layouts: there, and back again."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from migrations_app import ports, services
from migrations_app.domain.mismatch import Looks
from migrations_app.domain.phases import Phase
from migrations_app.models import Mismatch
from migrations_app.ports.base import START
from tests import make
from tests.world import APP, World, world

PAIRS = {
    "postgresql to sqlite": ("postgresql", "sqlite"),
    "sqlite to postgresql": ("sqlite", "postgresql"),
    "adk-sqlite to postgresql": ("adk-sqlite", "postgresql"),
    "postgresql to adk-sqlite": ("postgresql", "adk-sqlite"),
    "sqlite to adk-sqlite": ("sqlite", "adk-sqlite"),
    "adk-sqlite to sqlite": ("adk-sqlite", "sqlite"),
    "adk-sqlite to adk-sqlite": ("adk-sqlite", "adk-sqlite"),
}


@contextmanager
def between(
    pair: str,
    monkeypatch: pytest.MonkeyPatch,
    cast: make.Cast,
    now: datetime,
    tmp_path: Path,
    new_database: Callable[[], str],
) -> Iterator[World]:
    urls, kinds = [], []
    for side, store in zip(PAIRS[pair], (cast.store, cast.other_store), strict=True):
        store.kind = "adk-sqlite" if side == "adk-sqlite" else "adk-sql"
        store.save()
        kinds.append(store.kind)
        file = f"sqlite:///{tmp_path}/{store.key}.db"
        urls.append(new_database() if side == "postgresql" else file)
    with world(monkeypatch, cast, now, urls[0], urls[1], (kinds[0], kinds[1])) as ready:
        yield ready


@pytest.fixture(params=PAIRS)
def across(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    cast: make.Cast,
    now: datetime,
    tmp_path: Path,
    new_database: Callable[[], str],
) -> Iterator[World]:
    """A world whose stores are of two layouts (and, once, of the third alone)."""
    with between(request.param, monkeypatch, cast, now, tmp_path, new_database) as ready:
        yield ready


def only(*pairs: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("across", pairs, indirect=True)


def held(world: World, side: str) -> dict[str, Any]:
    """Return what one side holds, spelled so that the layouts can be compared."""
    opened = []
    for raw, reference in ((world.source, "env:STORE_EU1_A"), (world.target, "env:STORE_EU1_B")):
        opened.append(ports.open_store(raw.kind, reference, app_name=APP))
    with opened[0] as source, opened[1] as target:
        one, at = (source, 0) if side == "source" else (target, 1)
        keys = [key for key, _ in one.page(START, 1000)]
        sessions = {key: ports.sessions_of_both(source, target, key)[at] for key in keys}
        shared = one.shared_page(None, 1000)
        return {
            "sessions": {
                key: value if value is None else {**value, "create_time": ""}
                for key, value in sessions.items()
            },
            "shared": {row.user_id: ports.shared_digest(source, target, row) for row in shared},
        }


def test_a_tenant_moves_whole(across: World) -> None:
    before = held(across, "source")
    across.start(offboard_automatically=False)
    across.run(until=Phase.SOAK)
    assert held(across, "target") == before
    assert len(before["sessions"]) == 12
    assert across.owner() == [("cell-eu1-b", "all")]
    assert not across.agents_may_write(across.source)
    assert across.agents_may_write(across.target)
    checks = {check["name"]: check["detail"] for check in across.move.checks}
    strict = across.source.kind == across.target.kind and across.source.sqlite == (
        across.target.sqlite
    )
    assert checks["Fingerprint"].startswith("strict" if strict else "canonical")
    assert not across.move.mismatches.exists()


def test_a_tenant_moves_back_with_what_it_wrote(across: World) -> None:
    across.start(soak_seconds=86_400.0, offboard_automatically=False)
    across.run(until=Phase.SOAK)
    across.target.turn(APP, "u-1", "s-1", "after-the-cutover")
    with across.target.connection() as connection:
        across.target.add_session(connection, APP, "u-3", "s-born", 1)
    across.target.delete(APP, "u-2", "s-2")
    after = held(across, "target")
    services.rollback(across.move, by="ada", reason="slow tools", now=across.clock())
    across.run()
    assert across.move.phase == Phase.ROLLED_BACK
    assert held(across, "source") == after
    assert across.owner() == [("cell-eu1-a", "all")]


@only("sqlite to postgresql", "adk-sqlite to postgresql")
def test_a_refused_value_stops_the_preparation_and_is_named(across: World) -> None:
    spoil(across)
    with pytest.raises(services.NotReadyToMove, match=NUL):
        across.start()
    mend(across)
    across.start()
    spoil(across)
    across.step()
    assert across.move.phase == Phase.PREPARE
    assert re.search(NUL, across.move.waiting_for)
    mend(across)
    across.run(until=Phase.BACKFILL)


NUL = r"sessions\.state: a NUL character in a state: .* \(1, such as u-3/s-3\)"


def spoil(world: World, state: str = '{"a": "\\u0000"}') -> None:
    world.source.run("update sessions set state = ? where id = 's-3'", state)


def mend(world: World) -> None:
    spoil(world, '{"a": 1}')


def meets(world: World, **wanted: object) -> Mismatch:
    """Step until the mismatch table has a row like this."""
    for _ in range(30):
        if found := world.move.mismatches.filter(**wanted).first():
            return found
        world.step()
    raise AssertionError(list(world.move.mismatches.values()))


@only("sqlite to postgresql")
def test_a_value_that_comes_later_blocks_the_cutover_until_it_is_gone(across: World) -> None:
    across.start(automatic=False)
    across.run(until=Phase.BACKFILL)
    spoil(across, '{"a": NaN}')
    mismatch = meets(across, resolved_at=None, part="value")
    assert mismatch.looks_like == Looks.CANNOT_HOLD
    assert mismatch.first_difference == (
        "sessions.state a: NaN or Infinity in a state: PostgreSQL's JSON holds neither NaN nor"
        " Infinity"
    )
    assert across.target.run("select 1 from sessions where id = 's-3'") == []
    with pytest.raises(services.NotNow):
        accept(across, mismatch)
    # The next pass takes it along once it can be held.
    mend(across)
    meets(across, pk=mismatch.pk, resolved_at__isnull=False)
    assert len(across.target.run("select 1 from sessions where id = 's-3'")) == 1


def accept(world: World, row: Mismatch) -> None:
    services.accept(
        world.move, mismatch_ids=[row.pk], by="ada", reason="the same price", now=world.clock()
    )


@only("sqlite to postgresql")
def test_a_changed_value_is_listed_and_accepted(across: World) -> None:
    spoil(across, '{"a": -0.0}')
    across.start(offboard_automatically=False)
    mismatch = meets(across, resolved_at=None)
    assert any("-0.0 becomes 0.0" in finding["reason"] for finding in across.move.findings)
    assert (mismatch.looks_like, mismatch.first_difference) == (
        Looks.CANNOT_HOLD,
        "a: -0.0 becomes 0.0",
    )
    accept(across, mismatch)
    across.run(until=Phase.SOAK)
    assert across.move.mismatches.get().accepted_by == "ada"


@only("sqlite to postgresql")
def test_an_accepted_value_that_is_copied_again_stays_accepted_and_lets_the_fence_close(
    across: World,
) -> None:
    spoil(across, '{"a": -0.0}')
    across.start(automatic=False, offboard_automatically=False)
    mismatch = meets(across, resolved_at=None)
    accept(across, mismatch)
    asked = {"mismatch_ids": [mismatch.pk], "by": "ada", "now": across.clock()}
    assert services.recopy(across.move, **asked) == 1
    for _ in range(20):
        across.step()
    mismatch.refresh_from_db()
    # Copying again doesn't change what PostgreSQL makes of it: said once, not for ever.
    assert mismatch.repair_requested_at is None
    assert mismatch.accepted_by == "ada"
    repaired = [event for event in across.move.events.all() if "repaired" in event.note]
    assert len(repaired) <= 1
    assert across.move.waiting_for == "somebody to start the drain"
    services.close_fence(across.move, by="ada", reason="x", now=across.clock())
    across.run(until=Phase.SOAK)


@only("adk-sqlite to postgresql")
def test_shared_state_that_the_target_cannot_hold_stops_the_cutover(across: World) -> None:
    across.start(offboard_automatically=False)
    across.run(until=Phase.DELTA)
    across.source.run("drop trigger switchyard_user_states_update")
    bad = "update user_states set state = '{\"a\": NaN}' where user_id = 'u-1'"
    across.source.run(bad)
    mismatch = meets(across, resolved_at=None)
    assert (mismatch.part, mismatch.user_id, mismatch.session_id) == ("value", "u-1", "")
    assert "user_states.state a: NaN" in mismatch.first_difference
    with pytest.raises(services.NotNow):
        accept(across, mismatch)
