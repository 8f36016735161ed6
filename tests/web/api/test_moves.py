"""Moves by an operator's program: started on real stores, and what no program may send."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from durable.clock import database_now
from migrations_app.models import TenantMigration
from tenants.models import DirtyLine
from tests import make

pytestmark = pytest.mark.django_db
ASKED = {
    "tenant": "acme",
    "target_cell": "cell-eu1-b",
    "target_store": "store-eu1-b",
    "reason": "more room",
}


@pytest.mark.usefixtures("stores")
def test_a_program_starts_a_move_and_looks_at_it(operator: Any) -> None:
    answer = operator.post("/ops/moves", {**ASKED, "fence_not_before": "2027-01-05T02:00:00Z"})
    assert answer.status_code == 201
    assert answer.json()["phase"] == "prepare"
    assert operator.get(f"/ops/moves/{answer.json()['id']}").json()["tenant"] == "acme"
    assert operator.post("/ops/moves", ASKED).status_code == 409


@pytest.mark.usefixtures("stores")
def test_a_start_that_asks_for_a_dry_run_of_itself_starts_nothing(operator: Any) -> None:
    answer = operator.post("/ops/moves", {**ASKED, "dry_run": True})
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith("dry_run: ")
    assert not TenantMigration.objects.exists()


@pytest.mark.usefixtures("stores")
@pytest.mark.parametrize("moment", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"])
def test_a_time_that_utc_does_not_have_starts_nothing(operator: Any, moment: str) -> None:
    answer = operator.post("/ops/moves", {**ASKED, "fence_not_before": moment})
    assert answer.status_code == 422
    assert not TenantMigration.objects.exists()


def test_a_number_that_is_no_mismatchs_id_is_refused(cast: make.Cast, operator: Any) -> None:
    move = make.move(cast.acme, cast=cast, now=database_now(), phase="verify")
    for number in (0, -1, 2**63):
        answer = operator.post(f"/ops/moves/{move.pk}/recopy", {"mismatches": [number]})
        assert answer.status_code == 422


@pytest.mark.usefixtures("stores")
def test_a_dry_run_tells_a_program_what_would_happen(operator: Any) -> None:
    asked = {**ASKED, "finish_by": f"{database_now() + timedelta(hours=1):%Y-%m-%dT%H:%M:%SZ}"}
    answer = operator.post("/ops/moves/dry-run", asked)
    assert answer.status_code == 200
    told = answer.json()
    assert (told["refusals"], told["late_seconds"]) == ([], 0.0)
    assert [line["phase"] for line in told["lines"]][1] == "BACKFILL"
    assert told["lines"][1]["text"].startswith("2 sessions of 1 user, at ")
    assert told["fence_worst"] >= told["fence_expected"] > 0
    assert not TenantMigration.objects.exists()


@pytest.mark.usefixtures("stores")
def test_a_program_may_give_a_write_budget_or_a_finish_time(operator: Any) -> None:
    both = {**ASKED, "rows_per_second": 40, "pace_per_second": 4}
    assert operator.post("/ops/moves", both).status_code == 409
    assert operator.post("/ops/moves/dry-run", both).status_code == 409
    assert operator.post("/ops/moves", {**ASKED, "rows_per_second": 40}).status_code == 201
    move = TenantMigration.objects.get()
    assert (move.pace_per_second, move.finish_by) == (10.0, None)


@pytest.mark.usefixtures("stores")
def test_only_operators_may_ask_for_a_dry_run(viewer: Any) -> None:
    assert viewer.post("/ops/moves/dry-run", ASKED).status_code == 403


@pytest.mark.usefixtures("stores")
@pytest.mark.parametrize("mode", ["cell", "fence"])
def test_with_the_tenants_own_store_only_its_cell_is_moved(operator: Any, mode: str) -> None:
    asked = {**ASKED, "target_store": "store-eu1-a", "mode": mode}
    told = operator.post("/ops/moves/dry-run", asked).json()
    assert [line["phase"] for line in told["lines"]] == ["PREPARE", "DRAIN", "TARGET", "SOAK"]
    # Nothing is copied: no rate, and no end of a first pass.
    assert (told["refusals"], told["per_second"], told["through_at"]) == ([], None, None)
    assert told["fence_worst"] >= told["fence_expected"] > 0
    answer = operator.post("/ops/moves", asked)
    assert (answer.status_code, answer.json()["mode"]) == (201, "cell")


@pytest.mark.usefixtures("stores")
@pytest.mark.parametrize(
    "asked",
    [
        {"mode": "cell"},
        {"mode": "split", "target_store": "store-eu1-a"},
        {"flip_by_hand": True, "target_store": "store-eu1-a"},
    ],
    ids=["another store", "split", "flip by hand"],
)
def test_what_a_move_of_the_cell_alone_can_not_be_is_refused(
    operator: Any, asked: dict[str, Any]
) -> None:
    assert operator.post("/ops/moves", {**ASKED, **asked}).status_code == 409
    assert not TenantMigration.objects.exists()


@pytest.mark.usefixtures("stores")
def test_a_rollback_of_the_cell_alone_carries_nothing_back(cast: make.Cast, operator: Any) -> None:
    now = database_now()
    move = make.move(
        cast.acme,
        cast=cast,
        now=now,
        phase="soak",
        mode="cell",
        sessions=0,
        fence_opened_at=now - timedelta(minutes=5),
        soak_until=now + timedelta(hours=1),
    )
    move.target_store = cast.store
    move.save()
    DirtyLine.objects.create(tenant=cast.acme, user_id="u-1", session_id="s-1", at=now)
    told = operator.post(f"/ops/moves/{move.pk}/rollback", {"reason": "slow"}).json()
    assert (told["to_carry"], told["quote"]["back"]) == (0, True)
