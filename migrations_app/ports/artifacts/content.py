"""What one version of an artifact is, whichever google-adk service keeps it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

TEXT, DATA, LINK = "text", "data", "link"
USER = "user:"
# A name beyond this is shortened in our own rows: an index holds it beside two ids (bytes).
LONGEST_NAME = 1500


class Name(NamedTuple):
    """Names one artifact of a user: one that a session's, or ("") the user's own."""

    session_id: str
    # As it is listed; with "user:" in front if it is the user's own, however it is listed.
    name: str


@dataclass(frozen=True)
class Facts:
    """What must be equal on both sides; of the bytes and of every value only a digest.

    Left out is what always changes: the version's number, its URI, when it was made.
    """

    kind: str  # text, data or link (file_data: the bytes are elsewhere)
    sha: str  # of the bytes, or of the link
    size: int
    mime: str | None  # None for texts, which services label as they like
    spelled: str  # the name as it was given when this version was saved
    label: str | None  # inline_data.display_name
    # Each entry's digest, by key. No service tells {} from none.
    custom: Mapping[str, str] = field(default_factory=dict)
    # What else the part has, such as `thought`: each field's digest.
    rest: Mapping[str, str] = field(default_factory=dict)
    # Of a text read with line feeds only. In no digest: it tells what a difference is.
    lines: str = ""

    @property
    def digest(self) -> str:
        """SHA-256 over all of it."""
        parts = (self.kind, self.sha, self.size, self.mime, self.spelled, self.label)
        return _sha([*parts, dict(self.custom), dict(self.rest)])


@dataclass(frozen=True)
class Content:
    """One version as its service keeps it: references are not followed."""

    facts: Facts
    part: Any  # google.genai.types.Part
    custom_metadata: Mapping[str, Any]
    # A text as it lies on disk, where google-adk reads other line ends. None: as the part has it.
    raw: str | None = None

    @property
    def link(self) -> str:
        """The URI that this version is; "" of any other."""
        return str(self.part.file_data.file_uri or "") if self.facts.kind == LINK else ""


def content(
    part: Any, custom_metadata: Mapping[str, Any], *, spelled: str, raw: str | None = None
) -> Content:
    """Take a google-adk part apart."""
    rest = part.model_dump(exclude_none=True)
    if part.inline_data is not None:
        blob = rest.pop("inline_data")
        data, mime = blob.pop("data", None), blob.pop("mime_type", None)
        label = blob.pop("display_name", None)
        kind = DATA
        if data is None:
            blob["data"] = None
    elif part.text is not None:
        data, mime, label, kind, blob = rest.pop("text"), None, None, TEXT, {}
    else:
        blob = rest.pop("file_data", {})
        data, mime = blob.pop("file_uri", "") or "", blob.pop("mime_type", None)
        label, kind = blob.pop("display_name", None), LINK
    body = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data or b""
    facts = Facts(
        kind=kind,
        sha=hashlib.sha256(body).hexdigest(),
        size=len(body),
        mime=mime,
        spelled=spelled,
        label=label,
        custom={str(key): _sha([_plain(key), _plain(v)]) for key, v in custom_metadata.items()},
        rest={str(key): _sha(_plain(value)) for key, value in (rest | blob).items()},
        lines=_sha(data.replace("\r\n", "\n").replace("\r", "\n")) if kind == TEXT else "",
    )
    return Content(facts, part, custom_metadata, raw)


def difference(ours: Facts, theirs: Facts) -> str:
    """Say where two versions first differ, without values; "" if nowhere.

    >>> one = Facts("text", "5", 3, None, "a.txt", None)
    >>> difference(one, one)
    ''
    """
    if ours.kind != theirs.kind:
        return f"a {ours.kind} is a {theirs.kind} there"
    if (ours.sha, ours.size) != (theirs.sha, theirs.size):
        if ours.kind == TEXT:
            ends = "its carriage returns are line feeds on one side"
            return ends if ours.lines == theirs.lines else "its text differs"
        return "its address differs" if ours.kind == LINK else "its bytes differ"
    if ours.mime != theirs.mime:
        if not ours.mime or not theirs.mime:
            return "its MIME type is given on one side only"
        return "its MIME type differs"
    if ours.spelled != theirs.spelled:
        return "the name under which it was saved is spelled in another way"
    if ours.label != theirs.label:
        return "its display name differs"
    for what, mine, other in (
        ("custom metadata", ours.custom, theirs.custom),
        ("field", ours.rest, theirs.rest),
    ):
        for key in sorted({*mine, *other}):
            if mine.get(key) != other.get(key):
                shown = json.dumps(key)[1:-1][:80]
                if key in mine and key in other:
                    return f"{what} {shown} differs"
                return f"{what} {shown} is on one side only"
    return ""


def spell(text: str) -> str:
    """Spell a name so that every database of ours holds it, and no two names alike.

    >>> spell("report.pdf"), spell("a\0b")
    ('report.pdf', 'json:"a\\u0000b"')
    """
    # A row without a name is about none.
    if not text or "\0" in text or text.startswith("json:") or not encodes(text):
        text = f"json:{json.dumps(text)}"
    if len(body := text.encode()) > LONGEST_NAME:
        return f"{text[:300]}... sha256:{hashlib.sha256(body).hexdigest()}"
    return text


def encodes(text: str) -> bool:
    """Whether UTF-8 holds a text: not half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _plain(value: Any) -> Any:
    """Spell a Python value as JSON that tells apart whatever Python does."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return {"float": repr(value)}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, Mapping):
        return {"map": sorted(([_plain(k), _plain(v)] for k, v in value.items()), key=json.dumps)}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, tuple):
        return {"tuple": [_plain(one) for one in value]}
    return {type(value).__name__: str(getattr(value, "value", ""))}


def _sha(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
