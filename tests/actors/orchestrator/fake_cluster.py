"""An orchestrator and rollout workers among a trainer, a store and instances that only keep books."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

from flexmarl.actors.columns.store_client import ExperienceReader, segment_directories
from flexmarl.actors.errors import TooFewRows, WrongVersion
from flexmarl.actors.inference.router.router_actor import RouterActor
from flexmarl.actors.inference.router.router_setup import RouterSetup
from flexmarl.actors.messages import (
    GenerateRequest,
    Generation,
    GroupClosed,
    InstanceApi,
    LeasedBatch,
    Loaded,
    MicroBatchTrained,
    OrchestratorApi,
    PolicyStepped,
    Published,
    RunResult,
    Sample,
    StepStats,
    TextTo,
)
from flexmarl.actors.names import AgentName, PolicyName, Step, Version
from flexmarl.actors.orchestrator.orchestrator import Orchestrator
from flexmarl.actors.orchestrator.orchestrator_setup import OrchestratorPolicy, OrchestratorSetup
from flexmarl.actors.orchestrator.plan import Plan
from flexmarl.actors.recipe.recipe import RecipeConfig
from flexmarl.actors.rollout.rollout import Rollout
from flexmarl.actors.rollout.rollout_config import RolloutConfig
from flexmarl.actors.rollout.rollout_setup import RolloutAgent, RolloutPolicy, RolloutSetup
from flexmarl.actors.run_events import RunEvent
from flexmarl.actors.segments.segments import SegmentGrant, WriterMemory
from flexmarl.actors.step_metrics import StepMetrics
from flexmarl.actors.store.segment_arena import ArenaLimits, SegmentArena
from flexmarl.actors.store.writers import Writers
from flexmarl.core.actor import Actor, endpoint
from flexmarl.core.ref import ActorRef
from flexmarl.core.system import ActorSystem
from flexmarl.transport.handle import StateHandle

from ...patience import PATIENCE_S

AGENTS = (AgentName("solver"), AgentName("judge"))
RECIPE = """
import asyncio
from flexmarl.actors.workflow import Query, Rewards

asked = []

async def workflow(query, agents):
    if query.id.startswith("e"):
        await asyncio.sleep(query.data["eval_s"])
        return Rewards(metrics={"number": query.data["number"]})
    draft = await agents["solver"].generate(query.text)
    if query.data["position"] % 3 == query.data["hangs"]:
        await asyncio.Event().wait()
    await asyncio.gather(*(agents["judge"].generate([draft, str(n)]) for n in range(2)))
    asked.append(query.data["position"])
    if query.data["position"] % 3 == query.data["equal"]:
        return Rewards(solver=0.5, judge=0.5)
    return Rewards(solver=float(len(asked)), judge=float(len(asked)))

def train_query(position, seed, hangs=-1, equal=-1, eval_s=0.0):
    return Query(f"q{position}", "2+2", {"position": position, "hangs": hangs, "equal": equal})

def eval_queries(seed, eval_s=0.0, **data):
    return [Query(f"e{number}", "1+1", {"eval_s": eval_s, "number": float(number)}) for number in range(4)]

def sft(agent, batch, size, seed, **data): ...
"""


PLAIN = RolloutConfig()


class Instance(Actor, InstanceApi):
    """Serves one version at a time, as the real one does; a turn takes some rounds of the loop."""

    def __init__(self) -> None:
        self.version: Version | None = None

    @endpoint
    async def load(self, published: Published) -> Loaded:
        self.version = None
        await asyncio.sleep(0)
        self.version = published.version
        return Loaded(published.policy, published.version, 0.0, 0.0, 0.0)

    @endpoint
    async def served_version(self, policy: PolicyName) -> Version | None:
        return self.version

    @endpoint
    async def generate(self, request: GenerateRequest, text_to: TextTo | None = None) -> Generation:
        version = self.version
        if version is None or version not in request.versions:
            raise WrongVersion("policy", request.versions.oldest, version)
        for _ in range(request.seed % 20):
            await asyncio.sleep(0)
            if version != self.version:
                assert request.versions.newest != version, "only under async"
                return Generation("x", (1,), (9,), (-0.5,), version, "interrupted")
        return Generation("x", (1,), (2, 3), (-0.5, -0.5), version, "stop")


class Store(Actor):
    def __init__(self, memory: Path, folder: Path) -> None:
        self.ready: dict[str, list[Sample]] = {agent: [] for agent in AGENTS}
        self.places = segment_directories(memory, folder)
        self.arena = SegmentArena(self.places, ArenaLimits(segment_bytes=2**16))
        self.writers = Writers()
        self.lose_answers_of = ""
        """The writer whose puts are done and never answered."""
        self.loses_bytes = False
        """The samples of a lost writer are lost with it."""
        self.lost = 0
        self.forget_s = 0.0
        """Seconds that it takes for ``forget_reports``."""

    async def on_start(self) -> None:
        self.reader = ExperienceReader(self.ref, self.places)

    @endpoint
    async def grant(
        self,
        writer: str,
        number: int,
        at_least_bytes: int,
        finished: list[str],
        memory: WriterMemory | None = None,
    ) -> SegmentGrant:
        return self.arena.grant(writer, at_least_bytes)

    @endpoint
    async def put(
        self, writer: str, parts: dict[str, dict[str, Any]], report: GroupClosed | None = None
    ) -> None:
        self.writers.check(writer)
        if report is not None:
            self.writers.add(writer, report)
        for agent, columns in parts.items():
            batch = LeasedBatch(0, {"agent": [agent] * len(columns["sample_id"]), **columns})
            self.ready[agent] += await self.reader.samples(batch)
        if writer.startswith(self.lose_answers_of or "-"):
            await asyncio.Event().wait()

    @endpoint
    async def retire(self, writer: str) -> list[GroupClosed]:
        self.writers.retire(writer)
        if self.loses_bytes:
            self._lose(writer)
        return self.writers.reports(writer)

    def _lose(self, writer: str) -> None:
        """The groups of the writer of which no row was trained are gone."""
        rows = [row for rows in self.ready.values() for row in rows]
        there = Counter(row.group for row in rows)
        put = {f"{group.step}:{group.query}": group for group in self.writers.reports(writer)}
        lost = self.writers.lose(
            writer, {name for name, group in put.items() if 0 < sum(group.samples.values()) == there[name]}
        )
        self.lost += len(lost)
        self.ready = {agent: [row for row in of if row.group not in lost] for agent, of in self.ready.items()}

    @endpoint
    async def lost_groups(self, writer: str) -> list[GroupClosed]:
        return self.writers.lost(writer)

    @endpoint
    async def forget_reports(self, step: Step, kept: list[str] | None = None) -> None:
        await asyncio.sleep(self.forget_s)
        self.writers.forget(step, kept or ())


class Trainer(Actor):
    @endpoint
    async def keep(self, published: Published, file: str) -> None:
        raise AssertionError("there is no pool of past versions")

    @endpoint
    async def publish_file(self, policy: PolicyName, version: Version, file: str) -> Published:
        raise AssertionError("there is no pool of past versions")

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
        return Published(policy, version, StateHandle("a", version, 0, 0, (), ()))

    @endpoint(raises=[TooFewRows])
    async def train(self, policy: PolicyName, policy_version: Version, count: int) -> MicroBatchTrained:
        rows = [row for agent in self.agents_of[policy] for row in self.store.ready[agent]]
        rows.sort(key=lambda row: row.step)
        taken = rows[:count]
        if len(taken) < count and self.store.lost:
            raise TooFewRows(f"{count} rows were asked for, {len(taken)} are ready")
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
        figures = {"loss": 0.0, "grad_norm": 1.0, "lr": 1e-3, "optimizer_s": 0.0}
        return PolicyStepped(await self.publish(policy), StepStats(count, 2 * count, figures), 0.0)

    @endpoint
    async def save(self, policy: PolicyName, folder: str) -> None:
        Path(folder).mkdir(parents=True)


class Supervisor(Actor):
    def __init__(self) -> None:
        self.lost_actors: list[tuple[str, int]] = []

    @endpoint
    async def lost(self, name: str, incarnation: int, reason: str) -> None:
        self.lost_actors.append((name, incarnation))

    @endpoint
    async def locate(self, name: str) -> str:
        return ""

    @endpoint
    async def locate_node(self, name: str) -> str:
        return ""


class Console(Actor):
    def __init__(self) -> None:
        self.steps: list[StepMetrics] = []
        self.events: list[RunEvent] = []
        self.phases: list[str] = []
        self.result: asyncio.Future[RunResult] = asyncio.get_running_loop().create_future()

    @endpoint
    async def step(self, metrics: StepMetrics) -> None:
        self.steps.append(metrics)

    @endpoint
    async def phase(self, text: str, done: int | None, total: int | None) -> None:
        self.phases.append(text)

    @endpoint
    async def event(self, event: RunEvent) -> None:
        self.events.append(event)

    @endpoint
    async def ended(self, result: RunResult) -> None:
        self.result.set_result(result)


def plan(
    policies: tuple[PolicyName, ...],
    replacement_queries: int = 0,
    max_staleness: int = 0,
    global_batch: dict[PolicyName, int] | None = None,
    evaluate_every: int = 0,
) -> Plan:
    return Plan(
        mode="async" if max_staleness else "strict",
        policies=policies,
        first_step=Step(1),
        last_step=Step(6),
        queries=3,
        micro_batch=2,
        save_every=3,
        evaluate_every=evaluate_every,
        max_staleness=max_staleness,
        global_batch=global_batch or {},
        replacement_queries=replacement_queries,
    )


class FakeCluster:
    """``policy_of``: of each agent, by default one of its own name."""

    def __init__(
        self,
        system: ActorSystem,
        folder: Path,
        max_staleness: int = 0,
        policy_of: dict[str, str] | None = None,
        sft_batches: int = 0,
        workers: int = 1,
    ) -> None:
        self.workers, self.evaluate_every, self.patience_s = workers, 0, PATIENCE_S
        self.rollouts: list[Rollout] = []
        self.supervisor = Supervisor()
        self.system, self.folder = system, folder
        self.policy_of = {agent: PolicyName((policy_of or {}).get(agent, agent)) for agent in AGENTS}
        self.agents_of: dict[PolicyName, list[AgentName]] = {}
        for agent, policy in self.policy_of.items():
            self.agents_of.setdefault(policy, []).append(agent)
        self.store, self.console = Store(system.directory, folder / "store"), Console()
        self.trainer = Trainer(self.store, self.agents_of)
        self.max_staleness, self.sft_batches = max_staleness, sft_batches
        self._begun: asyncio.Future[ActorRef[OrchestratorApi]] = asyncio.get_running_loop().create_future()
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
        console: ActorRef[Any] = await self.system.add(self.console, "console")
        router = await self._start_router(console)
        store: ActorRef[Any] = await self.system.add(self.store, "store")
        self.setup = self._rollout_setup(recipe, store, router, rollout)
        setup = OrchestratorSetup(
            plan=self._plan(rollout, global_batch),
            policies=self._policies(),
            trajectories_per_query=2,
            max_failed_share=1.0,
            group_order="arrival",
            recipe=recipe,
            trainer=await self.system.add(self.trainer, "trainer"),
            router=router,
            workers=await self._start_workers(),
            store=store,
            supervisor=await self.system.add(self.supervisor, "supervisor"),
            console=console,
            checkpoints=self.folder / "checkpoints",
            checkpoints_kept=2,
            resume_from=None,
        )
        return await self._result_of(Orchestrator(setup))

    async def _start_router(self, console: ActorRef[Any]) -> ActorRef[Any]:
        """A router that all instances have joined."""
        setup = RouterSetup(tuple(self.instances), console)
        router = await self.system.add(RouterActor(setup), "router")
        for policy, own in self.instances.items():
            for number, instance in enumerate(own):
                await router.api.join(await self.system.add(instance, f"{policy}-{number}"), (policy,), 64)
        return router

    def _rollout_setup(
        self, recipe: RecipeConfig, store: ActorRef[Any], router: ActorRef[Any], config: RolloutConfig
    ) -> RolloutSetup:
        return RolloutSetup(
            recipe=recipe,
            agents={agent: RolloutAgent(policy) for agent, policy in self.policy_of.items()},
            policies={policy: RolloutPolicy("one") for policy in self.instances},
            store=store,
            router=router,
            orchestrator=self.system.ref("orchestrator", store.address, OrchestratorApi),
            config=config,
            store_dir=self.folder / "store",
            logs=self.folder,
        )

    def _plan(self, rollout: RolloutConfig, global_batch: dict[PolicyName, int] | None) -> Plan:
        policies, replaced = tuple(self.agents_of), rollout.replacement_queries
        return plan(policies, replaced, self.max_staleness, global_batch, self.evaluate_every)

    def _policies(self) -> dict[PolicyName, OrchestratorPolicy]:
        return {
            policy: OrchestratorPolicy(tuple(self.agents_of[policy]), self.sft_batches)
            for policy in self.instances
        }

    async def _start_workers(self) -> list[ActorRef[Any]]:
        return [await self.start_worker(self.system, f"rollout-{n}") for n in range(self.workers)]

    async def _result_of(self, orchestrator: Orchestrator) -> RunResult:
        """The run's result. Raises the first error of an actor."""
        self.orchestrator = orchestrator
        (self.folder / "checkpoints").mkdir()
        ref: ActorRef[OrchestratorApi] = await self.system.add(orchestrator, "orchestrator")
        await ref.api.start()
        self._begun.set_result(ref)
        failure = self.system.failure
        done: set[asyncio.Future[Any]] = {self.console.result, failure}
        await asyncio.wait(done, timeout=self.patience_s, return_when=asyncio.FIRST_COMPLETED)
        if failure.done():
            raise failure.result()
        return self.console.result.result()

    async def begun(self) -> ActorRef[OrchestratorApi]:
        """The orchestrator of a run, once it has begun."""
        return await asyncio.shield(self._begun)

    async def start_worker(self, system: ActorSystem, name: str) -> ActorRef[Any]:
        self.rollouts.append(Rollout(self.setup))
        return await system.add(self.rollouts[-1], name)

    def groups(self, agent: str) -> set[str]:
        return {sample.group for sample in self.trainer.trained[agent]}
