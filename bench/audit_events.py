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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psycopg

from bench import journal
from bench.journal import LAST_WORD

# How many examples of each fault are kept for the report.
EXAMPLES = 5
# An event that nobody was told of, for its process died, was stored so long after it was made.
STORED_WITHIN_SECONDS = 5.0


class Stored(NamedTuple):
    """One event as its store holds it."""

    user: str
    session: str
    id: str
    invocation: str
    author: str
    # As its store spells it: later ones sort behind earlier ones.
    at: Any
    # What it made its user's last word, if it did, and when it was made, by its own account.
    word: str | None
    made: float


class Lived(NamedTuple):
    """A store in which a tenant has lived for a while."""

    store: str
    # True: in a split, only the sessions that began there meanwhile.
    births: bool = False


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
    # Users who set a last word that was acknowledged, and those whose state has an older one.
    spoken: int = 0
    outspoken: int = 0
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
        return not any((*faults, self.outspoken))

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
    lived: Mapping[str, Sequence[Lived]] | None = None,
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
    events = {tenant: list(_read(home)) for tenant, home in homes.items()}
    stored = {tenant: _by_session(found) for tenant, found in events.items()}
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
    for tenant, home in homes.items():
        of_tenant = {key[1:]: lines for key, lines in told.items() if key[0] == tenant}
        gone = {key[1:] for key in over if key[0] == tenant}
        _words(verdict, tenant, of_tenant, events[tenant], _last_words(home), gone)
    return verdict


def _words(
    verdict: Verdict,
    tenant: str,
    told: Mapping[tuple[str, str], list[journal.Line]],
    there: Sequence[Stored],
    words: Mapping[str, str],
    gone: Collection[tuple[str, str]],
) -> None:
    """Note users whose shared state has another last word than the last that was acknowledged.

    Words of two sessions may be under way at once: only one that was made after another had been
    acknowledged is later than that. What a deleted session had said last may be forgotten.
    """
    # Word -> until when another may have been made before it was stored.
    until = {e.word: e.made + STORED_WITHIN_SECONDS for e in there if e.word}
    # User -> when each of its words was made that has to stand, or a later one.
    made: dict[str, list[float]] = defaultdict(list)
    for key, lines in told.items():
        for line in (line for line in lines if line.word):
            until[line.word] = line.at
            if key not in gone:
                made[key[0]].append(line.made)
    whose_gone = {user for user, _ in gone}
    for user, times in made.items():
        verdict.spoken += 1
        word = words.get(user, "")
        # A turn that was cut, of a session that is deleted by now, may have said it.
        unheard = word not in until and user not in whose_gone
        if unheard or max(times) > until.get(word, max(times)):
            verdict.outspoken += 1
            verdict._note(f"{tenant}/{user}: the last word is {word or 'none'}, an older one")


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
    verdict: Verdict, where: str, lines: list[journal.Line], lived: Sequence[Lived] | None
) -> None:
    """Note a session in which a store answered after it had given the tenant away."""
    # One session may be in several journals, one after another.
    stores = [line.store for line in sorted(lines, key=lambda line: line.at) if line.store]
    runs = [store for n, store in enumerate(stores) if n == 0 or stores[n - 1] != store]
    # Without a word of where it lived, each store once. A session may have been silent in one.
    places = iter([Lived(store) for store in dict.fromkeys(runs)] if lived is None else lived)
    if not all(_passes(places, store, first=not n) for n, store in enumerate(runs)):
        verdict.returned += 1
        verdict._note(f"{where}: acknowledged by {' then '.join(runs)}")


def _passes(places: Iterator[Lived], store: str, *, first: bool) -> bool:
    """Go on to the next place that is `store`; return whether there is one."""
    # Where only sessions lived that began there, no other session may have come to.
    return any(place.store == store and (first or not place.births) for place in places)


def _order(verdict: Verdict, where: str, lines: list[journal.Line], there: list[Stored]) -> None:
    """Note a session whose events are not read back in the order in which they were told."""
    told = [line.id for line in sorted(lines, key=lambda line: line.at)]
    known = set(told)
    kept = [event.id for event in sorted(there, key=lambda event: event.at) if event.id in known]
    found = set(kept)
    if len(kept) == len(found) and kept != [name for name in told if name in found]:
        verdict.disordered += 1
        verdict._note(f"{where}: told in another order than it is stored")


def _by_session(events: Iterable[Stored]) -> dict[tuple[str, str], list[Stored]]:
    sessions: dict[tuple[str, str], list[Stored]] = defaultdict(list)
    for event in events:
        sessions[event.user, event.session].append(event)
    return sessions


def _read(home: Home) -> Iterable[Stored]:
    columns = "user_id, session_id, id, invocation_id"
    if home.url.startswith("sqlite"):
        with closing(_sqlite(home)) as connection:
            yield from map(
                Stored._make,
                connection.execute(
                    f"SELECT {columns}, json_extract(event_data, '$.author'), timestamp,"
                    f""" json_extract(event_data, '$.actions.state_delta."{LAST_WORD}"'),"""
                    " coalesce(json_extract(event_data, '$.timestamp'), 0.0)"
                    " FROM events WHERE app_name = ?",
                    (home.app_name,),
                ),
            )
    else:
        with psycopg.connect(_postgres(home)) as server:
            yield from map(
                Stored._make,
                server.execute(
                    f"SELECT {columns}, event_data->>'author', timestamp,"
                    f" event_data->'actions'->'state_delta'->>'{LAST_WORD}',"
                    " coalesce((event_data->>'timestamp')::float8, 0.0)"
                    " FROM events WHERE app_name = %s",
                    (home.app_name,),
                ),
            )


def _last_words(home: Home) -> dict[str, str]:
    """Return each user's last word, as the user's shared state has it."""
    key = LAST_WORD.removeprefix("user:")
    if home.url.startswith("sqlite"):
        with closing(_sqlite(home)) as connection:
            rows = connection.execute(
                f"SELECT user_id, json_extract(state, '$.{key}') FROM user_states"
                " WHERE app_name = ?",
                (home.app_name,),
            ).fetchall()
    else:
        with psycopg.connect(_postgres(home)) as server:
            rows = server.execute(
                f"SELECT user_id, state->>'{key}' FROM user_states WHERE app_name = %s",
                (home.app_name,),
            ).fetchall()
    return {user: word or "" for user, word in rows}


def _sqlite(home: Home) -> sqlite3.Connection:
    # Three slashes, then the path: an absolute one has four.
    path = Path("/" + home.url.partition("://")[2].lstrip("/"))
    return sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=20)


def _postgres(home: Home) -> str:
    return f"postgresql://{home.url.partition('://')[2]}"


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    shape = '{"acme": [app name, URL of the store where it lives, stores in which it lived]}'
    options.add_argument(
        "--homes", type=Path, required=True, help=f"{shape}, as the demo keeps in var/demo"
    )
    options.add_argument("journals", type=Path, nargs="+", help="such as var/demo/journal/*.jsonl")
    chosen = options.parse_args()
    known = json.loads(chosen.homes.read_text())
    homes = {tenant: Home(name, url) for tenant, (name, url, _) in known.items()}
    lived = {tenant: [Lived(*one) for one in stores] for tenant, (_, _, stores) in known.items()}
    verdict = audit(chosen.journals, homes, lived=lived)
    for example in verdict.examples:
        print(example, file=sys.stderr)
    print(verdict)
    return 0 if verdict.clean else 1


if __name__ == "__main__":
    sys.exit(main())
