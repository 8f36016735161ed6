"""Artifact services of every kind, as agents use them: saved, listed, loaded and deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from google.adk.artifacts import (
    BaseArtifactService,
    FileArtifactService,
    InMemoryArtifactService,
)
from google.genai import types

APP = "support.acme"
# What `python:tests.shelves:source` and `:target` give out: one service each, as servers would be.
SERVICES: dict[str, BaseArtifactService] = {}


def source() -> BaseArtifactService:
    return SERVICES["source"]


def target() -> BaseArtifactService:
    return SERVICES["target"]


def nothing() -> None:
    return None


class Plain(BaseArtifactService):
    """Somebody's own service: google-adk's interface and nothing else to look at."""

    def __init__(self) -> None:
        self.inner = InMemoryArtifactService()

    async def save_artifact(self, **named: Any) -> int:
        return await self.inner.save_artifact(**named)

    async def load_artifact(self, **named: Any) -> Any:
        return await self.inner.load_artifact(**named)

    async def list_artifact_keys(self, **named: Any) -> list[str]:
        return await self.inner.list_artifact_keys(**named)

    async def delete_artifact(self, **named: Any) -> None:
        await self.inner.delete_artifact(**named)

    async def list_versions(self, **named: Any) -> list[int]:
        return await self.inner.list_versions(**named)

    async def list_artifact_versions(self, **named: Any) -> Any:
        return await self.inner.list_artifact_versions(**named)

    async def get_artifact_version(self, **named: Any) -> Any:
        return await self.inner.get_artifact_version(**named)


KINDS = ("file", "memory", "plain")


class Shelf:
    """One service, in an agent's hands."""

    def __init__(self, kind: str, side: str, folder: Path) -> None:
        self.kind = kind
        self.root = folder / side
        self.root.mkdir(exist_ok=True)
        if kind == "file":
            self.address = f"file://{self.root}"
            self.service: BaseArtifactService = FileArtifactService(self.root)
        else:
            self.address = f"python:tests.shelves:{side}"
            self.service = InMemoryArtifactService() if kind == "memory" else Plain()
            SERVICES[side] = self.service

    def save(self, user: str, session: str, name: str, what: Any = "text", **metadata: Any) -> int:
        """Save a text, bytes or a part; with `session` "" it is the user's own."""
        part = what
        if isinstance(what, str):
            part = types.Part(text=what)
        elif isinstance(what, bytes):
            part = types.Part(inline_data=types.Blob(data=what, mime_type="image/png"))
        saved: int = _run(
            self.service.save_artifact(
                **self._at(user, session, name), artifact=part, custom_metadata=metadata or None
            )
        )
        return saved

    def load(self, user: str, session: str, name: str, version: int | None = None) -> Any:
        return _run(self.service.load_artifact(**self._at(user, session, name), version=version))

    def text(self, user: str, session: str, name: str, version: int | None = None) -> str | None:
        part = self.load(user, session, name, version)
        return None if part is None else part.text

    def body(self, user: str, session: str, name: str) -> bytes:
        """Return the last version's bytes, whatever it is."""
        part = self.load(user, session, name)
        return part.text.encode() if part.text is not None else part.inline_data.data

    def versions(self, user: str, session: str, name: str) -> list[int]:
        found: list[int] = _run(self.service.list_versions(**self._at(user, session, name)))
        return found

    def names(self, user: str, session: str = "") -> list[str]:
        found: list[str] = _run(
            self.service.list_artifact_keys(app_name=APP, user_id=user, session_id=session or None)
        )
        return found

    def metadata(self, user: str, session: str, name: str, version: int) -> Any:
        about = _run(
            self.service.get_artifact_version(**self._at(user, session, name), version=version)
        )
        return about.custom_metadata

    def delete(self, user: str, session: str, name: str) -> None:
        _run(self.service.delete_artifact(**self._at(user, session, name)))

    def edit(self, user: str, session: str, name: str, version: int, text: str) -> None:
        """Write over a version where it is kept."""
        if self.kind == "file":
            self.file(user, session, name, version).write_text(text)
            return
        inner: Any = getattr(self.service, "inner", self.service)
        path = f"{APP}/{user}/{session or 'user'}/{name}"
        inner.artifacts[path][version].data = types.Part(text=text)

    def file(self, user: str, session: str, name: str, version: int) -> Path:
        """Where a version's bytes lie."""
        home = self.root / "apps" / APP / "users" / user
        home = home / "sessions" / session if session else home
        folder = home / "artifacts" / name.removeprefix("user:")
        return folder / "versions" / str(version) / folder.name

    def _at(self, user: str, session: str, name: str) -> dict[str, Any]:
        return {
            "app_name": APP,
            "user_id": user,
            "session_id": session or None,
            "filename": name,
        }


def _run(call: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(call)
