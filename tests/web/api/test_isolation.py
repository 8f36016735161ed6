"""The register of shared resources for programs: the same rules as on its page."""

from __future__ import annotations

from typing import Any

import pytest

from capacity import tasks
from capacity.models import IsolationRun, SharedResource
from durable.clock import database_now

pytestmark = pytest.mark.django_db

BODY = {
    "name": "Vector index",
    "kind": "data",
    "control": "A partition per tenant.",
    "shown_by": "A query as two tenants.",
    "reason": "agents search in it now",
}


def test_an_operator_adds_edits_and_removes(operator: Any, viewer: Any) -> None:
    made = operator.post("/ops/resources", BODY)
    assert made.status_code == 201
    path = f"/ops/resources/{made.json()['id']}"
    change = {"kind": "data", "control": "", "reason": "it has none", "seen": made.json()["at"]}
    edited = operator.post(path, change)
    assert (edited.status_code, edited.json()["control"]) == (200, "")
    assert operator.post(path, change).status_code == 409
    names = [item["name"] for item in viewer.get("/ops/resources").json()["items"]]
    assert "Vector index" in names
    assert operator.post(f"{path}/remove", {"reason": "gone"}).status_code == 204
    assert operator.post(f"{path}/remove", {"reason": "gone"}).status_code == 404


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"kind": "weather"}, 422),
        ({"name": "Session store"}, 409),
        ({"reason": ""}, 422),
        ({"name": "x" * 101}, 422),
        ({"more": 1}, 422),
    ],
    ids=["kind", "taken", "no reason", "long", "unknown field"],
)
def test_what_can_not_be_kept_is_refused(
    changes: dict[str, Any], status: int, operator: Any
) -> None:
    before = SharedResource.objects.count()
    assert operator.post("/ops/resources", BODY | changes).status_code == status
    assert SharedResource.objects.count() == before


def test_a_viewer_only_reads(viewer: Any) -> None:
    assert viewer.post("/ops/resources", BODY).status_code == 403
    IsolationRun.objects.create(began_at=database_now(), by="olga", build="2026.3.1")
    [run] = viewer.get("/ops/isolation").json()["items"]
    assert (run["by"], run["passed"]) == ("olga", None)


def test_a_release_gate_starts_a_run_and_looks_until_it_has_ended(
    operator: Any, viewer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(tasks.isolation, "apply_async", lambda args, queue: sent.append(args))
    assert viewer.post("/ops/isolation", {}).status_code == 403
    started = operator.post("/ops/isolation", {})
    assert started.status_code == 202
    assert sent == [(started.json()["id"],)]
    assert operator.post("/ops/isolation", {}).status_code == 409
    assert len(sent) == 1
