"""The real transport against a real socket."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from agent_runtime import HttpTransport, PolicyClient


class Handler(BaseHTTPRequestHandler):
    """Says what it was asked; `/close` hangs up afterwards, `/hang-up` instead of an answer."""

    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.seen.append((self.command, self.path, self.client_address[1]))  # type: ignore[attr-defined]
        if self.path.endswith("/hang-up"):
            self.close_connection = True
            return
        content = f"{self.command} {self.path} {body.decode()}".encode()
        self.send_response(302 if self.path.endswith("/redirect") else 200)
        self.send_header("Location", "http://elsewhere.invalid/")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
        # Without saying so, as a server does with a connection that was idle for too long.
        self.close_connection = self.path.endswith("/close")

    do_GET = do_POST = do_DELETE = answer  # noqa: N815

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.seen = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def transport(server: ThreadingHTTPServer) -> Iterator[HttpTransport]:
    transport = HttpTransport(f"http://127.0.0.1:{server.server_port}/base/", timeout_seconds=5)
    yield transport
    transport.close()


def test_requests_go_below_the_base_address_over_one_connection(
    server: Any, transport: HttpTransport
) -> None:
    assert transport("POST", "/a", b"one", {})[::2] == (200, b"POST /base/a one")
    assert transport("GET", "/b", None, {})[::2] == (200, b"GET /base/b ")
    assert len({port for _, _, port in server.seen}) == 1


def test_a_kept_connection_that_was_closed_is_opened_anew(
    server: Any, transport: HttpTransport
) -> None:
    transport("GET", "/close", None, {})
    assert transport("GET", "/b", None, {})[0] == 200
    assert len({port for _, _, port in server.seen}) == 2


def test_a_server_that_hangs_up_is_asked_twice_at_most(
    server: Any, transport: HttpTransport
) -> None:
    transport("GET", "/a", None, {})
    with pytest.raises(ConnectionError):
        transport("GET", "/hang-up", None, {})
    assert len(server.seen) == 3
    with pytest.raises(ConnectionError):
        transport("GET", "/hang-up", None, {})
    assert len(server.seen) == 4


def test_a_redirect_is_not_followed(transport: HttpTransport) -> None:
    assert transport("GET", "/redirect", None, {})[0] == 302


def test_a_forked_child_opens_a_connection_of_its_own(
    server: Any, transport: HttpTransport
) -> None:
    transport("GET", "/parent", None, {})
    pid = os.fork()
    if not pid:
        transport("GET", "/child", None, {})
        os._exit(0)
    os.waitpid(pid, 0)
    transport("GET", "/parent", None, {})
    first, child, again = (port for _, _, port in server.seen)
    assert first == again != child


def test_an_address_that_is_none_is_refused() -> None:
    for address in ("cp.example", "ftp://cp.example", "http://"):
        with pytest.raises(ValueError, match="is no http or https address"):
            HttpTransport(address)


def test_nobody_there_is_an_os_error() -> None:
    with pytest.raises(OSError, match="refused"):
        HttpTransport("http://127.0.0.1:1", timeout_seconds=5)("GET", "/", None, {})


def test_a_client_that_leaves_closes_its_own_connection(server: Any) -> None:
    client = PolicyClient(
        f"http://127.0.0.1:{server.server_port}",
        "token",
        cell="one",
        name="a",
        build="b",
        stores=[],
        longest_turn_seconds=1,
        longest_tool_seconds=1,
    )
    client.tick()  # The handler speaks no JSON: an answer that breaks the contract.
    assert "breaks the contract" in client.trouble
    transport = client._plane._transport
    assert isinstance(transport, HttpTransport)
    assert transport._connection is not None
    client.leave()
    assert transport._connection is None
