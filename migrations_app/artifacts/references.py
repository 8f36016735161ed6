"""What names an artifact's version by a number that the move has changed.

google-adk numbers from 0 and lets nobody choose, so gaps close on the way: version 7 becomes a
renumbered one. What stored the number, in an event or a state, is copied as it is, and so it is
listed here, by its place. Nothing is rewritten: only who wrote it knows what it means.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, NamedTuple

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
# A URI's parts; ids and names between them may hold slashes.
_SCHEME, _OF_USER, _OF_SESSION, _FILE = "artifact://apps/", "/users/", "/sessions/", "/artifacts/"
_VERSION = re.compile(r"/versions/([0-9]+)")
# "version 7", "v7", "versions/7", "report.pdf@7", "report.pdf#7"
_NUMBER = re.compile(r"(?:\bversions?\W{0,3}|\bv\.?\s?|[@#])(\d+)\b", re.IGNORECASE)
# Longer texts are files, not words about one.
LONGEST_TEXT = 100_000
# No version has more digits, and Python reads no number of thousands.
LONGEST_NUMBER = 9


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


class _Wanted:
    """The versions that a value may name, by what it would call them.

    One name may have ten thousand of them, and a session as many events: none is gone through
    for each part of a value.
    """

    def __init__(self, changed: Iterable[_Changed]) -> None:
        self.by_name: dict[str, dict[int, list[_Changed]]] = defaultdict(lambda: defaultdict(list))
        self.by_number: dict[int, list[_Changed]] = defaultdict(list)
        self.by_uri: dict[tuple[str, str, int], _Changed] = {}
        for one in changed:
            self.by_number[one.number].append(one)
            self.by_uri[one.session_id, one.name, one.number] = one
            for name in one.names:
                self.by_name[name][one.number].append(one)

    def named(self, name: str, value: Any) -> list[_Changed]:
        """Return what a name and a number, or digits, name together."""
        number = _number(value)
        if number is None or name not in self.by_name:
            return []
        return self.by_name[name].get(number, [])

    def numbered(self, value: Any) -> list[_Changed]:
        """Return every version of this number, or of these digits."""
        number = _number(value)
        return [] if number is None else self.by_number.get(number, [])


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
    changed = _of_user(move, key.user_id)
    every = _Wanted(changed)
    near = _Wanted(one for one in changed if one.session_id in ("", key.session_id))
    found: dict[tuple[str, _Changed], None] = {}
    for at, event in enumerate(session["events"], start=1):
        for path, one in _references(_data(event), near, every, key):
            found[f"event {at} {path}", one] = None
    for path, one in _references(session["state"], near, every, key):
        found[f"state {path}", one] = None
    _put(move, key, found)


def _look_at_user(move: TenantMigration, source: SessionStore, user: str) -> None:
    """Look at the user's own state, and at artifacts that are links to another."""
    every = _Wanted(_of_user(move, user))
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
    value: Any, near: _Wanted, every: _Wanted, key: Key
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
            entries = [one for name, number in item.items() for one in near.named(name, number)]
            for one in dict.fromkeys(entries):
                yield f"{path}.{_shown(one.names[-1])}".lstrip("."), one
            for one in _paired(item, near):
                if one not in entries:
                    yield path or "(itself)", one
            stack += [
                (v, f"{path}.{_shown(k)}".lstrip("."), (*keys[-1:], str(k)))
                for k, v in item.items()
            ]
        elif isinstance(item, list):
            stack += [(part, f"{path}[{at}]", keys) for at, part in enumerate(item)]
        else:
            if isinstance(item, str) and len(item) <= LONGEST_TEXT:
                for one in {*_in_uris(item, every, key), *_in_words(item, near)}:
                    yield path, one
            if keys and "version" in keys[-1].lower():
                yield from ((path, one) for one in _keyed(keys, item, near))


def _paired(item: Mapping[Any, Any], near: _Wanted) -> dict[_Changed, None]:
    """Return what an object names by a value, and numbers under a key with "version" in it."""
    numbers = [value for key, value in item.items() if "version" in str(key).lower()]
    if not numbers:
        return {}
    names = [value for value in item.values() if isinstance(value, str)]
    pairs = ((name, number) for name in names if name in near.by_name for number in numbers)
    return {one: None for name, number in pairs for one in near.named(name, number)}


def _keyed(keys: tuple[str, ...], value: Any, near: _Wanted) -> Iterator[_Changed]:
    """Yield what a bare number names under keys such as report_version, or report.version."""
    text = _squeezed("".join(keys))
    yield from (one for one in near.numbered(value) if one.stem and one.stem in text)


def _in_words(text: str, near: _Wanted) -> Iterator[_Changed]:
    # A URI is looked at as one: what it names may be somebody else's.
    rest, at = "", 0
    for uri in _uris(text):
        rest, at = rest + text[at : uri.start], uri.end
    rest += text[at:]
    numbers = {int(found) for found in _NUMBER.findall(rest) if len(found) <= LONGEST_NUMBER}
    for number in numbers:
        for one in near.numbered(number):
            if any(name in rest for name in one.names):
                yield one


class _Uri(NamedTuple):
    """An artifact's URI within a text."""

    start: int
    end: int
    user: str
    session: str
    name: str
    version: str


def _uris(text: str) -> Iterator[_Uri]:
    """Find artifacts' URIs, none across lines: each part ends where the next one first begins.

    Part by part, never back: as one pattern it took a text of 80 beginnings of a URI, which any
    user can write, longer than a step lives.
    """
    at = 0
    while (start := text.find(_SCHEME, at)) >= 0:
        app = start + len(_SCHEME)
        line = text.find("\n", app)
        line = len(text) if line < 0 else line
        # Each part has one character at least. What this line lacks from here, it lacks later on.
        at = line
        if (found := text.find(_OF_USER, app + 1, line)) < 0:
            continue
        user = found + len(_OF_USER)
        if (file := text.find(_FILE, user + 1, line)) < 0:
            continue
        ends = file
        session = text.find(_OF_SESSION, user + 1, file + len(_OF_SESSION))
        if session >= 0:
            ends, session = session, session + len(_OF_SESSION)
            if (file := text.find(_FILE, session + 1, line)) < 0:
                continue
        name = file + len(_FILE)
        if (version := _VERSION.search(text, name + 1, line)) is None:
            continue
        at = version.end()
        yield _Uri(
            start,
            at,
            text[user:ends],
            text[session:file] if session >= 0 else "",
            text[name : version.start()],
            version[1],
        )


def _in_uris(text: str, every: _Wanted, key: Key) -> Iterator[_Changed]:
    for uri in _uris(text):
        if uri.user != key.user_id or (number := _number(uri.version)) is None:
            continue
        name = uri.name
        if not uri.session and not name.startswith(USER):
            name = f"{USER}{name}"
        session = "" if name.startswith(USER) else uri.session
        if (one := every.by_uri.get((session, name, number))) is not None:
            yield one


def _number(value: Any) -> int | None:
    """Return the whole number that a value is, or spells in digits; None: neither.

    Not by `isdigit` alone: "²" is a digit, and no number to Python.
    """
    if isinstance(value, str):
        digits = value.isascii() and value.isdigit() and len(value) <= LONGEST_NUMBER
        return int(value) if digits else None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _squeezed(text: str) -> str:
    return re.sub(r"[\W_]", "", text.lower())


def _shown(key: object) -> str:
    text = str(key)
    return text if text.isprintable() else ascii(text)[1:-1]
