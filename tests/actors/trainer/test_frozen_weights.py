"""Weights of past versions: written to a file, and published from it, bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.errors import CheckpointIncomplete
from flexmarl.actors.messages import ModelConfig, Published
from flexmarl.actors.names import AgentName, PolicyName, Version
from flexmarl.actors.recipe.recipe import RecipeConfig
from flexmarl.actors.trainer.frozen_weights import FrozenWeights
from flexmarl.actors.trainer.trainer_setup import PolicySetup, TrainerSetup
from flexmarl.core.system import ActorSystem
from flexmarl.transport.state import StateTransport

from .backends.torch_policy.policies import SMALLER_MODEL

PLAYER, RIVAL = PolicyName("player"), PolicyName("rival")


class Blocking:
    """As much of an ``ActorSystem`` as is needed."""

    async def run_blocking(self, work: Callable[..., Any], *args: Any, **_: Any) -> Any:
        return work(*args)


def weights_of(tmp_path: Path, transport: StateTransport) -> FrozenWeights:
    model = ModelConfig.model_validate({"config": SMALLER_MODEL, "tokenizer": "unused", "dtype": "bfloat16"})
    policy = PolicySetup(model=model, credit={AgentName("player"): CreditConfig()})
    setup = TrainerSetup(
        policies={PLAYER: policy},
        recipe=RecipeConfig(folder=str(tmp_path), data={}, seed=1),
        total_steps=1,
        store=cast(Any, None),
        store_dir=tmp_path,
        frozen={RIVAL: policy},
    )
    return FrozenWeights(setup, cast(ActorSystem, Blocking()), transport)


async def test_a_past_version_is_published_as_it_was(tmp_path: Path, private: Path) -> None:
    trained = {
        "a": torch.randn(3, 5).to(torch.bfloat16), "b": torch.randn(7), "c": torch.tensor([True, False]),
    }  # fmt: skip
    file = tmp_path / "opponents" / "step_000004.safetensors"
    async with StateTransport(private) as transport:
        weights = weights_of(tmp_path, transport)
        handle = await transport.set(PLAYER, trained, version=4)
        await weights.keep(Published(PLAYER, Version(4), handle), file)
        again = await weights.publish_file(RIVAL, Version(9), file)
        assert (again.policy, again.version, again.handle.version) == (RIVAL, 9, 9)
        found = await transport.get(again.handle)
    assert found.keys() == trained.keys()
    assert all(torch.equal(found[name], trained[name]) for name in trained)
    assert [path.name for path in file.parent.iterdir()] == [file.name]


async def test_a_damaged_file_is_named(tmp_path: Path, private: Path) -> None:
    file = tmp_path / "step_000004.safetensors"
    async with StateTransport(private) as transport:
        weights = weights_of(tmp_path, transport)
        with pytest.raises(CheckpointIncomplete, match=file.name):
            await weights.publish_file(RIVAL, Version(1), file)
        file.write_bytes(b"nothing")
        with pytest.raises(CheckpointIncomplete, match=file.name):
            await weights.publish_file(RIVAL, Version(1), file)
