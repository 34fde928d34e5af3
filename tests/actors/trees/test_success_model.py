"""The predictor of success: its formula by hand, what it learns, and the same numbers after a checkpoint."""

import json
import math
from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.trees.branch_rule import Candidate
from flexmarl.actors.trees.predicted import PredictedRule, added_contrast
from flexmarl.actors.trees.success_model import FEATURES, PrefixEnd, SuccessModel, prefix_features
from flexmarl.actors.workflow import Rewards, Turn

PLACES = st.lists(st.integers(0, FEATURES - 1), min_size=1, max_size=9, unique=True).map(tuple)


def test_a_step_is_along_the_gradient_of_the_log_likelihood() -> None:
    model = SuccessModel()
    assert model.predict((3, 7, 9, 20)) == 0.5
    model.learn([PrefixEnd((3, 7, 9, 20), 1.0, 2)])
    # w = 0.5 * (1 - 0.5) / 2 in each place: w . x = 4 * 0.125 / 2.
    assert [model.weights[place] for place in (3, 7, 9, 20, 4)] == [0.125] * 4 + [0.0]
    assert model.predict((3, 7, 9, 20)) == pytest.approx(1 / (1 + math.exp(-0.25)), abs=1e-15)
    assert model.predict((3,)) == pytest.approx(1 / (1 + math.exp(-0.125)), abs=1e-15)


@given(PLACES, st.floats(0.0, 1.0), st.integers(0, 99))
def test_the_step_is_the_derivative_of_the_log_likelihood(
    places: tuple[int, ...], success: float, seed: int
) -> None:
    random = Random(seed)
    weights = [random.gauss(0, 1) for _ in range(FEATURES)]
    model = SuccessModel([*weights, 1.0])
    model.learn([PrefixEnd(places, success, 1)])

    def likelihood(changed: dict[int, float]) -> float:
        score = sum(weights[place] + changed.get(place, 0.0) for place in places) / math.sqrt(len(places))
        return success * score - math.log1p(math.exp(score))

    for place in places:
        slope = (likelihood({place: 1e-5}) - likelihood({place: -1e-5})) / 2e-5
        assert model.weights[place] - weights[place] == pytest.approx(0.5 * slope, abs=1e-8)


def test_it_learns_the_chances_of_prompts_and_forgets_old_ones() -> None:
    model, random = SuccessModel(), Random(0)
    chances = {"near": 0.9, "half way": 0.5, "far off": 0.1}
    features = {prompt: prefix_features({"solver": prompt}, 0) for prompt in chances}

    def learn(turned: bool) -> None:
        for _ in range(300):
            for prompt, chance in chances.items():
                success = float(random.random() < (1 - chance if turned else chance))
                model.learn([PrefixEnd(features[prompt], success, 1)])

    learn(turned=False)
    near, half, far = (model.predict(features[prompt]) for prompt in chances)
    assert near > 0.75 and 0.3 < half < 0.7 and far < 0.25
    learn(turned=True)
    assert model.predict(features["near"]) < 0.25 and model.predict(features["far off"]) > 0.75


def test_a_prediction_stays_within_0_and_1_and_weights_come_back_from_a_checkpoint_to_the_bit() -> None:
    model = SuccessModel([1e4] * FEATURES + [1.0])
    assert model.predict((1, 2)) == 1.0 and SuccessModel([-1e4] * FEATURES + [1.0]).predict((1, 2)) == 0.0
    random = Random(1)
    model = SuccessModel([random.gauss(0, 1) for _ in range(FEATURES)] + [0.7])
    again = SuccessModel(json.loads(json.dumps(model.state)))
    end = PrefixEnd((5, 6), 0.25, 4, 0.3)
    model.learn([end])
    again.learn([end])
    assert again.state == model.state
    with pytest.raises(ValueError, match="3 numbers, needs 1024 weights and a price"):
        SuccessModel([0.0] * 3)


def test_the_price_follows_the_mean_excess_of_a_steps_trees_over_their_budget() -> None:
    model = SuccessModel()
    model.learn([PrefixEnd((1,), 0.0, 6, 0.5), PrefixEnd((2,), 0.0, 2), PrefixEnd((1,), 1.0, 3, -0.25)])
    assert model.price == pytest.approx(math.exp(0.3 * 0.125), abs=1e-15), (
        "a step counts once, however many trees it has"
    )
    model.learn([PrefixEnd((1,), 0.0, 1)])
    assert model.price == pytest.approx(math.exp(0.3 * 0.125), abs=1e-15), "without a budget it stays"
    for excess, bound in ((1e9, 64.0), (-1.0, 1 / 64)):
        for _ in range(40):
            model.learn([PrefixEnd((1,), 0.0, 1, excess)])
        assert model.price == bound


@pytest.mark.parametrize("chances", [(0.5,), (0.05, 0.5), (0.02, 0.2, 0.5, 0.9)])
def test_under_a_budget_the_trees_of_a_step_have_so_many_lines_in_the_mean(
    chances: tuple[float, ...],
) -> None:
    """Trees of one branch point, of prompts with these chances: the surest prompts have the fewest candidates."""
    rule = PredictedRule(width=8, lines=8, gain=0.2, mean_lines=3.0)
    model, random = SuccessModel(), Random(0)
    numbers: list[list[int]] = []
    for _ in range(60):
        # The price is of the whole step: its trees have it as it was before.
        step = [
            rule.candidates([Candidate((), success=chance, price=model.price)], 7)
            for chance in chances
            for _ in range(4)
        ]
        random.shuffle(step)
        model.learn([PrefixEnd((1,), 0.5, lines, rule.excess(lines)) for lines in step])
        numbers.append(step)
    assert fmean(fmean(step) for step in numbers[20:]) == pytest.approx(3.0, rel=0.1)
    widths = [
        rule.candidates([Candidate((), success=chance, price=model.price)], 7)
        for chance in sorted(chances, key=lambda chance: abs(chance - 0.5))
    ]
    assert widths == sorted(widths, reverse=True)


def test_features_are_the_words_the_prompt_and_the_round_of_each_agent() -> None:
    both = prefix_features({"solver": "one two", "judge": "one"}, 2)
    assert len(both) == 6 and [*both] == sorted(both)  # round, two prompts, three words
    assert prefix_features({"judge": "one", "solver": "one two"}, 2) == both, "in any order of agents"
    assert prefix_features({"solver": "one two", "judge": "one"}, 3) != both
    assert prefix_features({"solver": "two one"}, 0) != prefix_features({"solver": "one two"}, 0)
    assert set(prefix_features({"solver": "a " * 500}, 0)) < set(range(FEATURES))


def test_added_contrast_is_the_growth_of_the_chance_of_different_ends() -> None:
    def mixed(chance: float, count: int) -> float:
        return 1 - chance**count - (1 - chance) ** count

    for chance in (0.0, 0.1, 0.5, 0.9, 1.0):
        for count in range(1, 6):
            growth = mixed(chance, count + 1) - mixed(chance, count)
            assert added_contrast(chance, count) == pytest.approx(growth, abs=1e-15)
    assert [added_contrast(0.5, count) for count in (1, 2, 3)] == [0.5, 0.25, 0.125]


@pytest.mark.parametrize(
    ("rewards", "success"),
    [
        (Rewards(solver=0.2, metrics={"accuracy": 1.0}), 1.0),
        (Rewards(solver=5.0, metrics={"accuracy": 0.9}), 0.0),
        (Rewards(solver=0.25, judge=0.75), 0.5),
        (Rewards(solver=7.0), 1.0),
        (Rewards(solver=-7.0), 0.0),
        (Rewards().of_team(0.5), 0.5),
        (
            Rewards().of(Turn("solver", "", (), (1,), "a"), 1.0).of(Turn("solver", "", (), (1,), "b"), 0.0),
            0.5,
        ),
        (Rewards(), 0.0),
    ],
)
def test_the_success_of_a_line(rewards: Rewards, success: float) -> None:
    assert PredictedRule().success_of(rewards) == success
