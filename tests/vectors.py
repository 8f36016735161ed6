"""Callables of side channels, as an agent's team would write them: docs/side-channels.md."""

from __future__ import annotations

import os
import time
from os import system  # noqa: F401  # what a module has imported is not for a page to call
from pathlib import Path
from typing import Any

# Where a test's index lies: one folder a store, one file a vector.
ROOT = "VECTORS_ROOT"
# What `environment` looks for.
NAMES = ("SECRET_KEY", "DATABASE_URL", "REDIS_URL", "STORE_EU1_A", "PATH", "LC_ALL", ROOT)


def _folder(store: str) -> Path:
    folder = Path(os.environ[ROOT]) / store
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def copy(context: dict[str, Any]) -> dict[str, Any]:
    """Copy two vectors a call, in the order of their names; the cursor is the last name."""
    print("what a callable prints is no answer")
    here, there = _folder(context["from_store"]), _folder(context["to_store"])
    behind = sorted(p for p in here.iterdir() if p.name > context["cursor"])
    for path in behind[:2]:
        (there / path.name).write_bytes(path.read_bytes())
    cursor = behind[:2][-1].name if behind else context["cursor"]
    state = "again" if len(behind) > 2 else "done"
    return {"state": state, "cursor": cursor, "count": len(behind[:2]), "words": "vectors"}


def copy_once(context: dict[str, Any]) -> dict[str, Any]:
    """Copy without a wish to be called again inside the fence."""
    return {**copy({**context, "cursor": ""}), "state": "done", "cursor": ""}


def verify(context: dict[str, Any]) -> dict[str, Any]:
    here, there = _folder(context["from_store"]), _folder(context["to_store"])
    missing = {p.name for p in here.iterdir()} - {p.name for p in there.iterdir()}
    if missing:
        return {"state": "differs", "count": len(missing), "words": "vectors are missing"}
    return {"state": "done", "count": len(list(there.iterdir())), "words": "vectors"}


def hang(context: dict[str, Any]) -> None:
    Path(os.environ[ROOT], "pid").write_text(str(os.getpid()))
    time.sleep(60)


def fail(context: dict[str, Any]) -> None:
    raise ValueError("secret words")


def silent(context: dict[str, Any]) -> None:
    return None


def environment(context: dict[str, Any]) -> dict[str, Any]:
    """Tell which of these names its environment has."""
    held = [name for name in NAMES if name in os.environ]
    return {"state": "done", "words": f"holds {', '.join(held) or 'nothing'}"}


def since(context: dict[str, Any]) -> dict[str, Any]:
    """Bring back what is as young as it was told to."""
    return {"state": "done", "words": f"since {context['since'] or 'ever'}"}
