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
    InstanceApi,
    LeasedBatch,
    MicroBatchTrained,
    OrchestratorApi,
    PolicyStepped,
    Published,
    Query,
    RunResult,
    Sample,
)
from flexmarl.actors.names import AgentName, PolicyName, Step, Version
from flexmarl.actors.orchestrator import checkpoint
from flexmarl.actors.orchestrator.orchestrator import Orchestrator
from flexmarl.actors.orchestrator.orchestrator_setup import OrchestratorPolicy, OrchestratorSetup
from flexmarl.actors.orchestrator.plan import Plan
from flexmarl.actors.orchestrator.query_order import QueryOrder
from flexmarl.actors.orchestrator.recorder import StepRecord
from flexmarl.actors.rollout.rollout import Rollout
from flexmarl.actors.rollout.rollout_config import RolloutConfig
from flexmarl.actors.rollout.rollout_setup import RolloutAgent, RolloutPolicy, RolloutSetup
from flexmarl.actors.run_events import RunEvent
from flexmarl.actors.step_metrics import StepMetrics
from flexmarl.actors.store.segment_arena import ArenaLimits, SegmentArena, SegmentGrant
from flexmarl.actors.store_client import ExperienceReader, segment_directories
from flexmarl.actors.workflow import RecipeConfig
from flexmarl.core.actor import Actor, endpoint
from flexmarl.core.ref import ActorRef
from flexmarl.core.system import ActorSystem
from flexmarl.transport.handle import StateHandle

AGENTS = (AgentName("solver"), AgentName("judge"))
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

def sft(agent, batch, size, seed, **data): ...
"""


PLAIN = RolloutConfig()


class Instance(Actor, InstanceApi):
    """Serves one version at a time, as the real one does; a turn takes some rounds of the loop."""

    def __init__(self) -> None:
        self.version: Version | None = None

    @endpoint
    async def apply_weights(self, published: Published) -> Version:
        self.version = None
        await asyncio.sleep(0)
        self.version = published.version
        return published.version

    @endpoint
    async def generate(self, request: GenerateRequest) -> Generation:
        version = self.version
        if version is None or version not in request.versions:
            raise WrongVersion("policy", request.versions.oldest, version)
        for _ in range(request.seed % 20):
            await asyncio.sleep(0)
            if version != self.version:
                assert request.versions.has_later_than(version), "only under async"
                return Generation("x", (1,), (9,), (-0.5,), version, "interrupted")
        return Generation("x", (1,), (2, 3), (-0.5, -0.5), version, "stop")


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
    def __init__(self, store: Store, agents_of: dict[PolicyName, list[AgentName]]) -> None:
        self.store = store
        self.agents_of = agents_of
        self.versions = dict.fromkeys(agents_of, Version(0))
        self.trained: dict[str, list[Sample]] = {agent: [] for agent in AGENTS}
        self.staleness: list[int] = []
        self.batches: dict[str, list[int]] = {policy: [] for policy in agents_of}
        self.accumulated = dict.fromkeys(agents_of, 0)
        self.sft_batches: list[tuple[str, int, int]] = []

    @endpoint
    async def sft(self, policy: PolicyName, first_batch: int, count: int) -> float:
        self.sft_batches.append((policy, first_batch, count))
        return 0.5

    @endpoint
    async def publish(self, policy: PolicyName) -> Published:
        version = self.versions[policy]
        return Published(policy, version, StateHandle("a", version, "shm", "h", "p", "a", 0, 1, 0, 0, ()))

    @endpoint
    async def train(self, policy: PolicyName, policy_version: Version, count: int) -> MicroBatchTrained:
        rows = [row for agent in self.agents_of[policy] for row in self.store.ready[agent]]
        rows.sort(key=lambda row: row.step)
        taken = rows[:count]
        assert policy_version == self.versions[policy] and len(taken) == count
        for row in taken:
            self.store.ready[row.agent].remove(row)
            self.trained[row.agent].append(row)
        await asyncio.sleep(0)
        self.staleness += [policy_version - row.policy_version for row in taken]
        self.accumulated[policy] += count
        versions = {
            v: sum(row.policy_version == v for row in taken) for v in {row.policy_version for row in taken}
        }
        return MicroBatchTrained(count, 2 * count, versions, count, 0.0)

    @endpoint
    async def optimizer_step(self, policy: PolicyName, step: Step) -> PolicyStepped:
        self.versions[policy] = Version(self.versions[policy] + 1)
        count, self.accumulated[policy] = self.accumulated[policy], 0
        self.batches[policy].append(count)
        return PolicyStepped(await self.publish(policy), count, 2 * count, 0.0, 1.0, 1e-3, 0.0, 0.0, 0.0, 0.0)

    @endpoint
    async def save(self, policy: PolicyName, folder: str) -> None:
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


def plan(
    policies: tuple[PolicyName, ...],
    replacement_queries: int = 0,
    max_staleness: int = 0,
    global_batch: dict[PolicyName, int] | None = None,
) -> Plan:
    return Plan(
        mode="async" if max_staleness else "strict",
        policies=policies,
        first_step=Step(1),
        last_step=Step(6),
        queries=3,
        micro_batch=2,
        save_every=3,
        max_staleness=max_staleness,
        global_batch=global_batch or {},
        replacement_queries=replacement_queries,
    )


class House:
    """``policy_of``: of each agent, by default one of its own name."""

    def __init__(
        self,
        system: ActorSystem,
        folder: Path,
        max_staleness: int = 0,
        policy_of: dict[str, str] | None = None,
        sft_batches: int = 0,
    ) -> None:
        self.system, self.folder = system, folder
        self.policy_of = {agent: PolicyName((policy_of or {}).get(agent, agent)) for agent in AGENTS}
        self.agents_of: dict[PolicyName, list[AgentName]] = {}
        for agent, policy in self.policy_of.items():
            self.agents_of.setdefault(policy, []).append(agent)
        self.store, self.console = Store(folder / "memory", folder / "store"), Console()
        self.trainer = Trainer(self.store, self.agents_of)
        self.max_staleness, self.sft_batches = max_staleness, sft_batches
        self.instances: dict[PolicyName, list[Instance]] = {
            p: [Instance(), Instance()] for p in self.agents_of
        }

    async def run(
        self,
        data: dict[str, Any],
        rollout: RolloutConfig = PLAIN,
        *,
        global_batch: dict[PolicyName, int] | None = None,
    ) -> RunResult:
        (self.folder / "workflow.py").write_text(RECIPE)
        recipe = RecipeConfig(folder=str(self.folder), data=data, seed=1)
        (self.folder / "checkpoints").mkdir()
        system = self.system
        instances: dict[PolicyName, list[ActorRef[Any]]] = {
            policy: [await system.add(instance, f"{policy}-{n}") for n, instance in enumerate(own)]
            for policy, own in self.instances.items()
        }
        store: ActorRef[Any] = await system.add(self.store, "store")
        setup = RolloutSetup(
            recipe=recipe,
            agents={agent: RolloutAgent(policy) for agent, policy in self.policy_of.items()},
            policies={policy: RolloutPolicy("one", refs) for policy, refs in instances.items()},
            store=store,
            orchestrator=system.ref("orchestrator", store.address, OrchestratorApi),
            config=rollout,
            runtime_dir=self.folder / "memory",
            store_dir=self.folder / "store",
        )
        orchestrator = Orchestrator(
            OrchestratorSetup(
                plan=plan(
                    tuple(self.agents_of), rollout.replacement_queries, self.max_staleness, global_batch
                ),
                policies={
                    policy: OrchestratorPolicy(tuple(self.agents_of[policy]), refs, self.sft_batches)
                    for policy, refs in instances.items()
                },
                trajectories_per_query=2,
                max_failed_share=1.0,
                group_order="arrival",
                recipe=recipe,
                trainer=await system.add(self.trainer, "trainer"),
                rollout=await system.add(Rollout(setup), "rollout"),
                console=await system.add(self.console, "console"),
                checkpoints=self.folder / "checkpoints",
                checkpoints_kept=2,
                resume_from=None,
            )
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


@pytest.mark.parametrize("max_staleness", [0, 2])
async def test_two_agents_of_one_policy_are_trained_together(
    system: ActorSystem, tmp_path: Path, max_staleness: int
) -> None:
    shared = PolicyName("shared")
    house = House(system, tmp_path, max_staleness, policy_of=dict.fromkeys(AGENTS, "shared"), sft_batches=13)
    assert (await house.run({})).last_step == 6
    assert house.trainer.sft_batches == [("shared", 0, 10), ("shared", 10, 3)], "once, for both agents"
    assert len(house.trainer.trained["solver"]) == 6 * 3 * 2
    assert len(house.trainer.trained["judge"]) == 6 * 3 * 2 * 2
    assert house.trainer.batches == {"shared": [3 * 2 * 3] * 6}, "one optimizer step takes both agents' rows"
    assert max(house.trainer.staleness) <= max_staleness
    assert [instance.version for instance in house.instances[shared]] == [6, 6]
    state = checkpoint.load(checkpoint.committed_folder(tmp_path / "checkpoints", Step(6)))
    assert state.versions == {"shared": 6}
    assert (tmp_path / "checkpoints" / "step_000006" / "shared").is_dir()


async def test_a_fixed_batch_is_kept_until_a_checkpoint_takes_all(
    system: ActorSystem, tmp_path: Path
) -> None:
    house = House(system, tmp_path, 2)
    await house.run({}, global_batch={PolicyName("judge"): 10})
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
            rollout=rollout,
            console=nobody,
            checkpoints=tmp_path / "checkpoints",
            checkpoints_kept=2,
            resume_from=None,
        )
    )
    one = Step(1)
    orchestrator._records[one] = StepRecord(one, {}, (), 0.0)
    orchestrator._queries = QueryOrder(0)
    orchestrator._queries.begin(one, 3)
    second_is_read = threading.Event()
    read = orchestrator._recipe.train_query

    def slowly(position: int) -> Query:
        if position == 3:
            second_is_read.wait(0.2)
        else:
            second_is_read.set()
        return read(position)

    orchestrator._recipe.train_query = slowly  # type: ignore[method-assign]
    await asyncio.gather(orchestrator._replacement(one), orchestrator._replacement(one))
    assert rollout.begun == ["q3", "q4"]


class Begun:
    """A rollout actor that only says what it was asked to begin."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.api = self

    async def start_step(self, step: Step, queries: list[tuple[int, Query]], *_: object) -> None:
        self.begun += [query.id for _, query in queries]
