"""The processor of a simulated rollout worker: its turns share it, and no other worker does."""

import asyncio
from contextvars import copy_context

import pytest

from flexmarl.actors.names import PolicyName
from flexmarl.core.pacing import Pacing, pacing
from flexmarl.core.testing import virtual_time
from flexmarl.launch.hosts.placement.plan import Need, Placed, Plan
from flexmarl.launch.simulate.cluster_config import ClusterConfig
from flexmarl.launch.simulate.cluster_links import ClusterLinks, StateSizes
from flexmarl.launch.simulate.worker_time import WorkerTime


def links_of_workers() -> list[Pacing | None]:
    """The links of two workers on the same host."""
    cluster = ClusterConfig.model_validate({"hosts": 1, "devices": 1, "device": "H100"})
    workers = {name: Placed("host-0", Need(name, "")) for name in ("trainer", "rollout-0", "rollout-1")}
    sizes = {PolicyName("solver"): StateSizes(1.0, 1.0, 1.0)}
    links = ClusterLinks(cluster, 1, Plan(workers), sizes)
    return [links.of(name) for name in ("rollout-0", "rollout-1")]


def ends(turns: list[tuple[int, float, float]]) -> list[float]:
    """The end of each turn, given by its worker, begin and seconds."""

    async def play() -> list[float]:
        worker_time, workers = WorkerTime(), links_of_workers()

        async def turn(begin_s: float, seconds: float) -> float:
            await asyncio.sleep(begin_s)
            await worker_time.take(seconds)
            return asyncio.get_running_loop().time()

        tasks = []
        for worker, begin_s, seconds in turns:
            context = copy_context()
            context.run(pacing.set, workers[worker])
            tasks.append(asyncio.get_running_loop().create_task(turn(begin_s, seconds), context=context))
        return await asyncio.gather(*tasks)

    return virtual_time.run(play())


def test_turns_that_come_together_are_served_together() -> None:
    assert ends([(0, 0.0, 0.5), (0, 0.0, 0.5), (0, 3.0, 0.5)]) == pytest.approx([1.0, 1.0, 3.5])


def test_a_turn_that_comes_later_takes_its_part_of_the_processor() -> None:
    assert ends([(0, 0.0, 1.0), (0, 0.5, 1.0)]) == pytest.approx([1.5, 2.0])


def test_workers_have_processors_of_their_own() -> None:
    assert ends([(0, 0.0, 0.5), (1, 0.0, 0.5), (1, 0.0, 0.5)]) == pytest.approx([0.5, 1.0, 1.0])


def test_a_turn_without_time_does_not_wait() -> None:
    assert ends([(0, 0.0, 1.0), (0, 0.5, 0.0)]) == pytest.approx([1.0, 0.5])
