"""Takes artifacts away again: what a move wrote (REOPEN), or what it moved from (OFFBOARD)."""

from __future__ import annotations

from collections.abc import Sequence

from durable.driver import holding
from migrations_app.artifacts import sides
from migrations_app.artifacts.sides import Side
from migrations_app.copying import Swept, Timer
from migrations_app.models import ArtifactVersion, TenantMigration
from migrations_app.ports import artifacts as port
from migrations_app.ports.artifacts import ArtifactUnreadable, Listing, Name, spell
from migrations_app.ports.base import Key

PAGE = 500


class OnePlace(port.ArtifactsFailed):
    """Both sides keep the tenant's artifacts in one place, so nothing may be removed there."""


def remove_copied(move: TenantMigration, name: str, *, timer: Timer) -> Swept:
    """Remove from the move's "source" or "target" the names on our list that are as recorded.

    Others stay, and stay on the list: `left` counts them. Walks our list (cursor_session
    holds the last id). Nothing where no artifacts moved. Raises OnePlace.
    """
    last, passed = int(move.cursor_session or 0), 0
    lines = move.artifact_versions.order_by("pk")
    if not lines.filter(pk__gt=last).exists():
        return Swept(Key("", str(last)), 0, finished=True)
    other = "target" if name == "source" else "source"
    with sides.one(move, name) as side, sides.one(move, other) as kept:
        # Looked at each time: an address may lead elsewhere by now, and what is gone is gone.
        if port.same_place(side.port, kept.port):
            raise OnePlace(
                f"{side.store} and {kept.store} keep artifacts in one place by now: nothing was"
                " removed. Look at their addresses."
            )
        user, listing = "", Listing()
        while line := lines.filter(pk__gt=last).first():
            if line.user_id != user:
                user, listing = line.user_id, side.port.listing(line.user_id)
            found = list(lines.filter(user_id=user, session_id=line.session_id, name=line.name))
            # Judged by its first line, and left.
            if found[0].pk == line.pk and _as_recorded(side, user, found, listing):
                _remove(move, side, user, found, listing)
            last, passed = line.pk, passed + 1
            if timer.out:
                return Swept(Key("", str(last)), passed, finished=False)
    return Swept(Key("", str(last)), passed, finished=True)


def left(move: TenantMigration) -> int:
    """Return how many names stayed because they are not as they were recorded."""
    return move.artifact_versions.values("user_id", "session_id", "name").distinct().count()


def clear(move: TenantMigration, side: Side, *, timer: Timer) -> bool:
    """Remove all of the tenant's artifacts on one side; return whether nothing is left.

    What is gone is not found again, so that another step goes on in the middle of a user.
    """
    after = ""
    while users := side.port.users(after, PAGE):
        for user in users:
            for name in side.port.listing(user):
                _look_at_claim(move)
                side.port.delete(user, name)
                if timer.out:
                    return False
            side.port.forget_user(user)
            after = user
            if timer.out:
                return False
    return True


def _look_at_claim(move: TenantMigration) -> None:
    with holding(move):
        # Only looked at: what follows can't be taken back, and is a later claim's if there is one.
        pass


def _remove(
    move: TenantMigration,
    side: Side,
    user: str,
    lines: Sequence[ArtifactVersion],
    listing: Listing,
) -> None:
    _look_at_claim(move)
    listed = _listed(side, listing, lines[0])
    if listed is not None:
        side.port.delete(user, listed)
    with holding(move):
        move.artifact_versions.filter(pk__in=[line.pk for line in lines]).delete()


def _listed(side: Side, listing: Listing, line: ArtifactVersion) -> Name | None:
    """Return a line's name as the service lists it now; None: it is gone."""
    for name, versions in listing.items():
        for common in (name, side.port.placed(name)):
            if versions and (name.session_id, spell(common.name)) == (line.session_id, line.name):
                return name
    return None


def _as_recorded(side: Side, user: str, lines: Sequence[ArtifactVersion], listing: Listing) -> bool:
    """Whether a name has exactly the versions of its lines, each as it was; or is gone."""
    listed = _listed(side, listing, lines[0])
    if listed is None:
        return True
    versions = listing[listed]
    # Noted and not known to be whole: whatever a killed step left there is ours.
    noted = [line for line in lines if not side.digest(line)]
    whole = {side.version(line): line for line in lines if side.digest(line)}
    unknown = [number for number in versions if number not in whole]
    if len(unknown) > len(noted) or any(number not in versions for number in whole):
        return False
    return all(
        side.proven(whole[number], stamp)
        or _digest(side, user, listed, number) == side.digest(whole[number])
        for number, stamp in versions.items()
        if number in whole
    )


def _digest(side: Side, user: str, name: Name, version: int) -> str:
    try:
        return side.port.load(user, name, version).facts.digest
    except ArtifactUnreadable:
        return "unreadable"
