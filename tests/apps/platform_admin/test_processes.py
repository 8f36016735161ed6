"""The supervisor keeps children running and leaves nothing behind. Real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from platform_admin.processes import KeepsDying, Process, Supervisor

# A child with a child of its own, as workers and web servers have: both write their pids.
FAMILY = """
import os, subprocess, sys, time
inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open(sys.argv[1], "w").write(f"{os.getpid()} {inner.pid}\\n")
time.sleep(60)
"""


def _eventually(true: Callable[[], bool], seconds: float = 10.0) -> bool:
    limit = time.monotonic() + seconds
    while not true():
        if time.monotonic() > limit:
            return False
        time.sleep(0.01)
    return True


def _alive(pid: int) -> bool:
    try:
        # A zombie whose parent has not yet looked is dead.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _family(tmp_path: Path) -> tuple[Process, Callable[[], tuple[int, ...]]]:
    pids = tmp_path / "pids"

    def read() -> tuple[int, ...]:
        assert _eventually(lambda: pids.exists() and pids.read_text().endswith("\n"))
        found = tuple(int(word) for word in pids.read_text().split())
        pids.unlink()
        return found

    return Process("family", [sys.executable, "-c", FAMILY, str(pids)]), read


def test_a_killed_child_is_started_again_and_its_own_children_are_gone(tmp_path: Path) -> None:
    process, pids = _family(tmp_path)
    with Supervisor(tmp_path) as supervisor:
        supervisor.start(process)
        outer, inner = pids()
        os.kill(outer, signal.SIGKILL)
        assert _eventually(lambda: supervisor.tend() == ["family"])
        assert _eventually(lambda: not _alive(inner))
        assert pids()[0] == supervisor.pid("family") != outer


def test_stopping_ends_children_and_what_they_started(tmp_path: Path) -> None:
    process, pids = _family(tmp_path)
    with Supervisor(tmp_path) as supervisor:
        supervisor.start(process)
        family = pids()
    assert _eventually(lambda: not any(map(_alive, family)))


def test_children_end_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    script = """
import sys, time
from pathlib import Path
from platform_admin.processes import Process, Supervisor
with Supervisor(Path(sys.argv[1])) as supervisor:
    supervisor.start(Process("child", ["sleep", "60"]))
    print(supervisor.pid("child"), flush=True)
    time.sleep(60)
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    root = Path(__file__).resolve().parents[3]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root) as supervisor:
        assert supervisor.stdout is not None
        child = int(supervisor.stdout.readline())
        supervisor.kill()
    assert _eventually(lambda: not _alive(child))


def test_a_child_that_was_to_end_is_not_started_again(tmp_path: Path) -> None:
    with Supervisor(tmp_path) as supervisor:
        supervisor.start(Process("once", ["true"], forever=False))
        assert _eventually(lambda: supervisor.tend() == [] and not supervisor.running("once"))
        assert supervisor.restarts == {}


def test_a_child_that_can_not_start_is_given_up_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform_admin.processes.QUICK_DEATHS", 2)
    with Supervisor(tmp_path) as supervisor:
        supervisor.start(Process("broken", ["sh", "-c", "echo no such port >&2; exit 3"]))
        with pytest.raises(KeepsDying, match="no such port"):
            _eventually(lambda: supervisor.tend() == ["never"])
