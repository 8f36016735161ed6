"""The library inside each process that runs agents. Needs the standard library and mmh3.

    client = PolicyClient("https://switchyard.example", token, cell="eu-1", name="agent-7", ...)
    client.start()                                  # joins, polls, reports, from a thread
    host = Host(client, stores={"pg-eu": ...}, runners=build_runner)
    async for event in host.run("acme", "user-1", "session-1", message):
        ...

`PolicyClient` keeps the process joined to its cell, its `Fence` lets turns in and counts them, its
`Admission` holds tenants to their limits by the `Shares` of them that this process was granted.
`Host` runs a turn inside both over a google-adk Runner of its `RunnerCache`; `TierPools` are Hosts
in threads, one for the tenants that share and one for each that doesn't. With a `DiskCopy` a
process that is started again while the control plane is away goes on. In front of the cells
`Placements` keeps where tenants live and `Gateway` finds the cell that serves a turn. For tools
there are `ResultCache`, which gives no tenant another's answer, and `idempotency_key`.
`agent_runtime.adk` makes session services, and holds each run to its tenant's limits; it alone
imports google-adk.
Everything raised on purpose is of this tree:

    AgentRuntimeError
    ├── RetryLater            may be sent again, after `retry_after_seconds`
    │   ├── Draining          the tenant is moving: 30 s
    │   ├── NotHere           it is split, and the other side may know the session: ask there
    │   ├── Moved             it lives in another `cell`, or the caller's placement is old
    │   ├── Behind            the caller's placement is newer than ours: 1 s
    │   ├── TenantThrottled   a limit of the tenant's, its `reason`: rate, concurrency, ...
    │   ├── BreakerOpen       a model endpoint struggles and is left alone
    │   ├── NoPool            the tenant needs a thread of its own, and all are taken
    │   └── NotReady          no policy, no lease, or leaving
    │       └── ForkedChild   a forked process has to join by itself
    ├── TurnTooLong           cut at the longest turn that this process had stated
    ├── UnknownStore          no session service was given for the tenant's store
    ├── WrongRunner           the factory built a Runner of another app or another store
    └── ControlPlaneError     a call failed; the client backs off and goes on
        ├── Unreachable       no answer, or one that says "later"
        ├── BadAnswer         an answer that breaks the contract; nothing was applied
        └── DiskStuck         the disk copy can't be kept, so nothing was applied
"""

from agent_runtime.admission import Admission, Share, Shares, TokenBucket
from agent_runtime.breaker import BreakerOpen, Breakers
from agent_runtime.buckets import bucket
from agent_runtime.client import PolicyClient
from agent_runtime.clock import Clock, SystemClock
from agent_runtime.disk import DiskCopy, DiskStuck
from agent_runtime.errors import (
    AgentRuntimeError,
    BadAnswer,
    Behind,
    ControlPlaneError,
    Draining,
    ForkedChild,
    Moved,
    NoPool,
    NotHere,
    NotReady,
    RetryLater,
    TenantThrottled,
    TurnTooLong,
    UnknownStore,
    Unreachable,
    WrongRunner,
)
from agent_runtime.fence import Fence, Turn, Word
from agent_runtime.gateway import Gateway, Offer, Placement, Placements, Side
from agent_runtime.host import Host
from agent_runtime.keys import idempotency_key
from agent_runtime.policy import Entry, Policy, Scope, Version
from agent_runtime.pools import TierPools
from agent_runtime.results import ResultCache
from agent_runtime.runners import RunnerCache
from agent_runtime.transport import HttpTransport, Transport
from agent_runtime.usage import Usage

__all__ = [
    "Admission",
    "AgentRuntimeError",
    "BadAnswer",
    "Behind",
    "BreakerOpen",
    "Breakers",
    "Clock",
    "ControlPlaneError",
    "DiskCopy",
    "DiskStuck",
    "Draining",
    "Entry",
    "Fence",
    "ForkedChild",
    "Gateway",
    "Host",
    "HttpTransport",
    "Moved",
    "NoPool",
    "NotHere",
    "NotReady",
    "Offer",
    "Placement",
    "Placements",
    "Policy",
    "PolicyClient",
    "ResultCache",
    "RetryLater",
    "RunnerCache",
    "Scope",
    "Share",
    "Shares",
    "Side",
    "SystemClock",
    "TenantThrottled",
    "TierPools",
    "TokenBucket",
    "Transport",
    "Turn",
    "TurnTooLong",
    "UnknownStore",
    "Unreachable",
    "Usage",
    "Version",
    "Word",
    "WrongRunner",
    "bucket",
    "idempotency_key",
]
