"""The soak's watch sees every change of a closed store, whoever made it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

import pytest

from bench.soak import SOURCE, TARGET, Watch
from migrations_app.domain.phases import ENDED, Phase
from migrations_app.models import TenantMigration
from tests import make
from tests.stores import Raw

pytestmark = pytest.mark.django_db
APP = "support.acme"


@pytest.fixture
def sides(new_database: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Raw]:
    made = {}
    for key in (SOURCE, TARGET):
        made[key] = Raw(new_database())
        monkeypatch.setenv("STORE", made[key].url)
        made[key].make_tables("env:STORE", APP)
        made[key].seed(APP, sessions=3, users=2)
    return made


@pytest.fixture
def watch(sides: dict[str, Raw]) -> Watch:
    return Watch({key: raw.url for key, raw in sides.items()})


@pytest.fixture
def move(cast: make.Cast, now: datetime) -> TenantMigration:
    return make.move(cast.acme, cast=cast, now=now)


def goes_on(move: TenantMigration, phase: Phase, now: datetime) -> None:
    move.events.create(at=now, who="mover", was=move.phase, now=phase)
    move.phase = phase
    if phase in ENDED:
        move.due_at, move.ended_at = None, now
    move.save()


@pytest.mark.parametrize(
    "write",
    [
        "insert into app_states values ('support.acme', '{}', now())"
        " on conflict (app_name) do update set state = '{}'",
        "update user_states set update_time = now() where user_id = 'u-0'",
        "update events set event_data = event_data where id = 's-1-e0'",
        "delete from sessions where id = 's-2'",
    ],
    ids=["shared state", "a user's", "an edit in place", "a delete"],
)
def test_a_write_at_the_closed_source_is_seen(
    watch: Watch, move: TenantMigration, sides: dict[str, Raw], now: datetime, write: str
) -> None:
    goes_on(move, Phase.VERIFY, now)
    watch.look(move)
    goes_on(move, Phase.SOAK, now)
    sides[TARGET].turn(APP, "u-0", "s-0", "mine")  # where the tenant lives: nobody's business
    watch.look(move)
    assert watch.changes == []
    sides[SOURCE].run(write)
    watch.look(move)
    assert len(watch.changes) == 1
    assert f"closed {SOURCE} changed" in watch.changes[0]


def test_a_write_at_the_target_is_seen_once_a_rollback_has_closed_it(
    watch: Watch, move: TenantMigration, sides: dict[str, Raw], now: datetime
) -> None:
    goes_on(move, Phase.SOAK, now)
    watch.look(move)
    goes_on(move, Phase.REVERSE_DELTA, now)
    sides[SOURCE].turn(APP, "u-1", "s-1", "movers")  # carried back
    watch.look(move)
    goes_on(move, Phase.ROLLED_BACK, now)
    watch.look(move)
    assert (watch.changes, sorted(watch.looks.values())) == ([], [1, 2])
    sides[TARGET].turn(APP, "u-0", "s-0", "late")
    watch.look(move)
    assert len(watch.changes) == 1


def test_a_rollback_that_was_stopped_begins_a_new_look(
    watch: Watch, move: TenantMigration, sides: dict[str, Raw], now: datetime
) -> None:
    goes_on(move, Phase.SOAK, now)
    watch.look(move)
    goes_on(move, Phase.REVERSE_DELTA, now)
    sides[SOURCE].turn(APP, "u-1", "s-1", "movers")
    goes_on(move, Phase.SOAK, now)
    watch.look(move)
    assert watch.changes == []


def test_an_open_store_is_not_looked_at(watch: Watch, move: TenantMigration, now: datetime) -> None:
    for phase in (Phase.BACKFILL, Phase.DRAIN, Phase.OFFBOARD):
        goes_on(move, phase, now)
        watch.look(move)
    assert not watch.looks
