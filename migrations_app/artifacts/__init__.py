"""Artifacts go along: files that agents keep for a session or a user, in versions.

google-adk's artifact services number versions themselves, have no guard and no transaction. So
each version is noted before it is written and known by its digest afterwards
(ArtifactVersion), the claim is looked at right before each write, and which number became
which is kept: it is what stored references are checked against.
"""

from __future__ import annotations

from durable.driver import Clock, holding
from migrations_app.artifacts import sides
from migrations_app.artifacts.prepare import Prepared, prepare, told_apart
from migrations_app.artifacts.references import find_references
from migrations_app.artifacts.removal import left, remove_copied
from migrations_app.artifacts.sides import go_along
from migrations_app.artifacts.sweep import Sweep
from migrations_app.copying import Meter, Swept, Timer
from migrations_app.models import TenantMigration
from migrations_app.ports.artifacts import Name
from migrations_app.ports.base import Key

__all__ = [
    "Prepared",
    "find_late",
    "find_references",
    "go_along",
    "left",
    "prepare",
    "remove_copied",
    "repair",
    "sweep",
    "told_apart",
]

# Repairs that one step does at most.
AT_ONCE = 20
# A repair takes its name as a whole, and a step ends by its hard time limit.
REPAIR_SECONDS = 3600.0


def sweep(move: TenantMigration, *, meter: Meter, timer: Timer, clock: Clock, write: bool) -> Swept:
    """Bring artifacts over (`write`), or compare all of them and name what differs.

    Walks the users of both sides (cursor_user; cursor_session holds how far a user is), whichever
    way data goes. A sweep that writes copies what is new, replaces a name whose history is
    another, removes what was deleted, and looks at bytes where stamps are not the recorded
    ones. One that compares looks at every version's bytes on both sides, but for those whose
    stamps prove them unchanged since they were equal. At its end it has set `artifacts`,
    `artifact_bytes` and `artifact_look_rate`. Nothing where no artifacts go along.
    Raises NotToldApart, ArtifactsLost, and what a service answers.
    """
    if not go_along(move):
        return Swept(Key("", ""), 0, finished=True)
    with sides.both(move) as (read, written):
        work = Sweep(move, read, written, meter=meter, timer=timer, clock=clock, write=write)
        return work.run()


def find_late(move: TenantMigration, *, timer: Timer, clock: Clock) -> Swept:
    """Name the artifacts of the move's closed source that are not as the cutover left them.

    Walks its users (cursor_user). Nothing where no artifacts went along.
    """
    if not move.artifacts_apart:
        return Swept(Key("", ""), 0, finished=True)
    with sides.one(move, "target") as read, sides.one(move, "source") as written:
        work = Sweep(move, read, written, meter=Meter(), timer=timer, clock=clock, write=False)
        return work.find_late()


def repair(move: TenantMigration, *, meter: Meter, clock: Clock) -> int:
    """Do the repairs of artifacts that people asked for; return how many were done.

    A name is deleted where it is written and copied anew, from its first version on. On the way
    back, and for users' own files in a split, nothing that somebody else wrote is: what is missing
    is added, and a late write is replaced only where its acceptance still holds.
    """
    asked = list(
        move.mismatches.filter(resolved_at=None, repair_requested_at__isnull=False)
        .exclude(artifact="")
        .order_by("pk")[:AT_ONCE]
    )
    if asked and go_along(move):
        timer = Timer(REPAIR_SECONDS)
        with sides.both(move) as (read, written):
            work = Sweep(move, read, written, meter=meter, timer=timer, clock=clock, write=True)
            for row in asked:
                work.repair(row.user_id, Name(row.session_id, row.artifact))
    with holding(move):
        # Done, whatever came of it; what did not help may be asked for again.
        move.mismatches.filter(pk__in=[row.pk for row in asked]).update(
            repair_requested_at=None, repair_requested_by=""
        )
    return len(asked)
