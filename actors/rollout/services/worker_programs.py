"""The gateway of a worker, by which programs of its workflows ask the agents, for ``open_gateway``."""

from ...gateway.gateway import current_server
from ...gateway.server import GatewayServer
from ...gateway.trajectory_programs import ProgramSampling, current_programs
from ..trajectory import Trajectory
from .service import OpenServices, ServiceWorker


class WorkerPrograms:
    """``server``: of all sessions of the worker, also of those that programs outside the run have opened."""

    def __init__(self, worker: ServiceWorker, services: OpenServices) -> None:
        self._agents = worker.setup.agents
        self.server = GatewayServer(worker.setup.config.gateway, worker.number)

    def enter(self, trajectory: Trajectory | None) -> None:
        """See ``WorkflowService.enter``. The recipe's ``setup`` has no agents to ask."""
        if trajectory is None:
            return
        current_server.set(self.server)
        current_programs.set(trajectory.programs)
        trajectory.programs.sampling = {
            agent: ProgramSampling(settings.sampling.max_new_tokens, not trajectory.is_evaluation)
            for agent, settings in self._agents.items()
        }

    async def close(self) -> None:
        """Ends the server, and with it all connections."""
        await self.server.close()
