"""The script for authors of other runtimes, pointed at our own library in a real process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.runtime.processes import CONFORMANCE, ROOT, free_port, runtime


def conformance(*options: str, breaks: str = "") -> subprocess.CompletedProcess[str]:
    port = free_port()
    command = runtime(port, *(["--breaks", breaks] if breaks else []))
    return subprocess.run(
        [
            # Isolated: it has to run where nothing but Python is installed.
            *[sys.executable, "-I", "-S", str(CONFORMANCE)],
            *["--turns", f"http://127.0.0.1:{port}/turn", *options, "--", *command],
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
    )


@pytest.mark.traffic
def test_our_library_keeps_the_contract() -> None:
    found = conformance()
    assert found.returncode == 0, found.stdout + found.stderr
    assert "MISS" not in found.stdout


BROKEN = {
    "late_fence": "a count of 0 stays 0",
    "new_bytes": "the same bytes",
    "no_lease": "when its lease is over",
    "hammer": "backs off",
    "undivided": "a share of a limit is held",
}


@pytest.mark.traffic
@pytest.mark.parametrize("breaks", BROKEN)
def test_a_runtime_that_breaks_a_rule_is_named(breaks: str) -> None:
    found = conformance("--only", BROKEN[breaks], breaks=breaks)
    assert found.returncode == 1, found.stdout + found.stderr
    missed = [line for line in found.stdout.splitlines() if line.startswith("MISS")]
    assert len(missed) == 1
    assert BROKEN[breaks] in missed[0]
    assert "2 of 3 kept" in found.stdout
