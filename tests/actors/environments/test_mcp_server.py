"""MCP servers in processes: real tools, servers that end, hang, change and lie, and what is left of them."""

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from flexmarl.actors.environments.mcp_server import McpServer
from flexmarl.actors.environments.tool_calls import tool_schema
from flexmarl.actors.environments.tool_runs import run_tools
from flexmarl.actors.errors import ToolFailed, ToolServerLost
from flexmarl.actors.workflow import Turn

from ...patience import PATIENCE_S

DESK = [sys.executable, str(Path(__file__).with_name("desk_server.py"))]


def server_of(behaviour: str, *arguments: str, **options: Any) -> McpServer:
    defaults: dict[str, Any] = {
        "name": behaviour,
        "start_timeout_s": PATIENCE_S,
        "call_timeout_s": PATIENCE_S,
    }
    options = defaults | options
    return McpServer([*DESK, behaviour, *arguments], **options)


def turn(name: str, **arguments: Any) -> Turn:
    text = json.dumps({"name": name, "arguments": arguments})
    return Turn("clerk", f"<tool_call>{text}</tool_call>", (1,), (2,))


async def content(server: McpServer, asked: Turn) -> str:
    (message,) = await run_tools(asked, server.tools, timeout_s=PATIENCE_S)
    return str(message["content"])


def children() -> list[psutil.Process]:
    return psutil.Process().children()


async def test_a_server_of_the_package_index_gives_the_time() -> None:
    pytest.importorskip("mcp_server_time")
    async with McpServer([sys.executable, "-m", "mcp_server_time"], start_timeout_s=PATIENCE_S) as server:
        assert {tool.name for tool in server.tools} == {"get_current_time", "convert_time"}
        asked = turn("convert_time", source_timezone="UTC", time="12:00", target_timezone="Asia/Tokyo")
        assert json.loads(await content(server, asked))["time_difference"] == "+9.0h"
        assert "is a required property" in await content(server, turn("get_current_time"))


async def test_tools_are_those_of_functions_for_agents() -> None:
    before = children()
    async with server_of("functions") as server:
        schema = tool_schema(server.tools[0])["function"]
        assert (schema["name"], schema["description"]) == ("add", "The sum.")
        assert schema["parameters"]["required"] == ["a"]
        assert await content(server, turn("add", a=2, b=3)) == "5"
        assert (await server.call("add", a=2)).data == {"result": 3}
        assert (await content(server, turn("add", a="x"))).startswith("error: ValueError: $.a: 'x' is not")
        assert "Error executing tool fail" in await content(server, turn("fail", kind="x"))
        results = await asyncio.gather(*(server.call("add", a=n, b=0) for n in range(50)))
        assert [result.text for result in results] == [str(n) for n in range(50)], "they run at once"
    assert children() == before
    with pytest.raises(ToolServerLost, match="the tool server functions: it is closed"):
        await server.call("add", a=1)


async def test_the_end_of_a_server_fails_the_trajectory_and_the_next_call_starts_another_one() -> None:
    async with server_of("desk") as server:
        assert await content(server, turn("count_calls")) == "1"
        with pytest.raises(ToolServerLost, match="desk: the connection ended during a call of fail"):
            await run_tools(turn("fail", kind="end"), server.tools, timeout_s=PATIENCE_S)
        results = await asyncio.gather(*(server.call("count_calls") for _ in range(4)))
        assert sorted(result.text for result in results) == ["1", "2", "3", "4"], (
            "one server for all that waited"
        )


async def test_a_server_with_the_state_of_a_trajectory_is_not_started_again() -> None:
    async with server_of("desk", restart=False) as server:
        with pytest.raises(ToolServerLost):
            await server.call("fail", kind="end")
        with pytest.raises(ToolServerLost, match="it has ended"):
            await server.call("count_calls")


async def test_a_server_that_is_killed_while_it_is_idle() -> None:
    before = children()
    async with server_of("desk") as server:
        (process,) = [child for child in children() if child not in before]
        process.kill()
        with pytest.raises(ToolServerLost):
            await server.call("count_calls")
        assert (await server.call("count_calls")).text == "1"


async def test_a_server_that_hangs_is_replaced_after_three_calls() -> None:
    async with server_of("desk") as server:
        await server.call("count_calls")
        server._call_timeout_s = 0.05
        for _ in range(3):
            with pytest.raises(ToolFailed, match=r"desk: no result of hang within 0\.05 s"):
                await server.call("hang")
        server._call_timeout_s = PATIENCE_S
        assert (await server.call("count_calls")).text == "1"


async def test_a_server_that_changes_its_tools_is_refused(tmp_path: Path) -> None:
    async with server_of("desk", str(tmp_path / "changed")) as server:
        with pytest.raises(ToolServerLost):
            await server.call("fail", kind="end")
        (tmp_path / "changed").touch()
        with pytest.raises(ToolServerLost, match="it has other tools than at its start"):
            await server.call("count_calls")


@pytest.mark.parametrize(
    ("behaviour", "problem"),
    [
        ("no object", "validation error for ListToolsResult"),
        ("no schema", r"the tool 'tool': its parameters are not a JSON schema: \$\.properties\.a\.type"),
        ("endless", "its list of tools does not end after 300"),
    ],
)
async def test_a_list_of_tools_that_lies_is_refused(behaviour: str, problem: str) -> None:
    before = children()
    with pytest.raises(ToolServerLost, match=problem):
        await server_of(behaviour).start()
    assert children() == before


async def test_a_schema_fetches_nothing_from_other_addresses() -> None:
    async with server_of("reference") as server:
        with pytest.raises(ValueError, match=r"refers to http://127\.0\.0\.1:9/x\.json, which is not in it"):
            server.tools[0].check({"a": 1})


async def test_a_result_that_contradicts_its_schema_is_the_agents_to_read() -> None:
    async with server_of("contradiction") as server:
        with pytest.raises(ToolFailed, match="contradiction: invalid result of tool"):
            await server.call("tool", a=1)


async def test_a_server_that_does_not_start_is_refused() -> None:
    with pytest.raises(ToolServerLost, match="No such file"):
        await McpServer(["/nowhere/server"]).start()
    with pytest.raises(ToolServerLost, match=r"mute: no tools within 0\.2 s"):
        await server_of("mute", start_timeout_s=0.2).start()
    with pytest.raises(ToolServerLost, match="it has no tool multiply; it has: add, count_calls, fail, hang"):
        await server_of("desk", tools=["multiply"]).start()
    with pytest.raises(ToolServerLost, match="it was not started"):
        await server_of("desk").call("add", a=1)
    with pytest.raises(ValueError, match="must not be empty"):
        McpServer([])


async def test_a_cancelled_start_leaves_no_process() -> None:
    before = children()
    starting = asyncio.create_task(server_of("mute").start())
    async with asyncio.timeout(PATIENCE_S):
        while children() == before:
            await asyncio.sleep(0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert children() == before


@asynccontextmanager
async def http_desk() -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    process = await asyncio.create_subprocess_exec(*DESK, "http", str(port))
    try:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    break
                except ConnectionRefusedError:
                    await asyncio.sleep(0.05)
        writer.close()
        yield f"http://127.0.0.1:{port}/mcp", process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_server_of_an_address() -> None:
    async with http_desk() as (address, process), McpServer(address, start_timeout_s=PATIENCE_S) as server:
        assert await content(server, turn("add", a=2, b=3)) == "5"
        process.kill()
        await process.wait()
        with pytest.raises(ToolServerLost, match="127"):
            await server.call("add", a=1)
        with pytest.raises(ToolServerLost, match="127"):
            await server.call("add", a=1)
