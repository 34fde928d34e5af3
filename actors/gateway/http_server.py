"""An HTTP server on the loop of its process, which keeps its signals."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.applications import Starlette

_BACKLOG = 2048
"""Connections that wait to be accepted: a thousand programs may begin at once."""

_KEEP_ALIVE_S = 75
"""Longer than the usual clients keep a connection: they would send a request on one that is being closed."""

_END_S = 1


@asynccontextmanager
async def serve(application: Starlette, host: str, port: int) -> AsyncIterator[str]:
    """Serves ``application`` while it is entered; ``port`` 0: a free one. Returns ``http://HOST:PORT``. Raises OSError
    if it can't listen there."""
    config = uvicorn.Config(
        application, log_config=None, access_log=False, lifespan="off", ws="none", backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S, timeout_graceful_shutdown=_END_S,
    )  # fmt: skip
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    with socket.create_server((host, port), backlog=_BACKLOG) as listening:
        # Not ``serve``, which takes the signals of this process and says nothing when it has begun.
        await server.startup([listening])
        ticking = asyncio.create_task(server.main_loop(), name="HTTP server")
        try:
            yield f"http://{host}:{listening.getsockname()[1]}"
        finally:
            server.should_exit = server.force_exit = True
            await ticking
            await server.shutdown([listening])
