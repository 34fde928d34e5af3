"""The gateway of a run that serves its agents without training: requests with the key go to its workers in turn."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from ...actors.gateway.model_call import ApiError
from ...actors.messages import CarrierApi
from ...core.ref import ActorRef
from .call_route import CallRoute, carry
from .service_key import check_key


class ServedFront:
    """``key``: of all requests. ``workers``: each returns one, once it is there. ``start_timeout_s``: the time for
    that."""

    def __init__(
        self,
        key: str,
        workers: Sequence[Callable[[], Awaitable[ActorRef[CarrierApi]]]],
        start_timeout_s: float,
    ) -> None:
        self._key = key.encode()
        self._workers = itertools.cycle(workers)
        self._start_timeout_s = start_timeout_s

    def check_service(self, key: str) -> None:
        """See ``front_app.Calls``."""
        check_key(key, self._key)

    async def route(self, name: str | None, key: str) -> CallRoute:
        """See ``front_app.Calls``."""
        self.check_service(key)
        if name is not None:
            raise ApiError(409, "the agents are served without sessions: ask /v1", code="no_sessions")
        try:
            async with asyncio.timeout(self._start_timeout_s):
                worker = await next(self._workers)()
        except TimeoutError:
            problem = "no rollout worker has started yet"
            raise ApiError(503, problem, code="not_begun", retry_s=1) from None
        return CallRoute("", "", partial(carry, worker, _worker_lost))


def _worker_lost() -> ApiError:
    return ApiError(503, "the rollout worker was lost, and starts again", code="worker_lost", retry_s=1)
