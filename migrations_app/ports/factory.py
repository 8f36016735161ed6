"""Services of google-adk: by a URI of its registry, or by `python:package.module:factory`.

google-adk is imported when a service is opened, not before: it takes a second and is an extra.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from migrations_app.ports.base import StoreRefused


@dataclass(frozen=True)
class Kind:
    """A kind of service, and how one that can't be opened is refused."""

    # Such as "memory service".
    name: str
    # What an address may be, as a sentence.
    takes: str
    # Nothing opens one at an address; what is there is another thing; google-adk is not here.
    unknown: type[StoreRefused]
    other: type[StoreRefused]
    missing: type[StoreRefused]

    def registry(self) -> Any:
        """Return google-adk's own registry of URIs. Raises `missing`."""
        try:
            from google.adk.cli.service_registry import get_service_registry
        except ImportError:
            raise self.missing(
                f"The {self.name} is opened by google-adk, which is not installed here. Install the"
                " extra: pip install switchyard[adk]."
            ) from None
        return get_service_registry()

    @contextmanager
    def opening(self, reference: str) -> Iterator[None]:
        """Refuse whatever fails in the body, without what it says: that may quote the address."""
        try:
            yield
        except StoreRefused:
            raise
        except Exception as error:
            raise self.unknown(
                f"What {reference} leads to could not be opened as {self._a}"
                f" ({type(error).__name__}). {self.takes}"
            ) from None

    def checked(self, service: Any, base: type, reference: str) -> Any:
        """Return a service that is one of google-adk's `base`. Raises `other`."""
        if not isinstance(service, base):
            raise self.other(
                f"What {reference} leads to is no {self.name} of google-adk ({base.__name__})."
                f" {self.takes}"
            )
        return service

    @property
    def _a(self) -> str:
        return f"{'an' if self.name[0] in 'aeiou' else 'a'} {self.name}"


def made(address: str) -> Any:
    """Call the factory that `python:package.module:factory` names, without arguments."""
    module, _, name = address.removeprefix("python:").partition(":")
    try:
        return getattr(importlib.import_module(module), name)()
    except SystemExit:
        # A script that was named by mistake: this process goes on.
        raise RuntimeError("it ends the process") from None
