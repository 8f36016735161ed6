"""Carrying out a step of a side channel: a callable or a command, in a process of its own.

Bounded in time, ended with all that it started, and never by a shell. What may be called, and
what it finds in its environment, is chosen in that of this installation, not on a page.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from durable.errors import Refused
from migrations_app.domain.channels import Answer, Step, StepBy, allowed, answer, argv, dotted
from migrations_app.ports import channel_child

# Only the end of what a program says is kept.
KEPT = 16_384
# The last line of stderr that begins so is shown; all else that it says may hold values.
SAFE = "switchyard: "
SAFE_MAX = 200
# How a program says "not now": sysexits' EX_TEMPFAIL.
NOT_NOW = 75
# What any program needs to run. All else of ours, stores' addresses among it, is nobody's business.
GIVEN = frozenset({"HOME", "LANG", "LANGUAGE", "LD_LIBRARY_PATH", "LOGNAME", "PATH"})
GIVEN |= {"SHELL", "TMPDIR", "TZ", "USER"}
# So long a call that is out of time may take to be ended with all that it started (seconds).
ENDING_SECONDS = 5.0


class NotAllowed(Refused):
    """The environment of this installation does not let pages call that."""


class StepFailed(Refused):
    """A step of a side channel did not do its work; it is tried again."""


@dataclass(frozen=True)
class Allowed:
    """What may be called: modules, and a folder of programs. None: no program."""

    modules: Collection[str]
    commands: Path | None
    # Names of our environment that calls find in theirs, beside what any program needs.
    variables: Collection[str] = ()


def check(by: str, text: str, may: Allowed) -> None:
    """Raise NotAllowed unless this step could be called here."""
    if by == StepBy.CALLABLE:
        module, _ = dotted(text)
        if not allowed(module, may.modules):
            raise NotAllowed(
                f"Callables of {module} may not be called here. Whoever runs this installation"
                " lists modules in SWITCHYARD_CHANNEL_MODULES, for web and workers alike."
            )
    elif by == StepBy.COMMAND:
        _program(argv(text)[0], may.commands)


def _program(name: str, folder: Path | None) -> Path:
    if folder is None:
        raise NotAllowed(
            f"{name} may not be run here. Whoever runs this installation names a folder of"
            " programs in SWITCHYARD_CHANNEL_COMMANDS, for web and workers alike."
        )
    path = folder / name
    try:
        # A link may lead to any program of the machine.
        there = not path.is_symlink() and path.is_file() and os.access(path, os.X_OK)
    except OSError:
        # A name that no file can have, or a folder that this process may not look into.
        there = False
    if not there:
        raise NotAllowed(
            f"{name[:80]} is no program in the folder of SWITCHYARD_CHANNEL_COMMANDS. Put it there"
            " as a file of its own that the workers may execute."
        )
    return path.resolve()


def call(
    by: str, text: str, step: Step, context: Mapping[str, str], *, may: Allowed, seconds: float
) -> Answer:
    """Carry out one call of a step and return its answer.

    A callable is given `context`; a command finds it in its environment, SWITCHYARD_ before each
    name. Raises NotAllowed; StepFailed, BadAnswer: it may be called again.
    """
    check(by, text, may)
    environment = _environment(may)
    if by == StepBy.CALLABLE:
        module, function = dotted(text)
        asked: dict[str, object] = {"module": module, "function": function, "context": {**context}}
        environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    else:
        name, *arguments = argv(text)
        asked = {"argv": [str(_program(name, may.commands)), *arguments]}
        environment |= {f"SWITCHYARD_{name.upper()}": value for name, value in context.items()}
    code, said, safe = _run(asked, environment, seconds)
    because = f": {safe}" if safe else ""
    if code is None:
        raise StepFailed(
            f"No answer within {seconds:g} s, so it was ended. Work that takes longer says"
            f' "again" before that{because}'
        )
    if code == NOT_NOW:
        raise StepFailed(f"It asks to be called later{because or '.'}")
    if code:
        raise StepFailed(f"It ended with exit code {code}{because or '.'}")
    return answer(said, step)


def _environment(may: Allowed) -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name in GIVEN or name in may.variables or name.startswith("LC_")
    }


def _run(
    asked: Mapping[str, object], environment: Mapping[str, str], seconds: float
) -> tuple[int | None, str, str]:
    """Return the exit code (None: out of time), the last line of output and the safe line."""
    process = subprocess.Popen(
        # -P: a folder of ours must not stand before the modules that it imports.
        [sys.executable, "-P", channel_child.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    ends = [_End(process.stdout), _End(process.stderr)]
    try:
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(asked).encode() + b"\n")
            process.stdin.flush()
        code: int | None = process.wait(seconds)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        # Whatever it started ends with it, as a killed worker's does: see `channel_child`.
        with suppress(BrokenPipeError):
            process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    output, errors = (end.lines() for end in ends)
    safe = [line for line in errors if line.startswith(SAFE)]
    shown = safe[-1].removeprefix(SAFE).strip()[:SAFE_MAX] if safe else ""
    return code, output[-1] if output else "", "".join(filter(str.isprintable, shown))


class _End:
    """Reads a stream to its end in a thread and keeps its last part."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._kept = stream, b""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._stream:
            while more := os.read(self._stream.fileno(), KEPT):
                self._kept = (self._kept + more)[-KEPT:]

    def lines(self) -> list[str]:
        # A process of another user may hold the stream open: not waited for.
        self._thread.join(1.0)
        text = self._kept.decode("utf-8", "replace")
        return [line.strip() for line in text.splitlines() if line.strip()]
