"""What the isolation page shows: the register of shared resources, and what tests found."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.core.paginator import Page, Paginator
from django.db.models import Case, Count, IntegerField, Q, QuerySet, Value, When

from capacity.domain.register import MEANING, Kind
from capacity.domain.slo import RUN_LASTS, SLOS, Slo
from capacity.models import IsolationRun, SharedResource
from tenants.domain.names import Tier
from tenants.domain.words import Status, counted
from tenants.panels import NAMED, SILENT_RANK, Attention

PAGE_ROWS = 50
RUNS = 5


@dataclass(frozen=True)
class KindLine:
    """One of the kinds of isolation: what it means, and how much of the register is about it."""

    kind: Kind
    meaning: str
    resources: int
    findings: int

    @property
    def status(self) -> Status:
        if self.findings:
            return Status("warn", counted(self.findings, "finding"))
        return Status("ok", "Controlled") if self.resources else Status("waiting", "Nothing named")


@dataclass(frozen=True)
class ResultLine:
    """One test of a run. Texts are what the run wrote down."""

    name: str
    asked: str
    measured: str
    bar: str
    status: Status


@dataclass(frozen=True)
class RunLine:
    run: IsolationRun
    status: Status
    results: tuple[ResultLine, ...]


@dataclass(frozen=True)
class IsolationPage:
    kinds: tuple[KindLine, ...]
    page: Page[SharedResource]
    findings: int
    runs: tuple[RunLine, ...]
    # The newest run in which everything held. None: there was none.
    last_pass: IsolationRun | None
    slos: tuple[tuple[Tier, Slo], ...]

    @property
    def running(self) -> bool:
        """Whether a run is under way: its results come in one by one."""
        return any(line.status.glyph == "live" for line in self.runs)


def isolation_page(number: int = 1, *, now: datetime) -> IsolationPage:
    """Return the register, findings first, the last runs, and what each tier is promised."""
    counts = {
        row["kind"]: row
        for row in SharedResource.objects.order_by()
        .values("kind")
        .annotate(resources=Count("pk"), findings=Count("pk", filter=Q(control="")))
    }
    none = {"resources": 0, "findings": 0}
    kinds = tuple(
        KindLine(
            kind,
            MEANING[kind],
            counts.get(kind, none)["resources"],
            counts.get(kind, none)["findings"],
        )
        for kind in Kind
    )
    return IsolationPage(
        kinds=kinds,
        page=Paginator(_register(), PAGE_ROWS).get_page(number),
        findings=sum(line.findings for line in kinds),
        runs=tuple(_run(run, now) for run in IsolationRun.objects.all()[:RUNS]),
        last_pass=IsolationRun.objects.filter(passed=True).first(),
        slos=tuple(SLOS.items()),
    )


def _register() -> QuerySet[SharedResource]:
    order = Case(
        When(control="", then=Value(-1)),
        *(When(kind=kind, then=Value(place)) for place, kind in enumerate(Kind)),
        default=Value(len(Kind)),
        output_field=IntegerField(),
    )
    return SharedResource.objects.order_by(order, "name")


def _run(run: IsolationRun, now: datetime) -> RunLine:
    if run.passed is None:
        killed = now - run.began_at > RUN_LASTS
        status = Status("blocked", "Killed") if killed else Status("live", "Running")
    else:
        status = Status("ok", "Passed") if run.passed else Status("blocked", "Failed")
    return RunLine(run, status, tuple(_result(result) for result in run.results))


def _result(said: dict[str, Any]) -> ResultLine:
    held = Status("ok", "Held") if said.get("held") else Status("blocked", "Broken")
    return ResultLine(
        name=str(said.get("name", "")),
        asked=str(said.get("asked", "")),
        measured=str(said.get("measured", "")),
        bar=str(said.get("bar", "")),
        status=held,
    )


def attention() -> list[Attention]:
    """Return the findings of the register, one line together."""
    found = list(SharedResource.objects.filter(control="").order_by("at", "name"))
    if not found:
        return []
    names = ", ".join(row.name for row in found[:NAMED])
    if len(found) > NAMED:
        names = f"{names} and {len(found) - NAMED} more"
    are = "shared resource has" if len(found) == 1 else "shared resources have"
    return [
        Attention(
            rank=SILENT_RANK + 1,
            status=Status("warn", "Finding"),
            title=f"{len(found):,} {are} no control",
            text=f"{names}: nothing keeps one tenant from harming another there.",
            since=found[0].at,
            kind="register",
            key="register",
            label="register",
        )
    ]
