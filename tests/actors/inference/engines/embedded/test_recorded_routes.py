"""The experts of an engine's tokens: those that a forward over the whole sequence chooses, however it was computed."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM

from flexmarl.actors.inference.engines.embedded.huggingface import TransformersEngine
from flexmarl.actors.inference.engines.engine import EngineRequest, EngineResult
from flexmarl.actors.routers import RouteRecorder

from ..transformers_engines import SIZES, drain, head_counts, make_requests, run_all

MIXTURE = SIZES | head_counts(4, 2, 8) | {
    "model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "num_hidden_layers": 3, "mlp_only_layers": [1],
}  # fmt: skip


def mixture() -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MIXTURE))  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    return model.train(False).requires_grad_(False)


def engine_of(**options: Any) -> TransformersEngine:
    settings = {"max_batch": 4, "max_context": 128, "records_routes": True} | options
    return TransformersEngine(mixture(), [], **settings)


def expected(request: EngineRequest, result: EngineResult) -> NDArray[Any]:
    model = mixture()
    recorder = RouteRecorder(model)
    with torch.no_grad():
        model(torch.tensor([(request.prompt_tokens + result.tokens)[:-1]]), use_cache=False)
    return np.asarray(recorder.take().numpy())


def check(request: EngineRequest, result: EngineResult) -> None:
    assert result.routes is not None
    assert result.routes.dtype == np.uint8
    # The order of two experts may be another one: their scores round otherwise in a batch.
    assert np.array_equal(np.sort(result.routes), np.sort(expected(request, result)))


@pytest.mark.parametrize(
    "options",
    [{}, {"prefill_chunk": 7}, {"prefix_reuse": False}, {"max_batch": 2}],
    ids=["as it is", "chunks", "no reuse", "few rows"],
)
def test_all_tokens_but_the_last_have_their_routes(options: dict[str, Any]) -> None:
    requests = make_requests(16, seed=3)
    results = run_all(engine_of(**options), requests)
    for request in requests:
        check(request, results[request.request_id])


def test_a_reused_beginning_and_equal_prompts_have_theirs() -> None:
    engine = engine_of()
    first = EngineRequest("first", tuple(range(1, 31)), 1, 1.0, 12)
    results = run_all(engine, [first])
    rest = first.prompt_tokens + results["first"].tokens
    later = [EngineRequest(name, (*rest, 7, 9), seed, 1.0, 6) for seed, name in enumerate(("a", "b", "c"))]
    results |= run_all(engine, later)
    assert engine.statistics().reused_tokens > 30
    for request in (first, *later):
        check(request, results[request.request_id])


def test_an_interrupted_turn_has_the_routes_of_its_tokens() -> None:
    engine = engine_of()
    requests = [EngineRequest(f"r{number}", (1, 2, 3 + number), number, 1.0, 40) for number in range(3)]
    for request in requests:
        engine.add(request)
    for _ in range(9):
        engine.step()
    aborted = engine.abort("r1")
    assert aborted is not None and 0 < len(aborted.tokens) < 40
    check(requests[1], aborted)
    for name, result in drain(engine).items():
        check(requests[int(name[1:])], result)


def test_a_cut_answer_has_the_routes_of_what_is_left() -> None:
    request = EngineRequest("r", (1, 2, 3), 0, 1.0, 20)
    whole = run_all(engine_of(), [request])["r"]
    cut = whole.first(5, "stop")
    assert (cut.tokens, cut.logprobs, cut.finish_reason) == (whole.tokens[:5], whole.logprobs[:5], "stop")
    check(request, cut)
    assert whole.first(0, "interrupted").routes is None


def test_routes_take_memory_of_keys_and_values_and_only_if_they_are_recorded() -> None:
    plain, recording = engine_of(records_routes=False), engine_of()
    assert recording._cache.token_bytes == plain._cache.token_bytes + 3 * 2
    request = EngineRequest("r", (1, 2, 3), 0, 1.0, 20)
    without, recorded = (run_all(engine, [request])["r"] for engine in (plain, recording))
    assert without.routes is None
    assert (recorded.tokens, recorded.logprobs) == (without.tokens, without.logprobs)
