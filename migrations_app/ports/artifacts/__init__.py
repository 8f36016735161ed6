"""Artifact services: what a move needs of them (`base`), and google-adk's behind each address.

Read natively where that tells more than the interface (`native`), else through it
(`service`). google-adk is imported when a service is opened, not before: it takes a
second and is an extra.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from migrations_app.ports.address import read
from migrations_app.ports.artifacts.base import (
    ArtifactsFailed,
    ArtifactsRefused,
    ArtifactStore,
    ArtifactUnreadable,
    Known,
    Listing,
    Versions,
)
from migrations_app.ports.artifacts.content import (
    LINK,
    USER,
    Content,
    Facts,
    Name,
    content,
    difference,
    spell,
)
from migrations_app.ports.artifacts.known import Sessions
from migrations_app.ports.artifacts.native import FileStore, MemoryStore
from migrations_app.ports.artifacts.service import GcsStore, ServiceStore
from migrations_app.ports.base import NOBODY, StoreRefused, Unreachable
from migrations_app.ports.factory import Kind, made
from migrations_app.ports.runner import runner

__all__ = [
    "LINK",
    "USER",
    "ArtifactStore",
    "ArtifactUnreadable",
    "ArtifactsFailed",
    "ArtifactsRefused",
    "Content",
    "Facts",
    "Known",
    "Listing",
    "Name",
    "Sessions",
    "Versions",
    "content",
    "difference",
    "open_artifacts",
    "same_address",
    "same_place",
    "spell",
]

# The services of memory://name: each is one for the whole process, or it would be empty each time.
_in_memory: dict[str, Any] = {}


class ArtifactsUnknown(StoreRefused):
    """Nothing opens an artifact service at this address."""


def same_address(one: str, other: str) -> bool:
    """Whether two references lead to one address. Raises AddressMissing."""
    return one == other or read(one) == read(other)


@contextmanager
def open_artifacts(reference: str, *, app_name: str, known: Known) -> Iterator[ArtifactStore]:
    """Open the artifact service that a store's `artifacts_from` leads to, for one tenant.

    Behind the reference is a URI that google-adk's own registry knows (`file:///folder`,
    `gs://bucket`), `memory://name` for one of this process's own, or
    `python:package.module:factory`, a callable without arguments that returns a
    BaseArtifactService. Raises AddressMissing, ArtifactsUnknown, Unreachable.
    """
    with runner() as loop:
        service = _service(read(reference), reference)
        opens = _port(service)
        yield opens(service, loop, reference=reference, app_name=app_name, known=known)


def same_place(one: ArtifactStore, other: ArtifactStore) -> bool:
    """Save a random name at one side and look for it through the other; then remove it."""
    user, name = f"{NOBODY}{secrets.token_hex(16)}", Name("", "user:switchyard")
    part = _text("written to tell two places from one; it may be deleted")
    try:
        one.save(user, name, content(part, {}, spelled=name.name))
        return bool(other.listing(user).get(name))
    finally:
        # A word that stays is nobody's and does no harm; a service that fails says so elsewhere.
        with suppress(ArtifactsFailed, ArtifactsRefused):
            one.delete(user, name)
            one.forget_user(user)


def _text(text: str) -> Any:
    from google.genai import types

    return types.Part(text=text)


def _port(service: Any) -> type[ServiceStore]:
    from google.adk.artifacts.file_artifact_service import FileArtifactService
    from google.adk.artifacts.gcs_artifact_service import GcsArtifactService
    from google.adk.artifacts.in_memory_artifact_service import InMemoryArtifactService

    # Exactly these: a subclass may keep things elsewhere, and has the interface.
    natively: dict[type, type[ServiceStore]] = {
        FileArtifactService: FileStore,
        InMemoryArtifactService: MemoryStore,
        GcsArtifactService: GcsStore,
    }
    return natively.get(type(service), ServiceStore)


def _service(address: str, reference: str) -> Any:
    registry = _KIND.registry()
    from google.adk.artifacts import BaseArtifactService

    if address.startswith("file:"):
        _look_at_folder(address, reference)
    with _KIND.opening(reference):
        if address.startswith("python:"):
            service = made(address)
        elif address.startswith("memory:"):
            if address not in _in_memory:
                _in_memory[address] = registry.create_artifact_service(address)
            service = _in_memory[address]
        else:
            service = registry.create_artifact_service(address)
    return _KIND.checked(service, BaseArtifactService, reference)


_KIND = Kind(
    "artifact service",
    "It is a URI that google-adk knows (file:///folder, gs://bucket), or"
    " python:package.module:factory.",
    unknown=ArtifactsUnknown,
    other=ArtifactsUnknown,
    missing=ArtifactsUnknown,
)


def _look_at_folder(address: str, reference: str) -> None:
    """Raise Unreachable unless the folder is there: google-adk would make it, empty."""
    path = unquote(urlsplit(address).path)
    if not path.startswith("/") or not Path(path).is_dir():
        raise Unreachable(
            f"The folder of artifacts that {reference} names is not there. Mount it where web and"
            " workers run, or make it: file:///var/lib/artifacts."
        )
