"""The lock file is what pyproject asks for, for whoever installs it, from wherever."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
LOCK = (ROOT / "requirements.lock").read_text()
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LISTS = {
    "product": PYPROJECT["project"]["dependencies"],
    "adk": PYPROJECT["project"]["optional-dependencies"]["adk"],
    "dev": PYPROJECT["dependency-groups"]["dev"],
}
ASKED = [
    pytest.param(Requirement(line), id=f"{name}: {line}")
    for name, lines in LISTS.items()
    for line in lines
]
# (name, version, the rest: hashes and who asked for it)
PINS = re.findall(r"^([a-z0-9-]+)(?:\[[^]]*\])?==(\S+)((?:.|\n(?=\s))*)", LOCK, re.M)


def _name(requirement: Requirement) -> str:
    return re.sub(r"[-_.]+", "-", requirement.name).lower()


@pytest.mark.parametrize("requirement", ASKED)
def test_a_requirement_is_pinned_within_its_range(requirement: Requirement) -> None:
    versions = [version for name, version, _ in PINS if name == _name(requirement)]
    assert versions
    assert all(requirement.specifier.contains(version) for version in versions)


def test_nothing_is_pinned_that_was_once_asked_for() -> None:
    asked = {name for name, _, rest in PINS if "switchyard (pyproject.toml" in rest}
    assert asked == {_name(Requirement(line)) for lines in LISTS.values() for line in lines}


def test_each_pin_has_hashes() -> None:
    assert PINS
    assert [name for name, _, rest in PINS if "--hash=sha256:" not in rest] == []


def test_the_lock_names_no_place() -> None:
    assert re.findall(r"\S*(?:://|--index|--find-links|file:|@ )\S*", LOCK) == []
