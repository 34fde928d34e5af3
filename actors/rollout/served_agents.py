"""Agents that are served without training: each turn is a trajectory of its own, which nothing keeps."""

import itertools
from collections.abc import Mapping
from typing import Any

from ..deadline import Deadline
from ..gateway.session import Session
from ..gateway.trajectory_programs import ProgramSampling, TrajectoryPrograms
from ..messages import Query, VersionRange
from ..names import AgentName, PolicyName, Version
from ..workflow import OnText, Prompt, Turn
from .agent_handles import AgentHandle, Generate
from .rollout_setup import RolloutAgent
from .trajectory import Trajectory


class ServedAgent:
    """As ``workflow.Agent``."""

    def __init__(
        self,
        generate: Generate,
        agent: AgentName,
        versions: dict[PolicyName, VersionRange],
        limit_s: float,
        life: str,
    ) -> None:
        """``limit_s``: of a turn, without the time in which it waits for an instance. ``life``: of the worker. A turn's
        seed follows from its name, and so from this: two lives give other answers."""
        self._generate = generate
        self._agent = agent
        self._versions = versions
        self._limit_s = limit_s
        self._life = life
        self._numbers = itertools.count()

    async def generate(self, prompt: Prompt, *, on_text: OnText | None = None, **options: Any) -> Turn:
        """Generates a turn: see ``workflow.Agent.generate``."""
        query = Query(f"{self._life}-{self._agent}-{next(self._numbers)}", "")
        trajectory = Trajectory(query, None, 0, self._versions)
        trajectory.deadline = Deadline(self._limit_s)
        try:
            handle = AgentHandle(self._generate, self._agent, trajectory)
            return await handle.generate(prompt, on_text=on_text, **options)
        finally:
            trajectory.close()
            trajectory.deadline.stop()


class ServedSessions:
    """As ``http_app.Sessions``: each request is a session of its own. The run's gateway has checked its key."""

    def __init__(self, agents: Mapping[str, ServedAgent], sampling: Mapping[str, ProgramSampling]) -> None:
        self._agents = agents
        self._sampling = sampling

    def session(self, name: str | None, key: str) -> Session:
        """A new one."""
        return Session(self._agents, {}, TrajectoryPrograms(self._sampling))


def served_agents(
    generate: Generate, agents: Mapping[AgentName, RolloutAgent], limit_s: float, life: str
) -> ServedSessions:
    """Sessions of all agents, whose turns any version of their policies may generate. ``limit_s`` and ``life``: see
    ``ServedAgent``."""
    versions = {settings.policy: VersionRange(Version(0), None) for settings in agents.values()}
    return ServedSessions(
        {agent: ServedAgent(generate, agent, versions, limit_s, life) for agent in agents},
        {
            agent: ProgramSampling(settings.sampling.max_new_tokens, is_training=False)
            for agent, settings in agents.items()
        },
    )
