"""The ends of turns reach the router with the turns that ask next, and soon if none does. In virtual time."""

import asyncio
from collections.abc import Awaitable, Callable

from flexmarl.actors.inference.router.router_actor import RouterActor
from flexmarl.actors.inference.router.router_setup import RouterSetup
from flexmarl.actors.messages import (
    GenerateRequest,
    Generation,
    InstanceApi,
    Loaded,
    Published,
    RouterApi,
    RouteRequest,
    Routes,
    TextTo,
    TurnEnded,
    VersionRange,
)
from flexmarl.actors.names import PolicyName, Version
from flexmarl.actors.rollout.turn_routes import TurnRoute, TurnRoutes
from flexmarl.core.actor import Actor, endpoint
from flexmarl.core.ref import ActorRef
from flexmarl.core.system import ActorSystem
from flexmarl.core.testing import virtual_time
from flexmarl.core.wire.memory import MemoryNetwork
from flexmarl.transport.handle import StateHandle

SOLVER = PolicyName("solver")
ONE = VersionRange.exactly(Version(1))


class Instance(Actor, InstanceApi):
    @endpoint
    async def load(self, published: Published) -> Loaded:
        return Loaded(published.policy, published.version, 0.0, 0.0, 0.0)

    @endpoint
    async def served_version(self, policy: PolicyName) -> Version | None:
        return Version(1)

    @endpoint
    async def generate(self, request: GenerateRequest, text_to: TextTo | None = None) -> Generation:
        raise NotImplementedError


class Console(Actor):
    @endpoint
    async def event(self, event: object) -> None:
        pass


class CountingRouter(RouterActor):
    """``messages``: for each one, the time and the numbers of turns that are asked for and that have ended."""

    def __init__(self, setup: RouterSetup) -> None:
        super().__init__(setup)
        self.messages: list[tuple[float, int, int]] = []

    @endpoint
    async def turns(self, session: int, requests: list[RouteRequest], ended: list[TurnEnded]) -> Routes:
        self.messages.append((asyncio.get_running_loop().time(), len(requests), len(ended)))
        return await super().turns(session, requests, ended)


def run(capacity: int, case: Callable[[CountingRouter, TurnRoutes], Awaitable[None]]) -> None:
    """``capacity``: of the only instance."""

    async def main() -> None:
        async with ActorSystem("tests", wire=MemoryNetwork().wire("tests")) as system:
            setup = RouterSetup((SOLVER,), await system.add(Console(), "console"))  # type: ignore[arg-type]
            router = CountingRouter(setup)
            ref: ActorRef[RouterApi] = await system.add(router, "router")
            await ref.api.join(await system.add(Instance(), "solver-0"), (SOLVER,), capacity)
            await ref.api.publish(Published(SOLVER, Version(1), StateHandle("a", 1, 0, 0, (), ())))
            routes = TurnRoutes(ref, "rollout-0")
            await routes.open()
            reader = asyncio.create_task(routes.run())
            try:
                await case(router, routes)
            finally:
                routes.close()
                reader.cancel()

    virtual_time.run(main())


async def route(routes: TurnRoutes) -> TurnRoute:
    return await routes.route(SOLVER, ONE, prompt_tokens=10)


def test_ends_travel_with_the_turns_that_ask() -> None:
    async def case(router: CountingRouter, routes: TurnRoutes) -> None:
        for _ in range(20):
            routes.ended((await route(routes)).turn, 5)
            await asyncio.sleep(0.008)
        assert [message[1:] for message in router.messages] == [(1, 0), *[(1, 1)] * 19]

    run(4, case)


def test_the_last_end_is_reported_soon() -> None:
    async def case(router: CountingRouter, routes: TurnRoutes) -> None:
        ended = await route(routes)
        routes.ended((await route(routes)).turn, 5)
        routes.ended(ended.turn, 5)
        began = asyncio.get_running_loop().time()
        await asyncio.sleep(1.0)
        time, *counts = router.messages[-1]
        assert counts == [0, 2] and time - began < 0.011

    run(4, case)


def test_an_end_is_reported_at_once_while_a_turn_waits_for_room() -> None:
    async def case(router: CountingRouter, routes: TurnRoutes) -> None:
        first, second = await route(routes), await route(routes)
        routes.ended(first.turn, 5)
        third, fourth = asyncio.create_task(route(routes)), asyncio.create_task(route(routes))
        await third
        began = asyncio.get_running_loop().time()
        routes.ended(second.turn, 5)
        await fourth
        assert asyncio.get_running_loop().time() - began < 0.003

    run(2, case)


def test_a_turn_that_begins_to_wait_takes_the_ends_along() -> None:
    async def case(router: CountingRouter, routes: TurnRoutes) -> None:
        first = await route(routes)
        routes.ended(first.turn, 5)
        began = asyncio.get_running_loop().time()
        await route(routes)
        assert asyncio.get_running_loop().time() == began, "no timer was waited for"

    run(1, case)
