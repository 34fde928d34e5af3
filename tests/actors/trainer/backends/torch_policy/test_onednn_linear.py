"""Linear layers by oneDNN: the product and its gradient as a float64 reference has them, and nothing else touched."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexmarl.actors.messages import ModelConfig
from flexmarl.actors.trainer.backends.torch_policy import onednn_linear
from flexmarl.actors.trainer.backends.torch_policy.completion_model import CompletionModel, placed_model
from flexmarl.actors.trainer.backends.torch_policy.onednn_linear import OneDnnLinear, use_onednn
from flexmarl.actors.trainer.padding import pad_rows

torch.set_num_threads(1)
MODEL = {
    "model_type": "qwen2", "vocab_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip

LLAMA4 = {
    "model_type": "llama4_text", "vocab_size": 16, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16,
    "intermediate_size_mlp": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "num_local_experts": 2, "interleave_moe_layer_step": 1, "max_position_embeddings": 32, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(x.detach()).mul_(3)


@pytest.fixture(autouse=True)
def _avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operation is right on any processor, and faster on some."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")


def results(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The output of ``layer``, and the gradients of a weighted sum of it."""
    x = x.clone().requires_grad_()
    output = layer(x)
    weights = torch.linspace(-1.0, 1.0, output.numel(), dtype=x.dtype).view_as(output)
    torch.autograd.backward((output * weights).sum())
    found = {"output": output.detach(), "x": x.grad}
    found |= {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def replaced(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, OneDnnLinear)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [(5, 9), (9, 5), (1, 3)])
@pytest.mark.parametrize("rows", [(1,), (7,), (2, 3, 4), (0,)])
def test_output_and_gradients(sizes: tuple[int, int], rows: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(*sizes, bias=bias)
    exact = nn.Linear(*sizes, bias=bias, dtype=torch.float64)
    exact.load_state_dict(layer.state_dict())
    (found,) = use_onednn(nn.Sequential(layer))
    assert isinstance(found, OneDnnLinear)
    x = torch.randn(*rows, sizes[0])
    ours, expected = results(found, x), results(exact, x.double())
    assert ours.keys() == expected.keys() and len(ours) == 3 + bias
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-5, atol=1e-5)


def test_a_transposed_input_and_gradient() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 6), torch.randn(4, 5, requires_grad=True)
    expected = torch.autograd.grad(layer(x.t()).t().pow(2).sum(), [x, *layer.parameters()])
    (found,) = use_onednn(nn.Sequential(layer))
    ours = torch.autograd.grad(found(x.t()).t().pow(2).sum(), [x, *layer.parameters()])
    for each, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(each, other)


@pytest.mark.parametrize("rows", [(7,), (2, 3, 4)])
def test_a_model_may_change_an_output_in_place(rows: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 6), torch.randn(*rows, 4)
    expected = results(nn.Sequential(layer, InPlace()), x)
    layer.zero_grad()
    (found,) = use_onednn(nn.Sequential(layer))
    assert isinstance(found, OneDnnLinear)
    for name, tensor in results(nn.Sequential(found, InPlace()), x).items():
        torch.testing.assert_close(tensor, expected[name])


def test_llama_4_is_trained_in_float32() -> None:
    """Its experts' outputs are added in place to that of a shared layer."""
    config = ModelConfig(config=LLAMA4, tokenizer="unused")
    model = CompletionModel(config, placed_model(config, 0))
    assert replaced(model.model)
    torch.autograd.backward(model.logprobs(pad_rows([((1, 2, 3), (4, 5)), ((1,), (4, 5, 7))], 16)).sum())
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.model.parameters())


def test_frozen_weights_have_no_gradient() -> None:
    (layer,) = use_onednn(nn.Sequential(nn.Linear(4, 6))).requires_grad_(False)
    assert results(layer, torch.randn(3, 4)).keys() == {"output", "x"}


def test_a_model_keeps_its_parameters_and_their_names() -> None:
    config = ModelConfig(config=MODEL | {"tie_word_embeddings": True}, tokenizer="unused")
    model: Any = placed_model(config, 0)
    assert len(replaced(model)) == 8, "7 of the layer, and the output"
    assert model.lm_head.weight is model.model.embed_tokens.weight
    before = dict(model.named_parameters())
    assert use_onednn(model) is model
    after = dict(model.named_parameters())
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)


def test_other_precisions_are_computed_as_before() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 6).double(), torch.randn(3, 4, dtype=torch.float64)
    expected = results(layer, x)
    (found,) = use_onednn(nn.Sequential(layer))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in results(found, x).items())


def test_other_layers_and_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    hooked = nn.Linear(4, 4)
    hooked.register_forward_hook(lambda *_: None)
    own = [hooked, nn.Bilinear(4, 4, 4)]
    assert list(use_onednn(nn.Sequential(*own))) == own
    bfloat16 = ModelConfig(config=MODEL, tokenizer="unused", dtype="bfloat16")
    assert not replaced(placed_model(bfloat16, 0))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert not replaced(use_onednn(nn.Sequential(nn.Linear(4, 4))))


def _missing(*_: object) -> Tensor:
    raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_linear_pointwise'")


def _without_bias(x: Tensor, weight: Tensor, _: Tensor) -> Tensor:
    return x @ weight.t()


@pytest.mark.parametrize("operation", [_missing, _without_bias])
def test_an_operation_that_is_missing_or_wrong_is_not_used(
    monkeypatch: pytest.MonkeyPatch, operation: object
) -> None:
    monkeypatch.setattr(onednn_linear, "_product", operation)
    assert not replaced(use_onednn(nn.Sequential(nn.Linear(4, 4))))
