"""`make demo`: one tenant moves between two stores while agents keep talking to it.

Everything runs on this machine, below ./var/demo, made afresh each time: real web, worker
and beat processes, and agent processes with real google-adk Runners. The databases are
SQLite and the broker is files, unless DATABASE_URL and REDIS_URL name servers; with `--stack
full` all of it, the agents' stores too, is on PostgreSQL and Redis that end with the demo. At
the end every event that a client was told of is looked for in the store where its tenant
then lives.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from bench import servers
from bench.ground import Ground, Unusable, check_broker, ground, take_database
from platform_admin.processes import KeepsDying, Supervisor, installation

if TYPE_CHECKING:
    from bench.audit_events import Verdict
    from bench.scene import Scene
    from migrations_app.models import TenantMigration
    from tenants.domain.roles import Role

HOME = Path(__file__).resolve().parent.parent / "var" / "demo"
MOVED, TARGET_CELL, TARGET_STORE = "acme", "cell-eu1-b", "store-eu1-b"
FLEETS = ("agents-1", "agents-2")
# 100 sessions take eight seconds: fast for a demo, slow enough to be watched.
PACE_PER_SECOND = 12.0
SOAK_SECONDS = 5.0
# A killed worker costs this much, not more.
LEASE_SECONDS = 15.0
# Traffic before the move, so that there is something to keep.
WARM_SECONDS = 3.0
FILL_SECONDS, READY_SECONDS, MOVE_SECONDS = 180.0, 60.0, 300.0
# A refusal is told to a client a moment after the fence, by the client's own clock.
SLACK_SECONDS = 2.0


class DemoFailed(Exception):
    """The demo can't go on; the message says why, in words for whoever started it."""


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--once", action="store_true", help="exit when the migration has ended")
    options.add_argument("--stack", choices=["own", "full"], default="own")
    chosen = options.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        with _alone(), ground(_emptied(HOME), full=chosen.stack == "full") as under:
            return _run(under, chosen.once)
    except KeyboardInterrupt:
        print("\nStopped.")
        return 130 if chosen.once else 0
    except (DemoFailed, KeepsDying, Unusable, servers.Missing) as error:
        print(f"\nThe demo failed: {error}", file=sys.stderr)
        return 1


@contextmanager
def _alone() -> Iterator[None]:
    HOME.parent.mkdir(parents=True, exist_ok=True)
    with (HOME.parent / "demo.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DemoFailed(f"another one is running in {HOME}.") from None
        yield


def _emptied(home: Path) -> Path:
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    return home


def _run(under: Ground, once: bool) -> int:
    print("Making the schema and three tenants", flush=True)
    began, port = time.monotonic(), servers.free_port()
    address = f"http://127.0.0.1:{port}"
    scene = _prepare(under)
    from durable.clock import database_now
    from tenants.domain.roles import Role

    with Supervisor(HOME / "log") as supervisor:
        tokens = scene.onboard(now=database_now())
        people = [_sign_in(role) for role in (Role.OPERATOR, Role.ADMIN)]
        print(f"Three tenants in two cells over two stores: {under}. Logs are in {HOME / 'log'}.")
        supervisor.start(*installation(port), *scene.fills())
        _fill(supervisor, scene)
        _wait_for_web(supervisor, address)
        supervisor.start(*scene.fleets(FLEETS, address=address, tokens=tokens, think_seconds=0.6))
        _warm(supervisor)
        move = _start_move()
        _watch(supervisor, move)
        supervisor.stop(*FLEETS)
        verdict = _count(supervisor, scene, move)
        print(f"{time.monotonic() - began:.0f} s in all.")
        print(verdict, flush=True)
        if once:
            return 0 if verdict.clean else 1
        supervisor.start(*scene.fleets(FLEETS, address=address, tokens=tokens, think_seconds=2.0))
        print(f"\n{address}/")
        for user, password in people:
            print(f"  sign in as {user:<8}  password {password}")
        print("Some acts take an admin, or a second person: there is one of each.")
        print("The agents talk on: move another tenant. Ctrl-C ends everything.", flush=True)
        while True:
            _tend(supervisor)
            # For `python -m bench.audit_events`, whenever somebody asks.
            scene.note_homes()
            time.sleep(0.25)


def _prepare(under: Ground) -> Scene:
    """Make the schema afresh, and set this process up as one of the demo's."""
    named = {name: os.environ.get(name) for name in ("DATABASE_URL", "REDIS_URL")}
    os.environ.update(
        {
            "DJANGO_SETTINGS_MODULE": "platform_admin.settings",
            "SWITCHYARD_HOME": str(HOME),
            "DATABASE_URL": under.database,
            "REDIS_URL": under.redis,
            "DURABLE_LEASE_SECONDS": str(LEASE_SECONDS),
            # google-adk announces its experimental parts; a log is for what one can act on.
            "PYTHONWARNINGS": "ignore",
        }
    )
    import django
    from django.core.management import call_command

    django.setup()
    from django.db import connection

    from bench.scene import Resident, Scene

    source, target = under.stores
    scene = Scene(
        home=HOME,
        stores=under.stores,
        cells={source: "cell-eu1-a", target: TARGET_CELL},
        # 500 filled turns.
        residents=(
            Resident(MOVED, "support", source, sessions=100, clients=2),
            Resident("bolt", "support", source, sessions=25, weight=4.0),
            Resident("core", "billing", target, sessions=125),
        ),
    )
    if named["REDIS_URL"]:
        check_broker()
    if named["DATABASE_URL"]:
        take_database(connection, [resident.tenant for resident in scene.residents])
    os.environ.update(scene.environment)
    call_command("migrate", verbosity=0)
    return scene


def _sign_in(role: Role) -> tuple[str, str]:
    """Make somebody of a role; return name and password."""
    from durable.clock import database_now
    from tenants import services

    person, password = services.add_sign_in(role.value, role=role, by="demo", now=database_now())
    return person.get_username(), password


def _fill(supervisor: Supervisor, scene: Scene) -> None:
    names = [process.name for process in scene.fills()]
    # google-adk takes seconds to load: they are no part of the rate.
    first: tuple[float, int] | None = None
    with _Line() as line:
        for _ in _until(supervisor, FILL_SECONDS, "filling two stores"):
            running = any(map(supervisor.running, names))
            turns = sum(path.read_bytes().count(b'"kind":"turn"') for path in scene.journals)
            now = time.monotonic()
            first = first or ((now, turns) if turns else None)
            rate = (turns - first[1]) / (now - first[0]) if first and now > first[0] else 0.0
            ahead = _ahead(turns, scene.turns, "turns", rate)
            words = "  ".join(["Filling two stores through google-adk:", *ahead])
            line.show(words, key=_tenth(turns, scene.turns))
            if not running:
                return


def _ahead(done: int, todo: int, what: str, rate: float) -> list[str]:
    """Return how far something is, and at a known rate how fast and how long it still takes.

    >>> _ahead(120, 500, "turns", 20.0)
    ['120 of 500 turns', '20/s, 19 s left']
    """
    words = [f"{done:,} of {todo:,} {what}"]
    if rate > 0 and done < todo:
        words.append(f"{rate:.0f}/s, {(todo - done) / rate:.0f} s left")
    return words


def _tenth(done: int, todo: int) -> str:
    """Return what changes ten times on the way: a log gets a line for each."""
    return str(10 * done // max(todo, 1))


def _wait_for_web(supervisor: Supervisor, address: str) -> None:
    for _ in _until(supervisor, READY_SECONDS, "the pages"):
        try:
            with urllib.request.urlopen(f"{address}/readyz", timeout=5):
                return
        except urllib.error.HTTPError as error:
            if error.code < 500:
                raise DemoFailed(f"{address}/readyz answered {error.code}") from error
        except OSError:
            continue


def _warm(supervisor: Supervisor) -> None:
    """Let agents talk for a while before anything moves."""
    since: float | None = None
    with _Line() as line:
        for _ in _until(supervisor, READY_SECONDS, "the agents"):
            journals = [HOME / "journal" / f"{name}.jsonl" for name in FLEETS]
            talking = all(path.exists() and path.stat().st_size for path in journals)
            line.show("Agents join and begin to talk")
            since = (since or time.monotonic()) if talking else None
            if since is not None and time.monotonic() - since > WARM_SECONDS:
                return


def _start_move() -> TenantMigration:
    from bench.scene import start_move

    return start_move(
        MOVED,
        cell=TARGET_CELL,
        store=TARGET_STORE,
        by="operator",
        reason="the demo moves a tenant",
        soak_seconds=SOAK_SECONDS,
        pace_per_second=PACE_PER_SECOND,
    )


def _watch(supervisor: Supervisor, move: TenantMigration) -> None:
    """Show the move on one line until it has ended."""
    from durable.clock import database_now
    from migrations_app.domain.phases import ENDED

    sweep, first = None, (database_now(), 0)
    with _Line() as line:
        for _ in _until(supervisor, MOVE_SECONDS, "the move to end"):
            move.refresh_from_db()
            now = database_now()
            if sweep != (move.phase, move.passes, move.stage):
                sweep, first = (move.phase, move.passes, move.stage), (now, move.done)
            seconds = (now - first[0]).total_seconds()
            rate = (move.done - first[1]) / seconds if seconds else 0.0
            line.show(
                _progress(move, rate, now), key=f"{move.phase} {_tenth(move.done, move.todo)}"
            )
            if move.phase in ENDED:
                return


def _progress(move: TenantMigration, rate: float, now: datetime) -> str:
    words = [f"{move} {MOVED} to {TARGET_STORE}: {move.phase.upper():<8}"]
    if 0 < move.done < move.todo:
        words += _ahead(move.done, move.todo, "sessions", rate)
    if move.fence_closed_at:
        seconds = ((move.fence_opened_at or now) - move.fence_closed_at).total_seconds()
        words.append(f"fence {'was closed' if move.fence_opened_at else 'closed'} {seconds:.1f} s")
    if move.waiting_for:
        words.append(move.waiting_for)
    if move.failure:
        words.append(move.failure)
    return "  ".join(words)


def _count(supervisor: Supervisor, scene: Scene, move: TenantMigration) -> Verdict:
    from bench.audit_events import audit

    for name, times in supervisor.restarts.items():
        print(f"{name} died and was started again, {times} time(s).")
    verdict = audit(scene.journals, scene.homes())
    refused = sum(verdict.refused.values())
    if move.fence_closed_at and move.fence_opened_at:
        begin, end = move.fence_closed_at.timestamp(), move.fence_opened_at.timestamp()
        outside = verdict.refused_outside(MOVED, begin, end + SLACK_SECONDS)
        print(
            f"{verdict.turns:,} turns; {refused} times a client was told to try again,"
            f" {outside} of them while no fence was closed; {verdict.failed} turns failed."
        )
    for example in verdict.examples:
        print(f"  {example}", file=sys.stderr)
    return verdict


def _until(supervisor: Supervisor, seconds: float, what: str) -> Iterator[None]:
    """Yield every quarter of a second, keeping the children running; raise when it takes long."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        _tend(supervisor)
        yield
        time.sleep(0.25)
    raise DemoFailed(f"waited {seconds:.0f} s for {what}. Logs are in {HOME / 'log'}.")


def _tend(supervisor: Supervisor) -> None:
    for name in supervisor.tend():
        print(f"\n{name} had died and was started again.", flush=True)


class _Line:
    """One line that is written over in a terminal; elsewhere a line whenever its key changes."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._key: str | None = None
        self._shown = self._printed = ""

    def __enter__(self) -> _Line:
        return self

    def show(self, text: str, key: str = "") -> None:
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r{text[:width]:<{width}}", end="", flush=True)
        elif key != self._key:
            print(text, flush=True)
            self._printed = text
        self._key, self._shown = key, text

    def __exit__(self, *exception: object) -> None:
        if self._terminal:
            print(flush=True)
        elif self._shown != self._printed:
            print(self._shown, flush=True)


if __name__ == "__main__":
    sys.exit(main())
