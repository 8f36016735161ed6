"""Brings artifacts over, user by user and name by name, or compares them.

A line is written before its version, so whatever a crash leaves on the written side is on our
list. Between both stands what every service does: the number can't be chosen, and a name is
deleted only whole. So a name whose history differs is deleted there and copied anew, from
its first version on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from django.db.models import Count, Sum

from durable.driver import Clock, holding
from durable.errors import Refused
from migrations_app import copying, queries
from migrations_app.artifacts.sides import Side
from migrations_app.copying import Meter, Swept, Timer
from migrations_app.domain.mismatch import Difference, Looks
from migrations_app.domain.phases import REVERSED
from migrations_app.models import ArtifactVersion, Mismatch, TenantMigration
from migrations_app.ports.artifacts import (
    ArtifactsRefused,
    ArtifactUnreadable,
    Facts,
    Name,
    Versions,
    difference,
    spell,
)
from migrations_app.ports.base import Key
from tenants.domain.words import counted

PAGE = 500
# The cursor within a user of whom no name is through yet; before every name's place.
BEGUN = "-"


class ArtifactCountsDiffer(Refused):
    """Counts of one user's artifacts differ although no name does."""


@dataclass
class Found:
    """One name as one side has it."""

    listed: Name
    versions: Versions


@dataclass
class Desk:
    """All of one user's artifacts: both sides' listings, and our lines, by a common name.

    The common name is what both services make of it, as our rows spell it.
    """

    user: str
    here: dict[Name, Found] = field(default_factory=dict)
    there: dict[Name, Found] = field(default_factory=dict)
    lines: dict[Name, list[ArtifactVersion]] = field(default_factory=dict)
    # Names that one of both services keeps as one with another.
    doubled: dict[Name, Name] = field(default_factory=dict)

    def order(self) -> list[tuple[str, Name]]:
        """Return every name behind its place in the cursor's order."""
        names = {*self.here, *self.there, *self.lines}
        return sorted((hashlib.sha256(json.dumps(n).encode()).hexdigest()[:32], n) for n in names)


@dataclass(frozen=True)
class Changes:
    """What of one name is not as our lines say."""

    new: list[int]  # read versions without a line
    extra: list[int]  # written versions without a line
    lost: list[ArtifactVersion]  # gone where it is read
    gone: list[ArtifactVersion]  # gone where it is written
    edited: list[ArtifactVersion]  # in place, where it is read
    altered: list[ArtifactVersion]  # in place, where it is written

    @property
    def at_written(self) -> bool:
        return bool(self.extra or self.gone or self.altered)

    def rewritten(self, newest: int) -> bool:
        """Whether the read side's history differs from what was copied, up to the last copy."""
        return bool(self.lost or self.edited or any(number < newest for number in self.new))


class Sweep:
    """One step's work over the artifacts of a move."""

    def __init__(
        self,
        move: TenantMigration,
        read: Side,
        written: Side,
        *,
        meter: Meter,
        timer: Timer,
        clock: Clock,
        write: bool,
    ) -> None:
        self.move, self.read, self.written = move, read, written
        self.meter, self.timer, self.clock, self.write = meter, timer, clock, write
        self.back = move.phase in REVERSED
        # Agents write on both sides: what our lines don't know is theirs.
        self.split = queries.split_live(move)
        # Look at bytes also where a write sweep leaves that to the comparison.
        self.thorough = not write
        # Lines with new stamps, written down together: a step that proves a thousand versions
        # would wait for a thousand transactions.
        self._proven: list[ArtifactVersion] = []

    # --- walking ------------------------------------------------------------------------------

    def run(self) -> Swept:
        """Go on from the move's cursor until the time is up or every user is through."""
        after, within, passed = self.move.cursor_user, self.move.cursor_session, 0
        while users := self._users(after, within):
            for user in users:
                stands = self._user(user, within)
                within = ""
                if stands:
                    return Swept(Key(user, stands), passed, finished=False)
                after, passed = user, passed + 1
                if self.timer.out:
                    return Swept(Key(after, ""), passed, finished=False)
        self._finish()
        return Swept(Key(after, ""), passed, finished=True)

    def find_late(self) -> Swept:
        """Look, in SOAK, for what somebody wrote at the closed source since the cutover.

        Only that side is read, and bytes only where a stamp is not the recorded one. Goes on from
        the move's cursor, in users. What was deleted there is found by the way back, as for
        sessions.
        """
        after, passed = self.move.cursor_user, 0
        self.back, self.thorough = True, False
        while users := self.written.port.users(after, PAGE):
            for user in users:
                self._late(user)
                after, passed = user, passed + 1
                if self.timer.out:
                    return Swept(Key(after, ""), passed, finished=False)
        # Of whom nothing is there any more.
        told = queries.late_artifacts(self.move).order_by().values_list("user_id", flat=True)
        for user in told.distinct():
            self._late(user)
        return Swept(Key(after, ""), passed, finished=True)

    def _late(self, user: str) -> None:
        desk = Desk(user)
        self._list(desk, self.written, desk.there)
        self._own_lines(desk)
        late = set()
        for name in desk.there:
            lines = desk.lines.get(name, [])
            if any(not self.written.digest(line) for line in lines):
                # Being written when a rollback was stopped: what is unknown there is ours.
                continue
            changes = self._changes(desk, name, lines)
            if changes.extra or changes.altered:
                late.add(name)
                self._report_late(desk, name)
        self._keep_proven()
        # What was named and is as recorded again, or gone.
        told = queries.late_artifacts(self.move).filter(user_id=user)
        rows = told.values_list("pk", "session_id", "artifact")
        if pks := [pk for pk, session, name in rows if Name(session, name) not in late]:
            with holding(self.move):
                Mismatch.objects.filter(pk__in=pks).update(resolved_at=self.clock())

    def _users(self, after: str, within: str) -> list[str]:
        """Return the next users of either side, or named by us, in order; first the one begun."""
        if within:
            return [after]
        pages = [side.port.users(after, PAGE) for side in (self.read, self.written)]
        pages.append([user for user in self._named if user > after][:PAGE])
        ends = [page[-1] for page in pages if len(page) == PAGE]
        users = {user for page in pages for user in page if not ends or user <= min(ends)}
        return sorted(users)

    @cached_property
    def _named(self) -> list[str]:
        """Users of whom something is noted or told: neither side may have them any more.

        Ordered here, as the sides order theirs; a database may do so by another alphabet.
        """
        noted = self._lines().filter(**{f"{self.written.name}_digest": ""})
        told = Mismatch.objects.filter(move=self.move, resolved_at=None).exclude(artifact="")
        pages = (rows.order_by().values_list("user_id", flat=True) for rows in (noted, told))
        return sorted({user for page in pages for user in page.distinct()})

    def _finish(self) -> None:
        """Add up."""
        totals = self._lines().aggregate(versions=Count("pk"), size=Sum("size"))
        self.meter.columns |= {
            "artifacts": totals["versions"],
            "artifact_bytes": totals["size"] or 0,
            "artifact_look_rate": self.meter.rate("artifact look", self.move.artifact_look_rate),
        }

    def _lines(self) -> Any:
        return self.move.artifact_versions

    def _user(self, user: str, within: str) -> str:
        """Do one user's names behind `within`; return where it stands, "" if it is through."""
        stands = self._names(user, within)
        self._keep_proven()
        return stands

    def _keep_proven(self) -> None:
        lines, self._proven = self._proven, []
        if lines:
            with holding(self.move):
                ArtifactVersion.objects.bulk_update(
                    lines, ["source_stamp", "target_stamp"], batch_size=PAGE
                )

    def _names(self, user: str, within: str) -> str:
        desk, stands = self.look(user), within or BEGUN
        order = [(place, name) for place, name in desk.order() if place > within]
        for at, (place, name) in enumerate(order, start=1):
            if not self.name(desk, name):
                return stands
            stands = place
            if self.timer.out and at < len(order):
                return stands
        for name, other in desk.doubled.items():
            why = f"the other side keeps it as one with {json.dumps(other.name)}"
            self._report(desk, name, f"the name: {why}", Looks.CANNOT_HOLD, part="value")
        self._close_forgotten(desk)
        if not self.write and not self.split:
            self._count(desk)
        return ""

    def look(self, user: str) -> Desk:
        """List one user on both sides and in our rows."""
        desk = Desk(user)
        begun = self.meter.timing("artifact look", 0)
        with begun:
            self._list(desk, self.read, desk.here)
            self._list(desk, self.written, desk.there)
        versions = sum(len(found.versions) for found in desk.here.values())
        self.meter.count["artifact look"] += versions
        self._own_lines(desk)
        return desk

    def _own_lines(self, desk: Desk) -> None:
        for line in self._lines().filter(user_id=desk.user).order_by("source_version"):
            desk.lines.setdefault(Name(line.session_id, line.name), []).append(line)

    def _list(self, desk: Desk, side: Side, into: dict[Name, Found]) -> None:
        for listed, versions in side.port.listing(desk.user).items():
            if not versions:
                # Left behind by a save that was refused: there is nothing to read.
                continue
            common = self.written.port.placed(self.read.port.placed(listed))
            name = Name(common.session_id, spell(common.name))
            if name in into:
                desk.doubled[Name(listed.session_id, spell(listed.name))] = into[name].listed
            else:
                into[name] = Found(listed, dict(sorted(versions.items())))

    def _count(self, desk: Desk) -> None:
        """Count both sides anew, last: no service can be closed to whoever got past the fence."""
        listings = [side.port.listing(desk.user) for side in (self.read, self.written)]
        mine, theirs = (
            (sum(map(bool, listing.values())), sum(map(len, listing.values())))
            for listing in listings
        )
        if mine != theirs and not self._open(desk.user).exists():
            raise ArtifactCountsDiffer(
                f"A user has {counted(mine[1], 'version')} of {counted(mine[0], 'artifact')} on"
                f" {self.read.store},"
                f" {theirs[1]:,} of {theirs[0]:,} on {self.written.store}, although each was equal"
                " a moment ago."
            )

    def repair(self, user: str, name: Name) -> None:
        """Bring one name over again, whatever is recorded of it."""
        desk = self.look(user)
        if name in desk.doubled:
            # Only whoever keeps two names as one can mend that.
            return
        self.thorough = True
        if not self.back and self._ours(name):
            self._afresh(desk, name, desk.lines.pop(name, []))
        if name in desk.here:
            self.name(desk, name)
        elif self.back or not self._ours(name):
            self._only_there(desk, name, desk.there.get(name), desk.lines.get(name, []))
        else:
            self._resolve(desk, name)

    # --- one name -----------------------------------------------------------------------------

    def name(self, desk: Desk, name: Name) -> bool:
        """Bring one name over, or compare it; return whether it is through."""
        here, there = desk.here.get(name), desk.there.get(name)
        lines = desk.lines.get(name, [])
        if here is None:
            self._only_there(desk, name, there, lines)
            return True
        if any(not self.written.digest(line) for line in lines):
            lines = self._resumed(desk, name, lines)
        changes = self._changes(desk, name, lines)
        if self.write:
            return self._bring(desk, name, lines, changes)
        self._compare(desk, name, lines, changes)
        return True

    def _changes(self, desk: Desk, name: Name, lines: Sequence[ArtifactVersion]) -> Changes:
        """Hold both listings against our lines, and versions against their digests."""
        here, there = desk.here.get(name), desk.there.get(name)
        read = here.versions if here else {}
        written = there.versions if there else {}
        lost: list[ArtifactVersion] = []
        gone: list[ArtifactVersion] = []
        edited: list[ArtifactVersion] = []
        altered: list[ArtifactVersion] = []
        for side, found, missing, other in (
            (self.read, here, lost, edited),
            (self.written, there, gone, altered),
        ):
            for line in lines:
                if found is None or side.version(line) not in found.versions:
                    missing.append(line)
                elif self._is_other(desk, side, found, line):
                    other.append(line)
        known = [{side.version(line) for line in lines} for side in (self.read, self.written)]
        return Changes(
            new=[number for number in read if number not in known[0]],
            extra=[number for number in written if number not in known[1]],
            lost=lost,
            gone=gone,
            edited=edited,
            altered=altered,
        )

    def _is_other(self, desk: Desk, side: Side, found: Found, line: ArtifactVersion) -> bool:
        """Whether a version is not what its line says, so far as this sweep has to know."""
        version = side.version(line)
        stamp = found.versions[version]
        if side.proven(line, stamp):
            return False
        if not self.thorough and not side.port.stamps and stamp == side.stamp(line):
            # Perhaps edited in place: the comparison will see.
            return False
        # The stamp was read before the bytes: what changes between the two has another.
        if self._digest(desk.user, side, found.listed, version) != side.digest(line):
            return True
        if stamp != side.stamp(line):
            setattr(line, f"{side.name}_stamp", stamp)
            self._proven.append(line)
        return False

    def _bring(
        self, desk: Desk, name: Name, lines: list[ArtifactVersion], changes: Changes
    ) -> bool:
        rewritten = changes.rewritten(self._newest(lines))
        if not self._ours(name):
            # Nothing there is deleted. What was written anew here goes behind what is there.
            stale = {line.pk for line in (*changes.lost, *changes.edited)}
            self._forget([line for line in lines if line.pk in stale])
            lines = [line for line in lines if line.pk not in stale]
            changes = self._changes(desk, name, lines) if stale else changes
        elif self.back:
            if rewritten and not self.thorough:
                changes = self._thoroughly(desk, name, lines)
            # Of a name that is gone at the source nothing is there to be lost.
            late = changes.at_written and name in desk.there
            if late and not self._accepted(desk, name):
                self._report_late(desk, name)
                return True
            if changes.at_written or rewritten:
                self._afresh(desk, name, lines)
                lines, changes = [], self._changes(desk, name, [])
        elif changes.at_written:
            self._name_difference(desk, name, changes)
            return True
        elif rewritten:
            self._afresh(desk, name, lines)
            lines, changes = [], self._changes(desk, name, [])
        for number in changes.new:
            line = self._copy(desk, name, number)
            if line is None:
                return True
            lines.append(line)
            if self.timer.out and number != changes.new[-1]:
                return False
        self._settle(desk, name, lines)
        return True

    def _thoroughly(self, desk: Desk, name: Name, lines: Sequence[ArtifactVersion]) -> Changes:
        """Look at the bytes as well: what is deleted next may be somebody's."""
        self.thorough = True
        try:
            return self._changes(desk, name, lines)
        finally:
            self.thorough = False

    def _ours(self, name: Name) -> bool:
        """Whether nobody but us writes this name on the written side.

        In a split a session's artifacts belong to the side that serves it; users' own are written
        on both. Out of a split the source serves all it has.
        """
        return not self.split or (not self.back and name.session_id != "")

    def _newest(self, lines: Sequence[ArtifactVersion]) -> int:
        return max((self.read.version(line) for line in lines), default=-1)

    def _compare(
        self, desk: Desk, name: Name, lines: list[ArtifactVersion], changes: Changes
    ) -> None:
        # What agents have done there meanwhile is theirs.
        there = changes.at_written and self._ours(name)
        if changes.new or there or changes.rewritten(self._newest(lines)):
            self._name_difference(desk, name, changes)
        else:
            self._settle(desk, name, lines)

    def _only_there(
        self, desk: Desk, name: Name, there: Found | None, lines: list[ArtifactVersion]
    ) -> None:
        """A name that is not, or not any more, where data is read."""
        if there is None:
            self._forget(lines)
            self._resolve(desk, name)
            return
        if self.split:
            # Born there; or deleted here, and perhaps written anew there.
            if self.write:
                self._forget(lines)
            return
        pending = [line for line in lines if not self.written.digest(line)]
        if not self.write:
            if lines:
                looks = Looks.NOT_CARRIED if self.back else Looks.FENCE_LEAK
                self._report(desk, name, f"deleted on the {self.read.name} after its copy", looks)
            else:
                self._foreign(desk, name)
            return
        if lines and not pending:
            if self._thoroughly(desk, name, lines).at_written and not self._accepted(desk, name):
                self._foreign(desk, name)
                return
        elif not lines and not self._accepted(desk, name):
            self._foreign(desk, name)
            return
        self._afresh(desk, name, lines)
        self._resolve(desk, name)

    def _foreign(self, desk: Desk, name: Name) -> None:
        """Name what somebody else wrote on the written side."""
        if self.back:
            self._report_late(desk, name)
        else:
            text = "not on the source, or written on after its copy"
            self._report(desk, name, text, Looks.WRITTEN_ON_TARGET)

    def _resumed(
        self, desk: Desk, name: Name, lines: list[ArtifactVersion]
    ) -> list[ArtifactVersion]:
        """Take up what a killed step had noted; return the lines that are whole.

        One noted version was being saved: if it is there, it is known by its digest, for its number
        was only a guess. More than one, and the name was being deleted to be copied anew.
        """
        noted = [line for line in lines if not self.written.digest(line)]
        whole = [line for line in lines if line not in noted]
        if not self.write:
            return whole
        there = desk.there.get(name)
        taken = {self.written.version(line) for line in whole}
        unknown = [number for number in (there.versions if there else {}) if number not in taken]
        if len(noted) == 1:
            [line] = noted
            for number in unknown if there else []:
                assert there is not None
                if self._digest(desk.user, self.written, there.listed, number) == self.read.digest(
                    line
                ):
                    self._record(
                        line,
                        self.written,
                        number,
                        self.read.digest(line),
                        there.versions[number],
                    )
                    return sorted([*whole, line], key=self.read.version)
        if unknown and (len(noted) > 1 or not self.back) and self._ours(name):
            self._afresh(desk, name, lines)
            return []
        self._forget(noted)
        return whole

    # --- effects ------------------------------------------------------------------------------

    def _copy(self, desk: Desk, name: Name, number: int) -> ArtifactVersion | None:
        """Copy one version and read it back; None: the written side can't hold it."""
        user, here, there = desk.user, desk.here[name], desk.there.get(name)
        listed = there.listed if there else here.listed
        with self.meter.timing("artifact", 1):
            try:
                kept = self.read.port.load(user, here.listed, number)
            except ArtifactUnreadable as unreadable:
                self._refused(desk, name, str(unreadable))
                return None
            if why := self.written.port.refusal(user, listed, kept):
                self._refused(desk, name, f"version {number}: {why}")
                return None
            guess = max(there.versions, default=-1) + 1 if there else 0
            facts, link = kept.facts, kept.link
            line = self._note(desk, name, number, guess, facts, link)
            try:
                number_there = self.written.port.save(user, listed, kept)
            except ArtifactsRefused as refused:
                self._forget([line])
                self._refused(desk, name, f"version {number}: {refused}")
                return None
            # Before its bytes are read: a change between the two then has another stamp.
            stamp = self.written.port.stamp(user, listed, number_there)
            del kept
            back = self._facts(user, self.written, listed, number_there)
            digest = back.digest if back else ""
        self._record(line, self.written, number_there, digest or "unreadable", stamp)
        if there is None:
            desk.there[name] = there = Found(listed, {})
        there.versions[number_there] = stamp
        return line

    def _note(
        self, desk: Desk, name: Name, number: int, guess: int, facts: Facts, link: str
    ) -> ArtifactVersion:
        with holding(self.move):
            return ArtifactVersion.objects.create(
                move=self.move,
                user_id=desk.user,
                session_id=name.session_id,
                name=name.name,
                size=facts.size,
                link=link,
                **self.read.columns(number, facts.digest, desk.here[name].versions[number]),
                **self.written.columns(guess, "", ""),
            )

    def _record(
        self, line: ArtifactVersion, side: Side, version: int, digest: str, stamp: str
    ) -> None:
        """Write down what one side has of a version, unless that is what stands there."""
        if (side.version(line), side.digest(line), side.stamp(line)) == (version, digest, stamp):
            return
        columns = side.columns(version, digest, stamp)
        with holding(self.move):
            self._lines().filter(pk=line.pk).update(**columns)
        for column, value in columns.items():
            setattr(line, column, value)

    def _afresh(self, desk: Desk, name: Name, lines: Collection[ArtifactVersion]) -> None:
        """Delete a name where it is written, to be copied anew or because it is gone.

        Its lines are noted first: killed behind that, the next try finds that it was ours.
        """
        there = desk.there.pop(name, None)
        pks = [line.pk for line in lines]
        with holding(self.move):
            columns = {f"{self.written.name}_digest": ""}
            self._lines().filter(pk__in=pks).update(**columns)
        if there is not None:
            self.written.port.delete(desk.user, there.listed)
        self._forget(lines)

    def _forget(self, lines: Collection[ArtifactVersion]) -> None:
        if lines:
            with holding(self.move):
                self._lines().filter(pk__in=[line.pk for line in lines]).delete()

    # --- what is told -------------------------------------------------------------------------

    def _settle(self, desk: Desk, name: Name, lines: Sequence[ArtifactVersion]) -> None:
        """All is as our lines say: close what was open, or name what the service changes."""
        changed = [line for line in lines if line.source_digest != line.target_digest]
        if not changed:
            self._resolve(desk, name)
            return
        digests = (
            _whole([line.source_digest for line in changed]),
            _whole([line.target_digest for line in changed]),
        )
        known = self._open(desk.user, name).first()
        if known and (known.source_digest, known.target_digest) == digests:
            return
        line = changed[0]
        ours, theirs = (
            self._facts(desk.user, side, found.listed, side.version(line)) if found else None
            for side, found in (
                (self.read, desk.here.get(name)),
                (self.written, desk.there.get(name)),
            )
        )
        text = difference(ours, theirs) if ours and theirs else "it can't be read there"
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        text = f"version {line.source_version}: {text}{more}"
        self._report(desk, name, text, Looks.CANNOT_HOLD, digests=digests)

    def _name_difference(self, desk: Desk, name: Name, changes: Changes) -> None:
        """Record the first thing that is not as it should be."""
        if changes.new and self._open(desk.user, name).filter(part="value").exists():
            # Named by the copying already: the written side can't hold it.
            return
        text, looks = self._first(desk.there.get(name) is None, changes)
        if looks is Looks.LATE_WRITE:
            self._report_late(desk, name)
        else:
            self._report(desk, name, text, looks)

    def _first(self, missing: bool, changes: Changes) -> tuple[str, Looks]:
        """Say what comes first, and what it looks like; numbers are the source's where it has one.

        On the way back what stands otherwise at the closed source came in late.
        """
        if missing:
            text = f"not on the {self.written.name}"
            return text, Looks.NOT_CARRIED if self.back else Looks.LOST
        if self.back and changes.at_written:
            return "", Looks.LATE_WRITE
        if changes.new:
            text = f"version {changes.new[0]} was written after its copy"
            return text, Looks.NOT_CARRIED if self.back else Looks.FENCE_LEAK
        if changes.lost or changes.edited:
            line = (*changes.lost, *changes.edited)[0]
            what = "deleted" if changes.lost else "edited"
            text = f"version {self.read.version(line)} was {what} on the {self.read.name}"
            return f"{text} after its copy", Looks.STALE_ARTIFACT
        if changes.altered:
            text = f"version {changes.altered[0].source_version} is another one on the target"
            return text, Looks.STALE_ARTIFACT
        if changes.gone:
            text = f"version {changes.gone[0].source_version} is not on the target"
            return text, Looks.STALE_ARTIFACT
        return f"version {changes.extra[0]} of the target is nobody's copy", Looks.WRITTEN_ON_TARGET

    def _refused(self, desk: Desk, name: Name, text: str) -> None:
        self._report(desk, name, text, Looks.CANNOT_HOLD, part="value")

    def _report_late(self, desk: Desk, name: Name) -> None:
        text = "written at the closed source after the cutover"
        self._report(
            desk, name, text, Looks.LATE_WRITE, digests=(self._whole_there(desk, name), "")
        )

    def _accepted(self, desk: Desk, name: Name) -> bool:
        """Whether a person has seen this late write as it is now, and said that it may go."""
        if not self.back:
            return False
        rows = queries.late_writes(self.move).filter(
            user_id=desk.user,
            session_id=name.session_id,
            artifact=name.name,
            accepted_at__isnull=False,
        )
        said = rows.values_list("source_digest", flat=True).first()
        return said is not None and said == self._whole_there(desk, name)

    def _whole_there(self, desk: Desk, name: Name) -> str:
        """Return one digest of all that the written side has of a name."""
        there = desk.there.get(name)
        if there is None:
            return ""
        parts = []
        for number in there.versions:
            parts += [str(number), self._digest(desk.user, self.written, there.listed, number)]
        return _whole(parts)

    def _report(
        self,
        desk: Desk,
        name: Name,
        text: str,
        looks: Looks,
        *,
        part: str = "artifact",
        digests: tuple[str, str] = ("", ""),
    ) -> None:
        found = Difference(part, f"{_shown(name)}: {text}", looks)
        with holding(self.move):
            copying.put(
                self.move,
                desk.user,
                name.session_id,
                found,
                digests,
                self.clock(),
                artifact=name.name,
            )

    def _resolve(self, desk: Desk, name: Name) -> None:
        rows = self._open(desk.user, name)
        if rows.exists():
            with holding(self.move):
                rows.update(resolved_at=self.clock())

    def _close_forgotten(self, desk: Desk) -> None:
        """Close what was open of names that are nowhere any more."""
        names = {*desk.here, *desk.there, *desk.doubled}
        rows = self._open(desk.user).values_list("pk", "session_id", "artifact")
        if pks := [pk for pk, session, artifact in rows if Name(session, artifact) not in names]:
            with holding(self.move):
                Mismatch.objects.filter(pk__in=pks).update(resolved_at=self.clock())

    def _open(self, user: str, name: Name | None = None) -> Any:
        rows = Mismatch.objects.filter(move=self.move, user_id=user, resolved_at=None)
        if name is None:
            return rows.exclude(artifact="")
        return rows.filter(session_id=name.session_id, artifact=name.name)

    # --- reading ------------------------------------------------------------------------------

    def _digest(self, user: str, side: Side, listed: Name, version: int) -> str:
        facts = self._facts(user, side, listed, version)
        return facts.digest if facts else "unreadable"

    def _facts(self, user: str, side: Side, listed: Name, version: int) -> Facts | None:
        try:
            return side.port.load(user, listed, version).facts
        except ArtifactUnreadable:
            return None


def _whole(digests: Sequence[str]) -> str:
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


def _shown(name: Name) -> str:
    """Name an artifact in a line for people, not at any length."""
    return name.name if len(name.name) <= 80 else f"{name.name[:80]}..."
