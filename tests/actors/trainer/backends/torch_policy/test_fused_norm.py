"""The fused norm: its gradient, the same numbers as transformers' own, and nothing touched but one model."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.messages import ModelConfig
from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.actors.trainer.backends.torch_policy.fused_norm import (
    FusedRMSNorm,
    fuse_norms,
    rms_norm,
    torch_rms_norm,
)
from flexmarl.actors.trainer.backends.torch_policy.torch_policy import TorchPolicy
from flexmarl.actors.trainer.trainer_setup import PolicySetup

torch.set_num_threads(1)
MODEL = {
    "vocab_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32,
    "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT2 = {"vocab_size": 16, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
DROPOUT_OFF = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
# Model type: how many norms are replaced in two layers.
REPLACED = {
    "qwen3": 9,  # norms of queries and keys too
    "llama": 5,
    "qwen2": 5,
    "mistral": 5,
    "gemma": 0,  # its norms multiply by 1 + weight
    "olmo2": 0,  # its norms round after the weight, which shows under autocast
    "gpt2": 0,
}


def make_model(model_type: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    options = {"model_type": model_type} | (GPT2 | DROPOUT_OFF if model_type == "gpt2" else MODEL)
    auto_model: Any = AutoModelForCausalLM  # half of its methods have no types
    model = auto_model.from_config(AutoConfig.for_model(**options), attn_implementation="sdpa")
    with torch.no_grad():  # norms begin as all ones, which would hide how the weight enters
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.train()


def replaced(model: nn.Module) -> int:
    return sum(isinstance(module, FusedRMSNorm) for module in model.modules())


def logits_and_gradients(model: Any, autocast: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    tokens = torch.randint(16, (3, 7), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
    torch.autograd.backward(loss)
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def relative_errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    assert found.keys() == expected.keys()
    total = torch.stack([g.norm() for g in expected.values()]).norm() / len(expected) ** 0.5
    # A gradient that is zero but for rounding (of keys' biases) is measured by the others' size.
    return {
        name: float((found[name] - g).norm() / torch.maximum(g.norm(), 1e-2 * total))
        for name, g in expected.items()
    }


def double(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


# --------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 4, 5)])
def test_the_gradient_of_rms_norm(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-3), (double(*shape), double(shape[-1])))


def test_the_gradient_of_rms_norm_of_a_transposed_tensor() -> None:
    torch.manual_seed(0)
    x, weight = double(2, 4, 3), double(4)

    def transposed(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x.transpose(1, 2), weight, 1e-3).transpose(1, 2)

    assert torch.autograd.gradcheck(transposed, (x, weight))


def test_a_second_derivative_is_refused() -> None:
    x, weight = double(3, 4), double(4)
    (gradient,) = torch.autograd.grad(rms_norm(x, weight, 1e-6).pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        torch.autograd.backward(gradient.sum())


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
def test_the_norm_of_a_gpu_is_the_same(dtype: torch.dtype, bound: float) -> None:
    """Compares torch's function, which a GPU has a kernel of, on the CPU."""
    torch.manual_seed(0)
    x, weight, gradient = torch.randn(64, 48) * 3, torch.randn(48) + 1, torch.randn(64, 48)
    results: list[list[Tensor | None]] = []
    for norm in (rms_norm, torch_rms_norm):
        rows, scales = (tensor.to(dtype, copy=True).requires_grad_() for tensor in (x, weight))
        normed = norm(rows, scales, 1e-6)
        torch.autograd.backward(normed, gradient.to(dtype))
        results.append([normed.detach(), rows.grad, scales.grad])
    for found, expected in zip(results[1], results[0], strict=True):
        assert found is not None and expected is not None and found.dtype == expected.dtype == dtype
        assert float((found - expected).float().norm() / expected.float().norm()) < bound


# --------------------------------------------------------------------------- whole models


@pytest.mark.parametrize("model_type", REPLACED)
def test_a_fused_model_computes_the_same(model_type: str) -> None:
    plain, fused = make_model(model_type), fuse_norms(make_model(model_type))
    assert replaced(fused) == REPLACED[model_type]
    logits, gradients = logits_and_gradients(plain)
    found, found_gradients = logits_and_gradients(fused)
    assert torch.equal(found, logits)
    # The difference is rounding, of one parameter alone.
    assert max(relative_errors(found_gradients, gradients).values()) < 4e-6


@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
def test_a_fused_model_computes_the_same_in_bfloat16(model_type: str) -> None:
    logits, gradients = logits_and_gradients(make_model(model_type), autocast=True)
    found, found_gradients = logits_and_gradients(fuse_norms(make_model(model_type)), autocast=True)
    assert found.dtype == logits.dtype == torch.bfloat16
    assert torch.equal(found, logits)
    assert max(relative_errors(found_gradients, gradients).values()) < 2e-2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_norm_of_low_precision_weights_is_transformers_own(dtype: torch.dtype) -> None:
    plain, fused = make_model("qwen3").to(dtype), fuse_norms(make_model("qwen3")).to(dtype)
    x = torch.randn(3, 32, dtype=dtype)
    for before, after in (
        (plain.model.norm, fused.model.norm),
        (plain.model.norm.float(), fused.model.norm.float()),
    ):
        assert torch.equal(after(x), before(x))
        assert after(x).dtype == before(x).dtype


def test_generation_with_a_cache_is_the_same() -> None:
    prompt = torch.tensor([[3, 4, 5]])
    models = [make_model("qwen3").eval(), fuse_norms(make_model("qwen3")).eval()]
    rows = [model.generate(prompt, max_new_tokens=8, do_sample=False) for model in models]
    assert torch.equal(*rows)


# --------------------------------------------------------------------------- nothing else is touched


def test_names_values_and_files_stay(tmp_path: Path) -> None:
    plain, fused = make_model("qwen3"), make_model("qwen3")
    before = dict(fused.named_parameters())
    assert fuse_norms(fused) is fused
    after = dict(fused.named_parameters())
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)
    assert list(fused.state_dict()) == list(plain.state_dict())
    fused.save_pretrained(tmp_path)
    auto_model: Any = AutoModelForCausalLM
    loaded = auto_model.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in plain.state_dict().items())


def test_one_model_is_fused_and_no_other() -> None:
    other = make_model("qwen3", seed=1)
    expected, _ = logits_and_gradients(other)
    first, second = fuse_norms(make_model("qwen3")), fuse_norms(make_model("qwen3", seed=1))
    logits_and_gradients(first)
    assert replaced(make_model("qwen3")) == 0
    assert torch.equal(logits_and_gradients(second)[0], expected)
    assert replaced(fuse_norms(second)) == REPLACED["qwen3"], "fusing twice is fusing once"


def test_a_copy_is_a_model_of_its_own() -> None:
    fused = fuse_norms(make_model("qwen3"))
    duplicate = copy.deepcopy(fused)
    with torch.no_grad():
        for parameter in fused.parameters():
            parameter.zero_()
    expected, _ = logits_and_gradients(make_model("qwen3"))
    assert torch.equal(logits_and_gradients(duplicate)[0], expected)


def test_the_global_random_stream_is_left_alone() -> None:
    model = make_model("qwen3")
    state = torch.get_rng_state()
    fuse_norms(model)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_policy_trains_a_fused_model() -> None:
    config = ModelConfig(config=MODEL | {"model_type": "qwen3"}, tokenizer="unused")
    policy = TorchPolicy(
        PolicyName("solver"),
        PolicySetup(model=config, credit={AgentName("solver"): CreditConfig()}),
        seed=0,
        total_steps=1,
    )
    assert replaced(policy.model) == REPLACED["qwen3"]


# --------------------------------------------------------------------------- look-alikes


class RMSNorm(nn.Module):
    """A norm that is replaced; each of the others below differs in one thing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.variance_epsilon: float = 1e-6

    def normed(self, x: Tensor) -> Tensor:
        wide = x.float()
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.normed(x).to(x.dtype)


class OffsetRMSNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return (1 + self.weight) * self.normed(x).to(x.dtype)


class UnweightedRMSNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.normed(x).to(x.dtype)


class RoundedLastRMSNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * self.normed(x)).to(x.dtype)


class OtherEpsilonRMSNorm(RMSNorm):
    def normed(self, x: Tensor) -> Tensor:
        wide = x.float()
        return wide / (wide.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)


class GatedRMSNorm(RMSNorm):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return self.weight * self.normed(x).to(x.dtype) * (1 if gate is None else gate)


class BiasedRMSNorm(RMSNorm):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(6))


class HookedRMSNorm(RMSNorm):
    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda *_: None)


class Norm(RMSNorm):
    """A norm with another signature of ``forward``."""


@pytest.mark.parametrize(
    "look_alike",
    [
        OffsetRMSNorm,
        UnweightedRMSNorm,
        RoundedLastRMSNorm,
        OtherEpsilonRMSNorm,
        GatedRMSNorm,
        BiasedRMSNorm,
        HookedRMSNorm,
        Norm,
    ],
)
def test_a_norm_that_only_looks_the_same_is_left_alone(look_alike: type[nn.Module]) -> None:
    own, standard = look_alike(), RMSNorm()
    model = fuse_norms(nn.Sequential(own, standard, nn.LayerNorm(6), nn.RMSNorm(6)))
    assert model[0] is own
    assert [type(module) for module in list(model.children())[1:]] == [FusedRMSNorm, nn.LayerNorm, nn.RMSNorm]
    assert model[1].weight is standard.weight
