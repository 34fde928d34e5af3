"""Small models, the embedded engine over them, and requests for it."""

import random
from collections.abc import Iterable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from flexmarl.actors.inference.engines.embedded.huggingface import TransformersEngine
from flexmarl.actors.inference.engines.engine import EngineRequest, EngineResult

VOCABULARY = 48
EOS = 5
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def head_counts(heads: int, kv_heads: int, head_dim: int) -> dict[str, int]:
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3-grouped": {"model_type": "qwen3", **head_counts(4, 2, 32)},
    "qwen3-one-kv-head": {"model_type": "qwen3", **head_counts(6, 1, 16)},
    "llama-plain": {"model_type": "llama", **head_counts(2, 2, 32)},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True, **head_counts(4, 2, 8)},
    "gpt2": {"model_type": "gpt2", "n_head": 2, "n_inner": 48},
}


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    return SIZES | ARCHITECTURES[name] | changes


def make_model(name: str = "qwen3-grouped", seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]  # transformers
        AutoConfig.for_model(**config_of(name)), attn_implementation="sdpa"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)  # a fresh model is nearly uniform: nothing would depend on the context
    model.train(False)
    model.requires_grad_(False)
    return model


def make_engine(
    name: str = "qwen3-grouped",
    stops: Iterable[int] = (),
    max_batch: int = 8,
    seed: int = 0,
    max_context: int = 200,
    **options: Any,
) -> Any:
    model = make_model(name, seed)
    return TransformersEngine(
        model, frozenset(stops), max_batch=max_batch, max_context=max_context, **options
    )


def make_requests(count: int, seed: int = 0, temperature: float | None = None) -> list[EngineRequest]:
    pick = random.Random(seed)
    return [
        EngineRequest(
            f"r{i}",
            tuple(pick.randrange(VOCABULARY) for _ in range(pick.choice([1, 2, 5, 17, 60]))),
            seed=pick.randrange(1 << 62),
            temperature=pick.choice([1.0, 0.7, 0.0]) if temperature is None else temperature,
            max_new_tokens=pick.choice([1, 2, 9, 40]),
        )
        for i in range(count)
    ]


def drain(engine: TransformersEngine) -> dict[str, EngineResult]:
    results: dict[str, EngineResult] = {}
    while engine.pending:
        for result in engine.step():
            assert result.request_id not in results
            results[result.request_id] = result
    return results


def run_all(
    engine: TransformersEngine, requests: list[EngineRequest], arrivals: int = 3
) -> dict[str, EngineResult]:
    """Give the engine ``arrivals`` requests before each step."""
    results: list[EngineResult] = []
    for first in range(0, len(requests), arrivals):
        for request in requests[first : first + arrivals]:
            engine.add(request)
        results += engine.step()
    by_id = {result.request_id: result for result in results}
    by_id.update(drain(engine))
    return by_id


@torch.no_grad()
def teacher_forced(model: PreTrainedModel, request: EngineRequest, tokens: tuple[int, ...]) -> torch.Tensor:
    """float64 [tokens]: log-probabilities by one full forward without a cache."""
    sequence = torch.tensor([request.prompt_tokens + tokens])
    logits = model(input_ids=sequence, use_cache=False).logits[0, len(request.prompt_tokens) - 1 : -1]
    logprobs = torch.log_softmax(logits.double() / (request.temperature or 1.0), -1)
    return logprobs.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
