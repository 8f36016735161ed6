"""The two google-adk services that are read where they keep things: files, and memory.

Read natively for what the interface hides: users, artifacts of sessions that are gone, links that
it would follow, line ends, the spelling of a name in each version, and whether a version was
edited in place. Written through the interface.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from migrations_app.ports.artifacts.base import (
    ArtifactsRefused,
    ArtifactUnreadable,
    Listing,
)
from migrations_app.ports.artifacts.content import (
    LINK,
    TEXT,
    USER,
    Content,
    Name,
    content,
    encodes,
)
from migrations_app.ports.artifacts.service import ServiceStore, page
from migrations_app.ports.base import CannotHold

# A file that changed a moment ago may change once more within one tick of its file system's clock:
# its times prove nothing yet.
SETTLED_SECONDS = 2.0
# A name may be this long in a folder of any file system that runtimes use.
LONGEST_PART = 255


class FileStore(ServiceStore):
    """FileArtifactService: apps/<app>/users/<user>/[sessions/<session>/]artifacts/<name>/versions.

    A version's stamp is made of its files' inodes, sizes and times of change, which no edit keeps.
    """

    stamps = True

    @property
    def has_place(self) -> bool:
        return self._root.is_dir()

    @property
    def _root(self) -> Path:
        return Path(self.service.root_dir) / "apps" / self.app_name / "users"

    def users(self, after: str, limit: int) -> list[str]:
        """Return the users that have a folder; an id with slashes is a folder in a folder."""
        return page(_ids(self._root, ("artifacts", "sessions")), after, limit)

    def listing(self, user_id: str) -> Listing:
        """Return every folder of the user that holds versions."""
        found: Listing = {}
        if not _is_folder(user_id):
            # Asked for who is known elsewhere: read here it would be another tenant's folder.
            return found
        home = self._root / user_id
        scopes = [("", home / "artifacts")]
        sessions = sorted(_ids(home / "sessions", ("artifacts",)))
        scopes += [(session, home / "sessions" / session / "artifacts") for session in sessions]
        for session, root in scopes:
            for folder in _artifacts(root):
                versions = _versions(folder)
                name = self._listed(session, root, folder, versions)
                found[name] = {number: _stamp(folder, number) for number in versions}
        return found

    def _listed(self, session: str, root: Path, folder: Path, versions: list[int]) -> Name:
        """Name an artifact as google-adk lists it: as its last version was saved."""
        about = _about(folder, versions[-1]) if versions else {}
        spelled = about.get("fileName") or folder.relative_to(root).as_posix()
        if session or spelled.startswith(USER):
            return Name(session, spelled)
        return Name("", f"{USER}{spelled}")

    def placed(self, name: Name) -> Name:
        """Return the folder's name: blanks around it and the kind of its slashes don't count."""
        prefix = "" if name.session_id else USER
        text = name.name.removeprefix(USER).strip()
        text = PureWindowsPath(text).as_posix() if "\\" in text else text
        relative = PurePosixPath(text).as_posix()
        return Name(name.session_id, prefix + ("artifact" if relative == "." else relative))

    def load(self, user_id: str, name: Name, version: int) -> Content:
        """Read one version from its two files."""
        from google.genai import types

        folder = self._folder(user_id, name)
        about = _about(folder, version)
        path = folder / "versions" / str(version) / folder.name
        raw = None
        try:
            data = path.read_bytes()
            mime = about.get("mimeType")
            if mime:
                blob = types.Blob(data=data, mime_type=mime, display_name=about.get("displayName"))
                part = types.Part(inline_data=blob)
            else:
                raw = data.decode()
                part = types.Part(text=raw.replace("\r\n", "\n").replace("\r", "\n"))
        except (OSError, ValueError) as error:
            raise ArtifactUnreadable(
                f"version {version} can't be read ({type(error).__name__})"
            ) from None
        spelled = about.get("fileName")
        if spelled is None:
            spelled = name.name
        return content(part, about.get("customMetadata") or {}, spelled=spelled, raw=raw)

    def stamp(self, user_id: str, name: Name, version: int) -> str:
        """Return what tells the version's files from any edit of them."""
        return _stamp(self._folder(user_id, name), version)

    def refusal(self, user_id: str, name: Name, kept: Content | None) -> str:
        """Return why the service would refuse a name, or a version."""
        if told := _scope_refusal(self.app_name, user_id, name.session_id):
            return told
        if told := _path_refusal(name.name):
            return told
        if kept is None:
            return ""
        if kept.facts.kind == LINK:
            return "it is a link (file_data), and files hold texts and bytes only"
        if kept.facts.kind == TEXT and not encodes(kept.part.text):
            return "its text holds half of a surrogate pair, which no file in UTF-8 holds"
        return ""

    def save(self, user_id: str, name: Name, kept: Content) -> int:
        """Add a version; one that came from files with its name and its line ends as they were."""
        at = self._at(user_id, name)
        spelled = Name(name.session_id, kept.facts.spelled)
        if self.placed(spelled) == self.placed(name):
            # Without a session a bare name is the user's own, and stays bare in listings.
            at["filename"] = kept.facts.spelled
        if kept.raw is not None:
            kept = Content(
                kept.facts, kept.part.model_copy(update={"text": kept.raw}), kept.custom_metadata
            )
        try:
            return self._save(at, kept)
        except ArtifactsRefused:
            with suppress(ValueError, OSError):
                folder = self._folder(user_id, name)
                if not _versions(folder):
                    # Refused, google-adk leaves the name behind: listed, and without a version.
                    self.delete(user_id, name)
            raise

    def forget_user(self, user_id: str) -> None:
        """Remove the user's empty folders."""
        for folder, _, _ in os.walk(self._root / user_id, topdown=False):
            with suppress(OSError):
                Path(folder).rmdir()

    def _folder(self, user_id: str, name: Name) -> Path:
        home = self._root / user_id
        if name.session_id:
            home = home / "sessions" / name.session_id
        return home / "artifacts" / self.placed(name).name.removeprefix(USER)


class MemoryStore(ServiceStore):
    """InMemoryArtifactService: one process's own, so for tests and practice only."""

    caveat = "it is in one process's memory, which other processes neither see nor keep"

    @property
    def has_place(self) -> bool:
        return any(path.startswith(f"{self.app_name}/") for path in self.service.artifacts)

    def users(self, after: str, limit: int) -> list[str]:
        """Return the users that have an artifact."""
        return page((user for user, _, _ in self._entries()), after, limit)

    def listing(self, user_id: str) -> Listing:
        """Return everything that is kept of the user."""
        return {
            name: {
                number: repr(entry.artifact_version.create_time)
                for number, entry in enumerate(entries)
            }
            for user, name, entries in self._entries()
            if user == user_id
        }

    def load(self, user_id: str, name: Name, version: int) -> Content:
        """Return a version as it is kept: a link as the link that it is."""
        home = f"{self.app_name}/{user_id}/{name.session_id or 'user'}/{name.name}"
        entries = self.service.artifacts.get(home, [])
        if not 0 <= version < len(entries):
            raise ArtifactUnreadable(f"version {version} is not there any more")
        entry = entries[version]
        return content(entry.data, entry.artifact_version.custom_metadata or {}, spelled=name.name)

    def refusal(self, user_id: str, name: Name, kept: Content | None) -> str:
        """Return why the service would refuse a name, or a version."""
        if name.session_id.replace("\\", "/").split("/")[0] == "user":
            return 'a session of the name "user" is where it keeps users\' own artifacts'
        return _scope_refusal(self.app_name, user_id, name.session_id)

    def _entries(self) -> Iterator[tuple[str, Name, Any]]:
        """Yield (user, name, versions); ids are told apart by each artifact's URI."""
        where = re.compile(
            rf"memory://apps/{re.escape(self.app_name)}/users/(.+?)(?:/sessions/(.+?))?"
            r"/artifacts/(.*)/versions/\d+",
            re.DOTALL,
        )
        for entries in list(self.service.artifacts.values()):
            found = where.fullmatch(entries[0].artifact_version.canonical_uri) if entries else None
            if found:
                yield found[1], Name(found[2] or "", found[3]), entries


def _ids(root: Path, marks: tuple[str, ...]) -> Iterator[str]:
    """Yield the ids whose folders stand below `root`: those that hold one of `marks`.

    google-adk keeps an id with slashes as folders in folders, and then takes none of the marks in
    it: what such a folder is called below the first is never an id's part.
    """
    waiting = [(root, "")]
    while waiting:
        folder, above = waiting.pop()
        inner = sorted(_folders(folder))
        if above and any(mark in inner for mark in marks):
            yield above
        for child in inner:
            if not above or child not in ("artifacts", "sessions"):
                waiting.append((folder / child, f"{above}/{child}" if above else child))


def _is_folder(user_id: str) -> bool:
    """Whether an id can be a user's folder, so that `_ids` could yield it.

    Whoever writes sessions chooses ids, and such as "../other" or "bob/sessions/s" are paths.
    """
    parts = user_id.split("/")
    return (
        "\0" not in user_id
        and not any(part in ("", ".", "..") for part in parts)
        and not any(part in ("artifacts", "sessions") for part in parts[1:])
    )


def _artifacts(root: Path) -> Iterator[Path]:
    """Yield the folders below `root` that hold versions; one may stand in another."""
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        inner = sorted(_folders(folder))
        if "versions" in inner:
            yield folder
        waiting += [folder / child for child in inner if child != "versions"]


def _folders(folder: Path) -> Iterator[str]:
    try:
        with os.scandir(folder) as entries:
            yield from [entry.name for entry in entries if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        # Read as empty it would be taken for artifacts that were deleted.
        raise CannotHold(f"A folder of artifacts can't be read ({type(error).__name__}).") from None


def _versions(folder: Path) -> list[int]:
    names = _folders(folder / "versions")
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def _stamp(folder: Path, version: int) -> str:
    home = folder / "versions" / str(version)
    parts, youngest = [], 0.0
    for path in (home / folder.name, home / "metadata.json"):
        try:
            found = path.stat()
        except OSError:
            return ""
        parts.append(f"{found.st_ino:x}.{found.st_size:x}.{found.st_ctime_ns:x}")
        youngest = max(youngest, found.st_ctime)
    return "-".join(parts) if time.time() - youngest > SETTLED_SECONDS else ""


def _about(folder: Path, version: int) -> dict[str, Any]:
    """Read a version's metadata as google-adk does: what is unreadable is none."""
    path = folder / "versions" / str(version) / "metadata.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _scope_refusal(app_name: str, user_id: str, session_id: str) -> str:
    """Say which id google-adk would not take."""
    from google.adk.artifacts import artifact_util
    from google.adk.errors.input_validation_error import InputValidationError

    for what, value in (
        ("app name", app_name),
        ("user's id", user_id),
        ("session's id", session_id),
    ):
        if what == "session's id" and not value:
            continue
        try:
            artifact_util.validate_path_segment(value, what)
        except InputValidationError:
            return f"the {what} is none that google-adk makes a path of"
    return ""


def _path_refusal(name: str) -> str:
    """Say why google-adk's file service would refuse a name."""
    text = name.removeprefix(USER).strip()
    windows = PureWindowsPath(text)
    path = PurePosixPath(windows.as_posix() if "\\" in text else text)
    parts = [part.rstrip(" .").casefold() for part in path.parts]
    if windows.root or re.match("[A-Za-z]:", text):
        return "its name begins at a root or a drive, and files are kept below one folder"
    if ".." in windows.parts or ".." in path.parts:
        return "its name leads out of its folder (..)"
    if "versions" in parts or parts[-1:] == ["metadata.json"]:
        return "its name is one that the file service keeps for itself"
    if "\0" in text or not encodes(text):
        return "its name holds a character that no file's name holds"
    if any(len(part.encode()) > LONGEST_PART for part in path.parts):
        return f"its name has a part of more than {LONGEST_PART} bytes"
    return ""
