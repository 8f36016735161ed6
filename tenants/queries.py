"""Reads of who there is, where they live, and what runtimes were told and said."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.contrib.auth.models import AnonymousUser, Group, User
from django.db.models import Q, QuerySet, Subquery, Sum

from tenants.domain.fence import (
    Facts,
    InstanceWord,
    Proof,
    has_lapsed,
    judge,
    waits_for,
)
from tenants.domain.limits import NAMES, Limits
from tenants.domain.roles import RANK, Role, TokenRole
from tenants.domain.versions import Version, number_of
from tenants.models import (
    Cell,
    Counter,
    Halt,
    Placement,
    PolicyEntry,
    RuntimeInstance,
    Scope,
    Tenant,
    Token,
    UsageLine,
)

__all__ = ["Asking", "Feed", "InstanceWord", "Policy", "Proof"]

# How long a gone instance is still named beside a fence, for people.
GONE_SHOWN = timedelta(minutes=15)
# So far back served turns tell how long one takes, if they are not fewer than these.
TURNS_TELL = timedelta(minutes=10)
LEAST_TURNS = 20


@dataclass(frozen=True, slots=True)
class Asking:
    """An instance and the policy version that its cell had in the same moment."""

    instance: RuntimeInstance
    version: Version


@dataclass(frozen=True, slots=True)
class Policy:
    """What an instance is answered: the entries that changed, and the cell's version."""

    version: Version
    # True: the entries replace everything that the instance holds.
    full: bool
    # None: the cell's part has not changed.
    cell: dict[str, Any] | None
    tenants: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Feed:
    """Where tenants live, for gateways."""

    version: Version
    # True: the rows replace everything that the gateway holds.
    full: bool
    tenants: list[dict[str, Any]]


def epoch() -> str:
    """Return this database's epoch."""
    return Counter.objects.values_list("epoch", flat=True).get()


def halt() -> Halt | None:
    """Return why every machine is stopped; None while they run."""
    return Halt.objects.filter(ended_at=None).first()


def halted() -> str:
    """Return why every machine is stopped, in a person's words; empty while they run."""
    found = halt()
    return "" if found is None else found.why


def fence_waits_for(cell: Cell, *, now: datetime) -> list[InstanceWord]:
    """Return the instances that keep a fence in this cell from beginning (rule 1)."""
    alive = RuntimeInstance.objects.filter(cell=cell, gone_at=None).order_by("name", "pk")
    return waits_for(_facts(alive, None), now=now)


def fence_proof(cell: Cell, tenant: Tenant, version: int, *, now: datetime) -> Proof:
    """Return whether every instance of the cell has closed the fence published at `version`.

    The transaction that settles by a proof must call `services.mark_lapsed(proof.lapsed)`.
    """
    # One statement, so one moment: a process that joins anew hands its running turns from one
    # row to another, and two reads could miss both.
    return judge(_facts(_of_a_proof(cell, now), tenant), version, now=now)


def older_proof(cell: Cell, tenant: Tenant, version: int, *, now: datetime) -> Proof:
    """Return whether everywhere the turns have ended that began before `version` was applied.

    As `fence_proof`, but turns that entered by the entry published at `version` may go on: after
    `existing` nothing can be born in the cell once this has held. The counts are of older turns.
    """
    facts = _facts(_of_a_proof(cell, now), tenant, older=True)
    return judge(facts, version, now=now)


def announced_check(
    cell: Cell, tenant: Tenant, version: int, *, now: datetime
) -> list[InstanceWord]:
    """Return the instances of the cell that have not applied what was announced at `version`.

    Whoever has applied it holds the tenant's scope, for the entry carries it. One that lapsed is
    not waited for, and one that never asked for a policy is told with its first.
    """
    alive = RuntimeInstance.objects.filter(cell=cell, gone_at=None).order_by("name", "pk")
    words = judge(_facts(alive, tenant), version, now=now).instances
    return [word for word in words if word.state == "missing"]


def _of_a_proof(cell: Cell, now: datetime) -> QuerySet[RuntimeInstance]:
    rows = RuntimeInstance.objects.filter(Q(gone_at=None) | Q(gone_at__gt=now - GONE_SHOWN))
    return rows.filter(cell=cell).order_by("name", "pk")


def live_instances(cell: Cell, *, now: datetime) -> list[RuntimeInstance]:
    """Return the cell's instances that may serve, or may soon: neither gone nor lapsed."""
    alive = RuntimeInstance.objects.filter(cell=cell, gone_at=None).order_by("name", "pk")
    return [row for row in alive if not has_lapsed(row, now)]


def time_left_seconds(cell: Cell, tenant: Tenant, *, now: datetime) -> float:
    """Return how long a fence of this tenant might wait for turns that run now (seconds).

    In 19 of 20 cases less. Nobody knows how old they are; but as many as run now, by how many were
    served a second of late, is how long one takes on average (Little's law), and what is left of
    one is taken to be exponential. At most the longest turn stated by a live instance that has one
    in flight, which is the answer where too few were served; 0 if none runs.
    """
    busy = [row for row in live_instances(cell, now=now) if row.in_flight.get(tenant.slug)]
    if not busy:
        return 0.0
    running = sum(row.in_flight[tenant.slug] for row in busy)
    longest: float = max(row.longest_turn_seconds for row in busy)
    lines = UsageLine.objects.filter(
        tenant=tenant, instance__cell=cell, minute__gt=now - TURNS_TELL, minute__lte=now
    )
    served = lines.aggregate(turns=Sum("turns"))["turns"] or 0
    if served < LEAST_TURNS:
        return longest
    mean = running * TURNS_TELL.total_seconds() / served
    return float(min(longest, mean * math.log(running / 0.05)))


def lapsed_instances(*, now: datetime) -> list[int]:
    """Return the ids of instances that can't write any more and aren't marked gone yet."""
    # A lease that has not run out has not lapsed either; the exact rule is in one place.
    rows = RuntimeInstance.objects.filter(gone_at=None, lease_until__lt=now)
    return [row.pk for row in rows if has_lapsed(row, now)]


def policy(asking: Asking, *, since: str) -> Policy | None:
    """Return what changed in the instance's cell since version `since`; None if nothing did.

    A `since` of another epoch or unreadable is answered in full, tombstones included. (One above
    the cell's counter too: `services.poll` has refused it.)
    """
    # The version was read FIRST, with the instance. Read after the entries it would cover a
    # publication that committed in between, whose entry was not read: that instance would skip
    # it for ever. In this order such an entry is sent now, under an older version, and once
    # more at the next poll.
    current = asking.version
    known = number_of(since, current.epoch)
    if known == current.number:
        return None
    full = known is None or known > current.number
    after = -1 if full or known is None else known
    cell = asking.instance.cell
    entries = PolicyEntry.objects.filter(cell=cell, version__gt=after).order_by("version", "pk")
    return Policy(
        version=current,
        full=full,
        cell=cell.document if full or cell.document_version > after else None,
        tenants=[_entry(entry, current.epoch) for entry in entries],
    )


def placement_feed(*, since: str) -> Feed | None:
    """Return the placements that changed since feed version `since`; None if none did."""
    # The version FIRST, for the same reason as in `policy`.
    counter = Counter.objects.get()
    current = Version(counter.epoch, counter.feed_version)
    known = number_of(since, current.epoch)
    if known == current.number:
        return None
    full = known is None or known > current.number
    rows = Placement.objects.select_related(
        "tenant", "cell__region", "store", "split_cell", "split_store"
    )
    if not full:
        rows = rows.filter(feed_version__gt=known)
    return Feed(
        version=current,
        full=full,
        tenants=[
            {
                "tenant": row.tenant.slug,
                "app_name": row.tenant.app_name,
                "cell": row.cell.slug,
                "cell_url": row.cell.url,
                "store": row.store.key,
                "placement_version": str(Version(current.epoch, row.placement_version)),
                "sides": _sides(row),
                "home_region": row.cell.region.slug,
                "fail_mode": "closed",
            }
            for row in rows.order_by("feed_version", "pk")
        ],
    )


def scope_of(tenant: Tenant) -> Scope:
    """Return the version of the tenant's limits that holds."""
    return Scope.objects.filter(tenant=tenant, trial=False).order_by("-version")[0]


def limits_of(scope: Scope) -> Limits:
    """Return the limits of one version."""
    tools = scope.allowed_tools
    values = {name: getattr(scope, name) for name in NAMES}
    return Limits(**{**values, "allowed_tools": None if tools is None else tuple(tools)})


def asking(key: str) -> Asking | None:
    """Return the instance of this public id and its cell's version, read in one statement."""
    row = (
        RuntimeInstance.objects.select_related("cell")
        .annotate(epoch=Subquery(Counter.objects.values("epoch")[:1]))
        .filter(key=key)
        .first()
    )
    return None if row is None else Asking(row, Version(row.epoch, row.cell.policy_version))


def role_of(user: User | AnonymousUser) -> Role | None:
    """Return what a person may do: the highest of their groups; a superuser is an admin.

    A tenant's person has no role, whatever groups they were put into.
    """
    if not user.is_authenticated or not user.is_active:
        return None
    if user.is_superuser:
        return Role.ADMIN
    # Both conditions in one call, so they are of the same user.
    groups = Group.objects.filter(user=user, user__membership__isnull=True)
    names = set(groups.values_list("name", flat=True))
    held = [role for role in Role if role.value in names]
    return max(held, key=RANK.__getitem__, default=None)


def tenant_of(user: User | AnonymousUser) -> Tenant | None:
    """Return the tenant whose person this is, who sees its usage; None if they are of none."""
    if not user.is_authenticated or not user.is_active:
        return None
    return Tenant.objects.filter(memberships__user=user).first()


def token_for(secret: str, *, now: datetime) -> Token | None:
    """Return the token that this secret opens: not revoked, not expired, its user still active.

    It is looked up by digest, so how long that takes says nothing about any secret.
    """
    token = (
        Token.objects.select_related("tenant", "user")
        .prefetch_related("cells")
        .filter(digest=digest(secret), revoked_at=None, expires_at__gt=now)
        .first()
    )
    if token is None or (token.user is not None and not token.user.is_active):
        return None
    # A user is what an operator's token acts for.
    return None if token.role == TokenRole.OPERATOR and token.user is None else token


def digest(secret: str) -> str:
    """Return what of a secret is kept: its SHA-256 in hex."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def _sides(row: Placement) -> dict[str, Any] | None:
    if row.split_cell is None or row.split_store is None:
        return None
    return {
        "existing": {"cell": row.cell.slug, "cell_url": row.cell.url, "store": row.store.key},
        "new": {
            "cell": row.split_cell.slug,
            "cell_url": row.split_cell.url,
            "store": row.split_store.key,
        },
    }


def _entry(entry: PolicyEntry, current_epoch: str) -> dict[str, Any]:
    document = entry.document
    return {
        # Entries that were published before there were splits have none of these.
        "home_cell": None,
        "split": False,
        "sides": None,
        # Nor of these, before limits could be tried and paid for.
        "trial": None,
        **document,
        "scope": {"exact_budget": False, "budget_spent_until": None, **document["scope"]},
        "accepts": entry.accepts,
        "placement_version": str(Version(current_epoch, entry.placement_version)),
        "runner_generation": entry.runner_generation,
    }


def _facts(
    rows: Iterable[RuntimeInstance], tenant: Tenant | None, *, older: bool = False
) -> list[Facts]:
    current = epoch()
    return [_fact(row, current, tenant, older) for row in rows]


def _fact(row: RuntimeInstance, current_epoch: str, tenant: Tenant | None, older: bool) -> Facts:
    running = row.in_flight_older if older else row.in_flight
    return Facts(
        id=row.pk,
        name=row.name,
        longest_turn_seconds=row.longest_turn_seconds,
        lease_until=row.lease_until,
        took_over=row.took_over,
        polled_at=row.polled_at,
        reported_at=row.reported_at,
        poll_after_ms=row.poll_after_ms,
        hurried_at=row.hurried_at,
        # A version of another epoch counts as nothing applied.
        applied_version=row.applied_version if row.applied_epoch == current_epoch else 0,
        in_flight=running.get(tenant.slug, 0) if tenant is not None else 0,
        gone=row.gone_at is not None,
    )
