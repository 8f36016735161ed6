"""One word for one act: buttons, the log and announcements spell it the same way."""

from __future__ import annotations

from migrations_app.domain.phases import REVERSED, Mode, Phase

WORDS = {
    "pause": "Pause",
    "resume": "Resume",
    "abort": "Abort",
    "close_fence": "Start drain",
    "cancel_fence": "Take back drain",
    "hold_fence": "Hold the fence",
    "recopy": "Re-copy",
    "accept": "Accept",
    "reconcile_users": "Reconcile user",
    "set_pace": "Change pace",
    "flip": "Flip to target",
    "rollback": "Roll back",
    "cancel_rollback": "Take back rollback",
    "confirm_offboard": "Confirm offboard",
    "leave_behind": "Leave copy behind",
}
# What the same act is called before a move that splits has split, and while both sides serve.
BEFORE_SPLIT = {"close_fence": "Start split", "cancel_fence": "Take back split"}
IN_SPLIT = {"close_fence": "Wait no longer", "cancel_rollback": "Take back abort"}


def words(verb: str, phase: str, mode: str) -> str:
    """Return an act as people read it, asked for in `phase` of a move of that mode.

    >>> words("close_fence", "backfill", "fence"), words("close_fence", "backfill", "split")
    ('Start drain', 'Start split')
    >>> words("abort", "verify", "fence"), words("abort", "reverse_drain", "fence")
    ('Abort', 'Stop rollback')
    """
    if verb == "abort" and phase in REVERSED:
        return "Stop rollback"
    told = IN_SPLIT if phase == Phase.SPLIT else BEFORE_SPLIT if mode == Mode.SPLIT else {}
    return told.get(verb, WORDS[verb])


def where(mode: str, cell: object, store: object) -> str:
    """Return one side of a move as people say it: its cell, where only that changes.

    >>> where("cell", "cell-b", "store-a"), where("fence", "cell-b", "store-a")
    ('in cell-b', 'on store-a')
    """
    return f"in {cell}" if mode == Mode.CELL else f"on {store}"
