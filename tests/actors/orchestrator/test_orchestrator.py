"""Whole runs of the orchestrator and the rollout actor, among a trainer, a store and instances that only keep books."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from flexmarl.actors.errors import WrongVersion
from flexmarl.actors.messages import (
    GenerateRequest,
    Generation,
    LeasedBatch,
    MicroBatchTrained,
    OrchestratorApi,
    PolicyStepped,
    Published,
    Query,
    RunResult,
    Sample,
)
from flexmarl.actors.names import Step
from flexmarl.actors.orchestrator import checkpoint
from flexmarl.actors.orchestrator.orchestrator import Orchestrator
from flexmarl.actors.orchestrator.orchestrator_config import (
    CheckpointConfig,
    EvaluationConfig,
    ScheduleConfig,
    TrainingConfig,
)
from flexmarl.actors.orchestrator.query_order import QueryOrder
from flexmarl.actors.orchestrator.recorder import StepRecord
from flexmarl.actors.rollout.rollout import Rollout
from flexmarl.actors.rollout.rollout_config import RolloutConfig, SamplingConfig
from flexmarl.actors.run_events import RunEvent
from flexmarl.actors.step_metrics import StepMetrics
from flexmarl.actors.store.segment_arena import ArenaLimits, SegmentArena, SegmentGrant
from flexmarl.actors.store_client import ExperienceReader, segment_directories
from flexmarl.actors.workflow import RecipeConfig
from flexmarl.core.actor import Actor, endpoint
from flexmarl.core.ref import ActorRef
from flexmarl.core.system import ActorSystem
from flexmarl.transport.handle import StateHandle

AGENTS = ("solver", "judge")
RECIPE = """
import asyncio
from flexmarl.actors.workflow import Query, Rewards

asked = []

async def workflow(query, agents):
    if query.id.startswith("e"):
        return Rewards()
    draft = await agents["solver"].generate(query.text)
    if query.data["position"] % 3 == query.data["hangs"]:
        await asyncio.Event().wait()
    await asyncio.gather(*(agents["judge"].generate([draft, str(n)]) for n in range(2)))
    asked.append(query.data["position"])
    if query.data["position"] % 3 == query.data["equal"]:
        return Rewards(solver=0.5, judge=0.5)
    return Rewards(solver=float(len(asked)), judge=float(len(asked)))

def train_query(position, seed, hangs=-1, equal=-1):
    return Query(f"q{position}", "2+2", {"position": position, "hangs": hangs, "equal": equal})

def eval_queries(seed, **data):
    return [Query("e0", "1+1")]
"""


PLAIN = RolloutConfig()


class Instance(Actor):
    """Serves one version at a time, as the real one does; a turn takes some rounds of the loop."""

    def __init__(self) -> None:
        self.version: int | None = None

    @endpoint
    async def apply_weights(self, published: Published) -> int:
        self.version = None
        await asyncio.sleep(0)
        self.version = published.version
        return published.version

    @endpoint
    async def generate(self, request: GenerateRequest) -> Generation:
        if request.policy_version != self.version:
            raise WrongVersion("agent", request.policy_version, self.version)
        for _ in range(request.seed % 20):
            await asyncio.sleep(0)
            if request.policy_version != self.version:
                assert request.resumable, "only under async"
                return Generation("x", (1,), (9,), (-0.5,), request.policy_version, "interrupted")
        return Generation("x", (1,), (2, 3), (-0.5, -0.5), request.policy_version, "stop")


class Store(Actor):
    def __init__(self, memory: Path, folder: Path) -> None:
        self.ready: dict[str, list[Sample]] = {agent: [] for agent in AGENTS}
        self.places = segment_directories(memory, folder)
        self.arena = SegmentArena(self.places, ArenaLimits(segment_bytes=2**16))

    async def on_start(self) -> None:
        self.reader = ExperienceReader(self.ref, self.places)

    @endpoint
    async def grant(self, writer: str, at_least_bytes: int, finished: list[str]) -> SegmentGrant:
        return self.arena.grant(writer, at_least_bytes)

    @endpoint
    async def put(self, writer: str, parts: dict[str, dict[str, Any]]) -> None:
        for agent, columns in parts.items():
            batch = LeasedBatch(0, {"agent": [agent] * len(columns["sample_id"]), **columns})
            self.ready[agent] += await self.reader.samples(batch)


class Trainer(Actor):
    def __init__(self, store: Store) -> None:
        self.store = store
        self.versions = dict.fromkeys(AGENTS, 0)
        self.trained: dict[str, list[Sample]] = {agent: [] for agent in AGENTS}
        self.staleness: list[int] = []
        self.batches: dict[str, list[int]] = {agent: [] for agent in AGENTS}
        self.accumulated = dict.fromkeys(AGENTS, 0)

    @endpoint
    async def publish(self, agent: str) -> Published:
        version = self.versions[agent]
        return Published(agent, version, StateHandle("a", version, "shm", "h", "p", "a", 0, 1, 0, 0, ()))

    @endpoint
    async def train(self, agent: str, policy_version: int, count: int) -> MicroBatchTrained:
        rows = self.store.ready[agent]
        rows.sort(key=lambda row: row.step)
        taken = rows[:count]
        assert policy_version == self.versions[agent] and len(taken) == count
        del rows[:count]
        await asyncio.sleep(0)
        self.staleness += [policy_version - row.policy_version for row in taken]
        self.trained[agent] += taken
        self.accumulated[agent] += count
        versions = {
            v: sum(row.policy_version == v for row in taken) for v in {row.policy_version for row in taken}
        }
        return MicroBatchTrained(count, 2 * count, versions, count, 0.0)

    @endpoint
    async def optimizer_step(self, agent: str) -> PolicyStepped:
        self.versions[agent] += 1
        count, self.accumulated[agent] = self.accumulated[agent], 0
        self.batches[agent].append(count)
        return PolicyStepped(await self.publish(agent), count, 2 * count, 0.0, 1.0, 1e-3, 0.0, 0.0, 0.0, 0.0)

    @endpoint
    async def save(self, agent: str, folder: str) -> None:
        Path(folder).mkdir(parents=True)


class Console(Actor):
    def __init__(self) -> None:
        self.steps: list[StepMetrics] = []
        self.result: asyncio.Future[RunResult] = asyncio.get_running_loop().create_future()

    @endpoint
    async def step(self, metrics: StepMetrics) -> None:
        self.steps.append(metrics)

    @endpoint
    async def phase(self, text: str, done: int | None, total: int | None) -> None: ...

    @endpoint
    async def event(self, event: RunEvent) -> None: ...

    @endpoint
    async def ended(self, result: RunResult) -> None:
        self.result.set_result(result)


def schedule(
    replacement_queries: int = 0, max_staleness: int = 0, global_batch: dict[str, int] | None = None
) -> ScheduleConfig:
    return ScheduleConfig(
        deterministic=False,
        mode="async" if max_staleness else "strict",
        max_staleness=max_staleness,
        global_batch=global_batch or {},
        whole_step=(),
        training=TrainingConfig(steps=6, queries_per_step=3, trajectories_per_query=2, micro_batch=2),
        evaluation=EvaluationConfig(),
        checkpoint=CheckpointConfig(every=3),
        max_failed_share=1.0,
        replacement_queries=replacement_queries,
        sft_batches={},
    )


class House:
    def __init__(self, system: ActorSystem, folder: Path, max_staleness: int = 0) -> None:
        self.system, self.folder = system, folder
        self.store, self.console = Store(folder / "memory", folder / "store"), Console()
        self.trainer = Trainer(self.store)
        self.max_staleness = max_staleness

    async def run(
        self,
        data: dict[str, Any],
        rollout: RolloutConfig = PLAIN,
        *,
        global_batch: dict[str, int] | None = None,
    ) -> RunResult:
        (self.folder / "workflow.py").write_text(RECIPE)
        recipe = RecipeConfig(folder=str(self.folder), data=data, seed=1)
        (self.folder / "checkpoints").mkdir()
        system = self.system
        instances = {
            agent: [await system.add(Instance(), f"{agent}-{n}") for n in range(2)] for agent in AGENTS
        }
        store = await system.add(self.store, "store")
        trainer = await system.add(self.trainer, "trainer")
        console = await system.add(self.console, "console")
        actor = Rollout(
            recipe,
            {agent: SamplingConfig() for agent in AGENTS},
            dict.fromkeys(AGENTS, "one"),
            instances,  # type: ignore[arg-type]  # all that is asked of them they have
            store,  # type: ignore[arg-type]
            ActorRef("orchestrator", store.address, system, OrchestratorApi),
            rollout,
            str(self.folder / "memory"),
            str(self.folder / "store"),
        )
        orchestrator = Orchestrator(
            schedule(rollout.replacement_queries, self.max_staleness, global_batch),
            recipe,
            trainer,  # type: ignore[arg-type]
            await system.add(actor, "rollout"),
            instances,  # type: ignore[arg-type]
            console,
            str(self.folder / "checkpoints"),
            None,
        )
        await (await system.add(orchestrator, "orchestrator")).api.start()
        done: set[asyncio.Future[Any]] = {self.console.result, system.failure}
        await asyncio.wait(done, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        if system.failure.done():
            raise system.failure.result()
        return self.console.result.result()

    def groups(self, agent: str) -> set[str]:
        return {sample.group for sample in self.trainer.trained[agent]}


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
async def test_every_sample_is_trained_once_and_none_is_staler_than_it_may_be(
    system: ActorSystem, tmp_path: Path, max_staleness: int
) -> None:
    house = House(system, tmp_path, max_staleness)
    assert (await house.run({})).last_step == 6
    assert len(house.trainer.trained["solver"]) == 6 * 3 * 2
    assert len(house.trainer.trained["judge"]) == 6 * 3 * 2 * 2
    ids = [row.sample_id for rows in house.trainer.trained.values() for row in rows]
    assert len(ids) == len(set(ids))
    assert max(house.trainer.staleness) <= max_staleness
    assert (max(house.trainer.staleness) > 0) == (max_staleness > 0)
    rows = [row for rows in house.trainer.trained.values() for row in rows]
    assert all(row.policy_version == min(row.token_versions) for row in rows)
    if not max_staleness:
        assert not any(row.version_changes for row in rows)
    lines = sorted(house.console.steps, key=lambda line: line.step)
    assert max(line.max_staleness for line in lines) == max(house.trainer.staleness)
    versions = [{name: policy.version for name, policy in line.by_policy.items()} for line in lines]
    assert versions == [{"solver": n, "judge": n} for n in range(1, 7)]


async def test_a_fixed_batch_is_kept_until_a_checkpoint_takes_all(
    system: ActorSystem, tmp_path: Path
) -> None:
    house = House(system, tmp_path, 2)
    await house.run({}, global_batch={"judge": 10})
    assert house.trainer.batches["judge"] == [10, 10, 16] * 2, "12 samples a step; steps 3 and 6 are saved"
    assert house.trainer.batches["solver"] == [6] * 6
    assert max(house.trainer.staleness) <= 2


async def test_environments_that_hang_wedge_no_step(system: ActorSystem, tmp_path: Path) -> None:
    """Every third query hangs for ever: its group is dropped, and the next query takes its place."""
    house = House(system, tmp_path)
    rollout = RolloutConfig(trajectory_timeout_s=0.2, min_trajectories=2, replacement_queries=4)
    assert (await house.run({"hangs": 1}, rollout)).last_step == 6
    assert len(house.trainer.trained["solver"]) == 6 * 3 * 2
    positions = sorted(int(group.partition(":q")[2]) for group in house.groups("solver"))
    assert positions == [n for n in range(27) if n % 3 != 1], "queries are drawn in order, each once"
    assert sum(line.replaced_queries for line in house.console.steps) == 9
    assert sum(line.dropped_groups for line in house.console.steps) == 9
    (last,) = (tmp_path / "checkpoints").glob("step_000006")
    assert checkpoint.load(last).next_position == 27


async def test_zero_advantage_groups_are_replaced(system: ActorSystem, tmp_path: Path) -> None:
    house = House(system, tmp_path)
    await house.run({"equal": 0}, RolloutConfig(drop_zero_advantage=True, replacement_queries=4))
    assert all(len(set(row.group_rewards)) == 2 for row in house.trainer.trained["solver"])
    assert len(house.groups("judge")) == 18


async def test_queries_begin_in_the_order_of_their_positions(tmp_path: Path) -> None:
    """Two groups dropped at once are replaced at once, and the first query takes longer to be read than the second."""
    (tmp_path / "workflow.py").write_text(RECIPE)
    recipe = RecipeConfig(folder=str(tmp_path), data={}, seed=1)
    rollout: Any = Begun()
    nobody: Any = None
    orchestrator = Orchestrator(
        schedule(), recipe, nobody, rollout, {}, nobody, str(tmp_path / "checkpoints"), None
    )
    orchestrator._records[1] = StepRecord(Step(1), {}, (), 0.0)
    orchestrator._queries = QueryOrder(0)
    orchestrator._queries.begin(1, 3)
    second_is_read = threading.Event()
    read = orchestrator._recipe.train_query

    def slowly(position: int) -> Query:
        if position == 3:
            second_is_read.wait(0.2)
        else:
            second_is_read.set()
        return read(position)

    orchestrator._recipe.train_query = slowly  # type: ignore[method-assign]
    await asyncio.gather(orchestrator._replacement(1), orchestrator._replacement(1))
    assert rollout.begun == ["q3", "q4"]


class Begun:
    """A rollout actor that only says what it was asked to begin."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.api = self

    async def start_step(self, step: int, queries: list[Query], *_: object) -> None:
        self.begun += [query.id for query in queries]
