"""Environments of gymnasium (https://gymnasium.farama.org), for one agent: ``pip install flexmarl[gymnasium]``."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import InvalidEnvironment, LimitReached
from ..messages import Query
from ..workflow import Rewards, Turn
from .environment import Environment, Says

if TYPE_CHECKING:
    import gymnasium


class GymnasiumEnvironment(Environment):
    """Derive from this class, and define ``make`` and ``action``:

        class Lake(GymnasiumEnvironment):
            agent = "player"

            def make(self, query):
                return gymnasium.make("FrozenLake-v1", is_slippery=False)

            def prompt(self, observation, info):
                return f"You are on square {observation}. Your move: "

            def action(self, turn):
                return "LDRU".find(turn.text[:1]) % 4

    The agent's reward is the sum of the rewards of its steps. With ``by_turn = True`` each step's reward is that of its
    turn instead, for algorithms whose ``rewards`` are ``turn`` or ``both``. A trajectory begins with
    ``reset(seed=query.data["seed"])``. These methods are plain functions, and run on the event loop, as gymnasium's do.
    """

    agent = "player"
    by_turn = False
    env: "gymnasium.Env[Any, Any] | None" = None

    @abstractmethod
    def make(self, query: Query) -> "gymnasium.Env[Any, Any]":
        """A new environment, for one trajectory; it is closed at its end."""
        raise NotImplementedError

    def prompt(self, observation: Any, info: Mapping[str, Any]) -> Says:
        """The new text, or the new messages, for the agent."""
        return f"{observation}\n"

    @abstractmethod
    def action(self, turn: Turn) -> Any:
        """The action of an answer. For an answer without one, return another action, or raise an error: the trajectory
        fails."""
        raise NotImplementedError

    async def reset(self, query: Query) -> Mapping[str, Says]:
        self.paid: list[tuple[Turn, float]] = []
        self.env = self.make(query)
        observation, info = self.env.reset(seed=query.data.get("seed"))
        return {self.agent: self.prompt(observation, info)}

    async def step(self, turns: Mapping[str, Turn]) -> Mapping[str, Says] | Rewards:
        if self.env is None:
            raise InvalidEnvironment(f"{type(self).__name__}.step before reset")
        turn = turns[self.agent]
        observation, reward, terminated, truncated, info = self.env.step(self.action(turn))
        self.paid.append((turn, float(reward)))
        return self.rewards() if terminated or truncated else {self.agent: self.prompt(observation, info)}

    def rewards(self) -> Rewards:
        """The rewards at the end, also at a limit of turns or tokens."""
        total = sum(reward for _, reward in self.paid)
        metrics = {"return": total, "steps": float(len(self.paid))}
        if not self.by_turn:
            return Rewards(metrics=metrics, **{self.agent: total})
        rewards = Rewards(metrics=metrics, **{self.agent: 0.0})
        for turn, reward in self.paid:
            rewards.of(turn, reward)
        return rewards

    async def truncated(self, limit: LimitReached) -> Rewards:
        return self.rewards()

    async def end(self) -> None:
        if self.env is not None:
            self.env.close()
