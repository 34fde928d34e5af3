"""The outside services of a worker's workflows, and the table of their kinds."""

from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Final

from ..trajectory import Trajectory
from .reward_pool import RewardPool
from .service import Kind, OpenServices, ServiceWorker, WorkflowService
from .worker_processes import WorkerProcesses
from .worker_programs import WorkerPrograms
from .worker_sandbox import WorkerSandbox

SERVICES: Final[tuple[Callable[[ServiceWorker, OpenServices], WorkflowService], ...]] = (
    WorkerProcesses,
    RewardPool.of_worker,
    WorkerSandbox,
    WorkerPrograms,
)
"""In the order in which they are opened: a row may use those before it. They are closed in the reverse order."""


class WorkflowServices:
    """Opens all kinds for a worker."""

    def __init__(self, worker: ServiceWorker) -> None:
        """Raises OSError and UnsafeKeys for a file of keys that can't be read."""
        self._opened: list[WorkflowService] = []
        for open_service in SERVICES:
            self._opened.append(open_service(worker, self))

    def of(self, kind: type[Kind]) -> Kind:
        """See ``OpenServices``. Raises LookupError if its row is not before."""
        for service in self._opened:
            if isinstance(service, kind):
                return service
        raise LookupError(f"no row of SERVICES before this one opens {kind.__name__}")

    def enter(self, trajectory: Trajectory | None) -> None:
        """See ``WorkflowService.enter``."""
        for service in self._opened:
            service.enter(trajectory)

    async def close(self) -> None:
        """Closes all, the others too if one fails. Raises its error."""
        async with AsyncExitStack() as closing:
            for service in self._opened:
                closing.push_async_callback(service.close)
