"""Messages between rollout workers and the reward services of a run: calls of functions that compute rewards."""

from dataclasses import dataclass, field
from typing import Protocol

from ...core.actor import endpoint


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call of a function in another process.

    ``name``: of the function, for people. ``body``: the call as that process reads it. ``timeout_s``: of the
    computation alone. ``setting``: the one that gives it, for people. ``queue_timeout_s``: of the wait for a process
    that is free; None: no limit. ``retries``: times that the call begins again because its process has ended.
    """

    name: str
    body: bytes = field(repr=False)
    timeout_s: float
    setting: str = "timeout_s"
    queue_timeout_s: float | None = None
    retries: int = 0


@dataclass(frozen=True, slots=True)
class Computed:
    """The end of a ``FunctionCall``: an answer, or the reason for none.

    ``answer``: of the process, which has the function's result or error; empty if there is none: then ``problem`` is
    the reason. ``overran``: a deadline has passed. ``queue_s``, ``compute_s``: seconds until a process was free, and
    from then on. ``retries``: times that the call was begun again.
    """

    answer: bytes = field(default=b"", repr=False)
    problem: str = ""
    overran: bool = False
    queue_s: float = 0.0
    compute_s: float = 0.0
    retries: int = 0


class RewardsApi(Protocol):
    """A reward service. It has no state: any service may get any call, and again after a loss."""

    @endpoint
    async def compute(self, call: FunctionCall) -> Computed:
        """Calls the function in a process of the service, once one is free. If this is cancelled, the process that
        computes is killed."""
