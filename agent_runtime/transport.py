"""How a request reaches the control plane. Anything that is called alike may stand in."""

from __future__ import annotations

import http.client
import os
import urllib.parse
from collections.abc import Mapping
from typing import Protocol

# (status, headers, body)
Answer = tuple[int, Mapping[str, str], bytes]

# Longer than any answer takes, shorter than a lease by far.
TIMEOUT_SECONDS = 10.0


class Transport(Protocol):
    """Sends one request and returns the answer, whatever its status.

    Raises OSError or http.client.HTTPException if there is none. Called by one thread at a time.
    """

    def __call__(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> Answer:
        """Send `body` to `path`, which begins with a slash."""


class HttpTransport:
    """HTTP over one kept connection. No redirects: a token goes to the named host or nowhere."""

    def __init__(self, base_url: str, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        url = urllib.parse.urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"{base_url!r} is no http or https address")
        self._https = url.scheme == "https"
        self._host = url.hostname
        self._port = url.port
        self._prefix = url.path.rstrip("/")
        self._timeout_seconds = timeout_seconds
        self._connection: http.client.HTTPConnection | None = None
        self._pid = os.getpid()

    def __call__(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> Answer:
        """Send one request."""
        if self._pid != os.getpid():
            # The parent writes to the same socket: two processes' requests would mix.
            self.close()
            self._pid = os.getpid()
        kept = self._connection is not None
        try:
            return self._send(method, path, body, headers)
        except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
            # A server closes a connection that was idle. Every call of this protocol may be
            # repeated: a report by its number, a join since an instance that never polls is void.
            if not kept:
                raise
            return self._send(method, path, body, headers)

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _send(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> Answer:
        if self._connection is None:
            kind = http.client.HTTPSConnection if self._https else http.client.HTTPConnection
            self._connection = kind(self._host, self._port, timeout=self._timeout_seconds)
        try:
            self._connection.request(method, self._prefix + path, body, dict(headers))
            response = self._connection.getresponse()
            answer = (response.status, dict(response.headers), response.read())
        except BaseException:
            # Half an answer may be left in it.
            self.close()
            raise
        if response.will_close:
            self.close()
        return answer
