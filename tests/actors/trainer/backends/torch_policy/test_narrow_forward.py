"""A policy in bfloat16 computes what transformers does in bfloat16, over float32 weights that have the gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexmarl.actors.messages import ModelConfig
from flexmarl.actors.pretrained import empty_model
from flexmarl.actors.trainer.backends.torch_policy import completion_model
from flexmarl.actors.trainer.backends.torch_policy.completion_model import (
    CompletionModel,
    named_weights,
    placed_model,
)
from flexmarl.actors.trainer.backends.torch_policy.gang_rank import ALONE
from flexmarl.actors.trainer.backends.torch_policy.layers import layers_of
from flexmarl.actors.trainer.objective.loss import token_logprobs
from flexmarl.actors.trainer.padding import PaddedRows, pad_rows

from .policies import SMALLER_MODEL, make_samples, relative_error
from .ranks import gang_setup, made_policy

MIXTURE = SMALLER_MODEL | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "untied": SMALLER_MODEL | {"num_hidden_layers": 3},
    "tied": SMALLER_MODEL | {"tie_word_embeddings": True},
    "scaled embeddings and other norms": SMALLER_MODEL | {"model_type": "gemma", "tie_word_embeddings": True},
    "biases": SMALLER_MODEL | {"model_type": "phi"},
    "positions": {
        "model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 16, "n_positions": 32,
    },
    "experts": MIXTURE | {"moe_intermediate_size": 32},
}  # fmt: skip
ROWS = pad_rows([((1, 2, 3), (4, 5, 6, 7)), ((8,), (9, 10)), ((11, 12), (13,))], 16)


def made(model: dict[str, Any]) -> CompletionModel:
    """With weights as training leaves them: none of them, norms too, is one of bfloat16."""
    config = ModelConfig(config=model, tokenizer="unused", dtype="bfloat16")
    completions = CompletionModel(config, placed_model(config, 0))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in completions.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    completions.narrow()
    return completions


def by_transformers(completions: CompletionModel, model: dict[str, Any], rows: PaddedRows) -> Tensor:
    network: Any = empty_model(ModelConfig(config=model, tokenizer="unused", dtype="bfloat16"))
    network.load_state_dict(named_weights(completions.model), strict=False)
    network.get_output_embeddings().register_forward_pre_hook(
        lambda _, args: (args[0].flatten(0, 1).index_select(0, rows.positions),)
    )
    with torch.no_grad():
        return token_logprobs(network(**rows.model_inputs).logits, rows.targets)


@pytest.mark.parametrize("name", MODELS)
def test_the_probabilities_have_the_bits_of_transformers_in_bfloat16(name: str) -> None:
    completions = made(MODELS[name])
    with torch.no_grad():
        found = completions.logprobs(ROWS)
    assert found.dtype == torch.float32
    assert torch.equal(found, by_transformers(completions, MODELS[name], ROWS))


@pytest.mark.parametrize("name", [name for name in MODELS if name != "experts"])
def test_layers_see_bfloat16_and_the_gradient_is_that_of_float32_weights(name: str) -> None:
    """Rounding may send a token to other experts, whose gradient is then another one."""
    completions, types = made(MODELS[name]), set[torch.dtype]()
    before = dict(completions.model.named_parameters())

    def note(_layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        types.update({args[0].dtype, hidden.dtype})

    layers = layers_of(completions.model)
    for layer in layers:
        layer.register_forward_hook(note)
    torch.autograd.backward(completions.logprobs(ROWS).sum())
    assert layers and types == {torch.bfloat16}
    after = dict(completions.model.named_parameters())
    assert after.keys() == before.keys() and all(after[key] is parameter for key, parameter in before.items())
    assert {parameter.dtype for parameter in after.values()} == {torch.float32}
    wide = CompletionModel(ModelConfig(config=MODELS[name], tokenizer="unused"), plain(MODELS[name]))
    wide.model.load_state_dict(named_weights(completions.model), strict=False)
    torch.autograd.backward(wide.logprobs(ROWS).sum())
    expected = dict(wide.model.named_parameters())
    gradients = [
        (parameter.grad, expected[key].grad) for key, parameter in after.items() if parameter.grad is not None
    ]
    assert len(gradients) == len(after)
    found, exact_gradient = (torch.cat([pair[index].flatten() for pair in gradients]) for index in (0, 1))
    assert found.dtype == torch.float32 and relative_error(found, exact_gradient) < 0.05


def plain(model: dict[str, Any]) -> Any:
    return placed_model(ModelConfig(config=model, tokenizer="unused"), 0)


@pytest.mark.parametrize("name", ["untied", "scaled embeddings and other norms", "biases"])
def test_recomputed_layers_and_chunks_of_logits_are_computed_as_narrow(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, again = made(MODELS[name]), made(MODELS[name])
    again.recompute_layers()
    monkeypatch.setattr(completion_model, "most_logits_bytes", lambda _device: 2 * 4 * 16)
    results = [each.logprobs(ROWS) for each in (kept, again)]
    for logprobs in results:
        torch.autograd.backward(logprobs.sum())
    assert torch.equal(*results)
    for parameter, other in zip(kept.model.parameters(), again.model.parameters(), strict=True):
        assert parameter.grad is not None and other.grad is not None
        assert torch.equal(parameter.grad, other.grad)


def test_a_reference_is_in_bfloat16_and_equal_to_the_policy_until_it_is_trained() -> None:
    setup = gang_setup({"name": "grpo", "kl_coefficient": 0.1}, dtype="bfloat16")
    policy = made_policy(ALONE, setup, None)
    assert policy.models.reference is not None
    weights = [tensor for name, tensor in policy.base_state().items() if name.startswith("reference")]
    assert weights and {tensor.dtype for tensor in weights} == {torch.bfloat16}
    policy.accumulate(make_samples(1))
    assert policy.optimizer_step().figures["kl"] == pytest.approx(0.0, abs=1e-12)
    policy.accumulate(make_samples(2, version=1))
    assert policy.optimizer_step().figures["kl"] > 1e-6
