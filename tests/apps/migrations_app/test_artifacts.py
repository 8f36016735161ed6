"""Artifacts go along: copied, compared, named, repaired, carried back and taken away again."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from django.db.models import F
from google.genai import types

from durable.machine import Overtaken
from migrations_app import artifacts, copying, preflight
from migrations_app.artifacts import removal, sides
from migrations_app.copying import Meter, Timer
from migrations_app.domain.mismatch import Looks
from migrations_app.domain.phases import Phase
from migrations_app.models import ArtifactVersion, SessionStamp, TenantMigration
from migrations_app.ports import artifacts as port
from migrations_app.ports.artifacts import Name
from migrations_app.ports.artifacts.native import MemoryStore
from migrations_app.ports.base import Key
from migrations_app.preflight import artifact_checks
from tenants.models import Store
from tests import make
from tests.shelves import APP, KINDS, Shelf
from tests.stores import Raw
from tests.world import Fragile, Killed, Killer

PAIRS = [(one, other) for one in KINDS for other in KINDS]


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
            assert steps < 100, "steps that get nowhere are taken for ever"
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


# --- what changes at the source ------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_later_versions_new_names_and_deletes_follow(
    between: Callable[[str, str], Move], kind: str
) -> None:
    move = between(kind, "file")
    fill(move.source)
    move.copy()
    move.source.save("u-0", "s-0", "report.pdf", b"three")
    move.source.save("u-1", "", "user:new", "new")
    move.source.delete("u-1", "s-1", "notes/today.txt")
    move.source.delete("u-0", "", "user:profile.txt")
    move.copy()
    assert move.verify() == []
    assert move.target.versions("u-0", "s-0", "report.pdf") == [0, 1, 2]
    assert move.target.text("u-1", "", "user:new") == "new"
    assert move.target.names("u-1", "s-1") == ["user:new"]
    assert move.target.names("u-0") == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_that_was_deleted_and_saved_anew_has_its_new_history(
    between: Callable[[str, str], Move], kind: str
) -> None:
    move = between(kind, "memory")
    for text in ("old 0", "old 1", "old 2"):
        move.source.save("u-0", "s-0", "r", text)
    move.copy()
    move.source.delete("u-0", "s-0", "r")
    move.source.save("u-0", "s-0", "r", "new 0")
    move.copy()
    assert move.target.versions("u-0", "s-0", "r") == [0]
    assert move.target.text("u-0", "s-0", "r") == "new 0"
    assert move.verify() == []


@pytest.mark.parametrize("kind", KINDS)
def test_an_edit_in_place_at_the_source_is_never_missed(
    between: Callable[[str, str], Move], kind: str
) -> None:
    move = between(kind, "memory")
    fill(move.source)
    move.copy()
    move.source.edit("u-1", "s-1", "notes/today.txt", 0, "something after all")
    move.copy()
    if kind == "file":
        # Its files' times have told.
        assert move.verify() == []
    else:
        assert move.verify() == [("notes/today.txt", Looks.STALE_ARTIFACT)]
        move.repair()
        assert move.verify() == []
    assert move.target.text("u-1", "s-1", "notes/today.txt") == "something after all"


# --- what differs --------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_stale_version_on_the_target_is_named_and_repaired(
    between: Callable[[str, str], Move], source: str, target: str
) -> None:
    move = between(source, target)
    fill(move.source)
    move.copy()
    move.target.edit("u-0", "", "user:profile.txt", 1, "likes tea")
    assert move.verify() == [("user:profile.txt", Looks.STALE_ARTIFACT)]
    assert move.repair() == 1
    assert move.open() == []
    assert move.verify() == []
    assert move.target.text("u-0", "", "user:profile.txt") == "likes coffee"
    assert move.target.versions("u-0", "", "user:profile.txt") == [0, 1]


def test_what_is_missing_on_the_target_is_named_by_what_it_looks_like(
    between: Callable[[str, str], Move],
) -> None:
    move = between("memory", "file")
    fill(move.source)
    move.copy()
    move.target.delete("u-1", "s-1", "notes/today.txt")
    _drop(move.target.file("u-0", "s-0", "report.pdf", 0).parent)
    move.source.save("u-0", "", "user:profile.txt", "written past the fence")
    move.source.save("u-0", "s-0", "late", "written past the fence")
    assert move.verify() == [
        ("late", Looks.LOST),
        ("notes/today.txt", Looks.LOST),
        ("report.pdf", Looks.STALE_ARTIFACT),
        ("user:profile.txt", Looks.FENCE_LEAK),
    ]
    assert move.repair() == 4
    assert move.verify() == []
    assert move.target.text("u-0", "s-0", "late") == "written past the fence"


def test_what_somebody_else_writes_on_the_target_is_named_and_left_to_a_person(
    between: Callable[[str, str], Move],
) -> None:
    move = between("file", "memory")
    fill(move.source)
    move.copy()
    move.target.save("u-0", "s-0", "report.pdf", b"three")
    move.target.save("u-0", "s-0", "stranger", "who?")
    move.copy()
    strange = [
        ("report.pdf", Looks.WRITTEN_ON_TARGET),
        ("stranger", Looks.WRITTEN_ON_TARGET),
    ]
    assert move.open() == strange
    assert move.verify() == strange
    assert move.target.text("u-0", "s-0", "stranger") == "who?"
    move.repair()
    assert move.verify() == []
    assert move.target.versions("u-0", "s-0", "report.pdf") == [0, 1]


def test_a_deleted_name_that_was_written_on_at_the_target_is_not_deleted_there(
    between: Callable[[str, str], Move],
) -> None:
    move = between("memory", "memory")
    fill(move.source)
    move.copy()
    move.source.delete("u-1", "s-1", "notes/today.txt")
    move.target.edit("u-1", "s-1", "notes/today.txt", 0, "somebody's only copy")
    move.copy()
    assert move.open() == [("notes/today.txt", Looks.WRITTEN_ON_TARGET)]
    assert move.target.text("u-1", "s-1", "notes/today.txt") == "somebody's only copy"


def test_a_difference_that_is_gone_on_both_sides_is_closed(
    between: Callable[[str, str], Move],
) -> None:
    move = between("memory", "memory")
    move.target.save("u-0", "s-0", "stranger", "who?")
    move.copy()
    assert move.open() == [("stranger", Looks.WRITTEN_ON_TARGET)]
    move.target.delete("u-0", "s-0", "stranger")
    assert move.verify() == []


def test_a_version_that_appears_while_it_compares_shows_in_the_counts(
    between: Callable[[str, str], Move], fragile: Killer
) -> None:
    move = between("memory", "memory")
    fill(move.source)
    move.copy()
    fragile.before["load"] = lambda: move.source.save("u-0", "s-0", "report.pdf", b"late")
    with pytest.raises(Exception, match="6 versions of 3 artifacts"):
        move.verify()


# --- odd data ------------------------------------------------------------------------------------

JPEG = "image/jpeg"


def blob(data: bytes | None, mime: str | None = JPEG, **fields: Any) -> types.Part:
    return types.Part(inline_data=types.Blob(data=data, mime_type=mime, **fields))


def link(uri: str) -> types.Part:
    return types.Part(file_data=types.FileData(file_uri=uri, mime_type="a/b"))


TOMBSTONE = blob(b"", "application/octet-stream")
EXACT: dict[str, Any] = {
    "an empty text": "",
    "a text in every script": "\u00e4\u00df \u4e2d\u6587 \U0001f600",
    "a text of a megabyte": "x" * 1_000_000,
    "bytes of every value": bytes(range(256)) * 100,
    "no bytes": blob(b""),
    "what a rewind saves": TOMBSTONE,
    "a display name": blob(b"x", display_name="Q3.jpg"),
}


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_odd_data_that_both_sides_hold_is_copied_exactly(
    between: Callable[[str, str], Move], source: str, target: str
) -> None:
    move = between(source, target)
    for what in EXACT.values():
        move.source.save("u-0", "s-0", "odd", what, **{"a.b": [None, {"deep": 1.5}], "n": 1})
    for name in ("doc", "doc/nested", "versions.txt", "user:user:x", "\u4e2d.txt"):
        move.source.save("u-0", "s-0", name, "x")
    move.copy()
    assert move.verify() == []
    for number, (words, _) in enumerate(EXACT.items()):
        ours = move.source.load("u-0", "s-0", "odd", number)
        assert move.target.load("u-0", "s-0", "odd", number) == ours, words
        metadata = move.target.metadata("u-0", "s-0", "odd", number)
        assert metadata == {"a.b": [None, {"deep": 1.5}], "n": 1}
    assert move.target.names("u-0", "s-0") == move.source.names("u-0", "s-0")


CHANGED: list[tuple[str, Any, str]] = [
    ("no MIME type", blob(b"x", None), "its MIME type is given on one side only"),
    ("carriage returns", "a\r\nb", "its carriage returns are line feeds on one side"),
    ("a thought", types.Part(text="x", thought=True), "field thought is on one side only"),
]


@pytest.mark.parametrize(("words", "what", "told"), CHANGED, ids=[row[0] for row in CHANGED])
def test_what_files_change_is_copied_named_and_may_be_accepted(
    between: Callable[[str, str], Move], words: str, what: Any, told: str
) -> None:
    move = between("memory", "file")
    move.source.save("u-0", "s-0", "odd", "fine")
    move.source.save("u-0", "s-0", "odd", what)
    move.copy()
    assert move.verify() == [("odd", Looks.CANNOT_HOLD)]
    row = move.row.mismatches.get()
    assert (row.part, row.first_difference) == ("artifact", f"odd: version 1: {told}")
    assert move.target.versions("u-0", "s-0", "odd") == [0, 1]
    move.accept()
    move.copy()
    assert move.verify() == [("odd", Looks.CANNOT_HOLD)]
    assert move.row.mismatches.get(resolved_at=None).accepted_at is not None
    # The word holds for what was seen, and not for what is changed besides.
    move.source.save("u-0", "s-0", "odd", what)
    move.copy()
    assert move.row.mismatches.get(resolved_at=None).accepted_at is None


REFUSED: list[tuple[str, str, Any, str]] = [
    ("a link", "odd", link("gs://elsewhere/file"), "version 0: it is a link"),
    ("half a surrogate pair", "odd", "\udcc3", "version 0: its text holds half"),
    ("a blob without data", "odd", blob(None), "version 0: the service refused it"),
    ("a name with NUL", "a\0b", "x", "version 0: its name holds a character"),
    ("a name of metadata", "metadata.json", "x", "version 0: its name is one that the file"),
    ("a name that leads out", "../x", "x", "version 0: its name leads out"),
    ("a name with a drive", "C:x", "x", "version 0: its name begins at a root"),
    ("a name too long", "n" * 300, "x", "version 0: its name has a part of more"),
]


@pytest.mark.parametrize(
    ("words", "name", "what", "told"), REFUSED, ids=[row[0] for row in REFUSED]
)
def test_what_files_refuse_is_named_and_leaves_nothing_there(
    between: Callable[[str, str], Move], words: str, name: str, what: Any, told: str
) -> None:
    move = between("memory", "file")
    move.source.save("u-0", "s-0", name, what)
    move.source.save("u-0", "s-0", "fine", "fine")
    move.copy()
    [(_, looks)] = move.verify()
    row = move.row.mismatches.get(resolved_at=None)
    # As a session whose value can't be held: it blocks until it is gone at the source.
    assert (row.part, looks) == ("value", Looks.CANNOT_HOLD)
    assert told in row.first_difference
    assert move.target.names("u-0", "s-0") == ["fine"]
    move.source.delete("u-0", "s-0", name)
    move.copy()
    assert move.verify() == []


def test_a_link_stays_a_link_where_links_are_held(between: Callable[[str, str], Move]) -> None:
    move = between("memory", "memory")
    uri = f"artifact://apps/{APP}/users/u-0/sessions/s-0/artifacts/r/versions/0"
    move.source.save("u-0", "s-0", "r", "what it leads to")
    move.source.save("u-0", "s-0", "ref", link(uri))
    move.copy()
    assert move.verify() == []
    inner: Any = move.target.service
    assert inner.artifacts[f"{APP}/u-0/s-0/ref"][0].data.file_data.file_uri == uri


def test_line_ends_on_disk_and_spellings_of_names_go_from_files_to_files(
    between: Callable[[str, str], Move],
) -> None:
    move = between("file", "file")
    move.source.save("u-0", "", "bare.txt", "a\r\nb")
    move.source.save("u-0", "", "user:bare.txt", "again")
    move.source.save("u-0", "s-0", " pad ", "x")
    move.source.save("u-0", "s-0", "a\\b", "x")
    move.source.save("u-0", "s-0", "", "x")
    move.copy()
    assert move.verify() == []
    assert move.target.file("u-0", "", "bare.txt", 0).read_bytes() == b"a\r\nb"
    for session in ("", "s-0"):
        assert move.target.names("u-0", session) == move.source.names("u-0", session)
    assert move.target.text("u-0", "s-0", "user:bare.txt", 0) == "a\nb"


def test_a_bare_name_of_a_user_is_named_where_it_can_only_be_listed_with_its_prefix(
    between: Callable[[str, str], Move],
) -> None:
    move = between("file", "memory")
    move.source.save("u-0", "", "bare.txt", "x")
    move.copy()
    assert move.verify() == [("user:bare.txt", Looks.CANNOT_HOLD)]
    told = "the name under which it was saved is spelled in another way"
    assert told in move.row.mismatches.get().first_difference
    assert move.source.text("u-0", "s-0", "user:bare.txt") == "x"
    assert move.target.text("u-0", "s-0", "user:bare.txt") == "x"


def test_two_names_that_files_keep_as_one_are_not_mixed(
    between: Callable[[str, str], Move],
) -> None:
    move = between("memory", "file")
    move.source.save("u-0", "s-0", "a/b", "one")
    move.source.save("u-0", "s-0", "a//b", "the other")
    move.copy()
    [(_, looks)] = move.verify()
    row = move.row.mismatches.get(resolved_at=None)
    assert (row.part, looks) == ("value", Looks.CANNOT_HOLD)
    assert move.target.versions("u-0", "s-0", "a/b") == [0]
    move.repair()
    assert len(move.open()) == 1
    assert len(move.verify()) == 1
    move.source.delete("u-0", "s-0", "a//b")
    move.copy()
    assert move.verify() == []
    assert move.target.text("u-0", "s-0", "a/b") == "one"


def test_a_version_that_cant_be_read_is_named(between: Callable[[str, str], Move]) -> None:
    move = between("file", "memory")
    fill(move.source)
    move.source.file("u-1", "s-1", "notes/today.txt", 0).write_bytes(b"\xff\xfe")
    move.copy()
    assert move.verify() == [("notes/today.txt", Looks.CANNOT_HOLD)]
    move.source.delete("u-1", "s-1", "notes/today.txt")
    move.copy()
    assert move.verify() == []


def test_no_value_is_kept_in_our_rows(between: Callable[[str, str], Move]) -> None:
    move = between("memory", "file")
    move.source.save("u-0", "s-0", "odd", types.Part(text="hunter2", thought=True), key="hunter2")
    move.copy()
    move.target.edit("u-0", "s-0", "odd", 0, "hunter2 hunter2")
    move.verify()
    rows = [*move.row.mismatches.values(), *move.row.artifact_versions.values()]
    assert "hunter2" not in str(rows)


# --- steps, kills, stale workers -----------------------------------------------------------------


class Mortal(Fragile):
    """A service at whose calls about one version, or one name, the worker may die."""

    def __getattr__(self, name: str) -> Any:
        if name in ("load", "save", "stamp", "delete"):
            return super().__getattr__(name)
        return getattr(self.port, name)


@pytest.fixture
def fragile(monkeypatch: pytest.MonkeyPatch) -> Killer:
    """Calls on an artifact service may be the worker's last."""
    killer = Killer()
    real = port.open_artifacts

    @contextmanager
    def opens(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with real(*args, **kwargs) as opened:
            yield Mortal(opened, killer)

    monkeypatch.setattr(port, "open_artifacts", opens)
    return killer


def test_steps_that_have_no_time_still_get_everywhere(
    between: Callable[[str, str], Move],
) -> None:
    move = between("file", "memory")
    fill(move.source)
    assert move.sweep(write=True, seconds=0) > 5
    assert move.sweep(write=False, seconds=0) > 3
    assert move.open() == []
    assert move.target.versions("u-0", "s-0", "report.pdf") == [0, 1]


@pytest.mark.parametrize(("source", "target"), [("file", "plain"), ("plain", "file")])
def test_a_kill_at_any_call_loses_nothing_and_doubles_nothing(
    between: Callable[[str, str], Move], fragile: Killer, source: str, target: str
) -> None:
    move = between(source, target)
    # Memory that has lost everything is not taken for artifacts that were deleted.
    move.source.save("u-0", "s-0", "stays", "x")
    at, done = 0, False
    while not done:
        at += 1
        for text in ("one", "two"):
            move.source.save("u-0", "s-0", "r", text)
        move.source.save("u-0", "", "user:gone", "gone")
        move.source.save("u-0", "s-0", "anew", "old")
        move.copy()
        move.source.save("u-0", "s-0", "r", "three")
        move.source.delete("u-0", "", "user:gone")
        move.source.delete("u-0", "s-0", "anew")
        move.source.save("u-0", "s-0", "anew", "new 0")
        move.source.save("u-0", "s-0", "anew", "new 1")
        fragile.calls, fragile.at = 0, at
        with suppress(Killed):
            move.copy()
        done, fragile.at = fragile.calls < at, None
        move.copy()
        assert move.verify() == [], f"killed at call {at}"
        assert [move.target.text("u-0", "s-0", "r", number) for number in range(3)] == [
            "one",
            "two",
            "three",
        ]
        assert move.target.versions("u-0", "s-0", "anew") == [0, 1]
        assert move.target.names("u-0") == []
        for name in ("r", "anew"):
            move.source.delete("u-0", "s-0", name)
        move.copy()
        assert len(move.lines()) == 1
    assert at > 20


def test_a_worker_whose_claim_is_over_writes_nothing(
    between: Callable[[str, str], Move], fragile: Killer
) -> None:
    move = between("memory", "memory")
    fill(move.source)
    fragile.before["load"] = lambda: move.at(claim=move.row.claim + 1) and None
    with pytest.raises(Overtaken):
        move.copy()
    assert all(not move.target.names(user, "s-0") for user in ("u-0", "u-1"))


def test_a_volume_that_is_not_mounted_is_not_taken_for_deleted_artifacts(
    between: Callable[[str, str], Move],
) -> None:
    move = between("file", "memory")
    fill(move.source)
    move.copy()
    apps = move.source.root / "apps"
    apps.rename(move.source.root / "away")
    with pytest.raises(Exception, match="Bring its volume back"):
        move.copy()
    assert move.target.text("u-0", "", "user:profile.txt") == "likes coffee"


# --- the way back --------------------------------------------------------------------------------


@pytest.fixture
def carried(between: Callable[[str, str], Move]) -> Callable[[str, str], Move]:
    """A move whose artifacts went over, and that is on its way back."""

    def make_one(source: str, target: str) -> Move:
        move = between(source, target)
        fill(move.source)
        move.copy()
        assert move.verify() == []
        return move.at(phase=Phase.REVERSE_DELTA)

    return make_one


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_what_the_target_wrote_goes_back_and_the_map_goes_on(
    carried: Callable[[str, str], Move], source: str, target: str
) -> None:
    move = carried(source, target)
    move.target.save("u-0", "s-0", "report.pdf", b"three")
    move.target.save("u-0", "s-0", "born", "on the target")
    move.target.delete("u-1", "s-1", "notes/today.txt")
    move.copy()
    move.at(phase=Phase.REVERSE_VERIFY)
    assert move.verify() == []
    assert move.source.load("u-0", "s-0", "report.pdf").inline_data.data == b"three"
    assert move.source.versions("u-0", "s-0", "report.pdf") == [0, 1, 2]
    assert move.source.text("u-0", "s-0", "born") == "on the target"
    assert move.source.names("u-1", "s-1") == []
    assert ("u-0", "s-0", "report.pdf", 2, 2) in move.lines()


def test_a_kill_on_the_way_back_leaves_no_late_write_behind(
    carried: Callable[[str, str], Move], fragile: Killer
) -> None:
    move = carried("file", "memory")
    at, done = 0, False
    while not done:
        at += 1
        move.target.save("u-0", "s-0", "report.pdf", f"version {at}")
        move.target.save("u-0", "", f"user:born {at}", "once")
        for name in ("user:anew", "user:gone"):
            move.target.delete("u-0", "", name)
        move.target.save("u-0", "", "user:anew", f"history {at}")
        fragile.calls, fragile.at = 0, at
        with suppress(Killed):
            move.copy()
        done, fragile.at = fragile.calls < at, None
        move.copy()
        assert move.verify() == [], f"killed at call {at}"
        assert move.source.versions("u-0", "s-0", "report.pdf") == list(range(at + 2))
        assert move.source.versions("u-0", "", f"user:born {at}") == [0]
        assert move.source.text("u-0", "", "user:anew") == f"history {at}"
        move.target.save("u-0", "", "user:gone", "carried back, and deleted next")
        move.copy()
    assert at > 20


def test_numbers_that_a_gap_changed_stay_the_sources_own_on_the_way_back(
    between: Callable[[str, str], Move],
) -> None:
    move = between("file", "memory")
    for text in ("a", "b"):
        move.source.save("u-0", "s-0", "r", text)
    _drop(move.source.file("u-0", "s-0", "r", 0).parent)
    move.copy()
    move.at(phase=Phase.REVERSE_DELTA)
    move.target.save("u-0", "s-0", "r", "c")
    move.copy()
    assert move.lines() == [("u-0", "s-0", "r", 1, 0), ("u-0", "s-0", "r", 2, 1)]
    assert move.source.versions("u-0", "s-0", "r") == [1, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_a_history_that_began_anew_on_the_target_replaces_the_sources(
    carried: Callable[[str, str], Move], kind: str
) -> None:
    move = carried(kind, "memory")
    move.target.delete("u-0", "", "user:profile.txt")
    move.target.save("u-0", "", "user:profile.txt", "likes nothing")
    move.copy()
    move.at(phase=Phase.REVERSE_VERIFY)
    assert move.verify() == []
    assert move.source.versions("u-0", "", "user:profile.txt") == [0]
    assert move.source.text("u-0", "", "user:profile.txt") == "likes nothing"


LATE: list[tuple[str, Callable[[Shelf], object]]] = [
    ("a version", lambda home: home.save("u-0", "s-0", "report.pdf", "late")),
    ("an edit in place", lambda home: home.edit("u-0", "s-0", "report.pdf", 1, "late")),
    ("another history", lambda home: _begun_anew(home)),
]


def _begun_anew(home: Shelf) -> None:
    home.delete("u-0", "s-0", "report.pdf")
    home.save("u-0", "s-0", "report.pdf", "late")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("words", "write"), LATE, ids=[row[0] for row in LATE])
@pytest.mark.parametrize("touched", [True, False], ids=["touched", "untouched"])
def test_a_late_write_at_the_source_is_named_and_replaced_only_if_somebody_says_so(
    carried: Callable[[str, str], Move],
    kind: str,
    words: str,
    write: Callable[[Shelf], object],
    touched: bool,
) -> None:
    move = carried(kind, "memory")
    write(move.source)
    if touched:
        move.target.delete("u-0", "s-0", "report.pdf")
        move.target.save("u-0", "s-0", "report.pdf", b"the tenant's own")
    move.copy()
    move.at(phase=Phase.REVERSE_VERIFY)
    assert move.verify() == [("report.pdf", Looks.LATE_WRITE)]
    assert move.source.body("u-0", "s-0", "report.pdf") == b"late"
    # Written once more since somebody saw it: their word is void.
    move.accept()
    move.source.save("u-0", "s-0", "report.pdf", "later")
    artifacts.repair(move.row, meter=move.meter, clock=lambda: move.now)
    assert move.open() == [("report.pdf", Looks.LATE_WRITE)]
    assert move.source.body("u-0", "s-0", "report.pdf") == b"later"
    move.accept()
    artifacts.repair(move.row, meter=move.meter, clock=lambda: move.now)
    assert move.verify() == []
    last = b"the tenant's own" if touched else b"two"
    assert move.source.load("u-0", "s-0", "report.pdf").inline_data.data == last


def test_a_late_name_at_the_source_stays_until_somebody_says_that_it_may_go(
    carried: Callable[[str, str], Move],
) -> None:
    move = carried("file", "memory")
    move.source.save("u-0", "s-0", "late", "late")
    move.copy()
    move.at(phase=Phase.REVERSE_VERIFY)
    assert move.verify() == [("late", Looks.LATE_WRITE)]
    assert move.source.text("u-0", "s-0", "late") == "late"
    move.accept()
    artifacts.repair(move.row, meter=move.meter, clock=lambda: move.now)
    assert move.verify() == []
    assert move.source.names("u-0", "s-0") == ["report.pdf", "user:profile.txt"]


def test_a_name_deleted_on_the_target_stays_at_the_source_where_it_was_written_late(
    carried: Callable[[str, str], Move],
) -> None:
    move = carried("memory", "memory")
    move.target.delete("u-1", "s-1", "notes/today.txt")
    move.source.edit("u-1", "s-1", "notes/today.txt", 0, "late")
    move.copy()
    assert move.open() == [("notes/today.txt", Looks.LATE_WRITE)]
    assert move.source.text("u-1", "s-1", "notes/today.txt") == "late"


# --- split ---------------------------------------------------------------------------------------


def test_in_a_split_a_users_own_files_of_both_sides_are_kept(
    between: Callable[[str, str], Move],
) -> None:
    move = between("file", "memory")
    fill(move.source)
    move.copy()
    move.at(split_placement_version=7, mode="split")
    move.target.save("u-0", "", "user:profile.txt", "by a session born there")
    move.target.save("u-0", "born", "own", "of a session born there")
    move.source.save("u-0", "", "user:profile.txt", "by a session that stayed")
    move.source.save("u-0", "s-0", "report.pdf", b"three")
    move.copy()
    assert move.verify() == []
    texts = [move.target.text("u-0", "", "user:profile.txt", number) for number in range(4)]
    assert texts[2:] == ["by a session born there", "by a session that stayed"]
    assert ("u-0", "", "user:profile.txt", 2, 3) in move.lines()
    assert move.target.text("u-0", "born", "own") == "of a session born there"
    assert move.target.load("u-0", "s-0", "report.pdf").inline_data.data == b"three"


def test_in_a_split_a_known_sessions_files_are_the_moves_own_on_the_target(
    between: Callable[[str, str], Move],
) -> None:
    move = between("memory", "memory")
    fill(move.source)
    move.copy()
    move.at(split_placement_version=7, mode="split")
    move.target.edit("u-1", "s-1", "notes/today.txt", 0, "by nobody who serves that session")
    assert move.verify() == [("notes/today.txt", Looks.STALE_ARTIFACT)]
    assert move.repair() == 1
    assert move.verify() == []
    assert move.target.text("u-1", "s-1", "notes/today.txt") == "nothing yet"


def test_out_of_a_split_births_come_back_and_nothing_of_the_source_goes(
    between: Callable[[str, str], Move],
) -> None:
    move = between("memory", "file")
    fill(move.source)
    move.copy()
    move.at(split_placement_version=7, mode="split")
    move.target.save("u-0", "", "user:profile.txt", "by a session born there")
    move.target.save("u-0", "born", "own", "of a session born there")
    move.source.save("u-0", "s-0", "report.pdf", b"three")
    move.source.save("u-0", "", "user:profile.txt", "by a session that stayed")
    move.source.delete("u-1", "s-1", "notes/today.txt")
    move.at(phase=Phase.REVERSE_DELTA, came_from="split")
    move.copy()
    move.at(phase=Phase.REVERSE_VERIFY)
    assert move.verify() == []
    assert move.source.load("u-0", "s-0", "report.pdf").inline_data.data == b"three"
    texts = [move.source.text("u-0", "", "user:profile.txt", number) for number in range(4)]
    assert texts[2:] == ["by a session that stayed", "by a session born there"]
    assert move.source.text("u-0", "born", "own") == "of a session born there"
    assert move.source.names("u-1", "s-1") == []


# --- taken away again ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_reopening_removes_from_the_target_what_the_move_wrote_and_nothing_else(
    between: Callable[[str, str], Move], kind: str
) -> None:
    move = between("memory", kind)
    fill(move.source)
    move.copy()
    move.target.save("u-0", "s-0", "stranger", "who?")
    move.target.save("u-0", "", "user:profile.txt", "who?")
    move.at(phase=Phase.REOPEN).remove("target")
    assert move.target.names("u-0", "s-0") == ["stranger", "user:profile.txt"]
    assert move.target.names("u-1", "s-1") == []
    assert artifacts.left(move.row) == 1
    assert move.source.names("u-1", "s-1") == ["notes/today.txt"]


@pytest.mark.parametrize("kind", KINDS)
def test_offboarding_removes_from_the_source_only_what_is_as_it_was_recorded(
    between: Callable[[str, str], Move], kind: str
) -> None:
    move = between(kind, "memory")
    fill(move.source)
    move.copy()
    move.source.edit("u-1", "s-1", "notes/today.txt", 0, "edited by somebody")
    move.source.save("u-0", "s-2", "report.pdf", b"late")
    move.at(phase=Phase.OFFBOARD).remove("source")
    assert move.source.names("u-0", "s-0") == []
    assert move.source.names("u-0", "s-2") == ["report.pdf"]
    assert move.source.text("u-1", "s-1", "notes/today.txt") == "edited by somebody"
    assert artifacts.left(move.row) == 2
    assert move.target.names("u-0", "s-0") == ["report.pdf", "user:profile.txt"]


def test_what_a_killed_step_had_not_recorded_is_removed_too(
    between: Callable[[str, str], Move], fragile: Killer
) -> None:
    move = between("memory", "file")
    move.source.save("u-0", "s-0", "r", "x")
    fragile.before["stamp"] = _kill
    with suppress(Killed):
        move.copy()
    assert move.target.text("u-0", "s-0", "r") == "x"
    move.at(phase=Phase.REOPEN).remove("target")
    assert move.target.names("u-0", "s-0") == []


def _kill() -> None:
    raise Killed


@pytest.mark.parametrize("at", range(1, 9))
def test_a_kill_while_removing_is_taken_up(
    between: Callable[[str, str], Move], fragile: Killer, at: int
) -> None:
    move = between("memory", "file")
    fill(move.source)
    move.copy()
    fragile.calls, fragile.at = 0, at
    with suppress(Killed):
        move.remove("source")
    fragile.at = None
    move.remove("source")
    assert all(not move.source.names(user, f"s-{n}") for user in ("u-0", "u-1") for n in range(4))
    assert artifacts.left(move.row) == 0


def test_nothing_is_removed_once_both_addresses_lead_to_one_place(
    between: Callable[[str, str], Move], monkeypatch: pytest.MonkeyPatch
) -> None:
    move = between("file", "file")
    fill(move.source)
    move.copy()
    monkeypatch.setenv("ARTIFACTS_A", move.target.address)
    with pytest.raises(Exception, match="in one place by now"):
        move.at(phase=Phase.OFFBOARD).remove("source")
    assert move.target.names("u-0", "s-0") == ["report.pdf", "user:profile.txt"]


# --- what names a version ------------------------------------------------------------------------


def find(move: Move) -> list[tuple[str, str, str, int, int]]:
    """Look for references to the end; return (session, place, name, was, is)."""
    cursor, steps = "", 0
    while True:
        row = move.row
        row.cursor_session = cursor
        with copying.opened(row, row.source_store) as store:
            swept = artifacts.find_references(row, store, timer=Timer(0))
        steps += 1
        assert steps < 50
        if swept.finished:
            break
        cursor = swept.cursor.session_id
    columns = ("session_id", "place", "name", "source_version", "target_version")
    return sorted(move.row.artifact_references.values_list(*columns))


@pytest.fixture
def renumbered(between: Callable[[str, str], Move]) -> Move:
    """Version 7 of two names becomes 0: the others are gone."""
    move = between("file", "memory")
    for number in range(8):
        move.source.save("u-0", "s-0", "report.pdf", f"report {number}")
        move.source.save("u-0", "", "user:plan.txt", f"plan {number}")
    for number in range(7):
        _drop(move.source.file("u-0", "s-0", "report.pdf", number).parent)
        _drop(move.source.file("u-0", "", "user:plan.txt", number).parent)
    move.source.save("u-1", "s-1", "kept.txt", "its number does not change")
    TenantMigration.objects.get(pk=move.pk).stamps.bulk_create(
        SessionStamp(move_id=move.pk, user_id=f"u-{n % 2}", session_id=f"s-{n}") for n in range(4)
    )
    return move


def say(move: Move, session: str, data: Any, state: Any = None, user: str = "u-0") -> None:
    """Write one event, and a state, into a session of the source."""
    with move.sessions.connection() as connection:
        move.sessions.run_in(
            connection,
            "update events set event_data = ? where app_name = ? and session_id = ? and id = ?",
            json.dumps(data),
            APP,
            session,
            f"{session}-e0",
        )
        if state is not None:
            move.sessions.run_in(
                connection,
                "update sessions set state = ? where app_name = ? and id = ?",
                json.dumps(state),
                APP,
                session,
            )


NAMED: list[tuple[str, Any, str]] = [
    (
        "a delta",
        {"actions": {"artifact_delta": {"report.pdf": 7}}},
        "actions.artifact_delta.report.pdf",
    ),
    (
        "a uri",
        {
            "fileData": f"artifact://apps/{APP}/users/u-0/sessions/s-0/artifacts/report.pdf/versions/7"
        },
        "fileData",
    ),
    (
        "a text",
        {"content": {"parts": [{"text": "I saved report.pdf (version 7)."}]}},
        "content.parts[0].text",
    ),
    ("a short text", {"text": "see report.pdf v7"}, "text"),
    ("an object", {"args": {"file": "report.pdf", "version": 7}}, "args"),
    ("an object of texts", {"args": {"file": "report.pdf", "file_version": "7"}}, "args"),
    ("a key", {"args": {"report_version": 7}}, "args.report_version"),
    ("a key below", {"report": {"version": 7}}, "report.version"),
]


@pytest.mark.parametrize(("words", "data", "place"), NAMED, ids=[row[0] for row in NAMED])
def test_an_event_that_names_a_renumbered_version_is_listed_by_its_place(
    renumbered: Move, words: str, data: Any, place: str
) -> None:
    move = renumbered
    say(move, "s-0", data)
    move.copy()
    assert find(move) == [("s-0", f"event 1 {place}", "report.pdf", 7, 0)]


def test_states_name_versions_too_and_places_hold_no_value(renumbered: Move) -> None:
    move = renumbered
    say(move, "s-2", {}, {"plan_version": 7, "latest": {"user:plan.txt": 7}, "note": "hunter2"})
    with move.sessions.connection() as connection:
        move.sessions.run_in(
            connection,
            "update user_states set state = ? where app_name = ? and user_id = 'u-0'",
            json.dumps({"where": {"name": "plan.txt", "version": 7}}),
            APP,
        )
    move.copy()
    assert find(move) == [
        ("", "state user:where", "user:plan.txt", 7, 0),
        ("s-2", "state latest.plan.txt", "user:plan.txt", 7, 0),
        ("s-2", "state plan_version", "user:plan.txt", 7, 0),
    ]


OTHERS: list[tuple[str, Any]] = [
    ("another number", {"actions": {"artifact_delta": {"report.pdf": 6}}}),
    ("another name", {"actions": {"artifact_delta": {"other.pdf": 7}}}),
    ("a number alone", {"args": {"count": 7, "version": 7}}),
    ("a name alone", {"text": "I saved report.pdf."}),
    ("another user's", {"u": f"artifact://apps/{APP}/users/u-1/artifacts/plan.txt/versions/7"}),
    ("true", {"report_version": True}),
]


@pytest.mark.parametrize(("words", "data"), OTHERS, ids=[row[0] for row in OTHERS])
def test_what_names_none_of_them_is_not_listed(renumbered: Move, words: str, data: Any) -> None:
    say(renumbered, "s-0", data)
    renumbered.copy()
    assert find(renumbered) == []


LONG = "9" * 5_000
ODD: list[tuple[str, Any]] = [
    ("a digit that is no number", {"report_version": "²", "unit": "①"}),
    ("a number of thousands of digits", {"report_version": LONG, "n": int("9" * 4_000)}),
    (
        "a uri with such a version",
        {"u": f"artifact://apps/a/users/u-0/artifacts/x/versions/{LONG}"},
    ),
    ("no number", {"report_version": math.nan, "other_version": math.inf}),
    (
        "a text of nothing but beginnings",
        {"text": "artifact://apps/a/users/b/artifacts/c " * 2_000},
    ),
]


@pytest.mark.parametrize(("words", "data"), ODD, ids=[row[0] for row in ODD])
def test_what_users_write_does_not_stop_the_look_for_references(
    renumbered: Move, words: str, data: Any
) -> None:
    say(renumbered, "s-0", data)
    say(renumbered, "s-2", {"text": "report.pdf v7"}, {"plan_version": 7})
    renumbered.copy()
    assert find(renumbered) == [("s-2", "state plan_version", "user:plan.txt", 7, 0)]


def test_uris_in_one_text_are_told_apart_and_none_goes_on_in_the_next_line(
    renumbered: Move,
) -> None:
    begun, name = f"artifact://apps/{APP}/users/u-0", "artifacts/report.pdf/versions/7"
    uri = f"{begun}/sessions/s-0/{name}"
    texts = [f"{uri}, {uri} and v6", f"{begun}\n/sessions/s-0/{name}", f"{begun}/sessions//{name}"]
    say(renumbered, "s-2", {"parts": texts})
    renumbered.copy()
    assert find(renumbered) == [("s-2", "event 1 parts[0]", "report.pdf", 7, 0)]


def test_ten_thousand_versions_cost_a_long_session_no_time(renumbered: Move) -> None:
    renumbered.copy()
    lines = [
        ArtifactVersion(
            move_id=renumbered.pk,
            user_id="u-0",
            session_id="s-0",
            name="many.bin",
            source_version=number,
            target_version=number - 8,
            source_digest="x",
            target_digest="x",
        )
        for number in range(8, 10_008)
    ]
    ArtifactVersion.objects.bulk_create(lines)
    parts = [{"text": f"step {n} of many.bin", "args": {"at": n, "of": [n]}} for n in range(2_000)]
    say(renumbered, "s-0", {"parts": parts, "last": {"many.bin": 10_007}})
    begun = time.process_time()
    assert find(renumbered) == [("s-0", "event 1 last.many.bin", "many.bin", 10_007, 9_999)]
    # By each version for each value it was two minutes, and a step lives for twenty seconds.
    assert time.process_time() - begun < 10


def test_a_version_that_is_a_link_to_a_renumbered_one_is_listed(
    between: Callable[[str, str], Move],
) -> None:
    move = between("memory", "memory")
    uri = f"artifact://apps/{APP}/users/u-0/artifacts/plan.txt/versions/1"
    for text in ("a", "b"):
        move.source.save("u-0", "", "user:plan.txt", text)
    move.source.save("u-0", "s-0", "ref", link(uri))
    move.copy()
    assert find(move) == []
    lines = move.row.artifact_versions.filter(name="user:plan.txt", source_version=1)
    lines.update(target_version=0)
    assert find(move) == [("", "artifact ref version 0", "user:plan.txt", 1, 0)]


def test_nothing_is_read_where_no_number_changed(between: Callable[[str, str], Move]) -> None:
    move = between("memory", "memory")
    fill(move.source)
    move.copy()
    swept = artifacts.find_references(move.row, None, timer=Timer())  # type: ignore[arg-type]
    assert swept.finished


# --- before it begins ----------------------------------------------------------------------------


def checks(move: Move) -> dict[str, tuple[bool | None, str]]:
    row = move.row
    found, _ = artifact_checks(row.tenant, row.source_store, row.target_store)
    return {check.name: (check.ok, check.detail) for check in found}


def prepare(move: Move, *, leftovers: bool = False) -> artifacts.Prepared:
    return artifacts.prepare(move.row, leftovers=leftovers, timer=Timer())


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_two_places_are_told_apart_and_nothing_of_that_is_left(
    between: Callable[[str, str], Move], source: str, target: str
) -> None:
    move = between(source, target)
    fill(move.source)
    assert checks(move)["Artifacts"][0] is True
    assert prepare(move).apart is True
    for shelf in (move.source, move.target):
        if shelf.kind == "file":
            assert not list(shelf.root.rglob("switchyard-*"))


def test_one_place_under_two_addresses_is_found_out(
    between: Callable[[str, str], Move], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    move = between("file", "file")
    (tmp_path / "alias").symlink_to(move.source.root)
    monkeypatch.setenv("ARTIFACTS_B", f"file://{tmp_path}/alias")
    fill(move.source)
    prepared = prepare(move)
    assert (prepared.apart, prepared.check and prepared.check.ok) == (False, True)
    move.at(artifacts_apart=False).copy()
    assert move.lines() == []
    assert move.source.versions("u-0", "s-0", "report.pdf") == [0, 1]


def test_one_address_for_both_copies_nothing_and_says_so(
    between: Callable[[str, str], Move], monkeypatch: pytest.MonkeyPatch
) -> None:
    move = between("file", "file")
    monkeypatch.setenv("ARTIFACTS_B", move.source.address)
    ok, detail = checks(move)["Artifacts"]
    assert ok
    assert "none is copied" in detail
    assert prepare(move).apart is False


def test_a_tenant_with_artifacts_is_not_moved_where_there_is_no_service_for_them(
    between: Callable[[str, str], Move],
) -> None:
    move = between("memory", "memory")
    Store.objects.filter(key="store-eu1-b").update(artifacts_from="")
    ok, detail = checks(move)["Artifacts"]
    assert (ok, "names no artifact service" in detail) == (True, True)
    fill(move.source)
    ok, detail = checks(move)["Artifacts"]
    assert (ok, "would be out of reach" in detail) == (False, True)
    assert prepare(move).check is None
    assert move.copy() == 1


def test_a_target_that_has_some_already_is_refused_unless_an_ended_move_left_them(
    between: Callable[[str, str], Move],
) -> None:
    move = between("memory", "file")
    fill(move.source)
    move.target.save("u-9", "", "user:x", "somebody's")
    ok, detail = checks(move)["Room for artifacts on store-eu1-b"]
    assert not ok
    assert "already" in detail
    prepared = prepare(move)
    assert prepared.check is not None
    assert prepared.check.ok is False
    assert move.target.text("u-9", "", "user:x") == "somebody's"
    prepared = prepare(move, leftovers=True)
    assert prepared.check is not None
    assert prepared.check.ok is True
    assert move.target.names("u-9") == []
    assert not list((move.target.root / "apps" / APP / "users").iterdir())


def test_an_overtaken_worker_clears_nothing_more(
    between: Callable[[str, str], Move], monkeypatch: pytest.MonkeyPatch
) -> None:
    move = between("memory", "memory")
    for number in range(3):
        move.target.save("u-9", "", f"user:{number}", "left")
    delete = MemoryStore.delete

    def overtaken(self: MemoryStore, user_id: str, name: Name) -> None:
        delete(self, user_id, name)
        TenantMigration.objects.update(claim=F("claim") + 1)

    monkeypatch.setattr(MemoryStore, "delete", overtaken)
    with sides.one(move.row, "target") as side, pytest.raises(Overtaken):
        removal.clear(move.row, side, timer=Timer())
    assert len(move.target.names("u-9")) == 2


def test_one_user_of_many_names_is_cleared_in_more_than_one_step(
    between: Callable[[str, str], Move],
) -> None:
    move = between("memory", "memory")
    for number in range(3):
        move.target.save("u-9", "", f"user:{number}", "left")
    with sides.one(move.row, "target") as side:
        for left in (2, 1, 0):
            assert not removal.clear(move.row, side, timer=Timer(0))
            assert len(move.target.names("u-9")) == left
        assert removal.clear(move.row, side, timer=Timer(0))


@pytest.mark.parametrize("wrote", [True, False])
def test_what_lies_behind_an_ended_moves_guard_is_its_own_only_if_it_kept_artifacts(
    between: Callable[[str, str], Move], monkeypatch: pytest.MonkeyPatch, wrote: bool
) -> None:
    move = between("memory", "memory")
    move.target.save("u-9", "", "user:x", "somebody's")
    row = move.row
    ended = move.row
    ended.pk, ended.phase, ended.due_at = None, Phase.ABORTED, None
    ended._state.adding = True
    ended.save()
    monkeypatch.setattr(preflight, "_held", lambda *given: (ended, False))
    if wrote:
        ArtifactVersion.objects.create(
            move=ended, user_id="u-9", name="user:x", source_version=0, target_version=0
        )
    assert checks(move)["Room for artifacts on store-eu1-b"][0] is wrote
    # As PREPARE says a moment later.
    assert preflight.left_artifacts(row.tenant, row.target_store) is wrote


def test_names_that_the_target_refuses_are_found_before_the_move_begins(
    between: Callable[[str, str], Move],
) -> None:
    move = between("memory", "file")
    move.source.save("u-0", "s-0", "../x", "x")
    row = move.row
    ok, detail = checks(move)["Artifacts"]
    assert not ok
    assert "leads out of its folder" in detail
    _, findings = artifact_checks(row.tenant, row.source_store, row.target_store)
    assert [(finding.field, finding.blocks) for finding in findings] == [("artifacts", True)]


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("file:///nowhere/at/all", "is not there"),
        ("python:tests.shelves:nothing", "is no artifact service"),
        ("python:tests.nowhere:nothing", "could not be opened"),
        ("ftp://host/folder", "is no artifact service"),
    ],
)
def test_an_address_that_leads_nowhere_is_refused_without_being_quoted(
    between: Callable[[str, str], Move],
    monkeypatch: pytest.MonkeyPatch,
    address: str,
    told: str,
) -> None:
    move = between("memory", "memory")
    monkeypatch.setenv("ARTIFACTS_A", address)
    ok, detail = checks(move)["Artifacts"]
    assert not ok
    assert told in detail
    assert "env:ARTIFACTS_A" in detail
    assert address not in detail


def test_a_service_named_after_the_move_began_is_not_passed_over_in_silence(
    between: Callable[[str, str], Move],
) -> None:
    move = between("memory", "memory").at(artifacts_apart=None)
    with pytest.raises(Exception, match="nobody has told their places apart"):
        move.copy()
