"""The embedded engine's models: new and broken weights, other architectures, long contexts."""

from typing import Any

import pytest
import torch

from flexmarl.actors.errors import NonFiniteLogits, RequestsInFlight, UnsupportedModel
from flexmarl.actors.inference.engines.embedded.huggingface import TransformersEngine
from flexmarl.actors.inference.engines.engine import EngineRequest
from flexmarl.actors.messages import ModelConfig
from flexmarl.actors.pretrained import empty_model, load_model

from ..transformers_engines import (
    SIZES,
    config_of,
    head_counts,
    make_engine,
    make_model,
    make_requests,
    run_all,
)


def test_new_weights_are_used_and_nothing_is_left_of_the_old() -> None:
    requests = make_requests(8)
    engine = make_engine()
    before = run_all(engine, requests)
    source = make_model(seed=1).state_dict()
    assert engine.weights().keys() == source.keys()
    for name, tensor in engine.weights().items():
        tensor.copy_(source[name])
    engine.weights_loaded(engine.weights())
    after = run_all(engine, requests)
    assert after == run_all(make_engine(seed=1), requests)
    assert after != before


def test_weights_may_not_change_under_a_request() -> None:
    engine = make_engine()
    engine.add(EngineRequest("r", (1,), 0, 1.0, 3))
    with pytest.raises(RequestsInFlight, match="1 requests"):
        engine.weights_loaded(engine.weights())


def test_broken_weights_are_reported_and_can_be_replaced() -> None:
    engine = make_engine()
    requests = make_requests(6)
    good = {name: tensor.clone() for name, tensor in engine.weights().items()}
    expected = run_all(engine, requests)
    for tensor in engine.weights().values():
        tensor.fill_(torch.nan)
    engine.weights_loaded(engine.weights())
    engine.add(requests[0])
    with pytest.raises(NonFiniteLogits) as caught:
        engine.step()
    assert caught.value.request_ids == (requests[0].request_id,)
    assert engine.pending == 1 and engine.abort(requests[0].request_id)
    for name, tensor in engine.weights().items():
        tensor.copy_(good[name])
    engine.weights_loaded(engine.weights())
    assert run_all(engine, requests) == expected


def test_weights_that_break_while_decoding_leave_the_requests_to_be_aborted() -> None:
    engine = make_engine()
    engine.add(EngineRequest("a", (1, 2), 0, 1.0, 30))
    engine.step()
    engine.weights()["lm_head.weight"].fill_(torch.nan)
    for _ in range(2):
        with pytest.raises(NonFiniteLogits):
            engine.step()
    assert engine.abort("a") and not engine.pending


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}, "sliding_attention"),
        ({"model_type": "mistral", "sliding_window": 8}, "sliding window of 8"),
        ({"model_type": "stablelm"}, "its own attention code"),
    ],
)
def test_other_architectures_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    config = config_of("qwen3-grouped") | {"use_sliding_window": True} | changes
    model = empty_model(ModelConfig(config=config, tokenizer="none"))
    with pytest.raises(UnsupportedModel, match=named):
        TransformersEngine(model, [], max_batch=2, max_context=64)


def test_a_context_beyond_the_positions_of_the_model_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="256 positions"):
        TransformersEngine(make_model(), [], max_batch=2, max_context=257)


def _longrope(original: int) -> ModelConfig:
    factors = {
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "rope_type": "longrope",
        "rope_theta": 1e4,
    }
    config = SIZES | {"model_type": "phi3", "num_attention_heads": 4, "num_key_value_heads": 2}
    rope = factors | {"original_max_position_embeddings": original}
    return ModelConfig(
        config=config | {"original_max_position_embeddings": original, "rope_parameters": rope},
        tokenizer="none",
    )


def test_longrope_is_refused_across_its_switch_and_right_before_it() -> None:
    with pytest.raises(
        UnsupportedModel, match=r"change behind 24 tokens.*set engine.max_context to 24 or less"
    ):
        TransformersEngine(empty_model(_longrope(24)), [], max_batch=2, max_context=25)
    torch.manual_seed(0)
    model, plain = (load_model(_longrope(24), torch.float32) for _ in range(2))
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            ours.copy_(theirs.mul_(4) if theirs.ndim > 1 else theirs)
    engine = TransformersEngine(model.requires_grad_(False), [], max_batch=2, max_context=24)
    requests = [EngineRequest(str(n), (1, 2, 3) * n, n, 1.0, 24 - 3 * n) for n in (1, 4)]
    results = run_all(engine, requests)
    for request in requests:
        row = torch.tensor([[*request.prompt_tokens, *results[request.request_id].tokens]])
        assert row.shape[1] == 24
        logprobs = plain(input_ids=row).logits[0].log_softmax(-1)
        expected = [
            logprobs[position - 1, row[0, position]].item()
            for position in range(len(request.prompt_tokens), 24)
        ]
        assert results[request.request_id].logprobs == pytest.approx(expected, abs=1e-4)


def test_a_mixture_whose_config_asks_for_router_losses_generates() -> None:
    mixture = {
        "model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16, "output_router_logits": True, **head_counts(4, 2, 8),
    }  # fmt: skip
    model = load_model(ModelConfig(config=SIZES | mixture, tokenizer="none"), torch.float32)
    engine = TransformersEngine(model.requires_grad_(False), [], max_batch=2, max_context=64)
    results = run_all(engine, [EngineRequest(str(n), (1,) * (n + 1), n, 1.0, 5) for n in range(3)])
    assert all(len(result.tokens) == 5 for result in results.values())


def test_bfloat16_generates() -> None:
    config = ModelConfig(config=config_of("qwen3-grouped"), tokenizer="none", dtype="bfloat16")
    engine = TransformersEngine(empty_model(config), [], max_batch=4, max_context=64)
    source = make_model().state_dict()
    for name, tensor in engine.weights().items():
        assert tensor.dtype == torch.bfloat16
        tensor.copy_(source[name])
    engine.weights_loaded(engine.weights())
    results = run_all(engine, [EngineRequest(str(i), (1,) * (i + 1), i, 1.0, 20) for i in range(6)])
    assert all(len(result.tokens) == 20 for result in results.values())
