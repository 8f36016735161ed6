"""What clients were told: an append-only file of every acknowledged event.

Acknowledged is a non-partial event that the Runner yielded, and with it the user's own
event of that invocation. A line is handed to the kernel before the client goes on, so
`kill -9` loses none; the disk is flushed once a second, for a power cut is not the question.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

FLUSH_SECONDS = 1.0
LONGEST_LINE = 65_536
# The user's state that every `remember` of the script sets, to a word that nobody else says.
LAST_WORD = "user:last"

Kind = Literal["event", "turn", "refused", "failed", "cancelled", "deleting", "deleted"]


@dataclass(frozen=True)
class Line:
    """One thing that a client learned."""

    # event: acknowledged. turn: over, `count` events were yielded and none will follow.
    # refused: to be sent again. failed: an error that is not retryable. cancelled: by the client.
    # deleting: the session is about to be. deleted: it is gone.
    kind: Kind
    # Seconds since 1970, this machine's clock.
    at: float
    tenant: str
    user: str
    session: str
    invocation: str = ""
    # The event's id.
    id: str = ""
    # Key of the store that took it.
    store: str = ""
    count: int = 0
    # Of a refusal, or an error in words.
    reason: str = ""
    # What the event made its user's last word, and when it was made, by its own account.
    word: str = ""
    made: float = 0.0


class Journal:
    """Appends lines to a file. Use it from one thread."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        self._mend()
        self._flushed = time.monotonic()

    def _mend(self) -> None:
        """Cut off a last line that a killed process left unended: it was never acted upon."""
        size = os.fstat(self._file).st_size
        tail = os.pread(self._file, LONGEST_LINE, max(0, size - LONGEST_LINE))
        os.ftruncate(self._file, size - len(tail) + tail.rfind(b"\n") + 1)

    def write(self, line: Line) -> None:
        """Append one line. It survives this process from here on."""
        data = {key: value for key, value in asdict(line).items() if value not in ("", 0)}
        os.write(self._file, json.dumps(data, separators=(",", ":")).encode() + b"\n")
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            os.fdatasync(self._file)
            self._flushed = time.monotonic()

    def close(self) -> None:
        """Flush and close."""
        os.fsync(self._file)
        os.close(self._file)


def read(paths: Iterable[Path]) -> Iterator[Line]:
    """Yield the lines of some journals, each file in its own order."""
    for path in paths:
        with path.open(encoding="utf-8") as file:
            for text in file:
                # A process killed inside a write leaves a last line without its end: what it
                # was about to say was never acted upon.
                if text.endswith("\n"):
                    yield Line(**json.loads(text))
