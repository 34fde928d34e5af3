"""The gateway of a worker: one HTTP server for the sessions of all its trajectories.

It listens from the first program on, by default on a free port of the loopback address, and ends with its worker.
"""

import asyncio
import socket
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cached_property
from typing import Final

from ..errors import RecipeError
from ..workflow import Agent
from .call_rate import CallRate
from .gateway_config import WAITING_CONNECTIONS, GatewayServerConfig
from .http_app import application
from .http_request import Application
from .model_call import ApiError
from .session import Session
from .trajectory_programs import TrajectoryPrograms

_KEPT_NAMES: Final = 1000
_ALL_ADDRESSES: Final = ("0.0.0.0", "::")


class GatewayServer:
    """Serves sessions by their names and keys."""

    def __init__(self, config: GatewayServerConfig | None = None, number: int = 0) -> None:
        """``number``: of the worker, from 0."""
        self._config = config or GatewayServerConfig()
        self._number = number
        self._sessions: dict[str, Session] = {}
        self._by_key: dict[str, Session] = {}
        self._ended: deque[str] = deque(maxlen=_KEPT_NAMES)
        """Names and keys of the last ones that have ended."""
        self._opening = asyncio.Lock()
        self._stack = AsyncExitStack()
        self.address = ""
        """``http://HOST:PORT``; empty before the first session."""

    @asynccontextmanager
    async def opened(
        self,
        agents: Mapping[str, Agent],
        models: Mapping[str, str],
        programs: TrajectoryPrograms | None = None,
        name: str = "",
    ) -> AsyncIterator[Session]:
        """A session, see there, for as long as it is entered. ``name``: of one whose requests are carried to
        ``application``, not to a port of this host. Raises RecipeError if the server can't be started."""
        if not name:
            async with self._opening:
                if not self.address:
                    self.address = await self._start()
        session = Session(agents, models, programs, name, CallRate(self._config.calls_per_s))
        self._sessions[session.id] = self._by_key[session.key] = session
        try:
            yield session
        finally:
            del self._sessions[session.id], self._by_key[session.key]
            self._ended += (session.id, session.key)
            await session.close()

    @cached_property
    def application(self) -> Application:
        """The ASGI application that serves the sessions."""
        return application(self)

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
        await self._stack.aclose()

    def _listen(self) -> socket.socket:
        """Raises RecipeError."""
        host, port = self._config.listen, self._config.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            place = (host, port + self._number if port else 0)
            return socket.create_server(place, family=family, backlog=WAITING_CONNECTIONS)
        except (OSError, OverflowError) as error:
            raise RecipeError(
                f"the gateway can't listen on rollout.gateway.listen={host} (port {place[1]}): {error}"
            ) from error

    async def _start(self) -> str:
        if getattr(asyncio.get_running_loop(), "is_virtual", False):
            raise RecipeError("programs take real time, for which no simulation waits: train the recipe")
        try:
            from .http_server import serve  # an extra: only recipes with programs need it
        except ImportError as error:
            raise missing_extra(error) from error
        listening = self._listen()
        host = self._config.host or self._config.listen
        if host in _ALL_ADDRESSES:
            host = socket.gethostname()
        await self._stack.enter_async_context(serve(self.application, listening))
        return f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"


def missing_extra(error: ImportError) -> RecipeError:
    """The error for a package that is not installed."""
    return RecipeError(f"a gateway needs the extra: pip install 'flexmarl[gateway]' ({error})")
