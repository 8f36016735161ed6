"""Side channels: what is kept beside sessions, and how far a move is with each."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from durable.errors import Refused

# What an unfinished step may leave for its next call; it goes through the environment.
CURSOR_MAX = 4_000
WORDS_MAX = 200
STEP_MAX = 1_000

_DOTTED = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z]\w*)", re.ASCII)
_PROGRAM = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


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


class Step(StrEnum):
    COPY = "copy"
    VERIFY = "verify"


class Said(StrEnum):
    """What a callable or command answers."""

    DONE = "done"  # Through: copied, or equal.
    AGAIN = "again"  # Not through: to be called again, with its cursor.
    DIFFERS = "differs"  # Of a check: not equal, to be copied again from the start.


class BadStep(Refused):
    """A step of a side channel is not of the shape that its kind needs."""

    status = 422


class BadAnswer(Refused):
    """What a callable or command answered is not what docs/side-channels.md asks for."""


@dataclass(frozen=True)
class Answer:
    said: Said
    cursor: str = ""
    # For people: how much, never a value.
    words: str = ""


def check_step(by: str, text: str, *, what: str) -> None:
    """Raise BadStep unless `text` can be the step of its kind; whether it is there is not asked.

    >>> check_step("callable", "acme_channels.vectors:copy", what="copy step")
    >>> check_step("command", "copy-vectors --index support", what="copy step")
    >>> check_step("person", "", what="copy step")
    """
    if by not in list(StepBy):
        raise BadStep(f"A {what} can't be done by {by[:40]!r}. Choose one of: {', '.join(StepBy)}.")
    if by == StepBy.PERSON:
        if text:
            raise BadStep(
                f"A {what} that a person checks off runs nothing: leave it empty, and say in"
                ' "about" what is to be done.'
            )
        return
    if not text or len(text) > STEP_MAX or not text.isprintable():
        raise BadStep(f"The {what} must be one line of 1 to {STEP_MAX:,} visible characters.")
    if by == StepBy.CALLABLE:
        dotted(text)
    else:
        argv(text)


def dotted(text: str) -> tuple[str, str]:
    """Take a dotted path apart; raises BadStep.

    >>> dotted("acme_channels.vectors:copy")
    ('acme_channels.vectors', 'copy')
    """
    found = _DOTTED.fullmatch(text)
    if found is None:
        raise BadStep(
            f"{text[:80]!r} is no callable. Write it as package.module:function, such as"
            " acme_channels.vectors:copy; names that begin with an underscore are private."
        )
    return found[1], found[2]


def argv(text: str) -> list[str]:
    """Split a command into the program's name and its arguments; raises BadStep.

    No shell reads it: quotes group words, and nothing else has a meaning.

    >>> argv("copy-vectors --index 'support acme'")
    ['copy-vectors', '--index', 'support acme']
    """
    try:
        words = shlex.split(text)
    except ValueError:
        raise BadStep(f"{text[:80]!r} has a quote that is not closed.") from None
    if not words or not _PROGRAM.fullmatch(words[0]):
        raise BadStep(
            f"{text[:80]!r} is no command. Begin with the name of a program, without its folder:"
            " the operator of this installation chose the folder that programs are taken from."
        )
    return words


def allowed(module: str, modules: Collection[str]) -> bool:
    """Return whether callables may be taken from a module: it is listed, or below one that is.

    >>> allowed("acme_channels.vectors", ["acme_channels"]), allowed("acme", ["acme_channels"])
    (True, False)
    """
    return any(module == known or module.startswith(f"{known}.") for known in modules)


def answer(line: str, step: Step) -> Answer:
    """Read the line of JSON that a step answered with; raises BadAnswer.

    >>> answer('{"state": "again", "cursor": "k-12", "count": 12, "words": "vectors"}', Step.COPY)
    Answer(said=<Said.AGAIN: 'again'>, cursor='k-12', words='12 vectors')
    """
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise BadAnswer("Its last line of output is no JSON.") from None
    if not isinstance(value, dict) or value.get("state") not in list(Said):
        raise BadAnswer(f'Its answer has no "state" of {", ".join(Said)}.')
    said = Said(value["state"])
    if said is Said.DIFFERS and step is Step.COPY:
        raise BadAnswer(f'A copy step answered "{said}", which only a verify step may say.')
    cursor, count, words = (value.get(name) for name in ("cursor", "count", "words"))
    if cursor is not None and not _fits(cursor, CURSOR_MAX):
        raise BadAnswer(f"Its cursor is no text of up to {CURSOR_MAX:,} visible characters.")
    if said is Said.AGAIN and not cursor:
        raise BadAnswer('It answered "again" without a cursor, by which to go on.')
    if count is not None and (isinstance(count, bool) or not isinstance(count, int)):
        raise BadAnswer("Its count is no whole number.")
    if words is not None and not _fits(words, WORDS_MAX):
        raise BadAnswer(f"Its words are no text of up to {WORDS_MAX} visible characters.")
    told = " ".join(
        part for part in (f"{count:,}" if count is not None else "", words or "") if part
    )
    return Answer(said, cursor or "", told)


def _fits(value: object, longest: int) -> bool:
    return isinstance(value, str) and len(value) <= longest and value.isprintable()
