"""A rollout actor with a real store, and instances whose answers the test chooses."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flexmarl.actors.columns.declared_columns import Column
from flexmarl.actors.columns.store_client import ExperienceReader, segment_directories
from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.inference.router.router_actor import RouterActor
from flexmarl.actors.inference.router.router_setup import RouterSetup
from flexmarl.actors.messages import (
    ArchiveApi,
    GenerateRequest,
    Generation,
    GroupClosed,
    GroupWaiting,
    InstanceApi,
    Loaded,
    LoggedTrajectory,
    Published,
    Query,
    Sample,
    SessionsApi,
    TableStatistics,
    TextTo,
    VersionRange,
)
from flexmarl.actors.names import AgentName, PolicyName, Step, Version
from flexmarl.actors.orchestrator.evaluation import Evaluation, EvaluationRules
from flexmarl.actors.recipe.recipe import RecipeConfig
from flexmarl.actors.recorded_trajectory import Record, unpack_record
from flexmarl.actors.rollout.rollout import Rollout
from flexmarl.actors.rollout.rollout_config import RolloutConfig, SamplingConfig
from flexmarl.actors.rollout.rollout_setup import RolloutAgent, RolloutPolicy, RolloutSetup
from flexmarl.actors.run_events import RunEvent
from flexmarl.actors.store.store import Store
from flexmarl.core.actor import Actor, endpoint
from flexmarl.core.ref import ActorRef
from flexmarl.core.system import ActorSystem
from flexmarl.transport.handle import StateHandle

from ...patience import PATIENCE_S
from ..stores import store_setup

TWO_TURNS = """
    draft = await agents["solver"].generate(query.text)
    final = await agents["judge"].generate([draft, "?"])
    return Rewards(solver=float(len(draft.text)), judge=1.0, metrics={"accuracy": 0.5})
"""
RECIPE = """
import asyncio
from flexmarl.actors.workflow import Query, Rewards

async def workflow(query, agents):
    {body}

def train_query(position, seed): ...
def eval_queries(seed): ...
"""

CENTRED = CreditConfig(name="dr_grpo")


class FakeInstance(Actor, InstanceApi):
    """Answers with ``answer(request)`` and keeps what it was asked."""

    def __init__(self, answer: Callable[[GenerateRequest], tuple[int, ...]]) -> None:
        self.asked: list[GenerateRequest] = []
        self._answer = answer

    @endpoint
    async def load(self, published: Published) -> Loaded:
        return Loaded(published.policy, published.version, 0.0, 0.0, 0.0)

    @endpoint
    async def served_version(self, policy: PolicyName) -> Version | None:
        return None

    @endpoint
    async def generate(self, request: GenerateRequest, text_to: TextTo | None = None) -> Generation:
        self.asked.append(request)
        tokens = self._answer(request)
        prompt = tuple(
            t for part in request.prompt for t in (part if isinstance(part, tuple) else map(ord, part))
        )
        return Generation(
            "x" * len(tokens), prompt, tokens, (-0.5,) * len(tokens), request.versions.oldest, "stop"
        )


class Events(Actor):
    """Stands for the orchestrator and the console: keeps the groups that closed, and the events."""

    def __init__(self) -> None:
        self.closed: asyncio.Queue[GroupClosed] = asyncio.Queue()
        self.seen: list[RunEvent] = []
        self.waiting: list[str] = []
        """The queries of groups that lack nothing but rewards."""

    @endpoint
    async def event(self, event: RunEvent) -> None:
        self.seen.append(event)

    @endpoint
    async def start(self) -> None: ...

    @endpoint
    async def stop(self) -> None: ...

    @endpoint
    async def group_waits(self, writer: str, group: GroupWaiting) -> None:
        self.waiting.append(group.query)

    @endpoint
    async def group_closed(self, writer: str, group: GroupClosed) -> None:
        self.closed.put_nowait(group)


class Archive(Actor, ArchiveApi):
    """Keeps records in memory. ``gate``: nothing is kept before it is set."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.dropped = 0
        self.refuses = False
        self.gate = asyncio.Event()
        self.gate.set()

    @endpoint
    async def keep(self, records: list[bytes], dropped: int) -> int:
        await self.gate.wait()
        found = [unpack_record(record) for record in records]
        self.dropped += dropped
        if self.refuses:
            return sum(record.trajectories for record in found)
        self.records += found
        return 0

    @endpoint
    async def keep_compared(self, records: list[bytes], dropped: int) -> int:
        raise AssertionError("a worker compares no log-probabilities")


class FakeCluster:
    """A rollout actor among the others it talks to."""

    def __init__(self, system: ActorSystem, folder: Path) -> None:
        self.system = system
        self.folder = folder
        self.archive: Archive | None = None
        """Set before ``open``: trajectories are recorded."""
        self.events = Events()
        places = segment_directories(system.directory, folder / "store")
        for path in (*places.all(), folder / "store"):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.columns: dict[str, dict[str, Column]] = {}
        self.places = places
        self.sampling = {agent: SamplingConfig() for agent in ("solver", "judge")}
        self.policies = {"solver": "solver", "judge": "judge"}
        """The policy of each agent."""
        self.explorers: dict[str, str] = {}
        """The explorer of each policy that has one; it serves the policy's versions."""
        self.tokenizers = {"solver": "one", "judge": "one"}
        self.credit: dict[str, CreditConfig] = {}
        """By agent; of others the reward less the group's mean."""
        self.steps_wait = True
        self.gateway: ActorRef[SessionsApi] | None = None
        self.serves = False
        self.instances = {
            "solver": [FakeInstance(lambda request: (65,) * (1 + request.seed % 3)) for _ in range(2)],
            "judge": [FakeInstance(lambda request: (66,))],
        }

    async def open(self, body: str, **config: Any) -> Rollout:
        (self.folder / "workflow.py").write_text(RECIPE.format(body=body))
        folder = str(self.folder / "store")
        policies = {AgentName(agent): PolicyName(policy) for agent, policy in self.policies.items()}
        self.store = Store(store_setup(policies, folder, columns=self.columns, policies=policies))
        events: ActorRef[Any] = await self.system.add(self.events, "orchestrator")
        followers = {PolicyName(policy): PolicyName(name) for policy, name in self.explorers.items()}
        served = tuple({PolicyName(p) for p in self.policies.values()} | {*followers.values()})
        self.router = RouterActor(RouterSetup(served, events, followers=followers))
        router = await self.system.add(self.router, "router")
        for policy, fakes in self.instances.items():
            for number, fake in enumerate(fakes):
                instance = await self.system.add(fake, f"{policy}-{number}")
                await router.api.join(instance, (PolicyName(policy),), 64)
        archive: ActorRef[Any] | None = None
        if self.archive is not None:
            archive = await self.system.add(self.archive, "archive")
        setup = RolloutSetup(
            recipe=RecipeConfig(folder=str(self.folder), data={}, seed=3),
            agents={
                AgentName(agent): RolloutAgent(
                    PolicyName(self.policies[agent]),
                    sampling,
                    self.credit.get(agent, CENTRED),
                    self.columns.get(agent, {}),
                    explorer=followers.get(PolicyName(self.policies[agent])),
                )
                for agent, sampling in self.sampling.items()
            },
            policies={
                PolicyName(policy): RolloutPolicy(self.tokenizers[policy]) for policy in self.instances
            },
            store=await self.system.add(self.store, "store"),
            router=router,
            orchestrator=events,
            config=RolloutConfig(**config),
            store_dir=self.folder / "store",
            logs=self.folder,
            archive=archive,
            steps_wait=self.steps_wait,
            gateway=self.gateway,
            serves=self.serves,
        )
        rollout = Rollout(setup)
        await self.system.add(rollout, "rollout")
        return rollout

    async def closed(self) -> GroupClosed:
        return await asyncio.wait_for(self.events.closed.get(), PATIENCE_S)

    async def rows(self, policy: str, version: int, count: int) -> list[Sample]:
        """Leases rows of the policy's agents."""
        leased = await self.store.lease(PolicyName(policy), version, count)
        return await ExperienceReader(self.store.ref, self.places).samples(leased)

    async def statistics(self, agent: str) -> TableStatistics:
        return (await self.store.table_statistics())[agent]


async def serve(rollout: Rollout, policy: str, version: int) -> None:
    """Has all instances load it."""
    handle = StateHandle("a", version, 0, 0, (), ())
    published = Published(PolicyName(policy), Version(version), handle)
    await rollout._setup.router.within(PATIENCE_S).publish(published)


async def start_step(
    rollout: Rollout,
    step: int,
    queries: list[Query],
    trajectories: int,
    versions: dict[str, int],
    *,
    allow_newer: bool = False,
    submitted: list[str] | None = None,
    logged: dict[str, list[LoggedTrajectory]] | None = None,
    sessions: list[str] | None = None,
    success_state: list[float] | None = None,
) -> None:
    ranges = {
        PolicyName(policy): VersionRange(Version(oldest), None if allow_newer else Version(oldest))
        for policy, oldest in versions.items()
    }
    await rollout.start_step(
        rollout.writer,
        Step(step),
        list(enumerate(queries)),
        trajectories,
        ranges,
        submitted,
        logged,
        sessions,
        success_state,
    )


async def evaluate(
    rollout: Rollout, queries: list[Query], versions: dict[str, int], rules: EvaluationRules | None = None
) -> Evaluation:
    rules = rules or EvaluationRules()
    exactly = {PolicyName(policy): Version(version) for policy, version in versions.items()}
    return rules.result(
        queries, await rollout.evaluate(rollout.writer, Step(0), rules.work(queries), exactly)
    )


SOLVER, JUDGE = AgentName("solver"), AgentName("judge")
QUERY = Query("q7", "2+2")
