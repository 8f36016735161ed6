"""Before the first artifact goes over: two places, told apart, and room where they go."""

from __future__ import annotations

from dataclasses import dataclass

from migrations_app.artifacts import removal, sides
from migrations_app.copying import Timer
from migrations_app.models import TenantMigration
from migrations_app.ports import artifacts as port
from migrations_app.preflight import ARTIFACTS, Check, holds_artifacts


@dataclass(frozen=True)
class Prepared:
    """What PREPARE knows of artifacts now."""

    # The move's `artifacts_apart`.
    apart: bool | None
    check: Check | None
    # False: what an ended move left is being removed; call again.
    cleared: bool = True


def told_apart(move: TenantMigration) -> bool | None:
    """Return whether two places keep both sides' artifacts; None where one side keeps none.

    Writes a nonce at the target, and deletes it.
    """
    source, target = move.source_store, move.target_store
    if not (source.artifacts_from and target.artifacts_from):
        return None
    if port.same_address(source.artifacts_from, target.artifacts_from):
        return False
    with sides.one(move, "source") as ours, sides.one(move, "target") as theirs:
        return not port.same_place(theirs.port, ours.port)


def prepare(move: TenantMigration, *, leftovers: bool, timer: Timer) -> Prepared:
    """Tell the places of both sides' artifacts apart, and make sure that the target's is empty.

    `leftovers` says that the target's session store stands behind the guard row of an ended move:
    what lies there is that move's copy, and is removed. Otherwise somebody's artifacts stay,
    and the check says so.
    """
    source, target = move.source_store, move.target_store
    apart = told_apart(move)
    if not apart:
        one = f"{source} and {target} keep them in one place: none is copied"
        return Prepared(apart, None if apart is None else Check(ARTIFACTS, True, one))
    with sides.one(move, "target") as theirs:
        if not move.artifact_versions.exists() and holds_artifacts(theirs.port):
            if not leftovers:
                detail = (
                    f"{target} keeps artifacts of {move.tenant.app_name} since a moment ago. Look"
                    " who writes there; they were left as they are."
                )
                return Prepared(True, Check(ARTIFACTS, False, detail))
            if not removal.clear(move, theirs, timer=timer):
                return Prepared(True, None, cleared=False)
    detail = "a word written to one place is not seen in the other"
    return Prepared(True, Check(ARTIFACTS, True, detail))
