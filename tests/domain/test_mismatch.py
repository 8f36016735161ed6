"""A difference is named by its place and by the failure that it looks like."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from migrations_app.domain.mismatch import (
    WORDS,
    Looks,
    session_difference,
    shared_difference,
)


def session(*events: dict[str, Any], **state: Any) -> dict[str, Any]:
    return {"state": state, "update_time": "2026-03-02T12:00:00", "events": list(events)}


def event(name: str, **fields: Any) -> dict[str, Any]:
    return {"id": name, **fields}


def found(source: Any, target: Any) -> tuple[str, Looks]:
    difference = session_difference(source, target)
    assert difference is not None
    return difference.text, difference.looks_like


def test_every_failure_has_words() -> None:
    assert set(WORDS) == set(Looks)


def test_equal_sessions_have_no_difference() -> None:
    assert session_difference(session(event("a"), k=1), session(event("a"), k=1)) is None
    assert session_difference(None, None) is None


def test_a_session_without_its_events_looks_like_an_empty_copy() -> None:
    assert found(session(event("a"), event("b")), session()) == (
        "none of 2 events",
        Looks.EMPTY_COPY,
    )


def test_a_session_that_is_not_there_is_lost() -> None:
    assert found(session(), None) == ("not on the target", Looks.LOST)


def test_a_session_that_the_source_never_had_was_written_on_the_target() -> None:
    assert found(None, session()) == ("not on the source", Looks.WRITTEN_ON_TARGET)


def test_an_event_after_the_copy_looks_like_a_fence_leak() -> None:
    assert found(session(event("a"), event("b")), session(event("a"))) == (
        "event 2 of 2 is missing",
        Looks.FENCE_LEAK,
    )


def test_an_event_that_is_missing_in_the_middle_is_named() -> None:
    source = session(event("a"), event("b"), event("c"))
    assert found(source, session(event("a"), event("c")))[0] == "event 2 of 3 is missing"


def test_an_event_only_on_the_target_was_written_there() -> None:
    assert found(session(event("a")), session(event("a"), event("b"))) == (
        "event 2 of 2 is not on the source",
        Looks.WRITTEN_ON_TARGET,
    )


def test_a_changed_value_is_named_by_its_path() -> None:
    source = session(event("a", actions={"state_delta": {"tier": "pro"}}))
    target = session(event("a", actions={"state_delta": {"tier": "basic"}}))
    assert found(source, target) == (
        "event 1: actions.state_delta.tier differs",
        Looks.CHANGED_VALUE,
    )


def test_shared_keys_in_a_sessions_own_state_look_frozen() -> None:
    target = session(**{"user:tier": "pro", "topic": "x"})
    assert found(session(topic="x"), target) == (
        "user:tier is only on the target",
        Looks.SHARED_FROZEN,
    )


def test_no_value_of_a_session_is_in_the_words() -> None:
    difference = session_difference(session(token="secret-1"), session(token="secret-2"))
    assert difference is not None
    assert "secret" not in difference.text


def test_another_update_time_is_a_difference() -> None:
    target = session() | {"update_time": "2026-03-02T12:00:01"}
    assert "last update" in found(session(), target)[0]


def test_an_old_user_value_is_told_from_a_session_that_differs() -> None:
    difference = shared_difference("u1", {"tier": "pro"}, {"tier": "basic"})
    assert difference is not None
    assert (difference.part, difference.looks_like) == ("user", Looks.OLD_SHARED_WON)
    assert difference.text == "user:tier differs"


def test_an_absent_key_is_not_a_null_one() -> None:
    difference = shared_difference(None, {"flag": None}, {})
    assert difference is not None
    assert (difference.part, difference.text) == ("app", "app:flag is only on the source")


@pytest.mark.parametrize(("ours", "theirs"), [(1, 1.0), (True, 1), (0, False), ("1", 1)])
def test_values_that_python_calls_equal_but_json_does_not_differ(ours: Any, theirs: Any) -> None:
    assert session_difference(session(k=ours), session(k=theirs)) is not None


json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(json, json)
def test_there_is_a_difference_exactly_when_two_states_differ(ours: Any, theirs: Any) -> None:
    import json as text

    same = text.dumps(ours, sort_keys=True) == text.dumps(theirs, sort_keys=True)
    assert (session_difference(session(k=ours), session(k=theirs)) is None) == same
