"""Counts: is every event that a client was told of in its tenant's store, once?

Journals say what was acknowledged, the stores where the tenants now live what there is. The
stores are read by SQL, not through anything that moved them.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psycopg

from bench import journal

# How many examples of each fault are kept for the report.
EXAMPLES = 5


class Stored(NamedTuple):
    """One event as its store holds it."""

    user: str
    session: str
    id: str
    invocation: str
    author: str
    # As its store spells it: later ones sort behind earlier ones.
    at: Any


@dataclass(frozen=True)
class Home:
    """Where a tenant lives now."""

    app_name: str
    # The store's URL, as agents have it.
    url: str


@dataclass
class Verdict:
    """What came out. `clean` is the question."""

    acknowledged: int = 0
    found: int = 0
    doubled: int = 0
    # Sessions in which one store acknowledged an event after another had taken over.
    returned: int = 0
    # Sessions whose events the store holds in another order than clients were told of them.
    disordered: int = 0
    # Conversations that a client deleted, and those of them that are there again.
    deleted: int = 0
    revived: int = 0
    turns: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    # (tenant, when) of each refusal, to be held against the times of the fence.
    refusals: list[tuple[str, float]] = field(default_factory=list)
    failed: int = 0
    # Turns that the Host ended at their longest time: a slow machine's, and nothing is lost by it.
    cut: int = 0
    # A few of each fault, in words.
    examples: list[str] = field(default_factory=list)

    @property
    def missing(self) -> int:
        return self.acknowledged - self.found

    @property
    def clean(self) -> bool:
        faults = (self.missing, self.doubled, self.returned, self.disordered, self.revived)
        return not any(faults)

    def __str__(self) -> str:
        return f"{self.acknowledged:,} acknowledged, {self.found:,} found, {self.doubled:,} doubled"

    def refused_outside(self, tenant: str, begin: float, end: float) -> int:
        """Return how many refusals were not of `tenant` between the times `begin` and `end`."""
        return sum(not (who == tenant and begin <= when <= end) for who, when in self.refusals)

    def _note(self, text: str) -> None:
        if len(self.examples) < EXAMPLES:
            self.examples.append(text)


def audit(
    journals: Iterable[Path],
    homes: Mapping[str, Home],
    *,
    lived: Mapping[str, Sequence[str]] | None = None,
) -> Verdict:
    """Compare journals with the stores. `homes` says where each tenant lives now.

    `lived` names the stores in which a tenant has lived, one after another, for those that went
    back; of the others no store may answer again once another one has.
    """
    verdict = Verdict()
    # (tenant, user, session) -> what was acknowledged of it, in order.
    told: dict[tuple[str, str, str], list[journal.Line]] = defaultdict(list)
    # (tenant, user, session, invocation) -> how many events a finished turn yielded.
    whole: dict[tuple[str, str, str, str], int] = {}
    # The last word of each session that was to be deleted.
    ends: dict[tuple[str, str, str], journal.Kind] = {}
    for line in journal.read(journals):
        key = (line.tenant, line.user, line.session)
        if line.kind in ("deleting", "deleted") or (line.kind == "refused" and key in ends):
            ends[key] = line.kind
        if line.kind == "event":
            told[key].append(line)
        elif line.kind == "turn":
            verdict.turns += 1
            if line.invocation:
                whole[*key, line.invocation] = line.count
        elif line.kind == "refused":
            verdict.refused[line.reason] += 1
            verdict.refusals.append((line.tenant, line.at))
        elif line.kind == "failed" and line.reason.startswith("TurnTooLong"):
            verdict.cut += 1
        elif line.kind == "failed":
            verdict.failed += 1
            verdict._note(f"failed: {line.tenant} {line.session}: {line.reason}")
    stored = {tenant: _by_session(home) for tenant, home in homes.items()}
    # What a killed process was about to delete may be there or not.
    over = {key for key, word in ends.items() if word != "refused"}
    for tenant, user, session in (key for key, word in ends.items() if word == "deleted"):
        verdict.deleted += 1
        if stored[tenant].get((user, session)):
            verdict.revived += 1
            verdict._note(f"{tenant}/{user}/{session}: deleted, and there again")
    for (tenant, user, session), lines in told.items():
        if (tenant, user, session) in over:
            continue
        there = stored[tenant].get((user, session), [])
        _count(verdict, f"{tenant}/{user}/{session}", lines, there)
        _owners(verdict, f"{tenant}/{user}/{session}", lines, (lived or {}).get(tenant))
        _order(verdict, f"{tenant}/{user}/{session}", lines, there)
    for (tenant, user, session, invocation), count in whole.items():
        if (tenant, user, session) in over:
            continue
        there = stored[tenant].get((user, session), [])
        # The user's own event is one more. Fewer would be counted as missing already.
        extra = sum(event.invocation == invocation for event in there) - count - 1
        if extra > 0:
            verdict.doubled += extra
            verdict._note(f"{tenant}/{user}/{session}: {extra} more events than were yielded")
    return verdict


def _count(verdict: Verdict, where: str, lines: list[journal.Line], there: list[Stored]) -> None:
    ids = Counter(event.id for event in there)
    users = Counter(event.invocation for event in there if event.author == "user")
    for name, found in [
        *((line.id, ids[line.id]) for line in lines),
        # With the first event of an invocation the user's own is acknowledged.
        *((word, users[word]) for word in {line.invocation for line in lines}),
    ]:
        verdict.acknowledged += 1
        verdict.found += found > 0
        verdict.doubled += max(0, found - 1)
        if found != 1:
            verdict._note(f"{where}: {name} is there {found} times")


def _owners(
    verdict: Verdict, where: str, lines: list[journal.Line], lived: Sequence[str] | None
) -> None:
    """Note a session in which a store answered after it had given the tenant away."""
    # One session may be in several journals, one after another.
    stores = [line.store for line in sorted(lines, key=lambda line: line.at) if line.store]
    runs = [store for n, store in enumerate(stores) if n == 0 or stores[n - 1] != store]
    # Without a word of where it lived, each store once. A session may have been silent in one.
    places = iter(dict.fromkeys(runs) if lived is None else lived)
    if not all(store in places for store in runs):
        verdict.returned += 1
        verdict._note(f"{where}: acknowledged by {' then '.join(runs)}")


def _order(verdict: Verdict, where: str, lines: list[journal.Line], there: list[Stored]) -> None:
    """Note a session whose events are not read back in the order in which they were told."""
    told = [line.id for line in sorted(lines, key=lambda line: line.at)]
    known = set(told)
    kept = [event.id for event in sorted(there, key=lambda event: event.at) if event.id in known]
    found = set(kept)
    if len(kept) == len(found) and kept != [name for name in told if name in found]:
        verdict.disordered += 1
        verdict._note(f"{where}: told in another order than it is stored")


def _by_session(home: Home) -> dict[tuple[str, str], list[Stored]]:
    sessions: dict[tuple[str, str], list[Stored]] = defaultdict(list)
    for event in _read(home):
        sessions[event.user, event.session].append(event)
    return sessions


def _read(home: Home) -> Iterable[Stored]:
    scheme, _, rest = home.url.partition("://")
    columns = "user_id, session_id, id, invocation_id"
    if scheme.startswith("sqlite"):
        # Three slashes, then the path: an absolute one has four.
        path = Path("/" + rest.lstrip("/"))
        with sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=20) as connection:
            yield from map(
                Stored._make,
                connection.execute(
                    f"SELECT {columns}, json_extract(event_data, '$.author'), timestamp"
                    " FROM events"
                    " WHERE app_name = ?",
                    (home.app_name,),
                ),
            )
        connection.close()
    else:
        with psycopg.connect(f"postgresql://{rest}") as server:
            yield from map(
                Stored._make,
                server.execute(
                    f"SELECT {columns}, event_data->>'author', timestamp FROM events"
                    " WHERE app_name = %s",
                    (home.app_name,),
                ),
            )


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--homes", type=Path, required=True, help='{"acme": ["app", "url"]}')
    options.add_argument("journals", type=Path, nargs="+")
    chosen = options.parse_args()
    homes = {t: Home(*home) for t, home in json.loads(chosen.homes.read_text()).items()}
    verdict = audit(chosen.journals, homes)
    for example in verdict.examples:
        print(example, file=sys.stderr)
    print(verdict)
    return 0 if verdict.clean else 1


if __name__ == "__main__":
    sys.exit(main())
