"""Two processes, of one language or two, name a side effect alike."""

from __future__ import annotations

import hashlib

import pytest

from agent_runtime import idempotency_key


def test_a_retried_turn_has_the_key_of_its_first_try() -> None:
    assert idempotency_key("eu1.s-1", "t-1") == idempotency_key("eu1.s-1", "t-1")


def test_the_key_is_what_the_page_for_other_runtimes_says() -> None:
    spelled = b"\0\0\0\x07eu1.s-1" + b"\0\0\0\x03t-1"
    assert idempotency_key("eu1.s-1", "t-1") == f"ik1-{hashlib.sha256(spelled).hexdigest()[:32]}"


def test_words_that_run_together_alike_are_two_turns() -> None:
    assert idempotency_key("a", "bc") != idempotency_key("ab", "c")


def test_a_lone_surrogate_is_a_word_too() -> None:
    assert idempotency_key("\udcc3", "t") != idempotency_key("\udcc4", "t")


@pytest.mark.parametrize("words", [("", "t-1"), ("s-1", "")], ids=["no session", "no turn"])
def test_who_has_no_word_shares_no_key(words: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="needs a session token"):
        idempotency_key(*words)
