"""The life of a move, as tables that driver, tests, docs and the page's stepper all read."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    PREPARE = "prepare"  # Both stores are surveyed; guard, tables and rights are made sure of.
    BACKFILL = "backfill"  # The tenant is live; sessions go over, one bounded chunk per step.
    SPLIT = "split"  # New sessions begin on the target, known ones stay until they are idle.
    DRAIN = "drain"  # The fence is closed; waits for the proof, then closes the store.
    DELTA = "delta"  # What changed since its copy goes over; deletes and shared state too.
    VERIFY = "verify"  # Every session must be equal; nothing writes either side.
    TARGET = "target"  # Point of no return: routers read the target from here on.
    SOAK = "soak"  # The tenant lives on the target; the source stays closed and whole.
    OFFBOARD = "offboard"  # Point of no return: the source's copy is deleted.
    DONE = "done"
    REOPEN = "reopen"  # On the way to ABORTED: the store opens, then the policy, then clean-up.
    ABORTED = "aborted"
    REVERSE_DRAIN = "reverse_drain"  # The way back out of SOAK: the fence closes on the target.
    REVERSE_DELTA = "reverse_delta"  # What was touched since the cutover goes back; deletes too.
    REVERSE_VERIFY = "reverse_verify"  # Every session must be equal once more.
    REVERSE_TARGET = "reverse_target"  # Point of no return: routers read the source again.
    ROLLED_BACK = "rolled_back"


class Mode(StrEnum):
    FENCE = "fence"  # Every new turn is refused for a short, measured time.
    SPLIT = "split"  # Only known sessions are, and only once they are idle.
    CELL = "cell"  # Only the cell changes: the store stays, open to both, and nothing is copied.


TABLE: dict[Phase, frozenset[Phase]] = {
    Phase.PREPARE: frozenset({Phase.BACKFILL, Phase.DRAIN, Phase.REOPEN}),
    Phase.BACKFILL: frozenset({Phase.SPLIT, Phase.DRAIN, Phase.REOPEN}),
    Phase.SPLIT: frozenset({Phase.DRAIN, Phase.REVERSE_DRAIN, Phase.REOPEN}),
    Phase.DRAIN: frozenset({Phase.DELTA, Phase.TARGET, Phase.REOPEN, Phase.SPLIT}),
    Phase.DELTA: frozenset({Phase.VERIFY, Phase.REOPEN, Phase.SPLIT}),
    Phase.VERIFY: frozenset({Phase.TARGET, Phase.REOPEN, Phase.SPLIT}),
    Phase.TARGET: frozenset({Phase.SOAK}),
    Phase.SOAK: frozenset({Phase.OFFBOARD, Phase.DONE, Phase.REVERSE_DRAIN}),
    Phase.OFFBOARD: frozenset({Phase.DONE}),
    Phase.DONE: frozenset(),
    Phase.REOPEN: frozenset({Phase.ABORTED}),
    Phase.ABORTED: frozenset(),
    Phase.REVERSE_DRAIN: frozenset(
        {Phase.REVERSE_DELTA, Phase.REVERSE_TARGET, Phase.SOAK, Phase.SPLIT}
    ),
    Phase.REVERSE_DELTA: frozenset({Phase.REVERSE_VERIFY, Phase.SOAK, Phase.SPLIT}),
    Phase.REVERSE_VERIFY: frozenset({Phase.REVERSE_TARGET, Phase.SOAK, Phase.SPLIT}),
    Phase.REVERSE_TARGET: frozenset({Phase.ROLLED_BACK}),
    Phase.ROLLED_BACK: frozenset(),
}

# Where a phase leads when all goes well, unless the mode says otherwise (`onward`).
FORWARD: dict[Phase, Phase] = {
    Phase.PREPARE: Phase.BACKFILL,
    Phase.BACKFILL: Phase.DRAIN,
    Phase.SPLIT: Phase.DRAIN,
    Phase.DRAIN: Phase.DELTA,
    Phase.DELTA: Phase.VERIFY,
    Phase.VERIFY: Phase.TARGET,
    Phase.TARGET: Phase.SOAK,
    Phase.SOAK: Phase.OFFBOARD,
    Phase.OFFBOARD: Phase.DONE,
    Phase.REOPEN: Phase.ABORTED,
    Phase.REVERSE_DRAIN: Phase.REVERSE_DELTA,
    Phase.REVERSE_DELTA: Phase.REVERSE_VERIFY,
    Phase.REVERSE_VERIFY: Phase.REVERSE_TARGET,
    Phase.REVERSE_TARGET: Phase.ROLLED_BACK,
}

# Where the mode says otherwise. Of the cell alone there is nothing to copy, compare or delete.
OTHERWISE: dict[Mode, dict[Phase, Phase]] = {
    Mode.FENCE: {},
    Mode.SPLIT: {Phase.BACKFILL: Phase.SPLIT},
    Mode.CELL: {
        Phase.PREPARE: Phase.DRAIN,
        Phase.DRAIN: Phase.TARGET,
        Phase.SOAK: Phase.DONE,
        Phase.REVERSE_DRAIN: Phase.REVERSE_TARGET,
    },
}

# Where an abort leads. A phase that is missing here can't be aborted. The way back leads to where
# it came from: SOAK, or in split mode SPLIT.
WAY_OUT: dict[Mode, dict[Phase, Phase]] = {
    Mode.FENCE: {
        Phase.PREPARE: Phase.REOPEN,
        Phase.BACKFILL: Phase.REOPEN,
        Phase.DRAIN: Phase.REOPEN,
        Phase.DELTA: Phase.REOPEN,
        Phase.VERIFY: Phase.REOPEN,
        # A rollback that is stopped: the tenant stays on the target, and its soak begins anew.
        Phase.REVERSE_DRAIN: Phase.SOAK,
        Phase.REVERSE_DELTA: Phase.SOAK,
        Phase.REVERSE_VERIFY: Phase.SOAK,
    },
    Mode.SPLIT: {
        Phase.PREPARE: Phase.REOPEN,
        Phase.BACKFILL: Phase.REOPEN,
        # Before anything was born on the target; after that the rollback's way is the only one.
        Phase.SPLIT: Phase.REOPEN,
        Phase.DRAIN: Phase.SPLIT,
        Phase.DELTA: Phase.SPLIT,
        Phase.VERIFY: Phase.SPLIT,
        Phase.REVERSE_DRAIN: Phase.SOAK,
        Phase.REVERSE_DELTA: Phase.SOAK,
        Phase.REVERSE_VERIFY: Phase.SOAK,
    },
    Mode.CELL: {
        Phase.PREPARE: Phase.REOPEN,
        Phase.DRAIN: Phase.REOPEN,
        Phase.REVERSE_DRAIN: Phase.SOAK,
    },
}


def way_out(mode: Mode, phase: Phase, came_from: str = "") -> Phase | None:
    """Return where an abort leads from a phase; None: it can't be aborted there.

    >>> way_out(Mode.FENCE, Phase.VERIFY), way_out(Mode.FENCE, Phase.TARGET)
    (<Phase.REOPEN: 'reopen'>, None)
    >>> way_out(Mode.SPLIT, Phase.REVERSE_VERIFY, "split")
    <Phase.SPLIT: 'split'>
    """
    out = WAY_OUT[mode].get(phase)
    return Phase(came_from) if out is not None and phase in REVERSED and came_from else out


def onward(mode: Mode, phase: Phase) -> Phase:
    """Return where a phase leads when all goes well.

    >>> onward(Mode.FENCE, Phase.VERIFY), onward(Mode.SPLIT, Phase.BACKFILL)
    (<Phase.TARGET: 'target'>, <Phase.SPLIT: 'split'>)
    """
    return OTHERWISE[mode].get(phase, FORWARD[phase])


def pausable_before(mode: Mode) -> tuple[Phase, ...]:
    """Return the phases before which a move can be told to pause, in order.

    It then pauses in the phase that leads there, as somebody's request would let it: TARGET, which
    nothing stops, leads to SOAK.

    >>> [str(phase) for phase in pausable_before(Mode.FENCE)]
    ['backfill', 'drain', 'delta', 'verify', 'target', 'offboard']
    >>> [str(phase) for phase in pausable_before(Mode.CELL)]
    ['drain', 'target']
    """
    found, phase = [], Phase.PREPARE
    while phase in FORWARD:
        then = onward(mode, phase)
        if phase not in UNPAUSABLE and then not in ENDED:
            found.append(then)
        phase = then
    return tuple(found)


NO_RETURN = frozenset({Phase.TARGET, Phase.OFFBOARD, Phase.REVERSE_TARGET})
ENDED = frozenset(phase for phase, edges in TABLE.items() if not edges)
# The way back: data goes from the move's target to its source.
REVERSED = frozenset(
    {Phase.REVERSE_DRAIN, Phase.REVERSE_DELTA, Phase.REVERSE_VERIFY, Phase.REVERSE_TARGET}
)
# Phases in which new turns of the tenant are refused.
FENCED = REVERSED | {Phase.DRAIN, Phase.DELTA, Phase.VERIFY, Phase.TARGET}
# A pause would keep these from ending what they undo or have promised.
UNPAUSABLE = frozenset({Phase.TARGET, Phase.OFFBOARD, Phase.REOPEN, Phase.REVERSE_TARGET})
# Steps of these go on the queue that nothing long ever enters.
PROMPT = FENCED | {Phase.REOPEN}
# The seven of the page's stepper, in order.
STEPPER = (
    Phase.PREPARE,
    Phase.BACKFILL,
    Phase.DRAIN,
    Phase.DELTA,
    Phase.VERIFY,
    Phase.TARGET,
    Phase.SOAK,
)
# What the stepper shows in place of the fence while a rollback runs, and after one.
STEPPER_BACK = (
    Phase.SOAK,
    Phase.REVERSE_DRAIN,
    Phase.REVERSE_DELTA,
    Phase.REVERSE_VERIFY,
    Phase.REVERSE_TARGET,
    Phase.ROLLED_BACK,
)
