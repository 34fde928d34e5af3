"""Rewards from outside in a run that continues: samples of the life before are forgotten."""

from typing import Any

import pytest

from flexmarl.actors.columns.declared_columns import Column
from flexmarl.actors.errors import StoreError
from flexmarl.actors.messages import UnjudgedSample
from flexmarl.actors.names import AgentName
from flexmarl.actors.store.judging import Judging

SOLVER = AgentName("solver")
REWARD = Column(type="float", required=True, written_by="external")


def judging(**arguments: Any) -> Judging:
    return Judging({SOLVER: {"reward": REWARD}}, **arguments)


def rewards(*names: str) -> dict[str, dict[str, Any]]:
    return {"solver": {"sample_id": [*names], "reward": [1.0] * len(names)}}


def test_a_reward_for_a_sample_that_never_waited_is_refused() -> None:
    with pytest.raises(StoreError, match=r"there is no sample '5:q_0_0' that waits for a reward"):
        judging().write(rewards("5:q_0_0"))


def test_in_a_run_that_continues_it_is_late_once_and_those_of_the_same_write_count() -> None:
    continued = judging(continues=True)
    continued.offer("worker", [UnjudgedSample("6:q_0_0", "solver", 0, 3, {})], 0.0)
    assert continued.write(rewards("5:q_0_0", "6:q_0_0", "5:q_0_1")).rows == 1
    assert continued.take_late() == {"solver": ["5:q_0_0", "5:q_0_1"]}
    continued.write(rewards("5:q_0_0"))
    assert not continued.take_late(), "each once"
    with pytest.raises(StoreError, match="there is no sample 'typo' that waits for a reward"):
        continued.write(rewards("5:q_0_9", "typo"))
    assert not continued.take_late(), "a write is refused as a whole"


def test_a_forgotten_sample_that_is_made_again_waits_for_its_reward() -> None:
    continued = judging(continues=True)
    continued.write(rewards("5:q_0_0"))
    continued.offer("worker", [UnjudgedSample("5:q_0_0", "solver", 0, 3, {})], 0.0)
    assert continued.waiting(0.0) == {"solver": 1}
    assert continued.write(rewards("5:q_0_0")).rows == 1 and continued.waiting(0.0) == {}
