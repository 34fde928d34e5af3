"""The memory of a rank's state, which outlives the process group."""

from typing import Any

import numpy as np
import pytest
import torch

from flexmarl.actors.trainer.backends.policy_backend import TrainingStep
from flexmarl.actors.trainer.backends.torch_policy.gang_rank import GangRank
from flexmarl.transport.handle import TensorSpec

from .gang_cases import SETUPS
from .policies import make_samples
from .ranks import (
    NAME,
    STEP,
    Call,
    Ranks,
    RankState,
    Trained,
    factory_of,
    state_of,
    train_as_configured,
)


def resumed_in_kept_memory(gang: GangRank, kind: str) -> tuple[Any, RankState, list[str]]:
    """A policy that leaves after a micro-batch and comes back before its gang meets: the figures of the step, the state
    after it, and the tensors of the state that are where they were."""
    setup = SETUPS[kind]
    factory = factory_of(setup)
    policy = factory.build(NAME, setup, gang)
    policy.accumulate(make_samples(1)[:3])
    before = state_of(policy)
    places = {name: each.data_ptr() for name, each in {**policy.base_state(), **policy.gradients()}.items()}
    factory.release(policy)
    del policy
    specs = [TensorSpec(name, each.shape, str(each.dtype), 0) for name, each in before.tensors.items()]
    memory = factory.memory(setup, specs)
    assert {name: each.data_ptr() for name, each in memory.items()} == places
    for name, values in before.tensors.items():
        memory[name].copy_(torch.from_numpy(values))
    policy = factory.host(NAME, setup, gang, memory)
    gradients = policy.gradients() if before.data["accumulated"] else {}
    policy.load_state(TrainingStep(gradients, before.data))
    there = {**policy.base_state(), **policy.gradients()}
    stay = [name for name, each in there.items() if each.data_ptr() == places[name]]
    policy.accumulate(make_samples(1)[3:])
    return policy.optimizer_step(), state_of(policy), stay


@pytest.mark.parametrize("kind", SETUPS)
def test_a_rank_takes_over_the_memory_that_another_has_left_with_the_state_in_it(
    ranks: Ranks, kind: str
) -> None:
    samples = make_samples(1)
    calls: list[Call] = [("accumulate", samples[:3]), ("accumulate", samples[3:]), STEP]
    unbroken: list[Trained] = ranks.run(2, train_as_configured, SETUPS[kind], calls)
    found = ranks.run(2, resumed_in_kept_memory, kind)
    for (stats, state, stay), other in zip(found, unbroken, strict=True):
        assert stats == other.results[-1] and state.data == other.state.data
        assert all(np.array_equal(state.tensors[name], other.state.tensors[name]) for name in state.tensors)
        moved = [name for name in state.tensors if name not in stay]
        assert all(
            name.startswith(("model/", "adapter_model/", "reference/", "critic/")) for name in moved
        ), moved
        assert not any("exp_avg" in name for name in moved), "moments and gradients stay where they are"
        assert any(name.startswith("gradient/") for name in stay)
