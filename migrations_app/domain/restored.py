"""Whether a database restored from a backup still knows where a tenant lives.

Each store has a guard row of the tenant, which only ever rises: what a move did there after the
backup was taken, that row still says. Here it is compared with what the database believes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from migrations_app.domain.phases import Phase


class GuardRow(NamedTuple):
    """A tenant's row in a store's guard table."""

    move: int
    claim: int
    mover: bool
    agents: bool


@dataclass(frozen=True, slots=True)
class LiveMove:
    """A move that has not ended, as the database has it."""

    pk: int
    phase: Phase
    claim: int
    # It made both guard rows.
    guarded: bool
    source: str
    target: str
    # It moves by a split; agents of both sides serve the tenant, each its own sessions.
    splits: bool = False
    split: bool = False


@dataclass(frozen=True, slots=True)
class Says:
    """What the database says of one tenant. Stores are named by their keys."""

    store: str
    # None: none lives.
    move: LiveMove | None
    # The other store of a split. None: the placement is not split.
    far: str | None = None
    # Numbers of the tenant's moves that have ended, and of moves of other tenants.
    ended: Collection[int] = ()
    others: Collection[int] = ()


class Split(NamedTuple):
    """The two stores on which a tenant's sessions live, and the move that split them."""

    move: int
    source: str
    # Empty: no answer tells which one that is.
    target: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the comparison came to."""

    # What differs, in a person's words; none: the database is right.
    differs: tuple[str, ...]
    # Stores at which a person may say that the tenant lives. Of a split both: the sessions of the
    # other are brought to the one that is named.
    homes: tuple[str, ...]
    # True: the home is closed to agents, and has to be opened.
    opens: bool
    # Moves of guard rows that the database has never heard of.
    lost: tuple[int, ...]
    # Sessions live on both sides. None: on one.
    split: Split | None = None

    @property
    def same(self) -> bool:
        return not self.differs


# What became of a tenant of which nobody could say where it lives: no turn of it is taken before
# it is compared anew.
STAYS_REFUSED = "Stays refused"

# Whether agents may write at (source, target) in each phase. The step that changes a flag is
# in the phase itself, so there both are right.
_NO, _YES, _EITHER = frozenset({False}), frozenset({True}), frozenset({False, True})
AGENTS: Mapping[Phase, tuple[frozenset[bool], frozenset[bool]]] = {
    # A target with rows of strangers is opened to them again.
    Phase.PREPARE: (_YES, _EITHER),
    Phase.BACKFILL: (_YES, _NO),
    # The target opens last of all.
    Phase.SPLIT: (_YES, _EITHER),
    Phase.DRAIN: (_EITHER, _NO),
    Phase.DELTA: (_NO, _NO),
    Phase.VERIFY: (_NO, _NO),
    Phase.TARGET: (_NO, _EITHER),
    # A rollback that was stopped comes back here and opens the target.
    Phase.SOAK: (_NO, _EITHER),
    Phase.OFFBOARD: (_NO, _YES),
    Phase.REOPEN: (_EITHER, _EITHER),
    Phase.REVERSE_DRAIN: (_NO, _EITHER),
    Phase.REVERSE_DELTA: (_NO, _NO),
    Phase.REVERSE_VERIFY: (_NO, _NO),
    Phase.REVERSE_TARGET: (_EITHER, _NO),
}
# The same while a split is live.
AGENTS_OF_SPLIT: Mapping[Phase, tuple[frozenset[bool], frozenset[bool]]] = {
    # Come back to from a fence, on either side, it opens what that had closed.
    Phase.SPLIT: (_EITHER, _EITHER),
    Phase.DRAIN: (_EITHER, _YES),
    Phase.DELTA: (_NO, _YES),
    Phase.VERIFY: (_NO, _YES),
    Phase.TARGET: (_NO, _YES),
    Phase.REVERSE_DRAIN: (_YES, _EITHER),
    Phase.REVERSE_DELTA: (_YES, _NO),
    Phase.REVERSE_VERIFY: (_YES, _NO),
    Phase.REVERSE_TARGET: (_YES, _NO),
}


def judge(says: Says, rows: Mapping[str, GuardRow], silent: Collection[str]) -> Verdict:
    """Compare what the database says of a tenant with its guard rows.

    `rows`: store key -> the tenant's row there; a store that answered and has none is absent.
    `silent`: stores that did not answer.

    >>> judge(Says("a", None), {"a": GuardRow(7, 3, False, False)}, ()).differs
    ('a is closed to agents by mv-7, which is unknown here',)
    """
    move = says.move
    own = {move.pk} if move is not None else set()
    open_at = {key for key, row in rows.items() if row.agents}
    if says.store not in rows and says.store not in silent:
        # No guard row: nothing was ever closed there.
        open_at.add(says.store)
    sides = {says.store} | ({move.source, move.target} if move is not None else set())
    sides |= {says.far} if says.far is not None else set()
    together = _split(says, rows)
    differs = [f"{key} does not answer" for key in sorted(sides & set(silent))]
    if move is None:
        home = rows.get(says.store)
        if home is not None and not home.agents:
            differs.append(f"{says.store} is closed to agents by {_named(home.move, says)}")
        if says.far is not None:
            differs.append(
                f"{says.store} and {says.far} serve it, and no move is here to join them"
            )
    else:
        differs += _of_move(move, says, rows, silent)
    differs += [
        f"agents may write at {key} by {_named(rows[key].move, says)}"
        for key in sorted(open_at - sides)
    ]
    differs += [
        f"{key} is guarded by mv-{row.move}, which is another tenant's move here"
        for key, row in sorted(rows.items())
        if row.move in says.others
    ]
    known = {*says.ended, *says.others, *own}
    lost = tuple(sorted({row.move for row in rows.values()} - known))
    if together is None and _unheard(says, rows, silent):
        differs.append("a store that does not answer may have sessions of a split")
        return Verdict(tuple(differs), (), opens=False, lost=lost)
    if together is None:
        homes = tuple(sorted(open_at)) or _closed_home(rows, silent)
        return Verdict(tuple(differs), homes, opens=not open_at and bool(homes), lost=lost)
    if together.move not in own:
        differs.append(
            f"sessions live on {together.source} and on {together.target or 'another store'} by"
            f" {_named(together.move, says)}: name the one that shall have all"
        )
    # Of one alone nobody may say that the tenant lives there: the other's sessions would be left.
    both = {together.source, together.target}
    ours = says.store == together.source and together.move not in says.others
    able = ours and together.target != "" and open_at <= both and not both & {*silent}
    homes = (together.source, together.target) if able else ()
    return Verdict(tuple(differs), homes, opens=False, lost=lost, split=together)


def _split(says: Says, rows: Mapping[str, GuardRow]) -> Split | None:
    """Return the split that the newest move's guard rows tell of; None: they tell of none.

    Only in a split may both the move and agents write at one store: at the target until all is
    there, on the way back at the source until all is back.
    """
    newest = max((row.move for row in rows.values()), default=0)
    of_newest = {key for key, row in rows.items() if row.move == newest}
    if not any(rows[key].mover and rows[key].agents for key in of_newest):
        return None
    if says.move is not None and says.move.pk == newest:
        return Split(newest, says.move.source, says.move.target)
    # A lost one began where the tenant lived.
    [source, *_] = sorted(of_newest, key=lambda key: (key != says.store, key))
    others = {*of_newest, *([] if says.far is None else [says.far])} - {source}
    return Split(newest, source, others.pop() if len(others) == 1 else "")


def _unheard(says: Says, rows: Mapping[str, GuardRow], silent: Collection[str]) -> bool:
    """Return whether a silent store may be the other side of a split, whose rows would tell.

    An open source looks the same whether new sessions were born elsewhere or not.
    """
    if not silent:
        return False
    newest = max((row.move for row in rows.values()), default=0)
    if says.far is not None:
        return not {says.store, says.far}.isdisjoint(silent)
    if says.move is not None and says.move.pk == newest:
        return says.move.splits and not {says.move.source, says.move.target}.isdisjoint(silent)
    alone = sum(row.move == newest for row in rows.values()) == 1
    return alone and newest not in says.ended and newest not in says.others


def _of_move(
    move: LiveMove, says: Says, rows: Mapping[str, GuardRow], silent: Collection[str]
) -> list[str]:
    """Return what a live move would not find as it left it."""
    differs = []
    table = AGENTS_OF_SPLIT if move.split else AGENTS
    for key, allowed in zip((move.source, move.target), table[move.phase], strict=True):
        row = rows.get(key)
        if key in silent:
            continue
        if row is None or row.move != move.pk:
            if move.guarded:
                by = "nobody" if row is None else _named(row.move, says)
                differs.append(f"{key} is guarded by {by}, not by mv-{move.pk}")
            elif row is not None and row.agents is not (key == move.source):
                may = "may" if row.agents else "may not"
                differs.append(f"agents {may} write at {key} by {_named(row.move, says)}")
            continue
        if row.claim > move.claim:
            differs.append(
                f"mv-{move.pk} went on at {key}: claim {row.claim:,} there, {move.claim:,} here"
            )
        if row.agents not in allowed:
            may = "may" if row.agents else "may not"
            differs.append(f"agents {may} write at {key}, unlike in {move.phase.upper()}")
    return differs


def _closed_home(rows: Mapping[str, GuardRow], silent: Collection[str]) -> tuple[str, ...]:
    """Return the one closed store that may be opened, where agents may write at none.

    Inside a fence both sides are closed, and the mover writes the copy: so the newest move's
    side that it does not write is whole. Where that is both of them (a fence just closed, on the
    way back) the one that was closed last, under the higher claim, is the home: the other has
    been closed since the cutover. While a store is silent nobody can say that: the tenant may
    live there.
    """
    if silent or not rows:
        return ()
    newest = max(row.move for row in rows.values())
    whole = {key: row for key, row in rows.items() if row.move == newest and not row.mover}
    last = max((row.claim for row in whole.values()), default=0)
    homes = [key for key, row in whole.items() if row.claim == last]
    return (homes[0],) if len(homes) == 1 else ()


def _named(move: int, says: Says) -> str:
    if says.move is not None and move == says.move.pk:
        return f"mv-{move}"
    known = move in says.ended
    return f"mv-{move}" + ("" if known else ", which is unknown here")


def told(rows: Mapping[str, GuardRow], silent: Collection[str]) -> str:
    """Say what the stores answered about one tenant, in a line for a person.

    >>> told({"a": GuardRow(7, 3, False, False), "b": GuardRow(7, 2, False, True)}, ["c"])
    'a: closed (mv-7); b: open (mv-7); c: no answer'
    """
    words = [f"{key}: {_state(row)} (mv-{row.move})" for key, row in sorted(rows.items())]
    return "; ".join(words + [f"{key}: no answer" for key in sorted(silent)]) or "no guard row"


def _state(row: GuardRow) -> str:
    if row.agents:
        return "open"
    return "closed, being written by the move" if row.mover else "closed"
