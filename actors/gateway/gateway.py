"""Programs as a workflow: a trajectory's agents as models of an HTTP server.

    async with open_gateway(agents) as gateway:
        end = await gateway.run(["python", "my_agent.py"], timeout_s=300)
    return Rewards(solver=float(end.status == 0))

Each worker has one server (``server.py``), each gateway is a session of it (``session.py``).
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from pathlib import Path

from ..workflow import Agents, Turn
from .program import MARK, ProgramEnd, run_program
from .server import GatewayServer
from .session import Session

current_server: ContextVar[GatewayServer | None] = ContextVar("current_server", default=None)
"""The server of the worker whose workflow runs."""


class Gateway:
    """An open session. ``url``: of the session, without an API's path; ``key``: the bearer key of its requests.
    ``env``: the variables by which the usual clients find both."""

    def __init__(self, session: Session, address: str) -> None:
        self._session = session
        self.url = f"{address}/sessions/{session.id}"
        self.key = session.key
        self.env: Mapping[str, str] = {
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_BASE": f"{self.url}/v1",
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.key,
            "ANTHROPIC_AUTH_TOKEN": self.key,
            MARK: session.id,
        }

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns of the session that have ended, in the order of their ends."""
        return tuple(self._session.turns)

    @property
    def counts(self) -> Mapping[str, int]:
        """The numbers of turns by their place in the program's conversations: ``begun``, ``merged``, ``branched``."""
        return dict(self._session.counts)

    async def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        timeout_s: float = 600.0,
    ) -> ProgramEnd:
        """Runs a program of the session to its end, in a process group of its own. ``env`` is added to this process's
        environment and to the session's. After ``timeout_s``, and if the trajectory ends before, all its processes are
        killed.

        Raises OSError if it can't be started, and the run's error that has made one of its calls fail.
        """
        end = await run_program(command, {**self.env, **(env or {})}, cwd, timeout_s)
        if self._session.error is not None:
            raise self._session.error
        return end


@asynccontextmanager
async def open_gateway(agents: Agents, *, models: Mapping[str, str] | None = None) -> AsyncIterator[Gateway]:
    """The agents of a trajectory as models, for as long as it is entered. A program asks for a model by the agent's
    name, or by one of ``models``: ``{"gpt-5": "solver"}``. Its calls are turns of the trajectory.

    Raises RecipeError for a model of an unknown agent, and if the server can't be started.
    """
    for agent in (models or {}).values():
        agents[agent]  # raises
    server = current_server.get()
    if server is not None:
        async with server.opened(agents, models or {}) as session:
            yield Gateway(session, server.address)
        return
    server = GatewayServer()  # outside a run, as in a test of a workflow
    try:
        async with server.opened(agents, models or {}) as session:
            yield Gateway(session, server.address)
    finally:
        await server.close()
