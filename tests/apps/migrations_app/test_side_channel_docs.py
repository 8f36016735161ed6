"""The worked example of docs/side-channels.md is carried out as it stands there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from django.conf import LazySettings

from migrations_app import channels, queries
from migrations_app.copying import Timer
from migrations_app.domain.phases import Phase
from migrations_app.models import MoveChannel, TenantMigration
from tests.world import APP, World

pytestmark = pytest.mark.django_db

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "side-channels.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)


def registered(world: World, body: dict[str, Any]) -> None:
    owner = {"tenant": world.cast.acme} if body.pop("tenant", "") else {}
    if body.pop("agent", ""):
        owner = {"agent": world.cast.acme.agent}
    channels.register(**owner, **body, by="ada", now=world.clock())


def run(world: World) -> MoveChannel:
    channels.run(world.move, timer=Timer(5), clock=world.clock)
    return MoveChannel.objects.select_related("channel").get(channel__name="vectors")


@pytest.fixture
def folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: LazySettings
) -> tuple[Path, Path]:
    """The page's program in its folder, and where the index lies at both stores."""
    [script] = blocks("sh")
    program = tmp_path / "steps" / "vectors"
    program.parent.mkdir()
    program.write_text(script)
    program.chmod(0o700)
    settings.CHANNEL_COMMANDS = program.parent
    settings.CHANNEL_VARIABLES = ["VECTORS_ROOT"]
    monkeypatch.setenv("VECTORS_ROOT", str(tmp_path))
    return tmp_path / "store-eu1-a" / APP, tmp_path / "store-eu1-b" / APP


def test_the_example_of_the_docs_moves_an_index_and_waits_for_a_person(
    files: World, folders: tuple[Path, Path]
) -> None:
    here, there = folders
    for body in blocks("json"):
        registered(files, json.loads(body))
    files.start(automatic=False)
    files.run(until=Phase.BACKFILL)
    away = run(files)
    assert away.detail == (f"It asks to be called later: no index of {APP} at store-eu1-a")
    here.mkdir(parents=True)
    for number in range(250):
        (here / f"v-{number:03}").write_text(f"vector {number}")
    files.clock.pass_by(2)
    assert queries.channels_before_fence(files.move).startswith("side channel vectors")
    assert [run(files).cursor for _ in range(3)] == ["v-099", "v-199", "v-249"]
    assert queries.channels_before_fence(files.move) == ""
    green = run(files)
    assert (green.state, green.detail) == ("green", "250 vectors")
    # Added before the fence closed.
    (here / "v-900").write_text("late")
    files.clock.pass_by(5)
    TenantMigration.objects.update(phase=Phase.DELTA, fence_closed_at=files.clock())
    assert queries.channels_before_flip(files.move) == "side channel vectors to be copied"
    assert run(files).detail == "1 vectors"
    assert run(files).state == "green"
    assert queries.channels_before_flip(files.move) == ""
    assert sorted(p.name for p in there.iterdir()) == sorted(p.name for p in here.iterdir())
    TenantMigration.objects.update(phase=Phase.SOAK)
    [logs] = queries.open_channels(files.move)
    for step in ("copy", "verify"):
        channels.check_off(logs, step=step, note="ship to b", by="ada", now=files.clock())
    assert queries.open_channels(files.move) == []
