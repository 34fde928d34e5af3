"""The way of a program's request to its worker."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from ...actors.gateway.model_call import ApiError
from ...actors.messages import WORK_TIMEOUT_S, CarriedAnswer, CarriedRequest, CarrierApi
from ...core.errors import ActorDead
from ...core.ref import ActorRef


@dataclass(frozen=True, slots=True)
class CallRoute:
    """``prefix``: of the request's path at the worker, before ``/v1``. ``key``: the one that the worker expects.
    ``carry``: the worker's answer; raises ApiError if the worker is lost before its first part."""

    prefix: str
    key: str = field(repr=False)
    carry: Callable[[CarriedRequest], AsyncGenerator[CarriedAnswer]]


async def carry(
    worker: ActorRef[CarrierApi], lost: Callable[[], ApiError], request: CarriedRequest
) -> AsyncGenerator[CarriedAnswer]:
    """The worker's answer. Raises the error that ``lost`` returns if the worker is lost before its first part, and
    ActorDead if it is lost later."""
    begun = False
    try:
        async with aclosing(worker.within(WORK_TIMEOUT_S).carry(request)) as parts:
            async for part in parts:
                yield part
                begun = True
    except ActorDead:
        error = lost()
        if not begun:
            raise error from None
        raise
