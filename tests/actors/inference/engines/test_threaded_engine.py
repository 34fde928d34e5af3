"""The engine's thread: simultaneous requests arrive together and in order, and each gets its own answer."""

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
from torch import Tensor

from flexmarl.actors.errors import EngineFailed, InvalidRequest, NonFiniteLogits
from flexmarl.actors.inference.engines.engine import EngineRequest, EngineResult, EngineStatistics
from flexmarl.actors.inference.engines.hugging_face_factory import HuggingFaceFactory
from flexmarl.actors.inference.engines.step_engine import StepEngine
from flexmarl.actors.inference.engines.threaded_engine import ThreadedEngine

from ....patience import PATIENCE_S


class Recorder(StepEngine):
    """Finishes each request in the step after its arrival, once ``gate`` is open. ``log``: the calls."""

    def __init__(self) -> None:
        self.log: list[str | list[str]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.stepping = threading.Event()
        self._ids: list[str] = []

    def add(self, request: EngineRequest) -> None:
        if request.request_id == "refused":
            raise InvalidRequest(request.request_id, "not wanted")
        self.log.append(f"add {request.request_id}")
        self._ids.append(request.request_id)

    def step(self) -> list[EngineResult]:
        self.log.append(list(self._ids))
        self.stepping.set()
        self.gate.wait(PATIENCE_S)
        if broken := [name for name in self._ids if name.startswith("nan")]:
            raise NonFiniteLogits(tuple(broken))
        done, self._ids = self._ids, []
        return [EngineResult(name, (1,), (0.0,), "length") for name in done]

    def abort(self, request_id: str) -> EngineResult | None:
        self.log.append(f"abort {request_id}")
        if request_id not in self._ids:
            return None
        self._ids.remove(request_id)
        return EngineResult(request_id, (), (), "interrupted")

    def new_tokens(self, token_counts: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        self.log.append("new tokens")
        return {}

    @property
    def pending(self) -> int:
        return len(self._ids)

    def weights(self) -> dict[str, Tensor]:
        return {}

    def weights_loaded(self, tensors: Mapping[str, object], adapter: str = "") -> None:
        self.log.append("weights")

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(0, 0, 0, 0, 0.0, 0.0, 0.0, len(self._ids), 0, 0)


@pytest.fixture
def engine() -> Recorder:
    return Recorder()


@pytest.fixture
async def loop(engine: Recorder) -> AsyncIterator[ThreadedEngine]:
    loop = await ThreadedEngine.open(lambda: engine)
    yield loop
    engine.gate.set()
    await loop.close()


def _request(name: str) -> EngineRequest:
    return EngineRequest(name, (1,), 0, 1.0, 1)


async def test_requests_of_one_tick_take_the_first_step_together(
    loop: ThreadedEngine, engine: Recorder
) -> None:
    names = [f"r{i}" for i in range(200)]
    results = await asyncio.gather(*(loop.generate(_request(name)) for name in names))
    assert [result.request_id for result in results] == names
    assert engine.log == [*(f"add {name}" for name in names), names]


async def test_a_request_given_up_in_its_tick_is_added_and_then_aborted(
    loop: ThreadedEngine, engine: Recorder
) -> None:
    given_up = asyncio.ensure_future(loop.generate(_request("a")))
    kept = asyncio.ensure_future(loop.generate(_request("b")))
    await asyncio.sleep(0)
    given_up.cancel()
    assert (await kept).request_id == "b"
    await loop.run(lambda engine: engine.weights_loaded(engine.weights()))
    calls = [line for line in engine.log if isinstance(line, str)]
    assert calls.index("add a") < calls.index("abort a") < calls.index("weights")


async def test_tasks_and_interruptions_keep_their_order(loop: ThreadedEngine, engine: Recorder) -> None:
    turns = [asyncio.ensure_future(loop.generate(_request(name))) for name in "ab"]
    await asyncio.ensure_future(loop.interrupt())  # begins in the same tick
    assert await loop.run(lambda engine: engine.pending) == 0
    assert [(turn.done(), turn.result().finish_reason) for turn in turns] == [(True, "interrupted")] * 2
    assert engine.log == ["add a", "add b", "abort a", "abort b"]


async def test_a_turn_that_ends_as_it_is_interrupted_has_ended(
    loop: ThreadedEngine, engine: Recorder
) -> None:
    engine.gate.clear()
    turn = asyncio.ensure_future(loop.generate(_request("a")))
    await asyncio.to_thread(engine.stepping.wait, PATIENCE_S)
    interrupted = asyncio.ensure_future(loop.interrupt())
    await asyncio.sleep(0)
    engine.gate.set()
    await interrupted
    assert (await turn).finish_reason == "length"


async def test_a_turn_may_be_given_up_while_it_is_interrupted(loop: ThreadedEngine, engine: Recorder) -> None:
    turn = asyncio.ensure_future(loop.generate(_request("a")))
    interrupted = asyncio.ensure_future(loop.interrupt())
    await asyncio.sleep(0)
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    await interrupted
    await loop.run(lambda engine: engine.weights_loaded(engine.weights()))
    assert engine.log == ["add a", "abort a", "abort a", "weights"]
    assert (await loop.generate(_request("a"))).finish_reason == "length", "its id is free again"


async def test_a_refusal_reaches_its_caller_alone(loop: ThreadedEngine) -> None:
    refused, served = await asyncio.gather(
        loop.generate(_request("refused")), loop.generate(_request("a")), return_exceptions=True
    )
    assert isinstance(refused, InvalidRequest)
    assert isinstance(served, EngineResult)


async def test_logits_that_are_not_finite_fail_their_request_alone(loop: ThreadedEngine) -> None:
    broken, served = await asyncio.gather(
        loop.generate(_request("nan")), loop.generate(_request("a")), return_exceptions=True
    )
    assert isinstance(broken, NonFiniteLogits) and broken.request_ids == ("nan",)
    assert isinstance(served, EngineResult)
    await loop.run(lambda engine: None)  # it runs


async def test_what_was_asked_before_closing_is_still_done(engine: Recorder) -> None:
    loop = await ThreadedEngine.open(lambda: engine)
    task = asyncio.ensure_future(loop.run(lambda engine: engine.pending))
    await asyncio.sleep(0)
    await loop.close()
    assert await task == 0


class Broken(Recorder):
    """Its step fails once ``gate`` is open."""

    def step(self) -> list[EngineResult]:
        super().step()
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


async def test_an_engine_whose_thread_dies_ends_its_requests_and_refuses_others() -> None:
    engine = Broken()
    engine.gate.clear()
    loop = await ThreadedEngine.open(lambda: engine)
    turns = [asyncio.ensure_future(loop.generate(_request(name))) for name in "ab"]
    await asyncio.to_thread(engine.stepping.wait, PATIENCE_S)
    call = asyncio.ensure_future(loop.run(lambda engine: engine.pending))
    closed = asyncio.ensure_future(loop.wait_closed())
    await asyncio.sleep(0)
    engine.gate.set()
    ended = await asyncio.gather(*turns, call, closed, return_exceptions=True)
    text = "the engine has failed: RuntimeError: CUDA error: an illegal memory access was encountered"
    assert [(type(error), str(error)) for error in ended] == [(EngineFailed, text)] * 4
    for later in (loop.generate(_request("c")), loop.run(lambda engine: engine.pending), loop.interrupt()):
        with pytest.raises(EngineFailed, match="illegal memory access"):
            await later
    assert loop.statistics().running == 0
    await loop.close()


class Closing(Recorder):
    """Can't take over weights."""

    closed_by = ""

    def weights_loaded(self, tensors: Mapping[str, object], adapter: str = "") -> None:
        raise EngineFailed("half of the weights is missing")

    def close(self) -> None:
        self.closed_by = threading.current_thread().name


async def test_an_engine_that_can_not_serve_any_more_ends_all_calls_and_is_closed_in_its_thread() -> None:
    engine = Closing()
    loop = await ThreadedEngine.open(lambda: engine)
    calls = [
        loop.run(lambda engine: engine.weights_loaded(engine.weights())),
        loop.run(lambda engine: None),
        loop.wait_closed(),
    ]
    ended = await asyncio.gather(*calls, return_exceptions=True)
    text = "the engine has failed: half of the weights is missing"
    assert [(type(error), str(error)) for error in ended] == [(EngineFailed, text)] * 3
    await loop.close()
    assert engine.closed_by == "engine"


class Native(Recorder):
    """Notes the thread of each call."""

    def __init__(self, threads: dict[str, int]) -> None:
        super().__init__()
        self._threads = threads
        threads["build"] = threading.get_ident()

    def step(self) -> list[EngineResult]:
        self._threads["step"] = threading.get_ident()
        return super().step()

    def weights_loaded(self, tensors: Mapping[str, object], adapter: str = "") -> None:
        self._threads["load"] = threading.get_ident()

    def close(self) -> None:
        self._threads["close"] = threading.get_ident()


class NativeFactory(HuggingFaceFactory[Any]):
    def __init__(self) -> None:
        self.threads: dict[str, int] = {}

    def _build(self) -> StepEngine:
        return Native(self.threads)


async def test_an_engine_is_built_stepped_loaded_and_closed_in_one_thread() -> None:
    factory = NativeFactory()
    engine = await factory.build()
    assert isinstance(engine, ThreadedEngine)
    await engine.generate(_request("a"))
    await engine.run(lambda engine: engine.weights_loaded({}))
    await engine.close()
    assert sorted(factory.threads) == ["build", "close", "load", "step"]
    assert len({*factory.threads.values()} - {threading.get_ident()}) == 1, factory.threads


async def test_an_engine_that_can_not_be_built_raises_its_error_and_leaves_no_thread() -> None:
    def build() -> StepEngine:
        raise RuntimeError("no kernel image is available")

    with pytest.raises(RuntimeError, match="no kernel image is available"):
        await ThreadedEngine.open(build)
    for thread in threading.enumerate():
        if thread.name == "engine":
            await asyncio.to_thread(thread.join, PATIENCE_S)
            assert not thread.is_alive()


async def test_an_engine_whose_build_is_given_up_is_closed_when_it_is_built() -> None:
    begun, gate, threads = threading.Event(), threading.Event(), dict[str, int]()

    def build() -> StepEngine:
        begun.set()
        gate.wait(PATIENCE_S)
        return Native(threads)

    opening = asyncio.ensure_future(ThreadedEngine.open(build))
    await asyncio.to_thread(begun.wait, PATIENCE_S)
    (thread,) = [each for each in threading.enumerate() if each.name == "engine"]
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    gate.set()
    await asyncio.to_thread(thread.join, PATIENCE_S)
    assert threads["close"] == threads["build"]


async def test_a_closed_engine_frees_its_memory() -> None:
    engines: list[weakref.ref[Recorder]] = []

    def build() -> StepEngine:
        engine = Recorder()
        engines.append(weakref.ref(engine))
        return engine

    loop = await ThreadedEngine.open(build)
    assert len((await loop.generate(_request("a"))).tokens) == 1
    await loop.close()
    gc.collect()
    assert engines[0]() is None
