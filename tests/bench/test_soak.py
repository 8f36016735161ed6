"""The soak's watch sees every change of a closed store, whoever made it."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from bench.audit_events import Lived
from bench.scene import Scene
from bench.soak import SOURCE, TARGET, Watch
from migrations_app.domain.phases import ENDED, Phase
from migrations_app.models import TenantMigration
from tenants.models import PlacementChange
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


def test_a_fence_that_was_left_for_the_split_is_another_closing_than_the_next(
    watch: Watch, move: TenantMigration, sides: dict[str, Raw], now: datetime
) -> None:
    goes_on(move, Phase.VERIFY, now)
    goes_on(move, Phase.DELTA, now)
    watch.look(move)
    goes_on(move, Phase.SPLIT, now)
    # Both sides are open, and nobody looked meanwhile.
    sides[SOURCE].turn(APP, "u-1", "s-1", "mine")
    goes_on(move, Phase.DELTA, now)
    watch.look(move)
    assert (watch.changes, list(watch.looks.values())) == ([], [1, 1])


def test_the_source_is_open_while_the_way_back_out_of_a_split_waits_for_its_proof(
    watch: Watch, move: TenantMigration, now: datetime
) -> None:
    move.came_from = Phase.SPLIT
    goes_on(move, Phase.REVERSE_DRAIN, now)
    watch.look(move)
    assert not watch.looks


def test_a_split_is_lived_in_by_whoever_began_there(
    move: TenantMigration, cast: make.Cast, now: datetime, tmp_path: Path
) -> None:
    def says(kind: str) -> None:
        store = cast.other_store if kind == "on" else cast.store
        version = 1 + PlacementChange.objects.latest("id").placement_version
        PlacementChange.objects.create(
            tenant=cast.acme,
            cell=cast.cell,
            store=store,
            placement_version=version,
            at=now,
            by="mover",
            reason="",
        )
        if kind == "back":
            ended = make.move(cast.bolt, cast=cast, now=now)
            TenantMigration.objects.filter(pk=ended.pk).update(
                back_placement_version=version, phase=Phase.ROLLED_BACK, due_at=None
            )

    for kind in ("split", "back", "split", "on", "back"):
        says(kind)
    home, far = Lived(SOURCE), Lived(TARGET)
    births = Lived(TARGET, births=True)
    scene = Scene(home=tmp_path, stores={SOURCE: "one", TARGET: "two"}, cells={}, residents=())
    lived = [home, births, home, home, births, home, far, home]
    assert scene.lived()["acme"] == lived
    known = json.loads(scene.note_homes().read_text())
    assert known["acme"] == [APP, "one", [list(place) for place in lived]]


def test_an_open_store_is_not_looked_at(watch: Watch, move: TenantMigration, now: datetime) -> None:
    for phase in (Phase.BACKFILL, Phase.SPLIT, Phase.DRAIN, Phase.OFFBOARD):
        goes_on(move, phase, now)
        watch.look(move)
    assert not watch.looks
