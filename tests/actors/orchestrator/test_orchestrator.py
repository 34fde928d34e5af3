"""Whole runs of the orchestrator and rollout workers, among a trainer, a store and instances that only keep books."""

import asyncio
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from flexmarl.actors.filters.equal_rewards import EqualRewards
from flexmarl.actors.messages import GroupClosed, Query
from flexmarl.actors.names import PolicyName, Step
from flexmarl.actors.orchestrator import checkpoint
from flexmarl.actors.orchestrator.orchestrator import Orchestrator
from flexmarl.actors.orchestrator.orchestrator_setup import OrchestratorSetup
from flexmarl.actors.orchestrator.pipeline import Pipeline
from flexmarl.actors.orchestrator.recorder import StepRecord
from flexmarl.actors.orchestrator.rollout_workers import GroupWork
from flexmarl.actors.recipe.recipe import RecipeConfig
from flexmarl.actors.rollout.rollout_config import RolloutConfig
from flexmarl.actors.run_events import CheckpointSaved, SftDone
from flexmarl.core.ref import ActorRef
from flexmarl.core.system import ActorSystem
from flexmarl.core.testing import virtual_time
from flexmarl.core.wire.memory import MemoryNetwork

from .fake_cluster import AGENTS, RECIPE, FakeCluster, plan


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
async def test_every_sample_is_trained_once_and_none_is_staler_than_it_may_be(
    system: ActorSystem, tmp_path: Path, max_staleness: int
) -> None:
    cluster = FakeCluster(system, tmp_path, max_staleness)
    assert (await cluster.run({})).last_step == 6
    assert len(cluster.trainer.trained["solver"]) == 6 * 3 * 2
    assert len(cluster.trainer.trained["judge"]) == 6 * 3 * 2 * 2
    ids = [row.sample_id for rows in cluster.trainer.trained.values() for row in rows]
    assert len(ids) == len(set(ids))
    assert max(cluster.trainer.staleness) <= max_staleness
    assert (max(cluster.trainer.staleness) > 0) == (max_staleness > 0)
    rows = [row for rows in cluster.trainer.trained.values() for row in rows]
    assert all(row.policy_version == min(row.token_versions) for row in rows)
    if not max_staleness:
        assert not any(row.version_changes for row in rows)
    lines = sorted(cluster.console.steps, key=lambda line: line.step)
    assert max(line.figures["max_staleness"] for line in lines) == max(cluster.trainer.staleness)
    versions = [line.versions for line in lines]
    assert versions == [{"solver": n, "judge": n} for n in range(1, 7)]


async def test_the_metrics_of_every_step_come_before_the_end_also_if_the_store_is_busy(
    system: ActorSystem, tmp_path: Path
) -> None:
    cluster = FakeCluster(system, tmp_path)
    cluster.store.forget_s = 0.1
    await cluster.run({})
    assert [line.step for line in cluster.console.steps] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("max_staleness", [0, 2])
async def test_two_agents_of_one_policy_are_trained_together(
    system: ActorSystem, tmp_path: Path, max_staleness: int
) -> None:
    shared = PolicyName("shared")
    cluster = FakeCluster(
        system, tmp_path, max_staleness, policy_of=dict.fromkeys(AGENTS, "shared"), sft_batches=13
    )
    assert (await cluster.run({})).last_step == 6
    assert cluster.trainer.sft_batches == [("shared", 0, 10), ("shared", 10, 3)], "once, for both agents"
    assert len(cluster.trainer.trained["solver"]) == 6 * 3 * 2
    assert len(cluster.trainer.trained["judge"]) == 6 * 3 * 2 * 2
    assert cluster.trainer.batches == {"shared": [3 * 2 * 3] * 6}, (
        "one optimizer step takes both agents' rows"
    )
    assert max(cluster.trainer.staleness) <= max_staleness
    assert [instance.version for instance in cluster.instances[shared]] == [6, 6]
    state = checkpoint.load(checkpoint.committed_folder(tmp_path / "checkpoints", Step(6)))
    assert state.versions == {"shared": 6}
    assert (tmp_path / "checkpoints" / "step_000006" / "shared").is_dir()


async def test_supervised_batches_are_saved_before_the_first_step(
    system: ActorSystem, tmp_path: Path
) -> None:
    cluster = FakeCluster(system, tmp_path, sft_batches=3)
    await cluster.run({})
    saved = [event for event in cluster.console.events if isinstance(event, (SftDone, CheckpointSaved))]
    assert [type(event) for event in saved[:3]] == [SftDone, SftDone, CheckpointSaved]
    assert [event.step for event in saved[2:] if isinstance(event, CheckpointSaved)] == [0, 3, 6]


async def test_a_fixed_batch_is_kept_until_a_checkpoint_takes_all(
    system: ActorSystem, tmp_path: Path
) -> None:
    cluster = FakeCluster(system, tmp_path, 2)
    await cluster.run({}, global_batch={PolicyName("judge"): 10})
    assert cluster.trainer.batches["judge"] == [10, 10, 16] * 2, "12 samples a step; steps 3 and 6 are saved"
    assert cluster.trainer.batches["solver"] == [6] * 6
    assert max(cluster.trainer.staleness) <= 2


def test_environments_that_hang_wedge_no_step(tmp_path: Path) -> None:
    """Every third query hangs for ever: its group is dropped, and the next query takes its place. In virtual time:
    on a busy machine another query could pass the deadline too."""

    async def main() -> None:
        async with ActorSystem("tests", wire=MemoryNetwork().wire("tests")) as system:
            cluster = FakeCluster(system, tmp_path)
            rollout = RolloutConfig(trajectory_timeout_s=0.2, min_trajectories=2, replacement_queries=4)
            assert (await cluster.run({"hangs": 1}, rollout)).last_step == 6
            assert len(cluster.trainer.trained["solver"]) == 6 * 3 * 2
            positions = sorted(int(group.partition(":q")[2]) for group in cluster.groups("solver"))
            assert positions == [n for n in range(27) if n % 3 != 1], "queries are drawn in order, each once"
            assert sum(line.figures["replaced_queries"] for line in cluster.console.steps) == 9
            assert sum(line.figures["dropped_groups"] for line in cluster.console.steps) == 9
            (last,) = (tmp_path / "checkpoints").glob("step_000006")
            assert checkpoint.load(last).queries.drawn == 27

    virtual_time.run(main())


async def test_groups_with_equal_rewards_are_replaced(system: ActorSystem, tmp_path: Path) -> None:
    cluster = FakeCluster(system, tmp_path)
    await cluster.run({"equal": 0}, RolloutConfig(filters=(EqualRewards(),), replacement_queries=4))
    assert all(row.advantage for row in cluster.trainer.trained["solver"])
    assert len(cluster.groups("judge")) == 18


def without_actors(system: ActorSystem, tmp_path: Path) -> Orchestrator:
    (tmp_path / "workflow.py").write_text(RECIPE)
    recipe = RecipeConfig(folder=str(tmp_path), data={}, seed=1)
    nobody: ActorRef[Any] = ActorRef("nobody", "ipc://nowhere")
    orchestrator = Orchestrator(
        OrchestratorSetup(
            plan=plan(()),
            policies={},
            trajectories_per_query=2,
            max_failed_share=1.0,
            group_order="arrival",
            recipe=recipe,
            trainer=nobody,
            workers=[],
            store=nobody,
            supervisor=nobody,
            router=nobody,
            console=nobody,
            checkpoints=tmp_path / "checkpoints",
            checkpoints_kept=2,
            resume_from=None,
        )
    )
    orchestrator.system = system
    return orchestrator


async def test_a_loose_group_that_ends_after_its_step_is_forgotten(
    system: ActorSystem, tmp_path: Path
) -> None:
    orchestrator = without_actors(system, tmp_path)
    orchestrator._pipeline = Pipeline(plan(()), {})
    await orchestrator._queries.start()
    orchestrator._queries.begin(Step(1), {})
    group = GroupWork(Step(1), 0, Query("mine", "1"), 2, {}, submitted=True)
    await orchestrator._workers.begin([group])
    orchestrator._loose.groups.begin(group.key)
    await orchestrator._loose.end(GroupClosed(*group.key, {}, {}, 0.0, {}, [], "late"), submitted=True)
    assert group.key not in orchestrator._loose.groups and not orchestrator._workers._groups


async def test_queries_begin_in_the_order_of_their_positions(system: ActorSystem, tmp_path: Path) -> None:
    """Two groups dropped at once are replaced at once, and the first query takes longer to be read than the second."""
    orchestrator = without_actors(system, tmp_path)
    begun: list[str] = []

    async def begin(groups: Iterable[GroupWork]) -> None:
        begun.extend(group.query.id for group in groups)

    orchestrator._workers.begin = begin  # type: ignore[method-assign]
    one = Step(1)
    orchestrator._records[one] = StepRecord(one, {}, (), 0.0)
    second_is_read = threading.Event()
    read = orchestrator._recipe.train_query

    def slowly(position: int) -> Query:
        if position == 3:
            second_is_read.wait(0.2)
        elif position == 4:
            second_is_read.set()
        return read(position)

    orchestrator._recipe.train_query = slowly  # type: ignore[method-assign]
    await orchestrator._queries.start()
    orchestrator._queries.begin(one, {})
    async with orchestrator._queries.draw(one, 3):
        pass
    await asyncio.gather(orchestrator._replacement(one), orchestrator._replacement(one))
    assert begun == ["q3", "q4"]
