import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.group_advantage import (
    STD_EPSILON,
    advantage_by,
    group_advantage,
    leave_one_out_advantage,
)

rewards = st.floats(-1e3, 1e3)
groups = st.lists(rewards, min_size=2, max_size=16)


@given(groups)
def test_is_the_standardised_reward_of_the_paper(group: list[float]) -> None:
    spread = statistics.stdev(group)
    for reward in group:
        expected = (reward - statistics.fmean(group)) / (spread + STD_EPSILON)
        found = group_advantage(reward, tuple(group), scale=True)
        assert math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-8)


def test_the_standard_deviation_is_the_sample_one() -> None:
    # mean 0.5, deviations 0.5: population 0.5, sample 0.5 * sqrt(4 / 3)
    expected = 0.5 / (0.5 * math.sqrt(4 / 3) + 1e-4)
    assert group_advantage(1.0, (1.0, 0.0, 1.0, 0.0), scale=True) == pytest.approx(expected, rel=1e-12)


@given(groups)
def test_unscaled_is_the_centred_reward(group: list[float]) -> None:
    for reward in group:
        found = group_advantage(reward, tuple(group), scale=False)
        assert math.isclose(found, reward - statistics.fmean(group), rel_tol=1e-9, abs_tol=1e-9)


@given(groups, st.randoms(use_true_random=False), st.booleans())
def test_the_order_of_the_group_does_not_matter_to_the_last_bit(
    group: list[float], shuffle: random.Random, scale: bool
) -> None:
    shuffled = tuple(shuffle.sample(group, len(group)))
    for reward in group:
        found = group_advantage(reward, tuple(group), scale=scale)
        assert found == group_advantage(reward, shuffled, scale=scale)


@given(rewards, st.integers(1, 20), st.booleans())
def test_equal_rewards_and_groups_of_one_teach_exactly_nothing(reward: float, size: int, scale: bool) -> None:
    assert group_advantage(reward, (reward,) * size, scale=scale) == 0.0


def test_rounding_differences_stay_small() -> None:
    group = (0.1 + 0.2, 0.3)
    assert group[0] != group[1]
    assert abs(group_advantage(group[0], group, scale=True)) < 1e-11


@pytest.mark.parametrize(
    ("reward", "group"), [(1.0, (0.0, 0.5)), (math.inf, (math.inf, 0.0)), (0.0, (math.nan, 0.0)), (0.0, ())]
)
def test_impossible_groups_are_refused(reward: float, group: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="reward"):
        group_advantage(reward, group, scale=True)
    with pytest.raises(ValueError, match="reward"):
        leave_one_out_advantage(reward, group)


# --------------------------------------------------------------------------- leaving one out


@given(groups)
def test_rloo_is_the_reward_less_the_mean_of_the_others(group: list[float]) -> None:
    for n, reward in enumerate(group):
        expected = reward - statistics.fmean(group[:n] + group[n + 1 :])
        found = leave_one_out_advantage(reward, tuple(group))
        assert math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-8)


@given(rewards, st.integers(1, 20))
def test_rloo_learns_nothing_from_equal_rewards_or_one(reward: float, size: int) -> None:
    assert leave_one_out_advantage(reward, (reward,) * size) == 0.0


def test_a_rule_names_each_of_them() -> None:
    group = (1.0, 0.0, 0.5)
    assert advantage_by("scaled", 1.0, group) == group_advantage(1.0, group, scale=True)
    assert advantage_by("centred", 1.0, group) == group_advantage(1.0, group, scale=False)
    assert advantage_by("leave_one_out", 1.0, group) == leave_one_out_advantage(1.0, group)
