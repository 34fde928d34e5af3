"""The sandbox of a worker that its config names (``rollout.sandbox``), for ``run_in_sandbox``."""

from ...environments.sandboxes.sandbox import current_sandbox
from ..trajectory import Trajectory
from .service import OpenServices, ServiceWorker
from .worker_processes import WorkerProcesses


class WorkerSandbox:
    """One for all workflows of the worker."""

    def __init__(self, worker: ServiceWorker, services: OpenServices) -> None:
        """Raises OSError, UnsafeKeys for the file of a server's key."""
        compute, folder = (
            services.of(WorkerProcesses).pool.run,
            worker.system.directory / f"sandbox-{worker.life}",
        )
        self._sandbox = worker.setup.config.sandbox.sandbox(compute, folder, worker.system.run_blocking)

    def enter(self, trajectory: Trajectory | None) -> None:
        """See ``WorkflowService.enter``."""
        current_sandbox.set(self._sandbox)

    async def close(self) -> None:
        """Ends what the sandbox has open."""
        await self._sandbox.close()
