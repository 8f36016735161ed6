"""One word for one act: buttons, the log and announcements spell it the same way."""

from __future__ import annotations

from migrations_app.domain.phases import REVERSED, Phase

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
# What the same act is called while both sides of a split serve.
IN_SPLIT = {"close_fence": "Wait no longer", "cancel_rollback": "Take back abort"}


def words(verb: str, phase: str) -> str:
    """Return an act as people read it, asked for in `phase`.

    >>> words("close_fence", "backfill"), words("abort", "verify"), words("abort", "reverse_drain")
    ('Start drain', 'Abort', 'Stop rollback')
    """
    if verb == "abort" and phase in REVERSED:
        return "Stop rollback"
    return IN_SPLIT.get(verb, WORDS[verb]) if phase == Phase.SPLIT else WORDS[verb]
