"""Parallel environments of PettingZoo (https://pettingzoo.farama.org), for several agents that move at once:
``pip install flexmarl[pettingzoo]``."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import InvalidEnvironment, LimitReached
from ..messages import Query
from ..workflow import Rewards, Turn
from .environment import Environment, Says

if TYPE_CHECKING:
    import pettingzoo


class ParallelEnvironment(Environment):
    """Derive from this class, and define ``make`` and ``action``, as for ``GymnasiumEnvironment``. The agents have the
    same names here and there. Each one's reward is the sum of the rewards of its steps; with ``by_turn = True`` each
    step's reward is that of its turn instead."""

    by_turn = False
    env: "pettingzoo.ParallelEnv[str, Any, Any] | None" = None

    @abstractmethod
    def make(self, query: Query) -> "pettingzoo.ParallelEnv[str, Any, Any]":
        """A new environment, for one trajectory; it is closed at its end."""
        raise NotImplementedError

    def prompt(self, agent: str, observation: Any, info: Mapping[str, Any]) -> Says:
        """The new text, or the new messages, for the agent."""
        return f"{observation}\n"

    @abstractmethod
    def action(self, agent: str, turn: Turn) -> Any:
        """The action of an answer. For an answer without one, return another action, or raise an error: the trajectory
        fails."""
        raise NotImplementedError

    async def reset(self, query: Query) -> Mapping[str, Says] | Rewards:
        self.paid: list[tuple[Turn, float]] = []
        self.steps = 0
        self.env = self.make(query)
        observations, infos = self.env.reset(seed=query.data.get("seed"))
        return self._next(observations, infos)

    async def step(self, turns: Mapping[str, Turn]) -> Mapping[str, Says] | Rewards:
        if self.env is None:
            raise InvalidEnvironment(f"{type(self).__name__}.step before reset")
        actions = {agent: self.action(agent, turn) for agent, turn in turns.items()}
        observations, rewards, _, _, infos = self.env.step(actions)
        self.paid += [(turns[agent], float(reward)) for agent, reward in rewards.items()]
        self.steps += 1
        return self._next(observations, infos)

    def _next(
        self, observations: Mapping[str, Any], infos: Mapping[str, Mapping[str, Any]]
    ) -> Mapping[str, Says] | Rewards:
        """The prompts of the agents that are left, or the rewards if no agent is left."""
        assert self.env is not None
        agents = self.env.agents
        if not agents:
            return self.rewards()
        return {agent: self.prompt(agent, observations[agent], infos.get(agent, {})) for agent in agents}

    def rewards(self) -> Rewards:
        """The rewards at the end, also at a limit of turns or tokens: of all agents that had a turn."""
        totals = dict.fromkeys(self.turns, 0.0)
        for turn, reward in self.paid:
            totals[turn.agent] += 0.0 if self.by_turn else reward
        rewards = Rewards(metrics={"steps": float(self.steps)}, **totals)
        for turn, reward in self.paid if self.by_turn else ():
            rewards.of(turn, reward)
        return rewards

    async def truncated(self, limit: LimitReached) -> Rewards:
        return self.rewards()

    async def end(self) -> None:
        if self.env is not None:
            self.env.close()
