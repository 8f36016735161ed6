"""A move's artifacts: how much goes over, which numbers changed, what names the old ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlencode

from django.core.paginator import Page, Paginator
from django.db.models import Case, Count, F, Q, Sum, When

from migrations_app.models import ArtifactReference, ArtifactVersion, TenantMigration
from migrations_app.panels.seen import Seen
from tenants.domain.words import Status, counted, rate

PAGE_ROWS = 20
WHOLE = ~Q(source_digest="") & ~Q(target_digest="")
TABLES = ("users", "numbers", "references")
NUMBER = ("user_id", "session_id", "name", "source_version", "target_version")


@dataclass(frozen=True)
class Pages:
    """Which page of each table is shown."""

    users: int = 1
    numbers: int = 1
    references: int = 1

    @property
    def query(self) -> str:
        """The pages as a query string, for polls and links; the first is not said."""
        shown = {f"{name}_page": getattr(self, name) for name in TABLES}
        return urlencode({name: page for name, page in shown.items() if page > 1})


def wanted(given: Mapping[str, str]) -> Pages:
    """Return the pages that a query string asks for; nonsense asks for the first."""
    asked = {name: given.get(f"{name}_page", "") for name in TABLES}
    return Pages(
        **{
            name: int(text) if text.isdecimal() and len(text) < 7 else 1
            for name, text in asked.items()
        }
    )


@dataclass(frozen=True)
class UserLine:
    """One user's artifacts on both sides, by our own list."""

    user_id: str
    names: int
    versions: int
    # Known to be whole on either side.
    source: int
    target: int
    size: int
    status: Status


@dataclass(frozen=True)
class Table:
    """One page of rows, and where the pages beside it are."""

    rows: tuple[Any, ...]
    total: int
    page: Page[Any] = field(repr=False)
    previous: str = ""
    next: str = ""


@dataclass(frozen=True)
class ArtifactsPanel:
    status: Status
    # Why none is copied; "" where they go along.
    why_not: str
    versions: int
    copied: int
    size: str
    rate: str
    look_rate: str
    open: int
    pages: Pages
    users: Table
    numbers: Table
    references: Table


def artifacts(seen: Seen, pages: Pages) -> ArtifactsPanel:
    """Return what is known of the move's artifacts, and one page of each of its tables."""
    move = seen.move
    lines = move.artifact_versions
    found = lines.aggregate(all=Count("id"), whole=Count("id", filter=WHOLE))
    differ = move.mismatches.filter(resolved_at=None, transient=False, accepted_at=None)
    broken = differ.exclude(artifact="").count()
    why = _why_not(move)
    return ArtifactsPanel(
        status=_status(seen, why, found, broken),
        why_not=why,
        versions=max(move.artifacts, found["all"]),
        copied=found["whole"],
        size=size(move.artifact_bytes),
        rate=rate(move.artifact_rate),
        look_rate=rate(move.artifact_look_rate),
        open=broken,
        pages=pages,
        users=_users(move, pages),
        # As plain values: a panel is drawn anew when what it shows has changed.
        numbers=_table(changed_numbers(move).values(*NUMBER), pages, "numbers"),
        references=_table(references(move).values("place", *NUMBER), pages, "references"),
    )


def changed_numbers(move: TenantMigration) -> Any:
    """Return the versions whose number is another on the target, name by name."""
    rows = move.artifact_versions.filter(WHOLE).exclude(source_version=F("target_version"))
    return rows.order_by("user_id", "session_id", "name", "source_version")


def references(move: TenantMigration) -> Any:
    """Return every place that names a version by its number at the source, for a download."""
    return ArtifactReference.objects.filter(move=move).order_by("pk")


def reference_rows(move: TenantMigration) -> Iterator[tuple[object, ...]]:
    """Return the rows of that download, its heads first. Names places, never a value."""
    yield ("user", "session", "place", "artifact", "source_version", "target_version")
    for row in references(move).iterator(chunk_size=500):
        texts = (row.user_id, row.session_id, row.place, row.name)
        yield (*map(_cell, texts), row.source_version, row.target_version)


def _cell(text: str) -> str:
    """Keep a spreadsheet from taking a name that users chose for a formula."""
    return f"'{text}" if text[:1] in tuple("=+-@\t\r") else text


def size(bytes_: int | None) -> str:
    """Return an amount of bytes in its largest unit.

    >>> size(0), size(999), size(20_480), size(3_500_000_000)
    ('0 B', '999 B', '20.5 kB', '3.5 GB')
    """
    if bytes_ is None:
        return "–"
    value = float(bytes_)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} TB"


def _why_not(move: TenantMigration) -> str:
    source, target = move.source_store, move.target_store
    if not source.artifacts_from and not target.artifacts_from:
        return f"Neither {source} nor {target} names an artifact service."
    if not source.artifacts_from:
        return f"{source} names no artifact service: there is nothing to copy."
    if not target.artifacts_from:
        return f"{target} names no artifact service: none can be copied."
    if source.artifacts_from == target.artifacts_from or move.artifacts_apart is False:
        return f"{source} and {target} keep them in one place: none is copied, none removed."
    if move.artifacts_apart is None:
        return "Whether both sides keep them in two places is not looked at yet."
    return ""


def _status(seen: Seen, why: str, found: Mapping[str, int], broken: int) -> Status:
    if broken:
        return Status("blocked", counted(broken, "differs", "differ"))
    if why:
        return Status("kept", "None go along")
    if found["whole"] < found["all"]:
        return Status("live", "Going over")
    return Status("ok", "Copied") if found["all"] else Status("waiting", "None seen yet")


def _users(move: TenantMigration, pages: Pages) -> Table:
    lines = ArtifactVersion.objects.filter(move=move).values("user_id").order_by("user_id")
    # One name of each line's; a session's own and a user's of one spelling are two.
    rows = lines.annotate(
        versions=Count("id"),
        names=Count("name", distinct=True),
        source=Count("id", filter=~Q(source_digest="")),
        target=Count("id", filter=~Q(target_digest="")),
        bytes=Sum(Case(When(~Q(source_digest=""), then=F("size")), default=0)),
    )
    table = _table(rows, pages, "users")
    open_ones = move.mismatches.filter(resolved_at=None, transient=False, accepted_at=None)
    users = [row["user_id"] for row in table.rows]
    differ = set(
        open_ones.filter(user_id__in=users).exclude(artifact="").values_list("user_id", flat=True)
    )
    return replace(table, rows=tuple(_user(row, row["user_id"] in differ) for row in table.rows))


def _user(row: Mapping[str, Any], differs: bool) -> UserLine:
    source, target = row["source"], row["target"]
    if differs:
        status = Status("blocked", "Differs")
    elif source == target:
        status = Status("ok", "Equal")
    else:
        status = Status("live", "Going over")
    return UserLine(
        user_id=row["user_id"],
        names=row["names"],
        versions=row["versions"],
        source=source,
        target=target,
        size=row["bytes"] or 0,
        status=status,
    )


def _table(rows: Any, pages: Pages, name: str) -> Table:
    page = Paginator(rows, PAGE_ROWS).get_page(getattr(pages, name))
    steps = (page.number - 1, page.number + 1)
    before, after = (replace(pages, **{name: number}).query for number in steps)
    return Table(tuple(page.object_list), page.paginator.count, page, before, after)
