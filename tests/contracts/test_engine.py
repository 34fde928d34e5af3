"""The contract of every ``Engine``. A new engine adds a line to ``ENGINES``."""

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from flexmarl.actors.errors import EngineFailed, InvalidRequest, PromptTooLong
from flexmarl.actors.inference.engines.embedded.huggingface import TransformersEngine
from flexmarl.actors.inference.engines.engine import Engine, EngineRequest
from flexmarl.actors.inference.engines.simulated_engine import SimulatedEngine
from flexmarl.actors.inference.engines.threaded_engine import ThreadedEngine
from flexmarl.actors.inference.inference_config import SimulatedEngineConfig, VllmEngineConfig
from flexmarl.actors.messages import ModelConfig, Truncation
from flexmarl.actors.pretrained import empty_model, outline_of
from flexmarl.transport.errors import StateMismatch
from flexmarl.transport.handle import StateHandle
from flexmarl.transport.state import StateTransport

from ..actors.inference.engines.vllm_engines import lend

MAX_CONTEXT = 64
LLAMA = {
    "model_type": "llama", "vocab_size": 16, "hidden_size": 16, "intermediate_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": MAX_CONTEXT,
}  # fmt: skip

# vLLM's attention on CPUs needs heads of 32 or more.
VLLM_MODEL = ModelConfig(config=LLAMA | {"head_dim": 32}, tokenizer="none")
VLLM_OPTIONS = VllmEngineConfig(max_batch=2, kv_cache_bytes=2**24)


@dataclass
class Subject:
    """``weights(version)``: of a policy that the engine can serve. ``exact_draws``: see ``EngineOptions``."""

    engine: Engine
    weights: Callable[[int], dict[str, Tensor]]
    exact_draws: bool = True


async def _embedded() -> Subject:
    torch.set_num_threads(1)
    model = empty_model(ModelConfig(config=LLAMA, tokenizer="none"))
    engine = await ThreadedEngine.open(lambda: TransformersEngine(model, [], max_batch=2))
    return Subject(engine, _drawn_for(model))


@functools.cache
def _vllm_for_all() -> Any:
    """One engine for all tests: vLLM needs five seconds for another. ``lend`` makes it as a new one."""
    from flexmarl.actors.inference.engines.vllm_engine import VllmEngine

    return VllmEngine(outline_of(VLLM_MODEL), [], VLLM_OPTIONS)


@pytest.fixture(scope="module", autouse=True)
def ended_vllm() -> Iterator[None]:
    yield
    if _vllm_for_all.cache_info().currsize:
        _vllm_for_all().close()
        _vllm_for_all.cache_clear()


async def _vllm() -> Subject:
    engine = await ThreadedEngine.open(lambda: lend(_vllm_for_all()))
    return Subject(engine, _drawn_for(outline_of(VLLM_MODEL)), exact_draws=VLLM_OPTIONS.exact_draws)


def _drawn_for(model: PreTrainedModel) -> Callable[[int], dict[str, Tensor]]:
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}

    def weights(version: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(version)
        return {name: torch.randn(shape, generator=generator) / 2 for name, shape in shapes.items()}

    return weights


async def _simulated() -> Subject:
    # answers that are always cut off
    config = SimulatedEngineConfig(
        median_tokens=1e9, sigma=0.0, token_s=1e-3, max_batch=2, max_context=MAX_CONTEXT
    )
    return Subject(SimulatedEngine(config), lambda version: {"state": torch.tensor([version, 7])})


ENGINES: dict[str, Callable[[], Awaitable[Subject]]] = {
    "embedded": _embedded,
    "simulated": _simulated,
    "vllm": _vllm,
}


@pytest.fixture(params=["embedded", "simulated", pytest.param("vllm", marks=pytest.mark.vllm)])
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    subject = await ENGINES[request.param]()
    yield subject
    await subject.engine.close()


@pytest.fixture
async def transport(private: Path) -> AsyncIterator[StateTransport]:
    async with StateTransport(private) as opened:
        yield opened


@pytest.fixture
async def engine(subject: Subject, transport: StateTransport) -> Engine:
    """Holds version 1."""
    await subject.engine.load(await published(subject, transport, 1), transport)
    return subject.engine


async def published(subject: Subject, transport: StateTransport, version: int) -> StateHandle:
    return await transport.set("solver", subject.weights(version), version=version)


def request_of(
    name: str = "a", prompt: int = 3, new: int = 4, seed: int = 0, temperature: float = 1.0
) -> EngineRequest:
    return EngineRequest(name, (1,) * prompt, seed, temperature, new)


async def test_every_request_has_its_answer(engine: Engine) -> None:
    results = await asyncio.gather(*(engine.generate(request_of(name)) for name in "abcde"))
    assert [result.request_id for result in results] == list("abcde")
    assert all(len(result.tokens) == len(result.logprobs) == 4 for result in results)
    assert all(result.finish_reason == "length" for result in results)


async def test_a_result_says_when_its_first_token_was_there(engine: Engine) -> None:
    began = time.perf_counter()
    results = await asyncio.gather(*(engine.generate(request_of(name, new=50)) for name in "abcde"))
    whole_s = time.perf_counter() - began
    until_first = []
    for result in results:
        assert result.phases is not None
        queue_s, prefill_s = result.phases
        assert queue_s >= 0 and prefill_s > 0
        until_first.append(queue_s + prefill_s)
    assert max(until_first) < whole_s, "49 tokens came behind the first"
    assert max(until_first) > min(until_first), "a batch has two: the others wait until one of them has ended"


async def test_a_request_that_is_interrupted_before_its_begin_has_no_prefill(engine: Engine) -> None:
    for _ in range(20):  # on a busy machine an engine may be done before this loop runs again
        turns = [asyncio.ensure_future(engine.generate(request_of(name, new=60))) for name in "abcd"]
        await engine.generate(request_of("first", new=1))
        await engine.interrupt()
        results = [turn for turn in await asyncio.gather(*turns) if not turn.tokens]
        if results:
            break
    for result in results:
        assert result.phases is not None and min(result.phases) >= 0


async def test_an_id_may_be_used_again_but_not_twice_at_once(engine: Engine) -> None:
    first = asyncio.ensure_future(engine.generate(request_of()))
    await asyncio.sleep(0)
    with pytest.raises(InvalidRequest, match="in use"):
        await engine.generate(request_of())
    assert len((await first).tokens) == 4
    assert len((await engine.generate(request_of())).tokens) == 4


async def test_a_request_has_to_fit_the_context(engine: Engine) -> None:
    assert len((await engine.generate(request_of("fits", prompt=MAX_CONTEXT - 4))).tokens) == 4
    with pytest.raises(PromptTooLong, match=r"request long: 61 prompt tokens \+ 4 .* 64") as caught:
        await engine.generate(request_of("long", prompt=MAX_CONTEXT - 3))
    assert (caught.value.prompt_tokens, caught.value.max_new_tokens, caught.value.max_context) == (61, 4, 64)


async def test_a_truncation_is_served(engine: Engine) -> None:
    cut = Truncation(top_k=5, top_p=0.9, min_p=0.01)
    requests = [EngineRequest(name, (1, 2), 3, 1.0, 8, truncation=cut) for name in "abc"]
    results = await asyncio.gather(*map(engine.generate, requests))
    assert [len(result.tokens) for result in results] == [8, 8, 8]
    with pytest.raises(InvalidRequest, match=r"request a: top_p is 1\.5, needs more than 0 and at most 1"):
        EngineRequest("a", (1, 2), 3, 1.0, 8, truncation=Truncation(top_p=1.5))


async def test_tokens_outside_the_vocabulary_are_refused(engine: Engine) -> None:
    for token in (-1, 1_000_000):
        with pytest.raises(InvalidRequest, match="vocabulary"):
            await engine.generate(EngineRequest("a", (1, token), 0, 1.0, 4))
    assert len((await engine.generate(request_of())).tokens) == 4


async def test_interrupting_ends_running_and_waiting_requests(engine: Engine) -> None:
    for _ in range(20):  # on a busy machine an engine may be done before this loop runs again
        before = engine.statistics().interrupted
        turns = [asyncio.ensure_future(engine.generate(request_of(name, new=60))) for name in "abcd"]
        await engine.generate(request_of("first", new=1))  # the others have begun, as far as there is room
        await engine.interrupt()
        results = await asyncio.gather(*turns)
        if all(result.finish_reason == "interrupted" for result in results):
            break
    assert all(result.finish_reason == "interrupted" for result in results)
    assert all(len(result.tokens) == len(result.logprobs) < 60 for result in results)
    assert engine.statistics().interrupted == before + 4
    await engine.interrupt()  # without a request nothing happens


async def test_a_cancelled_request_is_aborted(engine: Engine) -> None:
    for _ in range(20):  # on a busy machine an engine may be done before this loop runs again
        turn = asyncio.ensure_future(engine.generate(request_of("a", new=60)))
        await engine.generate(request_of("b", new=1))
        turn.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await turn
        await engine.interrupt()
        if engine.statistics().interrupted:
            break
    assert turn.cancelled()
    assert (engine.statistics().running, engine.statistics().interrupted) == (0, 1)
    assert (await engine.generate(request_of("a"))).finish_reason == "length", "its id is free again"


async def test_tokens_are_handed_out_as_they_come(engine: Engine) -> None:
    parts: list[tuple[int, ...]] = []
    for _ in range(20):  # on a busy machine an engine may be done before this loop runs again
        listened, other = await asyncio.gather(
            engine.generate(request_of("listened", new=60), parts.append),
            engine.generate(request_of("other", new=60)),
        )
        if len(parts) > 1:
            break
        parts.clear()
    assert len(parts) > 1 and all(parts), "the first ones before the end"
    assert (came := sum(parts, ())) == listened.tokens[: len(came)]
    assert len(listened.tokens) == len(other.tokens) == 60
    count = len(parts)
    await engine.generate(request_of("listened", new=60))
    assert len(parts) == count, "the listener was that of one request"


async def test_a_slow_listener_holds_nothing_up(engine: Engine) -> None:
    parts: list[tuple[int, ...]] = []

    def listen(tokens: tuple[int, ...]) -> None:
        parts.append(tokens)
        time.sleep(0.02)

    result = await engine.generate(request_of(new=60), listen)
    assert len(result.tokens) == 60
    assert (came := sum(parts, ())) == result.tokens[: len(came)]
    assert len(parts) < 60, "the engine computed meanwhile"


async def test_a_listener_may_end_its_request(engine: Engine) -> None:
    came: list[int] = []

    def listen(tokens: tuple[int, ...]) -> bool:
        came.extend(tokens)
        return True

    for _ in range(200):  # on a busy machine an engine may be done before this loop runs again
        ended, other = await asyncio.gather(
            engine.generate(request_of("ended", new=60), listen), engine.generate(request_of("other", new=60))
        )
        assert (len(other.tokens), other.finish_reason) == (60, "length")
        if ended.finish_reason == "interrupted":
            break
        came.clear()
    assert ended.finish_reason == "interrupted" and 0 < len(ended.tokens) < 60
    assert tuple(came) == ended.tokens[: len(came)] and len(ended.tokens) == len(ended.logprobs)
    assert (await engine.generate(request_of("ended", new=60))).finish_reason == "length", "its id is free"


async def test_an_interrupted_request_has_all_tokens_that_were_handed_out(engine: Engine) -> None:
    came: list[int] = []
    began = asyncio.Event()

    def listen(tokens: tuple[int, ...]) -> None:
        came.extend(tokens)
        began.set()

    turn = asyncio.ensure_future(engine.generate(request_of(new=60), listen))
    await began.wait()
    await engine.interrupt()
    result = await turn
    assert 0 < len(came) <= len(result.tokens) and tuple(came) == result.tokens[: len(came)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_what_was_interrupted_goes_on_where_it_ended(
    subject: Subject, engine: Engine, temperature: float
) -> None:
    if temperature and not subject.exact_draws:
        pytest.skip("its draws depend on the interruption")
    whole = await engine.generate(request_of("whole", new=60, temperature=temperature))
    part = whole
    while part.finish_reason == "length":  # on a busy machine the interruption may come too late
        turn = asyncio.ensure_future(engine.generate(request_of("part", new=60, temperature=temperature)))
        await engine.generate(request_of("meanwhile", new=20))
        await engine.interrupt()
        part = await turn
    assert part.finish_reason == "interrupted" and part.tokens == whole.tokens[: len(part.tokens)]
    done = len(part.tokens)
    assert 0 < done < 60
    rest = await engine.generate(
        EngineRequest("part", (1, 1, 1, *part.tokens), 0, temperature, 60 - done, done)
    )
    assert part.tokens + rest.tokens == whole.tokens
    assert part.logprobs + rest.logprobs == pytest.approx(whole.logprobs, rel=1e-4)


async def test_a_version_is_loaded_as_a_whole(
    subject: Subject, engine: Engine, transport: StateTransport
) -> None:
    before = await engine.generate(request_of(new=60))
    times = await engine.load(await published(subject, transport, 2), transport)
    assert times.transfer_s >= 0 and times.load_s >= 0
    await engine.generate(request_of(new=60))
    await engine.load(await published(subject, transport, 1), transport)
    assert await engine.generate(request_of(new=60)) == before


async def test_a_load_that_failed_can_be_made_again(
    subject: Subject, engine: Engine, transport: StateTransport
) -> None:
    other = await transport.set("other", {"name": torch.zeros(3)}, version=2)
    with pytest.raises(StateMismatch):
        await engine.load(other, transport)
    await engine.load(await published(subject, transport, 3), transport)
    assert len((await engine.generate(request_of())).tokens) == 4


async def test_statistics_count(engine: Engine) -> None:
    await asyncio.gather(*(engine.generate(request_of(name, prompt=3, new=30)) for name in "abc"))
    done = engine.statistics()
    assert (done.running, done.waiting, done.prompt_tokens, done.generated_tokens) == (0, 0, 9, 90)
    assert done.steps > 1 and done.prefill_s > 0 and done.decode_s > 0
    assert done.interrupted == 0
    assert done.queue_s > 0, '"c" waits for the end of "a" or "b"'
    assert done.service_s > 0
    # two of three requests run side by side, the third alone
    assert 0.5 < done.batch_occupancy < 1
    numbers = done.numbers()
    assert numbers["engine_generated_tokens"] == 90 and len(numbers) == len(fields(done))
    assert all(type(value) in (int, float) for value in numbers.values())


async def test_a_closed_engine_serves_nothing(engine: Engine) -> None:
    turn = asyncio.ensure_future(engine.generate(request_of(new=60)))
    closed = asyncio.ensure_future(engine.wait_closed())
    await asyncio.sleep(0)
    assert not closed.done()
    await engine.close()
    await closed
    with pytest.raises(EngineFailed, match="closed"):
        await turn
    with pytest.raises(EngineFailed, match="closed"):
        await engine.generate(request_of())
    await engine.close()  # may be called again
