"""The spans of the router: versions on their way to all instances, and instances on theirs to other policies."""

import asyncio

from flexmarl.actors.inference.router.router_actor import RouterActor
from flexmarl.actors.inference.router.router_decisions import Moved
from flexmarl.actors.inference.router.router_setup import RouterSetup
from flexmarl.actors.messages import RouterApi
from flexmarl.actors.run_events import InstanceMoved, RunEvent
from flexmarl.core.actor import Actor, endpoint
from flexmarl.core.ref import ActorRef
from flexmarl.core.system import ActorSystem
from flexmarl.core.testing import virtual_time
from flexmarl.core.wire.memory import MemoryNetwork

from ....core.span_batches import rows_of
from ....patience import PATIENCE_S
from .test_router_actor import JUDGE, SOLVER, Console, FakeCluster, Instance


class Moves(Actor):
    """Stands for the console."""

    def __init__(self) -> None:
        self.seen: asyncio.Queue[InstanceMoved] = asyncio.Queue()

    @endpoint
    async def event(self, event: RunEvent) -> None:
        if isinstance(event, InstanceMoved):
            self.seen.put_nowait(event)


def test_a_move_is_a_span_with_its_reason_and_each_version_has_one() -> None:
    async def main() -> None:
        async with ActorSystem("tests", wire=MemoryNetwork().wire("tests")) as system:
            moves = Moves()
            actor = RouterActor(RouterSetup((SOLVER, JUDGE), await system.add(moves, "console")))  # type: ignore[arg-type]
            router: ActorRef[RouterApi] = await system.add(actor, "router")
            cluster = FakeCluster(system, router, Console())
            for policy in (SOLVER, JUDGE):
                await cluster.add(f"{policy}-0", Instance(0.01), policy)
                await cluster.publish(0, policy)
            actor._carry_out(Moved(2, "judge-0", JUDGE, SOLVER, "its turns wait"))
            assert (await asyncio.wait_for(moves.seen.get(), PATIENCE_S)).to == SOLVER
            assert [row.label for row in rows_of(system.spans.take(1.0, 0))] == [
                ("router", "versions", "", SOLVER, ""),
                ("router", "versions", "", JUDGE, ""),
                ("router", "move", "", JUDGE, "judge-0 goes to solver: its turns wait"),
            ]

    virtual_time.run(main())
