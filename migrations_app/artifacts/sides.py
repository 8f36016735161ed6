"""Both sides' artifact services, opened for a step, and the columns that belong to each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from durable.errors import Refused
from migrations_app import copying
from migrations_app.domain.phases import REVERSED
from migrations_app.models import ArtifactVersion, TenantMigration
from migrations_app.ports import artifacts as port
from migrations_app.ports.artifacts import Sessions
from tenants.models import Store

PAGE = 500


class NotToldApart(Refused):
    """PREPARE did not make sure that both sides keep their artifacts in two places."""


class ArtifactsLost(Refused):
    """A side that had the tenant's artifacts answers as if it never had any."""


@dataclass(frozen=True)
class Side:
    """One side of a move: its service, and its columns of ArtifactVersion."""

    name: str  # source or target
    port: port.ArtifactStore
    store: Store

    def version(self, line: ArtifactVersion) -> int:
        return int(getattr(line, f"{self.name}_version"))

    def digest(self, line: ArtifactVersion) -> str:
        return str(getattr(line, f"{self.name}_digest"))

    def stamp(self, line: ArtifactVersion) -> str:
        return str(getattr(line, f"{self.name}_stamp"))

    def proven(self, line: ArtifactVersion, stamp: str) -> bool:
        """Whether a version with this stamp is, to the byte, what the line says."""
        return self.port.stamps and stamp != "" and stamp == self.stamp(line)

    def columns(self, version: int, digest: str, stamp: str) -> dict[str, int | str]:
        """Return what a line says of this side."""
        return {
            f"{self.name}_version": version,
            f"{self.name}_digest": digest,
            f"{self.name}_stamp": stamp,
        }


class _OfMove(Sessions):
    """Who is in a session store, and whoever the move has a line of.

    Its session may be deleted, and its artifacts still there.
    """

    def __init__(self, stack: ExitStack, move: TenantMigration, store: Store) -> None:
        super().__init__(stack, lambda: copying.opened(move, store))
        self._move = move

    def users(self) -> Iterator[str]:
        yield from super().users()
        lines = self._move.artifact_versions.order_by().values_list("user_id", flat=True)
        yield from lines.distinct().iterator(chunk_size=PAGE)

    def sessions(self, user_id: str) -> Iterator[str]:
        yield from (found := set(super().sessions(user_id)))
        lines = self._move.artifact_versions.filter(user_id=user_id).exclude(session_id="")
        rest = lines.order_by().values_list("session_id", flat=True).distinct()
        yield from [session for session in rest if session not in found]


def go_along(move: TenantMigration) -> bool:
    """Return whether artifacts move: both sides keep some, in two places.

    Raises NotToldApart.
    """
    if not (move.source_store.artifacts_from and move.target_store.artifacts_from):
        return False
    if move.source_store.artifacts_from == move.target_store.artifacts_from:
        return False
    if move.artifacts_apart is None:
        raise NotToldApart(
            f"{move.source_store} and {move.target_store} were given artifact services after {move}"
            " began, so nobody has told their places apart. Abort it and start anew."
        )
    return move.artifacts_apart


@contextmanager
def one(move: TenantMigration, name: str) -> Iterator[Side]:
    """Open the artifact service of the move's source or target."""
    store = move.source_store if name == "source" else move.target_store
    with (
        ExitStack() as stack,
        port.open_artifacts(
            store.artifacts_from,
            app_name=move.tenant.app_name,
            known=_OfMove(stack, move, store),
        ) as opened,
    ):
        yield Side(name, opened, store)


@contextmanager
def both(move: TenantMigration) -> Iterator[tuple[Side, Side]]:
    """Open (where data is read, where it is written). Raises ArtifactsLost."""
    names = ("target", "source") if move.phase in REVERSED else ("source", "target")
    with one(move, names[0]) as read, one(move, names[1]) as written:
        if move.artifact_versions.exclude(source_digest="").exclude(target_digest="").exists():
            for side in (read, written):
                _check_place(move, side)
        yield read, written


def _check_place(move: TenantMigration, side: Side) -> None:
    """Raise ArtifactsLost where a volume is not mounted, or a process has lost its memory.

    Taken for a tenant whose artifacts were all deleted, it would empty the other side as well.
    """
    if not side.port.has_place:
        raise ArtifactsLost(
            f"{side.store} answers as if it had never kept an artifact of"
            f" {move.tenant.app_name}, of whom {move} has copied some. Bring its volume back, or"
            " abort the move."
        )
