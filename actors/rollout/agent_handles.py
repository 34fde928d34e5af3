"""The agents of one trajectory, as its workflow gets them."""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from ..errors import InvalidRequest
from ..names import AgentName
from ..workflow import OnText, Prompt, Turn
from .trajectory import Trajectory
from .trajectory_rewards import unknown_agent
from .turn_options import NO_OPTIONS, TurnOptions, turn_options

Generate = Callable[[AgentName, Trajectory, Prompt, TurnOptions, OnText | None], Awaitable[Turn]]


class AgentHandle:
    """An agent within one trajectory."""

    def __init__(self, generate: Generate, agent: AgentName, trajectory: Trajectory) -> None:
        self._generate = generate
        self._agent = agent
        self._trajectory = trajectory

    async def generate(self, prompt: Prompt, *, on_text: OnText | None = None, **options: Any) -> Turn:
        """Generates a turn of the agent: see ``workflow.Agent.generate``. Raises InvalidRequest for an unknown
        option."""
        try:
            chosen = turn_options(options) if options else NO_OPTIONS
        except ValueError as problem:
            request_id = self._trajectory.next_sample_id()
            raise InvalidRequest(request_id, f"agent {self._agent}: {problem}") from None
        return await self._generate(self._agent, self._trajectory, prompt, chosen, on_text)


class AgentHandles(dict[str, AgentHandle]):
    """The handles by agent. Raises RecipeError for an agent that the config lacks."""

    def __init__(self, generate: Generate, agents: Iterable[AgentName], trajectory: Trajectory) -> None:
        super().__init__({agent: AgentHandle(generate, agent, trajectory) for agent in agents})

    def __missing__(self, agent: str) -> AgentHandle:
        raise unknown_agent(agent, self, "the workflow asks for")
