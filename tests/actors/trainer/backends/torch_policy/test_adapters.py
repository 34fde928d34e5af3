"""LoRA policies: one base for all of them, their gradient, their reference, and weights with the adapter in them."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftModel
from transformers import PreTrainedTokenizerFast

from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.errors import CheckpointMismatch
from flexmarl.actors.json_files import read_json, write_json
from flexmarl.actors.messages import LoraConfig, ModelConfig
from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.actors.trainer.backends.torch_policy.completion_model import named_weights, placed_model
from flexmarl.actors.trainer.backends.torch_policy.frozen_base import FrozenBases
from flexmarl.actors.trainer.backends.torch_policy.gang_rank import ALONE
from flexmarl.actors.trainer.backends.torch_policy.lora_targets import target_names
from flexmarl.actors.trainer.backends.torch_policy.torch_factory import TorchFactory
from flexmarl.actors.trainer.backends.torch_policy.torch_policy import TorchPolicy
from flexmarl.actors.trainer.trainer_config import LossConfig, OptimizerConfig
from flexmarl.actors.trainer.trainer_setup import PolicySetup

from .policies import SMALLER_MODEL, gradient, make_samples, relative_error
from .test_torch_policy_files import assert_equal_state, step, tokenizer  # noqa: F401  # a fixture

LORA = LoraConfig(rank=4, alpha=8)
ROW = torch.arange(12).reshape(2, 6)


def lora_setup(
    lora: LoraConfig | None = LORA, loss: LossConfig | None = None, model: dict[str, Any] | None = None
) -> PolicySetup:
    loss = loss or LossConfig(name="dapo")
    return PolicySetup(
        model=ModelConfig(config=model or SMALLER_MODEL, tokenizer="unused"),
        lora=lora,
        credit={AgentName("solver"): CreditConfig(name=loss.name)},
        loss=loss,
        optimizer=OptimizerConfig(lr=1e-2, max_grad_norm=1e9),
    )


def lora_policy(setup: PolicySetup | None = None, name: str = "solver", seed: int = 0) -> TorchPolicy:
    return TorchPolicy(PolicyName(name), setup or lora_setup(), seed=seed, total_steps=10)


def copied(tensors: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def base_of(policy: TorchPolicy) -> Any:
    """The base alone, as a model of its own."""
    base = placed_model(policy._setup.real_model, 1)
    base.load_state_dict(copied(policy.frozen_state()))
    return base


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ROW).logits
    return found


# --------------------------------------------------------------------------- one base


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_policies_references_and_critics_share_the_memory_of_one_base(algorithm: Any) -> None:
    made = TorchFactory(0, 10, most_kept=0)
    setup = lora_setup(loss=LossConfig(name=algorithm, kl_coefficient=0.1))
    first, second = (made.build(PolicyName(name), setup) for name in ("first", "second"))
    base = first.frozen_state()
    assert {tensor.data_ptr() for tensor in base.values()} == {
        tensor.data_ptr() for tensor in second.frozen_state().values()
    }
    addresses = {tensor.data_ptr() for tensor in base.values()}
    for policy in (first, second):
        assert policy.models.reference is not None
        models = [policy.model, policy.models.reference.model, policy._critic and policy._critic.model.body]
        for model in filter(None, models):
            frozen = {name: p for name, p in model.named_parameters() if ".lora_" not in name}
            assert frozen and {p.data_ptr() for p in frozen.values()} <= addresses
            assert all(p.grad is None and not p.requires_grad for p in frozen.values())
    assert not addresses & {tensor.data_ptr() for tensor in first.base_state().values()}


def test_training_changes_the_adapter_alone_and_only_the_adapter_moves() -> None:
    policy = lora_policy()
    frozen, before = copied(policy.frozen_state()), copied(policy.base_state())
    policy.accumulate(make_samples(0))
    policy.optimizer_step()
    assert all(torch.equal(frozen[name], tensor) for name, tensor in policy.frozen_state().items())
    assert any(not torch.equal(before[name], tensor) for name, tensor in policy.base_state().items())
    parts = {name.partition("/")[0] for name in before}
    assert parts == {"adapter_model", "training_state"}
    rank, layer = LORA.rank, SMALLER_MODEL["hidden_size"]
    shape = before["adapter_model/base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"].shape
    assert shape == (rank, layer)
    assert all(".lora_" in name for name in before)


def test_a_new_adapter_changes_nothing_and_its_reference_is_the_base() -> None:
    policy = lora_policy(lora_setup(loss=LossConfig(kl_coefficient=0.1)))
    base = base_of(policy)
    assert policy.models.reference is not None
    assert torch.equal(logits(policy.model), logits(base))
    policy.accumulate(make_samples(0))
    policy.optimizer_step()
    assert not torch.equal(logits(policy.model), logits(base))
    assert torch.equal(logits(policy.models.reference.model), logits(base))


def test_the_reference_is_the_adapter_after_its_sft() -> None:
    policy = lora_policy(lora_setup(loss=LossConfig(kl_coefficient=0.1)))
    policy.sft([((1, 2), (3, 4)), ((2,), (5,))])
    policy.sft_done()
    assert policy.models.reference is not None
    assert torch.equal(logits(policy.model), logits(policy.models.reference.model))
    assert not torch.equal(logits(policy.model), logits(base_of(policy)))


def test_bases_are_told_apart_by_their_model_and_equal_in_every_process() -> None:
    one, other = FrozenBases(3), FrozenBases(3)
    small = ModelConfig(config=SMALLER_MODEL, tokenizer="unused")
    large = ModelConfig(config=SMALLER_MODEL | {"intermediate_size": 32}, tokenizer="unused")
    assert one.base_of(small) is one.base_of(small.model_copy()) is not one.base_of(large)
    digests = [bases.base_of(each).digest(ALONE) for bases in (one, other) for each in (small, large)]
    assert digests[0] == digests[2] != digests[1] == digests[3]
    assert FrozenBases(4).base_of(small).digest(ALONE) not in digests


# --------------------------------------------------------------------------- the gradient


@settings(max_examples=8)
@given(data=st.data(), seed=st.integers(0, 100))
def test_any_order_and_split_gives_the_one_batch_gradient(data: st.DataObject, seed: int) -> None:
    samples = make_samples(seed)
    whole, cut = lora_policy(), lora_policy()
    for policy in (whole, cut):
        policy.model.double()  # only the order of sums is left to differ
    whole.accumulate(samples)
    shuffled = data.draw(st.permutations(samples))
    while shuffled:
        size = data.draw(st.integers(1, len(shuffled)))
        cut.accumulate(shuffled[:size])
        shuffled = shuffled[size:]
    assert relative_error(gradient(cut), gradient(whole)) < 1e-12


def test_the_gradient_is_that_of_the_whole_model_through_the_adapter() -> None:
    """``dL/dB = s dL/dW A'`` and ``dL/dA = s B' dL/dW``, from the gradient of a policy that trains all weights."""
    policy = lora_policy()
    policy.model.double()
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    full = lora_policy(lora_setup(lora=None))
    full.model.double()
    full.model.load_state_dict(dict(policy.weights()))
    for each in (policy, full):
        each.accumulate(make_samples(1))
    dense = {name: p.grad for name, p in full.model.named_parameters()}
    adapters = dict(policy.model.named_parameters())
    found = 0
    for name, wanted in dense.items():
        layer = name.removesuffix(".weight")
        if (a := adapters.get(f"{layer}.lora_A.default.weight")) is None or wanted is None:
            continue
        b = adapters[f"{layer}.lora_B.default.weight"]
        assert a.grad is not None and b.grad is not None
        assert relative_error(b.grad, 2.0 * wanted @ a.detach().T) < 1e-6
        assert relative_error(a.grad, 2.0 * b.detach().T @ wanted) < 1e-6
        found += 1
    assert found == 7


def test_recomputed_activations_give_the_same_gradient() -> None:
    plain = lora_policy()
    setup = lora_setup()
    recomputing = setup.torch_trainer.model_copy(update={"activation_checkpointing": True})
    other = lora_policy(setup.model_copy(update={"trainer": recomputing}))
    for policy in (plain, other):
        policy.accumulate(make_samples(2))
    assert relative_error(gradient(other), gradient(plain)) < 1e-6


def test_an_adapter_has_no_dropout() -> None:
    policy = lora_policy()
    assert not any(isinstance(module, torch.nn.Dropout) for module in policy.model.modules())


# --------------------------------------------------------------------------- layers


@pytest.mark.parametrize("tied", [False, True])
def test_published_weights_are_those_of_the_whole_model(tied: bool) -> None:
    policy = lora_policy(lora_setup(model=SMALLER_MODEL | {"tie_word_embeddings": tied}))
    for _ in range(2):
        step(policy)
    whole = placed_model(policy._setup.real_model, 1)
    weights = policy.weights()
    assert weights.keys() == named_weights(whole).keys()
    whole.load_state_dict(dict(weights), strict=not tied)
    assert torch.allclose(logits(whole), logits(policy.model), atol=1e-5)


def test_targets_are_layers_that_the_model_has() -> None:
    base = placed_model(ModelConfig(config=SMALLER_MODEL, tokenizer="unused"), 0)
    names = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert target_names(base, LoraConfig()) == names
    assert target_names(base, LoraConfig(targets=("v_proj", "layers.0.mlp.up_proj"))) == [
        "layers.0.mlp.up_proj",
        "v_proj",
    ]
    for missing in ("qkv_proj", "lm_head", "embed_tokens", "self_attn", "proj"):
        with pytest.raises(ValueError, match=f"no linear layer '{missing}'; it has: down_proj, gate_proj"):
            target_names(base, LoraConfig(targets=("v_proj", missing)))


def test_only_the_targets_are_trained() -> None:
    policy = lora_policy(lora_setup(LoraConfig(targets=("q_proj", "v_proj"))))
    assert len(policy.models.parameters) == 4


def test_gpt2_has_layers_of_its_own_kind() -> None:
    model = {
        "model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 16, "n_positions": 32,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    }  # fmt: skip
    policy = lora_policy(lora_setup(model=model))
    step(policy)
    whole = placed_model(policy._setup.real_model, 1)
    whole.load_state_dict(dict(policy.weights()), strict=False)
    assert torch.allclose(logits(whole), logits(policy.model), atol=1e-5)


# --------------------------------------------------------------------------- files


def test_peft_loads_a_saved_adapter(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:  # noqa: F811
    policy = lora_policy()
    for _ in range(2):
        step(policy)
    policy.save(tmp_path / "saved", tokenizer)
    loaded = PeftModel.from_pretrained(base_of(policy), tmp_path / "saved")
    assert torch.equal(logits(loaded), logits(policy.model))
    assert not (tmp_path / "saved" / "model.safetensors").exists()


@pytest.mark.parametrize("loss", [LossConfig(), LossConfig(name="ppo", kl_coefficient=0.1)])
def test_a_loaded_policy_continues_bit_for_bit(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,  # noqa: F811
    loss: LossConfig,
) -> None:
    setup = lora_setup(loss=loss)
    unbroken, resumed = lora_policy(setup), lora_policy(setup)
    for _ in range(2):
        step(unbroken)
    unbroken.save(tmp_path / "saved", tokenizer)
    resumed.load(tmp_path / "saved")
    for _ in range(2):
        step(unbroken)
        step(resumed)
    assert_equal_state(resumed, unbroken)


def test_a_policy_starts_from_an_adapter_alone(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,  # noqa: F811
) -> None:
    first = lora_policy()
    step(first)
    first.save(tmp_path / "saved", tokenizer)
    second = lora_policy(lora_setup(loss=LossConfig(kl_coefficient=0.1)), name="other")
    second.start_from(tmp_path / "saved")
    assert second.version == 0 and second.models.reference is not None
    assert torch.equal(logits(second.model), logits(first.model))
    assert torch.equal(logits(second.models.reference.model), logits(first.model))
    (tmp_path / "saved" / "training_state.json").unlink()  # as an adapter from elsewhere
    third = lora_policy()
    third.start_from(tmp_path / "saved")
    assert torch.equal(logits(third.model), logits(first.model))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"lora": LoraConfig(rank=2, alpha=8)}, "adapter_config.json: r: .*2.*4"),
        ({"lora": LoraConfig(rank=4, alpha=16)}, "adapter_config.json: lora_alpha: .*16.*8"),
        ({"lora": LoraConfig(rank=4, alpha=8, targets=("q_proj",))}, "lora_A.weight"),
        (
            {"model": SMALLER_MODEL | {"initializer_range": 0.1}},
            "training_state.json: digest of the base model: ",
        ),
    ],
)
def test_an_adapter_of_another_kind_or_base_is_refused(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,  # noqa: F811
    changes: dict[str, Any],
    problem: str,
) -> None:
    saved = lora_policy()
    step(saved)
    saved.save(tmp_path / "saved", tokenizer)
    other = lora_policy(lora_setup(**changes))
    before = copied(other.base_state())
    for call in (other.load, other.start_from):
        with pytest.raises(CheckpointMismatch, match=problem):
            call(tmp_path / "saved")
    assert all(torch.equal(before[name], tensor) for name, tensor in other.base_state().items())


def test_an_adapter_of_an_older_format_is_refused_by_the_format_and_not_as_one_of_another_base(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,  # noqa: F811
) -> None:
    policy = lora_policy()
    policy.save(tmp_path / "saved", tokenizer)
    path = tmp_path / "saved" / "training_state.json"
    position = read_json(path)
    write_json(path, position | {"format": 1, "base": position["base"] | {"digest": "of format 1"}})
    for call in (policy.load, policy.start_from):
        with pytest.raises(CheckpointMismatch, match=r"training_state\.json: format: .*2.*1"):
            call(tmp_path / "saved")


def test_an_adapter_scaled_in_another_way_is_refused(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,  # noqa: F811
) -> None:
    policy = lora_policy()
    policy.save(tmp_path / "saved", tokenizer)
    path = tmp_path / "saved" / "adapter_config.json"
    write_json(path, read_json(path) | {"use_rslora": True})
    with pytest.raises(CheckpointMismatch, match="use_rslora"):
        policy.start_from(tmp_path / "saved")


def test_the_figures_of_a_step_are_finite_and_the_loss_of_a_shared_base_is_its_own() -> None:
    """Two adapters that train in turn do not see one another."""
    made = TorchFactory(0, 10)
    first, second = (made.build(PolicyName(name), lora_setup()) for name in ("first", "second"))
    alone = TorchFactory(0, 10).build(PolicyName("first"), lora_setup())
    for policy in (first, second, alone):
        policy.accumulate(make_samples(0))
    assert dataclasses.asdict(first.optimizer_step()) == dataclasses.asdict(alone.optimizer_step())
    second.optimizer_step()
    assert torch.equal(logits(first.model), logits(alone.model))
