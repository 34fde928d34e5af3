"""vLLM's steps without a thread: ends, loads and requests that it refuses. These tests share one engine, in a file of
their own: a process can have one engine of vLLM at a time."""

from typing import Any

import numpy as np
import pytest

from flexmarl.actors.errors import EngineFailed, InvalidRequest, RequestsInFlight
from flexmarl.actors.inference.engines.engine import EngineRequest, EngineResult

from .vllm_engines import Learner, model_of, request_of

pytestmark = pytest.mark.vllm


@pytest.fixture
def steps(shared: Any) -> Any:
    """The step engine alone, with random weights and without requests."""
    for name in [*shared._turns]:
        shared.abort(name)
    shared._stops = []
    shared.weights_loaded(Learner(model_of()).weights())
    return shared


def _drained(engine: Any) -> list[EngineResult]:
    found = []
    while engine.pending:
        found += engine.step()
    return found


def test_a_resumed_part_draws_other_numbers_than_its_beginning(steps: Any) -> None:
    uniform = (1,) * 40
    drawn = []
    for resumed in (0, 20):
        steps.add(EngineRequest("a", uniform, 5, 2.0, 20, resumed))
        drawn.append(_drained(steps)[0].tokens)
    assert drawn[0] != drawn[1]


def test_end_tokens_end_a_turn_and_are_its_last(steps: Any) -> None:
    steps.add(request_of("long", new=60, temperature=0.0))
    (whole,) = _drained(steps)
    steps._stops = [whole.tokens[9]]
    steps.add(request_of("short", new=60, temperature=0.0))
    (short,) = _drained(steps)
    end = whole.tokens.index(whole.tokens[9]) + 1
    assert (short.tokens, short.finish_reason) == (whole.tokens[:end], "stop")
    assert short.logprobs == pytest.approx(whole.logprobs[:end], abs=1e-5)


def test_the_experts_of_a_turn_that_vllm_has_recorded_are_its_routes(
    steps: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vllm records them on GPUs alone: here they are put where it puts them, at the end of a request."""
    step, recorded = steps._llm.step, np.arange(24, dtype=np.uint8).reshape(12, 1, 2)

    def with_routes() -> list[Any]:
        outputs: list[Any] = step()
        for output in outputs:
            output.outputs[0].routed_experts = recorded if output.finished else None
        return outputs

    monkeypatch.setattr(steps._llm, "step", with_routes)
    steps.add(request_of("a", new=5))
    (result,) = _drained(steps)
    assert result.routes is not None and result.routes.dtype == np.uint8
    assert np.array_equal(result.routes, recorded)


def test_a_turn_that_is_ended_from_outside_has_the_routes_of_its_tokens(steps: Any) -> None:
    """Vllm keeps them in pieces until it ends a request itself."""
    request = request_of("a", new=40)
    steps.add(request)
    for _ in range(6):
        steps.step()
    (state,) = steps._llm.output_processor.request_states.values()
    tokens = len(request.prompt_tokens) + len(steps._turns["a"].tokens)
    state.routed_experts_chunks += [np.full((2, 1, 2), 3, np.uint8), np.full((tokens - 2, 1, 2), 5, np.uint8)]
    ended = steps.abort("a")
    assert ended.routes.shape == (tokens - 1, 1, 2) and ended.routes[:3, 0, 0].tolist() == [3, 3, 5]
    for pieces in ([], [np.zeros((2, 1, 2), np.uint8)]):
        steps.add(request_of("b", new=40))
        for _ in range(6):
            steps.step()
        (state,) = steps._llm.output_processor.request_states.values()
        state.routed_experts_chunks += pieces
        assert steps.abort("b").routes is None, "none is better than a part"


def test_a_turn_with_tokens_of_two_loads_ends_the_engine(steps: Any) -> None:
    steps.add(request_of("a"))
    steps.step()
    steps._llm.set_weight_version("of another load")
    with pytest.raises(EngineFailed, match="its tokens are of the loads"):
        _drained(steps)


def test_weights_change_only_between_requests(steps: Any) -> None:
    steps.add(request_of("a"))
    with pytest.raises(RequestsInFlight):
        steps.weights_loaded(Learner(model_of()).weights())
    assert steps.abort("a") is not None and steps.abort("a") is None
    steps.weights_loaded(Learner(model_of()).weights())


def test_a_batch_in_flight_whose_turns_have_ended_changes_none_behind_it(steps: Any, scheduling: str) -> None:
    """Its kernels run ahead of those of new weights, and vLLM drops its tokens."""
    newer = Learner(model_of(), seed=3).weights()
    steps.weights_loaded(newer)
    steps.add(request_of("expected", temperature=0.0))
    (expected,) = _drained(steps)
    steps.weights_loaded(Learner(model_of()).weights())
    steps.add(request_of("left", new=60))
    for _ in range(6):
        steps.step()
    steps.abort("left")
    assert bool(steps._llm.engine_core.engine_core.batch_queue) is (scheduling == "asynchronous")
    steps.weights_loaded(newer)
    steps.add(request_of("behind it", temperature=0.0))
    (result,) = _drained(steps)
    assert result.tokens == expected.tokens
    assert result.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


@pytest.mark.parametrize("temperature", [0.001, 2.5])
def test_a_temperature_that_vllm_would_change_or_refuse_is_refused(steps: Any, temperature: float) -> None:
    with pytest.raises(
        InvalidRequest, match=rf"temperature is {temperature}, vLLM takes 0 and 0\.01 to 2\.0"
    ):
        steps.add(request_of("a", temperature=temperature))
    assert steps.pending == 0
