"""What this process served and refused, kept until the control plane has acknowledged it."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from agent_runtime.clock import Clock, SystemClock

log = logging.getLogger(__name__)

# A report stays well below the 2.5 MB that a Django server takes: what doesn't fit goes next.
MAX_LINES = 5_000
MAX_DIRTY_BYTES = 1_000_000
# Served sessions kept for reports. They only feed a move's forecast, so the oldest may be dropped.
MAX_DIRTY = 10_000

# google-adk's own column, and the control plane's.
MAX_ID = 128
_SURROGATE = re.compile("[\ud800-\udfff]")

# (tenant, user id, session id)
Served = tuple[str, str, str]


@dataclass(slots=True)
class _Line:
    turns: int = 0
    model_calls: int = 0
    tokens: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    def add(self, other: _Line) -> None:
        self.turns += other.turns
        self.model_calls += other.model_calls
        self.tokens += other.tokens
        self.refused.update(other.refused)


@dataclass(frozen=True, slots=True)
class Batch:
    """What one report carries. It is either acknowledged or given back, never both."""

    lines: dict[tuple[str, str], _Line]
    dirty: dict[Served, None]
    # Served sessions that were dropped unreported.
    dropped: int
    # There is more than fitted.
    more: bool

    def usage(self) -> list[dict[str, Any]]:
        """Return the usage lines as the wire has them."""
        return [
            {
                "tenant": tenant,
                "minute": minute,
                "turns": line.turns,
                "model_calls": line.model_calls,
                "tokens": line.tokens,
                "refused": dict(line.refused),
            }
            for (tenant, minute), line in self.lines.items()
        ]

    def served(self) -> list[dict[str, str]]:
        """Return the served sessions as the wire has them."""
        return [_wire(key) for key in self.dirty]


class Usage:
    """Counts per tenant and minute, and the sessions that were served. Safe for threads.

    It is memory only: what has not been reported dies with a killed process, one poll at most.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._lines: dict[tuple[str, str], _Line] = {}
        # In the order of their last turn; a dict for its order and its keys.
        self._dirty: dict[Served, None] = {}
        self._dropped = 0

    def turn(self, tenant: str) -> None:
        """Count a turn that was let in."""
        self._add(tenant, _Line(turns=1))

    def model_call(self, tenant: str, tokens: int) -> None:
        """Count a call that the model answered, and the tokens it says it used."""
        self._add(tenant, _Line(model_calls=1, tokens=tokens))

    def refused(self, tenant: str, reason: str) -> None:
        """Count a turn that was refused: refused demand is demand."""
        self._add(tenant, _Line(refused=Counter({reason: 1})))

    def served(self, tenant: str, user_id: str, session_id: str) -> None:
        """Note that a session may have been written. Call it before its turn leaves the fence."""
        key = (tenant, user_id, session_id)
        with self._lock:
            if not all(map(_can_be_sent, key)):
                self._dropped += 1
                return
            self._dirty.pop(key, None)
            self._dirty[key] = None
            self._trim()

    def take(self) -> Batch:
        """Hand out what a report can carry; it is the caller's until `give_back`.

        A report reads the fence first and calls this afterwards: what a turn noted before it
        left is then in the report that says it is gone.
        """
        with self._lock:
            lines = {key: self._lines.pop(key) for key in list(self._lines)[:MAX_LINES]}
            dirty: dict[Served, None] = {}
            size = 0
            for key in list(self._dirty):
                size += len(json.dumps(_wire(key)))
                if size > MAX_DIRTY_BYTES:
                    break
                dirty[key] = self._dirty.pop(key)
            dropped, self._dropped = self._dropped, 0
            more = bool(self._lines or self._dirty)
            return Batch(lines=lines, dirty=dirty, dropped=dropped, more=more)

    def give_back(self, batch: Batch) -> None:
        """Take back what the control plane has certainly not counted."""
        with self._lock:
            for key, line in batch.lines.items():
                self._line(key).add(line)
            newer = self._dirty
            # A session that was served again since keeps its newer place.
            self._dirty = {key: None for key in batch.dirty if key not in newer} | newer
            self._dropped += batch.dropped
            self._trim()

    def _add(self, tenant: str, line: _Line) -> None:
        minute = self._clock.now().strftime("%Y-%m-%dT%H:%M:00Z")
        with self._lock:
            self._line((tenant, minute)).add(line)

    def _line(self, key: tuple[str, str]) -> _Line:
        return self._lines.setdefault(key, _Line())

    def _trim(self) -> None:
        while len(self._dirty) > MAX_DIRTY:
            self._dirty.pop(next(iter(self._dirty)))
            if not self._dropped:
                log.warning("more than %s served sessions unreported: dropping", MAX_DIRTY)
            self._dropped += 1


def _can_be_sent(word: str) -> bool:
    """Return whether the control plane can keep this id.

    Whoever may begin a turn chooses these: one that is no text, or longer than any column, would
    have the whole report refused, again and again.
    """
    return len(word) <= MAX_ID and "\0" not in word and not _SURROGATE.search(word)


def _wire(key: Served) -> dict[str, str]:
    tenant, user_id, session_id = key
    return {"tenant": tenant, "user_id": user_id, "session_id": session_id}
