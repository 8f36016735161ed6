"""Joining, polling, leases, epochs: what an instance holds, and when it serves."""

from __future__ import annotations

import http.client
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime import Behind, Draining, NotReady, PolicyClient
from agent_runtime.calls import BACK_OFF_MAX_SECONDS
from agent_runtime.transport import Answer
from tests.runtime.wire import (
    LEASE_SECONDS,
    Call,
    ControlPlane,
    DrivenClock,
    entry,
    make_client,
    say,
)


def serves(client: PolicyClient, tenant: str = "acme") -> bool:
    try:
        with client.fence.enter(tenant):
            return True
    except NotReady:
        return False


# --- joining --------------------------------------------------------------------------------


def test_a_process_joins_polls_and_reports_what_it_applied(
    plane: ControlPlane, clock: DrivenClock
) -> None:
    make_client(plane, clock).tick()
    assert plane.kinds() == ["join", "poll", "report"]
    assert plane.reports[0]["applied_version"] == "e1.2"


def test_a_join_says_who_and_what_the_process_is(plane: ControlPlane, clock: DrivenClock) -> None:
    make_client(plane, clock, stores=["b", "a"], plugins=["trace"]).tick()
    join = plane.calls[0].data
    assert join.pop("boot")
    assert join == {
        "cell": "one",
        "name": "agent-1",
        "build": "b1",
        "longest_turn_seconds": 60.0,
        "longest_tool_seconds": 30.0,
        "plugins": ["trace"],
        "stores": ["a", "b"],
        "replaces": None,
        "applied_version": "",
    }


def test_every_call_carries_the_token(plane: ControlPlane, client: PolicyClient) -> None:
    assert {call.headers["Authorization"] for call in plane.calls} == {"Bearer secret-token"}


def test_a_token_read_from_a_file_may_end_its_line(plane: ControlPlane, clock: DrivenClock) -> None:
    client = PolicyClient(
        "http://plane.invalid",
        "secret-token\n",
        cell="one",
        name="a",
        build="b",
        stores=[],
        longest_turn_seconds=1,
        longest_tool_seconds=1,
        transport=plane,
        clock=clock,
    )
    client.tick()
    assert plane.calls[0].headers["Authorization"] == "Bearer secret-token"


def test_a_token_that_no_header_can_carry_is_refused_without_being_shown() -> None:
    with pytest.raises(ValueError, match="the token holds") as refused:
        PolicyClient(
            "http://plane.invalid",
            "secret\ntoken",
            cell="one",
            name="a",
            build="b",
            stores=[],
            longest_turn_seconds=1,
            longest_tool_seconds=1,
        )
    assert "secret" not in str(refused.value)


def test_a_join_whose_answer_is_lost_is_repeated(plane: ControlPlane, clock: DrivenClock) -> None:
    client = make_client(plane, clock)
    lose_answers(plane, "join")
    client.tick()
    assert not client.ready
    plane.after = lambda call, answer: None
    client.tick()
    assert client.ready
    # The first one never polls, so no fence waits for it.
    assert [one.polled for one in plane.instances.values()] == [False, True]


def test_nothing_is_served_between_join_and_first_policy(
    plane: ControlPlane, clock: DrivenClock
) -> None:
    client = make_client(plane, clock)
    plane.before = lambda call: say(500) if call.kind == "poll" else None
    client.tick()
    assert client.instance == "i1"
    assert not serves(client)


# --- the policy -----------------------------------------------------------------------------


def test_an_unchanged_policy_stays(plane: ControlPlane, client: PolicyClient) -> None:
    held = client.policy
    client.tick()
    assert client.policy is held
    assert "since=e1.2" in plane.calls[3].path


def test_a_fence_reaches_the_instance_with_its_next_poll(
    plane: ControlPlane, client: PolicyClient
) -> None:
    plane.publish(entry("acme", accepts="none"))
    client.tick()
    with pytest.raises(Draining), client.fence.enter("acme"):
        pass
    assert plane.reports[-1]["applied_version"] == "e1.3"


def test_a_tenant_that_comes_later_is_served_after_the_next_poll(
    plane: ControlPlane, client: PolicyClient
) -> None:
    with pytest.raises(Behind), client.fence.enter("bolt"):
        pass
    plane.publish(entry("bolt"))
    client.tick()
    assert serves(client, "bolt")


def test_a_full_policy_of_another_epoch_replaces_everything(
    plane: ControlPlane, client: PolicyClient
) -> None:
    plane.publish(entry("bolt"))
    client.tick()
    plane.restored()
    del plane.entries["bolt"]
    client.tick()
    assert client.policy is not None
    assert str(client.policy.version) == "e2.1"
    assert set(client.policy.entries) == {"acme"}
    assert plane.reports[-1]["applied_version"] == "e2.1"


def test_an_older_policy_never_opens_a_fence(plane: ControlPlane, client: PolicyClient) -> None:
    old = say(200, version="e1.2", full=True, poll_after_ms=5000, cell={}, tenants=[entry("acme")])
    plane.publish(entry("acme", accepts="none"))
    client.tick()
    assert plane.reports[-1]["in_flight"] == {}  # It has said "applied, and nobody inside".
    plane.before = lambda call: old if call.kind == "poll" else None
    client.tick()
    with pytest.raises(Draining), client.fence.enter("acme"):
        pass
    assert plane.reports[-1]["applied_version"] == "e1.3"


def test_an_instance_never_opens_a_fence_by_itself(
    plane: ControlPlane, client: PolicyClient, clock: DrivenClock
) -> None:
    plane.publish(entry("acme", accepts="none"))
    client.tick()
    plane.before = unreachable
    for _ in range(20):
        clock.advance(60)
        client.tick()
        with pytest.raises((Draining, NotReady)), client.fence.enter("acme"):
            pass


@pytest.mark.parametrize(
    "broken",
    [
        say(200, version="e2.9", full=False, poll_after_ms=250, cell=None, tenants=[]),
        say(200, version="nine", full=False, poll_after_ms=250, cell=None, tenants=[]),
        say(200, version="e1.9", full=True, poll_after_ms=250, cell={}, tenants=[{}]),
        say(200, version="e1.9", full=True, poll_after_ms=250, cell={}),
        (200, {}, b"<html>A proxy's page</html>"),
        (200, {}, b"[]"),
        (200, {}, b"\xff"),
        say(404, error="not_found"),
    ],
)
def test_nothing_of_a_broken_answer_is_applied(
    plane: ControlPlane, client: PolicyClient, broken: Answer
) -> None:
    held = client.policy
    plane.before = lambda call: broken if call.kind == "poll" else None
    client.tick()
    assert client.policy is held
    assert client.trouble
    assert serves(client)
    plane.before = lambda call: None
    client.tick()
    assert client.trouble == ""


def test_a_first_policy_that_is_a_delta_is_not_applied(
    plane: ControlPlane, clock: DrivenClock
) -> None:
    client = make_client(plane, clock)
    delta = say(200, version="e1.2", full=False, poll_after_ms=250, cell=None, tenants=[entry()])
    plane.before = lambda call: delta if call.kind == "poll" else None
    client.tick()
    assert not client.ready


# --- cadence --------------------------------------------------------------------------------


@given(dice=st.floats(0, 1))
def test_a_wait_is_the_cadence_give_or_take_a_tenth(dice: float) -> None:
    plane = ControlPlane()
    wait = make_client(plane, DrivenClock(), dice=lambda: dice).tick()
    assert 4.5 <= wait <= 5.5


def test_the_cadence_is_the_last_that_was_heard(plane: ControlPlane, client: PolicyClient) -> None:
    plane.poll_after_ms = 250
    assert client.tick() == 0.25
    plane.before = lambda call: (304, {}, b"") if call.kind == "poll" else None
    assert client.tick() == 0.25


@pytest.mark.parametrize(("said", "waits"), [(0, 0.05), (10**9, 60.0)])
def test_a_nonsense_cadence_is_bounded(
    plane: ControlPlane, client: PolicyClient, said: int, waits: float
) -> None:
    plane.poll_after_ms = said
    assert client.tick() == waits


@given(dice=st.floats(0, 1), failures=st.integers(1, 1_000))
def test_a_back_off_grows_to_half_a_minute_and_is_spread_over_all_of_it(
    dice: float, failures: int
) -> None:
    plane = ControlPlane()
    client = make_client(plane, DrivenClock(), dice=lambda: dice)
    plane.before = unreachable
    client._back_off.failures = failures - 1
    assert client.tick() == pytest.approx(dice * min(30.0, 0.5 * 2.0 ** (failures - 1)))


def test_a_back_off_waits_as_long_as_it_is_asked_to(
    plane: ControlPlane, client: PolicyClient
) -> None:
    plane.before = lambda call: say(503, error="busy", retry_after_seconds=7)
    assert client.tick() >= 7
    plane.before = lambda call: say(503, error="busy", retry_after_seconds=10**6)
    assert client.tick() == BACK_OFF_MAX_SECONDS


@pytest.mark.parametrize("status", [401, 403, 408, 429, 500, 503])
def test_an_outage_stops_no_serving_while_the_lease_holds(
    plane: ControlPlane, client: PolicyClient, clock: DrivenClock, status: int
) -> None:
    plane.before = lambda call: say(status, error="no", detail="not today")
    client.tick()
    assert serves(client)
    assert "not today" in client.trouble
    clock.advance(LEASE_SECONDS)
    assert not serves(client)


def test_a_good_round_ends_the_back_off(plane: ControlPlane, client: PolicyClient) -> None:
    plane.before = unreachable
    for _ in range(8):
        client.tick()
    plane.before = lambda call: None
    assert client.tick() == 5.0
    plane.before = unreachable
    assert client.tick() == 0.25


# --- leases ---------------------------------------------------------------------------------


def test_a_lease_counts_from_when_the_report_was_sent(
    plane: ControlPlane, client: PolicyClient, clock: DrivenClock
) -> None:
    plane.before = lambda call: clock.advance(8)  # Each answer takes its time.
    sent_at = clock.at + 8  # The poll comes first.
    client.tick()
    plane.before = lambda call: None
    clock.at = sent_at + LEASE_SECONDS - 0.001
    assert serves(client)
    clock.at = sent_at + LEASE_SECONDS
    assert not serves(client)


def test_a_lease_counts_from_when_the_join_was_sent(
    plane: ControlPlane, clock: DrivenClock
) -> None:
    client = make_client(plane, clock)
    sent_at = clock.at
    plane.before = lambda call: clock.advance(8) if call.kind == "join" else None
    plane.after = lambda call, answer: lose(call) if call.kind == "report" else None
    client.tick()
    clock.at = sent_at + LEASE_SECONDS - 0.001
    assert serves(client)
    clock.at = sent_at + LEASE_SECONDS
    assert not serves(client)


def test_polls_alone_renew_no_lease(
    plane: ControlPlane, client: PolicyClient, clock: DrivenClock
) -> None:
    plane.before = lambda call: unreachable(call) if call.kind == "report" else None
    for _ in range(9):
        clock.advance(100)
        client.tick()
    assert not serves(client)


def test_when_its_lease_runs_out_a_process_joins_anew_and_waits_for_a_full_policy(
    plane: ControlPlane, client: PolicyClient, clock: DrivenClock
) -> None:
    clock.advance(LEASE_SECONDS)
    plane.before = lambda call: unreachable(call) if call.kind == "poll" else None
    client.tick()
    assert client.instance == "i2"
    assert client.policy is None
    assert not serves(client)
    plane.before = lambda call: None
    client.tick()
    assert serves(client)
    assert "since" not in plane.calls[-2].path
    assert plane.instances["i1"].gone == "replaced"


def test_an_answer_that_comes_after_the_lease_revives_nothing(
    plane: ControlPlane, client: PolicyClient, clock: DrivenClock
) -> None:
    plane.before = lambda call: clock.advance(LEASE_SECONDS) if call.kind == "report" else None
    client.tick()
    assert not serves(client)
    plane.before = lambda call: None
    client.tick()
    assert client.instance == "i2"
    assert serves(client)


def test_turns_that_run_while_a_process_joins_anew_are_in_the_new_ids_reports(
    plane: ControlPlane, client: PolicyClient, clock: DrivenClock
) -> None:
    with client.fence.enter("acme"):
        clock.advance(LEASE_SECONDS)
        client.tick()
        assert plane.instances["i2"].reports[0]["in_flight"] == {"acme": 1}
    client.tick()
    assert plane.instances["i2"].reports[1]["in_flight"] == {}


def test_a_gone_instance_joins_anew_and_serves_nothing_before_a_full_policy(
    plane: ControlPlane, client: PolicyClient
) -> None:
    plane.instances["i1"].gone = "dead"
    plane.before = lambda call: unreachable(call) if call.kind == "join" else None
    client.tick()
    assert not serves(client)
    plane.before = lambda call: None
    client.tick()
    assert client.instance == "i2"
    assert serves(client)


def test_a_process_names_the_id_it_had_even_when_that_is_gone(
    plane: ControlPlane, client: PolicyClient
) -> None:
    plane.instances["i1"].gone = "dead"
    client.tick()
    assert plane.instances["i2"].request["replaces"] == "i1"
    # And which policy it held: above the cell's counter it tells of a restored database.
    assert plane.instances["i2"].request["applied_version"] == "e1.2"


def test_a_process_that_fails_to_join_anew_still_names_the_id_it_had(
    plane: ControlPlane, client: PolicyClient, clock: DrivenClock
) -> None:
    clock.advance(LEASE_SECONDS)
    plane.before = unreachable
    client.tick()
    client.tick()
    plane.before = lambda call: None
    client.tick()
    assert plane.instances["i2"].request["replaces"] == "i1"


def test_one_process_has_one_boot_id_whatever_its_instances(
    plane: ControlPlane, client: PolicyClient, clock: DrivenClock
) -> None:
    clock.advance(LEASE_SECONDS)
    client.tick()
    other = make_client(plane, clock)
    other.tick()
    first, second, third = (one.request["boot"] for one in plane.instances.values())
    assert first == second != third


def test_an_instance_that_is_forgotten_again_and_again_backs_off(
    plane: ControlPlane, client: PolicyClient
) -> None:
    plane.before = lambda call: say(410, error="instance_gone") if call.kind == "poll" else None
    client.tick()
    assert plane.kinds()[3:] == ["poll", "join", "poll"]
    assert "as soon as it has joined" in client.trouble


# --- leaving --------------------------------------------------------------------------------


def test_leaving_reports_what_is_left_and_takes_the_instance_away(
    plane: ControlPlane, client: PolicyClient
) -> None:
    client.usage.turn("acme")
    assert client.leave()
    assert plane.kinds()[-2:] == ["report", "leave"]
    assert plane.total("turns") == 1
    assert plane.instances["i1"].gone == "left"
    assert not client.ready


def test_who_leaves_lets_nobody_in(plane: ControlPlane, client: PolicyClient) -> None:
    client.leave()
    assert not serves(client)
    with pytest.raises(RuntimeError, match="has left"):
        client.tick()
    with pytest.raises(RuntimeError, match="has left"):
        client.start()


def test_a_process_with_turns_inside_stays_on_the_books(
    plane: ControlPlane, client: PolicyClient
) -> None:
    with client.fence.enter("acme"):
        assert not client.leave(wait_seconds=0)
    assert plane.instances["i1"].gone == ""
    assert plane.reports[-1]["in_flight"] == {"acme": 1}


def test_leaving_waits_for_the_turns_inside(plane: ControlPlane, client: PolicyClient) -> None:
    entered, closed = threading.Event(), threading.Event()

    def turn() -> None:
        with client.fence.enter("acme"):
            entered.set()
            closed.wait(10)

    thread = threading.Thread(target=turn)
    thread.start()
    entered.wait(10)
    # While leave() waits; if it came to wait later, it would find nobody inside.
    timer = threading.Timer(0.05, closed.set)
    timer.start()
    assert client.leave(wait_seconds=10)
    thread.join()
    timer.join()
    assert plane.reports[-1]["in_flight"] == {}


def test_leaving_an_unreachable_control_plane_says_so(
    plane: ControlPlane, client: PolicyClient
) -> None:
    plane.before = unreachable
    assert not client.leave()


def test_who_never_joined_has_nothing_to_leave(plane: ControlPlane, clock: DrivenClock) -> None:
    assert make_client(plane, clock).leave()
    assert plane.calls == []


# --- the thread -----------------------------------------------------------------------------


def test_a_started_client_joins_by_itself_and_stops_cleanly(
    plane: ControlPlane, clock: DrivenClock
) -> None:
    client = make_client(plane, clock)
    reported = threading.Event()
    plane.after = lambda call, answer: reported.set() if call.kind == "report" else None
    client.start()
    client.start()
    assert reported.wait(10)
    client.stop()
    assert plane.kinds() == ["join", "poll", "report"]
    assert not [t for t in threading.enumerate() if t.name == "switchyard-policy"]


def test_the_last_turn_of_a_fenced_tenant_is_reported_at_once(
    plane: ControlPlane, client: PolicyClient
) -> None:
    plane.poll_after_ms = 60_000
    drained = threading.Event()

    def after(call: Call, answer: Answer) -> None:
        if call.kind == "report" and call.data["applied_version"] == "e1.3":
            applied.set()
            if call.data["in_flight"] == {}:
                drained.set()

    applied = threading.Event()
    with client.fence.enter("acme"):
        plane.publish(entry("acme", accepts="none"))
        plane.after = after
        client.start()
        assert applied.wait(10)
        assert not drained.is_set()
    assert drained.wait(10)
    client.stop()


def test_a_bug_in_a_round_does_not_end_the_thread(
    plane: ControlPlane, clock: DrivenClock, caplog: pytest.LogCaptureFixture
) -> None:
    again = threading.Event()

    def before(call: Call) -> None:
        if len(plane.calls) == 1:
            raise ZeroDivisionError
        again.set()

    plane.before = before
    client = make_client(plane, clock, dice=lambda: 0.0)
    client.start()
    assert again.wait(10)
    client.stop()
    assert "ZeroDivisionError" in caplog.text


def test_no_line_of_the_log_shows_the_token(
    plane: ControlPlane, client: PolicyClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    plane.before = unreachable
    client.tick()
    client.leave()
    assert caplog.text
    assert "secret-token" not in caplog.text
    assert "secret-token" not in repr(client)


def unreachable(call: Call) -> None:
    raise ConnectionRefusedError("nobody there")


def lose(call: Call) -> None:
    raise http.client.RemoteDisconnected("the answer is lost")


def lose_answers(plane: ControlPlane, kind: str) -> None:
    """Let calls of this kind be taken, and their answers lost."""

    def after(call: Call, answer: Any) -> None:
        if call.kind == kind:
            lose(call)

    plane.after = after
