"""The instances of one agent as the rollout actor sees them: which version they serve, how busy each is."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ...core.ref import ActorRef
from ..errors import WrongVersion
from ..messages import InstanceApi
from .balance import least_outstanding

# A step's training may be long; who hangs in it is found by other means, and ends the run.
_VERSION_TIMEOUT_S = 24 * 3600.0


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

    @property
    def version(self) -> int:
        """The newest that all instances have applied; -1 before the first."""
        return self._version

    def has_come_to(self, version: int) -> bool:
        return version <= self._version

    async def wait_for(self, version: int) -> None:
        """Until all instances have applied ``version`` or a later one. Raises TimeoutError after a day."""
        async with asyncio.timeout(_VERSION_TIMEOUT_S):
            await self._served.setdefault(version, asyncio.Event()).wait()

    @contextmanager
    def least_busy(self, version: int) -> Iterator[ActorRef[InstanceApi]]:
        """The instance with the fewest turns under way, this one counted while the context lasts.

        Raises WrongVersion where another version than ``version`` is served.
        """
        if version != self._version:
            raise WrongVersion(self._agent, version, self._version)
        chosen = least_outstanding(self._outstanding)
        self._outstanding[chosen] += 1
        try:
            yield self._instances[chosen]
        finally:
            self._outstanding[chosen] -= 1
