"""Environments and the recipe's own set-up in a rollout worker."""

import pytest

from flexmarl.actors.errors import RecipeError
from flexmarl.actors.rollout.rollout import Rollout

from .fake_cluster import QUERY, SOLVER, FakeCluster, serve, start_step

ENVIRONMENT = """
    ...

from pathlib import Path
from flexmarl.actors import Environment, in_process

LOG = []
note = LOG.append

async def setup():
    note("setup")

async def teardown():
    note("teardown")

class Growing(Environment):
    async def setup(self):
        note("open")

    async def reset(self, query):
        self.length = 0
        return {{"solver": query.text}}

    async def step(self, turns):
        self.length += len(turns["solver"].text)
        if len(self.turns["solver"]) == 3:
            return Rewards(solver=await in_process(float, self.length))
        return {{"solver": "more"}}

    async def end(self):
        note("end")

    async def close(self):
        note("close")

{workflow}
"""


async def opened(cluster: FakeCluster, workflow: str = "workflow = Growing", **config: float) -> Rollout:
    for fake in cluster.instances["solver"]:
        fake._answer = lambda request: (65,)
    return await cluster.open(ENVIRONMENT.format(workflow=workflow), **config)


def log(rollout: Rollout) -> list[str]:
    noted: list[str] = rollout._recipe._module.LOG
    return noted


async def test_an_environment_is_set_up_once_and_plays_all_trajectories(cluster: FakeCluster) -> None:
    rollout = await opened(cluster)
    assert log(rollout) == ["setup", "open"], "before the first trajectory"
    await serve(rollout, "solver", 0)
    await start_step(rollout, 1, [QUERY], 3, {"solver": 0, "judge": 0})
    group = await cluster.closed()
    assert group.failures == []
    assert group.rewards[SOLVER] == [3.0] * 3 and group.samples[SOLVER] == 9 and group.failures == []
    await cluster.system.remove("rollout")
    assert log(rollout) == ["setup", "open", *["end"] * 3, "close", "teardown"]


async def test_a_limit_fails_the_trajectory_and_its_environment_ends(cluster: FakeCluster) -> None:
    rollout = await opened(cluster, trajectory_turns=2)
    await serve(rollout, "solver", 0)
    await start_step(rollout, 1, [QUERY], 1, {"solver": 0, "judge": 0})
    (failure,) = (await cluster.closed()).failures
    assert failure.error.startswith("LimitReached: agent solver") and log(rollout)[-1] == "end"


async def test_a_setup_that_fails_is_named_with_its_line(cluster: FakeCluster) -> None:
    failing = "async def setup():\n    raise OSError('no disk')\nworkflow = Growing"
    with pytest.raises(RecipeError, match=r"setup failed: OSError: no disk(.|\n)*in setup"):
        await opened(cluster, failing)


async def test_a_setup_that_hangs_is_ended(cluster: FakeCluster) -> None:
    hangs = "async def setup():\n    await asyncio.Event().wait()\nworkflow = Growing"
    with pytest.raises(RecipeError, match=r"setup failed: TimeoutError: not done within 5 s"):
        await opened(cluster, hangs, setup_timeout_s=5)


async def test_another_class_is_no_workflow(cluster: FakeCluster) -> None:
    with pytest.raises(RecipeError, match=r"workflow is the class Path, which is not derived from flexmarl"):
        await opened(cluster, "workflow = Path")


SANDBOXED = """
    from flexmarl.actors import run_in_sandbox
    turn = await agents["solver"].generate(query.text)
    result = await run_in_sandbox(["cat", "answer"], files={"answer": turn.text})
    return Rewards(solver=float(result.stdout == turn.text))
"""


async def test_a_workflow_has_the_sandbox_of_its_worker(cluster: FakeCluster) -> None:
    rollout = await cluster.open(SANDBOXED)
    await serve(rollout, "solver", 0)
    await start_step(rollout, 1, [QUERY], 2, {"solver": 0, "judge": 0})
    group = await cluster.closed()
    assert group.failures == [] and group.rewards[SOLVER] == [1.0, 1.0]
