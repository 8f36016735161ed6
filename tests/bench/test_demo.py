"""What the demo says while one waits for it."""

from __future__ import annotations

import doctest

import pytest

from bench import demo


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(demo).failed == 0


def test_a_log_gets_ten_lines_of_a_long_wait_and_the_last_word(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with demo._Line() as line:
        for turns in range(501):
            line.show(f"{turns} of 500", key=demo._tenth(turns, 500))
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["0 of 500", "50 of 500"]
    assert (len(lines), lines[-1]) == (11, "500 of 500")
