"""An MCP server for tests: ``python desk_server.py desk [PATH]``, on its standard input and output. With a file at PATH
it has one tool less. ``python desk_server.py http PORT``; and servers that lie, hang or end, by the names below."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import mcp_types as types
from mcp.server import MCPServer
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SCHEMAS: dict[str, Any] = {
    "no object": {"type": "string"},
    "no schema": {"type": "object", "properties": {"a": {"type": "whole"}}},
    "reference": {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:9/x.json"}}},
    "contradiction": OBJECT,
    "endless": OBJECT,
}


def desk() -> None:
    server = MCPServer("desk")
    count = [0]

    @server.tool()
    def add(a: int, b: int = 1) -> int:
        """The sum."""
        return a + b

    @server.tool()
    def count_calls() -> int:
        """The number of calls since the start of the server."""
        count[0] += 1
        return count[0]

    @server.tool()
    def fail(kind: str) -> str:
        """Fails."""
        if kind == "end":
            os._exit(3)
        raise ValueError(kind)

    @server.tool()
    async def hang() -> str:
        """Never ends."""
        await anyio.sleep_forever()
        return ""

    if len(sys.argv) > 2 and Path(sys.argv[2]).exists():
        server.remove_tool("add")
    if sys.argv[1] == "http":
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
    else:
        server.run("stdio")


async def liar(behaviour: str) -> None:
    async def list_tools(_context: Any, params: Any) -> types.ListToolsResult:
        page = int((params and params.cursor) or 0)
        names = [f"tool{page}-{n}" for n in range(100)] if behaviour == "endless" else ["tool"]
        output = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
        tools = [
            types.Tool(
                name=name,
                description="",
                input_schema=SCHEMAS[behaviour],
                output_schema=output if behaviour == "contradiction" else None,
            )
            for name in names
        ]
        return types.ListToolsResult(
            tools=tools, next_cursor=str(page + 1) if behaviour == "endless" else None
        )

    async def call_tool(_context: Any, _params: Any) -> types.CallToolResult:
        return types.CallToolResult(content=[], structured_content={"x": "text"})

    server = Server("liar", on_list_tools=list_tools, on_call_tool=call_tool)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


if __name__ == "__main__":
    match sys.argv[1]:
        case "mute":
            time.sleep(60)
        case "desk" | "http":
            desk()
        case behaviour:
            anyio.run(liar, behaviour)
