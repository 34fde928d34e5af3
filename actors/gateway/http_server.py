"""An HTTP server on the loop of its process, which keeps its signals."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import uvicorn

from .gateway_config import WAITING_CONNECTIONS
from .http_request import Application

_KEEP_ALIVE_S: Final = 75
"""Longer than the usual clients keep a connection: they would send a request on one that is being closed."""

_END_S: Final = 1


@asynccontextmanager
async def serve(application: Application, listening: socket.socket) -> AsyncIterator[None]:
    """Serves ``application`` while it is entered, and closes the socket then."""
    config = uvicorn.Config(
        application, log_config=None, access_log=False, lifespan="off", ws="none", backlog=WAITING_CONNECTIONS,
        timeout_keep_alive=_KEEP_ALIVE_S, timeout_graceful_shutdown=_END_S,
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
            await server.shutdown([listening])
