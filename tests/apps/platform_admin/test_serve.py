"""`manage.py serve` begins alone, or says why it does not."""

from __future__ import annotations

import socket

import pytest
from django.core.management import CommandError, call_command


def test_a_port_that_somebody_listens_on_is_refused_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CommandError, match=f"127.0.0.1:{port} can't be listened on"):
            call_command("serve", port=port)
