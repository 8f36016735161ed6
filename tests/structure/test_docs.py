"""Docs say what is there."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").rglob("*.md")
)
CAPABILITIES = (ROOT / "docs" / "capabilities.md").read_text()
ROWS = re.findall(r"^\| ([A-Z]\d+) \| .* \| (.*) \| (.*) \|$", CAPABILITIES, re.M)


def test_the_phases_are_drawn_as_they_are() -> None:
    docs = runpy.run_path(str(ROOT / "docs" / "phases.py"))
    page = docs["PAGE"].read_text()
    assert docs["redrawn"](page) == page, "run: python docs/phases.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    assert [to for to in links if "://" not in to and not (page.parent / to).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_target_of_make_that_is_named_exists(page: Path) -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M)
    named = re.findall(r"(?:^|`)make ([a-z]+)", page.read_text(), re.M)
    assert set(named) <= set(targets)


def test_each_layer_of_an_app_is_in_the_table_of_files() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(c["layers"] for c in contracts["contracts"] if c["name"].startswith("Layers"))
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = "".join(re.findall(r"^\| `.*", page, re.M))
    names = re.findall(r"\((\w+)\)", " ".join(layers))
    assert [
        name for name in names if f"`{name}.py`" not in table and f"`{name}/`" not in table
    ] == []


def test_each_capability_has_one_row() -> None:
    ids = [name for name, _, _ in ROWS]
    assert len(ids) == len(set(ids))
    assert len(ids) == len(re.findall(r"^\| [A-Z]\d+ \|", CAPABILITIES, re.M))


@pytest.mark.parametrize(
    ("where", "shown_by"),
    [pytest.param(*rest, id=name) for name, *rest in ROWS if rest[0] != "not yet"],
)
def test_a_capability_lives_where_its_row_says(where: str, shown_by: str) -> None:
    assert (ROOT / where.strip("`")).exists()
    file, _, name = shown_by.strip("`").partition("::")
    assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.M)
