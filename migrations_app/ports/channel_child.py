"""What runs in the process of its own that each call of a side channel gets.

Run by its path, so that it imports nothing of this product. Its first line of input is a JSON
object: {"argv": [...]} runs a program, {"module", "function", "context"} a callable. Input ends
when the worker does, killed or not: then this whole process group ends at once, or a program
would go on copying beside the next worker's.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from typing import Any

# Exit codes of a shell: the program can't be run, and it was ended by a signal.
CANT_RUN, BY_SIGNAL = 126, 128


def main() -> int:
    """Run what the first line of input says."""
    line = b""
    # Not by sys.stdin: a thread that waits in its buffer stops the interpreter from ending.
    while not line.endswith(b"\n"):
        if not (more := os.read(0, 65_536)):
            return CANT_RUN
        line += more
    threading.Thread(target=_end_with_worker, daemon=True).start()
    asked = json.loads(line)
    return _program(asked["argv"]) if "argv" in asked else _callable(**asked)


def _end_with_worker() -> None:
    while os.read(0, 65_536):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _program(argv: list[str]) -> int:
    try:
        code = subprocess.run(argv, stdin=subprocess.DEVNULL, check=False).returncode
    except OSError:
        return CANT_RUN
    return code if code >= 0 else BY_SIGNAL - code


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
