"""What `make lint` checks of the code as a whole, kept by `make test` too."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from django.core.management import call_command

ROOT = Path(__file__).resolve().parents[2]
IMPORTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
APPS = ("platform_admin", "migrations_app", "shifts", "capacity", "tenants", "durable")


def test_imports_keep_the_contracts() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout.partition("Broken contracts")[2]


def test_each_package_is_under_the_contracts() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages - {"bench", "tests"} == set(IMPORTS["root_packages"])


def test_each_domain_is_kept_free_of_frameworks() -> None:
    [free] = [c for c in IMPORTS["contracts"] if c["type"] == "forbidden"]
    domains = {f"{path.parts[-3]}.domain" for path in ROOT.glob("*/domain/__init__.py")}
    assert domains <= set(free["source_modules"])


@pytest.mark.parametrize("app", APPS)
def test_an_app_starts_with_an_empty_file(app: str) -> None:
    assert (ROOT / app / "__init__.py").read_text() == ""


@pytest.mark.django_db
def test_models_and_schema_migrations_agree() -> None:
    call_command("makemigrations", check=True, dry_run=True, verbosity=0)


def test_settings_behind_tls_pass_the_deployment_check(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "manage.py", "check", "--deploy", "--fail-level", "WARNING"],
        cwd=ROOT,
        env={**os.environ, "SWITCHYARD_HTTPS": "1", "SWITCHYARD_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
