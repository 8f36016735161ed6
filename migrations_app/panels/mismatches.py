"""What did not come out equal: the table, its filter, and what may be done with each row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from urllib.parse import urlencode

from django.core.paginator import Page, Paginator
from django.db.models import Count, Q, QuerySet

from migrations_app import queries
from migrations_app.domain.mismatch import WORDS, Looks
from migrations_app.models import Mismatch, TenantMigration
from migrations_app.panels.seen import COMPARED, Seen
from tenants.domain.words import Status

PAGE_ROWS = 25
# The most rows that one act takes, so that a request stays short.
ACT_ROWS = 10_000

SAME, DIFFERS, NOT_COMPARED = "= same", "≠ differs", "–"
# Kinds of failure in two or three words, for the filter.
KINDS = {
    Looks.EMPTY_COPY: "Empty copy",
    Looks.SHARED_FROZEN: "Shared state frozen",
    Looks.OLD_SHARED_WON: "Old shared value",
    Looks.FENCE_LEAK: "Written after copy",
    Looks.WRITTEN_ON_TARGET: "Written on the target",
    Looks.LOST: "Missing",
    Looks.CHANGED_VALUE: "Value differs",
    Looks.CANNOT_HOLD: "Can't be held",
    Looks.MOVED_ON: "Changed after copy",
    Looks.NOT_CARRIED: "Not carried back",
    Looks.LATE_WRITE: "Late write",
    Looks.STALE_ARTIFACT: "Stale artifact",
}
ACCEPTED = Q(resolved_at=None, accepted_at__isnull=False)
STATES: dict[str, Q] = {
    "open": Q(resolved_at=None, accepted_at=None, transient=False),
    "transient": Q(resolved_at=None, accepted_at=None, transient=True),
    "accepted": ACCEPTED,
    "resolved": Q(resolved_at__isnull=False),
    "all": Q(),
}
UNSETTLED = Q(resolved_at=None)
# Failures that writing the user's shared state by value mends.
SHARED = frozenset({Looks.OLD_SHARED_WON, Looks.SHARED_FROZEN})
REPAIRS = {"app": "Reconcile app", "extra": "Remove copy"}
WHAT = {
    "user": "user state",
    "app": "app state",
    "value": "a value",
    "artifact": "an artifact",
    "missing": "missing",
    "extra": "only on the target",
}


@dataclass(frozen=True)
class MismatchFilter:
    """What the table is narrowed to. `state` is one of STATES, or "" for all that are unsettled."""

    state: str = ""
    kind: str = ""
    # Artifacts alone.
    artifacts: bool = False
    page: int = 1
    # Every row of the page is ticked: how "select all" works without JavaScript.
    ticked: bool = False

    @property
    def narrowed(self) -> bool:
        return bool(self.state or self.kind or self.artifacts)

    @property
    def query(self) -> str:
        """The filter as a query string, for polls and links."""
        given = {
            "state": self.state,
            "kind": self.kind,
            "part": "artifact" if self.artifacts else "",
            "page": self.page if self.page > 1 else "",
        }
        return urlencode({name: value for name, value in given.items() if value})

    def of(self, move: TenantMigration) -> QuerySet[Mismatch]:
        """Return the rows, oldest first, so that each keeps its place."""
        rows = move.mismatches.filter(STATES.get(self.state, UNSETTLED))
        if self.artifacts:
            rows = rows.exclude(artifact="")
        return rows.filter(looks_like=self.kind) if self.kind else rows


def wanted(given: Mapping[str, str]) -> MismatchFilter:
    """Return the filter that a query string or a form asks for; nonsense asks for nothing."""
    state, kind, page = (given.get(name, "") for name in ("state", "kind", "page"))
    return MismatchFilter(
        state=state if state in STATES else "",
        kind=kind if kind in set(Looks) else "",
        artifacts=given.get("part", "") == "artifact",
        page=int(page) if page.isdecimal() and len(page) < 7 else 1,
        ticked=given.get("ticked", "") == "1",
    )


@dataclass(frozen=True)
class MismatchLine:
    """One mismatch as a row: whose, what differs first, and what may be done."""

    # Text, for templates write numbers with separators.
    key: str
    session_id: str
    user_id: str
    # The artifact's name; "" where it is about a session or shared state.
    artifact: str
    status: Status
    # What a screen reader calls the row.
    name: str
    # Which part differs, in words.
    what: str
    events: str
    state: str
    shared: str
    artifacts: str
    first_difference: str
    # The failure that it looks like, as a sentence.
    looks: str
    source_digest: str
    target_digest: str
    found_at: datetime
    found_in: str
    # What people have said of it, or why nobody needs to; "" where nothing.
    said: str
    resolved_at: datetime | None
    settled: bool
    late: bool
    # Words of the button that repairs it; "" where the phase, or the row, takes none.
    repair: str
    reconcile: bool
    accept: bool


@dataclass(frozen=True)
class Mismatches:
    lines: tuple[MismatchLine, ...]
    filter: MismatchFilter
    page: Page[Mismatch] = field(repr=False)
    # How many rows the filter finds.
    found: int
    open: int
    transient: int
    accepted: int
    resolved: int
    late: int
    # How many one click would ask to be repaired; 0: the phase allows none.
    repairable: int
    # Which acts the head of the table offers for several rows.
    repairs: bool
    accepts: bool
    # (value, words, count) of the kinds that this move has, for the filter.
    kinds: tuple[tuple[str, str, int], ...]
    # What open ones keep from happening.
    blocks: str

    @property
    def acts(self) -> bool:
        """Whether anything can be done with a row, so that ticking it has a sense."""
        return self.repairs or self.accepts

    @property
    def previous(self) -> str:
        return replace(self.filter, page=self.page.number - 1).query

    @property
    def next(self) -> str:
        return replace(self.filter, page=self.page.number + 1).query

    @property
    def any(self) -> bool:
        return bool(self.open or self.transient or self.accepted or self.resolved)


def mismatches(seen: Seen, wanted: MismatchFilter) -> Mismatches:
    """Return one page of the move's mismatches and how many there are of each state."""
    move = seen.move
    counts = move.mismatches.aggregate(
        **{state: Count("id", filter=of) for state, of in STATES.items() if of},
        late=Count("id", filter=UNSETTLED & Q(looks_like=Looks.LATE_WRITE)),
    )
    kinds = dict(move.mismatches.order_by().values_list("looks_like").annotate(Count("id")))
    page = Paginator(wanted.of(move), PAGE_ROWS).get_page(wanted.page)
    rows = list(page.object_list)
    shared = _shared_differs(move, rows)
    lines = tuple(_line(seen, row, shared) for row in rows)
    return Mismatches(
        lines=lines,
        filter=wanted,
        page=page,
        found=page.paginator.count,
        open=counts["open"],
        transient=counts["transient"],
        accepted=counts["accepted"],
        resolved=counts["resolved"],
        late=counts["late"],
        repairable=len(repairable(seen)),
        repairs=_may_repair(seen),
        accepts=any(line.accept for line in lines),
        kinds=tuple((looks.value, KINDS[looks], kinds[looks]) for looks in Looks if looks in kinds),
        blocks=_blocks(seen),
    )


def mismatch_line(seen: Seen, row: Mismatch) -> MismatchLine:
    """Return one mismatch as its own page shows it."""
    return _line(seen, row, _shared_differs(seen.move, [row]))


def repairable(seen: Seen) -> list[int]:
    """Return the ids of open mismatches whose repair nobody has asked for, if the phase allows."""
    if not _may_repair(seen):
        return []
    rows = queries.repairable(seen.move).filter(STATES["open"])
    return list(rows.values_list("pk", flat=True)[:ACT_ROWS])


def chosen(seen: Seen, given: Mapping[str, str], ticked: Iterable[str]) -> list[int]:
    """Return the rows that a form means: the one of its button, all that it found, or the ticked.

    `only` is the row whose own button was pressed, whatever else is ticked; `ids` are those that
    a dialog has asked about.
    """
    if given.get("repairable"):
        return repairable(seen)
    if given.get("only"):
        texts: Iterable[str] = [given["only"]]
    elif given.get("ids"):
        texts = given["ids"].split(",")[:ACT_ROWS]
    elif given.get("all"):
        rows = wanted(given).of(seen.move).filter(UNSETTLED)
        return list(rows.values_list("pk", flat=True)[:ACT_ROWS])
    else:
        texts = ticked
    # Longer ones are no id that a database holds, nor a number that int() takes.
    return [int(text) for text in texts if text.isdecimal() and len(text) < 19]


def _may_repair(seen: Seen) -> bool:
    return seen.phase in COMPARED and not seen.aborting


def _blocks(seen: Seen) -> str:
    """Return what open mismatches keep from happening, as a panel head says it."""
    if seen.late_writes and not seen.going_back:
        return "a rollback"
    return "REVERSE_TARGET" if seen.going_back else "TARGET"


def _shared_differs(move: TenantMigration, rows: Iterable[Mismatch]) -> frozenset[str]:
    """Return the users of these rows whose shared state differs; "" is the app's."""
    users = {row.user_id for row in rows} | {""}
    found = move.mismatches.filter(UNSETTLED, session_id="", artifact="", user_id__in=users)
    return frozenset(found.filter(part__in=["user", "app"]).values_list("user_id", flat=True))


def _line(seen: Seen, row: Mismatch, shared: frozenset[str]) -> MismatchLine:
    events, state = _parts(row)
    settled = row.resolved_at is not None
    late = row.looks_like == Looks.LATE_WRITE
    may_repair = _may_repair(seen) and state_of(row) == "open" and not row.repair_requested_at
    may_repair = may_repair and not late
    known = row.looks_like in set(Looks)
    return MismatchLine(
        key=str(row.pk),
        session_id=row.session_id,
        user_id=row.user_id,
        artifact=row.artifact,
        status=_status(row),
        name=_name(row),
        what=WHAT.get(row.part, row.part),
        events=events,
        state=state,
        shared=_shared_part(row, shared, settled),
        artifacts=DIFFERS if row.artifact else NOT_COMPARED,
        first_difference=row.first_difference,
        looks=WORDS[Looks(row.looks_like)] if known else "",
        source_digest=row.source_digest,
        target_digest=row.target_digest,
        found_at=row.found_at,
        found_in=row.found_in.upper(),
        said=_said(row),
        resolved_at=row.resolved_at,
        settled=settled,
        late=late,
        repair=REPAIRS.get(row.part, "Re-copy") if may_repair and row.part != "user" else "",
        reconcile=may_repair and row.part != "app" and row.looks_like in SHARED,
        accept=not settled and row.accepted_at is None and queries.acceptable(seen.move, row),
    )


def _shared_part(row: Mismatch, shared: frozenset[str], settled: bool) -> str:
    if settled or row.artifact:
        return NOT_COMPARED
    return DIFFERS if {row.user_id, ""} & shared else NOT_COMPARED


def _parts(row: Mismatch) -> tuple[str, str]:
    """Return what is known of a session's events and of its state.

    Events are compared first and only the first difference is named: where they differ, the
    state was not looked at.
    """
    if row.part == "state":
        return SAME, DIFFERS
    if row.part in ("missing", "extra"):
        return DIFFERS, DIFFERS
    if row.part in ("user", "app") or row.artifact:
        return NOT_COMPARED, NOT_COMPARED
    return DIFFERS, NOT_COMPARED


def state_of(row: Mismatch) -> str:
    """Return which of STATES a row is in."""
    if row.resolved_at is not None:
        return "resolved"
    if row.accepted_at is not None:
        return "accepted"
    return "transient" if row.transient else "open"


STATUSES = {
    "resolved": Status("done", "Resolved"),
    "accepted": Status("kept", "Accepted"),
    "transient": Status("live", "Transient"),
}


def _status(row: Mismatch) -> Status:
    if (state := state_of(row)) != "open":
        return STATUSES[state]
    if row.repair_requested_at is not None:
        return Status("live", "Asked for")
    return Status("blocked", "Late write" if row.looks_like == Looks.LATE_WRITE else "Open")


def _said(row: Mismatch) -> str:
    if row.accepted_at is not None:
        return f"Accepted by {row.accepted_by}: {row.accepted_reason}"
    if row.repair_requested_at is not None and row.resolved_at is None:
        return f"Repair asked for by {row.repair_requested_by}."
    return ""


def _name(row: Mismatch) -> str:
    if row.artifact:
        whose = f"session {row.session_id}" if row.session_id else f"user {row.user_id}"
        return f"artifact {row.artifact} of {whose}"
    if row.session_id:
        return f"session {row.session_id}"
    return f"shared state of {row.user_id}" if row.user_id else "shared state of the app"
