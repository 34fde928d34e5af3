"""Samples end to end in one row: the numbers of padded ones, with any model, algorithm and mixture of lengths."""

import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flexmarl.actors.messages import LoraConfig, ModelConfig, Sample, Truncation
from flexmarl.actors.trainer import padding
from flexmarl.actors.trainer.backends.backend_config import TorchTrainerConfig
from flexmarl.actors.trainer.backends.torch_policy import completion_model, packed_attention
from flexmarl.actors.trainer.backends.torch_policy.completion_model import CompletionModel, placed_model
from flexmarl.actors.trainer.backends.torch_policy.gang_rank import ALONE
from flexmarl.actors.trainer.backends.torch_policy.packed_attention import (
    GROUPED,
    VARLEN,
    packing_obstacle,
    varlen_attention,
    varlen_obstacle,
)
from flexmarl.actors.trainer.padding import PaddedRows, TokenRow, pack_rows, pad_rows

from .gang_cases import ALGORITHMS
from .policies import SMALLER_MODEL, make_samples, relative_error
from .ranks import Call, Ranks, called, double_precision, gang_setup, made_policy, train, whole_gradients
from .test_completion_model import MODELS

LENGTHS = ((6, 5), (1, 1), (2, 4), (3, 9), (1, 2), (7, 1))
MORE_MODELS: dict[str, dict[str, Any]] = MODELS | {
    "capped": MODELS["capped"] | {"layer_types": ["full_attention"]},
    "mixture": SMALLER_MODEL
    | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "latent": {"model_type": "deepseek_v3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
               "first_k_dense_replace": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 16,
               "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "head_dim": 8,
               "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1,
               "topk_group": 1, "vocab_size": 16, "max_position_embeddings": 32},
}  # fmt: skip
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "window": ({"model_type": "mistral", "sliding_window": 8}, "sliding window"),
    "windows of some layers": (
        {"model_type": "gemma3_text", "layer_types": ["full_attention", "sliding_attention"],
         "num_hidden_layers": 2},
        "sliding_attention",
    ),
    "linear": ({"model_type": "qwen3_next", "num_hidden_layers": 4, "num_experts": 2}, "linear_attention"),
    "own mask": ({"model_type": "doge"}, "mask"),
    "drops arguments": ({"model_type": "nemotron"}, "no arguments"),
    "own code": ({"model_type": "stablelm"}, "AttentionInterface"),
}  # fmt: skip


def rows_of(lengths: Sequence[tuple[int, int]], seed: int = 0) -> list[TokenRow]:
    rng = random.Random(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(16) for _ in range(count))

    rows = [(tokens(prompt), tokens(completion)) for prompt, completion in lengths]
    return sorted(rows, key=lambda row: -len(row[0]) - len(row[1]))  # as they are packed


def made(config: dict[str, Any]) -> CompletionModel:
    model_config = ModelConfig(config=config, tokenizer="unused")
    return CompletionModel(model_config, placed_model(model_config, 0))


def numbers(model: CompletionModel, rows: PaddedRows) -> list[Tensor]:
    """The log-probabilities, and the gradient of a weighted sum of them."""
    model.model.zero_grad()
    logprobs = model.logprobs(rows, 0.7)
    torch.autograd.backward((logprobs * torch.linspace(-1, 2, len(logprobs))).sum())
    return [logprobs.detach(), *(p.grad.clone() for p in model.model.parameters() if p.grad is not None)]


def same(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    assert len(found) == len(expected)
    scale = max(float(tensor.norm()) for tensor in expected[1:])
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=tolerance)
    for tensor, other in zip(found[1:], expected[1:], strict=True):
        assert float((tensor - other).norm()) <= tolerance * scale


@pytest.mark.parametrize("worth", [1, 10**6], ids=["many groups", "one group"])
@pytest.mark.parametrize("name", MORE_MODELS)
def test_packed_equals_padded(name: str, worth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = made(MORE_MODELS[name]), rows_of(LENGTHS)
    expected = numbers(model, pad_rows(rows, 16))
    assert model.pack()
    monkeypatch.setattr(padding, "WORTH_DIVIDING_TOKENS", worth)
    packed = pack_rows(rows, 16)
    assert packed.packing is not None and (len(packed.packing.groups) == 1) == (worth > 1)
    same(numbers(model, packed), expected, 1e-6)
    same(numbers(model, pad_rows(rows, 16)), expected, 1e-6)


def test_packed_equals_a_mask_of_blocks() -> None:
    """transformers makes the mask itself from positions that fall back to 0."""
    model, rows = made(MODELS["untied"]), rows_of(LENGTHS)
    model.model.double()
    packed = pack_rows(rows, 16)
    assert packed.packing is not None
    positions = packed.packing.token_positions
    expected = model.model(input_ids=packed.input_ids, position_ids=positions, use_cache=False).logits
    assert model.pack()
    torch.testing.assert_close(model.model(**packed.model_inputs).logits, expected, rtol=0, atol=1e-12)


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=12), st.integers(1, 60)
)
def test_any_mixture_of_lengths_gives_the_same_numbers(lengths: list[tuple[int, int]], worth: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(padding, "WORTH_DIVIDING_TOKENS", worth)
        model, rows = made(SMALLER_MODEL), rows_of(lengths)
        model.model.double()
        expected = numbers(model, pad_rows(rows, 16))
        model.pack()
        same(numbers(model, pack_rows(rows, 16)), expected, 1e-12)


def cut(samples: Sequence[Sample]) -> list[Sample]:
    """Samples of several temperatures and truncations."""
    truncations = (None, Truncation(top_k=9), Truncation(top_p=0.95))
    return [
        replace(sample, temperature=0.6 + 0.2 * (number % 3), truncation=truncations[number % 3])
        for number, sample in enumerate(samples)
    ]


def calls_of(samples: Sequence[Sample]) -> list[Call]:
    """Three micro-batches, which stream in."""
    return [("accumulate", list(samples[start::3])) for start in range(3)]


def setups(name: str, tokens: int, **settings: Any) -> list[Any]:
    """Setups of the same policy: padded, packed."""
    return [
        gang_setup(
            ALGORITHMS[name],
            trainer=TorchTrainerConfig(
                packing=packing, tokens_per_forward=tokens, activation_checkpointing=True
            ),
            num_hidden_layers=2,
            **settings,
        )
        for packing in (False, True)
    ]


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=3, alpha=7)], ids=["all weights", "adapter"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_gets_the_gradient_of_padded_samples(
    name: str, lora: LoraConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, with a critic, references, truncations, logits in chunks and several forwards."""
    monkeypatch.setattr(completion_model, "most_logits_bytes", lambda _device: 7 * 4 * 18)
    samples = cut(make_samples(1))
    policies = [made_policy(ALONE, setup, None) for setup in setups(name, 60, lora=lora)]
    assert [policy.models.packs for policy in policies] == [False, True]
    for policy in policies:
        called(policy, [*calls_of(samples), *([("step", None)] if name == "held" else [])][:3])
        if policy._position.held:
            policy._later_updates()
    padded, packed = (whole_gradients(policy) for policy in policies)
    assert padded.keys() == packed.keys()
    tensors = [[torch.from_numpy(each[key]).flatten() for key in padded] for each in (packed, padded)]
    # Between the updates of `held` the optimizer has stepped: Adam divides small gradients by their own size, so that
    # their rounding, which each processor has another of, is as large as that of great ones.
    assert relative_error(*(torch.cat(each) for each in tensors)) < (1e-5 if name == "held" else 1e-6)
    steps = [policy.optimizer_step() for policy in policies if name != "held"]
    for figure in steps[0].figures if steps else ():
        if figure != "padding_share":
            assert steps[1].figures[figure] == pytest.approx(steps[0].figures[figure], rel=1e-4, abs=1e-6)


def test_supervised_batches_have_the_same_loss() -> None:
    examples = rows_of(LENGTHS)
    with double_precision():
        losses = [made_policy(ALONE, setup, None).sft(examples) for setup in setups("dapo", 60)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["critic", "held"])
def test_ranks_with_packed_samples_have_the_gradient_of_padded_ones(
    ranks: Ranks, name: str, size: int
) -> None:
    padded, packed = setups(name, 40)
    calls = [*calls_of(cut(make_samples(1))), ("step", None)]
    expected = ranks.run_alone(train, (padded, calls))[0]
    for found in ranks.run(size, train, packed, calls):
        for key, weight in found.weights.items():
            torch.testing.assert_close(
                torch.from_numpy(weight), torch.from_numpy(expected.weights[key]), rtol=1e-9, atol=1e-11
            )


# ----------------------------------------------------------------------- models that can't


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_whose_rows_must_be_padded_keeps_its_attention(name: str) -> None:
    config, reason = REFUSED[name]
    model = made(SMALLER_MODEL | {"hidden_size": 32, "max_position_embeddings": 32} | config)
    assert reason in str(packing_obstacle(model.model))
    before = model.model.config._attn_implementation
    assert not model.pack() and model.model.config._attn_implementation == before


def test_a_model_that_drops_the_arguments_of_its_attention_is_refused_in_its_first_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packed_attention, "_SILENT", frozenset())
    model = made(SMALLER_MODEL | {"model_type": "nemotron"})
    assert model.pack()
    with pytest.raises(RuntimeError, match=r"trainer\.packing"):
        model.logprobs(pack_rows(rows_of(LENGTHS), 16))


# ----------------------------------------------------------------------- the kernel of a GPU


def varlen_module(settings: dict[str, Any], *, mixes: bool = False) -> ModuleType:
    """A module in place of torch's, with the arguments ``settings``; it computes row by row on a CPU."""

    def attend(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, scale: float | None) -> Tensor:
        bounds = [0, int(ends[-1])] if mixes else ends.tolist()
        rows = []
        for start, stop in pairwise(bounds):
            q, k, v = (tensor[start:stop].transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
            rows.append(
                torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=True, scale=scale, enable_gqa=True
                )
            )
        return torch.cat(rows, 2)[0].transpose(0, 1)

    def first(
        q: Any, k: Any, v: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, is_causal: bool
    ) -> Any:
        assert is_causal and cu_seq_q is cu_seq_k and max_q == max_k
        return attend(q, k, v, cu_seq_q, None)

    def later(q: Any, k: Any, v: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, *,
              scale: float | None, window_size: tuple[int, int], enable_gqa: bool = False) -> Any:  # fmt: skip
        assert window_size == (-1, 0) and cu_seq_q is cu_seq_k and max_q == max_k
        assert enable_gqa == (q.shape[1] != k.shape[1])
        return attend(q, k, v, cu_seq_q, scale)

    module = ModuleType("torch.nn.attention.varlen")
    module.varlen_attn = first if settings.get("is_causal") else later  # type: ignore[attr-defined]
    return module


@pytest.fixture(params=[True, False], ids=["2.10", "later"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    module = varlen_module({"is_causal": request.param})
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
    monkeypatch.setattr(torch.nn.attention, "varlen", module, raising=False)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("name", ["untied", "scaled", "latent", "gpt2"])
def test_variable_lengths_give_the_numbers_of_padded_rows(name: str) -> None:
    model, rows = made(MORE_MODELS[name]), rows_of(LENGTHS)
    expected = numbers(model, pad_rows(rows, 16))
    assert model.pack()
    model.model.set_attn_implementation(VARLEN)
    same(numbers(model, pack_rows(rows, 16)), expected, 1e-6)
    same(numbers(model, pad_rows(rows, 16)), expected, 1e-6)


@pytest.mark.usefixtures("kernel")
def test_the_kernel_gets_the_type_of_autocast() -> None:
    packing = pack_rows(rows_of(LENGTHS), 16).packing
    assert packing is not None
    query, key, value = (torch.randn(1, 2, int(packing.ends[-1]), 8) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        output, _ = varlen_attention(torch.nn.Module(), query, key, value, None, packing, scaling=8**-0.5)
    assert output.dtype == torch.bfloat16 and output.shape == (1, int(packing.ends[-1]), 2, 8)


@pytest.mark.usefixtures("kernel")
def test_a_kernel_that_is_right_is_chosen() -> None:
    assert varlen_obstacle.__wrapped__(torch.device("cpu"), torch.bfloat16, 4, 2, 8) is None


def test_a_kernel_that_mixes_up_rows_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.attention, "varlen", varlen_module({}, mixes=True), raising=False)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", torch.nn.attention.varlen)
    assert "its error on a probe" in str(
        varlen_obstacle.__wrapped__(torch.device("cpu"), torch.bfloat16, 4, 2, 8)
    )


def test_a_torch_without_the_kernel_is_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    reason = varlen_obstacle.__wrapped__(torch.device("cpu"), torch.bfloat16, 4, 2, 8)
    assert "varlen" in str(reason)


@pytest.mark.parametrize("reason", [None, "no kernel"])
def test_a_gpu_takes_variable_lengths_if_its_kernel_works(
    reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_attention, "varlen_obstacle", lambda *_: reason)
    model = made(MODELS["untied"]).model
    assert packed_attention.pack_attention(model, torch.device("cuda"), torch.bfloat16)
    assert model.config._attn_implementation == (GROUPED if reason else VARLEN)
    assert packed_attention.pack_attention(model, torch.device("cuda"), torch.float32)
    assert model.config._attn_implementation == GROUPED
