"""The instances of one policy as the rollout actor sees them: the version they serve, their turns under way."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ...core.ref import ActorRef
from ..errors import WrongVersion
from ..messages import WORK_TIMEOUT_S, InstanceApi, VersionRange
from ..names import PolicyName, Version
from .balance import least_outstanding


class InstancePool:
    def __init__(self, policy: PolicyName, instances: Sequence[ActorRef[InstanceApi]]) -> None:
        self._policy = policy
        self._instances = list(instances)
        self._outstanding = [0] * len(instances)
        self._version = Version(-1)
        self._applied: dict[Version, asyncio.Event] = {}

    def weights_applied(self, version: Version) -> None:
        """Every instance has applied ``version``."""
        self._version = version
        for awaited in [v for v in self._applied if v <= version]:
            self._applied.pop(awaited).set()

    @property
    def version(self) -> Version:
        """The newest that all instances have applied; -1 before the first."""
        return self._version

    def has_applied(self, version: Version) -> bool:
        """True if all instances have applied ``version`` or a later one."""
        return version <= self._version

    async def wait_applied(self, version: Version) -> None:
        """Returns once all instances have applied ``version`` or a later one. Raises TimeoutError after a day."""
        async with asyncio.timeout(WORK_TIMEOUT_S):
            await self._applied.setdefault(version, asyncio.Event()).wait()

    @contextmanager
    def least_busy(self, versions: VersionRange) -> Iterator[ActorRef[InstanceApi]]:
        """The instance with the fewest turns under way; one more while the context lasts.

        Raises WrongVersion if the version served is not in ``versions``.
        """
        if self._version not in versions:
            raise WrongVersion(self._policy, versions.oldest, self._version)
        chosen = least_outstanding(self._outstanding)
        self._outstanding[chosen] += 1
        try:
            yield self._instances[chosen]
        finally:
            self._outstanding[chosen] -= 1
