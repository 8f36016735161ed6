"""Who there may be, as a session store knows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property

from migrations_app.ports.base import Key, SessionStore, shared_pages

# Sessions of a user, and users, that are read at once.
PAGE = 500


class Sessions:
    """The users and sessions of a session store, for services that can't list them.

    Opened only if it is asked for anything.
    """

    def __init__(
        self, stack: ExitStack, opens: Callable[[], AbstractContextManager[SessionStore]]
    ) -> None:
        self._stack, self._opens = stack, opens

    @cached_property
    def store(self) -> SessionStore:
        return self._stack.enter_context(self._opens())

    def users(self) -> Iterator[str]:
        """Yield every user with a session or with state."""
        for rows in shared_pages(self.store, PAGE):
            yield from [row.user_id for row in rows if row.user_id is not None]

    def sessions(self, user_id: str) -> Iterator[str]:
        """Yield the user's sessions."""
        after = Key(user_id, "")
        while page := self.store.page(after, PAGE):
            for key, _ in page:
                if key.user_id != user_id:
                    return
                yield key.session_id
            after = page[-1][0]
