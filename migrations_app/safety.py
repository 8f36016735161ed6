"""Which tenants break a rule of safety now, and in what state any one is.

One statement, so one moment: a fence that opens between two reads would look like one that
nothing explains. It asks the policy's rows, which is what runtimes are told; what the stores' guard
rows say is asked by whoever acts on it (`opening`). That no two cells take the same turns is kept
by constraints: see the domain.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db.models import Exists, F, FilteredRelation, OuterRef, Q, QuerySet, Subquery

from migrations_app.domain.phases import ENDED, Phase
from migrations_app.domain.restored import STAYS_REFUSED
from migrations_app.domain.safety import WORDS, Closing, Facts, Rule, broken, closing
from migrations_app.models import RestoreFinding
from tenants.domain.fence import Accepts
from tenants.models import Halt, PlacementChange, PolicyEntry, Tenant

# Tenants that one look names: where more break a rule, the first tell what is wrong.
MOST = 100
# Behind a lease, for beat's next look and the step itself.
SLACK = timedelta(seconds=15)

_LIVE = sorted(phase.value for phase in Phase if phase not in ENDED)
# What is asked of the live move.
_OF_MOVE = (
    "pk",
    "phase",
    "phase_since",
    "due_at",
    "failure",
    "deadline_at",
    "fence_closed_at",
    "fence_opened_at",
    "split_at",
    "split_version",
    "split_placement_version",
    "placement_version",
    "back_placement_version",
)


@dataclass(frozen=True, slots=True)
class State:
    """Who takes turns of one tenant now, and whether a rule is broken."""

    tenant: str
    cell: str
    store: str
    facts: Facts
    # None: none is broken.
    rule: Rule | None
    # What the live move's last failing step said; "" where nothing, or none lives.
    failure: str
    # Nobody takes the steps of the live move.
    stands: bool

    @property
    def since(self) -> datetime | None:
        """Since when turns are refused. None: they are not, or nothing tells."""
        shut = None if self.facts.served else self.facts.closing
        return None if shut is None else shut.since

    @property
    def move(self) -> int | None:
        """The live move that keeps the tenant refused. None: none does."""
        shut = None if self.facts.served else self.facts.closing
        return None if shut is None else shut.move

    @property
    def words(self) -> str:
        """The state in a sentence's second half, for people."""
        facts, shut = self.facts, self.facts.closing
        if facts.served:
            return f"its turns are taken; it lives in {self.cell}"
        if shut is None:
            if facts.found:
                return "it is refused since a restore, until `manage.py restored` settles it"
            if facts.halted:
                return "no cell takes its turns, and all machines are stopped"
            return WORDS[Rule.NOBODY_SERVES]
        who = f"mv-{shut.move} in {shut.phase.upper()}"
        refused = f"refused since {shut.since:%H:%M:%S} UTC by {who}"
        if self.rule is None:
            by = "" if shut.until is None else f", by {shut.until:%H:%M:%S} UTC at the latest"
            return f"{refused}, which opens it by itself{by}"
        if facts.halted:
            return f"{refused}, and all machines are stopped"
        if self.stands:
            return f"{refused}; a step is due since {shut.due_at:%H:%M:%S} UTC and nobody takes it"
        said = f": {self.failure}" if self.failure else ""
        return f"{refused}; it is late, its steps are taken{said}"


def margin() -> timedelta:
    """Return how long a machine may take to come back to a row whose worker was killed."""
    return timedelta(seconds=settings.DURABLE_LEASE_SECONDS) + SLACK


def broken_now(*, now: datetime) -> list[State]:
    """Return the tenants that break a rule, by name: MOST at most, and one more if there are."""
    refused = _rows(Tenant.objects.all()).filter(~Q(owned=True) | ~Q(takes_new=True))
    states = (_state(row, now) for row in refused.order_by("slug").iterator(chunk_size=1_000))
    found = []
    for state in states:
        if state.rule is not None:
            found.append(state)
        if len(found) > MOST:
            break
    return found


def state_of(tenant: Tenant, *, now: datetime) -> State:
    """Return in what state one placed tenant is. Raises Tenant.DoesNotExist if it lives nowhere."""
    return _state(_rows(Tenant.objects.filter(pk=tenant.pk)).get(), now)


def _rows(tenants: QuerySet[Tenant]) -> Any:
    """Return the placed ones of these tenants, each with what the rules look at."""
    entries = PolicyEntry.objects.filter(tenant=OuterRef("pk"))
    # The same conditions as the two constraints', so their indexes answer.
    owners = entries.filter(accepts__in=[Accepts.ALL.value, Accepts.EXISTING.value])
    takers = entries.filter(accepts__in=[Accepts.ALL.value, Accepts.NEW.value])
    findings = RestoreFinding.objects.filter(tenant=OuterRef("pk"))
    placed_since = PlacementChange.objects.filter(
        tenant=OuterRef("pk"), at__gt=OuterRef("found_resolved_at")
    )
    newest = findings.order_by("-pk")
    columns = {f"move_{name}": F(f"live__{name}") for name in _OF_MOVE}
    return (
        tenants.filter(placement__isnull=False)
        .annotate(
            live=FilteredRelation("moves", condition=Q(moves__phase__in=_LIVE)),
            owned=Exists(owners),
            takes_new=Exists(takers),
            halted=Exists(Halt.objects.filter(ended_at=None)),
            found_open=Exists(findings.filter(resolved_at=None)),
            found_outcome=Subquery(newest.values("outcome")[:1]),
            found_resolved_at=Subquery(newest.values("resolved_at")[:1]),
        )
        .annotate(
            placed_since=Exists(placed_since),
            cell=F("placement__cell__slug"),
            store=F("placement__store__key"),
            **columns,
        )
        .values(
            "slug",
            "cell",
            "store",
            "owned",
            "takes_new",
            "halted",
            "found_open",
            "found_outcome",
            "placed_since",
            *columns,
        )
    )


def _state(row: dict[str, Any], now: datetime) -> State:
    shut = _closing(row)
    left = row["found_outcome"] == STAYS_REFUSED and not row["placed_since"]
    facts = Facts(
        owned=row["owned"],
        takes_new=row["takes_new"],
        halted=row["halted"],
        found=row["found_open"] or left,
        closing=shut,
    )
    return State(
        tenant=row["slug"],
        cell=row["cell"],
        store=row["store"],
        facts=facts,
        rule=broken(facts, now=now, margin=margin()),
        failure=row["move_failure"] or "",
        stands=shut is not None and shut.stands(now=now, margin=SLACK),
    )


def _closing(row: dict[str, Any]) -> Closing | None:
    if row["move_pk"] is None:
        return None
    flipped = row["move_placement_version"] or row["move_back_placement_version"]
    return closing(
        move=row["move_pk"],
        phase=Phase(row["move_phase"]),
        phase_since=row["move_phase_since"],
        due_at=row["move_due_at"],
        fence_closed_at=row["move_fence_closed_at"],
        fence_opened_at=row["move_fence_opened_at"],
        deadline_at=row["move_deadline_at"],
        narrowed_at=None if row["move_split_version"] is None else row["move_split_at"],
        both_serve=bool(row["move_split_placement_version"] or flipped),
    )
