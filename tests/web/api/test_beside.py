"""What goes along with a tenant, for programs: split moves, artifacts, and both in a dry run."""

from __future__ import annotations

from typing import Any

import pytest

from durable.clock import database_now
from migrations_app.domain.phases import Phase
from migrations_app.models import TenantMigration
from tests import make, scene

pytestmark = pytest.mark.django_db
ASKED = {
    "tenant": "acme",
    "target_cell": "cell-eu1-b",
    "target_store": "store-eu1-b",
    "reason": "more room",
    "mode": "split",
    "idle_seconds": 60,
    "idle_bound_seconds": 900,
}


@pytest.mark.usefixtures("stores")
def test_a_program_starts_a_split(operator: Any) -> None:
    answer = operator.post("/ops/moves", ASKED | {"pause_before": "drain"})
    assert answer.status_code == 201, answer.json()
    told = answer.json()
    assert (told["mode"], told["both_serve"], told["born"]) == ("split", False, None)
    assert (told["idle_seconds"], told["idle_bound_seconds"]) == (60, 900)
    assert told["pause_before"] == "drain"


@pytest.mark.usefixtures("stores")
def test_a_dry_run_of_a_split_tells_it(operator: Any) -> None:
    told = operator.post("/ops/moves/dry-run", ASKED).json()
    assert told["refusals"] == []
    assert [line["phase"] for line in told["lines"]][1:4] == ["BACKFILL", "SPLIT", "DRAIN"]
    assert "until none of its sessions has changed for 60s, 15m at most" in told["lines"][2]["text"]
    assert not TenantMigration.objects.exists()


@pytest.mark.usefixtures("stores")
@pytest.mark.parametrize(
    ("given", "status"),
    [
        ({"target_cell": "cell-eu1-a"}, 409),
        ({"idle_seconds": 901}, 409),
        ({"idle_seconds": "NaN"}, 422),
        ({"mode": "both"}, 422),
    ],
    ids=["one cell", "longer than its bound", "no number", "no such mode"],
)
def test_a_split_that_makes_no_sense_is_refused(
    given: dict[str, object], status: int, operator: Any
) -> None:
    assert operator.post("/ops/moves", ASKED | given).status_code == status
    assert not TenantMigration.objects.exists()


def test_a_program_sees_who_serves_and_what_both_sides_changed(
    cast: make.Cast, viewer: Any
) -> None:
    move = scene.split_move(cast, Phase.SPLIT, now=database_now())
    told = viewer.get(f"/ops/moves/{move.pk}").json()
    assert (told["both_serve"], told["born"]) == (True, 37)
    banner = {"user_id": None, "key": "banner", "taken": "target", "undecided": False}
    assert told["merged"][1] == banner
    assert told["split_placement_version"] == move.split_placement_version


def test_renumbered_versions_and_what_names_them_are_listed_in_pages(
    cast: make.Cast, viewer: Any
) -> None:
    move = scene.move(cast, Phase.VERIFY, now=database_now())
    scene.artifacts(move, 250)
    found: list[dict[str, Any]] = []
    for what in ("artifact-numbers", "artifact-references"):
        after, rows = "0", []
        while after is not None:
            part = viewer.get(f"/ops/moves/{move.pk}/{what}?after={after}").json()
            rows += part["items"]
            after = part["next"]
        assert len(rows) == 250
        assert (rows[6]["source_version"], rows[6]["target_version"]) == (7, 6)
        found += rows
    assert found[-1]["place"] == "event 250 actions.artifact_delta.user:report.pdf"
