"""The interface of a workflow: its rewards."""

from typing import Any

import numpy as np
import pytest

from flexmarl.actors.errors import InvalidReward
from flexmarl.actors.workflow import Rewards


def test_rewards_become_plain_floats() -> None:
    half: Any = np.float32(0.5)
    one: Any = np.int64(1)
    rewards = Rewards(a=half, b=True, metrics={"accuracy": one}).checked()
    values = [*rewards.by_agent.values(), *rewards.metrics.values()]
    assert values == [0.5, 1.0, 1.0] and {type(value) for value in values} == {float}


@pytest.mark.parametrize("value", [1e13, -1e300, 10**400])
def test_a_reward_that_would_overflow_is_refused(value: float) -> None:
    with pytest.raises(InvalidReward, match="reward of 'a' is .*"):
        Rewards(a=value).checked()
    assert Rewards(a=-1e12, metrics={"m": 1e300}).checked().by_agent == {"a": -1e12}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "1", 1j, np.float32("nan")])
def test_no_finite_number_is_no_reward(value: float) -> None:
    with pytest.raises(InvalidReward, match="reward of 'a' is .*: it must be a finite number"):
        Rewards(a=value).checked()
    with pytest.raises(InvalidReward, match="metric 'm' is"):
        Rewards(metrics={"m": value}).checked()
