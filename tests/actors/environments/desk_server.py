"""MCP servers for tests. ``python desk_server.py functions``, on its standard input and output, and ``python
desk_server.py http PORT`` are of the library, which takes two seconds to import. The others write the protocol by hand:
``desk [PATH]``, with a tool less if there is a file at PATH, and those that lie or hang, by the names below."""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SCHEMAS: dict[str, Any] = {
    "no object": {"type": "string"},
    "no schema": {"type": "object", "properties": {"a": {"type": "whole"}}},
    "reference": {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:9/x.json"}}},
    "contradiction": OBJECT,
    "endless": OBJECT,
}


def serve_functions() -> None:
    """Serves functions by the library."""
    from mcp.server import MCPServer

    server = MCPServer("functions")

    @server.tool()
    def add(a: int, b: int = 1) -> int:
        """The sum."""
        return a + b

    @server.tool()
    def fail(kind: str) -> str:
        """Fails."""
        raise ValueError(kind)

    if sys.argv[1] == "http":
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
    else:
        server.run("stdio")


def serve_by_hand(behaviour: str) -> None:
    """Answers one request after the other; ``hang`` and notifications get no answer."""
    calls = (
        results_of_desk() if behaviour == "desk" else iter(lambda: {"structuredContent": {"x": "text"}}, 0)
    )
    for line in sys.stdin:
        request = json.loads(line)
        method, parameters = request["method"], request.get("params") or {}
        if "id" not in request or (method, parameters.get("name")) == ("tools/call", "hang"):
            continue
        answer: dict[str, Any]
        match method:
            case "initialize":
                server = {"name": "desk", "version": "1"}
                version = parameters["protocolVersion"]
                result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": server}
                answer = {"result": result}
            case "tools/list":
                answer = {"result": tools_of_page(behaviour, int(parameters.get("cursor") or 0))}
            case "tools/call" if parameters["name"] == "fail":
                os._exit(3)
            case "tools/call":
                answer = {"result": {"content": [], **next(calls)}}
            case _:
                answer = {"error": {"code": -32601, "message": "unknown method"}}
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": request["id"], **answer}) + "\n")
        sys.stdout.flush()


def results_of_desk() -> Iterator[dict[str, Any]]:
    """Those of ``count_calls``: the number of calls since the start of the server."""
    number = 0
    while True:
        number += 1
        yield {"content": [{"type": "text", "text": str(number)}]}


def tools_of_page(behaviour: str, page: int) -> dict[str, Any]:
    """The tools of one page."""
    if behaviour == "desk":
        names = ["add", "count_calls", "fail", "hang"]
        has_changed = len(sys.argv) > 2 and Path(sys.argv[2]).exists()
        return {"tools": [tool(name, {"type": "object"}) for name in names[has_changed:]]}
    if behaviour == "endless":
        tools = [tool(f"tool{page}-{number}", OBJECT) for number in range(100)]
        return {"tools": tools, "nextCursor": str(page + 1)}
    output = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    more = {"outputSchema": output} if behaviour == "contradiction" else {}
    return {"tools": [tool("tool", SCHEMAS[behaviour], **more)]}


def tool(name: str, schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": name, "description": "", "inputSchema": schema, **more}


if __name__ == "__main__":
    match sys.argv[1]:
        case "mute":
            time.sleep(60)
        case "functions" | "http":
            serve_functions()
        case behaviour:
            serve_by_hand(behaviour)
