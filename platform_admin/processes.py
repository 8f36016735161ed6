"""The processes of an installation on one machine, and what keeps them running.

In production an init system (systemd, Kubernetes) does the keeping and runs the same
commands; `manage.py serve` and the demo use the supervisor here.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# How long children may take to end by themselves: a Celery worker finishes its step.
STOP_SECONDS = 12.0
# A child that dies sooner than this after its start did not really start.
QUICK_DEATH_SECONDS = 5.0
QUICK_DEATHS = 5


class KeepsDying(Exception):
    """A child died right after its start, several times in a row; the message ends with its log."""


@dataclass(frozen=True)
class Process:
    """One program to keep running."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    # False: it is to end by itself with exit code 0, and is restarted only if it ends otherwise.
    forever: bool = True


def installation(port: int, *, host: str = "127.0.0.1") -> list[Process]:
    """Return what one machine runs: pages, a worker for each queue, and beat."""

    def celery(*arguments: str) -> list[str]:
        return [sys.executable, "-m", "celery", "-A", "platform_admin.celery", *arguments]

    def worker(queue: str, concurrency: int) -> Process:
        # Workers need not hear of each other: rows say what is due.
        alone = ["--without-gossip", "--without-mingle", "--without-heartbeat"]
        size = ["--concurrency", str(concurrency), "--loglevel", "WARNING"]
        return Process(queue, celery("worker", "-Q", queue, "-n", f"{queue}@%h", *size, *alone))

    web = [
        *(sys.executable, "-m", "granian", "--interface", "wsgi", "--host", host),
        *("--port", str(port), "--workers", "1", "--blocking-threads", "8"),
        *("--no-ws", "platform_admin.wsgi:application"),
    ]
    return [
        Process("web", web),
        # Two, so that a fence closes although another move's step is running.
        worker("prompt", 2),
        worker("bulk", 1),
        Process("beat", celery("beat", "--loglevel", "WARNING", "--pidfile=")),
    ]


@dataclass
class _Child:
    process: Process
    popen: subprocess.Popen[bytes]
    started: float
    quick_deaths: int = 0
    restart_at: float | None = None


class Supervisor:
    """Keeps processes running and ends them all, with whatever they started themselves.

    Use it from one thread, as a context manager. Each child leads a process group of its own:
    Ctrl-C in a terminal reaches the supervisor alone, which then ends the children in order.
    They also end if the supervisor is killed.
    """

    def __init__(self, logs: Path, *, environment: Mapping[str, str] | None = None) -> None:
        """Write each child's output to `logs`/NAME.log; `environment` is added to this one's."""
        self.logs = logs
        self.restarts: dict[str, int] = {}
        self._environment = {**os.environ, **(environment or {})}
        self._children: dict[str, _Child] = {}
        logs.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self, *processes: Process) -> None:
        """Start processes; `tend` keeps them running from now on."""
        for process in processes:
            popen = self._spawn(process)
            self._children[process.name] = _Child(process, popen, time.monotonic())

    def tend(self) -> list[str]:
        """Restart children that died; return their names. Call it a few times a second.

        Raises KeepsDying when a restart does not help.
        """
        now, restarted = time.monotonic(), []
        for child in list(self._children.values()):
            name = child.process.name
            if child.restart_at is None:
                code = _dead(child.popen)
                if code is None:
                    continue
                if code == 0 and not child.process.forever:
                    del self._children[name]
                    continue
                quick = now - child.started < QUICK_DEATH_SECONDS
                child.quick_deaths = child.quick_deaths + 1 if quick else 0
                if child.quick_deaths >= QUICK_DEATHS:
                    raise KeepsDying(f"{name} ended with {code}, again:\n{self.tail(name)}")
                child.restart_at = now + child.quick_deaths
            if child.restart_at <= now:
                child.popen = self._spawn(child.process)
                child.started, child.restart_at = now, None
                self.restarts[name] = self.restarts.get(name, 0) + 1
                restarted.append(name)
        return restarted

    def running(self, name: str) -> bool:
        """Return whether the child has been started and has not ended for good."""
        return name in self._children

    def pid(self, name: str) -> int:
        """Return the child's process id."""
        return self._children[name].popen.pid

    def stop(self, *names: str) -> None:
        """End these children, or all, last started first; those that don't are killed."""
        children = [c for n, c in self._children.items() if not names or n in names][::-1]
        for child in children:
            if _dead(child.popen) is None:
                child.popen.send_signal(signal.SIGTERM)
        limit = time.monotonic() + STOP_SECONDS
        for child in children:
            try:
                while _dead(child.popen) is None and time.monotonic() < limit:
                    time.sleep(0.02)
            except KeyboardInterrupt:
                limit = 0.0  # Ctrl-C again: somebody does not want to wait.
            _kill_group(child.popen)
            child.popen.wait()
            del self._children[child.process.name]

    def tail(self, name: str, lines: int = 15) -> str:
        """Return the last lines of a child's log."""
        path = self.logs / f"{name}.log"
        text = path.read_text(errors="replace") if path.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def _spawn(self, process: Process) -> subprocess.Popen[bytes]:
        # The kernel ends the child if this process dies without a chance to do so.
        wrapper = ["setpriv", "--pdeathsig", "TERM", "--"] if shutil.which("setpriv") else []
        with (self.logs / f"{process.name}.log").open("ab") as log:
            return subprocess.Popen(
                [*wrapper, *process.command],
                cwd=ROOT,
                env={**self._environment, **process.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def _dead(popen: subprocess.Popen[bytes]) -> int | None:
    """Return the exit code of a child that ended, its group cleared; None while it lives."""
    if popen.returncode is not None:
        return popen.returncode
    # WNOWAIT keeps the pid taken until its group has been killed: what a killed worker or
    # web server leaves behind would go on working, or hold the port.
    if os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        return None
    _kill_group(popen)
    return popen.wait()


def _kill_group(popen: subprocess.Popen[bytes]) -> None:
    if popen.returncode is None:
        try:
            os.killpg(popen.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
