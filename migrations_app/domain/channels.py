"""Side channels: what is kept beside sessions, and how far a move is with each."""

from __future__ import annotations

from enum import StrEnum


class StepBy(StrEnum):
    """Who carries a step out."""

    CALLABLE = "callable"  # A Python callable, by dotted path.
    COMMAND = "command"  # A program and its arguments.
    PERSON = "person"  # Somebody checks it off.


class ChannelState(StrEnum):
    OPEN = "open"  # Nothing has gone over.
    COPIED = "copied"  # Gone over, not checked.
    GREEN = "green"  # Checked.
    FAILED = "failed"  # Its last step failed; it is tried again.
