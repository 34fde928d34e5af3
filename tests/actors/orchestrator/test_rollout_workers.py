"""Rollout workers that die, freeze and continue in the middle of whole runs, in virtual time: each sample is trained
once, and what was begun again is counted."""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flexmarl.actors.errors import TooFewRows
from flexmarl.actors.messages import (
    GenerateRequest,
    Generation,
    GroupClosed,
    LoggedTrajectory,
    MicroBatchTrained,
    Query,
    RolloutApi,
    TextTo,
    VersionRange,
    WorkerIncarnation,
)
from flexmarl.actors.names import PolicyName, Step, Version
from flexmarl.actors.orchestrator import rollout_workers
from flexmarl.actors.orchestrator.rollout_workers import GroupWork, RolloutWorkers
from flexmarl.actors.rollout.rollout import Rollout
from flexmarl.actors.rollout.rollout_setup import RolloutSetup
from flexmarl.actors.run_events import Evaluated, WorkerLost
from flexmarl.core.actor import Actor, endpoint
from flexmarl.core.errors import ActorDead, SystemClosed, is_loss
from flexmarl.core.protocol.session import Settings
from flexmarl.core.ref import ActorRef
from flexmarl.core.system import ActorSystem
from flexmarl.core.testing import virtual_time
from flexmarl.core.waits import Wait
from flexmarl.core.wire.memory import MemoryNetwork

from .fake_cluster import FakeCluster, Instance, Supervisor, Trainer

SETTINGS = Settings(heartbeat_s=0.5, missed_heartbeats=3, connect_timeout_s=1.0)


class Life(Rollout):
    """A worker's life with a process id of its own."""

    def __init__(self, setup: RolloutSetup, pid: int) -> None:
        super().__init__(setup)
        self.pid = pid

    @endpoint
    async def enlist(self) -> AsyncGenerator[WorkerIncarnation]:
        yield WorkerIncarnation(self.writer, self.pid)
        await asyncio.Event().wait()


class SlowInstance(Instance):
    @endpoint
    async def generate(self, request: GenerateRequest, text_to: TextTo | None = None) -> Generation:
        await asyncio.sleep(0.05 + request.seed % 100 / 100)
        return await super().generate(request)


class KillingSupervisor(Supervisor):
    def __init__(self, processes: "Processes") -> None:
        super().__init__()
        self._processes = processes

    @endpoint
    async def lost(self, name: str, incarnation: int, reason: str) -> None:
        self.lost_actors.append((name, incarnation))
        if self._processes.is_killing and self._processes.running.get(name) == incarnation:
            self._processes.kill(name)


class Processes(FakeCluster):
    """Every worker has a system of its own, which is started again when it has ended."""

    def __init__(self, network: MemoryNetwork, system: ActorSystem, folder: Path, **options: Any) -> None:
        super().__init__(system, folder, **options)
        self.network = network
        self.running: dict[str, int] = {}
        self.lives: dict[str, Life] = {}
        self.is_killing = True
        self.supervisor = KillingSupervisor(self)
        self.pids = itertools.count(1)
        self.nodes: list[asyncio.Task[None]] = []
        self.instances = {policy: [SlowInstance(), SlowInstance()] for policy in self.agents_of}
        self.patience_s = 3600.0

    async def start_worker(self, system: ActorSystem, name: str) -> ActorRef[Any]:
        self.nodes.append(asyncio.create_task(self._node(name), name=f"node {name}"))
        return system.ref(name, f"memory://{name}", RolloutApi)

    async def _node(self, name: str) -> None:
        while True:
            pid = next(self.pids)
            wire, directory = self.network.wire(name), self.system.directory
            async with ActorSystem(name, directory, wire=wire, settings=SETTINGS) as system:
                self.lives[name] = Life(self.setup, pid)
                await system.add(self.lives[name], name)
                self.running[name] = pid
                error = await system.failure
                assert isinstance(error, SystemClosed) or is_loss(error), error
                if self.running.get(name) == pid:
                    del self.running[name]
            await asyncio.sleep(0.3)

    def kill(self, name: str) -> None:
        del self.running[name]
        self.network.crash(name)

    async def close(self) -> None:
        for node in self.nodes:
            node.cancel()
        await asyncio.wait(self.nodes)

    def losses(self) -> list[WorkerLost]:
        return [event for event in self.console.events if isinstance(event, WorkerLost)]

    def check(self, max_staleness: int = 0) -> None:
        ids = Counter(row.sample_id for rows in self.trainer.trained.values() for row in rows)
        assert len(self.trainer.trained["solver"]) == 6 * 3 * 2
        assert len(self.trainer.trained["judge"]) == 6 * 3 * 2 * 2
        assert set(ids.values()) == {1}, "each sample is trained once"
        positions = sorted(int(group.partition(":q")[2]) for group in self.groups("solver"))
        assert positions == [*range(18)], "no query is left out"
        assert max(self.trainer.staleness) <= max_staleness
        restarted = sum(step.figures["restarted_groups"] for step in self.console.steps)
        assert restarted == sum(event.groups for event in self.losses())


def run(folder: Path, body: Callable[[Processes], Any], **options: Any) -> Processes:
    """A run of six steps while ``body`` strikes."""
    found: list[Processes] = []

    async def main() -> None:
        network = MemoryNetwork()
        async with ActorSystem("tests", wire=network.wire("tests"), settings=SETTINGS) as system:
            cluster = Processes(network, system, folder, **options)
            cluster.evaluate_every = 2
            striking = asyncio.create_task(body(cluster))
            try:
                assert (await cluster.run({"eval_s": 2.0})).last_step == 6
            finally:
                striking.cancel()
                await asyncio.wait([striking])
                await cluster.close()
            found.append(cluster)

    virtual_time.run(main())
    return found[0]


@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize("workers", [1, 3])
def test_kills(tmp_path: Path, workers: int, max_staleness: int) -> None:
    rng = random.Random(f"{workers} {max_staleness}")

    async def strike(cluster: Processes) -> None:
        while True:
            await asyncio.sleep(rng.uniform(0.0, 4.0))
            if cluster.running:
                cluster.kill(rng.choice(sorted(cluster.running)))

    cluster = run(tmp_path, strike, workers=workers, max_staleness=max_staleness)
    cluster.check(max_staleness)
    assert len(cluster.losses()) > 5 and any(event.groups for event in cluster.losses())


def test_a_worker_that_is_given_up_before_it_has_enlisted_delays_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host is lost as the run begins, and it is started nowhere else."""
    node = Processes._node

    async def all_but_the_first(cluster: Processes, name: str) -> None:
        await (asyncio.Event().wait() if name == "rollout-0" else node(cluster, name))

    async def look_on(cluster: Processes) -> None:
        assert "rollout-0" not in cluster.running

    monkeypatch.setattr(Processes, "_node", all_but_the_first)
    cluster = run(tmp_path, look_on, workers=2)
    cluster.check()
    assert set(cluster.lives) == {"rollout-1"}


@pytest.mark.parametrize("workers", [1, 3])
def test_freezes(tmp_path: Path, workers: int) -> None:
    """A frozen worker's tasks run on, and its messages leave when it continues: it may have been given up by then."""
    rng = random.Random(workers)

    async def strike(cluster: Processes) -> None:
        while True:
            await asyncio.sleep(rng.uniform(0.0, 3.0))
            if cluster.running:
                name = rng.choice(sorted(cluster.running))
                pid = cluster.running[name]
                cluster.network.pause(name)
                await asyncio.sleep(rng.uniform(0.0, 4.0))
                if cluster.running.get(name) == pid:
                    cluster.network.resume(name)

    cluster = run(tmp_path, strike, workers=workers)
    cluster.check()
    assert len(cluster.losses()) > 2


def test_a_zombie_that_the_supervisor_does_not_reach_harms_nothing(tmp_path: Path) -> None:
    """It is given up and continues, with messages that it sent while it was frozen."""
    frozen: list[int] = []

    async def strike(cluster: Processes) -> None:
        cluster.is_killing = False
        while "rollout-0" not in cluster.running or not cluster.trainer.trained["solver"]:
            await asyncio.sleep(0.05)
        frozen.append(cluster.running["rollout-0"])
        cluster.network.pause("rollout-0")
        while not cluster.losses():
            await asyncio.sleep(0.05)
        cluster.network.resume("rollout-0")

    cluster = run(tmp_path, strike, workers=2)
    cluster.check()
    assert len(cluster.losses()) == 1 and cluster.losses()[0].worker == "rollout-0"
    assert cluster.losses()[0].groups and "silent" in cluster.losses()[0].reason
    assert cluster.supervisor.lost_actors == [("rollout-0", frozen[0])]


def test_a_worker_that_reports_its_own_failure_is_left_to_its_supervisor(tmp_path: Path) -> None:
    """The supervisor gets the error from the worker's process, and decides by it: a recipe's error ends the run. A
    loss that is reported by another actor would be one more restart, if it arrived before."""

    async def fail() -> None:
        raise ActorDead("q7", "its disk is full")

    async def strike(cluster: Processes) -> None:
        while not cluster.trainer.trained["solver"]:
            await asyncio.sleep(0.05)
        cluster.lives["rollout-0"].background(fail(), "fails")

    cluster = run(tmp_path, strike, workers=2)
    cluster.check()
    assert len(cluster.losses()) == 1 and "its disk is full" in cluster.losses()[0].reason
    assert cluster.supervisor.lost_actors == []


def test_a_group_that_was_put_before_its_worker_died_counts_and_is_not_begun_again(tmp_path: Path) -> None:
    put: list[str] = []

    async def strike(cluster: Processes) -> None:
        cluster.store.lose_answers_of = "rollout-0"
        while not any(cluster.store.writers._reports):
            await asyncio.sleep(0.01)
        await asyncio.sleep(5.0)  # in which every group is put, and none is reported
        put.extend(report.query for of in cluster.store.writers._reports.values() for report in of)
        cluster.store.lose_answers_of = ""
        cluster.kill("rollout-0")

    cluster = run(tmp_path, strike)
    cluster.check()
    assert sorted(put) == ["q0", "q1", "q2"]
    assert [event.groups for event in cluster.losses()] == [0]


def test_a_worker_that_is_lost_in_an_evaluation(tmp_path: Path) -> None:
    async def strike(cluster: Processes) -> None:
        while len(cluster.running) < 2:
            await asyncio.sleep(0.01)
        while not any(text.startswith("evaluating") for text in cluster.console.phases):
            await asyncio.sleep(0.01)
        await asyncio.sleep(1.0)
        cluster.kill("rollout-1")

    cluster = run(tmp_path, strike, workers=2)
    cluster.check()
    assert [(event.groups, event.trajectories) for event in cluster.losses()] == [(0, 2)]
    evaluations = [event for event in cluster.console.events if isinstance(event, Evaluated)]
    assert [event.metrics["number"] for event in evaluations] == [1.5] * len(evaluations)


def test_late_reports_of_a_lost_life_are_ignored(tmp_path: Path) -> None:
    late: list[bool] = []

    async def strike(cluster: Processes) -> None:
        while not cluster.console.steps:
            await asyncio.sleep(0.01)
        orchestrator = cluster.orchestrator
        group = GroupClosed(cluster.console.steps[-1].step, "q0", {}, {}, 0.0, {}, [])
        await orchestrator.group_closed("rollout-0-of-old", group)
        late.append(True)

    run(tmp_path, strike).check()
    assert late


# ----------------------------------------------------------------------- samples that are lost with their writer


class SlowTrainer(Trainer):
    @endpoint(raises=[TooFewRows])
    async def train(self, policy: PolicyName, policy_version: Version, count: int) -> MicroBatchTrained:
        await asyncio.sleep(1.0)
        return await super().train(policy, policy_version, count)


@pytest.mark.parametrize("seed", range(4))
def test_closed_groups_whose_samples_are_lost_with_their_host_begin_again(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)

    async def body(cluster: Processes) -> None:
        cluster.store.loses_bytes = True
        cluster.trainer.__class__ = SlowTrainer
        while True:
            await asyncio.sleep(draw.uniform(0.5, 3.0))
            if cluster.running:
                cluster.kill(draw.choice(sorted(cluster.running)))

    cluster = run(tmp_path, body, workers=3, max_staleness=2)
    assert cluster.store.lost > 0
    cluster.check(max_staleness=2)


def test_the_work_that_workers_have_is_listed(tmp_path: Path) -> None:
    """The workers have groups whose turns are under way."""

    async def body(cluster: Processes) -> None:
        while len(cluster.lives) < cluster.workers:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        waits = cluster.orchestrator.waits()
        at_workers = [wait for wait in waits if wait.actor.startswith("rollout-")]
        assert at_workers and all(
            " group" in wait.text and wait.text.endswith(wait.actor) for wait in at_workers
        )
        assert all(wait.actor for wait in waits), "the workers name the causes"
        assert cluster.orchestrator.progress() > 0

    run(tmp_path, body)


class Worker(Actor):
    """Takes all work, and ends none."""

    @endpoint
    async def enlist(self) -> AsyncGenerator[WorkerIncarnation]:
        yield WorkerIncarnation("rollout-0/1", 1)
        await asyncio.Event().wait()

    @endpoint
    async def start_step(
        self,
        writer: str,
        step: Step,
        queries: list[tuple[int, Query]],
        trajectories: int,
        versions: dict[PolicyName, VersionRange],
        submitted: list[str] | None = None,
        logged: dict[str, list[LoggedTrajectory]] | None = None,
        sessions: list[str] | None = None,
        success_state: list[float] | None = None,
    ) -> None: ...


def test_what_waits_for_workers_and_what_they_have_is_named_since_the_last_group_closed() -> None:
    async def main() -> None:
        network, tasks = MemoryNetwork(), asyncio.TaskGroup()
        async with ActorSystem("tests", wire=network.wire("tests")) as system, tasks:
            ref: ActorRef[Any] = await system.add(Worker(), "rollout-0")
            listener: Any = SimpleNamespace(finished=False)
            work: list[asyncio.Task[None]] = []
            workers = RolloutWorkers(
                [ref], ref, ref, listener, lambda job, _: work.append(tasks.create_task(job))
            )
            queries = [Query(f"q{n}", "?") for n in range(4)]
            await workers.begin([GroupWork(Step(1), n, query, 2, {}) for n, query in enumerate(queries)])
            await asyncio.sleep(2.0)
            assert workers.waits() == [
                Wait(
                    "a rollout worker for 4 groups, or trajectories of an evaluation",
                    2.0,
                    "",
                    "rollout workers",
                ),
                Wait("rollout-0, which has not begun", 2.0, "", "rollout-0"),
            ]
            await workers.start()
            await asyncio.sleep(0.5)
            (wait,) = workers.waits()
            assert (wait.text, wait.actor) == ("4 groups (q0, q1, q2 ...) at rollout-0", "rollout-0")
            assert workers.closed("rollout-0/1", closed("q1"))
            await asyncio.sleep(3.0)
            (wait,) = workers.waits()
            assert (wait.text, wait.seconds) == ("3 groups (q0, q2, q3) at rollout-0", 3.0)
            for task in work:
                task.cancel()

    virtual_time.run(main())


def closed(query: str) -> GroupClosed:
    return GroupClosed(Step(1), query, {}, {}, 0.0, {}, [])


def test_work_is_named_by_groups_and_by_the_number_of_trajectories() -> None:
    assert rollout_workers._words([(Step(1), "q0")]) == "1 group (q0)"
    assert rollout_workers._words([0]) == "1 trajectory of an evaluation"
    assert rollout_workers._words([(Step(1), "a"), 0, 1]) == "1 group (a) and 2 trajectories of an evaluation"
