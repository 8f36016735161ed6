"""Moves by an operator's program: started on real stores, and what no program may send."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from durable.clock import database_now
from migrations_app.models import TenantMigration
from tests import make
from tests.stores import Raw

pytestmark = pytest.mark.django_db
ASKED = {
    "tenant": "acme",
    "target_cell": "cell-eu1-b",
    "target_store": "store-eu1-b",
    "reason": "more room",
}


@pytest.fixture
def stores(cast: make.Cast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files, the first with sessions of acme."""
    monkeypatch.setenv("STORE_EU1_A", f"sqlite:///{tmp_path}/one.db")
    monkeypatch.setenv("STORE_EU1_B", f"sqlite:///{tmp_path}/two.db")
    source = Raw(f"sqlite:///{tmp_path}/one.db")
    source.make_tables("env:STORE_EU1_A", "support.acme")
    source.seed("support.acme", sessions=2, users=1)


@pytest.mark.usefixtures("stores")
def test_a_program_starts_a_move_and_looks_at_it(operator: Any) -> None:
    answer = operator.post("/ops/moves", {**ASKED, "fence_not_before": "2027-01-05T02:00:00Z"})
    assert answer.status_code == 201
    assert answer.json()["phase"] == "prepare"
    assert operator.get(f"/ops/moves/{answer.json()['id']}").json()["tenant"] == "acme"
    assert operator.post("/ops/moves", ASKED).status_code == 409


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
