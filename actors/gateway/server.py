"""The gateway of a worker: one HTTP server for the sessions of all its trajectories.

It listens on a free port of the loopback address from the first session on, and ends with its worker.
"""

import asyncio
import socket
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from typing import Any, Final

from ..errors import RecipeError
from ..workflow import Agent
from .model_call import ApiError
from .session import Session

_KEPT_NAMES: Final = 1000
_END_S: Final = 2.0


class GatewayServer:
    """Serves sessions by their names and keys."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._by_key: dict[str, Session] = {}
        self._ended: deque[str] = deque(maxlen=_KEPT_NAMES)
        """Names and keys of the last ones that have ended."""
        self._opening = asyncio.Lock()
        self._server: Any = None
        self._task: asyncio.Task[None] | None = None
        self._port = 0

    @asynccontextmanager
    async def opened(self, agents: Mapping[str, Agent], models: Mapping[str, str]) -> AsyncIterator[Session]:
        """A session for as long as it is entered. Raises RecipeError if the server can't be started."""
        async with self._opening:
            if self._task is None:
                await self._start()
        session = Session(agents, models)
        self._sessions[session.id] = self._by_key[session.key] = session
        try:
            yield session
        finally:
            del self._sessions[session.id], self._by_key[session.key]
            self._ended += (session.id, session.key)
            await session.close()

    @property
    def address(self) -> str:
        """``http://HOST:PORT``."""
        return f"http://127.0.0.1:{self._port}"

    def session(self, name: str | None, key: str) -> Session:
        """See ``http_app.Sessions``."""
        session = self._by_key.get(key)
        if session is not None and name in (None, session.id):
            return session
        if key in self._ended or (name in self._ended and name is not None):
            raise ApiError(410, "the session has ended", code="session_ended")
        if session is not None:
            raise ApiError(401, f"the key is of another session than {name}", code="invalid_api_key")
        if name in self._sessions or not key or name is None:
            raise ApiError(401, "the key is of no session", code="invalid_api_key")
        raise ApiError(404, f"there is no session {name}", code="session_not_found")

    async def close(self) -> None:
        """Ends the server, and with it all connections."""
        if self._task is None:
            return
        self._server.should_exit = self._server.force_exit = True
        await asyncio.wait({self._task}, timeout=_END_S)
        self._task.cancel()

    async def _start(self) -> None:
        try:
            import uvicorn  # an extra: only recipes with programs need it

            from .http_app import application
        except ImportError as error:
            raise RecipeError(
                f"a gateway needs the extra: pip install 'flexmarl[gateway]' ({error})"
            ) from error
        listening = socket.create_server(("127.0.0.1", 0), backlog=2048)
        self._port = listening.getsockname()[1]
        config = uvicorn.Config(
            application(self), log_config=None, access_log=False, lifespan="off", backlog=2048, ws="none",
            timeout_keep_alive=75, timeout_graceful_shutdown=1,
        )  # fmt: skip

        class Server(uvicorn.Server):
            def capture_signals(self) -> Any:
                """The signals of this process are the worker's."""
                return nullcontext()

        self._server = Server(config)
        self._task = asyncio.create_task(self._server.serve([listening]), name="gateway")
        while not self._server.started:
            if self._task.done():
                raise RecipeError(f"the gateway does not start: {self._task.exception()}")
            await asyncio.sleep(0.005)
