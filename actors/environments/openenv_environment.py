"""Environments of OpenEnv (https://github.com/meta-pytorch/OpenEnv), for one agent: ``pip install openenv``.

The environment runs in a server; a trajectory has a session of it, a WebSocket, from ``reset`` to ``end``. The client
is the environment's own, or ``GenericEnvClient`` with dictionaries: nothing of openenv is imported here.
"""

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Mapping
from typing import Any

from ..errors import InvalidEnvironment
from ..messages import Query
from ..workflow import Rewards, Turn
from .environment import Says
from .stepped_environment import SteppedEnvironment


class OpenEnvEnvironment(SteppedEnvironment):
    """Derive from this class, and define ``make`` and ``action``:

        class Echo(OpenEnvEnvironment):
            def make(self, query):
                return GenericEnvClient(base_url="http://127.0.0.1:8000")

            def prompt(self, observation):
                return f"The server says: {observation['echoed_message']}. Answer: "

            def action(self, turn):
                return {"message": turn.text}

    A trajectory begins with ``reset(**query.data["reset"])``, whose keys depend on the environment: a seed, a task.
    Rewards: see ``SteppedEnvironment``. A server that does not answer within ``answer_timeout_s``, refuses a session or
    ends fails the trajectory.
    """

    answer_timeout_s = 60.0
    client: Any = None

    @abstractmethod
    def make(self, query: Query) -> Any:
        """A client of OpenEnv that is not connected yet, for one trajectory; it is closed at its end."""
        raise NotImplementedError

    def prompt(self, observation: Any) -> Says:
        """The new text, or the new messages, for the agent."""
        return f"{observation}\n"

    async def reset(self, query: Query) -> Mapping[str, Says] | Rewards:
        self.client = self.make(query)
        await self._answer("connect", self.client.connect())
        return self._next(await self._answer("reset", self.client.reset(**query.data.get("reset", {}))))

    async def step(self, turns: Mapping[str, Turn]) -> Mapping[str, Says] | Rewards:
        turn = turns[self.agent]
        result = await self._answer("step", self.client.step(self.action(turn)))
        self.paid.append((turn, float(result.reward or 0.0)))
        return self._next(result)

    def _next(self, result: Any) -> Mapping[str, Says] | Rewards:
        return self.rewards() if result.done else {self.agent: self.prompt(result.observation)}

    async def _answer(self, request: str, answer: Awaitable[Any]) -> Any:
        """Raises InvalidEnvironment with the request."""
        name = f"{type(self).__name__}.{request}"
        try:
            async with asyncio.timeout(self.answer_timeout_s):
                return await answer
        except TimeoutError:
            raise InvalidEnvironment(
                f"{name}: no answer of the environment's server within {self.answer_timeout_s:g} s"
            ) from None
        except (OSError, RuntimeError, ValueError) as error:
            raise InvalidEnvironment(f"{name}: the environment's server: {error}") from error

    async def end(self) -> None:
        if self.client is not None:
            await self._answer("close", self.client.close())
