"""Instances share a limit: together they never exceed it, whatever becomes of messages."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capacity.domain.division import (
    RATE_UNITS,
    Ask,
    Member,
    Standing,
    fill,
    redivide,
    standing,
)
from tenants.domain.reports import GRANT_SECONDS, share_sent

START = datetime(2026, 3, 2, 12, 0, tzinfo=UTC)
LEASE, LONGEST = 90.0, 20.0
# Seconds between rounds of dividing, between reports, and until a lost report goes again.
ROUND, REPORT, PATIENCE = 5, 5, 3
FRESH = Standing(fresh=True, running=True, leased=True)


def at(second: float) -> datetime:
    return START + timedelta(seconds=second)


# --- the two sides, in seconds --------------------------------------------------------------


@dataclass
class Row:
    """An instance as the control plane has it: the columns and the rules of a report."""

    id: int
    process: int
    lease_until: float
    seq: int = 0
    number: int = 0
    heard: int = 0
    until: float | None = None
    in_flight: int = 0
    refused: int = 0
    started: int = 0
    gone_at: float | None = None
    gone_why: str = ""
    shares: dict[str, Any] = field(default_factory=dict)
    before: dict[str, Any] = field(default_factory=dict)


@dataclass
class Said:
    """A report; a retry is the same one."""

    row: int
    seq: int
    number: int
    in_flight: int
    refused: int
    started: int
    first_sent: float


class Plane:
    """The control plane: reports as the services take them, and the division."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.rows: dict[int, Row] = {}

    def join(self, process: int, replaces: int | None, now: float) -> int:
        if replaces is not None and self.rows[replaces].gone_at is None:
            self.go(replaces, "replaced", now)
        row = Row(len(self.rows) + 1, process, now + LEASE)
        self.rows[row.id] = row
        return row.id

    def go(self, row: int, why: str, now: float) -> None:
        self.rows[row].gone_at, self.rows[row].gone_why = now, why

    def report(self, said: Said, now: float) -> tuple[float, float, int, Any] | None:
        """Return lease and grant seconds, a number and its shares; None: the instance is gone."""
        row = self.rows[said.row]
        lapsed = row.lease_until + 5 + LONGEST <= now
        if row.gone_at is not None or lapsed:
            return None
        if said.seq == row.seq + 1:
            row.seq, row.heard, row.in_flight = said.seq, said.number, said.in_flight
            row.refused, row.started = said.refused, said.started
            row.until, row.lease_until = now + GRANT_SECONDS, now + LEASE
        shares = None if said.number == row.number else dict(row.shares)
        assert row.until is not None
        return row.lease_until - now, max(0.0, row.until - now), row.number, shares

    def divide(self, now: float) -> None:
        members = []
        for row in self.rows.values():
            state = standing(
                grants_until=None if row.until is None else at(row.until),
                lease_until=at(row.lease_until),
                longest_turn_seconds=LONGEST,
                gone_at=None if row.gone_at is None else at(row.gone_at),
                gone_why=row.gone_why,
                now=at(now),
            )
            speaks = any(
                one.process == row.process and one.id > row.id and one.seq
                for one in self.rows.values()
            )
            if (row.gone_why == "replaced" and speaks) or not (state.running or state.leased):
                continue
            members.append(
                Member(
                    id=row.id,
                    cell=1,
                    standing=state,
                    heard=row.heard == row.number,
                    shares=row.shares,
                    before=row.before,
                    in_flight={"acme": row.in_flight},
                    demand={
                        "acme": ((row.started + row.refused) * RATE_UNITS // REPORT, row.refused)
                    },
                )
            )
        for id_, made in redivide(members, {"acme": self.ask}).items():
            row = self.rows[id_]
            row.shares, row.before = dict(made.shares), dict(made.before)
            row.number += 1


@dataclass
class Process:
    """An instance as it is: it begins turns whenever it may."""

    id: int
    row: int
    lease_until: float
    # Turns that it would run at once if it could.
    wish: int
    number: int = 0
    shares: dict[str, Any] = field(default_factory=dict)
    full_until: float = 0.0
    turns: list[float] = field(default_factory=list)
    seq: int = 0
    next_report: float = 0.0
    outstanding: Said | None = None
    sent_at: float = 0.0
    cut_off: bool = False
    drains: bool = False
    started: int = 0

    def may(self, name: str, now: float) -> float:
        """What it applies of a limit just now."""
        if "acme" not in self.shares or now >= self.lease_until or self.drains:
            return 0
        share = share_sent(self.shares["acme"])
        value = share[name if now < self.full_until else f"safe_{name}"]
        return 0 if value is None else value

    def live(self, now: float, dice: random.Random) -> None:
        self.turns = [end for end in self.turns if end > now]
        while len(self.turns) < self.wish:
            if len(self.turns) >= self.may("max_concurrent_runs", now):
                break
            # As long as it may, often: the worst for whoever lends.
            self.turns.append(now + (LONGEST if dice.random() < 0.5 else dice.uniform(1, LONGEST)))
            self.started += 1


class World:
    """Processes, a plane, and a network that loses, delays and repeats."""

    def __init__(self, ask: Ask, seed: int, *, trouble: float) -> None:
        self.ask, self.dice, self.trouble = ask, random.Random(seed), trouble
        self.plane = Plane(ask)
        self.processes: dict[int, Process] = {}
        # Answers under way: when they arrive, to which report.
        self.late: list[tuple[float, int, Said, Any]] = []
        self.now = 0.0

    def start(self, wish: int) -> Process:
        id_ = max(self.processes, default=0) + len(self.plane.rows) + 1
        row = self.plane.join(id_, None, self.now)
        process = Process(id_, row, self.now + LEASE, wish, next_report=self.now)
        self.processes[id_] = process
        return process

    def tick(self) -> None:
        self.now += 1
        self._misfortune()
        for process in list(self.processes.values()):
            self._arrive(process)
            process.live(self.now, self.dice)
            self._talk(process)
            process.live(self.now, self.dice)
        if self.now % ROUND == 0:
            self.plane.divide(self.now)
        self.check()

    def check(self) -> None:
        """Nothing together exceeds a limit, at this moment."""
        if self.ask.max_concurrent_runs is not None:
            running = sum(len(process.turns) for process in self.processes.values())
            assert running <= self.ask.max_concurrent_runs
        if self.ask.runs_per_second is not None:
            rates = sum(p.may("runs_per_second", self.now) for p in self.processes.values())
            assert rates <= self.ask.runs_per_second + 1e-9

    def _misfortune(self) -> None:
        dice = self.dice
        if len(self.processes) < 5 and dice.random() < 0.03 * (1 + self.trouble):
            self.start(dice.choice([0, 1, 3, 20]))
        for process in list(self.processes.values()):
            if dice.random() < 0.02:
                process.wish = dice.choice([0, 1, 3, 20])
            if dice.random() > 0.02 * self.trouble:
                continue
            match dice.randrange(5):
                case 0:  # Killed; nobody hears of it.
                    del self.processes[process.id]
                case 1:
                    process.cut_off = not process.cut_off
                case 2:
                    process.drains = True
                case 3:  # Joins anew, with the turns that it runs.
                    self._rejoin(process)
                case _:  # Its host died, and two people say so.
                    del self.processes[process.id]
                    if self.plane.rows[process.row].gone_at is None:
                        self.plane.go(process.row, "dead", self.now)

    def _rejoin(self, process: Process) -> None:
        if process.cut_off:
            return
        process.shares, process.number, process.full_until = {}, 0, 0.0
        process.row = self.plane.join(process.id, process.row, self.now)
        process.seq, process.outstanding = 0, None
        process.lease_until, process.next_report = self.now + LEASE, self.now

    def _talk(self, process: Process) -> None:
        now = self.now
        if now >= process.lease_until:
            self._rejoin(process)
        if process.drains and not process.turns and not process.cut_off:
            self.plane.go(process.row, "left", now)
            del self.processes[process.id]
            return
        if process.outstanding is not None:
            if now - process.sent_at < PATIENCE:
                return
        elif now < process.next_report:
            return
        else:
            process.outstanding = Said(
                process.row,
                process.seq + 1,
                process.number,
                len(process.turns),
                # Each client that waits was refused, and counts once.
                max(0, process.wish - len(process.turns)),
                process.started,
                now,
            )
            process.started = 0
        process.sent_at = now
        if process.cut_off or self.dice.random() < 0.2 * self.trouble:
            return  # Never arrived.
        answer = self.plane.report(process.outstanding, now)
        if self.dice.random() < 0.2 * self.trouble:
            return  # Taken, and its answer was lost.
        delay = self.dice.choice([0, 0, 0, 1, 2]) if self.trouble else 0
        self.late.append((now + delay, process.id, process.outstanding, answer))
        if not delay:
            self._arrive(process)

    def _arrive(self, process: Process) -> None:
        mine = [one for one in self.late if one[1] == process.id and one[0] <= self.now]
        for one in mine:
            self.late.remove(one)
            _, _, said, answer = one
            if said is not process.outstanding:
                continue  # The client has given it up.
            process.outstanding = None
            process.next_report = self.now + REPORT
            if answer is None:
                self._rejoin(process)
                continue
            lease, seconds, number, shares = answer
            process.seq = said.seq
            if said.first_sent + lease <= self.now:
                self._rejoin(process)
                continue
            process.lease_until = said.first_sent + lease
            process.full_until = said.first_sent + seconds
            if shares is not None:
                process.number, process.shares = number, shares


# --- laws -----------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 2**32),
    runs=st.sampled_from([1, 2, 5, 10, 40]),
    trouble=st.sampled_from([0.2, 1.0, 3.0]),
)
@settings(max_examples=80, deadline=None)
def test_together_instances_never_use_more_than_the_limit(
    seed: int, runs: int, trouble: float
) -> None:
    """They join, die, are cut off; answers are lost, late, repeated. They begin all they may."""
    ask = Ask(frozenset({1}), runs_per_second=runs / 4, max_concurrent_runs=runs)
    world = World(ask, seed, trouble=trouble)
    for wish in (20, 3):
        world.start(wish)
    for _ in range(400):
        world.tick()


@given(seed=st.integers(0, 2**32), members=st.integers(2, 5), runs=st.sampled_from([10, 40]))
@settings(max_examples=20, deadline=None)
def test_what_is_lent_goes_where_it_is_asked_for_within_a_few_rounds(
    seed: int, members: int, runs: int
) -> None:
    ask = Ask(frozenset({1}), max_concurrent_runs=runs)
    world = World(ask, seed, trouble=0.0)
    processes = [world.start(0) for _ in range(members)]
    world._misfortune = lambda: None  # type: ignore[method-assign]
    for wanted in (processes[0], processes[-1], processes[0]):
        for process in processes:
            process.wish = 200 if process is wanted else 0
        # A turn of the others ends after LONGEST; then 6 rounds.
        for _ in range(int(LONGEST) + 6 * ROUND):
            world.tick()
        least = len(processes) - 1
        assert len(wanted.turns) >= runs - least * max(1, runs // (10 * members))


@given(seed=st.integers(0, 2**32))
@settings(max_examples=10, deadline=None)
def test_an_instance_that_is_alone_has_all_and_half_of_it_when_nobody_answers(seed: int) -> None:
    ask = Ask(frozenset({1}), runs_per_second=2.5, max_concurrent_runs=7)
    world = World(ask, seed, trouble=0.0)
    world._misfortune = lambda: None  # type: ignore[method-assign]
    one = world.start(0)
    for _ in range(20):
        world.tick()
    assert (one.may("runs_per_second", 20), one.may("max_concurrent_runs", 20)) == (2.5, 7)
    one.cut_off = True
    for _ in range(50):
        world.tick()
    assert (one.may("runs_per_second", 70), one.may("max_concurrent_runs", 70)) == (1.25, 4)


@given(
    total=st.integers(0, 10_000),
    wanted=st.lists(st.integers(0, 5_000), min_size=1, max_size=20),
)
def test_whole_units_are_divided_fairly_and_completely(total: int, wanted: list[int]) -> None:
    parts = fill(total, wanted)
    assert sum(parts) == min(total, sum(wanted))
    assert all(0 <= part <= want for part, want in zip(parts, wanted, strict=True))
    # Whoever has less than they want has no less than anybody else, but for one odd unit.
    most = max(parts)
    for part, want in zip(parts, wanted, strict=True):
        assert part == want or part >= most - 1


# --- single steps ---------------------------------------------------------------------------


def share(runs: int | None, *, rate: float | None = None, left: int | None = None) -> list[Any]:
    half = None if runs is None else (runs + 1) // 2
    return [rate, runs, None, None if rate is None else rate / 2, half, None, left]


def member(number: int, runs: int | None = None, **said: Any) -> Member:
    plain: dict[str, Any] = {
        "id": number,
        "cell": 1,
        "standing": FRESH,
        "heard": True,
        "shares": {} if runs is None else {"acme": share(runs)},
    }
    return Member(**{**plain, **said})


def runs_of(made: Any, number: int) -> int:
    return made[number].shares["acme"][1]


TEN = {"acme": Ask(frozenset({1}), max_concurrent_runs=10)}


def test_the_first_instance_gets_all_and_half_of_it_is_its_safe_part() -> None:
    assert redivide([member(1)], TEN)[1].shares == {"acme": [None, 10, None, None, 5, None, None]}


def test_of_one_run_at_once_one_is_safe() -> None:
    one = {"acme": Ask(frozenset({1}), max_concurrent_runs=1)}
    assert redivide([member(1)], one)[1].shares == {"acme": [None, 1, None, None, 1, None, None]}


def test_a_process_that_follows_a_crashed_one_has_half_before_the_lease_is_over() -> None:
    later = Standing(fresh=False, running=False, leased=True)
    crashed = member(1, 10, standing=later)
    assert runs_of(redivide([crashed, member(2)], TEN), 2) == 5


def test_a_newcomer_waits_until_the_other_has_said_that_it_applies_less() -> None:
    first = member(1, shares={"acme": share(10)})
    made = redivide([first, member(2)], TEN)
    assert (runs_of(made, 1), runs_of(made, 2)) == (5, 0)
    assert made[1].before == first.shares
    # It is told, and nobody knows whether it heard.
    told = member(1, heard=False, shares=made[1].shares, before=made[1].before)
    waits = member(2, shares=made[2].shares)
    assert redivide([told, waits], TEN) == {}
    heard = member(1, shares=made[1].shares)
    assert runs_of(redivide([heard, waits], TEN), 2) == 5


def test_what_still_runs_is_not_lent_to_another() -> None:
    heard = member(1, 5, in_flight={"acme": 9})
    made = redivide([heard, member(2, 0, demand={"acme": (0, 5)})], TEN)
    assert runs_of(made, 2) == 1


def test_an_instance_that_comes_back_has_no_more_than_the_safe_part() -> None:
    silent = Standing(fresh=False, running=True, leased=True)
    gone = member(1, 6, standing=silent, in_flight={"acme": 3})
    made = redivide([gone, member(2, 4, demand={"acme": (0, 20)})], TEN)
    # It may still run 6, so nobody gets more yet; coming back it has 3.
    assert made[1].shares["acme"] == [None, 3, None, None, 3, None, None]
    assert made[1].before["acme"] == [None, 6, None, None, 3, None, None]
    assert 2 not in made
    later = Standing(fresh=False, running=False, leased=True)
    kept = member(1, heard=False, standing=later, shares=made[1].shares, before=made[1].before)
    assert runs_of(redivide([kept, member(2, 4, demand={"acme": (0, 20)})], TEN), 2) == 7


def test_an_instance_that_comes_back_has_nothing_of_a_tenant_that_left_its_cell() -> None:
    """The tenant may be back before it: by then others have all of the limit."""
    silent = Standing(fresh=False, running=False, leased=True)
    asks = {"acme": Ask(frozenset({2}), max_concurrent_runs=10)}
    # Its safe part, as it was made while the tenant was here.
    gone = member(
        1, standing=silent, heard=False, shares={"acme": [None, 3, None, None, 3, None, None]}
    )
    made = redivide([gone], asks)
    assert made[1].shares == {}
    # It counts until it has heard so.
    both = {"acme": Ask(frozenset({1, 2}), max_concurrent_runs=10)}
    kept = member(1, heard=False, standing=silent, shares={}, before=made[1].before)
    assert runs_of(redivide([kept, member(2, cell=2)], both), 2) == 7
    assert redivide([kept], asks) == {}


def test_an_instance_that_nobody_hears_is_not_told_anew_each_round() -> None:
    silent = Standing(fresh=False, running=False, leased=True)
    made = redivide([member(1, 6, standing=silent)], TEN)
    again = member(1, heard=False, standing=silent, shares=made[1].shares, before=made[1].before)
    assert redivide([again], TEN) == {}


def test_a_limit_that_was_lowered_is_lowered_everywhere_at_once() -> None:
    four = {"acme": Ask(frozenset({1}), max_concurrent_runs=4)}
    made = redivide([member(1, 5), member(2, 5)], four)
    assert (runs_of(made, 1), runs_of(made, 2)) == (2, 2)


def test_a_tenant_that_left_the_cell_or_has_no_limits_has_no_share() -> None:
    made = redivide([member(1, 5)], {})
    assert made[1].shares == {}
    assert made[1].before == {"acme": share(5)}


def test_two_cells_of_a_split_share_one_limit() -> None:
    both = {"acme": Ask(frozenset({1, 2}), max_concurrent_runs=10)}
    made = redivide([member(1), member(2, cell=2), member(3, cell=3)], both)
    assert (runs_of(made, 1), runs_of(made, 2)) == (5, 5)
    assert 3 not in made


def test_who_asks_for_nothing_keeps_a_little_of_a_large_limit() -> None:
    made = redivide([member(1, 5, demand={"acme": (0, 90)}), member(2, 5)], TEN)
    assert runs_of(made, 2) == 1
    ask = {"acme": Ask(frozenset({1}), runs_per_second=10.0)}
    one = member(1, shares={"acme": share(None, rate=5.0)}, demand={"acme": (50 * RATE_UNITS, 0)})
    two = member(2, shares={"acme": share(None, rate=5.0)})
    assert redivide([one, two], ask)[2].shares["acme"][0] == 0.5


def test_a_small_change_of_demand_makes_no_document() -> None:
    ask = {"acme": Ask(frozenset({1}), runs_per_second=10.0)}
    members = [
        member(number, shares={"acme": share(None, rate=5.0)}, demand={"acme": (wanted, 0)})
        for number, wanted in ((1, 5_100_000), (2, 4_900_000))
    ]
    assert redivide(members, ask) == {}


@pytest.mark.parametrize(
    ("before", "left", "said"),
    [(None, 700, 700), (1_000, 995, 1_000), (1_000, 900, 900), (5, 0, 0)],
)
def test_what_is_left_of_a_budget_is_told_when_it_has_changed(
    before: int | None, left: int, said: int
) -> None:
    ask = {"acme": Ask(frozenset({1}), daily_token_budget=1_000, tokens_left=left)}
    had = share(None, left=before)
    one = member(1, shares={} if before is None else {"acme": had})
    made = redivide([one], ask)
    shares = made[1].shares if made else one.shares
    assert shares["acme"] == share(None, left=said)


def test_what_is_left_of_a_budget_is_told_again_after_a_day_though_it_is_the_same() -> None:
    asks = {"acme": Ask(frozenset({1}), daily_token_budget=1_000, tokens_left=995)}
    one = member(1, shares={"acme": [None, None, None, None, None, None, 1_000]}, old=True)
    assert redivide([one], asks)[1].shares["acme"][-1] == 1_000
    # Without a budget nobody counts anything.
    alone = member(1, 10, old=True)
    assert redivide([alone], TEN) == {}


@pytest.mark.parametrize(
    ("seconds", "gone", "expected"),
    [
        (35, None, (True, True, True)),
        (36, None, (False, True, True)),
        (56, None, (False, False, True)),
        (116, None, (False, False, False)),
        (1, "left", (False, False, False)),
        (25, "dead", (False, True, False)),
        (26, "dead", (False, False, False)),
        (25, "replaced", (False, True, False)),
    ],
)
def test_what_an_instance_may_do_ends_with_its_answer_its_lease_and_its_longest_turn(
    seconds: int, gone: str | None, expected: tuple[bool, bool, bool]
) -> None:
    state = standing(
        grants_until=at(30),
        lease_until=at(90),
        longest_turn_seconds=LONGEST,
        gone_at=None if gone is None else at(0),
        gone_why=gone or "",
        now=at(seconds),
    )
    assert (state.fresh, state.running, state.leased) == expected


def test_an_instance_that_was_never_answered_holds_nothing() -> None:
    state = standing(
        grants_until=None,
        lease_until=at(90),
        longest_turn_seconds=LONGEST,
        gone_at=None,
        gone_why="",
        now=at(0),
    )
    assert state == Standing(fresh=False, running=False, leased=False)
