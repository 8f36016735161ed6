"""The register of shared resources on its page: findings, edits, and what tests found."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest

from capacity import services, tasks
from capacity.domain.register import Kind
from capacity.models import IsolationRun, SharedResource
from durable.clock import database_now
from tenants.models import AuditEntry
from tests.web.conftest import People
from tests.web.test_pages import text_of

GIVEN = {
    "name": "Vector index",
    "kind": "data",
    "control": "A partition per tenant, named by its app name.",
    "shown_by": "A query as two tenants.",
    "reason": "agents search in it now",
}


@pytest.fixture
def row(db: None) -> SharedResource:
    return SharedResource.objects.get(name="Result caches")


def page(people: People) -> str:
    return text_of(people.viewer.get("/isolation/").content.decode())


def edit(people: People, row: SharedResource, **changes: Any) -> Any:
    given = {name: GIVEN[name] for name in ("kind", "control", "shown_by", "reason")}
    seen = row.at.isoformat()
    return people.operator.post(f"/isolation/resources/{row.pk}/", given | {"seen": seen} | changes)


def test_what_agents_share_is_named_with_its_control_from_the_start(people: People) -> None:
    text = page(people)
    for kind in Kind:
        assert SharedResource.objects.filter(kind=kind).exclude(control="").count()
        assert kind.capitalize() in text
    for name in ("Model quota of a cell", "Session store", "Tool credentials", "Control plane"):
        assert name in text
    assert "without a control" not in text


def test_a_resource_without_a_control_is_a_finding_and_comes_first(
    row: SharedResource, people: People
) -> None:
    row.control = ""
    row.save()
    text = page(people)
    assert "1 without a control" in text
    assert "1 finding Data" in text
    assert text.index("Finding Result caches") < text.index("Model quota of a cell")
    assert "1 shared resource has no control" in people.viewer.get("/").content.decode()


def test_a_register_without_findings_needs_nobody(people: People) -> None:
    assert "no control" not in people.viewer.get("/attention/").content.decode()


def test_an_operator_adds_a_resource(people: People) -> None:
    answer = people.operator.post("/isolation/resources/new/", GIVEN)
    assert answer["Location"] == "/isolation/"
    row = SharedResource.objects.get(name="Vector index")
    assert (row.kind, row.by) == ("data", "olga")
    assert AuditEntry.objects.get(verb="resource.add").reason == GIVEN["reason"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "Session store"}, "The register names Session store already"),
        ({"name": " "}, "Name what is shared"),
        ({"name": "x" * 101}, "Name what is shared"),
        ({"kind": "weather"}, "No kind of isolation"),
        ({"control": "y" * 2_001}, "up to 2,000 characters"),
        ({"reason": ""}, "Say why"),
    ],
    ids=["taken", "blank", "long", "kind", "control", "no reason"],
)
def test_what_can_not_be_added_is_refused_with_what_was_typed(
    changes: dict[str, str], said: str, people: People
) -> None:
    before = SharedResource.objects.count()
    answer = people.operator.post("/isolation/resources/new/", GIVEN | changes)
    assert answer.status_code == 409
    html = answer.content.decode()
    assert said in html
    assert "Nothing was changed." in html
    assert GIVEN["shown_by"] in html
    assert SharedResource.objects.count() == before


def test_an_edit_keeps_who_and_why(row: SharedResource, people: People) -> None:
    was = row.control
    assert edit(people, row)["Location"] == "/isolation/"
    row.refresh_from_db()
    assert row.control == GIVEN["control"]
    kept = AuditEntry.objects.get(verb="resource.set")
    assert (kept.before["control"], kept.after["control"]) == (was, GIVEN["control"])


def test_an_edit_of_what_somebody_else_has_changed_is_refused_with_both(
    row: SharedResource, people: People
) -> None:
    seen = row.at
    row.at, row.by, row.control = seen + timedelta(seconds=9), "ada", "Keys are hashed."
    row.save()
    answer = edit(people, row, seen=seen.isoformat())
    assert answer.status_code == 409
    text = text_of(answer.content.decode())
    assert "ada has changed Result caches since you read it" in text
    assert "Stands now: data. Control: Keys are hashed." in text
    assert GIVEN["control"] in text
    row.refresh_from_db()
    assert row.control == "Keys are hashed."


def test_a_form_of_a_line_that_is_gone_is_not_found(row: SharedResource, people: People) -> None:
    SharedResource.objects.filter(pk=row.pk).delete()
    assert edit(people, row).status_code == 404


def test_a_line_is_taken_off_with_a_reason(row: SharedResource, people: People) -> None:
    url = f"/isolation/resources/{row.pk}/remove/"
    assert people.operator.post(url, {"reason": " "}).status_code == 409
    assert people.operator.post(url, {"reason": "no cache any more"})["Location"] == "/isolation/"
    assert not SharedResource.objects.filter(pk=row.pk).exists()
    assert AuditEntry.objects.get(verb="resource.remove").before["kind"] == "data"


def test_a_viewer_is_offered_no_act(row: SharedResource, people: People) -> None:
    html = people.viewer.get("/isolation/").content.decode()
    assert "/isolation/resources/" not in html
    assert people.viewer.post("/isolation/resources/new/", GIVEN).status_code == 403


def test_the_last_pass_stands_above_a_run_that_failed(people: People, at: datetime) -> None:
    held = {"name": "budget", "asked": "a", "measured": "refused", "bar": "no call", "held": True}
    IsolationRun.objects.create(
        began_at=at - timedelta(hours=2),
        ended_at=at - timedelta(hours=1),
        by="olga",
        build="2026.3.1",
        results=[held],
        passed=True,
    )
    broken = held | {"name": "flood", "measured": "p95 2.4s", "bar": "1.5s", "held": False}
    IsolationRun.objects.create(
        began_at=at, ended_at=at, by="olga", build="2026.3.2", results=[broken], passed=False
    )
    text = page(people)
    assert "build 2026.3.1 Failed" in text
    assert "Broken flood a p95 2.4s 1.5s" in text
    assert "Held budget a refused no call" in text


def test_tests_that_never_ran_say_how_to_run_them(people: People) -> None:
    text = page(people)
    assert "None has passed yet" in text
    assert "make isolation" in text


def test_a_run_that_is_not_over_says_so(people: People, at: datetime) -> None:
    IsolationRun.objects.create(began_at=at, by="olga")
    assert "Running" in page(people)


def test_each_tier_stands_with_its_promise(people: People) -> None:
    assert "Pooled up to 1.5s up to 1 %" in page(people)


def test_ten_thousand_lines_come_a_page_at_a_time(people: People, at: datetime) -> None:
    SharedResource.objects.bulk_create(
        SharedResource(name=f"resource {n}", kind="fault", control="c", at=at, by="ada")
        for n in range(10_000)
    )
    assert "Page 1 of 201" in page(people)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What workers were asked to do."""
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        tasks.isolation, "apply_async", lambda args, queue: asked.append((args, queue))
    )
    return asked


def test_an_operator_starts_a_run_and_watches_it(
    people: People, sent: list[tuple[Any, ...]]
) -> None:
    assert people.operator.post("/isolation/run/")["Location"] == "/isolation/"
    run = IsolationRun.objects.get()
    assert sent == [((run.pk,), "bulk")]
    html = people.viewer.get("/isolation/").content.decode()
    assert "Running" in html
    assert "/isolation/runs/" in html
    again = people.operator.post("/isolation/run/")
    assert again.status_code == 409
    assert "The suite runs already" in again.content.decode()
    services.end_isolation(run, [{"name": "Flood", "held": True}], whole=True, now=database_now())
    html = people.viewer.get("/isolation/runs/").content.decode()
    assert "Passed" in html
    # It has ended, so nothing asks for it again and again.
    assert "hx-get" not in html


def test_a_run_that_was_killed_is_said_to_be(people: People) -> None:
    services.start_isolation(by="ada", now=database_now() - timedelta(minutes=11))
    assert "Killed" in people.viewer.get("/isolation/").content.decode()


def test_a_viewer_starts_nothing(people: People) -> None:
    assert people.viewer.post("/isolation/run/").status_code == 403
    assert not IsolationRun.objects.exists()
