"""A reward service: processes in which the rollout workers of a run have reward functions computed.

    rollout-0 ──┐                 ┌─> process
    rollout-1 ──┼─> compute ─> one queue ─> process
    rollout-2 ──┘                 └─> process

It has no state but its queue. If it is lost, its processes end with it, and the workers that wait ask another service,
or this one again once it is restarted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.actor import Actor, endpoint
from ...core.waits import Wait
from ..environments.process_pool import Processes
from ..messages import Computed, FunctionCall, RewardsApi


@dataclass(frozen=True, slots=True)
class RewardServiceSetup:
    """``folder``: the recipe's. ``processes``: at most. ``whole_tracebacks``: as a recipe's config has it."""

    folder: str
    processes: int
    whole_tracebacks: bool = False


class RewardService(Actor, RewardsApi):
    """Computes in the order of the calls, as many at once as it has processes."""

    def __init__(self, setup: RewardServiceSetup) -> None:
        self._setup = setup
        self._ended = 0

    async def on_start(self) -> None:
        setup = self._setup
        self._processes = Processes(setup.processes, setup.folder, whole_tracebacks=setup.whole_tracebacks)

    async def on_stop(self) -> None:
        await self._processes.close()

    @endpoint
    async def compute(self, call: FunctionCall) -> Computed:
        computed = await self._processes.compute(call)
        self._ended += 1
        return computed

    def progress(self) -> int:
        """Calls that have ended."""
        return self._ended

    def waits(self) -> Sequence[Wait]:
        return self._processes.waits.current()
