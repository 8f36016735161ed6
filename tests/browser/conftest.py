"""A real Chromium on a real server. The pages' own clock is the database's: scenes are made now."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import connections
from django.test import Client
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from durable.clock import database_now
from tenants.domain.roles import Role
from tests import make, scene

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def chromium(django_db_setup: None) -> Iterator[Browser]:
    """One browser a module.

    No longer: Playwright's loop stands in this thread while it lives, and other tests run
    loops of their own. Django must not mind it, and must go on with its one connection: beside
    a loop it would open another, which knows nothing of the rows to put back.
    """
    ours = connections["default"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "true")
        with sync_playwright() as playwright:
            connections["default"] = ours
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
            yield browser
            browser.close()


@dataclass
class Window:
    """A page of somebody signed in, and what its console said."""

    page: Page
    url: str
    problems: list[str] = field(default_factory=list)

    def open(self, path: str) -> Page:
        self.page.goto(self.url + path)
        return self.page

    def listen(self) -> None:
        def said(message: Any) -> None:
            if message.type in ("error", "warning"):
                self.problems.append(message.text)

        self.page.on("console", said)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))


Windows = Callable[..., Window]


@pytest.fixture
def windows(live_server: Any, chromium: Browser) -> Iterator[Windows]:
    """Open windows for people of a role; a console that complained fails the test."""
    opened: list[tuple[BrowserContext, Window, bool]] = []

    def open_window(
        role: Role | None = Role.OPERATOR,
        *,
        width: int = 1440,
        scheme: str = "light",
        javascript: bool = True,
        calm: bool = True,
    ) -> Window:
        context = chromium.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=scheme,
            java_script_enabled=javascript,
        )
        if role is not None:
            client = Client()
            client.force_login(scene.person(f"{role.value}-{len(opened)}", role))
            cookie = client.cookies["sessionid"]
            context.add_cookies(
                [{"name": "sessionid", "value": cookie.value, "url": live_server.url}]
            )
        window = Window(context.new_page(), live_server.url)
        window.page.set_default_timeout(15_000)
        window.listen()
        opened.append((context, window, calm))
        return window

    yield open_window
    said = [window.problems for _, window, calm in opened if calm]
    for context, window, _ in opened:
        # The server's threads end their answers before its database is emptied.
        window.page.goto("about:blank")
        context.close()
    assert not any(said), said


@pytest.fixture
def at(transactional_db: None) -> datetime:
    """The database's clock."""
    return database_now()


@pytest.fixture
def here(at: datetime) -> make.Cast:
    """The cast, with live instances in both cells."""
    cast = make.cast(now=at - timedelta(days=4))
    scene.instances(cast.cell, ["eu1-a-1", "eu1-a-2", "eu1-a-3"], now=at)
    scene.instances(cast.other_cell, ["eu1-b-1"], now=at, stores=["store-eu1-b"])
    return cast
