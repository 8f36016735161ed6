"""Numbers and times are written one way."""

from __future__ import annotations

import doctest

from tenants.domain import words
from tenants.templatetags import words as filters


def test_the_examples_hold() -> None:
    assert doctest.testmod(words).failed == 0
    assert doctest.testmod(filters).failed == 0


def test_a_share_is_the_whole_only_when_nothing_is_left() -> None:
    assert words.percent(999_999, 1_000_000) == f"99{words.THIN}%"
    assert words.percent(1_000_000, 1_000_000) == f"100{words.THIN}%"
