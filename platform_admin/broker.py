"""Celery messages in files, whole or not there: the broker of the embedded default.

kombu's own filesystem transport opens a message's file before it writes into it, and a
worker that looks in between takes an empty one; so it does with the table of an exchange.
Celery ends a worker over that ("Unrecoverable error"), in the worst case inside a fence.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty
from typing import Any

from kombu.transport import filesystem
from kombu.utils.json import dumps, loads


class Channel(filesystem.Channel):
    """Puts messages and tables in place by renaming, which no reader can see half of."""

    def get_table(self, exchange: str) -> list[Any]:
        """Return the (routing key, pattern, queue) entries of an exchange."""
        try:
            entries = json.loads(self._exchange_file(exchange).read_text())
        except FileNotFoundError:
            return []
        return [filesystem.exchange_queue_t(*entry) for entry in entries]

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str, queue: str) -> None:
        entry = filesystem.exchange_queue_t(routing_key or "", pattern or "", queue or "")
        with self._changing_tables():
            entries = self.get_table(exchange)
            if entry not in entries:
                _write(self._exchange_file(exchange), dumps([entry, *entries]))

    def _delete(
        self, queue: str, exchange: str, routing_key: str, pattern: str, *args: Any, **kwargs: Any
    ) -> None:
        entry = filesystem.exchange_queue_t(routing_key or "", pattern or "", queue or "")
        self._purge(queue)
        with self._changing_tables():
            left = [other for other in self.get_table(exchange) if other != entry]
            _write(self._exchange_file(exchange), dumps(left))

    def _put(self, queue: str, payload: Any, **kwargs: Any) -> None:
        # In the order of their sending; kombu's own _size and _purge know files by this name.
        name = f"{time.time_ns():020}_{uuid.uuid4()}.{queue}.msg"
        _write(Path(self.data_folder_out, name), dumps(payload))

    def _get(self, queue: str) -> Any:
        for name in sorted(os.listdir(self.data_folder_in)):
            if name.partition(".")[2] != f"{queue}.msg":
                continue
            mine = Path(self.processed_folder, name)
            # Of two workers one gets to rename it.
            with suppress(FileNotFoundError):
                Path(self.data_folder_in, name).rename(mine)
                text = mine.read_text()
                mine.unlink()
                # What a power cut left of a message is a hint lost, not a worker.
                with suppress(ValueError):
                    return loads(text)
        raise Empty

    @contextmanager
    def _changing_tables(self) -> Iterator[None]:
        with (self.control_folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


class Transport(filesystem.Transport):
    """kombu's filesystem transport with the channel above."""

    Channel = Channel


def _write(path: Path, text: str) -> None:
    beside = path.with_name(f"{path.name}.{uuid.uuid4()}")
    beside.write_text(text)
    beside.rename(path)
