from typing import Any

import pytest

from agent_runtime import Entry, Policy, Version
from tests.runtime.wire import entry


def test_a_version_reads_back_as_it_was_spelled() -> None:
    assert str(Version.parse("x7.42")) == "x7.42"


@pytest.mark.parametrize("text", ["", "42", ".42", "e1.", "e1.-1", "e1.4x", "e1.٤"])
def test_what_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no version"):
        Version.parse(text)


def test_versions_of_two_epochs_have_no_order() -> None:
    one, other = Version("a", 1), Version("b", 2)
    assert not one.before(other)
    assert not other.before(one)


def test_an_entry_ignores_fields_that_it_does_not_know() -> None:
    assert Entry.parse(entry(invented_later={"a": 1})) == Entry.parse(entry())


def test_an_entry_holds_the_limits_as_sent() -> None:
    scope = {"version": 3, "runs_per_second": 2.5, "allowed_tools": ["b", "a"], "weight": 4}
    parsed = Entry.parse(entry(scope=scope)).scope
    assert (parsed.version, parsed.runs_per_second, parsed.weight) == (3, 2.5, 4.0)
    assert parsed.allowed_tools == {"a", "b"}
    assert parsed.daily_token_budget is None


def test_an_empty_list_of_tools_allows_none_and_no_list_allows_all() -> None:
    assert (
        Entry.parse(entry(scope={"version": 1, "allowed_tools": []})).scope.allowed_tools == set()
    )
    assert Entry.parse(entry(scope={"version": 1})).scope.allowed_tools is None


def test_a_tombstone_that_names_no_cell_is_refused() -> None:
    with pytest.raises(ValueError, match="names no cell"):
        Entry.parse(entry(accepts="moved"))


def answer(number: int, *entries: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"version": f"e1.{number}", "cell": None, "tenants": list(entries)} | changes


def test_a_delta_lays_its_entries_over_the_held_ones() -> None:
    held = Policy.whole(answer(1, entry("acme"), entry("bolt"), cell={"region": "eu"}))
    after = held.after(answer(2, entry("bolt", accepts="none")))
    assert str(after.version) == "e1.2"
    assert {t: e.accepts for t, e in after.entries.items()} == {"acme": "all", "bolt": "none"}


def test_a_delta_without_a_cell_part_leaves_it_unchanged() -> None:
    held = Policy.whole(answer(1, cell={"region": "eu"}))
    assert held.after(answer(2)).cell == {"region": "eu"}
    assert held.after(answer(2, cell={"region": "us"})).cell == {"region": "us"}


def test_a_full_policy_replaces_everything() -> None:
    assert set(Policy.whole(answer(9, entry("core"))).entries) == {"core"}
