"""Our own library as a process that lets turns in over HTTP: what conformance.py is pointed at.

`--breaks NAME` makes it break one rule, so that a test sees the script notice.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from agent_runtime import DiskCopy, PolicyClient, RetryLater, Share, TenantThrottled
from agent_runtime.policy import Policy


class Handler(BaseHTTPRequestHandler):
    client: PolicyClient

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        client, tenant = self.client, asked["tenant"]
        try:
            with client.fence.enter(tenant) as turn, client.admission.admit(turn.entry):
                client.usage.turn(tenant)
                time.sleep(asked["seconds"])
        except RetryLater as refused:
            self.send_response(429 if isinstance(refused, TenantThrottled) else 503)
            self.send_header("Retry-After", f"{refused.retry_after_seconds:.3f}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64


def late_fence(client: PolicyClient) -> None:
    """Says that a version is applied, and applies it a second later."""
    fence = client.fence
    apply, word = fence.apply, fence.word
    said: list[Policy] = []

    def later(policy: Policy) -> None:
        if fence.policy is None:
            apply(policy)
        else:
            threading.Timer(1.0, apply, (policy,)).start()
        said.append(policy)

    def at_once() -> Any:
        return replace(word(), applied=said[-1].version if said else None)

    fence.apply, fence.word = later, at_once  # type: ignore[method-assign]


def new_bytes(client: PolicyClient) -> None:
    """Builds a report anew instead of sending the same bytes again."""
    call = client._plane.call

    def changed(method: str, path: str, body: bytes | None = None, **options: Any) -> Any:
        if path.endswith("/reports"):
            data = json.loads(body or b"")
            body = json.dumps(data | {"sent_at": time.time()}).encode()
        return call(method, path, body, **options)

    client._plane.call = changed  # type: ignore[method-assign]


def no_lease(client: PolicyClient) -> None:
    """Serves on when its lease is over."""
    fence = client.fence
    lease = fence.lease
    fence.lease = lambda until: lease(until + 3_600)  # type: ignore[method-assign]


def hammer(client: PolicyClient) -> None:
    """Asks again at once when a call fails."""
    client._back_off.failed = lambda error: 0.01  # type: ignore[method-assign]


def undivided(client: PolicyClient) -> None:
    """Holds a limit as a whole where its share says nothing of it."""
    apply = client.shares.apply

    def whole(number: int, tenants: Mapping[str, Share], **since: float) -> None:
        most = {"runs_per_second": 1e6, "safe_runs_per_second": 1e6}
        apply(number, {t: replace(share, **most) for t, share in tenants.items()}, **since)  # type: ignore[arg-type]

    client.shares.apply = whole  # type: ignore[method-assign]


BREAKS: Mapping[str, Callable[[PolicyClient], None]] = {
    "late_fence": late_fence,
    "new_bytes": new_bytes,
    "no_lease": no_lease,
    "hammer": hammer,
    "undivided": undivided,
}


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--port", type=int, required=True)
    options.add_argument("--breaks", choices=BREAKS)
    options.add_argument("--copy")
    chosen = options.parse_args()
    client = PolicyClient(
        os.environ["SWITCHYARD_URL"],
        os.environ["SWITCHYARD_TOKEN"],
        cell=os.environ["SWITCHYARD_CELL"],
        name="agent-1",
        build="b1",
        stores=["store-1"],
        longest_turn_seconds=60,
        longest_tool_seconds=30,
        copy=DiskCopy(chosen.copy) if chosen.copy else None,
    )
    if chosen.breaks:
        BREAKS[chosen.breaks](client)
    handler = type("Bound", (Handler,), {"client": client})
    server = Server(("127.0.0.1", chosen.port), handler)
    # After the port is there: a check asks at once when it has seen the join.
    client.start()
    print("serving", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
