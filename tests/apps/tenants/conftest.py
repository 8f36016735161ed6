"""A runtime instance as the services see it, without HTTP."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

import pytest
from django.db import connection, connections

from tenants import services
from tenants.domain.reports import Report
from tenants.models import Cell, RuntimeInstance

Answer = TypeVar("Answer")


@dataclass
class Process:
    """One process of a cell, and the report that it would send next."""

    cell: Cell
    boot: str = "boot-1"
    longest_turn_seconds: float = 60.0
    key: str = ""
    seq: int = 0

    def join(self, *, now: datetime, replaces: str | None = None) -> RuntimeInstance:
        row = services.join(
            self.cell,
            name=f"agents-{self.boot}",
            build="1.4.2",
            boot=self.boot,
            longest_turn_seconds=self.longest_turn_seconds,
            longest_tool_seconds=30.0,
            plugins=[],
            stores=[],
            replaces=replaces,
            now=now,
        )
        self.key, self.seq = row.key, 0
        return row

    def next_report(self, **said: Any) -> Report:
        self.seq += 1
        return self.report(seq=self.seq, **said)

    def report(self, **said: Any) -> Report:
        plain: dict[str, Any] = {
            "instance": self.key,
            "boot": self.boot,
            "applied_version": "",
            "in_flight": {},
            "in_flight_older": {},
        }
        return Report(**{**plain, **said})

    @property
    def row(self) -> RuntimeInstance:
        return RuntimeInstance.objects.get(key=self.key)


@pytest.fixture
def process() -> type[Process]:
    return Process


def elsewhere(work: Callable[[], Answer]) -> Answer:
    """Do it in another thread, so on another connection, to its end; return what it returns."""
    results: list[Answer] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "the other connection is stuck"
    if errors:
        raise errors[0]
    return results[0]


@contextmanager
def after_statement(number: int, act: Callable[[], None]) -> Iterator[Callable[[], int]]:
    """Act once after the given statement (counted from 0) of this connection.

    Yields a function that says how many statements ran; BEGIN and COMMIT are none.
    """
    ran = 0

    def wrapper(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        nonlocal ran
        result = execute(sql, params, many, context)
        ran += 1
        if ran == number + 1:
            act()
        return result

    with connection.execute_wrapper(wrapper):
        yield lambda: ran


@pytest.fixture(name="elsewhere")
def elsewhere_fixture() -> Callable[[Callable[[], Any]], Any]:
    return elsewhere


@pytest.fixture(name="after_statement")
def after_statement_fixture() -> Callable[..., Any]:
    return after_statement
