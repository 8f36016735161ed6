"""Services that somebody else makes: `python:package.module:factory`."""

from __future__ import annotations

import importlib
from typing import Any


def made(address: str) -> Any:
    """Call the factory that `python:package.module:factory` names, without arguments."""
    module, _, name = address.removeprefix("python:").partition(":")
    try:
        return getattr(importlib.import_module(module), name)()
    except SystemExit:
        # A script that was named by mistake: this process goes on.
        raise RuntimeError("it ends the process") from None
