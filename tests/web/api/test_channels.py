"""Side channels for programs: the same rules as in the services, under the right roles."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from durable.clock import database_now
from migrations_app import channels
from migrations_app.domain.phases import Phase
from migrations_app.models import MoveChannel, SideChannel, TenantMigration
from tests import make, scene

pytestmark = pytest.mark.django_db


@pytest.fixture
def at() -> datetime:
    return database_now()


@pytest.fixture
def move(cast: make.Cast, at: datetime) -> TenantMigration:
    return scene.move(cast, Phase.BACKFILL, now=at, into=60.0)


BODY = {"tenant": "acme", "name": "vectors", "about": "the index of tickets"}


def test_an_admin_registers_edits_and_removes(cast: make.Cast, admin: Any, viewer: Any) -> None:
    made = admin.post("/ops/channels", BODY)
    assert made.status_code == 201
    assert made.json() | {"id": 0} == {
        "id": 0,
        "agent": "",
        "tenant": "acme",
        "name": "vectors",
        "about": "the index of tickets",
        "required": True,
        "copy_by": "person",
        "copy_step": "",
        "verify_by": "person",
        "verify_step": "",
    }
    path = f"/ops/channels/{made.json()['id']}"
    edited = admin.post(f"{path}/edit", {"required": False, "reason": "it is rebuilt at night"})
    assert edited.json() == made.json() | {"required": False}
    agents = admin.post("/ops/channels", {"agent": "support", "name": "logs"})
    assert agents.json()["agent"] == "support"
    listed = viewer.get("/ops/channels?tenant=acme").json()["items"]
    assert [item["name"] for item in listed] == ["vectors", "logs"]
    assert viewer.get("/ops/channels?tenant=core").json()["items"] == []
    assert len(viewer.get("/ops/channels").json()["items"]) == 2
    assert admin.post(f"{path}/remove", {"reason": "gone"}).status_code == 200
    assert admin.post(f"{path}/remove", {"reason": "gone"}).status_code == 409
    assert [i["name"] for i in viewer.get("/ops/channels").json()["items"]] == ["logs"]


@pytest.mark.parametrize(
    ("change", "status"),
    [
        pytest.param({"tenant": None}, 422, id="nobodys"),
        pytest.param({"agent": "support"}, 422, id="two owners"),
        pytest.param({"tenant": "nobody"}, 404, id="no tenant"),
        pytest.param({"name": ""}, 409, id="no name"),
        pytest.param({"copy_by": "magic"}, 422, id="no such way"),
        pytest.param({"copy_by": "callable", "copy_step": "os"}, 422, id="no callable"),
        pytest.param({"copy_by": "callable", "copy_step": "os:system"}, 409, id="not allowed"),
        pytest.param({"copy_by": "command", "copy_step": "sh -c id"}, 409, id="no folder"),
        pytest.param({"surprise": 1}, 422, id="unknown field"),
    ],
)
def test_what_makes_no_sense_is_refused(
    cast: make.Cast, admin: Any, change: dict[str, Any], status: int
) -> None:
    answer = admin.post("/ops/channels", BODY | change)
    assert answer.status_code == status
    assert answer.json().keys() == {"error", "detail", "retry_after_seconds"}
    assert not SideChannel.objects.exists()


def test_who_is_no_admin_registers_nothing(cast: make.Cast, operator: Any, viewer: Any) -> None:
    for caller in (operator, viewer):
        assert caller.post("/ops/channels", BODY).status_code == 403


def test_an_operator_checks_off_and_a_viewer_looks(
    cast: make.Cast, move: TenantMigration, operator: Any, viewer: Any, at: datetime
) -> None:
    channels.register(tenant=cast.acme, name="vectors", by="ada", now=at)
    channels.list_channels(move)
    path = f"/ops/moves/{move.pk}/channels"
    told = viewer.get(path).json()
    assert told["before_fence"] == "side channel vectors to be copied by a person"
    [item] = told["items"]
    assert (item["state"], item["due"]) == ("open", "copy")
    body = {"step": "copy", "note": "moved with the index's own tool"}
    row = f"{path}/{item['id']}"
    assert viewer.post(f"{row}/check-off", body).status_code == 403
    done = operator.post(f"{row}/check-off", body)
    assert (done.json()["state"], done.json()["due"]) == ("copied", "verify")
    assert viewer.get(path).json()["before_fence"] == ""
    assert viewer.get(path).json()["before_flip"] != ""
    assert operator.post(f"{row}/check-off", body).status_code == 409
    assert operator.post(f"{row}/check-off", body | {"note": " "}).status_code == 422
    seen = body | {"step": "verify", "seen": "verify"}
    assert operator.post(f"{row}/check-off", seen).status_code == 409
    assert operator.post(f"{row}/uncheck", body).json()["state"] == "open"


def test_a_row_of_another_move_is_not_found(
    cast: make.Cast, move: TenantMigration, operator: Any, at: datetime
) -> None:
    other = make.move(cast.bolt, cast=cast, now=at)
    channels.register(tenant=cast.bolt, name="vectors", by="ada", now=at)
    channels.list_channels(other)
    row = MoveChannel.objects.get()
    body = {"step": "copy", "note": "x"}
    answer = operator.post(f"/ops/moves/{move.pk}/channels/{row.pk}/check-off", body)
    assert answer.status_code == 404
    assert operator.get("/ops/moves/999999/channels").status_code == 404
