"""The way back and the mismatch table for programs: the pages' verbs, and dry runs by default."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

from durable.clock import database_now
from migrations_app.domain.mismatch import Looks
from migrations_app.domain.phases import Phase
from migrations_app.models import Mismatch, TenantMigration
from tenants.models import AuditEntry
from tests import make, scene

pytestmark = pytest.mark.django_db


@pytest.fixture
def at() -> datetime:
    return database_now()


@pytest.fixture
def soaking(cast: make.Cast, at: datetime) -> TenantMigration:
    move = scene.move(cast, Phase.SOAK, now=at, into=3600.0)
    scene.stamps(move, 7)
    return move


def columns(move: TenantMigration) -> dict[str, Any]:
    return TenantMigration.objects.values().get(pk=move.pk)


def test_a_rollback_is_a_dry_run_until_it_is_said_otherwise(
    soaking: TenantMigration, operator: Any, guarded: Callable[[TenantMigration], None]
) -> None:
    guarded(soaking)
    before, audited = columns(soaking), AuditEntry.objects.count()
    path = f"/ops/moves/{soaking.pk}/rollback"
    answer = operator.post(path, {"reason": "slow since the cutover"})
    assert answer.status_code == 200
    told = answer.json()
    assert told["dry_run"] is True
    assert told["to_carry"] == 240
    assert 0 < told["quote"]["expected"] < told["quote"]["worst"] <= told["quote"]["budget"]
    assert told["soak_left"] == pytest.approx(71 * 3600, abs=60)
    assert told["move"]["rolling_back"] is False
    assert columns(soaking) == before
    assert AuditEntry.objects.count() == audited
    assert not soaking.events.filter(note__startswith="Roll back").exists()
    answer = operator.post(path, {"reason": "slow since the cutover", "dry_run": False})
    assert answer.json()["move"]["rolling_back"] is True
    assert (
        operator.post(f"/ops/moves/{soaking.pk}/cancel-rollback", {"reason": "no"}).json()[
            "rolling_back"
        ]
        is False
    )


def test_both_fences_of_a_split_are_quoted(cast: make.Cast, viewer: Any, at: datetime) -> None:
    move = scene.split_move(cast, Phase.SPLIT, now=at)
    path = f"/ops/moves/{move.pk}/quote"
    forward, back = (viewer.get(f"{path}?back={way}").json() for way in ("false", "true"))
    assert viewer.get(path).json() == forward
    assert (forward["back"], back["back"]) == (False, True)
    # 37 were born on the target; the source's own changes are others.
    assert back["expected"] != forward["expected"]
    TenantMigration.objects.filter(pk=move.pk).update(phase=Phase.SOAK, placement_version=9)
    assert viewer.get(path).json()["back"] is True
    assert viewer.get(f"{path}?back=false").status_code == 409


def test_a_dry_run_is_refused_like_the_act(soaking: TenantMigration, operator: Any) -> None:
    path = f"/ops/moves/{soaking.pk}/rollback"
    for dry_run in (True, False):
        answer = operator.post(path, {"dry_run": dry_run, "reason": "x", "budget_seconds": 2.0})
        assert answer.status_code == 409
        assert answer.json().keys() == {"error", "detail", "retry_after_seconds"}


def test_an_offboarding_is_a_dry_run_until_it_is_said_otherwise(
    soaking: TenantMigration, operator: Any
) -> None:
    before = columns(soaking)
    path = f"/ops/moves/{soaking.pk}/confirm-offboard"
    body = {"typed": "acme", "reason": "soaked"}
    told = operator.post(path, body).json()
    assert (told["dry_run"], told["sessions"]) == (True, 7)
    assert told["begins_at"] is not None
    assert columns(soaking) == before
    assert operator.post(path, body | {"typed": "bolt"}).status_code == 409
    assert operator.post(path, body | {"dry_run": False}).status_code == 200
    soaking.refresh_from_db()
    assert soaking.offboard_confirmed_at is not None


def test_a_move_on_its_way_back_shows_both_fences(
    cast: make.Cast, at: datetime, viewer: Any
) -> None:
    move = scene.move(cast, Phase.REVERSE_DELTA, now=at)
    told = viewer.get(f"/ops/moves/{move.pk}").json()
    assert told["rolling_back"] is True
    assert told["rollback_reason"] == "answers are slow since the cutover"
    (past,) = told["past_fences"]
    assert past["back"] is False
    assert past["opened_at"] > past["closed_at"]
    assert past["expected"] > 0
    assert told["touched"] == 240


def test_mismatches_are_listed_by_state_and_kind(
    cast: make.Cast, at: datetime, viewer: Any
) -> None:
    move = scene.move(cast, Phase.VERIFY, now=at)
    rows = scene.mismatches(move, now=at)
    rows[0].transient = True
    rows[0].save()
    path = f"/ops/moves/{move.pk}/mismatches"
    assert [row["state"] for row in viewer.get(path).json()["items"]] == [
        "transient",
        "open",
        "open",
    ]
    (leak,) = viewer.get(f"{path}?state=open&looks_like=fence_leak").json()["items"]
    assert leak["session_id"] == "b204e6d8"
    assert leak["looks"] == "Written at the source after it was copied."
    assert viewer.get(f"{path}?state=bad").status_code == 422
    assert len(viewer.get(f"{path}?after={rows[1].pk}").json()["items"]) == 1


def test_a_program_repairs_reconciles_and_accepts(
    cast: make.Cast, at: datetime, operator: Any
) -> None:
    move = scene.move(cast, Phase.VERIFY, now=at)
    _, leak, empty = scene.mismatches(move, now=at)
    path = f"/ops/moves/{move.pk}"
    body = {"mismatches": [leak.pk], "reason": "again"}
    assert operator.post(f"{path}/recopy", body).status_code == 200
    body = {"mismatches": [empty.pk], "reason": "again"}
    assert operator.post(f"{path}/reconcile-users", body).status_code == 200
    assert Mismatch.objects.filter(part="user", user_id=empty.user_id).exists()
    assert operator.post(f"{path}/accept", body).status_code == 409
    Mismatch.objects.filter(pk=empty.pk).update(looks_like=Looks.CANNOT_HOLD)
    assert operator.post(f"{path}/accept", body).status_code == 200
    assert Mismatch.objects.get(pk=empty.pk).accepted_reason == "again"


def test_a_program_changes_the_pace_and_flips(cast: make.Cast, at: datetime, operator: Any) -> None:
    move = scene.move(cast, Phase.BACKFILL, now=at)
    path = f"/ops/moves/{move.pk}"
    told = operator.post(f"{path}/pace", {"pace_per_second": 12, "reason": "busy"}).json()
    assert told["pace_per_second"] == 12
    soon = (at + timedelta(hours=2)).isoformat()
    told = operator.post(f"{path}/pace", {"finish_by": soon, "reason": "busy"}).json()
    assert (told["pace_per_second"], told["finish_by"] is None) == (None, False)
    assert operator.post(f"{path}/flip", {"reason": "go"}).status_code == 409
    TenantMigration.objects.update(phase="verify", flip_by_hand=True)
    assert operator.post(f"{path}/flip", {"reason": "go"}).json()["flip_requested_at"]


@pytest.mark.parametrize(
    "verb", ["rollback", "cancel-rollback", "accept", "reconcile-users", "pace", "flip"]
)
def test_a_viewers_program_acts_on_nothing(
    verb: str, soaking: TenantMigration, viewer: Any
) -> None:
    body = {"reason": "curious", "mismatches": [1]}
    answer = viewer.post(f"/ops/moves/{soaking.pk}/{verb}", body)
    assert (answer.status_code, answer.json()["error"]) == (403, "forbidden")


def test_values_are_for_operators_and_a_store_that_is_away_is_said(
    soaking: TenantMigration, at: datetime, viewer: Any, operator: Any
) -> None:
    (row, _) = scene.late_writes(soaking, now=at)
    for path in (f"mismatches/{row.pk}/versions", "late-writes"):
        url = f"/ops/moves/{soaking.pk}/{path}"
        assert viewer.get(url).status_code == 403
        assert operator.get(url).status_code == 409
    assert (
        operator.get(
            f"/ops/moves/{soaking.pk}/mismatches/{row.pk + 1_000_000}/versions"
        ).status_code
        == 404
    )


def test_the_document_says_what_a_dry_run_is(client: Any) -> None:
    document = client.get("/api/v1/openapi.json").json()
    (path,) = [path for path in document["paths"] if path.endswith("/{pk}/rollback")]
    assert "dry run by default" in document["paths"][path]["post"]["description"]
    body = document["components"]["schemas"]["RollbackIn"]["properties"]["dry_run"]
    assert body["default"] is True
