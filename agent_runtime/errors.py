"""What can go wrong in a process that runs agents. The tree is drawn in the package's docstring."""

from __future__ import annotations

from agent_runtime.policy import Entry


class AgentRuntimeError(Exception):
    """Anything that this library raises on purpose."""


class RetryLater(AgentRuntimeError):
    """This process may not serve the request now; the same request may be sent again.

    `retry_after_seconds` is what an HTTP gateway answers as Retry-After.
    """

    def __init__(self, message: str, *, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class Draining(RetryLater):
    """The tenant is moving: its fence is closed, or its store already is.

    `source` is the entry of a split's source whose fence is closed: only its store can tell
    whether the session is its own, and a session that it does not know is served elsewhere.
    """

    def __init__(
        self, message: str, *, retry_after_seconds: float, source: Entry | None = None
    ) -> None:
        super().__init__(message, retry_after_seconds=retry_after_seconds)
        self.source = source


class NotHere(RetryLater):
    """The tenant is split and this side's store does not know the session: ask the other side.

    A gateway sends the same request there at once, marked `sent_on`.
    """


class Moved(RetryLater):
    """The tenant lives elsewhere, or the caller's word of where it lives is old.

    `cell` is where to ask next: read the placement feed again first.
    """

    def __init__(self, message: str, *, cell: str, retry_after_seconds: float) -> None:
        super().__init__(message, retry_after_seconds=retry_after_seconds)
        self.cell = cell


class Behind(RetryLater):
    """The caller knows a newer placement than this process: its next poll will tell it."""


class NotReady(RetryLater):
    """This process has no policy, no lease, or is leaving: it serves nobody."""


class ForkedChild(NotReady):
    """This process was forked from one that had joined; it has to join by itself first."""


class TenantThrottled(RetryLater):
    """A limit of the tenant's is reached. A gateway answers 429, with the hint as Retry-After.

    `reason` is rate, concurrency, quota or budget. The message says which limit, what it is, and
    how to get more; it may be shown to the tenant.
    """

    def __init__(
        self, message: str, *, tenant: str, reason: str, retry_after_seconds: float
    ) -> None:
        super().__init__(message, retry_after_seconds=retry_after_seconds)
        self.tenant = tenant
        self.reason = reason


class NoPool(RetryLater):
    """A tenant of the bridge or silo tier needs a thread of its own, and all are taken."""


class TurnTooLong(AgentRuntimeError):
    """The turn was cut at the longest turn that this process stated when it joined.

    What it had yielded is stored; the control plane counts on nothing being written later.
    """


class UnknownStore(AgentRuntimeError):
    """The tenant lives in a store that this process was given no session service for."""


class WrongRunner(AgentRuntimeError):
    """The factory built a Runner of another app or over another session service."""


class ControlPlaneError(AgentRuntimeError):
    """A call to the control plane failed; the client goes on with what it knows."""


class Unreachable(ControlPlaneError):
    """No answer, or one that says "later": the client backs off and asks again."""

    def __init__(self, message: str, *, retry_after_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class BadAnswer(ControlPlaneError):
    """An answer that breaks the contract; nothing of it was applied."""
