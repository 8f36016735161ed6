"""Any google-adk artifact service, by its interface alone; and Google Cloud Storage.

The interface lists names of a user and of a session that the caller knows. So users and
sessions come from whoever knows them, and artifacts of a session that is in no store any more
stay unseen. Google Cloud Storage lists by prefix.
"""

from __future__ import annotations

import asyncio
import errno
import heapq
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from migrations_app.ports.artifacts.base import (
    ArtifactsFailed,
    ArtifactsRefused,
    ArtifactUnreadable,
    Known,
    Listing,
    Versions,
)
from migrations_app.ports.artifacts.content import USER, Content, Name, content
from migrations_app.ports.base import NOBODY

if TYPE_CHECKING:
    from google.adk.artifacts import BaseArtifactService

# The longest that one call of a service may take: below the worker's hard time limit (20 s), so
# that it is told what did not answer.
CALL_SECONDS = 15.0
# So long one user's names may be listed: a step that compares lists both sides twice. So many calls
# are made at once for it.
LISTING_SECONDS = 4.0
AT_ONCE = 16
T = TypeVar("T")
# What a file system answers about a name that it can't hold.
_NAMES = frozenset({errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ})


class ServiceStore:
    """An artifact service behind google-adk's interface."""

    caveat = ""
    stamps = False

    def __init__(
        self,
        service: BaseArtifactService,
        runner: asyncio.Runner,
        *,
        reference: str,
        app_name: str,
        known: Known,
    ) -> None:
        self.service: Any = service
        self.runner, self.known = runner, known
        self.reference, self.app_name = reference, app_name

    @property
    def has_place(self) -> bool:
        """Return that it is: a service that has lost its place says so by itself."""
        return True

    def users(self, after: str, limit: int) -> list[str]:
        """Return users as whoever knows them names them."""
        return page(self.known.users(), after, limit)

    def listing(self, user_id: str) -> Listing:
        """Return the user's own names, then those of each known session.

        A call for each session and for each name, a few at once; raises ArtifactsFailed where
        that takes longer than a step may.
        """
        until = time.monotonic() + LISTING_SECONDS
        own, sessions = self._keys(user_id, None), list(self.known.sessions(user_id))
        kept = self._each(
            [partial(self._of_session, user_id, session) for session in sessions], until
        )
        names = [Name("", one if one.startswith(USER) else f"{USER}{one}") for one in own]
        names += [
            Name(session, listed)
            for session, found in zip(sessions, kept, strict=True)
            for listed in found
            if not listed.startswith(USER)
        ]
        versions = self._each([partial(self._versions, user_id, name) for name in names], until)
        bare = set(own)
        # A bare name may be the user's own, which is listed in every session.
        return {
            name: found
            for name, found in zip(names, versions, strict=True)
            if found or not name.session_id or name.name not in bare
        }

    def placed(self, name: Name) -> Name:
        """Return the name itself: services keep names as they are, unless known otherwise."""
        return name

    def load(self, user_id: str, name: Name, version: int) -> Content:
        """Read one version. A link is not told from what it leads to here."""
        at = self._at(user_id, name)
        try:
            part = self.call(self.service.load_artifact(**at, version=version))
            about = self.call(self.service.get_artifact_version(**at, version=version))
        except ArtifactsRefused as refused:
            raise ArtifactUnreadable(f"version {version} can't be read: {refused}") from None
        custom = (about.custom_metadata if about is not None else None) or {}
        if part is None:
            # What a rewind saves in a version's place is read as none at all.
            if about is None or about.mime_type != "application/octet-stream":
                raise ArtifactUnreadable(f"version {version} is listed and can't be read")
            part = tombstone()
        return content(part, custom, spelled=name.name)

    def stamp(self, user_id: str, name: Name, version: int) -> str:
        """Return when the version was made: a name that was deleted and saved anew has others."""
        at = self._at(user_id, name)
        return _made(self.call(self.service.get_artifact_version(**at, version=version)))

    def refusal(self, user_id: str, name: Name, kept: Content | None) -> str:
        """Return "": what it refuses shows when it is saved."""
        return ""

    def save(self, user_id: str, name: Name, kept: Content) -> int:
        """Add a version under the artifact's name."""
        return self._save(self._at(user_id, name), kept)

    def delete(self, user_id: str, name: Name) -> None:
        """Remove a name with all its versions."""
        self.call(self.service.delete_artifact(**self._at(user_id, name)))

    def forget_user(self, user_id: str) -> None:
        """Do nothing: without artifacts nothing is left of a user."""

    def call(self, answer: Awaitable[T]) -> T:
        """Run one call of the service in this handle's own event loop."""
        return self.runner.run(self._bounded(answer))

    async def _bounded(self, answer: Awaitable[T]) -> T:
        try:
            return await asyncio.wait_for(answer, CALL_SECONDS)
        except Exception as error:
            if _refuses(error):
                raise ArtifactsRefused(f"the service refused it ({type(error).__name__})") from None
            raise self._failed(error) from None

    def _each(self, calls: Sequence[Callable[[], Coroutine[Any, Any, T]]], until: float) -> list[T]:
        """Make calls, a few at once, and return their answers; raises the first error."""
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(call: Callable[[], Coroutine[Any, Any, T]]) -> T:
            async with gate:
                return await call()

        async def each() -> list[T]:
            async with asyncio.timeout(until - time.monotonic()), asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(call)) for call in calls]
            return [task.result() for task in tasks]

        try:
            return self.runner.run(each())
        except TimeoutError:
            raise ArtifactsFailed(
                f"The artifact service of {self.reference} takes longer than {LISTING_SECONDS:g} s"
                f" to list one user's {len(calls):,} names or sessions. Let it answer faster, or"
                " have the user's artifacts thinned out."
            ) from None
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def _failed(self, error: Exception) -> ArtifactsFailed:
        # What it says may quote a name or an address.
        told = "no answer in time" if isinstance(error, TimeoutError) else type(error).__name__
        return ArtifactsFailed(
            f"The artifact service of {self.reference} failed ({told}). Look at it, and at what the"
            " workers may do there."
        )

    def _save(self, at: dict[str, Any], kept: Content) -> int:
        custom = dict(kept.custom_metadata) or None
        return int(
            self.call(self.service.save_artifact(**at, artifact=kept.part, custom_metadata=custom))
        )

    def _at(self, user_id: str, name: Name) -> dict[str, Any]:
        return {
            "app_name": self.app_name,
            "user_id": user_id,
            "session_id": name.session_id or None,
            "filename": name.name,
        }

    def _keys(self, user_id: str, session_id: str | None) -> list[str]:
        return self.call(
            self.service.list_artifact_keys(
                app_name=self.app_name, user_id=user_id, session_id=session_id
            )
        )

    async def _of_session(self, user_id: str, session_id: str) -> list[str]:
        try:
            return await self._bounded(
                self.service.list_artifact_keys(
                    app_name=self.app_name, user_id=user_id, session_id=session_id
                )
            )
        except ArtifactsRefused:
            # An id that it takes for a path out of its place: nothing was ever saved under it.
            return []

    async def _versions(self, user_id: str, name: Name) -> Versions:
        at = self._at(user_id, name)
        try:
            about = await self._bounded(self.service.list_artifact_versions(**at))
        except ArtifactsRefused:
            numbers = await self._bounded(self.service.list_versions(**at))
            return dict.fromkeys(sorted(numbers), "")
        return {one.version: _made(one) for one in sorted(about, key=lambda one: one.version)}


class GcsStore(ServiceStore):
    """GcsArtifactService: users, names and versions are read from its objects' names.

    An object's name is `app/user/session/file/version`, so no user's or session's id may hold a
    slash here. An object's generation changes with its bytes, and proves them.
    """

    stamps = True

    def users(self, after: str, limit: int) -> list[str]:
        """Return the users that have an object."""

        def found() -> Iterator[str]:
            prefix = f"{self.app_name}/"
            blobs = self.service.storage_client.list_blobs(
                self.service.bucket, prefix=prefix, delimiter="/"
            )
            for _ in blobs:  # a page has its prefixes once it was walked
                pass
            for each in blobs.prefixes:
                yield each[len(prefix) : -1]

        return page(self._asked(found), after, limit)

    def listing(self, user_id: str) -> Listing:
        """Return every object of the user."""
        if "/" in user_id:
            # Its objects are another user's by their names. What it has elsewhere is `refusal`'s.
            return {}

        def found() -> Iterator[tuple[Name, int, str]]:
            prefix = f"{self.app_name}/{user_id}/"
            for blob in self.service.storage_client.list_blobs(self.service.bucket, prefix=prefix):
                session, _, rest = blob.name[len(prefix) :].partition("/")
                name, _, number = rest.rpartition("/")
                if number.isascii() and number.isdigit():
                    at = Name("" if session == "user" else session, name)
                    yield at, int(number), _generation(blob)

        listing: Listing = {}
        for name, number, stamp in sorted(self._asked(found)):
            listing.setdefault(name, {})[number] = stamp
        return listing

    def refusal(self, user_id: str, name: Name, kept: Content | None) -> str:
        """Return why no object's name could be told from another user's or session's."""
        for what, value in (("user", user_id), ("session", name.session_id)):
            if "/" in value:
                return f"its {what}'s id holds a slash, which splits object names in two"
        return ""

    def stamp(self, user_id: str, name: Name, version: int) -> str:
        """Return the object's generation."""
        return _generation(self._blob(user_id, name, version))

    def load(self, user_id: str, name: Name, version: int) -> Content:
        """Read one version; a link as the link that it is."""
        blob = self._blob(user_id, name, version)
        metadata = (blob.metadata if blob is not None else None) or {}
        uri = metadata.get("adkFileUri") or metadata.get("file_uri")
        if not uri:
            return super().load(user_id, name, version)
        from google.genai import types

        about = self.call(
            self.service.get_artifact_version(**self._at(user_id, name), version=version)
        )
        mime = metadata.get("adkFileMimeType") or blob.content_type or None
        part = types.Part(file_data=types.FileData(file_uri=uri, mime_type=mime))
        return content(part, about.custom_metadata if about else {}, spelled=name.name)

    def _blob(self, user_id: str, name: Name, version: int) -> Any:
        session = "user" if name.name.startswith(USER) else name.session_id
        path = f"{self.app_name}/{user_id}/{session}/{name.name}/{version}"

        async def get() -> Any:
            return await asyncio.to_thread(self.service.bucket.get_blob, path)

        return self.call(get())

    def _asked(self, walk: Any) -> list[Any]:
        """Walk through pages of the service's answers, bounded as any call is."""

        async def walked() -> list[Any]:
            return await asyncio.to_thread(lambda: list(walk()))

        return self.call(walked())


def _made(about: Any) -> str:
    return repr(about.create_time) if about is not None else ""


def _generation(blob: Any) -> str:
    if blob is None:
        return ""
    return f"{blob.generation}.{blob.metageneration}"


def page(users: Iterable[str], after: str, limit: int) -> list[str]:
    """Return the first `limit` users behind `after`, in the order of Python's text.

    Nobody's: the user under whom a killed `same_place` left its word.
    """
    return heapq.nsmallest(limit, {u for u in users if u > after and not u.startswith(NOBODY)})


def tombstone() -> Any:
    """Return the part by which a rewind takes an artifact back: services read it as none."""
    from google.genai import types

    return types.Part(inline_data=types.Blob(data=b"", mime_type="application/octet-stream"))


def _refuses(error: Exception) -> bool:
    """Whether a service says that it can't hold something, rather than that it is broken."""
    if isinstance(error, OSError):
        return error.errno in _NAMES
    if isinstance(error, ValueError | TypeError | NotImplementedError):
        return True
    return type(error).__name__ == "InputValidationError"
