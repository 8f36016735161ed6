"""What a move needs of an artifact service, and the refusals of those that can't give it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from migrations_app.ports.artifacts.content import Content, Name
from migrations_app.ports.base import StoreRefused

# Version -> stamp, ascending. Another stamp means that it may be another version. Equal ones mean
# the same only where `ArtifactStore.stamps` says so; "" says nothing.
Versions = dict[int, str]
Listing = dict[Name, Versions]


class ArtifactsRefused(StoreRefused):
    """The service can't hold this version, or this name. Its message is for the mismatch table."""


class ArtifactUnreadable(StoreRefused):
    """A version is listed, and what it was can't be read."""


class ArtifactsFailed(StoreRefused):
    """The service reported an error that nothing else explains; named by its class."""


class Known(Protocol):
    """Who there may be, for services that can't list users or sessions themselves."""

    def users(self) -> Iterator[str]:
        """Every user that the session store, or the move, knows."""

    def sessions(self, user_id: str) -> Iterator[str]:
        """The user's sessions, that are or have been."""


class ArtifactStore(Protocol):
    """One tenant's side of an artifact service. Only one thread uses a handle at a time.

    Memory does not grow with the tenant: a page of users, a listing of one of them, one version.
    """

    # "" where anybody can look; else what a person should know, such as that it is in memory.
    caveat: str
    # Whether equal stamps prove a version unchanged. Where not, an edit in place keeps its stamp,
    # and a comparison looks at the bytes each time.
    stamps: bool

    @property
    def has_place(self) -> bool:
        """Whether the place of the tenant's artifacts is there, be it empty.

        A volume that is not mounted reads as a tenant without artifacts.
        """

    def users(self, after: str, limit: int) -> list[str]:
        """Up to `limit` users behind `after` in the order of Python's text; "" begins."""

    def listing(self, user_id: str) -> Listing:
        """All of the user's names and versions, also those of sessions that are gone."""

    def placed(self, name: Name) -> Name:
        """The name under which the service really keeps it: two that give one are one."""

    def load(self, user_id: str, name: Name, version: int) -> Content:
        """One version. Raises ArtifactUnreadable."""

    def stamp(self, user_id: str, name: Name, version: int) -> str: ...
    def refusal(self, user_id: str, name: Name, kept: Content | None) -> str:
        """Why the service could not hold this name, or this version of it; "" if it could."""

    def save(self, user_id: str, name: Name, kept: Content) -> int:
        """Add a version, return its number. Raises ArtifactsRefused, and leaves nothing then."""

    def delete(self, user_id: str, name: Name) -> None:
        """Remove a name with all its versions, if it is there."""

    def forget_user(self, user_id: str) -> None:
        """Remove what is left of a user without artifacts, such as empty folders."""
