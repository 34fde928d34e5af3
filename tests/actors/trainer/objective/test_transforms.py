"""The list of a policy's transforms: its order, and the waiting for a whole batch that follows from it."""

from typing import Any

import pytest

from flexmarl.actors.credit.algorithms import ALGORITHMS
from flexmarl.actors.trainer.objective.transforms import (
    Critic,
    RoleBaseline,
    TokenKl,
    TrajectoryKl,
    Transform,
    Whiten,
    advantage_of_sample,
    whole_batch_reason,
)

from ..algorithm import algorithm

LISTS: list[tuple[dict[str, Any], list[type[Transform]]]] = [
    ({"name": "grpo"}, [RoleBaseline]),
    ({"name": "grpo", "kl_coefficient": 0.1}, [RoleBaseline]),
    ({"name": "rae"}, [RoleBaseline]),
    ({"name": "rloo"}, [RoleBaseline]),
    ({"name": "rloo", "kl_coefficient": 0.1}, [RoleBaseline, TrajectoryKl]),
    ({"name": "reinforce_pp"}, [RoleBaseline, Whiten]),
    ({"name": "reinforce_pp", "kl_coefficient": 0.1}, [RoleBaseline, TokenKl, Whiten]),
    ({"name": "ppo", "kl_coefficient": 0.1}, [RoleBaseline, TokenKl, Critic]),
]


@pytest.mark.parametrize(("given", "kinds"), LISTS, ids=str)
def test_an_algorithm_has_its_list_in_order(given: dict[str, Any], kinds: list[type[Transform]]) -> None:
    loss = algorithm(**given).loss
    assert [type(transform) for transform in loss.transforms] == kinds
    assert loss.streams == all(kind.streams for kind in kinds)
    assert loss.compares_within_batch == (TrajectoryKl in kinds)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_one_that_does_not_stream_says_why(name: str) -> None:
    for transform in algorithm(name=name, kl_coefficient=0.1, kl_estimator="k2").loss.transforms:
        assert transform.streams == (not transform.reason)


def test_the_first_that_does_not_stream_gives_the_reason() -> None:
    assert whole_batch_reason([RoleBaseline(), TokenKl(), Critic(1.0, 0.95)]) is None
    assert whole_batch_reason([RoleBaseline(), TrajectoryKl(), Whiten()]) == TrajectoryKl.reason
    assert whole_batch_reason([Whiten()]) == Whiten.reason


def test_a_new_transform_decides_by_itself_whether_its_policy_waits() -> None:
    class Clip(Transform):
        def of_sample(self, advantage: float, role_mean: float) -> float:
            return min(advantage, 1.0)

    assert whole_batch_reason([RoleBaseline(), Clip()]) is None
    assert advantage_of_sample([RoleBaseline(), Clip()], 3.0, 2.5) == 0.5
    assert advantage_of_sample([Clip(), RoleBaseline()], 3.0, 2.5) == -1.5, "in the order of the list"
