"""The objects that the parts of an orchestrator share."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ...core.system import ActorSystem
from .failures import Failures
from .opponents.opponents import Opponents
from .orchestrator_setup import OrchestratorSetup
from .queries.run_queries import RunQueries
from .rollout_workers import RolloutWorkers
from .step_records import StepRecords


@dataclass(frozen=True, slots=True)
class RunParts:
    """``system``: called once the run has begun. ``tell_console``: the orchestrator's."""

    setup: OrchestratorSetup
    queries: RunQueries
    workers: RolloutWorkers
    opponents: Opponents
    records: StepRecords
    failures: Failures
    system: Callable[[], ActorSystem]
    tell_console: Callable[..., Awaitable[None]]
