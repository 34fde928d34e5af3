"""A system that asks, and one that serves."""

import asyncio

from flexmarl.core.errors import ActorDead
from flexmarl.core.protocol.session import SessionStatistics, Settings
from flexmarl.core.ref import ActorRef
from flexmarl.core.system import ActorSystem

from ..patience import PATIENCE_S
from .clusters import Cluster
from .runtime_actors import Subject


async def two(
    cluster: Cluster, settings: Settings | None = None
) -> tuple[ActorSystem, Subject, ActorRef[Subject]]:
    """A system that asks, an actor of another one, and the former's reference to it."""
    asking, serving = await cluster.start("asking", settings), await cluster.start("serving", settings)
    subject = Subject()
    await serving.add(subject, "subject")
    return asking, subject, asking.ref("subject", serving.address, Subject)


def session_of(system: ActorSystem) -> SessionStatistics:
    """Statistics of the only peer that ``system`` has called."""
    sessions = [connection.session.statistics() for connection in system._local.network.connections]
    asked = [session for session in sessions if session.requests]
    assert len(asked) <= 1
    return asked[0] if asked else SessionStatistics()


def all_credit_is_back(system: ActorSystem, ref: ActorRef[Subject]) -> bool:
    credit = system._local.network.connection(ref.address).session.requests.credit(ref.name)
    return (session_of(system).in_flight, credit.requests, credit.size_bytes, len(credit.waiting)) == (
        0,
        0,
        0,
        0,
    )


async def add_when_back(subject: ActorRef[Subject], value: int) -> int:
    """Adds ``value`` at an actor whose system has come again. The end of the connection to the system before may be
    noticed only after the goodbye: it fails calls that were sent meanwhile."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await subject.within(PATIENCE_S).add(value)
            except ActorDead:
                await asyncio.sleep(0.002)
