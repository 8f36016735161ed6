"""What every bench prints, for people and for tools."""

from __future__ import annotations

import doctest
import json

import pytest

import bench
from bench import Bar, only, report

BARS = [Bar("copy", 0.95, "x", limit=1.25), Bar("fence", 7.0, "s", limit=6.0), Bar("rows", 9, "")]


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(bench).failed == 0


def test_a_tool_gets_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    report(BARS, as_json=True)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == {"bar": "fence", "value": 7.0, "unit": "s", "limit": 6.0, "ok": False}
    assert [line["ok"] for line in lines] == [True, False, True]


def test_a_missed_bar_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(BARS, as_json=False) == 1
    assert report(BARS[:1], as_json=False) == 0
    assert "MISS  fence" in capsys.readouterr().out


def test_a_bench_that_does_not_exist_is_named() -> None:
    assert only([], ["copy", "fence"]) == ["copy", "fence"]
    with pytest.raises(SystemExit, match="no bench speed; there are copy, fence"):
        only(["speed"], ["copy", "fence"])
