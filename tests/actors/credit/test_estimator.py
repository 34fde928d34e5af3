"""Every estimator that an algorithm names, against its test vectors and what all of them promise."""

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.credit.algorithms import ALGORITHMS
from flexmarl.actors.credit.estimator import STD_EPSILON, Estimator, Vector, standard_deviation
from flexmarl.actors.credit.group_mean import GroupMean
from flexmarl.actors.credit.leave_one_out import LeaveOneOut

ESTIMATORS = sorted({row.estimator for row in ALGORITHMS.values()}, key=lambda kind: kind.__name__)
VECTORS = [(kind, vector) for kind in ESTIMATORS for vector in kind.vectors]
BOTH = [kind(scale) for kind in ESTIMATORS for scale in (False, True)]

rewards = st.floats(-1e3, 1e3)
groups = st.lists(rewards, min_size=2, max_size=16)


@pytest.mark.parametrize(("kind", "vector"), VECTORS, ids=str)
def test_its_vectors(kind: type[Estimator], vector: Vector) -> None:
    found = kind(vector.scale)(vector.rewards)
    assert found == pytest.approx(vector.advantages, rel=1e-9, abs=0.0)
    assert [a == 0.0 for a in found] == [a == 0.0 for a in vector.advantages], "nothing is exactly nothing"


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_it_names_its_paper_and_has_vectors(kind: type[Estimator]) -> None:
    assert kind.__doc__ and ("arXiv" in kind.__doc__ or "Williams" in kind.__doc__)
    assert len(kind.vectors) > 1


@pytest.mark.parametrize("estimator", BOTH, ids=repr)
@given(group=groups, shuffle=st.randoms(use_true_random=False))
def test_the_order_of_the_group_does_not_matter_to_the_last_bit(
    estimator: Estimator, group: list[float], shuffle: random.Random
) -> None:
    order = shuffle.sample(range(len(group)), len(group))
    shuffled = estimator([group[place] for place in order])
    found = estimator(group)
    assert shuffled == [found[place] for place in order]


@pytest.mark.parametrize("estimator", [each for each in BOTH if each.compares], ids=repr)
@given(reward=rewards, size=st.integers(1, 20))
def test_one_that_compares_learns_exactly_nothing_from_equal_rewards_and_from_one(
    estimator: Estimator, reward: float, size: int
) -> None:
    assert estimator([reward] * size) == [0.0] * size


@pytest.mark.parametrize("estimator", [each for each in BOTH if each.compares], ids=repr)
@given(group=groups)
def test_one_that_compares_learns_something_from_all_others(estimator: Estimator, group: list[float]) -> None:
    """The filter ``equal_rewards`` leaves a group out only if its rewards are equal."""
    assert any(estimator(group)) == (len(set(group)) > 1)


@pytest.mark.parametrize("estimator", BOTH, ids=repr)
@pytest.mark.parametrize("group", [(math.inf, 0.0), (math.nan, 0.0), (math.nan,)])
def test_a_reward_that_is_not_finite_is_refused(estimator: Estimator, group: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="reward"):
        estimator(group)


# --------------------------------------------------------------------------- the formulas


@given(groups)
def test_the_group_mean_is_the_centred_or_standardised_reward_of_the_papers(group: list[float]) -> None:
    mean, spread = statistics.fmean(group), statistics.stdev(group)
    centred, scaled = GroupMean()(group), GroupMean(scale=True)(group)
    for reward, plain, divided in zip(group, centred, scaled, strict=True):
        assert math.isclose(plain, reward - mean, rel_tol=1e-9, abs_tol=1e-9)
        assert math.isclose(divided, (reward - mean) / (spread + STD_EPSILON), rel_tol=1e-9, abs_tol=1e-8)


def test_the_standard_deviation_is_the_sample_one() -> None:
    assert standard_deviation((0.25,)) == 0.0
    assert standard_deviation((1.0, 0.0, 1.0, 0.0)) == pytest.approx(0.5 * math.sqrt(4 / 3), rel=1e-12)


def test_rounding_differences_stay_small() -> None:
    group = (0.1 + 0.2, 0.3)
    assert group[0] != group[1]
    assert max(map(abs, GroupMean(scale=True)(group))) < 1e-11


@given(groups)
def test_leaving_one_out_is_the_reward_less_the_mean_of_the_others(group: list[float]) -> None:
    for n, (reward, found) in enumerate(zip(group, LeaveOneOut()(group), strict=True)):
        expected = reward - statistics.fmean(group[:n] + group[n + 1 :])
        assert math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-8)
