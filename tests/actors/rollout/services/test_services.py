"""The outside services of a worker: a further kind is a row, and the workflow reaches it."""

import asyncio
from contextvars import ContextVar

import pytest

from flexmarl.actors.rollout.services import services
from flexmarl.actors.rollout.services.service import OpenServices, ServiceWorker
from flexmarl.actors.rollout.services.services import WorkflowServices
from flexmarl.actors.rollout.services.worker_processes import WorkerProcesses
from flexmarl.actors.rollout.trajectory import Trajectory

from ..fake_cluster import QUERY, FakeCluster, serve, start_step

current_oracle: ContextVar["tuple[Oracle, Trajectory | None] | None"] = ContextVar("oracle", default=None)
LIMIT = "oracle.timeout_s=9 ends it"


class Oracle:
    """A kind that the table lacks: it answers with the name of the trajectory that asks."""

    def __init__(self, worker: ServiceWorker, services: OpenServices) -> None:
        self.worker, self.processes = worker, services.of(WorkerProcesses).pool
        self.has_closed = False
        opened.append(self)

    def enter(self, trajectory: Trajectory | None) -> None:
        current_oracle.set((self, trajectory))

    async def close(self) -> None:
        self.has_closed = True


opened: list[Oracle] = []


async def ask_oracle() -> str:
    """Is called by a workflow."""
    current = current_oracle.get()
    assert current is not None
    oracle, trajectory = current
    if trajectory is None:
        return "setup"
    with oracle.worker.waits.service(trajectory, "an answer of the oracle", LIMIT, "oracle"):
        await asyncio.sleep(2.0)
    trajectory.add_figures({"reward_calls": 1})
    return trajectory.name


RECIPE = f"""
    workflow.answers.append(await ask_oracle())
    await agents["solver"].generate("x")
    return Rewards(solver=1.0)
workflow.answers = []

async def setup():
    workflow.answers.append(await ask_oracle())

from {__name__} import ask_oracle
"""


@pytest.fixture(autouse=True)
def row(monkeypatch: pytest.MonkeyPatch) -> None:
    opened.clear()
    monkeypatch.setattr(services, "SERVICES", (*services.SERVICES, Oracle))


async def test_a_row_is_all_that_a_further_service_needs(cluster: FakeCluster) -> None:
    rollout = await cluster.open(RECIPE)
    workflow = rollout._recipe.workflow
    assert workflow.answers == ["setup"]  # type: ignore[attr-defined]  # the test's own
    await serve(rollout, "solver", 0)
    await start_step(rollout, 1, [QUERY], 2, {"solver": 0, "judge": 0})
    await asyncio.sleep(1.0)
    assert [(wait.text, wait.limit, wait.actor) for wait in rollout.waits()] == [
        ("an answer of the oracle (2 times)", LIMIT, "oracle")
    ], "a wait of its own, and none in the recipe's code"
    group = await cluster.closed()
    assert sorted(workflow.answers[1:]) == ["1:q7_0", "1:q7_1"]  # type: ignore[attr-defined]
    assert group.figures["reward_calls"] == 2 and not group.failures
    (oracle,) = opened
    assert (oracle.worker.number, oracle.worker.life) == (0, rollout.writer) and not oracle.has_closed
    await cluster.system.remove("rollout")
    assert oracle.has_closed


async def test_all_are_closed_also_behind_one_that_fails(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fails(Oracle):
        async def close(self) -> None:
            await super().close()
            raise OSError("no connection")

    monkeypatch.setattr(services, "SERVICES", (*services.SERVICES, Fails))
    await cluster.open("return Rewards()")
    with pytest.raises(OSError, match="no connection"):
        await WorkflowServices(opened[0].worker).close()
    assert [oracle.has_closed for oracle in opened[-2:]] == [True, True]
    assert [oracle.has_closed for oracle in opened[:2]] == [False, False], "the worker's own"
    monkeypatch.setattr(Fails, "close", Oracle.close)


async def test_a_row_that_comes_later_is_not_there_yet(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.open("return Rewards()")
    monkeypatch.setattr(services, "SERVICES", (*reversed(services.SERVICES),))
    with pytest.raises(LookupError, match="no row of SERVICES before this one opens WorkerProcesses"):
        WorkflowServices(opened[0].worker)
