"""The fused forward against the models' own: the same computation, the same parameters, and always verified."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from flexmarl.actors.inference.engines.embedded import llama_forward
from flexmarl.actors.inference.engines.embedded.forward import ModuleForward
from flexmarl.actors.inference.engines.embedded.huggingface import TransformersEngine
from flexmarl.actors.inference.engines.embedded.llama_forward import (
    TOLERANCE,
    FusedLlamaForward,
    relative_difference,
    unsupported_reason,
)
from flexmarl.actors.inference.engines.embedded.prompt_batch import PromptBatch
from flexmarl.actors.inference.engines.engine import EngineRequest, EngineResult
from flexmarl.actors.messages import ModelConfig
from flexmarl.actors.pretrained import empty_model

VOCABULARY = 48
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _config(model_type: str, heads: int, kv_heads: int, head_dim: int = 16, **changes: Any) -> dict[str, Any]:
    heads_config = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    return SIZES | heads_config | {"model_type": model_type} | changes


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
SUPPORTED: dict[str, dict[str, Any]] = {
    "llama": _config("llama", 2, 2),
    "llama-grouped-tied": _config("llama", 4, 2, 8, tie_word_embeddings=True),
    "llama-biases": _config("llama", 4, 1, attention_bias=True, mlp_bias=True),
    "llama-stretched": _config("llama", 2, 1, rope_parameters=LLAMA3),
    "mistral": _config("mistral", 4, 2, sliding_window=None),
    "qwen2": _config("qwen2", 2, 1),
    "qwen2-tied": _config("qwen2", 2, 2, tie_word_embeddings=True),
    "qwen3": _config("qwen3", 4, 2, 32),
    "qwen3-one-kv-head": _config("qwen3", 6, 1, tie_word_embeddings=True),
    "qwen3-biases-yarn": _config("qwen3", 2, 2, attention_bias=True, rope_parameters=YARN),
}
UNSUPPORTED: dict[str, dict[str, Any]] = {
    "unknown": SIZES | {"model_type": "gpt2", "n_head": 2, "n_inner": 48},
    "activation is gelu": _config("llama", 2, 2, hidden_act="gelu"),
    "rotary embedding is dynamic": _config(
        "llama", 2, 2, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    ),
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def _randomise(model: PreTrainedModel, seed: int = 0) -> None:
    """Biases and norms too, and large enough that every part shows in the logits."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.3 * noise if parameter.ndim > 1 else 1 + 0.3 * noise)


def _model(config: dict[str, Any], dtype: str = "float32") -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]  # transformers
        AutoConfig.for_model(**config), dtype=getattr(torch, dtype), attn_implementation="sdpa"
    )
    _randomise(model)
    model.requires_grad_(False)
    model.train(False)
    return model


def _generate(engine: TransformersEngine) -> dict[str, tuple[EngineRequest, EngineResult]]:
    """Prompts of several lengths, one of them twice, that are followed by generations of several lengths."""
    prompts = [tuple(range(i, i + length)) for i, length in enumerate((1, 17, 5, 5, 30, 3, 2, 9))]
    requests = {
        str(i): EngineRequest(str(i), prompt, i, 1.0, 5 + 9 * (i % 3))
        for i, prompt in enumerate([*prompts, prompts[1]])
    }
    for request in requests.values():
        engine.add(request)
    results: list[EngineResult] = []
    while engine.pending:
        results += engine.step()
    return {result.request_id: (requests[result.request_id], result) for result in results}


@torch.no_grad()
def _full_forward(model: PreTrainedModel, request: EngineRequest, result: EngineResult) -> torch.Tensor:
    sequence = torch.tensor([request.prompt_tokens + result.tokens])
    logits = model(input_ids=sequence, use_cache=False).logits[0, len(request.prompt_tokens) - 1 : -1]
    logprobs = torch.log_softmax(logits.double(), -1)
    return logprobs.gather(1, torch.tensor(result.tokens).unsqueeze(1)).squeeze(1)


def _assert_like_the_module(engine: TransformersEngine, reference: PreTrainedModel, atol: float) -> None:
    exact: Any = copy.deepcopy(reference).double()  # without rounding of its own
    for request, result in _generate(engine).values():
        expected = _full_forward(exact, request, result)
        torch.testing.assert_close(torch.tensor(result.logprobs).double(), expected, atol=atol, rtol=0)


@pytest.mark.parametrize("name", SUPPORTED)
def test_logprobs_equal_a_full_forward(name: str) -> None:
    model = _model(SUPPORTED[name])
    reference = copy.deepcopy(model)
    engine = TransformersEngine(model, [], max_batch=6)
    assert isinstance(engine._forward, FusedLlamaForward)
    _assert_like_the_module(engine, reference, 1e-5)


@pytest.mark.parametrize("name", ["llama-biases", "qwen2", "qwen3", "mistral"])
def test_bfloat16_is_as_near_to_the_truth_as_the_module(name: str) -> None:
    model = _model(SUPPORTED[name], "bfloat16")
    truth = _model(SUPPORTED[name])
    truth.load_state_dict(model.state_dict())
    own = copy.deepcopy(model)
    engine = TransformersEngine(model, [], max_batch=6)
    assert isinstance(engine._forward, FusedLlamaForward)
    ours, theirs = [], []
    for request, result in _generate(engine).values():
        exact = _full_forward(truth, request, result)
        ours.append((torch.tensor(result.logprobs) - exact).abs())
        theirs.append((_full_forward(own, request, result) - exact).abs())
    assert torch.cat(ours).mean() < 1.5 * torch.cat(theirs).mean()


@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_other_models_compute_as_they_do(reason: str) -> None:
    model = _model(UNSUPPORTED[reason])
    assert reason in str(unsupported_reason(model))
    reference = copy.deepcopy(model)
    engine = TransformersEngine(model, [], max_batch=6)
    assert isinstance(engine._forward, ModuleForward)
    _assert_like_the_module(engine, reference, 1e-5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: model.model.layers[1].mlp.add_module("extra", torch.nn.Identity()), "other parts"),
        (lambda model: model.model.layers[1].self_attn.add_module("gate", torch.nn.Identity()), "attention"),
        (lambda model: model.model.norm.to(torch.float64), "several dtypes"),
        (lambda model: setattr(model.model.layers[0].mlp, "up_proj", _Quantised(32, 40)), "not plain"),
        (lambda model: setattr(model, "lm_head", torch.nn.Linear(32, VOCABULARY)), "output layer"),
        (
            lambda model: setattr(model.model.layers[0], "input_layernorm", torch.nn.LayerNorm(32)),
            "root-mean-square",
        ),
    ],
)
def test_a_changed_model_is_unsupported(change: Callable[[Any], None], reason: str) -> None:
    model = _model(SUPPORTED["llama"])
    assert unsupported_reason(model) is None
    change(model)
    assert reason in str(unsupported_reason(model))


class _Quantised(torch.nn.Linear):
    pass


@pytest.mark.parametrize("name", ["llama-biases", "qwen2-tied", "qwen3"])
def test_parameters_keep_their_names_shapes_and_values(name: str) -> None:
    model = _model(SUPPORTED[name])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = TransformersEngine(model, [], max_batch=2)
    assert isinstance(engine._forward, FusedLlamaForward)
    after = model.state_dict()
    assert list(after) == list(before) and all(after[name].equal(before[name]) for name in before)
    tied = {"lm_head.weight"} if SUPPORTED[name].get("tie_word_embeddings") else set()
    assert engine.weights().keys() == before.keys() - tied
    tokens = torch.arange(20).reshape(2, 10)
    fresh = _model(SUPPORTED[name])
    fresh.load_state_dict(after)
    torch.testing.assert_close(model(tokens).logits, fresh(tokens).logits)


@pytest.mark.parametrize("name", SUPPORTED)
def test_what_is_written_into_the_weights_is_in_effect(name: str) -> None:
    engine = TransformersEngine(_model(SUPPORTED[name]), [], max_batch=6)
    other = _model(SUPPORTED[name])
    _randomise(other, seed=1)
    source = other.state_dict()
    for key, tensor in engine.weights().items():
        tensor.copy_(source[key])
    engine.weights_loaded(engine.weights())
    assert isinstance(engine._forward, FusedLlamaForward)
    _assert_like_the_module(engine, other, 1e-5)


def test_nothing_is_held_twice() -> None:
    model: Any = _model(SUPPORTED["qwen3-biases-yarn"])
    FusedLlamaForward(model, 64)
    attention = model.model.layers[0].self_attn
    storages = {getattr(attention, name).weight.untyped_storage().data_ptr() for name in ("q_proj", "k_proj")}
    assert len(storages) == 1
    held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in model.parameters()}
    assert sum(storage.nbytes() for storage in held.values()) == sum(p.nbytes for p in model.parameters())


WRONG: dict[str, Callable[..., torch.Tensor]] = {
    "no rotation": lambda x, cos, sin: x * 1,
    "the other direction": lambda x, cos, sin: torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), -sin),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_formula_is_found_and_dropped(
    wrong: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_forward, "rotate", WRONG[wrong])
    model = _model(SUPPORTED["qwen3"], dtype)
    reference = copy.deepcopy(model)
    with capture_logs() as logs:
        engine = TransformersEngine(model, [], max_batch=6)
    assert isinstance(engine._forward, ModuleForward)
    (line,) = logs
    assert line["log_level"] == "warning" and line["model"] == "Qwen3ForCausalLM"
    assert line["relative_difference"] > line["tolerance"] == TOLERANCE[getattr(torch, dtype)]
    _assert_like_the_module(engine, reference, 1e-5 if dtype == "float32" else 0.5)


@pytest.mark.parametrize("name", SUPPORTED)
def test_the_tolerance_is_far_from_the_rounding(name: str) -> None:
    for dtype in ("float32", "bfloat16"):
        model = _model(SUPPORTED[name], dtype)
        found = relative_difference(FusedLlamaForward(model, 32), ModuleForward(model), model)
        assert found is not None and found < TOLERANCE[model.dtype] / 2


def test_the_proof_waits_for_weights_that_tell() -> None:
    engine = TransformersEngine(
        empty_model(ModelConfig(config=SUPPORTED["qwen3"], tokenizer="none")), [], max_batch=2
    )
    assert engine._fused_is_verified is None
    source = _model(SUPPORTED["qwen3"]).state_dict()
    for value in (torch.nan, None):
        for key, tensor in engine.weights().items():
            tensor.copy_(source[key]) if value is None else tensor.fill_(value)
        engine.weights_loaded(engine.weights())
        assert engine._fused_is_verified is (None if value else True)
    assert isinstance(engine._forward, FusedLlamaForward)


def test_a_prompt_that_is_given_often_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model(SUPPORTED["qwen3"])
    reference = copy.deepcopy(model)
    engine = TransformersEngine(model, [], max_batch=9)
    computed = []
    prefill = FusedLlamaForward.prefill

    def counting(self: FusedLlamaForward, cache: Any, batch: PromptBatch) -> torch.Tensor:
        computed.append(len(batch.tokens))
        return prefill(self, cache, batch)

    monkeypatch.setattr(FusedLlamaForward, "prefill", counting)
    _assert_like_the_module(engine, reference, 1e-5)
    assert computed == [8]  # of nine
