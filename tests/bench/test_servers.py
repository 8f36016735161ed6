"""Throw-away servers end with their command, and what is missing is said in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import servers

ROOT = Path(__file__).resolve().parents[2]


ASK = """
import os, psycopg, redis
with psycopg.connect(os.environ["DATABASE_URL"]) as connection:
    print(connection.execute("SELECT current_database()").fetchone()[0])
with redis.Redis.from_url(os.environ["REDIS_URL"]) as client:
    print(client.ping())
"""


def _run(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("DATABASE_URL", "REDIS_URL", "SWITCHYARD_HOME")
    }
    return subprocess.run(
        [sys.executable, "-m", "bench.servers", "--", "sh", "-c", script],
        cwd=ROOT,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_command_gets_private_servers_that_are_gone_after_it() -> None:
    done = _run(f"{sys.executable} -c '{ASK}'; echo $DATABASE_URL $SWITCHYARD_HOME; exit 3")
    assert done.returncode == 3, done.stderr
    name, pong, where = done.stdout.splitlines()
    assert (name, pong) == ("switchyard", "True")
    url, home = where.split()
    port = int(url.rpartition(":")[2].partition("/")[0])
    assert not servers._listens(port)
    assert not Path(home).exists()


def test_servers_that_are_named_are_used_as_they_are() -> None:
    done = _run(
        "echo $DATABASE_URL $REDIS_URL", DATABASE_URL="postgres://a/b", REDIS_URL="redis://c"
    )
    assert done.stdout.split() == ["postgres://a/b", "redis://c"]


def test_what_is_missing_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "find", lambda program: None)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(servers.Missing, match="apt-get install postgresql chromium") as said:
        servers.require(["postgres", "chromium"])
    assert "\n" not in str(said.value)
