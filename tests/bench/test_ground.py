"""A demo builds where nobody else has, and says so where it doesn't."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dj_database_url
import pytest
from django.db import ConnectionHandler

from bench import ground

pytestmark = pytest.mark.django_db
DEMOS = ["acme", "bolt"]
# What the product's schema leaves besides tables.
TRIGGER = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
CREATE TRIGGER refuses BEFORE DELETE ON tenants_tenant EXECUTE FUNCTION refuse()"""


@pytest.fixture(params=["postgresql", "sqlite"])
def database(
    request: pytest.FixtureRequest, new_database: Callable[[], str], tmp_path: Path
) -> Iterator[Any]:
    """An empty database, as a demo would be given it."""
    url = new_database() if request.param == "postgresql" else f"sqlite:///{tmp_path / 'demo.db'}"
    connection = ConnectionHandler({"default": dj_database_url.parse(url)})["default"]
    yield connection
    connection.close()


def run(database: Any, *statements: str) -> None:
    with database.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


def live_in(database: Any, *tenants: str) -> None:
    """Leave what a demo leaves, with these tenants."""
    run(database, "CREATE TABLE tenants_tenant (slug text)")
    if database.vendor == "postgresql":
        run(database, *TRIGGER.strip().splitlines())
    for tenant in tenants:
        run(database, f"INSERT INTO tenants_tenant VALUES ('{tenant}')")


def test_an_empty_database_is_taken_and_taken_again(database: Any) -> None:
    for _ in range(3):
        ground.take_database(database, DEMOS)
        assert database.introspection.table_names() == [ground.MARK]
        live_in(database, *DEMOS)


def test_a_database_with_a_table_of_somebody_is_refused_untouched(database: Any) -> None:
    live_in(database, "acme")
    with pytest.raises(ground.Unusable, match=r"not empty .*tenants_tenant.*Nothing was changed"):
        ground.take_database(database, DEMOS)
    assert database.introspection.table_names() == ["tenants_tenant"]


def test_a_demo_that_others_moved_into_is_refused_untouched(database: Any) -> None:
    ground.take_database(database, DEMOS)
    live_in(database, "acme", "real-customer")
    with pytest.raises(ground.Unusable, match=r"others use it .*real-customer"):
        ground.take_database(database, DEMOS)
    assert set(database.introspection.table_names()) == {ground.MARK, "tenants_tenant"}


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_what_a_search_path_hides_is_somebodys_too(database: Any) -> None:
    run(database, "CREATE SCHEMA theirs", "CREATE TABLE theirs.ledger (line text)")
    with pytest.raises(ground.Unusable, match=r"theirs\.ledger"):
        ground.take_database(database, DEMOS)


def test_a_database_that_is_not_there_is_said_in_a_line(server_url: str) -> None:
    named = dj_database_url.parse(f"{server_url}/nowhere_at_all")
    connection = ConnectionHandler({"default": named})["default"]
    with pytest.raises(ground.Unusable, match=r'DATABASE_URL .*"nowhere_at_all" does not exist'):
        ground.take_database(connection, DEMOS)


def test_urls_that_are_named_are_built_upon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgres://a/b")
    monkeypatch.setenv("REDIS_URL", "redis://c")
    with ground.ground(tmp_path, full=False) as under:
        assert (under.database, under.redis) == ("postgres://a/b", "redis://c")
        assert str(under) == "rows in PostgreSQL, messages in Redis, sessions in SQLite"
