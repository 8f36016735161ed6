"""The disk copy: what a process restarted during an outage of the control plane serves from.

It holds the policy that this process's predecessor had applied, and until when that one's lease
runs. A restarted process that can't join lets turns in by that policy, up to that moment: it is
in the place of a process that could have served until then anyway. What makes that safe:

- **It never speaks as its predecessor.** It serves under the old id's lease and reports under an
  id of its own. Did it report as the old one, "nobody inside" would be a word about turns that it
  never counted: a killed process's last commit may still be on its way through the database. So
  nobody answers for the old id again, and a fence waits until its lease plus its longest turn are
  over, as for any process that was killed. Its numbers (`seq`, `boot`) are not in the copy: nobody
  needs them, and the control plane would refuse them.
- **Its turns end in the old id's time.** A turn begins before the old lease's end and is cut at
  this process's longest turn; a copy of a process that had stated a shorter one is not used.
- **A version is here before it is reported.** Else a fence is proven by "version 7 applied, nobody
  inside", and the restarted process opens it again at version 6. Grants alike: a smaller share is
  here before the control plane gives the rest to somebody else. What can't be written is removed;
  what can't be removed either is not applied (`DiskStuck`).
- **An id that has ended leaves no copy.** It is removed before the process leaves, and as soon as
  it hears that its id is gone. Who declares an instance dead vouches for its copy as well: a
  process that comes back within the lease serves from it (docs/runtime-protocol.md).
- **One process uses it,** the one that holds the lock; the kernel gives it back when that process
  ends, and not before. Another starts with none.
- **Lease ends are told in the clock of one boot** of one host, which begins at 0 with the next.

The files hold no secret: tenants, store keys and limits, as the control plane sends them.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_runtime.errors import ControlPlaneError
from agent_runtime.policy import Policy

log = logging.getLogger(__name__)

# Another spelling of the files: a copy of another one is ignored.
FORMAT = 1
# The lease's end is renewed with each report and written this often: an older end is a safe one.
LEASE_EVERY_SECONDS = 10.0
# Deltas are appended. Once they are longer than the first part, and than this, all is one again.
MERGE_OVER_BYTES = 1_000_000


class DiskStuck(ControlPlaneError):
    """The disk copy can be neither written nor removed, so what was sent is not applied.

    Reported as applied it would be a promise that the next start of this process breaks.
    """


@dataclass(frozen=True, slots=True)
class Kept:
    """What a restarted process goes on with."""

    # Of the process before; only for the log. The restarted one joins under another.
    instance: str
    policy: Policy
    # Boot time.
    lease_until: float
    # Tenant -> share, as sent, of the grants that were applied last.
    grants: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Whose:
    """Who may use a copy: a process that stands in the place of the one that wrote it."""

    plane: str
    cell: str
    longest_turn_seconds: float


def this_boot() -> str:
    """Return what tells this boot of this host, and its boot clock, from every other; "": unknown.

    >>> this_boot() == this_boot()
    True
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    try:
        # A container's clock may be shifted against its host's.
        shift = Path("/proc/self/timens_offsets").read_text().split()
    except OSError:
        shift = []
    return " ".join([boot, *shift])


class DiskCopy:
    """The copy at `path`, for one `PolicyClient`. Linux; on a disk of this host.

    Made of three files: `path` itself, beside it one that ends in `.lease` and one in `.lock`.
    Called by one thread at a time. A forked child has none.
    """

    def __init__(self, path: str | os.PathLike[str], *, boot: Callable[[], str] = this_boot):
        """Name a place; nothing is opened. `boot` tells boots of hosts apart."""
        self._log = Path(path)
        self._lease = self._log.with_name(self._log.name + ".lease")
        self._lock = self._log.with_name(self._log.name + ".lock")
        self._boot = boot()
        self._whose: Whose | None = None
        self._descriptor: int | None = None
        # The id that the files are of; "": they are no copy.
        self._instance = ""
        self._first_bytes = self._later_bytes = 0
        self._grants: Mapping[str, Any] = {}
        self._until = self._written_until = 0.0

    @property
    def held(self) -> bool:
        """Whether this process holds the lock: if not, it reads and writes nothing."""
        return self._descriptor is not None

    def open(self, whose: Whose, *, now: float) -> Kept | None:
        """Take the lock; return what can be gone on with at boot time `now`, if anything."""
        self._whose = whose
        if not self._boot:
            log.warning("this host does not tell its boots apart: no disk copy is kept")
            return None
        if not self._take_lock():
            log.warning("another process holds %s: this one keeps no disk copy", self._lock)
            return None
        try:
            kept = self._read(whose, now)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("the disk copy %s can't be used: %r", self._log, error)
            kept = None
        if kept is None:
            try:
                self.erase()
            except DiskStuck as error:
                # Of no use to us, and of none to others beyond what its lease says.
                log.warning("%s: this process keeps no disk copy", error)
                self.close()
        return kept

    def policy(self, instance: str, answer: Mapping[str, Any]) -> None:
        """Keep an answer to a poll; call it before it is applied. Raises DiskStuck."""
        if not self.held or self._whose is None:
            return
        try:
            if answer["full"] is True:
                self._begin(instance, answer)
            elif instance == self._instance:
                self._append(answer)
        except OSError as error:
            log.warning("the disk copy %s can't be written: %s", self._log, error)
            self.erase()

    def lease(self, instance: str, until: float) -> None:
        """Keep until when the lease runs, in boot time."""
        if not self.held or instance != self._instance:
            return
        self._until = max(self._until, until)
        if until - self._written_until >= LEASE_EVERY_SECONDS:
            self._write_lease()

    def grants(self, instance: str, grants: Mapping[str, Any]) -> None:
        """Keep tenants' shares, as sent; call it before they are applied. Raises DiskStuck."""
        if not self.held or instance != self._instance:
            return
        self._grants = grants
        if self._written_until:
            self._write_lease()

    def erase(self) -> None:
        """Remove the copy: nobody may go on as that id. Raises DiskStuck."""
        if not self.held:
            return
        self._instance, self._grants = "", {}
        self._until = self._written_until = 0.0
        try:
            self._lease.unlink(missing_ok=True)
            self._sync_directory()
        except OSError as error:
            raise DiskStuck(f"the disk copy {self._log} can't be removed: {error}") from error
        with suppress(OSError):
            # Without a lease it is no copy.
            self._log.unlink(missing_ok=True)

    def close(self) -> None:
        """Give the lock back; the copy stays for the next process."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _take_lock(self) -> bool:
        if self.held:
            return True
        # A file of its own, never replaced: a lock is of a file, not of its name.
        self._lock.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        # A forked child shares the lock: it would keep it after its parent has ended. Closed
        # there, it is still the parent's.
        close = weakref.WeakMethod(self.close)
        os.register_at_fork(after_in_child=lambda: (found := close()) and found())
        return True

    def _read(self, whose: Whose, now: float) -> Kept | None:
        if not self._lease.exists():
            return None
        (lease,) = _lines(self._lease)
        head, *deltas = _lines(self._log)
        if (head["format"], head["boot"]) != (FORMAT, self._boot) or lease["boot"] != self._boot:
            return None
        if lease["instance"] != head["instance"]:
            return None  # Ended between two writes.
        if (head["plane"], head["cell"]) != (whose.plane, whose.cell):
            return None
        if float(head["longest_turn_seconds"]) < whose.longest_turn_seconds:
            return None
        until = float(lease["until"])
        if now >= until:
            return None
        policy = Policy.whole(head["answer"])
        for delta in deltas:
            policy = policy.after(delta)
        return Kept(str(head["instance"]), policy, until, lease["grants"])

    def _begin(self, instance: str, answer: Mapping[str, Any]) -> None:
        """Keep a full policy instead of all that was kept."""
        assert self._whose is not None
        if instance != self._instance:
            # The lease that is on the disk is another id's; until this one's own is there, the
            # two files name two ids, and are no copy.
            self._grants, self._until, self._written_until = {}, 0.0, 0.0
        head = {
            "format": FORMAT,
            "boot": self._boot,
            "instance": instance,
            "plane": self._whose.plane,
            "cell": self._whose.cell,
            "longest_turn_seconds": self._whose.longest_turn_seconds,
            "answer": answer,
        }
        self._first_bytes = self._replace(self._log, head)
        self._later_bytes = 0
        self._instance = instance

    def _append(self, answer: Mapping[str, Any]) -> None:
        line = _line(answer)
        if self._later_bytes + len(line) > max(MERGE_OVER_BYTES, self._first_bytes):
            head, *deltas = _lines(self._log)
            self._begin(self._instance, _merged([head["answer"], *deltas, answer]))
            return
        descriptor = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            if os.write(descriptor, line) != len(line):
                raise OSError("it was written in part")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._later_bytes += len(line)

    def _write_lease(self) -> None:
        lease = {
            "boot": self._boot,
            "instance": self._instance,
            "until": self._until,
            "grants": self._grants,
        }
        try:
            self._replace(self._lease, lease)
            self._written_until = self._until
        except OSError as error:
            log.warning("the disk copy %s can't be written: %s", self._log, error)
            self.erase()

    def _replace(self, path: Path, content: Mapping[str, Any]) -> int:
        """Write a file so that a crash leaves the old one or the new one; return its length."""
        line = _line(content)
        new = path.with_name(path.name + ".new")
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        # Else the name may still lead to the old one after a crash of the host. The boot id
        # forbids that copy then; but nobody has to know.
        self._sync_directory()
        return len(line)

    def _sync_directory(self) -> None:
        try:
            descriptor = os.open(self._log.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return  # Somebody removed it, and with it what was there.
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _line(content: Mapping[str, Any]) -> bytes:
    spelled = json.dumps(content, separators=(",", ":"))
    return f"{hashlib.sha256(spelled.encode()).hexdigest()} {spelled}\n".encode()


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return a file's lines. Raises ValueError if any of it is not as it was written.

    Of a line that was half written when its process was killed nobody knows whether it had been
    reported: better no copy than one version too few.
    """
    found = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        digest, _, spelled = line.partition(b" ")
        if hashlib.sha256(spelled).hexdigest().encode() != digest:
            raise ValueError("a line is not as it was written")
        found.append(json.loads(spelled))
    if not path.read_bytes().endswith(b"\n"):
        raise ValueError("the last line was not written to its end")
    return found


def _merged(answers: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the full answer that a full one and its deltas come to."""
    tenants: dict[str, Any] = {}
    cell = None
    for answer in answers:
        tenants |= {entry["tenant"]: entry for entry in answer["tenants"]}
        cell = cell if answer["cell"] is None else answer["cell"]
    return {**answers[-1], "full": True, "cell": cell, "tenants": list(tenants.values())}
