"""The interface of a workflow: its rewards."""

import math
from typing import Any

import numpy as np
import pytest

from flexmarl.actors.errors import InvalidReward
from flexmarl.actors.workflow import Rewards, Turn


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


@pytest.mark.parametrize("name", ["a\ud83d", 3])
def test_the_name_of_a_metric_that_can_not_be_sent_is_refused(name: Any) -> None:
    with pytest.raises(InvalidReward) as refused:
        Rewards(metrics={name: 1.0}).checked()
    assert f"metric {name!r}: a name is a string" in str(refused.value)


def made(name: str, agent: str = "a") -> Turn:
    return Turn(agent, "x", (), (), name)


def test_a_turn_has_a_reward_of_its_own_and_several_add_up() -> None:
    one, two = made("1:q_0_0"), made("1:q_1_0")
    rewards = Rewards(a=1.0).of(one, 0.25).of(two, 1).of(one, 0.5).of_team(2.0).of_team(0.5).checked()
    assert rewards.turns == [(one, 0.75), (two, 1.0)]
    assert rewards.by_agent == {"a": 1.0} and rewards.team == 2.5
    assert Rewards(a=1.0).checked().team is None


@pytest.mark.parametrize("name", ["self", "team", "of", "turns", "by_agent"])
def test_an_agent_may_have_any_name_but_metrics(name: str) -> None:
    assert Rewards(metrics={}, **{name: 1.0}).of_team(0.5).checked().by_agent == {name: 1.0}


def test_a_reward_of_a_turn_that_is_no_finite_number_names_the_turn_and_the_agent() -> None:
    with pytest.raises(InvalidReward, match="reward of turn 1:q_0_0 of 'a' is nan: it must be a finite"):
        Rewards().of(made("1:q_0_0"), float("nan")).checked()
    with pytest.raises(InvalidReward, match="reward of turn 1:q_0_0 of 'a' is 2e\\+12: beyond 1e\\+12"):
        Rewards().of(made("1:q_0_0"), 1e12).of(made("1:q_0_0"), 1e12).checked()
    with pytest.raises(InvalidReward, match="reward of the team is inf"):
        Rewards().of_team(math.inf)
    not_a_turn: Any = "text"
    with pytest.raises(InvalidReward, match="wants a Turn that generate has returned, not 'text'"):
        Rewards().of(not_a_turn, 1.0)


def test_rewards_are_read_once() -> None:
    rewards = Rewards(a=1.0)
    rewards.close()
    with pytest.raises(InvalidReward, match="turn 1:q_0_0 of agent 'a': the workflow has returned"):
        rewards.of(made("1:q_0_0"), 1.0)
    with pytest.raises(InvalidReward, match="of the team: the workflow has returned"):
        rewards.of_team(1.0)
