"""A flood: both processes stay small, the producer is slowed, and nothing is lost."""

from collections.abc import Awaitable, Callable

import psutil
import pytest

from flexmarl.core.protocol.codec import Buffer
from flexmarl.core.ref import ActorRef
from flexmarl.core.supervision.supervisor import Supervisor
from flexmarl.core.system import ActorSystem

from ..flood import SlowConsumer

GROWTH_MIB = 64
MESSAGES = 4000


def strings(consumer: ActorRef[SlowConsumer]) -> Callable[[int], Awaitable[None]]:
    payload = "x" * 50_000
    return lambda number: consumer.tell("consume", number, payload)


def buffers(consumer: ActorRef[SlowConsumer]) -> Callable[[int], Awaitable[None]]:
    payload = Buffer(bytes(50_000))
    return lambda number: consumer.tell("consume_buffer", number, payload)


@pytest.mark.parametrize("kind", [strings, buffers])
async def test_a_flood_slows_its_producer_and_neither_side_grows(
    system: ActorSystem,
    supervisor: Supervisor,
    kind: Callable[[ActorRef[SlowConsumer]], Callable[[int], Awaitable[None]]],
) -> None:
    """200 MB are sent to a consumer that works off 2000 messages a second at best."""
    await supervisor.spawn("flood:SlowConsumer", "consumer", {})
    consumer = supervisor.reference("consumer", SlowConsumer)
    send = kind(consumer)
    for number in range(20):
        await send(number)
    own = psutil.Process()
    there_before, here_before = await consumer.api.rss_mib(), own.memory_info().rss / 2**20
    here_most = here_before
    for number in range(20, MESSAGES):
        await send(number)
        if number % 100 == 0:
            here_most = max(here_most, own.memory_info().rss / 2**20)
            (session,) = (
                connection.session.statistics()
                for connection in system._local.network.connections
                if connection.node == "consumer" and connection.session.requests.last_id
            )
            assert session.in_flight <= system.settings.window_bytes / 50_000 + 1
    there = await consumer.within(60).rss_mib()
    assert await consumer.within(60).consumed() == list(range(MESSAGES))
    assert there - there_before < GROWTH_MIB and here_most - here_before < GROWTH_MIB
