"""Truncated distributions: engines and trainer agree on all log-probabilities, but for tokens that are counted."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from flexmarl.actors.inference.engines.embedded.huggingface import TransformersEngine
from flexmarl.actors.inference.engines.engine import EngineRequest, EngineResult
from flexmarl.actors.inference.engines.step_engine import StepEngine
from flexmarl.actors.messages import ModelConfig, Truncation
from flexmarl.actors.pretrained import empty_model
from flexmarl.actors.trainer.backends.torch_policy import completion_model
from flexmarl.actors.trainer.backends.torch_policy.completion_model import (
    CompletionModel,
    named_weights,
    placed_model,
)
from flexmarl.actors.trainer.padding import pad_rows
from flexmarl.actors.truncated_scores import Truncations

from .vllm_engines import made, model_of

VOCABULARY = 2048
ROUNDING = 1e-5
CUTS = [Truncation(*values) for values in itertools.product((0, 1, 30), (1.0, 0.8), (0.0, 0.05))][1:]
TEMPERATURES = (1.0, 0.6)


def embedded(model: ModelConfig) -> StepEngine:
    return TransformersEngine(empty_model(model), [], max_batch=8)


@pytest.fixture(params=[embedded, pytest.param(made, marks=pytest.mark.vllm)])
def make_engine(request: pytest.FixtureRequest) -> Iterator[Callable[[ModelConfig], StepEngine]]:
    made_engines: list[StepEngine] = []

    def make(model: ModelConfig) -> StepEngine:
        made_engines.append(request.param(model))
        return made_engines[-1]

    yield make
    for engine in made_engines:
        engine.close()


def results_of(
    engine: StepEngine, weights: Mapping[str, Any], requests: list[EngineRequest]
) -> list[EngineResult]:
    for name, tensor in engine.weights().items():
        if not engine.reads_in_place:
            tensor.copy_(weights[name])
    engine.weights_loaded(weights if engine.reads_in_place else engine.weights())
    for request in requests:
        engine.add(request)
    found: dict[str, EngineResult] = {}
    while engine.pending:
        found |= {result.request_id: result for result in engine.step()}
    return [found[request.request_id] for request in requests]


def trained(
    completions: CompletionModel, request: EngineRequest, result: EngineResult
) -> tuple[torch.Tensor, torch.Tensor]:
    """The trainer's log-probabilities [N], and the tokens that it counts as unsure."""
    assert request.truncation is not None
    cuts = Truncations.of([request.truncation], torch.device("cpu")).repeated([len(result.tokens)], ROUNDING)
    rows = pad_rows([(request.prompt_tokens, result.tokens)], VOCABULARY)
    with torch.no_grad():
        logprobs = completions.logprobs(rows, request.temperature, cuts)
    assert cuts.unsure is not None
    return logprobs, cuts.unsure


@pytest.mark.parametrize("chunked", [False, True])
def test_the_engine_and_the_trainer_agree_for_every_combination(
    make_engine: Callable[[ModelConfig], StepEngine], chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if chunked:
        monkeypatch.setattr(completion_model, "most_logits_bytes", lambda _device: 4 * VOCABULARY * 10)
    torch.set_num_threads(1)
    model = model_of(vocab_size=VOCABULARY)
    completions = CompletionModel(model, placed_model(model, 0))
    requests = [
        EngineRequest(f"{n} {temperature} {cut}", (1 + n, 2, 3), n, temperature, 32, truncation=cut)
        for n, (temperature, cut) in enumerate(itertools.product(TEMPERATURES, CUTS))
    ]
    results = results_of(make_engine(model), named_weights(completions.model), requests)
    unsure = tokens = 0
    for request, result in zip(requests, results, strict=True):
        logprobs, uncertain = trained(completions, request, result)
        apart = (logprobs.double() - torch.tensor(result.logprobs, dtype=torch.float64)).abs()
        assert len(result.tokens) == 32
        assert apart[~uncertain].max() < ROUNDING, request.request_id
        unsure, tokens = unsure + int(uncertain.sum()), tokens + 32
    assert unsure < 0.02 * tokens, "few tokens are at the edge of a support"


def test_rows_without_a_truncation_are_as_they_were(
    make_engine: Callable[[ModelConfig], StepEngine],
) -> None:
    model = model_of(vocab_size=VOCABULARY)
    weights = named_weights(CompletionModel(model, placed_model(model, 0)).model)
    engine = make_engine(model)
    plain = [EngineRequest(f"plain {n}", (1 + n, 2, 3), n, t, 16) for n, t in enumerate((0.0, 1.0, 0.7))]
    alone = results_of(engine, weights, plain)
    cut = [EngineRequest(f"cut {n}", (9, n), n, 1.0, 16, truncation=CUTS[n]) for n in range(3)]
    greedy = EngineRequest("greedy", (1, 2, 3), 7, 0.0, 16, truncation=Truncation(5, 0.5, 0.5))
    together = results_of(engine, weights, [*plain, *cut, greedy])
    assert [result.tokens for result in together[:3]] == [result.tokens for result in alone]
    for one, other in zip(together, alone, strict=False):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert together[-1].tokens == alone[0].tokens
    assert together[-1].logprobs == pytest.approx(alone[0].logprobs, abs=1e-5)
