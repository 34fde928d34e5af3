"""The weights of frozen policies: those that a policy in training would publish from the same start."""

from pathlib import Path

import pytest
import torch

from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.errors import CheckpointIncomplete, CheckpointMismatch
from flexmarl.actors.messages import LoraConfig, ModelConfig
from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.actors.trainer.backends.torch_policy.torch_factory import TorchFactory
from flexmarl.actors.trainer.backends.torch_policy.torch_policy import TorchPolicy
from flexmarl.actors.trainer.trainer_setup import PolicySetup

from .policies import SMALLER_MODEL
from .test_torch_policy_files import step, tokenizer  # noqa: F401  # a fixture

JUDGE = PolicyName("judge")


def setup_of(
    dtype: str, lora: LoraConfig | None = None, init_from: Path | None = None, **of_model: int
) -> PolicySetup:
    config = SMALLER_MODEL | of_model
    model = ModelConfig.model_validate({"config": config, "tokenizer": "unused", "dtype": dtype})
    return PolicySetup(
        model=model, lora=lora, credit={AgentName("solver"): CreditConfig()}, init_from=init_from
    )


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2, alpha=4)], ids=["whole", "lora"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_frozen_weights_are_those_of_the_policy_that_was_saved(
    dtype: str,
    lora: LoraConfig | None,
    tmp_path: Path,
    tokenizer: object,  # noqa: F811
) -> None:
    trained = TorchPolicy(JUDGE, setup_of(dtype, lora), seed=3, total_steps=4)
    first = {name: tensor.clone() for name, tensor in trained.weights().items()}
    frozen = TorchFactory(3, 4).frozen_weights(JUDGE, setup_of(dtype, lora))
    assert frozen.keys() == first.keys()
    assert all(torch.equal(frozen[name], first[name]) for name in first), "the same initial weights"
    step(trained)
    trained.save(tmp_path / "judge", tokenizer)  # type: ignore[arg-type]
    after = trained.weights()
    seed = 9 if lora is None else 3  # an adapter is over the base of its seed
    frozen = TorchFactory(seed, 4).frozen_weights(JUDGE, setup_of(dtype, lora, tmp_path / "judge"))
    assert all(torch.equal(frozen[name], after[name]) for name in after)
    assert any(not torch.equal(first[name], after[name]) for name in after)
    assert {tensor.dtype for tensor in frozen.values()} == {getattr(torch, dtype)}


def test_a_folder_of_another_model_is_refused(tmp_path: Path, tokenizer: object) -> None:  # noqa: F811
    trained = TorchPolicy(JUDGE, setup_of("float32"), seed=3, total_steps=4)
    trained.save(tmp_path / "judge", tokenizer)  # type: ignore[arg-type]
    with pytest.raises(CheckpointMismatch):
        TorchFactory(3, 4).frozen_weights(
            JUDGE, setup_of("float32", None, tmp_path / "judge", intermediate_size=16)
        )
    with pytest.raises(CheckpointIncomplete):
        TorchFactory(3, 4).frozen_weights(JUDGE, setup_of("float32", None, tmp_path / "nothing"))
