"""The weights of frozen policies: those that a policy in training would publish from the same start."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.errors import CheckpointIncomplete, CheckpointMismatch
from flexmarl.actors.messages import LoraConfig, ModelConfig
from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.actors.pretrained import seeded_model
from flexmarl.actors.trainer.backends.torch_policy.merged_model import write_merged
from flexmarl.actors.trainer.backends.torch_policy.torch_factory import TorchFactory
from flexmarl.actors.trainer.backends.torch_policy.torch_policy import TorchPolicy
from flexmarl.actors.trainer.backends.weights_source import WeightsSource
from flexmarl.actors.trainer.trainer_setup import PolicySetup
from scripts.bench.memory_peaks import peak_bytes

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


def memory_of(source: WeightsSource) -> dict[str, Tensor]:
    return {name: torch.empty_like(tensor, device="cpu") for name, tensor in source.outline.items()}


def written(source: WeightsSource) -> dict[str, Tensor]:
    weights = memory_of(source)
    source.write(weights)
    return weights


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
    frozen = written(TorchFactory(3, 4).frozen_weights(JUDGE, setup_of(dtype, lora)))
    assert frozen.keys() == first.keys()
    assert all(torch.equal(frozen[name], first[name]) for name in first), "the same initial weights"
    step(trained)
    trained.save(tmp_path / "judge", tokenizer)  # type: ignore[arg-type]
    after = trained.weights()
    seed = 9 if lora is None else 3  # an adapter is over the base of its seed
    frozen = written(TorchFactory(seed, 4).frozen_weights(JUDGE, setup_of(dtype, lora, tmp_path / "judge")))
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


@pytest.fixture
def deep(tmp_path: Path) -> ModelConfig:
    """A model in files of bfloat16: of its 29 tensors each has at most 6 % of the numbers."""
    config = SMALLER_MODEL | {"num_hidden_layers": 16, "hidden_size": 64, "intermediate_size": 256}
    made = seeded_model(ModelConfig(config=config, tokenizer="unused"), 5, torch.bfloat16)
    made.save_pretrained(tmp_path / "base")
    return ModelConfig(path=str(tmp_path / "base"), tokenizer="unused", dtype="bfloat16")


def mapped_bytes(model: ModelConfig) -> int:
    """The bytes of the file, which is mapped: they count, and take no memory."""
    assert model.path is not None
    return (Path(model.path) / "model.safetensors").stat().st_size


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=1, alpha=1)], ids=["whole", "lora"])
def test_frozen_weights_are_written_tensor_by_tensor(deep: ModelConfig, lora: LoraConfig | None) -> None:
    setup = PolicySetup(model=deep, lora=lora, credit={AgentName("solver"): CreditConfig()})
    sources: list[WeightsSource] = []
    building = peak_bytes(lambda: sources.append(TorchFactory(3, 4).frozen_weights(JUDGE, setup)))
    weights = memory_of(sources[0])
    writing = peak_bytes(lambda: sources[0].write(weights))
    published = sum(tensor.nbytes for tensor in weights.values())
    assert published > 1_000_000
    assert building - mapped_bytes(deep) < 0.15 * published and writing < 0.15 * published


def test_an_adapter_is_merged_tensor_by_tensor(
    deep: ModelConfig,
    tmp_path: Path,
    tokenizer: object,  # noqa: F811
) -> None:
    lora = LoraConfig(rank=1, alpha=1)
    setup = PolicySetup(model=deep, lora=lora, credit={AgentName("solver"): CreditConfig()})
    TorchPolicy(JUDGE, setup, seed=3, total_steps=4).save(tmp_path / "saved", tokenizer)  # type: ignore[arg-type]
    (tmp_path / "merged").mkdir()
    peak = peak_bytes(lambda: write_merged(tmp_path / "saved", tmp_path / "merged"))
    size = (tmp_path / "merged" / "model.safetensors").stat().st_size
    assert size > 2_000_000 and peak - mapped_bytes(deep) < 0.15 * size
