"""Which of 100 buckets a session falls into; the same in every language and for ever."""

from __future__ import annotations

import mmh3


def bucket(session_id: str) -> int:
    """Return the session's bucket, 0 to 99.

    Equals Guava's `floorMod(murmur3_32_fixed().hashUnencodedChars(id).asInt(), 100)`, so Java
    and Python runtimes agree on every session's side. Checked against the real Guava jar.

    >>> [bucket(s) for s in ("", "a", "s-1", "0", "\\U0001F600")]
    [0, 34, 71, 40, 13]
    """
    # Java hashes UTF-16 units: UTF-8 would put "s-1" into 1. A lone surrogate is a unit too.
    # Signed, as Java's int is: unsigned would put it into 67.
    units = session_id.encode("utf-16-le", "surrogatepass")
    return mmh3.hash(units, 0, signed=True) % 100
