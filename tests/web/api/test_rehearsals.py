"""Practising by an operator's program: a copy, a whole move, and the figures that stay."""

from __future__ import annotations

from typing import Any

import pytest

from migrations_app.domain.phases import Phase
from migrations_app.models import Rehearsal, TenantMigration
from tests import make

pytestmark = pytest.mark.django_db
COPY = {"target_store": "store-eu1-b", "reason": "before the real one"}
MOVE = {**COPY, "target_cell": "cell-eu1-b", "mode": "split"}


@pytest.mark.usefixtures("stores")
def test_an_operator_rehearses_a_copy_and_everybody_reads_the_figures(
    operator: Any, viewer: Any
) -> None:
    path = "/ops/tenants/acme/rehearsals"
    assert viewer.post(f"{path}/copy", COPY).status_code == 403
    answer = operator.post(f"{path}/copy", COPY)
    assert answer.status_code == 201, answer.content
    row = Rehearsal.objects.get()
    told = answer.json()
    assert told | {"at": ""} == {
        "id": row.pk,
        "tenant": "acme",
        "source_store": "store-eu1-a",
        "target_store": "store-eu1-b",
        "at": "",
        "by": "otto (token operator of tests)",
        "move": None,
        "sessions": 2,
        "events": 6,
        "equal": True,
        "detail": "",
        "copy_rate": row.copy_rate,
        "verify_rate": row.verify_rate,
        "shared_rate": row.shared_rate,
        "scan_seconds": row.scan_seconds,
        "mark_seconds": row.mark_seconds,
        "fence_seconds": None,
        "back_seconds": None,
    }
    operator.post(f"{path}/copy", COPY)
    items = viewer.get(path).json()["items"]
    assert [item["id"] for item in items] == [row.pk + 1, row.pk]
    assert items[1] == told


def test_what_stands_against_it_is_answered(cast: make.Cast, operator: Any) -> None:
    path = "/ops/tenants/acme/rehearsals"
    same = operator.post(f"{path}/copy", COPY | {"target_store": "store-eu1-a"})
    assert (same.status_code, same.json()["error"]) == (409, "can_not_rehearse")
    assert operator.post(f"{path}/copy", COPY | {"target_store": "store-none"}).status_code == 404
    assert operator.post("/ops/tenants/none/rehearsals/copy", COPY).status_code == 404
    assert operator.post(f"{path}/move", MOVE | {"mode": "magic"}).status_code == 422
    answer = operator.post(f"{path}/move", MOVE)
    assert (answer.status_code, answer.json()["error"]) == (409, "not_internal")
    assert not Rehearsal.objects.exists()
    assert not TenantMigration.objects.exists()


@pytest.mark.usefixtures("stores")
def test_a_whole_move_is_begun_on_an_internal_tenant(operator: Any, admin: Any) -> None:
    said = {"internal": True, "reason": "our own"}
    assert admin.post("/ops/tenants/acme/internal", said).json()["internal"]
    path = "/ops/tenants/acme/rehearsals/move"
    wrong = operator.post(path, MOVE | {"pause_before": "soak"})
    assert wrong.status_code == 409
    assert "choose one of BACKFILL, SPLIT, DRAIN" in wrong.json()["detail"]
    answer = operator.post(path, MOVE | {"idle_seconds": 1.0, "pause_before": "target"})
    assert answer.status_code == 201, answer.content
    move = TenantMigration.objects.get()
    assert answer.json() == {"id": move.pk, "label": f"mv-{move.pk}", "phase": "prepare"}
    assert (move.rehearsal, move.mode, move.phase) == (True, "split", Phase.PREPARE)
    assert (move.idle_seconds, move.pause_before) == (1.0, "target")
    assert operator.post(path, MOVE).status_code == 409
