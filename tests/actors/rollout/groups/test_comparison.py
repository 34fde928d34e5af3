"""The rewards that are compared, in a group of uneven trajectories."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.errors import StoreError
from flexmarl.actors.messages import Grouping, Sample
from flexmarl.actors.names import AgentName
from flexmarl.actors.rollout.groups.comparison import grouped

SOLVER, CHECKER = AgentName("solver"), AgentName("checker")


def turn(agent: str, number: int, trajectory: int, reward: float) -> Sample:
    name = f"1:q_0_{number}_{trajectory}"
    return Sample(name, agent, 1, 0, "1:q_0", reward, (reward, -1.0), (1,), (2,), (-1.0,))


# Trajectory 0: solver, checker, solver. Trajectory 1: solver, checker. Trajectory 2: checker, solver.
TURNS = [
    turn("solver", 0, 0, 1.0),
    turn("checker", 1, 0, 0.1),
    turn("solver", 2, 0, 1.0),
    turn("solver", 0, 1, 2.0),
    turn("checker", 1, 1, 0.2),
    turn("checker", 0, 2, 0.3),
    turn("solver", 1, 2, 3.0),
]


def rewards(samples: list[Sample]) -> dict[tuple[str, str], list[float]]:
    return {(s.sample_id, s.agent): sorted(s.group_rewards) for s in samples}


def test_turns_are_compared_with_the_same_turn_of_the_same_agent() -> None:
    assert rewards(grouped(TURNS, {SOLVER: "turn", CHECKER: "turn"})) == {
        ("1:q_0_0_0", "solver"): [1.0, 2.0, 3.0],
        ("1:q_0_2_0", "solver"): [1.0],  # no other trajectory came so far
        ("1:q_0_0_1", "solver"): [1.0, 2.0, 3.0],
        ("1:q_0_1_2", "solver"): [1.0, 2.0, 3.0],  # its first turn, although the trajectory's second
        ("1:q_0_1_0", "checker"): [0.1, 0.2, 0.3],
        ("1:q_0_1_1", "checker"): [0.1, 0.2, 0.3],
        ("1:q_0_0_2", "checker"): [0.1, 0.2, 0.3],
    }


def test_an_agents_turns_are_compared_with_all_its_turns_and_each_agent_has_its_own_way() -> None:
    found = rewards(grouped(TURNS, {SOLVER: "agent_turns", CHECKER: "trajectory"}))
    assert found["1:q_0_0_0", "solver"] == found["1:q_0_2_0", "solver"] == [1.0, 1.0, 2.0, 3.0]
    assert found["1:q_0_1_1", "checker"] == [-1.0, 0.2], "as the trajectories have it"


def test_trajectories_stay_as_they_are() -> None:
    assert grouped(TURNS, {SOLVER: "trajectory"}) == TURNS


@given(st.randoms(use_true_random=False), st.sampled_from(["turn", "agent_turns"]))
def test_the_order_of_arrival_does_not_matter(shuffle: random.Random, grouping: Grouping) -> None:
    mixed = shuffle.sample(TURNS, len(TURNS))
    found = grouped(mixed, {SOLVER: grouping})
    assert [s.sample_id for s in found] == [s.sample_id for s in mixed]
    assert rewards(found) == rewards(grouped(TURNS, {SOLVER: grouping}))


def test_a_name_without_turn_and_trajectory_is_refused() -> None:
    odd = Sample("1:q_0", "solver", 1, 0, "q", 1.0, (1.0,), (1,), (2,), (-1.0,))
    with pytest.raises(StoreError, match="is not a sample id"):
        grouped([odd], {SOLVER: "turn"})
