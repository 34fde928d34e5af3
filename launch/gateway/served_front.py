"""The gateway of a run that serves its agents without training: requests with the key go to its workers in turn."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial

from ...actors.gateway.model_call import ApiError
from ...actors.messages import WORK_TIMEOUT_S, CarriedAnswer, CarriedRequest, CarrierApi
from ...core.errors import ActorDead
from ...core.ref import ActorRef
from .call_route import CallRoute
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
            raise ApiError(503, "no rollout worker has started yet", code="not_begun") from None
        return CallRoute("", "", partial(_carry, worker))


async def _carry(worker: ActorRef[CarrierApi], request: CarriedRequest) -> AsyncGenerator[CarriedAnswer]:
    begun = False
    try:
        async with aclosing(worker.within(WORK_TIMEOUT_S).carry(request)) as parts:
            async for part in parts:
                yield part
                begun = True
    except ActorDead:
        if not begun:
            raise ApiError(503, "the rollout worker was lost, and starts again", code="worker_lost") from None
        raise
