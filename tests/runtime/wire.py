"""A control plane in memory that speaks the wire, and clocks that tests drive."""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from agent_runtime import PolicyClient
from agent_runtime.transport import Answer

LEASE_SECONDS = 900.0


class DrivenClock:
    """Both clocks of a process; they pass when a test says so."""

    def __init__(self) -> None:
        self.at = 1_000.0
        self.start = datetime(2026, 3, 2, 12, 0, tzinfo=UTC)

    def boottime(self) -> float:
        return self.at

    def now(self) -> datetime:
        return self.start + timedelta(seconds=self.at - 1_000.0)

    def advance(self, seconds: float) -> None:
        self.at += seconds


def entry(tenant: str = "acme", **changes: Any) -> dict[str, Any]:
    """One entry as the wire has it."""
    return {
        "tenant": tenant,
        "agent": "support",
        "app_name": f"support.{tenant}",
        "tier": "pooled",
        "placement_version": "e1.10",
        "accepts": "all",
        "moved_to": None,
        "store": {"key": "pg-eu", "kind": "adk-sql"},
        "runner_generation": 1,
        "scope": {
            "version": 1,
            "max_concurrent_runs": None,
            "runs_per_second": None,
            "daily_token_budget": None,
            "max_model_calls_per_run": None,
            "allowed_tools": None,
            "weight": 1.0,
        },
    } | changes


def limits(**limits: Any) -> dict[str, Any]:
    """A scope as the wire has it, with these limits and no others."""
    return entry()["scope"] | limits


def share(
    runs_per_second: float | None = None,
    max_concurrent_runs: int | None = None,
    tokens_per_minute: float | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """A share as the wire has it; half of it is safe."""

    def half(value: float | None) -> float | None:
        return None if value is None else value / 2

    return {
        "runs_per_second": runs_per_second,
        "max_concurrent_runs": max_concurrent_runs,
        "tokens_per_minute": tokens_per_minute,
        "safe_runs_per_second": half(runs_per_second),
        "safe_max_concurrent_runs": None
        if max_concurrent_runs is None
        else max_concurrent_runs // 2,
        "safe_tokens_per_minute": half(tokens_per_minute),
        "tokens_left": None,
    } | changes


@dataclass
class Instance:
    key: str
    request: dict[str, Any]
    seq: int = 0
    # How it ended: left, replaced, lapsed; empty while it is alive.
    gone: str = ""
    polled: bool = False
    reports: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Call:
    method: str
    path: str
    body: bytes | None
    headers: Mapping[str, str]

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(self.body or b"{}")

    @property
    def kind(self) -> str:
        """join, poll, report or leave."""
        if self.method == "DELETE":
            return "leave"
        if "/policy" in self.path:
            return "poll"
        return "report" if self.path.endswith("/reports") else "join"


class ControlPlane:
    """Enough of the server to tell whether a client keeps the contract."""

    def __init__(self) -> None:
        self.epoch = "e1"
        self.version = 1
        self.poll_after_ms = 5_000
        self.lease_seconds = LEASE_SECONDS
        # (version that stamped it, entry)
        self.entries: dict[str, tuple[int, dict[str, Any]]] = {}
        # The cell's part of the policy, and the version that stamped it.
        self.cell: tuple[int, dict[str, Any]] = (1, {})
        # Tenant -> share, of every instance; the number is of the last change.
        self.grants: tuple[int, dict[str, Any]] = (0, {})
        self.grant_seconds = 30.0
        self.instances: dict[str, Instance] = {}
        self.calls: list[Call] = []
        # The last report of each instance and number that was counted.
        self.usage: list[dict[str, Any]] = []
        # Called with each call before it is answered; may raise, or return an answer instead.
        self.before: Callable[[Call], Answer | None] = lambda call: None
        # Called with each call and its answer; may raise: the answer is lost on its way.
        self.after: Callable[[Call, Answer], None] = lambda call, answer: None
        self.publish(entry("acme"))

    def publish(self, *entries: dict[str, Any]) -> int:
        self.version += 1
        for one in entries:
            self.entries[one["tenant"]] = (self.version, one)
        return self.version

    def publish_cell(self, **part: Any) -> None:
        self.version += 1
        self.cell = (self.version, part)

    def grant(self, **tenants: dict[str, Any]) -> None:
        """Grant these shares, and no others, with the next answers to reports."""
        self.grants = (self.grants[0] + 1, tenants)

    def restored(self) -> None:
        """Another database from now on: another epoch, lower numbers."""
        self.epoch, self.version = "e2", 1
        self.entries = {
            name: (1, one | {"placement_version": "e2.1"})
            for name, (_, one) in self.entries.items()
        }

    def __call__(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> Answer:
        call = Call(method, path, body, headers)
        self.calls.append(call)
        answer = self.before(call) or getattr(self, "_" + call.kind)(call)
        self.after(call, answer)
        return answer

    def kinds(self) -> list[str]:
        return [call.kind for call in self.calls]

    @property
    def alive(self) -> list[Instance]:
        return [one for one in self.instances.values() if not one.gone]

    @property
    def reports(self) -> list[dict[str, Any]]:
        """Every report that was taken, in order."""
        return [r for one in self.instances.values() for r in one.reports]

    def _join(self, call: Call) -> Answer:
        key = f"i{len(self.instances) + 1}"
        self.instances[key] = Instance(key, call.data)
        if replaces := call.data["replaces"]:
            self.instances[replaces].gone = "replaced"
        return say(
            200,
            instance=key,
            lease_seconds=self.lease_seconds,
            poll_after_ms=self.poll_after_ms,
            epoch=self.epoch,
        )

    def _poll(self, call: Call) -> Answer:
        query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(call.path).query))
        instance = self.instances[query["instance"]]
        if instance.gone:
            return say(410, error="instance_gone")
        instance.polled = True
        epoch, _, number = query.get("since", "").rpartition(".")
        full = epoch != self.epoch
        since = 0 if full else int(number)
        if since >= self.version:
            return 304, {"poll-after-ms": str(self.poll_after_ms)}, b""
        return say(
            200,
            version=f"{self.epoch}.{self.version}",
            full=full,
            poll_after_ms=self.poll_after_ms,
            cell=self.cell[1] if full or self.cell[0] > since else None,
            tenants=[one for stamp, one in self.entries.values() if full or stamp > since],
        )

    def _report(self, call: Call) -> Answer:
        data = call.data
        instance = self.instances[data["instance"]]
        if data["seq"] > instance.seq + 1:
            return say(409, error="seq_gap", detail=f"expected {instance.seq + 1}")
        if data["seq"] == instance.seq + 1:
            instance.seq = data["seq"]
            instance.reports.append(data)
            self.usage += data["usage"]
        if instance.gone:
            return say(410, error="instance_gone")
        return say(
            200,
            lease_seconds=self.lease_seconds,
            poll_after_ms=self.poll_after_ms,
            grants=self._grants(data["grants_number"]),
            grant_seconds=self.grant_seconds,
            version=f"{self.epoch}.{self.version}",
        )

    def _grants(self, heard: int) -> dict[str, Any] | None:
        number, tenants = self.grants
        return None if heard == number else {"number": number, "tenants": tenants}

    def _leave(self, call: Call) -> Answer:
        instance = self.instances[call.path.rpartition("/")[2]]
        instance.gone = instance.gone or "left"
        return 204, {}, b""

    def total(self, what: str) -> int:
        """What was counted in all reports, of turns, model_calls or tokens."""
        return sum(line[what] for line in self.usage)


def say(status: int, **data: Any) -> Answer:
    return status, {"content-type": "application/json"}, json.dumps(data).encode()


def make_client(plane: ControlPlane, clock: DrivenClock, **changes: Any) -> PolicyClient:
    """A client of the in-memory control plane that has not joined."""
    options: dict[str, Any] = {
        "cell": "one",
        "name": "agent-1",
        "build": "b1",
        "stores": ["pg-eu"],
        "longest_turn_seconds": 60.0,
        "longest_tool_seconds": 30.0,
        "transport": plane,
        "clock": clock,
        "dice": lambda: 0.5,
    }
    return PolicyClient("http://plane.invalid", "secret-token", **options | changes)
