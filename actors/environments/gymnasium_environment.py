"""Environments of gymnasium (https://gymnasium.farama.org), for one agent: ``pip install flexmarl[gymnasium]``."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import InvalidEnvironment
from ..messages import Query
from ..workflow import Rewards, Turn
from .environment import Says
from .stepped_environment import SteppedEnvironment

if TYPE_CHECKING:
    import gymnasium


class GymnasiumEnvironment(SteppedEnvironment):
    """Derive from this class, and define ``make`` and ``action``:

        class Lake(GymnasiumEnvironment):
            agent = "player"

            def make(self, query):
                return gymnasium.make("FrozenLake-v1", is_slippery=False)

            def prompt(self, observation, info):
                return f"You are on square {observation}. Your move: "

            def action(self, turn):
                return "LDRU".find(turn.text[:1]) % 4

    A trajectory begins with ``reset(seed=query.data["seed"])``. Rewards: see ``SteppedEnvironment``. These methods are
    plain functions, and run on the event loop, as gymnasium's do.
    """

    env: "gymnasium.Env[Any, Any] | None" = None

    @abstractmethod
    def make(self, query: Query) -> "gymnasium.Env[Any, Any]":
        """A new environment, for one trajectory; it is closed at its end."""
        raise NotImplementedError

    def prompt(self, observation: Any, info: Mapping[str, Any]) -> Says:
        """The new text, or the new messages, for the agent."""
        return f"{observation}\n"

    async def reset(self, query: Query) -> Mapping[str, Says]:
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

    async def end(self) -> None:
        if self.env is not None:
            self.env.close()
