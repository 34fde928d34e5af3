"""The contract of pools: functions of a recipe are computed elsewhere, within a deadline.

The pools: processes of a worker (``in_process``), the same for rewards, and a reward service of the run.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from flexmarl.actors.deadline import Deadline
from flexmarl.actors.environments.process_pool import Pool, Processes
from flexmarl.actors.environments.rewards_config import RewardsConfig
from flexmarl.actors.errors import ProcessFailed
from flexmarl.actors.messages import Query, VersionRange
from flexmarl.actors.names import PolicyName, Step, Version
from flexmarl.actors.recipe.recipe import Recipe, RecipeConfig
from flexmarl.actors.rewards.reward_service import RewardService, RewardServiceSetup
from flexmarl.actors.rollout.rollout_config import RolloutConfig
from flexmarl.actors.rollout.rollout_waits import RolloutWaits
from flexmarl.actors.rollout.services.reward_pool import RewardPool
from flexmarl.actors.rollout.trajectory import Trajectory
from flexmarl.core.ref import ActorRef
from flexmarl.core.system import ActorSystem

from ..patience import PATIENCE_S

QUEUE_S = 0.2
RETRIES = 2
RECIPE = """
import os, signal, time
from pathlib import Path

async def workflow(query, agents): ...
def train_query(position, seed): ...
def eval_queries(seed): ...

def pid():
    print("not an answer")
    return os.getpid()

def fails():
    return {}["answer"]

def dies(deaths: Path, times: int) -> tuple[int, ...]:
    before = int(deaths.read_text()) if deaths.exists() else 0
    if before < times:
        deaths.write_text(str(before + 1))
        os.kill(os.getpid(), signal.SIGKILL)
    return (before, times)

def sleeps(began: Path):
    began.write_text(str(os.getpid()))
    time.sleep(1000)
"""


@dataclass
class PoolUnderTest:
    """A pool of one process. ``call``: calls a function of the recipe. ``retries``: of a call whose process ends.
    ``repeated``: calls that were begun again."""

    pool: Pool
    recipe: Recipe
    processes: Processes
    retries: int
    repeated: Callable[[], float]

    async def call(self, name: str, *args: Any, timeout_s: float | None = None) -> Any:
        limit_s = timeout_s if timeout_s is not None or self.retries else PATIENCE_S
        return await self.pool.run(self.recipe.function(name), args, limit_s)

    async def ran(self, function: Callable[..., Any], args: Sequence[Any], timeout_s: float) -> Any:
        return await self.pool.run(function, args, timeout_s)


async def open_worker(system: ActorSystem, recipe: Recipe, stack: contextlib.AsyncExitStack) -> PoolUnderTest:
    processes = Processes(1, str(recipe.folder))
    stack.push_async_callback(processes.close)
    return PoolUnderTest(processes, recipe, processes, 0, lambda: 0)


async def open_rewards(
    system: ActorSystem, recipe: Recipe, stack: contextlib.AsyncExitStack, *, served: bool
) -> PoolUnderTest:
    services: list[ActorRef[Any]] = []
    processes = Processes(1, str(recipe.folder))
    stack.push_async_callback(processes.close)
    if served:
        service = RewardService(RewardServiceSetup(str(recipe.folder), 1))
        services.append(await system.add(service, "rewards-0"))
        processes = service._processes
    config = RewardsConfig(
        services=len(services), processes=1, timeout_s=PATIENCE_S, queue_timeout_s=QUEUE_S, retries=RETRIES
    )
    version = VersionRange.exactly(Version(0))
    trajectory = Trajectory(Query("q", "?"), Step(1), 0, {PolicyName("solver"): version})
    trajectory.deadline = Deadline(PATIENCE_S)
    stack.callback(trajectory.deadline.stop)
    waits = RolloutWaits(recipe.folder, RolloutConfig())
    pool = RewardPool(services, config, 0, processes, waits).of(trajectory)
    return PoolUnderTest(
        pool, recipe, processes, RETRIES, lambda: trajectory.service_figures.get("repeated_rewards", 0)
    )


OPEN: dict[str, Callable[..., Awaitable[PoolUnderTest]]] = {
    "worker": open_worker,
    "worker's rewards": partial(open_rewards, served=False),
    "service": partial(open_rewards, served=True),
}


@pytest.fixture(params=OPEN)
async def tested(
    request: pytest.FixtureRequest, system: ActorSystem, tmp_path: Path
) -> AsyncIterator[PoolUnderTest]:
    (tmp_path / "workflow.py").write_text(RECIPE)
    recipe = Recipe(RecipeConfig(folder=str(tmp_path), data={}, seed=0))
    async with contextlib.AsyncExitStack() as stack:
        yield await OPEN[request.param](system, recipe, stack)


async def test_results_and_errors_are_those_of_the_function(tested: PoolUnderTest, tmp_path: Path) -> None:
    assert await tested.call("dies", tmp_path / "deaths", 0) == (0, 0), (
        "a tuple and a path, by its annotations"
    )
    first = await tested.call("pid")
    assert first != os.getpid()
    with pytest.raises(ProcessFailed, match=r"fails: KeyError: 'answer'") as failed:
        await tested.call("fails")
    assert "in fails" in failed.value.remote_traceback and "process_main" not in failed.value.remote_traceback
    assert await tested.call("pid") == first, "an error costs no process"
    with pytest.raises(ValueError, match="is not at the top level of a module"):
        await tested.pool.run(lambda: 1, [], PATIENCE_S)
    with pytest.raises(ValueError, match="timeout_s=0 must be positive"):
        await tested.ran(time.sleep, [1], 0)


async def test_a_call_that_overruns_costs_its_process_and_is_named(tested: PoolUnderTest) -> None:
    first = await tested.call("pid")
    with pytest.raises(TimeoutError, match=r"^time\.sleep took longer than timeout_s=0\.01$"):
        await tested.ran(time.sleep, [1000], 0.01)
    assert await tested.call("pid") != first
    assert tested.repeated() == 0, "a call that hangs would hang again"


async def test_a_call_whose_process_is_killed_begins_again(tested: PoolUnderTest, tmp_path: Path) -> None:
    if not tested.retries:
        with pytest.raises(ProcessFailed, match=r"dies: its process was killed by signal 9$"):
            await tested.call("dies", tmp_path / "deaths", 1)
        return
    assert await tested.call("dies", tmp_path / "deaths", RETRIES) == (RETRIES, RETRIES)
    assert tested.repeated() == RETRIES
    with pytest.raises(ProcessFailed, match=r"dies: its process was killed by signal 9, 3 times$"):
        await tested.call("dies", tmp_path / "more", 100)


async def test_a_process_that_is_killed_from_outside_costs_one_call_again(
    tested: PoolUnderTest, tmp_path: Path
) -> None:
    began = tmp_path / "began"
    call = asyncio.create_task(tested.call("sleeps", began))
    first = await written(began)
    os.kill(first, signal.SIGKILL)
    if not tested.retries:
        with pytest.raises(ProcessFailed, match="killed by signal 9"):
            await call
        return
    async with asyncio.timeout(PATIENCE_S):
        while await written(began) == first:
            await asyncio.sleep(0.01)
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call


async def test_a_cancelled_call_frees_the_place_of_its_process(tested: PoolUnderTest, tmp_path: Path) -> None:
    call = asyncio.create_task(tested.call("sleeps", tmp_path / "began"))
    first = await written(tmp_path / "began")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    async with asyncio.timeout(PATIENCE_S):
        while Path(f"/proc/{first}").exists():  # it is this process's child, which its watcher buries
            await asyncio.sleep(0.01)
        while (second := await first_free(tested)) is None:
            await asyncio.sleep(0.01)
    assert second != first


async def first_free(tested: PoolUnderTest) -> int | None:
    """The id of the process that takes the next call; None if none was free in time."""
    with contextlib.suppress(TimeoutError):
        return await tested.call("pid")  # type: ignore[no-any-return]
    return None


@pytest.mark.parametrize("tested", ["worker's rewards", "service"], indirect=True)
async def test_a_reward_that_gets_no_process_says_so(tested: PoolUnderTest, tmp_path: Path) -> None:
    call = asyncio.create_task(tested.call("sleeps", tmp_path / "began"))
    await written(tmp_path / "began")
    with pytest.raises(
        TimeoutError, match=r"pid has got no process within rewards.queue_timeout_s=0.2: all 1"
    ):
        await tested.call("pid")
    (wait,) = tested.processes.waits.current()
    assert wait.text == "workflow.sleeps, which computes"
    assert wait.limit == f"rewards.timeout_s={PATIENCE_S:g} ends it"
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call


async def written(path: Path) -> int:
    """The number in a file, once it is there."""
    async with asyncio.timeout(PATIENCE_S):
        while not (path.exists() and path.read_text()):
            await asyncio.sleep(0.01)
    return int(path.read_text())
