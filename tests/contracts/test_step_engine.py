"""The contract of every ``StepEngine``."""

import itertools
from collections.abc import Callable
from dataclasses import fields

import pytest
import torch

from flexmarl.actors.errors import InvalidRequest, PromptTooLong, RequestsInFlight
from flexmarl.actors.inference.engines.embedded.huggingface import TransformersEngine
from flexmarl.actors.inference.engines.engine import EngineRequest, EngineResult
from flexmarl.actors.inference.engines.simulated_step_engine import SimulatedStepEngine
from flexmarl.actors.inference.engines.step_engine import StepEngine
from flexmarl.actors.inference.inference_config import SimulatedEngineConfig
from flexmarl.actors.messages import ModelConfig
from flexmarl.actors.pretrained import empty_model

MAX_CONTEXT = 64
LLAMA = {
    "model_type": "llama", "vocab_size": 16, "hidden_size": 16, "intermediate_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": MAX_CONTEXT,
}  # fmt: skip


def _transformers() -> StepEngine:
    torch.set_num_threads(1)
    engine = TransformersEngine(empty_model(ModelConfig(config=LLAMA, tokenizer="none")), [], max_batch=2)
    generator = torch.Generator().manual_seed(1)
    for tensor in engine.weights().values():
        tensor.normal_(0.0, 0.5, generator=generator)
    engine.weights_loaded(engine.weights())
    return engine


def _simulated() -> StepEngine:
    # answers that are always cut off, and a clock that advances by less than a token each time it is read
    config = SimulatedEngineConfig(
        median_tokens=1e9, sigma=0.0, token_s=1.0, max_batch=2, max_context=MAX_CONTEXT
    )
    clock = itertools.count(0.0, 0.4)
    return SimulatedStepEngine(config, clock.__next__)


def _results(engine: StepEngine) -> list[EngineResult]:
    returned = []
    while engine.pending:
        returned += engine.step()
    return returned


ENGINES: dict[str, Callable[[], StepEngine]] = {"transformers": _transformers, "simulated": _simulated}


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> StepEngine:
    return ENGINES[request.param]()


def _request(name: str = "a", prompt: int = 3, new: int = 4, seed: int = 0) -> EngineRequest:
    return EngineRequest(name, (1,) * prompt, seed, 1.0, new)


def test_what_is_added_comes_back_once(engine: StepEngine) -> None:
    for name in "abcde":
        engine.add(_request(name))
    assert engine.pending == 5
    returned = _results(engine)
    assert sorted(result.request_id for result in returned) == list("abcde")
    assert all(len(result.tokens) == len(result.logprobs) == 4 for result in returned)
    assert all(result.finish_reason == "length" for result in returned)
    assert engine.step() == []


def test_digests_are_of_all_weights_and_follow_each(engine: StepEngine) -> None:
    before, weights = dict(engine.digests()), engine.weights()
    if not before:
        return  # it can't read them
    assert before.keys() == weights.keys() and engine.digests() == before
    for name, tensor in weights.items():
        tensor.view(-1)[-1:].add_(1.0)
        now = dict(engine.digests())
        assert [other for other in now if now[other] != before[other]] == [name]
        before = now


def test_an_id_may_be_used_again_but_not_twice_at_once(engine: StepEngine) -> None:
    engine.add(_request())
    with pytest.raises(InvalidRequest, match="in use"):
        engine.add(_request())
    assert engine.pending == 1
    while engine.pending:
        engine.step()
    engine.add(_request())


def test_a_request_has_to_fit_the_context(engine: StepEngine) -> None:
    engine.add(_request("fits", prompt=MAX_CONTEXT - 4))
    with pytest.raises(PromptTooLong, match=r"request long: 61 prompt tokens \+ 4 .* 64") as caught:
        engine.add(_request("long", prompt=MAX_CONTEXT - 3))
    assert (caught.value.prompt_tokens, caught.value.max_new_tokens, caught.value.max_context) == (61, 4, 64)
    assert engine.pending == 1
    while engine.pending:
        engine.step()


def test_tokens_outside_the_vocabulary_are_refused(engine: StepEngine) -> None:
    for token in (-1, 1_000_000):
        with pytest.raises(InvalidRequest, match="vocabulary"):
            engine.add(EngineRequest("a", (1, token), 0, 1.0, 4))
    assert engine.pending == 0


@pytest.mark.parametrize(
    ("prompt", "temperature", "new", "resumed_tokens"),
    [
        ((), 1.0, 4, 0),
        ((1,), -0.1, 4, 0),
        ((1,), float("nan"), 4, 0),
        ((1,), 1.0, 0, 0),
        ((1,), 1.0, 4, 1),
        ((1, 2), 1.0, 4, -1),
    ],
)
def test_a_request_that_no_engine_can_serve_is_refused(
    prompt: tuple[int, ...], temperature: float, new: int, resumed_tokens: int
) -> None:
    with pytest.raises(InvalidRequest, match="request a"):
        EngineRequest("a", prompt, 0, temperature, new, resumed_tokens)


def test_abort_waiting_and_active(engine: StepEngine) -> None:
    for name in "abc":
        engine.add(_request(name, new=30))
    assert engine.abort("b") == EngineResult("b", (), (), "interrupted")
    engine.step()
    ended = engine.abort("a")
    assert ended is not None and (ended.request_id, ended.finish_reason) == ("a", "interrupted")
    assert engine.abort("a") is None and engine.abort("never") is None
    assert engine.pending == 1
    assert [result.request_id for result in _results(engine)] == ["c"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_was_interrupted_goes_on_where_it_ended(engine: StepEngine, temperature: float) -> None:
    prompt, new = (1, 2, 3), 40
    engine.add(EngineRequest("whole", prompt, 7, temperature, new))
    (whole,) = _results(engine)
    done: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    for steps in (5, 17):
        engine.add(EngineRequest("a", prompt + done, 7, temperature, new - len(done), len(done)))
        for _ in range(steps):
            assert engine.step() == []
        part = engine.abort("a")
        assert part is not None and part.finish_reason == "interrupted" and engine.pending == 0
        assert len(part.tokens) == len(part.logprobs) > 0
        done, logprobs = done + part.tokens, logprobs + part.logprobs
        assert done == whole.tokens[: len(done)]
    engine.add(EngineRequest("a", prompt + done, 7, temperature, new - len(done), len(done)))
    (rest,) = _results(engine)
    assert done + rest.tokens == whole.tokens and rest.finish_reason == whole.finish_reason
    assert logprobs + rest.logprobs == pytest.approx(whole.logprobs, rel=1e-4)


def test_weights_change_only_between_requests(engine: StepEngine) -> None:
    assert engine.weights()
    engine.add(_request())
    with pytest.raises(RequestsInFlight):
        engine.weights_loaded(engine.weights())
    engine.abort("a")
    engine.weights_loaded(engine.weights())


def test_statistics_count(engine: StepEngine) -> None:
    for name in "abc":
        engine.add(_request(name, prompt=3, new=30))
    waiting = engine.statistics()
    assert (waiting.waiting, waiting.running, waiting.steps, waiting.generated_tokens) == (3, 0, 0, 0)
    engine.step()
    assert (engine.statistics().waiting, engine.statistics().running) == (1, 2)
    while engine.pending:
        engine.step()
    done = engine.statistics()
    assert (done.running, done.waiting, done.prompt_tokens, done.generated_tokens) == (0, 0, 9, 90)
    assert done.steps > 1 and done.prefill_s > 0 and done.decode_s > 0
    assert done.interrupted == 0
    # two of three requests run side by side, the third alone
    assert 0.5 < done.batch_occupancy < 1
    numbers = done.numbers()
    assert numbers["engine_generated_tokens"] == 90 and len(numbers) == len(fields(done))
    assert all(type(value) in (int, float) for value in numbers.values())


def test_statistics_count_interrupted_requests(engine: StepEngine) -> None:
    for name in "abc":
        engine.add(_request(name, new=30))
    engine.step()
    assert engine.abort("a") and engine.abort("c") and engine.abort("never") is None
    assert engine.statistics().interrupted == 2
    assert len(_results(engine)) == 1
    assert engine.statistics().interrupted == 2
