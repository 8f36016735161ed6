"""After a restore, under /api/v1/ops/restored."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from durable.clock import database_now
from migrations_app.models import RestoreFinding
from tenants import queries, services
from tests import make

pytestmark = pytest.mark.django_db


@pytest.fixture
def finding(cast: make.Cast) -> RestoreFinding:
    now = database_now() - timedelta(hours=2)
    services.halt(by="ada", why="restored from last night", now=now)
    services.replace_epoch(by="ada", reason="restored", now=now)
    services.note_comparison(now=now)
    return RestoreFinding.objects.create(
        tenant=cast.acme, found_at=now, says="a", told="b", differs="c", homes=["store-eu1-b"]
    )


def test_everybody_reads_why_machines_are_stopped(viewer: Any, finding: RestoreFinding) -> None:
    body = viewer.get("/ops/restored").json()
    assert (body["stopped"], body["why"]) == (True, "restored from last night")
    [row] = body["findings"]
    assert (row["tenant"], row["homes"], row["opens"]) == ("acme", ["store-eu1-b"], False)
    assert (body["open"], body["next"]) == (1, None)


def test_what_nobody_has_settled_comes_in_pages(
    viewer: Any, finding: RestoreFinding, cast: make.Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenants.api.PAGE", 1)
    now = finding.found_at
    more = {"found_at": now, "says": "a", "told": "b", "differs": "c", "homes": []}
    RestoreFinding.objects.create(tenant=cast.bolt, **more)
    first = viewer.get("/ops/restored").json()
    rest = viewer.get(f"/ops/restored?after={first['next']}").json()
    found = [[row["tenant"] for row in part["findings"]] for part in (first, rest)]
    assert (found, first["open"], rest["next"]) == ([["acme"], ["bolt"]], 2, None)


@pytest.mark.parametrize(
    ("path", "more"),
    [("acme/settle", {"store": "store-eu1-b"}), ("acme/leave-refused", {}), ("start", {})],
)
def test_only_an_admin_settles(
    operator: Any, finding: RestoreFinding, path: str, more: dict[str, str]
) -> None:
    answer = operator.post(f"/ops/restored/{path}", {"reason": "r", **more})
    assert answer.status_code == 403


def test_an_admin_leaves_a_tenant_refused_and_starts_the_machines(
    admin: Any, finding: RestoreFinding
) -> None:
    answer = admin.post("/ops/restored/start", {"reason": "done"})
    assert (answer.status_code, answer.json()["error"]) == (409, "not_settled")
    # Its store's address leads nowhere in this test, so it can't be said to live there.
    answer = admin.post("/ops/restored/acme/settle", {"store": "store-eu1-b", "reason": "r"})
    assert (answer.status_code, answer.json()["error"]) == (409, "not_a_home")
    answer = admin.post("/ops/restored/acme/leave-refused", {"reason": "its store burnt"})
    assert answer.json()["findings"] == []
    answer = admin.post("/ops/restored/start", {"reason": "done"})
    assert answer.json()["stopped"] is False
    assert queries.halt() is None
    answer = admin.post("/ops/restored/acme/leave-refused", {"reason": "again"})
    assert answer.status_code == 404


def test_a_move_is_not_started_while_machines_are_stopped(
    operator: Any, finding: RestoreFinding
) -> None:
    body = {
        "tenant": "bolt",
        "target_cell": "cell-eu1-b",
        "target_store": "store-eu1-b",
        "reason": "r",
    }
    answer = operator.post("/ops/moves", body)
    assert (answer.status_code, answer.json()["error"]) == (409, "machines_stopped")
