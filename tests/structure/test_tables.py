"""The tables of every durable machine are sound, and whoever reads them agrees with them."""

from __future__ import annotations

import itertools

import pytest

from migrations_app.domain.phases import (
    ENDED,
    FENCED,
    NO_RETURN,
    PROMPT,
    REVERSED,
    STEPPER,
    STEPPER_BACK,
    TABLE,
    UNPAUSABLE,
    WAY_OUT,
    Mode,
    Phase,
    onward,
)


def _reachable(start: Phase) -> set[Phase]:
    seen, front = {start}, [start]
    while front:
        new = TABLE[front.pop()] - seen
        seen |= new
        front.extend(new)
    return seen


def test_each_phase_is_in_the_table() -> None:
    assert set(TABLE) == set(Phase)


def test_each_phase_can_be_reached_from_the_first() -> None:
    assert _reachable(Phase.PREPARE) == set(Phase)


@pytest.mark.parametrize("phase", Phase)
def test_an_end_can_be_reached_from_each_phase(phase: Phase) -> None:
    assert _reachable(phase) & ENDED


def test_no_phase_leads_to_itself() -> None:
    assert not [phase for phase, edges in TABLE.items() if phase in edges]


@pytest.mark.parametrize("mode", Mode)
def test_each_way_out_is_a_legal_edge(mode: Mode) -> None:
    assert not [(was, to) for was, to in WAY_OUT[mode].items() if to not in TABLE[was]]


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("point", sorted(NO_RETURN))
def test_no_abort_leads_back_over_a_point_of_no_return(mode: Mode, point: Phase) -> None:
    """Behind TARGET only the way back can be stopped, and that ends behind TARGET again."""
    behind = _reachable(point)
    assert {to for was, to in WAY_OUT[mode].items() if was in behind} <= behind - {point}


@pytest.mark.parametrize("phase", sorted(NO_RETURN))
def test_a_point_of_no_return_leads_one_way(phase: Phase) -> None:
    assert len(TABLE[phase]) == 1


@pytest.mark.parametrize("mode", Mode)
def test_each_fenced_phase_before_the_point_of_no_return_has_a_way_out(mode: Mode) -> None:
    assert set(WAY_OUT[mode]) >= (FENCED & _passed(mode)) - NO_RETURN


def _passed(mode: Mode) -> set[Phase]:
    """Return what a move of this mode passes when all goes well, there and on the way back."""
    found = set()
    for phase in (Phase.PREPARE, Phase.REVERSE_DRAIN):
        while phase not in ENDED:
            found.add(phase)
            phase = onward(mode, phase)
    return found


@pytest.mark.parametrize("mode", Mode)
def test_the_modes_own_way_is_in_the_table(mode: Mode) -> None:
    assert all(onward(mode, phase) in TABLE[phase] for phase in _passed(mode))


def test_a_move_of_the_cell_alone_passes_what_it_needs_and_no_more() -> None:
    there = ["drain", "prepare", "reverse_drain", "reverse_target", "soak", "target"]
    assert sorted(_passed(Mode.CELL)) == there


def test_fenced_phases_run_on_the_prompt_queue() -> None:
    assert FENCED <= PROMPT


def test_points_of_no_return_and_ways_out_cannot_be_paused() -> None:
    """SOAK and SPLIT can: what a stopped fence owes there is done all the same (tests/faults)."""
    ways = {to for outs in WAY_OUT.values() for to in outs.values()} - {Phase.SOAK, Phase.SPLIT}
    assert NO_RETURN | ways <= UNPAUSABLE


def test_the_way_back_runs_through_the_reversed_phases_to_its_own_end() -> None:
    assert all(to in TABLE[was] for was, to in itertools.pairwise(STEPPER_BACK))
    assert {Phase.SOAK, *REVERSED, Phase.ROLLED_BACK} == set(STEPPER_BACK)


def test_each_phase_has_a_step_or_is_an_end() -> None:
    from migrations_app.steps import STEPS

    assert set(STEPS) == set(Phase) - ENDED


def test_the_stepper_shows_the_seven_of_the_article_in_order() -> None:
    names = [phase.name for phase in STEPPER]
    assert names == ["PREPARE", "BACKFILL", "DRAIN", "DELTA", "VERIFY", "TARGET", "SOAK"]


def test_each_phase_is_on_the_stepper_or_on_a_way_to_an_end() -> None:
    after_the_last = _reachable(STEPPER[-1]) - {STEPPER[-1]}
    ways_out = set().union(*(_reachable(to) for outs in WAY_OUT.values() for to in outs.values()))
    assert set(Phase) == set(STEPPER) | after_the_last | ways_out


def test_the_stepper_follows_the_table() -> None:
    steps = itertools.pairwise(STEPPER)
    assert all(to in TABLE[was] for was, to in steps)
