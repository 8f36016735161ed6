"""What the README tells a newcomer to type works as it stands."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from durable.clock import database_now
from tenants import services
from tenants.domain.roles import Role

ROOT = Path(__file__).resolve().parents[3]
[SHELL] = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


@pytest.mark.django_db(transaction=True, serialized_rollback=True)
def test_the_readmes_first_tenant_is_brought_in(live_server: Any, tmp_path: Path) -> None:
    _, password = services.add_sign_in("ada", role=Role.ADMIN, by="ada", now=database_now())
    script = SHELL.partition("\n")[2]  # without its first line, which made the sign-in
    script = script.replace("PASSWORD=...", f"PASSWORD='{password}'")
    script = script.replace("http://127.0.0.1:8000", live_server.url)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == script.count("\nops ")
    assert [answer for answer in answers if "error" in answer] == []
    assert answers[-1]["secret"].startswith("sy_")
    assert list(tmp_path.iterdir()) == []
