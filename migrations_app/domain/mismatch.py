"""Names what differs between two copies of a session, and which failure it looks like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple


class Looks(StrEnum):
    """Failures that a difference can look like (article 000, "Failure modes")."""

    EMPTY_COPY = "empty_copy"  # The target has the session and none of its events.
    SHARED_FROZEN = "shared_frozen"  # app: or user: keys stand inside a session's own state.
    OLD_SHARED_WON = "old_shared_won"  # A shared value on the target is not the source's.
    FENCE_LEAK = "fence_leak"  # The source has events that came after the copy.
    WRITTEN_ON_TARGET = "written_on_target"  # The target has what the source never had.
    LOST = "lost"  # The session is not on the target at all.
    CHANGED_VALUE = (
        "changed_value"  # Same shape, another value: the store can't hold it, or an edit.
    )
    CANNOT_HOLD = "cannot_hold"  # The target refuses a value, or changes it in a way that is known.
    MOVED_ON = "moved_on"  # The source went on after the copy; nothing is wrong.
    NOT_CARRIED = "not_carried"  # On the way back: the target has what did not reach the source.
    STALE_ARTIFACT = "stale_artifact"  # Under the number that our map names stands another version.
    LATE_WRITE = "late_write"  # Written at the source although it was closed, after the cutover.


WORDS: dict[Looks, str] = {
    Looks.EMPTY_COPY: "Empty copy: it was read from a list, not from the session.",
    Looks.SHARED_FROZEN: "Shared state was frozen into the session.",
    Looks.OLD_SHARED_WON: "An old shared value won. Re-copying the session will not fix it.",
    Looks.FENCE_LEAK: "Written at the source after it was copied.",
    Looks.WRITTEN_ON_TARGET: "Something other than this move wrote on the target.",
    Looks.LOST: "Missing on the target.",
    Looks.CANNOT_HOLD: "The target can't hold this value as it is.",
    Looks.MOVED_ON: "Changed after its copy; the next pass takes it along.",
    Looks.NOT_CARRIED: "Written on the target and not carried back yet.",
    Looks.STALE_ARTIFACT: "Stale artifact version: another one stands under its number.",
    Looks.LATE_WRITE: "Written at the closed source after the cutover: download both versions.",
    Looks.CHANGED_VALUE: "A value differs: edited in place, or not held by the target.",
}

SHARED_PREFIXES = ("app:", "user:")


@dataclass(frozen=True)
class Difference:
    part: str  # events, state, user, app, missing or extra
    text: str
    looks_like: Looks


def session_difference(
    source: Mapping[str, Any] | None, target: Mapping[str, Any] | None
) -> Difference | None:
    """Return the first difference of two sessions, each as a port's `session()` gives it.

    None: they are equal. A missing side is a difference of its own.
    """
    if source is None and target is None:
        return None
    if target is None:
        return Difference("missing", "not on the target", Looks.LOST)
    if source is None:
        return Difference("extra", "not on the source", Looks.WRITTEN_ON_TARGET)
    return _events(source["events"], target["events"]) or _state(source, target)


def shared_difference(
    user_id: str | None, source: Mapping[str, Any] | None, target: Mapping[str, Any] | None
) -> Difference | None:
    """Return the first difference of shared state, of one user or (None) of the app."""
    found = _first(source or {}, target or {}, "app:" if user_id is None else "user:")
    if found is None:
        return None
    looks = Looks.CANNOT_HOLD if found.changed_by_store else Looks.OLD_SHARED_WON
    return Difference("app" if user_id is None else "user", found.text, looks)


def _events(
    source: Sequence[Mapping[str, Any]], target: Sequence[Mapping[str, Any]]
) -> Difference | None:
    if source and not target:
        return Difference("events", f"none of {len(source)} events", Looks.EMPTY_COPY)
    if order := _other_order(source, target):
        return Difference("events", order, Looks.CANNOT_HOLD)
    for index, (ours, theirs) in enumerate(zip(source, target, strict=False), start=1):
        found = _first(ours, theirs, "")
        if found is None:
            continue
        known = {event.get("id") for event in target}
        if ours.get("id") not in known:
            return Difference(
                "events", f"event {index} of {len(source)} is missing", Looks.FENCE_LEAK
            )
        return Difference("events", f"event {index}: {found.text}", found.looks_like)
    if len(source) > len(target):
        text = f"event {len(target) + 1} of {len(source)} is missing"
        return Difference("events", text, Looks.FENCE_LEAK)
    if len(target) > len(source):
        text = f"event {len(source) + 1} of {len(target)} is not on the source"
        return Difference("events", text, Looks.WRITTEN_ON_TARGET)
    return None


def _other_order(source: Sequence[Mapping[str, Any]], target: Sequence[Mapping[str, Any]]) -> str:
    """Say why the same events come in another order, where a store's own is the reason; or ""."""
    ours, theirs = ([event.get("id") for event in side] for side in (source, target))
    times = [[str(event.get("timestamp")) for event in side] for side in (source, target)]
    if ours == theirs or sorted(map(str, ours)) != sorted(map(str, theirs)):
        return ""
    if times[0] == times[1]:
        return "events of one time are read in the order of their ids there"
    if sorted(times[0]) in times and sorted(times[0]) == sorted(times[1]):
        return "events are read in the order of their times there"
    return ""


def _state(source: Mapping[str, Any], target: Mapping[str, Any]) -> Difference | None:
    states = (source["state"], target["state"])
    # One that is no object is copied as it is: google-adk reads neither.
    frozen = [
        key
        for key in (states[1] if all(isinstance(one, Mapping) for one in states) else ())
        if key.startswith(SHARED_PREFIXES) and key not in states[0]
    ]
    if frozen:
        return Difference(
            "state", f"{_key(sorted(frozen)[0])} is only on the target", Looks.SHARED_FROZEN
        )
    if found := _first(source["state"], target["state"], ""):
        return Difference("state", found.text, found.looks_like)
    for name, words in (("update_time", "last update"), ("create_time", "creation")):
        ours, theirs = source.get(name), target.get(name)
        if ours != theirs:
            text = f"{words} is {ours} on source, {theirs} on target"
            known = _known_change(ours, theirs)
            return Difference("state", text, Looks.CANNOT_HOLD if known else Looks.CHANGED_VALUE)
    return None


class _Found(NamedTuple):
    text: str
    changed_by_store: bool = False  # In a way that no copying again can mend.

    @property
    def looks_like(self) -> Looks:
        return Looks.CANNOT_HOLD if self.changed_by_store else Looks.CHANGED_VALUE


def _first(source: Any, target: Any, path: str) -> _Found | None:
    """Return where two JSON values first differ; None if they are equal.

    The place, never the values: those may be secrets, and what is found here is stored and
    shown to everybody. The diff, read afresh and for operators only, has them.
    """
    if isinstance(source, Mapping) and isinstance(target, Mapping):
        for key in sorted(source.keys() | target.keys()):
            dot = "" if not path or path.endswith(":") else "."
            where = f"{path}{dot}{_key(key)}"
            if key not in target:
                return _Found(f"{where} is only on the source")
            if key not in source:
                return _Found(f"{where} is only on the target")
            if found := _first(source[key], target[key], where):
                return found
        return None
    if isinstance(source, list) and isinstance(target, list):
        for index, (ours, theirs) in enumerate(zip(source, target, strict=False)):
            if found := _first(ours, theirs, f"{path}[{index}]"):
                return found
        if len(source) != len(target):
            return _Found(f"{path} has {len(source)} on source, {len(target)} on target")
        return None
    # 1 == 1.0 == True in Python, -0.0 == 0.0, and NaN is not NaN; in JSON each is one value.
    if type(source) is type(target) and (
        repr(source) == repr(target) if isinstance(source, float) else source == target
    ):
        return None
    if words := _known_change(source, target):
        return _Found(f"{path}: {words}", changed_by_store=True)
    return _Found(f"{path} differs")


def _known_change(one: Any, other: Any) -> str:
    """Say what a store is known to do to such a value, whichever side has it; "" if nothing."""
    numbers = [value for value in (one, other) if type(value) in (int, float)]
    if len(numbers) == 2 and one == other:
        # 0.0 and 0, 1.0 and 1: the sign, or the kind of number.
        return "-0.0 becomes 0.0" if not one else "a whole float becomes an integer"
    texts = (one, other) if isinstance(one, str) and isinstance(other, str) else ("", "")
    if len(texts[0]) == 26 and texts[0] >= "2242" and texts[0][:19] == texts[1][:19]:
        return "a time so late is rounded"
    for whole, part in (texts, texts[::-1]):
        if whole.partition("\0")[0] == part != whole:
            return "the text is cut at a NUL character"
    return ""


def _key(key: str) -> str:
    """Spell a key for our own row: JSON may hold NUL and lone surrogates, PostgreSQL neither."""
    return key if key.isprintable() else ascii(key)[1:-1]
