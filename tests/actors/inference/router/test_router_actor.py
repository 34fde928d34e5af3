"""The router actor with instances that only acknowledge, in virtual time: the figures that ``publish`` returns, and
instances that do not acknowledge."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from flexmarl.actors.errors import LoadFailed, ReadFailed
from flexmarl.actors.inference.router.router_actor import RouterActor
from flexmarl.actors.inference.router.router_setup import RouterSetup
from flexmarl.actors.messages import (
    GenerateRequest,
    Generation,
    InstanceApi,
    Loaded,
    Published,
    RouterApi,
    TextTo,
    WeightsMismatch,
)
from flexmarl.actors.names import PolicyName, Version
from flexmarl.actors.run_events import InstanceChanged, RunEvent, WeightsPathChosen, WeightsReloaded
from flexmarl.core.actor import Actor, endpoint
from flexmarl.core.errors import CANCELLED, RemoteError
from flexmarl.core.ref import ActorRef
from flexmarl.core.system import ActorSystem
from flexmarl.core.testing import virtual_time
from flexmarl.core.wire.memory import MemoryNetwork
from flexmarl.transport.handle import StateHandle
from flexmarl.transport.statistics import Chosen

SOLVER, JUDGE = PolicyName("solver"), PolicyName("judge")
HOUR_S = 3600.0


class Instance(Actor, InstanceApi):
    """Takes ``seconds`` for a load, or raises ``errors`` one after the other."""

    def __init__(self, seconds: float, *errors: Exception) -> None:
        self.seconds, self.errors = seconds, list(errors)
        self.chosen: Chosen | None = None
        self.mismatch: WeightsMismatch | None = None

    @endpoint
    async def load(self, published: Published) -> Loaded:
        if self.errors:
            raise self.errors.pop(0)
        await asyncio.sleep(self.seconds)
        s = self.seconds
        loaded = Loaded(published.policy, published.version, s, s / 2, s / 4, self.chosen)
        return replace(loaded, mismatch=self.mismatch)

    @endpoint
    async def served_version(self, policy: PolicyName) -> Version | None:
        return None

    @endpoint
    async def generate(self, request: GenerateRequest, text_to: TextTo | None = None) -> Generation:
        raise NotImplementedError


class Console(Actor):
    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []
        self.paths: list[WeightsPathChosen] = []
        self.reloads: list[WeightsReloaded] = []

    @endpoint
    async def event(self, event: RunEvent) -> None:
        if isinstance(event, WeightsPathChosen):
            self.paths.append(event)
            return
        if isinstance(event, WeightsReloaded):
            self.reloads.append(event)
            return
        assert isinstance(event, InstanceChanged)
        self.seen.append((event.instance, event.state))


class FakeCluster:
    def __init__(self, system: ActorSystem, router: ActorRef[RouterApi], console: Console) -> None:
        self.system, self.router, self.console = system, router, console

    async def add(self, name: str, instance: Instance, *policies: PolicyName) -> None:
        await self.router.api.join(await self.system.add(instance, name), policies or (SOLVER,), 4)

    async def publish(self, version: int, policy: PolicyName = SOLVER) -> list[Loaded]:
        handle = StateHandle("a", version, 0, 0, (), ())
        return await self.router.within(HOUR_S).publish(Published(policy, Version(version), handle))


def in_virtual_time(case: Callable[[FakeCluster], Awaitable[None]]) -> None:
    async def main() -> None:
        async with ActorSystem("tests", wire=MemoryNetwork().wire("tests")) as system:
            console = Console()
            setup = RouterSetup((SOLVER, JUDGE), await system.add(console, "console"))  # type: ignore[arg-type]
            router: ActorRef[RouterApi] = await system.add(RouterActor(setup), "router")
            await case(FakeCluster(system, router, console))

    virtual_time.run(main())


def test_publish_returns_the_figures_of_every_instance_that_has_acknowledged() -> None:
    async def case(cluster: FakeCluster) -> None:
        for number, seconds in enumerate((8.0, 2.0, 4.0)):
            await cluster.add(f"solver-{number}", Instance(seconds))
        for version in (0, 1):
            loaded = await cluster.publish(version)
            assert loaded == [Loaded(SOLVER, Version(version), s, s / 2, s / 4) for s in (2.0, 4.0, 8.0)]
        publishing = asyncio.ensure_future(cluster.publish(2))
        await asyncio.sleep(3.0)
        await cluster.system.remove("solver-2")
        assert [one.pause_s for one in await publishing] == [2.0, 8.0]

    in_virtual_time(case)


def test_weights_that_were_loaded_twice_are_reported() -> None:
    async def case(cluster: FakeCluster) -> None:
        instance = Instance(1.0)
        await cluster.add("solver-0", instance)
        for version, mismatch in enumerate((None, WeightsMismatch(0.5, 0.01, "wrong: layer 3"), None)):
            instance.mismatch = mismatch
            await cluster.publish(version)
        await asyncio.sleep(1.0)
        assert cluster.console.reloads == [
            WeightsReloaded("solver-0", SOLVER, Version(1), 0.5, 0.01, "wrong: layer 3")
        ]

    in_virtual_time(case)


def test_the_path_of_weights_is_reported_when_it_changes() -> None:
    async def case(cluster: FakeCluster) -> None:
        instance = Instance(1.0)
        await cluster.add("solver-0", instance)
        by_device = Chosen("cuda_ipc", "the same host", {})
        by_host = Chosen("shm", "the same host", {"cuda_ipc": "device GPU-1 is not visible here"})
        for version, chosen in enumerate((by_device, by_device, by_host, by_host)):
            instance.chosen = chosen
            await cluster.publish(version)
        await asyncio.sleep(1.0)
        assert cluster.console.paths == [
            WeightsPathChosen("solver-0", SOLVER, "cuda_ipc", "the same host", {}),
            WeightsPathChosen(
                "solver-0", SOLVER, "shm", "the same host", {"cuda_ipc": "device GPU-1 is not visible here"}
            ),
        ]

    in_virtual_time(case)


def test_figures_of_a_version_that_is_over_are_left_out() -> None:
    async def case(cluster: FakeCluster) -> None:
        await cluster.add("solver-0", Instance(8.0))
        first = asyncio.ensure_future(cluster.publish(0))
        await asyncio.sleep(1.0)
        assert [one.version for one in await cluster.publish(1)] == [1]
        assert [one.version for one in await first] == [1]

    in_virtual_time(case)


@pytest.mark.parametrize(
    ("error", "states"),
    [
        (RemoteError("solver-0", "load", CANCELLED, "cancelled", ""), ["suspected", "serving"]),
        (ReadFailed(SOLVER, Version(0), "StaleHandle"), ["suspected", "serving"]),
        (LoadFailed(SOLVER, Version(0), "another digest"), ["gone"]),
    ],
)
def test_an_instance_that_was_lost_in_its_load_may_return_and_one_that_can_not_load_is_gone(
    error: Exception, states: list[str]
) -> None:
    async def case(cluster: FakeCluster) -> None:
        await cluster.add("solver-0", Instance(1.0, error))
        await cluster.add("solver-1", Instance(0.5))
        assert len(await cluster.publish(0)) == 1
        await asyncio.sleep(60.0)
        assert [state for name, state in cluster.console.seen if name == "solver-0"] == states

    in_virtual_time(case)


def test_an_instance_of_two_policies_is_lost_for_both_and_the_next_one_loads_both() -> None:
    async def case(cluster: FakeCluster) -> None:
        await cluster.add("solver-0", Instance(1.0), SOLVER, JUDGE)
        assert [one.policy for one in await cluster.publish(0)] == [SOLVER]
        assert [one.policy for one in await cluster.publish(7, JUDGE)] == [JUDGE]
        await cluster.system.remove("solver-0")
        await asyncio.sleep(1.0)
        assert cluster.console.seen == [("solver-0", "gone")] * 2
        await cluster.add("solver-0", Instance(1.0), SOLVER, JUDGE)
        await asyncio.sleep(3.0)
        assert cluster.console.seen[2:] == [("solver-0", "serving")] * 2
        await cluster.system.remove("solver-0")
        await asyncio.sleep(1.0)
        assert cluster.console.seen[4:] == [("solver-0", "gone")] * 2, "its second life is watched too"

    in_virtual_time(case)


def test_an_instance_of_two_policies_leaves_with_both() -> None:
    async def case(cluster: FakeCluster) -> None:
        await cluster.add("solver-0", Instance(1.0), SOLVER, JUDGE)
        for policy in (SOLVER, JUDGE):
            await cluster.publish(0, policy)
        await asyncio.gather(*(cluster.router.within(HOUR_S).leave("solver-0") for _ in range(2)))
        await asyncio.sleep(1.0)
        assert cluster.console.seen.count(("solver-0", "gone")) == 2

    in_virtual_time(case)


def test_a_load_that_fails_for_one_policy_leaves_the_instance_to_the_other() -> None:
    async def case(cluster: FakeCluster) -> None:
        await cluster.add("solver-0", Instance(1.0, LoadFailed(SOLVER, Version(0), "digest")), SOLVER, JUDGE)
        await cluster.add("solver-1", Instance(1.0))
        await cluster.publish(0)
        assert [one.policy for one in await cluster.publish(0, JUDGE)] == [JUDGE]
        assert cluster.console.seen == [("solver-0", "gone")]

    in_virtual_time(case)
