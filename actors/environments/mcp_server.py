"""Servers of the Model Context Protocol (https://modelcontextprotocol.io): ``pip install flexmarl[mcp]``.

    start ──> task of the connection: handshake, tools ──> McpServer.tools ──> Ask(tools=...), run_tools ──> call
    close ──> end of that task, and of a server that it has started

A connection of the library ``mcp`` must be opened and closed by one task, as its cancel scopes belong to that task. So
each connection has a task, and calls of other tasks use it. A connection ends by ``close``, by an end of the server, or
after _MOST_SILENT calls in a row without a result in time. The next call then makes another one, unless ``restart`` is
false.

An agent reads what it has caused (ToolFailed: an error of the tool, no result in time). Other faults fail the
trajectory (ToolServerLost): a policy must not learn from a server that is down.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import structlog

from ..errors import ToolFailed, ToolServerLost
from .mcp_tool import McpTool, ToolResult, result_text

if TYPE_CHECKING:
    from mcp.client.client import Client

_log = structlog.get_logger()
_MOST_TOOLS: Final = 256
_MOST_SILENT: Final = 3
_CLOSE_S: Final = 10.0
"""Longer than the library waits at most: it closes the server's input, then terminates, then kills, each for 2 s."""


class McpServer:
    """One MCP server: ``McpServer(["python", "-m", "mcp_server_time"])`` starts a program, and
    ``McpServer("http://tools:8000/mcp")`` connects with one that runs.

    Its ``tools`` are for ``Ask(tools=...)`` and ``run_tools``. An environment whose server has no state of a trajectory
    starts it in ``setup`` and closes it in ``close``; one whose server has (a game), in ``reset`` and ``end``, with
    ``restart=False``: a server that has begun again knows nothing of the trajectory.
    """

    def __init__(
        self,
        server: Sequence[str] | str,
        *,
        name: str | None = None,
        tools: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        start_timeout_s: float = 30.0,
        call_timeout_s: float = 30.0,
        restart: bool = True,
    ) -> None:
        """``server``: a command, or the address of a server of the transport "streamable HTTP". ``tools``: the names of
        those that are used; all by default. ``environment``, ``folder``: for the command, beside a few usual variables.
        Times in seconds. Raises ValueError for an empty command and for times that are not positive."""
        if not server or start_timeout_s <= 0 or call_timeout_s <= 0:
            raise ValueError(
                f"McpServer: server={server!r} must not be empty, start_timeout_s={start_timeout_s!r} and "
                f"call_timeout_s={call_timeout_s!r} must be positive"
            )
        self.name = name or (server if isinstance(server, str) else " ".join(server))
        self._server, self._selected = server, tools
        self._environment, self._folder = environment, folder
        self._start_timeout_s, self._call_timeout_s, self._restart = start_timeout_s, call_timeout_s, restart
        self._tools: tuple[McpTool, ...] = ()
        self._connection: _Connection | None = None
        self._is_closed, self._silent_calls = False, 0
        self._lock = asyncio.Lock()

    @property
    def tools(self) -> tuple[McpTool, ...]:
        """The tools in the server's order; empty before ``start``."""
        return self._tools

    async def start(self) -> Self:
        """Connects and reads the tools. Raises ToolServerLost if there is no connection within ``start_timeout_s``, and
        for a tool that is missing, or whose schema is invalid: leave it out by ``tools``."""
        async with self._lock:
            await self._connect()
        return self

    async def close(self) -> None:
        """Ends the connection, and the program that it has started. Later calls raise ToolServerLost."""
        self._is_closed = True
        async with self._lock:
            await self._disconnect()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def call(self, tool: str, /, **arguments: Any) -> ToolResult:
        """Calls one of the server's tools. Raises ToolFailed if the tool reports an error or gives no result within
        ``call_timeout_s``, ToolServerLost if the connection ends."""
        from mcp.shared.exceptions import MCPError

        connection = await self._living_connection()
        try:
            async with asyncio.timeout(self._call_timeout_s):
                result = await connection.client.call_tool(tool, arguments)
        except TimeoutError:
            await self._count_silence(connection)
            raise ToolFailed(f"{self.name}: no result of {tool} within {self._call_timeout_s:g} s") from None
        except MCPError as error:
            if not connection.has_ended and error.error.code != _closed_code():
                raise ToolFailed(f"{self.name}: {error}") from None
            await self._drop(connection)
            raise ToolServerLost(
                self.name, f"the connection ended during a call of {tool}: {error}"
            ) from None
        except (RuntimeError, ValueError) as error:  # a result that contradicts the tool's own schema
            raise ToolFailed(f"{self.name}: invalid result of {tool}: {_first_line(error)}") from None
        self._silent_calls = 0
        if result.is_error:
            raise ToolFailed(result_text(result))
        return ToolResult(result_text(result), result.structured_content or {})

    async def _living_connection(self) -> "_Connection":
        """The connection, or another one if it has ended. Calls that wait for it at once share it."""
        async with self._lock:
            if self._connection is not None and not self._connection.has_ended:
                return self._connection
            if self._is_closed or not self._tools or not self._restart:
                state = "is closed" if self._is_closed else "has ended" if self._tools else "was not started"
                raise ToolServerLost(self.name, f"it {state}")
            await self._disconnect()
            _log.warning("MCP server ended and is started again", server=self.name)
            return await self._connect()

    async def _connect(self) -> "_Connection":
        before = self._tools
        self._connection = connection = _Connection(self._target())
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await connection.open()
                tools = await self._read_tools(connection.client)
            if before and [tool.schema for tool in before] != [tool.schema for tool in tools]:
                raise ToolServerLost(self.name, "it has other tools than at its start")
        except BaseException as error:
            await self._disconnect()
            if isinstance(error, ToolServerLost) or not isinstance(error, Exception):
                raise
            if isinstance(error, TimeoutError):
                raise ToolServerLost(self.name, f"no tools within {self._start_timeout_s:g} s") from None
            raise ToolServerLost(self.name, _first_line(error)) from error
        self._tools = tools
        return connection

    def _target(self) -> Any:
        from mcp.client.stdio import StdioServerParameters

        if isinstance(self._server, str):
            return self._server
        command, *arguments = self._server
        environment = dict(self._environment) if self._environment is not None else None
        return StdioServerParameters(command=command, args=arguments, env=environment, cwd=self._folder)

    async def _read_tools(self, client: "Client") -> tuple[McpTool, ...]:
        listed: dict[str, Any] = {}
        cursor = None
        while True:
            page = await client.list_tools(cursor=cursor)
            listed |= {tool.name: tool for tool in page.tools}
            if len(listed) > _MOST_TOOLS or (page.next_cursor and not page.tools):
                raise ToolServerLost(self.name, f"its list of tools does not end after {len(listed)}")
            if not page.next_cursor:
                break
            cursor = page.next_cursor
        names = list(listed) if self._selected is None else list(self._selected)
        if missing := [name for name in names if name not in listed]:
            raise ToolServerLost(
                self.name, f"it has no tool {missing[0]}; it has: {', '.join(listed) or 'none'}"
            )
        if not names:
            raise ToolServerLost(self.name, "it has no tools")
        return tuple(self._tool(listed[name]) for name in names)

    def _tool(self, listed: Any) -> McpTool:
        try:
            return McpTool(self.call, listed.name, listed.description or "", listed.input_schema)
        except ValueError as error:
            advice = "name the others in `tools` to do without it"
            raise ToolServerLost(self.name, f"the tool {listed.name[:80]!r}: {error}: {advice}") from None

    async def _count_silence(self, connection: "_Connection") -> None:
        self._silent_calls += 1
        if self._silent_calls >= _MOST_SILENT:
            _log.warning("MCP server gives no results", server=self.name, calls=self._silent_calls)
            await self._drop(connection)

    async def _drop(self, connection: "_Connection") -> None:
        async with self._lock:
            if self._connection is connection:
                await self._disconnect()

    async def _disconnect(self) -> None:
        connection, self._connection, self._silent_calls = self._connection, None, 0
        if connection is not None and not await connection.close():
            _log.warning("MCP server does not end", server=self.name, waited_s=_CLOSE_S)


class _Connection:
    """A client of the library, and the task that has opened it and will close it."""

    def __init__(self, target: Any) -> None:
        self.client: Client
        self._target = target
        self._opened: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def has_ended(self) -> bool:
        return self._task is None or self._task.done() or self._closing.is_set()

    async def open(self) -> None:
        """Raises what the library raises for a server that does not start or answers wrongly."""
        self._task = asyncio.create_task(self._run(), name="connection with an MCP server")
        self.client = await asyncio.shield(self._opened)

    async def _run(self) -> None:
        from mcp.client.client import Client

        try:
            async with Client(self._target) as client:
                self._opened.set_result(client)
                await self._closing.wait()
        except Exception as error:  # noqa: BLE001  # the first one is raised by `open`; a later one is the connection's end
            if not self._opened.done():
                self._opened.set_exception(error)

    async def close(self) -> bool:
        """Ends the connection. Returns false if its task is still there after _CLOSE_S: the library waits for less."""
        self._closing.set()
        if self._task is None:
            return True
        if not self._opened.done():
            self._task.cancel()
        await asyncio.wait([self._task], timeout=_CLOSE_S)
        if not self._task.done():
            self._task.cancel()
            return False
        if self._opened.done() and not self._opened.cancelled():
            self._opened.exception()  # marks it as retrieved: `open` may have been cancelled
        return True


def _closed_code() -> int:
    from mcp_types import CONNECTION_CLOSED

    return int(CONNECTION_CLOSED)


def _first_line(error: BaseException) -> str:
    """The first line of an error's text; of the first one if it is a group of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return next(iter(str(error).splitlines()), "") or type(error).__name__
