"""The reward of each sample, from the rewards of agents, turns and the team."""

from typing import Any

import pytest

from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.errors import InvalidReward, RecipeError
from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.actors.rollout.rollout_config import SamplingConfig
from flexmarl.actors.rollout.rollout_setup import RolloutAgent
from flexmarl.actors.rollout.trajectory_rewards import EndedTurn, TrajectoryRewards, trajectory_rewards
from flexmarl.actors.workflow import Rewards, Turn

SOLVER, JUDGE = AgentName("solver"), AgentName("judge")
TURNS = [
    EndedTurn(SOLVER, "1:q_0_0", 2),
    EndedTurn(SOLVER, "1:q_1_0", 4),
    EndedTurn(JUDGE, "1:q_2_0", 1),
]


def turn(number: int, agent: str = "solver") -> Turn:
    return Turn(agent, "x", (), (), f"1:q_{number}_0")


def found(
    returned: object, *, punish: bool = False, sampling: SamplingConfig | None = None, **credit: Any
) -> TrajectoryRewards:
    agents = {
        SOLVER: RolloutAgent(PolicyName("solver"), sampling or SamplingConfig(), CreditConfig(**credit)),
        JUDGE: RolloutAgent(PolicyName("judge")),
        AgentName("silent"): RolloutAgent(PolicyName("judge")),
    }
    return trajectory_rewards("1:q_0", returned, TURNS, agents, punish=punish)


def of_solver(rewards: TrajectoryRewards) -> list[float]:
    return [rewards.used.by_sample[name] for name in ("1:q_0_0", "1:q_1_0")]


@pytest.mark.parametrize(
    ("use", "expected"),
    [("both", [1.25, 3.0]), ("turn", [0.25, 2.0]), ("trajectory", [1.0, 1.0])],
)
def test_the_config_chooses_the_reward_of_a_sample(use: str, expected: list[float]) -> None:
    rewards = found(Rewards(solver=1.0, judge=0.5).of(turn(0), 0.25).of(turn(1), 2.0), rewards=use)
    assert of_solver(rewards) == expected
    assert rewards.used.by_sample["1:q_2_0"] == 0.5
    assert rewards.used.by_agent == {"solver": 1.0, "judge": 0.5}, "reports have the trajectory's"
    assert rewards.of_turns == {"solver": [0.25, 2.0]}


def test_the_teams_reward_is_weighed_by_agent_and_goes_to_those_that_took_part() -> None:
    rewards = found(Rewards(solver=1.0).of_team(2.0).of(turn(0), 0.25), rewards="both", team_weight=0.5)
    assert of_solver(rewards) == [2.25, 2.0], "alpha r_team + r_local"
    assert rewards.used.by_agent == {"solver": 2.0, "judge": 2.0}, "the silent one has none"


def test_a_turns_reward_is_enough_for_its_agent() -> None:
    rewards = found(Rewards(judge=1.0).of(turn(1), 2.0), rewards="both")
    assert of_solver(rewards) == [0.0, 2.0] and rewards.used.by_agent == {"judge": 1.0}


def test_a_turns_reward_that_is_ignored_is_not_enough_for_its_agent() -> None:
    with pytest.raises(
        RecipeError, match=r"agent 'solver' .*no reward.*algorithm.rewards=trajectory ignores"
    ):
        found(Rewards(judge=1.0).of(turn(1), 2.0), rewards="trajectory")


def test_length_lowers_rewards_of_turns_alone_too() -> None:
    sampling = SamplingConfig(max_new_tokens=4, overlong_buffer=2)
    rewards = found(Rewards(judge=1.0).of(turn(0), 0.5), punish=True, rewards="both", sampling=sampling)
    assert of_solver(rewards) == [-0.5, -1.0] and rewards.before_punishment.by_sample["1:q_0_0"] == 0.5


def test_an_agent_without_any_reward_ends_the_run() -> None:
    with pytest.raises(RecipeError, match="used agent 'judge' and returned no reward for it"):
        found(Rewards(solver=1.0))
    with pytest.raises(RecipeError, match="returned dict, not Rewards"):
        found({"solver": 1.0})


def test_a_turns_reward_that_the_algorithm_does_not_use_ends_the_run_and_names_the_key() -> None:
    with pytest.raises(
        RecipeError, match=r"agent 'judge' a reward.*agents\.judge\.algorithm\.rewards to both"
    ):
        found(Rewards(solver=1.0, judge=1.0).of(turn(2, "judge"), 0.5))


@pytest.mark.parametrize(
    ("turn", "problem"),
    [
        (turn(7), r"agent 'solver': turn 1:q_7_0 has the reward 0.5, and is not of trajectory 1:q_0"),
        (Turn("solver", "x", (), ()), "agent 'solver': a turn that was not generated has the reward 0.5"),
    ],
)
def test_a_turn_that_is_not_of_the_trajectory_is_refused(turn: Turn, problem: str) -> None:
    with pytest.raises(InvalidReward, match=problem):
        found(Rewards(solver=1.0, judge=1.0).of(turn, 0.5), rewards="both")


def test_length_lowers_the_reward_that_is_used_and_not_the_given() -> None:
    sampling = SamplingConfig(max_new_tokens=4, overlong_buffer=2)
    rewards = Rewards(solver=1.0, judge=1.0).of(turn(0), 0.5)
    both = found(rewards, punish=True, rewards="both", sampling=sampling)
    assert of_solver(both) == [0.5, 0.0], "the agent pays for its longest turn, in all of its turns"
    assert [*both.before_punishment.by_sample.values()] == [1.5, 1.0, 1.0]
    alone = found(rewards, punish=True, rewards="turn", sampling=sampling)
    assert of_solver(alone) == [0.5, -1.0], "each turn pays for its own"
