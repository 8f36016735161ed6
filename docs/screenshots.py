"""Draw docs/img/move.png anew: `python docs/screenshots.py` (needs the dev tools and Chromium).

It makes a scene in a throw-away SQLite database, serves it in a thread, and takes the picture.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from datetime import timedelta
from pathlib import Path
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

ROOT = Path(__file__).resolve().parent.parent
WIDTH, HEIGHT = 1440, 900


class Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Say nothing: a picture is all that is asked for."""


def main() -> None:
    """Make the scene, serve it, take the picture."""
    with tempfile.TemporaryDirectory() as home:
        os.environ |= {"SWITCHYARD_HOME": home, "DJANGO_SETTINGS_MODULE": "platform_admin.settings"}
        os.environ["DATABASE_URL"] = os.environ["REDIS_URL"] = ""
        sys.path.insert(0, str(ROOT))
        import django

        django.setup()
        from django.core.management import call_command

        call_command("migrate", verbosity=0)
        path, cookie = scene_of_a_move()
        from platform_admin.wsgi import application

        server = make_server("127.0.0.1", 0, application, server_class=Server, handler_class=Quiet)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        picture(f"http://127.0.0.1:{server.server_port}", path, cookie)
        server.shutdown()


def scene_of_a_move() -> tuple[str, str]:
    """Make a move in VERIFY; return its path and the session of an operator."""
    from django.test import Client

    from durable.clock import database_now
    from migrations_app.domain.phases import Phase
    from tenants.domain.roles import Role
    from tests import make, scene

    now = database_now()
    cast = make.cast(now=now - timedelta(days=9))
    rows = scene.instances(cast.cell, [f"eu1-a-{number}" for number in range(1, 7)], now=now)
    for number, row in enumerate(rows):
        scene.said(row, at=now - timedelta(seconds=number % 3), version=7)
    scene.move(cast, Phase.SOAK, now=now, tenant=cast.core, into=31 * 3600)
    scene.move(cast, Phase.BACKFILL, now=now, tenant=cast.bolt)
    move = scene.move(cast, Phase.VERIFY, now=now)
    client = Client()
    client.force_login(scene.person("operator-1", Role.OPERATOR))
    return f"/moves/mv-{move.pk}/", client.cookies["sessionid"].value


def picture(url: str, path: str, cookie: str) -> None:
    """Take the picture of a page."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=os.environ.get("CHROMIUM", "/usr/bin/chromium"),
            args=["--headless", "--no-sandbox", "--disable-gpu"],
        )
        context = browser.new_context(viewport={"width": WIDTH, "height": HEIGHT})
        context.add_cookies([{"name": "sessionid", "value": cookie, "url": url}])
        page = context.new_page()
        page.goto(url + path)
        page.wait_for_selector(".plot .js-line")
        page.screenshot(path=ROOT / "docs" / "img" / "move.png", full_page=True)
        browser.close()


if __name__ == "__main__":
    main()
