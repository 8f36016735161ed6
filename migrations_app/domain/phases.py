"""The life of a move, as tables that driver, tests, docs and the page's stepper all read."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    PREPARE = "prepare"  # Both stores are surveyed; guard, tables and rights are made sure of.
    BACKFILL = "backfill"  # The tenant is live; sessions go over, one bounded chunk per step.
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


TABLE: dict[Phase, frozenset[Phase]] = {
    Phase.PREPARE: frozenset({Phase.BACKFILL, Phase.REOPEN}),
    Phase.BACKFILL: frozenset({Phase.DRAIN, Phase.REOPEN}),
    Phase.DRAIN: frozenset({Phase.DELTA, Phase.REOPEN}),
    Phase.DELTA: frozenset({Phase.VERIFY, Phase.REOPEN}),
    Phase.VERIFY: frozenset({Phase.TARGET, Phase.REOPEN}),
    Phase.TARGET: frozenset({Phase.SOAK}),
    Phase.SOAK: frozenset({Phase.OFFBOARD, Phase.REVERSE_DRAIN}),
    Phase.OFFBOARD: frozenset({Phase.DONE}),
    Phase.DONE: frozenset(),
    Phase.REOPEN: frozenset({Phase.ABORTED}),
    Phase.ABORTED: frozenset(),
    Phase.REVERSE_DRAIN: frozenset({Phase.REVERSE_DELTA, Phase.SOAK}),
    Phase.REVERSE_DELTA: frozenset({Phase.REVERSE_VERIFY, Phase.SOAK}),
    Phase.REVERSE_VERIFY: frozenset({Phase.REVERSE_TARGET, Phase.SOAK}),
    Phase.REVERSE_TARGET: frozenset({Phase.ROLLED_BACK}),
    Phase.ROLLED_BACK: frozenset(),
}

# Where an abort leads. A phase that is missing here can't be aborted.
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
}


def way_out(mode: Mode, phase: Phase) -> Phase | None:
    """Return where an abort leads from a phase; None: it can't be aborted there.

    >>> way_out(Mode.FENCE, Phase.VERIFY), way_out(Mode.FENCE, Phase.TARGET)
    (<Phase.REOPEN: 'reopen'>, None)
    """
    return WAY_OUT[mode].get(phase)


def onward(mode: Mode, phase: Phase) -> Phase:
    """Return where a phase leads when all goes well.

    >>> onward(Mode.FENCE, Phase.VERIFY), onward(Mode.FENCE, Phase.REVERSE_VERIFY)
    (<Phase.TARGET: 'target'>, <Phase.REVERSE_TARGET: 'reverse_target'>)
    """
    [forward] = TABLE[phase] - {way_out(mode, phase)}
    return forward


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
