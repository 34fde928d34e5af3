"""The address of a worker's server."""

import socket

import httpx2
import psutil
import pytest

from flexmarl.actors.errors import RecipeError
from flexmarl.actors.gateway.gateway_config import GatewayServerConfig
from flexmarl.actors.gateway.server import GatewayServer
from flexmarl.core.testing import virtual_time

from .clients import RESULT
from .scripted_agents import ScriptedAgent

BODY = {"model": "solver", "messages": [{"role": "user", "content": "1 + 2?"}]}


def address_of_this_host() -> str:
    """Not the one that gateways listen on by themselves: as a container has it, if this machine has such a one."""
    addresses = [
        address.address
        for of_interface in psutil.net_if_addrs().values()
        for address in of_interface
        if address.family == socket.AF_INET and not address.address.startswith("127.")
    ]
    return next(iter(addresses), "127.0.0.2")


async def statuses(server: GatewayServer) -> list[int]:
    """The answers to a request with the session's key, and to one without a key."""
    async with (
        server.opened({"solver": ScriptedAgent("solver", RESULT)}, {}) as session,
        httpx2.AsyncClient(timeout=60, trust_env=False) as client,
    ):
        url = f"{server.address}/sessions/{session.id}/v1/chat/completions"
        with_key = await client.post(url, json=BODY, headers={"x-api-key": session.key})
        without = await client.post(url, json=BODY)
    return [with_key.status_code, without.status_code]


@pytest.mark.parametrize("listen", ["0.0.0.0", "the address"])
async def test_another_address_than_the_loopbacks_needs_the_key(listen: str) -> None:
    address = address_of_this_host()
    server = GatewayServer(
        GatewayServerConfig(listen=address if listen == "the address" else listen, host=address)
    )
    try:
        assert await statuses(server) == [200, 401]
        assert server.address.startswith(f"http://{address}:")
    finally:
        await server.close()


async def test_all_addresses_are_reached_by_the_hosts_name_unless_told_otherwise() -> None:
    server = GatewayServer(GatewayServerConfig(listen="0.0.0.0"))
    try:
        async with server.opened({}, {}):
            assert server.address.startswith(f"http://{socket.gethostname()}:")
    finally:
        await server.close()


async def test_calls_that_come_too_fast_are_told_when_to_come_again() -> None:
    server = GatewayServer(GatewayServerConfig(calls_per_s=0.1))
    try:
        async with (
            server.opened({"solver": ScriptedAgent("solver", RESULT, RESULT)}, {}) as session,
            httpx2.AsyncClient(timeout=60, trust_env=False) as client,
        ):
            url = f"{server.address}/sessions/{session.id}/v1/chat/completions"
            headers = {"x-api-key": session.key}
            assert (await client.post(url, json=BODY, headers=headers)).status_code == 200
            answer = await client.post(url, content=b"[", headers=headers)
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "10")
            assert "rollout.gateway.calls_per_s=0.1" in answer.json()["error"]["message"]
            assert "x-should-retry" not in answer.headers
            assert len(session.turns) == 1
    finally:
        await server.close()


async def test_the_loopback_alone_is_the_default() -> None:
    server = GatewayServer()
    try:
        assert await statuses(server) == [200, 401]
        address = address_of_this_host()
        port = int(server.address.rpartition(":")[2])
        with socket.socket() as other, pytest.raises(ConnectionRefusedError):
            other.connect((address, port))
    finally:
        await server.close()


async def test_each_worker_has_a_port_of_its_own() -> None:
    """The first worker's is another program's here: both say which one they have wanted."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for number in (0, 1):
            server = GatewayServer(GatewayServerConfig(port=port - number), number)
            with pytest.raises(RecipeError, match=rf"can't listen on .*=127\.0\.0\.1 \(port {port}\)"):
                async with server.opened({}, {}):
                    pass


def test_a_simulation_with_programs_is_refused() -> None:
    async def body() -> None:
        with pytest.raises(RecipeError, match="programs take real time, for which no simulation waits"):
            async with GatewayServer().opened({}, {}):
                pass

    virtual_time.run(body())
