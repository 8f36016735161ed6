"""Which HTTP request is being answered, for the audit. Set by platform_admin's middleware."""

from __future__ import annotations

from contextvars import ContextVar

# Empty outside a request: a command, a worker.
request_id: ContextVar[str] = ContextVar("request_id", default="")
