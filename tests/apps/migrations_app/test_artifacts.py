"""Artifacts go along: copied, compared, named, repaired, carried back and taken away again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from migrations_app import artifacts
from migrations_app.copying import Meter, Timer
from migrations_app.domain.phases import Phase
from migrations_app.models import TenantMigration
from migrations_app.ports.base import Key
from tests import make
from tests.shelves import APP, KINDS, Shelf
from tests.stores import Raw

PAIRS = [(one, other) for one in KINDS for other in KINDS]


class Killed(BaseException):
    """The worker died."""


@dataclass
class Move:
    """One move between two artifact services, and the steps that its engine takes."""

    pk: int
    source: Shelf
    target: Shelf
    sessions: Raw
    now: datetime
    meter: Meter = field(default_factory=Meter)

    @property
    def row(self) -> TenantMigration:
        return TenantMigration.objects.get(pk=self.pk)

    def at(self, **columns: Any) -> Move:
        TenantMigration.objects.filter(pk=self.pk).update(**columns)
        return self

    def sweep(self, *, write: bool, seconds: float = 60.0) -> int:
        """Sweep to the end, as the engine's steps do; return in how many steps."""
        cursor, steps = Key("", ""), 0
        while True:
            move = self.row
            move.cursor_user, move.cursor_session = cursor
            steps += 1
            swept = artifacts.sweep(
                move,
                meter=self.meter,
                timer=Timer(seconds),
                clock=lambda: self.now,
                write=write,
            )
            if swept.finished:
                return steps
            assert swept.cursor != cursor, "a step that gets nowhere is taken for ever"
            cursor = swept.cursor

    def copy(self) -> int:
        return self.sweep(write=True)

    def verify(self) -> list[tuple[str, str]]:
        """Compare, and return what is open: (name, what it looks like)."""
        self.sweep(write=False)
        return self.open()

    def open(self) -> list[tuple[str, str]]:
        rows = self.row.mismatches.filter(resolved_at=None)
        return sorted(rows.values_list("artifact", "looks_like"))

    def repair(self) -> int:
        self.row.mismatches.filter(resolved_at=None).update(repair_requested_at=self.now)
        return artifacts.repair(self.row, meter=self.meter, clock=lambda: self.now)

    def accept(self) -> None:
        self.row.mismatches.filter(resolved_at=None).update(
            accepted_at=self.now, accepted_by="ada", repair_requested_at=self.now
        )

    def lines(self) -> list[tuple[str, str, str, int, int]]:
        """Return the map: (user, session, name, version at the source, at the target)."""
        columns = ("user_id", "session_id", "name", "source_version", "target_version")
        return sorted(self.row.artifact_versions.values_list(*columns))

    def remove(self, side: str) -> None:
        cursor = ""
        while True:
            move = self.row
            move.cursor_session = cursor
            swept = artifacts.remove_copied(move, side, timer=Timer())
            if swept.finished:
                return
            cursor = swept.cursor.session_id


@pytest.fixture
def between(
    monkeypatch: pytest.MonkeyPatch, cast: make.Cast, now: datetime, tmp_path: Path
) -> Callable[[str, str], Move]:
    """Give a move between two kinds of artifact services, its places told apart."""

    def make_one(source: str, target: str) -> Move:
        ours, theirs = Shelf(source, "source", tmp_path), Shelf(target, "target", tmp_path)
        monkeypatch.setenv("ARTIFACTS_A", ours.address)
        monkeypatch.setenv("ARTIFACTS_B", theirs.address)
        for key in ("a", "b"):
            url = f"sqlite:///{tmp_path}/{key}.db"
            monkeypatch.setenv(f"STORE_EU1_{key.upper()}", url)
            Raw(url).make_tables(f"env:STORE_EU1_{key.upper()}", APP)
            Raw(url).seed(APP, sessions=4, users=2)
        for store, reference in ((cast.store, "A"), (cast.other_store, "B")):
            store.artifacts_from = f"env:ARTIFACTS_{reference}"
            store.save()
        move = make.move(cast.acme, cast=cast, now=now, phase=Phase.BACKFILL, artifacts_apart=True)
        return Move(move.pk, ours, theirs, Raw(f"sqlite:///{tmp_path}/a.db"), now)

    return make_one


def fill(shelf: Shelf) -> None:
    """The tenant of article 000: a user's own files, several versions, texts and bytes."""
    shelf.save("u-0", "s-0", "report.pdf", b"one", author="ada")
    shelf.save("u-0", "s-0", "report.pdf", b"two")
    shelf.save("u-0", "s-2", "report.pdf", b"of another session")
    shelf.save("u-0", "", "user:profile.txt", "likes tea")
    shelf.save("u-0", "", "user:profile.txt", "likes coffee")
    shelf.save("u-1", "s-1", "notes/today.txt", "nothing yet")


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_version_of_every_name_arrives_in_order(
    between: Callable[[str, str], Move], source: str, target: str
) -> None:
    move = between(source, target)
    fill(move.source)
    move.copy()
    assert move.verify() == []
    assert move.target.load("u-0", "s-0", "report.pdf", 0).inline_data.data == b"one"
    assert move.target.load("u-0", "s-0", "report.pdf").inline_data.data == b"two"
    assert move.target.metadata("u-0", "s-0", "report.pdf", 0) == {"author": "ada"}
    assert move.target.text("u-0", "s-2", "user:profile.txt") == "likes coffee"
    assert move.target.text("u-1", "s-1", "notes/today.txt") == "nothing yet"
    assert move.target.names("u-0", "s-0") == ["report.pdf", "user:profile.txt"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_users_own_file_is_copied_once_though_each_session_lists_it(
    between: Callable[[str, str], Move], kind: str
) -> None:
    move = between(kind, "file")
    fill(move.source)
    move.copy()
    assert move.target.versions("u-0", "", "user:profile.txt") == [0, 1]
    own = [line for line in move.lines() if line[2] == "user:profile.txt"]
    assert own == [("u-0", "", "user:profile.txt", 0, 0), ("u-0", "", "user:profile.txt", 1, 1)]


@pytest.mark.parametrize(("source", "target"), [("file", "memory"), ("memory", "file")])
def test_users_and_sessions_that_no_store_knows_go_along(
    between: Callable[[str, str], Move], source: str, target: str
) -> None:
    move = between(source, target)
    move.source.save("stranger", "", "user:x", "x")
    move.source.save("u-0", "deleted", "y", "y")
    move.copy()
    assert move.target.text("stranger", "", "user:x") == "x"
    assert move.target.text("u-0", "deleted", "y") == "y"


def test_users_of_ones_own_service_are_those_of_the_session_store(
    between: Callable[[str, str], Move],
) -> None:
    move = between("plain", "file")
    with move.sessions.connection() as connection:
        move.sessions.run_in(
            connection,
            "insert into user_states(app_name, user_id, state, update_time)"
            " values (?, 'without', '{}', '2026-01-01 00:00:00.000000')",
            APP,
        )
    move.source.save("without", "", "user:x", "no session of theirs is left")
    move.copy()
    assert move.target.text("without", "", "user:x") == "no session of theirs is left"


def test_gaps_close_and_the_map_says_which_number_became_which(
    between: Callable[[str, str], Move],
) -> None:
    move = between("file", "memory")
    for text in "abcd":
        move.source.save("u-0", "s-0", "r", text)
    for number in (0, 2):
        _drop(move.source.file("u-0", "s-0", "r", number).parent)
    move.copy()
    assert move.lines() == [("u-0", "s-0", "r", 1, 0), ("u-0", "s-0", "r", 3, 1)]
    assert [move.target.text("u-0", "s-0", "r", number) for number in (0, 1)] == ["b", "d"]
    assert move.verify() == []


def _drop(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
