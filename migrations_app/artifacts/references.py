"""What names an artifact's version by a number that the move has changed.

google-adk numbers from 0 and lets nobody choose, so gaps close on the way: version 7 becomes a
renumbered one. What stored the number, in an event or a state, is copied as it is, and so it is
listed here, by its place. Nothing is rewritten: only who wrote it knows what it means.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from django.db.models import F, Min, Q, QuerySet

from durable.driver import holding
from migrations_app.copying import Swept, Timer
from migrations_app.domain import canonical
from migrations_app.domain.phases import REVERSED
from migrations_app.models import ArtifactReference, ArtifactVersion, TenantMigration
from migrations_app.ports.artifacts import USER
from migrations_app.ports.base import Key, SessionStore

PAGE = 500
# The cursor of the stage behind the sessions: users' own state, and artifacts that are links.
USERS = "users:"
_URI = re.compile(
    r"artifact://apps/.+?/users/(?P<user>.+?)(?:/sessions/(?P<session>.+?))?"
    r"/artifacts/(?P<name>.+?)/versions/(?P<version>\d+)"
)
# "version 7", "v7", "versions/7", "report.pdf@7", "report.pdf#7"
_NUMBER = re.compile(r"(?:\bversions?\W{0,3}|\bv\.?\s?|[@#])(\d+)\b", re.IGNORECASE)
# Longer texts are files, not words about one.
LONGEST_TEXT = 100_000


@dataclass(frozen=True)
class _Changed:
    """One version whose number is another on the other side."""

    session_id: str
    name: str
    source: int
    target: int
    # What the read side's data may call it.
    number: int

    @property
    def names(self) -> tuple[str, ...]:
        bare = self.name.removeprefix(USER)
        return (self.name, bare) if bare != self.name else (self.name,)

    @property
    def stem(self) -> str:
        """The name as part of a key: "report" of reports/report.pdf."""
        return _squeezed(PurePosixPath(self.names[-1]).stem)


def find_references(move: TenantMigration, source: SessionStore, *, timer: Timer) -> Swept:
    """List every place that names a version whose number changed, once everything is copied.

    Reads, one by one, only sessions of users who have such a version. `source` is where data is
    read. What an earlier look had listed of a session is replaced.
    """
    if not move.cursor_session:
        with holding(move):
            move.artifact_references.all().delete()
    changed, passed = _changed_lines(move), 0
    if not changed.exists():
        return Swept(Key("", ""), 0, finished=True)
    last = 0
    if not move.cursor_session.startswith(USERS):
        last = int(move.cursor_session or 0)
        stamps = move.stamps.filter(user_id__in=changed.values("user_id")).order_by("pk")
        while rows := list(
            stamps.filter(pk__gt=last).values_list("pk", "user_id", "session_id")[:PAGE]
        ):
            for pk, user, session in rows:
                _look_at_session(move, source, Key(user, session))
                last, passed = pk, passed + 1
                if timer.out:
                    return Swept(Key("", str(last)), passed, finished=False)
        last = 0
    else:
        last = int(move.cursor_session.removeprefix(USERS))
    users = changed.values("user_id").annotate(first=Min("pk")).order_by("first")
    while found := list(users.filter(first__gt=last)[:PAGE]):
        for row in found:
            _look_at_user(move, source, row["user_id"])
            last = row["first"]
            if timer.out:
                return Swept(Key("", f"{USERS}{last}"), passed, finished=False)
    return Swept(Key("", f"{USERS}{last}"), passed, finished=True)


def _changed_lines(move: TenantMigration) -> QuerySet[ArtifactVersion]:
    lines = ArtifactVersion.objects.filter(move=move).exclude(source_version=F("target_version"))
    return lines.exclude(source_digest="").exclude(target_digest="")


def _of_user(move: TenantMigration, user: str) -> list[_Changed]:
    back = move.phase in REVERSED
    return [
        _Changed(
            line.session_id,
            line.name,
            line.source_version,
            line.target_version,
            line.target_version if back else line.source_version,
        )
        for line in _changed_lines(move).filter(user_id=user).order_by("pk")
    ]


def _look_at_session(move: TenantMigration, source: SessionStore, key: Key) -> None:
    session = source.session(key)
    if session is None:
        return
    every = _of_user(move, key.user_id)
    near = [one for one in every if one.session_id in ("", key.session_id)]
    found: dict[tuple[str, _Changed], None] = {}
    for at, event in enumerate(session["events"], start=1):
        for path, one in _references(_data(event), near, every, key):
            found[f"event {at} {path}", one] = None
    for path, one in _references(session["state"], near, every, key):
        found[f"state {path}", one] = None
    _put(move, key, found)


def _look_at_user(move: TenantMigration, source: SessionStore, user: str) -> None:
    """Look at the user's own state, and at artifacts that are links to another."""
    every = _of_user(move, user)
    found: dict[tuple[str, _Changed], None] = {}
    row = source.shared([user]).get(user)
    if row is not None:
        try:
            state = canonical.loads(row.state)
        except canonical.NotJson:
            state = None
        for path, one in _references(state, every, every, Key(user, "")):
            found[f"state user:{path}", one] = None
    lines = ArtifactVersion.objects.filter(~Q(link=""), move=move, user_id=user)
    for line in lines:
        for one in _in_uris(line.link, every, Key(user, line.session_id)):
            found[f"artifact {line.name} version {line.source_version}", one] = None
    _put(move, Key(user, ""), found)


def _put(move: TenantMigration, key: Key, found: Mapping[tuple[str, _Changed], None]) -> None:
    at = {"move": move, "user_id": key.user_id, "session_id": key.session_id}
    with holding(move):
        ArtifactReference.objects.filter(**at).delete()
        ArtifactReference.objects.bulk_create(
            [
                ArtifactReference(
                    **at,
                    place=place.replace("\0", "\\0"),
                    name=one.name,
                    source_version=one.source,
                    target_version=one.target,
                )
                for place, one in found
            ]
        )


def _data(event: Mapping[str, Any]) -> Any:
    """Return what an event holds beside ids and times, whichever layout it has."""
    if "event_data" not in event:
        return event
    data = event["event_data"]
    if isinstance(data, str):
        try:
            return canonical.loads(data)
        except canonical.NotJson:
            return data
    return data


def _references(
    value: Any, near: list[_Changed], every: list[_Changed], key: Key
) -> Iterator[tuple[str, _Changed]]:
    """Yield (path, version) for what a JSON value names. A stack: JSON may nest deeply.

    By URI, any version of the user. By words, one of the session's own or the user's: an entry
    {name: number}, as in actions.artifact_delta; an object that holds the name and, under a key
    with "version" in it, the number; a text with both; such a key beside or below the name's own.
    """
    stack: list[tuple[Any, str, tuple[str, ...]]] = [(value, "", ())]
    while stack:
        item, path, keys = stack.pop()
        if isinstance(item, Mapping):
            for one in near:
                if _entry(item, one):
                    yield f"{path}.{_shown(one.names[-1])}".lstrip("."), one
                elif _pair(item, one):
                    yield path or "(itself)", one
            stack += [
                (v, f"{path}.{_shown(k)}".lstrip("."), (*keys, str(k))) for k, v in item.items()
            ]
        elif isinstance(item, list):
            stack += [(part, f"{path}[{at}]", keys) for at, part in enumerate(item)]
        elif isinstance(item, str) and len(item) <= LONGEST_TEXT:
            for one in {*_in_uris(item, every, key), *_in_words(item, near)}:
                yield path, one
            if keys and item.isdigit():
                yield from ((path, one) for one in near if _keyed(keys, int(item), one))
        elif isinstance(item, int) and not isinstance(item, bool):
            yield from ((path, one) for one in near if _keyed(keys, item, one))


def _entry(item: Mapping[Any, Any], one: _Changed) -> bool:
    return any(_is(item.get(name), one.number) for name in one.names)


def _pair(item: Mapping[Any, Any], one: _Changed) -> bool:
    named = any(value in one.names for value in item.values() if isinstance(value, str))
    return named and any(
        "version" in str(key).lower() and _is(value, one.number) for key, value in item.items()
    )


def _keyed(keys: tuple[str, ...], number: int, one: _Changed) -> bool:
    """Whether a bare number stands under keys such as report_version, or report.version."""
    if number != one.number or "version" not in keys[-1].lower() or not one.stem:
        return False
    return one.stem in _squeezed("".join(keys[-2:]))


def _in_words(text: str, near: list[_Changed]) -> Iterator[_Changed]:
    # A URI is looked at as one: what it names may be somebody else's.
    text = _URI.sub("", text)
    named = [one for one in near if any(name in text for name in one.names)]
    if named:
        numbers = {int(number) for number in _NUMBER.findall(text) if len(number) < 10}
        yield from (one for one in named if one.number in numbers)


def _in_uris(text: str, every: list[_Changed], key: Key) -> Iterator[_Changed]:
    if "artifact://" not in text:
        return
    for uri in _URI.finditer(text):
        if uri["user"] != key.user_id:
            continue
        name = uri["name"]
        if not uri["session"] and not name.startswith(USER):
            name = f"{USER}{name}"
        session = "" if name.startswith(USER) else uri["session"]
        for one in every:
            if (one.session_id, one.name, one.number) == (session, name, int(uri["version"])):
                yield one


def _is(value: Any, number: int) -> bool:
    if isinstance(value, bool):
        return False
    return value == number or (isinstance(value, str) and value == str(number))


def _squeezed(text: str) -> str:
    return re.sub(r"[\W_]", "", text.lower())


def _shown(key: object) -> str:
    text = str(key)
    return text if text.isprintable() else ascii(text)[1:-1]
