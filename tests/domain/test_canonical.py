"""Laws of the one spelling, and of what is odd in a value."""

from __future__ import annotations

import base64
import json
import math
import re
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from migrations_app.domain import canonical, values
from migrations_app.domain.canonical import EventRow, SessionRow
from migrations_app.domain.values import Fate, Layout, Odd

NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)
MICROS = st.integers(canonical._FIRST, canonical._LAST)


def typed(value: Any) -> Any:
    """Spell a value so that == tells apart all that JSON does, and no more."""
    if isinstance(value, dict):
        return {key: typed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [typed(item) for item in value]
    return (type(value).__name__, repr(value))


def reversed_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: reversed_keys(value[key]) for key in reversed(value)}
    return [reversed_keys(item) for item in value] if isinstance(value, list) else value


@given(JSON, st.booleans(), st.sampled_from([None, 1, "\t"]))
def test_order_escapes_and_white_space_do_not_count(
    value: Any, escapes: bool, indent: int | str | None
) -> None:
    other = json.dumps(reversed_keys(value), ensure_ascii=escapes, indent=indent)
    assert canonical.of_json(other) == canonical.of_json(json.dumps(value))


@given(JSON, JSON)
def test_two_spellings_are_equal_exactly_when_the_values_are(one: Any, other: Any) -> None:
    same = canonical.of_json(json.dumps(one)) == canonical.of_json(json.dumps(other))
    assert same == (typed(one) == typed(other))


@given(JSON)
def test_a_spelling_spells_itself(value: Any) -> None:
    text = canonical.of_json(json.dumps(value))
    assert canonical.of_json(text) == text
    assert typed(json.loads(text)) == typed(value)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1", "1.0"),
        ("0.0", "-0.0"),
        ("1e22", "10000000000000000000000"),
        ("true", "1"),
        ("null", '""'),
        ('{"a": null}', "{}"),
        ("[]", "{}"),
        ("[[], 1]", "[[1]]"),
        ('"\u00e9"', '"e\u0301"'),
        ("NaN", "null"),
    ],
)
def test_a_store_that_made_one_of_the_other_is_caught(one: str, other: str) -> None:
    assert canonical.of_json(one) != canonical.of_json(other)
    assert canonical.state_digest(one) != canonical.state_digest(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1.10", "1.1"),
        ("1e22", "10000000000000000000000.0"),
        ('{"a": 1, "a": 2}', '{"a":2}'),
        ('"\\u00e9\\ud83d\\ude00"', '"é\U0001f600"'),
        ("0.1", "0.1000000000000000055511151231257827"),
    ],
)
def test_one_value_in_two_spellings_is_equal(one: str, other: str) -> None:
    assert canonical.of_json(one) == canonical.of_json(other)


def test_what_is_not_json_equals_only_itself() -> None:
    assert canonical.of_json("{") == canonical.of_json("{")
    assert canonical.of_json("{") != canonical.of_json("{ ")
    assert canonical.of_json('"not JSON:{"') != canonical.of_json("{")


@given(st.binary(max_size=20), st.binary(max_size=20))
def test_bytes_are_one_alphabet_where_adk_has_bytes_and_only_there(one: bytes, two: bytes) -> None:
    def data(encode: Any) -> str:
        text = encode(one).decode()
        parts = [
            {"inline_data": {"data": text}, "thought_signature": encode(two).decode()},
            {"function_response": {"parts": [{"inline_data": {"data": text}}]}},
            "odd",
        ]
        return json.dumps({"content": {"parts": parts}})

    plain, url = data(base64.b64encode), data(base64.urlsafe_b64encode)
    assert canonical.of_event_data(plain) == canonical.of_event_data(url)
    # The same text in a state is somebody's text.
    assert (canonical.of_json(plain) == canonical.of_json(url)) == (plain == url)
    assert canonical.of_event_data('{"inline_data": {"data": "+"}}') == canonical.of_json(
        '{"inline_data": {"data": "+"}}'
    )


# --- times -----------------------------------------------------------------------------------


@given(MICROS)
def test_every_microsecond_goes_through_text(micros: int) -> None:
    assert canonical.micros_of_text(canonical.text_of_micros(micros)) == micros


@given(st.integers(-values.LATE, values.LATE))
def test_every_microsecond_until_2242_goes_through_a_float(micros: int) -> None:
    assert canonical.micros_of_seconds(canonical.seconds_of_micros(micros)) == micros


@given(st.floats(-6e10, 2.5e11))
def test_a_float_is_rounded_as_database_session_service_rounds_it(seconds: float) -> None:
    theirs = datetime.fromtimestamp(seconds, tz=UTC).replace(tzinfo=None)
    assert canonical.micros_of_text(str(theirs)) == canonical.micros_of_seconds(seconds)


@pytest.mark.parametrize(
    "value", [None, "", "infinity", "2026-01-01 10:00:00+02", b"2026-01-01", 1.5, "0044-01-01 BC"]
)
def test_what_is_no_time_of_database_session_service_is_none(value: object) -> None:
    assert canonical.micros_of_text(value) is None


@pytest.mark.parametrize("value", [None, "1.5", math.nan, math.inf, -math.inf, 1e15, -1e15])
def test_what_is_no_time_of_sqlite_session_service_is_none(value: object) -> None:
    assert canonical.micros_of_seconds(value) is None


# --- fingerprints ----------------------------------------------------------------------------

SESSION = SessionRow("u", "s", '{"a": 1}', 1, 2)
EVENT = EventRow("u", "s", "e", "i", 3, '{"a": 1}')


@pytest.mark.parametrize(
    "other",
    [
        SESSION._replace(state='{"a": 1.0}'),
        SESSION._replace(create_time=9),
        SESSION._replace(update_time=None),
    ],
)
def test_a_session_digest_holds(other: SessionRow) -> None:
    assert canonical.session_digest(other) != canonical.session_digest(SESSION)


@pytest.mark.parametrize(
    "other",
    [
        EVENT._replace(id="f"),
        EVENT._replace(invocation_id="j"),
        EVENT._replace(timestamp=4),
        EVENT._replace(event_data='{"a": 2}'),
        EVENT._replace(event_data=None),
        EVENT._replace(event_data=""),
        EVENT._replace(id="ei", invocation_id=""),
    ],
)
def test_an_event_digest_holds(other: EventRow) -> None:
    assert canonical.event_digest(other) != canonical.event_digest(EVENT)


def test_no_data_is_not_empty_data() -> None:
    nothing, empty = EVENT._replace(event_data=None), EVENT._replace(event_data="")
    assert canonical.event_digest(nothing) != canonical.event_digest(empty)


def test_what_the_columns_say_is_put_into_the_data() -> None:
    whole = '{"id": "e", "invocation_id": "i", "timestamp": 1.5}'
    row = EVENT._replace(event_data=whole)
    assert canonical.filled(row, columns_win=True) is row
    filled = canonical.filled(EVENT, columns_win=True).event_data
    assert json.loads(filled or "") == {
        "a": 1,
        "id": "e",
        "invocation_id": "i",
        "timestamp": 0.000003,
    }
    other = EVENT._replace(event_data=whole.replace('"e"', '"x"'))
    assert json.loads(canonical.filled(other, columns_win=True).event_data or "")["id"] == "e"
    assert canonical.filled(other, columns_win=False) is other


# --- what is odd in a value ------------------------------------------------------------------


@given(JSON)
def test_whole_floats_keep_their_value_and_their_kind(value: Any) -> None:
    text = json.dumps(value)
    spelled = values.for_postgres(text)
    assert typed(json.loads(spelled)) == typed(value)
    # jsonb would make an integer of what is left with an exponent and no fraction.
    kept = typed(json.loads(jsonb(spelled)))
    assert kept == typed(without_minus_zero(value))


def without_minus_zero(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_minus_zero(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_minus_zero(item) for item in value]
    return 0.0 if isinstance(value, float) and value == 0 else value


def jsonb(text: str) -> str:
    """Spell numbers as numeric does: digits as they are, an exponent carried out, no -0.0."""

    def token(found: re.Match[str]) -> str:
        if found[0][0] == '"':
            return found[0]
        carried = f"{Decimal(found[0]):f}"
        return carried.removeprefix("-") if Decimal(found[0]) == 0 else carried

    return re.sub(r'"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?', token, text)


def odd_values(value: Any) -> set[Odd]:
    """Find what is odd in a state, each value looked at by itself."""
    found: set[Odd] = set()
    if isinstance(value, dict):
        for key, item in value.items():
            found |= odd_values(key) | odd_values(item)
    elif isinstance(value, list):
        for item in value:
            found |= odd_values(item)
    elif isinstance(value, str):
        if "\0" in value:
            found.add(Odd.NUL_IN_STATE)
        if any(0xD800 <= ord(letter) < 0xE000 for letter in value):
            found.add(Odd.SURROGATE)
    elif isinstance(value, float):
        if not math.isfinite(value):
            found.add(Odd.NOT_FINITE_IN_STATE)
        if repr(value) == "-0.0":
            found.add(Odd.MINUS_ZERO_IN_STATE)
        if value == 1e300:
            found.add(Odd.WHOLE_FLOAT)
    return found


ODD = st.recursive(
    st.sampled_from(["a\0", "\udcc3", "\ud83d", "x", "NaN", "-0.0", "\\u0000", "-0 ", "1e999"])
    | st.sampled_from([math.nan, math.inf, -math.inf, -0.0, 0.0, 1e300, 1, None, -0.5]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b\0", "\udc00", "-0.0"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(ODD, st.sampled_from([None, 1]))
def test_everything_odd_is_found_and_nothing_else(value: Any, indent: int | None) -> None:
    text = json.dumps({"value": value}, indent=indent)
    found = list(values.in_state("sessions.state", text))
    assert {one.odd for one in found} == odd_values(value)
    for one in found:
        assert one.path.startswith("value")


def test_a_path_leads_to_the_value_and_quotes_none() -> None:
    text = '{"a": {"b\\n": [1, "SECRET\\u0000"]}, "c": {"SECRET\\u0000 ": 1}}'
    found = list(values.in_state("sessions.state", text))
    assert [one.path for one in found] == ["a.b\\n[1]", "c (a key)"]
    words = found[0].words(Layout.POSTGRESQL)
    assert words == (
        "sessions.state a.b\\n[1]: a NUL character in a state: PostgreSQL holds no NUL character"
    )


def test_nothing_is_refused_in_silence() -> None:
    for line in values.TABLE.values():
        for outcome in line.values():
            assert outcome.words or outcome.fate is Fate.KEPT
