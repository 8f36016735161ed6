"""What this process served and refused, kept until the control plane has acknowledged it."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from agent_runtime.clock import Clock, SystemClock

log = logging.getLogger(__name__)

# A report stays well below the 2.5 MB that a Django server takes: what doesn't fit goes next.
MAX_LINES = 5_000
MAX_DIRTY_BYTES = 1_000_000
# Served sessions kept for reports. They only feed a move's forecast, so the oldest may be dropped.
MAX_DIRTY = 10_000

# Turns of a client's own naming whose refusals are remembered, a minute each. A client that makes
# up more has each of the others counted, as one that names none.
MAX_TURN_IDS = 10_000

# What the control plane takes of one tenant and minute; a line with more costs its whole report.
MAX_TOKENS = 10**12

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
    # By limits that are only tried: these turns were served.
    would_refuse: Counter[str] = field(default_factory=Counter)

    def add(self, other: _Line) -> None:
        self.turns += other.turns
        self.model_calls += other.model_calls
        self.tokens += other.tokens
        self.refused.update(other.refused)
        self.would_refuse.update(other.would_refuse)


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
                "tokens": min(line.tokens, MAX_TOKENS),
                "refused": dict(line.refused),
                "would_refuse": dict(line.would_refuse),
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
        # A minute, and how the wire spells it. Replaced as a whole.
        self._spelled: tuple[tuple[int, int, int], str] = ((-1, -1, -1), "")
        # The minute that `_seen` and `_logged` are of; both begin anew with the next.
        self._minute = ""
        # Hashes of (tenant, turn id, which count) that are counted.
        self._seen: set[int] = set()
        # (tenant, reason) that are in the log.
        self._logged: set[tuple[str, str]] = set()
        # Tokens of the tenants that have a budget: since their grants were given, and of these
        # the ones that no report has carried yet.
        self._since_grants: dict[str, int] = {}
        self._since_report: dict[str, int] = {}

    def turn(self, tenant: str) -> None:
        """Count a turn that is served; one that is refused before anything came of it is not."""
        self._add(tenant, turns=1)

    def model_call(self, tenant: str, tokens: int) -> None:
        """Count a call that the model answered, and the tokens it says it used."""
        self._add(tenant, model_calls=1, tokens=tokens)

    def more_tokens(self, tenant: str, tokens: int) -> None:
        """Count tokens of a call that is counted already: its answer goes on."""
        self._add(tenant, tokens=tokens)

    def refused(self, tenant: str, reason: str, turn_id: str | None = None) -> None:
        """Count a turn that was refused: refused demand is demand, and log it, once a minute.

        `turn_id` is the client's own name of the turn: however often it is sent again and
        refused within a minute, it is one turn that somebody wanted.
        """
        minute = self._this_minute()
        with self._lock:
            if self._is_first(minute, "refused", tenant, turn_id):
                self._line((tenant, minute)).refused[reason] += 1
            is_news = (tenant, reason) not in self._logged
            self._logged.add((tenant, reason))
        if is_news:
            log.warning("%s: turns are refused (%s)", tenant, reason)

    def would_refuse(self, tenant: str, reason: str, turn_id: str | None = None) -> None:
        """Count a turn that was served, and that a limit on trial would have refused."""
        minute = self._this_minute()
        with self._lock:
            if self._is_first(minute, "would_refuse", tenant, turn_id):
                self._line((tenant, minute)).would_refuse[reason] += 1

    def granted(self, tenants: Collection[str]) -> None:
        """Begin to count the tokens of `tenants` against what is left of their budgets.

        From the report on whose answer said what is left: what it carried is in that figure.
        """
        with self._lock:
            self._since_grants = {t: self._since_report.get(t, 0) for t in tenants}
            self._since_report = {t: n for t, n in self._since_report.items() if t in tenants}

    def since_granted(self, tenant: str) -> int:
        """Return the tokens that a tenant used here since `granted`; 0 where none are counted."""
        with self._lock:
            return self._since_grants.get(tenant, 0)

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
            self._since_report.clear()
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

    def _add(self, tenant: str, *, turns: int = 0, model_calls: int = 0, tokens: int = 0) -> None:
        minute = self._this_minute()
        with self._lock:
            line = self._line((tenant, minute))
            line.turns += turns
            line.model_calls += model_calls
            line.tokens += tokens
            if tokens and tenant in self._since_grants:
                self._since_grants[tenant] += tokens
                self._since_report[tenant] = self._since_report.get(tenant, 0) + tokens

    def _this_minute(self) -> str:
        now = self._clock.now()
        at = (now.minute, now.hour, now.toordinal())
        spelled = self._spelled
        if spelled[0] != at:
            # Several times a turn: spelling it anew each time is a tenth of all that a turn costs.
            spelled = self._spelled = (at, now.strftime("%Y-%m-%dT%H:%M:00Z"))
        return spelled[1]

    def _is_first(self, minute: str, what: str, tenant: str, turn_id: str | None) -> bool:
        """Return whether a turn is to be counted. The lock is held."""
        if minute != self._minute:
            self._minute = minute
            self._seen.clear()
            self._logged.clear()
        if turn_id is None:
            return True
        # A hash: whoever may begin a turn chooses the id, and its length.
        key = hash((what, tenant, turn_id))
        if key in self._seen:
            return False
        if len(self._seen) < MAX_TURN_IDS:
            self._seen.add(key)
        return True

    def _line(self, key: tuple[str, str]) -> _Line:
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = _Line()
        return line

    def _trim(self) -> None:
        while len(self._dirty) > MAX_DIRTY:
            self._dirty.pop(next(iter(self._dirty)))
            if not self._dropped:
                log.warning("more than %s served sessions unreported: dropping", MAX_DIRTY)
            self._dropped += 1


def tokens_of(metadata: Any) -> int:
    """Return the tokens that a model says a call used, from an answer's usage metadata.

    0 where it says none. A model's server may say any number: it must not cost a report.
    """
    return max(0, min(metadata.total_token_count or 0, MAX_TOKENS))


def _can_be_sent(word: str) -> bool:
    """Return whether the control plane can keep this id.

    Whoever may begin a turn chooses these: one that is no text, or longer than any column, would
    have the whole report refused, again and again.
    """
    fits = len(word) <= MAX_ID and "\0" not in word
    return fits and (word.isascii() or not _SURROGATE.search(word))


def _wire(key: Served) -> dict[str, str]:
    tenant, user_id, session_id = key
    return {"tenant": tenant, "user_id": user_id, "session_id": session_id}
