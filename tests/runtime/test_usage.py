from agent_runtime.usage import MAX_DIRTY, MAX_DIRTY_BYTES, Usage
from tests.runtime.wire import DrivenClock


def test_usage_is_counted_per_tenant_and_minute(clock: DrivenClock) -> None:
    usage = Usage(clock)
    usage.turn("acme")
    usage.model_call("acme", 18)
    usage.model_call("acme", 12)
    clock.advance(60)
    usage.turn("acme")
    usage.refused("bolt", "draining")
    assert usage.take().usage() == [
        {
            "tenant": "acme",
            "minute": "2026-03-02T12:00:00Z",
            "turns": 1,
            "model_calls": 2,
            "tokens": 30,
            "refused": {},
            "would_refuse": {},
        },
        {
            "tenant": "acme",
            "minute": "2026-03-02T12:01:00Z",
            "turns": 1,
            "model_calls": 0,
            "tokens": 0,
            "refused": {},
            "would_refuse": {},
        },
        {
            "tenant": "bolt",
            "minute": "2026-03-02T12:01:00Z",
            "turns": 0,
            "model_calls": 0,
            "tokens": 0,
            "refused": {"draining": 1},
            "would_refuse": {},
        },
    ]


def test_what_is_taken_is_not_taken_twice(clock: DrivenClock) -> None:
    usage = Usage(clock)
    usage.turn("acme")
    usage.served("acme", "u", "s")
    usage.take()
    again = usage.take()
    assert (again.usage(), again.served()) == ([], [])


def test_what_is_given_back_is_added_to_what_came_since(clock: DrivenClock) -> None:
    usage = Usage(clock)
    usage.turn("acme")
    usage.refused("acme", "draining")
    batch = usage.take()
    usage.turn("acme")
    usage.refused("acme", "draining")
    usage.give_back(batch)
    [line] = usage.take().usage()
    assert (line["turns"], line["refused"]) == (2, {"draining": 2})


def test_a_session_is_named_once_however_often_it_was_served(clock: DrivenClock) -> None:
    usage = Usage(clock)
    for session in ("s1", "s2", "s1"):
        usage.served("acme", "u", session)
    assert [one["session_id"] for one in usage.take().served()] == ["s2", "s1"]


def test_sessions_given_back_come_before_newer_ones_and_once(clock: DrivenClock) -> None:
    usage = Usage(clock)
    usage.served("acme", "u", "s1")
    usage.served("acme", "u", "s2")
    batch = usage.take()
    usage.served("acme", "u", "s1")
    usage.give_back(batch)
    assert [one["session_id"] for one in usage.take().served()] == ["s2", "s1"]


def test_beyond_the_bound_the_oldest_sessions_are_dropped_and_counted(clock: DrivenClock) -> None:
    usage = Usage(clock)
    for number in range(MAX_DIRTY + 3):
        usage.served("acme", "u", f"s{number}")
    batch = usage.take()
    assert batch.served()[0]["session_id"] == "s3"
    assert batch.dropped == 3
    assert usage.take().dropped == 0


def test_a_report_that_would_be_too_big_leaves_the_rest_for_the_next(clock: DrivenClock) -> None:
    usage = Usage(clock)
    sessions = [f"{number:04}".ljust(128, "é") for number in range(1_500)]
    for session in sessions:
        usage.served("acme", "u" * 128, session)
    sent: list[str] = []
    batch = usage.take()
    assert batch.more
    while batch.dirty:
        assert len(str(batch.served()).encode("unicode_escape")) <= 1.1 * MAX_DIRTY_BYTES
        sent += [one["session_id"] for one in batch.served()]
        batch = usage.take()
    assert sent == sessions
    assert not batch.more


def test_an_id_that_no_report_can_carry_is_left_out_and_counted(clock: DrivenClock) -> None:
    usage = Usage(clock)
    for session in ("x" * 129, "a\0b", "\udcc3", "fine"):
        usage.served("acme", "u", session)
    batch = usage.take()
    assert [one["session_id"] for one in batch.served()] == ["fine"]
    assert batch.dropped == 3
