"""Splits sessions so that each bite is a short transaction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from migrations_app.ports.base import Key

# A bite's size: a snapshot of 8 s made a live turn fail with "database is locked" (tried); the
# bound is 0.5 s, and a bite this big takes about a tenth of it.
BITE_BYTES = 4_000_000
BITE_KEYS = 250


def in_bites(sizes: Iterable[tuple[str, str, int]]) -> Iterator[list[Key]]:
    """Split (user, session, bytes of events) so that each bite's events are a few megabytes.

    One session longer than a bite is a bite of its own.
    """
    bite: list[Key] = []
    room = BITE_BYTES
    for user, name, size in sizes:
        if bite and (size > room or len(bite) >= BITE_KEYS):
            yield bite
            bite, room = [], BITE_BYTES
        bite.append(Key(user, name))
        room -= size
    if bite:
        yield bite
