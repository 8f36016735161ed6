"""`manage.py serve` begins alone, or says why it does not."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command

from platform_admin.management.commands.serve import command


def test_a_port_that_somebody_listens_on_is_refused_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CommandError, match=f"127.0.0.1:{port} can't be listened on"):
            call_command("serve", port=port)


@pytest.mark.parametrize(
    ("python", "shown"),
    [
        pytest.param("{here}/.venv/bin/python", ".venv/bin/python", id="here"),
        pytest.param("/opt/sw yard/bin/python", "'/opt/sw yard/bin/python'", id="elsewhere"),
    ],
)
def test_a_hint_names_the_interpreter_that_has_everything(
    monkeypatch: pytest.MonkeyPatch, python: str, shown: str
) -> None:
    monkeypatch.setattr(sys, "executable", python.format(here=Path.cwd()))
    assert command("role") == f"{shown} manage.py role"
