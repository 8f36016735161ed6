"""What every refusal of this product is: a sentence for a person, a word for a program."""

from __future__ import annotations

import re


class Refused(Exception):
    """A request that was understood and not carried out. Nothing has changed.

    Subclasses live beside the function that raises them and say what happened.
    The message says what, why and what to do; pages, the API and the command
    line show it unchanged.
    """

    # The HTTP status that the API answers; the subclass says another where one fits better.
    status: int = 409
    # None: asking again does not help before somebody changes something.
    retry_after_seconds: float | None = None

    @property
    def code(self) -> str:
        """The class name in snake case, such as `cell_is_full`; stable for programs."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", type(self).__name__).lower()
