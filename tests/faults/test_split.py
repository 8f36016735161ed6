"""Split mode: both sides serve, and whatever happens every session is served by exactly one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from django.conf import LazySettings

from migrations_app import channels, copying, merging, queries, services
from migrations_app.domain.phases import Mode, Phase
from migrations_app.models import TenantMigration
from tenants.models import Placement, PlacementChange
from tests.stores import EMPTY, Raw
from tests.world import APP, World, each_call, each_moment, undone

pytestmark = pytest.mark.timeout(600)

Sessions = dict[str, list[str]]
LONG = 86_400.0


def start(world: World, **options: object) -> None:
    world.start(
        mode=Mode.SPLIT,
        soak_seconds=LONG,
        offboard_automatically=False,
        **{"idle_seconds": 0.0, **options},
    )


def until_both_serve(world: World) -> TenantMigration:
    """Let the move come to where the target takes new sessions."""
    for _ in range(60):
        if queries.split_live(world.move):
            return world.move
        world.step()
    raise AssertionError(f"no split: {world.move.phase} {world.move.waiting_for}")


def born(side: Raw, name: str, user: str = "u-1") -> None:
    with side.connection() as connection:
        side.add_session(connection, APP, user, name, 2)


def shares(side: Raw, user: str, key: str, value: str, seconds: int, session: str = "") -> None:
    """Set a key of a user's shared state as an agent does: the row, and the event that says so."""
    session = session or f"s-{user.removeprefix('u-')}"
    with side.connection() as connection:
        [(state,)] = side.run_in(
            connection,
            "select state from user_states where app_name = ? and user_id = ?",
            APP,
            user,
        )
        known = json.loads(state) if isinstance(state, str) else state
        side.run_in(
            connection,
            "update user_states set state = ? where app_name = ? and user_id = ?",
            json.dumps({**known, key: value}),
            APP,
            user,
        )
        name = f"{json.dumps(key)[1:-1]}-{value}"
        side.add_event(connection, APP, user, session, name, seconds)
        data = {"id": name, "actions": {"state_delta": {f"user:{key}": value}}}
        side.run_in(
            connection,
            "update events set event_data = ? where app_name = ? and id = ?",
            json.dumps(data),
            APP,
            name,
        )


def shared(side: Raw, user: str) -> dict[str, Any]:
    [(state,)] = side.run(
        "select state from user_states where app_name = ? and user_id = ?", APP, user
    )
    found = json.loads(state) if isinstance(state, str) else state
    assert isinstance(found, dict)
    return found


def sessions(side: Raw) -> Sessions:
    """Return each session's events, in order: what users hold against us."""
    found: Sessions = {}
    for user, session, event in side.run(
        "select user_id, session_id, id from events where app_name = ?"
        " order by user_id, session_id, timestamp, id",
        APP,
    ):
        found.setdefault(f"{user}/{session}", []).append(event)
    return found


def live(world: World) -> Sessions:
    """Let both sides live: turns at the source, births on the target; return what there is."""
    world.source.turn(APP, "u-2", "s-2", "at-the-source")
    born(world.target, "s-born")
    world.target.turn(APP, "u-1", "s-born", "at-the-target")
    return {**sessions(world.source), "u-1/s-born": sessions(world.target)["u-1/s-born"]}


def assert_moved(world: World, content: Sessions, why: object) -> None:
    assert sessions(world.target) == content, why
    assert world.owner() == [("cell-eu1-b", "all")], why
    assert world.agents_may_write(world.target), why
    assert not world.agents_may_write(world.source), why
    assert Placement.objects.get(tenant=world.cast.acme).split_cell is None, why


def assert_back(world: World, content: Sessions, why: object) -> None:
    assert world.move.phase == Phase.ROLLED_BACK, why
    assert sessions(world.source) == content, why
    assert world.owner() == [("cell-eu1-a", "all")], why
    assert world.agents_may_write(world.source), why
    assert not world.agents_may_write(world.target), why
    assert Placement.objects.get(tenant=world.cast.acme).split_cell is None, why


def assert_both_serve(world: World, why: object) -> None:
    assert sorted(world.owner()) == [("cell-eu1-a", "existing"), ("cell-eu1-b", "new")], why
    assert world.agents_may_write(world.source), why
    assert world.agents_may_write(world.target), why


def test_new_sessions_begin_on_the_target_and_known_ones_follow(both: World) -> None:
    start(both)
    placed = until_both_serve(both).split_placement_version
    assert_both_serve(both, "split")
    content = live(both)
    both.run(until=Phase.SOAK)
    assert_moved(both, content, "no trouble")
    assert placed is not None
    assert both.move.placement_version == placed + 1


def test_the_source_is_waited_for_until_nothing_changes_there(files: World) -> None:
    start(files, idle_seconds=120.0)
    begun = files.clock.now
    until_both_serve(files)
    for number in range(4):
        files.source.turn(APP, "u-2", "s-2", f"busy-{number}", 9_000 + number)
        files.clock.pass_by(60)
        for _ in range(8):
            files.step()
    assert files.move.phase == Phase.SPLIT
    assert "at the latest" in files.move.waiting_for
    files.run(until=Phase.DRAIN)
    assert (files.clock.now - begun).total_seconds() > 120 + 4 * 60


def test_the_wait_for_idle_sessions_has_its_bound(files: World) -> None:
    start(files, idle_seconds=900.0, idle_bound_seconds=900.0)
    begun = files.clock.now
    until_both_serve(files)
    for number in range(12):
        files.source.turn(APP, "u-2", "s-2", f"busy-{number}", 9_000 + number)
        files.clock.pass_by(60)
        for _ in range(5):
            files.step()
    files.run(until=Phase.SOAK)
    assert 900 <= (files.clock.now - begun).total_seconds() < 1_800


def test_a_person_may_end_the_wait(files: World) -> None:
    start(files, idle_seconds=3_600.0)
    until_both_serve(files)
    for _ in range(6):
        files.step()
    services.close_fence(files.move, by="ada", reason="now", now=files.clock())
    files.run(until=Phase.SOAK)
    assert (files.clock.now - files.move.started_at).total_seconds() < 600


def test_each_key_of_shared_state_is_the_side_s_that_changed_it(both: World) -> None:
    start(both)
    until_both_serve(both)
    for user in ("u-1", "u-2", "u-3"):
        born(both.target, f"born-{user}", user)
    shares(both.source, "u-2", "theme", "dark", 9_000)
    shares(both.target, "u-2", "city", "Ghent", 9_001, "born-u-2")
    shares(both.source, "u-3", "lang", "nl", 9_005)
    shares(both.target, "u-3", "lang", "fr", 9_004, "born-u-3")
    shares(both.source, "u-1", "lang", "nl", 9_004)
    shares(both.target, "u-1", "lang", "fr", 9_005, "born-u-1")
    both.run(until=Phase.SOAK)
    assert shared(both.target, "u-2") == {"tier": "basic", "theme": "dark", "city": "Ghent"}
    assert shared(both.target, "u-3")["lang"] == "nl"
    assert shared(both.target, "u-1")["lang"] == "fr"
    assert {(line["user_id"], line["taken"]) for line in both.move.merged} == {
        ("u-3", "source"),
        ("u-1", "target"),
    }


def test_a_key_whose_event_is_gone_is_left_and_listed_as_undecided(both: World) -> None:
    start(both)
    # Everybody knows this one: its event goes over with its session.
    shares(both.source, "u-3", "lang", "de", 8_000)
    until_both_serve(both)
    for user in ("u-1", "u-2", "u-3"):
        born(both.target, f"born-{user}", user)
        shares(both.target, user, "lang", "fr", 9_005, f"born-{user}")
        shares(both.source, user, "lang", "nl", 9_004)
        if user != "u-1":
            both.target.delete(APP, user, f"born-{user}")
    # One born there has set it before, to something else.
    born(both.target, "born-first", "u-2")
    shares(both.target, "u-2", "lang", "it", 9_002, "born-first")
    born(both.target, "born-last", "u-2")
    shares(both.target, "u-2", "lang", "fr", 9_006, "born-last")
    both.target.delete(APP, "u-2", "born-last")
    both.run(until=Phase.SOAK)
    for user in ("u-1", "u-2", "u-3"):
        assert shared(both.target, user)["lang"] == "fr"
        assert shared(both.source, user)["lang"] == "nl"
    assert sorted(
        (line["user_id"], line["taken"], line.get("undecided", False)) for line in both.move.merged
    ) == [("u-1", "target", False), ("u-2", "target", True), ("u-3", "target", True)]
    notes = both.move.events.filter(note__contains="nothing tells which is newer")
    assert notes.count() == 2


def test_a_merge_of_many_users_takes_several_steps(
    both: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(both)
    until_both_serve(both)
    for number in range(4):
        shares(both.source, f"u-{number}", "theme", "dark", 9_000)
    both.run(until=Phase.DELTA)
    monkeypatch.setattr(copying, "FENCED_STEP_SECONDS", 0.0)
    merged = []
    while both.move.phase == Phase.DELTA:
        assert (both.step().failures, both.move.failure) == (0, "")
        themes = [shared(both.target, f"u-{number}").get("theme") for number in range(4)]
        merged.append(themes.count("dark"))
    assert sorted(set(merged)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("key", ["a\0b", "\udcc3", ""], ids=["NUL", "half a pair", "empty"])
def test_a_key_that_only_sqlite_holds_is_merged_and_listed_too(files: World, key: str) -> None:
    start(files)
    until_both_serve(files)
    born(files.target, "born-u-2", "u-2")
    shares(files.source, "u-2", key, "ours", 9_000)
    shares(files.target, "u-2", key, "theirs", 9_001, "born-u-2")
    files.run(until=Phase.SOAK)
    assert shared(files.target, "u-2")[key] in ("ours", "theirs")
    assert [line["key"] for line in files.move.merged] == [f"json:{json.dumps(key)}"]


def test_more_keys_than_are_listed_are_counted_in_the_log(
    files: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "LISTED", 1)
    start(files)
    until_both_serve(files)
    born(files.target, "born-u-2", "u-2")
    for key in ("one", "two", "three"):
        shares(files.source, "u-2", key, "ours", 9_000)
        shares(files.target, "u-2", key, "theirs", 9_001, "born-u-2")
    files.run(until=Phase.SOAK)
    assert [line["key"] for line in files.move.merged] == ["one"]
    assert files.move.events.filter(note__contains="2 more keys of u-2's").count() == 1


def test_an_agent_that_writes_shared_state_while_it_is_merged_loses_nothing(both: World) -> None:
    start(both)
    until_both_serve(both)
    born(both.target, "s-born", "u-2")
    shares(both.source, "u-2", "theme", "dark", 9_000)
    both.run(until=Phase.DELTA)
    both.killer.before["replace_shared"] = lambda: shares(
        both.target, "u-2", "city", "Ghent", 9_001, "s-born"
    )
    both.run(until=Phase.SOAK)
    assert shared(both.target, "u-2") == {"tier": "basic", "theme": "dark", "city": "Ghent"}


def test_a_split_survives_a_kill_at_every_call(files: World) -> None:
    start(files)
    until_both_serve(files)
    content = live(files)
    shares(files.source, "u-2", "theme", "dark", 9_000)
    content = {**sessions(files.source), "u-1/s-born": content["u-1/s-born"]}
    tried = 0
    for call in _until_soak(each_call(files), files):
        tried += 1
        with undone(files):
            files.run(until=Phase.SOAK)
            assert_moved(files, content, f"killed at {call}")
            assert shared(files.target, "u-2")["theme"] == "dark", call
    assert tried > 40


def test_coming_to_the_split_survives_a_kill_at_every_call(files: World) -> None:
    start(files)
    files.run(until=Phase.SPLIT)
    tried = 0
    for call in each_call(files):
        if queries.split_live(files.move):
            break
        tried += 1
        with undone(files):
            until_both_serve(files)
            assert_both_serve(files, call)
            content = live(files)
            files.run(until=Phase.SOAK)
            assert_moved(files, content, f"killed at {call}")
    assert tried > 15


def _until_soak(calls: Iterator[str], world: World) -> Iterator[str]:
    for call in calls:
        if world.move.phase == Phase.SOAK:
            return
        yield call


def test_an_abort_at_any_moment_brings_the_births_back(files: World) -> None:
    start(files)
    until_both_serve(files)
    content = live(files)
    tried = set()
    for phase in each_moment(files):
        if phase in (Phase.TARGET, Phase.SOAK):
            break
        tried.add(phase)
        with undone(files):
            services.abort(files.move, by="ada", reason="not now", now=files.clock())
            files.run()
            assert_back(files, content, f"aborted in {phase}")
    assert tried == {Phase.SPLIT, Phase.DRAIN, Phase.DELTA, Phase.VERIFY}


def test_an_abort_before_anything_was_born_takes_the_short_way(files: World) -> None:
    start(files)
    content = sessions(files.source)
    for phase in each_moment(files):
        if queries.split_live(files.move):
            break
        with undone(files):
            services.abort(files.move, by="ada", reason="not now", now=files.clock())
            files.run()
            assert files.move.phase == Phase.ABORTED, phase
            assert sessions(files.source) == content
            assert files.target.content(APP) == EMPTY
            assert files.owner() == [("cell-eu1-a", "all")], phase
            assert files.agents_may_write(files.source)


def test_the_way_back_out_of_a_split_survives_a_kill_at_every_call(files: World) -> None:
    start(files)
    until_both_serve(files)
    content = live(files)
    services.abort(files.move, by="ada", reason="not now", now=files.clock())
    tried = 0
    for call in each_call(files):
        tried += 1
        with undone(files):
            files.run()
            assert_back(files, content, f"killed at {call}")
    assert tried > 40


def test_a_session_that_is_served_at_the_source_once_it_came_back_keeps_its_turns(
    both: World,
) -> None:
    start(both)
    until_both_serve(both)
    live(both)
    services.abort(both.move, by="ada", reason="not now", now=both.clock())
    both.run(until=Phase.REVERSE_VERIFY)
    # The source's agents know it from the moment it is there.
    both.source.turn(APP, "u-1", "s-born", "at-home-again", 9_500)
    both.run()
    assert both.move.phase == Phase.ROLLED_BACK
    assert sessions(both.source)["u-1/s-born"][-1] == "at-home-again"


def test_a_way_back_that_is_stopped_leaves_both_sides_serving(files: World) -> None:
    start(files)
    until_both_serve(files)
    content = live(files)
    services.abort(files.move, by="ada", reason="not now", now=files.clock())
    tried = set()
    for phase in each_moment(files):
        if phase not in (Phase.REVERSE_DRAIN, Phase.REVERSE_DELTA, Phase.REVERSE_VERIFY):
            continue
        tried.add(phase)
        with undone(files):
            services.abort(files.move, by="ada", reason="go on", now=files.clock())
            files.run(until=Phase.SPLIT)
            for _ in range(2):
                files.step()
            assert_both_serve(files, phase)
            files.run(until=Phase.SOAK)
            assert_moved(files, content, f"stopped in {phase}")
    assert len(tried) == 3


def test_a_fence_that_runs_out_of_time_leaves_both_sides_serving(files: World) -> None:
    start(files)
    until_both_serve(files)
    content = live(files)
    files.run(until=Phase.VERIFY)
    files.clock.pass_by(1_000)
    files.run(until=Phase.SPLIT)
    files.step()
    assert_both_serve(files, "late")
    files.source.turn(APP, "u-2", "s-2", "once-more", 9_600)
    content["u-2/s-2"].append("once-more")
    files.run(until=Phase.SOAK)
    assert_moved(files, content, "at the second try")
    assert [fence["back"] for fence in files.move.past_fences] == [False]


def test_a_rollback_out_of_the_soak_of_a_split_carries_everything_back(both: World) -> None:
    start(both)
    until_both_serve(both)
    live(both)
    both.run(until=Phase.SOAK)
    both.target.turn(APP, "u-3", "s-3", "after-the-cutover", 9_700)
    content = sessions(both.target)
    for _ in range(4):
        both.step()
    services.rollback(both.move, by="ada", reason="slow tools", now=both.clock())
    both.run()
    assert_back(both, content, "rolled back")


def test_a_session_deleted_behind_the_split_is_not_deleted_on_the_target(files: World) -> None:
    start(files)
    until_both_serve(files)
    files.source.delete(APP, "u-2", "s-2")
    files.target.delete(APP, "u-2", "s-2")
    born(files.target, "s-2", "u-2")
    content = sessions(files.target)
    files.run(until=Phase.SOAK)
    assert sessions(files.target) == content


def test_a_split_is_between_two_cells(files: World) -> None:
    with pytest.raises(services.SamePlace, match="two cells"):
        start(files, target_cell=files.cast.cell)
    with pytest.raises(services.InvalidOption, match="up to the bound"):
        start(files, idle_seconds=60.0, idle_bound_seconds=30.0)


def test_a_way_back_out_of_a_split_that_ran_out_of_time_is_tried_again(files: World) -> None:
    start(files)
    until_both_serve(files)
    content = live(files)
    services.abort(files.move, by="ada", reason="not now", now=files.clock())
    files.run(until=Phase.REVERSE_VERIFY)
    files.clock.pass_by(1_000)
    files.run(until=Phase.SPLIT)
    files.step()
    assert_both_serve(files, "late")
    files.run()
    assert_back(files, content, "at the second try")


def until_ready_to_split(world: World) -> None:
    """Let the move come to where its next step opens the target."""
    for _ in range(60):
        if world.move.phase == Phase.SPLIT and world.move.stage == "ready":
            return
        world.step()
    raise AssertionError(f"not ready: {world.move.phase} {world.move.waiting_for}")


def abort(world: World) -> None:
    services.abort(world.move, by="ada", reason="not now", now=world.clock())


def test_an_abort_that_comes_as_the_target_opens_is_answered(files: World) -> None:
    start(files)
    until_ready_to_split(files)
    files.killer.before["take"] = lambda: abort(files)
    content = sessions(files.source)
    files.run()
    assert files.move.phase == Phase.ABORTED
    assert sessions(files.source) == content
    assert files.target.content(APP) == EMPTY
    assert files.owner() == [("cell-eu1-a", "all")]


def test_an_abort_that_comes_as_the_fence_closes_keeps_it_open(files: World) -> None:
    start(files)
    until_both_serve(files)
    content = live(files)
    files.killer.before["still_writing"] = lambda: abort(files)
    phases = []
    for _ in range(60):
        phases.append(files.step().phase)
    assert Phase.DRAIN not in phases
    assert_back(files, content, phases)


def test_an_abort_of_a_paused_split_brings_the_births_back(files: World) -> None:
    start(files)
    until_both_serve(files)
    content = live(files)
    services.pause(files.move, by="ada", reason="lunch", now=files.clock())
    files.step()
    abort(files)
    files.run()
    assert_back(files, content, "paused")


@pytest.mark.parametrize("call", ["digests", "stamps"])
def test_a_turn_at_the_source_while_the_births_are_compared_holds_nothing_up(
    both: World, call: str
) -> None:
    start(both)
    until_both_serve(both)
    live(both)
    abort(both)
    both.run(until=Phase.REVERSE_VERIFY)
    both.killer.before[call] = lambda: both.source.turn(APP, "u-1", "s-born", "at-home", 9_500)
    begun = both.clock()
    both.run()
    assert both.move.phase == Phase.ROLLED_BACK
    assert sessions(both.source)["u-1/s-born"][-1] == "at-home"
    assert (both.clock() - begun).total_seconds() < 30
    assert both.move.past_fences == []


def test_what_was_not_here_before_a_stopped_way_back_is_asked_for_anew(files: World) -> None:
    """A gateway may hold "not here" of a session for as long as a way back takes. Served on its
    word by the target, which is open again, the turn would be replaced by the source's session."""
    start(files)
    until_both_serve(files)
    live(files)
    told = dict(entries(files))
    abort(files)
    files.run(until=Phase.REVERSE_VERIFY)
    abort(files)
    files.run(until=Phase.SPLIT)
    files.step()
    assert_both_serve(files, "stopped")
    placed = Placement.objects.get(tenant=files.cast.acme).placement_version
    assert placed > max(told.values())
    assert set(entries(files)) == {("cell-eu1-a", placed), ("cell-eu1-b", placed)}


def entries(world: World) -> list[tuple[str, int]]:
    rows = world.cast.acme.entries.order_by("cell__slug")
    return list(rows.values_list("cell__slug", "placement_version"))


@pytest.mark.parametrize("until", [Phase.SPLIT, Phase.SOAK])
def test_side_channels_bring_back_what_is_younger_than_the_split(
    files: World, settings: LazySettings, until: Phase
) -> None:
    """The target has served since then, whatever fences were closed and left meanwhile."""
    settings.CHANNEL_MODULES = ["tests.vectors"]
    owner = {"tenant": files.cast.acme, "by": "ada", "now": files.clock()}
    steps = {"copy_by": "callable", "copy_step": "tests.vectors:since"}
    checks = {"verify_by": "callable", "verify_step": "tests.vectors:since"}
    channels.register(name="vectors", **owner, **steps, **checks)
    start(files)
    until_both_serve(files)
    begun = PlacementChange.objects.latest("id").at.isoformat()
    files.clock.pass_by(5)
    files.run(until=Phase.VERIFY)
    files.clock.pass_by(1_000)
    files.run(until=Phase.SPLIT)
    files.step()
    if until == Phase.SOAK:
        files.run(until=Phase.SOAK)
        for _ in range(4):
            files.step()
        services.rollback(files.move, by="ada", reason="slow tools", now=files.clock())
    else:
        abort(files)
    files.run()
    assert files.move.phase == Phase.ROLLED_BACK
    assert files.move.events.filter(note__contains=f"copied, since {begun}").exists()


def test_a_side_channel_registered_in_a_split_keeps_its_fence_from_closing(files: World) -> None:
    start(files)
    until_both_serve(files)
    files.run(until=Phase.SPLIT)
    channels.register(name="logs", tenant=files.cast.acme, by="ada", now=files.clock())
    for _ in range(40):
        files.step()
        files.clock.pass_by(30)
    assert files.move.phase == Phase.SPLIT
    assert files.move.waiting_for == "side channel logs to be copied by a person"
    row = files.move.channels.get()
    said = {"note": "the shipper points there", "by": "ada"}
    channels.check_off(row, step="copy", now=files.clock(), **said)
    files.run(until=Phase.VERIFY)
    channels.check_off(files.move.channels.get(), step="verify", now=files.clock(), **said)
    files.run(until=Phase.SOAK)
