"""The rows of a frozen base: in one type, once for all models of a rank, with one digest, and merged with adapters."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from flexmarl.actors.messages import LoraConfig
from flexmarl.actors.pretrained import named_weights_of
from flexmarl.actors.trainer.backends.torch_policy.frozen_base import FrozenBases
from flexmarl.actors.trainer.backends.torch_policy.gang_rank import ALONE, GangRank, local
from flexmarl.actors.trainer.backends.torch_policy.merged_model import write_merged
from flexmarl.actors.trainer.backends.torch_policy.own_weights import is_adapter
from flexmarl.actors.trainer.trainer_setup import PolicySetup

from .gang_cases import error
from .policies import make_samples
from .ranks import (
    SEED,
    STEP,
    Call,
    Ranks,
    RankState,
    Trained,
    called,
    gang_setup,
    made_policy,
    train_as_configured,
)
from .test_torch_policy_files import tokenizer  # noqa: F401  # a fixture


def frozen_bytes(gang: GangRank, setup: PolicySetup) -> tuple[int, int, set[torch.dtype], set[torch.dtype]]:
    """Bytes of memory that all weights without gradients have on this rank after a step, those of reference and critic
    too; elements of the adapter's rows; and the types of the ones and the others."""
    policy = made_policy(gang, setup, None)
    policy.accumulate(make_samples(1))
    policy.optimizer_step()
    models = policy.models
    assert models.reference is not None and models.critic is not None
    frozen, trained = {}, set[torch.dtype]()
    for model in (models.completions.model, models.reference.model, models.critic.model):
        for name, parameter in model.named_parameters():
            storage = local(parameter).untyped_storage()
            if is_adapter(name) or parameter.requires_grad:
                trained.add(parameter.dtype)
            else:
                frozen[storage.data_ptr()] = storage.nbytes(), parameter.dtype
    trained |= {moment.dtype for moment in policy.base_state().values()}
    sizes = [size for size, _ in frozen.values()]
    elements = sum(each.numel() for name, each in policy.gradients().items() if name.startswith("gradient/"))
    return sum(sizes), elements, {dtype for _, dtype in frozen.values()}, trained


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_have_their_rows_of_base_and_adapter_and_the_base_in_the_model_s_type(
    ranks: Ranks, dtype: str
) -> None:
    algorithm, lora = {"name": "ppo", "kl_coefficient": 0.1}, LoraConfig(rank=4, alpha=8)
    setup = gang_setup(algorithm, dtype=dtype, lora=lora, vocab_size=16)
    parameters = sum(math.prod(tensor.shape) for tensor in named_weights_of(setup.real_model).values())
    item_bytes = 2 if dtype == "bfloat16" else 4
    adapter = ranks.run(1, frozen_bytes, setup)[0][1]
    for size in (1, 2, 4):
        for base, rows, frozen, trained in ranks.run(size, frozen_bytes, setup):
            assert base * size == parameters * item_bytes, "once, for policy, reference and critic"
            assert rows * size == adapter
            assert frozen == {getattr(torch, dtype)} and trained == {torch.float32}


def digest(gang: GangRank, dtype: str) -> str:
    bases, config = FrozenBases(SEED), gang_setup({"name": "dapo"}, dtype=dtype).real_model
    first = bases.base_of(config, gang)
    assert bases.base_of(config, gang) is first
    return first.digest(gang)


def test_a_base_has_one_digest_on_any_ranks_and_in_any_type(ranks: Ranks) -> None:
    digests = {
        each
        for size in (1, 2, 4)
        for dtype in ("float32", "bfloat16")
        for each in ranks.run(size, digest, dtype)
    }
    assert len(digests) == 1


def test_an_adapter_over_a_base_in_bfloat16_moves_with_every_bit(ranks: Ranks) -> None:
    lora = LoraConfig(rank=3, alpha=7)
    setup = gang_setup({"name": "ppo", "kl_coefficient": 0.1}, dtype="bfloat16", lora=lora)
    first, second = make_samples(1), make_samples(2, version=1)
    parts: list[list[Call]] = [
        [("accumulate", first[:3])],
        [("accumulate", first[3:]), STEP, ("accumulate", second)],
    ]
    unbroken: list[Trained] = ranks.run(2, train_as_configured, setup, parts[0] + parts[1])
    states: list[RankState] | None = None
    for calls in parts:
        found: list[Trained] = ranks.run(2, train_as_configured, setup, calls, states)
        states = [each.state for each in found]
    for each, expected in zip(found, unbroken, strict=True):
        assert each.state.tensors.keys() == expected.state.tensors.keys()
        for name, tensor in each.state.tensors.items():
            assert np.array_equal(tensor, expected.state.tensors[name]), name
    assert {tensor.dtype for tensor in found[0].state.tensors.values()} == {np.dtype("float32")}
    other: list[Trained] = ranks.run(4, train_as_configured, setup, parts[0] + parts[1])
    assert error(other[0].weights, unbroken[0].weights) < 0.01


def test_a_base_in_bfloat16_is_merged_in_float32_and_rounded_once(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,  # noqa: F811
) -> None:
    setup = gang_setup({"name": "dapo"}, dtype="bfloat16", lora=LoraConfig(rank=4, alpha=8))
    policy = made_policy(ALONE, setup, None)
    called(policy, [("accumulate", make_samples(1)), STEP])
    policy.save(tmp_path / "saved", tokenizer)
    (tmp_path / "merged").mkdir()
    write_merged(tmp_path / "saved", tmp_path / "merged")
    merged, published = load_file(tmp_path / "merged" / "model.safetensors"), policy.weights()
    assert merged.keys() == published.keys() == policy.frozen_state().keys()
    adapter = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    changed = 0
    for name, base in policy.frozen_state().items():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        expected = base.float()
        if f"{layer}.lora_A.weight" in adapter:
            expected += 2.0 * (adapter[f"{layer}.lora_B.weight"] @ adapter[f"{layer}.lora_A.weight"])
            changed += 1
        assert merged[name].dtype == torch.float32 and torch.equal(merged[name], expected), name
        assert published[name].dtype == torch.bfloat16
        assert torch.equal(published[name], expected.to(torch.bfloat16)), name
    assert changed == 7
