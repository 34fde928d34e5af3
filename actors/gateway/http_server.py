"""An HTTP server on the loop of its process, which keeps its signals."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .gateway_config import WAITING_CONNECTIONS
from .http_request import Application

_KEEP_ALIVE_S: Final = 75
"""Longer than the usual clients keep a connection: they would send a request on one that is being closed."""

_END_S: Final = 1

MOST_HEAD_BYTES: Final = 64 << 10
"""The size of a request's line and headers together. One that comes in a single read may be as large as that."""

_TOO_LARGE: Final = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
)


@asynccontextmanager
async def serve(application: Application, listening: socket.socket) -> AsyncIterator[None]:
    """Serves ``application`` while it is entered, and closes the socket then."""
    config = uvicorn.Config(
        application, http=_BoundedHeads, log_config=None, access_log=False, lifespan="off", ws="none",
        backlog=WAITING_CONNECTIONS, timeout_keep_alive=_KEEP_ALIVE_S, timeout_graceful_shutdown=_END_S,
    )  # fmt: skip
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    with listening:
        # Not ``serve``, which takes the signals of this process and says nothing when it has begun.
        await server.startup([listening])
        ticking = asyncio.create_task(server.main_loop(), name="HTTP server")
        try:
            yield
        finally:
            server.should_exit = server.force_exit = True
            await ticking
            await _end_streams(server)
            await server.shutdown([listening])


async def _end_streams(server: uvicorn.Server) -> None:
    """Closes the connections, of which some have answers without an end of their own, such as streams of news, and
    waits for their tasks."""
    # Not by cancelling: uvicorn prints that as an exception of the application, and so does the end of the loop. Before
    # ``shutdown``, which waits for open connections since Python 3.12 and then cancels their tasks.
    for listener in server.servers:
        listener.close()
    for connection in list(server.server_state.connections):
        connection.transport.close()
    if tasks := list(server.server_state.tasks):
        await asyncio.wait(tasks, timeout=_END_S)


class _BoundedHeads(HttpToolsProtocol):
    """A connection that ends at a head without end, and at trailers without end: the parser would keep all of them,
    since it knows no limit."""

    _kept_bytes = 0
    """Those that came since the last part of a body, or the last end of a head or of a request."""

    def data_received(self, data: bytes) -> None:
        self._kept_bytes += len(data)
        before = self._kept_bytes
        super().data_received(data)
        if before == self._kept_bytes > MOST_HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def on_headers_complete(self) -> None:
        self._kept_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._kept_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._kept_bytes = 0
        super().on_message_complete()
