import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.buckets import bucket


@pytest.mark.parametrize(
    ("session_id", "expected"), [("", 0), ("a", 34), ("s-1", 71), ("0", 40), ("\U0001f600", 13)]
)
def test_a_bucket_is_the_one_that_guava_gives(session_id: str, expected: int) -> None:
    assert bucket(session_id) == expected


@given(st.text(alphabet=st.characters()))
def test_every_string_has_a_bucket_below_100(session_id: str) -> None:
    assert 0 <= bucket(session_id) < 100


def test_a_lone_surrogate_has_a_bucket() -> None:
    assert 0 <= bucket("\udcc3") < 100
