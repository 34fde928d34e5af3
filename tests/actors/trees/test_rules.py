"""The rules of trees: their formulas by hand, and what every rule keeps to."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from flexmarl.actors.trees.branch_rule import BranchRule, Candidate
from flexmarl.actors.trees.entropy import EntropyRule
from flexmarl.actors.trees.greedy import GreedyRule
from flexmarl.actors.trees.predicted import PredictedRule
from flexmarl.actors.trees.tree_config import TreeConfig

CONFIG: TypeAdapter[BranchRule] = TypeAdapter(TreeConfig)


def drawn(*probabilities: float, past: tuple[float, ...] = (), reward: float = 0.0) -> Candidate:
    return Candidate(tuple(map(math.log, probabilities)), past, reward)


def test_confidence_is_the_geometric_mean_and_surprise_its_logarithm() -> None:
    assert drawn(0.5, 0.125).confidence == pytest.approx(0.25)
    assert drawn(0.5, 0.125).surprise == pytest.approx(math.log(4.0))
    assert (Candidate(()).confidence, Candidate(()).surprise) == (1.0, 0.0)


def test_greedy_keeps_the_best_candidate_and_the_first_of_equal_ones() -> None:
    rule = GreedyRule(width=3)
    assert [rule.candidates([drawn(0.5)] * seen, 0) for seen in range(4)] == [3, 3, 3, 3]
    assert rule.kept([drawn(0.5, reward=reward) for reward in (0.0, 2.0, 1.0)]) == [1]
    assert rule.kept([drawn(0.5, reward=reward) for reward in (-1.0, -1.0)]) == [0]


@pytest.mark.parametrize(
    ("first", "room", "width"),
    [
        (drawn(1.0), 9, 1),  # certain
        (drawn(math.exp(-0.5)), 9, 3),  # 1 + 4 * 0.5
        (drawn(math.exp(-0.5), past=(0.5,)), 9, 2),  # 1 + 4 * 0.5 * 0.5
        (drawn(math.exp(-0.5), past=(1.0, 0.25, 0.75)), 9, 2),  # the last two rounds count: 1 + 4 * 0.5 * 0.5
        (drawn(0.01), 9, 5),  # no more than the width
        (drawn(0.01), 2, 3),  # nor than the tree has room for
        (drawn(0.01), 0, 1),
    ],
)
def test_echos_width_grows_with_surprise_and_shrinks_on_lines_that_were_unsure(
    first: Candidate, room: int, width: int
) -> None:
    rule = EntropyRule(width=5, entropy=1.0, tail=2)
    assert rule.candidates((), room) == 1, "one is drawn to see"
    assert rule.candidates([first], room) == width
    assert rule.candidates([first] * 3, room) == 3, "and no more when they are there"


@pytest.mark.parametrize(
    ("chance", "room", "width"),
    [
        (0.5, 9, 3),  # 0.5 and 0.25 are added, then 0.125
        (0.7, 9, 3),  # 0.42, 0.21, 0.1146
        (0.3, 9, 3),
        (0.8, 9, 2),  # 0.32, 0.16
        (0.9, 9, 1),  # 0.18
        (0.0, 9, 1),
        (1.0, 9, 1),
        (0.5, 1, 2),  # no more than the tree has room for
        (0.5, 0, 1),
    ],
)
def test_traces_width_grows_while_a_candidate_adds_contrast(chance: float, room: int, width: int) -> None:
    rule = PredictedRule(width=5, gain=0.2)
    first = Candidate((), success=chance)
    assert rule.candidates((), room) == 1, "one is drawn"
    assert rule.candidates([first], room) == width
    assert rule.candidates([first] * 3, room) == 3, "and no more when they are there"
    assert PredictedRule(width=2).candidates([Candidate((), success=0.5)], 9) == 2, "nor than the width"
    assert rule.kept([first] * 3) == [0, 1, 2]


def test_traces_threshold_is_the_gain_times_the_price() -> None:
    rule = PredictedRule(width=5, gain=0.2, mean_lines=2.0)
    widths = [rule.candidates([Candidate((), success=0.5, price=price)], 9) for price in (0.5, 1.0, 1.5, 3.0)]
    assert widths == [4, 3, 2, 1], "thresholds of 0.1, 0.2, 0.3 and 0.6"
    assert [rule.excess(lines) for lines in (1, 2, 3)] == [-0.5, 0.0, 0.5]
    assert PredictedRule().excess(3) is None and GreedyRule().excess(3) is None


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"mean_lines": 9}, "mean_lines=9 is not from 1 to lines=8"),
        ({"mean_lines": 0.5}, "mean_lines=0.5 is not from 1 to lines=8"),
        ({"mean_lines": 2, "gain": 0}, "gain=0 has no threshold that mean_lines can raise"),
    ],
)
def test_a_budget_that_no_threshold_can_keep_is_refused(section: dict[str, float], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        CONFIG.validate_python({"branch": "predicted", **section})


def test_echo_cuts_lines_that_stay_unsure_but_one() -> None:
    rule = EntropyRule(least_confidence=0.25, patience=2)
    sure, unsure = drawn(0.5, past=(0.1,)), drawn(0.2, past=(0.9, 0.1))
    begun = drawn(0.01)
    assert rule.kept([unsure, sure, begun]) == [1, 2], "a line of one round has time"
    assert rule.kept([drawn(0.1, past=(0.1,)), drawn(0.2, past=(0.1,))]) == [1], "the surest stays"
    assert EntropyRule(least_confidence=0.0).kept([unsure, sure]) == [0, 1]


candidates = st.builds(
    Candidate,
    st.lists(st.floats(-20, 0), max_size=4).map(tuple),
    st.lists(st.floats(0, 1), max_size=4).map(tuple),
    st.floats(-10, 10),
    st.floats(0, 1),
)
rules: st.SearchStrategy[BranchRule] = st.one_of(
    st.builds(GreedyRule, width=st.integers(1, 6)),
    st.builds(
        EntropyRule, width=st.integers(1, 6), lines=st.integers(1, 9), least_confidence=st.floats(0, 1)
    ),
    st.builds(PredictedRule, width=st.integers(1, 6), lines=st.integers(1, 9), gain=st.floats(0, 1)),
)


@given(rules, st.lists(candidates, min_size=6, max_size=6), st.integers(0, 8))
def test_every_rule_asks_until_it_has_enough_and_keeps_a_line(
    rule: BranchRule, drawn: list[Candidate], room: int
) -> None:
    seen = 0
    for _ in range(3):
        seen = max(seen, rule.candidates(drawn[:seen], room))
        assert 1 <= seen <= rule.width
    assert rule.candidates(drawn[:seen], room) == seen, "and asks no further"
    kept = rule.kept(drawn[:seen])
    assert kept and kept == sorted(set(kept)) and kept[-1] < seen


def test_the_key_branch_chooses_the_rule() -> None:
    assert CONFIG.validate_python({"width": 2}) == GreedyRule(width=2)
    assert CONFIG.validate_python({"branch": "entropy", "lines": 3}) == EntropyRule(lines=3)
    assert CONFIG.validate_python({"branch": "predicted", "gain": 0.1}) == PredictedRule(gain=0.1)
    with pytest.raises(ValidationError, match="greedy.*entropy"):
        CONFIG.validate_python({"branch": "widest"})
