"""Turns that new weights interrupt: the rollout actor with simulated instances, in virtual time."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.actors.columns.store_client import ExperienceReader, segment_directories
from flexmarl.actors.inference.inference_config import SimulatedEngineConfig
from flexmarl.actors.inference.instance import Instance
from flexmarl.actors.inference.instance_setup import InstanceSetup, ServedPolicy
from flexmarl.actors.inference.router.router_actor import RouterActor
from flexmarl.actors.inference.router.router_setup import RouterSetup
from flexmarl.actors.messages import GroupClosed, LeasedBatch, Published, Query, Sample
from flexmarl.actors.names import AgentName, PolicyName, Version
from flexmarl.actors.recipe.recipe import RecipeConfig
from flexmarl.actors.rollout.rollout import Rollout
from flexmarl.actors.rollout.rollout_config import RolloutConfig, SamplingConfig
from flexmarl.actors.rollout.rollout_setup import RolloutAgent, RolloutPolicy, RolloutSetup
from flexmarl.actors.segments.segments import SegmentGrant, WriterMemory
from flexmarl.actors.store.segment_arena import ArenaLimits, SegmentArena
from flexmarl.core.actor import Actor, endpoint
from flexmarl.core.ref import ActorRef
from flexmarl.core.system import ActorSystem
from flexmarl.core.testing import virtual_time
from flexmarl.core.wire.memory import MemoryNetwork
from flexmarl.transport.state import StateTransport

from .fake_cluster import start_step

ENGINE: dict[str, Any] = {"median_tokens": 20, "sigma": 0.8, "token_s": 1.0, "prompt_share": 0.0}
"""A token per second, the first one second after its turn has begun."""
WORKFLOW = """
from flexmarl.actors.workflow import Query, Rewards

async def workflow(query, agents):
    turn = await agents["solver"].generate(query.text)
    turns.append(turn)
    return Rewards(solver=float(len(turn.tokens)))

def train_query(position, seed): ...
def eval_queries(seed): ...
turns = []
"""
TRAJECTORIES = 3
SOLVER = PolicyName("solver")


class Sink(Actor):
    """Stands for the store and the orchestrator: keeps what it gets."""

    def __init__(self, folder: Path) -> None:
        places = segment_directories(folder, folder / "store")
        for path in places.all():
            path.mkdir(mode=0o700, parents=True)
        self.samples: list[Sample] = []
        self.closed: asyncio.Queue[GroupClosed] = asyncio.Queue()
        self._arena = SegmentArena(places, ArenaLimits(segment_bytes=2**16))
        self._places = places

    @endpoint
    async def grant(
        self,
        writer: str,
        number: int,
        at_least_bytes: int,
        finished: list[str],
        memory: WriterMemory | None = None,
    ) -> SegmentGrant:
        return self._arena.grant(writer, at_least_bytes)

    @endpoint
    async def put(
        self, writer: str, parts: dict[str, dict[str, Any]], report: GroupClosed | None = None
    ) -> None:
        for agent, columns in parts.items():
            reader = ExperienceReader(self.ref, self._places)
            batch = LeasedBatch(0, {"agent": [agent] * len(columns["sample_id"]), **columns})
            self.samples += await reader.samples(batch)

    @endpoint
    async def group_closed(self, writer: str, group: GroupClosed) -> None:
        self.closed.put_nowait(group)


class FakeCluster:
    def __init__(self, folder: Path, system: ActorSystem, transport: StateTransport) -> None:
        self.folder, self.system, self.transport = folder, system, transport
        self.sink = Sink(folder)
        self.actors: list[Instance] = []
        self.instances: list[ActorRef[Instance]] = []

    async def open(
        self,
        instances: int,
        engine: dict[str, Any],
        sampling: SamplingConfig,
        *,
        workflow: str = WORKFLOW,
        **config: Any,
    ) -> None:
        (self.folder / "workflow.py").write_text(workflow)
        served = ServedPolicy(None, SimulatedEngineConfig(**engine))
        sink: ActorRef[Any] = await self.system.add(self.sink, "sink")
        self.router = await self.system.add(RouterActor(RouterSetup((SOLVER,), sink)), "router")
        for number in range(instances):
            actor = Instance(InstanceSetup(SOLVER, {SOLVER: served}, self.router))
            self.actors.append(actor)
            self.instances.append(await self.system.add(actor, f"solver-{number}"))
        setup = RolloutSetup(
            recipe=RecipeConfig(folder=str(self.folder), data={}, seed=3),
            agents={AgentName("solver"): RolloutAgent(SOLVER, sampling)},
            policies={SOLVER: RolloutPolicy("bytes")},
            store=sink,
            router=self.router,
            orchestrator=sink,
            config=RolloutConfig(**config),
            store_dir=self.folder / "store",
            logs=self.folder,
        )
        self.rollout = Rollout(setup)
        await self.system.add(self.rollout, "rollout")

    async def update(self, version: int) -> None:
        """Has all instances load it."""
        handle = await self.transport.set("solver", {"state": torch.tensor([version, 0])}, version=version)
        published = Published(SOLVER, Version(version), handle)
        await self.router.within(1e6).publish(published)

    async def start(self, *, allow_newer: bool) -> None:
        await start_step(
            self.rollout, 1, [Query("q", "2+2")], TRAJECTORIES, {"solver": 0}, allow_newer=allow_newer
        )

    async def group(self) -> GroupClosed:
        async with asyncio.timeout(1e6):
            return await self.sink.closed.get()


def in_virtual_time(
    case: Callable[[FakeCluster], Awaitable[None]],
    sampling: SamplingConfig,
    *,
    instances: int = 1,
    engine: dict[str, Any] = ENGINE,
    **config: Any,
) -> None:
    async def main(folder: Path) -> None:
        wire = MemoryNetwork().wire("node")
        async with ActorSystem("node", folder, wire=wire) as system, StateTransport(folder) as transport:
            cluster = FakeCluster(folder, system, transport)
            await cluster.open(instances, engine, sampling, **config)
            await cluster.update(0)
            await case(cluster)

    with TemporaryDirectory() as folder:
        virtual_time.run(main(Path(folder)))


def now_s() -> float:
    return asyncio.get_running_loop().time()


def updated_after(gaps: list[int], instances: int) -> tuple[list[float], GroupClosed, list[Sample]]:
    """New weights half a second after the start and ``gaps`` seconds, one after the other: when they came, and what
    became of the group."""
    updates: list[float] = []
    found: list[tuple[GroupClosed, list[Sample]]] = []

    async def case(cluster: FakeCluster) -> None:
        await cluster.start(allow_newer=True)
        begun_s = now_s()
        await asyncio.sleep(0.5)  # no token comes at a half second
        for version, gap in enumerate(gaps, 1):
            await asyncio.sleep(gap)
            updates.append(now_s() - begun_s)
            await cluster.update(version)
        found.append((await cluster.group(), sorted(cluster.sink.samples, key=lambda s: s.sample_id)))
        for turn in cluster.rollout._recipe._module.turns:
            assert bytes(token for token in turn.tokens if token).decode() == turn.text

    in_virtual_time(case, SamplingConfig(max_new_tokens=100), instances=instances)
    return (updates, *found[0])


@settings(max_examples=25)
@given(gaps=st.lists(st.integers(0, 20), max_size=5), instances=st.integers(1, 2))
def test_every_token_is_recorded_with_the_version_that_generated_it(gaps: list[int], instances: int) -> None:
    updates, group, samples = updated_after(gaps, instances)
    assert group.samples == {"solver": TRAJECTORIES} and not group.failures
    for sample in samples:
        # Tokens of a version come in whole seconds after its update: an interrupted token begins again.
        wanted: list[int] = []
        for version, (start, end) in enumerate(pairwise([0.0, *updates, math.inf])):
            wanted += [version] * int(min(end - start, len(sample.tokens) - len(wanted)))
        assert list(sample.token_versions) == wanted
        assert sample.policy_version == min(wanted) and len(sample.logprobs) == len(sample.tokens)
    older = [sum(v < max(sample.token_versions) for v in sample.token_versions) for sample in samples]
    assert (group.figures["resumed_turns"], group.figures["resumed_tokens"]) == (
        sum(map(bool, older)),
        sum(older),
    )
    _, _, without = updated_after([], 1)
    assert [sample.tokens for sample in samples] == [sample.tokens for sample in without]


LONG = {**ENGINE, "median_tokens": 1e9}


def test_a_turns_deadline_counts_all_its_pieces_and_no_wait_for_weights() -> None:
    async def case(cluster: FakeCluster) -> None:
        begun_s = now_s()
        await cluster.start(allow_newer=True)
        for version in (1, 2):
            await asyncio.sleep(10)
            await cluster.update(version)
        group = await cluster.group()
        assert [failed.error.split(":")[0] for failed in group.failures] == ["CallTimeout"] * TRAJECTORIES
        assert now_s() - begun_s == pytest.approx(2 * 100 + 25)

    slow = {**LONG, "install_s": 100}
    in_virtual_time(case, SamplingConfig(max_new_tokens=1000, turn_timeout_s=25), engine=slow)


def test_a_turn_whose_time_is_up_as_new_weights_come_overran() -> None:
    async def case(cluster: FakeCluster) -> None:
        await cluster.start(allow_newer=True)
        await asyncio.sleep(25)
        await cluster.update(1)
        assert len((await cluster.group()).failures) == TRAJECTORIES

    in_virtual_time(case, SamplingConfig(max_new_tokens=1000, turn_timeout_s=25), engine=LONG)


def test_a_turn_that_is_carried_on_can_be_given_up() -> None:
    async def case(cluster: FakeCluster) -> None:
        await cluster.start(allow_newer=True)
        for version in (1, 2):
            await asyncio.sleep(10)
            await cluster.update(version)
        group = await cluster.group()
        assert (
            group.samples[AgentName("solver")] == TRAJECTORIES
            and group.figures["oversampled_trajectories"] == 5
        )
        assert all(sample.version_changes for sample in cluster.sink.samples)
        assert len(cluster.sink.samples) == TRAJECTORIES
        await asyncio.sleep(1)
        assert cluster.actors[0].statistics()["engine_running"] == 0

    in_virtual_time(
        case,
        SamplingConfig(max_new_tokens=100),
        engine={**ENGINE, "median_tokens": 60, "sigma": 0.2},
        extra_trajectories=5,
    )


def test_without_newer_weights_allowed_a_turn_that_they_end_has_failed() -> None:
    async def case(cluster: FakeCluster) -> None:
        await cluster.start(allow_newer=False)
        await asyncio.sleep(1)
        await cluster.update(1)
        errors = [failed.error for failed in (await cluster.group()).failures]
        assert len(errors) == TRAJECTORIES and all("WrongVersion" in error for error in errors)

    in_virtual_time(case, SamplingConfig(max_new_tokens=1000), engine=LONG)
