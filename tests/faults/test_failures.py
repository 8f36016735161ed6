"""The failures of a move by hand: produced on purpose, named on the page, mended by their action.

Source: article 000, "Failure modes". test_changes.py and test_beside.py have more forms of some.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from migrations_app import channels, services
from migrations_app.domain.mismatch import WORDS, Looks
from migrations_app.domain.phases import Phase
from migrations_app.models import Mismatch
from migrations_app.preflight import preflight
from tenants.domain.roles import Role
from tests import scene
from tests.faults.test_every_moment import assert_moved
from tests.faults.test_way_back import look, roll_back
from tests.shelves import Shelf
from tests.world import APP, World

SYNTHETIC = [
    ("u-1", "s-1", "report", ["one", "two", "three"]),
    ("u-1", "", "profile", ["old", "new"]),
    ("u-2", "s-2", "photo", [b"\x89PNG one", b"\x89PNG two"]),
    ("u-nobody", "", "letter", ["from somebody without a session"]),
]


def shelves(world: World, monkeypatch: pytest.MonkeyPatch, folder: Path) -> tuple[Shelf, Shelf]:
    """Give both sides a file service, the source's filled."""
    sides = []
    for name, store in (("source", world.cast.store), ("target", world.cast.other_store)):
        shelf = Shelf("file", name, folder)
        monkeypatch.setenv(f"SHELF_{name}", shelf.address)
        store.artifacts_from = f"env:SHELF_{name}"
        store.save()
        sides.append(shelf)
    for user, session, artifact, versions in SYNTHETIC:
        for version in versions:
            sides[0].save(user, session, artifact, version)
    return sides[0], sides[1]


def on_the_page(world: World, words: str) -> None:
    """The page of the move says so, to whoever may only look."""
    viewer = Client()
    viewer.force_login(scene.person("vera", Role.VIEWER))
    url = f"/moves/mv-{world.move.pk}/mismatches/"
    page = viewer.get(url, headers={"HX-Request": "true"}).content.decode()
    assert words in html.unescape(page)


def open_rows(world: World) -> list[Mismatch]:
    """Let VERIFY look at everything, and return what it names."""
    world.run(until=Phase.VERIFY)
    for _ in range(10):
        world.step()
    return list(world.move.mismatches.filter(resolved_at=None, transient=False))


def recopy(world: World, row: Mismatch) -> None:
    services.recopy(world.move, mismatch_ids=[row.pk], by="ada", now=world.clock())


def reconcile(world: World, row: Mismatch) -> None:
    services.reconcile_users(world.move, mismatch_ids=[row.pk], by="ada", now=world.clock())


def _emptied(world: World, connection: Any) -> None:
    """The copier read the list, and lists hold no events."""
    world.target.run_in(
        connection, "delete from events where app_name = ? and session_id = ?", APP, "s-5"
    )


def _frozen(world: World, connection: Any) -> None:
    """The target was seeded with the merged state."""
    merged = {"topic": "t5", "user:tier": "pro", "app:motto": "hello"}
    world.target.run_in(
        connection,
        "update sessions set state = ? where app_name = ? and id = ?",
        json.dumps(merged),
        APP,
        "s-5",
    )


def _old_won(world: World, connection: Any) -> None:
    """Replay put an older assignment last."""
    world.target.run_in(
        connection,
        "update user_states set state = ? where app_name = ? and user_id = ?",
        json.dumps({"tier": "old"}),
        APP,
        "u-1",
    )


@pytest.mark.parametrize(
    ("spoil", "looks", "mend"),
    [
        pytest.param(_emptied, Looks.EMPTY_COPY, recopy, id="empty copy"),
        pytest.param(_frozen, Looks.SHARED_FROZEN, recopy, id="shared state frozen"),
        pytest.param(_old_won, Looks.OLD_SHARED_WON, reconcile, id="old shared value won"),
    ],
)
def test_a_copy_that_went_wrong_is_named_by_its_failure_and_mended_by_its_action(
    files: World,
    spoil: Callable[[World, Any], None],
    looks: Looks,
    mend: Callable[[World, Mismatch], None],
) -> None:
    files.start()
    files.run(until=Phase.VERIFY)
    with files.late(files.target) as connection:
        spoil(files, connection)
    expected = files.source.content(APP)
    [row] = open_rows(files)
    assert row.looks_like == looks
    on_the_page(files, WORDS[looks])
    mend(files, row)
    files.run()
    assert_moved(files, expected, looks)


def test_a_copy_is_never_run_again_over_what_was_written_after_the_cutover(files: World) -> None:
    files.start(soak_seconds=86_400.0)
    files.run(until=Phase.SOAK)
    files.target.turn(APP, "u-1", "s-1", "after-the-cutover")
    expected = files.target.content(APP)
    with pytest.raises(services.NotNow, match="copy again"):
        services.recopy(files.move, mismatch_ids=[1], by="ada", now=files.clock())
    assert files.target.content(APP) == expected


def test_a_stale_artifact_version_is_named_and_mended_and_references_to_it_are_listed(
    files: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Version 7 of the source becomes another number on the target."""
    source, target = shelves(files, monkeypatch, tmp_path)
    for number in range(8):
        source.save("u-3", "s-3", "plan", f"plan {number}")
    for gone in range(7):
        _forget_version(source, "plan", gone)
    assert source.versions("u-3", "s-3", "plan") == [7]
    with files.source.connection() as connection:
        files.source.run_in(
            connection,
            "update sessions set state = ? where app_name = ? and id = ?",
            json.dumps({"plan": {"artifact": "plan", "version": 7}}),
            APP,
            "s-3",
        )
    files.start()
    files.run(until=Phase.VERIFY)
    references = files.move.artifact_references.all()
    assert {(one.session_id, one.name) for one in references} == {("s-3", "plan")}
    assert {(one.source_version, one.target_version) for one in references} == {(7, 0)}
    target.save("u-1", "s-1", "report", "somebody else's")
    rows = open_rows(files)
    assert [(row.part, row.artifact) for row in rows] == [("artifact", "report")]
    on_the_page(files, WORDS[Looks(rows[0].looks_like)])
    recopy(files, rows[0])
    files.run(until=Phase.SOAK)
    assert target.versions("u-1", "s-1", "report") == [0, 1, 2]
    assert target.text("u-3", "s-3", "plan") == "plan 7"


def _forget_version(shelf: Shelf, name: str, version: int) -> None:
    """Lose one version on disk, as a lifecycle rule of a bucket does."""
    [folder] = [path for path in shelf.root.rglob(str(version)) if path.parent.parent.name == name]
    for path in sorted(folder.rglob("*"), reverse=True):
        path.unlink()
    folder.rmdir()


def test_a_write_past_the_fence_stops_the_cutover_and_is_named(files: World) -> None:
    files.start()
    files.run(until=Phase.VERIFY)

    def leak() -> None:
        with files.late() as connection:
            files.source.add_event(connection, APP, "u-3", "s-3", "leaked", 9_000)

    files.killer.before["counts"] = leak
    files.run()
    assert files.move.phase == Phase.ABORTED
    assert any("fence leak" in event.note for event in files.move.events.all())
    assert files.owner() == [("cell-eu1-a", "all")]


def test_a_forgotten_side_channel_is_asked_for_and_a_required_one_stops_the_flip(
    files: World,
) -> None:
    cast = files.cast
    found = preflight(
        cast.acme,
        source_cell=cast.cell,
        source_store=cast.store,
        target_cell=cast.other_cell,
        target_store=cast.other_store,
        now=files.clock(),
    )
    [asked] = [check for check in found.checks if check.name == "Side channels"]
    assert asked.ok is None
    channels.register(
        name="log routing",
        tenant=cast.acme,
        copy_by="person",
        copy_step="",
        verify_by="person",
        verify_step="",
        by="ada",
        now=files.clock(),
    )
    files.start()
    files.run(until=Phase.BACKFILL)
    for _ in range(20):
        files.step()
    assert "log routing" in files.move.waiting_for
    [row] = files.move.channels.all()
    for step in ("copy", "verify"):
        channels.check_off(row, step=step, note="points there", by="ada", now=files.clock())
        row.refresh_from_db()
    files.run(until=Phase.SOAK)


def test_an_artifact_written_late_is_named_in_the_soak_and_settled_before_a_rollback(
    both: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source, _ = shelves(both, monkeypatch, tmp_path)
    both.start(soak_seconds=86_400.0, offboard_automatically=False)
    both.run(until=Phase.SOAK)
    look(both)
    assert not both.move.mismatches.exists()
    source.save("u-1", "s-1", "report", "late")
    source.save("u-nobody", "", "another", "late, and new")
    look(both)
    rows = both.move.mismatches.filter(resolved_at=None).order_by("user_id")
    assert [(row.user_id, row.artifact, row.looks_like) for row in rows] == [
        ("u-1", "report", Looks.LATE_WRITE),
        ("u-nobody", "user:another", Looks.LATE_WRITE),
    ]
    on_the_page(both, WORDS[Looks.LATE_WRITE])
    alarm = "2 artifacts written late at the closed store-eu1-a: download both versions"
    assert both.move.events.filter(note=alarm).count() == 1
    with pytest.raises(services.NotNow, match="2 late writes at the closed source"):
        roll_back(both)
    # Taken away again: settled by itself.
    source.delete("u-nobody", "", "another")
    look(both)
    [row] = both.move.mismatches.filter(resolved_at=None)
    services.accept(both.move, mismatch_ids=[row.pk], by="ada", reason="ours", now=both.clock())
    roll_back(both)
    both.run()
    assert both.move.phase == Phase.ROLLED_BACK
    assert source.versions("u-1", "s-1", "report") == [0, 1, 2]
    assert source.text("u-1", "s-1", "report") == "three"


def test_everything_of_the_synthetic_tenant_arrives_and_comes_back(
    both: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source, target = shelves(both, monkeypatch, tmp_path)
    expected = both.source.content(APP)
    both.start(soak_seconds=86_400.0, offboard_automatically=False)
    both.run(until=Phase.SOAK)
    assert both.target.content(APP) == expected
    for user, session, artifact, versions in SYNTHETIC:
        assert target.versions(user, session, artifact) == list(range(len(versions)))
    assert both.move.artifacts == sum(len(versions) for *_, versions in SYNTHETIC)
    target.save("u-1", "s-1", "report", "four")
    target.save("u-2", "", "born", "on the target")
    for _ in range(4):
        both.step()
    services.rollback(both.move, by="ada", reason="practice", now=both.clock())
    both.run()
    assert both.move.phase == Phase.ROLLED_BACK
    assert source.text("u-1", "s-1", "report") == "four"
    assert source.text("u-2", "", "born") == "on the target"
