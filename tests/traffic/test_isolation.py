"""The isolation suite against real agent processes, as a release would run it."""

from __future__ import annotations

from io import StringIO

import pytest
from django.core.management import call_command

from capacity.models import IsolationRun

pytestmark = [pytest.mark.traffic, pytest.mark.timeout(300)]


@pytest.mark.django_db(transaction=True, serialized_rollback=True)
def test_no_tenant_harms_another_and_the_page_keeps_the_run() -> None:
    said = StringIO()
    call_command("isolation", by="ada", stdout=said)
    run = IsolationRun.objects.get()
    assert (run.passed, run.by) == (True, "ada (command)"), said.getvalue()
    assert [result["name"] for result in run.results] == [
        "Flood",
        "Loop",
        "Failing turns",
        "Budget",
        "Authority",
        "Result cache",
        "Conversation",
    ]
    assert {result["kind"] for result in run.results} == {
        "performance",
        "fault",
        "authority",
        "data",
    }
