"""PostgreSQL, Redis and Chromium for one command: yours, or throw-away ones that end with it.

`python -m bench.servers -- pytest` runs pytest with DATABASE_URL, REDIS_URL and CHROMIUM
set. A URL that is set already is used as it is. Otherwise a private server starts from
what is installed, on a free port of this machine, its data in a temporary directory; it
ends with the command, however that ends. As root on Debian, what is missing is
installed; elsewhere one line says what to install.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

PACKAGES = {"postgres": "postgresql", "redis-server": "redis-server", "chromium": "chromium"}
# A server that is not up, or not down, after so long never will be.
START_SECONDS = 30.0
STOP_SECONDS = 10.0
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


class Missing(Exception):
    """A server is not installed, and can't be installed from here."""


def find(program: str) -> str | None:
    """Return the path of `postgres`, `initdb`, `redis-server` or `chromium`; None if absent.

    Debian keeps PostgreSQL's programs off PATH; the newest version wins.
    """
    if program == "chromium":
        if path := os.environ.get("CHROMIUM"):
            return path
        return next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if program in ("postgres", "initdb"):
        versions = Path("/usr/lib/postgresql").glob(f"*/bin/{program}")
        newest = sorted(versions, key=lambda path: float(path.parts[-3]), reverse=True)
        if newest:
            return str(newest[0])
    return shutil.which(program)


def require(programs: Sequence[str]) -> None:
    """Install what is missing of `programs` (root on Debian), or raise Missing with one line."""
    missing = [program for program in programs if find(program) is None]
    if not missing:
        return
    packages = " ".join(PACKAGES[program] for program in missing)
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise Missing(f"Install these first: {packages} (Debian: apt-get install {packages})")
    print(f"Installing {packages}...", file=sys.stderr, flush=True)
    apt = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        ["apt-get", "update", "-qq"],
        ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages.split()],
    ):
        subprocess.run(
            command, env=apt, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
    if still := [program for program in missing if find(program) is None]:
        raise Missing(f"apt-get installed {packages}, yet {', '.join(still)} can't be found")


def free_port() -> int:
    """Return a TCP port of this machine that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def postgres(*, durable: bool = False) -> Iterator[str]:
    """Run a private PostgreSQL server; yields its URL, database `switchyard`.

    Not durable: its data ends with it, so nothing waits for a disk. What is measured is
    measured on a durable one.
    """
    server, initdb = _program("postgres"), _program("initdb")
    with TemporaryDirectory(prefix="switchyard-postgres-") as name:
        home, password, port = Path(name), secrets.token_urlsafe(16), free_port()
        # PostgreSQL refuses to run as root, so there it runs as a normal user.
        user: list[str] = []
        if os.geteuid() == 0:
            uid, gid = _normal_user()
            user = [f"--reuid={uid}", f"--regid={gid}", "--clear-groups"]
            os.chown(home, uid, gid)
        (home / "password").write_text(password)
        (home / "password").chmod(0o644)  # the directory is its owner's only
        subprocess.run(
            [
                *(["setpriv", *user] if user else []),
                *(initdb, "-D", str(home / "data"), "-U", "postgres", "-A", "scram-sha-256"),
                *(f"--pwfile={home / 'password'}", "-E", "UTF8", "--locale=C"),
                *([] if durable else ["--no-sync"]),
            ],
            check=True,
            cwd="/",
            stdout=subprocess.DEVNULL,
        )
        command = [
            *(server, "-D", str(home / "data"), "-h", "127.0.0.1", "-p", str(port)),
            *("-c", "unix_socket_directories=", "-c", "max_connections=200"),
            *([] if durable else ["-c", "fsync=off", "-c", "full_page_writes=off"]),
        ]
        address = f"postgres://postgres:{password}@127.0.0.1:{port}"
        # SIGINT is a fast shutdown: open connections are closed, nothing is waited for.
        with _running(command, home / "log", stop=signal.SIGINT, setpriv=user) as process:
            _until(lambda: _create_database(f"{address}/postgres"), process, home / "log")
            yield f"{address}/switchyard"


@contextmanager
def redis() -> Iterator[str]:
    """Run a private Redis server that keeps nothing; yields its URL."""
    server = _program("redis-server")
    with TemporaryDirectory(prefix="switchyard-redis-") as name:
        port = free_port()
        command = [
            *(server, "--bind", "127.0.0.1", "--port", str(port), "--dir", name),
            *("--save", "", "--appendonly", "no"),
        ]
        log = Path(name, "log")
        with _running(command, log, stop=signal.SIGTERM) as process:
            _until(lambda: _listens(port), process, log)
            yield f"redis://127.0.0.1:{port}/0"


@contextmanager
def environment(*, browser: bool = True, durable: bool = False) -> Iterator[dict[str, str]]:
    """Yield the variables that name the servers, starting those that nobody named."""
    wanted = [
        *([] if os.environ.get("DATABASE_URL") else ["postgres"]),
        *([] if os.environ.get("REDIS_URL") else ["redis-server"]),
        *(["chromium"] if browser else []),
    ]
    require(wanted)
    with ExitStack() as stack:
        found = {
            "DATABASE_URL": os.environ.get("DATABASE_URL")
            or stack.enter_context(postgres(durable=durable)),
            "REDIS_URL": os.environ.get("REDIS_URL") or stack.enter_context(redis()),
            # The product's own files (secret key, beat's schedule) stay out of the checkout.
            "SWITCHYARD_HOME": stack.enter_context(TemporaryDirectory(prefix="switchyard-home-")),
        }
        if browser:
            found["CHROMIUM"] = _program("chromium")
        yield found


def run(command: Sequence[str], extra: Mapping[str, str]) -> int:
    """Run `command` to its end and return its exit code; SIGTERM and Ctrl-C reach it."""
    # Ctrl-C reaches the command by itself (one terminal): here it must not end the
    # wait, or the servers would go before the command has. A handler, for SIG_IGN
    # would be inherited by the command.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    with subprocess.Popen(command, env={**os.environ, **extra}) as process:
        signal.signal(signal.SIGTERM, lambda number, frame: process.terminate())
        code = process.wait()
    return code if code >= 0 else 128 - code


def main(arguments: Sequence[str]) -> int:
    own, separator, command = _split(arguments)
    if not separator or not command:
        print(
            "usage: python -m bench.servers [--no-browser] [--durable] -- COMMAND [ARGUMENT...]",
            file=sys.stderr,
        )
        return 2
    options = ArgumentParser(prog="python -m bench.servers")
    options.add_argument("--no-browser", action="store_true", help="the command drives none")
    options.add_argument("--durable", action="store_true", help="as a real server: to measure on")
    chosen = options.parse_args(own)
    # Ended while a server starts: clean up as at any other end.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        with environment(browser=not chosen.no_browser, durable=chosen.durable) as found:
            return run(command, found)
    except Missing as missing:
        print(missing, file=sys.stderr)
        return 1


def _split(arguments: Sequence[str]) -> tuple[list[str], bool, list[str]]:
    """Return what stands before the first "--", whether there is one, and what stands behind."""
    if "--" not in arguments:
        return list(arguments), False, []
    at = list(arguments).index("--")
    return list(arguments[:at]), True, list(arguments[at + 1 :])


def _program(name: str) -> str:
    path = find(name)
    if path is None:
        raise Missing(f"{name} is not installed")
    return path


def _normal_user() -> tuple[int, int]:
    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            entry = pwd.getpwnam(name)
            return entry.pw_uid, entry.pw_gid
    raise Missing("PostgreSQL can't run as root, and there is no user postgres or nobody")


@contextmanager
def _running(
    command: Sequence[str], log: Path, *, stop: signal.Signals, setpriv: Sequence[str] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    # pdeathsig: the server ends even when this process is killed and can't end it.
    # A session of its own: Ctrl-C in the terminal is for the command, not for the server.
    wrapper = ["setpriv", *setpriv, "--pdeathsig", stop.name.removeprefix("SIG"), "--"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*wrapper, *command],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.send_signal(stop)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _until(ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    limit = time.monotonic() + START_SECONDS
    while not ready():
        if process.poll() is not None or time.monotonic() > limit:
            raise Missing(f"A server did not start: {log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.05)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _create_database(address: str) -> bool:
    import psycopg

    try:
        with psycopg.connect(address, autocommit=True) as connection:
            connection.execute("CREATE DATABASE switchyard")
    except psycopg.OperationalError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
