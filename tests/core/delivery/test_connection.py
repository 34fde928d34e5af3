"""The timer of a connection, whose peer never answers: set for requests as they need it, and seldom."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from flexmarl.core.delivery.connection import Connection
from flexmarl.core.delivery.outbound import Call
from flexmarl.core.delivery.peers import Network
from flexmarl.core.errors import ActorDead, CallTimeout, SystemClosed
from flexmarl.core.protocol.session import Settings

from ...patience import PATIENCE_S
from ..fuzz_target import SilentWire


@asynccontextmanager
async def connected(settings: Settings) -> AsyncIterator[Connection]:
    network = Network("here", SilentWire(), settings, {})
    network.start()
    connection = network.connection("memory://silent")
    connection.connected()
    yield connection
    network.close()


def call(connection: Connection, timeout_s: float) -> Call:
    outbound = connection.outbound
    return outbound.call(outbound.callee("actor", "endpoint", timeout_s), (), {}, None)


async def test_a_burst_of_calls_sets_one_timer_and_an_earlier_deadline_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    call_at, times = loop.call_at, list[float]()

    def counted(when: float, *args: Any, **kwargs: Any) -> asyncio.TimerHandle:
        times.append(when)
        return call_at(when, *args, **kwargs)

    async with connected(Settings(heartbeat_s=1000.0)) as connection:
        monkeypatch.setattr(loop, "call_at", counted)
        calls = [call(connection, 3000.0) for _ in range(100)]
        assert len(times) == 1, "the next heartbeat comes before all deadlines"
        calls += [call(connection, 500.0), call(connection, 600.0)]
        assert len(times) == 2 and times[1] < times[0]
        monkeypatch.undo()
    for result in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(result, SystemClosed)
        assert str(result) == "here closed during actor.endpoint"


async def test_a_call_over_a_link_that_went_down_has_a_time_to_connect_although_heartbeats_run() -> None:
    async with connected(Settings(heartbeat_s=1000.0, connect_timeout_s=0.01)) as connection:
        lost = call(connection, 3000.0)
        connection.disconnected("the cable was cut")
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(ActorDead, match="the cable was cut"):
                await lost
            assert connection.session.next_tick is not None
            with pytest.raises(ActorDead, match=r"no connection within 0\.01 s"):
                await call(connection, 3000.0)


async def test_a_request_that_waits_for_credit_has_a_deadline_of_its_own() -> None:
    async with connected(Settings(window_requests=1)) as connection:
        first, second = call(connection, 3000.0), call(connection, 0.01)
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(CallTimeout, match="waiting for credit, 1 requests are under way to it"):
                await second
        assert not connection.session.requests.waiting_for_credit()
        assert first.cancel() and connection.session.requests, "it holds its credit until it is answered"
