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
from tenants.models import AuditEntry

ROOT = Path(__file__).resolve().parents[3]
[SHELL] = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


def typed(password: str, url: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Type the README's block, but for its first line, which made the sign-in."""
    script = SHELL.partition("\n")[2]
    script = script.replace("PASSWORD=...", f"PASSWORD='{password}'")
    script = script.replace("http://127.0.0.1:8000", url)
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.django_db(transaction=True, serialized_rollback=True)
def test_the_readmes_first_tenant_is_brought_in(live_server: Any, tmp_path: Path) -> None:
    _, password = services.add_sign_in("ada", role=Role.ADMIN, by="ada", now=database_now())
    done = typed(password, live_server.url, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == SHELL.count("\nops ")
    assert [answer for answer in answers if "error" in answer] == []
    assert answers[-1]["secret"].startswith("sy_")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.django_db(transaction=True, serialized_rollback=True)
def test_with_a_wrong_password_nothing_is_sent_and_it_is_said(
    live_server: Any, tmp_path: Path
) -> None:
    services.add_sign_in("ada", role=Role.ADMIN, by="ada", now=database_now())
    before = AuditEntry.objects.count()
    done = typed("not hers", live_server.url, tmp_path)
    assert done.returncode != 0
    assert (done.stdout, "is the password right?" in done.stderr) == ("", True)
    assert AuditEntry.objects.count() == before
    assert list(tmp_path.iterdir()) == []
