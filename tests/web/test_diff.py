"""Both sides of a mismatch, read from two real stores, for operators only."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest
from django.urls import reverse

from migrations_app.domain.phases import Phase
from migrations_app.models import Mismatch, TenantMigration
from migrations_app.panels import diff as diff_panel
from migrations_app.ports.artifacts.native import FileStore
from tenants.models import AuditEntry, Store
from tests import make, scene
from tests.shelves import Shelf
from tests.stores import Raw
from tests.web.conftest import APP, People


@pytest.fixture
def row(here: make.Cast, at: datetime) -> Mismatch:
    move = scene.move(here, Phase.VERIFY, now=at)
    made = scene.mismatches(move, now=at)[1]
    made.user_id, made.session_id = "u-0", "s-0"
    made.save()
    return made


def address(row: Mismatch) -> str:
    return reverse("mismatch", args=[row.move_id, row.pk])


def test_what_differs_stands_beside_each_other(
    row: Mismatch, sides: tuple[Raw, Raw], people: People
) -> None:
    _, target = sides
    target.run(
        "UPDATE sessions SET state = ? WHERE app_name = ? AND id = ?",
        '{"step": "CHANGED"}',
        APP,
        "s-0",
    )
    html = people.operator.get(address(row)).content.decode()
    assert 'data-side="target"' in html
    assert "CHANGED" in html


def test_who_was_shown_values_is_kept(
    row: Mismatch, sides: tuple[Raw, Raw], people: People
) -> None:
    people.operator.get(address(row))
    people.operator.get(reverse("versions", args=[row.move_id, row.pk]))
    lines = AuditEntry.objects.filter(verb="move.read_values").order_by("pk")
    assert [(line.who, line.subject, line.after["what"]) for line in lines] == [
        ("olga", str(row.move), f"mismatch {row.pk}"),
        ("olga", str(row.move), f"mismatch {row.pk}, as a file"),
    ]
    assert "step" not in str([line.after for line in lines])


def test_two_equal_sides_say_so(row: Mismatch, sides: tuple[Raw, Raw], people: People) -> None:
    assert "Both sides are equal now." in people.operator.get(address(row)).content.decode()


def test_a_session_that_one_side_lacks_is_named(
    row: Mismatch, sides: tuple[Raw, Raw], people: People
) -> None:
    _, target = sides
    target.run("DELETE FROM events WHERE session_id = ?", "s-0")
    target.run("DELETE FROM sessions WHERE id = ?", "s-0")
    assert "Only on the source" in people.operator.get(address(row)).content.decode()


def test_shared_state_of_a_user_is_compared_too(
    row: Mismatch, sides: tuple[Raw, Raw], people: People
) -> None:
    source, _ = sides
    row.part, row.session_id = "user", ""
    row.save()
    source.run(
        "UPDATE user_states SET state = ? WHERE app_name = ? AND user_id = ?",
        '{"tier": "pro"}',
        APP,
        "u-0",
    )
    html = people.operator.get(address(row)).content.decode()
    assert 'data-side="source"' in html
    assert "pro" in html


def test_a_store_that_does_not_answer_is_said(
    row: Mismatch, people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STORE_EU1_A", raising=False)
    html = people.operator.get(address(row)).content.decode()
    assert "Not read" in html


def test_a_mismatch_of_another_move_is_not_found(
    row: Mismatch, here: make.Cast, people: People, at: datetime
) -> None:
    other: TenantMigration = scene.move(here, Phase.BACKFILL, now=at, tenant=here.bolt)
    answer = people.operator.get(reverse("mismatch", args=[other.pk, row.pk]))
    assert answer.status_code == 404


def shelves(
    monkeypatch: pytest.MonkeyPatch, folder: Path, source: list[str], target: list[str]
) -> None:
    """Give both stores an artifact service with these versions of one report."""
    for key, side, saved in (("a", "source", source), ("b", "target", target)):
        shelf = Shelf("file", side, folder)
        for words in saved:
            shelf.save("u-0", "s-0", "report.txt", words)
        monkeypatch.setenv(f"ARTIFACTS_{key.upper()}", shelf.address)
        Store.objects.filter(key=f"store-eu1-{key}").update(
            artifacts_from=f"env:ARTIFACTS_{key.upper()}"
        )


def test_an_artifact_is_laid_beside_its_copy_version_by_version_without_its_bytes(
    row: Mismatch,
    sides: tuple[Raw, Raw],
    people: People,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shelves(monkeypatch, tmp_path, ["a secret", "the same"], ["another secret", "the same"])
    row.artifact, row.part = "report.txt", "artifact"
    row.save()
    html = people.operator.get(address(row)).content.decode()
    assert "Artifact report.txt" in html
    assert 'data-side="target"' in html
    assert "&quot;size&quot;: 14" in html
    file = people.operator.get(reverse("versions", args=[row.move_id, row.pk]))
    [found] = json.loads(b"".join(file.streaming_content))["versions"]  # type: ignore[attr-defined]
    assert found["artifact"] == "report.txt"
    assert sorted(found["source"]) == sorted(found["target"]) == ["0", "1"]
    assert found["source"]["0"]["digest"] != found["target"]["0"]["digest"]
    assert found["source"]["1"] == found["target"]["1"]
    assert "secret" not in html + json.dumps(found)


def test_an_artifact_of_many_versions_is_read_a_page_at_a_time(
    row: Mismatch,
    sides: tuple[Raw, Raw],
    people: People,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shelves(monkeypatch, tmp_path, ["first", *["x"] * 59], ["other", *["x"] * 58])
    row.artifact, row.part = "report.txt", "artifact"
    row.save()
    loaded: list[int] = []
    load = FileStore.load
    monkeypatch.setattr(
        FileStore, "load", lambda self, *at: loaded.append(at[-1]) or load(self, *at)
    )
    html = people.operator.get(address(row)).content.decode()
    # The youngest: one that the target lacks is among them.
    assert set(loaded) == set(range(35, 60))
    assert "Page 1 of 3, 60 versions" in html
    assert 'href="?page=2"' in html
    assert (
        "both sides have the same" in people.operator.get(f"{address(row)}?page=2").content.decode()
    )
    html = people.operator.get(f"{address(row)}?page=3").content.decode()
    assert 'data-side="source"' in html
    monkeypatch.setattr(diff_panel, "VERSIONS_IN_FILE", 40)
    file = people.operator.get(reverse("versions", args=[row.move_id, row.pk]))
    [found] = json.loads(b"".join(file.streaming_content))["versions"]  # type: ignore[attr-defined]
    assert (len(found["source"]), found["versions_left_out"]) == (40, 20)


def test_an_artifact_service_that_is_not_there_is_said(
    row: Mismatch, sides: tuple[Raw, Raw], people: People
) -> None:
    row.artifact, row.part = "report.txt", "artifact"
    row.save()
    html = people.operator.get(address(row)).content.decode()
    assert "Not read" in html
