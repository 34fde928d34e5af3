"""The memory of a rank's state, which outlives the process group."""

import weakref
from contextlib import suppress
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from flexmarl.actors.names import PolicyName
from flexmarl.actors.trainer.backends.policy_backend import TrainingStep
from flexmarl.actors.trainer.backends.torch_policy import torch_factory, torch_policy
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
    memory = factory.memory(NAME, setup, specs)
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


def other_policies_room(gang: GangRank, how: str) -> list[bool]:
    """True if nothing is left of a policy's state when another takes memory: an equal one that is built, or one of
    other tensors that comes back."""
    factory = factory_of(SETUPS["dapo"])
    policy = factory.build(NAME, SETUPS["dapo"], gang)
    left = [weakref.ref(tensor) for tensor in policy.gradients().values()]
    factory.release(policy)
    del policy
    factory.free_released()  # as a slot does it when the gang has ended
    assert any(tensor() is not None for tensor in left), "kept for one that fits"
    is_freed: list[bool] = []

    def note(*_arguments: object, **_settings: object) -> None:
        is_freed.append(all(tensor() is None for tensor in left))
        raise InterruptedError

    with (
        mock.patch.object(torch_policy, "TrainedModels", note),
        mock.patch.object(torch_factory, "new_memory", note),
        suppress(InterruptedError),
    ):
        if how == "build":
            factory.build(PolicyName("other"), SETUPS["dapo"], gang)
        else:
            factory.memory(NAME, SETUPS["dapo"], [TensorSpec("w", (3,), "float32", 0)])
    return is_freed


@pytest.mark.parametrize("how", ["build", "memory"])
def test_memory_that_a_rank_keeps_is_freed_before_a_policy_takes_other_memory(ranks: Ranks, how: str) -> None:
    assert ranks.run(2, other_policies_room, how) == [[True], [True]]
