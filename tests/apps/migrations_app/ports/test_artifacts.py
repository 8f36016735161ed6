"""The port over artifact services: what is read natively is what google-adk's interface tells."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from google.genai import types

from migrations_app.ports import artifacts as port
from migrations_app.ports.artifacts import Name, service
from migrations_app.ports.artifacts.content import LONGEST_NAME
from migrations_app.ports.artifacts.native import SETTLED_SECONDS
from migrations_app.ports.runner import runner
from tests.shelves import APP, KINDS, SERVICES, Plain, Shelf

# Ids that google-adk takes: some of them are what it calls its own folders.
USERS = ("u", "a/b", "a", "artifacts", "sessions", "ä ö", "user")
SESSIONS = ("s", "artifacts", "x/y", "x", "sessions")
FILES = ("doc", "doc/nested", "versions.txt", "a.b", "user:own", "user:deep/own")


class Told:
    """Who there is, for a service that can't say so itself."""

    def users(self) -> Iterator[str]:
        yield from USERS

    def sessions(self, user_id: str) -> Iterator[str]:
        yield from (session for session in SESSIONS if session != "x")


@pytest.fixture
def shelf(request: pytest.FixtureRequest, tmp_path: Path) -> Shelf:
    return Shelf(request.param, "source", tmp_path)


@contextmanager
def opened(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> Iterator[port.ArtifactStore]:
    monkeypatch.setenv("SHELF", shelf.address)
    with port.open_artifacts("env:SHELF", app_name=APP, known=Told()) as found:
        yield found


every = pytest.mark.parametrize("shelf", KINDS, indirect=True)
of_files = pytest.mark.parametrize("shelf", ["file"], indirect=True)


@every
def test_every_user_session_and_name_is_told_apart(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In one flat space x/y's doc is x's y/doc, to google-adk itself.
    sessions = [session for session in SESSIONS if shelf.kind == "file" or session != "x"]
    wanted: dict[str, set[Name]] = {}
    for user in USERS:
        for session in sessions:
            for name in FILES:
                shelf.save(user, session, name, "x")
                own = name.startswith("user:")
                wanted.setdefault(user, set()).add(Name("" if own else session, name))
    with opened(shelf, monkeypatch) as found:
        assert found.users("", 100) == sorted(USERS)
        assert found.users("a", 2) == ["a/b", "artifacts"]
        for user in USERS:
            assert set(found.listing(user)) == wanted[user], user
    for user in USERS:
        for session in sessions:
            assert set(shelf.names(user, session)) == set(FILES)


@every
def test_another_tenants_artifacts_are_not_seen(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.save("u", "s", "mine", "x")
    monkeypatch.setenv("SHELF", shelf.address)
    with port.open_artifacts("env:SHELF", app_name="support.bolt", known=Told()) as other:
        assert not other.listing("u")


@every
def test_a_version_saved_through_the_port_is_read_back_as_it_was(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = types.Part(inline_data=types.Blob(data=b"x", mime_type="a/b", display_name="d"))
    with opened(shelf, monkeypatch) as found:
        for name in (Name("s", "doc"), Name("", "user:own")):
            kept = port.content(part, {"n": 1, "deep": {"x": None}}, spelled=name.name)
            assert found.refusal("u", name, kept) == ""
            assert found.save("u", name, kept) == 0
            assert found.load("u", name, 0).facts == kept.facts
            found.delete("u", name)
            assert not found.listing("u").get(name)


FACTS: list[tuple[str, Any, dict[str, Any]]] = [
    ("other bytes", types.Blob(data=b"y", mime_type="a/b"), {}),
    ("another type", types.Blob(data=b"x", mime_type="a/c"), {}),
    ("a display name", types.Blob(data=b"x", mime_type="a/b", display_name="d"), {}),
    ("metadata", types.Blob(data=b"x", mime_type="a/b"), {"n": 2}),
    ("metadata of another type", types.Blob(data=b"x", mime_type="a/b"), {"n": "1"}),
    ("metadata that is true", types.Blob(data=b"x", mime_type="a/b"), {"n": True}),
    ("more metadata", types.Blob(data=b"x", mime_type="a/b"), {"n": 1, "m": None}),
]


@pytest.mark.parametrize(("words", "blob", "metadata"), FACTS, ids=[row[0] for row in FACTS])
def test_a_digest_sees(words: str, blob: Any, metadata: dict[str, Any]) -> None:
    one = types.Blob(data=b"x", mime_type="a/b")
    ours = port.content(types.Part(inline_data=one), {"n": 1}, spelled="r").facts
    other = port.content(types.Part(inline_data=blob), metadata or {"n": 1}, spelled="r").facts
    assert ours.digest != other.digest
    assert port.difference(ours, other)
    assert port.difference(ours, ours) == ""


def test_a_digest_tells_a_text_from_the_same_bytes() -> None:
    blob = types.Blob(data=b"x", mime_type="text/plain")
    text = port.content(types.Part(text="x"), {}, spelled="r").facts
    data = port.content(types.Part(inline_data=blob), {}, spelled="r").facts
    assert text.digest != data.digest
    assert port.difference(text, data) == "a text is a data there"


@of_files
def test_an_id_that_is_a_path_leads_into_nobodys_folder(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.save("u", "s", "user:own", "x")
    shelf.save("u", "s", "doc", "x")
    home = shelf.root / "apps" / APP / "users" / "u"
    with opened(shelf, monkeypatch) as found:
        assert len(found.listing("u")) == 2
        for path in (f"../../{APP}/users/u", str(home), "./u", "u/", "u/sessions/s", "u\0"):
            assert found.listing(path) == {}, path


@of_files
def test_the_stamp_of_a_file_shows_an_edit_that_gives_its_old_time_back(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.save("u", "s", "doc", "one")
    file = shelf.file("u", "s", "doc", 0)
    with opened(shelf, monkeypatch) as found:
        # A file that changed a moment ago proves nothing yet.
        assert found.listing("u")[Name("s", "doc")] == {0: ""}
        late = time.time() + SETTLED_SECONDS + 1
        monkeypatch.setattr("migrations_app.ports.artifacts.native.time.time", lambda: late)
        before = found.stamp("u", Name("s", "doc"), 0)
        assert before
        assert found.listing("u")[Name("s", "doc")] == {0: before}
        times = file.stat().st_atime_ns, file.stat().st_mtime_ns
        file.write_text("two")
        os.utime(file, ns=times)
        assert found.stamp("u", Name("s", "doc"), 0) != before


@of_files
def test_what_a_killed_save_left_is_no_version(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.save("u", "s", "doc", "one")
    (shelf.file("u", "s", "doc", 0).parents[1] / ".1.pending").mkdir()
    with opened(shelf, monkeypatch) as found:
        assert list(found.listing("u")[Name("s", "doc")]) == [0]


@of_files
def test_a_folder_that_cant_be_listed_is_not_taken_for_an_empty_one(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.save("u", "s", "doc", "one")

    def denied(folder: Any) -> Any:
        raise PermissionError(folder)

    with opened(shelf, monkeypatch) as found:
        monkeypatch.setattr("migrations_app.ports.artifacts.native.os.scandir", denied)
        with pytest.raises(Exception, match="PermissionError"):
            found.listing("u")


@every
def test_one_place_is_told_from_two_and_the_word_is_nobodys(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = Shelf("file", "target", tmp_path)
    with opened(shelf, monkeypatch) as ours, opened(other, monkeypatch) as theirs:
        assert port.same_place(ours, ours)
        assert not port.same_place(ours, theirs)
        assert not port.same_place(theirs, ours)
        # What a killed look left behind is no user's.
        word = port.content(types.Part(text="x"), {}, spelled="user:switchyard")
        theirs.save("switchyard-nonce-0", Name("", "user:switchyard"), word)
        assert theirs.users("", 10) == []


def test_memory_by_name_is_one_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELF", "memory://one")
    word = port.content(types.Part(text="x"), {}, spelled="r")
    with port.open_artifacts("env:SHELF", app_name=APP, known=Told()) as found:
        found.save("u", Name("s", "r"), word)
        assert found.caveat
    with port.open_artifacts("env:SHELF", app_name=APP, known=Told()) as found:
        assert found.users("", 10) == ["u"]
        found.delete("u", Name("s", "r"))
    monkeypatch.setenv("SHELF", "memory://other")
    with port.open_artifacts("env:SHELF", app_name=APP, known=Told()) as found:
        assert found.users("", 10) == []


def test_names_are_spelled_so_that_any_row_holds_them_and_no_two_alike() -> None:
    names = ["r", "", "a\0b", "a\\0b", "\udcc3", 'json:"r"', "n" * 5000, "n" * 5001, "ä" * 5000]
    spelled = [port.spell(name) for name in names]
    assert len(set(spelled)) == len(names)
    for text in spelled:
        assert text
        assert "\0" not in text
        assert len(text.encode()) <= LONGEST_NAME


class Slow(Plain):
    """Answers each question about one name after a while; counts how many wait at once."""

    seconds = 0.02
    asked = most = 0

    async def list_artifact_versions(self, **named: Any) -> Any:
        Slow.asked += 1
        Slow.most = max(Slow.most, Slow.asked)
        await asyncio.sleep(self.seconds)
        Slow.asked -= 1
        return await super().list_artifact_versions(**named)


@pytest.mark.parametrize("shelf", ["plain"], indirect=True)
def test_many_names_of_a_slow_service_are_listed_a_few_at_once_and_not_for_ever(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(40):
        shelf.save("u", "s", f"doc-{number}", "x")
    slow = Slow()
    slow.inner = cast(Plain, shelf.service).inner
    SERVICES["source"] = slow
    with opened(shelf, monkeypatch) as found:
        assert len(found.listing("u")) == 40
        assert Slow.most == service.AT_ONCE
        monkeypatch.setattr(service, "LISTING_SECONDS", 0.2)
        monkeypatch.setattr(Slow, "seconds", 60.0)
        began = time.monotonic()
        with pytest.raises(port.ArtifactsFailed, match="one user's 40 names"):
            found.listing("u")
        assert time.monotonic() - began < 5


def test_an_id_with_a_slash_is_nobodys_in_cloud_storage_and_is_refused_by_name() -> None:
    objects = [
        SimpleNamespace(name=f"{APP}/{path}", generation=1, metageneration=1)
        for path in ("u/s/doc/0", "u/user/user:own/0", "a/b/s/doc/0")
    ]
    client = SimpleNamespace(
        list_blobs=lambda bucket, prefix: [o for o in objects if o.name.startswith(prefix)]
    )
    cloud: Any = SimpleNamespace(storage_client=client, bucket="bucket")
    with runner() as loop:
        store = service.GcsStore(
            cloud, loop, reference="env:SHELF", app_name=APP, known=cast(Any, Told())
        )
        assert set(store.listing("u")) == {Name("s", "doc"), Name("", "user:own")}
        # A user of whom only sessions are known stops no sweep.
        assert store.listing("a/b") == {}
        assert "user's id holds a slash" in store.refusal("a/b", Name("s", "doc"), None)
        assert "session's id holds a slash" in store.refusal("a", Name("b/s", "doc"), None)
        assert store.refusal("u", Name("s", "a/doc"), None) == ""
