"""The way of a program's request to its worker."""

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from ...actors.messages import CarriedAnswer, CarriedRequest


@dataclass(frozen=True, slots=True)
class CallRoute:
    """``prefix``: of the request's path at the worker, before ``/v1``. ``key``: the one that the worker expects.
    ``carry``: the worker's answer; raises ApiError if the worker is lost before its first part."""

    prefix: str
    key: str = field(repr=False)
    carry: Callable[[CarriedRequest], AsyncGenerator[CarriedAnswer]]
