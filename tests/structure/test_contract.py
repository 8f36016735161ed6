"""What authors of other runtimes read is what the code does."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest
from django.test import Client

from agent_runtime import bucket, idempotency_key
from agent_runtime.adk import plugin

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "runtime-protocol.md").read_text()
BUCKETS = re.findall(r"^\| `(\".*\")` \| (\d+) \|$", PAGE, re.M)
KEYS = re.findall(r"^\| `(.+)` \| `(.+)` \| `(ik1-\w+)` \|$", PAGE, re.M)


def test_the_document_in_the_repository_is_the_one_that_the_code_makes() -> None:
    docs = runpy.run_path(str(ROOT / "docs" / "openapi.py"))
    assert docs["PAGE"].read_text() == docs["document"](), "run: python docs/openapi.py"


def test_it_is_the_one_that_is_served() -> None:
    served = Client().get("/api/v1/openapi.json").json()
    assert json.loads((ROOT / "docs" / "openapi.json").read_text()) == served


@pytest.mark.parametrize(("spelled", "number"), BUCKETS)
def test_a_bucket_is_what_the_page_says(spelled: str, number: str) -> None:
    assert bucket(json.loads(spelled)) == int(number)


@pytest.mark.parametrize(("token", "turn", "key"), KEYS)
def test_a_key_is_what_the_page_says(token: str, turn: str, key: str) -> None:
    assert idempotency_key(token, turn) == key


def test_the_page_has_vectors() -> None:
    assert len(BUCKETS) == 7
    assert len(KEYS) == 3


@pytest.mark.parametrize(
    "text",
    [
        plugin.REJECTED,
        plugin.BUDGET_REACHED,
        plugin.STEPS_REACHED,
        json.dumps(plugin.TOOL_UNAVAILABLE),
    ],
    ids=["rejected", "budget", "steps", "tool"],
)
def test_a_refusal_has_the_words_of_the_page(text: str) -> None:
    assert f"`{text}`" in PAGE


def test_the_page_names_every_call_of_a_runtime() -> None:
    paths = json.loads((ROOT / "docs" / "openapi.json").read_text())["paths"]
    runtime = {p.replace("{instance}", "I") for p in paths if p.startswith("/api/v1/runtime/")}
    assert {path for path in runtime if path not in PAGE} == set()
