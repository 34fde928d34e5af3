"""The rewards of trees by hand: means over lines, and cut lines."""

from collections.abc import Mapping
from typing import Any

import pytest

from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.environments.tree_play import LineEnd, TreeEnd
from flexmarl.actors.errors import RecipeError
from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.actors.rollout.rollout_config import SamplingConfig
from flexmarl.actors.rollout.rollout_setup import RolloutAgent
from flexmarl.actors.rollout.trajectory_rewards import EndedTurn, TrajectoryRewards
from flexmarl.actors.rollout.tree_rewards import tree_rewards
from flexmarl.actors.workflow import Rewards, Turn

SOLVER = AgentName("solver")
TURNS = [EndedTurn(SOLVER, name, 4) for name in ("root", "left", "right", "cut")]


def turn(name: str) -> Turn:
    return Turn("solver", "", (), (), name)


def line(rewards: Rewards, *names: str, was_cut: bool = False) -> LineEnd:
    return LineEnd(rewards, frozenset(names), was_cut)


def rewarded(uses: str, *ends: LineEnd, punish: bool = False, **options: Any) -> TrajectoryRewards:
    sampling = SamplingConfig(max_new_tokens=4, overlong_buffer=2)
    agents: Mapping[AgentName, RolloutAgent] = {
        SOLVER: RolloutAgent(PolicyName("solver"), sampling, CreditConfig(name="at_grpo", rewards=uses))
    }
    tree = TreeEnd(ends, {}, 1, sum(end.was_cut for end in ends))
    return tree_rewards("1:q_0", tree, TURNS, agents, punish=punish, **options)


def test_a_shared_turn_has_the_mean_of_its_lines() -> None:
    lines = (
        line(Rewards(solver=1.0, metrics={"accuracy": 1.0}), "root", "left"),
        line(Rewards(solver=0.0, metrics={"accuracy": 0.0, "length": 3.0}), "root", "right"),
    )
    rewards = rewarded("trajectory", *lines, left_out={"cut"})
    assert rewards.used.by_sample == {"root": 0.5, "left": 1.0, "right": 0.0}
    assert rewards.used.by_agent == {"solver": 0.5} and rewards.metrics == {"accuracy": 0.5, "length": 3.0}
    assert rewards.before_punishment == rewards.used and rewards.of_turns == {}


def test_a_turn_that_was_cut_has_its_own_reward_and_changes_no_others() -> None:
    whole = Rewards(metrics={"accuracy": 1.0}).of(turn("root"), 2.0).of(turn("left"), 1.0)
    cut = Rewards(metrics={"accuracy": 0.0}).of(turn("root"), 2.0).of(turn("cut"), -1.0)
    rewards = rewarded("turn", line(whole, "root", "left"), line(cut, "root", "cut", was_cut=True))
    assert rewards.used.by_sample == {"root": 2.0, "left": 1.0, "cut": -1.0}
    assert rewards.metrics == {"accuracy": 1.0} and rewards.of_turns == {"solver": [2.0, 1.0, -1.0]}


def test_too_long_turns_are_punished_within_their_lines() -> None:
    lines = (line(Rewards(solver=1.0), "root", "left"), line(Rewards(solver=0.0), "root", "right"))
    rewards = rewarded("trajectory", *lines, punish=True)
    assert rewards.used.by_sample["root"] == pytest.approx(0.5 - 1.0)
    assert rewards.before_punishment.by_sample["root"] == 0.5


def test_a_line_without_a_reward_for_its_agent_ends_the_run() -> None:
    with pytest.raises(RecipeError, match="returned no reward for it"):
        rewarded("trajectory", line(Rewards(solver=1.0), "root", "left"), line(Rewards(), "root", "right"))
