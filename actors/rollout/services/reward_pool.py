"""A rollout worker's way to the processes that compute rewards: those of the run's services, or its own.

A worker knows its own calls alone. It asks the service on its host while that has a process for each of them; beyond
that, the one with the fewest. A call to a service that is lost goes to another one, or waits until it is restarted.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Final

from ....core.errors import ActorDead
from ....core.ref import ActorRef
from ...columns.store_client import through_restarts
from ...environments.process_calls import call_of, end_of
from ...environments.process_pool import START_S, Processes
from ...environments.reward_calls import current_reward_pool
from ...environments.rewards_config import RewardsConfig
from ...messages import Computed, FunctionCall, RewardsApi
from ..rollout_waits import RolloutWaits
from ..trajectory import Trajectory
from .service import OpenServices, ServiceWorker
from .worker_processes import WorkerProcesses

_SLACK_S: Final = 60.0
_AGAIN_S: Final = 5.0
"""A service that was lost is not asked for so long, if there is another."""


def choose_service(open_calls: Sequence[int], near: int, processes: int, lost: Collection[int] = ()) -> int:
    """The number of the service for the next call: ``near`` while it has a process for each call, else the one with
    the fewest calls. ``open_calls``: this worker's, by service. ``lost``: services that are asked only if all are."""
    candidates = [number for number in range(len(open_calls)) if number not in lost] or range(len(open_calls))
    if near in candidates and open_calls[near] < processes:
        return near
    return min(candidates, key=lambda number: (open_calls[number], number != near, number))


class RewardPool:
    """``services``: those of the run; without any, calls are computed by ``processes``, the worker's own."""

    def __init__(
        self,
        services: Sequence[ActorRef[RewardsApi]],
        config: RewardsConfig,
        worker: int,
        processes: Processes,
        waits: RolloutWaits,
    ) -> None:
        """``worker``: its number; the service of the same number is on its host."""
        self._services, self._config, self._processes, self._waits = services, config, processes, waits
        self._near = worker % len(services) if services else 0
        self._open = [0] * len(services)
        self._lost_at: dict[int, float] = {}

    @classmethod
    def of_worker(cls, worker: ServiceWorker, services: OpenServices) -> "RewardPool":
        """A worker's, which asks the services of its run."""
        setup, processes = worker.setup, services.of(WorkerProcesses).pool
        return cls(setup.reward_services, setup.rewards, worker.number, processes, worker.waits)

    def enter(self, trajectory: Trajectory | None) -> None:
        """See ``WorkflowService.enter``. A call has its trajectory's deadline: the recipe's ``setup`` has none."""
        if trajectory is not None:
            current_reward_pool.set(self.of(trajectory))

    async def close(self) -> None:
        """Does nothing: the services are the run's, and the processes the worker's."""

    def of(self, trajectory: Trajectory) -> "TrajectoryRewardPool":
        """The pool of a trajectory's workflow."""
        return TrajectoryRewardPool(self, trajectory)

    def call(
        self, function: Callable[..., Any], args: Sequence[Any], timeout_s: float | None
    ) -> FunctionCall:
        """Raises as ``call_of`` does."""
        config, setting = self._config, "rewards.timeout_s" if timeout_s is None else "timeout_s"
        limit_s = config.timeout_s if timeout_s is None else timeout_s
        return call_of(function, args, limit_s, setting, config.queue_timeout_s, config.retries)

    async def compute(self, call: FunctionCall, trajectory: Trajectory) -> Computed:
        """Raises ActorDead if no service comes back in time."""
        if not self._services:
            with self._wait(call, trajectory, "in a process of this worker", ""):
                return await self._processes.compute(call)
        losses = 0

        async def ask() -> Computed:
            nonlocal losses
            now = asyncio.get_running_loop().time()
            lost = [number for number, at in self._lost_at.items() if now - at < _AGAIN_S]
            number = choose_service(self._open, self._near, self._config.processes, lost)
            service = self._services[number]
            self._open[number] += 1
            try:
                with self._wait(call, trajectory, f"from {service.name}", service.name):
                    return await service.within(_most_s(call)).compute(call)
            except ActorDead:
                losses += number not in lost  # else it is not restarted yet
                self._lost_at[number] = asyncio.get_running_loop().time()
                raise
            finally:
                self._open[number] -= 1

        computed = await through_restarts(ask)
        return replace(computed, retries=computed.retries + losses)

    def _wait(
        self, call: FunctionCall, trajectory: Trajectory, where: str, actor: str
    ) -> AbstractContextManager[None]:
        limit = f"{call.setting}={call.timeout_s:g} ends it, or rewards.queue_timeout_s"
        return self._waits.service(trajectory, f"the result of {call.name} {where}", limit, actor)


class TrajectoryRewardPool:
    """The reward calls of one trajectory: its deadline pauses meanwhile, and it has their figures."""

    def __init__(self, pool: RewardPool, trajectory: Trajectory) -> None:
        self._pool, self._trajectory = pool, trajectory

    async def run(self, function: Callable[..., Any], args: Sequence[Any], timeout_s: float | None) -> Any:
        """See ``compute_reward``."""
        call = self._pool.call(function, args, timeout_s)
        trajectory = self._trajectory
        assert trajectory.deadline is not None, "it runs"
        # The call has a deadline of its own, and the queue is that of other trajectories.
        with trajectory.deadline.paused():
            computed = await self._pool.compute(call, trajectory)
        trajectory.add_figures(_figures(computed))
        return end_of(function, call, computed)


def _figures(computed: Computed) -> Mapping[str, float]:
    return {
        "reward_calls": 1,
        "reward_queue_s": computed.queue_s,
        "reward_compute_s": computed.compute_s,
        "repeated_rewards": computed.retries,
        "overrun_rewards": int(computed.overran),
    }


def _most_s(call: FunctionCall) -> float:
    """The most that a service needs, which reports an expired deadline itself: this one is for a service that hangs."""
    return (call.queue_timeout_s or 0.0) + (1 + call.retries) * (call.timeout_s + START_S) + _SLACK_S
