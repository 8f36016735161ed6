"""One call to the control plane: a request, a JSON answer, or a ControlPlaneError; and back-off."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from agent_runtime.errors import BadAnswer, ControlPlaneError, Unreachable
from agent_runtime.transport import HttpTransport, Transport

# Of each wait, either way: a fleet that was started together doesn't ask together.
JITTER = 0.1
BACK_OFF_FIRST_SECONDS = 0.5
BACK_OFF_MAX_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What the control plane said."""

    status: int
    # Names in lower case.
    headers: Mapping[str, str]
    # The JSON object; empty where there is none.
    data: Mapping[str, Any]

    @classmethod
    def read(cls, status: int, headers: Mapping[str, str], content: bytes) -> Answer:
        """Return the answer that was sent; a body that is no JSON object counts as empty."""
        try:
            data = json.loads(content or b"{}")
        except ValueError:
            data = {}  # A proxy's page; what needs a field will miss it.
        return cls(
            status=status,
            headers={name.lower(): value for name, value in headers.items()},
            data=data if isinstance(data, dict) else {},
        )

    @property
    def detail(self) -> str:
        return str(self.data.get("detail") or self.data.get("error") or "no reason given")

    @property
    def retry_after_seconds(self) -> float:
        try:
            return max(0.0, float(self.data.get("retry_after_seconds") or 0))
        except (TypeError, ValueError):
            return 0.0


class Caller:
    """Calls the control plane with one token. Called by one thread at a time."""

    def __init__(self, base_url: str, token: str, transport: Transport | None = None) -> None:
        """Make a caller; nothing is sent. A transport that is given is its giver's to close."""
        self._token = token.strip()  # Of a secret's file; its last line has an end.
        if not self._token.isascii() or not self._token.isprintable():
            raise ValueError("the token holds characters that no HTTP header can carry")
        self._transport: Transport
        if transport is None:
            self._transport = http_transport = HttpTransport(base_url)
            self.close: Callable[[], None] = http_transport.close
        else:
            self._transport = transport
            self.close = lambda: None

    def call(
        self, method: str, path: str, body: bytes | None = None, *, expect: Collection[int] = ()
    ) -> Answer:
        """Make one call. Return 2xx, 304 and what is expected; raise a ControlPlaneError else."""
        headers = {"Authorization": f"Bearer {self._token}", "Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        what = f"{method} {path.partition('?')[0]}"
        try:
            status, answered, content = self._transport(method, path, body, headers)
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"{what}: {type(error).__name__}: {error}") from error
        answer = Answer.read(status, answered, content)
        if 200 <= status < 300 or status == HTTPStatus.NOT_MODIFIED or status in expect:
            return answer
        said = f"{what} was answered {status}: {answer.detail}"
        if status >= 500 or status in (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS):
            raise Unreachable(said, retry_after_seconds=answer.retry_after_seconds)
        # 401 and 403 are here too: a token that was revoked stops moves, not serving. And 404:
        # a proxy that has lost its way says that; an instance that has ended is answered 410.
        raise BadAnswer(said)


class BackOff:
    """How long to wait after a call, for as long as calls fail. `dice` gives 0 to 1."""

    def __init__(self, dice: Callable[[], float]) -> None:
        self.failures = 0
        self._dice = dice

    def failed(self, error: ControlPlaneError) -> float:
        """Count a failure; return the seconds until the next try."""
        # Full jitter: after an outage a fleet comes back spread out, not in waves.
        # Ten doublings are past the bound; a year's would be past a float.
        bound = min(BACK_OFF_MAX_SECONDS, BACK_OFF_FIRST_SECONDS * 2.0 ** min(self.failures, 10))
        self.failures += 1
        asked = error.retry_after_seconds if isinstance(error, Unreachable) else 0.0
        return min(BACK_OFF_MAX_SECONDS, asked + bound * self._dice())

    def went_well(self, seconds: float) -> float:
        """Forget the failures; return `seconds`, somewhat more or less."""
        self.failures = 0
        return seconds * (1 + JITTER * (2 * self._dice() - 1))


@contextmanager
def contract(what: str) -> Iterator[None]:
    """Say BadAnswer where an answer lacks a field or holds a wrong one."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadAnswer(f"{what} breaks the contract: {error!r}") from error
