"""What runs in the process of its own that each call of a side channel gets.

Run by its path, so that it imports nothing of this product. Its first line of input is a JSON
object: {"argv": [...]} runs a program, {"module", "function", "context"} a callable. Input ends
when the worker does, killed or not, and when a call is out of time: then whatever the call has
started ends at once, or it would go on copying beside the next call.

The call itself runs in a child of this process, which does nothing but watch: it adopts what the
call leaves behind, in whatever session or process group, and so finds all of it.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

# Exit codes of a shell: the program can't be run, and it was ended by a signal.
CANT_RUN, BY_SIGNAL = 126, 128
# <linux/prctl.h>: orphans below this process become its children instead of init's.
PR_SET_CHILD_SUBREAPER = 36
# What can't be ended in this time, another user's process, is left.
ENDING_SECONDS = 2.0


def main() -> int:
    """Run what the first line of input says."""
    line = b""
    # Not by sys.stdin: a thread that waits in its buffer stops the interpreter from ending.
    while not line.endswith(b"\n"):
        if not (more := os.read(0, 65_536)):
            return CANT_RUN
        line += more
    with suppress(AttributeError):  # Linux alone has it
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    asked = json.loads(line)
    child = os.fork()
    if child == 0:
        # Its input is nobody's: the end of ours is not for it to see.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        return _program(asked["argv"]) if "argv" in asked else _callable(**asked)
    threading.Thread(target=_end_with_worker, daemon=True).start()
    while True:
        # Whoever was adopted and ends is waited for too.
        pid, status = os.wait()
        if pid == child:
            break
    _end_all()
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else BY_SIGNAL - code


def _end_with_worker() -> None:
    while os.read(0, 65_536):
        pass
    _end_all()
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _end_all() -> None:
    """End every process below this one. Who is born meanwhile is found by the next look."""
    until = time.monotonic() + ENDING_SECONDS
    while (below := list(_below())) and time.monotonic() < until:
        for pid in below:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def _below() -> Iterator[int]:
    """Yield the processes that descend from this one and live: /proc alone knows all of them."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            # "pid (name) state parent ...", and a name may hold anything.
            state, parent = entry.read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(entry.parent.name))
    waiting = [os.getpid()]
    while waiting:
        found = children.get(waiting.pop(), [])
        yield from found
        waiting += found


def _program(argv: list[str]) -> int:
    # Python ignores it, and a program would inherit that.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execv(argv[0], argv)
    except OSError:
        return CANT_RUN


def _callable(module: str, function: str, context: dict[str, Any]) -> int:
    # What the callable prints is no answer.
    answers = os.dup(1)
    os.dup2(2, 1)
    found = getattr(importlib.import_module(module), function)
    if getattr(found, "__module__", "") != module:
        # Whatever a module has imported, `system` say, is not for a page to call.
        print(f"switchyard: {function} is not defined in {module}", file=sys.stderr)
        return CANT_RUN
    answer = json.dumps(found(context))
    os.write(answers, answer.encode() + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
