"""The games of a group's trajectories against past versions: one a trajectory, however many agents play."""

from types import SimpleNamespace
from typing import Any

from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.actors.rollout.groups.group_run import _games
from flexmarl.actors.rollout.rollout_setup import RolloutAgent, sides_of
from flexmarl.actors.rollout.trajectory_rewards import Amounts, TrajectoryRewards

A, B, LEFT, RIGHT = map(AgentName, ("a", "b", "left", "right"))
RIVAL, LEARNER = PolicyName("rival"), PolicyName("learner")


def trajectory(**rewards: float) -> Any:
    before_punishment = Amounts({AgentName(agent): value for agent, value in rewards.items()})
    return SimpleNamespace(rewards=TrajectoryRewards(before_punishment=before_punishment))


def test_two_agents_of_a_pool_are_one_side() -> None:
    agents = {
        A: RolloutAgent(LEARNER),
        LEFT: RolloutAgent(RIVAL, against=(A,)),
        RIGHT: RolloutAgent(RIVAL, against=(A,)),
    }
    assert sides_of(agents) == {RIVAL: ([A], [LEFT, RIGHT])}


def test_a_trajectory_is_one_game_if_both_sides_have_a_reward() -> None:
    members = [trajectory(a=1.0, left=0.0, right=2.0), trajectory(a=1.0, b=0.0), trajectory(b=0.5, left=-1.0)]
    assert _games(members, (A, B), (LEFT, RIGHT)) == [(1.0, 1.0), (0.5, -1.0)]
