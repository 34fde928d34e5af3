"""Programs as a workflow: a trajectory's agents as models of an HTTP server.

    async with open_gateway(agents) as gateway:
        end = await gateway.run(["python", "my_agent.py"], timeout_s=300)
    return gateway.rewards(end)

Each worker has one server (``server.py``), each gateway is a session of it (``session.py``).
"""

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path

from ..deadline import Deadline
from ..errors import RecipeError
from ..workflow import Agents, Rewards, Turn
from .program import ProgramEnd, run_program, shown_command
from .reported_rewards import reported_rewards
from .server import GatewayServer
from .session import Session, TrainRule
from .trajectory_programs import current_programs

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
            "FLEXMARL_SESSION": session.id,
        }

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns of the session that have ended, in the order of their ends."""
        return tuple(self._session.turns)

    @property
    def counts(self) -> Mapping[str, int]:
        """The numbers of turns by their place in the program's conversations, ``begun``, ``merged`` or ``branched``;
        see ``Session.counts`` for the others."""
        return dict(self._session.counts)

    async def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        timeout_s: float | None = None,
    ) -> ProgramEnd:
        """Runs a program of the session to its end, in a process group of its own. ``env`` is added to this process's
        environment and to the session's. After ``timeout_s`` without the time of its models' answers, and if the
        trajectory ends before, it is killed. With its end all processes that it has left behind are killed too.

        Raises OSError if there is no folder ``cwd``, and the run's error that has made one of its calls fail.
        """
        deadline = Deadline(math.inf if timeout_s is None else timeout_s)
        limit = "" if timeout_s is None else f"its timeout_s={timeout_s:g}"
        programs = self._session.programs
        with (
            closing(_Stopped(deadline)),
            self._session.limited(deadline),
            programs.run(shown_command(command), limit),
        ):
            end = await run_program(command, {**self.env, **(env or {})}, cwd, deadline)
        end = replace(end, refusal=self._session.refusal)
        programs.ended.append(end)
        if self._session.error is not None:
            raise self._session.error
        return end

    def rewards(self, end: ProgramEnd) -> Rewards:
        """The rewards that a program has written to the file ``FLEXMARL_REWARDS_FILE``, see ``reported_rewards``.
        Raises ProgramFailed if the program has failed, has written none, or none that are valid."""
        try:
            return reported_rewards(end.reported(), self.turns)
        except ValueError as problem:
            raise end.failed(f"has written invalid rewards: {problem}") from None


@asynccontextmanager
async def open_gateway(
    agents: Agents,
    *,
    models: Mapping[str, str] | None = None,
    train: TrainRule | Mapping[str, TrainRule] = "all",
) -> AsyncIterator[Gateway]:
    """The agents of a trajectory as models, for as long as it is entered. A program asks for a model by the agent's
    name, or by one of ``models``: ``{"gpt-5": "solver"}``. Its calls are turns of the trajectory. ``train``: the rule
    of the turns that are trained, of all agents or by agent; the others need no reward.

    Raises RecipeError for a model or a rule of an unknown agent, and if the server can't be started.
    """
    rules = train if isinstance(train, Mapping) else dict.fromkeys(agents, train)
    for agent in (*(models or {}).values(), *rules):
        agents[agent]  # raises
    for rule in rules.values():
        if rule not in ("main", "all") and not callable(rule):
            raise RecipeError(f"train is {rule!r}, needs 'main', 'all' or a function of a turn")
    shared = current_server.get()
    async with (
        nullcontext(shared) if shared is not None else _server_of_a_test() as server,
        server.opened(agents, models or {}, current_programs.get()) as session,
    ):
        yield Gateway(session, server.address)
        session.leave_out(rules)


@asynccontextmanager
async def _server_of_a_test() -> AsyncIterator[GatewayServer]:
    """A server outside a run, as in a test of a workflow."""
    server = GatewayServer()
    try:
        yield server
    finally:
        await server.close()


class _Stopped:
    """Stops a deadline by ``close``."""

    def __init__(self, deadline: Deadline) -> None:
        self.close = deadline.stop
