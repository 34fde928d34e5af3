"""The rewards that are compared and the advantages that this gives, in a group of uneven trajectories."""

import random
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.errors import StoreError
from flexmarl.actors.messages import Sample
from flexmarl.actors.names import AgentName
from flexmarl.actors.rollout.groups.credit_assignment import assign_credit
from flexmarl.actors.trees.branch_rule import TreePlace

SOLVER, CHECKER = AgentName("solver"), AgentName("checker")
CENTRED = {
    "trajectory": CreditConfig(name="dr_grpo"),
    "agent_turns": CreditConfig(name="dr_mas", scale_rewards=False),
    "turn": CreditConfig(name="at_grpo", scale_rewards=False),
}


def turn(agent: str, number: int, trajectory: int, reward: float) -> Sample:
    return Sample(f"1:q_{number}_{trajectory}", agent, 1, 0, "1:q", reward, 0.0, (1,), (2,), (-1.0,))


# Trajectory 0: solver, checker, solver. Trajectory 1: solver, checker. Trajectory 2: checker, solver.
TURNS = [
    turn("solver", 0, 0, 1.0),
    turn("checker", 1, 0, 0.25),
    turn("solver", 2, 0, 1.0),
    turn("solver", 0, 1, 2.0),
    turn("checker", 1, 1, 0.5),
    turn("checker", 0, 2, 0.75),
    turn("solver", 1, 2, 3.0),
]
# Trajectory 3 has a reward and no turn.
REWARDS = {SOLVER: {0: 1.0, 1: 2.0, 2: 3.0, 3: 10.0}, CHECKER: {0: 0.25, 1: 0.5, 2: 0.75, 3: 0.5}}


def closed(turns: list[Sample], credit: Mapping[AgentName, CreditConfig]) -> dict[str, tuple[float, int]]:
    """Advantage and size of the group, by sample."""
    return {s.sample_id: (s.advantage, s.group_size) for s in assign_credit(turns, credit, REWARDS)}


def test_turns_are_compared_with_the_same_turn_of_the_same_agent() -> None:
    assert closed(TURNS, {SOLVER: CENTRED["turn"], CHECKER: CENTRED["turn"]}) == {
        "1:q_0_0": (-1.0, 3),
        "1:q_2_0": (0.0, 1),  # no other trajectory came so far
        "1:q_0_1": (0.0, 3),
        "1:q_1_2": (1.0, 3),  # its first turn, although the trajectory's second
        "1:q_1_0": (-0.25, 3),
        "1:q_1_1": (0.0, 3),
        "1:q_0_2": (0.25, 3),
    }


@pytest.mark.parametrize("grouping", CENTRED)
def test_in_a_tree_the_candidates_of_a_prompt_are_compared_whatever_the_grouping(grouping: str) -> None:
    """Trajectory 0 branches in two at its second turn, and both lines have a third one. Trajectory 1 has no branch."""
    turns = [
        turn("solver", 0, 0, 1.0),
        turn("solver", 1, 0, 4.0),
        turn("solver", 2, 0, 2.0),
        turn("solver", 3, 0, 8.0),
        turn("solver", 4, 0, 6.0),
        turn("solver", 0, 1, 3.0),
        turn("solver", 1, 1, 5.0),
    ]
    places = {
        "1:q_0_0": TreePlace(-1, 0),
        "1:q_1_0": TreePlace(0, 0),
        "1:q_2_0": TreePlace(0, 0),
        "1:q_3_0": TreePlace(0, 1),
        "1:q_4_0": TreePlace(0, 1),
        "1:q_0_1": TreePlace(-1, 0),
        "1:q_1_1": TreePlace(-1, 1),
    }
    credited = assign_credit(turns, {SOLVER: CENTRED[grouping]}, {SOLVER: {0: 1.0, 1: 3.0}}, places)
    assert [(sample.advantage, sample.group_size) for sample in credited] == [
        (-1.0, 2),  # before the branch point: with the other trajectory's first turn
        (1.0, 2),
        (-1.0, 2),
        (1.0, 2),
        (-1.0, 2),
        (1.0, 2),
        (0.0, 1),
    ]


def test_an_agents_turns_are_compared_with_all_its_turns_and_each_agent_has_its_own_way() -> None:
    found = closed(TURNS, {SOLVER: CENTRED["agent_turns"], CHECKER: CreditConfig(name="ppo")})
    assert found["1:q_0_0"] == found["1:q_2_0"] == (-0.75, 4)
    assert found["1:q_1_2"] == (1.25, 4)
    assert found["1:q_1_1"] == (0.5, 3), "as it is"


def test_trajectories_are_compared_also_with_those_in_which_the_agent_has_no_turn() -> None:
    found = closed(TURNS, {SOLVER: CENTRED["trajectory"], CHECKER: CreditConfig(name="rloo")})
    assert found["1:q_0_0"] == found["1:q_2_0"] == (-3.0, 4)
    assert found["1:q_1_2"] == (-1.0, 4)
    assert found["1:q_1_0"] == ((4 * 0.25 - 2.0) / 3, 4)


@given(st.randoms(use_true_random=False), st.sampled_from(sorted(CENTRED)))
def test_the_order_of_arrival_does_not_matter(shuffle: random.Random, grouping: str) -> None:
    mixed = shuffle.sample(TURNS, len(TURNS))
    credit = dict.fromkeys((SOLVER, CHECKER), CENTRED[grouping])
    assert [*closed(mixed, credit)] == [sample.sample_id for sample in mixed]
    assert closed(mixed, credit) == closed(TURNS, credit)


def test_a_name_without_turn_and_trajectory_is_refused() -> None:
    odd = Sample("1:q_0", "solver", 1, 0, "q", 1.0, 0.0, (1,), (2,), (-1.0,))
    with pytest.raises(StoreError, match="is not a sample id"):
        assign_credit([odd], {SOLVER: CENTRED["turn"]}, {})
