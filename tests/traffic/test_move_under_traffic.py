"""A thousand turns through a whole move, and some through a split, between real processes.

On PostgreSQL and Redis, two agent processes talk to three tenants; one of these is moved between
two databases. Turns stream, call tools that take seconds, and are cancelled anywhere.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from django.conf import settings
from django.db import connection

from bench.audit_events import Verdict, audit
from bench.journal import read
from bench.scene import Resident, Scene, start_move
from bench.servers import free_port
from durable.clock import database_now
from migrations_app.domain.phases import ENDED, Mode, Phase
from migrations_app.models import TenantMigration
from platform_admin.processes import Supervisor, installation
from tenants.models import PlacementChange

pytestmark = pytest.mark.traffic
FLEETS = ("agents-1", "agents-2")
TURNS = 1_000
# With kills: enough to talk through every phase.
TURNS_WITH_KILLS = 500
# Enough for some to come while the tenant is split, on a quick machine too.
TURNS_OF_A_SPLIT = 1_000
# Clients never rest: known sessions are waited for this long.
IDLE_BOUND_SECONDS = 5.0
# New conversations in 100 turns, for some to begin while the tenant is split.
BORN = {Mode.FENCE: 5, Mode.SPLIT: 25}
# Of the turns, those that must have been taken before the move starts.
BEFORE = 150
# Who is killed (-9) as soon as the move is seen in a phase.
KILLS = {
    Phase.BACKFILL: ("bulk", "beat"),
    Phase.DRAIN: ("prompt",),
    Phase.DELTA: ("web",),
    Phase.VERIFY: ("prompt",),
    Phase.SOAK: ("web", "bulk"),
}
WITHIN_SECONDS = 180.0
# A refusal reaches a client a moment after the fence, by the client's own clock.
SLACK_SECONDS = 2.0


@dataclass(frozen=True)
class Outcome:
    move: TenantMigration
    verdict: Verdict
    # Events that each store acknowledged for the tenant that moved.
    by_store: dict[str, int]
    # Sessions that the target acknowledged first, and had before it had all.
    born: int
    restarts: dict[str, int]


@pytest.fixture
def outcome(
    request: pytest.FixtureRequest,
    transactional_db: None,
    server_url: str,
    new_database: Callable[[], str],
    tmp_path: Path,
) -> Iterator[Outcome]:
    turns, kills, mode = request.param
    scene = Scene(
        home=tmp_path,
        stores={
            key: new_database().replace("postgresql://", "postgresql+psycopg://")
            for key in ("store-eu1-a", "store-eu1-b")
        },
        cells={"store-eu1-a": "cell-eu1-a", "store-eu1-b": "cell-eu1-b"},
        residents=(
            Resident("acme", "support", "store-eu1-a", sessions=30, clients=3),
            Resident("bolt", "support", "store-eu1-a", sessions=10),
            Resident("core", "billing", "store-eu1-b", sessions=10),
        ),
    )
    environment = {
        "DATABASE_URL": f"{server_url}/{connection.settings_dict['NAME']}",
        "REDIS_URL": settings.REDIS_URL,
        "SWITCHYARD_HOME": str(tmp_path),
        # google-adk announces its experimental parts.
        "PYTHONWARNINGS": "ignore",
        # A killed worker costs this much, not more.
        "DURABLE_LEASE_SECONDS": "15",
        **scene.environment,
    }
    tokens = scene.onboard(now=database_now())
    port = free_port()
    with (
        pytest.MonkeyPatch.context() as patch,
        Supervisor(tmp_path / "log", environment=environment) as supervisor,
    ):
        for name, url in scene.environment.items():
            patch.setenv(name, url)
        fills = scene.fills()
        supervisor.start(*installation(port), *fills)
        _until(supervisor, lambda: not any(supervisor.running(fill.name) for fill in fills))
        supervisor.start(
            *scene.fleets(
                FLEETS,
                address=f"http://127.0.0.1:{port}",
                tokens=tokens,
                think_seconds=0.0,
                turns=turns // len(FLEETS),
                born=BORN[mode],
            )
        )
        journals = [tmp_path / "journal" / f"{name}.jsonl" for name in FLEETS]
        _until(supervisor, lambda: _turns(journals) >= BEFORE)
        move = start_move(
            "acme",
            cell="cell-eu1-b",
            store="store-eu1-b",
            by="ada",
            reason="a thousand turns",
            soak_seconds=2,
            pace_per_second=20,
            mode=mode,
            idle_seconds=1.0,
            idle_bound_seconds=IDLE_BOUND_SECONDS,
        )

        left = dict(kills)

        def over() -> bool:
            move.refresh_from_db()
            for name in left.pop(Phase(move.phase), ()):
                os.kill(supervisor.pid(name), signal.SIGKILL)
            return move.phase in ENDED and not any(map(supervisor.running, FLEETS))

        _until(supervisor, over)
        told = [one for one in read(journals) if (one.tenant, one.kind) == ("acme", "event")]
        flip = move.fence_opened_at.timestamp() if move.fence_opened_at is not None else 0.0
        first = {one.session: one for one in reversed(told)}
        born = sum(one.store == "store-eu1-b" and one.at < flip for one in first.values())
        yield Outcome(
            move,
            audit(scene.journals, scene.homes()),
            Counter(one.store for one in told),
            born,
            dict(supervisor.restarts),
        )


@pytest.mark.timeout(2 * WITHIN_SECONDS)
@pytest.mark.parametrize("outcome", [(TURNS, {}, Mode.FENCE)], indirect=True, ids=["calm"])
def test_a_thousand_turns_through_a_move_lose_and_double_nothing(outcome: Outcome) -> None:
    move, verdict = outcome.move, outcome.verdict
    assert move.phase == Phase.DONE, move.failure
    assert outcome.restarts == {}
    assert verdict.examples == []
    assert verdict.clean, str(verdict)
    assert verdict.failed == 0
    assert min(outcome.by_store.values()) > 50
    # Refused only while the fence was closed, and all of them to be sent again.
    assert move.fence_closed_at is not None
    assert move.fence_opened_at is not None
    begin, end = move.fence_closed_at.timestamp(), move.fence_opened_at.timestamp()
    assert verdict.refused_outside("acme", begin, end + SLACK_SECONDS) == 0
    assert set(verdict.refused) <= {"Draining", "Moved", "Behind"}


@pytest.mark.timeout(2 * WITHIN_SECONDS)
@pytest.mark.parametrize(
    "outcome", [(TURNS_WITH_KILLS, KILLS, Mode.FENCE)], indirect=True, ids=["killed"]
)
def test_worker_beat_and_web_killed_under_traffic_lose_and_double_nothing(
    outcome: Outcome,
) -> None:
    move, verdict = outcome.move, outcome.verdict
    # Finished, or aborted by its own budget: either way on one side, whole.
    assert move.phase in ENDED, move.failure
    assert sum(outcome.restarts.values()) >= 3
    assert verdict.examples == []
    assert verdict.clean, str(verdict)
    assert verdict.failed == 0


@pytest.mark.timeout(2 * WITHIN_SECONDS)
@pytest.mark.parametrize(
    "outcome", [(TURNS_OF_A_SPLIT, {}, Mode.SPLIT)], indirect=True, ids=["split"]
)
def test_a_tenant_that_splits_under_traffic_loses_and_doubles_nothing(outcome: Outcome) -> None:
    move, verdict = outcome.move, outcome.verdict
    assert move.phase == Phase.DONE, move.failure
    assert move.split_placement_version is not None
    assert outcome.born > 0
    assert outcome.restarts == {}
    assert verdict.examples == []
    assert verdict.clean, str(verdict)
    assert verdict.failed == 0
    assert verdict.spoken > 0
    # Before it, only new sessions were, for as long as older turns might have begun one.
    assert move.fence_opened_at is not None
    split_at = PlacementChange.objects.get(
        placement_version=move.split_placement_version
    ).at.timestamp()
    begin, end = move.started_at.timestamp(), move.fence_opened_at.timestamp() + SLACK_SECONDS
    assert begin < split_at < end
    assert verdict.refused_outside("acme", begin, end) == 0


def _until(supervisor: Supervisor, true: Callable[[], bool]) -> None:
    limit = time.monotonic() + WITHIN_SECONDS
    while not true():
        supervisor.tend()
        if time.monotonic() > limit:
            logs = {name: supervisor.tail(name) for name in (*FLEETS, "bulk", "prompt")}
            pytest.fail("\n".join(f"{name}:\n{log}" for name, log in logs.items()))
        time.sleep(0.1)


def _turns(journals: list[Path]) -> int:
    found = (path.read_bytes() for path in journals if path.exists())
    return sum(text.count(b'"kind":"turn"') for text in found)
