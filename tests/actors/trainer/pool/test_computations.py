"""The computations of a trainer's process: their order, their deadlines, and what is named."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest

from flexmarl.actors.errors import ComputationOverran
from flexmarl.actors.trainer.backends.backend_factory import BackendFactory
from flexmarl.actors.trainer.pool.computations import Computations
from flexmarl.core.testing import virtual_time

from ....patience import PATIENCE_S

T = TypeVar("T")
NOWHERE = Path("/no recipe")


class InTime:
    """Computations that take ``seconds`` of virtual time each, one after the other."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def compute(self, function: Callable[[], float]) -> float:
        async with self._lock:
            seconds = function()
            await asyncio.sleep(seconds)
            return seconds


class InThread:
    """Computations in one thread, as those of PyTorch."""

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1)

    async def compute(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.thread, function)


def computations(factory: Any, timeout_s: float, recipe: Path = NOWHERE) -> Computations:
    return Computations(cast(BackendFactory, factory), timeout_s, recipe)


def in_virtual_time(body: Callable[[Computations], Any], timeout_s: float) -> Any:
    async def main() -> Any:
        return await body(computations(InTime(), timeout_s))

    return virtual_time.run(main())


def test_they_run_in_the_order_of_the_calls_and_are_counted() -> None:
    order: list[str] = []

    async def body(work: Computations) -> None:
        async def one(name: str, seconds: float) -> None:
            assert await work.run(name, lambda: seconds) == seconds
            order.append(name)

        async with asyncio.TaskGroup() as group:
            for name, seconds in (("a", 3.0), ("b", 1.0), ("c", 2.0)):
                group.create_task(one(name, seconds))
        assert work.ended == 3 and work.waits() == []

    in_virtual_time(body, timeout_s=100.0)
    assert order == ["a", "b", "c"]


def test_the_deadline_counts_from_the_beginning_and_not_while_others_run() -> None:
    async def body(work: Computations) -> None:
        runs = [asyncio.ensure_future(work.run(str(n), lambda: 8.0)) for n in range(5)]
        assert await asyncio.gather(*runs) == [8.0] * 5, "40 s together, each within its 10 s"

    in_virtual_time(body, timeout_s=10.0)


def test_the_one_that_hangs_is_named_also_by_those_behind_it() -> None:
    async def body(work: Computations) -> tuple[list[Any], float]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        runs = [
            asyncio.ensure_future(work.run(name, lambda seconds=seconds: seconds))  # type: ignore[misc]
            for name, seconds in (("a micro-batch of solver", 5.0), ("saving solver", 1e6), ("a load", 1.0))
        ]
        await asyncio.sleep(7.0)
        (wait,) = work.waits()
        assert (wait.text, wait.seconds) == ("saving solver, which computes", 2.0)
        assert wait.limit == "training.compute_timeout_s=10 ends it"
        return await asyncio.gather(*runs, return_exceptions=True), loop.time() - began

    (first, second, third), seconds = in_virtual_time(body, timeout_s=10.0)
    assert first == 5.0 and seconds == 15.0
    for overran in (second, third):
        assert isinstance(overran, ComputationOverran) and overran.computation == "saving solver"
        assert "has not ended within training.compute_timeout_s=10" in str(overran)


def test_an_error_is_the_callers_and_the_next_one_runs() -> None:
    def fail() -> float:
        raise ValueError("on purpose")

    async def body(work: Computations) -> None:
        failing = asyncio.ensure_future(work.run("a", fail))
        after = asyncio.ensure_future(work.run("b", lambda: 1.0))
        with pytest.raises(ValueError, match="on purpose"):
            await failing
        assert await after == 1.0 and work.waits() == []

    in_virtual_time(body, timeout_s=10.0)


def test_a_caller_that_was_cancelled_while_it_waited_leaves_the_order() -> None:
    async def body(work: Computations) -> None:
        first = asyncio.ensure_future(work.run("a", lambda: 3.0))
        gone = asyncio.ensure_future(work.run("b", lambda: 1000.0))
        last = asyncio.ensure_future(work.run("c", lambda: 4.0))
        await asyncio.sleep(1.0)
        gone.cancel()
        await asyncio.sleep(3.0)
        assert [wait.text for wait in work.waits()] == ["c, which computes"]
        assert (await first, await last) == (3.0, 4.0)
        assert gone.cancelled()

    in_virtual_time(body, timeout_s=10.0)


@pytest.fixture
async def threaded() -> AsyncIterator[InThread]:
    factory = InThread()
    yield factory
    factory.thread.shutdown(wait=True)


async def test_one_whose_caller_was_cancelled_keeps_its_place_until_it_returns(threaded: InThread) -> None:
    """A thread can't be interrupted: what hangs is the first one, not the one behind it."""
    work, begun, gate = computations(threaded, 0.2), threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        assert gate.wait(PATIENCE_S)

    first = asyncio.ensure_future(work.run("a micro-batch of solver", hang))
    while not begun.is_set():
        await asyncio.sleep(0.001)
    first.cancel()
    await asyncio.wait([first])
    try:
        with pytest.raises(ComputationOverran, match="a micro-batch of solver has not ended"):
            await work.run("saving solver", lambda: None)
        assert [wait.text for wait in work.waits()] == ["a micro-batch of solver, which computes"]
    finally:
        gate.set()
    async with asyncio.timeout(PATIENCE_S):
        while work.waits():
            await asyncio.sleep(0.001)
    assert await work.run("saving solver", lambda: 7) == 7


async def test_the_line_of_the_recipe_is_named_if_its_code_runs(threaded: InThread, tmp_path: Path) -> None:
    source = "def examples(begun, gate):\n    begun.set(); gate.wait()\n"
    (tmp_path / "workflow.py").write_text(source)
    names: dict[str, Any] = {}
    exec(compile(source, str(tmp_path / "workflow.py"), "exec"), names)
    begun, gate = threading.Event(), threading.Event()
    work = computations(threaded, PATIENCE_S, tmp_path)
    call = asyncio.ensure_future(work.run("supervised batches", lambda: names["examples"](begun, gate)))
    while not begun.is_set():
        await asyncio.sleep(0.001)
    (wait,) = work.waits()
    gate.set()
    await call
    assert wait.text == (
        "supervised batches, which computes at workflow.py:2, in examples: begun.set(); gate.wait()"
    )
