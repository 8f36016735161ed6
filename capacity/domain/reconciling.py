"""What a day of the ledger is compared with, and what a difference means."""

from __future__ import annotations

from typing import NamedTuple

from capacity.domain.usage import MOST


class Numbers(NamedTuple):
    """What is invoiced of a day."""

    turns: int
    model_calls: int
    tokens: int

    def plus(self, other: Numbers) -> Numbers:
        """Return the sum, number by number."""
        return Numbers(*(one + two for one, two in zip(self, other, strict=True)))

    def minus(self, other: Numbers) -> Numbers:
        """Return the difference, number by number."""
        return Numbers(*(one - two for one, two in zip(self, other, strict=True)))


NOTHING = Numbers(0, 0, 0)


class Verdict(NamedTuple):
    """Whether a day agrees with what it was made of; in words, why or why not."""

    agrees: bool
    # It differs, and nothing that we know of makes it: somebody has to look.
    unexplained: bool
    explanation: str


def judge(reported: Numbers | None, fresh: Numbers, invoiced: Numbers, *, shifted: bool) -> Verdict:
    """Return whether a day of the ledger agrees with what runtimes reported of it, and why not.

    `reported` None: that is kept no longer. `fresh` is what of it has only just come, which may or
    may not be in the ledger. `shifted`: the tenant's days agree in sum.

    >>> judge(Numbers(2, 2, 9), Numbers(1, 1, 4), Numbers(1, 1, 5), shifted=False).explanation
    '4 tokens came a moment ago and are being added.'
    """
    if reported is None:
        return Verdict(True, False, "What it was made of is kept no longer; the day is.")
    differs = reported.minus(invoiced)
    if differs == NOTHING:
        return Verdict(True, False, "What was reported is what is invoiced.")
    if all(0 <= one <= most for one, most in zip(differs, fresh, strict=True)):
        return Verdict(
            False, False, f"{differs.tokens:,} tokens came a moment ago and are being added."
        )
    if shifted:
        return Verdict(
            False,
            False,
            "The tenant's time zone was changed after these were added: its days agree in sum, and "
            "each count is invoiced once.",
        )
    if MOST in invoiced:
        return Verdict(
            False, False, "A runtime reported more than a number holds; the day stops there."
        )
    return Verdict(
        False,
        True,
        "Nothing that we know of explains this: rows were changed by hand, or the ledger is wrong. "
        "Do not invoice the day before somebody has looked.",
    )
