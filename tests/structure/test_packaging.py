"""What `pip install .` and `pip install ./agent_runtime` put where."""

from __future__ import annotations

import fnmatch
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LIBRARY = tomllib.loads((ROOT / "agent_runtime/pyproject.toml").read_text())
FOUND = PRODUCT["tool"]["setuptools"]["packages"]["find"]["include"]
# What import-linter knows as an app, and what its pages are made of.
PARTS = [*PRODUCT["tool"]["importlinter"]["root_packages"], "bench", "static", "templates"]


def test_every_app_is_in_the_package_of_the_product() -> None:
    assert sorted(FOUND) == sorted(f"{part}*" for part in PARTS)


@pytest.mark.parametrize("part", PARTS)
def test_every_kind_of_file_goes_along(part: str) -> None:
    kinds = PRODUCT["tool"]["setuptools"]["package-data"]["*"]
    left = {
        str(path.relative_to(ROOT))
        for path in (ROOT / part).rglob("*")
        if path.is_file()
        and not {"__pycache__", "build"} & set(path.parts)
        and path.suffix not in (".py", ".pyc", ".toml")
        and not any(fnmatch.fnmatch(path.name, kind) for kind in kinds)
    }
    assert left == set()


def test_the_library_is_of_the_products_version() -> None:
    assert LIBRARY["project"]["version"] == PRODUCT["project"]["version"]
    assert LIBRARY["project"]["requires-python"] == PRODUCT["project"]["requires-python"]


def test_the_library_asks_for_what_the_product_asks_for() -> None:
    of_library, of_product = LIBRARY["project"], PRODUCT["project"]
    assert set(of_library["dependencies"]) <= set(of_product["dependencies"])
    assert of_library["optional-dependencies"] == of_product["optional-dependencies"]


def test_all_of_the_library_is_in_its_package() -> None:
    folders = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "agent_runtime").rglob("*.py")
        if "build" not in path.parts
    }
    assert set(LIBRARY["tool"]["setuptools"]["packages"]) == folders
