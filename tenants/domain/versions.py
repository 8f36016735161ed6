"""A version on the wire: the database's epoch and a number, such as "9f3c01d2ab45.17"."""

from __future__ import annotations

import re
from dataclasses import dataclass

# A number that the database can hold, and no sign, space or underscore that int() would take.
_FORM = re.compile(r"([0-9a-f]{1,16})\.(0|[1-9][0-9]{0,17})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Version:
    """One value of a counter, told apart from the same number of another database.

    >>> str(Version("ab12", 7))
    'ab12.7'
    """

    epoch: str
    number: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.number}"


def parse(text: str) -> Version | None:
    """Return the version that `text` spells, or None if it spells none.

    >>> parse("ab12.7")
    Version(epoch='ab12', number=7)
    >>> parse(""), parse("7"), parse("ab12.-7"), parse("ab12.07")
    (None, None, None, None)
    """
    match = _FORM.fullmatch(text)
    return Version(match[1], int(match[2])) if match else None


def number_of(text: str, epoch: str) -> int | None:
    """Return the number of a version of this epoch; None for another epoch or for no version.

    >>> number_of("ab12.7", "ab12"), number_of("ff00.7", "ab12"), number_of("", "ab12")
    (7, None, None)
    """
    version = parse(text)
    return version.number if version is not None and version.epoch == epoch else None
