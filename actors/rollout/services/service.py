"""An outside service: something that workflows reach by a function, beside their agents.

A kind of service is one file beside this one, and one row of ``services.py``. It makes itself current by a context
variable that its function reads, waits in ``RolloutWaits.service``, and reports figures by ``Trajectory.add_figures``.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from ....core.system import ActorSystem
from ..rollout_setup import RolloutSetup
from ..rollout_waits import RolloutWaits
from ..trajectory import Trajectory

Kind = TypeVar("Kind")


@dataclass(frozen=True, slots=True)
class ServiceWorker:
    """The rollout worker that opens services. ``number``: its own, from 0. ``life``: names this life of the worker.
    ``recipe``: the recipe's folder."""

    setup: RolloutSetup
    number: int
    life: str
    recipe: Path
    system: ActorSystem
    waits: RolloutWaits


class WorkflowService(Protocol):
    """Made once in each worker, before the recipe's ``setup``. It starts nothing before a workflow needs it."""

    def enter(self, trajectory: Trajectory | None) -> None:
        """Makes itself current in the running task. ``trajectory``: whose workflow the task runs; None: it runs the
        recipe's ``setup``."""

    async def close(self) -> None:
        """Ends what it has open. No workflow waits for it any more."""


class OpenServices(Protocol):
    """The services that rows before this one have opened."""

    def of(self, kind: type[Kind]) -> Kind:
        """The service of this class."""
