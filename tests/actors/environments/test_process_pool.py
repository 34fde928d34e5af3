"""Functions in processes of their own: results, errors, deadlines, kills, and nothing that is left over."""

import asyncio
import contextlib
import math
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from flexmarl.actors.environments.process_calls import arguments_of, frame, message_of, result_of
from flexmarl.actors.environments.process_pool import Processes, current_pool, in_process
from flexmarl.actors.errors import ProcessFailed
from flexmarl.actors.recipe.user_traceback import user_traceback

from ...patience import PATIENCE_S


@dataclass
class Point:
    x: float
    corner: tuple[int, int] = (0, 0)


def moved(point: Point, by: float = 1.0) -> Point:
    return Point(point.x + by, point.corner)


def doubled(values: np.ndarray) -> np.ndarray:
    return values * 2


def test_arguments_and_results_are_what_the_annotations_say() -> None:
    def sent(value: object) -> object:
        return message_of(frame(value)[4:])

    (point,) = arguments_of(moved, sent([Point(1.0, (2, 3))]))  # type: ignore[arg-type]
    assert point == Point(1.0, (2, 3)) and arguments_of(moved, [{"x": 1}, 2]) == [Point(1.0), 2.0]
    assert result_of(moved, sent(Point(2.0))) == Point(2.0)
    array = result_of(doubled, sent(np.arange(3.0)))
    assert isinstance(array, np.ndarray) and array.tolist() == [0.0, 1.0, 2.0]
    assert arguments_of(max, [1, 2]) == [1, 2], "written in C"
    with pytest.raises(ValueError, match="point: .*instance of Point"):
        arguments_of(moved, [3])
    with pytest.raises(ValueError, match="object can't be sent"):
        frame([object()])


async def other(x: int) -> int:
    return x


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda: 1, "is not at the top level of a module"),
        (other, "other is async: await it"),
        ([].append, "is not at the top level"),
    ],
)
async def test_functions_that_another_process_can_not_find_are_refused(
    function: object, problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        await in_process(function)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout_s=0 must be positive"):
        await in_process(math.sqrt, 1.0, timeout_s=0)


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Processes]:
    """A pool of one process, for a recipe with functions of its own."""
    (tmp_path / "workflow.py").write_text(RECIPE)
    pool = Processes(1, str(tmp_path))
    current_pool.set(pool)
    yield pool
    await pool.close()


RECIPE = """
import os, subprocess, time

async def workflow(query, agents): ...
def train_query(position, seed): ...
def eval_queries(seed): ...

def pid():
    print("not into the pipe of the answers")
    return os.getpid()

def started():
    return subprocess.Popen(["sleep", "1000"]).pid

def fails():
    return {}["answer"]
"""


async def test_a_process_that_does_not_begin_is_named_and_killed() -> None:
    pool = Processes(1, start_s=0.0)
    with pytest.raises(ProcessFailed, match="moved: its process is not ready after 0 s"):
        await pool.run(moved, [Point(1)], PATIENCE_S)
    assert not pool._all
    await pool.close()


async def test_one_process_after_the_other(pool: Processes) -> None:
    """A process is used again; one that took too long, was cancelled or has died is replaced; and none is left."""
    from flexmarl.actors.recipe.recipe import Recipe, RecipeConfig

    recipe = Recipe(RecipeConfig(folder=pool._recipe, data={}, seed=0))
    pid = recipe.function("pid")
    first = await in_process(pid)
    assert await asyncio.gather(*(in_process(pid) for _ in range(3))) == [first] * 3, (
        "waits for the one process"
    )
    with pytest.raises(ProcessFailed, match=r"math.sqrt: ValueError: math domain error") as failed:
        await in_process(math.sqrt, -1)
    assert "process_main" in failed.value.remote_traceback
    with pytest.raises(ProcessFailed, match=r"fails: KeyError: 'answer'") as failed:
        await in_process(recipe.function("fails"))
    shown = user_traceback(failed.value, Path(pool._recipe))
    assert shown.index("In its process:") < shown.index("in fails"), "the lines of the recipe there"
    assert "process_main" not in shown
    assert await in_process(pid) == first, "an error costs no process"
    started = await in_process(recipe.function("started"))
    with pytest.raises(TimeoutError, match=r"time.sleep took longer than timeout_s=0.01"):
        await in_process(time.sleep, 1000, timeout_s=0.01)
    await gone(first, started)
    second = await in_process(pid)
    with pytest.raises(ProcessFailed, match=r"_exit: its process ended with status 3"):
        await in_process(os._exit, 3)
    sleeping = asyncio.create_task(in_process(time.sleep, 1000))
    third = await child_that_sleeps(pool)
    sleeping.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await sleeping
    await gone(second, third)
    last = await in_process(pid)
    assert len({first, second, third, last}) == 4
    await pool.close()
    await gone(last)


async def test_its_end_waits_for_a_process_that_a_cancelled_call_has_killed(pool: Processes) -> None:
    """Without that wait the process and its pipes stay in the loop, and the loop may be closed before they end."""
    sleeping = asyncio.create_task(in_process(time.sleep, 1000))
    pid = await child_that_sleeps(pool)
    sleeping.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await sleeping
    assert not pool._all
    await pool.close()
    assert not Path(f"/proc/{pid}").exists(), "it has ended, and its parent has waited for it"


async def child_that_sleeps(pool: Processes) -> int:
    while not (busy := [process for process in pool._all if process.runs and process not in pool._idle]):
        await asyncio.sleep(0.01)
    return busy[0]._process.pid


async def gone(*pids: int) -> None:
    """Waits until the processes have ended."""
    async with asyncio.timeout(PATIENCE_S):
        while any(runs(pid) for pid in pids):
            await asyncio.sleep(0.01)


def runs(pid: int) -> bool:
    try:
        return re.search(r"^State:\s+[ZX]", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE) is None
    except (FileNotFoundError, ProcessLookupError):
        return False


KILLED = """
import asyncio, re, sys
from flexmarl.actors.environments.process_pool import Processes

async def main():
    pool = Processes(1)
    asyncio.create_task(pool.run(re.match, ["(a*)*b", "a" * 60], 1000))
    while not (pool._all and next(iter(pool._all))._process.pid):
        await asyncio.sleep(0.01)
    print(next(iter(pool._all))._process.pid, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


async def test_a_killed_worker_leaves_no_process() -> None:
    """The function holds Python's lock for ever: no thread of its process could end it."""
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-c", KILLED, stdout=asyncio.subprocess.PIPE
    )
    assert worker.stdout is not None
    pid = int(await worker.stdout.readline())
    assert runs(pid)
    worker.send_signal(signal.SIGKILL)
    await worker.wait()
    await gone(pid)
