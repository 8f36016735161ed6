"""The embedded broker hands each message to one worker, whole. Real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection
from kombu.transport.virtual import BrokerState

from platform_admin.broker import Transport

ROOT = Path(__file__).resolve().parents[3]
MESSAGES = 300
# A program of each side: `put` sends so many, `get` takes what comes until a "stop".
PROGRAM = """
import sys
from queue import Empty
from tests.apps.platform_admin.test_broker import connect
side, name, folder, count = sys.argv[1:]
with connect(folder) as connection:
    queue = connection.SimpleQueue("prompt")
    if side == "put":
        for number in range(int(count)):
            queue.put({"number": f"{name} {number}", "padding": "x" * 5000})
    else:
        while True:
            message = queue.get(timeout=20)
            message.ack()
            if message.payload["number"] == "stop":
                break
            print(message.payload["number"], len(message.payload["padding"]))
"""


def connect(folder: str | Path) -> Connection:
    folders = {
        "data_folder_in": f"{folder}/queue",
        "data_folder_out": f"{folder}/queue",
        "processed_folder": f"{folder}/processed",
        "control_folder": f"{folder}/control",
        "polling_interval": 0.001,
    }

    class Fresh(Transport):
        # A process remembers what it has declared; here one process has several brokers.
        global_state = BrokerState()

    return Connection(transport=Fresh, transport_options=folders)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("queue", "processed", "control"):
        (tmp_path / name).mkdir()
    return tmp_path


def _start(side: str, name: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, side, name, str(folder), str(MESSAGES)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_each_message_reaches_one_of_many_readers_whole(folder: Path) -> None:
    readers = [_start("get", name, folder) for name in "ab"]
    writers = [_start("put", name, folder) for name in "cd"]
    for writer in writers:
        assert writer.communicate()[1] == ""
    with connect(folder) as connection:
        for _ in readers:
            connection.SimpleQueue("prompt").put({"number": "stop"})
    outputs = [reader.communicate() for reader in readers]
    assert [error for _, error in outputs if error] == []
    got = [line for text, _ in outputs for line in text.splitlines()]
    assert sorted(got) == sorted(f"{w} {n} 5000" for w in "cd" for n in range(MESSAGES))
    assert list((folder / "queue").iterdir()) == []


def test_what_a_power_cut_left_of_a_message_costs_no_worker(folder: Path) -> None:
    (folder / "queue" / "0_torn.prompt.msg").write_text("")
    with connect(folder) as connection:
        queue = connection.SimpleQueue("prompt")
        queue.put({"whole": True})
        assert queue.get(timeout=5).payload == {"whole": True}


def test_queues_of_one_exchange_are_bound_and_taken_away(folder: Path) -> None:
    with connect(folder) as connection:
        channel: Any = connection.channel()
        for queue in ("prompt", "bulk"):
            channel._queue_bind("work", queue, "", queue)
            channel._queue_bind("work", queue, "", queue)
        channel._delete("prompt", "work", "prompt", "")
        assert [entry.queue for entry in channel.get_table("work")] == ["bulk"]
