"""How a tenant's limits are divided over the instances that serve it: replicas share a limit.

Each instance is sent a document with its share of every tenant's limits. It may use them in full
for `GRANT_SECONDS` from the moment it sent the report that was answered, then the safe part until
its lease is over. Whether an answer arrived is known only when the next report says so. So for
every instance the most that it may still apply is counted, whatever became of messages to it
(`Member`), and nobody is lent what another may still use: at no moment do the instances together
use more than the limit, while they join, die or are cut off.

Nothing here knows a clock or rows. Rates are counted in millionths of a run per second: whole
numbers, so that parts add up to no more than the limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from tenants.domain.fence import GoneWhy

# A share, its values in the order of `tenants.domain.reports.SHARE`, and a document: tenant ->
# share.
Share = Sequence[Any]
Document = Mapping[str, Share]

# For clocks that run at different speeds: an instance always stops first.
MARGIN = timedelta(seconds=5)
# Units of one run per second.
RATE_UNITS = 1_000_000
# A change of a rate that is smaller than this part of it is not worth a document.
RATE_STEP = 20
# Of a limit that is large enough, this part is kept for instances that ask for nothing: their first
# turn is then served, not refused.
IDLE_PART = 10
# What is left of a budget is told again when it has changed by this part of it.
BUDGET_STEP = 100

# Where a share has one limit, in full and safe; units of one; whether it counts runs at once.
Kind = tuple[int, int, int, bool]
_RATE: Kind = (0, 3, RATE_UNITS, False)
_RUNS: Kind = (1, 4, 1, True)
_LEFT = 6


@dataclass(frozen=True, slots=True)
class Standing:
    """What an instance may do, judged by when it was last answered."""

    # It may use its shares in full.
    fresh: bool
    # Turns that it began by its shares in full may still run.
    running: bool
    # It may use the safe part.
    leased: bool


NOTHING = Standing(fresh=False, running=False, leased=False)


def standing(
    *,
    grants_until: datetime | None,
    lease_until: datetime,
    longest_turn_seconds: float,
    gone_at: datetime | None,
    gone_why: str,
    now: datetime,
) -> Standing:
    """Return what an instance may do at `now`, on the database's clock.

    One that left had drained. One that was declared dead, or joined anew, begins nothing; turns
    that it began run on for its longest turn.
    """
    turn = timedelta(seconds=longest_turn_seconds)
    if gone_why in (GoneWhy.LEFT, GoneWhy.LAPSED):
        return NOTHING
    if gone_at is not None:
        return Standing(fresh=False, running=now <= gone_at + MARGIN + turn, leased=False)
    # Never answered, it was never given anything. Past the lease no turn begins; those that run are
    # counted as long as they may.
    if grants_until is None or now > lease_until + MARGIN + turn:
        return NOTHING
    return Standing(
        fresh=now <= grants_until + MARGIN,
        running=now <= grants_until + MARGIN + turn,
        leased=True,
    )


@dataclass(slots=True)
class Member:
    """One instance whose documents count: what it may apply, what it asks for."""

    id: int
    cell: int
    standing: Standing
    # It applies `shares`, and has said so. Else it may apply `before` as well.
    heard: bool
    shares: Document
    before: Document = field(default_factory=dict)
    # Tenant -> turns that ran when it last reported.
    in_flight: Mapping[str, int] = field(default_factory=dict)
    # Tenant -> runs per second (units) that it served or refused; runs at once that it refused.
    demand: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    # `shares` were made so long ago that they are told again. What is left of a budget is held
    # against all that was used since it was told, over midnights too: a little of a budget each day
    # would be all of it in the end, and the tenant refused for ever.
    old: bool = False

    @property
    def free(self) -> bool:
        """Whether it may be given another document: it has said what it applies."""
        return self.heard and self.standing.fresh


@dataclass(frozen=True, slots=True)
class Ask:
    """One tenant's limits, over all instances of these cells. None: no such limit."""

    cells: frozenset[int]
    runs_per_second: float | None = None
    max_concurrent_runs: int | None = None
    daily_token_budget: int | None = None
    # Of the budget. None where there is none.
    tokens_left: int | None = None


@dataclass(frozen=True, slots=True)
class Redivided:
    """The new document of an instance, and what it may still apply until it has heard it."""

    shares: Document
    before: Document


def redivide(members: Sequence[Member], asks: Mapping[str, Ask]) -> dict[int, Redivided]:
    """Divide every tenant's limits anew; return the documents that changed, by instance.

    An instance that was not heard of in time gets the safe part as its whole: coming back, it must
    not take up again what others were lent meanwhile.
    """
    changed: dict[int, Redivided] = {}
    counted = []
    for member in members:
        if _is_silent(member, asks):
            shares, before = _collapsed(member, asks)
            changed[member.id] = Redivided(shares, before)
            member = Member(
                id=member.id,
                cell=member.cell,
                standing=member.standing,
                heard=False,
                shares=shares,
                before=before,
                in_flight=member.in_flight,
            )
        counted.append(member)
    free = [member for member in counted if member.free]
    documents: dict[int, dict[str, Share]] = {member.id: {} for member in free}
    busy = {tenant for member in counted for tenant in (*member.demand, *member.in_flight)}
    groups: dict[frozenset[int], _Group] = {}
    for tenant, ask in asks.items() if free else ():
        group = groups.get(ask.cells)
        if group is None:
            group = groups[ask.cells] = _group(counted, ask.cells)
        if tenant in busy or not _rests(tenant, ask, group, documents):
            _divide(tenant, ask, group, documents)
    for member in free:
        document = documents[member.id]
        told = member.old and any(share[_LEFT] is not None for share in document.values())
        if told or document != member.shares:
            # What it may still apply matters where it differs: of thousands of tenants, of few.
            before = {
                tenant: had
                for tenant, had in member.shares.items()
                if document.get(tenant) is not had
            }
            changed[member.id] = Redivided(document, before)
    return changed


@dataclass(frozen=True, slots=True)
class _Group:
    """The members that share a tenant's limits."""

    members: Sequence[Member]
    free: Sequence[Member]


def _group(members: Sequence[Member], cells: frozenset[int]) -> _Group:
    mine = [member for member in members if member.cell in cells]
    return _Group(mine, [member for member in mine if member.free])


def fill(total: int, wanted: Sequence[int]) -> list[int]:
    """Divide whole units by max-min fairness: nobody gets more than they want.

    >>> fill(10, [2, 9, 9]), fill(10, [1, 2, 3]), fill(1, [1, 1])
    ([2, 4, 4], [1, 2, 3], [0, 1])
    """
    parts = [0] * len(wanted)
    left, others = max(0, total), len(wanted)
    for at in sorted(range(len(wanted)), key=wanted.__getitem__):
        parts[at] = min(wanted[at], left // others)
        left -= parts[at]
        others -= 1
    return parts


def _rests(tenant: str, ask: Ask, group: _Group, documents: Mapping[int, dict[str, Share]]) -> bool:
    """Keep the shares of a tenant that nobody uses or asks for, if all of its limits are lent.

    Most tenants are idle, so this is what most of a round consists of.
    """
    if len(group.free) != len(group.members):
        return False
    shares = [share for member in group.free if (share := member.shares.get(tenant)) is not None]
    if not shares or len(shares) < len(group.free):
        return False
    if _left(ask, shares[0]) != shares[0][_LEFT]:
        return False
    for limit, kind in zip(_limits(ask), (_RATE, _RUNS), strict=True):
        full, safe, units, _ = kind
        values = [share[full] for share in shares]
        if limit is None or None in values:
            if limit is None and not any(value is not None for value in values):
                continue
            return False
        if not 0 <= limit - round(sum(values) * units) <= limit // 1_000:
            return False
        # One that comes back has no more than its safe part: that part's own is to be said.
        if any(share[safe] != _safe(round(share[full] * units), kind) / units for share in shares):
            return False
    for member, share in zip(group.free, shares, strict=True):
        documents[member.id][tenant] = share
    return True


def _limits(ask: Ask) -> tuple[int | None, int | None]:
    """Return a tenant's rate and runs at once, in units."""
    rate = ask.runs_per_second
    # Rounded first: 0.29 is a little less than 290,000 millionths.
    units = None if rate is None else math.floor(round(rate * RATE_UNITS, 3))
    return units, ask.max_concurrent_runs


def _divide(
    tenant: str, ask: Ask, group: _Group, documents: Mapping[int, dict[str, Share]]
) -> None:
    """Put the tenant's share into the document of each member that may be given another."""
    if not group.free:
        return
    rates, runs = (
        None if limit is None else _parts(tenant, limit, kind, group)
        for limit, kind in zip(_limits(ask), (_RATE, _RUNS), strict=True)
    )
    for at, member in enumerate(group.free):
        had = member.shares.get(tenant)
        share = _share(
            None if rates is None else rates[at],
            None if runs is None else runs[at],
            _left(ask, had),
        )
        # The same object where nothing changed: by it documents are compared.
        documents[member.id][tenant] = had if had == share else share


def _parts(tenant: str, limit: int, kind: Kind, group: _Group) -> list[int]:
    """Return the new share of each free member, in units."""
    # Those that are answered: all of them have a goal, also who can't be told of it just now.
    able = [member for member in group.members if member.standing.fresh]
    held = [_held(member, tenant, kind) for member in able]
    silent = (member for member in group.members if not member.standing.fresh)
    theirs = limit - sum(_held(member, tenant, kind) for member in silent)
    room = theirs - sum(held)
    has = [_units(member.shares, tenant, kind[0], kind[2]) for member in able]
    wants = [_wants(member, tenant, kind) for member in able]
    starved = any(want > had for want, had in zip(wants, has, strict=True))
    missing = any(tenant not in member.shares for member in able)
    parts = has
    if starved or missing or not 0 <= room <= limit // 1_000:
        goals = _goals(limit, max(0, theirs), wants)
        # Who is to have less is told so now, and lends it once it has said that it heard.
        more = fill(room, [max(0, goal - now) for goal, now in zip(goals, held, strict=True)])
        parts = [
            min(goal, now + further) for goal, now, further in zip(goals, held, more, strict=True)
        ]
    if kind is _RATE and room >= 0:
        parts = [
            had if abs(part - had) * RATE_STEP <= had else part
            for part, had in zip(parts, has, strict=True)
        ]
    return [part for part, member in zip(parts, able, strict=True) if member.heard]


def _goals(limit: int, total: int, wants: Sequence[int]) -> list[int]:
    """Divide by what is asked for, then what is spare equally."""
    count = len(wants)
    least = limit // (IDLE_PART * count)
    if limit >= 2 * count:
        least = max(1, least)
    goals = fill(total, [max(want, least) for want in wants])
    spare, odd = divmod(total - sum(goals), count)
    # Single units go where most is asked for.
    first = sorted(range(count), key=lambda at: -wants[at])[:odd]
    for at in range(count):
        goals[at] += spare
    for at in first:
        goals[at] += 1
    return goals


def _held(member: Member, tenant: str, kind: Kind) -> int:
    """Return the most of a limit that a member may still use."""
    full, safe, units, at_once = kind
    state = member.standing
    if state.running if at_once else state.fresh:
        at = full
    elif state.leased:
        at = safe
    else:
        return 0
    most = _units(member.shares, tenant, at, units)
    if not member.heard:
        most = max(most, _units(member.before, tenant, at, units))
    if at_once and state.running:
        # A share that became smaller ends no turn.
        most = max(most, member.in_flight.get(tenant, 0))
    return most


def _wants(member: Member, tenant: str, kind: Kind) -> int:
    rate, refused = member.demand.get(tenant, (0, 0))
    return member.in_flight.get(tenant, 0) + refused if kind is _RUNS else rate


def _units(document: Document, tenant: str, at: int, units: int) -> int:
    share = document.get(tenant)
    value = None if share is None else share[at]
    return 0 if value is None else round(value * units)


def _share(rate: int | None, runs: int | None, left: int | None) -> Share:
    return [
        None if rate is None else rate / RATE_UNITS,
        runs,
        # Nobody divides tokens per minute.
        None,
        None if rate is None else _safe(rate, _RATE) / RATE_UNITS,
        None if runs is None else _safe(runs, _RUNS),
        None,
        left,
    ]


def _safe(part: int, kind: Kind) -> int:
    """Return what is left of a part for an instance that nobody answers: half of it.

    For one that is alone in its cell too: were it all, a process that is started again after a
    crash would find nothing left until the lease of the dead one is over. Of runs at once one is
    left in any case, or a tenant that may have one would have none while nobody answers.
    """
    return (part + 1) // 2 if kind is _RUNS else part // 2


def _left(ask: Ask, had: Share | None) -> int | None:
    """Return what is left of the budget, as it was said before where that is near enough."""
    left, budget = ask.tokens_left, ask.daily_token_budget
    if left is None or budget is None:
        return None
    said = None if had is None else had[_LEFT]
    if said is None or not said or not left or abs(said - left) * BUDGET_STEP > budget:
        return left
    return int(said)


def _is_silent(member: Member, asks: Mapping[str, Ask]) -> bool:
    """Whether a member was not answered in time and may still come back to more than is counted."""
    if member.standing.fresh or not member.standing.leased:
        return False
    return any(
        share[full] != share[safe] or not _is_asked(tenant, member, asks)
        for tenant, share in member.shares.items()
        for full, safe, *_ in (_RATE, _RUNS)
    )


def _is_asked(tenant: str, member: Member, asks: Mapping[str, Ask]) -> bool:
    ask = asks.get(tenant)
    return ask is not None and member.cell in ask.cells


def _collapsed(member: Member, asks: Mapping[str, Ask]) -> tuple[Document, Document]:
    """Return the documents by which a member has no more than the safe part, when it comes back.

    And nothing of a tenant that has left its cell: all of that limit was lent elsewhere, and the
    tenant may have come back before the member does.
    """
    shares, before = {}, {}
    documents = (member.shares,) if member.heard else (member.shares, member.before)
    for tenant in dict.fromkeys(tenant for document in documents for tenant in document):
        said = [document[tenant] for document in documents if tenant in document]
        most = [_most(values) for values in zip(*said, strict=True)]
        _, runs, tokens, safe_rate, safe_runs, safe_tokens, _ = most
        left = said[0][_LEFT]
        if _is_asked(tenant, member, asks):
            full = safe_rate, safe_runs, tokens
            shares[tenant] = [*full, safe_rate, safe_runs, safe_tokens, left]
        # No turn begins by the full share any more; those that run are counted by it.
        before[tenant] = [safe_rate, runs, tokens, safe_rate, safe_runs, safe_tokens, left]
    return shares, before


def _most(values: Sequence[Any]) -> Any:
    return max((value for value in values if value is not None), default=None)
