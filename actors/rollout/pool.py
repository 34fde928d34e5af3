"""The instances of one agent as the rollout actor sees them: which version they serve, how busy each is."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from ...core.errors import WrongVersion
from ...core.ref import ActorRef
from ..messages import InstanceApi
from .balance import least_outstanding


class AgentPool:
    def __init__(self, agent: str, instances: Sequence[ActorRef[InstanceApi]]) -> None:
        self._agent = agent
        self._instances = list(instances)
        self._outstanding = [0] * len(instances)
        self._version = -1
        self._served: dict[int, asyncio.Event] = {}

    def serve(self, version: int) -> None:
        """Every instance has applied ``version``."""
        self._version = version
        for waited_for in [v for v in self._served if v <= version]:
            self._served.pop(waited_for).set()

    @asynccontextmanager
    async def instance(self, version: int) -> AsyncIterator[ActorRef[InstanceApi]]:
        """The instance with the least work, as soon as ``version`` is served.

        Waits without a deadline of its own: the trajectory's holds. Raises WrongVersion where a later version
        is served.
        """
        if version > self._version:
            await self._served.setdefault(version, asyncio.Event()).wait()
        if version != self._version:
            raise WrongVersion(self._agent, version, self._version)
        chosen = least_outstanding(self._outstanding)
        self._outstanding[chosen] += 1
        try:
            yield self._instances[chosen]
        finally:
            self._outstanding[chosen] -= 1
