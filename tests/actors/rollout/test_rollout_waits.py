"""The waits of a rollout worker: trajectories in the recipe's code, turns, the judge, and the setup."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flexmarl.actors.messages import Query, VersionRange
from flexmarl.actors.names import PolicyName, Step, Version
from flexmarl.actors.rollout.rollout_config import RolloutConfig
from flexmarl.actors.rollout.rollout_waits import RolloutWaits
from flexmarl.actors.rollout.trajectory import Trajectory
from flexmarl.core.testing import virtual_time

SOURCE = """async def judge(event):
    await event.wait()

async def workflow(event):
    await judge(event)
"""
PLACE = "at workflow.py:2, in judge: await event.wait()"
LIMIT = "rollout.trajectory_timeout_s=100 ends it"


class FakeCluster:
    def __init__(self, folder: Path) -> None:
        (folder / "workflow.py").write_text(SOURCE)
        self.names: dict[str, Any] = {}
        exec(compile(SOURCE, str(folder / "workflow.py"), "exec"), self.names)
        self.waits = RolloutWaits(folder, RolloutConfig(trajectory_timeout_s=100.0, setup_timeout_s=50.0))
        self.event = asyncio.Event()
        self.tasks: dict[Trajectory, asyncio.Task[None]] = {}

    def begin(self, number: int, work: Any = None) -> Trajectory:
        policy = PolicyName("solver")
        versions = {policy: VersionRange(Version(0), Version(0))}
        trajectory = Trajectory(Query("q", "?"), Step(3), number, versions)
        task = asyncio.ensure_future(work or self.names["workflow"](self.event))
        self.tasks[trajectory] = task
        self.waits.began(trajectory, task)
        return trajectory

    def current(self) -> list[tuple[str, float, str, str]]:
        return [(wait.text, wait.seconds, wait.limit, wait.actor) for wait in self.waits.current()]


@pytest.fixture
def in_cluster(tmp_path: Path) -> Callable[[Callable[[FakeCluster], Any]], None]:
    def run(body: Callable[[FakeCluster], Any]) -> None:
        async def main() -> None:
            cluster = FakeCluster(tmp_path)
            await body(cluster)
            for task in cluster.tasks.values():
                task.cancel()
            await asyncio.wait(cluster.tasks.values())

        virtual_time.run(main())

    return run


def test_trajectories_at_the_same_line_are_one_wait_with_three_names(in_cluster: Any) -> None:
    async def body(cluster: FakeCluster) -> None:
        first = cluster.begin(0)
        await asyncio.sleep(2.0)
        assert cluster.current() == [(f"1 trajectory (3:q_0) {PLACE}", 2.0, LIMIT, "")]
        for number in range(1, 5):
            cluster.begin(number)
        await asyncio.sleep(1.0)
        assert cluster.current() == [(f"5 trajectories (3:q_0, 3:q_1, 3:q_2, ...) {PLACE}", 3.0, LIMIT, "")]
        cluster.waits.over(first)
        assert cluster.current()[0][:2] == (f"4 trajectories (3:q_1, 3:q_2, 3:q_3, ...) {PLACE}", 1.0)
        assert cluster.waits.ended == 1

    in_cluster(body)


def test_one_that_waits_elsewhere_is_outside_the_recipe_and_one_that_has_ended_nowhere(
    in_cluster: Any,
) -> None:
    async def body(cluster: FakeCluster) -> None:
        cluster.begin(0, asyncio.sleep(1000.0))
        cluster.begin(1, asyncio.sleep(0.0))
        await asyncio.sleep(4.0)
        assert cluster.current() == [("1 trajectory (3:q_0) outside the recipe's own code", 4.0, LIMIT, "")]

    in_cluster(body)


def test_a_turn_is_a_wait_for_its_instance_and_the_trajectory_none(in_cluster: Any) -> None:
    async def body(cluster: FakeCluster) -> None:
        trajectory = cluster.begin(0)
        await asyncio.sleep(5.0)
        with cluster.waits.turn(trajectory, "turns of solver", "solver-0"):
            await asyncio.sleep(2.0)
            assert cluster.current() == [("turns of solver", 2.0, "", "solver-0")]
            with cluster.waits.turn(trajectory, "turns of solver", "solver-0"):
                pass
            assert cluster.current() == [("turns of solver", 2.0, "", "solver-0")], "one of two is left"
        assert cluster.waits.ended == 2
        await asyncio.sleep(3.0)
        assert cluster.current() == [(f"1 trajectory (3:q_0) {PLACE}", 3.0, LIMIT, "")], "since its last turn"

    in_cluster(body)


def test_a_service_is_a_wait_of_its_own_and_the_trajectory_none(in_cluster: Any) -> None:
    async def body(cluster: FakeCluster) -> None:
        trajectory = cluster.begin(0)
        await asyncio.sleep(5.0)
        limit = "rewards.timeout_s=60 ends it"
        with cluster.waits.service(trajectory, "a result from rewards-0", limit, "rewards-0"):
            await asyncio.sleep(2.0)
            assert cluster.current() == [("a result from rewards-0", 2.0, limit, "rewards-0")]
        assert cluster.waits.ended == 1
        assert cluster.current() == [(f"1 trajectory (3:q_0) {PLACE}", 7.0, LIMIT, "")]

    in_cluster(body)


def test_the_judge_outside_the_run_is_named_with_its_own_limit(in_cluster: Any) -> None:
    async def body(cluster: FakeCluster) -> None:
        trajectory = cluster.begin(0)
        await asyncio.sleep(5.0)
        with cluster.waits.judge(trajectory, "agents.solver.columns.reward.timeout_s=60"):
            await asyncio.sleep(7.0)
            text = (
                "1 trajectory (3:q_0) for rewards that a program outside the run gives: does the judge run?"
            )
            assert cluster.current() == [(text, 7.0, "agents.solver.columns.reward.timeout_s=60 ends it", "")]
        assert not trajectory.judge_limit

    in_cluster(body)


def test_the_setup_is_named_with_the_line_at_which_it_stands(in_cluster: Any) -> None:
    async def body(cluster: FakeCluster) -> None:
        async def setup() -> None:
            with cluster.waits.setup():
                await cluster.names["judge"](cluster.event)

        task = asyncio.ensure_future(setup())
        await asyncio.sleep(9.0)
        expected = (f"setup() of the recipe, {PLACE}", 9.0, "rollout.setup_timeout_s=50 ends it", "")
        assert cluster.current() == [expected]
        cluster.event.set()
        await task
        assert cluster.current() == []
        cluster.begin(0, asyncio.sleep(0))

    in_cluster(body)


def test_other_actors_are_waited_for_by_name(in_cluster: Any) -> None:
    async def body(cluster: FakeCluster) -> None:
        cluster.begin(0, asyncio.sleep(0))
        with cluster.waits.of_actor("room for the samples of a group", "store"):
            await asyncio.sleep(1.0)
            assert cluster.current() == [("room for the samples of a group", 1.0, "", "store")]
        assert cluster.current() == []

    in_cluster(body)


def test_the_time_without_a_turn_is_the_environments_and_behind_the_last_the_rewards(in_cluster: Any) -> None:
    async def body(cluster: FakeCluster) -> None:
        trajectory = cluster.begin(0)
        await asyncio.sleep(1.0)
        with cluster.waits.turn(trajectory, "turns", "router"):
            await asyncio.sleep(2.0)
            with cluster.waits.turn(trajectory, "turns", "solver-0"):
                await asyncio.sleep(4.0)
            await asyncio.sleep(8.0)
        await asyncio.sleep(16.0)
        with cluster.waits.turn(trajectory, "turns", "router"):
            await asyncio.sleep(32.0)
        await asyncio.sleep(64.0)
        cluster.waits.returned(trajectory)
        with cluster.waits.judge(trajectory, "limit"):
            await asyncio.sleep(128.0)
        assert (trajectory.environment_s, trajectory.reward_s) == (17.0, 192.0)

    in_cluster(body)
