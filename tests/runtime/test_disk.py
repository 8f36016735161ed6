"""A process that is started again while the control plane is away."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from agent_runtime import Draining, Entry, NotReady, PolicyClient, TenantThrottled
from agent_runtime.disk import MERGE_OVER_BYTES, DiskCopy, _merged
from agent_runtime.transport import Answer
from tests.runtime.wire import (
    LEASE_SECONDS,
    Call,
    ControlPlane,
    DrivenClock,
    entry,
    limits,
    make_client,
    say,
    share,
)

BOOT = "boot-1"
SHARE = {
    "runs_per_second": 4.0,
    "max_concurrent_runs": 8,
    "tokens_per_minute": None,
    "safe_runs_per_second": 2.0,
    "safe_max_concurrent_runs": 4,
    "safe_tokens_per_minute": None,
    "tokens_left": None,
}


class Killed(BaseException):
    """Ends a process where no code of it runs any more."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agent-1"


StartProcess = Callable[..., PolicyClient]


@pytest.fixture
def start(path: Path, plane: ControlPlane, clock: DrivenClock) -> Iterator[StartProcess]:
    """Start a process of this host in the place of the one before, which is dead."""
    copies: list[DiskCopy] = []

    def process(boot: str = BOOT, dies_first: bool = True, **options: Any) -> PolicyClient:
        if dies_first:
            # The kernel gives a dead process's lock back.
            for copy in copies:
                copy.close()
        copies.append(DiskCopy(path, boot=lambda: boot))
        return make_client(options.pop("plane", plane), clock, copy=copies[-1], **options)

    yield process
    for copy in copies:
        copy.close()


def away(method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> Answer:
    raise ConnectionRefusedError


def serves(client: PolicyClient, tenant: str = "acme") -> bool:
    try:
        with client.fence.enter(tenant):
            return True
    except (NotReady, Draining):
        return False


# --- an outage --------------------------------------------------------------------------------


def test_it_serves_until_the_lease_of_the_process_before_is_over(
    start: StartProcess, clock: DrivenClock
) -> None:
    start().tick()
    again = start(plane=away)
    assert again.ready
    clock.advance(LEASE_SECONDS - 1)
    again.tick()
    assert serves(again)
    clock.advance(1)
    assert not serves(again)


def test_it_is_started_once_more_and_serves_for_no_longer(
    start: StartProcess, clock: DrivenClock
) -> None:
    start().tick()
    clock.advance(LEASE_SECONDS / 2)
    assert serves(start(plane=away))
    assert serves(start(plane=away))
    clock.advance(LEASE_SECONDS / 2)
    assert not serves(start(plane=away))


def test_it_serves_what_the_last_delta_said(start: StartProcess, plane: ControlPlane) -> None:
    first = start()
    first.tick()
    plane.publish(entry("bolt"))
    plane.publish(entry("acme", accepts="none"))
    first.tick()
    again = start(plane=away)
    assert not serves(again)
    assert serves(again, "bolt")
    assert again.policy == first.policy


def test_the_lease_that_reports_renew_is_kept(start: StartProcess, clock: DrivenClock) -> None:
    first = start()
    for _ in range(30):
        first.tick()
        clock.advance(60)
    clock.advance(LEASE_SECONDS - 60 - 1)
    assert serves(start(plane=away))
    clock.advance(1)
    assert not serves(start(plane=away))


def test_a_renewal_whose_answer_is_lost_prolongs_nothing(
    start: StartProcess, plane: ControlPlane, clock: DrivenClock
) -> None:
    first = start()
    first.tick()
    clock.advance(LEASE_SECONDS - 1)
    plane.after = lambda call, answer: _lose(call, "report")
    first.tick()
    clock.advance(1)
    assert not serves(start(plane=away))


def test_a_copy_whose_lease_is_over_is_none(start: StartProcess, clock: DrivenClock) -> None:
    start().tick()
    clock.advance(LEASE_SECONDS)
    assert start(plane=away).policy is None


def _lose(call: Call, kind: str) -> None:
    if call.kind == kind:
        raise TimeoutError


# --- and afterwards ---------------------------------------------------------------------------


def test_it_joins_as_somebody_else_who_replaces_nobody(
    start: StartProcess, plane: ControlPlane
) -> None:
    start().tick()
    again = start()
    again.tick()
    (before, now) = plane.instances.values()
    assert now.request["replaces"] is None
    # Whether the dead process's last write has landed nobody can tell: a fence waits for it.
    assert before.gone == ""
    assert len(before.reports) == 1
    assert now.request["applied_version"] == before.reports[-1]["applied_version"]


def test_it_asks_for_a_full_policy(start: StartProcess, plane: ControlPlane) -> None:
    start().tick()
    start().tick()
    polls = [call.path for call in plane.calls if call.kind == "poll"]
    assert "since" not in polls[-1]


def test_its_turns_of_the_outage_are_in_its_reports(
    start: StartProcess, plane: ControlPlane
) -> None:
    start().tick()
    again = start()
    with again.fence.enter("acme"):
        again.usage.turn("acme")
        again.tick()
        assert plane.reports[-1]["in_flight"] == {"acme": 1}
    assert plane.total("turns") == 1


def test_it_serves_on_while_it_joins(start: StartProcess, plane: ControlPlane) -> None:
    start().tick()
    again = start()
    seen = []
    plane.before = lambda call: seen.append((call.kind, serves(again)))  # type: ignore[func-returns-value]
    again.tick()
    assert seen == [("join", True), ("poll", True), ("report", True)]


def test_an_id_that_has_not_polled_gives_it_no_longer_lease(
    start: StartProcess, plane: ControlPlane, clock: DrivenClock
) -> None:
    """The control plane counts on no instance before its first poll: only on the old lease."""
    start().tick()
    clock.advance(LEASE_SECONDS - 1)
    again = start()
    plane.before = lambda call: say(503) if call.kind == "poll" else None
    again.tick()
    assert again.instance is not None
    assert serves(again)
    clock.advance(1)
    assert not serves(again)
    plane.before = lambda call: None
    again.tick()
    assert serves(again)


def test_a_fence_that_closed_meanwhile_is_closed(start: StartProcess, plane: ControlPlane) -> None:
    start().tick()
    again = start()
    plane.publish(entry("acme", accepts="none"))
    again.tick()
    assert not serves(again)


# --- copies that are not used -----------------------------------------------------------------


def test_a_second_process_starts_with_none_and_keeps_none(
    start: StartProcess, plane: ControlPlane, clock: DrivenClock
) -> None:
    start().tick()
    second = start(dies_first=False, plane=away)
    assert not second.ready
    other = start(dies_first=False)
    other.tick()
    clock.advance(LEASE_SECONDS / 2)
    # The first one's copy is untouched by either.
    assert serves(start(plane=away))


OTHERS = {
    "another boot of the host": {"boot": "boot-2"},
    "a host whose boots nobody can tell apart": {"boot": ""},
    "another cell": {"cell": "two"},
    "a process that may run longer turns": {"longest_turn_seconds": 61.0},
}


@pytest.mark.parametrize("why", OTHERS)
def test_somebody_elses_copy_is_not_used(start: StartProcess, why: str) -> None:
    start().tick()
    assert not serves(start(plane=away, **OTHERS[why]))
    # Nor left for a process of which nobody knows when it comes.
    assert why.startswith("a host") or not serves(start(plane=away))


def test_a_process_that_left_leaves_no_copy(start: StartProcess) -> None:
    first = start()
    first.tick()
    assert first.leave()
    assert not serves(start(plane=away))


def test_an_instance_that_left_makes_room_for_the_next_in_its_process(
    start: StartProcess,
) -> None:
    first = start()
    first.tick()
    assert first.leave()
    second = start(dies_first=False)
    second.tick()
    assert serves(start(plane=away))


def test_a_leftover_that_can_not_be_removed_keeps_no_process_from_starting(
    start: StartProcess, path: Path
) -> None:
    path.with_name("agent-1.lease").mkdir()
    process = start()
    process.tick()
    assert serves(process)


def test_a_process_that_left_with_turns_inside_is_still_counted_on(start: StartProcess) -> None:
    first = start()
    first.tick()
    with first.fence.enter("acme"):
        assert not first.leave(wait_seconds=0)
    assert serves(start(plane=away))


def test_an_id_that_is_gone_leaves_no_copy(start: StartProcess, plane: ControlPlane) -> None:
    first = start()
    first.tick()
    plane.instances["i1"].gone = "dead"
    plane.before = lambda call: say(503) if call.kind == "join" else None
    first.tick()
    assert not serves(start(plane=away))


@pytest.mark.parametrize("suffix", ["", ".lease"])
def test_a_file_that_is_not_as_it_was_written_is_not_used(
    start: StartProcess, path: Path, suffix: str
) -> None:
    start().tick()
    file = path.with_name(path.name + suffix)
    file.write_bytes(file.read_bytes().replace(b"i1", b"i2"))
    assert not serves(start(plane=away))


def test_a_version_that_was_written_in_part_is_not_passed_over(
    start: StartProcess, path: Path, plane: ControlPlane
) -> None:
    first = start()
    first.tick()
    plane.publish(entry("acme", accepts="none"))
    first.tick()
    whole = path.read_bytes()
    for length in range(whole.index(b"\n") + 2, len(whole)):
        path.write_bytes(whole[:length])
        (copy := DiskCopy(path, boot=lambda: BOOT))  # Looked at, not used: it would be removed.
        with pytest.raises(ValueError, match="written"):
            copy._read(None, 0.0)  # type: ignore[arg-type]


# --- a version is here before it is reported ----------------------------------------------------


def test_a_kill_at_every_call_leaves_no_older_version_than_was_reported(
    start: StartProcess, plane: ControlPlane
) -> None:
    """The fence closes, opens and closes; whoever comes back has not forgotten what it said."""
    for at in range(3, 24):
        for when in ("before", "after"):
            plane.calls.clear()
            process = start()

            def kill(call: Call, *_: Any, at: int = at) -> None:
                if len(plane.calls) == at:
                    raise Killed

            setattr(plane, when, kill)
            try:
                for accepts in ("all", "none", "all", "none", "all", "none", "all", "none"):
                    process.tick()
                    plane.publish(entry("acme", accepts=accepts), entry(f"t{plane.version}"))
            except Killed:
                pass
            plane.before = lambda call: None
            plane.after = lambda call, answer: None
            assert process.instance is not None
            said = [r["applied_version"] for r in plane.instances[process.instance].reports]
            again = start(plane=away)
            if again.policy is not None:
                reported = max((int(v.partition(".")[2]) for v in said), default=0)
                assert again.policy.version.number >= reported
                assert process.policy is not None
                assert again.policy.version.number >= process.policy.version.number


def test_what_can_not_be_written_is_removed(
    start: StartProcess, plane: ControlPlane, path: Path
) -> None:
    first = start()
    first.tick()
    path.unlink()
    path.mkdir()  # No file can be appended to.
    plane.publish(entry("acme", accepts="none"))
    first.tick()
    assert not path.with_name("agent-1.lease").exists()
    path.rmdir()
    assert plane.reports[-1]["applied_version"] == f"e1.{plane.version}"
    assert not serves(start(plane=away))


def test_what_can_not_be_removed_either_is_not_applied(
    start: StartProcess, plane: ControlPlane, path: Path
) -> None:
    first = start()
    first.tick()
    version = plane.version
    for file in (path, path.with_name("agent-1.lease")):
        file.unlink()
        file.mkdir()
    plane.publish(entry("acme", accepts="none"))
    first.tick()
    assert "can't be removed" in first.trouble
    assert plane.reports[-1]["applied_version"] == f"e1.{version}"
    assert serves(first)


def test_deltas_are_made_one_again_before_they_fill_the_disk(
    start: StartProcess, plane: ControlPlane, path: Path
) -> None:
    first = start()
    first.tick()
    tools = [f"tool-{number}" for number in range(20_000)]
    for number in range(12):
        scope = entry()["scope"] | {"allowed_tools": tools, "version": number}
        plane.publish(entry("acme", scope=scope), entry(f"t{number}"))
        first.tick()
    assert path.stat().st_size < 3 * MERGE_OVER_BYTES
    assert start(plane=away).policy == first.policy


def test_the_cells_part_outlives_deltas_without_one() -> None:
    answers: list[dict[str, Any]] = [
        {"version": "e.1", "full": True, "cell": {"a": 1}, "tenants": [entry("acme")]},
        {"version": "e.2", "full": False, "cell": {"b": 2}, "tenants": []},
        {"version": "e.3", "full": False, "cell": None, "tenants": [entry("bolt")]},
    ]
    one = _merged(answers)
    assert (one["version"], one["full"], one["cell"]) == ("e.3", True, {"b": 2})
    assert [e["tenant"] for e in one["tenants"]] == ["acme", "bolt"]


def test_a_policy_of_one_id_and_a_lease_of_another_are_no_copy(
    start: StartProcess, plane: ControlPlane
) -> None:
    """Killed between two writes, after the first full policy of a new id."""
    start().tick()
    again = start()
    assert again._copy is not None
    again._copy.policy("i2", json.loads(plane._poll(_poll_of("i1"))[2]))
    assert not serves(start(plane=away))


def _poll_of(instance: str) -> Call:
    return Call("GET", f"/api/v1/runtime/policy?instance={instance}", None, {})


# --- grants -----------------------------------------------------------------------------------


@pytest.fixture
def limited(plane: ControlPlane) -> Callable[[dict[str, Any]], None]:
    """A tenant of 8 runs at once, and an answer to reports that grants a share of it."""
    plane.publish(entry("acme", scope=entry()["scope"] | {"max_concurrent_runs": 8}))
    granted: dict[str, Any] = {}

    def grant(share: dict[str, Any]) -> None:
        granted.update(number=granted.get("number", 0) + 1, tenants={"acme": share})

    def answer(call: Call) -> Answer | None:
        if call.kind != "report":
            return None
        status, _, content = plane._report(call)
        data = {**json.loads(content), "grants": dict(granted), "grant_seconds": 30.0}
        return say(status, **data)

    grant(SHARE)
    plane.before = answer
    return grant


def acme(client: PolicyClient) -> Entry:
    return client.policy.entries["acme"]  # type: ignore[union-attr]


def at_once(client: PolicyClient) -> int:
    """How many runs of acme the process lets in at once."""
    return next(n for n in range(20) if client.shares.start(acme(client), n) is not None)


def test_it_holds_the_safe_part_of_what_was_granted(
    start: StartProcess, limited: Callable[[dict[str, Any]], None]
) -> None:
    first = start()
    first.tick()
    assert at_once(first) == 8
    assert at_once(start(plane=away)) == 4


def test_a_smaller_share_is_here_before_it_is_said_to_hold(
    start: StartProcess, limited: Callable[[dict[str, Any]], None], plane: ControlPlane
) -> None:
    first = start()
    first.tick()
    limited(SHARE | {"max_concurrent_runs": 2, "safe_max_concurrent_runs": 1})
    first.tick()
    assert plane.reports[-1]["grants_number"] == 1
    assert at_once(start(plane=away)) == 1


def test_a_process_that_is_started_again_and_again_begins_no_more_than_was_granted(
    start: StartProcess, plane: ControlPlane, clock: DrivenClock
) -> None:
    """What the one before had left in its buckets has gone with it."""
    plane.publish(entry("acme", scope=limits(runs_per_second=1.0)))
    plane.grant(acme=share(1.0))
    start().tick()
    begun = 0
    for _ in range(20):
        again = start(plane=away)
        for _ in range(2):
            clock.advance(0.5)
            with suppress(TenantThrottled), again.admission.admit(acme(again)):
                begun += 1
    # Half of it is safe; a second is too short for one of it.
    assert begun == 0
    clock.advance(1)
    with again.admission.admit(acme(again)):
        pass


def test_what_the_copy_granted_ends_with_the_own_policy(
    start: StartProcess, limited: Callable[[dict[str, Any]], None], plane: ControlPlane
) -> None:
    start().tick()
    again = start()
    plane.before = lambda call: say(503) if call.kind == "report" else None
    again.tick()
    assert at_once(again) == 0
