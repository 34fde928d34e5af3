"""The processes of a worker, for ``in_process``."""

from ...environments.process_pool import Processes, current_pool
from ..trajectory import Trajectory
from .service import OpenServices, ServiceWorker


class WorkerProcesses:
    """``pool``: of all workflows of the worker, of its ``setup``, and of other services."""

    def __init__(self, worker: ServiceWorker, services: OpenServices) -> None:
        setup = worker.setup
        whole_tracebacks = setup.recipe.whole_tracebacks
        self.pool = Processes(setup.config.processes, str(worker.recipe), whole_tracebacks=whole_tracebacks)

    def enter(self, trajectory: Trajectory | None) -> None:
        """See ``WorkflowService.enter``."""
        current_pool.set(self.pool)

    async def close(self) -> None:
        """Kills them."""
        await self.pool.close()
